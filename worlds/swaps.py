"""An example with other values: the same request and the same calls, other names and numbers.

A warm start from few examples teaches a small model their values by heart: asked for the light in the
bedroom it turns on that of the bathroom, which an example had. If every pass shows other values, they
can only be read from the request. No run of the loop and no held-out task is ever changed by it.

Deviations: it knows no meaning. A name becomes a name, what follows "the" a place, three words or more a
sentence, other words things, all of them English (worlds/words.json): "Put the haircut on Tuesday" may
become "Put the lobby on Sunday", an odd request, and its call is right. The values of other examples would
read better, but twenty examples have one or two of each argument, which are soon known by heart.
"""
import json
import re
from pathlib import Path
from string import ascii_uppercase

from data_pool import Task
from worlds.schemas import canonical, conforms, each, leaves, tools_of

WORDS = json.loads(Path(__file__).with_name("words.json").read_text())  # {kind: texts}


def swapped(task: Task, draw) -> tuple[str, list]:
    """(request, calls) of a task with other values: those that stand once in its request, and once in
    its calls.

    draw: a random.Random. Texts with digits, defaults, booleans and values that are a part of another
    one stay.
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
        before, after = text[:places[0].start()], text[places[0].end():]
        schema = {"maximum": 23, **schema} if after.startswith(":") else schema  # an hour, 7:00
        kind = "places" if re.search(r"\b(?<!for )the $", before) and own[-1:] != "s" else "things"
        other = _other(value, schema, kind, draw)
        # a value that stands in the request already would stand there twice
        if other is None or not conforms(other, schema) or _places(_written(other), text):
            return value
        text = before + _written(other) + after
        return other
    calls = [{**call, "arguments": each(call["arguments"], tools[call["name"]]["parameters"], swap)}
             for call in task.spec["calls"]]
    return text, calls


def _written(value) -> str:
    return value if isinstance(value, str) else canonical(value)


def _places(value: str, text: str) -> list:
    """Where a value stands in a text, not as a part of a word or of another number."""
    return list(re.finditer(rf"(?<![\w.,:/-]){re.escape(value)}(?!\w|[.,/-]\d)", text)) if value else []


def _other(value, schema: dict, kind: str, draw):
    """Another value of the same kind, or None if there is none. kind: of WORDS, what lower case becomes."""
    if "enum" in schema:
        rest = [v for v in schema["enum"] if v != value and isinstance(v, type(value))]
        return draw.choice(rest) if rest else None
    if isinstance(value, str):
        if names := [names for names in (WORDS["days"], WORDS["months"]) if value in names]:
            return draw.choice(names[0])
        if value.isalpha() and value.isupper():  # a code, such as EUR
            return "".join(draw.choices(ascii_uppercase, k=len(value)))
        if any(c.isdigit() or c > "\u024f" for c in value):  # a date, a time, a code; another script
            return None
        like = lambda w: draw.choice(WORDS[kind]) + "s" * w.endswith("s") if w.islower() else \
            draw.choice(WORDS["names"])
        return draw.choice(WORDS["messages"]) if value.count(" ") > 1 and value.islower() else \
            " ".join(map(like, value.split()))
    if not isinstance(value, int) or value <= 0:
        return None
    size = 10 ** len(str(value))  # as many digits
    least, most = max(schema.get("minimum", 1), size // 10), min(schema.get("maximum", size), size - 1)
    return draw.randint(int(least), int(most)) if least < most else None
