"""Figures and one self-contained page per run.

What of the paper this is: its Figures 4-8, drawn from a run's metrics.jsonl: success rate on
generated tasks with the alpha band, validation, task and response length, solved and unsolved
tasks; and beside them KL, effective sample size and diversity.

How it is run: genenv.py writes figures/ and report.html at the end of a run; for a run that still
goes on or was stopped, `python -m watch.report runs/000-genenv`.

Where it differs on purpose: pictures are embedded in the page, so that one file can be sent along.
Text of models is escaped, and the page forbids scripts and outside sources to whoever opens it.
"""
import base64
import html
import io
import json
import sys
from collections import Counter
from pathlib import Path

from common.files import UserError, read_jsonl
from curriculum import target_of

BLUE, ORANGE, GREEN, GREY = "#0b62a4", "#d1670b", "#3a8a3a", "#888888"
COLOURS = (BLUE, ORANGE, GREY, GREEN, "#8e44ad", "#b03a2e")


# what the figures read of a record; for a run that was written by another version it is missing
KEYS = ("epoch", "alpha", "validation", "validation_greedy", "validation_by", "success_rate",
        "task_length", "response_length", "solved", "unsolved", "env_kl", "env_kl_step", "kl",
        "env_kept", "env_ess", "skill_entropy", "distinct_tasks", "written", "invalid",
        "zero_variance", "truncated", "replay_gain", "warnings")
RATE = (-0.03, 1.03)


def figures(metrics: list[dict], options: dict) -> dict:
    """{file name: matplotlib figure}; metrics: the records of metrics.jsonl."""
    import matplotlib
    matplotlib.use("Agg")  # files only: no display is needed
    lost = lambda *reasons: lambda m: sum(
        n for reason, n in m["invalid"].items() if not reasons or reason in reasons
    ) / max(1, m["written"])
    # before training there is nothing to draw; with --epochs 0 there is nothing else
    trained = metrics[1:] or metrics
    agreement = [("no agreement", lost("no agreement"))] if options.get("agreement") else []
    return {
        "validation.png": _draw(validated(metrics), "Held-out tasks", "success rate", [
            ("sampled", "validation"), ("greedy", "validation_greedy")], RATE),
        "success_rate.png": _draw(metrics, "Generated tasks: success of the agent", "success rate",
                                  [("p_hat", "success_rate")], RATE, options["k_min"]),
        "task_length.png": _draw(metrics, "Generated tasks: length", "task length",
                                 [("task length", "task_length")]),
        "response_length.png": _draw(metrics, "Responses to generated tasks", "tokens",
                                     [("response length", "response_length")]),
        "solved.png": _draw(metrics, "Generated tasks: always or never solved", "share", [
            ("fully solved", "solved"), ("never solved", "unsolved")], RATE),
        "kl.png": _draw(trained, "KL of the policies", "nats per token", [
            ("simulator to its start", "env_kl"), ("agent to its start", "kl"),
            ("simulator, by this update", "env_kl_step")]),
        "band.png": _draw(trained, "What the simulator learns from", "records", [
            ("new, inside the band", "env_kept"),
            ("effective sample size, earlier ones included", "env_ess")]),
        "diversity.png": _draw(metrics, "Diversity of generated tasks", "bits", [
            ("entropy over skills", "skill_entropy")]),
        "invalid.png": _draw(metrics, "Generations that are no new task", "share", [
            ("all reasons", lost()), ("copies and duplicates", lost(
                "copy of the seed", "duplicate in the batch")),
            *agreement], RATE),
        "refused.png": _draw(metrics, "Refused, by reason", "share of generations",
                             [(reason, lost(reason)) for reason in top_reasons(metrics)]),
        "signal.png": _draw(trained, "What teaches the agent nothing", "share", [
            ("groups with equal rewards", "zero_variance"),
            ("truncated responses", "truncated")], RATE),
        "replay.png": _draw([m for m in metrics if m.get("replays")] or trained,
                            "Tasks tried again: change of p_hat", "difference", [
                                ("now minus two or more epochs ago", "replay_gain")]),
    }


def validated(metrics) -> list[dict]:
    """The records whose validation was measured, and not repeated from the one before."""
    return [m for m in metrics if m.get("validated", m["epoch"]) == m["epoch"]]


def top_reasons(metrics, n=6) -> list[str]:
    """The reasons for which most generations of a run were refused, the most frequent first."""
    total = Counter()
    for m in metrics:
        total.update(m["invalid"])
    return [reason for reason, _ in total.most_common(n)]


def _draw(metrics, title, ylabel, lines, ylim=None, k_min=None):
    """One figure. lines: (label, key of a record or function of it); k_min: show the alpha band."""
    import matplotlib.pyplot
    figure, axis = matplotlib.pyplot.subplots(figsize=(5.2, 3.2), layout="constrained")
    epochs = [m["epoch"] for m in metrics]
    if k_min is not None:
        alphas = [m["alpha"] for m in metrics]
        axis.fill_between(epochs, [a - k_min for a in alphas], [a + k_min for a in alphas],
                          color=GREEN, alpha=0.15, lw=0, label="band")
        axis.plot(epochs, alphas, color=GREEN, lw=1, ls="--", label="alpha")
    for (label, key), colour in zip(lines, COLOURS):
        values = [key(m) if callable(key) else m[key] for m in metrics]
        axis.plot(epochs, values, color=colour, marker="o", ms=3, lw=1.5, label=label)
    axis.set(title=title, xlabel="epoch", ylabel=ylabel, ylim=ylim)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.25)
    if lines:
        axis.legend(frameon=False, fontsize=8)
    return figure


def write(folder) -> Path:
    """Write figures/*.png and report.html of a run folder; returns the page's path.

    Raises UserError if metrics, options or samples are missing or not those of a run; then nothing
    is written.
    """
    folder = Path(folder)
    metrics, options = _read(folder)
    pictures = {}
    try:
        samples = _samples(folder, metrics)
        for name, figure in figures(metrics, options).items():
            buffer = io.BytesIO()
            figure.savefig(buffer, dpi=110, metadata={"Software": None})
            _close(figure)
            pictures[name] = buffer.getvalue()
        page = _page(folder, metrics, options, pictures, samples)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder}: a record has a wrong value ({error}); metrics.jsonl, "
                        "samples.jsonl or config.json was edited") from None
    (folder / "figures").mkdir(exist_ok=True)
    for name, data in pictures.items():
        (folder / "figures" / name).write_bytes(data)
    # whole or not at all: it is the last of a run, and its being there says that all is done
    (folder / "report.tmp").write_text(page, encoding="utf-8")
    return (folder / "report.tmp").rename(folder / "report.html")


def closing_words(folder) -> str:
    """The last lines of a run: what to see in it."""
    folder = Path(folder)
    metrics, options = _read(folder)
    first, last = metrics[0], metrics[-1]
    rungs = list(last["validation_by"])
    solved = [name for name in rungs if last["validation_by"][name] >= 0.5]
    before = [name for name in rungs if first["validation_by"].get(name, 0) >= 0.5]
    lines = [
        "",
        f"validation       {first['validation']:.3f} -> {last['validation']:.3f}   held-out tasks,"
        f" {options['val_samples']} attempts each; solved mostly: {len(before)} -> {len(solved)} of"
        f" {len(rungs)} categories",
        *of_generated(metrics, options)]
    warned = sum(bool(m["warnings"]) for m in metrics)
    if warned:
        lines.append(f"warnings         in {warned} epochs, see TROUBLESHOOTING.md")
    return "\n".join([*lines, f"{folder}/report.html shows the curves, tasks and traces"])


def generates(metrics) -> bool:
    """Whether any epoch tried a generated task; with --variant base none does."""
    return any(m["distinct_tasks"] for m in metrics)


def of_generated(metrics, options) -> list[str]:
    """The lines about generated tasks, none for a run without them."""
    first, last = metrics[0], metrics[-1]
    if not generates(metrics):
        return []
    return [
        f"task length      {first['task_length']:.2f} -> {last['task_length']:.2f}   of what the "
        f"simulator writes; response {first['response_length']:.1f} -> "
        f"{last['response_length']:.1f} tokens",
        f"skills in use    {first['skill_entropy']:.2f} -> {last['skill_entropy']:.2f} bits of "
        "entropy over the skills in generated tasks",
        f"success rate     {first['success_rate']:.2f} -> {last['success_rate']:.2f}   on generated "
        f"tasks; {epochs_in_band(metrics, options)} of {len(metrics) - 1} epochs inside alpha +- "
        f"{options['k_min']}",
        *([f"functions        {last['functions_practised']} of {last['functions']} practised, "
           f"{last['functions_solved']} solved when last tried"] if "functions" in last else []),
    ]


def epochs_in_band(metrics, options) -> int:
    """Epochs of training whose success rate lay within k_min of what alpha is to bring about."""
    schedule, alpha, k_min = (options.get(k) for k in ("alpha_schedule", "alpha", "k_min"))
    return sum(abs(m["success_rate"] - target_of(schedule, m["alpha"], alpha)) <= k_min
               for m in metrics[1:])


def _read(folder):
    metrics = read_jsonl(folder / "metrics.jsonl")
    if not metrics:
        raise UserError(f"{folder / 'metrics.jsonl'} is empty: no epoch has ended yet")
    try:
        options = json.loads((folder / "config.json").read_text())
        missing = {"variant", "world", "seed", "k_min", "val_samples"} - set(options)
    except (OSError, ValueError, TypeError, RecursionError):
        raise UserError(f"{folder / 'config.json'} is missing or damaged") from None
    if missing:
        raise UserError(f"{folder / 'config.json'} has no option {sorted(missing)[0]}")
    for m in metrics:
        if absent := sorted(set(KEYS) - set(m)):
            raise UserError(f"{folder / 'metrics.jsonl'}: a record has no {absent[0]!r}: the file "
                            "was edited or belongs to another version")
    return metrics, options


def _close(figure):
    import matplotlib.pyplot
    matplotlib.pyplot.close(figure)


# ---------------------------------------------------------------------------------------------
# the page


# no script runs and nothing is fetched, whatever a model wrote
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """:root{color-scheme:light}*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;color:#1c1c1c;background:#fff;max-width:76rem;
margin:0 auto;padding:1rem}
h1{font-size:1.6rem;margin:.2rem 0}h2{font-size:1.2rem;margin:1.8rem 0 .5rem}
h3{font-size:1rem;margin:1rem 0 .4rem}p{margin:.3rem 0;overflow-wrap:anywhere}
.facts{display:flex;flex-wrap:wrap;gap:.5rem 1.6rem;margin:.6rem 0}.facts b{font-size:1.1rem}
.facts div span{display:block;font-size:.8rem;color:#555}
.warn{border-left:4px solid #b3261e;background:#fdf1f0;padding:.4rem .8rem;margin:.4rem 0;
overflow-wrap:anywhere}.fine{border-left:4px solid #276b27;background:#f0f7f0;padding:.4rem .8rem}
.grid{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,22rem),1fr))}
.cards{grid-template-columns:repeat(auto-fill,minmax(min(100%,30rem),1fr))}
.grid img{width:100%;height:auto;display:block}
.card{border:1px solid #ddd;border-radius:6px;padding:.5rem .7rem;min-width:0}
.tag{font-size:.8rem;color:#555}pre{font:13px/1.4 ui-monospace,monospace;margin:.3rem 0;
white-space:pre-wrap;overflow-wrap:anywhere}pre.right{border-left:3px solid #276b27;
padding-left:.5rem}pre.wrong{border-left:3px solid #b3261e;padding-left:.5rem}
pre.picture{white-space:pre;overflow-x:auto;font-size:12px}pre.seed{color:#666}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
td{padding:.15rem 1rem .15rem 0;text-align:left;vertical-align:top;border-bottom:1px solid #eee;
overflow-wrap:anywhere}summary{cursor:pointer;font-weight:600;margin:1rem 0 .4rem}"""


def _page(folder, metrics, options, pictures, samples) -> str:
    first, last = metrics[0], metrics[-1]
    facts = [("held-out success", f"{first['validation']:.3f} \u2192 {last['validation']:.3f}")]
    if generates(metrics):
        facts += [
            ("success on generated tasks", f"{last['success_rate']:.2f} (alpha "
             f"{last['alpha']:.2f})"),
            ("task length", f"{first['task_length']:.2f} \u2192 {last['task_length']:.2f}"),
            ("epochs within alpha \u00b1 k_min",
             f"{epochs_in_band(metrics, options)} of {len(metrics) - 1}"),
            ("new tasks, last epoch", f"{last['distinct_tasks']} of {last['written']} written")]
    three = _three(metrics)
    by_category = [["", *[f"epoch {m['epoch']}" for m in three]]] + [
        [name, *[f"{m['validation_by'].get(name, 0):.2f}" for m in three]]
        for name in last["validation_by"]]
    return "\n".join([
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>{_text(folder.name)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{_text(folder.name)}</h1>",
        f"<p>{_text(options['variant'])} on {_text(options['world'])}, seed "
        f"{_text(options['seed'])}, {len(metrics) - 1} epochs</p>",
        "<div class=facts>" + "".join(f"<div><span>{_text(k)}</span><b>{_text(v)}</b></div>"
                                      for k, v in facts) + "</div>",
        "<h2>Warnings</h2>" + _warnings(metrics),
        "<h2>Curves</h2><div class=grid>" + "".join(
            f'<img alt="{_text(name)}" src="data:image/png;base64,'
            f'{base64.b64encode(data).decode()}">' for name, data in pictures.items()) + "</div>",
        "<h2>Tasks and traces</h2>" + samples,
        "<h2>Held-out success by category</h2>" + _table(by_category),
        _functions(folder),
        _details("Options", _table([[k, json.dumps(v)] for k, v in options.items()])),
        _details(f"All metrics of epoch {_text(last['epoch'])}", _table(
            [[k, json.dumps(v)] for k, v in last.items() if k != "warnings"])),
    ]) + "\n</body></html>\n"


def _functions(folder) -> str:
    """A table of the functions to practise, the least solved first; "" for a run without a list."""
    path = folder / "functions.json"
    table = json.loads(path.read_text()) if path.is_file() else {}
    rows = sorted(table.items(), key=lambda item: (not item[1][0], item[1][1] or 0, item[0]))
    rows = [[name, n, "never tried" if p is None else f"{p:.2f}"] for name, (n, p) in rows]
    head = ["function", "generated tasks that call it", "success when last tried"]
    return _details("Functions, the least solved first", _table([head, *rows])) if rows else ""


def _warnings(metrics) -> str:
    """One box per kind of warning: in which epochs, and its latest words."""
    kinds = {}
    for m in metrics:
        for text in m["warnings"]:
            kinds.setdefault(text.partition(":")[0], []).append((m["epoch"], text))
    if not kinds:
        return "<p class=fine>None.</p>"
    boxes = []
    for found in kinds.values():
        epochs = _text(", ".join(str(t) for t, _ in found))
        boxes.append(f"<div class=warn>{_text(found[-1][1])}<br><span class=tag>"
                     f"epoch{'s' * (len(found) > 1)} {epochs}</span></div>")
    return "".join(boxes) + "<p class=tag>TROUBLESHOOTING.md has a paragraph on each.</p>"


LEGEND = (
    "Tasks of the first, the middle and the last epoch; samples.jsonl has those of every epoch. "
    "p_hat: share of the agent's attempts that solved the task. In the band: new, and p_hat near "
    "alpha; a simulator that is trained imitates such tasks of its own. Shown are the best and the "
    "worst attempt, once if they are alike, with the reward r; of an episode the agent's turns "
    "(&gt;) and what it was told.")


def _samples(folder, metrics) -> str:
    """First, middle and last epoch: tasks with up to two traces each, and what was refused."""
    path = folder / "samples.jsonl"
    records = read_jsonl(path) if path.is_file() else []
    key = next((r["key"] for r in records if r.get("key")), "")
    parts = [f"<p class=tag>{LEGEND} {_text(key)}</p>"]
    for m in _three(metrics):
        here = [r for r in records if r["epoch"] == m["epoch"]]
        refused = [r for r in here if "refused" in r]
        tasks = _cards(r for r in here if "refused" not in r)
        parts.append(f"<h3>epoch {_text(m['epoch'])}</h3>{tasks}")
        if refused:
            title = f"Refused in epoch {_text(m['epoch'])}, up to three of each reason"
            parts.append(_details(title, _cards(refused)))
    return "".join(parts)


def _cards(records) -> str:
    return f"<div class='grid cards'>{''.join(map(_card, records))}</div>"


def _card(r) -> str:
    """One task beside the one it varies: origin and success rate, text, the world's picture of it,
    expected answer, traces with their rewards; or a text that was refused, with the reason."""
    before = f"<pre class=seed>varies: {_text(r['seed_task'][:600])}</pre>" \
        if r.get("seed_task") else ""
    if "refused" in r:
        return (f"<div class=card><span class=tag>refused: {_text(r['reason'])}</span>{before}"
                f"<pre class=wrong>{_text(r['refused'][:900])}</pre></div>")
    traces = "".join(
        f"<pre class={'right' if e['reward'] >= 0.5 else 'wrong'}>{_text(e['text'][:600])}"
        f" <span class=tag>r = {e['reward']:.2g}</span></pre>" for e in r["traces"])
    picture = f"<pre class=picture>{_text(r['picture'][:2000])}</pre>" if r.get("picture") else ""
    word = "a shortest solution" if picture else "expected"  # other plans count as well
    expected = f"<pre>{word}: {_text(r['expected'][:600])}</pre>" if r.get("expected") else ""
    return (f"<div class=card><span class=tag>{_text(_tag(r))}</span>{before}"
            f"<pre><b>{_text(r['task'][:900])}</b></pre>{picture}{expected}{traces}</div>")


def _tag(r) -> str:
    """Where a task is from, when it was written, how often it was solved."""
    origin = {"env": "written by the simulator"}.get(r["origin"], r["origin"])
    earlier = r["origin"] == "env" and r.get("written_in", r["epoch"]) != r["epoch"]
    return (f"{origin}{' in epoch ' + str(r['written_in']) + ', tried again' if earlier else ''}, "
            f"p_hat = {r['p_hat']:.2f}{', in the band' if r.get('in_band') else ''}")


def _three(metrics):
    """First, middle and last record, without repeats."""
    return [metrics[i] for i in dict.fromkeys((0, len(metrics) // 2, len(metrics) - 1))]


def _text(value) -> str:
    """Escaped for HTML; what cannot be encoded (lone surrogates in model text) is replaced."""
    return html.escape(str(value)).encode("utf-8", "replace").decode()


def _table(rows) -> str:
    return "<div class=wide><table>" + "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>"
        for row in rows) + "</table></div>"


def _details(title, inner) -> str:
    return f"<details><summary>{title}</summary>{inner}</details>"


def main(argv=None) -> int:
    """`python -m watch.report RUN_FOLDER`."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if len(argv) != 1:
            raise UserError("usage: python -m watch.report RUN_FOLDER")
        print(write(argv[0]))
        return 0
    except UserError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
