"""A real domain: JSON tool calls and short answers, with any chat model as the base.

What of the paper this is: a task instance carries a prompt (tool specs, goal) and an evaluation
spec (the calls it takes, or a reference answer), and `score` is both branches of Eq. 1.

How it is run: `python genenv.py --preset 7b-24gb --model DIR --base-tasks FILE`. The file holds one
JSON object per line, of one of these kinds (worlds/example_tasks.jsonl has 51, and is the default):

    {"task": "Dim the study to 30 percent.",
     "tools": [{"name": "set_light", "description": "...", "parameters": JSON schema}, ...],
     "calls": [{"name": "set_light", "arguments": {"room": "study", "brightness": 30}}],
     "ordered": true}          optional: the calls have to come in this order
    {"task": "Dim the room where I read.", "tools": [...], "calls": [two or more, in order],
     "results": ["study", ...]}     optional: what each call returns, any JSON values
    {"task": "Who wrote Dune?", "reference": "Frank Herbert"}      or a list of accepted answers

A task has 1 to 32 tools and at most 8 calls; `"calls": []` says that none of the tools does what is
asked, and the agent then answers `none`, which its prompt mentions only if some task has that answer.
Other shapes of tools, calls and whole lines (OpenAI's, MCP's, chats) are those of
worlds/tool_lists.py, which also says what of JSON schema is checked; fields of a user's own are
ignored. With --tools FILE, tasks without tools have those of the list that they call, and others up
to three. Every line is checked, and all bad ones are named at once. An eighth of the file is held
out for validation, another for tuning.

When two calls are the same: same name, same arguments. Numbers are compared by value (5 is 5.0, and
both are integers as JSON schema has it), but 5 is not "5" and true is not 1; strings must agree in
every character; an argument left out equals its schema's `default`. The whole list must agree: all
calls and no other, in any order unless `ordered`. Part of the list earns nothing.

A task with `results` is an episode: the tools answer. The agent makes the first call, or several, and
is told what they return; so a call may depend on what an earlier one has returned. The episode is over
when all calls are made, or one is not the next: what another call would return, nobody has written.

Where it differs on purpose: there is no executor for invented tools, so `valid` means that every
call parses and satisfies the schema of a declared tool; the simulator must keep the kind of its
seed, since a drift to free-form answers, whose references nothing checks, would be rewarded too.
Two tasks with the same calls, the same words, or the same values for functions with a word in
common, count as one where copies, duplicates and held-out tasks are looked for (same_task_key). So
rewordings of one task stay on one side of the validation split, and a held-out task's twin under
other names is left out; each has an id of its own. The simulator's prompt does not name alpha: a
record of an earlier epoch would name an older target.

Tools and calls are written as JSON, or as signatures and `name(argument=value)` where --call-format
is python (worlds/call_text.py): another spelling, with the same rules for arguments and equality.

With --tools FILE the simulator writes for functions (worlds/task_text.py): it is shown an example
and other functions, one or two to call and up to two to leave alone, writes the calls, then the
request, and the task has all functions that were shown. Which functions is the loop's choice
(`functions`, `assign`). So people bring a list of functions and a few examples, and tasks can grow:
a written task, as the next example, keeps its functions and gets others. FILE may be the base-task
file itself; without --tools the simulator writes JSON tasks and invents the functions, which takes
a large model. Questions and tasks whose tools answer are varied with what they have in either case.

What a simulator may not get away with stands in worlds/leaks.py and worlds/grounding.py (--no-ground
switches the latter off); schemas and the equality of calls in worlds/schemas.py.
"""
import hashlib
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from support.files import UserError, first_line, no_file
from data_pool import Task, task_id
import worlds
from worlds import NO_SEED, InvalidTask, call_text, open_policy, task_text, \
    tool_lists
from worlds.call_text import MAX_CHARS
from worlds.grounding import twin_marks, uncalled, ungrounded
from worlds.leaks import leaks as given_away, loopholes
from worlds.schemas import MAX_CALLS, MAX_DEPTH, MAX_TOOLS, answer_words, answering, canonical, check_calls, \
    check_tools, first_object, invalid, kind, load_object, normal_calls, normal_words, \
    structured, tools_of
from worlds.swaps import swapped, words_of_tools

EXAMPLE_TASKS = Path(__file__).with_name("example_tasks.jsonl")
SHOWN_WITH = 2        # examples that a task is imitated with, as the simulator, in a warm start
SWAPPED = 0.75        # of the examples of a pass of a warm start have other values
MOST_CALLED, MOST_SHOWN = 3, 6  # functions that a task may grow to
JOINTS = ("{} Also, {}", "{} And then: {}", "{} {}")  # how two requests become one
SHOWN_FAULTS = 20     # lines of a file that are named in full
HELD_OUT = 8          # one task in so many for validation, as many again for tuning
MIN_TASK_TOKENS, MIN_RESPONSE_TOKENS = 64, 32  # below them no JSON task, no call would fit
MIN_PYTHON_TOKENS = 16  # the same in the short form
MAX_RESULT = 2000     # characters of one result
MIN_LETTERS = 10      # letters and digits that a written task's text needs to ask for anything

# every reason of parse_task and leaks; the loop adds its own, such as "truncated"
REASONS = ("no JSON object", "no request and call", "malformed task", "trivial text", "tool schema",
           "unknown tool", "none of its functions", "wrong arguments", "other kind than the seed",
           "answer leaked", "nothing to answer", "more than one answer", "copy of a base task",
           "not in the request", "not in the calls")

OPTIONS = {  # name: default, help, choices
    "call_format": ("json", "how calls are written: JSON objects, or name(argument=value)",
                    ("json", "python")),
    "tools": ("", "functions to learn, JSON or JSONL (worlds/README.md); base: those of the base "
              "tasks; empty: the simulator invents some", None),
    "offered": (0, "with --tools: functions that a written task offers the agent, at least; 0: only "
                "those that the simulator was shown", None),
    "ground": (True, "refuse written tasks with a value that does not stand in the request", None),
    "own_values": (False, "in a warm start the simulator imitates the examples with their own names"
                   " and numbers: for half a billion weights and more", None),
    "base_limit": (0, "base tasks that are used, drawn by their ids; 0: all that are not held out",
                   None),
    "max_turns": (8, "turns of an episode, in tasks whose tools answer", None),
    "max_episode_tokens": (1024, "tokens of such an episode, results included", None),
}
# starting points for a chat model of one to three billion weights; the presets have their own
DEFAULTS = {"max_prompt_tokens": 2048, "max_response_tokens": 256, "max_task_tokens": 768,
            "agent_lr": 1e-4, "env_lr": 1e-4, "env_batch": 32, "token_budget": 8192, "max_rows": 256,
            # in all presets: a batch of written tasks is filled, and an update is one pass over them
            "write_rounds": 4, "env_passes": 1}


@dataclass(frozen=True)
class Form:
    """How texts are written, and for which functions."""
    call_format: str = "json"
    ground: bool = True
    nothing: bool = False  # whether some task has nothing to call, so that every prompt says how
    tools: dict = field(default_factory=dict)  # {name: spec} of --tools; none: JSON tasks
    offered: int = 0                           # functions that a written task has, at least
    known: frozenset = frozenset()             # functions that a base task calls
    base: frozenset = frozenset()              # what base tasks are recognised by (same_task_key)


def world_option(module, o, name: str):
    """The value of one of OPTIONS: as given, else its default."""
    return getattr(o, "world_options", {}).get(name, OPTIONS[name][0])


_form = Form()  # set by prepare: the functions of a world are not given the options
_keys = {}      # (id, text) of a task with calls: its keys


# ---------------------------------------------------------------------------------------------
# calls of a response


def parse_calls(response: str):
    """The calls of a response, or None if there are none or one is none: see --call-format.

    json: in <tool_call> tags; python: one a line. The word "none" alone says that there is nothing
    to call: no calls, an empty list.
    """
    if response.strip() == call_text.NOTHING:
        return []
    if _form.call_format == "python":
        return call_text.parse_calls(response)
    blocks = response[:MAX_CHARS + 1].split("<tool_call>")[1:]
    if len(response) > MAX_CHARS or not 1 <= len(blocks) <= 2 * MAX_CALLS:
        return None
    calls = []
    for block in blocks:
        body, closed, _ = block.partition("</tool_call>")
        calls.append(load_object(body) if closed else None)
    return None if None in calls else calls


# ---------------------------------------------------------------------------------------------
# tasks: from the simulator and from files


def make_task(record, origin: str, seed: str = "", epoch: int = 0) -> Task:
    """One JSON object of either kind -> Task. Raises InvalidTask, with .detail, if neither."""
    def need(holds, what, reason="malformed task"):
        if not holds:
            raise invalid(reason, what)
    text = record.get("task")
    need(isinstance(text, str), "no text under 'task'")
    text = text.strip()
    # "Call Bob" of a user's is a task; a simulator's text of that length is mostly none
    need(any(map(str.isalnum, text)) if origin == "base" else not too_short(text),
         "the task text says too little", "trivial text")
    need(("calls" in record) != ("reference" in record), "needs either 'calls' or 'reference'")
    fields = {"task", "tools", "calls", "ordered", "results"} if "calls" in record else \
        {"task", "reference"}
    need(not set(record) - fields, "unknown field " + ", ".join(sorted(set(record) - fields)))
    if "reference" in record:
        answers = record["reference"]
        answers = answers if isinstance(answers, list) else [answers]
        need(answers and all(isinstance(a, str) and normal_words(a) for a in answers),
             "the reference is no text or list of texts")
        return _task(text, {"reference": answers}, origin, seed, epoch)
    results = record.get("results", [])
    ordered = record.get("ordered", bool(results))
    need(isinstance(ordered, bool), "ordered is neither true nor false")
    tools = check_tools(record.get("tools"))
    # that nothing is to be called can be said by an author; a simulator would say it of anything
    check_calls(record["calls"], tools, 0 if origin == "base" else 1)
    spec = {"tools": record["tools"], "calls": record["calls"], "ordered": ordered}
    if "results" in record:
        need(isinstance(results, list) and len(results) == len(record["calls"]) > 1 and ordered,
             "results is a list, one for each of two or more calls, which come in order")
        need(all(len(_json(result)) <= MAX_RESULT for result in results),
             f"a result has more than {MAX_RESULT} characters")
        spec["results"] = results
    return _task(text, spec, origin, seed, epoch)


def too_short(text: str) -> bool:
    """Whether a text has fewer than MIN_LETTERS letters and digits."""
    return sum(map(str.isalnum, text)) < MIN_LETTERS


def _task(text, spec, *rest) -> Task:
    # the same spec under another text is another task, with a p_hat of its own
    return Task(text, spec, *rest, task_id({"text": text, **spec}))


def same_task_key(task: Task) -> tuple[str, ...]:
    """What a task is recognised by: its words, its calls however it is worded, and what a twin of
    other names has as well."""
    words = task_id({"question": normal_words(task.text)})
    if not task.spec.get("calls"):  # a question; or nothing to call, which is many tasks' answer
        return (words,)
    made = task.id, task.text
    if made not in _keys:  # asked again and again for every base task, by `shown_with`
        calls = normal_calls(task.spec["calls"], tools_of(task), ordered=False)
        twins = (task_id({"twin": mark}) for mark in twin_marks(task))
        _keys[made] = (task_id({"calls": calls}), words, *twins)
    return _keys[made]


# ---------------------------------------------------------------------------------------------
# reading tasks


def parse_task(text: str, seed_task: Task, epoch: int) -> Task:
    """The simulator's text -> a verified task. Raises InvalidTask with one of REASONS."""
    lines = _form.tools and seed_task.spec
    record = task_text.read(text, structured(seed_task), _call_of_line, _result_of_line) \
        if lines else first_object(text)
    if record is None:
        raise InvalidTask("no request and call" if lines else "no JSON object")
    to_call, beside = functions_for(seed_task)
    if lines and "calls" in record:
        tools = [*to_call, *beside]
        # more to choose from make a task harder, and its calls stay right
        tools += [_form.tools[name] for name in tool_lists.drawn_beside(
            _form.tools, {tool["name"] for tool in tools}, _form.offered - len(tools),
            record["task"])]
        if "to_call" in seed_task.spec:
            random.Random(record["task"]).shuffle(tools)  # an order that tells nothing
        record |= {"tools": tools, "ordered": seed_task.spec["ordered"]}
    task = make_task(record, "env", seed_task.id, epoch)
    if seed_task.spec and kind(task) != kind(seed_task):
        raise InvalidTask("other kind than the seed")
    if lines and to_call and not {tool["name"] for tool in to_call} & set(skills(task)):
        raise InvalidTask("none of its functions")
    if unwritable(task):
        raise InvalidTask("tool schema")
    return task


def leaks(task: Task) -> str:
    """Why a task teaches nothing: one of REASONS, or "". A teacher's tasks are spared what fair
    tasks may have as well."""
    written = task.origin == "env" and task.seed_task not in ("", NO_SEED.id)
    reason = given_away(task) or (loopholes(task) if written else "")
    # few examples are soon known by heart; that the seed task is no copy says nothing of the others
    if not reason and written and _form.tools and not _form.base.isdisjoint(same_task_key(task)):
        reason = "copy of a base task"
    if reason or not (written and _form.ground):
        return reason
    return "not in the request" if ungrounded(task) else "not in the calls" * bool(uncalled(task))


# ---------------------------------------------------------------------------------------------
# which functions to write for


def functions(o) -> list[str]:
    """Names of the functions of --tools that can be practised; [] if there is no such list."""
    return list(_form.tools)


def functions_for(seed_task: Task) -> tuple[list, list]:
    """(tool specs to call, specs to leave alone) as assigned, else all of the seed task's own."""
    spec = seed_task.spec
    return spec.get("to_call", spec.get("tools", [])), spec.get("beside", [])


def assign(seed_task: Task, names, generator) -> Task:
    """The seed task as it is put to the simulator: with the functions to write for, the same id.

    names: functions of --tools, the ones to call first. A base task is an example and gets one of
    them to call, now and then two, and 0 to 2 to leave alone. A written one keeps its functions and
    gets as many to leave alone, now and then one more to call: so tasks grow. Without any example
    (NO_SEED) the functions stand alone. Questions, and tasks whose tools answer, stay as they are.
    """
    import torch
    if not _form.tools or seed_task.spec and kind(seed_task) != "calls":
        return seed_task
    two, n_beside = (int(torch.randint(n, (), generator=generator)) for n in (4, 3))
    own = {} if seed_task.origin == "base" else tools_of(seed_task)
    called = [own[name] for name in dict.fromkeys(skills(seed_task)) if own]
    # with --offered most of these were never shown: parse_task draws others
    spare = [tool for tool in own.values() if tool not in called] if not _form.offered else []
    new = [_form.tools[name] for name in names if name not in own][
        :MOST_SHOWN - len(called) - len(spare)]
    n_call = int(not own) + (two == 0 and len(called) < MOST_CALLED)
    more = (new or spare)[:n_call]
    beside = [tool for tool in spare + new[:n_call + n_beside] if tool not in more]
    return _assigned(seed_task, called + more, beside)


def _assigned(seed_task: Task, to_call, beside) -> Task:
    # whether calls are ordered was said in the seed task's own text; without a seed task it is one
    # of its own, of which a task is a variation like any other
    return replace(seed_task, id=seed_task.id if seed_task.spec else "", spec={
        "calls": [], "tools": [], **seed_task.spec, "ordered": False, "to_call": to_call,
        "beside": beside})


# ---------------------------------------------------------------------------------------------
# lines and files


def _call_of_line(line: str):
    """One line of the simulator's as a call, or None."""
    return call_text.parse_call(line) if _form.call_format == "python" else load_object(line)


def _result_of_line(line: str) -> dict | None:
    """One line of the simulator's as {"result": a JSON value}, or None."""
    value = load_object(f'{{"result": {line}}}')
    return value if value and set(value) == {"result"} else None


def unwritable(task: Task) -> str:
    """An argument name that --call-format python cannot write, or ""."""
    tools = task.spec.get("tools", ()) if _form.call_format == "python" else ()
    names = (call_text.unwritable(tool["parameters"]) for tool in tools)
    return next(filter(None, names), "")


@lru_cache
def read_tasks(path: str, tools: str = "", call_format: str = "json") -> tuple:
    """Every task of a JSONL file, in the shapes of tool_lists.own_record.

    tools: file of --tools, for tasks without tools of their own; call_format: what it has to write of
    them. Raises UserError with every line at fault, the first SHOWN_FAULTS in full.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: {no_file(path)}; --base-tasks and --validation-tasks take JSONL, "
                        "see worlds/tool_calls.py for the format")
    listed, left_out = tool_lists.read_tools(tools, call_format) if tools else ((), ())
    listed = {tool["name"]: tool for tool in listed}
    tasks, seen, faults = [], {}, []
    data = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")  # a byte order mark
    if data.lstrip().startswith(b"["):
        raise UserError(f"{path}, line 1: a JSON array; write JSONL, one object a line, instead")
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            task = _task_of_line(line, where, listed)
        except InvalidTask as fault:
            faults.append(f"{where}: {fault}: {fault.detail}")
            continue
        first = seen.setdefault(canonical([task.text, task.spec]), number)
        if first != number:
            faults.append(f"{where}: repeats line {first}; remove one of them")
        tasks.append(task)
    if faults:
        more = [f"and {len(faults) - SHOWN_FAULTS} more lines of {path}"] * (
            len(faults) > SHOWN_FAULTS)
        if left_out and any(": unknown tool: " in fault for fault in faults):
            more.append(f"of {tools} was left out: {tool_lists.reasons(left_out)}")
        raise UserError("\n".join(faults[:SHOWN_FAULTS] + more))
    return tuple(tasks)


def _task_of_line(line: bytes, where: str, listed: dict) -> Task:
    """A line of a task file as a task. Raises InvalidTask with .detail; UserError for an encoding,
    which is the whole file's."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8; save the file in that encoding") from None
    except (ValueError, RecursionError) as error:  # bad JSON, or a number of thousands of digits
        raise invalid("not one JSON object", f"{first_line(error)}; write one object a line") from None
    if not isinstance(record, dict):
        raise invalid("not one JSON object", "write one object a line")
    try:  # only what is kept of a line is held to what a model can write
        record = load_object(_json(tool_lists.own_record(record, listed)))
    except RecursionError:  # a parser may go deeper than what reads its values
        record = None
    if record is None:
        raise invalid("malformed task", f"integers have at most {call_text.MAX_DIGITS} digits, there is "
                      f"no NaN, no NUL, no half of a character and no nesting over {MAX_DEPTH} levels")
    return make_task(record, "base")


def task_files(o) -> tuple[str, str]:
    """(file of the base tasks, list of functions for tasks without tools), "" for none. With a list
    there may be no base tasks: the simulator writes the first ones."""
    tools = world_option(sys.modules[__name__], o, "tools")
    listed = "" if tools == "base" else tools
    return o.base_tasks or ("" if listed else str(EXAMPLE_TASKS)), listed


def splits_of(o) -> dict:
    """`_splits` by the options of a run."""
    option = lambda name: world_option(sys.modules[__name__], o, name)
    (base, listed), call_format = task_files(o), option("call_format")
    given = read_tasks(o.validation_tasks, listed, call_format) if o.validation_tasks else ()
    if o.validation_tasks and not given:
        raise UserError(f"{o.validation_tasks}: no task in it; leave --validation-tasks out, or "
                        "name another file")
    if not base:
        return {"base": [], "validation": list(given), "tuning": []}
    return _splits(base, o.validation_tasks, option("base_limit"), listed, call_format)


@lru_cache
def _splits(base_file: str, validation_file: str, limit: int = 0, tools: str = "",
            call_format: str = "json") -> dict:
    """{"base", "validation", "tuning": tasks}, by the order of the families, which are hashes.

    Tasks that share a key stay together. A validation file takes the place of the held-out eighth.
    limit: base tasks that are kept, 0 for all. tools: file of --tools, in the call_format.
    """
    tasks = read_tasks(base_file, tools, call_format)
    given = read_tasks(validation_file, tools, call_format) if validation_file else ()
    taken = {key for task in given for key in same_task_key(task)}
    tasks = [task for task in tasks if taken.isdisjoint(same_task_key(task))]
    family = _families(tasks)
    # keys are hashes already; hashing again keeps the split apart from other uses of their order
    names = sorted(set(family.values()), key=lambda k: hashlib.sha256(k.encode()).hexdigest())
    n = max(1, len(names) // HELD_OUT)
    if len(names) < 2 * n + 1:
        left = " besides those of --validation-tasks" * bool(given)
        raise UserError(f"{base_file}: {len(names)} distinct tasks{left} are too few: some are "
                        "held out for validation and tuning; give 3 or more, better 40")
    tuning, validation = set(names[:n]), set() if given else set(names[n:2 * n])
    pick = lambda chosen: [task for task in tasks if family[task.id] in chosen]
    base, parts = pick(set(names) - tuning - validation), []
    # a held-out task's twin under other names is left out: what is held out stays the same
    for part in (list(given) or pick(validation), pick(tuning), base):
        taken = {key for task in sum(parts, []) for key in same_task_key(task)}
        parts.append([task for task in part if taken.isdisjoint(same_task_key(task))])
    validation, tuning, base = parts
    # ids are hashes: the few are spread over the file, and the same for every seed
    few = set(sorted(task.id for task in base)[:limit or len(base)])
    return {"tuning": tuning, "validation": validation, "base": [
        task for task in base if task.id in few]}


def _families(tasks) -> dict:
    """{task id: name of its family}: tasks that share a key, directly or through others."""
    parent = {}
    def root(key):
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key
    for task in tasks:
        first, *others = same_task_key(task)[:2]  # calls, words
        for key in others:
            parent[root(key)] = root(first)
    return {task.id: root(same_task_key(task)[0]) for task in tasks}


def prepare(o):
    """Check the model option, the lengths and both task files; set the form that all is in."""
    global _form
    if not o.model:
        raise UserError("the tool_calls world needs --model: a folder or hub name of a chat model, "
                        "such as Qwen/Qwen2.5-7B-Instruct")
    option = lambda name: world_option(sys.modules[__name__], o, name)
    for name, least in (("base_limit", 0), ("offered", 0), ("max_turns", 1),
                        ("max_episode_tokens", 1)):
        if option(name) < least:
            raise UserError(f"--{name.replace('_', '-')} is {option(name)}: must be at least "
                            f"{least}")
    if option("offered") > MAX_TOOLS or option("offered") and not tools_file(o):
        raise UserError(f"--offered {option('offered')}: needs --tools, a list of functions, and "
                        f"takes {MAX_TOOLS} at most")
    short = option("call_format") == "python"
    for name, least, brief in (("max_task_tokens", MIN_TASK_TOKENS, short and option("tools")),
                               ("max_response_tokens", MIN_RESPONSE_TOKENS, short)):
        least = MIN_PYTHON_TOKENS if brief else least
        if vars(o)[name] < least:
            raise UserError(f"--{name.replace('_', '-')} {vars(o)[name]} is too short for "
                            f"{'a call' if brief else 'JSON'}: give {least} or more, or start from "
                            "a --preset")
    read_tasks.cache_clear()  # the files may have been corrected since an earlier run
    _splits.cache_clear()
    splits = splits_of(o)
    every = [task for tasks in splits.values() for task in tasks]
    if not splits["base"] and o.variant in ("base", "static"):
        raise UserError(f"--variant {o.variant} trains on base tasks or on variations of them: give "
                        "--base-tasks FILE")
    _form = Form(option("call_format"), option("ground"),
                 any(task.spec.get("calls") == [] for task in every),
                 known=frozenset(name for task in splits["base"] for name in skills(task)),
                 base=frozenset(key for task in splits["base"] for key in same_task_key(task)))
    if tools_file(o):
        _form = replace(_form, tools=listed_tools(tools_file(o), o.max_prompt_tokens),
                        offered=option("offered"))
    for task in every:
        if name := unwritable(task):
            raise UserError(f"the task {task.text[:60]!r} has an argument {name!r}, which is no "
                            "name in Python: use --call-format json or leave the task out")


def tools_file(o) -> str:
    """The file that --tools names: that of the base tasks for `base`; "" if there is none."""
    base, listed = task_files(o)
    return base if world_option(sys.modules[__name__], o, "tools") == "base" else listed


def listed_tools(path: str, longest: int) -> dict:
    """{name: spec} of a --tools file; what of it cannot be used is counted on stderr. Raises
    UserError if nothing can. longest: characters of a function, in the form that prompts have."""
    read, left_out = tool_lists.read_tools(path, _form.call_format)
    tools = short_enough(read, longest)
    left_out += Counter({"too long for --max-prompt-tokens": len(read) - len(tools)})
    if not tools:
        raise UserError(f"{path}: every function is too long: raise --max-prompt-tokens ({longest})")
    if left_out:
        say_once(f"{path}: {len(tools)} functions; left out: {tool_lists.reasons(left_out)}")
    return {tool["name"]: tool for tool in tools}


def short_enough(tools, longest: int) -> list[dict]:
    """Functions of at most so many characters in a prompt. With as many as a prompt has tokens that
    is some third of it: room for an example and another function."""
    return [tool for tool in tools if len(tools_text([tool])) <= longest]


@lru_cache
def say_once(note: str):
    """A note on stderr: a run prepares its world before torch is loaded and once more after it."""
    print(note, file=sys.stderr)


def read_answers_as(call_format: str, nothing: bool = False):
    """Set the form of calls alone, and whether "none" is an answer: for a process that never calls
    `prepare` (veRL's, or `genenv.py ask`). Raises UserError for a form that is none."""
    global _form
    if call_format not in OPTIONS["call_format"][2]:
        raise UserError(f"{call_format!r} is no form of calls: json or python")
    _form = replace(_form, call_format=call_format, nothing=nothing)


def base_tasks(o) -> list[Task]:
    """The tasks of --base-tasks that are not held out, or --base-limit of them."""
    return splits_of(o)["base"]


def validation_tasks(o, split="validation") -> list[Task]:
    """The held-out eighth, or --validation-tasks; "tuning" is another eighth."""
    return splits_of(o)[split]


# ---------------------------------------------------------------------------------------------
# the two roles


AGENT_CALLS = """\
You answer requests by calling tools. These are the tools, as JSON, one per line:
{tools}

Reply with every call that the request needs, in the order it asks for, and no other. Write each \
one as a JSON object between tags, on a line of its own:
<tool_call>{{"name": "TOOL", "arguments": {{"ARGUMENT": "VALUE"}}}}</tool_call>"""

AGENT_PYTHON = """\
Answer the request with calls of these functions, one per line, and nothing else:
{tools}"""

NONE_FITS = f"\n\nIf no function does what is asked, reply: {call_text.NOTHING}"

ANSWERED = "\n\nWhat they return is told to you; make the calls that need it after that."

AGENT_ANSWER = "You answer questions. Reply with the answer alone, in as few words as it takes."

ENV_SYSTEM = """\
You write practice tasks for an assistant. You are given one task and, if it was tried recently, \
how often the assistant solved it, and you write a new one.
The new task is a variation, not a copy: another situation that asks for other {answers}. Every \
value of the answer must follow from the task text, exactly one answer may be right, and the text \
must not state the answer itself.
Aim for a task that the assistant solves sometimes but not always.
Reply with one JSON object and nothing else, of this form:
{form}"""

CALLS_FORM = """\
{"task": "what the user says", "tools": [{"name": "tool_name", "description": "what it does", \
"parameters": {"type": "object", "properties": {"argument": {"type": "string", "description": \
"what it means"}}, "required": ["argument"]}}], "calls": [{"name": "tool_name", "arguments": \
{"argument": "value"}}]}
"calls" are the calls that the task needs. Add "ordered": true only if they must come in that \
order. Tools that the task does not need make it harder."""
RESULTS_FORM = """
Besides "results": a list of what each of the calls returns, in order. A call may need what an \
earlier one has returned."""
ANSWER_FORM = '{"task": "a question with a short answer", "reference": "the answer"}'

ENV_USER = """\
The task:
{seed}

The assistant {words}.
Write the variation."""


def success_words(success) -> str:
    """A success rate in [0, 1], or None if it is unknown, as a person would put it."""
    if success is None:
        return "has not tried it recently: how often it would succeed is not known"
    steps = ((0.0, "never solves it"), (0.2, "rarely solves it"), (0.4, "sometimes solves it"),
             (0.6, "solves it about half of the time"), (0.8, "often solves it"),
             (0.999, "nearly always solves it"))
    words = next((words for limit, words in steps if success <= limit), "always solves it")
    return f"{words}: its recent success rate is {100 * success:.0f} %"


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def env_prompt(seed_task: Task, success, alpha: float) -> list[dict]:
    """Chat messages for the simulator: the seed task, its success if known, what to write for.

    alpha stays out: what is asked for holds at any target, so no record's prompt goes stale.
    """
    if _form.tools:
        to_call, beside = functions_for(seed_task)
        return task_text.prompt(_record(seed_task), success, _line_of_call, tools_text(to_call),
                                tools_text(beside))
    system = ENV_SYSTEM.format(answers="calls", form=CALLS_FORM) if structured(seed_task) else \
        ENV_SYSTEM.format(answers="answers", form=ANSWER_FORM)
    system += RESULTS_FORM * answering(seed_task)
    user = ENV_USER.format(seed=_json(_record(seed_task)), words=success_words(success))
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _record(task: Task) -> dict:
    """A task as a line of a task file."""
    record = {"task": task.text, **task.spec}
    if not structured(task):
        return {**record, "reference": record["reference"][0]}
    if answering(task):  # that they are ordered goes without saying
        return {k: record[k] for k in ("task", "tools", "calls", "results")}
    return record if record["ordered"] else {k: record[k] for k in ("task", "tools", "calls")}


def tools_text(tools) -> str:
    """Tool specs, one a line, as --call-format says; "" if there are none."""
    write = call_text.signature if _form.call_format == "python" else _json
    return "\n".join(map(write, tools))


def _line_of_call(call: dict) -> str:
    return (call_text.write_call if _form.call_format == "python" else _json)(call)


def agent_prompt(task: Task) -> list[dict]:
    """Chat messages for the agent: the tools and the form of a call, then the task."""
    system = AGENT_ANSWER
    if structured(task):
        form = AGENT_PYTHON if _form.call_format == "python" else AGENT_CALLS
        system = form.format(tools=tools_text(task.spec["tools"])) + ANSWERED * answering(task) \
            + NONE_FITS * _form.nothing
    return [{"role": "system", "content": system}, {"role": "user", "content": task.text}]


def load_policy(o):
    """The chat model with two fresh adapters; both prompts of every task are tried first.

    Raises UserError if the model does not load, has no usable chat template, or a prompt is over
    the limit.
    """
    return open_policy(o.model, o)


def warm_start_pairs(o, turn: int = 0) -> dict:
    """What `genenv.py warm-start` imitates: {"agent": pairs, "env": pairs, "alone": how many tasks
    are the agent's alone}; a pair is (prompt, response).

    Base tasks, and one that joins two of them for every eight. The agent's response is the expected
    one. The simulator writes each task that a run would take from it, after SHOWN_WITH other tasks,
    in each `turn` others; a task for which there is none is the agent's alone. With --tools the
    functions that a task leaves alone are of the list, drawn as for written tasks, and the tasks
    have other values; with --own-values only those of the agent have.
    """
    base, draw = base_tasks(o), random.Random(turn)
    own = world_option(sys.modules[__name__], o, "own_values") and bool(_form.tools)
    held_out = frozenset(key for split in ("validation", "tuning") if _form.tools
                         for task in validation_tasks(o, split) for key in same_task_key(task))
    written = [*base, *joined_tasks(base, held_out, draw)] if own else []
    tasks = with_other_values(base, held_out, draw) if _form.tools else base
    tasks = [*tasks, *joined_tasks(tasks, held_out, draw)]
    agent, env = [], []  # env: for each task the pairs in which it is written
    for task in tasks:
        to_call, beside = called_and_beside(task, draw)
        if _form.tools and kind(task) == "calls":
            tools = draw.sample([*to_call, *beside], len(to_call) + len(beside))
            task = replace(task, spec={**task.spec, "tools": tools})
        agent.append((agent_prompt(task), played(task) if answering(task) else gold(task)))
        if not own:
            env.append(written_pairs(task, tasks, to_call, beside, draw))
    for task in written:
        env.append(written_pairs(task, written, *called_and_beside(task, draw), draw))
    return {"agent": agent, "env": sum(env, []), "alone": env.count([])}


def called_and_beside(task: Task, draw) -> tuple[list, list]:
    """(tool specs that a task calls, 0 to 2 that it leaves alone)."""
    to_call = [tools_of(task)[name] for name in dict.fromkeys(skills(task))]
    return to_call, functions_beside(task, draw)


def written_pairs(task: Task, tasks, to_call, beside, draw) -> list:
    """Pairs in which the simulator writes a task for these functions, after others of `tasks`."""
    seeds = shown_with(task, tasks) if teachable(task) else []
    pairs = []
    for seed_task in draw.sample(seeds, min(SHOWN_WITH, len(seeds))):
        if kind(task) == "calls":
            seed_task = _assigned(seed_task, to_call, beside)
        pairs.append((env_prompt(seed_task, None, 0.5), task_as_written(task)))
    return pairs


def with_other_values(tasks, held_out, draw) -> list[Task]:
    """The tasks, most of them swapped; as it is where another one would be like a held-out task or
    no call of its functions."""
    words, out = words_of_tools(_form.tools.values()), []
    for task in tasks:
        if kind(task) == "calls" and draw.random() < SWAPPED:
            text, calls = swapped(task, words, draw)
            new = _task(text, {**task.spec, "calls": calls}, task.origin)
            fits = fitting(calls, tools_of(task)) is not None
            task = new if fits and held_out.isdisjoint(same_task_key(new)) else task
        out.append(task)
    return out


def functions_beside(task: Task, draw) -> list[dict]:
    """0 to 2 functions that a task does not call: its own, then others of --tools."""
    own = [tool for name, tool in tools_of(task).items() if name not in skills(task)]
    others = [tool for name, tool in _form.tools.items() if name not in tools_of(task)]
    n = max(0, draw.randrange(3) - len(own))
    return own + draw.sample(others, min(n, len(others)))


def teachable(task: Task) -> bool:
    """Whether a simulator may imitate a task: one with calls only if a run would take it from it."""
    return not structured(task) or bool(task.spec["calls"]) and not (
        given_away(task) or loopholes(task) or ungrounded(task) or uncalled(task))


def shown_with(task: Task, tasks) -> list[Task]:
    """The tasks that the simulator may be shown to write this one: others of its kind, and where it
    is not told the functions, of such functions."""
    told, keys = _form.tools and kind(task) == "calls", set(same_task_key(task))
    fits = lambda other: told or not structured(task) or \
        fitting(task.spec["calls"], tools_of(other)) is not None
    return [other for other in tasks if kind(other) == kind(task)
            and keys.isdisjoint(same_task_key(other)) and fits(other)
            and task.text not in other.text and other.text not in task.text]  # nor a part of it


def joined_tasks(tasks, held_out, draw) -> list[Task]:
    """With --tools, a task with the calls of two for every eight of `tasks`, none of them like a
    held-out one or longer than a task may be; else none."""
    single, out = [task for task in tasks if kind(task) == "calls" and skills(task)], []
    for one in draw.sample(single, len(single) // 8) if _form.tools else ():
        other = draw.choice(single)
        if set(tools_of(one)).isdisjoint(tools_of(other)):
            text = draw.choice(JOINTS).format(one.text, other.text)
            spec = {"tools": [*one.spec["tools"], *other.spec["tools"]], "ordered": False,
                    "calls": [*one.spec["calls"], *other.spec["calls"]]}
            out.append(_task(text, spec, "base"))
    return [task for task in out if held_out.isdisjoint(same_task_key(task))
            and len(task.spec["calls"]) <= MAX_CALLS and len(task.spec["tools"]) <= MAX_TOOLS]


def task_as_written(task: Task) -> str:
    """A task in the form that the simulator writes."""
    return task_text.write(_record(task), _line_of_call) if _form.tools else _json(_record(task))


# ---------------------------------------------------------------------------------------------
# Eq. 1


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of the precision and recall of words, in [0, 1]; 0 if either has none."""
    a, b = answer_words(answer), answer_words(reference)
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b)) if common else 0.0


def gold(task: Task) -> str:
    """A response that earns 1; in an episode its calls may come a turn each."""
    return said(task.spec["calls"]) if structured(task) else task.spec["reference"][0]


def said(calls) -> str:
    """Calls as the agent writes them."""
    if not calls:
        return call_text.NOTHING
    if _form.call_format == "python":
        return call_text.write_calls(calls)
    return "\n".join(f"<tool_call>{_json(call)}</tool_call>" for call in calls)


def start(task: Task):
    """The state of an episode, {"made": calls made}; None for a task with a single answer."""
    return {"made": 0} if answering(task) else None


def respond(task: Task, state, text: str) -> str | None:
    """What the tools return to a turn, or None: all calls are made, or one is not the next."""
    tools = tools_of(task)
    calls = None if state is None else readable_calls(text, tools)
    if calls is None:
        return None
    made, n = state["made"], state["made"] + len(calls)
    if normal_calls(calls, tools, True) != normal_calls(task.spec["calls"][made:n], tools, True):
        return None
    state["made"] = n
    returned = zip(calls, task.spec["results"][made:n])
    return None if n == len(task.spec["calls"]) else "\n".join(
        f"{call['name']} returns {_json(result)}" for call, result in returned)


def played(task: Task) -> list[str]:
    """An expert's episode, a call a turn: turns and what the tools return, in turn."""
    state, parts = start(task), []
    for call in task.spec["calls"]:
        parts += [said([call]), respond(task, state, said([call]))]
    return parts[:-1]  # nothing is returned to the last


def readable_calls(text: str, tools: dict, least: int = 1):
    """The calls of a turn; None unless all of them are of declared tools with fitting arguments.

    least: 0 where "none" is an answer.
    """
    return fitting(parse_calls(text), tools, least)


def fitting(calls, tools: dict, least: int = 1):
    """Calls as they are, None unless they pass check_calls."""
    try:
        check_calls(calls, tools, least)
    except InvalidTask:
        return None
    return calls


def score(task: Task, response) -> tuple[float, bool]:
    """Eq. 1 -> (reward in [0, 1], valid). Only the response is read, never the prompt.

    Structured: 1 if the calls are exactly those expected, else 0; valid if all of them parse and
    satisfy the schema of a declared tool. Free-form: the best token-F1 over the references; valid
    if the response has any word. response: a text, or the agent's turns.
    """
    turns, tools = [response] if isinstance(response, str) else response, tools_of(task)
    if answering(task):
        state = start(task)
        for turn in turns:
            if respond(task, state, turn) is None:
                break
        valid = bool(turns) and all(readable_calls(turn, tools) for turn in turns)
        return float(state["made"] == len(task.spec["calls"])), valid  # Eq. 1: 1[a' = a]
    response = "\n".join(turns)
    if len(response) > MAX_CHARS:
        return 0.0, False
    if not structured(task):
        valid = bool(normal_words(response))
        return max(token_f1(response, r) for r in task.spec["reference"]), valid  # Eq. 1: sim
    least = 0 if _form.nothing or not task.spec["calls"] else 1
    calls, ordered = readable_calls(response, tools, least), task.spec["ordered"]
    if calls is None:
        return 0.0, False
    expected = normal_calls(task.spec["calls"], tools, ordered)
    return float(normal_calls(calls, tools, ordered) == expected), True  # Eq. 1: 1[a' = a]


# ---------------------------------------------------------------------------------------------
# what the figures need


def skills(task: Task) -> list[str]:
    """Names of the tools that the task calls; none for a free-form question."""
    return [call["name"] for call in task.spec.get("calls", [])]


def task_length(task: Task) -> int:
    """Words of the task text: the one unit that both kinds share."""
    return len(task.text.split())


def category(task: Task) -> str:
    """`no call`, `1 call`, `2 calls`, `3+ calls` or `free-form`; with --tools also whether it calls
    a function that no base task calls."""
    calls = skills(task)
    names = {0: "no call" if structured(task) else "free-form", 1: "1 call", 2: "2 calls"}
    new = ", new function" if _form.tools and not _form.known.issuperset(calls) else ""
    return names.get(len(calls), "3+ calls") + new


# ---------------------------------------------------------------------------------------------
# the world: delegates to the functions above


class World(worlds.World):
    """The domain of tool calls, see the head of this module."""
    REASONS, OPTIONS, DEFAULTS, EPISODES = REASONS, OPTIONS, DEFAULTS, True

    def __init__(self, o):
        super().__init__(o)
        prepare(o)
        self.max_turns = self.option(o, "max_turns")
        self.max_episode_tokens = self.option(o, "max_episode_tokens")

    def load_policy(self):
        return load_policy(self.o)

    def base_tasks(self):
        return base_tasks(self.o)

    def validation_tasks(self, split="validation"):
        return validation_tasks(self.o, split)

    def seed_for(self, task, generator):
        """Four functions of --tools, drawn at random, to write for."""
        import torch
        names = functions(self.o)
        few = torch.randperm(len(names), generator=generator)[:4].tolist() if names else []
        return assign(task, [names[i] for i in few], generator)

    def warm_start_pairs(self, turn=0):
        return warm_start_pairs(self.o, turn)

    env_prompt, agent_prompt, parse_task = map(staticmethod, (env_prompt, agent_prompt, parse_task))
    score, gold, leaks, same_task_key = map(staticmethod, (score, gold, leaks, same_task_key))
    skills, task_length, category = map(staticmethod, (skills, task_length, category))
    start, respond = map(staticmethod, (start, respond))
