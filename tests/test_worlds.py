"""Every world keeps its contract, and what the loop checks for all of them is checked.

Run: python -m pytest tests/test_worlds.py -q

The first part runs over every world found in worlds/, later ones included. A world whose tasks or
options need more than the defaults gets a line in GIVEN.
"""
import json
import random
import shutil
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.files import read_jsonl
from data_pool import Task
import genenv
from helpers import raised, stub_run, toy_tokenizer, user_error
from policy import Rollout
from support.run import EpochState
import worlds
from worlds import InvalidTask, NO_SEED, check_task, held_out_keys, load_world, task_keys, template

NAMES = [*worlds.world_names(), "template"]
GIVEN = {"tool_calls": dict(model="m", max_task_tokens=64, max_response_tokens=32)}


def options(name):
    """What a world reads of the options."""
    world = load_world(name)
    own = {n: default for n, (default, _, _) in getattr(world, "OPTIONS", {}).items()}
    o = asdict(replace(genenv.Options(), world=name, **GIVEN.get(name, {})))
    return SimpleNamespace(**{**o, "world_options": own})


@pytest.fixture(scope="module", params=NAMES)
def given(request):
    """(world, its options), prepared."""
    world, o = load_world(request.param), options(request.param)
    world.prepare(o)
    return world, o


def some_tasks(world, o, n=30):
    """Tasks of the base and of both splits."""
    return [task for tasks in (world.base_tasks(o), world.validation_tasks(o, "validation"),
                               world.validation_tasks(o, "tuning")) for task in tasks[:n]]


def proper_prompt(prompt):
    """Text, or chat messages with role and content."""
    return isinstance(prompt, str) and prompt or prompt and all(
        set(m) == {"role", "content"} and isinstance(m["content"], str) for m in prompt)


# ---------------------------------------------------------------------------------------------
# the contract, for every world


def test_tasks_are_plain_json_with_distinct_ids(given):
    """Pools, checkpoints and the export would lose what JSON cannot hold."""
    world, o = given
    tasks = some_tasks(world, o, 10 ** 6)
    assert len({task.id for task in tasks}) == len(tasks) >= 6
    for task in tasks:
        assert task.text and Task(**json.loads(json.dumps(asdict(task)))) == task
    assert [t.id for t in world.base_tasks(o)] == [t.id for t in world.base_tasks(o)]
    assert {t.origin for t in world.base_tasks(o)} == {"base"}


def test_held_out_tasks_share_no_key_with_the_base_or_each_other(given):
    """Validation would measure what was trained on."""
    world, o = given
    keys = lambda tasks: {key for task in tasks for key in task_keys(world, task)}
    base, validation, tuning = (keys(tasks) for tasks in (
        world.base_tasks(o), world.validation_tasks(o, "validation"),
        world.validation_tasks(o, "tuning")))
    assert base and validation and tuning
    assert not base & validation and not base & tuning and not validation & tuning
    assert held_out_keys(world, o) == validation | tuning
    for task in world.validation_tasks(o, "tuning"):
        raised(InvalidTask, "^held-out task$", check_task, world, task, NO_SEED, held_out_keys(world, o))


def test_prompts_say_an_unknown_success_otherwise_than_any_known_one(given):
    """The simulator was told 'never solves it' of tasks that nobody had tried."""
    world, o = given
    for task in some_tasks(world, o):
        assert proper_prompt(world.agent_prompt(task))
        prompts = [world.env_prompt(task, p, 0.5) for p in (None, 0.0, 0.5, 1.0)]
        assert all(map(proper_prompt, prompts))
        assert len({json.dumps(prompt) for prompt in prompts}) == 4


def test_the_right_answer_earns_one_also_after_a_round_trip(given):
    """A spec that JSON changes would be scored otherwise in a resumed run, or by an export."""
    world, o = given
    if not hasattr(world, "gold"):
        pytest.skip("this world has no gold answers")
    for task in some_tasks(world, o):
        back = Task(**json.loads(json.dumps(asdict(task))))
        assert world.score(back, world.gold(task)) == (1.0, True)
        assert world.score(Task("", back.spec), world.gold(task))[0] == 1.0  # as the export does
        assert world.score(task, "")[0] == world.score(task, "x")[0] == 0.0


def test_figures_get_names_and_numbers(given):
    """Reports would fail in the middle of a run."""
    world, o = given
    for task in some_tasks(world, o):
        assert all(isinstance(skill, str) for skill in world.skills(task))
        assert world.task_length(task) > 0 and isinstance(world.category(task), str)


def mutated(text, rng):
    """A text with some characters cut, doubled, swapped or replaced."""
    chars = list(text)
    for _ in range(rng.randint(1, 4)):
        i = rng.randrange(len(chars) + 1)
        j = min(len(chars), i + rng.randint(0, 9))
        chars[i:j] = rng.choice(([], chars[i:j] * 2, chars[i:j][::-1],
                                 [rng.choice('{}[]"\\\0:,0-9 e\ud800ſ٣\n<|>')]))
    return "".join(chars)


def hostile_texts(world, o, n=200):
    """Seeded nonsense, from pure noise to tasks with a few characters wrong."""
    rng = random.Random(0)
    tasks = some_tasks(world, o)
    good = [form for t in tasks for form in (t.text, json.dumps({"task": t.text, **t.spec}))]
    noise = lambda: "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x2000)))) for _ in
                            range(rng.randrange(60)))
    texts = [noise() if rng.random() < 0.3 else mutated(rng.choice(good), rng) for _ in range(n)]
    leaky = {"task": tasks[0].text + "{" * 23 + "{}" * 10_000, **tasks[0].spec}
    return [*texts, json.dumps(leaky), *HOSTILE]


HOSTILE = ["", "\0", "x" * 2 ** 20, "1 " * 2 ** 19, "[" * 10_000, "{" * 10_000 + "}" * 10_000,
           '{"a":' * 10_000, "(" * 10_000, "9" * 5000, "\ud800", "null", "NaN", "{}",
           '{"task": {}}', '{"task": ' + "9" * 30_000 + "}", '{"task": 1e400000}',
           "<tool_call>" * 3_000, "<tool_call>" + '{"a":' * 3_000 + "}" * 3_000 + "</tool_call>"]


def test_hostile_texts_are_refused_for_a_reason_that_is_counted(given):
    """A model under training writes anything; one odd text would end the run."""
    world, o = given
    seed_tasks, started, refused = some_tasks(world, o), time.process_time(), 0
    held_out = held_out_keys(world, o)
    for i, text in enumerate(hostile_texts(world, o)):
        seed_task = seed_tasks[i % len(seed_tasks)] if i % 5 else NO_SEED
        assert world.score(seed_tasks[0], text)[0] < 1  # agents are under training too
        try:
            task = world.parse_task(text, seed_task, 3)
            check_task(world, task, seed_task, held_out)
        except InvalidTask as reason:
            assert str(reason) in (*world.REASONS, *worlds.CHECKS), reason
            refused += 1
        else:
            json.dumps(asdict(task)).encode("ascii")
            assert proper_prompt(world.agent_prompt(task))
            assert proper_prompt(world.env_prompt(task, None, 0.5))
    assert refused > 100 and time.process_time() - started < 10


def test_options_of_its_own_have_default_help_and_choices(given):
    """The command line is made from them."""
    world, o = given
    for name, (default, text, choices) in getattr(world, "OPTIONS", {}).items():
        assert name.isidentifier() and name not in asdict(genenv.Options())
        assert type(default) in (bool, int, float, str) and isinstance(text, str) and text
        assert choices is None or default in choices
        assert worlds.world_option(world, o, name) == default
        assert worlds.world_option(world, SimpleNamespace(), name) == default


# ---------------------------------------------------------------------------------------------
# finding worlds


def test_worlds_are_found_by_name():
    """No list to keep: a module with parse_task is a world, its helpers are none."""
    assert {"ladder", "tool_calls"} <= set(worlds.world_names())
    assert not {"tiny_model", "template", "__init__"} & set(worlds.world_names())
    assert load_world("template") is template
    for name in ("chess", "", "../x", "os", "a.b", "tool-calls"):
        user_error("unknown world .*: .*choose from .*ladder.*tool_calls", load_world, name)
    user_error("tiny_model.py is no world, it has no prepare", load_world, "tiny_model")


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The template under a new name, in a folder that worlds/ is extended by."""
    (tmp_path / "worlds").mkdir()
    shutil.copy(template.__file__, tmp_path / "worlds" / "mine.py")
    monkeypatch.setattr(worlds, "__path__", [*worlds.__path__, str(tmp_path / "worlds")])
    yield tmp_path
    sys.modules.pop("worlds.mine", None)


@pytest.mark.slow
def test_a_copy_of_the_template_runs_a_loop(copied, monkeypatch):
    """The promise to whoever forks: one file, no other line."""
    assert len(Path(template.__file__).read_text().splitlines()) < 60
    assert "mine" in worlds.world_names()
    mine = load_world("mine")
    real = mine.train
    monkeypatch.setattr(mine, "train", lambda *a, **k: real(*a, **{**k, "steps": 150}))
    code = genenv.main(["--world", "mine", "--out", str(copied / "run"), "--threads", "1",
                        "--epochs", "1", "--steps", "2", "--seed-tasks", "8", "--val-samples", "1",
                        "--rank", "4", "--env-updates", "2"])
    assert code == 0
    records = read_jsonl(copied / "run" / "metrics.jsonl")
    assert [r["epoch"] for r in records] == [0, 1]
    assert records[1]["distinct_tasks"] > 10
    assert set(records[1]["invalid"]) <= {"malformed", "copy of the seed", "held-out task",
                                          "truncated", "duplicate in the batch"}


def test_a_word_that_the_base_model_does_not_know_is_named(copied, monkeypatch, capsys):
    """A task of letters, and no letter in WORDS: each was read as padding, without a word."""
    mine = load_world("mine")
    monkeypatch.setattr(mine, "pairs", lambda rng, n: [("inc a b =", "b c")] * n)
    assert genenv.main(["--world", "mine", "--out", str(copied / "run"), "--threads", "1"]) == 2
    assert "WORDS lacks: a b c: add them" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------
# what is checked for all worlds


SEED, OTHER, HELD = (template.make(name, [1, 2, 3]) for name in ("inc", "dbl", "neg"))


def reason_for(world, task, seed_task=SEED, held_out=frozenset(), tokenizer=None):
    """The reason that check_task gives, empty if it lets the task pass."""
    try:
        check_task(world, task, seed_task, held_out, tokenizer)
        return ""
    except InvalidTask as reason:
        return str(reason)


@pytest.mark.parametrize("key", ["same", ("also", "same")])
def test_a_world_may_say_what_counts_as_the_same(key):
    """A rewording is a copy although its id is another."""
    world = SimpleNamespace(same_task_key=lambda task: key, leaks=lambda task: "answer leaked")
    assert reason_for(world, OTHER) == "copy of the seed"
    assert reason_for(world, OTHER, NO_SEED, frozenset(["same"])) == "held-out task"
    assert reason_for(world, OTHER, NO_SEED) == "answer leaked"


@pytest.mark.parametrize("text, spec", [
    ("do it <eos> now", {}), ("do it", {"note": "x<stop>y"}), ("do it", {"<bos>": 1}),
    ("do it", {"deep": [{"list": ["a", ["<pad>"]]}]})])
def test_control_tokens_are_refused_wherever_they_stand(text, spec):
    """Encoded again they would close the user's turn and speak for the assistant."""
    task = Task(text, {"n": 1, **spec})
    assert reason_for(template, task, tokenizer=toy_tokenizer()) == "special tokens"
    assert reason_for(template, task) == ""  # a policy without a tokenizer has none
    user_error("control token of this model: remove or reword it", worlds.refuse_special_tokens,
               [OTHER, task], toy_tokenizer())
    worlds.refuse_special_tokens([OTHER], toy_tokenizer())


def test_a_simulator_that_writes_control_tokens_is_counted(tmp_path):
    """Through the loop's own function: not kept, and under its name."""
    texts = ["inc 1 2 4", "inc 1 2 3", "neg 1 2 3", "inc 1 2 4", "what"]
    policy = SimpleNamespace(
        tokenizer=toy_tokenizer(), device="cpu", encode=lambda prompt: [1],
        decode=lambda ids: texts[ids[0]],
        sample=lambda *a, **k: [Rollout(0, [1], [i])
                                for i in range(len(texts))])
    world = SimpleNamespace(**{k: v for k, v in vars(template).items() if k[0] != "_"})
    world.parse_task = lambda *a: replace(template.parse_task(*a), text="inc <eos>") \
        if a[0] == "neg 1 2 3" else template.parse_task(*a)
    state = EpochState()
    def written(state, agent=policy, **options):
        run = stub_run(o=genenv.Options(**options), world=world, policy=agent, simulator=policy,
                       state=state, train_pool=SimpleNamespace(recent_p_hat=lambda *a: None))
        return [g.text for g in genenv.write_tasks(run, [SEED], len(texts), 0.5)]

    assert written(state) == texts[:1]
    assert state.invalid == {"copy of the seed": 1, "special tokens": 1, "malformed": 1,
                            "duplicate in the batch": 1}
    # an agent on another model: with control tokens of its own, and more tokens for the same text
    agent = lambda tokens, *special: SimpleNamespace(
        tokenizer=SimpleNamespace(all_special_tokens=special), device="cpu",
        encode=lambda prompt: [1] * tokens)
    for other, reason, n in ((agent(1, "inc"), "special tokens", 3), (agent(9), "prompt too long", 2)):
        state = EpochState()
        assert written(state, other, max_prompt_tokens=8) == [] and state.invalid[reason] == n


def test_a_teachers_file_passes_the_same_checks(tmp_path):
    """A teacher's task would otherwise be the one way for a held-out task to be trained on."""
    path = tmp_path / "teacher.jsonl"
    path.write_text(json.dumps({"text": OTHER.text}) + "\n")
    [task] = worlds.read_teacher(template, path, task_keys(template, HELD))
    assert (task.id, task.origin) == (OTHER.id, "teacher")
    for text, reason in ((HELD.text, "held-out task"), ("dbl 1", "malformed")):
        path.write_text(json.dumps({"text": OTHER.text}) + "\n" + json.dumps({"text": text}))
        user_error(f"record 2: {reason}", worlds.read_teacher, template, path, task_keys(template, HELD))
