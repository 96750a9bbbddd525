"""Decide how difficult a task is, how difficult it should be, and which tasks are varied next.

Paper: success rate (Eq. 2), environment reward R_env (Eq. 3), the k_min filter, and the choice of
seed tasks for the simulator. Each of them is a plain function. The world computes the reward of an
attempt, Eq. 1 (worlds/NAME.py: score); an agent reward below may change it for GRPO.

Usage: genenv.py, interaction.py and support/run.py call these functions. The options
--alpha-schedule, --difficulty-reward, --seed-selection and --agent-reward each take the name of one
of them, without its prefix. The defaults are constant, bell, uniform and plain.

To add a schedule, write a function whose name starts with `alpha_`, anywhere in this file:

    def alpha_warmup(c):
        # easy tasks first, alpha from then on
        return 0.7 if c.epoch <= 3 else c.alpha

and run `python genenv.py --alpha-schedule warmup`. `Context` below lists what `c` holds. A
difficulty reward is a function of (p_hat, alpha, beta) whose name starts with `reward_`, a seed
selection is a function of (p_hats, alpha) whose name starts with `seeds_`, and an agent reward is a
function of an attempt (data_pool.Trace) whose name starts with `agent_reward_`. The name registers
the function, so there is no list to extend.

Deviations: the paper keeps alpha at 0.5; here it may follow a schedule. The paper measures p_hat on
a batch of variations; here it is measured by default on one task with G rollouts (--p-hat-unit). At
G = 8 and alpha = 0.5, the paper's k_min = 0.1 keeps only tasks solved exactly 4 times. Our 0.26
keeps those solved 2 to 6 times.

Symbols: p_hat is the success rate in [0, 1], alpha the target success rate in (0, 1), beta the
sharpness of the bell curve in Eq. 3, k_min half the width of the band that the simulator learns
from.
"""
import inspect
import math
from dataclasses import dataclass

import torch

from errors import checked, wrong_value


@dataclass(frozen=True)
class Context:
    """Hold what a schedule may use. Held-out results are left out: they are only for reporting."""
    epoch: int          # 1 .. epochs
    epochs: int
    alpha: float        # --alpha, where linear, cosine and step start
    alpha_end: float    # --alpha-end, where they end
    previous: float     # alpha of the previous epoch; in epoch 1 this is --alpha
    new_tasks: int      # how many new tasks the previous epoch had
    # The next five were measured on the new tasks of the latest epoch that had any. Until there is
    # one, they have these values.
    success_rate: float = 0.5  # of the agent
    # share of tasks whose attempts differ in reward (Eq. 1): by default GRPO learns only from them
    mixed_share: float = 0.0
    solved: float = 0.0        # share of tasks solved in each of their G attempts
    unsolved: float = 0.0      # share of tasks solved in none
    # mixed_share / (1 - s^G - (1 - s)^G) with s = success_rate: about 1 if all tasks are equally
    # hard, less if some are too easy and others too hard; None if s is 0 or 1
    mixed_of_possible: float | None = None

    @property
    def progress(self) -> float:
        """Return how far along the run is: 0 in the first epoch, 1 in the last."""
        return (self.epoch - 1) / max(1, self.epochs - 1)


SUCCESS = 0.5  # the lowest reward that counts as a success; the paper gives no threshold


def success_rate(rewards) -> float:
    """Return the fraction of n attempts that succeeded, Eq. 2. rewards: n numbers in [0, 1].

    A structured answer earns 0 or 1. A free-form answer earns its similarity to the reference; it
    succeeds if that is at least SUCCESS. Raise ZeroDivisionError if n = 0.
    """
    return sum(r >= SUCCESS for r in rewards) / len(rewards)  # Eq. 2: p_hat = k / n


def in_band(p_hat: float, alpha: float, k_min: float) -> bool:
    """Return whether the simulator may learn from a task: |p_hat - alpha| <= k_min, edges included.

    The p_hat of a task is a multiple of 1/G: with alpha = 0.5, k_min = 0.1 and G = 8, only 4/8 is
    in the band.
    """
    # 1e-9 allows for rounding: in floating point 0.8 - 0.7 exceeds 0.1
    return abs(p_hat - alpha) <= k_min + 1e-9  # filter: |p_hat - alpha| <= k_min


# ---------------------------------------------------------------------------------------------
# difficulty rewards: functions of (p_hat, alpha, beta) -> R_env


def reward_bell(p_hat, alpha, beta):
    """Return R_env as in the paper (Eq. 3): a Gaussian bell that is 1 where p_hat equals alpha."""
    return math.exp(-beta * (p_hat - alpha) ** 2)  # Eq. 3: R_env


# ---------------------------------------------------------------------------------------------
# agent rewards: functions of an attempt e -> the reward r in [0, 1] that GRPO trains on
#     e.reward     Eq. 1 as the world computes it, in [0, 1]
#     e.graded     the same with partial credit
#     e.valid      whether the response has the form that the world asks for
#     e.truncated  whether it ran into a length or turn limit, or drew a control token
#     e.tokens     how many tokens the agent drew
#     e.text       the response; for an episode the transcript
# Whatever GRPO trains on, p_hat and held-out success use e.reward.


def agent_reward_plain(e):
    """Return the reward of Eq. 1; a truncated attempt earns nothing."""
    # a truncated attempt already has e.reward 0: the condition is a model for your own function
    return 0.0 if e.truncated else e.reward


def agent_reward_graded(e):
    """Return the reward with partial credit, so that attempts may differ even if all of them fail.

    The method `graded` of the world defines the credit; that of tool_calls follows Tool-R0 (arXiv
    2602.21320). In a world without such a method the reward is Eq. 1.
    """
    return 0.0 if e.truncated else e.graded


# ---------------------------------------------------------------------------------------------
# alpha schedules: functions of a Context c -> the alpha of this epoch. A low alpha asks for hard
# tasks. RWR uses this alpha at the end of the epoch, so it shapes the tasks of the *next* epoch,
# and in the last epoch it shapes none. Only the selection of seed tasks (seeds_) uses it at once.


def alpha_constant(c):
    """Keep alpha throughout, as in the paper."""
    return c.alpha


def alpha_linear(c):
    """Follow a straight line from alpha to alpha_end."""
    return c.alpha + (c.alpha_end - c.alpha) * c.progress


def alpha_cosine(c):
    """Follow a half cosine from alpha to alpha_end: slow, fast, slow."""
    return c.alpha_end + (c.alpha - c.alpha_end) * (1 + math.cos(math.pi * c.progress)) / 2


def alpha_step(c):
    """Return alpha in the first half of the run, alpha_end in the second."""
    return c.alpha if c.progress < 0.5 else c.alpha_end


def alpha_adaptive(c):
    """Reflect the latest success rate about alpha: alpha + (alpha - success), within [0.05, 0.95].

    If success is 0.1 above alpha, the target is 0.1 below alpha, which asks for harder tasks.
    """
    return min(0.95, max(0.05, c.alpha + (c.alpha - c.success_rate)))


def alpha_integral(c):
    """Integrate the error alpha - success: start at alpha / 2 and add 0.3 times the latest error in
    each epoch, within [0.05, 0.95].

    Between these limits the schedule settles only where success equals --alpha.
    """
    # RWR uses this alpha, and the tasks that it shapes are attempted in the next epoch, when the
    # agent is better. So begin by asking for harder ones.
    start = c.previous if c.epoch > 1 else c.alpha / 2
    # without new tasks `success_rate` is an old value, whose error has been added already
    error = c.alpha - c.success_rate if c.new_tasks else 0
    return min(0.95, max(0.05, start + 0.3 * error))


def alpha_balanced(c):
    """Steer towards equal numbers of new tasks that are never solved and that are always solved.

    The success rate itself does not matter. Another schedule, which moved alpha towards the mean
    p_hat of the tasks whose attempts differed in reward, drifted towards ever easier tasks
    (EXPERIMENTS.md).
    """
    # without new tasks the shares are old ones, which have been used already
    step = 0.2 * (c.unsolved - c.solved) if c.new_tasks else 0.0
    return min(0.95, max(0.05, c.previous + step))


# ---------------------------------------------------------------------------------------------
# selection of seed tasks, which the simulator is asked to vary: functions of (p_hats of recent
# tasks, alpha) -> a weight for each of these tasks; the weights need not sum to 1


def seeds_uniform(p_hats, alpha):
    """Give every recent task the same weight."""
    return [1.0] * len(p_hats)


def seeds_curated(p_hats, alpha):
    """Prefer tasks whose last p_hat was near alpha; at a distance of 0.25 the weight is 0.29."""
    return [math.exp(-20 * (p - alpha) ** 2) for p in p_hats]


def select_seed_tasks(selection, base, recent, n, base_share, alpha, generator):
    """Draw n seed tasks with replacement: each is a base task with probability base_share, for
    coverage, and otherwise a recent task of the pool.

    selection: the name of a seeds_ function, without its prefix. base: the base tasks. recent: a
    list of (task, p_hat). generator: on the CPU. If there are no recent tasks, or if all weights
    are 0, all n come from base. Raise UserError unless there is one weight per recent task, and
    each is a non-negative number.
    """
    n_base = n if not recent else int((torch.rand(n, generator=generator) < base_share).sum())
    chosen = [base[i] for i in torch.randint(len(base), (n_base,), generator=generator).tolist()]
    if n > n_base:
        weigh = functions("seeds_")[selection]
        weights = weigh([p for _, p in recent], alpha)
        if len(weights) != len(recent):
            raise wrong_value(weigh, "a weight for each p_hat", weights, f"{len(recent)} p_hats")
        weights = torch.tensor([checked(weigh, w, 0) for w in weights], dtype=torch.float32)
        source = [task for task, _ in recent]
        if not weights.any():
            weights, source = torch.ones(len(base)), base
        picks = torch.multinomial(weights, n - n_base, replacement=True, generator=generator)
        chosen += [source[i] for i in picks.tolist()]
    return chosen


# ---------------------------------------------------------------------------------------------
# finding and calling the functions that the options name, which may be a user's own


def functions(prefix: str) -> dict:
    """Return {name without prefix: function} for all functions of this file whose names start with
    a prefix such as alpha_."""
    by_name = {}
    for name, value in globals().items():
        if name.startswith(prefix) and inspect.isfunction(value):
            by_name[name.removeprefix(prefix)] = value
    return by_name


def next_alpha(schedule: str, context: Context) -> float:
    """Return this epoch's alpha. Raise UserError if the schedule does not return one in (0, 1)."""
    function = functions("alpha_")[schedule]
    return checked(function, function(context), 1e-9, 1 - 1e-9)


def R_env(difficulty_reward: str, p_hat: float, alpha: float, beta: float) -> float:
    """Return the environment reward of a task: Eq. 3, or the function that replaces it.

    Raise UserError if it is not a finite number.
    """
    function = functions("reward_")[difficulty_reward]
    return checked(function, function(p_hat, alpha, beta))


def agent_reward(name: str, trace) -> float:
    """Return an attempt's reward for GRPO: Eq. 1, or the function that replaces it. trace: the
    attempt, a data_pool.Trace.

    Raise UserError if it is not a number in [0, 1].
    """
    function = functions("agent_reward_")[name]
    return checked(function, function(trace), 0, 1)
