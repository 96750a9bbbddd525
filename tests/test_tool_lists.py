"""Users' files: lists of tools, schemas and tasks in the formats of other programs.

Run: python -m pytest tests/test_tool_lists.py -q
"""
import json

import pytest

from helpers import refused_with, user_error
from test_tool_calls import TEXT, WHOLE, call, lines, schema, tool
from worlds import NO_SEED, InvalidTask
from worlds.tools.schemas import argument_fault, normal_calls
from worlds.tool_calls import World, make_task, read_tasks
from worlds.tools.tool_lists import normalized_record, normalized_tool, read_tools

RING = tool("ring", "Ring a bell.", times=WHOLE)
SHUT = {"name": "shut", "description": "", "parameters": {"type": "object", "properties": {}}}
MCP = {"tools": [
    {"name": "ring", "title": "Ring", "description": "Ring a bell.",
     "inputSchema": {**RING["parameters"], "$schema": "draft"}, "outputSchema": {}},
    {"name": "shut", "inputSchema": {"type": "object"}, "description": None}]}
SHAPES = {  # the same two tools, as the JSON values of a file
    "ours, one per line": [RING, SHUT],
    "OpenAI": [[{"type": "function", "function": {**RING, "strict": True}},
                {"type": "function", "function": SHUT}]],
    "a transcript of MCP": [
        {"jsonrpc": "2.0", "id": 1, "result": {"serverInfo": {"name": "bells"}}},
        {"jsonrpc": "2.0", "id": 2, "result": MCP}],
    "Anthropic": [[{"name": "ring", "description": "Ring a bell.",
                    "input_schema": RING["parameters"]}, SHUT]],
    "tasks": [{"task": "Ring it twice, please.", "tools": [RING, SHUT], "calls": []},
              {"task": "Who wrote it, again?", "reference": "x"}],
}


def listed(folder, *values):
    """Write a file of JSON values, one after another."""
    path = folder / "tools.json"
    path.write_text("\ufeff" + "\n".join(json.dumps(value, indent=1) for value in values),
                    encoding="utf-8")
    return path


@pytest.mark.parametrize("how", SHAPES)
def test_a_list_of_tools_gets_in_unchanged(how, tmp_path):
    """Otherwise an agent would learn functions other than its user's."""
    tools, notes = read_tools(listed(tmp_path, *SHAPES[how]))
    assert tools["ring"] == RING and not notes
    assert argument_fault({"x": 1}, tools["shut"]["parameters"])


def test_what_is_left_out_is_counted_and_named(tmp_path):
    """Otherwise tools would silently be dropped, or be taken without a schema."""
    tools, notes = read_tools(listed(
        tmp_path, RING, {**RING, "description": "Another."}, {"name": "bare"},
        {"type": "web_search"}, {"type": "bash_20250124", "name": "bash"}))
    assert [*tools] == ["ring", "bare"]
    assert list(notes.values()) == [["ring"], ["bare"], ["entry 4"], ["bash"]]


@pytest.mark.parametrize("data, what", [
    (b'{"a": 1}\n\n{"b" 2}', "line 3 column 6"),
    (b"\xff\xfe[]", "not UTF-8"),
    (b"[" * 900 + b"]" * 900, "nested too deeply")])
def test_a_list_without_a_tool_is_one_line(data, what, tmp_path):
    """Otherwise a file of another kind would end the program in a traceback."""
    path = tmp_path / "tools.json"
    path.write_bytes(data)
    user_error(f"{path}.*{what}", read_tools, path)


def test_names_of_all_kinds_are_taken():
    """Otherwise a server's functions would be left out because of a dot or a foreign script."""
    for name in ("a.b-c", "检索", "fs/21st_builder", "n" * 128):
        assert normalized_tool(tool(name, **{"user id": TEXT})) == tool(name, **{"user id": TEXT})
    for name in ("", "a(b", "n" * 129, "a\nb"):
        refused_with(InvalidTask, None, normalized_tool, {"name": name})


def test_a_list_whose_last_page_is_missing_is_noted(tmp_path):
    """Otherwise an agent would silently train on only some pages of an MCP server's functions."""
    for cursors, is_whole in ((["b2Zm"], False), (["b2Zm", None], True), (["b2Zm", "c3"], False),
                              ([None, "b2Zm"], True), ([None], True)):
        pages = []
        for n, cursor in enumerate(cursors):
            tools = [{"name": f"f{n}", "inputSchema": {"type": "object"}}]
            page = {"tools": tools, "nextCursor": cursor}
            pages.append({"jsonrpc": "2.0", "id": n, "result": page})
        tools, notes = read_tools(listed(tmp_path, *pages))
        assert len(tools) == len(cursors) and bool(notes) != is_whole, cursors


# ---------------------------------------------------------------------------------------------
# schemas: (schema, values that fit, values that do not)

PLACE = {"properties": {"x": {"type": "number"}}, "required": ["x"]}
TREE = schema(name=TEXT, kids={"type": "array", "items": {"$ref": "#/$defs/Tree"}})
FITS = [
    ({"oneOf": [WHOLE, TEXT]}, [3, 2.0], [1.5, True, None]),
    ({"const": 3}, [3.0], ["3"]), ({"const": None}, [None], ["a"]),
    ({"type": "array", "items": [TEXT, WHOLE], "additionalItems": False}, [["a", 1]],
     [[1, "a"], ["a", 1, 1]]),
    (schema(a=TEXT) | {"additionalProperties": {}}, [], [{"a": "b", "c": 1}]),
    ({"properties": {"a": {**TEXT, "default": None}, "b": False, "c": {**WHOLE, "enum": ["1"]}}},
     [{}, {"a": "b", "c": 1}], [{"b": 1}, {"c": "1"}]),
    ({"allOf": [{"$ref": "#/$defs/Place"}], "default": {"x": 0}}, [{"x": 1}],
     [{}, {"x": 1, "y": 1}]),
    ({"allOf": [PLACE, schema(y=TEXT)]}, [{"x": 1, "y": "a"}], [{"x": 1}]),
    # where a schema refers to itself, anything fits
    ({"$ref": "#/$defs/Tree"},
     [{"name": "a", "kids": [{"name": 1}]}], [{"name": 1, "kids": []}, {"name": "a"}]),
    ({"anyOf": [schema(a=TEXT), {"type": "null"}]}, [{"a": "x"}, None],
     [{"a": "x", "b": "x"}]),
]


def read(parameters):
    """Return the schema of a tool in our own form."""
    return normalized_tool({"name": "f", "parameters": parameters})["parameters"]


@pytest.mark.parametrize("part, good, bad", FITS)
def test_what_a_schema_says_is_checked(part, good, bad):
    """Otherwise wrong calls would count as valid, or a schema would change when read again."""
    ours = read(schema(a=part) | {"$defs": {"Place": PLACE, "Tree": TREE}})
    assert read(ours) == ours
    for value in good:
        assert not argument_fault({"a": value}, ours), value
    for value in bad:
        assert argument_fault({"a": value}, ours), value


def test_what_a_model_wrote_has_no_patterns():
    """Otherwise a slow regular expression would hold up the run."""
    world = World.scorer("")
    world.tools = {}
    # missing calls are the last fault that is looked for: if they are reported, the schema was
    # accepted
    for part, reason in ((TEXT, "malformed task"), ({**TEXT, "pattern": "a"}, "tool schema"),
                         ({"patternProperties": {"a": TEXT}}, "tool schema")):
        written = {"task": "Find all that ends in txt.", "tools": [tool("f", a=part)], "calls": []}
        refused_with(InvalidTask, reason, world.parse_task, json.dumps(written), NO_SEED, 1)


def test_a_default_within_an_alternative_is_filled_in():
    """Otherwise a call that leaves out a default would differ from one that spells it out."""
    member = {"type": "object", "properties": {"n": {"type": "integer", "default": 1}}}
    tools = {"f": tool("f", a={"anyOf": [member, {"type": "null"}]})}
    texts = []
    for value in ({}, {"n": 1}, {"n": 1.0}, {"n": 2}, None):
        texts += normal_calls([call("f", a=value)], tools, False)
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts)) == 3


def nested(depth):
    return {"type": "array", "items": nested(depth - 1)} if depth else TEXT


BOMB = {"$ref": "#/$defs/a0", "$defs": {"a40": TEXT}}  # 2 ** 40 parts when written out
for n in range(40):
    NEXT = {"$ref": f"#/$defs/a{n + 1}"}
    BOMB["$defs"][f"a{n}"] = schema(x=NEXT, y=NEXT)
UNFIT = [
    (BOMB, "more than 3000 parts"), (schema(a=nested(60)), "48 levels"),
    (schema(a={"$ref": "http://127.0.0.1:9/x.json"}), "a $ref to nothing"),
    ({"type": "object", "anyOf": [schema(a=TEXT), schema(b=TEXT)]}, "not one object schema"),
    ({"times": "integer"}, "not one object schema"),
    ({"type": "object", "required": ["a"]}, "required names"),
    (schema(a={"dependencies": {"x": ["y"]}}), "unsupported keyword"),
    (schema(a={"type": "text", "enum": ["a"]}), "Unknown type 'text'"),
]


@pytest.mark.parametrize("parameters, reason", UNFIT)
def test_what_cannot_be_represented_is_left_out_and_counted(parameters, reason, tmp_path):
    """Otherwise one bad tool would end the run, or hang it."""
    unfit = {"name": "f", "parameters": parameters}
    tools, notes = read_tools(listed(tmp_path, unfit, RING))
    [note] = notes
    assert tools == {"ring": RING} and notes[note] == ["f"] and reason in note


# ---------------------------------------------------------------------------------------------
# base tasks


ASKED = "Ring the bell three times."
CALL = call("ring", times=3)
TASKS = {
    "ours": {"task": ASKED, "tools": [RING], "calls": [CALL]},
    "OpenAI's tools": {"task": ASKED, "tools": [{"type": "function", "function": RING}],
                       "calls": [CALL], "id": 7},
    "the list's tools": {"task": ASKED, "calls": [CALL]},
    "a name of the list": {"task": ASKED, "tools": ["ring"], "calls": [CALL]},
    "a table with nulls": {"task": ASKED, "tools": None, "calls": [CALL], "reference": None,
                           "ordered": None}}


@pytest.mark.parametrize("shape", TASKS)
def test_base_tasks_of_every_shape_are_one_task(shape, tmp_path):
    """Otherwise the same task would count as another one if its tools have another form."""
    task, = read_tasks(lines(tmp_path / "tasks.jsonl", [TASKS[shape]]), {"ring": RING})
    ours = make_task(TASKS["ours"], "base")
    assert (task.text, task.spec, task.id) == (ours.text, ours.spec, ours.id)


def test_a_task_without_tools_has_the_right_one_and_others():
    """Otherwise the agent would have no choice of tools to make."""
    tools = {name: {**RING, "name": name} for name in ("ring", "b", "a", "c", "d")}
    shown = []
    for i in range(40):
        task = normalized_record({"task": f"{ASKED} {i}", "calls": [CALL]}, tools)
        shown.append([tool["name"] for tool in task["tools"]])
    assert all(len(set(names)) == 3 and "ring" in names for names in shown)
    assert {names.index("ring") for names in shown} != {0}  # its place does not reveal it


def test_a_call_that_cannot_be_read_is_refused(tmp_path):
    """Otherwise a run would end in a traceback, or train on another call."""
    for name, arguments, what in (("sing", {}, "'sing' is not in the list"),
                                  ("ring", "{3}", "'arguments', a JSON object")):
        line = {"task": ASKED, "calls": [{"name": name, "arguments": arguments}]}
        path = lines(tmp_path / "tasks.jsonl", [line])
        user_error(what, read_tasks, path, {"ring": RING})
