"""Ask the trained agent: which calls does it make for a request of your own?

Usage:
    python genenv.py ask RUN "Put the dentist on Friday at nine"
    python genenv.py ask RUN --file requests.txt --json
    python genenv.py ask RUN "Dim the study" --tools server.json --functions dim,lock

RUN is a run folder of the tool_calls world, or the model folder of a warm start. The agent answers
greedily, in the form that it was trained in, and the calls that come back are printed. Nothing is
ever executed: a call is text, and whoever carries it out has to check it first. A call that does not
fit its function is printed with what is wrong.

What is offered: the functions of --tools FILE, or else the run's own. An agent that has learned with a
few functions in its prompt is lost among hundreds, so it is shown as many as the largest task of its
training had, and four at least: those that share the most words with the request, a rare word counting
more. --functions names them instead.
"""
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

from data_pool import Task
from support.files import UserError, read_jsonl
from support.options import Parser, saved_options, threads_of
from worlds import InvalidTask, load_world, special_token_in, task_texts, tool_lists
from worlds.call_text import write_call
from worlds.schemas import check_calls

STEM = 5   # letters by which two words are one: reminder and remind
LEAST = 4  # functions in a prompt: with fewer, the one that is needed is often not there


def main(argv) -> int:
    """The command `genenv.py ask`. Raises UserError, returns 0."""
    args = parser().parse_intermixed_args(argv)  # options may stand between RUN and the request
    requests = read_requests(args)
    folder = Path(args.run)
    o, adapter = who_answers(folder)
    world = load_world("tool_calls")(o)
    trained = tasks_of(folder, world)
    tools, most = offered(args, o, world, trained)
    print("loading torch and the model ...", file=sys.stderr, flush=True)
    shown = [short_list(request, tools, most) for request in requests]
    for request, few, text in zip(requests, shown, answers(world, adapter, requests, shown)):
        calls, fault = read_answer(world, text, few)
        if args.json:
            print(json.dumps({"request": request, "calls": calls, "fault": fault, "response": text,
                              "offered": [tool["name"] for tool in few]}, ensure_ascii=False))
            continue
        if len(requests) > 1:
            print(f"> {request}")
        for call in calls or []:
            print(write_call(call))
        if fault or not calls:
            print(f"# {fault or 'nothing to call'}{'' if calls else f': {text[:200]!r}'}")
    return 0


def parser():
    """The command line of `ask`."""
    p = Parser(prog="genenv.py ask", allow_abbrev=False, description="Print the calls that a trained "
               "agent makes for a request. Nothing is executed.")
    p.add_argument("run", help="run folder, such as runs/001-genenv, or that of a warm start")
    p.add_argument("request", nargs="*", help="what is asked for")
    p.add_argument("--file", default="", help="requests, one a line")
    p.add_argument("--tools", default="", help="functions to offer instead of the run's own")
    p.add_argument("--functions", default="", metavar="A,B", help="offer these alone, all of them")
    p.add_argument("--json", action="store_true", help="one JSON object a request")
    return p


def read_requests(args) -> list[str]:
    """The requests of the command line or of --file. Raises UserError."""
    if bool(args.request) == bool(args.file):
        raise UserError('ask needs a request, such as: ask RUN "Dim the study", or --file FILE')
    lines = args.request
    if args.file:
        try:
            lines = Path(args.file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--file {args.file}: {getattr(error, 'strerror', 'not UTF-8 text')}") from None
    requests = [line.strip() for line in lines if line.strip()]
    if not requests:
        raise UserError("the request is empty: say what is to be done")
    return requests


# ---------------------------------------------------------------------------------------------
# who answers, and with which functions


def who_answers(folder: Path):
    """(options, folder of the agent's adapter or "") of a run's or a warm start's folder."""
    if (folder / "warm_start.json").is_file():
        return saved_options(folder / "warm_start.json", model=str(folder)), ""
    o, adapter = saved_options(folder / "config.json"), folder / "adapters" / "agent"
    if o.world != "tool_calls":
        raise UserError(f"{folder} is a run of the world {o.world}: ask is for tool_calls")
    if not adapter.is_dir():
        raise UserError(f"{folder} has no adapters/agent yet, it is written when a run ends: finish it "
                        "with --resume")
    return o, str(adapter)


def tasks_of(folder: Path, world) -> list[Task]:
    """The tasks that the agent learned on: base tasks, and those written for it in the run."""
    train = folder / "train.jsonl"
    written = read_jsonl(train) if train.is_file() else []
    return world.base_tasks() + [Task(**r["task"]) for r in written]


def offered(args, o, world, trained):
    """(the functions that may be offered, how many of them in a prompt). Raises UserError."""
    tools = tool_lists.read_tools(args.tools, o.world_options["call_format"])[0] if args.tools else \
        [*world.tools, *(tool for task in trained for tool in task.spec.get("tools", ()))]
    by_name = {tool["name"]: tool for tool in reversed(tools)}  # the first of a name stays
    named = [name.strip() for name in args.functions.split(",") if name.strip()]
    for name in named:
        if name not in by_name:
            raise UserError(f"--functions: there is no function {name!r:.80} among the {len(by_name)} of "
                            f"{args.tools or 'the run'}")
    if named:
        return [by_name[name] for name in named], len(named)
    return list(by_name.values())[::-1], max([LEAST, *(len(t.spec.get("tools", ())) for t in trained)])


def words(text: str) -> frozenset[str]:
    """Words of a text by their first letters: lower case, names in camelCase and with _ split."""
    split = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
    return frozenset(word[:STEM].lower() for word in re.findall(r"[^\W_]{2,}", split))


def short_list(request: str, tools: list, number: int) -> list[dict]:
    """The `number` functions nearest to a request, in the order of the list.

    How near: the sum of log(functions / functions with the word) over the words that they share; a
    word of the arguments alone (names, descriptions, listed values) counts half.
    """
    if len(tools) <= number:
        return tools
    first = [words(f"{tool['name']} {tool['description']}") for tool in tools]
    every = [own | words(" ".join(task_texts(tool["parameters"].get("properties", {}))))
             for own, tool in zip(first, tools)]
    having, asked = Counter(word for own in every for word in own), words(request)
    value = lambda shared: sum(math.log(len(tools) / having[word]) for word in shared)
    worth = [(value(asked & own) + value(asked & both)) / 2 for own, both in zip(first, every)]
    best = sorted(range(len(tools)), key=lambda i: -worth[i])[:number]  # stable
    return [tools[i] for i in sorted(best)]


# ---------------------------------------------------------------------------------------------
# the answer


def answers(world, adapter, requests, shown) -> list[str]:
    """The agent's greedy response to each request. Raises UserError if a prompt is too long."""
    import torch  # here and not above: mistakes are answered at once
    from policy import Policy
    from support.loading import policy_options
    o = world.o
    torch.set_num_threads(threads_of(o))
    policy = Policy.load(o.model, ("agent",) if adapter else (), adapter_folder=adapter or None,
                         **policy_options(o))
    prompts = []
    for request, tools in zip(requests, shown):
        if token := special_token_in(request, policy.tokenizer):
            raise UserError(f"the request {request[:60]!r} spells {token!r}, a control token of the "
                            "model: reword it")
        task = Task(request, {"tools": tools, "calls": [], "ordered": False})
        prompts.append(policy.encode(world.agent_prompt(task)))
        if len(prompts[-1]) > o.max_prompt_tokens:
            raise UserError(f"the request {request[:60]!r} makes a prompt of {len(prompts[-1])} tokens, "
                            f"{o.max_prompt_tokens} are the most: name fewer --functions")
    rollouts = policy.sample("agent" if adapter else None, prompts, 1, o.max_response_tokens,
                             temperature=0, max_rows=o.max_rows)
    return [policy.decode(r.response) for r in rollouts]


def read_answer(world, text: str, tools: list):
    """(calls, what is wrong with them or ""); calls are None if none can be read."""
    calls = world.parse_calls(text)
    if calls is None:
        return None, "no call can be read in the answer"
    try:
        check_calls(calls, {tool["name"]: tool for tool in tools}, least=0)
    except InvalidTask as fault:
        return calls, fault.detail
    return calls, ""
