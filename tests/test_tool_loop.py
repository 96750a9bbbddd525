"""The whole loop of the tool-call world on a 4-bit chat model, through the documented command.

Run: python -m pytest tests/test_tool_loop.py -q

A random model writes no valid task, so base tasks fill the batches, and no others are stored.
"""
from functools import partial

from safetensors.torch import load_file

import genenv
from helpers import one_line
from model import memory
from support import report
from data_pool import read_jsonl
from test_tool_calls import WHOLE, call, chat_model, lines, question, record, tool

SMALL = ["--threads", "1", "--rank", "4", "--seed-tasks", "2", "--variations", "2", "--G", "2",
         "--val-samples", "1", "--max-task-tokens", "32", "--max-response-tokens", "96",
         "--epochs", "1", "--steps", "1", "--max-prompt-tokens", "2048"]
DIM = tool("dim", "Dim a lamp.", lamp={**WHOLE, "minimum": 0})
BASE = [*(record(f"Please dim lamp {n} for me.", call("dim", lamp=n), tools=[DIM])
          for n in range(9)),
        *(question(f"What is the name of pupil {n}?", f"name{n}") for n in range(3))]


def command(model, folder, *more):
    """Make a small run with --preset 7b-24gb, --model and --base-tasks; return the exit code."""
    return genenv.main(["--preset", "7b-24gb", "--model", model, "--out", str(folder / "r"),
                        "--base-tasks", lines(folder / "base.jsonl", BASE), *SMALL, *more])


def test_a_run_with_a_list_and_a_simulator_of_its_own(model, tmp_path, monkeypatch):
    """Otherwise a batch could not mix both kinds of task, or an adapter would belong to the wrong
    model."""
    monkeypatch.setattr(report, "write", lambda folder: None)
    other = chat_model(tmp_path / "other")
    assert command(model, tmp_path, "--env-model", other, "--tools", "base") == 0
    records = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    assert all(r["written"] == sum(r["invalid"].values()) for r in records)
    pool = read_jsonl(tmp_path / "r" / "train.jsonl")
    assert {r["task"]["origin"] for r in pool} == {"base"}
    for name, width in (("agent", 32), ("env", 64)):
        weights = load_file(tmp_path / "r" / "adapters" / name / "adapter_model.safetensors")
        assert {w.shape[1] for key, w in weights.items() if "q_proj.lora_A" in key} == {width}


def test_what_cannot_work_is_one_line_and_leaves_no_folder(model, tmp_path, capsys, monkeypatch):
    """Otherwise a model that does not fit would be loaded before the user learns of it."""
    monkeypatch.setattr(memory, "check", partial(memory.check, available=1e6))
    one_line(capsys, command(model, tmp_path), "--token-budget")
    assert not (tmp_path / "r").exists()
