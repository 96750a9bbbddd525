"""API-Bank: cases that no recorded verdict covers.

Usage: python -m pytest -q tests/test_eval_api_bank.py

Recorded verdicts and hostile texts are in test_eval_harness.py.
"""
import json

import pytest

from eval import api_bank

GOLD = {"name": "AddAlarm", "parameters": {"token": "t1", "time": "2023-03-25 08:30:00"}}
CALL = json.dumps(GOLD)


@pytest.mark.parametrize("text, ok", [
    (f"<think>x</think>\n<tool_call>\n{CALL}\n</tool_call>", True), (CALL, True),
    # the last opening tag counts; lines of its block that are not JSON are dropped
    (f"I write <tool_call> now\n<tool_call>\n{{oops\n{CALL}\n</tool_call>\nbye", True),
    (f"<tool_call>\n{CALL}\n</tool_call> I used <tool_call>", False),
    # JSON that is not a container ends the scan
    (f"42\n{CALL}", False), (CALL.replace("t1", " t1"), False)])
def test_toolrl_rule(text, ok):
    """Otherwise right calls would earn nothing, or wrong ones would pass."""
    verdict = api_bank.score({"gold": GOLD}, text)
    assert verdict.ok == ok, verdict.reason


@pytest.mark.parametrize("name, parameters, arguments, ok", [
    ("Geocode", {"n": 2, "x": 1.5, "on": True, "l": ["a"]}, "n='2', x='1.50', on='True', l=['a']",
     True),
    ("Geocode", {"n": 2}, "n='+2'", False),  # "+" is not a digit
    # the last ")]" of the line ends the call
    ("AddScene", {"name": "a", "on": True}, "name='a')] or [AddScene(on='True'", True),
    # the official check of DeleteMeeting never passes; the account foo already exists
    ("DeleteMeeting", {"time": "t"}, "time='t'", False),
    ("RegisterUser", {"username": "foo"}, "username='foo'", False)])
def test_damo_rule(name, parameters, arguments, ok):
    """Otherwise the score would lack the quirks of the official check, and differ from it."""
    declared = {key: type(value).__name__ for key, value in parameters.items()}
    record = {"gold": {"name": name, "parameters": parameters}, "parameters": declared,
              "accounts": {"foo"}}
    assert api_bank.score(record, f"So: [{name}({arguments})] it is.", "damo").ok == ok
