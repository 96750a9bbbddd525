"""RWR: the gradient against a plain loop, the fixed point against arithmetic, the cap bit for bit.

    python -m pytest tests/test_rwr.py -q
"""
import math
from types import SimpleNamespace

import pytest
import torch

import grpo
from helpers import (Frozen, clear, close, flat, gradients, naive_logps, random_groups, same,
                     scores, tiny_policy, weights)
from policy import Rollout
import rwr
from rwr import draw_kl_sample, mean_kl, rwr_update, rwr_weights, whole_passes
from support.options import Options
from walkthroughs.toy import TablePolicy

SHAPES = [(5, [4]), (2, [7]), (9, [1]), (3, [3]), (3, [2]), (6, [5])]
R_ENV = [1.0, 0.2, 0.9, 0.6, 0.1, 0.8]
RECORDS = [SimpleNamespace(prompt=p, response=r, r_env=x)
           for (p, [r]), x in zip(random_groups(SHAPES), R_ENV)]
RECORDS[4].prompt = RECORDS[2].prompt = RECORDS[1].prompt  # written for the same seed task
RECORDS[5].prompt = RECORDS[3].prompt = RECORDS[0].prompt  # drawn in another order than these
KL_SAMPLE = flat(random_groups([(4, [3]), (7, [2]), (1, [6]), (5, [5])], seed=7))
KL_SAMPLE[3].prompt = KL_SAMPLE[0].prompt


def update(policy, optimizer, fresh=RECORDS, old=(), kl_sample=KL_SAMPLE, grad_clip=1.0, cap=1e9,
           **options):
    """rwr_update with default options but for those given; all records in one step."""
    options = {"env_passes": 1, "env_batch": max(1, len(fresh) + len(old)), **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "GRAD_CLIP", grad_clip)
        return rwr_update(policy, "env", optimizer, fresh, old, kl_sample, Options(**options),
                          seeded(), cap)


def seeded(seed=0):
    """A seeded generator."""
    return torch.Generator().manual_seed(seed)


def test_weights_do_not_overflow():
    """A sharp lam would give NaN instead of the best generation alone."""
    assert rwr_weights(torch.tensor([0.1, 1.0, 0.99]), 1e4).tolist() == pytest.approx([0, 3, 0])


@pytest.mark.parametrize("n, passes, batch, steps", [
    (10, 1, 4, 2), (10, 3, 4, 7), (3, 2, 6, 1), (3, 1, 4, 0)])
def test_every_record_is_met_once_in_a_pass(n, passes, batch, steps):
    """A part of the records would never be learned from, or a step be made on very few."""
    batches = whole_passes(n, passes, batch, seeded())
    assert len(batches) == steps and all(len(b) >= batch for b in batches)
    if steps:
        assert sorted(sum(batches, [])) == sorted(passes * list(range(n)))
    assert not batches or batches != whole_passes(n, passes, batch, seeded(1))


def test_kl_sample_is_all_that_was_written_for_random_seed_tasks():
    """The first texts of an epoch alone would be looked at, or the better half of a seed task's."""
    texts = [Rollout(i // 4, [i], [1]) for i in range(4 * 60)]
    drawn = draw_kl_sample(texts, seeded())
    groups = {r.group for r in drawn}
    assert len(groups) == rwr.KL_SEEDS and max(groups) > 40
    assert drawn == [r for r in texts if r.group in groups]


# ---------------------------------------------------------------------------------------------
# the update


@pytest.mark.parametrize("budget, long", [(10_000, 128), (10_000, 3), (14, 1), (1, 128)])
def test_gradient_is_that_of_the_weighted_imitation_loss(budget, long, monkeypatch):
    """Weights on the wrong record, a KL term on records, a reference with the adapter on, a mean of
    micro-batches' means, a shared prompt mixed up: the plain way says so."""
    monkeypatch.setattr("policy.LONG", long)  # tokens from which a prompt is shared
    policy, lam, kl_coef = tiny_policy(), 3.0, 0.3
    stats = update(policy, Frozen(), RECORDS[:4], RECORDS[4:], lam=lam, temperature=0.7,
                   env_kl=kl_coef, grad_clip=1e9, token_budget=budget)
    made = gradients(policy, "env")
    clear(policy)
    w = [math.exp(lam * r) for r in R_ENV]
    w, nll, penalty = [x * 6 / sum(w) for x in w], 0, 0
    with policy.use("env"):
        for record, weight in zip(RECORDS, w):
            nll = nll - weight * sum(naive_logps(policy, record.prompt, record.response, 0.7))
    for r in KL_SAMPLE:
        with policy.use(None), torch.no_grad():
            ref = naive_logps(policy, r.prompt, r.response, 0.7)
        with policy.use("env"):
            for a, b in zip(naive_logps(policy, r.prompt, r.response, 0.7), ref):
                penalty = penalty + (b - a).exp() - 1 + a - b
    tokens, kl_tokens = (sum(len(r.response) for r in texts) for texts in (RECORDS, KL_SAMPLE))
    loss = nll / tokens + kl_coef * penalty / kl_tokens
    loss.backward()
    assert stats["env_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert close(made, gradients(policy, "env"), 1e-4)
    assert stats["env_weight_ratio"] == pytest.approx(math.exp(lam * 0.9), rel=1e-4)


def test_each_step_is_penalised_on_another_part_of_the_sample(monkeypatch):
    """The rest of the sample would drift freely."""
    seen, real = [], rwr.rwr_step

    def rwr_step(*args):
        seen.append([r.group for r in args[6]])
        return real(*args)

    monkeypatch.setattr(rwr, "rwr_step", rwr_step)
    sample = flat(random_groups([(2, [2])] * 9))
    update(tiny_policy(), Frozen(), kl_sample=sample, env_passes=10, env_batch=3)
    assert len(seen) == 20 and all(len(set(part)) == 3 for part in seen)
    assert set(sum(seen, [])) == set(range(9))


def test_nothing_new_to_learn_from_is_a_no_op():
    """Old records alone would be trained on, with nothing new to speak for them; an empty band
    would crash the epoch or move the simulator on stale momentum."""
    policy = tiny_policy()
    optimizer = policy.optimizer("env", 1e-2)
    update(policy, optimizer)
    before = weights(policy, "env")
    for old, kl_sample in ((RECORDS, KL_SAMPLE), ([], KL_SAMPLE), ([], [])):
        stats = update(policy, optimizer, [], old, kl_sample)
        assert stats["env_steps"] == 0 and (stats["env_kl"] > 0) == bool(kl_sample)
    assert same(weights(policy, "env"), before)


def test_cap_undoes_the_step_that_crosses_it_bit_for_bit(monkeypatch):
    """The cap would only be reported: parameters, momentum and step count must be as before."""
    batches = [[0, 1, 2], [3, 4, 5], [1, 3, 5], [0, 2, 4]] * 5

    def run(cap, n):
        monkeypatch.setattr(rwr, "whole_passes", lambda *_: batches[:n])
        policy = tiny_policy()
        optimizer = policy.optimizer("env", 3e-3)
        optimizer.param_groups[0]["weight_decay"] = 0.01
        stats = update(policy, optimizer, cap=cap)
        return stats, weights(policy, "env"), optimizer.state_dict()

    free, *_ = run(1e9, len(batches))
    assert free["env_capped"] == 0 and free["env_steps"] == len(batches)
    cap = free["env_kl_step"] / 4
    stats, params, state = run(cap, len(batches))
    assert stats["env_capped"] == 1 and 0 < stats["env_steps"] < len(batches)
    assert 0 < stats["env_kl_step"] <= cap
    # the same update that was never asked for the crossing step
    expected, expected_params, expected_state = run(1e9, stats["env_steps"])
    assert same(params, expected_params) and stats == {**expected, "env_capped": 1}
    assert state["param_groups"] == expected_state["param_groups"]
    for mine, theirs in zip(state["state"].values(), expected_state["state"].values(), strict=True):
        assert same(mine.values(), theirs.values())


def test_a_first_step_across_the_cap_is_undone_and_training_goes_on(monkeypatch):
    """The first step is the largest of Adam: it would slip through, or leave half a state behind.
    And nan > cap is false: a diverged simulator would be kept."""
    policy = tiny_policy()
    optimizer, before = policy.optimizer("env", 1.0), weights(policy, "env")
    stats = update(policy, optimizer, cap=0.01)
    assert stats["env_capped"] == 1 and stats["env_steps"] == stats["env_kl_step"] == 0
    assert same(weights(policy, "env"), before) and optimizer.state_dict()["state"] == {}
    with monkeypatch.context() as patch:
        patch.setattr(rwr, "mean_kl", lambda a, b: float("nan"))
        assert update(policy, optimizer)["env_capped"] == 1
    assert same(weights(policy, "env"), before)
    optimizer.param_groups[0]["lr"] = 3e-3
    assert update(policy, optimizer)["env_steps"] == 1 and not same(weights(policy, "env"), before)


def test_a_step_that_is_not_finite_is_skipped_and_the_next_ones_are_made(monkeypatch):
    """One NaN would stay in the weights for good, or end the update uncounted."""
    policy, steps, real = tiny_policy(), [], rwr.finite_step

    def finite_step(params, optimizer, loss):
        steps.append(loss)
        if len(steps) == 1:
            params[0].grad[0, 0] = math.nan
        return real(params, optimizer, loss)

    monkeypatch.setattr(rwr, "finite_step", finite_step)
    stats = update(policy, policy.optimizer("env", 1e-3), env_passes=3, env_batch=6)
    assert stats["env_skipped_steps"] == 1 and stats["env_steps"] == 2
    assert all(p.isfinite().all() for p in policy.params["env"])


def test_kl_to_the_initial_simulator_is_measured_with_adapters_off():
    """The reference would move with the simulator (as it does in the released code)."""
    policy = tiny_policy(live=False)
    optimizer = policy.optimizer("env", 3e-3)
    # fresh adapters are the reference
    assert update(policy, optimizer, env_passes=6, env_kl=0.0)["env_kl"] == 0
    groups = [(r.prompt, [r.response]) for r in KL_SAMPLE]
    with policy.use("env"):
        now = sum(scores(policy, groups), [])
    with policy.use(None):
        initial = sum(scores(policy, groups), [])
    second = update(policy, optimizer, [])
    assert second["env_kl"] == pytest.approx(mean_kl(now, initial), rel=1e-5) != 0


@pytest.mark.parametrize("lam", [1.0, 6.0])
def test_rwr_on_a_categorical_simulator_finds_the_reweighted_distribution(lam):
    """The point of the whole update: pi <- pi_0 exp(lam R_env) / Z, here in closed form."""
    counts, r_env = [20, 40, 13, 27, 7], [0.61, 1.0, 0.75, 0.97, 0.88]  # 107 texts
    table = TablePolicy(torch.tensor(counts, dtype=torch.float64).log()[None], "env")
    initial = table.probs()[0]
    ids = [k for k, n in enumerate(counts) for _ in range(n)]
    records = [SimpleNamespace(prompt=[0], response=[k], r_env=r_env[k]) for k in ids]
    optimizer = torch.optim.SGD(table.params["env"], lr=4.0)
    stats = update(table, optimizer, records, lam=lam, env_kl=0.0,
                   kl_sample=[Rollout(i, [0], [k]) for i, k in enumerate(ids)], env_passes=60)
    target = initial * torch.exp(lam * torch.tensor(r_env, dtype=torch.float64))
    target = target / target.sum()
    torch.testing.assert_close(table.probs()[0], target, atol=1e-3, rtol=0)
    exact = float((initial * (initial / target).log()).sum())
    assert stats["env_kl_step"] == pytest.approx(exact, rel=0.02)  # KL(before || now)
