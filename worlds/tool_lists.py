"""What users bring: lists of functions and tasks in the shapes that others write, in our own form.

What of the paper this is: nothing; it is how the tools of an API or of an MCP server get in.

How it is run: `read_tools` for --tools FILE, `own_record` for a line of --base-tasks. A function is

    {"name", "description", "parameters"}                      our own, and the older OpenAI form
    {"type": "function", "function": {...}}                    OpenAI
    {"name", "description", "inputSchema"}, or "input_schema"  MCP, Anthropic

in a JSON array, one a line, or in an object that holds the list, such as the answer of an MCP
server to `tools/list` as it came, or a line of a base-task file. Other fields are ignored.

Where it differs on purpose: a schema is rewritten in the keywords that worlds/schemas.py checks.
$ref is replaced by what it names, allOf by one schema, const by an enum, nullable by a type; a type that
is missing is read off the other keywords. What is only a note is kept or dropped. A function whose
meaning would change, or that is recursive, is left out and counted by the reason. oneOf and anyOf
stay. A default that is no value of its argument, such as null for a text, is dropped: the argument
may be left out all the same.
"""
import itertools
import json
import random
import re
from collections import Counter, defaultdict
from pathlib import Path
from urllib.parse import unquote

from support.files import UserError, no_file
from worlds import InvalidTask, call_text
from worlds.schemas import KEYWORDS, MAX_DEPTH, NOTES, NUMBERS, TYPES, UNIONS, check_schema, \
    conforms, invalid, kinds, load_object

MAX_BYTES = 2 ** 26  # of a file
MAX_NODES = 3000     # schemas within the schema of one function, every $ref replaced
MAX_BOUND = 10 ** 17  # a limit of a number beyond it limits nothing that a model writes
HOLDERS = ("result", "tools", "functions", "functionDeclarations", "function_declarations",
           "function")  # of functions
# under which of its keys a function has its arguments, and a call
SCHEMAS = ("parameters", "inputSchema", "input_schema", "parametersJsonSchema")
OTHER_SCHEMAS = {"args_schema", "args", "inputs", "parameter_definitions", "schema", "arguments",
                 "params", "properties", "input"}  # of other libraries: what they mean differs
ARGUMENTS = ("arguments", "parameters", "input", "args")
CALL_KEYS = ("name", "id", "call_id", "type", "index")  # beside the arguments
CALL_MARKS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>")  # of a call in a text
# keywords that forbid values and that nothing here checks: without them a call would mean more
CHECKS = {"not", "if", "then", "else", "patternProperties", "dependentRequired", "dependentSchemas",
          "dependencies", "contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef",
          "uniqueItems"}
# keywords that may hold an object's arguments in place of `properties`
PARTS = {"properties", "allOf", *UNIONS, "$ref", "additionalProperties"}
CONTROL = re.compile(r"<\|[^<>|\s]{1,40}\|>|<(?:start|end)_of_turn>")  # a text may not end a turn
# the keywords that speak of one type alone
SPEAK_OF = {"object": {"properties", "required", "additionalProperties", "minProperties",
                       "maxProperties"},
            "array": {"items", "minItems", "maxItems"},
            "string": {"pattern", "minLength", "maxLength"}, "number": NUMBERS}
NAMED = 3  # functions that are named beside each reason


# ---------------------------------------------------------------------------------------------
# lists of functions


def read_tools(path, call_format: str = "json") -> tuple[list, Counter]:
    """(function specs in our own form, functions left out by reason) of a file.

    Of two functions of one name the first is taken. call_format: with "python", functions with an
    argument that it cannot write are left out. Raises UserError if there is no function to use.
    """
    tools, faults, seen = {}, defaultdict(list), defaultdict(list)
    values = read_json(path)
    for found in _functions(values):
        try:
            tool = own_tool(found)
            if call_format == "python" and call_text.unwritable(tool["parameters"]):
                raise unfit("an argument that is no name in Python")
        except InvalidTask as fault:
            name = found.get("name") if isinstance(found, dict) else None
            # the reason alone: which argument it is of would split the count
            reason = re.sub("^the schema[^:]*: ", "", fault.detail)
            faults[reason].append(str(name or "no name")[:60])
            continue
        first = tools.setdefault(tool["name"], tool)
        if first != tool and tool not in seen[tool["name"]]:
            seen[tool["name"]].append(tool)
            faults["another function of the same name came first"].append(tool["name"])
    left_out = Counter({f"{why} ({_few(names)})": len(names) for why, names in faults.items()})
    if _more_pages(values):
        left_out["the pages after the last one here (nextCursor)"] = 1
    if not tools:
        why = "; ".join(f"{reason}: {n}" for reason, n in left_out.most_common(3))
        raise UserError(f"{path}: no function " + (f"that can be used: {why}" if why else
                        f"in it{_instead(values)}: --tools takes JSON or JSONL, see worlds/README.md"))
    return list(tools.values()), left_out


def reasons(left_out: Counter) -> str:
    """What `read_tools` left out, as one line."""
    return ", ".join(f"{reason}: {n}" for reason, n in left_out.most_common())


def _instead(values) -> str:
    """What a file without any function seems to be."""
    for value in filter(lambda value: isinstance(value, dict), values):
        if "openapi" in value or "swagger" in value:
            return "; of an OpenAPI file each operation has to be written as a function first"
        if "error" in value:
            return f"; the server answered {json.dumps(value['error'], ensure_ascii=False)[:200]}"
    return ""


def _more_pages(values) -> bool:
    """Whether the last page of an MCP server's list says that another one follows."""
    answers = [value.get("result", value) for value in values if isinstance(value, dict)]
    pages = [answer for answer in answers if isinstance(answer, dict) and "tools" in answer]
    return bool(pages) and bool(pages[-1].get("nextCursor"))


def _few(names) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:NAMED]) + ", ..." * (len(distinct) > NAMED)


def read_json(path) -> list:
    """Every JSON value of a file: one, or one after another. Raises UserError with the line."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: {no_file(path)}; --tools takes a list of functions as JSON or "
                        "JSONL, see worlds/README.md")
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path}: more than {MAX_BYTES // 2 ** 20} MB are no list of functions")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save the file in that encoding") from None
    values, at, decoder = [], _next(text, 0), json.JSONDecoder(parse_constant=_refuse)
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:  # of JSON: where; of a huge number: nowhere
            line = text.count("\n", 0, getattr(error, "pos", at)) + 1
            what = getattr(error, "msg", "nested too deep or a number out of range")
            hint = "" if text[at:at + 1] in ("{", "[") else ": --tools takes JSON or JSONL"
            raise UserError(f"{path}, line {line}: not JSON ({what}); correct it{hint}") from None
        values.append(value)
        at = _next(text, end)
    return values


def _next(text: str, at: int) -> int:
    return re.compile(r"\s*").match(text, at).end()


def _refuse(constant):
    raise ValueError("no number")


def _functions(value, depth: int = 0):
    """Everything in a JSON value that stands where a function would."""
    if isinstance(value, list):
        for item in value:
            yield from _functions(item, depth)
        return
    # a function may well have a key "result": then it is one all the same
    held = [value[key] for key in HOLDERS if isinstance(value.get(key), (list, dict))] \
        if isinstance(value, dict) and depth < 4 and not (
            "name" in value and set(SCHEMAS) & set(value)) else []
    if held:
        yield from _functions(held, depth + 1)
    # a transcript of JSON-RPC and a file of tasks have records without a function: nothing is lost
    elif not isinstance(value, dict) or {"name", "description", *SCHEMAS} & set(value) \
            and not {"task", "messages"} & set(value):
        yield value


# ---------------------------------------------------------------------------------------------
# a function and its schema in our own form


def unfit(what: str) -> InvalidTask:
    """Why something cannot be taken, to raise."""
    return invalid("tool schema", what)


def own_tool(tool) -> dict:
    """A function in any of the shapes -> {"name", "description", "parameters"}.

    Raises InvalidTask with .detail, the reason.
    """
    tool = _function_of(tool)
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise unfit("no function with a name")
    given = next((tool[key] for key in SCHEMAS if tool.get(key)), {})
    if not set(SCHEMAS) & set(tool) and (other := sorted(key for key in OTHER_SCHEMAS if tool.get(key))):
        raise unfit(f"no schema under 'parameters', but something under {other[0]!r}")
    if isinstance(given, dict) and not PARTS & set(given) and any(
            isinstance(value, dict) and "type" in value for value in given.values()):
        raise unfit("arguments that do not stand under 'properties'")
    try:
        parameters = own_schema(given) if given else {"type": "object", "properties": {}}
        check_schema(parameters, "the schema")
        text = json.dumps([tool["name"], tool.get("description"), parameters], ensure_ascii=False)
    except (TypeError, AttributeError, OverflowError, RecursionError):  # such as a list for a number
        raise unfit("a malformed schema") from None
    if parameters.get("type") != "object":
        raise unfit("the parameters are no object schema")
    if any(part.get("properties", {}).keys() - parameters.get("properties", {}).keys()
           for union in UNIONS for part in parameters.get(union, ())):
        raise unfit("arguments that only an alternative declares")
    description = tool.get("description")
    own = {"name": tool["name"], "description": description if isinstance(description, str) else "",
           "parameters": parameters}
    if not re.fullmatch(call_text.NAME, own["name"]):
        raise unfit("a name of other signs than letters, digits and _.-/")
    if "\\u0000" in text or not written(text):
        raise unfit("a text that no tokenizer takes")
    if CONTROL.search(text):
        raise unfit("a control token of a chat template")
    return own


def _function_of(tool):
    """What OpenAI wraps as {"type": "function", "function": ...}; else the value itself."""
    wrapped = isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    return tool["function"] if wrapped else tool


def written(text: str) -> bool:
    """Whether a tokenizer takes a text: no NUL, no half of a surrogate pair."""
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:
        return False


def own_schema(root) -> dict:
    """A JSON schema in the keywords of worlds/schemas.py. Raises InvalidTask("tool schema").

    One that has only these keywords already comes back equal, if its defaults fit.
    """
    nodes = itertools.count()

    def plain(node, refs=()):
        node = {} if node is True else node
        if not isinstance(node, dict):
            raise unfit("a schema that is no object")
        if next(nodes) > MAX_NODES or len(refs) > MAX_DEPTH:
            raise unfit(f"a schema of more than {MAX_NODES} parts or {MAX_DEPTH} levels")
        if bad := sorted(key for key in CHECKS & node.keys() if node[key] not in (False, None)):
            raise unfit(f"unsupported keyword {bad[0]!r}")
        inner = lambda part: _with_type(plain(part, (*refs, "")))
        parts = [plain(part, (*refs, "")) for part in _list(node, "allOf")]
        if "$ref" in node:
            ref = str(node["$ref"])
            if ref in refs:
                raise unfit("a recursive schema")
            parts.insert(0, plain(_look_up(root, ref), (*refs, ref)))
        own = _keywords(node, inner)
        return _merged([*parts, own]) if parts else own
    return _with_type(plain(root))


def _keywords(node: dict, inner) -> dict:
    """The keywords of one schema that are kept, those within it by `inner`."""
    own = {key: value for key, value in node.items() if key in KEYWORDS and value is not None
           or key == "default"}
    if "const" in node:
        own["enum"] = [node["const"]]
    for bound, limit in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(own.get(limit), bool):  # as drafts before the sixth have it
            if own.pop(limit) and bound in own:
                own[limit] = own.pop(bound)
    for key in [key for key, value in own.items() if type(value) in (int, float)
                and key != "default" and abs(value) > MAX_BOUND]:
        del own[key]
    if isinstance(own.get("type"), str):
        own["type"] = own["type"].lower()  # STRING, as Google has it
    if isinstance(own.get("properties"), dict):
        own["properties"] = {str(name): inner(part) for name, part in own["properties"].items()}
    _members_of_lists(node, own, inner)
    others = own.get("additionalProperties")
    if isinstance(others, dict):
        own["additionalProperties"] = inner(others) if others else True
    if own.get("additionalProperties") is True and own.get("properties") == {}:
        del own["properties"]  # an object of any members
    for union in UNIONS:
        if union in own:
            # {"not": {}} is how a library says that an argument may be left out
            given = [part for part in _list(own, union) if part != {"not": {}}]
            own[union] = [_in_object(inner(part), own) for part in given]
            if not given:
                raise unfit(f"{union!r} is no list of schemas")
    if node.get("nullable") is True:
        _allow_null(own)
    return own


def _list(node: dict, key: str) -> list:
    if not isinstance(node.get(key, []), list):
        raise unfit(f"{key!r} is no list of schemas")
    return node.get(key, [])


def _members_of_lists(node: dict, own: dict, inner):
    """`items`; of a tuple, whose places have schemas of their own, any of them at any place."""
    places = node.get("prefixItems", node.get("items"))
    if isinstance(places, list):
        parts = [inner(part) for part in places]
        distinct = [part for n, part in enumerate(parts) if part not in parts[:n]]
        own.pop("items", None)
        if distinct:
            own["items"] = distinct[0] if len(distinct) == 1 else {"anyOf": distinct}
    elif "items" in own:
        own["items"] = inner(own["items"])


def _in_object(part: dict, own: dict) -> dict:
    """An alternative of an object schema: it may speak of members that stand beside it."""
    if part.get("type") == "object" and own.get("properties"):
        return {**part, "properties": {**own["properties"], **part.get("properties", {})}}
    return part


def _allow_null(own: dict):
    """`nullable`: null is a value too."""
    if "type" in own:
        own["type"] = list(dict.fromkeys([*kinds(own), "null"]))
    for union in UNIONS if "type" not in own else ():
        if union in own:
            own[union] = [*own[union], {"type": "null"}]
    if "enum" in own and None not in own["enum"]:
        own["enum"] = [*own["enum"], None]


def _look_up(root, ref: str):
    """What a $ref within the same schema names, such as #/$defs/Place."""
    node = root
    if not ref.startswith("#"):
        raise unfit("a $ref to another file")
    if ref != "#" and not ref.startswith("#/"):
        raise unfit("a $ref to an anchor")
    for step in unquote(ref[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and re.fullmatch(r"\d{1,9}", step) and int(step) < len(node):
            node = node[int(step)]
        elif isinstance(node, dict) and step in node:
            node = node[step]
        else:
            raise unfit("a $ref to nothing")
    return node


def _merged(parts) -> dict:
    """Several schemas that all hold, as one; a note of a later one wins."""
    out = {}
    for part in parts:
        for key, value in part.items():
            if key == "properties" and key in out:
                shared = [name for name in value if name in out[key]]
                if any(out[key][name] != value[name] for name in shared):
                    raise unfit("allOf with two schemas of one argument")
                value = {**out[key], **value}
            elif key == "required" and key in out:
                value = list(dict.fromkeys([*out[key], *value]))
            elif out.get(key, value) != value and \
                    key not in {*NOTES, "default", "additionalProperties"}:
                raise unfit(f"allOf or $ref with two values of {key!r}")
            out[key] = value
    return out


def _with_type(own: dict) -> dict:
    """The schema with a type, and without a default that is no value of it."""
    if "type" not in own and set(own).isdisjoint(UNIONS):
        own = {**own, "type": _inferred(own)}
    if isinstance(own.get("type"), list) and len(own["type"]) == 1:
        own = {**own, "type": own["type"][0]}
    if "default" in own:
        check_schema({key: value for key, value in own.items() if key != "default"}, "the schema")
        if not conforms(own["default"], own):
            own = {key: value for key, value in own.items() if key != "default"}
    return own


def _inferred(own: dict):
    """The type that the other keywords speak of; all types if they speak of none."""
    if isinstance(own.get("enum"), list) and own["enum"]:
        fits = lambda kind, value: conforms(value, {"type": kind})
        order = ("string", "boolean", "integer", "number", "array", "object", "null")
        named = [next(kind for kind in order if fits(kind, value)) for value in own["enum"]]
        return named[0] if len(set(named)) == 1 else list(dict.fromkeys(named))
    return next((kind for kind, keys in SPEAK_OF.items() if not keys.isdisjoint(own)),
                [kind for kind in TYPES if kind != "integer"])


# ---------------------------------------------------------------------------------------------
# a line of a task file in our own form

FIELDS = ("task", "tools", "calls", "ordered", "results", "reference")  # others are the user's own
OFFERED = 3        # functions of the list that a task without tools is given, at least
LONGEST_BESIDE = 600  # characters of one that it does not call: a prompt holds several


def own_record(line: dict, listed=None) -> dict:
    """A line of a task file in any of the shapes -> {"task", "tools", "calls", ...} of our own.

    listed: {name: spec} of --tools; a task without tools of its own has those that it calls, and
    others. Raises InvalidTask with .detail. What is not looked at here, make_task checks.
    """
    if "task" not in line and "messages" in line:
        line = {**line, **_of_chat(line["messages"], line.get("tools") or listed)}
        if "tools" in line and "reference" in line and "calls" not in line:
            line["calls"] = []  # it was free to call, and did not
        line = {k: v for k, v in line.items() if k != "reference" or "calls" not in line}
    if "tool_calls" in line and "calls" not in line and "messages" not in line:
        line = {**line, "calls": line["tool_calls"]}
    # a table of mixed kinds has a column for each; null says that a field is not there
    record = {key: line[key] for key in FIELDS if line.get(key) is not None}
    if listed and "calls" in record and record.get("tools") == []:
        del record["tools"]
    if "calls" not in record:
        return record
    if not isinstance(record["calls"], list):
        raise invalid("malformed task", "calls is no list")
    record["calls"] = [_own_call(call) for call in record["calls"]]
    if "tools" not in record:
        if not listed:
            raise unfit("no tools: they stand in the line, or in the list of --tools")
        record["tools"] = _called(record, listed)
    elif isinstance(record["tools"], list):
        record["tools"] = list(map(_own_tool_named, _functions(record["tools"])))
    return record


def _own_tool_named(tool) -> dict:
    try:
        return own_tool(tool)
    except InvalidTask as fault:
        name = tool.get("function", tool) if isinstance(tool, dict) else {}
        name = name.get("name") if isinstance(name, dict) else None
        raise unfit(f"tool {name!r:.80}: {fault.detail}") from None


def _need(holds, what):
    if not holds:
        raise invalid("malformed task", f"messages: {what}")


def request_of(messages) -> dict:
    """{"task": the one request of a chat}. Raises InvalidTask."""
    _need(isinstance(messages, list) and all(isinstance(m, dict) for m in messages),
          "no list of objects")
    asked = [m for m in messages if m.get("role") == "user"]
    _need(len(asked) == 1, f"{len(asked)} of the user instead of one")
    return {"task": _content(asked[0])}


def _of_chat(messages, tools) -> dict:
    """A chat of one request and one answer -> {"task", "calls"} or {"task", "reference"}. tools:
    what it could call, in any shape."""
    task = request_of(messages)
    answers = [m for m in messages if m.get("role") == "assistant"]
    calling = [m["tool_calls"] for m in answers if m.get("tool_calls")]
    _need(len(calling) < 2, 'calls in two turns: write them as "calls" with "results"')
    _need(answers, "no answer of the assistant")
    _need(calling or not any(_calls_elsewhere(m, tools) for m in answers),
          'a call that is not under "tool_calls": put it there')
    return {**task, "calls": calling[0]} if calling else \
        {**task, "reference": _content(answers[-1])}


def _calls_elsewhere(message: dict, tools) -> bool:
    """Whether an answer has a call as Anthropic, Hermes, Llama, Mistral or the older OpenAI form
    write it, or as a line of Python or JSON that names one of the tools."""
    content, text = message.get("content"), str(_content(message))
    parts = content if isinstance(content, list) else []
    names = set(tools) if isinstance(tools, dict) else {
        name for tool in map(_function_of, _functions(tools)) if isinstance(tool, dict)
        if isinstance(name := tool.get("name"), str)}
    # the name before its arguments: in JSON, or as Python writes a call
    written = re.findall(r'"name"\s*:\s*"([^"]*)"', text) + re.findall(r"([\w.-]+)\(", text)
    return bool(message.get("function_call")) or any(mark in text for mark in CALL_MARKS) \
        or any(isinstance(part, dict) and part.get("type") == "tool_use" for part in parts) \
        or not names.isdisjoint(written)


def _content(message: dict):
    """The text of a chat message, which may come in parts."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content


def _own_call(call):
    """A call as it is, as OpenAI wraps it, or with its arguments as JSON text."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict):
        return call  # for make_task to refuse
    given = [key for key in ARGUMENTS if call.get(key) not in (None, "", {})]
    others = sorted(map(str, call.keys() - {*CALL_KEYS, *ARGUMENTS}))
    if len(given) > 1 or others and not set(ARGUMENTS) & set(call):  # some would be lost
        raise invalid("malformed task", f"the call of {call.get('name')!r:.80} has its arguments under "
                      f"{', '.join(given or others)[:80]}: write them under 'arguments'")
    arguments = next((call[key] for key in (*given, *ARGUMENTS) if key in call), None)
    if isinstance(arguments, str):
        arguments = load_object(arguments) if arguments.strip() else {}
        if arguments is None:
            raise invalid("malformed task", f"the arguments of {call.get('name')!r:.80} are no "
                                            "JSON object")
    return {"name": call.get("name"), "arguments": {} if arguments is None else arguments}


def _called(record: dict, listed: dict) -> list:
    """The functions of the list that a task calls, and others up to OFFERED: with the right ones
    alone, nobody would see whether an agent can choose."""
    names = [call.get("name") for call in record["calls"] if isinstance(call, dict)]
    for name in names:
        if name is None:
            raise invalid("malformed task", "a call without a 'name'")
        if not isinstance(name, str) or name not in listed:
            raise invalid("unknown tool", f"it calls {name!r:.80}, which is not in the list of "
                                          "--tools")
    beside = drawn_beside(listed, names, OFFERED - len(set(names)), str(record.get("task")))
    if not names and not beside:  # all are long, and one has to be there to be left alone
        beside = [min(listed, key=lambda name: len(str(listed[name])))]
    return [listed[name] for name in sorted({*names, *beside})]


def drawn_beside(listed: dict, names, n: int, text: str) -> list[str]:
    """Up to n other functions of a list than `names`, always the same ones for a text."""
    if n <= 0:  # most often: a walk over a long list would cost something for each written text
        return []
    others = sorted(name for name, tool in listed.items()
                    if name not in names and len(str(tool)) <= LONGEST_BESIDE)
    return random.Random(text).sample(others, min(n, len(others)))
