"""Success rate, R_env, the band, schedules, seeds, and the functions a user may add.

    python -m pytest tests/test_curriculum.py -q
"""
import math
from collections import Counter

import pytest
import torch

from helpers import user_error
import curriculum
from data_pool import Trace
from curriculum import (Context, agent_reward, in_band, next_alpha, reward_bell,
                        select_seed_tasks, success_rate)
from support.options import Options
from support.probe import try_functions


def context(epoch=1, epochs=10, success_rate=0.5, alpha=0.7, alpha_end=0.3, previous=0.7,
            new_tasks=9, solved=0.0, unsolved=0.0):
    """Return a Context with defaults."""
    return Context(epoch, epochs, alpha, alpha_end, previous, new_tasks, success_rate, 0.0, solved,
                   unsolved, None)


def test_success_rate_is_k_over_n():
    """Otherwise Eq. 2 would count something other than successes."""
    assert success_rate([0.5, 0.49]) == 0.5  # a reward of SUCCESS or more is a success
    assert success_rate([1, 0, 0, 1, 0, 0, 1, 0]) == 3 / 8


def test_bell_is_eq_3():
    """Otherwise R_env would not be 1 at the target, or not exp(-beta d^2) at a distance d from it.
    """
    assert reward_bell(0.8, 0.8, 10.0) == 1
    assert reward_bell(0.2, 0.5, 2.0) == pytest.approx(math.exp(-0.18))
    assert reward_bell(0.9, 0.5, 10.0) == pytest.approx(math.exp(-1.6))


def test_band_includes_its_edges_in_spite_of_rounding():
    """Otherwise the edge of the paper's filter would be lost, because 0.8 - 0.7 exceeds 0.1 in
    floating point."""
    for p_hat, alpha in ((0.8, 0.7), (0.3, 0.4)):
        assert in_band(p_hat, alpha, 0.1)
    assert not in_band(0.601, 0.5, 0.1) and not in_band(0.399, 0.5, 0.1)


# ---------------------------------------------------------------------------------------------
# schedules


def test_shapes_of_the_schedules():
    """Otherwise a schedule would miss --alpha or --alpha-end, or take another path between them."""
    def run(name):
        return [next_alpha(name, context(epoch=t)) for t in range(1, 11)]

    assert run("constant") == [0.7] * 10
    assert run("step") == [0.7] * 5 + [0.3] * 5
    assert run("linear") == pytest.approx([0.7 - 0.4 * t / 9 for t in range(10)])
    assert run("cosine")[::3] == pytest.approx([0.7, 0.6, 0.4, 0.3])
    assert next_alpha("linear", context(epochs=1)) == 0.7  # not 0 / 0


def test_steering_schedules_answer_success():
    """Otherwise a schedule would stop half-way to its target, like one that looks only at the last
    miss."""
    assert next_alpha("adaptive", context(success_rate=0.9, alpha=0.5)) == pytest.approx(0.1)
    assert next_alpha("integral", context(alpha=0.5)) == 0.25  # it starts low
    alpha, success = 0.5, 0.5
    for epoch in range(1, 40):
        alpha = next_alpha("integral", context(epoch, 40, success, 0.5, previous=alpha))
        success = alpha + 0.3  # it follows alpha
    assert alpha == pytest.approx(0.2, abs=1e-3) and success == pytest.approx(0.5, abs=1e-3)


def test_balanced_goes_towards_the_rarer_end_in_bounded_steps():
    """Otherwise alpha would run off to tasks that are always solved, or never."""
    def balanced(solved, unsolved, previous):
        shares = {"solved": solved, "unsolved": unsolved}
        return next_alpha("balanced", context(previous=previous, **shares))

    assert balanced(0.3, 0.1, 0.5) == pytest.approx(0.5 - 0.2 * 0.2)
    assert balanced(0.0, 1.0, 0.9) == 0.95
    assert balanced(1.0, 0.0, 0.1) == 0.05


def test_steering_schedules_rest_while_there_are_no_new_tasks():
    """Otherwise the same old error would be added in every epoch in which the simulator writes no
    task."""
    for name in ("integral", "balanced"):
        resting = context(epoch=3, success_rate=1.0, previous=0.3, solved=1.0, new_tasks=0)
        assert next_alpha(name, resting) == 0.3


def test_a_schedule_that_leaves_its_range_during_a_run_is_one_line(monkeypatch):
    """Otherwise RWR would aim at tasks that are never, or always, solved."""
    for value in (0.0, 1.0, -0.2, math.nan, "0.5"):
        monkeypatch.setattr(curriculum, "alpha_mine", lambda c: value, raising=False)
        user_error("curriculum.py, line .* gave", next_alpha, "mine", context())


def test_a_reward_that_is_no_number_during_a_run_is_one_line(monkeypatch):
    """Otherwise NaN would drop its group as if all attempts were alike, or reach RWR or the draw
    of seed tasks."""
    trace = Trace("", 1.0, True, False, 3, 1.0)
    for value in (math.nan, 1.5, -0.1):
        monkeypatch.setattr(curriculum, "agent_reward_mine", lambda e: value, raising=False)
        user_error("not a number from 0 to 1", agent_reward, "mine", trace)
    monkeypatch.setattr(curriculum, "reward_mine", lambda *args: math.inf, raising=False)
    user_error("gave inf", curriculum.R_env, "mine", 0.5, 0.5, 2.0)
    for fault, weights in (("gave nan", [math.nan] * 4), ("for each", [1.0])):
        monkeypatch.setattr(curriculum, "seeds_mine", lambda *args: weights, raising=False)
        user_error(fault, seeds, 0.0, "mine")


# ---------------------------------------------------------------------------------------------
# functions of a user


MINE = '''
def alpha_mine(c):
    return 0.8

def reward_mine(p_hat, alpha, beta):
    return float(p_hat == alpha)

def seeds_mine(p_hats, alpha):
    return [1 - p for p in p_hats]

def agent_reward_mine(e):
    return e.reward * e.valid
'''
OPTION = {"alpha_": "alpha_schedule", "reward_": "difficulty_reward", "seeds_": "seed_selection",
          "agent_reward_": "agent_reward"}


def test_functions_of_a_user_are_found_by_their_names(monkeypatch):
    """Otherwise a fork would need more than one function in curriculum.py, which is all that README
    asks for."""
    functions = {}
    exec(MINE, functions)
    for prefix in OPTION:
        monkeypatch.setattr(curriculum, f"{prefix}mine", functions[f"{prefix}mine"], raising=False)
    try_functions(Options(**{option: "mine" for option in OPTION.values()}))
    assert next_alpha("mine", context()) == 0.8


WRONG = '''
import math, sys
def alpha_out(c): return 1.3 - c.progress
def alpha_no_groups(c): return 0.5 / c.mixed_share
def alpha_ends(c): sys.exit()
def alpha_text(c): return "0.5"
def reward_of_two(p, a): return 1.0
def reward_nan(p, a, b): return p < 1 or math.nan
def seeds_many(ps, a): return [1.0, 2.0, 3.0]
def seeds_none(ps, a): pass
def seeds_nan(ps, a): return [math.nan for p in ps]
def agent_reward_long(e): return e.reward - (e.tokens > 9)
'''


@pytest.mark.parametrize("name, words", [
    ("alpha_out", "line 3: alpha_out gave 1.3"),
    ("alpha_no_groups", "line 4 in alpha_no_groups: ZeroDivisionError"),
    ("alpha_ends", "SystemExit"), ("alpha_text", "gave '0.5'"),
    ("reward_of_two", "curriculum.py, line 7: TypeError: reward_of_two.* 3 were given"),
    ("reward_nan", "gave nan"), ("seeds_many", "a weight for each p_hat"),
    ("seeds_none", "it gave None"), ("seeds_nan", "gave nan"),
    ("agent_reward_long", "gave -1.0, not a number from 0 to 1")])
def test_a_wrong_function_is_named_in_one_line_before_the_run(name, words, monkeypatch):
    """Otherwise a run would end in a traceback after epoch 0 or, worse, continue on NaN."""
    functions = {}
    exec(compile(WRONG, "curriculum.py", "exec"), functions)
    monkeypatch.setattr(curriculum, name, functions[name], raising=False)
    [prefix] = [prefix for prefix in OPTION if name.startswith(prefix)]
    o = Options(**{OPTION[prefix]: name.removeprefix(prefix)})
    assert "curriculum.py" in user_error(words, try_functions, o)


def test_plain_agent_reward_is_eq_1():
    """Otherwise the default would train on something other than the world's score."""
    assert agent_reward("plain", Trace("", 0.4, True, False, 10, 0.9)) == 0.4
    cut_off = Trace("", 1.0, True, True, 10, 0.9)
    assert agent_reward("plain", cut_off) == agent_reward("graded", cut_off) == 0


# ---------------------------------------------------------------------------------------------
# seeds


BASE = [f"base{i}" for i in range(20)]
RECENT = [(f"env{i}", p) for i, p in enumerate([0.0, 0.5, 1.0, 0.5])]


def seeds(share, selection):
    """Return how often each task is drawn as a seed task in 4,000 draws."""
    generator = torch.Generator().manual_seed(0)
    return Counter(select_seed_tasks(selection, BASE, RECENT, 4000, share, 0.7, generator))


def test_seeds_mix_base_and_recent_tasks_in_their_share(monkeypatch):
    """Otherwise the simulator would be shown too few base tasks or too few recent ones, or a user's
    weights would be ignored."""
    counts = seeds(0.25, "uniform")
    assert sum(counts[task] for task in BASE) / 4000 == pytest.approx(0.25, abs=0.03)
    assert set(counts) == set(BASE) | {task for task, _ in RECENT}
    for task, _ in RECENT:
        assert counts[task] / 3000 == pytest.approx(0.25, abs=0.04)
    # weights may depend on alpha; if all are 0, seed tasks come from base
    for second, drawn in ((0.7, {"env1"}), (0.6, set(BASE))):
        monkeypatch.setattr(curriculum, "seeds_mine", raising=False,
                            value=lambda p_hats, alpha: [0, float(alpha == second), 0, 0])
        assert set(seeds(0.0, "mine")) == drawn


def test_curated_seeds_prefer_p_hat_near_alpha():
    """Otherwise --seed-selection curated would have no effect, or a much weaker one."""
    weights = curriculum.seeds_curated([0.75, 0.5, 0.0], 0.75)
    assert weights == pytest.approx([1, math.exp(-20 * 0.0625), math.exp(-20 * 0.5625)])
