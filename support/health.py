"""When co-evolution goes wrong, say so: plain-word warnings from the metrics.

What of the paper this is: nothing; the failure modes are those that users of such systems report
(collapse, starvation, exploitation of noise). TROUBLESHOOTING.md has a paragraph on each.

How it is run: measure.py calls `warnings` once per epoch. A check is a function of the record, the
history of earlier records and the options, named `warn_...`; it returns a sentence that says what
to change, or nothing. To add one, write one function and a paragraph in TROUBLESHOOTING.md.
run/frame.py calls `judge` after epoch 0: both updates of the paper stand still where no task is
valid, or where every group has equal rewards (its advantages are then 0, Prop. 1). There a run
stops, unless --no-gate is given.

Where it differs on purpose from a list of thresholds: one cause should raise one warning. What has
a warning of its own (duplicates, copies, lost agreement, truncation) is left out of "invalid", and
shares are taken of what could have been right. Thresholds were set on recorded runs of default size
(tests/golden): the narrowest healthy epoch stays clear of each by a factor of two or more.
"""
import math

from curriculum import WITHOUT_SIMULATOR
from data_pool import MAX_AGE
from support.report import validated

MISMATCH_MEAN, MISMATCH_MAX = 0.02, 2.0  # nats per token, see warn_mismatch
WAITING = MAX_AGE + 1  # epochs in which a record of D_env may be imitated, with its own
# reasons in `invalid` that have a warning of their own
OWN_WARNING = ("duplicate in the batch", "copy of the seed", "no agreement", "truncated")


def _usable(r) -> int:
    """Generations of an epoch that were tasks, counting a task as often as it was written."""
    lost = sum(n for reason, n in r["invalid"].items() if reason != "duplicate in the batch")
    return r["written"] - lost


def _stuck(r) -> bool:
    """Whether the agent solved all or none of the generated tasks of an epoch."""
    return r["distinct_tasks"] > 0 and not 0.02 <= r["success_rate"] <= 0.98


def _steps(o, more: bool) -> str:
    """How the simulator's update gets more steps, or fewer: with --env-passes they follow from the
    records."""
    name, up = ("--env-batch", not more) if o.env_passes else ("--env-updates", more)
    return f"{'raise' if up else 'lower'} {name}"


def warn_collapse(r, history, o):
    """The simulator writes few different tasks, or uses few skills."""
    usable, trained = _usable(r), o.variant == "genenv"
    if o.variant in WITHOUT_SIMULATOR or usable <= 0.1 * r["written"]:
        return None  # no simulator at work, or nothing to judge by: then "invalid" speaks
    share = r["distinct_tasks"] / usable
    # epoch 1 is the first of full size; a simulator may also be narrow from the start
    first = history[1] if len(history) > 1 else r
    before, entropy = first["distinct_tasks"] / max(1, _usable(first)), first["skill_entropy"]
    if share >= max(0.2, 0.5 * before) and r["skill_entropy"] >= 0.6 * entropy:
        return None
    change = f"raise --env-kl or --base-share, {_steps(o, more=False)}" if trained else \
        "raise --base-share or --temperature"
    return (f"collapse: the simulator repeats itself ({r['distinct_tasks']} distinct of "
            f"{usable} tasks written, skill entropy {r['skill_entropy']:.2f} bits, "
            f"{entropy:.2f} in epoch {first['epoch']}): {change}")


def warn_starvation(r, history, o):
    """Almost nothing falls into the band, so the simulator learns from a handful of tasks."""
    if o.variant != "genenv" or r["epoch"] == 0 or _stuck(r):  # that has a warning of its own
        return None
    last = [*history, r][1:][-WAITING:]  # without epoch 0
    if o.env_passes and len(last) == WAITING and not any(h["env_steps"] for h in last):
        return (f"starvation: too few tasks fell into the band for one step of the simulator in "
                f"{WAITING} epochs: lower --env-batch {o.env_batch}, or raise --k-min")
    tried = r["written"] - sum(r["invalid"].values())
    if r["env_kept"] >= 0.05 * tried:
        return None
    far = abs(r["success_rate"] - r["alpha"]) > o.k_min
    change = f"move --alpha towards the success rate {r['success_rate']:.2f}, or raise --k-min" \
        if far else "raise --k-min"
    return (f"starvation: {r['env_kept']} of {tried} tasks fell into the band "
            f"|p_hat - {r['alpha']:.2f}| <= {o.k_min}: {change}")


def warn_stuck(r, history, o):
    """The agent solves everything or nothing: no group has a signal."""
    recent = [h for h in [*history, r] if h["distinct_tasks"]][-3:]
    rates = [h["success_rate"] for h in recent]
    if len(recent) < 3 or recent[-1] is not r or 0.02 <= max(rates) and min(rates) <= 0.98:
        return None
    harder = f"{_steps(o, more=True)}, lower --base-share, or bring harder base tasks" \
        if o.variant == "genenv" else "bring harder base tasks"
    how = "no task: start from easier base tasks or a stronger model" if max(rates) < 0.02 else \
        f"every task: {harder}"
    return f"stuck: for three epochs the agent solves {how}"


def warn_zero_variance(r, history, o):
    """Most groups are all right or all wrong and teach nothing."""
    if r["epoch"] == 0 or r["zero_variance"] <= 0.9 or _stuck(r):
        return None
    reward = r.get("reward", r["success_rate"])
    if reward < 0.02 or reward > 0.98:  # more attempts at such tasks end like the first
        change = f"bring {'easier' if reward < 0.02 else 'harder'} base tasks"
    elif r["zero_variance"] > 0.98:
        change = "tasks are solved always or never: bring base tasks of a difficulty in between"
    else:
        change = "raise --G, or let the simulator aim nearer to p_hat = 0.5"
    return f"no signal: {r['zero_variance']:.0%} of the groups have equal rewards: {change}"


def warn_kl(r, history, o):
    """The update cap lets the simulator hardly learn. Hit late in an update it is only at work."""
    # passes over the records are few steps: there the first one crossed it
    early = 1 if o.env_passes else 0.25 * o.env_updates
    last = [h for h in [*history, r][-2:] if h["env_capped"] and h["env_steps"] < early]
    if len(last) == 2:
        planned = "" if o.env_passes else f" of {o.env_updates}"
        return (f"KL cap: the simulator's update was stopped by --env-kl-cap {o.env_kl_cap} after "
                f"{r['env_steps']}{planned} steps, two epochs running: lower --env-lr or raise "
                "--env-kl-cap")


def warn_drift(r, history, o):
    """The simulator is far from the initial one: text quality is no longer guaranteed."""
    # two epochs running: a single rare token can blow up one estimate
    if history and min(r["env_kl"], history[-1]["env_kl"]) > 2.0:
        return (f"drift: the simulator is {r['env_kl']:.1f} nats per token away from the initial "
                "one: raise --env-kl, lower --env-lr")


def warn_invalid(r, history, o):
    """Much of what the simulator writes is no task."""
    reasons = {k: n for k, n in r["invalid"].items() if k not in OWN_WARNING}
    lost = sum(reasons.values())
    if r["written"] and lost > 0.5 * r["written"]:
        worst = max(reasons, key=reasons.get)
        return (f"invalid: {lost} of {r['written']} generations are no task, most often "
                f"{worst!r} ({reasons[worst]}): "
                + "raise --env-kl; if it is so from the start, " * (r["env_kl"] > 0)
                + "the model needs a warm start, another prompt or clearer base tasks")


def warn_copies(r, history, o):
    """The simulator hands back its seed."""
    copies = r["invalid"].get("copy of the seed", 0)
    if r["written"] and copies > 0.25 * r["written"]:
        return (f"copies: {copies} of {r['written']} generations repeat their seed: raise "
                "--temperature or --env-kl")


def warn_truncated(r, history, o):
    """Responses, or written tasks, run into the length limit and earn nothing."""
    tasks, found = r["invalid"].get("truncated", 0), []
    if r["written"] and tasks > 0.2 * r["written"]:
        found.append(f"{tasks} of {r['written']} generated tasks hit --max-task-tokens "
                     f"{o.max_task_tokens}")
    if r["truncated"] > 0.2:
        found.append(f"{r['truncated']:.0%} of the responses hit --max-response-tokens "
                     f"{o.max_response_tokens}")
    return f"truncated: {' and '.join(found)}: raise {'them' if found[1:] else 'it'}" \
        if found else None


def warn_ambiguous(r, history, o):
    """The simulator cannot solve its own tasks: their answers are probably wrong or ambiguous."""
    lost = r["invalid"].get("no agreement", 0)
    checked = r["written"] - sum(r["invalid"].values()) + lost
    # an honest task of success rate p fails k tries by (1 - p)^k: 1 / (k + 1) over even p
    if o.agreement and checked and lost > (1 / (o.agreement + 1) + 0.25) * checked:
        return (f"ambiguous: {lost} of {checked} tasks failed the agreement check in "
                f"{o.agreement} tries: their answers are doubtful; read samples.jsonl before "
                "trusting the success rate, raise --env-kl or --agreement")


def warn_exploitation(r, history, o):
    """Tasks near the target do not get easier although the agent trains on them."""
    recent = [*history[-3:], r]
    if len(recent) < 4 or recent[0]["epoch"] == 0:
        return None
    n = sum(h["replays"] for h in recent)
    gain = sum(h["replay_gain"] * h["replays"] for h in recent) / max(1, n)
    # standard error of a mean of n differences of two success rates of G attempts at p = 0.5
    error = math.sqrt(0.5 / (o.G * max(1, n)))
    near = all(abs(h["success_rate"] - o.alpha) < 0.15
               for h in recent)
    better = improvement([*history, r], recent[0]["epoch"])
    if n >= 20 and near and gain + error < 0.05 and better < 0.02:
        return (f"exploitation: the success rate stays near alpha, yet {n} tasks tried again "
                f"changed by {gain:+.2f} and validation by {better:+.2f} in the last epochs: the "
                "simulator may live on noise or on wrong answers. Check some tasks by hand, use "
                "--agreement; if they are sound, raise --agent-lr")


def improvement(records, since) -> float:
    """Validation in the later half of what was measured since an epoch, minus that in the earlier
    half; the last two measurements where there are fewer (--val-every). 0 if there is but one."""
    measured = validated(records)
    within = [m["validation"] for m in measured if m["epoch"] >= since]
    value = within if len(within) > 1 else [m["validation"] for m in measured[-2:]]
    half = len(value) // 2
    return sum(value[-half:]) / half - sum(value[:half]) / half if half else 0.0


def warn_not_finite(r, history, o):
    """Optimiser steps were left out because their loss or gradient was not finite."""
    agent, env = r.get("skipped_steps", 0), r.get("env_skipped_steps", 0)
    flags = [flag for n, flag in ((agent, "--agent-lr"), (env, "--env-lr")) if n]
    if flags:
        return (f"not finite: {agent} steps of the agent and {env} of the simulator had a loss or "
                f"gradient that is not finite and were left out: lower {' and '.join(flags)}")


def warn_mismatch(r, history, o):
    """Tokens were drawn from another distribution than the one that is trained."""
    # A ratio is off by exp(difference). In 400 recorded epochs bf16 moves the mean by up to 0.013
    # and single tokens by up to 1.3; a mean of 0.02 is a tenth of the clip range
    mean, worst = r.get("mismatch_mean", 0), r.get("mismatch_max", 0)
    if mean > MISMATCH_MEAN or worst > MISMATCH_MAX:
        return (f"mismatch: log-probs of sampling and of training differ by {mean:.3f} nats per "
                f"token on average and by {worst:.2f} at most: try a few steps with --dtype fp32 "
                "or without --quant; if it stays, this model's cached pass is not its plain one")


def warn_leak(r, history, o):
    """An update moved the adapter of the other policy."""
    if r.get("other_adapter_moved"):
        return ("leak: while one policy was trained the other one's adapter moved: this run "
                "measures something else; undo the latest change to policy.py, grpo.py or rwr.py")


CHECKS = [f for name, f in list(globals().items()) if name.startswith("warn_")]


def warnings(record: dict, history: list, o) -> list[str]:
    """All warnings that hold for this epoch, each one sentence with what to change.

    record: the epoch's metrics (measure.epoch_record); history: the records of earlier epochs.
    """
    return [text for text in (check(record, history, o) for check in CHECKS) if text]


# ---------------------------------------------------------------------------------------------
# the gate: is there anything to learn? One look at the batch of epoch 0, before hours are spent


START = ("let the model imitate base tasks first, `python genenv.py warm-start --model M "
         "--base-tasks F --out DIR`, and go on with --model DIR")


OWN = ("go back to this world's own options, --temperature and the token limits above all",)


def judge(written: int, valid: int, p_hats, G: int, rewards=None,
          own_model=False) -> tuple[str, str]:
    """(line to print, paragraph that stops the run or "") for the batch of epoch 0.

    written, valid: generations of the simulator, and how many are tasks; written is 0 where tasks
    are ready-made. p_hats: success rates of the tasks tried, G attempts each. rewards: (B, G) where
    attempts earn a similarity in [0, 1]: a group is mixed if its rewards differ. Without them it is
    by p_hat. own_model: the world brings model and base tasks, so that no others can be advised.
    """
    n = len(p_hats)
    mixed = sum(max(row) > min(row) for row in rewards) if rewards is not None else \
        sum(0 < p < 1 for p in p_hats)
    success = sum(p_hats) / n if n else 0.0
    tasks = f"{valid} of {written} written tasks valid, " if written else ""
    line = (f"before training: {tasks}success on {n} tasks {success:.2f}, mixed rewards in {mixed} "
            "groups")
    if written and not valid:
        return line, _stop("the simulator wrote no valid task", OWN if own_model else (
            START, "make tasks easier to write (--call-format python --tools base in the "
            "tool_calls world)", "take a stronger model"))
    if mixed == 0 and success > 0.5:
        return line, _stop(f"every attempt at each of {n} tasks succeeded", OWN if own_model else (
            "bring harder base tasks", "take a weaker model"))
    if mixed == 0:  # more attempts at tasks that are never solved end like the first
        return line, _stop(f"none of the groups of {G} attempts at {n} tasks had rewards that "
                           "differ", OWN if own_model else (
                               START, "bring easier base tasks", "take a stronger model"))
    return line, ""


def _stop(what: str, advice) -> str:
    """One paragraph: what is wrong, what it means, what to do."""
    return (f"stopped before training: {what}, so neither the agent nor the simulator would learn "
            f"anything. What helps: {'; or '.join(advice)}. samples.jsonl has what the model "
            "wrote. To go on all the same, add --no-gate.")
