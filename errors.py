"""Report users' mistakes in one line, guard users' own code, and write files atomically.

Usage: genenv.py and nearly all other programs of the project run under `plain_errors`. Anything
that a user can fix is raised as a UserError. The program then prints one line, which says what is
wrong and what to do, and ends with exit code 2.
"""
import difflib
import os
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path


class UserError(Exception):
    """Report a mistake that the user can fix; the message is one line on what to do."""


class Stopped(Exception):
    """End a run that was asked to stop and can be resumed. args: the signal's number, a message."""


# ---------------------------------------------------------------------------------------------
# programs that end with one clear line and an exit code


@contextmanager
def plain_errors():
    """Turn a user's mistake, or an error of the operating system, into one line on stderr and
    SystemExit with code 2.

    After signal n the code is 128 + n.
    """
    if hasattr(sys.stdout, "reconfigure"):  # in a notebook it has no such method
        # models may write characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
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
    """Guard imports: turn a missing package, or Ctrl-C, into one line and SystemExit."""
    with plain_errors():
        try:
            yield
        except ModuleNotFoundError as error:
            raise UserError(f"{error}: activate the environment (source .venv/bin/activate), or "
                            "pip install -r requirements.txt") from None


def exit_code(command) -> int:
    """Call `command()` under plain_errors and return the program's exit code.

    On success, this is the command's result if that is an integer, and otherwise 0.
    """
    try:
        with plain_errors():
            result = command()
    except SystemExit as end:
        return end.code or 0
    return result if isinstance(result, int) else 0


# ---------------------------------------------------------------------------------------------
# guards around what users write themselves: functions in curriculum.py, files in worlds/

PATIENCE = 5  # in seconds; a call that takes longer is reported


@contextmanager
def users_code(file, otherwise=""):
    """Turn any exception from a user's code into a UserError that says where in the file it arose.

    If the code takes a long time, a line on stderr names the file. otherwise: what to name if no
    line of the file was running, as when a function was called with the wrong arguments.
    """
    timer = threading.Timer(PATIENCE, print, [f"trying {file} ..."], {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        place = otherwise or file
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == file:  # the innermost one counts
                place = f"{file}, line {frame.lineno} in {frame.name}"
        raise UserError(f"{place}: {type(error).__name__}: {first_line(error):.300}") from error
    finally:
        timer.cancel()


def wrong_value(function, rule: str, value, arguments) -> UserError:
    """Return the error for a wrong return value of a user's function.

    rule: what it must return; value: what it returned; arguments: what it was called with.
    """
    code = function.__code__
    place = f"{code.co_filename}, line {code.co_firstlineno}: {function.__name__}"
    return UserError(f"{place} must give {rule}; it gave {value!r:.200} for {arguments}")


def checked(function, value, least=-1e30, most=1e30):
    """Return a value that a user's function returned during a run.

    Raise UserError unless it is a number from `least` to `most`.
    """
    if is_number(value, least, most):
        return value
    code = function.__code__
    raise UserError(f"{code.co_filename}, line {code.co_firstlineno}: {function.__name__} gave "
                    f"{value!r:.200}, not a number from {least:g} to {most:g}")


def is_number(value, least=-1e30, most=1e30) -> bool:
    """Return whether a value is a number from `least` to `most`. NaN and infinity never are."""
    return isinstance(value, (int, float)) and least <= value <= most


# ---------------------------------------------------------------------------------------------
# messages, and the files of a program


def choose(word: str, names) -> str:
    """Return advice for a word that is not one of the names: a similar name, if there is one, and
    then all names."""
    names = [str(name) for name in names if name != ""]
    near = difflib.get_close_matches(word, names, 1)
    listed = f"choose from {', '.join(names)}"
    if near:
        return f"did you mean {near[0]}? {listed}"
    return listed


def require_file(path, advice=""):
    """Raise UserError unless the path leads to a file. advice: what to append to the message."""
    if not Path(path).is_file():
        fault = "a folder, not a file" if Path(path).is_dir() else "no such file"
        raise UserError(f"{path}: {fault}{advice}")


@contextmanager
def one_line(folder, fault="cannot be used"):
    """Turn anything that a library raises about a folder or file into a UserError of one line.

    fault: what the message says about it before the library's own first line.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each model family and file format fails differently
        raise UserError(f"{folder} {fault}: {first_line(error):.300}") from None


def first_line(error) -> str:
    """Return the first line of an exception's message, or its class if it has no message.

    For an error of the operating system, return only the reason, without the name of the file: it
    may be an internal file, which the user does not know.
    """
    text = getattr(error, "strerror", "") or str(error).strip() or repr(error)
    return text.replace(":\n", ": ").splitlines()[0]


def printable(text: str) -> str:
    """Return untrusted text in a form that is safe to print on a terminal.

    Invisible characters except newlines become escapes such as \\x1b. Otherwise they could move
    the cursor or hide a word.
    """
    characters = []
    for character in text:
        if character.isprintable() or character == "\n":
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode())
    return "".join(characters)


def write_whole(path, *parts):
    """Replace a file's contents atomically with the concatenation of `parts` (text or bytes).

    After a crash the file holds either all of its old contents or all of the new. Raise UserError
    if the path is a folder or a device, or if the file cannot be written.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise UserError(f"{path}: a folder or a device, not a file: choose another")
    scratch = Path(path).with_name(f"tmp-{Path(path).name}")
    try:
        with open(scratch, "wb") as file:
            for part in parts:
                file.write(part.encode() if isinstance(part, str) else part)
            file.flush()
            os.fsync(file.fileno())  # otherwise a crash after the rename could leave an empty file
        os.replace(scratch, path)
    except OSError as error:  # perhaps the disk is full, so free the space again
        with suppress(OSError):
            scratch.unlink()
        raise UserError(f"{path}: {first_line(error)}") from None


def check_overwrite(path, beginning: bytes, force: bool):
    """Raise UserError if writing to the path would destroy a file that the command did not write.

    beginning: how each file that the command writes begins. An empty file may be overwritten; with
    `force`, any file may.
    """
    if force or not Path(path).is_file():
        return
    contents = Path(path).read_bytes()
    if contents and not contents.startswith(beginning):
        raise UserError(f"{path} holds something else, which would be lost: choose another --out, "
                        "or give --force")
