"""A task as a few lines, `Call: ...` and `Request: ...`, for tools that the simulator is given.

This is the simulator's side of the tool_calls world with --tools. The tools are given, so a request and
its calls are all that can go wrong, and they are a fifth of the tokens of a JSON task: a small model can
write them. What it is shown, and what it writes:

    Call: add_event(name="dentist", date="2026-03-14")             <- an example, any task
    Request: Put the dentist on 2026-03-14 into my calendar.
    Solved: 50 % of the time
    Write for:
    set_light(room: str, brightness: int)
    Not called:
    set_heating(room: str, degrees: float)

    Call: set_light(room="study", brightness=30)
    Request: Dim the study to 30 percent.

The calls come first: a request for given calls only has to name their values, and a small model can
copy; calls for a given request it would have to get right. A free-form question has `Answer: ...` in
place of the calls, and no tools. Calls are written as --call-format says.
"""
import re

from worlds import call_text

SYSTEM = {
    True: "You write practice requests for an assistant that calls functions. You are given one "
          "example, how often the assistant solved it, and functions to write for. Call these "
          "functions with values of your own, and then write a request that names each of these "
          "values.",
    False: "You write practice questions. You are given one after its answer and how often an "
           "assistant solved it. Write another short answer, and then a question that has it."}
NO_EXAMPLE = ("You write practice requests for an assistant that calls functions. Call the functions "
              "that you are given with values of your own, and then write a request that names each "
              "of these values. Write lines of this form:\n")
FORM = {"task": "what the user says", "calls": [{"name": "function", "arguments": {"argument": "value"}}]}
MARKED = re.compile(r"^\s*(Call|Answer|Request|Solved):", re.MULTILINE)  # no line of a request


def write(record: dict, write_call) -> str:
    """{"task", "calls"}, or {"task", "reference"} with a text, as lines. write_call: a call -> one line."""
    lines = [f"Answer: {record['reference']}"] if "reference" in record else \
        [f"Call: {write_call(call)}" for call in record["calls"]] or [f"Call: {call_text.NOTHING}"]
    return "\n".join([*lines, f"Request: {record['task'].strip()}"])


def read(text: str, parse_call):
    """The inverse of `write`: lines -> {"task", "calls"} or {"task", "reference"}, or None.

    parse_call: a line -> a call, or None. The request comes last and may have several lines.
    """
    head, _, request = text.partition("\nRequest:")
    lines, request = [line.strip() for line in head.split("\n") if line.strip()], request.strip()
    if len(text) > call_text.MAX_CHARS or not lines or not request or MARKED.search(request):
        return None
    if lines[0].startswith("Answer:"):
        return {"task": request, "reference": " ".join(lines)[len("Answer:"):].strip()}
    calls = [parse_call(line[len("Call:"):].strip()) if line.startswith("Call:") else None
             for line in lines[:call_text.MAX_LINES]]
    return None if None in calls else {"task": request, "calls": calls}


def prompt(example: dict, success, write_call, to_call: str, beside: str) -> list[dict]:
    """Chat messages that ask for a task.

    example: a record, with an empty text if there is none. success: p_hat in [0, 1] on it, or None.
    to_call, beside: tools to write for and to leave alone, as text; empty for a question, or if there
    are none.
    """
    solved = "unknown" if success is None else f"{100 * success:.0f} % of the time"
    lines = [write(example, write_call), f"Solved: {solved}"] if example["task"] else []
    lines += [f"Write for:\n{to_call}"] * bool(to_call) + [f"Not called:\n{beside}"] * bool(beside)
    system = SYSTEM["calls" in example] if example["task"] else NO_EXAMPLE + write(FORM, write_call)
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n".join(lines)}]
