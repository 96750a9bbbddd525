"""An example with other values: the same request and the same calls, other names and numbers.

A warm start from few examples teaches a small model their values by heart: asked for the light in
the bedroom it turns on that of the bathroom, which an example had. If every pass shows other
values, they can only be read from the request. No run of the loop and no held-out task is ever
changed by it.

Deviations: it knows no meaning. A name becomes a name, what follows "the" a place, three words or
more a sentence, other words things, all of them English (worlds/tools/words.json): "Put the haircut on
Tuesday" may become "Put the lobby on Sunday", an odd request, and its call is right. The values of
other examples would read better, but twenty examples have one or two of each argument, which are
soon known by heart.
"""
import json
import re
from pathlib import Path

from worlds.tools.schemas import canonical, conforms, each, leaves, tools_of

WORDS = json.loads(Path(__file__).with_name("words.json").read_text())  # {kind: texts}
# before it a word or a number may not go on, nor after it
BEFORE, AFTER = r"(?<![\w.,:/-])", r"(?!\w|[.,:/-]\d)"


def swapped(task, draw):
    """(request, calls) of a task with other values: those that stand once in its request, and once
    in its calls.

    draw: a random.Random. Texts with digits, codes such as EUR, defaults, booleans and values that
    are a part of another one stay.
    """
    request, calls = Request(task, draw), []
    for call in task.spec["calls"]:
        parameters = tools_of(task)[call["name"]]["parameters"]
        arguments = each(call["arguments"], parameters, request.change)
        calls.append({**call, "arguments": arguments})
    return request.text, calls


class Request:
    """A task's request, in which one value after the other is changed."""

    def __init__(self, task, draw):
        self.text, self.draw = task.text, draw
        # the values of all calls, as a request writes them
        self.values = [written(value) for value, _, _ in leaves(task)]

    def change(self, value, schema: dict, _):
        """Another value in place of one, here and in the text; the same one if it is not sure what
        in the text it is."""
        place = self.place_of(value, schema)
        if place is None:
            return value
        before, after = self.text[:place.start()], self.text[place.end():]
        # "the study" is a place; "the lights" and "for the milk" are not
        has_article = re.search(r"\b(?<!for )the $", before)
        kind = "places" if has_article and not place[0].endswith("s") else "things"
        other = other_value(value, schema, kind, self.draw)
        # one that the text has already would be there twice
        if other is None or not conforms(other, schema) or places(written(other), self.text):
            return value
        self.text = before + written(other) + after
        return other

    def place_of(self, value, schema: dict):
        """Where in the text a value is, if that is sure; else None."""
        text = written(value)
        if isinstance(value, bool) or value == schema.get("default"):
            return None
        # it is in no other value, and no other value is in it
        alike = [other for other in self.values if other and (other in text or text in other)]
        found = places(text, self.text)
        return found[0] if len(found) == len(alike) == 1 else None


def written(value) -> str:
    """A value as a request writes it."""
    return value if isinstance(value, str) else canonical(value)


def places(value: str, text) -> list:
    """Where a value stands in a text, not as a part of a word or of another number."""
    if not value:
        return []
    return list(re.finditer(BEFORE + re.escape(value) + AFTER, text))


def other_value(value, schema: dict, kind: str, draw):
    """Another value of the same kind, or None if there is none. kind: of WORDS, what becomes of
    words in lower case."""
    if "enum" in schema:
        others = [v for v in schema["enum"] if v != value and isinstance(v, type(value))]
        return draw.choice(others) if others else None
    if isinstance(value, str):
        return other_text(value, kind, draw)
    if isinstance(value, int) and value > 0:
        return other_number(value, schema, draw)
    return None


def other_text(value: str, kind: str, draw):
    """Another text of the same kind, or None."""
    for names in (WORDS["days"], WORDS["months"]):
        if value in names:
            return draw.choice(names)
    # a date, a time, a code; another script
    if value.isupper() or any(sign.isdigit() or sign > "\u024f" for sign in value):
        return None
    if value.islower() and value.count(" ") > 1:
        return draw.choice(WORDS["messages"])
    words = []
    for word in value.split():
        other = draw.choice(WORDS[kind] if word.islower() else WORDS["names"])
        is_plural = word.islower() and word.endswith("s")
        words.append(other + "s" if is_plural else other)
    return " ".join(words)


def other_number(value: int, schema: dict, draw):
    """Another whole number of as many digits, or None."""
    size = 10 ** len(str(value))
    least = max(schema.get("minimum", 1), size // 10)
    most = min(schema.get("maximum", size), size - 1)
    return draw.randint(int(least), int(most)) if least < most else None
