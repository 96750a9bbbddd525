"""Train any chat model on a real domain: JSON tool calls and short answers.

Paper: a task instance carries a prompt (tool specs, goal) and an evaluation spec (the calls it
takes, or a reference answer), and `score` has both branches of Eq. 1.

Usage: `python genenv.py --preset 7b-24gb --model DIR --base-tasks FILE`. The file holds one JSON
object per line (worlds/tools/example_tasks.jsonl has 51, and is the default):

    {"task": "Dim the study to 30 percent.",
     "tools": [{"name": "set_light", "description": "...", "parameters": JSON schema}, ...],
     "calls": [{"name": "set_light", "arguments": {"room": "study", "brightness": 30}}],
     "ordered": true}          optional: the calls have to come in this order
    {"task": "Who wrote Dune?", "reference": "Frank Herbert"}      or a list of accepted answers

A task has 1 to 32 tools and at most 8 calls. `"calls": []` means that none of the tools does what
is asked. The agent then answers `none`, which its prompt mentions only if some task has that
answer. worlds/tools/tool_lists.py reads other shapes of tools. With --tools FILE, a task without
tools gets those of the list that it calls, and others up to three in all. Every line is checked
before a model is loaded. An eighth of the file is held out for validation. If the file has TUNED
distinct tasks or more, another eighth is held out for tuning.

The agent writes calls as the chat templates of Qwen and Hermes do, each as a JSON object between
<tool_call> tags. If a response or a written task has a </think>, only what follows the last one is
read.

The simulator writes one JSON object. With --tools FILE it is shown the seed task and six tools
(`seed_for`), and writes calls to these, then a request that names their values. The agent has to
choose among the same six. Without --tools it also invents the tools, which takes a large model.

Two calls are the same if they have the same name and the same arguments, in any order. Numbers are
compared by value (5 is 5.0), but 5 is not "5" and true is not 1. Strings must agree in every
character. An argument that is left out equals its schema's `default`. The whole list of calls must
agree, in any order unless the task is `ordered`. A partly right list earns nothing.

Deviations: there is no executor for invented tools, so `valid` means that every call parses and
satisfies the schema of a declared tool. The simulator must keep the kind of its seed: a drift to
free-form answers, whose references nothing checks, would be rewarded too. In the search for copies,
duplicates and held-out tasks, two tasks with the same calls or the same words count as one
(same_task_key). The simulator's prompt does not name alpha, because a record of an earlier epoch
would name an older target. worlds/tools/leaks.py defines what else is refused.
"""
import hashlib
import json
import random
import re
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from textwrap import shorten

import torch

import worlds
from data_pool import Task, task_id
from errors import UserError, first_line, printable
from worlds import FEW, NO_SEED, InvalidTask
from worlds.tiny_model import chat
from worlds.tools import tool_lists
from worlds.tools.leaks import leaks, loopholes
from worlds.tools.offers import MOST_OFFERED, candidates, short_list
from worlds.tools.schemas import DECODER, MAX_CALLS, MAX_CHARS, call_fault, canonical, \
    check_calls, graded_calls, json_value, load_object, normal_calls, objects_of, structured, \
    tools_of
from worlds.tools.texts import answer_words, texts_as_read, token_f1, without_thought, words_of

EXAMPLE_TASKS = Path(__file__).parent / "tools/example_tasks.jsonl"
SHOWN_WITH = 2        # seed tasks from which a warm start shows the simulator how to write a task
ROOM = 2              # characters of the shown tools per token of --max-prompt-tokens
HELD_OUT = 8          # one task in this many is for validation, another one for tuning
FEWEST = 3            # the smallest number of examples to learn from; a warm start needs more
MIN_LETTERS = 10      # letters and digits that a written task's text needs to ask for anything
TUNED = 20            # with this many distinct tasks, some are kept for tuning
NOTHING = "none"      # the agent's answer if there is nothing to call
# keywords that a model may not use in a schema: a regular expression may take forever
PATTERN = re.compile('"pattern": "|"patternProperties": ')
ALL_FAULTS, LINE = 600, 180  # at most this many characters report a file's faults, and one fault


# ---------------------------------------------------------------------------------------------
# tasks: from the simulator and from files


def make_task(record: dict, origin: str, seed="", epoch=0) -> Task:
    """Return a JSON object as a Task that asks for either calls or a short answer.

    Raise InvalidTask, with .detail, if it is not one.
    """
    text = record.get("task")
    if not isinstance(text, str):
        raise InvalidTask("malformed task", "no text under 'task'")
    text = text.strip()
    # a user's "Call Bob" is a task; a text of that length from a simulator mostly is not
    least = 1 if origin == "base" else MIN_LETTERS
    if sum(map(str.isalnum, text)) < least:
        raise InvalidTask("trivial text", "the task text says too little")
    asks_for_calls = "calls" in record
    if asks_for_calls == ("reference" in record):
        raise InvalidTask("malformed task", "needs either 'calls' or 'reference'")
    # what a simulator writes besides a task would be imitated along with it
    allowed = ["task", "tools", "calls", "ordered"] if asks_for_calls else ["task", "reference"]
    if set(record) - set(allowed):
        raise InvalidTask("malformed task", f"only {', '.join(allowed)} belong in it")
    if asks_for_calls:
        spec = _spec_of_calls(record, origin)
    else:
        spec = _spec_of_question(record)
    # the same spec with another text is another task, with its own p_hat
    return Task(text, spec, origin, seed, epoch, task_id({"text": text, **spec}))


def _spec_of_calls(record: dict, origin: str) -> dict:
    """Return the evaluation spec of a task that takes calls, or raise InvalidTask."""
    tools = tool_lists.normalized_tools(record.get("tools"))
    spec = {"tools": tools, "calls": record["calls"], "ordered": record.get("ordered", False)}
    if not isinstance(spec["ordered"], bool):
        raise InvalidTask("malformed task", "ordered is neither true nor false")
    # a person may declare that nothing is to be called; a simulator would declare it of anything
    least = 0 if origin == "base" else 1
    check_calls(spec["calls"], {tool["name"]: tool for tool in tools}, least)
    return spec


def _spec_of_question(record: dict) -> dict:
    """Return the evaluation spec of a question (its accepted answers), or raise InvalidTask."""
    answers = record["reference"]
    if not isinstance(answers, list):
        answers = [answers]
    texts = all(isinstance(answer, str) and answer_words(answer) for answer in answers)
    if not answers or not texts:
        raise InvalidTask("malformed task", "the reference is not a text or a list of texts")
    return {"reference": answers}


def same_task_key(task):
    """Return a task's keys: one made from its calls, whatever its wording, one from its words."""
    return _keys_of_json(json.dumps([task.text, task.spec]))


@lru_cache(2 ** 14)
def _keys_of_json(task: str) -> tuple:
    """Return the keys of a task, given as JSON text so that they are computed once."""
    task = Task(*json.loads(task))
    keys = [task_id({"question": words_of(task.text)})]
    # many tasks share a call without arguments, so it is no key; a question has only its words
    if any(call["arguments"] for call in task.spec.get("calls", ())):
        calls = normal_calls(task.spec["calls"], tools_of(task), ordered=False)
        # an invisible character or a capital in a value makes another answer, but not another task
        calls = sorted(canonical(texts_as_read(json.loads(call))) for call in calls)
        keys.insert(0, task_id({"calls": calls}))
    return tuple(keys)


def read_tasks(path: str, tools: dict):
    """Return every task of a JSONL file.

    tools: {name: spec} of --tools, for tasks that list no tools; it may be empty. Raise UserError
    with the first bad lines.
    """
    text = tool_lists.read_text(path, "--base-tasks and --validation-tasks take JSONL")
    # {what is wrong: in which lines}
    faults = defaultdict(list)
    tasks, lines_asking = [], {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            task, asked = _task_of_line(line, tools)
            first = lines_asking.setdefault(asked, number)
            if first < number:
                raise InvalidTask("malformed task", f"asks what line {first} asks; remove one")
            tasks.append(task)
        except InvalidTask as fault:
            faults[shorten(f"{fault}: {fault.detail}", LINE)].append(number)
    if faults:
        parts = [f"line {tool_lists.first_of(lines)}: {what}" for what, lines in faults.items()]
        raise UserError(printable(f"{path}, {shorten('; '.join(parts), ALL_FAULTS)}"))
    if not tasks:
        raise UserError(f"{path}: no task in it; write one object per line, or leave the option "
                        "out")
    return tasks


def _task_of_line(line: str, tools: dict):
    """Return (the task in a line of a task file, a text of what it asks and of its listed tools).

    Raise InvalidTask with .detail.
    """
    try:
        record = DECODER.decode(line)
        if not isinstance(record, dict):
            raise ValueError("not an object")
        # only what is kept of a line must be JSON that a model can write
        normalized = json_value(tool_lists.normalized_record(record, tools))
        task = make_task(normalized, "base")
    except (ValueError, RecursionError) as error:
        detail = f"{first_line(error)}; write one object per line"
        raise InvalidTask("not one JSON object", detail) from None
    # tools that were added to the line depend on its calls, so they are not part of what it asks
    return task, canonical([task.text, record.get("tools") and task.spec["tools"]])


def split(tasks, held_out, path: str) -> dict:
    """Return {"validation", "tuning", "base": tasks}, split by hashes of the tasks' first keys.

    held_out: tasks of a validation file, instead of the held-out eighth. No key of one part is in
    another. Raise UserError if fewer than FEWEST tasks are left to learn from.
    """
    others = _without(tasks, held_out)
    n_left_out = len(tasks) - len(others)
    if n_left_out:
        print(f"{path}: {n_left_out} left out, because requests of --validation-tasks have the "
              "same calls or words: to train on them, remove those requests", flush=True)

    # the first tasks by hash are for tuning, the next for validation
    keys = sorted({same_task_key(task)[0] for task in others}, key=_hash)
    eighth = max(1, len(keys) // HELD_OUT)
    n_tuning = eighth if len(keys) >= TUNED else 0
    n_held_out = n_tuning if held_out else n_tuning + eighth
    least = n_held_out + FEWEST
    if len(keys) < least:
        raise UserError(f"{path}: too few distinct tasks: {len(keys)}; give {least} or more")

    validation = held_out or _with_first_key(others, keys[n_tuning:n_held_out])
    tuning = _without(_with_first_key(others, keys[:n_tuning]), validation)
    return {"validation": validation, "tuning": tuning,
            "base": _without(others, validation + tuning)}


def _with_first_key(tasks, keys) -> list:
    """Return the tasks whose first key is one of these."""
    return [task for task in tasks if same_task_key(task)[0] in keys]


def _without(tasks, others) -> list:
    """Return the tasks except those that share a key with one of the others."""
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

NONE_FITS = f"\n\nIf no function does what is asked, reply: {NOTHING}"

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
# a request for given calls only has to name their values
LISTED_FORM = """\
{"calls": [{"name": "function_name", "arguments": {"argument": "value"}}], "task": "what the user \
says"}
"calls" are one or more calls of the functions below; the assistant has to choose among them."""
ANSWER_FORM = '{"task": "a question with a short answer", "reference": "the answer"}'

ENV_USER = "The task:\n{seed}\n\nSolved: {solved}\n{functions}Write the variation."


def to_json(value) -> str:
    """Return a value as JSON on one line, with the letters of all scripts unescaped."""
    return json.dumps(value, ensure_ascii=False)


def tools_text(tools) -> str:
    """Return tool specs as JSON, one per line; "" if there are none."""
    return "\n".join(map(to_json, tools))


# ---------------------------------------------------------------------------------------------
# the agent's answers


def parse_calls(response: str):
    """Return the calls of a response, or None if there are none or one cannot be read.

    If the answer is only "none", there is nothing to call, and the list is empty.
    """
    answer = without_thought(response)
    if answer.strip() == NOTHING:
        return []
    blocks = answer.split("<tool_call>")[1:]
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


# ---------------------------------------------------------------------------------------------
# the world


class World(worlds.World):
    """Define the domain of tool calls and short answers."""
    # every reason of parse_task and leaks; the loop adds its own, such as "truncated"
    REASONS = (
        "no JSON object", "malformed task", "trivial text", "tool schema", "unknown tool",
        "wrong arguments", "other kind than the seed", "answer leaked", "more than one answer",
        "copy of a base task", "not in the request", "not in the calls")
    OPTIONS = {  # name: default, help, choices
        "tools": ("", "tools to learn, JSON or JSONL (worlds/TOOLS.md); base: those of the base "
                  "tasks; empty: the simulator invents some", None)}
    # starting points for a chat model of one to three billion weights; the presets have their own
    DEFAULTS = {"max_prompt_tokens": 2048, "max_response_tokens": 256, "max_task_tokens": 768,
                "agent_lr": 1e-4, "env_lr": 1e-4, "token_budget": 8192, "max_rows": 256}
    may_decline = False  # whether some task has nothing to call
    category_name = "number of calls"
    imitate_once = True  # otherwise a small simulator would write the same few calls forever
    reads_task_files = True
    same_task_key = staticmethod(same_task_key)

    def __init__(self, o):
        super().__init__(o)
        file = o.base_tasks or str(EXAMPLE_TASKS)
        self.tools = self._read_tools(self.option("tools"), file)
        self.splits = self._read_tasks(file)
        tasks = [task for part in self.splits.values() for task in part]
        self.may_decline = any(task.spec.get("calls") == [] for task in tasks)
        self.base_keys = _keys_of(self.base_tasks())
        self._print_what_was_read()

    def _read_tools(self, listed: str, file: str) -> dict:
        """Return {name: spec} of --tools and print what is odd. file: that of --base-tasks."""
        if not listed:
            return {}
        if listed != "base" and not self.o.base_tasks:
            raise UserError("--tools needs examples of its functions: give --base-tasks FILE")
        path = file if listed == "base" else listed
        tools, notes = tool_lists.read_tools(path)
        if notes:
            print(tool_lists.notes_line(notes), flush=True)
        return tools

    def _read_tasks(self, file: str) -> dict:
        """Read the base tasks of a file and return them as `split` divides them."""
        base, held_out = read_tasks(file, self.tools), []
        if self.o.validation_tasks:
            held_out = read_tasks(self.o.validation_tasks, self.tools)
        return split(base, held_out, file)

    def _print_what_was_read(self):
        """Print one line with the numbers of functions and tasks."""
        held_out, tuning, train = map(len, self.splits.values())
        line = f"{len(self.tools)} functions, {train} examples to learn from, {tuning} for " \
            f"tuning, {held_out} held out"
        if held_out < FEW:
            line += " (too few to measure with: give fifty or more in --validation-tasks)"
        print(line, flush=True)

    def base_tasks(self):
        """Return the tasks of --base-tasks that are not held out."""
        return self.splits["base"]

    def validation_tasks(self, split="validation"):
        """Return the held-out eighth, or --validation-tasks.

        "tuning" is another eighth, if there are TUNED tasks.
        """
        return self.splits[split]

    # ---- the two roles

    def agent_prompt(self, task):
        """Return the agent's chat messages: tools and the form of a call, then the request."""
        system = AGENT_ANSWER
        if structured(task):
            system = AGENT_CALLS.format(tools=tools_text(task.spec["tools"]))
            if self.may_decline:
                system += NONE_FITS
        return chat(system, task.text)

    def env_prompt(self, seed_task, success):
        """Return the simulator's chat messages.

        They hold the form, the seed task, its success if known, and the functions to call.
        """
        answers, form, functions = "calls", CALLS_FORM, ""
        if not structured(seed_task):
            answers, form = "answers", ANSWER_FORM
        elif self.tools:
            form, functions = LISTED_FORM, f"Functions:\n{tools_text(_shown(seed_task))}\n"
        solved = "unknown" if success is None else f"{100 * success:.0f} % of the time"
        user = ENV_USER.format(seed=self.task_as_written(seed_task), solved=solved,
                               functions=functions)
        return chat(ENV_SYSTEM.format(answers=answers, form=form), user)

    def seed_for(self, task, generator):
        """Return the seed task as the simulator sees it: with MOST_OFFERED tools of the list.

        They are drawn at random by `generator`, a torch.Generator. The id stays the same, and a
        question stays as it is.
        """
        if not self.tools or not structured(task):
            return task
        rng = random.Random(int(torch.randint(2 ** 31, (), generator=generator)))
        return _showing(task, self._tools_with([], rng))

    def _tools_with(self, tools, rng) -> list:
        """Return `tools` and others of the list, in random order.

        They are MOST_OFFERED in all, or as many as a prompt has room for.
        """
        chosen = list(tools)
        room = ROOM * self.o.max_prompt_tokens - len(tools_text(tools))
        for tool in rng.sample(list(self.tools.values()), len(self.tools)):
            size = len(to_json(tool))
            if len(chosen) < MOST_OFFERED and tool not in chosen and size <= room:
                chosen.append(tool)
                room -= size
        rng.shuffle(chosen)
        return chosen

    def parse_task(self, text, seed_task, epoch):
        """Read the task that the simulator's text describes.

        Raise InvalidTask with one of REASONS.
        """
        record = next(objects_of(without_thought(text)), None)
        if record is None:
            raise InvalidTask("no JSON object")
        if PATTERN.search(json.dumps(record.get("tools"))):
            raise InvalidTask("tool schema")
        if self.tools and structured(seed_task) and "calls" in record:
            if "tools" in record:
                raise InvalidTask("malformed task")
            record["tools"] = _shown(seed_task)
        task = make_task(record, "env", seed_task.id, epoch)
        if seed_task.spec and structured(task) != structured(seed_task):
            raise InvalidTask("other kind than the seed")
        return task

    def task_as_written(self, task) -> str:
        """Return a task as the simulator writes it; a question has only its first answer."""
        if not structured(task):
            return to_json({"task": task.text, "reference": task.spec["reference"][0]})
        record = {"task": task.text, "tools": task.spec["tools"], "calls": task.spec["calls"]}
        if self.tools:
            record = {"calls": task.spec["calls"], "task": task.text}
        if task.spec["ordered"]:
            record["ordered"] = True
        return to_json(record)

    def leaks(self, task):
        """Return why a task teaches nothing: one of REASONS, or "".

        A teacher's tasks are refused only for what a fair task never has.
        """
        reason = leaks(task)
        if reason or task.origin != "env" or task.seed_task == NO_SEED.id:
            return reason
        # the few base tasks are soon known by heart, and the loop refuses only copies of the seed
        if self.tools and not self.base_keys.isdisjoint(same_task_key(task)):
            return "copy of a base task"
        return loopholes(task)

    # ---- Eq. 1

    def score(self, task, response):
        """Return Eq. 1 as (reward in [0, 1], valid). Only the response is read, never the prompt.

        Structured: 1 if the calls are exactly those expected, else 0; valid if all of them parse
        and satisfy the schema of a declared tool. Free-form: the best token-F1 over the references;
        valid if the response has any word.
        """
        if len(response) > MAX_CHARS:
            return 0.0, False
        if not structured(task):
            answer, references = without_thought(response), task.spec["reference"]
            reward = max(token_f1(answer, reference) for reference in references)  # Eq. 1: sim
            return reward, bool(answer_words(answer))
        calls, tools = parse_calls(response), tools_of(task)
        # `scorer` has read no file and does not know `may_decline`
        no_call_counts = self.may_decline or not task.spec["calls"]
        if call_fault(calls, tools, least=0 if no_call_counts else 1):
            return 0.0, False
        expected = normal_calls(task.spec["calls"], tools, task.spec["ordered"])
        is_right = normal_calls(calls, tools, task.spec["ordered"]) == expected
        return float(is_right), True  # Eq. 1: 1[a' = a]

    def graded(self, task, response, reward):
        """Return the reward or, for calls in any order, their partial credit if that is higher.

        The credit is the one that Tool-R0 gives (schemas.graded_calls).
        """
        if not structured(task) or task.spec["ordered"]:
            return reward
        calls = parse_calls(response) or []
        return max(reward, graded_calls(calls, task))

    def gold(self, task):
        """Return a response that earns 1: calls as the agent writes them, or a reference."""
        if not structured(task):
            return task.spec["reference"][0]
        lines = [f"<tool_call>{to_json(call)}</tool_call>" for call in task.spec["calls"]]
        return "\n".join(lines) or NOTHING

    # ---- what a person asks

    def asked_task(self, text):
        """Return a person's request as a task whose calls nobody knows."""
        return Task(text, {"tools": [], "calls": [], "ordered": False}, "asked")

    def offered(self, task):
        """Return the task with the functions that the agent is shown: a few of the candidates."""
        if not structured(task):
            return task
        tools = short_list(task.text, list(candidates(self, task).values()))
        return replace(task, spec={**task.spec, "tools": tools})

    def remarks(self, task, response) -> dict:
        """Return an answer's calls, what is wrong with them, and which functions were offered."""
        if not structured(task):
            return {}
        calls, fault = parse_calls(response), "no call can be read"
        if calls is not None:
            # it is no fault to call a function that was learned in training but is not offered now
            fault = call_fault(calls, candidates(self, task), least=0)
        offered = [tool["name"] for tool in self.offered(task).spec["tools"]]
        return {"calls": calls, "fault": fault, "offered": offered}

    # ---- what the figures need

    def skills(self, task):
        """Return the names of the tools that the task calls; none for a free-form question."""
        return [call["name"] for call in task.spec.get("calls", [])]

    def category(self, task):
        """Return the number of calls, or `free-form`."""
        return str(len(task.spec["calls"])) if structured(task) else "free-form"

    # ---- warm start

    def warm_start_pairs(self, turn=0):
        """Return {"agent": pairs, "env": pairs} for the pass number `turn`.

        A pair is (prompt, response). The agent's response is the expected one. The simulator's
        responses are the tasks that a run would accept from it; it writes each of them once from
        each of SHOWN_WITH other tasks, which change with `turn`.
        """
        rng, tasks, env = random.Random(turn), self.base_tasks(), []
        for task in filter(teachable, tasks):
            for seed in self._examples_for(task, rng):
                # the prompt shows other tools, among them those of the task to be written
                if self.tools and structured(task):
                    seed = _showing(seed, self._tools_with(task.spec["tools"], rng))
                env.append((self.env_prompt(seed, None), self.task_as_written(task)))
        return {"agent": [worlds.demonstration(self, task) for task in tasks], "env": env}

    def _examples_for(self, task, rng) -> list:
        """Draw SHOWN_WITH other tasks of the same kind, as seeds from which to write this one."""
        keys = set(same_task_key(task))
        tasks = self.base_tasks()
        examples = []
        for other in rng.sample(tasks, len(tasks)):
            is_same = not keys.isdisjoint(same_task_key(other))
            if structured(other) == structured(task) and not is_same:
                examples.append(other)
        return examples[:SHOWN_WITH]


def _showing(seed_task, tools) -> Task:
    """Return a copy of a seed task, with the same id, with these tools to show the simulator."""
    return replace(seed_task, spec={**seed_task.spec, "shown": tools})


def _shown(seed_task) -> list:
    """Return the tools to show with a seed task: its own unless others were drawn."""
    return seed_task.spec.get("shown", seed_task.spec.get("tools", []))


def teachable(task) -> bool:
    """Return whether a simulator may imitate a task: a question, or calls that a run accepts."""
    if not structured(task):
        return True
    return bool(task.spec["calls"]) and not leaks(task) and not loopholes(task)
