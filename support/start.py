"""Start `python genenv.py ...`: find mistakes in a command line before a model is loaded.

Usage: genenv.py calls `start` and trains with what it returns. support/run.py reads a teacher's
tasks later.
"""
import importlib
import time
from dataclasses import replace

from errors import UserError, choose
from support.options import COMMANDS, parse_options
from worlds.probe import open_world


def start(argv) -> tuple:
    """Return (Options, World) of the run that a command line begins or resumes.

    If argv begins with a command such as warm-start, run that instead and raise SystemExit. Raise
    UserError for options, a world or task files that cannot be used.
    """
    if argv and not argv[0].startswith("-"):
        raise SystemExit(run_command(*argv))
    o = parse_options(argv)
    # a chat template may insert the date, so a resumed run keeps the day on which it began
    o = replace(o, date=o.date or time.strftime("%Y-%m-%d"))
    return o, open_world(o)


def run_command(name, *argv):
    """Run one of COMMANDS and return its exit code. Raise UserError for any other name."""
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}: {choose(name, COMMANDS)}; "
                        "options begin with --")
    return importlib.import_module(f"scripts.{name.replace('-', '_')}").main(list(argv))
