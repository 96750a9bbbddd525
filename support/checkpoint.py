"""Stop at any moment, go on to the bit: run folders and their locks, checkpoints, signals.

What of the paper this is: nothing; it is what makes its runs trustworthy. A checkpoint is one file,
written at the end of every epoch, and at the next step after SIGINT or SIGTERM. It holds both
adapters, both optimisers, every generator's state, what of the current epoch is done, and how long
the append-only files were. It is whole or absent, and its checksum says if it was changed since.

How it is run: `python genenv.py --resume --out runs/000-genenv`. On resuming the files are cut back
to the lengths in the checkpoint (the rest moves to FILE.torn), the pools are read from them, and
the run continues as if nothing had happened: 2 + 2 epochs equal 4, bit for bit on one machine (with
--val-every, epoch 2 of the former is validated as its last). On
another kind of device, or with another --max-rows, it goes on too, and says that the bits differ.
Only one program at a time works in a run folder. Its lock goes when it dies, also by SIGKILL.

Where it differs on purpose from common practice: the reference policy needs no checkpoint, it is
the base with both adapters off and so cannot drift at a resume.
"""
import errno
import fcntl
import hashlib
import io
import json
import os
import pickle
import random
import re
import signal
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from support.cli import Stopped
from support.files import UserError, read_jsonl, set_torn_line_aside, write_whole
from data_pool import EnvRecord, Task, Trace

FILES = ("metrics.jsonl", "samples.jsonl", "train.jsonl", "env.jsonl")
KEEP = 2  # checkpoints kept: the last, and the one before in case the last gets damaged
LOCK = "lock"
FORMAT = b"genenv-2"  # first word of a checkpoint: change it when a run of before could not go on


# ---------------------------------------------------------------------------------------------
# run folders


def choose_folder(o) -> Path:
    """The folder of a run; nothing is written yet. Raises UserError rather than overwrite one."""
    if not o.out:
        number = 0
        while list(Path("runs").glob(f"{number:03d}-*")):
            number += 1
        return Path("runs") / f"{number:03d}-{o.variant}"
    folder = Path(o.out)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file: name a folder")
    if not o.resume:
        _refuse_used(folder)
    return folder


def _refuse_used(folder: Path):
    """UserError if a folder holds more than what a run that never began leaves behind."""
    if folder.is_dir() and any(f.name not in ("tmp-config.json", LOCK) for f in folder.iterdir()):
        what = "holds a run already: add --resume to go on with it" \
            if (folder / "config.json").is_file() else "is not empty"
        raise UserError(f"run folder {folder} {what}, or choose another --out")


def create_folder(folder: Path, o):
    """Make the folder of a fresh run, lock it, write config.json, whole or not at all.

    Returns (folder, the open lock). Of two runs started at once only one gets the folder: the other
    ends with a UserError, or, without --out, with the next free number.
    """
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=bool(o.out))
            break
        except FileExistsError:
            if folder.is_dir():  # its number was free a moment ago
                folder = choose_folder(o)
                continue
            raise UserError(f"--out {folder} is a file: name a folder") from None
        except OSError as error:
            raise _unwritable(folder, error) from None
    lock = lock_folder(folder)
    try:
        _refuse_used(folder)  # a run may have begun, and ended, since the folder was chosen
        write_config(folder, o)
    except BaseException:
        lock.close()
        raise
    return folder, lock


def write_config(folder: Path, o):
    """config.json of a run. Raises UserError where that cannot be."""
    try:
        write_whole(folder / "config.json", json.dumps({**asdict(o), "resume": False}, indent=1))
    except UserError:
        if not (folder / "config.json").exists():  # leave nothing that would look like a run
            with suppress(OSError):
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()
        raise


def lock_folder(folder: Path):
    """The run folder's lock, an open file: it is held until that is closed or the process is dead.

    Raises UserError if another program is at work there. Where the file system has no such locks, one
    line says that nothing guards the folder.
    """
    path, missing = folder / LOCK, False
    try:
        handle = open(path, "ab")
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # a run that could not begin may have removed the file that was opened here
        taken = not path.exists() or not os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except OSError as error:
        taken = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        missing = not taken
    if taken:
        handle.close()
        raise UserError(f"another program is at work in run folder {folder}: wait until it ends, "
                        "or choose another --out")
    if missing:
        print(f"run folder {folder} cannot be locked on this system: start no second program there")
    return handle


def _unwritable(folder, error) -> UserError:
    return UserError(f"cannot write to run folder {folder}: {error.strerror}; choose another --out")


# ---------------------------------------------------------------------------------------------
# checkpoints


def is_complete(o) -> bool:
    """Whether the run to be resumed has nothing left to do; if so, that is printed. Only names and
    dates of files are read. Raises UserError if more epochs are done than asked for."""
    folder = Path(o.out)
    newest = _checkpoints(folder)[-1:]
    if not newest:
        return False
    epoch, step = _numbers(newest[0])
    done = epoch - (step == 0)  # e0004-s000 is the end of epoch 3; e0004-s002 lies in epoch 4
    if done > o.epochs:
        raise UserError(f"--epochs is {o.epochs}: {folder} has come to epoch {done}; nothing was "
                        "changed")
    report = folder / "report.html"  # the last that a run writes
    complete = done == o.epochs and step == 0 and (folder / "adapters" / "env").is_dir() \
        and report.is_file() and report.stat().st_mtime >= newest[0].stat().st_mtime
    if complete:
        print(f"{folder} is complete: {done} epochs are done, nothing was changed; more --epochs "
              "may go on with it")
    return complete


def save(run):
    """Write checkpoints/eEEEE-sSSS.pt; whole or not at all. The two newest are kept.

    Raises UserError if the disk is full or read-only; the checkpoint before stays as it was.
    """
    run.train_pool.save()
    run.env_pool.save()
    folder = run.folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    for torn in folder.glob("tmp-*"):  # of a run that was killed while saving
        torn.unlink()
    write_whole(folder / f"e{run.state.epoch:04d}-s{run.state.step:03d}.pt", _packed({
        "adapters": {name: [p.detach().cpu() for p in params]
                     for name, params in run.params.items()},
        "optimizers": [run.agent_optimizer.state_dict(), run.env_optimizer.state_dict()],
        "generators": [run.rng.get_state(), run.sampler.get_state()],
        "device": run.sampler.device.type, "success": run.last_success,
        "epoch": json.dumps({**asdict(run.state), "invalid": dict(run.state.invalid)}),
        "sizes": {name: _size(run.folder / name) for name in FILES},
        "sha256": {**run.sources, **{name: sha256(run.folder / name) for name in FILES}}}))
    for old in _checkpoints(run.folder)[:-KEEP]:
        old.unlink()


def _packed(state: dict) -> bytes:
    """A checkpoint as a file: format and checksum in the first line, then what torch saves."""
    import torch
    data = io.BytesIO()
    torch.save(state, data)
    return b"%s %s\n" % (FORMAT, hashlib.sha256(data.getvalue()).hexdigest().encode()) \
        + data.getvalue()


def _read(path: Path) -> dict:
    """A checkpoint as it was written, to the bit, or UserError."""
    import torch
    try:
        first, _, data = path.read_bytes().partition(b"\n")
        if first.startswith(b"genenv-") and not first.startswith(FORMAT + b" "):
            raise UserError(f"{path} is of another version: go on with that version, or start a "
                            "new run in another --out")
        if first != b"%s %s" % (FORMAT, hashlib.sha256(data).hexdigest().encode()):
            raise ValueError("its checksum is wrong")
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (OSError, ValueError, pickle.UnpicklingError) as error:
        raise _damaged(path, error) from None


def load(run):
    """Put adapters, optimisers, generators and the account of the epoch back into `run`, then cut
    the append-only files back to what the checkpoint knows. Nothing is cut before all is checked.

    A run that was killed before its first checkpoint starts from the beginning. Raises UserError
    naming the file that is missing, damaged, shorter than it was, or of another shape.
    """
    newest = _checkpoints(run.folder)[-1:]
    state = _read(newest[0]) if newest else {"sizes": dict.fromkeys(FILES, 0)}
    _check_files(run, state)
    if newest:
        _restore(run, newest[0], state)
    _rewind(run.folder, state["sizes"])
    if not newest:
        print(f"{run.folder} has no checkpoint yet: starting from the beginning")
        return
    run.history = read_jsonl(run.folder / "metrics.jsonl")
    print(f"resumed {run.folder} at epoch {run.state.epoch}, step {run.state.step}")


def _check_files(run, state):
    """UserError unless the run's files still begin with what the checkpoint knows, and the files
    named in options are what they were."""
    for name, size in state["sizes"].items():
        if _size(run.folder / name) < size:
            raise UserError(f"{run.folder / name} is shorter than its checkpoint says: it was cut "
                            "or edited; restore it, or start a new run in another --out")
    here = {**run.sources, **{name: sha256(run.folder / name, size)
                              for name, size in state["sizes"].items()}}
    for name, digest in state.get("sha256", {}).items():
        if here.get(name) != digest:
            path = run.folder / name if name in FILES else name
            raise UserError(f"{path} is not what this run read or wrote: restore it, or start a "
                            "new run in another --out")


def _rewind(folder: Path, known: dict):
    """Cut the append-only files back to known sizes in bytes; what is cut moves to FILE.torn."""
    for name, size in known.items():
        path = folder / name
        if message := set_torn_line_aside(path):
            print(message)
        if _size(path) > size:  # written after the checkpoint; that work is done again
            data = path.read_bytes()[size:]
            with open(path.with_name(name + ".torn"), "ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # set aside for certain before it goes
            os.truncate(path, size)
            lines = data.count(b"\n")
            print(f"{path}: {lines} lines written after the checkpoint set aside in "
                  f"{name}.torn; that work is done again")


def _restore(run, path, state):
    """Everything that a checkpoint holds into `run`."""
    for name, params in run.params.items():  # the model may have been replaced
        if [p.shape for p in params] != [t.shape for t in state["adapters"][name]]:
            raise _damaged(path, ValueError("its adapters do not fit this model"))
    for name, params in run.params.items():
        for p, value in zip(params, state["adapters"][name]):
            p.data.copy_(value)
    for optimizer, value in zip((run.agent_optimizer, run.env_optimizer), state["optimizers"]):
        optimizer.load_state_dict(value)
    run.state, run.last_success = _epoch_state(state["epoch"], type(run.state)), state["success"]
    run.rng.set_state(state["generators"][0])
    if moved := _restore_sampler(run, state):
        print(moved)


def _restore_sampler(run, state) -> str:
    """Put the generator of tokens back; returns what to tell the user, or "".

    Its state is of use on the kind of device that made it. On another kind it gets a new seed that
    depends on --seed, epoch and step alone, so two such resumes draw the same tokens.
    """
    here = run.sampler.device.type
    if state["device"] == here:
        run.sampler.set_state(state["generators"][1])
        return ""
    place = f"{run.o.seed} {run.state.epoch} {run.state.step}"
    run.sampler.manual_seed(random.Random(place).getrandbits(63))
    return (f"this checkpoint was made on {state['device']}: on {here} the run goes on, but not to "
            "the bit")


def _epoch_state(text: str, EpochState):
    saved = json.loads(text)
    state = EpochState(**{**saved, "invalid": Counter(saved["invalid"])})
    state.attempts = [(Task(**task), p, [Trace(**e) for e in es])
                      for task, p, es in state.attempts]
    state.records = [EnvRecord(**r) for r in state.records]
    state.replays = [tuple(r) for r in state.replays]
    return state


def _checkpoints(folder) -> list[Path]:
    """All checkpoints, the newest last: e0012-s003.pt by its numbers."""
    return sorted((folder / "checkpoints").glob("e*-s*.pt"), key=_numbers)


def _numbers(path) -> list[int]:
    return [int(n) for n in re.findall(r"[0-9]+", path.name)]


def _damaged(path, error) -> UserError:
    then = "go on from the checkpoint before it" if len(_checkpoints(path.parents[1])) > 1 else \
        "start from the beginning (there is no checkpoint before it)"
    reason = getattr(error, "strerror", None) or (str(error).splitlines() or ["?"])[0][:120]
    return UserError(f"checkpoint {path} is damaged ({reason}); remove it to {then}")


def _size(path) -> int:
    return path.stat().st_size if path.is_file() else 0


def hashes(o) -> dict:
    """{file of tasks or functions that an option names: its hash}."""
    given = (o.base_tasks, o.validation_tasks, o.teacher_tasks, *o.world_options.values())
    return {path: sha256(path) for path in given if isinstance(path, str) and Path(path).is_file()}


def sha256(path, size=None) -> str:
    """Hash of a file, or of its first `size` bytes; of one that is not there, of nothing."""
    data = Path(path).read_bytes()[:size] if Path(path).is_file() else b""
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------------------------------------
# signals


@contextmanager
def stop_signals(run):
    """Within: SIGINT and SIGTERM only note that the run is to stop; a second one kills at once."""
    def note(number, frame):
        if run.stop:
            raise KeyboardInterrupt("--resume goes on from the last checkpoint")
        run.stop = number
        print("stopping after this step; once more to stop at once", flush=True)
    former = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, handler in former.items():
            signal.signal(s, handler)


def stop_if_asked(run):
    """After a step: save and raise Stopped if a signal came."""
    if not run.stop:
        return
    state = run.state
    state.step += 1
    run.count_seconds()
    save(run)
    raise Stopped(run.stop, f"stopped in epoch {state.epoch} after step {state.step}; go on "
                            f"with: python genenv.py --resume --out {run.folder}")
