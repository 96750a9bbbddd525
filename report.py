"""Figures and one self-contained page per run.

What of the paper this is: its Figures 4-8, drawn from a run's metrics.jsonl: success rate on
generated tasks with the alpha band, validation, task and response length, solved and unsolved
tasks; and beside them KL, effective sample size and diversity.

How it is run: genenv.py writes figures/ and report.html at the end of a run; for a run that still
goes on or was stopped, `python report.py runs/000-genenv`.

Where it differs on purpose: pictures are embedded in the page, so that one file can be sent along.
"""
import base64
import html
import io
import json
import sys
from pathlib import Path

from data_pool import UserError, read_jsonl

BLUE, ORANGE, GREEN, GREY = "#0b62a4", "#d1670b", "#3a8a3a", "#888888"


def figures(metrics: list[dict], options: dict) -> dict:
    """{file name: matplotlib figure}; metrics: the records of metrics.jsonl."""
    import matplotlib
    matplotlib.use("Agg")  # files only: no display is needed
    epochs = [m["epoch"] for m in metrics]

    def draw(title, ylabel, lines, ylim=None, band=False):
        figure, axis = matplotlib.pyplot.subplots(figsize=(5.2, 3.2), layout="constrained")
        if band:
            low = [m["alpha"] - options["k_min"] for m in metrics]
            high = [m["alpha"] + options["k_min"] for m in metrics]
            axis.fill_between(epochs, low, high, color=GREEN, alpha=0.15, lw=0, label="band")
            axis.plot(epochs, [m["alpha"] for m in metrics], color=GREEN, lw=1, ls="--",
                      label="alpha")
        for (label, key), colour in zip(lines, (BLUE, ORANGE, GREEN)):
            axis.plot(epochs, [m[key] for m in metrics], color=colour, marker="o", ms=3, lw=1.5,
                      label=label)
        axis.set(title=title, xlabel="epoch", ylabel=ylabel, ylim=ylim)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
        return figure

    import matplotlib.pyplot  # noqa: F401  (after the backend is chosen)
    rate = (-0.03, 1.03)
    return {
        "validation.png": draw("Held-out tasks", "success rate",
                               [("sampled", "validation"), ("greedy", "validation_greedy")], rate),
        "success_rate.png": draw("Generated tasks: success of the agent", "success rate",
                                 [("p_hat", "success_rate")], rate, band=True),
        "task_length.png": draw("Generated tasks: length", "task length",
                                [("task length", "task_length")]),
        "response_length.png": draw("Responses to generated tasks", "tokens",
                                    [("response length", "response_length")]),
        "solved.png": draw("Generated tasks: always or never solved", "share",
                           [("fully solved", "solved"), ("never solved", "unsolved")], rate),
        "kl.png": draw("Distance to the initial policies", "nats per token",
                       [("simulator", "env_kl"), ("agent", "kl")]),
        "band.png": draw("What the simulator learns from", "generations per epoch",
                         [("inside the band", "env_kept"),
                          ("effective sample size", "env_ess")]),
        "diversity.png": draw("Diversity of generated tasks", "entropy over tools (bits)",
                              [("skill entropy", "skill_entropy")]),
    }


def write(folder) -> Path:
    """Write figures/*.png and report.html of a run folder; returns the page's path.

    Raises UserError if there are no metrics.
    """
    folder = Path(folder)
    metrics, options = _read(folder)
    (folder / "figures").mkdir(exist_ok=True)
    pictures = {}
    for name, figure in figures(metrics, options).items():
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=110, metadata={"Software": None})
        _close(figure)
        (folder / "figures" / name).write_bytes(buffer.getvalue())
        pictures[name] = base64.b64encode(buffer.getvalue()).decode()
    page = folder / "report.html"
    page.write_text(_page(folder, metrics, options, pictures), encoding="utf-8")
    return page


def closing_words(folder) -> str:
    """The last lines of a run: what to see in it."""
    folder = Path(folder)
    metrics, options = _read(folder)
    first, last = metrics[0], metrics[-1]
    rungs = list(last["validation_by"])
    solved = [name for name in rungs if last["validation_by"][name] >= 0.5]
    before = [name for name in rungs if first["validation_by"].get(name, 0) >= 0.5]
    in_band = sum(abs(m["success_rate"] - m["alpha"]) <= options["k_min"] for m in metrics[1:])
    lines = [
        "",
        f"validation       {first['validation']:.3f} -> {last['validation']:.3f}   held-out tasks,"
        f" {options['val_samples']} attempts each; solved mostly: {len(before)} -> {len(solved)} of"
        f" {len(rungs)} categories",
        f"task length      {first['task_length']:.2f} -> {last['task_length']:.2f}   of what the "
        f"simulator writes; response {first['response_length']:.1f} -> "
        f"{last['response_length']:.1f} tokens",
        f"tools in use     {first['skill_entropy']:.2f} -> {last['skill_entropy']:.2f} bits of "
        "entropy over the tools in generated tasks",
        f"success rate     {first['success_rate']:.2f} -> {last['success_rate']:.2f}   on generated "
        f"tasks; {in_band} of {len(metrics) - 1} epochs inside alpha +- {options['k_min']}",
    ]
    warned = sum(bool(m["warnings"]) for m in metrics)
    if warned:
        lines.append(f"warnings         in {warned} epochs, see TROUBLESHOOTING.md")
    return "\n".join([*lines, f"{folder}/report.html shows the curves, tasks and traces"])


def _read(folder):
    metrics = read_jsonl(folder / "metrics.jsonl")
    if not metrics:
        raise UserError(f"{folder / 'metrics.jsonl'} is empty: no epoch has ended yet")
    try:
        return metrics, json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        raise UserError(f"{folder / 'config.json'} is missing or damaged") from None


def _close(figure):
    import matplotlib.pyplot
    matplotlib.pyplot.close(figure)


# ---------------------------------------------------------------------------------------------
# the page


STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem}
img{width:32rem;max-width:100%} .figures{display:flex;flex-wrap:wrap;gap:.5rem}
table{border-collapse:collapse} td,th{padding:.15rem .8rem .15rem 0;text-align:left;
vertical-align:top} code{font-family:ui-monospace,monospace;font-size:13px;white-space:pre-wrap;
overflow-wrap:anywhere} .warn{color:#a33} .right{color:#276b27} .wrong{color:#a33}"""


def _page(folder, metrics, options, pictures) -> str:
    first, last = metrics[0], metrics[-1]
    warned = [(m["epoch"], w) for m in metrics for w in m["warnings"]]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{_text(folder.name)}</title>"
        f"<style>{STYLE}</style><h1>{_text(folder.name)}</h1>",
        f"<p>{_text(options['variant'])} on {_text(options['world'])}, seed {options['seed']}, "
        f"{last['epoch']} epochs: validation {first['validation']:.3f} &rarr; "
        f"<b>{last['validation']:.3f}</b>.</p>",
        "<h2>Warnings</h2>" + (_list([f"epoch {t}: {w}" for t, w in warned], "warn") if warned
                               else "<p>None.</p>"),
        "<h2>Curves</h2><div class=figures>" + "".join(
            f'<img alt="{name}" src="data:image/png;base64,{data}">'
            for name, data in pictures.items()) + "</div>",
        "<h2>Tasks and traces</h2>" + _samples(folder, metrics),
        "<h2>Validation by category</h2>" + _table(
            [["", *[f"epoch {m['epoch']}" for m in _three(metrics)]]] +
            [[name, *[f"{m['validation_by'].get(name, 0):.2f}" for m in _three(metrics)]]
             for name in last["validation_by"]]),
        "<h2>Options</h2>" + _table([[k, json.dumps(v)] for k, v in options.items()]),
    ]
    return "\n".join(parts) + "\n</html>\n"


def _samples(folder, metrics) -> str:
    """First, middle and last epoch: tasks with two traces each."""
    path = folder / "samples.jsonl"
    wanted = [m["epoch"] for m in _three(metrics)]
    records = [r for r in (read_jsonl(path) if path.is_file() else []) if r["epoch"] in wanted]
    rows = [["epoch", "task", "p_hat", "traces"]]
    for r in records:
        traces = "<br>".join(
            f"<code class={'right' if e['reward'] >= 0.5 else 'wrong'}>{_text(e['text'][:600])}"
            "</code>" for e in r["traces"])
        rows.append([str(r["epoch"]), f"<code>{_text(r['task'][:900])}</code>",
                     f"{r['p_hat']:.2f}", traces])
    return _table(rows, escaped=True)


def _three(metrics):
    """First, middle and last record, without repeats."""
    return [metrics[i] for i in dict.fromkeys((0, len(metrics) // 2, len(metrics) - 1))]


def _text(value) -> str:
    """Escaped for HTML; what cannot be encoded (lone surrogates in model text) is replaced."""
    return html.escape(str(value)).encode("utf-8", "replace").decode()


def _table(rows, escaped=False) -> str:
    clean = (lambda x: x) if escaped else _text
    return "<table>" + "".join(
        "<tr>" + "".join(f"<td>{clean(cell)}</td>" for cell in row) + "</tr>"
        for row in rows) + "</table>"


def _list(items, css) -> str:
    return f"<ul class={css}>" + "".join(f"<li>{_text(x)}</li>" for x in items) + "</ul>"


def main(argv=None) -> int:
    """`python report.py RUN_FOLDER`."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if len(argv) != 1:
            raise UserError("usage: python report.py RUN_FOLDER")
        print(write(argv[0]))
        return 0
    except UserError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
