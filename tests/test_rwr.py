"""RWR: the gradient against a plain loop, the fixed point against arithmetic, the cap bit for bit.

    python -m pytest tests/test_rwr.py -q
"""
import math
from types import SimpleNamespace

import pytest
import torch

import grpo
from helpers import (clear, equal_bits, gradients, naive_row, nearly_equal, random_groups,
                     rollouts_of, tiny_policy, weights)
from policy import Rollout
import rwr
from rwr import draw_kl_sample, rwr_update, rwr_weights, whole_passes
from support.options import Options
from walkthroughs.toy import TablePolicy

SHAPES = [(5, [4]), (2, [7]), (9, [1]), (3, [3]), (3, [2]), (6, [5])]
R_ENV = [1.0, 0.2, 0.9, 0.6, 0.1, 0.8]
RECORDS = [SimpleNamespace(prompt=p, response=r, r_env=x)
           for (p, [r]), x in zip(random_groups(SHAPES), R_ENV)]
RECORDS[4].prompt = RECORDS[2].prompt = RECORDS[1].prompt  # three texts for one seed task
RECORDS[5].prompt = RECORDS[3].prompt = RECORDS[0].prompt  # three for another, between the others
KL_SAMPLE = rollouts_of(random_groups([(4, [3]), (7, [2]), (1, [6]), (5, [5])], seed=7))
KL_SAMPLE[3].prompt = KL_SAMPLE[0].prompt


def update(policy, optimizer, fresh=RECORDS, old=(), kl_sample=KL_SAMPLE, cap=1e9, **options):
    """Call rwr_update with all records in one step; `options` replace the defaults."""
    options = {"env_passes": 1, "env_batch": max(1, len(fresh) + len(old)), **options}
    return rwr_update(policy, "env", optimizer, fresh, old, kl_sample, Options(**options),
                      seeded(), cap)


def seeded(seed=0):
    """Return a seeded generator."""
    return torch.Generator().manual_seed(seed)


def test_weights_do_not_overflow():
    """Otherwise a large lam would give NaN instead of all weight on the best generation."""
    assert rwr_weights(torch.tensor([0.1, 1.0, 0.99]), 1e4).tolist() == pytest.approx([0, 3, 0])


@pytest.mark.parametrize("n, passes, batch, sizes", [
    (10, 3, 4, [5, 5, 4, 4, 4, 4, 4]), (3, 2, 6, [6]), (3, 1, 4, [])])
def test_every_record_is_met_once_in_a_pass(n, passes, batch, sizes):
    """Otherwise some records would never be learned from, or a step would be taken on very few."""
    batches = whole_passes(n, passes, batch, seeded())
    assert [len(b) for b in batches] == sizes
    if sizes:
        assert sorted(sum(batches, [])) == sorted(passes * list(range(n)))
        assert batches != whole_passes(n, passes, batch, seeded(1))


def test_kl_sample_is_all_that_was_written_for_random_seed_tasks():
    """Otherwise the KL would be measured on the first texts of an epoch only, or on some of those
    written for a seed task."""
    texts = [Rollout(i // 4, [i], [1]) for i in range(4 * 60)]
    drawn = draw_kl_sample(texts, seeded())
    groups = {r.group for r in drawn}
    assert len(groups) == 24 and max(groups) > 40  # as rwr.py states
    assert drawn == [r for r in texts if r.group in groups]


# ---------------------------------------------------------------------------------------------
# the update


@pytest.mark.parametrize("budget, long", [(10_000, 128), (10_000, 3), (14, 1), (1, 128)])
def test_gradient_is_that_of_the_weighted_imitation_loss(budget, long, monkeypatch):
    """Otherwise weights would go to the wrong records, records would get a KL term, the reference
    would have the adapter on (as in the released code), micro-batches would be averaged twice, or
    shared prompts would be mixed up."""
    monkeypatch.setattr("model.packing.LONG", long)  # a prompt of this many tokens is shared
    monkeypatch.setattr(grpo, "GRAD_CLIP", 1e9)
    policy, lam, kl_coef = tiny_policy(), 3.0, 0.3
    stats = update(policy, policy.optimizer("env", 0.0), RECORDS[:4], RECORDS[4:], lam=lam,
                   temperature=0.7, env_kl=kl_coef, token_budget=budget)
    gradient = gradients(policy, "env")
    clear(policy)
    w = [math.exp(lam * r) for r in R_ENV]
    nll, penalty = 0, 0
    for r, weight in zip(RECORDS, w):
        nll = nll - 6 * weight / sum(w) * naive_row(policy, "env", r, 0.7).sum()
    for r in KL_SAMPLE:
        d = naive_row(policy, "env", r, 0.7) - naive_row(policy, None, r, 0.7).detach()
        penalty = penalty + ((-d).exp() - 1 + d).sum()
    tokens, kl_tokens = (sum(len(r.response) for r in texts) for texts in (RECORDS, KL_SAMPLE))
    kl = penalty / kl_tokens
    loss = nll / tokens + kl_coef * kl
    loss.backward()
    assert stats["env_kl"] == pytest.approx(kl.item(), rel=1e-4)
    assert nearly_equal(gradient, gradients(policy, "env"), 1e-4)
    assert stats["env_weight_ratio"] == pytest.approx(math.exp(lam * 0.9), rel=1e-4)


def test_each_step_is_penalised_on_another_part_of_the_sample(monkeypatch):
    """Otherwise the rest of the sample would drift freely, or a text would be compared with another
    text's log-probs."""
    parts = []

    def rwr_step(policy, adapter, optimizer, records, weights, o, kl_texts, initial):
        parts.append([r.group for r in kl_texts])
        assert [r.tokens for r in kl_texts] == [len(row) for row in initial]
        return 0.0, True

    monkeypatch.setattr(rwr, "rwr_step", rwr_step)
    sample = rollouts_of(random_groups([(2, [n]) for n in range(1, 10)]))
    policy = tiny_policy()
    update(policy, policy.optimizer("env", 0.0), kl_sample=sample, env_passes=10, env_batch=3)
    assert len(parts) == 20 and all(len(set(part)) == 3 for part in parts)
    assert set(sum(parts, [])) == set(range(9))


def test_nothing_new_to_learn_from_is_a_no_op():
    """Otherwise the simulator would train on old records only or move on stale momentum, or an
    empty band would end the run."""
    policy = tiny_policy()
    optimizer = policy.optimizer("env", 1e-2)
    update(policy, optimizer)
    before = weights(policy, "env")
    for old, kl_sample in ((RECORDS, KL_SAMPLE), ([], KL_SAMPLE), ([], [])):
        stats = update(policy, optimizer, [], old, kl_sample)
        unknown = {key for key, value in stats.items() if value is None}
        assert unknown - {"env_kl"} == {"env_kl_step", "env_weight_ratio"}
        assert ("env_kl" in unknown) == (not kl_sample) and stats["env_steps"] == 0
    assert equal_bits(weights(policy, "env"), before)


def test_cap_undoes_the_step_that_crosses_it_bit_for_bit(monkeypatch):
    """Otherwise the cap would be reported, but parameters, momentum or step count would not be
    restored."""
    def run(cap, n):
        monkeypatch.setattr(rwr, "whole_passes", lambda *_: [[0, 1, 2], [3, 4, 5]][:n])
        policy = tiny_policy()
        optimizer = policy.optimizer("env", 3e-3)
        optimizer.param_groups[0]["weight_decay"] = 0.01
        stats = update(policy, optimizer, cap=cap)
        return stats, weights(policy, "env"), optimizer.state_dict()["state"]

    expected, expected_params, expected_state = run(1e9, 1)
    # the first step just reaches the cap, and the second one crosses it
    stats, params, state = run(expected["env_kl_step"], 2)
    assert stats == {**expected, "env_capped": 1} and equal_bits(params, expected_params)
    assert stats["env_imitated"] == [0, 1, 2]  # the others may be imitated later
    for mine, theirs in zip(state.values(), expected_state.values(), strict=True):
        assert equal_bits(mine.values(), theirs.values())


def test_a_first_step_across_the_cap_is_undone_and_ends_the_update(monkeypatch):
    """Otherwise the first step, Adam's largest, would slip through or leave a partial state, or a
    diverged simulator would be kept, because nan > cap is false."""
    kls = iter([0.5, math.nan, 0.5])  # KL to the initial simulator, then after each of two steps
    monkeypatch.setattr(rwr, "mean_kl", lambda *_: next(kls))
    policy = tiny_policy()
    optimizer, before = policy.optimizer("env", 1e-2), weights(policy, "env")
    stats = update(policy, optimizer, cap=1.0, env_passes=2, env_batch=6)
    assert stats["env_capped"] == 1 and stats["env_steps"] == 0
    assert stats["env_kl_step"] is None and stats["env_imitated"] == []
    assert equal_bits(weights(policy, "env"), before) and optimizer.state_dict()["state"] == {}


def test_a_step_that_is_not_finite_is_skipped_and_the_next_ones_are_made(monkeypatch):
    """Otherwise one NaN would stay in the weights for good, or it would end the update."""
    w, [first, *others] = torch.ones(6), whole_passes(6, 1, 2, seeded())
    w[first] = math.nan  # records of the first of three steps
    monkeypatch.setattr(rwr, "rwr_weights", lambda *_: w)
    policy = tiny_policy()
    stats = update(policy, policy.optimizer("env", 1e-3), env_batch=2)
    assert stats["env_skipped_steps"] == 1 and stats["env_steps"] == 2
    assert stats["env_imitated"] == sorted(sum(others, []))
    assert all(p.isfinite().all() for p in policy.params["env"])


def test_rwr_on_a_categorical_simulator_finds_the_reweighted_distribution():
    """Otherwise the update would not lead to its fixed point, pi_0 exp(lam R_env) / Z."""
    lam, counts, r_env = 6.0, [20, 40, 13, 27, 7], [0.61, 1.0, 0.75, 0.97, 0.88]  # 107 texts
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
