"""The household: commands, planner, tasks as text, the two roles, and episodes in the loop.

Run: python -m pytest tests/test_household.py -q
"""
import random
import re
import time
from collections import Counter, deque
from dataclasses import replace
from types import SimpleNamespace

import pytest

from support.files import read_jsonl
import genenv
from helpers import Speaker, noisy, raised, tiny_lm, user_error
from policy import Policy
from worlds import InvalidTask, NO_SEED, attempt_score, household as h, play, transcript
from worlds.tiny_model import word_tokenizer

HOUSE = ("put clean mug in drawer . counter . mug in counter . plate in counter . drawer closed . "
         "apple in drawer . sink .")
TASK = h.solved(HOUSE)


def turns(task, *commands):
    """Observations of the commands, one after the other."""
    state = h.start(task)
    return [h.respond(task, state, command) for command in commands]


def reason(text):
    """Why a text is refused."""
    said = raised(InvalidTask, None, h.parse_task, text, NO_SEED, 0)
    assert said in h.REASONS
    return said


@pytest.fixture(autouse=True)
def words_mode(monkeypatch):
    """Tests that prepare a chat model leave the others alone."""
    monkeypatch.setitem(h._mode, "chat", False)
    monkeypatch.setitem(h._mode, "max_turns", h.OPTIONS["max_turns"][0])


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
    (["go to counter"], "go to fridge"),                             # not in this household
    (["go to counter"], "put mug in counter"),                       # not in hand
    (["go to counter", "take mug from counter"], "take plate from counter"),  # hand is full
    (["go to counter", "take mug from counter"], "clean mug with counter"),
    (["go to counter", "take mug from counter", "go to sink"], "heat mug with sink"),
    (["go to counter", "take mug from counter", "go to drawer"], "put mug in drawer"),  # closed
])
def test_commands_that_cannot_be_done_change_nothing(before, command):
    """An impossible command would have an effect, and a plan that needs it would be solvable."""
    state = h.start(TASK)
    for earlier in before:
        assert h.respond(TASK, state, earlier) not in (None, "nothing happens .")
    facts = state["facts"]
    assert h.respond(TASK, state, command) == "nothing happens ." and state["facts"] == facts


@pytest.mark.parametrize("text", ["", "\0", "go", "go to", "go to moon", "take", "put mug", "fly",
                                  "take unicorn from counter", "take counter from mug", "(" * 9999,
                                  "go to counter and open drawer", "x" * 2 ** 20, "ſink", "go " * 9,
                                  "open open drawer", "look look", "clean mug", "T", "P", "go to P",
                                  "__import__('os')", "take mug mug from counter", "\n\n"])
def test_what_is_no_command_is_none(text):
    """Nonsense would crash the episode, or be taken for a command."""
    started = time.time()
    state = h.start(TASK)
    assert h.read_command(text) is None
    assert h.respond(TASK, state, text) == "nothing happens ."
    assert state["facts"] == h.first_facts(TASK.spec)
    assert h.respond(TASK, state, text) is None  # patience is at an end
    assert h.score(TASK, text) == (0.0, False) and time.time() - started < 1


def test_endless_looking_ends():
    """A loop of `look` would hold its rollout until the token limit, every time."""
    assert turns(TASK, "look", "look") == ["you see nothing .", None]
    # what changes something starts the count anew
    assert None not in turns(TASK, *["go to sink", "look", "go to counter", "look"] * 50)
    assert h.score(TASK, "\n".join(["go to sink", "go to counter"] * 10 ** 5))[0] == 0


def test_goal_needs_place_treatment_and_every_object():
    """Half a goal would earn the whole reward."""
    both = h.solved("put hot egg and cup in table . table . sink . egg in sink . cup in sink . microwave .")
    plan = h.plan(both)
    assert h.score(both, plan) == (1.0, True)
    for missing in range(len(plan)):
        assert h.score(both, plan[:missing] + plan[missing + 1:])[0] == 0.0
    assert h.score(both, []) == (0.0, False) and h.score(both, plan[:-1]) == (0.0, True)
    assert h.score(both, [*plan, "sing"]) == (1.0, False)


# ---------------------------------------------------------------------------------------------
# the planner


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
    texts = ["put clean egg in table . table . egg in table . sink .",
             "put egg and cup in table . table . egg in table . sink . cup in sink .",
             "put cool egg and hot cup in sink . sink . egg in sink . fridge closed . cup in fridge . "
             "microwave .",
             "put mug in drawer . box closed . mug in box . drawer closed .",
             "put egg and cup in table . table . egg in table . cup in table . sink .",
             "put hot egg and cool cup in fridge . fridge closed . egg in fridge . cup in fridge . "
             "microwave closed ."]
    rng = random.Random(3)
    texts += [h.household(h.random_spec(rng, rung, 1)) for rung in h.RUNGS for _ in range(3)]
    for text in texts:
        task = h._task(h.read_household(text), "test")
        assert len(h.plan(task)) == shortest(task), text
        if h.plan(task):
            assert turns(task, *h.plan(task))[-1] is None


# ---------------------------------------------------------------------------------------------
# what the simulator writes


@pytest.mark.parametrize("text, expected", [
    ("", "malformed"), ("put mug in drawer", "malformed"), ("{}", "malformed"),
    (HOUSE.replace("mug", "unicorn"), "malformed"), (HOUSE.replace("sink", "moon"), "malformed"),
    (HOUSE + " " + HOUSE, "malformed"), ("put put mug in drawer . drawer . mug in drawer .", "malformed"),
    (HOUSE.replace("plate", "mug"), "inconsistent"),                    # the same object twice
    (HOUSE.replace("plate in counter", "plate in shelf"), "inconsistent"),  # in what is not there
    (HOUSE.replace("sink", "counter"), "inconsistent"),                 # a receptacle twice
    (HOUSE.replace("clean mug", "clean egg"), "inconsistent"),
    (HOUSE.replace("sink .", "sink closed ."), "inconsistent"),
    ("put mug in box . box . drawer in box . drawer . box in drawer . mug in drawer .",
     "inconsistent"),                                                   # a circle
    ("put mug in box . box . box in box . mug in box .", "inconsistent"),             # in itself
    (HOUSE.replace("sink", "fridge"), "unsolvable"),
    ("put hot mug in sink . sink . mug in sink .", "unsolvable"),
    ("put mug in sink . sink . mug in sink .", "nothing to do"),
    ("put mug in sink . counter . " + " . ".join(f"{x} in counter" for x in h.OBJECTS[:7]) + " . sink .",
     "too large"),
    ("put cool egg and hot cup in box . box closed . desk . egg in desk . drawer . cup in drawer . microwave . "
     "fridge .", "too long"),
    ("put cool egg and hot cup in box . box . desk . egg in desk . drawer . cup in drawer . microwave . "
     "fridge .", "")])
def test_reasons(text, expected):
    """A household that is none would become a task, or be counted under another reason."""
    if expected:
        assert reason(text) == expected
    else:
        assert h.task_length(h.parse_task(text, NO_SEED, 0)) == 12 == h.MAX_PLAN


@pytest.mark.parametrize("closed, max_turns, refused", [
    (0, 5, False), (4, 13, False), (4, 12, True), (2, 9, False), (2, 8, True)])
def test_a_household_that_takes_luck_is_refused(monkeypatch, closed, max_turns, refused):
    """Rewards would depend on the order in which an agent looks for a thing that it cannot see."""
    monkeypatch.setitem(h._mode, "max_turns", max_turns)
    text = "put mug in sink . drawer closed . mug in drawer . sink . " + "".join(
        f"{place} closed . " for place in ["cabinet", "box", "microwave", "fridge"][:closed])
    in_sight = h.parse_task(text.replace("drawer closed", "drawer"), NO_SEED, 0)
    assert h.task_length(in_sight) == 4  # no search: what is closed is of no interest
    if refused:
        assert reason(text) == "a matter of luck"
    else:
        assert h.task_length(h.parse_task(text, NO_SEED, 0)) == 5


def test_an_empty_receptacle_is_no_difference_but_the_goals_is():
    """A held-out household with one more shelf would be trained on; another lid is another rung."""
    held_out = h._held_out_keys()
    for task in h.validation_tasks():
        absent = next(place for place in h.RECEPTACLES if f"{place} " not in task.text)
        for more in (f" {absent} .", f" {absent} closed ." if absent in h.CLOSABLE else ""):
            assert h.same_task_key(h.solved(task.text + more)) in held_out
    text = "put mug in drawer . counter . mug in counter . drawer{} ."
    keys = [h.same_task_key(h.solved(text.format(lid))) for lid in ("", " closed")]
    assert keys[0] != keys[1]


def test_task_sets():
    """Validation would miss a rung, base tasks would hold hard ones."""
    assert len(h.base_tasks()) == 544 and {h.category(t) for t in h.base_tasks()} == {"place", "closed"}
    for split in ("validation", "tuning"):
        tasks = h.validation_tasks(None, split)
        assert Counter(map(h.category, tasks)) == dict.fromkeys(h.RUNGS, h.PER_RUNG)
        assert all(0 < h.task_length(t) <= h.MAX_PLAN for t in tasks)
        assert all(h.solved(t.text).id == t.id for t in tasks)  # none takes luck


# ---------------------------------------------------------------------------------------------
# the stand-in for an instruct model


def test_demonstrations_slip_at_their_rate(monkeypatch):
    """The base model would know everything, or nothing, of a rung."""
    rng, hits = random.Random(0), Counter()
    for rung in h.RUNGS:
        for task in (t for t in h.validation_tasks() if h.category(t) == rung):
            for _ in range(20):
                prompt, episode = h.demonstrate(task, rng)
                assert prompt == h.agent_prompt(task)
                spoken = re.split(r" <eos> .*? \. (?=[a-z]+ )", episode)
                hits[rung] += h.score(task, [t.split(" <eos>")[0] for t in spoken])[0] / 300
    assert hits["place"] > 0.9 and hits["both"] < 0.3
    assert hits["clean"] > hits["hot"] > hits["cool"]
    monkeypatch.setattr(h, "KINDS", dict.fromkeys(h.KINDS, 0))
    for task in h.validation_tasks():  # without slips the expert, who sees less, always succeeds
        assert h.score(task, h.slip(task, rng)) == (1.0, True)
        assert len(h.expert(task)) <= h.OPTIONS["max_turns"][0]


def test_variations_are_near_solvable_and_not_held_out(monkeypatch):
    """Pretraining would show validation tasks, or teach the simulator to write no tasks."""
    rng, rungs = random.Random(0), Counter()
    held_out = h._held_out_keys()
    for task in h.base_tasks()[:200]:
        new = h.vary(task, rng)
        assert h.parse_task(new.text, task, 1) and h.same_task_key(new) not in held_out
        rungs[h.RUNGS.index(h.category(new)) - h.RUNGS.index(h.category(task))] += 1
    assert rungs[0] > 60 and any(step > 1 for step in rungs)
    seen, draw = [], h._draw
    monkeypatch.setattr(h, "_draw", lambda *a: seen.append(draw(*a)) or seen[-1])
    while len(seen) < 600:
        h.pairs(rng, 20)
    assert not held_out & {h.same_task_key(t) for t in seen}
    assert len({h.same_task_key(t) for t in seen}) > 500


# ---------------------------------------------------------------------------------------------
# in the loop


def small_options(tmp_path, **given):
    own = {name: default for name, (default, _, _) in h.OPTIONS.items()}
    small = dict(epochs=1, steps=2, seed_tasks=2, variations=2, G=4, val_samples=1, env_updates=2,
                 env_batch=4, threads=1, gate=False, out=str(tmp_path / "run"), world_options=own)
    return replace(genenv.Options(), world="household", **{**h.DEFAULTS, **small, **given})


@pytest.fixture
def fake_base(monkeypatch):
    """An untrained model instead of the base model, which takes minutes to train; four of ten
    rewards are turned, or it would earn none."""
    noisy(monkeypatch, 0.4)

    def load_policy(o):
        return Policy(tiny_lm(0, vocab=len(h.WORDS), eos=list(range(1, 25))),  # turns end early
                      word_tokenizer(h.WORDS), rank=2, seed=o.seed)
    monkeypatch.setattr(h, "load_policy", load_policy)
    tasks = {split: h.validation_tasks(None, split)[:4] for split in ("validation", "tuning")}
    monkeypatch.setattr(h, "validation_tasks", lambda o=None, split="validation": tasks[split])


def test_play_scores_what_happened():
    """Turns of one rollout would reach another's household, or the score would be another's."""
    o = SimpleNamespace(max_response_tokens=8)
    plan = h.plan(TASK)
    replies = [plan, plan[:-1], ["look", "sing"], plan]
    rollouts, texts = play(h, o, Speaker(replies), "agent", [TASK, TASK], 2, 1.0, None, 8)
    scores = [attempt_score(h, TASK, r, text) for r, text in zip(rollouts, texts)]
    assert scores == [(1.0, True), (0.0, True), (0.0, False), (1.0, True)]
    assert [text[::2] for text in texts] == replies
    assert transcript(rollouts[1], texts[1]).split("\n")[:2] == ["> go to counter", "you see mug plate ."]
    assert transcript(rollouts[1], texts[1]).endswith("(too many turns)")


def test_a_run_of_episodes_is_resumed_inside_an_epoch(fake_base, tmp_path, monkeypatch):
    """The loop would fail on traces of turns, or train on observations. Episodes that go on after a
    stop would be others: their state lives in the rollout alone."""
    whole = genenv.train(small_options(tmp_path))
    record = read_jsonl(whole / "metrics.jsonl")[-1]
    assert record["written"] == 8 and sum(record["invalid"].values()) == 8  # an untrained simulator
    assert set(record["invalid"]) <= {*h.REASONS, "truncated", "duplicate in the batch"}
    samples = read_jsonl(whole / "samples.jsonl")
    assert any(trace["text"].startswith("> ") for s in samples for trace in s.get("traces", ()))
    assert all("*" in s["picture"] for s in samples if "task" in s)  # marks where things belong
    assert record["trained_tokens"] > 0 and record["response_length"] == 0 <= record["truncated"] < 1
    ask, o = genenv.checkpoint.stop_if_asked, small_options(tmp_path, out=str(tmp_path / "stopped"))

    def stop_at_once(run):
        run.stop = 15
        return ask(run)
    with monkeypatch.context() as patch, pytest.raises(genenv.checkpoint.Stopped):
        patch.setattr(genenv.checkpoint, "stop_if_asked", stop_at_once)
        genenv.train(o)
    stopped = genenv.train(replace(o, resume=True))
    for name in ("samples.jsonl", "adapters/agent/adapter_model.safetensors"):
        assert (whole / name).read_bytes() == (stopped / name).read_bytes()


def test_chat_prompts_and_observations():
    """A chat model would get the words of the tiny one."""
    h.prepare(replace(genenv.Options(), world="household", model="m"))
    prompt = h.agent_prompt(TASK)
    assert [m["role"] for m in prompt] == ["system", "user"]
    assert "Your task is to: put clean mug in drawer." in prompt[1]["content"]
    assert "apple" not in prompt[1]["content"] and "Counter. Mug in counter. Plate in counter." in prompt[1]["content"]
    assert turns(TASK, "Go to the drawer.", "open drawer") == ["Drawer is closed.", "You see apple."]
    known, unknown = (h.env_prompt(TASK, p, 0.5)[1]["content"] for p in (0.25, None))
    assert "25%" in known and "not yet known" in unknown and HOUSE in known


def _refuses(messages):
    from jinja2 import TemplateError
    raise TemplateError("no system role")


@pytest.mark.parametrize("encode, message", [(_refuses, "no system role"),
                                             (lambda messages: [0] * 5000, "--max-prompt-tokens")])
def test_chat_models_that_cannot_read_the_prompts_are_refused(monkeypatch, encode, message):
    """A traceback out of the template, in the first epoch."""
    o = replace(genenv.Options(), world="household", model="m")
    h.prepare(o)
    monkeypatch.setattr(Policy, "load", lambda *_, **__: SimpleNamespace(encode=encode))
    user_error(message, h.load_policy, o)
