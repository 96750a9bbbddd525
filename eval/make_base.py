"""Make base tasks for training from the part of a benchmark that is not evaluated.

Paper: its base set (544 samples) was never published.

Usage:

    python -m eval.make_base BENCH --data DIR --out base.jsonl
    python genenv.py --world tool_calls --base-tasks base.jsonl ...

BENCH is bfcl (the single-turn Python categories; the evaluation uses the long-context turns) or
travelplanner (the 45 training queries). Each line is a JSON object {"task", "tools"?, "calls"?,
"reference"?}, the format that worlds/tool_calls.py documents. Records that it would refuse are left
out and counted. If the id or request of a record is in the evaluation part, the program stops and
writes nothing: it compares the texts itself and does not trust the benchmark module.
"""
import json
import sys
from collections import Counter
from pathlib import Path

from errors import UserError, exit_code, write_whole
from support.options import Parser
from eval import bfcl, travelplanner
from eval.common import load_records
from worlds import InvalidTask
from worlds.tool_calls import make_task

MODULES = {module.NAME: module for module in (bfcl, travelplanner)}


def main(argv=None) -> int:
    """Write base tasks. Return the exit code: 0, or 2 on bad input with one line on stderr."""
    return exit_code(lambda: run(argv))


def run(argv) -> int:
    """Parse the options, collect the base tasks, and write them. Return 0."""
    parser = Parser(prog="python -m eval.make_base", description=__doc__.split("\n\n")[0])
    parser.add_argument("bench", choices=MODULES)
    parser.add_argument("--data", required=True, metavar="DIR")
    parser.add_argument("--out", required=True, metavar="FILE")
    args = parser.parse_args(argv)
    if Path(args.out).exists():
        raise UserError(f"--out {args.out} exists and is not overwritten: choose another name")
    tasks, faults = base_tasks(args.bench, args.data)
    write_whole(args.out, "".join(json.dumps(task, ensure_ascii=False) + "\n" for task in tasks))
    left_out = "".join(f"; left out: {reason} ({n})" for reason, n in faults.most_common())
    print(f"{len(tasks)} base tasks of {args.bench}: {args.out}{left_out}")
    return 0


def base_tasks(bench: str, data) -> tuple[list, Counter]:
    """Return (distinct base tasks, records left out by reason) of a benchmark's training part.

    Raise UserError if a record is in the evaluation part.
    """
    module = MODULES[bench]
    evaluated = set()
    for record in load_records(module, data, split="test"):
        evaluated |= marks(record, module.prompt(record)[-1]["content"])
    tasks, faults = {}, Counter()
    for record in load_records(module, data, split="train"):
        task = module.base_task(record)
        if task is None:
            faults["no base task can be made"] += 1
            continue
        if evaluated & marks(record, task["task"]):
            raise UserError(
                f"{bench}: refusing to write {record['id']!r}: it is in the evaluation part"
            )
        try:
            # Check it as strictly as a simulator's task: its text must ask for something.
            make_task(task, "env")
        except InvalidTask as fault:
            faults[str(fault)] += 1
            continue
        # Drop duplicates: they would count twice in the base set.
        tasks[json.dumps(task, sort_keys=True)] = task
    return list(tasks.values()), faults


def marks(record: dict, request: str) -> set:
    """Return what identifies a record: its id, and its requests with case and spacing ignored."""
    requests = [request, *(record[key] for key in ("user", "query") if key in record)]
    return {record["id"], *(" ".join(text.casefold().split()) for text in requests)}


if __name__ == "__main__":
    sys.exit(main())
