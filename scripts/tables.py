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


# ---------------------------------------------------------------------------------------------
# what a run's records say: epochs is their list, that of epoch 0 first


def mean_of(key: str, epochs) -> float | None:
    """Mean of a figure over the epochs that measured it; None if none did."""
    return mean(m[key] for m in epochs if m[key] is not None)


def last_four(epochs, tools) -> float:
    """Held-out success on tasks of these tools, the mean of the last four validations: a single one
    varies by several hundredths."""
    return mean(m["validation_by"][tool] for m in epochs[-4:] for tool in tools)


def other_tools(epochs) -> list:
    """All tools but the hardest."""
    return [tool for tool in epochs[-1]["validation_by"] if tool != "tri"]


def first_at_goal(epochs) -> int:
    """The first epoch at GOAL or more; the last if there is none."""
    for m in epochs:
        if m["validation"] >= GOAL:
            return m["epoch"]
    return epochs[-1]["epoch"]


def later(epochs) -> list:
    """The second half, where an untrained simulator has had time to go stale."""
    return epochs[(len(epochs) + 1) // 2:]


def cpu_minutes(epochs) -> float:
    """CPU time of training, without validation."""
    return sum(m["cpu_seconds"] for m in epochs) / 60


# {head of a column: measure}; of the differences the first is taken at equal time as well
DIFFERENCES = {
    "held-out, last epoch": lambda epochs: epochs[-1]["validation"],
    "held-out, mean of epochs": lambda epochs: mean_of("validation", epochs[1:] or epochs)}
MEASURES = {
    **DIFFERENCES,
    "success on its tasks, 2nd half": lambda epochs: mean_of("success_rate", later(epochs)),
    "mixed groups, 2nd half": lambda epochs: mean_of("mixed_share", later(epochs)),
    "CPU minutes": cpu_minutes}
CROSS_DIFFERENCES = {
    "last four validations": lambda epochs: mean_of("validation", epochs[-4:]),
    "last validation": lambda epochs: epochs[-1]["validation"],
    "hard tools": lambda epochs: last_four(epochs, HARD),
    "tri": lambda epochs: last_four(epochs, ["tri"]),
    "the eleven others": lambda epochs: last_four(epochs, other_tools(epochs)),
    f"first epoch at {GOAL} (never: the last)": first_at_goal}
CROSS_MEASURES = {
    **MEASURES, **CROSS_DIFFERENCES,
    # epoch 0 trains nothing
    "trained tokens an update": lambda epochs: mean_of("trained_tokens", epochs[1:])}


# ---------------------------------------------------------------------------------------------
# of a pair


def cost_ratio(pairs) -> float:
    """How much dearer in CPU time the first run of a pair is, in the median."""
    return float(np.median([cpu_minutes(a) / cpu_minutes(b) for a, b in pairs]))


def at_equal_time(a, b, ratio: float, measure) -> float:
    """The measure of run a minus that of run b when both have cost what the cheaper one costs in
    all. ratio: cost_ratio of all such pairs."""
    return after(min(1 / ratio, 1), a, measure) - after(min(ratio, 1), b, measure)


def after(share: float, epochs, measure) -> float:
    """A measure of a run when it had spent this share of its CPU time, interpolated between
    epochs."""
    clock = np.cumsum([m["cpu_seconds"] for m in epochs])
    values = [measure(epochs[:i + 1]) for i in range(len(epochs))]
    return float(np.interp(share * clock[-1], clock, values))


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

    rows = [["cell", "runs", *measures]]
    for name, seeds in runs.items():
        if seeds:
            figures = [interval([measure(epochs) for epochs in seeds.values()])
                       for measure in measures.values()]
            rows.append([name, len(seeds), *(figure.replace("+", "") for figure in figures)])

    in_time, *_ = differences
    gains = [["difference", "pairs", *differences, f"{in_time}, equal CPU time", "cost ratio"]]
    for ours, other in comparisons:
        seeds = sorted(runs[ours].keys() & runs[other].keys())
        pairs = [(runs[ours][seed], runs[other][seed]) for seed in seeds]
        if pairs:
            figures = [interval([measure(a) - measure(b) for a, b in pairs])
                       for measure in differences.values()]
            ratio = cost_ratio(pairs)
            equal = interval(
                [at_equal_time(a, b, ratio, differences[in_time]) for a, b in pairs])
            gains.append([f"{ours} - {other}", len(pairs), *figures, equal, f"{ratio:.2f}"])
    return "\n".join([*markdown(rows), "", *markdown(gains), ""])


def markdown(rows) -> list:
    """The lines of a table, its heads first."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]
