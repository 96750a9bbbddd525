"""Calls and the schemas they must satisfy: JSON from a model, JSON schema, equality of two calls.

Paper: "valid" of a structured action (a in A_struct of Eq. 1) and the equality a' = a. A call is
valid if it parses and its arguments satisfy the schema of a declared tool.

Deviations: the keywords are the part of JSON schema that function specs use, so no package is
needed: type, enum, anyOf, default, properties, required, items and the bounds of numbers.
worlds/tool_lists.py rewrites a user's schema with them and counts the ones that are not checked. Members
that a spec does not declare are refused where it declares any.
"""
import itertools
import json
import re
import unicodedata

from data_pool import Task
from worlds import InvalidTask
from worlds.call_text import MAX_CHARS, kinds, plain

MAX_CALLS = 8
MAX_BRACES = 500  # of a text, at which an object may begin


def invalid(reason: str, detail: str) -> InvalidTask:
    """InvalidTask to raise: counted under `reason`; `detail` is for the author of a file."""
    error = InvalidTask(reason)
    error.detail = detail
    return error


def need(holds, what, reason="malformed task"):
    """Raise InvalidTask(reason) with what as its detail unless something holds."""
    if not holds:
        raise invalid(reason, what)


# ---------------------------------------------------------------------------------------------
# JSON from a model: bounded, and only ever parsed


def _unique(pairs) -> dict:
    """The members of an object. Raises ValueError if a key stands there twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key twice in one object")
    return members


DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def load_object(text: str):
    """The JSON object that is all of `text` -> dict, or None if it is anything else."""
    try:
        value = plain(DECODER.decode(text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def objects_of(text: str):
    """(JSON object, end) for the first MAX_BRACES { of a text at which an object begins."""
    for brace in itertools.islice(re.finditer("{", text[:MAX_CHARS]), MAX_BRACES):
        try:
            value, end = DECODER.raw_decode(text, brace.start())
            yield plain(value), end
        except (ValueError, RecursionError):
            continue


def first_object(text: str):
    """The first JSON object in a model's text, in a ```json fence or bare, or None."""
    return next((value for value, _ in objects_of(text)), None) if len(text) <= MAX_CHARS else None


# ---------------------------------------------------------------------------------------------
# JSON schema, the part of it that tool specs use


TYPES = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None),
         "integer": (int, float), "number": (int, float)}
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}


def canonical(value) -> str:
    """JSON text that is equal for equal values: keys sorted, 5.0 written as 5, true is not 1."""
    def whole(v):
        if isinstance(v, dict):
            return {key: whole(item) for key, item in v.items()}
        return [whole(item) for item in v] if isinstance(v, list) else \
            int(v) if isinstance(v, float) and v.is_integer() else v
    return json.dumps(whole(value), sort_keys=True)


def conforms(value, schema: dict) -> bool:
    """Whether a value satisfies a schema in the form of tool_lists.own_schema."""
    items = value if isinstance(value, list) else ()
    return ("type" not in schema or any(_is(value, kind) for kind in kinds(schema))) \
        and ("enum" not in schema or canonical(value) in map(canonical, schema["enum"])) \
        and (not _is(value, "number") or _in_bounds(value, schema)) \
        and all(conforms(item, schema.get("items", {})) for item in items) \
        and not (isinstance(value, dict) and "properties" in schema and argument_fault(value, schema)) \
        and ("anyOf" not in schema or any(conforms(value, part) for part in schema["anyOf"]))


def _is(value, kind: str) -> bool:
    """Whether a value has a JSON type: true is not a number, 5.0 is an integer."""
    return isinstance(value, TYPES[kind]) and isinstance(value, bool) == (kind == "boolean") \
        and (kind != "integer" or value == int(value))


def _in_bounds(value, schema: dict) -> bool:
    return schema.get("minimum", value) <= value <= schema.get("maximum", value) \
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"]) \
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])


def branch(value, schema: dict) -> dict:
    """A schema with the alternative of its anyOf that a value satisfies in place of the anyOf: what an
    optional argument says of its members stands there."""
    for part in schema.get("anyOf", ()):
        if conforms(value, part):
            rest = {key: inner for key, inner in schema.items() if key != "anyOf"}
            return branch(value, {**rest, **part})
    return schema


def each(value, schema: dict, change, name: str = ""):
    """A value with change(part, its schema, its name) in place of each part that has no parts."""
    schema = branch(value, schema)
    if isinstance(value, dict) and value:
        inner = schema.get("properties", {})
        return {key: each(part, inner.get(key, {}), change, key) for key, part in value.items()}
    if isinstance(value, list) and value:
        return [each(part, schema.get("items", {}), change, name) for part in value]
    return change(value, schema, name)


def leaves(value, schema: dict) -> list:
    """(part, its schema, its name) of every part of a value that has no parts."""
    found = []
    each(value, schema, lambda *leaf: found.append(leaf))
    return found


def argument_fault(arguments: dict, schema: dict) -> str:
    """What is wrong with the members of an object, in words; empty if nothing is."""
    properties = schema.get("properties", {})
    faults = [f"the argument {name!r:.80} is not declared" for name in arguments if name not in properties]
    faults += [f"the required argument {name!r:.80} is missing" for name in schema.get("required", ())
               if name not in arguments]
    allowed = lambda schema: schema.get("enum") or {k: v for k, v in schema.items() if k != "description"}
    faults += [f"the argument {name!r:.80} is {value!r:.80}, allowed: {allowed(properties[name])!r:.160}"
               for name, value in arguments.items() if not conforms(value, properties.get(name, {}))]
    return " and ".join(faults[:2])


# ---------------------------------------------------------------------------------------------
# calls


def well_formed(call) -> bool:
    """Whether it is {"name": text, "arguments": object}."""
    return isinstance(call, dict) and set(call) == {"name", "arguments"} \
        and isinstance(call["arguments"], dict) and isinstance(call["name"], str)


def check_calls(calls, tools: dict, least: int = 1):
    """Raise InvalidTask unless every call is of a declared tool with arguments that fit.

    least: 0 if no call at all is an answer, too.
    """
    need(isinstance(calls, list) and least <= len(calls) <= MAX_CALLS,
         f"calls is not a list of {least} to {MAX_CALLS} calls")
    for call in calls:
        need(well_formed(call), "a call is exactly name (text) and arguments (object)")
        name = call["name"]
        need(name in tools, f"{name!r:.80} is called, but is none of the tools", "unknown tool")
        fault = argument_fault(call["arguments"], tools[name]["parameters"])
        need(not fault, f"call of {name!r:.80}: {fault}", "wrong arguments")


def normal_calls(calls, tools: dict, ordered: bool) -> list[str]:
    """Checked calls as canonical texts, defaults filled in; sorted unless the order matters."""
    texts = [canonical([call["name"], _filled(call["arguments"],
                                              tools[call["name"]]["parameters"])]) for call in calls]
    return texts if ordered else sorted(texts)


def graded_calls(calls, task: Task) -> float:
    """Partial credit: the `credit` of the best call for each expected one, on average; surplus calls
    earn nothing and lower the average. In an ordered task only calls in the same place are compared."""
    left, total, expected = list(calls), 0.0, task.spec["calls"]
    for want in expected:
        earned = lambda call: credit(call, want, tools_of(task)[want["name"]]["parameters"])
        best = max(left[:1] if task.spec["ordered"] else filter(earned, left), key=earned, default=None)
        left, total = [call for call in left if call is not best], total + earned(best)
    return total / max(1, len(calls), len(expected))


def credit(call, want: dict, schema: dict) -> float:
    """0.2 for the function, 0.3 for the names of its arguments (F1), 0.5 for the share of right values.
    A call need not fit its schema; what either leaves out is its default."""
    if not well_formed(call) or call["name"] != want["name"]:
        return 0.0
    given, wanted = (_filled(arguments, schema) for arguments in (call["arguments"], want["arguments"]))
    common = given.keys() & wanted.keys()
    right = sum(canonical(given[name]) == canonical(wanted[name]) for name in common)
    share = lambda part, whole: part / whole if whole else 1.0
    return 0.2 + 0.3 * share(2 * len(common), len(given) + len(wanted)) + 0.5 * share(right, len(wanted))


def _filled(value, schema: dict):
    """A value with the defaults of the members that its objects leave out."""
    schema = branch(value, schema)
    if isinstance(value, dict):
        inner = schema.get("properties", {})
        defaults = {name: part["default"] for name, part in inner.items() if "default" in part}
        return {name: _filled(part, inner.get(name, {})) for name, part in {**defaults, **value}.items()}
    if isinstance(value, list):
        return [_filled(part, schema.get("items", {})) for part in value]
    return value


# ---------------------------------------------------------------------------------------------
# tasks and free-form answers


def tools_of(task: Task) -> dict:
    """{name: spec} of its tools; empty for a question."""
    return {tool["name"]: tool for tool in task.spec.get("tools", ())}


def structured(task: Task) -> bool:
    """Whether the task asks for calls (a in A_struct of Eq. 1) or for a free-form answer."""
    return "calls" in task.spec


# signs that nobody sees beside those of category Cf: joiners, fillers, variation selectors
UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]")


def as_read(text: str) -> str:
    """A text as a reader sees it: full-width letters as others (NFKC), no signs that are not seen."""
    text = unicodedata.normalize("NFKC", text).replace("\u2800", " ")  # Braille's blank
    seen = (c for c in text if c.isspace() or unicodedata.category(c) not in ("Cf", "Cc"))
    return UNSEEN.sub("", "".join(seen))


def texts_as_read(value):
    """A value with each of its texts as it is read, without case and outer blanks: for keys of tasks."""
    if isinstance(value, str):
        return " ".join(as_read(value).casefold().split())
    if isinstance(value, list):
        return [texts_as_read(part) for part in value]
    if isinstance(value, dict):
        return {name: texts_as_read(part) for name, part in value.items()}
    return value


def words_of(text: str) -> list[str]:
    """Words and numbers of a text: lower case, no accents, camelCase in parts. -5 is not 5, and
    $2,000.50 is 2000.5."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", joined(text)).replace("\u2212", "-").lower()
    letters = unicodedata.normalize("NFKD", text)
    text = "".join(c for c in letters if not unicodedata.combining(c))
    words = re.findall(r"(?:(?<![\w.])-)?\d+(?:\.\d+)?|[^\W\d_]+", text)
    # without zeros at the end; by rstrip, as a regular expression is slow in many of them
    return [word.rstrip("0").rstrip(".") if "." in word else word for word in words]


def joined(text: str) -> str:
    """A text as it is read, with 2000 for 2,000."""
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", as_read(text))
