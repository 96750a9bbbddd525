"""What a simulator may not get away with: tasks that state their answer, or ask for other than their calls.

Eq. 1 compares an answer with the task's own reference. A task that states its calls is solved by
copying, and one whose calls do not follow from the request is solved by luck alone; R_env would reward
both wherever their p_hat lands near alpha.

`leaks` reads teacher's tasks as well, so it refuses only what a fair task never has: a text that states
the call, a question that contains its answer. `loopholes` is for the simulator's tasks alone. A text of
a call stands in the request if half of its words do ("Berkeley, CA" for Berkeley), a number also as a
word or in a larger unit, a date with its month's name; a boolean or a value of an enum may be named by its
argument instead. Defaults need no words.

Deviations: these checks compare words. "Council Bluffs, VA" passes, "Berlin" for "the capital of Germany"
does not; tasks from files are never checked.
"""
import calendar
import json
import re
import unicodedata
from os.path import commonprefix

from data_pool import Task
from worlds import task_texts
from worlds.schemas import branch, canonical, normal_calls, normal_words, objects_of, structured, tools_of

AGAIN = {"again", "repeat", "repeatedly", "each", "every", "times", "twice"}
SMALL = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen " \
        "sixteen seventeen eighteen nineteen".split()
ORDINAL = "zeroth first second third fourth fifth sixth seventh eighth ninth tenth".split()
TENS = {w: 10 * n for n, w in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}
NUMBER_WORDS = {**TENS, **{word: n for words in (SMALL, ORDINAL) for n, word in enumerate(words)},
                **{name[:3].lower(): n for n, name in enumerate(calendar.month_abbr) if name},
                **{name.lower(): n for n, name in enumerate(calendar.month_name) if name},
                "once": 1, "twice": 2, "dozen": 12, "half": 0.5, "an": 1, "no": 0}
FACTORS = {"hundred": (100,), "thousand": (1e3,), "k": (1e3,), "million": (1e6,), "percent": (0.01,),
           "hour": (60, 3600), "hours": (60, 3600), "minutes": (60,), "week": (7,), "weeks": (7,)}
NO = {"no", "not", "without", "off", "false", "never", "don", "isn", "doesn", "none", "un"}
DIGITS = re.compile(r"(?<![\w.,:/-])\d+(?:\.\d+)?(?![\w:/-])")  # not a part of a time, a date or a code


def leaks(task: Task) -> str:
    """Why there is nothing left to answer: "answer leaked", or ""."""
    if not structured(task):
        words = normal_words(task.text)
        stated = [" ".join(normal_words(answer)) for answer in task.spec["reference"]]
        # numbers, yes and no, and options that the question offers stand there for other reasons
        return "answer leaked" if "or" not in words and any(
            f" {answer} " in f" {' '.join(words)} " for answer in stated
            if not re.fullmatch(r"\d+|yes|no|true|false", answer)) else ""
    calls = task.spec["calls"]
    answers = {canonical(part) for call in calls for part in (call, call["arguments"]) if part}
    names = "|".join(re.escape(call["name"]) for call in calls)
    for text in [task.text, *task_texts(task.spec["tools"])]:
        if calls and ("<tool_call>" in text or re.search(rf"(?<![\w.])(?:{names})\(", text)) \
                or not answers.isdisjoint(canonical(found) for found, _ in objects_of(text)):
            return "answer leaked"
    return ""


def loopholes(task: Task) -> str:
    """Why a task of the simulator's is solved by copying or by guessing: one of REASONS, or ""."""
    if not structured(task):
        return "more than one answer" if len(task.spec["reference"]) > 1 else ""
    calls = task.spec["calls"]
    if all(len(call["arguments"]) > 1 and spells(task.text, call["arguments"]) for call in calls):
        return "answer leaked"
    texts = normal_calls(calls, tools_of(task), ordered=False)
    equal = max(map(texts.count, texts), default=1)
    asked = equal in numbers_of(task.text) or not AGAIN.isdisjoint(words_of(task.text))
    if equal > 1 and not asked:
        return "more than one answer"
    return "not in the request" if ungrounded(task) else "not in the calls" * bool(uncalled(task))


def spells(text: str, arguments: dict) -> bool:
    """Whether a text has every argument as `name = value` or `name: value`."""
    def spelt(name, value):
        value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        between = r"[\"'`]?\s*[:=]\s*[\"'`]?"
        return re.search(rf"(?<!\w){re.escape(name)}{between}{re.escape(value)}(?!\w)", text, re.IGNORECASE)
    return all(spelt(name, value) for name, value in arguments.items())


# ---------------------------------------------------------------------------------------------
# does the request say what the calls have?


def ungrounded(task: Task) -> str:
    """The first value of the calls that does not stand in the request, as `name = value`; or ""."""
    tools = tools_of(task)
    for call in task.spec.get("calls", ()):
        for name, value, schema in leaves(call["arguments"], tools[call["name"]]["parameters"]):
            if canonical(value) != canonical(schema.get("default", {})) and not stands(
                    value, name, schema, task.text):
                return f"{name} = {canonical(value)}"
    return ""


def uncalled(task: Task) -> str:
    """A number in digits that the request names and no call has; or ""."""
    called = " ".join(normal_calls(task.spec.get("calls", ()), tools_of(task), ordered=False))
    known = {n / factor for n in numbers_of(called) for factor in (1, *factors(words_of(task.text)))}
    return next((digits for digits in DIGITS.findall(_joined(task.text)) if called and float(digits)
                 and known.isdisjoint((float(digits), float(digits) + 12))), "")


def leaves(value, schema: dict, name: str = ""):
    """(name, value, schema) of every part of a value that has no parts."""
    schema = branch(value, schema)
    if isinstance(value, dict) and value:
        inner = schema.get("properties", {})
        for key, part in value.items():
            yield from leaves(part, inner.get(key, {}), key)
    elif isinstance(value, list) and value:
        for part in value:
            yield from leaves(part, schema.get("items", {}), name)
    else:
        yield name, value, schema


def stands(value, name: str, schema: dict, text: str) -> bool:
    """Whether a value without parts stands in a request, or its argument if it is one of few."""
    words, numbers = words_of(text), numbers_of(text)
    if isinstance(value, bool) or value in (None, "", [], {}):
        return has(name, words) or not NO.isdisjoint(words)
    if isinstance(value, str):
        parts = words_of(value)
        found = sum(has(part, words) or not numbers_of(part).isdisjoint(numbers) for part in parts)
        found = 2 * found >= len(parts) > 0 or "".join(parts) in "".join(words) > "\u2e80"
    else:
        near = {n * f for n in numbers for f in (1, *factors(words))}
        found = any(abs(abs(value) - n) <= 1e-9 * max(1, n) for n in near)
    others = [v for v in schema.get("enum", ()) if v != value and isinstance(v, str)]
    named = "enum" in schema and has(name, words) and not any(stands(v, "", {}, text) for v in others)
    return found or named


def words_of(text: str) -> list[str]:
    """Words and numbers of a text: lower case, no accents, camelCase in parts."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", _joined(text)).replace("%", " percent ").lower()
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return re.findall(r"\d+(?:\.\d+)?|[^\W\d_]+", text)


def _joined(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # 2,000 is one number


def has(phrase: str, words) -> bool:
    """Whether one of the words of a phrase is among `words`, or inflected: half of the letters agree."""
    return any(part == word or len(commonprefix([part, word])) >= max(4, len(part) / 2, len(word) / 2)
               for part in words_of(phrase) for word in words)


def factors(words) -> set:
    """What a number may be multiplied by, as one of the words is a unit."""
    return {factor for word in words for factor in FACTORS.get(word, ())}


def numbers_of(text: str) -> set:
    """Numbers of a text, in digits and in words; 3 pm is 15, too."""
    found, words = set(), words_of(text)
    for word, after in zip(words, [*words[1:], ""]):
        n = float(word) if word[0].isascii() and word[0].isdigit() else NUMBER_WORDS.get(word)
        if n is not None:
            found |= {n, n + 12} if after in ("pm", "p") else {n}
            found |= {n + NUMBER_WORDS.get(after, 0)} if word in TENS else set()
    return found
