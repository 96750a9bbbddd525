"""Does GenEnv's claim hold? Ablations, alpha schedules and open questions on the embedded world.

    python -m experiments paper --seeds 5     # the claims of the paper: variants over seeds
    python -m experiments alpha --seeds 3     # alpha schedules
    python -m experiments open --seeds 3      # alpha 0.3-0.7, noisy rewards, forgetting
    python -m experiments levers --seeds 1    # what moves the success rate, on the tuning split
    python -m experiments paper --quick       # a tiny run of each kind, to see that it works

What of the paper this is: RQ1-RQ4 and Figures 4-8. Every variant gets the same number of agent
updates and of rollouts. Each run is a process of its own, as many at a time as there are cores; a
run that is already in the results file is not repeated, so an interrupted suite just goes on.

How it is read: experiments/results/SUITE.jsonl has one line per run; experiments/results/SUITE.md the table of
means with 95 % t-intervals over seeds and paired differences; experiments/results/*.png the figures.
EXPERIMENTS.md says what was seen.

Where it differs on purpose: the world is the embedded ladder, so nothing here is a statement about
7B models. Settings were chosen on the tuning split, the figures are of the validation split; only
the suite `levers` reports the tuning split.
"""
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from tqdm import tqdm

import genenv
from curriculum import in_band
from data_pool import Task, UserError, append_jsonl, read_jsonl
from worlds import ladder

ROOT = Path(__file__).resolve().parent.parent

SHARP = ["--k-min", "0.45", "--lam", "6", "--beta", "8", "--agent-lr", "1e-3"]
# name -> options of genenv.py; teacher files are made once by `python -m worlds.ladder teacher`
PAPER = {
    "genenv": [],
    "random": ["--variant", "random"],
    "static": ["--variant", "static"],
    "teacher 1.76x": ["--variant", "teacher", "--teacher-tasks", "@teacher-957"],
    "teacher 3.27x": ["--variant", "teacher", "--teacher-tasks", "@teacher-1777"],
    "random, agent rate 1/2": ["--variant", "random", "--agent-lr", "1e-3"],
    "random, curated seeds": ["--variant", "random", "--seed-selection", "curated"],
    "genenv, no KL": ["--env-kl", "0", "--env-kl-cap", "1000"],
    "genenv, no filter": ["--k-min", "1"],
    "genenv, seed-level p_hat": ["--p-hat-unit", "seed"],
    # towards the band: sharp weights in place of the filter, and an agent that learns more slowly
    "genenv, alpha 0.3, sharp": ["--alpha", "0.3", *SHARP],
    "genenv, steered": ["--alpha-schedule", "integral", *SHARP],
    "genenv, steered, signal": ["--alpha-schedule", "integral", "--difficulty-reward", "signal",
                                *SHARP],
}
ALPHA = {
    "constant 0.5": [],
    "constant 0.3": ["--alpha", "0.3"],
    "linear 0.7 to 0.4": ["--alpha-schedule", "linear", "--alpha", "0.7", "--alpha-end", "0.4"],
    "cosine 0.7 to 0.4": ["--alpha-schedule", "cosine", "--alpha", "0.7", "--alpha-end", "0.4"],
    "step 0.7 to 0.4": ["--alpha-schedule", "step", "--alpha", "0.7", "--alpha-end", "0.4"],
    "adaptive 0.5": ["--alpha-schedule", "adaptive"],
    "integral 0.5": ["--alpha-schedule", "integral"],
}
OPEN = {
    "alpha 0.5": [],
    **{f"alpha {a}": ["--alpha", a] for a in ("0.3", "0.4", "0.6", "0.7")},
    "reward noise 0.1": ["--reward-noise", "0.1"],
    "reward noise 0.2": ["--reward-noise", "0.2"],
    "no replay": ["--replay", "0"],
}
LEVERS = {  # each against the default settings
    "as is": [],
    "seed-level p_hat": ["--p-hat-unit", "seed"],
    "adaptive alpha": ["--alpha-schedule", "adaptive"],
    "integral alpha": ["--alpha-schedule", "integral"],
    "alpha 0.3": ["--alpha", "0.3"],
    "agent rate 1/2": ["--agent-lr", "1e-3"],
    "agent rate 1/4": ["--agent-lr", "5e-4"],
    "half the agent updates per epoch": ["--steps", "3", "--epochs", "48"],
    "twice the simulator updates": ["--env-updates", "32"],
    "three times the KL cap, faster": ["--env-kl-cap", "1.5", "--env-lr", "5e-3"],
    "k_min 0.13": ["--k-min", "0.13"],
    "soft weights, lam 6, beta 8": ["--k-min", "0.45", "--lam", "6", "--beta", "8"],
    "half of the seeds from base": ["--base-share", "0.5"],
    "a quarter of the seeds from base": ["--base-share", "0.25"],
}
SUITES = {"paper": PAPER, "alpha": ALPHA, "open": OPEN, "levers": LEVERS}
KEPT = ("epoch", "alpha", "success_rate", "validation", "validation_greedy",
        "validation_unsolved", "reward", "task_length", "response_length", "solved",
        "unsolved", "distinct_tasks", "skill_entropy", "env_kept", "env_kl", "env_ess", "synthetic",
        "seconds", "base_tools", "kept_by_noise")
QUICK = ["--epochs", "2", "--steps", "2", "--seeds", "4", "--val-samples", "1"]


# ---------------------------------------------------------------------------------------------
# running


def run_suite(suite: str, seeds: int, quick: bool, jobs: int, out: Path, extra, only=()) -> Path:
    """All runs of a suite that are not in out/SUITE.jsonl yet; returns that file.

    only: names of variants, all if empty. extra: further options of genenv.py for every run.
    """
    unknown = set(only) - set(SUITES[suite])
    if unknown:
        raise UserError(f"no variant {sorted(unknown)[0]!r} in {suite}: {', '.join(SUITES[suite])}")
    results = out / f"{suite}{'-quick' if quick else ''}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    settings = (QUICK if quick else []) + (["--tuning"] if suite == "levers" else []) + extra
    done = {(r["name"], r["seed"]): r for r in read_runs(results)}
    if any(r["settings"] != settings or r["options"] != SUITES[suite].get(r["name"])
           for r in done.values()):
        raise UserError(f"{results} holds runs with other settings: move it away first")
    # seed by seed: a suite that is cut short has all variants of the first seeds
    wanted = [(name, seed) for seed in range(1 if quick else seeds)
              for name in only or SUITES[suite] if (name, seed) not in done]
    for name, seed in list(wanted):  # another suite may have the same run under another name
        for twin in twins(out, quick, SUITES[suite][name], seed, settings):
            append_jsonl(results, [{**twin, "name": name}])
            wanted.remove((name, seed))
            break
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=len(wanted), desc=suite) as bar:
        make_shared(Path(scratch), ROOT / genenv.parse_options(extra).cache_dir)
        with closing(finished(suite, wanted, settings, jobs, Path(scratch))) as ended:
            for job in ended:
                append_jsonl(results, [collect(job, SUITES[suite][job["name"]], settings)])
                bar.update()
    return results


def read_runs(path: Path) -> list[dict]:
    """The runs of a results file, none if there is no file. Raises UserError if another version of
    this program wrote it."""
    runs = read_jsonl(path) if path.is_file() else []
    whole = lambda m: isinstance(m, dict) and set(KEPT) <= set(m)
    for r in runs:
        if not {"name", "seed", "options", "settings", "metrics"} <= set(r) or \
                not isinstance(r["metrics"], list) or not all(map(whole, r["metrics"])):
            raise UserError(f"{path} was written by another version: move it away first")
    return runs


def twins(out: Path, quick: bool, options, seed: int, settings):
    """Runs with the very same options and seed in the results of any suite."""
    for suite in SUITES:
        for r in read_runs(out / f"{suite}{'-quick' if quick else ''}.jsonl"):
            if (r["options"], r["seed"], r["settings"]) == (options, seed, settings):
                yield r


def finished(suite, wanted, settings, jobs, scratch):
    """Run all of `wanted`, (name, seed) pairs, `jobs` at a time; yields each as it ends."""
    running, wanted = [], list(wanted)
    try:
        while wanted or running:
            while wanted and len(running) < jobs:
                running.append(start(suite, *wanted.pop(0), settings, scratch))
            for job in [j for j in running if j["process"].poll() is not None]:
                running.remove(job)
                yield job
            time.sleep(0.2)
    finally:  # one run failed, or Ctrl-C: none goes on without the suite
        for job in running:
            job["process"].kill()
            job["process"].wait()


def make_shared(scratch: Path, cache_dir: str):
    """Base model and teacher files once, before the runs that all need them."""
    for n in (957, 1777):
        ladder.write_teacher(n, scratch / f"teacher-{n}.jsonl")
    ladder.base_model(cache_dir)


def start(suite, name, seed, settings, scratch) -> dict:
    """Launch one run on one thread; its output goes to a file in case it fails."""
    folder = scratch / f"{''.join(c if c.isalnum() else '-' for c in name)}-{seed}"
    options = [str(scratch / f"{x[1:]}.jsonl") if x.startswith("@") else x
               for x in SUITES[suite][name]]
    log = open(f"{folder}.log", "w")
    process = subprocess.Popen(
        [sys.executable, "genenv.py", "--out", str(folder), "--seed", str(seed), "--threads", "1",
         *settings, *options], cwd=ROOT, stdout=log, stderr=log,
        env={**os.environ, "OMP_NUM_THREADS": "1"})
    return {"name": name, "seed": seed, "folder": folder, "process": process, "log": log}


def collect(job, options, settings) -> dict:
    """One line of results: the metrics of every epoch, and what follows from D_train."""
    job["log"].close()
    if job["process"].returncode:
        tail = Path(job["log"].name).read_text().strip().splitlines()[-1:]
        raise UserError(f"run {job['name']!r} with seed {job['seed']} failed: {' '.join(tail)}")
    metrics, records = (read_jsonl(job["folder"] / f) for f in ("metrics.jsonl", "train.jsonl"))
    o = json.loads((job["folder"] / "config.json").read_text())
    seen = set()
    for m in metrics:
        here = [r for r in records if r["epoch"] == m["epoch"]]
        # only these train the agent: a group of equal rewards has no gradient
        seen |= {r["task"]["id"] for r in here
                 if r["task"]["origin"] != "base" and 0 < (r["p_hat"] or 0) < 1}
        m["synthetic"] = len(seen)
        m["base_tools"] = np.mean([m["validation_by"][n] for n in ladder.NAMES[:ladder.BASE_TOOLS]])
        m["kept_by_noise"] = kept_by_noise(here, m["alpha"], o) if o["reward_noise"] else 0.0
    kept = [key for key in (*KEPT, "tuning") if key in metrics[0]]
    metrics = [{key: m[key] for key in kept} for m in metrics]
    return {"name": job["name"], "seed": job["seed"], "options": options, "settings": settings,
            "metrics": metrics}


def kept_by_noise(records, alpha, o) -> float:
    """Of the generations inside the band, the share that is there only because rewards were
    flipped: all G attempts were right, or all were wrong."""
    inside = [r for r in records if r["task"]["origin"] == "env" and r["epoch"] > 0
              and r["task"]["epoch"] == r["epoch"] and in_band(r["p_hat"], alpha, o["k_min"])]
    right = [sum(ladder.score(Task(**r["task"]), e["text"])[0] for e in r["traces"])
             for r in inside]
    return sum(n in (0, o["G"]) for n in right) / max(1, len(inside))


# ---------------------------------------------------------------------------------------------
# statistics

T_95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
        2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093]  # by degrees of freedom, from 1


def interval(values):
    """Mean and half width of the 95 % t-interval over seeds; the width is NaN for one seed."""
    values = np.asarray(values, float)
    if len(values) < 2:
        return values.mean(), math.nan
    t = T_95[min(len(values) - 1, len(T_95)) - 1]  # beyond the table a little too wide
    return values.mean(), t * values.std(ddof=1) / len(values) ** 0.5


def by_name(results: Path) -> dict:
    """{name: {seed: metrics}} of a results file."""
    table = {}
    if not results.is_file():
        raise UserError(f"{results}: no such file")
    for r in read_runs(results):
        table.setdefault(r["name"], {})[r["seed"]] = r["metrics"]
    # runs end in any order: rows stand in the order of the suite, its first name is the standard
    known = list(SUITES.get(results.stem.removesuffix("-quick"), ()))
    place = lambda name: known.index(name) if name in known else len(known)
    return {name: table[name] for name in sorted(table, key=place)}


def last(metrics, key):
    """The value after the last epoch."""
    return metrics[-1][key]


def band_share(metrics, low=0.4, high=0.6):
    """Share of the epochs from the second on with a success rate inside [low, high]."""
    inside = [low <= m["success_rate"] <= high for m in metrics if m["epoch"] >= 2]
    return sum(inside) / max(1, len(inside))


def growth(metrics):
    """Response length on generated tasks, last epoch relative to the first."""
    return metrics[-1]["response_length"] / max(1, metrics[0]["response_length"]) - 1


def band_range(runs) -> str:
    """Least and greatest success rate from the second epoch on, in the mean over seeds, and how
    many of these epochs lie in [0.4, 0.6]."""
    n = min(len(m) for m in runs)
    curve = np.mean([[x["success_rate"] for x in m[:n]] for m in runs], axis=0)[2:]
    inside = ((curve >= 0.4) & (curve <= 0.6)).sum()
    return f"{curve.min():.2f} - {curve.max():.2f}, {inside} of {len(curve)}" if len(curve) else "-"


def lost(metrics):
    """Forgetting: held-out success on the base set's tools, best epoch minus last."""
    return max(m["base_tools"] for m in metrics) - metrics[-1]["base_tools"]


COLUMNS = [
    ("tuning", lambda m: last(m, "tuning")),
    ("validation", lambda m: last(m, "validation")),
    ("mean of all epochs", lambda m: np.mean([x["validation"] for x in m[1:]])),  # how fast
    ("greedy", lambda m: last(m, "validation_greedy")),
    ("never solved in 8", lambda m: last(m, "validation_unsolved")),
    ("success, mean", lambda m: np.mean([x["success_rate"] for x in m[2:] or m])),
    ("epochs in [.4, .6]", band_share),
    ("response growth", growth),
    ("tool entropy kept", lambda m: last(m, "skill_entropy") / (m[0]["skill_entropy"] or 1)),
    ("lost on base tools", lost),
    ("kept by noise", lambda m: np.mean([x["kept_by_noise"] for x in m[1:]])),
    ("synthetic tasks", lambda m: last(m, "synthetic")),
]


def columns_of(runs) -> list:
    """The columns that these runs have something to say in. On the tuning split nothing of the
    validation split is shown: settings are not to be chosen by it."""
    everything = [metrics for seeds in runs.values() for metrics in seeds.values()]
    of_validation = {"validation", "mean of all epochs", "greedy", "never solved in 8",
                     "lost on base tools"}
    hidden = of_validation if "tuning" in everything[0][0] else {"tuning"}
    if not any(m["kept_by_noise"] for metrics in everything for m in metrics):
        hidden.add("kept by noise")
    return [column for column in COLUMNS if column[0] not in hidden]


def table(results: Path) -> str:
    """Markdown: mean and 95 % t-interval over seeds, then differences to the first row, paired."""
    runs = by_name(results)
    columns = columns_of(runs)
    heads = ["variant", "seeds", *(c for c, _ in columns),
             "mean curve of success, epochs in [.4, .6]"]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, seeds in runs.items():
        cells = [_cell(*interval([f(m) for m in seeds.values()])) for _, f in columns]
        rows.append(f"| {name} | {len(seeds)} | " + " | ".join(cells) +
                    f" | {band_range(list(seeds.values()))} |")
    key, first = columns[0][0], next(iter(runs))
    rows += ["", f"Paired differences in {key}, {first} minus the other, same seeds:", "",
             "| other | difference | 95 % interval |", "|---|---|---|"]
    for name, seeds in list(runs.items())[1:]:
        common = sorted(set(seeds) & set(runs[first]))
        if common:
            mean, half = interval([last(runs[first][s], key) - last(seeds[s], key)
                                   for s in common])
            bounds = "-" if math.isnan(half) else f"{mean - half:+.3f} to {mean + half:+.3f}"
            rows.append(f"| {name} | {mean:+.3f} | {bounds} |")
    return "\n".join([*rows, "", *claims(runs)]) + "\n"


def _cell(mean, half) -> str:
    """A mean with its interval, without one where there is a single seed."""
    digits = 3 if abs(mean) < 100 else 0
    return f"{mean:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def claims(runs) -> list[str]:
    """The further claims of the paper, where the variants they need are there."""
    lines = []
    mean_of = lambda name, f: np.mean([f(m) for m in runs[name].values()])
    if {"genenv", "random"} <= set(runs):
        ours, theirs = (mean_of(n, lambda m: last(m, "validation_unsolved"))
                        for n in ("genenv", "random"))
        lines.append(f"* never-solved validation tasks: genenv {ours:.3f}, random {theirs:.3f} "
                     f"({1 - ours / max(theirs, 1e-9):+.0%} fewer)")
        lines.append(f"* response length on generated tasks, last against first epoch: "
                     f"{mean_of('genenv', growth):+.0%}")
    for rival in ("static", "teacher 3.27x"):
        if {"genenv", rival} <= set(runs):
            lines.append(data_efficiency(runs, rival))
    return lines


def data_efficiency(runs, rival) -> str:
    """How many synthetic tasks genenv needs to reach the rival's final validation."""
    ratios = []
    for seed in sorted(set(runs["genenv"]) & set(runs[rival])):
        goal = last(runs[rival][seed], "validation")
        need = next((m["synthetic"] for m in runs["genenv"][seed] if m["validation"] >= goal), None)
        ratios.append(None if not need else last(runs[rival][seed], "synthetic") / need)
    reached = [r for r in ratios if r]
    mean = f"{np.mean(reached):.2f}" if reached else "-"
    return (f"* synthetic tasks of {rival} / those genenv needs for the same validation: {mean} "
            f"(reached in {len(reached)} of {len(ratios)} seeds)")


# ---------------------------------------------------------------------------------------------
# figures

CURVES = [("validation", "validation", "held-out success rate"),
          ("success_rate", "success", "success rate on generated tasks"),
          ("task_length", "task-length", "steps per generated task"),
          ("response_length", "response-length", "tokens per response"),
          ("reward", "reward", "training reward"),
          ("unsolved", "unsolved", "share of tasks never solved"),
          ("solved", "solved", "share of tasks always solved"),
          ("skill_entropy", "entropy", "entropy over tools (bits)")]


def draw(results: Path):
    """One PNG per curve: mean over seeds with the range of the seeds shaded. On the tuning split
    the validation curves are left out."""
    runs = by_name(results)
    tuning = "tuning" in next(iter(next(iter(runs.values())).values()))[0]
    for key, name, label in CURVES:
        if not (tuning and key == "validation"):
            _figure(results, runs, "epoch", key, name, "epoch", label)
    if not tuning:
        _figure(results, runs, "synthetic", "validation", "data",
                "distinct synthetic tasks solved sometimes, not always", "held-out success rate")


def panels(runs) -> list:
    """Names side by side: the first variant with its rivals, and with its own variations."""
    first = next(iter(runs))
    own = [name for name in runs if name.startswith(first)]
    rivals = [first, *(name for name in runs if not name.startswith(first))]
    return [rivals, own] if len(own) > 1 and len(rivals) > 1 else [list(runs)]


def _figure(results, runs, x, y, name, x_label, y_label):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    names = panels(runs)
    figure, axes = plt.subplots(1, len(names), figsize=(6.4 * len(names), 3.8), sharey=True,
                                squeeze=False, layout="constrained")
    for axis, members in zip(axes[0], names):
        if y == "success_rate":
            axis.axhspan(0.4, 0.6, color="green", alpha=0.12, lw=0)
        for i, variant in enumerate(members):
            _curve(axis, runs[variant], x, y, variant, i)
        axis.set(xlabel=x_label)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=7)
    axes[0][0].set(ylabel=y_label)
    figure.savefig(results.with_name(f"{results.stem}-{name}.png"), dpi=110,
                   metadata={"Software": None})
    plt.close(figure)


def _curve(axis, seeds, x, y, label, i):
    """Mean line over seeds, shaded from the least to the most."""
    n = min(len(m) for m in seeds.values())
    values = np.array([[r[y] for r in m[:n]] for m in seeds.values()])
    at = np.mean([[r[x] for r in m[:n]] for m in seeds.values()], axis=0)
    line, = axis.plot(at, values.mean(0), label=label, lw=1.5, ls="-" if i < 10 else "--")
    axis.fill_between(at, values.min(0), values.max(0), color=line.get_color(), alpha=0.12, lw=0)


def main(argv=None) -> int:
    """Entry point; 0, or 2 with one line on a user's mistake."""
    p = genenv.Parser(prog="python -m experiments", description=__doc__.splitlines()[0],
                      allow_abbrev=False)
    p.add_argument("suite", choices=SUITES)
    p.add_argument("--seeds", type=int, default=3, help="runs of each variant (default 3)")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    p.add_argument("--only", nargs="+", default=(), help="names of variants (default: all)")
    p.add_argument("--quick", action="store_true", help="tiny runs, to see that it works")
    p.add_argument("--out", default="experiments/results", help="folder of the results")
    p.add_argument("--only-draw", action="store_true", help="table and figures of what is there")
    try:
        args, extra = p.parse_known_args(argv)
        genenv.parse_options(extra)  # what is not ours is genenv.py's: refused now, not in each run
        for flag in ("--seed", "--out", "--threads", "--resume", "--variant", "--preset"):
            if any(x == flag or x.startswith(flag + "=") for x in extra):
                raise UserError(f"{flag} is set by the experiment itself, run by run")
        if args.seeds < 1 or args.jobs < 1:
            raise UserError("--seeds and --jobs must be at least 1")
        out = Path(args.out)
        results = out / f"{args.suite}{'-quick' if args.quick else ''}.jsonl"
        if not args.only_draw:
            run_suite(args.suite, args.seeds, args.quick, args.jobs, out, extra, args.only)
        text = table(results)
        results.with_suffix(".md").write_text(text)
        draw(results)
        print(text)
        return 0
    except (UserError, OSError) as error:  # OSError: the results folder cannot be written
        print(f"experiments: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
