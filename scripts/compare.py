"""Compare several runs on one page, or write the report of a single run.

Usage:

    python genenv.py compare runs/000-genenv runs/001-random
    python genenv.py compare runs/000-genenv    # writes its report.html, even during the run

The command reads config.json and metrics.jsonl of each run. Runs that differ only in their seeds
belong to one *setting*: they are drawn in one colour, and settings are also compared by their means
over seeds.

Deviations: each run has a single seed. A difference between two curves is a result only if several
seeds show it (python -m scripts.experiments).
"""
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from errors import check_overwrite, printable, write_whole
from support import figures, report, screen
from support.metrics import interval
from support.options import COMMANDS, MAY_CHANGE, Options, Parser, flag

TITLE = "Runs compared"
NO_SETTING = "--seed", *map(flag, MAY_CHANGE)  # options that may differ within a setting
CAUTION = ("A difference between two runs says little, because seeds often differ by more: compare "
           "means over several seeds. Their difference has a 95 % interval over the seeds that "
           "both settings share. pass@k: the share of tasks solved in at least one of k attempts "
           "(--val-samples).")
FIGURES = ("Runs that differ only in their seeds have the same colour. Where the report of a run "
           "draws several curves in one figure, only the first is shown here, such as the "
           "simulator's KL.")


class RunRecord(NamedTuple):
    """Hold one of the compared runs."""
    folder: str
    metrics: list  # its records, one per epoch, from epoch 0
    o: Options


def main(argv):
    """Run the command `genenv.py compare`. argv: the words after it.

    Raise UserError for a folder that holds no run, and for an --out that must not be overwritten.
    """
    p = Parser(prog="python genenv.py compare", description=COMMANDS["compare"])
    p.add_argument("runs", nargs="+", metavar="RUN", help="run folder, such as runs/001-genenv")
    p.add_argument("--out", metavar="FILE", help="page to write (compare.html in the last RUN)")
    p.add_argument("--force", action="store_true", help="overwrite any file")
    args = p.parse_args(argv)
    folders = list(dict.fromkeys(args.runs))
    if len(folders) == 1 and not args.out:
        print(report.write(folders[0]))
        return
    path = args.out or Path(folders[-1], "compare.html")
    check_overwrite(path, report.page(TITLE, []).partition(b"</title>")[0], args.force)
    print(printable(compare(folders, path)))


def compare(folders, path) -> str:
    """Write the page, and return what to print. Raise UserError if read_run does."""
    runs = [RunRecord(folder, *report.read_run(folder)) for folder in folders]
    settings = settings_of(runs)
    # Compare the runs at the last epoch in which all of them were validated.
    validated = [{m["validated"] for m in run.metrics} for run in runs]
    epoch = max(set.intersection(*validated))
    rows = rows_of_runs(runs, settings, epoch)
    # Means are comparable only if all runs had the same held-out tasks.
    if len({run.metrics[epoch]["validation_set"] for run in runs}) == 1:
        rows += rows_of_means(runs, settings, epoch)

    lines = {}  # {setting: the records of each of its runs}
    for run, setting in zip(runs, settings):
        lines.setdefault(setting, []).append(run.metrics)
    heading = f"Held-out success after epoch {epoch}"
    sections = [{"heading": heading, "table": rows, "text": CAUTION},
                {"heading": "Curves", "figures": figures.of_runs(lines),
                 "text": f"{report.READING} {FIGURES}"}]
    write_whole(path, report.page(TITLE, sections))
    table = map(terminal_line, rows)
    return "\n".join([heading, *table, screen.wrapped("", CAUTION), f"wrote {path}"])


def terminal_line(row) -> str:
    """Return a row of the table as lines for a terminal of 80 columns."""
    run, setting, success, gain, solved = row
    return screen.wrapped(f"{success:<9}{gain:<27}{solved:<8}", f"{run}: {setting}")


def settings_of(runs) -> list:
    """Return the setting of each run as a text: what distinguishes it from the other runs.

    The text lists options that are not the same in all runs, without those of NO_SETTING, and
    functions and files that were edited: their code is not that of the first run that used them.
    """
    settings = []
    versions = {}  # {function or file: {its hash: its version, 1, 2, ... in the order of the runs}}
    for run in runs:
        pairs = report.changed_options(run.o)
        texts = {f"{name} {value}" for name, value in pairs if name not in NO_SETTING}
        edits = []
        for name, digest in run.o.code.items():
            numbers = versions.setdefault(name, {})
            number = numbers.setdefault(digest, len(numbers) + 1)
            if number > 1:
                edits.append(f"{name} v{number}")
        if edits:
            texts.add(f"edited: {', '.join(edits)}")
        settings.append(texts)
    common = set.intersection(*settings)
    return [", ".join(sorted(texts - common)) or "defaults" for texts in settings]


def rows_of_runs(runs, settings, epoch) -> list:
    """Return a row for each run: its held-out success, the gain over the first run with the same
    seed, and pass@k, the share of held-out tasks solved in at least one of k attempts."""
    first = {}  # {seed: the record of the first run with this seed}
    rows = [["run", "what differs", "success", "minus first, same seed", "pass@k"]]
    for run, setting in zip(runs, settings):
        m = run.metrics[epoch]
        reference = first.setdefault(run.o.seed, m)
        solved = [rate > 0 for rates in m["validation_rates"].values() for rate in rates]
        rows.append([run.folder, setting, f"{m['validation']:.3f}", gain_text(m, reference),
                     f"{fmean(solved):.3f}"])
    return rows


def gain_text(m: dict, reference: dict) -> str:
    """Return as text how much higher held-out success is in the record m than in the reference."""
    if m is reference:
        return "-"
    if m["validation_set"] != reference["validation_set"]:
        return "other held-out tasks"
    return f"{m['validation'] - reference['validation']:+.3f}"


def rows_of_means(runs, settings, epoch) -> list:
    """Return a row for each setting with several seeds: its mean success, and its difference from
    the first such setting, paired by seed."""
    by_setting = {}  # {setting: {seed: held-out success}}
    for run, setting in zip(runs, settings):
        by_setting.setdefault(setting, {})[run.o.seed] = run.metrics[epoch]["validation"]
    rows, first = [], {}
    for setting, rates in by_setting.items():
        if len(rates) > 1:
            first = first or rates
            gains = [rates[seed] - first[seed] for seed in rates.keys() & first.keys()]
            rows.append(["mean", setting, f"{fmean(rates.values()):.3f}", interval(gains), ""])
    return rows
