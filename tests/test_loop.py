"""The loop on a micro version of the embedded world, through the command line's entry point.

    python -m pytest -q tests/test_loop.py

The base model is the small one of conftest.py: it knows the format but few tools, which is all
that these tests need. Figures are drawn for one run.
"""
import os
import random
import signal
import sys
import time
from types import SimpleNamespace

import pytest

import genenv
from support import checkpoint
from conftest import MICRO
from helpers import same_run
from support.files import read_jsonl
from data_pool import EnvRecord, Trace
from worlds import ladder

def run(out, small_ladder, *more):
    """genenv.main in this process -> exit code."""
    return genenv.main(["--out", str(out), "--base-model", small_ladder, *MICRO, *more])


def test_both_policies_were_trained_and_nothing_held_out_was(quiet_run, small_ladder):
    """Adapters have left zero, and no validation task is in D_train."""
    from safetensors.torch import load_file
    for name in ("agent", "env"):
        weights = load_file(quiet_run / "adapters" / name / "adapter_model.safetensors")
        assert any(w.abs().max() > 0 for k, w in weights.items() if "lora_B" in k), name
    trained = {r["task"]["id"] for r in read_jsonl(quiet_run / "train.jsonl")}
    held_out = {t.id for s in ("validation", "tuning") for t in ladder.validation_tasks(None, s)}
    assert trained and not trained & held_out


def test_samples_begin_with_new_tasks_near_alpha():
    """At most half of what is shown; the rest is spread over the epoch, and marked as what it is."""
    from support import metrics as measure
    task = lambda i, t: SimpleNamespace(origin="env", epoch=t, text=str(i), id=i, seed_task="")
    two = [Trace("a", 0.0, True, False, 1), Trace("b", 1.0, True, False, 1)]
    attempts = [(task(i, 3), 1.0, two[1:]) for i in range(8)] + \
        [(task(i, 1 if i == 8 else 3), 0.5, two) for i in range(8, 15)]
    attempts += [(task(0, 3), 0.5, two)] * 4  # tried again: it was not in the band when it was new
    run = SimpleNamespace(
        state=SimpleNamespace(attempts=attempts, epoch=3, refused=[("s", "text", "malformed")], records=[]),
        world=SimpleNamespace(gold=lambda task: ""), o=SimpleNamespace(k_min=0.26, p_hat_unit="seed"),
        train_pool=SimpleNamespace(tasks={}))
    *shown, refused = measure.samples(run, 0.5)
    assert len({r["task"] for r in shown}) == 8
    first = next(r for r in shown if r["task"] == "0")
    assert first["p_hat"] == 1.0 and not first["in_band"]
    assert [r["p_hat"] for r in shown[:5]] == [0.5] * 4 + [1.0] and len(shown) == 8
    assert all(r["in_band"] == (r["p_hat"] == 0.5 and r["written_in"] == 3) for r in shown)
    assert [e["text"] for e in shown[0]["traces"]] == ["b", "a"] and refused["reason"] == "malformed"
    # by the unit that the filter takes; of a single task, by the p_hat that is shown with it
    run.state.records = [EnvRecord([], [], "", i, [], "", 0, 1.0, 0.5, 1.0, 3) for i in range(8)]
    assert {r["in_band"] for r in measure.samples(run, 0.5)[:-1] if r["written_in"] == 3} == {True}
    run.o.p_hat_unit = "task"
    assert all(r["in_band"] == (r["p_hat"] == 0.5) for r in measure.samples(run, 0.5)[:5])


def test_new_tasks_count_once():
    """Neither base tasks nor replays count, and of a new task that is tried again the first p_hat."""
    from support import metrics as measure
    task = lambda i, origin, t: SimpleNamespace(origin=origin, epoch=t, id=i)
    attempts = [(task(i, "env", 3), float(i < 50), []) for i in range(100)]
    attempts += [(task(0, "env", 3), 0.0, []), (task(200, "base", 0), 0.0, []),
                 (task(201, "env", 2), 0.0, [])] * 9
    new = measure.first_attempts(SimpleNamespace(attempts=attempts, epoch=3))
    assert len(new) == 100 and measure.mean(p for _, p, _ in new) == 0.5


def test_two_epochs_and_one_more_equal_three(quiet_run, tmp_path, small_ladder):
    """Resuming continues to the bit: metrics, pools, adapters."""
    assert run(tmp_path / "two", small_ladder, "--epochs", "2") == 0
    assert genenv.main(["--resume", "--out", str(tmp_path / "two"), "--epochs", "3"]) == 0
    same_run(quiet_run, tmp_path / "two")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_at_the_next_step_and_loses_nothing(quiet_run, tmp_path, small_ladder, number,
                                                         monkeypatch):
    """A signal in mid-epoch ends the run after the step, and the resumed run equals the quiet one."""
    steps, real = [], genenv.interact

    def interact(run, tasks):
        steps.append(1)
        if len(steps) == 4:  # epoch 0 has one step, epoch 1 two: this is in epoch 2
            os.kill(os.getpid(), number)
        return real(run, tasks)

    monkeypatch.setattr(genenv, "interact", interact)
    assert run(tmp_path / "cut", small_ladder, "--epochs", "3") == 128 + number
    monkeypatch.setattr(genenv, "interact", real)
    assert genenv.main(["--resume", "--out", str(tmp_path / "cut")]) == 0
    same_run(quiet_run, tmp_path / "cut")


def killed_run(out, argv, rng, kills: int) -> int:
    """Run `argv` in a child that is killed at a random moment, resume, and so on until it ends or
    `kills` is used up; then let it end. Returns how often it was killed."""
    checkpoints = []
    for n in range(kills + 1):
        pid = os.fork()
        if pid == 0:  # the child is the run; its output would only clutter the report
            sys.stdout = sys.stderr = open(os.devnull, "w")
            resume = ["--resume"] if (out / "config.json").exists() else []
            os._exit(genenv.main(argv + resume))
        deadline = time.time() + (rng.uniform(0.02, 0.5) if n < kills else 300)
        while time.time() < deadline:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return n  # it has ended by itself
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        checkpoints.append(max([p.name for p in checkpoint._checkpoints(out)], default=""))
        assert checkpoints == sorted(checkpoints), "a kill lost a finished epoch"
    raise AssertionError("the run did not end")


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path, small_ladder, quiet_run):
    """SIGKILL whenever it likes: every finished epoch is kept, and the end is the same."""
    rng, kills, runs = random.Random(7), 0, 0
    while kills < 5:
        out = tmp_path / f"killed-{runs}"
        argv = ["--out", str(out), "--base-model", small_ladder, *MICRO, "--epochs", "3"]
        kills += killed_run(out, argv, rng, 5 - kills)
        runs += 1
        same_run(quiet_run, out)


def test_simulator_without_a_single_valid_task_ends_cleanly(tmp_path, small_ladder, capsys,
                                                            monkeypatch):
    """One line that says so, exit code 2, and the run folder keeps what it has."""
    def refuse(text, seed, epoch):
        raise ladder.InvalidTask("malformed")
    monkeypatch.setattr(ladder, "parse_task", refuse)
    assert run(tmp_path / "mute", small_ladder, "--epochs", "9") == 2
    assert "no valid task" in capsys.readouterr().err
    records = read_jsonl(tmp_path / "mute" / "metrics.jsonl")
    assert [r["epoch"] for r in records] == [0, 1, 2]  # it gives up after three mute epochs
    assert records[0]["invalid"] == {"malformed": 16}
    assert (tmp_path / "mute" / "adapters" / "agent" / "adapter_config.json").is_file()
