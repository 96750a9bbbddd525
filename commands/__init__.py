"""The command line: a run, `python genenv.py [options]`, or a command, `python genenv.py NAME ...`.

    warm_start.py  a small model learns the form of both roles before the first epoch
    imitate.py     ... how it learns it
    ask.py         a trained agent answers a request
    export.py      D_train for veRL

None of them loads torch before what was given on the command line has turned out to be right.
"""
import importlib

from common.cli import exit_code
from run.options import parse_options

COMMANDS = {  # name: (module, what it is for)
    "warm-start": ("warm_start", "a small model imitates tasks in both roles, before its first run"),
    "ask": ("ask", "the trained agent answers a request of your own"),
    "export": ("export", "write the tasks of a run for veRL"),
}


def dispatch(argv, train) -> int:
    """Do what the command line says; returns the exit code: 0, 2 for a user's mistake, 128 + n after
    a signal n. train: what a run calls with its Options."""
    def work():
        if argv and argv[0] in COMMANDS:
            module = importlib.import_module(f"commands.{COMMANDS[argv[0]][0]}")
            return module.main(argv[1:])
        return train(parse_options(argv))
    return exit_code(work)
