"""The paper's two statements, checked by enumeration and simulation with this project's functions.

    python -m pytest tests/test_theory.py -q
"""
import math

import pytest
import torch

from curriculum import reward_bell
from grpo import group_advantages, surrogate

K = 40  # answers of the toy policy


def table(successes, spread, seed=0):
    """Return logits and rewards of K answers; `successes` of them, chosen at random, succeed."""
    g = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(K, generator=g, dtype=torch.float64)
    reward = torch.zeros(K, dtype=torch.float64)
    reward[torch.randperm(K, generator=g)[:successes]] = 1
    return logits, reward


def exact(logits, reward):
    """Return (p, C_min, C_max) by enumeration: the success rate, and the smallest and largest
    ||grad log pi(a)||^2."""
    pi = logits.softmax(-1)
    scores = torch.eye(K, dtype=pi.dtype) - pi  # row a: grad log pi(a)
    norms = (scores ** 2).sum(1)
    return float((pi * reward).sum()), float(norms.min()), float(norms.max())


def simulated(logits, reward, G=4000):
    """Return E||g||^2 and its standard error, estimated from G rollouts with the advantages and the
    surrogate of training."""
    g = torch.Generator().manual_seed(0)
    ids = torch.multinomial(logits.softmax(-1), G, replacement=True, generator=g)
    advantages = group_advantages(reward[ids][None], "none")[0]
    # one copy of the logits per rollout, so that each rollout has its own gradient
    copies = logits.expand(G, K).clone().requires_grad_(True)
    logp = copies.log_softmax(-1).gather(1, ids[:, None])
    surrogate(logp, logp.detach(), advantages, 0.2).sum().backward()
    norms = (copies.grad ** 2).sum(1)
    return float(norms.mean()), float(norms.std() / G ** 0.5)


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_prop_1_bounds_hold_for_every_success_rate(spread):
    """Otherwise C_min p(1-p) <= E||g||^2 <= C_max p(1-p) would fail by more than the simulation's
    error."""
    for successes in (2, 8, 14, 20, 26, 32, 38):
        logits, reward = table(successes, spread, seed=successes)
        p, c_min, c_max = exact(logits, reward)
        signal, error = simulated(logits, reward)
        variance = p * (1 - p)
        assert signal + 4 * error >= c_min * variance
        assert signal - 4 * error <= c_max * variance
        assert error < 0.25 * signal


def test_prop_1_gradient_signal_peaks_at_one_half():
    """Otherwise the signal would not be a parabola with its top at 1/2, as it is for a score norm
    that does not depend on p."""
    rates = [k / K for k in range(0, K + 1, 4)]
    signal = [simulated(*table(round(p * K), 0.0))[0] for p in rates]
    assert rates[signal.index(max(signal))] == 0.5
    assert signal[0] == signal[-1] == 0
    for p, s in zip(rates, signal):
        assert s == pytest.approx((1 - 1 / K) * p * (1 - p), abs=0.01)


# ---------------------------------------------------------------------------------------------
# Thm. 1


def misranked(p1, p2, n, alpha):
    """Return the share of 4,000 trials in which R_env does not rank the type of task nearer to
    alpha first.

    p1, p2: the success rates of the two types, p1 nearer to alpha. A trial attempts each n times.
    """
    g = torch.Generator().manual_seed(0)
    rates = [(torch.rand(4000, n, generator=g) < p).double().mean(1).tolist() for p in (p1, p2)]
    wrong = 0
    for near, far in zip(*rates):
        wrong += reward_bell(near, alpha, 2.0) <= reward_bell(far, alpha, 2.0)
    return wrong / 4000


@pytest.mark.parametrize("p1, p2, alpha", [(0.5, 0.9, 0.5), (0.45, 0.05, 0.5), (0.6, 0.95, 0.5),
                                           (0.7, 0.3, 0.75)])
def test_thm_1_misranking_stays_under_its_bound(p1, p2, alpha):
    """Otherwise R_env of measured success rates would misrank task types more often than Thm. 1
    allows."""
    numbers = (8, 16, 40, 80, 160)
    delta = abs(p2 - alpha) - abs(p1 - alpha)
    bounds = [4 * math.exp(-2 / 9 * delta ** 2 * n) for n in numbers]  # Eq. 9
    rates = [misranked(p1, p2, n, alpha) for n in numbers]
    assert all(rate <= bound for rate, bound in zip(rates, bounds))
    assert rates[0] > 0.002  # with few rollouts there are misrankings
    assert rates == sorted(rates, reverse=True)
    assert bounds[-1] < 1 - rates[-1]  # the bound would not hold for the reversed ranking
