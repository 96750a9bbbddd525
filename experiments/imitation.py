"""A rival of GRPO: the agent learns the expected answers of its tasks by likelihood.

What of the paper this is: nothing; it is what a data pipeline does with generated tasks. The loop
stays as it is, with the same tasks, attempts and updates; only `update_agent` is another.

    python -m experiments.imitation [options of genenv.py]
"""
import sys

import torch

import genenv
from grpo import finite_step, subset
from policy import split_groups
from rwr import weighted_nll
from watch import measure


def imitate(run, trials) -> dict:
    """One step of AdamW on the mean negative log-likelihood of the expected answers, in place of
    GRPO; the statistics have the names of grpo_update's."""
    o, policy = run.o, run.policy
    groups = [(trial.prompt, [policy.encode(run.world.gold(trial.task)) + policy.eos_ids[:1]])
              for trial in trials]
    tokens = sum(len(responses[0]) for _, responses in groups)
    run.agent_optimizer.zero_grad(set_to_none=True)
    with policy.use("agent"), measure.movement(policy, "agent") as moved:
        total = 0.0
        for batch in split_groups(groups, o.token_budget):
            logp, mask = policy.logprobs(subset(groups, batch), o.temperature, o.grad_checkpoint)
            loss = weighted_nll(logp, mask, torch.ones(len(logp)).to(logp), tokens)
            loss.backward()
            total += float(loss)
        norm, finite = finite_step(policy.params["agent"], run.agent_optimizer, 1.0, total)
    return {"kl": 0.0, "clip_fraction": 0.0, "grad_norm": float(norm), "zero_variance": 0.0,
            "trained_tokens": tokens, "mismatch_mean": 0.0, "mismatch_max": 0.0,
            "skipped_steps": int(not finite), **moved}


if __name__ == "__main__":
    genenv.update_agent = imitate
    sys.exit(genenv.main())
