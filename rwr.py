"""Reward-weighted regression by hand: how the environment simulator learns to write tasks.

What of the paper this is: the environment half of the dual update of Algorithm 1. Generations whose
success rate fell into the band are imitated, each weighted by exp(lam * R_env) (R_env: Eq. 3),
under a KL penalty to the initial simulator and a cap on how far one update may move.

How it is run: genenv.py calls `rwr_update` once per epoch.

Where it differs on purpose: the paper gives neither the penalty's coefficient nor the cap's value;
here the step that crosses the cap is undone and ends the update, and both are taken on unfiltered
fresh generations. Each task counts once in an epoch (data_pool.distinct): RWR would otherwise
make ever likelier what is likely already. Of the estimators k1 is no penalty (grpo.token_kl).

How much the weights weigh: over all p_hat in [0, 1] the paper's lam = 1, beta = 2 give a largest
ratio of exp(1 - exp(-0.5)) = 1.48, but the filter comes first. Inside its band |p_hat - 0.5| <= 0.1
the ratio is at most exp(1 - exp(-0.02)) = 1.02, and with G = 8, where only 4/8 passes, it is 1:
there beta and lam do nothing. They matter without a filter (--k-min 1) and sharp (--lam 6 --beta
8); `env_weight_ratio` of each epoch's record has the measured ratio.

Two other updates stand beside it for comparison (--env-update): weights linear in R_env, and GRPO
with R_env as the reward of the variations of a seed task.

Words: a record is a generation whose success rate has been measured, selected by the filter; the
KL sample is text of the simulator as it comes, unselected. Shapes: n records, m texts of the KL
sample, N = n + m rows, R response tokens; r_env, weights (n,).
"""
import copy
import math

import torch

from grpo import finite_step, group_advantages, has_signal, score, subset, surrogate, token_kl
from policy import split_groups


# ---------------------------------------------------------------------------------------------
# pure functions: from R_env to weights, the objective, mini-batches


def rwr_weights(r_env, lam: float):
    """Weights proportional to exp(lam * R_env), mean one: r_env (n,) -> (n,).

    The maximum is subtracted first, so no lam overflows; mean one keeps the learning rate's
    meaning the same for every lam.
    """
    x = lam * r_env
    w = (x - x.max()).exp()  # RWR: w ~ exp(lam * R_env)
    return w / w.mean()


def linear_weights(r_env):
    """Weights linear in R_env, from 0 for the least to the most, mean one: r_env (n,) -> (n,).

    Where all are alike, all weigh 1.
    """
    w = r_env - r_env.min()
    return w / w.mean() if w.max() > 0 else torch.ones_like(r_env)


def grpo_weights(r_env, group):
    """Advantages of R_env among the variations of a seed task: r_env (n,), group (n,) -> (n,).

    0 for a variation without siblings, or whose siblings earn the same.
    """
    out = torch.zeros_like(r_env)
    for g in group.unique():
        members = (group == g).nonzero()[:, 0]
        rewards = r_env[None, members]  # (1, variations)
        if len(members) > 1 and has_signal(rewards):
            out[members] = group_advantages(rewards)[0]  # Eq. 4 with R_env for r
    return out


def effective_sample_size(weights) -> float:
    """(sum w)^2 / sum w^2: how many equally weighted generations the update amounts to."""
    return float(weights.sum() ** 2 / (weights ** 2).sum().clamp(min=1e-12))


def weight_ratio(weights) -> float:
    """Largest weight over smallest: 1 where R_env does not tell records apart."""
    return float(weights.max() / weights.min()) if weights.min() > 0 else 0.0


def weighted_nll(logp, mask, weights, tokens: int):
    """Weighted negative log-likelihood of the responses, per token of the whole mini-batch.

    logp, mask (n, R); weights (n,). Prompt tokens are not in logp and so never trained on.
    """
    return -(weights[:, None] * logp * mask).sum() / max(tokens, 1)


def rwr_loss(logp, ref_logp, mask, weights, unselected, tokens, unselected_tokens, *, kl_coef,
             kl_estimator="k3", old_logp=None, clip=0.2):
    """The objective of one micro-batch: weighted imitation of records, KL on the KL sample.

    logp, ref_logp, mask (N, R). weights (N,): of the records, 0 in the other rows; unselected (N,)
    bool: rows of the KL sample. On the records, which are selected for their success rate, a KL
    term would only shrink the weights. tokens, unselected_tokens: of all records and of all other
    texts of the whole step. old_logp, if given: the clipped surrogate of GRPO takes the place of
    the likelihood, weights being advantages.
    """
    if old_logp is None:
        imitation = weighted_nll(logp, mask, weights, tokens)  # RWR: -sum w_i log pi_env(y_i | x_i)
    else:
        imitation = (surrogate(logp, old_logp, weights, clip) * mask).sum() / max(tokens, 1)
    kl = token_kl(logp, ref_logp, kl_estimator) * (mask & unselected[:, None])
    return imitation + kl_coef * kl.sum() / max(unselected_tokens, 1)  # KL to the initial simulator


def draw_batches(n_fresh, aged_priority, n_batches, batch, fresh_share, generator):
    """Mini-batches over the fresh records and those of D_env: lists of indices.

    Indices 0 .. n_fresh-1 mean fresh records, the following ones aged records, drawn by priority.
    At least fresh_share of every mini-batch is fresh, however few fresh ones there are: then it is
    smaller. Fresh records are walked through in random order: none is met twice while others wait.
    """
    if not n_fresh:  # no step on old records alone: nothing new speaks for them
        return []
    # a bounded number of old records keeps earlier curricula alive in the simulator
    n_aged = min(len(aged_priority), batch - min(n_fresh, math.ceil(batch * fresh_share)))
    if fresh_share > 0:
        n_aged = min(n_aged, int(min(n_fresh, batch) * (1 - fresh_share) / fresh_share + 1e-9))
    waiting, batches = [], []
    for _ in range(n_batches):
        picks = []
        while len(picks) < min(n_fresh, batch - n_aged):
            if not waiting:  # a new round; who is in this mini-batch already comes last
                order = torch.randperm(n_fresh, generator=generator).tolist()
                waiting = [i for i in order if i in picks] + [i for i in order if i not in picks]
            picks.append(waiting.pop())
        if n_aged:
            ids = torch.multinomial(torch.tensor(aged_priority), n_aged, generator=generator)
            picks += (n_fresh + ids).tolist()
        batches.append(picks)
    return batches


def whole_passes(n_fresh, n_aged, passes, batch, generator):
    """Mini-batches of `passes` rounds over all records, fresh ones and those of D_env alike: lists
    of indices as in draw_batches, at least `batch` in each.

    An AdamW step on three records moves the simulator as far as one on three hundred. So the number
    of steps follows from the number of records; fewer than `batch` wait in D_env for more.
    """
    n = n_fresh + n_aged
    if not n_fresh or passes * n < batch:
        return []
    order = torch.cat([torch.randperm(n, generator=generator) for _ in range(passes)])
    return [part.tolist() for part in order.tensor_split(len(order) // batch)]


# ---------------------------------------------------------------------------------------------
# the update


def rwr_update(policy, adapter, optimizer, records, weights, batches, kl_sample, *, grpo=False,
               temperature=1.0, clip=0.2, kl_coef=0.02, kl_estimator="k3", kl_cap=0.5,
               grad_clip=1.0, token_budget=16384, grad_checkpoint=False) -> dict:
    """Imitate weighted generations; stop, and undo the last step, where the KL cap is crossed.

    records: generations with .prompt and .response (ids); weights (n,), theirs; batches: lists of
    indices into them (draw_batches). kl_sample: (prompt ids, [response ids]) of fresh generations,
    *unfiltered*, of the simulator as it was before this update. Both KL terms live on it: the
    penalty, a part of it in turn at every step, and the cap, measured on all of it after every
    step. grpo: weights are advantages, and the surrogate of GRPO is what is stepped on.
    Returns env_kl (to the initial simulator, nats per token, of the one that wrote kl_sample: as it
    was *before* this update), env_kl_step (how far this update moved), env_loss, env_steps,
    env_capped and env_skipped_steps (not finite).
    """
    fixed = dict(temperature=temperature, token_budget=token_budget)
    stats = {"env_loss": 0.0, "env_steps": 0, "env_capped": 0, "env_skipped_steps": 0,
             "env_kl": 0.0, "env_kl_step": 0.0}
    if not kl_sample:
        return stats
    # what its authors, initial and present, say of the sample: neither changes during the update
    with policy.use(None):
        initial = score(policy, kl_sample, **fixed)
    with policy.use(adapter):
        before = score(policy, kl_sample, **fixed)
        stats["env_kl"] = mean_kl(before, initial)
        groups = [(r.prompt, [r.response]) for r in records]
        old = score(policy, groups, **fixed) if grpo and batches else None
        for n, batch in enumerate(batches):
            # a step may turn out to be one too many: keep what is needed to take it back
            saved = _snapshot(policy.params[adapter], optimizer)
            size = min(len(batch), len(kl_sample)) if kl_coef else 0
            part = [(n * len(batch) + i) % len(kl_sample) for i in range(size)]  # of the KL sample
            loss, finite = _rwr_step(
                policy, policy.params[adapter], optimizer,
                [groups[i] for i in batch] + [kl_sample[i] for i in part], weights[batch],
                [initial[i] for i in part], [old[i] for i in batch] if grpo else None,
                dict(kl_coef=kl_coef, kl_estimator=kl_estimator, clip=clip), grad_clip,
                grad_checkpoint, fixed)
            if not finite:
                stats["env_skipped_steps"] += 1
                continue
            # the cap bounds the update as a whole: KL(before || now), as E[k3] over before's text
            step_kl = mean_kl(before, score(policy, kl_sample, **fixed))
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


def _rwr_step(policy, params, optimizer, groups, weights, initial, old, loss_options, grad_clip,
              grad_checkpoint, fixed):
    """One optimiser step on rwr_loss -> (loss, whether it was finite; if not, nothing moved).

    groups: n records, then m of the KL sample, each as (context ids, [generation ids]); weights
    (n,); initial: the initial simulator's log-probs of these m; old: of the records, for GRPO.
    """
    n, device = len(weights), params[0].device
    lengths = [len(responses[0]) for _, responses in groups]
    # one constant per-token denominator keeps it the sequence-level gradient
    tokens, unselected_tokens = sum(lengths[:n]), sum(lengths[n:])
    weights = torch.cat([weights, torch.zeros(len(groups) - n)]).to(device)
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=device)
    for batch in split_groups(groups, fixed["token_budget"]):
        members = [i for i, _ in batch]  # one response per group: row k is groups[members[k]]
        logp, mask = policy.logprobs(subset(groups, batch), fixed["temperature"], grad_checkpoint)
        ref_logp = _filled([initial[i - n][0] if i >= n else None for i in members], logp)
        old_logp = _filled([old[i][0] if i < n else None for i in members], logp) if old else None
        unselected = torch.tensor([i >= n for i in members], device=device)
        loss = rwr_loss(logp, ref_logp, mask, weights[members].to(logp), unselected, tokens,
                        unselected_tokens, old_logp=old_logp, **loss_options)
        loss.backward()
        total += loss.detach()
    _, finite = finite_step(params, optimizer, grad_clip, total)
    return float(total), finite


def _filled(rows, logp):
    """Rows of (R_i,) tensors -> (N, R); a row of None, and padding, are logp itself: no difference
    is left there, and none of its exponentials can overflow."""
    out = logp.detach().clone()
    for k, row in enumerate(rows):
        if row is not None:
            out[k, :len(row)] = row
    return out


def _snapshot(params, optimizer):
    """Copies of one adapter and of its optimiser's state: a few MB, the base is not touched."""
    return [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())


def _restore(params, optimizer, saved):
    """Undo: put the copies of `_snapshot` back, bit for bit."""
    with torch.no_grad():
        for p, old in zip(params, saved[0]):
            p.copy_(old)
    optimizer.load_state_dict(saved[1])
