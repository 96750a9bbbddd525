"""What a simulator may not get away with: worlds/leaks.py and worlds/grounding.py.

Run: python -m pytest tests/test_leaks.py -q
"""
import base64
import json
from pathlib import Path

import pytest

from helpers import user_error
from data_pool import Task
from worlds import InvalidTask, check_task, read_teacher
from worlds import tool_calls as world
from worlds.grounding import uncalled, ungrounded

LAMP = {"name": "lamp", "description": "Switch a lamp.", "parameters": {
    "type": "object", "required": ["room", "level"], "properties": {
        "room": {"type": "string"}, "level": {"type": "integer"},
        "quiet": {"type": "boolean"}, "colour": {"type": "string"},
        "days": {"type": "array", "items": {"type": "string"}}}}}
BELL = {"name": "ring", "description": "Ring the bell.", "parameters": {
    "type": "object", "required": ["room"], "properties": {"room": {"type": "string"}}}}
CODED = base64.b64encode(b"study").decode()
LEAKED, CHANCE, NOTHING, GROUND = ("answer leaked", "more than one answer", "nothing to answer",
                                   "not in the request")
FAIR = "Light the lamp in the study at level 30."


def lamp(room="study", level=30, **more):
    """A call of LAMP."""
    return {"name": "lamp", "arguments": {"room": room, "level": level, **more}}


def task(text, *calls, tools=(LAMP, BELL), **more):
    """A record with calls; without them LAMP's in the study."""
    return {"task": text, "tools": list(tools), "calls": list(calls) or [lamp()], **more}


def lamp_with(note="", **schemas):
    """LAMP with other schemas of some arguments and another description."""
    properties = {**LAMP["parameters"]["properties"], **schemas}
    return {**LAMP, "description": note or LAMP["description"],
            "parameters": {**LAMP["parameters"], "properties": properties}}


def ask(text, *reference):
    """A record with a question."""
    return {"task": text, "reference": list(reference)}


ROOMS = {"type": "string", "enum": ["study", "hall"]}
NOTES = {"room": {"type": "string", "description": "Now room = study"},
         "level": {"type": "integer", "description": "Now level = 30"}}
TRICKS = {  # what: (record, the reason; "" where it is still open)
    # to be met by chance
    "the usual thing": (task("Please do the usual thing with the light."), GROUND),
    "boolean nobody asked for": (task(FAIR, lamp(quiet=True)), GROUND),
    "optional argument out of the air": (task(FAIR, lamp(colour="green")), GROUND),
    "value out of the air": (task("Light the lamp in the study."), GROUND),
    "one of an enum, and nothing said": (task("Light a lamp at level 30.", tools=[
        lamp_with(room=ROOMS)]), GROUND),
    "an empty list": (task(FAIR, lamp(days=[])), GROUND),
    "twin tools": (task(FAIR, tools=[LAMP, {**LAMP, "name": "light"}]), CHANCE),
    "an order nobody asked for": (task("Study lamp at level 30, hall lamp at level 5.", lamp(),
                                       lamp("hall", 5), ordered=True), CHANCE),
    "the same call three times": (task(FAIR, lamp(), lamp(), lamp()), CHANCE),
    # the text describes the draw, and it takes a reader to see that: open
    "a coin": (task("Toss a coin: heads is the study, tails the hall. Level 30 there."), ""),
    # stated or encoded
    "base64": (task(f"Decode {CODED} for the room, at level 30."), LEAKED),
    "backwards": (task("Read it backwards: the room is yduts, at level 30."), LEAKED),
    "split over notes": (task(FAIR, tools=[lamp_with(**NOTES)]), LEAKED),
    "a call with a blank": (task("I want lamp (room='study', level=30)."), LEAKED),
    "every argument by name": (task("Make it room = study and level = 30."), LEAKED),
    "an enum with a dummy": (task(FAIR, tools=[lamp_with(
        room={"type": "string", "enum": ["study", "none"]},
        level={"type": "integer", "default": 30})]), NOTHING),
    "minimum is maximum": (task(FAIR, tools=[lamp_with(
        room={"type": "string", "enum": ["study"]},
        level={"type": "integer", "minimum": 30, "maximum": 30})]), NOTHING),
    # questions
    "heads or tails": (ask("A coin falls: heads or tails?", "heads"), CHANCE),
    "yes or no": (ask("Will it rain tomorrow, yes or no?", "No"), CHANCE),
    "four references": (ask("Which season is it?", "spring", "summer", "autumn", "winter"), CHANCE),
    "words swapped": (ask("Herbert Frank, we mean. Who wrote Dune?", "Frank Herbert"), LEAKED),
    "hyphenated": (ask("By Frank-Herbert, of course. Who wrote Dune?", "Frank Herbert"), LEAKED),
    "inflected": (ask("Saturn has rings, Jupiter's are faint. Which wins?", "Jupiter"), LEAKED),
    "a question backwards": (ask("It was trebreH knarF. Who wrote Dune?", "Frank Herbert"), LEAKED),
    # no check knows what is true: open
    "a wrong reference": (ask("Which planet is the largest?", "Venus"), ""),
}
FAIR_TASKS = [
    task(FAIR), task("Lamp (the one in the study) to 30, please."),
    task("The study's lamp on thirty, quietly.", lamp(quiet=True)),
    task("First the study lamp at level 30, then the hall's at 5.", lamp(), lamp("hall", 5),
         ordered=True),
    task("Ring in the hall twice.", *2 * [{"name": "ring", "arguments": {"room": "hall"}}]),
    task("Study lamp at 30, on no days.", lamp(days=[])),
    task("Clamp(s) aside: the study lamp at level 30."),
    task(FAIR, tools=[lamp_with("For example room = hall, level = 5")]),
    ask("Which planet is the largest of all?", "Jupiter"),
    ask("Who wrote Dune, and is it long or short?", "Frank Herbert"),
]


def verdict(record, seed=None):
    """What the loop says of a record that the simulator wrote: "" if it is taken."""
    seed = seed or world.make_task(ask("Who wrote the novel Emma?", "Jane Austen") if "reference"
                                   in record else task("Ring the bell in the hall.", {
                                       "name": "ring", "arguments": {"room": "hall"}}), "base")
    try:
        check_task(world, world.parse_task(json.dumps(record), seed, 0), seed, frozenset())
    except InvalidTask as reason:
        return str(reason)
    return ""


@pytest.mark.parametrize("what", TRICKS)
def test_tricks_are_refused_under_their_name(what):
    """RWR finds whatever holds the success rate at alpha without a task."""
    record, reason = TRICKS[what]
    assert len(TRICKS) == 25 and verdict(record) == reason


@pytest.mark.parametrize("record", FAIR_TASKS, ids=lambda record: record["task"])
def test_fair_tasks_are_taken(record):
    """A check that refuses these starves the simulator of records."""
    assert verdict(record) == ""


def test_a_teachers_fair_tasks_are_spared(tmp_path):
    """One false refusal would end the run; a teacher has several references and other words."""
    fair = [*map(json.loads, world.EXAMPLE_TASKS.read_text().splitlines()),
            ask("Is Jupiter larger, yes or no?", "yes"), TRICKS["four references"][0],
            TRICKS["value out of the air"][0]]
    path = tmp_path / "teacher.jsonl"
    path.write_text("".join(json.dumps({"text": json.dumps(r)}) + "\n" for r in fair))
    assert len(read_teacher(world, str(path))) == len(fair)
    path.write_text(json.dumps({"text": json.dumps(TRICKS["backwards"][0])}))
    user_error("record 1: answer leaked", read_teacher, world, str(path))


def test_benchmark_tasks_are_spared(tmp_path):
    """What real tasks have is no trick: 5 of BFCL's 1,808 name their call or leave nothing open."""
    data = Path(__file__).parents[2] / "shared/benchmarks/bfcl"
    if not data.is_dir():
        pytest.skip("no benchmark data")
    from eval.make_base import base_tasks
    tasks = [world.make_task(record, "base") for record in base_tasks("bfcl", data)[0]]
    assert len(tasks) > 1800 and sum(bool(world.leaks(t)) for t in tasks) == 5


def grounded(text, value, kind="string", **schema):
    """Whether one value stands in a request."""
    kind = {"type": kind} if kind else {}
    tool = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {
        "hours": {**kind, **schema}}}}
    call = {"name": "f", "arguments": {"hours": value}}
    return not ungrounded(world.make_task({"task": text, "tools": [tool], "calls": [call]}, "env"))


@pytest.mark.parametrize("text, value, stands", [
    ("In Berkeley, please", "Berkeley, CA", True), ("Weather in Berkeley", "Boston, MA", False),
    ("Historical novels, please", "history", True), ("Weather in Portland", "Portscendra", False),
    ("Trains from NYC please", "New York City", True), ("Eco-friendly shoes", "ecofriendly", True),
    ("On April 1st, 2023 please", "2023-04-01", True), ("On 04/01/2023 please", "2023-04-01", True),
    ("On April 1st, 2024 please", "2023-04-01", False), ("Next Monday please", "2023-04-01", False),
    ("Wake me at 7 pm today", "19:00", True), ("Wake me at 7 pm today", "07:00", False),
    ("Wake me up at noon", "12:00", True), ("It costs 9000 dollars", "USD", True),
    ("São Paulo, please", "Sao Paulo", True), ("Anything goes here", "", False),
    ("Call her Mia, please", "Mia ", False),
    ("请给小明发送一条消息", "小明", True), ("请给小明发送一条消息", "小红", False),
])
def test_texts_in_a_request(text, value, stands):
    """Dates, times, units and places are said in other ways than they are written in a call."""
    assert grounded(text, value) == stands


@pytest.mark.parametrize("text, value, stands", [
    ("Twenty five of them please", 25, True), ("Three million people", 3e6, True),
    ("At a rate of 7.5% a year", 0.075, True), ("$200,000 for the house", 200000, True),
    ("$200,000 for the house", 20000, False), ("For an hour, please", 1, True),
    ("For a while, please", 1, False), ("For two and a half hours", 120, True),
    ("In the month of March", 3, True), ("It loses 3 degrees", -3, True),
    ("For the next week", 7, True), ("Today at 3 pm, please", 15, True),
    ("Today at 3 pm, please", 3, False), ("Two hundred and fifty grams", 250, True),
    ("Two hundred and fifty grams", 50, False), ("One thousand two hundred of it", 1200, True),
    ("$100 annually for 5 years", 100, True), ("Twenty five of them please", 5, False),
])
def test_numbers_in_a_request(text, value, stands):
    """Words, percentages and smaller units; another number of zeros is another number."""
    assert grounded(text, value, "number") == stands


def test_values_that_need_no_word_of_their_own():
    """Enums may be named by their argument, unless another value is; defaults say themselves."""
    unit = dict(enum=["celsius", "fahrenheit"])
    assert grounded("In which unit? Your hours", "celsius", **unit)
    assert not grounded("Hours in fahrenheit, please", "celsius", **unit)
    assert grounded("Whatever you like best", "celsius", default="celsius")
    assert not grounded("Whatever you like best", True, "boolean")
    assert grounded("Show the hours as well", True, "boolean")
    assert not grounded("The hall and the study", ["hall", "attic"], "array")
    # what is optional, as libraries write it, is looked into
    for kind, value in ({"type": "object", "properties": {"hall": {"type": "string", **unit}}},
                        {"hall": "celsius"}), ({"type": "string", **unit}, "celsius"):
        optional = {"anyOf": [kind, {"type": "null"}]}
        assert grounded("In which hall? Hours in celsius", value, None, **optional)
        assert grounded("In which hall, which hours?", value, None, **optional)
        assert not grounded("Whatever you like best", value, None, **optional)
    for kind in ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, {"type": ["boolean", "null"]}):
        record = task("The study's lamp to 30, quietly.",
                      tools=[lamp_with(quiet={**kind, "default": None})])
        assert uncalled(world.make_task(record, "env")) == "quiet"
    # "on" says nothing elsewhere, but as a name it is all there is
    record = task("Turn on the study's lamp, at 30.", lamp(on=True),
                  tools=[lamp_with(on={"type": "boolean"})])
    assert not ungrounded(world.make_task(record, "env"))


@pytest.mark.parametrize("text, left", [
    (FAIR, ""), ("The study lamp at level 30 on day 4.", "4"), ("Study lamp: 30 or 31.", "31"),
    ("The study's lamp to 30, quietly.", "quiet"), ("Not quietly: the study lamp at 30.", ""),
    ("In the study, of 30 m^2, the lamp.", ""), ("At 19:30 the lamp in the study.", "19"),
    ("The lamp in the study, at 30:00.", ""), ("Lamp 31.5K of the study, model 10-Q.", ""),
    ("Study lamp at 30:00, for 30 minutes.", "30"), ("Study lamp at 30:00, 30 pm.", ""),
    ("On Friday the study lamp to 30.", "friday"), ("30 Fridays in the study.", ""),
])
def test_what_a_request_names_and_no_call_has(text, left):
    """A written request often asks for more than its calls say; a right answer would earn nothing."""
    assert uncalled(world.make_task(task(text), "env")) == left
    assert verdict(task(text)) in ({"": ("", GROUND)}.get(left, ("not in the calls",)))
    assert not (left and world.teachable(world.make_task(task(text), "base")))


def test_numbers_may_be_said_in_another_way_than_they_are_called():
    for text, said in (("At 3 pm in the study", 15), ("For 2,500 dollars, the study", 2500),
                       ("The study at 7.5% please", 0.075), ("The study, 8.5 million", 8.5e6),
                       ("The study for 2 hours", 120), ("The study on 2 May 2023", "2023-05-02"),
                       ("The study, Friday, 5 May 2023", "2023-05-05"), ("The study, Friday", "Fri"),
                       ("The study at 9:30, 9 watts", "9 watts, 9:30"), ("The study at 25", "twenty five"),
                       ("The study on Friday", "Friday")):
        level = {"type": "string" if isinstance(said, str) else "number"}
        record = task(text, lamp(level=said), tools=[lamp_with(level=level)])
        assert uncalled(world.make_task(record, "env")) == "", text


def test_a_question_has_no_calls_that_could_lack_a_number():
    """Or no question with a number in it would be kept."""
    assert not uncalled(Task("What is half of 30, on a Friday?", {"reference": ["15"]}))


def test_a_result_of_an_earlier_call_is_part_of_the_request():
    """The second call of an episode often needs what the first returned, and only then."""
    record = task("Light the lamp to 30 in the room that has the bell.",
                  {"name": "ring", "arguments": {"room": "room"}}, lamp(), results=["study", None])
    assert not ungrounded(world.make_task(record, "env"))
    record["calls"].reverse()
    assert ungrounded(world.make_task(record, "env")) == 'room = "study"'


TWIN = {"name": "brighten.lamp", "description": "More light.", "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}, "percent": {"type": "number"}}}}
MOVE = {**TWIN, "name": "move_it"}
BRIGHTEN = {"name": "brighten.lamp", "arguments": {"percent": 30.0, "place": "Study"}}
TWINS = [(task("Give me light in the study: the lamp at 30.", BRIGHTEN, tools=[TWIN]), True),
         (task("Move the lamp in the study by 30.", {
             "name": "move_it", "arguments": {"percent": 30, "place": "study"}}, tools=[MOVE]),
          False),
         (task("Light the lamp in the hall at level 30.", lamp("hall")), False)]


@pytest.mark.parametrize("record, same", TWINS)
def test_a_twin_under_other_names_is_the_same_task(record, same):
    """Held-out BFCL tasks had twins in the base, with other names of functions and arguments."""
    one, other = world.make_task(task(FAIR), "base"), world.make_task(record, "base")
    assert same != set(world.same_task_key(one)).isdisjoint(world.same_task_key(other))


def test_a_held_out_tasks_twin_is_left_out_of_the_base(tmp_path):
    """It would be trained on; the held-out tasks themselves are what runs are compared by."""
    lines = [task(f"Light the lamp in the study at level {n}.", lamp(level=n)) for n in range(40)]
    lines += [task(f"The lamp of the study by {n} or so.", {"name": "brighten.lamp", "arguments": {
        "percent": n, "place": "study"}}, tools=[TWIN]) for n in range(40)]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = world._splits(str(path), "")
    keys = [{key for t in parts[name] for key in world.same_task_key(t)} for name in parts]
    assert not keys[0] & keys[1] and not keys[0] & keys[2] and not keys[1] & keys[2]
    assert len(parts["validation"]) == 10 and 40 < sum(map(len, parts.values())) < 80


def test_the_option_switches_the_check_off(monkeypatch):
    """A study of the check needs runs without it."""
    monkeypatch.setattr(world, "_form", world.replace(world._form, ground=False))
    assert verdict(TRICKS["value out of the air"][0]) == ""


def test_the_table_of_what_was_read(tmp_path, capsys):
    """The page of results follows from the tasks that a person has read."""
    for path in measured.RESULTS.rglob("real-tasks.jsonl"):
        copy = tmp_path / path.relative_to(measured.RESULTS)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    base = ["--base", str(world.EXAMPLE_TASKS)]
    assert measured.main(["--results", str(tmp_path), *base]) == 0
    page = (measured.RESULTS / "grounding.md").read_text()
    assert page.startswith((tmp_path / "grounding.md").read_text().rstrip())
    read = json.dumps({"request": "Ring it", "tools": [], "calls": "f()", "right": None})
    (tmp_path / "few" / "real-tasks.jsonl").parent.mkdir()
    (tmp_path / "few" / "real-tasks.jsonl").write_text(read)  # not read yet
    assert measured.main(["--results", str(tmp_path / "few")]) == 0
    assert measured.main(["--results", str(tmp_path / "none")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
