"""A task as a few lines, `Call: ...` and `Request: ...`, for the tools that its seed task has.

What of the paper this is: the simulator's side of the tool_calls world where a small model plays it
(--keep-tools). The tools are given, so a request and its calls are all that can go wrong, and they
are a fifth of the tokens of a JSON task. A free-form question has `Answer: ...` in their place.

    add_event(name: str, date: str, minutes: int = 60)      <- the seed task's tools
    Call: add_event(name="dentist", date="2026-03-14")
    Request: Put the dentist on 2026-03-14 into my calendar.
    Solved: unknown

The calls come first, as a request for given calls only has to name their values, and a small model
can copy; calls for a request it would have to get right. With --offer it also sees functions of
other tasks, under `Others:`, and may make the task harder with them: by a second `Call: ...`, or
by `Unused: name`, after which the agent has to choose. Where tools answer, `Result: ...` follows
each call, what it returns as JSON.

How it is run: by worlds/tool_calls.py, which checks what comes out as any other task; the calls are
written as --call-format says (worlds/call_text.py, or JSON).
"""
import json
import re

from worlds import call_text

SYSTEM = {
    True: "You write practice requests for an assistant that calls functions. You are given one "
          "request after its calls and how often the assistant solved it. For the same functions write "
          "other calls with other values, and then a request that names each of these values.",
    False: "You write practice questions. You are given one after its answer and how often an "
           "assistant solved it. Write another short answer, and then a question that has it."}
OFFER = " To make it harder you may also call one of the other functions, or add it unused."
EXAMPLES = "\n\nExamples of what you write:\n\n"
# calls with what they return, calls without, names of what is held unused: each on a line
HEAD = re.compile(r"(?=Call:)(?:Call:.*\nResult:.*\n)*(?:Call:.*\n)*(?:Unused:.*\n)*")
MARKED = re.compile(r"^\s*(Call|Result|Unused|Answer|Request):", re.MULTILINE)  # a line that is no request


def write(record: dict, write_call, unused=()) -> str:
    """{"task", "calls", "results"?}, or {"task", "reference"} with a text, as lines.

    write_call: a call -> one line. unused: names of functions to add without calling them.
    """
    lines = [f"Call: {write_call(call)}" for call in record.get("calls", ())]
    if record.get("calls") == []:  # of a seed task with nothing to call
        lines = [f"Call: {call_text.NOTHING}"]
    if "results" in record:
        returned = [f"Result: {json.dumps(r, ensure_ascii=False)}" for r in record["results"]]
        lines = [line for pair in zip(lines, returned) for line in pair]
    lines += [f"Unused: {name}" for name in unused]
    return "\n".join([*(lines or [f"Answer: {record['reference']}"]),
                      f"Request: {record['task'].strip()}"])


def read(text: str, structured: bool, parse_call, parse_result):
    """The inverse of `write`: lines -> {"task", "calls", "unused", "results"?} or {"task",
    "reference"}, or None.

    parse_call: a line -> a call, or None; parse_result: a line -> {"result": value}, or None. Lines
    of `Call:` come first, then those of `Unused:`, then the request, which may have several lines.
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
    record = {"task": request, "calls": calls, "unused": marked("Unused:")}
    return {**record, "results": [r["result"] for r in results]} if results else record


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
    lines = [tools] * bool(tools) + [f"Others:\n{others}"] * bool(others)
    lines += [write(record, write_call), f"Solved: {solved}"]
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n".join(lines)}]
