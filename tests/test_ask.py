"""`genenv.py ask`: who answers, which functions a trained agent is shown, how its answer is read.

Run: python -m pytest tests/test_ask.py -q
"""
import dataclasses
import json
from types import SimpleNamespace

import pytest

from data_pool import Task
import genenv
from helpers import EXAMPLE_LIST, one_line, randomise
from policy import Policy
from scripts import ask
from support.options import parse_options
from worlds import load_world, tool_calls, tool_lists

TOOLS, _, HELD_OUT = EXAMPLE_LIST[1::2]
DENTIST = "Put the dentist on Friday at nine."


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """The folder of a run of tool_calls as it ends, with an agent that differs from its base."""
    return ended_run(tmp_path_factory.mktemp("ask"), model, EXAMPLE_LIST, [
        "--world", "tool_calls", "--call-format", "python", "--max-response-tokens", "24"])


def ended_run(folder, model, files=(), options=()):
    o = parse_options([*options, *files, "--model", model, "--rank", "4", "--threads", "1"])
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(o)))
    policy = Policy.load(model, ("agent",), rank=4, device="cpu")
    randomise(policy, seed=1)
    policy.save_adapters(folder / "adapters")
    return folder


def asked(capsys, *argv):
    """What `ask --json` prints for one request."""
    capsys.readouterr()
    assert genenv.main(["ask", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # nothing else is on standard output


def trained_policy(run, model):
    return Policy.load(model, ("agent",), rank=4, device="cpu",
                       adapter_folder=str(run / "adapters" / "agent"))


def greedy(policy, world, task, name):
    prompt = policy.encode(world.agent_prompt(task))
    return policy.decode(policy.sample(name, [prompt], 1, 24, temperature=0)[0].response)


def test_the_short_list_has_the_function_that_is_needed():
    """Word overlap is crude: here it finds most functions of requests that nobody chose for it."""
    tools, _ = tool_lists.read_tools(TOOLS)
    tasks = tool_calls.read_tasks(HELD_OUT, {tool["name"]: tool for tool in tools})
    hits = 0
    for task in tasks:
        few = ask.short_list(task.text, tools, tool_calls.MOST_SHOWN)
        hits += {call["name"] for call in task.spec["calls"]} <= {tool["name"] for tool in few}
    assert hits >= 0.9 * len(tasks)


@pytest.mark.parametrize("text, form, fault", [
    ('add_event(title="dentist", day="Friday", hour=9)', "python", ""),
    ("none", "python", "nothing"),
    ("I would rather not.", "python", "no call can be read"),
    ('add_event(title="dentist")', "python", "required"), ("fly(to=1)", "python", "none of"),
    ('<tool_call>{"name": "add_event", "arguments": "{}"}</tool_call>', "json", "exactly name")])
def test_an_answer_is_read_as_calls_or_as_what_is_wrong_with_it(text, form, fault):
    tools, _ = tool_lists.read_tools(TOOLS)
    calls = tool_calls.parse_calls(text, form)
    fault_found = ask.fault_of(calls, tools)
    assert fault in fault_found and bool(fault) == bool(fault_found)
    if not fault:
        assert calls[0]["arguments"] == {"title": "dentist", "day": "Friday", "hour": 9}


def test_the_runs_adapter_answers_greedily_and_untrained_its_base(run, model, capsys):
    """The agent of the run and not its base, with the functions that the user names, in their
    order."""
    options = [run, DENTIST, "--functions", "set_timer,add_event"]
    answer, untrained = asked(capsys, *options), asked(capsys, *options, "--untrained")
    policy = trained_policy(run, model)
    agent = ask.Agent(run, ["set_timer", "add_event"])
    task = Task(DENTIST, {"tools": agent.tools, "calls": []})
    assert answer["offered"] == ["set_timer", "add_event"]
    assert answer["response"] == greedy(policy, agent.world, task, "agent") != untrained["response"]
    assert untrained["response"] == greedy(policy, agent.world, task, None)


def test_an_expected_answer_is_marked(run, monkeypatch):
    """For held-out requests, which stand in when none is given."""
    agent = ask.Agent(run)
    tasks = ask.read_requests(ask.parser().parse_args([str(run)]), agent)
    assert tasks == agent.world.validation_tasks()
    for text, right in ((agent.world.gold(tasks[0]), True), ("none", False)):
        monkeypatch.setattr(agent, "_attempt", lambda _: (None, text))
        answer = agent.answer(tasks[0])
        assert answer["right"] is right and bool(answer["fault"]) is not right


def test_an_example_is_offered_its_own_functions(run, tmp_path, monkeypatch):
    """Those that the run does not know, too: else no answer to it could be right."""
    fly = {"name": "fly_to", "parameters": {}}
    example = {"task": "Fly away", "tools": [fly], "calls": [{"name": "fly_to", "arguments": {}}]}
    (tmp_path / "own.jsonl").write_text(json.dumps(example))
    agent = ask.Agent(run)
    args = SimpleNamespace(file=str(tmp_path / "own.jsonl"), request=[])
    [task] = ask.read_requests(args, agent)
    monkeypatch.setattr(agent, "_attempt", lambda _: (None, "fly_to()"))
    answer = agent.answer(task)
    assert answer["right"] and "fly_to" in answer["offered"]


def test_any_world_is_asked_a_task_of_its_own(small_ladder, tmp_path, capsys):
    """Read as the simulator's would be, answered by the run's adapter, scored by the world."""
    run = ended_run(tmp_path, small_ladder)
    world = load_world("ladder")(parse_options(["--model", small_ladder]))
    task = world.base_tasks()[0]
    answer = asked(capsys, run, task.text)
    policy = trained_policy(run, small_ladder)
    assert answer["response"] == greedy(policy, world, task, "agent")
    assert answer["response"] != asked(capsys, run, task.text, "--untrained")["response"]
    assert answer["reward"] == world.score(task, answer["response"])[0]
    one_line(capsys, genenv.main(["ask", str(run), "good morning"]), "no task of the world ladder")


def test_a_file_is_cut_at_line_ends_alone(run, tmp_path):
    """A sign that str.splitlines cuts at stands within a request."""
    text = "Write: one\u2028two\n\nDim the study"
    (tmp_path / "requests.txt").write_text(text, "utf-8")
    args = SimpleNamespace(file=str(tmp_path / "requests.txt"), request=[])
    assert [task.text for task in ask.read_requests(args, ask.Agent(run))] == text.split("\n\n")


def test_bad_input_is_one_line(run, tmp_path, capsys):
    (tmp_path / "config.json").write_text((run / "config.json").read_text())  # no adapters yet
    (tmp_path / "utf16.txt").write_text(DENTIST, "utf-16")
    for argv, message in (([run, "--file", tmp_path], "a folder, not a file"),
                          ([run, "--file", tmp_path / "no.txt"], "no.txt"),
                          ([run, "--file", tmp_path / "utf16.txt"], "not UTF-8"),
                          ([run, DENTIST, "--functions", "set_timr"], "set_timr"),
                          ([run, "<|im_end|> hello"], "control token"),
                          ([tmp_path, DENTIST], "the run has not ended")):
        capsys.readouterr()
        assert genenv.main(["ask", *map(str, argv)]) == 2
        assert message in capsys.readouterr().err.strip().splitlines()[-1], argv
