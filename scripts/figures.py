"""Draw the figure of the main result from its records.

Paper: Figures 4 and 5, held-out success by epoch. The second panel, final success by tool, has no
counterpart in the paper.

Usage: `python -m scripts.figures` writes results/result.png from results/cross.jsonl, the records
of `python -m scripts.experiments cross --seeds 10 --first-seed 20`.

Deviations: only four of the eighteen cells (settings) are drawn. A line is the mean over base
models, without error bars: differences between cells are paired by base model, and EXPERIMENTS.md
gives their intervals.
"""

from pathlib import Path

import numpy as np

from data_pool import read_jsonl

RESULTS = Path(__file__).resolve().parent.parent / "results"
LINES = {  # {cell: (legend, colour and line style)}; distinct even without colours
    "genenv, uniform, share 0.75": ("trained simulator (default)", "C1-"),
    "random, curated, share 0.25": ("untrained, curated, a quarter base tasks", "C0-"),
    "random, curated, share 0.75": ("untrained, curated seeds", "C0--"),
    "random, uniform, share 0.75": ("untrained", "C7:")}


def main():
    """Draw both panels and write the picture."""
    from matplotlib import pyplot
    pyplot.rcParams.update({"axes.grid": True, "grid.alpha": 0.3})
    records = read_jsonl(RESULTS / "cross.jsonl")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    for cell, (label, style) in LINES.items():
        runs = [r["metrics"] for r in records if r["name"] == cell]
        # Left: average over base models, epoch by epoch.
        curves = [[m["validation"] for m in metrics] for metrics in runs]
        left.plot(np.mean(curves, 0), style, label=label)
        # Right: success on the held-out tasks of each tool at the end.
        ends = [metrics[-1]["validation_by"] for metrics in runs]
        rates = np.mean([list(by_tool.values()) for by_tool in ends], 0)
        right.plot(list(ends[0]), rates, style, marker="o")
    left.set(title="Held-out success, mean of ten base models", ylim=(0, 1),
             xlabel="epoch (0: before training)")
    left.legend(loc="lower right")
    right.set(title="The same after the last epoch, by hardest tool of the task", ylim=(0, 1.02),
              xlabel="tool, from easy to hard (base tasks use the first four)")
    figure.savefig(RESULTS / "result.png", dpi=100)


if __name__ == "__main__":
    main()
