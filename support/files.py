"""Files that nothing tears, and the one kind of error that a user sees.

What of the paper this is: nothing. How it is run: what a run reads and writes goes through it.

Where it differs on purpose from a plain loop over json.loads: every fault names the file and the
line, and a write that fails leaves the file as it was.
"""
import difflib
import json
import os
from contextlib import suppress
from pathlib import Path


class UserError(Exception):
    """A mistake of the user's: printed as one line saying what to do, exit code 2."""


def choose(word: str, names) -> str:
    """What to do instead of a word that is none of the names: the nearest, then all of them."""
    names = [str(name) for name in names if name != ""]
    near = difflib.get_close_matches(word, names, 1) or \
        [name for name in names if word and (name in word or word in name)]
    return f"{f'did you mean {near[0]}? ' if near else ''}choose from {', '.join(names)}"


def no_file(path) -> str:
    """What stands where a file should be."""
    if Path(path).is_dir():
        return "a folder, no file"
    return "a pipe or device: save what it holds as a file" if Path(path).exists() else "no such file"


def first_line(error) -> str:
    """What an exception says, in one line: its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def read_jsonl(path) -> list[dict]:
    """Every record of a JSONL file. Raises UserError naming the file and the line at fault."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: {no_file(path)}")
    records = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                records.append(_parse_line(line, f"{path}, line {number}"))
    return records


def _parse_line(line: bytes, where: str) -> dict:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        reason = str(error).splitlines()[0]
        raise UserError(f"{where}: not valid JSON ({reason}); correct or remove it") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(record).__name__}")
    return record


def append_jsonl(path, records):
    """Append records and force them to disk.

    Raises UserError if the disk is full or read-only; the file then ends where it ended before.
    """
    data = b"".join(json.dumps(r).encode() + b"\n" for r in records)
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    try:
        with open(path, "ab", buffering=0) as file:
            view = memoryview(data)
            while view:  # a full disk may take a part of it
                view = view[file.write(view):]
            os.fsync(file.fileno())
    except OSError as error:
        if os.path.isfile(path):
            os.truncate(path, size)
        raise _cannot_write(path, error) from None


def write_whole(path, data):
    """Put text or bytes in the place of a file: after a crash it is the old one or the new one.

    Raises UserError if the disk is full or read-only; the file of before stays as it was.
    """
    scratch = Path(path).with_name(f"tmp-{Path(path).name}")
    try:
        with open(scratch, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())  # before the name: else a crash could leave an empty file
        os.replace(scratch, path)
        _sync_folder(scratch.parent)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise _cannot_write(path, error) from None


def _sync_folder(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(path, error) -> UserError:
    return UserError(f"cannot write {path} ({error.strerror}): free some space or choose another "
                     "--out, then give the same command again; a run goes on with --resume")


def set_torn_line_aside(path) -> str:
    """A last line without its newline was being written when the process died.

    It moves to PATH.torn, so nothing is lost and the file is whole again. Returns a message for
    the user, empty if there was nothing to do.
    """
    path = Path(path)
    data = path.read_bytes() if path.is_file() else b""
    torn = data.rpartition(b"\n")[2]
    if not torn:
        return ""
    with open(path.with_name(path.name + ".torn"), "ab") as file:
        file.write(torn + b"\n")
    os.truncate(path, len(data) - len(torn))
    return f"{path}: the last line was torn; set aside in {path.name}.torn ({len(torn)} bytes)"
