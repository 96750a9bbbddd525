"""Tool specs and calls as short text: signature lines, and `name(argument="value", n=3)`.

With `--call-format python` small models read and write this form instead of JSON. Only the spelling
differs: which arguments fit and when two calls agree is decided in worlds/tools/schemas.py.

    search_trains(origin: str, destination: str, seats: int = 1, window: bool = ...)
    search_trains(origin="Lyon", destination="Nice", seats=2)

A signature has the arguments of the JSON schema, required ones first: `= value` is the default, and
`= ...` says that the argument may be left out. Types are str, int, float, bool, None, any,
list[...], `{key: type}` for objects with declared members and dict for others; an enum is its
values with |, and so are several types. A function's description follows as a comment of 80
characters at most; those of its arguments, which are most of a JSON spec, are left out.

Text of a model is parsed to a syntax tree (ast.parse) and literals are read off the tree; nothing
is compiled, looked up or called. Whatever is not a name with keyword arguments that are literals is
refused. Both forms, this one and JSON, bound length, depth and digits alike (`plain`).
"""
import ast
import json
import keyword
import math
import re
import unicodedata
import warnings
from textwrap import shorten

MAX_CHARS = 32_768    # of a model's text; longer ones are not parsed
MAX_DEPTH = 48        # levels of lists and objects within a value
MAX_DIGITS = 20       # of an integer: 64 bits
MAX_LINES = 64        # calls, one per line
# of a function: a word of any script, with the dots, dashes and slashes that servers use
NAME = r"\w[\w.\-/]{0,127}"
CALL = re.compile(rf"({NAME})\((.*)\)", re.DOTALL)
NOTHING = "none"      # the agent's answer if there is nothing to call
TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None",
         "array": "list", "object": "dict"}


# ---------------------------------------------------------------------------------------------
# writing


def signature(tool: dict) -> str:
    """A tool spec (name, description, parameters) as one line."""
    line = f"{tool['name']}({_members(tool['parameters'], as_keyword)})"
    description = shorten(tool.get("description", ""), 80, placeholder=" ...")
    return f"{line}  # {description}".rstrip(" #")


def write_call(call: dict) -> str:
    """{"name", "arguments"} as one line; `parse_call` is the inverse."""
    arguments = call["arguments"].items()
    words = [f"{as_keyword(name)}={literal(value)}" for name, value in arguments]
    return f"{call['name']}({', '.join(words)})"


def as_keyword(name: str) -> str:
    """An argument's name as a keyword argument: `from` becomes `from_`, as in Python's own
    libraries."""
    return name + "_" if keyword.iskeyword(name) else name


def from_keyword(name: str) -> str:
    """The inverse of `as_keyword`."""
    return name[:-1] if name.endswith("_") and keyword.iskeyword(name[:-1]) else name


def unwritable(schema: dict) -> str:
    """The first argument name of a schema that Python cannot write, such as "user id"; or ""."""
    for name in schema.get("properties", {}):
        # Python reads letters of another width, or with an accent apart, as the usual ones
        if not name.isidentifier() or unicodedata.normalize("NFKC", name) != name:
            return name or "(empty)"
        if from_keyword(as_keyword(name)) != name:
            return name
    return ""


def literal(value) -> str:
    """A JSON value as a Python literal on one line, strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _members(schema: dict, spell=str) -> str:
    """The members of an object schema, required ones first. spell: how their names are written."""
    required = schema.get("required", ())
    members = schema.get("properties", {}).items()
    texts = []
    # False comes before True
    for name, part in sorted(members, key=lambda member: member[0] not in required):
        text = f"{spell(name)}: {_type(part)}"
        if name not in required:
            default = literal(part["default"]) if "default" in part else "..."
            text += f" = {default}"
        texts.append(text)
    return ", ".join(texts)


def _type(schema: dict) -> str:
    """A schema as a type; bounds are left out."""
    if "enum" in schema:
        return " | ".join(map(literal, schema["enum"]))
    # an object whose alternatives are only about its members has a type of its own
    words = [_one_type(kind, schema) for kind in kinds(schema)]
    if not words:
        words = [_type(part) for part in schema.get("anyOf", ())]
    return " | ".join(dict.fromkeys(words)) or "any"


def kinds(schema: dict):
    """The types that a schema names: one, several, or none."""
    kind = schema.get("type", [])
    return kind if isinstance(kind, list) else [kind]


def _one_type(kind: str, schema: dict) -> str:
    """One of the types that a schema names."""
    if kind == "array" and "items" in schema:
        return f"list[{_type(schema['items'])}]"
    if kind == "object" and schema.get("properties"):
        return "{" + _members(schema) + "}"
    return TYPES[kind]


# ---------------------------------------------------------------------------------------------
# reading


def parse_calls(text):
    """Calls, one per line, of a model's text -> list of {"name", "arguments"}, or None.

    None if there is no call or a line is not one. Blank lines and the fence lines of a code block
    are skipped.
    """
    if len(text) > MAX_CHARS:
        return None
    lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in lines if line and not re.fullmatch(r"```\w*", line)]
    if not 1 <= len(lines) <= MAX_LINES:
        return None
    calls = [parse_call(line) for line in lines]
    return None if None in calls else calls


def parse_call(line: str):
    """One line that is one call -> {"name", "arguments"}, else None. Never raises."""
    parts = CALL.fullmatch(line)
    if parts is None:
        return None
    name, arguments = parts.groups()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            # the name stays outside: with dots or dashes it would be an expression of its own
            tree = ast.parse(f"f({arguments})", mode="eval").body
        return {"name": name, "arguments": _arguments(tree)}
    # what the parser raises for text that is not Python, or nested deeper than its stack
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _arguments(tree) -> dict:
    """The keyword arguments of the syntax tree of `f(...)`. Raises ValueError if it is not that."""
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)) or tree.args:
        raise ValueError("not one call with keyword arguments alone")
    names = [from_keyword(word.arg or "") for word in tree.keywords]
    if "" in names or len(set(names)) < len(names):
        raise ValueError("** or an argument given twice")
    return {name: plain(ast.literal_eval(word.value)) for name, word in zip(names, tree.keywords)}


def plain(value, depth=0):
    """A Python value as the JSON value it stands for. Raises ValueError if there is none.

    Refused: NaN and infinities, integers over MAX_DIGITS digits, strings that a tokenizer cannot
    encode (NUL, lone surrogates), values nested deeper than MAX_DEPTH.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {plain(key): plain(item, depth + 1) for key, item in value.items()}
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
