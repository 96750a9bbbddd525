"""What a simulator may not get away with: tasks whose text or tools give the answer away.

What of the paper this is: nothing; a task that states its own calls would be solved by copying, and
R_env alone would reward it wherever its p_hat lands near alpha.

How it is run: by worlds/tool_calls.py on every task that the simulator writes. The reason is
counted in the epoch's record. `leaks(task)` reads the tasks of a teacher's file as well, so it
refuses only what no fair task has; `loopholes(task)` is for the simulator's alone.

`leaks` refuses: a text or the tools' notes that state the call, also backwards or in base64; calls
that follow from the schemas alone; a question that contains its answer. In a question, numbers and
yes or no are not looked for, as they stand there for other reasons, nor is an option that it offers
("Jupiter or Saturn?"); but nothing may follow the word "answer".

`loopholes` refuses a request that writes `name = value` for every argument, and what can be met by
guessing: p_hat = 1/2 lies at alpha, and nothing is learned. That is one of two tools that differ in
nothing but the name; an order of the calls, or a number of equal calls, that nobody asked for; a
question that offers its answer, asks for yes or no, or takes several answers.

What stays open: a choice by lot that the text itself describes ("toss a coin: heads is the hall"),
two tools that differ in a word that says nothing, riddles, and questions whose reference is wrong.
Arguments that do not follow from the text are the matter of worlds/grounding.py.
"""
import base64
import json
import re

from data_pool import Task
from worlds import grounding, task_texts
from worlds.schemas import answering, canonical, find_object, load_object, normal_calls, \
    normal_words, structured, tools_of

# values of an enum that nobody would take
DUMMIES = {"", "-", "dummy", "na", "none", "null", "other", "placeholder", "unknown", "unused"}
# words that ask for an order, and for a call more than once
ORDER = set("then before after afterwards first second third next finally last lastly later once "
            "when until followed instead order start begin end".split())
AGAIN = {"again", "repeat", "repeatedly", "each", "every", "times"}
CHOICES = {"yes", "no", "true", "false"}


def leaks(task: Task) -> str:
    """Why there is nothing left to answer: one of REASONS, or "" if there is."""
    if not structured(task):
        return "answer leaked" if any(
            contains_answer(task.text, r) or hidden([r], task.text)
            for r in task.spec["reference"]) else ""
    calls, tools = task.spec["calls"], tools_of(task)
    answers = {canonical(part) for call in calls for part in (call, call["arguments"]) if part}
    # names and types are no notes, but they are no sentences either
    notes = list(task_texts(task.spec["tools"]))
    values = [v for call in calls for v in call["arguments"].values() if isinstance(v, str)]
    if any(states_call(text, calls, answers) for text in [task.text, *notes]) \
            or any(spells_arguments("\n".join(notes), call["arguments"]) for call in calls) \
            or hidden(values, task.text) \
            or not answers.isdisjoint(map(canonical, objects_in(task.spec["tools"]))):
        return "answer leaked"
    if all(given_by_schema(call, tools[call["name"]]) for call in calls):
        # where there is no argument at all, which tool to call may still be a question
        stated = any(json.loads(text)[1] for text in normal_calls(calls, tools, ordered=False))
        if stated or {call["name"] for call in calls} == set(tools):
            return "nothing to answer"
    return ""


def loopholes(task: Task) -> str:
    """Why a task of the simulator's is met by copying or by guessing: one of REASONS, or ""."""
    said = normal_words(task.text)
    if structured(task):
        calls, tools = task.spec["calls"], tools_of(task)
        if all(spells_arguments(task.text, call["arguments"])
               and max(map(len, call["arguments"])) > 1 for call in calls):  # a=1, b=2 is usual
            return "answer leaked"
        texts = normal_calls(calls, tools, ordered=False)
        equal = max(map(texts.count, texts))
        repeated = equal > 1 and AGAIN.isdisjoint(said) \
            and equal not in grounding.read(task.text).numbers
        # an episode is always in order: a call may need what an earlier one returns
        in_order = task.spec["ordered"] and not answering(task) and len(set(texts)) > 1
        by_chance = repeated or in_order and ORDER.isdisjoint(said) or twins(calls, tools)
    else:
        answers = task.spec["reference"]
        by_chance = len(answers) > 1 or normal_words(answers[0])[0] in CHOICES \
            or offers(task.text, answers[0])
    return "more than one answer" if by_chance else ""


def twins(calls, tools: dict) -> bool:
    """Whether a tool that is called differs from another one in nothing but its name. Without a
    description the name is all that tells what a tool does."""
    def face(tool):
        words = normal_words(tool["description"]) or tool["name"]
        return canonical([words, tool["parameters"]])
    faces = [face(tool) for tool in tools.values()]
    return any(faces.count(face(tools[call["name"]])) > 1 for call in calls)


def offers(question: str, answer: str) -> bool:
    """Whether a question that says "or" names its answer."""
    words, answer = [w for raw in question.split() for w in _split(raw)], _split(answer)
    n = len(answer)
    return "or" in words and any(words[i:i + n] == answer for i in range(len(words)))


def hidden(values, text: str) -> bool:
    """Whether a value of four letters or more stands in a text backwards, or in base64, alone."""
    values = [v for v in map(str.lower, values) if sum(map(str.isalpha, v)) > 3]
    decoded = []
    for word in re.findall(r"[A-Za-z0-9+/_-]{6,}={0,2}", text):
        try:
            word = word.rstrip("=").replace("-", "+").replace("_", "/")
            decoded.append(base64.b64decode(word + "=" * (-len(word) % 4)).decode("utf-8"))
        except ValueError:  # most words are no base64, or none of a text
            pass
    plain, other = text.lower(), "\n".join([text[::-1], *decoded]).lower()
    return any(v not in plain and v != v[::-1] and re.search(rf"(?<!\w){re.escape(v)}(?!\w)", other)
               for v in values)


def states_call(text: str, calls, answers) -> bool:
    """Whether a text has one of the calls in tags, as f(...), or as JSON, also with ' for "."""
    names = "|".join(re.escape(call["name"]) for call in calls)
    # a blank before the bracket may be a sentence's, unless an argument follows
    if "<tool_call>" in text or re.search(rf"(?<![\w.])(?:{names})(?:\(|\s+\(\s*\w+\s*=)", text):
        return True
    for brace in re.finditer("{", text):  # an object may sit inside another
        span = find_object(text, brace.start())
        found = text[slice(*span)] if span else ""
        value = load_object(found) or ("'" in found and load_object(found.replace("'", '"')))
        if value and canonical(value) in answers:
            return True
    return False


def spells_arguments(text: str, arguments: dict) -> bool:
    """Whether a text has every argument as `name = value` or `name: value`."""
    def spelt(name, value):
        value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        between = r"[\"'`]?\s*[:=]\s*[\"'`]?"
        pattern = r"(?<!\w)" + re.escape(name) + between + re.escape(value) + r"(?!\w)"
        return re.search(pattern, text, re.IGNORECASE)
    return bool(arguments) and all(spelt(name, value) for name, value in arguments.items())


def given_by_schema(call: dict, tool: dict) -> bool:
    """Whether every argument of a call is what its own schema names: a default, the only value of
    an enum but for dummies, of a range, the only example, or a title or description that is it."""
    properties = tool["parameters"].get("properties", {})
    for name, value in call["arguments"].items():
        schema, named = properties.get(name, {}), []
        for keyword in ("enum", "examples"):
            values = schema.get(keyword)
            values = values if isinstance(values, list) else []
            values = [v for v in values if _plain(v) not in DUMMIES] or values
            named += values if len(values) == 1 else []
        if schema.get("minimum") == schema.get("maximum") is not None:
            named.append(schema["minimum"])
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
    words = [(w, raw[-1] in ",;") for raw in question.split() for w in _split(raw)]
    plain, reference = [w for w, _ in words], _split(reference)
    n, offers = len(reference), "or" in plain
    data = all(re.fullmatch(r"\d+|yes|no|true|false", w) for w in reference)
    for i in range(len(words) - n + 1):
        # in another order it is as easy to copy
        if sorted(plain[i:i + n]) != sorted(reference):
            continue
        before = plain[max(0, i - 2):i]
        told = before[-1:] == ["answer"] or before == ["answer", "is"]
        listed = "or" in before[-1:] + plain[i + n:i + n + 1] or words[i + n - 1][1] \
            or (i > 0 and words[i - 1][1])
        if not (offers and listed) and (told or not data):
            return True
    return False


def _split(text: str) -> list[str]:
    """normal_words, a hyphenated one as two, without the s of a genitive or a plural."""
    words = normal_words(re.sub(r"[-/_]", " ", text.replace("\u2019", "'"))) or normal_words(text)
    return [word[:-1] if len(word) > 3 and word[-1] == "s" else word for word in words]


def objects_in(value):
    """Every JSON object inside a value, itself included."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, (dict, list)):
            yield from objects_in(part)
