"""Success rate, R_env, the band, schedules, seeds, and the functions a user may add.

    python -m pytest tests/test_curriculum.py -q
"""
import math
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

from helpers import user_error
import curriculum
from data_pool import Trace
from curriculum import Context, in_band, named, next_alpha, reward_bell, select_seed_tasks, success_rate
from support.options import Options


def context(epoch=1, epochs=10, success=0.5, alpha=0.7, alpha_end=0.3, previous=0.7):
    """A Context with defaults."""
    return Context(epoch, epochs, success, alpha, alpha_end, previous)


def test_success_rate_is_k_over_n():
    """Eq. 2 would count something else than successes."""
    assert success_rate([0.5, 0.49]) == 0.5  # from SUCCESS on
    assert [success_rate([1] * k + [0] * (8 - k)) for k in range(9)] == [k / 8 for k in range(9)]


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("beta", [0.5, 2.0, 10.0])
def test_bell_is_eq_3(alpha, beta):
    """R_env: 1 at the target, and exp(-beta d^2) on both sides of it."""
    for d in (0, 0.05, 0.2):
        for p_hat in (alpha + d, alpha - d):
            assert reward_bell(p_hat, alpha, beta) == pytest.approx(math.exp(-beta * d * d))


def test_band_includes_its_edges_in_spite_of_rounding():
    """0.8 - 0.7 exceeds 0.1 in floating point: the edge of the paper's filter would be lost."""
    for p_hat, alpha in ((0.8, 0.7), (0.3, 0.4), (0.4, 0.3), (0.6, 0.5), (0.4, 0.5)):
        assert in_band(p_hat, alpha, 0.1)
    assert not in_band(0.601, 0.5, 0.1) and not in_band(0.399, 0.5, 0.1)


# ---------------------------------------------------------------------------------------------
# schedules


def test_shapes_of_the_schedules():
    """--alpha or --alpha-end would not be met, or the way between them be another one."""
    runs = {name: [next_alpha(name, context(epoch=t)) for t in range(1, 11)] for name in named("alpha_")}
    assert runs["constant"] == [0.7] * 10 and runs["step"] == [0.7] * 5 + [0.3] * 5
    assert runs["linear"] == pytest.approx([0.7 - 0.4 * t / 9 for t in range(10)])
    assert runs["cosine"][::3] == pytest.approx([0.7, 0.6, 0.4, 0.3])
    assert next_alpha("linear", context(epochs=1)) == 0.7  # not 0 / 0


def test_steering_schedules_answer_success():
    """One that looks at the last miss alone stops half-way: here success follows alpha at +0.3."""
    assert next_alpha("adaptive", context(success=0.9, alpha=0.5)) == pytest.approx(0.1)
    alpha, success = 0.5, 0.5
    for epoch in range(1, 40):
        alpha = next_alpha("integral", context(epoch, 40, success, 0.5, previous=alpha))
        success = alpha + 0.3
    assert alpha == pytest.approx(0.2, abs=1e-3) and success == pytest.approx(0.5, abs=1e-3)


# ---------------------------------------------------------------------------------------------
# functions of a user


MINE = '''
def alpha_mine(c):
    return 0.8 if c.epoch <= 3 else c.alpha

def reward_mine(p_hat, alpha, beta):
    return float(p_hat == alpha)

def seeds_mine(p_hats, alpha):
    return [1 - p for p in p_hats]

def agent_reward_mine(e):
    return e.reward * e.valid
'''
OPTION = {"alpha_": "alpha_schedule", "reward_": "difficulty_reward", "seeds_": "seed_selection",
          "agent_reward_": "agent_reward"}


def test_functions_of_a_user_are_found_wherever_they_stand(monkeypatch):
    """The promise of README and docstring, here before all other functions of the file."""
    source, fork = Path(curriculum.__file__).read_text(), types.ModuleType("fork")
    monkeypatch.setitem(sys.modules, "fork", fork)  # where dataclasses look for their module
    at = source.index("def success_rate")
    exec(compile(source[:at] + MINE + source[at:], "fork.py", "exec"), vars(fork))
    fork.try_functions(Options(**{option: "mine" for option in OPTION.values()}))
    assert fork.next_alpha("mine", context(2)) == 0.8 and fork.next_alpha("mine", context(4)) == 0.7
    assert fork.named("seeds_")["mine"]([0.25, 1.0], 0.5) == [0.75, 0.0]


@pytest.mark.parametrize("prefix, wrong, words", [
    ("alpha_", lambda c: 1.3 - c.progress, "1.3"), ("reward_", lambda p, a: 1.0, "argument"),
    ("alpha_", lambda c: sys.exit(), "SystemExit"), ("reward_", lambda p, a, b: p < 1 or math.nan, "nan"),
    ("seeds_", lambda ps, a: [1.0, 2.0, 3.0], "one for each"), ("seeds_", lambda ps, a: None, "None"),
    ("agent_reward_", lambda e: "0" if e.tokens > 9 else 0, "from 0 to 1")])
def test_a_wrong_function_is_named_in_one_line_before_the_run(prefix, wrong, words, monkeypatch):
    """A traceback after epoch 0, or worse, a run on NaN."""
    wrong.__name__ = f"{prefix}wild"
    monkeypatch.setattr(curriculum, f"{prefix}wild", wrong, raising=False)
    o = Options(**{OPTION[prefix]: "wild"})
    assert f"{prefix}wild" in user_error(words, curriculum.try_functions, o)


def test_an_error_of_a_user_is_one_line_with_its_place(monkeypatch):
    """Where in the file it is, whatever it called; the message may have had several lines."""
    def reward_deep(p_hat, alpha, beta):
        p_hat += alpha
        return torch.zeros(2) @ torch.zeros(3)

    monkeypatch.setattr(curriculum, "reward_deep", reward_deep, raising=False)
    first = reward_deep.__code__.co_firstlineno
    user_error(f"test_curriculum.py, line {first + 2}: reward_deep raised RuntimeError",
               named("reward_")["deep"], 0.5, 0.5, 2.0)


def test_plain_agent_reward_is_eq_1():
    """The default would train on something else than the world's score."""
    reward = named("agent_reward_")["plain"]
    assert [reward(Trace("", x, True, False, 10, 0.9)) for x in (0.0, 0.4, 1.0)] == [0.0, 0.4, 1.0]
    assert reward(Trace("", 1.0, True, True, 10, 0.9)) == 0


# ---------------------------------------------------------------------------------------------
# seeds


BASE = [f"base{i}" for i in range(20)]
RECENT = [(f"env{i}", p) for i, p in enumerate([0.0, 0.5, 1.0, 0.5])]


def seeds(share, weigh="uniform", alpha=0.5):
    """How often each task is drawn as a seed task, of 4,000 times."""
    weigh = named("seeds_")[weigh] if isinstance(weigh, str) else weigh
    return Counter(select_seed_tasks(BASE, RECENT, 4000, share, weigh, alpha,
                                     torch.Generator().manual_seed(0)))


def test_seeds_mix_base_and_recent_tasks_in_their_share():
    """Coverage or drift would be lost."""
    counts = seeds(0.25)
    assert sum(counts[b] for b in BASE) / 4000 == pytest.approx(0.25, abs=0.03)
    assert set(counts) == set(BASE) | {t for t, _ in RECENT}
    assert all(counts[t] / 3000 == pytest.approx(0.25, abs=0.04) for t, _ in RECENT)
    assert set(seeds(0.0, lambda ps, a: [0] * len(ps))) == set(BASE)  # no recent task is wanted


def test_curated_seeds_prefer_p_hat_near_alpha():
    """The curated option would do nothing."""
    counts = seeds(0.0, "curated")
    assert counts["env1"] + counts["env3"] > 0.95 * 4000
    assert seeds(0.0, "curated", alpha=0.05)["env0"] > 0.9 * 4000
