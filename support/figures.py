"""Draw the figures of a run's page and of a comparison: curves and p_hat by epoch.

Paper: its Figures 4-8, drawn from a run's metrics.jsonl: success on generated tasks with the alpha
band, validation, task and response length, solved and unsolved tasks. Added: p_hat of every task,
mixed groups, entropy, KL, the agent's own reward, and what the simulator learns from.

Usage: report.py calls `of_one_run`, scripts/compare.py `of_runs`; both get [{"heading",
"figures": [{"title", "image", "caption"}]}], the image as a data URI. A metric is a number in an
epoch's record, a figure is a plot. All shares are drawn on one scale, from 0 to 1.

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
    unit: str      # "length": the world's unit, named in its records; "p_hat": no curves
    metrics: dict  # {key of a record: its legend}; the first one compares settings
    caption: str


SECTIONS = {  # {heading: its panels}
    "Success": [
        Panel("Held-out success", "share",
              {"validation": "sampled answers", "validation_greedy": "greedy answers"},
              "On tasks that neither model is trained on; it should rise. Comparisons use the "
              "sampled answers."),
        Panel("Success on generated tasks", "share",
              {"success_rate": "all attempts", "solved": "tasks solved each time",
               "unsolved": "tasks never solved"},
              "A trained simulator imitates tasks in the band. Success may end above it: the agent "
              "learns from them."),
        Panel("p_hat of new tasks", "p_hat", {},
              "Darker: a larger share of the epoch's new tasks. A trained simulator imitates those "
              "in the band. Tasks at 0 and 1 teach the agent nothing."),
        Panel("Mixed groups", "share",
              {"mixed_share": "of generated tasks",
               "mixed_of_possible": "of those possible at their success"},
              "Only tasks with both right and wrong answers teach the agent. A modest fall is "
              "normal; near 0 learning stops. If few of those possible are mixed, the agent solves "
              "each task always or never."),
        Panel("Reward by --agent-reward", "share", {"agent_reward": "mean over all attempts"},
              "What the agent was trained on. Success everywhere else follows Eq. 1."),
    ],
    "Generated tasks": [
        Panel("Tasks in the band", "tasks",
              {"env_kept": "of this epoch", "env_ess": "with earlier ones, by weight"},
              "Each run has its own band. A trained simulator imitates these tasks. Epoch 0 has "
              "one batch of tasks."),
        Panel("Length of generated tasks", "length", {"task_length": "their mean"},
              "Longer ones are usually harder."),
        Panel("Variety of generated tasks", "bits", {"skill_entropy": "of skills"},
              "A falling curve means that skills are being lost."),
        Panel("Refused texts", "share", {"refused": "of all texts"},
              "Malformed, held-out and so on; copies of the seed task and duplicates excluded."),
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
              "How far a model has moved from its start. Do not trust one above 2. Comparisons "
              "use the simulator's."),
    ],
    "Curriculum": [
        Panel("Target alpha", "share", {"alpha": "alpha"},
              "Set by --alpha-schedule from epoch 1 on; the band lies around it."),
    ],
}
BAND = "the band alpha ± k_min"
LEGEND_COLUMNS = 44  # this many characters fit beside a line's sample


# ---------------------------------------------------------------------------------------------
# what is drawn


def of_one_run(metrics, k_min: float) -> list:
    """Return all figures of a run. metrics: its records; k_min: half the width of its band."""
    band = {m["epoch"]: (m["alpha"] - k_min, m["alpha"] + k_min) for m in metrics}
    return of_runs({"": [metrics]}, band)


def of_runs(runs: dict, band=None) -> list:
    """Return a figure for each panel that has something to show.

    runs: {setting: [records of each seed's run]}; band: of a single run, as in `curves`.
    """
    sections = []
    for heading, panels in SECTIONS.items():
        drawn = []
        for panel in panels:
            figure = figure_of(panel, runs, band)
            if figure:
                drawn.append(page_entry(panel.title, figure, panel.caption))
        sections.append({"heading": heading, "figures": drawn})
    return sections


def figure_of(panel, runs: dict, band):
    """Return a panel's figure, or None if it has nothing to show."""
    first_run = next(iter(runs.values()))[0]
    if panel.unit == "p_hat":
        counts = [m["p_hat_counts"] for m in first_run]
        # drawn for a single run only: the tasks of several would not fit
        return p_hat_by_epoch(counts, band) if band and any(map(sum, counts)) else None
    lines = lines_of(panel, runs)
    if not any(lines.values()):
        return None
    around = band if "success_rate" in panel.metrics else None
    return curves(lines, unit_of(panel, first_run), around)


def lines_of(panel, runs: dict) -> dict:
    """Return {legend: points}: all metrics of one setting, or the first metric of several."""
    if len(runs) == 1:
        [records] = runs.values()
        return {legend: points(records, key) for key, legend in panel.metrics.items()}
    first = next(iter(panel.metrics))
    return {name: points(records, first) for name, records in runs.items()}


def page_entry(title: str, figure, caption: str) -> dict:
    """Return a figure as report.html.j2 expects it, with the image as a data URI."""
    image = base64.b64encode(png(figure)).decode()
    return {"title": title, "image": f"data:image/png;base64,{image}", "caption": caption}


def png(figure) -> bytes:
    """Return a figure as PNG."""
    data = io.BytesIO()
    figure.savefig(data, dpi=200)
    return data.getvalue()


def points(runs, key) -> list:
    """Return [(epoch, value in each run)] of a metric, for epochs that every run measured.

    runs: the records of each run.
    """
    by_run = []
    for metrics in runs:
        by_run.append({m["epoch"]: m[key] for m in metrics if was_measured(m, key)})
    epochs = set.intersection(*(set(values) for values in by_run))
    return [(t, [values[t] for values in by_run]) for t in sorted(epochs)]


def was_measured(m, key) -> bool:
    """Return whether a record's value is from its own epoch: validation may be repeated."""
    if key in VALIDATION and m["validated"] != m["epoch"]:
        return False
    return m[key] is not None


def unit_of(panel, metrics) -> str:
    """Return the label of a panel's vertical axis."""
    return metrics[-1]["length_unit"] if panel.unit == "length" else panel.unit


# ---------------------------------------------------------------------------------------------
# how it is drawn


def canvas(unit: str, legend_lines: int):
    """Return an empty figure and its axes, with epochs along x."""
    # a page shows a point as about 1.2 pixels
    figure = Figure(figsize=(4.6, 3.0 + 0.2 * legend_lines), layout="constrained")
    axis = figure.subplots()
    axis.set_xlabel("epoch")
    axis.set_ylabel(printable(unit), parse_math=False)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return figure, axis


def curves(lines: dict, unit: str, band=None):
    """Draw {name: points} as means over runs, with standard errors if there are several.

    A name has the same colour in every figure. band: {epoch: (lowest, highest)}.
    """
    labels = [legend_label(name) for name in lines]
    figure, axis = canvas(unit, legend_lines=sum(label.count("\n") + 1 for label in labels))
    for index, (label, line) in enumerate(zip(labels, lines.values())):
        if not line:
            continue
        epochs = [t for t, _ in line]
        means = [fmean(values) for _, values in line]
        errors = [standard_error(values) for _, values in line]
        # draw thin lines over thick ones, as they may coincide
        width = 3 / (1 + index / 2)
        axis.errorbar(epochs, means, errors if any(errors) else None, label=label,
                      color=f"C{index}", lw=width, elinewidth=1, marker="o", ms=3)
    if band:
        lowest, highest = zip(*band.values())
        axis.fill_between(list(band), lowest, highest, alpha=0.15, lw=0, label=BAND)
    axis.set_ylim(bottom=0)
    if unit == "share":
        axis.set_ylim(-0.02, 1.02)
    axis.grid(alpha=0.25)
    add_legend(figure)
    return figure


def p_hat_by_epoch(counts: list, band: dict):
    """Draw, for each epoch, the share of new tasks solved 0, 1, ... G times, and the band.

    counts: p_hat_counts of each epoch; band as in `curves`.
    """
    figure, axis = canvas("p_hat", legend_lines=1)
    shares = []
    for of_epoch in counts:
        total = max(1, sum(of_epoch))  # an epoch without tasks stays white
        shares.append([count / total for count in of_epoch])
    G = len(counts[0]) - 1
    # put each epoch and each p_hat = k / G in the middle of its cell
    epoch_edges = [t - 0.5 for t in band] + [max(band) + 0.5]
    p_hat_edges = [(k - 0.5) / G for k in range(G + 2)]
    rows = list(zip(*shares))  # (G + 1, epochs)
    mesh = axis.pcolormesh(epoch_edges, p_hat_edges, rows, cmap="Greys", vmin=0)
    figure.colorbar(mesh, label="share of tasks")
    axis.plot(list(band), list(band.values()), color="C1", marker=".", label=[BAND, "_"])
    add_legend(figure)
    return figure


def standard_error(values) -> float:
    """Return the standard error of the mean; 0 for a single value, which has no spread."""
    if len(values) == 1:
        return 0.0
    return stdev(values) / len(values) ** 0.5


def legend_label(name: str) -> str:
    """Return a user's name for a legend, wrapped and never cut.

    matplotlib hides labels that begin with "_", so a space is put before one.
    """
    lines = textwrap.wrap(printable(name), LEGEND_COLUMNS, break_on_hyphens=False)
    label = "\n".join(lines) or " "
    return f" {label}" if label.startswith("_") else label


def add_legend(figure):
    """Put the legend above the axes; a "$" in a name is not mathematics."""
    legend = figure.legend(loc="outside upper left", frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
