"""Check that our scorers agree with the official ones, on recorded verdicts.

Usage: python -m tests.verify BENCHMARK VERDICTS.jsonl --data DIR
       (exit code 0 if every required rate is met, 1 if one is missed, 2 for bad input)

The recorded verdicts and the data of the benchmarks are not in this repository. For each benchmark,
one function below takes the data folder and returns a function of a recorded row; that function
returns {kind: where our verdict differs from the recorded one}.
"""

import sys
from pathlib import Path

from eval import alfworld, api_bank, bamboogle, bfcl, travelplanner
from eval.__main__ import BENCHES
from eval.common import brief, load_records, read_rows
from errors import exit_code, one_line
from support.options import Parser

# the share of verdicts that must agree, by kind; of every other kind, all must agree
REQUIRED = {"damo_exec": 0.99, "multi_turn": 0.99}
# these cannot be decided here: whole games, dialogues with a search and a judge, and rates of whole
# submissions, most of whose plans are not among the rows
UNDECIDABLE = ("episode", "toolrl_dialogue", "aggregate")


# ---------------------------------------------------------------------------------------------
# the command


def main(argv) -> int:
    """Print every disagreement and a table of agreement by kind; return the exit code."""
    parser = Parser(prog="python -m tests.verify")
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("verdicts", metavar="VERDICTS.jsonl")
    parser.add_argument("--data", required=True, metavar="DIR")
    args = parser.parse_args(argv)
    return print_agreement(agreement(args.bench, args.verdicts, args.data))


def agreement(bench: str, path, data) -> dict:
    """Return {kind: whether each verdict agrees}, and print each disagreement when it is found."""
    differences, kinds = VERIFY[bench](data), {}
    for number, row in enumerate(read_rows(path), 1):
        with one_line(f"{path}, recorded verdict {number}", "is malformed"):
            if row["kind"] in UNDECIDABLE:
                continue
            for kind, wrong in differences(row).items():
                kinds.setdefault(kind, []).append(not wrong)
                if wrong:
                    print(f"disagrees  {kind}  {row['id']}: {brief('; '.join(wrong), 1000)}")
    return kinds


def print_agreement(kinds: dict) -> int:
    """Print {kind: agreements}; return 0 if there are any and every required rate is met, else 1.
    """
    code = 0 if kinds else 1
    for kind, agrees in sorted(kinds.items()):
        rate, required = sum(agrees) / len(agrees), REQUIRED.get(kind, 1.0)
        print(f"{kind}: {rate:.2%} of {len(agrees)} verdicts agree, {required:.0%} must")
        if rate < required:
            code = 1
    return code


def unequal(recorded: dict, ours: dict) -> list:
    """List where our values differ from the recorded ones."""
    return [f"{name} is {ours[name]!r}, recorded {value!r}" for name, value in recorded.items()
            if ours[name] != value]


def pass_or_fail(row: dict, ours) -> list:
    """List how our verdict differs from a recorded one that is pass or fail; [] if it agrees."""
    if ours.ok == row["official_verdict"]:
        return []
    return [f"{row['kind']}: ours is {ours.ok} ({ours.reason})"]


# ---------------------------------------------------------------------------------------------
# one function per benchmark


def verify_api_bank(data):
    """Compare the kinds toolrl_exact and damo_exec, which are named after the official scorer."""
    known = {}
    for rule in ("toolrl", "damo"):
        for record in load_records(api_bank, data, rule=rule):
            known[rule, record["category"], record["id"]] = record

    def differences(row):
        rule = row["scorer"].split("_")[0]
        record = known[rule, row["category"], row["id"]]
        return {row["scorer"]: pass_or_fail(row, api_bank.score(record, row["response"], rule))}

    return differences


def verify_bfcl(data):
    """Compare the kinds single_turn, relevance and multi_turn (by the rule without a simulator)."""
    kinds = {
        bfcl.LONG_CONTEXT: "multi_turn",
        **dict.fromkeys(bfcl.RELEVANCE_CATEGORIES, "relevance"),
        **dict.fromkeys(bfcl.AST_CATEGORIES, "single_turn"),
    }
    known = {}
    for category in kinds:
        for record in bfcl.load_category(Path(data) / bfcl.NAME, category):
            known[record["id"]] = record

    def differences(row):
        name = f"{row['id']}:{row['turn']}" if "turn" in row else row["id"]
        ours = bfcl.score(known[name], row["response"], row["format"])
        return {kinds[row["category"]]: pass_or_fail(row, ours)}

    return differences


def verify_bamboogle(data):
    """Compare the kinds metric and searchr1_extract."""

    def differences(row):
        answer = row["response"]
        if row["kind"] == "searchr1_extract":
            answer = bamboogle.extract_searchr1(answer)
        ours = {"extracted": answer, **bamboogle.metrics(answer, row["gold"])}
        return {row["kind"]: unequal(row["official_verdict"], ours)}

    return differences


def verify_travelplanner(data):
    """Compare the row's kind by the original within-city rule, and KIND/fixed by the repaired one.
    """
    parts = {part: load_records(travelplanner, data, split=split)
             for split, part in travelplanner.PARTS.items()}

    def differences(row):
        query = parts[row["split"]][row["row"]]
        tables, recorded = travelplanner.database(query["data"]), row["official_verdict"]
        old = travelplanner.judge(query, row["response"], tables)
        fixed = travelplanner.judge({**query, "fixed": True}, row["response"], tables)
        repaired = row["official_verdict_fixed"]
        if repaired == "same":
            repaired = recorded
        return {row["kind"]: unequal(comparable(recorded), comparable(old)),
                f"{row['kind']}/fixed": unequal(comparable(repaired), comparable(fixed))}

    return differences


def comparable(verdict: dict) -> dict:
    """Return a verdict without the wording of its reasons; a crash keeps only stage and type."""
    brief = {**verdict, "hard_evaluated": verdict["hard"] is not None}
    if verdict["crash"]:
        brief["crash"] = verdict["crash"].split(": ")[:2]
    for stage in ("commonsense", "hard"):
        if verdict[stage]:
            brief[stage] = {name: passed(check) for name, check in verdict[stage].items()}
    return brief


def passed(check):
    """Return whether a check passed, or None where the request does not ask for it.

    check: a recorded [passed, reason], or why our rule is broken ("" if it is not).
    """
    if isinstance(check, list):
        return check[0]
    return None if check is None else not check


def verify_alfworld(data):
    """Compare the kinds step-string, step-admissible and raw-text.

    A step is looked up in the trajectories by its game and the commands before it.
    """
    steps = {}
    for expert in ("walkthrough", "handcoded"):
        for record in load_records(alfworld, data, expert=expert):
            commands = [command for command, _ in record["history"]]
            steps[record["game"], *commands] = record

    def differences(row):
        admissible = steps[row["game"], *row["prefix"]]["admissible"]
        text, expert = row["response"], row["detail"]["expert_action"]
        action, valid = alfworld.projection(text)
        reward = alfworld.genenv_reward(text, expert)
        ours = {"in_admissible": text in admissible,
                "nothing_happens": not alfworld.acts(text, admissible),
                "genenv_reward_vs_expert": reward, "genenv_reward_vs_dict": reward,
                "projection_action": action, "projection_valid": valid,
                "projected_in_admissible": action in admissible}
        # the other recorded values need the simulator
        recorded = {name: value for name, value in row["official_verdict"].items() if name in ours}
        return {row["kind"]: unequal(recorded, ours)}

    return differences


VERIFY = {"alfworld": verify_alfworld, "api_bank": verify_api_bank, "bamboogle": verify_bamboogle,
          "bfcl": verify_bfcl, "travelplanner": verify_travelplanner}

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
