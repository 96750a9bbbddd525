"""The tool-call world: task files, prompts, checks of written tasks, Eq. 1, a 4-bit model.

Run: python -m pytest tests/test_tool_calls.py -q
After a deliberate change of the prompts: python tests/test_tool_calls.py, and read the diff.
"""
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from data_pool import Trace, TrainPool
import genenv
from helpers import gradients, raised, randomise, same, user_error, weights
from policy import Policy
from support.presets import PRESETS
from worlds import InvalidTask, check_task, held_out_keys, load_world, task_keys
from worlds import tool_calls as world

GOLDEN = Path(__file__).with_name("golden")
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
NO_SYSTEM = ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}"
             "{% endif %}")


def byte_tokenizer(template=CHATML):
    """One token per byte, so that any text has ids and comes back from them."""
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
    tokenizer.chat_template = template
    return tokenizer


def chat_model(folder, template=CHATML, hidden=64):
    """Save a small random Qwen2 chat model of V = 259 to `folder`; returns the folder as text."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    tokenizer = byte_tokenizer(template)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=8192, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=0, bos_token_id=None, initializer_range=0.1, tie_word_embeddings=False))
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def options(**changes):
    """What the world reads of the options."""
    return SimpleNamespace(**{**dict(model="m", base_tasks="", validation_tasks="", rank=4, seed=0,
                                     quant="", device="cpu", max_prompt_tokens=8192,
                                     max_task_tokens=64, max_response_tokens=32, dtype="auto",
                                     resume=False, agent_adapter="", env_adapter="", env_model="",
                                     chat_template_kwargs=""), **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved chat model."""
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def nf4(folder):
    """The same model in four bits, both adapters live."""
    policy = Policy.load(folder, rank=4, quant="nf4", device="cpu", seed=0)
    randomise(policy, scale=0.05)
    return policy


# ---------------------------------------------------------------------------------------------
# tasks to try things on


LIGHT = {"name": "set_light", "description": "Switch a light.", "parameters": {
    "type": "object", "required": ["room", "level"], "properties": {
        "room": {"type": "string", "enum": ["hall", "study"]},
        "level": {"type": "integer", "minimum": 0, "maximum": 100},
        "colour": {"type": "string", "default": "white"},
        "hours": {"type": "array", "items": {"type": "number"}},
        "fade": {"type": "object", "properties": {"seconds": {"type": "number"}},
                 "required": ["seconds"]}}}}
DOOR = {"name": "lock.door", "description": "Lock a door.", "parameters": {
    "type": "object", "properties": {"locked": {"type": "boolean"}}, "required": ["locked"]}}
HALL = {"name": "set_light", "arguments": {"room": "hall", "level": 5}}
LOCK = {"name": "lock.door", "arguments": {"locked": True}}


def record(task="Put the hall light on level five.", tools=(LIGHT, DOOR), calls=(HALL,), **more):
    """A record of the calls kind as a file or the simulator would have it."""
    return {"task": task, "tools": list(tools), "calls": list(calls), **more}


SEED = world.make_task(record("Lock the door behind me, please.", calls=[LOCK]), "base")
ASK = world.make_task({"task": "Who wrote the novel Dune?", "reference": "Frank Herbert"}, "base")


def said(*calls, before=""):
    """A response that makes these calls."""
    return before + "".join(f"<tool_call>{json.dumps(c)}</tool_call>\n" for c in calls)


def light(**changes):
    """The call of HALL with other arguments; None removes one."""
    arguments = {**HALL["arguments"], **changes}
    return {"name": "set_light", "arguments": {k: v for k, v in arguments.items() if v is not None}}


# ---------------------------------------------------------------------------------------------
# task files


def test_every_shipped_task_is_solvable_and_does_not_leak():
    """A typo in the example file would train the agent on a wrong answer."""
    tasks = world.read_tasks(str(world.EXAMPLE_TASKS))
    kinds = Counter(map(world.category, tasks))
    assert len(tasks) >= 40 and kinds["free-form"] >= 8 and min(kinds.values()) >= 3
    assert len({task.id for task in tasks}) == len(tasks)
    for task in tasks:
        assert not world.leaks(task) and world.score(task, world.gold(task)) == (1.0, True)
        if world.structured(task):
            assert world.score(task, said(*task.spec["calls"])) == (1.0, True)
            assert set(world.skills(task)) <= {tool["name"] for tool in task.spec["tools"]}
        else:
            assert all(world.score(task, a) == (1.0, True) for a in task.spec["reference"])


def test_splits_are_disjoint_deterministic_and_keep_rewordings_together(tmp_path):
    """A held-out task that is also trained on makes every validation number a lie."""
    world.prepare(options())
    names = ("validation", "tuning")
    parts = [world.base_tasks(options())] + [world.validation_tasks(options(), n) for n in names]
    ids = [{task.id for task in part} for part in parts]
    assert ids[0] | ids[1] | ids[2] == {t.id for t in world.read_tasks(str(world.EXAMPLE_TASKS))}
    assert len(ids[1]) == len(ids[2]) == 51 // 8 and len(ids[0]) == 51 - 2 * (51 // 8)
    lines = [record(f"{how} hall light to level {n}, please.", calls=[light(level=n)])
             for n in range(40) for how in ("Set the", "I would like the")]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = [world.base_tasks(options(base_tasks=str(path)))] + [
        world.validation_tasks(options(base_tasks=str(path)), n) for n in names]
    assert [len(part) for part in parts] == [60, 10, 10]  # 80 lines, 40 distinct call lists
    families = lambda part: Counter(world.same_task_key(t)[0] for t in part)
    assert [set(families(part).values()) for part in parts] == [{2}, {2}, {2}]
    assert len({t.id for part in parts for t in part}) == 80  # an id for each wording


def test_a_validation_file_replaces_the_held_out_part(tmp_path):
    """Its tasks must leave the base set, and nothing else is held back for validation."""
    shipped = world.EXAMPLE_TASKS.read_text().splitlines()
    path = tmp_path / "validation.jsonl"
    path.write_text("\n".join(shipped[:5]))
    o = options(validation_tasks=str(path))
    world.prepare(o)
    texts = [json.loads(line)["task"] for line in shipped[:5]]
    assert [t.text for t in world.validation_tasks(o)] == texts
    assert len(world.base_tasks(o)) + len(world.validation_tasks(o, "tuning")) == 51 - 5
    assert not {t.id for t in world.base_tasks(o)} & {t.id for t in world.validation_tasks(o)}


# ---------------------------------------------------------------------------------------------
# prompts


def golden_prompts():
    """{file name: chat messages}: both roles, both kinds of task."""
    ordered = world.make_task(record("Lock up, then put the hall light on level five.",
                                     calls=[LOCK, HALL], ordered=True), "base")
    return {"agent_calls.txt": world.agent_prompt(ordered),
            "agent_answer.txt": world.agent_prompt(ASK),
            "env_calls.txt": world.env_prompt(ordered, 0.875, 0.5),
            "env_answer.txt": world.env_prompt(ASK, 0.0, 0.7),
            "env_unknown.txt": world.env_prompt(ASK, None, 0.7)}


@pytest.mark.parametrize("name", ["agent_calls.txt", "agent_answer.txt", "env_calls.txt",
                                  "env_answer.txt", "env_unknown.txt"])
def test_chat_prompts_are_those_of_the_golden_files(nf4, name):
    """Ids and back: the template is applied once, with its generation prompt, and no BOS twice."""
    ids = nf4.encode(golden_prompts()[name])
    text = nf4.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == (GOLDEN / name).read_text(encoding="utf-8")
    assert ids[0] == nf4.tokenizer.convert_tokens_to_ids("<|im_start|>")  # one id, not ten bytes


def test_the_simulator_is_told_nothing_that_is_or_becomes_untrue():
    """An untried seed was called one that the assistant never solves, an old record named an older
    target than the alpha that it was weighed at."""
    for task in (SEED, ASK):
        assert "solves it" not in json.dumps(world.env_prompt(task, None, 0.5))
        for success in (None, 0.0, 0.5, 1.0):
            assert world.env_prompt(task, success, 0.2) == world.env_prompt(task, success, 0.9)


# ---------------------------------------------------------------------------------------------
# what the simulator writes


VALID = json.dumps(record())
NESTED = '{"task": ' + "[" * 40 + "]" * 40 + "}"
OF_REASON = {
    "no JSON object": ["", "I would rather not.", VALID[:-1], NESTED, "{'task': 'x'}", "[1]",
                       VALID.replace("five", "\\ud800"), VALID.replace("five", "\\u0000"),
                       VALID.replace('"level": 5', '"level": 1e999'),
                       VALID.replace('"level": 5', '"level": ' + 5000 * "9")],
    "malformed task": ["{}", json.dumps({"task": 7}), json.dumps(record(calls=[])),
                       json.dumps(record(calls=[{"name": "set_light"}])),
                       json.dumps(record(calls=[{"name": "set_light", "arguments": "{}"}])),
                       json.dumps(record(calls=9 * [HALL])), json.dumps(record(reference="x")),
                       json.dumps({"task": "Who wrote the book?", "reference": 3})],
    "trivial text": [json.dumps(record(task=t)) for t in ("", "...", " do it ", "?" * 50)],
    "tool schema": [json.dumps(record(tools=t)) for t in (
        [], [LIGHT, LIGHT], [{**LIGHT, "name": "set light"}], ["set_light"], {"set_light": 1},
        [{"name": "set_light"}], [{**LIGHT, "parameters": {"type": "string"}}],
        [{**LIGHT, "parameters": {"type": "object", "required": [["x"]]}}],
        [{**LIGHT, "parameters": {"type": ["object"], "properties": {}}}],
        [{**LIGHT, "parameters": {"type": "object", "properties": {
            "a": {"type": "integer", "default": "1"}}}}])],
    "unknown tool": [json.dumps(record(tools=[DOOR]))],
    "wrong arguments": [json.dumps(record(calls=[c])) for c in (
        light(level=None), light(size=1), light(level="5"), light(level=5.5), light(level=True),
        light(level=101), light(room="attic"), light(hours=[1, "2"]), light(fade={"seconds": "1"}),
        light(fade={}), light(fade={"seconds": 1, "x": 2}), light(colour=None, room=None))],
    "other kind than the seed": [json.dumps({"task": "Who wrote Emma, do you know?",
                                             "reference": "Jane Austen"})],
    "answer leaked": [json.dumps(record(task=t)) for t in (
        f"Please make this call: {json.dumps(HALL)}", 'Use { as in {"level":5.0, "room":"hall"}.',
        "Call set_light(room='hall', level=5) now.", f"Say {said(HALL)}",
        "Would you use {'room': 'hall', 'level': 5} for me?")],
    "nothing to answer": [],  # see GIVEN_AWAY
    "more than one answer": [json.dumps(record("Hall light on five, and lock the door.", calls=[
        HALL, LOCK], ordered=True))],  # and see test_leaks.py
    "not in the request": [json.dumps(record("Hall light on the usual level."))],
    "not in the calls": [json.dumps(record("Hall light on level five, at 17 percent.")),
                         json.dumps(record("Hall light on level 5 for 20 minutes."))],
    "copy of the seed": [json.dumps(record("LOCK the door, behind me please!", calls=[HALL])),
                         json.dumps(record("Would you bolt it?", calls=[LOCK])), ],
    "held-out task": [],  # needs the held-out tasks: see below
    "special tokens": [json.dumps(record("Hall light on level five.<|im_end|>\n<|im_start|>user")),
                       json.dumps(record("Hall light @")).replace("@", "\\u003c|im_end|\\u003e"),
                       json.dumps(record(tools=[{**LIGHT, "description": "<|im_start|>"}, DOOR]))],
}
# but for those that --tools alone gives: test_call_text.py has them
ALL_REASONS = (*(reason for reason in world.REASONS
                 if reason not in ("no request and call", "none of its functions",
                                   "copy of a base task")),
               "copy of the seed", "held-out task", "special tokens")


def accepted(text, seed_task=SEED, held_out=frozenset()):
    """What the loop makes of a text: the task, or InvalidTask."""
    task = world.parse_task(text, seed_task, 3)
    check_task(world, task, seed_task, held_out, byte_tokenizer())
    return task


@pytest.mark.parametrize("reason", ALL_REASONS)
def test_each_reason_is_given_for_what_it_names(reason):
    """Counts by reason are how a user sees what their simulator does wrong."""
    world.prepare(options())
    texts, held_out = list(OF_REASON[reason]), held_out_keys(world, options())
    if reason == "held-out task":
        held = [t for split in ("validation", "tuning")
                for t in world.validation_tasks(options(), split) if world.structured(t)]
        texts = [json.dumps({"task": t.text, **t.spec}) for t in held]
        texts.append(json.dumps({"task": "Quite another wording.", **held[0].spec}))
        texts.append(json.dumps(record(held[0].text.upper())))
    if reason == "nothing to answer":
        texts = [json.dumps(r) for r, why in GIVEN_AWAY.values() if why == reason]
    assert texts
    for text in texts:
        assert raised(InvalidTask, None, accepted, text, SEED, held_out) == reason, text


def noted(**notes):
    """The record of HALL, with notes in the tool's own fields or, by `level`, in the schema's."""
    level = {**LIGHT["parameters"]["properties"]["level"], **notes.pop("level", {})}
    room = {**LIGHT["parameters"]["properties"]["room"], **notes.pop("room", {})}
    properties = {**LIGHT["parameters"]["properties"], "level": level, "room": room}
    return record(tools=[{**LIGHT, **notes, "parameters": {
        **LIGHT["parameters"], "properties": properties}}, DOOR])


OFF = {"name": "all_off", "description": "Switch every light off.",
       "parameters": {"type": "object", "properties": {}}}
RING = {"name": "ring", "description": "Ring the bell.", "parameters": {
    "type": "object", "properties": {"times": {"type": "integer", "default": 1}}}}
GIVEN_AWAY = {  # what: (record, the reason or "" where it is a fair task)
    "call as JSON in a description": (noted(description=f"For example {json.dumps(HALL)}"), 1),
    "arguments as JSON": (noted(description='As in {"room": "hall", "level": 5}.'), 1),
    "call as a function": (noted(description="Say set_light(...) as you know."), 1),
    "arguments by name and colon": (noted(level={"description": 'room: "hall"; level: 5'}), 1),
    "in examples": (noted(level={"examples": [HALL]}), 1),
    "in an enum": (noted(room={"enum": ["hall", 'hall {"room": "hall", "level": 5}']}), 1),
    "all arguments are defaults": (noted(room={"default": "hall"}, level={"default": 5}), 2),
    "an empty call is right": (record("Ring the bell, please.", [RING, DOOR],
                                      [{"name": "ring", "arguments": {"times": 1}}]), 2),
    "the only tool has no arguments": (record("Lights off, everywhere!", [OFF],
                                              [{"name": "all_off", "arguments": {}}]), 2),
    "which tool is the question": (record("Lights off, everywhere!", [OFF, DOOR],
                                          [{"name": "all_off", "arguments": {}}]), 0),
    "a default beside an argument": (noted(level={"default": 5}), 0),
    "another call than the default": (record("Ring three times, please.", [RING, DOOR], [
        {"name": "ring", "arguments": {"times": 3}}]), 0),
    "notes that explain": (noted(description="Room and level, from 0 to 100 (5: dim)."), 0),
}
GIVEN_AWAY = {what: (r, ("", "answer leaked", "nothing to answer")[n])
              for what, (r, n) in GIVEN_AWAY.items()}


@pytest.mark.parametrize("what", GIVEN_AWAY)
def test_calls_that_the_tools_give_away_are_refused_and_fair_tasks_are_not(what):
    """RWR would find every one of these ways to steer the success rate without a task."""
    given, reason = GIVEN_AWAY[what]
    task = world.make_task(given, "env")
    assert world.leaks(task) == reason
    if "empty call" in what:
        assert world.score(task, said({"name": "ring", "arguments": {}})) == (1.0, True)


QUESTIONS = [  # (question, reference, whether it is given away)
    ("Frank Herbert wrote Dune. Who wrote Dune?", "Frank Herbert", True),
    ("Who was it: the FRANK, herbert?", "Frank Herbert", True),
    ("Frank wrote it; the other name is Herbert. Who wrote it?", "Frank Herbert", False),
    ("Which planet is larger, Jupiter or Saturn?", "Jupiter", False),
    ("Which planet is larger? Jupiter is.", "Jupiter", True),
    ("Answer yes or no: is Jupiter larger than Saturn?", "yes", False),
    ("Is Jupiter larger? Answer: yes", "yes", True),
    ("Tom had 3 apples and bought 3, then ate 3. How many has he?", "3", False),
    ("The answer is 3. What is the answer, please?", "3", True),
    ("Which band wrote Thunderstruck? Not AC/DC, surely.", "AC/DC", True),
]


@pytest.mark.parametrize("question, reference, given", QUESTIONS)
def test_a_question_must_not_contain_its_answer(question, reference, given):
    """Options, numbers and yes or no stand in fair questions too."""
    task = world.make_task({"task": question, "reference": [reference, "no such answer"]}, "env")
    assert world.leaks(task) == ("answer leaked" if given else "")


# ---------------------------------------------------------------------------------------------
# one task, one id


def test_the_same_calls_under_another_text_are_a_task_of_its_own(tmp_path):
    """It overwrote the p_hat of the first, and the pool kept the wrong text."""
    first = world.make_task(record(), "env")
    second = world.make_task(record("The hall could do with a little light: five, say.",
                                    tools=[LIGHT]), "env")
    third = world.make_task(record(tools=[LIGHT]), "env")  # the same text, fewer tools
    assert len({first.id, second.id, third.id}) == 3
    assert task_keys(world, first) & task_keys(world, second)
    assert first.id == world.make_task(record(), "base").id
    pool = TrainPool(tmp_path / "train.jsonl", [])
    for task, p_hat in ((first, 0.25), (second, 1.0)):
        pool.add(task, [Trace("", p_hat, True, False, 1)], p_hat, 1)
    assert pool.p_hat == {first.id: (0.25, 1), second.id: (1.0, 1)}
    assert [t.text for t in pool.tasks.values()] == [first.text, second.text]


@pytest.mark.parametrize("text", [
    VALID, f"```json\n{VALID}\n```", f"Sure! Here {{it}} is:\n```\n{VALID}\n```\nGood luck {{:}}",
    json.dumps(record(), indent=2), VALID.replace("five", "five {[\\\" "), VALID + VALID])
def test_a_valid_task_is_found_in_what_surrounds_it(text):
    """Chat models wrap their JSON."""
    task = world.parse_task(text, SEED, 3)
    assert task.spec == {"tools": [LIGHT, DOOR], "calls": [HALL], "ordered": False}
    assert (task.origin, task.seed_task, task.epoch) == ("env", SEED.id, 3)
    assert world.score(task, said(HALL)) == (1.0, True)
    json.dumps(dataclasses.asdict(task)).encode()  # fit for the pools


# ---------------------------------------------------------------------------------------------
# Eq. 1


TWO = world.make_task(record(calls=[HALL, LOCK]), "base")
ORDERED = world.make_task(record(calls=[HALL, LOCK], ordered=True), "base")
TWICE = world.make_task(record(calls=[HALL, HALL]), "base")
@pytest.mark.parametrize("answer,reference,same", [
    ("It is $1,200.50.", "1200.5", True), ("\u22125", "-5", True), ("(5)", "5", True), ("50%", "50", True),
    ("-5", "5", False), ("1.5", "15", False), ("0.05", "0.5", False), ("3-4", "34", True),
    ("the end.", "End", True),
    ("**1.5**", "1.5", True), ("**1.5**", "15", False), ("`-5`", "5", False), ("-$5", "-5", True),
    ("+1.5", "15", False)])
def test_numbers_of_free_form_answers_keep_sign_and_point(answer, reference, same):
    task = world.make_task({"task": "What is the result?", "reference": reference}, "base")
    assert (world.score(task, answer)[0] >= 0.5) == same


LETTERS = world.make_task({"task": "Which letters are these?", "reference": ["b c c d", "x y"]},
                          "base")
NOTHING, WRONG, RIGHT = (0.0, False), (0.0, True), (1.0, True)
SCORES = [
    (TWO, said(HALL, LOCK), RIGHT, "all calls"),
    (TWO, said(LOCK, HALL), RIGHT, "any order"),
    (ORDERED, said(HALL, LOCK), RIGHT, "the stated order"),
    (ORDERED, said(LOCK, HALL), WRONG, "ordered, but swapped"),
    (TWO, said(HALL), WRONG, "a subset is no success"),
    (TWO, said(HALL, LOCK, LOCK), WRONG, "nor is a superset"),
    (TWICE, said(HALL), WRONG, "multiplicity counts"),
    (TWICE, said(HALL, HALL), RIGHT, "twice as asked"),
    (TWO, said(HALL, LOCK, before="I will do both. "), RIGHT, "prose around calls"),
    (TWO, said(HALL, light(level=5.0, room="study")), WRONG, "a wrong value"),
    (TWO, said(light(level=5.0), LOCK), RIGHT, "5.0 is the integer 5"),
    (TWO, said(light(colour="white"), LOCK), RIGHT, "the default, spelt out"),
    (TWO, said(light(colour="White"), LOCK), WRONG, "strings to the letter"),
    (TWO, said(light(level="5"), LOCK), NOTHING, "a text is no number"),
    (TWO, said(light(level=True), LOCK), NOTHING, "nor is true"),
    (TWO, said(HALL, {"name": "lock.door", "arguments": {"locked": 1}}), NOTHING, "1 is not true"),
    (TWO, said(HALL, LOCK, {"name": "sing", "arguments": {}}), NOTHING, "an undeclared tool"),
    (TWO, said(HALL, {**LOCK, "id": 1}), NOTHING, "a third member"),
    (TWO, said(HALL, LOCK)[:-13], NOTHING, "the last tag never closes"),
    (TWO, said(HALL) + "<tool_call>{oops}</tool_call>", NOTHING, "one block is no JSON"),
    (TWO, json.dumps([HALL, LOCK]), NOTHING, "no tags"),
    (TWO, "", NOTHING, "silence"),
    (ASK, "Frank Herbert", RIGHT, "the reference"),
    (ASK, " the FRANK herbert. ", RIGHT, "articles, case and punctuation"),
    (ASK, "Herbert", (pytest.approx(2 / 3), True), "half of the words"),
    (ASK, "It was Frank Herbert", (pytest.approx(2 / 3), True), "two words too many"),
    (ASK, "Isaac Asimov", WRONG, "nothing in common"),
    (ASK, " ... ", NOTHING, "no word at all"),
    # two of three words are right, and two of four there; the better of two references counts
    (LETTERS, "b b c", (pytest.approx(2 * 2 / (3 + 4)), True), "repeated words"),
    (LETTERS, "x y", RIGHT, "another reference"),
]


@pytest.mark.parametrize("task, response, expected, why", SCORES, ids=[row[3] for row in SCORES])
def test_score_table(task, response, expected, why):
    """Both branches of Eq. 1; the prompt is not an argument, so it cannot be read."""
    assert world.score(task, response) == expected


# ---------------------------------------------------------------------------------------------
# models


def test_load_policy_refuses_what_cannot_work(tmp_path, folder):
    """Found before the first epoch: no template, no system role, prompts over the limit."""
    plain = chat_model(tmp_path / "plain", template=None)
    gemma_like = chat_model(tmp_path / "strict", template=NO_SYSTEM)
    for changes, message in ((dict(model=plain), "no chat template"),
                             (dict(model=gemma_like), "chat template"),
                             (dict(model=folder, max_prompt_tokens=600), "--max-prompt-tokens"),
                             (dict(model=str(tmp_path / "absent")), "does not exist")):
        user_error(message, world.load_policy, options(**changes))


def test_nf4_samples_scores_and_trains_only_the_named_adapter(nf4):
    """4-bit base, gradient checkpointing, LoRA: gradients reach every A and B of one adapter."""
    linear = nf4.lm.base_model.layers[0].mlp.up_proj.base_layer
    assert type(linear).__name__ == "Linear4bit" and linear.weight.dtype == torch.uint8
    prompt = nf4.encode(world.agent_prompt(ASK))
    rollouts = nf4.sample("agent", [prompt], G=4, max_new_tokens=12, generator=nf4.generator(1))
    agent, env, base, grads = weights(nf4, "agent"), weights(nf4, "env"), weights(nf4), []
    for checkpointing in (False, True):
        optimizer = nf4.optimizer("agent", lr=1e-2)
        optimizer.zero_grad(set_to_none=True)
        with nf4.use("agent"):
            logp, mask = nf4.logprobs(rollouts, grad_checkpoint=checkpointing)
            torch.testing.assert_close(  # scored as it was sampled
                logp[mask].detach(), torch.tensor([x for r in rollouts for x in r.logps]),
                atol=1e-4, rtol=1e-4)
            (-logp.sum()).backward()
        grads.append(gradients(nf4, "agent"))
    assert all(float(g.abs().max()) > 0 for g in grads[1])
    for plain, recomputed in zip(*grads):
        torch.testing.assert_close(plain, recomputed, atol=1e-5, rtol=1e-4)
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(agent, nf4.params["agent"]))
    assert same(env, weights(nf4, "env")) and same(base, weights(nf4))


@pytest.mark.parametrize("quant", ["", "nf4"])
def test_saved_adapters_load_with_peft_in_two_lines(tmp_path, folder, quant):
    """What a user does with the result of a run; the logits must be those of the policy."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    policy = Policy.load(folder, rank=4, quant=quant or None, device="cpu", seed=0)
    randomise(policy, scale=0.05)
    policy.save_adapters(tmp_path)
    four_bit = dict(quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32)) if quant else {}

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **four_bit)
    model = PeftModel.from_pretrained(model, tmp_path / "agent")

    # train mode, as there is no dropout: in eval mode bitsandbytes may round more on some CPUs
    policy.model.train(), model.train()
    ids = torch.tensor([policy.encode("any text will do")])
    with torch.no_grad(), policy.use("agent"):
        ours, theirs = policy.lm(input_ids=ids).logits, model(input_ids=ids).logits
        with policy.use(None):
            base = policy.lm(input_ids=ids).logits
    assert torch.equal(ours, theirs) and not torch.allclose(ours, base, atol=1e-3)


# ---------------------------------------------------------------------------------------------
# presets


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_options_and_hold_values_of_their_type(name):
    """A preset with a misspelt option would silently run with the default."""
    world_ = load_world(PRESETS[name].get("world", "ladder"))
    defaults = {f.name: f.default for f in dataclasses.fields(genenv.Options)}
    defaults.update((key, default) for key, (default, *_) in getattr(world_, "OPTIONS", {}).items())
    for key, value in PRESETS[name].items():
        assert key in defaults, key
        assert type(value) is type(defaults[key]), key


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, messages in golden_prompts().items():
        text = byte_tokenizer().apply_chat_template(messages, tokenize=False,
                                                    add_generation_prompt=True)
        (GOLDEN / name).write_text(text, encoding="utf-8")
