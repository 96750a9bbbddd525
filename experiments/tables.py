"""Means, intervals, tables and figures of a results file.

What of the paper this is: the form of its claims: who wins, by how much, with how many tasks; and
its Figures 4-8, as means over seeds.

How it is run: `python -m experiments SUITE` at the end of a suite, or with --only-draw on what is
there. A column is a line of COLUMNS: its head, and a function of the metrics of one run.

Where it differs on purpose: 95 % t-intervals over seeds and differences paired by seed stand beside
every mean; on the tuning split nothing of the validation split is shown.
"""
import math
from pathlib import Path

import numpy as np

from data_pool import UserError, read_jsonl
from experiments.suites import SUITES
from runtime.report import validated

KEPT = ("epoch", "alpha", "success_rate", "validation", "validation_greedy",
        "validation_unsolved", "reward", "task_length", "response_length", "solved",
        "unsolved", "distinct_tasks", "skill_entropy", "env_kept", "env_kl", "env_ess", "synthetic",
        "seconds", "base_tools", "kept_by_noise")
CURRICULUM = ("map", "generated", "still_unsolved", "rollouts")  # what the suite `which` shows
EPISODES = ("turns", "written", "invalid")  # kept where a world has episodes
TARGET = 0.7  # validation whose cost in rollouts is compared


def read_runs(path: Path) -> list[dict]:
    """The runs of a results file, none if there is no file. Raises UserError if another version of
    this program wrote it."""
    runs = read_jsonl(path) if path.is_file() else []
    whole = lambda m: isinstance(m, dict) and set(KEPT) <= set(m)
    for r in runs:
        if not {"name", "seed", "options", "settings", "metrics"} <= set(r) or \
                not isinstance(r["metrics"], list) or not all(map(whole, r["metrics"])):
            raise UserError(f"{path} was written by another version: move it away first")
    return runs


# ---------------------------------------------------------------------------------------------
# statistics

T_95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
        2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093]  # by degrees of freedom, from 1


def interval(values):
    """Mean and half width of the 95 % t-interval over seeds; the width is NaN for one seed."""
    values = np.asarray(values, float)
    if len(values) < 2:
        return values.mean(), math.nan
    t = T_95[min(len(values) - 1, len(T_95)) - 1]  # beyond the table a little too wide
    return values.mean(), t * values.std(ddof=1) / len(values) ** 0.5


def by_name(results: Path) -> dict:
    """{name: {seed: metrics}} of a results file."""
    table = {}
    for r in read_runs(results):
        table.setdefault(r["name"], {})[r["seed"]] = r["metrics"]
    if not table:
        raise UserError(f"{results}: {'holds no runs' if results.is_file() else 'no such file'}")
    # runs end in any order: rows stand in the order of the suite, its first name is the standard
    known = list(SUITES.get(results.stem.split("-")[0], ()))
    place = lambda name: known.index(name) if name in known else len(known)
    return {name: table[name] for name in sorted(table, key=place)}


def last(metrics, key):
    """The value after the last epoch."""
    return metrics[-1][key]


def band_share(metrics, low=0.4, high=0.6):
    """Share of the epochs from the second on with a success rate inside [low, high]."""
    inside = [low <= m["success_rate"] <= high for m in metrics if m["epoch"] >= 2]
    return sum(inside) / max(1, len(inside))


def growth(metrics):
    """Response length on generated tasks, last epoch relative to the first."""
    return metrics[-1]["response_length"] / max(1, metrics[0]["response_length"]) - 1


def band_range(runs) -> str:
    """Least and greatest success rate from the second epoch on, in the mean over seeds, and how
    many of these epochs lie in [0.4, 0.6]."""
    n = min(len(m) for m in runs)
    curve = np.mean([[x["success_rate"] for x in m[:n]] for m in runs], axis=0)[2:]
    inside = ((curve >= 0.4) & (curve <= 0.6)).sum()
    return f"{curve.min():.2f} - {curve.max():.2f}, {inside} of {len(curve)}" if len(curve) else "-"


def lost(metrics):
    """Forgetting: held-out success on the base set's tools, best epoch minus last."""
    return max(m["base_tools"] for m in metrics) - metrics[-1]["base_tools"]


COLUMNS = [
    ("tuning", lambda m: last(m, "tuning")),
    ("validation", lambda m: last(m, "validation")),
    # how fast: over the epochs in which it was measured
    ("mean of all epochs", lambda m: np.mean([x["validation"] for x in validated(m)[1:]])),
    ("greedy", lambda m: last(m, "validation_greedy")),
    ("never solved in 8", lambda m: last(m, "validation_unsolved")),
    ("success, mean", lambda m: np.mean([x["success_rate"] for x in m[2:] or m])),
    ("epochs in [.4, .6]", band_share),
    ("response growth", growth),
    ("tool entropy kept", lambda m: last(m, "skill_entropy") / (m[0]["skill_entropy"] or 1)),
    ("lost on base tools", lost),
    ("kept by noise", lambda m: np.mean([x["kept_by_noise"] for x in m[1:]])),
    ("synthetic tasks", lambda m: last(m, "synthetic")),
]


CURRICULUM_COLUMNS = [
    ("distinct tasks", lambda m: last(m, "generated")),
    ("still unsolved", lambda m: last(m, "still_unsolved")),
    (f"thousand rollouts to {TARGET}", lambda m: cost(m) / 1000),
]


def refused(metrics, *reasons) -> float:
    """Share of all that was written that was refused, for one of these reasons or for any; NaN if
    nothing was written."""
    written = sum(m["written"] for m in metrics)
    count = sum(n for m in metrics for reason, n in m["invalid"].items()
                if not reasons or reason in reasons)
    return count / written if written else math.nan


# of worlds with episodes: how long they are, and what the simulator writes that is no task
EPISODE_COLUMNS = [
    ("plan, first", lambda m: m[0]["task_length"]),
    ("plan, last", lambda m: last(m, "task_length")),
    ("turns, last", lambda m: last(m, "turns")),
    ("no task", refused),
    ("inconsistent or unsolvable", lambda m: refused(m, "inconsistent", "unsolvable")),
]


def cost(metrics, target=TARGET) -> float:
    """Training rollouts until validation first reaches the target; NaN if it never does."""
    return next((m["rollouts"] for m in metrics if m["validation"] >= target), math.nan)


def shows_curriculum(results: Path, runs) -> bool:
    """Whether these are runs of the suite `which` with all that it shows."""
    return results.stem.split("-")[0] == "which" and all(
        set(CURRICULUM) <= set(m) for seeds in runs.values() for ms in seeds.values() for m in ms)


def columns_of(runs) -> list:
    """The columns that these runs have something to say in. On the tuning split nothing of the
    validation split is shown: settings are not to be chosen by it."""
    everything = [metrics for seeds in runs.values() for metrics in seeds.values()]
    of_validation = {"validation", "mean of all epochs", "greedy", "never solved in 8",
                     "lost on base tools"}
    hidden = of_validation if "tuning" in everything[0][0] else {"tuning"}
    if not any(m["kept_by_noise"] for metrics in everything for m in metrics):
        hidden.add("kept by noise")
    if any(m["base_tools"] is None for metrics in everything for m in metrics):
        hidden.add("lost on base tools")  # no held-out task is of a kind that the base set has
    episodes = all(set(EPISODES) <= set(m) for metrics in everything for m in metrics)
    return [column for column in COLUMNS if column[0] not in hidden] + EPISODE_COLUMNS * episodes


def table(results: Path) -> str:
    """Markdown: mean and 95 % t-interval over seeds, then differences to the first row, paired."""
    runs = by_name(results)
    columns, curriculum = columns_of(runs), shows_curriculum(results, runs)
    columns += CURRICULUM_COLUMNS if curriculum else []
    heads = ["variant", "seeds", *(c for c, _ in columns),
             "mean curve of success, epochs in [.4, .6]"]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, seeds in runs.items():
        cells = [(cell_or_dash if column in EPISODE_COLUMNS else cell)(
            [column[1](m) for m in seeds.values()]) for column in columns]
        rows.append(f"| {name} | {len(seeds)} | " + " | ".join(cells) +
                    f" | {band_range(list(seeds.values()))} |")
    rows += paired(runs, *columns[0])
    if curriculum:
        speed = next(c for c in columns if c[0] == "mean of all epochs")
        rows += [*paired(runs, *speed), *against_controls(runs, *columns[0]),
                 *against_controls(runs, *speed), *commands(results, runs)]
    return "\n".join([*rows, "", *claims(runs)]) + "\n"


def difference(runs, one, other, f):
    """Mean and half width of f(one) - f(other), paired by seed; None without a common seed."""
    common = sorted(set(runs[one]) & set(runs[other]))
    return interval([f(runs[one][s]) - f(runs[other][s]) for s in common]) if common else None


def _bounds(mean, half) -> str:
    return "-" if math.isnan(half) else f"{mean - half:+.3f} to {mean + half:+.3f}"


def paired(runs, head, f) -> list[str]:
    """Lines of a table: the first variant minus each other one."""
    first, *others = runs
    rows = ["", f"Paired differences in {head}, {first} minus the other, same seeds:", "",
            "| other | difference | 95 % interval |", "|---|---|---|"]
    for name in others:
        found = difference(runs, first, name, f)
        if found:
            rows.append(f"| {name} | {found[0]:+.3f} | {_bounds(*found)} |")
    return rows


def against_controls(runs, head, f) -> list[str]:
    """Lines of a table: every variant minus each control; it beats them all if every interval lies
    above 0."""
    controls = [name for name in runs if name.startswith("control: ")]
    if not controls:
        return []
    heads = ["variant", *(name.removeprefix("control: ") for name in controls), "beats all"]
    rows = ["", f"95 % intervals of the difference in {head}, the variant minus each control, same "
            "seeds:", "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name in (name for name in runs if name not in controls):
        found = [difference(runs, name, control, f) or (math.nan, math.nan) for control in controls]
        known = not any(math.isnan(half) for _, half in found)
        beats = all(mean - half > 0 for mean, half in found)
        rows.append(f"| {name} | {' | '.join(_bounds(*d) for d in found)} | "
                    f"{('yes' if beats else 'no') if known else '-'} |")
    return rows


def commands(results: Path, runs) -> list[str]:
    """Lines of a table: the command that makes each variant's runs."""
    suite = SUITES[results.stem.split("-")[0]]
    return ["", "Each run is one command, with the suite's further options and --seed:", "",
            "| variant | command |", "|---|---|",
            *(f"| {name} | `{' '.join(['python genenv.py', *suite[name]])}` |"
              for name in runs if name in suite)]


def plus_minus(mean, half, form: str) -> str:
    """A mean and the half width of its interval, which a single seed does not give."""
    return f"{mean:{form}}" + ("" if math.isnan(half) else f" ± {half:{form.lstrip('+')}}")


def cell(values) -> str:
    """A mean with its interval, without one where there is a single seed; runs without a value
    (the target was not reached) are counted, and the mean is of the others."""
    reached = [v for v in values if not math.isnan(v)]
    missed = f"not reached in {len(values) - len(reached)} of {len(values)}"
    if not reached:
        return missed
    mean, half = interval(reached)
    text = plus_minus(mean, half, ".3f" if abs(mean) < 100 else ".0f")
    return text if len(reached) == len(values) else f"{text} ({missed})"


def cell_or_dash(values) -> str:
    """A cell of a column in which a variant may have nothing to show."""
    return "-" if all(map(math.isnan, values)) else cell(values)


def claims(runs) -> list[str]:
    """The further claims of the paper, where the variants they need are there."""
    lines = []
    mean_of = lambda name, f: np.mean([f(m) for m in runs[name].values()])
    if {"genenv", "random"} <= set(runs):
        ours, theirs = (mean_of(n, lambda m: last(m, "validation_unsolved"))
                        for n in ("genenv", "random"))
        lines.append(f"* never-solved validation tasks: genenv {ours:.3f}, random {theirs:.3f} "
                     f"({1 - ours / max(theirs, 1e-9):+.0%} fewer)")
        lines.append(f"* response length on generated tasks, last against first epoch: "
                     f"{mean_of('genenv', growth):+.0%}")
    for rival in ("static", "teacher 3.27x"):
        if {"genenv", rival} <= set(runs):
            lines.append(data_efficiency(runs, rival))
    return lines


def data_efficiency(runs, rival) -> str:
    """How many synthetic tasks genenv needs to reach the rival's final validation."""
    ratios = []
    for seed in sorted(set(runs["genenv"]) & set(runs[rival])):
        goal = last(runs[rival][seed], "validation")
        need = next((m["synthetic"] for m in runs["genenv"][seed] if m["validation"] >= goal), None)
        ratios.append(None if not need else last(runs[rival][seed], "synthetic") / need)
    reached = [r for r in ratios if r]
    mean = f"{np.mean(reached):.2f}" if reached else "-"
    return (f"* synthetic tasks of {rival} / those genenv needs for the same validation: {mean} "
            f"(reached in {len(reached)} of {len(ratios)} seeds)")


# ---------------------------------------------------------------------------------------------
# figures

CURVES = [("validation", "validation", "held-out success rate"),
          ("success_rate", "success", "success rate on generated tasks"),
          ("task_length", "task-length", "steps per generated task"),
          ("response_length", "response-length", "tokens per response"),
          ("reward", "reward", "training reward"),
          ("unsolved", "unsolved", "share of tasks never solved"),
          ("solved", "solved", "share of tasks always solved"),
          ("skill_entropy", "entropy", "entropy over skills (bits)")]


def draw(results: Path):
    """One PNG per curve: mean over seeds with the range of the seeds shaded. On the tuning split
    the validation curves are left out."""
    runs = by_name(results)
    tuning = "tuning" in next(iter(next(iter(runs.values())).values()))[0]
    for key, name, label in CURVES:
        if not (tuning and key == "validation"):
            _figure(results, runs, "epoch", key, name, "epoch", label)
    if shows_curriculum(results, runs):
        _figure(results, runs, "epoch", "still_unsolved", "still-unsolved", "epoch",
                "share of all tasks so far that no attempt has solved")
        _figure(results, runs, "epoch", "generated", "distinct", "epoch", "distinct tasks so far")
        _maps(results, runs)
    if not tuning:
        _figure(results, runs, "synthetic", "validation", "data",
                "distinct synthetic tasks solved sometimes, not always", "held-out success rate")


def panels(runs) -> list:
    """Names side by side: the first variant with its rivals, and with its own variations; or with
    each family, where names are FAMILY: NAME."""
    first = next(iter(runs))
    families = dict.fromkeys(name.split(": ")[0] for name in runs if ": " in name)
    if families:
        return [[first, *(name for name in runs if name.startswith(f"{family}: "))]
                for family in families]
    own = [name for name in runs if name.startswith(first)]
    rivals = [first, *(name for name in runs if not name.startswith(first))]
    return [rivals, own] if len(own) > 1 and len(rivals) > 1 else [list(runs)]


def _figure(results, runs, x, y, name, x_label, y_label):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    names = panels(runs)
    across = min(2, len(names))
    down = -(-len(names) // across)
    figure, axes = plt.subplots(down, across, figsize=(6.4 * across, 3.8 * down), sharey=True,
                                squeeze=False, layout="constrained")
    for axis, members in zip(axes.flat, names):
        if y == "success_rate":
            axis.axhspan(0.4, 0.6, color="green", alpha=0.12, lw=0)
        for i, variant in enumerate(members):
            _curve(axis, runs[variant], x, y, variant, i)
        axis.set(xlabel=x_label)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=7)
    for axis in axes.flat[len(names):]:
        axis.set_axis_off()
    for axis in axes[:, 0]:
        axis.set(ylabel=y_label)
    figure.savefig(results.with_name(f"{results.stem}-{name}.png"), dpi=110,
                   metadata={"Software": None})
    plt.close(figure)


def _curve(axis, seeds, x, y, label, i):
    """Mean line over seeds, shaded from the least to the most."""
    drawn = [validated(m) if y == "validation" else m for m in seeds.values()]
    n = min(len(m) for m in drawn)
    values = np.array([[r[y] for r in m[:n]] for m in drawn])
    at = np.mean([[r[x] for r in m[:n]] for m in drawn], axis=0)
    line, = axis.plot(at, values.mean(0), label=label, lw=1.5, ls="-" if i < 10 else "--")
    axis.fill_between(at, values.min(0), values.max(0), color=line.get_color(), alpha=0.12, lw=0)


def _maps(results, runs):
    """A panel per variant: where in epoch and category the generated tasks lie (area: how many, in
    the sum over seeds) and how often they are solved (colour)."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    across = min(4, len(runs))
    down = -(-len(runs) // across)
    figure, axes = plt.subplots(down, across, figsize=(3.4 * across + 1, 2.6 * down), sharex=True,
                                sharey=True, squeeze=False, layout="constrained")
    rungs = list(dict.fromkeys(name for seeds in runs.values() for metrics in seeds.values()
                               for m in metrics for name in m["map"]))
    totals = {variant: map_of(seeds) for variant, seeds in runs.items()}
    most = max((n for cells in totals.values() for n, _ in cells.values()), default=1)
    for axis, (variant, cells) in zip(axes.flat, totals.items()):
        at = [(epoch, rungs.index(name), 90 * n / most, p)
              for (epoch, name), (n, p) in cells.items()]
        x, y, area, p_hat = zip(*at) if at else ([], [], [], [])
        dots = axis.scatter(x, y, area, p_hat, cmap="RdYlBu", vmin=0, vmax=1, lw=0)
        axis.set_title(variant, fontsize=8)
        axis.set_yticks(range(len(rungs)), rungs, fontsize=6)
        axis.set_ylim(-0.7, len(rungs) - 0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes.flat[len(runs):]:
        axis.set_axis_off()
    figure.colorbar(dots, ax=axes, label="success rate p_hat", shrink=0.6)
    figure.supxlabel("epoch")
    figure.savefig(results.with_name(f"{results.stem}-map.png"), dpi=110,
                   metadata={"Software": None})
    plt.close(figure)


def map_of(seeds) -> dict:
    """{(epoch, category): (tasks in the sum over seeds, their mean p_hat)} of one variant."""
    cells = {}
    for m in (m for metrics in seeds.values() for m in metrics):
        for name, (n, p) in m["map"].items():
            before = cells.get((m["epoch"], name), (0, 0.0))
            cells[m["epoch"], name] = before[0] + n, before[1] + n * p
    return {key: (n, total / n) for key, (n, total) in cells.items() if n}
