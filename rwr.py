"""Reward-weighted regression by hand: how the environment simulator learns to write tasks.

What of the paper this is: the environment half of the dual update of Algorithm 1. Generations whose
success rate fell into the band are imitated, each weighted by exp(lam * R_env) (R_env: Eq. 3),
under a KL penalty to the initial simulator and a cap on how far one update may move.

How it is run: genenv.py calls `rwr_update` once per epoch.

Where it differs on purpose: the paper gives neither the penalty's coefficient nor the cap's value;
here the cap is a real one, the step that crosses it is undone, and both are taken on unfiltered
fresh generations. Duplicates within a step were dropped before (genenv.write_tasks): RWR would
otherwise imitate the simulator's mode. Of the estimators k1 is no penalty (grpo.token_kl). Note
how mild the weights are: with the paper's lam = 1, beta = 2 the largest possible ratio of two
weights is exp(1 - exp(-0.5)) = 1.48, so nearly all selection is done by the k_min filter.

Shapes: n generations, (n, R) response tokens; r_env (n,), weights (n,).
"""
import copy

import torch

from grpo import pad_rows, score, subset, token_kl
from policy import split_groups


def rwr_weights(r_env, lam: float):
    """Weights proportional to exp(lam * R_env), mean one: r_env (n,) -> (n,).

    The maximum is subtracted first, so no lam overflows; mean one keeps the learning rate's
    meaning the same for every lam.
    """
    x = lam * r_env
    w = (x - x.max()).exp()  # RWR: w ~ exp(lam * R_env)
    return w / w.mean()


def effective_sample_size(weights) -> float:
    """(sum w)^2 / sum w^2: how many equally weighted generations the update amounts to."""
    return float(weights.sum() ** 2 / (weights ** 2).sum())


def weighted_nll(logp, mask, weights, tokens: int):
    """Weighted negative log-likelihood of the responses, per token of the whole mini-batch.

    logp, mask (n, R); weights (n,). Prompt tokens are not in logp and so never trained on.
    """
    return -(weights[:, None] * logp * mask).sum() / max(tokens, 1)


def draw_batches(n_fresh, aged_priority, n_batches, batch, fresh_share, generator):
    """Mini-batches over the fresh records and those of D_env: lists of indices.

    Indices 0 .. n_fresh-1 mean fresh records, the following ones aged records, drawn by priority.
    The fresh set is shuffled and walked through: all are met before any is met twice.
    """
    # a fixed number of old records keeps earlier curricula alive in the simulator
    deck, batches = [], []
    n_aged = min(len(aged_priority), round(batch * (1 - fresh_share)))
    for _ in range(n_batches if n_fresh + n_aged else 0):
        picks = []
        while len(picks) < min(n_fresh, batch - n_aged):
            deck = deck or torch.randperm(n_fresh, generator=generator).tolist()
            picks.append(deck.pop())
        if n_aged:
            ids = torch.multinomial(torch.tensor(aged_priority), n_aged, generator=generator)
            picks += (n_fresh + ids).tolist()
        batches.append(picks)
    return batches


def rwr_update(policy, adapter, optimizer, records, batches, probe, *, lam=1.0, temperature=1.0,
               kl_coef=0.02, kl_estimator="k3", kl_cap=0.5, grad_clip=1.0, token_budget=16384,
               grad_checkpoint=False) -> dict:
    """Imitate weighted generations; stop, and undo the last step, where the KL cap is crossed.

    records: generations with .prompt, .response (ids) and .r_env; batches: lists of indices into
    them (draw_batches). probe: (prompt ids, [response ids]) of fresh generations, *unfiltered*, of
    the simulator as it was before this update. Both KL terms live on the probe: the penalty, a part
    of it in turn at every step, and the cap, measured on all of it after every step.
    Returns env_kl (of the simulator that wrote the probe, to the initial one, nats per token),
    env_kl_step (how far this update moved), env_ess (of the records drawn from), env_loss,
    env_steps and env_capped.
    """
    fixed = dict(temperature=temperature, token_budget=token_budget)
    stats = {"env_loss": 0.0, "env_ess": 0.0, "env_steps": 0, "env_capped": 0,
             "env_kl": 0.0, "env_kl_step": 0.0}
    if not probe:
        return stats
    # what the probe's authors, initial and present, say of it: neither changes during the update
    with policy.use(None):
        initial = score(policy, probe, **fixed)
    with policy.use(adapter):
        before = score(policy, probe, **fixed)
        stats["env_kl"] = mean_kl(before, initial)
        if not batches:
            return stats
        # weights over the whole set at once, so that a mini-batch of good records stays a good one
        weights = rwr_weights(torch.tensor([r.r_env for r in records]), lam)
        stats["env_ess"] = effective_sample_size(weights)
        for n, batch in enumerate(batches):
            # a step may turn out to be one too many: keep what is needed to take it back
            saved = _snapshot(policy.params[adapter], optimizer)
            turn = [(n * len(batch) + i) % len(probe) for i in range(min(len(batch), len(probe)))]
            loss = _rwr_step(policy, policy.params[adapter], optimizer, weights[batch],
                             [(records[i].prompt, [records[i].response]) for i in batch],
                             [probe[i] for i in turn], [initial[i] for i in turn],
                             kl_coef, kl_estimator, grad_clip, grad_checkpoint, fixed)
            # the cap bounds the update as a whole: KL(before || now), as E[k3] over before's text
            step_kl = mean_kl(before, score(policy, probe, **fixed))
            if not step_kl <= kl_cap:  # also when it is NaN
                _restore(policy.params[adapter], optimizer, saved)
                stats["env_capped"] = 1
                break
            stats.update(env_loss=loss, env_kl_step=step_kl, env_steps=stats["env_steps"] + 1)
    return stats


def mean_kl(logps, others) -> float:
    """k3 estimate of KL(pi || other), nats per token, on text that pi wrote (as scored by both)."""
    a = torch.cat([row for rows in logps for row in rows])
    b = torch.cat([row for rows in others for row in rows])
    return float(token_kl(a, b, "k3").mean())


def _rwr_step(policy, params, optimizer, weights, groups, kl_groups, kl_ref, kl_coef, kl_estimator,
              grad_clip, grad_checkpoint, fixed):
    """One step up sum_i w_i log pi_env(y_i | x_i) - kl_coef * token_kl on the probe (what that is
    as a loss is said at grpo.token_kl).

    groups: n records as (context ids, [generation ids]), weights (n,); kl_groups and kl_ref: a part
    of the probe and the initial simulator's log-probs of it. Returns the loss.
    """
    optimizer.zero_grad(set_to_none=True)
    total, budget, T = 0.0, fixed["token_budget"], fixed["temperature"]
    # imitation: one constant per-token denominator keeps it the sequence-level RWR gradient
    tokens = sum(len(r) for _, rs in groups for r in rs)
    for batch in split_groups(groups, budget):
        members = [i for i, _ in batch]  # one response per group: row n is record members[n]
        logp, mask = policy.logprobs(subset(groups, batch), T, grad_checkpoint)
        loss = weighted_nll(logp, mask, weights[members].to(logp), tokens)
        loss.backward()
        total += float(loss.detach())
    # penalty: on the simulator's own text. On the imitated records, which are selected for their
    # success rate, the same term would only shrink the weights
    tokens = sum(len(r) for _, rs in kl_groups for r in rs)
    for batch in split_groups(kl_groups, budget) if kl_coef else ():
        logp, mask = policy.logprobs(subset(kl_groups, batch), T, grad_checkpoint)
        ref_logp = pad_rows([kl_ref[i][j] for i, members in batch for j in members])
        loss = kl_coef * (token_kl(logp, ref_logp, kl_estimator) * mask).sum() / tokens
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(params, grad_clip)
    optimizer.step()
    return total


def _snapshot(params, optimizer):
    """Copies of one adapter and of its optimiser's state: a few MB, the base is not touched."""
    return [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())


def _restore(params, optimizer, saved):
    """Undo: put the copies of `_snapshot` back, bit for bit."""
    with torch.no_grad():
        for p, old in zip(params, saved[0]):
            p.copy_(old)
    optimizer.load_state_dict(saved[1])
