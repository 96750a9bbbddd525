"""Bamboogle: string metrics and extraction against the published rules."""
import pytest

from eval import bamboogle

RECORD = {"answer": "James Madison"}


@pytest.mark.parametrize("prediction, answer, values", [
    *((text, "James Madison", dict(em=em, cover_em=cover)) for text, em, cover in (
        ("The James  Madison.", 1, 1), ("It was James Madison", 0, 1), ("Madison", 0, 0),
        ("James-Madison", 0, 0), ("", 0, 0), (None, 0, 0), ("\u201cJames Madison\u201d", 0, 1))),
    # repeated tokens count once per occurrence; closed answers get no partial credit
    ("james james monroe", "James Madison", dict(precision=1 / 3, recall=1 / 2, f1=0.4)),
    ("yes it is", "Yes", dict(f1=0)), ("Yes.", "yes", dict(f1=1)),
    ("108", "10.8", dict(em=1)), ("b", ["a b c", "b"], dict(em=1))])
def test_metrics(prediction, answer, values):
    found = bamboogle.metrics(prediction, answer)
    assert {name: found[name] for name in values} == pytest.approx(values)


@pytest.mark.parametrize("text, ok", [
    ("<think>t</think><response> James Madison </response><response>B</response>", True),
    ("<response> james madison", True), ("<think>t</think> James Madison", True),
    ("James Madison", True), ("<response>B</response><response>James Madison</response>", False),
    ("James Madison</think>B", False), ("<think>James Madison</think>", False)])
def test_the_first_response_is_the_answer(text, ok):
    assert bamboogle.score(RECORD, text).ok == ok


@pytest.mark.parametrize("text, answer, alone", [
    ("no tag", None, None), ("<answer> A </answer>", None, "A"),
    ("<answer>A</answer> x <answer>B</answer>", "B", "B"),
    ("<answer>A</answer><answer>B", None, "A")])
def test_searchr1_wants_two_answers_in_a_transcript_and_takes_the_last(text, answer, alone):
    assert bamboogle.extract_searchr1(text) == answer
    assert bamboogle.extract_searchr1(text, minimum=1) == alone
