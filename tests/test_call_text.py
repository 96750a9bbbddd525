"""Calls as text: what is written is read back, and nothing else is ever taken for a call.

Run: python -m pytest tests/test_call_text.py -q
"""
import ast
import builtins
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_pool import UserError, read_jsonl
from worlds import InvalidTask, call_text, tool_calls
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
    "f(a=exec)", "f(a=(yield))", "f(a=`1`)", "f(a='x)", "f(from=1)", "é" * 140 + "(a=1)",
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


# ---------------------------------------------------------------------------------------------
# the world with --call-format python, --keep-tools and --exemplars


def tool(name, **types):
    """A tool spec all of whose arguments are required."""
    return {"name": name, "description": "", "parameters": {
        "type": "object", "required": list(types),
        "properties": {key: {"type": kind} for key, kind in types.items()}}}


def lamp(n, name="dim"):
    """A task record about lamp n."""
    return {"task": f"Please {name} lamp number {n} for me.", "tools": [tool(name, lamp="integer")],
            "calls": [{"name": name, "arguments": {"lamp": n}}]}


RECORDS = [lamp(n) for n in range(12)] + [lamp(n, "light") for n in range(8)] + [
    {"task": f"What is the name of pupil number {n}?", "reference": [f"name{n}", "x"]}
    for n in range(6)]
MORE = [*RECORDS, *(lamp(n, name) for n in range(20, 32) for name in ("clean", "test", "sell"))]


@pytest.fixture
def prepared(tmp_path):
    """prepared(**world options) -> options of a run, with the world prepared for them."""
    path = tmp_path / "base.jsonl"

    def prepare(records=RECORDS, **own):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        o = SimpleNamespace(model="m", base_tasks=str(path), validation_tasks="",
                            max_task_tokens=64, max_response_tokens=32, world_options=own)
        tool_calls.prepare(o)
        return o
    yield prepare
    tool_calls._form = tool_calls.Form()


def base_of(o, kind="Please dim"):
    """The first base task whose text begins so."""
    return next(task for task in tool_calls.base_tasks(o) if task.text.startswith(kind))


def test_a_limit_of_base_tasks_leaves_the_held_out_ones_alone(prepared):
    o = prepared(MORE)
    everything, held_out = tool_calls.base_tasks(o), tool_calls.validation_tasks(o)
    o = prepared(MORE, base_limit=5)
    few = tool_calls.base_tasks(o)
    assert len(few) == 5 and all(task in everything for task in few)
    prepared(MORE[::-1])  # the order of the file does not matter
    again = tool_calls.base_tasks(prepared(MORE[::-1], base_limit=5))
    assert {task.id for task in again} == {task.id for task in few}
    o = prepared(MORE, base_limit=5)
    assert tool_calls.validation_tasks(o) == held_out and list(tool_calls._form.pool) == few
    assert tool_calls.base_tasks(prepared(MORE, base_limit=10**6)) == everything
    with pytest.raises(UserError, match="--base-limit is -1"):
        prepared(MORE, base_limit=-1)


def test_python_form_says_and_scores_the_same_as_json(prepared):
    for call_format in ("json", "python"):
        o = prepared(call_format=call_format)
        for task in tool_calls.base_tasks(o):
            assert tool_calls.score(task, tool_calls.gold(task)) == (1.0, True)
    task = base_of(o)
    n = task.spec["calls"][0]["arguments"]["lamp"]
    assert tool_calls.agent_prompt(task)[0]["content"].endswith("\ndim(lamp: int)")
    score = lambda text: tool_calls.score(task, text)
    assert score(f"dim(lamp={n})\n") == (1.0, True) and score(f"dim(lamp={n}.0)") == (1.0, True)
    assert score(f"dim(lamp={n + 1})") == (0.0, True)
    assert score(f"dim(lamp={n})\ndim(lamp={n})") == (0.0, True)  # the whole list must agree
    for text in (f"dim({n})", f"dim(lamp='{n}')", "dim()", f"off(lamp={n})", f"dim(lamp={n}, x=1)",
                 f"dim(lamp=int('{n}'))", "dim(lamp=True)", "x" * 10 ** 6,
                 f'<tool_call>{{"name": "dim", "arguments": {{"lamp": {n}}}}}</tool_call>'):
        assert score(text) == (0.0, False), text


def test_kept_tools_leave_a_request_and_its_calls(prepared):
    o = prepared(call_format="python", keep_tools=True)
    seed_task = base_of(o)
    parse = lambda text: tool_calls.parse_task(text, seed_task, 3)
    task = parse("Call: dim(lamp=77)\n\nCall: dim(lamp=78)\n"
                 "Request: Dim lamps 77\nand 78, please.\n")
    assert task.spec["tools"] == seed_task.spec["tools"] and task.seed_task == seed_task.id
    assert [call["arguments"]["lamp"] for call in task.spec["calls"]] == [77, 78]
    assert (task.origin, task.epoch, task.text) == ("env", 3, "Dim lamps 77\nand 78, please.")
    for text, reason in (
            ("", "no request and call"), ("Request: Dim lamp 7 now please.", "no request and call"),
            ("Call: dim(lamp=7)", "no request and call"),
            ("Call: dim(7)\nRequest: Dim lamp 7 please.", "no request and call"),
            ("Call: dim(lamp=7)\nRequest: Dim lamp 7 please.\nCall: off(lamp=7)", "no request and call"),
            ("Answer: 7\nRequest: Dim lamp 7 please.", "no request and call"),
            ("x" * 10 ** 6, "no request and call"),
            (json.dumps(lamp(7)), "no request and call"),
            ("Call: off(lamp=7)\nRequest: Dim lamp 7 please.", "unknown tool"),
            ("Call: dim(lamp='7')\nRequest: Dim lamp 7 please.", "wrong arguments"),
            ("Call: dim(lamp=7)\nRequest: 7", "trivial text")):
        with pytest.raises(InvalidTask) as error:
            parse(text)
        assert str(error.value) == reason and reason in tool_calls.REASONS, text


def test_what_is_written_is_read_back_in_every_form(prepared):
    for call_format in ("json", "python"):
        for keep_tools in (False, True):
            o = prepared(call_format=call_format, keep_tools=keep_tools)
            for kind in ("Please dim", "What is"):
                task = base_of(o, kind)
                other = base_of(prepared(RECORDS[::-1], call_format=call_format,
                                         keep_tools=keep_tools), kind)
                back = tool_calls.parse_task(tool_calls.task_as_written(task), other, 0)
                assert back.text == task.text
                assert back.spec.get("calls") == task.spec.get("calls")
                assert back.spec.get("reference", ["x"])[0] == task.spec.get("reference", ["x"])[0]


def test_prompt_says_unknown_success_as_unknown(prepared):
    o = prepared(call_format="python", keep_tools=True)
    task = base_of(o)
    user = lambda success: tool_calls.env_prompt(task, success, 0.5)[1]["content"]
    assert user(None).endswith("\nSolved: unknown") and user(0.25).endswith("25 % of the time")
    assert user(0.0).endswith("Solved: 0 % of the time")
    assert user(None).startswith("dim(lamp: int)\nCall: dim(lamp=")


def test_offered_functions_are_others_and_always_the_same(prepared):
    o = prepared(MORE, call_format="python", keep_tools=True, offer=2)
    for task in tool_calls.base_tasks(o):
        others = tool_calls.offered(task)
        assert others == tool_calls.offered(task)
        names = [tool["name"] for tool in others]
        if not tool_calls.structured(task):
            assert not names  # a question has no functions to add to
            continue
        assert len(set(names)) == 2 and not set(names) & set(tool_calls.skills(task))
        user = tool_calls.env_prompt(task, None, 0.5)[1]["content"]
        assert all(f"\n{name}(lamp: int)" in user for name in names)
        assert all(name not in tool_calls.agent_prompt(task)[0]["content"] for name in names)
    assert "Others:" not in tool_calls.env_prompt(base_of(o, "What is"), None, 0.5)[1]["content"]
    o = prepared(MORE, call_format="python", keep_tools=True)
    assert not any(map(tool_calls.offered, tool_calls.base_tasks(o)))
    for bad, message in (({"offer": -1, "keep_tools": True}, "must not be negative"),
                         ({"offer": 1}, "needs --keep-tools")):
        with pytest.raises(UserError, match=message):
            prepared(MORE, **bad)


def test_a_variation_may_call_or_hold_what_is_offered(prepared):
    o = prepared(MORE, call_format="python", keep_tools=True, offer=2)
    seed_task = base_of(o)
    one, two = (tool["name"] for tool in tool_calls.offered(seed_task))
    parse = lambda lines: tool_calls.parse_task(
        f"{lines}\nRequest: Please see to lamps 70 and 71.", seed_task, 1)
    names = lambda task: {tool["name"] for tool in task.spec["tools"]}
    assert names(parse("Call: dim(lamp=70)")) == {"dim"}
    called = parse(f"Call: dim(lamp=70)\nCall: {one}(lamp=71)")
    assert names(called) == {"dim", one} and tool_calls.skills(called) == ["dim", one]
    held = parse(f"Call: dim(lamp=70)\nUnused: {two}")
    assert names(held) == {"dim", two} and tool_calls.skills(held) == ["dim"]
    assert f"{two}(lamp: int)" in tool_calls.agent_prompt(held)[0]["content"]
    # such a task is a seed task like any other: its own functions are not offered again
    assert not {tool["name"] for tool in tool_calls.offered(held)} & names(held)
    for lines, reason in ((f"Unused: {one}\nCall: dim(lamp=70)", "no request and call"),
                          ("Call: dim(lamp=70)\nUnused: nothing", "unknown tool"),
                          ("Call: dim(lamp=70)\nUnused: dim", "unknown tool"),
                          (f"Call: dim(lamp=70)\nCall: {one}(lamp=1)\nUnused: {one}", "unknown tool"),
                          ("Call: dim(lamp=70)\nUnused:", "unknown tool")):
        with pytest.raises(InvalidTask) as error:
            parse(lines)
        assert str(error.value) == reason, lines


def test_the_order_of_grown_tools_tells_nothing(prepared):
    o = prepared(MORE, call_format="python", keep_tools=True, offer=2)
    seed_task = base_of(o)
    one = tool_calls.offered(seed_task)[0]["name"]
    first = [tool_calls.parse_task(f"Call: dim(lamp={n})\nUnused: {one}\n"
                                   f"Request: Please dim the lamp {n}.", seed_task, 1).spec["tools"][0]["name"]
             for n in range(40)]
    assert 8 < first.count("dim") < 32


def test_warm_start_shows_how_tasks_grow(prepared):
    o = prepared(MORE, call_format="python", keep_tools=True, offer=2)
    held_out = {key for split in ("validation", "tuning")
                for task in tool_calls.validation_tasks(o, split)
                for key in tool_calls.same_task_key(task)}
    kinds, base = {"plain": 0, "held": 0, "joined": 0}, tool_calls.base_tasks(o)
    by_prompt = {json.dumps(tool_calls.env_prompt(task, None, 0.5)): task for task in base}
    for prompt, text in tool_calls.warm_start_pairs(o)["env"]:
        seed_task = by_prompt[json.dumps(prompt)]
        task = tool_calls.parse_task(text, seed_task, 0)  # what is imitated is always a valid task
        assert held_out.isdisjoint(tool_calls.same_task_key(task))
        grown = len(task.spec.get("tools", ())) > len(seed_task.spec.get("tools", ()))
        kinds["plain" if not grown else "joined" if len(task.spec["calls"]) > 1 else "held"] += 1
    assert all(n >= 5 for n in kinds.values()), kinds
    agent = tool_calls.warm_start_pairs(o)["agent"]
    assert [gold.count("\n") for _, gold in agent].count(1) == len(agent) - len(base) > 0
    # another pass, other ones; the same pass, the same ones
    assert tool_calls.warm_start_pairs(o, 1) != tool_calls.warm_start_pairs(o) == \
        tool_calls.warm_start_pairs(o, 0)
    prepared(MORE, call_format="python", keep_tools=True)
    assert len(tool_calls.warm_start_pairs(o)["agent"]) == len(base)


@pytest.mark.parametrize("keep_tools", [False, True])
def test_examples_are_the_same_for_a_seed_task_and_near_it(prepared, keep_tools):
    o = prepared(call_format="python", keep_tools=keep_tools, exemplars=3)
    tasks = tool_calls.base_tasks(o)
    for task in tasks:
        shown = tool_calls.examples(task, 3)
        assert shown == tool_calls.examples(task, 3) and len({t.id for t in shown}) == 3
        assert all(t in tasks and t.id != task.id for t in shown)
        # of these records there are always three others for the same function, or of the same kind
        assert all(tool_calls.skills(t) == tool_calls.skills(task) for t in shown)
        system = tool_calls.env_prompt(task, None, 0.5)[0]["content"]
        assert all(t.text in system for t in shown) and task.text not in system
    held_out = tool_calls.validation_tasks(o) + tool_calls.validation_tasks(o, "tuning")
    prompts = "".join(tool_calls.env_prompt(t, None, 0.5)[0]["content"] for t in tasks)
    assert not any(t.text in prompts for t in held_out)


def test_arguments_that_python_cannot_write_are_one_line(prepared):
    odd = {"task": "Please book the room of user 7.",
           "tools": [tool("book", **{"user id": "integer"})],
           "calls": [{"name": "book", "arguments": {"user id": 7}}]}
    prepared([*RECORDS, odd], call_format="json")
    with pytest.raises(UserError, match="'user id', which is no name in Python") as error:
        prepared([*RECORDS, odd], call_format="python")
    assert "\n" not in str(error.value)
    # a tool that the simulator makes up
    o = prepared(call_format="python")
    with pytest.raises(InvalidTask, match="tool schema"):
        tool_calls.parse_task(json.dumps(odd), base_of(o), 0)


def test_token_limits_follow_the_form(prepared):
    o = prepared(call_format="python", keep_tools=True)
    o.max_task_tokens = o.max_response_tokens = 16
    tool_calls.prepare(o)
    o.world_options = {"call_format": "json"}
    with pytest.raises(UserError, match="too short for JSON"):
        tool_calls.prepare(o)


@pytest.mark.skipif(not BFCL.is_dir(), reason="the benchmark data is not in ../shared/benchmarks")
def test_small_base_tasks_of_bfcl():
    from eval.make_base import base_tasks
    tasks, left_out = base_tasks("bfcl", str(BFCL), None, {"calls": 1, "tools": 3, "chars": 385})
    left = sum(left_out[f"over --{name}"] for name in ("calls", "tools", "chars"))
    assert (len(tasks), left) == (755, 1053)
    assert all(len(t["calls"]) == 1 and len(t["tools"]) <= 3 for t in tasks)


# ---------------------------------------------------------------------------------------------
# tools that answer


TOOLS = [{"name": "where", "description": "Where somebody is.", "parameters": {
    "type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]}},
         {"name": "dim", "description": "Dim a room.", "parameters": {
             "type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]}}]


def answering(who, room="study") -> dict:
    """A record whose second call needs what the first returns."""
    return {"task": f"Please dim the room where {who} is.", "tools": TOOLS,
            "calls": [{"name": "where", "arguments": {"who": who}},
                      {"name": "dim", "arguments": {"room": room}}],
            "results": [{"room": room}, True]}


ANSWERING = [answering(who, room) for who, room in (
    ("Ann", "study"), ("Bob", "hall"), ("Cem", "attic"), ("Dina", "cellar"), ("Eva", "porch"))]


def ask(name, value):
    """A call in the form that is set."""
    return tool_calls.said([{"name": name, "arguments": {"who" if name == "where" else "room": value}}])


@pytest.mark.parametrize("call_format", ["json", "python"])
def test_what_a_call_returns_is_told_to_the_agent(prepared, call_format):
    """The second call could not be known, or an episode would go on after its end."""
    prepared(ANSWERING, call_format=call_format)
    task, other = (tool_calls.make_task(r, "base") for r in (ANSWERING[0], lamp(7)))
    assert "told" in tool_calls.agent_prompt(task)[0]["content"]
    assert "told" not in tool_calls.agent_prompt(other)[0]["content"]
    state = tool_calls.start(task)
    first, second = ask("where", "Ann"), ask("dim", "study")
    assert tool_calls.respond(task, state, first) == 'where returns {"room": "study"}'
    assert tool_calls.respond(task, state, second) is None
    assert tool_calls.start(other) is None and tool_calls.respond(other, None, "dim(lamp=7)") is None
    assert tool_calls.played(task) == [first, 'where returns {"room": "study"}', second]
    for turns, expected in (([first, second], (1.0, True)), ([f"{first}\n{second}"], (1.0, True)),
                            (tool_calls.gold(task), (1.0, True)), ([first], (0.0, True)),
                            ([second, first], (0.0, True)), ([first, first], (0.0, True)),
                            ([first, ask("dim", "hall")], (0.0, True)), ([], (0.0, False)),
                            ([first, "dim it"], (0.0, False)), (["x" * 10 ** 6], (0.0, False)),
                            ([first, f"{second}\n{second}"], (0.0, True))):
        assert tool_calls.score(task, turns) == expected, turns


def test_records_whose_results_do_not_fit_are_refused(prepared):
    """An episode would have nothing to say to a call."""
    good = ANSWERING[0]
    assert tool_calls.make_task(good, "base").spec["ordered"]
    for bad in ({"results": [1]}, {"results": "ab"}, {"results": [1, 2, 3]}, {"ordered": False},
                {"calls": good["calls"][:1], "results": [1]}, {"results": ["x" * 3000, 1]}):
        with pytest.raises(InvalidTask) as error:
            tool_calls.make_task({**good, **bad}, "base")
        assert str(error.value) == "malformed task" and error.value.detail, bad
    for name in ("max_turns", "max_episode_tokens"):
        with pytest.raises(UserError, match="at least 1"):
            prepared(ANSWERING, **{name: 0})


@pytest.mark.parametrize("keep_tools", [False, True])
def test_the_simulator_writes_results_for_a_seed_task_that_has_them(prepared, keep_tools):
    """Variations of an episode would be single answers, or lose what the tools say."""
    o = prepared(ANSWERING, call_format="python", keep_tools=keep_tools, offer=0)
    seed_task, task = tool_calls.base_tasks(o)[0], tool_calls.make_task(answering("Fay", "barn"), "base")
    text = tool_calls.task_as_written(task)
    back = tool_calls.parse_task(text, seed_task, 2)
    assert back.spec == task.spec and back.text == task.text
    prompt = tool_calls.env_prompt(seed_task, None, 0.5)
    assert ("Result: " if keep_tools else '"results"') in prompt[1]["content"]
    plain = tool_calls.make_task(lamp(7), "base")
    without = tool_calls.task_as_written(tool_calls.make_task(
        {k: v for k, v in answering("Fay").items() if k != "results"}, "base"))
    for text, seed in ((without, seed_task), (text, plain)):
        with pytest.raises(InvalidTask):
            tool_calls.parse_task(text, seed, 2)
    if keep_tools:
        for lines in ("Result: 1\nCall: where(who='A')", "Call: where(who='A')\nResult: 1\nResult: 2",
                      "Call: where(who='A')\nResult: {1", 'Call: where(who="A")\nResult: 1, "x": 2',
                      "Call: where(who='A')\nCall: dim(room='x')\nResult: 1"):
            with pytest.raises(InvalidTask, match="no request and call"):
                tool_calls.parse_task(f"{lines}\nRequest: Please see to Ann.", seed_task, 2)


def test_examples_are_of_the_seed_tasks_kind(prepared):
    """The simulator would be shown single answers where it has to write results."""
    o = prepared([*ANSWERING, *map(lamp, range(8))], call_format="python", keep_tools=True)
    for seed_task in tool_calls.base_tasks(o):
        shown = tool_calls.examples(seed_task, 20)
        assert shown and {tool_calls.answering(t) for t in shown} == {tool_calls.answering(seed_task)}


def test_warm_start_imitates_episodes_turn_by_turn(prepared):
    """The agent would learn to make the second call before it is told what the first returns."""
    o = prepared(ANSWERING, call_format="python", keep_tools=True)
    pairs = tool_calls.warm_start_pairs(o)
    assert pairs["agent"] and all(len(said) == 3 for _, said in pairs["agent"])
    assert all("\nResult: " in text for _, text in pairs["env"]) and pairs["env"]
