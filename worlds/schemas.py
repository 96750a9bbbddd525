"""Function specs and calls: JSON from a model, JSON schema, and when two calls are the same.

What of the paper this is: "valid" of a structured action (a in A_struct of Eq. 1), and the equality
a' = a. A call is valid if it parses and its arguments satisfy the schema of a declared function.

How it is run: by worlds/tool_calls.py, for every text that a model wrote and every line of a file.
Nothing is executed or evaluated: a text is bounded in length and depth, then parsed as JSON.

Where it differs on purpose: the schema keywords are the part of JSON schema that function specs
use, so that no package is needed; arguments that a spec does not declare are always refused.
"""
import json
import math
import re
import string

from data_pool import Task
from worlds import InvalidTask
from worlds.call_text import MAX_CHARS, MAX_DEPTH, MAX_DIGITS

MAX_CALLS, MAX_TOOLS = 8, 32


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


TYPES = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
NUMBERS = ("integer", "number")
NOTES = {"description", "title", "format", "examples", "additionalProperties"}
KEYWORDS = NOTES | {"type", "properties", "required", "items", "enum", "minimum", "maximum",
                    "default"}


def canonical(value) -> str:
    """JSON text that is equal for equal values: keys sorted, 5.0 written as 5, true is not 1."""
    def plain(v):
        if isinstance(v, dict):
            return {key: plain(item) for key, item in v.items()}
        if isinstance(v, list):
            return [plain(item) for item in v]
        return int(v) if isinstance(v, float) and v.is_integer() else v
    return json.dumps(plain(value), sort_keys=True)


def conforms(value, schema: dict) -> bool:
    """Whether a value satisfies a schema that check_schema has passed."""
    kind = schema["type"]
    if kind in NUMBERS:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = fits and (kind == "number" or value == int(value))
        fits = fits and schema.get("minimum", value) <= value <= schema.get("maximum", value)
    else:
        fits = isinstance(value, TYPES[kind])
    if fits and "enum" in schema:
        fits = canonical(value) in map(canonical, schema["enum"])
    if fits and kind == "array" and "items" in schema:
        fits = all(conforms(item, schema["items"]) for item in value)
    if fits and kind == "object" and "properties" in schema:
        fits = not argument_fault(value, schema)
    return fits


def argument_fault(arguments: dict, schema: dict) -> str:
    """What is wrong with the members of an object, in words; empty if nothing is."""
    properties = schema.get("properties", {})
    for name in schema.get("required", []):
        if name not in arguments:
            return f"the required argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"the argument {name!r} is not declared"
        if not conforms(value, properties[name]):
            return f"the argument {name!r} does not fit its schema"
    return ""


def check_schema(schema, where: str):
    """Raise InvalidTask("tool schema") unless `schema` is one that `conforms` can check."""
    def need(holds, what):
        if not holds:
            raise invalid("tool schema", f"{where}: {what}")
    need(isinstance(schema, dict), "the schema is no object")
    need(not set(schema) - KEYWORDS, "unsupported keyword "
         + ", ".join(sorted(map(repr, set(schema) - KEYWORDS))))
    kind = schema.get("type")
    need(isinstance(kind, str) and (kind in TYPES or kind in NUMBERS), f"unknown type {kind!r}")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    need(isinstance(properties, dict), "properties is no object")
    for name, inner in properties.items():
        check_schema(inner, f"{where}.{name}")
    need(isinstance(required, list) and all(
        isinstance(name, str) and name in properties for name in required),
         "required names something that properties does not have")
    if "items" in schema:
        check_schema(schema["items"], f"{where}[]")
    for bound in ("minimum", "maximum"):
        need(type(schema.get(bound, 0)) in (int, float), f"{bound} is no number")
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
        # identifier-like, with the dots and dashes that some benchmarks use
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][\w.\-]{0,63}", name):
            raise invalid("tool schema", f"a tool has no proper name, it has {name!r:.80}")
        if name in by_name:
            raise invalid("tool schema", f"two tools are called {name!r}")
        if not isinstance(tool.get("description"), str) or "parameters" not in tool:
            raise invalid("tool schema", f"tool {name!r} needs description (text) and parameters")
        check_schema(tool["parameters"], name)
        if tool["parameters"]["type"] != "object":
            raise invalid("tool schema", f"the parameters of tool {name!r} are no object schema")
        by_name[name] = tool
    return by_name


def check_calls(calls, tools: dict):
    """Raise InvalidTask unless every call is of a declared tool with fitting arguments."""
    if not isinstance(calls, list) or not 1 <= len(calls) <= MAX_CALLS:
        raise invalid("malformed task", f"calls is no list of 1 to {MAX_CALLS} calls")
    for call in calls:
        if not isinstance(call, dict) or set(call) != {"name", "arguments"} \
                or not isinstance(call["arguments"], dict) or not isinstance(call["name"], str):
            raise invalid("malformed task", "a call is exactly name (text) and arguments (object)")
        if call["name"] not in tools:
            raise invalid("unknown tool", f"tool {call['name']!r:.80} is not declared")
        fault = argument_fault(call["arguments"], tools[call["name"]]["parameters"])
        if fault:
            raise invalid("wrong arguments", f"call of {call['name']!r}: {fault:.200}")


def normal_calls(calls, tools: dict, ordered: bool) -> list[str]:
    """Checked calls as canonical texts, defaults filled in; sorted unless the order matters."""
    texts = []
    for call in calls:
        properties = tools[call["name"]]["parameters"].get("properties", {})
        defaults = {k: p["default"] for k, p in properties.items() if "default" in p}
        texts.append(canonical([call["name"], {**defaults, **call["arguments"]}]))
    return texts if ordered else sorted(texts)


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
