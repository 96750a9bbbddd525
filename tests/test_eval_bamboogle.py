"""Bamboogle: where a response has its answer.

Usage: python -m pytest -q tests/test_eval_bamboogle.py

The metrics are covered by recorded verdicts (test_eval_harness.py).
"""
from eval import bamboogle


def test_the_first_response_is_the_answer():
    """Otherwise thinking would be scored, or a right answer would be lost."""
    for text, ok in (
            ("<think>t</think><response> James Madison </response><response>B</response>", True),
            ("<response> james madison", True), ("<think>t</think> James Madison", True),
            ("James Madison", True), ("James Madison</think>B", False)):
        assert bamboogle.score({"answer": "James Madison"}, text).ok == ok, text


def test_searchr1_wants_two_answers_in_a_transcript_and_takes_the_last():
    """Otherwise the example in the prompt would be taken for the answer."""
    text = "<answer>A</answer> x <answer> B </answer>"
    assert bamboogle.extract_searchr1(text) == "B"
    assert bamboogle.extract_searchr1(text[:18]) is None
    assert bamboogle.extract_searchr1(text[:18], minimum=1) == "A"
