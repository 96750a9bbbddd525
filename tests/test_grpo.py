"""GRPO: the objective against plain arithmetic, and the update against Eq. 4.

    python -m pytest tests/test_grpo.py -q
"""
import copy
import math
from functools import partial

import numpy as np
import pytest
import torch

import grpo
import rwr
from grpo import aggregate, group_advantages, grpo_loss, has_signal, response_logps, token_kl
from helpers import (WORDS, clear, equal_bits, gradients, naive_row, nearly_equal, random_groups,
                     rollouts_of, tiny_policy, train_agent)
from support.options import Options

# prompts and lengths differ, G does not; 44 response tokens
GROUPS = random_groups([(5, [4, 1, 7]), (2, [3, 3, 2]), (9, [2, 6, 5]), (1, [2, 8, 1])])
REWARDS = torch.tensor([[1., 0, 0], [0, 1, 1], [1, 0, 1], [0, 1, 0]])
# as in an episode, some tokens come from the world
DRAWN = [[[t % 3 != 1 for t in range(len(r))] for r in responses] for _, responses in GROUPS]
# what an update without a step does not measure
UNKNOWN = dict.fromkeys(("kl", "clip_fraction", "grad_norm", "mismatch"))


def update(policy, groups=GROUPS, rewards=REWARDS, grad_clip=1e9, **options):
    """Return (statistics, gradient of the agent) of one grpo_update that moves no weight."""
    clear(policy)
    still = policy.optimizer("agent", 0.0)
    stats = train_agent(policy, still, groups, rewards, grad_clip=grad_clip, **options)
    return stats, gradients(policy, "agent")


def seeded(seed=0):
    """Return a seeded generator."""
    return torch.Generator().manual_seed(seed)


def table():
    """Return (theta, logp of six rows): a table of three tokens, and a sample of six from it.

    Each token's share of the sample is its probability, so a mean over the rows is an exact
    expectation.
    """
    theta = torch.tensor([1 / 6, 2 / 6, 3 / 6], dtype=torch.float64).log().requires_grad_()
    return theta, theta.log_softmax(-1)[[0, 1, 1, 2, 2, 2]]


def slope(value, theta):
    """Return the gradient of a value at theta."""
    return torch.autograd.grad(value, theta, retain_graph=True)[0]


# ---------------------------------------------------------------------------------------------
# the pure functions


def test_advantages_equal_numpy():
    """Otherwise the baseline of Eq. 4 or the scaling would be wrong."""
    rewards = torch.rand(6, 5, generator=seeded(), dtype=torch.float64)
    r = rewards.numpy()
    centred = r - r.mean(1, keepdims=True)
    np.testing.assert_allclose(group_advantages(rewards, "none"), centred)
    np.testing.assert_allclose(group_advantages(rewards, "std"),
                               centred / (r.std(1, ddof=1, keepdims=True) + 1e-4))


def test_signal_is_max_minus_min():
    """Otherwise groups of equal rewards would be trained on rounding noise, which makes std > 0."""
    rewards = torch.tensor([[0.1] * 3, [0.1, 0.1, 0.1 + 1e-8], [0.1, 0.1, 0.2], [1., 0, 0]])
    assert has_signal(rewards).tolist() == [False, False, True, True]


def test_kl_gradients_on_a_table():
    """Otherwise the docstring of token_kl would be wrong about E[grad] of k1, k2 and k3."""
    theta, sample = table()
    logp, q = theta.log_softmax(-1), torch.tensor([0.5, 0.1, 0.4], dtype=torch.float64)
    k1, k2, k3 = (token_kl(sample, q.log()[[0, 1, 1, 2, 2, 2]], kind).mean()
                  for kind in ("k1", "k2", "k3"))
    reverse = (logp.exp() * (logp - q.log())).sum()
    forward = (q * (q.log() - logp)).sum()
    assert slope(k1, theta).abs().max() < 1e-12
    torch.testing.assert_close(slope(k2, theta), slope(reverse, theta))
    torch.testing.assert_close(slope(k3, theta), slope(forward, theta))


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_loss_equals_plain_arithmetic(aggregation, kind):
    """Otherwise the objective would be wrong under some option, or an episode that drew no token
    would make the whole step NaN."""
    tensors = [-3 * torch.rand(6, 5, generator=seeded(seed), dtype=torch.float64)
               for seed in range(3)]
    logp, old, ref = [tensor.numpy() for tensor in tensors]
    mask = np.arange(5) < np.array([5, 1, 3, 2, 0, 4])[:, None]
    a = np.array([1.3, -0.4, 0.2, 1.0, -0.7, -1.5])[:, None]
    loss, stats = grpo_loss(*tensors, torch.tensor(a[:, 0]), torch.tensor(mask), 15, 6, clip=0.2,
                            kl_coef=0.3, kl_estimator=kind, aggregation=aggregation)
    ratio, d = np.exp(logp - old), logp - ref
    low, high = ratio < 0.8, ratio > 1.2
    # both sides of the clip need advantages of both signs, or half of it is not tested
    for side in (low, high):
        assert set(np.sign(a + 0 * d)[side & mask]) == {-1, 1}
    kl = {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[kind]
    gain = np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
    per_token = np.where(mask, 0.3 * kl - gain, 0)
    mean = per_token.sum() / 15
    if aggregation == "sequence":
        mean = (per_token.sum(1) / np.maximum(mask.sum(1), 1)).mean()
    assert float(loss) == pytest.approx(mean)
    assert float(stats["kl"]) == pytest.approx(kl[mask].mean())  # the loss's own estimator
    assert float(stats["clip_fraction"]) == pytest.approx((low | high)[mask].mean())


def test_the_constants_are_those_that_the_pages_state():
    """Otherwise the pages would state settings with which no run is made."""
    assert (grpo.CLIP, rwr.KL_CAP, grpo.GRAD_CLIP, grpo.ENTROPY_BONUS) == (0.2, 0.5, 1.0, 0.0)
    assert {layer.scaling["agent"] for layer in tiny_policy().lora_layers} == {2.0}


def test_entropy_bonus_has_the_gradient_of_the_entropy(monkeypatch):
    """Otherwise the bonus would have no effect, because -log pi of a sampled token averages to the
    entropy but has no gradient on average."""
    monkeypatch.setattr(grpo, "ENTROPY_BONUS", 0.3)
    theta, sample = table()
    rows = sample[:, None]  # each token is a response
    loss, _ = grpo_loss(rows, rows.detach(), rows.detach(), torch.zeros(6), torch.ones(6, 1), 6, 6,
                        kl_coef=0.0)
    logp = theta.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum()
    torch.testing.assert_close(slope(loss, theta), slope(-0.3 * entropy, theta))


# ---------------------------------------------------------------------------------------------
# the update


def test_first_gradient_is_that_of_eq_4():
    """Otherwise the update would not be REINFORCE with a group baseline and the KL to the untrained
    policy, on drawn tokens only."""
    policy = tiny_policy()
    stats, gradient = update(policy, temperature=0.7, agent_kl=0.1, drawn=DRAWN, token_budget=40)
    clear(policy)
    gain, kl, tokens = 0, 0, 0
    advantages = group_advantages(REWARDS).flatten()
    for r, a in zip(rollouts_of(GROUPS, drawn=DRAWN), advantages, strict=True):
        mask = torch.tensor(r.drawn)
        logp, ref = naive_row(policy, "agent", r, 0.7), naive_row(policy, None, r, 0.7).detach()
        gain = gain + (mask * a * logp).sum()
        kl = kl + (mask * ((ref - logp).exp() - 1 - (ref - logp))).sum()
        tokens += sum(r.drawn)
    ((0.1 * kl - gain) / tokens).backward()
    assert nearly_equal(gradient, gradients(policy, "agent"), 1e-4)
    assert stats["kl"] == pytest.approx(kl.item() / tokens, rel=1e-4)
    assert stats["trained_tokens"] == tokens


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_micro_batches_do_not_change_the_gradient(aggregation, monkeypatch):
    """Otherwise memory settings would change what is learned, as a mean of means does (in other
    code it turned -0.94 into 0.01)."""
    monkeypatch.setattr(grpo, "grpo_loss", partial(grpo_loss, aggregation=aggregation))
    policy = tiny_policy()
    budgets = (10_000, 30, 12, 1)  # 1 splits groups into single responses
    pieces = [len(list(grpo.split_groups(rollouts_of(GROUPS), budget))) for budget in budgets]
    assert pieces[0] == 1 and pieces[-1] == 12
    first, *others = [update(policy, agent_kl=0.1, token_budget=budget)[1] for budget in budgets]
    assert all(nearly_equal(other, first) for other in others)


@pytest.mark.parametrize("size", [0, 2, 3])
def test_ratio_starts_at_exactly_one(monkeypatch, size):
    """Otherwise the clip would act at once, because old log-probs from other micro-batches differ
    by up to 0.1 in bf16, or never, because they were taken from the current policy."""
    # with clip 0, clip_fraction counts every ratio that is not exactly 1
    monkeypatch.setattr(grpo, "grpo_loss", partial(grpo_loss, clip=0.0))
    policy = tiny_policy(dtype=torch.bfloat16)
    for lr in (0, 1e-2):
        stats = train_agent(policy, policy.optimizer("agent", lr), GROUPS, REWARDS,
                            drawn=DRAWN, temperature=0.7, generator=seeded(), mini_batch=size)
        moved = lr > 0 and size > 0  # weights moved before the last step of the pass
        assert (stats["clip_fraction"] > 0) == moved


def test_a_pass_is_made_of_equal_steps_and_leaves_no_group_out():
    """Otherwise a step on one left-over group would move the adapter as far as one on sixteen."""
    for size, sizes in ((2, [4, 4, 4, 4, 2]), (4, [6, 6, 6]), (8, [10, 8]), (9, [18])):
        plan, again, other = [grpo.plan_steps(9, 2, size, seeded(seed)) for seed in (0, 0, 1)]
        assert [len(step) for step in plan] == sizes
        assert plan == again and (plan != other or size == 9)
        assert sorted(sum(plan, [])) == list(range(18))


@pytest.mark.parametrize("size", [0, 2])
def test_mismatch_of_sampler_and_scorer_is_measured_before_any_step(size, monkeypatch):
    """Otherwise it would go unnoticed that the sampler and the scorer are different policies."""
    monkeypatch.setattr(grpo, "CHECKED_GROUPS", 3)
    policy = tiny_policy()
    with policy.use("agent"):
        scored = response_logps(policy, rollouts_of(GROUPS[:3]), Options(temperature=0.7))
    # as if the sampler found each of its tokens less likely than the scorer does
    sampled = [[[-20.0] * len(response) for response in responses] for _, responses in GROUPS]
    stats = train_agent(policy, policy.optimizer("agent", 0.1), GROUPS, REWARDS, sampled,
                        temperature=0.7, generator=seeded(), mini_batch=size)
    gaps = torch.cat(scored) + 20
    assert stats["mismatch"] == pytest.approx(float(gaps.mean()), abs=1e-4)


@pytest.mark.parametrize("loss, spike", [(math.nan, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_a_step_that_is_not_finite_is_skipped_to_the_bit(loss, spike):
    """Otherwise one NaN would stay in the weights and in Adam's moments for good."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([p], weight_decay=0.1)
    p.grad = torch.ones(2)
    assert grpo.finite_step([p], optimizer, 1.0)[1]
    before, state = p.detach().clone(), copy.deepcopy(optimizer.state[p])
    p.grad = torch.tensor([1.0, spike])
    assert not grpo.finite_step([p], optimizer, loss)[1]
    assert torch.equal(p, before) and equal_bits(optimizer.state[p].values(), state.values())


def test_one_step_that_is_not_finite_leaves_the_others_as_they_are(monkeypatch):
    """Otherwise such a step would end the update, or enter the statistics, which are means over the
    steps taken."""
    policy = tiny_policy()
    still = policy.optimizer("agent", 0.0)
    expected = train_agent(policy, still, GROUPS[:1], REWARDS[:1])
    extra = iter([0.0, math.nan, 0.0, 0.0])  # added to the loss of four steps on this group
    monkeypatch.setattr(grpo, "aggregate", lambda *args: aggregate(*args) + next(extra))
    stats = train_agent(policy, still, 4 * GROUPS[:1], REWARDS[[0, 0, 0, 0]], mini_batch=1)
    assert stats == pytest.approx({**expected, "skipped_steps": 1, "trained_tokens": 3 * 12})
    monkeypatch.setattr(grpo, "aggregate", lambda *args: aggregate(*args) + math.nan)
    stats = train_agent(policy, still, GROUPS[:1], REWARDS[:1])
    assert stats == {"zero_variance": 0, "trained_tokens": 0, "skipped_steps": 1, **UNKNOWN}


def test_groups_without_signal_cost_no_forward_pass_and_have_no_kl():
    """Otherwise half of the compute would be wasted, or a KL pull or stale momentum would move
    the agent without a reward."""
    policy, mixed, rewards = tiny_policy(), [GROUPS[0], GROUPS[2]], REWARDS[[0, 2]]
    _, expected = update(policy, mixed, rewards, agent_kl=0.5)
    unknown = ([len(WORDS)], [[4], [5], [6]])  # no token of the model: a forward pass would raise
    groups = [mixed[0], unknown, mixed[1]]
    rewards = torch.stack([rewards[0], torch.ones(3), rewards[1]])
    stats, gradient = update(policy, groups, rewards, agent_kl=0.5)
    assert nearly_equal(gradient, expected) and stats["zero_variance"] == pytest.approx(1 / 3)
    for batch, rewards in ((groups, torch.ones(3, 3)), ([], torch.ones(0, 3))):
        # neither policy nor optimiser is touched, so both may be None
        stats = train_agent(None, None, batch, rewards)
        assert stats == {"zero_variance": 1, "trained_tokens": 0, "skipped_steps": 0, **UNKNOWN}


def test_gradient_clipping_bounds_the_step_and_reports_the_norm_before():
    """Otherwise a spike would pass unclipped, or the log would show the clip instead of the spike.
    """
    policy = tiny_policy()
    stats, free = update(policy)
    norm = float(torch.cat([g.flatten() for g in free]).norm())
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-3)
    stats, clipped = update(policy, grad_clip=norm / 10)
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert nearly_equal([10 * g for g in clipped], free, 1e-3)
