"""Make the tables of scripts/experiments.py: means over seeds, 95 % t-intervals, paired
differences.

Paper: RQ1 to RQ4 report held-out success and success on generated tasks.

Usage: `python -m scripts.tables results/words.jsonl` prints the tables of any suite's file: its
variants, and the first minus each of the others. `python -m scripts.tables
results/real_models.json` prints the mean gain of each comparison, and the mean of these means.
scripts/experiments.py calls `table(records, cells, comparisons, cross)`, where a cell is the name
of a variant; a cell that lacks runs is shown with those that it has. results/notes.md lists what
was expected of the suites `cross` and `cross2`.

Deviations: equal time means equal CPU seconds of training, because they do not depend on other work
on the machine; the paper compares epochs. The more expensive run of a pair is read at an earlier
point. The median cost ratio of all pairs sets this point, because the time of a single run varies.
"""
import json
import sys
from pathlib import Path

import numpy as np

from data_pool import read_jsonl
from errors import exit_code
from support.metrics import interval, mean, mixed_of_possible


# ---------------------------------------------------------------------------------------------
# measures of a run; epochs: the run's records, from epoch 0


def mean_of(key: str, epochs) -> float | None:
    """Return the mean of a figure over the epochs that measured it; None if none did."""
    return mean(m[key] for m in epochs if m.get(key) is not None)


def last_epoch(epochs) -> float:
    """Return held-out success after the last epoch."""
    return epochs[-1]["validation"]


def held_out_by(tools, epochs) -> float:
    """Return held-out success on these tools, which have equally many tasks, averaged over the
    epochs: a single validation varies by several hundredths."""
    return mean(m["validation_by"][tool] for m in epochs for tool in tools)


def other_tools(epochs) -> list:
    """Return all tools but the hardest."""
    return [tool for tool in epochs[-1]["validation_by"] if tool != "tri"]


def later(epochs) -> list:
    """Return the second half, where an untrained simulator has had time to go stale."""
    return epochs[(len(epochs) + 1) // 2:]


def of_possible(epochs) -> float | None:
    """Return the mean of metrics.mixed_of_possible. It is computed here, for eight attempts per
    task, because older records lack it."""
    figures = [mixed_of_possible(m["mixed_share"], m["success_rate"], 8) for m in epochs]
    return mean(figure for figure in figures if figure is not None)


def cpu_minutes(epochs) -> float:
    """Return the CPU time of training, without validation."""
    return sum(m["cpu_seconds"] for m in epochs) / 60


# {heading of a column: measure} of held-out success; differences are taken at equal updates and at
# equal CPU time
HELD_OUT = {
    "held-out, last epoch": last_epoch,
    "held-out, mean of epochs": lambda epochs: mean_of("validation", epochs[1:] or epochs)}
CROSS_HELD_OUT = {
    "last four validations": lambda epochs: mean_of("validation", epochs[-4:]),
    "tri": lambda epochs: held_out_by(["tri"], epochs[-4:]),
    "the eleven others": lambda epochs: held_out_by(other_tools(epochs), epochs[-4:])}
# measures that explain it
REASONS = {
    "alpha, 2nd half": lambda epochs: mean_of("alpha", later(epochs)),
    "success on its tasks, 2nd half": lambda epochs: mean_of("success_rate", later(epochs)),
    "mixed groups, 2nd half": lambda epochs: mean_of("mixed_share", later(epochs)),
    "the same, of those possible": lambda epochs: of_possible(later(epochs)),
    "CPU minutes": cpu_minutes}


# ---------------------------------------------------------------------------------------------
# measures of a pair of runs


def cost_ratio(pairs) -> float:
    """Return the median, over pairs, of the first run's CPU time divided by the second's."""
    return float(np.median([cpu_minutes(a) / cpu_minutes(b) for a, b in pairs]))


def at_equal_time(a, b, ratio: float, measure) -> float:
    """Return the measure of run a minus that of run b, at the total CPU time of the cheaper one.
    ratio: cost_ratio of all such pairs."""
    return after(min(1 / ratio, 1), a, measure) - after(min(ratio, 1), b, measure)


def after(share: float, epochs, measure) -> float:
    """Return a measure of a run at this share of its CPU time, interpolated between epochs."""
    clock = np.cumsum([m["cpu_seconds"] for m in epochs])
    values = [measure(epochs[:i + 1]) for i in range(len(epochs))]
    return float(np.interp(share * clock[-1], clock, values))


# ---------------------------------------------------------------------------------------------
# the tables


def table(records, cells, comparisons, cross=False) -> str:
    """Return Markdown: a row for each cell that has runs, then a row for each comparison (cell,
    other cell), at equal updates and at equal CPU time."""
    runs = {name: {} for name in cells}  # {cell: {seed: records of its epochs}}
    for r in records:
        if r["name"] in runs:  # older records have other cells, too
            runs[r["name"]][r["seed"]] = r["metrics"]
    pairs_by_head = {}
    for ours, other in comparisons:
        seeds = sorted(runs[ours].keys() & runs[other].keys())
        if seeds:
            pairs = [(runs[ours][seed], runs[other][seed]) for seed in seeds]
            pairs_by_head[f"{ours} - {other}"] = pairs

    held_out = CROSS_HELD_OUT if cross else HELD_OUT
    tables = [
        cell_rows(runs, {**held_out, **REASONS}),
        rows_at_equal_updates(pairs_by_head, held_out),
        rows_at_equal_time(pairs_by_head, held_out)]
    return "\n".join(line for rows in tables for line in [*markdown(rows), ""])


def cell_rows(runs, measures) -> list:
    """Return the headings of the first table, and a row for each cell."""
    rows = [["cell", "runs", *measures]]
    for name, seeds in runs.items():
        if seeds:
            figures = []
            for measure in measures.values():
                values = [measure(epochs) for epochs in seeds.values()]
                figures.append(interval(values, sign=False))
            rows.append([name, len(seeds), *figures])
    return rows


def rows_at_equal_updates(pairs_by_head, measures) -> list:
    """Return the headings of the second table, and a row for each comparison."""
    rows = [["difference at equal updates", "pairs", *measures]]
    for head, pairs in pairs_by_head.items():
        figures = []
        for measure in measures.values():
            figures.append(interval([measure(a) - measure(b) for a, b in pairs]))
        rows.append([head, len(pairs), *figures])
    return rows


def rows_at_equal_time(pairs_by_head, measures) -> list:
    """Return the headings of the third table, and a row for each comparison."""
    rows = [["difference at equal CPU time", "cost ratio", *measures]]
    for head, pairs in pairs_by_head.items():
        ratio, figures = cost_ratio(pairs), []
        for measure in measures.values():
            figures.append(interval([at_equal_time(a, b, ratio, measure) for a, b in pairs]))
        rows.append([head, f"{ratio:.2f}", *figures])
    return rows


def markdown(rows) -> list:
    """Return the lines of a Markdown table; the first row has the headings."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def overall(gains: dict) -> str:
    """Return a line for each comparison, with its mean gain, then one with the mean of these means.

    gains: {name: the gains of its pairs}.
    """
    lines = [f"{interval(values)}  {name}" for name, values in gains.items()]
    means = [mean(values) for values in gains.values()]
    return "\n".join([*lines, f"{interval(means)}  mean of these {len(means)}"])


def main(path) -> int:
    """Print the tables of a file of records, and return 0."""
    if path.endswith(".json"):
        print(overall(json.loads(Path(path).read_text())))
        return 0
    records = read_jsonl(path)
    first, *others = sorted({r["name"] for r in records})  # "genenv" is first
    print(table(records, [first, *others], [(first, name) for name in others]))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1])))
