"""Held-out success and curves of several runs on one page, or the page of a single run drawn anew.

    python genenv.py compare runs/000-genenv runs/001-random
    python genenv.py compare runs/000-genenv            # its report.html, also while it goes on

Usage: by that command; it reads config.json and metrics.jsonl of each run. Runs that differ in
nothing but their seeds are of one *setting*: they are drawn as one line, and their mean is compared
as well.

Deviations: a run is one seed; a difference between two curves is not a result before several seeds
show it (python -m scripts.experiments).
"""
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from model.files import printable, write_whole
from support import figures, report
from support.metrics import half_width
from support.options import COMMANDS, MAY_CHANGE, Options, Parser, flag, flat

CAUTION = ("Errors of single runs are over held-out tasks; seeds often differ by more: read means "
           "of several.")


class RunRecord(NamedTuple):
    """A run that is compared."""
    folder: str
    metrics: list  # its records, one for each epoch from 0 on
    o: Options


def main(argv):
    """The command `genenv.py compare`; argv: what follows it. Raises UserError."""
    p = Parser(prog="genenv.py compare", description=COMMANDS["compare"])
    p.add_argument("runs", nargs="+", metavar="RUN", help="run folder, such as runs/001-genenv")
    p.add_argument("--out", metavar="FILE", help="page to write, else compare.html in the last RUN")
    args = p.parse_args(argv)
    folders = list(dict.fromkeys(args.runs))
    if len(folders) == 1 and not args.out:
        print(report.write(folders[0]))
    else:
        print(printable(compare(folders, args.out)))


def compare(folders, out=None) -> str:
    """Write the page; returns what to print. out: where, by default compare.html in the last of the
    folders. Raises UserError as report.read_run does."""
    runs = [RunRecord(folder, *report.read_run(folder)) for folder in folders]
    options = option_rows(runs)
    names = setting_names(runs, options)
    epoch = common_epoch(runs)
    results = result_rows(runs, epoch)
    if same_held_out(runs, epoch):
        results += mean_rows(runs, names, epoch)
    path = Path(out or Path(folders[-1]) / "compare.html")
    write_whole(path, render(runs, names, epoch, results, options))
    return "\n".join([*aligned(results), CAUTION, f"wrote {path}"])


def common_epoch(runs) -> int:
    """The last epoch in which all runs were validated."""
    validated = [{m["validated"] for m in run.metrics} for run in runs]
    return max(set.intersection(*validated))


def same_held_out(runs, epoch) -> bool:
    """Whether all runs were validated on the same tasks."""
    return len({run.metrics[epoch]["validation_set"] for run in runs}) == 1


# ---------------------------------------------------------------------------------------------
# what differs


def option_rows(runs) -> list:
    """[[option, its value in each run]] of the options that differ, then of the functions of
    curriculum.py that have the same name and another code."""
    rows = []
    values = [flat(run.o) for run in runs]
    for name in dict.fromkeys(name for each in values for name in each):
        row = [str(each.get(name, "-")) for each in values]
        if name not in report.UNIMPORTANT and len(set(row)) > 1:
            rows.append([flag(name), *row])
    functions = [run.o.function_hashes for run in runs]
    for name in dict.fromkeys(name for each in functions for name in each):
        codes = [each.get(name) for each in functions]
        versions = list(dict.fromkeys(code for code in codes if code))
        if len(versions) > 1:
            row = [f"version {versions.index(code) + 1}" if code else "-" for code in codes]
            rows.append([name, *row])
    return rows


def setting_names(runs, options) -> list:
    """A name for each run, alike for runs of one setting: what differs in words; its folder, if no
    other run is of that setting."""
    not_settings = {"--seed", *map(flag, MAY_CHANGE)}
    settings = []
    for i in range(len(runs)):
        parts = [f"{name} {row[i]}" for name, *row in options if name not in not_settings]
        settings.append(", ".join(parts) or "all")
    names = []
    for run, setting in zip(runs, settings):
        seeds = {other.o.seed for other, its in zip(runs, settings) if its == setting}
        names.append(setting if len(seeds) > 1 else run.folder)
    return names


# ---------------------------------------------------------------------------------------------
# results


def result_rows(runs, epoch) -> list:
    """Held-out success of each run, minus that of the first run with the same seed."""
    first = {}  # {seed: the record of the first run with it}
    for run in runs:
        first.setdefault(run.o.seed, run.metrics[epoch])
    rows = [["run", f"held-out, epoch {epoch}", "minus first run, same seed"]]
    for run in runs:
        m = run.metrics[epoch]
        rows.append([run.folder, f"{m['validation']:.3f}", report.gain_text(m, first[run.o.seed])])
    return rows


def mean_rows(runs, names, epoch) -> list:
    """Means over the seeds of each setting with several, and of their differences from those of the
    first such setting."""
    settings = {}  # {name: {seed: held-out success}}
    for run, name in zip(runs, names):
        settings.setdefault(name, {})[run.o.seed] = run.metrics[epoch]["validation"]
    settings = {name: rates for name, rates in settings.items() if len(rates) > 1}
    rows = []
    for name, rates in settings.items():
        first = next(iter(settings.values()))
        difference = "-" if rates is first else difference_text(rates, first)
        rows.append([f"mean of {name}", f"{fmean(rates.values()):.3f}", difference])
    return rows


def difference_text(rates: dict, first: dict) -> str:
    """Mean of the differences of two settings, paired by seed, with its 95 % interval. rates,
    first: {seed: held-out success}."""
    seeds = rates.keys() & first.keys()
    if len(seeds) < 2:
        return "no two seeds in common"
    differences = [rates[seed] - first[seed] for seed in seeds]
    center, half = fmean(differences), half_width(differences)
    low, high = center - half, center + half
    return f"{center:+.3f} ({low:+.3f} to {high:+.3f}, 95 %, {len(seeds)} shared seeds)"


# ---------------------------------------------------------------------------------------------
# page and print


def render(runs, names, epoch, results, options) -> bytes:
    """The page."""
    by_name = {}
    for run, name in zip(runs, names):
        by_name.setdefault(name, []).append(run.metrics)
    option_table = []
    if options:
        option_table = list(zip(["", *(run.folder for run in runs)], *options))
    reading = report.READING
    if len(by_name) < len(runs):
        reading += " Bars: standard errors."
    return report.page("Runs compared", [
        {"heading": "Held-out success", "table": results},
        {"text": CAUTION},
        {"heading": "Options that differ", "table": option_table or [["none"]]},
        {"heading": f"From epoch 0 to {epoch}", "table": fact_rows(runs, epoch)},
        {"text": reading},
        *figures.of_several(by_name),
    ])


def fact_rows(runs, epoch) -> list:
    """What matters most in each run up to an epoch: a row for each run."""
    by_run = [report.facts(run.metrics[:epoch + 1]) for run in runs]
    rows = [["", *by_run[0]]]
    for run, its_facts in zip(runs, by_run):
        rows.append([run.folder, *its_facts.values()])
    return rows


def aligned(rows) -> list[str]:
    """Rows of texts as lines, the columns under each other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
