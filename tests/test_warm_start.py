"""The warm start: what is imitated, what the merged folder computes, and a stop in between.

Run: python -m pytest tests/test_warm_start.py -q. With a small random chat model of one token per
byte.
"""
import json

import pytest
import torch

from helpers import dense_logprobs, flat, one_line, randomise
import genenv
from policy import Policy
from rwr import rwr_step
from scripts import warm_start
from model.files import append_jsonl
from support.options import Options
from worlds import load_world


def record(tool, n):
    """A task about lamp n, for one of several tools."""
    spec = {"name": tool, "description": "", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
    return {"task": f"Please {tool} lamp number {n} now.", "tools": [spec],
            "calls": [{"name": tool, "arguments": {"n": n}}]}


TASKS = [record(("dim", "test", f"only{n % 4}")[n % 3], n) for n in range(24)]
SMALL = ["--call-format", "python", "--tools", "base", "--max-task-tokens", "96", "--threads", "1",
         "--max-response-tokens", "32", "--passes", "2", "--rounds", "1", "--lr", "0.01"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "base.jsonl"
    append_jsonl(path, TASKS)
    return str(path)


@pytest.fixture(autouse=True, scope="module")
def few_texts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_start, "TEXTS", 4)
        yield


def argv(model, tasks, out, *more):
    return ["warm-start", "--model", model, "--base-tasks", tasks, "--out", str(out), *SMALL, *more]


@pytest.fixture(scope="module")
def done(model, tasks, tmp_path_factory):
    """A finished warm start: its folder."""
    out = tmp_path_factory.mktemp("warm") / "model"
    assert genenv.main(argv(model, tasks, out)) == 0
    return out


def test_held_out_tasks_are_never_imitated(model, tasks, tmp_path):
    _, o, _ = warm_start.parse(argv(model, tasks, tmp_path)[1:])
    world = load_world("tool_calls")(o)
    held_out = [task.text for task in world.validation_tasks() + world.validation_tasks("tuning")]
    assert len(held_out) == 6
    for turn in range(4):
        pairs = world.warm_start_pairs(turn)
        assert len(pairs["agent"]) >= len(world.base_tasks()) == 18
        assert not any(text in json.dumps(pairs) for text in held_out)


def test_the_loss_is_the_mean_over_the_models_own_tokens(model):
    """An observation that counted as drawn would be learned; so would a turn without an end."""
    policy = Policy.load(model, ("warm",), rank=4, device="cpu")
    randomise(policy)
    episode, answer = ["open door", "It is shut.", "unlock door"], "dim(n=2)"
    rollouts = [warm_start.as_rollout(policy, "Go.", text) for text in (episode, answer)]
    first, last = (policy.encode(turn) + policy.end_of_turn for turn in episode[::2])
    observation = policy.encode_observation(episode[1])
    assert rollouts[0].response == first + observation + last
    read = range(len(first), len(first) + len(observation))
    assert [i for i, drawn in enumerate(rollouts[0].drawn) if not drawn] == list(read)
    with policy.use("warm"):
        with torch.no_grad():
            dense = sum(dense_logprobs(policy, [r])[0].sum() for r in rollouts)
        optimizer = policy.optimizer("warm", 1e-3)
        loss, _ = rwr_step(policy, "warm", optimizer, rollouts, torch.ones(2), Options())
    assert loss == pytest.approx(-float(dense) / sum(r.tokens for r in rollouts), rel=1e-4)


def test_merged_base_computes_what_base_and_adapter_did(model, tasks, tmp_path):
    _, o, _ = warm_start.parse(argv(model, tasks, tmp_path)[1:])
    policy = Policy.load(model, ("warm",), rank=4, device="cpu")
    randomise(policy)
    rollouts = flat([([5, 6, 7, 8], [[9, 10, 11], [12, 13]])])
    with torch.no_grad():
        with policy.use("warm"):
            with_adapter = policy.logprobs(rollouts)[0]
        without = policy.logprobs(rollouts)[0]
        warm_start.merge(policy, o, tmp_path)
        merged = Policy.load(str(tmp_path), device="cpu").logprobs(rollouts)[0]
    assert torch.allclose(merged, with_adapter, atol=1e-4)
    assert (without - with_adapter).abs().max() > 0.05  # or this would show nothing


def test_stopped_after_a_pass_and_given_again_it_ends_at_the_same_bits(done, model, tasks, tmp_path,
                                                                       monkeypatch, capsys):
    out, imitate, passes = tmp_path / "model", warm_start.imitate, []

    def stop_in_the_second(*args):
        passes.append(args[-1])
        if args[-1] == 1:
            raise KeyboardInterrupt
        return imitate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(warm_start, "imitate", stop_in_the_second)
        assert genenv.main(argv(model, tasks, out)) == 130 and passes == [0, 1]
    assert not (out / "model.safetensors").exists()
    capsys.readouterr()
    one_line(capsys, genenv.main(argv(model, tasks, out, "--seed", "1")), "other settings")
    assert genenv.main(argv(model, tasks, out)) == 0
    assert (out / "model.safetensors").read_bytes() == (done / "model.safetensors").read_bytes()
    first, second, _ = json.loads((out / "warm_start.json").read_text())["nats_per_token"]
    assert second < first


def test_refusals_are_one_line(done, model, tasks, tmp_path, capsys):
    few, new = str(tmp_path / "few.jsonl"), tmp_path / "new"
    append_jsonl(few, TASKS[:5])
    for arguments, words in (
            (argv(model, few, new, "--tools", ""), "examples to imitate as agent"),
            (argv(model, tasks, done), f"can give --model {done}"),
            (argv(model, "", new, "--tools", tasks), "--base-tasks"),
            (argv(model, tasks, new, "--lr", "nan"), "--lr"),
            (["--out", str(done)], "give it as --model"),
            (["--resume", "--out", str(done)], "give it as --model")):
        one_line(capsys, genenv.main(arguments), words)
