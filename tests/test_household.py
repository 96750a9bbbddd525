"""The household: commands, planner, tasks as text, the two roles, and episodes in the loop.

Run: python -m pytest tests/test_household.py -q
"""
import random
import time
from collections import Counter, deque
from dataclasses import replace

import pytest

from helpers import Speaker, noisy, raised, tiny_lm
import genenv
from policy import Policy
from model.files import read_jsonl
from worlds import InvalidTask, NO_SEED, household as h
from worlds.play import attempt_score, play, transcript
from worlds.tiny_model import word_tokenizer

HOUSE = ("put clean mug in drawer . counter . mug in counter . plate in counter . drawer closed . "
         "apple in drawer . sink .")
TASK = h.solved(HOUSE)
OPTIONS = replace(genenv.Options(), world="household", **h.DEFAULTS)
TINY, CHAT = h.World(OPTIONS), h.World(replace(OPTIONS, model="m"))


def turns(task, *commands):
    """Observations of the commands, one after the other."""
    state = h.start(task)
    return [h.respond(task, state, command) for command in commands]


# ---------------------------------------------------------------------------------------------
# commands


def test_an_episode_in_its_phrasing():
    """The world would say something else than it does."""
    assert turns(TASK, "look", "go to counter", "take mug from counter", "go to sink",
                 "clean mug with sink", "go to drawer", "open drawer", "put mug in drawer") == [
        "you see nothing .", "you see mug plate .", "you take mug .", "you see nothing .",
        "you clean mug .", "drawer is closed .", "you see apple .", None]


@pytest.mark.parametrize("before, command", [
    ([], "take mug from counter"),                                   # not there yet
    (["go to counter"], "go to counter"),                            # there already
    (["go to drawer"], "take apple from drawer"),                    # closed
    (["go to counter"], "open counter"),                             # cannot be closed
    (["go to counter"], "put mug in counter"),                       # not in the hand
    (["go to counter", "take mug from counter"], "take plate from counter"),  # hand is full
    (["go to counter", "take mug from counter"], "clean mug with sink"),      # not at the sink
    (["go to counter", "take mug from counter", "go to sink"], "heat mug with sink"),
    ([], "go to fridge")])                                           # not in this household
def test_commands_that_do_nothing(before, command):
    """A precondition would be forgotten, and goals be reached by it."""
    state = h.start(TASK)
    for earlier in before:
        assert h.respond(TASK, state, earlier) not in (None, "nothing happens .")
    facts = state["facts"]
    assert h.respond(TASK, state, command) == "nothing happens ." and state["facts"] == facts


@pytest.mark.parametrize("text", ["", "\0", "go to", "go to moon", "take counter from mug", "(" * 9999,
                                  "go to counter and open drawer", "x" * 2 ** 20, "T", "go to P"])
def test_what_is_not_a_command_does_nothing_and_twice_ends_the_episode(text):
    """Nonsense would crash the episode, be taken for a command, or hold its rollout."""
    started, state = time.time(), h.start(TASK)
    assert h.read_command(text) is None
    assert h.respond(TASK, state, text) == "nothing happens ."
    assert h.respond(TASK, state, text) is None  # patience is at an end
    assert TINY.score(TASK, text) == (0.0, False) and time.time() - started < 1


def test_endless_looking_ends_and_what_changes_something_starts_the_count_anew():
    """A loop of `look` would hold its rollout until the token limit, every time."""
    assert turns(TASK, "look", "look") == ["you see nothing .", None]
    assert None not in turns(TASK, *["go to sink", "look", "go to counter", "look"] * 50)


def test_the_goal_needs_place_treatment_and_every_object():
    """Half a goal would earn the whole reward."""
    both = h.solved("put hot egg and cup in table . table . sink . egg in sink . cup in sink . microwave .")
    plan = list(h.plan(both))
    assert TINY.score(both, plan) == (1.0, True)
    for missing in range(len(plan)):
        assert TINY.score(both, plan[:missing] + plan[missing + 1:])[0] == 0.0
    assert TINY.score(both, []) == (0.0, False) and TINY.score(both, plan[:-1]) == (0.0, True)
    assert TINY.score(both, [*plan, "sing"]) == (1.0, False)


# ---------------------------------------------------------------------------------------------
# the planner, and what the simulator writes


def shortest(task, limit=10 ** 6):
    """Length of a shortest solution by brute force over every command there is."""
    spec, things = task.spec, [t for _, _, held in task.spec["house"] for t in held]
    known, queue = {h.first_facts(spec)}, deque([(h.first_facts(spec), 0)])
    while queue:
        facts, n = queue.popleft()
        if h.reached(spec, facts):
            return n
        for place, _, _ in spec["house"]:
            for verb in ("go", "open", "take", "put", *h.DONE_AT):
                for thing in things if verb not in ("go", "open") else [""]:
                    after = h.act(facts, verb, thing, place)
                    if after is not None and after not in known and len(known) < limit:
                        known.add(after)
                        queue.append((after, n + 1))


def test_plans_are_as_short_as_brute_force_finds():
    """task_length and solvability would be wrong where the planner prunes too much."""
    rng = random.Random(3)
    texts = ["put cool egg and hot cup in sink . sink . egg in sink . fridge closed . cup in fridge . "
             "microwave .",
             "put egg and cup in table . table . egg in table . sink . cup in sink .",
             *(h.household(h.random_spec(rng, rung, 1)) for rung in h.RUNGS for _ in range(3))]
    for text in texts:
        task = h.make_task(h.read_household(text), "test")
        assert len(h.plan(task)) == shortest(task), text
        assert not h.plan(task) or turns(task, *h.plan(task))[-1] is None


@pytest.mark.parametrize("text, expected", [
    ("", "malformed"), ("put mug in drawer", "malformed"), (HOUSE.replace("mug", "unicorn"), "malformed"),
    (HOUSE.replace("plate", "mug"), "inconsistent"),                    # the same object twice
    (HOUSE.replace("plate in counter", "plate in shelf"), "inconsistent"),  # in what is not there
    (HOUSE.replace("sink .", "sink closed ."), "inconsistent"),
    ("put mug in box . box . box in box . mug in box .", "inconsistent"),
    (HOUSE.replace("sink", "fridge"), "unsolvable"),
    ("put mug in sink . sink . mug in sink .", "nothing to do"),
    ("put mug in sink . counter . " + " . ".join(f"{x} in counter" for x in h.OBJECTS[:7]) + " . sink .",
     "too large"),
    ("put cool egg and hot cup in box . box closed . desk . egg in desk . drawer . cup in drawer . "
     "microwave . fridge .", "too long")])
def test_what_is_not_a_solvable_household_is_refused(text, expected):
    """It would become a task, or be counted under another reason."""
    raised(InvalidTask, f"^{expected}$", TINY.parse_task, text, NO_SEED, 0)


@pytest.mark.parametrize("closed, max_turns, refused", [(4, 13, False), (4, 12, True), (2, 8, True)])
def test_a_household_that_takes_luck_is_refused(closed, max_turns, refused):
    """Rewards would depend on the order in which an agent looks for a thing that it cannot see."""
    world = h.World(replace(OPTIONS, world_options={"max_turns": max_turns}))
    text = "put mug in sink . drawer closed . mug in drawer . sink . " + "".join(
        f"{place} closed . " for place in ["cabinet", "box", "microwave", "fridge"][:closed])
    assert world.task_length(world.parse_task(text.replace("drawer closed", "drawer"), NO_SEED, 0)) == 4
    if refused:
        raised(InvalidTask, "^a matter of luck$", world.parse_task, text, NO_SEED, 0)
    else:
        assert world.task_length(world.parse_task(text, NO_SEED, 0)) == 5


def test_an_empty_receptacle_makes_no_difference_but_the_goals_does():
    """A held-out household with one more shelf would be trained on; another lid is another rung."""
    for task in TINY.validation_tasks():
        absent = next(place for place in h.RECEPTACLES if f"{place} " not in task.text)
        assert TINY.same_task_key(h.solved(f"{task.text} {absent} .")) in h.held_out_keys()
    text = "put mug in drawer . counter . mug in counter . drawer{} ."
    keys = [h.key_of(h.solved(text.format(lid))) for lid in ("", " closed")]
    assert keys[0] != keys[1]


def test_task_sets_and_what_the_base_model_is_shown(monkeypatch):
    """Validation would miss a rung; pretraining would show validation tasks, or what is not a task."""
    assert {TINY.category(t) for t in TINY.base_tasks()} == set(h.BASE_RUNGS)
    for split in ("validation", "tuning"):
        tasks = TINY.validation_tasks(split)
        assert Counter(map(TINY.category, tasks)) == dict.fromkeys(h.RUNGS, h.PER_RUNG)
        assert all(h.solved(t.text).id == t.id for t in tasks)  # none takes luck
    rng, seen, draw = random.Random(0), [], h.draw
    for task in TINY.base_tasks()[:100]:
        assert h.key_of(TINY.parse_task(h.vary(task, rng).text, task, 1)) not in h.held_out_keys()
    monkeypatch.setattr(h, "draw", lambda *a: seen.append(draw(*a)) or seen[-1])
    while len(seen) < 300:
        TINY.pairs(rng, 20)
    assert not h.held_out_keys() & {h.key_of(t) for t in seen}


def test_demonstrations_slip_at_their_rate(monkeypatch):
    """The base model would know everything, or nothing, of a rung."""
    rng, hits = random.Random(0), Counter()
    for task in TINY.validation_tasks():
        for _ in range(10):
            hits[TINY.category(task)] += TINY.score(task, h.slip(task, rng))[0] / 150
    assert hits["place"] > 0.9 and hits["both"] < 0.3 and hits["clean"] > hits["hot"] > hits["cool"]
    monkeypatch.setattr(h, "KINDS", dict.fromkeys(h.KINDS, 0))
    for task in TINY.validation_tasks():  # without slips the expert, who sees less, always succeeds
        assert TINY.score(task, h.slip(task, rng)) == (1.0, True)


# ---------------------------------------------------------------------------------------------
# the two roles, and episodes in the loop


@pytest.mark.parametrize("world", [TINY, CHAT])
def test_the_agent_does_not_see_what_lies_in_closed_receptacles(world):
    """The household's one secret: episodes would be plans read off the prompt."""
    prompt = world.agent_prompt(TASK)
    text = (prompt if isinstance(prompt, str) else prompt[1]["content"]).lower()
    assert "apple" not in text and "mug in counter" in text and "drawer closed" in text
    opened = h.solved(HOUSE.replace("drawer closed", "drawer"))
    assert "apple in drawer" in str(world.agent_prompt(opened)).lower()  # nothing else hides it


def test_play_scores_what_happened():
    """Turns of one rollout would reach another's household, or the score would be another's."""
    plan = list(h.plan(TASK))
    replies = [plan, plan[:-1], ["look", "sing"], plan]
    rollouts, texts = play(TINY, OPTIONS, Speaker(replies), "agent", [TASK, TASK], 2, 1.0, None, 8)
    scores = [attempt_score(TINY, TASK, r, text) for r, text in zip(rollouts, texts)]
    assert [score[:2] for score in scores] == [(1.0, True), (0.0, True), (0.0, False), (1.0, True)]
    assert [text[::2] for text in texts] == replies
    spoilt = Speaker([plan])
    spoilt.has_control_tokens = lambda ids: ids == plan[-1:]
    rollout, text = (found[0] for found in play(TINY, OPTIONS, spoilt, "agent", [TASK], 1, 1.0, None, 8))
    assert attempt_score(TINY, TASK, rollout, text) == (0.0, False, 0.0)  # no text shows the token
    assert transcript(rollouts[1], texts[1]).split("\n")[:2] == ["> go to counter", "you see mug plate ."]


def test_a_run_of_episodes_is_resumed_inside_an_epoch(tmp_path, monkeypatch):
    """Episodes that go on after a stop would be others: their state lives in the rollout alone."""
    noisy(monkeypatch, 0.4)  # an untrained model would earn nothing
    lm = lambda: tiny_lm(0, vocab=len(h.WORDS), eos=list(range(1, 25)))  # turns end early
    monkeypatch.setattr(h.World, "load_policy", lambda self: Policy(
        lm(), word_tokenizer(h.WORDS), rank=2, seed=self.o.seed))
    monkeypatch.setattr(h.World, "validation_tasks", lambda self, split="validation": h.held_out()[split][:4])
    small = replace(OPTIONS, epochs=1, steps=2, seed_tasks=2, variations=2, G=4, val_samples=1, threads=1,
                    out=str(tmp_path / "whole"))
    whole = genenv.train(small)
    record = read_jsonl(whole / "metrics.jsonl")[-1]
    assert record["trained_tokens"] > 0 and record["written"] > 0
    ask, stopped = genenv.checkpoint.stop_if_asked, replace(small, out=str(tmp_path / "stopped"))

    def stop_early(run, *steps):
        run.stop = 15 * (run.state.epoch == 1 and not steps)  # within the epoch
        return ask(run, *steps)
    with monkeypatch.context() as patch, pytest.raises(genenv.checkpoint.Stopped):
        patch.setattr(genenv.checkpoint, "stop_if_asked", stop_early)
        genenv.train(stopped)
    genenv.train(replace(stopped, resume=True))
    for name in ("samples.jsonl", "adapters/agent/adapter_model.safetensors"):
        assert (whole / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()
