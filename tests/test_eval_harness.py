"""The command line of eval/: responses, bad input, resuming, recorded verdicts, base tasks.

The tests write a tiny data set of all five benchmarks. Tests that need the real data are marked
`needs_data`.
"""

import csv
import json
import shutil
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import one_line, randomise, user_error
from data_pool import read_jsonl
from eval import __main__ as harness
from eval import alfworld, bfcl, make_base
from eval.common import load_records
from policy import Policy, Rollout
from tests import verify

SHARED = Path(__file__).resolve().parents[2] / "shared" / "benchmarks"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/benchmarks")


# ---------------------------------------------------------------------------------------------
# a tiny data set of all five benchmarks, and right responses to it


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, text):
    """Write a file, and create the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def tiny_alfworld(folder):
    """Write two games of four steps each; the prompts of the first game are longer."""
    plan = ["go to desk 1", "take pen 1 from desk 1", "go to shelf 1", "move pen 1 to shelf 1"]
    steps = [{"admissible": ["look", act], "action": act, "obs": f"Did {act}."} for act in plan]
    for part, place in (("valid_seen", "You are in a long hall."), ("valid_unseen", "A room.")):
        row = {"id": f"{part}/put/trial", "split": part, "goal": "put pen in shelf", "won": True,
               "task_type": "pick", "policy": "walkthrough", "init_obs": place,
               "steps": steps}
        write(folder / f"{part}.trajectories.jsonl", lines(row))


def tiny_api_bank(folder):
    for level in (1, 2, 3):
        row = {"system": "You may call tools.", "user": f"add one, level {level}",
               "answer": [{"name": "Add", "parameters": {"a": "1"}}]}
        write(folder / "toolrl" / f"level-{level}-api_processed.json", json.dumps([row]))


# the functions of a file system with their arguments, and the right calls of two turns
FUNCTIONS = {"cd": ["folder"], "touch": ["file_name"], "cat": ["file_name"], "rm": ["file_name"],
             "pwd": []}
TURNS = (["touch(file_name='old')"],
         ["cd(folder='docs')", "cat(file_name='a.txt')", "touch(file_name='b')"])


def tiny_bfcl(folder):
    """Write a conversation of two turns, which test_eval_bfcl.py also uses."""
    docs = [{"name": name, "parameters": {
        "properties": dict.fromkeys(arguments, {"type": "string"}) | {
            "lines": {"type": "integer", "default": 10}}, "required": arguments}}
            for name, arguments in FUNCTIONS.items()]
    for file in bfcl.FUNCTION_DOCS.values():
        write(folder / "multi_turn_func_doc" / f"{file}.json", lines(*docs))
    turns = [{"id": "long", "turn": turn, "involved_classes": ["GorillaFileSystem"],
              "user": ["?"], "gt_calls": calls, "gt_calls_kw": calls, "gt_results": calls}
             for turn, calls in enumerate(TURNS)]
    write(folder / "derived" / "long_context_turns.jsonl", lines(*turns))
    entry = {"id": "long", "initial_config": {}}
    write(folder / "BFCL_v4_multi_turn_long_context.json", lines(entry))


def tiny_bamboogle(folder):
    rows = [{"Question": "Who followed the president of 1812?", "Answer": "James Monroe"},
            {"Question": "Is it so?", "Answer": "Yes"}]
    write(folder / "bamboogle.json", json.dumps(rows))


TRAVEL = {"org": "Home", "dest": "Reno", "days": 3, "visiting_city_number": 1, "people_number": 3,
          "budget": 1000, "query": "3 days in Reno, please", "level": "easy", "local_constraint":
              {"house rule": None, "cuisine": None, "room type": None, "transportation": None}}
TABLES = {
    "restaurants/clean_restaurant_2022.csv":
        'Name,City,Cuisines,Average Cost\nInn,Home,Tea,30\nBlue Door,Reno,"Pizza, Indian",10\n'
        'Red Door,Reno,French,20\nInn,Reno,Tea,5\nDiner,Reno,BBQ,8\nGrill,Reno,BBQ,9\n'
        'Mum,Home,"Indian, Tea",1\nGhost,Reno,,7\n',
    "attractions/attractions.csv": "Name,City\nMuseum,Reno\nZoo (old),Reno\n",
    "accommodations/clean_accommodations_2022.csv":
        "NAME,room type,price,minimum nights,house_rules,maximum occupancy,city\n"
        "Loft,Shared room,100.0,2.0,No parties & No pets,2,Reno\n"
        "Long Stay,Entire home/apt,50.0,9.0,No smoking,4,Reno\nGap,,1,1,,1,Reno\n",
    "flights/clean_Flights_2022.csv":
        "Flight Number,Price,OriginCityName,DestCityName\nF1,70,Home,Reno\nF2,30,Reno,Home\n",
    "googleDistanceMatrix/distance.csv":
        'origin,destination,cost,duration,distance\nHome,Reno,,2 hours,193 km\n'
        'Reno,Home,,2 hours,200 km\nReno,Far,,1 day 2 hours,"2,000 km"\n'
        'Home,Reno,,9 hours,900 km\n',
    "background/citySet_with_states.txt": "Home\tOhio\nReno\tNevada\nElko\tNevada\nFar\tUtah"}


def tiny_travelplanner(folder, **train):
    """Write tables in the official layout, and a query for each part of the data.

    train: fields to change in the training query. test_eval_travelplanner.py uses all this too.
    """
    for name, text in TABLES.items():
        write(folder / "database" / name, text)
    names = ("A", "B", "C", "D", "Museum", "Zoo (old)")
    info = {"Attractions in Reno": [{"Name": name, "Phone": "1"} for name in names],
            "Taxi from Home to Reno": "No valid information."}
    for part, query in (("validation", TRAVEL), ("train", TRAVEL | train)):
        with open(folder / f"{part}.csv", "w", newline="") as file:
            csv.writer(file).writerows([query.keys(), map(str, query.values())])
        write(folder / f"{part}_ref_info.jsonl", lines(info))


RIGHT = {
    "alfworld": lambda r: f"\\boxed{{{r['expert']}}}",
    "api_bank": lambda r: json.dumps(r["gold"]),
    "bfcl": lambda r: f"[{', '.join(r['gt_calls_kw'])}]",
    "bamboogle": lambda r: f"<response>{r['answer']}</response>",
    "travelplanner": lambda r: "this is not a plan",
}


@pytest.fixture
def data(tmp_path):
    """Write the five tiny data sets, and return their folder."""
    for bench in harness.BENCHES:
        globals()[f"tiny_{bench}"](tmp_path / "data" / bench)
    return tmp_path / "data"


def records(data, bench):
    """Return the records of a benchmark in a data folder."""
    return load_records(harness.MODULES[bench], data)


def right_file(data, bench):
    """Write right responses to all records of a benchmark to a file, and return its path."""
    rows = [{"id": r["id"], "response": RIGHT[bench](r)} for r in records(data, bench)]
    path = data / "responses" / f"{bench}.jsonl"
    write(path, lines(*rows))
    return path


def command(*argv) -> int:
    """Run a command, and return its exit code."""
    return harness.main([str(a) for a in argv])


def summaries(folder) -> dict:
    """Return {benchmark: summary} of the results in a folder."""
    results = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {summary["benchmark"]: summary for summary in results}


# ---------------------------------------------------------------------------------------------
# scoring responses from a file


def test_right_responses_earn_their_scores_and_missing_ones_nothing(data, tmp_path):
    """Otherwise a score would differ from the benchmark's, or missing responses would raise it."""
    for bench in harness.BENCHES:
        path = right_file(data, bench)
    steps = path.parent / "alfworld.jsonl"
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:6]))
    argv = ("all", "--data", data, "--responses", path.parent, "--out", tmp_path)
    assert command(*argv) == 0
    results = summaries(tmp_path)
    scores = {bench: summary["score"] for bench, summary in results.items()}
    right = dict.fromkeys(harness.BENCHES, 100.0)
    assert scores == {**right, "alfworld": 75.0, "travelplanner": 0.0}
    assert results["alfworld"]["cut_or_missing"] == 2


BOTH = "[" * 10_000 + "]" * 10_000
HOSTILE = [
    "",
    "\ud800 [f(a='\udfff')]",
    # deep, long, or both
    BOTH,
    f'<tool_call>\n[{{"a": {BOTH}}}]\n</tool_call>',
    "[" + "f()," * 300_000,
    "<tool_call>\n" * 80_000,
    "\\boxed{" * 140_000,
    "<action>" * 120_000,
    # would take all memory or time if computed
    "[f(a=9**9**9**9)]",
    "[f(a='x'*10**12)]",
    "[cat(file_name='b', lines=0x" + "f" * 40_000 + ")]",
    "[f(a=" + "1+" * 10_000 + "1)]",
    # JSON of the wrong form
    "null",
    json.dumps([{"days": 1, "current_city": ["a"]}] * 3),
]
TRAPS = [text.replace("CODE", "__import__('os').system('touch MADE')") for text in (
    "[f(a=CODE)]", "[f(a=CODE+1)]", "[{'days': CODE}]", "[open('MADE', 'w')]")]


@pytest.mark.parametrize("bench", harness.BENCHES)
def test_hostile_responses_never_crash_take_long_pass_or_execute(bench, data, tmp_path):
    """Otherwise one response would end an evaluation, hold it up, earn a score or run as code."""
    module, made = harness.MODULES[bench], tmp_path / "made-by-model-text"
    record = records(data, bench)[0]
    for text in [*HOSTILE, *(trap.replace("MADE", str(made)) for trap in TRAPS)]:
        began = time.process_time()
        verdict = module.score(record, text)
        assert time.process_time() - began < 2.0 and not verdict.ok, repr(text)[:40]
        json.dumps(vars(verdict))  # it goes into the results file
    assert not made.exists()


def test_bad_input_is_one_line(data, capsys):
    """Otherwise a missing or incomplete file would end in a traceback."""
    torn = right_file(data, "bamboogle")
    torn.write_text(torn.read_text()[:-5])
    write(data / "bad" / "bamboogle" / "bamboogle.json", '[{"Question": "Who?"}]')
    for folder, options, word in ((data, (), "--responses"),
                                   (data, ("--responses", torn), torn.name),
                                   (data / "bad", ("--responses", torn), "Answer")):
        one_line(capsys, command("bamboogle", "--data", folder, *options), word)


# ---------------------------------------------------------------------------------------------
# a scripted model: batches, limits, interruption


class Scripted:
    """Stand in for policy.Policy: one token per character, right answers to ALFWorld's prompts."""
    lm = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=6_000))
    encode = staticmethod(lambda messages: messages[-1]["content"])
    decode = staticmethod(str)

    def __init__(self, stop_after):
        self.stop_after, self.asked = stop_after, []

    def sample(self, adapter, prompts, temperature, max_new_tokens, **limits):
        assert temperature == 0.0
        if len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += prompts
        limit = "too many tokens" if max_new_tokens < 9 else ""
        rollouts = []
        for i, prompt in enumerate(prompts):
            # the expert's command is the last of the admissible ones
            text = f"\\boxed{{{prompt.splitlines()[-3]}}}"
            rollouts.append(Rollout(i, prompt, text[:max_new_tokens], [], limit))
        return rollouts


@pytest.fixture
def evaluated(data, tmp_path, monkeypatch):
    """Return a function that evaluates a scripted model and returns (exit code, summary or None,
    model)."""
    def evaluate(*options, stop_after=9):
        policy = Scripted(stop_after)
        monkeypatch.setattr(harness, "load_policy", lambda args: policy)
        code = command("alfworld", "--data", data, "--model", "m", "--batch-size", 3, "--out",
                       tmp_path, *options)
        return code, summaries(tmp_path).get("alfworld"), policy
    return evaluate


def test_long_prompts_and_cut_responses_fail_and_are_counted(evaluated):
    """Otherwise a limit would lower a score silently."""
    code, summary, policy = evaluated("--max-prompt", 300, "--max-new", 4)
    assert code == 0 and summary["score"] == 0.0
    assert summary["cut_or_missing"] == len(policy.asked) == 8 - summary["prompts_too_long"] < 8
    assert max(map(len, policy.asked)) <= 300


def test_an_interrupted_run_continues_where_it_stopped(evaluated, data, tmp_path):
    """Otherwise an interruption would lose all responses so far, or leave one out."""
    code, summary, _ = evaluated(stop_after=6)
    path, = tmp_path.glob("*.jsonl")
    assert code == 130 and summary is None and len(read_jsonl(path)) == 6
    path.write_text(path.read_text() + '{"id": "valid_s')  # as if killed in the middle of a write
    code, summary, second = evaluated()
    assert code == 0 and len(second.asked) == 2 and summary["score"] == 100.0
    ids = [record["id"] for record in records(data, "alfworld")]
    assert [row["id"] for row in read_jsonl(path)] == ids


def test_a_template_that_names_the_day_has_results_of_each_day(model, data, tmp_path, monkeypatch):
    """Otherwise a resumed evaluation would mix in responses to another day's prompts."""
    dated = shutil.copytree(model, tmp_path / "model")
    template = dated / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %B') }}" + template.read_text())
    for day, count in (1, 1), (1, 1), (2, 2):
        today = SimpleNamespace(today=lambda day=day: date(2026, 3, day))
        monkeypatch.setattr(harness, "date", today)
        assert command("bamboogle", "--data", data, "--model", dated, "--limit", 1,
                       "--max-new", 2, "--out", tmp_path) == 0
        assert len(list(tmp_path.glob("*.jsonl"))) == count


def test_whole_games_are_scored_by_who_won_them(evaluated, monkeypatch):
    """Otherwise a game whose prompt is too long would count as won, or in another split."""
    def episodes(data, respond, games):
        for game, text in zip(games, respond(list(map(alfworld.prompt, games)))):
            yield {"id": game["id"], "problem": "" if text else "lost", "commands": []}
    monkeypatch.setattr(alfworld, "episodes", episodes)
    code, summary, _ = evaluated("--variant", "episodes", "--max-prompt", 220)
    won = {name: category["score"] for name, category in summary["categories"].items()}
    assert code == 0 and won == {"valid_seen/pick": 0.0, "valid_unseen/pick": 100.0}


@pytest.mark.slow
def test_a_random_chat_model_runs_all_five_and_so_does_its_adapter(model, data, tmp_path):
    """Otherwise a benchmark could not be run on a real model, or would be run without the
    adapter."""
    policy = Policy.load(model, adapters=("agent",))
    randomise(policy, scale=1.0)
    policy.save_adapters(tmp_path)
    responses = []
    for more in ((), ("--adapter", tmp_path / "agent")):
        out = tmp_path / f"out{len(more)}"
        argv = ("all", "--data", data, "--model", model, "--limit", 2, "--max-new", 8, "--out", out)
        assert command(*argv, *more) == 0
        assert len(summaries(out)) == 5
        [path] = out.glob("bfcl-*.jsonl")
        responses.append([row["response"] for row in read_jsonl(path)])
    assert responses[0] != responses[1]


# ---------------------------------------------------------------------------------------------
# recorded verdicts


# {benchmark: how many recorded verdicts must be decided}
DECIDED = {
    "alfworld": 1554, "api_bank": 2796, "bamboogle": 703, "bfcl": 2816, "travelplanner": 968}


@needs_data
@pytest.mark.parametrize("bench", harness.BENCHES)
def test_recorded_official_verdicts_are_met(bench):
    """Otherwise our scores would differ from the official ones."""
    kinds = verify.agreement(bench, SHARED / "golden" / f"{bench}.jsonl", SHARED)
    assert verify.print_agreement(kinds) == 0
    assert sum(map(len, kinds.values())) == DECIDED[bench]


def test_a_missed_rate_or_nothing_decided_is_exit_code_1():
    """Otherwise a comparison that fails, or decides no verdict, would pass as agreement."""
    assert verify.print_agreement({"a": [True], "damo_exec": [True] * 99 + [False]}) == 0
    for kinds in ({"a": [True], "b": [False]}, {}):
        assert verify.print_agreement(kinds) == 1


# ---------------------------------------------------------------------------------------------
# base tasks


def test_evaluated_requests_are_refused_as_base_tasks(tmp_path):
    """Otherwise a model would train on the words of a request that it is evaluated on."""
    plan = [{"days": 1, "current_city": "Reno"}]
    tiny_travelplanner(tmp_path / "travelplanner", annotated_plan=[{}, plan])
    out = tmp_path / "base.jsonl"
    user_error("refusing", make_base.run,
               ["travelplanner", "--data", str(tmp_path), "--out", str(out)])
    assert not out.exists()


@needs_data
@pytest.mark.parametrize("bench, count", [("travelplanner", 45), ("bfcl", 1800)])
def test_base_tasks_and_evaluation_are_disjoint(bench, count):
    """Otherwise make_base would refuse a whole benchmark, or make too few base tasks from it."""
    tasks, _ = make_base.base_tasks(bench, SHARED)
    assert len(tasks) >= count
