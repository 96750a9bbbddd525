"""Success rate, R_env, the band, schedules and seeds: the analytic cases of Eq. 2 and 3.

Run: python -m pytest tests/test_curriculum.py -q
"""
import dataclasses
import functools
import math
import re
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

from helpers import raised, user_error
import curriculum
from curriculum import Context, in_band, named, next_alpha, select_seed_tasks, success_rate

EIGHTHS = [k / 8 for k in range(9)]
DIFFICULTY_REWARDS, SEED_SELECTIONS = named("reward_"), named("seeds_")


def context(epoch=1, epochs=10, success=0.5, alpha=0.7, alpha_end=0.3, previous=None):
    """A Context with defaults."""
    return Context(epoch, epochs, success, alpha, alpha_end, previous or alpha)


def schedule(name, **fields):
    """The alphas of a whole run of ten epochs."""
    return [next_alpha(name, context(epoch=t, **fields)) for t in range(1, 11)]


# ---------------------------------------------------------------------------------------------
# Eq. 2, Eq. 3 and the filter


def test_success_rate_is_k_over_n():
    """Eq. 2 would count something else than successes."""
    assert success_rate([1, 0, 0, 1]) == 0.5
    assert success_rate([0.5, 0.49]) == 0.5  # from SUCCESS on
    assert success_rate([0.0] * 8) == 0 and success_rate([1.0] * 8) == 1
    assert [success_rate([1] * k + [0] * (8 - k)) for k in range(9)] == EIGHTHS
    raised(ValueError, "no attempts", success_rate, [])


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("beta", [0.5, 2.0, 10.0])
def test_bell_is_eq_3(alpha, beta):
    """R_env: 1 at the target, symmetric, falling, and exp(-beta d^2) everywhere."""
    bell = DIFFICULTY_REWARDS["bell"]
    assert bell(alpha, alpha, beta) == 1
    for d in (0.05, 0.1, 0.2):
        assert bell(alpha + d, alpha, beta) == pytest.approx(math.exp(-beta * d * d))
        assert bell(alpha + d, alpha, beta) == pytest.approx(bell(alpha - d, alpha, beta))
    assert bell(alpha, alpha, beta) > bell(alpha + 0.1, alpha, beta) > bell(1, alpha, beta) > 0


def test_other_difficulty_rewards():
    """p(1-p) must be Remark 1's parabola with maximum 1, the tent linear with its top at alpha."""
    signal = DIFFICULTY_REWARDS["signal"]
    assert signal(0.0, 0.1, 2) == signal(1.0, 0.9, 2) == 0
    assert signal(1 / 8, 0.1, 2) == DIFFICULTY_REWARDS["bell"](1 / 8, 0.1, 2)
    variance, tent = DIFFICULTY_REWARDS["variance"], DIFFICULTY_REWARDS["tent"]
    for p in EIGHTHS:
        assert variance(p, 0.9, 2) == pytest.approx(4 * (0.25 - (p - 0.5) ** 2))  # Remark 1
        assert tent(p, 0.5, 2) == pytest.approx(1 - 2 * abs(p - 0.5))
    assert tent(0.75, 0.75, 2) == 1 and tent(0, 0.75, 2) == 0
    assert tent(1, 0.75, 2) == pytest.approx(2 / 3) and tent(0.375, 0.75, 2) == pytest.approx(0.5)


def test_band_includes_its_edges_in_spite_of_rounding():
    """0.8 - 0.7 exceeds 0.1 in floating point: the edge of the paper's filter would be lost."""
    assert 0.8 - 0.7 > 0.1 and 0.4 - 0.3 > 0.1  # the trap is real
    for p_hat, alpha in ((0.8, 0.7), (0.3, 0.4), (0.4, 0.3), (0.6, 0.5), (0.4, 0.5)):
        assert in_band(p_hat, alpha, 0.1)
    assert not in_band(0.601, 0.5, 0.1) and not in_band(0.399, 0.5, 0.1)


# ---------------------------------------------------------------------------------------------
# schedules


@pytest.mark.parametrize("name", ["linear", "cosine", "step"])
@pytest.mark.parametrize("ends", [(0.7, 0.3), (0.3, 0.7), (0.5, 0.5)])
def test_schedules_start_and_end_where_asked_and_never_turn_back(name, ends):
    """--alpha or --alpha-end would not be met, or the curriculum would run backwards."""
    alphas = schedule(name, alpha=ends[0], alpha_end=ends[1])
    assert alphas[0] == pytest.approx(ends[0]) and alphas[-1] == pytest.approx(ends[1])
    steps = [(b - a) * (ends[1] - ends[0]) for a, b in zip(alphas, alphas[1:])]
    assert all(s >= -1e-12 for s in steps)
    assert all(min(ends) - 1e-12 <= a <= max(ends) + 1e-12 for a in alphas)


def test_shapes_of_the_schedules():
    """Linear would be bent, the cosine straight, the step soft."""
    linear, cosine, step = (schedule(n) for n in ("linear", "cosine", "step"))
    diffs = [a - b for a, b in zip(linear, linear[1:])]
    assert diffs == pytest.approx([0.4 / 9] * 9)
    assert cosine[0] - cosine[1] < 0.4 / 9 < cosine[4] - cosine[5]
    assert cosine[3] == pytest.approx(0.3 + 0.4 * (1 + math.cos(math.pi / 3)) / 2)
    assert set(step) == {0.7, 0.3} and step == sorted(step, reverse=True)


def test_a_run_of_one_epoch_uses_the_starting_alpha():
    """0 / 0 in the progress."""
    for name in ("constant", "linear", "cosine", "step", "adaptive", "learned"):
        assert next_alpha(name, context(epochs=1, success=0.7)) == pytest.approx(0.7)


def test_a_steering_schedule_keeps_its_target():
    """Reports would call a run off target whose alpha has moved in order to hit it."""
    target = curriculum.target_of
    assert target("integral", 0.1, 0.5) == target("adaptive", 0.9, 0.5) == 0.5
    assert target("linear", 0.6, 0.7) == 0.6
    assert target("warmup, say", 0.6, 0.7) == 0.6  # one that says nothing does not steer


def test_integral_schedule_rests_at_the_target_only():
    """One that looks at the last miss alone stops half-way: here success follows alpha at +0.3."""
    alpha, success = 0.5, 0.5
    for epoch in range(1, 40):
        alpha = next_alpha("integral", context(epoch, 40, success, 0.5, previous=alpha))
        success = alpha + 0.3
    assert alpha == pytest.approx(0.2, abs=1e-3) and success == pytest.approx(0.5, abs=1e-3)


README = Path(curriculum.__file__).with_name("README.md")
WARMUP = re.search(r"```python\n(def alpha_warmup.*?)```", README.read_text(), re.S).group(1)
NEW = f'''

{WARMUP}

def reward_cliff(p_hat, alpha, beta):
    """All or nothing."""
    return float(p_hat == alpha)


def seeds_hard(p_hats, alpha):
    """The hardest."""
    return [1 - p for p in p_hats]


def agent_reward_strict(score, valid, truncated, tokens):
    """Form counts."""
    return score * valid

'''


def test_functions_of_a_user_are_found_wherever_they_stand(monkeypatch):
    """The promise of README and docstring: the README's schedule, and one function of each other
    kind, are found by their names, here before all others of the file."""
    source, fork = Path(curriculum.__file__).read_text(), types.ModuleType("fork")
    monkeypatch.setitem(sys.modules, "fork", fork)  # where dataclasses look for their module
    at = source.index("def alpha_constant")
    exec(compile(source[:at] + NEW + source[at:], "fork.py", "exec"), vars(fork))
    c = fork.Context(2, 10, 0.5, 0.6, 0.5, 0.6)
    assert fork.next_alpha("warmup", c) == 0.8
    assert fork.next_alpha("warmup", dataclasses.replace(c, epoch=4)) == 0.6
    assert fork.uses_length("warmup") and not fork.steers("warmup")
    assert fork.named("reward_")["cliff"](0.5, 0.5, 2) == 1
    assert fork.named("seeds_")["hard"]([0.2, 1.0], 0.5) == [0.8, 0.0]
    assert fork.agent_reward("strict", 1.0, False, False, 9) == 0


def test_only_schedules_that_say_so_may_be_prolonged(monkeypatch):
    """A run with a curve towards its last epoch would be resumed as another run."""
    prolongable = {name for name in named("alpha_") if not curriculum.uses_length(name)}
    assert {"constant", "adaptive", "integral", "learned"} <= prolongable
    assert not prolongable & {"linear", "cosine", "step"}
    for name in prolongable:  # what they say is true
        rows = ((0.2, 0.1, 20), (0.5, 0.2, 20), (0.8, 0.1, 20))
        some = [next_alpha(name, dataclasses.replace(context(4, n, 0.3), signal=rows))
                for n in (4, 5, 400)]
        assert len(set(some)) == 1, name


# ---------------------------------------------------------------------------------------------
# the learned alpha


def replays(gain, n=20, before=EIGHTHS):
    """n tasks of each p_hat, tried again one epoch later, after the agent has gained."""
    return [(p, 1, min(1.0, p + gain)) for p in before for _ in range(n)]


def test_signal_rows_are_means_by_p_hat_before():
    """alpha would be learned from numbers that nobody measured."""
    rows = curriculum.signal_by_p_hat([(0.5, 1, 0.75), (0.5, 2, 0.25), (0.25, 1, 0.5),
                                       (0.25, 0, 0.9)])  # in the same epoch: nothing to foresee
    assert rows == [[0.25, 0.25, 1], [0.5, 0.1875, 2]]
    assert curriculum.signal_by_p_hat([]) == []


@pytest.mark.parametrize("gain", [0.0, 0.1, 0.2])
def test_learned_alpha_rests_where_tasks_will_carry_most_signal(gain):
    """Between measuring p_hat and training on the task the agent gains: 0.5 is then too easy."""
    rows = tuple(map(tuple, curriculum.signal_by_p_hat(
        replays(gain, before=[p for p in EIGHTHS if 0 < p < 0.9 - gain]))))
    alpha = 0.7
    for epoch in range(1, 40):
        c = dataclasses.replace(context(epoch, 40, 0.5, 0.7, previous=alpha), signal=rows)
        alpha = next_alpha("learned", c)
        assert epoch > 1 or alpha == pytest.approx(0.7 + 0.3 * (0.5 - gain - 0.7), abs=2e-3)
    assert alpha == pytest.approx(0.5 - gain, abs=5e-3)  # d/dp of (p + gain)(1 - p - gain) is 0


@pytest.mark.parametrize("rows", [(), replays(0, 2), replays(0, 40, [0.25, 0.5]),
                                  [(p, 1, float(p > 0.4)) for p in EIGHTHS for _ in range(9)]],
                         ids=["none", "few", "two p_hats", "no signal"])
def test_learned_alpha_stays_where_it_is_without_evidence(rows):
    """A parabola through noise would send alpha anywhere."""
    signal = tuple(map(tuple, curriculum.signal_by_p_hat(rows)))
    assert next_alpha("learned", dataclasses.replace(context(previous=0.6), signal=signal)) == 0.6


def test_learned_alpha_goes_no_farther_than_was_measured():
    """Where signal only falls with p_hat the parabola has its top, if any, outside: a run measured
    .25 to 1, and alpha may go to .25 in steps, but no lower."""
    rows, alpha = tuple((p, 0.3 - 0.25 * p + 0.05 * p * p, 20) for p in EIGHTHS[2:]), 0.5
    for epoch in range(1, 40):
        c = dataclasses.replace(context(epoch, 40, 0.5, 0.5, previous=alpha), signal=rows)
        assert 0.25 <= next_alpha("learned", c) < alpha or alpha == pytest.approx(0.25, abs=1e-4)
        alpha = next_alpha("learned", c)
    assert alpha == pytest.approx(0.25, abs=1e-3)


# ---------------------------------------------------------------------------------------------
# functions of a user, called on sample values before a run


def named_options(**fields):
    """What try_functions reads of a run's Options."""
    return types.SimpleNamespace(**{**dict(
        alpha=0.5, alpha_end=0.5, alpha_schedule="constant", difficulty_reward="bell", beta=2.0,
        agent_reward="plain", seed_selection="uniform", function_selection="uniform", G=8,
        epochs=24, max_response_tokens=24),
        **fields})


OPTION = {"alpha_": "alpha_schedule", "reward_": "difficulty_reward", "seeds_": "seed_selection",
          "functions_": "function_selection", "agent_reward_": "agent_reward"}
WRONG = {
    "alpha_": [lambda c: None, lambda c: 0.0, lambda c: math.nan, lambda c: 1 / c.success],
    "reward_": [lambda p, a, b: b / p, lambda p, a: 1.0, lambda p, a, b: math.nan],
    "seeds_": [lambda ps, a: [0.0] * len(ps), lambda ps, a: [1.0, 2.0],
               lambda ps, a: [p - 0.5 for p in ps], lambda ps, a: "123456789"],
    "functions_": [lambda ns, ps, a: [float(n > 0) for n in ns], lambda ns, ps, a: ps],
    "agent_reward_": [lambda s, v, c, n: s / n, lambda s, v, c, n: s if v else -1],
}


@pytest.mark.parametrize("prefix, i", [(prefix, i) for prefix in WRONG
                                       for i in range(len(WRONG[prefix]))])
def test_a_wrong_function_is_named_in_one_line_before_the_run(prefix, i, monkeypatch):
    """A traceback after epoch 0, or worse, a run on NaN."""
    WRONG[prefix][i].__name__ = f"{prefix}wild"
    monkeypatch.setattr(curriculum, f"{prefix}wild", WRONG[prefix][i], raising=False)
    o = named_options(**{OPTION[prefix]: "wild"})
    assert len(user_error(f"^{prefix}wild in curriculum.py", curriculum.try_functions, o)) < 700


def test_plain_agent_reward_is_eq_1():
    """The default would train on something else than the world's score."""
    for score in (0.0, 0.4, 1.0):
        assert curriculum.agent_reward("plain", score, True, False, 10) == score
        assert curriculum.agent_reward("plain", score, True, True, 10) == 0


@pytest.mark.parametrize("fields", [{}, {"alpha": 0.01, "alpha_end": 0.99}, {"epochs": 0, "G": 2}],
                         ids=str)
def test_every_function_here_passes(fields):
    """Refused by mistake, at the edges of the options."""
    for prefix, option in OPTION.items():
        for name in named(prefix):
            curriculum.try_functions(named_options(**{option: name, **fields}))


def test_which_schedules_ignore_alpha_end():
    """It is found by calling them: a schedule of a user's needs to say nothing."""
    ignoring = {name for name in named("alpha_") if len({
        tuple(curriculum.sample_alphas(named_options(alpha_schedule=name), end))
        for end in (0.25, 0.75)}) == 1}
    assert ignoring >= {"constant", "adaptive", "integral", "learned"}
    assert ignoring.isdisjoint({"linear", "cosine", "step"})


def test_a_schedule_may_use_alpha_end_in_a_few_epochs(monkeypatch):
    """Such a fork was refused, and linear in a run of one epoch, as one that ignores it."""
    monkeypatch.setattr(curriculum, "alpha_pulse", lambda c: c.alpha_end if c.epoch in (2, 3) else c.alpha,
                        raising=False)
    for fields in (dict(alpha_schedule="pulse"), dict(alpha_schedule="linear", epochs=1)):
        assert curriculum.sample_alphas(named_options(**fields), 0.25) != \
            curriculum.sample_alphas(named_options(**fields), 0.75)


def test_what_is_no_plain_function(monkeypatch):
    """A partial has no name, and a constant beside the schedules is none of them."""
    monkeypatch.setattr(curriculum, "reward_sharp", functools.partial(curriculum.reward_bell, alpha=1),
                        raising=False)
    monkeypatch.setattr(curriculum, "alpha_max", 0.8, raising=False)
    o = named_options(difficulty_reward="sharp")
    assert "reward_bell" in user_error("in curriculum.py", curriculum.try_functions, o)
    assert "max" not in named("alpha_")


# ---------------------------------------------------------------------------------------------
# seeds


BASE = [f"base{i}" for i in range(20)]
RECENT = [(f"env{i}", p) for i, p in enumerate([0.0, 0.5, 1.0, 0.5])]


def seeds(n, recent=RECENT, share=0.5, how="uniform", alpha=0.5, seed=0):
    """select_seed_tasks with defaults."""
    return select_seed_tasks(BASE, recent, n, share, SEED_SELECTIONS[how], alpha,
                             torch.Generator().manual_seed(seed))


def test_seeds_mix_base_and_recent_tasks_in_their_share():
    """Coverage or drift would be lost."""
    picked = seeds(4000, share=0.25)
    assert len(picked) == 4000
    assert sum(s.startswith("base") for s in picked) / 4000 == pytest.approx(0.25, abs=0.03)
    counts = Counter(picked)
    assert set(counts) == set(BASE) | {t for t, _ in RECENT}
    assert all(counts[t] / 3000 == pytest.approx(0.25, abs=0.04) for t, _ in RECENT)


def test_curated_seeds_prefer_p_hat_near_alpha():
    """The curated option would do nothing."""
    counts = Counter(seeds(4000, share=0.0, how="curated"))
    assert counts["env1"] + counts["env3"] > 0.95 * 4000
    harder = Counter(seeds(4000, share=0.0, how="curated", alpha=0.05))
    assert harder["env0"] > 0.9 * 4000


def test_weights_may_be_ints_and_all_zero(monkeypatch):
    """torch draws from neither; where no recent task is wanted, all seeds come from base."""
    monkeypatch.setitem(SEED_SELECTIONS, "ints", lambda ps, a: [0, 3, 0, 0])
    monkeypatch.setitem(SEED_SELECTIONS, "none", lambda ps, a: [0.0] * len(ps))
    assert set(seeds(40, share=0.0, how="ints")) == {"env1"}
    assert len(seeds(40, share=0.0, how="none")) == 40
    assert set(seeds(40, share=0.0, how="none")) <= set(BASE)
