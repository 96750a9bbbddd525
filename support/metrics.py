"""Measure a run: validation, one record per epoch, and samples to read.

Paper: the numbers behind its Figures 4-8: success rate on generated tasks, validation, task and
response length, solved and unsolved tasks. Added: entropy, mixed groups, KL, diversity of skills,
and why generated tasks were refused.

Usage: support/run.py calls `epoch_record` and `samples` at the end of every epoch; report.py and
screen.py show the record, and health.py judges it. `interval` is for runs over several seeds.

Deviations: `validation` is the mean over several sampled attempts per task, which varies less from
epoch to epoch; `validation_greedy` is the usual single attempt at temperature 0. A figure that was
not measured is null in a record, except that the last validation figures are carried forward until
the next validation.
"""
import math
from collections import Counter
from statistics import stdev

from data_pool import task_id
from interaction import try_tasks
from support import health
from worlds import NO_SEED

# the fields that a record repeats until they are measured again
VALIDATION = ("validated", "validation", "validation_rates", "validation_greedy", "validation_set",
              "validation_by", "category_name")
# 97.5 % quantiles of the t-distribution, for 1 to 14 degrees of freedom
T_95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
        2.145]


# ---------------------------------------------------------------------------------------------
# held-out tasks


def rates_on(run, tasks, G: int, temperature: float) -> list[float]:
    """Return the agent's success rate on each task over G attempts."""
    generator = run.policy.generator(3 * run.o.seed + 2)  # the same seed in every epoch
    trials = try_tasks(run.world, run.o, run.policy, tasks, G, temperature, generator)
    return [trial.p_hat for trial in trials]


def validation(run) -> dict:
    """Return success on held-out tasks: sampled, greedy and by category.

    It is measured every --val-every epochs and after the last one; in between, the figures of epoch
    "validated" are repeated. "validation_rates" lists each task's rate, grouped by category and,
    within a category, in the world's order. Runs with the same "validation_set" have the same tasks
    in the same order, so that they can be compared task by task.
    """
    o, epoch = run.o, run.state.epoch
    if epoch % o.val_every and epoch != o.epochs:
        return {key: run.history[-1][key] for key in VALIDATION}
    tasks = run.world.validation_tasks()
    sampled = rates_on(run, tasks, o.val_samples, o.temperature)
    greedy = rates_on(run, tasks, 1, 0.0)
    by_category = {}
    for task, rate in zip(tasks, sampled):
        by_category.setdefault(run.world.category(task), []).append(rate)
    return {
        "validated": epoch,
        "validation": mean(sampled),
        "validation_rates": by_category,
        "validation_greedy": mean(greedy),
        "validation_set": task_id({"held out": [(task.id, task.text) for task in tasks]}),
        # what the categories are in this world, such as "hardest tool"
        "category_name": run.world.category_name,
        "validation_by": {name: round(mean(rates), 4) for name, rates in by_category.items()},
    }


# ---------------------------------------------------------------------------------------------
# the record of an epoch


def epoch_record(run, env_stats: dict, alpha: float) -> dict:
    """Return the metrics of the epoch in run.state, JSON-ready.

    Rates and shares are in [0, 1], lengths in tokens or the world's units, KL and `entropy` in nats
    per token, `skill_entropy` in bits, times in seconds. What was not measured is None.
    """
    trials = new_trials(run.state)
    record = {
        "epoch": run.state.epoch,
        "alpha": alpha,
        **success_figures(trials, run.o.G),
        **validation(run),
        **agent_figures(run),
        **simulator_figures(run, trials, env_stats),
        # CPU time of training, excluding validation and other programs
        "cpu_seconds": run.state.cpu_seconds,
    }
    for key, value in record.items():
        if isinstance(value, float):
            record[key] = round(value, 6)
    return {**record, "warnings": health.warnings(record, run.history, run.o)}


def success_figures(trials, G: int) -> dict:
    """Measure how hard an epoch's new tasks were for the agent.

    trials: a Trial of G attempts at each task.
    """
    success = mean(trial.p_hat for trial in trials)
    # share of tasks whose attempts differ in reward (Eq. 1): by default GRPO learns only from them
    mixed_share = mean(len({e.reward for e in trial.traces}) > 1 for trial in trials)
    return {
        "distinct_tasks": len(trials),
        "success_rate": success,
        "solved": mean(trial.p_hat == 1 for trial in trials),
        "unsolved": mean(trial.p_hat == 0 for trial in trials),
        "mixed_share": mixed_share,
        # near 1 if the agent is equally unsure of all tasks; near 0 if it solves each task either
        # always or never
        "mixed_of_possible": mixed_of_possible(mixed_share, success, G),
    }


def mixed_of_possible(mixed_share, success_rate, G: int) -> float | None:
    """Return the share of mixed tasks, divided by what it would be if every attempt succeeded with
    the mean probability. None without tasks, or if that probability is 0 or 1."""
    if success_rate in (None, 0, 1):
        return None
    alike = success_rate ** G + (1 - success_rate) ** G  # all attempts right, or all wrong
    return mixed_share / (1 - alike)


def agent_figures(run) -> dict:
    """Measure the agent's attempts at all tasks of an epoch, and average the statistics of its GRPO
    updates."""
    state = run.state
    traces = [e for trial in state.trials for e in trial.traces]
    tokens = sum(e.tokens for e in traces)
    generated = [trial for trial in state.trials if trial.task.origin != "base"]
    figures = {
        # mean length of a response in tokens, excluding attempts at base tasks
        "response_length": mean(e.tokens for trial in generated for e in trial.traces),
        # entropy of the policy, in nats per token
        "entropy": state.agent_nats / tokens if tokens else None,
        "truncated": mean(e.truncated for e in traces),
    }
    # see grpo.grpo_update, and genenv.update_agent for the reward
    for key in ("reward", "kl", "clip_fraction", "grad_norm", "zero_variance", "trained_tokens",
                "mismatch"):
        figures[key] = mean(stats[key] for stats in state.agent)
    # how many steps were skipped because a loss or a gradient was not finite
    figures["skipped_steps"] = sum(stats["skipped_steps"] for stats in state.agent)
    return figures


def simulator_figures(run, trials, env_stats: dict) -> dict:
    """Measure what the simulator wrote in an epoch, and its RWR update.

    trials: those of the new tasks. env_stats: what rwr.rwr_update returned, and env_kept, the
    number of this epoch's new tasks in the band.
    """
    written = len(run.state.env_rollouts)
    figures = {
        # how many texts were written, {reason: how many were refused}, and what share are not tasks
        "written": written,
        "invalid": dict(run.state.invalid),
        "refused": None,
        "skill_entropy": entropy(
            skill for trial in trials for skill in run.world.skills(trial.task)),
        # mean length of the new tasks, in the world's unit
        "task_length": mean(run.world.task_length(trial.task) for trial in trials),
        "length_unit": run.world.length_unit,
        # how many new tasks are in the band |p_hat - alpha| <= k_min
        "env_kept": None,
    }
    if written:
        figures["refused"] = health.refused(figures) / written
        figures["env_kept"] = env_stats["env_kept"]
    # see rwr.rwr_update
    for key in ("env_steps", "env_capped", "env_skipped_steps", "env_kl", "env_kl_step",
                "env_weight_ratio"):
        figures[key] = env_stats.get(key)
    return figures


def new_trials(state):
    """Return the first Trial of each of this epoch's new tasks: a task may be tried again, but only
    its first p_hat counts."""
    first = {}
    for trial in state.trials:
        task = trial.task
        # tasks of the variants static and teacher count in every epoch that draws them
        if task.origin != "base" and (task.epoch == state.epoch or task.origin != "env"):
            first.setdefault(task.id, trial)
    return first.values()


def samples(run, n=8) -> list:
    """Return samples for a person to read: the first n tasks of the epoch, each with its seed task,
    its expected answer, and its best and worst attempt; and refused texts with their reasons."""
    records = []
    for trial in run.state.trials[:n]:
        task = trial.task
        seed_task = run.train_pool.tasks.get(task.seed_task, NO_SEED)
        traces = sorted(trial.traces, key=lambda e: e.reward)
        records.append({
            "epoch": run.state.epoch, "task": task.text,
            "origin": task.origin, "p_hat": trial.p_hat, "seed_task": seed_task.text,
            "expected": run.world.gold(task),
            "traces": [{"text": e.text, "reward": e.reward} for e in (traces[-1], traces[0])]})
    return records + run.state.refused


# ---------------------------------------------------------------------------------------------
# statistics


def mean(values) -> float | None:
    """Return the mean of the measured values, ignoring None; None if there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def entropy(labels) -> float | None:
    """Return the entropy of labels in bits, or None without labels."""
    counts = Counter(labels)
    n = counts.total()
    if not n:
        return None
    return sum(count / n * math.log2(n / count) for count in counts.values())


def interval(values, sign=True) -> str:
    """Return the mean over seeds and its 95 % t-interval as text, or just the value if there is a
    single seed.

    None (not measured) is left out. sign: whether positive figures get a plus, as differences
    should.
    """
    values = [value for value in values if value is not None]
    n, form = len(values), "+.3f" if sign else ".3f"
    if n == 0:
        return "-"
    center = mean(values)
    if n == 1:
        return format(center, form)
    t = T_95[min(n - 1, len(T_95)) - 1]
    half = t * stdev(values) / math.sqrt(n)
    return f"{center:{form}} ({center - half:{form}} to {center + half:{form}})"
