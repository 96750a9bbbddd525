"""The loop as a command: a run that is stopped loses nothing, and a bad resume is refused.

Usage: python -m pytest -q tests/test_checkpoint.py

The base model is the small one of conftest.py. `quiet_run` is an undisturbed run of three epochs.
"""
import inspect
import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import genenv
from conftest import MICRO
from helpers import one_line, same_run, user_error
from data_pool import read_jsonl
from errors import Stopped
from model.loading import check_base, note_base, weights_of
from support import checkpoint, origin, start
from worlds import ladder, open_policy

pytestmark = pytest.mark.usefixtures("small_ladder")


def run(out, model, epochs, *more):
    """Call genenv.main in this process; return its exit code."""
    argv = "--out", out, "--model", model, "--epochs", epochs, *more
    return genenv.main([*MICRO, *map(str, argv)])


def resume(out, *more):
    """Resume a run in this process; return its exit code."""
    return genenv.main(["--resume", "--out", str(out), *more])


def contents(folder):
    """Return {path: bytes} of all files below a folder."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def copy(quiet_run, tmp_path):
    """Copy the quiet run, so that a test can change it."""
    return Path(shutil.copytree(quiet_run, tmp_path / "copy"))


# ---------------------------------------------------------------------------------------------
# runs that are stopped and resumed


def test_two_epochs_and_one_more_equal_three(quiet_run, tmp_path, small_ladder):
    """Otherwise metrics, pools or adapters would depend on whether a run was resumed."""
    assert run(tmp_path / "two", small_ladder, 2) == 0
    assert resume(tmp_path / "two", "--epochs", "3") == 0
    same_run(quiet_run, tmp_path / "two")


@pytest.mark.parametrize("number, name, call", [
    # epoch 0 has one step, the others two: stop in epoch 0, in epoch 2, after the steps of epoch 1
    (signal.SIGINT, "interact", 1), (signal.SIGINT, "interact", 4),
    (signal.SIGTERM, "update_environment", 1)])
def test_a_signal_loses_nothing(quiet_run, tmp_path, small_ladder, number, name, call, monkeypatch):
    """Otherwise a signal would not end a run after the current step or epoch, or the resumed run
    would differ."""
    calls, real = [], getattr(genenv, name)

    def interrupted(*args):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return real(*args)

    monkeypatch.setattr(genenv, name, interrupted)
    assert run(tmp_path / "cut", small_ladder, 3) == 128 + number
    monkeypatch.setattr(genenv, name, real)
    assert len(calls) == call  # the run ended after this step, or this epoch
    assert resume(tmp_path / "cut") == 0
    same_run(quiet_run, tmp_path / "cut")


def test_a_kill_loses_only_what_came_after_an_old_checkpoint(quiet_run, tmp_path, small_ladder,
                                                            monkeypatch):
    """Otherwise a kill in the middle of an epoch of a 7B run would cost a quarter of an hour, or
    the result of a run would depend on how often it was saved."""
    monkeypatch.setattr(checkpoint, "OLD", 0)
    real = genenv.update_environment
    monkeypatch.setattr(genenv, "update_environment", lambda *args: os.kill(os.getpid(), 9))
    assert in_child(lambda: run(tmp_path / "cut", small_ladder, 3)) == -signal.SIGKILL
    assert checkpoint.read(tmp_path / "cut" / "checkpoint.pt")["state"]["step"] == 2
    monkeypatch.setattr(genenv, "update_environment", real)
    assert resume(tmp_path / "cut") == 0
    same_run(quiet_run, tmp_path / "cut")


def in_child(command) -> int:
    """Run command() in a separate process; return its exit code, -9 if it was killed."""
    pid = os.fork()
    if pid == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # keep the test report clean
        code = 1  # for a traceback
        try:
            code = command()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("nth", [2, 3])
def test_killed_while_saving(nth, quiet_run, tmp_path, small_ladder):
    """Otherwise a kill just before a checkpoint is renamed, when the other files are ahead of the
    last checkpoint, would cost the run, or the resumed run would write the same lines again."""
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


def test_a_disk_that_is_full_loses_nothing(quiet_run, tmp_path, small_ladder):
    """Otherwise the user would see torch's traceback, half a checkpoint would keep the disk full,
    or the run could not be resumed once there is room again."""
    out = tmp_path / "r"

    def child():
        sys.stderr = open(tmp_path / "stderr", "w", buffering=1)
        size = (quiet_run / "checkpoint.pt").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
        return run(out, small_ladder, 3)

    assert in_child(child) == 2
    assert not list(out.glob("tmp-*"))
    [line] = (tmp_path / "stderr").read_text().splitlines()
    assert "--resume" in line
    assert resume(out) == 0
    same_run(quiet_run, out)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGALRM])
def test_a_second_signal_or_an_alarm_stops_at_once(second, monkeypatch):
    """Otherwise a run that hangs, or validates for minutes, could not be stopped."""
    monkeypatch.setattr(checkpoint, "PATIENCE", 1)
    state = SimpleNamespace(stop=None, folder="runs/r", state=SimpleNamespace(epoch=1))
    with pytest.raises(Stopped, match="--resume"), checkpoint.stop_signals(state):
        os.kill(os.getpid(), signal.SIGTERM)
        assert state.stop == signal.SIGTERM
        if second == signal.SIGINT:
            os.kill(os.getpid(), second)
        time.sleep(5)
        pytest.fail("it was not stopped")


# ---------------------------------------------------------------------------------------------
# runs that must not be resumed


def flipped(data):
    """Return the bytes of a file with one bit in the middle flipped."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1:]


@pytest.mark.parametrize("name, damage", [
    ("train.jsonl", lambda data: data[:data.index(b"\n") + 1]),  # copied in part
    ("env.jsonl", flipped), ("metrics.jsonl", flipped),  # as if from another run
    ("checkpoint.pt", None),  # not copied
    ("checkpoint.pt", flipped)])
def test_a_damaged_folder_is_refused_and_left_as_it_is(name, damage, copy, capsys):
    """Otherwise a run would continue from wrong numbers, such as another seed's pools, or begin
    again and overwrite the folder."""
    path = copy / name
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    before = contents(copy)
    one_line(capsys, resume(copy, "--epochs", "4"), name)
    assert contents(copy) == before


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Copy the files that are hashed, so that a test can edit them; return the copy's folder."""
    for name in (*origin.METHOD, *origin.world_files("ladder")):
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(origin.PROJECT / name, file)
    monkeypatch.setattr(origin, "PROJECT", tmp_path / "project")
    return tmp_path / "project"


@pytest.mark.parametrize("name", ["grpo.py", "rwr.py", "worlds/tiny_model.py"])
def test_an_edited_method_is_another_setting(name, project):
    """Otherwise `compare` would average runs of two methods as if they were one setting."""
    o, file = genenv.Options(), project / name
    first = origin.code_versions(o)
    file.write_text(file.read_text() + "EDITED = True\n")
    edited = origin.code_versions(o)
    assert {key for key in edited if edited[key] != first[key]} == {name}
    # a run that was resumed after the edit reports both versions
    resumed = origin.code_versions(genenv.Options(code=first))
    assert resumed[name] == f"{first[name]}, then {edited[name]}"


def test_of_the_curriculum_only_what_an_option_names_is_a_setting(monkeypatch):
    """Otherwise an edit to a schedule that is not used would set later runs apart from earlier
    ones, or an edit to the threshold of success would not."""
    first, getsource = origin.code_versions(genenv.Options()), inspect.getsource
    for text, is_setting in ("c.alpha_end", False), ("SUCCESS = 0.5", True):
        monkeypatch.setattr(inspect, "getsource", lambda of: getsource(of).replace(text, "1"))
        assert (origin.code_versions(genenv.Options()) != first) == is_setting


def test_edited_code_is_named_and_the_run_continues(copy, project, capsys):
    """Otherwise a run would silently mix two methods, or could not continue after a bug fix."""
    (project / "grpo.py").write_text("CLIP = 0.4")
    assert resume(copy, "--epochs", "4") == 0
    assert "edited since this run began: grpo.py" in capsys.readouterr().out


def test_an_edited_config_is_refused(copy, capsys):
    """Otherwise a run would continue with options that it did not begin with."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "alpha": 0.4}))
    before = contents(copy)
    one_line(capsys, resume(copy, "--epochs", "4"), "alpha")
    assert contents(copy) == before


def test_another_device_is_refused_and_a_longer_schedule_is_told(copy, capsys):
    """Otherwise a run would silently continue with other rounding, or on another schedule."""
    state = checkpoint.read(copy / "checkpoint.pt")
    then = state["origin"]
    origin.check_origin(then, {**then, "epochs": 9}, "linear")
    assert "--epochs was 3 and is 9" in capsys.readouterr().out
    then["fixed"]["the kind of device"] = "cuda"
    checkpoint.write(copy / "checkpoint.pt", state)
    one_line(capsys, resume(copy, "--epochs", "4"), "is cpu")


def test_each_player_saves_its_own_adapter(tmp_path, small_ladder, monkeypatch):
    """Otherwise, with --env-model and a world that gives the agent's policy both adapters, an
    untrained simulator would be saved over the trained one."""
    def load_policy(self):
        return open_policy(self.o.model, self.o, ("agent", "env"))

    monkeypatch.setattr(ladder.World, "load_policy", load_policy)
    assert run(tmp_path / "r", small_ladder, 1, "--env-model", small_ladder) == 0
    for name in ("agent", "env"):
        weights = load_file(tmp_path / "r" / "adapters" / name / "adapter_model.safetensors")
        assert any(w.any() for key, w in weights.items() if "lora_B" in key), name


def test_a_model_is_recognised_by_every_tensor(tmp_path):
    """Otherwise a model with some changed layers would pass as the one that a run or an adapter
    started from, or the same weights in other files would not."""
    weights = {name: torch.randn(300, 100) for name in ("embed", "mlp", "norm")}
    model, shards, agent = str(tmp_path), tmp_path / "shards", tmp_path / "agent"
    save_file(weights, tmp_path / "model.safetensors")
    whole = weights_of(model)
    agent.mkdir()
    note_base(tmp_path, ["agent"], model)
    # the same weights in other files and another order
    shards.mkdir()
    for name in ("norm", "mlp", "embed"):
        save_file({name: weights[name]}, shards / f"model-{name}.safetensors")
    assert weights_of(str(shards)) == whole
    check_base(agent, str(shards))
    weights["mlp"] = 1.01 * weights["mlp"]
    save_file(weights, tmp_path / "model.safetensors")
    assert weights_of(model) != whole
    user_error("trained on", check_base, agent, model)


def test_a_run_folder_is_one_programs(copy, capsys, monkeypatch):
    """Otherwise two programs would mix their files in one folder, or another program would be
    blamed for a disk without locks."""
    with checkpoint.lock_folder(copy):
        before = contents(copy)
        one_line(capsys, resume(copy, "--epochs", "4"), "another program", copy)
        assert contents(copy) == before
    checkpoint.lock_folder(copy).close()  # closing the file releases the lock

    def no_locks(*_):
        raise OSError("not supported")

    monkeypatch.setattr(checkpoint.fcntl, "flock", no_locks)
    user_error("cannot lock files", checkpoint.lock_folder, copy)


@pytest.mark.parametrize("flag, value", [("--alpha", "0.4"), ("--epochs", "2")])
def test_an_option_that_matters_cannot_change(flag, value, copy, capsys):
    """Otherwise the second half of a run would have other settings than the first."""
    one_line(capsys, resume(copy, flag, value), flag)


def test_another_file_of_tasks_or_model_is_refused(tmp_path, small_ladder, capsys):
    """Otherwise a file with the same path and other contents would turn it into another run."""
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


def test_the_day_and_the_time_of_a_run_stay(copy, monkeypatch):
    """Otherwise prompts would change overnight, because a chat template may name the day, or a
    resumed run would seem cheaper than one that was never stopped."""
    state = checkpoint.read(copy / "checkpoint.pt")
    state["state"]["cpu_seconds"] = 2000.0
    checkpoint.write(copy / "checkpoint.pt", state)
    config, day = copy / "config.json", time.strftime("%Y-%m-%d")
    monkeypatch.setattr(start.time, "strftime", lambda form: "2026-01-02")
    # memory options may change, because an out-of-memory message advises changing them
    assert resume(copy, "--epochs", "4", "--token-budget", "999", "--max-rows", "16") == 0
    assert f'"date": "{day}"' in config.read_text()
    assert 2000 < read_jsonl(copy / "metrics.jsonl")[-1]["cpu_seconds"] < 2900
