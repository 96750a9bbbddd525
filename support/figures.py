"""Draw the figures of a run's page and of a comparison: curves by epoch.

Paper: its Figures 4-8, drawn from a run's metrics.jsonl: success on generated tasks with the alpha
band, validation, task and response length, solved and unsolved tasks. Added: mixed groups, entropy,
KL, the agent's reward, and what the simulator learns from.

Usage: report.py calls `of_one_run`, and scripts/compare.py calls `of_runs`. Both get a list of
{"panel": a Panel, "image": a PNG as a data URI}. Here a metric is a number in an epoch's record,
and a figure is a plot. Every vertical axis includes 0.

Deviations: what an epoch did not measure is not drawn. Names in a legend come from the user
(folders, options, functions): they are wrapped, never cut, and never rendered as mathematics.
"""
import base64
import io
import textwrap
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from errors import printable
from support.metrics import VALIDATION


class Panel(NamedTuple):
    """Describe one figure of curves."""
    title: str
    unit: str      # of the vertical axis, or the field of a record that names it
    metrics: dict  # {key of a record: its legend}; a comparison of settings draws the first one
    caption: str


PANELS = [  # in the order of a page
    Panel("Held-out success", "share",
          {"validation": "sampled answers", "validation_greedy": "greedy answers"},
          "On tasks that neither model is trained on; it should rise."),
    Panel("Success on generated tasks", "share",
          {"success_rate": "all attempts", "solved": "tasks solved each time",
           "unsolved": "tasks never solved"},
          "A trained simulator imitates tasks in the band. Success may end above it: the agent "
          "learns from them."),
    Panel("Mixed groups", "share",
          {"mixed_share": "of generated tasks",
           "mixed_of_possible": "of those possible at their success"},
          "Only tasks with both right and wrong answers teach the agent. A modest fall is "
          "normal; near 0 learning stops. If few of those possible are mixed, the agent solves "
          "each task always or never."),
    Panel("Reward", "share", {"reward": "mean over all attempts"},
          "The agent is trained on this: Eq. 1, or what --agent-reward makes of it."),
    Panel("Tasks in the band", "tasks", {"env_kept": "of this epoch"},
          "A trained simulator imitates these tasks. Epoch 0 has one batch of tasks."),
    Panel("Length of generated tasks", "length_unit", {"task_length": "their mean"},
          "Longer ones are usually harder."),
    Panel("Variety of generated tasks", "bits", {"skill_entropy": "of skills"},
          "A falling curve means that skills are being lost."),
    Panel("Refused texts", "share", {"refused": "of all texts"},
          "Malformed, held-out and so on, without copies of the seed task and duplicates."),
    Panel("Entropy of the agent", "nats per token", {"entropy": "sampled answers"},
          "Near 0 all attempts at a task are alike and teach nothing. If it keeps climbing, "
          "they turn into noise."),
    Panel("Length of responses", "tokens", {"response_length": "to generated tasks"},
          "Longer tasks need longer responses. At --max-response-tokens they are cut off and "
          "earn nothing."),
    Panel("KL", "nats per token",
          {"env_kl": "simulator", "env_kl_step": "its last update", "kl": "agent"},
          "How far a model has moved from its start. Do not trust one above 2."),
    Panel("Target alpha", "share", {"alpha": "alpha"},
          "Set by --alpha-schedule from epoch 1 on; the band lies around it."),
]
LEGEND_COLUMNS = 44  # this many characters fit beside a line's sample


# ---------------------------------------------------------------------------------------------
# what is drawn


def of_one_run(metrics, k_min: float) -> list:
    """Return all figures of a run. metrics: its records; k_min: half the width of its band."""
    epochs = [m["epoch"] for m in metrics]
    alpha = np.array([m["alpha"] for m in metrics])
    return of_runs({"": [metrics]}, (epochs, alpha - k_min, alpha + k_min))


def of_runs(runs: dict, band=()) -> list:
    """Return a figure for each panel that has something to show.

    runs: {setting: [records of each seed's run]}; band: the alpha band of a single run, in the form
    that `curves` takes.
    """
    metrics = next(iter(runs.values()))[0]
    figures = []
    for panel in PANELS:
        lines = lines_of(panel, runs)
        if any(lines.values()):
            unit = metrics[0].get(panel.unit, panel.unit)
            around = band if "success_rate" in panel.metrics else ()
            figures.append({"panel": panel, "image": data_uri(curves(lines, unit, around))})
    return figures


def lines_of(panel, runs: dict) -> dict:
    """Return {legend: lines of points} of a panel: all of its metrics if there is one setting, or
    the first metric of several settings."""
    if len(runs) == 1:
        [records] = runs.values()
        return {legend: points(records, key) for key, legend in panel.metrics.items()}
    first = next(iter(panel.metrics))
    return {setting: points(records, first) for setting, records in runs.items()}


def points(runs, key) -> list:
    """Return a line [(epoch, value)] for each run that measured a metric.

    runs: the records of each run.
    """
    lines = [[(m["epoch"], m[key]) for m in metrics if was_measured(m, key)] for metrics in runs]
    return [line for line in lines if line]


def was_measured(m, key) -> bool:
    """Return whether a record's value is from its own epoch: validation may be repeated."""
    if key in VALIDATION and m["validated"] != m["epoch"]:
        return False
    return m[key] is not None


# ---------------------------------------------------------------------------------------------
# how it is drawn


def curves(lines: dict, unit: str, band=()):
    """Draw {name: lines of points}. A setting has the same colour in every figure.

    band: (epochs, its lower edge, its upper edge).
    """
    labels = [figure_text(name) for name in lines]
    # on a page a point is about 1.2 pixels
    height = 3.2 + 0.2 * "\n".join(labels).count("\n")
    figure = Figure(figsize=(4.6, height), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel="epoch", ylabel=figure_text(unit))
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    # the vertical axis includes 0 and ends just above the highest point
    axis.axhline(lw=1, color="0.8")

    legend = {}  # {label: what it explains}
    for index, (label, runs) in enumerate(zip(labels, lines.values())):
        # draw thin lines over thick ones, because they may coincide
        width = 3 / (1 + index / 2)
        for line in runs:
            [legend[label]] = axis.plot(*zip(*line), color=f"C{index}", lw=width, marker=".")
    if band:
        legend["the band alpha ± k_min"] = axis.fill_between(*band, alpha=0.15)
    axis.grid(alpha=0.25)
    figure.legend(legend.values(), legend.keys(), loc="outside upper left", frameon=False)
    return figure


def figure_text(name: str) -> str:
    """Return a user's name for a figure, wrapped and never cut."""
    lines = textwrap.wrap(printable(name), LEGEND_COLUMNS, break_on_hyphens=False)
    # matplotlib hides labels that begin with "_", and reads mathematics between "$"
    return " " + "\n ".join(lines).replace("$", r"\$")


def data_uri(figure) -> str:
    """Return a figure as an image that a page can embed."""
    png = io.BytesIO()
    figure.savefig(png, dpi=200)
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
