"""The loop with one of its functions replaced: rewards made blind or noisy, and a rival of GRPO.

    python -m experiments.controls NAME [options of genenv.py]

What of the paper this is: nothing. Whoever claims that r, or p_hat, does the work compares with a
run in which it is drawn like a coin or handed to another task (`python -m experiments which`).
What a data pipeline does with generated tasks is imitation: the agent learns their expected answers
by likelihood. Tasks, attempts and everything else stay as they are in a run.

How it is run: by that command; in a suite the option @NAME stands for it. NAME is a key of
CONTROLS. Random numbers come from the run's own generator: resumed by the same command, a run with a
control goes on to the bit.
"""
import dataclasses
import sys
from functools import partial

import torch

from common.cli import exit_code
from common.files import UserError
import genenv
from policy import Rollout
from rwr import rwr_step


def coin_agent(grpo_update, policy, adapter, optimizer, rollouts, rewards, o, generator):
    """The rewards (B, G) that GRPO trains on are coins."""
    coins = torch.randint(2, rewards.shape, generator=generator).float()
    return grpo_update(policy, adapter, optimizer, rollouts, coins, o, generator)


def coin_p_hat(env_records, run, generations, trials):
    """The p_hat of each generation is the mean of G coins: R_env, filter and weights are blind."""
    blind = lambda n: torch.randint(2, (n, run.o.G), generator=run.rng).float().mean(1).tolist()
    return with_p_hats(env_records, run, generations, trials, lambda p_hats: blind(len(p_hats)))


def shuffled_r_env(env_records, run, generations, trials):
    """The p_hats of a step's generations, and so their R_env, are handed to other tasks."""
    shuffle = lambda p_hats: [p_hats[i] for i in
                              torch.randperm(len(p_hats), generator=run.rng).tolist()]
    return with_p_hats(env_records, run, generations, trials, shuffle)


def with_p_hats(env_records, run, generations, trials, change):
    """genenv.env_records with `change` of the p_hats of what the simulator wrote."""
    measured = {trial.task.id: trial for trial in trials}
    written = [measured[g.task.id] for g in generations if g.prompt]
    p_hats = change([trial.p_hat for trial in written]) if written else []
    return env_records(run, generations, [dataclasses.replace(trial, p_hat=p)
                                          for trial, p in zip(written, p_hats)])


def noise(share, trace_of, run, *attempt):
    """A reward r becomes 1 - r with probability `share`, before p_hat is taken."""
    trace = trace_of(run, *attempt)
    flip = torch.rand((), generator=run.rng) < share
    return dataclasses.replace(trace, reward=1 - trace.reward) if flip else trace


def imitate(update_agent, run, trials) -> dict:
    """One step of AdamW on the mean negative log-likelihood of the expected answers, in place of
    GRPO; the statistics have the names of grpo_update's."""
    policy = run.policy
    answers = [Rollout(i, trial.rollouts[0].prompt,
                       policy.encode(run.world.gold(trial.task)) + policy.eos_ids[:1])
               for i, trial in enumerate(trials)]
    with run.phase("agent update (imitation)", "agent") as moved, policy.use("agent"):
        _, norm, finite = rwr_step(policy, "agent", run.agent_optimizer, answers,
                                   torch.ones(len(answers)), run.o)
    return {"kl": 0.0, "clip_fraction": 0.0, "grad_norm": norm, "zero_variance": 0.0,
            "trained_tokens": sum(r.tokens for r in answers), "mismatch_mean": 0.0,
            "mismatch_max": 0.0, "skipped_steps": int(not finite), **moved}


CONTROLS = {  # name -> (function of genenv.py, what takes its place)
    "coin-agent": ("grpo_update", coin_agent),
    "coin-p-hat": ("env_records", coin_p_hat),
    "shuffled-r-env": ("env_records", shuffled_r_env),
    "noise-0.1": ("trace_of", partial(noise, 0.1)),
    "noise-0.2": ("trace_of", partial(noise, 0.2)),
    "imitation": ("update_agent", imitate),
}


def replacement(name: str) -> tuple:
    """(name of a function of genenv.py, the function in its place). Raises UserError."""
    if name not in CONTROLS:
        raise UserError(f"unknown control {name!r}: choose from {', '.join(CONTROLS)}")
    function, changed = CONTROLS[name]
    return function, partial(changed, getattr(genenv, function))


def main(argv) -> int:
    """Replace the function, then run genenv.py. Returns its exit code."""
    return exit_code(lambda: setattr(genenv, *replacement(argv[0] if argv else ""))) or \
        genenv.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
