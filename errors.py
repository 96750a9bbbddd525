"""User-facing errors in one line, guards around user code, and atomic file writes.

Usage: every program of the project runs under `plain_errors`. What a user can fix is a UserError:
one line that says what is wrong and what to do, exit code 2.
"""
import difflib
import os
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path


class UserError(Exception):
    """A mistake of the user's: printed as one line that says what to do, exit code 2."""


class Stopped(Exception):
    """The run was asked to stop and has saved everything: (number of the signal, message)."""


# ---------------------------------------------------------------------------------------------
# every program: one clear line for a mistake, and the exit code that goes with it


@contextmanager
def plain_errors():
    """Within, a user's mistake ends the program with one line on stderr and exit code 2, a signal n
    with 128 + n. Raises SystemExit."""
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's stdout has none
        sys.stdout.reconfigure(errors="backslashreplace")  # a model may write any character
    try:
        yield
        return
    except Stopped as stopped:
        number, message = stopped.args
        code = 128 + number
    except KeyboardInterrupt:
        message, code = "stopped at once", 130
    except UserError as error:
        message, code = f"genenv: {first_line(error)}", 2
    except OSError as error:  # a full disk, a file that may not be written
        place = error.filename or "cannot write"
        message, code = f"genenv: {place}: {first_line(error)}", 2
    print(message, file=sys.stderr)
    raise SystemExit(code)


@contextmanager
def loading():
    """Within, packages are imported: one that is missing, or Ctrl-C, is one line. Raises
    SystemExit."""
    try:
        yield
    except ModuleNotFoundError as error:
        print(f"genenv: {error}: activate the environment (source .venv/bin/activate), or pip "
              "install -r requirements.txt", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("stopped at once", file=sys.stderr)
        raise SystemExit(130) from None


def exit_code(command) -> int:
    """Call `command()` under plain_errors and return the program's exit code: what the command
    returns if that is a number, else 0."""
    try:
        with plain_errors():
            result = command()
    except SystemExit as end:
        return end.code or 0
    return result if isinstance(result, int) else 0


# ---------------------------------------------------------------------------------------------
# a user's own Python, before a run: his functions in curriculum.py, his file in worlds/

PATIENCE = 2  # seconds after which a call that has not come back is named


@contextmanager
def users_code(file, arguments=""):
    """Within, code of a user's own file is run: what it raises becomes a UserError of one line with
    the line of that file. If it takes long, one line on stderr names the file."""
    timer = threading.Timer(PATIENCE, print, [f"trying {file} ..."], {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever such code may raise
        place = place_in(file, traceback.extract_tb(error.__traceback__))
        message = f"{place}: {type(error).__name__}: {first_line(error):.300}"
        if arguments:
            message += f", given {arguments}"
        raise UserError(message) from error
    finally:
        timer.cancel()


def place_in(file, frames) -> str:
    """Return the innermost of some frames that is in a file, in words; the file's name if none
    is."""
    for frame in reversed(frames):
        if frame.filename == file:
            return f"{file}, line {frame.lineno} in {frame.name}"
    return str(file)


def wrong_value(function, rule: str, value, arguments) -> UserError:
    """Make the error that names a user's function, what it must give, and what it gave instead."""
    code = function.__code__
    place = f"{code.co_filename}, line {code.co_firstlineno}: {function.__name__}"
    return UserError(f"{place} must give {rule}; it gave {value!r:.200} for {arguments}")


def checked(function, value, least=-1e30, most=1e30):
    """Return a number that a user's function gave during a run. Raises UserError if it is none, or
    out of its range."""
    if is_number(value, least, most):
        return value
    code = function.__code__
    raise UserError(f"{code.co_filename}, line {code.co_firstlineno}: {function.__name__} gave "
                    f"{value!r:.200}, not a number from {least:g} to {most:g}")


def is_number(value, least=-1e30, most=1e30) -> bool:
    """Return whether a value is a number in a range; NaN and infinity are in none."""
    return isinstance(value, (int, float)) and least <= value <= most


# ---------------------------------------------------------------------------------------------
# words, lines, files


def choose(word: str, names) -> str:
    """Say what to do instead of a word that is not among the names: the nearest one, then all."""
    names = [str(name) for name in names if name != ""]
    near = difflib.get_close_matches(word, names, 1)
    listed = f"choose from {', '.join(names)}"
    if near:
        return f"did you mean {near[0]}? {listed}"
    return listed


def no_file(path) -> str:
    """Say what is there instead of a file."""
    return "a folder, not a file" if Path(path).is_dir() else "no such file"


@contextmanager
def one_line(folder, fault="cannot be used"):
    """Within, whatever a library raises about a folder is a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each family and each file format fails in a way of its own
        raise UserError(f"{folder} {fault}: {first_line(error):.300}") from None


def first_line(error) -> str:
    """Return what an exception says in one line, or its kind where it says nothing. Of an error of
    the operating system only the reason: the file may be one that only we know of."""
    text = getattr(error, "strerror", "") or str(error).strip() or repr(error)
    return text.replace(":\n", ": ").splitlines()[0]


def printable(text: str) -> str:
    """Return text for the terminal that a model wrote, or somebody else: a character that is not
    visible becomes an escape such as \\x1b, so that it can neither move the cursor nor hide a word.
    Newlines stay."""
    characters = []
    for character in text:
        if character.isprintable() or character == "\n":
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode())
    return "".join(characters)


def write_whole(path, *parts):
    """Replace a file by texts or bytes, one after another. After a crash it holds the old contents,
    or all of the new."""
    if Path(path).is_dir():
        raise UserError(f"{path}: {no_file(path)}")
    scratch = Path(path).with_name(f"tmp-{Path(path).name}")
    try:
        with open(scratch, "wb") as file:
            for part in parts:
                file.write(part.encode() if isinstance(part, str) else part)
            file.flush()
            os.fsync(file.fileno())  # before the rename: else a crash could leave an empty file
        os.replace(scratch, path)
    except OSError as error:  # a full disk: give it back what was taken
        with suppress(OSError):
            scratch.unlink()
        raise UserError(f"{path}: {first_line(error)}") from None


def check_overwrite(path, beginning: bytes, force: bool):
    """Raise UserError if a file is there that does not begin as the command begins its own. An
    empty file loses nothing."""
    if force or not Path(path).is_file():
        return
    contents = Path(path).read_bytes()
    if contents and not contents.startswith(beginning):
        raise UserError(f"{path} holds something else, which would be lost: choose another --out, "
                        "or give --force")
