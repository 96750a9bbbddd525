"""Bamboogle: string metrics, extraction and the dialogue loop against recorded official verdicts.

Run: python -m pytest tests/test_eval_bamboogle.py -q
"""
import json
import time
from pathlib import Path

import pytest

from data_pool import UserError
from eval import bamboogle

SHARED = Path(__file__).resolve().parents[1] / ".." / "shared" / "benchmarks"
shared = pytest.mark.skipif(not (SHARED / "golden/bamboogle.jsonl").is_file(),
                            reason="no ../shared/benchmarks")
RECORD = {"id": "bamboogle-000", "question": "Who?", "answer": "James Madison"}

ADVERSARIAL = ["", "garbage", "[" * 10_000, "{" * 10_000 + "}" * 10_000, "x" * 10**6, "\x00" * 50,
               "\ud800 lone \udfff", "__import__('os').system('false')", "<answer>" * 125_000,
               "<response>" * 100_000, "<think>" * 100_000, "</think>" * 100_000, " " * 10**6,
               "<tool_call>" * 90_000, "-" * 20_000 + "1", "(" * 10**6]


# --------------------------------------------------------------------------------- metrics

@pytest.mark.parametrize("prediction, em, cover_em", [
    ("james madison", 1, 1), ("The James  Madison.", 1, 1), ("It was James Madison", 0, 1),
    ("Madison", 0, 0), ("James\u00a0Madison", 1, 1), ("James-Madison", 0, 0), ("", 0, 0),
    (None, 0, 0)])
def test_exact_and_cover_match(prediction, em, cover_em):
    values = bamboogle.metrics(prediction, "James Madison")
    assert (values["em"], values["cover_em"]) == (em, cover_em)


def test_token_overlap_counts_repeated_tokens_once_per_occurrence():
    values = bamboogle.metrics("james james monroe", "James Madison")
    assert values["precision"] == pytest.approx(1 / 3)
    assert values["recall"] == pytest.approx(1 / 2)
    assert values["f1"] == pytest.approx(0.4)


def test_closed_answers_get_no_partial_credit():
    assert bamboogle.metrics("yes it is", "Yes")["f1"] == 0
    assert bamboogle.metrics("Yes.", "yes")["f1"] == 1


def test_quirks_of_the_string_rules_that_the_docstring_names():
    assert bamboogle.metrics("well, hello", "l") == {**bamboogle.metrics("x", "y"), "cover_em": 1}
    assert bamboogle.metrics("108", "10.8")["em"] == 1
    assert bamboogle.metrics("yesterday", "Yes")["cover_em"] == 1
    assert bamboogle.metrics("\u201cJames Madison\u201d", "James Madison")["em"] == 0


def test_best_gold_answer_counts():
    assert bamboogle.metrics("b", ["a b c", "b"])["em"] == 1


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

def scripted(turns, judgment="- Thought: same.\n- Judgment: Yes"):
    """A dialogue with fixed model turns, a search that repeats the query, and a fixed judge."""
    left = iter(turns)
    return bamboogle.score_dialogue(RECORD, lambda messages: next(left, turns[-1]),
                                    lambda query: f"about {query}", lambda *about: judgment)


CALL = "<think>t</think><tool_call>\n{'name': 'Search', 'parameters': {'query': 'q'}}\n</tool_call>"


def test_search_then_answer():
    verdict = scripted([CALL, "<response>James Madison</response>"])
    assert verdict.ok and verdict.extra["searches"] == ["q"] and verdict.extra["rounds"] == 2
    assert [turn["role"] for turn in verdict.extra["history"]] == [
        "user", "assistant", "obs", "user", "assistant"]


def test_four_turns_without_an_answer_score_zero_unjudged():
    verdict = scripted([CALL])
    assert not verdict.ok and verdict.extra["searches"] == ["q"] * 4
    assert verdict.extra["predicted"] == bamboogle.NO_ANSWER


@pytest.mark.parametrize("line", ['{"parameters": {"query": "x", "n": true}}', "{bad",
                                  "{'parameters': {'q': 1}}", "{'parameters':\n{'query': 'x'}}",
                                  "[" * 5000, "__import__('os')", ""])
def test_unreadable_calls_cost_a_turn_and_search_nothing(line):
    verdict = scripted([f"<tool_call>\n{line}\n</tool_call>", "<response>A</response>"])
    assert verdict.extra["searches"] == [] and verdict.extra["rounds"] == 2


@pytest.mark.parametrize("judgment, ok, crash", [
    ("- Thought: a\n- Judgment: Yes", True, False), ("- Thought: a\n- Judgment: yes", False, False),
    ("- Thought: a\n- Judgment: No\n- Judgment: Yes", False, False), ("Yes", False, True),
    ("- Judgment: Yes", False, True)])
def test_judgments(judgment, ok, crash):
    verdict = scripted(["<response>James Madison</response>"], judgment)
    assert verdict.ok is ok and (verdict.extra["crash"] is not None) is crash


# -------------------------------------------------------------------- hostile text, bad data

@pytest.mark.parametrize("text", ADVERSARIAL, ids=lambda text: repr(text[:12]))
def test_hostile_text_is_scored_quickly_and_never_passes(text):
    start = time.perf_counter()
    for extraction in ("toolrl", "searchr1"):
        verdict = bamboogle.score(RECORD, text, extraction)
        assert not verdict.ok and "\n" not in verdict.reason
        verdict.reason.encode("utf-8")
    scripted([f"<tool_call>{text}", text], text)
    assert time.perf_counter() - start < 1.0


def test_bad_data_is_one_line_with_file_and_record(tmp_path):
    with pytest.raises(UserError, match="bamboogle.json"):
        bamboogle.load(tmp_path)
    file = tmp_path / "bamboogle.json"
    for content, hint in (("[", "not a JSON file"), ("{}", "list"), ("[]", "non-empty"),
                          ('[{"Question": "a", "Answer": 1}]', "record 0")):
        file.write_text(content)
        with pytest.raises(UserError, match=hint) as caught:
            bamboogle.load(tmp_path)
        assert "\n" not in str(caught.value) and "bamboogle.json" in str(caught.value)


def test_there_is_no_training_part(tmp_path):
    assert not hasattr(bamboogle, "base_task")
    with pytest.raises(UserError, match="no train part"):
        bamboogle.load(tmp_path, split="train")


def test_unknown_verdict_kinds_are_refused():
    with pytest.raises(UserError, match="unknown kind"):
        list(bamboogle.verify(None, [{"kind": "other", "id": "a"}]))


def test_aggregate_is_the_mean_exact_match():
    verdicts = [bamboogle.score(RECORD, text) for text in ("James Madison", "It was James Madison")]
    result = bamboogle.aggregate([RECORD] * 2, verdicts)
    assert result["score"] == 50 and result["metrics"]["cover_em"] == 100 and result["n"] == 2
    assert bamboogle.aggregate([], [])["n"] == 0


# ------------------------------------------------------------------------- official verdicts

@shared
def test_all_recorded_verdicts_are_reproduced():
    lines = (SHARED / "golden/bamboogle.jsonl").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    results = list(bamboogle.verify(SHARED, rows))
    assert len(results) == len(rows) > 700
    assert [detail for _, agrees, detail in results if not agrees] == []
    assert {kind for kind, _, _ in results} == set(bamboogle.REQUIRED)


@shared
def test_gold_responses_score_100_percent():
    records = bamboogle.load(SHARED)
    verdicts = [bamboogle.score(record, bamboogle.gold(record)) for record in records]
    assert len(records) == 125
    assert bamboogle.aggregate(records, verdicts)["score"] == 100
    assert all(record["question"] in bamboogle.prompt(record)[1]["content"] for record in records)
