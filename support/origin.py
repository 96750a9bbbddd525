"""What a run began with: its options, its code, its files of tasks, its models, its kind of device.

Usage: a checkpoint holds `origin(run)`, and on resuming `check_origin` compares it with what is
there then. config.json holds `code_versions`, by which scripts/compare.py tells settings apart. A
warm start compares `inputs` and the hashes of its world's files.

Deviations: edited code does not stop a run, as a mistake in a world or in a fork may be mended.
"""
import hashlib
import inspect
import re
from pathlib import Path

import curriculum
from errors import UserError
from model.loading import model_digest, tensors_digest
from support.options import MAY_CHANGE, NAMED, flat

PROJECT = Path(__file__).resolve().parents[1]
# files whose constants and functions are the method; curriculum.py is taken apart below
METHOD = ("genenv.py", "interaction.py", "policy.py", "grpo.py", "rwr.py", "data_pool.py",
          "worlds/__init__.py")
NOT_COMPARED = {*MAY_CHANGE, "code"}  # options


# ---------------------------------------------------------------------------------------------
# code


def code_versions(o) -> dict:
    """Return {file of the method or the world, or function of curriculum.py: its hashes, the oldest
    first} of a run: several if it was edited between a stop and a resume. Functions of
    curriculum.py that no option names do not count: writing another one changes no run."""
    hashes = file_hashes([*METHOD, *world_files(o.world)])
    rest = inspect.getsource(curriculum)
    for option, prefix in NAMED.items():
        for name, function in curriculum.functions(prefix).items():
            code = inspect.getsource(function)
            rest = rest.replace(code, "")
            if name == getattr(o, option):
                hashes[prefix + name] = short_hash(code)
    hashes["curriculum.py"] = short_hash("".join(rest.split()))  # blank lines may stay behind

    versions = {}
    for name, digest in hashes.items():
        versions[name] = list(o.code.get(name, []))
        if versions[name][-1:] != [digest]:
            versions[name].append(digest)
    return versions


def file_hashes(names) -> dict:
    """Return {file of the project: its hash}, wherever the project is started from."""
    return {name: short_hash((PROJECT / name).read_text()) for name in names}


def short_hash(text: str) -> str:
    """Return six hex digits, which a person can compare."""
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def world_files(name: str) -> list:
    """Return the file of a world and those of worlds/ that its import lines name, or theirs."""
    paths = {path.stem: path for path in PROJECT.glob("worlds/**/*.py")}
    files, names = set(), [name]
    while names:
        path = paths.get(names.pop())
        if path and path not in files:
            files.add(path)
            lines = re.findall(r"^ *(?:from|import) worlds.*", path.read_text(), re.MULTILINE)
            names += [word for word in re.findall(r"\w+", " ".join(lines)) if word in paths]
    return sorted(str(path.relative_to(PROJECT)) for path in files)


# ---------------------------------------------------------------------------------------------
# files and models


def inputs(o) -> dict:
    """Return {file of tasks, or model, that an option names: its hash}."""
    hashes = {}
    for value in (o.base_tasks, o.validation_tasks, o.teacher_tasks, *o.world_options.values()):
        if isinstance(value, str) and Path(value).is_file():
            hashes[value] = hashlib.sha256(Path(value).read_bytes()).hexdigest()
    for model in (o.model, o.env_model):
        if model:
            hashes[model] = model_digest(model)
    return hashes


def base_digest(policy) -> str:
    """Return a hash of the weights of a base model that no option names: a world that was edited
    may train another one."""
    return tensors_digest((name, weights) for name, weights in policy.lm.named_parameters()
                          if "lora_" not in name)


# ---------------------------------------------------------------------------------------------
# all of it


def origin(o, policy) -> dict:
    """Return what a run begins with: what has to stay, and what may change. policy: the agent's."""
    fixed = {"the kind of device": policy.device.type, **inputs(o)}
    if not o.model:
        fixed["the world's base model"] = base_digest(policy)
    for name, value in flat(o).items():
        if name not in NOT_COMPARED:
            fixed[f"{name} in config.json"] = value
    return {"fixed": fixed, "code": o.code, "epochs": o.epochs}


def check_origin(then: dict, now: dict, schedule: str):
    """Raise UserError if a run did not begin with what is there now. Print which code was edited,
    and whether the schedule may bend. then, now: as `origin` returns them."""
    for name, value in then["fixed"].items():
        present = now["fixed"].get(name)
        if present != value:
            raise UserError(f"{name} was {value!s:.20} when this run began and is {present!s:.20}: "
                            "restore it, or start a new run")
    edited = [name for name, hashes in now["code"].items() if then["code"].get(name) != hashes]
    if edited:
        print(f"edited since this run began: {', '.join(edited)}")
    if now["epochs"] != then["epochs"] and schedule != "constant":
        print(f"--epochs was {then['epochs']} and is {now['epochs']}: if --alpha-schedule "
              f"{schedule} follows the length of the run, alpha leaves its former course here")
