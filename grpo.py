"""Train the agent on G rollouts per task: GRPO by hand.

Paper: the agent half of the dual update in Algorithm 1. Eq. 4 is the gradient it builds on; Prop.
1 (Eq. 5) states that its mean square is largest where the success rate is 1/2. The paper gives no
objective for GRPO: the clipped surrogate and the KL term below are the usual ones.

Usage: genenv.py calls `grpo_update`; the functions above it are pure and can be read separately.

Deviations: the token-level loss, the division by the standard deviation and k3 follow the official
configuration (in the authors' repository). Its entropy bonus of 0.001 is off here (ENTROPY_BONUS)
because the paper does not mention one. By default an update is a single optimiser step: the ratio
is 1, nothing is clipped, and the loss is REINFORCE with advantages normalised by group, plus the KL
term. Groups whose rewards are all equal are dropped *before* the forward pass: neither their KL nor
their tokens count in the loss. The loss is normalised over the whole optimiser step, so
micro-batching only changes memory use. Non-finite steps are skipped and counted.

Shapes: B groups (a prompt and its G rollouts), N rollouts of a micro-batch (rows of its tensors),
R response tokens. rewards (B, G); mask (N, R) bool; logp, old_logp, ref_logp (N, R): log-probs of
the same tokens under the current policy, the policy that sampled them, and the untrained one.
"""
import math

import torch

from model.packing import split_groups

# the method's open choices, all made here
CLIP = 0.2             # epsilon of the clipped surrogate
SCALE = "std"          # std divides advantages by the group's standard deviation; none does not
KL_ESTIMATOR = "k3"    # k1, k2 or k3, see token_kl; also for rwr.py's penalty, but never k1 there
AGGREGATION = "token"  # average the loss over tokens (token) or over responses (sequence)
ENTROPY_BONUS = 0.0    # weight of the entropy per token in the objective; officially 0.001
STD_EPS = 1e-4         # rewards that differ by 1e-6 do not become advantages of about +-1
GRAD_CLIP = 1.0        # largest norm of a step's gradient, as in the official configuration
CHECKED_GROUPS = 2     # groups on which sampler_mismatch compares sampler and scorer


def group_advantages(rewards, scale: str = SCALE):
    """Return advantages within each group: rewards (B, G) -> (B, G).

    This is Eq. 4 with the group mean as baseline b, which for rewards 0 and 1 is p_hat. scale "std"
    divides by the sample standard deviation (Bessel, G - 1) of the group, "none" does not. With
    "std", rare successes on hard tasks weigh more: one success in G = 8 earns 2.47 instead of
    0.875. Eq. 5 describes "none". With "std" every mixed group has the same sum of squares, G - 1,
    so all that the success rate decides is how likely a group is to be mixed. G must be at least 2,
    since a single rollout has no baseline.
    """
    # the group's own mean is the baseline: no value network is needed
    advantages = rewards - rewards.mean(dim=1, keepdim=True)  # Eq. 4: r - b
    if scale == "std":
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + STD_EPS)
    elif scale != "none":
        raise ValueError(f"unknown advantage scale {scale!r}: std or none")
    return advantages


def has_signal(rewards):
    """Return whether the rewards of each group differ: (B, G) -> (B,) bool.

    The range decides, not the standard deviation, which rounding may keep above 0.
    """
    return (rewards.max(dim=1).values - rewards.min(dim=1).values) > 1e-6


def token_kl(logp, ref_logp, kind: str = KL_ESTIMATOR):
    """Estimate KL(pi || ref) per token, from tokens sampled by pi: (N, R) -> (N, R).

    This is the only definition of the KL estimators; rwr.py uses it, too. As *values* all three
    estimate the KL; as *losses* they differ:
      k1  log pi/ref            unbiased, can be negative; its expected gradient is exactly zero
      k2  (log pi/ref)^2 / 2    its expected gradient, E_pi[log pi/ref  grad log pi], is that of the
                                reverse KL(pi || ref)
      k3  ref/pi - 1 - log ref/pi   unbiased, never negative; its expected gradient,
                                E_pi[(1 - ref/pi) grad log pi], is that of the forward KL(ref || pi)
    All use only the log-prob of the sampled token, so they leave out the effect of a token on later
    ones (a partial gradient). tests/test_grpo.py checks these three gradients on a tabular policy.
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

    At the first step after sampling the ratio is exactly 1 and the gradient is that of Eq. 4.
    """
    ratio = (logp - old_logp).exp()  # (N, R), 1 everywhere while pi is still pi_old
    a = advantages[:, None]
    # the smaller of the two is a pessimistic bound: moving a token beyond the clip gains nothing
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)


def aggregate(per_token, mask, tokens: int, rows: int, aggregation: str = AGGREGATION):
    """Reduce masked per-token values (N, R) to this micro-batch's share of the step's mean.

    tokens, rows: how many response tokens and responses the *whole optimiser step* has, not the
    micro-batch. "token": every token counts equally. "sequence": every response counts equally,
    regardless of its length, as in the first GRPO paper.
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
    divided by the step's totals, so sum them over micro-batches. The statistics are means per
    token: kl, by the estimator that the loss uses, and clip_fraction.
    """
    policy_term = surrogate(logp, old_logp, advantages, clip)  # clipped surrogate, contains Eq. 4
    kl_term = token_kl(logp, ref_logp, kl_estimator)           # KL to the initial policy
    per_token = policy_term + kl_coef * kl_term
    if ENTROPY_BONUS:
        # The full logits are not kept. In expectation over sampled tokens the gradient of this term
        # is E[log pi grad log pi] = -grad H: minimising it raises the entropy H.
        per_token = per_token + ENTROPY_BONUS * logp.detach() * logp
    loss = aggregate(per_token, mask, tokens, rows, aggregation)
    clipped = ((logp - old_logp).exp() - 1).abs() > clip
    return loss, {"kl": (kl_term * mask).sum().detach() / tokens,
                  "clip_fraction": (clipped * mask).sum() / tokens}


# ---------------------------------------------------------------------------------------------
# the update


def grpo_update(policy, adapter, optimizer, rollouts, rewards, o, generator=None) -> dict:
    """Train one adapter on a batch of groups. Groups without signal cost no forward pass.

    rollouts: B groups of G Rollouts, group after group; rewards (B, G): theirs, in the same order.
    o: Options, of which temperature, agent_kl, mini_batch and token_budget are read. generator:
    shuffles the groups if there are several steps. An empty batch changes nothing.

    Return zero_variance (fraction of groups without signal); kl (to the initial policy, nats per
    token), clip_fraction and grad_norm (before clipping), each a mean over the steps taken;
    trained_tokens (summed over those steps); skipped_steps (not finite); mismatch, see
    sampler_mismatch. What was not measured is None.
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
    if not rollouts or not has_signal(rewards).any():
        return stats
    mixed = has_signal(rewards)  # (B,); from here on B counts the mixed groups only
    B, G = int(mixed.sum()), rewards.shape[1]
    is_mixed = mixed.repeat_interleave(G).tolist()  # whether its group is mixed
    rollouts = [r for r, keep in zip(rollouts, is_mixed, strict=True) if keep]
    advantages = group_advantages(rewards[mixed]).flatten()  # Eq. 4: (B*G,), one per rollout
    steps = plan_steps(B, G, o.mini_batch or B, generator)
    with policy.use(adapter):
        # the reference policy is the same model with its adapters switched off
        with policy.use(None):
            ref = response_logps(policy, rollouts, o)
        stats["mismatch"] = sampler_mismatch(policy, rollouts[:CHECKED_GROUPS * G], o)
        # A single step (--mini-batch 0, the default) is taken by the policy that sampled: it needs
        # no old log-probs, its ratio is 1 and nothing is clipped. For several steps all rollouts
        # are scored before the first, in the same micro-batches as in training: in bf16 a different
        # batch gives slightly different numbers, so the ratio would not start at 1.
        old = [None] * len(steps)
        if len(steps) > 1:
            old = [response_logps(policy, [rollouts[i] for i in step], o) for step in steps]
        step_stats = []  # statistics of each step
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
    # a sum, unlike the means above
    stats["trained_tokens"] = sum(step["trained_tokens"] for step in step_stats)
    stats["zero_variance"] = 1 - B / len(mixed)
    return stats


def plan_steps(B, G, size, generator) -> list:
    """Plan one pass over B groups: for each optimiser step the indices of its rollouts, ascending.

    A step has at most `size` groups, and the sizes of steps differ by at most one. How far AdamW
    moves the adapter does not depend on the size of the gradient: a leftover step of one group
    would move it as far as a step of sixteen. Groups are shuffled if there are several steps.
    """
    order = torch.arange(B)
    if size < B:
        order = torch.randperm(B, generator=generator)
    steps = [part.sort().values.tolist() for part in order.tensor_split(math.ceil(B / size))]
    return [[b * G + g for b in step for g in range(G)] for step in steps]


def score_in_parts(policy, rollouts, o):
    """Yield micro-batches under o.token_budget: (indices of N rollouts, log-probs (N, R), mask
    (N, R)).

    The log-probs are those of Policy.logprobs, under the active adapter. Call their `backward`
    before the next part is scored, so that only one part's activations are held at a time.
    """
    for micro in split_groups(rollouts, o.token_budget):
        logp, mask = policy.logprobs([rollouts[i] for i in micro], o.temperature)
        yield micro, logp, mask


def response_logps(policy, rollouts, o) -> list:
    """Return the log-probs of each rollout, without gradient: a tensor (R,), 0 at tokens that were
    read, not sampled.

    This uses the same code as training and, for the same rollouts, the same micro-batches.
    """
    out = [None] * len(rollouts)
    with torch.no_grad():
        for micro, logp, _ in score_in_parts(policy, rollouts, o):
            for i, row in zip(micro, logp):
                out[i] = row[:len(rollouts[i].response)]
    return out


def sampler_mismatch(policy, rollouts, o) -> float | None:
    """Return how much the log-probs of sampler and scorer differ: the mean absolute difference over
    sampled tokens, in nats. None if the rollouts were not sampled.

    Both compute the same policy with different code: a large value means that one is wrong.
    """
    if not rollouts[0].logps:
        return None
    scored = torch.cat(response_logps(policy, rollouts, o))
    sampled = torch.cat([torch.tensor(r.logps) for r in rollouts])
    gaps = (sampled.to(scored) - scored).abs()
    tokens = sum(r.tokens for r in rollouts)
    return float(gaps.sum()) / tokens


def _grpo_step(policy, adapter, optimizer, rollouts, advantages, ref, old, o):
    """Take one optimiser step over all micro-batches of `rollouts`.

    advantages: one per rollout; ref, old: log-probs as `response_logps` returns them. If old is
    None, this step's own log-probs, detached, are used instead. Return the step's statistics, or
    None if it was not finite and therefore skipped.
    """
    # one denominator for the whole step, because micro-batches must not change what is optimised
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
    # statistics stay on the device until here: reading one earlier would make the host wait
    total = {key: float(sum(part[key] for part in parts)) for key in parts[0]}
    norm, finite = finite_step(policy.params[adapter], optimizer, total.pop("loss"))
    if not finite:
        return None
    return {**total, "grad_norm": norm, "trained_tokens": tokens}


def finite_step(params, optimizer, loss):
    """Clip one adapter's gradient and take a step, unless the gradient or the loss is not finite.

    loss: the step's, a number. Return (gradient norm before clipping, whether the step was taken).
    A skipped step leaves the weights and the optimiser's state as they were, bit for bit, because a
    single NaN would otherwise stay in both forever.
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
    """Pad a list of (R_i,) tensors with zeros -> (N, R)."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
