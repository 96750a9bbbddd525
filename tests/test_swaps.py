"""Examples with other values: what is swapped, and that request and calls stay one task.

Run: python -m pytest tests/test_swaps.py -q
"""
import json
import random
import re

import pytest

from data_pool import Task
from helpers import EXAMPLE_LIST
from support.options import parse_options
from worlds import swaps, tool_calls
from worlds.grounding import uncalled, ungrounded
from worlds.schemas import check_calls, tools_of

WORDS = ["lantern", "copper"]


def a_task(text, arguments, schemas):
    """A task of one call; schemas: {argument: schema}."""
    tool = {"name": "f", "description": "", "parameters": {"type": "object", "properties": schemas}}
    return Task(text, {"tools": [tool], "calls": [{"name": "f", "arguments": arguments}]})


def swapped(text, arguments, schemas, seed=0):
    """(request, arguments) of such a task with other values."""
    text, calls = swaps.swapped(a_task(text, arguments, schemas), WORDS, random.Random(seed))
    return text, calls[0]["arguments"]


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


@pytest.mark.parametrize("seed", range(20))
def test_each_kind_of_value_has_another_of_its_kind(seed):
    """A level of 900 percent, a colour that the schema does not know, or an unchanged value."""
    text, got = swapped(
        "Light Anna's hall red to 60 at 7:00 on Friday, code RX4-1, 2.50 watts", {
            "who": "Anna", "colour": "red", "level": 60, "hour": 7, "day": "Friday",
            "code": "RX4-1", "watts": 2.5},
        {"who": TEXT, "colour": {"enum": ["red", "blue"]}, "level": {**WHOLE, "maximum": 80},
         "hour": {**WHOLE, "minimum": 0, "maximum": 23}, "day": TEXT, "code": TEXT,
         "watts": {"type": "number"}}, seed)
    assert got["who"] in ("Lantern", "Copper") and got["colour"] in ("red", "blue")
    assert got["day"].endswith("day") and 10 <= got["level"] <= 80 and 1 <= got["hour"] <= 9
    assert got["code"][:2].isupper() and got["code"][3] == "-" and got["code"] != "RX4-1"
    assert 1 <= got["watts"] < 10 and isinstance(got["hour"], int)
    watts = "2.50" if got["watts"] == 2.5 else f"{got['watts']:g}"
    assert text == (f"Light {got['who']}'s hall {got['colour']} to {got['level']} at {got['hour']}:00 "
                    f"on {got['day']}, code {got['code']}, {watts} watts")


@pytest.mark.parametrize("union", ["anyOf", "oneOf"])
def test_an_optional_object_keeps_to_its_schema(union):
    """Where anyOf is not looked into, a unit becomes any word."""
    unit = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    place = {"type": "object", "properties": {"city": TEXT, "unit": unit}, "required": ["city"]}
    optional = lambda schema: {union: [{"type": "null"}, schema], "default": None}
    got = [swapped("In Lyon, celsius, at low level", {
        "place": {"city": "Lyon", "unit": "celsius"}, "levels": ["low"]}, {
        "place": optional(place), "levels": optional({"type": "array", "items": {
            "enum": ["low", "high"]}})}, seed) for seed in range(8)]
    for text, arguments in got:
        city, unit = arguments["place"]["city"], arguments["place"]["unit"]
        assert city in ("Lantern", "Copper") and unit == "fahrenheit" and arguments["levels"] == ["high"]
        assert text == f"In {city}, {unit}, at high level"


@pytest.mark.parametrize("text, arguments, schemas", [
    ("Ada asks Ada", {"who": "Ada"}, {"who": TEXT}),                        # which of the two?
    ("Ada, at 3", {"who": "Ada", "from": "Ada", "n": 4}, {"who": TEXT, "from": TEXT, "n": WHOLE}),
    ("for four", {"n": 4}, {"n": WHOLE}),                                   # not as in the calls
    ("on 2024-05-01 at 7 pm", {"a": "2024-05-01", "b": "7 pm"}, {"a": TEXT, "b": TEXT}),
    ("in 14 days", {"n": 4, "m": 1}, {"n": WHOLE, "m": WHOLE}),             # a part of a number
    ("give 1.5", {"n": 1}, {"n": WHOLE}),
    ("a red one", {"c": "red"}, {"c": {"enum": ["red"]}}),
    ("a red one", {"c": "red"}, {"c": {"type": "string", "default": "red"}}),
    ("code abc", {"c": "abc"}, {"c": {"type": "string", "pattern": "^abc$"}}),
    ("a red one", {"a": "red", "c": "red"}, {"a": TEXT, "c": {"type": "string", "default": "red"}}),
    ("be true", {"c": True}, {"c": {"type": "boolean"}}),
    ("be true", {"c": True}, {"c": {}}),
    ("minus -4 it is", {"n": -4}, {"n": WHOLE}),
    ("see York Minster", {"a": "York", "b": "York Minster"}, {"a": TEXT, "b": TEXT}),  # one in the other
    ("see Lenny", {"a": "Lenny", "b": "docs/Lenny"}, {"a": TEXT, "b": TEXT}),
    ("come at 15:00", {"hour": 15, "at": "15:00"}, {"hour": WHOLE, "at": TEXT}),
    ("at 7:30 on seven days", {"at": "07:30", "days": 7}, {"at": TEXT, "days": WHOLE}),
    ("1,200 in one box", {"n": 1200, "boxes": 1}, {"n": WHOLE, "boxes": WHOLE}),
    ("on 3/14/2026 for three", {"day": "2026-03-14", "people": 3}, {"day": TEXT, "people": WHOLE}),
])
def test_what_is_not_sure_stays(text, arguments, schemas):
    """A request that says another thing than its calls teaches the model to guess."""
    assert all(swapped(text, arguments, schemas, seed) == (text, arguments) for seed in range(10))


def test_few_values_stay_where_another_can_be_had():
    """A bound of the schema, or a zero at the end of a price, would keep the example as it is."""
    changed = [swapped("Pay 7.50 for 60 of them", {"price": 7.5, "n": 60}, {
        "price": {"type": "number"}, "n": {**WHOLE, "maximum": 61}}, seed)[1] for seed in range(50)]
    assert sum(got["price"] != 7.5 for got in changed) > 45 < sum(got["n"] != 60 for got in changed)


def test_words_are_those_of_the_descriptions_whatever_signs_they_have():
    """A quotation mark would end a description, a line break would become a letter of a word."""
    properties = {"description": {"type": "string", "description": "Called \"lantern\" by\nall"}}
    tool = {"name": "name", "description": "Copper", "parameters": {"properties": properties}}
    assert swaps.words_of_tools([tool]) == ["all", "called", "copper", "lantern"]


def test_a_swapped_value_stands_only_where_the_old_one_stood():
    """"Put copper on the copper list": the second value would be swapped for the first."""
    for seed in range(20):
        text, got = swapped("Put copper and tea there", {"a": "copper", "b": "tea"},
                            {"a": TEXT, "b": TEXT}, seed)
        assert text == f"Put {got['a']} and {got['b']} there" and got["a"] != got["b"]


def options(*more):
    """Our own example list."""
    return parse_options(["--preset", "135m-cpu", "--model", "m", *EXAMPLE_LIST, *more])


def test_the_examples_stay_valid_and_grounded():
    """A warm start would imitate calls that do not follow from their requests."""
    o = options()
    tool_calls.prepare(o)
    words = swaps.words_of_tools(tool_calls._form.tools.values())
    assert "event" in words and "the" not in words and "minimum" not in words and len(words) > 100
    base, changed = tool_calls.base_tasks(o), 0
    for seed in range(20):
        for task in base:
            text, calls = swaps.swapped(task, words, random.Random(seed))
            new = Task(text, {**task.spec, "calls": calls})
            check_calls(calls, tools_of(new))
            assert bool(ungrounded(new)) <= bool(ungrounded(task)), (task.text, text)
            assert bool(uncalled(new)) <= bool(uncalled(task)), (task.text, text)
            changed += text != task.text
    assert changed > 19 * len(base)


def test_passes_of_a_warm_start_show_other_values_and_some_examples_as_they_are():
    """The same values in every pass are learned by heart; the same pass twice is the same."""
    o = options()
    tool_calls.prepare(o)
    plain = {task.text for task in tool_calls.base_tasks(o)}
    asked = []
    for turn in range(4):
        pairs = tool_calls.warm_start_pairs(o, turn)
        assert pairs == tool_calls.warm_start_pairs(o, turn)
        asked.append([prompt[-1]["content"] for prompt, _ in pairs["agent"]])
        as_is = sum(any(text in said for text in plain) for said in asked[-1])
        assert 1 <= as_is <= len(asked[-1]) / 2
    assert len({said for passed in asked for said in passed}) > 2.5 * len(asked[0])


@pytest.mark.parametrize("own", [[], ["--own-values"]])
def test_joined_examples_are_no_held_out_tasks(own, tmp_path):
    """Two examples may be the halves of a held-out request: it would be imitated."""
    rooms, doors = "kitchen study hall attic cellar den".split(), "front back side barn shed gate".split()
    one = lambda name, text, value: {"task": text.format(value), "calls": [
        {"name": name, "arguments": {"which": value}}]}
    lights = [one("light", "Turn on the light in the {}.", room) for room in rooms]
    locks = [one("lock", "Lock the {} door.", door) for door in doors]
    both = [{"task": f"{a['task'][:-1]} and lock the {b['calls'][0]['arguments']['which']} door.",
             "calls": a["calls"] + b["calls"]} for a in lights for b in locks]
    which = lambda values: {"type": "object", "properties": {"which": {"enum": values}}, "required": ["which"]}
    listed = [{"name": "light", "parameters": which(rooms)}, {"name": "lock", "parameters": which(doors)},
              *({"name": f"other{n}", "parameters": which(rooms)} for n in range(40))]
    files = {"--tools": [json.dumps(listed)], "--base-tasks": map(json.dumps, lights + locks),
             "--validation-tasks": map(json.dumps, both[::2])}
    argv = []
    for option, lines in files.items():
        path = tmp_path / option.strip("-")
        path.write_text("\n".join(lines))
        argv += [option, str(path)]
    o = parse_options(["--preset", "135m-cpu", "--model", "m", *argv, *own])
    tool_calls.prepare(o)
    held_out = [set(tool_calls.gold(task).split("\n")) for task in tool_calls.validation_tasks(o)]
    called = [set(re.findall(r"\w+\(.*\)", said)) for turn in range(40) for pairs in
              [tool_calls.warm_start_pairs(o, turn)] for _, said in pairs["agent"] + pairs["env"]]
    assert sum(len(calls) == 2 for calls in called) > 10
    assert not [calls for calls in called if calls in held_out]


def test_a_larger_simulator_may_imitate_the_examples_own_values():
    """--own-values: the simulator writes the base tasks as they are; the agent's have other values."""
    o = options("--own-values")
    tool_calls.prepare(o)
    plain = {task.text for task in tool_calls.base_tasks(o)}
    pairs = tool_calls.warm_start_pairs(o)
    requests = [said.partition("Request: ")[2] for _, said in pairs["env"]]
    # joined tasks have two of them
    assert all(any(text in request for text in plain) for request in requests)
    assert {request for request in requests if request in plain} == plain
    assert sum(prompt[-1]["content"] in plain for prompt, _ in pairs["agent"]) <= len(plain) / 2
    assert pairs == tool_calls.warm_start_pairs(o) != tool_calls.warm_start_pairs(o, 1)
