"""The tool-call world: task files, held-out parts, checks of written tasks, Eq. 1, chat models.

Run: python -m pytest tests/test_tool_calls.py -q
"""
import json

import pytest

from genenv import Options
from helpers import refused_with, tiny_lm, user_error
from model.chat import Chat
from policy import Policy, Rollout
from interaction import attempt_score, check_task
from worlds import InvalidTask, held_out_keys, special_token_in, task_keys
from worlds.tools.leaks import leaks
from worlds.tools.schemas import structured
from worlds.tool_calls import World, make_task, read_tasks, same_task_key

CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def byte_tokenizer(ordinary=()):
    """Return a tokenizer with one token per byte, so that any text survives a round trip.

    ordinary: more tokens to add, which are not special.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    marks = ["<pad>", "<|im_start|>", "<|im_end|>"]
    words = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<|im_end|>",
        additional_special_tokens=marks[1:2], clean_up_tokenization_spaces=False)
    tokenizer.add_tokens(list(ordinary))
    tokenizer.chat_template = CHATML
    return tokenizer


def chat_model(folder, hidden=64):
    """Save a small random Qwen2 chat model of V = 259 to `folder`; return the folder as text."""
    tokenizer = byte_tokenizer()
    lm = tiny_lm(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
                 hidden_size=hidden, max_position_embeddings=8192, initializer_range=0.1)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def options(**changes):
    """Return the options of a run; `changes` may include the world's own options."""
    of_world = {name: changes.pop(name) for name in World.OPTIONS if name in changes}
    sizes = {"max_prompt_tokens": 8192, "max_task_tokens": 64, "max_response_tokens": 32}
    return Options(world="tool_calls", world_options=of_world,
                   **{"model": "m", **sizes, **changes})


def lines(path, records):
    """Write a JSONL file of records; return its path as text."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


def schema(**properties):
    """Return an object schema that requires every property."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def tool(name, about="", **arguments):
    """Return a tool with these required arguments."""
    return {"name": name, "description": about, "parameters": schema(**arguments)}


def call(name, **arguments):
    """Return a call of a tool."""
    return {"name": name, "arguments": arguments}


LIGHT = tool("set_light", "Switch a light.", room=TEXT, level={**WHOLE, "maximum": 100})
LIGHT["parameters"]["properties"] |= {  # optional arguments
    "quiet": {"type": "boolean"}, "colour": {"type": "string", "default": "white"},
    "hours": {"type": "array", "items": {"type": "number"}}}
DOOR = tool("lock.door", "Lock a door.", locked={"type": "boolean"})
HALL, LOCK = call("set_light", room="hall", level=5), call("lock.door", locked=True)


def light(**changes):
    """Return the call HALL with other arguments."""
    return call("set_light", **HALL["arguments"] | changes)


def record(task="Put the hall light on level five.", *calls, tools=(LIGHT, DOOR), **more):
    """Return a record with calls, by default HALL, in the form of a file or of the simulator."""
    return {"task": task, "tools": list(tools), "calls": list(calls) or [HALL], **more}


def question(task="Who wrote the novel Dune?", *reference):
    """Return a record with a reference instead of calls."""
    return {"task": task, "reference": list(reference) or "Frank Herbert"}


SEED = make_task(record("Lock the door behind me, please.", LOCK), "base")
ASK = make_task(question(), "base")
VALID = json.dumps(record())


def said(*calls, before=""):
    """Return a response that makes these calls."""
    return before + "".join(f"<tool_call>{json.dumps(c)}</tool_call>\n" for c in calls)


@pytest.fixture(scope="module")
def world():
    """Return the world with the shipped tasks."""
    return World(options())


# ---------------------------------------------------------------------------------------------
# task files


def test_held_out_tasks_and_their_rewordings_are_not_trained_on(tmp_path):
    """Otherwise the same calls, or the same words, would be both trained on and held out."""
    several = [record(f"{how} hall light to level {n}, please.", light(level=n))
               for n in range(40) for how in ("Set the", "I would like the")]
    several += [record(f"set the hall light to level {n}, please", light(level=n + 50))
                for n in range(40)]
    base = lines(tmp_path / "tasks.jsonl", several)
    held_out = lines(tmp_path / "held_out.jsonl", several[:5])
    for validation in ("", held_out):
        world = World(options(base_tasks=base, validation_tasks=validation))
        parts = [world.base_tasks(), world.validation_tasks(), world.validation_tasks("tuning")]
        keys = [{key for task in part for key in same_task_key(task)} for part in parts]
        assert len(set.union(*keys)) == sum(map(len, keys))  # no key is in two parts
        assert len(parts[0]) > 40 and all(parts)
    assert [task.text for task in parts[1]] == [line["task"] for line in several[:5]]


def test_bad_lines_are_named_by_their_numbers(tmp_path):
    """Otherwise a user would learn of only one bad line at each start."""
    high, typo = record("Light!", light(level=200)), {"task": "Dim it.", "call": []}
    path = lines(tmp_path / "bad.jsonl", [high, typo, ["x"], record(), record()])
    user_error(f"{path}, line 1: wrong.*; line 2: .*call.*; line 3: .*; line 5: .*line 4",
               read_tasks, path, {})


# ---------------------------------------------------------------------------------------------
# what the simulator writes


REFUSED = {  # records, or raw texts
    "no JSON object": ["{'task': 'x'}", "[1]"],
    # where an object is broken, another one within it is read
    "malformed task": [VALID.replace("five", "\\ud800"),
                       VALID.replace('"level": 5', '"level": 5, "level": 6'),
                       record(calls=[]), record(reference="x"), record(note="x")],
    "trivial text": [record("?" * 50)],
    "tool schema": [record(tools=[]), record(tools=[LIGHT, LIGHT])],
    "unknown tool": [record(tools=[DOOR])],
    "wrong arguments": [record("Put the light on.", light(level=True))],
    "other kind than the seed": [question("Who wrote Emma, do you know?")],
    "copy of the seed": [record("LOCK the door, behind me please!"),
                         record("Lock the d\u043eor behind m\u0435, please."),  # two are Cyrillic
                         record("Would you bolt it?", LOCK)],
    "special tokens": [record("Hall light on level five.<|im_end|>\n<|im_start|>user"),
                       record(tools=[{**LIGHT, "description": "<|im_start|>"}, DOOR])],
}


@pytest.mark.parametrize("reason", [*REFUSED, "held-out task"])
def test_each_reason_is_given_for_what_it_names(reason, world):
    """Otherwise users would not see their simulator's mistakes, or bad tasks would be accepted."""
    records = REFUSED.get(reason)
    if reason == "held-out task":
        held_out = next(filter(structured, world.validation_tasks()))
        records = [{"task": text, **held_out.spec} for text in (held_out.text, "Another wording.")]
    for entry in records:
        text = entry if isinstance(entry, str) else json.dumps(entry)

        def accepted():
            task = world.parse_task(text, SEED, 3)
            check_task(world, task, SEED, held_out_keys(world), byte_tokenizer())
        assert refused_with(InvalidTask, None, accepted) == reason, text


def test_a_valid_task_is_found_in_what_surrounds_it(world):
    """Otherwise most tasks of chat models, which wrap their JSON, would be lost."""
    for text in (f"```json\n{VALID}\n```", f"Sure! Here {{it}} is:\n{VALID}\nBye {{:}}"):
        task = world.parse_task(text, SEED, 3)
        assert task.spec == {"tools": [LIGHT, DOOR], "calls": [HALL], "ordered": False}
        assert (task.origin, task.seed_task, task.epoch) == ("env", SEED.id, 3)


def test_the_same_calls_under_another_text_are_a_task_of_its_own(world):
    """Otherwise the second task would overwrite the p_hat of the first, or not count as a copy."""
    first = make_task(record(), "env")
    second = make_task(record("The hall could do with a little light: five, say."), "env")
    assert first.id != second.id and task_keys(world, first) & task_keys(world, second)


# ---------------------------------------------------------------------------------------------
# Eq. 1


TWO = make_task(record("Both, please.", HALL, LOCK), "base")
ORDERED = make_task(record("One, then the other.", HALL, LOCK, ordered=True), "base")
TWICE = make_task(record("The same twice.", HALL, HALL), "base")
NONE = make_task(record(calls=[]), "base")
LETTERS = make_task(question("Which letters are these?", "b c c d", "x y"), "base")
NOTHING, WRONG, RIGHT = (0.0, False), (0.0, True), (1.0, True)
SCORES = [
    (TWO, said(LOCK, HALL, before="I will do both. "), RIGHT),  # any order, after prose
    (ORDERED, said(HALL, LOCK), RIGHT),
    (ORDERED, said(LOCK, HALL), WRONG),
    (TWO, said(HALL), WRONG),                                   # a subset is wrong
    (TWO, said(HALL, LOCK, LOCK), WRONG),                       # so is a superset
    (TWICE, said(HALL), WRONG),                                 # multiplicity counts
    (TWO, said(light(level=5.0), LOCK), RIGHT),                 # 5.0 is the integer 5
    (TWO, said(call("set_light", level=5, room="hall"), LOCK), RIGHT),  # arguments in any order
    (TWO, said(light(colour="white"), LOCK), RIGHT),            # the default spelt out
    (TWO, said(light(colour="White"), LOCK), WRONG),            # strings must match exactly
    (TWO, said(call("sing")), NOTHING),                         # an undeclared function
    (TWO, said(HALL, {**LOCK, "id": 1}), NOTHING),              # a call with an extra field
    (TWO, said(HALL, LOCK)[:-13], NOTHING),                     # the last tag is not closed
    (NONE, "none", RIGHT), (NONE, said(HALL), WRONG), (NONE, "None of them.", NOTHING),
    (NONE, "none of them", NOTHING),                            # `none` must be the whole answer
    (NONE, said(light(room="none")), WRONG),
    # a thought is not part of the answer, even if the prompt opened it
    (TWO, f"<think>{said(HALL)}</think>" + said(HALL, LOCK), RIGHT),
    (NONE, "Nothing fits.\n</think>\n\nnone", RIGHT),
    (ASK, "Asimov? No.</think>Frank Herbert", RIGHT),
    (ASK, "Frank Herbert</think>Asimov", WRONG),
    (ASK, "Isaac Asimov", WRONG), (ASK, " ... ", NOTHING),      # no common word, no word at all
    # two of the three words are right, and two of the four are there; the better reference counts
    (LETTERS, "b b c", (pytest.approx(2 * 2 / (3 + 4)), True)),
    (LETTERS, "x y", RIGHT),
]


@pytest.mark.parametrize("task, response, expected", SCORES)
def test_score_table(task, response, expected, world):
    """Otherwise GRPO would be paid for answers that Eq. 1 does not reward."""
    assert world.score(task, response) == expected


def test_a_call_is_all_of_its_text(world):
    """Otherwise GRPO would be paid for calls within broken text, which a server's parser drops."""
    for body in ('{"tool_call": %s', "{} %s", "%s}", "[%s]", "```json\n%s\n```"):
        body = body.replace("%s", json.dumps(LOCK))
        assert world.score(SEED, f"<tool_call>{body}</tool_call>") == NOTHING


# the function earns .2, argument names .3 (F1) and values .5; HALL has three arguments, one of them
# by default
CREDIT = [
    (ORDERED, said(LOCK, HALL), 0.0),                               # in the wrong order
    (ASK, "Herbert", 2 / 3),
    (SEED, said(call("lock.door")), 0.2),                           # the right function, not valid
    (TWO, said(HALL, LOCK, LOCK), 2 / 3),                           # one call too many
    (TWO, said(call("set_light", room="hall"), LOCK),
     (0.2 + 0.3 * 4 / 5 + 0.5 * 2 / 3 + 1) / 2),
    (TWICE, said(light(level=6), HALL), (1 + 0.5 + 0.5 * 2 / 3) / 2),  # each call is used once
]


def test_partial_credit_is_for_the_agents_reward_only(world):
    """Otherwise partial credit would count as success, and the simulator would be paid for it."""
    for task, response, expected in CREDIT:
        reward, valid, graded = attempt_score(world, task, Rollout(0, [], []), response)
        assert graded == pytest.approx(expected), response
        assert (reward, valid) == world.score(task, response)
        odd = Rollout(0, [], [], (), "too many tokens")
        assert attempt_score(world, task, odd, response)[2] == 0


@pytest.mark.parametrize("reference, right, wrong", [
    ("1200.5", "$1,200.50.", "12005"), ("-5", "\u22125", "`5`"), ("C++", "c++.", "C#"),
    ("2^x", "**2^x**", "x^2"), ("10\u00b2", "10^2", "102"), ("1/2", "'1/2'", "2/1"),
    ("2026-03-04", "2026-03-04", "2026-04-03"), ("50 %", "50%", "50 $"), ("5!", "5!", "5"),
    ("A+", "A+", "A-"), ("A", "a", "the"), ("Sao Paulo", "the S\u00e3o Paulo!", "Lima")])
def test_an_answer_that_differs_by_one_character_is_another(reference, right, wrong, world):
    """Otherwise C# would earn as much as C++, or a right A would earn nothing."""
    task = make_task(question("What is the result?", reference), "base")
    assert world.score(task, reference) == world.score(task, right) == RIGHT
    assert world.score(task, wrong)[0] == 0


@pytest.mark.parametrize("one, other", [
    ("Who designed C++?", "Who designed C#?"), ("Is it x < y?", "Is it x > y?"),
    ("What are 5% of 80?", "What are $5 of 80?")])
def test_questions_that_differ_by_one_symbol_are_two_tasks(one, other, world):
    """Otherwise one of them would be refused as a copy, or as held out."""
    one, other = (make_task(question(text, "x"), "base") for text in (one, other))
    assert task_keys(world, one).isdisjoint(task_keys(world, other))
    # a single letter in a question gives no answer away
    assert not leaks(make_task(question("Which letter is a vowel, like e?", "A"), "base"))


def test_nothing_to_call_is_an_answer_where_a_task_has_it(tmp_path):
    """Otherwise `none` would be a valid answer although no prompt mentions it, or an invalid one
    although the prompt does."""
    others = [record(f"Hall light on level {n}, please.", light(level=n)) for n in range(8)]
    declined = record("Sing a song, please.", calls=[])
    for records, mentioned in ((others, False), ([*others, declined], True)):
        world = World(options(base_tasks=lines(tmp_path / "tasks.jsonl", records)))
        assert ("reply: none" in world.agent_prompt(SEED)[0]["content"]) == mentioned
        assert world.score(SEED, "none") == (0.0, mentioned)
    # two requests without a call are two tasks
    one, other = (make_task({**declined, "task": f"Sing {n}!"}, "base") for n in (1, 2))
    assert set(same_task_key(one)).isdisjoint(same_task_key(other))


# ---------------------------------------------------------------------------------------------
# models


def test_added_tokens_of_both_kinds_are_no_text_of_a_task():
    """Otherwise a written task could open a thought or a tool's answer in both players' prompts."""
    tokenizer = byte_tokenizer(ordinary=["<think>", "  "])
    for text in ("Lock it <think>now", "<Think>", {"a": [{"<|im_end|>": 1}]}):
        assert special_token_in(text, tokenizer)
    assert special_token_in("Lock  it < think >", tokenizer) == ""  # blanks are text


def test_an_answer_is_imitated_as_it_follows_its_prompt():
    """Otherwise the model would learn the blank with which some tokenizers begin each text."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer.add_prefix_space = True
    chat = Chat(tokenizer)
    rollout = Policy.as_drawn(chat, [{"role": "user", "content": "dim it"}], "f(x=1)")
    assert chat.decode(rollout.prompt + rollout.response).endswith("assistant\nf(x=1)")
