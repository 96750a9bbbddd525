"""Train the agent on G rollouts per task: GRPO by hand.

Paper: the agent's half of the dual update in Algorithm 1. GRPO builds on the gradient of Eq. 4.
Prop. 1 (Eq. 5) bounds the mean square of this gradient from both sides, and both bounds are largest
where the success rate is 1/2. The paper gives no objective for GRPO: the clipped surrogate and the
KL term below are the usual ones.

Usage: genenv.py calls `grpo_update`. The functions above it are pure, and each can be read
separately.

Deviations: the token-level loss, the division by the standard deviation and the KL estimator k3
follow the official configuration (in the authors' repository). Its entropy bonus of 0.001 is off
here (ENTROPY_BONUS) because the paper does not mention one. By default an update is a single
optimiser step, so the ratio of new to old probabilities is 1 everywhere, nothing is clipped, and
the loss is that of REINFORCE with advantages normalised within each group, plus the KL term. A
group whose rewards are all equal gives no signal. It is dropped *before* the forward pass, so
neither its KL nor its tokens count in the loss. The loss is normalised over the whole optimiser
step, so the size of the micro-batches affects only memory and time. A step whose loss or gradient
is not finite is skipped and counted.

Shapes: B groups, each a prompt and its G rollouts; N rollouts in a micro-batch, one per row of its
tensors; R response tokens. rewards (B, G); mask (N, R) bool; logp, old_logp, ref_logp (N, R): the
log-probs of the same tokens under the current policy, the policy that sampled them, and the initial
one, which is the reference of the KL term.
"""
import math

import torch

from model.packing import split_groups

# what the paper leaves open in GRPO is decided here
CLIP = 0.2             # epsilon of the clipped surrogate
SCALE = "std"          # std divides advantages by the group's standard deviation; none does not
KL_ESTIMATOR = "k3"    # k1, k2 or k3, see token_kl; rwr.py's penalty uses it too, but never k1
AGGREGATION = "token"  # average the loss over tokens (token) or over responses (sequence)
ENTROPY_BONUS = 0.0    # weight of the entropy per token; 0.001 in the official configuration
STD_EPS = 1e-4         # without it, rewards only 1e-6 apart would give advantages of about +-1
GRAD_CLIP = 1.0        # largest norm of a step's gradient, as in the official configuration
CHECKED_GROUPS = 2     # sampler_mismatch compares sampler and scorer on this many groups


def group_advantages(rewards, scale: str = SCALE):
    """Return the advantage of each rollout within its group: rewards (B, G) -> (B, G).

    This is r - b of Eq. 4. There b is the true success rate p; here it is the group's mean reward,
    which is p_hat if all rewards are 0 or 1. scale "std" also divides by the group's sample
    standard deviation (Bessel: G - 1); "none" does not. With "std" a rare success on a hard task
    weighs more: one success in G = 8 earns 2.47 instead of 0.875. Eq. 5 describes "none". With
    "std" the squared advantages of every mixed group (one whose rewards differ) sum to G - 1, so
    the success rate decides only how likely a group is to be mixed. G must be at least 2, since a
    single rollout has no baseline.
    """
    advantages = rewards - rewards.mean(dim=1, keepdim=True)  # Eq. 4: r - b
    if scale == "std":
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + STD_EPS)
    elif scale != "none":
        raise ValueError(f"unknown advantage scale {scale!r}: std or none")
    return advantages


def has_signal(rewards):
    """Return for each group whether its rewards differ: (B, G) -> (B,) bool.

    The test uses the range and not the standard deviation, because rounding may make the latter
    positive even for equal rewards.
    """
    return (rewards.max(dim=1).values - rewards.min(dim=1).values) > 1e-6


def token_kl(logp, ref_logp, kind: str = KL_ESTIMATOR):
    """Estimate KL(pi || ref) per token, on tokens that pi sampled: (N, R) -> (N, R).

    kind: k1, k2 or k3; rwr.py calls this function, too. As *values* all three estimate the KL, but
    as *losses* they differ:
      k1  log pi/ref            unbiased, can be negative; its expected gradient is exactly zero
      k2  (log pi/ref)^2 / 2    biased, never negative; its expected gradient,
                                E_pi[log pi/ref  grad log pi], is that of the reverse KL(pi || ref)
      k3  ref/pi - 1 - log ref/pi   unbiased, never negative; its expected gradient,
                                E_pi[(1 - ref/pi) grad log pi], is that of the forward KL(ref || pi)
    Each gradient is partial: it leaves out how a token changes the KL of the tokens after it.
    tests/test_grpo.py checks the three gradients on a tabular policy.
    """
    log_ratio = logp - ref_logp
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio ** 2
    if kind == "k3":
        return (-log_ratio).exp() - 1 + log_ratio
    raise ValueError(f"unknown KL estimator {kind!r}: k1, k2 or k3")


def surrogate(logp, old_logp, advantages, clip: float = CLIP):
    """Return the clipped policy-gradient loss per token, (N, R); advantages (N,), one per rollout.

    At the first step after sampling the ratio is exactly 1. The gradient is then minus that of Eq.
    4, because a loss is minimised, with the advantage instead of r - b.
    """
    ratio = (logp - old_logp).exp()  # (N, R), 1 everywhere while pi is still pi_old
    a = advantages[:, None]
    # take the smaller of the two, so that moving a ratio beyond the clipping range gains nothing
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)


def aggregate(per_token, mask, tokens: int, rows: int, aggregation: str = AGGREGATION):
    """Reduce masked per-token values (N, R) to what this micro-batch adds to the step's mean.

    tokens, rows: the numbers of response tokens and of responses in the *whole optimiser step*, not
    in the micro-batch. With "token", every token counts equally. With "sequence", every response
    counts equally, regardless of its length, as in the first GRPO paper.
    """
    if aggregation == "token":
        return (per_token * mask).sum() / max(tokens, 1)
    if aggregation == "sequence":
        means = (per_token * mask).sum(1) / mask.sum(1).clamp(min=1)  # (N,)
        return means.sum() / max(rows, 1)
    raise ValueError(f"unknown aggregation {aggregation!r}: token or sequence")


def grpo_loss(logp, old_logp, ref_logp, advantages, mask, tokens, rows, *, kl_coef, clip=CLIP,
              kl_estimator=KL_ESTIMATOR, aggregation=AGGREGATION):
    """Return the GRPO loss of one micro-batch, and its statistics.

    advantages (N,), one per rollout; tokens, rows: see aggregate. Loss and statistics are already
    divided by the step's totals, so the sum over micro-batches is the value of the step. The
    statistics are means per token: kl, by the loss's own estimator, and clip_fraction, the share of
    tokens whose ratio is outside [1 - clip, 1 + clip].
    """
    policy_term = surrogate(logp, old_logp, advantages, clip)  # clipped surrogate, contains Eq. 4
    kl_term = token_kl(logp, ref_logp, kl_estimator)           # KL to the initial policy
    per_token = policy_term + kl_coef * kl_term
    if ENTROPY_BONUS:
        # The entropy H itself would need all logits, which are not kept. In expectation over the
        # sampled tokens, the gradient of this term is E[log pi grad log pi] = -grad H, so
        # minimising it raises H.
        per_token = per_token + ENTROPY_BONUS * logp.detach() * logp
    loss = aggregate(per_token, mask, tokens, rows, aggregation)
    clipped = ((logp - old_logp).exp() - 1).abs() > clip
    return loss, {"kl": (kl_term * mask).sum().detach() / tokens,
                  "clip_fraction": (clipped * mask).sum() / tokens}


# ---------------------------------------------------------------------------------------------
# the update


def grpo_update(policy, adapter, optimizer, rollouts, rewards, o, generator=None) -> dict:
    """Train one adapter on a batch of groups, and return statistics of the update.

    rollouts: B groups of G Rollouts, group after group. rewards (B, G): their rewards in the same
    order. o: Options, of which temperature, agent_kl, mini_batch and token_budget are read.
    generator: shuffles the groups if there are several steps. Groups without signal cost no forward
    pass. If no group has a signal, nothing changes.

    The statistics are zero_variance (the share of groups without signal); kl (to the initial
    policy, in nats per token), clip_fraction and grad_norm (before clipping), each a mean over the
    steps taken; trained_tokens (a sum over those steps); skipped_steps (those that were not
    finite); mismatch (see sampler_mismatch). What was not measured is None.
    """
    stats = {
        "zero_variance": 1.0,
        "kl": None,
        "clip_fraction": None,
        "grad_norm": None,
        "trained_tokens": 0,
        "skipped_steps": 0,
        "mismatch": None,
    }
    mixed = has_signal(rewards)  # (B,); from here on, B is the number of mixed groups
    if not mixed.any():
        return stats
    B, G = int(mixed.sum()), rewards.shape[1]
    is_mixed = mixed.repeat_interleave(G).tolist()  # for each rollout, whether its group is mixed
    rollouts = [r for r, keep in zip(rollouts, is_mixed, strict=True) if keep]
    advantages = group_advantages(rewards[mixed]).flatten()  # Eq. 4: (B*G,), one per rollout
    steps = plan_steps(B, G, o.mini_batch or B, generator)
    with policy.use(adapter):
        # the reference policy is the same model with its adapters switched off
        with policy.use(None):
            ref = response_logps(policy, rollouts, o)
        stats["mismatch"] = sampler_mismatch(policy, rollouts[:CHECKED_GROUPS * G], o)
        # If there is a single step (--mini-batch 0, the default), the policy is still the one that
        # sampled. The step needs no old log-probs: its ratio is 1 and nothing is clipped. If there
        # are several steps, all rollouts are scored before the first step, in the same
        # micro-batches as in training. In bf16 different micro-batches would give slightly
        # different numbers, and the ratio would not start at 1.
        old = [None] * len(steps)
        if len(steps) > 1:
            old = [response_logps(policy, [rollouts[i] for i in step], o) for step in steps]
        step_stats = []  # one dict per step taken
        for step, old_logps in zip(steps, old, strict=True):
            result = _grpo_step(policy, adapter, optimizer, [rollouts[i] for i in step],
                                advantages[step], [ref[i] for i in step], old_logps, o)
            if result is None:  # not finite
                stats["skipped_steps"] += 1
            else:
                step_stats.append(result)
    if step_stats:
        for key in step_stats[0]:
            stats[key] = sum(step[key] for step in step_stats) / len(step_stats)
    # the loop has averaged trained_tokens, too, but it should be a sum
    stats["trained_tokens"] = sum(step["trained_tokens"] for step in step_stats)
    stats["zero_variance"] = 1 - B / len(mixed)
    return stats


def plan_steps(B, G, size, generator) -> list:
    """Divide B groups into optimiser steps; return the rollout indices of each step, ascending.

    A step has at most `size` groups, and the sizes of any two steps differ by at most one. How far
    AdamW moves the adapter does not depend on the size of the gradient, so a leftover step of one
    group would move it as far as a step of sixteen. Groups are shuffled if there are several steps.
    """
    order = torch.arange(B)
    if size < B:
        order = torch.randperm(B, generator=generator)
    steps = [part.sort().values.tolist() for part in order.tensor_split(math.ceil(B / size))]
    return [[b * G + g for b in step for g in range(G)] for step in steps]


def score_in_parts(policy, rollouts, o):
    """Score rollouts in micro-batches under o.token_budget, and yield for each one the indices of
    its N rollouts, their log-probs (N, R) and their mask (N, R).

    The log-probs are those of Policy.logprobs, under the active adapter. Run the backward pass of
    each micro-batch before asking for the next, so that only one holds its activations at a time.
    """
    for micro in split_groups(rollouts, o.token_budget):
        logp, mask = policy.logprobs([rollouts[i] for i in micro], o.temperature)
        yield micro, logp, mask


def response_logps(policy, rollouts, o) -> list:
    """Return one tensor of log-probs (R,) per rollout, without gradient.

    A token that was not drawn, such as one in an observation, has log-prob 0. Scoring runs
    the same code as training and, for the same rollouts, uses the same micro-batches.
    """
    out = [None] * len(rollouts)
    with torch.no_grad():
        for micro, logp, _ in score_in_parts(policy, rollouts, o):
            for i, row in zip(micro, logp):
                out[i] = row[:len(rollouts[i].response)]
    return out


def sampler_mismatch(policy, rollouts, o) -> float | None:
    """Return the mean absolute difference, in nats per sampled token, between the log-probs that
    sampling stored and those that scoring computes.

    Both come from the same policy but from different code, so a large value means that one of them
    is wrong. Return None if the rollouts hold no log-probs from sampling.
    """
    if not rollouts[0].logps:
        return None
    scored = torch.cat(response_logps(policy, rollouts, o))
    sampled = torch.tensor([logp for r in rollouts for logp in r.logps])
    gaps = (sampled.to(scored) - scored).abs()
    tokens = sum(r.tokens for r in rollouts)
    return float(gaps.sum()) / tokens


def _grpo_step(policy, adapter, optimizer, rollouts, advantages, ref, old, o):
    """Take one optimiser step over all micro-batches of `rollouts`.

    advantages: one per rollout; ref, old: log-probs as `response_logps` returns them. If old is
    None, the step uses its own log-probs, detached, instead. Return the step's statistics, or None
    if it was not finite and therefore skipped.
    """
    # the whole step has one denominator, because micro-batches must not change what is optimised
    tokens = sum(r.tokens for r in rollouts)
    optimizer.zero_grad(set_to_none=True)
    parts = []
    for micro, logp, mask in score_in_parts(policy, rollouts, o):
        ref_logp = pad_rows([ref[i] for i in micro])                               # (N, R)
        old_logp = pad_rows([old[i] for i in micro]) if old else logp.detach()     # (N, R)
        loss, stats = grpo_loss(logp, old_logp, ref_logp, advantages[micro].to(logp), mask, tokens,
                                len(rollouts), kl_coef=o.agent_kl)
        loss.backward()
        parts.append({**stats, "loss": loss.detach()})
    # read the statistics only now: reading one from a GPU inside the loop would make the host wait
    total = {key: float(sum(part[key] for part in parts)) for key in parts[0]}
    norm, finite = finite_step(policy.params[adapter], optimizer, total.pop("loss"))
    if not finite:
        return None
    return {**total, "grad_norm": norm, "trained_tokens": tokens}


def finite_step(params, optimizer, loss):
    """Clip one adapter's gradient and take a step, unless the gradient or the loss is not finite.

    loss: the loss of the step, as a number. Return (gradient norm before clipping, whether the step
    was taken). A skipped step leaves the weights and the optimiser's state as they were, bit for
    bit. If it were taken, a single NaN would stay in both forever.
    """
    # params are those of one adapter; the other one has no gradient here
    norm = float(torch.nn.utils.clip_grad_norm_(params, GRAD_CLIP))
    ok = math.isfinite(norm) and math.isfinite(loss)
    if ok:
        optimizer.step()
    else:
        optimizer.zero_grad(set_to_none=True)
    return norm, ok


def pad_rows(rows):
    """Pad N tensors (R_i,) with zeros on the right -> (N, R)."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
