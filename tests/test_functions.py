"""The tool-call world with a list of tools: which ones the simulator is shown, the levels it chooses, its
warm start.

    python -m pytest -q tests/test_functions.py
"""
import json
from collections import Counter

import pytest
import torch

from helpers import raised
from test_tool_calls import World, lines, options
from worlds import NO_SEED, InvalidTask, check_task, held_out_keys
from worlds.tool_calls import _keys_of

NAMES = ["mend", "paint", "ship", "wash", "sell", "test", "move", "dim"]


def tool(name, note=""):
    return {"name": name, "description": note, "parameters": {
        "type": "object", "required": ["lamp"], "properties": {"lamp": {"type": "integer"}}}}


def lamp(n, name):
    return {"task": f"Please {name} lamp number {n} for me.", "calls": [{"name": name, "arguments": {"lamp": n}}]}


@pytest.fixture(scope="module", params=["json", "python"])
def world(request, tmp_path_factory):
    """A world with a list of eight tools, examples of three of them and a question."""
    folder = tmp_path_factory.mktemp("list")
    examples = [lamp(n, NAMES[n % 3]) for n in range(30, 54)] + [{"task": "Who made lamp 7?", "reference": "Jo"}]
    return World(options(base_tasks=lines(folder / "base.jsonl", examples), call_format=request.param,
                         tools=lines(folder / "tools.jsonl", map(tool, NAMES)), max_prompt_tokens=640))


def names_of(specs):
    return [spec["name"] for spec in specs]


def test_a_seed_task_is_shown_six_tools_of_the_list(world, tmp_path):
    generator, seen = torch.Generator().manual_seed(0), Counter()
    example = next(task for task in world.base_tasks() if world.skills(task))
    for _ in range(100):
        seed = world.seed_for(example, generator)
        seen.update(names_of(seed.spec["shown"]))
        assert seed.id == example.id and "shown" not in example.spec and len(set(names_of(seed.spec["shown"]))) == 6
    assert set(seen) == set(NAMES) and min(seen.values()) > 50
    alone = world.seed_for(NO_SEED, generator)
    assert alone.id != NO_SEED.id and "Level: 1 of 2" in world.env_prompt(alone, None, 0.5)[0]["content"]
    question = next(task for task in world.base_tasks() if not world.skills(task))
    assert world.seed_for(question, generator) == question
    # as few as a prompt has room for
    long = lines(tmp_path / "tools.jsonl", [tool(name, "x" * 300) for name in NAMES])
    few = World(options(tools=long, max_prompt_tokens=640)).seed_for(NO_SEED, generator)
    assert len(few.spec["shown"]) == 2


def test_a_written_task_has_as_many_calls_and_tools_as_its_level_says(world):
    """Else the simulator would choose one level and be rewarded for another."""
    seed = world.seed_for(world.base_tasks()[0], torch.Generator().manual_seed(0))
    shown, write = names_of(seed.spec["shown"]), world._line_of_call
    other = next(name for name in NAMES if name not in shown)

    def parse(level, *names, n=7):
        calls = [f"Call: {write({'name': name, 'arguments': {'lamp': n}})}" for name in names]
        return world.parse_task("\n".join([f"Level: {level}", *calls, f"Request: Please see to lamp {n}."]), seed, 1)
    first = set()
    for n_tools in range(2, 7):
        for n in range(70, 90):
            task = parse(f"2 of {n_tools}", shown[5], shown[0], n=n)
            menu = names_of(task.spec["tools"])
            assert len(set(menu)) == n_tools and {shown[0], shown[5]} <= set(menu) <= set(shown)
            first.add(menu[0] in (shown[0], shown[5]))
        check_task(world, task, seed, held_out_keys(world))
    assert first == {True, False}  # its place does not give a tool away
    for level, names, reason in (("1 of 3", shown[:2], "wrong level"), ("2 of 3", shown[:1], "wrong level"),
                                 ("2 of 1", shown[:2], "wrong level"), ("1 of 7", shown[:1], "wrong level"),
                                 ("4 of 6", shown[:4], "wrong level"), ("0 of 2", [], "wrong level"),
                                 ("1 of 3", [other], "unknown tool"), ("one of 3", shown[:1], "no request and call")):
        assert raised(InvalidTask, None, parse, level, *names) == reason in world.REASONS, (level, names)


def test_a_written_copy_of_any_base_task_is_refused(world):
    """With few examples that is what a small simulator writes first, whichever it is shown."""
    assert not any(map(world.leaks, world.base_tasks()))  # they may stay
    shown, copied = [task for task in world.base_tasks() if world.skills(task)][:2]
    seed = world.seed_for(shown, torch.Generator().manual_seed(0))
    seed.spec["shown"] = [tool(name) for name in NAMES[:6]]
    text, n = world.task_as_written(copied), copied.spec["calls"][0]["arguments"]["lamp"]
    for changed, reason in ((text, "copy of a base task"), (text.replace("Request: ", "Request: Now, please: "),
                            "copy of a base task"), (text.replace(str(n), "9999"), "")):
        assert world.leaks(world.parse_task(changed, seed, 1)) == reason


def test_a_warm_start_shows_all_levels_alike_and_only_tasks_that_a_run_would_take(world, monkeypatch):
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
    assert min(levels[n] for n in (1, 2, 3)) > 0.6 * levels.most_common(1)[0][1] and min(menus[n] for n in range(1, 7))
    answers = [json.dumps(prompt) for prompt, _ in prompts["agent"]]
    assert all(any(name in answer for answer in answers) for name in NAMES)
    assert _keys_of(world.base_tasks()).isdisjoint(held_out_keys(world))
