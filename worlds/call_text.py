"""Tool specs and calls as short text: signature lines, and `name(argument="value", n=3)`.

What of the paper this is: nothing; it is how a small model can read and write the tool_calls world
(--call-format python). It is a way to write the same things: what a call means, which arguments
fit and when two calls agree is said in worlds/tool_calls.py alone.

    search_trains(origin: str, destination: str, seats: int = 1, window: bool = ...)
    search_trains(origin="Lyon", destination="Nice", seats=2)

A signature has the arguments of the JSON schema, required ones first: `= value` is the default, and
`= ...` says that the argument may be left out. Types are str, int, float, bool, None, any, list[...],
`{key: type}` for objects with declared members, dict[str, type] for those whose members are of one
type and dict for others; an enum is its values with |, and so are several types.
Descriptions are left out, they are most of a JSON spec.

How it is run: by worlds/tool_calls.py. Text is parsed to a syntax tree (ast.parse) and literals are
read off the tree; nothing is compiled, looked up or called. No call at all is whatever is not a
name with keyword arguments that are literals: positional arguments, calls or names inside,
f-strings, attributes, comprehensions, sums, sets, bytes. Length, depth and digits are bounded as for JSON.
"""
import ast
import json
import keyword
import math
import re
import warnings

# of both spellings, this one and JSON
MAX_CHARS = 32_768    # of a model's text; more is not even looked at
MAX_DEPTH = 24        # brackets within brackets: far below what would exhaust a parser's stack
MAX_DIGITS = 18       # of an integer
MAX_LINES = 64        # calls, one a line
# of a function: a word of any script, with the dots, dashes and slashes that servers use
NAME = r"[^\W\d][\w.\-/]{0,127}"
CALL = re.compile(rf"({NAME})\((.*)\)", re.DOTALL)
NOTHING = "none"      # what the agent says where there is nothing to call
TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None",
         "array": "list", "object": "dict"}


# ---------------------------------------------------------------------------------------------
# writing


def signature(tool: dict) -> str:
    """A tool spec (name, description, parameters) as one line."""
    return f"{tool['name']}({_members(tool['parameters'], spoken)})"


def write_call(call: dict) -> str:
    """{"name", "arguments"} as one line; `parse_calls` gives the same back."""
    arguments = (f"{spoken(name)}={literal(value)}" for name, value in call["arguments"].items())
    return f"{call['name']}({', '.join(arguments)})"


def write_calls(calls) -> str:
    """Calls, one a line."""
    return "\n".join(map(write_call, calls))


def spoken(name: str) -> str:
    """An argument's name as a keyword: `from` becomes `from_`, as Python's own libraries do."""
    return name + "_" if keyword.iskeyword(name) else name


def unwritable(schema: dict) -> str:
    """The first argument name of a schema that is no keyword argument, such as "user id"; or ""."""
    for name in schema.get("properties", {}):
        if not name.isidentifier() or not name.isascii() or _heard(spoken(name)) != name:
            return name or "(empty)"
    return "(any name)" if isinstance(schema.get("additionalProperties"), dict) else ""


def literal(value) -> str:
    """A JSON value as a Python literal on one line, strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _members(schema: dict, say=str) -> str:
    """The members of an object schema, required ones first. say: how their names are written."""
    required, properties = schema.get("required", []), schema.get("properties", {})
    order = sorted(properties, key=lambda name: name not in required)  # stable
    return ", ".join(f"{say(name)}: {_type(properties[name])}"
                     + ("" if name in required else f" = {_default(properties[name])}")
                     for name in order)


def _default(schema: dict) -> str:
    return literal(schema["default"]) if "default" in schema else "..."


def _type(schema: dict) -> str:
    """A schema as a type; bounds and patterns are left out."""
    if "enum" in schema:
        return " | ".join(map(literal, schema["enum"]))
    named = schema.get("type", [])
    kinds = named if isinstance(named, list) else [named]
    if len(kinds) >= len(TYPES) - 1:
        return "any"
    # an object whose alternatives are only about its members has a type of its own
    unions = [_type(inner) for union in ("anyOf", "oneOf") for inner in schema.get(union, ())]
    words = [_one_type(kind, schema) for kind in kinds] or unions
    return " | ".join(dict.fromkeys(words))


def _one_type(kind: str, schema: dict) -> str:
    """One of the types that a schema names."""
    others = schema.get("additionalProperties")
    if kind == "array" and "items" in schema:
        return f"list[{_type(schema['items'])}]"
    if kind == "object" and schema.get("properties"):
        return "{" + _members(schema) + "}"
    if kind == "object" and isinstance(others, dict) and others:
        return f"dict[str, {_type(others)}]"
    return TYPES[kind]


# ---------------------------------------------------------------------------------------------
# reading


def parse_calls(text: str):
    """Calls, one a line, of a model's text -> list of {"name", "arguments"}, or None.

    None if there is no call or a line is none. Blank lines and the fence lines of a code block are
    skipped.
    """
    if len(text) > MAX_CHARS:
        return None
    lines = [line.strip() for line in text.strip().split("\n")]
    lines = [line for line in lines if line and not re.fullmatch(r"```\w*", line)]
    if not 1 <= len(lines) <= MAX_LINES:
        return None
    calls = [parse_call(line) for line in lines]
    return None if None in calls else calls


def parse_call(line: str):
    """One line that is one call -> {"name", "arguments"}, else None. Never raises."""
    found = CALL.fullmatch(line) if len(line) <= MAX_CHARS else None
    if not found or not shallow(found[2]) or "\0" in line:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            # the name stays outside: with dots or dashes it would be an expression of its own
            tree = ast.parse(f"f({found[2]})", mode="eval").body
        return {"name": found[1], "arguments": _arguments(tree)}
    # what a parser says of text that is no Python, or of Python that is deeper than its stack
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def shallow(text: str) -> bool:
    """Whether brackets outside of quotes nest at most MAX_DEPTH deep, and signs do not pile up."""
    depth, quote = 0, ""
    for mark in re.finditer(r"""\\.|["'()\[\]{}]|[-+~]{2}""", text, re.DOTALL):
        sign = mark.group()
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif len(sign) == 2 and sign[0] != "\\":
            return False
        if depth > MAX_DEPTH:
            return False
    return True


def _arguments(tree) -> dict:
    """The keyword arguments of the syntax tree of `f(...)`. Raises ValueError if it is not that."""
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)) or tree.args:
        raise ValueError("not one call with keyword arguments alone")
    names = [_heard(word.arg or "") for word in tree.keywords]
    if "" in names or len(set(names)) < len(names):
        raise ValueError("** or an argument given twice")
    return {name: _plain(ast.literal_eval(word.value))
            for name, word in zip(names, tree.keywords)}


def _heard(name: str) -> str:
    """The inverse of `spoken`."""
    return name[:-1] if name.endswith("_") and keyword.iskeyword(name[:-1]) else name


def _plain(value):
    """A Python literal as the JSON value it stands for. Raises ValueError if JSON has none."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {_text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str):
        return _text(value)
    # an integer of many digits would make canonical texts long, and floats of it inexact
    fits = (value is None or isinstance(value, bool)
            or type(value) is int and abs(value) < 10 ** MAX_DIGITS
            or isinstance(value, float) and math.isfinite(value))
    if not fits:
        raise ValueError("no JSON value")
    return value


def _text(value: str) -> str:
    """A string that a tokenizer takes: no NUL, no half of a surrogate pair."""
    if "\0" in value:
        raise ValueError("NUL in a string")
    value.encode("utf-8")
    return value
