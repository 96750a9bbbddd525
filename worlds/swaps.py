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
import re
import string

from data_pool import Task
from worlds.grounding import FILLERS, dates_of, is_time
from worlds.schemas import canonical, conforms, tools_of

CALENDAR = tuple(map(list, (calendar.day_name, calendar.month_name[1:])))


def words_of_tools(tools) -> list[str]:
    """What values are made of: the words of the descriptions, each once, in order."""
    texts = re.findall(r'"description": "([^"]*)', canonical(list(tools)))
    return sorted(set(re.findall(r"\b[a-z]{3,}\b", " ".join(texts).lower())) - FILLERS)


def swapped(task: Task, words: list, draw) -> tuple[str, list]:
    """(request, calls) of a task with other values: those that stand once in its request as they
    are in its calls.

    words: what texts are made of. draw: a random.Random. Dates, times, defaults and booleans stay.
    """
    tools, text, calls = tools_of(task), task.text, []
    inner = lambda call, name: tools[call["name"]]["parameters"].get("properties", {}).get(name, {})
    leaves = [leaf for call in task.spec["calls"] for name, value in call["arguments"].items()
              for leaf in _leaves(value, inner(call, name))]
    others = {}
    for value, schema in leaves:
        once = sum(canonical(value) == canonical(v) for v, _ in leaves) == 1
        place = _place(value, text) if once else None
        other = _other(value, schema, words, draw) if place else None
        # a value that stands in the request already would stand there twice
        if other is not None and conforms(other, schema) and not _place(other, text, least=1):
            others[canonical(value)] = other
            text = text[:place.start()] + _written(other) + text[place.end():]
    for call in task.spec["calls"]:
        calls.append({**call, "arguments": _replaced(call["arguments"], others)})
    return text, calls


def _leaves(value, schema: dict):
    """(value, schema) of each part without parts that may be swapped."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, schema.get("properties", {}).get(key, {}))
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part, schema.get("items", {}))
    elif not isinstance(value, bool) and value not in (None, "") and \
            canonical(value) != canonical(schema.get("default")):
        yield value, schema


def _place(value, text: str, least: int = 0):
    """Where a value stands in a text, if it does so once; with `least`, at least so often."""
    forms = {_written(value)} | ({f"{value:.2f}"} if isinstance(value, float) else set())
    either = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
    found = list(re.finditer(rf"(?<![\w.-])(?:{either})(?!\w|\.\d)", text))
    return found[0] if len(found) == 1 or least and found else None


def _written(value) -> str:
    return value if isinstance(value, str) else canonical(value)


def _other(value, schema: dict, words, draw):
    """Another value of the same kind, or None if there is none to be had."""
    if "enum" in schema:
        rest = [v for v in schema["enum"] if v != value and isinstance(v, type(value))]
        return draw.choice(rest) if rest else None
    if isinstance(value, str):
        return _other_text(value, words, draw)
    digits = canonical(abs(value)).partition(".")
    unit, size = 10 ** len(digits[2]), 10 ** len(digits[0])  # drawn in steps of the last place
    least = max(schema.get("minimum", 1), size // 10)
    most = min(schema.get("maximum", size), size - 1)
    if value <= 0 or least >= most:
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


def _replaced(value, others: dict):
    """A value with its parts exchanged."""
    if isinstance(value, dict):
        return {key: _replaced(part, others) for key, part in value.items()}
    if isinstance(value, list):
        return [_replaced(part, others) for part in value]
    return others.get(canonical(value), value)
