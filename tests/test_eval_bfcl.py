"""BFCL: cases by hand for every numbered rule of eval/bfcl.py.

Usage: python -m pytest -q tests/test_eval_bfcl.py

Recorded verdicts and hostile texts are in test_eval_harness.py.
"""
import pytest

from eval import bfcl
from test_eval_harness import TURNS, tiny_bfcl


def record(properties, answer, required=(), category="simple_python", name="f"):
    """Make a single-call record from {argument: type or document} and {argument: listed values}."""
    documents = {k: {"type": v} if isinstance(v, str) else v for k, v in properties.items()}
    return {"id": "x", "category": category, "ground_truth": [{name: answer}],
            "question": [[{"role": "user", "content": "?"}]],
            "function": [{"name": name, "parameters": {
                "type": "dict", "properties": documents, "required": list(required)}}]}


def passes(rec, text):
    return bfcl.score(rec, text).ok


def accepted(kind, listed, texts):
    """Return those of the texts that pass as the value of an argument of this type."""
    rec = record({"a": kind}, {"a": listed})
    return [text for text in texts if passes(rec, f"[f(a={text})]")]


# ---- decoding


@pytest.mark.parametrize("text, calls", [
    ("```\nf(a=1), g()\n```", [("f", {"a": 1}), ("g", {})]),
    ("[m.n.f(1, a=2)]", [("m.n.f", {"a": 2})]),  # positional arguments dropped
    ("[f(a=true, b=2+3*4, c=+5)]", [("f", {"a": "true", "b": 14, "c": -5})]),  # +5 is read as -5
    ("[f(a=g(1), b=g(c=1), d=x[0], e=...)]",
     [("f", {"a": "g(1)", "b": {"g": {"c": 1}}, "d": "x[0]", "e": "..."})])])
def test_decode(text, calls):
    """Otherwise values would differ from the official decoder's."""
    assert bfcl.decode(text) == calls


@pytest.mark.parametrize("text", [
    "Sure: [f(a=1)]", "['f']", "[f(a={1})]", "[f(a=f'{1}')]", "[f(a=lambda: 1)]", "[f(a=x.y)]",
    "[f(a=[i for i in x])]", "[f(a=[*b])]", "[f(a={[]: 1})]", "[f(a=1/0)]",
    "[f(a=len('abc') + 1)]", "[f(a=10**101)]"])
def test_undecodable(text):
    """Otherwise model text would be executed, or would end the evaluation."""
    with pytest.raises(bfcl.Undecodable):
        bfcl.decode(text)


def test_reasoning_before_the_answer_is_neither_a_call_nor_in_the_way_of_one():
    """Otherwise right calls after a thought would earn nothing, or calls within it would count."""
    block = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    for thought in ("<think>\n\n</think>\n\n", "[f(a=2)]</think>",
                    f"<think>{block}</think>\n<think>or [f(a=2)]?</think>\n"):
        for answer in ("[f(a=1)]", block):
            assert bfcl.decode(thought + answer) == [("f", {"a": 1})]
        with pytest.raises(bfcl.Undecodable):
            bfcl.decode(thought + "No.")


# ---- rules 1-7


def test_rule_1_number_and_choice_of_calls():
    """Otherwise a call would count twice, or another function's call would pass."""
    rec = record({"a": "integer"}, {})
    rec["ground_truth"] = [{"f": {"a": [1, 2]}}, {"f": {"a": [1]}}]
    assert passes(rec, "[f(a=2), f(a=1)]")
    # the first unused call is taken, so the order can decide where answers overlap
    assert not passes(rec, "[f(a=1), f(a=2)]")
    assert not passes(rec, "[f(a=1), f(a=1), f(a=2)]")


def test_rule_2_names_and_presence():
    """Otherwise calls with invented or missing arguments would pass."""
    rec = record({"a": "integer", "b": "string", "c": "integer"},
                 {"a": [1], "b": ["x", ""], "d": [2, ""]}, ["a"], name="m.f")
    assert passes(rec, "[m.f(b='x', a=1)]")
    for text in ("[M.f(a=1)]", "[m.f(b='x')]", "[m.f(a=1, c=2)]", "[m.f(a=1, d=2)]"):
        assert not passes(rec, text), text
    # an argument whose listed values lack "" must be given, required or not
    assert not passes(record({"a": "integer"}, {"a": [1]}), "[f()]")


ARRAY, TEXTS, DICTS = ({"type": "array", "items": {"type": kind}}
                       for kind in ("integer", "string", "dict"))
TWO = [[{"k": [1]}, {"k": [2]}]]


@pytest.mark.parametrize("kind, listed, right, wrong", [
    # rule 3: exact types, but integers pass as floats
    ("integer", [1], ["1"], ["1.0", "True", "'1'", "None"]),
    ("float", [5.0], ["5", "5.0"], ["'5'", "True", "0x" + "f" * 400]),
    # rule 4: the type of every item
    (ARRAY, [[1, 2]], ["[1, 2]"], ["(1, 2)", "[1, '2']", "[True, 2]"]),
    # rule 5: a value of the answer's own type is compared as it is
    ("string", [5, "Ab"], ["5", "'Ab'"], ["'ab'"]),
    # rule 6: texts ignore case, blanks and some marks; lists go by order, dictionaries by key
    ("string", ["New York, NY"], ["'New-York/NY.'"], ["'New York: NY'", "'York'"]),
    (TEXTS, [["A b", "c"]], ["['ab', 'C']"], ["['c', 'ab']"]),
    ("dict", [{"k": ["A b"], "n": [1, ""]}], ["{'k': 'ab'}"], ["{'n': 1}", "{'k': 'ab', 'z': 1}"]),
    (DICTS, TWO, ["[{'k': 1}, {'k': 2}]"], ["[{'k': 2}, {'k': 1}]", "[{'k': 1}]"])])
def test_rules_3_to_6_types_and_values(kind, listed, right, wrong):
    """Otherwise values that the official checker tells apart would be equal, or the reverse."""
    assert accepted(kind, listed, right + wrong) == right


def test_rule_7_relevance():
    """Otherwise a refusal would count as a call, or a call as a refusal."""
    rec = record({}, {}, category="irrelevance")
    for text, called in (("No function fits.", False), ("[]", False), ("g()", True)):
        assert passes(rec, text) != called
        assert passes({**rec, "category": "live_relevance"}, text) == called


# ---- long-context turns by hand


CD, CAT, TOUCH = TURNS[1]


@pytest.fixture
def turn(tmp_path):
    """Return the second turn of the conversation in test_eval_harness.py."""
    tiny_bfcl(tmp_path)
    return bfcl.load(tmp_path)[1]


@pytest.mark.parametrize("calls, ok", [
    # a default spelled out; extra reads; calls that are bound to fail; a move after the last call
    ((CD, "pwd()", "cat(file_name='a.txt', lines=10)", TOUCH), True),
    ((CD, "nothing(x=1)", "rm(file_name='unheard')", "rm()", CAT, TOUCH, "cd(folder='..')"), True),
    # a change of this or an earlier turn, repeated without effect
    (("touch(file_name='old')", CD, CAT, TOUCH, TOUCH), True),
    # a missing call, the wrong place, a wrong value, an unexpected change, too many calls
    ((CD, TOUCH), False), ((CAT, CD, TOUCH), False),
    ((CD, CAT, "touch(file_name='c')"), False), ((CD, CAT, "rm(file_name='a.txt')", TOUCH), False),
    ((CD, CAT, TOUCH, *["pwd()"] * 200), False)])
def test_turn_rule(calls, ok, turn):
    """Otherwise the score of a turn would differ from the simulator's verdict."""
    assert bfcl.score(turn, "[" + ", ".join(calls) + "]").ok == ok


def test_the_steps_of_a_turn_count_together(turn):
    """Otherwise an answer in several steps would be scored by only one of them."""
    assert bfcl.score(turn, [f"[{CD}]", "Reading.", f"[{CAT}, {TOUCH}]"]).ok


def test_safe_call_lets_plain_data_through_only():
    """Otherwise model text would run, because the executor evaluates what it is given."""
    names = {"cat"}
    assert bfcl.safe_call(("cat", {"a": [1, {"b": "x('y')"}], "c": None}), names) \
        == "cat(a=[1, {'b': \"x('y')\"}], c=None)"
    for call in (("exit", {}), ("cat", {"a b": 1}), ("cat", {None: 1}), ("cat", {"a": 1j}),
                 ("cat", {"a": float("inf")}), ("cat", {"a": 16 ** 5000})):
        assert bfcl.safe_call(call, names) == "no_such_function()"
