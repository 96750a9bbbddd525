"""When co-evolution goes wrong, say so: plain-word warnings from the metrics.

Paper: none of it. The failure modes are those that users of such systems report (collapse,
starvation); TROUBLESHOOTING.md has a row on each.

Usage: metrics.py calls `warnings` once per epoch; support/run.py prints `judge` after epoch 0. To add
a check, write a line in CHECKS: its name, its condition on the epoch's record, the records before it
and the options, and what to say and change, where {words} stand for figures and options.

Deviations: one cause raises one warning, and where an option is the cause the warning names it.
Thresholds were set on recorded runs: healthy epochs stay clear of each by a factor of two, except for
"invalid": the household's simulator writes nonsense half of the time, and learns.
"""
MISMATCH = 0.02    # nats per token; bf16 moves the mean by up to 0.013 (400 recorded epochs)
STALE, TOO_HARD = 0.85, 0.15  # success of the agent on the untrained simulator's tasks


def refused(r) -> int:
    """How many texts of an epoch are not tasks; a duplicate is one, and a copy, but neither is new."""
    return sum({**r["invalid"], "duplicate in the batch": 0, "copy of the seed": 0}.values())


def counted(counts: dict) -> str:
    """{reason: how many} in words, the most frequent first."""
    return ", ".join(f"{what} {n}" for what, n in sorted(counts.items(), key=lambda pair: -pair[1])) or "none"


def collapse(r, history, o) -> bool:
    """The simulator writes few different tasks, or uses fewer skills than in epoch 1. (static: it writes more
    in epoch 0 than are tried.)"""
    valid = r["written"] - refused(r)
    first = history[1] if len(history) > 1 else r
    # else there is nothing to judge by: "invalid" speaks
    return o.variant != "static" and valid > 0.1 * r["written"] and (
        r["distinct_tasks"] < 0.2 * valid or r["skill_entropy"] < 0.6 * first["skill_entropy"])


def alike(r, history, o) -> bool:
    """Nearly all groups have equal rewards, though not because attempts were cut off."""
    return r["epoch"] > 0 and r["zero_variance"] > 0.9 and r["truncated"] <= 0.2


def starvation(r, history, o) -> bool:
    """Almost nothing falls into the band, so the simulator learns from a handful of tasks, or not at all."""
    few = r["env_kept"] < 0.05 * (r["written"] - sum(r["invalid"].values()))
    idle = not r["env_steps"] + r["env_capped"] + r["env_skipped_steps"]
    # where the agent solves all or nothing, one warning is enough
    return o.variant == "genenv" and r["epoch"] > 0 and (few or idle) and not alike(r, history, o)


CHECKS = (
    ("collapse", collapse, "the simulator repeats itself, {distinct_tasks} distinct tasks of {written} "
     "texts ({reasons}), skill entropy {skill_entropy:.2f} bits: raise --env-kl or --temperature"),
    ("starvation", starvation,
     "{env_kept} tasks in the band |p_hat - {alpha:.2f}| <= {k_min}, RWR steps {env_steps}: "
     "raise --k-min, move alpha nearer to success {success_rate:.2f}, or lower --env-batch {env_batch}"),
    ("cut off", lambda r, history, o: r["truncated"] > 0.2,
     "{truncated:.0%} of the responses are cut off and earn nothing: raise --max-response-tokens "
     "{max_response_tokens}, or an episode's own limits; if responses are noise, lower --agent-lr"),
    ("no signal", alike, "{zero_variance:.0%} of the groups have equal rewards and teach nothing, "
     "{reward:.2f} on average: bring easier base tasks if that is low, harder ones if high, or raise --G"),
    ("invalid", lambda r, history, o: refused(r) > 2 / 3 * r["written"],
     "most of {written} texts are not tasks ({reasons}): for truncated ones raise --max-task-tokens "
     "{max_task_tokens}; never knew the form: train its start longer; else raise --env-kl, lower --env-lr"),
    ("KL cap", lambda r, history, o: all(m["env_capped"] and not m["env_steps"] for m in [*history[-1:], r]),
     "the simulator's first step moved it too far and was undone, twice in a row: lower --env-lr"),
    ("KL", lambda r, history, o: min(m["env_kl"] for m in [*history[-1:], r]) > 2.0,
     "the simulator is {env_kl:.1f} nats per token from its start, too far to trust it: raise --env-kl"),
    ("mismatch", lambda r, history, o: r["mismatch"] > MISMATCH,
     "sampler and scorer differ by {mismatch:.3f} nats per token: try --dtype fp32, or without --quant"),
    ("leak", lambda r, history, o: r["other_adapter_moved"],
     "an update moved the other adapter as well; only code can do that, not an option"),
    ("not finite", lambda r, history, o: r["skipped_steps"] + r["env_skipped_steps"] > 0,
     "{skipped_steps} steps of the agent and {env_skipped_steps} of the simulator were skipped, as loss or "
     "gradient is not finite: lower --agent-lr or --env-lr"))


def warnings(record: dict, history: list, o) -> list[str]:
    """All warnings that hold for this epoch, each one sentence: what was found, what to change.

    record: the epoch's metrics (metrics.epoch_record); history: the records of earlier epochs.
    """
    figures = {**vars(o), **record, "reasons": counted(record["invalid"])}
    return [f"{name}: {text.format(**figures)}" for name, holds, text in CHECKS if holds(record, history, o)]


def judge(r: dict) -> str:
    """One line on the record of epoch 0, before anything is trained: is there something to learn?

    Training the simulator pays where the untrained one's tasks go stale, that is, where the agent
    solves nearly all of them; in between nothing is said yet, as they may go stale later.
    """
    rate = r["success_rate"]
    verdict = "lacking" if not r["distinct_tasks"] else "stale" if rate > STALE else \
        "too hard" if rate < TOO_HARD else "of medium difficulty"
    return f"before training: tasks are {verdict}, mixed groups {r['mixed_share']:.2f} (TROUBLESHOOTING.md)"
