"""Define a world: one class that holds what the loop needs to know about a domain.

Usage: every module in this folder with a `class World(worlds.World)` is a world, chosen by
`--world NAME`. A new one begins as a copy of worlds/template.py. No other file has to change, and
tests/test_worlds.py checks the new world against the contract below. A task is a data_pool.Task;
its spec is plain JSON and holds all that its checker needs. Models' text is parsed, never executed.

For every world, interaction.py checks whether a generated task copies its seed, is held out,
duplicates another task of its batch, or contains control tokens.
"""
import importlib
import inspect
import pkgutil
from importlib.util import find_spec
from pathlib import Path

from data_pool import Task
from errors import UserError, choose, users_code
from policy import Policy, policy_options

FEW = 10  # with fewer held-out tasks than this, their success rate means little
NO_SEED = Task("", {})


class InvalidTask(Exception):
    """Report that a text is not a task; the message is the reason under which it is counted.

    detail: what is wrong, for the author of a task file.
    """

    def __init__(self, reason: str, detail=""):
        super().__init__(reason)
        self.detail = detail


class World:
    """Define a domain: its tasks, prompts and checker.

    A subclass defines __init__ and the six methods below that raise NotImplementedError; it may
    override everything else.
    """
    # every reason for which parse_task or leaks refuses a task
    REASONS = ()
    # {option of a run: its default in this world}; a preset or the command line overrides it
    DEFAULTS = {}
    # the world's own options, {name: (default, help, choices or None)}; a float must be at least
    # 0, and so must an integer whose default is 0; any other integer must be at least 1
    OPTIONS = {}
    # an optional package without which the world cannot work, and the command that installs it
    PACKAGE, INSTALL = "", ""
    # whether the world reads its tasks from --base-tasks and --validation-tasks
    reads_task_files = False
    # whether --model names a chat model; if so, a run estimates the memory that it needs
    chat = True
    # limits of an episode; --max-response-tokens limits one turn
    max_turns = 1
    max_episode_tokens = 0
    # default number of warm-start passes; 0 derives it from the number of examples
    warm_start_passes = 0
    # whether the simulator imitates each task in only one epoch
    imitate_once = False
    # names for the report: what `category` distinguishes, and what `task_length` counts
    category_name = "kind"
    length_unit = "words"
    # the form of the answers, if a task's spec does not show it (see worlds/ladder.py)
    form = ""

    def __init__(self, o):
        """Keep o, the run's Options. Raise UserError for options and files that cannot be used."""
        self.o = o
        if self.PACKAGE and find_spec(self.PACKAGE) is None:
            raise UserError(f"--world {o.world} needs the package {self.PACKAGE}: {self.INSTALL}")
        if not self.reads_task_files and (o.base_tasks or o.validation_tasks):
            raise UserError(f"--world {o.world} makes its own tasks: --base-tasks and "
                            "--validation-tasks need another world, such as --world tool_calls")
        for name in o.world_options.keys() - self.OPTIONS.keys():
            raise UserError(f"--world {o.world} no longer has the option {name!r} of this run: "
                            "use the version that made the run")

    # ---- every world defines these

    def base_tasks(self):
        """Return the seed tasks that everything starts from.

        The result is a list of Tasks with origin "base". Every call returns the same tasks.
        """
        raise NotImplementedError("a world needs base_tasks")

    def validation_tasks(self, split="validation"):
        """Return a list of held-out Tasks.

        The split "validation" is only reported; "tuning" is for choosing settings. No key (see
        same_task_key) of one split occurs in the other or in the base tasks.
        """
        raise NotImplementedError("a world needs validation_tasks")

    def env_prompt(self, seed_task, success):
        """Return the simulator's prompt: a text, or a list of chat messages.

        success: p_hat in [0, 1], or None if unknown; the prompt must state it. The prompt must not
        state alpha: a schedule moves alpha, and old records are imitated under the prompt that they
        were written for. If the last message is the assistant's, the simulator continues it, and
        parse_task gets only the continuation.
        """
        raise NotImplementedError("a world needs env_prompt")

    def parse_task(self, text, seed_task, epoch):
        """Return the simulator's text as Task(text, spec, "env", seed_task.id, epoch).

        Whatever the text, raise nothing but InvalidTask, with one of REASONS. Without a seed task,
        seed_task is NO_SEED, whose spec is empty.
        """
        raise NotImplementedError("a world needs parse_task")

    def agent_prompt(self, task):
        """Return the agent's prompt: a text, or a list of chat messages."""
        raise NotImplementedError("a world needs agent_prompt")

    def score(self, task, response):
        """Return Eq. 1 as (reward in [0, 1], valid); valid: well-formed and evaluable.

        Never raise, whatever the text, and score even a long one quickly. In an episode the
        response is the list of the agent's turns.
        """
        raise NotImplementedError("a world needs score")

    # ---- a world may override these

    def option(self, name: str):
        """Return the value of one of OPTIONS, or its default if the run does not set it."""
        return self.o.world_options.get(name, self.OPTIONS[name][0])

    def load_policy(self):
        """Return a Policy with fresh adapters, by default on the chat model of --model.

        The adapters are "agent" and "env", or only "agent" with an --env-model, as open_policy
        makes them. Raise UserError if the model does not fit this world.
        """
        return open_policy(self.o.model, self.o)

    @classmethod
    def defaults(cls, asked: dict) -> dict:
        """Return a run's defaults. asked: the options of its command line and preset."""
        return cls.DEFAULTS

    @classmethod
    def scorer(cls, form: str):
        """Return a world that can only score answers of this form, without options or files."""
        world = cls.__new__(cls)
        world.form = form
        return world

    def skills(self, task):
        """Return the names of the tools that a task uses, for the diversity figures."""
        return []

    def task_length(self, task) -> int:
        """Return a task's length in the world's unit."""
        return len(task.text.split())

    def category(self, task) -> str:
        """Return the label by which the validation results are broken down."""
        return ""

    def same_task_key(self, task):
        """Return a text, or a tuple of texts, that identifies a task.

        Tasks that share a key are treated as copies or duplicates. Any difference between two
        specs changes the id, but only a difference that matters changes this key.
        """
        return task.id

    def leaks(self, task) -> str:
        """Return why a well-formed task teaches nothing, such as "answer leaked", or ""."""
        return ""

    def graded(self, task, response, reward: float) -> float:
        """Return the reward with partial credit, in [0, 1]; it is 1 only if the reward is 1."""
        return reward

    def gold(self, task) -> str:
        """Return a response that earns 1, or "" if the world has none."""
        return ""

    def start(self, task):
        """Return the initial state of a new episode; None if the task takes a single answer."""
        return None

    def respond(self, task, state, text):
        """Return the reply to a turn, or None if the episode is over. `state` may be changed."""
        return None

    def replay(self, task, turns):
        """Return the state of an episode after these turns; those after its end do not count."""
        state = self.start(task)
        for turn in turns:
            if self.respond(task, state, turn) is None:
                break
        return state

    def seed_for(self, task, generator) -> Task:
        """Return the seed task as the simulator sees it, with the same id."""
        return task

    def asked_task(self, text) -> Task:
        """Return a person's text as a task, of origin "asked" if its right answer is unknown.

        Raise InvalidTask if it is not a task of this world.
        """
        return self.parse_task(text, NO_SEED, 0)

    def offered(self, task) -> Task:
        """Return a task as `genenv.py ask` gives it to a trained agent."""
        return task

    def remarks(self, task, response) -> dict:
        """Return what `genenv.py ask` prints about an answer besides Eq. 1."""
        return {}

    def warm_start_pairs(self, turn=0):
        """Return {"agent": pairs, "env": pairs} for pass number `turn` of a warm start.

        A pair is (prompt, response) to imitate; an episode's response is its list of turns and
        observations. {} means that there is nothing to imitate.
        """
        return {}


# ---------------------------------------------------------------------------------------------
# finding worlds

def world_names():
    """Return the names of the worlds in this folder, except the template."""
    names = []
    for module in pkgutil.iter_modules(__path__):
        # read the source without importing: a world may need a package that only its users have
        code = Path(find_spec(f"worlds.{module.name}").origin).read_text(encoding="utf-8")
        if module.name != "template" and "\nclass World(" in code:
            names.append(module.name)
    return sorted(names)


def load_world(name: str) -> type[World]:
    """Return a world's class. Raise UserError if the name is unknown or the module has no World."""
    if not name.isidentifier() or find_spec(f"worlds.{name}") is None:
        names = choose(name, world_names())
        raise UserError(f"unknown world {name!r}: {names}, or write worlds/NAME.py")
    # users edit such a module: anything may go wrong in it
    with users_code(find_spec(f"worlds.{name}").origin):
        module = importlib.import_module(f"worlds.{name}")
    kind = getattr(module, "World", None)
    if not inspect.isclass(kind) or not issubclass(kind, World):
        raise UserError(f"worlds/{name}.py must define class World(worlds.World), as template.py "
                        "does")
    return kind


def open_policy(model: str, o, adapters=None, **how):
    """Load the Policy of a model folder or hub name, with the run's options.

    adapters: their names; None means both, or only the agent's with an --env-model. how: further
    arguments of Policy.load.
    """
    if not model:
        raise UserError("this world needs --model: a folder or hub name of a chat model")
    if adapters is None:
        adapters = ("agent",) if o.env_model else ("agent", "env")
    return Policy.load(model, adapters=adapters, **policy_options(o), **how)


# ---------------------------------------------------------------------------------------------
# functions for the tasks of any world


def demonstration(world, task):
    """Return (agent's prompt, right response) for a warm start to imitate.

    For an episode the response is a list of turns and the replies to them.
    """
    prompt, gold, state = world.agent_prompt(task), world.gold(task), world.start(task)
    if state is None:
        return prompt, gold
    episode = []
    for turn in gold.split("\n"):
        episode += [turn, world.respond(task, state, turn)]
    # the last turn has no reply
    return prompt, episode[:-1]


def task_keys(world, task) -> frozenset:
    """Return a task's keys: two tasks that share one are the same task."""
    key = world.same_task_key(task)
    return frozenset([key] if isinstance(key, str) else key)


def held_out_keys(world) -> frozenset:
    """Return the keys of all held-out tasks; call this once per run."""
    return frozenset(key for split in ("validation", "tuning")
                     for task in world.validation_tasks(split) for key in task_keys(world, task))


def task_texts(value):
    """Yield every text in a task, or in a value of its spec, that may enter a prompt."""
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
    """Return one of the tokenizer's added tokens that a task, text or spec contains, or "".

    When a prompt is encoded, such a text becomes the token itself: it ends a turn, or starts
    something that no text may start, such as <think>.
    """
    text = "\n".join(task_texts(value)).lower()  # some tokenizers ignore case
    for token in map(str, tokenizer.added_tokens_decoder.values()):
        # skip runs of blanks: some models have tokens for them, but they are ordinary text
        if token.strip(" \t\n\r\u2581") and token.lower() in text:
            return token
    return ""
