"""Try the functions of curriculum.py that the options name, before anything is trained.

Usage: support/options.py calls `try_functions`. If a function fails, or returns a wrong value on
which a run would silently train, one line reports its place in curriculum.py before the run begins.
If it fails during a run, the traceback is an ordinary one.
"""
import curriculum
from data_pool import Trace
from errors import UserError, choose, is_number, users_code, wrong_value

MOST_TRIED = 1000  # try at most this many epochs, and values of p_hat


def try_functions(o):
    """Call the four functions on values like those of a run. Raise UserError if one fails."""
    try_schedule(function_of("alpha_", o.alpha_schedule), o)
    try_difficulty_reward(function_of("reward_", o.difficulty_reward), o)
    try_seed_selection(function_of("seeds_", o.seed_selection), o)
    try_agent_reward(function_of("agent_reward_", o.agent_reward), o)


def function_of(prefix: str, name: str):
    """Return a function of curriculum.py. Raise UserError if it is not there."""
    functions = curriculum.functions(prefix)
    if name not in functions:
        raise UserError(f"curriculum.py has no function {prefix}{name}: {choose(name, functions)}")
    return functions[name]


def try_once(function, is_right, rule: str, *args):
    """Return function(*args). Raise UserError if it fails or its value breaks the rule."""
    arguments = ", ".join(map(repr, args))[-300:]
    with users_code(function.__code__.co_filename, arguments):
        value = function(*args)
    if not is_right(value):
        raise wrong_value(function, rule, value, arguments)
    return value


def try_schedule(schedule, o):
    """Try it in every epoch, with an agent that solves half of the tasks and with no tasks."""
    def is_alpha(value):
        return is_number(value) and 0 < value < 1

    some, none = [1] * (o.G + 1), [0] * (o.G + 1)
    for success, mixed, counts in ((0.5, 0.9, some), (0.0, None, none)):
        alpha = o.alpha
        for epoch in range(1, min(o.epochs, MOST_TRIED) + 1):
            context = curriculum.Context(
                epoch=epoch, epochs=o.epochs, alpha=o.alpha, alpha_end=o.alpha_end, previous=alpha,
                new_tasks=sum(counts), success=success, mixed_share=mixed or 0.0,
                p_hat_counts=counts, mixed_of_possible=mixed)
            alpha = try_once(schedule, is_alpha, "a number between 0 and 1", context)


def try_difficulty_reward(reward, o):
    """Try every p_hat, at --alpha and near both ends."""
    for alpha in (o.alpha, 0.05, 0.95):
        for k in range(min(o.G, MOST_TRIED) + 1):
            try_once(reward, is_number, "a finite number", k / o.G, alpha, o.beta)


def try_seed_selection(weigh, o):
    """Try it with a task of every p_hat."""
    p_hats = [k / o.G for k in range(min(o.G, MOST_TRIED) + 1)]

    def are_weights(value):
        if not isinstance(value, (list, tuple)) or len(value) != len(p_hats):
            return False
        return all(is_number(weight, 0) for weight in value)

    rule = "a list of weights, one for each p_hat, finite and not negative"
    try_once(weigh, are_weights, rule, p_hats, o.alpha)


def try_agent_reward(reward, o):
    """Try the shortest possible right attempt, and a wrong one that was cut off."""
    def is_reward(value):
        return is_number(value, 0, 1)

    longest = o.max_response_tokens
    text = " ".join(["7"] * longest)
    right = Trace("7", 1.0, True, False, 1, 1.0)
    cut_off = Trace(text, 0.0, False, True, longest, 0.0)
    for trace in (right, cut_off):
        try_once(reward, is_reward, "a number from 0 to 1", trace)
