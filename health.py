"""When co-evolution goes wrong, say so: plain-word warnings from the metrics.

What of the paper this is: nothing; the failure modes are those that users of such systems report
(collapse, starvation, exploitation of noise). TROUBLESHOOTING.md has a paragraph on each.

How it is run: measure.py calls `warnings` once per epoch. A check is a function of the record, the
history of records and the options, named `warn_...`, that returns a sentence or nothing.
"""


def warn_collapse(r, history, o):
    """The simulator writes few different tasks, or uses few skills."""
    first = history[1] if len(history) > 1 else None
    if o.variant == "static" or not first or not r["written"]:
        return None
    share = r["distinct_tasks"] / r["written"]
    before = first["distinct_tasks"] / max(1, first["written"])
    if share < 0.5 * before or r["skill_entropy"] < 0.6 * first["skill_entropy"]:
        return (f"collapse: the simulator repeats itself ({r['distinct_tasks']} distinct of "
                f"{r['written']} written, skill entropy {r['skill_entropy']:.2f} bits, "
                f"{first['skill_entropy']:.2f} at first): raise --env-kl or --base-share, "
                "lower --env-updates")


def warn_starvation(r, history, o):
    """Almost nothing falls into the band, so the simulator learns from a handful of tasks."""
    if o.variant == "genenv" and r["epoch"] > 0 and r["env_kept"] < 0.02 * max(1, r["written"]):
        return (f"starvation: {r['env_kept']} of {r['written']} tasks fell into the band "
                f"|p_hat - alpha| <= {o.k_min}: raise --k-min, or move --alpha towards the "
                f"success rate {r['success_rate']:.2f}")


def warn_stuck(r, history, o):
    """The agent solves everything or nothing: no group has a signal."""
    last = [h["success_rate"] for h in history[-2:]] + [r["success_rate"]]
    if len(last) == 3 and r["distinct_tasks"] and (max(last) < 0.02 or min(last) > 0.98):
        how = "solves no task: start from easier base tasks" if max(last) < 0.02 else \
            "solves every task: raise --env-updates, lower --base-share, or bring harder base tasks"
        return f"stuck: for three epochs the agent {how}"


def warn_zero_variance(r, history, o):
    """Most groups are all right or all wrong and teach nothing."""
    if r["epoch"] > 0 and r["zero_variance"] > 0.9:
        return (f"no signal: {r['zero_variance']:.0%} of the groups have equal rewards: raise --G, "
                "or let the simulator aim nearer to p_hat = 0.5")


def warn_kl(r, history, o):
    """The update cap was hit: this epoch's simulator update is shorter than asked for."""
    if r["env_capped"] and history and history[-1].get("env_capped"):
        return (f"KL cap: the simulator's update was stopped after {r['env_steps']} of "
                f"{o.env_updates} steps, two epochs running: lower --env-lr or raise --env-kl-cap")


def warn_drift(r, history, o):
    """The simulator is far from the initial one: text quality is no longer guaranteed."""
    if r["env_kl"] > 3.0:
        return (f"drift: the simulator is {r['env_kl']:.1f} nats per token away from the initial "
                "one: raise --env-kl")


def warn_invalid(r, history, o):
    """Much of what the simulator writes is no task."""
    lost = sum(r["invalid"].values())
    if r["written"] and lost > 0.5 * r["written"]:
        worst = max(r["invalid"], key=r["invalid"].get)
        return (f"invalid: {lost} of {r['written']} generations are no task, most often "
                f"{worst!r} ({r['invalid'][worst]}): look at samples.jsonl, raise --env-kl")


def warn_copies(r, history, o):
    """The simulator hands back its seed."""
    copies = r["invalid"].get("copy of the seed", 0)
    if r["written"] and copies > 0.25 * r["written"]:
        return (f"copies: {copies} of {r['written']} generations repeat their seed: raise "
                "--temperature or --env-kl")


def warn_truncated(r, history, o):
    """Responses run into the length limit and earn nothing."""
    if r["truncated"] > 0.2:
        return (f"truncated: {r['truncated']:.0%} of the responses hit --max-response-tokens "
                f"{o.max_response_tokens}: raise it")


def warn_ambiguous(r, history, o):
    """The simulator cannot solve its own tasks: their answers are probably wrong or ambiguous."""
    lost = r["invalid"].get("no agreement", 0)
    if o.agreement and r["written"] and lost > 0.4 * r["written"]:
        return (f"ambiguous: {lost} of {r['written']} tasks failed the agreement check: their "
                "answers are doubtful; look at samples.jsonl before trusting the success rate")


def warn_exploitation(r, history, o):
    """Tasks inside the band do not get easier although the agent trains on them."""
    recent = [*history[-3:], r]
    n = sum(h["replays"] for h in recent)
    gain = sum(h["replay_gain"] * h["replays"] for h in recent) / max(1, n)
    in_band = all(abs(h["success_rate"] - h["alpha"]) < 0.15 for h in recent)
    better = r["validation"] - recent[0]["validation"]
    if len(recent) == 4 and recent[0]["epoch"] > 0 and n >= 20 and in_band and gain < 0.01 \
            and better < 0.01:
        return (f"exploitation: the success rate stays near alpha, yet {n} replayed tasks changed "
                f"by {gain:+.2f} and validation by {better:+.2f} in three epochs: the simulator "
                "may live on noise or on wrong answers; check them, or use --agreement")


CHECKS = [f for name, f in list(globals().items()) if name.startswith("warn_")]


def warnings(record: dict, history: list, o) -> list[str]:
    """All warnings that hold for this epoch, each one sentence with what to change."""
    return [text for text in (check(record, history, o) for check in CHECKS) if text]
