"""Every world keeps its contract, and the loop makes its checks for all of them.

Run: python -m pytest tests/test_worlds.py -q

The first part tests every world that is found in worlds/, including ones added later. A world that
needs more than the default options gets a line in GIVEN.
"""
import json
import random
import re
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_pool import Task, read_jsonl
import genenv
from helpers import Speaker, refused_with, user_error
from policy import Rollout
from support.options import parse_options
import worlds
from interaction import attempt_score, check_task, play, read_teacher, read_written
from worlds import InvalidTask, NO_SEED, held_out_keys, load_world, probe, task_keys, template

NAMES = [*worlds.world_names(), "template"]
for name, package in {"gym": "reasoning_gym", "alfworld": "alfworld"}.items():
    if find_spec(package) is None:  # only the users of this world install the package
        NAMES.remove(name)
GIVEN = {"tool_calls": dict(model="m", max_task_tokens=64, max_response_tokens=32),
         "gym": dict(max_response_tokens=64), "alfworld": dict(model="m")}
HOSTILE = ["", "\0", "1 " * 2 ** 19, "[" * 10_000, "{" * 10_000 + "}" * 10_000, "9" * 5000,
           "\ud800", "NaN", '{"task": {}}', '{"task": 1e400000}', "<tool_call>" * 3_000,
           "<tool_call>" + '{"a":' * 3_000 + "}" * 3_000 + "</tool_call>"]


def world_of(name, **options):
    """Return the world as a run makes it."""
    options = {**GIVEN.get(name, {}), **options}
    return load_world(name)(genenv.Options(world=name, **options))


@pytest.fixture(scope="module", params=NAMES)
def world(request):
    """Return every world in turn."""
    return world_of(request.param)


def some_tasks(world, n=30):
    """Return base tasks and tasks of both held-out splits, at most n of each."""
    splits = world.base_tasks(), world.validation_tasks(), world.validation_tasks("tuning")
    return [task for tasks in splits for task in tasks[:n]]


def score(world, task, text):
    """Return the reward of a text as a response."""
    return world.score(task, probe.response_of(world, task, text))[0]


# ---------------------------------------------------------------------------------------------
# the contract, for every world


def test_tasks_are_plain_json_and_their_gold_earns_one_after_a_round_trip(world):
    """Otherwise pools, checkpoints and the export would lose what JSON cannot hold, or score a task
    differently."""
    tasks = some_tasks(world, 10 ** 6)
    assert len({task.id for task in tasks}) == len(tasks) >= 6
    for task in some_tasks(world):
        back = Task(**json.loads(json.dumps(asdict(task))))
        assert back == task and score(world, Task("", back.spec), world.gold(task)) == 1.0
        assert score(world, task, "") == score(world, task, "x") == 0.0


def test_held_out_tasks_are_refused(world):
    """Otherwise validation would measure what was trained on (try_world checks the base tasks)."""
    held_out = held_out_keys(world)
    for split in ("validation", "tuning"):
        for task in world.validation_tasks(split)[:20]:
            refused_with(InvalidTask, "^held-out task$", check_task, world, task, NO_SEED, held_out)


def test_prompts_say_an_unknown_success_otherwise_than_any_known_one(world):
    """Otherwise the simulator would read 'never solves it' about tasks that nobody has tried."""
    for task in some_tasks(world, 5):
        prompts = [world.env_prompt(task, p) for p in (None, 0.0, 0.5, 1.0)]
        assert len({json.dumps(prompt) for prompt in prompts}) == 4


def mutated(text, rng):
    """Return a text with one part cut out, doubled or replaced."""
    i, j = sorted(rng.choices(range(len(text) + 1), k=2))
    j = min(j, i + 9)
    part = rng.choice(["", 2 * text[i:j], rng.choice('{}[]"\\\0:,0-9 e\ud800ſ٣\n<|>')])
    return text[:i] + part + text[j:]


def test_hostile_texts_are_refused_for_a_reason_that_is_counted(world):
    """Otherwise one odd text would end the run: a model that is being trained may write anything.
    """
    rng, refused = random.Random(0), 0
    seed_tasks, held_out = some_tasks(world), held_out_keys(world)
    good = [form for t in seed_tasks for form in (t.text, json.dumps({"task": t.text, **t.spec}))]
    texts = [*HOSTILE, *(mutated(rng.choice(good), rng) for _ in range(200))]
    for i, text in enumerate(texts):
        seed_task = seed_tasks[i % len(seed_tasks)] if i % 5 else NO_SEED
        assert score(world, seed_tasks[0], text) < 1  # the agent may write anything, too
        try:
            task = world.parse_task(text, seed_task, 3)
            check_task(world, task, seed_task, held_out)
        except InvalidTask as reason:
            assert str(reason) in (*world.REASONS, "copy of the seed", "held-out task"), reason
            refused += 1
        else:
            json.dumps(asdict(task)).encode("ascii")
            assert world.agent_prompt(task) and world.env_prompt(task, None)
    assert refused > 60


# ---------------------------------------------------------------------------------------------
# finding and probing worlds


def test_worlds_are_found_by_name():
    """Otherwise worlds would have to be listed, or a module without a class World would pass as
    one."""
    assert {"household", "ladder", "tool_calls"} <= set(worlds.world_names())
    for name in ("chess", "../x", "os"):
        user_error("unknown world .*ladder.*tool_calls", load_world, name)
    user_error("tiny_model.py must define class World", load_world, "tiny_model")


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Yield write(old, new), which saves the template with a change as worlds/copied.py."""
    (tmp_path / "worlds").mkdir()
    monkeypatch.chdir(tmp_path)  # its base model is written to runs/base
    monkeypatch.setattr(worlds, "__path__", [*worlds.__path__, str(tmp_path / "worlds")])

    def write(old="", new=""):
        source = Path(template.__file__).read_text().replace("steps=300", "steps=60")
        assert old in source
        (tmp_path / "worlds" / "copied.py").write_text(source.replace(old, new, 1))
        return tmp_path
    yield write
    sys.modules.pop("worlds.copied", None)


@pytest.mark.slow
def test_a_copy_of_the_template_runs_a_loop(copied):
    """Otherwise a fork would need more than one file."""
    out = copied("super().__init__(o)", "pass") / "run"  # a world may forget this call
    small = "--threads 1 --epochs 1 --steps 1 --seed-tasks 4 --val-samples 1 --rank 4".split()
    assert genenv.main(["--world", "copied", "--out", str(out), *small]) == 0
    assert [r["epoch"] for r in read_jsonl(out / "metrics.jsonl")] == [0, 1]


@pytest.mark.parametrize("old, new, message", [
    ("return [task.spec[\"tool\"]]", "return [task.spec[\"tools\"]]", "KeyError"),
    ('raise worlds.InvalidTask("malformed")', 'raise worlds.InvalidTask("bad")', "parse_task"),
    ("return float(is_right", "return 2 * float(is_right", "score"),
    ("    REASONS =", "    OPTIONS = 3\n    REASONS =", "OPTIONS"),
    ("[first::2]", "", "no task that another split has"),
    ("return list(HELD_OUT", "list(HELD_OUT", "validation_tasks"),
    ('"base", H', '"mine", H', "base_tasks"),
    ("def gold(self, task):", "def gold(self, task)", "SyntaxError"),
    ('number, "base", HELD_OUT)', 'number, "base")', "no task that another split has"),
    ('} ="', '}" + " ="*64', "model reads")])
def test_a_mistake_in_a_world_is_one_line_before_the_run(copied, old, new, message):
    """Otherwise a mistake would end the run in a traceback after an epoch, or make it train on
    held-out tasks."""
    copied(old, new)
    def start():
        probe.open_world(parse_options(["--world", "copied"])).load_policy()

    line = user_error(message, start)
    has_no_line = message in ("OPTIONS", "model reads")
    assert has_no_line or re.search(r"copied\.py.* line \d+", line)


def test_a_prompt_that_holds_the_answer_is_told_before_the_run(world, copied, capsys):
    """Otherwise the success rate could be 1 from the start, and would mean nothing."""
    probe.try_world(world)
    assert "right answer is in" not in capsys.readouterr().out  # in no world of ours
    if world.o.world == "template":
        copied('return f"{task.text} ="', 'return f"{task.text} {self.gold(task)} ="')
        probe.open_world(parse_options(["--world", "copied"]))
        assert "right answer is in" in capsys.readouterr().out


def test_models_that_lose_text_are_refused():
    """Otherwise right answers would be wrong on every task of a run, because the tokenizer changes
    letters or drops characters."""
    def encode(prompt):  # a token is a character
        if isinstance(prompt, str):
            return prompt
        return "".join(message["content"] for message in prompt)

    def survive(prompt=10 ** 5, response=10 ** 5, decode="".join, special=()):
        world = world_of("tool_calls", max_prompt_tokens=prompt, max_response_tokens=response)
        tokenizer = SimpleNamespace(added_tokens_decoder=dict(enumerate(special)))
        policy = SimpleNamespace(encode=encode, decode=decode, end_of_turn="", tokenizer=tokenizer)
        probe.check_texts_survive(world, policy)
        return world.base_tasks()[0].text.split()[0]

    word = survive()
    user_error("has the answer .* comes back as", survive, decode=str.upper)
    user_error(f"spells '{word}', a control token", survive, special=[word])
    user_error("--max-prompt-tokens", survive, prompt=64)
    user_error("--max-response-tokens", survive, response=64)


# ---------------------------------------------------------------------------------------------
# checks that the loop makes for all worlds


SEED, OTHER, HELD = (template.make(name, [1, 2, 3]) for name in ("inc", "dbl", "neg"))
TEMPLATE = world_of("template")


def test_what_the_simulator_writes_is_checked_and_counted_once():
    """Otherwise copies, held-out tasks, duplicates, or control tokens that are drawn or spelt out
    would be trained on."""
    texts = ["inc 1 2 4", "inc 1 2 3", "neg 1 2 3", "inc 1 2 4", "what", "dbl 1 1 1"]
    def reasons(*policies, limit="", o=TEMPLATE.o):
        rollouts = [Rollout(0, [], [text], limit=limit) for text in texts]
        held_out = task_keys(TEMPLATE, HELD)
        written = read_written(TEMPLATE, o, policies, rollouts, [SEED], epoch=1, held_out=held_out)
        return [w.reason for w in written]
    usual = ["", "copy of the seed", "held-out task", "duplicate in the batch", "malformed"]
    assert reasons(Speaker(texts)) == [*usual, ""]
    assert reasons(Speaker(texts, spoilt=texts[5:])) == [*usual, "special tokens"]
    assert reasons(Speaker(texts), limit="too many tokens") == ["truncated"] * 6
    # an agent on another model has other control tokens, and more tokens for the same text
    assert reasons(Speaker(texts), Speaker(texts, special=["dbl"]))[5] == "special tokens"
    o = replace(TEMPLATE.o, max_prompt_tokens=8)
    assert reasons(Speaker(texts), Speaker(texts, tokens=9), o=o)[5] == "prompt too long"


def test_an_answer_with_a_drawn_control_token_earns_nothing():
    """Otherwise GRPO would reinforce the token, which `decode` does not show."""
    gold = TEMPLATE.gold(OTHER)
    writer = Speaker([gold, gold + " "], spoilt=[gold + " "])
    rollouts, texts = play(TEMPLATE, TEMPLATE.o, writer, "agent", [OTHER], 2, 1.0, None)
    assert [attempt_score(TEMPLATE, OTHER, *attempt) for attempt in zip(rollouts, texts)] == [
        (1.0, True, 1.0), (0.0, False, 0.0)]


def test_a_teachers_file_passes_the_same_checks(tmp_path):
    """Otherwise held-out or malformed tasks would be trained on by way of a teacher's file."""
    path, held_out = tmp_path / "teacher.jsonl", task_keys(TEMPLATE, HELD)
    path.write_text(json.dumps({"text": OTHER.text}) + "\n")
    [task] = read_teacher(TEMPLATE, path, held_out)
    assert (task.id, task.origin) == (OTHER.id, "teacher")
    for text, reason in ((HELD.text, "held-out task"), ("dbl 1", "malformed")):
        path.write_text(json.dumps({"text": OTHER.text}) + "\n" + json.dumps({"text": text}))
        user_error(f"record 2: {reason}", read_teacher, TEMPLATE, path, held_out)
