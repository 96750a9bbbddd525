"""Stop a run at any moment and resume it bit for bit: folders and locks, checkpoints, signals.

Usage: `python genenv.py --resume --out runs/000-genenv`. checkpoint.pt is written at the end of
every epoch, after a step if the last checkpoint is a minute old, and on SIGINT or SIGTERM after the
current step, unless that takes too long. It holds both adapters and optimisers, the random
generators, the progress inside an epoch, and the lengths of the append-only files. On resume, these
files are cut back to those lengths, the pools are read from them, and the run continues as if
nothing had happened: 2 + 1 epochs equal 3, bit for bit on a CPU with the same number of threads.
After a kill, or a stop within a step, everything since the last checkpoint is lost. The reference
policy needs no checkpoint: it is the base model with both adapters off.

A damaged or incompletely copied folder is refused with a one-line message and left unchanged.
Hashes reveal the damage: a checkpoint begins with a hash of its own contents and contains a hash of
each append-only file.
"""
import fcntl  # Linux and macOS; on Windows use WSL
import hashlib
import os
import shlex
import shutil
import signal
import threading
import time
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import count
from pathlib import Path

import torch

from data_pool import EnvRecord, Task, Trace, Trial, read_jsonl
from errors import Stopped, UserError, first_line, one_line, write_whole
from policy import Rollout
from support.origin import check_origin

FILES = ("metrics.jsonl", "samples.jsonl", "train.jsonl", "env.jsonl")
PATIENCE = 7  # seconds that a step may still take after a signal; a longer one is lost
OLD = 60      # seconds; if the last checkpoint is older, the end of a step writes a new one


# ---------------------------------------------------------------------------------------------
# run folders


@contextmanager
def claimed_folder(o):
    """Yield a run's folder and its lock, an open file that the caller has to close.

    Remove a new folder if its run cannot begin. Raise UserError rather than overwrite a run.
    """
    is_new = not o.out or not Path(o.out).exists()
    folder = choose_folder(o)
    lock = lock_folder(folder)  # outside `try`: a folder that another run has locked must stay
    try:
        yield folder, lock
    except BaseException:
        if is_new:
            shutil.rmtree(folder)
        raise


def choose_folder(o) -> Path:
    """Return a run's folder, and create it if it does not exist.

    Raise UserError if --out is not empty, unless the run is to be resumed.
    """
    if not o.out:
        return next_free_folder(o.variant)
    folder = Path(o.out)
    folder.mkdir(parents=True, exist_ok=True)
    # a run that was killed before it had written config.json leaves only these
    contents = {path.name for path in folder.iterdir()} - {"lock", "tmp-config.json"}
    if contents and not o.resume:
        raise UserError(f"--out {folder} is not empty: choose another; to resume a run there, add "
                        "--resume; if it holds a warm start's model, give it as --model")
    return folder


def next_free_folder(variant: str) -> Path:
    """Create runs/NNN-VARIANT, with the lowest free number, and return it."""
    for number in count():
        folder = Path("runs") / f"{number:03d}-{variant}"
        if not list(Path("runs").glob(f"{number:03d}-*")):
            with suppress(FileExistsError):  # another run took it in the meantime
                folder.mkdir(parents=True)
                return folder


def lock_folder(folder: Path):
    """Return the folder's lock: an open file, locked until it is closed or the process dies.

    Raise UserError if another program is using the folder, or if its disk does not support locks.
    """
    handle = open(folder / "lock", "ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another program is using {folder}: wait, or choose another --out") from None
    except OSError as error:
        raise UserError(f"the disk of {folder} cannot lock files ({first_line(error)}): choose an "
                        "--out on another disk") from None
    return handle


def resume_command(folder) -> str:
    """Return the command that resumes a run, ready to paste."""
    return shlex.join(("python", "genenv.py", "--resume", "--out", str(folder)))


def _read(path) -> bytes:
    """Return the bytes of a file, or no bytes if it does not exist."""
    return path.read_bytes() if path.is_file() else b""


def _sha256(data) -> str:
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------------------------------------
# checkpoints


def write(path, state: dict):
    """Write a hash of a state's bytes, then the state, to a file, atomically."""
    # serialise in memory first: torch's own writer hides a full disk
    buffer = BytesIO()
    torch.save(state, buffer)
    write_whole(path, _sha256(buffer.getbuffer()), buffer.getbuffer())


def read(path) -> dict:
    """Return what `write` saved. Raise UserError if even one bit of it has changed."""
    data = Path(path).read_bytes()
    digest, state = data[:64], data[64:]
    if digest != _sha256(state).encode():
        raise UserError(f"{path} is damaged ({len(data)} bytes): replace it with an intact copy")
    # besides tensors and Python's basic types, allow only these classes: otherwise a stranger's
    # file could run code
    with torch.serialization.safe_globals([EnvRecord, Rollout, Task, Trace, Trial]):
        return torch.load(BytesIO(state), weights_only=True, map_location="cpu")


def save(run):
    """Write checkpoint.pt, after the files it refers to."""
    run.train_pool.save()
    run.env_pool.save()
    adapters = {name: [p.detach().cpu() for p in params] for name, params in run.params.items()}
    files = {}
    for name in FILES:
        data = _read(run.folder / name)
        files[name] = [len(data), _sha256(data)]
    write(run.folder / "checkpoint.pt", {
        "adapters": adapters,
        "optimizers": [run.agent_optimizer.state_dict(), run.env_optimizer.state_dict()],
        "generators": [run.rng.get_state(), run.sampler.get_state()],
        "state": vars(run.state), "files": files, "origin": run.origin})
    run.saved_at = time.monotonic()


def load(run):
    """Restore `run` from its checkpoint, and cut the append-only files to the lengths noted in it.

    Everything is checked before anything is cut. A run that was killed before its first checkpoint
    starts from the beginning. Raise UserError if anything that must stay the same has changed
    since the run began (see support/origin.py), or if a file is missing, damaged or from another
    run.
    """
    path = run.folder / "checkpoint.pt"
    if not path.is_file():
        check_nothing_to_lose(run.folder)
        for name in FILES:
            (run.folder / name).unlink(missing_ok=True)
        return
    saved = read(path)
    check_origin(saved["origin"], run.origin, run.o.alpha_schedule)
    last_epoch = saved["state"]["epoch"] - 1
    if last_epoch > run.o.epochs:
        raise UserError(f"--epochs is {run.o.epochs}, but {run.folder} has already finished epoch "
                        f"{last_epoch}")
    check_files(run.folder, saved["files"])
    with one_line(path, "does not fit the options in config.json"):
        restore(run, saved)
    # drop what was written after the checkpoint, because the run will do that work again
    for name, (size, _) in saved["files"].items():
        if (run.folder / name).is_file():
            os.truncate(run.folder / name, size)
    if run.state.epoch:  # metrics.jsonl has no record until epoch 0 ends
        run.history = read_jsonl(run.folder / "metrics.jsonl")
    print(f"resumed {run.folder} after {run.state.epoch} of {run.o.epochs + 1} epochs and "
          f"{run.state.step} steps")


def check_files(folder: Path, files: dict):
    """Raise UserError unless each of FILES still begins with what it held at the checkpoint.

    files: {name: [its size then, its hash then]}.
    """
    for name, (size, digest) in files.items():
        data = _read(folder / name)[:size]
        if _sha256(data) != digest:
            raise UserError(f"{folder / name} is incomplete, or not what this run wrote: copy the "
                            "whole folder again")


def check_nothing_to_lose(folder: Path):
    """Raise UserError if a folder without a checkpoint has the metrics of more than one epoch.

    A run that was killed before its first checkpoint can have written only those of epoch 0.
    """
    if _read(folder / "metrics.jsonl").count(b"\n") > 1:
        raise UserError(f"{folder} has metrics of more than one epoch, but no checkpoint.pt: copy "
                        "that file as well, or choose another --out")


def restore(run, saved: dict):
    """Copy a saved state into the run."""
    for name, params in run.params.items():
        for p, value in zip(params, saved["adapters"][name], strict=True):
            p.data.copy_(value)
    for optimizer, value in zip((run.agent_optimizer, run.env_optimizer), saved["optimizers"]):
        optimizer.load_state_dict(value)
    for generator, value in zip((run.rng, run.sampler), saved["generators"]):
        generator.set_state(value)
    run.state = type(run.state)(**saved["state"])


# ---------------------------------------------------------------------------------------------
# signals


@contextmanager
def stop_signals(run):
    """Turn SIGINT and SIGTERM into a request to stop after the current step.

    If the step takes longer than PATIENCE, an alarm interrupts it; a second signal does so at once.
    The run then has to be resumed from its last checkpoint.
    """
    def note(number, frame):
        if run.stop:
            raise KeyboardInterrupt
        run.stop = number
        signal.alarm(PATIENCE)
        # on a separate line, below a progress bar
        print(f"\nstopping at the end of this step, or sooner: after {PATIENCE} seconds, or at a "
              "second signal", flush=True)

    command = resume_command(run.folder)
    after_that = f"once that is fixed, resume with: {command}"
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGALRM
    if threading.current_thread() is not threading.main_thread():
        numbers = ()  # Python lets only the main thread install handlers
    former = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(run.stop, f"stopped within a step of epoch {run.state.epoch}; resume from "
                      f"the last checkpoint with: {command}") from None
    except (UserError, OSError) as error:  # an OSError may mean that the disk is full
        raise UserError(f"{run.folder}: {first_line(error)}; {after_that}") from error
    except Exception as error:  # perhaps from a user's own code, which needs the traceback
        error.add_note(after_that)
        raise
    finally:
        signal.alarm(0)
        for number, handler in former.items():
            signal.signal(number, handler)


def end_step(run, steps=1):
    """Save if the last checkpoint is old. After a signal, save and raise Stopped.

    steps: how many steps to add to the epoch's count, 1 after a step and 0 before the first.
    """
    is_due = run.stop or time.monotonic() - run.saved_at > OLD
    if not is_due or run.state.epoch > run.o.epochs:
        return
    signal.alarm(0)  # do not interrupt the checkpoint
    run.state.step += steps  # turn the index of the last step into a count
    run.count_seconds()
    save(run)
    if run.stop:
        raise Stopped(
            run.stop, f"stopped in epoch {run.state.epoch}, {run.state.step} of its {run.o.steps} "
            f"steps done; resume with: {resume_command(run.folder)}")
