"""What the five benchmark modules share: verdicts, data files, sampling of records, intervals.

What of the paper this is: nothing; the paper reports five benchmarks and ships no evaluation code.
How it is run: it is not; `python -m eval` and the benchmark modules call it. Each benchmark is one
flat module with the same few functions, so that a reader who knows one knows all:

    load(data, split="test")  -> list of records, each with "id" and "category"
    prompt(record)            -> chat messages (list of {"role", "content"})
    gold(record)              -> the response text a perfect model would give, or None
    score(record, response)   -> Verdict; pure, never raises on any text, never executes text
    aggregate(records, verdicts) -> {"score": percent, "n": int, "categories": {...}}
    verify(data, rows)        -> yields (kind, agrees, detail) per recorded verdict (golden format);
                                 agrees None = cannot be decided here, counted apart
    base_task(record)         -> optional: a training record as {"task", "tools"?, "calls"?,
                                 "results"?, "reference"?}, the record format of --base-tasks

and the constants NAME, PAPER (the paper's figures in percent, by system), MAX_NEW_TOKENS, VARIANTS
({name: (arguments of load, arguments of score)}, other protocols or parts of the benchmark) and
REQUIRED (agreement with recorded verdicts that `verify` asks for, by kind).
"""
import gzip
import hashlib
import json
import re
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support import cli
from support.files import UserError


@dataclass
class Verdict:
    """The result of one response.

    ok: the benchmark's own pass/fail; score: in [0, 1], what the mean is taken of;
    reason: one plain sentence; extra: further metrics of the benchmark (F1, per-constraint...).
    """
    ok: bool
    score: float
    reason: str
    extra: dict = field(default_factory=dict)


def verdict(reason: str, right: str) -> Verdict:
    """Pass or fail from the reason of failure; "" is a pass, whose reason is `right`."""
    return Verdict(not reason, float(not reason), reason or right)


# ---------------------------------------------------------------------------------------------
# commands and their errors


def exit_code(command, *arguments) -> int:
    """Call command(*arguments), which returns its exit code; see common/cli.py."""
    return cli.exit_code(lambda: command(*arguments), "eval",
                         "the same command continues from the responses so far")


@contextmanager
def one_line_for(where: str, *more):
    """Inside, data of the wrong shape (a field missing or of another type) are a UserError.

    more: further exceptions that mean this.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, AssertionError,
            *more) as error:
        raise UserError(f"{where}: malformed ({type(error).__name__}: "
                        f"{one_line(error, 60)})") from None


# ---------------------------------------------------------------------------------------------
# data files


def data_dir(data, bench: str) -> Path:
    """The folder of one benchmark: `data/bench` where it exists, else `data` itself.

    Raises UserError when neither is a folder.
    """
    root = Path(data)
    for folder in (root / bench, root):
        if folder.is_dir():
            return folder
    raise UserError(f"no data folder {data}: pass --data DIR (data table: eval/README.md)")


def read_text(path) -> str:
    """A text file, unpacked where its name ends in .gz.

    Raises UserError naming the file when it is missing, unreadable or not UTF-8.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file (see the data table in eval/README.md)")
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)})") from None


def read_rows(path, fields=(), nonempty=False) -> list[dict]:
    """JSON objects of a .jsonl or .jsonl.gz file, one per line.

    fields: see check_record; nonempty: a file without records is an error too. Raises UserError
    naming file and record for everything else than JSON objects with these fields.
    """
    # splitlines() would also cut at U+2028 and its kin, which JSON allows inside a string
    rows = [parse_row(line, f"{path}, record {number}", fields)
            for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if nonempty and not rows:
        raise UserError(f"{path}: holds no records")
    return rows


def read_array(path, fields=()) -> list[dict]:
    """The records of a file that holds one JSON array; fields and errors as in read_rows."""
    rows = parse_json(read_text(path), path)
    if not isinstance(rows, list):
        raise UserError(f"{path}: expected a JSON array of records")
    for number, row in enumerate(rows):
        check_record(row, f"{path}, record {number}", fields)
    return rows


def parse_row(line: str, where: str, fields=()) -> dict:
    """One JSON object with these fields, or UserError starting with `where`."""
    row = parse_json(line, where)
    check_record(row, where, fields)
    return row


def parse_json(text: str, where):
    """A JSON value, or UserError starting with `where`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({one_line(error)})") from None


TYPE_NAMES = {str: "text", int: "a whole number", bool: "true or false", list: "a list",
              dict: "an object"}


def check_record(row, where: str, fields):
    """UserError unless `row` is an object with these fields: names, or {name: type}."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(row).__name__}")
    missing = [key for key in fields if key not in row]
    if missing:
        raise UserError(f"{where}: no {', '.join(map(repr, missing))}")
    for key, kind in fields.items() if isinstance(fields, dict) else ():
        if not isinstance(row[key], kind):
            raise UserError(f"{where}: {key!r} is not {TYPE_NAMES[kind]}")


def one_line(error, width: int = 160) -> str:
    """The text of an exception, or a text, on one printable line of at most `width` characters."""
    text = " ".join((str(error) or type(error).__name__).split())[:width]
    return text.encode("utf-8", "backslashreplace").decode()  # model text may hold lone surrogates


def folder_hash(folder) -> str:
    """sha256 over names and contents of all files below a folder, in name order."""
    digest, folder = hashlib.sha256(), Path(folder)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def file_name(text: str) -> str:
    """A model's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"


# ---------------------------------------------------------------------------------------------
# which records, and how sure the score is


def spread(records: list, limit) -> list:
    """At most `limit` records, evenly spread over the categories; no chance involved.

    Every category gets one record while there are enough, the rest goes by size (largest
    remainder), so that the sample's mean estimates that of the whole set. Within a category the
    picks are equally spaced. The order of the records is kept. Raises UserError if limit < 1.
    """
    if limit is None:
        return records
    if limit < 1:
        raise UserError(f"--limit must be at least 1, not {limit}")
    groups = {}
    for index, record in enumerate(records):
        groups.setdefault(record.get("category"), []).append(index)
    limit = min(limit, len(records))
    floor = 1 if limit >= len(groups) else 0
    free = limit - floor * len(groups)
    # share of each category beyond its first record, in records
    share = {c: free * (len(g) - floor) / max(1, len(records) - floor * len(groups))
             for c, g in groups.items()}
    quota = {c: floor + int(share[c]) for c in groups}
    by_remainder = sorted(groups, key=lambda c: int(share[c]) - share[c])
    for category in by_remainder[:limit - sum(quota.values())]:
        quota[category] += 1
    picks = [g[(2 * i + 1) * len(g) // (2 * quota[c])]
             for c, g in groups.items() for i in range(quota[c])]
    return [records[i] for i in sorted(picks)]


def wilson(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a share of n trials, in percent. n = 0: (0, 100).

    Unlike the normal interval it keeps its level, and a width, at 0 % and 100 %.
    """
    if n == 0:
        return 0.0, 100.0
    p = successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def bootstrap(records, verdicts, aggregate, seed: int, draws: int = 1000) -> tuple[float, float]:
    """Percentile interval (95 %) of aggregate()["score"] over records drawn with replacement.

    For scores that are no plain share: means of F1 or of several rates. The generator is explicit,
    so the same seed gives the same interval.
    """
    import numpy as np
    generator = np.random.default_rng(seed)
    scores = []
    for _ in range(draws):
        picks = generator.integers(0, len(records), len(records))
        scores.append(aggregate([records[i] for i in picks],
                                [verdicts[i] for i in picks])["score"])
    low, high = np.percentile(scores, [2.5, 97.5])
    return float(low), float(high)


def interval(records, verdicts, aggregate, score: float, seed: int) -> dict:
    """{"low", "high", "method"} in percent: Wilson when the score is passes / n, else bootstrap."""
    n, passed = len(verdicts), sum(v.ok for v in verdicts)
    if all(v.score in (0, 1) for v in verdicts) and n and abs(score - 100 * passed / n) < 1e-9:
        low, high = wilson(passed, n)
        return {"low": low, "high": high, "method": "Wilson"}
    low, high = bootstrap(records, verdicts, aggregate, seed)
    return {"low": low, "high": high, "method": f"bootstrap (1,000 draws, seed {seed})"}


def mean_by(records, verdicts, key) -> dict:
    """{key(record): {"score": percent, "n": count}} in order of first appearance."""
    groups = {}
    for record, verdict in zip(records, verdicts):
        groups.setdefault(key(record), []).append(verdict.score)
    return {name: {"score": 100 * sum(s) / len(s), "n": len(s)} for name, s in groups.items()}


def between(text: str, opening: str, closing: str):
    """What stands between `opening` and the next `closing`, again and again, in linear time."""
    end = 0
    while (start := text.find(opening, end)) >= 0:
        start += len(opening)
        stop = text.find(closing, start)
        if stop < 0:
            return
        yield text[start:stop]
        end = stop + len(closing)


def mean_score(records, verdicts) -> dict:
    """The aggregate of most benchmarks: the mean score in percent, over all and per category."""
    return {"score": 100 * sum(v.score for v in verdicts) / max(1, len(verdicts)),
            "n": len(verdicts),
            "categories": mean_by(records, verdicts, lambda r: r["category"])}


# ---------------------------------------------------------------------------------------------
# recorded verdicts


def agreement(kind: str, name: str, row: dict, ours: Verdict) -> tuple:
    """What `verify` yields for an official verdict that is pass or fail."""
    official = bool(row["official_verdict"])
    return kind, ours.ok == official, (f"{name} ({row.get('kind', '')}): official {official}, "
                                       f"ours {ours.ok}: {ours.reason}")
