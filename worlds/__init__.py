"""Worlds: what the loop needs to know of a domain, as one class.

Usage: every module of this folder with a `class World(worlds.World)` is a world, by its name:
`--world NAME`. A new one begins as a copy of worlds/template.py; nothing else changes, and
tests/test_worlds.py holds it against this contract. A task is a data_pool.Task, whose spec is plain
JSON and holds all that its checker needs. Text that a model wrote is only ever parsed, never
executed.

Not a world's business: whether a generated task is a copy of its seed, a held-out task, a duplicate
in its batch, or has control tokens in it. `check_task` says so for all of them.
"""
import importlib
import inspect
import json
import pkgutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from model.files import UserError, choose, is_number, users_code, wrong_value
from data_pool import Task, read_jsonl

NO_SEED = Task("", {})


class InvalidTask(Exception):
    """What the simulator wrote is not a task; the message is the reason it is counted under.

    detail: for the author of a file, what is wrong in it.
    """

    def __init__(self, reason: str, detail=""):
        super().__init__(reason)
        self.detail = detail


class World:
    """A domain: its tasks, its prompts and its checker. A subclass has to define, besides __init__:

    base_tasks()           list of Task, origin "base": the seed tasks that everything starts from
    validation_tasks(split="validation")  list of held-out Tasks: split "validation" is only ever
                           reported, "tuning" is for choosing settings; no key (see same_task_key)
                           of one split is in the other or in the base
    env_prompt(seed_task, success)  what the simulator is asked: text, or a list of chat
                           messages. success: p_hat in [0, 1], None if unknown, which the prompt
                           must say. alpha is not given: a schedule moves it, and old records are
                           imitated under the prompt they were written for. If the last message is
                           the assistant's, the simulator goes on with it, and parse_task gets what
                           follows
    parse_task(text, seed_task, epoch)  the simulator's text -> Task(text, spec, "env",
                           seed_task.id, epoch); raises InvalidTask with one of REASONS and nothing
                           else, for any text. NO_SEED (an empty spec) stands for no seed
    agent_prompt(task)     what the agent is asked: text, or a list of chat messages
    score(task, response)  Eq. 1 -> (reward in [0, 1], valid); valid: well-formed and evaluable.
                           Never raises, for any text; quick for long ones. Of an episode the
                           response is the list of the agent's turns

    and may override everything below.
    """
    REASONS = ()       # every reason that parse_task and leaks give, for counting
    DEFAULTS = {}      # {option of a run: its default here}; a preset and the command line win
    OPTIONS = {}       # {name: (default, help, choices or None)}: options of its own, --name
                       # (numbers are 0 or more, whole ones 1 or more unless the default is 0)
    chat = True        # whether --model names a chat model, whose memory is then estimated
    max_turns = 1      # limits of an episode; --max-response-tokens is for a turn
    max_episode_tokens = 0
    warm_start_passes = 0  # of a warm start that is not told; 0: by how much there is to imitate
    imitate_once = False  # whether the simulator imitates a task in one epoch only
    category_name = "kind"  # for the report: what category tells apart
    length_unit = "words"  # and what task_length counts
    form = ""          # how answers are written, where the spec of a task does not say it

    def __init__(self, o):
        """o: the run's Options. Raises UserError for options and files that cannot be used."""
        self.o = o

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
    """A module that users change. Raises UserError for whatever goes wrong while it is imported."""
    with users_code(find_spec(name).origin):
        return importlib.import_module(name)


def open_world(o) -> World:
    """The world that the options of a run name, tried on a few tasks (`try_world`). Raises
    UserError."""
    kind = load_world(o.world)
    with users_code(inspect.getfile(kind)):
        world = kind(o)
        world.o = o  # its __init__ may have forgotten super().__init__(o)
        try_world(world)
    return world


def open_policy(model: str, o, adapters=None, **how):
    """The Policy of a model folder or hub name, as the options say. adapters: those that it gets;
    None: both, or only the agent's next to an --env-model. how: more of what Policy.load takes."""
    if not model:
        raise UserError("this world needs --model: a folder or hub name of a chat model")
    # here and not above: options and --help are read without torch and transformers
    from policy import Policy, policy_options
    if adapters is None:
        adapters = ("agent",) if o.env_model else ("agent", "env")
    return Policy.load(model, adapters=adapters, **policy_options(o), **how)


# ---------------------------------------------------------------------------------------------
# before a run


def try_world(world):
    """Call the methods of a world as a run will, on a few tasks of each split, before its model is
    loaded. Raises UserError in one line for a value that the loop cannot use, or would train on
    silently, and for a task that stands in two splits; open_world says the line of what is
    raised."""
    splits = {"base": world.base_tasks(), "validation": world.validation_tasks(),
              "tuning": world.validation_tasks("tuning")}
    if splits["base"] != world.base_tasks():
        raise wrong(world, "base_tasks", "the same list at each call", "others", "a second call")
    for split, tasks in splits.items():
        try_task_list(world, split, tasks)
        for task in some(tasks, 3):
            try_task(world, task)
    need_splits_apart(world, splits)
    say_if_prompts_tell(world, splits["base"])


def wrong(world, method: str, rule: str, value, given) -> UserError:
    """The error that names a method of a world, what it must give, and what it gave."""
    if isinstance(given, Task):
        given = f"the task {given.text[:80]!r}"
    return wrong_value(inspect.unwrap(getattr(type(world), method)), rule, value, given)


def some(tasks, n: int) -> list:
    """n tasks, or all if there are fewer, spread over a list."""
    return tasks[::max(1, len(tasks) // n)][:n]


def is_text(value) -> bool:
    """A text, "" among them."""
    return isinstance(value, str)


def are_texts(value) -> bool:
    """A list or tuple of texts."""
    return isinstance(value, (list, tuple)) and all(map(is_text, value))


def is_key(value) -> bool:
    """A text, or a tuple of texts."""
    return is_text(value) or are_texts(value)


def is_prompt(value) -> bool:
    """A text, or a list of chat messages, and not empty."""
    if isinstance(value, list):
        return value != [] and all(set(message) == {"role", "content"} for message in value)
    return is_text(value) and value != ""


# what the methods that are given a task must give
GIVES = {
    "agent_prompt": (is_prompt, "a text or chat messages"), "category": (is_text, "a text"),
    "leaks": (is_text, "a text"), "gold": (is_text, "a text"),
    "skills": (are_texts, "a list of texts"), "task_length": (is_number, "a number"),
    "same_task_key": (is_key, "a text, or a tuple of texts")}


def is_task(task) -> bool:
    """A Task with a text, and a spec that comes back from JSON as it was."""
    if not isinstance(task, Task) or not is_text(task.text) or not task.text:
        return False
    return json.loads(json.dumps(task.spec)) == task.spec


def try_task_list(world, split: str, tasks):
    """The base tasks, or those of a held-out split: a list, in which none but "tuning" may be
    empty."""
    method = "base_tasks" if split == "base" else "validation_tasks"
    if not isinstance(tasks, (list, tuple)) or not tasks and split != "tuning":
        raise wrong(world, method, "a list of Tasks, not empty", tasks, split)
    for task in tasks:
        if not is_task(task):
            raise wrong(world, method, "Tasks with a text and a spec for JSON", task, split)
        if split == "base" and task.origin != "base":
            raise wrong(world, method, "Tasks of origin 'base'", task, split)


def need_splits_apart(world, splits: dict):
    """Raises UserError if a task of one split stands in another."""
    split_of = {}
    for split, tasks in splits.items():
        for task in tasks:
            for key in task_keys(world, task):
                other = split_of.setdefault(key, split)
                if other != split:
                    text = task.text[:80]
                    raise UserError(f"the {other} task {text!r} is among the {split} tasks as well")


def try_task(world, task):
    """What the loop asks of a world about a task."""
    for method, (is_right, rule) in GIVES.items():
        value = getattr(world, method)(task)
        if not is_right(value):
            raise wrong(world, method, rule, value, task)
    for success in (None, 0.5):
        prompt = world.env_prompt(task, success)
        if not is_prompt(prompt):
            raise wrong(world, "env_prompt", "a text or chat messages", prompt, task)
    # a few responses of the agent, and the same texts as if the simulator had written them
    gold = world.gold(task)
    for text in ("", "?", task.text, gold):
        reward = try_score(world, task, text)
        if text and text == gold and reward != 1:
            raise wrong(world, "gold", "a response that scores 1", gold, task)
        try_parse(world, task, text)
    state = world.start(task)
    if state is not None:  # an episode
        observation = world.respond(task, state, "")
        if observation is not None and not is_text(observation):
            raise wrong(world, "respond", "a text, or None at the end", observation, task)


def response_of(world, task, text):
    """A text as a response to a task: of an episode a turn is a line."""
    return text if world.start(task) is None else text.split("\n")


def try_score(world, task, text) -> float:
    """The reward of a response."""
    response = response_of(world, task, text)
    score = world.score(task, response)
    rule = "(reward from 0 to 1, whether the form is right) for any response"
    is_pair = isinstance(score, (tuple, list)) and len(score) == 2
    if not is_pair or not is_number(score[0], 0, 1) or not isinstance(score[1], bool):
        raise wrong(world, "score", rule, score, repr(text[:80]))
    reward = score[0]
    if reward and not text:
        raise wrong(world, "score", "no reward for an empty response", reward, task)
    graded = world.graded(task, response, reward)
    if not is_number(graded, 0, 1):
        raise wrong(world, "graded", "a number from 0 to 1", graded, task)
    return reward


def try_parse(world, seed_task, text):
    """A text as if the simulator had written it."""
    rule = "a Task of 'env' with seed task and epoch, or raise InvalidTask with one of REASONS"
    try:
        task = world.parse_task(text, seed_task, 1)
    except InvalidTask as reason:
        if str(reason) not in world.REASONS:
            raise wrong(world, "parse_task", rule, reason, repr(text[:80])) from None
        return
    if not is_task(task) or (task.origin, task.seed_task, task.epoch) != ("env", seed_task.id, 1):
        raise wrong(world, "parse_task", rule, task, repr(text[:80]))


def say_if_prompts_tell(world, base):
    """Print a line if the right answer stands in most of the agent's prompts."""
    tasks = some(base, 20)
    answers = []  # those that stand in their task's prompt
    for task in tasks:
        prompt = "\n".join(task_texts(world.agent_prompt(task)))
        gold = world.gold(task)
        # a shorter one, such as a number, may stand there by chance
        if len(gold) > 3 and gold in prompt:
            answers.append(gold)
    if len(answers) > len(tasks) / 2:
        print(f"the right answer stands in the agent's prompt of {len(answers)} of {len(tasks)} "
              f"base tasks, such as {answers[0][:80]!r}: can it be copied? "
              f"({inspect.getfile(type(world))}, agent_prompt)", flush=True)


def check_texts_survive(world, policy, more=()):
    """Try every given task's texts with a policy; more: a teacher's. Raises UserError for a chat
    template that loses a message (`encode`), a prompt over --max-prompt-tokens, and an answer that
    this policy cannot write, or may not, as it is too long."""
    held_out = *world.validation_tasks(), *world.validation_tasks("tuning")
    for task in [*world.base_tasks(), *more, *held_out]:
        fault = fault_of(world, policy, task)
        if fault:
            raise UserError(f"the task {task.text[:80]!r} {fault}")


def fault_of(world, policy, task) -> str:
    """Why a given task does not survive this policy's tokenizer and chat template, or ""."""
    token = special_token_in(task, policy.tokenizer)
    if token:
        return f"spells {token!r}, a control token of this model: remove or reword it"
    for prompt in (world.agent_prompt(task), world.env_prompt(task, None)):
        number = len(policy.encode(prompt))
        if number > world.o.max_prompt_tokens:
            return f"makes a prompt of {number} tokens: raise --max-prompt-tokens or remove it"
    gold = world.gold(task)
    if not gold:
        return ""
    is_episode = world.start(task) is not None
    lines = gold.split("\n") if is_episode else [gold]
    written = "\n".join(policy.decode(policy.encode(line) + policy.end_of_turn) for line in lines)
    reward, _ = world.score(task, response_of(world, task, written))
    if reward < 1:
        return f"has the answer {gold[:80]!r}, which this tokenizer turns into {written[:80]!r}"
    number = len(policy.encode(gold))
    if number >= world.o.max_response_tokens and not is_episode:
        return f"has a right answer of {number} tokens: raise --max-response-tokens above that"
    return ""


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
    """The first control token of the tokenizer that a task, a text or a spec spells; "" if none.

    Encoded again, in a prompt, it would be a real one: the end of a turn, or a new one.
    """
    tokens = set(getattr(tokenizer, "all_special_tokens", ()))
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        if token.special:
            tokens.add(str(token))
    for text in task_texts(value):
        for token in sorted(tokens):
            if token in text:
                return token
    return ""


def check_task(world, task, seed_task, held_out, *tokenizers):
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
    leak = world.leaks(task)
    if leak:
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
    for policy in policies:
        longest = max(len(policy.encode(prompt)) for prompt in prompts)
        if longest > o.max_prompt_tokens:
            raise InvalidTask("prompt too long")
    return task


def read_teacher(world, path, held_out=frozenset()) -> list:
    """Tasks of a teacher's file: JSONL, the field "text" in the form the simulator would write. No
    path: [].

    Raises UserError naming the line that is not a task of the world, or one that is held out.
    """
    if not path:
        return []
    tasks = []
    for n, record in enumerate(read_jsonl(path), 1):
        try:
            task = world.parse_task(str(record.get("text")), NO_SEED, 0)
            check_task(world, task, NO_SEED, held_out)
        except InvalidTask as reason:
            raise UserError(f"{path}, record {n}: {reason}") from None
        tasks.append(replace(task, origin="teacher"))
    if not tasks:
        raise UserError(f"{path}: holds no tasks")
    return tasks
