"""A real domain: JSON tool calls and short answers, with any chat model as the base.

Paper: a task instance carries a prompt (tool specs, goal) and an evaluation spec (the calls it
takes, or a reference answer), and `score` is both branches of Eq. 1.

Usage: `python genenv.py --preset 7b-24gb --model DIR --base-tasks FILE`. The file holds one JSON
object per line (worlds/tools/example_tasks.jsonl has 51, and is the default):

    {"task": "Dim the study to 30 percent.",
     "tools": [{"name": "set_light", "description": "...", "parameters": JSON schema}, ...],
     "calls": [{"name": "set_light", "arguments": {"room": "study", "brightness": 30}}],
     "ordered": true}          optional: the calls have to come in this order
    {"task": "Who wrote Dune?", "reference": "Frank Herbert"}      or a list of accepted answers

A task has 1 to 32 tools and at most 8 calls; `"calls": []` says that none of the tools does what is
asked, and the agent then answers `none`, which its prompt mentions only if some task has that
answer. worlds/tools/tool_lists.py reads other shapes of tools, calls and lines. With --tools FILE, tasks
without tools have those of the list that they call, and others up to three. Every line is checked
before a model is loaded. An eighth of the file is held out for validation; of TUNED tasks or more
another for tuning.

With --tools FILE the simulator also writes for those tools (worlds/tools/task_text.py): it is shown an
example and six tools (`seed_for`), chooses a level (how many calls, and among how many of these
tools the agent has to choose), writes the calls, then the request. Without --tools it writes JSON
tasks and invents the tools, which takes a large model.

When two calls are the same: same name, same arguments. Numbers are compared by value (5 is 5.0),
but 5 is not "5" and true is not 1; strings must agree in every character; an argument left out
equals its schema's `default`. The whole list must agree, in any order unless `ordered`. Part of the
list earns nothing.

Deviations: there is no executor for invented tools, so `valid` means that every call parses and
satisfies the schema of a declared tool. The simulator must keep the kind of its seed, since a drift
to free-form answers, whose references nothing checks, would be rewarded, too. Two tasks with the
same calls or the same words count as one when copies, duplicates and held-out tasks are looked for
(same_task_key). The simulator's prompt does not name alpha: a record of an earlier epoch would name
an older target. What else a simulator may not get away with is in worlds/tools/leaks.py.
"""
import hashlib
import itertools
import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

import worlds
from data_pool import Task, task_id
from errors import UserError, first_line, printable
from worlds import NO_SEED, InvalidTask, held_out_keys
from worlds.tools import call_text, task_text, tool_lists
from worlds.tools.call_text import MAX_CHARS
from worlds.tools.leaks import leaks, loopholes, ungrounded
from worlds.tools.schemas import DECODER, MAX_CALLS, canonical, check_calls, graded_calls, load_object, \
    normal_calls, objects_of, structured, texts_as_read, tools_of, well_formed, words_of
from worlds.tools.swaps import swapped
from worlds.tiny_model import chat

EXAMPLE_TASKS = Path(__file__).parent / "tools/example_tasks.jsonl"
SHOWN_WITH = 2        # examples that a task is imitated with, as the simulator, in a warm start
SWAPPED = 0.75        # of the examples of a pass of a warm start have other values
MOST_CALLED, MOST_SHOWN = 3, 6  # calls of a written task, tools that the simulator is shown
ROOM = 2              # characters of these tools per token of --max-prompt-tokens
TRIED = 20            # examples among which one is looked for that can be joined
JOINTS = ("{} Also, {}", "{} And then: {}", "{} {}")  # how two requests become one
HELD_OUT = 8          # one task in so many for validation, as many again for tuning
FEWEST = 3            # examples to learn from; a warm start needs more
MIN_LETTERS = 10      # letters and digits that a written task's text needs to ask for anything
FEW = 10              # held-out tasks below which success says little
TUNED = 20            # distinct tasks from which on some are kept for tuning
# keywords that a model may not use in a schema: a regular expression may take for ever
PATTERN = re.compile('"pattern": "|"patternProperties": ')
TOLD, LINE = 600, 200  # characters of all faults of a file, of one


# ---------------------------------------------------------------------------------------------
# tasks: from the simulator and from files


def make_task(record: dict, origin: str, seed="", epoch=0, call_format="json") -> Task:
    """One JSON object of either kind -> Task. Raises InvalidTask, with .detail, if it is neither,
    or if call_format cannot write its calls."""
    text = record.get("task")
    if not isinstance(text, str):
        raise InvalidTask("malformed task", "no text under 'task'")
    text = text.strip()
    # "Call Bob" of a user's is a task; a simulator's text of that length mostly is not
    least = 1 if origin == "base" else MIN_LETTERS
    if sum(map(str.isalnum, text)) < least:
        raise InvalidTask("trivial text", "the task text says too little")
    asks_for_calls = "calls" in record
    if asks_for_calls == ("reference" in record):
        raise InvalidTask("malformed task", "needs either 'calls' or 'reference'")
    # what a simulator writes beside a task would be imitated along with it
    allowed = ["task", "tools", "calls", "ordered"] if asks_for_calls else ["task", "reference"]
    if set(record) - set(allowed):
        raise InvalidTask("malformed task", f"only {', '.join(allowed)} belong in it")
    if asks_for_calls:
        spec = _spec_of_calls(record, origin, call_format)
    else:
        spec = _spec_of_question(record)
    return _task(text, spec, origin, seed, epoch)


def _spec_of_calls(record: dict, origin: str, call_format: str) -> dict:
    """The evaluation spec of a task that takes calls. Raises InvalidTask."""
    tools = tool_lists.normalized_tools(record.get("tools"), call_format)
    spec = {"tools": tools, "calls": record["calls"], "ordered": record.get("ordered", False)}
    if not isinstance(spec["ordered"], bool):
        raise InvalidTask("malformed task", "ordered is neither true nor false")
    # an author may say that nothing is to be called; a simulator would say it of anything
    least = 0 if origin == "base" else 1
    check_calls(spec["calls"], {tool["name"]: tool for tool in tools}, least)
    return spec


def _spec_of_question(record: dict) -> dict:
    """The evaluation spec of a question: its accepted answers. Raises InvalidTask."""
    answers = record["reference"]
    if not isinstance(answers, list):
        answers = [answers]
    texts = all(isinstance(answer, str) and words_of(answer) for answer in answers)
    if not answers or not texts:
        raise InvalidTask("malformed task", "the reference is not a text or a list of texts")
    return {"reference": answers}


def _task(text, spec, *rest) -> Task:
    # the same spec under another text is another task, with a p_hat of its own
    return Task(text, spec, *rest, task_id({"text": text, **spec}))


def same_task_key(task):
    """What a task is recognised by: its calls however it is worded, and its words."""
    # kept on the task: it is asked for many times
    if "keys" not in vars(task):
        task.keys = (task_id({"question": words_of(task.text)}),)
        # a question has its words alone; so have calls without arguments, which many tasks share
        if any(call["arguments"] for call in task.spec.get("calls") or ()):
            calls = normal_calls(task.spec["calls"], tools_of(task), ordered=False)
            # an invisible sign or a capital in a value makes no other task, though another answer
            calls = sorted(canonical(texts_as_read(json.loads(call))) for call in calls)
            task.keys = (task_id({"calls": calls}), *task.keys)
    return task.keys


def read_tasks(path: str, tools=None, call_format="json"):
    """Every task of a JSONL file, in the shapes of tool_lists.normalized_record.

    tools: {name: spec} of --tools, for tasks without tools of their own. Raises UserError with the
    first bad lines.
    """
    text = tool_lists.read_text(path, "--base-tasks and --validation-tasks take JSONL")
    tasks, lines_asking, faults = [], {}, []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            task, asked = _task_of_line(line, tools, call_format)
            first = lines_asking.setdefault(asked, number)
            if first < number:
                raise InvalidTask("malformed task", f"asks what line {first} asks; remove one")
            tasks.append(task)
        except InvalidTask as fault:
            faults.append(shorten(f"line {number}: {fault}: {fault.detail}", LINE))
    if faults:
        raise UserError(printable(f"{path}, {shorten('; '.join(faults), TOLD)}"))
    if not tasks:
        raise UserError(f"{path}: no task in it; write one object per line, or leave the option "
                        "out")
    return tasks


def _task_of_line(line: str, tools, call_format: str):
    """(a line of a task file as a task, what it asks, given which tools). Raises InvalidTask with
    .detail."""
    try:
        record = DECODER.decode(line)
        if not isinstance(record, dict):
            raise ValueError("no object")
        # only what is kept of a line is held to what a model can write
        own = call_text.plain(tool_lists.normalized_record(record, tools))
        task = make_task(own, "base", call_format=call_format)
    except (ValueError, RecursionError) as error:
        detail = f"{first_line(error)}; write one object per line"
        raise InvalidTask("not one JSON object", detail) from None
    world = World.scorer(call_format)
    gold = world.gold(task)
    if world.score(task, gold)[0] != 1:
        raise InvalidTask("malformed task", f"the right answer {gold!r:.80} cannot be read back")
    # tools that the line leaves out depend on its calls
    return task, canonical([task.text, record.get("tools") and task.spec["tools"]])


def split(tasks, given, path: str) -> dict:
    """{"validation", "tuning", "base": tasks}, by hashes of the tasks' first keys.

    given: tasks of a validation file, in place of the held-out eighth. Fewer than TUNED have no
    tuning part. No key of one part is in another. Raises UserError if fewer than FEWEST are left to
    learn from.
    """
    every = len(tasks)
    tasks = _without(tasks, given)
    if len(tasks) < every:
        print(f"{path}: {every - len(tasks)} left out, as requests of --validation-tasks have the "
              "same calls or words: to train on them, take those requests out", flush=True)
    names = sorted({same_task_key(task)[0] for task in tasks}, key=_hash)
    eighth = max(1, len(names) // HELD_OUT)
    tuned = eighth if len(names) >= TUNED else 0
    held_out = tuned if given else tuned + eighth
    least = held_out + FEWEST
    if len(names) < least:
        raise UserError(f"{path}: too few distinct tasks: {len(names)}; give {least} or more")

    def named(chosen):
        return [task for task in tasks if same_task_key(task)[0] in chosen]

    validation = given or named(names[tuned:held_out])
    tuning = _without(named(names[:tuned]), validation)
    base = _without(named(names[held_out:]), validation + tuning)
    return {"validation": validation, "tuning": tuning, "base": base}


def _without(tasks, others):
    """The tasks but those that are, in other words or with other calls, among `others`."""
    keys = _keys_of(others)
    return [task for task in tasks if keys.isdisjoint(same_task_key(task))]


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _keys_of(tasks) -> set:
    return {key for task in tasks for key in same_task_key(task)}


# ---------------------------------------------------------------------------------------------
# what both models are shown


AGENT_CALLS = """\
You answer requests by calling tools. These are the tools, as JSON, one per line:
{tools}

Reply with every call that the request needs, in the order it asks for, and no other. Write \
each one as a JSON object between tags, on a line of its own:
<tool_call>{{"name": "TOOL", "arguments": {{"ARGUMENT": "VALUE"}}}}</tool_call>"""

AGENT_PYTHON = """\
Answer the request with calls of these functions, one per line, and nothing else:
{tools}"""

NONE_FITS = f"\n\nIf no function does what is asked, reply: {call_text.NOTHING}"

AGENT_ANSWER = "You answer questions. Reply with the answer alone, in as few words as it takes."

ENV_SYSTEM = """\
You write practice tasks for an assistant. You are given one task and, if it was tried \
recently, how often the assistant solved it, and you write a new one.
The new task is a variation, not a copy: another situation that asks for other {answers}. \
Every value of the answer must follow from the task text, exactly one answer may be right, \
and the text must not state the answer itself.
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
ANSWER_FORM = '{"task": "a question with a short answer", "reference": "the answer"}'

ENV_USER = "The task:\n{seed}\n\nSolved: {solved}\nWrite the variation."


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False)


# for each --call-format what writes a call as one line, and what reads one
LINES = {"json": (_json, load_object), "python": (call_text.write_call, call_text.parse_call)}


def _record(task) -> dict:
    """A task as an object of a task file; a question with one of its answers."""
    if not structured(task):
        return {"task": task.text, "reference": task.spec["reference"][0]}
    record = {"task": task.text, "tools": task.spec["tools"], "calls": task.spec["calls"]}
    if task.spec["ordered"]:
        record["ordered"] = True
    return record


def tools_text(tools, call_format: str) -> str:
    """Tool specs, one per line; "" if there are none."""
    write = call_text.signature if call_format == "python" else _json
    return "\n".join(map(write, tools))


# ---------------------------------------------------------------------------------------------
# the agent's answers


def parse_calls(response: str, call_format: str):
    """The calls of a response, or None if there are none or one cannot be read.

    json: in <tool_call> tags; python: one per line. The word "none" alone says that there is
    nothing to call: no calls, an empty list.
    """
    if response.strip() == call_text.NOTHING:
        return []
    if call_format == "python":
        return call_text.parse_calls(response)
    blocks = response.split("<tool_call>")[1:]
    if not 1 <= len(blocks) <= 2 * MAX_CALLS:
        return None
    calls = []
    for block in blocks:
        body, closing_tag, _ = block.partition("</tool_call>")
        call = load_object(body)
        if not closing_tag or call is None:
            return None
        calls.append(call)
    return calls


def misfit(calls, tools: dict, least=1) -> str:
    """Why calls cannot be read or do not pass check_calls, or ""."""
    try:
        check_calls(calls, tools, least)
    except InvalidTask as fault:
        return fault.detail or str(fault)
    return ""


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of the precision and recall of words but articles, in [0, 1]; 0 if either has
    none."""
    answered, expected = _content(answer), _content(reference)
    common = (answered & expected).total()
    return 2 * common / (answered.total() + expected.total()) if common else 0.0


def _content(text) -> Counter:
    """The words of a text but articles, counted."""
    return Counter(word for word in words_of(text) if word not in ("a", "an", "the"))


# ---------------------------------------------------------------------------------------------
# the world


class World(worlds.World):
    """The domain of tool calls and short answers."""
    # every reason of parse_task and leaks; the loop adds its own, such as "truncated"
    REASONS = (
        "no JSON object", "no request and call", "malformed task", "trivial text", "tool schema",
        "unknown tool", "wrong level", "wrong arguments", "other kind than the seed",
        "answer leaked", "more than one answer", "copy of a base task", "not in the request",
        "not in the calls")
    OPTIONS = {  # name: default, help, choices
        "call_format": ("json", "how calls are written: JSON objects, or name(argument=value)",
                        ("json", "python")),
        "tools": ("", "tools to learn, JSON or JSONL (worlds/TOOLS.md); base: those of the base "
                  "tasks; empty: the simulator invents some", None)}
    # starting points for a chat model of one to three billion weights; the presets have their own
    DEFAULTS = {"max_prompt_tokens": 2048, "max_response_tokens": 256, "max_task_tokens": 768,
                "agent_lr": 1e-4, "env_lr": 1e-4, "token_budget": 8192, "max_rows": 256}
    nothing = False  # whether some task has nothing to call
    category_name = "number of calls (of functions offered)"
    imitate_once = True  # a small simulator would write the same few calls for ever
    same_task_key = staticmethod(same_task_key)

    def __init__(self, o):
        super().__init__(o)
        self.form = self.option("call_format")
        self._line_of_call, self._call_of_line = LINES[self.form]
        file = o.base_tasks or str(EXAMPLE_TASKS)
        self.tools = self._read_tools(self.option("tools"), file)
        self.splits = self._read_tasks(file)
        every = [task for part in self.splits.values() for task in part]
        self.nothing = any(task.spec.get("calls") == [] for task in every)
        self.base_keys = _keys_of(self.base_tasks())
        self._say_what_was_read()

    def _read_tools(self, listed: str, file: str) -> dict:
        """{name: spec} of --tools; what is odd in it is printed. file: of the base tasks."""
        if not listed:
            return {}
        if listed != "base" and not self.o.base_tasks:
            raise UserError("--tools needs examples of its functions: give --base-tasks FILE")
        path = file if listed == "base" else listed
        tools, notes = tool_lists.read_tools(path, self.form)
        if notes:
            print(tool_lists.notes_line(notes), flush=True)
        return tools

    def _read_tasks(self, file: str) -> dict:
        """`split` of the base tasks of a file."""
        base, held_out = read_tasks(file, self.tools, self.form), []
        if self.o.validation_tasks:
            held_out = read_tasks(self.o.validation_tasks, self.tools, self.form)
        return split(base, held_out, file)

    def _say_what_was_read(self):
        """One line of numbers, and one for examples that no run would write."""
        held_out, tuning, train = map(len, self.splits.values())
        line = f"{len(self.tools)} functions, {train} examples to learn from, {tuning} for " \
            f"tuning, {held_out} held out"
        if held_out < FEW:
            line += " (too few to measure with: give fifty or more in --validation-tasks)"
        print(line, flush=True)
        lacking = [task.text for task in self.base_tasks() if ungrounded(task)]
        if self.tools and lacking:
            print("examples whose request lacks a value of its calls: "
                  f"{len(lacking)}, the first {lacking[0]!r:.90}")

    def base_tasks(self):
        """The tasks of --base-tasks that are not held out."""
        return self.splits["base"]

    def validation_tasks(self, split="validation"):
        """The held-out eighth, or --validation-tasks; "tuning" is another eighth, if there are
        TUNED."""
        return self.splits[split]

    # ---- the two roles

    def agent_prompt(self, task):
        """Chat messages for the agent: the tools and the form of a call, then the request."""
        system = AGENT_ANSWER
        if structured(task):
            form = AGENT_PYTHON if self.form == "python" else AGENT_CALLS
            system = form.format(tools=tools_text(task.spec["tools"], self.form))
            if self.nothing:
                system += NONE_FITS
        return chat(system, task.text)

    def env_prompt(self, seed_task, success):
        """Chat messages for the simulator: the seed task, its success if known, what to write
        for."""
        if self._in_lines(seed_task):
            return task_text.prompt(_record(seed_task), success, self._line_of_call,
                                    tools_text(_shown(seed_task), self.form))
        answers, form = ("calls", CALLS_FORM) if structured(seed_task) else ("answers", ANSWER_FORM)
        user = ENV_USER.format(seed=_json(_record(seed_task)), solved=task_text.solved(success))
        return chat(ENV_SYSTEM.format(answers=answers, form=form), user)

    def seed_for(self, task, generator):
        """The seed task as it is put to the simulator: with MOST_SHOWN tools drawn from the list,
        and the same id. Questions stay as they are. generator: torch.Generator.
        """
        import torch
        if not self._in_lines(task):
            return task
        draw = random.Random(int(torch.randint(2 ** 31, (), generator=generator)))
        return _showing(task, self._tools_with([], MOST_SHOWN, draw))

    def _tools_with(self, tools, number: int, draw):
        """`tools` and others of the list, as many as wanted and as a prompt has room for, in random
        order."""
        chosen = list(tools)
        room = ROOM * self.o.max_prompt_tokens - len(tools_text(tools, self.form))
        for tool in draw.sample(list(self.tools.values()), len(self.tools)):
            size = len(tools_text([tool], self.form))
            if len(chosen) < number and tool not in chosen and size <= room:
                chosen.append(tool)
                room -= size
        draw.shuffle(chosen)
        return chosen

    def parse_task(self, text, seed_task, epoch):
        """The simulator's text -> a verified task. Raises InvalidTask with one of REASONS."""
        if self._in_lines(seed_task):
            record = self._record_in_lines(text, _shown(seed_task))
        else:
            record = next(objects_of(text), None)
            if record is None:
                raise InvalidTask("no JSON object")
            if PATTERN.search(json.dumps(record.get("tools"))):
                raise InvalidTask("tool schema")
        task = make_task(record, "env", seed_task.id, epoch, self.form)
        if seed_task.spec and structured(task) != structured(seed_task):
            raise InvalidTask("other kind than the seed")
        return task

    def _record_in_lines(self, text, shown: list) -> dict:
        """A text in the lines of task_text, for these tools -> the record of a task. Raises
        InvalidTask."""
        record = task_text.read(text, self._call_of_line)
        if record is None:
            raise InvalidTask("no request and call")
        n_calls, n_tools = record.pop("level")
        called = {call["name"] for call in record["calls"] if well_formed(call)}
        calls_fit = n_calls == len(record["calls"]) and 0 < n_calls <= MOST_CALLED
        if not calls_fit or not len(called) <= n_tools <= len(shown):
            raise InvalidTask("wrong level")
        # the called tools, and others as the level says, in an order that tells nothing
        tools = sorted(shown, key=lambda tool: tool["name"] not in called)[:n_tools]
        random.Random(record["task"]).shuffle(tools)
        return {**record, "tools": tools, "ordered": False}

    def _in_lines(self, task) -> bool:
        """Whether the simulator writes such a task in lines: one with calls, for the tools of the
        list."""
        return bool(self.tools) and structured(task)

    def task_as_written(self, task) -> str:
        """A task in the form that the simulator writes."""
        record = _record(task)
        if self._in_lines(task):
            return task_text.write(record, self._line_of_call)
        return _json(record)

    def leaks(self, task):
        """Why a task teaches nothing: one of REASONS, or "". A teacher's tasks are spared what fair
        tasks may have as well."""
        reason = leaks(task)
        if reason or task.origin != "env" or task.seed_task == NO_SEED.id:
            return reason
        # few examples are soon known by heart; the loop refuses copies of the seed task alone
        if self.tools and not self.base_keys.isdisjoint(same_task_key(task)):
            return "copy of a base task"
        return loopholes(task)

    # ---- Eq. 1

    def score(self, task, response):
        """Eq. 1 -> (reward in [0, 1], valid). Only the response is read, never the prompt.

        Structured: 1 if the calls are exactly those expected, else 0; valid if all of them parse
        and satisfy the schema of a declared tool. Free-form: the best token-F1 over the references;
        valid if the response has any word.
        """
        if len(response) > MAX_CHARS:
            return 0.0, False
        if not structured(task):
            answers = task.spec["reference"]
            reward = max(token_f1(response, answer) for answer in answers)  # Eq. 1: sim
            return reward, bool(words_of(response))
        calls, tools = parse_calls(response, self.form), tools_of(task)
        ordered = task.spec["ordered"]
        # `scorer` has read no file and does not know `nothing`
        no_call_counts = self.nothing or not task.spec["calls"]
        if misfit(calls, tools, 0 if no_call_counts else 1):
            return 0.0, False
        expected = normal_calls(task.spec["calls"], tools, ordered)
        return float(normal_calls(calls, tools, ordered) == expected), True  # Eq. 1: 1[a' = a]

    def graded(self, task, response, reward):
        """The reward, or for calls their partial credit, as Tool-R0 gives it
        (schemas.graded_calls)."""
        if not structured(task):
            return reward
        calls = parse_calls(response, self.form) or []
        return max(reward, graded_calls(calls, task))

    def gold(self, task):
        """A response that earns 1: calls as the agent writes them, or a reference."""
        if not structured(task):
            return task.spec["reference"][0]
        if self.form == "python":
            lines = map(call_text.write_call, task.spec["calls"])
        else:
            lines = [f"<tool_call>{_json(call)}</tool_call>" for call in task.spec["calls"]]
        return "\n".join(lines) or call_text.NOTHING

    # ---- what the figures need

    def skills(self, task):
        """Names of the tools that the task calls; none for a free-form question."""
        return [call["name"] for call in task.spec.get("calls", [])]

    def category(self, task):
        """`1`, `2`, ..., `free-form`; with --tools the level, `1 of 3`."""
        if not structured(task):
            return "free-form"
        calls = str(len(self.skills(task)))
        return f"{calls} of {len(tools_of(task))}" if self.tools else calls

    # ---- warm start

    def warm_start_pairs(self, turn=0):
        """{"agent": pairs, "env": pairs} for the pass number `turn`; a pair is (prompt, response).

        The agent's response is the expected one. The simulator writes each task that a run would
        take from it, after SHOWN_WITH other tasks, in each `turn` others. With --tools most tasks
        have other values, and all levels are shown alike: tasks are joined to two and to three
        calls, among any number of tools.
        """
        draw, tasks = random.Random(turn), self.base_tasks()
        if self.tools:
            tasks = self._of_all_levels(tasks, draw)
        env = []
        for task in tasks:
            seeds = self._shown_with(task, tasks, draw) if teachable(task) else []
            for seed in seeds:
                # the prompt shows other tools, and among them those of the task to be written
                if self.tools and structured(task):
                    tools = list(tools_of(task).values())
                    seed = _showing(seed, self._tools_with(tools, MOST_SHOWN, draw))
                env.append((self.env_prompt(seed, None), self.task_as_written(task)))
        return {"agent": [(self.agent_prompt(task), self.gold(task)) for task in tasks], "env": env}

    def _of_all_levels(self, tasks, draw):
        """Tasks with other values, and joined ones with two and with three calls, where two fit
        together; none is like a held-out task. Each offers a random number of tools."""
        held_out = held_out_keys(self)

        def is_new(task):
            return held_out.isdisjoint(same_task_key(task))

        single = []
        for task in tasks:
            changed = _with_other_values(task, draw)
            single.append(changed if is_new(changed) else task)
        # to mostly two calls, and to three
        once = _joined(single, single, draw)
        twice = _joined(once, single, draw)
        tasks = single + [task for task in once + twice if is_new(task)]
        return [self._with_some_tools(task, draw) if structured(task) else task for task in tasks]

    def _with_some_tools(self, task, draw):
        """A task that offers the tools which it calls, and a random number of others."""
        called = [tool for tool in task.spec["tools"] if tool["name"] in self.skills(task)]
        number = draw.randint(max(1, len(called)), max(MOST_SHOWN, len(called)))
        tools = self._tools_with(called, number, draw)
        return _task(task.text, {**task.spec, "tools": tools}, task.origin)

    def _shown_with(self, task, tasks, draw):
        """SHOWN_WITH of the tasks that the simulator may be shown to write this one: others of its
        kind."""
        keys = set(same_task_key(task))

        def fits(other):
            if structured(other) != structured(task) or not keys.isdisjoint(same_task_key(other)):
                return False
            return task.text not in other.text and other.text not in task.text

        fitting = filter(fits, draw.sample(tasks, len(tasks)))
        return list(itertools.islice(fitting, SHOWN_WITH))


def _showing(seed_task, shown) -> Task:
    return replace(seed_task, spec={**seed_task.spec, "shown": shown})


def _shown(seed_task):
    return seed_task.spec.get("shown", seed_task.spec.get("tools", []))


def teachable(task) -> bool:
    """Whether a simulator may imitate a task: one with calls only if a run would take it from
    it."""
    if not structured(task):
        return True
    return bool(task.spec["calls"]) and not leaks(task) and not loopholes(task)


def _with_other_values(task, draw):
    """A task, mostly with other values; as it is if its calls do not fit then."""
    if not structured(task) or draw.random() > SWAPPED:
        return task
    text, calls = swapped(task, draw)
    if misfit(calls, tools_of(task), 0):
        return task
    return _task(text, {**task.spec, "calls": calls}, task.origin)


def _joined(tasks, singles, draw):
    """Each task that calls something, with the request and the calls of another one of other
    tools."""
    joined = []
    for one in tasks:
        candidates = draw.sample(singles, min(len(singles), TRIED))
        others = [other for other in candidates if _can_join(one, other)]
        if others:
            other = others[0]
            tools = {**tools_of(one), **tools_of(other)}
            spec = {"tools": list(tools.values()), "calls": one.spec["calls"] + other.spec["calls"],
                    "ordered": False}
            text = draw.choice(JOINTS).format(one.text, other.text)
            joined.append(_task(text, spec, "base"))
    return joined


def _can_join(one: Task, other: Task) -> bool:
    """Whether two tasks call something, other tools each, and not too much for one."""
    calls, more = one.spec.get("calls"), other.spec.get("calls")
    if not calls or not more or len(calls) + len(more) > MOST_CALLED:
        return False
    names = {call["name"] for call in calls}
    return names.isdisjoint(call["name"] for call in more)
