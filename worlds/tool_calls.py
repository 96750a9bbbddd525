"""A real domain: JSON tool calls and short answers, with any chat model as the base.

What of the paper this is: a task instance carries a prompt (tool specs, goal) and an evaluation
spec (the calls it takes, or a reference answer), and `score` is both branches of Eq. 1.

How it is run: `python genenv.py --preset 7b-24gb --model DIR --base-tasks FILE`. The file holds one
JSON object per line, of either kind (worlds/example_tasks.jsonl has 51, and is the default):

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
ignored. With --tools FILE, tasks without tools have those of the list that they call. Every line is
checked, and all bad ones are named at once. An eighth of the file is held out for validation, another
for tuning.

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
other names is left out; each has an id of its own. What the simulator is told leaves alpha out: an
old record would name an older target.

Tools and calls are written as JSON, or as signatures and `name(argument=value)` where --call-format
is python (worlds/call_text.py): another spelling, with the same rules for arguments and equality.
With --keep-tools the simulator writes requests and calls for its seed task's tools, and no tools
(worlds/task_text.py). With --offer K it may add to them: K functions of other base tasks stand in its
prompt, and a variation may call one of them as well, or hold it unused. So tasks can grow beyond
the base set's, in calls and in functions to choose from. --exemplars K shows it K base tasks: for
the seed's own functions where there are any, else of its kind, drawn by the seed task's id and so
always the same ones.

What a simulator may not get away with stands in worlds/leaks.py and worlds/grounding.py (--no-ground
switches the latter off); schemas and the equality of calls in worlds/schemas.py.
"""
import hashlib
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from data_pool import Task, UserError, task_id
from policy import Policy
from runtime.loading import policy_options
from worlds import NO_SEED, InvalidTask, call_text, task_text, tool_lists, try_prompts, \
    world_option
from worlds.call_text import MAX_CHARS
from worlds.grounding import twin_marks, ungrounded
from worlds.leaks import leaks as given_away, loopholes
from worlds.schemas import MAX_CALLS, answering, argument_fault, canonical, check_calls, \
    check_tools, first_object, invalid, kind, load_object, normal_calls, normal_words, structured, \
    tools_of

EXAMPLE_TASKS = Path(__file__).with_name("example_tasks.jsonl")
VARIATIONS = 4        # of a seed task, imitated in one pass of a warm start
OFFERED_UP_TO = 6     # tools of a seed task; to one that has as many no others are offered
JOINTS = ("{} Also, {}", "{} And then: {}", "{} {}")  # how two requests become one
SHOWN_FAULTS = 20     # lines of a file that are named in full
HELD_OUT = 8          # one task in so many for validation, as many again for tuning
MIN_TASK_TOKENS, MIN_RESPONSE_TOKENS = 64, 32  # below them no JSON task, no call would fit
MIN_PYTHON_TOKENS = 16  # the same in the short form
MAX_RESULT = 2000     # characters of one result
MIN_LETTERS = 10      # letters and digits that a task text needs to ask for anything

# every reason of parse_task and leaks; the loop adds its own, such as "truncated"
REASONS = ("no JSON object", "no request and call", "malformed task", "trivial text", "tool schema",
           "unknown tool", "wrong arguments", "other kind than the seed", "answer leaked",
           "nothing to answer", "more than one answer", "not in the request")

OPTIONS = {  # name: default, help, choices
    "tools": ("", "functions to learn: JSON or JSONL, see worlds/README.md", None),
    "call_format": ("json", "how calls are written: JSON objects, or name(argument=value)",
                    ("json", "python")),
    "keep_tools": (False, "the simulator writes requests and calls for its seed's tools", None),
    "offer": (0, "functions of other base tasks that it may add to them, called or not", None),
    "exemplars": (0, "base tasks in the simulator's prompt, as examples of what it writes", None),
    "ground": (True, "refuse written tasks with a value that does not stand in the request", None),
    "base_limit": (0, "base tasks that are used, drawn by their ids; 0: all that are not held out",
                   None),
    "max_turns": (8, "turns of an episode, in tasks whose tools answer", None),
    "max_episode_tokens": (1024, "tokens of such an episode, results included", None),
}


@dataclass(frozen=True)
class Form:
    """OPTIONS of the texts as given, and the base tasks that examples and offers are drawn from."""
    call_format: str = "json"
    keep_tools: bool = False
    offer: int = 0
    exemplars: int = 0
    ground: bool = True
    nothing: bool = False  # whether some task has nothing to call, so that every prompt says how
    pool: tuple = ()
    called: tuple = ()  # tool specs that they call, each name once


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
    need(sum(map(str.isalnum, text)) >= MIN_LETTERS, "the task text says too little",
         "trivial text")
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
    if made not in _keys:  # asked again and again for every base task, by `examples`
        calls = normal_calls(task.spec["calls"], tools_of(task), ordered=False)
        twins = (task_id({"twin": mark}) for mark in twin_marks(task))
        _keys[made] = (task_id({"calls": calls}), words, *twins)
    return _keys[made]


# ---------------------------------------------------------------------------------------------
# reading tasks


def parse_task(text: str, seed_task: Task, epoch: int) -> Task:
    """The simulator's text -> a verified task. Raises InvalidTask with one of REASONS."""
    if _form.keep_tools and seed_task.spec:
        record = task_text.read(text, structured(seed_task), _call_of_line, _result_of_line)
        if record is None:
            raise InvalidTask("no request and call")
        if "calls" in record:
            unused = record.pop("unused")
            record |= {"ordered": seed_task.spec["ordered"],
                       "tools": grown_tools(seed_task, record, unused)}
    else:
        record = first_object(text)
        if record is None:
            raise InvalidTask("no JSON object")
    task = make_task(record, "env", seed_task.id, epoch)
    if seed_task.spec and kind(task) != kind(seed_task):
        raise InvalidTask("other kind than the seed")
    if unwritable(task):
        raise InvalidTask("tool schema")
    return task


def leaks(task: Task) -> str:
    """Why a task teaches nothing: one of REASONS, or "". A teacher's tasks are spared what fair
    tasks may have as well."""
    written = task.origin == "env" and task.seed_task not in ("", NO_SEED.id)
    reason = given_away(task) or (loopholes(task) if written else "")
    return reason or ("not in the request" if written and _form.ground and ungrounded(task) else "")


def offered(seed_task: Task) -> list[dict]:
    """The tools of other base tasks that a variation of this one may add: always the same ones."""
    own = {tool["name"] for tool in seed_task.spec.get("tools", ())}
    if not _form.offer or answering(seed_task) or not 0 < len(own) < OFFERED_UP_TO:
        return []
    others = list(_form.called)
    random.Random(seed_task.id).shuffle(others)
    return [tool for tool in others if tool["name"] not in own][:_form.offer]


def grown_tools(seed_task: Task, record: dict, unused) -> list[dict]:
    """The seed task's tools, and those offered that the record calls or names as unused, in an order
    that tells nothing. Raises InvalidTask for an unused one that was not offered."""
    others = {tool["name"]: tool for tool in offered(seed_task)}
    called = {call["name"] for call in record["calls"]}
    if not others.keys() >= set(unused) or called & set(unused):
        raise InvalidTask("unknown tool")
    added = [others[name] for name in sorted(called & others.keys() | set(unused))]
    tools = [*seed_task.spec["tools"], *added]
    if added:
        random.Random(record["task"]).shuffle(tools)
    return tools


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
def read_tasks(path: str, tools: str = "") -> tuple:
    """Every task of a JSONL file, in the shapes of tool_lists.own_record.

    tools: file of --tools, for tasks without tools of their own. Raises UserError with every line at
    fault, the first SHOWN_FAULTS in full.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; --base-tasks and --validation-tasks take JSONL, "
                        "see worlds/tool_calls.py for the format")
    listed = {tool["name"]: tool for tool in tool_lists.read_tools(tools)[0]} if tools else {}
    tasks, seen, faults = [], {}, []
    data = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")  # a byte order mark
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
        more = [f"and {len(faults) - SHOWN_FAULTS} more lines of {path}"]
        raise UserError("\n".join(faults[:SHOWN_FAULTS] + more * (len(faults) > SHOWN_FAULTS)))
    return tuple(tasks)


def _task_of_line(line: bytes, where: str, listed: dict) -> Task:
    """A line of a task file as a task. Raises InvalidTask with .detail; UserError for an encoding,
    which is the whole file's."""
    try:
        record = load_object(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8; save the file in that encoding") from None
    if record is None:
        raise invalid("not one JSON object", "correct or remove it")
    return make_task(tool_lists.own_record(record, listed), "base")


def splits_of(o) -> dict:
    """`_splits` by the options of a run."""
    option = lambda name: world_option(sys.modules[__name__], o, name)
    return _splits(o.base_tasks, o.validation_tasks, option("base_limit"), option("tools"))


@lru_cache
def _splits(base_file: str, validation_file: str, limit: int = 0, tools: str = "") -> dict:
    """{"base", "validation", "tuning": tasks}, by the order of the families, which are hashes.

    Tasks that share a key stay together. A validation file takes the place of the held-out eighth.
    limit: base tasks that are kept, 0 for all. tools: file of --tools.
    """
    tasks = read_tasks(base_file or str(EXAMPLE_TASKS), tools)
    given = read_tasks(validation_file, tools) if validation_file else ()
    taken = {key for task in given for key in same_task_key(task)}
    tasks = [task for task in tasks if taken.isdisjoint(same_task_key(task))]
    family = _families(tasks)
    # keys are hashes already; hashing again keeps the split apart from other uses of their order
    names = sorted(set(family.values()), key=lambda k: hashlib.sha256(k.encode()).hexdigest())
    n = max(1, len(names) // HELD_OUT)
    if len(names) < 2 * n + 1:
        raise UserError(f"{base_file or EXAMPLE_TASKS}: {len(names)} distinct tasks are too few: "
                        "some are held out for validation and tuning; give 3 or more, better 40")
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
    form = {name: world_option(sys.modules[__name__], o, name) for name in OPTIONS}
    for name in ("exemplars", "offer", "base_limit"):
        if form[name] < 0:
            raise UserError(f"--{name.replace('_', '-')} is {form[name]}: must not be negative")
    form.pop("base_limit"), form.pop("tools")  # `splits_of` reads them
    for name in ("max_turns", "max_episode_tokens"):
        value = form.pop(name)  # `play` reads them
        if value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}: must be at least 1")
    if form["offer"] and not form["keep_tools"]:
        raise UserError("--offer adds to the seed task's tools: it needs --keep-tools")
    short = form["call_format"] == "python"
    for name, least, brief in (("max_task_tokens", MIN_TASK_TOKENS, short and form["keep_tools"]),
                               ("max_response_tokens", MIN_RESPONSE_TOKENS, short)):
        least = MIN_PYTHON_TOKENS if brief else least
        if vars(o)[name] < least:
            raise UserError(f"--{name.replace('_', '-')} {vars(o)[name]} is too short for "
                            f"{'a call' if brief else 'JSON'}: give {least} or more, or start from "
                            "a --preset")
    read_tasks.cache_clear()  # the files may have been corrected since an earlier run
    _splits.cache_clear()
    splits = splits_of(o)
    called = {tool["name"]: tool for task in splits["base"] for tool in task.spec.get("tools", ())
              if [tool["name"]] == skills(task)}
    nothing = any(task.spec.get("calls") == [] for tasks in splits.values() for task in tasks)
    # a task with nothing to call is no example for a simulator, which writes calls
    pool = tuple(task for task in splits["base"] if task.spec.get("calls") != [])
    _form = Form(**form, nothing=nothing, pool=pool, called=tuple(called.values()))
    for task in (task for tasks in splits.values() for task in tasks):
        if name := unwritable(task):
            raise UserError(f"the task {task.text[:60]!r} has an argument {name!r}, which is no "
                            "name in Python: use --call-format json or leave the task out")


def read_answers_as(call_format: str, nothing: bool = False):
    """Set the form of calls alone, and whether "none" is an answer: for a process that never calls
    `prepare` (veRL's, or `genenv.py ask`). Raises UserError for a form that is none."""
    global _form
    if call_format not in OPTIONS["call_format"][2]:
        raise UserError(f"{call_format!r} is no form of calls: json or python")
    if (_form.call_format, _form.nothing) != (call_format, nothing):
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
    """Chat messages for the simulator: the form of a task, the seed, its success if known.

    alpha stays out: what is asked for holds at any target, so no record's prompt goes stale.
    """
    return _env_messages(seed_task, success, examples(seed_task, _form.exemplars))


def _env_messages(seed_task, success, shown) -> list[dict]:
    if _form.keep_tools:
        return task_text.prompt(_record(seed_task), tools_text(seed_task.spec.get("tools", ())), success,
                                list(map(_record, shown)), _line_of_call,
                                tools_text(offered(seed_task)))
    system = ENV_SYSTEM.format(answers="calls", form=CALLS_FORM) if structured(seed_task) else \
        ENV_SYSTEM.format(answers="answers", form=ANSWER_FORM)
    system += RESULTS_FORM * answering(seed_task)
    if shown:
        system += "\nExamples:\n" + "\n".join(_json(_record(task)) for task in shown)
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


def examples(seed_task: Task, n: int, without=()) -> list[Task]:
    """n base tasks to show beside a seed task: always the same ones, variations of it first.

    without: keys (same_task_key) of tasks not to show, beside those of the seed task.
    """
    if not n:
        return []
    keys = {*without, *same_task_key(seed_task)}
    others = [task for task in _form.pool if kind(task) == kind(seed_task)
              and keys.isdisjoint(same_task_key(task))]
    random.Random(seed_task.id).shuffle(others)
    return sorted(others, key=lambda task: not fits_tools(task, seed_task))[:n]  # stable


def fits_tools(task: Task, seed_task: Task) -> bool:
    """Whether a task's calls are calls of its seed task's tools; always so for two questions."""
    if kind(task) != kind(seed_task):
        return False
    if not structured(task):
        return True
    try:
        check_calls(task.spec["calls"], tools_of(seed_task))
    except InvalidTask:
        return False
    return True


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


def load_policy(o) -> Policy:
    """The chat model with two fresh adapters; both prompts of every task are tried first.

    Raises UserError if the model does not load, has no usable chat template, or a prompt is over
    the limit.
    """
    policy = Policy.load(o.model, **policy_options(o))
    every = [task for tasks in splits_of(o).values() for task in tasks]
    try_prompts(sys.modules[__name__], o, policy, every)
    return policy


def warm_start_pairs(o, turn: int = 0) -> dict:
    """What `genenv.py warm-start` imitates: {"agent": pairs, "env": pairs, "alone": how many tasks
    are the agent's alone}; a pair is (prompt, response).

    Base tasks alone. The agent's response is the expected one. The simulator's are other base tasks
    that the seed task's tools can do, at most VARIATIONS of them, in each `turn` the next ones; a
    seed task for which there is none (its functions occur nowhere else) is the agent's alone.
    With --offer every fourth of them is joined with a task of an offered function, and every fourth
    holds one unused; the agent meets one joined task for eight others.
    """
    tasks, env, alone = base_tasks(o), [], 0
    keys_of = {task.id: set(same_task_key(task)) for task in tasks}
    for seed_task in tasks:
        near = [task for task in tasks if keys_of[seed_task.id].isdisjoint(keys_of[task.id])
                and fits_tools(task, seed_task)]
        random.Random(seed_task.id).shuffle(near)
        n = min(VARIATIONS, len(near))
        chosen = [near[(turn * n + i) % len(near)] for i in range(n)]
        # what is to be written must not stand in the prompt
        keys = {key for task in chosen for key in keys_of[task.id]}
        prompt = _env_messages(seed_task, None, examples(seed_task, _form.exemplars, keys))
        env += [(prompt, grown_as_written(task, seed_task, turn)) for task in chosen]
        alone += not chosen
    agent = [*tasks, *joined_tasks(tasks, turn)]
    return {"agent": [(agent_prompt(task), played(task) if answering(task) else gold(task))
                      for task in agent], "env": env, "alone": alone}


def grown_as_written(task: Task, seed_task: Task, turn: int) -> str:
    """A task as the simulator would write it for a seed task, now and then with what is offered."""
    draw, others = random.Random(f"{task.id} {seed_task.id} {turn}"), offered(seed_task)
    kind = draw.randrange(4) if others else 0
    if kind == 1:
        return task_text.write(_record(task), _line_of_call, [draw.choice(others)["name"]])
    if kind == 2:
        tool = draw.choice(others)
        # functions of one name may differ in their arguments
        other = draw.choice([t for t in _form.pool if [tool["name"]] == skills(t) and
                             not argument_fault(t.spec["calls"][0]["arguments"], tool["parameters"])])
        return task_text.write(joined(task, other, draw), _line_of_call)
    return task_as_written(task)


def joined(one: Task, other: Task, draw) -> dict:
    """Two tasks as one record: both requests, then the calls of both."""
    return {"task": draw.choice(JOINTS).format(one.text, other.text),
            "calls": [*one.spec["calls"], *other.spec["calls"]]}


def joined_tasks(tasks, turn: int) -> list[Task]:
    """With --offer, a task with the calls of two for every eight of `tasks`; else none."""
    draw, out = random.Random(turn), []
    for task in draw.sample(tasks, len(tasks) // 8) if _form.offer else ():
        names = set(tools_of(task))
        other = draw.choice(tasks)
        if kind(task) == kind(other) == "calls" and names.isdisjoint(tools_of(other)):
            record = joined(task, other, draw)
            tools = [*task.spec["tools"], *other.spec["tools"]]
            draw.shuffle(tools)
            out.append(make_task({**record, "tools": tools}, "base"))
    return out


def task_as_written(task: Task) -> str:
    """A task in the form that the simulator writes."""
    if _form.keep_tools:
        return task_text.write(_record(task), _line_of_call)
    return _json(_record(task))


# ---------------------------------------------------------------------------------------------
# Eq. 1


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of the precision and recall of words, in [0, 1]; 0 if either has none."""
    a, b = normal_words(answer), normal_words(reference)
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
    try:
        calls = parse_calls(text)
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
    """`no call`, `1 call`, `2 calls`, `3+ calls` or `free-form`."""
    n = len(task.spec["calls"]) if structured(task) else None
    return {None: "free-form", 0: "no call", 1: "1 call", 2: "2 calls"}.get(n, "3+ calls")
