"""Score BFCL (Berkeley Function Calling Leaderboard): is the function call right?

Paper: the column "BFCL" of the results table. The paper says only that it takes the long-context
subset "each turn independently". We read this as follows (the default here): turn i is asked with
the function documents and all earlier turns (user messages, ground-truth calls and their results).
Of the 734 turns, 3 expect no call and are left out, so 731 remain. The paper's 7.0 for
Qwen2.5-7B-Instruct equals the leaderboard's *whole-conversation* score (14 of 200 conversations),
while its 41.8 for GenEnv is not a k/200 and fits 310/742 (the non-empty turns of the data before
2025-11-07). The two may not be comparable, and neither is a baseline for our figure.

Usage: `python -m eval bfcl --data DIR --model M`. `python -m eval.bfcl DIR` makes the file
derived/long_context_turns.jsonl from the official questions and answers (needs `bfcl-eval`).

There are two scorers:
* single-turn Python categories and (ir)relevance: the official AST rules, numbered 1-7 below, for
  both response formats (`[f(a=1)]` and Qwen's `<tool_call>` blocks);
* long-context turns: a rule without a simulator (`score`), or the official simulator
  (`score_official`, optional package `bfcl-eval`), which runs the calls that our parser of literals
  accepted.

The rule without a simulator reasons about what the calls may do. Every function either only reads,
moves (`cd`), or changes the state; NOT_IDEMPOTENT lists those that change it again when repeated.
Then (a) a call that must fail (unknown function or argument, missing argument, no login, unknown
access token or other name) changes nothing and returns nothing useful; (b) within one API class,
such as TradingBot, the calls that change the state or move must be those of the ground truth, in
the same order; calls of different classes do not affect each other; (c) each ground-truth call that
only reads must be made between the same two changes, unless the string it returns was already
returned before the turn; (d) any other call may read, move after the last expected change, or
repeat a change that has no second effect. The rule cannot know that two different calls return the
same text, or that a change fails for a reason that it does not check: in both cases its verdict is
wrong.

Measured: the rule agrees with 833 of the 836 recorded multi-turn verdicts. On calls altered at
random (dropped, swapped, repeated, taken from other turns...) it agrees with 96-97 % of 6,500
verdicts of the official simulator; where the two differ, the rule is nearly always too strict. All
731 gold responses pass by the rule and in the simulator.

Deviations:
* the official decoder *evaluates* arithmetic in model text. Here only `+ - * /` of plain numbers
  is folded, and everything else counts as undecodable. Responses over MAX_TEXT characters and calls
  nested deeper than CPython's own limit of 200 brackets are undecodable, too;
* a response on which the official script crashes (float of a 400-digit integer) fails;
* Java and JavaScript categories are not scored.

Training part: the paper's number uses only the long-context turns, so the single-turn Python
categories provide the base tasks (`base_task`). multi_turn_base is *not* used: its conversations
are the long-context ones with shorter files.
"""
import ast
import itertools
import json
import operator
import re
import sys
import warnings
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from errors import UserError, exit_code, require_file
from eval.common import Verdict, brief, read_rows, verdict
from worlds.alfworld_text import between
from worlds.tools.schemas import json_value

NAME = "bfcl"
PAPER = {"Qwen2.5-7B": 7.0, "GenEnv 7B": 41.8}
MAX_NEW_TOKENS = 512

AST_CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple",
                  "live_multiple", "live_parallel", "live_parallel_multiple")
RELEVANCE_CATEGORIES = ("irrelevance", "live_irrelevance", "live_relevance")
LONG_CONTEXT = "multi_turn_long_context"
VARIANTS = {"single_turn": ({"categories": AST_CATEGORIES}, {}),
            "relevance": ({"categories": RELEVANCE_CATEGORIES}, {}),
            "official": ({}, {"official": True})}
RIGHT = "the expected calls"

# Limits on model text: long enough for any answer, short enough for a verdict well within a second
MAX_TEXT = 50_000
MAX_CALLS = 200           # per turn; the longest ground truth has 34


class Undecodable(ValueError):
    """Report that a text is not a list of calls; the message gives the reason."""


# ---------------------------------------------------------------------------------------------
# decoding: text -> [(name, {argument: value})]


def decode(text: str, fmt: str | None = None) -> list:
    """Return the calls after a response's reasoning as (name, arguments). Raise Undecodable.

    fmt: "prompt" (`[f(a=1)]`), "qwen_fc" (`<tool_call>` blocks), or None to guess it from the text.
    """
    if len(text) > MAX_TEXT:
        raise Undecodable(f"longer than {MAX_TEXT} characters")
    # Reasoning ends at the last </think>, as in the official handler of Qwen models.
    answer = text.rpartition("</think>")[2].lstrip("\n")
    if fmt is None:
        fmt = "qwen_fc" if "<tool_call>" in answer else "prompt"
    return decode_prompt(answer) if fmt == "prompt" else decode_qwen(answer)


def decode_prompt(text: str) -> list:
    """Return the calls of the prompt format: one Python list, read but never evaluated."""
    text = text.strip("`\n ")
    if not text.startswith("["):
        text = "[" + text
    if not text.endswith("]"):
        text = text + "]"
    try:
        # Invalid escapes in a string only warn; a caller's warning filter must not change verdicts.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(text, mode="eval").body
        # Take a list, or the tuple that results if a comment ends the text; nothing else holds
        # calls.
        items = getattr(body, "elts", [None])
        if not all(isinstance(item, ast.Call) for item in items):
            raise Undecodable("not a list of calls")
        return [call_of(item) for item in items]
    except (SyntaxError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError,
            MemoryError) as error:
        # This catches NUL bytes, lone surrogates, 10,000 brackets, 5,000-digit integers, 1/0...
        raise Undecodable(f"not Python literals: {brief(error, 80)}") from None


def call_of(node: ast.Call) -> tuple:
    """Return (dotted name, keyword arguments) of a call; positional arguments are dropped."""
    parts, func = [], node.func
    while isinstance(func, ast.Attribute):
        parts.append(func.attr)
        func = func.value
    if isinstance(func, ast.Name):
        parts.append(func.id)
    # `**{...}` has the name None, which no document knows; the last of repeated keywords counts.
    return ".".join(reversed(parts)), {k.arg: value_of(k.value) for k in node.keywords}


def value_of(node):
    """Return an argument's value as the official decoder sees it; raise on what it refuses."""
    match node:
        case ast.Constant():
            return "..." if node.value is Ellipsis else node.value
        case ast.UnaryOp(operand=ast.Constant(value=value)):
            return -value                      # whatever the operator: `+5` is -5 there, too
        case ast.List():
            return [value_of(item) for item in node.elts]
        case ast.Tuple():
            return tuple(value_of(item) for item in node.elts)
        case ast.Dict():
            return {value_of(k): value_of(v) for k, v in zip(node.keys, node.values)}
        case ast.Name():
            return node.id                     # a bare name is a string
        case ast.BinOp():
            return fold(node)
        case ast.Call() if node.keywords:
            name, arguments = call_of(node)
            return {name: arguments}
        case ast.Call():
            return ast.unparse(node)
        case ast.Subscript():
            return f"{ast.unparse(node.value)}[{ast.unparse(node.slice)}]"
    raise Undecodable(f"{type(node).__name__} is not a literal")


BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
          ast.Div: operator.truediv}


def fold(node):
    """Return the value of arithmetic on plain numbers (`-3 * 1.5`), without powers, so that values
    stay as short as their text."""
    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.UnaryOp(op=ast.USub()):
            return -fold(node.operand)
        case ast.BinOp() if type(node.op) in BINARY:
            return BINARY[type(node.op)](fold(node.left), fold(node.right))
    raise Undecodable("arithmetic on something other than numbers")


def decode_qwen(text: str) -> list:
    """Return the calls of `<tool_call>` blocks; skip blocks that are not JSON, or lack the newlines
    inside their tags."""
    calls = []
    for block in between(text, "<tool_call>\n", "\n</tool_call>"):
        try:
            call = json.loads(block)
        except (ValueError, RecursionError):
            continue
        if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
            raise Undecodable("a <tool_call> block is not a call")
        if isinstance(call.get("name", []), (list, dict)):
            raise Undecodable("the name in a <tool_call> block is not a name")
        calls.append((call["name"], dict(call["arguments"])))
    return calls


# ---------------------------------------------------------------------------------------------
# AST rules for the single-turn Python categories


PYTHON_TYPE = {"string": str, "any": str, "integer": int, "float": float, "boolean": bool,
               "array": list, "tuple": list, "dict": dict}


def check_ast(record: dict, calls: list) -> str:
    """Return why the calls are wrong, or "" (rules 1 and 2)."""
    expected = record["ground_truth"]
    if len(calls) != len(expected):
        return f"{len(calls)} calls where {len(expected)} are expected"     # rule 1
    free = list(calls)
    for answer in expected:
        name = next(iter(answer))
        reasons = [check_call(find(record["function"], name), call, answer) for call in free]
        if "" not in reasons:
            return f"no call matches {name}: {reasons[0]}"
        free.pop(reasons.index(""))
    return ""


def find(docs: list, name: str) -> dict:
    """Return the function document of that name."""
    return next(doc for doc in docs if doc["name"] == name)


def check_call(doc: dict, call: tuple, answer: dict) -> str:
    """Return why one call is wrong, or "" (rule 2)."""
    name, arguments = call
    alternatives = next(iter(answer.values()))
    if name != doc["name"]:
        return f"function {brief(name, 60)} is not {doc['name']}"
    properties = doc["parameters"]["properties"]
    for required in doc["parameters"].get("required", []):
        if required not in arguments:
            return f"required argument {required} is missing"
    for argument, value in arguments.items():
        if argument not in properties or argument not in alternatives:
            return f"argument {brief(argument, 60)} is not expected"
        if not value_matches(properties[argument], value, alternatives[argument]):
            return f"argument {argument} has a wrong value"
    for argument, listed in alternatives.items():
        if argument not in arguments and "" not in listed:
            return f"argument {argument} is missing and not optional"
    return ""


def value_matches(doc: dict, value, listed: list) -> bool:
    """Return whether a value has the right type and is listed (rules 3-6)."""
    kind = doc["type"]
    expected = PYTHON_TYPE[kind]
    if kind == "tuple" and type(value) is tuple:
        value = list(value)
    if kind == "float" and type(value) is int:                            # rule 3: int to float
        try:
            value = float(value)
        except OverflowError:
            return False
    item_type = PYTHON_TYPE[doc["items"]["type"]] if kind in ("array", "tuple") else None
    answer_type = next((type(a) for a in listed if a != ""), None)        # for rule 5
    if type(value) is expected:
        if item_type and not any(items_fit(value, a, item_type) for a in listed):
            return False                                                  # rule 4 is final
        variable = answer_type is not None and answer_type is not expected
    elif answer_type is not None and type(value) is answer_type:
        variable = True                                                   # rule 5
    else:
        return False
    if variable:
        return value in listed
    try:
        return listed_value(expected, item_type, value, listed)
    except (TypeError, AttributeError, KeyError, IndexError):
        return False        # the official checker crashes here, on answers of mixed types


def items_fit(value: list, alternative, item_type) -> bool:
    """Return whether each item has the document's type or that of the alternative's first item
    (rule 4)."""
    if not isinstance(alternative, list):
        return True
    allowed = {item_type, *[type(a) for a in alternative if a != ""][:1]}
    return all(type(item) in allowed for item in value)


def listed_value(expected, item_type, value, listed: list) -> bool:
    """Return whether a value is listed, in a comparison that depends on its type (rule 6)."""
    if expected is dict:
        return any(dict_matches(value, a) for a in listed if a != "")
    if expected is list and item_type is dict:
        return any(dicts_match(value, a) for a in listed)
    if expected is str:
        return plain(value) in [plain(a) for a in listed if isinstance(a, str)]
    if expected is list:
        wanted = [plain(v) for v in value]
        return any(wanted == [plain(item) for item in a] for a in listed)
    return value in listed


def dicts_match(values: list, alternatives: list) -> bool:
    """Return whether both lists are equally long and match dictionary by dictionary."""
    if len(alternatives) != len(values):
        return False
    return all(a != "" and dict_matches(v, a) for v, a in zip(values, alternatives))


def dict_matches(value: dict, alternative: dict) -> bool:
    """Return whether keys are known, values listed (normalised), and every absent key lists ""."""
    for key, item in value.items():
        if key not in alternative or plain(item) not in [plain(a) for a in alternative[key]]:
            return False
    return all(key in value or "" in listed for key, listed in alternative.items())


def plain(value):
    """Return a string without ` ,./-_*^`, in lower case, with `'` as `"`; other values as they
    are."""
    if type(value) is not str:
        return value
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"')


# ---------------------------------------------------------------------------------------------
# long-context turns without a simulator


FUNCTION_DOCS = {"GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api",
                 "MessageAPI": "message_api", "TwitterAPI": "posting_api",
                 "TicketAPI": "ticket_api", "TradingBot": "trading_bot",
                 "TravelAPI": "travel_booking", "VehicleControlAPI": "vehicle_control"}
# The function documents tell what a function may do to the public state (the attributes without a
# leading underscore, which the official checker compares).
READS = re.compile(r"""get_|list_|view_|search_|estimate_|filter_|find|.*_login_status$|pwd$|ls$
    |cat$|wc$|sort$|grep$|tail$|diff$|du$|displayCarStatus$|display_log$|check_tire_pressure$
    |compute_exchange_rate$|verify_traveler_information$|notify_price_change$|retrieve_invoice$
    |contact_customer_support$|gallon_to_liter$|liter_to_gallon$""", re.VERBOSE)
# No call of the conversation can change what these reads return.
CONSTANT = re.compile(r"""get_(stock_info|symbol_by_name|available_stocks|flight_cost|current_time
    |nearest_airport_by_city|zipcode_based_on_city|outside_temperature.*)$|filter_stocks_by_price$
    |list_all_airports$|compute_exchange_rate$|estimate_distance$|gallon_to_liter$
    |liter_to_gallon$""", re.VERBOSE)
# Repeated with the same arguments, these have a second effect; others do nothing or fail.
NOT_IDEMPOTENT = {"send_message", "delete_message", "post_tweet", "comment", "mention",
                  "create_ticket", "place_order", "fund_account", "withdraw_funds", "book_flight",
                  "register_credit_card", "purchase_insurance", "fillFuelTank"}
# class: (key of the configuration for "logged in", the call that logs in, the calls that need it)
LOGIN = {"TicketAPI": ("current_user", "ticket_login", {"create_ticket"}),
         "MessageAPI": ("current_user", "message_login", {"send_message", "delete_message"}),
         "TwitterAPI": ("authenticated", "authenticate_twitter",
                        {"post_tweet", "retweet", "comment", "follow_user", "unfollow_user"}),
         "TradingBot": ("authenticated", "trading_login",
                        {"place_order", "cancel_order", "fund_account", "withdraw_funds"})}
MISSING = object()  # the default of an argument that has none: it equals no value
# These arguments name something that must exist: with an unknown name, the call fails.
LOOKED_UP = {"access_token", "stock", "symbol", "source", "folder", "ticket_id", "order_id",
             "booking_id", "card_id", "receiver_id"}
LOOKED_UP_BY = {"rm": {"file_name"}, "rmdir": {"dir_name"}}


def decode_steps(response, fmt=None) -> list[list]:
    """Return the calls of each step of a turn; a step that does not decode is text for the user."""
    steps = []
    for step in response[:MAX_CALLS] if isinstance(response, list) else [response]:
        with suppress(Undecodable):
            steps.append(decode(step, fmt))
    return steps


def only_reads(name: str, owner: dict) -> bool:
    """Return whether a function leaves the public state and the current directory unchanged."""
    return owner[name] == "MathAPI" or bool(READS.match(name))


def turn_calls(record: dict) -> list:
    """Return the ground-truth calls of a turn as (name, arguments)."""
    return [decode_prompt(call)[0] for call in record["gt_calls_kw"]]


def key_of(call: tuple, doc: dict) -> tuple:
    """Return a call in comparable form, without defaults; True, 1 and (for integers) 1.0 differ."""
    name, arguments = call
    properties = doc["parameters"]["properties"]
    compared = {}
    for argument, value in arguments.items():
        spec = properties[argument]
        if type(value) is int and spec["type"] == "float" and abs(value) < 1e300:
            value = float(value)
        # As a key, 2.0 finds what is filed under 2; elsewhere the result shows the difference.
        is_key = name.startswith("get_") and argument.endswith("_id")
        if is_key and type(value) is float and value.is_integer():
            value = int(value)
        default = spec.get("default", MISSING)
        if value is None and default == "None":
            continue                           # documents write the default None as the text "None"
        if type(value) is not type(default) or value != default:
            compared[argument] = value
    try:
        return name, repr(sorted(compared.items()))
    except (ValueError, RecursionError):
        return name, "unprintable"             # 5,000 digits, 900 nested lists: never expected


def can_run(call: tuple, record: dict, logins: set) -> bool:
    """Return whether a call may succeed: documented, complete, logged in, with known names."""
    name, arguments = call
    if name not in record["owner"]:
        return False
    parameters = find(record["function"], name)["parameters"]
    if set(arguments) - set(parameters["properties"]):
        return False                           # an argument that is not documented
    if set(parameters.get("required", [])) - set(arguments):
        return False                           # a required argument is missing
    for argument in LOOKED_UP | LOOKED_UP_BY.get(name, set()):
        if argument in arguments and not is_known(arguments[argument], record["known"]):
            return False
    cls = record["owner"][name]
    if name == "trading_login" and cls in record["logged_in"]:
        return False                           # the answer is "already logged in"
    _, login, needing = LOGIN.get(cls, (None, None, ()))
    return name not in needing or cls in record["logged_in"] or login in logins


def is_known(value, text: str) -> bool:
    """Return whether a name or number occurs, as a word, in the conversation so far."""
    if type(value) is int and abs(value) < 10**18:
        value = str(value)
    if not isinstance(value, str):
        return isinstance(value, float)        # 2.0 may name what is filed under 2
    if value in ("", ".."):
        return value == ".."
    # Make the plain test first: it is fast, and a response may hold many unknown names.
    return value in text and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


class Step(NamedTuple):
    """Hold what matters about a call that can run."""
    key: tuple     # the call in comparable form
    name: str
    changes: bool  # whether it may change its class's state or move
    result: str    # what a ground-truth call returned

    def moment(self, changes: int) -> int:
        """Return the number of earlier changes that its answer reflects; 0 if it is constant."""
        return 0 if CONSTANT.match(self.name) else changes


def match_class(steps: list, expected: list, made: set) -> tuple[str, list]:
    """Compare the steps of one class with the expected ones, both in order.

    made: keys of calls of earlier turns. Return (why the state differs or "", expected steps whose
    results the model's calls did not return).
    """
    changes = [step.key for step in expected if step.changes]
    reads = {step.key for step in expected if not step.changes}
    # Follow the model: each step must make the next change, read, or leave the state unchanged.
    done, answers = 0, Counter()
    for step in steps:
        if done < len(changes) and step.key == changes[done]:
            done += 1
            made = made | {step.key}
        elif step.key in reads or not step.changes:
            answers[step.key, step.moment(done)] += 1
        elif step.name == "cd":
            if done < len(changes):
                return "cd moves and is not expected here", []
        elif step.key not in made or step.name in NOT_IDEMPOTENT:
            return f"{step.name} changes the state and is not expected here", []
    if done < len(changes):
        return f"{changes[done][0]} with the expected arguments is missing", []
    # Follow the ground truth: each of its reads needs an answer from the same moment.
    missing, done = [], 0
    for step in expected:
        if step.changes:
            done += 1
        elif answers[step.key, step.moment(done)]:
            answers[step.key, step.moment(done)] -= 1
        else:
            missing.append(step)
    return "", missing


def check_turn(record: dict, calls: list) -> str:
    """Return why the calls of a long-context turn are wrong, or "" (without a simulator)."""
    truth = turn_calls(record)
    if not truth:
        return ""
    if not calls:
        return "no call could be decoded"
    if len(calls) > MAX_CALLS:
        return f"more than {MAX_CALLS} calls"
    docs, owner = {doc["name"]: doc for doc in record["function"]}, record["owner"]
    logins = set(record["logins"])
    steps, expected = defaultdict(list), defaultdict(list)  # {class: its steps}
    for call in calls:
        name = call[0]
        if can_run(call, record, logins):
            step = Step(key_of(call, docs[name]), name, not only_reads(name, owner), "")
            steps[owner[name]].append(step)
            logins.add(name)
    for call, result in zip(truth, record["gt_results"]):
        name = call[0]
        # A failed call left the state unchanged.
        failed = result.startswith(('{"error"', "Error during"))
        changes = not (failed or only_reads(name, owner))
        expected[owner[name]].append(Step(key_of(call, docs[name]), name, changes, result))

    made = {key_of(call, docs[call[0]]) for call in record["made"]}
    missing = []
    for name in record["involved_classes"]:
        reason, unanswered = match_class(steps[name], expected[name], made)
        if reason:
            return reason
        missing += unanswered
    # The model need not ask again for a result returned before the turn.
    before = Counter(record["earlier_results"])
    for step in missing:
        if not before[step.result]:
            return f"the result of {step.name} is missing"
        before[step.result] -= 1
    return ""


# ---------------------------------------------------------------------------------------------
# long-context turns with the official simulator (optional package)


def simulator():
    """Return the official modules (executor, checker). Raise UserError if they are missing."""
    try:
        from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils
    except ImportError as error:
        raise UserError("the official simulator needs `pip install --no-deps bfcl-eval mpmath` "
                        f"({brief(error, 60)})") from None
    return multi_turn_utils, multi_turn_checker


def call_text(name: str, arguments: dict) -> str:
    """Return a call as Python writes it."""
    written = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
    return f"{name}({written})"


NO_CALL = "no_such_function()"


def safe_call(call: tuple, names) -> str:
    """Return the call as text for the executor: documented names and plain data only.

    Anything else becomes a call that fails there, so no other model text is ever evaluated.
    """
    name, arguments = call
    try:
        json_value(arguments)
    except ValueError:                         # not plain data
        return NO_CALL
    if name not in names or not all(map(str.isidentifier, arguments)):
        return NO_CALL
    return call_text(name, arguments)


def score_official(record: dict, response, fmt=None) -> Verdict:
    """Return the official simulator's verdict on a long-context turn, after the earlier turns'
    ground truth.

    Raise UserError if bfcl-eval is not installed.
    """
    utils, checker = simulator()
    steps = []
    for calls in filter(None, decode_steps(response, fmt)):
        steps.append([safe_call(call, record["owner"]) for call in calls])
    earlier = [turn["gt_calls"] for turn in record["before"]]
    turns = [[calls] for calls in earlier] + [steps]
    entry = {"id": "run", "initial_config": record["initial_config"],
             "involved_classes": record["involved_classes"]}
    try:
        result = checker.multi_turn_checker(turns, earlier + [record["gt_calls"]], entry,
                                            LONG_CONTEXT, "genenv")
    finally:
        # Delete the instances that the executor keeps in its module: the next run needs new ones.
        for name in [n for n in vars(utils) if "_run_" in n]:
            delattr(utils, name)
    ok = bool(result["valid"])
    return Verdict(ok, float(ok), "simulator: " + ("passed" if ok else result["error_type"]))


def make_turns(data) -> int:
    """Run the ground truth in the simulator to write derived/long_context_turns.jsonl. Return 0."""
    folder, (utils, _) = Path(data) / NAME, simulator()
    docs, rows = function_docs(folder), []
    for entry, answer in with_answers(folder, LONG_CONTEXT):
        order = {doc["name"]: list(doc["parameters"]["properties"])
                 for name in entry["involved_classes"] for doc in docs[name]}
        for turn, calls in enumerate(answer):
            results, _ = utils.execute_multi_turn_func_call(
                calls, entry["initial_config"], entry["involved_classes"], "genenv",
                entry["id"], long_context=True)
            user = [message["content"] for message in entry["question"][turn]]
            rows.append({"id": entry["id"], "turn": turn, "user": user,
                         "involved_classes": entry["involved_classes"], "gt_calls": calls,
                         "gt_calls_kw": [keywords(call, order) for call in calls],
                         "gt_results": results})
    path = folder / "derived" / "long_context_turns.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(path)
    return 0


def keywords(call: str, order: dict) -> str:
    """Return a ground-truth call with positional arguments named as in the function document."""
    node = ast.parse(call, mode="eval").body
    values = dict(zip(order[node.func.id], map(ast.literal_eval, node.args)))
    values |= {k.arg: ast.literal_eval(k.value) for k in node.keywords}
    return call_text(node.func.id, values)


# ---------------------------------------------------------------------------------------------
# data


def load(folder, split: str = "test", categories=None) -> list[dict]:
    """Return records of BFCL.

    split "test": the 731 long-context turns; "train": the single-turn Python categories.
    categories: load these instead.
    """
    chosen = categories or ((LONG_CONTEXT,) if split == "test" else AST_CATEGORIES)
    records = [r for category in chosen for r in load_category(folder, category)]
    return [r for r in records if r["category"] != LONG_CONTEXT or r["gt_calls"]]


def load_category(folder: Path, category: str) -> list[dict]:
    """Return the records of a category. A single-turn record has id, category, question, function
    and, except for (ir)relevance, ground_truth."""
    if category == LONG_CONTEXT:
        return load_turns(folder)
    if category in RELEVANCE_CATEGORIES:
        rows = read_rows(folder / f"BFCL_v4_{category}.json")
    else:
        rows = [{**row, "ground_truth": answer} for row, answer in with_answers(folder, category)]
    return [{**row, "category": category} for row in rows]


def with_answers(folder: Path, category: str) -> list[tuple]:
    """Return (question record, ground truth) pairs of a category, matched by id."""
    name = f"BFCL_v4_{category}.json"
    answers = {row["id"]: row["ground_truth"]
               for row in read_rows(folder / "possible_answer" / name)}
    return [(row, answers[row["id"]]) for row in read_rows(folder / name)]


def function_docs(folder: Path) -> dict:
    """Return {class name: function documents}, without `response`, which would be half of the
    tokens."""
    docs = {}
    for name, file in FUNCTION_DOCS.items():
        rows = read_rows(folder / "multi_turn_func_doc" / f"{file}.json")
        docs[name] = [{k: v for k, v in row.items() if k != "response"} for row in rows]
    return docs


def load_turns(folder: Path) -> list[dict]:
    """Return all 734 long-context turns, each with what came before it (teacher forcing)."""
    path = folder / "derived" / "long_context_turns.jsonl"
    require_file(path, "; `python -m eval.bfcl DIR` makes it")
    docs, history, records = function_docs(folder), {}, []
    entries = {row["id"]: row for row in read_rows(folder / f"BFCL_v4_{LONG_CONTEXT}.json")}
    for row in read_rows(path):
        before = history.setdefault(row["id"], [])
        assert row["turn"] == len(before), "an earlier turn of the conversation is missing"
        records.append(turn_record(row, before, docs, entries[row["id"]]))
        before.append(row)
    return records


def turn_record(row: dict, before: list, docs: dict, entry: dict) -> dict:
    """Return one long-context turn with its history, its documents and what the scorer needs."""
    record = {"id": f"{row['id']}:{row['turn']}", "category": LONG_CONTEXT}
    # Set what is asked, and with which functions; some are hidden from the model.
    hidden = entry.get("excluded_function", [])
    functions = [doc for name in row["involved_classes"] for doc in docs[name]]
    record["user"] = "\n".join(row["user"])
    record["involved_classes"] = row["involved_classes"]
    record["function"] = functions
    record["owner"] = {doc["name"]: name for name in row["involved_classes"] for doc in docs[name]}
    record["shown"] = [doc for doc in functions if doc["name"] not in hidden]
    # Set the ground truth of this turn, and of those before it.
    for key in ("gt_calls", "gt_calls_kw", "gt_results"):
        record[key] = row[key]
    record["before"] = before[:]
    record["earlier_results"] = [result for turn in before for result in turn["gt_results"]]
    record["made"] = [decode_prompt(call)[0] for turn in before for call in turn["gt_calls_kw"]]
    # Set who is logged in, from the start or since an earlier call.
    start = entry["initial_config"]
    record["initial_config"] = start
    record["logins"] = {call.split("(")[0] for turn in before for call in turn["gt_calls"]}
    record["logged_in"] = {
        name for name, (key, _, _) in LOGIN.items() if start.get(name, {}).get(key)
    }
    # Set the text in which is_known looks for names: configuration, users, calls, results.
    record["known"] = json.dumps([start, before, row], ensure_ascii=False)
    return record


# ---------------------------------------------------------------------------------------------
# prompt


INSTRUCTIONS = """You can call the functions documented below, one JSON object per function.
Answer with calls only, as a Python list with every argument named:
[name(argument=value, other=value), another_name(argument=value)]
Write no other text. If no function fits the request, or a required value is missing, say so \
in one sentence without any call.
"""
INSTRUCTIONS_TURNS = """Call everything that is needed to fulfil the latest request, in order. \
The results of earlier calls are given to you.
"""


def prompt(record: dict) -> list[dict]:
    """Return chat messages: documents in the system message, the history as a conversation."""
    turns = record["category"] == LONG_CONTEXT
    docs = record["shown"] if turns else record["function"]
    system = INSTRUCTIONS + (INSTRUCTIONS_TURNS if turns else "") + "\nFunctions:\n" \
        + "\n".join(json.dumps(doc, ensure_ascii=False) for doc in docs)
    if not turns:
        question = record["question"][0]
        extra = [m["content"] for m in question if m["role"] == "system"]
        return [{"role": "system", "content": "\n\n".join([system] + extra)}] \
            + [dict(m) for m in question if m["role"] != "system"]
    messages = [{"role": "system", "content": system}]
    for past in record["before"]:
        messages.append({"role": "user", "content": "\n".join(past["user"])})
        if past["gt_calls_kw"]:
            # Results come in a user message: not every chat template knows the role "tool".
            calls, returned = ", ".join(past["gt_calls_kw"]), "\n".join(past["gt_results"])
            messages += [{"role": "assistant", "content": f"[{calls}]"},
                         {"role": "user", "content": f"Results:\n{returned}"},
                         {"role": "assistant", "content": "Done."}]
    return messages + [{"role": "user", "content": record["user"]}]


# ---------------------------------------------------------------------------------------------
# score


def score(record: dict, response, fmt: str | None = None, official: bool = False) -> Verdict:
    """Return the verdict on one response; pure: no text makes it raise, and none is evaluated.

    response: text, or for a long-context turn also a list of texts (steps). fmt: see decode.
    official: judge a long-context turn with the official simulator.
    """
    if official:
        return score_official(record, response, fmt)
    if record["category"] == LONG_CONTEXT:
        calls = list(itertools.chain(*decode_steps(response, fmt)))
        return verdict(check_turn(record, calls), RIGHT)
    try:
        calls, problem = decode(response, fmt), ""
    except Undecodable as error:
        calls, problem = [], str(error)
    if record["category"] in RELEVANCE_CATEGORIES:                        # rule 7
        ok = bool(calls) != ("irrelevance" in record["category"])
        return Verdict(ok, float(ok), problem or f"{len(calls)} calls")
    return verdict(problem or check_ast(record, calls), RIGHT)


# ---------------------------------------------------------------------------------------------
# base tasks


def base_task(record: dict) -> dict | None:
    """Return a single-turn record as a base task {"task", "tools", "calls"}.

    Return None if the record has several messages, or if its gold calls do not pass.
    """
    question, calls = record["question"][0], gold_calls(record)
    if len(question) != 1 or question[0]["role"] != "user" or check_ast(record, calls):
        return None
    tools = [{"name": doc["name"], "description": doc.get("description", ""),
              "parameters": json_schema(doc["parameters"])} for doc in record["function"]]
    return {"task": question[0]["content"], "tools": tools,
            "calls": [{"name": name, "arguments": arguments} for name, arguments in calls]}


def gold_calls(record: dict) -> list[tuple]:
    """Return the ground truth as calls, with the first alternative that passes for each argument.

    Optional arguments ("" is listed) are left out, unless the document requires them.
    """
    calls = []
    for answer in record["ground_truth"]:
        (name, listed), = answer.items()
        parameters = find(record["function"], name)["parameters"]
        arguments = {}
        for argument, alternatives in listed.items():
            if "" in alternatives and argument not in parameters.get("required", []):
                continue
            # An answer may name an argument that the document lacks: then nothing can pass.
            spec = parameters["properties"].get(argument, {"type": "any"})
            # The empty list passes for a required list whose answer lists "".
            values = [settle(a) for a in alternatives] + [[]]
            arguments[argument] = next(
                (v for v in values if value_matches(spec, v, alternatives)), values[0])
        calls.append((name, arguments))
    return calls


def settle(value):
    """Return a ground-truth alternative as a plain value; its dicts hold lists of alternatives."""
    if isinstance(value, dict):
        return {k: v[0] for k, v in value.items() if v and v[0] != ""}
    if isinstance(value, list):
        return [settle(item) if isinstance(item, dict) else item for item in value]
    return value


def json_schema(spec: dict) -> dict:
    """Return a BFCL parameter document as a JSON schema, with the types' JSON names."""
    names = {"dict": "object", "float": "number", "tuple": "array"}
    schema = {k: v for k, v in spec.items() if k in ("description", "enum", "default", "required")}
    if spec.get("type") not in (None, "any"):
        schema["type"] = names.get(spec["type"], spec["type"])
    if "properties" in spec:
        schema["properties"] = {k: json_schema(v) for k, v in spec["properties"].items()}
    if isinstance(spec.get("items"), dict):
        schema["items"] = json_schema(spec["items"])
    return schema


if __name__ == "__main__":
    sys.exit(exit_code(lambda: make_turns("".join(sys.argv[1:2]))))
