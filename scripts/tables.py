"""Means, intervals, tables and figures of a results file.

What of the paper this is: the form of its claims: who wins, by how much, with how many tasks; and
its Figures 4-8, as means over seeds.

How it is run: `python -m scripts.experiments SUITE` at the end of a suite, or with --only-draw on what is
there. A column is a line of COLUMNS: its head, and a function of the metrics of one run. What a
figure shows is in CURVES, PANELS and MAPPED.

Where it differs on purpose: 95 % t-intervals over seeds and differences paired by seed stand beside
every mean, both for the last epoch and for the mean of all validated ones, because the two do not
always agree; on the tuning split nothing of the validation split is shown.
"""
import math
from collections import Counter
from pathlib import Path

import numpy as np

from support.files import UserError, read_jsonl
from scripts.suites import SUITES
from support.report import validated

KEPT = ("epoch", "alpha", "success_rate", "validation", "validation_greedy",
        "validation_unsolved", "reward", "task_length", "response_length", "solved",
        "unsolved", "distinct_tasks", "skill_entropy", "env_kept", "env_kl", "env_ess", "synthetic",
        "seconds", "base_tools", "kept_by_noise", "map", "generated", "rollouts")
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
    """{name: {seed: metrics}} of a results file; the last record of a run has its "minutes", too."""
    table = {}
    for r in read_runs(results):
        if r["metrics"]:
            r["metrics"][-1]["minutes"] = r.get("minutes", math.nan)
        table.setdefault(r["name"], {})[r["seed"]] = r["metrics"]
    if not table:
        raise UserError(f"{results}: {'holds no runs' if results.is_file() else 'no such file'}")
    # runs end in any order: rows stand in the order of the suite, its first name is the standard
    known = list(SUITES.get(results.stem.split("-")[0], ()))
    place = lambda name: known.index(name) if name in known else len(known)
    return {name: table[name] for name in sorted(table, key=place)}


def band_share(metrics):
    """Share of the epochs from the second on with a success rate inside [0.4, 0.6]."""
    inside = [0.4 <= m["success_rate"] <= 0.6 for m in metrics if m["epoch"] >= 2]
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
    ("tuning", lambda m: m[-1]["tuning"]),
    ("validation", lambda m: m[-1]["validation"]),
    # how fast: over the epochs in which it was measured
    ("mean of epochs", lambda m: np.mean([x["validation"] for x in validated(m)[1:]])),
    ("greedy", lambda m: m[-1]["validation_greedy"]),
    ("never solved in 8", lambda m: m[-1]["validation_unsolved"]),
    ("success, mean", lambda m: np.mean([x["success_rate"] for x in m[2:] or m])),
    ("epochs in [.4, .6]", band_share),
    # also tasks at which no attempt was well-formed; D_train, where "distinct tasks" is counted,
    # does not keep these
    ("generated, never solved", lambda m: np.mean([x["unsolved"] for x in m[-(len(m) // 2):]])),
    ("response growth", growth),
    ("tool entropy kept", lambda m: m[-1]["skill_entropy"] / (m[0]["skill_entropy"] or 1)),
    ("lost on base tools", lost),
    ("kept by noise", lambda m: np.mean([x["kept_by_noise"] for x in m[1:]])),
    ("synthetic tasks", lambda m: m[-1]["synthetic"]),
    ("distinct tasks", lambda m: m[-1]["generated"]),
    (f"thousand rollouts to {TARGET}", lambda m: cost(m) / 1000),
    ("minutes", lambda m: m[-1]["minutes"]),  # of a core, with other work beside it
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
    ("plan, last", lambda m: m[-1]["task_length"]),
    ("turns, last", lambda m: m[-1]["turns"]),
    ("no task", refused),
    ("inconsistent or unsolvable", lambda m: refused(m, "inconsistent", "unsolvable")),
]


def cost(metrics, target=TARGET) -> float:
    """Training rollouts until validation first reaches the target; NaN if it never does."""
    return next((m["rollouts"] for m in metrics if m["validation"] >= target), math.nan)


def columns_of(runs) -> dict:
    """The columns that these runs have something to say in. On the tuning split nothing of the
    validation split is shown: settings are not to be chosen by it."""
    everything = [metrics for seeds in runs.values() for metrics in seeds.values()]
    of_validation = {"validation", "mean of epochs", "greedy", "never solved in 8",
                     "lost on base tools"}
    hidden = of_validation if "tuning" in everything[0][0] else {"tuning"}
    if not any(m["kept_by_noise"] for metrics in everything for m in metrics):
        hidden.add("kept by noise")
    if any(m["base_tools"] is None for metrics in everything for m in metrics):
        hidden.add("lost on base tools")  # no held-out task is of a kind that the base set has
    episodes = all(set(EPISODES) <= set(m) for metrics in everything for m in metrics)
    return {head: f for head, f in COLUMNS + EPISODE_COLUMNS * episodes if head not in hidden}


def table(results: Path) -> str:
    """Markdown: mean and 95 % t-interval over seeds, then differences to the first row, paired."""
    runs = by_name(results)
    columns = columns_of(runs)
    curves = ["mean curve of success, epochs in [.4, .6]", "---",
              *(band_range(list(seeds.values())) for seeds in runs.values())]
    rows = [f"{row} {text} |" for row, text in zip(means(runs, columns), curves)]
    compared = {head: columns[head] for head in ("tuning", "validation", "mean of epochs")
                if head in columns}
    rows += [*paired(runs, compared), *against_controls(runs, compared)]
    rows += by_base(runs) if results.stem.split("-")[0] == "bases" else []
    rows += ["", *claims(runs)]
    return "\n".join(rows) + "\n"


def means(runs, columns) -> list[str]:
    """Lines of a table: a row per variant of `runs`, {name: {seed: run}}, with the mean of each
    column, {head: function of a run}, and its interval."""
    rows = [f"| variant | seeds | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 2)]
    for name, seeds in runs.items():
        cells = [cell([f(run) for run in seeds.values()]) for f in columns.values()]
        rows.append(f"| {name} | {len(seeds)} | {' | '.join(cells)} |")
    return rows


def difference(runs, one, other, f):
    """Mean and half width of f(one) - f(other), paired by seed; None without a common seed."""
    common = sorted(set(runs[one]) & set(runs[other]))
    found = [f(runs[one][s]) - f(runs[other][s]) for s in common]
    return None if not found or np.isnan(found).any() else interval(found)


def _bounds(mean, half) -> str:
    return "-" if math.isnan(half) else f"{mean - half:+.3f} to {mean + half:+.3f}"


def _with_bounds(mean, half) -> str:
    return f"{mean:+.3f}" + ("" if math.isnan(half) else f" ({_bounds(mean, half)})")


def paired(runs, columns) -> list[str]:
    """Lines of a table: the first variant minus each other one, in these columns."""
    first, *others = runs
    rows = ["", f"Paired differences, {first} minus the other, same seeds (95 % interval):", "",
            f"| other | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in others:
        found = [difference(runs, first, name, f) for f in columns.values()]
        if any(found):
            rows.append(f"| {name} | " + " | ".join(
                _with_bounds(*d) if d else "-" for d in found) + " |")
    return rows


def by_base(runs) -> list[str]:
    """Lines of a table: held-out success at the start and at the end, base model by base model."""
    seeds = sorted({seed for of_variant in runs.values() for seed in of_variant})
    rows = ["", "Validation before training and after the last epoch, base model by base model:", "",
            f"| seed of the base model and of the run | {' | '.join(runs)} |",
            "|---" * (len(runs) + 1) + "|"]
    for seed in seeds:
        found = [of_variant.get(seed) for of_variant in runs.values()]
        cells = [f"{m[0]['validation']:.3f} to {m[-1]['validation']:.3f}" if m else "-"
                 for m in found]
        rows.append(f"| {seed} | {' | '.join(cells)} |")
    return rows


def against_controls(runs, columns) -> list[str]:
    """Lines of a table for each of `columns`, where there are controls: every variant minus each
    control; it beats them all if every interval lies above 0."""
    controls = [name for name in runs if name.startswith("control: ")]
    rows = []
    for head, f in columns.items() if controls else ():
        heads = ["variant", *(name.removeprefix("control: ") for name in controls), "beats all"]
        rows += ["", f"95 % intervals of the difference in {head}, the variant minus each control, "
                 "same seeds:", "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        for name in (name for name in runs if name not in controls):
            found = [difference(runs, name, control, f) or (math.nan,) * 2 for control in controls]
            known = not any(math.isnan(half) for _, half in found)
            beats = all(mean - half > 0 for mean, half in found)
            rows.append(f"| {name} | {' | '.join(_bounds(*d) for d in found)} | "
                        f"{('yes' if beats else 'no') if known else '-'} |")
    return rows


def cell(values) -> str:
    """A mean with its interval, without one where there is a single seed, a dash where no run has a
    value; runs without one (the target was not reached) are counted, the mean is of the others."""
    known = [v for v in values if not math.isnan(v)]
    if not known:
        return "-"
    mean, half = interval(known)
    form = ".3f" if abs(mean) < 100 else ".0f"
    text = f"{mean:{form}}" + ("" if math.isnan(half) else f" ± {half:{form}}")
    missing = len(values) - len(known)
    return f"{text} (not reached in {missing} of {len(values)})" if missing else text


def claims(runs) -> list[str]:
    """The further claims of the paper, where the variants they need are there."""
    lines = []
    mean_of = lambda name, f: np.mean([f(m) for m in runs[name].values()])
    if {"genenv", "random"} <= set(runs):
        ours, theirs = (mean_of(n, lambda m: m[-1]["validation_unsolved"])
                        for n in ("genenv", "random"))
        lines.append(f"* never-solved validation tasks: genenv {ours:.3f}, random {theirs:.3f} "
                     f"({1 - ours / max(theirs, 1e-9):+.0%} fewer)")
        lines.append(f"* response length on generated tasks, last against first epoch: "
                     f"{mean_of('genenv', growth):+.0%}")
    for rival in ("static", "teacher 3.27x"):
        if {"genenv", rival} <= set(runs):
            lines.append(data_efficiency(runs, rival))
    rivals = ("random", "random, curated seeds", "static")
    return lines + [equal_time(runs, rival) for rival in rivals if {"genenv", rival} <= set(runs)]


def equal_time(runs, rival) -> str:
    """Held-out success of genenv when it has trained as long as the rival in all, minus the
    rival's at its end: epochs are not equally long."""
    gains = []
    for seed in sorted(set(runs["genenv"]) & set(runs[rival])):
        spent = sum(m["seconds"] for m in runs[rival][seed])
        at = np.cumsum([m["seconds"] for m in runs["genenv"][seed]])
        reached = [m for m, t in zip(runs["genenv"][seed], at) if t <= spent]
        if reached:  # the rival may be done before genenv's first epoch
            gains.append(reached[-1]["validation"] - runs[rival][seed][-1]["validation"])
    found = _with_bounds(*interval(gains)) if gains else "-"
    return f"* validation in the training time of {rival}, genenv minus {rival}: {found}"


def data_efficiency(runs, rival) -> str:
    """How many synthetic tasks genenv needs to reach the rival's final validation."""
    ratios = []
    for seed in sorted(set(runs["genenv"]) & set(runs[rival])):
        goal = runs[rival][seed][-1]["validation"]
        need = next((m["synthetic"] for m in runs["genenv"][seed] if m["validation"] >= goal), None)
        ratios.append(None if not need else runs[rival][seed][-1]["synthetic"] / need)
    reached = [r for r in ratios if r]
    mean = f"{np.mean(reached):.2f}" if reached else "-"
    return (f"* synthetic tasks of {rival} / those genenv needs for the same validation: {mean} "
            f"(reached in {len(reached)} of {len(ratios)} seeds)")


# ---------------------------------------------------------------------------------------------
# figures

CURVES = [("validation", "success on held-out tasks"),  # key of a record, label
          ("success_rate", "success on generated tasks")]
MOST = 6  # lines in one panel
# for variants that share a colour, in different panels; the last is dash, dot, dot
STYLES = "-", "--", ":", "-.", (0, (6, 1.5, 1, 1.5, 1, 1.5))
# {title of a panel: its variants}, where a suite has more than that and no families
PANELS = {
    "paper": {
        "GenEnv and its rivals": ["genenv", "random", "static", "teacher 1.76x", "teacher 3.27x",
                                  "random, curated seeds"],
        "GenEnv with a part changed": ["genenv", "genenv, no KL", "genenv, no filter",
                                       "genenv, seed-level p_hat"],
        "an agent that learns at half the rate": [
            "genenv", "random, agent rate 1/2", "genenv, alpha 0.3, sharp", "genenv, steered",
            "genenv, steered, signal"]},
    "alpha": {
        "aims below 0.5, fixed or found": ["constant 0.5", "constant 0.3", "adaptive 0.5",
                                           "integral 0.5"],
        "from easy to hard": ["constant 0.5", "linear 0.7 to 0.4", "cosine 0.7 to 0.4",
                              "step 0.7 to 0.4"]}}
# variants that stand in one panel in worlds other than the ladder
EVERYWHERE = ["genenv", "random", "static", "random, curated seeds", "genenv, steered"]
# variants of the suite `which` whose tasks are mapped
MAPPED = ["genenv", "update: none", "control: untrained, curated seeds",
          "control: coin for p_hat", "filter: none, sharp", "alpha: integral"]


def draw(results: Path):
    """SUITE-validation.png (not of the tuning split), SUITE-success.png, and of the suite `which`
    a map of what was generated."""
    runs = by_name(results)
    tuning = "tuning" in next(iter(next(iter(runs.values())).values()))[0]
    for key, label in CURVES[1:] if tuning else CURVES:
        figure(results, runs, key, label)
    if results.stem == "which":
        _maps(results, {name: runs[name] for name in MAPPED if name in runs})


def panels(suite: str, names) -> dict:
    """{title: variants}, at most MOST in each, the first one in all: as PANELS has them, or a panel
    for each family where names are FAMILY: NAME, or as many panels as are needed."""
    first, *others = names
    if len(others) < MOST:
        return {"": [first, *others]}
    if suite in PANELS:
        return {title: [name for name in members if name in names]
                for title, members in PANELS[suite].items()}
    families = dict.fromkeys(name.split(": ")[0] for name in others if ": " in name)
    if families:
        return {family: [first, *(name for name in others if name.startswith(f"{family}: "))]
                for family in families}
    chunks = range(0, len(others), MOST - 1)
    return {str(i): [first, *others[i:i + MOST - 1]] for i in chunks}


def looks() -> dict:
    """{variant: (colour, line style)}. Variants with the same options look the same in the figures
    of all suites, and two lines of one panel have different colours."""
    used, of = Counter(), {}  # colours given so far; {options: look}
    # from which base model a run starts is another question than what it does
    key_of = lambda options: tuple(x for x in options if x not in ("--model", "@base"))
    shown = [(options, members) for suite, options in SUITES.items()
             for members in panels(suite, options).values()]
    for options, members in [(SUITES["paper"], EVERYWHERE), *shown]:
        keys = [key_of(options[name]) for name in members]
        taken = {of[key][0] for key in keys if key in of}
        for key in (key for key in keys if key not in of):
            colour = min(set(range(10)) - taken, key=lambda c: (used[c], c))
            of[key] = colour, STYLES[used[colour] % len(STYLES)]
            used[colour] += 1
            taken.add(colour)
    return {name: of[key_of(options[name])] for options in SUITES.values() for name in options}


def figure(results, runs, key, label):
    """One PNG of a share over epochs, a panel for each entry of `panels`: the mean over seeds as a
    line, from the least to the greatest seed shaded."""
    shown, look = panels(results.stem.split("-")[0], runs), looks()
    across = len(shown) if len(shown) < 4 else 2
    picture, axes = _grid(len(shown), across, (max(6.4, 4.6 * across), 3.9), sharey=True)
    for axis, (title, members) in zip(axes.flat, shown.items()):
        free = iter(set(range(10)) - {look[name][0] for name in members if name in look})
        for name in members:
            _curve(axis, runs[name], key, name, *look.get(name) or (next(free), "-"))
        if key == "success_rate":
            axis.axhspan(0.4, 0.6, color="green", alpha=0.1, lw=0, label="0.4 to 0.6")
        axis.set(xlabel="epoch", ylim=(0, 1), title=title)
        axis.title.set_fontsize(9)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=7)
    for axis in axes[:, 0]:
        axis.set(ylabel=label)
    picture.suptitle("line: mean over seeds; shaded: from the lowest to the highest seed",
                     fontsize=8)
    _save(picture, results.with_name(f"{results.stem}-{key.split('_')[0]}.png"), dpi=100)


def _grid(n: int, across: int, size, **shared):
    """A figure with n panels, `across` beside each other, and its axes; size: inches of the whole
    width and of a row."""
    import matplotlib
    matplotlib.use("Agg")  # files only: no display is needed
    import matplotlib.pyplot as plt
    down = -(-n // across)
    picture, axes = plt.subplots(down, across, figsize=(size[0], size[1] * down), squeeze=False,
                                 layout="constrained", **shared)
    for axis in axes.flat[n:]:
        axis.set_axis_off()
    return picture, axes


def _save(picture, path: Path, dpi: int):
    import matplotlib.pyplot as plt
    picture.savefig(path, dpi=dpi, metadata={"Software": None})  # no version in it
    plt.close(picture)


def _curve(axis, seeds, key, label, colour, style):
    """Mean line over seeds, shaded from the least to the greatest; measured values alone."""
    drawn = [validated(m) if key == "validation" else m for m in seeds.values()]
    n = min(len(m) for m in drawn)
    values = np.array([[r[key] for r in m[:n]] for m in drawn])
    at = [r["epoch"] for r in drawn[0][:n]]
    axis.plot(at, values.mean(0), label=label, lw=1.5, ls=style, color=f"C{colour}")
    axis.fill_between(at, values.min(0), values.max(0), color=f"C{colour}", alpha=0.12, lw=0)


def _maps(results, runs):
    """A panel per variant: where in epoch and category the generated tasks lie (area: how many, in
    the sum over seeds) and how often they are solved (colour)."""
    across = min(3, len(runs))
    picture, axes = _grid(len(runs), across, (3.6 * across + 1, 3.2), sharex=True, sharey=True)
    rungs = list(dict.fromkeys(name for seeds in runs.values() for metrics in seeds.values()
                               for m in metrics for name in m["map"]))
    totals = {variant: map_of(seeds) for variant, seeds in runs.items()}
    most = max((n for cells in totals.values() for n, _ in cells.values()), default=1)
    for axis, (variant, cells) in zip(axes.flat, totals.items()):
        at = [(epoch, rungs.index(name), 140 * n / most, p)
              for (epoch, name), (n, p) in cells.items()]
        x, y, area, p_hat = zip(*at) if at else ([], [], [], [])
        dots = axis.scatter(x, y, area, p_hat, cmap="RdYlBu", vmin=0, vmax=1, lw=0)
        axis.set_title(variant, fontsize=9)
        axis.set_yticks(range(len(rungs)), rungs, fontsize=7)
        axis.set_ylim(-0.7, len(rungs) - 0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    picture.colorbar(dots, ax=axes, label="success rate on these tasks", shrink=0.6)
    picture.supxlabel("epoch", fontsize=9)
    picture.supylabel("hardest tool of a generated task, easiest tool at the bottom", fontsize=9)
    picture.suptitle("area of a dot: how many tasks of that kind the epoch has, sum over seeds",
                     fontsize=8)
    _save(picture, results.with_name(f"{results.stem}-map.png"), dpi=80)


def map_of(seeds) -> dict:
    """{(epoch, category): (tasks in the sum over seeds, their mean p_hat)} of one variant."""
    cells = {}
    for m in (m for metrics in seeds.values() for m in metrics):
        for name, (n, p) in m["map"].items():
            before = cells.get((m["epoch"], name), (0, 0.0))
            cells[m["epoch"], name] = before[0] + n, before[1] + n * p
    return {key: (n, total / n) for key, (n, total) in cells.items() if n}
