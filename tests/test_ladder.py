"""The embedded world: an exact checker, honest splits, and tasks that are what they say.

Run: python -m pytest tests/test_ladder.py -q
"""
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from helpers import raised, user_error
import genenv
from worlds import InvalidTask, attempt_score, check_task, held_out_keys, household, ladder, play

PLAIN = {  # the tools once more, as tables written out by hand
    "inc": "1234567890", "dec": "9012345678", "dbl": "0246802468", "neg": "0987654321",
    "hop": "3456789012", "tpl": "0369258147", "mir": "9876543210", "sqr": "0149656941",
    "half": "0011223344", "drop": "6789012345", "cube": "0187456329", "tri": "0136051865"}


def task(start, *tools):
    """A task of the ladder."""
    return ladder._task(start, tools, "env")


def answer(t):
    """The whole right trajectory, from the hand-written tables."""
    digit, words = t.spec["start"], []
    for i, name in enumerate(t.spec["tools"], 1):
        digit = int(PLAIN[name][digit])
        words += [f"s{i}", name, str(digit)]
    return " ".join(words)


SEED = task(3, "inc", "dbl")
HELD_OUT = held_out_keys(ladder, None)


def accepted(text):
    """What the loop makes of a text: the task, or InvalidTask."""
    written = ladder.parse_task(text, SEED, 1)
    check_task(ladder, written, SEED, HELD_OUT)
    return written


# ---------------------------------------------------------------------------------------------
# the checker


@pytest.mark.parametrize("name", ladder.NAMES)
def test_every_tool_does_what_its_table_says(name):
    """The checker's truth would be wrong."""
    assert "".join(str(ladder.run_tools(d, [name])[0]) for d in range(10)) == PLAIN[name]


def test_checker_executes_the_chain_step_by_step():
    """Each step must start from the digit before it."""
    assert ladder.run_tools(3, ["inc", "dbl", "mir"]) == [4, 8, 1]
    assert ladder.score(task(3, "inc", "dbl"), "s1 inc 4 s2 dbl 8") == (1.0, True)
    for t in ladder.validation_tasks() + ladder.base_tasks()[:50]:
        assert ladder.score(t, answer(t)) == (1.0, True)


def test_reward_is_binary_for_every_single_wrong_digit():
    """One wrong digit in the middle would pass."""
    t = task(7, "hop", "sqr", "neg")
    words = answer(t).split()
    for i in (2, 5, 8):
        for digit in "0123456789":
            changed = words[:i] + [digit] + words[i + 1:]
            assert ladder.score(t, " ".join(changed)) == (float(changed == words), True)  # valid


# ---------------------------------------------------------------------------------------------
# task sets


def test_base_tasks_are_544_distinct_easy_chains():
    """Duplicates, hard tools or another number than the paper's."""
    base = ladder.base_tasks()
    assert len(base) == len({t.id for t in base}) == len({t.text for t in base}) == 544
    assert {t.origin for t in base} == {"base"}
    assert {len(t.spec["tools"]) for t in base} == {1, 2, 3}
    assert {s for t in base for s in t.spec["tools"]} == set(ladder.NAMES[:ladder.BASE_TOOLS])
    assert base == ladder.base_tasks()  # the same in every run


@pytest.mark.parametrize("split", ["validation", "tuning"])
def test_held_out_tasks_cover_all_rungs_equally(split):
    """Validation would be easier or harder than stated."""
    tasks = ladder.validation_tasks(None, split)
    assert Counter(ladder.category(t) for t in tasks) == {name: 10 for name in ladder.NAMES}
    assert {len(t.spec["tools"]) for t in tasks} == {2, 3}


# ---------------------------------------------------------------------------------------------
# the two roles


def test_prompts_of_both_roles():
    """The base model was trained on exactly these forms."""
    assert ladder.agent_prompt(SEED) == "3 s1 inc s2 dbl ="
    for success, bucket in ((None, "b?"), (0, "b0"), (0.5, "b4"), (0.95, "b8"), (1, "b8"),
                            (0.12, "b1")):
        assert ladder.env_prompt(SEED, success, 0.5) == f"vary {bucket} 3 s1 inc s2 dbl =>"


def test_written_task_is_read_back():
    """A task would change on its way through text."""
    t = ladder.parse_task(" 7 s1 tri s2 inc ", SEED, 4)
    assert t.spec == {"start": 7, "tools": ["tri", "inc"]} and t.text == "7 s1 tri s2 inc"
    assert (t.origin, t.seed_task, t.epoch) == ("env", SEED.id, 4)
    assert t.id == task(7, "tri", "inc").id


@pytest.mark.parametrize("text", [
    "", "3", "s1 inc", "3 inc", "3 s1", "3 s2 inc", "3 s1 inc s1 dbl", "3 s1 inc s3 dbl",
    "33 s1 inc", "-3 s1 inc", "x s1 inc", "3 s1 vary", "3 s1 inc =", "3 s1 inc 4", "² s1 inc",
    "٣ s1 inc", "3 s1 inc s2", "3 s01 inc", "vary b4 3 s1 inc =>", "3 3 s1 inc"])
def test_text_that_is_no_task_is_malformed(text):
    """Nonsense would be tried by the agent, or crash the run."""
    raised(InvalidTask, "^malformed$", ladder.parse_task, text, SEED, 1)


def test_each_other_reason_of_rejection():
    """The counts by reason, and with them the honesty of the validation, would be wrong."""
    held_out = ladder.validation_tasks()[0], ladder.validation_tasks(None, "tuning")[-1]
    for text, reason in ((SEED.text, "copy of the seed"),
                         ("3 " + ladder._chain(["inc"] * 6), "too long"),
                         *((t.text, "held-out task") for t in held_out)):
        raised(InvalidTask, f"^{reason}$", accepted, text)
    assert accepted("3 " + ladder._chain(["inc"] * 5))


def imagined(rng):
    """(seed task, text) of a demonstration of the simulator's role."""
    prompt, text = ladder._imagine(rng)
    head, bucket, *seed, arrow = prompt.split()
    assert head == "vary" and bucket in [*ladder.BUCKETS, ladder.UNKNOWN] and arrow == "=>"
    return task(int(seed[0]), *seed[2::2]), text


def test_what_the_base_learns_to_write_is_a_task():
    """The simulator would be trained on texts that its own parser refuses."""
    rng, reasons = random.Random(0), Counter()
    for _ in range(500):
        seed, text = imagined(rng)
        try:
            check_task(ladder, ladder.parse_task(text, seed, 1), seed, HELD_OUT)
        except InvalidTask as reason:
            reasons[str(reason)] += 1
    assert set(reasons) <= {"copy of the seed", "held-out task"} and sum(reasons.values()) < 50


# ---------------------------------------------------------------------------------------------
# the base model's demonstrations


def test_slips_rise_over_the_ladder_and_show_the_neighbours_effect():
    """Without them the base would be perfect, or fail at random instead of systematically."""
    rng, shown, slipped = random.Random(0), Counter(), Counter()
    for _ in range(6000):
        prompt, response = ladder._demonstrate(rng)
        words, digit = response.split(), int(prompt.split()[0])
        for name, result in zip(words[1::3], map(int, words[2::3])):
            truth, rung = int(PLAIN[name][digit]), ladder.RUNG[name]
            neighbour = int(PLAIN[ladder.NAMES[rung - 1 if rung else 1]][digit])
            wrong = neighbour if neighbour != truth else (truth + 5) % 10
            assert result in (truth, wrong)
            shown[name] += 1
            slipped[name] += result != truth
            digit = result
    for rung, name in enumerate(ladder.NAMES):
        expected = 0.05 + 0.9 * rung / 11
        assert slipped[name] / shown[name] == pytest.approx(expected, abs=0.05)
        assert ladder.slip_rate(rung) == pytest.approx(expected)


@pytest.mark.parametrize("world", [ladder, household])
def test_shipped_base_models_half_know_their_world(world):
    """A run would start from a model that knows everything or nothing, or that is not there."""
    o = genenv.Options(rank=4, device="cpu")
    policy, tasks = world.load_policy(o), world.validation_tasks(None, "tuning")
    assert next(policy.model.parameters()).dtype == torch.float32
    found = play(world, o, policy, None, tasks, 1, 1.0, policy.generator(0), 128)
    rewards = [attempt_score(world, task, *attempt)[0] for task, *attempt in zip(tasks, *found)]
    assert 0.1 < sum(rewards) / len(tasks) < 0.5


def test_a_base_model_is_trained_saved_and_named(tmp_path, monkeypatch, capsys):
    """One could not be made anew; or a folder of other words would be read as padding."""
    monkeypatch.setattr(ladder, "RECIPE", dict(steps=2, batch=2, lr=1e-3))
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert ladder.main(["train", seed, str(tmp_path / name)]) == 0
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c  # the same seed, the same bits
    tensors = load_file(tmp_path / "a" / "model.safetensors").values()
    assert {t.dtype for t in tensors} == {torch.float16}
    o = genenv.Options(base_model=str(tmp_path / "a"), rank=4, device="cpu")
    assert set(ladder.load_policy(o).params) == {"agent", "env"}
    for folder, what in ((tmp_path / "a", "does not know the words"), (tmp_path, "no base model in")):
        user_error(f"{what}.*python -m worlds.household train 0 {folder}", household.load_policy,
                   replace(o, base_model=str(folder)))
    assert ladder.main(["train", "x", str(tmp_path / "d")]) == 2 and not (tmp_path / "d").exists()
    assert "usage: python -m worlds.ladder [FOLDER | train SEED FOLDER" in capsys.readouterr().err
