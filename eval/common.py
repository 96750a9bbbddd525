"""What the benchmark modules share: verdicts, data files, the summary of a run.

Each benchmark is one flat module with the same few functions:

    load(folder)              -> list of records, each with "id" and "category"
    prompt(record)            -> chat messages (list of {"role", "content"})
    score(record, response)   -> Verdict; pure, raises on no text, never executes text
    base_task(record)         -> optional: a training record in the format of --base-tasks, or None
    overall(verdicts)         -> optional: the score in percent where it is not the mean

and the constants NAME, PAPER (the paper's figures in percent, by system), MAX_NEW_TOKENS, VARIANTS
({name: (arguments of load, arguments of score)}, other protocols or parts of the benchmark).
tests/verify.py compares `score` with recorded official verdicts.
"""
import gzip
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from errors import UserError

MALFORMED = (KeyError, TypeError, AttributeError, IndexError, ValueError, AssertionError,
             RecursionError, SyntaxError)


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


def verdict(reason: str, right: str) -> Verdict:
    """Pass or fail from the reason of failure; "" is a pass, whose reason is `right`."""
    return Verdict(not reason, float(not reason), reason or right)


# ---------------------------------------------------------------------------------------------
# data files


@contextmanager
def one_line_for(where):
    """Turn the errors of malformed data inside the block into a UserError."""
    try:
        yield
    except MALFORMED as error:
        fault = f"{type(error).__name__}: {one_line(error, 60)}"
        raise UserError(f"{where}: malformed ({fault})") from None


def load_records(module, data, **options) -> list[dict]:
    """The records of one benchmark, from the folder `data`/NAME. UserError if they are not there,
    or lack what the module asks for."""
    folder = Path(data) / module.NAME
    with one_line_for(folder):
        return module.load(folder, **options)


def read_text(path) -> str:
    """The text of a file, or of its twin `path`.gz. UserError if unreadable."""
    zipped = Path(f"{path}.gz")
    try:
        if zipped.is_file():
            return gzip.decompress(zipped.read_bytes()).decode("utf-8")
        return Path(path).read_bytes().decode("utf-8")
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)})") from None


def read_rows(path) -> list[dict]:
    """JSON objects of a file or its .gz twin, one per line."""
    rows = []
    # splitlines() would also cut at U+2028 and its kin, which JSON allows inside a string
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            with one_line_for(f"{path}, line {number}"):
                rows.append(dict(json.loads(line)))
    return rows


def read_array(path) -> list[dict]:
    """The records of a file that holds one JSON array."""
    with one_line_for(path):
        return json.loads(read_text(path))


def one_line(error, width: int = 160) -> str:
    """The text of an exception, or a text, on one printable line of at most `width` characters."""
    text = " ".join((str(error) or type(error).__name__).split())[:width]
    return text.encode("utf-8", "backslashreplace").decode()  # model text may hold lone surrogates


def between(text: str, opening: str, closing: str):
    """What stands between `opening` and the next `closing`, again and again, in linear time."""
    end = 0
    while (start := text.find(opening, end)) >= 0:
        start += len(opening)
        stop = text.find(closing, start)
        if stop < 0:
            return
        yield text[start:stop]
        end = stop + len(closing)


# ---------------------------------------------------------------------------------------------
# which records, and how sure the score is


def spread(records: list, limit) -> list:
    """At most `limit` records at equal distances in their order; None: all of them."""
    if limit is None or limit >= len(records):
        return records
    return [records[i * len(records) // limit] for i in range(limit)]


def mean(verdicts) -> float:
    """The mean score in percent."""
    return 100 * sum(v.score for v in verdicts) / max(1, len(verdicts))


def bootstrap(
    verdicts: list, overall=mean, seed: int = 0, draws: int = 1000
) -> tuple[float, float]:
    """Percentile interval (95 %) of overall(verdicts) over verdicts drawn with replacement.

    It has no width where all verdicts are equal (0 % and 100 %).
    """
    import numpy as np
    picks = np.random.default_rng(seed).integers(0, len(verdicts), (draws, len(verdicts)))
    low, high = np.percentile([overall([verdicts[i] for i in row]) for row in picks], [2.5, 97.5])
    return float(low), float(high)


def results(records: list, verdicts: list, overall=mean) -> dict:
    """{"score", "n", "interval_95", "categories", "metrics"} of one benchmark, in percent.

    metrics: means of the numbers in the verdicts' extra, as they are.
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
