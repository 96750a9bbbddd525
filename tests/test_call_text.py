"""Calls as text: what is written is read back, and nothing else is ever taken for a call.

Run: python -m pytest tests/test_call_text.py -q
"""
import ast
import builtins
import json
import random
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.files import read_jsonl
from helpers import raised, user_error
from worlds import InvalidTask, call_text, check_task, held_out_keys, tool_calls
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


@pytest.mark.slow
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


BAD = [  # what ast.literal_eval refuses by itself, such as lambdas and sums, stands here once
    "", " ", "f", "f(", "f(1)", "f(*[1])", "f(**{'a': 1})", "f(a=1, 2)", "f(a=g(b=1))", "f(a=g)",
    "f(a=b'x')", "f(a={1, 2})", "f(a=...)", "f(a=1j)", "f(a=1 + 1j)", "f(a=true)", "f(a=1, a=2)",
    "f(a=1e999)", "f(a=--1)", "f(a={1: 2})", "f(a=1)(b=2)", "f(a=1).g(b=2)", "f(a=1) + g(b=2)",
    "f(a=1); g(b=2)", "f(a=1) # g", "f(a=1) and so on", "Sure: f(a=1)", "a.f b(a=1)", "[f(a=1)]",
    "1f(a=1)", "f (a=1)", "f(a='\\ud800')", "f(a='\\x00')", "f(a='\0')", "f(a=" + "9" * 19 + ")",
    "f(a=" + "9" * 5000 + ")", "f(a=1)\nthat is all", "f(a=\n1)", "f(a='x)", "f(from=1)",
    "f(a=__import__('os').system('true'))", "__import__('os').system(command='true')",
    "é" * 140 + "(a=1)",
]


@pytest.mark.parametrize("text", BAD)
def test_bad_calls_are_none(text):
    assert call_text.parse_calls(text) is None


HUGE = {"name": "f" * 10 ** 6, "string": f"f(a='{'x' * 10 ** 6}')", "open": "f(" * 16000,
        "brackets": f"f(a={'[' * 16000}{']' * 16000})", "signs": f"f(a={'-' * 32000}1)",
        "spaced signs": f"f(a={'- ' * 16000}1)", "sums": f"f(a={'1+' * 16000}1)",
        "members": f"f(a=b{'.c' * 16000})", "million": "f(a=1)\n" * 150000}


@pytest.mark.parametrize("kind", HUGE)
def test_huge_texts_are_none_and_quick(kind):
    started = time.time()
    assert call_text.parse_calls(HUGE[kind]) is None
    assert time.time() - started < 2


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


# ---------------------------------------------------------------------------------------------
# the world with --call-format python and --tools


def tool(name, **types):
    """A tool spec all of whose arguments are required."""
    return {"name": name, "description": f"To {name}.", "parameters": {
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
                            max_task_tokens=64, max_response_tokens=32, max_prompt_tokens=640,
                            world_options=own)
        tool_calls.prepare(o)
        return o
    return prepare


def base_of(o, kind="Please dim"):
    """The first base task whose text begins so."""
    return next(task for task in tool_calls.base_tasks(o) if task.text.startswith(kind))


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


LISTED = [tool(name, lamp="integer") for name in ("mend", "paint", "ship", "wash")]


@pytest.fixture
def listed(prepared, tmp_path):
    """Options of a run with a list of four functions, of which no base task calls any."""
    path = tmp_path / "tools.jsonl"
    path.write_text("".join(json.dumps(spec) + "\n" for spec in LISTED))
    return prepared(MORE, call_format="python", tools=str(path))


def names_of(specs):
    return [spec["name"] for spec in specs]


def test_a_base_task_is_assigned_functions_of_the_list(listed):
    generator, names = torch.Generator().manual_seed(0), tool_calls.functions(listed)
    assert names == ["mend", "paint", "ship", "wash"]
    seed_task, shapes = base_of(listed), Counter()
    for _ in range(200):
        given = tool_calls.assign(seed_task, names[::-1], generator)
        to_call, beside = map(names_of, tool_calls.functions_for(given))
        assert to_call + beside == names[::-1][:len(to_call + beside)]  # the first ones are to be called
        shapes[len(to_call), len(beside)] += 1
        assert (given.id, given.text) == (seed_task.id, seed_task.text)
    assert set(shapes) == {(a, b) for a in (1, 2) for b in (0, 1, 2)}
    assert 25 < sum(n for (a, _), n in shapes.items() if a == 2) < 75
    assert "to_call" not in seed_task.spec
    question = base_of(listed, "What is")
    assert tool_calls.assign(question, names, generator) == question
    # fewer functions than it would show
    assert names_of(sum(tool_calls.functions_for(tool_calls.assign(seed_task, ["mend"], generator)), [])) \
        == ["mend"]


def test_what_is_written_for_a_function_is_a_task_with_all_that_was_shown(listed):
    seed_task = tool_calls._assigned(base_of(listed), LISTED[:2], LISTED[2:3])
    user = tool_calls.env_prompt(seed_task, 0.5, 0.5)[1]["content"]
    assert user.startswith("Call: dim(lamp=") and user.endswith(
        "\nSolved: 50 % of the time\nWrite for:\nmend(lamp: int)\npaint(lamp: int)\n"
        "Not called:\nship(lamp: int)")
    parse = lambda calls: tool_calls.parse_task(f"{calls}\nRequest: Please see to lamp 70.", seed_task, 1)
    task = parse("Call: mend(lamp=70)")  # one of the two is enough
    assert sorted(names_of(task.spec["tools"])) == ["mend", "paint", "ship"]
    assert set(task.spec) == {"tools", "calls", "ordered"} and task.seed_task == seed_task.id
    check_task(tool_calls, task, seed_task, frozenset())
    for calls, reason in (("Call: ship(lamp=70)", "none of its functions"),
                          ("Call: dim(lamp=70)", "unknown tool"), ("Call: wash(lamp=7)", "unknown tool"),
                          ("Call: mend(lamp=70)\nCall: dim(lamp=70)", "unknown tool")):
        assert raised(InvalidTask, None, parse, calls) == reason in tool_calls.REASONS, calls
    firsts = [names_of(tool_calls.parse_task(f"Call: mend(lamp={n})\nRequest: Please mend the lamp {n}.",
                                             seed_task, 1).spec["tools"])[0] for n in range(60)]
    assert all(8 < firsts.count(name) < 32 for name in ("mend", "paint", "ship"))  # tells nothing


def test_a_written_copy_of_any_base_task_is_refused(listed):
    """With few examples that is what a small simulator writes first, whichever it is shown."""
    assert not any(map(tool_calls.leaks, tool_calls.base_tasks(listed)))  # they may stay
    shown, other = [t for t in tool_calls.base_tasks(listed) if tool_calls.skills(t)][:2]
    seed_task = tool_calls._assigned(shown, other.spec["tools"], LISTED[:1])
    write = tool_calls.task_as_written(other)
    n = other.spec["calls"][0]["arguments"]["lamp"]
    for text, reason in ((write, "copy of a base task"),
                         (write.replace("Request: ", "Request: Now, please: "), "copy of a base task"),
                         (write.replace(str(n), "9999"), "")):
        task = tool_calls.parse_task(text, seed_task, 1)
        assert tool_calls.leaks(task) == reason and reason in ("", *tool_calls.REASONS), text


def test_a_written_task_keeps_its_functions_and_grows(listed):
    generator = torch.Generator().manual_seed(0)
    task, sizes = base_of(listed), []
    for epoch in range(60):
        given = tool_calls.assign(task, ["wash", "ship", "paint", "mend"], generator)
        to_call, beside = tool_calls.functions_for(given)
        if task.origin == "env":
            own = names_of(task.spec["tools"])
            assert set(own) <= set(names_of(to_call + beside))
            assert set(tool_calls.skills(task)) <= set(names_of(to_call))
        lines = "\n".join(f"Call: {spec['name']}(lamp={epoch})" for spec in to_call)
        task = tool_calls.parse_task(f"{lines}\nRequest: Please see to lamp {epoch}.", given, epoch)
        sizes.append((len(to_call), len(to_call + beside)))
    assert max(sizes) == (3, 4) and sizes == sorted(sizes)


def test_a_written_task_may_offer_more_functions_than_the_simulator_was_shown(listed, prepared):
    """More to choose from makes it harder. They are drawn by its text, and again for its variations."""
    listed = prepared(MORE, call_format="python", tools=listed.world_options["tools"], offered=3)
    generator, seed_task, beside = torch.Generator().manual_seed(0), base_of(listed), Counter()
    for n in range(60):
        given = tool_calls._assigned(seed_task, LISTED[:1], [])
        text = f"Call: mend(lamp={n})\nRequest: Please mend the lamp {n}."
        task, again = (tool_calls.parse_task(text, given, 1) for _ in range(2))
        beside.update(set(names_of(task.spec["tools"])) - {"mend"})
        assert len(task.spec["tools"]) == 3 and task.spec == again.spec
        check_task(tool_calls, task, given, frozenset())
        to_call, shown = map(names_of, tool_calls.functions_for(
            tool_calls.assign(task, ["wash", "ship", "paint"], generator)))
        left = {"wash", "ship", "paint"}.difference(names_of(task.spec["tools"]))
        assert to_call[0] == "mend" and set(to_call[1:] + shown) <= left
    assert set(beside) == {"paint", "ship", "wash"} and min(beside.values()) > 25
    shown = tool_calls._assigned(seed_task, LISTED[:2], LISTED[2:])  # more than --offered: all of them
    assert len(tool_calls.parse_task(text, shown, 1).spec["tools"]) == 4
    for more in (dict(offered=33, tools="base"), dict(offered=2), dict(offered=-1, tools="base")):
        assert "--offered" in user_error(None, prepared, MORE, call_format="python", **more)


def test_warm_start_imitates_tasks_for_given_functions(listed, monkeypatch):
    base, held_out = tool_calls.base_tasks(listed), held_out_keys(tool_calls, listed)
    pairs = tool_calls.warm_start_pairs(listed)
    # another pass, other ones; the same pass, the same ones
    assert tool_calls.warm_start_pairs(listed, 1) != pairs == tool_calls.warm_start_pairs(listed, 0)
    joined = [gold for _, gold in pairs["agent"][len(base):]]
    assert joined and all(gold.count("\n") == 1 for gold in joined)
    agent = "".join(p[0]["content"] for p, _ in pairs["agent"])
    assert all(f"\n{name}(lamp: int)" in agent for name in names_of(LISTED))
    monkeypatch.setattr(tool_calls, "env_prompt", lambda seed_task, *_: seed_task)
    # what is imitated is a valid task, but for being one that is there already
    monkeypatch.setattr(tool_calls, "_form", tool_calls.replace(tool_calls._form, base=frozenset()))
    shapes = Counter()
    for seed_task, text in tool_calls.warm_start_pairs(listed)["env"]:
        task = tool_calls.parse_task(text, seed_task, 0)
        check_task(tool_calls, task, seed_task, held_out)
        assert task.text not in seed_task.text and seed_task.text not in task.text
        to_call, beside = tool_calls.functions_for(seed_task)
        if tool_calls.structured(task):
            assert {*names_of(to_call)} == {*tool_calls.skills(task)}
            shapes[len(to_call), len(beside)] += 1
    assert all(shapes[1, k] for k in (0, 1, 2)) and any(n == 2 for n, _ in shapes), shapes


def test_functions_that_python_cannot_write_are_left_out(prepared, tmp_path, capsys):
    path = tmp_path / "tools.jsonl"
    path.write_text("".join(json.dumps(spec) + "\n" for spec in
                            (LISTED[0], tool("odd", **{"user id": "integer"}))))
    assert tool_calls.functions(prepared(MORE, call_format="python", tools=str(path))) == ["mend"]
    assert "no name in Python (odd): 1" in capsys.readouterr().err
    assert len(tool_calls.functions(prepared(MORE, tools=str(path)))) == 2
    # nor what would leave no room in a prompt for an example
    wide = tool("wide", **{f"argument{n}": "integer" for n in range(100)})
    path.write_text(json.dumps([LISTED[0], wide]))
    assert tool_calls.functions(prepared(MORE, call_format="python", tools=str(path))) == ["mend"]
    assert "too long for --max-prompt-tokens: 1" in capsys.readouterr().err
    path.write_text(json.dumps([wide]))
    user_error("raise --max-prompt-tokens", prepared, MORE, tools=str(path))


def test_arguments_that_python_cannot_write_are_one_line(prepared):
    odd = {"task": "Please book the room of user 7.",
           "tools": [tool("book", **{"user id": "integer"})],
           "calls": [{"name": "book", "arguments": {"user id": 7}}]}
    prepared([*RECORDS, odd], call_format="json")
    user_error("'user id', which is no name in Python", prepared, [*RECORDS, odd],
               call_format="python")
    # a tool that the simulator makes up
    o = prepared(call_format="python")
    raised(InvalidTask, "tool schema", tool_calls.parse_task, json.dumps(odd), base_of(o), 0)


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
        user_error("at least 1", prepared, ANSWERING, **{name: 0})


@pytest.mark.parametrize("tools", ["", "base"])
def test_the_simulator_writes_results_for_a_seed_task_that_has_them(prepared, tools):
    """Variations of an episode would be single answers, or lose what the tools say."""
    o = prepared(ANSWERING, call_format="python", tools=tools)
    seed_task, task = tool_calls.base_tasks(o)[0], tool_calls.make_task(answering("Fay", "barn"), "base")
    text = tool_calls.task_as_written(task)
    back = tool_calls.parse_task(text, seed_task, 2)
    assert back.spec == task.spec and back.text == task.text
    prompt = tool_calls.env_prompt(seed_task, None, 0.5)
    assert ("Result: " if tools else '"results"') in prompt[1]["content"]
    plain = tool_calls.make_task(lamp(7), "base")
    without = tool_calls.task_as_written(tool_calls.make_task(
        {k: v for k, v in answering("Fay").items() if k != "results"}, "base"))
    for text, seed in ((without, seed_task), (text, plain)):
        raised(InvalidTask, None, tool_calls.parse_task, text, seed, 2)
    if tools:
        for lines in ("Result: 1\nCall: where(who='A')", "Call: where(who='A')\nResult: 1\nResult: 2",
                      "Call: where(who='A')\nResult: {1", 'Call: where(who="A")\nResult: 1, "x": 2',
                      "Call: where(who='A')\nCall: dim(room='x')\nResult: 1"):
            with pytest.raises(InvalidTask, match="no request and call"):
                tool_calls.parse_task(f"{lines}\nRequest: Please see to Ann.", seed_task, 2)


def test_warm_start_imitates_episodes_turn_by_turn(prepared):
    """The agent would learn to make the second call before it is told what the first returns."""
    o = prepared(ANSWERING, call_format="python", tools="base")
    pairs = tool_calls.warm_start_pairs(o)
    assert pairs["agent"] and all(len(said) == 3 for _, said in pairs["agent"])
    assert all("\nResult: " in text for _, text in pairs["env"]) and pairs["env"]
