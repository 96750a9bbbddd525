"""Bamboogle: where the answer is. Recorded verdicts hold the metrics: test_eval_harness.py.

Usage: python -m pytest -q tests/test_eval_bamboogle.py
"""
from eval import bamboogle


def test_the_first_response_is_the_answer():
    """Otherwise thinking would be scored, or a right answer would be lost."""
    for text, ok in (
            ("<think>t</think><response> James Madison </response><response>B</response>", True),
            ("<response> james madison", True), ("<think>t</think> James Madison", True),
            ("James Madison", True), ("James Madison</think>B", False)):
        assert bamboogle.score({"answer": "James Madison"}, text).ok == ok, text
