"""Run the walkthroughs again: `python -m walkthroughs [--write] [1 2 3 4 5]`, see __init__.py."""
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?(?![\w.])"


def fresh(script) -> str:
    """What a walkthrough prints. Raises SystemExit with its last words if it fails."""
    # one thread: another number of them rounds differently
    done = subprocess.run([sys.executable, str(script)], cwd=HERE.parent, text=True,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{script.name} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def differences(committed: str, printed: str) -> list[str]:
    """Lines that are not the committed ones: text exactly, numbers to a unit of their last digit.

    Where both name a base model (walkthroughs.fingerprint) and it is another one, what a model
    wrote is not compared, and of numbers only that there are as many.
    """
    models = [re.findall(r"^base model (\w+)$", text, re.M) for text in (committed, printed)]
    other = models[0] != models[1] and all(models)
    old, new = committed.splitlines(), printed.splitlines()
    if other:  # a table may have a row more or less: rows are numbers only
        old, new = ([line for line in text if not _of_the_model(line)] for text in (old, new))
    found = [f"{len(old)} lines are committed, {len(new)} were printed"] * (len(old) != len(new))
    for a, b in zip(old, new):
        if re.sub(NUMBER, "#", a).split() != re.sub(NUMBER, "#", b).split() or \
                not other and not all(map(_near, re.findall(NUMBER, a), re.findall(NUMBER, b))):
            found.append(f"- {a}\n+ {b}")
    return found


def _of_the_model(line) -> bool:
    """What another base model may write otherwise: quotes, its own name, rows of a table."""
    return line.startswith(("  > ", "base model ")) or \
        not re.sub(NUMBER + r"|\b(yes|no)\b|-", "", line).strip()


def _near(a: str, b: str) -> bool:
    """Whether two numbers differ by at most one unit of the last digit printed."""
    digits = len(a.partition(".")[2]) if "e" not in a else 0
    return abs(float(a) - float(b)) <= 1.001 * 10.0 ** -digits * ("." in a)


def main(argv=None) -> int:
    """Exit code 1 if a walkthrough prints something else than what is committed."""
    argv = sys.argv[1:] if argv is None else argv
    chosen = [word for word in argv if word != "--write"]
    changed = 0
    for script in sorted(HERE.glob("[1-9]_*.py")):
        if chosen and script.name[0] not in chosen:
            continue
        text, kept = fresh(script), script.with_suffix(".out.txt")
        found = differences(kept.read_text(), text) if kept.is_file() else ["nothing is committed"]
        print(f"{script.name}: " + ("as committed" if not found else "\n".join(found)), flush=True)
        if "--write" in argv:
            kept.write_text(text)
        else:
            changed += bool(found)
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
