"""Draw the figures of a run's page and of a comparison: curves by epoch.

Paper: its Figures 4-8, drawn from a run's metrics.jsonl: success on generated tasks with the alpha
band, validation, task and response length, solved and unsolved tasks. Added: mixed groups, entropy,
KL, the agent's own reward, and what the simulator learns from.

Usage: report.py calls `of_one_run`, scripts/compare.py calls `of_runs`. Both get [{"heading",
"figures": [{"title", "image", "caption"}]}] with the image as a data URI. A metric is a number in
an epoch's record, a figure is a plot. All shares are drawn on one scale, from 0 to 1.

Deviations: what an epoch did not measure is not drawn. Names in a legend come from the user
(folders, options, functions): they are wrapped, never cut, and never rendered as mathematics.
"""
import base64
import io
import textwrap
from statistics import fmean, stdev
from typing import NamedTuple

from matplotlib.figure import Figure

from errors import printable
from support.metrics import VALIDATION


class Panel(NamedTuple):
    """Describe one figure of curves."""
    title: str
    unit: str      # of the vertical axis, or the field of a record that names it
    metrics: dict  # {key of a record: its legend}; the first one compares settings
    caption: str


SECTIONS = {  # {heading: its panels}
    "Success": [
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
        Panel("Reward by --agent-reward", "share", {"agent_reward": "mean over all attempts"},
              "The agent was trained on this. Success everywhere else follows Eq. 1."),
    ],
    "Generated tasks": [
        Panel("Tasks in the band", "tasks",
              {"env_kept": "of this epoch"},
              "A trained simulator imitates these tasks. Epoch 0 has one batch of tasks."),
        Panel("Length of generated tasks", "length_unit", {"task_length": "their mean"},
              "Longer ones are usually harder."),
        Panel("Variety of generated tasks", "bits", {"skill_entropy": "of skills"},
              "A falling curve means that skills are being lost."),
        Panel("Refused texts", "share", {"refused": "of all texts"},
              "Malformed, held-out and so on, without copies of the seed task and duplicates."),
    ],
    "Health of both models": [
        Panel("Entropy of the agent", "nats per token", {"entropy": "sampled answers"},
              "Near 0 all attempts at a task are alike and teach nothing. If it keeps climbing, "
              "they turn into noise."),
        Panel("Length of responses", "tokens", {"response_length": "to generated tasks"},
              "Longer tasks need longer responses. At --max-response-tokens they are cut off and "
              "earn nothing."),
        Panel("KL", "nats per token",
              {"env_kl": "simulator", "env_kl_step": "its last update", "kl": "agent"},
              "How far a model has moved from its start. Do not trust one above 2."),
    ],
    "Curriculum": [
        Panel("Target alpha", "share", {"alpha": "alpha"},
              "Set by --alpha-schedule from epoch 1 on; the band lies around it."),
    ],
}
LEGEND_COLUMNS = 44  # this many characters fit beside a line's sample


# ---------------------------------------------------------------------------------------------
# what is drawn


def of_one_run(metrics, k_min: float) -> list:
    """Return all figures of a run. metrics: its records; k_min: half the width of its band."""
    epochs = [m["epoch"] for m in metrics]
    lowest = [m["alpha"] - k_min for m in metrics]
    highest = [m["alpha"] + k_min for m in metrics]
    return of_runs({"": [metrics]}, (epochs, lowest, highest))


def of_runs(runs: dict, band=()) -> list:
    """Return a figure for each panel that has something to show.

    runs: {setting: [records of each seed's run]}; band: of a single run, as in `curves`.
    """
    metrics = next(iter(runs.values()))[0]
    sections = []
    for heading, panels in SECTIONS.items():
        entries = []
        for panel in panels:
            lines = lines_of(panel, runs)
            if not any(lines.values()):
                continue
            unit = metrics[0].get(panel.unit, panel.unit)
            around = band if "success_rate" in panel.metrics else ()
            entries.append(page_entry(panel, curves(lines, unit, around)))
        sections.append({"heading": heading, "figures": entries})
    return sections


def lines_of(panel, runs: dict) -> dict:
    """Return {legend: points}: all metrics of one setting, or the first metric of several."""
    if len(runs) == 1:
        [records] = runs.values()
        return {legend: points(records, key) for key, legend in panel.metrics.items()}
    first = next(iter(panel.metrics))
    return {name: points(records, first) for name, records in runs.items()}


def page_entry(panel, figure) -> dict:
    """Return a figure as report.html.j2 expects it, with the image, a PNG, as a data URI."""
    png = io.BytesIO()
    figure.savefig(png, dpi=200)
    image = base64.b64encode(png.getvalue()).decode()
    return {"title": panel.title, "image": f"data:image/png;base64,{image}",
            "caption": panel.caption}


def points(runs, key) -> list:
    """Return [(epoch, value in each run)] of a metric, for epochs that every run measured.

    runs: the records of each run.
    """
    by_epoch = {}
    for metrics in runs:
        for m in metrics:
            if was_measured(m, key):
                by_epoch.setdefault(m["epoch"], []).append(m[key])
    return [(t, values) for t, values in sorted(by_epoch.items()) if len(values) == len(runs)]


def was_measured(m, key) -> bool:
    """Return whether a record's value is from its own epoch: validation may be repeated."""
    if key in VALIDATION and m["validated"] != m["epoch"]:
        return False
    return m[key] is not None


# ---------------------------------------------------------------------------------------------
# how it is drawn


def canvas(unit: str, legend: str):
    """Return an empty figure, with room for a legend, and its axes, with epochs along x."""
    # on a page a point is about 1.2 pixels
    height = 3.2 + 0.2 * legend.count("\n")
    figure = Figure(figsize=(4.6, height), layout="constrained")
    axis = figure.subplots()
    axis.set_xlabel("epoch")
    axis.set_ylabel(printable(unit), parse_math=False)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return figure, axis


def curves(lines: dict, unit: str, band=()):
    """Draw {name: points} as means over runs, with standard errors if there are several.

    A name has the same colour in every figure. band: (epochs, its lower edge, its upper edge).
    """
    labels = [legend_label(name) for name in lines]
    figure, axis = canvas(unit, legend="\n".join(labels))
    for index, (label, line) in enumerate(zip(labels, lines.values())):
        if not line:
            continue
        epochs = [t for t, _ in line]
        means = [fmean(values) for _, values in line]
        errors = None
        if len(line[0][1]) > 1:
            errors = [stdev(values) / len(values) ** 0.5 for _, values in line]
        # draw thin lines over thick ones, because they may coincide
        width = 3 / (1 + index / 2)
        axis.errorbar(epochs, means, errors, label=label, color=f"C{index}", lw=width,
                      elinewidth=1, marker="o", ms=3)
    if band:
        axis.fill_between(*band, alpha=0.15, lw=0, label="the band alpha ± k_min")
    axis.set_ylim(bottom=0)
    if unit == "share":
        axis.set_ylim(-0.02, 1.02)
    axis.grid(alpha=0.25)
    figure.legend(loc="outside upper left", frameon=False)
    return figure


def legend_label(name: str) -> str:
    """Return a user's name for a legend, wrapped and never cut."""
    lines = textwrap.wrap(printable(name), LEGEND_COLUMNS, break_on_hyphens=False)
    # matplotlib hides labels that begin with "_", and reads mathematics between "$"
    return " " + "\n ".join(lines).replace("$", r"\$")
