"""How difficult is a task, how difficult should it be, and which tasks are varied next.

What of the paper this is: success rate (Eq. 2), environment reward R_env (Eq. 3), the k_min filter,
the weights exp(lam * R_env) of RWR, and the choice of seed tasks for the simulator. Everything is a
plain function. The reward of an attempt (Eq. 1) is the world's (worlds/NAME.py: score); a function
agent_reward_NAME below may change it before GRPO sees it.

How it is run: genenv.py calls it; the names of the functions below are the values of the options
--alpha-schedule, --difficulty-reward, --env-weights, --seed-selection, --function-selection and
--agent-reward.

To add a schedule, write one function anywhere in this file whose name starts with `alpha_`:

    def alpha_warmup(c):
        # easy tasks first, alpha from then on
        return 0.8 if c.epoch <= 3 else c.alpha

and start `python genenv.py --alpha-schedule warmup`. A difficulty reward is a function of
(p_hat, alpha, beta) whose name starts with `reward_`, weights of records one of (r_env, group, lam)
starting with `weights_`, a seed selection one starting with `seeds_`, a choice of functions to
practise one of (practised, p_hats, alpha) starting with `functions_`, an agent reward one of
(score, valid, truncated, tokens) starting with `agent_reward_`. There is no list to extend. Below a
schedule that moves alpha to reach a success write `alpha_NAME.steers = True`; below one that looks
neither at epochs nor at progress `alpha_NAME.uses_length = False`, so that runs can be prolonged.

Where it differs on purpose: the paper keeps alpha at 0.5; here it may follow a schedule. The unit
of p_hat is open in the paper: one task instance with G rollouts by default (--p-hat-unit).

Symbols: p_hat success rate in [0, 1], alpha target success rate in (0, 1), beta sharpness of the
bell, k_min half width of the band that the environment learns from, lam sharpness of the weights
(an inverse temperature). Shapes: n records.
"""
import math
from dataclasses import dataclass

from support.files import UserError

WITHOUT_SIMULATOR = ("static", "teacher", "base")  # variants with ready-made tasks alone
SUCCESS = 0.5  # reward from which an attempt is a success: the paper does not say


def success_rate(rewards) -> float:
    """Eq. 2: the share of n attempts that succeeded. rewards: n numbers in [0, 1].

    A structured answer earns 0 or 1. A free-form one earns a similarity, and is a success from
    SUCCESS on. Raises ValueError when n = 0.
    """
    if len(rewards) == 0:
        raise ValueError("the success rate of no attempts is undefined")
    return sum(r >= SUCCESS for r in rewards) / len(rewards)  # Eq. 2: p_hat = k / n


# ---------------------------------------------------------------------------------------------
# agent rewards: functions of (score, valid, truncated, tokens) -> the reward r that GRPO trains on
# score: Eq. 1 as the world computes it, in [0, 1], and 0 where truncated (worlds.attempt_score), as
# the attempt ran into a limit of length or of turns; valid: the response has the form that the
# world asks for; tokens: its length


def agent_reward_plain(score, valid, truncated, tokens):
    """Eq. 1; a response that never ended earns nothing, also where noise flips rewards (controls)."""
    return 0.0 if truncated else score


def agent_reward_length(score, valid, truncated, tokens):
    """Eq. 1 less up to a tenth for length, half of that at 100 tokens."""
    return agent_reward_plain(score, valid, truncated, tokens) * (1 - 0.1 * tokens / (tokens + 100))


# ---------------------------------------------------------------------------------------------
# difficulty rewards: functions of (p_hat, alpha, beta) -> R_env


def reward_bell(p_hat, alpha, beta):
    """Eq. 3, the paper's: 1 at the target, falling off like a Gaussian."""
    return math.exp(-beta * (p_hat - alpha) ** 2)  # Eq. 3: R_env


def reward_variance(p_hat, alpha, beta):
    """4 p (1 - p): the gradient signal of Prop. 1 (Eq. 5) itself, which knows no alpha."""
    return 4 * p_hat * (1 - p_hat)


def reward_signal(p_hat, alpha, beta):
    """Eq. 3 where there is a gradient (Prop. 1), 0 for tasks solved always or never."""
    return reward_bell(p_hat, alpha, beta) if 0 < p_hat < 1 else 0.0


def reward_tent(p_hat, alpha, beta):
    """Linear from 1 at alpha to 0 at the farther end, for comparison."""
    return 1 - abs(p_hat - alpha) / max(alpha, 1 - alpha)


# ---------------------------------------------------------------------------------------------
# the filter


def in_band(p_hat: float, alpha: float, k_min: float) -> bool:
    """The filter: the environment learns only from |p_hat - alpha| <= k_min (edges included).

    p_hat moves in steps of 1/G: at alpha = 0.5, k_min = 0.1 with G = 8 keeps only exactly 4/8.
    """
    # a little more than k_min: 0.8 - 0.7 exceeds 0.1 in floating point
    return abs(p_hat - alpha) <= k_min + 1e-9  # filter: |p_hat - alpha| <= k_min


# ---------------------------------------------------------------------------------------------
# weights of the records that the simulator imitates: functions of (r_env, group, lam) -> (n,)
# r_env (n,); group (n,): records of one group vary the same seed task in the same step


def weights_rwr(r_env, group, lam):
    """The paper's: proportional to exp(lam * R_env), mean one.

    The maximum is subtracted first, so no lam overflows; mean one keeps the learning rate's
    meaning the same for every lam.
    """
    w = (lam * r_env - (lam * r_env).max()).exp()  # RWR: w ~ exp(lam * R_env)
    return w / w.mean()


def weights_linear(r_env, group, lam):
    """Linear in R_env, from 0 for the least to the most, mean one; where all are alike, all 1."""
    w = r_env - r_env.min()
    return w / w.mean() if w.max() > 0 else w + 1


def weights_advantage(r_env, group, lam):
    """GRPO's advantages of R_env within each group; a negative one makes its record less likely. 0
    for a variation without siblings, or whose siblings earn the same."""
    w = 0 * r_env
    for g in group.unique():
        r = r_env[group == g]
        if r.max() - r.min() > 1e-6:
            w[group == g] = (r - r.mean()) / (r.std() + 1e-4)  # Eq. 4 with R_env for r
    return w


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
    signal: tuple = ()  # of the last epochs: rows as signal_by_p_hat gives them

    @property
    def progress(self) -> float:
        """0 in the first epoch, 1 in the last."""
        return (self.epoch - 1) / max(1, self.epochs - 1)


def alpha_constant(c):
    """The paper's: alpha throughout."""
    return c.alpha


alpha_constant.uses_length = False


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


alpha_adaptive.steers, alpha_adaptive.uses_length = True, False


def alpha_integral(c):
    """Integral controller: start at alpha / 2, then add 0.3 x (alpha - last success), within [0.05,
    0.95]. Between these limits it rests only where success is --alpha."""
    # starts low: p_hat is measured before the agent's update, and tasks get easier by it
    start = c.previous if c.epoch > 1 else c.alpha / 2
    return min(0.95, max(0.05, start + 0.3 * (c.alpha - c.success)))


alpha_integral.steers, alpha_integral.uses_length = True, False


def alpha_learned(c):
    """Fit a parabola to p (1 - p) at retry over p_hat, each point weighted by how many tasks it
    stands for; move 30 % towards its peak."""
    import torch
    p, signal, n = torch.tensor(c.signal or [(0, 0, 0)], dtype=torch.float64).T
    if len(p.unique()) < 3 or n.sum() < 30 or not signal.any():
        return c.previous  # a parabola through less would be noise
    powers, weight = lambda x: torch.stack([x ** 0, x, x * x], 1), n.sqrt()[:, None]
    fit = torch.linalg.lstsq(powers(p) * weight, signal[:, None] * weight).solution
    tried = torch.linspace(float(p.min()), float(p.max()), 101, dtype=torch.float64)
    peak = float(tried[(powers(tried) @ fit).argmax()])  # never beyond what was measured
    return min(0.95, max(0.05, c.previous + 0.3 * (peak - c.previous)))


alpha_learned.uses_length = False


def signal_by_p_hat(replays) -> list:
    """Rows [p_hat before, mean p (1 - p) now, n] of tasks tried again in a later epoch.

    replays: (p_hat before, epochs ago, p_hat now). p (1 - p) is the signal of Eq. 5, measured when
    GRPO trains on the task: after the updates that lie between, which is what alpha has to foresee.
    """
    found = {}
    for before, age, now in replays:
        if age >= 1:
            found.setdefault(before, []).append(now * (1 - now))  # Eq. 5
    return [[p, sum(values) / len(values), len(values)] for p, values in sorted(found.items())]


def steers(schedule: str) -> bool:
    """True: the schedule moves alpha to reach a success of --alpha. False: alpha is the target.
    Attribute `steers`, by default False."""
    return getattr(named("alpha_").get(schedule), "steers", False)


def uses_length(schedule: str) -> bool:
    """Whether a schedule looks at the number of epochs, so that a run cannot be prolonged to the
    bit. Attribute `uses_length`, by default True."""
    return getattr(named("alpha_").get(schedule), "uses_length", True)


def target_of(schedule, alpha, alpha_option):
    """The success rate aimed at in an epoch whose schedule gave `alpha`."""
    return alpha_option if steers(schedule) else alpha


# ---------------------------------------------------------------------------------------------
# seed tasks, which the simulator is asked to vary: functions of (p_hats of recent tasks, alpha) ->
# a weight for each task, not necessarily of sum 1


def seeds_uniform(p_hats, alpha):
    """Every recent task alike."""
    return [1.0] * len(p_hats)


def seeds_curated(p_hats, alpha):
    """Prefer tasks that were near alpha when last measured."""
    return [math.exp(-20 * (p - alpha) ** 2) for p in p_hats]


def select_seed_tasks(base, recent, n, base_share, weigh, alpha, generator):
    """n seed tasks: a share from the base set for coverage, the rest from recent pool tasks.

    base: tasks; recent: list of (task, p_hat); weigh: one of the seeds_ functions. While there are
    no recent tasks, or all weigh 0, all come from base. Draws with replacement from `generator` (on
    the CPU). Raises UserError if `weigh` does not give weights.
    """
    import torch  # here and not above: options and --help are read without it
    n_base = n if not recent else int((torch.rand(n, generator=generator) < base_share).sum())
    picks = torch.randint(len(base), (n_base,), generator=generator).tolist()
    chosen = [base[i] for i in picks]
    if n > n_base:
        weights = torch.tensor(_weights(weigh, [[p for _, p in recent], alpha]))
        source = [task for task, _ in recent]
        if not weights.any():
            weights, source = torch.ones(len(base)), base
        picks = torch.multinomial(weights, n - n_base, replacement=True, generator=generator)
        chosen += [source[i] for i in picks.tolist()]
    return chosen


# ---------------------------------------------------------------------------------------------
# functions to practise, in a world with a list of them: functions of (practised, p_hats, alpha) ->
# a weight for each. practised: how many generated tasks called it; p_hats: their mean, or None


def functions_uniform(practised, p_hats, alpha):
    """Every function of the list alike."""
    return [1.0] * len(practised)


def functions_near_alpha(practised, p_hats, alpha):
    """Prefer functions never practised, and those whose tasks are solved near alpha."""
    return [1.0 if n == 0 else 0.1 + math.exp(-8 * (p - alpha) ** 2)
            for n, p in zip(practised, p_hats)]


def select_functions(practice, n, weigh, alpha, generator, few=4):
    """For each of n seed tasks, up to `few` distinct names, drawn from `generator` (on the CPU).

    practice: {name: p_hats of the generated tasks that call it}, all functions in it; weigh: one of
    the functions_ functions.
    """
    names, p_hats = list(practice), list(practice.values())
    import torch
    means = [sum(p) / len(p) if p else None for p in p_hats]
    weights = torch.tensor(_weights(weigh, [[len(p) for p in p_hats], means, alpha], least=1e-30))
    rows = weights.expand(n, -1).multinomial(min(few, len(names)), generator=generator)
    return [[names[i] for i in row] for row in rows.tolist()]


# ---------------------------------------------------------------------------------------------
# what the loop calls: the function that an option names, and its value checked


def named(prefix: str) -> dict:
    """{name: function} of this file for a prefix such as alpha_, reward_ or weights_. It looks when
    it is called, so a function may stand anywhere in the file."""
    return {k[len(prefix):]: f for k, f in globals().items() if k.startswith(prefix) and callable(f)}


def next_alpha(schedule: str, context: Context) -> float:
    """alpha of this epoch. Raises UserError if a schedule leaves (0, 1)."""
    return _checked(named("alpha_")[schedule], [context], lambda a: _is_number(a) and 0 < a < 1,
                    "alpha must be a number strictly between 0 and 1")


def agent_reward(name: str, score: float, valid: bool, truncated: bool, tokens: int) -> float:
    """The reward r of one attempt. Raises UserError if an agent reward leaves [0, 1]."""
    return _checked(named("agent_reward_")[name], [score, valid, truncated, tokens],
                    lambda r: _is_number(r) and 0 <= r <= 1, "r must be a number from 0 to 1")


def r_env(name: str, p_hat: float, alpha: float, beta: float) -> float:
    """R_env of one task. Raises UserError if the function of that name gives no finite number."""
    return _checked(named("reward_")[name], [p_hat, alpha, beta],
                    lambda r: _is_number(r) and math.isfinite(r), "R_env must be a finite number")


def record_weights(name: str, records, lam: float):
    """Weights (n,) of n EnvRecords, by their R_env. Raises UserError if the function of that name
    does not give n finite numbers."""
    import torch
    rewards = torch.tensor([r.r_env for r in records])
    # groups are numbered anew in every epoch
    number = {key: i for i, key in enumerate(dict.fromkeys((r.epoch, r.group) for r in records))}
    group = torch.tensor([number[r.epoch, r.group] for r in records])
    return _checked_weights(name, rewards, group, lam) if records else rewards


def _checked_weights(name, r_env, group, lam):
    good = lambda w: getattr(w, "shape", None) == r_env.shape and bool(w.isfinite().all())
    return _checked(named("weights_")[name], [r_env, group, lam], good,
                    f"it must be a tensor of {len(r_env)} finite weights")


def _weights(weigh, args, least=0.0) -> list[float]:
    """What a seeds_ or functions_ function gives for `args`. Raises UserError if there is not one
    weight for each entry of the first."""
    n = len(args[0])
    good = lambda ws: isinstance(ws, (list, tuple)) and len(ws) == n and all(
        _is_number(w) and least <= w < 1e30 for w in ws)  # more would be infinite in fp32
    values = _checked(weigh, args, good, f"it must be a list of {n} weights, finite and "
                      f"{'positive' if least else 'not negative'}")
    return [float(w) for w in values]


def _is_number(value) -> bool:
    return isinstance(value, (int, float))


def _checked(function, args, good, rule):
    """function(*args), which a user may have written: a mistake in it is one line with its name."""
    try:
        value = function(*args)
        if good(value):
            return value
        what = f"gave {value!r:.200}: {rule}"
    except Exception as error:  # whatever such a function may raise
        what = f"raised {type(error).__name__}, {error!s:.200}"
    given = ", ".join(map(repr, args))
    name = getattr(function, "__name__", repr(function))  # functools.partial has none
    raise UserError(" ".join(f"{name} in curriculum.py {what}; it was called with "
                             f"({given:.300})".split()))


def try_functions(o):
    """Call every function that the options name on sample values, before anything is trained.

    Raises UserError in one line: for an exception, a wrong kind or length, a value out of range.
    """
    weigh, practise = named("seeds_")[o.seed_selection], named("functions_")[o.function_selection]
    p_hats = [k / o.G for k in range(o.G + 1)]  # all that Eq. 2 can give for one task
    for alpha in dict.fromkeys(sample_alphas(o, o.alpha_end)):
        for p_hat in p_hats:
            r_env(o.difficulty_reward, p_hat, alpha, o.beta)
        counts, means = list(range(len(p_hats) + 1)), [None, *p_hats]  # never practised: no p_hat
        _weights(practise, [counts, means, alpha], least=1e-30)
        if not any(_weights(weigh, [p_hats, alpha])):
            raise UserError(f"{weigh.__name__} in curriculum.py gives all p_hats the weight 0 at "
                            f"alpha {alpha:g}: some must be positive")
    for score, tokens in ((0.0, 0), (0.5, 1), (1.0, o.max_response_tokens)):
        for valid, truncated in ((True, False), (True, True), (False, False)):
            agent_reward(o.agent_reward, score, valid, truncated, tokens)


def try_weights(o):
    """try_functions for the weights of records, apart because it loads torch."""
    import torch
    rewards = torch.tensor([r_env(o.difficulty_reward, k / o.G, o.alpha, o.beta)
                            for k in range(o.G + 1)])
    for n in (1, 2, o.G + 1):  # n records, two of a group if there are so many
        _checked_weights(o.env_weights, rewards[:n], torch.arange(n) // 2, o.lam)


def sample_alphas(o, alpha_end: float) -> list[float]:
    """What the schedule gives for weak to strong agents in a run's epochs (four at least; of a long
    run the first fifty, the middle and the last). Equal lists for two values of alpha_end mean that
    it ignores --alpha-end."""
    signal = ((0.25, 0.1, 20), (0.5, 0.2, 20), (0.75, 0.1, 20))
    last = max(4, o.epochs)
    epochs = sorted({*range(1, min(last, 50) + 1), last // 2, last})
    return [next_alpha(o.alpha_schedule, Context(t, last, success, o.alpha, alpha_end, o.alpha,
                                                 signal if t > 1 else ()))
            for t in epochs for success in (0.0, 0.5, 1.0)]
