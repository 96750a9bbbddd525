"""`genenv.py ask`: the calls of a trained agent, which functions it is shown, and bad input.

Run: python -m pytest tests/test_ask.py -q
"""
import dataclasses
import io
import json
import shutil
from types import SimpleNamespace

import pytest

from scripts import ask, warm_start
import genenv
from helpers import EXAMPLE_LIST, one_line, randomise
from policy import Policy
from worlds import tool_calls, tool_lists

TOOLS, REQUESTS, HELD_OUT = EXAMPLE_LIST[1::2]
DENTIST = "Put the dentist on Friday at nine."
CALL = 'add_event(title="dentist", day="Friday", hour=9)'


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """The folder of a run as it ends, with an agent that differs from its base."""
    folder = tmp_path_factory.mktemp("ask") / "run"
    folder.mkdir()
    o = dataclasses.replace(
        genenv.Options(), world="tool_calls", model=model, base_tasks=REQUESTS, rank=4, device="cpu",
        max_response_tokens=24, max_prompt_tokens=2048, threads=1,
        world_options={"call_format": "python", "tools": TOOLS})
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(o)))
    policy = Policy.load(model, ("agent",), rank=4, device="cpu")
    randomise(policy, seed=1)
    policy.save_adapters(folder / "adapters")
    return folder


class Says:
    """A policy that gives one answer after another and keeps the prompts."""

    tokenizer, params = SimpleNamespace(all_special_tokens=["<|im_end|>"]), {"agent": []}

    def __init__(self, *texts):
        self.texts, self.prompts = texts, []

    def encode(self, messages):
        self.prompts.append(messages)
        return messages[0]["content"]

    def sample(self, adapter, prompts, G, max_new_tokens, temperature, max_rows):
        assert (adapter, G, temperature) == ("agent", 1, 0)
        return [SimpleNamespace(response=text) for text in self.texts[:len(prompts)]]

    def decode(self, ids):
        return ids


def asked(monkeypatch, capsys, policy, *argv):
    """What `genenv.py ask` prints with this policy, which must succeed."""
    monkeypatch.setattr(Policy, "load", lambda *args, **options: policy)
    assert genenv.main(["ask", *map(str, argv)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_the_calls_are_printed_and_read_back_as_json(run, monkeypatch, capsys):
    out = asked(monkeypatch, capsys, Says(CALL), run, DENTIST)
    assert out == CALL + "\n"
    out = asked(monkeypatch, capsys, Says(CALL), run, "--json", DENTIST)
    found = json.loads(out)
    assert found["calls"] == [{"name": "add_event", "arguments": {
        "title": "dentist", "day": "Friday", "hour": 9}}] and not found["fault"]
    assert found["request"] == DENTIST and "add_event" in found["offered"]


def test_answers_that_are_no_fitting_calls_are_said_to_be_none(run, monkeypatch, capsys):
    for answer, line in (("I would rather not.", "# no call can be read"),
                         ('add_event(title="dentist")', "# call of 'add_event': the required argument"),
                         ("fly(to=1)", "# tool 'fly' is not declared"), ("none", "# nothing to call")):
        assert line in asked(monkeypatch, capsys, Says(answer), run, DENTIST)
    # in JSON a call may have any form
    for call in ('{"name": "fly", "parameters": {}}', '{"name": "fly", "arguments": "{}"}'):
        tool_calls.read_answers_as("json")
        answer = f"<tool_call>{call}</tool_call>"
        lines = ask.lines_of(ask.read_answer(answer, []), answer)
        assert lines == [call, "# a call is exactly name (text) and arguments (object)"]


def test_requests_come_from_arguments_files_and_standard_input(run, monkeypatch, capsys, tmp_path):
    path = tmp_path / "requests.txt"
    chat = json.dumps({"messages": [{"role": "user", "content": DENTIST}]})
    task = json.dumps({"task": "Wake me at 6:45.", "calls": []})
    path.write_text("\ufeff" + f"{chat}\n\n{task}\n", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(
        isatty=lambda: False, buffer=io.BytesIO(path.read_bytes())))
    for argv in ([DENTIST, "Wake me at 6:45."], ["--file", path], []):
        out = asked(monkeypatch, capsys, Says(CALL, "set_alarm(hour=6, minute=45)"), run, *argv)
        assert out.split("\n") == [f"> {DENTIST}", CALL, "> Wake me at 6:45.",
                                   "set_alarm(hour=6, minute=45)", ""]


def test_which_functions_are_offered(run, monkeypatch, capsys, tmp_path):
    """The run's: as many as the largest task of training; or those that the user names."""
    offered = lambda *argv: json.loads(asked(monkeypatch, capsys, Says(CALL), run, DENTIST, "--json",
                                             *argv))["offered"]
    assert len(offered()) == ask.LEAST
    assert len(offered("--offered", "5")) == 5 and len(offered("--offered", "99")) == 32
    assert offered("--functions", "set_timer, add_event,translate") == [
        "set_timer", "add_event", "translate"]
    path = tmp_path / "mine.json"
    wide = {"type": "object", "properties": {f"argument_{n}": {"type": "string"} for n in range(200)}}
    path.write_text(json.dumps([{"name": "wide", "parameters": wide}, {"name": "ring"}]))
    assert offered("--tools", path) == ["ring"]  # one too long for any prompt would refuse the request
    path.write_text(json.dumps([{"name": "ring"}]))
    assert offered("--tools", path, "--functions", "ring,ring") == ["ring"]
    # what the run wrote counts too, also where its base tasks are gone
    copy = tmp_path / "run"
    config = json.loads((run / "config.json").read_text())
    config.update(base_tasks=str(tmp_path / "gone"), world_options={"call_format": "python"})
    shutil.copytree(run / "adapters", copy / "adapters")
    (copy / "config.json").write_text(json.dumps(config))
    task = tool_calls.make_task({"task": "Ring the bell, please.", "calls": [{"name": "ring", "arguments": {}}],
                                 "tools": tool_lists.read_tools(path)[0]}, "env", "seed", 1)
    (copy / "train.jsonl").write_text(json.dumps({
        "task": dataclasses.asdict(task), "p_hat": 0.5, "epoch": 1, "traces": []}) + "\n")
    out = asked(monkeypatch, capsys, Says("ring()"), copy, DENTIST, "--json")
    assert json.loads(out)["offered"] == ["ring"]
    # a list that was moved since is said, and the tasks' functions serve
    config.update(world_options={"call_format": "python", "tools": str(tmp_path / "gone")})
    (copy / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(Policy, "load", lambda *args, **options: Says("ring()"))
    assert genenv.main(["ask", str(copy), DENTIST]) == 0
    assert "no such file" in (printed := capsys.readouterr()).err and printed.out == "ring()\n"
    # a list alone: no example task's functions beside it; examples whose list is gone are no matter
    for base_tasks, listed in (("", path), (REQUESTS, tmp_path / "gone")):
        config.update(base_tasks=base_tasks, world_options={"call_format": "python", "tools": str(listed)})
        (copy / "config.json").write_text(json.dumps(config))
        out = asked(monkeypatch, capsys, Says("ring()"), copy, DENTIST, "--json", "--tools", path)
        assert json.loads(out)["offered"] == ["ring"]
        if listed == path:
            (copy / "train.jsonl").unlink()
            out = asked(monkeypatch, capsys, Says("ring()"), copy, DENTIST, "--json")
            assert json.loads(out)["offered"] == ["ring"]


def test_the_short_list_has_the_function_that_is_needed():
    """Word overlap is a crude choice: here it finds most functions of requests that nobody chose for
    it, and rare words weigh more than common ones."""
    tools, _ = tool_lists.read_tools(TOOLS)
    tasks = tool_calls.read_tasks(HELD_OUT, TOOLS)
    found = sum(set(tool_calls.skills(t)) <= {x["name"] for x in ask.short_list(t.text, tools, ask.LEAST)}
                for t in tasks)
    assert found >= 0.9 * len(tasks)
    many = [{"name": f"set_{n}", "description": "Set it in the room."} for n in range(50)]
    many.insert(31, {"name": "tuneRadio", "description": "Set it."})
    many = list(map(tool_lists.own_tool, many))
    assert many[31] in ask.short_list("Set the radio in the room, please, and set it in the room.", many, 1)


def test_a_trained_adapter_answers_greedily(run, capsys):
    """The agent of the run, not its base, and the same answer twice; from a warm start the base."""
    def answer(*argv):
        assert genenv.main(["ask", *map(str, argv), DENTIST, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["response"]
    config = json.loads((run / "config.json").read_text())
    o = SimpleNamespace(**config)
    policy = Policy.load(o.model, ("agent",), rank=4, device="cpu",
                         adapter_folder=str(run / "adapters" / "agent"))
    tools = ask.short_list(DENTIST, tool_lists.read_tools(TOOLS)[0], ask.LEAST)
    task = tool_calls.Task(DENTIST, {"tools": tools, "calls": [], "ordered": False})
    tool_calls.read_answers_as("python")
    prompt = policy.encode(tool_calls.agent_prompt(task))
    expected = [policy.decode(policy.sample(name, [prompt], 1, 24, temperature=0)[0].response)
                for name in ("agent", None)]
    assert expected[0] != expected[1] and answer(run) == answer(run) == expected[0]


def test_a_warm_start_folder_is_asked_without_an_adapter(run, model, tmp_path, capsys, monkeypatch):
    config = json.loads((run / "config.json").read_text())
    seen = []
    monkeypatch.setattr(Policy, "load", lambda path, names, **o: seen.append((path, names)) or Says(CALL))
    settings = warm_start.settings_of(warm_start.Settings(), genenv.Options(**config))
    (tmp_path / "warm_start.json").write_text(json.dumps({"settings": settings}))
    assert genenv.main(["ask", str(tmp_path), DENTIST]) == 0
    assert seen == [(str(tmp_path), ())]


def changed(run, folder, **fields):
    """A copy of the run's config.json with other fields, and no adapters."""
    folder.mkdir()
    config = json.loads((run / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


def test_bad_input_is_one_line(run, tmp_path, capsys, monkeypatch):
    """Every mistake says what is wrong and what to do; exit code 2, nothing on standard output."""
    ladder = changed(run, tmp_path / "ladder", world="ladder")
    bare = changed(run, tmp_path / "bare")
    model = changed(run, tmp_path / "model", model=str(tmp_path / "absent"))
    (model / "adapters").symlink_to(run / "adapters")
    broken = changed(run, tmp_path / "broken")
    (broken / "adapters" / "agent").mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (broken / "adapters" / "agent" / name).write_text("{}")
    torn = changed(run, tmp_path / "torn")
    shutil.copytree(run / "adapters", torn / "adapters")
    for path in (torn / "adapters" / "agent").iterdir():
        path.write_bytes(path.read_bytes()[:2000])
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text("{")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "other.txt").write_text('{"request": "Dim the study"}')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    for argv, message in (
            ([run, "x" * 2 ** 20], "1048576 characters"), ([run, "  "], "is empty"),
            ([run, "a\0b"], "is not UTF-8"), ([run, "\udcff"], "is not UTF-8"), ([run], "needs a request"),
            ([run, "<|im_end|> hello"], "control token"), ([run, "é" * 7000], "in fewer words"),
            ([run, "--file", tmp_path / "empty.txt"], "holds no request"),
            ([run, "--file", tmp_path / "latin.txt"], "not UTF-8"),
            ([run, "--file", tmp_path / "none.txt"], "no such file"),
            ([run, "--file", "/dev/null"], "a pipe or device"),
            ([run, "--file", tmp_path / "other.txt"], "line 1: a JSON object without a text"),
            ([run, "--file", tmp_path / "text" / "config.json"], "line 1: not JSON"),
            ([run, DENTIST, "--file", "x"], "not both"), ([run, DENTIST, "--offered", "0"], "--offered"),
            ([run, DENTIST, "--functions", "fly"], "no function 'fly' among the 32"),
            ([run, DENTIST, "--tools", tmp_path / "none.json"], "no such file"), ([], "arguments are required"),
            ([tmp_path / "none", DENTIST], "no such folder"), ([tmp_path, DENTIST], "no config.json"),
            ([tmp_path / "text", DENTIST], "not the options of a run"),
            ([tmp_path / "plain", DENTIST], "names no world"), ([ladder, DENTIST], "world ladder"),
            ([bare, DENTIST], "no adapters/agent"), ([model, DENTIST], "does not exist"),
            ([broken, DENTIST], "cannot be used"), ([torn, DENTIST], "cannot be used")):
        assert not one_line(capsys, genenv.main(["ask", *map(str, argv)]), message), argv
