"""Calls as text: what is written is read back, and nothing else is ever taken for a call.

Run: python -m pytest tests/test_call_text.py -q
"""
import ast
import builtins
import json
import random
import time
from pathlib import Path

import pytest

from data_pool import read_jsonl
from worlds import call_text
from worlds.tool_calls import EXAMPLE_TASKS, canonical, check_calls, check_tools

BFCL = Path(__file__).resolve().parents[2] / "shared" / "benchmarks" / "bfcl"


# ---------------------------------------------------------------------------------------------
# writing and reading agree


def round_trip(tasks) -> int:
    """Assert that every call of every task is read back as written; returns how many."""
    count = 0
    for task in (t for t in tasks if "calls" in t):
        text = call_text.write_calls(task["calls"])
        assert text.count("\n") == len(task["calls"]) - 1
        # canonical: 5.0 may come back as 5.0 or 5, an integer must not come back as a string
        assert canonical(call_text.parse_calls(text)) == canonical(task["calls"]), text
        check_calls(call_text.parse_calls(text), check_tools(task["tools"]))
        for tool in task["tools"]:
            assert not call_text.unwritable(tool["parameters"])
            line = call_text.signature(tool)
            assert "\n" not in line and line.startswith(tool["name"] + "(")
            for name in tool["parameters"].get("properties", {}):
                assert f"{call_text.spoken(name)}: " in line
        count += len(task["calls"])
    return count


def test_example_tasks_round_trip():
    assert round_trip(read_jsonl(EXAMPLE_TASKS)) > 40


@pytest.mark.skipif(not BFCL.is_dir(), reason="the benchmark data is not in ../shared/benchmarks")
def test_all_bfcl_base_tasks_round_trip():
    from eval.make_base import base_tasks
    tasks, _ = base_tasks("bfcl", str(BFCL))
    assert len(tasks) == 1808 and round_trip(tasks) > 2500


CHARACTERS = "ab \"'\\\n\r\t\x01\x7f{}[]()=,#:;`$%ß漢🙂\u2028\u0085\ufeff"


def random_value(rng, depth=0):
    """Any JSON value that the world's bounds allow."""
    kinds = ["text", "int", "float", "bool", "none"] + ["list", "dict"] * (depth < 3)
    kind = rng.choice(kinds)
    text = lambda: "".join(rng.choices(CHARACTERS, k=rng.randrange(8)))
    return {"text": text, "int": lambda: rng.randrange(-10 ** 18 + 1, 10 ** 18),
            "float": lambda: rng.choice([0.5, -1e-9, 1e300, 2.0, -0.0, 1e22]),
            "bool": lambda: rng.random() < 0.5, "none": lambda: None,
            "list": lambda: [random_value(rng, depth + 1) for _ in range(rng.randrange(4))],
            "dict": lambda: {text(): random_value(rng, depth + 1)
                             for _ in range(rng.randrange(3))}}[kind]()


def test_random_calls_round_trip():
    rng = random.Random(0)
    names = ["city", "from", "class", "x1", "lambda", "None", "_", "note", "is_"]
    for _ in range(2000):
        call = {"name": rng.choice(["f", "math.hypot", "a-b.c_2"]), "arguments":
                {n: random_value(rng) for n in rng.sample(names[:-1], rng.randrange(4))}}
        line = call_text.write_call(call)
        back = call_text.parse_calls(line)
        assert back == [call], line
        # true is not 1 and 5.0 is not 5 to the reader either: the types come back as well
        assert repr(back[0]["arguments"]) == repr(call["arguments"])


def test_names_that_are_no_keyword_arguments_are_named():
    schema = lambda name: {"type": "object", "properties": {name: {"type": "string"}}}
    assert [call_text.unwritable(schema(n)) for n in ("user id", "2nd", "ﬁ", "from_", "a-b")] == \
        ["user id", "2nd", "ﬁ", "from_", "a-b"]
    assert [call_text.unwritable(schema(n)) for n in ("from", "note", "_x")] == ["", "", ""]


def test_signature_says_what_the_schema_says():
    tool = {"name": "book", "description": "Not shown.", "parameters": {
        "type": "object", "required": ["to", "from"], "properties": {
            "window": {"type": "boolean"}, "from": {"type": "string"},
            "to": {"type": "string", "description": "Not shown either."},
            "seats": {"type": "integer", "default": 1},
            "kind": {"type": "string", "enum": ["fast", "slow"], "default": "fast"},
            "days": {"type": "array", "items": {"type": "number"}},
            "who": {"type": "object", "required": ["age"], "properties": {
                "age": {"type": "integer"}, "name": {"type": "string", "default": ""}}},
            "note": {"type": "object"}, "nothing": {"type": "null"}}}}
    assert call_text.signature(tool) == (
        'book(from_: str, to: str, window: bool = ..., seats: int = 1, kind: "fast" | "slow" = '
        '"fast", days: list[float] = ..., who: {age: int, name: str = ""} = ..., '
        'note: dict = ..., nothing: None = ...)')


# ---------------------------------------------------------------------------------------------
# everything else is no call


def test_good_calls():
    parse = call_text.parse_calls
    assert parse(' f(a="x", b=[1, (2,)], c={"k": None}, d=-2.5) ') == [
        {"name": "f", "arguments": {"a": "x", "b": [1, [2]], "c": {"k": None}, "d": -2.5}}]
    assert parse("f()\n\n g(a=True)\n") == [{"name": "f", "arguments": {}},
                                            {"name": "g", "arguments": {"a": True}}]
    assert parse("```python\nmath.gcd(a=4, b=6)\n```") == [
        {"name": "math.gcd", "arguments": {"a": 4, "b": 6}}]
    assert parse("f(s='brackets ([{ in \\' quotes', t=\"--\")") is not None


BAD = [
    "", " ", "f", "f(", "f)", "f(1)", "f('x')", "f(*[1])", "f(**{'a': 1})", "f(a=1, 2)",
    "f(a=g(b=1))", "f(a=g)", "f(a=b.c)", "f(a=[x for x in y])", "f(a={x: 1 for x in y})",
    "f(a=f'{1}')", "f(a=f'x')", "f(a=b'x')", "f(a={1, 2})", "f(a=...)", "f(a=1j)", "f(a=1 + 1)",
    "f(a=1 + 1j)", "f(a='x' * 9)", "f(a=not 1)", "f(a=lambda: 1)", "f(a=(b := 1))",
    "f(a=1 if 1 else 2)", "f(a=True and True)", "f(a=x[0])", "f(a=true)", "f(a=null)",
    "f(a=1, a=2)", "f(a=1e999)", "f(a=--1)", "f(a={1: 2})", "f(a={**b})", "f(a=[*b])",
    "f(a=1)(b=2)", "f(a=1).g(b=2)", "f(a=1) + g(b=2)", "f(a=1); g(b=2)", "f(a=1) # g",
    "f(a=1) and so on", "Sure: f(a=1)", "a.f b(a=1)", "x = f(a=1)", "[f(a=1)]", "1f(a=1)",
    "f (a=1)", "f(a='\\ud800')", "f(a='\\x00')", "f(a='\0')", "f(a=" + "9" * 19 + ")",
    "f(a=" + "9" * 5000 + ")", "f(a=1)\nthat is all", "f(a=\n1)", "f(a=await b)",
    "f(a=__import__('os').system('true'))", "__import__('os').system(command='true')",
    "f(a=exec)", "f(a=(yield))", "f(a=`1`)", "f(a='x)", "f(from=1)", "é" * 70 + "(a=1)",
]


@pytest.mark.parametrize("text", BAD)
def test_bad_calls_are_none(text):
    assert call_text.parse_calls(text) is None


def test_digits_at_the_bound():
    assert call_text.parse_calls("f(a=-" + "9" * 18 + ")") is not None
    assert call_text.parse_calls("f(a=" + "9" * 18 + "0)") is None


HUGE = {"name": "f" * 10 ** 6, "string": f"f(a='{'x' * 10 ** 6}')", "open": "f(" * 16000,
        "brackets": f"f(a={'[' * 16000}{']' * 16000})", "signs": f"f(a={'-' * 32000}1)",
        "spaced signs": f"f(a={'- ' * 16000}1)", "not": f"f(a={'not ' * 8000}1)",
        "sums": f"f(a={'1+' * 16000}1)", "members": f"f(a=b{'.c' * 16000})",
        "items": f"f(a=b{'[0]' * 10000})", "lambdas": f"f(a={'lambda:' * 4500}1)",
        "ifs": f"f(a={'1 if 1 else ' * 2700}1)", "powers": f"f(a={'2**' * 10000}2)",
        "lines": "f(a=1)\n" * 4000, "million": "f(a=1)\n" * 150000}


@pytest.mark.parametrize("kind", HUGE)
def test_huge_texts_are_none_and_quick(kind):
    started = time.time()
    assert call_text.parse_calls(HUGE[kind]) is None
    assert time.time() - started < 2


def test_depth_at_the_bound():
    deep = lambda n: f"f(a={'[' * n}{']' * n})"
    assert call_text.parse_calls(deep(call_text.MAX_DEPTH)) is not None
    assert call_text.parse_calls(deep(call_text.MAX_DEPTH + 1)) is None


def test_nothing_is_executed(monkeypatch):
    """No code object is ever made of the text: compile with any flag but AST-only is refused."""
    real = compile

    def guarded(source, filename, mode, flags=0, *args, **kwargs):
        assert flags & ast.PyCF_ONLY_AST, "text of a model was compiled"
        return real(source, filename, mode, flags, *args, **kwargs)

    refuse = lambda *a, **k: pytest.fail("text of a model was run")
    monkeypatch.setattr(builtins, "compile", guarded)
    monkeypatch.setattr(builtins, "eval", refuse)
    monkeypatch.setattr(builtins, "exec", refuse)
    for text in [*BAD, "f(a=1)"]:
        call_text.parse_calls(text)


def test_random_text_never_raises():
    rng = random.Random(1)
    parts = ["f", "(", ")", "a=", "'", '"', "[", "]", "{", "}", ",", ":", "1", "\\", "-", "\n",
             " ", "lambda", "*", "ß", "\ud800", "\0", "`", "#", "f'", ".", "not "]
    for _ in range(5000):
        calls = call_text.parse_calls("".join(rng.choices(parts, k=rng.randrange(30))))
        assert calls is None or json.dumps(calls, ensure_ascii=False).encode()
