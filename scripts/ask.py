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
object: "request", "response", "right" (null if nobody knows) and "reward" (Eq. 1), "valid",
"limit".

Tool calls. A request needs no calls beside it: the calls of the answer are printed, and nothing is
ever executed. Whoever carries a call out has to check it first. An answer that does not fit its
function is printed as it is, with what is wrong; values that do not stand in the request are
named. --file may hold examples, lines as of --base-tasks, and then says which the agent gets
right. In place of "reward", "valid" and "limit" --json has "offered", "calls" (null if none can be
read), "fault" (what is wrong with them) and "ungrounded" (values not in the request).

What is offered: functions of the run. An agent that has learned with a few in its prompt is lost
among hundreds, so of more than eight it is shown as many as the largest task of its training had,
six at least: those that share the most words with the request, a rare word counting more.
--functions names them instead.

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
from model.files import UserError, choose, one_line, printable
from support.health import counted
from support.options import COMMANDS, Parser, saved_options
from worlds import NO_SEED, InvalidTask, load_world, special_token_in, task_texts
from worlds.call_text import NOTHING, write_call
from worlds.leaks import ungrounded
from worlds.play import attempt_score, play, transcript
from worlds.schemas import words_of
from worlds.tool_calls import MOST_SHOWN, misfit, parse_calls, read_tasks
from worlds.tool_lists import as_line, read_text

STEM = 5       # letters by which two words are one: reminder and remind
ALL_SHOWN = 8  # functions that are offered without a choice


def main(argv) -> int:
    """The command `genenv.py ask`. Raises UserError, returns 0."""
    args = parser().parse_intermixed_args(argv)  # options may stand between RUN and the request
    agent = Agent(args.run, args.functions.split(","), args.untrained)
    tasks = read_requests(args, agent)
    print(agent.about(), file=sys.stderr)
    print(f"loading the model; answers: {len(tasks)} ...", file=sys.stderr)
    known, right, missed = 0, 0, Counter()
    for task in tasks:
        answer = agent.answer(task)
        if args.json:
            print(json.dumps(answer, ensure_ascii=False), flush=True)
        else:
            if len(tasks) > 1:
                print(printable(f"> {task.text}"))
            print(printable("\n".join(agent.lines_of(task, answer))), flush=True)
        if answer["right"] is not None:
            known += 1
            right += answer["right"]
            if not answer["right"]:
                missed.update(agent.world.skills(task) or [NOTHING])
    if known > 1:
        print(f"{right} of {known} right; the others need: {counted(missed)}", file=sys.stderr)
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
    texts = args.request
    if not any(" " in text for text in texts):  # nothing was quoted: the words of one request
        texts = [" ".join(texts)]
    examples = []
    if args.file:
        text = read_text(args.file, "--file takes requests, one a line, or examples")
        lines = text.split("\n")
        if agent.has_tools and any(line.lstrip().startswith("{") for line in lines):
            examples = read_tasks(args.file, agent.world.tools, agent.world.form)
        else:
            texts = [*texts, *lines]
    tasks = [agent.task_of(text.strip()) for text in texts if text.strip()] + examples
    if not args.file and not args.request:
        tasks = agent.held_out()
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
        o, self.adapter = who_answers(Path(run))
        self.untrained = untrained
        if untrained and not self.adapter:
            raise UserError(f"{run} is a warm start, without an adapter: leave out --untrained")
        with redirect_stdout(None):  # its notes were for the training
            self.world = load_world(o.world)(o)
        self.has_tools = isinstance(self.world, load_world("tool_calls"))
        names = [name.strip() for name in functions if name.strip()]
        if self.has_tools:
            self.tools, self.most = offered(names, self.world)
        elif names:
            raise UserError(f"--functions: the world {o.world} has none")

    def about(self) -> str:
        """What a user should know of who answers."""
        if not self.has_tools:
            return f"world {self.world.o.world}"
        notes = self.world.notes.items()
        left_out = {why: names for why, names in notes if why.startswith("left out")}
        return printable(f"{len(self.tools)} functions {as_line(left_out)}".strip())

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
            from model.loading import check_base  # here and not above: it loads torch
            if policy.source:
                check_base(self.adapter, policy.source)
            with one_line(self.adapter):
                keys = policy.model.load_adapter(str(self.adapter), "agent")
            if keys.missing_keys or keys.unexpected_keys:  # PEFT only warns of what does not fit
                raise UserError(f"{self.adapter} was trained on a model with other layers")
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
            return self.world.parse_task(text, NO_SEED, 0)
        except InvalidTask as reason:
            example, name = self.world.base_tasks()[0].text, self.world.o.world
            raise UserError(f"{text[:80]!r} is no task of the world {name}: {reason}; "
                            f"one is {example!r}") from None

    def answer(self, task: Task) -> dict:
        """The answer to a task, as --json prints it. Raises UserError."""
        if self.has_tools:
            return self._calls(task)
        rollout, text = self._attempt(task)
        reward, valid, _ = attempt_score(self.world, task, rollout, text)  # Eq. 1
        return {"request": task.text, "response": transcript(rollout, text), "right": reward == 1,
                "reward": reward, "valid": valid, "limit": rollout.limit}

    def _calls(self, task: Task) -> dict:
        """The answer to a request, read as calls."""
        form = self.world.form
        few = short_list(task.text, self.tools, self.most)
        _, text = self._attempt(Task(task.text, {"tools": few, "calls": [], "ordered": False}))
        calls = parse_calls(text, form)
        # it may know a function that it is not offered from its training
        fault = fault_of(calls, self.tools)
        sound = [call for call in calls or () if not fault_of([call], self.tools)]
        lacking = ungrounded(Task(task.text, {"tools": self.tools, "calls": sound}))
        right = None
        if "calls" in task.spec:
            right = self._is_right(task, text)
        if right:
            fault, lacking = "", ""
        return {"request": task.text, "response": text, "right": right, "calls": calls,
                "fault": fault, "ungrounded": lacking, "offered": [tool["name"] for tool in few]}

    def _is_right(self, task: Task, text: str) -> bool:
        """Whether an answer earns 1, all functions of the run being declared."""
        tools = {tool["name"]: tool for tool in [*task.spec["tools"], *self.tools]}
        declared = Task(task.text, {**task.spec, "tools": list(tools.values())})
        return self.world.score(declared, text)[0] == 1

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
        # alone: in bf16 a near tie would fall otherwise beside other requests
        [rollout], [text] = play(self.world, o, policy, name, [task], 1, 0.0, None)
        return rollout, text

    def lines_of(self, task: Task, answer: dict) -> list[str]:
        """An answer as a person reads it."""
        if not self.has_tools:
            lines = [answer["response"], f"# score {answer['reward']:g} {answer['limit']}".rstrip()]
            gold = self.world.gold(task)
            if gold and not answer["right"]:
                lines.append(f"# a right answer: {'; '.join(gold.splitlines())}")
            return lines
        if answer["calls"] and not answer["fault"]:
            lines = [write_call(call) for call in answer["calls"]]
        else:
            lines = [answer["response"]]
        if answer["fault"]:
            lines.append(f"# {answer['fault']}")
        if answer["ungrounded"]:
            lines.append(f"# not in the request: {answer['ungrounded']}")
        if answer["right"]:
            lines.append("# right")
        elif answer["right"] is not None:
            expected = [write_call(call) for call in task.spec["calls"]] or [NOTHING]
            lines.append(f"# expected: {'; '.join(expected)}")
            hidden = set(self.world.skills(task)) - set(answer["offered"])
            if hidden:
                lines.append(f"# not offered: {', '.join(sorted(hidden))}")
        return lines


def who_answers(folder: Path):
    """(options, folder of the agent's adapter, or None) of a run or of a warm start. Raises
    UserError."""
    if (folder / "warm_start.json").is_file():
        return saved_options(folder / "warm_start.json", model=str(folder)), None
    if (folder / "tokenizer_config.json").is_file():
        raise UserError(f"{folder} is a model, not a run: ask takes the folder of a run")
    o, adapter = saved_options(folder), folder / "adapters" / "agent"
    if not adapter.is_dir():
        raise UserError(f"{folder} has no {adapter}: the run has not ended, --resume goes on")
    return o, adapter


# ---------------------------------------------------------------------------------------------
# which functions are offered, and what is wrong with an answer


def offered(names, world):
    """(the functions that may be offered, those of the list and of base tasks; how many of them
    stand in a prompt). names: those that the user wants, or none. Raises UserError."""
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
        return [by_name[name] for name in names], len(names)
    fewest = ALL_SHOWN if len(by_name) <= ALL_SHOWN else MOST_SHOWN
    return list(by_name.values()), max(fewest, most_learned)


def short_list(request: str, tools: list, number: int) -> list[dict]:
    """The `number` functions nearest to a request, in the order of the list."""
    texts = []
    for tool in tools:
        arguments = tool["parameters"].get("properties", {})
        texts.append(" ".join([tool["name"], tool["description"], *task_texts(arguments)]))
    return [tools[i] for i in nearest(request, texts, number)]


def nearest(request: str, texts: list[str], number: int) -> list[int]:
    """The positions of the texts, at most `number`, that are nearest to a request, in rising order.

    How near: the sum of log(texts / texts with the word) over the words that they share.
    """
    stems = [stems_of(text) for text in texts]
    count = Counter(word for words in stems for word in words)
    scores = []
    for words in stems:
        shared = words & stems_of(request)
        scores.append(sum(math.log(len(texts) / count[word]) for word in shared))
    # equal ones in their order
    best = sorted(range(len(texts)), key=scores.__getitem__, reverse=True)
    return sorted(best[:number])


def stems_of(text: str) -> set:
    """The words of a text, by their first letters."""
    return {word[:STEM] for word in words_of(text) if len(word) > 1}


def fault_of(calls, tools: list) -> str:
    """What is wrong with the calls of an answer, or ""; calls are None if none can be read."""
    if calls is None:
        return "no call can be read in the answer"
    if not calls:
        return "nothing to call"
    return misfit(calls, {tool["name"]: tool for tool in tools})
