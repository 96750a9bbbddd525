"""How `python genenv.py ...` starts: what can be wrong with a command line is found before a model
is loaded.

Usage: genenv.py calls `start` and trains with what it returns. A teacher's tasks are read later, by
support/run.py.
"""
import importlib
import time
from dataclasses import replace

from errors import UserError, choose
from model.loading import check_model
from support.options import COMMANDS, parse_options
from worlds.probe import open_world


def start(argv) -> tuple:
    """Return (Options, World) of the run that a command line begins or resumes.

    A command, such as warm-start, is done at once, and then the program ends: SystemExit. Raises
    UserError for options, a world, its task files or a name of a model that cannot be used.
    """
    if argv and not argv[0].startswith("-"):
        raise SystemExit(run_command(*argv))
    o = parse_options(argv)
    # a chat template may name the day: it stays that on which the run began
    o = replace(o, date=o.date or time.strftime("%Y-%m-%d"))
    world = open_world(o)
    for model in (o.model, o.env_model):
        if model:
            check_model(model)
    return o, world


def run_command(name, *argv):
    """Do what one of COMMANDS says. Raises UserError."""
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}: {choose(name, COMMANDS)}; "
                        "options begin with --")
    return importlib.import_module(f"scripts.{name.replace('-', '_')}").main(list(argv))
