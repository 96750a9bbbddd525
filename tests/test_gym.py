"""reasoning-gym as a world: what is let in, lines, items, scores, the loop with scripted players.

Run: python -m pytest tests/test_gym.py -q
"""
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from zlib import crc32

import pytest
import torch

import genenv
import support.run
from helpers import raised, user_error
from micro_world import EOS, STATS, Scripted
from model.files import read_jsonl
from policy import Rollout
from worlds import InvalidTask, NO_SEED, gym

pytest.importorskip("reasoning_gym", reason="its users install it: worlds/README.md says how")

TEN = ("chain_sum,basic_arithmetic,spell_backward,products,gcd,lcm,base_conversion,count_bits,"
       "leg_counting,fraction_simplification")
LEVELS = json.loads(gym.TABLE.read_text())["levels"]
OPTIONS = replace(genenv.Options(), world="gym", **gym.World.DEFAULTS)


def options(families, **more):
    """Options of a run on these families."""
    return replace(OPTIONS, world_options={"families": families}, **more)


@pytest.fixture(scope="module")
def world():
    """The default families."""
    return gym.World(OPTIONS)


@pytest.fixture(scope="module")
def whole():
    """Every family of the table, without base and held-out tasks, of which it makes too many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gym.World, "make_splits", lambda self: {})
        return gym.World(options("all", max_response_tokens=10 ** 4))


# ---------------------------------------------------------------------------------------------
# families and items


def test_every_family_pays_its_own_answer_and_no_other_text_raises(whole):
    """A family would teach nothing, or one odd answer would end a run."""
    odd = ["?", "9" * 900, "[" * 900, "1e999999999", "nan", "[NaN, NaN]", "\ud800", "1/0"]
    for family in whole.levels:
        made = 0
        for number in range(5):
            try:
                task = whole.make(family, {}, number)
            except InvalidTask:  # now and then an item has no answer
                continue
            made += 1
            assert whole.score(task, "So: " + whole.gold(task)) == (1.0, True), family
        assert made >= 3, family
        for text in odd:
            response = f"<answer>{text}</answer>"
            reward, _ = whole.score(task, response)
            assert reward == 0, (family, text)
            assert 0 <= whole.graded(task, response, reward) < 1, (family, text)


def test_random_lines_are_made_within_a_second_each(whole):
    """What a model writes must not decide how long a run stands still."""
    draw, made = random.Random(0), 0
    for _ in range(100):
        family = draw.choice(list(whole.levels))
        line = gym.write_line(family, whole.random_levels(family, draw), draw.choice(gym.RUN))
        began = time.process_time()
        try:
            whole.parse_task(line, NO_SEED, 1)
            made += 1
        except InvalidTask as reason:
            assert str(reason) == "cannot be made", line
        assert time.process_time() - began < 2, line  # a second on an idle machine
    assert made >= 90


ITEMS = """
import json, random
from worlds import gym
draw, items = random.Random(5), []
for family, tops in list(json.loads(gym.TABLE.read_text())["levels"].items())[::3]:
    levels = {knob: draw.randint(0, top) for knob, top in tops.items()}
    try:
        item = gym.item_of(family, tuple(levels.items()), 7)[1]
        items.append([family, item["question"], item["answer"]])
    except gym.worlds.InvalidTask:
        items.append([family])
print(json.dumps(items))
"""


def test_a_line_makes_the_same_item_in_every_process():
    """A resumed run would score other answers than it asked for: some families go through a set."""
    printed = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        items = subprocess.check_output([sys.executable, "-c", ITEMS], env=env)
        printed.append(json.loads(items))
    assert len(printed[0]) >= len(LEVELS) // 3
    for one, other in zip(*printed):
        assert one == other


def test_families_that_may_not_in_are_refused_by_name():
    """Their scorers would run what a model wrote."""
    assert not set(gym.LEFT_OUT) & set(LEVELS)
    user_error("countdown may not in: its scorer evaluates", gym.World, options("gcd,countdown"))
    user_error("sokoban may not in", gym.World, options("sokoban"))
    user_error("did you mean chain_sum", gym.World, options("chain_sums"))
    user_error("sudoku: the answer is too long", gym.World, options("sudoku"))


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    """It would be a traceback from deep inside."""
    monkeypatch.setattr(gym, "find_spec", lambda name: None)
    user_error("pip install reasoning-gym", gym.World, OPTIONS)


# ---------------------------------------------------------------------------------------------
# the library


def test_what_takes_too_long_is_ended_and_leaves_no_trace(monkeypatch):
    """A run would stand still, or draw other numbers because an item was made."""
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
    raised(InvalidTask, "cannot be made", gym.item_of, "chain_sum", (), 8888)
    assert random.getstate() == state
    assert signal.getsignal(signal.SIGPROF) == handler
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_items_are_made_outside_of_the_main_thread(world):
    """Timers work in the main thread alone, and Python says so with an exception."""
    made = []
    thread = threading.Thread(target=lambda: made.append(world.make("chain_sum", {}, 999)))
    thread.start()
    thread.join()
    assert made[0].text


# ---------------------------------------------------------------------------------------------
# lines and scores


@pytest.mark.parametrize("line, reason", [
    ("", "malformed"), ("chain_sum", "malformed"), ("chain_sum item -1", "malformed"),
    ("chain_sum num_terms=1 num_terms=1 item 5", "malformed"),
    ("chain_sum num_terms=" + "9" * 10_000 + " item 5", "malformed"),
    ("chain_sum item " + "9" * 10_000, "malformed"), ("chain_sum item \u0665", "malformed"),
    ("sudoku item 5", "unknown family"), ("countdown item 5", "unknown family"),
    ("chain_sum word_len=1 item 5", "unknown knob"),
    ("chain_sum num_terms=99 item 5", "no such level"),
    ("chain_sum item 1000", "held-out number"),
    ("chain_sum num_terms=10 num_digits=9 item 1999", "held-out number")])
def test_lines_that_are_refused(world, line, reason):
    """They would be made, or end the run."""
    raised(InvalidTask, f"^{reason}$", world.parse_task, line, NO_SEED, 1)


def test_a_line_is_its_task_again(world):
    """The simulator would be shown other tasks than it wrote."""
    for task in world.base_tasks() + world.validation_tasks():
        family, levels, number = gym.read_line(world.line_of(task))
        assert world.make(family, levels, number, task.origin) == task
    # a knob that is left out is at its lowest
    short = world.parse_task("chain_sum item 5\n", NO_SEED, 1)
    assert short.spec["levels"] == {"num_terms": 0, "num_digits": 0}


@pytest.mark.parametrize("response, expected", [
    ("<answer>6</answer>", (1.0, True)), ("1+5 is <answer> 6\n</answer>, I think", (1.0, True)),
    ("<answer>5</answer> no, <answer>6</answer>", (1.0, True)), ("<answer>7</answer>", (0.0, True)),
    ("6", (0.0, False)), ("<answer>6", (0.0, False)), ("<answer> </answer>", (0.0, False)),
    ("6</answer><answer>", (0.0, False)), ("<answer>6</answer>" + " " * 10_000, (0.0, False))])
def test_an_answer_stands_between_the_last_tags(world, response, expected):
    """Thinking would be scored, or a right answer be lost."""
    task = next(task for task in world.base_tasks() if "1 + 5 =" in task.text)
    assert world.score(task, response) == expected


def test_a_scorer_that_pays_more_than_one_pays_nothing():
    """calendar_arithmetic pays exp(-error), and its error may be negative."""
    class Generous:
        def score_answer(self, answer, item):
            return 1.5

    assert gym.paid(Generous(), {}, "5") == 0


def test_a_warm_start_shows_the_levels_that_were_asked_for(world, monkeypatch):
    """The agent would imitate answers far beyond it, and held-out ones."""
    monkeypatch.setattr(gym, "ANSWERS", 40)
    monkeypatch.setattr(gym, "LINES", 20)
    higher = gym.World(options("chain_sum", max_task_tokens=48))
    higher.o.world_options["warm_levels"] = 1
    first = world.warm_start_pairs(0)
    lengths = []
    for pairs in (first, higher.warm_start_pairs(0)):
        asked = [prompt[1]["content"] for prompt, _ in pairs["agent"]]
        held_out = {task.text for task in higher.validation_tasks()}
        assert asked and held_out.isdisjoint(asked)
        lengths.append(max(len(text) for text in asked if "arithmetic problem" in text))
    assert lengths[0] < lengths[1] < lengths[0] + 15
    assert first == world.warm_start_pairs(0) != world.warm_start_pairs(1)
    for _, line in first["env"]:
        gym.read_line(line)


# ---------------------------------------------------------------------------------------------
# the loop


class Players(Scripted):
    """A simulator that writes random lines, and an agent that is right half of the time."""
    world = None

    def encode(self, prompt):
        """A text is one token."""
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        token = crc32(text.encode())
        self.words[token] = text
        return [token]

    def sample(self, adapter, prompts, G, max_new_tokens, temperature, generator, max_rows):
        draw = random.Random(int(torch.randint(2 ** 31, (), generator=generator)))
        rollouts = []
        for group, prompt in enumerate(prompts):
            for _ in range(G):
                if adapter == "env":
                    family = draw.choice(list(self.world.levels))
                    levels = self.world.random_levels(family, draw)
                    text = gym.write_line(family, levels, draw.randrange(1020))
                else:
                    right = self.world.golds[self.decode(prompt)]
                    text = draw.choice([right, "<answer>?</answer>"])
                response = [*self.encode(text), EOS]
                rollouts.append(Rollout(group, list(prompt), response, [-0.5, -0.5], ""))
        return rollouts


class Played(gym.World):
    """The world with these players, who know every answer."""

    def load_policy(self):
        players = Players(self.o)
        players.world = self
        return players

    def make(self, *given):
        task = super().make(*given)
        self.golds = getattr(self, "golds", {}) | {task.text: self.gold(task)}
        return task


def test_ten_families_end_to_end(tmp_path, monkeypatch):
    """What the simulator writes is made, tried, scored and learnt from, in a run as it is."""
    monkeypatch.setattr(support.run, "open_world", Played)
    monkeypatch.setattr(support.run, "check_texts_survive", lambda *given: None)
    monkeypatch.setattr(support.run.report, "write", lambda folder: None)
    for name in ("grpo_update", "rwr_update"):
        monkeypatch.setattr(genenv, name, lambda *given: dict(STATS))
    genenv.train(options(TEN, out=str(tmp_path / "r"), epochs=2, steps=2, G=4, val_samples=1))
    records = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    assert [r["epoch"] for r in records] == [0, 1, 2]
    for record in records[1:]:
        assert 0.4 < record["success_rate"] < 0.6
        assert record["distinct_tasks"] > 10 and record["env_kept"] > 0
        assert record["invalid"]["held-out number"] > 0
        assert 0.3 < record["validation"] < 0.7
    families = {r["task"]["spec"]["family"] for r in read_jsonl(tmp_path / "r" / "train.jsonl")}
    assert families == set(TEN.split(","))
