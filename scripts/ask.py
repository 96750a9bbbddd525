"""Ask an agent, trained or not: which calls does it make for a request of your own?

Usage:
    python genenv.py ask RUN "Put the dentist on Friday at nine"
    python genenv.py ask RUN                            # its held-out requests: which it gets right
    python genenv.py ask RUN --file requests.txt --json # or examples.jsonl, with the right calls
    python genenv.py ask RUN "Dim the study" --functions dim,lock
    python genenv.py ask MODEL --tools LIST --base-tasks EXAMPLES "Dim the study"

    from scripts.ask import Agent                       # in a program of your own
    answer = Agent("RUN")("Dim the study")              # or Agent("MODEL", tools=..., base_tasks=...)

RUN is a run folder of the tool_calls world, or the model folder of a warm start. MODEL is a chat model
that was not trained here, a folder or hub name: it is shown the examples that share most words with the
request, as turns of a chat. The agent answers greedily, and the calls that come back are printed. Nothing
is ever executed: a call is text, and whoever carries it out has to check it first. An answer that does not
fit its function is printed as it is, with what is wrong; values that do not stand in the request are
named. For requests with the right calls in them (lines of --base-tasks) it says which it gets right.
With --json each line has "request", "response", "offered", "calls" (null if none can be read), "fault" (what
is wrong with them), "ungrounded" (values not in the request), "right" (null if nothing was expected).

What is offered: functions of the run. An agent that has learned with a few in its prompt is lost among
hundreds, so of more than eight it is shown as many as the largest task of its training had, six at
least: those that share the most words with the request, a rare word counting more. --functions names
them instead.
"""
import json
import math
import sys
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from textwrap import shorten

from data_pool import Task
from model.files import UserError, check_hub, choose
from support.health import counted
from support.options import Parser, parse_options, saved_options
from worlds import load_world, open_policy, special_token_in, task_texts
from worlds.call_text import NOTHING, write_call
from worlds.leaks import ungrounded
from worlds.schemas import words_of
from worlds.tool_lists import as_line
from worlds.tool_calls import LINE, MOST_SHOWN, misfit, parse_calls, read_tasks

STEM = 5    # letters by which two words are one: reminder and remind
SHOTS = 18  # examples in the prompt of a model that was not trained


def main(argv) -> int:
    """The command `genenv.py ask`. Raises UserError, returns 0."""
    args, marks = parser().parse_intermixed_args(argv), []  # options may stand between RUN and the request
    agent = Agent(args.run, args.functions.split(","), args.tools, args.base_tasks)
    tasks, missed = read_requests(args, agent), Counter()
    print(*agent.about(), f"loading the model; answers: {len(tasks)} ...", sep="\n", file=sys.stderr)
    for task in tasks:
        marks.append(mark := mark_of(agent, task, answer := agent(task.text)))
        fault, value = (answer["fault"], answer["ungrounded"]) if mark != "right" else ("", "")
        lines = [f"> {task.text}"] * (len(tasks) > 1 or len(args.request) > 1)
        lines += map(write_call, answer["calls"]) if answer["calls"] and not fault else [answer["response"]]
        lines += [f"# {fault}"] * bool(fault)
        lines += [f"# not in the request: {value}"] * bool(value) + [f"# {mark}"] * bool(mark)
        record = {**answer, "ungrounded": value, "right": mark == "right" if mark else None}
        print(json.dumps(record, ensure_ascii=False) if args.json else "\n".join(lines), flush=True)
        missed.update((agent.world.skills(task) or [NOTHING]) if mark not in ("", "right") else ())
    if any(marks):
        print(f"{marks.count('right')} of {sum(map(bool, marks))} right; functions expected in "
              f"wrong answers: {counted(missed)}", file=sys.stderr)
    return 0


def parser():
    """The command line of `ask`."""
    p = Parser(prog="genenv.py ask", description=__doc__.splitlines()[0])
    p.add_argument("run", help="run folder, such as runs/001-genenv, that of a warm start, or a chat model")
    p.add_argument("request", nargs="*", help="if empty, the held-out requests, or all of EXAMPLES")
    p.add_argument("--file", default="", help="requests, one a line, or examples")
    p.add_argument("--functions", default="", metavar="A,B", help="offer these alone, all of them")
    p.add_argument("--json", action="store_true", help="one JSON object a request")
    p.add_argument("--tools", default="", metavar="LIST", help="functions, for a model that was not trained")
    p.add_argument("--base-tasks", default="", metavar="EXAMPLES", help="what it is shown in its prompt")
    return p


def read_requests(args, agent) -> list[Task]:
    """The requests of the command line and of --file, tasks without calls; examples have theirs. Without
    either the held-out ones; of a model that was not trained all examples, as none stands in its own prompt.
    Raises UserError if there are none, or an example cannot be used."""
    lines = Path(args.file).read_text("utf-8-sig", "replace").splitlines() if args.file else []
    examples = any(line.strip()[:1] == "{" for line in lines)
    asked = args.request if any(" " in text for text in args.request) else [" ".join(args.request)]
    lines = [*asked, *lines * (not examples)]
    tasks = [Task(line.strip(), {}) for line in lines if line.strip()]
    tasks += read_tasks(args.file, agent.world.tools, agent.world.form) if examples else []
    if not args.file and not args.request:
        tasks = [task for task in agent.examples or agent.world.validation_tasks() if "calls" in task.spec]
    if not tasks:
        raise UserError(f"there is no request to ask in {args.file or 'what was given'}")
    return tasks


# ---------------------------------------------------------------------------------------------
# who answers, and with which functions


class Agent:
    """The agent of a run or of a warm start, or a chat model with its files, loaded at the first request:
    Agent("runs/mine")("Dim the study") returns what --json prints, less "right". functions: names of those
    to offer alone."""

    def __init__(self, run, functions=(), tools="", base_tasks=""):
        """Raises UserError if nobody there can answer."""
        o, self.adapter = who_answers(Path(run), tools, base_tasks)
        with redirect_stdout(None):  # its notes were for the training
            self.world = load_world("tool_calls")(o)
        self.examples = read_tasks(base_tasks, self.world.tools, self.world.form) if base_tasks else []
        self.tools, self.most = offered(functions, self.world)

    def about(self):
        """What a user should know of the list and of the examples in the prompt, in lines."""
        known = {name for task in self.examples for name in self.world.skills(task)}
        lost = {what: names for what, names in self.world.notes.items() if what.startswith("left out")}
        bare = [tool["name"] for tool in self.tools if known and tool["name"] not in known]
        names = f"{len(bare)} without an example: {shorten(', '.join(bare), LINE)}" * bool(bare)
        return filter(None, (f"{len(self.tools)} functions", as_line(lost), names))

    @cached_property
    def policy(self):
        """The model, with the agent's adapter if it has one."""
        return open_policy(self.world.o.model, self.world.o, ("agent",) * bool(self.adapter),
                           adapter_folder=self.adapter or None)

    def __call__(self, request: str) -> dict:
        """The agent's greedy answer. Raises UserError if the request cannot be put to it."""
        few, o = short_list(request, self.tools, self.most), self.world.o
        if token := special_token_in(request, self.policy.tokenizer):
            raise UserError(f"{request[:40]!r} spells {token!r}, a control token of the model: reword it")
        task = Task(request, {"tools": few, "calls": [], "ordered": False})
        system, asked = self.world.agent_prompt(task)
        prompt = self.policy.encode([system, *self.shots(request), asked])
        if len(prompt) > o.max_prompt_tokens:
            raise UserError(f"{request[:40]!r} makes a prompt of {len(prompt)} tokens, more than "
                            f"{o.max_prompt_tokens}: name fewer --functions")
        # alone: in bf16 a near tie would fall otherwise beside other requests
        [rollout] = self.policy.sample("agent" if self.adapter else None, [prompt], 1, o.max_response_tokens,
                                       temperature=0)
        calls = parse_calls(text := self.policy.decode(rollout.response), self.world.form)
        # it may know a function that it is not offered from an example or from its training
        sound = [call for call in calls or () if not fault_of([call], self.tools)]
        return {"request": request, "calls": calls, "fault": fault_of(calls, self.tools), "response": text,
                "ungrounded": ungrounded(Task(request, {"tools": self.tools, "calls": sound})),
                "offered": [tool["name"] for tool in few]}

    def shots(self, request: str) -> list[dict]:
        """The examples nearest to a request, and their answers, as chat messages."""
        world, tasks = self.world, [task for task in self.examples if task.text != request]
        return [turn for i in nearest(request, [task.text for task in tasks], SHOTS) for turn in (
            world.agent_prompt(tasks[i])[-1], {"role": "assistant", "content": world.gold(tasks[i])})]


def who_answers(folder: Path, tools="", base_tasks=""):
    """(options, folder of the agent's adapter or "") of a run's or a warm start's folder, or of a model that
    was not trained and its files."""
    if tools or base_tasks:
        o = parse_options(["--preset=135m-cpu", "--max-prompt-tokens=4096", "--max-response-tokens=128",
                           f"--model={folder}", f"--tools={tools or 'base'}", f"--base-tasks={base_tasks}"])
        check_hub(o.model)
        return o, ""
    if (folder / "warm_start.json").is_file():
        return saved_options(folder / "warm_start.json", model=str(folder)), ""
    o, adapter = saved_options(folder), folder / "adapters" / "agent"
    if o.world != "tool_calls" or not adapter.is_dir():
        raise UserError(f"ask needs an ended run of the world tool_calls: {folder} (world {o.world}) is none")
    return o, str(adapter)


def offered(functions, world):
    """(the functions that may be offered, those of the list and of base tasks; how many of them in a prompt).
    Raises UserError."""
    learned = [task.spec.get("tools", []) for task in world.base_tasks()]
    tools = [*world.tools.values(), *sum(learned, [])]
    by_name = {tool["name"]: tool for tool in tools[::-1]}  # the first of a name counts
    named = [name.strip() for name in functions if name.strip()]
    for name in set(named) - set(by_name):
        raise UserError(f"--functions: no function {name!r:.80} to offer: {choose(name, by_name):.200}")
    most = len(named) or max([MOST_SHOWN if len(by_name) > 8 else 8, *map(len, learned)])
    return [by_name[name] for name in named or dict.fromkeys(tool["name"] for tool in tools)], most


def short_list(request: str, tools: list, number: int) -> list[dict]:
    """The `number` functions nearest to a request, in the order of the list."""
    texts = [" ".join([tool["name"], tool["description"],
                       *task_texts(tool["parameters"].get("properties", {}))]) for tool in tools]
    return [tools[i] for i in nearest(request, texts, number)]


def nearest(request: str, texts: list[str], number: int) -> list[int]:
    """The positions of the texts, at most `number`, that are nearest to a request, in rising order.

    How near: the sum of log(texts / texts with the word) over the words that they share, known by their
    first letters.
    """
    asked, *having = [{word[:STEM] for word in words_of(text) if len(word) > 1} for text in (request, *texts)]
    count = Counter(word for own in having for word in own)
    worth = [sum(math.log(len(texts) / count[word]) for word in asked & own) for own in having]
    return sorted(sorted(range(len(texts)), key=lambda i: -worth[i])[:number])  # stable


# ---------------------------------------------------------------------------------------------
# the answer


def fault_of(calls, tools: list) -> str:
    """What is wrong with the calls of an answer, or ""; calls are None if none can be read."""
    if not calls:
        return "no call can be read in the answer" if calls is None else "nothing to call"
    return misfit(calls, {tool["name"]: tool for tool in tools})


def mark_of(agent, task, answer: dict) -> str:
    """"right", or what was expected of an answer; "" of a request without calls."""
    if "calls" not in task.spec:
        return ""
    tools = {tool["name"]: tool for tool in [*task.spec["tools"], *agent.tools]}
    asked = replace(task, spec={**task.spec, "tools": list(tools.values())})
    if agent.world.score(asked, answer["response"])[0] == 1:
        return "right"
    hidden = ", ".join(sorted(set(agent.world.skills(task)) - set(answer["offered"])))
    expected = "; ".join(map(write_call, task.spec["calls"])) or NOTHING
    return f"expected: {expected}" + f" (not offered: {hidden})" * bool(hidden)
