"""Ask the agent of a run: its answer to a task of yours, and what that answer is worth.

Paper: nothing; this is for looking at what was learned.

Usage:
    python genenv.py ask RUN "3 s1 dbl s2 inc"        # a task as the world's simulator writes it
    python genenv.py ask RUN "3 s1 dbl" --untrained   # the same with the adapter off: compare
    python genenv.py ask RUN                          # its held-out tasks: which it gets right
    python genenv.py ask RUN --file tasks.txt --json  # tasks or requests, one a line
    python genenv.py ask RUN "Dim the study" --functions dim,lock   # tool calls: offer these alone

    from scripts.ask import Agent                     # in a program of your own
    answer = Agent("RUN")("3 s1 dbl s2 inc")

RUN is the folder of a run that has ended, or the model folder of a warm start. The agent answers
greedily. An episode is played to its end and printed turn by turn. With --json each answer is an
object with these fields:

    "request", "response"   what was asked and answered
    "right"                 true or false; null if nobody knows the right answer
    "reward", "valid"       Eq. 1, and whether the answer was well-formed
    "limit"                 what cut the answer off, such as "too many tokens"; "" if nothing did

Tool calls. A request is enough; the right calls need not be given. The calls of the answer are
printed, and nothing is ever executed: whoever carries a call out has to check it first. An answer
that does not fit its function is printed as it is, with what is wrong. Values that the request does
not mention are named. A --file of examples (lines as of --base-tasks) also tells which of them the
agent gets right. In place of "reward", "valid" and "limit" --json has:

    "offered"     names of the functions in the prompt
    "calls"       null if none can be read
    "fault"       what is wrong with the calls
    "ungrounded"  values of the calls that the request does not mention

What is offered: functions of the run; for an example or a held-out request also those of its own.
An agent that has learned with a few in its prompt is lost among hundreds. So up to eight are all
offered, and of more as many as the largest task of its training had, but at least six: those that
share the most words with the request, a rare word counting more. --functions names them instead.

Deviations: training samples its answers, this takes the likeliest token each time.
"""
import json
import math
import sys
from collections import Counter
from contextlib import redirect_stdout
from functools import cached_property
from pathlib import Path

from data_pool import Task
from model.files import UserError, choose, printable
from support.health import counted
from support.options import COMMANDS, Parser, saved_options
from worlds import NO_SEED, InvalidTask, load_world, special_token_in, task_texts
from worlds.call_text import NOTHING, write_call
from worlds.leaks import ungrounded
from worlds.play import attempt_score, play, transcript
from worlds.schemas import words_of
from worlds.tool_calls import MOST_SHOWN, misfit, parse_calls, read_tasks
from worlds.tool_lists import notes_line, read_text

STEM = 5       # words that begin with the same 5 letters count as one: reminder and remind
ALL_SHOWN = 8  # up to so many functions are offered without a choice
DEFAULT_SHOWN = MOST_SHOWN  # of more functions at least so many: what a simulator is shown


def main(argv) -> int:
    """`genenv.py ask`: prints the agent's answer to each request, and at the end how many answers
    are right, of those that can be checked. Raises UserError, returns 0."""
    args = parser().parse_intermixed_args(argv)  # options may stand between RUN and the request
    agent = Agent(args.run, args.functions.split(","), args.untrained)
    tasks = read_requests(args, agent)
    print(agent.about(), file=sys.stderr)
    print(f"loading the model; answers: {len(tasks)} ...", file=sys.stderr)

    # how many answers can be checked, how many are right, what the wrong ones should have called
    checked, right, missed_skills = 0, 0, Counter()
    for task in tasks:
        answer = agent.answer(task)
        if args.json:
            print(json.dumps(answer, ensure_ascii=False), flush=True)
        else:
            if len(tasks) > 1:
                print(printable(f"> {task.text}"))
            print(printable("\n".join(agent.lines_of(task, answer))), flush=True)
        if answer["right"] is None:
            continue
        checked += 1
        if answer["right"]:
            right += 1
        else:
            missed_skills.update(agent.world.skills(task) or [NOTHING])

    if checked > 1:
        needed = counted(missed_skills)
        print(f"{right} of {checked} right; the others need: {needed}", file=sys.stderr)
    return 0


def parser():
    """The command line of `ask`."""
    p = Parser(prog="genenv.py ask", description=COMMANDS["ask"])
    p.add_argument("run", help="folder of a run, such as runs/001-genenv, or of a warm start")
    p.add_argument("request", nargs="*", help="tasks or requests; none: the held-out ones")
    p.add_argument("--file", default="", help="tasks or requests, one a line, or examples")
    p.add_argument("--functions", default="", metavar="A,B", help="offer these alone, all of them")
    p.add_argument("--untrained", action="store_true", help="answer with the adapter off")
    p.add_argument("--json", action="store_true", help="one JSON object an answer")
    return p


def read_requests(args, agent) -> list[Task]:
    """The tasks of the command line and of --file; without either the held-out ones. Raises
    UserError if there are none, or one cannot be used."""
    if not args.request and not args.file:
        texts, examples = [], agent.held_out()
    else:
        texts, examples = list(args.request), []
    # nothing was quoted: these are the words of one request
    if texts and not any(" " in text for text in texts):
        texts = [" ".join(texts)]
    # a file holds examples, which are JSON objects, or requests
    if args.file:
        text = read_text(args.file, "--file takes requests, one a line, or examples")
        lines = text.split("\n")
        if agent.has_tools and any(line.lstrip().startswith("{") for line in lines):
            examples = read_tasks(args.file, agent.world.tools, agent.world.form)
        else:
            texts += lines
    tasks = [agent.task_of(text.strip()) for text in texts if text.strip()] + examples
    if not tasks:
        raise UserError(f"there is no request to ask in {args.file or 'what was given'}")
    return tasks


# ---------------------------------------------------------------------------------------------
# who answers


class Agent:
    """The agent of a run or of a warm start; its model is loaded at the first request.

    Agent("runs/mine")("Dim the study") returns what --json prints. functions: names of those to
    offer alone. untrained: the same model without what the run has learned.
    """

    def __init__(self, run, functions=(), untrained=False):
        """Raises UserError if nobody there can answer."""
        o, self.adapter = options_and_adapter(Path(run))
        self.untrained = untrained
        if untrained and not self.adapter:
            raise UserError(f"{run} is a warm start, without an adapter: leave out --untrained")
        with redirect_stdout(None):  # hide the notes that it prints
            self.world = load_world(o.world)(o)
        self.has_tools = isinstance(self.world, load_world("tool_calls"))
        names = [name.strip() for name in functions if name.strip()]
        if self.has_tools:
            self.tools, self.most_learned = candidates(names, self.world)
            self.is_limited = bool(names)  # to the functions that the user names
        elif names:
            raise UserError(f"--functions: the world {o.world} has none")

    def about(self) -> str:
        """What a user should know of who answers."""
        if not self.has_tools:
            return f"world {self.world.o.world}"
        notes = self.world.notes.items()
        left_out = {why: names for why, names in notes if why.startswith("left out")}
        return printable(f"{len(self.tools)} functions {notes_line(left_out)}".strip())

    def held_out(self) -> list[Task]:
        """The run's held-out tasks; of a world with tools those that ask for calls."""
        tasks = self.world.validation_tasks()
        if self.has_tools:
            return [task for task in tasks if "calls" in task.spec]
        return tasks

    @cached_property
    def policy(self):
        """The model, with the agent's adapter if it has one."""
        with redirect_stdout(sys.stderr):  # answers alone are on standard output
            policy = self.world.load_policy()
        if self.adapter:
            from model.loading import check_base, read_adapter  # not above: it loads torch
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
            name = self.world.o.world
            example = self.world.base_tasks()[0].text
            raise UserError(f"{text[:80]!r} is no task of the world {name}: {reason}; "
                            f"one is {example!r}") from None

    def answer(self, task: Task) -> dict:
        """The answer to a task, as --json prints it. Raises UserError."""
        if self.has_tools:
            return self._answer_calls(task)
        rollout, text = self._attempt(task)
        reward, valid, _ = attempt_score(self.world, task, rollout, text)  # Eq. 1
        return {"request": task.text, "response": transcript(rollout, text), "right": reward == 1,
                "reward": reward, "valid": valid, "limit": rollout.limit}

    def _answer_calls(self, task: Task) -> dict:
        """The answer to a request, read as calls."""
        # one attempt; the prompt has the tools alone, so the calls may be left empty
        tools = self._candidates_for(task)
        offered = self._offered(task.text, tools)
        shown = Task(task.text, {"tools": offered, "calls": [], "ordered": False})
        _, text = self._attempt(shown)
        calls = parse_calls(text, self.world.form)
        # what is wrong; a call of a function learned in training but not offered now is no fault
        fault = fault_of(calls, tools)
        fitting = [call for call in calls or [] if not fault_of([call], tools)]
        not_in_request = ungrounded(Task(task.text, {"tools": tools, "calls": fitting}))
        right = None
        if "calls" in task.spec:
            right = self.world.score(task, text)[0] == 1
        # no call may be the right answer, and so may a value that the request does not mention
        if right:
            fault, not_in_request = "", ""
        return {"request": task.text, "response": text, "right": right, "calls": calls,
                "fault": fault, "ungrounded": not_in_request,
                "offered": [tool["name"] for tool in offered]}

    def _candidates_for(self, task: Task) -> list[dict]:
        """The functions that may be offered with a task: those that the user names, or else those
        of the run and the task's own. Of two with one name the task's own counts, as its right
        calls fit that one."""
        if self.is_limited:
            return self.tools
        by_name = {tool["name"]: tool for tool in self.tools}
        for tool in task.spec.get("tools", []):
            by_name[tool["name"]] = tool
        return list(by_name.values())

    def _offered(self, request: str, tools: list) -> list[dict]:
        """The functions in the prompt of a request: all candidates if they are few or named by the
        user, else those nearest to the request."""
        if self.is_limited or len(tools) <= ALL_SHOWN:
            return tools
        return short_list(request, tools, max(DEFAULT_SHOWN, self.most_learned))

    def _attempt(self, task: Task):
        """One greedy attempt at a task: (Rollout, text). Raises UserError."""
        o, policy = self.world.o, self.policy
        token = special_token_in(task.text, policy.tokenizer)
        if token:
            raise UserError(f"{task.text[:40]!r} spells {token!r}, a control token of the model")
        length = len(policy.encode(self.world.agent_prompt(task)))
        if length > o.max_prompt_tokens:
            raise UserError(f"{task.text[:40]!r} makes a prompt of {length} tokens, more than "
                            f"{o.max_prompt_tokens}: shorten it, or name fewer --functions")
        name = "agent"
        if self.untrained or not self.adapter:
            name = None
        # one at a time: in bf16 the batch can change which token wins a near tie
        [rollout], [text] = play(self.world, o, policy, adapter=name, tasks=[task], G=1,
                                 temperature=0.0, generator=None)
        return rollout, text

    def lines_of(self, task: Task, answer: dict) -> list[str]:
        """An answer as a person reads it."""
        if self.has_tools:
            return self._call_lines(task, answer)
        return self._episode_lines(task, answer)

    def _episode_lines(self, task: Task, answer: dict) -> list[str]:
        """A response or an episode, its score, and a right answer if it is wrong."""
        lines = [answer["response"], f"# score {answer['reward']:g} {answer['limit']}".rstrip()]
        gold = self.world.gold(task)
        if gold and not answer["right"]:
            lines.append(f"# a right answer: {'; '.join(gold.splitlines())}")
        return lines

    def _call_lines(self, task: Task, answer: dict) -> list[str]:
        """The calls of an answer, or what is wrong with it, and those expected if it is wrong."""
        if answer["calls"] and not answer["fault"]:
            lines = [write_call(call) for call in answer["calls"]]
        else:
            lines = [answer["response"]]
        if answer["fault"]:
            lines.append(f"# {answer['fault']}")
        if answer["ungrounded"]:
            lines.append(f"# not in the request: {answer['ungrounded']}")
        if answer["right"] is None:
            return lines
        if answer["right"]:
            return [*lines, "# right"]
        expected = [write_call(call) for call in task.spec["calls"]] or [NOTHING]
        lines.append(f"# expected: {'; '.join(expected)}")
        not_offered = set(self.world.skills(task)) - set(answer["offered"])
        if not_offered:
            lines.append(f"# not offered: {', '.join(sorted(not_offered))}")
        return lines


def options_and_adapter(folder: Path):
    """(options, folder of the agent's adapter, or None) of a run or of a warm start. Raises
    UserError."""
    if (folder / "warm_start.json").is_file():
        return saved_options(folder / "warm_start.json", model=str(folder)), None
    if (folder / "tokenizer_config.json").is_file():
        raise UserError(f"{folder} is a model, not a run: ask takes the folder of a run")
    o = saved_options(folder)
    adapter = folder / "adapters" / "agent"
    if not adapter.is_dir():
        raise UserError(f"{folder} has no adapters/agent: the run has not ended, --resume goes on")
    return o, adapter


# ---------------------------------------------------------------------------------------------
# which functions are offered, and what is wrong with an answer


def candidates(names, world):
    """(the functions of a run that may be offered; how many the largest task of its training had).

    names: those that the user wants; if none, all of the list and of the base tasks. Raises
    UserError.
    """
    by_name = dict(world.tools)
    most_learned = 0
    for task in world.base_tasks():
        tools = task.spec.get("tools", [])
        most_learned = max(most_learned, len(tools))
        for tool in tools:
            by_name.setdefault(tool["name"], tool)  # the first of a name counts
    for name in names:
        if name not in by_name:
            raise UserError(f"--functions: no {name!r:.80} to offer: {choose(name, by_name):.200}")
    if names:
        return [by_name[name] for name in names], most_learned
    return list(by_name.values()), most_learned


def short_list(request: str, tools: list, number: int) -> list[dict]:
    """The `number` functions nearest to a request, in the order of the list."""
    texts = []
    for tool in tools:
        # the names of the arguments, and every text within their schemas
        arguments = task_texts(tool["parameters"].get("properties", {}))
        texts.append(" ".join([tool["name"], tool["description"], *arguments]))
    return [tools[i] for i in nearest(request, texts, number)]


def nearest(request: str, texts: list[str], number: int) -> list[int]:
    """The positions of the texts, at most `number`, that are nearest to a request, in rising order.

    How near: the sum of log(texts / texts with the stem) over the stems that they share.
    """
    stems_of_texts = [stems_of(text) for text in texts]
    texts_with = Counter(stem for stems in stems_of_texts for stem in stems)
    asked = stems_of(request)

    def nearness(position):
        shared = stems_of_texts[position] & asked
        # fsum is exact: a set's order, which varies, must not break a tie
        return math.fsum(math.log(len(texts) / texts_with[stem]) for stem in shared)

    # a stable sort: ties keep the order of the list
    best = sorted(range(len(texts)), key=nearness, reverse=True)
    return sorted(best[:number])


def stems_of(text: str) -> set:
    """The words of a text, each cut to its first STEM letters; single letters are left out."""
    return {word[:STEM] for word in words_of(text) if len(word) > 1}


def fault_of(calls, tools: list) -> str:
    """What is wrong with the calls of an answer, or ""; calls are None if none can be read."""
    if calls is None:
        return "no call can be read in the answer"
    if not calls:
        return "nothing to call"
    return misfit(calls, {tool["name"]: tool for tool in tools})
