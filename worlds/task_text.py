"""A task as a few lines, `Call: ...` and `Request: ...`, for functions that the simulator is given.

What of the paper this is: the simulator's side of the tool_calls world with --tools. The functions
are given, so a request and its calls are all that can go wrong, and they are a fifth of the tokens of
a JSON task: a small model can write them. What it is shown, and what it writes:

    Call: add_event(name="dentist", date="2026-03-14")             <- an example, any task
    Request: Put the dentist on 2026-03-14 into my calendar.
    Solved: 50 % of the time
    Write for:
    set_light(room: str, brightness: int)
    Not called:
    set_heating(room: str, degrees: float)

    Call: set_light(room="study", brightness=30)
    Request: Dim the study to 30 percent.

The calls come first, as a request for given calls only has to name their values, and a small model
can copy; calls for a request it would have to get right. A free-form question has `Answer: ...` in
place of the calls, and no functions. Where tools answer, `Result: ...` follows each call, what it
returns as JSON.

How it is run: by worlds/tool_calls.py, which checks what comes out as any other task; the calls are
written as --call-format says (worlds/call_text.py, or JSON).
"""
import json
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
# calls with what they return, calls without: each on a line
HEAD = re.compile(r"(?=Call:)(?:Call:.*\nResult:.*\n)*(?:Call:.*\n)*")
MARKED = re.compile(r"^\s*(Call|Result|Answer|Request|Solved):", re.MULTILINE)  # no line of a request


def write(record: dict, write_call) -> str:
    """{"task", "calls", "results"?}, or {"task", "reference"} with a text, as lines.

    write_call: a call -> one line.
    """
    lines = [f"Call: {write_call(call)}" for call in record.get("calls", ())]
    if record.get("calls") == []:  # of a seed task with nothing to call
        lines = [f"Call: {call_text.NOTHING}"]
    if "results" in record:
        returned = [f"Result: {json.dumps(r, ensure_ascii=False)}" for r in record["results"]]
        lines = [line for pair in zip(lines, returned) for line in pair]
    return "\n".join([*(lines or [f"Answer: {record['reference']}"]),
                      f"Request: {record['task'].strip()}"])


def read(text: str, structured: bool, parse_call, parse_result):
    """The inverse of `write`: lines -> {"task", "calls", "results"?} or {"task", "reference"}, or
    None.

    parse_call: a line -> a call, or None; parse_result: a line -> {"result": value}, or None. The
    request comes last and may have several lines.
    """
    if len(text) > call_text.MAX_CHARS:
        return None
    head, _, request = text.partition("\nRequest:")
    lines, request = [line.strip() for line in head.split("\n") if line.strip()], request.strip()
    if not lines or len(lines) > call_text.MAX_LINES or not request or MARKED.search(request):
        return None
    if not structured:
        answer = " ".join(lines)
        return {"task": request, "reference": answer[len("Answer:"):].strip()} \
            if answer.startswith("Answer:") else None
    if not HEAD.fullmatch("".join(f"{line}\n" for line in lines)):
        return None
    marked = lambda mark: [line[len(mark):].strip() for line in lines if line.startswith(mark)]
    calls, results = map(parse_call, marked("Call:")), map(parse_result, marked("Result:"))
    calls, results = list(calls), list(results)
    if None in calls + results:
        return None
    record = {"task": request, "calls": calls}
    return {**record, "results": [r["result"] for r in results]} if results else record


def prompt(example: dict, success, write_call, to_call: str, beside: str) -> list[dict]:
    """Chat messages that ask for a task.

    example: a record, with an empty text if there is none. success: p_hat in [0, 1] on it, or None.
    to_call, beside: functions to write for and to leave alone, as text; empty for a question, or if
    there are none.
    """
    solved = "unknown" if success is None else f"{100 * success:.0f} % of the time"
    lines = [write(example, write_call), f"Solved: {solved}"] if example["task"] else []
    lines += [f"Write for:\n{to_call}"] * bool(to_call) + [f"Not called:\n{beside}"] * bool(beside)
    system = SYSTEM["calls" in example] if example["task"] else NO_EXAMPLE + write(FORM, write_call)
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n".join(lines)}]
