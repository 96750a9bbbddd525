"""Held-out success and curves of several runs on one page, or the page of a single run drawn anew.

    python genenv.py compare runs/000-genenv runs/001-random
    python genenv.py compare runs/000-genenv            # its report.html, also while it goes on

Usage: by that command; it reads config.json and metrics.jsonl of each run.

Deviations: a run is one seed; a difference between two curves is not a result before several seeds
show it (python -m scripts.experiments).
"""
from scripts.experiments import interval
from support import report
from support.options import COMMANDS, Parser


def main(argv):
    """The command `genenv.py compare`; argv: what follows it. Raises UserError."""
    p = Parser(prog="genenv.py compare", description=COMMANDS["compare"])
    p.add_argument("runs", nargs="+", metavar="RUN", help="run folder, such as runs/001-genenv")
    p.add_argument("--out", metavar="FILE", help="page to write, else compare.html in the last RUN")
    args = p.parse_args(argv)
    runs = list(dict.fromkeys(args.runs))
    print(report.compare(runs, args.out, interval) if runs[1:] or args.out else report.write(runs[0]))
