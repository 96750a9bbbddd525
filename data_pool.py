"""placeholder being written"""
import json
from pathlib import Path


class UserError(Exception):
    """A mistake of the user's: printed as one line, exit code 2."""


def read_jsonl(path):
    """Every record of a JSONL file; UserError names the file and the line that is wrong."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number}: expected a JSON object")
        records.append(record)
    return records
