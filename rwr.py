"""Train the environment simulator to write tasks: reward-weighted regression (RWR) by hand.

Paper: the environment's half of the dual update in Algorithm 1. The simulator imitates those of its
generations whose success rate p_hat is in the band |p_hat - alpha| <= k_min. Each is weighted by
exp(lam * R_env), where lam is the paper's lambda and R_env is Eq. 3. A KL penalty keeps the
simulator near its initial state, and a cap limits how far one update may move it.

Usage: genenv.py calls `rwr_update` once per epoch, with a KL sample from `draw_kl_sample`.

Deviations: the paper gives neither the coefficient of the penalty nor the value of the cap, and it
applies the cap to each step. Here the cap applies to the whole update of an epoch: the step that
crosses it is undone, and the update ends. The KL for both is measured on unfiltered generations of
this epoch. An update uses one record per task, however often the task was written
(data_pool.distinct). If grpo.KL_ESTIMATOR is k1, the penalty uses k3 instead: the gradient of k1,
grad log pi, averages to zero only over text that pi itself wrote. Since the KL sample stays the
same during an update, k1 would just lower the log-prob of its texts from the second step on.

How strong the weights are: over all p_hat in [0, 1], the largest weight with the paper's lam = 1
and beta = 2 is exp(1 - exp(-0.5)) = 1.48 times the smallest. But the filter comes first. Inside the
paper's band |p_hat - 0.5| <= 0.1 this ratio is at most exp(1 - exp(-0.02)) = 1.02. With G = 8 only
4/8 passes, so the ratio is 1, and beta and lam have no effect. Our default k_min of 0.26 lets 2/8
to 6/8 pass, and the ratio is at most 1.12. beta and lam matter when the band is wide (--k-min 0.45
or 1) and the weights are sharp (--lam 6 --beta 8). The metric `env_weight_ratio` is the ratio
measured in an epoch.

Terms: a record is a generation whose task the agent has attempted. Here it has also passed the
filter. Fresh records are those of this epoch, old ones those of D_env. The KL sample is part of
what the simulator wrote in this epoch, valid or not. Shapes: n records, N texts in a micro-batch,
one per row of its tensors, R response tokens.
"""
import copy

import torch

from grpo import KL_ESTIMATOR, finite_step, pad_rows, response_logps, score_in_parts, token_kl
from model.packing import by_prompt
from policy import Rollout

# the penalty's KL estimator: that of grpo.py, but never k1 (see Deviations)
PENALTY = "k3" if KL_ESTIMATOR == "k1" else KL_ESTIMATOR
KL_SEEDS = 24  # the KL sample consists of all texts written for this many seed tasks
# In nats per token; the paper gives no value. An update in a world with its own tiny model moves
# the simulator by about 0.01. So the cap stops only a step after which hardly any of the
# simulator's texts would be tasks. Over many updates, the penalty (--env-kl) is what holds it back.
KL_CAP = 0.5

# ---------------------------------------------------------------------------------------------
# weights, mini-batches, the KL sample


def rwr_weights(r_env, lam: float):
    """Return the weights of n records, proportional to exp(lam * R_env): (n,) -> (n,).

    They are scaled to a mean of 1, so that lam does not change the effective learning rate. The
    largest R_env is subtracted first, so that the exponential cannot overflow.
    """
    w = (lam * (r_env - r_env.max())).exp()  # RWR: w ~ exp(lam * R_env)
    return w / w.mean()


def weight_ratio(weights) -> float:
    """Return the largest weight divided by the smallest: 1 if all records have the same R_env."""
    return float(weights.max() / weights.min().clamp(min=1e-12))


def whole_passes(n: int, passes: int, batch: int, generator) -> list:
    """Divide `passes` passes over n shuffled records into mini-batches; return their indices.

    Every mini-batch has at least `batch` records: an AdamW step on three records would move the
    simulator as far as one on three hundred. So the number of steps follows from the number of
    records. If all passes together have fewer than `batch`, no step is taken, and the records stay
    in D_env. A mini-batch may hold a record more than once: where two passes meet, or if n < batch.
    """
    if passes * n < batch:
        return []
    order = torch.cat([torch.randperm(n, generator=generator) for _ in range(passes)])
    return [part.tolist() for part in order.tensor_split(len(order) // batch)]


def draw_kl_sample(texts, generator) -> list:
    """Return all texts that were written for KL_SEEDS randomly drawn seed tasks.

    texts: Rollouts of an epoch. Those written together for one seed task share a group number.
    """
    groups = list(dict.fromkeys(r.group for r in texts))
    order = torch.randperm(len(groups), generator=generator)[:KL_SEEDS].tolist()
    chosen = {groups[i] for i in order}
    return [r for r in texts if r.group in chosen]


# ---------------------------------------------------------------------------------------------
# the update


def rwr_update(policy, adapter, optimizer, fresh, old, kl_sample, o, generator=None,
               cap=KL_CAP) -> dict:
    """Imitate weighted records, and return statistics of the update.

    If a step crosses the KL cap, it is undone and the update ends.

    fresh, old: EnvRecords in the band, of this epoch and of earlier ones; prompt, response and
    r_env are read. kl_sample: *unfiltered* Rollouts of this epoch, written by the simulator as it
    was before this update. Both KL terms are measured on it: the penalty in each step on a random
    part, the cap after each step on all of it. o: Options, of which temperature, lam, env_passes,
    env_batch, env_kl and token_budget are read. generator: makes all random choices. cap: the
    largest KL, in nats per token, by which the update may move the simulator.

    The statistics are env_kl (to the initial simulator, before this update) and env_kl_step (how
    far the whole update moved it, not one optimiser step), both in nats per token; env_steps (how
    many were taken); env_capped (1 if the cap ended the update, else 0); env_skipped_steps (those
    that were not finite); env_weight_ratio (largest weight over smallest); env_imitated (indices
    into fresh + old of the records that the steps used). What was not measured is None.
    """
    stats = {
        "env_kl": None,
        "env_kl_step": None,
        "env_steps": 0,
        "env_capped": 0,
        "env_skipped_steps": 0,
        "env_weight_ratio": None,
        "env_imitated": [],
    }
    if not kl_sample:
        return stats
    # Texts that share a long prompt become one group, so that it is encoded once. This changes
    # their order, which does not matter.
    kl_sample, _ = by_prompt(kl_sample)
    records = [*fresh, *old]
    texts = [Rollout(i, r.prompt, r.response) for i, r in enumerate(records)]
    # Never train on old records only: their success rates are those of an earlier agent.
    batches = []
    if fresh:
        batches = whole_passes(len(records), o.env_passes, o.env_batch, generator)
    if batches:
        weights = rwr_weights(torch.tensor([r.r_env for r in records]), o.lam)  # (n,)
        stats["env_weight_ratio"] = weight_ratio(weights)
    with policy.use(None):
        initial = response_logps(policy, kl_sample, o)
    with policy.use(adapter):
        before = response_logps(policy, kl_sample, o)
        stats["env_kl"] = mean_kl(before, initial)
        imitated = set()  # indices of the records in the steps that were taken
        for batch in batches:
            # keep a copy, so that this step can be undone if it crosses the cap
            saved = _snapshot(policy.params[adapter], optimizer)
            # The penalty uses as many texts as the step has records, so it costs about as much as
            # the imitation. Each step draws its own texts.
            size = len(batch) if o.env_kl else 0
            part = sorted(torch.randperm(len(kl_sample), generator=generator)[:size].tolist())
            _, finite = rwr_step(
                policy, adapter, optimizer, [texts[i] for i in batch], weights[batch], o,
                [kl_sample[i] for i in part], [initial[i] for i in part])
            if not finite:
                stats["env_skipped_steps"] += 1
                continue
            # The cap bounds KL(before || now), where "before" is the simulator before this update.
            # It wrote the KL sample, so the mean of k3 over that sample estimates this KL.
            moved = mean_kl(before, response_logps(policy, kl_sample, o))
            if not moved <= cap:  # true of NaN as well
                _restore(policy.params[adapter], optimizer, saved)
                stats["env_capped"] = 1
                break
            stats["env_kl_step"] = moved
            stats["env_steps"] += 1
            imitated.update(batch)
    stats["env_imitated"] = sorted(imitated)
    return stats


def rwr_step(policy, adapter, optimizer, records, weights, o, kl_texts=(), initial=()):
    """Take one optimiser step: imitate weighted records, with the KL penalty on kl_texts.

    records: n Rollouts; weights (n,): their weights; kl_texts: Rollouts of the KL sample; initial:
    the log-probs of kl_texts under the initial simulator. The adapter must be active. Return (loss,
    whether the step was taken); a step that is not finite changes nothing.

    The penalty is not measured on the records: they were selected for their success rate, and a
    penalty on them would work against imitating them. All log-probs are at the sampling
    temperature. A long prompt that several records share is encoded once. With weights of 1 and no
    kl_texts this is plain imitation.
    """
    records, order = by_prompt(records)
    weights = weights[order]  # (n,)
    loss_of_step = torch.zeros((), device=policy.params[adapter][0].device)
    optimizer.zero_grad(set_to_none=True)
    # The losses of all texts are divided by the same number of tokens, so a weight multiplies the
    # log-likelihood of its whole text. The weights have mean 1 over all records of the update, not
    # over those of this step.
    tokens = sum(r.tokens for r in records)
    for micro, logp, mask in score_in_parts(policy, records, o):  # indices, (N, R), (N, R)
        w = weights[micro].to(logp)[:, None]                      # (N, 1)
        loss = -(w * logp * mask).sum() / tokens  # RWR: -sum w_i log pi_env(y_i | x_i)
        loss.backward()
        loss_of_step += loss.detach()
    kl_tokens = sum(r.tokens for r in kl_texts)
    for micro, logp, mask in score_in_parts(policy, kl_texts, o):
        ref_logp = pad_rows([initial[i] for i in micro])          # (N, R)
        kl = token_kl(logp, ref_logp, PENALTY) * mask  # KL to the initial simulator
        loss = o.env_kl * kl.sum() / kl_tokens
        loss.backward()
        loss_of_step += loss.detach()
    _, finite = finite_step(policy.params[adapter], optimizer, float(loss_of_step))
    return float(loss_of_step), finite


def mean_kl(logps, ref_logps) -> float:
    """Estimate KL(pi || ref) by k3, in nats per token, on texts that pi wrote.

    logps, ref_logps: log-probs of these texts under pi and under ref, from `response_logps`.
    """
    return float(token_kl(torch.cat(logps), torch.cat(ref_logps), "k3").mean())


def _snapshot(params, optimizer):
    """Copy the weights of one adapter and the state of its optimiser.

    These are three fp32 numbers per parameter of the adapter: half a GB at 7B (model/memory.py).
    """
    return [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())


def _restore(params, optimizer, saved):
    """Put back what `_snapshot` copied, bit for bit."""
    with torch.no_grad():
        for p, old in zip(params, saved[0]):
            p.copy_(old)
    optimizer.load_state_dict(saved[1])
