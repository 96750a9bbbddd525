"""API-Bank: both rules by hand. Recorded verdicts and hostile text: test_eval_harness.py."""
import json

import pytest

from eval import api_bank

GOLD = {"name": "AddAlarm", "parameters": {"token": "t1", "time": "2023-03-25 08:30:00"}}


def record(name, parameters, accounts=(), **declared):
    return {"gold": {"name": name, "parameters": parameters}, "accounts": set(accounts),
            "parameters": dict.fromkeys(parameters, "str") | declared}


CALL = json.dumps(GOLD)
WRONG = '{"name": "A", "parameters": {}}'


@pytest.mark.parametrize("text, ok", [
    (f"<think>x</think>\n<tool_call>\n{CALL}\n</tool_call>", True), (CALL, True),
    # the last opening tag counts, up to the next closing tag
    (f"I write <tool_call> now\n<tool_call>\n{CALL}\n</tool_call>\nbye", True),
    (f"<tool_call>\n{CALL}\n</tool_call> I used <tool_call>", False),
    (f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{WRONG}\n</tool_call>", False),
    # any line; lines that are not JSON are dropped
    (f"<tool_call>\n{WRONG}\n{CALL}\n</tool_call>", True),
    (f"<tool_call>\n{{oops\n{CALL}\n</tool_call>", True),
    (json.dumps(GOLD, indent=1), False), (str(GOLD), False), (f"[{CALL}]", False),
    # an object without name or parameters passes for the gold function
    (json.dumps(GOLD["parameters"]), True), (json.dumps({"parameters": GOLD["parameters"]}), False),
    # JSON that is not a container, or text that is not JSON, ends the scan
    (f"42\n{CALL}", False), (f'"hello"\n{CALL}', False), (json.dumps(CALL), True),
    ("", False), ("<tool_call>", False), (CALL.replace("AddAlarm", "addalarm"), False),
    (CALL.replace("t1", " t1"), False), (CALL.replace('"t1"', "1"), False)])
def test_toolrl_rule(text, ok):
    verdict = api_bank.score({"gold": GOLD}, text)
    assert verdict.ok == ok, verdict.reason


ARGS = "token='t1', time='2023-03-25 08:30:00'"


@pytest.mark.parametrize("text, ok", [
    (f"Sure! API-Request: [AddAlarm({ARGS})] it is.", True),
    ("[AddAlarm(time = \"2023-03-25 08:30:00\", token=t1)]", True),
    (f"[AddAlarm({ARGS})]\n[Other()]", True), (f"[Other()]\n[AddAlarm({ARGS})]", False),
    (f"AddAlarm({ARGS})", False), ("[AddAlarm('t1', '2023-03-25 08:30:00')]", False),
    ("[AddAlarm(token='t1')]", False), (f"[AddAlarm({ARGS}, loud='1')]", False), ("", False)])
def test_damo_rule(text, ok):
    assert api_bank.score(record(**GOLD), text, rule="damo").ok == ok


TYPED = record("Geocode", {"n": 2, "x": 1.5, "on": True, "l": ["a"]}, n="int", x="float", on="bool",
               l="list")


@pytest.mark.parametrize(
    "rec, arguments, ok",
    [
        (TYPED, "n='2', x='1.50', on='True', l=['a']", True),
        (TYPED, "n='2.0', x='1.5', on='True', l=['a']", False),
        (record("PlayMusic", {"music_name": "Hello"}), "music_name=' HELLO'", True),
        (record("AddScene", {"name": "Hello"}), "name='HELLO'", False),
        # steps that need an earlier call, accounts that exist, and a check that never passes
        (
            record("ForgotPassword", {"status": "Verification Code"}),
            "status='Verification Code'",
            False,
        ),
        (record("RegisterUser", {"username": "foo"}), "username='foo'", True),
        (record("RegisterUser", {"username": "foo"}, ["foo"]), "username='foo'", False),
        (record("DeleteMeeting", {"time": "t"}), "time='t'", False),
    ],
)
def test_damo_types_and_comparison(rec, arguments, ok):
    assert api_bank.score(rec, f"[{rec['gold']['name']}({arguments})]", "damo").ok == ok
