"""Worlds: what the loop needs to know of a domain, as one class.

Usage: every module of this folder with a `class World(worlds.World)` is a world, by its name:
`--world NAME`. A new one begins as a copy of worlds/template.py; nothing else changes, and
tests/test_worlds.py holds it against this contract. A task is a data_pool.Task, whose spec is plain
JSON and holds all that its checker needs. Text that a model wrote is only ever parsed, never executed.

Not a world's business: whether a generated task is a copy of its seed, a held-out task, a duplicate
in its batch, or has control tokens in it. `check_task` says so for all of them.
"""
import importlib
import inspect
import json
import pkgutil
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb

from model.files import UserError, choose, read_jsonl
from data_pool import Task

NO_SEED = Task("", {})


class InvalidTask(Exception):
    """What the simulator wrote is not a task; the message is the reason it is counted under."""


class World:
    """A domain: its tasks, its prompts and its checker. A subclass has to define, besides __init__:

    load_policy()          the Policy with fresh adapters "agent" and "env"; UserError if the model
                           does not fit
    base_tasks()           list of Task, origin "base": the seed tasks that everything starts from
    validation_tasks(split="validation")  list of held-out Tasks: split "validation" is only ever
                           reported, "tuning" is for choosing settings; no key (see same_task_key)
                           of one split is in the other or in the base
    env_prompt(seed_task, success)  what the simulator is asked: text, or a list of chat
                           messages. success: p_hat in [0, 1], None if unknown, which the prompt must
                           say. alpha is not given: a schedule moves it, and old records are imitated
                           under the prompt they were written for. If the last message is the
                           assistant's, the simulator goes on with it, and parse_task gets what follows
    parse_task(text, seed_task, epoch)  the simulator's text -> Task(text, spec, "env", seed_task.id,
                           epoch); raises InvalidTask with one of REASONS and nothing else, for any
                           text. NO_SEED (an empty spec) stands for no seed
    agent_prompt(task)     what the agent is asked: text, or a list of chat messages
    score(task, response)  Eq. 1 -> (reward in [0, 1], valid); valid: well-formed and evaluable.
                           Never raises, for any text; quick for long ones. Of an episode the
                           response is the list of the agent's turns

    and may override everything below.
    """
    REASONS = ()       # every reason that parse_task and leaks give, for counting
    DEFAULTS = {}      # {option of a run: its default in this world}; a preset and the command line win
    OPTIONS = {}       # {name: (default, help, choices or None)}: options of its own, --name
    chat = True        # whether --model names a chat model, whose memory is then estimated
    max_turns, max_episode_tokens = 1, 0  # limits of an episode; --max-response-tokens is for a turn
    warm_start_passes = 0  # of a warm start that is not told; 0: by how much there is to imitate
    imitate_once = False  # whether the simulator imitates a task in one epoch only (see same_task_key)
    category_name, length_unit = "kind", "words"  # for the report: of what category and task_length say
    form = ""          # how answers are written, where the spec of a task does not say it

    def __init__(self, o):
        """o: the run's Options. Raises UserError for options and files that cannot be used."""
        self.o = o

    def option(self, o, name: str):
        """The value of one of OPTIONS: as given, else its default."""
        return o.world_options.get(name, self.OPTIONS[name][0])

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

    def skills(self, task) -> list[str]:
        """Names of the tools a task uses, for the diversity figures."""
        return []

    def task_length(self, task) -> int:
        """Length in the world's natural unit."""
        return len(task.text.split())

    def category(self, task) -> str:
        """A label that validation is broken down by."""
        return ""

    def same_task_key(self, task):
        """A text, or a tuple of texts: tasks that share one are the same task, as copies, duplicates
        and held-out tasks go. The id differs wherever the task does, the key only where it matters."""
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

    def respond(self, task, state, text: str):
        """What is said to a turn of the agent; None when the episode is over. May change state."""
        return None

    def seed_for(self, task, generator) -> Task:
        """The seed task as it is put to the simulator, with the same id."""
        return task

    def warm_start_pairs(self, turn: int = 0) -> dict:
        """For `genenv.py warm-start`, in its pass number `turn`: {"agent": pairs, "env": pairs}, pairs
        (prompt, response) to imitate; an episode's response is its list of turns and observations.
        {}: nothing to imitate."""
        return {}


# ---------------------------------------------------------------------------------------------
# finding worlds


def world_names() -> list[str]:
    """Names of the worlds in this folder, without the template."""
    # read, not imported: a world may need a package that only its users have
    source = lambda name: Path(find_spec(f"worlds.{name}").origin).read_text(encoding="utf-8")
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [n for n in names if n != "template" and "\nclass World(" in source(n)]


def load_world(name: str) -> type[World]:
    """The class of a world. Raises UserError for an unknown name or an incomplete class."""
    if not name.isidentifier() or find_spec(f"worlds.{name}") is None:
        raise UserError(f"unknown world {name!r}: {choose(name, world_names())}, or write worlds/NAME.py")
    kind = getattr(import_own(f"worlds.{name}"), "World", None)
    if World not in getattr(kind, "__mro__", ()):
        raise UserError(f"worlds/{name}.py has no class World(worlds.World): worlds/template.py has one")
    if missing := [method for method in RULES if not callable(getattr(kind, method, None))]:
        raise UserError(f"worlds/{name}.py: class World lacks {', '.join(missing)}: see worlds/__init__.py")
    return kind


def import_own(name: str):
    """A module that users change. Raises UserError for whatever goes wrong while it is imported."""
    with in_one_line(find_spec(name).origin):
        return importlib.import_module(name)


def worlds_with(option: str) -> list[str]:
    """Names of the worlds that have an option of their own of this name."""
    found = []
    for name in world_names():
        with suppress(UserError):  # it may need a package that only its users have
            found += [name] * (option in load_world(name).OPTIONS)
    return found


def open_world(o) -> World:
    """The world that the options of a run name, tried on a sample task (`probe`). Raises UserError."""
    kind = load_world(o.world)
    with in_one_line(kind):
        world = kind(o)
        vars(world).setdefault("o", o)  # its __init__ may have forgotten super().__init__(o)
        for name in RULES:
            setattr(world, name, partial(call_own, world, name, getattr(world, name)))
        probe(world)
    return world


def open_policy(model: str, o, adapters=None, **how):
    """The Policy of a model folder or hub name, as the options say. adapters: those that it gets; None:
    both, or only the agent's next to an --env-model. how: more of what Policy.load takes."""
    if not model:
        raise UserError("this world needs --model: a folder or hub name of a chat model")
    # here and not above: options and --help are read without torch and transformers
    from model.loading import policy_options
    from policy import Policy
    usual = ("agent",) if o.env_model else ("agent", "env")
    return Policy.load(model, adapters=usual if adapters is None else adapters, **policy_options(o), **how)


# ---------------------------------------------------------------------------------------------
# before a run


@contextmanager
def in_one_line(own, given=()):
    """Inside, an exception in a user's own file becomes a UserError. own: the file, or its class World;
    given: what a method of it was called with."""
    try:
        yield
    except (Exception, SystemExit) as error:
        file = own if isinstance(own, str) else inspect.getfile(own)
        at = [f", line {f.lineno} in {f.name}" for f in extract_tb(error.__traceback__) if f.filename == file]
        # without a line in it: a SyntaxError says its line itself, a method may take other arguments
        if isinstance(error, (UserError, InvalidTask)) or not at and not (
                isinstance(error, SyntaxError) or str(error).startswith("World.")):
            raise
        told = f", given {shown(given)}" * bool(given)
        raise UserError(f"{file}{''.join(at[:-4:-1])}: {type(error).__name__}: {error}{told}") from error


def shown(args) -> str:
    """What a method was called with, in a message: of a task its text."""
    return f"{[getattr(a, 'text', a) for a in args]!s:.200}"


def probe(world):
    """Try a world before its model is loaded, on a few tasks of each split. Raises UserError, one line, for
    a mistake in the world's code, or a task that stands in two splits."""
    seen, base = {}, world.base_tasks()
    if base != world.base_tasks():
        refuse(world, "base_tasks", "others when asked again")
    for split in ("base", "validation", "tuning"):
        tasks = base if split == "base" else world.validation_tasks(split)
        for task, key in ((task, key) for task in tasks for key in task_keys(world, task)):
            if (other := seen.setdefault(key, split)) != split:
                raise UserError(f"the {other} task {task.text[:80]!r} is among the {split} tasks as well")
        for task in tasks[:1] + tasks[len(tasks) // 2:][:1] + tasks[-1:]:
            probe_task(world, task)


def probe_task(world, task):
    """Call what the loop will call. Raises UserError where a rule of RULES is broken."""
    gold = world.gold(task)
    for name, *args in (("agent_prompt",), ("env_prompt", None), ("env_prompt", 0.5),
                        ("skills",), ("task_length",), ("category",)):
        getattr(world, name)(task, *args)
    for text in ("", task.text, gold):
        reward, _ = world.score(task, text)
        with suppress(InvalidTask):
            world.parse_task(text, task, 1)
    if gold and reward != 1:
        refuse(world, "gold", gold, task)


def is_text(value, *_):
    """A text, "" among them."""
    return isinstance(value, str)


def is_prompt(value, *_):
    """A text, or chat messages, and not empty."""
    return value and (is_text(value) or all(set(m) == {"role", "content"} for m in value))


def is_task(t):
    """A Task with a text and a spec that comes back from JSON as it was."""
    return isinstance(t, Task) and t.text and is_text(t.text) and json.loads(json.dumps(t.spec)) == t.spec


RULES = {  # method: (whether the loop can use what it gives for these arguments, in words)
    "load_policy": (lambda policy: policy.tokenizer, "a Policy"), "category": (is_text, "a text"),
    "base_tasks": (lambda tasks: tasks and all(is_task(t) and t.origin == "base" for t in tasks[:]),
                   "the same list of Tasks at each call, not empty: origin 'base', a text, a spec for JSON"),
    "validation_tasks": (lambda tasks, part="validation": all(map(is_task, tasks[:])) and (
        tasks or part != "validation"), "a list of Tasks like base_tasks, not empty"),
    "env_prompt": (is_prompt, "a text or chat messages, also if success is None"),
    "agent_prompt": (is_prompt, "a text or chat messages"), "seed_for": (lambda t, *_: t.id, "a Task"),
    "parse_task": (lambda t, _, seed_task, n: is_task(t) and [t.origin, t.seed_task, t.epoch] == [
        "env", seed_task.id, n], "a Task of 'env' with seed task and epoch, or raise InvalidTask of REASONS"),
    "score": (lambda p, _, text: len(p) == 2 and 0 <= p[0] <= 1 - (not text) and type(p[1]) is bool,
              "(reward from 0 to 1, whether the form is right) for any response, and no reward for none"),
    "graded": (lambda reward, *_: 0 <= reward <= 1, "a number from 0 to 1"), "leaks": (is_text, "a text"),
    "same_task_key": (lambda key, *_: all(map(is_text, key)), "a text, or a tuple of texts"),
    "gold": (is_text, "a text that scores 1"), "task_length": (lambda n, *_: n > 0, "a number above 0"),
    "skills": (lambda names, *_: all(map(is_text, names)) and not is_text(names), "a list of texts"),
    "warm_start_pairs": (lambda of, *_: all(is_prompt(prompt) and all(map(is_text, said))
                                            for role in of and ("agent", "env") for prompt, said in of[role]),
                         "{} or {'agent': [(prompt, response), ...], 'env': [...]}")}


def call_own(world, name, method, *args, **more):
    """method(*args, **more), a world's method of this name. Raises UserError if it fails, and unless its rule
    in RULES holds: what a model writes late in a run may be the first to break it."""
    try:
        with in_one_line(type(world), args):
            gave = method(*args, **more)
    except InvalidTask as reason:
        if str(reason) in world.REASONS:
            raise
        gave = reason
    with suppress(Exception):  # of another kind or shape: refused as well
        if RULES[name][0](gave, *args):
            return gave
    refuse(world, name, gave, *args)


def refuse(world, name, gave, *args):
    """Raises UserError, naming a method's file and line, its rule and what it gave for args."""
    code = inspect.unwrap(getattr(type(world), name)).__code__
    raise UserError(f"{code.co_filename}, line {code.co_firstlineno}: {name} must give {RULES[name][1]}; "
                    f"it gave {gave!r:.200}" + f" for {shown(args)}" * bool(args))


def probe_texts(world, policy, more=()):
    """Try every given task's texts with a policy; more: a teacher's. Raises UserError for a chat template
    that loses a message (`encode`), a prompt over --max-prompt-tokens, and an answer that this policy
    cannot write, or may not, as it is too long."""
    with in_one_line(type(world)):
        for t in [*world.base_tasks(), *more, *world.validation_tasks(), *world.validation_tasks("tuning")]:
            if fault := fault_of(world, policy, t):
                raise UserError(f"the task {t.text[:80]!r} {fault}")


def fault_of(world, policy, task) -> str:
    """Why a given task does not survive this policy's tokenizer and chat template, or ""."""
    if token := special_token_in(task, policy.tokenizer):
        return f"spells {token!r}, a control token of this model: remove or reword it"
    for prompt in (world.agent_prompt(task), world.env_prompt(task, None)):
        if (number := len(policy.encode(prompt))) > world.o.max_prompt_tokens:
            return f"makes a prompt of {number} tokens: raise --max-prompt-tokens or remove it"
    written = lambda text: policy.decode(policy.encode(text) + policy.end_of_turn)
    gold, episode = world.gold(task), world.start(task) is not None
    if gold and world.score(task, [*map(written, gold.split("\n"))] if episode else written(gold))[0] < 1:
        return f"has the answer {gold[:80]!r}, which this model's tokenizer turns into {written(gold)[:80]!r}"
    cut = not episode and (number := len(policy.encode(gold))) >= world.o.max_response_tokens
    return f"has a right answer of {number} tokens: raise --max-response-tokens above that" if cut else ""


# ---------------------------------------------------------------------------------------------
# what holds for tasks of every world


def task_keys(world, task: Task) -> frozenset:
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
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in ([*value, *value.values()] if isinstance(value, dict) else value):
            yield from task_texts(part)


def special_token_in(value, tokenizer) -> str:
    """The first control token of the tokenizer that a task, a text or a spec spells; "" if none.

    Encoded again, in a prompt, it would be a real one: the end of a turn, or a new one.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    tokens = {*getattr(tokenizer, "all_special_tokens", ()), *(str(t) for t in added if t.special)}
    return next((t for text in task_texts(value) for t in sorted(tokens) if t in text), "")


def check_task(world, task: Task, seed_task: Task, held_out, *tokenizers):
    """Raise InvalidTask unless a task that parse_task has passed may be used.

    held_out: the keys of held-out tasks. tokenizers: of the models that will read it. The reason is
    one of the three below, or what the world's own `leaks` says.
    """
    keys = task_keys(world, task)
    if seed_task.spec and keys & task_keys(world, seed_task):
        raise InvalidTask("copy of the seed")
    if keys & held_out:
        raise InvalidTask("held-out task")
    # such a text could close the user's turn and go on as the assistant
    if any(special_token_in(task, tokenizer) for tokenizer in tokenizers):
        raise InvalidTask("special tokens")
    if leak := world.leaks(task):
        raise InvalidTask(leak)


def written_tasks(world, o, policies, rollouts, seed_tasks, epoch, held_out, kept=()):
    """Read what the simulator wrote: yields (rollout, text, Task, ""), or (rollout, text, None, the
    reason why it is not a valid task).

    policies: the simulator's, then the agent's if that is another one. rollouts: their group is the
    index of their seed task; kept: tasks that the batch holds already.
    """
    seen = {key for task in kept for key in task_keys(world, task)}
    for r in rollouts:
        text = policies[0].decode(r.response)
        try:
            task = written_task(world, o, policies, r, text, seed_tasks[r.group], epoch, held_out)
            # not in the paper: a task counts once in a batch, however often it was written, or RWR
            # would reinforce the simulator's own most frequent outputs
            if seen & task_keys(world, task):
                raise InvalidTask("duplicate in the batch")
        except InvalidTask as reason:
            yield r, text, None, str(reason)
            continue
        seen |= task_keys(world, task)
        yield r, text, task, ""


def written_task(world, o, policies, rollout, text, seed_task, epoch, held_out) -> Task:
    """The task that a generation describes. Raises InvalidTask with the reason to count."""
    if rollout.limit:
        raise InvalidTask("truncated")
    if policies[0].has_control_tokens(rollout.response):
        raise InvalidTask("special tokens")
    task = world.parse_task(text, seed_task, epoch)
    check_task(world, task, seed_task, held_out, *(policy.tokenizer for policy in policies))
    # must fit both prompts, the agent's and, as a seed task, the simulator's; 0.5 for any p_hat
    prompts = world.agent_prompt(task), world.env_prompt(task, 0.5)
    if max(len(policy.encode(prompt)) for policy in policies for prompt in prompts) > o.max_prompt_tokens:
        raise InvalidTask("prompt too long")
    return task


def read_teacher(world, path, held_out=frozenset()) -> list:
    """Tasks of a teacher's file: JSONL, the field "text" in the form the simulator would write. No path: [].

    Raises UserError naming the line that is not a task of the world, or one that is held out.
    """
    tasks = []
    for n, record in enumerate(read_jsonl(path) if path else (), 1):
        try:
            task = world.parse_task(str(record.get("text")), NO_SEED, 0)
            check_task(world, task, NO_SEED, held_out)
        except InvalidTask as reason:
            raise UserError(f"{path}, record {n}: {reason}") from None
        tasks.append(replace(task, origin="teacher"))
    if path and not tasks:
        raise UserError(f"{path}: holds no tasks")
    return tasks
