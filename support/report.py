"""One self-contained page per run, and one that compares several runs.

Paper: its Figures 4-8, drawn from a run's metrics.jsonl: success on generated tasks with the alpha
band, validation, task and response length, solved and unsolved tasks. Added: mixed groups, entropy,
KL, and what the simulator learns from.

Usage: support/run.py writes report.html at the end of a run. `python genenv.py compare RUN` writes
it for a run that still goes on or was stopped, `... compare RUN RUN` says by how much held-out success
differs and draws the runs over each other.

Deviations: figures and style are embedded, so that a single file can be sent along. Text of models
is escaped, and the page forbids scripts and outside sources. What an epoch did not measure is not
drawn.
"""
import base64
import html
import io
from pathlib import Path
from statistics import fmean, pstdev

from curriculum import in_band
from model.files import UserError, read_jsonl, write_whole
from support.options import MAY_CHANGE, flag, flat, parse_options, saved_options
from worlds import world_names

# "length": the world's own unit, which its records name
PANELS = (  # title, unit, {figure of `measured`: its legend}, caption; runs are compared by the first figure
    ("Held-out success", "share", {"validation": "sampled answers", "validation_greedy": "greedy answers"},
     "On tasks that neither model is trained on: it should rise."),
    ("Success on generated tasks", "share",
     {"success_rate": "all attempts", "solved": "tasks solved each time", "unsolved": "tasks never solved"},
     "A trained simulator imitates tasks in the band. Success may end above it: the agent learns from them."),
    ("Mixed groups", "share", {"mixed_share": "of generated tasks"},
     "Only tasks with right and wrong answers teach the agent. Some fall is normal; near 0 learning ends."),
    ("Tasks in the band", "tasks", {"env_kept": "of this epoch", "env_ess": "with earlier ones, by weight"},
     "In each run's own band. A trained simulator imitates them."),
    ("Length of generated tasks", "length", {"task_length": "their mean"}, "Longer ones are mostly harder."),
    ("Variety of generated tasks", "bits", {"skill_entropy": "of skills"}, "If it falls, skills get lost."),
    ("Target alpha", "share", {"alpha": "alpha"}, "By --alpha-schedule; the band lies around it."),
    ("Refused texts", "share", {"refused": "of all texts"}, "Malformed or held-out; copies not counted."),
    ("Entropy of the agent", "nats per token", {"entropy": "sampled answers"},
     "Near 0 all attempts at a task are alike and teach nothing. If it keeps climbing they become noise."),
    ("Length of responses", "tokens", {"response_length": "to generated tasks"},
     "Longer tasks take longer responses. Near --max-response-tokens they are cut off and earn nothing."),
    ("KL", "nats per token", {"env_kl": "simulator", "env_kl_step": "its last update alone", "kl": "agent"},
     "How far a model has moved from its start. Above 2, do not trust it."))
GROUPS = {"Success": PANELS[:3], "Generated tasks": PANELS[3:7], "Health of both models": PANELS[7:]}
# {what must not be 0: the figures that an epoch without it does not measure}
MEASURED_WITH = {"epoch": {"kl", "env_kept", "alpha"}, "written": {"refused", "env_kept"}, "distinct_tasks": {
                     "success_rate", "solved", "unsolved", "mixed_share", "task_length", "response_length",
                     "skill_entropy"}, "env_steps": {"env_kl", "env_kl_step", "env_ess"}}


def measured(m: dict) -> dict:
    """The figures that an epoch measured: what it did not measure stands in its record as 0."""
    absent = {figure for key, figures in MEASURED_WITH.items() if not m[key] for figure in figures}
    stale = m["validated"] != m["epoch"]
    return {k: v for k, v in m.items() if k not in absent and not (stale and k.startswith("validation"))}


def points(runs, key) -> list:
    """[(epoch, values of the runs)] of a figure in the epochs that all measured. runs: records of each."""
    found = [{m["epoch"]: measured(m)[key] for m in metrics if key in measured(m)} for metrics in runs]
    return [(t, [each[t] for each in found]) for t in sorted(set.intersection(*map(set, found)))]


def shown(m: dict, key: str, form: str) -> str:
    """A figure of an epoch's record as text, a dash where that epoch did not measure it."""
    return format(measured(m)[key], form) if key in measured(m) else "-"


def facts(metrics) -> dict:
    """{name: value as text} of what matters most in a run, at its start and now."""
    change = lambda key, form: f"{shown(metrics[0], key, form)} -> {shown(metrics[-1], key, form)}"
    return {"held-out success": f"{change('validation', '.3f')}, {gain(metrics[-1], metrics[0])}",
            "mixed groups": change("mixed_share", ".2f"),
            "held-out, greedy answers": change("validation_greedy", ".3f"),
            "success on generated tasks": change("success_rate", ".2f"),
            "alpha, from epoch 1": f"{metrics[:2][-1]['alpha']:.2f} -> {metrics[-1]['alpha']:.2f}",
            "training, CPU minutes": f"{sum(m['cpu_seconds'] for m in metrics) / 60:.1f}",
            "warnings": ", ".join(f"{name} in {when}" for name, when, _ in warned(metrics)) or "none"}


def standard_error(values) -> float:
    """Of the mean of values; 0 for a single one, which says nothing of others."""
    return pstdev(values) / max(1, len(values) - 1) ** 0.5


def gain(m: dict, first: dict) -> str:
    """Held-out success in an epoch's record minus that in the one of another run. Taken task by task, so that
    how hard a task is drops out of the standard error; what another seed would give is not in it."""
    if m.get("validation_set", "") != first.get("validation_set"):
        return "held-out tasks differ, or are not recorded: do not compare"
    pairs = zip(*(sum(each["validation_rates"].values(), []) for each in (m, first)))
    error = standard_error([ours - theirs for ours, theirs in pairs])
    told = f"{m['validation'] - first['validation']:+.3f} (standard error {error:.3f}, paired by task)"
    return told if m is not first else "-"


def warned(metrics) -> list:
    """[(name of a warning, when it was given, its last text)]: one row, however often it was given."""
    found = {}
    for m in metrics:
        for name, text in (warning.split(": ", 1) for warning in m["warnings"]):
            found.setdefault(name, {})[m["epoch"]] = text
    return [(name, f"{len(texts)} epochs from {min(texts)} to {max(texts)}" if len(texts) > 1 else
             f"epoch {max(texts)}", texts[max(texts)]) for name, texts in found.items()]


def read_run(folder):
    """(records of metrics.jsonl, Options) of a run folder. Raises UserError: what is missing."""
    o, metrics = saved_options(folder), read_jsonl(Path(folder) / "metrics.jsonl")
    if not metrics:
        raise UserError(f"{folder}/metrics.jsonl is empty: no epoch has ended yet")
    return metrics, o


# ---------------------------------------------------------------------------------------------
# figures


def curves(runs: dict, band=()) -> str:
    """The PANELS of which something was measured. runs: {name: records of metrics.jsonl of one run, or of
    some that differ in their seeds}.

    band: (lowest, highest) p_hat of each epoch that the simulator learns from.
    """
    figures = {name: "".join(panel(*each, runs, band) for each in panels) for name, panels in GROUPS.items()}
    return "".join(f"<h2>{name}</h2><div class=curves>{some}</div>" for name, some in figures.items() if some)


def panel(title, unit, names, caption, runs, band) -> str:
    """A <figure>, "" if nothing was measured: of a single run all lines, of several the first one of each."""
    key, (first, *others) = next(iter(names)), runs.values()
    lines = {name: points(some, key) for name, some in runs.items()} if others else \
        {name: points(first, key) for key, name in names.items()}
    # an alpha that never moves is in the options
    if not any(len({tuple(values) for _, values in line}) > (key == "alpha") for line in lines.values()):
        return ""
    unit = first[0][-1].get(f"{unit}_unit", unit)
    image = picture(lines, unit, band if key == "success_rate" else (), not others)
    return (f"<figure><h3>{title}</h3><img alt='{title}, by epoch' src='{image}'><figcaption>"
            f"{f'Drawn: {names[key]}. ' if others and len(names) > 1 else ''}{caption}</figcaption></figure>")


def picture(lines: dict, unit: str, band, whole) -> str:
    """A panel's {name: points} as the address of an image that contains its data: means over runs, and bars
    of their standard errors. whole: all of the range of a share, not only where the lines are."""
    from matplotlib.figure import Figure  # here, as only a page needs it and it loads for a second
    # the page shows a point as 1.2 pixels or so
    axis = Figure(figsize=(4.6, 3.4), layout="constrained").subplots()
    for i, (name, values) in enumerate(lines.items()):
        if values:  # thin over thick, as lines may coincide
            axis.errorbar(*zip(*((t, fmean(some), standard_error(some)) for t, some in values)), ms=3,
                          fmt=f"C{i}o-", lw=3 / (1 + i / 2), elinewidth=1, label=name[-44:])
    if band:
        axis.fill_between(range(len(band)), *zip(*band), alpha=0.15, lw=0, label="the band alpha ± k_min")
    limits = (0, axis.dataLim.ymax * 1.08 or 1) if unit != "share" else (-0.02, 1.02) if whole else None
    axis.set(xlabel="epoch", ylabel=unit, ylim=limits)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.grid(alpha=0.25)
    axis.figure.legend(loc="outside upper left", frameon=False)
    axis.figure.savefig(buffer := io.BytesIO(), dpi=200)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# ---------------------------------------------------------------------------------------------
# pages


# no script runs and nothing is fetched, whatever a model wrote
UNIMPORTANT = "out", "threads", "date", "functions_hash"  # change nothing; the last is told where runs differ
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
CAUTION = "Errors of single runs are over held-out tasks; seeds often differ by more: read means of several."
READING = "Read held-out success first, then why: mixed groups, tasks in the band, their variety."
EXPLANATION = "Samples: a task, in grey the one it varies, a right answer, the best and worst attempt."


def write(folder) -> Path:
    """Write report.html of a run folder; returns its path. Raises UserError as read_run does."""
    metrics, o = read_run(folder := Path(folder))
    usual = flat(parse_options(["--world", o.world] * (o.world in world_names())))
    options = [[flag(k), v] for k, v in flat(o).items() if v != usual.get(k) and k not in UNIMPORTANT]
    # whole or not at all: it is the last thing that a run writes, and says that all is done
    write_whole(folder / "report.html", page(folder.name, [
        f"<p>{_text(f'{o.variant} on {o.world}, seed {o.seed}, epochs 0 -> {len(metrics) - 1}')}</p>",
        table([*facts(metrics).items(), ["k_min", f"{o.k_min:g}"]]) + f"<p>{READING}</p>",
        f"<h2>Warnings, explained in TROUBLESHOOTING.md</h2>{table(w)}" if (w := warned(metrics)) else "",
        curves({folder.name: [metrics]}, [(m["alpha"] - o.k_min, m["alpha"] + o.k_min) for m in metrics]),
        "<h2>Held-out tasks</h2>", table([[metrics[-1].get("category_name", "kind"), "tasks", "success"], *(
            [name or "all", len(now), f"{metrics[0]['validation_by'][name]:.2f} -> {sum(now) / len(now):.2f}"]
            for name, now in sorted(metrics[-1]["validation_rates"].items(), key=lambda of: fmean(of[1])))]),
        "<h2>Options other than the defaults</h2>", table(options or [["none"]]),
        f"<h2>Tasks and answers</h2><p>{EXPLANATION}</p>", _samples(metrics, o.k_min, folder)]))
    return folder / "report.html"


def compare(folders, out, interval) -> str:
    """Write a page with the curves of several runs over each other, by default compare.html in the last of
    the folders; returns what to print. interval: of values, their mean and its bounds as text. Raises
    UserError as read_run does."""
    records, options = zip(*map(read_run, folders))
    rows = [[name, *(str(flat(o).get(name, "-")) for o in options)] for name in flat(options[0])]
    differ = [row for row in rows if len(set(row[1:])) > 1 and row[0] not in UNIMPORTANT[:3]]
    last = max(set.intersection(*({m["validated"] for m in metrics} for metrics in records)))
    first = {o.seed: m[last] for m, o in [*zip(records, options)][::-1]}
    results = [["run", f"held-out, epoch {last}", "minus first run, same seed"], *(
        [run, f"{m[last]['validation']:.3f}", gain(m[last], first[o.seed])]
        for run, m, o in zip(folders, records, options))]
    kinds = [", ".join(f"{flag(name)} {row[i]}" for name, *row in differ if name not in {
        *MAY_CHANGE, "seed", "functions_hash"}) for i in range(len(folders))]
    same = len({m[last].get("validation_set") for m in records}) == 1  # the held-out tasks
    names = [kind or "of all" if len({o.seed for one, o in zip(kinds, options) if one == kind}) > 1 else run
             for run, kind in zip(folders, kinds)]
    results += over_seeds(names, options, [m[last]["validation"] for m in records], interval) * same
    drawn = {name: [m for m, own in zip(records, names) if own == name] for name in names}
    wide = [max(map(len, column)) for column in zip(*results)]
    out = Path(out or Path(folders[-1]) / "compare.html")
    write_whole(out, page("Runs compared", [
        "<h2>Held-out success</h2>", table(results), f"<p>{CAUTION}</p><h2>Options that differ</h2>",
        table(zip(["", *folders], *([flag(name), *row] for name, *row in differ))) if differ else "None.",
        f"<h2>From epoch 0 to {last}</h2>",
        table([["", *facts(records[0])], *([run, *(text.partition(" (")[0] for text in facts(
            m[:last + 1]).values())] for run, m in zip(folders, records))]),
        f"<p>{READING}{' Bars: standard errors.' * (len(drawn) < len(folders))}</p>", curves(drawn)]))
    return "\n".join([*("  ".join(map(str.ljust, row, wide)) for row in results), CAUTION, f"wrote {out}"])


def over_seeds(kinds, options, rates, interval) -> list:
    """Rows of `compare`: means of the runs of one kind, which differ in nothing but their seeds, and of their
    differences from those of the first such kind with the same seeds."""
    by_kind = {kind: {o.seed: rate for one, o, rate in zip(kinds, options, rates) if one == kind}
               for kind in kinds if kinds.count(kind) > 1}
    first, rows = next(iter(by_kind.values()), {}), []
    for kind, found in by_kind.items():
        gains = [found[seed] - first[seed] for seed in found.keys() & first.keys()]
        told = "-" if found is first else "no two seeds in common" if len(gains) < 2 else \
            f"{interval(gains)[:-1]}, 95 %, {len(gains)} shared seeds)"
        rows.append([f"mean {kind:.60}", f"{fmean(found.values()):.3f}", told])
    return rows


def page(title, parts) -> str:
    """A whole page from its parts, each of them HTML; the title is text."""
    return "\n".join([
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=width=device-width>",
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<style>{Path(__file__).with_suffix('.css').read_text('utf-8')}</style>",
        f"<title>{_text(title)}</title><body><h1>{_text(title)}</h1>", *parts, "</body></html>\n"])


def _samples(metrics, k_min, folder) -> str:
    """First, middle and last epoch: tasks with up to two attempts each, and what was refused."""
    samples = read_jsonl(folder / "samples.jsonl")
    alphas = {metrics[i]["epoch"]: metrics[i]["alpha"] for i in (0, len(metrics) // 2, -1)}
    cards = lambda epoch: "".join(_card(r, alphas[epoch], k_min) for r in samples if r["epoch"] == epoch)
    return "".join(f"<h3>epoch {t}</h3><div class=grid>{cards(t)}</div>" for t in alphas)


def _card(r, alpha, k_min) -> str:
    """A task with the one that it varies, its expected answer, and attempts with their rewards; or a
    text that was refused. alpha: of the epoch in which p_hat was measured."""
    if "refused" in r:
        tag, texts = f"refused: {r['reason']}", [("wrong", r["refused"])]
    else:
        near, writer = in_band(r["p_hat"], alpha, k_min), r["origin"].replace("env", "simulator")
        tag = f"{writer}, epoch {r['written_in']}, p_hat = {r['p_hat']:.2f}{', in the band' * near}"
        attempts = [("right" if e["reward"] >= 0.5 else "wrong", f"r = {e['reward']:.2g}: {e['text']}")
                    for e in r["traces"]]
        texts = [("task", r["task"]), ("", f"a right answer: {r['expected']}"), *attempts]
    return f"<div class=card><span class=tag>{_text(tag)}</span>" + "".join(
        f"<pre class='{kind}'>{_text(text[:900])}</pre>"
        for kind, text in [("seed", f"varies: {r['seed_task']}")] * bool(r["seed_task"]) + texts) + "</div>"


def table(rows) -> str:
    """Rows of cells, each of them text."""
    cells = lambda row: "".join(f"<td>{_text(cell)}</td>" for cell in row)
    return f"<div class=wide><table>{''.join(f'<tr>{cells(row)}</tr>' for row in rows)}</table></div>"


def _text(value) -> str:
    """Escaped for HTML; what cannot be encoded (lone surrogates in model text) is replaced."""
    return html.escape(str(value)).encode("utf-8", "replace").decode().replace(" -&gt; ", "&nbsp;→&nbsp;")
