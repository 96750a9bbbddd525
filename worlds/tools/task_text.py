"""A task as a few lines, `Call: ...` and `Request: ...`, for tools that the simulator is given.

This is the simulator's side of the tool_calls world with --tools. The tools are given, so a request
and its calls are all that can go wrong, and they are a fifth of the tokens of a JSON task: a small
model can write them. What it is shown, and what it writes:

    Level: 1 of 4                                                  <- an example, any task
    Call: add_event(name="dentist", date="2026-03-14")
    Request: Put the dentist on 2026-03-14 into my calendar.
    Solved: 50 % of the time
    Functions:
    set_light(room: str, brightness: int)
    set_heating(room: str, degrees: float)

    Level: 1 of 2
    Call: set_light(room="study", brightness=30)
    Request: Dim the study to 30 percent.

The level comes first: how many calls the request takes, and among how many tools the assistant has
to choose. So the simulator decides how hard a task is before it writes it, and reward-weighted
regression can move that choice. The calls come before the request: a request for given calls only
has to name their values, and a small model can copy; calls for a given request it would have to get
right.
"""
import re

from worlds.tools import call_text
from worlds.tiny_model import chat

SYSTEM = """\
You write practice requests for an assistant that calls functions. You are given one example, \
how often the assistant solved it, and functions. Choose a level: how many calls the request \
takes, and how many functions the assistant has to choose from. Call some of these functions with \
values of your own, and then write a request that names each of these values."""
LEVEL = re.compile(r"Level: (\d) of (\d)")
MARKED = re.compile(r"^[^\S\n]*(Level|Call|Request|Solved):", re.MULTILINE)  # no line of a request


def write(record: dict, write_call) -> str:
    """{"task", "tools", "calls"} as lines. write_call: a call -> one line."""
    lines = [f"Level: {len(record['calls'])} of {len(record['tools'])}"]
    lines += [f"Call: {write_call(call)}" for call in record["calls"]]
    return "\n".join([*lines, f"Request: {record['task'].strip()}"])


def read(text, parse_call):
    """The inverse of `write`: lines -> {"task", "level": (calls, tools), "calls"}, or None.

    parse_call: a line -> a call, or None. The request comes last and may have several lines.
    """
    if len(text) > call_text.MAX_CHARS:
        return None
    head, _, request = text.partition("\nRequest:")
    request = request.strip()
    lines = [line.strip() for line in head.split("\n") if line.strip()]
    if not lines or not request or MARKED.search(request):
        return None
    level = LEVEL.fullmatch(lines[0])
    if level is None:
        return None
    calls = []
    for line in lines[1:call_text.MAX_LINES]:
        mark, _, words = line.partition(":")
        call = parse_call(words.strip()) if mark == "Call" else None
        if call is None:
            return None
        calls.append(call)
    return {"task": request, "level": tuple(map(int, level.groups())), "calls": calls}


def prompt(example: dict, success, write_call, functions: str):
    """Chat messages that ask for a task.

    example: a record. success: p_hat in [0, 1] on it, or None. functions: tools to write for, as
    text.
    """
    user = f"{write(example, write_call)}\nSolved: {solved(success)}\nFunctions:\n{functions}"
    return chat(SYSTEM, user)


def solved(success) -> str:
    """A success rate in [0, 1], or None if it is unknown, in words."""
    return "unknown" if success is None else f"{100 * success:.0f} % of the time"
