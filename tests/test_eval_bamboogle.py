"""Bamboogle: string metrics, extraction and the dialogue loop against recorded official verdicts.

Run: python -m pytest tests/test_eval_bamboogle.py -q
"""
import pytest

from helpers import user_error
from eval import bamboogle

RECORD = {"id": "bamboogle-000", "question": "Who?", "answer": "James Madison"}


# --------------------------------------------------------------------------------- metrics

@pytest.mark.parametrize("prediction, answer, values", [
    *((text, "James Madison", dict(em=em, cover_em=cover)) for text, em, cover in (
        ("james madison", 1, 1), ("The James  Madison.", 1, 1), ("It was James Madison", 0, 1),
        ("Madison", 0, 0), ("James\u00a0Madison", 1, 1), ("James-Madison", 0, 0), ("", 0, 0),
        (None, 0, 0), ("\u201cJames Madison\u201d", 0, 1))),
    # repeated tokens count once per occurrence; closed answers get no partial credit
    ("james james monroe", "James Madison", dict(precision=1 / 3, recall=1 / 2, f1=0.4)),
    ("yes it is", "Yes", dict(f1=0)), ("Yes.", "yes", dict(f1=1)),
    # quirks that the docstring names, and the best gold answer counts
    ("well, hello", "l", {**bamboogle.metrics("x", "y"), "cover_em": 1}), ("108", "10.8", dict(em=1)),
    ("yesterday", "Yes", dict(cover_em=1)), ("b", ["a b c", "b"], dict(em=1))])
def test_metrics(prediction, answer, values):
    found = bamboogle.metrics(prediction, answer)
    assert {name: found[name] for name in values} == pytest.approx(values)


# ------------------------------------------------------------------------------ extraction

@pytest.mark.parametrize("text, answer", [
    ("<think>t</think><response> A </response><response>B</response>", "A"),
    ("<response> A", "A"), ("<think>t</think> A", "A"), ("a</think>b</think>c", "b"),
    ("A", "A"), ("<think>t</think>", "")])
def test_toolrl_extraction(text, answer):
    assert bamboogle.extract_toolrl(text) == answer


@pytest.mark.parametrize("text, answer, alone", [
    ("no tag", None, None), ("<answer> A </answer>", None, "A"),
    ("<answer>A</answer> x <answer>B</answer>", "B", "B"),
    ("<answer>A</answer><answer>B", None, "A"),
    ("<answer>A</answer><answer><answer>B</answer>", "<answer>B", "<answer>B")])
def test_searchr1_wants_two_answers_in_a_transcript(text, answer, alone):
    assert bamboogle.extract_searchr1(text) == answer
    assert bamboogle.extract_searchr1(text, minimum=1) == alone


# ------------------------------------------------------------------------------- dialogues

CALL = "<think>t</think><tool_call>\n{'name': 'Search', 'parameters': {'query': 'q'}}\n</tool_call>"
YES = "- Thought: same.\n- Judgment: Yes"


def test_search_then_answer():
    verdict = bamboogle.score_dialogue("A", [CALL, "<response>A</response>"], YES)
    assert verdict.ok and verdict.extra["searches"] == ["q"] and verdict.extra["rounds"] == 2
    assert verdict.extra["history_roles"] == ["user", "assistant", "obs", "user", "assistant"]


def test_four_turns_without_an_answer_score_zero_unjudged():
    verdict = bamboogle.score_dialogue("A", [CALL], YES)
    assert not verdict.ok and verdict.extra["searches"] == ["q"] * 4
    assert verdict.extra["predicted"] == bamboogle.NO_ANSWER


@pytest.mark.parametrize("line", ['{"parameters": {"query": "x", "n": true}}', "{bad",
                                  "{'parameters': {'q': 1}}", "{'parameters':\n{'query': 'x'}}",
                                  "[" * 5000, "-" * 30_000 + "1", "__import__('os')", ""])
def test_unreadable_calls_cost_a_turn_and_search_nothing(line):
    turns = [f"<tool_call>\n{line}\n</tool_call>", "<response>A</response>"]
    outcome = bamboogle.dialogue(turns)
    assert outcome["searches"] == [] and outcome["rounds"] == 2 and outcome["predicted"] == "A"


@pytest.mark.parametrize("judgment, ok, crash", [
    (YES, True, False), ("- Thought: a\n- Judgment: yes", False, False),
    ("- Thought: a\n- Judgment: No\n- Judgment: Yes", False, False), ("Yes", False, True),
    ("- Judgment: Yes", False, True)])
def test_judgments(judgment, ok, crash):
    verdict = bamboogle.score_dialogue("A", ["<response>A</response>"], judgment)
    assert verdict.ok is ok and (verdict.extra["crash"] is not None) is crash


# --------------------------------------------------------------------------------- bad data

@pytest.mark.parametrize("content, hint", [
    ("[", "not JSON"), ("{}", "array"), ('[{"Question": "a", "Answer": 1}]', "record 0")])
def test_bad_data_is_one_line_with_file_and_record(content, hint, tmp_path):
    (tmp_path / "bamboogle.json").write_text(content)
    user_error(f"bamboogle.json.*{hint}", bamboogle.load, tmp_path)


def test_there_is_no_training_part(tmp_path):
    assert not hasattr(bamboogle, "base_task")
    user_error("no train part", bamboogle.load, tmp_path, split="train")


def test_unknown_verdict_kinds_are_refused():
    row = {"kind": "other", "id": "a", "response": "", "official_verdict": {}}
    user_error("unknown kind", list, bamboogle.verify(None, [row]))


def test_aggregate_is_the_mean_exact_match():
    verdicts = [bamboogle.score(RECORD, text) for text in ("James Madison", "It was James Madison")]
    result = bamboogle.aggregate([RECORD] * 2, verdicts)
    assert result["score"] == 50 and result["metrics"]["cover_em"] == 100 and result["n"] == 2
    assert bamboogle.aggregate([], [])["n"] == 0
