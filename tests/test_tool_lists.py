"""What users bring: lists of functions, schemas and tasks in the shapes that others write.

Run: python -m pytest tests/test_tool_lists.py -q
"""
import json
import time
from pathlib import Path

import pytest

from support.files import UserError
from helpers import raised, user_error
from worlds import InvalidTask, call_text, tool_calls
from worlds.grounding import ungrounded
from worlds.schemas import argument_fault, check_schema, conforms, quick_pattern
from worlds.tool_lists import own_record, own_schema, own_tool, read_tools

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


def schema(**properties):
    """An object schema, every property required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


RING = {"name": "ring", "description": "Ring a bell.", "parameters": schema(times=WHOLE)}
SHUT = {"name": "shut", "description": "", "parameters": {"type": "object", "properties": {}}}
SHAPES = {  # the same two functions
    "ours": [RING, {"name": "shut"}],
    "OpenAI": [{"type": "function", "function": {**RING, "strict": True}},
               {"type": "function", "function": {"name": "shut", "parameters": {}}}],
    "MCP": {"tools": [{"name": "ring", "title": "Ring", "description": "Ring a bell.",
                       "inputSchema": {**RING["parameters"], "$schema": "draft"},
                       "annotations": {"readOnlyHint": True}, "outputSchema": schema(x=TEXT)},
                      {"name": "shut", "inputSchema": {"type": "object"}, "description": None}]},
    "input_schema": [{"name": "ring", "description": "Ring a bell.",
                      "input_schema": RING["parameters"]}, {"name": "shut", "parameters": None}],
    "a request": {"model": "m", "messages": [], "tools": [{"type": "function", "function": RING},
                                                          {"function": {"name": "shut"}}]},
    "Google": [{"functionDeclarations": [{**RING, "parameters": {
        **RING["parameters"], "type": "OBJECT", "properties": {"times": {"type": "INTEGER"}}}},
        {"name": "shut"}]}],
    "Google's SDK": {"function_declarations": [
        {"name": "ring", "description": RING["description"], "parametersJsonSchema": RING["parameters"]},
        {"name": "shut"}]},
    "a field result": [{**RING, "result": {"type": "object"}, "tools": []}, SHUT],
}
SHAPES["JSON-RPC"] = {"jsonrpc": "2.0", "id": 2, "result": SHAPES["MCP"]}
LINES = {
    "functions": [RING, SHUT],
    "a transcript": [{"jsonrpc": "2.0", "id": 1, "result": {"serverInfo": {"name": "bells"}}},
                     SHAPES["JSON-RPC"]],
    "tasks": [{"task": "Ring it twice, please.", "tools": [RING, SHUT], "calls": []},
              {"task": "Who wrote it, again?", "reference": "x"},
              {"name": "mine", "messages": [], "tools": [{"type": "function", "function": RING}]}],
}


@pytest.mark.parametrize("how", [*SHAPES, *LINES])
def test_a_list_of_functions_gets_in_unchanged(how, tmp_path):
    path = tmp_path / "tools.json"
    texts = [json.dumps(SHAPES[how], indent=2)] if how in SHAPES else map(json.dumps, LINES[how])
    path.write_text("\ufeff" + "\n".join(texts), encoding="utf-8")
    tools, left_out = read_tools(path)
    assert tools[0] == RING and tools[1]["name"] == "shut" and not left_out
    check_schema(tools[1]["parameters"], "shut")
    assert call_text.signature(tools[1]) == "shut()"


def test_of_one_name_the_first_function_is_taken_and_the_others_are_named(tmp_path):
    path = tmp_path / "tools.json"
    other = {**RING, "description": "Another bell."}
    path.write_text(json.dumps([RING, SHUT, RING, other, {"name": "a b"}, "x", {"name": "2x"}]))
    tools, left_out = read_tools(path)
    assert tools == [RING, SHUT]
    assert sorted(left_out.items()) == [
        ("a name of other signs than letters, digits and _.-/ (a b, 2x)", 2),
        ("another function of the same name came first (ring)", 1),
        ("no function with a name (no name)", 1)]


def test_a_list_that_lacks_its_next_pages_says_so(tmp_path):
    path = tmp_path / "tools.json"
    pages = [{"result": {"tools": [RING], "nextCursor": "2"}}, {"result": {"tools": [SHUT]}}]
    for there, cut in ((pages, []), (pages[:1], ["the pages after the last one here (nextCursor)"])):
        path.write_text("\n".join(map(json.dumps, there)))
        tools, left_out = read_tools(path)
        assert len(tools) == len(there) and list(left_out) == cut


BAD_LISTS = {
    b"": "no function in it", b"[]": "no function in it", b"{}": "no function in it",
    b'[{"name": "f"': "line 1: not JSON", b'{"a": 1}\n\n{"b" 2}': "line 3: not JSON",
    b"[" * 100_000: "not JSON", b'{"n": NaN}': "not JSON", b"\xff\xfe[]": "not UTF-8",
    b"[" + b"9" * 5000 + b"]": "not JSON", b'"x"': "no function that can be used",
    b'{"tools": [{"name": "f", "parameters": {"not": {}}}]}': r"keyword 'not' \(f\): 1",
    b'{"openapi": "3.1.0", "paths": {}}': "an OpenAPI file", b"name,city\n": "takes JSON or JSONL",
    b'{"id": 2, "error": {"message": "Method not found"}}': "the server answered .*Method not found",
}


@pytest.mark.parametrize("data", BAD_LISTS, ids=[v[:24] for v in BAD_LISTS.values()])
def test_a_list_without_a_function_is_one_line(data, tmp_path):
    path = tmp_path / "tools.json"
    path.write_bytes(data)
    assert user_error(BAD_LISTS[data], read_tools, path).startswith(str(path))
    user_error("no such file", read_tools, tmp_path / "absent")


def test_names_of_all_kinds_are_called_in_both_forms(tmp_path):
    for name in ("a.b-c", "größe", "检索", "class", "import", "fs/read", "_x", "n" * 128):
        assert own_tool({"name": name})["name"] == name
        call = {"name": name, "arguments": {"from": "x", "is": 1}}
        assert call_text.parse_calls(call_text.write_calls([call])) == [call]
    for name in ("", "a b", "1a", "a(b", "n" * 129, "a\nb"):
        raised(InvalidTask, None, own_tool, {"name": name})
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([RING, {"name": "f", "parameters": schema(**{"user id": TEXT})}]))
    assert len(read_tools(path)[0]) == 2
    tools, left_out = read_tools(path, "python")  # no keyword argument of Python
    assert tools == [RING] and left_out == {"an argument that is no name in Python (f)": 1}
    # a task without tools is given none of these either
    lines = [{"task": f"Ring it {n} times, please.", "calls": [
        {"name": "ring", "arguments": {"times": n}}]} for n in range(1, 9)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for call_format, beside in (("python", 0), ("json", 1)):
        tasks = tool_calls.read_tasks(str(tmp_path / "tasks.jsonl"), str(path), call_format)
        assert {len(task.spec["tools"]) for task in tasks} == {1 + beside}
    any_name = {"name": "f", "parameters": {"type": "object", "additionalProperties": TEXT}}
    path.write_text(json.dumps([RING, any_name]))
    assert read_tools(path, "python")[0] == [RING] and len(read_tools(path)[0]) == 2


def test_members_of_any_name_are_checked_as_others_are():
    """Each look at a call's schemas would end in a KeyError."""
    tool = own_tool({"name": "label", "parameters": {"type": "object", "additionalProperties": TEXT}})
    task = tool_calls.make_task({"task": "Set the label env to production.", "tools": [tool], "calls": [
        {"name": "label", "arguments": {"env": "production", "owner": "ops"}}]}, "env")
    assert tool_calls.same_task_key(task) and not tool_calls.leaks(task)
    assert ungrounded(task) == 'owner = "ops"'


# ---------------------------------------------------------------------------------------------
# schemas: (schema, its type in a signature, values that fit, values that do not)

PLACE = {"properties": {"x": {"type": "number"}}, "required": ["x"]}
FITS = [
    ({"type": ["string", "null"]}, "str | None", ["a", None], [1, True, []]),
    ({"anyOf": [WHOLE, {"type": "null"}]}, "int | None", [1, 2.0, None], ["1", 1.5, True]),
    ({"oneOf": [WHOLE, {"type": "number", "minimum": 5}]}, "int | float", [3, 5.5], [7, 1.5, "x"]),
    ({"type": "string", "nullable": True}, "str | None", ["a", None], [1]),
    ({"enum": ["a", "b"], "nullable": True}, '"a" | "b" | None', ["a", None], ["c"]),
    ({"const": 3}, "3", [3, 3.0], [4, "3"]),
    ({"enum": [1, "x", None]}, '1 | "x" | None', [1, "x", None], [True, "1"]),
    ({"type": "integer", "exclusiveMinimum": 0, "maximum": 9}, "int", [1, 9], [0, 10]),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, "float", [0.1], [0]),
    ({"multipleOf": 0.1}, "float", [0.3, 7, 0], [0.25]),
    ({"maximum": 18446744073709551615, "type": "integer"}, "int", [10 ** 17], ["a"]),
    ({"minLength": 2, "maxLength": 3}, "str", ["ab", "abc"], ["a", "abcd", ["a", "b"]]),
    ({"items": TEXT, "minItems": 1, "maxItems": 2}, "list[str]", [["a"]], [[], ["a"] * 3, [1]]),
    ({"prefixItems": [WHOLE, WHOLE]}, "list[int]", [[1, 2]], [["a"], 1]),
    ({"items": [WHOLE, TEXT]}, "list[int | str]", [[1, "a"]], [[None]]),
    ({"type": "object", "additionalProperties": WHOLE}, "dict[str, int]", [{"a": 1}, {}], [{"a": "b"}]),
    ({"type": "object", "properties": {}, "additionalProperties": True}, "dict", [{"a": 1}], [1]),
    (schema(a=TEXT) | {"additionalProperties": {}}, "{a: str}", [{"a": "b"}], [{"a": "b", "c": 1}]),
    (schema(**{"from": TEXT}), "{from: str}", [{"from": "a"}], [{"from_": "a"}]),
    (PLACE, "{x: float}", [{"x": 1}], [{}, {"x": 1, "y": 1}]),
    ({"$ref": "#/$defs/Place", "description": "d"}, "{x: float}", [{"x": 1}], [{"x": "1"}]),
    ({"allOf": [{"$ref": "#/$defs/Place"}, {"properties": {"y": TEXT}}], "title": "t"},
     '{x: float, y: str = ...}', [{"x": 1, "y": "a"}], [{"y": "a"}]),
    ({"type": "object", "properties": {"a": TEXT, "b": TEXT},
      "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "{a: str = ..., b: str = ...}",
     [{"a": "x"}, {"b": "x"}], [{}, {"c": "x"}]),
    ({"anyOf": [{"not": {}}, TEXT]}, "str", ["a"], [1]),
    ({"pattern": "^[a-z]+-[0-9]{2}$"}, "str", ["ab-12"], ["ab-1", "AB-12", 5]),
    ({"pattern": "(a+)+$", "type": "string"}, "str", ["b", "a" * 5000], [1]),
    ({"description": "d"}, "any", ["a", 1, True, None, [], {"a": 1}], []),
    ({"type": "string", "format": "date", "example": "x", "x-order": 1, "$comment": "c"}, "str",
     ["a"], [1]),
]


@pytest.mark.parametrize("given, spoken, good, bad", FITS, ids=[row[1] for row in FITS])
def test_what_can_be_checked_is_checked(given, spoken, good, bad):
    """On the way in and in every call; read twice it stays the same, as files are."""
    root = schema(a=given) | {"$defs": {"Place": PLACE}}
    own = own_schema(root)
    check_schema(own, "f")
    assert own_schema(own) == own
    assert call_text.signature({"name": "f", "parameters": own}) == f"f(a: {spoken})"
    assert all(not argument_fault({"a": value}, own) for value in good)
    assert all(argument_fault({"a": value}, own) for value in bad)


def nested(depth):
    return {"type": "array", "items": nested(depth - 1)} if depth else TEXT


TREE = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
BOMB = {"$ref": "#/$defs/a0", "$defs": {  # 2 ** 40 parts when written out
    f"a{n}": schema(x={"$ref": f"#/$defs/a{n + 1}"}, y={"$ref": f"#/$defs/a{n + 1}"})
    for n in range(40)}}
UNFIT = [
    (TREE, "a recursive schema"), ({"$ref": "#"}, "a recursive schema"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
     "a recursive schema"),
    (BOMB, "a schema of more than"), (schema(a=nested(60)), "a schema of more than"),
    (schema(a={"$ref": "other.json#/x"}), "a $ref to another file"),
    (schema(a={"$ref": "#/$defs/none"}), "a $ref to nothing"),
    (schema(a={"$ref": "#none"}), "a $ref to an anchor"),
    ({"type": "object", "anyOf": [schema(a=TEXT), schema(b=TEXT)]}, "only an alternative declares"),
    (schema(a={"patternProperties": {"x": TEXT}}), "unsupported keyword 'patternProperties'"),
    (schema(a={"not": TEXT}), "unsupported keyword 'not'"), (schema(a={"type": "text"}), "unknown type 'text'"),
    (schema(a={"anyOf": []}), "no list of schemas"), (schema(a={"anyOf": TEXT}), "no list of schemas"),
    (schema(a={"allOf": [TEXT, WHOLE]}), "two values of 'type'"),
    (schema(a={"type": {"a": 1}}), "unknown type"), (schema(a=7), "no object"),
    (schema(a={"type": "string", "minLength": "2"}), "minLength is no whole number"),
    ({"type": "object", "required": ["a"]}, "required names something"),
    (schema(a={"type": "integer", "multipleOf": 0}), "multipleOf is not positive"),
    (TEXT, "the parameters are no object schema"), ("object", "a schema that is no object"),
    (schema(a={"enum": "a"}), "enum is no list"), ({"properties": [1]}, "properties is no object"),
    (schema(a={"type": "string", "description": "\ud800"}), "a text that no tokenizer takes"),
    (schema(a={"enum": 5, "nullable": True}), "a malformed schema"),
    (schema(a={"type": "integer", "default": float("inf")}), "a malformed schema"),
    (schema(a={"$ref": "#/allOf/" + "1" * 5000}), "a $ref to nothing"),
    ({"type": "object", "city": TEXT}, "do not stand under 'properties'"),
    (schema(a={"enum": ["study<|im_end|>", "hall"]}), "a control token"),
]


@pytest.mark.parametrize("given, reason", UNFIT, ids=[f"{n} {r[1]}" for n, r in enumerate(UNFIT)])
def test_what_cannot_be_represented_is_left_out_and_counted(given, reason, tmp_path):
    """One bad function costs itself, not the run."""
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([{"name": "f", "parameters": given}, RING]).replace("Infinity", "1e999"))
    started = time.process_time()
    tools, left_out = read_tools(path)
    assert tools == [RING] and time.process_time() - started < 2
    assert list(left_out.values()) == [1] and reason in list(left_out)[0], left_out


@pytest.mark.parametrize("key", ["args_schema", "args", "inputs", "parameter_definitions"])
def test_arguments_under_another_key_are_not_lost(key):
    """Libraries have shapes of their own; read as a function without arguments, every call was wrong."""
    with pytest.raises(InvalidTask) as fault:
        own_tool({"name": "f", key: {"city": TEXT}})
    assert fault.value.detail == f"no schema under 'parameters', but something under {key!r}"


SLOW = ["(a+)+$", "(a|a)*$", "(a|aa)+$", "(?:a*)*b", r"(a)\1+", "(?=a)a", "(?P<n>a)", "a*a*a*a*b",
        "a?" * 26 + "a" * 26, "(a|b)?" * 14, "((a)*)*", "[a", "a{2,1}", r"\p{L}", "x" * 300, "(a{2})+b"]
QUICK = ["^a*a*b$", "a*b*c", "^[^@]+@[^@]+[.][a-z]+$", r"^\d{4}-\d{2}-\d{2}$", r"^\(\d{3}\)$", "^a?b|c$",
         "^(red|green|blue)$", r"^v\d+(\.\d+)?$", r"[\]a-z]+", r"^\$[0-9]+\.[0-9]{2}$"]


def test_no_pattern_keeps_the_run_busy():
    """A pattern is checked only if no text can make it slow; any other one is a note."""
    assert [p for p in SLOW if quick_pattern(p)] == []
    assert [p for p in QUICK if not quick_pattern(p)] == []
    for pattern in SLOW + QUICK:
        for text in ("a" * 256, "ab" * 128, "a" * 100_000):
            started = time.process_time()
            conforms(text, {"type": "string", "pattern": pattern})
            assert time.process_time() - started < 1, pattern


# ---------------------------------------------------------------------------------------------
# base tasks


ASKED = "Ring the bell three times."
CALL = {"name": "ring", "arguments": {"times": 3}}
WRAPPED = {"id": "1", "type": "function", "function": {"name": "ring", "arguments": '{"times": 3}'}}
OPENAI = {"type": "function", "function": RING}
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": ASKED},
        {"role": "assistant", "content": None, "tool_calls": [WRAPPED]},
        {"role": "tool", "content": "ok"}, {"role": "assistant", "content": "Done."}]
TASKS = {
    "ours": {"task": ASKED, "tools": [RING], "calls": [CALL]},
    "fields of one's own": {"id": 7, "task": ASKED, "tools": [OPENAI], "calls": [CALL], "by": "me"},
    "arguments as text": {"task": ASKED, "tools": [OPENAI], "calls": [WRAPPED]},
    "a chat": {"messages": CHAT, "tools": [OPENAI]},
    "arguments as input": {"task": ASKED, "tools": [RING], "calls": [
        {"type": "tool_use", "name": "ring", "input": CALL["arguments"]}]},
    "arguments as parameters": {"task": ASKED, "tools": [RING], "calls": [
        {"name": "ring", "parameters": CALL["arguments"]}]},
    "calls of OpenAI, tools of Google": {"task": ASKED, "tools": [{"functionDeclarations": [RING]}],
                                         "tool_calls": [WRAPPED]},
    "a table with a column for each field": {
        "task": ASKED, "tools": [RING], "calls": [CALL], "reference": None, "results": None, "ordered": None,
        "id": 12345678901234567890},
    "a chat in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": ASKED}]},
                                     CHAT[2]], "tools": [OPENAI], "parallel_tool_calls": False},
}


def files(tmp_path, *lines):
    """A task file of these lines, and a list of two functions."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "tools.json").write_text(json.dumps([SHUT, RING]))
    path = tmp_path / "tasks.jsonl"
    path.write_text("\ufeff" + "\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path), str(tmp_path / "tools.json")


@pytest.mark.parametrize("shape", TASKS)
def test_base_tasks_of_every_shape_are_one_task(shape, tmp_path):
    task, = tool_calls.read_tasks(*files(tmp_path, TASKS[shape]))
    ours = tool_calls.make_task(TASKS["ours"], "base")
    assert (task.text, task.spec, task.id) == (ours.text, ours.spec, ours.id)


def test_a_task_without_tools_has_the_right_function_and_others_beside_it():
    """With the right one alone nobody would see whether an agent can choose."""
    listed = {name: {**RING, "name": name} for name in ("ring", "b", "a", "c", "d")}
    listed["long"] = {**RING, "name": "long", "description": "x" * 700}  # would fill the prompt
    tasks = [own_record({"task": f"{ASKED} {i}", "calls": [CALL]}, listed) for i in range(40)]
    shown = [[tool["name"] for tool in task["tools"]] for task in tasks]
    assert all(len(set(names)) == 3 and "ring" in names for names in shown)
    assert {name for names in shown for name in names} == {"ring", "a", "b", "c", "d"}
    assert {names.index("ring") for names in shown} != {0}  # its place does not give it away
    assert own_record({"task": ASKED, "calls": [CALL]}, {"ring": RING})["tools"] == [RING]
    # nothing is to be called, and every function is long: one is offered all the same
    long = {name: {**RING, "name": name, "description": "x" * n} for name, n in (("a", 800), ("b", 700))}
    assert own_record({"task": ASKED, "calls": []}, long)["tools"] == [long["b"]]


BAD_TASKS = [
    ({"task": ASKED, "calls": [{"name": "sing", "arguments": {}}]}, "'sing', which is not in the list"),
    ({"task": ASKED, "tools": [{"name": "f", "parameters": TREE}], "calls": []}, "tool 'f': a recursive"),
    ({"task": ASKED, "tools": [RING], "calls": [{"name": "ring", "arguments": "{3}"}]}, "no JSON object"),
    ({"messages": CHAT[2:], "tools": [RING]}, "0 of the user"),
    ({"messages": CHAT[:2], "tools": [RING]}, "no answer"),
    ({"messages": [CHAT[1], {"role": "assistant", "content": "Done."}],
      "tools": [{"name": ["ring"], "parameters": {}}]}, "no function with a name"),
    ({"messages": CHAT + [CHAT[2]], "tools": [RING]}, "calls in two turns"),
    *(({"messages": [CHAT[1], {"role": "assistant", **answer}], "tools": [RING]}, "not under \"tool_calls\"")
      for answer in ({"content": [{"type": "tool_use", "name": "ring", "input": {"times": 3}}]},
                     {"content": '<tool_call>{"name": "ring"}</tool_call>'},
                     {"content": "<function=ring>{}</function>"}, {"content": "ring(times=3)"},
                     {"content": 'So: {"name": "ring", "parameters": {"times": 3}}'},
                     {"content": None, "function_call": {"name": "ring", "arguments": "{}"}})),
    ({"messages": "hello"}, "no list of objects"), ({"messages": [{"role": "user"}, CHAT[2]]}, "no text"),
    ({"task": ASKED, "tools": [RING], "calls": CALL}, "calls is no list"),
    ({"task": ASKED, "tools": [RING], "calls": ["ring"]}, "name (text) and arguments"),
    ({"task": ASKED, "tools": [RING], "calls": [{"name": ["ring"]}]}, "name (text) and arguments"),
    ({"task": ASKED, "calls": [{"name": ["ring"]}]}, "not in the list"),
    ({"task": ASKED, "calls": [{"tool": "ring", "arguments": {}}]}, "a call without a 'name'"),
    *(({"task": ASKED, "tools": [RING], "calls": [{"name": "ring", **call}]}, f"arguments under {key}")
      for call, key in (({"params": {"times": 3}}, "params"), ({"times": 3}, "times"),
                        ({"arguments": {"times": 3}, "args": {"times": 3}}, "arguments, args"))),
    ({"task": ASKED, "tools": [RING], "calls": [{"name": "ring", "arguments": {"times": 10 ** 19}}]},
     "at most 18 digits"),
]


def test_all_bad_lines_are_named_at_once(tmp_path):
    """Twenty in full, then how many more: a file is corrected in one go."""
    good = {"task": ASKED, "tools": [RING], "calls": [CALL]}
    for k, bad in enumerate((BAD_TASKS[:18], BAD_TASKS[18:])):
        path, tools = files(tmp_path / str(k), good, *(line for line, _ in bad))
        with pytest.raises(UserError) as error:
            tool_calls.read_tasks(path, tools)
        lines = str(error.value).split("\n")
        for n, (line, (_, what)) in enumerate(zip(lines, bad, strict=True), 2):
            assert line.startswith(f"{path}, line {n}: ") and what in line, line
    Path(tools).write_text(json.dumps([RING, {"name": "sing", "parameters": TREE}]))
    with pytest.raises(UserError, match=r"left out: a recursive schema \(sing\): 1$"):
        tool_calls.read_tasks(files(tmp_path / "b", BAD_TASKS[0][0])[0], tools)
    path, tools = files(tmp_path, *[{"task": 1}] * 30)
    with pytest.raises(UserError) as error:
        tool_calls.read_tasks(path, tools)
    lines = str(error.value).split("\n")
    assert len(lines) == 21 and lines[-1] == f"and 10 more lines of {path}"


NOTHING = {"task": "Sing the anthem, please.", "tools": [RING], "calls": []}


def test_nothing_to_call_is_an_answer_where_a_task_has_it(tmp_path):
    """`none` scores where it is right, counts as an answer only where prompts mention it, and the
    prompts of other runs stay as they are."""
    from test_tool_calls import options
    one = tool_calls.make_task(TASKS["ours"], "base")
    others = [{**TASKS["ours"], "task": f"Ring {n} times, please.", "calls": [
        {"name": "ring", "arguments": {"times": n}}]} for n in range(6)]
    for call_format in ("json", "python"):
        for lines, said in (([*others, NOTHING], True), (others, False)):
            path, _ = files(tmp_path, *lines)
            tool_calls.prepare(options(base_tasks=path, world_options={"call_format": call_format}))
            assert ("reply: none" in tool_calls.agent_prompt(one)[0]["content"]) == said
            assert tool_calls.score(one, "none") == (0.0, said)
            task = tool_calls.make_task(NOTHING, "base")
            assert tool_calls.gold(task) == "none" and tool_calls.score(task, "none") == (1.0, True)
            assert tool_calls.score(task, tool_calls.gold(one)) == (0.0, True)
            assert tool_calls.score(task, "None of them.") == (0.0, False)
            assert tool_calls.category(task) == "no call"
    again = tool_calls.make_task({**NOTHING, "task": "Water the roses, please."}, "base")
    assert not set(tool_calls.same_task_key(task)) & set(tool_calls.same_task_key(again))
    raised(InvalidTask, None, tool_calls.make_task, NOTHING, "env")  # it would be written of anything


def test_a_chat_that_calls_nothing_is_such_a_task(tmp_path):
    """An assistant that was free to call and answered in words; without tools it is a question."""
    spoken = [CHAT[1], {"role": "assistant", "content": "I cannot."}]
    task, = tool_calls.read_tasks(*files(tmp_path, {"messages": spoken, "tools": [OPENAI]}))
    assert task.spec["calls"] == [] and task.spec["tools"] == [RING]
    task, = tool_calls.read_tasks(files(tmp_path, {"messages": spoken})[0])
    assert task.spec == {"reference": ["I cannot."]}
