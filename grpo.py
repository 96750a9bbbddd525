"""GRPO by hand: how the agent learns from G rollouts per task.

What of the paper this is: the agent half of the dual update of Algorithm 1. Eq. 4 is the gradient
it builds on; Prop. 1 (Eq. 5) says this gradient is largest where the success rate is 1/2.

How it is run: genenv.py calls `grpo_update`; the functions above it are pure and can be read alone.

Where it differs on purpose: token-level loss, standard deviation on and k3 as in the official
configuration, each switchable (its entropy bonus of 0.001 is left out, the paper has none); groups
whose rewards are all alike are dropped *before* the forward pass, with their KL term and their
tokens in the denominator; that denominator holds for the whole step, so that the number of
micro-batches changes memory and nothing else.

Shapes: B groups, G rollouts, N = B*G rows, R response tokens. logp, old_logp, ref_logp (N, R),
mask (N, R) bool, rewards and advantages (B, G).
"""
import torch

from policy import split_groups

STD_EPS = 1e-4  # a near-tie of 1e-6 must not become an advantage of 1


def group_advantages(rewards, scale: str = "std"):
    """Advantages within each group: rewards (B, G) -> (B, G).

    Eq. 4 with the group mean as baseline b. scale "std" divides by the sample standard deviation
    (Bessel, G - 1) of the group, "none" does not: std gives rare successes on hard tasks more
    weight, one success in G = 8 earns 2.47 instead of 0.875. Raises ValueError if G < 2.
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


def has_signal(rewards, eps: float = 1e-6):
    """(B, G) -> (B,) bool: groups whose rewards differ. max - min, as std may miss an exact 0."""
    return (rewards.max(dim=1).values - rewards.min(dim=1).values) > eps


def token_kl(logp, ref_logp, kind: str = "k3"):
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


def grpo_loss(logp, old_logp, ref_logp, advantages, mask, tokens, rows, *, clip, kl_coef,
              kl_estimator="k3", aggregation="token"):
    """The GRPO objective of one micro-batch -> (loss, detached statistics, shares of the step)."""
    policy_term = surrogate(logp, old_logp, advantages, clip)
    kl_term = token_kl(logp, ref_logp, kl_estimator)
    loss = aggregate(policy_term + kl_coef * kl_term, mask, aggregation, tokens, rows)
    with torch.no_grad():
        ratio = (logp - old_logp).exp()
        stats = {"kl": (token_kl(logp, ref_logp) * mask).sum() / tokens,
                 "clip_fraction": (((ratio - 1).abs() > clip) * mask).sum() / tokens}
    return loss, {key: float(value) for key, value in stats.items()}


# ---------------------------------------------------------------------------------------------
# the update


def grpo_update(policy, adapter, optimizer, groups, rewards, *, temperature=1.0, clip=0.2,
                kl_coef=0.001, kl_estimator="k3", scale="std", aggregation="token", inner_epochs=1,
                mini_batch=0, grad_clip=1.0, token_budget=16384, grad_checkpoint=False,
                generator=None) -> dict:
    """Train one adapter on a batch of groups. Returns statistics; groups without signal are free.

    groups: B of (prompt ids, G response ids); rewards (B, G). mini_batch: groups per optimiser
    step, 0 = all; inner_epochs: passes over the batch. An empty batch is a no-op.
    """
    # a group of equal rewards has no policy gradient: drop it before it costs a forward pass
    keep = has_signal(rewards)
    groups = [g for g, k in zip(groups, keep.tolist()) if k]
    stats = {"zero_variance": 1 - len(groups) / max(1, len(keep)), "grad_norm": 0.0, "kl": 0.0,
             "clip_fraction": 0.0, "trained_tokens": 0}
    if not groups:
        return stats
    advantages = group_advantages(rewards[keep], scale)
    size = mini_batch or len(groups)
    fixed = dict(temperature=temperature, token_budget=token_budget)
    with policy.use(adapter):
        # the reference policy is the same model with its adapters switched off
        with policy.use(None):
            ref = score(policy, groups, **fixed)
        # old log-probs fix the policy that sampled; with a single step per batch old = current,
        # and the training pass itself provides them
        several = inner_epochs > 1 or size < len(groups)
        old = score(policy, groups, **fixed) if several else None
        # several passes, or several steps per pass, leave the sampling policy: there the clip bites
        steps = []
        for _ in range(inner_epochs):
            order = torch.randperm(len(groups), generator=generator).tolist() if several else \
                range(len(groups))
            for start in range(0, len(groups), size):
                members = list(order[start:start + size])
                steps.append(_grpo_step(
                    policy, optimizer, [groups[i] for i in members], advantages[members],
                    [ref[i] for i in members], [old[i] for i in members] if old else None,
                    clip=clip, kl_coef=kl_coef, kl_estimator=kl_estimator, aggregation=aggregation,
                    grad_checkpoint=grad_checkpoint, params=policy.params[adapter],
                    grad_clip=grad_clip, **fixed))
    stats.update({key: sum(step[key] for step in steps) / len(steps) for key in steps[0]})
    stats["trained_tokens"] = sum(len(r) for _, rs in groups for r in rs) * inner_epochs
    return stats


def score(policy, groups, temperature, token_budget):
    """Log-probs of all groups without gradient: list over groups of lists of (R,) tensors.

    Made by the very path that trains, so that the ratio to them is 1 before the first step.
    """
    out = [[None] * len(responses) for _, responses in groups]
    with torch.no_grad():
        for batch in split_groups(groups, token_budget):
            logp, mask = policy.logprobs(subset(groups, batch), temperature)
            owners = [(i, j) for i, members in batch for j in members]
            for (i, j), row, m in zip(owners, logp, mask):
                out[i][j] = row[m]
    return out


def subset(groups, batch):
    """The (prompt, responses) pairs that a micro-batch of split_groups names."""
    return [(groups[i][0], [groups[i][1][j] for j in members]) for i, members in batch]


def _grpo_step(policy, optimizer, groups, advantages, ref, old, *, params, temperature,
               token_budget, grad_checkpoint, grad_clip, **loss_options):
    """One optimiser step over all micro-batches of `groups`; the denominators are the step's."""
    # one denominator for the whole step: micro-batches must not change what is optimised
    tokens = sum(len(r) for _, rs in groups for r in rs)
    rows = sum(len(rs) for _, rs in groups)
    total = {"kl": 0.0, "clip_fraction": 0.0}
    optimizer.zero_grad(set_to_none=True)
    for batch in split_groups(groups, token_budget):
        logp, mask = policy.logprobs(subset(groups, batch), temperature, grad_checkpoint)
        # rows come in the order of split_groups, not the caller's: (group, rollout) of each row
        owners = [(i, j) for i, members in batch for j in members]
        ref_logp = pad_rows([ref[i][j] for i, j in owners])
        old_logp = pad_rows([old[i][j] for i, j in owners]) if old else logp.detach()
        a = torch.stack([advantages[i, j] for i, j in owners]).to(logp)
        loss, stats = grpo_loss(logp, old_logp, ref_logp, a, mask, tokens, rows, **loss_options)
        loss.backward()
        total = {key: total[key] + stats[key] for key in total}
    # clip over this adapter's parameters only; the other adapter has no gradient here
    norm = torch.nn.utils.clip_grad_norm_(params, grad_clip)
    optimizer.step()
    return {**total, "grad_norm": float(norm)}


def pad_rows(rows):
    """List of (R_i,) tensors -> (N, R), zero-padded."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
