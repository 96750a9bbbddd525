"""Calls as text: what is written is read back, and nothing else is ever taken for a call.

Run: python -m pytest tests/test_call_text.py -q
"""
import ast
import builtins
import json
import random
import time

import pytest

from helpers import raised
from test_tool_calls import TEXT, WHOLE, call, lines, options, schema, tool
from worlds import InvalidTask
from worlds.tools import call_text, task_text
from worlds.tool_calls import World


CHARACTERS = "ab \"'\\\n\r\t\x01\x7f{}[]()=,#:;`$%ß漢🙂\u2028\u0085\ufeff"


def random_text(rng):
    return "".join(rng.choices(CHARACTERS, k=rng.randrange(8)))


def random_value(rng, depth=0):
    """Any JSON value that the world's bounds allow."""
    kind = rng.choice(["leaf", "list", "dict"]) if depth < 3 else "leaf"
    if kind == "leaf":
        whole = rng.randrange(-10 ** 20 + 1, 10 ** 20)
        return rng.choice([random_text(rng), whole, 0.5, -1e-9, 1e300, 2.0, True, None])
    parts = [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return parts if kind == "list" else {random_text(rng): part for part in parts}


def test_random_calls_round_trip():
    rng = random.Random(0)
    for _ in range(1000):
        name = rng.choice(["f", "math.hypot", "a-b.c_2", "21st/x", "größe"])
        names = rng.sample(["city", "from", "class", "None", "_", "note", "año"], 2)
        written = call(name, **{argument: random_value(rng) for argument in names})
        line = call_text.write_call(written)
        # true is not 1 and 5.0 is not 5 to the reader either: the types come back as well
        assert repr(call_text.parse_calls(line)) == repr([written]), line


def test_signature_says_what_the_schema_says():
    who = schema(age={"type": ["integer", "null"]})
    who["properties"]["name"] = TEXT
    book = tool("book", "A  b", **{"from": TEXT, "to": {**TEXT, "description": "Not shown."}})
    book["parameters"]["properties"] = {
        "window": {"type": "boolean"}, **book["parameters"]["properties"],
        "kind": {"enum": ["fast", "slow"], "default": "fast"}, "who": who}
    assert call_text.signature(book) == (
        'book(from_: str, to: str, window: bool = ..., kind: "fast" | "slow" = "fast", '
        'who: {age: int | None, name: str = ...} = ...)  # A b')


BAD = [
    "", " ", "f", "f(", "f(1)", "f(*[1])", "f(**{'a': 1})", "f(a=1, 2)", "f(a=g(b=1))", "f(a=g)",
    "f(a=b'x')", "f(a={1, 2})", "f(a=...)", "f(a=1j)", "f(a=1 + 1j)", "f(a=true)", "f(a=1, a=2)",
    "f(a=1e999)", "f(a=--1)", "f(a={1: 2})", "f(a=1)(b=2)", "f(a=1).g(b=2)", "f(a=1) + g(b=2)",
    "f(a=1); g(b=2)", "f(a=1) # g", "f(a=1) and so on", "Sure: f(a=1)", "a.f b(a=1)", "[f(a=1)]",
    "f (a=1)", "f(a='\\ud800')", "f(a='\\x00')", "f(a='\0')", "f(a=" + "9" * 21 + ")",
    "f(a=" + "9" * 5000 + ")", "f(a=1)\nthat is all", "f(a=\n1)", "f(a='x)", "f(from=1)",
    "f(a=__import__('os').system('true'))", "__import__('os').system(command='true')",
    "é" * 140 + "(a=1)",
    f"f(a={'[' * 60}{']' * 60})", f"f(a='{'x' * 10 ** 6}')", "f(" * 16000,
    f"f(a={'[' * 16000}{']' * 16000})",
    f"f(a={'-' * 32000}1)", f"f(a={'1+' * 16000}1)", f"f(a=b{'.c' * 16000})", "f(a=1)\n" * 150000,
]


@pytest.mark.parametrize("text", BAD, ids=[text[:20] for text in BAD])
def test_bad_calls_are_none_and_quickly_so(text, monkeypatch):
    """No code object is ever made of the text: compile with any flag but AST-only is refused."""
    real, started = compile, time.process_time()

    def guarded(source, filename, mode, flags=0, *args, **kwargs):
        assert flags & ast.PyCF_ONLY_AST, "text of a model was compiled"
        return real(source, filename, mode, flags, *args, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "compile", guarded)
        for name in ("eval", "exec"):
            patch.setattr(builtins, name, lambda *a, **k: pytest.fail("text of a model was run"))
        found = call_text.parse_calls(text)
    assert found is None and time.process_time() - started < 2


# ---------------------------------------------------------------------------------------------
# the world with --call-format python, and with --tools


def lamp(n):
    """A task record about lamp n."""
    return {"task": f"Please dim lamp number {n} for me.", "tools": [tool("dim", lamp=WHOLE)],
            "calls": [call("dim", lamp=n)]}


def test_python_form_scores_as_json_does(tmp_path):
    path = lines(tmp_path / "base.jsonl", [lamp(n) for n in range(12)])
    world = World(options(base_tasks=path, call_format="python"))  # whose right answers earn 1
    task = world.base_tasks()[0]
    odd = json.dumps(lamp(7)).replace('"lamp"', '"lamp number"')
    raised(InvalidTask, "tool schema", world.parse_task, odd, task, 0)
    n = task.spec["calls"][0]["arguments"]["lamp"]
    assert world.agent_prompt(task)[0]["content"].endswith("\ndim(lamp: int)")
    assert world.score(task, f"dim(lamp={n}.0)") == (1.0, True)
    assert world.score(task, f"dim(lamp={n + 1})") == (0.0, True)
    assert world.score(task, f"dim({n})") == (0.0, False)


LINES = "Level: 1 of 2\nCall: dim(lamp=7)\nRequest: Dim lamp 7,\nplease."


def test_a_task_in_lines_is_read_back_and_nothing_else():
    assert task_text.read(LINES, call_text.parse_call) == {
        "task": "Dim lamp 7,\nplease.", "level": (1, 2),
        "calls": [call("dim", lamp=7)]}
    for text in ("", "Request: Dim it.", "Call: dim(lamp=7)\nRequest: x", "Level: 1 of 2\nRequest:",
                 LINES.replace("7)", "7"), LINES + "\nSolved: 50 %", "Sure!\n" + LINES,
                 LINES.replace("Call", "Sure!\nCall"), LINES + "x" * 10 ** 6):
        assert task_text.read(text, call_text.parse_call) is None, text
