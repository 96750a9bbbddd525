"""What users bring: lists of tools and example tasks, read into our own form.

Usage: `read_tools` for --tools FILE, `own_record` for a line of --base-tasks. A tool is

    {"name", "description", "parameters"}                      our own, and the older OpenAI form
    {"type": "function", "function": {...}}                    OpenAI
    {"name", "description", "inputSchema"}, or "input_schema"  MCP, Anthropic

in a JSON array, one per line, or in an object that holds the list, such as the answer of an MCP
server to `tools/list` or a line of a base-task file. Other fields are ignored, and null means that a
field is not there, at every level, as tables with a column for every field have it.

Deviations: a schema is rewritten in the keywords that worlds/schemas.py checks. $ref and allOf are
replaced by one schema, const by an enum, nullable by a type, oneOf by anyOf. Keywords that only narrow
a value (NOT_CHECKED) stay as notes and are counted. A tool whose calls would mean something else, or
whose schema is recursive, is left out and counted by the reason. A default that does not fit its own
argument, such as null for a text, is dropped: the argument may be left out all the same.
"""
import itertools
import json
import random
import re
from collections import defaultdict
from pathlib import Path
from urllib.parse import unquote

from support.files import UserError, no_file
from worlds import InvalidTask, call_text
from worlds.schemas import COUNTS, NUMBERS, TYPES, conforms, invalid, kinds, load_object

MAX_TOOLS = 32       # of a task
MAX_NODES = 3000     # schemas within the schema of one tool, every $ref replaced
MAX_BOUND = 10 ** 17  # a bound beyond it limits nothing that a model writes
HOLDERS = ("result", "tools", "functions")  # keys that hold tools
SCHEMAS = ("parameters", "inputSchema", "input_schema")  # keys under which a tool has its arguments
# keys of other libraries for the arguments: what they mean differs
OTHER_SCHEMAS = {"args_schema", "args", "inputs", "parameter_definitions", "schema", "arguments", "params",
                 "properties", "input"}
NOTES = {"description", "title", "format", "examples"}
NOT_CHECKED = {"pattern", "multipleOf", "uniqueItems", "contains", "propertyNames",
               "unevaluatedProperties"}  # they allow less: kept as notes
REFUSED = {"not", "if", "then", "else", "patternProperties", "dependentRequired", "dependentSchemas",
           "dependencies", "$dynamicRef", "$recursiveRef"}  # without them a schema would mean more
KEYWORDS = {*NOTES, *NOT_CHECKED, *NUMBERS, *COUNTS, "type", "properties", "required", "items", "enum",
            "default", "anyOf", "additionalProperties"}
NO_LIST = "a list is JSON or JSONL, see worlds/README.md"
NAMED = 3  # tools that are named with each reason


# ---------------------------------------------------------------------------------------------
# lists of tools


def read_tools(path, call_format: str = "json") -> tuple[list, dict]:
    """(tools in our own form, {what was left out or not checked: number of tools}) of a file.

    Of two tools with one name the first is taken. With the call_format "python", tools with an
    argument that it cannot write are left out. Raises UserError if there is no tool to use.
    """
    tools, notes = {}, defaultdict(list)
    for found in _tools_in(read_json(path)):
        remarks = set()
        try:
            tool = own_tool(found, remarks)
            if call_format == "python" and call_text.unwritable(tool["parameters"]):
                raise unfit("an argument that is not a name in Python")
            if tools.setdefault(tool["name"], tool) != tool:
                raise unfit("another tool of the same name came first")
        except InvalidTask as fault:
            remarks = {f"left out, {fault.detail}"}
        for remark in sorted(remarks):
            notes[remark].append(str(_name_of(found))[:60])
    few = lambda names: ", ".join([*dict.fromkeys(names)][:NAMED]) + ", ..." * (len(set(names)) > NAMED)
    notes = {f"{remark} ({few(names)})": len(names) for remark, names in notes.items()}
    if not tools:
        raise UserError(f"{path}: no tool in it that can be used: {as_line(notes) or NO_LIST:.200}")
    return list(tools.values()), notes


def as_line(notes: dict) -> str:
    """The notes of `read_tools` as one line."""
    return "; ".join(f"{what}: {n}" for what, n in notes.items())


def read_text(path, what: str) -> str:
    """The text of a file. Raises UserError, with `what` it should be, if there is none."""
    if not Path(path).is_file():
        raise UserError(f"{path}: {no_file(path)}; {what}")
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save the file in that encoding") from None


def read_json(path) -> list:
    """Every JSON value of a file: one, or one after another. Raises UserError with the line."""
    text, values, at = read_text(path, "--tools takes a list of tools as JSON or JSONL").strip(), [], 0
    while at < len(text):
        try:
            value, at = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, getattr(error, "pos", at)) + 1
            raise UserError(f"{path}, line {line}: not JSON; a list of tools is JSON or JSONL") from None
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
    return [value] if {"name", "type", "function", "mcpServers"} & set(value) else []


def _name_of(tool):
    tool = _unwrapped(tool)
    return tool.get("name") if isinstance(tool, dict) and tool.get("name") else "no name"


def _unwrapped(tool):
    """What OpenAI wraps as {"type": "function", "function": ...}; else the value itself."""
    wrapped = isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    return tool["function"] if wrapped else tool


# ---------------------------------------------------------------------------------------------
# a tool and its schema in our own form


def unfit(what: str) -> InvalidTask:
    """Why a tool cannot be taken, to raise."""
    return invalid("tool schema", what)


def own_tools(tools) -> list:
    """The tools of one task in our own form. Raises InvalidTask with .detail."""
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise unfit(f"tools is not a list of 1 to {MAX_TOOLS} tools")
    own = []
    for tool in tools:
        try:
            own.append(own_tool(tool))
        except InvalidTask as fault:
            raise unfit(f"tool {_name_of(tool)!r:.80}: {fault.detail}") from None
    if len({tool["name"] for tool in own}) < len(own):
        raise unfit("two tools have the same name")
    return own


def own_tool(tool, remarks=None) -> dict:
    """A tool in any of the shapes -> {"name", "description", "parameters"}.

    remarks: a set that gets what the user should know of it. Raises InvalidTask with .detail.
    """
    remarks = set() if remarks is None else remarks
    tool = _unwrapped(tool)
    if isinstance(tool, dict) and "mcpServers" in tool:
        raise unfit("how to start MCP servers: give their answers to tools/list instead")
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise unfit("no tool with a name")
    if tool.get("type") not in (None, "function"):
        raise unfit(f"of type {str(tool['type']):.40}, not a function")
    if not re.fullmatch(call_text.NAME, tool["name"]):
        raise unfit("a name with other characters than letters, digits and _.-/")
    given = next((tool[key] for key in SCHEMAS if tool.get(key) is not None), None)
    if given is None:
        if other := sorted(key for key in OTHER_SCHEMAS if tool.get(key)):
            raise unfit(f"no schema under 'parameters', but something under {other[0]!r}")
        remarks.add("has no schema, read as without arguments")
        given = {}
    if not isinstance(given, dict):
        raise unfit("a schema that is not an object")
    try:
        parameters = own_schema(given, remarks)
        description = tool.get("description")
        own = {"name": tool["name"], "parameters": parameters,
               "description": description if isinstance(description, str) else ""}
        call_text.plain(own)
    except InvalidTask:
        raise
    except (TypeError, AttributeError, ValueError, OverflowError, RecursionError):
        raise unfit("a malformed schema") from None
    if parameters.get("type") != "object":
        raise unfit("the parameters are not an object schema")
    loose = [key for key, part in given.items() if isinstance(part, dict) and "type" in part]
    if "properties" not in parameters and set(loose) - {"additionalProperties"}:
        raise unfit("arguments that do not stand under 'properties'")
    if any(part.get("properties", {}).keys() - parameters.get("properties", {}).keys()
           for part in parameters.get("anyOf", ())):
        raise unfit("arguments that only an alternative declares")
    return own


def own_schema(root, remarks=None) -> dict:
    """A JSON schema of an object in the keywords of worlds/schemas.py. Raises InvalidTask.

    One that has only these keywords already comes back equal, if its defaults fit.
    """
    nodes, remarks = itertools.count(), set() if remarks is None else remarks

    def own(node, depth=0):
        if next(nodes) > MAX_NODES or depth > call_text.MAX_DEPTH:
            raise unfit(f"a recursive schema, or more than {MAX_NODES} parts or {call_text.MAX_DEPTH} levels")
        if not isinstance(node, (dict, bool)):
            raise unfit("a schema that is not an object")
        node = {} if isinstance(node, bool) else {
            key: value for key, value in node.items() if value is not None or key == "default"}
        if refused := sorted(key for key in REFUSED & node.keys() if node[key] is not False):
            raise unfit(f"unsupported keyword {refused[0]!r}")
        named = ([node["$ref"]] if "$ref" in node else []) + node.get("allOf", [])
        kept = _keywords(node, lambda part: own(part, depth + 1), remarks)
        if not named:
            return _finished(kept)
        part = own(_look_up(root, named[0]) if isinstance(named[0], str) else named[0], depth + 1)
        if len(named) > 1 or any(part.get(key, kept[key]) != kept[key] or key not in part
                                 for key in kept.keys() - NOTES - {"default"}):
            raise unfit("several schemas for one value (allOf, or $ref with others next to it)")
        return _finished({**part, **kept})
    whole = own(root)
    return whole if "type" in whole else {"type": "object", **whole}


def _keywords(node: dict, inner, remarks) -> dict:
    """The keywords of one schema that are kept, those within it by `inner`."""
    own = {key: value for key, value in node.items() if key in KEYWORDS}
    unchecked = {key for key in (NOT_CHECKED | {"oneOf"}) & node.keys()
                 if node[key] not in (False, {}, {"type": "string"})}
    remarks.update(f"{key} is not checked" for key in unchecked)
    if "const" in node:
        own["enum"] = [node["const"]]
    if isinstance(own.get("required"), bool):  # of the third draft: its object reads it
        del own["required"]
    if "properties" in own:
        members = {name: part for name, part in own["properties"].items() if part is not None}
        marked = [name for name, part in members.items() if isinstance(part, dict)
                  and part.get("required") is True]
        if marked:
            own["required"] = [*own.get("required", ()), *marked]
        own["properties"] = {name: inner(part) for name, part in members.items()}
    if "items" in own:  # of a tuple, each place has a schema: none is checked
        own["items"] = inner({} if isinstance(own["items"], list) else own["items"])
    if isinstance(own.get("additionalProperties"), dict):
        own["additionalProperties"] = inner(own["additionalProperties"]) or True
    if own.get("additionalProperties") is True and own.get("properties") == {}:
        del own["properties"]  # an object with any members
    for key in [key for key in own if key in NUMBERS | COUNTS]:  # in the file's order: prompts show it
        _read_bound(own, key)
    own["anyOf"] = [inner(_in_object(part, own)) for part in node.get("anyOf", node.get("oneOf", ()))
                    if part != {"not": {}}]  # so a library says that an argument may be left out
    if node.get("nullable") is True:
        own["anyOf"] += [{"type": "null"}] * bool(own["anyOf"])
        own |= {"type": [*kinds(own), "null"]} if "type" in own else {}
        own |= {"enum": [*own["enum"], None]} if "enum" in own else {}
    return own if own["anyOf"] else {key: value for key, value in own.items() if key != "anyOf"}


def _read_bound(own: dict, key: str):
    """One bound as a number: "1" is 1, `exclusiveMinimum: true` is as drafts before the sixth have it."""
    value = own.pop(key, None)
    if value is True:
        value = own.pop(key.replace("exclusiveM", "m"), None)
    value = json.loads(value) if isinstance(value, str) else value
    if type(value) in (int, float) and abs(value) <= MAX_BOUND:
        own[key] = value


def _in_object(part, own: dict):
    """An alternative of an object schema: it may speak of the members that stand next to it."""
    if own.get("properties") and isinstance(part, dict) and "required" in part:
        return {**part, "properties": {**own["properties"], **part.get("properties", {})}}
    return part


def _look_up(root, ref: str):
    """What a $ref within the same schema names, such as #/$defs/Place."""
    node = root
    for step in unquote(ref.removeprefix("#")).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        node = node.get(step) if isinstance(node, dict) else None
    if not ref.startswith("#") or node is None:
        raise unfit("a $ref to nothing here")
    return node


def _finished(own: dict) -> dict:
    """The schema, checked, with a type that its members imply and without a default that does not fit."""
    if not {"type", "anyOf"} & own.keys() and {"properties", "required", "items"} & own.keys():
        own = {"type": "array" if "items" in own else "object", **own}
    for kind in kinds(own):
        if kind not in TYPES:
            raise unfit(f"unknown type {kind!r:.40}")
    if missing := [name for name in own.get("required", ()) if name not in own.get("properties", {})]:
        raise unfit(f"required names {missing[0]!r:.40}, which properties does not have")
    if "enum" in own and not (isinstance(own["enum"], list) and own["enum"]):
        raise unfit("enum is not a list of values")
    if "default" in own and not conforms(own["default"], own):
        del own["default"]
    return own


# ---------------------------------------------------------------------------------------------
# a line of a task file in our own form

FIELDS = ("task", "tools", "calls", "ordered", "reference")  # others are the user's own
CALL_KEYS = {"name", "arguments", "id", "call_id", "type", "index"}
OFFERED = 3        # tools of the list that a task without tools is given, at least
LONGEST_BESIDE = 600  # characters of one that it does not call: a prompt holds several


def own_record(line: dict, listed=None) -> dict:
    """A line of a task file in any of the shapes -> {"task", "tools", "calls", ...} of our own.

    listed: {name: spec} of --tools; a task without tools of its own has those that it calls, and
    others. Raises InvalidTask with .detail.
    """
    line = {key: value for key, value in line.items() if value is not None}
    if "task" not in line and "messages" in line:
        line = {**line, **_of_chat(line["messages"])}
    elif "tool_calls" in line:
        need("calls" not in line, "both 'calls' and 'tool_calls': leave one of them out")
        line["calls"] = line["tool_calls"]
    record = {key: line[key] for key in FIELDS if key in line}
    if "calls" not in record:
        return record
    need(isinstance(record["calls"], list), "calls is not a list")
    record["calls"] = list(map(_own_call, record["calls"]))
    if "tools" in record:
        record["tools"] = own_tools(list(_tools_in(record["tools"])))
    else:
        record["tools"] = _called(record, listed)
    schema_of = {tool["name"]: tool["parameters"] for tool in record["tools"]}
    for call in record["calls"]:
        call["arguments"] = _without_nulls(call["arguments"], schema_of.get(call["name"], {}))
    return record


def need(holds, what, reason="malformed task"):
    """Raise InvalidTask(reason) with what as its detail unless something holds."""
    if not holds:
        raise invalid(reason, what)


def _of_chat(messages) -> dict:
    """A chat of one request and the calls that answer it -> {"task", "calls"}. Raises InvalidTask."""
    need(isinstance(messages, list) and all(isinstance(m, dict) for m in messages),
         "messages is not a list of objects")
    asked = [m.get("content") for m in messages if m.get("role") == "user"]
    calling = [m["tool_calls"] for m in messages if m.get("role") == "assistant" and m.get("tool_calls")]
    need(len(asked) == 1, f"messages: {len(asked)} of the user instead of one")
    need(len(calling) == 1, f"messages: {len(calling)} of the assistant with \"tool_calls\" instead of one")
    if isinstance(asked[0], list):  # a text in parts
        asked = ["\n".join(str(part["text"]) for part in asked[0] if "text" in part)]
    return {"task": asked[0], "calls": calling[0]}


def _own_call(call) -> dict:
    """A call as it is, as OpenAI wraps it, or with its arguments as JSON text."""
    call = _unwrapped(call)
    need(isinstance(call, dict) and isinstance(call.get("name"), str), "a call without a 'name'")
    others = sorted(key for key, value in call.items() if key not in CALL_KEYS and value is not None)
    need(not others, f"the call of {call['name']!r:.80} has {others}: write its arguments under 'arguments'")
    arguments = call.get("arguments") or {}
    arguments = load_object(arguments) if isinstance(arguments, str) else arguments
    need(isinstance(arguments, dict), f"the arguments of {call['name']!r:.80} are not a JSON object")
    return {"name": call["name"], "arguments": arguments}


def _without_nulls(value, schema: dict):
    """A value without the members that are null and may not be: a table has a column for each."""
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
    for name in names:
        need(name in listed, f"it calls {name!r:.80}, which is not in the list of --tools", "unknown tool")
    others = sorted(name for name in listed.keys() - names if len(str(listed[name])) <= LONGEST_BESIDE)
    n = min(max(OFFERED - len(names), 0), len(others))
    names |= set(random.Random(str(record.get("task"))).sample(others, n))
    return [listed[name] for name in sorted(names or list(listed)[:1])]
