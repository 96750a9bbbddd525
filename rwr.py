"""Reward-weighted regression by hand: how the environment simulator learns to write tasks.

What of the paper this is: the environment half of the dual update of Algorithm 1. Generations whose
success rate fell into the band are imitated, each weighted by exp(lam * R_env) (R_env: Eq. 3),
under a KL penalty to the initial simulator and a cap on how far one update may move.

How it is run: genenv.py calls `rwr_update` once per epoch.

Where it differs on purpose: the paper gives neither the penalty's coefficient nor the cap's value.
Here the step that crosses the cap is undone and ends the update; penalty and cap are measured on
unfiltered generations of this epoch. A task has one record in an epoch, however often it was
written (data_pool.distinct): RWR would otherwise reinforce the simulator's most frequent outputs.
Do not use the estimator k1 here: the KL sample stays the same during an update, so from the second
step on k1 pushes the simulator away from its start. k2 and k3 hold it back.

How much the weights weigh: over all p_hat in [0, 1] the paper's lam = 1, beta = 2 give a largest
ratio of exp(1 - exp(-0.5)) = 1.48, but the filter comes first. Inside its band |p_hat - 0.5| <= 0.1
the ratio is at most exp(1 - exp(-0.02)) = 1.02, and with G = 8, where only 4/8 passes, it is 1:
there beta and lam do nothing; with our default band of 0.26 the ratio is at most 1.12. They matter
when the band is wide (--k-min 0.45 or 1) and the weights are sharp (--lam 6 --beta 8). The metric
`env_weight_ratio` is the measured ratio of an epoch.

Words: a record is a generation whose success rate has been measured, here one that passed the
filter; the KL sample is text of the simulator as it comes, unselected. Fresh records are of this
epoch, aged ones from D_env. Shapes: n records, m texts of the KL sample; a step has n + m texts, a
micro-batch N of them (rows of its tensors); R response tokens.
"""
import copy
from dataclasses import replace

import torch

from grpo import KL_ESTIMATOR, finite_step, response_logps, token_kl
from policy import split_groups

KL_SEEDS = 24  # the KL sample of an epoch: the texts written for so many seed tasks

# ---------------------------------------------------------------------------------------------
# pure functions: weights, the objective, mini-batches


def rwr_weights(r_env, lam: float):
    """R_env (n,) of n records -> their weights (n,): proportional to exp(lam * R_env), mean one.

    The maximum is subtracted first, so no lam overflows; mean one keeps the learning rate's
    meaning the same for every lam.
    """
    if not len(r_env):
        return r_env
    w = (lam * r_env - (lam * r_env).max()).exp()  # RWR: w ~ exp(lam * R_env)
    return w / w.mean()


def effective_sample_size(weights) -> float:
    """(sum w)^2 / sum w^2: how many equally weighted records would count as much as these."""
    return float(weights.sum() ** 2 / (weights ** 2).sum().clamp(min=1e-12))


def weight_ratio(weights) -> float:
    """Largest weight over smallest: 1 where R_env does not tell records apart; 0 where some weight
    is not above 0."""
    return float(weights.max() / weights.min()) if weights.min() > 0 else 0.0


def weighted_nll(logp, mask, weights, tokens: int):
    """Weighted negative log-likelihood of the responses, per token of the whole mini-batch.

    logp, mask (N, R); weights (N,). Prompt tokens are not in logp and so never trained on.
    """
    return -(weights[:, None] * logp * mask).sum() / max(tokens, 1)


def rwr_loss(logp, ref_logp, mask, weights, unselected, tokens, kl_tokens, *, kl_coef,
             kl_estimator=KL_ESTIMATOR):
    """The objective of one micro-batch: weighted imitation of records, KL on the KL sample.

    logp, ref_logp, mask (N, R). weights (N,): of the records, 0 in the other rows; unselected (N,)
    bool: rows of the KL sample. Records are selected for their success rate: a KL term on them
    would work against imitating them. tokens: of all records of the step; kl_tokens: of all its
    texts of the KL sample.
    """
    imitation = weighted_nll(logp, mask, weights, tokens)  # RWR: -sum w_i log pi_env(y_i | x_i)
    kl = token_kl(logp, ref_logp, kl_estimator) * (mask & unselected[:, None])
    return imitation + kl_coef * kl.sum() / max(kl_tokens, 1)  # KL to the initial simulator


def whole_passes(n_fresh, n_aged, passes, batch, generator):
    """Mini-batches of `passes` rounds over all records, fresh ones and those of D_env alike: lists
    of indices, at least `batch` in each. The fresh ones come first.

    An AdamW step on three records moves the simulator as far as one on three hundred. So the number
    of steps follows from the number of records. Fewer than `batch` in all passes make no step: they
    wait in D_env for more (some epochs). Old records count like fresh ones, without a limit.
    """
    n = n_fresh + n_aged
    if not n_fresh or passes * n < batch:
        return []
    order = torch.cat([torch.randperm(n, generator=generator) for _ in range(passes)])
    return [part.tolist() for part in order.tensor_split(len(order) // batch)]


# ---------------------------------------------------------------------------------------------
# the update


def rwr_update(policy, adapter, optimizer, records, weights, batches, kl_sample, o) -> dict:
    """Imitate weighted generations; stop, and undo the last step, where the KL cap is crossed.

    records: Rollouts; weights (n,), theirs; batches: lists of indices into them (whole_passes).
    kl_sample: Rollouts of this epoch, *unfiltered*, of the simulator as it was before this update.
    Both KL terms are measured on it: the penalty of a step on a part of it, the cap on all of it
    after every step. o: Options, of which temperature, env_kl, env_kl_cap and
    token_budget are read.
    Returns env_kl (to the initial simulator, nats per token, of the one that wrote kl_sample: as it
    was *before* this update), env_kl_step (how far this update moved), env_loss, env_steps,
    env_capped and env_skipped_steps (not finite).
    """
    stats = {"env_loss": 0.0, "env_steps": 0, "env_capped": 0, "env_skipped_steps": 0,
             "env_kl": 0.0, "env_kl_step": 0.0}
    if not kl_sample:
        return stats
    # log-probs of the sample under the initial simulator and under the one before this update
    with policy.use(None):
        initial = response_logps(policy, kl_sample, o)
    with policy.use(adapter):
        before = response_logps(policy, kl_sample, o)
        stats["env_kl"] = mean_kl(before, initial)
        for n, batch in enumerate(batches):
            # a step that crosses the cap is taken back
            saved = _snapshot(policy.params[adapter], optimizer)
            # the KL penalty of this step is on the next part of the sample, round and round
            size = min(len(batch), len(kl_sample)) if o.env_kl else 0
            part = [(n * len(batch) + i) % len(kl_sample) for i in range(size)]
            loss, _, finite = rwr_step(
                policy, adapter, optimizer, [records[i] for i in batch], weights[batch], o,
                [kl_sample[i] for i in part], [initial[i] for i in part])
            if not finite:
                stats["env_skipped_steps"] += 1
                continue
            # the cap bounds the update as a whole: KL(before || now), as E[k3] over before's text
            step_kl = mean_kl(before, response_logps(policy, kl_sample, o))
            if not step_kl <= o.env_kl_cap:  # also when it is NaN
                _restore(policy.params[adapter], optimizer, saved)
                stats["env_capped"] = 1
                break
            stats.update(env_loss=loss, env_kl_step=step_kl, env_steps=stats["env_steps"] + 1)
    return stats


def mean_kl(logps, ref_logps) -> float:
    """k3 estimate of KL(pi || ref), nats per token, on text that pi wrote. logps, ref_logps: the
    log-probs of each text under pi and under ref, as `response_logps` gives them."""
    return float(token_kl(torch.cat(logps), torch.cat(ref_logps), "k3").mean())


def rwr_step(policy, adapter, optimizer, records, weights, o, kl_texts=(), initial=()):
    """One optimiser step on rwr_loss -> (loss, gradient norm, whether both were finite; if not,
    nothing moved). With weights of 1 and no `kl_texts` it is plain imitation.

    records: n Rollouts, their weights (n,); kl_texts: m Rollouts of the KL sample, initial: their
    log-probs under the initial simulator. The adapter must be in use.
    """
    n, device = len(records), policy.params[adapter][0].device
    # each text is a group of its own, whatever group it came from: no prompt is shared
    texts = [replace(r, group=i) for i, r in enumerate([*records, *kl_texts])]
    # every text is divided by the same number of tokens, so that weights act on whole texts
    tokens, kl_tokens = sum(r.tokens for r in texts[:n]), sum(r.tokens for r in texts[n:])
    weight_of_text = torch.cat([weights, weights.new_zeros(len(kl_texts))]).to(device)  # (n + m,)
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=device)
    for rows in split_groups(texts, o.token_budget):  # N indices of texts
        logp, mask = policy.logprobs([texts[i] for i in rows], o.temperature, policy.device.type != "cpu")
        ref_logp = _filled([initial[i - n] if i >= n else None for i in rows], logp)   # (N, R)
        unselected = torch.tensor([i >= n for i in rows], device=device)               # (N,)
        loss = rwr_loss(  # RWR
            logp, ref_logp, mask, weight_of_text[rows].to(logp), unselected, tokens, kl_tokens,
            kl_coef=o.env_kl)
        loss.backward()
        total += loss.detach()
    norm, finite = finite_step(policy.params[adapter], optimizer, total)
    return float(total), norm, finite


def _filled(rows, logp):
    """Rows of (R_i,) tensors -> (N, R). A row of None, and the padding, become logp itself: the
    difference is 0 there, so that no exponential of it can overflow."""
    out = logp.detach().clone()
    for k, row in enumerate(rows):
        if row is not None:
            out[k, :len(row)] = row
    return out


def _snapshot(params, optimizer):
    """Copies of one adapter and of its optimiser's state, three fp32 numbers a weight: half a GB
    for 7B (run/memory.py). The base is not touched."""
    return [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())


def _restore(params, optimizer, saved):
    """Undo: put the copies of `_snapshot` back, bit for bit."""
    with torch.no_grad():
        for p, old in zip(params, saved[0]):
            p.copy_(old)
    optimizer.load_state_dict(saved[1])
