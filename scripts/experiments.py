"""Does GenEnv's claim hold? Ablations, alpha schedules and open questions, run over seeds.

    python -m scripts.experiments paper --seeds 5     # the claims of the paper: variants over seeds
    python -m scripts.experiments alpha --seeds 3     # alpha schedules
    python -m scripts.experiments open --seeds 3      # alpha 0.3-0.7, noisy rewards, forgetting
    python -m scripts.experiments levers --seeds 1    # what moves the success rate, on the tuning split
    python -m scripts.experiments which --seeds 5     # which part does the work; --time: how long it takes
    python -m scripts.experiments bases --seeds 5     # base models of an embedded world, one for each seed
    python -m scripts.experiments paper --quick       # a tiny run of each kind, to see that it works
    python -m scripts.experiments paper --world NAME  # the same in another world

What of the paper this is: RQ1-RQ4 and Figures 4-8. Every variant gets the same number of agent
updates and of rollouts. Each run is a process of its own, as many at a time as there are cores; a
run that is already in the results file is not repeated, so an interrupted suite just goes on.
What is no option of ours is handed on to every run, such as --world, --model and --base-tasks.

How it is read: in experiments/results, SUITE.jsonl (SUITE-WORLD.jsonl of a world other than the
ladder) has one line per run, SUITE.md the table of means with 95 % t-intervals over seeds and
paired differences, SUITE-*.png the figures. EXPERIMENTS.md says what was seen.

Where it differs on purpose: the default world is the embedded ladder, so nothing there is a
statement about 7B models. Settings were chosen on the tuning split, the figures are of the
validation split; only the suite `levers` reports the tuning split.
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tqdm import tqdm

from support.cli import Parser, at_least, exit_code
from support.files import UserError, append_jsonl, read_jsonl
from curriculum import SUCCESS, in_band
from data_pool import Task
from scripts.suites import PAPER_BASE, QUICK, SEEDS, SUITES, TEACHERS, results_file, \
    variants
from scripts.tables import EPISODES, KEPT, draw, read_runs, table
from support.options import parse_options
from worlds import load_world
from worlds.tiny_model import BASES

ROOT = Path(__file__).resolve().parent.parent


def planned(suite: str, seeds: int, quick: bool, out: Path, extra, only=()):
    """What a suite has to do: a namespace of its world, options of genenv.py `o`, results file,
    variants {name: options}, settings of all runs, `done` lines of results, `shared` lines that
    another suite has, and the runs still `wanted`, (name, seed) pairs.

    Raises UserError for an unknown variant or world, and for results with other settings.
    """
    o = parse_options(extra)
    world, results = load_world(o.world), results_file(out, suite, o.world, quick)
    options = variants(suite, world)
    if not options:
        raise UserError(f"{suite} needs what the world {o.world} has not (a base model of its own)")
    unknown = set(only) - set(options)
    if unknown:
        raise UserError(f"no variant {sorted(unknown)[0]!r} in {suite}: {', '.join(options)}")
    settings = (QUICK if quick else []) + (["--tuning"] if suite == "levers" else []) + extra
    done = {(r["name"], r["seed"]): r for r in read_runs(results)}
    if any(r["settings"] != settings or r["options"] != options.get(r["name"])
           for r in done.values()):
        raise UserError(f"{results} holds runs with other settings: move it away first")
    # seed by seed: a suite that is cut short has all variants of the first seeds
    wanted, shared = [], []
    for name, seed in [(n, s) for s in range(1 if quick else seeds) for n in only or options]:
        if (name, seed) not in done:
            twin = next(twins(out, o.world, quick, options[name], seed, settings), None)
            wanted += [] if twin else [(name, seed)]
            shared += [{**twin, "name": name}] if twin else []
    return SimpleNamespace(suite=suite, world=world, o=o, results=results, options=options,
                           settings=settings, done=done, shared=shared, wanted=wanted)


def refuse_set_here(extra):
    """Raises UserError for options that differ from run to run."""
    for flag in ("--seed", "--out", "--threads", "--resume", "--variant"):
        if any(x == flag or x.startswith(flag + "=") for x in extra):
            raise UserError(f"{flag} is set by the experiment itself, run by run")


def run_suite(plan, jobs: int):
    """All runs of a plan that are not in its results file yet, `jobs` at a time.

    Raises UserError if the world refuses the options, or a run fails.
    """
    o = plan.o
    world = plan.world(o)  # what is wrong with its files is said once, before any run
    plan.results.parent.mkdir(parents=True, exist_ok=True)
    if plan.shared:
        append_jsonl(plan.results, plan.shared)
    with tempfile.TemporaryDirectory() as folder, tqdm(total=len(plan.wanted), desc=plan.suite,
                                                       smoothing=0) as bar:
        scratch = Path(folder)
        make_shared(world, o, scratch, {seed for name, seed in plan.wanted
                                        if "@base" in plan.options[name]})
        base = {world.category(task) for task in world.base_tasks()}
        with closing(finished(plan.options, plan.wanted, plan.settings, jobs, scratch)) as ended:
            for job in ended:
                append_jsonl(plan.results, [collect(job, world, base, plan.settings)])
                bar.update()


def time_left(plan, jobs: int) -> str:
    """How many runs are there, how many are left, and how long these take at the speed so far."""
    runs = [*plan.done.values(), *plan.shared]
    minutes = [r["minutes"] for r in runs if "minutes" in r]
    text = f"{plan.suite}: {len(runs)} runs are there, {len(plan.wanted)} are left"
    if not minutes:
        return f"{text}; how long one takes is known after the first"
    each = float(np.mean(minutes))
    return (f"{text}; {each:.1f} minutes a run so far, about {each * len(plan.wanted) / jobs:.0f} "
            f"minutes for the rest, {jobs} at a time")


def twins(out: Path, world: str, quick: bool, options, seed: int, settings):
    """Runs with the very same options and seed in the results of any suite."""
    for suite in SUITES:
        for r in read_runs(results_file(out, suite, world, quick)):
            if (r["options"], r["seed"], r["settings"]) == (options, seed, settings):
                yield r


def finished(options, wanted, settings, jobs, scratch):
    """Run all of `wanted`, (name, seed) pairs, `jobs` at a time; yields each as it ends.

    options: {name: options of genenv.py}.
    """
    running, wanted = [], list(wanted)
    # by itself SIGTERM would end the suite alone, without the `finally`
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        while wanted or running:
            while wanted and len(running) < jobs:
                name, seed = wanted.pop(0)
                running.append(start(name, seed, options[name], settings, scratch))
            for job in [j for j in running if j["process"].poll() is not None]:
                running.remove(job)
                yield job
            time.sleep(0.2)
    finally:  # one run failed, Ctrl-C or SIGTERM: none goes on without the suite
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not leave some of them
        for job in running:
            job["process"].kill()
            job["process"].wait()
        signal.signal(signal.SIGTERM, before)


def make_shared(world, o, scratch: Path, bases=()):
    """What runs need, once and before them: teacher files, and a base model by each seed of `bases`.

    Raises UserError if such a base model is not there: training one takes minutes, and several can
    be trained at once, so it is a step of its own. The shipped one is that of seed 0.
    """
    if "write_teacher" in vars(type(world)):
        for n in TEACHERS:  # the paper's sizes relative to its base set
            world.write_teacher(round(n * len(world.base_tasks()) / PAPER_BASE),
                                scratch / f"teacher-{n}.jsonl")
    for seed in sorted(bases):
        folder = Path("runs/base") / f"{o.world}-{seed}" if seed else BASES / o.world
        if not folder.is_dir():
            raise UserError(f"no base model in {folder}: `python -m worlds.{o.world} train {seed} "
                            f"{folder}` trains it")
        shutil.copytree(folder, scratch / f"base-{seed}")


def start(name, seed, options, settings, scratch) -> dict:
    """Launch one run on one thread, or let one go on that was begun in `scratch` with the same
    options (with others genenv.py refuses); its output goes to a file in case it fails."""
    folder = scratch / f"{''.join(c if c.isalnum() else '-' for c in name)}-{seed}"
    control = [x[1:] for x in options if x[0] == "@" and x[1:] in CONTROLS]
    program = ["-m", "experiments.controls", *control] if control else ["genenv.py"]
    shared = lambda x: scratch / (f"base-{seed}" if x == "@base" else f"{x[1:]}.jsonl")
    given = [str(shared(x)) if x.startswith("@") else x for x in options if x[1:] not in control]
    given = ["--seed", str(seed), "--threads", "1", *settings, *given]
    if (folder / "config.json").is_file():
        given.append("--resume")
    log = open(f"{folder}.log", "a")
    process = subprocess.Popen([sys.executable, *program, "--out", str(folder), *given], cwd=ROOT,
                               stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return {"name": name, "seed": seed, "options": options, "folder": folder, "process": process,
            "log": log, "started": time.perf_counter()}


def refuse_failed(job):
    """Close an ended run's log. Raises UserError with its last line if the run failed."""
    job["log"].close()
    if job["process"].returncode:
        tail = Path(job["log"].name).read_text().strip().splitlines()[-1:]
        raise UserError(f"run {job['name']!r} with seed {job['seed']} failed: {' '.join(tail)}")


def collect(job, world, base: set, settings) -> dict:
    """One line of results: the metrics of every epoch, and what follows from D_train.

    base: the categories of the world's base tasks.
    """
    refuse_failed(job)
    metrics, records = (read_jsonl(job["folder"] / f) for f in ("metrics.jsonl", "train.jsonl"))
    o = json.loads((job["folder"] / "config.json").read_text())
    shutil.rmtree(job["folder"])  # a real model's checkpoints are large
    episodes = EPISODES if world.EPISODES else ()
    seen, generated = set(), set()  # tasks that taught something; all generated ones
    for m in metrics:
        here = [r for r in records if r["epoch"] == m["epoch"]]
        # only these train the agent: a group of equal rewards has no gradient
        seen |= {r["task"]["id"] for r in here
                 if r["task"]["origin"] != "base" and 0 < (r["p_hat"] or 0) < 1}
        m["synthetic"] = len(seen)
        m.update(curriculum_of(world, here, m, generated))
        if episodes:
            m["turns"] = turns_of(here)
        m["rollouts"] = m["epoch"] * o["steps"] * o["G"] * round(
            o["seed_tasks"] * o["variations"] * (1 + o["replay"]))
        easy = [rate for name, rate in m["validation_by"].items() if name in base]
        m["base_tools"] = np.mean(easy) if easy else None
        noisy = any(x.startswith("@noise") for x in job["options"])
        m["kept_by_noise"] = kept_by_noise(world, here, m["alpha"], o) if noisy else 0.0
    kept = [key for key in (*KEPT, *episodes, "tuning", "validated") if key in metrics[0]]
    metrics = [{key: m[key] for key in kept} for m in metrics]
    return {"name": job["name"], "seed": job["seed"], "options": job["options"],
            "settings": settings, "minutes": round((time.perf_counter() - job["started"]) / 60, 2),
            "metrics": metrics}


def turns_of(records) -> float:
    """Mean turns of the agent's episodes on an epoch's generated tasks; 0 for none."""
    played = [sum(line.startswith("> ") for line in trace["text"].split("\n")) or 1
              for r in records if r["task"]["origin"] != "base" for trace in r["traces"]]
    return float(np.mean(played or [0.0]))


def curriculum_of(world, records, m, generated: set) -> dict:
    """What was generated in the epoch of record m: its map {category: [tasks, mean p_hat]}, and how
    many distinct tasks there were so far.

    records: those of D_train of this epoch (a task without one well-formed attempt is not there).
    generated: ids of the tasks so far, brought up to date.
    """
    rungs = {name: [] for name in m["validation_by"]}
    for r in records:
        task = Task(**r["task"])
        if task.origin == "base" or r["p_hat"] is None:
            continue
        generated.add(task.id)
        if task.epoch == m["epoch"] or task.origin != "env":  # not replayed
            rungs.setdefault(world.category(task), []).append(r["p_hat"])
    return {"map": {name: [len(p), round(float(np.mean(p)), 4) if p else 0] for name, p in
                    rungs.items()}, "generated": len(generated)}


def kept_by_noise(world, records, alpha, o) -> float:
    """Of the generations inside the band, the share that is there only because rewards were
    flipped: all G attempts were right, or all were wrong."""
    inside = [r for r in records if r["task"]["origin"] == "env" and r["epoch"] > 0
              and r["task"]["epoch"] == r["epoch"] and in_band(r["p_hat"], alpha, o["k_min"])]
    right = [sum(world.score(Task(**r["task"]), e["text"])[0] >= SUCCESS
                 for e in r["traces"]) for r in inside]
    return sum(n in (0, o["G"]) for n in right) / max(1, len(inside))


def main(argv=None) -> int:
    """Entry point; 0, or 2 with one line on a user's mistake."""
    p = Parser(prog="python -m scripts.experiments", description=__doc__.splitlines()[0],
               allow_abbrev=False)
    p.add_argument("suite", choices=SUITES)
    p.add_argument("--seeds", type=at_least(1), help="runs of each variant (default 3; which: 5)")
    p.add_argument("--jobs", type=at_least(1), default=os.cpu_count(), help="processes at a time")
    p.add_argument("--only", nargs="+", default=(), help="names of variants (default: all)")
    p.add_argument("--quick", action="store_true", help="tiny runs, to see that it works")
    p.add_argument("--out", default="experiments/results", help="folder of the results")
    p.add_argument("--time", action="store_true", help="say how many runs are left, and how long")
    p.add_argument("--only-draw", action="store_true", help="table and figures of what is there")
    def command():
        args, extra = p.parse_known_args(argv)
        o = parse_options(extra)  # what is not ours is genenv.py's: refused now, not in each run
        seeds, out = args.seeds, Path(args.out)
        seeds = SEEDS.get(args.suite, 3) if seeds is None else seeds
        refuse_set_here(extra)
        results = results_file(out, args.suite, o.world, args.quick)
        if not args.only_draw:
            plan = planned(args.suite, seeds, args.quick, out, extra, args.only)
            if args.time:
                print(time_left(plan, args.jobs))
                return 0
            run_suite(plan, args.jobs)
        text = table(results)
        results.with_suffix(".md").write_text(text)
        draw(results)
        print(text)
        return 0
    return exit_code(command, "experiments", "the same command goes on where it stopped")


if __name__ == "__main__":
    sys.exit(main())
