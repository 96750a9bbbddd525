"""reasoning-gym as a world: which families are allowed, how lines become items, how answers score.

Run: python -m pytest tests/test_gym.py -q

Tests of the library's own items are marked `library`; all others run on a substitute for it.
"""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from data_pool import Task
import genenv
from helpers import refused_with, user_error
from worlds import InvalidTask, NO_SEED, gym
from interaction import attempt_score
from policy import Rollout
from scripts.export import compute_score

library = pytest.mark.skipif(find_spec("reasoning_gym") is None,
                             reason="needs reasoning-gym: worlds/README.md says how to install it")
TABLE = json.loads(gym.TABLE.read_text())
OPTIONS = replace(genenv.Options(), world="gym", **gym.World.DEFAULTS)


def options(families, **more):
    """Return the options of a run on these families."""
    return replace(OPTIONS, world_options={"families": families}, **more)


@pytest.fixture
def world(monkeypatch):
    """Return the world with its default families and a substitute for the library.

    The question of an item is its line, and the answer is its number. Any other answer is half
    right.
    """
    def make_item(family, levels, number):
        def score_answer(answer, item):
            return 1.0 if answer == item["answer"] else 0.5
        item = {"question": gym.write_line(family, levels, number), "answer": str(number)}
        return SimpleNamespace(score_answer=score_answer), item

    monkeypatch.setattr(gym.World, "PACKAGE", "")
    monkeypatch.setattr(gym, "make_item", make_item)
    gym.item_of.cache_clear()
    yield gym.World(OPTIONS)
    gym.item_of.cache_clear()


@pytest.fixture(scope="module")
def whole():
    """Return a world of all families, without the many base and held-out tasks that it has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gym.World, "make_splits", lambda *args: {})
        return gym.World(options("all", max_response_tokens=10 ** 4))


# ---------------------------------------------------------------------------------------------
# families and items


@library
def test_every_family_pays_its_own_answer_and_no_other_text_raises(whole):
    """Otherwise a family would teach nothing, or one odd answer would end a run."""
    odd = ["?", "9" * 900, "[" * 900, "1e999999999", "nan", "[NaN, NaN]", "\ud800", "1/0"]
    for family in whole.levels:
        n_items = 0
        for number in range(5):
            try:
                task = whole.make(family, {}, number)
            except InvalidTask:  # some items have no answer
                continue
            n_items += 1
            assert whole.score(task, "So: " + whole.gold(task)) == (1.0, True), family
        assert n_items >= 3, family
        for text in odd:
            response = f"<answer>{text}</answer>"
            reward, _ = whole.score(task, response)
            assert reward == 0, (family, text)
            assert 0 <= whole.graded(task, response, reward) < 1, (family, text)


ITEMS = """
import json, random
from worlds import gym
draw, items = random.Random(5), []
for family, tops in list(json.loads(gym.TABLE.read_text())["levels"].items())[::3]:
    levels = {knob: draw.randint(0, top) for knob, top in tops.items()}
    try:
        item = gym.item_of(gym.write_line(family, levels, 7))[1]
        items.append([family, item["question"], item["answer"]])
    except gym.worlds.InvalidTask:
        items.append([family])
print(json.dumps(items))
"""


@library
def test_a_line_makes_the_same_item_in_every_process():
    """Otherwise a resumed run would expect other answers, because some families iterate over a set.
    """
    printed = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        items = subprocess.check_output([sys.executable, "-c", ITEMS], env=env)
        printed.append(json.loads(items))
    assert len(printed[0]) >= len(TABLE["levels"]) // 3
    for one, other in zip(*printed):
        assert one == other


def test_families_that_are_excluded_are_refused_by_name(world):
    """Otherwise their scorers would run what a model wrote, or their answers would not fit."""
    assert not TABLE["left_out"].keys() & TABLE["levels"].keys()
    user_error("countdown is excluded: its scorer evaluates", gym.World, options("gcd,countdown"))
    user_error("gcd.*the answer is too long", gym.World, options("gcd", max_response_tokens=2))


@library
def test_a_level_means_its_own_values():
    """Otherwise a task of a high level would sometimes be easy."""
    for level in (0, 1, 4):
        for number in range(8):
            item = gym.make_item("chain_sum", {"num_terms": level, "num_digits": 0}, number)[1]
            assert len(re.findall("[0-9]+", item["question"])) == 2 + level


def test_random_levels_are_none_above_the_highest(world):
    """Otherwise the base would hold hard tasks, or lines would name levels that do not exist."""
    rng, tops = random.Random(0), world.levels["chain_sum"]
    drawn = [world.random_levels("chain_sum", rng) for _ in range(2000)]
    assert {knob: max(levels[knob] for levels in drawn) for knob in tops} == tops
    low = [world.random_levels("chain_sum", rng, 1) for _ in range(100)]
    assert {level for levels in low for level in levels.values()} == {0, 1}


# ---------------------------------------------------------------------------------------------
# the library


def test_what_takes_too_long_is_ended_and_leaves_no_trace(monkeypatch):
    """Otherwise a run would hang, or making an item would change the run's random numbers."""
    def stuck(*_):
        random.random()
        while True:
            try:
                time.process_time()
            except Exception:  # the library has such lines
                raise

    monkeypatch.setattr(gym, "make_item", stuck)
    monkeypatch.setattr(gym, "LIMIT", 0.05)
    state, handler = random.getstate(), signal.getsignal(signal.SIGPROF)
    refused_with(InvalidTask, "cannot be made", gym.item_of, "chain_sum item 8888")
    assert random.getstate() == state
    assert signal.getsignal(signal.SIGPROF) == handler
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


# ---------------------------------------------------------------------------------------------
# lines and scores


@pytest.mark.parametrize("line, reason", [
    ("chain_sum item -1", "malformed"), ("chain_sum num_terms=1 num_terms=1 item 5", "malformed"),
    ("chain_sum item " + "9" * 10_000, "malformed"), ("chain_sum item \u0665", "malformed"),
    ("countdown item 5", "unknown family"),
    ("chain_sum word_len=1 item 5", "no such level"),
    ("chain_sum num_terms=99 item 5", "no such level"),
    ("chain_sum item 1000", "held-out number")])
def test_lines_that_are_refused(world, line, reason):
    """Otherwise bad lines would become tasks, or end the run."""
    refused_with(InvalidTask, f"^{reason}$", world.parse_task, line, NO_SEED, 1)


def test_a_line_is_its_task_again(world):
    """Otherwise the simulator would be shown tasks that it did not write."""
    for task in world.base_tasks() + world.validation_tasks():
        family, levels, number = gym.read_line(gym.write_line(**task.spec))
        assert world.make(family, levels, number, task.origin) == task
    # a knob that is left out takes its lowest level
    short = world.parse_task("chain_sum item 5\n", NO_SEED, 1)
    assert short.spec["levels"] == {"num_terms": 0, "num_digits": 0}


@pytest.mark.parametrize("response, expected", [
    ("1+5 is <answer> 6\n</answer>, I think", (1.0, True)),
    ("<answer>5</answer> no, <answer>6</answer>", (1.0, True)), ("<answer>7</answer>", (0.0, True)),
    ("<answer>6", (0.0, False)), ("<answer> </answer>", (0.0, False)),
    ("6</answer><answer>", (0.0, False))])
def test_an_answer_is_between_the_last_tags(world, response, expected):
    """Otherwise thinking would be scored, or a right answer would be lost."""
    assert world.score(world.make("chain_sum", {}, 6), response) == expected


def test_graded_is_what_the_scorer_pays_for_a_nearly_right_answer(world):
    """Otherwise --agent-reward graded would have no effect."""
    task = world.make("chain_sum", {}, 6)
    for answer, expected in (("6", (1.0, True, 1.0)), ("7", (0.0, True, 0.5))):
        text = f"<answer>{answer}</answer>"
        assert attempt_score(world, task, Rollout(0, [], []), text) == expected


def test_a_trainer_scores_on_any_thread(world):
    """Otherwise veRL, which scores on its own threads, would end in a traceback."""
    truth = json.dumps(world.make("chain_sum", {}, 6).spec)
    with ThreadPoolExecutor() as threads:
        score = threads.submit(compute_score, "genenv/gym", "<answer>6</answer>", truth)
    assert score.result() == 1


def test_a_scorer_that_pays_more_than_one_pays_nothing():
    """Otherwise a wrong answer would pay best, because calendar_arithmetic pays exp(-error) and its
    error may be negative."""
    generous = SimpleNamespace(score_answer=lambda answer, item: 1.5)
    assert gym.paid(generous, {}, "5") == 0


def test_a_warm_start_shows_the_levels_that_were_asked_for(world, monkeypatch):
    """Otherwise the agent would imitate answers to tasks that are far too hard, or held out."""
    def questions():
        return {prompt[1]["content"] for prompt, _ in world.warm_start_pairs(0)["agent"]}

    first = world.warm_start_pairs(0)
    assert first == world.warm_start_pairs(0) != world.warm_start_pairs(1)
    for _, line in first["env"]:
        gym.read_line(line)
    for highest in (2, 0):
        monkeypatch.setitem(world.o.world_options, "warm_levels", highest)
        lines = [gym.read_line(question) for question in questions()]
        assert max(level for _, levels, _ in lines for level in levels.values()) == highest
    held_out = questions().pop()
    monkeypatch.setitem(world.splits, "tuning", [Task(held_out, {})])
    assert held_out not in questions()
