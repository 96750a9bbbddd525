"""Do our scorers agree with the official ones? Recorded verdicts are scored again and compared.

Usage: python -m tests.verify BENCHMARK VERDICTS.jsonl --data DIR
       (exit code 0 if every required rate is met, 1 if one is missed, 2 for bad input)

The recorded verdicts, like the data of the benchmarks, are not in this repository. For each
benchmark one generator below takes (data folder, recorded rows) and yields (kind, agrees, detail):
agrees is None where our scorer has nothing to decide with, which counts as neither.
"""

import sys

from eval import alfworld, api_bank, bamboogle, bfcl, travelplanner
from eval.__main__ import BENCHES, table
from eval.common import data_dir, one_line, one_line_for, read_rows
from model.files import exit_code
from support.options import Parser

TRAVEL_KINDS = (
    "gold",
    "constructed-pass",
    "perturbed",
    "undelivered",
    "malformed",
    "official-example",
)
# {benchmark: {kind: share of verdicts that must agree}}
REQUIRED = {
    "alfworld": {"step-string": 1.0, "step-admissible": 1.0, "raw-text": 1.0},
    "api_bank": {"toolrl_exact": 1.0, "damo_exec": 0.99},
    "bamboogle": {"metric": 1.0, "searchr1_extract": 1.0},
    "bfcl": {"single_turn": 1.0, "relevance": 1.0, "multi_turn": 0.99},
    "travelplanner": {**dict.fromkeys(TRAVEL_KINDS, 1.0),
                      **{f"{kind}/fixed": 1.0 for kind in TRAVEL_KINDS}}}


# ---------------------------------------------------------------------------------------------
# the command


def main(argv) -> int:
    """Print every disagreement and a table of agreement by kind; returns the exit code."""
    parser = Parser(prog="python -m tests.verify")
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("verdicts", metavar="VERDICTS.jsonl")
    parser.add_argument("--data", required=True, metavar="DIR")
    args = parser.parse_args(argv)
    verify = VERIFY[args.bench]
    rows = read_rows(args.verdicts, ("id", "official_verdict"))
    kinds = {}
    # disagreements are printed as they come: a long run should show them early
    with one_line_for(f"{args.verdicts}: a recorded verdict"):
        for kind, agrees, detail in verify(args.data, rows):
            kinds.setdefault(kind, []).append(agrees)
            if agrees is False:
                print(f"disagrees  {kind}  {one_line(detail, 1000)}")
    return print_agreement(kinds, REQUIRED[args.bench])


def print_agreement(kinds: dict, required: dict) -> int:
    """A table of {kind: verdicts}; 0 if something was decided and every required rate is met, else
    1."""
    rows, missed, any_decided = [], False, False
    for kind, verdicts in sorted(kinds.items()):
        decided = [agrees for agrees in verdicts if agrees is not None]
        undecided = len(verdicts) - len(decided)
        need = required.get(kind)
        asked = "-" if need is None else f"{100 * need:g}"
        if not decided:
            rows.append([kind, 0, 0, "-", asked, undecided, "none decided"])
            continue
        any_decided = True
        rate = sum(decided) / len(decided)
        state = "ok"
        if need is not None and rate < need:
            state, missed = "MISSED", True
        rows.append(
            [kind, len(decided), sum(decided), f"{100 * rate:.2f}", asked, undecided, state]
        )
    print(table(["kind", "verdicts", "agree", "rate %", "required %", "undecidable", ""], rows))
    return int(missed or not any_decided)


def pass_or_fail(kind: str, name: str, row: dict, ours) -> tuple:
    """What is yielded for an official verdict that is pass or fail."""
    official = bool(row["official_verdict"])
    detail = f"{name} ({row.get('kind', '')}): official {official}, ours {ours.ok}: {ours.reason}"
    return kind, ours.ok == official, detail


# ---------------------------------------------------------------------------------------------
# API-Bank, BFCL, Bamboogle


def verify_api_bank(data, rows):
    """Kinds: toolrl_exact and damo_exec, by the scorer that gave the verdict."""
    known = {}
    for rule in ("toolrl", "damo"):
        known[rule] = {(r["category"], r["id"]): r for r in api_bank.load(data, rule=rule)}
    for number, row in enumerate(rows, 1):
        with one_line_for(f"api_bank, recorded verdict {number}"):
            rule = row["scorer"].split("_")[0]
            record = known[rule][row["category"], row["id"]]
            ours = api_bank.score(record, row["response"], rule)
            yield pass_or_fail(row["scorer"], row["id"], row, ours)


def verify_bfcl(data, rows):
    """Kinds: single_turn, relevance, multi_turn (by the rule without simulator)."""
    folder = data_dir(data, bfcl.NAME)
    kinds = {
        bfcl.LONG_CONTEXT: "multi_turn",
        **dict.fromkeys(bfcl.RELEVANCE_CATEGORIES, "relevance"),
        **dict.fromkeys(bfcl.AST_CATEGORIES, "single_turn"),
    }
    known = {}  # {category: {id: record}}, read when it is first met
    for number, row in enumerate(rows, 1):
        with one_line_for(f"bfcl, recorded verdict {number}"):
            category, name = row["category"], row["id"]
            if category not in known:
                records = bfcl.load_category(folder, category)
                known[category] = {record["id"]: record for record in records}
            if category == bfcl.LONG_CONTEXT:
                name = f"{name}:{row['turn']}"
            ours = bfcl.score(known[category][name], row["response"], row.get("format"))
            yield pass_or_fail(kinds[category], name, row, ours)


def verify_bamboogle(data, rows):
    """Kinds: metric and searchr1_extract; dialogues with a search and a judge stay undecided."""
    for number, row in enumerate(rows, 1):
        kind, expected = row["kind"], row["official_verdict"]
        if kind not in REQUIRED["bamboogle"]:
            yield kind, None, f"{row['id']}: not scored here"
            continue
        with one_line_for(f"verdict {number} ({row['id']})"):
            answer = row["response"]
            if kind == "searchr1_extract":
                answer = bamboogle.extract_searchr1(answer)
            ours = {"extracted": answer, **bamboogle.metrics(answer, row["gold"])}
            agrees = all(same(expected[key], ours[key]) for key in expected)
        yield kind, agrees, f"{row['id']}: expected {expected}, got {ours}"


def same(a, b) -> bool:
    """Equality, of numbers up to rounding."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) < 1e-9
    return a == b


# ---------------------------------------------------------------------------------------------
# TravelPlanner


def verify_travelplanner(data, rows):
    """Kinds: that of the row, and with "/fixed" for the repaired within-city rule.

    Recorded rates of whole submissions ("aggregate") stay undecided: most of their plans are not
    among the rows.
    """
    parts = {part: travelplanner.load(data, split) for split, part in travelplanner.PARTS.items()}
    for number, row in enumerate(rows, 1):
        with one_line_for(f"verdict {number} ({row.get('id')})"):
            for fixed in (False, True):
                kind = f"{row['kind']}/fixed" if fixed else row["kind"]
                if row["kind"] in TRAVEL_KINDS:
                    wrong = plan_differences(row, parts[row["split"]][row["row"]], fixed)
                    yield kind, not wrong, f"{row['id']}: {'; '.join(wrong)}"
                else:
                    yield kind, None, row["id"]


def plan_differences(row: dict, query: dict, fixed: bool) -> list:
    """Where our verdict on a plan differs from the recorded one."""
    expected = row["official_verdict"]
    if fixed and row["official_verdict_fixed"] != "same":
        expected = row["official_verdict_fixed"]
    ours = travelplanner.judge(query, row["response"], travelplanner.database(query["data"]), fixed)
    recorded, got = comparable(expected), comparable(ours)
    return [f"{key} is {got[key]}, recorded {recorded[key]}" for key in recorded
            if got[key] != recorded[key]]


def comparable(verdict: dict) -> dict:
    """Everything but the wording of the reasons.

    Of a crash the stage and the type of the exception; costs to a hundredth of a cent.
    """
    names = ("delivered", "hard_evaluated", "commonsense_pass", "hard_pass", "final_pass")
    brief = {name: verdict[name] for name in names}
    cost, crash = verdict["total_cost"], verdict["crash"]
    brief["total_cost"] = None if cost is None else round(cost, 4)
    brief["crash"] = None if crash is None else crash.split(": ")[:2]
    for stage in ("commonsense", "hard"):
        checks = verdict[stage]
        brief[stage] = checks and {name: passed for name, (passed, _) in sorted(checks.items())}
    return brief


# ---------------------------------------------------------------------------------------------
# ALFWorld: a step is looked up in the recorded trajectories, by its game and the commands before it

# a recorded "state_changed" is a change of the admissible commands, which these leave alone
SILENT = (*alfworld.LOOKING, "clean", "heat", "cool", "use")


class Game:
    """The part of one game that its trajectories show.

    states: {canonical commands: step}; wins: canonical commands after which the game is won.
    """

    def __init__(self):
        self.states, self.wins = {}, set()

    def add(self, row):
        """Enter every state of a trajectory."""
        commands = ()
        for step in row["steps"]:
            self.states.setdefault(commands, step)
            commands = canonical(commands, step["action"])
        if row["won"]:
            self.wins.add(commands)


def verify_alfworld(data, rows):
    """Kinds: step-string, step-admissible, raw-text; whole episodes are not replayed: undecided."""
    games = {}
    for part in ("valid_seen", "valid_unseen"):
        for row in alfworld.trajectories(data, part):
            games.setdefault(row["id"], Game()).add(row)
    for number, row in enumerate(rows, 1):
        with one_line_for(f"verdict {number} ({row['id']})"):
            kind, official, ours = row["kind"], row["official_verdict"], None
            if kind in REQUIRED["alfworld"]:
                ours = step_verdict(games[row["game"]], row)
        if ours is None:
            yield kind, None, f"{row['id']}: not decidable from the trajectories"
            continue
        wrong = [f"{key} is {official[key]!r}, ours {value!r}" for key, value in ours.items()
                 if key in official and official[key] != value]
        yield kind, not wrong, f"{row['id']}: {'; '.join(wrong)}"


def canonical(commands: tuple, command: str) -> tuple:
    """The command appended, less what leaves no trace: looking, and a walk followed by a walk."""
    if command.split(" ")[0] in alfworld.LOOKING:
        return commands
    if command.startswith("go to ") and commands and commands[-1].startswith("go to "):
        commands = commands[:-1]
    return commands + (command,)


def step_verdict(game: Game, row: dict):
    """What the rules say of a command or a raw text at a recorded state; None: unknown state."""
    commands = ()
    for command in row.get("prefix") or []:
        commands = canonical(commands, command)
    step, response = game.states.get(commands), row["response"]
    if step is None:
        return None
    if row["kind"] == "raw-text":
        return raw_text_verdict(game, commands, step, row)
    effective = alfworld.acts(response, step["admissible"])
    silent = response.strip().split(" ")[0] in SILENT
    return {"in_admissible": response in step["admissible"], "nothing_happens": not effective,
            "state_changed": effective and not silent, **outcome(game, commands, step, response)}


def raw_text_verdict(game: Game, commands: tuple, step: dict, row: dict) -> dict:
    """The rewards of a raw text, and what follows of the command that is read from it."""
    expert = (row.get("detail") or {}).get("expert_action", step["action"])
    action, valid = alfworld.projection(row["response"])
    reward = alfworld.genenv_reward(row["response"], expert)
    ours = {"genenv_reward_vs_expert": reward, "genenv_reward_vs_dict": reward,
            "projection_action": action, "projection_valid": valid,
            "projected_in_admissible": action in step["admissible"]}
    after = outcome(game, commands, step, action)
    for key in ("feedback", "won"):
        if key in after:
            ours[f"projected_{key}"] = after[key]
    return ours


def outcome(game: Game, commands: tuple, step: dict, response: str) -> dict:
    """Feedback, reward, done, won where the trajectories tell; fewer keys where they do not."""
    if not alfworld.acts(response, step["admissible"]):
        return {"feedback": "Nothing happens.", "reward": 0.0, "done": False, "won": False}
    command, result = response.strip(), {}
    after = canonical(commands, command)
    won = after in game.wins
    if won or after in game.states or after == commands:
        result = {"reward": float(won), "done": won, "won": won}
    if command == step["action"]:
        result["feedback"] = step["obs"]
    return result


VERIFY = {"alfworld": verify_alfworld, "api_bank": verify_api_bank, "bamboogle": verify_bamboogle,
          "bfcl": verify_bfcl, "travelplanner": verify_travelplanner}

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:]), "verify"))
