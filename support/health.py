"""When co-evolution goes wrong, say so: plain-word warnings from the metrics.

Paper: none of it. The failure modes are those that users of such systems report (collapse,
starvation, exploitation of noise); TROUBLESHOOTING.md has a paragraph on each.

Usage: metrics.py calls `warnings` once per epoch; support/run.py prints `judge` after epoch 0. A
check is a function of the epoch's record, the records before it and the options. It returns what it
found and what to change, or "". To add one, write the function and a line in CHECKS.

Deviations: one cause raises one warning, and where an option is the cause the warning names it.
Thresholds were set on recorded runs: healthy epochs stay clear of each by a factor of two.
"""
from curriculum import WITHOUT_SIMULATOR

WAITING = 5        # epochs in which a record of D_env may be imitated, its own included
MISMATCH = 0.02    # nats per token; bf16 moves the mean by up to 0.013 (400 recorded epochs)
STALE, TOO_HARD = 0.85, 0.15  # success of the agent on the untrained simulator's tasks
STEERING = ("integral", "adaptive")  # schedules that move alpha so that success reaches --alpha


def aim(r, o) -> float:
    """The success rate on generated tasks that an epoch aims at."""
    return o.alpha if o.alpha_schedule in STEERING else r["alpha"]


def not_tasks(r) -> dict:
    """{reason: how many} of an epoch's texts that are not tasks; a duplicate is one, but not new."""
    return {reason: n for reason, n in r["invalid"].items() if reason != "duplicate in the batch"}


def valid(r) -> int:
    """Texts of an epoch that were tasks, counting a task as often as it was written."""
    return r["written"] - sum(not_tasks(r).values())


def collapse(r, history, o) -> str:
    """The simulator writes few different tasks, or uses few skills."""
    if o.variant in WITHOUT_SIMULATOR or valid(r) <= 0.1 * r["written"]:
        return ""  # nothing to judge by: "invalid" speaks
    # epoch 1 is the first of full size; a simulator may also be narrow from the start
    first = history[1] if len(history) > 1 else r
    before = first["distinct_tasks"] / max(1, valid(first))
    few = r["distinct_tasks"] / valid(r) < max(0.2, 0.5 * before)
    if not few and r["skill_entropy"] >= 0.6 * first["skill_entropy"]:
        return ""
    env_kl = "--env-kl, " * (o.variant == "genenv")
    return (f"{r['distinct_tasks']} distinct tasks of {valid(r)} written, skill entropy "
            f"{r['skill_entropy']:.2f} bits, {first['skill_entropy']:.2f} in epoch {first['epoch']}: "
            f"raise {env_kl}--base-share or --temperature")


def starvation(r, history, o) -> str:
    """Almost nothing falls into the band, so the simulator learns from a handful of tasks."""
    if o.variant != "genenv" or r["epoch"] == 0 or no_signal(r, history, o):
        return ""  # where the agent solves all or nothing, one warning is enough
    recent = [*history, r][1:][-WAITING:]  # without epoch 0
    if len(recent) == WAITING and not any(m["env_steps"] for m in recent):
        return f"no step of the simulator in {WAITING} epochs: lower --env-batch {o.env_batch}"
    tried = r["written"] - sum(r["invalid"].values())
    if r["env_kept"] >= 0.05 * tried:
        return ""
    far = abs(r["success_rate"] - aim(r, o)) > o.k_min
    move = f"move --alpha towards the success rate {r['success_rate']:.2f}, or " * far
    return (f"{r['env_kept']} of {tried} tasks are in the band |p_hat - {r['alpha']:.2f}| <= "
            f"{o.k_min}: {move}raise --k-min or --G")


def no_signal(r, history, o) -> str:
    """Attempts earn nothing because of a limit, or nearly all groups have equal rewards."""
    if r["truncated"] > 0.2:
        return (f"{r['truncated']:.0%} of the responses are cut off and earn nothing: raise "
                f"--max-response-tokens {o.max_response_tokens}, or an episode's own limits")
    if r["epoch"] == 0 or r["zero_variance"] <= 0.9:
        return ""
    easier = "easier" if r["reward"] < 0.5 else "harder"
    return (f"{r['zero_variance']:.0%} of the groups have equal rewards, {r['reward']:.2f} on average: bring "
            f"{easier} base tasks, or raise --G")


def invalid(r, history, o) -> str:
    """Much of what the simulator writes is not a task."""
    reasons = not_tasks(r)
    if sum(reasons.values()) <= 0.5 * r["written"]:
        return ""
    worst = max(reasons, key=reasons.get)
    advice = {
        "truncated": f"raise --max-task-tokens {o.max_task_tokens}",
        "prompt too long": f"raise --max-prompt-tokens {o.max_prompt_tokens}",
        "copy of the seed": "raise --temperature or --env-kl",
        "no agreement": "the simulator cannot solve them: read samples.jsonl, raise --env-kl"}
    form = "the simulator has left its form, raise --env-kl, lower --env-lr"
    if r["env_kl"] <= 0.05:  # it never knew it
        form = "a (longer) warm start teaches the form" if o.model else \
            "go back to the world's own --temperature and --max-task-tokens"
    return (f"{sum(reasons.values())} of {r['written']} texts are not tasks, most often {worst!r} "
            f"({reasons[worst]}): {advice.get(worst, form)}")


def kl(r, history, o) -> str:
    """The simulator moves too fast or too far; two epochs running, as one may be chance."""
    last = [*history, r][-2:]
    if len(last) == 2 and all(m["env_capped"] and not m["env_steps"] for m in last):
        return f"the simulator's first step crossed --env-kl-cap {o.env_kl_cap}: lower --env-lr"
    if len(last) == 2 and min(m["env_kl"] for m in last) > 2.0:
        return (f"the simulator is {r['env_kl']:.1f} nats per token away from its start, and its "
                "text can no longer be trusted: raise --env-kl, lower --env-lr")
    return ""


def exploitation(r, history, o) -> str:
    """Tasks near the target do not get easier although the agent trains on them."""
    recent = [*history[-3:], r]
    if len(recent) < 4 or recent[0]["epoch"] == 0 or r["validated"] <= recent[0]["epoch"]:
        return ""
    n = max(1, sum(m["replays"] for m in recent))
    gain = sum(m["replay_gain"] * m["replays"] for m in recent) / n
    error = (0.5 / (o.G * n)) ** 0.5  # of n differences of two success rates at p = 0.5
    near = all(abs(m["success_rate"] - aim(m, o)) < 0.15 for m in recent)
    was, then, before, now = (m["validation"] for m in recent)
    better = (before + now - was - then) / 2
    if n < 20 or not near or gain + error >= 0.05 or better >= 0.02:
        return ""
    return (f"success stays near alpha, yet {n} tasks tried again changed by {gain:+.2f} and "
            f"validation by {better:+.2f} in four epochs: the simulator may live on noise or wrong "
            "answers. Check some tasks by hand, use --agreement; if sound, raise --agent-lr")


def mismatch(r, history, o) -> str:
    """Tokens were drawn from another distribution than the one that is trained."""
    if r["mismatch"] <= MISMATCH:
        return ""
    return (f"sampler and scorer differ by {r['mismatch']:.3f} nats per token, so GRPO's ratio does "
            "not start at 1: try --dtype fp32, or without --quant")


def unsound(r, history, o) -> str:
    """An update moved the other adapter, or a loss or gradient was not finite."""
    if r["other_adapter_moved"]:
        return "an update moved the other adapter as well; only code can do that, not an option"
    for flag, key in (("--agent-lr", "skipped_steps"), ("--env-lr", "env_skipped_steps")):
        if r[key]:
            return f"steps were skipped as their loss or gradient is not finite: lower {flag}"
    return ""


CHECKS = {  # name of the warning: the check
    "collapse": collapse, "starvation": starvation, "no signal": no_signal, "invalid": invalid,
    "KL": kl, "exploitation": exploitation, "mismatch": mismatch, "leak or not finite": unsound}


def warnings(record: dict, history: list, o) -> list[str]:
    """All warnings that hold for this epoch, each one sentence: what was found, what to change.

    record: the epoch's metrics (metrics.epoch_record); history: the records of earlier epochs.
    """
    texts = {name: check(record, history, o) for name, check in CHECKS.items()}
    return [f"{name}: {text}" for name, text in texts.items() if text]


def judge(r: dict) -> str:
    """One line on the record of epoch 0, before anything is trained: is there something to learn?

    Training the simulator pays where the untrained one's tasks go stale, that is, where the agent
    solves nearly all of them; near alpha there is nothing to correct.
    """
    verdict = "near alpha"
    if not TOO_HARD <= r["success_rate"] <= STALE:
        verdict = "stale" if r["success_rate"] > STALE else "too hard"
    if not r["distinct_tasks"]:
        return f"before training: no generated tasks, {r['written']} texts written"
    return (f"before training: generated tasks are {verdict} (success {r['success_rate']:.2f}), "
            f"{r['mixed_share']:.0%} of the groups are mixed")
