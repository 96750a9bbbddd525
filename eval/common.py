"""Define what the benchmark modules share: verdicts, data files, the summary of a run.

Each benchmark is one flat module with the same few functions:

    load(folder)              -> list of records, each with "id" and "category"
    prompt(record)            -> chat messages (list of {"role", "content"})
    score(record, response)   -> Verdict; pure: no text makes it raise, and no text is executed
    base_task(record)         -> optional: a training record in the format of --base-tasks, or None
    overall(verdicts)         -> optional: the score in percent, if it is not the mean

and the constants NAME, PAPER (the paper's figures in percent, by system), MAX_NEW_TOKENS and
VARIANTS ({name: (arguments of load, arguments of score)}, for other protocols or other parts of the
benchmark). tests/verify.py compares `score` with recorded official verdicts.
"""
import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data_pool import parse_jsonl
from errors import one_line


@dataclass
class Verdict:
    """Hold the result of one response.

    ok: whether it passes by the benchmark's own rule; score: in [0, 1], averaged over responses;
    reason: one plain sentence; extra: further metrics of the benchmark, such as F1.
    """
    ok: bool
    score: float
    reason: str
    extra: dict = field(default_factory=dict)


def verdict(reason: str, right: str) -> Verdict:
    """Return a verdict. reason: why the response fails; "" is a pass, whose reason is `right`."""
    return Verdict(not reason, float(not reason), reason or right)


# ---------------------------------------------------------------------------------------------
# data files


def load_records(module, data, **options) -> list[dict]:
    """Return the records of one benchmark, from the folder `data`/NAME. Raise UserError if they
    are missing or incomplete."""
    folder = Path(data) / module.NAME
    with one_line(folder, "is malformed"):
        return module.load(folder, **options)


def unzipped(path) -> bytes:
    """Return the contents of a file, or of `path`.gz if that exists. Raise UserError if the file
    cannot be read."""
    twin = Path(f"{path}.gz")
    with one_line(path, "cannot be read"):
        return gzip.decompress(twin.read_bytes()) if twin.is_file() else Path(path).read_bytes()


def read_rows(path) -> list[dict]:
    """Return the JSON objects, one per line, of a file or its .gz twin."""
    return parse_jsonl(unzipped(path), path)


def read_array(path) -> list[dict]:
    """Return the records of a file that holds one JSON array."""
    with one_line(path, "is malformed"):
        return json.loads(unzipped(path))


def brief(text, width: int = 160) -> str:
    """Return a text, or the text of an exception, as one printable line of at most `width`
    characters."""
    words = (str(text) or type(text).__name__).split()
    # Model text may hold lone surrogates.
    return " ".join(words)[:width].encode("utf-8", "backslashreplace").decode()


# ---------------------------------------------------------------------------------------------
# which records, and how certain the score is


def spread(records: list, limit) -> list:
    """Return at most `limit` records, evenly spread, or all of them if `limit` is None."""
    if limit is None or limit >= len(records):
        return records
    return [records[i * len(records) // limit] for i in range(limit)]


def mean_score(verdicts) -> float:
    """Return the mean score in percent."""
    return 100 * sum(v.score for v in verdicts) / max(1, len(verdicts))


def bootstrap(verdicts: list, overall) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of overall(verdicts): percentiles of 1,000 resamples.

    It has no width if all verdicts are equal.
    """
    picks = np.random.default_rng(0).integers(0, len(verdicts), (1000, len(verdicts)))
    low, high = np.percentile([overall([verdicts[i] for i in row]) for row in picks], [2.5, 97.5])
    return float(low), float(high)


def results(records: list, verdicts: list, overall) -> dict:
    """Return {"score", "n", "interval_95", "passed", "categories", "metrics"} of a benchmark.

    Scores and interval are in percent. metrics: means of the numbers in the verdicts' extra.
    """
    groups = {}
    for record, one in zip(records, verdicts):
        groups.setdefault(record["category"], []).append(one)
    numbers = [name for name, value in verdicts[0].extra.items() if isinstance(value, (int, float))]
    categories, metrics = {}, {}
    for name, group in groups.items():
        categories[name] = {"score": overall(group), "n": len(group)}
    for name in numbers:
        metrics[name] = sum(v.extra[name] for v in verdicts) / len(verdicts)
    return {
        "score": overall(verdicts),
        "n": len(verdicts),
        "interval_95": bootstrap(verdicts, overall),
        "passed": sum(v.ok for v in verdicts),
        "categories": categories,
        "metrics": metrics,
    }
