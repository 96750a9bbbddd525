"""Record what a run began with: options, code, task files, models and kind of device.

Usage: a checkpoint holds `origin(o, policy)`; on resume, `check_origin` compares it with a new one.
scripts/compare.py distinguishes settings by the `code_versions` in config.json. A warm start that
is resumed compares its `inputs` and the hashes of its world's files.

Deviations: a run may be resumed with edited code, so that a mistake in a world or a fork can be
fixed.
"""
import hashlib
import inspect
import os
import re
from pathlib import Path

import curriculum
from errors import UserError
from model.loading import weights_of
from support.options import MAY_CHANGE, NAMED, flat
from worlds import load_world, world_names

PROJECT = Path(__file__).resolve().parents[1]
# the files that make up the method, except curriculum.py, which code_versions splits up
METHOD = "genenv.py", "interaction.py", "policy.py", "grpo.py", "rwr.py", "data_pool.py"
NOT_COMPARED = {*MAY_CHANGE, "code"}  # options that may differ on resume


# ---------------------------------------------------------------------------------------------
# code


def code_versions(o) -> dict:
    """Return a run's code as {file, or function of curriculum.py: its hash}.

    If one of them was edited before the run was resumed, its former hashes come first, as in
    "1a2b3c, then 4d5e6f". Functions of curriculum.py that the options could name but do not name
    are left out, because adding one changes no run.
    """
    hashes = file_hashes([*METHOD, *world_files(o.world)])
    rest = inspect.getsource(curriculum)
    for option, prefix in NAMED.items():
        for name, function in curriculum.functions(prefix).items():
            code = inspect.getsource(function)
            rest = rest.replace(code, "")
            if name == getattr(o, option):
                hashes[prefix + name] = short_hash(code)
    # ignore white space: blank lines remain where a function was cut out
    hashes["curriculum.py"] = short_hash("".join(rest.split()))

    for name, digest in hashes.items():
        former = o.code.get(name, digest)
        if not former.endswith(digest):
            hashes[name] = f"{former}, then {digest}"
    return hashes


def file_hashes(names) -> dict:
    """Return {file: its hash}. names: paths relative to the project's folder."""
    return {name: short_hash((PROJECT / name).read_text()) for name in names}


def short_hash(text: str) -> str:
    """Return the first six hex digits of a text's hash, short enough to compare by eye."""
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def world_files(name: str) -> list:
    """Return the files of worlds/ on which a world's results may depend.

    probe.py, template.py and the files of other worlds are left out unless the world imports them.
    """
    code = Path(inspect.getfile(load_world(name))).read_text()
    others, paths = {"probe", "template", *world_names()} - {name}, []
    for path in sorted(PROJECT.glob("worlds/**/*.py")):
        is_imported = re.search(rf"import.*\b{path.stem}\b", code)
        if path.stem not in others or is_imported:
            paths.append(str(path.relative_to(PROJECT)))
    return paths


# ---------------------------------------------------------------------------------------------
# files and models


def inputs(o) -> dict:
    """Return {task file or model named by an option: its hash}."""
    hashes = {}
    for value in flat(o).values():
        if isinstance(value, str) and os.path.isfile(value):
            hashes[value] = hashlib.sha256(Path(value).read_bytes()).hexdigest()
    for model in (o.model, o.env_model):
        if model:
            hashes[model] = weights_of(model)
    return hashes


# ---------------------------------------------------------------------------------------------
# all of it


def origin(o, policy) -> dict:
    """Return what a run begins with. policy: the agent's.

    Only "fixed" must stay the same on resume.
    """
    fixed = {"the kind of device": policy.device.type, **inputs(o)}
    if not o.model:
        # the world comes with this model; an edited world may come with a different one
        fixed["the world's base model"] = weights_of(policy.source)
    for name, value in flat(o).items():
        if name not in NOT_COMPARED:
            fixed[f"{name} in config.json"] = value
    return {"fixed": fixed, "code": o.code, "epochs": o.epochs}


def check_origin(then: dict, now: dict, schedule: str):
    """Raise UserError if something fixed has changed since the run began.

    Print which code was edited, and a warning if a new --epochs may change the course of alpha.
    then, now: results of `origin`. schedule: the value of --alpha-schedule.
    """
    for name, value in then["fixed"].items():
        present = now["fixed"].get(name)
        if present != value:
            raise UserError(f"{name} was {value!s:.20} when this run began, now it is "
                            f"{present!s:.20}: restore it, or start a new run")
    changes = [name for name, hashes in now["code"].items() if then["code"].get(name) != hashes]
    if changes:
        print(f"edited since this run began: {', '.join(changes)}")
    if now["epochs"] != then["epochs"] and schedule != "constant":
        print(f"--epochs was {then['epochs']} and is {now['epochs']}: if --alpha-schedule "
              f"{schedule} depends on the length of the run, alpha changes course here")
