"""An example with other values: the same request and the same calls, other names and numbers.

What of the paper this is: nothing. A warm start from few examples teaches a small model their values
by heart: asked for the light in the bedroom it turns on that of the bathroom, which an example had.
Where every pass shows other values, they can only be read from the request.

How it is run: `swapped(task, words, draw)` by worlds/tool_calls.py in a warm start with --tools.
No run of the loop and no held-out task is ever changed by it.

Where it differs on purpose: it knows no meaning. "Put the haircut on Tuesday at 15:00" may become
"Put the distance on Friday at 9:00": an odd request, and its call is right.
"""
import calendar
import json
import re
import string
from collections import Counter

from data_pool import Task
from worlds.grounding import FILLERS, dates_of, is_time
from worlds.leaks import objects_in
from worlds.schemas import branch, canonical, conforms, tools_of

CALENDAR = tuple(map(list, (calendar.day_name, calendar.month_name[1:])))


def words_of_tools(tools) -> list[str]:
    """What values are made of: the words of the descriptions, each once, in order."""
    texts = [found.get("description") for found in objects_in(list(tools))]
    text = " ".join(text for text in texts if isinstance(text, str))
    words = re.findall(r"\b[a-z]{3,}\b", text.lower())
    return sorted(set(words) - FILLERS)


def swapped(task: Task, words: list, draw) -> tuple[str, list]:
    """(request, calls) of a task with other values: those that stand once in its request as they
    are in its calls.

    words: what texts are made of. draw: a random.Random. Dates, times, defaults and booleans stay.
    """
    tools, text, times = tools_of(task), task.text, Counter()
    def count(value, schema):
        times[canonical(value)] += 1
    def swap(value, schema):
        nonlocal text
        places = _places(value, text)
        if len(places) != 1 or times[canonical(value)] > 1 or _stays(value, schema) \
                or _entangled(value, times):
            return value
        other = _other(value, schema, words, draw)
        # a value that stands in the request already would stand there twice
        if other is None or not conforms(other, schema) or _places(other, text):
            return value
        text = text[:places[0].start()] + _written(other) + text[places[0].end():]
        return other
    for change in (count, swap):
        calls = [{**call, "arguments": _each(call["arguments"], tools[call["name"]]["parameters"],
                                             change)} for call in task.spec["calls"]]
    return text, calls


def _each(value, schema: dict, change):
    """A value with change(part, its schema) in place of each part that has no parts."""
    if isinstance(value, dict):
        inner = schema.get("properties", {})
        return {key: _each(part, branch(part, inner.get(key, {})), change)
                for key, part in value.items()}
    if isinstance(value, list):
        return [_each(part, branch(part, schema.get("items", {})), change) for part in value]
    return change(value, schema)


def _stays(value, schema: dict) -> bool:
    """Whether a value is one that no request needs to name."""
    return isinstance(value, bool) or value in (None, "") or \
        canonical(value) == canonical(schema.get("default"))


def _entangled(value, others) -> bool:
    """Whether a value stands within another one, or one within it: York and York Minster, 15 and
    "15:00". others: values as canonical JSON."""
    own = canonical(value)
    return any(_places(value, _written(other).lstrip("0")) or _places(other, _written(value))
               for other in map(json.loads, others) if canonical(other) != own)


def _places(value, text: str) -> list:
    """Where a value stands in a text; a number not as a part of 1,200 or of 3/14."""
    forms = {_written(value)} | ({f"{value:.2f}"} if isinstance(value, float) else set())
    either = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
    if not isinstance(value, str):
        either = rf"(?<!\d[,/])(?:{either})(?![,/]\d)"
    return list(re.finditer(rf"(?<![\w.-])(?:{either})(?!\w|\.\d)", text))


def _written(value) -> str:
    return value if isinstance(value, str) else canonical(value)


def _other(value, schema: dict, words, draw):
    """Another value of the same kind, or None if there is none to be had."""
    if "enum" in schema:
        rest = [v for v in schema["enum"] if v != value and isinstance(v, type(value))]
        return draw.choice(rest) if rest else None
    if isinstance(value, str):
        return _other_text(value, words, draw)
    if value <= 0:
        return None
    digits = canonical(value).partition(".")
    unit, size = 10 ** len(digits[2]), 10 ** len(digits[0])  # drawn in steps of the last place
    least = max(schema.get("minimum", 1), size // 10)
    most = min(schema.get("maximum", size), size - 1)
    if least >= most:
        return None
    n = draw.randint(round(least * unit), round(most * unit))
    return n / unit if unit > 1 else n


def _other_text(value: str, words, draw):
    """A text of as many words; in a code each letter and digit is another."""
    if dates_of(value, whole=True) or is_time(value.lower()):
        return None
    if any(c.isdecimal() for c in value):
        kinds = (string.ascii_lowercase, string.ascii_uppercase, string.digits)
        return "".join(next((draw.choice(kind) for kind in kinds if c in kind), c) for c in value)
    for names in CALENDAR:
        if value in names:
            return draw.choice(names)
    old = value.split()
    if not words or len(old) > 8:
        return None
    new = [draw.choice(words) for _ in old]
    return " ".join(b.capitalize() if a[0].isupper() else b for a, b in zip(old, new))
