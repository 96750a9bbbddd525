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
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path

import torch

from data_pool import EnvRecord, Task, Trace, UserError, read_jsonl, set_torn_line_aside

FILES = ("metrics.jsonl", "samples.jsonl", "train.jsonl", "env.jsonl")
KEEP = 2  # checkpoints kept: the last, and the one before in case the last gets damaged
TEMPORARY = "config.json.tmp"
FREE = {"out", "resume", "threads", "cache_dir"}  # options that a resumed run may change


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
    except (ValueError, AttributeError):
        raise UserError(f"{path} is damaged: it is not a JSON object") from None
    if unknown:
        raise UserError(f"{path} has an option this version does not know: {sorted(unknown)[0]}")
    for f in fields(Options):
        if f.name in saved and type(saved[f.name]) is not f.type \
                and not (f.type is float and type(saved[f.name]) is int):
            raise UserError(f"{path}: option {f.name} has the value {saved[f.name]!r}, "
                            f"which is no {f.type.__name__}")
    changed = {**preset, **given}
    free = FREE | ({"epochs"} if saved.get("alpha_schedule") in ("constant", "adaptive") else set())
    for name, value in changed.items():
        if name not in free and value != saved.get(name):
            raise UserError(f"--{name.replace('_', '-')} was {saved.get(name)!r} in this run and "
                            f"cannot become {value!r} now; start a new run in another --out")
    return saved


# ---------------------------------------------------------------------------------------------
# checkpoints


def save(run):
    """Write checkpoints/eEEEE-sSSS; whole or not at all. The two newest are kept."""
    run.train_pool.save()
    run.env_pool.save()
    part = run.part
    root = run.folder / "checkpoints"
    root.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=root, prefix="tmp-"))
    torch.save({
        "adapters": {name: [p.detach().cpu() for p in ps] for name, ps in run.policy.params.items()},
        "optimizers": [run.agent_optimizer.state_dict(), run.env_optimizer.state_dict()],
        "generators": [run.rng.get_state(), run.sampler.get_state()]}, scratch / "state.pt")
    (scratch / "part.json").write_text(json.dumps({
        "part": _part_to_json(part), "success": run.success,
        "sizes": {name: _size(run.folder / name) for name in FILES}}))
    for path in [*scratch.iterdir(), scratch]:
        _sync(path)
    final = root / f"e{part.t:04d}-s{part.step:03d}"
    shutil.rmtree(final, ignore_errors=True)
    scratch.rename(final)
    _sync(root)
    for old in _checkpoints(run.folder)[:-KEEP]:
        shutil.rmtree(old)
    for torn in root.glob("tmp-*"):
        shutil.rmtree(torn, ignore_errors=True)


def rewind(folder: Path):
    """Cut the append-only files back to what the last checkpoint knows; tell the user."""
    known = _read_part(folder)["sizes"] if _checkpoints(folder) else {}
    for name in FILES:
        path, size = folder / name, known.get(name, 0)
        if message := set_torn_line_aside(path):
            print(message)
        if _size(path) < size:
            raise UserError(f"{path} is shorter than its checkpoint says: it was cut or edited; "
                            "restore it, or start a new run in another --out")
        if _size(path) > size:  # written after the checkpoint; that work is done again
            data = path.read_bytes()
            with open(path.with_name(name + ".torn"), "ab") as file:
                file.write(data[size:])
            os.truncate(path, size)


def load(run):
    """Put adapters, optimisers, generators and the account of the epoch back into `run`.

    A run that was killed before its first checkpoint starts from the beginning.
    """
    if not _checkpoints(run.folder):
        print(f"{run.folder} has no checkpoint yet: starting from the beginning")
        return
    saved, folder = _read_part(run.folder), _checkpoints(run.folder)[-1]
    try:
        state = torch.load(folder / "state.pt", weights_only=True)
        for name, params in run.policy.params.items():
            with torch.no_grad():
                for p, value in zip(params, state["adapters"][name], strict=True):
                    p.copy_(value)
        for optimizer, value in zip((run.agent_optimizer, run.env_optimizer), state["optimizers"]):
            optimizer.load_state_dict(value)
        run.rng.set_state(state["generators"][0])
        run.sampler.set_state(state["generators"][1])
    except (OSError, RuntimeError, KeyError, ValueError, EOFError, TypeError) as error:
        raise _damaged(folder / "state.pt", error) from None
    run.part = _part_from_json(saved["part"], type(run.part))
    run.success = saved["success"]
    run.history = read_jsonl(run.folder / "metrics.jsonl")
    print(f"resumed {run.folder} at epoch {run.part.t}, step {run.part.step}")


def _checkpoints(folder):
    return sorted(p for p in (folder / "checkpoints").glob("e*-s*") if p.is_dir())


def _read_part(folder: Path) -> dict:
    path = _checkpoints(folder)[-1] / "part.json"
    try:
        saved = json.loads(path.read_text())
        if not {"part", "success", "sizes"} <= set(saved):
            raise ValueError("a field is missing")
        return saved
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path, error) from None


def _damaged(path, error) -> UserError:
    reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return UserError(f"checkpoint file {path} is damaged or missing ({reason}); remove the folder "
                     f"{path.parent} to go on from the checkpoint before it")


def _part_to_json(part) -> dict:
    return {**asdict(part), "invalid": dict(part.invalid)}


def _part_from_json(saved: dict, Part):
    part = Part(**{**saved, "invalid": Counter(saved["invalid"])})
    part.tries = [(Task(**task), p, [Trace(**e) for e in es]) for task, p, es in part.tries]
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
    """After a step: save and raise Stopped if a signal came. `started` is when the epoch went on."""
    if not run.stop:
        return
    run.part.step += 1
    run.part.seconds += time.time() - started
    save(run)
    raise Stopped(run.stop, f"stopped in epoch {run.part.t} after step {run.part.step}; go on "
                            f"with: python genenv.py --resume --out {run.folder}")
