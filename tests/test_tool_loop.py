"""The whole loop of the tool-call world on a 4-bit chat model, by the documented command.

Run: python -m pytest tests/test_tool_loop.py -q

A random model writes no task at all: base tasks fill the batch, and what the run says and keeps is
known. Then models that cannot work, and too little memory.
"""
import json
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from support.files import append_jsonl, read_jsonl
import genenv
from helpers import noisy, one_line, same_run
from support.loading import model_config
from policy import Policy
from support import memory
from test_tool_calls import chat_model
from support import report, screen

SMALL = ["--threads", "1", "--device", "cpu", "--rank", "4", "--seed-tasks", "2", "--G", "2",
         "--val-samples", "1", "--env-updates", "2", "--env-kl-sample", "8",
         "--write-rounds", "1", "--env-passes", "0"]  # each text of the script is read once
FILES = ["config.json", "metrics.jsonl", "samples.jsonl", "train.jsonl", "memory.json",
         "report.html", "figures/validation.png",
         *(f"adapters/{name}/adapter_{part}" for name in ("agent", "env")
           for part in ("config.json", "model.safetensors"))]


# ---------------------------------------------------------------------------------------------
# tasks: small ones, as every byte is a token here


TOOL = {"name": "dim", "description": "Dim a lamp.", "parameters": {
    "type": "object", "properties": {"lamp": {"type": "integer", "minimum": 0}},
    "required": ["lamp"]}}


def calls_record(n, text="Please dim lamp {} for me.", tool=TOOL, **arguments):
    """A task of the calls kind about lamp n."""
    call = {"name": "dim", "arguments": arguments or {"lamp": n}}
    return {"task": text.format(n), "tools": [tool], "calls": [call]}


def answer_record(n):
    """A free-form task about pupil n."""
    return {"task": f"What is the name of pupil number {n}?", "reference": f"name{n}"}


BASE = [calls_record(n) for n in range(9)] + [answer_record(n) for n in range(3)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """BASE as the file of --base-tasks."""
    path = tmp_path_factory.mktemp("tasks") / "base.jsonl"
    append_jsonl(path, BASE)
    return str(path)


@pytest.fixture
def no_figures(monkeypatch):
    """They are the slow part of a small run, and drawn in two of them."""
    monkeypatch.setattr(report, "write", lambda folder: None)


def command(model, tasks, out, *more):
    """python genenv.py --preset 7b-24gb --model DIR --base-tasks FILE, made small -> exit code."""
    return genenv.main(["--preset", "7b-24gb", "--model", model, "--base-tasks", tasks, "--out",
                        str(out), *SMALL, *more])


# ---------------------------------------------------------------------------------------------
# a random model: the real sampler, and not one valid task


SILENT = ["--no-gate", "--steps", "1", "--variations", "2", "--max-task-tokens", "64",
        "--max-response-tokens", "32"]


def test_a_run_where_tools_answer(model, tmp_path, no_figures, capsys, monkeypatch):
    """Single answers and episodes side by side in one batch: the loop takes both."""
    noisy(monkeypatch, 0.4)
    from test_call_text import ANSWERING
    append_jsonl(tmp_path / "base.jsonl", [*ANSWERING, *BASE[:4]])
    assert command(model, str(tmp_path / "base.jsonl"), tmp_path / "r", "--epochs", "1", *SILENT,
                   "--replay", "4", "--max-episode-tokens", "64") == 0
    record = read_jsonl(tmp_path / "r" / "metrics.jsonl")[-1]
    assert record["epoch"] == 1 and record["agent_moved"] > 0
    kept = read_jsonl(tmp_path / "r" / "train.jsonl")
    assert {"results" in r["task"]["spec"] for r in kept} == {True, False}


def test_a_simulator_on_a_model_of_its_own(model, tasks, tmp_path, no_figures, capsys, monkeypatch):
    """Another width and another seed: each adapter is its own model's, and a stopped run goes on to
    the bit."""
    noisy(monkeypatch, 0.4)
    other = chat_model(tmp_path / "other", hidden=64)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    two = ["--env-model", other, *SILENT]
    assert command(model, tasks, whole, "--epochs", "2", *two) == 0
    assert f"model    {model}, simulator {other}" in capsys.readouterr().out
    assert command(model, tasks, parts, "--epochs", "1", *two) == 0
    assert genenv.main(["--resume", "--out", str(parts), "--epochs", "2"]) == 0
    same_run(whole, parts)
    for name, width in (("agent", 32), ("env", 64)):
        weights = load_file(whole / "adapters" / name / "adapter_model.safetensors")
        assert {w.shape[1] for key, w in weights.items() if "q_proj.lora_A" in key} == {width}
    one_line(capsys, command(model, tasks, tmp_path / "r", "--env-model", "./none"), "does not exist")
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_model_that_writes_no_task_runs_to_the_end(model, tasks, tmp_path, capsys):
    """Base tasks fill the batch, every epoch warns, memory is told before and after."""
    assert command(model, tasks, tmp_path / "r", "--epochs", "2", *SILENT) == 0
    out, err = capsys.readouterr()
    assert not err
    for name in FILES + ["env.jsonl"]:
        assert (tmp_path / "r" / name).is_file(), name
    assert not (tmp_path / "r" / "figures/success_rate.png").exists()  # nothing was measured
    records = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    assert [r["epoch"] for r in records] == [0, 1, 2]
    for r in records:
        assert r["written"] == 4 == sum(r["invalid"].values()) and not r["distinct_tasks"]
        assert any("--max-task-tokens" in w or "no task" in w for w in r["warnings"]), r
    # 4 written and round(4 / 8) replayed make a batch of 4, all of it base tasks
    assert all(r["task"]["origin"] == "base" for r in read_jsonl(tmp_path / "r" / "train.jsonl"))
    before, after = out.index("memory estimate"), out.index("peak memory")
    assert out.count(screen.LEGEND) == 1 and out.index(screen.LEGEND) < out.index("\n     0 ")
    assert before < out.index("\n     0 ") < out.index("\n     2 ") < after
    peaks = json.loads((tmp_path / "r" / "memory.json").read_text())
    assert set(peaks) == {"simulator rollouts", "agent rollouts", "agent update (GRPO)",
                          "simulator update (RWR)", "validation"}
    assert all(f"{phase} {size / 1e9:.2f} GB" in out[after:] for phase, size in peaks.items())
    o = SimpleNamespace(**json.loads((tmp_path / "r" / "config.json").read_text()))
    assert (o.world, o.quant, o.alpha, o.k_min, o.lam) == ("tool_calls", "nf4", 0.5, 0.1, 1.0)
    assert set(memory.estimate(model_config(model), o)) == {*peaks, "always"}


def test_the_gate_stops_where_nothing_can_be_learned(model, tasks, tmp_path, no_figures, capsys):
    """One paragraph with the way out; followed, the run goes on from where it stood."""
    out = str(tmp_path / "r")
    one_line(capsys, command(model, tasks, out, "--epochs", "1", *SILENT[1:]), "warm-start")
    assert len(read_jsonl(tmp_path / "r" / "metrics.jsonl")) == 1
    one_line(capsys, genenv.main(["--resume", "--out", out]), "warm-start")  # it went on in silence
    assert len(read_jsonl(tmp_path / "r" / "metrics.jsonl")) == 1
    assert genenv.main(["--no-gate", "--resume", "--out", out]) == 0
    assert [r["epoch"] for r in read_jsonl(tmp_path / "r" / "metrics.jsonl")] == [0, 1]


# ---------------------------------------------------------------------------------------------
# models that cannot work: one line, exit code 2, no run folder


def without(*names):
    """A fault: these files are missing."""
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names]


def cut(name):
    """A fault: a file ends early, as after a broken download."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:2000])


def narrower(folder):
    """A fault: the weights are another model's."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))


FAULTS = {"no folder": (shutil.rmtree, "does not exist"),
          "no config": (without("config.json"), "cannot be used"),
          "damaged tokenizer": (cut("tokenizer.json"), "cannot be used"),
          "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "has no tokenizer"),
          "no chat template": (without("chat_template.jinja"), "no chat template"),
          "no weights": (without("model.safetensors"), "no file named"),
          "damaged weights": (cut("model.safetensors"), "cannot be used"),
          "other weights": (narrower, "is mismatched")}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_cannot_work_is_refused(fault, model, tasks, tmp_path, capsys):
    """Before anything is written."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    damage, word = FAULTS[fault]
    damage(folder)
    one_line(capsys, command(str(folder), tasks, tmp_path / "r"), word)
    assert not (tmp_path / "r").exists()


def test_too_little_memory_is_refused_with_the_options_to_lower(model, tasks, tmp_path, capsys,
                                                                monkeypatch):
    """The estimate is checked before the model is loaded."""
    monkeypatch.setattr(memory, "free_memory", lambda: 1e6)
    monkeypatch.setattr(Policy, "load", lambda *a, **k: pytest.fail("it was loaded"))
    one_line(capsys, command(model, tasks, tmp_path / "r"), "0.0 GB are free",
             "a lower --")
    assert not (tmp_path / "r").exists()
