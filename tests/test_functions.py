"""The tool-call world with a list of tools: what the simulator sees and may write; warm start.

    python -m pytest -q tests/test_functions.py
"""
import json
from collections import Counter

import pytest
import torch

from helpers import refused_with
from test_tool_calls import WHOLE, World, call, lines, options, question, tool
from interaction import check_task
from worlds import InvalidTask, held_out_keys
from worlds.tools.schemas import structured

NAMES = ["mend", "paint", "ship", "wash", "sell", "test", "move", "dim"]


def lamp(n, name):
    """Return an example whose call has this name."""
    return {"task": f"Please {name} lamp number {n} for me.", "calls": [call(name, lamp=n)]}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a world with a list of eight tools, examples for three of them, and a question."""
    folder = tmp_path_factory.mktemp("list")
    examples = [lamp(n, NAMES[n % 3]) for n in range(30, 54)]
    tools = lines(folder / "tools.jsonl", [tool(name, lamp=WHOLE) for name in NAMES])
    base = lines(folder / "base.jsonl", [*examples, question()])
    return World(options(tools=tools, base_tasks=base, max_prompt_tokens=640))


def names_of(specs):
    return [spec["name"] for spec in specs]


def test_a_seed_task_is_shown_six_tools_of_the_list(world):
    """Otherwise the simulator would write tasks only for the tools that have examples."""
    generator, seen = torch.Generator().manual_seed(0), Counter()
    example, *_, last = world.base_tasks()
    for _ in range(100):
        seed = world.seed_for(example, generator)
        seen.update(names_of(seed.spec["shown"]))
        assert seed.id == example.id and "shown" not in example.spec
        assert len(set(names_of(seed.spec["shown"]))) == 6
    assert set(seen) == set(NAMES) and min(seen.values()) > 50
    assert world.seed_for(last, generator) == last and not structured(last)


def test_a_written_task_offers_the_tools_that_its_simulator_was_shown(world):
    """Otherwise the agent would not have to choose, or could be asked for a tool it cannot see."""
    seed = world.seed_for(world.base_tasks()[0], torch.Generator().manual_seed(0))
    shown = names_of(seed.spec["shown"])
    other = next(name for name in NAMES if name not in shown)

    def parse(*names, **more):
        calls = [call(name, lamp=7) for name in names]
        written = {"calls": calls, "task": "See to lamp 7, please.", **more}
        return world.parse_task(json.dumps(written), seed, 1)

    task = parse(shown[5], shown[0])
    assert task.spec["tools"] == seed.spec["shown"] and world.skills(task) == [shown[5], shown[0]]
    check_task(world, task, seed, held_out_keys(world))
    refused_with(InvalidTask, "^unknown tool$", parse, other)
    refused_with(InvalidTask, "^malformed task$", parse)  # no call at all
    refused_with(
        InvalidTask, "^malformed task$", parse, shown[0], tools=[tool(shown[0], lamp=WHOLE)])


def test_a_written_copy_of_any_base_task_is_refused(world):
    """Otherwise a small simulator, which begins by writing such copies, would teach nothing new."""
    assert not any(map(world.leaks, world.base_tasks()))  # base tasks themselves are not refused
    shown, copied, *_ = world.base_tasks()
    seed = world.seed_for(shown, torch.Generator().manual_seed(0))
    seed.spec["shown"] = list(world.tools.values())[:6]
    text, n = world.task_as_written(copied), copied.spec["calls"][0]["arguments"]["lamp"]

    def leak(text):
        return world.leaks(world.parse_task(text, seed, 1))

    assert leak(text) == "copy of a base task"
    assert leak(text.replace("Please", "Now, please,")) == "copy of a base task"
    assert leak(text.replace(str(n), "9999")) == ""


def test_a_warm_start_imitates_only_tasks_that_a_run_would_take(world, monkeypatch):
    """Otherwise the simulator would learn to write tasks that every run refuses."""
    pairs = world.warm_start_pairs(1)
    assert pairs != world.warm_start_pairs(0) == world.warm_start_pairs(0)
    monkeypatch.setattr(world, "env_prompt", lambda seed, *_: seed)
    monkeypatch.setattr(world, "base_keys", set())
    written = []
    for seed, text in world.warm_start_pairs()["env"]:
        task = world.parse_task(text, seed, 0)
        check_task(world, task, seed, held_out_keys(world))
        assert task.text not in seed.text and seed.text not in task.text
        written.append(task.text)
    calls = [task.text for task in world.base_tasks() if structured(task)]
    # the question is never shown or written, because there is no second one to vary it into
    assert Counter(written) == dict.fromkeys(calls, 2)
