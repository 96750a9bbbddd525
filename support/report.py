"""One self-contained page per run, and one that compares several runs.

Paper: its Figures 4-8, drawn from a run's metrics.jsonl: success on generated tasks with the alpha
band, validation, task and response length, solved and unsolved tasks. Added: mixed groups, entropy,
KL, and what the simulator learns from.

Usage: support/run.py writes report.html at the end of a run. `python genenv.py compare RUN` writes
it for a run that still goes on or was stopped, `... compare RUN RUN` draws runs over each other.

Deviations: figures and style are embedded, so that a single file can be sent along. Text of models
is escaped, and the page forbids scripts and outside sources. What an epoch did not measure is not
drawn.
"""
import base64
import html
import io
import json
import textwrap
from pathlib import Path

from support.files import UserError, read_jsonl, write_whole
from support.options import flat, saved_options

PANELS = (  # title, unit, figures of `measured`, caption; runs are compared by the first figure
    ("Held-out success", "share", ("validation", "validation_greedy"),
     "Success on tasks that neither model is trained on. It should rise and then stay up."),
    ("Success on generated tasks", "share", ("success_rate", "solved", "unsolved"),
     "Success on new tasks, before the agent trains on them. It should stay away from 0 and 1; "
     "the band is alpha \u00b1 k_min, what the simulator aims at."),
    ("Mixed groups", "share", ("mixed_share", "zero_variance", "truncated"),
     "Only groups of attempts whose rewards differ teach the agent something."),
    ("Entropy of the agent", "nats per token", ("entropy",),
     "Towards 0 attempts at a task become alike; in a steady climb they become noise."),
    ("Generated tasks", "length, or bits", ("task_length", "skill_entropy"),
     "Tasks may grow with the agent. If the entropy falls, the simulator repeats itself."),
    ("Length of responses", "tokens", ("response_length",),
     "It follows the tasks; near --max-response-tokens responses are cut off and earn nothing."),
    ("KL to the start", "nats per token", ("env_kl", "env_kl_step", "kl"),
     "Of the simulator, of its last update alone, of the agent. A slow rise that levels off is healthy; "
     "above 2 texts can no longer be trusted."),
    ("What the simulator learns from", "tasks", ("env_kept", "env_ess"),
     "New tasks in the band, and the effective sample size with old ones. A handful is too few."))
OF_GENERATED = {"success_rate", "solved", "unsolved", "mixed_share", "task_length",
                "response_length", "skill_entropy", "env_kept"}
OF_UPDATES = {"kl", "zero_variance", "env_kept"}
OF_SIMULATOR = {"env_kl", "env_kl_step", "env_ess"}


def measured(m: dict) -> dict:
    """The figures that an epoch measured: what it did not measure stands in its record as 0."""
    absent = set() if m["distinct_tasks"] else set(OF_GENERATED)
    absent |= set() if m["epoch"] else OF_UPDATES
    absent |= set() if m["env_steps"] else OF_SIMULATOR
    if m["validated"] != m["epoch"] or not m["validation_by"]:
        absent |= {"validation", "validation_greedy"}
    return {k: v for k, v in m.items() if k not in absent}


def points(metrics, key) -> list:
    """[(epoch, value)] of a figure in the epochs that measured it."""
    return [(m["epoch"], measured(m)[key]) for m in metrics if key in measured(m)]


def shown(m: dict, key: str, form: str) -> str:
    """A figure of an epoch's record as text, a dash where that epoch did not measure it."""
    return format(measured(m)[key], form) if key in measured(m) else "-"


def facts(metrics) -> dict:
    """{name: value as text} of what matters most in a run, at its start and now."""
    def change(key, form):
        return f"{shown(metrics[0], key, form)} -> {shown(metrics[-1], key, form)}"

    return {"held-out success": change("validation", ".3f"),
            "success on generated tasks": change("success_rate", ".2f"),
            "mixed groups": change("mixed_share", ".0%"),
            "length of generated tasks": change("task_length", ".2f"),
            "agent's entropy, nats": change("entropy", ".2f")}


def read_run(folder):
    """(records of metrics.jsonl, Options) of a run folder. Raises UserError: what is missing."""
    metrics = read_jsonl(Path(folder) / "metrics.jsonl")
    if not metrics:
        raise UserError(f"{folder}/metrics.jsonl is empty: no epoch has ended yet")
    return metrics, saved_options(folder)


# ---------------------------------------------------------------------------------------------
# figures


def curves(runs: dict, alphas=(), k_min=0.0) -> str:
    """All panels as an <img> that brings its picture along. runs: {name: records of metrics.jsonl}; of a
    single run all lines are drawn, of several the first of each panel.

    alphas: of each epoch, for the band of alpha +- k_min that the simulator aims at.
    """
    from matplotlib.figure import Figure  # here, as only a page needs it and it loads for a second
    figure = Figure(figsize=(12, 21), layout="constrained")
    for axis, (title, unit, keys, caption) in zip(figure.subplots(len(PANELS) // 2, 2).flat, PANELS):
        for name, metrics in runs.items():
            for key in keys if len(runs) == 1 else keys[:1]:
                if values := points(metrics, key):
                    axis.plot(*zip(*values), marker="o", ms=3, label=key if len(runs) == 1 else name)
        if alphas and "success_rate" in keys:
            axis.fill_between(range(len(alphas)), [alpha - k_min for alpha in alphas],
                              [alpha + k_min for alpha in alphas], alpha=0.15, lw=0, label="band")
        axis.set(title=title, xlabel=f"epoch\n{textwrap.fill(caption, 66)}", ylabel=unit)
        axis.set_ylim(*((-0.02, 1.02) if unit == "share" else (0, None)))
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axis.grid(alpha=0.25)
        if axis.lines:
            axis.legend(fontsize=9)
        axis.set_visible(bool(axis.lines))
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110)
    return f'<img alt="curves" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


# ---------------------------------------------------------------------------------------------
# pages


# no script runs and nothing is fetched, whatever a model wrote
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = Path(__file__).with_suffix(".css")
EXPLANATION = ("Of the first, the middle and the last epoch, each task with its best and its worst attempt. "
               "env: written by the simulator. p_hat: share of attempts that solved the task.")


def write(folder) -> Path:
    """Write report.html of a run folder; returns its path. Raises UserError as read_run does."""
    folder = Path(folder)
    metrics, o = read_run(folder)
    samples = read_jsonl(folder / "samples.jsonl")
    warned = [[f"epoch {m['epoch']}", text] for m in metrics for text in m["warnings"]]
    # whole or not at all: it is the last thing that a run writes, and says that all is done
    write_whole(folder / "report.html", page(folder.name, [
        f"<p>{_text(f'{o.variant} on {o.world}, seed {o.seed}')}</p>", table(facts(metrics).items()),
        "<h2>Warnings</h2><p>TROUBLESHOOTING.md has a row on each.</p>", table(warned or [["none"]]),
        "<h2>Curves</h2>", curves({folder.name: metrics}, [m["alpha"] for m in metrics], o.k_min),
        f"<h2>Tasks and answers</h2><p>{EXPLANATION}</p>", _samples(metrics, samples),
        "<h2>Options</h2>", table([k, json.dumps(v)] for k, v in flat(o).items())]))
    return folder / "report.html"


def compare(folders, out) -> Path:
    """Write a page with the curves of several runs over each other; returns its path, by default
    compare.html in the first of the folders. Raises UserError as read_run does."""
    records, options = zip(*map(read_run, folders))
    rows = [[name, *[json.dumps(flat(o).get(name)) for o in options]] for name in flat(options[0])
            if name not in ("out", "resume", "threads")]
    differ = [row for row in rows if len(set(row[1:])) > 1]
    out = Path(out or Path(folders[0]) / "compare.html")
    write_whole(out, page("Runs compared", [
        "<p>One run is one seed: a difference is a result only when several seeds have it.</p>",
        "<h2>Options that differ</h2>", table([["", *folders], *differ]) if differ else "None.",
        "<h2>Curves</h2>", curves(dict(zip(folders, records)))]))
    return out


def page(title, parts) -> str:
    """A whole page from its parts, each of them HTML; the title is text."""
    return "\n".join([
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>{_text(title)}</title><style>{STYLE.read_text(encoding='utf-8')}</style></head>",
        f"<body><h1>{_text(title)}</h1>", *parts, "</body></html>\n"])


def _samples(metrics, samples) -> str:
    """First, middle and last epoch: tasks with up to two attempts each, and what was refused."""
    epochs = dict.fromkeys(metrics[i]["epoch"] for i in (0, len(metrics) // 2, -1))
    return "".join(
        f"<h3>epoch {epoch}</h3><div class=grid>"
        + "".join(_card(r) for r in samples if r["epoch"] == epoch) + "</div>" for epoch in epochs)


def _card(r) -> str:
    """A task with the one that it varies, its expected answer, and attempts with their rewards; or a
    text that was refused."""
    texts = [("seed", f"varies: {r['seed_task']}")]
    if "refused" in r:
        tag = f"refused: {r['reason']}"
        texts += [("wrong", r["refused"])]
    else:
        tag = f"{r['origin']}, of epoch {r['written_in']}, p_hat = {r['p_hat']:.2f}"
        texts += [("task", r["task"]), ("", f"expected: {r['expected']}")]
        texts += [("right" if e["reward"] >= 0.5 else "wrong", f"r = {e['reward']:.2g}: {e['text']}")
                  for e in r["traces"]]
    return f"<div class=card><span class=tag>{_text(tag)}</span>" + "".join(
        f"<pre class='{kind}'>{_text(text[:900])}</pre>" for kind, text in texts) + "</div>"


def table(rows) -> str:
    """Rows of cells, each of them text."""
    return "<div class=wide><table>" + "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>"
        for row in rows) + "</table></div>"


def _text(value) -> str:
    """Escaped for HTML; what cannot be encoded (lone surrogates in model text) is replaced."""
    return html.escape(str(value)).encode("utf-8", "replace").decode()
