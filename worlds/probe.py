"""Try a world before its run: its methods on a few tasks, then its texts on the model.

Usage: `open_world(o)` opens the world that the options of a run name and tries it;
`check_texts_survive(world, policy)` tries its texts once the model is loaded. What a user's own
world gets wrong is one line with the line of his file, before anything is trained.
"""
import inspect
import json
import random
from difflib import get_close_matches

from data_pool import Task
from errors import UserError, is_number, users_code, wrong_value
from worlds import InvalidTask, World, load_world, special_token_in, task_keys, task_texts


def open_world(o) -> World:
    """Open the world that the options of a run name, and try it on a few tasks. Raises
    UserError."""
    world_class = load_world(o.world)
    with users_code(inspect.getfile(world_class)):
        world = world_class(o)
        world.o = o  # its __init__ may have forgotten super().__init__(o)
        try_world(world)
    return world


def try_world(world):
    """Call the methods of a world as a run will, on a few tasks of each split, before its model is
    loaded. Raises UserError for a value that the loop cannot use, or would silently train on, and
    for a task that is in two splits."""
    note_near_misses(type(world))
    splits = {"base": world.base_tasks(), "validation": world.validation_tasks(),
              "tuning": world.validation_tasks("tuning")}
    if splits["base"] != world.base_tasks():
        raise wrong(world, "base_tasks", "the same list at each call", "others", "a second call")
    for split, tasks in splits.items():
        try_task_list(world, split, tasks)
        for task in some(tasks, 3):
            try_task(world, task)
    check_splits_disjoint(world, splits)
    check_demonstrations(world)
    warn_if_prompt_contains_answer(world, splits["base"])


def note_near_misses(world_class):
    """Print the methods of a world that are named nearly as an optional one that it lacks: they
    would never be called."""
    defined = {name for name in vars(world_class) if not name.startswith("_")}
    missing = [name for name in vars(World) if not name.startswith("_") and name not in defined]
    for name in sorted(defined - set(vars(World))):
        for near in get_close_matches(name, missing, 1, 0.7):
            print(f"{inspect.getfile(world_class)}: {name} is never called: did you mean {near}?",
                  flush=True)


def wrong(world, method: str, rule: str, value, argument) -> UserError:
    """Make the error that names a method of a world, what it must give, and what it gave."""
    if isinstance(argument, Task):
        argument = f"the task {argument.text[:80]!r}"
    return wrong_value(inspect.unwrap(getattr(type(world), method)), rule, value, argument)


def some(tasks, n: int) -> list:
    """Return n tasks, or all if there are fewer, spread over a list."""
    return tasks[::max(1, len(tasks) // n)][:n]


# ---- what a method may give


def is_text(value) -> bool:
    """Return whether it is a text; "" is one."""
    return isinstance(value, str)


def are_texts(value) -> bool:
    """Return whether it is a list or tuple of texts."""
    return isinstance(value, (list, tuple)) and all(map(is_text, value))


def is_key(value) -> bool:
    """Return whether it is a text, or a tuple of texts."""
    return is_text(value) or are_texts(value)


def is_prompt(value) -> bool:
    """Return whether it is a text, or a list of chat messages, and not empty."""
    if isinstance(value, list):
        return value != [] and all(set(message) == {"role", "content"} for message in value)
    return is_text(value) and value != ""


def is_task(task) -> bool:
    """Return whether it is a Task with a text, and a spec that JSON gives back as it was."""
    if not isinstance(task, Task) or not is_text(task.text) or not task.text:
        return False
    return json.loads(json.dumps(task.spec)) == task.spec


# of the methods that get a task
RETURNS = {
    "agent_prompt": (is_prompt, "a text or chat messages"), "category": (is_text, "a text"),
    "leaks": (is_text, "a text"), "gold": (is_text, "a text"),
    "skills": (are_texts, "a list of texts"), "task_length": (is_number, "a number"),
    "same_task_key": (is_key, "a text, or a tuple of texts")}


# ---- splits


def try_task_list(world, split: str, tasks):
    """Check the base tasks, or those of a held-out split: a list, of which only "tuning" may be
    empty."""
    method = "base_tasks" if split == "base" else "validation_tasks"
    if not isinstance(tasks, (list, tuple)) or not tasks and split != "tuning":
        raise wrong(world, method, "a list of Tasks, not empty", tasks, split)
    for task in tasks:
        if not is_task(task):
            raise wrong(world, method, "Tasks with a text and a spec for JSON", task, split)
        if split == "base" and task.origin != "base":
            raise wrong(world, method, "Tasks of origin 'base'", task, split)


def check_splits_disjoint(world, splits: dict):
    """Raise UserError if a task of one split is in another."""
    split_of = {}
    for split, tasks in splits.items():
        for task in tasks:
            for key in task_keys(world, task):
                other = split_of.setdefault(key, split)
                if other != split:
                    text = task.text[:80]
                    raise UserError(f"the {other} task {text!r} is among the {split} tasks as well")


def check_demonstrations(world):
    """Raise UserError if a world that trains its own base model shows it empty answers."""
    if not hasattr(world, "pairs"):
        return
    for prompt, response in world.pairs(random.Random(0), 20):
        if not response.strip():
            rule = "no empty response (a world without `gold` has none to show)"
            raise wrong(world, "pairs", rule, response, repr(prompt[:80]))


def warn_if_prompt_contains_answer(world, base):
    """Print a line if the right answer is in most of the agent's prompts."""
    tasks = some(base, 20)
    answers = []  # those that are in their task's prompt
    for task in tasks:
        prompt = "\n".join(task_texts(world.agent_prompt(task)))
        gold = world.gold(task)
        # a shorter one, such as a number, may be there by chance
        if len(gold) > 3 and gold in prompt:
            answers.append(gold)
    if len(answers) > len(tasks) / 2:
        print(f"the right answer is in the agent's prompt of {len(answers)} of {len(tasks)} "
              f"base tasks, such as {answers[0][:80]!r}: can it be copied? "
              f"({inspect.getfile(type(world))}, agent_prompt)", flush=True)


# ---- a task


def try_task(world, task):
    """Ask a world what the loop asks about a task."""
    for method, (is_right, rule) in RETURNS.items():
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
    """Return a text as a response to a task: the turns of an episode are its lines."""
    return text if world.start(task) is None else text.split("\n")


def try_score(world, task, text) -> float:
    """Return the reward of a response, checked."""
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
    """Parse a text as if the simulator had written it."""
    rule = "a Task of 'env' with seed task and epoch, or raise InvalidTask with one of REASONS"
    try:
        task = world.parse_task(text, seed_task, 1)
    except InvalidTask as reason:
        if str(reason) not in world.REASONS:
            raise wrong(world, "parse_task", rule, reason, repr(text[:80])) from None
        return
    if not is_task(task) or (task.origin, task.seed_task, task.epoch) != ("env", seed_task.id, 1):
        raise wrong(world, "parse_task", rule, task, repr(text[:80]))


# ---- its texts on the model


def check_texts_survive(world, policy, teacher=()):
    """Try the texts of every base, held-out and teacher's task with a policy.

    Raises UserError for a chat template that loses a message (`encode`), a prompt over
    --max-prompt-tokens, and an answer that this policy cannot write, or may not, as it is too long.
    """
    held_out = *world.validation_tasks(), *world.validation_tasks("tuning")
    for task in [*world.base_tasks(), *teacher, *held_out]:
        fault = text_fault(world, policy, task)
        if fault:
            raise UserError(f"the task {task.text[:80]!r} {fault}")


def text_fault(world, policy, task) -> str:
    """Return why a task does not survive this policy's tokenizer and chat template, or ""."""
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
