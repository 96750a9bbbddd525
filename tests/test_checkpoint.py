"""What a run loses when the disk is full, a file is torn or the process dies while saving: nothing.

    python -m pytest -q tests/test_checkpoint.py
"""
import errno
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from runtime import checkpoint
import data_pool
import genenv
from data_pool import read_jsonl
from worlds import ladder

MICRO = ["--threads", "1", "--steps", "2", "--seed-tasks", "4", "--val-samples", "1",
         "--env-updates", "2", "--rank", "4", "--epochs", "3"]
POOLS = ("metrics.jsonl", "samples.jsonl", "train.jsonl", "env.jsonl")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A base model of a few steps; figures are left out, they are tested elsewhere."""
    patch = pytest.MonkeyPatch()
    patch.setattr(ladder, "PRETRAIN", dict(steps=30, batch=16, lr=6e-3))
    patch.setattr(ladder, "score", lambda task, text: (
        float(int(task.id[:2], 16) < 64 * sum(map(text.count, "13579"))), True))
    patch.setattr(genenv.report, "write", lambda folder: None)
    yield tmp_path_factory.mktemp("cache")
    patch.undo()


def run(out, cache, *more):
    """genenv.main in this process -> exit code."""
    return genenv.main(["--out", str(out), "--cache-dir", str(cache), *MICRO, *more])


@pytest.fixture(scope="module")
def quiet(tmp_path_factory, cache):
    """An undisturbed run."""
    out = tmp_path_factory.mktemp("runs") / "quiet"
    assert run(out, cache) == 0
    return out


@pytest.fixture
def copy(quiet, tmp_path):
    """A copy of it, to disturb."""
    return Path(shutil.copytree(quiet, tmp_path / "copy"))


def equal(a, b):
    """Two run folders agree in everything but the clock."""
    for name in POOLS:
        x, y = ([{k: v for k, v in r.items() if k not in ("seconds", "tokens_per_s")}
                 for r in read_jsonl(f / name)] for f in (a, b))
        assert x == y, name
    for name in ("agent", "env"):
        x, y = ((f / "adapters" / name / "adapter_model.safetensors").read_bytes() for f in (a, b))
        assert x == y, name


def names(out):
    """What is in the checkpoints folder."""
    return sorted(p.name for p in (out / "checkpoints").iterdir())


def contents(folder):
    """{path: bytes} of all files below a folder."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def one_line(capsys, *words):
    """One line on stderr that says all of `words`; returns stdout."""
    out, err = capsys.readouterr()
    assert err.startswith("genenv: ") and err.count("\n") == 1, err
    assert all(str(w) in err for w in words), err
    return out


# ---------------------------------------------------------------------------------------------
# what is there


def test_two_checkpoints_are_kept_and_hold_what_they_should(quiet):
    """The last and the one before; adapters, optimisers, generators, the account of the epoch."""
    assert names(quiet) == ["e0003-s000", "e0004-s000"]
    for name in names(quiet):
        folder = quiet / "checkpoints" / name
        assert sorted(p.name for p in folder.iterdir()) == ["part.json", "state.pt"]
        state = torch.load(folder / "state.pt", weights_only=True)
        assert set(state["adapters"]) == {"agent", "env"} and len(state["generators"]) == 2
        assert all(o["state"] for o in state["optimizers"])
        saved = json.loads((folder / "part.json").read_text())
        assert set(saved["sizes"]) == set(POOLS)
    assert all(saved["sizes"][name] == (quiet / name).stat().st_size for name in POOLS)


def test_leftovers_of_a_killed_save_are_removed(copy, tmp_path, cache):
    """Folders tmp-* go with the next save; a half-made one is never taken for a checkpoint."""
    (copy / "checkpoints" / "tmp-abc").mkdir()
    (copy / "checkpoints" / "tmp-abc" / "state.pt").write_bytes(b"half")
    assert genenv.main(["--resume", "--out", str(copy), "--epochs", "4"]) == 0
    assert names(copy) == ["e0004-s000", "e0005-s000"]


# ---------------------------------------------------------------------------------------------
# torn and surplus lines


@pytest.mark.parametrize("name", POOLS)
def test_torn_line_is_set_aside_and_reported(name, quiet, copy, capsys):
    """Half a record at the end: told, kept in FILE.torn, and the run goes on to the same end."""
    with open(copy / name, "ab") as file:
        file.write(b'{"task": {"text": "3 s1')
    assert genenv.main(["--resume", "--out", str(copy)]) == 0
    assert f"{name}.torn" in capsys.readouterr().out
    assert (copy / f"{name}.torn").read_bytes() == b'{"task": {"text": "3 s1\n'
    equal(quiet, copy)


def test_surplus_lines_are_set_aside_and_reported(quiet, copy, capsys):
    """Whole records written after the checkpoint, and a torn one behind them: all are kept."""
    line = (copy / "train.jsonl").read_bytes().splitlines(keepends=True)[0]
    with open(copy / "train.jsonl", "ab") as file:
        file.write(2 * line + line[:10])
    assert genenv.main(["--resume", "--out", str(copy)]) == 0
    out = capsys.readouterr().out
    assert "last line was torn" in out and "2 lines written after the checkpoint" in out
    assert (copy / "train.jsonl.torn").read_bytes() == line[:10] + b"\n" + 2 * line
    equal(quiet, copy)


def test_killed_before_the_first_checkpoint(quiet, tmp_path, cache, capsys):
    """Only config.json and some lines: the run starts over and sets those lines aside."""
    out = tmp_path / "r"
    out.mkdir()
    shutil.copy(quiet / "config.json", out)
    shutil.copy(quiet / "metrics.jsonl", out)
    assert genenv.main(["--resume", "--out", str(out), "--cache-dir", str(cache)]) == 0
    assert "no checkpoint yet" in capsys.readouterr().out
    assert (out / "metrics.jsonl.torn").read_bytes() == (quiet / "metrics.jsonl").read_bytes()
    equal(quiet, out)


@pytest.mark.parametrize("file", ["state.pt", "part.json"])
def test_the_checkpoint_before_takes_over(file, quiet, copy, capsys):
    """The newest is damaged: the message names a folder, and without it the run goes on from the
    one before, to the same end."""
    newest = copy / "checkpoints" / "e0004-s000"
    (newest / file).write_bytes((newest / file).read_bytes()[:100])
    before = contents(copy)
    assert genenv.main(["--resume", "--out", str(copy)]) == 2
    one_line(capsys, f"remove the folder {newest}", "checkpoint before it")
    assert contents(copy) == before
    shutil.rmtree(newest)
    assert genenv.main(["--resume", "--out", str(copy)]) == 0
    assert "at epoch 3, step 0" in capsys.readouterr().out
    assert len(read_jsonl(copy / "metrics.jsonl.torn")) == 1
    equal(quiet, copy)


def test_the_only_checkpoint_is_damaged(copy, capsys):
    """Then the message does not promise another."""
    shutil.rmtree(copy / "checkpoints" / "e0003-s000")
    (copy / "checkpoints" / "e0004-s000" / "part.json").unlink()
    assert genenv.main(["--resume", "--out", str(copy)]) == 2
    one_line(capsys, "no checkpoint before it")


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


# epoch 0 and every other: metrics, samples, train and env, then three syncs of the checkpoint
FAULTS = {
    "saving the state": (torch, "save", 3, errno.ENOSPC),
    "the first state": (torch, "save", 1, errno.ENOSPC),
    "quota": (torch, "save", 2, errno.EDQUOT), "read-only": (torch, "save", 2, errno.EROFS),
    "device": (os, "fsync", 17, errno.EIO),
    **{f"sync {n}": (os, "fsync", n, errno.ENOSPC) for n in (1, 9, 11, 12, 13, 14)},
    "moving it into place": (Path, "rename", 4, errno.ENOSPC),
}


@pytest.mark.parametrize("name", FAULTS)
def test_failing_write_loses_nothing(name, quiet, tmp_path, cache, capsys, monkeypatch):
    """One line and exit code 2; the checkpoint before is whole; the resumed run ends the same."""
    out, (owner, call, nth, number) = tmp_path / "r", FAULTS[name]
    calls = fail_at(monkeypatch, owner, call, nth, number)
    assert run(out, cache) == 2
    monkeypatch.undo()
    assert len(calls) >= nth
    one_line(capsys, os.strerror(number), "--resume")
    left = names(out) if (out / "checkpoints").exists() else []
    assert not any(n.startswith("tmp-") for n in left), left
    for folder in left:  # whatever is there can be read
        checkpoint._read_part(out / "checkpoints" / folder / "part.json", genenv.Part)
        torch.load(out / "checkpoints" / folder / "state.pt", weights_only=True)
    assert genenv.main(["--resume", "--out", str(out), "--cache-dir", str(cache)]) == 0
    equal(quiet, out)


def test_half_written_append_is_taken_back(tmp_path, monkeypatch):
    """A disk that takes a part of the records: the file ends where it ended before."""
    path = tmp_path / "pool.jsonl"
    data_pool.append_jsonl(path, [{"a": 1}])
    fail_at(monkeypatch, os, "fsync", 1)
    with pytest.raises(data_pool.UserError, match="No space left"):
        data_pool.append_jsonl(path, [{"a": 2}] * 100)
    assert path.read_bytes() == b'{"a": 1}\n'


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kilobytes", [1, 20, 200])
def test_a_real_limit_on_file_size(kilobytes, quiet, tmp_path, cache):
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
            code = run(out, cache)
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = (tmp_path / "err").read_text()
    assert code == 2 and text.count("\n") == 1 and text.startswith("genenv: "), (code, text)
    assert out.exists() == (kilobytes > 1)  # config.json has more: then there is no run at all
    assert run(out, cache, *(["--resume"] if out.exists() else [])) == 0
    equal(quiet, out)


# ---------------------------------------------------------------------------------------------
# death while saving


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("owner, call, nth, before", [
    (Path, "rename", 3, True), (Path, "rename", 3, False), (torch, "save", 2, False),
    (shutil, "rmtree", 1, True), (shutil, "rmtree", 3, False),
    (os, "fsync", 12, True), (os, "fsync", 14, False)],
    ids=["before renaming", "after renaming", "before part.json", "before cleaning",
         "while cleaning", "between the pools", "before the rename"])
def test_killed_inside_a_save(owner, call, nth, before, quiet, tmp_path, cache):
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
        os._exit(run(out, cache))
    os.waitpid(pid, 0)
    assert genenv.main(["--resume", "--out", str(out), "--cache-dir", str(cache)]) == 0
    assert not any(n.startswith("tmp-") for n in names(out)) and len(names(out)) == 2
    equal(quiet, out)


def test_the_newest_checkpoint_is_known_by_its_numbers(tmp_path):
    """As text s1000 comes before s999."""
    for name in ("e0002-s999", "e0002-s1000", "e0001-s003"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [p.name for p in checkpoint._checkpoints(tmp_path)] == [
        "e0001-s003", "e0002-s999", "e0002-s1000"]
