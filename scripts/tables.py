"""The tables of scripts/experiments.py: means over seeds with 95 % t-intervals, and paired
differences.

Paper: RQ1 to RQ4 report held-out success and success on generated tasks.

Usage: `table(records, cells, comparisons, cross)`, cells and comparisons by name; cells that have
fewer runs yet are shown with as many as there are. results/notes.md has what was expected of the
suite `cross`.

Deviations: equal time is compared in CPU seconds of training, as other work on the machine does not
count then; the paper compares epochs. The dearer run of a pair is read earlier, by the median over
all pairs of how much dearer it is, as the time of a single run varies with the machine.
"""
import numpy as np

from support.metrics import interval, mean

HARD = "tri", "drop", "cube", "mir"  # where untrained simulators end lowest in results/ladder.jsonl
GOAL = 0.75  # held-out success
# two cells that must be equal, or all is in doubt
TWINS = "random, uniform, steered", "random, uniform, share 0.75"


# ---------------------------------------------------------------------------------------------
# what a run's records say: epochs is their list, that of epoch 0 first


def held_out(epochs, names=()) -> list:
    """Held-out success of each epoch, of all tasks or of the tools with these names."""
    if not names:
        return [m["validation"] for m in epochs]
    return [np.mean([m["validation_by"][name] for name in names]) for m in epochs]


def last(epochs) -> float:
    """Held-out success at the end."""
    return held_out(epochs)[-1]


def mean_of_epochs(epochs) -> float:
    """Mean held-out success of all epochs that trained."""
    return np.mean(held_out(epochs)[1:] or held_out(epochs))


def last_four(epochs, names=()) -> float:
    """The mean of the last four validations: a single one varies by several hundredths."""
    return np.mean(held_out(epochs, names)[-4:])


def hard(epochs) -> float:
    """The same of the hard tools."""
    return last_four(epochs, HARD)


def tri(epochs) -> float:
    """The same of the hardest."""
    return last_four(epochs, ["tri"])


def first_at_goal(epochs) -> int:
    """The first epoch at GOAL or more; the last if there is none."""
    for m in epochs:
        if m["validation"] >= GOAL:
            return m["epoch"]
    return epochs[-1]["epoch"]


def mean_of(key: str, epochs) -> float | None:
    """Mean of a figure over the epochs that measured it; None if none did."""
    return mean(m[key] for m in epochs if m[key] is not None)


def later(epochs) -> list:
    """The second half, where an untrained simulator has had time to go stale."""
    return epochs[1 + len(epochs) // 2:] or epochs


def success_later(epochs) -> float:
    """Success on the tasks that were written for the agent."""
    return mean_of("success_rate", later(epochs))


def mixed_later(epochs) -> float:
    """Share of these tasks with mixed rewards."""
    return mean_of("mixed_share", later(epochs))


def cpu_minutes(epochs) -> float:
    """CPU time of training, without validation."""
    return sum(m["cpu_seconds"] for m in epochs) / 60


def trained_tokens(epochs) -> float:
    """Tokens that an agent update trained on, in the mean; epoch 0 trains nothing."""
    return mean_of("trained_tokens", epochs[1:])


# {head of a column: measure}
MEASURES = {
    "held-out, last epoch": last,
    "held-out, mean of epochs": mean_of_epochs,
    "success on its tasks, 2nd half": success_later,
    "mixed groups, 2nd half": mixed_later,
    "CPU minutes": cpu_minutes}
CROSS_MEASURES = {
    **MEASURES,
    "last four validations": last_four,
    "hard tools": hard,
    "tri": tri,
    f"first epoch at {GOAL} (never: the last)": first_at_goal,
    "trained tokens an update": trained_tokens}
DIFFERENCES = {"last epoch": last, "mean of epochs": mean_of_epochs}
CROSS_DIFFERENCES = {"last four validations": last_four, "hard tools": hard, "tri": tri,
                     f"first epoch at {GOAL}": first_at_goal}


# ---------------------------------------------------------------------------------------------
# of a pair


def cost_ratio(pairs) -> float:
    """How much dearer in CPU time the first run of a pair is, in the median."""
    return float(np.median([cpu_minutes(a) / cpu_minutes(b) for a, b in pairs]))


def at_equal_time(a, b, ratio: float, measure) -> float:
    """The measure of run a minus that of run b when both have cost what the cheaper one costs in
    all. ratio: cost_ratio of all such pairs."""
    share_a = min(1 / ratio, 1)
    share_b = min(ratio, 1)
    return after(share_a, a, measure) - after(share_b, b, measure)


def after(share: float, epochs, measure) -> float:
    """A measure of a run when it had spent this share of its CPU time, interpolated between
    epochs."""
    clock = np.cumsum([m["cpu_seconds"] for m in epochs])
    values = [measure(epochs[:i + 1]) for i in range(len(epochs))]
    return float(np.interp(share * clock[-1], clock, values))


def comparable(epochs) -> list:
    """The records without CPU seconds, and without alpha and the tasks in its band, which an
    untrained simulator does not meet."""
    other = "cpu_seconds", "alpha", "env_kept"
    return [{key: m[key] for key in m if key not in other} for m in epochs]


# ---------------------------------------------------------------------------------------------
# the tables


def table(records, cells, comparisons, cross=False) -> str:
    """Markdown: a row for each cell that has runs, then a row for each comparison (cell, other
    cell)."""
    runs = {name: {} for name in cells}  # {cell: {seed: records of its epochs}}
    for r in records:
        if r["name"] in runs:  # a cell of an older version may have left
            runs[r["name"]][r["seed"]] = r["metrics"]
    measures, differences = MEASURES, DIFFERENCES
    if cross:
        measures, differences = CROSS_MEASURES, CROSS_DIFFERENCES

    lines = heads("cell", "runs", *measures)
    for name, seeds in runs.items():
        if seeds:
            figures = [interval([measure(epochs) for epochs in seeds.values()])
                       for measure in measures.values()]
            lines.append(row(name, len(seeds), *figures).replace("+", ""))

    in_time, *_ = differences  # what is compared at equal time as well
    equal_time = f"{in_time}, equal CPU time"
    lines += ["", *heads("difference", "pairs", *differences, equal_time, "cost ratio")]
    for ours, other in comparisons:
        seeds = sorted(runs[ours].keys() & runs[other].keys())
        pairs = [(runs[ours][seed], runs[other][seed]) for seed in seeds]
        if pairs:
            figures = [interval([measure(a) - measure(b) for a, b in pairs])
                       for measure in differences.values()]
            ratio = cost_ratio(pairs)
            equal = [at_equal_time(a, b, ratio, differences[in_time]) for a, b in pairs]
            name = f"{ours} - {other}"
            lines.append(row(name, len(pairs), *figures, interval(equal), f"{ratio:.2f}"))
    if cross:
        lines += ["", twins(runs)]
    return "\n".join(lines) + "\n"


def row(*cells) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def heads(*names) -> list:
    """The first two lines of a table."""
    return [row(*names), "|---" * len(names) + "|"]


def twins(runs) -> str:
    """Whether two cells that must be equal are, to the bit."""
    first, second = (runs[name] for name in TWINS)
    seeds = first.keys() & second.keys()
    equal = sum(comparable(first[seed]) == comparable(second[seed]) for seed in seeds)
    return f"*{TWINS[0]}* equals *{TWINS[1]}* to the bit in {equal} of {len(seeds)} pairs."
