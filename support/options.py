"""The command line: from argv to Options, with one clear line for every mistake.

What of the paper this is: nothing. How it is run: commands/__init__.py calls `parse_options`.
The options, with their meaning and their defaults, are the fields of `Options`. A world may bring
options of its own (worlds/__init__.py): they are on the command line when that world is chosen.
Nothing here needs torch, so that --help and a mistake are answered at once.

Where it differs on purpose: there is no configuration language. Defaults come from Options, then
from the world, then from the preset or the resumed run, and what is given on the command line wins.
"""
import dataclasses
import inspect
import json
import os
import re
import sys
from argparse import SUPPRESS, BooleanOptionalAction, RawDescriptionHelpFormatter
from dataclasses import dataclass, field
from pathlib import Path

from support.cli import Parser
from support.files import UserError, choose
import curriculum
from support.presets import PRESETS
from worlds import load_world, world_names


@dataclass(frozen=True)
class Options:
    """Every option of a run; the comment beside each is its --help text."""
    # the run
    out: str = ""                     # run folder; empty: the next free runs/NNN-VARIANT
    resume: bool = False              # go on with the run in --out from its last checkpoint
    variant: str = "genenv"           # genenv; random: simulator as is; static, teacher, base: none
    world: str = "ladder"             # domain, a module of worlds/
    seed: int = 0                     # seeds adapters, sampling and every choice of the loop
    threads: int = 0                  # torch threads; 0 = OMP_NUM_THREADS if set, else all cores
    verbose: bool = False             # also print the proof of training in every epoch
    # models
    model: str = ""                   # local folder, hub name or .gguf file of a chat model
    env_model: str = ""               # the simulator's own model; empty: the agent's, one base
    base_model: str = ""              # embedded worlds: folder of another tiny model than their own
    base_tasks: str = ""              # JSONL of base tasks (the embedded worlds have their own)
    validation_tasks: str = ""        # JSONL of held-out tasks; empty: an eighth of the base tasks
    teacher_tasks: str = ""           # JSONL of ready-made tasks for --variant teacher
    quant: str = ""                   # nf4 = 4-bit base model
    device: str = "auto"              # auto, cpu or cuda
    dtype: str = "auto"               # auto, bf16 or fp32; adapters are always fp32
    rank: int = 16                    # LoRA rank of both adapters
    agent_adapter: str = ""           # PEFT folder to start the agent from; KL stays to the base
    env_adapter: str = ""             # the same for the simulator
    chat_template_kwargs: str = ""    # JSON for the chat template, {"enable_thinking": false}
    # the loop
    epochs: int = 24                  # T of Algorithm 1
    steps: int = 6                    # agent updates per epoch
    seed_tasks: int = 16              # seed tasks per step that the simulator varies
    variations: int = 4               # tasks written per seed task (paper: 4)
    write_rounds: int = 1             # up to k times as many texts, until a batch is full of tasks
    G: int = 8                        # rollouts per task
    replay: float = 0.125             # tasks replayed from D_train, per task asked for (at least)
    base_share: float = 0.75          # share of seed tasks, and of replayed ones, from the base set
    seed_selection: str = "uniform"   # recent tasks as seed tasks; curated: p_hat near alpha
    function_selection: str = "uniform"  # functions to practise; near_alpha: p_hat near alpha
    temperature: float = 1.0          # of sampling and of every log-prob
    max_task_tokens: int = 24         # length limit of a generated task
    max_response_tokens: int = 24     # length limit of an agent response
    max_prompt_tokens: int = 4096     # tasks with a longer prompt are refused
    agreement: int = 0                # k > 0: keep only tasks that the simulator solves in k tries
    val_samples: int = 8              # attempts per validation task
    val_every: int = 1                # validate every so many epochs, and always after the last
    gate: bool = True                 # stop after epoch 0 where nothing can be learned
    tuning: bool = False              # also report the tuning split: choose settings on it
    # agent (GRPO)
    agent_lr: float = 2e-3            # AdamW on the agent's LoRA weights
    agent_reward: str = "plain"       # function agent_reward_NAME of curriculum.py; plain is Eq. 1
    clip: float = 0.2                 # epsilon of the clipped surrogate
    agent_kl: float = 0.001           # KL coefficient to the initial policy
    kl_estimator: str = "k3"          # estimator of both KL terms, see grpo.token_kl
    scale: str = "std"                # std: advantages divided by the group's standard deviation
    aggregation: str = "token"        # loss as a mean over tokens or over sequences
    inner_epochs: int = 1             # passes over each rollout batch
    mini_batch: int = 0               # groups per optimiser step; 0 = the whole batch
    # environment (RWR)
    alpha: float = 0.5                # target success rate
    alpha_end: float = 0.5            # where the linear, cosine and step schedules arrive
    alpha_schedule: str = "constant"  # function alpha_NAME of curriculum.py
    difficulty_reward: str = "bell"   # function reward_NAME of curriculum.py; bell is Eq. 3
    beta: float = 2.0                 # sharpness of R_env
    k_min: float = 0.26               # band |p_hat - alpha| <= k_min to learn from (paper 0.1)
    lam: float = 1.0                  # sharpness of the weights exp(lam * R_env)
    p_hat_unit: str = "task"          # of R_env and band: task; seed: all its variations; batch
    env_weights: str = "rwr"          # function weights_NAME of curriculum.py; rwr: exp(lam R_env)
    env_lr: float = 3e-3              # AdamW on the simulator's LoRA weights
    env_updates: int = 16             # optimiser steps per epoch
    env_batch: int = 32               # generations per optimiser step
    env_passes: int = 2               # passes over the records of an epoch and of D_env
    env_kl: float = 0.02              # KL coefficient to the initial simulator
    env_kl_cap: float = 0.5           # largest KL of one update, nats per token
    env_kl_sample: int = 96           # fresh generations on which both KLs are measured
    # memory
    grad_checkpoint: bool = False     # recompute activations in the backward pass
    token_budget: int = 16384         # padded tokens per micro-batch of a training pass
    max_rows: int = 512               # rollouts decoded at once
    world_options: dict = field(default_factory=dict)  # options that the world brings


CHOICES = {"variant": ("genenv", "random", *curriculum.WITHOUT_SIMULATOR),
           "kl_estimator": ("k1", "k2", "k3"), "scale": ("std", "none"),
           "aggregation": ("token", "sequence"),
           "p_hat_unit": ("task", "seed", "batch"), "dtype": ("auto", "bf16", "fp32"),
           "quant": ("", "nf4")}
NAMED = {  # option: prefix of its functions in curriculum.py
    "alpha_schedule": "alpha_", "difficulty_reward": "reward_", "agent_reward": "agent_reward_",
    "seed_selection": "seeds_"}
AT_LEAST_ONE = ("seed_tasks", "variations", "write_rounds", "steps", "rank", "max_task_tokens",
                "val_samples", "val_every", "max_response_tokens", "max_prompt_tokens",
                "inner_epochs", "env_batch", "env_kl_sample", "token_budget", "max_rows")
NOT_NEGATIVE = ("epochs", "threads", "agreement", "mini_batch", "env_updates", "env_passes",
                "k_min", "beta", "lam", "agent_kl", "env_kl", "replay", "seed")
POSITIVE = ("agent_lr", "env_lr", "temperature", "clip", "env_kl_cap")
# options that a resumed run may change: these move memory and rounding, nothing else
FREE = {"gate", "out", "resume", "threads", "token_budget", "grad_checkpoint", "verbose"}
OTHER_BITS = {"max_rows", "device"}  # and these also the random numbers that a rollout gets


def parser(world=None, commands="") -> Parser:
    """An argument parser made from Options: name, type, default and the comment as help.

    world: a module whose own options are added, if it has any. commands: text below the options.
    """
    p = Parser(prog="genenv.py", argument_default=SUPPRESS, allow_abbrev=False, add_help=False,
               usage="python genenv.py [options]   or   python genenv.py COMMAND ...",
               description="GenEnv: an agent and a task simulator co-evolve.", epilog=commands,
               formatter_class=RawDescriptionHelpFormatter)
    add_fields(p, Options)
    own = p.add_argument_group("of this world")
    for name, (default, text, values) in getattr(world, "OPTIONS", {}).items():
        _add(own, name, type(default), default, text, values)
    return p


def add_fields(p, kind):
    """An option for every field of a dataclass; the comment beside each is its help text, and a
    comment on a line of its own is the headline of those below it."""
    group, kinds = p, {f.name: f for f in dataclasses.fields(kind) if f.name != "world_options"}
    for line in inspect.getsource(kind).splitlines():
        if headline := re.fullmatch(r"    # (.*)", line):
            group = p.add_argument_group(headline[1])
            if headline[1] == "the run":
                _add_common(group)
        elif (found := re.match(r"    (\w+): .*?# (.*)$", line)) and found[1] in kinds:
            f = kinds[found[1]]
            _add(group, f.name, f.type, f.default, found[2], choices(f.name))


def _add_common(group):
    """--help, and where the options of a run may come from."""
    group.add_argument("-h", "--help", action="help", help="show this and stop")
    group.add_argument("--preset", metavar="NAME", help=f"a set of options: {', '.join(PRESETS)}")
    group.add_argument("--config", metavar="FILE", help="options of another run, its config.json")


def _add(p, name, kind, default, text, values=()):
    flag, shown = "--" + name.replace("_", "-"), "" if default in ("", False) else f" ({default})"
    listed = f" [{', '.join(str(v) for v in values if v != '')}]" if values else ""
    text = f"{text}{listed}{shown}".replace("%", "%%")
    if kind is bool:
        p.add_argument(flag, action=BooleanOptionalAction, help=text)
    else:
        metavar = {int: "N", float: "X"}.get(kind, "NAME" if values else "TEXT")
        p.add_argument(flag, type=kind, metavar=metavar, help=text)


def choices(name: str) -> tuple:
    """The values that an option may take, () if they are not listed: functions of curriculum.py and
    worlds, a user's own included, are found where they stand."""
    if name == "world":
        return tuple(world_names())
    return tuple(curriculum.named(NAMED[name])) if name in NAMED else CHOICES.get(name, ())


def parse_options(argv, commands="") -> Options:
    """Command line -> Options: defaults, then the world's, then the resumed run's or those of
    --config, then the preset's, then what is given. commands: what --help says of them.

    Raises UserError for unknown options, values of the wrong kind, and options that a resumed run
    must not change.
    """
    name = _world_of(argv)
    world = load_world(name)
    try:
        given = vars(parser(world, commands).parse_args(argv))
    except UserError as fault:
        theirs = re.search(r"unrecognized arguments:.*--tools\b", str(fault))
        raise UserError(f"{fault}{'; --tools belongs to --world tool_calls' * bool(theirs)}") from None
    preset, config = given.pop("preset", None), given.pop("config", None)
    if preset is not None and preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}: {choose(preset, PRESETS)}")
    asked = {**PRESETS.get(preset, {}), **given}
    if PRESETS.get(preset, {}).get("world", name) != name:
        raise UserError(f"--preset {preset} is for --world {PRESETS[preset]['world']} and cannot "
                        f"be used in the world {name}: leave one of them out")
    if config and given.get("resume"):
        raise UserError("--config is for a new run, --resume goes on with a run's own options: "
                        "leave one of them out")
    own = {key: default for key, (default, _, _) in getattr(world, "OPTIONS", {}).items()}
    former = resumed_options(asked, own) if given.get("resume") else \
        {**getattr(world, "DEFAULTS", {}), **(_of_file(config, own) if config else {})}
    values = {**own, **former, **asked}
    # what belongs to the world goes into one field of its own
    theirs = {key: values.pop(key) for key in own}
    o = check_options(Options(**values, world_options=theirs))
    if "env_updates" in given and o.env_passes:
        raise UserError(f"--env-updates does nothing with --env-passes {o.env_passes}, which makes "
                        "the number of steps follow from that of the records: leave one of them "
                        "out, or give --env-passes 0")
    return o


def defaults() -> dict:
    """{option: its default}, without those of a world."""
    return {f.name: f.default for f in dataclasses.fields(Options) if f.name != "world_options"}


def _of_file(path, own: dict) -> dict:
    """The options in another run's config.json, but for its folder. Raises UserError."""
    saved = saved_options(path, own, "remove it from the file")
    return {name: value for name, value in saved.items() if name not in ("out", "resume")}


def _world_of(argv) -> str:
    """The world by what the command line says: --world, the run that goes on, preset or config."""
    p = Parser(prog="genenv.py", add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    for name in ("world", "preset", "out", "config"):
        p.add_argument(f"--{name}")
    p.add_argument("--resume", action="store_true")
    known, _ = p.parse_known_args(argv)
    preset = PRESETS.get(getattr(known, "preset", ""), {})
    if "world" in known:
        return known.world
    if getattr(known, "resume", False) and getattr(known, "out", ""):
        return _saved_world(Path(known.out) / "config.json") or Options.world
    if "config" in known and "world" not in preset:
        return _saved_world(Path(known.config)) or Options.world
    return preset.get("world", Options.world)


def _saved_world(config: Path) -> str:
    """The world of a run by its config.json, "" if that does not say."""
    try:
        return str(json.loads(config.read_text()).get("world", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""  # saved_options says what is wrong


def resumed_options(asked: dict, own: dict) -> dict:
    """The saved options of the run in --out; refuses by name a changed option that matters.

    asked: of the command line and its preset; own: the world's options with their defaults. Both,
    and what comes back, have the world's options beside the others.
    """
    if not asked.get("out"):
        raise UserError("--resume needs --out: which run folder is to go on?")
    path = Path(asked["out"]) / "config.json"
    if not path.is_file():
        raise UserError(f"nothing to resume: {path} does not exist")
    saved = defaults() | own | saved_options(path, own, "go on with the version that made it, or "
                                             "start a new run in another --out")
    free = FREE | OTHER_BITS | {"epochs"}
    changed = sorted(name for name, value in asked.items() if value != saved.get(name))
    was = lambda name: f"--{name.replace('_', '-')} was {saved.get(name)!r} in this run and"
    for name in changed:
        if name not in free:
            raise UserError(f"{was(name)} cannot become {asked[name]!r} now; start a new run in "
                            "another --out")
    for name in changed:
        if name in OTHER_BITS:
            print(f"{was(name)} is {asked[name]!r} now: it goes on, but no longer to the bit")
    return saved


def saved_options(path, own: dict, advice: str) -> dict:
    """The options in a config.json, those of the world beside the others. Raises UserError for a
    damaged file, a value of another kind and, with the advice, an option that does not exist (any
    more). own: the world's options with their defaults.
    """
    known = defaults() | own
    try:
        saved = json.loads(Path(path).read_text())
        saved.update(saved.pop("world_options", {}))
        unknown = sorted(saved.keys() - known.keys())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise UserError(f"{path} is damaged: it is not a JSON object") from None
    if unknown:
        raise UserError(f"{path} has an option this version does not know ({', '.join(unknown)}): "
                        f"{advice}")
    for name, value in saved.items():
        kind = type(known[name])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise UserError(f"{path}: option {name} has the value {value!r}, which is no "
                            f"{kind.__name__}")
    return saved


def check_options(o):
    """Raises UserError for the first option whose value cannot work; returns the options."""
    def need(ok, name, what):
        if not ok:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(o, name)!r}: {what}")
    for f in dataclasses.fields(o):
        value = getattr(o, f.name)
        need(f.type is not float or abs(value) <= sys.float_info.max, f.name, "must be finite")
    for name in ("alpha", "alpha_end"):
        need(0 < getattr(o, name) < 1, name, "must lie strictly between 0 and 1")
    need(o.G >= 2, "G", "a group needs at least 2 rollouts, with one there is no baseline")
    for name in AT_LEAST_ONE:
        need(getattr(o, name) >= 1, name, "must be at least 1")
    for name in NOT_NEGATIVE:
        need(getattr(o, name) >= 0, name, "must not be negative")
    need(0 <= o.base_share <= 1, "base_share", "must lie between 0 and 1")
    for name in POSITIVE:
        need(getattr(o, name) > 0, name, "must be greater than 0")
    need(o.seed < 2 ** 60, "seed", "must be below 2 ** 60")
    need(o.threads <= 1024, "threads", "more than 1024 threads are of no use")
    own_base = hasattr(load_world(o.world), "train_base") and not o.model
    need(o.variant == "teacher" or not o.teacher_tasks, "teacher_tasks",
         "only --variant teacher reads it")
    need(own_base or not o.base_model, "base_model",
         "only a world that trains its own base model takes one, and none with --model")
    need(o.model or not o.env_model, "env_model", "it goes beside the agent's --model: give both")
    for name in (*CHOICES, *NAMED):
        need(getattr(o, name) in choices(name), name, choose(getattr(o, name), choices(name)))
    fault = device_fault(o.device)
    need(not fault, "device", fault)
    need(template_options(o) is not None, "chat_template_kwargs",
         'must be a JSON object, such as {"enable_thinking": false}')
    for name, (default, _, values) in getattr(load_world(o.world), "OPTIONS", {}).items():
        value = o.world_options[name]
        if values and value not in values:
            raise UserError(f"--{name.replace('_', '-')} is {value!r}: "
                            f"{choose(str(value), values)}")
    curriculum.try_functions(o)
    return o


def device_fault(device: str) -> str:
    """Why no model can be put on a device, "" if one can: auto, cpu, cuda or cuda:N."""
    if device in ("auto", "cpu"):
        return ""
    number = re.fullmatch(r"cuda(?::(\d{1,3}))?", device)
    if not number:
        return "choose from auto, cpu, cuda, cuda:N"
    import torch  # here and not above: --help is answered without it
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "" if int(number[1] or 0) < count else \
        f"there are {count} CUDA devices that this torch can use; choose auto or cpu"


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
