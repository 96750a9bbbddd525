"""Write one self-contained page per run.

Paper: its Figures 4-8 (figures.py), and tasks with attempts to read.

Usage: support/run.py writes report.html at the end of a run. `python genenv.py compare RUN` writes
it for a run that is still going or was stopped. scripts/compare.py builds its page from the same
parts: a page is a list of sections, which report.html.j2 turns into HTML.

Deviations: figures and style are embedded, so that the page is a single file. Models' texts are
escaped, and the page forbids scripts and external sources.
"""
from pathlib import Path

import jinja2

from data_pool import read_jsonl
from errors import UserError, write_whole
from support import figures
from support.options import Options, flag, flat, saved_options
from worlds import FEW, load_world

# options that do not change a result
UNIMPORTANT = "out", "threads", "date", "code"
READING = "Read held-out success first, then why: mixed groups, tasks in the band, their variety."
ANCESTRY = ("Each task varies the one above it. Before it are the epoch that wrote it and the "
            "p_hat of its first attempts.")
EXPLANATION = ("Samples: a task, in grey the one it varies, a right answer, the best and worst "
               "attempt.")
FACTS = {"held-out success": "validation", "held-out, greedy answers": "validation_greedy",
         "success on generated tasks": "success_rate", "mixed groups": "mixed_share",
         "mixed, of those possible": "mixed_of_possible", "alpha": "alpha"}


def write(folder) -> Path:
    """Write report.html of a run folder and return its path. Raise UserError as read_run does."""
    folder = Path(folder)
    metrics, o = read_run(folder)
    about = f"{o.variant} on {o.world}, seed {o.seed}, epochs 0 to {len(metrics) - 1}"
    pool = read_jsonl(folder / "train.jsonl")
    samples = read_jsonl(folder / "samples.jsonl")
    sections = [
        {"text": about, "table": facts(metrics).items()},
        {"heading": "Warnings, explained in TROUBLESHOOTING.md", "table": warning_rows(metrics)},
        {"heading": "Curves", "text": READING, "figures": figures.of_one_run(metrics, o.k_min)},
        {"heading": "Held-out tasks", "table": held_out_rows(metrics)},
        {"heading": "Options other than this world's defaults", "table": changed_options(o)},
        {"heading": "How a task came about", "text": ANCESTRY, "table": ancestry(pool)},
        {"heading": "Tasks and answers", "text": EXPLANATION,
         "samples": samples_by_epoch(metrics, samples)},
    ]
    path = folder / "report.html"
    # written atomically: it is a run's last file, and shows that the run is complete
    write_whole(path, page(folder.name, sections))
    return path


def page(title: str, sections: list) -> bytes:
    """Return a whole page.

    sections: dicts with some of heading and text (texts), table (rows of cells), figures (see
    figures.py) and samples ({epoch: records of samples.jsonl}).
    """
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(loader=folder, autoescape=True)
    text = templates.get_template("report.html.j2").render(title=title, sections=sections)
    # a model may write half of a surrogate pair, which cannot be encoded
    return text.encode("utf-8", "replace")


def read_run(folder):
    """Return (records of metrics.jsonl, Options) of a run folder. Raise UserError naming what is
    missing."""
    o = saved_options(folder)
    metrics = read_jsonl(Path(folder) / "metrics.jsonl")
    if not metrics:
        raise UserError(f"{folder}/metrics.jsonl is empty: no epoch has ended yet")
    return metrics, o


# ---------------------------------------------------------------------------------------------
# the main figures, as text


def facts(metrics) -> dict:
    """Return {name: value as text} of a run's main figures, at its start and now."""
    first, last = metrics[0], metrics[-1]
    texts = {}
    for name, key in FACTS.items():
        texts[name] = f"{as_text(first[key], '.3f')} -> {as_text(last[key], '.3f')}"
    if sum(map(len, last["validation_rates"].values())) < FEW:
        texts["held-out success"] += " (too few held-out tasks to measure with)"
    texts["training, CPU time"] = duration(sum(m["cpu_seconds"] for m in metrics))
    warnings = [f"{name} in {when}" for name, when, _ in warning_rows(metrics)]
    texts["warnings"] = "; ".join(warnings) or "none"
    return texts


def as_text(value, form: str) -> str:
    """Return a metric as text, a dash if it was not measured."""
    return "-" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """Return a time as text, in the unit that a person would choose."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def warning_rows(metrics) -> list:
    """Return a row (name, when, last text) for each kind of warning, however often it occurred."""
    by_name = {}
    for m in metrics:
        for warning in m["warnings"]:
            by_name.setdefault(warning["name"], {})[m["epoch"]] = warning["text"]
    rows = []
    for name, texts in by_name.items():
        last = max(texts)
        rows.append((name, f"{len(texts)} of {len(metrics)} epochs, last {last}", texts[last]))
    return rows


# ---------------------------------------------------------------------------------------------
# sections of the page


def held_out_rows(metrics) -> list:
    """Return rows of success by category, at the start and now, in the world's order."""
    first, last = metrics[0], metrics[-1]
    rows = [[last["category_name"], "tasks", "success"]]
    for name, rates in last["validation_rates"].items():
        before, now = first["validation_by"][name], last["validation_by"][name]
        rows.append([name or "all", len(rates), f"{before:.2f} -> {now:.2f}"])
    return rows


def changed_options(o) -> list:
    """Return a row for each option that differs from its default in this world."""
    world, options = load_world(o.world), flat(o)
    usual = vars(Options()) | world.defaults(options)
    for name, (default, _, _) in world.OPTIONS.items():
        usual[name] = default
    return [[flag(name), value] for name, value in options.items()
            if name not in UNIMPORTANT and value != usual.get(name)]


def ancestry(records) -> list:
    """Return rows for a task of the newest epoch, below those of its seed task, of the seed task of
    that, and so on, back to a base task: the longest such chain, [] if there is none.

    records: those of train.jsonl, in which a task comes after its seed task.
    """
    chains = {}  # {id of a task: rows (epoch, p_hat, text) of its chain}
    for r in records:
        task = r["task"]
        seed_rows = chains.get(task["seed_task"], [])
        # skip descendants of a base task that was not yet in the file
        if seed_rows or task["origin"] == "base":
            row = [task["epoch"], f"p_hat {as_text(r['p_hat'], '.3f')}", task["text"]]
            chains.setdefault(task["id"], [*seed_rows, row])
    chain = max(chains.values(), key=lambda rows: (rows[-1][0], len(rows)), default=[])
    return chain if len(chain) > 1 else []


def samples_by_epoch(metrics, samples) -> dict:
    """Return {epoch: its samples} of the first and last epoch."""
    epochs = sorted({0, metrics[-1]["epoch"]})
    return {epoch: [r for r in samples if r["epoch"] == epoch] for epoch in epochs}
