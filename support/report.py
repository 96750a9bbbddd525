"""Write one self-contained page per run.

Paper: its Figures 4-8 (figures.py). The page adds tasks and attempts to read.

Usage: `write` makes report.html. support/run.py calls it at the end of a run, and `python genenv.py
compare RUN` calls it for a run that is still going or was stopped. scripts/compare.py builds its
own page from the same parts: a page is a list of sections, which report.html.j2 turns into HTML.

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

# options that `changed_options` leaves out
UNIMPORTANT = "out", "threads", "date", "code"
READING = ("Read held-out success first. Mixed groups, tasks in the band and their variety help to "
           "explain it.")
ANCESTRY = ("Each task is a variation of the one above it. The first two columns give the epoch in "
            "which it was written, and p_hat at its first attempts.")
EXPLANATION = ("Each sample shows a seed task (grey), the task that varies it, a right answer, and "
               "the best and the worst attempt. A refused text is shown with the reason.")
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
    # write it atomically, because a reader may open it during the run
    write_whole(path, page(folder.name, sections))
    return path


def page(title: str, sections: list) -> bytes:
    """Return a page as bytes of HTML.

    sections: dicts with any of these keys: heading, text, table (rows of cells), figures (see
    figures.py) and samples ({epoch: records of samples.jsonl}).
    """
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(loader=folder, autoescape=True)
    text = templates.get_template("report.html.j2").render(title=title, sections=sections)
    # a model may write half of a surrogate pair, which cannot be encoded
    return text.encode("utf-8", "replace")


def read_run(folder):
    """Return (records of metrics.jsonl, Options) of a run folder.

    Raise UserError if it is not a run folder, or if no epoch has ended yet.
    """
    o = saved_options(folder)
    metrics = read_jsonl(Path(folder) / "metrics.jsonl")
    if not metrics:
        raise UserError(f"{folder}/metrics.jsonl is empty: no epoch has ended yet")
    return metrics, o


# ---------------------------------------------------------------------------------------------
# the main figures, as text


def facts(metrics) -> dict:
    """Return {name: text} of a run's main figures, most of them in epoch 0 and in the last one."""
    first, last = metrics[0], metrics[-1]
    texts = {}
    for name, key in FACTS.items():
        texts[name] = f"{as_text(first[key], '.3f')} -> {as_text(last[key], '.3f')}"
    if sum(map(len, last["validation_rates"].values())) < FEW:
        texts["held-out success"] += " (too few held-out tasks for a reliable figure)"
    texts["training, CPU time"] = duration(sum(m["cpu_seconds"] for m in metrics))
    warnings = [f"{name} in {when}" for name, when, _ in warning_rows(metrics)]
    texts["warnings"] = "; ".join(warnings) or "none"
    return texts


def as_text(value, form: str) -> str:
    """Return a metric as text, or a dash if it was not measured."""
    return "-" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """Return a time as text, in the unit that a person would choose."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def warning_rows(metrics) -> list:
    """Return one row for each kind of warning that occurred: (name, when, latest text)."""
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
    """Return rows of held-out success by category, in epoch 0 and in the last one.

    Categories are in the order in which the world's held-out tasks have them.
    """
    first, last = metrics[0], metrics[-1]
    rows = [[last["category_name"], "tasks", "success"]]
    for name, rates in last["validation_rates"].items():
        before, now = first["validation_by"][name], last["validation_by"][name]
        rows.append([name or "all", len(rates), f"{before:.2f} -> {now:.2f}"])
    return rows


def changed_options(o) -> list:
    """Return a row [option, value] for each option that differs from its default in this world."""
    world, options = load_world(o.world), flat(o)
    usual = vars(Options()) | world.defaults(options)
    for name, (default, _, _) in world.OPTIONS.items():
        usual[name] = default
    return [[flag(name), value] for name, value in options.items()
            if name not in UNIMPORTANT and value != usual.get(name)]


def ancestry(records) -> list:
    """Return the chain of variations that led from a base task to one of the newest tasks.

    A row (epoch, p_hat, text) describes a task, whose seed task is in the row above. Of the chains
    that end in the newest epoch, the longest is returned; [] if no task varies another one.
    records: those of train.jsonl, in which a task comes after its seed task.
    """
    chains = {}  # {id of a task: the rows of the chain that ends with it}
    for r in records:
        task = r["task"]
        seed_rows = chains.get(task["seed_task"], [])
        # skip a task if no chain from a base task leads to it: not every base task is in the file
        if seed_rows or task["origin"] == "base":
            row = [task["epoch"], f"p_hat {as_text(r['p_hat'], '.3f')}", task["text"]]
            chains.setdefault(task["id"], [*seed_rows, row])
    chain = max(chains.values(), key=lambda rows: (rows[-1][0], len(rows)), default=[])
    return chain if len(chain) > 1 else []


def samples_by_epoch(metrics, samples) -> dict:
    """Return {epoch: its records of samples.jsonl} for the first and the last epoch."""
    epochs = sorted({0, metrics[-1]["epoch"]})
    return {epoch: [r for r in samples if r["epoch"] == epoch] for epoch in epochs}
