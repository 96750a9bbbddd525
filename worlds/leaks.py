"""What a simulator may not get away with: tasks whose text or tools give the answer away.

What of the paper this is: nothing; a task that states its own calls would be solved by copying, and
R_env alone would reward it wherever its p_hat lands near alpha.

How it is run: `leaks(task)` by worlds/tool_calls.py on every task that the simulator writes. The
reason it returns is counted in the epoch's record.

Refused are: a text or a tool's notes that state the call; calls that follow from the schemas alone; a
question that contains its answer. In a question, numbers and yes or no are not looked for, as they
stand there for other reasons, nor is an option that it offers ("Jupiter or Saturn?"); but nothing may
follow the word "answer". What stays open: arguments that do not follow from the text, and questions
whose reference is wrong.
"""
import json
import re

from data_pool import Task
from worlds import task_texts
from worlds.schemas import canonical, find_object, load_object, normal_calls, normal_words, \
    structured, tools_of


def leaks(task: Task) -> str:
    """Why there is nothing left to answer: one of REASONS, or "" if there is."""
    if not structured(task):
        return "answer leaked" if any(
            contains_answer(task.text, r) for r in task.spec["reference"]) else ""
    calls, tools = task.spec["calls"], tools_of(task)
    answers = {canonical(part) for call in calls for part in (call, call["arguments"]) if part}
    # names and types are no notes, but they are no sentences either
    notes = list(task_texts(task.spec["tools"]))
    if any(states_call(text, calls, answers) for text in [task.text, *notes]) \
            or any(spells_arguments(text, call["arguments"]) for text in notes for call in calls) \
            or not answers.isdisjoint(map(canonical, _objects(task.spec["tools"]))):
        return "answer leaked"
    if all(given_by_schema(call, tools[call["name"]]) for call in calls):
        # where there is no argument at all, which tool to call may still be a question
        stated = any(json.loads(text)[1] for text in normal_calls(calls, tools, ordered=False))
        if stated or {call["name"] for call in calls} == set(tools):
            return "nothing to answer"
    return ""


def states_call(text: str, calls, answers) -> bool:
    """Whether a text has one of the calls in tags, as f(...), or as JSON, also with ' for "."""
    if "<tool_call>" in text or any(call["name"] + "(" in text for call in calls):
        return True
    for brace in re.finditer("{", text):  # an object may sit inside another
        span = find_object(text, brace.start())
        found = text[slice(*span)] if span else ""
        value = load_object(found) or ("'" in found and load_object(found.replace("'", '"')))
        if value and canonical(value) in answers:
            return True
    return False


def spells_arguments(text: str, arguments: dict) -> bool:
    """Whether a tool's note has every argument as `name = value` or `name: value`."""
    def spelt(name, value):
        value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        between = r"[\"'`]?\s*[:=]\s*[\"'`]?"
        pattern = re.escape(name) + between + re.escape(value) + r"(?!\w)"
        return re.search(pattern, text, re.IGNORECASE)
    return bool(arguments) and all(spelt(name, value) for name, value in arguments.items())


def given_by_schema(call: dict, tool: dict) -> bool:
    """Whether every argument of a call is what its own schema names: a default, the only value of
    an enum, the only example, or a title or description that is the value itself."""
    properties = tool["parameters"].get("properties", {})
    for name, value in call["arguments"].items():
        schema, named = properties[name], []
        for keyword in ("enum", "examples"):
            values = schema.get(keyword)
            named += values if isinstance(values, list) and len(values) == 1 else []
        named += [schema[k] for k in ("default", "title", "description") if k in schema]
        if _plain(value) not in map(_plain, named):
            return False
    return True


def _plain(value) -> str:
    """A value as a note would say it: 5 and "5" are one."""
    value = value if isinstance(value, str) else canonical(value)
    return " ".join(normal_words(value)) or value


def contains_answer(question: str, reference: str) -> bool:
    """Whether a question contains its reference, word by word in a row.

    Numbers, yes and no, and options that the question offers count only behind "answer".
    """
    # (word, whether a comma or semicolon follows)
    words = [(w, raw[-1] in ",;") for raw in question.split() for w in normal_words(raw)]
    plain, reference = [w for w, _ in words], normal_words(reference)
    n, offers = len(reference), "or" in plain
    data = all(re.fullmatch(r"\d+|yes|no|true|false", w) for w in reference)
    for i in range(len(words) - n + 1):
        if plain[i:i + n] != reference:
            continue
        before = plain[max(0, i - 2):i]
        told = before[-1:] == ["answer"] or before == ["answer", "is"]
        listed = "or" in before[-1:] + plain[i + n:i + n + 1] or words[i + n - 1][1] \
            or (i > 0 and words[i - 1][1])
        if not (offers and listed) and (told or not data):
            return True
    return False


def _objects(value):
    """Every JSON object inside a value, itself included."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, (dict, list)):
            yield from _objects(part)
