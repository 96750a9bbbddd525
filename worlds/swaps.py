"""An example with other values: the same request and the same calls, other names and numbers.

A warm start from few examples teaches a small model their values by heart: asked for the light in the
bedroom it turns on that of the bathroom, which an example had. If every pass shows other values, they
can only be read from the request. No run of the loop and no held-out task is ever changed by it.

Deviations: it knows no meaning. "Put the haircut into the calendar" may become "Put the distance into
the calendar": an odd request, and its call is right. The values of other examples would read better, but
twenty examples have one or two of each argument, which are soon known by heart.
"""
import calendar
import re
from string import ascii_uppercase

from data_pool import Task
from worlds import task_texts
from worlds.schemas import canonical, conforms, each, leaves, tools_of


def words_of_tools(tools) -> list[str]:
    """What values are made of: the words of the descriptions, each once, in order."""
    return sorted({*re.findall(r"\b[a-z]{4,}\b", " ".join(
        text for tool in tools for text in task_texts(tool) if " " in text).lower())})


def swapped(task: Task, words: list, draw) -> tuple[str, list]:
    """(request, calls) of a task with other values: those that stand once in its request, and once in
    its calls.

    words: what texts are made of. draw: a random.Random. Texts with digits, defaults, booleans and
    values that are a part of another one stay.
    """
    tools, text = tools_of(task), task.text
    values = [_written(value) for call in task.spec["calls"] for value, _, _ in leaves(
        call["arguments"], tools[call["name"]]["parameters"])]

    def swap(value, schema, _):
        nonlocal text
        own = _written(value)
        places = _places(own, text)
        if len(places) != 1 or sum(own in other for other in values) > 1 \
                or any(other and other in own for other in values if other != own) \
                or isinstance(value, bool) or value == schema.get("default"):
            return value
        other = _other(value, schema, words, draw)
        # a value that stands in the request already would stand there twice
        if other is None or not conforms(other, schema) or _places(_written(other), text):
            return value
        text = text[:places[0].start()] + _written(other) + text[places[0].end():]
        return other
    calls = [{**call, "arguments": each(call["arguments"], tools[call["name"]]["parameters"], swap)}
             for call in task.spec["calls"]]
    return text, calls


def _written(value) -> str:
    return value if isinstance(value, str) else canonical(value)


def _places(value: str, text: str) -> list:
    """Where a value stands in a text, not as a part of a word or of another number."""
    return list(re.finditer(rf"(?<![\w.,:/-]){re.escape(value)}(?!\w|[.,/-]\d)", text)) if value else []


def _other(value, schema: dict, words, draw):
    """Another value of the same kind, or None if there is none."""
    if "enum" in schema:
        rest = [v for v in schema["enum"] if v != value and isinstance(v, type(value))]
        return draw.choice(rest) if rest else None
    if isinstance(value, str):
        for names in calendar.day_name, calendar.month_name:
            if value in names:
                return draw.choice(list(filter(None, names)))
        if value.isalpha() and value.isupper():  # a code, such as EUR
            return "".join(draw.choices(ascii_uppercase, k=len(value)))
        if not words or any(c.isdigit() for c in value):  # a date, a time, a code
            return None
        new = [draw.choice(words) for _ in value.split()]
        return " ".join(b.capitalize() if a[0].isupper() else b for a, b in zip(value.split(), new))
    if not isinstance(value, int) or value <= 0:
        return None
    size = 10 ** len(str(value))  # as many digits
    least, most = max(schema.get("minimum", 1), size // 10), min(schema.get("maximum", size), size - 1)
    return draw.randint(int(least), int(most)) if least < most else None
