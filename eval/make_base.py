"""python -m eval.make_base: base tasks for training from what a benchmark does not evaluate.

What of the paper this is: the base set (544 samples there, never published). How it is run:

    python -m eval.make_base BENCH --data DIR --out base.jsonl [--limit N]
    python genenv.py --base-tasks base.jsonl ...

For a small model, the tasks that it can read: one call, a few tools, short in the form that
--call-format python has (385 characters are some 110 to 130 tokens; about 760 tasks of BFCL):

    python -m eval.make_base bfcl --data DIR --out base.jsonl --calls 1 --tools 3 --chars 385

One JSON object per line: {"task", "tools"?, "calls"?, "reference"?}, the format that
worlds/tool_calls.py documents; tasks that its reader would refuse are left out and counted (in
BFCL mostly documents whose default has another type than their argument). The records are the
benchmark's training part, or, where it has none, parts that its evaluation leaves out (BFCL:
single-turn categories, while the evaluation is the long-context turns). Bamboogle has neither: all
125 questions are the evaluation.

What it refuses: a record whose id, game, or request is in the evaluation part ends the run with
nothing written, and a file that exists is never overwritten. The check is made here on the texts
themselves, whatever the benchmark module promises.
"""
import json
import sys
from collections import Counter
from pathlib import Path

from support.options import Parser, at_least
from support.files import UserError
from eval.__main__ import BENCHES, MODULES, load_records
from eval.common import exit_code, one_line, spread


def main(argv=None) -> int:
    """Write base tasks; returns the exit code: 0, or 2 on bad input with one line on stderr."""
    return exit_code(run, sys.argv[1:] if argv is None else argv)


def run(argv) -> int:
    """Parse the options, collect the base tasks, write them."""
    parser = Parser("python -m eval.make_base", description=__doc__.split("\n\n")[0])
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--data", required=True, metavar="DIR")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="N records, evenly spread")
    parser.add_argument("--calls", type=at_least(1), metavar="N",
                        help="only tasks of at most N calls")
    parser.add_argument("--tools", type=at_least(1), metavar="N",
                        help="only tasks of at most N tools")
    parser.add_argument("--chars", type=at_least(1), metavar="N",
                        help="only tasks whose request, tools and answer, as signatures and "
                             "python calls, have at most N characters")
    args = parser.parse_args(argv)
    out = Path(args.out)
    if out.exists():
        raise UserError(f"--out {out} exists and is not overwritten: choose another name")
    limits = {name: vars(args)[name] for name in ("calls", "tools", "chars") if vars(args)[name]}
    tasks, faults = base_tasks(args.bench, args.data, args.limit, limits)
    text = "".join(json.dumps(task, ensure_ascii=False) + "\n" for task in tasks)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "x", encoding="utf-8") as file:  # "x": not even if it appeared meanwhile
            file.write(text)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None
    left_out = "".join(f"; left out: {reason} ({n})" for reason, n in faults.most_common())
    print(f"{len(tasks)} base tasks of {args.bench}: {out}{left_out}")
    return 0


def base_tasks(bench: str, data, limit=None, limits=None) -> tuple[list, Counter]:
    """(distinct base tasks, records left out by reason) of the training part of a benchmark.

    limits: the most that a task may have, {"calls", "tools", "chars": number}, any of them.
    Raises UserError where there is none, and where a record is in the evaluation part.
    """
    module = MODULES[bench]
    records = load_records(bench, data, split="train")
    if "base_task" not in vars(module):
        raise UserError(f"{bench} has no training part, so no base tasks can be made of it")
    usable, faults = [], Counter()
    for record in records:
        task = module.base_task(record)
        fault = "no task in it" if task is None else unreadable(task) or too_large(
            task, limits or {})
        faults[fault] += 1
        if not fault:
            usable.append({**record, "base_task": task})
    if not usable:
        why = ", ".join(f"{fault} ({n})" for fault, n in faults.most_common(3))
        raise UserError(f"{bench}: no record outside the evaluation part makes a base task: {why}")
    refuse_evaluated(module, usable, load_records(bench, data, split="test"))
    chosen = spread(usable, limit)
    # duplicates of a task would weigh double in the base set
    distinct = {json.dumps(r["base_task"], sort_keys=True): r["base_task"] for r in chosen}
    del faults[""]
    return list(distinct.values()), faults


def unreadable(task: dict) -> str:
    """Why a task is no base task, or "": too short, or what the reader of --base-tasks says."""
    from worlds import InvalidTask
    from worlds.tool_calls import make_task, too_short
    if too_short(task["task"]):
        return "trivial text"
    try:
        make_task(task, "base")
    except InvalidTask as fault:
        return str(fault)
    return ""


def too_large(task: dict, limits: dict) -> str:
    """Which limit a task exceeds, or ""."""
    from worlds import call_text
    calls, tools = task.get("calls", []), task.get("tools", [])
    text = "\n".join([*map(call_text.signature, tools), task["task"],
                      call_text.write_calls(calls) if calls else str(task["reference"])])
    sizes = {"calls": len(calls), "tools": len(tools), "chars": len(text)}
    return next((f"over --{name}" for name, most in limits.items() if sizes[name] > most), "")


def refuse_evaluated(module, records: list, evaluated: list):
    """Raise UserError if any of `records` (with "base_task") is one of the evaluation records."""
    used = set().union(*(identity(r, module.prompt(r)[-1]["content"]) for r in evaluated))
    for record in records:
        shared = used & identity(record, record["base_task"]["task"])
        if shared:
            raise UserError(f"{module.NAME}: refusing to write {record['id']!r}, it is in the "
                            f"evaluation part ({one_line(sorted(shared)[0], 80)})")


def identity(record: dict, request: str) -> set:
    """What tells a record: its id, its game, and its requests without case and spacing."""
    requests = [request] + [record[key] for key in ("user", "question", "query")
                            if isinstance(record.get(key), str)]
    marks = {("request", " ".join(text.casefold().split())) for text in requests}
    return marks | {(key, record[key]) for key in ("id", "game") if key in record}


if __name__ == "__main__":
    sys.exit(main())
