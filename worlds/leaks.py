"""What a simulator may not get away with: tasks that state their answer, or ask for other than
their calls.

Eq. 1 compares an answer with the task's own reference. A task that states its calls is solved by
copying, and one whose calls do not follow from the request is solved by luck alone; R_env would
reward both wherever their p_hat lands near alpha.

`leaks` reads teacher's tasks as well, so it refuses only what a fair task never has: a text that
states the call, a question that contains its answer. `loopholes` is for the simulator's tasks
alone. A text of a call stands in the request if half of its words do ("Berkeley, CA" for Berkeley),
a number also in words or in a larger unit, a date with its month's name; a boolean may be named by
its argument instead. Defaults need no words.

Deviations: these checks compare words. "Council Bluffs, VA" passes, "Berlin" for "the capital of
Germany" does not; no base task is refused by them.
"""
import calendar
import re
from os.path import commonprefix

from data_pool import Task
from worlds import task_texts
from worlds.schemas import as_read, canonical, joined, leaves, normal_calls, objects_of, \
    structured, texts_as_read, tools_of, words_of

AGAIN = {"again", "repeat", "repeatedly", "each", "every", "times", "twice"}
NO = {"no", "not", "without", "off", "false", "never", "don", "isn", "doesn", "none", "un"}
SMALL = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
         "fifteen sixteen seventeen eighteen nineteen").split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
SPELT = {"no": 0, **{word: n for n, word in enumerate(SMALL)},
         **{word: 10 * n for n, word in enumerate(TENS, 2)}, "hundred": 100}
MONTHS = {month.lower(): n for names in (calendar.month_name, calendar.month_abbr)
          for n, month in enumerate(names) if month}
FACTORS = {"thousand": 1e3, "k": 1e3, "million": 1e6, "percent": 0.01,
           "hour": 60, "hours": 60, "weeks": 7}
STEM = 4  # letters in which two forms of a word agree at least
# not a part of a time, a date or a code
DIGITS = re.compile(r"(?<![\w.,:/-])\d+(?:\.\d+)?(?![\w:/-])")


def leaks(task: Task) -> str:
    """Why there is nothing left to answer: "answer leaked", or ""."""
    stated = states_a_call(task) if structured(task) else states_an_answer(task)
    return "answer leaked" if stated else ""


def loopholes(task: Task) -> str:
    """Why a task of the simulator's is solved by guessing: one of REASONS, or ""."""
    if not structured(task):
        return "more than one answer" if len(task.spec["reference"]) > 1 else ""
    texts = normal_calls(task.spec["calls"], tools_of(task), ordered=False)
    repeats = len(set(texts)) < len(texts)
    if repeats and AGAIN.isdisjoint(words_of(task.text)):
        return "more than one answer"
    if ungrounded(task):
        return "not in the request"
    if uncalled(task):
        return "not in the calls"
    return ""


# ---------------------------------------------------------------------------------------------
# does the text give the answer away?


def states_an_answer(task: Task) -> bool:
    """Whether a question contains one of its answers, whole words."""
    words = words_of(task.text)
    if "or" in words:  # the question offers several
        return False
    text = f" {' '.join(words)} "
    for reference in task.spec["reference"]:
        answer = " ".join(words_of(reference))
        # numbers, yes and no stand there for other reasons
        is_usual = re.fullmatch(r"-?[\d.]+|yes|no|true|false", answer)
        if not is_usual and f" {answer} " in text:
            return True
    return False


def states_a_call(task: Task) -> bool:
    """Whether a request, or a text of its tools, has a call's JSON, its arguments or `name(` in
    it."""
    calls = task.spec["calls"]
    if not calls:
        return False
    # arguments without members are no answer
    parts = [*calls, *(call["arguments"] for call in calls if call["arguments"])]
    answers = {canonical(texts_as_read(part)) for part in parts}
    names = "|".join(re.escape(call["name"]) for call in calls)
    spelt = re.compile(rf"<tool_call>|(?<![\w.])(?:{names})\(")
    for text in map(as_read, [task.text, *task_texts(task.spec["tools"])]):
        if spelt.search(text):
            return True
        if any(canonical(texts_as_read(value)) in answers for value in objects_of(text)):
            return True
    return False


# ---------------------------------------------------------------------------------------------
# does the request say what the calls have?


class Request:
    """What a text says, read once for all values of its calls."""

    def __init__(self, text: str):
        words = words_of(text)
        self.letters = "".join(words)
        self.words = by_stem(words)
        # "unlock" speaks of locked = false
        self.undone = by_stem(re.sub("^(un|dis|de)", "", word) for word in words)
        self.denies = not NO.isdisjoint(words)
        self.numbers = numbers_of(text)
        self.products = {rounded(n * factor) for n in self.numbers for factor in factors(text)}


def ungrounded(task: Task) -> str:
    """The values of the calls that do not stand in the request, as `name = value, ...`; or ""."""
    request, missing = Request(task.text), []
    for value, schema, name in leaves(task):
        if not is_default(value, schema) and not stands(value, name, request):
            missing.append(f"{name} = {canonical(value)}")
    return ", ".join(missing)


def is_default(value, schema: dict) -> bool:
    """Whether a value goes without saying: its schema's default, or an object without members."""
    if "default" in schema:
        return canonical(value) == canonical(schema["default"])
    return value == {}


def uncalled(task: Task) -> str:
    """A number in digits that the request names and no call has; or ""."""
    calls = task.spec.get("calls", ())
    if not calls:
        return ""
    numbers = numbers_of(" ".join(normal_calls(calls, tools_of(task), ordered=False)))
    called = {rounded(n / factor) for n in numbers for factor in factors(task.text)}
    for digits in DIGITS.findall(joined(task.text)):
        number = rounded(float(digits))
        # 7 may be 7 pm
        if number and called.isdisjoint((number, number + 12)):
            return digits
    return ""


def stands(value, name: str, request: Request) -> bool:
    """Whether a value without parts stands in a request, or its argument if it is neither text nor
    number."""
    if isinstance(value, bool) or value in (None, "", [], {}):
        is_undone = value is False and has(name, request.undone)
        return has(name, request.words) or is_undone or request.denies
    if isinstance(value, str):
        return text_stands(value, request)
    return rounded(abs(value)) in request.products


def text_stands(value: str, request: Request) -> bool:
    """Whether half of the words of a value stand in a request, numbers also in other words."""
    parts, present = words_of(value), 0
    for part in parts:
        present += has(part, request.words) or not request.numbers.isdisjoint(numbers_of(part))
    if parts and 2 * present >= len(parts):
        return True
    # a text without blanks between its words, such as a Chinese one, stands there as it is
    letters = "".join(parts)
    return letters > "\u2e80" and letters in request.letters


def by_stem(words) -> dict:
    """{the first STEM letters: words that begin with them}, to find an inflected word."""
    stems = {}
    for word in words:
        stems.setdefault(word[:STEM], set()).add(word)
    return stems


def has(phrase: str, stems: dict) -> bool:
    """Whether one of the words of a phrase is among others, or inflected."""
    for part in words_of(phrase):
        if any(is_inflected(part, word) for word in stems.get(part[:STEM], ())):
            return True
    return False


def is_inflected(one: str, other: str) -> bool:
    """Whether two words are one: of the longer one the first half agrees, STEM letters at least,
    and no more than the last four do not (Cooper is not Cooperative)."""
    longest = max(len(one), len(other))
    common = len(commonprefix([one, other]))
    return one == other or common >= max(STEM, longest / 2, longest - 4)


# ---------------------------------------------------------------------------------------------
# numbers in words


def rounded(number: float) -> float:
    """A number to 15 digits: 0.3 / 0.01 is 30."""
    return float(f"{number:.15g}")


def factors(text: str) -> set:
    """What a number of a text may be multiplied by: 1, and more where the text has a unit."""
    words = words_of(text.replace("%", " percent "))
    return {1, *(FACTORS[word] for word in words if word in FACTORS)}


def numbers_of(text: str) -> set:
    """Numbers of a text, in digits and in words, without their signs; 3 pm is 15, too."""
    numbers, before = [], ""  # before: the last word, if it is a part of a number
    for word in words_of(text):
        if word == "and" and before == "hundred":
            continue
        number = number_of(word)
        if before and word == "hundred":
            numbers[-1] *= 100
        elif before and word in ("pm", "p"):
            numbers.append(numbers[-1] + 12)
        elif goes_on(before, word):
            numbers[-1] += number
        elif number is not None:
            numbers.append(number)
        before = "" if number is None else word
    return set(numbers)


def number_of(word: str):
    """The number that a word is, a month's for its name; or None."""
    if word[-1].isdecimal():
        return abs(float(word))
    return MONTHS.get(word, SPELT.get(word))


def goes_on(before: str, word: str) -> bool:
    """Whether a word goes on with a number: thirty-five, one hundred and five."""
    if before in TENS:
        return 0 < SPELT.get(word, 0) < 10
    return before == "hundred" and word in SPELT
