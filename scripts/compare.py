"""Held-out success and curves of several runs on one page, or the page of a single run drawn anew.

    python genenv.py compare runs/000-genenv runs/001-random
    python genenv.py compare runs/000-genenv            # its report.html, also while it goes on

Usage: by that command; it reads config.json and metrics.jsonl of each run. Runs that differ in
nothing but their seeds are of one *setting*: they are drawn as one line, and their mean is compared
as well.

Deviations: a run is one seed; a difference between two curves is not a result before several seeds
show it (python -m scripts.experiments).
"""
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from errors import printable, write_whole
from scripts.tables import markdown
from support import figures, report
from support.metrics import interval
from support.options import COMMANDS, MAY_CHANGE, Options, Parser, flag

CAUTION = ("Errors of single runs are over held-out tasks; seeds often differ by more: read means "
           "of several. Theirs are 95 % intervals over the seeds that both settings have.")


class RunRecord(NamedTuple):
    """A run that is compared."""
    folder: str
    metrics: list  # its records, one for each epoch from 0 on
    o: Options


def main(argv):
    """The command `genenv.py compare`; argv: what follows it. Raises UserError."""
    p = Parser(prog="python genenv.py compare", description=COMMANDS["compare"])
    p.add_argument("runs", nargs="+", metavar="RUN", help="run folder, such as runs/001-genenv")
    p.add_argument("--out", metavar="FILE", help="page to write, else compare.html in the last RUN")
    args = p.parse_args(argv)
    folders = list(dict.fromkeys(args.runs))
    if len(folders) == 1 and not args.out:
        print(report.write(folders[0]))
    else:
        path = Path(args.out or Path(folders[-1]) / "compare.html")
        print(printable(compare(folders, path)))


def compare(folders, path) -> str:
    """Write the page; returns what to print. Raises UserError as report.read_run does."""
    runs = [RunRecord(folder, *report.read_run(folder)) for folder in folders]
    options = differing_options(runs)
    names = setting_names(runs, options)
    # the last epoch in which all were validated
    validated = [{m["validated"] for m in run.metrics} for run in runs]
    epoch = max(set.intersection(*validated))
    results = result_rows(runs, epoch)
    # means only of success on the same tasks
    if len({run.metrics[epoch]["validation_set"] for run in runs}) == 1:
        results += mean_rows(runs, names, epoch)
    write_whole(path, render(runs, names, results, options))
    return "\n".join([*markdown(results), CAUTION, f"wrote {path}"])


# ---------------------------------------------------------------------------------------------
# what differs


def differing_options(runs) -> list:
    """[options of a run that are no defaults, with the codes of its functions of curriculum.py, for
    each run]: texts, without those that all runs have."""
    options = []
    for run in runs:
        pairs = [*report.changed_options(run.o), *run.o.function_hashes.items()]
        options.append({f"{name} {value}" for name, value in pairs})
    common = set.intersection(*options)
    return [sorted(own - common) for own in options]


def setting_names(runs, options) -> list:
    """A name for each run, alike for runs of one setting: what differs in words; its folder, if no
    other run is of that setting."""
    not_settings = ["--seed", *map(flag, MAY_CHANGE)]
    settings = []
    for texts in options:
        parts = [text for text in texts if text.split()[0] not in not_settings]
        settings.append(", ".join(parts) or "defaults")
    counts, names = Counter(settings), []
    for run, setting in zip(runs, settings):
        names.append(setting if counts[setting] > 1 else run.folder)
    return names


# ---------------------------------------------------------------------------------------------
# results


def result_rows(runs, epoch) -> list:
    """Held-out success of each run, minus that of the first run with the same seed."""
    first = {}  # {seed: the record of the first run with it}
    rows = [["run", f"held-out, epoch {epoch}", "minus first run, same seed"]]
    for run in runs:
        m = run.metrics[epoch]
        first.setdefault(run.o.seed, m)
        rows.append([run.folder, f"{m['validation']:.3f}", report.gain_text(m, first[run.o.seed])])
    return rows


def mean_rows(runs, names, epoch) -> list:
    """Means over the seeds of each setting with several, and of their differences from those of the
    first such setting, paired by seed."""
    settings = {}  # {name: {seed: held-out success}}
    for run, name in zip(runs, names):
        settings.setdefault(name, {})[run.o.seed] = run.metrics[epoch]["validation"]
    rows, first = [], {}
    for name, rates in settings.items():
        if len(rates) > 1:
            first = first or rates
            gains = [rates[seed] - first[seed] for seed in rates.keys() & first.keys()]
            rows.append([f"mean of {name}", f"{fmean(rates.values()):.3f}", interval(gains)])
    return rows


def render(runs, names, results, options) -> bytes:
    """The page."""
    by_name = {}
    for run, name in zip(runs, names):
        by_name.setdefault(name, []).append(run.metrics)
    option_rows = [[run.folder, ", ".join(texts)] for run, texts in zip(runs, options)]
    return report.page("Runs compared", [
        {"heading": "Held-out success", "table": results},
        {"text": CAUTION},
        {"heading": "Options that differ", "table": option_rows},
        {"text": f"{report.READING} Bars: standard errors over seeds."},
        *figures.of_runs(by_name),
    ])
