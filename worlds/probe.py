"""Try a world before its run: first its methods, on a few tasks, then its texts, on the model.

Usage: `open_world(o)` opens and tries the world that a run's options name.
`check_texts_survive(world, policy)` tries the world's texts once the model is loaded. A mistake in
a user's own world is reported in one line, with its place in the file, before anything is trained.
"""
import inspect
import json
from dataclasses import replace
from difflib import get_close_matches

from data_pool import Task
from errors import UserError, users_code, wrong_value
from worlds import InvalidTask, World, load_world, special_token_in, task_keys, task_texts


def open_world(o) -> World:
    """Return the world that a run's options name, after trying it on a few tasks.

    Raise UserError if the world fails.
    """
    world_class = load_world(o.world)
    with users_code(inspect.getfile(world_class)):
        world = world_class(o)
        world.o = o  # its __init__ may have forgotten super().__init__(o)
        try_world(world)
    return world


def try_world(world):
    """Call a world's methods as a run will, on a few tasks of each split, before a model is loaded.

    Raise UserError for a value that the loop cannot use or on which it would silently train, and
    for a task that is in two splits.
    """
    note_near_misses(type(world))
    splits = {"base": world.base_tasks(), "validation": world.validation_tasks(),
              "tuning": world.validation_tasks("tuning")}
    expect(splits["base"] == world.base_tasks(), world.base_tasks, "the same tasks at each call")
    split_of = {}
    for split, tasks in splits.items():
        method = world.base_tasks if split == "base" else world.validation_tasks
        is_list = isinstance(tasks, list) and (tasks or split == "tuning")
        expect(is_list, method, "a list of Tasks that is not empty", tasks)
        for task in tasks:
            is_right = is_task(task) and (task.origin == "base" or split != "base")
            rule = "Tasks with a text and a plain JSON spec, base tasks with the origin 'base'"
            expect(is_right, method, rule, task)
            for key in task_keys(world, task):
                is_new = split_of.setdefault(key, split) == split
                expect(is_new, method, "no task that another split has", task)
        # try three at most, spread over the list
        for task in tasks[::1 + len(tasks) // 3]:
            try_task(world, task)
    warn_if_prompts_contain_answers(world, splits["base"][:20])


def note_near_misses(world_class):
    """Print each method of a world that a run will never call, but whose name nearly matches that
    of an optional method: it may be misspelt."""
    missing = vars(World).keys() - vars(world_class)
    for name in vars(world_class).keys() - vars(World):
        for near in get_close_matches(name, missing, 1, 0.7):
            print(f"{inspect.getfile(world_class)}: {name} is never called: did you mean {near}?",
                  flush=True)


def expect(is_right, method, rule: str, value="other tasks", argument="this call"):
    """Raise UserError unless is_right; the message has the rule, what the method returned (value)
    and what it was called with (argument)."""
    if not is_right:
        raise wrong_value(inspect.unwrap(method), rule, value, repr(argument)[:200])


def is_task(task) -> bool:
    """Return whether a value is a Task with a text, and with a spec that JSON does not change."""
    if not isinstance(task, Task) or not task.text:
        return False
    return json.loads(json.dumps(task.spec)) == task.spec


def warn_if_prompts_contain_answers(world, tasks):
    """Print a line if most of the agent's prompts contain the right answer."""
    copied = []
    for task in tasks:
        prompt = "\n".join(task_texts(world.agent_prompt(task)))
        gold = world.gold(task)
        # an answer of three characters or fewer, such as a number, may appear there by chance
        if len(gold) > 3 and gold in prompt:
            copied.append(gold)
    if len(copied) > len(tasks) / 2:
        print(f"the right answer is in the agent's prompt of most base tasks, such as "
              f"{copied[0]!r:.80}: can it be copied? ({inspect.getfile(type(world))})", flush=True)


# ---- a task

# {method of one argument, a task: the types that it may return}
RETURNS = {"agent_prompt": (str, list), "category": str, "leaks": str, "skills": (list, tuple),
           "task_length": (int, float)}


def try_task(world, task):
    """Call on one task the methods that the loop will call. Raise UserError for a wrong value."""
    for name, types in RETURNS.items():
        method = getattr(world, name)
        value = method(task)
        expect(isinstance(value, types), method, f"one of {types}", value, task)
    for success in (None, 0.5):
        prompt = world.env_prompt(task, success)
        rule = "a text or chat messages"
        expect(isinstance(prompt, (str, list)), world.env_prompt, rule, prompt, task)
    # try each text as a response of the agent, and as if the simulator had written it
    gold = world.gold(task)
    rewards = {}
    for text in ("", "?", task.text, gold):
        score = world.score(task, response_of(world, task, text))
        is_pair = isinstance(score, tuple) and len(score) == 2
        expect(is_pair, world.score, "(reward, whether the form is right)", score, text)
        rewards[text] = score[0]
        try_parse(world, task, text)
    expect(rewards[""] == 0, world.score, "no reward for an empty response", rewards[""], task)
    # if the world has no right answer, the gold is "" and earns 0
    expect(rewards[gold] == bool(gold), world.gold, "a response that scores 1", gold, task)


def response_of(world, task, text):
    """Return a text in the form of a response to a task: in an episode, the list of its lines."""
    return text if world.start(task) is None else text.split("\n")


def try_parse(world, seed_task, text):
    """Parse a text as if the simulator had written it. Raise UserError for a wrong result."""
    try:
        task = world.parse_task(text, seed_task, 1)
        is_right = is_task(task) and task == replace(
            task, origin="env", seed_task=seed_task.id, epoch=1)
    except InvalidTask as reason:
        is_right, task = str(reason) in world.REASONS, reason
    rule = ("a Task of origin 'env', with its seed task's id and its epoch, or raise InvalidTask "
            "with one of REASONS")
    expect(is_right, world.parse_task, rule, task, text)


# ---- its texts on the model


def check_texts_survive(world, policy, teacher=()):
    """Try the texts of all base tasks, held-out tasks and a teacher's tasks with a policy.

    Raise UserError for a task that spells a control token, a prompt over --max-prompt-tokens, a
    right answer that is too long or that this policy cannot write, and, through `encode`, for a
    chat template that drops a message.
    """
    held_out = *world.validation_tasks(), *world.validation_tasks("tuning")
    for task in [*world.base_tasks(), *teacher, *held_out]:
        fault = text_fault(world, policy, task)
        if fault:
            raise UserError(f"the task {task.text[:80]!r} {fault}")


def text_fault(world, policy, task) -> str:
    """Return why a task cannot be used with a policy's tokenizer and chat template, or ""."""
    token = special_token_in(task, policy.tokenizer)
    if token:
        return f"spells {token!r}, a control token of this model: remove or reword the task"
    for prompt in (world.agent_prompt(task), world.env_prompt(task, None)):
        number = len(policy.encode(prompt))
        if number > world.o.max_prompt_tokens:
            return f"makes a prompt of {number} tokens: raise --max-prompt-tokens or remove it"
    gold = world.gold(task)
    if not gold:
        return ""
    is_episode = world.start(task) is not None
    written = []
    for turn in gold.split("\n") if is_episode else [gold]:
        tokens = policy.encode(turn)
        if len(tokens) >= world.o.max_response_tokens:
            return f"has a right answer of {len(tokens)} tokens: raise --max-response-tokens"
        written.append(policy.decode(tokens + policy.end_of_turn))
    reward, _ = world.score(task, written if is_episode else written[0])
    if reward < 1:
        return (f"has the answer {gold!r:.80}, which comes back as {written!r:.80} from the "
                "tokenizer and then earns less than 1")
    return ""
