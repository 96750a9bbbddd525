"""Train the environment simulator to write tasks: reward-weighted regression (RWR) by hand.

Paper: the environment half of the dual update in Algorithm 1. Generations whose success rate fell
into the band are imitated, each weighted by exp(lam * R_env) (lam: the paper's lambda; R_env: Eq.
3), under a KL penalty to the initial simulator and a cap on how far one update may move.

Usage: genenv.py calls `rwr_update` once per epoch, on a sample drawn by `draw_kl_sample`.

Deviations: the paper gives neither the coefficient of the penalty nor the value of the cap, which
it applies to each step. Here the cap applies to the whole update of an epoch: the step that crosses
it is undone and ends the update. Penalty and cap are measured on unfiltered generations of this
epoch. A task has one record in an epoch, however often it was written (data_pool.distinct). The KL
estimator k1 (grpo.token_kl) is replaced by k3 here: the gradient of k1, grad log pi, averages to
zero only over text that pi itself wrote. The KL sample stays the same during an update, so from the
second step on k1 would just lower the log-prob of those texts.

How strong the weights are: over all p_hat in [0, 1] the paper's lam = 1, beta = 2 give a largest
ratio of exp(1 - exp(-0.5)) = 1.48, but the filter comes first. Inside its band |p_hat - 0.5| <= 0.1
the ratio is at most exp(1 - exp(-0.02)) = 1.02. With G = 8, where only 4/8 passes, it is 1, so beta
and lam have no effect. With our default k_min of 0.26, which lets 2/8 to 6/8 pass, the ratio is at
most 1.12. beta and lam matter when the band is wide (--k-min 0.45 or 1) and the weights are sharp
(--lam 6 --beta 8). The metric `env_weight_ratio` is the measured ratio of an epoch.

Words: a record is a generation whose success rate has been measured, here one that passed the
filter; fresh records are of this epoch, old ones from D_env. The KL sample is part of what the
simulator wrote in this epoch, valid or not. Shapes: n records, m texts of the KL sample, N texts
of a micro-batch (rows of its tensors), R response tokens.
"""
import copy

import torch

from grpo import KL_ESTIMATOR, finite_step, pad_rows, response_logps, score_in_parts, token_kl
from model.packing import by_prompt
from policy import Rollout

# the estimator of the penalty: grpo.py's, but never k1 (see Deviations)
PENALTY = "k3" if KL_ESTIMATOR == "k1" else KL_ESTIMATOR
KL_SEEDS = 24  # the KL sample of an epoch: all texts written for this many seed tasks
# In nats per token; the paper gives no value. Updates in the embedded worlds move about 0.01. The
# cap stops only a step that would take the simulator out of the language of tasks; over many
# updates it is --env-kl that holds the simulator back.
KL_CAP = 0.5

# ---------------------------------------------------------------------------------------------
# weights, mini-batches, the KL sample


def rwr_weights(r_env, lam: float):
    """Return the weights of n records, R_env (n,) -> (n,), proportional to exp(lam * R_env).

    Their mean is one, so that the learning rate means the same for every lam. The maximum is
    subtracted first, so that no lam overflows.
    """
    w = (lam * (r_env - r_env.max())).exp()  # RWR: w ~ exp(lam * R_env)
    return w / w.mean()


def weight_ratio(weights) -> float:
    """Return the largest weight over the smallest: 1 if R_env does not tell records apart."""
    return float(weights.max() / weights.min().clamp(min=1e-12))


def whole_passes(n: int, passes: int, batch: int, generator) -> list:
    """Plan `passes` passes over n shuffled records: mini-batches of at least `batch` indices.

    An AdamW step on three records moves the simulator as far as one on three hundred, so the number
    of steps follows from the number of records. A mini-batch may hold a record more than once:
    where two passes meet, or if n < batch. If all passes together have fewer than `batch` records,
    no step is taken and the records stay in D_env.
    """
    if passes * n < batch:
        return []
    order = torch.cat([torch.randperm(n, generator=generator) for _ in range(passes)])
    return [part.tolist() for part in order.tensor_split(len(order) // batch)]


def draw_kl_sample(texts, generator) -> list:
    """Draw all texts written for KL_SEEDS random seed tasks.

    texts: Rollouts of an epoch; those written for one seed task in one step share a group number.
    """
    groups = list(dict.fromkeys(r.group for r in texts))
    order = torch.randperm(len(groups), generator=generator)[:KL_SEEDS].tolist()
    chosen = {groups[i] for i in order}
    return [r for r in texts if r.group in chosen]


# ---------------------------------------------------------------------------------------------
# the update


def rwr_update(policy, adapter, optimizer, fresh, old, kl_sample, o, generator=None,
               cap=KL_CAP) -> dict:
    """Imitate weighted records. If the KL cap is crossed, undo the last step and stop.

    fresh, old: EnvRecords inside the band, of this epoch and of earlier ones (prompt, response and
    r_env are read). kl_sample: Rollouts of this epoch, *unfiltered*, written by the simulator as it
    was before this update. Both KL terms are measured on it: the penalty of a step on a random part
    of it, the cap on all of it after every step. o: Options (temperature, lam, env_passes,
    env_batch, env_kl and token_budget are read). generator: makes all random choices. cap: the
    largest KL that the update may reach, in nats per token.

    Return env_kl (to the initial simulator, measured before this update) and env_kl_step (how far
    this update moved), both in nats per token; env_loss (of the last step); env_steps; env_capped;
    env_skipped_steps (not finite); env_weight_ratio (largest weight over smallest); env_imitated
    (indices into fresh + old of the records that were imitated). What was not measured is None.
    """
    stats = {
        "env_kl": None,
        "env_kl_step": None,
        "env_loss": None,
        "env_steps": 0,
        "env_capped": 0,
        "env_skipped_steps": 0,
        "env_weight_ratio": None,
        "env_imitated": [],
    }
    if not kl_sample:
        return stats
    # Equal prompts become one group, so that a long one is encoded once. The order does not matter.
    kl_sample, _ = by_prompt(kl_sample)
    records = [Rollout(i, r.prompt, r.response) for i, r in enumerate([*fresh, *old])]
    # Never train on old records only: their success rates are from a weaker agent.
    batches = []
    if fresh:
        batches = whole_passes(len(records), o.env_passes, o.env_batch, generator)
    if batches:
        weights = rwr_weights(torch.tensor([r.r_env for r in [*fresh, *old]]), o.lam)  # (n,)
        stats["env_weight_ratio"] = weight_ratio(weights)
    with policy.use(None):
        initial = response_logps(policy, kl_sample, o)
    with policy.use(adapter):
        before = response_logps(policy, kl_sample, o)
        stats["env_kl"] = mean_kl(before, initial)
        imitated = set()  # records of the steps that were taken
        for batch in batches:
            # to undo this step if it crosses the cap
            saved = _snapshot(policy.params[adapter], optimizer)
            # The penalty uses as many texts as the step has records, so it costs about as much.
            # Each step makes a new draw.
            size = len(batch) if o.env_kl else 0
            part = sorted(torch.randperm(len(kl_sample), generator=generator)[:size].tolist())
            loss, finite = rwr_step(
                policy, adapter, optimizer, [records[i] for i in batch], weights[batch], o,
                [kl_sample[i] for i in part], [initial[i] for i in part])
            if not finite:
                stats["env_skipped_steps"] += 1
                continue
            # The cap bounds the update as a whole: KL(before || now), the mean of k3 over text
            # that the simulator wrote before it.
            step_kl = mean_kl(before, response_logps(policy, kl_sample, o))
            if not step_kl <= cap:  # also when it is NaN
                _restore(policy.params[adapter], optimizer, saved)
                stats["env_capped"] = 1
                break
            stats.update(env_loss=loss, env_kl_step=step_kl, env_steps=stats["env_steps"] + 1)
            imitated.update(batch)
    stats["env_imitated"] = sorted(imitated)
    return stats


def rwr_step(policy, adapter, optimizer, records, weights, o, kl_texts=(), initial=()):
    """Take one optimiser step: imitate weighted records, with the KL penalty on kl_texts.

    records: n Rollouts; weights (n,): their weights; kl_texts: Rollouts of the KL sample; initial:
    the log-probs of kl_texts under the initial simulator. A long prompt that records share is
    encoded once. The penalty is not measured on the records: they were selected for their success
    rate, and a penalty on them would work against imitating them. All log-probs are at the sampling
    temperature. With weights of 1 and no kl_texts this is plain imitation. The adapter must be
    active. Return (loss, whether the step was finite; if not, nothing moved).
    """
    records, order = by_prompt(records)
    weights = weights[order]  # (n,)
    loss_of_step = torch.zeros((), device=policy.params[adapter][0].device)
    optimizer.zero_grad(set_to_none=True)
    # The losses of all texts are divided by the same number of tokens, so a weight multiplies the
    # log-likelihood of its whole text. Weights have mean 1 over all n records of the update, not
    # over this batch.
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
    """Estimate KL(pi || ref) by k3, in nats per token, on text that pi wrote.

    logps, ref_logps: the log-probs of each text under pi and under ref, as `response_logps`
    returns them.
    """
    return float(token_kl(torch.cat(logps), torch.cat(ref_logps), "k3").mean())


def _snapshot(params, optimizer):
    """Copy one adapter and its optimiser's state, but not the base.

    These are three fp32 numbers per parameter of the adapter: half a GB for 7B (model/memory.py).
    """
    return [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())


def _restore(params, optimizer, saved):
    """Put the copies of `_snapshot` back, bit for bit."""
    with torch.no_grad():
        for p, old in zip(params, saved[0]):
            p.copy_(old)
    optimizer.load_state_dict(saved[1])
