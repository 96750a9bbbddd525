"""What a simulator may not get away with: worlds/leaks.py.

Run: python -m pytest tests/test_leaks.py -q
"""
import json

import pytest

from test_tool_calls import World, lines, make_task, options
from helpers import user_error
from worlds import InvalidTask, check_task, read_teacher, task_keys
from worlds.leaks import uncalled, ungrounded
from worlds.tool_calls import EXAMPLE_TASKS, teachable

LAMP = {"name": "lamp", "description": "Switch a lamp.", "parameters": {
    "type": "object", "required": ["room", "level"], "properties": {
        "room": {"type": "string"}, "level": {"type": "integer"},
        "quiet": {"type": "boolean"}, "colour": {"type": "string", "default": "red"},
        "days": {"type": "array", "items": {"type": "string"}}}}}
BELL = {"name": "ring", "description": "Ring the bell.", "parameters": {
    "type": "object", "required": ["room"], "properties": {"room": {"type": "string"}}}}
LEAKED, CHANCE, GROUND = "answer leaked", "more than one answer", "not in the request"
FAIR = "Light the lamp in the study at level 30."


def lamp(room="study", level=30, **more):
    """A call of LAMP."""
    return {"name": "lamp", "arguments": {"room": room, "level": level, **more}}


def task(text, *calls, tools=(LAMP, BELL), **more):
    """A record with calls; without them LAMP's in the study."""
    return {"task": text, "tools": list(tools), "calls": list(calls) or [lamp()], **more}


def ask(text, *reference):
    """A record with a question."""
    return {"task": text, "reference": list(reference)}


def noted(note):
    """LAMP's task with another description of the tool."""
    return task(FAIR, tools=[{**LAMP, "description": note}, BELL])


TRICKS = [  # (record, the reason; "" if it is a fair task)
    (task("Please do the usual thing with the light."), GROUND),
    (task("Light the lamp in the study."), GROUND), (task(FAIR, lamp(quiet=True)), GROUND),
    (task(FAIR, lamp(days=[])), GROUND), (task(FAIR, lamp(), lamp(colour="red")), CHANCE),
    (task("I want lamp(room='study', level=30)."), LEAKED),
    (task('Use { as in ｛"room": "st\u00adudy", "level": 30}.'), LEAKED),
    (noted("Say lamp(...) as you know."), LEAKED),
    (task("<tool_call> the lamp of the study at 30"), LEAKED),
    (ask("Frank Herbert wrote Dune. Who wrote Dune?", "Frank Herbert"), LEAKED),
    (ask("Which season is it?", "spring", "summer"), CHANCE),
    (task("The study's lamp on 30, quietly.", lamp(quiet=True)), ""),
    (task("Study lamp to 30, unquietly.", lamp(quiet=False)), ""),
    (task("Ring in the hall twice.", *2 * [{"name": "ring", "arguments": {"room": "hall"}}]), ""),
    (task("Clamp(s) aside: the study lamp at level 30."), ""),
    (ask("Which planet is larger, Jupiter or Saturn?", "Jupiter"), ""),
    (ask("Is 3 or 4 more than 3?", "4"), ""),
]


def verdict(world, record):
    """What the loop says of a record that the simulator wrote: "" if it is taken."""
    seed = ask("Who wrote the novel Emma?", "Jane Austen") if "reference" in record else \
        task("Ring the bell in the hall.", {"name": "ring", "arguments": {"room": "hall"}})
    seed = make_task(seed, "base")
    try:
        check_task(world, world.parse_task(json.dumps(record), seed, 0), seed, frozenset())
    except InvalidTask as reason:
        return str(reason)
    return ""


@pytest.fixture(scope="module")
def world():
    return World(options())


@pytest.mark.parametrize("record, reason", TRICKS)
def test_tricks_are_refused_under_their_name_and_fair_tasks_taken(record, reason, world):
    """RWR finds whatever holds the success rate at alpha without a task; false refusals starve
    it."""
    assert verdict(world, record) == reason


def test_a_teachers_fair_tasks_are_spared(tmp_path, world):
    """One false refusal would end the run; a teacher has several references and other words."""
    fair = [*map(json.loads, EXAMPLE_TASKS.read_text().splitlines()),
            ask("Which season?", "spring", "summer"), task("Light the lamp in the study.")]
    path = lines(tmp_path / "teacher.jsonl", [{"text": json.dumps(record)} for record in fair])
    assert len(read_teacher(world, path)) == len(fair)
    lines(tmp_path / "teacher.jsonl", [{"text": json.dumps(noted("Say lamp(...)!"))}])
    user_error("record 1: answer leaked", read_teacher, world, path)


GROUNDED = [  # (request, value, whether it stands there)
    ("In Berkeley, please", "Berkeley, CA", True),
    ("In Berkeley, please", "Boston, MA, USA, Berkeley", False),
    ("From Cooper station", "Cooperative", False),
    ("Historical novels, please", "history", True), ("São Paulo, please", "Sao Paulo", True),
    ("On April 1st, 2023 please", "2023-04-01", True), ("Next Monday please", "2023-04-01", False),
    ("Wake me at 7 pm today", "19:00", True),
    ("请给小明发送一条消息", "小明", True), ("请给小明发送一条消息", "小红", False),
    ("Three million people", 3e6, True), ("In the month of March", 3, True),
    ("At a rate of 7.5% a year", 0.075, True), ("$200,000 for the house", 200000, True),
    ("$200,000 for the house", 20000, False), ("For two hours, please", 120, True),
    ("It loses 3 degrees", -3, True), ("Whatever you like best", True, False),
    ("Show the hours as well", True, True), ("Dim it to thirty", 30, True),
    ("Dim it to thirty", 31, False),
    ("At st\u200budy and ｈａｌｌ", "study hall", True), ("In the study, please", "st\u00adudy", True),
    ("Not today, please", False, True), ("The hall and the study", ["hall", "attic"], False),
]


@pytest.mark.parametrize("text, value, stands", GROUNDED)
def test_values_in_a_request(text, value, stands):
    """Half of the words are enough, a third is not; numbers, dates and booleans are said in other
    ways."""
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"hours": {}}}}
    record = task(text, {"name": "f", "arguments": {"hours": value}}, tools=[tool])
    assert bool(ungrounded(make_task(record, "env"))) != stands


@pytest.mark.parametrize("text, left", [
    (FAIR, ""), ("The study lamp at level 30 on day 4.", "4"),
    ("At 19:30 the lamp in the study.", ""), ("Study lamp at 30, for 20 minutes.", "20"),
    ("The lamp 30 in the study, model 10-Q.", ""), ("Study lamp: 30 percent.", "")])
def test_what_a_request_names_and_no_call_has(text, left):
    """A written request often asks for more than its calls say; a right answer would earn
    nothing."""
    made = make_task(task(text), "base")
    assert uncalled(made) == left and bool(left) != teachable(made)
    assert not uncalled(make_task(task("The study lamp at 7 pm.", lamp(level=19)), "base"))
    assert not uncalled(make_task(ask("What is half of 30, on a Friday?", "15"), "env"))


HIDDEN = ["study\u200b", "st\u00adudy", "ｓｔｕｄｙ", "Study ", "s\u2060tudy", "\u2066study\u2069",
          "stu\ufe0fdy", "study\u3164", "st\U000e0041udy", "s\x08tudy"]


@pytest.mark.parametrize("room", HIDDEN)
def test_signs_that_nobody_sees_make_no_other_task_but_another_answer(room, world):
    """A held-out task would be trained on, as RWR keeps what passes."""
    plain = make_task(task(FAIR), "base")
    same_words = make_task(ask(FAIR.replace("study", room), "x"), "env")
    same_calls = make_task(task("Something else, please.", lamp(room)), "env")
    other = make_task(task("Something else, please.", lamp("attic")), "env")
    for copy in (same_words, same_calls):
        assert not task_keys(world, plain).isdisjoint(task_keys(world, copy))
    assert task_keys(world, plain).isdisjoint(task_keys(world, other))
    assert world.score(plain, world.gold(same_calls)) == (0.0, True)
