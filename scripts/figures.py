"""README's figure of the result, drawn from the records: python -m scripts.figures

Paper: its Figures 4 and 5, held-out success of the variants by epoch; beside it, what the paper
does not show, the same at the end by tool.

Usage: `python -m scripts.figures` writes results/result.png from results/ladder.jsonl, the records
of `python -m scripts.experiments ladder --seeds 5`.

Deviations: a line is the mean over base models, without error bars: differences between variants
are paired by base model, and their intervals stand in EXPERIMENTS.md.
"""

import sys
from pathlib import Path

import numpy as np

from model.files import read_jsonl

RESULTS = Path(__file__).resolve().parent.parent / "results"
LINES = {  # variant: (legend, colour, line style); told apart without colours, too
    "genenv": ("trained simulator", "#d9480f", "-"),
    "random, curated seeds": ("untrained, curated seed tasks", "#1864ab", "--"),
    "random": ("untrained simulator", "#1864ab", "-"),
    "static": ("static tasks", "#868e96", ":")}


def main():
    """Draw both panels and write the picture."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    records = read_jsonl(RESULTS / "ladder.jsonl")
    pyplot.rcParams.update({"font.size": 11})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    for variant, (label, colour, style) in LINES.items():
        runs = [r["metrics"] for r in records if r["name"] == variant]
        # left: mean over base models, epoch by epoch
        curves = np.array([[m["validation"] for m in metrics] for metrics in runs])
        left.plot(curves.mean(0), style, color=colour, label=label, linewidth=2)
        # right: the same at the end, for the held-out tasks of each tool
        tools = list(runs[0][-1]["validation_by"])
        ends = np.array(
            [[metrics[-1]["validation_by"][tool] for tool in tools] for metrics in runs]
        )
        right.plot(tools, ends.mean(0), style, color=colour, marker="o", markersize=5, linewidth=2)
    left.set(title="Held-out success", xlabel="epoch (0: before training)", ylim=(0, 1))
    left.legend(loc="lower right", frameon=False)
    right.set(title="After the last epoch, by hardest tool of the task", ylim=(0, 1.02),
              xlabel="tool, from easy to hard (seed tasks use the first four)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / "result.png", dpi=100)
    return 0


if __name__ == "__main__":
    sys.exit(main())
