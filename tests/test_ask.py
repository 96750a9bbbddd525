"""`genenv.py ask`: which functions a trained agent is shown, how its answer is read, and bad input.

Run: python -m pytest tests/test_ask.py -q
"""
import dataclasses
import json
from types import SimpleNamespace

import pytest

from data_pool import Task
import genenv
from helpers import EXAMPLE_LIST, randomise
from policy import Policy
from scripts import ask
from support.options import parse_options
from worlds import load_world, tool_calls, tool_lists

TOOLS, EXAMPLES, HELD_OUT = EXAMPLE_LIST[1::2]
DENTIST = "Put the dentist on Friday at nine."


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """The folder of a run as it ends, with an agent that differs from its base."""
    folder = tmp_path_factory.mktemp("ask")
    o = parse_options(["--world", "tool_calls", "--model", model, "--call-format", "python", "--rank", "4",
                       "--max-response-tokens", "24", "--threads", "1", *EXAMPLE_LIST])
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(o)))
    policy = Policy.load(model, ("agent",), rank=4, device="cpu")
    randomise(policy, seed=1)
    policy.save_adapters(folder / "adapters")
    return folder


def test_the_short_list_has_the_function_that_is_needed():
    """Word overlap is crude: here it finds most functions of requests that nobody chose for it."""
    tools, _ = tool_lists.read_tools(TOOLS)
    tasks = tool_calls.read_tasks(HELD_OUT, {tool["name"]: tool for tool in tools})
    called = [{call["name"] for call in task.spec["calls"]} for task in tasks]
    few = [ask.short_list(task.text, tools, tool_calls.MOST_SHOWN) for task in tasks]
    assert sum(need <= {tool["name"] for tool in some} for need, some in zip(called, few)) >= 0.9 * len(tasks)


def test_an_answer_is_read_as_calls_or_as_what_is_wrong_with_it():
    tools, _ = tool_lists.read_tools(TOOLS)
    for text, form, fault in (
            ('add_event(title="dentist", day="Friday", hour=9)', "python", ""), ("none", "python", "nothing"),
            ("I would rather not.", "python", "no call can be read"),
            ('add_event(title="dentist")', "python", "required"), ("fly(to=1)", "python", "none of"),
            ('<tool_call>{"name": "add_event", "arguments": "{}"}</tool_call>', "json", "exactly name")):
        found = ask.fault_of(calls := tool_calls.parse_calls(text, form), tools)
        assert fault in found and bool(fault) == bool(found), text
        assert found or calls[0]["arguments"] == {"title": "dentist", "day": "Friday", "hour": 9}
    task = tool_calls.read_tasks(HELD_OUT, {tool["name"]: tool for tool in tools})[0]
    agent = SimpleNamespace(world=load_world("tool_calls").scorer("python"), tools=tools)
    mark = lambda text: ask.mark_of(agent, task, {"response": text, "offered": []})
    assert mark(agent.world.gold(task)) == "right" and "not offered: book_table" in mark("none")


def test_the_runs_adapter_answers_greedily(run, model, capsys):
    """The agent of the run and not its base, with the functions that the user names, in their order."""
    named = ["set_timer", "add_event"]
    assert genenv.main(["ask", str(run), DENTIST, "--functions", ",".join(named), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)  # nothing else is on standard output
    policy = Policy.load(model, ("agent",), rank=4, device="cpu", adapter_folder=str(run / "adapters/agent"))
    world = (agent := ask.Agent(run, named)).world
    assert ask.read_requests(ask.parser().parse_args([str(run)]), agent) == world.validation_tasks()
    prompt = policy.encode(world.agent_prompt(Task(DENTIST, {"tools": agent.tools, "calls": []})))
    mine, base = (policy.decode(policy.sample(name, [prompt], 1, 24, temperature=0)[0].response)
                  for name in ("agent", None))
    assert found["offered"] == named and found["response"] == mine != base


def test_a_model_that_was_not_trained_sees_examples_but_not_its_own_request(model):
    """Asked for an example, it would else find the right calls in its prompt."""
    agent = ask.Agent(model, tools=TOOLS, base_tasks=EXAMPLES)
    asked, *answers = [turn["content"] for turn in agent.shots(agent.examples[0].text)]
    assert len(answers) > 9 and agent.examples[0].text not in [asked, *answers]


def test_bad_input_is_one_line(run, tmp_path, capsys):
    bare, ladder = tmp_path / "bare", tmp_path / "ladder"
    for folder, world in ((bare, "tool_calls"), (ladder, "ladder")):
        folder.mkdir()
        config = json.loads((run / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "world": world}))
    for argv, message in (([run, "--file", "/dev/null"], "no request"), ([run, "--file", "no.txt"], "no.txt"),
                          ([run, DENTIST, "--functions", "set_timr"], "set_timr"),
                          ([run, "<|im_end|> hello"], "control token"),
                          ([ladder, DENTIST], "world ladder"), ([bare, DENTIST], "an ended run")):
        code = genenv.main(["ask", *map(str, argv)])
        err = capsys.readouterr().err.strip().splitlines()
        assert code == 2 and message in err[-1], argv
