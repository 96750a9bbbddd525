"""Does every value of a task's calls stand in its request, and every number of it in the calls?

What of the paper this is: nothing. Eq. 1 compares an answer with the task's own reference, so a
reference that does not follow from the request is met by luck alone. A small simulator writes more
such references than right ones.

How it is run: `ungrounded(task)` and `uncalled(task)` by worlds/tool_calls.py on every task that the
simulator writes (world option `ground`). `python -m scripts.experiments.grounding` measures both on tasks
read by hand.

What counts: a text stands in the request if half of its words do ("Berkeley, CA" for Berkeley). A
number may also stand there as a word, as a percentage or in a larger unit; a date or a time in
another spelling. A boolean or a value of an enum may be named by its argument instead. In an
episode a value may also come from what an earlier call returned. Values equal to the schema's
default are left out. The other way round only what is certain is looked at: numbers in digits, days
of the week, and booleans whose argument the request names ("the urgent message").

Where it differs on purpose: it compares words and knows no meaning. "Council Bluffs, VA" passes,
"Berlin" for "the capital of Germany" does not. So tasks from files are never checked.
"""
import re
import unicodedata
from typing import NamedTuple

from data_pool import Task
from worlds.schemas import branch, canonical, kinds, structured, tools_of

TENS = {word: 10 * n for n, word in enumerate(
    "twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}
COUNTING = TENS | {word: n for names in (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen", "zeroth first second third fourth fifth sixth seventh "
    "eighth ninth tenth eleventh twelfth") for n, word in enumerate(names.split())}
NUMBER_WORDS = COUNTING | {word: n for names in (
    "no once twice thrice", "none single double triple quadruple", "no one both", "no one couple",
    "no one pair") for n, word in enumerate(names.split())} | {
    "dozen": 12, "half": 0.5, "quarter": 0.25, "decade": 10, "fortnight": 14, "quarterly": 4,
    "monthly": 12, "yearly": 1, "annually": 1}
SCALES = {"hundred": 100, "thousand": 1e3, "k": 1e3, "million": 1e6, "m": 1e6, "billion": 1e9}
# what a number may be multiplied by, where the request has the unit
UNITS = {"percent": (0.01,), "week": (7,), "hour": (60, 3600), "minute": (60,), "year": (12,),
         "kilometers": (1000,), "kilograms": (1000,), "meters": (100,), "centimeters": (0.01,)}
SAME = {word: group.split() for group in (  # words that stand for each other
    "dollar dollars usd", "euro euros eur", "pound pounds gbp lb lbs", "yen jpy", "yuan cny rmb",
    "rupee rupees inr", "km kilometer kilometers kilometre kilometres", "mi mile miles",
    "kg kilogram kilograms", "g gram grams", "m meter meters metre metres", "ft foot feet",
    "cm centimeter centimeters centimetre centimetres", "inch inches", "c celsius centigrade",
    "f fahrenheit", "usa us america american", "uk britain british", "max maximum", "min minimum")
    for word in group.split()}
SIGNS = {"$": " dollar ", "€": " euro ", "£": " pound ", "¥": " yen ", "%": " percent "}
# words that say nothing of a value, or of which argument is meant
FILLERS = set("a an the of in on at and or to for is are with by from include has use show".split())
YES_NO = {True: {"yes", "true"},  # "don" is what is left of don't
          False: {"no", "not", "without", "off", "false", "never", "don", "isn", "doesn"}}
NOTHING = set("no none nothing empty without any all".split())
WEEKDAYS = set("monday tuesday wednesday thursday friday saturday sunday".split())
MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
MONTH = (r"(jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"
         r"sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)(?![a-z])\.?")
DAY = r"(?<![\d:])(\d{1,2})(?:st|nd|rd|th)?(?![\d:])"
YEAR = r"(?:,?\s*(\d{4}))?"
DIGITS = re.compile(r"(?<![\w.^])\d++(?:\.\d+)?+(?![\w^-]*[a-z])", re.IGNORECASE)  # no m^2, 10-Q
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # the comma of 2,000, which is one number
TIME = r"(?<![\d:.])(\d{1,2})(?::(\d{2}))?(?::\d{2})?(?:\s*([ap])\.?m\b\.?)?(?![\d:])"


class Request(NamedTuple):
    """What a value may stand in: the request, and in an episode what was returned before."""
    words: list   # in order
    known: set    # the same, and what stands for them
    starts: dict  # the same, by their first three letters
    numbers: set
    dates: list   # (year or None, month, day or None)
    times: set    # minutes of the day


def ungrounded(task: Task) -> str:
    """The first value of the task's calls that does not stand in its request, as `name = value`; ""
    if all do, or if it is a question."""
    if not structured(task):
        return ""
    tools, results = tools_of(task), task.spec.get("results", [])
    request = read(task.text)
    for i, call in enumerate(task.spec["calls"]):
        if results[:i]:
            request = read("\n".join([task.text, *map(canonical, results[:i])]))
        inner = tools[call["name"]]["parameters"].get("properties", {})
        for name, value in call["arguments"].items():
            fault = _missing(value, inner.get(name, {}), name, request)
            if fault:
                return fault
    return ""


def uncalled(task: Task) -> str:
    """A number in digits, a day of the week or a boolean's argument that the request names and no
    call has; "" if there is none, or if it is a question."""
    request, tools, called = read(task.text), tools_of(task), []
    for call in task.spec.get("calls", ()):
        called.append(call["name"])
        for name, schema in tools[call["name"]]["parameters"].get("properties", {}).items():
            value = call["arguments"].get(name, schema.get("default"))
            called += _leaves(value)
            either = (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ()))
            if any("boolean" in kinds(one) for one in either) and value is not True and named(name, request) \
                    and YES_NO[False].isdisjoint(request.words):
                return name
    if not called:
        return ""
    known = words_of(" ".join(called))
    days = [word for word in request.words if word in WEEKDAYS and word not in known
            and word[:3] not in known]
    # a date may be the very day
    return days[0] if days and not any(map(dates_of, called)) else \
        _uncalled_number(task.text, known, request)


def _uncalled_number(text: str, known: list, request: Request) -> str:
    """A number in digits that the text has and the words of the calls have not, or that it has as
    a time and as another number ("at 20:00, for 20 minutes"), and they have once."""
    numbers = [n for word in known for n in numbers_of([word])]
    numbers += numbers_of(known).difference(numbers)  # of several words
    factors = {1, *SCALES.values()}.union(*(UNITS[u] for u in UNITS if has(u, request)))
    text = THOUSANDS.sub("", text)
    hours = {match[1] for match in re.finditer(TIME, text.lower()) if match[2]}
    for said in DIGITS.findall(text):
        n = float(said)
        # 3 pm is 15 o'clock; a 0 is mostly the minutes of 19:00
        meant = {n + 12, *(n * factor for factor in factors)}
        found = sum(any(abs(a - b) <= 1e-9 * b for a in meant) for b in numbers)
        besides = said in hours and re.search(rf"(?<![\w:.]){said}(?![\w:.]|\s*[ap]\.?m)", text)
        if n and found < 1 + bool(besides):
            return said
    return ""


def _missing(value, schema: dict, name: str, request: Request) -> str:
    """The first part of a value that does not stand in the request, as `name = value`, or ""."""
    if "default" in schema and canonical(value) == canonical(schema["default"]):
        return ""
    schema = branch(value, schema)
    if value and isinstance(value, dict):
        inner = schema.get("properties", {})
        # names that the schema does not declare are the writer's own
        own = [_missing(key, {}, name, request) for key in value if key not in inner]
        parts = own + [_missing(v, inner.get(k, {}), k, request) for k, v in value.items()]
        return next(filter(None, parts), "")
    if value and isinstance(value, list):
        parts = (_missing(item, schema.get("items", {}), name, request) for item in value)
        return next(filter(None, parts), "")
    return "" if stands(value, schema, name, request) else f"{name} = {canonical(value)}"


def stands(value, schema: dict, name: str, request: Request) -> bool:
    """Whether a value without parts stands in a request, or its argument if it is one of few."""
    if value in (None, "", [], {}):
        return not NOTHING.isdisjoint(request.words)
    if isinstance(value, bool):
        return named(name, request) or not YES_NO[value].isdisjoint(request.words)
    if isinstance(value, (int, float)):
        found = number_stands(value, name, request)
    else:
        found = text_stands(value, name, request)
    if found or "enum" not in schema:
        return found
    # the argument is named; unless another of its values is
    others = [v for v in schema["enum"] if v != value and isinstance(v, str)]
    return named(name, request) and not any(text_stands(v, name, request) for v in others)


def named(name: str, request: Request) -> bool:
    """Whether one of the words of an argument's name stands in the request."""
    words = [word for word in words_of(name) if word not in FILLERS] or words_of(name)
    return any(has(word, request) for word in words)


# ---------------------------------------------------------------------------------------------
# texts


def words_of(text: str) -> list[str]:
    """Words and numbers of a text: lower case, no accents, $ as a word, camelCase in parts."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
    for sign, word in SIGNS.items():
        text = text.replace(sign, word)
    text = "".join(c for c in unicodedata.normalize("NFKD", text.lower())
                   if not unicodedata.combining(c))
    text = THOUSANDS.sub("", text)
    return re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?|[^\W\d_]+", text)


def has(word: str, request: Request) -> bool:
    """Whether the request has a word, or one that is it inflected or shortened."""
    return word in request.known or any(alike(word, b) for b in request.starts.get(word[:3], ()))


def alike(a: str, b: str) -> bool:
    """Four letters in common that are half of the longer word, or one begins with the other."""
    short, long = sorted((a, b), key=len)
    common = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(short))
    return not a[0].isdecimal() and (common >= max(4, len(long) / 2) or common == len(short) > 2)


def text_stands(value: str, name: str, request: Request) -> bool:
    """Whether half of a text's words stand in the request; a date, a time or a number as such."""
    if value != value.strip():
        return False  # no answer would have that space
    when = value.lower()
    if dates := dates_of(value, whole=True):
        return any(agree(a, b) for a in dates for b in request.dates)
    if is_time(when):
        return not times_of(when, exact=True).isdisjoint(request.times)
    if re.fullmatch(r"-?\d+(\.\d+)?", when):
        return number_stands(float(when), name, request)
    words = [word for word in words_of(value) if word not in FILLERS] or words_of(value)
    joined = "".join(words_of(value))
    # written in one word, or in two; Chinese and Japanese have no blanks between words
    if (len(joined) > 4 or joined >= "\u2e80") and joined in "".join(request.words):
        return True
    found = sum(has(word, request) for word in words)
    return bool(words) and 2 * found >= len(words) or _initials(value, request)


def _initials(value: str, request: Request) -> bool:
    """LA for Los Angeles, and the other way round."""
    spelt = "".join(word[0] for word in request.words)
    if re.fullmatch(r"[A-Z]{3,5}", value):
        return value.lower() in spelt
    words = words_of(value.split(",")[0])
    return len(words) > 1 and "".join(word[0] for word in words) in request.words


# ---------------------------------------------------------------------------------------------
# numbers, dates, times


def numbers_of(words) -> set:
    """Numbers in words and digits: "twenty five", "two hundred and fifty", "2 million", "third"."""
    # total: what a scale has ended, in 1200 the thousand; n: what is said after it, and goes on with
    # a word for less than `room`
    found, total, n, room = set(), 0, None, 0
    for word in [*words, ""]:
        more = COUNTING.get(word, 0)
        if n is not None and 0 < more < room:
            n, room = n + more, 10 * (word in TENS)
        elif n is not None and word in SCALES:
            found.add(n)  # "2 million" may also be 2 of something
            room = SCALES[word]
            total, n = (total, n * room) if room == 100 else (total + n * room, 0)
        elif n is None or word != "and":
            found |= set() if n is None else {total + n}
            digits = word[:1].isdecimal() and word.isascii()
            total, n = 0, float(word) if digits else NUMBER_WORDS.get(word)
            room = 10 * (word in TENS)
    return found


def number_stands(value, name: str, request: Request) -> bool:
    """Whether a number stands in the request, without its sign, or one that a unit makes it of."""
    factors = {f for unit, factors in UNITS.items() for f in factors
               if has(unit, request)}
    # the unit itself stands for one of it: "the next week" is 7 days
    near = {n * f for n in request.numbers for f in {1, *factors}} | factors
    if any(abs(abs(value) - n) <= 1e-9 * max(1, abs(value)) for n in near):
        return True
    months = {MONTHS.index(word[:3]) + 1 for word in request.words if re.fullmatch(MONTH, word)}
    if value in months | {month for _, month, _ in request.dates}:
        return True
    pairs = zip(request.words, request.words[1:])  # "an hour" for hours=1
    return value == 1 and any(a in ("a", "an", "per", "each", "every", "one") and alike(b, word)
                              for a, b in pairs for word in words_of(name))


def dates_of(text: str, whole: bool = False) -> list[tuple]:
    """(year or None, month, day or None) of every date in a text, both readings of 1/2/2023.

    whole: only if the text is one date, with a time behind it or not.
    """
    text, out = text.strip().lower(), []
    around = r"^{}(?:[t ]\d{{1,2}}:.*)?$" if whole else "{}"
    find = lambda pattern: [m.groups() for m in re.finditer(around.format(pattern), text)]
    month = lambda name: MONTHS.index(name[:3]) + 1
    for y, m, d in find(r"(?<!\d)(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})(?!\d)"):
        out.append((int(y), int(m), int(d)))
    for a, b, y in find(r"(?<!\d)(\d{1,2})[-/.](\d{1,2})[-/.](\d{4}|\d{2})(?!\d)"):
        year = int(y) + 2000 * (len(y) == 2)
        out += [(year, int(m), int(d)) for m, d in ((a, b), (b, a)) if int(m) < 13]
    for m, d, y in find(rf"\b{MONTH}\s*(?:the\s+)?{DAY}{YEAR}"):
        out.append((int(y) if y else None, month(m), int(d)))
    for d, m, y in find(rf"{DAY}\s+(?:of\s+)?{MONTH}{YEAR}"):
        out.append((int(y) if y else None, month(m), int(d)))
    for m, y in find(rf"\b{MONTH},?\s+(?:of\s+)?(\d{{4}})(?!\d)"):
        out.append((int(y), month(m), None))
    return out


def agree(value: tuple, known: tuple) -> bool:
    """Whether a value's date is one of the request's, which may leave the year out."""
    return value[1:] == known[1:] and (None in (value[0], known[0]) or value[0] == known[0])


def is_time(text: str) -> bool:
    """Whether a text is a time of the day: 7 pm, 19:00."""
    return bool(re.fullmatch(TIME, text)) and not text.isdigit()


def times_of(text: str, exact: bool = False) -> set:
    """Minutes of the day of every time in a text; 7:30 without am or pm is both, unless exact."""
    out = {minutes for word, minutes in (("noon", 720), ("midnight", 0)) if word in text}
    for match in re.finditer(TIME, text):
        hour, minute, half = int(match[1]), int(match[2] or 0), match[3]
        if half:
            out.add(hour % 12 * 60 + minute + 720 * (half == "p"))
        elif hour < 25:
            out |= {hour * 60 + minute, (hour + 12 * (hour < 13 and not exact)) * 60 + minute}
    return {minutes % 1440 for minutes in out}


def read(text: str) -> Request:
    """A request, ready to be searched."""
    words, starts = words_of(text), {}
    for word in set(words):
        starts.setdefault(word[:3], []).append(word)
    known = {*words, *(other for word in words for other in SAME.get(word, ()))}
    # 3 pm is the number 15
    numbers = numbers_of(words_of(re.sub(TIME, _of_the_day, text.lower())))
    return Request(words, known, starts, numbers, dates_of(text), times_of(text.lower()))


def _of_the_day(match) -> str:
    """A time with am or pm as one of 24 hours; another as it is."""
    hour, minute, half = match.groups()
    return f"{int(hour) % 12 + 12 * (half == 'p')}:{minute or '00'}" if half else match[0]


# ---------------------------------------------------------------------------------------------
# the same task under other names


# words of function names that say nothing of what a function is about
VERBS = set("get find calculate compute search set show list fetch retrieve check convert book "
            "play api info information details data current function".split())


def twin_marks(task: Task) -> list:
    """What a task shares with its twin under another function or argument name, JSON values.

    The calls' values (two or more, names and defaults left out) with a word of the functions' names
    that the request says: "area", 6 and 10 of geometry.area_triangle and of calculate_area, while
    the gcd and the lcm of 12 and 18 stay two tasks. Empty for a question.
    """
    tools, values, names = tools_of(task), [], []
    for call in task.spec.get("calls", ()):
        schemas = tools[call["name"]]["parameters"].get("properties", {})
        values.append(sorted(leaf for name, value in call["arguments"].items()
                             if canonical(value) != canonical(schemas.get(name, {}).get("default", {}))
                             for leaf in _leaves(value)))
        names += words_of(call["name"])
    if sum(map(len, values)) < 2:
        return []
    said = set(words_of(task.text)) - VERBS - FILLERS
    said -= set(words_of(" ".join(leaf for leaves in values for leaf in leaves)))
    return [[sorted(values), word] for word in sorted(said & set(names))]


def _leaves(value) -> list[str]:
    """The texts, numbers and booleans in a value, as lower-case JSON."""
    if isinstance(value, (dict, list)):
        parts = value.values() if isinstance(value, dict) else value
        return [leaf for part in parts for leaf in _leaves(part)]
    return [canonical(value).lower()]
