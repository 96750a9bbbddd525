"""API-Bank: is the one API call that a dialogue asks for the right one?

What of the paper this is: the column "API-Bank" of the results table.

How to run: `python -m eval api_bank --data DIR --model M`.

Two scorers:
* "toolrl" (default): the 597 records (399 + 67 + 131) and the exact-match rule of the ToolRL
  evaluation. One JSON call per line between `<tool_call>` tags; right if any line equals the gold.
* "damo": the benchmark's own evaluator on `[ApiName(key='value')]`. It executes the call on a fresh
  database and compares input, output and exception, differently from API to API. Neither its code
  nor its database is here. What can be known without them: arguments are read by the same pattern,
  declared names and types are enforced, and each API's comparison of its *inputs* is applied
  (COMPARE); the output is taken to follow from the input. Two things need no database to be known:
  steps that depend on an earlier call (`fails_fresh`) and checks that never pass (NEVER).

Unclear in the paper: it cites ToRL for the protocol of this column, but ToRL is about computation
with code and reports no API-Bank. What fits the figures is *ToolRL*: 61.6 = 368/597 and
79.1 = 472/597. Greedy, one response per record. Whether the mean is over the 597 records or over
the three levels is not said; both figures fit the former.

Known oddities, left as they are because the figures contain them: 8 level-1 golds use an argument
that the tool does not document; 10 prompts are duplicates; 6 level-2 golds call a tool that the
prompt does not list; five gold calls of BookHotel are cut off by the original converter.

Training part: nearly every call of the official dialogues is evaluated. load(split="train") gives
the calls of the dialogues that are not (a handful) and, where the official training data of level 3
is in official/training-data/lv3-api-train.json, its calls; ToolSearcher calls are left out as they
are in the evaluation. A dialogue or request of which any call is evaluated gives no base task.
"""
import ast
import datetime
import json
import re
from itertools import groupby
from pathlib import Path

from support.files import UserError
from eval.common import (Verdict, agreement, check_record, data_dir, mean_score, one_line,
                         one_line_for, read_array, read_rows, verdict)

NAME = "api_bank"
PAPER = {"Qwen2.5-7B": 61.6, "GenEnv 7B": 79.1}
MAX_NEW_TOKENS = 512
REQUIRED = {"toolrl_exact": 1.0, "damo_exec": 0.97}
VARIANTS = {"damo": ({"rule": "damo"}, {"rule": "damo"})}
RIGHT = "the expected call"
MAX_TEXT = 200_000        # characters of a response that are looked at
MAX_ARGUMENTS = 20_000    # characters of the argument list under the damo rule


# ---------------------------------------------------------------------------------------------
# ToolRL rule


def toolrl_fault(record: dict, response: str) -> str:
    """Why no JSON line of the last tool-call block equals the gold call, or ""."""
    block = response.rpartition("<tool_call>")[2].partition("</tool_call>")[0]
    if len(block) > MAX_TEXT:
        return f"tool call longer than {MAX_TEXT} characters"
    gold_call, seen = record["gold"], 0
    for line in block.split("\n"):
        try:
            call = json.loads(line)
        except (ValueError, RecursionError):
            continue                           # prose, truncated JSON, 10,000 brackets: dropped
        seen += 1
        try:
            if isinstance(call, str):
                call = json.loads(call)        # a call written as a JSON string
            if "name" not in call or "parameters" not in call:
                # a bare argument object passes for the gold function
                call = {"name": gold_call["name"], "parameters": call}
            if call["name"] == gold_call["name"] and call["parameters"] == gold_call["parameters"]:
                return ""
        except (TypeError, ValueError, RecursionError):
            # the official loop stops at such a line (42, null, "text"), later lines do not count
            return f"line {line.strip()[:40]!r} is JSON but no call; the scan ends there"
    return "no line is the expected call" if seen else "no JSON line"


# ---------------------------------------------------------------------------------------------
# DAMO rule


def find_call(text: str):
    """(name, argument text) of the first `[Name(...)]` on one line, or None; linear time.

    Like a greedy pattern, the arguments reach to the last `)]` of the line.
    """
    for line in text.split("\n"):
        end = line.rfind(")]")
        match = re.search(r"\[(\w+)\(", line[:end]) if end >= 0 else None
        if match:
            return match.group(1), line[match.end():end]
    return None


# a word starts at a word boundary anyway; saying so keeps long words from being tried letter by
# letter. A quoted value ends at the next quote of either kind; it has at least one character.
ARGUMENT = re.compile(r"""(?<!\w)(?P<name>\w+)(?!\w)\s*=\s*
                          (?:['"](?P<quoted>.+?)['"] | (?P<list>\[.*\]) | (?P<word>\w+))""",
                      re.VERBOSE)


def read_arguments(text: str) -> dict:
    """Arguments as strings: quoted, a bracketed list, or one bare word."""
    return {m["name"]: m["quoted"] or m["list"] or m["word"] for m in ARGUMENT.finditer(text)}


def convert(value: str, kind: str):
    """A string as its declared type; ValueError where the official tool manager refuses it."""
    value = str(value)
    if kind == "int":
        if not value.isdecimal():
            raise ValueError(f"{value[:40]!r} is no whole number")
        return int(value)
    if kind == "float":
        if not value.replace(".", "", 1).isdecimal():
            raise ValueError(f"{value[:40]!r} is no number")
        return float(value)
    if kind in ("list", "list(str)"):
        return json.loads(value.replace("'", '"'))
    if kind == "bool":
        return value == "True"
    return value


def of_text(change):
    """A function that changes texts and leaves other values alone."""
    return lambda value: change(value) if isinstance(value, str) else value


strip = of_text(str.strip)                                # without blanks at the ends
fold = of_text(lambda text: text.strip().lower())         # ... and in one case
unspaced = of_text(lambda text: re.sub(r"\s", "", text))  # without any blank (formulas)


def moment(value):
    """A date or time in its normal form; years with fewer digits are padded."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    parts = text.split("-")
    if len(parts) == 3:
        text = "-".join([parts[0].zfill(4)] + parts[1:])
    for shape in ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d"):
        try:
            return datetime.datetime.strptime(text, shape).strftime(shape)
        except (ValueError, OverflowError):
            continue
    return object()                            # not a date: equal to nothing


def day(value):
    """Month and day, with or without a year."""
    shown = moment(value)
    if isinstance(shown, str):
        return shown[-5:]
    try:
        # a leap year, so that 02-29 is a day
        return datetime.datetime.strptime("2000-" + value.strip(), "%Y-%m-%d").strftime("%m-%d")
    except (ValueError, AttributeError):
        return object()


def readings(value):
    """Health data: name and value of each item as text, in any order."""
    try:
        return sorted((str(item["name"]), str(item["value"])) for item in value)
    except (TypeError, KeyError, ValueError, RecursionError):
        return object()


def ignored(value):
    """Not compared, but must not be blank."""
    return bool(str(value).strip())


def words(given, expected) -> bool:
    """More than half of all words in common."""
    a, b = set(str(given).split(" ")), set(str(expected).split(" "))
    return bool(str(given).strip()) and len(a & b) / len(a | b) > 0.5


def words_folded(given, expected) -> bool:
    """The same, whatever the case."""
    return words(str(given).lower(), str(expected).lower())


# How each API compares an argument; exact where nothing is said. From the public evaluator.
COMPARE = {
    # ModifyAgenda and DeleteAgenda find their entry by its content, which must therefore be exact
    "AddAgenda": {"content": words},
    "AddReminder": {"content": words_folded}, "ModifyReminder": {"content": words_folded},
    "DeleteReminder": {"content": ignored}, "DeleteAgenda": {"location": ignored},
    "AddMeeting": {"meeting_topic": words}, "ModifyMeeting": {"meeting_topic": words},
    "QueryMeeting": {"meeting_topic": words}, "EmailReminder": {"content": ignored},
    "EmergencyKnowledge": {"symptom": fold}, "SymptomSearch": {"symptom": fold},
    "QueryScene": {"name": fold}, "DeleteScene": {"name": fold},
    "TimedSwitch": {"name": fold, "time": moment},
    "CancelTimedSwitch": {"name": fold, "time": moment},
    "QueryStock": {"stock_code": fold, "date": moment},
    "ModifyRegistration": {"appointment_id": strip, "new_appointment_date": moment,
                           "new_appointment_doctor": strip},
    "AppointmentRegistration": {"patient_name": strip, "date": moment, "doctor_name": strip},
    "QueryRegistration": {"patient_name": strip, "date": moment},
    "CancelRegistration": {"appointment_id": strip},
    "RecordHealthData": {"user_id": fold, "time": moment, "health_data": readings},
    "QueryHealthData": {"user_id": fold, "start_time": moment, "end_time": moment},
    "QueryHistoryToday": {"date": day}, "Calculator": {"formula": unspaced},
    "DocumentQA": {"url": strip, "question": strip}, "PlayMusic": {"music_name": fold},
    "Dictionary": {"keyword": fold},
}
# its check reads the field `time` of an input that has start_time and end_time: false every time
NEVER = {"DeleteMeeting"}


def fails_fresh(gold_call: dict, accounts: set) -> str:
    """Why the gold call itself fails on a fresh database, or ""."""
    name, given = gold_call["name"], gold_call["parameters"]
    if name in NEVER:
        return f"the official check of {name} never passes"
    if name == "ForgotPassword" and given.get("status") == "Verification Code":
        return "the code was sent by an earlier call, which a fresh database has not seen"
    if name == "RegisterUser" and given.get("username") in accounts:
        return "the account exists in a fresh database"
    return ""


def damo_fault(record: dict, response: str) -> str:
    """Why the original evaluator's rule rejects, as far as it follows from the text, or ""."""
    found, gold_call = find_call(response[:MAX_TEXT]), record["gold"]
    if not found:
        return "no [ApiName(...)] on one line"
    name, text = found
    if name != gold_call["name"]:
        return f"API {name[:40]!r} is not {gold_call['name']}"
    if len(text) > MAX_ARGUMENTS:
        return f"arguments longer than {MAX_ARGUMENTS} characters"
    given, declared = read_arguments(text), record["parameters"]
    for argument, value in given.items():
        if argument not in declared:
            return f"argument {argument[:40]!r} is not declared"
        try:
            given[argument] = convert(value, declared[argument])
        except (ValueError, RecursionError) as error:
            return f"argument {argument}: {one_line(error, 80)}"
    try:
        return fails_fresh(gold_call, record.get("accounts", set())) \
            or differing(name, given, gold_call["parameters"], declared)
    except RecursionError:
        return "a list argument is nested too deeply"


def differing(name: str, given: dict, expected: dict, declared: dict) -> str:
    """The first argument that the API's own comparison tells apart, as a reason, or ""."""
    for argument in sorted(set(given) | set(expected)):
        wanted = expected.get(argument)
        if isinstance(wanted, str):
            try:
                # eight expected calls have an argument that their tool does not declare
                wanted = convert(wanted, declared.get(argument, "str"))
            except ValueError:
                return f"the expected {argument} itself is not {declared[argument]}"
        if (argument in given) != (wanted is not None):
            return f"argument {argument} is {'missing' if wanted is not None else 'unexpected'}"
        how = COMPARE.get(name, {}).get(argument)
        value = given.get(argument)
        same = how(value, wanted) if how in (words, words_folded) else \
            how(value) == how(wanted) if how else value == wanted
        if not same:
            return f"argument {argument} is {str(value)[:40]!r} instead of {str(wanted)[:40]!r}"
    return ""


# ---------------------------------------------------------------------------------------------
# data


def load(data, split: str = "test", rule: str = "toolrl") -> list[dict]:
    """Records of API-Bank.

    split "test" with rule "toolrl": the 597 records of that protocol; with rule "damo": the
    official calls, ToolSearcher left out (620). "train": calls of dialogues that are not
    evaluated. Raises UserError naming file and record.
    """
    if split not in ("test", "train") or rule not in ("toolrl", "damo"):
        raise UserError(f"api_bank: unknown split {split!r} or rule {rule!r}")
    folder = data_dir(data, NAME)
    if split == "train":
        return load_train(folder)
    return load_toolrl(folder) if rule == "toolrl" else load_damo(folder)


def load_toolrl(folder: Path) -> list[dict]:
    """The 597 records: {id, category, system, user, gold, parameters, dialogue}."""
    records = []
    for level in (1, 2, 3):
        path = folder / "toolrl" / f"level-{level}-api_processed.json"
        rows = read_array(path, {"system": str, "user": str, "answer": object, "other": dict})
        for number, row in enumerate(rows):
            answer = row["answer"]
            answer = answer[0] if isinstance(answer, list) and answer else answer
            check_record(answer, f"{path}, record {number}: the gold call",
                         {"name": str, "parameters": dict})
            # the dialogue is told by its file name, or by the number of the level-3 scenario
            records.append({"id": f"Level{level}_{number}", "category": f"level-{level}",
                            "system": row["system"], "user": row["user"], "gold": answer,
                            "parameters": declared_types(prompt_tools(row["system"]), answer),
                            "dialogue": row["other"].get("file", row["other"].get("sample_id"))})
    return records


def declared_types(tools: dict, call: dict) -> dict:
    """{argument: type} of a call's tool. A tool without document has the call's arguments, as text:
    6 tools are in no prompt."""
    shown = tools.get(call["name"], {}).get("parameters")
    if shown is None:
        return dict.fromkeys(call["parameters"], "str")
    return {name: spec.get("type", "str") for name, spec in shown.items()}


def prompt_tools(system: str) -> dict:
    """{tool: {"description", "parameters"}} listed in a ToolRL system prompt.

    Levels 1-2 write "1. Name: X" and "Description: ..." on two lines, level 3 "1. X: ...".
    """
    tools, name, description = {}, None, ""
    for line in system.split("\n"):
        head = re.match(r"\d+\. (?:Name: )?(\w+)(?:: ?(.*))?$", line)
        if head:
            name, description = head[1], head[2] or ""
        elif line.startswith("Description: "):
            description = line.removeprefix("Description: ")
        elif line.startswith("Parameters: ") and name:
            try:
                tools[name] = {"description": description, "parameters":
                               ast.literal_eval(line.removeprefix("Parameters: "))}
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                pass                           # no document then: the gold call's arguments count
            name = None
    return tools


def official_tools(folder: Path) -> tuple[dict, dict]:
    """Documented parameters of the official APIs: (levels 1-2, level 3), {name: document}."""
    low, high = {}, {}
    for row in read_array(folder / "official/test-data/level-1-api.json", ("instruction",)):
        for line in row["instruction"].split("\n"):
            if line.startswith("{"):
                add_tool(low, json.loads(line))
    for row in read_array(folder / "official/test-data/level-3.json", ("apis",)):
        for api in row["apis"]:
            if api["api_name"] == "ToolSearcher":
                output = api["output"]["output"]
                for tool in output if isinstance(output, list) else [output]:
                    add_tool(high, tool)
    return low, high


def add_tool(tools: dict, document) -> None:
    """Keep a document of the form {"name", "description", "input_parameters"}."""
    if isinstance(document, dict) and isinstance(document.get("input_parameters"), dict):
        tools.setdefault(document["name"], {"description": document.get("description", ""),
                                            "parameters": document["input_parameters"]})


def dialogues(folder: Path) -> dict:
    """{file name: lines} of the official dialogues of levels 1 and 2."""
    found = {}
    for path in sorted((folder / "official" / "lv1-lv2-samples").glob("*/*.jsonl")):
        found[path.name] = read_rows(path, ("role",))
    if not found:
        raise UserError(f"{folder / 'official/lv1-lv2-samples'}: no dialogues (see eval/README.md)")
    return found


def load_damo(folder: Path) -> list[dict]:
    """The official calls without ToolSearcher, with what their prompts show."""
    low, high = official_tools(folder)
    samples = dialogues(folder)
    calls = [line for lines in samples.values() for line in lines if line["role"] == "API"]
    accounts = {c["param_dict"].get("username") for c in calls if c["api_name"] == "GetUserToken"}
    records = []
    for level in (1, 2):
        path = folder / f"official/test-data/level-{level}-api.json"
        for number, row in enumerate(read_array(path, ("file", "id", "instruction", "input"))):
            # sample 2i is the i-th call of a dialogue, sample 2i + 1 the line after it
            lines = samples.get(row["file"], [])
            places = [i + k for i, line in enumerate(lines) if line["role"] == "API"
                      for k in (0, 1)]
            with one_line_for(f"{path}, record {number}"):
                line = lines[places[row["id"]]]
                assert line["role"] == "API", "no call at this place of the dialogue"
                records.append(damo_record(f"{row['file']}#{row['id']}", level, line["api_name"],
                                           line.get("result", {}).get("input")
                                           or line["param_dict"], low, row, accounts))
    scenarios = read_array(folder / "official/test-data/level-3.json", ("apis",))
    path = folder / "official/test-data/level-3-batch-inf.json"
    rows = read_array(path, ("sample_id", "api_id", "instruction", "input"))
    for number, row in enumerate(rows):
        with one_line_for(f"{path}, record {number}"):
            api = scenarios[row["sample_id"]]["apis"][row["api_id"]]
            records.append(damo_record(f"{row['sample_id']}#{row['api_id']}", 3, api["api_name"],
                                       api["input"], high, row, accounts))
    return [r for r in records if r["gold"]["name"] != "ToolSearcher"]


def damo_record(name: str, level: int, api: str, given: dict, tools: dict, row: dict,
                accounts: set) -> dict:
    """One official call as a record."""
    call = {"name": api, "parameters": given}
    return {"id": name, "category": f"level-{level}", "gold": call,
            "parameters": declared_types(tools, call), "accounts": accounts,
            "dialogue": name.split("#")[0],
            "system": row["instruction"].strip(), "user": row["input"].strip()}


# ---------------------------------------------------------------------------------------------
# prompt, gold, score


def prompt(record: dict) -> list[dict]:
    """Chat messages; the texts are those of the data."""
    return [{"role": "system", "content": record["system"]},
            {"role": "user", "content": record["user"]}]


def gold(record: dict, rule: str = "toolrl") -> str:
    """The response of a perfect model, in the format of the rule."""
    call = record["gold"]
    if rule == "damo":
        # the benchmark quotes lists, and its own pattern then ends them at the first inner quote
        shown = ", ".join(f"{k}={v}" if isinstance(v, list) else f"{k}='{v}'"
                          for k, v in call["parameters"].items() if v is not None)
        return f"API-Request: [{call['name']}({shown})]"
    shown = json.dumps({"name": call["name"], "parameters": call["parameters"]}, ensure_ascii=False)
    return f"<think> One call answers this. </think>\n<tool_call>\n{shown}\n</tool_call>"


def score(record: dict, response, rule: str = "toolrl") -> Verdict:
    """Verdict on one response; pure, raises on no text, evaluates nothing.

    rule: "toolrl" or "damo". Raises UserError on another rule.
    """
    if rule not in ("toolrl", "damo"):
        raise UserError(f"api_bank: unknown rule {rule!r}: toolrl or damo")
    if not isinstance(response, str):
        return verdict("the response is not text", RIGHT)
    return verdict((toolrl_fault if rule == "toolrl" else damo_fault)(record, response), RIGHT)


aggregate = mean_score


def verify(data, rows):
    """Re-score recorded verdicts; yields (kind, agrees, detail), kind toolrl_exact or damo_exec."""
    known = {}
    for number, row in enumerate(rows, 1):
        where = f"api_bank, recorded verdict {number}"
        check_record(row, where, ("scorer", "category", "id", "response", "official_verdict"))
        kind = row["scorer"]
        if kind not in REQUIRED:
            raise UserError(f"{where}: unknown scorer {kind!r}")
        rule = kind.split("_")[0]
        if kind not in known:
            known[kind] = {(r["category"], r["id"]): r for r in load(data, rule=rule)}
        record = known[kind].get((row["category"], row["id"]))
        if record is None:
            raise UserError(f"{where}: no record {row['id']} in {row['category']}")
        yield agreement(kind, row["id"], row, score(record, row["response"], rule))


# ---------------------------------------------------------------------------------------------
# training part


def load_train(folder: Path) -> list[dict]:
    """Calls that share no dialogue and no request with an evaluated record."""
    evaluated = load_toolrl(folder)
    used = {record["dialogue"] for record in evaluated}
    asked = {request_of(record["user"]) for record in evaluated}
    low, _ = official_tools(folder)
    records = []
    for name, lines in dialogues(folder).items():
        if name not in used:
            records += train_dialogue(name, lines, low)
    path = folder / "official" / "training-data" / "lv3-api-train.json"
    if path.is_file():
        for number, row in enumerate(read_array(path, ("input", "output"))):
            records += train_level3(f"lv3-train-{number}", row)
    return [r for r in records if request_of(r["user"]) not in asked and base_task(r)]


def request_of(text: str) -> str:
    """The first thing a user says, for telling dialogues apart."""
    match = re.search(r"(?:<user>|^User:)\s*(.*?)\s*(?:</user>|$)", text, re.MULTILINE)
    return re.sub(r"\W+", " ", (match or [text, text])[1]).strip().lower()


def train_dialogue(name: str, lines: list, tools: dict) -> list[dict]:
    """The calls of one official dialogue, each with the text before it."""
    records, text = [], []
    names = dict.fromkeys(line["api_name"] for line in lines if line["role"] == "API")
    for number, line in enumerate(lines):
        if line["role"] != "API":
            text.append(f"{line['role']}: {line['text']}")
            continue
        output = line.get("result", {}).get("output")
        if line["api_name"] != "ToolSearcher":
            records.append({"id": f"{name}#{number}", "category": "dialogue", "dialogue": name,
                            "user": "\n".join(text), "returned": output,
                            "tools": {n: tools[n] for n in names if n in tools},
                            "gold": {"name": line["api_name"], "parameters": line["param_dict"]}})
        text.append(f"Result of {line['api_name']}: {json.dumps(output, ensure_ascii=False)}")
    return records + joined(records)


def joined(records: list) -> list[dict]:
    """Calls of one dialogue between which the user says nothing, as one record each: all that was
    said before the first, {"golds": calls, "results": what they return}."""
    chains = [list(chain) for _, chain in groupby(records, lambda r: r["user"].count("User: "))]
    return [{**chain[0], "id": f"{chain[0]['id']}-{len(chain)}",
             "golds": [r["gold"] for r in chain], "results": [r["returned"] for r in chain]}
            for chain in chains if len(chain) > 1]


def train_level3(name: str, row: dict) -> list[dict]:
    """A record of the official training data: request, calls so far with results, next call."""
    found = find_call(str(row["output"]))
    if not found or found[0] == "ToolSearcher":
        return []
    text, tools = [], {}
    for line in str(row["input"]).split("\n"):
        if line.startswith("User:"):
            text.append(line)
        made, _, result = line.partition("->")
        if not made.startswith("API-Request: ["):
            continue
        if made.startswith("API-Request: [ToolSearcher("):
            for tool in found_tools(result):
                add_tool(tools, tool)
        else:
            text.append(f"Result of {(find_call(made) or ['a call'])[0]}: {result}")
    return [{"id": name, "category": "lv3-train", "dialogue": name, "user": "\n".join(text),
             "tools": tools, "gold": {"name": found[0], "parameters": read_arguments(found[1])}}]


def found_tools(text: str) -> list:
    """Tool documents in a ToolSearcher result, a Python literal: one, a list, or wrapped."""
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    value = value.get("output", value) if isinstance(value, dict) else value
    return value if isinstance(value, list) else [value]


JSON_TYPE = {"int": "integer", "float": "number", "bool": "boolean", "list": "array",
             "list(str)": "array", "dict": "object"}


def base_task(record: dict) -> dict | None:
    """A training record as base task {"task", "tools", "calls"}.

    Of several calls in a row, where a later one may need what an earlier one returned, also with
    {"results"}.

    None for evaluated records (they have no "tools"), and where a call does not fit its document.
    """
    tools, calls = record.get("tools"), []
    for call in record.get("golds", [record["gold"]]):
        if not tools or call["name"] not in tools:
            return None
        declared = tools[call["name"]]["parameters"]
        try:
            calls.append({"name": call["name"], "arguments": {
                k: convert(v, declared[k].get("type", "str"))
                for k, v in call["parameters"].items()}})
        except (ValueError, KeyError, AttributeError):
            return None
    task = {"task": record["user"],
            "tools": [{"name": name, "description": tool["description"],
                       "parameters": json_schema(tool["parameters"])}
                      for name, tool in tools.items()],
            "calls": calls}
    return {**task, "results": record["results"]} if "results" in record else task


def json_schema(parameters: dict) -> dict:
    """An API-Bank parameter document as JSON schema; unknown types (datetime...) are text."""
    properties = {name: {"type": JSON_TYPE.get(spec.get("type"), "string"),
                         "description": spec.get("description", "")}
                  for name, spec in parameters.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}
