"""What a run measures: validation, one record per epoch, samples to read, movement and memory.

Paper: the numbers behind its Figures 4-8: success rate on generated tasks, validation, task and
response length, solved and unsolved tasks. Added: entropy, mixed groups, KL, effective sample
size, diversity, and the reasons why generated tasks are refused.

Usage: support/run.py calls `epoch_record` and `samples` at the end of every epoch; report.py and
screen.py show the record, health.py judges it. `interval` is for runs over several seeds.

Deviations: `validation` is the mean over several sampled attempts per task, which moves smoothly;
`validation_greedy` is the usual single attempt at temperature 0. A figure that an epoch did not
measure is null in its record; only validation is repeated until it is measured again.
"""
import math
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch

import curriculum
from data_pool import task_id
from errors import UserError
from interaction import attempt_score, play
from support import health

# fields of a record that are repeated until they are measured again
VALIDATION = ("validated", "validation", "validation_rates", "validation_greedy", "validation_set",
              "validation_by")
# of the t-distribution, by degrees of freedom
T_95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]


# ---------------------------------------------------------------------------------------------
# held-out tasks


def rates_on(run, tasks, G: int, temperature: float) -> list[float]:
    """Success rate of the agent on each of the tasks, G attempts each."""
    o, world = run.o, run.world
    generator = run.policy.generator(3 * o.seed + 2)  # the same seed in every epoch
    with run.phase("validation"):
        rollouts, texts = play(world, o, run.policy, "agent", tasks, G, temperature, generator)
    rewards = [attempt_score(world, tasks[r.group], r, text)[0] for r, text in zip(rollouts, texts)]
    return [curriculum.success_rate(rewards[b * G:(b + 1) * G]) for b in range(len(tasks))]


def validation(run) -> dict:
    """Held-out tasks: success of sampled and of greedy attempts, and by category. Measured every
    --val-every epochs and after the last one; the last measurement, of epoch "validated", is
    repeated in between. "validation_rates" has the rate of each task, by category in the world's
    own order; runs with the same "validation_set" have the same held-out tasks in the same order,
    and can be compared task by task."""
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
        "validation_by": {name: round(mean(rates), 4) for name, rates in by_category.items()},
    }


# ---------------------------------------------------------------------------------------------
# the record of an epoch


def epoch_record(run, env_stats: dict, alpha: float) -> dict:
    """The metrics of the epoch in run.state, JSON-ready. Rates and shares in [0, 1], lengths in
    tokens or the world's units, KL and `entropy` in nats per token, `skill_entropy` in bits, times
    in seconds. What was not measured is None."""
    new = new_trials(run.state)
    record = {"epoch": run.state.epoch, "alpha": alpha}
    record |= success_figures(new, run.o.G)
    record |= validation(run)
    record |= length_figures(run, new)
    record |= agent_figures(run, env_stats)
    record |= simulator_figures(run, new, env_stats)
    record |= size_figures(run, new)
    for key, value in record.items():
        if isinstance(value, float):
            record[key] = round(value, 6)
    return {**record, "warnings": health.warnings(record, run.history, run.o)}


def success_figures(new, G: int) -> dict:
    """How difficult an epoch's new tasks were for the agent. new: their Trials, G attempts each."""
    figures = {}
    # mean of p_hat (Eq. 2)
    figures["success_rate"] = mean(trial.p_hat for trial in new)
    # how many tasks were solved 0, 1, ... G times
    figures["p_hat_counts"] = p_hat_counts(new, G)
    # share of the tasks that were solved every time, and never
    figures["solved"] = mean(trial.p_hat == 1 for trial in new)
    figures["unsolved"] = mean(trial.p_hat == 0 for trial in new)
    # share of the tasks with right and wrong attempts: from others GRPO learns nothing
    figures["mixed_share"] = mean(len({e.reward for e in trial.traces}) > 1 for trial in new)
    # near 1 if the agent is equally unsure of all tasks; near 0 if it solves some always, others
    # never
    figures["mixed_of_possible"] = mixed_of_possible(
        figures["mixed_share"], figures["success_rate"], G)
    return figures


def mixed_of_possible(mixed_share, success_rate, G: int) -> float | None:
    """Return the share of mixed tasks, divided by what it would be if every attempt at every task
    succeeded with the mean rate. None where that rate is 0 or 1, or without tasks."""
    if success_rate in (None, 0, 1):
        return None
    alike = success_rate ** G + (1 - success_rate) ** G  # all attempts right, or all wrong
    return mixed_share / (1 - alike)


def length_figures(run, new) -> dict:
    """How long an epoch's new tasks were, and the responses to all that were written."""
    responses = []
    for trial in run.state.trials:
        if trial.task.origin != "base":
            responses += trial.traces
    return {
        # in the world's own unit, which length_unit names
        "task_length": mean(run.world.task_length(trial.task) for trial in new),
        "length_unit": run.world.length_unit,
        # in tokens, replayed tasks included
        "response_length": mean(e.tokens for e in responses),
    }


def agent_figures(run, env_stats: dict) -> dict:
    """The agent's attempts at all tasks of an epoch, and its GRPO updates: means over the
    updates."""
    state, figures = run.state, {}
    traces = [e for trial in state.trials for e in trial.traces]
    # Eq. 1, over all attempts
    figures["reward"] = mean(e.reward for e in traces)
    # what GRPO was given in its place, by --agent-reward
    figures["agent_reward"] = None
    if run.o.agent_reward != "plain":
        figures["agent_reward"] = mean(stats["agent_reward"] for stats in state.agent)
    # of the policy, per token
    tokens = sum(e.tokens for e in traces)
    figures["entropy"] = state.surprise / tokens if tokens else None
    # share of the attempts that ran into a limit
    figures["truncated"] = mean(bool(e.truncated) for e in traces)
    # see grpo.grpo_update
    for key in ("kl", "clip_fraction", "grad_norm", "zero_variance", "trained_tokens", "mismatch"):
        figures[key] = mean(stats[key] for stats in state.agent if stats[key] is not None)
    # steps that were left out, as they were not finite
    skipped = [stats["skipped_steps"] for stats in state.agent]
    figures["skipped_steps"] = sum(skipped) if skipped else None
    # whether an update of one player moved the other one as well
    moved = [stats["other_moved"] for stats in (*state.agent, env_stats) if "other_moved" in stats]
    figures["other_adapter_moved"] = any(moved) if moved else None
    return figures


def simulator_figures(run, new, env_stats: dict) -> dict:
    """What the simulator wrote in an epoch, and its RWR update. env_stats: of rwr.rwr_update, and
    env_kept, the number of this epoch's tasks in the band."""
    state = run.state
    figures = {
        # texts that it wrote, {reason: how many of them are no new task}, share of the malformed
        "written": state.written,
        "invalid": dict(state.invalid),
        "refused": None,
        # variety of the new tasks, in bits
        "skill_entropy": entropy(skill for x in new for skill in run.world.skills(x.task)),
        # tasks in the band |p_hat - alpha| <= k_min
        "env_kept": None,
    }
    if state.written:
        figures["refused"] = health.refused(figures) / state.written
        figures["env_kept"] = env_stats["env_kept"]
    # see rwr.rwr_update
    for key in ("env_steps", "env_capped", "env_skipped_steps", "env_kl", "env_kl_step", "env_ess",
                "env_weight_ratio"):
        figures[key] = env_stats.get(key)
    return figures


def size_figures(run, new) -> dict:
    """How much there is of what, and how long the epoch took."""
    return {
        # new tasks, each once
        "distinct_tasks": len(new),
        # both pools, all epochs so far
        "d_train": len(run.train_pool.tasks),
        "d_env": len(run.env_pool.records),
        # of training, validation not counted; CPU time of this process
        "seconds": run.state.seconds,
        "cpu_seconds": run.state.cpu_seconds,
        # what the world calls a kind of held-out tasks
        "category_name": run.world.category_name,
    }


def p_hat_counts(trials, G: int) -> list[int]:
    """How many of the trials' tasks were solved 0, 1, ... G times: G + 1 counts."""
    solved = Counter(round(trial.p_hat * G) for trial in trials)  # p_hat is k / G (Eq. 2)
    return [solved[k] for k in range(G + 1)]


def surprise(rollouts) -> float:
    """Sum of -log-prob over the tokens that were drawn, in nats, at the sampling temperature. Per
    token it estimates the policy's entropy."""
    logps = []
    for r in rollouts:
        drawn = r.drawn or [True] * len(r.logps)
        logps += [logp for logp, was_drawn in zip(r.logps, drawn) if was_drawn]
    return -sum(logps)


def first_trials(trials) -> list:
    """The first Trial of every task: a new task may be tried again in its epoch, and its first
    p_hat counts."""
    first = {}
    for trial in trials:
        first.setdefault(trial.task.id, trial)
    return list(first.values())


def new_trials(state) -> list:
    """The first Trials of the tasks that are new in this epoch."""
    new = []
    for trial in state.trials:
        origin, epoch = trial.task.origin, trial.task.epoch
        # ready-made tasks are drawn again in every epoch
        if origin != "base" and (epoch == state.epoch or origin != "env"):
            new.append(trial)
    return first_trials(new)


def samples(run, n=8) -> list:
    """What a person should read: n tasks of the epoch next to the task that they vary, the expected
    answer, the best and the worst trace; and texts that were refused, with the reason."""
    epoch, trials = run.state.epoch, first_trials(run.state.trials)
    records = []
    for trial in trials[::max(1, len(trials) // n)][:n]:
        task, seed_task = trial.task, run.train_pool.tasks.get(trial.task.seed_task)
        best = max(trial.traces, key=lambda e: e.reward)
        worst = min(trial.traces, key=lambda e: e.reward)
        attempts = [best] if best.text == worst.text else [best, worst]
        records.append({
            "epoch": epoch, "written_in": task.epoch, "task": task.text, "origin": task.origin,
            "p_hat": trial.p_hat, "seed_task": seed_task.text if seed_task else "",
            "expected": run.world.gold(task),
            "traces": [{"text": e.text, "reward": e.reward} for e in attempts]})
    for seed_task, text, reason in run.state.refused:
        records.append({"epoch": epoch, "seed_task": seed_task, "refused": text, "reason": reason})
    return records


# ---------------------------------------------------------------------------------------------
# during an epoch


@contextmanager
def movement(adapters: dict, adapter):
    """Within, `adapter` may move and no other of the {name: its parameters} may; "": nothing is
    watched. Yields an object with `other`: at the end, whether a bit of another one has
    changed."""
    rest = [p for name, params in adapters.items() if adapter not in ("", name) for p in params]

    def bits():  # as whole numbers: a NaN is not itself
        return [p.detach().view(torch.int32) for p in rest]

    before, moved = [p.clone() for p in bits()], SimpleNamespace(other=False)
    yield moved
    moved.other = not all(map(torch.equal, bits(), before))


@contextmanager
def peak_memory(peaks: dict, phase: str):
    """Within: peaks[phase] becomes the most bytes that torch had allocated on a GPU in that phase
    so far.

    Raises UserError, naming the phase and what to lower, where the GPU runs out of memory.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    option = "--token-budget" if "update" in phase else "--max-rows"
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(f"out of GPU memory in {phase}: lower {option}") from None
    peaks[phase] = max(torch.cuda.max_memory_allocated(), peaks.get(phase, 0))


# ---------------------------------------------------------------------------------------------
# statistics


def mean(values) -> float | None:
    """Return the mean of what was measured; None is what was not, and no mean."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def entropy(labels) -> float | None:
    """Entropy of a list of labels in bits, None for nothing."""
    counts = Counter(labels)
    n = counts.total()
    if not n:
        return None
    return sum(count / n * math.log2(n / count) for count in counts.values())


def half_width(values) -> float:
    """Half of the 95 % t-interval of the mean of n values; NaN for a single one."""
    n = len(values)
    if n < 2:
        return math.nan
    t = T_95[min(n - 1, len(T_95)) - 1]
    return t * np.std(values, ddof=1) / n ** 0.5


def interval(values, sign=True) -> str:
    """Return the mean and the bounds of the 95 % t-interval over seeds, and only the mean for one
    seed. A run that did not measure the figure (None) is left out. sign: whether a positive figure
    gets a plus, as a difference does."""
    values = [value for value in values if value is not None]
    if not values:
        return "-"
    center, half = np.mean(values), half_width(values)
    form = "+.3f" if sign else ".3f"
    mean_text, low, high = (format(x, form) for x in (center, center - half, center + half))
    return mean_text if len(values) == 1 else f"{mean_text} ({low} to {high})"
