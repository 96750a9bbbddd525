"""Calls and the schemas they must satisfy: JSON from a model, JSON schema, equality of two calls.

Paper: "valid" of a structured action (a in A_struct of Eq. 1) and the equality a' = a. A call is
valid if it parses and its arguments satisfy the schema of a declared tool.

Deviations: jsonschema checks arguments (draft 2020-12; worlds/tools/tool_lists.py brings a user's schemas
into it, and says what it leaves out). Members that a schema does not declare are refused where it
declares any. Formats are not checked.
"""
import itertools
import json
import re
import unicodedata
from functools import lru_cache

from jsonschema import Draft202012Validator
from referencing import Registry

from worlds import InvalidTask
from worlds.tools.call_text import MAX_CHARS, plain

MAX_CALLS = 8
MAX_BRACES = 500  # of a text, at which an object may begin


# ---------------------------------------------------------------------------------------------
# JSON from a model: bounded, and only ever parsed


def _unique(pairs) -> dict:
    """The members of an object. Raises ValueError if a key stands there twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key twice in one object")
    return members


DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def load_object(text):
    """The JSON object that is all of `text` -> dict, or None if it is anything else."""
    try:
        value = plain(DECODER.decode(text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def objects_of(text):
    """The JSON objects in a text, in a ```json fence or bare: of its first MAX_BRACES { those at
    which one begins."""
    text = text[:MAX_CHARS]
    for brace in itertools.islice(re.finditer("{", text), MAX_BRACES):
        try:
            value, _ = DECODER.raw_decode(text, brace.start())
            yield plain(value)
        except (ValueError, RecursionError):
            continue


# ---------------------------------------------------------------------------------------------
# JSON schema


# keywords that hold schemas: by their names, in a list, or one
NAMED = {"properties", "patternProperties", "dependentSchemas"}
LISTED = {"anyOf", "allOf", "prefixItems"}
SINGLE = {"items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else",
          "unevaluatedItems", "unevaluatedProperties"}
# of these the ones whose schemas are about the value itself, not about a part of it
IN_PLACE = {"anyOf", "allOf", "not", "if", "then", "else", "dependentSchemas"}


def with_parts(schema: dict, change) -> dict:
    """A schema with change(keyword, part) in place of every schema that it holds."""
    new = dict(schema)
    for key, value in schema.items():
        if key in NAMED:
            new[key] = {name: change(key, part) for name, part in value.items()}
        elif key in LISTED:
            new[key] = [change(key, part) for part in value]
        elif key in SINGLE and (isinstance(value, dict) or key == "items"):  # or true, or false
            new[key] = change(key, value)
    return new


def _closed(schema: dict, whole=True) -> dict:
    """A schema by which an object has no member that is not declared, if any is.

    whole: False for what is only a part of what is said of a value: the rest may declare more.
    """
    def change(key, part):
        if key == "anyOf":  # alternatives, unless the members stand beside them
            return _closed(part, whole and "properties" not in schema)
        return _closed(part, key not in IN_PLACE)

    new = with_parts(schema, change)
    declares = any(part.get("properties") for part in [schema, *schema.get("allOf", ())])
    if whole and declares:
        new.pop("additionalProperties", None)
        new["unevaluatedProperties"] = False
    return new


@lru_cache(4096)
def _validator(schema: str) -> Draft202012Validator:
    """The validator of a schema, JSON text, built once. Its registry is empty: nothing is ever
    fetched."""
    return Draft202012Validator(_closed(json.loads(schema)), registry=Registry())


def conforms(value, schema: dict) -> bool:
    """Whether a value satisfies a schema in the form of tool_lists.SchemaReader."""
    return _validator(json.dumps(schema)).is_valid(value)


def argument_fault(arguments: dict, schema: dict) -> str:
    """What is wrong with the arguments of a call of a tool with this schema, in words; "" if
    nothing is."""
    # a schema without properties declares that there are none
    validator = _validator(json.dumps({"unevaluatedProperties": False, **schema}))
    error = next(validator.iter_errors(arguments), None)
    return f"{error.json_path} {error.message:.160}" if error else ""


def canonical(value) -> str:
    """JSON text that is equal for equal values: keys sorted, 5.0 written as 5, true is not 1."""
    value = json.loads(json.dumps(value), parse_float=_number)
    return json.dumps(value, sort_keys=True)


def _number(digits: str):
    """A number that is written with a point or an exponent; a whole one is an int."""
    number = float(digits)
    return int(number) if number.is_integer() else number


def branch(value, schema: dict) -> dict:
    """A schema with the alternative of its anyOf that a value satisfies in place of the anyOf: what
    an optional argument says of its members stands there."""
    for part in schema.get("anyOf", ()):
        if conforms(value, part):
            rest = {key: inner for key, inner in schema.items() if key != "anyOf"}
            return branch(value, {**rest, **part})
    return schema


def each(value, schema: dict, change, name="", fills=False):
    """A value with change(part, its schema, its name) in place of each part that has no parts.

    fills: whether objects first get the defaults of the members that they leave out.
    """
    schema = branch(value, schema)
    inner = schema.get("properties", {})
    if fills and isinstance(value, dict):
        defaults = {key: part["default"] for key, part in inner.items() if "default" in part}
        value = {**defaults, **value}
    if isinstance(value, dict) and value:
        return {key: each(part, inner.get(key, {}), change, key, fills)
                for key, part in value.items()}
    if isinstance(value, list) and value:
        return [each(part, schema.get("items", {}), change, name, fills) for part in value]
    return change(value, schema, name)


def _filled(value, schema: dict):
    """A value with the defaults of the members that its objects leave out."""
    return each(value, schema, lambda part, *_: part, fills=True)


def leaves(task) -> list:
    """(part, its schema, its name) of every part that has no parts, of the arguments of a task's
    calls."""
    found, tools = [], tools_of(task)
    for call in task.spec.get("calls", ()):
        schema = tools[call["name"]]["parameters"]
        each(call["arguments"], schema, lambda *leaf: found.append(leaf))
    return found


# ---------------------------------------------------------------------------------------------
# calls


def well_formed(call) -> bool:
    """Whether it is {"name": text, "arguments": object}."""
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        return False
    return isinstance(call["name"], str) and isinstance(call["arguments"], dict)


def check_calls(calls, tools: dict, least=1):
    """Raise InvalidTask unless every call is of a declared tool with arguments that fit.

    least: 0 if no call at all is an answer, too.
    """
    if not isinstance(calls, list) or not least <= len(calls) <= MAX_CALLS:
        raise InvalidTask("malformed task", f"calls is not a list of {least} to {MAX_CALLS} calls")
    for call in calls:
        if not well_formed(call):
            detail = "a call is exactly name (text) and arguments (object)"
            raise InvalidTask("malformed task", detail)
        name = call["name"]
        if name not in tools:
            raise InvalidTask("unknown tool", f"{name!r:.80} is called, but is none of the tools")
        fault = argument_fault(call["arguments"], tools[name]["parameters"])
        if fault:
            raise InvalidTask("wrong arguments", f"call of {name!r:.80}: {fault}")


def normal_calls(calls, tools: dict, ordered: bool):
    """Checked calls as canonical texts, defaults filled in; sorted unless the order matters."""
    texts = []
    for call in calls:
        arguments = _filled(call["arguments"], tools[call["name"]]["parameters"])
        texts.append(canonical([call["name"], arguments]))
    return texts if ordered else sorted(texts)


def graded_calls(calls, task) -> float:
    """Partial credit: the `credit` of the best call for each expected one, on average; surplus
    calls earn nothing and lower the average. In an ordered task only calls in the same place are
    compared."""
    tools, expected, left = tools_of(task), task.spec["calls"], list(calls)
    total = 0.0
    for wanted in expected:
        schema = tools[wanted["name"]]["parameters"]
        candidates = left[:1] if task.spec["ordered"] else left
        credits = [credit(call, wanted, schema) for call in candidates]
        best = max(credits, default=0.0)
        total += best
        # each call is used once, and one that earns nothing only where the order says which
        if candidates and (best or task.spec["ordered"]):
            del left[credits.index(best)]
    return total / max(1, len(calls), len(expected))


def credit(call, wanted: dict, schema: dict) -> float:
    """0.2 for the function, 0.3 for the names of its arguments (F1), 0.5 for the share of right
    values. A call need not fit its schema; what either leaves out is its default."""
    if not well_formed(call) or call["name"] != wanted["name"]:
        return 0.0
    arguments = _filled(call["arguments"], schema)
    expected = _filled(wanted["arguments"], schema)
    common = arguments.keys() & expected.keys()
    right = sum(canonical(arguments[name]) == canonical(expected[name]) for name in common)
    names = _share(2 * len(common), len(arguments) + len(expected))
    return 0.2 + 0.3 * names + 0.5 * _share(right, len(expected))


def _share(part: int, whole: int) -> float:
    """part / whole; 1 of nothing."""
    return part / whole if whole else 1.0


# ---------------------------------------------------------------------------------------------
# tasks and free-form answers


def tools_of(task) -> dict:
    """{name: spec} of its tools; empty for a question."""
    return {tool["name"]: tool for tool in task.spec.get("tools", ())}


def structured(task) -> bool:
    """Whether the task asks for calls (a in A_struct of Eq. 1) or for a free-form answer."""
    return "calls" in task.spec


# signs that nobody sees beside those of category Cf: joiners, fillers, variation selectors
UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\ufe00-\ufe0f"
                    "\U000e0100-\U000e01ef]")


def as_read(text) -> str:
    """A text as it is read, here and in all other names: as a person sees it, with full-width
    letters as usual ones (NFKC), and without signs that nobody sees."""
    text = unicodedata.normalize("NFKC", text).replace("\u2800", " ")  # Braille's blank
    seen = (c for c in text if c.isspace() or unicodedata.category(c) not in ("Cf", "Cc"))
    return UNSEEN.sub("", "".join(seen))


def texts_as_read(value):
    """A value with each of its texts as it is read, without case and outer blanks: for keys of
    tasks."""
    def folded(part, *_):
        if isinstance(part, str):
            return " ".join(as_read(part).casefold().split())
        return part
    return each(value, {}, folded)


def words_of(text):
    """Words and numbers of a text: lower case, no accents, camelCase in parts. -5 is not 5, and
    $2,000.50 is 2000.5."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", joined(text)).replace("\u2212", "-").lower()
    letters = unicodedata.normalize("NFKD", text)
    text = "".join(c for c in letters if not unicodedata.combining(c))
    words = re.findall(r"(?:(?<![\w.])-)?\d+(?:\.\d+)?|[^\W\d_]+", text)
    # without zeros at the end; by rstrip, as a regular expression is slow in many of them
    return [word.rstrip("0").rstrip(".") if "." in word else word for word in words]


def joined(text) -> str:
    """A text as it is read, with 2000 for 2,000."""
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", as_read(text))
