"""Refuse a simulator's tasks that give their answer away, or that ask for something other than what
their calls do.

Eq. 1 compares an answer with the task's own reference. A task that states its calls is solved by
copying, and one whose calls do not follow from the request is solved only by luck; R_env would
reward both wherever their p_hat lands near alpha.

`leaks` also reads a teacher's tasks, so it refuses only what a fair task never has: a text that
states the call, or a question that contains its answer. `loopholes` is only for the simulator's
tasks. Their request has to mention every value of the calls: a text by half of its words
("Berkeley, CA" by Berkeley), a boolean by the name of its argument. It need not mention defaults.

Deviations: only words and digits are compared. So "thirty", "7 pm" for 19 and "30 %" for 0.3 are
refused (commit b946650 read them), but the wrong value "Council Bluffs, VA" passes, because most of
its words are mentioned. A base task is never refused, but in a warm start the simulator does not
imitate one that these rules would refuse.
"""
import re
from os.path import commonprefix

from worlds import task_texts
from worlds.tools.schemas import canonical, leaves, normal_calls, objects_of, structured, tools_of
from worlds.tools.texts import as_read, joined, texts_as_read, words_of

# words_of splits at apostrophes: "don't" is "don" and "t"
NEGATIONS = {"no", "not", "without", "off", "false", "never", "don", "isn", "doesn", "none", "un"}
STEM = 4            # two forms of a word agree in at least this many letters
LONGEST_ENDING = 4  # and differ in at most this many letters at their ends
FIRST_CJK = "\u2e80"  # the characters of Chinese, Japanese and Korean begin here
# a number in digits that is not part of a time, a date or a code
DIGITS = re.compile(r"(?<![\w.,:/-])\d+(?:\.\d+)?(?![\w:/-])")


def leaks(task) -> str:
    """Return why there is nothing left to answer: "answer leaked", or ""."""
    stated = states_a_call(task) if structured(task) else states_an_answer(task)
    return "answer leaked" if stated else ""


def loopholes(task) -> str:
    """Return why it would take luck to solve a simulator's task: one of REASONS, or ""."""
    if not structured(task):
        return "more than one answer" if len(task.spec["reference"]) > 1 else ""
    # if a call occurs twice, making it once would mostly be just as right
    texts = normal_calls(task.spec["calls"], tools_of(task), ordered=False)
    if len(set(texts)) < len(texts):
        return "more than one answer"
    if ungrounded(task):
        return "not in the request"
    if uncalled(task):
        return "not in the calls"
    return ""


# ---------------------------------------------------------------------------------------------
# does the text give the answer away?


def states_an_answer(task) -> bool:
    """Return whether a question contains one of its answers, in whole words.

    A question with an "or" never counts: it offers several answers.
    """
    words = words_of(task.text)
    if "or" in words:
        return False
    text = f" {' '.join(words)} "
    for reference in task.spec["reference"]:
        answer = " ".join(words_of(reference))
        # a question may contain numbers, these words and single letters for other reasons
        is_common_word = re.fullmatch(r"-?[\d.]+|yes|no|true|false|the|an|.", answer)
        if not is_common_word and f" {answer} " in text:
            return True
    return False


def states_a_call(task) -> bool:
    """Return whether a request, or a text of its tools, contains the JSON of a call or of its
    arguments, `name(` of a called function, or the tag <tool_call>."""
    calls = task.spec["calls"]
    if not calls:
        return False
    # empty arguments give nothing away
    parts = [*calls, *(call["arguments"] for call in calls if call["arguments"])]
    answers = {canonical(texts_as_read(part)) for part in parts}
    names = "|".join(re.escape(call["name"]) for call in calls)
    start_of_call = re.compile(rf"<tool_call>|(?<![\w.])(?:{names})\(")
    for text in map(as_read, [task.text, *task_texts(task.spec["tools"])]):
        if start_of_call.search(text):
            return True
        if any(canonical(texts_as_read(value)) in answers for value in objects_of(text)):
            return True
    return False


# ---------------------------------------------------------------------------------------------
# does the request mention the values of the calls?


class Request:
    """Hold what a request mentions; it is read once for all values of the calls."""

    def __init__(self, text):
        words = words_of(text)
        self.letters = "".join(words)
        self.stems = by_stem(words)
        # "unlock" mentions locked = false
        self.stems_without_prefix = by_stem(re.sub("^(un|dis|de)", "", word) for word in words)
        self.has_negation = not NEGATIONS.isdisjoint(words)
        self.numbers = numbers_of(text)


def ungrounded(task) -> bool:
    """Return whether a call has a value that the request does not mention."""
    request, tools = Request(task.text), tools_of(task)
    for call in task.spec["calls"]:
        schema = tools[call["name"]]["parameters"]
        for value, part, name in leaves(call["arguments"], schema):
            if not is_default(value, part) and not is_mentioned(value, name, request):
                return True
    return False


def is_default(value, schema: dict) -> bool:
    """Return whether a value need not be mentioned: a schema's default, or an empty object."""
    if "default" in schema:
        return canonical(value) == canonical(schema["default"])
    return value == {}


def uncalled(task) -> str:
    """Return the first number in digits, as the request writes it, that no call has, or ""."""
    calls = normal_calls(task.spec["calls"], tools_of(task), ordered=False)
    called = numbers_of(" ".join(calls))
    for digits in DIGITS.findall(joined(task.text)):
        number = float(digits)
        # a call may express 0 as false or "off"
        if number and number not in called:
            return digits
    return ""


def is_mentioned(value, name: str, request) -> bool:
    """Return whether a request mentions a value that has no parts.

    A boolean, null or an empty value counts as mentioned if the argument's name is, or if the
    request has any negation.
    """
    if isinstance(value, bool) or value in (None, "", [], {}):
        # accept a "not" for each of them, whatever it negates
        if request.has_negation or mentions(request.stems, name):
            return True
        return value is False and mentions(request.stems_without_prefix, name)
    if isinstance(value, str):
        return text_is_mentioned(value, request)
    return float(abs(value)) in request.numbers


def text_is_mentioned(value: str, request) -> bool:
    """Return whether a request mentions at least half of the words of a value; 04 counts as 4."""
    words, n_mentioned = words_of(value), 0
    for word in words:
        same_number = not request.numbers.isdisjoint(numbers_of(word))
        if same_number or mentions(request.stems, word):
            n_mentioned += 1
    if words and n_mentioned >= len(words) / 2:
        return True
    # Chinese, for example, has no blanks between words: search for the whole text
    letters = "".join(words)
    return letters >= FIRST_CJK and letters in request.letters


def by_stem(words) -> dict:
    """Return {the first STEM letters: words that begin with them}, to find an inflected word."""
    stems = {}
    for word in words:
        stems.setdefault(word[:STEM], set()).add(word)
    return stems


def mentions(stems: dict, phrase: str) -> bool:
    """Return whether a word of a phrase is among those of `stems`, perhaps inflected."""
    for part in words_of(phrase):
        if any(is_inflected(part, word) for word in stems.get(part[:STEM], ())):
            return True
    return False


def is_inflected(one: str, other: str) -> bool:
    """Return whether two words are forms of the same word.

    They agree in the first STEM letters and the first half of the longer one, and differ only in a
    short ending (Cooper is not Cooperative).
    """
    if one == other:
        return True
    longest = max(len(one), len(other))
    same = len(commonprefix([one, other]))
    return same >= STEM and same >= longest / 2 and longest - same <= LONGEST_ENDING


def numbers_of(text) -> set:
    """Return the absolute values of the numbers that a text has in digits."""
    # a word of words_of is a number, perhaps with a point or a minus, or has no digits
    return {abs(float(word)) for word in words_of(text) if word[-1].isdecimal()}
