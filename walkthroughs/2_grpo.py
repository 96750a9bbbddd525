"""Run GRPO on one prompt, and show every number.

What to look at: the agent answers the prompt G = 8 times. The mean of the group's rewards is the
baseline. One optimiser step moves probability from answers whose reward is below the baseline to
those above it. Watch the last two columns of the second table: which token becomes more probable,
which become less so, and which hardly changes?
Read along: grpo.py, and Eq. 4 and Prop. 1 of the paper.
"""
# %% A policy small enough to see: two positions, eleven tokens, one table of logits.
import sys
sys.path[:0] = [".", ".."]  # find the project's modules when started in its root or in this folder

import torch

from curriculum import success_rate
from grpo import aggregate, group_advantages, grpo_loss, grpo_update, has_signal, surrogate, \
    token_kl
from policy import Rollout
from support.options import Options
from walkthroughs import canvas, keep_picture
from walkthroughs.toy import TablePolicy

torch.set_num_threads(1)
WORDS = [*"0123456789", "<eos>"]
EOS, SEVEN = 10, 7
PROMPT, RIGHT = [3, 4], [SEVEN, EOS]  # "3 + 4 =" and its answer
logits = torch.zeros(2, 11)
logits[0, SEVEN], logits[0, 6], logits[0, EOS], logits[1, EOS] = 2.5, 2.0, 1.5, 4.0
policy = TablePolicy(logits, "agent")


def p_right():
    """Return the probability of the right answer: 7, then <eos>."""
    return float(policy.probs()[0, SEVEN] * policy.probs()[1, EOS])


print(f"before: P(right answer) = {p_right():.4f}\n"
      "So: this agent is sometimes right, which is what GRPO needs.")

# %% 1. Draw G rollouts. A response ends with <eos>, or is cut off after two tokens.
G, generator = 8, torch.Generator().manual_seed(11)
draws = torch.stack([torch.multinomial(policy.probs()[t], G, replacement=True, generator=generator)
                     for t in range(2)], dim=1).tolist()  # (G, 2)
responses = [r[:1] if r[0] == EOS else r for r in draws]
rewards = torch.tensor([[float(r == RIGHT) for r in responses]])  # (B, G) with B = 1; Eq. 1
print(f"p_hat = k / n = {success_rate(rewards[0].tolist()):.3f}  (Eq. 2)")

# %% 2. Advantages. The group's mean is the baseline b of Eq. 4. The advantage is r - b, divided by
# the standard deviation of the group.
advantages = group_advantages(rewards)  # (1, G)
plain = group_advantages(rewards, scale="none")
print("\nresponse    r   r - b   advantage")
for response, r, a, gain in zip(responses, rewards[0], advantages[0], plain[0]):
    print(f"{' '.join(WORDS[i] for i in response):9s} {r:4.0f} {gain:+7.3f} {a:+11.3f}")
print("So: r - b sums to 0, and so do the advantages. The rarer outcome moves more.")

# %% 3. Surrogate and KL. Before the step, pi = pi_old = pi_ref: every ratio is 1, every KL is 0.
rollouts = [Rollout(0, PROMPT, response) for response in responses]  # one group, with one prompt
with policy.use("agent"):
    logp, mask = policy.logprobs(rollouts)  # (N, R), here N = G and R = 2; shorter rows are padded
old_logp = ref_logp = logp.detach()
tokens, rows = int(mask.sum()), len(responses)
per_token = surrogate(logp, old_logp, advantages[0])
print(f"\nresponse tokens in the mask: {tokens} of {mask.numel()} cells")
print(f"|surrogate|: {abs(aggregate(per_token, mask, tokens, rows)):.4f},"
      f" KL: {aggregate(token_kl(logp, ref_logp), mask, tokens, rows):.4f}")
print("So: the value of the loss means nothing here. What counts is its gradient.")

# %% 4. One step. If all responses were equally long, the loss would be 0, but not its gradient,
# which is that of Eq. 4 with the advantage instead of r - b. The logit of a first token that
# was never drawn has gradient 0, because the advantages sum to 0. The probability of such a token
# changes only because the logits of others do.
optimizer = torch.optim.SGD(policy.params["agent"], lr=1.0)  # a run uses AdamW
loss, stats = grpo_loss(logp, old_logp, ref_logp, advantages[0], mask, tokens, rows, kl_coef=0.001)
loss.backward()
before, gradient = policy.probs(), policy.logits.grad.clone()
optimizer.step()
print("\nfirst token   gradient    p before   p after")
for word in (7, 6, EOS, 3):
    print(f"{WORDS[word]:11s} {gradient[0, word]:+10.4f} {before[0, word]:11.4f} "
          f"{policy.probs()[0, word]:9.4f}")
print(f"after one step: P(right answer) = {p_right():.4f}\n"
      "So: 7 goes up, wrong tokens that were drawn go down, and those never drawn\n"
      "    hardly move.")

# %% 5. The same step as a run takes it. grpo_update drops groups without signal, scores the others,
# and takes the step.
by_hand = policy.logits.detach().clone()
policy.logits.data.copy_(policy.initial)
stats = grpo_update(policy, "agent", torch.optim.SGD(policy.params["agent"], lr=1.0), rollouts,
                    rewards, Options())
assert torch.allclose(policy.logits, by_hand, atol=1e-9)
print(f"\ngrpo_update: the same step, gradient norm {stats['grad_norm']:.3f}, "
      f"trained tokens {stats['trained_tokens']}")
print("So: for this group grpo_update does exactly what was done by hand above.")

# %% 6. Why tasks should be solved half of the time: the mean of (r - b)^2 if k of 8 are right.
print("\nk of 8   has signal   mean (r - b)^2 = p (1 - p), Prop. 1")
for k in (0, 1, 4, 7, 8):
    r = torch.tensor([[1.0] * k + [0.0] * (8 - k)])
    gain = group_advantages(r, scale="none").pow(2).mean()
    print(f"{k:4d} {str(bool(has_signal(r))):>11s} {gain:15.4f}")
print("So: a group that is half right teaches the most, and one that is all right or\n"
      "    all wrong teaches nothing. That is why alpha is 0.5.")
print("""
Try: manual_seed(12) in 1: which answers are drawn now, and what goes up?
     scale="none" in 2: how long is the step if one of eight is right, or four?
     kl_coef=1.0 in 4, and a second step: what holds the policy back?""")

# %% The picture: the first token before and after one step on these eight responses.
figure, axis = canvas()
for shift, probs, when in ((-0.2, before, "before"), (0.2, policy.probs(), "after")):
    axis.bar([x + shift for x in range(11)], probs[0].tolist(), width=0.4, label=f"{when} the step")
axis.set(xticks=range(11), xlabel="first token of the response (7 is right)", ylabel="probability")
axis.set_xticklabels(WORDS)
axis.legend(frameon=False)
keep_picture(figure, "2_grpo")
