"""How difficult is a task, how difficult should it be, and which tasks are varied next?

Paper: success rate (Eq. 2), environment reward R_env (Eq. 3), the k_min filter, and the choice of
seed tasks for the simulator. Everything is a plain function. The reward of an attempt (Eq. 1) is
computed by the world (worlds/NAME.py: score); an agent reward below may change it for GRPO.

Usage: genenv.py calls it; the names of the functions below are the values of the options
--alpha-schedule, --difficulty-reward, --seed-selection and --agent-reward.

To add a schedule, write one function anywhere in this file whose name starts with `alpha_`:

    def alpha_warmup(c):
        # easy tasks first, alpha from then on
        return 0.7 if c.epoch <= 3 else c.alpha

and start `python genenv.py --alpha-schedule warmup`. A difficulty reward is a function of
(p_hat, alpha, beta) whose name starts with `reward_`, a seed selection one of (p_hats, alpha)
starting with `seeds_`, an agent reward one of an attempt (data_pool.Trace) starting with
`agent_reward_`. There is no list to extend.

Deviations: the paper keeps alpha at 0.5; here it may follow a schedule. The unit of p_hat is open
in the paper: one task instance with G rollouts by default (--p-hat-unit).

Symbols: p_hat success rate in [0, 1], alpha target success rate in (0, 1), beta sharpness of the
bell, k_min half width of the band that the environment learns from.
"""
import inspect
import math
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from data_pool import Trace
from model.files import UserError

SUCCESS = 0.5  # the lowest reward that counts as a success; the paper gives no threshold


def success_rate(rewards) -> float:
    """Eq. 2: the fraction of n attempts that succeeded. rewards: n numbers in [0, 1].

    A structured answer earns 0 or 1. A free-form one earns its similarity, and is a success if that
    is at least SUCCESS. Raises ZeroDivisionError if n = 0.
    """
    return sum(r >= SUCCESS for r in rewards) / len(rewards)  # Eq. 2: p_hat = k / n


def in_band(p_hat: float, alpha: float, k_min: float) -> bool:
    """The filter: the environment learns only from |p_hat - alpha| <= k_min (edges included).

    p_hat moves in steps of 1/G: at alpha = 0.5, k_min = 0.1 with G = 8 keeps only exactly 4/8.
    """
    # the 1e-9: in floating point 0.8 - 0.7 exceeds 0.1
    return abs(p_hat - alpha) <= k_min + 1e-9  # filter: |p_hat - alpha| <= k_min


# ---------------------------------------------------------------------------------------------
# difficulty rewards: functions of (p_hat, alpha, beta) -> R_env


def reward_bell(p_hat, alpha, beta):
    """Eq. 3, the paper's: 1 at the target, falling off like a Gaussian."""
    return math.exp(-beta * (p_hat - alpha) ** 2)  # Eq. 3: R_env


# ---------------------------------------------------------------------------------------------
# agent rewards: functions of an attempt e -> the reward r in [0, 1] that GRPO trains on
# e.reward: Eq. 1 as the world computes it, in [0, 1]; e.graded: the same with partial credit; e.valid:
# the response has the form that the world asks for; e.truncated: it ran into a limit of length or of
# turns; e.tokens: its length; e.text. p_hat and held-out success are of e.reward, whatever is chosen


def agent_reward_plain(e):
    """Eq. 1; a response that never ended earns nothing."""
    return 0.0 if e.truncated else e.reward


def agent_reward_graded(e):
    """Partial credit, so that attempts which all fail may still differ. In tool_calls it is that of
    Tool-R0 (arXiv 2602.21320); a world without `graded` gives Eq. 1."""
    return 0.0 if e.truncated else e.graded


# ---------------------------------------------------------------------------------------------
# alpha schedules: functions of a small context -> the alpha of this epoch


@dataclass(frozen=True)
class Context:
    """What a schedule may look at."""
    epoch: int        # 1 .. epochs
    epochs: int
    success: float    # success rate of the agent on generated tasks, last epoch
    alpha: float      # --alpha, the value to start from
    alpha_end: float  # --alpha-end, the value to arrive at
    previous: float   # alpha of the epoch before; --alpha in the first

    @property
    def progress(self) -> float:
        """0 in the first epoch, 1 in the last."""
        return (self.epoch - 1) / max(1, self.epochs - 1)


def alpha_constant(c):
    """The paper's: alpha throughout."""
    return c.alpha


def alpha_linear(c):
    """A straight line from alpha to alpha_end."""
    return c.alpha + (c.alpha_end - c.alpha) * c.progress


def alpha_cosine(c):
    """A half cosine from alpha to alpha_end: slow, fast, slow."""
    return c.alpha_end + (c.alpha - c.alpha_end) * (1 + math.cos(math.pi * c.progress)) / 2


def alpha_step(c):
    """alpha in the first half of the run, alpha_end in the second."""
    return c.alpha if c.progress < 0.5 else c.alpha_end


def alpha_adaptive(c):
    """Overshoot: alpha + (alpha - last success). An agent that wins too often gets harder tasks."""
    return min(0.95, max(0.05, c.alpha + (c.alpha - c.success)))


def alpha_integral(c):
    """Integral controller: start at alpha / 2, then add 0.3 x (alpha - last success), within [0.05,
    0.95]. Between these limits it rests only where success is --alpha."""
    # start low: p_hat is measured before the update that makes these tasks easier
    start = c.previous if c.epoch > 1 else c.alpha / 2
    return min(0.95, max(0.05, start + 0.3 * (c.alpha - c.success)))


# ---------------------------------------------------------------------------------------------
# seed tasks, which the simulator is asked to vary: functions of (p_hats of recent tasks, alpha) ->
# a weight for each task; the weights need not sum to 1


def seeds_uniform(p_hats, alpha):
    """Every recent task alike."""
    return [1.0] * len(p_hats)


def seeds_curated(p_hats, alpha):
    """Prefer tasks that were near alpha when last measured."""
    return [math.exp(-20 * (p - alpha) ** 2) for p in p_hats]


def select_seed_tasks(base, recent, n, base_share, weigh, alpha, generator):
    """n seed tasks: a share from the base set for coverage, the rest from recent pool tasks.

    base: tasks; recent: list of (task, p_hat); weigh: one of the seeds_ functions. While there are
    no recent tasks, or all have weight 0, all come from base. Drawn with replacement; generator: on
    the CPU.
    """
    import torch  # here and not above: options and --help are read without it
    n_base = n if not recent else int((torch.rand(n, generator=generator) < base_share).sum())
    chosen = [base[i] for i in torch.randint(len(base), (n_base,), generator=generator).tolist()]
    if n > n_base:
        weights = torch.tensor(weigh([p for _, p in recent], alpha), dtype=torch.float32)
        source = [task for task, _ in recent]
        if not weights.any():
            weights, source = torch.ones(len(base)), base
        picks = torch.multinomial(weights, n - n_base, replacement=True, generator=generator)
        chosen += [source[i] for i in picks.tolist()]
    return chosen


# ---------------------------------------------------------------------------------------------
# the functions that options name, a user's own among them


# 1e30: far inside of what a float32 holds, as infinity is not
RULES = {  # prefix: (whether such a function's value is good for these arguments, what it must be)
    "alpha_": (lambda a, c: 0 < a < 1, "a number between 0 and 1"),
    "reward_": (lambda r, *_: abs(r) < 1e30, "a finite number"),
    "agent_reward_": (lambda r, e: 0 <= r <= 1, "a number from 0 to 1"),
    "seeds_": (lambda ws, p_hats, alpha: len(ws) == len(p_hats) and all(0 <= w < 1e30 for w in ws),
               "a list of weights, one for each p_hat, finite and not negative")}


def named(prefix: str) -> dict:
    """{name: function} for a prefix such as alpha_ or reward_, wherever in this file they are. What goes
    wrong in one of them is reported in one line, see call_user."""
    return {key[len(prefix):]: partial(call_user, prefix, f) for key, f in globals().items()
            if key.startswith(prefix) and inspect.isfunction(f)}


def call_user(prefix, f, *args):
    """f(*args) in plain numbers, where f may be a user's own. Raises UserError with the line on which f
    failed, or where it begins if its value breaks the rule: NaN would train on without a word."""
    (holds, rule), code = RULES[prefix], f.__code__
    try:
        value = f(*args)
    except (Exception, SystemExit) as error:  # whatever such a function may raise
        calls = traceback.extract_tb(error.__traceback__)
        line = [code.co_firstlineno, *(t.lineno for t in calls if t.name == code.co_name)][-1]
        raise UserError(f"{code.co_filename}, line {line}: {f.__name__} raised {type(error).__name__}: "
                        f"{' '.join(str(error).split()):.200}, given {str(args):.200}") from None
    with suppress(Exception):  # of another kind than numbers: refused like a wrong number
        if holds(value, *args):
            return [float(value[i]) for i in range(len(value))] if prefix == "seeds_" else float(value)
    raise UserError(f"{code.co_filename}, line {code.co_firstlineno}: {f.__name__} must give {rule}; "
                    f"it gave {value!r:.200} for {', '.join(map(repr, args)):.200}")


def next_alpha(schedule: str, context: Context) -> float:
    """alpha of this epoch. Raises UserError if a schedule leaves (0, 1)."""
    return named("alpha_")[schedule](context)


def source(*names) -> list[str]:
    """The code of functions in this file: in another run the same name may have meant something else."""
    return [inspect.getsource(globals()[name]) for name in names]


def try_functions(o):
    """Call every function that the options name as a run would, before anything is trained: a mistake in
    one should not end a run after some epochs. Raises UserError in one line."""
    for success in (0.5, 0.0, 1.0):
        alpha = o.alpha
        for t in range(1, o.epochs + 1)[:1000]:
            alpha = next_alpha(o.alpha_schedule, Context(t, o.epochs, success, o.alpha, o.alpha_end, alpha))
    for k in range(o.G + 1)[:1000]:
        named("reward_")[o.difficulty_reward](k / o.G, o.alpha, o.beta)
    for n in (1, 3, 50):
        named("seeds_")[o.seed_selection]([k % (o.G + 1) / o.G for k in range(n)], o.alpha)
    for reward, valid, cut, n in ((1.0, True, False, 1), (1.0, True, False, o.max_response_tokens),
                                  (0.0, False, False, 1), (0.0, False, True, o.max_response_tokens)):
        named("agent_reward_")[o.agent_reward](Trace("7 " * (n - 1), reward, valid, cut, n, reward))
