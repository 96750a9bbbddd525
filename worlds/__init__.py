"""Worlds: what the loop needs to know of a domain, as one class.

Usage: every module of this folder with a `class World(worlds.World)` is a world, by its name:
`--world NAME`. A new one begins as a copy of worlds/template.py; nothing else changes, and
tests/test_worlds.py holds it against this contract. A task is a data_pool.Task, whose spec is plain
JSON and holds all that its checker needs. Text that a model wrote is only ever parsed, never
executed.

Not a world's business: whether a generated task is a copy of its seed, a held-out task, a duplicate
in its batch, or has control tokens in it: interaction.py checks that for all of them.
"""
import importlib
import inspect
import pkgutil
from importlib.util import find_spec
from pathlib import Path

from data_pool import Task
from errors import UserError, choose, users_code
from policy import Policy, policy_options

NO_SEED = Task("", {})


class InvalidTask(Exception):
    """What the simulator wrote is not a task; the message is the reason it is counted under.

    detail: for the author of a file, what is wrong in it.
    """

    def __init__(self, reason: str, detail=""):
        super().__init__(reason)
        self.detail = detail


class World:
    """A domain: its tasks, its prompts and its checker.

    A subclass defines __init__ and the six methods below that raise NotImplementedError; it may
    override everything else.
    """
    # every reason that parse_task and leaks give, for counting
    REASONS = ()
    # {option of a run: its default in this world}; a preset and the command line win
    DEFAULTS = {}
    # options of its own, {name: (default, help, choices or None)}; numbers are 0 or more, whole
    # ones 1 or more unless their default is 0
    OPTIONS = {}
    # whether --model names a chat model, whose memory is then estimated
    chat = True
    # limits of an episode; --max-response-tokens is for a turn
    max_turns = 1
    max_episode_tokens = 0
    # passes of a warm start by default; 0: by how much there is to imitate
    warm_start_passes = 0
    # whether the simulator imitates a task in one epoch only
    imitate_once = False
    # for the report: what `category` tells apart, and what `task_length` counts
    category_name = "kind"
    length_unit = "words"
    # how answers are written, where the spec of a task does not say it
    form = ""

    def __init__(self, o):
        """Keep o, the run's Options. Raises UserError for options and files that cannot be used."""
        self.o = o
        for name in o.world_options.keys() - self.OPTIONS.keys():
            raise UserError(f"the option {name!r} of this run is none of --world {o.world} any "
                            "more: use the version that made the run")

    # ---- what every world defines

    def base_tasks(self):
        """Return the seed tasks that everything starts from: a list of Task, origin "base", the
        same at each call."""
        raise NotImplementedError

    def validation_tasks(self, split="validation"):
        """Return a list of held-out Tasks.

        Split "validation" is only ever reported, "tuning" is for choosing settings. No key (see
        same_task_key) of one split is in the other or in the base.
        """
        raise NotImplementedError

    def env_prompt(self, seed_task, success):
        """Return what the simulator is asked: a text, or a list of chat messages.

        success: p_hat in [0, 1], None if unknown, which the prompt must say. alpha is left out: a
        schedule moves it, and old records are imitated under the prompt they were written for. If
        the last message is the assistant's, the simulator continues it, and parse_task gets what
        follows.
        """
        raise NotImplementedError

    def parse_task(self, text, seed_task, epoch):
        """Read the simulator's text: return Task(text, spec, "env", seed_task.id, epoch).

        Raises InvalidTask with one of REASONS and nothing else, for any text. NO_SEED (an empty
        spec) is given where there is no seed task.
        """
        raise NotImplementedError

    def agent_prompt(self, task):
        """Return what the agent is asked: a text, or a list of chat messages."""
        raise NotImplementedError

    def score(self, task, response):
        """Return Eq. 1 as (reward in [0, 1], valid); valid: well-formed and evaluable.

        Never raises, for any text, and is quick for long ones. The response to an episode is the
        list of the agent's turns.
        """
        raise NotImplementedError

    # ---- what a world may override

    def option(self, name: str):
        """The value of one of OPTIONS: as given, else its default."""
        return self.o.world_options.get(name, self.OPTIONS[name][0])

    def load_policy(self):
        """The Policy with fresh adapters "agent" and "env", next to --env-model with "agent" alone
        (open_policy does so); UserError if the model does not fit. Here it is the chat model of
        --model."""
        return open_policy(self.o.model, self.o)

    @classmethod
    def defaults(cls, asked: dict) -> dict:
        """DEFAULTS for a run with these options (what the command line and its preset say)."""
        return cls.DEFAULTS

    @classmethod
    def scorer(cls, form: str):
        """A world that can only score answers of this form: without options, files or a model."""
        world = cls.__new__(cls)
        world.form = form
        return world

    def skills(self, task):
        """Names of the tools a task uses, for the diversity figures."""
        return []

    def task_length(self, task) -> int:
        """Length in the world's natural unit."""
        return len(task.text.split())

    def category(self, task) -> str:
        """A label that validation is broken down by."""
        return ""

    def same_task_key(self, task):
        """A text, or a tuple of texts: tasks that share one are the same task, as copies,
        duplicates and held-out tasks go. The id differs wherever the task does, the key only where
        it matters."""
        return task.id

    def leaks(self, task) -> str:
        """The reason why nothing is left to answer, such as "answer leaked"; or ""."""
        return ""

    def graded(self, task, response, reward: float) -> float:
        """The reward of a response with partial credit, in [0, 1]; 1 only where the reward is."""
        return reward

    def gold(self, task) -> str:
        """A response that earns 1, "" if the world has none."""
        return ""

    def start(self, task):
        """A fresh state of an episode; None if the task takes a single answer."""
        return None

    def respond(self, task, state, text):
        """What is said to a turn of the agent; None when the episode is over. May change state."""
        return None

    def seed_for(self, task, generator) -> Task:
        """The seed task as it is put to the simulator, with the same id."""
        return task

    def asked_task(self, text) -> Task:
        """Return a person's text as a task; its origin is "asked" if nobody knows the right answer.
        Raises InvalidTask if it is no task of this world."""
        return self.parse_task(text, NO_SEED, 0)

    def offered(self, task) -> Task:
        """Return a task as it is put to a trained agent by `genenv.py ask`."""
        return task

    def remarks(self, task, response) -> dict:
        """Return what `genenv.py ask` prints of an answer besides Eq. 1."""
        return {}

    def warm_start_pairs(self, turn=0):
        """For `genenv.py warm-start`, in its pass number `turn`: {"agent": pairs, "env": pairs},
        pairs (prompt, response) to imitate; an episode's response is its list of turns and
        observations. {}: nothing to imitate."""
        return {}


# ---------------------------------------------------------------------------------------------
# finding worlds

def world_names():
    """Names of the worlds in this folder, without the template."""
    names = []
    for module in pkgutil.iter_modules(__path__):
        # read, not imported: a world may need a package that only its users have
        code = Path(find_spec(f"worlds.{module.name}").origin).read_text(encoding="utf-8")
        if module.name != "template" and "\nclass World(" in code:
            names.append(module.name)
    return sorted(names)


def load_world(name: str) -> type[World]:
    """The class of a world. Raises UserError for an unknown name or a module without one."""
    if not name.isidentifier() or find_spec(f"worlds.{name}") is None:
        names = choose(name, world_names())
        raise UserError(f"unknown world {name!r}: {names}, or write worlds/NAME.py")
    kind = getattr(import_own(f"worlds.{name}"), "World", None)
    if not inspect.isclass(kind) or not issubclass(kind, World):
        raise UserError(f"worlds/{name}.py has no class World(worlds.World), as template.py has")
    return kind


def import_own(name: str):
    """Import a module that users change. Raises UserError for whatever goes wrong."""
    with users_code(find_spec(name).origin):
        return importlib.import_module(name)


def open_policy(model: str, o, adapters=None, **how):
    """The Policy of a model folder or hub name, as the options say. adapters: those that it gets;
    None: both, or only the agent's next to an --env-model. how: more of what Policy.load takes."""
    if not model:
        raise UserError("this world needs --model: a folder or hub name of a chat model")
    if adapters is None:
        adapters = ("agent",) if o.env_model else ("agent", "env")
    return Policy.load(model, adapters=adapters, **policy_options(o), **how)


# ---------------------------------------------------------------------------------------------
# what holds for tasks of every world


def task_keys(world, task) -> frozenset:
    """What a task is recognised by: two tasks that share a key are the same task."""
    key = world.same_task_key(task)
    return frozenset([key] if isinstance(key, str) else key)


def held_out_keys(world) -> frozenset:
    """The keys of every held-out task: made once per run."""
    return frozenset(key for split in ("validation", "tuning")
                     for task in world.validation_tasks(split) for key in task_keys(world, task))


def task_texts(value):
    """Every text in a task, or in a value of its spec: what may end up in a prompt."""
    if isinstance(value, Task):
        value = [value.text, value.spec]
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from task_texts(part)


def special_token_in(value, tokenizer) -> str:
    """Return the first added token of the tokenizer that a task, a text or a spec spells; "" if
    none.

    Encoded again, in a prompt, it would be a real one: the end of a turn or, such as <think>, the
    beginning of something that no text may begin.
    """
    text = "\n".join(task_texts(value))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    # runs of blanks are tokens of some models, and ordinary text
    tokens = {i: str(token) for i, token in added.items() if str(token).strip(" \t\n\r\u2581")}
    for token in sorted({*tokens.values(), *getattr(tokenizer, "all_special_tokens", ())}):
        if token in text:
            return token
    # some tokenizers change letters before they look for their tokens
    ids = tokenizer.encode(text, add_special_tokens=False) if tokens else ()
    unknown = {tokenizer.unk_token_id, tokenizer.pad_token_id} if tokens else ()
    marks = [tokens[i] for i in ids if i in tokens and i not in unknown]
    return marks[0] if marks else ""
