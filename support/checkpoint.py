"""Stop at any moment and resume to the bit: run folders and their locks, checkpoints, signals.

Usage: `python genenv.py --resume --out runs/000-genenv`. checkpoint.pt is written at the end of
every epoch, and after the current step on SIGINT or SIGTERM. It holds both adapters and optimisers,
the generators, the progress inside an epoch, and how long the append-only files were. On resuming
these files are cut back to those lengths, the pools are read from them, and the run continues as if
nothing had happened: 2 + 1 epochs equal 3, bit for bit on one machine. A kill loses at most the
current epoch. The reference policy needs no checkpoint: it is the base with both adapters off.

A folder that was copied in part, or damaged, is refused in one line, and nothing in it is changed:
the checkpoint begins with a hash of itself, and holds one of each append-only file.
"""
import fcntl  # Linux and macOS; on Windows use WSL
import hashlib
import os
import shlex
import shutil
import signal
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile

import torch

from data_pool import EnvRecord, Task, Trace, Trial, read_jsonl
from errors import Stopped, UserError, first_line, one_line, write_whole
from policy import Rollout
from support.origin import check_origin

FILES = ("metrics.jsonl", "samples.jsonl", "train.jsonl", "env.jsonl")


# ---------------------------------------------------------------------------------------------
# run folders


@contextmanager
def claimed_folder(o):
    """Yield the folder of a run and its lock, held until it is closed. Remove a folder that was
    made for a run which then cannot begin. Raise UserError rather than overwrite a run."""
    is_new = not o.out or not Path(o.out).exists()
    folder = choose_folder(o)
    try:
        yield folder, lock_folder(folder)
    except BaseException:
        if is_new:
            shutil.rmtree(folder)
        raise


def choose_folder(o) -> Path:
    """Return the folder of a run, and make it at once: another run may begin at the same time."""
    if not o.out:
        return next_free_folder(o.variant)
    folder = Path(o.out)
    with one_line(f"--out {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()  # whether files can be made in it
    # only these are left by a run that was killed before it had begun
    contents = {path.name for path in folder.iterdir()} - {"lock", "tmp-config.json"}
    if contents and not o.resume:
        raise UserError(f"--out {folder} is not empty: choose another; to resume a run there, add "
                        "--resume; a warm start's model there: give it as --model")
    return folder


def next_free_folder(variant: str) -> Path:
    """Make runs/NNN-VARIANT with the lowest number that no run has."""
    for number in count():
        folder = Path("runs") / f"{number:03d}-{variant}"
        if not list(Path("runs").glob(f"{number:03d}-*")):
            with suppress(FileExistsError):  # another run was faster
                folder.mkdir(parents=True)
                return folder


def lock_folder(folder: Path):
    """Return the folder's lock, an open file: held until it is closed or the process is dead.
    Raise UserError if another program is at work there, or if the disk knows no locks."""
    handle = open(folder / "lock", "ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another program is at work in {folder}: wait, or choose another --out") from None
    except OSError as error:
        raise UserError(f"the disk of {folder} cannot lock files ({first_line(error)}): choose an "
                        "--out on another disk") from None
    return handle


def resume_command(folder) -> str:
    """Return the command that resumes a run, ready to be pasted."""
    return shlex.join(("python", "genenv.py", "--resume", "--out", str(folder)))


def _read(path) -> bytes:
    """Return all of a file; nothing if there is none."""
    return path.read_bytes() if path.is_file() else b""


def _sha256(data) -> str:
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------------------------------------
# checkpoints


def write(path, state: dict):
    """Save a state, whole or not at all; a hash of its bytes precedes it."""
    # into memory first: torch's own writer hides that a disk is full
    buffer = BytesIO()
    torch.save(state, buffer)
    write_whole(path, _sha256(buffer.getbuffer()), buffer.getbuffer())


def read(path) -> dict:
    """Return what `write` wrote. Raise UserError if a bit of it has changed."""
    data = Path(path).read_bytes()
    digest, state = data[:64], data[64:]
    if digest != _sha256(state).encode():
        raise UserError(f"{path} is damaged, {len(data)} bytes long: put a whole copy in its place")
    # only these classes and Python's own: a file from elsewhere cannot run code
    with torch.serialization.safe_globals([EnvRecord, Rollout, Task, Trace, Trial]):
        return torch.load(BytesIO(state), weights_only=True, map_location="cpu")


def save(run):
    """Write checkpoint.pt, after all that it counts on."""
    run.train_pool.save()
    run.env_pool.save()
    for trial in run.state.trials:
        trial.rollouts = []  # only the update of their own step needed them
    adapters, files = {}, {}
    for name, params in run.params.items():
        adapters[name] = [p.detach().cpu() for p in params]
    for name in FILES:
        data = _read(run.folder / name)
        files[name] = [len(data), _sha256(data)]
    write(run.folder / "checkpoint.pt", {
        "adapters": adapters,
        "optimizers": [run.agent_optimizer.state_dict(), run.env_optimizer.state_dict()],
        "generators": [run.rng.get_state(), run.sampler.get_state()],
        "state": vars(run.state), "files": files, "origin": run.origin})


def load(run):
    """Put adapters, optimisers, generators and the progress of the epoch back into `run`, and cut
    the append-only files back to what the checkpoint knows. Nothing is cut before all is checked.

    A run killed before its first checkpoint starts from the beginning. Raise UserError naming what
    this run did not begin with, or did not write.
    """
    path = run.folder / "checkpoint.pt"
    if path.is_file():
        saved = read(path)
        check_origin(saved["origin"], run.origin, run.o.alpha_schedule)
        last_epoch = saved["state"]["epoch"] - 1
        if last_epoch > run.o.epochs:
            raise UserError(f"--epochs is {run.o.epochs}: {run.folder} has come to epoch "
                            f"{last_epoch}")
        check_files(run.folder, saved["files"])
        with one_line(path, "does not fit the options in config.json"):
            restore(run, saved)
        sizes = {name: size for name, (size, _) in saved["files"].items()}
    else:
        check_nothing_to_lose(run.folder)
        sizes = dict.fromkeys(FILES, 0)
    # what was written after the checkpoint goes: that work is done again
    for name, size in sizes.items():
        if (run.folder / name).is_file():
            os.truncate(run.folder / name, size)
    if sizes["metrics.jsonl"]:  # not before the end of epoch 0
        run.history = read_jsonl(run.folder / "metrics.jsonl")
    print(f"resumed {run.folder}: {run.state.epoch} of {run.o.epochs + 1} epochs, "
          f"{run.state.step} steps")


def check_files(folder: Path, files: dict):
    """Raise UserError unless each of FILES begins with what it held when the checkpoint was made.
    files: {name: [its size then, its hash then]}."""
    for name, (size, digest) in files.items():
        data = _read(folder / name)
        if len(data) < size:
            raise UserError(f"{folder / name} has {len(data)} bytes, the checkpoint knows {size}: "
                            "copy the folder again")
        if _sha256(data[:size]) != digest:
            raise UserError(f"{folder / name} is not what this run wrote: copy the folder again")


def check_nothing_to_lose(folder: Path):
    """Raise UserError if a folder without a checkpoint is more than what a run leaves that was
    killed in epoch 0."""
    trained = _read(folder / "metrics.jsonl").count(b"\n") > 1
    # epoch 0 writes no env.jsonl
    if trained or _read(folder / "env.jsonl") or (folder / "adapters").exists():
        raise UserError(f"{folder} has no checkpoint.pt, but what was written after its first one: "
                        "copy it as well, or choose another --out")


def restore(run, saved: dict):
    """Copy what `save` saved into the run."""
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
    """Within, SIGINT and SIGTERM only ask the run to stop; a second one stops at once."""
    def note(number, frame):
        if run.stop:
            raise KeyboardInterrupt
        run.stop = number
        print("stopping after this step; once more stops at once and loses this epoch's steps",
              flush=True)
    former = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; to resume after that: {resume_command(run.folder)}") from error
    except OSError as error:  # a full disk
        raise UserError(f"{run.folder}: {first_line(error)}; to resume after that: "
                        f"{resume_command(run.folder)}") from error
    except Exception as error:  # of a user's own Python, perhaps: its traceback follows
        error.add_note(f"to resume after that: {resume_command(run.folder)}")
        raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def stop_if_asked(run, steps=1):
    """Save and raise Stopped if a signal came: after a step of an epoch, or before its first
    (steps: 0)."""
    if run.stop and run.state.epoch <= run.o.epochs:
        run.state.step += steps  # the index of the step just made becomes a count
        run.count_seconds()
        save(run)
        raise Stopped(
            run.stop, f"stopped in epoch {run.state.epoch}, {run.state.step} of its {run.o.steps} "
            f"steps done; resume with: {resume_command(run.folder)}")
