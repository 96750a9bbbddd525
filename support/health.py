"""Warn in plain words when the metrics show that co-evolution is going wrong.

Paper: does not cover this. The failure modes are those that users of such systems report (collapse,
starvation). TROUBLESHOOTING.md explains each.

Usage: metrics.py calls `warnings` once per epoch. To add a check, write a function of the epoch's
record, the earlier records and the options, and add it to CHECKS. The function returns one sentence
on what was found and what to change, or "" if all is well.

Deviations: one cause raises one warning, which names the option at fault if there is one. The
thresholds were set on recorded runs. Healthy epochs stay clear of them by a factor of two, with two
exceptions. "invalid": the household's simulator writes nonsense half of the time and still learns.
"mismatch": up to 0.025 nats per token are healthy in bf16 on a CPU without matrix units, up to
0.013 elsewhere.
"""
from collections import Counter

MISMATCH = 0.03  # nats per token


def refused(r) -> int:
    """Return how many texts of an epoch are not tasks. Duplicates and copies count as tasks."""
    still_tasks = "duplicate in the batch", "copy of the seed"
    return sum(count for reason, count in r["invalid"].items() if reason not in still_tasks)


def counted(counts: dict) -> str:
    """Return {reason: how many} as text, with the most frequent reason first."""
    by_count = Counter(counts).most_common()
    return ", ".join(f"{reason} {count}" for reason, count in by_count) or "none"


# ---------------------------------------------------------------------------------------------
# checks: r is an epoch's record (metrics.epoch_record), history the earlier ones, o the options


def collapse(r, history, o) -> str:
    """Warn if the simulator writes few distinct tasks, or uses far fewer skills than in epoch 1."""
    if invalid(r, history, o) or o.variant == "static":
        # Either there are too few tasks to judge, or the variant is static: its simulator writes
        # only in epoch 0, and it writes more tasks than the agent attempts in that epoch.
        return ""
    few_tasks = r["distinct_tasks"] < 0.2 * (r["written"] - refused(r))
    first = history[1] if len(history) > 1 else r
    # without new tasks there are no skills
    bits, first_bits = (m["skill_entropy"] or 0 for m in (r, first))
    if not few_tasks and bits >= 0.6 * first_bits:
        return ""
    reasons = counted(r["invalid"])
    return (f"the simulator repeats itself, {r['distinct_tasks']} distinct tasks of {r['written']} "
            f"texts ({reasons}), skill entropy {bits:.2f} bits: raise --env-kl or --temperature")


def starvation(r, history, o) -> str:
    """Warn if the band holds too few tasks for the simulator to learn much."""
    if o.variant != "genenv" or r["epoch"] == 0:
        return ""
    if not r["distinct_tasks"] or no_signal(r, history, o):
        return ""  # another check warns: there were no tasks, or the agent solves all or none
    valid = r["written"] - sum(r["invalid"].values())
    steps = r["env_steps"] + r["env_capped"] + r["env_skipped_steps"]
    if r["env_kept"] >= 0.05 * valid and steps:
        return ""
    return (f"{r['env_kept']} tasks in the band |p_hat - {r['alpha']:.2f}| <= {o.k_min}, "
            f"{r['env_steps']} RWR steps: raise --k-min, move alpha towards the success "
            f"rate {r['success_rate']:.2f}, or lower --env-batch {o.env_batch}")


def cut_off(r, history, o) -> str:
    """Warn if many attempts run into a limit."""
    if not above(0.2, r["truncated"]):
        return ""
    return (f"{r['truncated']:.0%} of the responses are cut off and earn nothing: raise "
            f"--max-response-tokens {o.max_response_tokens}, or an episode's own limits; if "
            "responses are noise, lower --agent-lr")


def no_signal(r, history, o) -> str:
    """Warn if nearly all groups have equal rewards, unless cut-off attempts explain it."""
    if not above(0.9, r["zero_variance"]) or above(0.2, r["truncated"]):
        return ""
    return (f"{r['zero_variance']:.0%} of the groups have equal rewards and teach nothing; the "
            f"mean reward is {r['reward']:.2f}: use easier base tasks if that is low, harder ones "
            "if it is high, or raise --G")


def invalid(r, history, o) -> str:
    """Warn if most of the simulator's texts are not tasks."""
    if refused(r) <= 2 / 3 * r["written"]:
        return ""
    reasons = counted(r["invalid"])
    return (f"most of the simulator's {r['written']} texts are not tasks ({reasons}): for "
            f"truncated ones raise --max-task-tokens {o.max_task_tokens}; if it never wrote valid "
            "ones, give it a longer warm start; otherwise raise --env-kl or lower --env-lr")


def kl(r, history, o) -> str:
    """Warn if the simulator strays in two epochs in a row, because one alone may be chance.

    It strays if it is far from its start, or if the cap undid the first step of its update.
    """
    for m in [*history[-1:], r]:
        is_undone = m["env_capped"] and not m["env_steps"]
        if not is_undone and not above(2.0, m["env_kl"]):
            return ""
    return (f"the simulator moves too far: {r['env_kl']:.1f} nats per token from its start, "
            f"{r['env_steps']} RWR steps before the cap: lower --env-lr or raise --env-kl")


def mismatch(r, history, o) -> str:
    """Warn if sampler and scorer disagree on log-probs: the policy that GRPO trains is then not the
    one that acted."""
    if not above(MISMATCH, r["mismatch"]):
        return ""
    return (f"sampler and scorer differ by {r['mismatch']:.3f} nats per token: try --dtype fp32, "
            "or a run without --quant")


def not_finite(r, history, o) -> str:
    """Warn if a loss or a gradient was NaN or infinite."""
    agent, simulator = r["skipped_steps"], r["env_skipped_steps"] or 0
    if not agent and not simulator:
        return ""
    return (f"{agent} steps of the agent and {simulator} of the simulator were skipped because "
            "a loss or a gradient was not finite: lower --agent-lr or --env-lr")


CHECKS = {
    "collapse": collapse,
    "starvation": starvation,
    "cut off": cut_off,
    "no signal": no_signal,
    "invalid": invalid,
    "KL": kl,
    "mismatch": mismatch,
    "not finite": not_finite,
}


def above(threshold: float, figure) -> bool:
    """Return whether a figure exceeds a threshold. None, which means not measured, never does."""
    return figure is not None and figure > threshold


def warnings(record: dict, history: list, o) -> list[dict]:
    """Return this epoch's warnings: the "name" of each, and a one-sentence "text" on what was found
    and what to change.

    record: the epoch's metrics (metrics.epoch_record); history: the records of earlier epochs.
    """
    sentences = {name: check(record, history, o) for name, check in CHECKS.items()}
    return [{"name": name, "text": text} for name, text in sentences.items() if text]
