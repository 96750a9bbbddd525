"""Several runs beside each other: their curves on one page, or as CSV.

What of the paper this is: nothing; it is how two runs are read against each other.

    python genenv.py compare runs/000-genenv runs/001-random --out both.html
    python genenv.py compare runs/000-genenv --csv > curves.csv

How it is run: by that command. It reads config.json and metrics.jsonl of each run, one that still
goes on included, and draws with watch/report.py.

Where it differs on purpose: a run is one seed; a difference between two curves is no result before
several seeds have it (python -m scripts.experiments).
"""
import csv
import json
import sys
from pathlib import Path

from support.cli import Parser
from support.files import UserError
from support import report

MOST = len(report.OTHERS)  # runs on a page: as many as there are colours
CURVES = {  # key of a record: (title, unit, what it is)
    "validation": ("Held-out success", "share", "Tasks that no model is trained on: the higher the "
                   "better."),
    "success_rate": ("Success on generated tasks", "share", "Each run's own tasks: away from 0 and "
                     "1 there is something to learn. No measure of how good an agent is."),
    "task_length": ("Length of generated tasks", "length", "In the unit of the world: steps of the "
                    "ladder, commands of the household, words of tool_calls."),
    "skill_entropy": ("Skills in generated tasks", "bits", "How evenly the skills are used, as "
                      "an entropy: a fall says that the simulator repeats itself."),
    "distinct_tasks": ("New tasks", "tasks", "Different tasks that were written and tried."),
    "env_kept": ("Tasks inside the band", "tasks", "New tasks with p_hat in alpha \u00b1 k_min: a "
                 "simulator that is trained learns from them."),
    "env_kl": ("KL of the simulator to its start", "nats per token", "How far the simulator is "
               "from the base model, before the epoch's update."),
    "zero_variance": ("Groups with equal rewards", "share", "Groups of attempts with equal rewards "
                      "teach the agent nothing: the fewer the better."),
}


def main(argv) -> int:
    """The command `genenv.py compare`; argv: what follows it. Raises UserError, returns 0."""
    p = Parser(prog="genenv.py compare", allow_abbrev=False,
               description="Curves of several runs on one page, or as CSV.")
    p.add_argument("runs", nargs="+", metavar="RUN", help="run folder, such as runs/001-genenv")
    p.add_argument("--out", default="compare.html", metavar="FILE",
                   help="page to write (%(default)s)")
    p.add_argument("--csv", action="store_true", help="print every curve as CSV; no page")
    args = p.parse_args(argv)
    if len(args.runs) > MOST and not args.csv:
        raise UserError(f"{len(args.runs)} runs are too many for one page: name at most {MOST}, or "
                        "take --csv")
    runs = {folder: report.read_run(folder) for folder in args.runs}
    try:
        return print_csv(runs) if args.csv else write_page(runs, Path(args.out))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"a record of {', '.join(runs)} has no or a wrong value ({error}): "
                        "metrics.jsonl or config.json was edited, or belongs to another version"
                        ) from None


def print_csv(runs: dict) -> int:
    """Every figure of every epoch, a column each; empty where it was not measured."""
    records = [m for metrics, _ in runs.values() for m in metrics]
    keys = dict.fromkeys(k for m in records for k, v in m.items() if isinstance(v, (int, float)))
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(["run", *keys])
    for name, (metrics, _) in runs.items():
        rows.writerows([name, *[report.value(m, key) for key in keys]] for m in metrics)
    return 0


def write_page(runs: dict, out: Path) -> int:
    """The page with the curves over each other and a table of the last values."""
    if not out.parent.is_dir() or out.is_dir():
        raise UserError(f"--out {out}: name a file in a folder that exists")
    curves = []
    for key, (title, unit, sentence) in CURVES.items():
        lines = [(name, colour, report.points(metrics, key))
                 for (name, (metrics, _)), colour in zip(runs.items(), report.OTHERS)]
        if lines := [line for line in lines if line[2]]:
            panel = report.Panel(title, unit, lines, sentence)
            curves.append((sentence, report.png(report.draw(panel, thinner=0.9))))
    page = report.page("Runs compared", [
        "<p>One run is one seed: a difference is a result only when several seeds have it.</p>",
        "<h2>Last values</h2>" + report.table(last_values(runs)),
        "<h2>Options that differ</h2>" + report.table(differing(runs)),
        "<h2>Curves</h2>" + report.gallery(curves)])
    out.write_text(page, encoding="utf-8")
    print(f"{out} shows {len(curves)} curves of {len(runs)} runs")
    return 0


def last_values(runs: dict) -> list:
    """Rows of a table: of every curve the last value of each run, and how far the run has come."""
    epochs = [metrics[-1]["epoch"] for metrics, _ in runs.values()]
    rows = [["", *runs], ["epochs", *epochs]]
    for key, (title, *_) in CURVES.items():
        ends = [report.points(metrics, key)[-1:] for metrics, _ in runs.values()]
        rows.append([title, *[f"{end[0][1]:.4g}" if end else "-" for end in ends]])
    if min(epochs) < max(epochs):  # last values of unlike runs: one figure at the same epoch
        until = [[v for t, v in report.points(metrics, "validation") if t <= min(epochs)][-1:]
                 for metrics, _ in runs.values()]
        rows.insert(3, [f"Held-out success by epoch {min(epochs)}",
                        *[f"{v[0]:.4g}" if v else "-" for v in until]])
    seconds = [sum(s for _, s in report.points(metrics, "seconds")) for metrics, _ in runs.values()]
    return rows + [["minutes of training", *[f"{s / 60:.1f}" for s in seconds]]]


def differing(runs: dict) -> list:
    """Rows of a table: the options in which the runs differ, their folders aside."""
    flat = [{**options, **options.get("world_options", {})} for _, options in runs.values()]
    names = dict.fromkeys(name for options in flat for name in options)
    rows = [[name, *[json.dumps(options.get(name)) for options in flat]] for name in names
            if name not in ("out", "resume", "threads", "verbose", "world_options")]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return [["", *runs], *rows] if rows else [["none"]]
