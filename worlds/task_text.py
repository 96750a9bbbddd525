"""A task as a few lines, `Request: ...` and `Call: ...`, for the tools that its seed task has.

What of the paper this is: the simulator's side of the tool_calls world where a small model plays it
(--keep-tools). The tools are given, so a request and its calls are all that can go wrong, and they
are a fifth of the tokens of a JSON task. A free-form question has `Answer: ...` in their place.

    add_event(name: str, date: str, minutes: int = 60)      <- the seed task's tools
    Request: Put the dentist on 2026-03-14 into my calendar.
    Call: add_event(name="dentist", date="2026-03-14")
    Solved: unknown

With --offer it also sees functions of other tasks, under `Others:`, and may make the task harder
with them: by a second `Call: ...`, or by `Unused: name`, after which the agent has to choose.

How it is run: by worlds/tool_calls.py, which checks what comes out as any other task; the calls are
written as --call-format says (worlds/call_text.py, or JSON).
"""
import re

from worlds import call_text

SYSTEM = {
    True: "You write practice requests for an assistant that calls functions. You are given one "
          "request with its calls and how often the assistant solved it. Write another one for the "
          "same functions, with other values, each of which the request must name.",
    False: "You write practice questions. You are given one with its answer and how often an "
           "assistant solved it. Write another one with a short answer."}
OFFER = " To make it harder you may also call one of the other functions, or add it unused."
EXAMPLES = "\n\nExamples of what you write:\n\n"


def write(record: dict, write_call, unused=()) -> str:
    """{"task", "calls"}, or {"task", "reference"} with a text, as lines.

    write_call: a call -> one line. unused: names of functions to add without calling them.
    """
    lines = [f"Call: {write_call(call)}" for call in record.get("calls", ())]
    lines += [f"Unused: {name}" for name in unused]
    return "\n".join([f"Request: {record['task'].strip()}",
                      *(lines or [f"Answer: {record['reference']}"])])


def read(text: str, structured: bool, parse_call):
    """The inverse of `write`: lines -> {"task", "calls", "unused"} or {"task", "reference"}, or None.

    parse_call: a line -> a call, or None. A request may have several lines; from the first `Call:`
    on there are only such lines, and then those of `Unused:`.
    """
    mark = "Call" if structured else "Answer"
    found = re.fullmatch(rf"\s*Request:(.*?)\n[ \t]*{mark}:(.*)", text, re.DOTALL) \
        if len(text) <= call_text.MAX_CHARS else None
    if not found:
        return None
    if not structured:
        return {"task": found[1].strip(), "reference": found[2].strip()}
    lines = [line.strip() for line in f"Call:{found[2]}".split("\n") if line.strip()]
    n = sum(line.startswith("Call:") for line in lines)
    if len(lines) > call_text.MAX_LINES or "\nUnused:" in found[1] or not all(
            line.startswith("Call:" if i < n else "Unused:") for i, line in enumerate(lines)):
        return None
    calls = [parse_call(line[len("Call:"):].strip()) for line in lines[:n]]
    unused = [line[len("Unused:"):].strip() for line in lines[n:]]
    return None if None in calls else {"task": found[1].strip(), "calls": calls, "unused": unused}


def prompt(record: dict, tools: str, success, examples, write_call, others="") -> list[dict]:
    """Chat messages that ask for a variation of `record`.

    tools: the seed task's tools as text, empty for a question. success: p_hat in [0, 1] or None.
    examples: records shown as examples of what is to be written. others: tools that may be added,
    as text, empty if there are none.
    """
    system = SYSTEM["calls" in record] + OFFER * bool(others)
    if examples:
        system += EXAMPLES + "\n\n".join(write(example, write_call) for example in examples)
    solved = "unknown" if success is None else f"{100 * success:.0f} % of the time"
    lines = [tools] * bool(tools) + [f"Others:\n{others}"] * bool(others) + [write(record, write_call), f"Solved: {solved}"]
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n".join(lines)}]
