"""Stop at any moment, go on to the bit: run folders and their locks, checkpoints, signals.

What of the paper this is: nothing; it is what makes its runs trustworthy. A checkpoint is written
at the end of every epoch, and at the next step after SIGINT or SIGTERM. It holds both adapters,
both optimisers, every generator's state, what of the current epoch is done, and how long the
append-only files were. It is written beside its place, synced, then renamed: it is whole or absent.

How it is run: `python genenv.py --resume --out runs/000-genenv`. On resuming the files are cut back
to the lengths in the checkpoint (the rest moves to FILE.torn), the pools are read from them, and
the run continues as if nothing had happened: 2 + 2 epochs equal 4, bit for bit on one machine. It
goes on as well on another kind of device or with another --max-rows, and says that the bits differ.
A run folder is one program's at a time: the lock goes when that program dies, also by SIGKILL.

Where it differs on purpose from common practice: the reference policy needs no checkpoint, it is
the base with both adapters off and so cannot drift at a resume.
"""
import errno
import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import tempfile
import time
import zipfile
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

from common.cli import Stopped
from common.files import UserError, read_jsonl, set_torn_line_aside
from curriculum import uses_length
from data_pool import EnvRecord, Task, Trace

FILES = ("metrics.jsonl", "samples.jsonl", "train.jsonl", "env.jsonl")
KEEP = 2  # checkpoints kept: the last, and the one before in case the last gets damaged
TEMPORARY, LOCK = "config.json.tmp", "lock"
# options that a resumed run may change: these move memory and rounding, nothing else
FREE = {"gate", "out", "resume", "threads", "token_budget", "grad_checkpoint", "verbose"}
OTHER_BITS = {"max_rows", "device"}  # and these also the random numbers that a rollout gets
FORMAT = 1  # of checkpoints and records: raise it when a run of before could no longer go on


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
    """UserError if a folder holds anything but what a run leaves that never began."""
    if folder.is_dir() and any(f.name not in (TEMPORARY, LOCK) for f in folder.iterdir()):
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
    """config.json of a run, whole or not at all. Raises UserError where that cannot be."""
    try:
        (folder / TEMPORARY).write_text(json.dumps({**asdict(o), "resume": False}, indent=1))
        (folder / TEMPORARY).rename(folder / "config.json")
    except OSError as error:
        with suppress(OSError):  # leave nothing behind that would look like a run
            (folder / TEMPORARY).unlink(missing_ok=True)
            if not (folder / "config.json").exists():
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()
        raise _unwritable(folder, error) from None


def lock_folder(folder: Path):
    """The run folder's lock, an open file: it is held until that is closed or the process is dead.

    Raises UserError if another program is at work there. Where the system or the file system has no
    such locks, one line says that nothing guards the folder.
    """
    path, missing = folder / LOCK, fcntl is None
    try:
        handle = open(path, "ab")
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        if fcntl:
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


def check_adapter_folder(path, name: str, rank: int):
    """UserError unless `path`, the value of option `name`, is a folder with a LoRA adapter of this
    rank in PEFT format. Nothing is checked where it is empty."""
    if not path:
        return
    folder, adapter = Path(path), name.partition("_")[0]
    missing = [f for f in ("adapter_config.json", "adapter_model.safetensors")
               if not (folder / f).is_file()]
    if not folder.is_dir():
        what = "there is no such folder"
    elif missing:
        what = f"it has no {missing[0]}"
    else:
        what = _unfit(folder / "adapter_config.json", rank)
    if what:
        raise UserError(f"--{name.replace('_', '-')} {path}: {what}; name a folder in PEFT format, "
                        f"as a run writes it to adapters/{adapter}")


def _unfit(config: Path, rank: int) -> str:
    """Why the adapter of a PEFT configuration cannot be a run's, or ""."""
    try:
        saved = json.loads(config.read_text())
        if saved["peft_type"] != "LORA":
            return f"it holds {saved['peft_type']}, not LORA"
        return "" if saved["r"] == rank else f"its rank is {saved['r']} and --rank is {rank}"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return f"{config.name} is damaged"


def world_of(config: Path) -> str:
    """The world of a run by its config.json, "" if that does not say."""
    try:
        return str(json.loads(config.read_text()).get("world", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""  # saved_options says what is wrong


def resumed_options(asked: dict, own: dict, defaults: dict) -> dict:
    """The saved options of the run in --out; refuses by name a changed option that matters.

    asked: of the command line and its preset; own: the world's options with their defaults. Both,
    and what comes back, have the world's options beside the others.
    """
    if not asked.get("out"):
        raise UserError("--resume needs --out: which run folder is to go on?")
    path = Path(asked["out"]) / "config.json"
    if not path.is_file():
        raise UserError(f"nothing to resume: {path} does not exist")
    defaults = defaults | own
    saved = saved_options(path, defaults, "go on with the version that made it, or start a new run "
                          "in another --out")
    former = {**defaults, **saved}  # older runs have fewer
    free = FREE | OTHER_BITS | (set() if uses_length(former["alpha_schedule"]) else {"epochs"})
    changes = {name: value for name, value in asked.items() if value != former.get(name)}
    says = {name: f"--{name.replace('_', '-')} was {former.get(name)!r} in this run and"
            for name in changes}
    for name in sorted(changes.keys() - free):
        raise UserError(f"{says[name]} cannot become {changes[name]!r} now; start a new run in "
                        "another --out")
    for name in sorted(changes.keys() & OTHER_BITS):
        print(f"{says[name]} is {changes[name]!r} now: it goes on, but no longer to the bit")
    return former


def saved_options(path, defaults: dict, advice: str) -> dict:
    """The options in a config.json, those of the world beside the others. Raises UserError for a
    damaged file, a value of another kind, and, with the advice, an option that is not in `defaults`.
    """
    try:
        saved = json.loads(Path(path).read_text())
        saved.update(saved.pop("world_options", {}))
        unknown = sorted(saved.keys() - defaults.keys())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise UserError(f"{path} is damaged: it is not a JSON object") from None
    if unknown:
        raise UserError(f"{path} has an option this version does not know ({', '.join(unknown)}): "
                        f"{advice}")
    for name, value in saved.items():
        kind = type(defaults[name])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise UserError(f"{path}: option {name} has the value {value!r}, which is no "
                            f"{kind.__name__}")
    return saved


# ---------------------------------------------------------------------------------------------
# checkpoints


def is_complete(o) -> bool:
    """Whether the run that is to go on has nothing left to do; if so, says it. Reads names and
    dates alone. Raises UserError if more epochs are done than asked for."""
    folder = Path(o.out)
    newest = _checkpoints(folder)[-1:]
    if not newest:
        return False
    epoch, step = map(int, re.findall(r"[0-9]+", newest[0].name))
    done = epoch - (step == 0)  # e0004-s000 is the end of epoch 3; e0004-s002 lies in epoch 4
    if done > o.epochs:
        raise UserError(f"--epochs is {o.epochs}: {folder} has come to epoch {done}; nothing was "
                        "changed")
    report = folder / "report.html"  # the last that a run writes
    complete = done == o.epochs and step == 0 and report.is_file() \
        and report.stat().st_mtime >= (newest[0] / "epoch.json").stat().st_mtime
    if complete:
        print(f"{folder} is complete: {done} epochs are done, nothing was changed; more --epochs "
              "may go on with it")
    return complete


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
        _write(run, root, root / f"e{run.state.epoch:04d}-s{run.state.step:03d}")
        for old in _checkpoints(run.folder)[:-KEEP]:
            shutil.rmtree(old)
    except OSError as error:
        raise UserError(f"cannot save a checkpoint in {root} ({_reason(error)}): free some space, "
                        f"then go on with --resume --out {run.folder}") from None


def _write(run, root, final):
    """One checkpoint, written beside its place, synced, renamed; a failed one leaves nothing."""
    import torch  # here and not above: options and --help are read without it
    scratch = Path(tempfile.mkdtemp(dir=root, prefix="tmp-"))
    former = root / f"{scratch.name}-former"
    try:
        (scratch / "epoch.json").write_text(json.dumps({
            "format": FORMAT, "epoch_state": _epoch_to_json(run.state), "success": run.last_success,
            "sizes": {name: _size(run.folder / name) for name in FILES},
            "sha256": {**run.sources, **{name: sha256(run.folder / name) for name in FILES}}}))
        data = io.BytesIO()  # written by torch itself a full disk would be "unexpected pos"
        torch.save({
            "adapters": {name: [p.detach().cpu() for p in params]
                         for name, params in run.policy.params.items()},
            "optimizers": [run.agent_optimizer.state_dict(), run.env_optimizer.state_dict()],
            "generators": [run.rng.get_state(), run.sampler.get_state()],
            "device": run.sampler.device.type,
            "epoch": sha256(scratch / "epoch.json")}, data)
        (scratch / "state.pt").write_bytes(data.getbuffer())
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
    newest = _checkpoints(run.folder)[-1:]
    saved, state = _read(newest[0]) if newest else (None, None)
    known = saved["sizes"] if saved else dict.fromkeys(FILES, 0)
    for name, size in known.items():
        if _size(run.folder / name) < size:
            raise UserError(f"{run.folder / name} is shorter than its checkpoint says: it was cut "
                            "or edited; restore it, or start a new run in another --out")
    if saved:
        here = {**run.sources, **{name: sha256(run.folder / name, known[name]) for name in FILES}}
        for name, digest in saved["sha256"].items():
            if here.get(name) != digest:
                path = run.folder / name if name in FILES else name
                raise UserError(f"{path} is not what this run read or wrote: restore it, or start "
                                "a new run in another --out")
        run.state = _epoch_from_json(saved["epoch_state"], type(run.state))
        run.last_success = saved["success"]
        _restore(run, newest[0] / "state.pt", state)
    _rewind(run.folder, known)
    if not saved:
        print(f"{run.folder} has no checkpoint yet: starting from the beginning")
        return
    run.history = read_jsonl(run.folder / "metrics.jsonl")
    print(f"resumed {run.folder} at epoch {run.state.epoch}, step {run.state.step}")


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


def _read(folder: Path):
    """(epoch.json, state.pt) of a checkpoint: both as they were written, to the bit, or UserError."""
    import torch
    path = folder / "epoch.json"
    try:
        saved = json.loads(path.read_text())
        if saved.get("format") != FORMAT:
            raise UserError(f"{path} is damaged or of another version: go on with that version, or "
                            "start a new run in another --out")
        path = folder / "state.pt"
        with zipfile.ZipFile(path) as file:  # what torch.save writes; its checksums find bad bits
            if broken := file.testzip():
                raise ValueError(f"the checksum of {broken} is wrong")
        state = torch.load(path, weights_only=True, map_location="cpu")
        if state["epoch"] != sha256(folder / "epoch.json"):
            raise ValueError("epoch.json is not the one that was written with it")
        return saved, state
    except (OSError, RuntimeError, LookupError, ValueError, EOFError, TypeError, AttributeError,
            pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from None


def _restore(run, path, state):
    """Adapters, optimisers and generators of a checkpoint into `run`."""
    for name, params in run.policy.params.items():  # the model may have been replaced
        if [p.shape for p in params] != [t.shape for t in state["adapters"][name]]:
            raise _damaged(path, ValueError("its adapters do not fit this model"))
    for name, params in run.policy.params.items():
        for p, value in zip(params, state["adapters"][name]):
            p.data.copy_(value)
    for optimizer, value in zip((run.agent_optimizer, run.env_optimizer), state["optimizers"]):
        optimizer.load_state_dict(value)
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


def _checkpoints(folder):
    """Folders of all checkpoints, the newest last: e0012-s003 by its numbers."""
    found = [p for p in (folder / "checkpoints").glob("e*-s*") if p.is_dir()]
    return sorted(found, key=lambda p: [int(n) for n in re.findall(r"[0-9]+", p.name)])


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


def _epoch_to_json(state) -> dict:
    return {**asdict(state), "invalid": dict(state.invalid)}


def _epoch_from_json(saved: dict, EpochState):
    state = EpochState(**{**saved, "invalid": Counter(saved["invalid"])})
    state.attempts = [(Task(**task), p, [Trace(**e) for e in es])
                      for task, p, es in state.attempts]
    state.records = [EnvRecord(**r) for r in state.records]
    state.replays = [tuple(r) for r in state.replays]
    return state


def _size(path) -> int:
    return path.stat().st_size if path.is_file() else 0


def sha256(path, size=None) -> str:
    """Hash of a file, or of its first `size` bytes; of one that is not there, of nothing."""
    data = Path(path).read_bytes()[:size] if Path(path).is_file() else b""
    return hashlib.sha256(data).hexdigest()


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
            raise KeyboardInterrupt("--resume goes on from the last checkpoint")
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
    state = run.state
    state.step += 1
    state.seconds += time.perf_counter() - started
    save(run)
    raise Stopped(run.stop, f"stopped in epoch {state.epoch} after step {state.step}; go on "
                            f"with: python genenv.py --resume --out {run.folder}")
