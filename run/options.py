"""The command line: from argv to Options, with one clear line for every mistake.

What of the paper this is: nothing. How it is run: genenv.main calls `parse_options`. The options
themselves, with their meaning and their defaults, stand in genenv.Options; a world may bring its own
(worlds/__init__.py), and they are options of the command line when that world is chosen.

Where it differs on purpose: there is no configuration language. Defaults come from Options, then
from the world, then from the preset or the resumed run, and what is given on the command line wins.
"""
import dataclasses
import inspect
import json
import math
import os
import re
from argparse import SUPPRESS, BooleanOptionalAction

from common.cli import Parser
from common.files import UserError
import curriculum
from models.loading import device_fault
from run import checkpoint
from run.presets import PRESETS
from worlds import load_world

CHOICES = {"variant": ("genenv", "random", *curriculum.WITHOUT_SIMULATOR),
           "kl_estimator": ("k1", "k2", "k3"), "scale": ("std", "none"),
           "aggregation": ("token", "sequence"),
           "p_hat_unit": ("task", "seed", "batch"), "filter_scope": ("", "task", "seed", "batch"),
           "env_update": ("rwr", "linear", "grpo", "none"), "dtype": ("auto", "bf16", "fp32"),
           "control": ("", "coin-agent", "coin-p-hat", "shuffled-r-env"), "quant": ("", "nf4")}
NAMED = {"alpha_schedule": "alpha_", "difficulty_reward": "reward_", "agent_reward": "agent_reward_",
         "seed_selection": "seeds_", "function_selection": "functions_"}  # options whose values are functions of curriculum.py
AT_LEAST_ONE = ("seed_tasks", "variations", "write_rounds", "steps", "rank", "max_task_tokens",
                "val_samples", "val_every", "max_response_tokens", "max_prompt_tokens",
                "inner_epochs", "env_batch", "env_kl_sample", "token_budget", "max_rows")
NOT_NEGATIVE = ("epochs", "threads", "agreement", "mini_batch", "env_updates", "env_passes",
                "env_age", "pool_age", "k_min", "beta", "lam", "agent_kl", "env_kl", "replay", "seed")
SHARES = ("base_share", "env_fresh", "success_at", "reward_noise")
POSITIVE = ("agent_lr", "env_lr", "temperature", "clip", "env_kl_cap")


def parser(Options, world=None) -> Parser:
    """An argument parser made from Options: name, type, default and the comment as help.

    world: a module whose own options are added, if it has any.
    """
    p = Parser(prog="genenv.py", description="GenEnv: an agent and a task simulator co-evolve.",
               argument_default=SUPPRESS, allow_abbrev=False)
    p.add_argument("--preset", help=f"a set of options: {', '.join(PRESETS)}; others override it")
    add_fields(p, Options)
    for name, (default, text, _) in getattr(world, "OPTIONS", {}).items():
        _add(p, name, type(default), default, f"of this world: {text}")
    return p


def add_fields(p, Options):
    """An option for every field of a dataclass; the comment beside each is its help text."""
    comments = dict(re.findall(r"^    (\w+): .*?# (.*)$", inspect.getsource(Options), re.MULTILINE))
    for f in dataclasses.fields(Options):
        if f.name != "world_options":
            _add(p, f.name, f.type, f.default, comments[f.name])


def _add(p, name, kind, default, text):
    flag, text = "--" + name.replace("_", "-"), f"{text} (default: {default!r})".replace("%", "%%")
    if kind is bool:
        p.add_argument(flag, action=BooleanOptionalAction, help=text)
    else:
        p.add_argument(flag, type=kind, help=text)


def parse_options(argv, Options):
    """Command line -> Options: defaults, then the world's, then the resumed run's, then the
    preset's, then what is given.

    Raises UserError for unknown options, values of the wrong kind, and options that a resumed run
    must not change.
    """
    name = _world_of(argv, Options)
    world = load_world(name)
    given = vars(parser(Options, world).parse_args(argv))
    preset = given.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}: choose from {', '.join(PRESETS)}")
    asked = {**PRESETS.get(preset, {}), **given}
    if PRESETS.get(preset, {}).get("world", name) != name:
        raise UserError(f"--preset {preset} is for --world {PRESETS[preset]['world']} and cannot "
                        f"be used in the world {name}: leave one of them out")
    own = {key: default for key, (default, _, _) in getattr(world, "OPTIONS", {}).items()}
    former = checkpoint.resumed_options(asked, own, Options) if given.get("resume") else \
        getattr(world, "DEFAULTS", {})
    values = {**own, **former, **asked}
    # what belongs to the world goes into one field of its own
    theirs = {key: values.pop(key) for key in own}
    o = check_options(Options(**values, world_options=theirs))
    if "alpha_end" in given and curriculum.sample_alphas(o, 0.25) == \
            curriculum.sample_alphas(o, 0.75):
        raise UserError(f"--alpha-end does nothing with --alpha-schedule {o.alpha_schedule}: leave "
                        "it out, or choose linear, cosine or step")
    return o


def _world_of(argv, Options) -> str:
    """Which world the command line names, itself, by its preset or by the run that goes on."""
    p = Parser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    for name in ("world", "preset", "out"):
        p.add_argument(f"--{name}")
    p.add_argument("--resume", action="store_true")
    known, _ = p.parse_known_args(argv)
    if "world" in known:
        return known.world
    if getattr(known, "resume", False) and getattr(known, "out", ""):
        return checkpoint.world_of(known.out) or Options.world
    return PRESETS.get(getattr(known, "preset", ""), {}).get("world", Options.world)


def check_options(o):
    """Raises UserError for the first option whose value cannot work; returns the options."""
    def need(ok, name, what):
        if not ok:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(o, name)!r}: {what}")
    for f in dataclasses.fields(o):
        need(f.type is not float or math.isfinite(getattr(o, f.name)), f.name, "must be finite")
    for name in ("alpha", "alpha_end"):
        need(0 < getattr(o, name) < 1, name, "must lie strictly between 0 and 1")
    need(o.G >= 2, "G", "a group needs at least 2 rollouts, with one there is no baseline")
    for name in AT_LEAST_ONE:
        need(getattr(o, name) >= 1, name, "must be at least 1")
    for name in NOT_NEGATIVE:
        need(getattr(o, name) >= 0, name, "must not be negative")
    for name in SHARES:
        need(0 <= getattr(o, name) <= 1, name, "must lie between 0 and 1")
    for name in POSITIVE:
        need(getattr(o, name) > 0, name, "must be greater than 0")
    need(o.seed < 2 ** 60, "seed", "must be below 2 ** 60")
    need(o.threads <= 1024, "threads", "more than 1024 threads are of no use")
    own_base = hasattr(load_world(o.world), "train_base") and not o.model
    need(own_base or not o.base_model, "base_model",
         "only a world that trains its own base model takes one, and none with --model")
    choices = {**CHOICES, **{name: tuple(curriculum.named(p)) for name, p in NAMED.items()}}
    for name, values in choices.items():
        need(getattr(o, name) in values, name, f"choose from {', '.join(filter(None, values))}")
    fault = device_fault(o.device)
    need(not fault, "device", fault)
    need(template_options(o) is not None, "chat_template_kwargs",
         'must be a JSON object, such as {"enable_thinking": false}')
    for name, (default, _, values) in getattr(load_world(o.world), "OPTIONS", {}).items():
        value = o.world_options[name]
        if values and value not in values:
            raise UserError(f"--{name.replace('_', '-')} is {value!r}: choose from "
                            f"{', '.join(map(str, values))}")
    curriculum.try_functions(o)
    return o


def template_options(o):
    """--chat-template-kwargs as a dictionary, or None if it is none."""
    try:
        value = json.loads(o.chat_template_kwargs or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def threads_of(o) -> int:
    """torch threads of a run: --threads, else the user's OMP_NUM_THREADS, else all cores that this
    process may use (taskset and Slurm give some of them)."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return o.threads or (int(given) if given.isdecimal() else 0) or allowed or 1
