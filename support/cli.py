"""Every command line: one clear line for each mistake, and the exit code that goes with it.

What of the paper this is: nothing. How it is run: the main function of every program calls
`exit_code`; each parses its options with `Parser`.
"""
import argparse
import difflib
import sys

from support.files import UserError


class Stopped(Exception):
    """The run was asked to stop and has saved everything: (number of the signal, message)."""


def exit_code(command, program="genenv", go_on="--resume goes on from the last checkpoint") -> int:
    """Call `command()`; every mistake of the user's is one line. Returns a program's exit code:
    what the command returns if that is a number, else 0; 2 for a mistake, 128 + n after a signal n.

    program: named in front of that line; go_on: how to go on, said where the work was cut off.
    """
    try:
        result = command()
        return result if isinstance(result, int) else 0
    except UserError as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        number, message = stopped.args
        print(message)
        return 128 + number
    except ModuleNotFoundError as missing:
        print(f"{program}: the package {missing.name} is not installed: pip install -r "
              "requirements.txt", file=sys.stderr)
        return 2
    except (OSError, _safetensor_error()) as error:  # a full disk, a file that may not be written
        name, why = (getattr(error, key, None) for key in ("filename", "strerror"))
        print(f"{program}: {f'{name}: ' if name else ''}{' '.join(str(why or error).split())}; "
              f"{go_on}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:  # a run says by itself whether there is a checkpoint
        more = map(str, stopped.args) if program == "genenv" else [go_on]
        print("; ".join(["stopped at once", *more]), file=sys.stderr)
        return 130


def _safetensor_error():
    from safetensors import SafetensorError  # only when something went wrong
    return SafetensorError


def at_least(least: int):
    """An argparse type: a whole number in plain digits, `least` or more."""
    def number(text):
        if not text.removeprefix("-").isdecimal():
            raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
        return int(text)
    return number


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are UserErrors: one line each, like all others."""

    def error(self, message):
        unknown = message.partition("unrecognized arguments: ")[2].split()
        near = difflib.get_close_matches(unknown[0].partition("=")[0] if unknown else "",
                                         self._option_string_actions, 1)
        hint = f": did you mean {near[0]}?" if near else ""
        raise UserError(f"{message}{hint}; see python {self.prog.removeprefix('python ')} --help")
