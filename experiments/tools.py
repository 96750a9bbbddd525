"""Bring your tools: many functions, few examples. Runs of the 135M model, beside what rivals reach.

What of the paper this is: its first claim (GenEnv beats training on the base set alone), on the
smallest instruct model that there is, where people stand: a list of functions and a few examples.

How it is run, with START made by a warm start with the same files (EXPERIMENTS.md has it):

    python -m experiments.tools run --base-tasks FILE --tools LIST --validation-tasks HELDOUT \
        --model START --results RESULTS.jsonl
    python -m experiments.tools table --results RESULTS.jsonl   # RESULTS.md and a figure
    python -m experiments.tools tasks --results RESULTS.jsonl   # tasks to be read by hand

`run` goes on where it was interrupted, inside a run as well (--work holds the run folders), and
works seed by seed: one more seed, on another machine, may have a START of its own.

The target is HELDOUT, under the world's own rule. With `--data DIR`, the folder of benchmarks, and
FILE made by `python -m eval.make_base bfcl`, there are 64 examples; the target is every other task
of FILE that is no tuning task, under BFCL's rule. Both have two halves: tasks whose functions have
an example, and tasks whose functions have none.

Where it differs on purpose: two rivals that the paper leaves out. GRPO on the examples needs no
simulator; imitation learns the expected calls of generated tasks by likelihood, as a data pipeline
would, with the same tasks and as many updates, but without any attempt of its own.
"""
import os
import random
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from commands.ask import load_agent
from common.cli import Parser, at_least, exit_code
from common.files import UserError, append_jsonl, read_jsonl
from curriculum import SUCCESS
from data_pool import Task
from eval import bfcl
from eval.__main__ import load_records
from eval.make_base import unreadable
from experiments import __main__ as suite
from experiments.tables import CURVES, _with_bounds, figure, means, paired, refused
from run.options import parse_options
from worlds import call_text, load_world

RESULTS = Path(__file__).resolve().parent / "results"
EXAMPLES = 64
VARIANTS = {  # in the order in which they are run, after the warm start alone
    "genenv": [],
    "GRPO on the examples": ["--variant", "base"],
    "random": ["--variant", "random"],
    "genenv, not grounded": ["--no-ground"],
    "genenv, functions near alpha": ["--function-selection", "near_alpha"],
    "static": ["--variant", "static"],
    "imitation": ["@imitation"],
}
SAMPLES = 8       # drawn answers at each task of the target
MEASURES = {"T = 1": (SAMPLES, 1.0), "greedy": (1, 0.0)}  # answers at each task, temperature


# ---------------------------------------------------------------------------------------------
# the target


def target(data, o) -> list:
    """[(BFCL record or None, task, whether its functions have an example)]: the validation tasks;
    with `data` every task of --base-tasks that is no example and shares neither words nor calls with
    one, or with a tuning task."""
    world = load_world("tool_calls")
    known = {name for task in world.base_tasks(o) for name in world.skills(task)}
    found = of_bfcl(data, world, o) if data else \
        [(None, task) for task in world.validation_tasks(o)]
    return [(record, task, known.issuperset(world.skills(task))) for record, task in found]


def of_bfcl(data, world, o):
    """(BFCL record, task) of each task of --base-tasks that is left for the target."""
    used = {key for task in [*world.base_tasks(o), *world.validation_tasks(o, "tuning")]
            for key in world.same_task_key(task)}
    # ids follow from the text and the spec: with them the records are found again
    wanted = {task.id for task in world.read_tasks(o.base_tasks)
              if used.isdisjoint(world.same_task_key(task))}
    for record in load_records("bfcl", data, split="train"):
        line = bfcl.base_task(record)
        task = None if line is None or unreadable(line) else world.make_task(line, "base")
        if task is not None and task.id in wanted:
            yield record, task
            wanted.discard(task.id)  # a task that two records have counts once


def scores(policy, adapter, goal, seed, longest) -> dict:
    """Right answers to each task of the target, in its order: {measure: of so many answers}.
    longest: tokens of an answer."""
    return {how: answered(policy, adapter, goal, G, temperature, seed, longest)
            for how, (G, temperature) in MEASURES.items()}


def answered(policy, adapter, goal, G, temperature, seed, longest) -> list:
    """How many of G answers to each task of the target are right; `seed` draws them."""
    world = load_world("tool_calls")
    prompts = [policy.encode(world.agent_prompt(task)) for _, task, _ in goal]
    rollouts = policy.sample(adapter, prompts, G, longest, temperature, policy.generator(seed),
                             max_rows=128)
    right = [0] * len(goal)
    for r in rollouts:
        record, task, _ = goal[r.group]
        right[r.group] += not r.limit and is_right(record, task, policy.decode(r.response))
    return right


def is_right(record, task, response: str) -> bool:
    """By BFCL's AST rule if there is a record of BFCL, else by the world's own rule."""
    if record is None:
        return load_world("tool_calls").score(task, response)[0] >= SUCCESS
    calls = call_text.parse_calls(response)
    return bool(calls) and not bfcl.check_ast(record, [(c["name"], c["arguments"]) for c in calls])


def score_model(model: str, settings, goal, seed, adapter=None) -> dict:
    """`scores` of a model folder, with the adapter in a folder or as it is."""
    o = parse_options([*settings, "--model", model, "--threads", "1"])
    policy = load_agent(o, str(adapter or ""))
    return scores(policy, "agent" if adapter else None, goal, seed, o.max_response_tokens)


# ---------------------------------------------------------------------------------------------
# runs


def run(args, extra):
    """All variants and seeds that the results file lacks, `--jobs` at a time, seed by seed."""
    settings = ["--preset", "135m-cpu", "--base-tasks", args.base_tasks,
                *(["--base-limit", str(EXAMPLES)] if args.data else []),
                "--tools", args.tools or args.base_tasks, *extra]
    o = parse_options([*settings, "--model", args.model])
    world = load_world(o.world)
    world.prepare(o)
    goal = target(args.data, o)
    halves = [known for _, _, known in goal]
    results = Path(args.results)
    work = Path(args.work or f"runs/tools-{results.stem}")
    work.mkdir(parents=True, exist_ok=True)
    there = read_jsonl(results) if results.is_file() else []
    # a seed may have a start of its own; with other options it would be another experiment
    if any(r.get("settings", settings) != settings or r["known"] != halves for r in there):
        raise UserError(f"{results} holds runs with other settings: give another --results")
    done = {(r["name"], r["seed"]) for r in there}
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    wanted = [(name, seed) for seed in seeds for name in args.only or VARIANTS
              if (name, seed) not in done]
    for seed in sorted({seed for _, seed in wanted if ("warm start", seed) not in done}):
        append_jsonl(results, [{"name": "warm start", "seed": seed, "settings": settings,
                                "known": halves,
                                "scores": score_model(args.model, settings, goal, seed)}])
    given = [*settings, "--model", args.model]
    with closing(suite.finished(VARIANTS, wanted, given, args.jobs, work)) as ended:
        for job in ended:
            suite.refuse_failed(job)
            line = collect(job["name"], job["seed"], job["folder"], settings, args.model, goal,
                           args.read)
            append_jsonl(results, [{**line, "known": halves}])
            print("done:", job["name"], job["seed"], flush=True)


def collect(name, seed, folder, settings, model, goal, n_read) -> dict:
    """One line of results: metrics of every epoch, scores, and n_read tasks to be read."""
    world = load_world("tool_calls")
    records = [r for r in read_jsonl(folder / "train.jsonl") if r["task"]["origin"] != "base"]
    tasks = {r["task"]["id"]: r for r in records}.values()
    keys = {key for r in tasks for key in world.same_task_key(Task(**r["task"]))}
    aimed = [world.same_task_key(task) for _, task, _ in goal]
    few = random.Random(seed).sample(list(tasks), min(n_read, len(tasks)))
    read = [{"request": r["task"]["text"], "p_hat": r["p_hat"], "epoch": r["task"]["epoch"],
             "tools": [call_text.signature(t) for t in r["task"]["spec"].get("tools", ())],
             "calls": call_text.write_calls(r["task"]["spec"].get("calls", ()))} for r in few]
    return {"name": name, "seed": seed, "settings": settings, "tasks": read,
            "metrics": read_jsonl(folder / "metrics.jsonl"),
            # tasks of the target that were written by chance
            "met": sum(not keys.isdisjoint(own) for own in aimed),
            "scores": score_model(model, settings, goal, seed, folder / "adapters" / "agent")}


# ---------------------------------------------------------------------------------------------
# table


def success(r, how: str, known=None) -> float:
    """Share of right answers on the target, or on its half with or without an example."""
    answers = [n for n, k in zip(r["scores"][how], r["known"]) if known is None or k == known]
    return float(np.mean(answers)) / MEASURES[how][0] if answers else np.nan


def trained(f, generates=True):
    """A column that is NaN for a model that was not trained here, or for a run that generated no
    tasks."""
    return lambda r: f(r["metrics"][1:]) if r.get("metrics") and not (
        generates and not any(m["distinct_tasks"] for m in r["metrics"])) else np.nan


def mean_of(key):
    """The mean of a metric over the epochs of training."""
    return trained(lambda metrics: float(np.mean([m[key] for m in metrics])))


TARGET = {f"{how}{words}": lambda r, how=how, known=known: success(r, how, known)
          for how in MEASURES
          for words, known in (("", None), (", with an example", True), (", without", False))}
COLUMNS = {
    **TARGET,
    "success on generated tasks": mean_of("success_rate"),
    "valid": trained(lambda metrics: 1 - refused(metrics)),
    "records in the band, an epoch": mean_of("env_kept"),
    "groups with signal": trained(
        lambda metrics: 1 - float(np.mean([m["zero_variance"] for m in metrics])), False),
    "functions practised": trained(lambda metrics: metrics[-1].get("functions_practised", np.nan)),
    "simulator's KL, last": trained(lambda metrics: metrics[-1]["env_kl"]),
    "minutes": trained(lambda metrics: sum(m["seconds"] for m in metrics) / 60, False),
}


def by_name(results: Path) -> dict:
    """{name: {seed: line of the results}}, the warm start first."""
    runs = {}
    for r in read_jsonl(results):
        runs.setdefault(r["name"], {})[r["seed"]] = r
    order = ["warm start", *VARIANTS]
    if not runs:
        raise UserError(f"{results} holds no runs")
    return {name: runs[name] for name in order if name in runs}


def over_tasks(runs) -> list[str]:
    """Lines of a table: genenv minus each other one, paired by task, each task at its mean over the
    seeds that both have; the 95 % interval is over tasks and says nothing of seeds."""
    rows = ["", "genenv minus the other, paired by task (95 % interval over tasks):", "",
            f"| other | {' | '.join(TARGET)} |", "|---" * (len(TARGET) + 1) + "|"]
    rate = lambda name, how, seeds: np.mean([runs[name][seed]["scores"][how] for seed in seeds],
                                            axis=0) / MEASURES[how][0]
    for name in runs:
        cells, both = [], sorted(runs["genenv"].keys() & runs[name].keys())
        for how in MEASURES if name != "genenv" and both else ():
            gap = rate("genenv", how, both) - rate(name, how, both)
            known = np.array(next(iter(runs[name].values()))["known"])
            for half in (np.full(len(gap), True), known, ~known):
                n = half.sum()
                cells.append("-" if n < 2 else _with_bounds(
                    gap[half].mean(), 1.96 * gap[half].std(ddof=1) / np.sqrt(n)))
        rows += [f"| {name} | {' | '.join(cells)} |"] * bool(cells)
    return rows


def page(results: Path) -> str:
    """Markdown, all that a page of results holds: means with 95 % t-intervals over seeds,
    differences paired by seed and by task, and the reading if there is one."""
    runs, tasks = by_name(results), tasks_file(results)
    lines = means(runs, COLUMNS)
    if "genenv" in runs:
        others = ("genenv", "warm start", *VARIANTS)
        lines += paired({name: runs[name] for name in others if name in runs}, TARGET)
        lines += over_tasks(runs)
    return "\n".join(lines) + "\n" + (readings(tasks) if tasks.is_file() else "")


def draw(results: Path):
    """A figure beside the results: success on generated tasks, of what generated any."""
    runs = {name: {seed: r["metrics"] for seed, r in seeds.items()}
            for name, seeds in by_name(results).items()
            if all(any(m["distinct_tasks"] for m in r.get("metrics", ())) for r in seeds.values())}
    if runs:
        figure(results, runs, *CURVES[1])


# ---------------------------------------------------------------------------------------------
# the reading


def tasks_file(results: Path) -> Path:
    """Where the tasks lie that are read by hand."""
    return results.with_name(f"{results.stem}-tasks.jsonl")


def reading(results: Path) -> list:
    """The tasks to be read, in an order that tells nothing; "right" is for the reader: do the
    expected calls answer the request?"""
    out = [{"name": r["name"], "seed": r["seed"], **task}
           for r in read_jsonl(results) for task in r.get("tasks", ())]
    random.Random(1).shuffle(out)
    return [{"id": i, **task, "right": None} for i, task in enumerate(out)]


def readings(path: Path) -> str:
    """Markdown: how many of the tasks that were read have the right expected calls."""
    counts = {}
    for task in read_jsonl(path):
        if task["right"] is not None:
            counts.setdefault(task["name"], []).append(bool(task["right"]))
    rows = ["", "| read by hand | right expected calls |", "|---|---|"]
    return "\n".join([*rows, *(f"| {name} | {sum(v)} of {len(v)} |"
                               for name, v in sorted(counts.items()))]) + "\n"


def main(argv=None) -> int:
    """Entry point; 0, or 2 with one line on a user's mistake."""
    p = Parser(prog="python -m experiments.tools", description=__doc__.splitlines()[0],
               allow_abbrev=False)
    p.add_argument("what", choices=("run", "table", "tasks"))
    p.add_argument("--data", help="folder of the benchmarks (default: --validation-tasks are the "
                   "target)")
    p.add_argument("--base-tasks", help="file of examples; beside --data one of eval.make_base")
    p.add_argument("--tools", default="", help="list of functions (default: those of --base-tasks)")
    p.add_argument("--model", help="folder of the warm start")
    p.add_argument("--seeds", type=at_least(1), default=3, help="runs of each variant")
    p.add_argument("--first-seed", type=at_least(0), default=0, help="the lowest seed of these runs")
    p.add_argument("--only", nargs="+", choices=VARIANTS, default=(), help="variants (default: all)")
    p.add_argument("--jobs", type=at_least(1), default=os.cpu_count(), help="processes at a time")
    p.add_argument("--read", type=at_least(0), default=20, help="tasks of a run to be read by hand")
    p.add_argument("--work", default="", help="folder of the run folders (default: runs/tools-NAME "
                   "for --results NAME.jsonl)")
    p.add_argument("--results", default=str(RESULTS / "tools.jsonl"), help="file of the results")
    def command():
        args, extra = p.parse_known_args(argv)
        results = Path(args.results)
        if args.what == "run":
            for name in ("base_tasks", "model"):
                if not vars(args)[name]:
                    raise UserError(f"run needs --{name.replace('_', '-')}")
            suite.refuse_set_here(extra)
            run(args, extra)
        elif extra or not results.is_file():
            raise UserError(f"unknown option {extra[0]}" if extra else f"{results}: no such file")
        if args.what == "tasks":
            tasks = tasks_file(results)
            if tasks.exists():
                raise UserError(f"{tasks} exists, with what was read: move it away first")
            append_jsonl(tasks, reading(results))
            return 0
        text = page(results)
        results.with_suffix(".md").write_text(text)
        draw(results)
        print(text)
        return 0
    return exit_code(command, "experiments.tools", "the same command goes on where it stopped")


if __name__ == "__main__":
    sys.exit(main())
