"""How often is the grounding check right? Against tasks that a person has read.

What of the paper this is: nothing; it measures worlds/grounding.py. How it is run:

    python -m experiments.grounding [--base FILE]     # results/grounding.md

It reads the tasks of results/**/real-tasks.jsonl, in each of which a person has said whether the
expected calls follow from the request. `ungrounded` was built on the half of them whose request has
a SHA-256 that begins with 0 to 7; the other half is only reported. `uncalled` was tried on both.
--base FILE, of eval.make_base, says besides how many of a benchmark's own tasks would pass. They are
not checked in a run.

Where it stops: the files hold signatures instead of schemas, so descriptions are unknown here.
"""
import ast
import hashlib
import sys
from pathlib import Path

from common.cli import Parser, exit_code
from common.files import UserError, read_jsonl
from data_pool import Task
from worlds import call_text
from worlds.grounding import uncalled, ungrounded
from worlds.schemas import structured
from worlds.tool_calls import read_tasks

RESULTS = Path(__file__).resolve().parent / "results"
TYPE_OF = {spoken: name for name, spoken in call_text.TYPES.items()}


def schema_of(node) -> dict:
    """The syntax tree of an argument's type -> its schema: the inverse of a signature's types."""
    if isinstance(node, ast.BinOp):  # "a" | "b"
        values = schema_of(node.left)["enum"] + schema_of(node.right)["enum"]
        return {"type": "string", "enum": values}
    if isinstance(node, ast.Constant) and node.value is not None:
        return {"type": "string", "enum": [node.value]}
    if isinstance(node, ast.Subscript):
        return {"type": "array", "items": schema_of(node.slice)}
    if isinstance(node, ast.Dict):
        members = zip(node.keys, node.values)
        return {"type": "object", "properties": {k.id: schema_of(v) for k, v in members}}
    return {"type": TYPE_OF[ast.unparse(node)]}


def tool_of(line: str) -> dict:
    """A signature -> the tool spec that it was written of, without descriptions."""
    name, _, rest = line.partition("(")
    arguments = ast.parse(f"def f({rest}: pass").body[0].args
    names = [arg.arg for arg in arguments.args]
    properties = {arg.arg: schema_of(arg.annotation) for arg in arguments.args}
    for name_, node in zip(reversed(names), reversed(arguments.defaults)):
        if ast.literal_eval(node) is not ...:
            properties[name_]["default"] = ast.literal_eval(node)
    return {"name": name, "description": "",
            "parameters": {"type": "object", "properties": properties}}


def task_of(record: dict) -> Task:
    """A record of what was read -> its task."""
    return Task(record["request"], {"tools": [tool_of(line) for line in record["tools"]],
                                    "calls": call_text.parse_calls(record["calls"])})


def half_of(record: dict) -> str:
    """Which half a record belongs to; the same request is always in one half."""
    digit = hashlib.sha256(record["request"].encode()).hexdigest()[0]
    return "built on" if digit < "8" else "only reported"


def counts(records) -> dict:
    """{(right, kept): number of records}."""
    out = {(right, kept): 0 for right in (True, False) for kept in (True, False)}
    for record in records:
        task = task_of(record)
        out[record["right"], not (ungrounded(task) or uncalled(task))] += 1
    return out


def table(records) -> str:
    """Markdown: a row for each half, over all tasks that were read and over the distinct ones."""
    rows = ["| half | tasks | right: kept | right: refused | wrong: kept | wrong: refused | "
            "right before | right among the kept |", "|" + "---|" * 8]
    distinct = {(r["request"], r["calls"]): r for r in records}.values()
    for what, chosen in (("all read", records), ("distinct", distinct)):
        for half in ("built on", "only reported"):
            n = counts(r for r in chosen if half_of(r) == half)
            right, kept = n[True, True] + n[True, False], n[True, True] + n[False, True]
            rows.append(f"| {half}, {what} | {sum(n.values())} | {n[True, True]} | "
                        f"{n[True, False]} | {n[False, True]} | {n[False, False]} | "
                        f"{_share(right, sum(n.values()))} | {_share(n[True, True], kept)} |")
    return "\n".join(rows) + "\n"


def _share(n: int, of: int) -> str:
    return f"{n / of:.0%}" if of else "-"


def base_line(path: str) -> str:
    """How many tasks of a file of base tasks would pass."""
    tasks = [task for task in read_tasks(path) if structured(task)]
    passed = sum(not (ungrounded(task) or uncalled(task)) for task in tasks)
    return f"Of {len(tasks)} tasks with calls in {Path(path).name}, {passed} would pass.\n"


def main(argv=None) -> int:
    """Entry point; 0, or 2 with one line on a user's mistake."""
    p = Parser(prog="python -m experiments.grounding", description=__doc__.splitlines()[0],
               allow_abbrev=False)
    p.add_argument("--base", nargs="+", default=[], help="files of base tasks, for information")
    p.add_argument("--results", default=str(RESULTS), help="folder of the results")
    def command():
        args = p.parse_args(argv)
        found = sorted(Path(args.results).rglob("real-tasks.jsonl"))
        if not found:
            raise UserError(f"{args.results}: no real-tasks.jsonl in it")
        records = [record for path in found for record in read_jsonl(path)
                   if record["right"] is not None]
        text = table(records) + "".join("\n" + base_line(path) for path in args.base)
        (Path(args.results) / "grounding.md").write_text(text, encoding="utf-8")
        print(text)
    return exit_code(command, "experiments", "nothing was changed")


if __name__ == "__main__":
    sys.exit(main())
