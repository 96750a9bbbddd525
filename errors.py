"""Report users' mistakes in one line, guard user code, and write files atomically.

Usage: every program of the project runs under `plain_errors`. A mistake that a user can fix is a
UserError: one line on what is wrong and what to do, and exit code 2.
"""
import difflib
import os
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path


class UserError(Exception):
    """Report a user's mistake: one line on what to do, and exit code 2."""


class Stopped(Exception):
    """End a run that was asked to stop and has saved everything: (signal number, message)."""


# ---------------------------------------------------------------------------------------------
# every program reports a mistake in one clear line, with an exit code


@contextmanager
def plain_errors():
    """Turn a user's mistake into one line on stderr and SystemExit with code 2.

    After a signal n the code is 128 + n.
    """
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's stdout has none
        sys.stdout.reconfigure(errors="backslashreplace")  # models may write any character
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
    except OSError as error:  # a full disk, a file without write permission
        place = error.filename or "cannot write"
        message, code = f"genenv: {place}: {first_line(error)}", 2
    print(message, file=sys.stderr)
    raise SystemExit(code)


@contextmanager
def loading():
    """Turn a missing package, or Ctrl-C during imports, into one line and SystemExit."""
    with plain_errors():
        try:
            yield
        except ModuleNotFoundError as error:
            raise UserError(f"{error}: activate the environment (source .venv/bin/activate), or "
                            "pip install -r requirements.txt") from None


def exit_code(command) -> int:
    """Call `command()` under plain_errors and return the exit code: its result if that is a number,
    else 0."""
    try:
        with plain_errors():
            result = command()
    except SystemExit as end:
        return end.code or 0
    return result if isinstance(result, int) else 0


# ---------------------------------------------------------------------------------------------
# guards around a user's own functions in curriculum.py and files in worlds/, before a run

PATIENCE = 2  # in seconds; a call that takes longer is reported


@contextmanager
def users_code(file, arguments=""):
    """Turn what a user's own code raises into a UserError with its place in that file.

    If the code takes a long time, a line on stderr names the file.
    """
    timer = threading.Timer(PATIENCE, print, [f"trying {file} ..."], {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # such code may raise anything
        place = place_in(file, traceback.extract_tb(error.__traceback__))
        message = f"{place}: {type(error).__name__}: {first_line(error):.300}"
        if arguments:
            message += f", given {arguments}"
        raise UserError(message) from error
    finally:
        timer.cancel()


def place_in(file, frames) -> str:
    """Return the innermost frame in a file, in words; only the file's name if there is none."""
    for frame in reversed(frames):
        if frame.filename == file:
            return f"{file}, line {frame.lineno} in {frame.name}"
    return str(file)


def wrong_value(function, rule: str, value, arguments) -> UserError:
    """Return the error that names a user's function, what it must give, and what it gave."""
    code = function.__code__
    place = f"{code.co_filename}, line {code.co_firstlineno}: {function.__name__}"
    return UserError(f"{place} must give {rule}; it gave {value!r:.200} for {arguments}")


def checked(function, value, least=-1e30, most=1e30):
    """Return the value that a user's function gave during a run. Raise UserError unless it is a
    number in the range."""
    if is_number(value, least, most):
        return value
    code = function.__code__
    raise UserError(f"{code.co_filename}, line {code.co_firstlineno}: {function.__name__} gave "
                    f"{value!r:.200}, not a number from {least:g} to {most:g}")


def is_number(value, least=-1e30, most=1e30) -> bool:
    """Return whether a value is a number in a range; NaN and infinity never are."""
    return isinstance(value, (int, float)) and least <= value <= most


# ---------------------------------------------------------------------------------------------
# words, lines, files


def choose(word: str, names) -> str:
    """Return advice for a word that is not among the names: the nearest name, if any, then all."""
    names = [str(name) for name in names if name != ""]
    near = difflib.get_close_matches(word, names, 1)
    listed = f"choose from {', '.join(names)}"
    if near:
        return f"did you mean {near[0]}? {listed}"
    return listed


def require_file(path, advice=""):
    """Raise UserError unless there is a file at the path. advice: the end of the message."""
    if not Path(path).is_file():
        fault = "a folder, not a file" if Path(path).is_dir() else "no such file"
        raise UserError(f"{path}: {fault}{advice}")


@contextmanager
def one_line(folder, fault="cannot be used"):
    """Turn anything a library raises about a folder into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each model family and file format fails differently
        raise UserError(f"{folder} {fault}: {first_line(error):.300}") from None


def first_line(error) -> str:
    """Return the first line of an exception's message, or the exception's kind if it has none.

    For an error of the operating system return only the reason: its file may be an internal one.
    """
    text = getattr(error, "strerror", "") or str(error).strip() or repr(error)
    return text.replace(":\n", ": ").splitlines()[0]


def printable(text: str) -> str:
    """Return untrusted text, made safe for a terminal.

    Invisible characters except newlines become escapes such as \\x1b, so that they can neither move
    the cursor nor hide a word.
    """
    characters = []
    for character in text:
        if character.isprintable() or character == "\n":
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode())
    return "".join(characters)


def write_whole(path, *parts):
    """Atomically replace a file's contents with the given parts (text or bytes), concatenated.

    After a crash it holds either the old contents or all of the new. Raise UserError for a folder
    or a device, and if the disk is full.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise UserError(f"{path}: a folder or a device, not a file: choose another")
    scratch = Path(path).with_name(f"tmp-{Path(path).name}")
    try:
        with open(scratch, "wb") as file:
            for part in parts:
                file.write(part.encode() if isinstance(part, str) else part)
            file.flush()
            os.fsync(file.fileno())  # or a crash after the rename could leave an empty file
        os.replace(scratch, path)
    except OSError as error:  # perhaps the disk is full: free the space taken
        with suppress(OSError):
            scratch.unlink()
        raise UserError(f"{path}: {first_line(error)}") from None


def check_overwrite(path, beginning: bytes, force: bool):
    """Raise UserError if the path holds a file that does not begin like the command's own files,
    and is not empty."""
    if force or not Path(path).is_file():
        return
    contents = Path(path).read_bytes()
    if contents and not contents.startswith(beginning):
        raise UserError(f"{path} holds something else, which would be lost: choose another --out, "
                        "or give --force")
