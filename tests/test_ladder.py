"""The ladder, in symbols and in words: its checker, its splits, and the texts it accepts.

Run: python -m pytest tests/test_ladder.py -q
"""
import random
from collections import Counter
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from helpers import refused_with
import genenv
from worlds import InvalidTask, NO_SEED, held_out_keys, household, ladder, task_keys
from worlds.ladder_words import TOOL_WORDS, Words
from interaction import attempt_score, play, read_teacher
from worlds.tiny_model import BASES, encode_pairs, word_tokenizer

PLAIN = {  # the tools again, as tables written by hand
    "inc": "1234567890", "dec": "9012345678", "dbl": "0246802468", "neg": "0987654321",
    "hop": "3456789012", "tpl": "0369258147", "mir": "9876543210", "sqr": "0149656941",
    "half": "0011223344", "drop": "6789012345", "cube": "0187456329", "tri": "0136051865"}
SYMBOLS = ladder.World(genenv.Options())
WORDS = ladder.World(replace(genenv.Options(), model="m"))
both = pytest.mark.parametrize("world", [SYMBOLS, WORDS])


def digits_of(start, tools):
    """Return the digits after each step, from the hand-written tables."""
    digits = [start]
    for name in tools:
        digits.append(int(PLAIN[name][digits[-1]]))
    return digits[1:]


@both
def test_the_checker_executes_the_chain_and_every_digit_counts(world):
    """Otherwise a wrong digit in the middle would pass, or a tool would differ from its table."""
    for name in ladder.NAMES:
        assert "".join(str(ladder.run_tools(d, [name])[0]) for d in range(10)) == PLAIN[name]
    for task in world.validation_tasks():
        tools, digits = task.spec["tools"], digits_of(**task.spec)
        assert world.score(task, world.text.answer(tools, digits)) == (1.0, True)
        for i in range(len(digits)):
            wrong = digits.copy()
            wrong[i] = (digits[i] + 1) % 10
            assert world.score(task, world.text.answer(tools, wrong)) == (0.0, True)
        assert world.score(task, world.text.answer(tools[:-1], digits[:-1]))[0] == 0.0


@both
def test_splits_are_easy_below_and_cover_every_rung_above(world):
    """Otherwise the base set would hold duplicates or hard tools, or a split would miss a rung."""
    base = world.base_tasks()
    assert len(base) == len({task.text for task in base}) == 544
    assert {len(task.spec["tools"]) for task in base} == {1, 2, 3}
    assert {name for task in base for name in task.spec["tools"]} == set(ladder.NAMES[:4])
    for split in ("validation", "tuning"):
        chains = [task.spec["tools"] for task in world.validation_tasks(split)]
        hardest = Counter(max(map(ladder.NAMES.index, tools)) for tools in chains)
        assert hardest == dict.fromkeys(range(12), 10)
        assert {len(tools) for tools in chains} == set(world.text.lengths)


@both
def test_what_the_simulator_is_shown_is_a_task_that_is_not_held_out(world):
    """Otherwise the simulator would be trained on texts that the parser refuses, or on held-out
    tasks."""
    rng, held_out = random.Random(0), held_out_keys(world)
    for _ in range(500):
        task = world.parse_task(world.imagine(rng)[1], NO_SEED, 4)
        assert not task_keys(world, task) & held_out and task.epoch == 4
        assert world.parse_task(task.text, task, 1).spec == task.spec
        assert not world.is_held_out(*world.unseen(rng, ladder.NAMES, 2))


@pytest.mark.parametrize("world, texts", [
    (SYMBOLS, ["", "3", "3 s2 inc", "33 s1 inc", "3 s1 vary", "3 s1 inc 4", "² s1 inc"]),
    (WORDS, ["", "4:", "44: double", "4: fly", "4: double: 8", "² : double"])])
def test_other_texts_are_malformed_or_too_long(world, texts):
    """Otherwise the agent would attempt malformed or endless tasks."""
    for text in texts:
        refused_with(InvalidTask, "^malformed$", world.parse_task, text, NO_SEED, 1)
        assert world.score(world.validation_tasks()[0], text) == (0.0, False)
    too_long = world.text.write(3, ["inc"] * 6)
    refused_with(InvalidTask, "^too long$", world.parse_task, too_long, NO_SEED, 1)


def test_a_teachers_file_leaves_out_held_out_tasks(tmp_path):
    """Otherwise the teacher variant would train on held-out tasks, or refuse to start."""
    SYMBOLS.write_teacher(600, tmp_path / "teacher.jsonl")
    tasks = read_teacher(SYMBOLS, tmp_path / "teacher.jsonl", held_out_keys(SYMBOLS))
    assert len({task.id for task in tasks}) == 600


@pytest.mark.parametrize("start, low, high", [
    ("stale", 0.5, 0.8), ("aligned", 0.1, 0.4), ("hard", 0.1, 0.4)])
def test_a_warm_start_in_words_shows_what_it_says(start, low, high):
    """Otherwise a start would teach too much, too little or held-out tasks, or seeds would share
    one start."""
    o = genenv.Options(model="m", world_options={"start": start})
    world, other_seed = ladder.World(o), ladder.World(replace(o, seed=1))
    pairs = world.warm_start_pairs()
    assert pairs["agent"] != other_seed.warm_start_pairs()["agent"]
    right = 0
    for messages, answer in pairs["agent"]:
        chain = Words.read(messages[1]["content"].removeprefix("Digit "))
        assert not world.is_held_out(*chain) and Words.read_answer(answer)
        right += answer == Words.answer(chain[1], digits_of(*chain))
    assert low < right / len(pairs["agent"]) < high
    assert {name for _, text in pairs["env"] for name in Words.read(text)[1]} == set(TOOL_WORDS)


def test_a_base_model_learns_only_responses_and_their_ends():
    """Otherwise the model would learn to write prompts or padding."""
    tokenizer = word_tokenizer(ladder.WORDS)
    ids, labels = encode_pairs(tokenizer, [("3 s1 inc =", "s1 inc 4"), ("3 =", "s1")])
    long, short = tokenizer.batch_decode(ids)
    assert (long, short) == ("3 s1 inc = s1 inc 4 <eos>", "3 = s1 <eos> <pad> <pad> <pad> <pad>")
    ids[0, :4] = ids[1, :2] = ids[1, 4:] = -100
    assert labels.equal(ids)


def test_both_prompts_are_what_the_base_model_was_trained_on():
    """Otherwise a player would read a prompt that its base model has never seen."""
    text = "3 s1 inc s2 dbl"
    task = SYMBOLS.parse_task(text, NO_SEED, 0)
    for success, word in ((None, "b?"), (0, "b0"), (0.44, "b4"), (0.95, "b8")):
        assert SYMBOLS.env_prompt(task, success) == f"vary {word} {text} =>"
    assert SYMBOLS.agent_prompt(task) == f"{text} ="


def reads_its_words(folder, words):
    """Return whether AutoTokenizer, which goes by the model's type, reads each word as one token.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.encode(" ".join(words), add_special_tokens=False) == list(range(len(words)))


@pytest.mark.parametrize("module", [ladder, household])
def test_shipped_base_models_half_know_their_world(module):
    """Otherwise a run would start from a missing model, or from one that solves nearly all tasks or
    none."""
    world = module.World(genenv.Options(rank=4))
    assert reads_its_words(BASES / world.NAME, world.WORDS)
    policy, tasks = world.load_policy(), world.validation_tasks("tuning")
    o = replace(world.o, max_response_tokens=world.DEFAULTS.get("max_response_tokens", 24))
    rollouts, texts = play(world, o, policy, None, tasks, 1, 1.0, policy.generator(0))
    attempts = zip(tasks, rollouts, texts)
    rewards = [attempt_score(world, *attempt)[0] for attempt in attempts]
    assert 0.1 < sum(rewards) / len(tasks) < 0.5


def test_a_base_model_is_trained_saved_and_named(tmp_path, monkeypatch):
    """Otherwise a base model could not be made again from its seed, or another seed would give the
    same one."""
    monkeypatch.setattr(ladder.World, "RECIPE", dict(steps=2, batch=2, lr=1e-3))
    weights = []
    for i, seed in enumerate("112"):
        folder = tmp_path / str(i)
        assert ladder.main(ladder.World, ["train", seed, str(folder)]) == 0
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]  # the same seed, the same bits
    assert reads_its_words(folder, ladder.WORDS)
