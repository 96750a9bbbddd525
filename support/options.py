"""Parse and check the options of a run: command line, presets, worlds.

Usage: `parse_options(argv)` returns Options. The world's defaults override those below, a preset
overrides both, and the command line overrides everything. A resumed run keeps the options in its
config.json. A world may add options (worlds/__init__.py).

Deviations of the 7B presets from the paper:

* Learning rates. The paper trains all weights, at rates of 1e-6 (agent) and 5e-7 (simulator). A
  LoRA adapter of rank r starts at B = 0 and changes a layer's weights by (lora_alpha/r) B A, so the
  same rate changes the model far less. We use 20 times the paper's rates, as untuned starting
  points.
* The simulator's KL. The paper names a penalty and a cap but gives values for neither. Ours are
  env_kl in the presets and KL_CAP in rwr.py.
* The band. With the paper's k_min and G = 8, only tasks solved in exactly 4 of 8 attempts pass the
  filter, so all weights are equal, whatever beta and lam are. For weights that differ between
  records, add `--k-min 1 --lam 6 --beta 8`, or raise --G.
"""
import argparse
import inspect
import json
import os
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import curriculum
from errors import UserError, one_line, users_code
from support.probe import try_functions
from worlds import load_world, world_names


@dataclass(frozen=True)
class Options:
    """Hold every option of a run; the text below each one is its help text."""

    out: str = ""
    """run folder; empty: the next free runs/NNN-VARIANT"""
    resume: bool = False
    """resume the run in --out from its checkpoint"""
    variant: str = "genenv"
    """genenv trains the simulator, random does not; others use fixed tasks"""
    world: str = "ladder"
    """domain: a module of worlds/, which may add options"""
    seed: int = 0
    """seed of new adapters, sampling and every random choice"""
    threads: int = 0
    """torch threads; 0: OMP_NUM_THREADS if set, else all cores"""

    model: str = ""
    """local folder or hub name; empty: the tiny model of a toy world"""
    env_model: str = ""
    """the simulator's own model; empty: it shares the agent's"""
    base_tasks: str = ""
    """JSONL file of base tasks, for a world that reads them"""
    validation_tasks: str = ""
    """JSONL file of held-out tasks; empty: an eighth of --base-tasks"""
    teacher_tasks: str = ""
    """JSONL file of ready-made tasks for --variant teacher"""
    quant: str = ""
    """nf4: 4-bit base model"""
    dtype: str = "auto"
    """number type of the base model; adapters are always fp32"""
    chat_template_kwargs: str = ""
    """chat template arguments in JSON: {"enable_thinking": false}"""
    rank: int = 16
    """LoRA rank of both adapters"""

    epochs: int = 24
    """number of epochs, T of Algorithm 1"""
    steps: int = 6
    """agent updates per epoch"""
    seed_tasks: int = 16
    """seed tasks that the simulator varies in each step"""
    variations: int = 4
    """tasks written for each seed task (paper: 4)"""
    G: int = 8
    """attempts (rollouts) per task"""
    base_share: float = 0.75
    """share of base tasks among seed tasks and replayed tasks"""
    seed_selection: str = "uniform"
    """choice of recent tasks to vary (curated prefers p_hat near alpha)"""
    temperature: float = 1.0
    """temperature of sampling and of every log-prob"""
    max_task_tokens: int = 24
    """length limit of a generated task"""
    max_response_tokens: int = 24
    """length limit of a response, or of a turn in an episode"""
    max_prompt_tokens: int = 4096
    """tasks with a longer prompt are refused"""
    val_samples: int = 8
    """attempts per validation task"""
    val_every: int = 1
    """validate every N epochs, and always after the last"""

    agent_lr: float = 2e-3
    """learning rate of AdamW on the agent's LoRA weights"""
    agent_reward: str = "plain"
    """function agent_reward_NAME of curriculum.py; plain is Eq. 1"""
    agent_kl: float = 0.001
    """coefficient of the KL to the initial agent"""
    mini_batch: int = 0
    """groups per optimiser step; 0: the whole batch"""

    alpha: float = 0.5
    """target success rate"""
    alpha_end: float = 0.5
    """final alpha of schedules such as linear"""
    alpha_schedule: str = "constant"
    """function alpha_NAME of curriculum.py"""
    difficulty_reward: str = "bell"
    """function reward_NAME of curriculum.py; bell is Eq. 3"""
    beta: float = 2.0
    """sharpness of R_env"""
    k_min: float = 0.26
    """the band to imitate is |p_hat - alpha| <= k_min (paper: 0.1)"""
    lam: float = 1.0
    """sharpness of the weights exp(lam * R_env)"""
    p_hat_unit: str = "task"
    """p_hat is measured on a task, on its seed's variations or on a batch"""
    env_lr: float = 3e-3
    """learning rate of AdamW on the simulator's LoRA weights"""
    env_batch: int = 32
    """imitated tasks per optimiser step"""
    env_passes: int = 1
    """passes over the imitated tasks per epoch"""
    env_kl: float = 0.02
    """coefficient of the KL to the initial simulator"""

    token_budget: int = 16384
    """padded tokens per micro-batch of a training pass"""
    max_rows: int = 512
    """rollouts decoded at once, if memory suffices"""

    # Internal, so without a help text: the options that the world adds, the day on which the run
    # began, and the hashes of its code (support/origin.py).
    world_options: dict = field(default_factory=dict)
    date: str = ""
    code: dict = field(default_factory=dict)


# {first option of a group in --help: its heading}
GROUPS = {"out": "the run", "model": "models", "epochs": "the loop", "agent_lr": "agent (GRPO)",
          "alpha": "environment (RWR)", "token_budget": "memory"}

_7B = {"world": "tool_calls", "model": "Qwen/Qwen2.5-7B-Instruct", "epochs": 10, "steps": 8,
       "max_prompt_tokens": 4096, "max_response_tokens": 512, "agent_lr": 2e-5, "mini_batch": 16,
       "k_min": 0.1, "env_lr": 1e-5, "env_batch": 64, "env_passes": 4, "env_kl": 0.05}
PRESETS = {  # each lists only what differs from the defaults, including the world's
    # runs the whole loop to try an installation, a model or a task file: in seconds in a built-in
    # world, in minutes with a chat model on a CPU
    "tiny": dict(epochs=2, steps=1, seed_tasks=4, variations=2, G=4, env_batch=2,
                 max_task_tokens=256, max_response_tokens=160, token_budget=4096, max_rows=64,
                 val_samples=2),
    # The next two suit any world with a chat model, on GPUs with 8 and 16 GB. Their memory was
    # computed, not measured. In bf16, updates need 3.8 and 7.5 GB; rollouts use what is left. A T4
    # (16 GB) has no bf16, so it computes in fp32, where updates need 5.7 and 11.7 GB.
    "1.5b-8gb": dict(model="Qwen/Qwen2.5-1.5B-Instruct", quant="nf4", agent_lr=1e-4, env_lr=1e-4,
                     token_budget=4096),
    "3b-16gb": dict(model="Qwen/Qwen2.5-3B-Instruct", quant="nf4", agent_lr=1e-4, env_lr=1e-4,
                    token_budget=8192),
    # fits one RTX 3090 / 4090 / A10: a 4-bit base, and half of the 72 groups at once
    "7b-24gb": {**_7B, "quant": "nf4", "max_rows": 288},
    # fits one A100 / H100: a bf16 base, and all 72 groups at once
    "7b-80gb": {**_7B, "token_budget": 32768, "max_rows": 576}}

CHOICES = {"variant": ("genenv", "random", "static", "teacher", "base"), "quant": ("nf4",),
           "p_hat_unit": ("task", "seed", "batch"), "dtype": ("auto", "bf16", "fp32")}
MOST = 1e18
# {option: (lowest value, highest value)}; add_option sets the limits of the others
RANGES = {"alpha": (0.001, 0.999), "alpha_end": (0.001, 0.999), "base_share": (0, 1),
          "k_min": (0, 1), "temperature": (0.001, 1000), "agent_lr": (1e-12, 1),
          "env_lr": (1e-12, 1), "epochs": (0, MOST), "threads": (0, os.cpu_count() or 1),
          "G": (2, MOST)}  # a single rollout has no group to be compared with
# {option: prefix of its functions in curriculum.py}
NAMED = {"alpha_schedule": "alpha_", "difficulty_reward": "reward_",
         "agent_reward": "agent_reward_", "seed_selection": "seeds_"}
MAY_CHANGE = {"out", "resume", "epochs", "threads", "token_budget", "max_rows"}  # in a resumed run


# ---------------------------------------------------------------------------------------------
# the command line

# {name: what it is for}; each is a module of scripts/
COMMANDS = {"warm-start": "Let a small model imitate tasks in both roles before its first run.",
            "ask": "Let the agent of a run answer a task of yours.",
            "export": "Export the tasks of a run for veRL.",
            "compare": "Compare several runs on one page, or write the report of a single run."}


def parser(world) -> "Parser":
    """Return the parser of a run's options, which include those of its world. world: a class."""
    p = Parser(prog="python genenv.py", argument_default=argparse.SUPPRESS,
               usage="python genenv.py [options]   or   python genenv.py COMMAND ...",
               description="GenEnv: an agent and a task simulator co-evolve.",
               epilog=f"commands, each with --help: {', '.join(COMMANDS)}")
    p.add_argument("--preset", choices=PRESETS, help="a set of options")
    # {option: the text below it in Options}
    texts = dict(re.findall(r'(\w+): .+\n +"""(.+)"""', inspect.getsource(Options)))
    # list the worlds and functions that exist, including a user's own
    texts["world"] += f": {', '.join(world_names())}"
    for name, prefix in NAMED.items():
        texts[name] += f": {', '.join(curriculum.functions(prefix))}"
    group = p
    for f in fields(Options):
        if f.name in GROUPS:
            group = p.add_argument_group(GROUPS[f.name])
        if f.name in texts:
            add_option(group, f.name, f.default, texts[f.name], CHOICES.get(f.name))
    group = p.add_argument_group("options of this world")
    for name, (default, text, values) in world.OPTIONS.items():
        add_option(group, name, default, text, values)
    return p


def add_option(p, name, default, text, values):
    """Add an option with the type of its default. values: the allowed ones, None for any.

    RANGES limits some numbers. Of the others, a float must be at least 0, and so must an integer
    whose default is 0; any other integer must be at least 1.
    """
    if default not in ("", False):
        text += f" ({default})"
    text = text.replace("%", "%%")
    kind = read = type(default)
    if kind is bool:
        p.add_argument(flag(name), help=text, action=argparse.BooleanOptionalAction)
        return
    if kind in (int, float):
        smallest = 1 if kind is int and default else 0
        read = at_least(*RANGES.get(name, (smallest, MOST)), kind)
    p.add_argument(flag(name), help=text, type=read, choices=values,
                   metavar=None if values else kind.__name__)


def flag(name: str) -> str:
    """Return an option's name as a user types it."""
    return "--" + name.replace("_", "-")


def parse_options(argv) -> Options:
    """Return the Options of a command line.

    Raise UserError for unknown options, values that cannot work, and options that a resumed run
    must not change.
    """
    # these four options decide which others exist, so read them first
    early = Parser(prog="python genenv.py", add_help=False)
    for name in ("preset", "world", "out"):
        early.add_argument(flag(name))
    early.add_argument("--resume", action="store_true")
    first, _ = early.parse_known_args(argv)
    preset, saved = PRESETS.get(first.preset, {}), None
    world = load_world(first.world or preset.get("world", Options.world))
    if first.resume:
        if not first.out:
            raise UserError("--resume needs --out RUN: name the run to resume")
        saved = saved_options(first.out)
        world = load_world(saved.world)

    file = inspect.getfile(world)
    with users_code(file, f"{file}: OPTIONS {world.OPTIONS}"):
        p = parser(world)
    requested = preset | vars(p.parse_args(argv))  # the command line wins
    requested.pop("preset", None)
    values = {name: default for name, (default, _, _) in world.OPTIONS.items()}
    if saved:
        values |= flat(saved)  # a resumed run keeps its options
        for name in sorted(requested.keys() - MAY_CHANGE):
            if requested[name] != values[name]:
                raise UserError(f"{flag(name)} is {values[name]!r} in this run and cannot change: "
                                "start a new run in another --out")
    else:
        with users_code(file):
            defaults = Options(**world.defaults(requested))
            check_types(defaults, file)
            values |= asdict(defaults)
    values |= requested
    # this includes options that the world no longer has: World.__init__ refuses them
    names = sorted(values.keys() - vars(Options()).keys())
    values["world_options"] = {name: values.pop(name) for name in names}
    o = Options(**values)
    check_options(o)
    return o


def flat(o: Options) -> dict:
    """Return {option: value}, with the world's options beside all others."""
    values = asdict(o)
    return values.pop("world_options") | values


def saved_options(folder) -> Options:
    """Return the options saved in a run folder. Raise UserError if there are none, or if another
    version wrote them."""
    path = Path(folder, "config.json")
    if not path.is_file():
        raise UserError(f"{folder} is not a run folder, or its run has not begun: no config.json")
    with one_line(path, "is from another version, or belongs to a model (give that as --model)"):
        o = Options(**json.loads(path.read_text()))
    check_types(o, path)
    return o


# ---------------------------------------------------------------------------------------------
# checks


def check_types(o: Options, file):
    """Raise UserError for an option that is not of its default's type. file: where it is given."""
    for name, default in vars(Options()).items():
        value = getattr(o, name)
        is_right = isinstance(value, type(default))
        if not is_right and not (isinstance(default, float) and isinstance(value, int)):
            raise UserError(f"{file}: {name} is {value!r}, not of the type of {default!r}: correct "
                            "it")


def check_options(o: Options):
    """Raise UserError for the first option that cannot work, alone or with others."""
    if o.env_model and not o.model:
        raise UserError("--env-model needs the agent's --model: give both")
    with one_line("--chat-template-kwargs", 'must be JSON such as {"enable_thinking": false}'):
        dict(**json.loads(o.chat_template_kwargs or "{}"))
    if (o.variant == "teacher") != bool(o.teacher_tasks):
        raise UserError("--variant teacher needs the file of --teacher-tasks, which no other "
                        "variant accepts")
    if o.alpha_schedule in ("linear", "cosine", "step") and o.alpha == o.alpha_end:
        raise UserError(f"--alpha-schedule {o.alpha_schedule} leads from --alpha to --alpha-end: "
                        "give two different values")
    check_band(o)
    try_functions(o)


def check_band(o):
    """Raise UserError if alpha is constant and no p_hat of a single task can lie in the band."""
    if o.p_hat_unit != "task" or o.alpha_schedule != "constant" or o.variant != "genenv":
        return
    if not any(curriculum.in_band(k / o.G, o.alpha, o.k_min) for k in range(o.G + 1)):
        raise UserError(f"with --G {o.G} no p_hat lies within --k-min {o.k_min} of --alpha "
                        f"{o.alpha}: raise --k-min or --G")


# ---------------------------------------------------------------------------------------------
# argparse


def at_least(least: int, most=MOST, kind=int):
    """Return an argparse type that reads a number of type `kind` from `least` to `most`."""
    def number(text):
        value = kind(text)
        if not least <= value <= most:  # a NaN never is
            raise argparse.ArgumentTypeError(f"must be from {least:g} to {most:g}, not {text}")
        return value
    return number


class Parser(argparse.ArgumentParser):
    """Parse a command line, and turn argparse's errors into UserErrors of one line."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                         **options)

    def error(self, message):
        _, _, unknown = message.partition("unrecognized arguments: ")
        word = re.split("[ =]", unknown)[0]  # with its dashes
        for name in world_names():
            if word and word[2:].replace("-", "_") in load_world(name).OPTIONS:
                message += f": an option of --world {name}"
        raise UserError(f"{message} ({self.prog} --help)")
