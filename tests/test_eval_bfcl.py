"""BFCL: every numbered rule by hand. Recorded verdicts and hostile text: test_eval_harness.py."""
import pytest

from eval import bfcl


def record(properties, answer, required=(), category="simple_python", name="f"):
    """A single-call record from {argument: type or document} and {argument: listed values}."""
    documents = {k: {"type": v} if isinstance(v, str) else v for k, v in properties.items()}
    return {"id": "x", "category": category, "ground_truth": [{name: answer}],
            "question": [[{"role": "user", "content": "?"}]],
            "function": [{"name": name, "parameters": {
                "type": "dict", "properties": documents, "required": list(required)}}]}


def passes(rec, text):
    return bfcl.score(rec, text).ok


def accepted(kind, listed, texts):
    """Those of the texts that pass as the value of one argument of a type."""
    rec = record({"a": kind}, {"a": listed})
    return [text for text in texts if passes(rec, f"[f(a={text})]")]


# ---- decoding


@pytest.mark.parametrize("text, calls", [
    ("```\n[f(a=1)]\n```", [("f", {"a": 1})]), ("f(a=1), g()", [("f", {"a": 1}), ("g", {})]),
    ("", []), ("[m.n.f(1, a=2)]", [("m.n.f", {"a": 2})]),         # positional arguments dropped
    ("[f(a=true, b=True, c=None)]", [("f", {"a": "true", "b": True, "c": None})]),
    ("[f(a=2+3*4, b=2**10, c=1.5/3, e=-3)]", [("f", {"a": 14, "b": 1024, "c": 0.5, "e": -3})]),
    ("[f(a=+5, b=~5)]", [("f", {"a": -5, "b": -5})]),             # any sign is a minus there
    ("[f(a=g(1), b=g(c=1), d=x[0], e=...)]",
     [("f", {"a": "g(1)", "b": {"g": {"c": 1}}, "d": "x[0]", "e": "..."})]),
    ("[f(a=(1, 'b'), c={'k': [1]})]", [("f", {"a": (1, "b"), "c": {"k": [1]}})]),
    ("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>", [("f", {"a": 1})])])
def test_decode(text, calls):
    assert bfcl.decode(text) == calls


@pytest.mark.parametrize("text", [
    "Sure: [f(a=1)]", "```python\n[f(a=1)]\n```", "[f(a=1", "['f']", "[[f(a=1)]]", "[f(a={1})]",
    "[f(a=f'{1}')]", "[f(a=lambda: 1)]", "[f(a=x.y)]", "[f(a=1 < 2)]", "[f(a=[i for i in x])]",
    "[f(a=[*b])]", "[f(a={[]: 1})]", "[f(a=x + 1)]", "[f(a=1/0)]", "[f(a=len('abc') + 1)]",
    "[f(a=10**101)]", "[f(a=(9**99)**99)]"])
def test_undecodable(text):
    with pytest.raises(bfcl.Undecodable):
        bfcl.decode(text)


def test_reasoning_before_the_answer_is_neither_a_call_nor_in_the_way_of_one():
    """Right calls after a thought earned nothing, and wrong ones passed as refusals."""
    rec, wrong = record({"a": "integer"}, {"a": [1]}, ["a"]), "[f(a=2)]"
    block = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    for thought in (
        "<think>easy</think>",
        "<think>\n\n</think>\n\n",
        "</think>\n",
        f"{wrong}</think>",
        f"<think>{block}</think>\n<think>or {wrong}?</think>\n",
    ):
        assert passes(rec, f"{thought}[f(a=1)]") and passes(rec, f"{thought}{block}")
        assert not passes(rec, f"{thought}{wrong}")
        refusing = {**rec, "category": "irrelevance"}
        assert not passes(refusing, f"{thought}[f(a=1)]") and passes(refusing, f"{thought}No.")


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


ARRAY, PAIR = ({"type": kind, "items": {"type": "integer"}} for kind in ("array", "tuple"))
TEXTS, DICTS = ({"type": "array", "items": {"type": kind}} for kind in ("string", "dict"))
TWO = [[{"k": [1]}, {"k": [2]}]]


@pytest.mark.parametrize(
    "kind, listed, right, wrong",
    [
        # rule 3: exact types, but integers pass as floats and tuples as tuples
        ("integer", [5], ["5"], ["5.0", "True", "'5'", "[5]", "None"]),
        ("integer", [1], [], ["True"]),
        ("float", [5.0], ["5", "5.0"], ["'5'", "True", "0x" + "f" * 400]),
        ("boolean", [True], ["True"], ["1", "true", "'True'"]),
        ("any", ["x"], ["'x'", "x"], ["1"]),
        ("dict", [{"k": [1]}], ["{'k': 1}"], ["'{}'", "[1]"]),
        (ARRAY, [[1, 2]], ["[1, 2]"], ["(1, 2)", "[1, 2, 3]"]),
        (PAIR, [[1, 2]], ["[1, 2]", "(1, 2)"], []),
        # rule 4: the type of every item
        (ARRAY, [[1, 2]], [], ["[1, '2']", "[1.0, 2.0]", "[True, 2]"]),
        (ARRAY, [["a"]], ["['a']"], []),
        # rule 5: a value of the answer's own type is compared as it is
        ("string", [5], ["5"], ["'5'"]),
        ("integer", ["A b"], ["'A b'"], ["'a b'"]),
        # rule 6: texts without case, blanks and some marks; lists in order; dictionaries by key
        (
            "string",
            ["New York, NY"],
            ["'new york ny'", "'New-York/NY.'"],
            ["'New York: NY'", "'York'"],
        ),
        ("string", ["it's"], ["'it\"s'"], ["''"]),
        ("string", ["x", ""], ["''", "' .'"], []),
        (TEXTS, [["A b", "c"]], ["['ab', 'C']"], ["['c', 'ab']"]),
        (
            "dict",
            [{"k": ["A b"], "n": [1, ""]}],
            ["{'k': 'ab'}", "{'n': 1, 'k': 'ab'}"],
            ["{'n': 1}", "{}", "{'k': 'ab', 'z': 1}", "{'k': 'ab', 'n': 2}"],
        ),
        (DICTS, TWO, ["[{'k': 1}, {'k': 2}]"], ["[{'k': 2}, {'k': 1}]", "[{'k': 1}]"]),
        ("float", [0.1], ["0.1", "0.05 + 0.05"], ["0.10000001"]),
    ],
)
def test_rules_3_to_6_types_and_values(kind, listed, right, wrong):
    assert accepted(kind, listed, right + wrong) == right


def test_rule_7_relevance():
    rec = record({}, {}, category="irrelevance")
    for text, called in (("No function fits.", False), ("[]", False), ("", False), ("[f()]", True),
                         ("['f']", False), ("[f(", False), ("call f(a=1)", False), ("g()", True)):
        assert passes(rec, text) != called, text
        assert passes({**rec, "category": "live_relevance"}, text) == called, text


# ---- long-context turns by hand


def turn():
    """A hand-made long-context turn in the file system."""
    docs = [{"name": n, "parameters": {"properties": {k: {"type": "string"} for k in a},
                                       "required": a}}
            for n, a in (("cd", ["folder"]), ("touch", ["file_name"]), ("cat", ["file_name"]),
                         ("rm", ["file_name"]), ("pwd", []), ("mv", ["source", "destination"]))]
    docs[2]["parameters"]["properties"]["lines"] = {"type": "integer", "default": 10}
    return {"id": "c:1", "category": bfcl.LONG_CONTEXT, "involved_classes": ["Files"],
            "function": docs, "owner": {d["name"]: "Files" for d in docs}, "logins": set(),
            "logged_in": set(), "made": [("touch", {"file_name": "old"})],
            "earlier_results": ["seen"], "known": '["a.txt", "docs", "old"]',
            "gt_calls_kw": ["cd(folder='docs')", "cat(file_name='a.txt')", "touch(file_name='b')"],
            "gt_results": ["in docs", "text", "None"]}


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
