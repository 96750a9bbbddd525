"""Ask the trained agent: which calls does it make for a request of your own?

What of the paper this is: nothing of the method; it is what pi_agent is for.

    python genenv.py ask RUN "Put the dentist on Friday at nine"
    python genenv.py ask RUN --file requests.txt --json
    echo "Dim the study" | python genenv.py ask RUN --tools server.json --functions dim,lock

How it is run: by that command. RUN is a run folder of the tool_calls world, or the model folder of
a warm start. The request goes to the base model with the agent's adapter, greedily, in the form
that the run was trained in. The calls that come back are printed. Nothing is ever executed: a call
is text, and whoever carries it out has to check it first. A call whose arguments do not fit its
function is printed with what is wrong.

What is offered: the functions of --tools FILE, or without it the run's, those of its --tools and of
its base tasks. An agent that has learned with a few functions in its prompt is lost among hundreds.
So it is shown as many as the largest task of its training had, and four at least: those that share
the most words with the request, where a word that few functions have is worth more. --offered sets
another number, --functions names them.

Where it differs on purpose: there is one answer to each request. No tool answers, as one does in an
episode, so of a task in several steps the agent does the first.
"""
import json
import math
import re
import sys
from collections import Counter
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

from support.cli import Parser, at_least
from support.files import UserError, first_line, no_file, read_jsonl
from data_pool import Task
from support.options import Options, device_fault, threads_of
from worlds import InvalidTask, call_text, one_line_for_templates, special_token_in, tool_calls, \
    task_texts, tool_lists, world_option
from worlds.schemas import check_calls, well_formed

MAX_REQUEST = 8000  # characters of one request
STEM = 5            # letters by which two words are one: reminder and remind
LEAST = 4           # functions in a prompt: with fewer the one that is needed is often not there


def main(argv) -> int:
    """The command `genenv.py ask`; argv: what follows it. Raises UserError, returns 0."""
    args = parser().parse_intermixed_args(argv)  # options may stand between RUN and the request
    requests = read_requests(args)
    o, adapter = options_of(Path(args.run))
    tasks = tasks_of(Path(args.run), o)
    tools = functions(args, o, tasks)
    number = args.offered or max([LEAST, *(len(t.spec.get("tools", ())) for t in tasks)])
    tool_calls.read_answers_as(world_option(tool_calls, o, "call_format"),
                               any(t.spec.get("calls") == [] for t in tasks))
    if not args.functions:
        tools = without_long(tools, o.max_prompt_tokens)
    import torch  # here and not above: --help and mistakes are answered at once
    torch.set_num_threads(threads_of(o))
    policy = load_agent(o, adapter)
    shown = [short_list(request, tools, number) for request in requests]
    for request, offered, answer in zip(requests, shown, answers(policy, o, requests, shown)):
        found = read_answer(answer, offered)
        if args.json:
            print(json.dumps({"request": request, **found, "response": answer,
                              "offered": [t["name"] for t in offered]}, ensure_ascii=False))
        else:
            print("\n".join([f"> {request}"] * (len(requests) > 1) + lines_of(found, answer)))
    return 0


def parser():
    """The command line of `ask`."""
    p = Parser(prog="genenv.py ask", allow_abbrev=False,
               description="Print the calls that a trained agent makes for a request. Nothing is "
                           "executed.")
    p.add_argument("run", help="run folder, such as runs/001-genenv, or that of a warm start")
    p.add_argument("request", nargs="*", help="what is asked for; without it: --file, or the lines "
                                              "of standard input")
    p.add_argument("--file", default="", help="requests, one a line, or tasks as JSONL")
    p.add_argument("--tools", default="", help="functions to offer instead of the run's own")
    p.add_argument("--functions", default="", metavar="A,B", help="offer these alone, all of them")
    p.add_argument("--offered", type=at_least(1), default=0, metavar="N",
                   help="functions in a prompt; without it: as many as a task of training had")
    p.add_argument("--json", action="store_true", help="one JSON object a request")
    return p


# ---------------------------------------------------------------------------------------------
# what is asked


def read_requests(args) -> list[str]:
    """The requests of the command line, of --file or of standard input. Raises UserError."""
    if args.request and args.file:
        raise UserError("ask takes a request or --file, not both")
    if not args.request and not args.file and (sys.stdin is None or sys.stdin.isatty()):
        raise UserError('ask needs a request, such as: ask RUN "Dim the study", or --file FILE')
    where = args.file or "standard input"
    if args.request:
        numbered = [("the request", text) for text in args.request]
    else:
        lines = [(f"{where}, line {n}", line) for n, line in enumerate(_lines(args.file), 1)]
        numbered = [(place, _task_text(line, place)) for place, line in lines if line.strip()]
    for place, text in numbered:
        if not text.strip():
            raise UserError(f"{place} is empty: say what is to be done")
        if len(text) > MAX_REQUEST:
            raise UserError(f"{place} has {len(text)} characters: {MAX_REQUEST} are the most")
        if not tool_lists.written(text):
            raise UserError(f"{place} is not UTF-8 text")
    if not numbered:
        raise UserError(f"{where} holds no request")
    return [text.strip() for _, text in numbered]


def _lines(file: str) -> list[str]:
    if file and not Path(file).is_file():
        raise UserError(f"--file {file}: {no_file(file)}")
    data = Path(file).read_bytes() if file else sys.stdin.buffer.read()
    try:
        return data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"{file or 'standard input'}: not UTF-8; save it as that") from None


def _task_text(line: str, place: str) -> str:
    """A line, or the request in it if it is a task of a task file. Raises UserError."""
    try:
        task = json.loads(line) if line.lstrip().startswith("{") else None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({first_line(error)}); a request in words begins with none "
                        "of its braces") from None
    if task and "messages" in task and "task" not in task:
        try:
            task = tool_lists.request_of(task["messages"])
        except InvalidTask as fault:
            raise UserError(f"{place}: {fault.detail}") from None
    if task is not None and not isinstance(task.get("task"), str):
        raise UserError(f"{place}: a JSON object without a text under 'task'")
    return line if task is None else task["task"]


# ---------------------------------------------------------------------------------------------
# who answers, and with which functions


def options_of(folder: Path):
    """(options of the run, folder of the agent's adapter or "") of a run or warm-start folder.

    Raises UserError if it is neither, of another world, or has no adapter yet.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; ask takes that of a run, as runs/001-genenv")
    warm = folder / "warm_start.json"
    path = warm if warm.is_file() else folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is no run folder: it has no config.json")
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        saved = {**saved["settings"], "model": str(folder)} if path == warm else saved
        o = Options(**{f.name: saved[f.name] for f in fields(Options) if f.name in saved})
    except (ValueError, TypeError, LookupError, RecursionError):
        raise UserError(f"{path}: not the options of a run") from None
    if "world" not in saved:
        raise UserError(f"{folder} is no run and no warm start: its config.json names no world")
    if o.world != "tool_calls":
        raise UserError(f"{folder} is a run of the world {o.world}: ask is for tool_calls")
    adapter = folder / "adapters" / "agent"
    if path != warm and not all((adapter / name).is_file() for name in
                                ("adapter_config.json", "adapter_model.safetensors")):
        raise UserError(f"{folder} has no adapters/agent yet, it is written when a run ends: "
                        "finish it with --resume")
    if not o.model:
        raise UserError(f"{path} names no model")
    if device_fault(o.device):  # the run's own machine had a GPU
        o = replace(o, device="auto")
    return o, "" if path == warm else str(adapter)


def load_agent(o, adapter: str):
    """The base model with the agent's adapter; alone where `adapter` is empty. Raises UserError."""
    from support.loading import policy_options
    from policy import Policy
    return Policy.load(o.model, ("agent",) if adapter else (),
                       adapter_folder=adapter or None, **policy_options(o))


def tasks_of(folder: Path, o) -> list[Task]:
    """The tasks that the agent learned on: base tasks, and those written for it in the run."""
    base, listed = tool_calls.task_files(o)
    call_format = world_option(tool_calls, o, "call_format")
    try:
        tasks = list(tool_calls.read_tasks(base, listed, call_format)) if base else []
    except UserError:  # moved or edited since: what the run wrote itself is enough then
        tasks = []
    train = folder / "train.jsonl"
    try:
        return tasks + [Task(**r["task"]) for r in (read_jsonl(train) if train.is_file() else [])]
    except (LookupError, TypeError):
        raise UserError(f"{train}: not the tasks of a run") from None


def functions(args, o, tasks) -> list[dict]:
    """The functions that may be offered, each name once. Raises UserError if there is none."""
    call_format = world_option(tool_calls, o, "call_format")
    listed = args.tools or tool_calls.tools_file(o)
    tools, left_out = [], {}
    try:
        if listed:
            tools, left_out = tool_lists.read_tools(listed, call_format)
    except UserError as fault:
        if args.tools or not tasks:
            raise
        print(f"{fault}; without it, the functions of the run's tasks", file=sys.stderr)
    without = f"; left out: {tool_lists.reasons(left_out)}" if left_out else ""
    if not args.tools:
        tools += [tool for task in tasks for tool in task.spec.get("tools", ())]
    by_name = {tool["name"]: tool for tool in reversed(tools)}  # the first of a name stays
    named = list(dict.fromkeys(filter(None, map(str.strip, args.functions.split(",")))))
    unknown = [name for name in named if name not in by_name]
    if unknown:
        raise UserError(f"--functions: there is no function {unknown[0]!r:.80} among the "
                        f"{len(by_name)} of {args.tools or 'the run'}{without}")
    if not by_name:
        raise UserError(f"{args.run} has no functions to offer: give --tools FILE")
    if args.tools and without:
        print(f"{listed}: {len(by_name)} functions{without}", file=sys.stderr)
    if named:
        args.offered = args.offered or len(named)
    return [by_name[name] for name in named or reversed(by_name)]


def without_long(tools, longest: int) -> list[dict]:
    """The functions that a run would take, too, of at most so many characters; all if none is."""
    short = tool_calls.short_enough(tools, longest)
    if short and len(short) < len(tools):
        print(f"{len(tools) - len(short)} functions are too long to be offered: name them with "
              "--functions", file=sys.stderr)
    return short or tools


@lru_cache(maxsize=2 ** 15)
def words(text: str) -> frozenset[str]:
    """Words of a text by their first letters: lower case, names in camelCase and with _ split."""
    split = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
    return frozenset(word[:STEM].lower() for word in re.findall(r"[^\W_]{2,}", split))


def short_list(request: str, tools: list, number: int) -> list[dict]:
    """The `number` functions nearest to a request, in the order of the list.

    How near: over the words that they share, the sum of log(functions / functions with the word),
    a word of the arguments alone (names, descriptions, listed values) counting half.
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


def answers(policy, o, requests, shown) -> list[str]:
    """The agent's greedy response to each request. Raises UserError if a prompt is too long."""
    prompts = []
    with one_line_for_templates(o.model):
        for request, tools in zip(requests, shown):
            token = special_token_in(request, policy.tokenizer)
            if token:
                raise UserError(f"the request {request[:60]!r} spells {token!r}, a control token "
                                "of the model: reword it")
            task = Task(request, {"tools": tools, "calls": [], "ordered": False})
            prompts.append(policy.encode(tool_calls.agent_prompt(task)))
            if len(prompts[-1]) > o.max_prompt_tokens:
                raise UserError(f"the request {request[:60]!r} makes a prompt of "
                                f"{len(prompts[-1])} tokens, {o.max_prompt_tokens} are the most: "
                                "say it in fewer words or offer fewer functions (--offered N)")
    rollouts = policy.sample("agent" if policy.params else None, prompts, 1, o.max_response_tokens,
                             temperature=0, max_rows=o.max_rows)
    return [policy.decode(r.response) for r in rollouts]


def read_answer(answer: str, tools: list) -> dict:
    """{"calls": list or None if the answer is none, "fault": what is wrong with it, or ""}."""
    calls = tool_calls.parse_calls(answer)
    if calls is None:
        return {"calls": None, "fault": "no call can be read in the answer"}
    try:
        check_calls(calls, {tool["name"]: tool for tool in tools}, least=0)
    except InvalidTask as fault:
        return {"calls": calls, "fault": fault.detail}
    return {"calls": calls, "fault": ""}


def lines_of(found: dict, answer: str) -> list[str]:
    """What is printed of an answer: its calls, one a line, and what is wrong with it."""
    if found["calls"] is None:
        return [f"# {found['fault']}: {' '.join(answer.split())[:200]!r}"]
    lines = [call_text.write_call(call) if well_formed(call) else json.dumps(call, ensure_ascii=False)
             for call in found["calls"]] or ["# nothing to call"]
    return lines + [f"# {found['fault']}"] * bool(found["fault"])
