"""GRPO: every term against a naive loop, and the update against what Eq. 4 says it must do.

Run: python -m pytest tests/test_grpo.py -q
"""
import copy
import math

import numpy as np
import pytest
import torch

import grpo
from grpo import aggregate, group_advantages, grpo_loss, has_signal, token_kl
from helpers import (Frozen, clear, close, flat, gradients, naive_logps, raised, random_groups, same,
                     scores, tiny_policy, train_agent, weights)

RAGGED = [(5, [4, 1, 7]), (2, [3, 3, 2]), (9, [2, 6, 5]), (1, [2, 8, 1])]  # equal G, all else not
REWARDS = torch.tensor([[1., 0, 0], [0, 1, 1], [1, 0, 1], [0, 1, 0]])  # in no order twice


def update_gradients(policy, groups, rewards, **options):
    """The gradient of the agent that one grpo_update makes, unclipped; nothing is moved."""
    clear(policy)
    train_agent(policy, "agent", Frozen(), groups, rewards, grad_clip=1e9, **options)
    return gradients(policy, "agent")


def values(seed=0, N=4, R=5):
    """Random log-probs of a policy, an old and a reference one, advantages and a ragged mask."""
    g = torch.Generator().manual_seed(seed)
    logp, old, ref = (-3 * torch.rand(N, R, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(R) < torch.tensor([5, 1, 3, 2])[:, None]
    return logp, old, ref, torch.randn(N, generator=g, dtype=torch.float64), mask


# ---------------------------------------------------------------------------------------------
# the pure functions


def test_advantages_equal_numpy():
    """Eq. 4's baseline or the scaling would be another one."""
    rewards = torch.rand(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    r = rewards.numpy()
    centred = r - r.mean(1, keepdims=True)
    np.testing.assert_allclose(group_advantages(rewards, "none"), centred)
    np.testing.assert_allclose(group_advantages(rewards, "std"),
                               centred / (r.std(1, ddof=1, keepdims=True) + 1e-4))


def test_advantages_refuse_what_has_no_baseline():
    """G = 1 gives NaN with the sample deviation."""
    raised(ValueError, "G >= 2", group_advantages, torch.ones(3, 1))
    raised(ValueError, "unknown advantage scale", group_advantages, torch.ones(3, 2), "leave-one-out")


def test_signal_is_max_minus_min():
    """std == 0 is never exactly true: groups of equal floats would be trained on noise."""
    rewards = torch.tensor([[0.1] * 3, [0.1, 0.1, 0.1 + 1e-8], [0.1, 0.1, 0.2], [1., 0, 0]])
    assert has_signal(rewards).tolist() == [False, False, True, True]


def test_kl_values_and_gradients_on_a_table():
    """What token_kl's docstring claims: values of all, and E[grad] of k1, k2 and k3 exactly."""
    g = torch.Generator().manual_seed(0)
    theta = torch.randn(6, generator=g, dtype=torch.float64, requires_grad=True)
    q = torch.randn(6, generator=g, dtype=torch.float64).softmax(-1)

    def grad(loss):
        return torch.autograd.grad(loss, theta, retain_graph=True)[0]

    logp = theta.log_softmax(-1)
    p = logp.exp().detach()  # the sampler: expectations are weighted sums without a gradient
    expected = {k: (p * token_kl(logp, q.log(), k)).sum() for k in ("k1", "k2", "k3")}
    reverse, forward = (logp.exp() * (logp - q.log())).sum(), (q * (q.log() - logp)).sum()
    torch.testing.assert_close(expected["k1"], reverse)
    torch.testing.assert_close(expected["k3"], reverse)
    assert grad(expected["k1"]).abs().max() < 1e-12
    torch.testing.assert_close(grad(expected["k2"]), grad(reverse))
    torch.testing.assert_close(grad(expected["k3"]), grad(forward))
    assert (grad(reverse) - grad(forward)).abs().max() > 0.01  # else the table tells nothing


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_empty_rows_are_zero_and_not_nan(aggregation):
    """0 / 0: one empty response would turn all weights into NaN."""
    x = torch.randn(3, 4, requires_grad=True)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[0, :2] = True
    loss = aggregate(x, mask, aggregation, 2, 3)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(x.grad).all() and (x.grad[1:] == 0).all()
    assert float(aggregate(x, torch.zeros_like(mask), aggregation, 0, 0)) == 0


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_loss_equals_a_loop(aggregation, kind):
    """The objective would be another one: every option against plain arithmetic."""
    logp, old, ref, advantages, mask = values(1)
    loss, stats = grpo_loss(logp, old, ref, advantages, mask, 11, 4, clip=0.2, kl_coef=0.3,
                            kl_estimator=kind, aggregation=aggregation)
    rows, kl, clipped = [], 0.0, 0
    for n in range(4):
        row = []
        for t in range(int(mask[n].sum())):
            ratio, d = math.exp(logp[n, t] - old[n, t]), float(logp[n, t] - ref[n, t])
            k = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}
            gain = min(ratio * advantages[n], min(max(ratio, 0.8), 1.2) * advantages[n])
            row.append(float(-gain) + 0.3 * k[kind])
            kl, clipped = kl + k["k3"], clipped + (abs(ratio - 1) > 0.2)
        rows.append(row)
    every = [x for row in rows for x in row]
    means = {"token": sum(every) / len(every), "sequence": sum(sum(r) / len(r) for r in rows) / 4}
    assert float(loss) == pytest.approx(means[aggregation])
    stats = {key: float(value) for key, value in stats.items()}
    assert stats == {"kl": pytest.approx(kl / 11), "clip_fraction": pytest.approx(clipped / 11)}


# ---------------------------------------------------------------------------------------------
# the update


@pytest.mark.parametrize("scale, chunk", [("std", 10_000), ("none", 3)])
def test_first_gradient_is_that_of_eq_4(scale, chunk, monkeypatch):
    """On-policy the update must be REINFORCE with a group baseline, computed here the plain way."""
    monkeypatch.setattr("policy.LOGIT_CHUNK", chunk)  # logits of so many tokens at once
    policy, groups = tiny_policy(), random_groups(RAGGED)
    made = update_gradients(policy, groups, REWARDS, temperature=0.7, agent_kl=0, scale=scale)
    clear(policy)
    r = REWARDS.numpy()
    advantages = r - r.mean(1, keepdims=True)
    if scale == "std":
        advantages = advantages / (r.std(1, ddof=1, keepdims=True) + 1e-4)
    with policy.use("agent"):
        loss = 0
        for (prompt, responses), row in zip(groups, advantages):
            for response, a in zip(responses, row):
                loss = loss - float(a) * sum(naive_logps(policy, prompt, response, 0.7))
        (loss / sum(len(x) for _, rs in groups for x in rs)).backward()
    assert close(made, gradients(policy, "agent"), 1e-4)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_micro_batches_do_not_change_the_gradient(aggregation):
    """A mean of means: memory settings would change the learning (-0.94 became 0.01 elsewhere)."""
    policy, groups, results = tiny_policy(), random_groups(RAGGED), []
    for budget in (10_000, 30, 12, 1):  # 1: every response alone, groups are split
        pieces = len(list(grpo.split_groups(flat(groups), budget)))
        results.append((pieces, update_gradients(
            policy, groups, REWARDS, aggregation=aggregation, agent_kl=0.1, kl_estimator="k2",
            token_budget=budget)))
    assert [n for n, _ in results][0] == 1 and results[-1][0] == 12
    assert all(close(grads, results[0][1]) for _, grads in results[1:])


def spy_on_ratios(monkeypatch):
    """Collect max |ratio - 1| over the tokens of every call of the loss."""
    seen, real = [], grpo.grpo_loss

    def spy(logp, old_logp, ref_logp, advantages, mask, *args, **kwargs):
        seen.append(float((((logp - old_logp).exp() - 1).abs() * mask).max().detach()))
        return real(logp, old_logp, ref_logp, advantages, mask, *args, **kwargs)

    monkeypatch.setattr(grpo, "grpo_loss", spy)
    return seen


@pytest.mark.parametrize("options", [dict(inner_epochs=2), dict(mini_batch=2),
                                     dict(inner_epochs=2, mini_batch=3, token_budget=20)])
def test_recomputed_old_logprobs_start_at_ratio_one(monkeypatch, options):
    """Old log-probs of another numeric path, row order or temperature: the clip acts at once."""
    policy, seen = tiny_policy(), spy_on_ratios(monkeypatch)
    train_agent(policy, "agent", policy.optimizer("agent", 0), random_groups(RAGGED), REWARDS,
                temperature=0.7, generator=torch.Generator().manual_seed(0), **options)
    assert max(seen) < 2e-5  # lr 0: nothing may move the ratio
    seen.clear()
    train_agent(policy, "agent", policy.optimizer("agent", 1e-2), random_groups(RAGGED), REWARDS,
                temperature=0.7, generator=torch.Generator().manual_seed(0), **options)
    assert seen[0] < 2e-5 and seen[-1] > 1e-3  # old stays what it was while the policy moves


@pytest.mark.parametrize("short", [0, 1024])  # attention in one kernel, as on a GPU; or as here
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("options", [dict(), dict(inner_epochs=2, mini_batch=3)])
def test_ratio_starts_at_exactly_one_in_bf16(monkeypatch, options, checkpointing, short):
    """Old log-probs of other micro-batches: up to .1 away in bf16, a clip before any step."""
    monkeypatch.setattr("support.attention.SHORT", short)
    policy, seen = tiny_policy(dtype=torch.bfloat16), spy_on_ratios(monkeypatch)
    groups = random_groups(RAGGED)
    train_agent(policy, "agent", policy.optimizer("agent", 0), groups, REWARDS,
                generator=torch.Generator().manual_seed(0), grad_checkpoint=checkpointing,
                **options)
    assert seen and max(seen) == 0.0
    # the case is only worth something if other micro-batches do give other numbers
    with policy.use("agent"):
        together = scores(policy, groups, 1.0, 16384)
        alone = [scores(policy, [group], 1.0, 16384)[0] for group in groups]
    assert short or not all(same(a, b) for a, b in zip(together, alone))


def test_equal_steps_are_scored_once_and_all_are_taken(monkeypatch):
    """Inner epochs over the whole batch would pay for the same old log-probs each time, or
    mini-batches and inner epochs be ignored."""
    policy, scored, real, frozen = tiny_policy(), [], grpo.response_logps, Frozen()
    monkeypatch.setattr(grpo, "response_logps",
                        lambda *a, **k: scored.append(policy.active) or real(*a, **k))
    for options, times, steps in ((dict(), [0], 1), (dict(inner_epochs=3), [1], 3),
                                  (dict(mini_batch=2), [2], 2),
                                  # the second pass may meet the groups in the same steps
                                  (dict(mini_batch=3, inner_epochs=2), [2, 4], 4)):
        scored.clear()
        frozen.steps = 0
        stats = train_agent(policy, "agent", frozen, random_groups(RAGGED), REWARDS, **options)
        assert scored[0] is None and set(scored[1:]) <= {"agent"}  # the reference, then old
        assert len(scored) - 1 in times
        assert frozen.steps == steps
        assert stats["trained_tokens"] == 44 * options.get("inner_epochs", 1)


@pytest.mark.parametrize("options", [dict(), dict(token_budget=12), dict(mini_batch=2),
                                     dict(inner_epochs=2)])
def test_mismatch_of_sampler_and_scorer_is_measured_before_any_step(options):
    """A sampler that is another policy than the scored one would go unnoticed."""
    policy, groups, rewards = tiny_policy(), random_groups(RAGGED), REWARDS.clone()
    rewards[3] = 1  # no signal: its log-probs are not looked at
    with policy.use("agent"):
        scored = scores(policy, groups, 0.7, 10_000)
    shift = torch.Generator().manual_seed(1)
    gaps = [[torch.rand(len(row), generator=shift) for row in rows] for rows in scored]
    sampled = [[(row + gap).tolist() for row, gap in zip(*pair)] for pair in zip(scored, gaps)]
    sampled[3][0][0] = -99.0
    stats = train_agent(policy, "agent", policy.optimizer("agent", 0.1), groups, rewards, sampled,
                        temperature=0.7, generator=torch.Generator().manual_seed(0), **options)
    per_group = [torch.cat(rows) for rows in gaps[:3]]
    assert stats["mismatch_max"] == pytest.approx(float(torch.cat(per_group).max()), abs=1e-4)
    # a mean over steps: of all tokens where there is one step's worth of groups
    if "mini_batch" not in options:
        assert stats["mismatch_mean"] == pytest.approx(float(torch.cat(per_group).mean()), abs=1e-4)
    assert 0 < stats["mismatch_mean"] < stats["mismatch_max"]
    silent = train_agent(policy, "agent", Frozen(), groups, rewards)
    assert silent["mismatch_mean"] == silent["mismatch_max"] == 0


def poisoned_steps(monkeypatch, steps, how):
    """Make the n-th loss (one micro-batch each) not finite, in its value or its gradient alone."""
    calls, real = [], grpo.grpo_loss

    def loss_of(logp, *args, **kwargs):
        loss, stats = real(logp, *args, **kwargs)
        calls.append(1)
        if len(calls) - 1 in steps:
            root = (logp - logp.detach()).abs().sum().sqrt()  # value 0, slope infinite
            loss = loss + {"nan": float("nan"), "inf": float("inf"), "slope": root}[how]
            stats = {key: value * float("nan") for key, value in stats.items()}
        return loss, stats

    monkeypatch.setattr(grpo, "grpo_loss", loss_of)


def frozen_state(optimizer):
    """All tensors of an optimiser's state, copied."""
    return [x.clone() for s in optimizer.state_dict()["state"].values() for x in s.values()]


@pytest.mark.parametrize("how", ["nan", "inf", "slope"])
def test_a_step_that_is_not_finite_is_skipped_to_the_bit(monkeypatch, how):
    """One NaN would stay in the weights and in Adam's moments for good."""
    policy, groups = tiny_policy(), random_groups(RAGGED)
    optimizer = policy.optimizer("agent", 1e-2)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    train_agent(policy, "agent", optimizer, groups, REWARDS)
    before, state = weights(policy, "agent"), frozen_state(optimizer)
    with monkeypatch.context() as patch:
        poisoned_steps(patch, {0}, how)
        stats = train_agent(policy, "agent", optimizer, groups, REWARDS)
    assert same(weights(policy, "agent"), before) and same(frozen_state(optimizer), state)
    assert stats["skipped_steps"] == 1 and stats["trained_tokens"] == 0
    assert all(math.isfinite(value) for value in stats.values())
    assert train_agent(policy, "agent", optimizer, groups, REWARDS)["skipped_steps"] == 0
    assert not same(weights(policy, "agent"), before)  # and the next one trains


def test_a_skipped_step_spoils_neither_the_others_nor_the_statistics(monkeypatch):
    """A mean with one NaN in it is NaN; the other mini-batches must train as if it had not been."""
    policy, groups = tiny_policy(), random_groups([(3, [4, 4, 4])] * 4)
    poisoned_steps(monkeypatch, {1}, "nan")
    optimizer = policy.optimizer("agent", 1e-2)
    stats = train_agent(policy, "agent", optimizer, groups, REWARDS, mini_batch=1,
                        generator=torch.Generator().manual_seed(0))
    assert stats["skipped_steps"] == 1 and stats["trained_tokens"] == 3 * 12
    assert stats["kl"] > 0 and stats["grad_norm"] > 0
    assert all(math.isfinite(value) for value in stats.values())
    assert all(torch.isfinite(p).all() for p in policy.params["agent"])
    assert int(optimizer.state_dict()["state"][0]["step"]) == 3


def test_groups_without_signal_cost_no_forward_pass_and_have_no_kl(monkeypatch):
    """Half of the compute for nothing, or a KL pull without a reward."""
    policy, groups, rewards = tiny_policy(), random_groups(RAGGED), REWARDS.clone()
    rewards[1], rewards[3] = 0, 1
    scored, real = [], policy.logprobs

    def spy(rollouts, *args, **kwargs):
        scored.extend(tuple(r.prompt) for r in rollouts)
        return real(rollouts, *args, **kwargs)

    monkeypatch.setattr(policy, "logprobs", spy)
    made = update_gradients(policy, groups, rewards, agent_kl=0.5)
    assert set(scored) == {tuple(groups[0][0]), tuple(groups[2][0])} and len(scored) == 12
    alone = update_gradients(policy, [groups[0], groups[2]], rewards[[0, 2]], agent_kl=0.5)
    assert close(made, alone)
    stats = train_agent(policy, "agent", Frozen(), groups, rewards)
    assert stats["zero_variance"] == 0.5


def test_batch_without_any_signal_is_a_no_op(monkeypatch):
    """An undefined loss, or an optimiser step on stale momentum."""
    policy, groups = tiny_policy(), random_groups(RAGGED)
    optimizer = policy.optimizer("agent", 1e-2)
    train_agent(policy, "agent", optimizer, groups, REWARDS)  # momentum is there now
    before, state = weights(policy, "agent"), copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr(policy, "logprobs", lambda *a, **k: pytest.fail("a forward pass"))
    for batch, rewards in ((groups, torch.ones(4, 3)), ([], torch.zeros(0, 3)),
                           ([], torch.tensor([]))):
        stats = train_agent(policy, "agent", optimizer, batch, rewards)
        assert stats["zero_variance"] == 1 and stats["trained_tokens"] == 0
    assert same(weights(policy, "agent"), before)
    assert state["state"][0]["step"] == optimizer.state_dict()["state"][0]["step"]


def test_gradient_clipping_bounds_the_step_and_reports_the_norm_before():
    """A spike would go through, or the log would show the clip instead of the spike."""
    policy, groups = tiny_policy(), random_groups(RAGGED)
    free = update_gradients(policy, groups, REWARDS)
    norm = math.sqrt(sum(float((g ** 2).sum()) for g in free))
    before = weights(policy, "agent")
    stats = train_agent(policy, "agent", torch.optim.SGD(policy.params["agent"], lr=1.0), groups,
                        REWARDS, grad_clip=norm / 10)
    moved = sum(float(((a - b) ** 2).sum()) for a, b in zip(before, weights(policy, "agent")))
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert math.sqrt(moved) == pytest.approx(norm / 10, rel=1e-3)
