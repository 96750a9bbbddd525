"""BFCL: every numbered rule by hand, hostile text, recorded verdicts, gold responses, train / test.

Run: python -m pytest tests/test_eval_bfcl.py -q. What needs the data skips without ../shared.
"""
import json
import sys

import pytest

from helpers import user_error
from eval import bfcl
from test_eval_harness import SHARED, lines, needs_data, never_passes, writable_copy


def record(properties, answer, required=(), category="simple_python", name="f"):
    """A single-call record from {argument: type or document} and {argument: listed values}."""
    documents = {k: {"type": v} if isinstance(v, str) else v for k, v in properties.items()}
    return {"id": "x", "category": category, "ground_truth": [{name: answer}],
            "question": [[{"role": "user", "content": "?"}]],
            "function": [{"name": name, "parameters": {
                "type": "dict", "properties": documents, "required": list(required)}}]}


def passes(rec, text, fmt="prompt"):
    return bfcl.score(rec, text, fmt).ok


def values(kind, listed, texts):
    """{text of the value: verdict} for one argument of a type."""
    rec = record({"a": kind}, {"a": listed})
    return {text: passes(rec, f"[f(a={text})]") for text in texts}


# ---- decoding


@pytest.mark.parametrize("text, calls", [
    ("[f(a=1)]", [("f", {"a": 1})]),
    ("f(a=1), g()", [("f", {"a": 1}), ("g", {})]),
    ("```\n[f(a=1)]\n```", [("f", {"a": 1})]),
    ("", []), ("[]", []), ("`\n `", []),
    ("[m.n.f(1, a=2)]", [("m.n.f", {"a": 2})]),                   # positional arguments dropped
    ("[f(a=x)]", [("f", {"a": "x"})]),                            # a bare name is a string
    ("[f(a=true, b=True, c=None)]", [("f", {"a": "true", "b": True, "c": None})]),
    ("[f(a=2+3*4, b=2**10, c='a'*3, d=[1]*2, e=-3, g=1_000)]",
     [("f", {"a": 14, "b": 1024, "c": "aaa", "d": [1, 1], "e": -3, "g": 1000})]),
    ("[f(a=+5, b=~5)]", [("f", {"a": -5, "b": -5})]),             # any sign is a minus there
    ("[f(a=g(1), b=g(c=1), d=x[0], e=...)]",
     [("f", {"a": "g(1)", "b": {"g": {"c": 1}}, "d": "x[0]", "e": "..."})]),
    ("[f(a=(1, 'b'), c={'k': [1]})]", [("f", {"a": (1, "b"), "c": {"k": [1]}})]),
    ("[f(**{'a': 1})]", [("f", {None: {"a": 1}})]),
    ("[f(a=1, a=2)]", [("f", {"a": 2})]),
    ("(f(a=1))", [("f", {"a": 1})]), ("[f(b := 1)]", [("f", {})]),
    ("[f(a='it\\'s \\d')]", [("f", {"a": "it's \\d"})]),
])
def test_decode_prompt(text, calls):
    assert bfcl.decode(text, "prompt") == calls


@pytest.mark.parametrize("text", [
    "Sure: [f(a=1)]", "[f(a=1)] done", "```python\n[f(a=1)]\n```", '{"name": "f"}', "[f(a=1",
    "['f']", "[1]", "[[f(a=1)]]", "[f(a=1)][0]", "\t[f(a=1)]", "[f(a=1)] + [g()]",
    "[f(a={1})]", "[f(a=f'{1}')]", "[f(a=lambda: 1)]", "[f(a=x.y)]", "[f(a=1 < 2)]",
    "[f(a=1 if x else 2)]", "[f(a=[i for i in x])]", "[f(a=[*b])]", "[f(a={**b})]", "[f(*a)]x",
    "[f(a={[]: 1})]", "[f(a=-'x')]", "[f(a=- -5)]", "[f(a=x + 1)]", "[f(a=1/0)]", "[f(a=(b := 1))]",
    "[f(a=len('abc') + 1)]"])
def test_undecodable(text):
    with pytest.raises(bfcl.Undecodable):
        bfcl.decode(text, "prompt")


# ---- rules 1-7


def test_rule_1_number_and_choice_of_calls():
    rec = record({"a": "integer"}, {"a": [1]}, ["a"])
    assert passes(rec, "[f(a=1)]")
    assert not passes(rec, "[]") and not passes(rec, "[f(a=1), f(a=1)]")
    rec["category"], rec["ground_truth"] = "parallel", [{"f": {"a": [1, 2]}}, {"f": {"a": [1]}}]
    assert passes(rec, "[f(a=2), f(a=1)]")
    # the first unused call is taken, so the order can decide where answers overlap
    assert not passes(rec, "[f(a=1), f(a=2)]")
    assert not passes(rec, "[f(a=1), f(a=1), f(a=2)]")
    rec["category"], rec["ground_truth"] = "multiple", [{"m.g": {"a": [1]}}]
    rec["function"].append({"name": "m.g", "parameters": {
        "type": "dict", "properties": {"a": {"type": "integer"}}, "required": ["a"]}})
    assert passes(rec, "[m.g(a=1)]") and not passes(rec, "[f(a=1)]")


def test_rule_2_names_and_presence():
    rec = record({"a": "integer", "b": "string", "c": "integer"}, {"a": [1], "b": ["x", ""]},
                 ["a"], name="m.f")
    assert passes(rec, "[m.f(a=1)]") and passes(rec, "[m.f(b='x', a=1)]")
    for text in ("[f(a=1)]", "[m_f(a=1)]", "[M.f(a=1)]", "[m.f(b='x')]", "[m.f(a=1, c=2)]",
                 "[m.f(a=1, d=2)]", "[m.f(1)]"):
        assert not passes(rec, text), text
    # an answer argument that does not list "" must be given, required or not
    assert not passes(record({"a": "integer"}, {"a": [1]}), "[f()]")


def test_rule_3_exact_types():
    assert values("integer", [5], ["5", "5.0", "True", "'5'", "[5]", "None"]) == {
        "5": True, "5.0": False, "True": False, "'5'": False, "[5]": False, "None": False}
    assert values("integer", [1], ["True"]) == {"True": False}
    assert values("float", [5.0], ["5", "5.0", "'5'", "True"]) == {
        "5": True, "5.0": True, "'5'": False, "True": False}
    assert not any(values("float", [5.0], ["0x" + "f" * 400]).values())     # too large for a float
    assert values("boolean", [True], ["True", "1", "true", "'True'"]) == {
        "True": True, "1": False, "true": False, "'True'": False}
    assert values("any", ["x"], ["'x'", "x", "1"]) == {"'x'": True, "x": True, "1": False}
    assert values("dict", [{"k": [1]}], ["{'k': 1}", "'{}'", "[1]"]) == {
        "{'k': 1}": True, "'{}'": False, "[1]": False}
    array, pair = ({"type": t, "items": {"type": "integer"}} for t in ("array", "tuple"))
    assert values(array, [[1, 2]], ["[1, 2]", "(1, 2)"]) == {"[1, 2]": True, "(1, 2)": False}
    assert values(pair, [[1, 2]], ["[1, 2]", "(1, 2)"]) == {"[1, 2]": True, "(1, 2)": True}


def test_rule_6_comparison():
    assert values("string", ["New York, NY"], [
        "'new york ny'", "'New-York/NY.'", "'New York\\n, NY'", "'New York: NY'", "'York'"]) == {
        "'new york ny'": True, "'New-York/NY.'": True, "'New York\\n, NY'": False,
        "'New York: NY'": False, "'York'": False}
    assert values("string", ["x"], ["'X*^_'"]) == {"'X*^_'": True}
    assert values("string", ["it's"], ["'it\"s'", "''"]) == {"'it\"s'": True, "''": False}
    assert values("string", ["x", ""], ["''", "' .'"]) == {"''": True, "' .'": True}
    array = {"type": "array", "items": {"type": "string"}}
    assert values(array, [["A b", "c"]], ["['ab', 'C']", "['c', 'ab']"]) == {
        "['ab', 'C']": True, "['c', 'ab']": False}
    answer = [{"k": ["A b"], "n": [1, ""]}]
    assert values("dict", answer, ["{'k': 'ab'}", "{'n': 1, 'k': 'ab'}", "{'n': 1}", "{}",
                                   "{'k': 'ab', 'z': 1}", "{'k': 'ab', 'n': 2}"]) == {
        "{'k': 'ab'}": True, "{'n': 1, 'k': 'ab'}": True, "{'n': 1}": False, "{}": False,
        "{'k': 'ab', 'z': 1}": False, "{'k': 'ab', 'n': 2}": False}
    dicts = {"type": "array", "items": {"type": "dict"}}
    assert values(dicts, [[{"k": [1]}, {"k": [2]}]], [
        "[{'k': 1}, {'k': 2}]", "[{'k': 2}, {'k': 1}]", "[{'k': 1}]"]) == {
        "[{'k': 1}, {'k': 2}]": True, "[{'k': 2}, {'k': 1}]": False, "[{'k': 1}]": False}
    assert values("float", [0.1], ["0.1", "0.10000001", "0.05 + 0.05"]) == {
        "0.1": True, "0.10000001": False, "0.05 + 0.05": True}


def test_rule_7_relevance():
    rec = record({}, {}, category="irrelevance")
    for text, called in (("No function fits.", False), ("[]", False), ("", False), ("[f()]", True),
                         ("['f']", False), ("[f(", False), ("call f(a=1)", False), ("g()", True)):
        assert passes(rec, text) != called, text
        assert passes({**rec, "category": "live_relevance"}, text) == called, text


# ---- hostile text


def block(call):
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


HOSTILE = ["[f(a=0x" + "f" * 40_000 + ")]", "[f(a=" + "'a'+" * 10_000 + "'a')]",
           "[f" + ".a" * 20_000 + "()]", "[f(a=" + "lambda:" * 7000 + "1)]",
           "[f(a=" + "(" * 90 + "1" + ")" * 90 + "+x)]",
           "<tool_call>\n" + '{"name": "f", "arguments": ' * 900 + "1\n</tool_call>",
           block({"name": "f", "arguments": {}}).replace("{}", '{"a": ' + "9" * 5000 + "}"),
           None, 5, ["[f(", None]]


def turn(**changes):
    """A hand-made long-context turn in the file system."""
    docs = [{"name": n, "parameters": {"properties": {k: {"type": "string"} for k in a},
                                       "required": a}}
            for n, a in (("cd", ["folder"]), ("touch", ["file_name"]), ("cat", ["file_name"]),
                         ("rm", ["file_name"]), ("pwd", []), ("mv", ["source", "destination"]))]
    docs[2]["parameters"]["properties"]["lines"] = {"type": "integer", "default": 10}
    row = {"id": "c:1", "turn": 1, "category": bfcl.LONG_CONTEXT, "involved_classes": ["Files"],
           "function": docs, "owner": {d["name"]: "Files" for d in docs}, "logins": set(),
           "logged_in": set(), "made": [("touch", {"file_name": "old"})],
           "earlier_results": ["seen"], "known": '["a.txt", "docs", "old"]',
           "gt_calls_kw": ["cd(folder='docs')", "cat(file_name='a.txt')", "touch(file_name='b')"],
           "gt_results": ["in docs", "text", "None"]}
    return row | changes


@pytest.mark.parametrize("rec", [
    *(record({"a": kind}, {"a": [1]}, ["a"]) for kind in ("string", "float")),
    record({"a": {"type": "array", "items": {"type": "dict"}}}, {"a": [[{"k": [1]}]]}), turn()],
    ids=range(4))
def test_hostile_text_is_fast_and_false(rec, tmp_path):
    never_passes(lambda text: bfcl.score(rec, text), tmp_path, HOSTILE)


# ---- long-context turns by hand


@pytest.mark.parametrize("text, ok", [
    ("[cd(folder='docs'), cat(file_name='a.txt'), touch(file_name='b')]", True),
    # a default spelled out; reading more; a call that must fail; moving after the last call
    ("[cd(folder='docs'), pwd(), cat(file_name='a.txt', lines=10), touch(file_name='b')]", True),
    ("[cd(folder='docs'), nothing(x=1), cat(file_name='a.txt'), touch(file_name='b')]", True),
    ("[rm(file_name='unheard'), cd(folder='docs'), cat(file_name='a.txt'), touch(file_name='b')]",
     True),
    ("[cd(folder='docs'), cat(file_name='a.txt'), touch(file_name='b'), cd(folder='..')]", True),
    # a change repeated, now or from an earlier turn, where that has no effect
    ("[cd(folder='docs'), cat(file_name='a.txt'), touch(file_name='b'), touch(file_name='b')]",
     True),
    ("[touch(file_name='old'), cd(folder='docs'), cat(file_name='a.txt'), touch(file_name='b')]",
     True),
    (["[cd(folder='docs')]", "Reading.", "[cat(file_name='a.txt'), touch(file_name='b')]"], True),
    # missing, in the wrong place, wrong value, unexpected change
    ("[cd(folder='docs'), touch(file_name='b')]", False),
    ("[cat(file_name='a.txt'), cd(folder='docs'), touch(file_name='b')]", False),
    ("[cd(folder='docs'), cat(file_name='a.txt')]", False),
    ("[cd(folder='docs'), cat(file_name='a.txt'), touch(file_name='c')]", False),
    ("[cd(folder='docs'), cat(file_name='a.txt'), rm(file_name='a.txt'), touch(file_name='b')]",
     False),
    ("[cd(folder='docs'), cat(file_name='a.txt'), touch('b')]", False),
    ("All done.", False), ("[]", False), ("[" + "pwd()," * 201 + "]", False)])
def test_turn_rule(text, ok):
    assert bfcl.score(turn(), text).ok == ok, bfcl.score(turn(), text).reason


def test_safe_call_lets_plain_data_through_only():
    names = {"cat"}
    assert bfcl.safe_call(("cat", {"a": [1, {"b": "x('y')"}], "c": None}), names) \
        == "cat(a=[1, {'b': \"x('y')\"}], c=None)"
    for call in (("exit", {}), ("cat", {"a b": 1}), ("cat", {None: 1}), ("cat", {"a": 1j}),
                 ("cat", {"a": float("inf")}), ("cat", {"a": b"x"}), ("cat", {"a": 16 ** 5000})):
        assert bfcl.safe_call(call, names) == "no_such_function()"


def test_simulator_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)           # as if not installed
    user_error("bfcl-eval", bfcl.score_official, turn(), "[pwd()]")


# ---- data


@needs_data
def test_train_and_test_are_disjoint():
    test, train = bfcl.load(SHARED), bfcl.load(SHARED, split="train")
    assert len(train) == 2299
    assert not {json.dumps(r["function"]) for r in test} & {json.dumps(r["function"])
                                                            for r in train}
    assert all(bfcl.base_task(r) is None for r in test)
    user_error(None, bfcl.load, SHARED, split="train", categories=[bfcl.LONG_CONTEXT])


@needs_data
def test_bad_data_is_named(tmp_path):
    folder = writable_copy("bfcl", tmp_path)
    path = folder / "BFCL_v4_parallel.json"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for bad, message in (({"id": 1}, "record 2"), (rows[1] | {"function": [{}]}, "parallel_1"),
                         (rows[1] | {"id": "new"}, "no answer for new")):
        path.write_text(lines(rows[0], bad, *rows[2:]))
        user_error(message, bfcl.load, tmp_path, categories=["parallel"])
    path = folder / "derived" / "long_context_turns.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for change in ({"gt_calls_kw": ["nothing()", "cd()"]}, {"gt_results": []}, {"turn": 7},
                   {"id": "unknown", "turn": 0}, {"gt_calls_kw": ["x y"]}):
        path.write_text(lines(rows[0], rows[1] | change, *rows[2:]))
        user_error("record 2", bfcl.load, tmp_path)
    path.unlink()
    user_error("python -m eval.bfcl", bfcl.load, tmp_path)
