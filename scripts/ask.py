"""Ask the agent of a run: print its answer to a task of yours and, if known, whether it is right.

Paper: nothing; this command shows what an agent has learned.

Usage:
    python genenv.py ask RUN "3 s1 dbl s2 inc"        # a task as the world's simulator writes it
    python genenv.py ask RUN "3 s1 dbl" --untrained   # the same with the adapter off
    python genenv.py ask RUN                          # its held-out tasks, graded right or wrong
    python genenv.py ask RUN "3 s1 dbl" "2 inc" --json

    from scripts.ask import Agent                     # in your own program
    answer = Agent("RUN")("3 s1 dbl s2 inc")

RUN is the folder of a finished run; a run with `--epochs 0` shows what the model could do before
training. The agent answers greedily. An episode is played to its end and printed turn by turn. An
answer has the fields below. --json prints all of them, one object a line; without it, empty fields
are left out:

    "request", "response"   what was asked and answered
    "right", "expected"     true or false, and a right answer; null if unknown
    "reward", "valid"       Eq. 1, and whether the answer was well-formed
    "limit"                 what cut the answer off, such as "too many tokens"; "" if nothing did

For tool calls, a request is enough; the right calls need not be given. Nothing is ever executed:
check a call before you carry it out. Answers to tool-call requests have three more fields:

    "calls"    the calls; null if unreadable
    "fault"    why the calls are unreadable or do not fit their functions; "" if all is well
    "offered"  names of the functions in the prompt (worlds/tools/offers.py)

The functions offered come from --tools, the base tasks and, for a held-out request, that task.

Deviations: training samples answers; this takes the likeliest token each time.
"""
import json
import sys
from contextlib import redirect_stdout
from functools import cached_property
from pathlib import Path

import torch

from data_pool import Task
from errors import UserError, printable
from interaction import attempt_score, play, transcript
from model.loading import check_base, read_adapter
from support.options import COMMANDS, Parser, saved_options
from worlds import InvalidTask, load_world, special_token_in


def main(argv) -> int:
    """Print the agent's answer to each request, then how many of the checkable ones are right.
    Return 0, or raise UserError."""
    args = parser().parse_intermixed_args(argv)  # options may come between RUN and the request
    agent = Agent(args.run, args.untrained)
    tasks = [agent.task_of(text) for text in args.request]
    if not tasks:
        tasks = agent.world.validation_tasks()
    print(f"loading the model; requests to answer: {len(tasks)} ...", file=sys.stderr)

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

    checkable = len(verdicts) - verdicts.count(None)
    if checkable:
        print(f"{verdicts.count(True)} of {checkable} right", file=sys.stderr)
    return 0


def parser():
    """Return the command line of `ask`."""
    p = Parser(prog="python genenv.py ask", description=COMMANDS["ask"])
    p.add_argument("run", help="folder of a run, such as runs/001-genenv")
    p.add_argument("request", nargs="*", default=[],
                   help="tasks or requests (default: the held-out tasks)")
    p.add_argument("--untrained", action="store_true", help="answer with the adapter off")
    p.add_argument("--json", action="store_true", help="print each answer as a JSON object")
    return p


# ---------------------------------------------------------------------------------------------
# who answers


class Agent:
    """Answer as the agent of a run does. The model is loaded at the first request.

    Agent("runs/mine")("Dim the study") returns what --json prints.

    untrained: switch the adapter off.
    """

    def __init__(self, run, untrained=False):
        """Read the run's options and world. Raise UserError if it has no trained agent."""
        o, self.adapter = saved_options(run), Path(run, "adapters", "agent")
        if not self.adapter.is_dir():
            raise UserError(f"{run} has no adapters/agent: the run has not ended; --resume "
                            "continues it")
        self.untrained = untrained
        with redirect_stdout(sys.stderr):  # only answers go to standard output
            self.world = load_world(o.world)(o)

    @cached_property
    def policy(self):
        """Load the model with the agent's adapter."""
        with redirect_stdout(sys.stderr):
            policy = self.world.load_policy()
        if policy.source:
            check_base(self.adapter, policy.source)
        read_adapter(policy.model, self.adapter, "agent")
        return policy

    def __call__(self, request: str) -> dict:
        """Return the agent's greedy answer. Raise UserError if the request cannot be read."""
        return self.answer(self.task_of(request))

    def task_of(self, text: str) -> Task:
        """Return a text as a task of the run's world. Raise UserError if it isn't one."""
        try:
            return self.world.asked_task(text)
        except InvalidTask as reason:
            example = self.world.base_tasks()[0].text
            raise UserError(f"{text[:80]!r} is not a task of the world {self.world.o.world}: "
                            f"{reason}; an example is {example!r}") from None

    def answer(self, task: Task) -> dict:
        """Return the answer to a task, as --json prints it, or raise UserError."""
        rollout, text = self._attempt(self.world.offered(task))
        answer = {"request": task.text, "response": transcript(rollout, text), "right": None,
                  "expected": None, "reward": None, "valid": None, "limit": rollout.limit}
        if task.origin != "asked":
            reward, valid, _ = attempt_score(self.world, task, rollout, text)  # Eq. 1
            answer |= {"right": reward == 1, "expected": self.world.gold(task), "reward": reward,
                       "valid": valid}
        return answer | self.world.remarks(task, text)

    def _attempt(self, task: Task):
        """Return one greedy attempt at a task as (Rollout, text), or raise UserError."""
        token = special_token_in(task.text, self.policy.tokenizer)
        if token:
            raise UserError(f"{task.text[:40]!r} spells {token!r}, a control token of the model")
        length, o = len(self.policy.encode(self.world.agent_prompt(task))), self.world.o
        if length > o.max_prompt_tokens:  # prompts longer than those in training get bad answers
            raise UserError(f"{task.text[:40]!r} makes a prompt of {length} tokens, but the run "
                            f"had --max-prompt-tokens {o.max_prompt_tokens}: shorten it")
        # one at a time: in bf16, the size of a batch can decide which token wins a near tie
        adapter = None if self.untrained else "agent"
        try:
            [rollout], [text] = play(self.world, o, self.policy, adapter, [task], G=1,
                                     temperature=0.0, generator=None)
        except torch.OutOfMemoryError:
            raise UserError(f"out of GPU memory with a prompt of {length} tokens: is another "
                            "program using the GPU?") from None
        return rollout, text
