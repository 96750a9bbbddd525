"""A simulator's tricks, which worlds/tools/leaks.py refuses, and fair tasks, which it accepts.

Run: python -m pytest tests/test_leaks.py -q
"""
import json

import pytest

from test_tool_calls import DOOR, LIGHT, World, call, light, lines, make_task, options, question, \
    record, tool
from helpers import user_error
from interaction import check_task, read_teacher
from worlds import InvalidTask, task_keys
from worlds.tools.leaks import uncalled, ungrounded
from worlds.tool_calls import EXAMPLE_TASKS, teachable

LEAKED, CHANCE, GROUND = "answer leaked", "more than one answer", "not in the request"
FAIR = "Light in the hall at level 5, please."
OPEN = call("lock.door", locked=False)


def noted(note):
    """Return a record that is fair except for a note in the description of a tool."""
    return record(FAIR, tools=[{**LIGHT, "description": note}, DOOR])


TRICKS = [  # (record, the reason; "" if it is a fair task)
    (record("Light in the hall."), GROUND), (record(FAIR, light(quiet=True)), GROUND),
    (record(FAIR, light(hours=[])), GROUND), (record(FAIR, light(), light(colour="white")), CHANCE),
    (record("Light in the hall at level 5 for 20 minutes."), "not in the calls"),
    (record("I want set_light(room='hall', level=5)."), LEAKED),
    (record('Use { as in ｛"room": "ha\u00adll", "level": 5}.'), LEAKED),
    (noted("Say set_light(...) as you know."), LEAKED),
    (record("<tool_call> the light of the hall at 5"), LEAKED),
    (question("Frank Herbert wrote Dune. Who wrote Dune?"), LEAKED),
    (question("Which season is it?", "spring", "summer"), CHANCE),
    (record("The hall's light on 5, quietly.", light(quiet=True)), ""),
    (record("Hall light to 5, unquietly.", light(quiet=False)), ""),
    (record("Reset_light(s) aside: the hall light at level 5."), ""),
    (question("Which planet is larger, Jupiter or Saturn?", "Jupiter"), ""),
]


def verdict(world, written):
    """Return why the loop refuses a record that the simulator wrote, or "" if it accepts it."""
    is_question = "reference" in written
    seed = question("Who wrote Emma?", "Austen") if is_question else record("Unlock it.", OPEN)
    seed = make_task(seed, "base")
    try:
        check_task(world, world.parse_task(json.dumps(written), seed, 0), seed, frozenset())
    except InvalidTask as reason:
        return str(reason)
    return ""


@pytest.fixture(scope="module")
def world():
    return World(options())


@pytest.mark.parametrize("written, reason", TRICKS)
def test_tricks_are_refused_under_their_name_and_fair_tasks_taken(written, reason, world):
    """Otherwise RWR would find tricks that hold the success rate at alpha, or false refusals would
    leave it without tasks."""
    assert verdict(world, written) == reason


def test_a_teachers_fair_tasks_are_spared(tmp_path, world):
    """Otherwise one false refusal would end the run, or a leaked answer would be trained on."""
    fair = [*map(json.loads, EXAMPLE_TASKS.read_text().splitlines()),
            question("Which season?", "spring", "summer"), record("Light in the hall.")]
    path = lines(tmp_path / "teacher.jsonl", [{"text": json.dumps(task)} for task in fair])
    assert len(read_teacher(world, path)) == len(fair)
    lines(tmp_path / "teacher.jsonl", [{"text": json.dumps(noted("Say set_light(...)!"))}])
    user_error("record 1: answer leaked", read_teacher, world, path)


GROUNDED = [  # (request, value, whether it is mentioned)
    ("In Berkeley, please", "Berkeley, CA", True),
    ("In Berkeley, please", "Boston, MA, USA, Berkeley", False),
    ("From Cooper station", "Cooperative", False), ("Historical novels, please", "history", True),
    ("At S\u00e3o Paulo's st\u200budy", "Sao Paulo study", True),
    ("On April 1st, 2023 please", "2023-04-01", True), ("Next Monday please", "2023-04-01", False),
    ("请给小明发送一条消息", "小明", True), ("请给小明发送一条消息", "小红", False),
    ("$200,000 for the house", 200000, True), ("It loses 3 degrees", -3, True),
    ("Dim it to 35, please", 30, False), ("Whatever you like best", True, False),
    ("Show the hours as well", True, True), ("Not today, please", False, True),
    ("The hall and the study", ["hall", "attic"], False),
]


@pytest.mark.parametrize("text, value, is_mentioned", GROUNDED)
def test_values_in_a_request(text, value, is_mentioned):
    """Otherwise fair tasks would be refused for another form of a word, or guesses would pass."""
    written = record(text, call("f", hours=value), tools=[tool("f", hours={})])
    assert bool(ungrounded(make_task(written, "env"))) != is_mentioned


def test_what_a_request_names_and_no_call_has():
    """Otherwise a request would ask for more than its calls do, and right answers earn nothing."""
    for text, left in ((FAIR, ""), ("At 19:30 the light in the hall: 5.", ""),
                       ("Hall light at 5, for 20 minutes.", "20"),
                       ("The light 5 in the hall, model 10-Q.", "")):
        made = make_task(record(text), "base")
        assert uncalled(made) == left and bool(left) != teachable(made), text


def test_characters_that_look_alike_make_no_other_task_but_another_answer(world):
    """Otherwise a disguised held-out task would be trained on, or a disguised answer would pass."""
    plain = make_task(record(FAIR), "base")
    for room in ("ha\u200bll", "ｈａｌｌ", "Hall ", "ha\ufe0fll", "h\u0430ll"):
        same_words = make_task(question(FAIR.replace("hall", room), "x"), "env")
        same_calls = make_task(record("Something else, please.", light(room=room)), "env")
        for copy in (same_words, same_calls):
            assert not task_keys(world, plain).isdisjoint(task_keys(world, copy)), room
        assert world.score(plain, world.gold(same_calls)) == (0.0, True)
