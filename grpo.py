"""GRPO by hand: how the agent learns from G rollouts per task.

What of the paper this is: the agent half of the dual update of Algorithm 1. Eq. 4 is the gradient
it builds on; Prop. 1 (Eq. 5) says this gradient is largest where the success rate is 1/2. The paper
gives no objective of GRPO: the clipped surrogate and the KL term below are GRPO's usual ones.

How it is run: genenv.py calls `grpo_update`; the functions above it are pure and can be read alone.

Where it differs on purpose: token-level loss, standard deviation on and k3 as in the official
configuration, each switchable (its entropy bonus of 0.001 is left out, the paper has none). Groups
whose rewards are all alike are dropped *before* the forward pass: neither their KL nor their tokens
count. The denominator of the loss holds for the whole step, so that the number of micro-batches
changes memory and nothing else. A step that is not finite is left out and counted.

Shapes: B groups (a prompt and its G rollouts), N rollouts of a micro-batch (rows of its tensors),
R response tokens. rewards (B, G); mask (N, R) bool; logp, old_logp, ref_logp (N, R): log-probs of
the same tokens under pi as it is now, as it was when it sampled, and as it was before training.
"""
import math

import torch

from policy import split_groups

# Choices that the paper leaves open; each is switchable here, for both policies
CLIP = 0.2              # epsilon of the clipped surrogate
KL_ESTIMATOR = "k3"     # or k1, k2: see token_kl
SCALE = "std"           # or none: see group_advantages
AGGREGATION = "token"   # or sequence: see aggregate
STD_EPS = 1e-4  # a near-tie of 1e-6 must not become an advantage of 1
GRAD_CLIP = 1.0  # largest norm of a step's gradient, as in the official configuration


def group_advantages(rewards, scale: str = SCALE):
    """Advantages within each group: rewards (B, G) -> (B, G).

    Eq. 4 with the group mean as baseline b, which for rewards 0 and 1 is p_hat. scale "std" divides
    by the sample standard deviation (Bessel, G - 1) of the group, "none" does not: std gives rare
    successes on hard tasks more weight, one success in G = 8 earns 2.47 instead of 0.875. Eq. 5
    describes "none". With "std" every mixed group has the same squared sum, G - 1, and p decides
    how likely a group is mixed. Raises ValueError if G < 2.
    """
    if rewards.shape[1] < 2:
        raise ValueError("a group needs G >= 2 rollouts: with one there is no baseline")
    # the group's own mean is the baseline: no value network is needed
    advantages = rewards - rewards.mean(dim=1, keepdim=True)  # Eq. 4: r - b
    if scale == "std":
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + STD_EPS)
    elif scale != "none":
        raise ValueError(f"unknown advantage scale {scale!r}: std or none")
    return advantages


def has_signal(rewards):
    """(B, G) -> (B,) bool: groups whose rewards differ. max - min, as std may miss an exact 0."""
    return (rewards.max(dim=1).values - rewards.min(dim=1).values) > 1e-6


def token_kl(logp, ref_logp, kind: str = KL_ESTIMATOR):
    """Per-token estimate of KL(pi || ref) from tokens sampled by pi: (N, R) -> (N, R).

    The one place where the estimators stand (grpo.py and rwr.py both use it). As *values* all
    three estimate the KL; as *losses* they differ:
      k1  log pi/ref            unbiased, can be negative; its expected gradient is exactly zero
      k2  (log pi/ref)^2 / 2    its gradient is that of the reverse KL(pi || ref)
      k3  ref/pi - 1 - log ref/pi   unbiased, never negative; its gradient is that of the forward KL
    All see the log-probs of the sampled token only, so the effect of a token on later ones is left
    out (a partial gradient). tests/test_grpo.py checks the three statements on a table.
    """
    log_ratio = logp - ref_logp
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio ** 2
    if kind == "k3":
        return (-log_ratio).exp() - 1 + log_ratio
    raise ValueError(f"unknown KL estimator {kind!r}: k1, k2 or k3")


def surrogate(logp, old_logp, advantages, clip: float):
    """Clipped policy-gradient loss per token, (N, R); advantages (N,), one per rollout.

    At the first step after sampling the ratio is exactly 1 and the gradient is that of Eq. 4.
    """
    ratio = (logp - old_logp).exp()  # (N, R), 1 everywhere while pi is still pi_old
    a = advantages[:, None]
    # the smaller of the two is a pessimistic bound: no gain from moving a token beyond the clip
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)


def aggregate(per_token, mask, aggregation: str, tokens: int, rows: int):
    """Masked per-token values (N, R) -> scalar: this micro-batch's share of the step's mean.

    tokens, rows: response tokens and responses of the *whole step*, not of the micro-batch.
    "token": every token counts alike. "sequence": every response counts alike, whatever its
    length, as in the first GRPO paper.
    """
    if aggregation == "token":
        return (per_token * mask).sum() / max(tokens, 1)
    if aggregation == "sequence":
        return ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / max(rows, 1)
    raise ValueError(f"unknown aggregation {aggregation!r}: token or sequence")


def grpo_loss(logp, old_logp, ref_logp, advantages, mask, tokens, rows, *, kl_coef,
              clip=CLIP, kl_estimator=KL_ESTIMATOR, aggregation=AGGREGATION):
    """The GRPO objective of one micro-batch -> (loss, statistics).

    advantages (N,), one per rollout; tokens, rows: see aggregate. Loss and statistics are already
    divided by the step's totals: sum over micro-batches.
    """
    policy_term = surrogate(logp, old_logp, advantages, clip)  # clipped surrogate, Eq. 4 in it
    kl_term = token_kl(logp, ref_logp, kl_estimator)           # KL to the initial policy
    loss = aggregate(policy_term + kl_coef * kl_term, mask, aggregation, tokens, rows)
    with torch.no_grad():
        ratio = (logp - old_logp).exp()
        stats = {"kl": (token_kl(logp, ref_logp) * mask).sum() / tokens,
                 "clip_fraction": (((ratio - 1).abs() > clip) * mask).sum() / tokens}
    return loss, stats


# ---------------------------------------------------------------------------------------------
# the update


def grpo_update(policy, adapter, optimizer, rollouts, rewards, o, generator=None) -> dict:
    """Train one adapter on a batch of groups. Groups without signal cost no forward pass.

    rollouts: B groups of G Rollouts one after another; rewards (B, G): theirs, in the same order.
    o: Options, of which temperature, agent_kl, mini_batch and token_budget are read. generator: shuffles the
    groups where there are several steps. An empty batch changes nothing.
    Returns zero_variance (share of groups without signal); kl (to the reference, nats per token),
    clip_fraction and grad_norm (before clipping), each a mean over the steps taken; trained_tokens;
    skipped_steps (not finite); mismatch_mean and mismatch_max, |log-prob of the sampler - of the
    scorer| over response tokens before any update. What was not measured is 0.
    """
    stats = {"zero_variance": 1.0, "grad_norm": 0.0, "kl": 0.0, "clip_fraction": 0.0,
             "trained_tokens": 0, "skipped_steps": 0, "mismatch_mean": 0.0, "mismatch_max": 0.0}
    if not rollouts or not has_signal(rewards).any():
        return stats
    # a group of equal rewards has no policy gradient: drop it before it costs a forward pass
    mixed = has_signal(rewards)  # (B,); from here on B counts these groups alone
    B, G = int(mixed.sum()), rewards.shape[1]
    rollouts = [r for r, kept in zip(rollouts, mixed.repeat_interleave(G).tolist(), strict=True)
                if kept]
    advantages = group_advantages(rewards[mixed]).flatten()  # Eq. 4: (B*G,), as rollouts
    steps = plan_steps(B, G, o.mini_batch or B, generator)
    with policy.use(adapter):
        # the reference policy is the same model with its adapters switched off
        with policy.use(None):
            ref = response_logps(policy, rollouts, o)
        # old log-probs are those of the policy that sampled; a single step is still that policy and
        # needs none. With several steps each step's are scored, before the first, in the very
        # micro-batches that will train: in bf16 another batch gives other numbers, and the ratio
        # would not start at 1. From the second step on the policy has moved: there the clip bites
        old = {step: response_logps(policy, [rollouts[i] for i in step], o)
               for step in set(steps)} if len(steps) > 1 else {}
        done = [_grpo_step(policy, adapter, optimizer, [rollouts[i] for i in step],
                           advantages[list(step)], [ref[i] for i in step], old.get(step), o)
                for step in steps]
    taken = [step for step in done if step]  # None: it was not finite and left out
    for key in taken[0] if taken else ():
        stats[key] = sum(step[key] for step in taken) / len(taken)
    stats["trained_tokens"] = sum(step["trained_tokens"] for step in taken)
    stats["mismatch_max"] = max((step["mismatch_max"] for step in taken), default=0.0)
    return {**stats, "zero_variance": 1 - B / len(mixed), "skipped_steps": len(done) - len(taken)}


def plan_steps(B, G, size, generator) -> list:
    """The rollouts of each optimiser step: tuples of ascending indices, of at most `size` groups.

    Together they are one pass over all B groups, shuffled if there is more than one step.
    """
    order = torch.randperm(B, generator=generator).tolist() if size < B else range(B)
    steps = [sorted(order[i:i + size]) for i in range(0, B, size)]
    return [tuple(b * G + g for b in step for g in range(G)) for step in steps]


def response_logps(policy, rollouts, o) -> list:
    """Log-probs without gradient: for each rollout a tensor (R,), 0 at tokens that were read, not
    drawn. The same path as in training, and for the same rollouts the same micro-batches.
    """
    out = [None] * len(rollouts)
    with torch.no_grad():
        for rows in split_groups(rollouts, o.token_budget):
            logp, _ = policy.logprobs([rollouts[i] for i in rows], o.temperature)  # (N, R)
            for i, row in zip(rows, logp):
                out[i] = row[:len(rollouts[i].response)]
    return out


def _grpo_step(policy, adapter, optimizer, rollouts, advantages, ref, old, o):
    """One optimiser step over all micro-batches of `rollouts`.

    advantages: one per rollout; ref, old: their log-probs as `response_logps` gives them; if old is
    None, old = this step's log-probs, detached. Returns the step's statistics, None if it was not
    finite and therefore skipped.
    """
    # one denominator for the whole step: micro-batches must not change what is optimised
    tokens = sum(r.tokens for r in rollouts)
    optimizer.zero_grad(set_to_none=True)
    parts = []
    for rows in split_groups(rollouts, o.token_budget):  # N indices of rollouts
        batch = [rollouts[i] for i in rows]
        logp, mask = policy.logprobs(batch, o.temperature, policy.device.type != "cpu")  # (N, R)
        ref_logp = pad_rows([ref[i] for i in rows])                                  # (N, R)
        old_logp = pad_rows([old[i] for i in rows]) if old else logp.detach()        # (N, R)
        loss, stats = grpo_loss(
            logp, old_logp, ref_logp, advantages[rows].to(logp), mask, tokens, len(rollouts),
            kl_coef=o.agent_kl)
        loss.backward()
        sampled = pad_rows([torch.tensor(r.logps) for r in batch]).to(logp) if batch[0].logps \
            else old_logp                                                            # (N, R)
        mismatch = (sampled - old_logp).abs() * mask
        parts.append({**stats, "loss": loss.detach(), "mismatch_mean": mismatch.sum() / tokens,
                      "mismatch_max": mismatch.max()})
    # numbers stay on the device until here: reading one earlier makes the host wait
    total = {key: float(sum(part[key] for part in parts)) for key in parts[0]}
    total["mismatch_max"] = max(float(part["mismatch_max"]) for part in parts)
    norm, finite = finite_step(policy.params[adapter], optimizer, total.pop("loss"))
    return {**total, "grad_norm": norm, "trained_tokens": tokens} if finite else None


def finite_step(params, optimizer, loss):
    """Clip one adapter's gradient and step; leave it where it or the loss is not finite.

    loss: the step's, a number. Returns (gradient norm before clipping, whether the step was taken).
    A step not taken leaves the weights and the optimiser's state as they were, bit for bit: one NaN
    would stay in both for good.
    """
    # over this adapter's parameters only; the other adapter has no gradient here
    norm = float(torch.nn.utils.clip_grad_norm_(params, GRAD_CLIP))
    ok = math.isfinite(norm) and math.isfinite(loss)
    if ok:
        optimizer.step()
    else:
        optimizer.zero_grad(set_to_none=True)
    return norm, ok


def pad_rows(rows):
    """List of (R_i,) tensors -> (N, R), zero-padded."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
