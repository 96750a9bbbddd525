"""What a run measures: validation, one record per epoch, samples to read, movement and memory.

Paper: the numbers behind its Figures 4-8: success rate on generated tasks, validation, task and
response length, solved and unsolved tasks. Added: entropy, mixed groups, KL, effective sample
size, diversity, and the reasons why generated tasks are refused.

Usage: support/run.py calls `epoch_record` and `samples` at the end of every epoch; report.py and
screen.py show the record, health.py judges it.

Deviations: `validation` is the mean over several sampled attempts per task, which moves smoothly;
`validation_greedy` is the usual single attempt at temperature 0.
"""
import math
from collections import Counter
from contextlib import contextmanager

import torch

from model.files import UserError
import curriculum
from support import health
from data_pool import task_id
from worlds.play import attempt_score, play


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
    --val-every epochs and after the last one; the last measurement, of epoch "validated", is repeated in
    between. "validation_rates" has the rate of each task, by category; runs with the same "validation_set"
    have the same held-out tasks in the same order, and can be compared task by task."""
    o, epoch = run.o, run.state.epoch
    if epoch % o.val_every and epoch != o.epochs:
        return {k: v for k, v in run.history[-1].items() if k.startswith("validat")}
    tasks, by_category = run.world.validation_tasks(), {}
    sampled = rates_on(run, tasks, o.val_samples, o.temperature)
    for task, rate in zip(tasks, sampled):
        by_category.setdefault(run.world.category(task), []).append(rate)
    return {"validated": epoch, "validation": mean(sampled), "validation_rates": by_category,
            "validation_greedy": mean(rates_on(run, tasks, 1, 0.0)),
            "validation_set": task_id({"held out": [(task.id, task.text) for task in tasks]}),
            "validation_by": {name: round(mean(rates), 4) for name, rates in by_category.items()}}


def epoch_record(run, env_stats: dict, alpha: float) -> dict:
    """The metrics of the epoch in run.state, JSON-ready. Rates and shares in [0, 1], lengths in
    tokens or the world's units, KL and `entropy` in nats per token, `skill_entropy` in bits."""
    state, world, new = run.state, run.world, new_trials(run.state)
    traces = [e for x in state.trials for e in x.traces]
    record = dict(epoch=state.epoch, alpha=alpha, success_rate=mean(x.p_hat for x in new), **validation(run),
        reward=mean(e.reward for e in traces), entropy=state.surprise / max(1, sum(e.tokens for e in traces)),
        mixed_share=mean(len({e.reward for e in x.traces}) > 1 for x in new), distinct_tasks=len(new),
        task_length=mean(world.task_length(x.task) for x in new), solved=mean(x.p_hat == 1 for x in new),
        response_length=mean(e.tokens for x in state.trials if x.task.origin != "base" for e in x.traces),
        unsolved=mean(x.p_hat == 0 for x in new), seconds=state.seconds, cpu_seconds=state.cpu_seconds,
        p_hat_counts=p_hat_counts(new, run.o.G),
        skill_entropy=entropy(s for x in new for s in world.skills(x.task)), written=state.written,
        invalid=dict(state.invalid), truncated=mean(bool(e.truncated) for e in traces),
        **{key: mean(a[key] for a in state.agent) for key in
           ("kl", "clip_fraction", "grad_norm", "zero_variance", "trained_tokens", "mismatch")},
        skipped_steps=sum(a["skipped_steps"] for a in state.agent), category_name=world.category_name,
        other_adapter_moved=any(a.get("other_moved") for a in [*state.agent, env_stats]),
        **{key: env_stats.get(key, 0) for key in ("env_kept", "env_kl", "env_kl_step", "env_ess",
           "env_weight_ratio", "env_steps", "env_capped", "env_skipped_steps")},
        d_train=len(run.train_pool.tasks), d_env=len(run.env_pool.records), length_unit=world.length_unit)
    record["refused"] = health.refused(record) / max(1, record["written"])
    record = {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}
    return {**record, "warnings": health.warnings(record, run.history, run.o)}


def p_hat_counts(trials, G: int) -> list[int]:
    """How many of the trials' tasks were solved 0, 1, ... G times: G + 1 counts."""
    counts = [0] * (G + 1)
    for trial in trials:
        counts[round(trial.p_hat * G)] += 1  # p_hat is k / G (Eq. 2)
    return counts


def surprise(rollouts) -> float:
    """Sum of -log-prob over the tokens that were drawn, in nats, at the sampling temperature. Per
    token it estimates the policy's entropy."""
    return -sum(p for r in rollouts for p, drawn in zip(r.logps, r.drawn or [True] * len(r.logps)) if drawn)


def first_trials(trials) -> list:
    """The first Trial of every task: a new task may be tried again in its epoch, and its first p_hat
    counts."""
    first = {trial.task.id: trial for trial in reversed(trials)}  # of equal ids the last one stays
    return [first[i] for i in dict.fromkeys(trial.task.id for trial in trials)]


def new_trials(state) -> list:
    """The first Trials of the tasks that are new in this epoch."""
    return first_trials([x for x in state.trials if x.task.origin != "base"
                         and (x.task.epoch == state.epoch or x.task.origin != "env")])


@contextmanager
def movement(adapters: dict, adapter):
    """Within, `adapter` may move and no other of the {name: its parameters} may; "": nothing is watched.
    Yields a dictionary that is filled at the end: other_moved, whether a bit of another one has changed."""
    rest = [p for name, params in adapters.items() if adapter not in ("", name) for p in params]
    before = [p.detach().clone() for p in rest]
    yield (found := {})
    # compared where they lie, as whole numbers (a NaN is not itself), and read once
    changed = [(p.detach().view(torch.int32) != old.view(torch.int32)).any() for p, old in zip(rest, before)]
    found["other_moved"] = bool(changed) and bool(torch.stack(changed).any())


@contextmanager
def peak_memory(peaks: dict, phase: str):
    """Within: peaks[phase] becomes the most bytes that torch had allocated on a GPU in that phase so far.

    Raises UserError, naming the phase and what to lower, where the GPU runs out of memory.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(f"out of GPU memory in {phase}: lower --"
                        f"{'token-budget' if 'update' in phase else 'max-rows'}") from None
    peaks[phase] = max(torch.cuda.max_memory_allocated(), peaks.get(phase, 0))


def mean(values) -> float:
    """Arithmetic mean, 0 for nothing."""
    return sum(known) / len(known) if (known := list(values)) else 0.0


def entropy(labels) -> float:
    """Entropy of a list of labels in bits."""
    counts = Counter(labels)
    return sum(n / counts.total() * math.log2(counts.total() / n) for n in counts.values())


def samples(run, n=8) -> list:
    """What a person should read: tasks of the epoch next to the task that they vary, the expected
    answer, the best and the worst trace; and texts that were refused, with the reason."""
    state, shown, trials = run.state, [], first_trials(run.state.trials)
    for x in trials[::max(1, len(trials) // n)][:n]:
        parent = run.train_pool.tasks.get(x.task.seed_task)
        # once if they are alike
        best_and_worst = {e.text: e for e in (pick(x.traces, key=lambda e: e.reward) for pick in (max, min))}
        shown.append(dict(
            epoch=state.epoch, written_in=x.task.epoch, task=x.task.text, origin=x.task.origin, p_hat=x.p_hat,
            seed_task=parent.text if parent else "", expected=run.world.gold(x.task),
            traces=[{"text": e.text, "reward": e.reward} for e in best_and_worst.values()]))
    return shown + [dict(epoch=state.epoch, seed_task=seed_task, refused=text, reason=reason)
                    for seed_task, text, reason in state.refused]
