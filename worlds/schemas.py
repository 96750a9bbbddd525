"""Function specs and calls: JSON from a model, JSON schema, and when two calls are the same.

What of the paper this is: "valid" of a structured action (a in A_struct of Eq. 1), and the equality
a' = a. A call is valid if it parses and its arguments satisfy the schema of a declared function.

How it is run: by worlds/tool_calls.py, for every text that a model wrote and every line of a file.
Nothing is executed or evaluated: a text is bounded in length and depth, then parsed as JSON.

Where it differs on purpose: the schema keywords are the part of JSON schema that function specs
use, so that no package is needed (KEYWORDS; worlds/tool_lists.py writes $ref, allOf, const and others
with them). Arguments that a spec does not declare are refused, whatever additionalProperties says,
unless it is a schema: then they must fit that.
"""
import json
import math
import re
import string
from functools import lru_cache

from data_pool import Task
from worlds import InvalidTask
from worlds.call_text import MAX_CHARS, MAX_DEPTH, MAX_DIGITS, NAME

MAX_CALLS, MAX_TOOLS = 8, 32
MARKS = string.punctuation.replace("-", "").replace(".", "")  # may stand before a number


def invalid(reason: str, detail: str) -> InvalidTask:
    """InvalidTask to raise: counted under `reason`; `detail` is for the author of a file."""
    error = InvalidTask(reason)
    error.detail = detail
    return error


# ---------------------------------------------------------------------------------------------
# JSON from a model: bounded, and only ever parsed


def find_object(text: str, start: int = 0):
    """(begin, end) of the first balanced {...} from `start` on, or None.

    Quoted braces do not count. None also if it never closes or nests deeper than MAX_DEPTH.
    """
    begin, depth, quoted = text.find("{", start), 0, False
    if begin < 0:
        return None
    for mark in re.finditer(r'\\.|["{}\[\]]', text[begin:], re.DOTALL):
        sign = mark.group()
        if sign == '"':
            quoted = not quoted
        elif not quoted and len(sign) == 1:
            depth += 1 if sign in "{[" else -1
            if depth == 0:
                return begin, begin + mark.end()
            if depth > MAX_DEPTH:
                return None
    return None


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError("an integer of too many digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number out of range")
    return value


def load_object(text: str):
    """One JSON object that is all of `text` -> dict, or None if it is anything else.

    Refused besides bad JSON: infinities, NaN, huge integers, NUL and lone surrogates, which no
    tokenizer takes.
    """
    span = find_object(text) if "\0" not in text and "\\u0000" not in text else None
    if span is None or text[:span[0]].strip() or text[span[1]:].strip():
        return None
    try:
        value = json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):  # bad JSON and bad Unicode are ValueErrors too
        return None
    return value


def first_object(text: str, tries: int = 8):
    """The first JSON object in a model's text, in a ```json fence or bare, or None."""
    if len(text) > MAX_CHARS:
        return None
    span = find_object(text)
    for _ in range(tries):  # prose before it may hold braces that are no JSON
        if span is None:
            return None
        value = load_object(text[slice(*span)])
        if value is not None:
            return value
        span = find_object(text, span[1])
    return None


# ---------------------------------------------------------------------------------------------
# JSON schema, the part of it that tool specs use


TYPES = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None),
         "integer": (int, float), "number": (int, float)}
NOTES = {"description", "title", "format", "examples"}
UNIONS = ("anyOf", "oneOf")
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
SIZES = {"Length": str, "Items": list, "Properties": dict}  # minLength, maxItems and so on
COUNTS = {bound + unit for unit in SIZES for bound in ("min", "max")}
KEYWORDS = {*NOTES, *UNIONS, *NUMBERS, *COUNTS, "type", "properties", "required", "items", "enum",
            "default", "pattern", "additionalProperties"}
PATTERN_TEXT = 256  # characters up to which a text is held against a pattern
PATTERN_COST = 25   # bits: the steps that a pattern may take on such a text, at worst


def canonical(value) -> str:
    """JSON text that is equal for equal values: keys sorted, 5.0 written as 5, true is not 1."""
    def plain(v):
        if isinstance(v, dict):
            return {key: plain(item) for key, item in v.items()}
        if isinstance(v, list):
            return [plain(item) for item in v]
        return int(v) if isinstance(v, float) and v.is_integer() else v
    return json.dumps(plain(value), sort_keys=True)


def kinds(schema: dict) -> list[str]:
    """The types that a schema names: one, several, or none beside anyOf and oneOf."""
    kind = schema.get("type", [])
    return kind if isinstance(kind, list) else [kind]


def conforms(value, schema: dict) -> bool:
    """Whether a value satisfies a schema that check_schema has passed."""
    if "type" in schema and not any(_is(value, kind) for kind in kinds(schema)):
        return False
    if "enum" in schema and canonical(value) not in map(canonical, schema["enum"]):
        return False
    if _is(value, "number") and not _number_fits(value, schema):
        return False
    for unit, kind in SIZES.items():
        if isinstance(value, kind) and not (
                schema.get("min" + unit, 0) <= len(value) <= schema.get("max" + unit, len(value))):
            return False
    if isinstance(value, str) and len(value) <= PATTERN_TEXT and "pattern" in schema:
        pattern = quick_pattern(schema["pattern"])
        if pattern and not pattern.search(value):
            return False
    if isinstance(value, list) and "items" in schema:
        if not all(conforms(item, schema["items"]) for item in value):
            return False
    if isinstance(value, dict) and ("properties" in schema or _others(schema)):
        return not argument_fault(value, schema)
    return _in_unions(value, schema)


def _is(value, kind: str) -> bool:
    """Whether a value has a JSON type: true is no number, 5.0 is an integer."""
    if not isinstance(value, TYPES[kind]) or isinstance(value, bool) != (kind == "boolean"):
        return False
    return kind != "integer" or value == int(value)


def _number_fits(value, schema: dict) -> bool:
    steps = value / schema.get("multipleOf", value or 1)  # 0.3 / 0.1 is not quite 3
    return schema.get("minimum", value) <= value <= schema.get("maximum", value) \
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"]) \
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"]) \
        and math.isfinite(steps) and abs(steps - round(steps)) < 1e-6


def _in_unions(value, schema: dict) -> bool:
    """anyOf: one of its schemas at least; oneOf: one and no other."""
    fits = {union: sum(conforms(value, inner) for inner in schema[union])
            for union in UNIONS if union in schema}
    return fits.get("anyOf", 1) > 0 and fits.get("oneOf", 1) == 1


@lru_cache(maxsize=4096)
def quick_pattern(pattern: str):
    """A regular expression that no text of PATTERN_TEXT characters keeps busy, or None.

    None: the pattern is a note then. A group that repeats may take exponential time, so there is
    none; each other repetition may try all lengths, and an option doubles the ways.
    """
    # an escape or a class is one character; what is left may be counted sign by sign
    bare = re.sub(r"\\[^1-9]|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)
    bare = bare.replace("(?:", "(")
    if len(pattern) > PATTERN_TEXT or re.search(r"\\|\(\?|\)[*+{]", bare):
        return None
    bare = re.sub(r"\{\d+\}", "", bare)  # so many times, and there is no other way
    loops = len(re.findall("[*+{]", bare)) + (bare[:1] != "^" or "|" in bare)  # where it begins
    if loops * math.log2(PATTERN_TEXT) + bare.count("?") + bare.count("|") > PATTERN_COST:
        return None
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return None


def branch(value, schema: dict) -> dict:
    """A schema with the alternative of its anyOf or oneOf that a value fits in their place: what an
    optional argument says of its members stands there."""
    for inner in (inner for union in UNIONS for inner in schema.get(union, ())):
        if conforms(value, inner):
            beside = {key: part for key, part in schema.items() if key not in UNIONS}
            return branch(value, {**beside, **inner})
    return schema


def _others(schema: dict) -> dict:
    """The schema of members that are not declared, or {}: then there are none."""
    others = schema.get("additionalProperties")
    return others if isinstance(others, dict) else {}


def argument_fault(arguments: dict, schema: dict) -> str:
    """What is wrong with the members of an object, in words; empty if nothing is."""
    properties, others = schema.get("properties", {}), _others(schema)
    for name in schema.get("required", []):
        if name not in arguments:
            return f"the required argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties and not others:
            return f"the argument {name!r} is not declared"
        if not conforms(value, properties.get(name, others)):
            return f"the argument {name!r} does not fit its schema"
    return "" if _in_unions(arguments, schema) else "the arguments fit none of the alternatives"


def check_schema(schema, where: str):
    """Raise InvalidTask("tool schema") unless `schema` is one that `conforms` can check."""
    def need(holds, what):
        if not holds:
            raise invalid("tool schema", f"{where}: {what}")
    need(isinstance(schema, dict), "the schema is no object")
    keys = set(schema)
    if unknown := sorted(map(repr, keys - KEYWORDS)):
        need(False, "unsupported keyword " + ", ".join(unknown))
    for union in keys.intersection(UNIONS):
        need(isinstance(schema[union], list) and schema[union], f"{union!r} is no list of schemas")
        for inner in schema[union]:
            check_schema(inner, where)
    named = kinds(schema)
    need(all(isinstance(kind, str) and kind in TYPES for kind in named)
         and (named or not keys.isdisjoint(UNIONS)), f"unknown type {schema.get('type')!r}")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    need(isinstance(properties, dict), "properties is no object")
    for name, inner in properties.items():
        check_schema(inner, f"{where}.{name}")
    need(isinstance(required, list) and all(
        isinstance(name, str) and name in properties for name in required),
         "required names something that properties does not have")
    if "items" in schema:
        check_schema(schema["items"], f"{where}[]")
    if _others(schema):
        check_schema(_others(schema), f"{where}{{}}")
    for bound in NUMBERS & keys:
        need(type(schema[bound]) in (int, float), f"{bound} is no number")
    need(schema.get("multipleOf", 1) > 0, "multipleOf is not positive")
    for bound in COUNTS & keys:
        need(type(schema[bound]) is int, f"{bound} is no whole number")
    need(isinstance(schema.get("pattern", ""), str), "pattern is no text")
    need(isinstance(schema.get("enum", [0]), list) and schema.get("enum", [0]), "enum is no list")
    need("default" not in schema or conforms(schema["default"], schema),
         "the default does not fit the schema")


# ---------------------------------------------------------------------------------------------
# tools and calls


def check_tools(tools) -> dict:
    """A list of tool specs -> {name: spec}. Raises InvalidTask("tool schema")."""
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise invalid("tool schema", f"tools is no list of 1 to {MAX_TOOLS} tool specs")
    by_name = {}
    for tool in tools:
        name = tool.get("name") if isinstance(tool, dict) else None
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise invalid("tool schema", f"a tool has no proper name, it has {name!r:.80}")
        if name in by_name:
            raise invalid("tool schema", f"two tools are called {name!r}")
        if not isinstance(tool.get("description"), str) or "parameters" not in tool:
            raise invalid("tool schema", f"tool {name!r} needs description (text) and parameters")
        check_schema(tool["parameters"], name)
        if tool["parameters"].get("type") != "object":
            raise invalid("tool schema", f"the parameters of tool {name!r} are no object schema")
        by_name[name] = tool
    return by_name


def well_formed(call) -> bool:
    """Whether it is {"name": text, "arguments": object}."""
    return isinstance(call, dict) and set(call) == {"name", "arguments"} \
        and isinstance(call["arguments"], dict) and isinstance(call["name"], str)


def check_calls(calls, tools: dict, least: int = 1):
    """Raise InvalidTask unless every call is of a declared tool with fitting arguments.

    least: 0 where no call at all is an answer too.
    """
    if not isinstance(calls, list) or not least <= len(calls) <= MAX_CALLS:
        raise invalid("malformed task", f"calls is no list of {least} to {MAX_CALLS} calls")
    for call in calls:
        if not well_formed(call):
            raise invalid("malformed task", "a call is exactly name (text) and arguments (object)")
        if call["name"] not in tools:
            raise invalid("unknown tool", f"tool {call['name']!r:.80} is not declared")
        fault = argument_fault(call["arguments"], tools[call["name"]]["parameters"])
        if fault:
            raise invalid("wrong arguments", f"call of {call['name']!r}: {fault:.200}")


def normal_calls(calls, tools: dict, ordered: bool) -> list[str]:
    """Checked calls as canonical texts, defaults filled in; sorted unless the order matters."""
    texts = [canonical([call["name"], _filled(call["arguments"],
                                              tools[call["name"]]["parameters"])]) for call in calls]
    return texts if ordered else sorted(texts)


def _filled(value, schema: dict):
    """A value with the defaults of the members that its objects leave out."""
    schema = branch(value, schema)
    if isinstance(value, dict):
        inner = schema.get("properties", {})
        defaults = {name: part["default"] for name, part in inner.items() if "default" in part}
        return {name: _filled(part, inner.get(name, _others(schema)))
                for name, part in {**defaults, **value}.items()}
    if isinstance(value, list):
        return [_filled(part, schema.get("items", {})) for part in value]
    return value


# ---------------------------------------------------------------------------------------------
# what a task asks for


def tools_of(task: Task) -> dict:
    """{name: spec} of its tools; none if it is a question."""
    return {tool["name"]: tool for tool in task.spec.get("tools", ())}


def structured(task: Task) -> bool:
    """Whether the task asks for calls (a in A_struct of Eq. 1) or for a free-form answer."""
    return "calls" in task.spec


def answering(task: Task) -> bool:
    """Whether its tools answer: then the agent takes several turns."""
    return "results" in task.spec


def kind(task: Task) -> str:
    """What a variation has in common with its seed task."""
    return "episode" if answering(task) else "calls" if structured(task) else "question"


def normal_words(text: str) -> list[str]:
    """Words for comparing free text as SQuAD does: lower case, no punctuation, no articles."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in text.split() if word not in ("a", "an", "the")]


def answer_words(text: str) -> list[str]:
    """normal_words of a free-form answer, but a number keeps sign and point: -5 is not 5."""
    return [word for raw in text.replace("\u2212", "-").split()
            for word in _number(raw) or normal_words(raw)]


def _number(word: str) -> list[str]:
    """["1200.5"] of "**$1,200.50.**"; [] of what is no number."""
    plain = re.sub("[,$\u20ac\u00a3]", "", word).lstrip(MARKS).rstrip(string.punctuation)
    if not re.fullmatch(r"-?\d*\.?\d+", plain):
        return []
    return [plain.rstrip("0").rstrip(".") if "." in plain else plain]
