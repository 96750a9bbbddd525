"""Figures and one self-contained page per run.

What of the paper this is: its Figures 4-8, drawn from a run's metrics.jsonl: success rate on
generated tasks with the alpha band, validation, task and response length, solved and unsolved
tasks; and beside them KL, effective sample size and diversity.

How it is run: genenv.py writes figures/ and report.html at the end of a run; for a run that still
goes on or was stopped, `python -m watch.report runs/000-genenv`. commands/compare.py draws several
runs with the same functions.

Where it differs on purpose: pictures and style are embedded in the page, so that one file can be
sent along. Text of models is escaped, and the page forbids scripts and outside sources to whoever
opens it. What an epoch did not measure is not drawn.
"""
import base64
import html
import io
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from support.cli import exit_code
from support.files import UserError, read_jsonl, write_whole

# one colour, one meaning, in every figure; what has the same colour differs in its dashes
AGENT, SIMULATOR, TARGET, STYLES = "#0b62a4", "#d1670b", "#3a8a3a", ("-", "--", ":")
OTHERS = ("#8e44ad", "#b03a2e", "#16857a", "#a67c00", "#444444", "#d1478f")  # reasons, runs

OF_GENERATED = {"success_rate", "task_length", "response_length", "solved", "unsolved",
                "skill_entropy"}


def value(m: dict, key: str):
    """A figure of an epoch's record, None where that epoch did not measure it."""
    tried = bool(validated([m]))
    measured = {
        "validation": tried and m["validation_by"], "tuning": tried,
        "env": m.get("env_steps", m["env_ess"]) > 0, "replay_gain": m.get("replays", 1),
        "env_kept": m["epoch"] > 0 and m["written"], "zero_variance": m["epoch"] > 0,
        **dict.fromkeys(("kl", "grad", "clip", "trained", "mismatch", "agent"), m["epoch"] > 0)}
    kind = key if key in measured else key.partition("_")[0]
    known = m["distinct_tasks"] if key in OF_GENERATED else measured.get(kind, True)
    return m.get(key) if known else None


class Panel(NamedTuple):
    """One figure: lines are (label, colour, [(epoch, value)]); the sentence stands below it."""
    title: str
    ylabel: str
    lines: list
    sentence: str


def growth(key, start):
    """A function of a record: a figure as a multiple of the one in the record `start`."""
    return lambda m: value(m, key) / start[key] \
        if value(m, key) is not None and start[key] else None


def lost(*reasons):
    """A function of a record: the share of written texts refused for these reasons, or for any."""
    def share(m):
        n = sum(m["invalid"].get(reason, 0) for reason in reasons or m["invalid"])
        return n / m["written"] if m["written"] else None
    return share


def panels(metrics: list[dict]) -> dict:
    """{file name: Panel} of a run; lines and figures without a single value are left out."""
    start = metrics[0]
    found = {
        "validation.png": ("Held-out success", "share", [
            ("sampled attempts", AGENT, "validation"),
            ("one greedy attempt", AGENT, "validation_greedy")],
            "Success on tasks that neither model is trained on. It should rise and then stay up."),
        "success_rate.png": ("Success on generated tasks", "share", [
            ("success, p_hat", AGENT, "success_rate"), ("always solved", AGENT, "solved"),
            ("never solved", AGENT, "unsolved")],
            "The agent's success on the simulator's new tasks, before it trains on them. It should "
            "stay away from 0 and 1; the green band is alpha \u00b1 k_min, what the simulator aims "
            "at."),
        "diversity.png": ("How generated tasks grow", "relative to epoch 0", [
            ("task length", SIMULATOR, growth("task_length", start)),
            ("tokens of a response", AGENT, growth("response_length", start)),
            ("entropy over skills", SIMULATOR, growth("skill_entropy", start))],
            "Length of tasks and responses, and how evenly the skills are used, as multiples of "
            "epoch 0. Entropy that falls far below 1 says that the simulator repeats itself."),
        "band.png": ("What the simulator learns from", "tasks", [
            ("new tasks inside the band", SIMULATOR, "env_kept"),
            ("effective sample size, earlier ones included", SIMULATOR, "env_ess")],
            "Tasks of this epoch that the agent solves about as often as alpha says. A handful is "
            "too few to learn from; as many as a mini-batch (--env-batch) is healthy. The "
            "effective sample size: how many tasks of equal weight the weighted ones are worth."),
        "kl.png": ("KL of the policies", "nats per token", [
            ("simulator to its start, before the update", SIMULATOR, "env_kl"),
            ("simulator, moved by this update: before to after", SIMULATOR, "env_kl_step"),
            ("agent to its start", AGENT, "kl")],
            "How far the policies are from the base model. A slow rise that levels off is healthy; "
            "above 2 the simulator's texts are no longer to be trusted."),
        "invalid.png": ("Written texts that are no new task", "share", [
            ("all reasons", SIMULATOR, lost()),
            *((reason, colour, lost(reason))
              for reason, colour in zip(top_reasons(metrics), OTHERS))],
            "Why texts of the simulator were refused. A share that falls or stays is healthy; one "
            "that climbs says that the simulator loses the form, or repeats itself."),
        "signal.png": ("What teaches the agent nothing", "share", [
            ("groups with equal rewards", AGENT, "zero_variance"),
            ("attempts cut off by a limit", AGENT, "truncated")],
            "Groups of attempts with equal rewards have no gradient. Below 0.9 there is something "
            "to learn; attempts that are cut off should be few."),
        "replay.png": ("Tasks tried again", "change of p_hat", [
            ("now minus two or more epochs ago", AGENT, "replay_gain")],
            "Whether tasks of earlier epochs have become easier. Above 0 the agent has learned "
            "from them."),
    }
    out = {}
    for name, (title, ylabel, lines, sentence) in found.items():
        drawn = [(label, colour, points(metrics, key)) for label, colour, key in lines]
        if any(line[2] for line in drawn):
            out[name] = Panel(title, ylabel, [line for line in drawn if line[2]], sentence)
    return out


def points(metrics, key) -> list:
    """[(epoch, value)] of a key of the records, or a function of them, where it was measured."""
    get = key if callable(key) else lambda m: value(m, key)
    return [(m["epoch"], get(m)) for m in metrics if get(m) is not None]


def figures(metrics: list[dict], options: dict) -> dict:
    """{file name: matplotlib figure}; metrics: the records of metrics.jsonl."""
    band = [(m["epoch"], m["alpha"] - options["k_min"], m["alpha"], m["alpha"] + options["k_min"])
            for m in metrics]
    return {name: draw(panel, band if name == "success_rate.png" else ())
            for name, panel in panels(metrics).items()}


def draw(panel: Panel, band=(), thinner=0.0):
    """A panel as a matplotlib figure. band: (epoch, lower edge, alpha, upper edge) of each epoch.
    thinner: by how many points each line is thinner than the one below it, so that both are seen
    where they coincide."""
    import matplotlib
    matplotlib.use("Agg")  # files only: no display is needed
    import matplotlib.pyplot
    figure, axis = matplotlib.pyplot.subplots(figsize=(5, 3.6), layout="constrained")
    if band:
        epochs, low, alphas, high = zip(*band)
        axis.fill_between(epochs, low, high, color=TARGET, alpha=0.15, lw=0, label="band")
        axis.plot(epochs, alphas, color=TARGET, lw=1, ls="--", label="alpha")
    for i, (label, colour, values) in enumerate(panel.lines):
        style = STYLES[[line[1] for line in panel.lines[:i]].count(colour)]
        width = 1.8 + thinner * (len(panel.lines) - 1 - i)
        axis.plot(*zip(*values), color=colour, ls=style, marker="o", ms=3.5, lw=width, label=label)
    axis.set(xlabel="epoch", ylabel=panel.ylabel)
    axis.set_title(panel.title, fontsize=13)
    heights = [v for _, _, values in panel.lines for _, v in values]
    if panel.ylabel == "share":
        axis.set_ylim(0, 1.02)
    elif min(heights) >= 0:
        axis.set_ylim(0, 1.06 * max(heights) or None)  # the highest point is not cut by the frame
    else:
        axis.axhline(0, color="black", lw=0.8)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.grid(alpha=0.25)
    # long handles: a dashed line is told from a solid one of the same colour
    short = max(len(line[0]) for line in panel.lines) < 26
    figure.legend(loc="outside lower center", ncols=1 + short, frameon=False, fontsize=9,
                  handlelength=4)
    return figure


def png(figure) -> bytes:
    """A figure as a picture; the figure is closed."""
    import matplotlib.pyplot
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=140, metadata={"Software": None})
    matplotlib.pyplot.close(figure)
    return buffer.getvalue()


def validated(metrics) -> list[dict]:
    """The records whose validation was measured, and not repeated from the one before."""
    return [m for m in metrics if m.get("validated", m["epoch"]) == m["epoch"]]


def top_reasons(metrics, n=4) -> list[str]:
    """The reasons for which most generations of a run were refused, the most frequent first."""
    total = Counter()
    for m in metrics:
        total.update(m["invalid"])
    return [reason for reason, _ in total.most_common(n)]


def write(folder) -> Path:
    """Write figures/*.png and report.html of a run folder; returns the page's path.

    Raises UserError if metrics, options or samples are missing or not those of a run; then nothing
    is written.
    """
    folder = Path(folder)
    metrics, options = read_run(folder)
    try:
        samples = _samples(folder, metrics)
        pictures = {name: png(figure) for name, figure in figures(metrics, options).items()}
        page = _page(folder, metrics, options, pictures, samples)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder}: a record has no or a wrong value ({error}); metrics.jsonl, "
                        "samples.jsonl, functions.json or config.json was edited, or belongs to "
                        "another version") from None
    (folder / "figures").mkdir(exist_ok=True)
    for name, data in pictures.items():
        (folder / "figures" / name).write_bytes(data)
    # whole or not at all: it is the last of a run, and its being there says that all is done
    write_whole(folder / "report.html", page)
    return folder / "report.html"


def generates(metrics) -> bool:
    """Whether any epoch tried a generated task; with --variant base none does."""
    return any(m["distinct_tasks"] for m in metrics)


def epochs_in_band(metrics, options) -> int:
    """Epochs of training whose success rate lay within k_min of what alpha is to bring about."""
    alpha, k_min = options.get("alpha"), options.get("k_min")
    return sum(abs(m["success_rate"] - alpha) <= k_min
               for m in metrics[1:] if m["distinct_tasks"])


def shown(m: dict, key: str, form: str) -> str:
    """A figure of an epoch's record as text, a dash where that epoch did not measure it."""
    return "-" if value(m, key) is None else format(m[key], form)


def read_run(folder):
    """(records of metrics.jsonl, options) of a run folder. Raises UserError: what is wrong."""
    folder = Path(folder)
    metrics = read_jsonl(folder / "metrics.jsonl")
    if not metrics:
        raise UserError(f"{folder / 'metrics.jsonl'} is empty: no epoch has ended yet")
    try:
        return metrics, json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, TypeError, RecursionError):
        raise UserError(f"{folder / 'config.json'} is missing or damaged") from None


# ---------------------------------------------------------------------------------------------
# the page


# no script runs and nothing is fetched, whatever a model wrote
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


def _page(folder, metrics, options, pictures, samples) -> str:
    drawn = panels(metrics)
    curves = [(drawn[name].sentence, data) for name, data in pictures.items()]
    return page(folder.name, [
        f"<p>{_text(options['variant'])} on {_text(options['world'])}, seed "
        f"{_text(options['seed'])}, {len(metrics) - 1} epochs</p>",
        "<div class=facts>" + "".join(f"<div><span>{_text(k)}</span><b>{_text(v)}</b></div>"
                                      for k, v in _facts(metrics, options)) + "</div>",
        "<h2>Warnings</h2>" + _warnings(metrics),
        _by_category(metrics),
        "<h2>Curves</h2>" + gallery(curves),
        _functions(folder),
        "<h2>Tasks and traces</h2>" + samples,
        _details("Options", table([[k, json.dumps(v)] for k, v in options.items()]))])


def page(title, parts) -> str:
    """A whole page from its parts, each of them HTML; the title is text."""
    return "\n".join([
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{_text(title)}</h1>", *parts]) + "\n</body></html>\n"


def gallery(curves) -> str:
    """Pictures side by side, with a sentence below each: (sentence, bytes of a PNG)."""
    return "<div class=grid>" + "".join(
        f'<figure><img alt="{_text(sentence)}" src="data:image/png;base64,'
        f'{base64.b64encode(data).decode()}"><figcaption>{_text(sentence)}</figcaption></figure>'
        for sentence, data in curves) + "</div>"


def _facts(metrics, options) -> list:
    """(name, value) of what matters most, at the head of the page."""
    first, last = metrics[0], metrics[-1]
    arrow = lambda key, form: f"{shown(first, key, form)} \u2192 {shown(last, key, form)}"
    facts = [("held-out success", arrow("validation", ".3f"))] if last["validation_by"] else []
    if generates(metrics):
        facts += [
            ("success on generated tasks", f"{shown(last, 'success_rate', '.2f')} (alpha "
             f"{last['alpha']:.2f})"),
            ("length of generated tasks", arrow("task_length", ".2f")),
            ("epochs within alpha \u00b1 k_min",
             f"{epochs_in_band(metrics, options)} of {len(metrics) - 1}")]
        if last["written"]:
            facts.append(("new tasks, last epoch",
                          f"{last['distinct_tasks']} of {last['written']} written"))
    return facts


def _by_category(metrics) -> str:
    """Held-out success of every category in the first, the middle and the last epoch."""
    three = _three(validated(metrics))
    rows = [[name, *[f"{m['validation_by'].get(name, 0):.2f}" for m in three]]
            for name in metrics[-1]["validation_by"]]
    head = ["", *[f"epoch {m['epoch']}" for m in three]]
    return "<h2>Held-out success by category</h2>" + table([head, *rows]) if rows else ""


def _functions(folder) -> str:
    """A table of the functions to practise, the least solved first; "" for a run without a list."""
    path = folder / "functions.json"
    practised = json.loads(path.read_text()) if path.is_file() else {}
    rows = sorted(practised.items(), key=lambda item: (not item[1][0], item[1][1] or 0, item[0]))
    rows = [[name, n, "never tried" if p is None else f"{p:.2f}"] for name, (n, p) in rows]
    head = ["function", "generated tasks that call it", "success when last tried"]
    return _details("Functions, the least solved first", table([head, *rows])) if rows else ""


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
    parts = [f"<p class=tag>{LEGEND}</p>"]
    key = re.sub("`([^`]*)`", r"<code>\1</code>", _text(key))
    parts += [f"<p><b>How to read a task.</b> {key}</p>"] if key else []
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
    return f"<div class=grid>{''.join(map(_card, records))}</div>"


def _card(r) -> str:
    """One task beside the one it varies: origin and success rate, text, the world's picture of it,
    expected answer, traces with their rewards; or a text that was refused, with the reason."""
    before = f"<pre class=seed>varies: {_text(r['seed_task'][:600])}</pre>" \
        if r.get("seed_task") else ""
    if "refused" in r:
        return (f"<div class=card><span class=tag>refused: {_text(r['reason'])}</span>{before}"
                f"<pre class=wrong>{_text(r['refused'][:900])}</pre></div>")
    traces = "".join(
        f"<pre class={'right' if e['reward'] >= 0.5 else 'wrong'}>"
        f"{_text(e['text'][:600]) or '(no text)'}"
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


def table(rows) -> str:
    """Rows of cells, each of them text."""
    return "<div class=wide><table>" + "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>"
        for row in rows) + "</table></div>"


def _details(title, inner) -> str:
    return f"<details><summary>{title}</summary>{inner}</details>"


def main(argv=None) -> int:
    """`python -m watch.report RUN_FOLDER`."""
    argv = sys.argv[1:] if argv is None else argv

    def command():
        if len(argv) != 1:
            raise UserError("usage: python -m watch.report RUN_FOLDER")
        print(write(argv[0]))
    return exit_code(command, "report", "nothing was changed")


if __name__ == "__main__":
    sys.exit(main())
