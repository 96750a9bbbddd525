"""The command line: a run, `python genenv.py [options]`, or a command, `python genenv.py NAME ...`.

    warm_start.py  a small model learns the form of both roles before the first epoch
    imitate.py     ... how it learns it
    ask.py         a trained agent answers a request
    export.py      D_train for veRL
    compare.py     the curves of several runs on one page

None of them loads torch before what was given on the command line has turned out to be right.
"""
import importlib
import sys
from contextlib import suppress

from support.cli import exit_code
from support.files import UserError, choose
from support import checkpoint
from support.options import parse_options, threads_of
from support import screen
from worlds import load_world

COMMANDS = {  # name: (module, what it is for)
    "warm-start": ("warm_start", "a small model imitates tasks in both roles before its first run"),
    "ask": ("ask", "the trained agent of a run answers a request of yours"),
    "export": ("export", "the tasks of a run for veRL"),
    "compare": ("compare", "curves of several runs on one page; of one run, its report"),
}
HELP = "commands (each has --help):\n" + "\n".join(
    f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items())


def dispatch(argv, train) -> int:
    """Do what the command line says; returns the exit code: 0, 2 for a user's mistake, 128 + n
    after a signal n. train: what a run calls with its Options."""
    with suppress(AttributeError):  # a model may write any sign, and a terminal not know it
        sys.stdout.reconfigure(errors="backslashreplace")
    if not argv or argv[0][:1] == "-":
        return exit_code(lambda: run(argv, train))
    goes_on = "the same command goes on where it stopped"
    return exit_code(lambda: command(argv), go_on=goes_on if argv[0] == "warm-start" else
                     "mend that, then give the same command again")


def command(argv):
    """One of COMMANDS. Raises UserError for a name that is none."""
    if argv[0] not in COMMANDS:
        raise UserError(f"unknown command {argv[0]!r}: {choose(argv[0], COMMANDS)}; options begin "
                        "with --")
    return importlib.import_module(f"scripts.{COMMANDS[argv[0]][0]}").main(argv[1:])


def run(argv, train):
    """A run: parsed, checked as far as can be without torch, announced, then trained."""
    o = parse_options(argv, HELP)
    if o.resume and checkpoint.is_complete(o):
        return
    load_world(o.world).prepare(o)
    print(screen.banner(o, checkpoint.choose_folder(o), threads_of(o)))
    print("loading torch and the model ...", flush=True)
    train(o)
