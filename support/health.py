"""When co-evolution goes wrong, say so: plain-word warnings from the metrics.

Paper: none of it. The failure modes are those that users of such systems report (collapse,
starvation); TROUBLESHOOTING.md has more on each.

Usage: metrics.py calls `warnings` once per epoch. To add a check, write a function of the epoch's
record, the records of the epochs before it and the options that returns a sentence, what was found
and what to change, or "" where all is well; and name it in CHECKS.

Deviations: one cause raises one warning, and where an option is the cause the warning names it.
Thresholds were set on recorded runs: healthy epochs stay clear of each by a factor of two, but for
two. "invalid": the household's simulator writes nonsense half of the time, and learns. "mismatch":
on a CPU without bf16 matrix units 0.02 to 0.025 nats are healthy in bf16, elsewhere up to 0.013.
"""
from collections import Counter

MISMATCH = 0.03  # nats per token


def refused(r) -> int:
    """How many texts of an epoch are not tasks; a duplicate is one, and a copy, but neither is
    new."""
    still_tasks = "duplicate in the batch", "copy of the seed"
    return sum(count for reason, count in r["invalid"].items() if reason not in still_tasks)


def counted(counts: dict) -> str:
    """{reason: how many} in words, the most frequent first."""
    by_count = Counter(counts).most_common()
    return ", ".join(f"{reason} {count}" for reason, count in by_count) or "none"


# ---------------------------------------------------------------------------------------------
# checks: r is the record of an epoch (metrics.epoch_record), history those before it, o the options


def collapse(r, history, o) -> str:
    """The simulator writes few different tasks, or uses fewer skills than in epoch 1."""
    valid = r["written"] - refused(r)
    if valid <= 0.1 * r["written"]:
        return ""  # nothing to judge by: "invalid" speaks
    if o.variant == "static":
        return ""  # it writes only in epoch 0, more than are tried there
    few_tasks = r["distinct_tasks"] < 0.2 * valid
    first = history[1] if len(history) > 1 else r
    bits = r["skill_entropy"] or 0  # no new task, no skill
    first_bits = first["skill_entropy"] or 0
    if not few_tasks and bits >= 0.6 * first_bits:
        return ""
    reasons = counted(r["invalid"])
    return (f"the simulator repeats itself, {r['distinct_tasks']} distinct tasks of {r['written']} "
            f"texts ({reasons}), skill entropy {bits:.2f} bits: raise --env-kl or --temperature")


def starvation(r, history, o) -> str:
    """Almost nothing falls into the band, so the simulator learns from a handful of tasks, or not
    at all."""
    if o.variant != "genenv" or r["epoch"] == 0:
        return ""
    if not r["distinct_tasks"] or no_signal(r, history, o):
        return ""  # one warning is enough: there were no tasks, or the agent solves all or nothing
    valid = r["written"] - sum(r["invalid"].values())
    steps = r["env_steps"] + r["env_capped"] + r["env_skipped_steps"]
    if r["env_kept"] >= 0.05 * valid and steps:
        return ""
    return (f"{r['env_kept']} tasks in the band |p_hat - {r['alpha']:.2f}| <= {o.k_min}, RWR steps "
            f"{r['env_steps']}: raise --k-min, move alpha nearer to success "
            f"{r['success_rate']:.2f}, or lower --env-batch {o.env_batch}")


def cut_off(r, history, o) -> str:
    """Many attempts run into a limit."""
    if not above(0.2, r["truncated"]):
        return ""
    return (f"{r['truncated']:.0%} of the responses are cut off and earn nothing: raise "
            f"--max-response-tokens {o.max_response_tokens}, or an episode's own limits; if "
            "responses are noise, lower --agent-lr")


def no_signal(r, history, o) -> str:
    """Nearly all groups have equal rewards, though not because attempts were cut off."""
    if not above(0.9, r["zero_variance"]) or above(0.2, r["truncated"]):
        return ""
    return (f"{r['zero_variance']:.0%} of the groups have equal rewards and teach nothing, "
            f"{r['reward']:.2f} on average: bring easier base tasks if that is low, harder ones if "
            "high, or raise --G")


def invalid(r, history, o) -> str:
    """Most of what the simulator writes is no task."""
    if refused(r) <= 2 / 3 * r["written"]:
        return ""
    reasons = counted(r["invalid"])
    return (f"most of {r['written']} texts are not tasks ({reasons}): for truncated ones raise "
            f"--max-task-tokens {o.max_task_tokens}; never knew the form: train its start longer; "
            "else raise --env-kl, lower --env-lr")


def kl_cap(r, history, o) -> str:
    """The cap undid the simulator's only step, twice in a row: once may be chance."""
    undone = [m["env_capped"] and not m["env_steps"] for m in [*history[-1:], r]]
    if not all(undone):
        return ""
    return ("the simulator's first step moved it too far and was undone, twice in a row: lower "
            "--env-lr")


def kl(r, history, o) -> str:
    """The simulator is far from its start, twice in a row: once may be chance."""
    if not all(above(2.0, m["env_kl"]) for m in [*history[-1:], r]):
        return ""
    return (f"the simulator is {r['env_kl']:.1f} nats per token from its start, too far to trust "
            "it: raise --env-kl")


def mismatch(r, history, o) -> str:
    """Sampler and scorer disagree about log-probs, so that GRPO's ratio does not start at 1."""
    if not above(MISMATCH, r["mismatch"]):
        return ""
    return (f"sampler and scorer differ by {r['mismatch']:.3f} nats per token: try --dtype fp32, "
            "or without --quant")


def leak(r, history, o) -> str:
    """One player's update moved the other one."""
    if not r["other_adapter_moved"]:
        return ""
    return "an update moved the other adapter as well; only code can do that, not an option"


def not_finite(r, history, o) -> str:
    """A loss or a gradient was NaN or infinite."""
    agent, simulator = r["skipped_steps"] or 0, r["env_skipped_steps"] or 0
    if not agent and not simulator:
        return ""
    return (f"{agent} steps of the agent and {simulator} of the simulator were skipped, as loss or "
            "gradient is not finite: lower --agent-lr or --env-lr")


CHECKS = {
    "collapse": collapse,
    "starvation": starvation,
    "cut off": cut_off,
    "no signal": no_signal,
    "invalid": invalid,
    "KL cap": kl_cap,
    "KL": kl,
    "mismatch": mismatch,
    "leak": leak,
    "not finite": not_finite,
}


def above(threshold: float, figure) -> bool:
    """Whether a figure is above a threshold; one that was not measured (None) is not."""
    return figure is not None and figure > threshold


def warnings(record: dict, history: list, o) -> list[dict]:
    """Return all warnings that hold for this epoch: each its "name", and a "text" of one sentence
    on what was found and what to change.

    record: the epoch's metrics (metrics.epoch_record); history: the records of earlier epochs.
    """
    sentences = {name: check(record, history, o) for name, check in CHECKS.items()}
    return [{"name": name, "text": text} for name, text in sentences.items() if text]
