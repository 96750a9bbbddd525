"""What users bring: lists of tools, schemas and tasks in the shapes that others write.

Run: python -m pytest tests/test_tool_lists.py -q
"""
import json

import pytest

from helpers import raised, user_error
from test_tool_calls import lines
from worlds import InvalidTask, call_text
from worlds.schemas import argument_fault
from worlds.tool_calls import make_task, read_tasks
from worlds.tool_lists import own_record, own_schema, own_tool, read_tools

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


def schema(**properties):
    """An object schema, every property required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


RING = {"name": "ring", "description": "Ring a bell.", "parameters": schema(times=WHOLE)}
SHUT = {"name": "shut", "description": "", "parameters": {"type": "object", "properties": {}}}
MCP = {"tools": [{"name": "ring", "title": "Ring", "description": "Ring a bell.", "inputSchema": {
    **RING["parameters"], "$schema": "draft"}, "annotations": {"readOnlyHint": True}, "outputSchema": schema(
    x=TEXT)}, {"name": "shut", "inputSchema": {"type": "object"}, "description": None}]}
SHAPES = {  # the same two tools, as the JSON values of a file
    "ours": [[RING, SHUT]], "one per line": [RING, SHUT],
    "OpenAI": [[{"type": "function", "function": {**RING, "strict": True}},
        {"type": "function", "function": SHUT}]],
    "MCP": [MCP], "a transcript": [{"jsonrpc": "2.0", "id": 1, "result": {"serverInfo": {"name": "bells"}}},
                                   {"jsonrpc": "2.0", "id": 2, "result": MCP}],
    "Anthropic": [[{"name": "ring", "description": "Ring a bell.", "input_schema": RING["parameters"]},
        SHUT]],
    "tasks": [{"task": "Ring it twice, please.", "tools": [RING, SHUT], "calls": []},
              {"task": "Who wrote it, again?", "reference": "x"}],
    "a table with nulls": [[{**RING, "parameters": {**schema(times={**WHOLE, "enum": None}, door=None),
                                                    "required": ["times"]}}, {**SHUT, "function": None}]],
}


def listed(path, *values):
    """A file of JSON values, one after another."""
    path.write_text("\ufeff" + "\n".join(json.dumps(value, indent=1) for value in values), encoding="utf-8")
    return path


@pytest.mark.parametrize("how", SHAPES)
def test_a_list_of_tools_gets_in_unchanged(how, tmp_path):
    tools, notes = read_tools(listed(tmp_path / "tools.json", *SHAPES[how]))
    assert tools[0] == RING and call_text.signature(tools[1]) == "shut()" and not notes


def test_what_is_left_out_or_not_checked_is_counted_and_named(tmp_path):
    """A tool without a schema is read as one without arguments: nothing said, every call was wrong."""
    names_only = [{"name": f"zpa{n}", "description": "Get."} for n in range(5)]
    noted = {"name": "f", "parameters": schema(a={"type": "string", "pattern": "^a$"})}
    tools, notes = read_tools(listed(tmp_path / "tools.json", RING, {**RING, "description": "Another."},
                                     {"name": "a b"}, *names_only, {"type": "web_search"},
                                     {"type": "bash_20250124", "name": "bash"}, noted))
    assert [tool["name"] for tool in tools] == ["ring", "zpa0", "zpa1", "zpa2", "zpa3", "zpa4", "f"]
    assert tools[-1]["parameters"]["properties"]["a"]["pattern"] == "^a$"  # the models still read it
    assert notes == {"left out: another tool of the same name came first": ["ring"],
                     "left out: a name with other signs than letters, digits and _.-/": ["a b"],
                     "without a schema: read as without arguments": [f"zpa{n}" for n in range(5)],
                     "left out: no 'name' in the function itself": ["entry 9"],
                     "left out: of type bash_20250124, not a function": ["bash"],
                     "with pattern, which is not checked": ["f"]}


@pytest.mark.parametrize("data, what", [
    (b"", "no tool in it"), (b'{"a": 1}\n\n{"b" 2}', "line 3 column 6"), (b"\xff\xfe[]", "not UTF-8"),
    (b'{"tools": [{"name": "f", "parameters": {"not": {}}}]}', "'not'")])
def test_a_list_without_a_tool_is_one_line(data, what, tmp_path):
    path = tmp_path / "tools.json"
    path.write_bytes(data)
    line = user_error(what, read_tools, path)
    assert line.startswith(str(path)) and len(line) < 400
    user_error("no such file", read_tools, tmp_path / "absent")


def test_names_of_all_kinds_are_called_in_both_forms(tmp_path):
    for name in ("a.b-c", "größe", "检索", "class", "fs/read", "21st_builder", "n" * 128):
        assert own_tool({"name": name, "parameters": {}})["name"] == name
        call = {"name": name, "arguments": {"from": "x", "is": 1}}
        assert call_text.parse_calls(call_text.write_call(call)) == [call]
    for name in ("", "a b", "a(b", "n" * 129, "a\nb"):
        raised(InvalidTask, None, own_tool, {"name": name})
    path = listed(tmp_path / "tools.json", RING, {"name": "f", "parameters": schema(**{"user id": TEXT})})
    assert len(read_tools(path)[0]) == 2
    tools, notes = read_tools(path, "python")
    assert tools == [RING] and notes == {"left out: an argument that is not a name in Python": ["f"]}


# ---------------------------------------------------------------------------------------------
# schemas: (schema, its type in a signature, values that fit, values that do not)

PLACE = {"properties": {"x": {"type": "number"}}, "required": ["x"]}
FITS = [
    ({"type": ["string", "null"]}, "str | None", ["a", None], [1, True, []]),
    ({"anyOf": [WHOLE, {"type": "null"}]}, "int | None", [1, 2.0, None], ["1", 1.5, True]),
    ({"oneOf": [WHOLE, TEXT]}, "int | str", [3, "x"], [1.5, None]),
    ({"anyOf": [WHOLE, TEXT], "nullable": True}, "int | str | None", [3, "x", None], [1.5]),
    ({"type": "string", "nullable": True}, "str | None", ["a", None], [1]),
    ({"enum": ["a", "b"], "nullable": True}, '"a" | "b" | None', ["a", None], ["c"]),
    ({"const": 3}, "3", [3, 3.0], [4, "3"]),
    ({"enum": [1, "x", None]}, '1 | "x" | None', [1, "x", None], [True, "1"]),
    ({"type": "integer", "exclusiveMinimum": 0, "maximum": 9}, "int", [1, 9], [0, 10, 9.5]),
    ({"type": "number", "minimum": 2, "maximum": 10}, "float", [2, 10, 9.5], [1.5, 10.5, 11]),
    ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, "float", [0, 0.1], [-1, 1]),
    ({"items": TEXT, "minItems": 1}, "list[str]", [["a"]], [[1]]),
    ({"type": "object", "properties": {}, "additionalProperties": True}, "dict", [{"a": 1}], [1]),
    (schema(a=TEXT) | {"additionalProperties": {}}, "{a: str}", [{"a": "b"}], [{"a": "b", "c": 1}]),
    (PLACE, "{x: float}", [{"x": 1}], [{}, {"x": 1, "y": 1}]),
    ({"$ref": "#/$defs/Place", "description": "d"}, "{x: float}", [{"x": 1}], [{"x": "1"}]),
    ({"description": "d"}, "any", ["a", 1, True, None, [], {"a": 1}], []),
    ({"type": "string", "default": None, "format": "date", "x-order": 1, "enum": None}, "str", ["a"], [1]),
]


@pytest.mark.parametrize("given, spoken, good, bad", FITS, ids=[row[1] for row in FITS])
def test_what_can_be_checked_is_checked(given, spoken, good, bad):
    """On the way in and in every call; read twice it stays the same, as files are."""
    own = own_schema(schema(a=given) | {"$defs": {"Place": PLACE}})
    assert own_schema(own) == own
    assert call_text.signature({"name": "f", "parameters": own}) == f"f(a: {spoken})"
    assert all(not argument_fault({"a": value}, own) for value in good)
    assert all(argument_fault({"a": value}, own) for value in bad)


def test_keywords_keep_their_order():
    """Prompts show them: with the order of a set they were others after each start, and in a resumed run."""
    given = {"maximum": 9, "type": "integer", "exclusiveMaximum": 9, "minimum": 1, "exclusiveMinimum": 0}
    own = own_schema(schema(a=given))["properties"]["a"]
    assert [key for key in own if key != "type"] == [key for key in given if key != "type"]


def nested(depth):
    return {"type": "array", "items": nested(depth - 1)} if depth else TEXT


BOMB = {"$ref": "#/$defs/a0", "$defs": {  # 2 ** 40 parts when written out
    f"a{n}": schema(x={"$ref": f"#/$defs/a{n + 1}"}, y={"$ref": f"#/$defs/a{n + 1}"}) for n in range(40)}}
UNFIT = [
    (schema(kids={"type": "array", "items": {"$ref": "#"}}), "a recursive schema"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "a recursive schema"),
    (BOMB, "more than 3000 parts"), (schema(a=nested(60)), "48 levels"),
    (schema(a={"$ref": "other.json#/x"}), "a $ref to nothing"),
    (schema(a={"$ref": "#/$defs/n"}), "a $ref to nothing"),
    ({"type": "object", "anyOf": [schema(a=TEXT), schema(b=TEXT)]}, "not one object schema"),
    ({**schema(a=TEXT), "anyOf": [{"required": ["b"]}]}, "required names"),
    (schema(a={"patternProperties": {"x": TEXT}}), "unsupported keyword"),
    (schema(a={"not": TEXT}), "unsupported keyword"),
    (schema(a={"type": "text"}), "unknown type"), (schema(a={"type": {"a": 1}}), "malformed"),
    (schema(a={"allOf": [TEXT, WHOLE]}), "unsupported keyword"),
    (schema(a={"$ref": "#/$defs/n", "enum": ["x"]}), "next to $ref"),
    (schema(a=7), "a malformed schema"), (schema(a={"type": "integer", "minimum": "1"}), "not a number"),
    ({"type": "object", "required": ["a"]}, "required names"), (TEXT, "not one object schema"),
    (schema(a={"enum": "a"}), "enum is not a list"), ({"properties": [1]}, "a malformed schema"),
    ({"times": "integer"}, "without 'prop"), (schema(a={"description": "\ud800"}), "a malformed schema"),
]


@pytest.mark.parametrize("given, reason", UNFIT, ids=[f"{n} {r[1]}" for n, r in enumerate(UNFIT)])
def test_what_cannot_be_represented_is_left_out_and_counted(given, reason, tmp_path):
    """One bad tool costs itself, not the run."""
    tools, notes = read_tools(listed(tmp_path / "tools.json", {"name": "f", "parameters": given}, RING))
    assert tools == [RING] and list(notes.values()) == [["f"]] and reason in list(notes)[0], notes


# ---------------------------------------------------------------------------------------------
# base tasks


ASKED = "Ring the bell three times."
CALL = {"name": "ring", "arguments": {"times": 3}}
WRAPPED = {"id": "1", "type": "function", "function": {"name": "ring", "arguments": '{"times": 3}'}}
OPENAI = {"type": "function", "function": RING}
USER = {"role": "user", "content": ASKED}
CHAT = [{"role": "system", "content": "Be kind."}, USER, {"role": "assistant", "content": None,
        "tool_calls": [WRAPPED]}, {"role": "tool", "content": "ok"}, {"role": "assistant", "content": "OK"}]
TASKS = {
    "ours": {"task": ASKED, "tools": [RING], "calls": [CALL]},
    "arguments as text": {"id": 7, "task": ASKED, "tools": [OPENAI], "tool_calls": [WRAPPED], "by": "me"},
    "a chat": {"messages": CHAT, "tools": [OPENAI]},
    "the list's tools": {"task": ASKED, "calls": [CALL]},
    "a table with nulls": {"task": ASKED,
        "tools": [{**RING, "parameters": {**RING["parameters"], "anyOf": None}}],
                           "calls": [{"name": "ring", "arguments": {"times": 3, "door": None}, "id": None}],
                           "reference": None, "messages": None, "ordered": None}}


@pytest.mark.parametrize("shape", TASKS)
def test_base_tasks_of_every_shape_are_one_task(shape, tmp_path):
    task, = read_tasks(lines(tmp_path / "tasks.jsonl", [TASKS[shape]]), {"ring": RING})
    ours = make_task(TASKS["ours"], "base")
    assert (task.text, task.spec, task.id) == (ours.text, ours.spec, ours.id)


def test_a_task_without_tools_has_the_right_one_and_others():
    """With the right one alone nobody would see whether an agent can choose."""
    tools = {name: {**RING, "name": name} for name in ("ring", "b", "a", "c", "d")}
    shown = [[tool["name"] for tool in own_record({"task": f"{ASKED} {i}", "calls": [CALL]}, tools)["tools"]]
             for i in range(40)]
    assert all(len(set(names)) == 3 and "ring" in names for names in shown)
    assert {name for names in shown for name in names} == {"ring", "a", "b", "c", "d"}
    assert {names.index("ring") for names in shown} != {0}  # its place does not give it away


@pytest.mark.parametrize("line, what", [
    ({"task": ASKED, "calls": [{"name": "sing", "arguments": {}}]}, "'sing' is not in the list"),
    ({"task": ASKED, "calls": [{"name": "sink", "arguments": {}}]}, "'sink' of --tools was left out: why"),
    ({"task": ASKED, "tools": [RING], "calls": [], "tool_calls": [WRAPPED]}, "both 'calls' and 'tool_calls'"),
    ({"task": ASKED, "tools": [RING], "calls": [{"name": "ring", "arguments": "{3}"}]}, "not a JSON object"),
    ({"task": ASKED, "tools": [RING], "calls": [{"name": "ring", "params": {}}]}, "not a JSON object"),
    ({"task": ASKED, "tools": [RING], "calls": [{"tool": "ring"}]}, "without a 'name'"),
    ({"messages": CHAT, "tools": [RING], "calls": []}, "both 'messages' and calls"),
    ({**TASKS["ours"], "ordred": True}, "'ordred': did you mean 'ordered'"),
    ({"messages": CHAT[2:], "tools": [RING]}, "0 of the user"),
    ({"messages": CHAT[:2], "tools": [RING]}, "0 of the assistant"),
    ({"messages": CHAT + [CHAT[2]], "tools": [RING]}, "2 of the assistant"),
    ({"task": ASKED, "tools": [RING], "calls": [{**CALL, "arguments": {"times": 10 ** 19}}]}, "JSON"),
])
def test_a_line_that_would_lose_something_is_refused(line, what, tmp_path):
    path = lines(tmp_path / "tasks.jsonl", [line])
    assert what in user_error(None, read_tasks, path, {"ring": RING, "sink": "left out: why"})
