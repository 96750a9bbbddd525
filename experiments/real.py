"""Does it hold on a real model and real tasks? Runs of the 135M model, scored by BFCL's own rule.

What of the paper this is: its first claim, on the smallest instruct model that there is, with a
benchmark's own tasks and its checker (eval/bfcl.py) instead of a world of our own.

How it is run, after the warm start of README:

    python -m experiments.real run --data DIR --base-tasks FILE --model START --instruct MODEL
    python -m experiments.real table     # results/real.md and figures, from results/real.jsonl
    python -m experiments.real tasks     # results/real-tasks.jsonl: what the reading needs

`run` goes on where it was interrupted, inside a run as well (--work holds the run folders). Two
targets are scored by BFCL's AST rule: the held-out tasks of the base's own kind, drawn at T = 1 and
greedy, and harder ones, of categories and sizes that no base task has, greedy: two and three calls,
four and more functions. "validation" is the world's own, stricter score of one attempt a task.

Where it differs on purpose: a rival that the paper leaves out, GRPO on the base tasks themselves,
which are real ones with checked answers, without any simulator; and runs from few base tasks.
"""
import os
import random
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from data_pool import UserError, append_jsonl, read_jsonl
from eval import bfcl
from eval.__main__ import load_records
from eval.make_base import too_large, unreadable
from experiments import __main__ as suite
from experiments.suites import SOFT
from experiments.tables import CURVES, figure, means, paired, refused
from genenv import parse_options
from policy import Policy
from runtime.loading import policy_options
from runtime.options import Parser
from worlds import call_text, load_world

RESULTS = Path(__file__).resolve().parent / "results"
VARIANTS = {
    "genenv": [],
    "random": ["--variant", "random"],
    "GRPO on base tasks": ["--variant", "base"],
    "static": ["--variant", "static"],
    # few base tasks: where a generator should matter most
    "genenv, 64 base tasks": ["--base-limit", "64"],
    "GRPO on 64 base tasks": ["--variant", "base", "--base-limit", "64"],
    "genenv, steered": ["--alpha-schedule", "integral", *SOFT],
}
HARDER = {"calls": 3, "tools": 8, "chars": 900}  # the most that a harder task has
PER_KIND = 48     # harder tasks of each kind that are scored
TOKENS = 128      # of a response when it is scored: three calls
SAMPLES = 8       # drawn answers at each held-out task
READ = 30         # tasks that are read per variant, from the first epochs and from the last


# ---------------------------------------------------------------------------------------------
# the two targets


def targets(data, o) -> dict:
    """{"held-out", "more calls", "more functions": [(record, task as a line of a task file)]}.

    Held-out tasks are found among the records again; what shares its words or its calls with a base
    task (BFCL asks some requests in several categories) is no harder target.
    """
    world = load_world("tool_calls")
    wanted = {task.id for task in world.validation_tasks(o)}
    used = {key for split in ("base", "tuning", "validation") for task in
            (world.base_tasks(o) if split == "base" else world.validation_tasks(o, split))
            for key in world.same_task_key(task)}
    out = {"held-out": [], "more calls": [], "more functions": []}
    for record in load_records("bfcl", data, split="train"):
        line = bfcl.base_task(record)
        task = None if line is None or unreadable(line) else world.make_task(line, "base")
        if task is None or world.unwritable(task):
            continue
        if task.id in wanted:
            out["held-out"].append((record, line))
            wanted.discard(task.id)  # a task that two records have counts once
        elif not too_large(line, HARDER) and used.isdisjoint(world.same_task_key(task)):
            if len(line["calls"]) > 1:
                out["more calls"].append((record, line))
            elif len(line["tools"]) > 3:
                out["more functions"].append((record, line))
    for kind in ("more calls", "more functions"):
        random.Random(0).shuffle(out[kind])
        out[kind] = out[kind][:PER_KIND]
    return out


def official(policy, adapter, kinds) -> dict:
    """Answers under BFCL's rule: {kind: {category: [right, answered]}}, greedy ones; besides, for
    "held-out, T = 1", SAMPLES drawn ones at each held-out task."""
    out = {kind: answered(policy, adapter, pairs, 1, 0.0) for kind, pairs in kinds.items()}
    return {**out, "held-out, T = 1": answered(policy, adapter, kinds["held-out"], SAMPLES, 1.0)} \
        if "held-out" in kinds else out


def answered(policy, adapter, pairs, G, temperature) -> dict:
    """{category: [right, answered]} of G answers to each task."""
    world = load_world("tool_calls")
    prompts = [policy.encode(world.agent_prompt(world.make_task(line, "base"))) for _, line in pairs]
    rollouts = policy.sample(adapter, prompts, G, TOKENS if G == 1 else 64, temperature,
                             policy.generator(0), max_rows=16 * G)
    counts = {}
    for rollout in rollouts:
        record = pairs[rollout.group][0]
        calls = None if rollout.truncated else call_text.parse_calls(policy.decode(rollout.response))
        fits = calls and not bfcl.check_ast(record, [(c["name"], c["arguments"]) for c in calls])
        count = counts.setdefault(record["category"], [0, 0])
        count[0], count[1] = count[0] + bool(fits), count[1] + 1
    return dict(sorted(counts.items()))


def score_model(model: str, settings, kinds, adapter=None) -> dict:
    """`official` of a model folder, with the adapter in a folder or as it is."""
    o = parse_options([*settings, "--model", model, "--threads", "1"])
    paths = {"agent": str(adapter)} if adapter else None
    policy = Policy.load(o.model, ("agent",) if adapter else (),
                         **{**policy_options(o), "adapter_paths": paths})
    return official(policy, "agent" if adapter else None, kinds)


# ---------------------------------------------------------------------------------------------
# runs


def run(args, extra):
    """All variants and seeds that the results file lacks, `--jobs` at a time, seed by seed."""
    settings = ["--preset", "135m-cpu", "--base-tasks", args.base_tasks, *extra]
    o = parse_options([*settings, "--model", args.model])
    world = load_world(o.world)
    world.prepare(o)
    kinds = targets(args.data, o)
    results, work = Path(args.results) / "real.jsonl", Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    done = {(r["name"], r["seed"]) for r in read_jsonl(results)} if results.is_file() else set()
    wanted = [(name, seed) for seed in range(args.seeds) for name in args.only or VARIANTS
              if (name, seed) not in done]
    for name, seed, folder in finished(wanted, args.jobs, [*settings, "--model", args.model], work):
        append_jsonl(results, [collect(name, seed, folder, settings, args.model, kinds)])
        print("done:", name, seed, flush=True)
    for name, model in (("instruct model", args.instruct), ("warm start", args.model)):
        if model and (name, 0) not in done:
            append_jsonl(results, [{"name": name, "seed": 0,
                                    "official": score_model(model, settings, kinds)}])


def finished(wanted, jobs: int, settings, work: Path):
    """Run all of `wanted`, (name, seed) pairs, `jobs` at a time; yields (name, seed, folder) as each
    ends. Raises UserError if one fails; then, and on Ctrl-C, none goes on alone."""
    with closing(suite.finished(VARIANTS, wanted, settings, jobs, work)) as ended:
        for job in ended:
            suite.refuse_failed(job)
            yield job["name"], job["seed"], job["folder"]


def collect(name, seed, folder, settings, model, kinds) -> dict:
    """One line of results: metrics of every epoch, official scores, and tasks to be read."""
    records = [r for r in read_jsonl(folder / "train.jsonl") if r["task"]["origin"] == "env"
               and r["task"]["epoch"] == r["epoch"]]
    last = max((r["epoch"] for r in records), default=0)
    read = []
    for part, epochs in (("early", (0, 1)), ("late", (last - 1, last))):
        chosen = [r for r in records if r["epoch"] in epochs]
        random.Random(seed).shuffle(chosen)
        read += [{"part": part, "request": r["task"]["text"], "p_hat": r["p_hat"],
                  "tools": [call_text.signature(t) for t in r["task"]["spec"]["tools"]],
                  "calls": call_text.write_calls(r["task"]["spec"]["calls"])} for r in chosen[:READ]]
    metrics = read_jsonl(folder / "metrics.jsonl")
    return {"name": name, "seed": seed, "settings": settings, "metrics": metrics, "tasks": read,
            "shape": shape(records),
            "official": score_model(model, settings, kinds, folder / "adapters" / "agent")}


def shape(records) -> list:
    """What was written in each epoch: tasks, mean calls and mean tools of a task."""
    out = []
    for epoch in sorted({r["epoch"] for r in records}):
        specs = [r["task"]["spec"] for r in records if r["epoch"] == epoch]
        out.append({"epoch": epoch, "tasks": len(specs),
                    "calls": float(np.mean([len(s["calls"]) for s in specs])),
                    "tools": float(np.mean([len(s["tools"]) for s in specs]))})
    return out


# ---------------------------------------------------------------------------------------------
# table


def share(of: dict) -> float:
    """Right answers of all categories of a target."""
    right, asked = np.sum(list(of.values()), axis=0)
    return right / asked


def late(r, key) -> float:
    """Mean of a metric over the second half of a run."""
    return float(np.mean([m[key] for m in r["metrics"][len(r["metrics"]) // 2:]]))


def known(f, of="metrics"):
    """A column that is NaN for a model that was not trained here, or with of="shape" for a run
    that generated no tasks."""
    return lambda r: f(r) if r.get(of) else np.nan


OFFICIAL = {kind: (lambda r, kind=kind: share(r["official"][kind]))
            for kind in ("held-out, T = 1", "held-out", "more calls", "more functions")}
GENERATED = {
    "p_hat, 2nd half": known(lambda r: late(r, "success_rate"), "shape"),
    "in the band, from epoch 2": known(lambda r: sum(m["env_kept"] for m in r["metrics"][2:]),
                                       "shape")}
COLUMNS = {
    **OFFICIAL, **GENERATED,
    "validation, last": known(lambda r: r["metrics"][-1]["validation"]),
    "validation, first": known(lambda r: r["metrics"][0]["validation"]),
    "valid": known(lambda r: 1 - refused(r["metrics"][len(r["metrics"]) // 2:]), "shape"),
    "entropy of functions (bits)": known(lambda r: late(r, "skill_entropy"), "shape"),
    "calls a task, last": known(lambda r: r["shape"][-1]["calls"], "shape"),
    "functions a task, last": known(lambda r: r["shape"][-1]["tools"], "shape"),
    "distinct tasks": known(lambda r: sum(s["tasks"] for s in r["shape"]), "shape"),
    "minutes": known(lambda r: sum(m["seconds"] for m in r["metrics"]) / 60),
}


def by_name(results: Path) -> dict:
    """{name: {seed: line of real.jsonl}}: models that were not trained here, then the variants."""
    runs = {}
    for r in read_jsonl(results):
        runs.setdefault(r["name"], {})[r["seed"]] = r
    order = list(VARIANTS)
    return dict(sorted(runs.items(), key=lambda kv: kv[0] in order and 1 + order.index(kv[0])))


def page(results: Path) -> str:
    """Markdown, all that real.md holds: means with 95 % t-intervals over seeds, paired differences,
    and the reading if there is one."""
    runs, tasks = by_name(results), results.with_name("real-tasks.jsonl")
    trained = {name: runs[name] for name in VARIANTS if name in runs}
    lines = means(runs, COLUMNS) + paired(trained, {**OFFICIAL, **GENERATED})
    return "\n".join(lines) + "\n" + (readings(tasks) if tasks.is_file() else "")


def draw(results: Path):
    """real-validation.png and real-success.png, without what generated no tasks."""
    for key, label in CURVES:
        of = "metrics" if key == "validation" else "shape"
        figure(results, {name: {seed: r["metrics"] for seed, r in seeds.items()}
                         for name, seeds in by_name(results).items()
                         if all(r.get(of) for r in seeds.values())}, key, label)


# ---------------------------------------------------------------------------------------------
# the reading


def reading(results: Path) -> list:
    """The tasks to be read, READ early and READ late ones of each variant over all its seeds, in an
    order that tells nothing; "right" is for the reader: does the expected call answer the request?"""
    pools = {}
    for r in read_jsonl(results):
        for task in r.get("tasks", ()):
            pools.setdefault((r["name"], task["part"]), []).append({"name": r["name"], **task})
    out = []
    for key in sorted(pools):
        random.Random(0).shuffle(pools[key])
        out += pools[key][:READ]
    random.Random(1).shuffle(out)
    return [{"id": i, **task, "right": None} for i, task in enumerate(out)]


def readings(path: Path) -> str:
    """Markdown: how many of the tasks that were read have the right expected calls, and what p_hat
    says of it (each distinct task once)."""
    read, counts = read_jsonl(path), {}
    for task in read:
        counts.setdefault((task["name"], task["part"]), []).append(task["right"])
    rows = ["", "| read by hand: right expected calls | early | late |", "|---|---|---|"]
    for name in dict.fromkeys(name for name, _ in sorted(counts)):
        cells = [f"{sum(map(bool, v))} of {len(v)}" for v in
                 (counts.get((name, part), []) for part in ("early", "late"))]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    rows += ["", "| expected calls | distinct tasks | p_hat = 0 | 2/8 to 6/8 | mean p_hat |",
             "|---|---|---|---|---|"]
    distinct = {(task["request"], task["calls"]): task for task in read}.values()
    for right, word in ((True, "right"), (False, "wrong")):
        rates = [task["p_hat"] for task in distinct if bool(task["right"]) == right]
        inside = sum(0.24 < p < 0.76 for p in rates)
        rows.append(f"| {word} | {len(rates)} | {sum(p == 0 for p in rates)} | {inside} | "
                    f"{np.mean(rates or [np.nan]):.2f} |")
    return "\n".join(rows) + "\n"


def main(argv=None) -> int:
    """Entry point; 0, or 2 with one line on a user's mistake."""
    p = Parser(prog="python -m experiments.real", description=__doc__.splitlines()[0],
               allow_abbrev=False)
    p.add_argument("what", choices=("run", "table", "tasks"))
    p.add_argument("--data", help="folder of the benchmarks")
    p.add_argument("--base-tasks", help="file of eval.make_base")
    p.add_argument("--model", help="folder of the warm start")
    p.add_argument("--instruct", default="", help="the model before it, for the first row")
    p.add_argument("--seeds", type=int, default=3, help="runs of each variant")
    p.add_argument("--only", nargs="+", choices=VARIANTS, default=(), help="variants (default: all)")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    p.add_argument("--work", default="runs/real", help="folder of the run folders")
    p.add_argument("--results", default=str(RESULTS), help="folder of the results")
    try:
        args, extra = p.parse_known_args(argv)
        results = Path(args.results) / "real.jsonl"
        if args.what == "run":
            for name in ("data", "base_tasks", "model"):
                if not vars(args)[name]:
                    raise UserError(f"run needs --{name.replace('_', '-')}")
            run(args, extra)
        elif extra or not results.is_file():
            raise UserError(f"unknown option {extra[0]}" if extra else f"{results}: no such file")
        tasks = results.with_name("real-tasks.jsonl")
        if args.what == "tasks":
            if tasks.exists():
                raise UserError(f"{tasks} exists, with what was read: move it away first")
            append_jsonl(tasks, reading(results))
            return 0
        text = page(results)
        results.with_suffix(".md").write_text(text)
        draw(results)
        print(text)
        return 0
    except (UserError, OSError) as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
