"""The household: commands, planner, tasks as text, the two roles, and episodes in the loop.

Run: python -m pytest tests/test_household.py -q
"""
import random
from collections import Counter, deque
from copy import deepcopy
from dataclasses import replace

import pytest

from data_pool import Task, read_jsonl
from helpers import Speaker, refused_with, tiny_lm
import genenv
import interaction
from policy import Policy, Rollout
from worlds import InvalidTask, NO_SEED, household as h
from interaction import attempt_score, play, transcript
from worlds.tiny_model import word_tokenizer

HOUSE = ("put clean mug in drawer . counter . mug in counter . plate in counter . drawer closed . "
         "apple in drawer . sink .")
TASK = h.solved(HOUSE)
OPTIONS = replace(genenv.Options(), world="household", **h.World.DEFAULTS)
WORLD = h.World(OPTIONS)


def turns(task, *commands):
    """Return the observation after each of the commands."""
    state = h.start(task)
    return [h.respond(task, state, command) for command in commands]


# ---------------------------------------------------------------------------------------------
# commands


def test_an_episode_in_its_phrasing():
    """Otherwise the world would not answer in its documented phrases."""
    assert turns(TASK, "look", "go to counter", "take mug from counter", "go to sink",
                 "clean mug with sink", "go to drawer", "open drawer", "put mug in drawer") == [
        "you see nothing .", "you see mug plate .", "you take mug .", "you see nothing .",
        "you clean mug .", "drawer is closed .", "you see apple .", None]


CARRY = ["go to counter", "take mug from counter"]


@pytest.mark.parametrize("before, command", [
    ([], "take mug from counter"),                           # not there yet
    (["go to counter"], "go to counter"),                    # there already
    (["go to drawer"], "take apple from drawer"),            # closed
    (["go to counter"], "open counter"),                     # cannot be closed
    (["go to counter"], "put mug in counter"),               # not in the hand
    (CARRY, "take plate from counter"),                      # hand is full
    (CARRY, "clean mug with sink"),                          # not at the sink
    ([*CARRY, "go to sink"], "heat mug with sink"),
    ([], "go to fridge")])                                   # not in this household
def test_commands_that_do_nothing(before, command):
    """Otherwise a goal could be reached without a command's precondition."""
    state = h.start(TASK)
    for earlier in before:
        assert h.respond(TASK, state, earlier) not in (None, "nothing happens .")
    before = deepcopy({**state, "idle": 1})
    assert h.respond(TASK, state, command) == "nothing happens ." and state == before


@pytest.mark.parametrize("text", [
    "", "go to", "go to moon", "take counter from mug", "go mug to counter",
    "go to counter and open drawer"])
def test_what_is_not_a_command_does_nothing_and_twice_ends_the_episode(text):
    """Otherwise nonsense would crash the episode, or be taken for a command."""
    assert turns(TASK, text, text) == ["nothing happens .", None]  # the second one ends it
    assert WORLD.score(TASK, [text]) == (0.0, False)


def test_endless_looking_ends_and_a_change_starts_the_count_again():
    """Otherwise a loop of `look` would run to the token limit, or a useful episode would end."""
    assert turns(TASK, "look", "look") == ["you see nothing .", None]
    assert None not in turns(TASK, *["go to sink", "look", "go to counter", "look"] * 50)


def test_the_goal_needs_place_treatment_and_every_object():
    """Otherwise half a goal would earn the full reward."""
    task = h.solved("put hot egg and cup in table . table . sink . egg in sink . cup in sink . "
                    "microwave .")
    plan = list(h.plan(task))
    assert WORLD.score(task, plan) == (1.0, True)
    for missing in range(len(plan)):
        assert WORLD.score(task, plan[:missing] + plan[missing + 1:])[0] == 0.0
    assert WORLD.score(task, []) == (0.0, False) and WORLD.score(task, plan[:-1]) == (0.0, True)
    assert WORLD.score(task, [*plan, "sing"]) == (1.0, False)


# ---------------------------------------------------------------------------------------------
# the planner, and what the simulator writes


def shortest(task):
    """Return the length of a shortest solution, found by brute force over every command."""
    state = h.start(task)
    known, queue = {repr(state)}, deque([(state, 0)])
    while queue:
        state, n = queue.popleft()
        if h.reached(task.spec, state):
            return n
        for command in h.COMMANDS.values():
            if not h.does_something(task.spec, state, *command):
                continue
            after = deepcopy(state)
            h.execute(after, *command)
            after["treated"] = sorted(set(after["treated"]))
            if repr(after) not in known:
                known.add(repr(after))
                queue.append((after, n + 1))


def test_plans_are_as_short_as_brute_force_finds():
    """Otherwise task_length would be wrong, or a solvable task would be refused."""
    rng = random.Random(3)
    texts = ["put cool egg and hot cup in sink . sink . egg in sink . fridge closed . "
             "cup in fridge . microwave .",
             "put egg and cup in table . table . egg in table . sink . cup in sink ."]
    for rung in h.RUNGS:
        texts += [h.household(h.random_spec(rng, rung, 1)) for _ in range(3)]
    for text in texts:
        task = Task(text, h.read_household(text))
        plan = h.plan(task)
        assert len(plan) == shortest(task), text
        assert not plan or turns(task, *plan)[-1] is None


MANY = " . ".join(f"{thing} in counter" for thing in h.OBJECTS[:7])


@pytest.mark.parametrize("text, expected", [
    ("", "malformed"), (HOUSE.replace("mug", "unicorn"), "malformed"),
    (HOUSE.replace("plate", "mug"), "inconsistent"),                    # the same object twice
    (HOUSE.replace("plate in counter", "plate in shelf"), "inconsistent"),  # the shelf is missing
    (HOUSE.replace("sink .", "sink closed ."), "malformed"),
    (HOUSE.replace("clean mug", "bowl"), "inconsistent"),               # the bowl is missing
    (HOUSE.replace("in drawer . counter", "in desk . counter"), "inconsistent"),
    ("put mug in box . box . box in box . mug in box .", "malformed"),
    (HOUSE.replace("sink", "fridge"), "unsolvable"),
    ("put mug in sink . sink . mug in sink .", "nothing to do"),
    (f"put mug in sink . counter . {MANY} . sink .", "too large"),
    ("put cool egg and hot cup in box . box closed . desk . egg in desk . drawer . cup in drawer . "
     "microwave . fridge .", "too long")])
def test_what_is_not_a_solvable_household_is_refused(text, expected):
    """Otherwise such a text would become a task, or be counted under another reason."""
    refused_with(InvalidTask, f"^{expected}$", WORLD.parse_task, text, NO_SEED, 0)


def test_a_household_that_takes_luck_is_refused(monkeypatch):
    """Otherwise rewards would depend on where an agent first looks for a hidden thing."""
    text = ("put mug in sink . drawer closed . mug in drawer . sink . cabinet closed . box closed ."
            " fridge closed .")
    monkeypatch.setattr(h, "MAX_TURNS", 11)
    assert len(h.plan(h.solved(text))) == 5
    monkeypatch.setattr(h, "MAX_TURNS", 10)
    refused_with(InvalidTask, "^a matter of luck$", h.solved, text)
    # here the mug lies in the open, so no receptacle needs to be searched
    assert len(h.plan(h.solved(text.replace("drawer closed", "drawer")))) == 4


def test_an_empty_receptacle_makes_no_difference_but_the_goals_does():
    """Otherwise a held-out household with one more shelf would be trained on, or a household with
    another lid would pass as held out."""
    for task in WORLD.validation_tasks():
        absent = next(place for place in h.RECEPTACLES if f"{place} " not in task.text)
        assert WORLD.same_task_key(h.solved(f"{task.text} {absent} .")) in h.held_out_keys()
    text = "put mug in drawer . counter . mug in counter . drawer{} ."
    open_one, closed_one = (h.key_of(h.solved(text.format(lid))) for lid in ("", " closed"))
    assert open_one != closed_one


def test_task_sets_miss_no_rung():
    """Otherwise validation would miss a rung."""
    for split in ("validation", "tuning"):
        rungs = Counter(map(WORLD.category, WORLD.validation_tasks(split)))
        assert rungs == dict.fromkeys(h.RUNGS, h.PER_RUNG)


def test_what_the_base_model_is_shown_is_not_held_out(monkeypatch):
    """Otherwise the base model would be trained on validation tasks."""
    drawn, random_task = [], h.random_task

    def draw_and_keep(*arguments):
        drawn.append(random_task(*arguments))
        return drawn[-1]

    def keys_shown():
        drawn.clear()
        WORLD.pairs(random.Random(0), 20)
        drawn.append(h.vary(TASK, random.Random(0)))
        return set(map(h.key_of, drawn))

    monkeypatch.setattr(h, "random_task", draw_and_keep)
    held_out = keys_shown()
    monkeypatch.setattr(h, "held_out_keys", lambda: held_out)
    assert held_out.isdisjoint(keys_shown())


# ---------------------------------------------------------------------------------------------
# the two roles, and episodes in the loop


def test_the_agent_does_not_see_what_lies_in_closed_receptacles():
    """Otherwise the agent could read its plan off the prompt."""
    prompt = WORLD.agent_prompt(TASK)
    assert "apple" not in prompt and "mug in counter" in prompt and "drawer closed" in prompt
    opened = h.solved(HOUSE.replace("drawer closed", "drawer"))
    assert "apple in drawer" in WORLD.agent_prompt(opened)  # only the lid hides it


def test_play_scores_what_happened():
    """Otherwise an episode would act in another task's household or earn its score, or GRPO would
    reinforce a control token, which no text shows."""
    other = h.solved("put egg in table . table . sink . egg in sink .")
    one, two = list(h.plan(TASK)), list(h.plan(other))
    spoilt = two[-1] + " "
    replies = [one, one[:1], two, [*two[:-1], spoilt]]
    speaker, tasks = Speaker(replies, spoilt=[spoilt]), [TASK, TASK, other, other]
    rollouts, texts = play(WORLD, OPTIONS, speaker, "agent", tasks[1:3], 2, 1.0, None)
    scores = [attempt_score(WORLD, *attempt) for attempt in zip(tasks, rollouts, texts)]
    assert scores == [(1.0, True, 1.0), (0.0, True, 0.0), (1.0, True, 1.0), (0.0, False, 0.0)]
    # observations come from the attempt's own household; the last one is None
    for task, reply, text in zip(tasks, replies, texts):
        turns_made = len(text[::2])
        observations = [*text[1::2], None][:len(reply)]
        assert observations == turns(task, *reply)[:turns_made]
    assert transcript(rollouts[0], texts[0]).startswith("> go to counter\nyou see mug plate .\n")


def test_an_attempt_that_met_a_limit_earns_nothing_and_counts_as_cut_off():
    """Otherwise an agent that never finishes would look like one that answers wrongly, or a task
    that nobody solves in time like one that cannot be scored."""
    text = [part for command in h.plan(TASK) for part in (command, "")]
    for limit, valid in (("too many turns", True), ("too many tokens", False)):
        trace = interaction.trace_of(WORLD, TASK, Rollout(0, [], [], limit=limit), text)
        assert (trace.reward, trace.valid, trace.truncated, trace.graded) == (0, valid, True, 0)


def test_a_run_of_episodes_is_learnt_from(tmp_path, monkeypatch):
    """Otherwise episodes would end the run in an error, or would not reach the updates."""
    few = {split: tasks[:4] for split, tasks in h.held_out().items()}
    monkeypatch.setattr(h, "held_out", lambda: few)
    # a random model whose turns end early; it would earn nothing, so attempt_score is replaced
    lm = tiny_lm(vocab_size=len(h.WORDS), eos_token_id=list(range(1, 25)))
    policy = Policy(lm, word_tokenizer(h.WORDS), rank=2)
    monkeypatch.setattr(h.World, "load_policy", lambda world: policy)
    monkeypatch.setattr(interaction, "attempt_score",
                        lambda world, task, rollout, text: (rollout.tokens % 2, True, 0))
    folder = genenv.train(replace(OPTIONS, epochs=1, steps=2, seed_tasks=2, variations=2, G=4,
                                  val_samples=1, threads=1, out=str(tmp_path / "r")))
    record = read_jsonl(folder / "metrics.jsonl")[-1]
    assert record["trained_tokens"] > 0 and record["written"] > 0
    [trial] = read_jsonl(folder / "train.jsonl")[-1:]
    assert trial["traces"][0]["text"].startswith("> ")
