"""The loop through the command line's entry point, and what it loses when it is stopped: nothing.

Usage: python -m pytest -q tests/test_checkpoint.py

The base model is the small one of conftest.py. `quiet_run` is an undisturbed run of three epochs.
"""
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import genenv
from conftest import MICRO
from helpers import one_line, same_run
from support import checkpoint
from data_pool import read_jsonl
from worlds import ladder

pytestmark = pytest.mark.usefixtures("small_ladder")


def run(out, model, epochs, *more):
    """genenv.main in this process -> exit code."""
    given = "--out", out, "--model", model, "--epochs", epochs, *more
    return genenv.main([*MICRO, *map(str, given)])


def resume(out, *more):
    return genenv.main(["--resume", "--out", str(out), *more])


def contents(folder):
    """{path: bytes} of all files below a folder."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def copy(quiet_run, tmp_path):
    """A copy of the quiet run, to disturb."""
    return Path(shutil.copytree(quiet_run, tmp_path / "copy"))


def test_both_players_were_trained_and_nothing_held_out_was(quiet_run):
    """Adapters have left zero, and no held-out task is in D_train."""
    from safetensors.torch import load_file
    for name in ("agent", "env"):
        weights = load_file(quiet_run / "adapters" / name / "adapter_model.safetensors")
        assert any(w.abs().max() > 0 for key, w in weights.items() if "lora_B" in key), name
    trained = {r["task"]["id"] for r in read_jsonl(quiet_run / "train.jsonl")}
    world = ladder.World(genenv.Options())
    held_out = world.validation_tasks() + world.validation_tasks("tuning")
    assert len(trained) > 20 and trained.isdisjoint(task.id for task in held_out)


# ---------------------------------------------------------------------------------------------
# other bits after a stop


def test_two_epochs_and_one_more_equal_three(quiet_run, tmp_path, small_ladder):
    """Metrics, pools, adapters."""
    assert run(tmp_path / "two", small_ladder, 2) == 0
    assert resume(tmp_path / "two", "--epochs", "3") == 0
    same_run(quiet_run, tmp_path / "two")


@pytest.mark.parametrize("number, name, call", [
    # epoch 0 has one step, epoch 1 two: in epoch 2, or after the last step of epoch 1
    (signal.SIGINT, "interact", 4), (signal.SIGTERM, "update_environment", 1)])
def test_a_signal_loses_nothing(quiet_run, tmp_path, small_ladder, number, name, call, monkeypatch):
    """A signal ends the run after the step, or the epoch, and resumed it equals the quiet one."""
    calls, real = [], getattr(genenv, name)

    def interrupted(*args):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return real(*args)

    monkeypatch.setattr(genenv, name, interrupted)
    assert run(tmp_path / "cut", small_ladder, 3) == 128 + number
    monkeypatch.setattr(genenv, name, real)
    assert len(read_jsonl(tmp_path / "cut" / "metrics.jsonl")) == 2
    assert resume(tmp_path / "cut") == 0
    same_run(quiet_run, tmp_path / "cut")


def in_child(command) -> int:
    """command() in a process of its own -> its exit code, -9 if it was killed."""
    pid = os.fork()
    if pid == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # it would only clutter the report
        code = 1  # of a traceback
        try:
            code = command()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("nth", [2, 3], ids=["first", "second"])
def test_killed_while_saving(nth, quiet_run, tmp_path, small_ladder):
    """SIGKILL before a checkpoint takes its name, after config.json has: the first, or another. All
    other files know more than the last checkpoint then."""
    out, real, calls = tmp_path / "r", os.replace, []

    def die(*args):
        calls.append(args)
        if len(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args)

    def child():
        os.replace = die
        return run(out, small_ladder, 3)

    assert in_child(child) == -signal.SIGKILL
    assert resume(out) == 0
    same_run(quiet_run, out)


def test_files_are_cut_back(quiet_run, copy):
    """Lines written after the checkpoint go, a torn one too."""
    line = (copy / "train.jsonl").read_bytes().splitlines(keepends=True)[0]
    for name in checkpoint.FILES:
        with open(copy / name, "ab") as file:
            file.write(2 * line + line[:10])
    assert resume(copy) == 0
    same_run(quiet_run, copy)


def test_a_disk_that_is_full_loses_nothing(quiet_run, tmp_path, small_ladder):
    """torch's own error would be a traceback; with room again the run goes on."""
    def child():
        size = (quiet_run / "checkpoint.pt").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
        return run(tmp_path / "r", small_ladder, 3)

    assert in_child(child) == 2
    assert resume(tmp_path / "r") == 0
    same_run(quiet_run, tmp_path / "r")


def test_a_second_signal_stops_at_once():
    """A run that hangs could not be stopped by Ctrl-C."""
    state = SimpleNamespace(stop=None)
    with pytest.raises(KeyboardInterrupt), checkpoint.stop_signals(state):
        os.kill(os.getpid(), signal.SIGTERM)
        assert state.stop == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)


# ---------------------------------------------------------------------------------------------
# runs that must not go on


def flipped(data):
    """One bit of a file, in the middle of a tensor, is another one."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1:]


@pytest.mark.parametrize("name, damage", [
    ("train.jsonl", lambda data: data[:data.index(b"\n") + 1]),  # copied in part
    ("train.jsonl", lambda data: data.replace(b"\n", b"\r\n")),  # opened in an editor
    ("env.jsonl", None), ("checkpoint.pt", None),  # not copied
    ("checkpoint.pt", flipped)])
def test_a_damaged_folder_is_refused_and_left_as_it_is(name, damage, copy, capsys):
    """The run would go on from other numbers, or begin again over what is there."""
    path = copy / name
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    before = contents(copy)
    one_line(capsys, resume(copy, "--epochs", "4"), name)
    assert contents(copy) == before


def test_hashes_are_of_the_projects_own_files(tmp_path, monkeypatch):
    """From another directory an edited curriculum.py would not be seen."""
    here = checkpoint.hashes(genenv.Options())
    monkeypatch.chdir(tmp_path)
    assert checkpoint.hashes(genenv.Options()) == here
    assert here.keys() == {"curriculum.py", "worlds/ladder.py"}


def test_a_run_folder_is_one_programs(copy, capsys):
    """Two programs in one folder would mix their files; the lock goes with its holder."""
    with checkpoint.lock_folder(copy):
        before = contents(copy)
        one_line(capsys, resume(copy, "--epochs", "4"), "another program", copy)
        assert contents(copy) == before
    checkpoint.lock_folder(copy).close()


@pytest.mark.parametrize("flag, value", [
    ("--alpha", "0.4"), ("--epochs", "2")])
def test_an_option_that_matters_cannot_change(flag, value, copy, capsys):
    before = contents(copy)
    one_line(capsys, resume(copy, flag, value), flag)
    assert contents(copy) == before


def test_another_file_of_tasks_or_model_is_refused(tmp_path, small_ladder, capsys):
    """The same path with other contents would be another run from there on."""
    model, teacher = tmp_path / "model", tmp_path / "teacher.jsonl"
    shutil.copytree(small_ladder, model)
    teacher.write_text('{"text": "1 s1 inc"}\n{"text": "2 s1 inc"}\n')
    assert run(tmp_path / "r", model, 0, "--variant", "teacher", "--teacher-tasks", teacher) == 0
    whole = teacher.read_bytes()
    teacher.write_text('{"text": "1 s1 inc"}\n{"text": "3 s1 inc"}\n')
    one_line(capsys, resume(tmp_path / "r", "--epochs", "1"), teacher)
    teacher.write_bytes(whole)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    one_line(capsys, resume(tmp_path / "r", "--epochs", "1"), model)


def test_the_day_of_the_templates_stays(copy):
    """A chat template may name the day: prompts of a run that goes on must not change."""
    config = copy / "config.json"
    text = config.read_text()
    day = time.strftime("%Y-%m-%d")
    assert f'"date": "{day}"' in text
    config.write_text(text.replace(day, "2026-01-02"))
    # memory options may change: an out-of-memory message advises it
    assert resume(copy, "--epochs", "4", "--token-budget", "999", "--max-rows", "16") == 0
    assert '"date": "2026-01-02"' in config.read_text()
