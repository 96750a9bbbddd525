"""GRPO: the objective against plain loops, and the update against what Eq. 4 says it must do.

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
from grpo import group_advantages, grpo_loss, has_signal, token_kl
from helpers import (Frozen, clear, close, flat, gradients, naive_logps, random_groups, same,
                     scores, tiny_policy, train_agent, weights)

RAGGED = [(5, [4, 1, 7]), (2, [3, 3, 2]), (9, [2, 6, 5]), (1, [2, 8, 1])]  # equal G alone
REWARDS = torch.tensor([[1., 0, 0], [0, 1, 1], [1, 0, 1], [0, 1, 0]])


def update_gradients(policy, groups, rewards, **options):
    """The gradient of the agent that one grpo_update makes, unclipped; nothing is moved."""
    clear(policy)
    train_agent(policy, "agent", Frozen(), groups, rewards, grad_clip=1e9, **options)
    return gradients(policy, "agent")


def seeded():
    """A seeded generator."""
    return torch.Generator().manual_seed(0)


# ---------------------------------------------------------------------------------------------
# the pure functions


def test_advantages_equal_numpy():
    """Eq. 4's baseline or the scaling would be another one."""
    rewards = torch.rand(6, 5, generator=seeded(), dtype=torch.float64)
    r = rewards.numpy()
    centred = r - r.mean(1, keepdims=True)
    np.testing.assert_allclose(group_advantages(rewards, "none"), centred)
    np.testing.assert_allclose(group_advantages(rewards, "std"),
                               centred / (r.std(1, ddof=1, keepdims=True) + 1e-4))


def test_signal_is_max_minus_min():
    """std == 0 is never exactly true: groups of equal floats would be trained on noise."""
    rewards = torch.tensor([[0.1] * 3, [0.1, 0.1, 0.1 + 1e-8], [0.1, 0.1, 0.2], [1., 0, 0]])
    assert has_signal(rewards).tolist() == [False, False, True, True]


def test_kl_values_and_gradients_on_a_table():
    """What token_kl's docstring claims: the values of all, and E[grad] of k1, k2 and k3 exactly."""
    g = seeded()
    theta = torch.randn(6, generator=g, dtype=torch.float64, requires_grad=True)
    q = torch.randn(6, generator=g, dtype=torch.float64).softmax(-1)

    def grad(loss):
        return torch.autograd.grad(loss, theta, retain_graph=True)[0]

    logp = theta.log_softmax(-1)
    p = logp.exp().detach()  # the sampler: expectations are weighted sums without a gradient
    expected = {k: (p * token_kl(logp, q.log(), k)).sum() for k in ("k1", "k2", "k3")}
    reverse = (logp.exp() * (logp - q.log())).sum()
    forward = (q * (q.log() - logp)).sum()
    torch.testing.assert_close(expected["k1"], reverse)
    torch.testing.assert_close(expected["k3"], reverse)
    assert grad(expected["k1"]).abs().max() < 1e-12
    torch.testing.assert_close(grad(expected["k2"]), grad(reverse))
    torch.testing.assert_close(grad(expected["k3"]), grad(forward))
    assert (grad(reverse) - grad(forward)).abs().max() > 0.01  # else the table tells nothing


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_loss_equals_a_loop(aggregation, kind):
    """The objective would be another one: every option against plain arithmetic."""
    g = torch.Generator().manual_seed(1)
    logp, old, ref = (-3 * torch.rand(6, 5, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(5) < torch.tensor([5, 1, 3, 2, 5, 4])[:, None]
    advantages = torch.tensor([1.3, -0.4, 0.2, 1.0, -0.7, -1.5], dtype=torch.float64)
    loss, stats = grpo_loss(logp, old, ref, advantages, mask, 20, 6, clip=0.2, kl_coef=0.3,
                            kl_estimator=kind, aggregation=aggregation)
    rows, kls, seen = [], [], []
    for n in range(6):
        row = []
        for t in range(int(mask[n].sum())):
            ratio = math.exp(logp[n, t] - old[n, t])
            d, a = float(logp[n, t] - ref[n, t]), advantages[n]
            gain = float(min(ratio * a, min(max(ratio, 0.8), 1.2) * a))
            kls.append({"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind])
            row.append(-gain + 0.3 * kls[-1])
            seen.append((bool(a > 0), -1 if ratio < 0.8 else int(ratio > 1.2)))
        rows.append(row)
    # each side of the clip must be met with advantages of both signs, or half of it goes untested
    assert {(sign, side) for sign in (True, False) for side in (-1, 1)} <= set(seen)
    mean = sum(map(sum, rows)) / 20
    if aggregation == "sequence":
        mean = sum(sum(row) / len(row) for row in rows) / 6
    assert float(loss) == pytest.approx(mean)
    assert float(stats["kl"]) == pytest.approx(sum(kls) / 20)  # the loss's own estimator
    clipped = sum(side != 0 for _, side in seen)
    assert float(stats["clip_fraction"]) == pytest.approx(clipped / 20)


def test_a_response_without_tokens_counts_as_0():
    """An episode that drew nothing would make the whole step NaN."""
    mask = torch.tensor([[True, True], [False, False]])
    assert float(grpo.aggregate(torch.ones(2, 2), mask, 2, 2, "sequence")) == 0.5


def test_the_constants_are_those_that_the_pages_state():
    """A figure of another setting would stand under the paper's name."""
    assert (grpo.CLIP, rwr.KL_CAP, grpo.GRAD_CLIP, grpo.ENTROPY_BONUS) == (0.2, 0.5, 1.0, 0.0)
    assert {layer.scaling["agent"] for layer in tiny_policy().lora_layers} == {2.0}


def test_entropy_bonus_has_the_gradient_of_the_entropy(monkeypatch):
    """-log pi of a sampled token is its entropy on average, yet has no gradient on average."""
    theta = torch.randn(6, generator=seeded(), dtype=torch.float64, requires_grad=True)
    logp = theta.log_softmax(-1)
    p = logp.exp().detach()  # the sampler: the mean over its tokens is a sum weighted by p
    entropy = -(logp.exp() * logp).sum()
    monkeypatch.setattr(grpo, "aggregate", lambda x, *_: (p[:, None] * x).sum())

    def loss(bonus):
        monkeypatch.setattr(grpo, "ENTROPY_BONUS", bonus)
        rows = logp[:, None]  # each token is a response
        return grpo_loss(rows, rows.detach(), rows.detach(), torch.zeros(6), torch.ones(6, 1), 6, 6,
                         kl_coef=0.0)[0]

    def grad(value):
        return torch.autograd.grad(value, theta, retain_graph=True)[0]

    torch.testing.assert_close(grad(loss(0.3)), grad(-0.3 * entropy))
    assert loss(0.0).item() == 0


# ---------------------------------------------------------------------------------------------
# the update


@pytest.mark.parametrize("scale", ["std", "none"])
def test_first_gradient_is_that_of_eq_4(scale, monkeypatch):
    """On-policy the update must be REINFORCE with a group baseline and the KL to the untrained
    policy, on sampled tokens only: computed here the plain way."""
    monkeypatch.setattr(grpo, "group_advantages", partial(group_advantages, scale=scale))
    policy, groups = tiny_policy(), random_groups(RAGGED)
    drawn = [[[t % 3 != 1 for t in range(len(r))] for r in responses] for _, responses in groups]
    options = dict(temperature=0.7, agent_kl=0.1, drawn=drawn, token_budget=40)
    stats = train_agent(policy, "agent", Frozen(), groups, REWARDS, grad_clip=1e9, **options)
    made = gradients(policy, "agent")
    clear(policy)
    advantages = group_advantages(REWARDS, scale)
    loss, kl, tokens = 0, 0, 0
    for (prompt, responses), row, masks in zip(groups, advantages, drawn):
        for response, a, mask in zip(responses, row, masks):
            with policy.use(None), torch.no_grad():
                ref = naive_logps(policy, prompt, response, 0.7)
            with policy.use("agent"):
                for logp, before, own in zip(naive_logps(policy, prompt, response, 0.7), ref, mask):
                    k3 = (before - logp).exp() - 1 - (before - logp)
                    loss = loss + own * (-float(a) * logp + 0.1 * k3)
                    kl, tokens = kl + own * k3.item(), tokens + own
    (loss / tokens).backward()
    assert close(made, gradients(policy, "agent"), 1e-4)
    assert stats["kl"] == pytest.approx(kl / tokens, rel=1e-4) and stats["trained_tokens"] == tokens


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_micro_batches_do_not_change_the_gradient(aggregation, monkeypatch):
    """A mean of means: memory settings would change the learning (-0.94 became 0.01 elsewhere)."""
    monkeypatch.setattr(grpo, "grpo_loss", partial(grpo_loss, aggregation=aggregation))
    policy, groups = tiny_policy(), random_groups(RAGGED)
    budgets = (10_000, 30, 12, 1)  # 1: every response alone, groups are split
    pieces = [len(list(grpo.split_groups(flat(groups), budget))) for budget in budgets]
    assert pieces[0] == 1 and pieces[-1] == 12
    first, *others = [update_gradients(policy, groups, REWARDS, agent_kl=0.1, token_budget=budget)
                      for budget in budgets]
    assert all(close(other, first) for other in others)


def spy_on_ratios(monkeypatch):
    """Collect max |ratio - 1| over the tokens of every call of the loss."""
    seen, real = [], grpo.grpo_loss

    def spy(logp, old_logp, ref_logp, advantages, mask, *args, **kwargs):
        ratio = (logp - old_logp).exp().detach()
        seen.append(float((ratio - 1).abs()[mask].max()))
        return real(logp, old_logp, ref_logp, advantages, mask, *args, **kwargs)

    monkeypatch.setattr(grpo, "grpo_loss", spy)
    return seen


@pytest.mark.parametrize("short", [0, 1024])  # attention in one kernel, as on a GPU; or as here
@pytest.mark.parametrize("size", [0, 2, 3])
def test_ratio_starts_at_exactly_one(monkeypatch, size, short):
    """Old log-probs of other micro-batches are up to .1 away in bf16, and the clip acts at once; of
    the policy as it is now, and it never acts."""
    monkeypatch.setattr("model.attention.SHORT", short)
    policy, seen = tiny_policy(dtype=torch.bfloat16), spy_on_ratios(monkeypatch)
    for lr in (0, 1e-2):
        seen.clear()
        train_agent(policy, "agent", policy.optimizer("agent", lr), random_groups(RAGGED), REWARDS,
                    temperature=0.7, generator=seeded(), mini_batch=size)
        assert seen[0] == 0
        moved = lr > 0 and size > 0  # within the pass, before its last step
        assert (max(seen) > 1e-3) == moved


def test_a_pass_over_mini_batches_leaves_no_group_out():
    """The last, smaller mini-batch would be dropped, or --mini-batch ignored."""
    for size, steps in ((0, 1), (2, 2), (3, 2)):
        frozen = Frozen()
        stats = train_agent(tiny_policy(), "agent", frozen, random_groups(RAGGED), REWARDS,
                            generator=seeded(), mini_batch=size)
        assert frozen.steps == steps and stats["trained_tokens"] == 44
    plans = [grpo.plan_steps(9, 2, 2, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]  # else --mini-batch could not be resumed


@pytest.mark.parametrize("size", [0, 2])
def test_mismatch_of_sampler_and_scorer_is_measured_before_any_step(size, monkeypatch):
    """A sampler that is another policy than the scored one would go unnoticed."""
    monkeypatch.setattr(grpo, "CHECKED_GROUPS", 3)
    policy, groups, rewards = tiny_policy(), random_groups(RAGGED), REWARDS
    with policy.use("agent"):
        scored = scores(policy, groups, 0.7, 10_000)
    gaps = [[torch.rand(len(row), generator=seeded()) for row in rows] for rows in scored]
    sampled = [[(row + gap).tolist() for row, gap in zip(*pair)] for pair in zip(scored, gaps)]
    stats = train_agent(policy, "agent", policy.optimizer("agent", 0.1), groups, rewards, sampled,
                        temperature=0.7, generator=seeded(), mini_batch=size)
    checked = torch.cat([gap for rows in gaps[:3] for gap in rows])
    assert stats["mismatch_max"] == pytest.approx(float(checked.max()), abs=1e-4)
    assert stats["mismatch"] == pytest.approx(float(checked.mean()), abs=1e-4)


def poisoned_steps(monkeypatch, steps, how):
    """Make the n-th loss (one micro-batch each) not finite, in its value or its gradient alone."""
    calls, real = [], grpo.grpo_loss

    def loss_of(logp, *args, **kwargs):
        loss, stats = real(logp, *args, **kwargs)
        calls.append(1)
        if len(calls) - 1 in steps:
            root = (logp - logp.detach()).abs().sum().sqrt()  # value 0, slope infinite
            loss = loss + {"nan": float("nan"), "slope": root}[how]
            stats = {key: value * float("nan") for key, value in stats.items()}
        return loss, stats

    monkeypatch.setattr(grpo, "grpo_loss", loss_of)


@pytest.mark.parametrize("how", ["nan", "slope"])
def test_a_step_that_is_not_finite_is_skipped_to_the_bit(monkeypatch, how):
    """One NaN would stay in the weights and in Adam's moments for good, or in the statistics."""
    policy, groups = tiny_policy(), random_groups(RAGGED)
    optimizer = policy.optimizer("agent", 1e-2)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    train_agent(policy, "agent", optimizer, groups, REWARDS)
    before, state = weights(policy, "agent"), copy.deepcopy(optimizer.state_dict()["state"])
    with monkeypatch.context() as patch:
        poisoned_steps(patch, {0}, how)
        stats = train_agent(policy, "agent", optimizer, groups, REWARDS)
    assert same(weights(policy, "agent"), before)
    now = optimizer.state_dict()["state"]
    assert all(same(now[i].values(), state[i].values()) for i in state)
    assert stats["skipped_steps"] == 1 and stats["trained_tokens"] == 0
    # one of four: the others must train as if it were not there
    poisoned_steps(monkeypatch, {1}, how)
    stats = train_agent(policy, "agent", optimizer, groups, REWARDS, mini_batch=1,
                        generator=seeded())
    assert stats["skipped_steps"] == 1 and 0 < stats["trained_tokens"] < 44
    assert all(math.isfinite(value) for value in stats.values()) and stats["grad_norm"] > 0
    assert int(optimizer.state_dict()["state"][0]["step"]) == 1 + 3


def test_groups_without_signal_cost_no_forward_pass_and_have_no_kl(monkeypatch):
    """Half of the compute for nothing, a KL pull without a reward, a step on stale momentum."""
    policy, groups, rewards = tiny_policy(), random_groups(RAGGED), REWARDS.clone()
    rewards[1], rewards[3] = 0, 1
    made = update_gradients(policy, groups, rewards, agent_kl=0.5)
    scored, real = [], policy.logprobs

    def logprobs(rollouts, *args):
        scored.extend(r.group for r in rollouts)
        return real(rollouts, *args)

    monkeypatch.setattr(policy, "logprobs", logprobs)
    assert train_agent(policy, "agent", Frozen(), groups, rewards)["zero_variance"] == 0.5
    assert set(scored) == {0, 2} and len(scored) == 12
    alone = update_gradients(policy, [groups[0], groups[2]], rewards[[0, 2]], agent_kl=0.5)
    assert close(made, alone)
    scored.clear()
    for batch, rewards in ((groups, torch.ones(4, 3)), ([], torch.tensor([]))):
        frozen = Frozen()
        stats = train_agent(policy, "agent", frozen, batch, rewards)
        assert stats["zero_variance"] == 1 and stats["trained_tokens"] == frozen.steps == 0
    assert scored == []


def test_gradient_clipping_bounds_the_step_and_reports_the_norm_before():
    """A spike would go through, or the log would show the clip instead of the spike."""
    policy, groups = tiny_policy(), random_groups(RAGGED)
    norm = math.sqrt(sum(float((g ** 2).sum()) for g in update_gradients(policy, groups, REWARDS)))
    before = weights(policy, "agent")
    stats = train_agent(policy, "agent", torch.optim.SGD(policy.params["agent"], lr=1.0), groups,
                        REWARDS, grad_clip=norm / 10)
    moved = sum(float(((a - b) ** 2).sum()) for a, b in zip(before, weights(policy, "agent")))
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert math.sqrt(moved) == pytest.approx(norm / 10, rel=1e-3)
