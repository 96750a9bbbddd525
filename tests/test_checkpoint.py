"""What a run loses when the disk is full, a file is torn or the process dies while saving: nothing.

    python -m pytest -q tests/test_checkpoint.py
"""
import dataclasses
import errno
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

import genenv
from conftest import MICRO
from helpers import one_line, same_run, user_error
from support.files import UserError, append_jsonl, read_jsonl
from support import checkpoint, options
from support.run import EpochState
from support import metrics as measure

pytestmark = pytest.mark.usefixtures("small_ladder")
POOLS = ("metrics.jsonl", "samples.jsonl", "train.jsonl", "env.jsonl")


def run(out, small_ladder, *more):
    """genenv.main in this process -> exit code."""
    return genenv.main(["--out", str(out), "--base-model", small_ladder, *MICRO, "--epochs", "3",
                        *more])


@pytest.fixture
def copy(quiet_run, tmp_path):
    """A copy of it, without its report, to disturb."""
    return Path(shutil.copytree(quiet_run, tmp_path / "copy",
                                ignore=shutil.ignore_patterns("figures", "report.html")))


def names(out):
    """What is in the checkpoints folder."""
    return sorted(p.name for p in (out / "checkpoints").iterdir())


def contents(folder):
    """{path: bytes} of all files below a folder."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---------------------------------------------------------------------------------------------
# what is there


def test_two_checkpoints_are_kept_and_hold_what_they_should(quiet_run):
    """The last and the one before; adapters, optimisers, generators, the account of the epoch."""
    assert names(quiet_run) == ["e0003-s000.pt", "e0004-s000.pt"]
    for path in checkpoint._checkpoints(quiet_run):
        state = checkpoint._read(path)
        assert set(state["adapters"]) == {"agent", "env"} and len(state["generators"]) == 2
        assert all(o["state"] for o in state["optimizers"]) and state["device"] == "cpu"
        assert set(state["sizes"]) == set(POOLS)
    assert all(state["sizes"][name] == (quiet_run / name).stat().st_size for name in POOLS)


# ---------------------------------------------------------------------------------------------
# torn and surplus lines


def test_surplus_lines_are_set_aside_and_reported(quiet_run, copy, capsys):
    """Whole records written after the checkpoint, and a torn one behind them: all are kept."""
    line = (copy / "train.jsonl").read_bytes().splitlines(keepends=True)[0]
    with open(copy / "train.jsonl", "ab") as file:
        file.write(2 * line + line[:10])
    assert genenv.main(["--resume", "--out", str(copy)]) == 0
    out = capsys.readouterr().out
    assert "last line was torn" in out and "2 lines written after the checkpoint" in out
    assert (copy / "train.jsonl.torn").read_bytes() == line[:10] + b"\n" + 2 * line
    same_run(quiet_run, copy)


def test_killed_before_the_first_checkpoint(quiet_run, tmp_path, small_ladder, capsys):
    """Only config.json and some lines: the run starts over and sets those lines aside."""
    out = tmp_path / "r"
    out.mkdir()
    shutil.copy(quiet_run / "config.json", out)
    shutil.copy(quiet_run / "metrics.jsonl", out)
    assert genenv.main(["--resume", "--out", str(out), "--base-model", small_ladder]) == 0
    assert "no checkpoint yet" in capsys.readouterr().out
    assert (out / "metrics.jsonl.torn").read_bytes() == (quiet_run / "metrics.jsonl").read_bytes()
    same_run(quiet_run, out)


def test_the_checkpoint_before_takes_over(quiet_run, copy, capsys):
    """The newest is damaged: the message names it, and without it the run goes on from the one
    before, to the same end."""
    newest = copy / "checkpoints" / "e0004-s000.pt"
    whole = newest.read_bytes()
    for damaged in (whole[:-100], b"", whole[:5000] + bytes([whole[5000] ^ 16]) + whole[5001:]):
        newest.write_bytes(damaged)
        before = contents(copy)
        one_line(capsys, genenv.main(["--resume", "--out", str(copy)]),
                 f"checkpoint {newest} is damaged",
                 "remove it to go on from the checkpoint before it")
        assert contents(copy) == before
    newest.unlink()
    assert genenv.main(["--resume", "--out", str(copy)]) == 0
    said = capsys.readouterr().out
    assert "at epoch 3, step 0" in said and "to the bit" not in said
    assert len(read_jsonl(copy / "metrics.jsonl.torn")) == 1
    same_run(quiet_run, copy)


def test_the_only_checkpoint_is_damaged(copy, capsys):
    """Then the message does not promise another."""
    (copy / "checkpoints" / "e0003-s000.pt").unlink()
    (copy / "checkpoints" / "e0004-s000.pt").write_bytes(b"junk")
    one_line(capsys, genenv.main(["--resume", "--out", str(copy)]), "no checkpoint before it")


# ---------------------------------------------------------------------------------------------
# a run that is complete


def test_a_finished_run_is_complete(copy, capsys):
    """--resume says so and touches nothing; epochs that are done cannot be undone."""
    (copy / "report.html").touch()  # which the small world of the tests does not write
    before = contents(copy)
    o = SimpleNamespace(out=str(copy), epochs=3)
    (copy / "adapters").rename(copy / "gone")  # python -m watch.report writes the page alone
    assert not checkpoint.is_complete(o)
    (copy / "gone").rename(copy / "adapters")
    assert genenv.main(["--resume", "--out", str(copy)]) == 0
    assert "is complete: 3 epochs are done" in capsys.readouterr().out
    one_line(capsys, genenv.main(["--resume", "--out", str(copy), "--epochs", "2"]),
             "--epochs is 2", "epoch 3")
    assert contents(copy) == before


def test_a_run_killed_before_its_report_is_finished(quiet_run, copy, capsys):
    """A report that is older than the last checkpoint is not the last thing a run writes."""
    (copy / "report.html").touch()
    os.utime(copy / "report.html", (0, 0))
    shutil.rmtree(copy / "adapters")
    assert genenv.main(["--resume", "--out", str(copy)]) == 0
    assert "resumed" in capsys.readouterr().out
    same_run(quiet_run, copy)


def test_ctrl_c_advises_to_resume_only_what_there_is(monkeypatch, capsys, tmp_path):
    """Before the run has begun there is nothing to go on with; at a second signal there is."""
    def pressed(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr(genenv, "train", pressed)
    assert genenv.main(["--out", str(tmp_path / "r")]) == 130
    assert capsys.readouterr().err == "stopped at once\n"

    def twice(o):
        with checkpoint.stop_signals(SimpleNamespace(stop=None)):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(genenv, "train", twice)
    assert genenv.main(["--out", str(tmp_path / "r")]) == 130
    assert "--resume" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------
# the command line of a run that goes on


def begun(folder, *argv):
    """config.json of a run of these options; returns them."""
    o = options.parse_options([*argv, "--out", str(folder)])
    folder.mkdir()
    checkpoint.write_config(folder, o)
    return o


def test_the_very_command_goes_on(tmp_path, capsys):
    """A preset's options of the world were compared with all that the world has."""
    command = ["--preset", "135m-cpu", "--model", "m", "--base-tasks", "b", "--base-limit", "3"]
    o = begun(tmp_path / "r", *command)
    command += ["--resume", "--out", str(tmp_path / "r")]
    assert dataclasses.replace(options.parse_options(command), resume=False) == o
    assert capsys.readouterr().out == ""
    user_error("--base-limit was 3 .* cannot become 4", options.parse_options,
               [*command, "--base-limit", "4"])


def test_a_preset_that_may_replace_another_is_taken(tmp_path, capsys):
    """It was announced, and then the old values were used."""
    o = begun(tmp_path / "r", "--preset", "7b-24gb", "--model", "m", "--base-tasks", "b")
    now = options.parse_options(["--preset", "7b-80gb", "--model", "m", "--resume", "--out",
                                str(tmp_path / "r")])
    assert now == dataclasses.replace(o, resume=True, max_rows=576, token_budget=32768)
    assert "--max-rows was 144 in this run and is 576 now" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------
# the disk


def fail_at(monkeypatch, owner, name, nth, number=errno.ENOSPC):
    """The nth call of owner.name raises OSError(number); those before and after do their work."""
    real, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) == nth:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)
    monkeypatch.setattr(owner, name, call)
    return calls


# two syncs of config.json; then in every epoch metrics, samples, train and env, and two of the
# checkpoint
FAULTS = {
    "config.json": (os, "fsync", 1, errno.ENOSPC), "serialising": (torch, "save", 3, errno.ENOSPC),
    "a pool": (os, "fsync", 12, errno.EIO), "a checkpoint": (os, "fsync", 13, errno.ENOSPC),
    "moving it into place": (os, "replace", 4, errno.EROFS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_failing_write_loses_nothing(name, quiet_run, tmp_path, small_ladder, capsys, monkeypatch):
    """One line and exit code 2; the checkpoint before is whole; the resumed run ends the same."""
    out, (owner, call, nth, number) = tmp_path / "r", FAULTS[name]
    calls = fail_at(monkeypatch, owner, call, nth, number)
    code = run(out, small_ladder)
    monkeypatch.undo()
    assert len(calls) >= nth
    one_line(capsys, code, os.strerror(number), "--resume")
    assert out.exists() == (name != "config.json")  # without it there is no run at all
    left = names(out) if (out / "checkpoints").exists() else []
    assert not any(n.startswith("tmp-") for n in left), left
    for folder in left:  # whatever is there can be read
        checkpoint._read(out / "checkpoints" / folder)
    assert run(out, small_ladder, *(["--resume"] if out.exists() else [])) == 0
    same_run(quiet_run, out)


def test_a_disk_that_is_full_when_the_adapters_are_written(capsys, monkeypatch):
    """safetensors has an exception of its own for it."""
    def full(o):
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(genenv, "train", full)
    one_line(capsys, genenv.main([]), "No space left on device", "--resume")


def test_half_written_append_is_taken_back(tmp_path, monkeypatch):
    """A disk that takes a part of the records: the file ends where it ended before."""
    path = tmp_path / "pool.jsonl"
    append_jsonl(path, [{"a": 1}])
    fail_at(monkeypatch, os, "fsync", 1)
    user_error("No space left", append_jsonl, path, [{"a": 2}] * 100)
    assert path.read_bytes() == b'{"a": 1}\n'


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kilobytes", [1, 100])
def test_a_real_limit_on_file_size(kilobytes, quiet_run, tmp_path, small_ladder):
    """The kernel refuses to write on: the same as a full disk, without a patch in between."""
    out = tmp_path / "r"
    pid = os.fork()
    if pid == 0:
        sys.stdout = open(os.devnull, "w")
        sys.stderr = open(tmp_path / "err", "w")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error in place of a signal
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * kilobytes,) * 2)
        code = 3
        try:
            code = run(out, small_ladder)
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = (tmp_path / "err").read_text()
    assert code == 2 and text.count("\n") == 1 and text.startswith("genenv: "), (code, text)
    assert "File too large" in text, text  # of a full disk torch itself says "unexpected pos"
    assert out.exists() == (kilobytes > 1)  # config.json has more: then there is no run at all
    assert run(out, small_ladder, *(["--resume"] if out.exists() else [])) == 0
    same_run(quiet_run, out)


# ---------------------------------------------------------------------------------------------
# death while saving


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("owner, call, nth, before", [
    (os, "replace", 3, True), (os, "replace", 3, False), (Path, "unlink", 1, True),
    (os, "fsync", 12, True)],
    ids=["before renaming", "after renaming", "before cleaning", "between the pools"])
def test_killed_inside_a_save(owner, call, nth, before, quiet_run, tmp_path, small_ladder):
    """SIGKILL at one exact call: the run resumes and ends the same."""
    out, real, calls = tmp_path / "r", getattr(owner, call), []
    pid = os.fork()
    if pid == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")

        def die(*args, **kwargs):
            calls.append(1)
            if len(calls) == nth and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if len(calls) == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        setattr(owner, call, die)
        os._exit(run(out, small_ladder))
    os.waitpid(pid, 0)
    assert genenv.main(["--resume", "--out", str(out), "--base-model", small_ladder]) == 0
    assert not any(n.startswith("tmp-") for n in names(out)) and len(names(out)) == 2
    same_run(quiet_run, out)


def test_the_newest_checkpoint_is_known_by_its_numbers(tmp_path):
    """As text s1000 comes before s999."""
    (tmp_path / "checkpoints").mkdir()
    for name in ("e0002-s999.pt", "e0002-s1000.pt", "e0001-s003.pt"):
        (tmp_path / "checkpoints" / name).touch()
    assert [p.name for p in checkpoint._checkpoints(tmp_path)] == [
        "e0001-s003.pt", "e0002-s999.pt", "e0002-s1000.pt"]


# ---------------------------------------------------------------------------------------------
# two programs, one folder

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def background(tmp_path, name, command):
    """Run `command()` in a process of its own, its output in tmp_path/name; returns its id."""
    pid = os.fork()
    if pid == 0:
        sys.stdout = sys.stderr = open(tmp_path / name, "w", buffering=1)
        os._exit(command())
    return pid


def wait_for(path, pid):
    """Until a file is there; fails where the process ends before."""
    while not path.exists():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended"
        time.sleep(0.002)


@forks
def test_a_run_folder_is_one_programs_until_it_dies(quiet_run, tmp_path, small_ladder, capsys):
    """A second run and a resume are refused in one line and write nothing, while the first lives;
    SIGKILL frees the folder, and the run goes on to the same end."""
    out = tmp_path / "r"
    first = background(tmp_path, "said", lambda: run(out, small_ladder))
    wait_for(out / "config.json", first)
    os.kill(first, signal.SIGSTOP)  # alive, but it writes no more
    before = contents(out)
    one_line(capsys, run(out, small_ladder), out, "holds a run already")
    one_line(capsys, genenv.main(["--resume", "--out", str(out)]),
             out, "another program is at work")
    assert contents(out) == before
    os.kill(first, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == -signal.SIGKILL
    assert genenv.main(["--resume", "--out", str(out), "--base-model", small_ladder]) == 0
    same_run(quiet_run, out)


@forks
@pytest.mark.parametrize("resume", [False, True], ids=["two runs", "two resumes"])
def test_started_at_once_one_of_two_gets_the_folder(resume, quiet_run, tmp_path, small_ladder,
                                                    monkeypatch):
    """Both have found the folder free before either takes it."""
    out, here = tmp_path / "r", os.getpid()
    if resume:
        shutil.copytree(quiet_run, out)
        (out / "checkpoints" / "e0004-s000.pt").unlink()

    def met(real):
        def call(*args):
            (tmp_path / f"ready{os.getpid()}").touch()
            while len(list(tmp_path.glob("ready*"))) < 2 and os.getpid() != here:
                time.sleep(0.002)
            return real(*args)
        return call
    name = "lock_folder" if resume else "create_folder"
    monkeypatch.setattr(checkpoint, name, met(getattr(checkpoint, name)))
    command = lambda: run(out, small_ladder, *(["--resume"] if resume else []))
    pids = [background(tmp_path, name, command) for name in "ab"]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert sorted(codes) == [0, 2]
    said = (tmp_path / "ab"[codes.index(2)]).read_text().splitlines()
    assert str(out) in said[-1] and "another program is at work" in said[-1]
    same_run(quiet_run, out)


@forks
def test_two_runs_without_a_name_get_two_folders(tmp_path, monkeypatch):
    """Both chose runs/000-genenv: the second takes the next number."""
    monkeypatch.chdir(tmp_path)
    o = genenv.Options()
    chosen = checkpoint.choose_folder(o)
    (one, a), (two, b) = checkpoint.create_folder(chosen, o), checkpoint.create_folder(chosen, o)
    with a, b:
        assert [f.as_posix() for f in (one, two)] == ["runs/000-genenv", "runs/001-genenv"]


def test_where_nothing_can_be_locked_one_line_says_so(tmp_path, monkeypatch, capsys):
    """Such a file system must not keep a run from starting."""
    fail_at(monkeypatch, checkpoint.fcntl, "flock", 1, errno.ENOLCK)
    checkpoint.lock_folder(tmp_path).close()
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "cannot be locked" in out and str(tmp_path) in out


def test_a_folder_with_a_lock_alone_is_empty(tmp_path, small_ladder):
    """A run killed between lock and config.json would block its folder for good."""
    (tmp_path / "lock").touch()
    o = genenv.Options(out=str(tmp_path))
    checkpoint.create_folder(checkpoint.choose_folder(o), o)[1].close()
    assert (tmp_path / "config.json").is_file()


# ---------------------------------------------------------------------------------------------
# another device, another width, another version


def test_checkpoint_of_another_device_goes_on(copy, tmp_path, capsys):
    """It was called damaged, and the advice was to remove it. Two such resumes agree in every bit,
    and differ from the undisturbed run in the tokens that they draw."""
    (copy / "checkpoints" / "e0004-s000.pt").unlink()
    path = checkpoint._checkpoints(copy)[-1]
    state = checkpoint._read(path)
    state["generators"][1] = torch.arange(16, dtype=torch.uint8)  # on a GPU they have 16 bytes
    path.write_bytes(checkpoint._packed({**state, "device": "cuda"}))
    twin = Path(shutil.copytree(copy, tmp_path / "twin"))
    for folder in (copy, twin):
        assert genenv.main(["--resume", "--out", str(folder)]) == 0
        out = capsys.readouterr().out
        assert len([s for s in out.splitlines() if "not to the bit" in s and "cpu" in s]) == 1
    same_run(copy, twin)


def test_a_moved_run_draws_from_a_stream_of_its_own():
    """Seed, epoch and step make the stream: no two resumes of different places share one."""
    streams = set()
    for seed, t, step in ((0, 3, 0), (0, 3, 1), (0, 4, 0), (1, 3, 0), (0, 3, 0)):
        r = SimpleNamespace(sampler=torch.Generator(), o=SimpleNamespace(seed=seed),
                            state=EpochState(epoch=t, step=step))
        assert checkpoint._restore_sampler(r, {"device": "cuda"})
        streams.add(r.sampler.initial_seed())
    assert len(streams) == 4


def test_the_width_may_change_on_resume(copy, capsys):
    """What an out-of-memory message advises must be possible; one line says what it costs."""
    (copy / "checkpoints" / "e0004-s000.pt").unlink()
    assert genenv.main(["--resume", "--out", str(copy), "--max-rows", "16"]) == 0
    said = [s for s in capsys.readouterr().out.splitlines() if "no longer to the bit" in s]
    assert len(said) == 1 and "--max-rows" in said[0]
    assert len(read_jsonl(copy / "metrics.jsonl")) == 4
    assert json.loads((copy / "config.json").read_text())["max_rows"] == 16


@pytest.mark.parametrize("phase, flag", [
    ("agent rollouts", "--max-rows"), ("simulator rollouts", "--max-rows"),
    ("agent update (GRPO)", "--token-budget"), ("simulator update (RWR)", "--token-budget")])
def test_advice_when_memory_runs_out_can_be_followed(phase, flag, copy):
    """Every option that the message names is one that a resumed run may change."""
    with pytest.raises(UserError, match="out of GPU memory during") as error:
        with measure.peak_memory({}, phase, "cpu"):
            raise torch.OutOfMemoryError
    text = str(error.value)
    named = set(re.findall(r"--([a-z-]+)", text)) - {"resume", "out"}
    assert phase in text and flag[2:] in named and "--resume" in text
    for name in named:
        given = {"resume": True, "out": str(copy), name.replace("-", "_"): 1}
        assert options.resumed_options(given, {})  # not refused


def test_run_of_another_version(copy, capsys):
    """A checkpoint or an option of another version: one line says so."""
    path = checkpoint._checkpoints(copy)[-1]
    path.write_bytes(path.read_bytes().replace(checkpoint.FORMAT, b"genenv-9", 1))
    one_line(capsys, genenv.main(["--resume", "--out", str(copy)]), "of another version", path)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "seeds": 4}))
    one_line(capsys, genenv.main(["--resume", "--out", str(copy)]),
             "option this version does not know (seeds)", "start a new run")
