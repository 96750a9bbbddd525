"""The warm start: what is imitated, what the merged folder computes, and SIGKILL in between.

Run: python -m pytest tests/test_warm_start.py -q. With a small random chat model of one token per
byte; the real one is in test_real_model.py.
"""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from scripts import imitate, warm_start
from support.files import UserError, append_jsonl
import genenv
from helpers import dense_logprobs, flat, randomise, user_error
from support.loading import policy_options
from policy import Policy, Rollout
from test_tool_calls import NO_SYSTEM, chat_model
from worlds import load_world

ROOT = Path(__file__).resolve().parents[1]


def record(tool, n):
    """A task about lamp n, for one of several tools."""
    spec = {"name": tool, "description": "", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
    return {"task": f"Please {tool} lamp number {n} now.", "tools": [spec],
            "calls": [{"name": tool, "arguments": {"n": n}}]}


TASKS = [record("dim", n) for n in range(14)] + [record("test", n) for n in range(6)] \
    + [record(f"only{n}", n) for n in range(4)]
SMALL = ["--call-format", "python", "--tools", "base", "--max-task-tokens", "96", "--threads", "1",
         "--max-response-tokens", "32", "--device", "cpu", "--texts", "6", "--rounds", "1", "--rank", "4", "--passes", "2", "--batch", "8", "--save-every", "1", "--lr", "0.01"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "base.jsonl"
    append_jsonl(path, TASKS)
    return str(path)


def argv(model, tasks, out, *more):
    return ["--model", model, "--base-tasks", tasks, "--out", str(out), *SMALL, *more]


@pytest.fixture(scope="module")
def done(model, tasks, tmp_path_factory):
    """A finished warm start: its folder."""
    out = tmp_path_factory.mktemp("warm") / "model"
    assert warm_start.main(argv(model, tasks, out)) == 0
    return out


# ---------------------------------------------------------------------------------------------
# what is imitated


def test_held_out_tasks_are_never_imitated(model, tasks, tmp_path):
    _, o = warm_start.parse(argv(model, tasks, tmp_path))
    world = load_world("tool_calls")
    world.prepare(o)
    held_out = [task.text for split in ("validation", "tuning")
                for task in world.validation_tasks(o, split)]
    assert len(held_out) == 6
    for turn in range(4):
        pairs = world.warm_start_pairs(o, turn)
        assert not any(text in json.dumps(pairs) for text in held_out)
        assert len(pairs["agent"]) >= len(world.base_tasks(o)) == 18


HOUSE = ["--world", "household", "--max-task-tokens", "400", "--max-response-tokens", "40",
         "--max-episode-tokens", "900", "--max-prompt-tokens", "4000"]


def house_argv(model, out, *more):
    """As argv, in the household."""
    return ["--model", model, "--out", str(out), *SMALL[SMALL.index("--threads"):], *HOUSE, *more]


@pytest.fixture
def small_house(monkeypatch):
    """The household with six tasks in a pass."""
    world = load_world("household")
    monkeypatch.setattr(world, "N_WARM", 6)
    monkeypatch.setitem(world._mode, "chat", False)
    return world


def test_an_expert_is_imitated_turn_by_turn_and_not_the_world(model, small_house, tmp_path):
    """The model would learn to write observations, or turns without an end."""
    s, o = warm_start.parse(house_argv(model, tmp_path))
    small_house.prepare(o)
    policy = Policy.load(model, ("warm",), **policy_options(o))
    pairs = small_house.warm_start_pairs(o, 0)
    groups = imitate.pairs_of_pass(small_house, policy, o, 0)
    assert len(groups["agent"]) == len(groups["env"]) == 6 and groups["alone"] == 0
    for (_, said), r in zip(pairs["agent"], groups["agent"]):
        # what policy.sample would hold of this episode: turns with their ends are its own
        expected = [(token, i % 2 == 0) for i, text in enumerate(said) for token in
                    (policy.encode_observation(text) if i % 2 else
                     policy.encode(text) + policy.eos_ids[:1])]
        assert list(zip(r.response, r.drawn)) == expected and r.drawn[-1] and not all(r.drawn)
    tasks = small_house.base_tasks()[:6]
    for task, (_, said) in zip(tasks, pairs["agent"]):
        assert small_house.score(task, said[::2]) == (1.0, True)
    # the same loss as one row at a time, own tokens alone
    with policy.use("warm"), torch.no_grad():
        rows = [dense_logprobs(policy, [r])[0].sum() for r in groups["agent"]]
    expected = -sum(map(float, rows)) / sum(r.tokens for r in groups["agent"])
    loss = imitate.imitation_step(policy, policy.optimizer("warm", 1e-9), groups["agent"], 1e-9, o)
    assert loss == pytest.approx(expected, rel=1e-4)


# ---------------------------------------------------------------------------------------------
# the folder


def test_folder_is_a_model_and_its_report(done, model):
    report = json.loads((done / "warm_start.json").read_text())
    assert len(report["nats_per_token"]) == 3 and len(report["rounds"]) == 2  # two passes, a round
    assert report["nats_per_token"][2] < report["nats_per_token"][0]
    for written in report["rounds"]:
        assert written["valid"] == 1 - sum(written["invalid"].values()) / 6 == 0
        assert len(written["texts"]) == 6 and "pairs" not in written
    assert not (done / "warm_start").exists() and not list(done.glob("tmp*"))
    warm, cold = (Policy.load(str(folder), device="cpu") for folder in (done, model))
    assert warm.tokenizer.chat_template == cold.tokenizer.chat_template


def test_merged_base_computes_what_base_and_adapter_did(model, tasks, tmp_path):
    s, o = warm_start.parse(argv(model, tasks, tmp_path / "m"))
    out, _ = claim(s, o)
    policy = Policy.load(model, ("warm",), **policy_options(o))
    randomise(policy)
    groups = [([5, 6, 7, 8], [[9, 10, 11], [12, 13]])]
    with policy.use("warm"), torch.no_grad():
        with_adapter = policy.logprobs(flat(groups))[0]
    with policy.use(None), torch.no_grad():
        without = policy.logprobs(flat(groups))[0]
    imitate.merge(policy, o, out)
    merged = Policy.load(str(out), device="cpu")
    with torch.no_grad():
        assert torch.allclose(merged.logprobs(flat(groups))[0], with_adapter, atol=1e-4)
    assert (without - with_adapter).abs().max() > 0.05  # or this would show nothing


def test_four_bit_training_is_merged_into_the_weights_before(model, tasks, tmp_path):
    s, o = warm_start.parse(argv(model, tasks, tmp_path / "m", "--quant", "nf4"))
    out, _ = claim(s, o)
    policy = Policy.load(model, ("warm",), **policy_options(o))
    imitate.merge(policy, o, out)  # a fresh adapter: B = 0
    merged, base = (load_file(Path(f) / "model.safetensors") for f in (out, model))
    assert set(merged) == set(base)
    for name, value in merged.items():  # the base itself in 16 bits, not what NF4 made of it
        assert torch.equal(value, base[name].to(torch.bfloat16)), name


# ---------------------------------------------------------------------------------------------
# interruptions


COMMAND = ("import sys, genenv; from scripts import warm_start; "
           "sys.exit(warm_start.main(sys.argv[1:]))")


@pytest.mark.slow
def test_killed_and_given_again_it_ends_at_the_same_bits(done, model, tasks, tmp_path):
    out = tmp_path / "model"
    command = [sys.executable, "-c", COMMAND, *argv(model, tasks, out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    said = []
    for line in process.stdout:  # in the round: what had been written must not be written again
        said.append(line)
        if line.startswith("step 2/") and any("before round 1" in line for line in said):
            process.send_signal(signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL and not (out / "model.safetensors").exists()
    assert warm_start.main(argv(model, tasks, out)) == 0
    assert (out / "model.safetensors").read_bytes() == (done / "model.safetensors").read_bytes()
    again, once = (json.loads((f / "warm_start.json").read_text()) for f in (out, done))
    assert {**again, "settings": 0} == {**once, "settings": 0}


# ---------------------------------------------------------------------------------------------
# mistakes


def claim(s, o):
    return warm_start.claim(s.out, warm_start.settings_of(s, o))


def refusal(arguments) -> str:
    return user_error(None, warm_start.main, arguments)


class Simulator:
    """A policy whose simulator writes the next task for the first function it is asked for; every
    third text is none."""
    tokenizer, n = None, 0

    def encode(self, messages):
        return messages[1]["content"]

    def generator(self, seed):
        return None

    def decode(self, response):
        return response

    def sample(self, adapter, prompts, *_, max_rows):
        rollouts = []
        for prompt in prompts:
            name, self.n = prompt.split("Write for:\n")[1].split("(")[0], self.n + 1
            text = f"Call: {name}(n={50 + self.n})\nRequest: Please {name} lamp number {50 + self.n} now."
            rollouts.append(Rollout(len(rollouts), prompt, text if self.n % 3 else "no"))
        return rollouts


def test_a_round_imitates_what_passed_every_check(model, tasks, tmp_path):
    s, o = warm_start.parse(argv(model, tasks, tmp_path, "--texts", "30"))
    world = load_world("tool_calls")
    world.prepare(o)
    written = imitate.write(world, Simulator(), s, o, 2)
    assert written["invalid"] == {"no request and call": 10} and written["valid"] == 20 / 30
    assert all(text.startswith("Call: ") for _, text in written["pairs"])
    # for functions of the list, drawn evenly, of base tasks or not
    names = {text.split("(")[0] for _, text in written["pairs"]}
    assert len(names) > 4 and "Solved: unknown" in written["pairs"][0][0]
    assert written == imitate.write(world, Simulator(), s, o, 2)
    same = Simulator()
    same.decode = lambda response: "Call: dim(n=99)\nRequest: Please dim lamp number 99 now."
    reasons = imitate.write(world, same, s, o, 2)["invalid"]
    assert reasons["duplicate in the batch"] > 0 and sum(reasons.values()) == 29


@pytest.mark.parametrize("shares, passes", [([0.7], 2), ([0.1, 0.6], 3), ([0.1, 0.2, 0.3], 4)])
def test_rounds_end_where_enough_is_valid_or_they_run_out(monkeypatch, tmp_path, shares, passes):
    """Writes and training are counted, not done."""
    left, pairs_seen = list(shares), []
    monkeypatch.setattr(imitate, "write", lambda *_: {
        "valid": left.pop(0), "invalid": {}, "texts": [], "pairs": [([len(left)], [1, 2])]})
    monkeypatch.setattr(imitate, "pairs_of_pass", lambda *_: {"agent": [], "env": [], "alone": 0})
    monkeypatch.setattr(imitate, "save_state", lambda *_: None)
    monkeypatch.setattr(imitate, "listed", lambda *_: ["f"])

    def count(policy, optimizer, batches, s, o, state, path):
        pairs_seen.append(sum(map(len, batches)))
        state["stage"] += 1
    monkeypatch.setattr(imitate, "imitate", count)
    s = warm_start.Settings(passes=2, rounds=2)
    policy = SimpleNamespace(optimizer=lambda *_: None)
    state = imitate.learn(None, policy, s, genenv.Options(), tmp_path / "state.pt")
    assert not left and state["stage"] == passes == len(pairs_seen)
    assert pairs_seen == [0, 0, 1, 2][:passes]  # a round imitates what all rounds so far wrote


def test_the_options_of_another_run_name_the_world_too(tmp_path):
    """Without it, a household's options became a warm start of tool_calls."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"world": "household", "model": "m"}))
    assert warm_start.parse(["--out", "x", "--config", str(config)])[1].world == "household"


def test_too_few_tasks_are_one_line(model, tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps(record("dim", n)) + "\n" for n in range(6)))
    assert "too few of 4 base tasks to imitate as the agent (4; 0 prompts" in refusal(
        argv(model, str(path), tmp_path / "n"))
    with path.open("a") as file:  # as it was told, and into the same folder
        file.write(json.dumps(record("dim", 6)) + "\n")
    assert "too few of 5 base tasks" in refusal(argv(model, str(path), tmp_path / "n"))
    assert "without it" in refusal(argv(model, str(path), tmp_path / "n", "--resume"))


def test_a_template_without_a_system_role_is_one_line(tasks, tmp_path):
    """It was a traceback out of the template."""
    strict = chat_model(tmp_path / "strict", template=NO_SYSTEM)
    assert "chat template" in refusal(argv(strict, tasks, tmp_path / "m"))


def test_other_settings_or_a_used_folder_are_refused(model, tasks, tmp_path):
    s, o = warm_start.parse(argv(model, tasks, tmp_path / "m"))
    _, lock = claim(s, o)
    assert "another program" in refusal(argv(model, tasks, tmp_path / "m"))
    lock.close()
    (tmp_path / "m" / "warm_start" / "state.pt").touch()  # there is work to be lost
    assert "other settings" in refusal(argv(model, tasks, tmp_path / "m", "--lr", "0.02"))
    whole = Path(tasks).read_text()
    Path(tasks).write_text(whole + "\n")  # a file of tasks is no longer what it was
    assert "settings or files" in refusal(argv(model, tasks, tmp_path / "m"))
    Path(tasks).write_text(whole)
    for option in ("--agent-adapter", "--env-adapter"):
        assert f"{option} does nothing" in refusal(argv(model, tasks, tmp_path / "n", option, "x"))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    assert "is not empty" in refusal(argv(model, tasks, tmp_path / "used"))
    assert "is not empty" in refusal(argv(model, tasks, tmp_path / "used" / "file"))


@pytest.mark.parametrize("pairs, passes, listed", [
    (18, 10, 10), (60, 6, 6), (200, 2, 6), (600, 2, 2), (1100, 2, 2), (8, 10, 10)])
def test_few_examples_are_passed_over_more_often(pairs, passes, listed):
    """After twelve steps in all hardly a task was valid; with a list more passes do no harm."""
    assert warm_start.passes_for(pairs, 8, False) == passes
    assert warm_start.passes_for(pairs, 8, True) == listed


def test_a_list_gives_more_passes(monkeypatch, model, tasks, tmp_path):
    """Some fifty answers and tasks, one a step: without a list two passes."""
    def learn(world, policy, s, o, path):
        raise UserError(f"{s.passes} passes")
    monkeypatch.setattr(imitate, "learn", learn)
    given = ("--passes", "0", "--batch", "1")
    assert refusal(argv(model, tasks, tmp_path / "m", *given)).endswith("3 passes")
