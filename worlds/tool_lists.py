"""What users bring: lists of tools and example tasks, read into our own form.

Usage: `read_tools` for --tools FILE, `own_record` for a line of --base-tasks. A tool is

    {"name", "description", "parameters"}                      our own, and the older OpenAI form
    {"type": "function", "function": {...}}                    OpenAI
    {"name", "description", "inputSchema"}, or "input_schema"  MCP, Anthropic

in a JSON array, one per line, or in an object that holds the list, such as the answer of an MCP
server to `tools/list` or a line of a base-task file. Other fields are ignored, and null means that a
field is not there, at every level, as tables with a column for every field have it.

Deviations: a schema is rewritten in the keywords that worlds/schemas.py checks. $ref is replaced by what
it names, const by an enum, nullable by a type, oneOf by anyOf. Keywords that only narrow a value
(NOT_CHECKED) stay as notes and are counted. A tool whose calls would mean something else, or whose schema
is recursive, is left out and counted by the reason. A default that does not fit its own argument, such as
null for a text, is dropped: the argument may be left out all the same.
"""
import itertools
import json
import random
import re
from collections import defaultdict
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten

from model.files import UserError, choose, first_line, no_file
from worlds import InvalidTask, call_text
from worlds.schemas import NUMBERS, TYPES, conforms, invalid, kinds, load_object, need

MAX_TOOLS = 32       # of a task
MAX_NODES = 3000     # schemas within the schema of one tool, every $ref replaced
HOLDERS = ("result", "tools", "functions")  # keys that hold tools
SCHEMAS = ("parameters", "inputSchema", "input_schema")  # keys under which a tool has its arguments
NOTES = {"description", "title", "format", "examples", "default"}
CHECKED = {*NUMBERS, "type", "properties", "required", "items", "enum", "anyOf"}
NOT_CHECKED = {"pattern", "multipleOf", "uniqueItems", "contains", "propertyNames", "additionalProperties",
               "unevaluatedProperties", "minLength", "maxLength", "minItems", "maxItems", "minProperties",
               "maxProperties", "prefixItems"}  # they allow less: kept as notes
REFUSED = {"allOf", "not", "if", "patternProperties", "dependentRequired", "dependentSchemas",
           "dependencies", "$dynamicRef", "$recursiveRef"}  # without them a schema would mean more
KNOWN = NOTES | CHECKED | NOT_CHECKED
IN_PYTHON = {short: f": did you mean {name}?" for name, short in call_text.TYPES.items() if short != name}
NAMED = 3  # tools that are named with each reason


# ---------------------------------------------------------------------------------------------
# lists of tools


def read_tools(path, call_format: str = "json", what="--tools takes JSON or JSONL") -> tuple[list, dict]:
    """(tools in our own form, {what was left out or not checked: names of tools}) of a file.

    Of two tools with one name the first is taken. With the call_format "python", tools with an
    argument that it cannot write are left out. Raises UserError, with `what` the file should be, if
    there is no tool to use.
    """
    tools, notes = {}, defaultdict(list)
    for n, found in enumerate(map(_unwrapped, _tools_in(read_json(path, what))), 1):
        remarks = set()
        try:
            tool = own_tool(found, remarks)
            fit(call_format != "python" or not call_text.unwritable(tool["parameters"]),
                "an argument that is not a name in Python")
            fit(tools.setdefault(tool["name"], tool) == tool, "another tool of the same name came first")
        except InvalidTask as fault:
            remarks = {f"left out: {fault.detail}"}
        name = isinstance(found, dict) and found.get("name") or f"entry {n}"
        for remark in sorted(remarks):
            notes[remark].append(str(name)[:60])
    if not tools:
        what = as_line(notes) or "give --tools a list of functions, as of tools/list; --base-tasks: examples"
        raise UserError(f"{path}: no tool in it: {shorten(what, 200)}")
    return list(tools.values()), notes


def as_line(notes: dict) -> str:
    """The notes of `read_tools` as one line, `2 left out: unknown type 'x' (f, g)`."""
    return "; ".join(f"{len(names)} {what} ({', '.join(names[:NAMED])})" for what, names in notes.items())


def read_text(path, what: str) -> str:
    """The text of a file. Raises UserError, with `what` it should be, if there is none."""
    if not Path(path).is_file():
        raise UserError(f"{path}: {no_file(path)}; {what}")
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save the file in that encoding") from None


def read_json(path, what: str) -> list:
    """Every JSON value of a file: one, or one after another. Raises UserError with the line and `what`."""
    text, values, at = read_text(path, what).strip(), [], 0
    while at < len(text):
        try:
            value, at = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, what begins in line {text.count(chr(10), 0, at) + 1} is not JSON: "
                            f"{first_line(error)}; {what}") from None
        values.append(value)
        at = re.compile(r"\s*").match(text, at).end()
    return values


def _tools_in(value) -> list:
    """Everything in a JSON value that stands where a tool would."""
    if isinstance(value, list):
        return [tool for item in value for tool in _tools_in(item)]
    if not isinstance(value, dict) or set(SCHEMAS) & set(value):
        return [value]
    for key in HOLDERS:
        if isinstance(value.get(key), (list, dict)):
            return _tools_in(value[key])
    # records of a transcript or of a task file may have no tool: nothing is lost
    return [] if {"jsonrpc", "serverInfo", "task", "messages"} & set(value) else [value]


def _unwrapped(tool):
    """What OpenAI wraps as {"type": "function", "function": ...}; else the value itself."""
    wrapped = isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    return tool["function"] if wrapped else tool


# ---------------------------------------------------------------------------------------------
# a tool and its schema in our own form


def fit(holds, what):
    """Refuse a tool because of `what` unless something holds."""
    need(holds, what, "tool schema")


def own_tools(tools) -> list:
    """The tools of one task in our own form. Raises InvalidTask with .detail."""
    fit(isinstance(tools, list) and 1 <= len(tools) <= MAX_TOOLS, f"not a list of 1 to {MAX_TOOLS} tools")
    own = list(map(own_tool, tools))
    fit(len({tool["name"] for tool in own}) == len(own), "two tools have the same name")
    return own


def own_tool(tool, remarks=None) -> dict:
    """A tool in any of the shapes -> {"name", "description", "parameters"}.

    remarks: a set that gets what the user should know of it. Raises InvalidTask with .detail.
    """
    remarks = set() if remarks is None else remarks
    tool = _unwrapped(tool)
    fit(isinstance(tool, dict) and isinstance(tool.get("name"), str), "no 'name' in the function itself")
    fit(tool.get("type") in (None, "function"), f"of type {str(tool.get('type')):.40}, not a function")
    fit(re.fullmatch(call_text.NAME, tool["name"]), "a name with other signs than letters, digits and _.-/")
    given = next((tool[key] for key in SCHEMAS if tool.get(key) is not None), None)
    if given is None:
        remarks.add("without a schema: read as without arguments")
        given = {}
    try:
        own = call_text.plain({"name": tool["name"], "parameters": own_schema(given, remarks),
                               "description": str(tool.get("description") or "")})
    except (TypeError, AttributeError, ValueError, OverflowError, RecursionError):
        raise invalid("tool schema", "a malformed schema") from None
    parameters = own["parameters"]
    fit("anyOf" not in parameters and parameters.get("type") == "object", "parameters not one object schema")
    # {"city": "string"}: read as no arguments, every call of it would be wrong
    lost = [key for key, value in given.items() if key.isidentifier() and isinstance(value, (str, dict))]
    fit(parameters.get("properties") or not set(lost) - KNOWN - {"definitions"},
        """parameters without 'properties': a schema is {"type": "object", "properties": {...}}""")
    return own


def own_schema(root, remarks=None) -> dict:
    """A JSON schema of an object in the keywords of worlds/schemas.py. Raises InvalidTask.

    One that has only these keywords already comes back equal, if its defaults fit.
    """
    nodes, remarks = itertools.count(), set() if remarks is None else remarks

    def own(node, depth=0):
        fit(next(nodes) <= MAX_NODES and depth <= call_text.MAX_DEPTH,
            f"a recursive schema, or more than {MAX_NODES} parts or {call_text.MAX_DEPTH} levels")
        node = {key: value for key, value in node.items() if value is not None or key == "default"}
        fit(not (refused := REFUSED & node.keys()), f"unsupported keyword {min(refused, default='')!r}")
        remarks.update(f"with {key}, which is not checked" for key in NOT_CHECKED & node.keys()
                       if node[key] is not False)
        remarks.update(f"with {key!r}: did you mean {near!r}?" for key in node.keys() - KNOWN
                       for near in get_close_matches(key, CHECKED, 1, 0.8))
        kept = _keywords(node, lambda part: own(part, depth + 1))
        if "$ref" in node:
            fit(not CHECKED & kept.keys(), "other keywords next to $ref")
            kept = {**own(_look_up(root, node["$ref"]), depth + 1), **kept}
        return _finished(kept)
    whole = own(root)
    return whole if "type" in whole else {"type": "object", **whole}


def _keywords(node: dict, inner) -> dict:
    """The keywords of one schema that are kept, those within it by `inner`."""
    own = {key: value for key, value in node.items() if key in KNOWN}
    if "const" in node:
        own["enum"] = [node["const"]]
    if "properties" in own:
        members = own["properties"].items()
        own["properties"] = {name: inner(part) for name, part in members if part is not None}
    if own.get("properties") == {} and own.get("additionalProperties"):
        del own["properties"]  # an object with any members
    if "items" in own:
        own["items"] = inner(own["items"])
    if union := node.get("anyOf", node.get("oneOf")):
        own["anyOf"] = list(map(inner, union))
    if node.get("nullable") is True:
        own |= {"anyOf": [*own["anyOf"], {"type": "null"}]} if "anyOf" in own else {}
        own |= {"type": [*kinds(own), "null"]} if "type" in own else {}
        own |= {"enum": [*own["enum"], None]} if "enum" in own else {}
    return own


def _look_up(root, ref: str):
    """What a $ref within the same schema names, such as #/$defs/Place."""
    node = root
    for step in ref.removeprefix("#").split("/")[1:]:
        node = node.get(step) if isinstance(node, dict) else None
    fit(ref.startswith("#") and node is not None, "a $ref to nothing here")
    return node


def _finished(own: dict) -> dict:
    """The schema, checked, with a type that its members imply and without a default that does not fit."""
    if not {"type", "anyOf"} & own.keys() and {"properties", "required", "items"} & own.keys():
        own = {"type": "array" if "items" in own else "object", **own}
    for kind in kinds(own):
        fit(kind in TYPES, f"unknown type {kind!r:.40}{IN_PYTHON.get(kind, '')}")
    fit(all(type(own[key]) in (int, float) for key in NUMBERS & own.keys()), "a bound that is not a number")
    for name in own.get("required", ()):
        fit(name in own.get("properties", {}), f"required names {name!r:.40}, which properties does not have")
    fit("enum" not in own or isinstance(own["enum"], list) and own["enum"], "enum is not a list of values")
    if "default" in own and not conforms(own["default"], own):
        del own["default"]
    return own


# ---------------------------------------------------------------------------------------------
# a line of a task file in our own form

FIELDS = ("task", "tools", "calls", "ordered", "reference")  # others are the user's own
OFFERED = 3        # tools of the list that a task without tools is given, at least
LONGEST_BESIDE = 600  # characters of one that it does not call: a prompt holds several


def own_record(line: dict, listed=None) -> dict:
    """A line of a task file in any of the shapes -> {"task", "tools", "calls", ...} of our own.

    listed: {name: spec, or why it was left out} of --tools; a task without tools of its own has those
    that it calls, and others. Raises InvalidTask with .detail.
    """
    line = {key: value for key, value in line.items() if value is not None}
    if "task" not in line and "messages" in line:
        need(not {"calls", "tool_calls"} & line.keys(), "both 'messages' and calls: leave one of them out")
        line = {**line, **_of_chat(line["messages"])}
    elif "tool_calls" in line:
        need("calls" not in line, "both 'calls' and 'tool_calls': leave one of them out")
        line["calls"] = line["tool_calls"]
    # the one that may be left out: without the others a line is refused
    near = [] if "ordered" in line else get_close_matches("ordered", line, 1, 0.85)
    need(not near, f"unknown key {''.join(near)!r}: did you mean 'ordered'? correct or rename it")
    record = {key: line[key] for key in FIELDS if key in line}
    need("task" in record and {"calls", "reference"} & record.keys(), "needs 'task', and 'calls' or "
         f"'reference', and has: {', '.join(line) or 'nothing'}")
    if "calls" not in record:
        return record
    need(isinstance(record["calls"], list), "calls is not a list")
    record["calls"] = list(map(_own_call, record["calls"]))
    named = lambda tool: _listed(tool, listed or {}) if isinstance(tool, str) else tool
    record["tools"] = own_tools(list(map(named, _tools_in(record["tools"])))) if "tools" in record else \
        _called(record, listed)
    schema_of = {tool["name"]: tool["parameters"] for tool in record["tools"]}
    for call in record["calls"]:
        call["arguments"] = _without_nulls(call["arguments"], schema_of.get(call["name"], {}))
    return record


def _of_chat(messages) -> dict:
    """A chat of one request and the calls that answer it -> {"task", "calls"}. Raises InvalidTask."""
    need(isinstance(messages, list) and all(isinstance(m, dict) for m in messages),
         "messages is not a list of objects")
    asked = [m.get("content") for m in messages if m.get("role") == "user"]
    calling = [m["tool_calls"] for m in messages if m.get("role") == "assistant" and m.get("tool_calls")]
    need(len(asked) == 1, f"messages: {len(asked)} of the user instead of one")
    need(len(calling) == 1, f"messages: {len(calling)} of the assistant with \"tool_calls\" instead of one")
    return {"task": asked[0], "calls": calling[0]}


def _own_call(call) -> dict:
    """A call as it is, as OpenAI wraps it, or with its arguments as JSON text."""
    call = _unwrapped(call)
    need(isinstance(call, dict) and isinstance(call.get("name"), str), "a call without a 'name'")
    arguments = call.get("arguments")
    arguments = load_object(arguments) if isinstance(arguments, str) else arguments
    need(isinstance(arguments, dict), f"'arguments' missing, or not a JSON object, in a call with {[*call]}")
    return {"name": call["name"], "arguments": arguments}


def _without_nulls(value, schema: dict):
    """A value without the members that are null and may not be: a table has a column for each."""
    if isinstance(value, list):
        return [_without_nulls(part, schema.get("items", {})) for part in value]
    if not isinstance(value, dict):
        return value
    inner, required = schema.get("properties", {}), schema.get("required", ())
    return {name: _without_nulls(part, inner.get(name, {})) for name, part in value.items()
            if part is not None or name in required or name in inner and conforms(None, inner[name])}


def _called(record: dict, listed) -> list:
    """The tools of the list that a task calls, and others up to OFFERED: with the right ones alone,
    nobody would see whether an agent can choose."""
    need(listed, "no tools: they stand in the line, or in the list of --tools", "tool schema")
    names = {call["name"] for call in record["calls"]}
    others = sorted(name for name, tool in usable(listed).items()
                    if name not in names and len(str(tool)) <= LONGEST_BESIDE)
    n = min(max(OFFERED - len(names), 0), len(others))
    names |= set(random.Random(str(record.get("task"))).sample(others, n))
    return [_listed(name, listed) for name in sorted(names or list(usable(listed))[:1])]


def usable(listed: dict) -> dict:
    """The tools of a list without those that were left out of it."""
    return {name: tool for name, tool in listed.items() if isinstance(tool, dict)}


def _listed(name: str, listed: dict) -> dict:
    """The tool of a name in the list. Raises InvalidTask with .detail."""
    if not isinstance(tool := listed.get(name), dict):
        near = choose(name, usable(listed) or ["its functions"])
        why = f"of --tools was {tool}" if tool else f"is not in the list of --tools: {near}"
        raise invalid("unknown tool", f"{name!r:.80} {why}")
    return tool
