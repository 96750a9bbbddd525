"""Rewards made blind or noisy on purpose: what a study of the method switches on, and no other run.

What of the paper this is: nothing. Whoever claims that r, or p_hat, does the work compares with a
run in which it is drawn like a coin or handed to another task; `python -m experiments which` does.

How it is run: genenv.py hands its rewards and success rates through these functions; without
--control and --reward-noise they come out as they went in, and no random number is drawn.
"""
import torch


def noisy_reward(o, reward: float, generator) -> float:
    """--reward-noise: a reward r becomes 1 - r with that probability."""
    if o.reward_noise and torch.rand((), generator=generator) < o.reward_noise:
        return 1 - reward
    return reward


def agent_rewards(o, rewards, generator):
    """--control coin-agent: the rewards (B, G) that GRPO trains on are coins."""
    if o.control == "coin-agent":
        return torch.randint(2, rewards.shape, generator=generator).float()
    return rewards


def success_rates(o, p_hats, generator) -> list:
    """--control of the p_hats of a step's generations: each the mean of G coins (coin-p-hat), or
    the same ones at other tasks (shuffled-r-env: R_env follows from p_hat)."""
    if o.control == "coin-p-hat" and p_hats:
        return torch.randint(2, (len(p_hats), o.G), generator=generator).float().mean(1).tolist()
    if o.control == "shuffled-r-env":
        return [p_hats[i] for i in torch.randperm(len(p_hats), generator=generator).tolist()]
    return p_hats
