"""`genenv.py ask`: which model answers, which functions it is shown, how its answer is read.

Run: python -m pytest tests/test_ask.py -q
"""
import dataclasses
import json

import pytest
import torch

from data_pool import Task
import genenv
from helpers import EXAMPLE_LIST, randomise, user_error
from policy import Policy, Rollout
from scripts import ask
from support.options import parse_options
from test_tool_calls import call, said
from worlds import load_world, tool_calls
from worlds.tools import offers, tool_lists
from worlds.tools.schemas import tools_of

DENTIST = "Put the dentist on Friday at nine."


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """Return the folder of an ended run of tool_calls whose agent differs from its base."""
    return ended_run(tmp_path_factory.mktemp("ask"), model, "--world", "tool_calls", *EXAMPLE_LIST,
                     "--max-response-tokens", "24", "--max-prompt-tokens", "4096")


def ended_run(folder, model, *options):
    """Write the files that `ask` reads from an ended run; return the folder."""
    o = parse_options([*options, "--model", model, "--rank", "4", "--threads", "1"])
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(o)))
    policy = Policy.load(model, ("agent",), rank=4, device="cpu")
    randomise(policy, seed=1)
    policy.save_adapters(folder / "adapters")
    return folder


def answer_as_by_hand(capsys, run, model, world, task):
    """Assert that `ask --json` prints the greedy answer of the run's adapter and nothing else, or
    with --untrained that of the base model.

    Return the JSON object of the adapter's answer.
    """
    policy = Policy.load(model, ("agent",), rank=4, device="cpu",
                         adapter_folder=str(run / "adapters" / "agent"))
    prompt, answers = policy.encode(world.agent_prompt(task)), []
    for name, options in ((None, ["--untrained"]), ("agent", [])):
        capsys.readouterr()
        assert genenv.main(["ask", str(run), task.text, "--json", *options]) == 0
        answer = json.loads(capsys.readouterr().out)
        rollout, = policy.sample(name, [prompt], 1, 24, temperature=0)
        assert answer["response"] == policy.decode(rollout.response) not in answers
        answers.append(answer["response"])
    return answer


def answer_of(monkeypatch, run, task, text):
    """Return what Agent.answer makes of a text with which the agent answers a task."""
    agent = ask.Agent(run)
    monkeypatch.setattr(agent, "_attempt", lambda _: (Rollout(0, [], []), text))
    return agent.answer(task)


def test_the_short_list_has_the_function_that_is_needed():
    """Otherwise an agent could not answer, because the right function would not be in the prompt.
    """
    tools, _ = tool_lists.read_tools(EXAMPLE_LIST[1])
    tasks = tool_calls.read_tasks(EXAMPLE_LIST[5], tools)
    hits = 0
    for task in tasks:
        few = offers.short_list(task.text, [*tools.values()])
        hits += {call["name"] for call in task.spec["calls"]} <= {tool["name"] for tool in few}
    assert hits >= 0.9 * len(tasks)


def test_the_agent_is_asked_with_a_choice_of_its_functions(run, model, capsys):
    """Otherwise hundreds of functions would be in the prompt of an agent trained on few."""
    world = ask.Agent(run).world
    task = world.offered(world.asked_task(DENTIST))
    answer = answer_as_by_hand(capsys, run, model, world, task)
    assert answer["offered"] == list(tools_of(task)) and len(answer["offered"]) == 6
    assert answer["right"] is answer["expected"] is answer["reward"] is None


def test_any_world_is_asked_a_task_of_its_own(small_ladder, tmp_path, capsys):
    """Otherwise a model other than the run's would answer, or another task would be scored."""
    run = ended_run(tmp_path, small_ladder)
    world = load_world("ladder")(parse_options(["--model", small_ladder]))
    task = world.base_tasks()[0]
    answer = answer_as_by_hand(capsys, run, small_ladder, world, task)
    assert answer["reward"] == world.score(task, answer["response"])[0]


EVENT = call("add_event", title="dentist", day="Friday", hour=9)
SHORT = call("add_event", title="dentist")


@pytest.mark.parametrize("text, calls, fault", [
    (said(EVENT), [EVENT], ""), (said(SHORT), [SHORT], "required"),
    ("I would rather not.", None, "no call can be read"), ("none", [], "")])
def test_an_answer_is_read_as_calls_or_as_what_is_wrong_with_it(run, monkeypatch, text, calls,
                                                                fault):
    """Otherwise a program that uses `ask` would carry out calls that do not fit their function."""
    answer = answer_of(monkeypatch, run, ask.Agent(run).task_of(DENTIST), text)
    assert answer["calls"] == calls and answer["right"] is None
    assert fault in answer["fault"] and bool(fault) == bool(answer["fault"])


def test_a_held_out_request_is_marked_and_offered_its_own_functions(run, monkeypatch):
    """Otherwise no answer could be right where the run does not know the request's functions."""
    world = ask.Agent(run).world
    task = world.validation_tasks()[0]
    fly = {"name": "fly_to", "description": "", "parameters": {}}
    spec = {"tools": [fly], "calls": [{"name": "fly_to", "arguments": {}}], "ordered": False}
    for task, text in ((task, world.gold(task)), (Task("Fly", spec), said(call("fly_to")))):
        answer = answer_of(monkeypatch, run, task, text)
        assert answer["right"] is True and answer["fault"] == ""
        assert task.spec["calls"][0]["name"] in answer["offered"]
        assert answer_of(monkeypatch, run, task, "none")["right"] is False


def test_bad_input_is_one_line(run, tmp_path):
    """Otherwise `ask` would answer for a run that has not ended or that another version made, or
    answer a text with a control token."""
    (tmp_path / "config.json").write_text((run / "config.json").read_text())  # no adapters yet
    user_error("the run has not ended", ask.Agent, tmp_path)
    user_error("control token", ask.Agent(run), "<|im_end|> hello")
    # the answers of a run of an older version had another form, and would be read wrongly
    config = json.loads((run / "config.json").read_text())
    config["world_options"]["call_format"] = "python"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "adapters" / "agent").mkdir(parents=True)
    user_error("'call_format'.*version", ask.Agent, tmp_path)


def test_a_request_longer_than_the_model_reads_is_refused(run, monkeypatch):
    """Otherwise the model would answer with noise and show no reason, or a lack of memory would end
    in a traceback."""
    agent = ask.Agent(run)
    assert agent(DENTIST)["response"]
    user_error("makes a prompt of", agent, "Put it on Friday. " * 500)

    def too_large(*_, **limits):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(agent.policy, "sample", too_large)
    user_error("out of GPU memory", agent, DENTIST)
