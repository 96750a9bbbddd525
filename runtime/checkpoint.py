"""Stop at any moment, go on to the bit: run folders, checkpoints, signals.

What of the paper this is: nothing; it is what makes its runs trustworthy. A checkpoint is written
at the end of every epoch, and at the next step after SIGINT or SIGTERM. It holds both adapters,
both optimisers, every generator's state, what of the current epoch is done, and how long the
append-only files were. It is written beside its place, synced, then renamed: it is whole or absent.

How it is run: `python genenv.py --resume --out runs/000-genenv`. On resuming the files are cut back
to the lengths in the checkpoint (the rest moves to FILE.torn), the pools are read from them, and
the run continues as if nothing had happened: 2 + 2 epochs equal 4, bit for bit on one machine.

Where it differs on purpose from common practice: the reference policy needs no checkpoint, it is
the base with both adapters off and so cannot drift at a resume.
"""
import json
import os
import pickle
import re
import shutil
import signal
import tempfile
import time
import zipfile
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path

import torch

from curriculum import uses_length
from runtime import health
from data_pool import EnvRecord, Task, Trace, UserError, read_jsonl, set_torn_line_aside

FILES = ("metrics.jsonl", "samples.jsonl", "train.jsonl", "env.jsonl")
KEEP = 2  # checkpoints kept: the last, and the one before in case the last gets damaged
TEMPORARY = "config.json.tmp"
# options that a resumed run may change: the last two move memory and rounding, nothing else
FREE = {"out", "resume", "threads", "cache_dir", "token_budget", "grad_checkpoint"}


class Stopped(Exception):
    """The run was asked to stop and has saved everything; `signal` says by which signal."""

    def __init__(self, signal_number, message):
        super().__init__(message)
        self.signal = signal_number


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
    if not o.resume and folder.is_dir() and any(f.name != TEMPORARY for f in folder.iterdir()):
        what = "holds a run already: add --resume to go on with it" \
            if (folder / "config.json").is_file() else "is not empty"
        raise UserError(f"run folder {folder} {what}, or choose another --out")
    return folder


def create_folder(folder: Path, o):
    """Make the run folder and write config.json, whole or not at all. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TEMPORARY).write_text(json.dumps({**asdict(o), "resume": False}, indent=1))
        (folder / TEMPORARY).rename(folder / "config.json")
    except OSError as error:
        with suppress(OSError):  # leave nothing behind that would look like a run
            (folder / TEMPORARY).unlink(missing_ok=True)
            folder.rmdir()
        raise UserError(f"cannot write to run folder {folder}: {error.strerror}; "
                        "choose another --out") from None


def resumed_options(given: dict, preset: dict, Options) -> dict:
    """The saved options of the run in --out; refuses by name a changed option that matters."""
    if not given.get("out"):
        raise UserError("--resume needs --out: which run folder is to go on?")
    path = Path(given["out"]) / "config.json"
    if not path.is_file():
        raise UserError(f"nothing to resume: {path} does not exist")
    try:
        saved = json.loads(path.read_text())
        unknown = set(saved.keys()) - {f.name for f in fields(Options)}
    except (ValueError, AttributeError, RecursionError):
        raise UserError(f"{path} is damaged: it is not a JSON object") from None
    if unknown:
        raise UserError(f"{path} has an option this version does not know: {sorted(unknown)[0]}")
    for f in fields(Options):
        if f.name in saved and type(saved[f.name]) is not f.type \
                and not (f.type is float and type(saved[f.name]) is int):
            raise UserError(f"{path}: option {f.name} has the value {saved[f.name]!r}, "
                            f"which is no {f.type.__name__}")
    changed = {**preset, **given}
    free = FREE | (set() if uses_length(saved.get("alpha_schedule")) else {"epochs"})
    for name, value in changed.items():
        if name not in free and value != saved.get(name):
            raise UserError(f"--{name.replace('_', '-')} was {saved.get(name)!r} in this run and "
                            f"cannot become {value!r} now; start a new run in another --out")
    return saved


# ---------------------------------------------------------------------------------------------
# checkpoints


def save(run):
    """Write checkpoints/eEEEE-sSSS; whole or not at all. The two newest are kept.

    Raises UserError if the disk is full or read-only; the checkpoint before stays as it was.
    """
    root = run.folder / "checkpoints"
    try:
        run.train_pool.save()
        run.env_pool.save()
        root.mkdir(exist_ok=True)
        for torn in root.glob("tmp-*"):  # of runs that were killed while saving
            shutil.rmtree(torn)
        _write(run, root, root / f"e{run.part.t:04d}-s{run.part.step:03d}")
        for old in _checkpoints(run.folder)[:-KEEP]:
            shutil.rmtree(old)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise UserError(f"cannot save a checkpoint in {root} ({_reason(error)}): free some space, "
                        f"then go on with --resume --out {run.folder}") from None


def _write(run, root, final):
    """One checkpoint, written beside its place, synced, renamed; a failed one leaves nothing."""
    scratch = Path(tempfile.mkdtemp(dir=root, prefix="tmp-"))
    former = root / f"{scratch.name}-former"
    try:
        torch.save({
            "adapters": {name: [p.detach().cpu() for p in params]
                         for name, params in run.policy.params.items()},
            "optimizers": [run.agent_optimizer.state_dict(), run.env_optimizer.state_dict()],
            "generators": [run.rng.get_state(), run.sampler.get_state()]}, scratch / "state.pt")
        (scratch / "part.json").write_text(json.dumps({
            "part": _part_to_json(run.part), "success": run.success,
            "sizes": {name: _size(run.folder / name) for name in FILES}}))
        for path in [*scratch.iterdir(), scratch]:
            _sync(path)
        if final.is_dir():  # moved away in one step: half deleted it would look like a checkpoint
            final.rename(former)
        scratch.rename(final)
        _sync(root)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def load(run):
    """Put adapters, optimisers, generators and the account of the epoch back into `run`, then cut
    the append-only files back to what the checkpoint knows. Nothing is cut before all is checked.

    A run that was killed before its first checkpoint starts from the beginning. Raises UserError
    naming the file that is missing, damaged, shorter than it was, or of another shape.
    """
    folders = _checkpoints(run.folder)
    saved = _read_part(folders[-1] / "part.json", type(run.part)) if folders else None
    known = saved["sizes"] if saved else dict.fromkeys(FILES, 0)
    for name, size in known.items():
        if _size(run.folder / name) < size:
            raise UserError(f"{run.folder / name} is shorter than its checkpoint says: it was cut "
                            "or edited; restore it, or start a new run in another --out")
    if saved:
        _read_state(run, folders[-1] / "state.pt")
        run.part, run.success = saved["part"], saved["success"]
    _rewind(run.folder, known)
    if not saved:
        print(f"{run.folder} has no checkpoint yet: starting from the beginning")
        return
    run.history = _history(run.folder / "metrics.jsonl", run.part.t)
    print(f"resumed {run.folder} at epoch {run.part.t}, step {run.part.step}")


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
                os.fsync(file.fileno())  # set aside for certain before it goes
            os.truncate(path, size)
            lines = data.count(b"\n")
            print(f"{path}: {lines} lines written after the checkpoint set aside in "
                  f"{name}.torn; that work is done again")


def _history(path, epochs: int) -> list:
    """The records of metrics.jsonl, one per finished epoch."""
    history = read_jsonl(path)
    needed = {"epoch", "warnings", *health.READS}
    if [r.get("epoch") for r in history] != list(range(epochs)) \
            or any(needed - set(r) for r in history):
        raise UserError(f"{path} is not what this run wrote: restore it, or start a new run in "
                        "another --out")
    return history


def _read_state(run, path):
    """Adapters, optimisers and generators of a checkpoint into `run`."""
    optimizers = run.agent_optimizer, run.env_optimizer
    try:
        with zipfile.ZipFile(path) as file:  # what torch.save writes; its checksums find bad bits
            if broken := file.testzip():
                raise ValueError(f"the checksum of {broken} is wrong")
        state = torch.load(path, weights_only=True, map_location="cpu")
        for name, params in run.policy.params.items():
            _same_shapes(params, state["adapters"][name])
        for optimizer, value in zip(optimizers, state["optimizers"], strict=True):
            params = optimizer.param_groups[0]["params"]
            moments = [value["state"][i] for i in sorted(value["state"])]
            for key in ("exp_avg", "exp_avg_sq") if moments else ():  # torch does not look at them
                _same_shapes(params, [m[key] for m in moments])
            optimizer.load_state_dict(value)
        run.rng.set_state(state["generators"][0])
        run.sampler.set_state(state["generators"][1])
        with torch.no_grad():
            for name, params in run.policy.params.items():
                for p, value in zip(params, state["adapters"][name]):
                    p.copy_(value)
    except (OSError, RuntimeError, LookupError, ValueError, EOFError, TypeError, AttributeError,
            pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from None


def _same_shapes(params, tensors):
    """ValueError unless there is a tensor of the right shape for every parameter."""
    if [tuple(p.shape) for p in params] != [tuple(t.shape) for t in tensors]:
        raise ValueError("tensors of other shapes or another --rank")


def _checkpoints(folder):
    """Folders of all checkpoints, the newest last: e0012-s003 by its numbers."""
    found = [p for p in (folder / "checkpoints").glob("e*-s*") if p.is_dir()]
    return sorted(found, key=lambda p: [int(n) for n in re.findall(r"[0-9]+", p.name)])


def _read_part(path: Path, Part) -> dict:
    """part.json with its "part" as a Part; every field is there and of its type."""
    try:
        saved = json.loads(path.read_text())
        part, sizes = saved["part"], saved["sizes"]
        wrong = [f.name for f in fields(Part) if not _fits(part[f.name], f.type)]
        wrong += [name for name in FILES if not (_fits(sizes[name], int) and sizes[name] >= 0)]
        if wrong or not _fits(saved["success"], float):
            raise ValueError(f"{(wrong or ['success'])[0]} has a wrong value")
        return {"part": _part_from_json(part, Part), "success": saved["success"],
                "sizes": {name: sizes[name] for name in FILES}}
    except KeyError as error:
        raise _damaged(path, ValueError(f"{error} is missing")) from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, error) from None


def _fits(value, kind) -> bool:
    """Whether a JSON value may stand for a field of a type."""
    kinds = {float: (int, float), Counter: dict}.get(kind, kind)
    return isinstance(value, kinds) and not isinstance(value, bool)


def _damaged(path, error) -> UserError:
    others = len(list(path.parent.parent.glob("e*-s*"))) > 1
    then = "go on from the checkpoint before it" if others else \
        "start from the beginning (there is no checkpoint before it)"
    return UserError(f"checkpoint file {path} is damaged or missing ({_reason(error)}); remove the "
                     f"folder {path.parent} to {then}")


def _reason(error) -> str:
    """An exception in at most 120 characters on one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.splitlines() or [type(error).__name__])[0][:120]


def _part_to_json(part) -> dict:
    return {**asdict(part), "invalid": dict(part.invalid)}


def _part_from_json(saved: dict, Part):
    part = Part(**{**saved, "invalid": Counter(saved["invalid"])})
    if not all(type(n) is int for n in part.invalid.values()):
        raise ValueError("invalid has a wrong value")
    part.tries = [(Task(**task), float(p), [Trace(**e) for e in es]) for task, p, es in part.tries]
    part.fresh = [EnvRecord(**r) for r in part.fresh]
    part.replays = [tuple(r) for r in part.replays]
    return part


def _size(path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _sync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------
# signals


@contextmanager
def stop_signals(run):
    """Within: SIGINT and SIGTERM only note that the run is to stop; a second one kills at once."""
    def note(number, frame):
        if run.stop:
            raise KeyboardInterrupt
        run.stop = number
        print("stopping after this step; once more to stop at once", flush=True)
    former = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, handler in former.items():
            signal.signal(s, handler)


def stop_if_asked(run, started):
    """After a step: save and raise Stopped if a signal came. started: when the epoch went on."""
    if not run.stop:
        return
    run.part.step += 1
    run.part.seconds += time.time() - started
    save(run)
    raise Stopped(run.stop, f"stopped in epoch {run.part.t} after step {run.part.step}; go on "
                            f"with: python genenv.py --resume --out {run.folder}")
