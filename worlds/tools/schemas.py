"""Check calls against schemas: parse a model's JSON, validate it, and compare two calls.

Paper: "valid" of a structured action (a in A_struct of Eq. 1) and the equality a' = a. A call is
valid if it parses and its arguments satisfy the schema of a declared tool.

Deviations: the package jsonschema checks arguments against draft 2020-12 of JSON Schema.
worlds/tools/tool_lists.py converts a user's schemas to that draft and documents what it leaves out.
If a schema declares members, all others are refused. Formats are not checked.
"""
import itertools
import json
import math
import re
from functools import lru_cache

from jsonschema import Draft202012Validator
from referencing import Registry

from worlds import InvalidTask

MAX_CALLS = 8
MAX_CHARS = 32_768  # of a model's text; longer ones are not parsed
MAX_DEPTH = 48      # levels of lists and objects within a value
MAX_DIGITS = 20     # of an integer: 64 bits
MAX_BRACES = 500    # how many opening braces of a text are tried as the start of an object


# ---------------------------------------------------------------------------------------------
# JSON from a model: limited in size, and parsed but never evaluated


def _unique(pairs) -> dict:
    """Return the members of an object. Raise ValueError if a key appears twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return members


DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def json_value(value, depth=0):
    """Return a Python value as a JSON value. Raise ValueError if it is not one.

    JSON has no NaN and no infinities. Integers over MAX_DIGITS digits, strings that a tokenizer
    cannot encode (NUL, lone surrogates) and values nested deeper than MAX_DEPTH are refused, too.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, (list, tuple)):
        return [json_value(item, depth + 1) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {json_value(key): json_value(item, depth + 1) for key, item in value.items()}
    if isinstance(value, str):
        if b"\0" in value.encode("utf-8"):  # UnicodeEncodeError is a ValueError, too
            raise ValueError("NUL in a string")
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if type(value) is int and abs(value) < 10 ** MAX_DIGITS:
        return value
    raise ValueError("not a JSON value")


def load_object(text):
    """Return the JSON object that is all of `text`, or None if it is anything else."""
    try:
        value = json_value(DECODER.decode(text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def objects_of(text):
    """Yield the JSON objects in a text, in a ```json fence or bare, and those nested in them.

    Only the first MAX_BRACES opening braces are tried.
    """
    text = text[:MAX_CHARS]
    for brace in itertools.islice(re.finditer("{", text), MAX_BRACES):
        try:
            value, _ = DECODER.raw_decode(text, brace.start())
            yield json_value(value)
        except (ValueError, RecursionError):
            continue


def canonical(value) -> str:
    """Return JSON text that is equal for equal values.

    The order of keys does not matter, 5.0 is 5, and true is not 1.
    """
    value = json.loads(json.dumps(value), parse_float=_number)
    return json.dumps(value, sort_keys=True)


def _number(digits: str):
    """Return a number that is written with a point or an exponent, as an int if it is whole."""
    number = float(digits)
    return int(number) if number.is_integer() else number


# ---------------------------------------------------------------------------------------------
# JSON schema


# keywords that hold schemas: by name, in a list, or a single one
NAMED = {"properties", "patternProperties", "dependentSchemas"}
LISTED = {"anyOf", "allOf", "prefixItems"}
SINGLE = {"items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else",
          "unevaluatedItems", "unevaluatedProperties"}
# those keywords whose schemas describe the value itself, not a part of it
IN_PLACE = {"anyOf", "allOf", "not", "if", "then", "else", "dependentSchemas"}


def with_parts(schema: dict, change) -> dict:
    """Return a schema with every schema inside it replaced by change(keyword, part)."""
    changed = dict(schema)
    for key, value in schema.items():
        if key in NAMED:
            changed[key] = {name: change(key, part) for name, part in value.items()}
        elif key in LISTED:
            changed[key] = [change(key, part) for part in value]
        elif key in SINGLE and (isinstance(value, dict) or key == "items"):  # items may be a bool
            changed[key] = change(key, value)
    return changed


def closed(schema: dict, is_whole=True) -> dict:
    """Return a schema that allows an object only declared members, if it declares any.

    is_whole: False for one of several schemas of a value, because the others may declare more.
    """
    def close_part(key, part):
        # an alternative describes the whole value, unless members are declared beside it
        if key == "anyOf":
            return closed(part, is_whole and "properties" not in schema)
        return closed(part, key not in IN_PLACE)

    strict = with_parts(schema, close_part)
    declares = any(part.get("properties") for part in [schema, *schema.get("allOf", ())])
    if is_whole and declares:
        strict.pop("additionalProperties", None)
        strict["unevaluatedProperties"] = False
    return strict


@lru_cache(4096)
def _validator(schema: str) -> Draft202012Validator:
    """Return the validator of a schema given as JSON text; recent ones are cached.

    Its registry is empty, so nothing is ever fetched.
    """
    return Draft202012Validator(closed(json.loads(schema)), registry=Registry())


def conforms(value, schema: dict) -> bool:
    """Return whether a value satisfies a schema in the form that tool_lists.SchemaReader gives."""
    return _validator(json.dumps(schema)).is_valid(value)


def argument_fault(arguments: dict, schema: dict) -> str:
    """Return how the arguments of a call violate its tool's schema, or ""."""
    # a schema without properties allows no arguments
    validator = _validator(json.dumps({"unevaluatedProperties": False, **schema}))
    error = next(validator.iter_errors(arguments), None)
    return f"{error.json_path} {error.message:.160}" if error else ""


def kinds(schema: dict):
    """Return the types that a schema names: one, several, or none."""
    kind = schema.get("type", [])
    return kind if isinstance(kind, list) else [kind]


def chosen(value, schema: dict) -> dict:
    """Return a schema whose anyOf is replaced by its first alternative that a value satisfies.

    That reveals the members of an object that may also be null.
    """
    for part in schema.get("anyOf", ()):
        if conforms(value, part):
            rest = {key: inner for key, inner in schema.items() if key != "anyOf"}
            return chosen(value, {**rest, **part})
    return schema


def filled(value, schema: dict):
    """Return a value in which members that an object leaves out are set to their defaults."""
    schema = chosen(value, schema)
    if isinstance(value, list):
        return [filled(part, schema.get("items", {})) for part in value]
    if not isinstance(value, dict):
        return value
    members = schema.get("properties", {})
    defaults = {key: part["default"] for key, part in members.items() if "default" in part}
    return {key: filled(part, members.get(key, {})) for key, part in {**defaults, **value}.items()}


def leaves(value, schema: dict, name=""):
    """Yield (part, its schema, its name) for every part of a value that has no parts of its own."""
    schema = chosen(value, schema)
    if isinstance(value, dict) and value:
        members = schema.get("properties", {})
        for key, part in value.items():
            yield from leaves(part, members.get(key, {}), key)
    elif isinstance(value, list) and value:
        for part in value:
            yield from leaves(part, schema.get("items", {}), name)
    else:
        yield value, schema, name


# ---------------------------------------------------------------------------------------------
# calls


def structured(task) -> bool:
    """Return whether a task asks for calls (a in A_struct of Eq. 1), not a free-form answer."""
    return "calls" in task.spec


def tools_of(task) -> dict:
    """Return {name: spec} of a task's tools; empty for a question."""
    return {tool["name"]: tool for tool in task.spec.get("tools", ())}


def well_formed(call) -> bool:
    """Return whether a call is {"name": text, "arguments": object}."""
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        return False
    return isinstance(call["name"], str) and isinstance(call["arguments"], dict)


def check_calls(calls, tools: dict, least=1):
    """Raise InvalidTask unless every call is of a declared tool with arguments that fit.

    least: 0 if calling nothing is also an answer.
    """
    if not isinstance(calls, list) or not least <= len(calls) <= MAX_CALLS:
        raise InvalidTask("malformed task", f"calls is not a list of {least} to {MAX_CALLS} calls")
    for call in calls:
        if not well_formed(call):
            detail = "a call is exactly 'name', a text, and 'arguments', a JSON object"
            raise InvalidTask("malformed task", detail)
        name = call["name"]
        if name not in tools:
            raise InvalidTask("unknown tool", f"{name!r:.80} is called, but is not among the tools")
        fault = argument_fault(call["arguments"], tools[name]["parameters"])
        if fault:
            raise InvalidTask("wrong arguments", f"call of {name!r:.80}: {fault}")


def call_fault(calls, tools: dict, least=1) -> str:
    """Return why calls cannot be read or do not pass check_calls, or ""."""
    try:
        check_calls(calls, tools, least)
    except InvalidTask as fault:
        return fault.detail or str(fault)
    return ""


def normal_calls(calls, tools: dict, ordered: bool):
    """Return checked calls as canonical texts, with defaults, sorted unless the order matters."""
    texts = []
    for call in calls:
        arguments = filled(call["arguments"], tools[call["name"]]["parameters"])
        texts.append(canonical([call["name"], arguments]))
    return texts if ordered else sorted(texts)


def graded_calls(calls, task) -> float:
    """Return partial credit: the `credit` of the best call for each expected one, averaged.

    Surplus calls earn nothing and lower the average.
    """
    tools, expected, left = tools_of(task), task.spec["calls"], list(calls)
    total = 0.0
    for wanted in expected:
        schema = tools[wanted["name"]]["parameters"]
        credits = [credit(call, wanted, schema) for call in left]
        best = max(credits, default=0.0)
        total += best
        if best:  # each call is used once
            del left[credits.index(best)]
    return total / max(1, len(calls), len(expected))


def credit(call, wanted: dict, schema: dict) -> float:
    """Return 0.2 for the function, 0.3 for the names of its arguments (F1), 0.5 for the share of
    right values.

    A call need not fit its schema. Defaults fill in what either call leaves out.
    """
    if not well_formed(call) or call["name"] != wanted["name"]:
        return 0.0
    arguments = filled(call["arguments"], schema)
    expected = filled(wanted["arguments"], schema)
    common = arguments.keys() & expected.keys()
    right = sum(canonical(arguments[name]) == canonical(expected[name]) for name in common)
    names = _share(2 * len(common), len(arguments) + len(expected))
    return 0.2 + 0.3 * names + 0.5 * _share(right, len(expected))


def _share(part: int, whole: int) -> float:
    """Return part / whole, or 1 if the whole is 0."""
    return part / whole if whole else 1.0
