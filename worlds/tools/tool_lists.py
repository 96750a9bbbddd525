"""Convert users' lists of tools and their example tasks to our own form.

Usage: `read_tools` for --tools FILE, `normalized_record` for a line of --base-tasks. A tool is

    {"name", "description", "parameters"}                      our own, and the older OpenAI form
    {"type": "function", "function": {...}}                    OpenAI
    {"name", "description", "inputSchema"}, or "input_schema"  MCP, Anthropic

in a JSON array, one per line, or in an object that holds the list, such as the answer of an MCP
server to `tools/list` or a line of a base-task file. Other fields are ignored. null means that a
field of a tool, of a line or of a schema is missing, as in tables with a column for every field;
but a `default` may be null, and {"const": null} allows null.

Deviations: a schema is rewritten in JSON Schema's draft 2020-12. The simulator and the agent are
shown this form, and worlds/tools/schemas.py checks calls against it. The content of a $ref or allOf
is merged into the schema around it, unless the two contradict each other. Where a schema recurs
within itself, anything fits. const becomes an enum, and a list of items becomes prefixItems. oneOf
becomes anyOf, and is dropped beside an anyOf. A default that does not fit its own argument, such as
null for a text, is dropped: the argument may still be left out. An enum is dropped if none of its
values has the declared type. OpenAPI's nullable is not read. multipleOf and uniqueItems are not
checked: in binary floating point 19.99 is not a multiple of 0.01, and comparing all pairs of items
takes minutes for a long list. A tool that cannot be read, or can never be called, is left out and
reported with the reason.
"""
import json
import random
import re
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from textwrap import shorten

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import UnknownType
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from errors import UserError, choose, first_line, printable, require_file
from worlds import InvalidTask
from worlds.tools.schemas import conforms, json_value, kinds, well_formed, with_parts

# a function's name: a word of any script, with the dots, dashes and slashes that servers use
NAME = re.compile(r"\w[\w.\-/]{0,127}")
MAX_TOOLS = 32       # of a task
MAX_PARTS = 3000     # schemas within the schema of one tool, with every $ref replaced
NAMED = 3            # tools or lines that are named with each reason
OFFERED = 3          # tools that a task gets if it lists none; it gets more if it calls more
LONGEST_BESIDE = 600  # characters of the longest tool that it does not call; a prompt holds several

# keys of a line of a task file; others are the user's own business
FIELDS = ("task", "tools", "calls", "ordered", "reference")
# keys that hold a list of tools, and those that hold a tool's arguments
HOLDERS = ("result", "tools", "functions")
SCHEMAS = ("parameters", "inputSchema", "input_schema")

# keywords of a schema that are kept: notes, and those that values are checked against
NOTES = {"description", "title", "format", "default"}
KEPT = {*Draft202012Validator.VALIDATORS, "then", "else", "minContains", "maxContains", *NOTES} \
    - {"$ref", "$dynamicRef", "const", "oneOf", "multipleOf", "uniqueItems"}
REFUSED = {"dependencies", "$dynamicRef", "$recursiveRef"}  # to ignore them would allow more values
# what reading a schema of any form may raise
MALFORMED = (TypeError, AttributeError, ValueError, RecursionError, re.error, UnknownType,
             SchemaError)


# ---------------------------------------------------------------------------------------------
# lists of tools


def read_tools(path):
    """Read a file and return ({name: tool in our own form}, {remark: names of tools}).

    A remark says why a tool was left out, or what is odd about it. Of two tools with the same name
    the first is taken. Raise UserError if there is no tool to use.
    """
    values = read_json(path)
    try:
        entries = [_unwrapped(entry) for entry in _tools_in(values)]
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    tools, notes = {}, defaultdict(list)
    for number, entry in enumerate(entries, 1):
        remark = ""
        try:
            tool = normalized_tool(entry)
            if tools.get(tool["name"], tool) != tool:
                raise InvalidTask("tool schema", "another tool of the same name came first")
            tools[tool["name"]] = tool
            # say so, because a key that we do not know may hold the schema
            if entry.keys().isdisjoint(SCHEMAS):
                remark = "no schema: read as taking no arguments"
        except InvalidTask as fault:
            remark = f"left out: {fault.detail}"
        if remark:
            name = entry.get("name") if isinstance(entry, dict) else ""
            notes[remark].append(str(name or f"entry {number}")[:60])
    cursor = next_cursor(values)
    if cursor:
        what = "nextCursor of a page that is missing: add that page to get its functions"
        notes[what].append(str(cursor)[:60])
    if not tools:
        hint = "--tools takes a list of functions, as from tools/list; --base-tasks takes examples"
        raise UserError(f"{path}: no tool in it: {shorten(notes_line(notes) or hint, 200)}")
    return tools, notes


def next_cursor(values):
    """Return the last nextCursor of an MCP list, or None if the file has the list's last page."""
    answers = [value.get("result", value) for value in values if isinstance(value, dict)]
    cursors = [answer.get("nextCursor") for answer in answers
               if isinstance(answer, dict) and "tools" in answer]
    return cursors[-1] if cursors and all(cursors) else None


def notes_line(notes: dict) -> str:
    """Return the notes of `read_tools` as one line, `f, g: left out: unknown type 'x'`."""
    parts = [f"{first_of(names)}: {what}" for what, names in notes.items()]
    return printable("; ".join(parts))


def first_of(names: list) -> str:
    """Return the first names or numbers of a list, and how many more there are."""
    text = ", ".join(map(str, names[:NAMED]))
    number = len(names) - NAMED
    return f"{text} and {number} more" if number > 0 else text


def read_text(path, what: str) -> str:
    """Return the text of a file. Raise UserError if it is missing or not UTF-8.

    what: a clause for the message, on the format that is expected.
    """
    require_file(path, f"; {what}")
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save the file in that encoding") from None


def read_json(path) -> list:
    """Return every JSON value of a file, which holds one or more, one after another.

    Raise UserError naming the line at fault.
    """
    what = "--tools takes JSON or JSONL"
    text = read_text(path, what).strip()
    values, place = [], 0
    while place < len(text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, place) + 1
            fault = f"what begins in line {line} is not JSON: {first_line(error)}"
            raise UserError(f"{path}, {fault}; {what}") from None
        values.append(value)
        # skip the blanks between two values
        place = len(text) - len(text[end:].lstrip())
    return values


def _tools_in(value) -> list:
    """Return everything in a JSON value that is where a tool would be."""
    if isinstance(value, list):
        return [tool for item in value for tool in _tools_in(item)]
    if not isinstance(value, dict) or set(SCHEMAS) & set(value):
        return [value]
    for key in HOLDERS:
        if isinstance(value.get(key), (list, dict)):
            return _tools_in(value[key])
    # skip, without a report, a record of a transcript or of a task file that has no tools
    records = {"jsonrpc", "serverInfo", "task"}
    return [value] if records.isdisjoint(value) else []


def _unwrapped(tool):
    """Return what OpenAI wraps as {"type": "function", "function": ...}, else the value itself."""
    wrapped = isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    return tool["function"] if wrapped else tool


# ---------------------------------------------------------------------------------------------
# a tool and its schema in our own form


def normalized_tools(tools) -> list:
    """Return the tools of one task in our own form. Raise InvalidTask with .detail."""
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise InvalidTask("tool schema", f"not a list of 1 to {MAX_TOOLS} tools")
    tools = [normalized_tool(tool) for tool in tools]
    if len({tool["name"] for tool in tools}) < len(tools):
        raise InvalidTask("tool schema", "two tools have the same name")
    return tools


def normalized_tool(tool) -> dict:
    """Return a tool in any of the shapes as {"name", "description", "parameters"}.

    Raise InvalidTask with .detail.
    """
    tool = _unwrapped(tool)
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise InvalidTask("tool schema", "no 'name' in the function itself")
    if tool.get("type") not in (None, "function"):
        raise InvalidTask("tool schema", f"it is of type {str(tool['type'])[:40]}, not a function")
    if not NAME.fullmatch(tool["name"]):
        detail = "its name has characters other than letters, digits and _.-/"
        raise InvalidTask("tool schema", detail)
    schemas = [tool[key] for key in SCHEMAS if tool.get(key)]
    root = schemas[0] if schemas else {"type": "object"}
    try:
        parameters = SchemaReader(root).read(root)
        normalized = json_value({"name": tool["name"], "parameters": parameters,
                                 "description": str(tool.get("description") or "")})
        _check_schema(json.dumps(parameters))  # text, so that lru_cache can hash it
    except MALFORMED as error:
        raise InvalidTask("tool schema", f"malformed schema: {first_line(error):.80}") from None
    _check_one_object(parameters)
    return normalized


def _check_one_object(parameters: dict):
    """Raise InvalidTask unless all arguments are properties of a single object."""
    others = [*parameters.get("anyOf", ()), *parameters.get("allOf", ())]
    elsewhere = any("properties" in part for part in others)
    # {"city": "string"} is not a schema either, though users often write it
    if parameters.get("type") != "object" or elsewhere:
        raise InvalidTask("tool schema", "its parameters are not one object schema, "
                          """{"type": "object", "properties": {...}}""")
    _check_required({"properties": {}, **parameters})


def _check_required(schema: dict):
    """Raise InvalidTask if an object requires a member that it may not have."""
    # without properties any member is allowed, and these keywords may declare it too
    if "properties" not in schema or {"allOf", "patternProperties"} & schema.keys():
        return
    for name in schema.get("required", ()):
        if name not in schema["properties"]:
            detail = f"required names {name!r:.40}, which is not in properties"
            raise InvalidTask("tool schema", detail)


@lru_cache(4096)
def _check_schema(schema: str):
    """Raise SchemaError if a schema, as JSON text, is not valid."""
    Draft202012Validator.check_schema(json.loads(schema))


class SchemaReader:
    """Read the parts of one schema, `root`.

    For example, if the root is

        {"properties": {"to": {"$ref": "#/$defs/City"}}, "$defs": {"City": {"const": "Nice"}}}

    read(root) is {"type": "object", "properties": {"to": {"enum": ["Nice"]}}}. Reading the result
    again returns an equal schema.
    """

    def __init__(self, root: dict):
        self.resolver = Registry().resolver_with_root(DRAFT202012.create_resource(root))
        self.parts = 0  # read so far

    def read(self, node, path=("#",)) -> dict:
        """Return one schema within the root in our own form.

        path: the references followed from the root to it. Raise InvalidTask, or one of MALFORMED.
        """
        self.parts += 1
        if self.parts > MAX_PARTS:
            raise InvalidTask("tool schema", f"a schema of more than {MAX_PARTS} parts")
        if isinstance(node, bool):  # true: anything fits; false: nothing
            return {} if node else {"not": {}}
        if node == {"const": None}:
            return {"type": "null"}
        node = {key: value for key, value in node.items() if value is not None or key == "default"}
        refused = REFUSED & node.keys()
        if refused:
            raise InvalidTask("tool schema", f"unsupported keyword {min(refused)!r}")
        schema = with_parts(_keywords(node), lambda key, part: self.read(part, path))
        parts = schema.pop("allOf", [])
        if "$ref" in node:
            parts = [self.target(node["$ref"], path), *parts]
        for part in parts:
            schema = _merged(schema, part)
        schema = _typed(schema)
        _check_required(schema)
        # drop an enum that no value could satisfy, such as one of texts for an integer
        types = kinds(schema)
        if types and not any(conforms(value, {"type": types}) for value in schema.get("enum", ())):
            schema.pop("enum", None)
        if "default" in schema and not conforms(schema["default"], schema):
            del schema["default"]
        return schema

    def target(self, ref: str, path: tuple) -> dict:
        """Return the schema that a $ref names, such as #/$defs/Place, or {} where it recurs.

        Nothing outside the root is looked up.
        """
        try:
            node = self.resolver.lookup(ref).contents
        except Unresolvable:
            raise InvalidTask("tool schema", "a $ref to nothing in this schema") from None
        return {} if ref in path else self.read(node, (*path, ref))


def _keywords(node: dict) -> dict:
    """Return the kept keywords of a schema; the schemas within it stay as they are."""
    schema = {key: value for key, value in node.items() if key in KEPT}
    if isinstance(node.get("type"), str):  # some write String, or STRING
        schema["type"] = node["type"].lower()
    if "const" in node:
        schema["enum"] = [node["const"]]
    if "oneOf" in node:
        schema.setdefault("anyOf", node["oneOf"])
    if "properties" in node:  # a member that no value fits is not declared
        members = node["properties"].items()
        schema["properties"] = {name: part for name, part in members if part not in (None, False)}
    if isinstance(node.get("items"), list):  # up to draft 7
        schema["prefixItems"] = node["items"]
        schema["items"] = node.get("additionalItems", {})
    return schema


def _merged(schema: dict, part: dict) -> dict:
    """Merge two schemas for one value. If they contradict each other, allOf holds the second."""
    shared = schema.keys() & part.keys() - NOTES
    if any(schema[key] != part[key] for key in shared):
        return {**schema, "allOf": [*schema.get("allOf", ()), part]}
    return {**part, **schema}


def _typed(schema: dict) -> dict:
    """Return a schema with the type that its keywords imply, if it names none."""
    if {"type", "anyOf"} & schema.keys():
        return schema
    if {"properties", "required"} & schema.keys():
        return {"type": "object", **schema}
    if "items" in schema:
        return {"type": "array", **schema}
    return schema


# ---------------------------------------------------------------------------------------------
# a line of a task file


def normalized_record(line: dict, listed: dict) -> dict:
    """Return the FIELDS of a line of a task file, with the specs of all its tools.

    listed: {name: spec} of --tools. The line may give a tool of that list by its name. A task
    without tools gets those that it calls, and others. Raise InvalidTask with .detail.
    """
    record = {key: line[key] for key in FIELDS if line.get(key) is not None}
    tools = record.get("tools")
    if "calls" in record and tools is None:
        record["tools"] = _listed_tools(record, listed)
    elif isinstance(tools, list):
        record["tools"] = [listed.get(tool, tool) if isinstance(tool, str) else tool
                           for tool in tools]
    return record


def _listed_tools(record: dict, listed: dict) -> list:
    """Return the tools of the list that a task calls and random others, up to OFFERED.

    The others make the agent choose. The task's text seeds the draw.
    """
    if not listed:
        detail = "no tools: they belong in the line, or in the list of --tools"
        raise InvalidTask("tool schema", detail)
    # anything that isn't a call is reported when the task is made
    calls = record["calls"] if isinstance(record["calls"], list) else []
    called = {call["name"] for call in calls if well_formed(call)}
    for name in called - listed.keys():
        detail = f"{name!r:.80} is not in the list of --tools: {choose(name, listed)}"
        raise InvalidTask("unknown tool", detail)
    short = [name for name, tool in listed.items() if len(str(tool)) <= LONGEST_BESIDE]
    others = sorted(set(short or listed) - called)
    number = min(max(OFFERED - len(called), 0), len(others))
    names = called.union(random.Random(str(record.get("task"))).sample(others, number))
    return [listed[name] for name in sorted(names)]
