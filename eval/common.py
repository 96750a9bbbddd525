"""What the five benchmark modules share: the verdict and the location of the data.

Each benchmark is one flat module with the same few functions, so that a reader who knows one knows all:

    load(data)                -> list of records, each with "id" and "category"
    prompt(record)            -> chat messages (list of {"role", "content"})
    gold(record)              -> the response text a perfect model would give, or None
    score(record, response)   -> Verdict; pure, never raises on any text, never executes text
    aggregate(records, verdicts) -> {"score": percent, "n": int, "categories": {...}}
    verify(data, rows)        -> yields (kind, agrees, detail) per recorded verdict (golden format)
"""
from dataclasses import dataclass, field
from pathlib import Path

from data_pool import UserError


@dataclass
class Verdict:
    """The result of one response.

    ok: the benchmark's own pass/fail; score: in [0, 1], what the mean is taken of;
    reason: one plain sentence; extra: further metrics of the benchmark (F1, per-constraint...).
    """
    ok: bool
    score: float
    reason: str
    extra: dict = field(default_factory=dict)


def data_dir(data, bench: str) -> Path:
    """The folder of one benchmark: `data/bench` where it exists, else `data` itself.

    Raises UserError when neither is a folder.
    """
    root = Path(data)
    for folder in (root / bench, root):
        if folder.is_dir():
            return folder
    raise UserError(f"no data folder {data}: pass --data DIR (see the data table in eval/README.md)")
