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
from support.health import aim
from support.options import flat, saved_options

PANELS = (  # title, unit, {key of `measured`: label}, caption; runs are compared by the first key
    ("Held-out success", "share", {
        "validation": "sampled attempts", "validation_greedy": "one greedy attempt"},
        "Success on tasks that neither model is trained on. It should rise and then stay up."),
    ("Success on generated tasks", "share", {
        "success_rate": "p_hat", "solved": "fully solved", "unsolved": "never solved"},
        "Success on new tasks, before the agent trains on them. It should stay away from 0 and 1; "
        "the band is alpha \u00b1 k_min, what the simulator aims at."),
    ("Mixed groups", "share", {
        "mixed_share": "generated tasks with mixed rewards",
        "zero_variance": "all tasks with equal rewards", "truncated": "attempts cut off"},
        "Only groups of attempts whose rewards differ teach the agent something."),
    ("Entropy of the agent", "nats per token", {"entropy": "mean of -log-prob"},
     "A fall towards 0 says that attempts at a task become alike, a steady climb that they "
     "become noise."),
    ("Generated tasks", "length, or bits", {
        "task_length": "task length", "skill_entropy": "entropy over skills"},
        "Tasks may grow with the agent. Should the entropy over skills fall, the simulator repeats "
        "itself."),
    ("Length of responses", "tokens", {"response_length": "response length"},
     "It follows the tasks; near --max-response-tokens responses are cut off and earn nothing."),
    ("KL to the start", "nats per token", {
        "env_kl": "simulator", "env_kl_step": "simulator, one update alone", "kl": "agent"},
        "A slow rise that levels off is healthy; above 2 texts can no longer be trusted."),
    ("What the simulator learns from", "tasks", {
        "env_kept": "new tasks in the band", "env_ess": "effective sample size, with old ones"},
        "As many as a mini-batch (--env-batch) is healthy; a handful is too few."))
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


def facts(metrics, o) -> dict:
    """{name: value as text} of what matters most in a run, at its start and now."""
    first, last = metrics[0], metrics[-1]

    def change(key, form):
        now = shown(last, key, form)
        return f"{shown(first, key, form)} -> {now}" if len(metrics) > 1 else now

    found = {"held-out success": change("validation", ".3f")} if last["validation_by"] else {}
    if any(m["distinct_tasks"] for m in metrics):
        tried = [m for m in metrics[1:] if m["distinct_tasks"]]
        near = sum(abs(m["success_rate"] - aim(m, o)) <= o.k_min for m in tried)
        found |= {"success on generated tasks": change("success_rate", ".2f"),
                  f"epochs within alpha +- {o.k_min:.2g}": f"{near} of {len(metrics) - 1}",
                  "mixed groups": change("mixed_share", ".0%"),
                  "length of generated tasks": change("task_length", ".2f"),
                  "skill entropy, bits": change("skill_entropy", ".2f")}
    return found | {"agent's entropy, nats": change("entropy", ".2f")}


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
    for axis, (title, unit, lines, caption) in zip(figure.subplots(len(PANELS) // 2, 2).flat, PANELS):
        for name, metrics in runs.items():
            for key in list(lines) if len(runs) == 1 else list(lines)[:1]:
                if values := points(metrics, key):
                    label = lines[key] if len(runs) == 1 else name
                    axis.plot(*zip(*values), marker="o", ms=3, label=label)
        if alphas and "success_rate" in lines:
            axis.fill_between(range(len(alphas)), [alpha - k_min for alpha in alphas],
                              [alpha + k_min for alpha in alphas], alpha=0.15, lw=0, label="band")
        axis.set(title=title, xlabel=f"epoch\n{textwrap.fill(caption, 80)}", ylabel=unit)
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
EXPLANATION = (
    "Tasks of the first, the middle and the last epoch; samples.jsonl has more. env: written by the "
    "simulator. p_hat: share of attempts that solved the task. In the band: new, and p_hat near alpha, as "
    "a trained simulator imitates. Below: the best and the worst attempt with the reward r.")


def write(folder) -> Path:
    """Write report.html of a run folder; returns its path. Raises UserError as read_run does."""
    folder = Path(folder)
    metrics, o = read_run(folder)
    path = folder / "samples.jsonl"
    samples = read_jsonl(path) if path.is_file() else []
    numbers = "".join(f"<div><span>{_text(name)}</span><b>{_text(value)}</b></div>"
                      for name, value in facts(metrics, o).items())
    warned = [[f"epoch {m['epoch']}", text] for m in metrics for text in m["warnings"]]
    # whole or not at all: it is the last thing that a run writes, and says that all is done
    write_whole(folder / "report.html", page(folder.name, [
        _paragraph(f"{o.variant} on {o.world}, seed {o.seed}, epochs 0 to {metrics[-1]['epoch']}"),
        f"<div class=facts>{numbers}</div>", "<h2>Warnings</h2>",
        _paragraph("TROUBLESHOOTING.md has a paragraph on each."), table(warned or [["none"]]),
        "<h2>Curves</h2>", curves({folder.name: metrics}, [m["alpha"] for m in metrics], o.k_min),
        "<h2>Tasks and answers</h2>", _paragraph(EXPLANATION), _samples(metrics, samples),
        _details("Options", table([[k, json.dumps(v)] for k, v in flat(o).items()]))]))
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
        _paragraph("One run is one seed: a difference is a result only when several seeds have it."),
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
    parts = []
    for m in _three(metrics):
        here = [r for r in samples if r["epoch"] == m["epoch"]]
        refused = [_card(f"refused: {r['reason']}", r, [_pre(r["refused"], "wrong")])
                   for r in here if "refused" in r]
        tasks = [_task_card(r) for r in here if "refused" not in r]
        parts += [f"<h3>epoch {m['epoch']}</h3>", _grid(tasks)]
        parts += [_details("Refused, up to three of each reason", _grid(refused))] * bool(refused)
    return "".join(parts)


def _task_card(r) -> str:
    """A task with the one that it varies, its expected answer, and attempts with their rewards."""
    band = ", in the band" * r["in_band"]
    tag = f"{r['origin']}, of epoch {r['written_in']}, p_hat = {r['p_hat']:.2f}{band}"
    expected = [_pre("expected: " + r["expected"])] if r["expected"] else []
    attempts = [_pre(e["text"] or "(no text)", "right" if e["reward"] >= 0.5 else "wrong",
                     f" <span class=tag>r = {e['reward']:.2g}</span>") for e in r["traces"]]
    return _card(tag, r, [_pre(r["task"], "task"), *expected, *attempts])


def _card(tag, r, parts) -> str:
    seed = [_pre("varies: " + r["seed_task"], "seed")] if r["seed_task"] else []
    return f"<div class=card><span class=tag>{_text(tag)}</span>{''.join(seed + parts)}</div>"


def _pre(text, kind="", more="") -> str:
    return f"<pre class='{kind}'>{_text(text[:900])}{more}</pre>"


def _grid(cells) -> str:
    return f"<div class=grid>{''.join(cells)}</div>"


def _details(title, inner) -> str:
    return f"<details><summary>{title}</summary>{inner}</details>"


def _paragraph(text) -> str:
    return f"<p>{_text(text)}</p>"


def table(rows) -> str:
    """Rows of cells, each of them text."""
    return "<div class=wide><table>" + "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>"
        for row in rows) + "</table></div>"


def _three(metrics) -> list:
    """First, middle and last record, without repeats."""
    return [metrics[i] for i in dict.fromkeys((0, len(metrics) // 2, len(metrics) - 1))]


def _text(value) -> str:
    """Escaped for HTML; what cannot be encoded (lone surrogates in model text) is replaced."""
    return html.escape(str(value)).encode("utf-8", "replace").decode()
