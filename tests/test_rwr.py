"""RWR: weights and losses against loops, the fixed point against arithmetic, the cap bit for bit.

Run: python -m pytest tests/test_rwr.py -q
"""
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from curriculum import record_weights, weights_advantage, weights_linear, weights_rwr
import grpo
from helpers import (Frozen, clear, close, flat, gradients, naive_logps, random_groups,
                     same, scores, tiny_policy, weights)
from policy import Rollout
from support.options import Options
import rwr
from rwr import draw_batches, mean_kl, rwr_loss, rwr_update, weighted_nll
from walkthroughs.toy import TablePolicy

SHAPES = [(5, [4]), (2, [7]), (9, [1]), (3, [3]), (3, [2]), (6, [5])]


def records_of(groups, r_env):
    """Records as genenv.py makes them: one generation each."""
    return [SimpleNamespace(prompt=p, response=rs[0], r_env=r) for (p, rs), r in zip(groups, r_env)]


def six_records():
    """Records, batches over all of them, and the KL sample: the generations themselves."""
    groups = random_groups(SHAPES)
    return records_of(groups, [1.0, 0.2, 0.9, 0.6, 0.1, 0.8]), groups


def update(policy, adapter, optimizer, records, batches, kl_sample, lam=1.0, grad_clip=1.0,
           **options):
    """rwr_update with the weights that genenv.py gives the records."""
    w = weights_rwr(torch.tensor([r.r_env for r in records]), None, lam) if records else torch.ones(0)
    texts = [Rollout(0, r.prompt, r.response) for r in records]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "GRAD_CLIP", grad_clip)
        return rwr_update(policy, adapter, optimizer, texts, w, batches, flat(kl_sample),
                          Options(**options))


# ---------------------------------------------------------------------------------------------
# the pure functions


@pytest.mark.parametrize("lam", [1e4, -1e4])
def test_weights_do_not_overflow(lam):
    """A sharp lam would give NaN instead of the best generation alone."""
    w = weights_rwr(torch.tensor([0.1, 1.0, 0.99]), None, lam)
    assert torch.isfinite(w).all() and float(w.mean()) == pytest.approx(1)
    assert w.tolist() == pytest.approx([0, 3, 0] if lam > 0 else [3, 0, 0])


def test_loss_is_imitation_of_records_and_kl_on_own_text():
    """A KL term on records would shrink the weights; a weight on own text would imitate it."""
    g = torch.Generator().manual_seed(0)
    logp, ref = -torch.rand(4, 3, generator=g), -torch.rand(4, 3, generator=g)
    mask = torch.arange(3) < torch.tensor([3, 1, 2, 3])[:, None]
    w, own = torch.tensor([2.0, 0.5, 0, 0]), torch.tensor([False, False, True, True])
    nll = -(2 * logp[0].sum() + 0.5 * logp[1, 0]) / 4
    d = (ref - logp)
    kl = ((d.exp() - 1 - d) * mask)[2:].sum() / 5
    loss = rwr_loss(logp, ref, mask, w, own, 4, 5, kl_coef=0.3)
    assert float(loss) == pytest.approx(float(nll + 0.3 * kl), rel=1e-5)


def test_weights_where_no_record_is_better_than_another():
    """0 / 0, or no imitation at all; test_wiring.py has the usual values of all three."""
    assert weights_linear(torch.tensor([0.5, 0.5]), None, 1.0).tolist() == [1, 1]
    alone = weights_advantage(torch.tensor([0.7, 0.4, 0.4]), torch.tensor([5, 9, 9]), 1.0)
    assert alone.tolist() == [0, 0, 0]
    assert len(record_weights("rwr", [], 1.0)) == 0
    assert float(weighted_nll(torch.ones(1, 2), torch.zeros(1, 2), torch.ones(1), 0)) == 0


# ---------------------------------------------------------------------------------------------
# mini-batches


@pytest.mark.parametrize("fresh", [1, 2, 5, 30, 48, 200])
def test_three_quarters_are_fresh_however_few_are_fresh(fresh):
    """With 5 fresh records of 64 three quarters of every step were stale."""
    for batch in draw_batches(fresh, [1.0] * 300, 6, 64, torch.Generator().manual_seed(0)):
        n = sum(i < fresh for i in batch)
        assert 4 * n >= 3 * len(batch) and n == min(fresh, 48)
        assert len(batch) - n == min(fresh // 3, 16) and len(set(batch)) == len(batch)


@pytest.mark.parametrize("fresh, batch", [(10, 8), (5, 4), (9, 5), (33, 32)])
def test_no_record_comes_twice_in_a_mini_batch_while_others_wait(fresh, batch):
    """A new round started in mid-batch could draw again who was in it already; a part of the fresh
    set would never be learned from."""
    for seed in range(20):
        batches = draw_batches(fresh, [], 9, batch, torch.Generator().manual_seed(seed))
        assert all(len(set(picks)) == len(picks) == min(fresh, batch) for picks in batches)
        assert sorted(sum(batches, [])[:fresh]) == list(range(fresh))


def test_aged_records_are_drawn_by_priority():
    """Old records would be drawn as often as new ones."""
    batches = draw_batches(3, [8.0, 1.0, 1.0], 2000, 4, torch.Generator().manual_seed(0))
    aged = [i for b in batches for i in b if i > 2]
    assert len(aged) == 2000 and aged.count(3) / 2000 == pytest.approx(0.8, abs=0.03)
    assert draw_batches(0, [1.0] * 20, 2, 32, torch.Generator()) == []  # nothing new: no step


@pytest.mark.parametrize("fresh, aged, sizes", [
    (0, [], []), (3, [], [3, 3]), (0, [1.0] * 20, []), (2, [1.0], [2, 2]),
    (3, [1.0] * 9, [4, 4])])
def test_small_sets_give_small_batches(fresh, aged, sizes):
    """Few records in the band would crash the update or be repeated within one step."""
    batches = draw_batches(fresh, aged, 2, 32, torch.Generator().manual_seed(0))
    assert [len(b) for b in batches] == sizes
    assert all(len(set(b)) == len(b) for b in batches)


# ---------------------------------------------------------------------------------------------
# the update


def test_gradient_is_that_of_the_weighted_imitation_loss():
    """Weights on the wrong record, a missing KL term, another normaliser: the plain way says so."""
    policy, (records, kl_sample), kl_coef, lam = tiny_policy(), six_records(), 0.3, 3.0
    clear(policy)
    stats = update(policy, "env", Frozen(), records, [[4, 0, 2, 1]], kl_sample, lam=lam,
                   temperature=0.7, env_kl=kl_coef, env_kl_cap=1e9, grad_clip=1e9)
    made = gradients(policy, "env")
    clear(policy)
    w = np.exp(lam * np.array([r.r_env for r in records]))
    w, nll, tokens, penalty, kl_tokens = w / w.mean(), 0, 0, 0, 0
    for i in (4, 0, 2, 1):
        with policy.use("env"):
            for a in naive_logps(policy, records[i].prompt, records[i].response, 0.7):
                nll = nll - float(w[i]) * a
        tokens += len(records[i].response)
    for prompt, (response,) in kl_sample[:4]:  # the penalty's turn of the KL sample: as many as the batch
        with policy.use(None), torch.no_grad():
            ref = naive_logps(policy, prompt, response, 0.7)
        with policy.use("env"):
            for a, b in zip(naive_logps(policy, prompt, response, 0.7), ref):
                penalty = penalty + (b - a).exp() - 1 + a - b
        kl_tokens += len(response)
    loss = nll / tokens + kl_coef * penalty / kl_tokens
    loss.backward()
    assert stats["env_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert close(made, gradients(policy, "env"), 1e-4)


def test_a_step_to_nan_never_passes_the_cap(monkeypatch):
    """nan > cap is false: a diverged simulator would be kept."""
    policy, (records, kl_sample) = tiny_policy(), six_records()
    before = weights(policy, "env")
    monkeypatch.setattr(rwr, "mean_kl", lambda a, b: float("nan"))
    stats = update(policy, "env", policy.optimizer("env", 1e-3), records, [[0, 1]], kl_sample)
    assert stats["env_capped"] == 1 and stats["env_steps"] == 0
    assert all(torch.equal(x, y) for x, y in zip(before, weights(policy, "env")))


def test_micro_batches_do_not_change_the_gradient():
    """Memory settings would change what the simulator learns."""
    policy, (records, kl_sample), results = tiny_policy(), six_records(), []
    for budget in (10_000, 14, 1):
        clear(policy)
        update(policy, "env", Frozen(), records, [list(range(6))], kl_sample, env_kl=0.2,
                   env_kl_cap=1e9, grad_clip=1e9, token_budget=budget, grad_checkpoint=budget == 14)
        results.append(gradients(policy, "env"))
    assert close(results[1], results[0]) and close(results[2], results[0])


def test_cap_undoes_the_step_that_crosses_it_bit_for_bit():
    """The cap would only be reported: parameters, momentum and step count must be as before."""
    records, kl_sample = six_records()
    batches = [[0, 1, 2], [3, 4, 5], [1, 3, 5], [0, 2, 4]] * 5

    def run(cap, n):
        policy = tiny_policy()
        optimizer = policy.optimizer("env", 3e-3)
        optimizer.param_groups[0]["weight_decay"] = 0.01
        stats = update(policy, "env", optimizer, records, batches[:n], kl_sample, env_kl_cap=cap)
        return stats, weights(policy, "env"), optimizer.state_dict()

    free, *_ = run(1e9, len(batches))
    assert free["env_capped"] == 0 and free["env_steps"] == len(batches)
    cap = free["env_kl_step"] / 4
    stats, params, state = run(cap, len(batches))
    taken = stats["env_steps"]
    assert stats["env_capped"] == 1 and 0 < taken < len(batches)
    assert 0 < stats["env_kl_step"] <= cap
    # the same update that was never asked for the crossing step
    expected, expected_params, expected_state = run(1e9, taken)
    assert same(params, expected_params)
    assert state["param_groups"] == expected_state["param_groups"]
    for mine, theirs in zip(state["state"].values(), expected_state["state"].values(), strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert {k: v for k, v in stats.items() if k != "env_capped"} == \
        {k: v for k, v in expected.items() if k != "env_capped"}


def test_a_first_step_across_the_cap_leaves_everything_as_it_was_and_training_goes_on():
    """The first step is the largest of Adam: it would slip through, or leave half a state; after it
    the optimiser would hold tensors of the undone step and move nothing, or something else."""
    policy, (records, kl_sample) = tiny_policy(), six_records()
    optimizer, before = policy.optimizer("env", 1.0), weights(policy, "env")
    stats = update(policy, "env", optimizer, records, [[0, 1], [2, 3]], kl_sample, env_kl_cap=0.01)
    assert stats["env_capped"] == 1 and stats["env_steps"] == 0 and stats["env_kl_step"] == 0
    assert same(weights(policy, "env"), before) and optimizer.state_dict()["state"] == {}
    optimizer.param_groups[0]["lr"] = 3e-3
    stats = update(policy, "env", optimizer, records, [[0, 1, 2]], kl_sample, env_kl_cap=1e9)
    assert stats["env_steps"] == 1 and not same(weights(policy, "env"), before)


def test_kl_to_the_initial_simulator_is_measured_with_adapters_off():
    """The reference would move with the simulator (as it does in the released code)."""
    policy, (records, kl_sample) = tiny_policy(live=False), six_records()
    optimizer = policy.optimizer("env", 3e-3)
    options = dict(env_kl_cap=1e9, env_kl=0.0)
    first = update(policy, "env", optimizer, records, [[0, 1, 2]] * 6, kl_sample, **options)
    assert first["env_kl"] == 0  # fresh adapters are the reference
    second = update(policy, "env", optimizer, records, [], kl_sample, **options)
    with policy.use("env"), torch.no_grad():
        now = scores(policy, kl_sample, 1.0, 10_000)
    with policy.use(None), torch.no_grad():
        initial = scores(policy, kl_sample, 1.0, 10_000)
    assert second["env_kl"] == pytest.approx(mean_kl(sum(now, []), sum(initial, [])), rel=1e-5) != 0
    assert second["env_steps"] == 0


def test_nothing_to_learn_from_is_a_no_op():
    """An empty band would crash the epoch or move the simulator on stale momentum."""
    policy, (records, kl_sample) = tiny_policy(), six_records()
    optimizer = policy.optimizer("env", 1e-2)
    update(policy, "env", optimizer, records, [[0, 1]], kl_sample, env_kl_cap=1e9)
    before = weights(policy, "env")
    for batches, measured in (([], kl_sample), ([], [])):
        stats = update(policy, "env", optimizer, [], batches, measured)
        assert stats["env_steps"] == 0 and math.isfinite(stats["env_kl"])
    assert same(weights(policy, "env"), before)


# ---------------------------------------------------------------------------------------------
# a toy categorical simulator


COUNTS = [20, 40, 13, 27, 7]  # what it writes in 107 generations, without sampling noise
INITIAL = torch.tensor(COUNTS, dtype=torch.float64).log()
R_ENV = [0.61, 1.0, 0.75, 0.97, 0.88]


def written(ids):
    """Records, and the KL sample, of generations of one token each."""
    records = [SimpleNamespace(prompt=[0], response=[k], r_env=R_ENV[k]) for k in ids]
    return records, [([0], [[k]]) for k in ids]


ALL = written([k for k, n in enumerate(COUNTS) for _ in range(n)])


@pytest.mark.parametrize("lam", [1.0, 6.0])
def test_rwr_on_a_categorical_simulator_finds_the_reweighted_distribution(lam):
    """The point of the whole update: pi <- pi_0 exp(lam R_env) / Z, here in closed form."""
    table, (records, kl_sample) = TablePolicy(INITIAL[None], "env"), ALL
    initial = table.probs()[0]
    optimizer = torch.optim.SGD(table.params["env"], lr=4.0)
    stats = update(table, "env", optimizer, records, [list(range(107))] * 60, kl_sample, lam=lam,
                       env_kl=0.0, env_kl_cap=1e9)
    target = initial * torch.exp(lam * torch.tensor(R_ENV, dtype=torch.float64))
    target = target / target.sum()
    torch.testing.assert_close(table.probs()[0], target, atol=1e-3, rtol=0)
    exact = float((initial * (initial / target).log()).sum())
    assert stats["env_kl_step"] == pytest.approx(exact, rel=0.02)  # KL(before || now)
