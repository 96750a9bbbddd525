"""The warm start: what it imitates, what the merged model computes, and how a stop is resumed.

Run: python -m pytest tests/test_warm_start.py -q

The model is a small random one.
"""
import json
import shutil
from pathlib import Path

import pytest
import torch

from helpers import one_line, randomise, rollouts_of
import genenv
from policy import Policy
from scripts import warm_start
from data_pool import append_jsonl
from test_tool_calls import WHOLE, call, tool
from worlds import load_world


def record(name, n):
    """Return a task about lamp n for the tool of this name."""
    return {"task": f"Please {name} lamp number {n} now.", "tools": [tool(name, n=WHOLE)],
            "calls": [call(name, n=n)]}


TASKS = [record(("dim", "test", f"only{n % 4}")[n % 3], n) for n in range(24)]
SMALL = ["--world", "tool_calls", "--tools", "base", "--max-task-tokens", "128", "--threads", "1",
         "--max-response-tokens", "96", "--passes", "2", "--rounds", "1"]


@pytest.fixture(autouse=True, scope="module")
def small():
    """Use few texts, and a learning rate at which the model visibly learns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_start, "TEXTS", 4)
        patch.setattr(warm_start, "RATE", 0.01)
        yield


@pytest.fixture(scope="module")
def command(model, tmp_path_factory):
    """Return the arguments of a warm start on TASKS, without the folder after --out."""
    path = tmp_path_factory.mktemp("tasks") / "base.jsonl"
    append_jsonl(path, TASKS)
    return ["warm-start", *SMALL, "--model", model, "--base-tasks", str(path), "--out"]


@pytest.fixture(scope="module")
def done(command, tmp_path_factory):
    """Finish a warm start, and return its folder."""
    out = tmp_path_factory.mktemp("warm") / "model"
    assert genenv.main([*command, str(out)]) == 0
    return out


def test_held_out_tasks_are_never_imitated(command):
    """Otherwise validation would measure what the model has memorised."""
    _, o, _ = warm_start.parse([*command[1:], "new"])
    world = load_world("tool_calls")(o)
    held_out = [task.text for task in world.validation_tasks() + world.validation_tasks("tuning")]
    assert len(held_out) == 6
    for turn in range(4):
        pairs = world.warm_start_pairs(turn)
        assert len(pairs["agent"]) >= len(world.base_tasks()) == 18
        assert not any(text in json.dumps(pairs) for text in held_out)


def test_only_the_models_own_turns_are_imitated_and_each_has_its_end(model):
    """Otherwise the agent would learn to write observations, or not to end its turns."""
    policy = Policy.load(model, ("warm",), rank=4, device="cpu")
    episode = ["open door", "It is shut.", "unlock door"]
    rollout = policy.as_drawn("Go.", episode)
    first, last = (policy.encode(turn) + policy.end_of_turn for turn in episode[::2])
    observation = policy.encode_observation(episode[1])
    assert rollout.response == first + observation + last
    read = range(len(first), len(first) + len(observation))
    assert [i for i, drawn in enumerate(rollout.drawn) if not drawn] == list(read)


def as_on_a_hub(model, folder):
    """Copy a model, with config files as transformers 4 would write them; return the folder."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    config |= {"rope_theta": 1e6, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**tokenizer, "tokenizer_class": "Qwen2Tokenizer"}))
    return str(folder)


def test_merged_base_computes_what_base_and_adapter_did(command, model, tmp_path):
    """Otherwise a run would not begin with the model that was trained, or a server that reads the
    folder with transformers 4 would serve another one."""
    base, out = as_on_a_hub(model, tmp_path / "base"), tmp_path / "out"
    _, o, _ = warm_start.parse([*command[1:], "new", "--model", base])
    policy = Policy.load(base, ("warm",), rank=4, device="cpu")
    randomise(policy)
    rollouts = rollouts_of([([5, 6, 7, 8], [[9, 10, 11], [12, 13]])])
    with torch.no_grad():
        with policy.use("warm"):
            with_adapter = policy.logprobs(rollouts)[0]
        warm_start.merge(policy, o, out)
        merged = Policy.load(str(out), device="cpu").logprobs(rollouts)[0]
    assert torch.allclose(merged, with_adapter, atol=1e-4)
    for name in ("config.json", "tokenizer_config.json"):
        copy, original = (json.loads(Path(f, name).read_text()) for f in (out, base))
        assert copy == {**copy, **original} and not copy.keys() - original.keys() - {"dtype"}


def test_stopped_after_a_pass_and_given_again_it_ends_at_the_same_bits(done, command, tmp_path,
                                                                       monkeypatch, capsys):
    """Otherwise a stop would cost the whole warm start or change its model, or a template that
    names the day would show two days."""
    out, imitate, days = tmp_path / "model", warm_start.WarmStart.imitate, []

    def stop_in(number):
        def imitate_or_stop(*args):
            if args[-1] == number:
                raise torch.OutOfMemoryError
            days.append(args[0].world.o.date)
            return imitate(*args)
        monkeypatch.setattr(warm_start.WarmStart, "imitate", imitate_or_stop)

    stop_in(1)
    one_line(capsys, genenv.main([*command, str(out)]), "out of GPU memory")
    assert not (out / "model.safetensors").exists()
    one_line(capsys, genenv.main([*command, str(out), "--seed", "1"]), "other settings")
    monkeypatch.setattr(warm_start.time, "strftime", lambda form: "2026-01-02")
    stop_in(0)  # this raises if the first pass, which is finished, is made again
    assert genenv.main([*command, str(out)]) == 0
    assert (out / "model.safetensors").read_bytes() == (done / "model.safetensors").read_bytes()
    first, second, _ = json.loads((out / "warm_start.json").read_text())["nats_per_token"]
    assert second < first and len(set(days)) == 1


def test_a_model_is_not_written_over(done, command, capsys):
    """Otherwise an existing model would be lost."""
    one_line(capsys, genenv.main([*command, str(done)]), "not empty")
