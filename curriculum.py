"""Decide how difficult a task is, how difficult it should be, and which tasks are varied next.

Paper: success rate (Eq. 2), environment reward R_env (Eq. 3), the k_min filter, and the choice of
seed tasks for the simulator. Everything is a plain function. The reward of an attempt (Eq. 1) is
computed by the world (worlds/NAME.py: score); an agent reward below may change it for GRPO.

Usage: genenv.py calls these functions. Their names, without the prefix, are the values of the
options --alpha-schedule, --difficulty-reward, --seed-selection and --agent-reward.

To add a schedule, write one function anywhere in this file whose name starts with `alpha_`:

    def alpha_warmup(c):
        # easy tasks first, alpha from then on
        return 0.7 if c.epoch <= 3 else c.alpha

and run `python genenv.py --alpha-schedule warmup`. `Context` below lists what `c` holds. A
difficulty reward is a function of (p_hat, alpha, beta) whose name starts with `reward_`, a seed
selection is a function of (p_hats, alpha) whose name starts with `seeds_`, and an agent reward is a
function of an attempt (data_pool.Trace) whose name starts with `agent_reward_`. No list has to be
extended.

Deviations: the paper keeps alpha at 0.5; here it may follow a schedule. The paper measures p_hat on
a batch of variations; here, by default, it is measured on one task with G rollouts (--p-hat-unit).
At G = 8 the paper's k_min = 0.1 keeps only tasks solved exactly 4 times; our 0.26 keeps those
solved 2 to 6 times.

Symbols: p_hat is the success rate in [0, 1], alpha the target success rate in (0, 1), beta the
sharpness of the bell, k_min half the width of the band that the simulator learns from.
"""
import inspect
import math
from dataclasses import dataclass

import torch

from errors import checked, wrong_value


@dataclass(frozen=True)
class Context:
    """Hold what a schedule may use. It knows nothing of held-out tasks: they are only reported."""
    epoch: int          # 1 .. epochs
    epochs: int
    alpha: float        # --alpha, where a schedule starts
    alpha_end: float    # --alpha-end, where it ends
    previous: float     # alpha of the epoch before; --alpha in the first
    new_tasks: int      # how many new tasks the previous epoch had
    # measured in the latest epoch that had new tasks; before the first one: 0.5, 0, zeros and None
    success: float      # success rate of the agent
    mixed_share: float  # share of tasks whose attempts differ in reward: GRPO learns only from them
    p_hat_counts: list  # how many tasks were solved 0, 1, ... G times: G+1 numbers
    # mixed_share / (1 - s^G - (1 - s)^G) with s = success: 1 if all tasks are equally hard, less if
    # some are too easy and others too hard; None where s is 0 or 1
    mixed_of_possible: float | None

    @property
    def progress(self) -> float:
        """Return how far along the run is: 0 in the first epoch, 1 in the last."""
        return (self.epoch - 1) / max(1, self.epochs - 1)


SUCCESS = 0.5  # the lowest reward that counts as a success; the paper gives no threshold


def success_rate(rewards) -> float:
    """Return the fraction of n attempts that succeeded, Eq. 2. rewards: n numbers in [0, 1].

    A structured answer earns 0 or 1. A free-form one earns its similarity, and is a success if that
    is at least SUCCESS. Raise ZeroDivisionError if n = 0.
    """
    return sum(r >= SUCCESS for r in rewards) / len(rewards)  # Eq. 2: p_hat = k / n


def in_band(p_hat: float, alpha: float, k_min: float) -> bool:
    """Return whether the simulator may learn from a task: |p_hat - alpha| <= k_min, edges included.

    p_hat moves in steps of 1/G: at alpha = 0.5, k_min = 0.1 with G = 8 keeps only exactly 4/8.
    """
    # the 1e-9: in floating point 0.8 - 0.7 exceeds 0.1
    return abs(p_hat - alpha) <= k_min + 1e-9  # filter: |p_hat - alpha| <= k_min


# ---------------------------------------------------------------------------------------------
# difficulty rewards: functions of (p_hat, alpha, beta) -> R_env


def reward_bell(p_hat, alpha, beta):
    """Return R_env of Eq. 3, as in the paper: 1 at the target, falling like a Gaussian."""
    return math.exp(-beta * (p_hat - alpha) ** 2)  # Eq. 3: R_env


# ---------------------------------------------------------------------------------------------
# agent rewards: functions of an attempt e -> the reward r in [0, 1] that GRPO trains on
#     e.reward     Eq. 1 as the world computes it, in [0, 1]
#     e.graded     the same with partial credit
#     e.valid      whether the response has the form that the world asks for
#     e.truncated  whether it ran into a limit of length or of turns, or drew a control token
#     e.tokens     how many tokens the agent drew
#     e.text       the response; for an episode the transcript
# p_hat and held-out success always use e.reward


def agent_reward_plain(e):
    """Return the reward of Eq. 1; an attempt that was cut off earns nothing."""
    # e.reward is already 0 then: the condition is a pattern for your own function
    return 0.0 if e.truncated else e.reward


def agent_reward_graded(e):
    """Return the reward with partial credit, so that attempts may differ even if all fail.

    In tool_calls it is the credit of Tool-R0 (arXiv 2602.21320). A world without `graded` gives
    Eq. 1.
    """
    return 0.0 if e.truncated else e.graded


# ---------------------------------------------------------------------------------------------
# alpha schedules: functions of a Context c -> the alpha of this epoch. A low alpha asks for hard
# tasks. RWR uses this alpha at the end of the epoch, so it shapes the *next* epoch's tasks; the
# last epoch's alpha shapes none. Only a seeds_ function uses it immediately.


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

    An agent whose success is 0.1 above alpha gets a target 0.1 below it, that is, harder tasks.
    """
    return min(0.95, max(0.05, c.alpha + (c.alpha - c.success)))


def alpha_integral(c):
    """Integrate the error: start at alpha / 2, then add 0.3 x (alpha - last success) in each epoch,
    within [0.05, 0.95].

    Between these limits it settles only where success equals --alpha.
    """
    # Tasks written at this alpha are tried an epoch later, when the agent has improved, so ask for
    # harder ones at first.
    start = c.previous if c.epoch > 1 else c.alpha / 2
    # without new tasks `success` is old, and its error has been added already
    error = c.alpha - c.success if c.new_tasks else 0
    return min(0.95, max(0.05, start + 0.3 * error))


def alpha_balanced(c):
    """Steer towards equal numbers of new tasks that are never solved and always solved, at any
    success rate.

    A schedule that follows the mixed groups instead drifts towards ever easier tasks
    (EXPERIMENTS.md).
    """
    never, always = c.p_hat_counts[0], c.p_hat_counts[-1]
    step = 0.0
    if c.new_tasks:  # otherwise the counts are old, and have been used already
        step = 0.2 * (never - always) / sum(c.p_hat_counts)
    return min(0.95, max(0.05, c.previous + step))


# ---------------------------------------------------------------------------------------------
# seed tasks, which the simulator is asked to vary: functions of (p_hats of recent tasks, alpha) ->
# a weight for each task; the weights need not sum to 1


def seeds_uniform(p_hats, alpha):
    """Give every recent task the same weight."""
    return [1.0] * len(p_hats)


def seeds_curated(p_hats, alpha):
    """Prefer tasks that were near alpha when last measured; 0.25 away the weight is 0.29."""
    return [math.exp(-20 * (p - alpha) ** 2) for p in p_hats]


def select_seed_tasks(selection, base, recent, n, base_share, alpha, generator):
    """Draw n seed tasks with replacement: each comes from the base set with probability base_share,
    for coverage, else from recent tasks of the pool.

    selection: name of a seeds_ function. base: tasks. recent: list of (task, p_hat). If there are no
    recent tasks, or all have weight 0, all come from base. generator: one on the CPU. Raise
    UserError if a weight is negative or not a number, or if there is not exactly one per recent
    task.
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
# the functions that options name, including a user's own


def functions(prefix: str) -> dict:
    """Return {name: function} for all functions with a prefix such as alpha_, wherever they are in
    this file."""
    by_name = {}
    for name, value in globals().items():
        if name.startswith(prefix) and inspect.isfunction(value):
            by_name[name.removeprefix(prefix)] = value
    return by_name


def next_alpha(schedule: str, context: Context) -> float:
    """Return the alpha of this epoch. Raise UserError if the schedule leaves (0, 1)."""
    function = functions("alpha_")[schedule]
    return checked(function, function(context), 1e-9, 1 - 1e-9)


def R_env(difficulty_reward: str, p_hat: float, alpha: float, beta: float) -> float:
    """Return the environment reward of a task, Eq. 3 or what replaces it. Raise UserError if it is
    not a finite number."""
    function = functions("reward_")[difficulty_reward]
    return checked(function, function(p_hat, alpha, beta))


def agent_reward(name: str, trace) -> float:
    """Return the reward that GRPO gets for an attempt (data_pool.Trace), Eq. 1 or what replaces it.
    Raise UserError if it is outside [0, 1]."""
    function = functions("agent_reward_")[name]
    return checked(function, function(trace), 0, 1)
