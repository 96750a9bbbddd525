"""The tool-call world with a list of tools: which ones the simulator is shown, the levels it
chooses, its warm start.

    python -m pytest -q tests/test_functions.py
"""
import json
from collections import Counter

import pytest
import torch

from helpers import raised
from test_tool_calls import WHOLE, World, call, lines, options, question, tool
from interaction import check_task
from worlds import InvalidTask, held_out_keys

NAMES = ["mend", "paint", "ship", "wash", "sell", "test", "move", "dim"]


def lamp(n, name):
    """An example whose call has this name."""
    return {"task": f"Please {name} lamp number {n} for me.", "calls": [call(name, lamp=n)]}


def made(folder, tools, base, **more):
    """A world with a list of tools and examples."""
    files = {"tools": lines(folder / "tools.jsonl", tools),
             "base_tasks": lines(folder / "base.jsonl", base)}
    return World(options(**files, **{"max_prompt_tokens": 640, **more}))


@pytest.fixture(scope="module", params=["json", "python"])
def world(request, tmp_path_factory):
    """A world with a list of eight tools, examples of three of them and a question."""
    examples = [lamp(n, NAMES[n % 3]) for n in range(30, 54)]
    tools = [tool(name, lamp=WHOLE) for name in NAMES]
    folder = tmp_path_factory.mktemp("list")
    return made(folder, tools, [*examples, question()], call_format=request.param)


def names_of(specs):
    return [spec["name"] for spec in specs]


def test_a_seed_task_is_shown_six_tools_of_the_list(world, tmp_path):
    generator, seen = torch.Generator().manual_seed(0), Counter()
    example, *_, question = world.base_tasks()
    for _ in range(100):
        seed = world.seed_for(example, generator)
        seen.update(names_of(seed.spec["shown"]))
        assert seed.id == example.id and "shown" not in example.spec
        assert len(set(names_of(seed.spec["shown"]))) == 6
    assert set(seen) == set(NAMES) and min(seen.values()) > 50
    assert world.seed_for(question, generator) == question
    # as few as a prompt has room for
    long_tools = [tool(name, "x" * 300, lamp=WHOLE) for name in NAMES]
    world = made(tmp_path, long_tools, [lamp(n, "mend") for n in range(9)])
    assert len(world.seed_for(world.base_tasks()[0], generator).spec["shown"]) == 2


def test_a_written_task_has_as_many_calls_and_tools_as_its_level_says(world):
    """Else the simulator would choose one level and be rewarded for another."""
    seed = world.seed_for(world.base_tasks()[0], torch.Generator().manual_seed(0))
    shown = names_of(seed.spec["shown"])
    other = next(name for name in NAMES if name not in shown)

    def parse(level, *names, n=7):
        calls = [world._line_of_call(call(name, lamp=n)) for name in names]
        text = [f"Call: {written}" for written in calls]
        text = [f"Level: {level}", *text, f"Request: Please see to lamp {n}."]
        return world.parse_task("\n".join(text), seed, 1)

    first, two = set(), [shown[5], shown[0]]
    for n in range(70, 90):
        n_tools = 2 + n % 5
        task = parse(f"2 of {n_tools}", *two, n=n)
        menu = names_of(task.spec["tools"])
        assert len(set(menu)) == n_tools and {*two} <= {*menu} <= {*shown}
        first.add(menu[0] in two)
        check_task(world, task, seed, held_out_keys(world))
    assert first == {True, False}  # its place does not give a tool away
    # of a text with so many calls
    for n, level in ((2, "1 of 3"), (1, "2 of 3"), (2, "2 of 1"), (1, "1 of 7"), (4, "4 of 6")):
        raised(InvalidTask, "^wrong level$", parse, level, *shown[:n])
    raised(InvalidTask, "^unknown tool$", parse, "1 of 3", other)


def test_a_written_copy_of_any_base_task_is_refused(world):
    """With few examples that is what a small simulator writes first, whichever it is shown."""
    assert not any(map(world.leaks, world.base_tasks()))  # they may stay
    shown, copied, *_ = world.base_tasks()
    seed = world.seed_for(shown, torch.Generator().manual_seed(0))
    seed.spec["shown"] = list(world.tools.values())[:6]
    text, n = world.task_as_written(copied), copied.spec["calls"][0]["arguments"]["lamp"]

    def leak(text):
        return world.leaks(world.parse_task(text, seed, 1))

    assert leak(text) == "copy of a base task"
    assert leak(text.replace("Request: ", "Request: Now, please: ")) == "copy of a base task"
    assert leak(text.replace(str(n), "9999")) == ""


def test_a_warm_start_shows_all_levels_alike_and_only_tasks_of_a_run(world, monkeypatch):
    prompts = world.warm_start_pairs(1)
    assert prompts != world.warm_start_pairs(0) == world.warm_start_pairs(0)
    monkeypatch.setattr(world, "env_prompt", lambda seed, *_: seed)
    monkeypatch.setattr(world, "base_keys", set())
    levels, menus = Counter(), Counter()
    for seed, text in world.warm_start_pairs()["env"]:
        task = world.parse_task(text, seed, 0)
        check_task(world, task, seed, held_out_keys(world))
        assert task.text not in seed.text and seed.text not in task.text
        levels[len(world.skills(task))] += 1
        menus[len(task.spec.get("tools", ()))] += 1
    assert min(levels[n] for n in (1, 2, 3)) > 0.6 * max(levels.values())
    assert min(menus[n] for n in range(1, 7)) > 0
    asked = json.dumps([prompt for prompt, _ in prompts["agent"]])
    assert all(name in asked for name in NAMES)


def test_joined_and_changed_examples_are_not_held_out_tasks(tmp_path):
    """Two examples may be the halves of a held-out request, and one with another value may be one:
    it would be imitated."""
    rooms = [f"room{letter}" for letter in "abcdef"]

    def example(text, **calls):
        return {"task": text, "calls": [call(name, where=room) for name, room in calls.items()]}

    single = [example(f"Please {name} the {room}.", **{name: room})
              for name in ("light", "lock") for room in rooms]
    double = [example(f"Light the {a} and lock the {b}.", light=a, lock=b)
              for a in rooms for b in rooms[:3]]
    tools = [tool(name, where={"enum": rooms}) for name in ("light", "lock")]
    held_out = lines(tmp_path / "held_out.jsonl", single[1::2] + double)
    world = made(tmp_path, tools, single[::2], validation_tasks=held_out, call_format="python",
                 max_prompt_tokens=8192)
    held_out = {frozenset(world.gold(task).split("\n")) for task in world.validation_tasks()}
    imitated = set()
    for turn in range(20):
        for _, answer in world.warm_start_pairs(turn)["agent"]:
            imitated.add(frozenset(answer.split("\n")))
    assert held_out.isdisjoint(imitated) and {len(calls) for calls in imitated} == {1, 2}
