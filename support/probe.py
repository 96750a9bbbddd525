"""Try the functions of curriculum.py that the options name, before anything is trained.

Usage: support/options.py calls `try_functions`. If a function raises an exception, or returns a
wrong value on which a run would silently train, one line reports its place in curriculum.py before
the run begins. During a run, a wrong value is still reported in one line, but an exception ends in
an ordinary traceback.
"""
from contextlib import contextmanager

import curriculum
from data_pool import Trace
from errors import UserError, checked, choose, users_code, wrong_value

MOST_TRIED = 1000  # try at most this many epochs


def try_functions(o):
    """Call the four functions on values like those of a run.

    Raise UserError if one of them fails or returns a wrong value.
    """
    p_hats = [k / o.G for k in range(o.G + 1)]
    with trying("alpha_", o.alpha_schedule) as schedule:
        try_schedule(schedule, o)
    with trying("reward_", o.difficulty_reward) as reward:
        for p_hat in p_hats:
            checked(reward, reward(p_hat, o.alpha, o.beta))
    with trying("seeds_", o.seed_selection) as weigh:
        weights = weigh(p_hats, o.alpha)
        if not isinstance(weights, (list, tuple)) or len(weights) != len(p_hats):
            raise wrong_value(weigh, "a weight for each p_hat", weights, p_hats)
        for weight in weights:
            checked(weigh, weight, 0)
    with trying("agent_reward_", o.agent_reward) as reward:
        # try the shortest possible attempt, which is right, then a wrong one that was cut off
        checked(reward, reward(Trace("7", 1.0, True, False, 1, 1.0)), 0, 1)
        cut_off = Trace("7 7 7", 0.0, False, True, o.max_response_tokens, 0.0)
        checked(reward, reward(cut_off), 0, 1)


@contextmanager
def trying(prefix: str, name: str):
    """Yield a function of curriculum.py. Raise UserError if there is none of that name, or if the
    code in the `with` block, which calls it, raises an exception."""
    functions = curriculum.functions(prefix)
    if name not in functions:
        raise UserError(f"curriculum.py has no function {prefix}{name}: {choose(name, functions)}")
    code = functions[name].__code__
    file = code.co_filename
    with users_code(file, f"{file}, line {code.co_firstlineno}"):
        yield functions[name]


def try_schedule(schedule, o):
    """Call a schedule for every epoch of a run, first with an agent that solves half of the tasks,
    then without any new tasks."""
    for success, mixed, count in ((0.5, 0.9, 1), (0.0, None, 0)):
        alpha = o.alpha
        for epoch in range(1, min(o.epochs, MOST_TRIED) + 1):
            context = curriculum.Context(
                epoch=epoch, epochs=o.epochs, alpha=o.alpha, alpha_end=o.alpha_end, previous=alpha,
                new_tasks=count, success_rate=success, mixed_share=mixed or 0.0,
                mixed_of_possible=mixed)
            alpha = checked(schedule, schedule(context), 1e-9, 1 - 1e-9)
