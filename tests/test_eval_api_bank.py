"""API-Bank: both rules by hand, hostile text, recorded verdicts, gold responses, train / test.

Run: python -m pytest tests/test_eval_api_bank.py -q. What needs the data skips without ../shared.
"""
import json

import pytest

from helpers import user_error
from eval import api_bank
from test_eval_harness import SHARED, needs_data, never_passes, writable_copy

GOLD = {"name": "AddAlarm", "parameters": {"token": "t1", "time": "2023-03-25 08:30:00"}}
RECORD = {"id": "x", "category": "level-1", "system": "s", "user": "u", "gold": GOLD,
          "parameters": {"token": "str", "time": "str"}}


def record(name, parameters, declared=None):
    return RECORD | {"gold": {"name": name, "parameters": parameters},
                     "parameters": declared or dict.fromkeys(parameters, "str")}


CALL = json.dumps(GOLD)
WRONG = '{"name": "A", "parameters": {}}'


@pytest.mark.parametrize("text, ok", [
    (f"<think>x</think>\n<tool_call>\n{CALL}\n</tool_call>", True),
    (CALL, True), (f"<tool_call>{CALL}</tool_call>", True), (f"<tool_call>\n{CALL}", True),
    (f"```json\n{CALL}\n```", True),
    # the last opening tag counts, up to the next closing tag
    (f"I write <tool_call> now\n<tool_call>\n{CALL}\n</tool_call>\nbye", True),
    (f"<tool_call>\n{CALL}\n</tool_call> I used <tool_call>", False),
    (f"<tool_call>\n{WRONG}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", True),
    (f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{WRONG}\n</tool_call>", False),
    # any line; lines that are no JSON are dropped
    (f"<tool_call>\n{WRONG}\n{CALL}\n</tool_call>", True),
    (f"<tool_call>\n{CALL}\n{WRONG}\n</tool_call>", True),
    (f"<tool_call>\n{{oops\n{CALL}\n</tool_call>", True),
    (json.dumps(GOLD, indent=1), False), (str(GOLD), False), (f"[{CALL}]", False),
    # an object without name or parameters passes for the gold function
    (json.dumps(GOLD["parameters"]), True), (json.dumps({"parameters": GOLD["parameters"]}), False),
    (json.dumps({"name": "AddAlarm", "arguments": GOLD["parameters"]}), False),
    (json.dumps(GOLD | {"id": 7}), True),
    # JSON that is no container, or text that is no JSON, ends the scan
    (f"42\n{CALL}", False), (f"null\n{CALL}", False), (f'"hello"\n{CALL}', False),
    (f"{CALL}\n42", True), (json.dumps(CALL), True), (f"[1]\n{CALL}", True),
    ("", False), ("Done.", False), ("<tool_call>", False), ("<tool_call>\n</tool_call>", False),
    (CALL.replace("AddAlarm", "addalarm"), False), (CALL.replace("t1", " t1"), False),
    (CALL.replace('"t1"', "1"), False), (CALL.replace('"t1"', "null"), False)])
def test_toolrl_rule(text, ok):
    assert api_bank.score(RECORD, text).ok == ok, api_bank.score(RECORD, text).reason


ARGS = "token='t1', time='2023-03-25 08:30:00'"


@pytest.mark.parametrize("text, ok", [
    (f"API-Request: [AddAlarm({ARGS})]", True), (f"[AddAlarm({ARGS})]", True),
    ("[AddAlarm(time = \"2023-03-25 08:30:00\", token=t1)]", True),
    (f"Sure! [AddAlarm({ARGS})] it is.", True),
    (f"[AddAlarm({ARGS}), GetToday()]", True), (f"[AddAlarm({ARGS}), Other(z='1')]", False),
    (f"[AddAlarm({ARGS})]\n[Other()]", True), (f"[Other()]\n[AddAlarm({ARGS})]", False),
    (f"AddAlarm({ARGS})", False), (f"[AddAlarm({ARGS}", False),
    (f"[AddAlarm({ARGS})]".replace(", ", ",\n"), False),
    ("[AddAlarm('t1', '2023-03-25 08:30:00')]", False), ("[AddAlarm(token='t1')]", False),
    (f"[AddAlarm({ARGS}, loud='1')]", False), ("[AddAlarm()]", False),
    ("[AddAlarm(token='', time='2023-03-25 08:30:00')]", False),
    ("[AddAlarm(token='t1', time='2023-03-25T08:30:00')]", False), (CALL, False), ("", False)])
def test_damo_rule(text, ok):
    assert api_bank.score(RECORD, text, rule="damo").ok == ok


@pytest.mark.parametrize("rec, same, different", [
    (record("AddReminder", {"content": "call my mom", "time": "t"}),
     "content='Call mom my', time='t'", "content='buy milk', time='t'"),
    (record("AddAgenda", {"content": "call my mom"}), "content='call my mom soon'",
     "content='CALL MY MOM'"),
    (record("DeleteReminder", {"content": "x", "time": "t"}), "content='y', time='t'",
     "content='x', time='u'"),
    (record("PlayMusic", {"music_name": "Hello"}), "music_name=' HELLO'", "music_name='Hi'"),
    (record("QueryStock", {"stock_code": "MSFT", "date": "2022-02-04"}),
     "stock_code='msft', date='2022-2-4'", "stock_code='msft', date='2022-02-05'"),
    (record("QueryHistoryToday", {"date": "10-06"}), "date='2023-10-06'", "date='10/06'"),
    (record("Calculator", {"formula": "(1+2)*3"}), "formula='(1 + 2) * 3'", "formula='1+2*3'"),
    (record("RecordHealthData", {"health_data": [{"name": "a", "value": "1"},
                                                 {"name": "b", "value": "2"}]},
            {"health_data": "list"}),
     "health_data=[{'name': 'b', 'value': 2}, {'name': 'a', 'value': '1'}]",
     "health_data=[{'name': 'a', 'value': '1'}]"),
    (record("Geocoding", {"address": "Paris", "n": 2, "x": 1.5, "on": True},
            {"address": "str", "n": "int", "x": "float", "on": "bool"}),
     "address='Paris', n='2', x='1.50', on='True'",
     "address='Paris', n='2.0', x='1.5', on='True'")])
def test_damo_comparison_of_each_kind(rec, same, different):
    name = rec["gold"]["name"]
    verdict = api_bank.score(rec, f"[{name}({same})]", "damo")
    assert verdict.ok, verdict.reason
    assert not api_bank.score(rec, f"[{name}({different})]", "damo").ok


def test_damo_fresh_database():
    rec = record("ForgotPassword", {"status": "Verification Code", "verification_code": "1"})
    assert not api_bank.score(rec, api_bank.gold(rec, "damo"), "damo").ok
    rec = record("RegisterUser", {"username": "foo"})
    assert api_bank.score(rec, api_bank.gold(rec, "damo"), "damo").ok
    assert not api_bank.score(rec | {"accounts": {"foo"}}, api_bank.gold(rec, "damo"), "damo").ok


def test_an_expected_argument_that_no_tool_declares_is_missing():
    """Eight of the official calls have one: the natural answer ended the evaluation."""
    rec = record("CancelTimedSwitch", {"name": "lamp", "device_id": "10"}, {"name": "str"})
    verdict = api_bank.score(rec, "[CancelTimedSwitch(name='lamp')]", "damo")
    assert not verdict.ok and "device_id is missing" in verdict.reason


HOSTILE = ["[AddAlarm(" + text + ")]" for text in (
    "token=[" * 2500, "w" * 19_000, "token='" * 2500, "w " * 9000,
    "token=" + "9" * 6000 + ", time=1", "token=" + "[" * 900 + "]" * 900)] \
    + ['{"name": ' * 10_000, "[" * 900 + "]" * 900, "[AddAlarm(" * 30_000 + ")]", None, 5, []]


@pytest.mark.parametrize("rule, kind", [("toolrl", "str"), *(
    ("damo", kind) for kind in ("int", "float", "list"))])
def test_hostile_text_is_fast_and_false(kind, rule, tmp_path):
    """Beside what test_eval_harness.py scores by every rule."""
    rec = RECORD | {"parameters": {"token": kind, "time": "str"}}
    never_passes(lambda text: api_bank.score(rec, text, rule), tmp_path, HOSTILE)


def test_values_too_deep_to_print():
    deep = "health_data=[{'name': 'a', 'value': " + "[" * 900 + "]" * 900 + "}]"
    rec = record("RecordHealthData", {"health_data": [{"name": "a", "value": "1"}]},
                 {"health_data": "list"})
    assert not api_bank.score(rec, f"[RecordHealthData({deep})]", "damo").ok
    user_error("unknown rule", api_bank.score, RECORD, "", rule="other")


# ---- data


@needs_data
def test_train_and_test_are_disjoint():
    test, train = api_bank.load(SHARED), api_bank.load(SHARED, split="train")
    assert len(train) == 10  # calls, and the three pairs between which the user says nothing
    pairs = [r for r in train if "golds" in r]
    assert len(pairs) == 3 and all(r["results"][0]["token"] in str(r["golds"][1]) for r in pairs)
    assert all("Result of" not in r["user"] and r["user"].count("User: ") > 0 for r in pairs)
    assert not {r["dialogue"] for r in test} & {r["dialogue"] for r in train}
    asked = {api_bank.request_of(r["user"]) for r in test}
    assert not asked & {api_bank.request_of(r["user"]) for r in train}
    # the comparison must be able to see an overlap: both texts of one dialogue give one request
    lines = "User: Can you perform some basic arithmetic calculation for me?\nAI: Sure"
    assert api_bank.request_of(lines) in asked
    assert all(api_bank.base_task(r) is None for r in test)
    for task in map(api_bank.base_task, train):
        tool = next(t for t in task["tools"] if t["name"] == task["calls"][0]["name"])
        assert set(task["calls"][0]["arguments"]) <= set(tool["parameters"]["properties"])
        assert task["task"].startswith("User:")


SEARCH = "API-Request: [ToolSearcher(keywords='retreats')]->" + str(
    {"name": "Retreats", "description": "Finds retreats.", "input_parameters": {
        "place": {"type": "str", "description": "Where."}, "n": {"type": "int"}}})


def test_official_training_format():
    row = {"input": "{\"apiCode\": \"ToolSearcher\"}\nUser: Book two retreats in Bali.\n"
                    f"{SEARCH}\nGenerate API Request: ",
           "output": "API-Request: [Retreats(place='Bali', n=2)]"}
    rec, = api_bank.train_level3("t", row)
    task = api_bank.base_task(rec)
    assert task["task"] == "User: Book two retreats in Bali."
    assert task["calls"] == [{"name": "Retreats", "arguments": {"place": "Bali", "n": 2}}]
    assert task["tools"][0]["parameters"]["properties"]["n"]["type"] == "integer"
    # later calls see the results of earlier ones; searches are no tasks; unknown tools neither
    later = row | {"input": row["input"].replace(
        "Generate", "API-Request: [Retreats(place='Bali', n=1)]->{'price': 5}\nGenerate")}
    assert api_bank.train_level3("t", later)[0]["user"].endswith(
        "Result of Retreats: {'price': 5}")
    assert api_bank.train_level3("t", row | {"output": "[ToolSearcher(keywords='x')]"}) == []
    rec, = api_bank.train_level3("t", row | {"output": "[Other(place='Bali')]"})
    assert api_bank.base_task(rec) is None


@needs_data
def test_training_file_is_used_unless_evaluated(tmp_path):
    folder = writable_copy("api_bank", tmp_path)
    row = {"input": f"User: Book a retreat.\n{SEARCH}\n", "output": "[Retreats(place='Bali', n=2)]"}
    evaluated = next(r for r in api_bank.load(SHARED) if r["category"] == "level-3")
    request = api_bank.request_of(evaluated["user"])
    clash = row | {"input": row["input"].replace("Book a retreat.", request.capitalize())}
    (folder / "official/training-data").mkdir()
    path = folder / "official/training-data/lv3-api-train.json"
    path.write_text(json.dumps([row, clash]))
    extra = [r for r in api_bank.load(tmp_path, split="train") if r["category"] == "lv3-train"]
    assert [r["id"] for r in extra] == ["lv3-train-0"]


@needs_data
def test_bad_data_is_named(tmp_path):
    folder = writable_copy("api_bank", tmp_path)
    user_error("no data folder", api_bank.load, tmp_path / "nowhere")
    path = folder / "toolrl" / "level-2-api_processed.json"
    rows = json.loads(path.read_text())
    for bad in (7, {"system": "s"}, rows[1] | {"answer": []}, rows[1] | {"answer": {"name": 1}}):
        path.write_text(json.dumps([rows[0], bad]))
        user_error("level-2.*record 1", api_bank.load, tmp_path)
    user_error("unknown split", api_bank.load, tmp_path, split="dev")
