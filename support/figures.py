"""Draw the figures of a run's page and of a comparison: curves by epoch.

Paper: its Figures 4-8, drawn from a run's metrics.jsonl. They show success on generated tasks with
the band around alpha, validation, task and response length, solved and unsolved tasks. Added: mixed
groups, entropy, KL, the agent's reward, and what the simulator learns from.

Usage: report.py calls `of_one_run`, and scripts/compare.py calls `of_runs`. Both functions return a
list of {"panel": a Panel, "image": a PNG as a data URI}. In this file, a metric is a number in an
epoch's record, and a figure is a plot. Every vertical axis includes 0.

Deviations: what an epoch did not measure is not drawn. Legends contain names from the user (of
options and functions). These are wrapped, never cut, and never rendered as mathematics.
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
    """Describe one figure."""
    title: str
    unit: str      # of the vertical axis, or the field of a record that names this unit
    metrics: dict  # {key of a record: its legend}; a comparison draws only the first one
    caption: str


PANELS = [  # in the order of a page
    Panel("Held-out success", "share",
          {"validation": "sampled answers", "validation_greedy": "greedy answers"},
          "On tasks on which neither model is trained. It should rise."),
    Panel("Success on generated tasks", "share",
          {"success_rate": "all attempts", "solved": "tasks solved each time",
           "unsolved": "tasks never solved"},
          "A trained simulator imitates tasks in the band. Success may end above the band, because "
          "the agent learns from these tasks."),
    Panel("Mixed groups", "share",
          {"mixed_share": "of generated tasks",
           "mixed_of_possible": "of those possible at this success rate"},
          "The attempts at a task teach the agent only if they are mixed, with right and wrong "
          "answers. A modest fall is normal; near 0 learning stops. If few of the groups that "
          "could be mixed are, the agent solves each task always or never."),
    Panel("Reward", "share", {"reward": "mean over all attempts"},
          "What the agent is trained on: Eq. 1, or what --agent-reward makes of it."),
    Panel("Tasks in the band", "tasks", {"env_kept": "of this epoch"},
          "A trained simulator imitates these tasks. Epoch 0 has only one batch of tasks."),
    Panel("Length of generated tasks", "length_unit", {"task_length": "their mean"},
          "Longer tasks are usually harder."),
    Panel("Variety of generated tasks", "bits", {"skill_entropy": "of skills"},
          "A falling curve means that some skills are disappearing from the tasks."),
    Panel("Refused texts", "share", {"refused": "of all texts"},
          "Malformed tasks, held-out tasks and so on. Copies of the seed task and duplicates are "
          "not counted."),
    Panel("Entropy of the agent", "nats per token", {"entropy": "sampled answers"},
          "Near 0 all attempts at a task are alike and teach nothing. If entropy keeps climbing, "
          "attempts turn into noise."),
    Panel("Length of responses", "tokens", {"response_length": "to generated tasks"},
          "Longer tasks need longer responses. A response is cut off at --max-response-tokens and "
          "then earns nothing."),
    Panel("KL", "nats per token",
          {"env_kl": "simulator", "env_kl_step": "its last update", "kl": "agent"},
          "How far a model has moved from its start, and the simulator in its last update. Do not "
          "trust a model above 2."),
    Panel("Target alpha", "share", {"alpha": "alpha"},
          "Set by --alpha-schedule from epoch 1 on. The band lies around it."),
]
LEGEND_COLUMNS = 44  # this many characters fit beside a line's sample


# ---------------------------------------------------------------------------------------------
# what is drawn


def of_one_run(metrics, k_min: float) -> list:
    """Return all figures of a run. metrics: its records. k_min: half the width of the band."""
    epochs = [m["epoch"] for m in metrics]
    alpha = np.array([m["alpha"] for m in metrics])
    return of_runs({"": [metrics]}, (epochs, alpha - k_min, alpha + k_min))


def of_runs(runs: dict, band=()) -> list:
    """Return a figure for each panel that has something to show.

    runs: {setting: [the records of each run]}. band: that of a single run, as `curves` takes it.
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
    """Return {legend: lines, as `points` returns them}: a panel's metrics if there is one setting,
    else its first metric in each setting."""
    if len(runs) == 1:
        [records] = runs.values()
        return {legend: points(records, key) for key, legend in panel.metrics.items()}
    first = next(iter(panel.metrics))
    return {setting: points(records, first) for setting, records in runs.items()}


def points(runs, key) -> list:
    """Return a line [(epoch, value), ...] for each run that measured a metric.

    runs: a list of the records of each run. key: the metric's key in a record.
    """
    lines = [[(m["epoch"], m[key]) for m in metrics if was_measured(m, key)] for metrics in runs]
    return [line for line in lines if line]


def was_measured(m, key) -> bool:
    """Return whether a record's value was measured in its own epoch. If validation was skipped, the
    record repeats an earlier value."""
    if key in VALIDATION and m["validated"] != m["epoch"]:
        return False
    return m[key] is not None


# ---------------------------------------------------------------------------------------------
# how it is drawn


def curves(lines: dict, unit: str, band=()):
    """Return a figure of {name: lines of points}. A setting has the same colour in every figure.

    unit: the label of the vertical axis. band: (epochs, lower edges, upper edges), or empty.
    """
    labels = [figure_text(name) for name in lines]
    # in inches, with more room for a longer legend; on a page a point is about 1.2 pixels
    height = 3.2 + 0.2 * "\n".join(labels).count("\n")
    figure = Figure(figsize=(4.6, height), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel="epoch", ylabel=figure_text(unit))
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    # draw a line at 0, so that the vertical axis reaches from 0 to just above the highest point
    axis.axhline(lw=1, color="0.8")

    legend = {}  # {label: the line or band that it explains}
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
    """Return a name as text for a figure, wrapped and never cut. name: perhaps a user's."""
    lines = textwrap.wrap(printable(name), LEGEND_COLUMNS, break_on_hyphens=False)
    # matplotlib would hide a label that begins with "_", and read mathematics between two "$"
    return " " + "\n ".join(lines).replace("$", r"\$")


def data_uri(figure) -> str:
    """Return a figure as an image that a page can embed."""
    png = io.BytesIO()
    figure.savefig(png, dpi=200)
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
