"""Try a world before its run: its methods on a few tasks, then its texts on the model.

Usage: `open_world(o)` opens and tries the world named by a run's options;
`check_texts_survive(world, policy)` tries its texts once the model is loaded. A mistake in a user's
own world is reported in one line with its place in the file, before anything is trained.
"""
import inspect
import json
import random
from difflib import get_close_matches

from data_pool import Task
from errors import UserError, is_number, users_code, wrong_value
from worlds import InvalidTask, World, load_world, special_token_in, task_keys, task_texts


def open_world(o) -> World:
    """Return the world named by a run's options, tried on a few tasks. Raise UserError if it
    fails."""
    world_class = load_world(o.world)
    with users_code(inspect.getfile(world_class)):
        world = world_class(o)
        world.o = o  # its __init__ may have forgotten super().__init__(o)
        try_world(world)
    return world


def try_world(world):
    """Call a world's methods as a run will, on a few tasks of each split, before loading a model.

    Raise UserError for a value that the loop cannot use or would silently train on, and for a task
    in two splits.
    """
    note_near_misses(type(world))
    splits = {"base": world.base_tasks(), "validation": world.validation_tasks(),
              "tuning": world.validation_tasks("tuning")}
    expect(splits["base"] == world.base_tasks(), world.base_tasks, "the same tasks at each call")
    for split, tasks in splits.items():
        method = world.base_tasks if split == "base" else world.validation_tasks
        is_list = isinstance(tasks, list) and (tasks or split == "tuning")
        expect(is_list, method, "a list of Tasks, not empty", tasks)
        for task in tasks:
            expect(is_task(task), method, "Tasks with a text and a spec for JSON", task)
            is_marked = split != "base" or task.origin == "base"
            expect(is_marked, method, "Tasks of origin 'base'", task)
        for task in some(tasks, 3):
            try_task(world, task)
    check_splits_disjoint(world, splits)
    warn_if_prompt_contains_answer(world, splits["base"])
    # a world must not train its own base model on empty answers
    if hasattr(world, "pairs"):
        for prompt, response in world.pairs(random.Random(0), 20):
            expect(response.strip(), world.pairs, "no empty response (is `gold` missing?)", prompt)


def note_near_misses(world_class):
    """Print a world's methods whose names nearly match an optional one: they are never called."""
    missing = [name for name in vars(World) if name not in vars(world_class)]
    for name in vars(world_class).keys() - vars(World):
        for near in get_close_matches(name, missing, 1, 0.7):
            print(f"{inspect.getfile(world_class)}: {name} is never called: did you mean {near}?",
                  flush=True)


def expect(is_right, method, rule: str, value="others", argument="this call"):
    """Raise a UserError unless a method's value is right: what it must give, and what it gave."""
    if not is_right:
        raise wrong_value(inspect.unwrap(method), rule, value, repr(argument)[:200])


def some(tasks, n: int) -> list:
    """Return n tasks spread over a list, or all if there are fewer."""
    return tasks[::max(1, len(tasks) // n)][:n]


def is_task(task) -> bool:
    """Return whether it is a Task with a text, and a spec that survives JSON unchanged."""
    if not isinstance(task, Task) or not task.text:
        return False
    return json.loads(json.dumps(task.spec)) == task.spec


def check_splits_disjoint(world, splits: dict):
    """Raise UserError if a task is in two splits."""
    split_of = {}
    for split, tasks in splits.items():
        for task in tasks:
            for key in task_keys(world, task):
                other = split_of.setdefault(key, split)
                if other != split:
                    raise UserError(f"the {other} task {task.text[:80]!r} is among the {split} "
                                    "tasks as well")


def warn_if_prompt_contains_answer(world, base):
    """Print a line if most of the agent's prompts contain the right answer."""
    tasks, copied = some(base, 20), []
    for task in tasks:
        prompt = "\n".join(task_texts(world.agent_prompt(task)))
        gold = world.gold(task)
        # a shorter answer, such as a number, may appear by chance
        if len(gold) > 3 and gold in prompt:
            copied.append(gold)
    if len(copied) > len(tasks) / 2:
        print(f"the right answer is in the agent's prompt of {len(copied)} of {len(tasks)} "
              f"base tasks, such as {copied[0][:80]!r}: can it be copied? "
              f"({inspect.getfile(type(world))}, agent_prompt)", flush=True)


# ---- a task

# {method of a task: its allowed types of result}
RETURNS = {
    "category": str, "leaks": str, "gold": str, "skills": (list, tuple),
    "task_length": (int, float), "same_task_key": (str, tuple)}


def is_prompt(value) -> bool:
    """Return whether it is a text, or a list of chat messages, and not empty."""
    if isinstance(value, list):
        return value != [] and all(set(message) == {"role", "content"} for message in value)
    return isinstance(value, str) and value != ""


def try_task(world, task):
    """Call the methods that the loop calls on a task."""
    for name, types in RETURNS.items():
        method = getattr(world, name)
        value = method(task)
        expect(isinstance(value, types), method, f"one of {types}", value, task)
    rule = "a text or chat messages, not empty"
    prompt = world.agent_prompt(task)
    expect(is_prompt(prompt), world.agent_prompt, rule, prompt, task)
    for success in (None, 0.5):
        prompt = world.env_prompt(task, success)
        expect(is_prompt(prompt), world.env_prompt, rule, prompt, task)
    # try texts as responses of the agent, and as if the simulator had written them
    gold = world.gold(task)
    for text in ("", "?", task.text, gold):
        try_score(world, task, text, is_gold=text == gold)
        try_parse(world, task, text)
    state = world.start(task)
    if state is not None:  # an episode
        observation = world.respond(task, state, "")
        is_observation = observation is None or isinstance(observation, str)
        expect(is_observation, world.respond, "a text, or None at the end", observation, task)


def response_of(world, task, text):
    """Return a text as a response to a task: in an episode its lines are the turns."""
    return text if world.start(task) is None else text.split("\n")


def try_score(world, task, text, is_gold):
    """Score a response: the gold one must earn 1, an empty one 0."""
    response = response_of(world, task, text)
    score = world.score(task, response)
    is_score = isinstance(score, tuple) and len(score) == 2 and isinstance(score[1], bool)
    rule = "(reward from 0 to 1, whether the form is right) for any response"
    expect(is_score and is_number(score[0], 0, 1), world.score, rule, score, text)
    reward = score[0]
    if not text:
        expect(reward == 0, world.score, "no reward for an empty response", reward, task)
    elif is_gold:
        expect(reward == 1, world.gold, "a response that scores 1", text, task)
    graded = world.graded(task, response, reward)
    expect(is_number(graded, 0, 1), world.graded, "a number from 0 to 1", graded, task)


def try_parse(world, seed_task, text):
    """Parse a text as if the simulator had written it."""
    try:
        result = world.parse_task(text, seed_task, 1)
    except InvalidTask as reason:
        is_right, result = str(reason) in world.REASONS, reason
    else:
        expected = "env", seed_task.id, 1
        is_right = is_task(result) and (result.origin, result.seed_task, result.epoch) == expected
    rule = ("a Task of 'env' with its seed task's id and epoch, or raise InvalidTask with one of "
            "REASONS")
    expect(is_right, world.parse_task, rule, result, text)


# ---- its texts on the model


def check_texts_survive(world, policy, teacher=()):
    """Try the texts of every base, held-out and teacher's task with a policy.

    Raise UserError for a chat template that drops a message (`encode`), a prompt over
    --max-prompt-tokens, and a right answer that this policy cannot write or that is too long.
    """
    held_out = *world.validation_tasks(), *world.validation_tasks("tuning")
    for task in [*world.base_tasks(), *teacher, *held_out]:
        fault = text_fault(world, policy, task)
        if fault:
            raise UserError(f"the task {task.text[:80]!r} {fault}")


def text_fault(world, policy, task) -> str:
    """Return why a task does not survive a policy's tokenizer and chat template, or ""."""
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
        return f"has the answer {gold[:80]!r}, which comes back as {written[:80]!r} and earns less"
    number = len(policy.encode(gold))
    if number >= world.o.max_response_tokens and not is_episode:
        return f"has a right answer of {number} tokens: raise --max-response-tokens above that"
    return ""
