"""Files that are whole or absent, JSONL, and the one kind of error that a user sees."""
import difflib
import json
import os
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """A mistake of the user's: printed as one line that says what to do, exit code 2."""


def choose(word: str, names) -> str:
    """What to do instead of a word that is not among the names: the nearest, then all of them."""
    names = [str(name) for name in names if name != ""]
    near = difflib.get_close_matches(word, names, 1) or \
        [name for name in names if word and (name in word or word in name)]
    return f"{f'did you mean {near[0]}? ' if near else ''}choose from {', '.join(names)}"


def no_file(path) -> str:
    """What stands where a file should be."""
    return "a folder, not a file" if Path(path).is_dir() else "no such file"


def first_line(error) -> str:
    """What an exception says, in one line: its kind where it says nothing."""
    return (str(error).strip() or repr(error)).replace(" \n", "\n").replace(":\n", ": ").splitlines()[0]


def read_jsonl(path) -> list[dict]:
    """Every record of a JSONL file. Raises UserError naming the file and the line at fault."""
    if not Path(path).is_file():
        raise UserError(f"{path}: {no_file(path)}")
    records = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        try:
            records += [json.loads(line.decode("utf-8"))] if line.strip() else []
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise UserError(f"{path}, line {number}: not valid JSON ({first_line(error)}); correct or "
                            "remove it") from None
        if records and not isinstance(records[-1], dict):
            raise UserError(f"{path}, line {number}: expected a JSON object, found "
                            f"{type(records[-1]).__name__}")
    return records


def append_jsonl(path, records):
    """Append records and force them to disk. A kill may leave a part of them: a run that goes on
    cuts the file back to its checkpoint (support/checkpoint.py)."""
    with open(path, "ab") as file:
        file.write(b"".join(json.dumps(r).encode() + b"\n" for r in records))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def whole_file(path):
    """A binary file to write: after a crash the path holds the old contents or all of the new."""
    scratch = Path(path).with_name(f"tmp-{Path(path).name}")
    with open(scratch, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())  # before the rename: else a crash could leave an empty file
    os.replace(scratch, path)


def write_whole(path, data):
    """Put text or bytes in the place of a file, whole or not at all."""
    with whole_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)
