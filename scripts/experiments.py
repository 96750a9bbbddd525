"""Variants over seeds: the ablations of the paper, each run a process of its own.

Paper: RQ1 to RQ4, Figures 4 to 8. Every variant makes the same number of agent updates from the same
number of rollouts.

Usage:
    python -m scripts.experiments ladder --seeds 5            # the table of README
    python -m scripts.experiments household --seeds 5
    python -m scripts.experiments words --model "starts/stale-{seed}"
    python -m scripts.experiments mine                        # any world: variants random, static ...
    python -m scripts.experiments cross --seeds 10 --first-seed 20   # trained or not x seeds x schedule
    python -m scripts.experiments ladder --seeds 1 --epochs 2 # what is not an option here goes to every run

A suite that was interrupted goes on: results/SUITE.jsonl has one line for each finished run, and a run
that was begun lies in runs/SUITE. At the end results/SUITE.md has the means with 95 % t-intervals over
seeds, and differences paired by seed. "{seed}" in an option stands for the seed: so
each seed gets a base model of its own, and the intervals are over base models, too. Seed 0 has the shipped
one; `python -m worlds.ladder train 1 runs/base/ladder-1` trains another.

Deviations: equal time is compared in CPU seconds of training, as other work on the machine does not
count then; the paper compares epochs.
"""
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from model.files import UserError, append_jsonl, exit_code, read_jsonl
from support.metrics import interval, mean
from support.options import Options, Parser, at_least
from worlds import load_world, world_names

ROOT = Path(__file__).resolve().parent.parent
TEACHER, TIMES = "runs/teacher-1777.jsonl", 1777 / 544  # the paper's larger teacher set, and its base set
BASES = {name: ["--world", name] for name in world_names()} | {
         "ladder": ["--model", "runs/base/ladder-{seed}"], "tools": ["--world", "tool_calls"],
         "cross": ["--model", "runs/base/ladder-{seed}"],
         "household": ["--world", "household", "--model", "runs/base/household-{seed}"],
         "words": []}  # with --model "FOLDER-{seed}", which a warm start has made
RIVALS = {"genenv": [], "random": ["--variant", "random"],
          "random, curated seeds": ["--variant", "random", "--seed-selection", "curated"],
          "static": ["--variant", "static"]}
STEERED = "--alpha-schedule integral --k-min 0.45 --lam 6 --beta 8".split()


def cross_cells() -> dict:
    """{cell: options} of the cross on the ladder: is the simulator trained, are its seed tasks curated, how
    many of them are base tasks, and does alpha follow success (at the agent's full rate and at half of it).
    """
    cells = {}
    for variant in ("genenv", "random"):
        for selection in ("uniform", "curated"):
            options = ["--variant", variant, "--seed-selection", selection]
            name = f"{variant}, {selection}"
            cells[f"{name}, share 0.75"] = [*options, "--base-share", "0.75"]
            cells[f"{name}, share 0.25"] = [*options, "--base-share", "0.25"]
            # random, uniform, steered reads alpha nowhere: it must equal its share 0.75 to the bit
            cells[f"{name}, steered"] = [*options, *STEERED]
            cells[f"{name}, steered, half rate"] = [*options, *STEERED, "--agent-lr", "1e-3"]
        # no written task is ever a seed task here, so curation has nothing to choose from
        cells[f"{variant}, share 1"] = ["--variant", variant, "--base-share", "1"]
    return cells


# {suite: {variant: options}}; the first variant is compared with the others
SUITES = dict.fromkeys(BASES, RIVALS) | {
    "ladder": {**RIVALS, "genenv, steered":
               "--alpha-schedule integral --k-min 0.45 --lam 6 --beta 8 --agent-lr 1e-3".split(),
               "teacher 3.27x": ["--variant", "teacher", "--teacher-tasks", TEACHER]},
    "cross": cross_cells(),
    "tools": {"genenv": [], "genenv, graded": ["--agent-reward", "graded"], "random": ["--variant", "random"],
              "base": ["--variant", "base"]}}
# of each epoch's record: what the tables show, and what says why
KEPT = ("epoch", "success_rate", "mixed_share", "validation", "validation_by", "cpu_seconds", "alpha",
        "entropy", "task_length", "distinct_tasks", "env_kept", "env_kl", "validation_greedy", "solved",
        "unsolved", "trained_tokens")


# ---------------------------------------------------------------------------------------------
# runs


def run_suite(suite: str, seeds: range, only, extra, jobs: int, results: Path):
    """All runs of a suite that the results file does not have yet, `jobs` at a time, seed by seed."""
    given = [*BASES[suite], *extra]
    done = read_jsonl(results) if results.is_file() else []
    if any(r["settings"] != given for r in done):
        raise UserError(f"{results} holds runs with other settings: move it away first")
    have = {(r["name"], r["seed"]) for r in done}
    print(f"{results}: has {len(have)} runs; another --out makes them anew", flush=True)
    wanted = [(name, seed, filled([*given, *SUITES[suite][name]], seed))
              for seed in seeds for name in only or SUITES[suite] if (name, seed) not in have]
    running = []
    try:
        while wanted or running:
            while wanted and len(running) < jobs:
                running.append(start(suite, *wanted.pop(0)))
            for job in [j for j in running if j["process"].poll() is not None]:
                running.remove(job)
                append_jsonl(results, [{**collect(job), "settings": given}])
                print(f"{job['name']}, seed {job['seed']}: done; {len(wanted + running)} left", flush=True)
            time.sleep(0.5)
    finally:  # a run failed or Ctrl-C: none goes on without the suite, the next call resumes them
        for job in running:
            job["process"].kill()
            job["process"].wait()


def filled(words, seed: int) -> list:
    """Options with the seed filled in. Raises UserError if a base model is still to be trained."""
    out = [word.replace("{seed}", str(seed)) for word in words]
    for i, word in enumerate(out):
        if word.startswith("runs/base/") and not Path(word).is_dir():
            world = Path(word).name.partition("-")[0]
            if seed:
                raise UserError(f"no {word} yet, train it: python -m worlds.{world} train {seed} {word}")
            out[i] = f"worlds/base/{world}"
    return out


def start(suite, name, seed, options) -> dict:
    """Launch one run on one thread, or let one go on that was begun."""
    label = "".join(c if c.isalnum() else "-" for c in name)
    folder = Path("runs") / suite / f"{label}-{seed}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    if TEACHER in options and not Path(TEACHER).is_file():  # a stronger one's, in the paper's proportion
        world = load_world("ladder")(Options())
        world.write_teacher(round(TIMES * len(world.base_tasks())), TEACHER)
    argv = ["genenv.py", "--seed", str(seed), "--threads", "1", "--out", str(folder), *options]
    argv += ["--resume"] * (folder / "config.json").is_file()
    with open(f"{folder}.log", "a") as log:
        process = subprocess.Popen([sys.executable, *argv], cwd=ROOT, stdout=log, stderr=log,
                                   env={**os.environ, "OMP_NUM_THREADS": "1"})
    return {"name": name, "seed": seed, "folder": folder, "process": process}


def collect(job) -> dict:
    """One line of results. Raises UserError with the last line of the log if the run failed."""
    if job["process"].returncode:
        tail = Path(f"{job['folder']}.log").read_text().strip().splitlines()[-1:]
        raise UserError(f"run {job['name']!r} with seed {job['seed']} failed: {' '.join(tail)}")
    metrics = [{key: m[key] for key in KEPT} for m in read_jsonl(job["folder"] / "metrics.jsonl")]
    shutil.rmtree(job["folder"])  # checkpoints of a real model are large
    return {"name": job["name"], "seed": job["seed"], "metrics": metrics}


# ---------------------------------------------------------------------------------------------
# the table


def mean_of(key, metrics):
    """Mean of a figure over the epochs that measured it; None if none did."""
    return mean(m[key] for m in metrics if m[key] is not None)


# the second half of a run's epochs, where an untrained simulator has had time to go stale
later = lambda metrics: metrics[1 + len(metrics) // 2:] or metrics
MEASURES = {  # head of a column: what a run's metrics say
    "held-out, last epoch": lambda ms: ms[-1]["validation"],
    "held-out, mean of epochs": lambda ms: np.mean([m["validation"] for m in ms[1:] or ms]),
    "success on its tasks, 2nd half": lambda ms: mean_of("success_rate", later(ms)),
    "mixed groups, 2nd half": lambda ms: mean_of("mixed_share", later(ms)),
    "CPU minutes": lambda ms: sum(m["cpu_seconds"] for m in ms) / 60}


def in_time_of(ours, rival) -> float:
    """Our held-out success when we have trained as long as the rival in all, minus the rival's last."""
    spent = sum(m["cpu_seconds"] for m in rival)
    clock = np.cumsum([m["cpu_seconds"] for m in ours])
    reached = [m for m, at in zip(ours, clock) if at <= spent] or ours[:1]
    return reached[-1]["validation"] - rival[-1]["validation"]


def table(suite: str, records) -> str:
    """Markdown: means over seeds, and the first variant minus each other one, paired by seed."""
    runs = {name: {r["seed"]: r["metrics"] for r in records if r["name"] == name}
            for name in SUITES[suite] if name in {r["name"] for r in records}}
    lines = [f"| variant | runs | {' | '.join(MEASURES)} |", "|---" * (2 + len(MEASURES)) + "|"]
    for name, seeds in runs.items():
        cells = [interval([f(ms) for ms in seeds.values()]).replace("+", "") for f in MEASURES.values()]
        lines.append(f"| {name} | {len(seeds)} | {' | '.join(cells)} |")
    (first, ours), *others = runs.items()
    lines += ["", f"| {first} minus | pairs | last epoch | mean of epochs | equal time |", "|---" * 5 + "|"]
    last, mean, *_ = MEASURES.values()
    for name, seeds in others:
        pairs = [(ours[s], seeds[s]) for s in sorted(ours.keys() & seeds)]
        cells = [interval([f(a) - f(b) for a, b in pairs]) for f in (last, mean)]
        cells.append(interval([in_time_of(a, b) for a, b in pairs]))
        lines.append(f"| {name} | {len(pairs)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv) -> int:
    """Run a suite to its end, then write and print its table."""
    p = Parser(prog="python -m scripts.experiments", description=__doc__)
    p.add_argument("suite", choices=SUITES)
    p.add_argument("--seeds", type=at_least(1), default=3, help="runs of each variant")
    p.add_argument("--first-seed", type=at_least(0), default=0, help="seeds are counted from here")
    p.add_argument("--jobs", type=at_least(1), default=os.cpu_count(), help="processes at a time")
    p.add_argument("--only", nargs="+", default=(), metavar="VARIANT")
    p.add_argument("--out", default="", help="folder of the results; empty: results")
    args, extra = p.parse_known_args(argv)
    results = Path(args.out or ROOT / "results") / f"{args.suite}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    if unknown := [name for name in args.only if name not in SUITES[args.suite]]:
        raise UserError(f"no variant {unknown[0]!r}: choose from {', '.join(SUITES[args.suite])}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its runs end with it
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    run_suite(args.suite, seeds, args.only, extra, args.jobs, results)
    results.with_suffix(".md").write_text(text := table(args.suite, read_jsonl(results)))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:]), "experiments"))
