"""ALFWorld's engine as a world: its texts, its PDDL facts, and, with the packages, its games.

Run: python -m pytest tests/test_alfworld_world.py -q
"""
import random
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest

import genenv
from eval import alfworld as official
from helpers import refused_with, user_error
from worlds import InvalidTask, NO_SEED, alfworld as a, household as h, held_out_keys
from worlds.alfworld_text import question

HOME = ("put clean mug in drawer . counter . mug in counter . plate in counter . drawer closed . "
        "apple in drawer . sink .")
OPTIONS = replace(genenv.Options(), world="alfworld", model="m", **a.World.DEFAULTS)
needs_engine = pytest.mark.skipif(
    not find_spec("alfworld"),
    reason="needs ALFWorld's engine: worlds/README.md says how to install it")


@pytest.fixture(scope="module")
def world():
    """Return the world as a run makes it."""
    return a.World(OPTIONS)


# ---------------------------------------------------------------------------------------------
# texts and facts, without the packages


def test_the_facts_say_what_the_text_says():
    """Otherwise the engine would play a different household from the one that was written."""
    facts = a.facts_of(a.make_task(HOME).spec)
    assert sorted(facts.splitlines()) == [
        "(inReceptacle apple_1 drawer_1) (objectAtLocation apple_1 at_drawer)",
        "(inReceptacle mug_1 countertop_1) (objectAtLocation mug_1 at_countertop)",
        "(inReceptacle plate_1 countertop_1) (objectAtLocation plate_1 at_countertop)",
        "(opened countertop_1)", "(opened sinkbasin_1)",
        "(receptacleAtLocation countertop_1 at_countertop)",
        "(receptacleAtLocation drawer_1 at_drawer)",
        "(receptacleAtLocation sinkbasin_1 at_sinkbasin)"]
    text = "put two mug in sink . sink . desk . mug in desk . mug in sink ."
    two = a.facts_of(a.make_task(text).spec)
    assert "mug_1 sinkbasin_1" in two and "mug_2 desk_1" in two


def test_the_problem_knows_every_name_that_a_text_may_have():
    """Otherwise the translator would fail on a valid text."""
    known = set(re.findall(r"[a-z]\w*", a.PROBLEM.partition("(:init")[0]))
    for place in h.RECEPTACLES:
        spec = {"house": [[place, False, h.OBJECTS * 2]]}
        names = re.findall(r"[a-z]+_[a-z0-9]+", a.facts_of(spec))
        assert set(names) <= known and len(set(names)) == 22


LOOK_ALIKES = ["mug) (won", "m\u0443g", "mu\uff47", "\uff4d\uff55\uff47", "mug\u200b", "{recep}",
               "#look.feedback#", "mug_1", "mug 1", "agent1", "(:goal", "mug\\n", "UNKNOWN GOAL"]


@pytest.mark.parametrize("word", LOOK_ALIKES)
def test_look_alikes_of_a_word_are_refused(word):
    """Otherwise a model's text would become PDDL, or a grammar rule that the engine evaluates."""
    for text in (HOME.replace("mug", word), HOME.replace("plate", word), HOME + word,
                 HOME.replace("drawer", word), f"{word} {HOME}"):
        refused_with(InvalidTask, "^(malformed|inconsistent)$", a.make_task, text)


def test_facts_come_from_the_words_of_the_household_only():
    """Otherwise a letter whose lower case is an ASCII letter would itself reach the engine."""
    # the Kelvin sign is a k in lower case
    kelvin = HOME.replace("drawer closed", "drawer").replace("drawer", "des\u212a")
    for text in (HOME.upper(), kelvin, HOME.replace(" ", "\u00a0\n")):
        assert re.fullmatch(r"[a-zA-Z_0-9 ()\n]+", a.facts_of(a.make_task(text).spec))
    assert a.make_task(kelvin).spec["target"] == "desk"


@pytest.mark.parametrize("text, reason", [
    ("", "malformed"), ("x" * 10_000, "too large"), ("(" * 500, "malformed"),
    (HOME.replace("clean", "sliced"), "malformed"),
    (HOME.replace("put clean mug", ""), "malformed"),
    (HOME + " sink .", "inconsistent"), (HOME + " mug in sink . mug in sink .", "inconsistent"),
    (HOME.replace("mug in drawer", "mug and plate in drawer"), "malformed"),
    (HOME.replace("mug in counter", "egg in counter"), "inconsistent")])
def test_what_is_no_home_is_refused_for_its_reason(text, reason):
    """Otherwise such a text would reach the engine, or be counted under another reason."""
    refused_with(InvalidTask, f"^{reason}$", a.make_task, text)
    assert reason in a.World.REASONS


def test_splits_have_every_goal_larger_homes_held_out_and_nothing_in_common():
    """Otherwise validation would measure what was trained on, or miss a kind of goal."""
    homes = {"base": h.base(), **h.held_out()}
    splits = {split: a.with_goals(tasks) for split, tasks in homes.items()}
    for tasks in splits.values():
        assert set(Counter(task.spec["goal"][0][0] for task in tasks).values()) == {5}
    largest = {split: max(len(task.spec["house"]) for task in tasks)
               for split, tasks in splits.items()}
    assert largest == {"base": 5, "validation": 6, "tuning": 6}
    held_out = [h.key_of(task) for split in ("validation", "tuning") for task in splits[split]]
    assert len(set(held_out)) == 60
    # over six turns, a warm start shows every base home with every goal
    shown = {h.key_of(task) for turn in range(6) for task in a.with_goals(h.base(), turn)}
    assert shown.isdisjoint(held_out) and len(shown) == 180


def test_the_prompt_is_that_of_the_official_games():
    """Otherwise an agent would practise on prompts unlike those it is scored with."""
    record = {"observation": "You see.", "history": [], "admissible": ["look", "help"]}
    user = official.prompt(record)[1]["content"]
    assert user == "You see.\n\n" + question(["look", "help"])


def test_the_world_says_what_it_needs(monkeypatch):
    """Otherwise a run without the packages would fail late, or a file of tasks would be ignored."""
    monkeypatch.setattr(a.World, "PACKAGE", "no_such_package")
    user_error("textworld", a.World, OPTIONS)
    monkeypatch.setattr(a.World, "PACKAGE", "")
    user_error("makes its own tasks", a.World, replace(OPTIONS, base_tasks="t.jsonl"))


# ---------------------------------------------------------------------------------------------
# games


def won(world, task, commands):
    """Return whether these commands win the game of a task."""
    return world.score(task, list(commands))[0] == 1


@needs_engine
def test_the_planners_commands_win_every_kind_of_goal_and_fail_with_one_left_out(world):
    """Otherwise a goal could not be reached, or would earn its reward without being reached."""
    for task in world.base_tasks()[:6] + world.validation_tasks()[:6]:
        turns = world.gold(task).split("\n")
        assert world.score(task, turns) == (1.0, True), task.text
        for missing in range(len(turns)):
            assert not won(world, task, turns[:missing] + turns[missing + 1:])
        assert world.score(task, []) == (0.0, False)
        assert world.score(task, [*turns[:-1], "sing"]) == (0.0, False)


@needs_engine
def test_an_episode_in_its_phrasing(world):
    """Otherwise the agent would not see what the engine prints, or nonsense would have an effect.
    """
    task = world.parse_task(HOME, NO_SEED, 0)
    [_, user] = world.agent_prompt(task)
    assert user["content"].startswith("-= Welcome to TextWorld, ALFRED! =-")
    assert "Your task is to: put a clean mug in drawer." in user["content"]
    assert "apple" not in user["content"] and "plate" not in user["content"]
    state, feedback = world.start(task), []
    for turn in ("dance", "I go there: \\boxed{Go to  DRAWER 1}", "open drawer 1", "\\boxed{}"):
        feedback.append(world.respond(task, state, turn).split("\n\nCommands you can give now:")[0])
    assert feedback == ["Nothing happens.", "You arrive at drawer 1. The drawer 1 is closed.",
                        "You open the drawer 1. The drawer 1 is open. In it, you see a apple 1.",
                        "Nothing happens."]
    assert state == [task.text, "go to drawer 1", "open drawer 1"]


@needs_engine
def test_there_are_enough_turns_to_search_the_largest_home(world):
    """Otherwise a reward would depend on where an agent first looks for a hidden thing."""
    boxes = " . ".join(f"{place} closed" for place in h.CLOSABLE)
    text = f"{boxes} . counter . desk . shelf . mug in fridge . mug in microwave ."
    for goal in ("put two mug in drawer", "put hot mug in drawer", "put lit mug in drawer"):
        task = world.parse_task(f"{goal} . {text}", NO_SEED, 0)
        search = []
        for place, closed, _ in task.spec["house"]:
            search.append(f"go to {a.NAMES.get(place, place)} 1")
            if closed:
                search.append(f"open {place} 1")
        plan = world.gold(task).split("\n")
        turns = [*search, *(turn for turn in plan if "open" not in turn)]
        assert len(turns) <= world.max_turns and won(world, task, turns), goal


@needs_engine
def test_attempts_that_take_turns_see_their_own_games(world):
    """Otherwise the shared engine would show an attempt what another attempt has done."""
    one, two = world.base_tasks()[:2]
    attempts = []
    for task, turns in ((one, one), (one, two), (two, two)):
        attempts.append((task, ["dance", *world.gold(turns).split("\n")]))
    expected = []
    for task, turns in attempts:
        # play this attempt by itself, in an engine that has seen no other
        for function in (a.moment, a.engine):
            function.cache_clear()
        state = world.start(task)
        expected.append([world.respond(task, state, turn) for turn in turns])
    observations, states = [[], [], []], [world.start(task) for task, _ in attempts]
    for n in range(max(map(len, expected))):
        for (task, turns), state, observed in zip(attempts, states, observations):
            observed += [world.respond(task, state, turn) for turn in turns[n:n + 1]]
        a.moment.cache_clear()  # whatever the cache has forgotten is played again
    assert observations == expected


@needs_engine
def test_odd_households_are_tasks_or_refused_in_time(world, monkeypatch):
    """Otherwise one odd text would end a run, or hold it up."""
    rng, good, reasons = random.Random(0), [task.text for task in world.base_tasks()], Counter()
    monkeypatch.setattr(sys, "argv", ["genenv.py"])
    for _ in range(300):
        words, reason = rng.choice(good).split(), "a task"
        words[rng.randrange(len(words))] = rng.choice([*h.OBJECTS, *h.RECEPTACLES, "(:goal", "{x}"])
        began = time.process_time()
        try:
            world.parse_task(" ".join(words), NO_SEED, 0)
        except InvalidTask as error:
            reason = str(error)
        assert time.process_time() - began < 2, words
        reasons[reason] += 1
    assert {"a task", "unsolvable"} <= reasons.keys() <= {"a task", *world.REASONS}
    assert sys.argv == ["genenv.py"]  # the translator sets sys.argv


@needs_engine
def test_a_warm_start_shows_won_episodes_and_valid_texts(world):
    """Otherwise the model would imitate episodes that fail, or tasks that are held out."""
    held_out = held_out_keys(world)
    pairs = world.warm_start_pairs(1)
    for task, (prompt, episode) in zip(world.base_tasks(), pairs["agent"]):
        assert prompt == world.agent_prompt(task) and won(world, task, episode[::2])
    for _, text in pairs["env"][:12]:
        assert h.key_of(world.parse_task(text, NO_SEED, 0)) not in held_out
