"""What a run reports of itself: validation, one metrics record per epoch, warnings.

What of the paper this is: the curves of its Figures 4-8 as numbers: success rate on generated
tasks, validation, task and response length, solved and unsolved tasks; and what a careful reader
asks beside them: diversity, KL, effective sample size, and what the simulator got wrong.

How it is run: genenv.py calls `epoch_record` at the end of every epoch; report.py draws the record.

Where it differs on purpose: `validation` is the mean over several sampled attempts per task, which
moves smoothly; `validation_greedy` is the usual one attempt at temperature 0.
"""
import math
from collections import Counter

import curriculum
from runtime import health, memory


def rates_on(run, tasks, G: int, temperature: float) -> list[float]:
    """Success rate of the agent on each of the tasks, G attempts each."""
    o, world = run.o, run.world
    prompts = [run.policy.encode(world.agent_prompt(task)) for task in tasks]
    generator = run.policy.generator(3 * o.seed + 2)  # the same seed in every epoch
    rows = memory.rollout_rows(o, G, max(map(len, prompts)))
    with memory.peak_memory(run.peaks, "validation", run.policy.device):
        rollouts = run.policy.sample("agent", prompts, G, o.max_response_tokens, temperature,
                                     generator, max_rows=rows)
    rewards = [0.0 if r.truncated else world.score(tasks[r.group], run.policy.decode(r.response))[0]
               for r in rollouts]
    return [curriculum.success_rate(rewards[b * G:(b + 1) * G], o.success_at)
            for b in range(len(tasks))]


def validate(run) -> dict:
    """Held-out tasks: success of sampled and greedy attempts, per category, share never solved.

    With --tuning also the same on a second, disjoint split: settings are to be chosen by that one.
    """
    o = run.o
    tasks = run.world.validation_tasks(o, "validation")
    sampled = rates_on(run, tasks, o.val_samples, o.temperature)
    by = {}
    for task, rate in zip(tasks, sampled):
        by.setdefault(run.world.category(task), []).append(rate)
    record = {"validation": mean(sampled),
              "validation_greedy": mean(rates_on(run, tasks, 1, 0.0)),
              "validation_unsolved": mean(r == 0 for r in sampled),
              "validation_by": {name: round(mean(values), 4) for name, values in by.items()}}
    if o.tuning:
        split = run.world.validation_tasks(o, "tuning")
        record["tuning"] = mean(rates_on(run, split, o.val_samples, o.temperature))
    return record


def epoch_record(run, env_stats: dict, alpha: float) -> dict:
    """The metrics of the epoch in run.part, JSON-ready. Rates in [0, 1], lengths in the world's
    units or tokens, KL in nats per token, entropy in bits."""
    part, world = run.part, run.world
    new = [(task, p) for task, p, _ in part.tries if task.origin != "base" and
           (task.epoch == part.t or task.origin != "env")]
    traces = [e for _, _, es in part.tries for e in es]
    old = [(before, now) for before, age, now in part.replays if age >= 2 and 0 < before < 1]
    record = {
        "epoch": part.t, "alpha": alpha, "success_rate": mean(p for _, p in new),
        **validate(run),
        "reward": mean(e.reward for e in traces),
        "task_length": mean(world.task_length(task) for task, _ in new),
        "response_length": mean(e.tokens for task, _, es in part.tries
                                for e in es if task.origin != "base"),
        "solved": mean(p == 1 for _, p in new), "unsolved": mean(p == 0 for _, p in new),
        "distinct_tasks": len({task.id for task, _ in new}),
        "skill_entropy": entropy(s for task, _ in new for s in world.skills(task)),
        "written": part.written, "invalid": dict(part.invalid),
        "truncated": mean(e.truncated for e in traces),
        "replay_gain": mean(now - before for before, now in old), "replays": len(old),
        **{key: mean(a[key] for a in part.agent) for key in
           ("kl", "clip_fraction", "grad_norm", "zero_variance", "trained_tokens")},
        **{key: env_stats.get(key, 0) for key in
           ("env_kept", "env_kl", "env_kl_step", "env_ess", "env_loss", "env_steps", "env_capped")},
        "d_train": len(run.train_pool.tasks), "d_env": len(run.env_pool.records),
        "tokens_per_s": part.rollout_tokens / max(1e-9, part.rollout_seconds),
        "seconds": part.seconds,
    }
    record = {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}
    record["warnings"] = health.warnings(record, run.history, run.o)
    return record


def mean(values) -> float:
    """Arithmetic mean, 0 for nothing."""
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def entropy(labels) -> float:
    """Entropy of a list of labels in bits."""
    counts = Counter(labels)
    total = sum(counts.values())
    return sum(n / total * math.log2(total / n) for n in counts.values())


def line(r: dict) -> str:
    """The one line per epoch."""
    text = (f"epoch {r['epoch']:3d} | validation {r['validation']:.3f} | success "
            f"{r['success_rate']:.2f} (alpha {r['alpha']:.2f}) | task length {r['task_length']:.2f}"
            f" | distinct {r['distinct_tasks']:4d} | in band {r['env_kept']:4d} | env KL "
            f"{r['env_kl']:.3f} | {r['tokens_per_s']:6.0f} tok/s | {r['seconds']:5.1f} s")
    return "\n".join([text, *(f"  ! {w}" for w in r["warnings"])])


def postfix(part) -> dict:
    """What the progress bar shows of the steps so far."""
    latest = part.tries[-64:]
    return {"p_hat": f"{mean(p for _, p, _ in latest):.2f}",
            "reward": f"{mean(e.reward for _, _, es in latest for e in es):.2f}",
            "tok/s": f"{part.rollout_tokens / max(1e-9, part.rollout_seconds):.0f}"}


def samples(run, n=4) -> list:
    """A few tasks of the epoch with two traces each, for a person to read."""
    step = max(1, len(run.part.tries) // n)
    return [{"epoch": run.part.t, "task": task.text, "origin": task.origin, "p_hat": p_hat,
             "traces": [{"text": e.text, "reward": e.reward} for e in traces[:2]]}
            for task, p_hat, traces in run.part.tries[::step][:n]]
