"""Run the paper's ablations: variants over several seeds, each run in its own process.

Paper: RQ1 to RQ4, Figures 4 to 8. Every variant makes the same number of agent updates from the
same number of rollouts.

Usage:
    python -m scripts.experiments ladder --seeds 5            # on the default world
    python -m scripts.experiments household --seeds 5
    python -m scripts.experiments words --model "starts/stale-{seed}" --out results/mine
    python -m scripts.experiments mine                        # any world, your own included
    python -m scripts.experiments cross --seeds 10 --first-seed 20    # see cross_cells
    python -m scripts.experiments cross2 --seeds 10 --first-seed 30   # see cross2_cells
    # other options are passed to every run
    python -m scripts.experiments ladder --seeds 1 --epochs 2 --out results/mine

To resume an interrupted suite, repeat its command: results/SUITE.jsonl has one line per finished
run, and unfinished runs are in runs/SUITE. At the end, results/SUITE.md has the means with 95 %
t-intervals over seeds, and differences paired by seed.

"{seed}" in an option is replaced with the seed. If each seed gets its own base model in this way,
the intervals are over base models, too. Seed 0 uses the base model in the repository; `python -m
worlds.ladder train 1 runs/base/ladder-1` trains another.

Deviations: every run has one thread and one seed; scripts/tables.py explains how runs are compared
at equal time.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from data_pool import append_jsonl, read_jsonl
from errors import UserError, exit_code
from scripts.tables import table
from support.options import Options, Parser, at_least
from worlds import load_world, world_names

ROOT = Path(__file__).resolve().parent.parent
TEACHER = "runs/teacher-1777.jsonl"
TIMES = 1777 / 544  # size of the paper's larger teacher set divided by that of its base set
STEERED = ["--alpha-schedule", "integral", "--k-min", "0.45", "--lam", "6", "--beta", "8"]
HALF_RATE = ["--agent-lr", "1e-3"]


def cross_cells() -> dict:
    """Return {cell: options} of the suite `cross`, on the ladder.

    A cell is a combination of settings: simulator trained or not, seed tasks curated or not, and
    one of these: a share of base tasks, or an alpha that follows success (at the agent's full or
    half learning rate).
    """
    cells = {}
    for variant in ("genenv", "random"):
        for selection in ("uniform", "curated"):
            options = ["--variant", variant, "--seed-selection", selection]
            name = f"{variant}, {selection}"
            cells[f"{name}, share 0.75"] = [*options, "--base-share", "0.75"]
            cells[f"{name}, share 0.25"] = [*options, "--base-share", "0.25"]
            cells[f"{name}, steered"] = [*options, *STEERED]
            cells[f"{name}, steered, half rate"] = [*options, *STEERED, *HALF_RATE]
        # With share 1 no written task becomes a seed task, so there is nothing to curate.
        cells[f"{variant}, share 1"] = ["--variant", variant, "--base-share", "1"]
    return cells


def cross2_cells() -> dict:
    """Return {cell: options} of the suite `cross2`, with what `cross` left out: a base share of a
    quarter combined with an alpha that follows success. Three cells of `cross` are run again on the
    base models of the new cells."""
    integral = ["--alpha-schedule", "integral"]
    budget = ["--token-budget", "16384"]  # the ladder's default when the first runs were made
    cells = {"genenv, default": budget}
    for selection in ("uniform", "curated"):
        options = [*budget, "--base-share", "0.25", "--seed-selection", selection]
        cells[f"genenv, {selection}, integral"] = [*options, *integral]
        cells[f"genenv, {selection}, steered"] = [*options, *STEERED]
        cells[f"random, {selection}"] = ["--variant", "random", *options]
    # If the simulator is not trained, the other options of STEERED have no effect.
    cells["random, curated, integral"] = [*cells["random, curated"], *integral]
    return cells


def cross2_comparisons() -> list:
    """Return pairs (cell, cell to subtract) that were named before the runs."""
    rival = "random, curated, integral"
    trained = [name for name in cross2_cells() if name.startswith("genenv")]
    return [(name, rival) for name in trained] + [
        (rival, "random, curated"), (rival, "random, uniform"),
        ("random, curated", "genenv, default"),
        ("genenv, uniform, integral", "random, uniform"),
        ("genenv, uniform, steered", "genenv, uniform, integral"),
        ("genenv, curated, steered", "genenv, curated, integral"),
        ("genenv, curated, steered", "genenv, default")]


def cross_comparisons() -> list:
    """Return pairs (cell, cell to subtract): trained minus untrained under each condition, other
    pairs with a prediction, and pairs named afterwards."""
    pairs = []
    for condition in ("share 0.75", "share 0.25", "steered", "steered, half rate"):
        for selection in ("uniform", "curated"):
            cell = f"{selection}, {condition}"
            pairs.append((f"genenv, {cell}", f"random, {cell}"))
    pairs.append(("genenv, share 1", "random, share 1"))
    for condition in ("share 0.75", "steered", "steered, half rate"):
        pairs.append((f"genenv, uniform, {condition}", f"random, curated, {condition}"))
    for condition in ("steered", "steered, half rate"):
        pairs.append((f"genenv, curated, {condition}", f"genenv, uniform, {condition}"))
    # This cell ignores alpha: any difference other than 0 would put all results in doubt.
    pairs.append(("random, uniform, steered", "random, uniform, share 0.75"))
    # These were named afterwards: steered, and the untrained simulator that rivals it.
    default, steered = "genenv, uniform, share 0.75", "genenv, uniform, steered"
    rival = "random, curated, share 0.25"
    pairs += [(steered, default), (rival, default), (steered, rival)]
    pairs.append((f"{steered}, half rate", default))
    return pairs


RIVALS = {
    "genenv": [],
    "random": ["--variant", "random"],
    "random, curated seeds": ["--variant", "random", "--seed-selection", "curated"],
    "static": ["--variant", "static"]}
# One more rival, for worlds without a suite of their own: seed tasks near alpha, few base tasks.
WELL_CHOSEN = {
    "random, curated, share 0.25": [*RIVALS["random, curated seeds"], "--base-share", "0.25"]}

# {suite: options that all its runs share}
BASES = {
    "ladder": ["--model", "runs/base/ladder-{seed}"],
    "household": ["--world", "household", "--model", "runs/base/household-{seed}",
                  "--val-every", "1"],
    "words": [],  # takes --model "FOLDER-{seed}", folders that warm starts have made
    "cross": ["--model", "runs/base/ladder-{seed}"],
    "cross2": ["--model", "runs/base/ladder-{seed}"]}

# {suite: {variant: options}}; the first variant is compared with each of the others
SUITES = {
    "ladder": {
        **RIVALS,
        "genenv, steered": [*STEERED, *HALF_RATE],
        "teacher 3.27x": ["--variant", "teacher", "--teacher-tasks", TEACHER]},
    "household": RIVALS,
    "words": RIVALS,
    "cross": cross_cells(),
    "cross2": cross2_cells()}

for world_name in world_names():  # every other world, a user's own included
    BASES.setdefault(world_name, ["--world", world_name])
    SUITES.setdefault(world_name, {**RIVALS, **WELL_CHOSEN})

# Keep these fields of each epoch: what the tables show, and what explains it.
KEPT = (
    "epoch", "success_rate", "mixed_share", "validation", "validation_by", "cpu_seconds", "alpha",
    "mixed_of_possible", "entropy", "env_kl", "validation_greedy")


# ---------------------------------------------------------------------------------------------
# runs


def run_suite(suite: str, seeds: range, only, extra, jobs: int, results: Path):
    """Run what a suite's results file lacks, `jobs` runs at a time, seed by seed."""
    settings = [*BASES[suite], *extra]
    done = read_jsonl(results) if results.is_file() else []
    if any(r["settings"] != settings for r in done):
        raise UserError(f"{results} holds runs with other settings: move it away first")
    finished = {(r["name"], r["seed"]) for r in done}
    queue = []
    for seed in seeds:
        for name in only or SUITES[suite]:
            if (name, seed) not in finished:
                queue.append((name, seed, filled([*settings, *SUITES[suite][name]], seed)))

    running = []
    try:
        while queue or running:
            while queue and len(running) < jobs:
                running.append(start(suite, *queue.pop(0)))
            time.sleep(0.5)
            for job in list(running):
                process, name, seed, folder = job
                if process.poll() is not None:
                    running.remove(job)
                    metrics = collect(process, folder)
                    append_jsonl(results, [{"name": name, "seed": seed, "metrics": metrics,
                                            "settings": settings}])
                    print(f"{name}, seed {seed}: done", flush=True)
    finally:  # no run outlives the suite after a failure or Ctrl-C; the next call resumes them
        for process, *_ in running:
            process.kill()
            process.wait()


def filled(words, seed: int) -> list:
    """Return options with the seed filled in. Raise UserError if a base model has not been trained
    yet."""
    options = [word.replace("{seed}", str(seed)) for word in words]
    for i, word in enumerate(options):
        if word.startswith("runs/base/") and not Path(word).is_dir():
            world = Path(word).name.partition("-")[0]
            if seed:
                raise UserError(
                    f"no {word} yet, train it: python -m worlds.{world} train {seed} {word}")
            options[i] = f"worlds/base/{world}"
    return options


def start(suite, name, seed, options):
    """Start or resume one run on one thread; return (process, name, seed, folder)."""
    label = re.sub("[^a-z0-9]", "-", name)
    folder = Path("runs") / suite / f"{label}-{seed}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    if TEACHER in options and not Path(TEACHER).is_file():
        world = load_world("ladder")(Options())
        world.write_teacher(round(TIMES * len(world.base_tasks())), TEACHER)
    argv = ["genenv.py", "--seed", str(seed), "--threads", "1", "--out", str(folder), *options]
    if (folder / "config.json").is_file():
        argv.append("--resume")
    with open(f"{folder}.log", "a") as log:
        process = subprocess.Popen([sys.executable, *argv], cwd=ROOT, stdout=log, stderr=log,
                                   env={**os.environ, "OMP_NUM_THREADS": "1"})
    return process, name, seed, folder


def collect(process, folder) -> list:
    """Return what is kept of a run that has ended, and delete its folder. Raise UserError with the
    end of its log if it failed."""
    if process.returncode:
        log = Path(f"{folder}.log").read_text()
        raise UserError(f"the run in {folder} failed: {log[-300:]}")
    metrics = [{key: m[key] for key in KEPT} for m in read_jsonl(folder / "metrics.jsonl")]
    shutil.rmtree(folder)  # checkpoints of a real model are large
    return metrics


def table_of(suite: str, records) -> str:
    """Return Markdown: all variants, then the first minus each of the others, or the comparisons
    of a cross."""
    first, *others = SUITES[suite]
    pairs = [(first, name) for name in others]
    if suite == "cross":
        pairs = cross_comparisons()
    if suite == "cross2":
        pairs = cross2_comparisons()
    return table(records, SUITES[suite], pairs, cross=suite.startswith("cross"))


def main(argv) -> int:
    """Run a suite to its end, then write and print its table."""
    p = Parser(prog="python -m scripts.experiments", description=__doc__)
    p.add_argument("suite", choices=SUITES)
    p.add_argument("--seeds", type=at_least(1), default=3, help="runs of each variant")
    p.add_argument("--first-seed", type=at_least(0), default=0, help="the lowest seed")
    p.add_argument("--jobs", type=at_least(1), default=os.cpu_count(), help="processes at a time")
    p.add_argument("--only", nargs="+", default=(), metavar="VARIANT")
    p.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the results")
    args, extra = p.parse_known_args(argv)
    results = args.out / f"{args.suite}.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        if name not in SUITES[args.suite]:
            raise UserError(f"no variant {name!r}: choose from {', '.join(SUITES[args.suite])}")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its runs end, too
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    run_suite(args.suite, seeds, args.only, extra, args.jobs, results)
    text = table_of(args.suite, read_jsonl(results))
    results.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
