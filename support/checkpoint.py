"""Stop at any moment and go on to the bit: run folders and their locks, checkpoints, signals.

Usage: `python genenv.py --resume --out runs/000-genenv`. checkpoint.pt is written at the end of
every epoch, and after the current step on SIGINT or SIGTERM. It holds both adapters and optimisers,
the generators, the progress inside an epoch, and how long the append-only files were. On resuming
these files are cut back to those lengths, the pools are read from them, and the run continues as if
nothing had happened: 2 + 1 epochs equal 3, bit for bit on one machine. A kill loses at most the
current epoch. The reference policy needs no checkpoint: it is the base with both adapters off.
"""
import fcntl  # Linux and macOS; on Windows use WSL
import hashlib
import os
import signal
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile

from model.files import UserError, one_line, read_jsonl, whole_file
from support.options import Stopped

FILES = ("metrics.jsonl", "samples.jsonl", "train.jsonl", "env.jsonl")


# ---------------------------------------------------------------------------------------------
# run folders


def choose_folder(o) -> Path:
    """The folder of a run; nothing is written yet. Raises UserError rather than overwrite one."""
    if not o.out:
        number = next(n for n in count() if not list(Path("runs").glob(f"{n:03d}-*")))
        return Path("runs") / f"{number:03d}-{o.variant}"
    folder = Path(o.out)
    with one_line(f"--out {folder}"):
        TemporaryFile(dir=next(p for p in (folder, *folder.parents) if p.exists())).close()
    done = log.read_bytes().count(b'{"epoch": ') - 1 if (log := folder / "metrics.jsonl").is_file() else -1
    if o.resume and done > o.epochs:
        raise UserError(f"--epochs is {o.epochs}: {folder} has come to epoch {done}")
    # these alone are what a run left that was killed before it had begun
    if not o.resume and folder.exists() and {f.name for f in folder.iterdir()} - {"lock", "tmp-config.json"}:
        raise UserError(f"--out {folder} is not empty: choose another; to go on with a run there, add "
                        "--resume; a warm start's model there: give it as --model")
    return folder


def lock_folder(folder: Path):
    """The folder's lock, an open file: held until it is closed or the process is dead. Raises
    UserError if another program is at work there."""
    handle = open(folder / "lock", "ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another program is at work in {folder}: wait, or choose another --out") from None
    return handle


def hashes(o) -> dict:
    """{file that a run reads, or model that an option names: its hash}."""
    from model.loading import model_digest  # here and not above: it loads torch
    given = o.base_tasks, o.validation_tasks, o.teacher_tasks, "curriculum.py", f"worlds/{o.world}.py"
    files = [f for f in (*given, *o.world_options.values()) if isinstance(f, str) and Path(f).is_file()]
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in files} | {
        model: model_digest(model) for model in (o.model, o.env_model) if model}


# ---------------------------------------------------------------------------------------------
# checkpoints


def write(path, state: dict):
    """torch.save, whole or not at all."""
    import torch  # here and not above: a command line is checked without it
    with whole_file(path) as file:
        torch.save(state, file)


def save(run):
    """Write checkpoint.pt, after all that it counts on."""
    run.train_pool.save()
    run.env_pool.save()
    write(run.folder / "checkpoint.pt", {
        "adapters": {name: [p.detach().cpu() for p in params] for name, params in run.params.items()},
        "optimizers": [run.agent_optimizer.state_dict(), run.env_optimizer.state_dict()],
        "generators": [run.rng.get_state(), run.sampler.get_state()], "state": run.state.saved(),
        "sizes": {name: _size(run.folder / name) for name in FILES}, "sources": run.sources})


def load(run):
    """Put adapters, optimisers, generators and the progress of the epoch back into `run`, and cut
    the append-only files back to what the checkpoint knows. Nothing is cut before all is checked.

    A run killed before its first checkpoint starts from the beginning. Raises UserError naming the
    file or model that is not what this run read or wrote.
    """
    import torch
    path = run.folder / "checkpoint.pt"
    saved = {"sizes": dict.fromkeys(FILES, 0)}
    if path.is_file():
        saved = torch.load(path, weights_only=True, map_location="cpu")
        for name, digest in saved["sources"].items():
            if run.sources.get(name) != digest:
                if not name.endswith(".py"):  # a mistake in a world, or a fork, may be mended
                    raise UserError(f"{name} is not what this run began with: restore it, or start a new run")
                print(f"{name} is not what this run began with")
        for name, params in run.params.items():
            for p, value in zip(params, saved["adapters"][name], strict=True):
                p.data.copy_(value)
        for optimizer, value in zip((run.agent_optimizer, run.env_optimizer), saved["optimizers"]):
            optimizer.load_state_dict(value)
        for generator, value in zip((run.rng, run.sampler), saved["generators"]):
            generator.set_state(value)
        run.state = type(run.state).restored(saved["state"])
    for name, size in saved["sizes"].items():
        if _size(run.folder / name) > size:  # written after the checkpoint: that work is done again
            os.truncate(run.folder / name, size)
    if (run.folder / "metrics.jsonl").is_file():  # not before the end of epoch 0
        run.history = read_jsonl(run.folder / "metrics.jsonl")
    print(f"resumed {run.folder}: {run.state.epoch} of {run.o.epochs + 1} epochs, {run.state.step} steps")


def _size(path) -> int:
    return path.stat().st_size if path.is_file() else 0


# ---------------------------------------------------------------------------------------------
# signals


@contextmanager
def stop_signals(run):
    """Within: SIGINT and SIGTERM only note that the run is to stop; a second one stops at once."""
    def note(number, frame):
        if run.stop:
            raise KeyboardInterrupt
        run.stop = number
        print("stopping after this step; once more stops at once and loses this epoch's steps", flush=True)
    former = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; to go on after that: --resume --out {run.folder}") from error
    finally:
        for s, handler in former.items():
            signal.signal(s, handler)


def stop_if_asked(run, steps=1):
    """After a step of an epoch, or before its first (steps: 0): save and raise Stopped if a signal came."""
    if run.stop and run.state.epoch <= run.o.epochs:
        run.state.step += steps
        run.count_seconds()
        save(run)
        raise Stopped(run.stop, f"stopped in epoch {run.state.epoch}, {run.state.step} of its {run.o.steps} "
                                f"steps done; go on with: python genenv.py --resume --out {run.folder}")
