"""What a simulator may not get away with: tasks that state their answer, or ask for other than their calls.

Eq. 1 compares an answer with the task's own reference. A task that states its calls is solved by
copying, and one whose calls do not follow from the request is solved by luck alone; R_env would reward
both wherever their p_hat lands near alpha.

`leaks` reads teacher's tasks as well, so it refuses only what a fair task never has: a text that states
the call, a question that contains its answer. `loopholes` is for the simulator's tasks alone. A text of
a call stands in the request if half of its words do ("Berkeley, CA" for Berkeley), a number also as a
word or in a larger unit, a date with its month's name; a boolean may be named by its argument instead.
Defaults need no words.

Deviations: these checks compare words. "Council Bluffs, VA" passes, "Berlin" for "the capital of Germany"
does not; no base task is refused by them.
"""
import calendar
import re
from os.path import commonprefix

from data_pool import Task
from worlds import task_texts
from worlds.schemas import canonical, joined, leaves, normal_calls, objects_of, structured, tools_of, words_of

AGAIN = {"again", "repeat", "repeatedly", "each", "every", "times", "twice"}
SMALL = "no one two three four five six seven eight nine ten eleven twelve".split()
NUMBER_WORDS = {word.lower(): n for names in (SMALL, calendar.month_name, calendar.month_abbr)
                for n, word in enumerate(names) if word}
FACTORS = {"thousand": 1e3, "k": 1e3, "million": 1e6, "percent": 0.01, "hour": 60, "hours": 60, "weeks": 7}
NO = {"no", "not", "without", "off", "false", "never", "don", "isn", "doesn", "none", "un"}
DIGITS = re.compile(r"(?<![\w.,:/-])\d+(?:\.\d+)?(?![\w:/-])")  # not a part of a time, a date or a code


def leaks(task: Task) -> str:
    """Why there is nothing left to answer: "answer leaked", or ""."""
    if not structured(task):
        words = words_of(task.text)
        stated = [" ".join(words_of(answer)) for answer in task.spec["reference"]]
        # numbers, yes and no, and options that the question offers stand there for other reasons
        return "answer leaked" if "or" not in words and any(
            f" {answer} " in f" {' '.join(words)} " for answer in stated
            if not re.fullmatch(r"-?[\d.]+|yes|no|true|false", answer)) else ""
    calls = task.spec["calls"]
    answers = {canonical(part) for call in calls for part in (call, call["arguments"]) if part}
    names = "|".join(re.escape(call["name"]) for call in calls)
    for text in [task.text, *task_texts(task.spec["tools"])]:
        if calls and ("<tool_call>" in text or re.search(rf"(?<![\w.])(?:{names})\(", text)) \
                or not answers.isdisjoint(canonical(found) for found, _ in objects_of(text)):
            return "answer leaked"
    return ""


def loopholes(task: Task) -> str:
    """Why a task of the simulator's is solved by guessing: one of REASONS, or ""."""
    if not structured(task):
        return "more than one answer" if len(task.spec["reference"]) > 1 else ""
    texts = normal_calls(task.spec["calls"], tools_of(task), ordered=False)
    if len(set(texts)) < len(texts) and AGAIN.isdisjoint(words_of(task.text)):
        return "more than one answer"
    return "not in the request" if ungrounded(task) else "not in the calls" * bool(uncalled(task))


# ---------------------------------------------------------------------------------------------
# does the request say what the calls have?


def ungrounded(task: Task) -> str:
    """The values of the calls that do not stand in the request, as `name = value, ...`; or ""."""
    return ", ".join(
        f"{name} = {canonical(value)}" for call in task.spec.get("calls", ())
        for value, schema, name in leaves(call["arguments"], tools_of(task)[call["name"]]["parameters"])
        if canonical(value) != canonical(schema.get("default", {})) and not stands(value, name, task.text))


def uncalled(task: Task) -> str:
    """A number in digits that the request names and no call has; or ""."""
    calls = " ".join(normal_calls(task.spec.get("calls", ()), tools_of(task), ordered=False))
    called = {n / factor for n in numbers_of(calls) for factor in factors(task.text)}
    return next((digits for digits in DIGITS.findall(joined(task.text)) if calls and float(digits)
                 and called.isdisjoint((float(digits), float(digits) + 12))), "")


def stands(value, name: str, text: str) -> bool:
    """Whether a value without parts stands in a request, or its argument if it is neither text nor number."""
    words, numbers = words_of(text), numbers_of(text)
    if isinstance(value, bool) or value in (None, "", [], {}):
        # "unlock" names locked = false
        turned = [re.sub("^(un|dis|de)", "", word) for word in words if value is False]
        return has(name, words + turned) or not NO.isdisjoint(words)
    if isinstance(value, str):
        parts = words_of(value)
        found = sum(has(part, words) or not numbers_of(part).isdisjoint(numbers) for part in parts)
        # a text without blanks between its words, such as a Chinese one, stands there as it is
        return 2 * found >= len(parts) > 0 or "".join(parts) in "".join(words) > "\u2e80"
    return any(abs(abs(value) - n * f) <= 1e-9 * max(1, n) for n in numbers for f in factors(text))


def has(phrase: str, words) -> bool:
    """Whether one of the words of a phrase is among `words`, or inflected: of the longer word the first half
    agrees, four letters at least, and no more than the last four do not (Cooper is not Cooperative)."""
    return any(part == word or len(commonprefix([part, word])) >= max(4, n / 2, n - 4)
               for part in words_of(phrase) for word in words for n in [max(len(part), len(word))])


def factors(text: str) -> set:
    """What a number of a text may be multiplied by: 1, and more where the text has a unit."""
    return {1, *(FACTORS[word] for word in words_of(text.replace("%", " percent ")) if word in FACTORS)}


def numbers_of(text: str) -> set:
    """Numbers of a text, in digits and in words, without their signs; 3 pm is 15, too."""
    found, words = set(), words_of(text)
    for word, after in zip(words, [*words[1:], ""]):
        n = abs(float(word)) if word[-1].isdecimal() else NUMBER_WORDS.get(word)
        if n is not None:
            found |= {n, n + 12} if after in ("pm", "p") else {n}
    return found
