"""Ask the agent of a run: its answer to a task of yours, and what that answer is worth.

Paper: nothing; this is for looking at what was learned.

Usage:
    python genenv.py ask RUN "3 s1 dbl s2 inc"        # a task as the world's simulator writes it
    python genenv.py ask RUN "3 s1 dbl" --untrained   # the same with the adapter off: compare
    python genenv.py ask RUN                          # its held-out tasks: which it gets right
    python genenv.py ask RUN "3 s1 dbl" "2 inc" --json

    from scripts.ask import Agent                     # in a program of your own
    answer = Agent("RUN")("3 s1 dbl s2 inc")

RUN is the folder of a run that has ended; one of `--epochs 0` shows what its model could before.
The agent answers greedily. An episode is played to its end and printed turn by turn. An answer has
these fields; printed are those with something in them, with --json all, as one object a line:

    "request", "response"   what was asked and answered
    "right", "expected"     true or false, and a right answer; null if nobody knows it
    "reward", "valid"       Eq. 1, and whether the answer was well-formed
    "limit"                 what cut the answer off, such as "too many tokens"; "" if nothing did

Tool calls. A request is enough; the right calls need not be given. Nothing is ever executed:
whoever carries a call out has to check it first. What does not fit its function is named, and so
are values that the request does not mention. In place of "reward", "valid" and "limit" --json has:

    "offered"     names of the functions in the prompt
    "calls"       null if none can be read
    "fault"       what is wrong with the calls
    "ungrounded"  values of the calls that the request does not mention

What is offered: functions of the run; with a held-out request also those of its own. An agent that
has learned with a few in its prompt is lost among hundreds. So up to eight are all offered, and of
more the six that share the most words with the request, a rare word counting more.

Deviations: training samples its answers, this takes the likeliest token each time.
"""
import json
import math
import sys
from collections import Counter
from contextlib import redirect_stdout
from functools import cached_property
from pathlib import Path

import torch

from data_pool import Task
from errors import UserError, printable
from interaction import attempt_score, play, transcript
from model.loading import check_base, read_adapter
from support.options import COMMANDS, Parser, saved_options
from worlds import NO_SEED, InvalidTask, load_world, special_token_in, task_texts
from worlds.tool_calls import MOST_SHOWN, misfit, parse_calls
from worlds.tools.leaks import ungrounded
from worlds.tools.schemas import words_of

STEM = 5       # words that begin with the same 5 letters count as one: reminder and remind
ALL_SHOWN = 8  # up to so many functions are offered without a choice


def main(argv) -> int:
    """Print the agent's answer to each request, and at the end how many answers are right, of those
    that can be checked. Returns 0. Raises UserError."""
    args = parser().parse_intermixed_args(argv)  # options may come between RUN and the request
    agent = Agent(args.run, args.untrained)
    tasks = [agent.task_of(text) for text in args.request]
    if not tasks:
        tasks = agent.world.validation_tasks()
    print(f"loading the model; answers: {len(tasks)} ...", file=sys.stderr)

    verdicts = []
    for task in tasks:
        answer = agent.answer(task)
        verdicts.append(answer["right"])
        if args.json:
            print(json.dumps(answer, ensure_ascii=False), flush=True)
        else:
            for name, value in answer.items():
                if value not in ("", None):
                    print(printable(f"{name}: {value}"), flush=True)

    known = len(verdicts) - verdicts.count(None)
    if known:
        print(f"{verdicts.count(True)} of {known} right", file=sys.stderr)
    return 0


def parser():
    """The command line of `ask`."""
    p = Parser(prog="python genenv.py ask", description=COMMANDS["ask"])
    p.add_argument("run", help="folder of a run, such as runs/001-genenv")
    p.add_argument("request", nargs="*", help="tasks or requests; none: the held-out ones")
    p.add_argument("--untrained", action="store_true", help="answer with the adapter off")
    p.add_argument("--json", action="store_true", help="one JSON object an answer")
    return p


# ---------------------------------------------------------------------------------------------
# who answers


class Agent:
    """The agent of a run; its model is loaded at the first request.

    Agent("runs/mine")("Dim the study") returns what --json prints. untrained: the same model
    without what the run has learned.
    """

    def __init__(self, run, untrained=False):
        """Raises UserError if nobody there can answer."""
        o, self.adapter = saved_options(run), Path(run, "adapters", "agent")
        if not self.adapter.is_dir():
            raise UserError(f"{run} has no adapters/agent: the run has not ended, --resume goes on")
        self.untrained = untrained
        with redirect_stdout(sys.stderr):  # answers alone are on standard output
            self.world = load_world(o.world)(o)
        self.has_tools = isinstance(self.world, load_world("tool_calls"))

    @cached_property
    def policy(self):
        """The model with the agent's adapter."""
        with redirect_stdout(sys.stderr):
            policy = self.world.load_policy()
        if policy.source:
            check_base(self.adapter, policy.source)
        read_adapter(policy.model, self.adapter, "agent")
        return policy

    def __call__(self, request: str) -> dict:
        """The agent's greedy answer. Raises UserError if the request cannot be put to it."""
        return self.answer(self.task_of(request))

    def task_of(self, text: str) -> Task:
        """A text as a task: of a world with tools a request whose calls nobody knows, else as the
        simulator would have written it. Raises UserError if it is no task of this world."""
        if self.has_tools:
            return Task(text, {})
        try:
            return self.world.parse_task(text, NO_SEED, epoch=0)  # any epoch: nobody reads it
        except InvalidTask as reason:
            example = self.world.base_tasks()[0].text
            raise UserError(f"{text[:80]!r} is no task of the world {self.world.o.world}: {reason};"
                            f" one is {example!r}") from None

    def answer(self, task: Task) -> dict:
        """The answer to a task, as --json prints it. Raises UserError."""
        if self.has_tools and "reference" not in task.spec:
            return self._answer_calls(task)
        rollout, text = self._attempt(task)
        reward, valid, _ = attempt_score(self.world, task, rollout, text)  # Eq. 1
        return {"request": task.text, "response": transcript(rollout, text), "right": reward == 1,
                "expected": self.world.gold(task), "reward": reward, "valid": valid,
                "limit": rollout.limit}

    def _answer_calls(self, task: Task) -> dict:
        """The answer to a request, read as calls."""
        # the prompt has the tools alone, so the calls may be left empty
        by_name = candidates(self.world, task)
        tools = list(by_name.values())
        offered = short_list(task.text, tools)
        shown = Task(task.text, {"tools": offered, "calls": [], "ordered": False})
        _, text = self._attempt(shown)
        calls = parse_calls(text, self.world.form)
        right, expected, not_in_request = None, None, ""
        if "calls" in task.spec:
            right, expected = self.world.score(task, text)[0] == 1, self.world.gold(task)
        fault = "no call can be read"
        if calls is not None:
            # a call of a function learned in training but not offered now is no fault
            fault = misfit(calls, by_name, 0)
        # a right answer may have a value that the request does not mention
        if not fault and not right:
            not_in_request = ungrounded(Task(task.text, {"tools": tools, "calls": calls}))
        return {"request": task.text, "response": text, "right": right, "expected": expected,
                "calls": calls, "fault": fault, "ungrounded": not_in_request,
                "offered": [tool["name"] for tool in offered]}

    def _attempt(self, task: Task):
        """One greedy attempt at a task: (Rollout, text). Raises UserError."""
        token = special_token_in(task.text, self.policy.tokenizer)
        if token:
            raise UserError(f"{task.text[:40]!r} spells {token!r}, a control token of the model")
        length, o = len(self.policy.encode(self.world.agent_prompt(task))), self.world.o
        if length > o.max_prompt_tokens:  # no model answers well beyond what it reads
            raise UserError(f"{task.text[:40]!r} makes a prompt of {length} tokens: the run was "
                            f"made with --max-prompt-tokens {o.max_prompt_tokens}: shorten it")
        # one at a time: in bf16 the batch can change which token wins a near tie
        adapter = None if self.untrained else "agent"
        try:
            [rollout], [text] = play(self.world, o, self.policy, adapter, [task], G=1,
                                     temperature=0.0, generator=None)
        except torch.OutOfMemoryError:
            raise UserError(f"out of GPU memory with a prompt of {length} tokens: does another "
                            "program use the GPU?") from None
        return rollout, text


# ---------------------------------------------------------------------------------------------
# which functions are offered


def candidates(world, task) -> dict:
    """{name: function that may be offered with a task}: those of the list, of the base tasks, and
    the task's own. Of two with one name the first counts, but the task's own before all, as its
    right calls fit that one."""
    by_name = dict(world.tools)
    for other in world.base_tasks():
        for tool in other.spec.get("tools", []):
            by_name.setdefault(tool["name"], tool)
    return by_name | {tool["name"]: tool for tool in task.spec.get("tools", [])}


def short_list(request: str, tools: list) -> list[dict]:
    """All functions if there are few, else the MOST_SHOWN nearest to a request, in their order.

    How near: the sum of log(functions / functions with the stem) over the stems that they share.
    """
    if len(tools) <= ALL_SHOWN:
        return tools
    stems_of_tools = [stems_of(" ".join(task_texts(tool))) for tool in tools]
    tools_with = Counter(stem for stems in stems_of_tools for stem in stems)
    asked = stems_of(request)

    def nearness(position):
        shared = stems_of_tools[position] & asked
        # fsum is exact: a set's order, which varies, must not break a tie
        return math.fsum(math.log(len(tools) / tools_with[stem]) for stem in shared)

    # a stable sort: ties keep the order of the list
    best = sorted(range(len(tools)), key=nearness, reverse=True)[:MOST_SHOWN]
    return [tools[i] for i in sorted(best)]


def stems_of(text: str) -> set:
    """The words of a text, each cut to its first STEM letters; single letters are left out."""
    return {word[:STEM] for word in words_of(text) if len(word) > 1}
