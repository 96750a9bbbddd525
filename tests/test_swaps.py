"""Examples with other values: what is swapped, and that request and calls stay one task.

Run: python -m pytest tests/test_swaps.py -q
"""
import random

import pytest

from helpers import EXAMPLE_LIST
from test_tool_calls import TEXT, WHOLE, World, call, options, tool
from data_pool import Task
from worlds.tools.leaks import ungrounded
from worlds.tools.schemas import check_calls, tools_of
from worlds.tools.swaps import WORDS, swapped


def swap(text, arguments, schemas, seed):
    """(request, arguments) of a task of one call with other values; schemas: {argument: schema}."""
    task = Task(text, {"tools": [tool("f", **schemas)], "calls": [call("f", **arguments)]})
    text, calls = swapped(task, random.Random(seed))
    return text, calls[0]["arguments"]


def test_each_kind_of_value_has_another_of_its_kind():
    """A level of 900 percent, a colour that the schema does not know, or an unchanged value."""
    schemas = {"who": TEXT, "colour": {"enum": ["red", "blue"]}, "level": {**WHOLE, "maximum": 80},
               "day": TEXT}
    for seed in range(20):
        text, new = swap("Light Anna's hall red to 60 on Friday", {
            "who": "Anna", "colour": "red", "level": 60, "day": "Friday"}, schemas, seed)
        assert new["who"] in WORDS["names"] and new["colour"] == "blue"
        assert 10 <= new["level"] <= 80 and new["day"] in WORDS["days"]
        form = "Light {who}'s hall {colour} to {level} on {day}"
        assert text == form.format(**new)


@pytest.mark.parametrize("text, arguments, schemas", [
    ("Ada asks Ada", {"who": "Ada"}, {"who": TEXT}),                        # which of the two?
    ("Ada, at 3", {"who": "Ada", "from": "Ada", "n": 4}, {"who": TEXT, "from": TEXT, "n": WHOLE}),
    ("in 14 days", {"n": 4}, {"n": WHOLE}), ("give 1.5", {"n": 1}, {"n": WHOLE}),
    ("at 7 pm", {"b": "7 pm"}, {"b": TEXT}), ("at 7:00", {"n": 7}, {"n": WHOLE}),
    ("be true", {"c": True}, {"c": {}}),
    ("a red one", {"c": "red"}, {"c": {"type": "string", "default": "red"}}),
    # one in the other
    ("see York Minster", {"a": "York", "b": "York Minster"}, {"a": TEXT, "b": TEXT}),
    ("1,200 in one box", {"n": 1200, "boxes": 1}, {"n": WHOLE, "boxes": WHOLE}),
])
def test_what_is_not_sure_stays(text, arguments, schemas):
    """A request that says another thing than its calls teaches the model to guess."""
    assert all(swap(text, arguments, schemas, seed) == (text, arguments) for seed in range(10))


def test_an_example_with_other_values_is_as_right_as_it_was():
    """A warm start imitates it; tests/test_functions.py has what else it imitates."""
    _, tools, _, base, _, _ = EXAMPLE_LIST
    world = World(options(tools=tools, base_tasks=base))
    changed = 0
    for task in world.base_tasks():
        text, calls = swapped(task, random.Random(0))
        new = Task(text, {**task.spec, "calls": calls})
        check_calls(calls, tools_of(new))
        assert bool(ungrounded(new)) <= bool(ungrounded(task)), (task.text, text)
        changed += calls != task.spec["calls"]
    assert changed > len(world.base_tasks()) / 2
