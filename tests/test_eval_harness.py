"""The command line of eval/: responses of every kind, bad input, resuming, recorded verdicts, base
tasks.

A tiny data set of all five benchmarks is written by the tests (one to three records each). What
needs the real data is marked `needs_data`.
"""

import csv
import gzip
import json
import shutil
import time
from pathlib import Path

import pytest

from model.files import read_jsonl
from eval import __main__ as harness
from eval import bfcl, make_base
from tests import verify

SHARED = Path(__file__).resolve().parents[2] / "shared" / "benchmarks"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/benchmarks")


# ---------------------------------------------------------------------------------------------
# a tiny data set of all five benchmarks, and right responses to it


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def tiny_alfworld(folder):
    """Two games of four steps."""
    for part in ("valid_seen", "valid_unseen"):
        plan = ["go to desk 1", "take pen 1 from desk 1", "go to shelf 1", "move pen 1 to shelf 1"]
        steps = [{"admissible": ["look", act], "action": act, "obs": f"Did {act}."} for act in plan]
        row = {"id": f"{part}/put/trial", "split": part, "goal": "put pen in shelf", "won": True,
               "task_type": "pick_and_place_simple", "policy": "walkthrough",
               "init_obs": f"You are in {part}.", "steps": steps}
        (folder / f"{part}.trajectories.jsonl.gz").write_bytes(gzip.compress(lines(row).encode()))


def tiny_api_bank(folder):
    (folder / "toolrl").mkdir()
    for level in (1, 2, 3):
        row = {"system": "You may call tools.", "user": f"add one, level {level}",
               "answer": [{"name": "Add", "parameters": {"a": "1"}}]}
        (folder / "toolrl" / f"level-{level}-api_processed.json").write_text(json.dumps([row]))


CALL = "mean(numbers=[1, 2])"


def tiny_bfcl(folder):
    for sub in ("derived", "multi_turn_func_doc"):
        (folder / sub).mkdir()
    doc = {"name": "mean", "description": "Mean.", "parameters": {
        "type": "dict", "properties": {"numbers": {"type": "array", "items": {"type": "float"}}},
        "required": ["numbers"]}}
    for name, file in bfcl.FUNCTION_DOCS.items():
        row = doc if name == "MathAPI" else {**doc, "name": f"{name}_mean"}
        (folder / "multi_turn_func_doc" / f"{file}.json").write_text(lines(row))
    turns = [{"id": "long_0", "turn": t, "involved_classes": ["MathAPI"],
              "user": [f"mean, please ({t})"], "gt_calls": [CALL], "gt_calls_kw": [CALL],
              "gt_results": ['{"result": 1.5}']} for t in (0, 1)]
    (folder / "derived" / "long_context_turns.jsonl").write_text(lines(*turns))
    entry = {"id": "long_0", "initial_config": {"MathAPI": {}}}
    (folder / "BFCL_v4_multi_turn_long_context.json").write_text(lines(entry))


def tiny_bamboogle(folder):
    rows = [{"Question": "Who followed the president of 1812?", "Answer": "James Monroe"},
            {"Question": "Is it so?", "Answer": "Yes"}]
    (folder / "bamboogle.json").write_text(json.dumps(rows))


TRAVEL = {"org": "Home", "dest": "Reno", "days": 3, "visiting_city_number": 1, "people_number": 3,
          "budget": 1000, "query": "3 days in Reno, please", "level": "easy", "local_constraint":
              {"house rule": None, "cuisine": None, "room type": None, "transportation": None}}


def tiny_travelplanner(folder, **train):
    """Tables in the official layout (test_eval_travelplanner.py uses them too) and a query per
    part."""
    tables = {
        "restaurants/clean_restaurant_2022.csv":
            'Name,City,Cuisines,Average Cost\nInn,Home,Tea,30\nBlue Door,Reno,"Pizza, Indian",10\n'
            'Red Door,Reno,French,20\nInn,Reno,Tea,5\nDiner,Reno,BBQ,8\nGrill,Reno,BBQ,9\n'
            'Mum,Home,"Indian, Tea",1\nGhost,Reno,,7\n',
        "attractions/attractions.csv": "Name,City\nMuseum,Reno\nZoo (old),Reno\n",
        "accommodations/clean_accommodations_2022.csv":
            "NAME,room type,price,minimum nights,house_rules,maximum occupancy,city\n"
            "Loft,Private room,100.0,2.0,No parties & No pets,2,Reno\n"
            "Long Stay,Entire home/apt,50.0,9.0,No smoking,4,Reno\nGap,,1,1,,1,Reno\n",
        "flights/clean_Flights_2022.csv":
            "Flight Number,Price,OriginCityName,DestCityName\nF1,70,Home,Reno\nF2,30,Reno,Home\n",
        "googleDistanceMatrix/distance.csv":
            'origin,destination,cost,duration,distance\nHome,Reno,,2 hours,193 km\n'
            'Reno,Home,,2 hours,200 km\nReno,Far,,1 day 2 hours,"2,000 km"\n'
            'Home,Reno,,9 hours,900 km\n',
        "background/citySet_with_states.txt": "Home\tOhio\nReno\tNevada\nElko\tNevada\nFar\tUtah"}
    for name, text in tables.items():
        path = folder / "database" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    info = {"Attractions in Reno": [{"Name": n, "Phone": "1"} for n in
                                    ("A", "B", "C", "D", "Museum", "Zoo (old)")],
            "Taxi from Home to Reno": "No valid information."}
    for part, query in (("validation", TRAVEL), ("train", TRAVEL | train)):
        with open(folder / f"{part}.csv", "w", newline="") as file:
            csv.writer(file).writerows([query.keys(), map(str, query.values())])
        (folder / f"{part}_ref_info.jsonl").write_text(lines(info))


RIGHT = {
    "alfworld": lambda r: f"\\boxed{{{r['expert']}}}",
    "api_bank": lambda r: json.dumps(r["gold"]),
    "bfcl": lambda r: f"[{CALL}]",
    "bamboogle": lambda r: f"<response>{r['answer']}</response>",
    "travelplanner": lambda r: "?",
}


@pytest.fixture
def data(tmp_path):
    """A folder with the five tiny data sets."""
    for bench in harness.BENCHES:
        (tmp_path / "data" / bench).mkdir(parents=True)
        globals()[f"tiny_{bench}"](tmp_path / "data" / bench)
    return tmp_path / "data"


def command(*argv, capsys, main=harness.main):
    """(exit code, stdout, stderr) of a command."""
    capsys.readouterr()
    code = main([str(a) for a in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def right_file(data, path, bench):
    """Write right responses to all records of a benchmark."""
    rows = [{"id": r["id"], "response": RIGHT[bench](r)} for r in harness.MODULES[bench].load(data)]
    path.write_text(lines(*rows))
    return path


# ---------------------------------------------------------------------------------------------
# scoring responses made elsewhere


def test_right_responses_of_all_five_give_one_table(data, tmp_path, capsys):
    (tmp_path / "responses").mkdir()
    for bench in harness.BENCHES:
        right_file(data, tmp_path / "responses" / f"{bench}.jsonl", bench)
    code, out, err = command("all", "--data", data, "--responses", tmp_path / "responses",
                             "--out", tmp_path / "results", capsys=capsys)
    assert code == 0 and err == ""
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert [rows[b][2] for b in harness.BENCHES] == ["100.0"] * 4 + ["0.0"]  # "?" is not a plan
    assert len(list((tmp_path / "results").glob("*.json"))) == 5


def test_missing_responses_fail_and_are_counted(data, tmp_path, capsys):
    path = right_file(data, tmp_path / "r.jsonl", "alfworld")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
    assert command("alfworld", "--data", data, "--responses", path, "--out", tmp_path,
                   capsys=capsys)[0] == 0
    summary = json.loads(next(tmp_path.glob("alfworld-r-*.json")).read_text())
    assert (summary["n"], summary["score"], summary["cut_or_missing"]) == (8, 75.0, 2)


DEEP = 10_000
BOTH = "[" * DEEP + "]" * DEEP
HOSTILE = [
    "",
    "zu: }{ 💥 \\ud800 <tool_call> [f(",
    "\ud800 [f(a='\udfff')]",
    "a" * 1_000_000,
    BOTH,
    "[{" * DEEP,
    '{"a":' * 10_000,
    f"[f(a={BOTH})]",
    "f(" * DEEP + ")" * DEEP,
    "[" + "f()," * 300_000,
    "<tool_call>\n" * 80_000,
    "\\boxed{" * 140_000,
    "<action>" * 120_000,
    "<answer>" * 120_000,
    "[f(a=9**9**9**9)]",
    "[f(a='x'*10**12)]",
    "[f(a=0x" + "f" * 40_000 + ")]",
    "[f(a=" + "1+" * DEEP + "1)]",
    "null",
    json.dumps([{"days": 1, "current_city": ["a"]}] * 3),
    "[{}," * 50_000,
]
TRAPS = [text.replace("CODE", "__import__('os').system('touch MADE')") for text in (
    "CODE", "[f(a=CODE)]", "[f(a=CODE+1)]", "[{'days': CODE}]", "[open('MADE', 'w')]")]


@pytest.mark.parametrize("bench", harness.BENCHES)
def test_hostile_responses_never_crash_take_long_pass_or_execute(bench, data, tmp_path):
    module, made = harness.MODULES[bench], tmp_path / "made-by-model-text"
    record = module.load(data)[0]
    for text in [*HOSTILE, *(trap.replace("MADE", str(made)) for trap in TRAPS)]:
        began = time.process_time()
        verdict = module.score(record, text)
        assert time.process_time() - began < 2.0 and not verdict.ok, repr(text)[:40]
        json.dumps(vars(verdict))  # it goes into the results file
    assert not made.exists()


@pytest.mark.parametrize("argv, named", [
    ("bamboogle --data {data}", "--responses"),
    ("bamboogle --data {data} --responses {torn}", "torn.jsonl")])
def test_bad_input_is_one_line(argv, named, data, tmp_path, capsys):
    good = right_file(data, tmp_path / "good.jsonl", "bamboogle")
    (tmp_path / "torn.jsonl").write_text(good.read_text()[:-5])
    argv = [a.format(data=data, good=good, torn=tmp_path / "torn.jsonl") for a in argv.split()]
    code, _, err = command(*argv, capsys=capsys)
    assert code == 2 and err.count("\n") == 1 and named in err


# ---------------------------------------------------------------------------------------------
# a scripted model: batches, limits, interruption


class Scripted:
    """Stands for policy.Policy: one token per character, right answers to alfworld's prompts."""
    class lm:
        class config:
            max_position_embeddings = 6_000

    def __init__(self, data, stop_after=None):
        module = harness.MODULES["alfworld"]
        self.stop_after, self.asked = stop_after, []
        self.answers = {"".join(m["content"] for m in module.prompt(r)): RIGHT["alfworld"](r)
                        for r in module.load(data)}

    def encode(self, messages):
        return [ord(c) for c in "".join(m["content"] for m in messages)]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def sample(self, adapter, prompts, G, temperature, max_new_tokens, max_rows):
        from policy import Rollout
        assert temperature == 0.0 and G == 1 and max_rows == len(prompts)
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += [self.decode(p) for p in prompts]
        texts = [self.answers[self.decode(p)][:max_new_tokens] for p in prompts]
        rollouts = []
        for i, (prompt, text) in enumerate(zip(prompts, texts)):
            limit = "too many tokens" if len(text) == max_new_tokens else ""
            rollouts.append(Rollout(i, prompt, [ord(c) for c in text], [0.0] * len(text), limit))
        return rollouts


def evaluated(policy, data, out, monkeypatch, capsys, *options):
    """(exit code, summary or None) of alfworld with a scripted model."""
    monkeypatch.setattr(harness, "load_policy", lambda args: policy)
    code, _, _ = command(
        "alfworld",
        "--data",
        data,
        "--model",
        "m",
        "--batch-size",
        3,
        "--out",
        out,
        *options,
        capsys=capsys,
    )
    return code, next((json.loads(p.read_text()) for p in Path(out).glob("*.json")), None)


def test_long_prompts_and_cut_responses_fail_and_are_counted(data, tmp_path, capsys, monkeypatch):
    policy = Scripted(data)
    most = sorted(map(len, policy.answers))[4]
    code, summary = evaluated(policy, data, tmp_path, monkeypatch, capsys, "--max-prompt", most,
                              "--max-new", 4)
    too_long = sum(len(prompt) > most for prompt in policy.answers)
    assert code == 0 and summary["score"] == 0.0 and summary["prompts_too_long"] == too_long > 0
    assert summary["cut_or_missing"] == 8 - too_long == len(policy.asked)


def test_an_interrupted_run_continues_where_it_stopped(data, tmp_path, capsys, monkeypatch):
    code, summary = evaluated(Scripted(data, stop_after=6), data, tmp_path, monkeypatch, capsys)
    path, = tmp_path.glob("*.jsonl")
    assert code == 130 and summary is None and len(read_jsonl(path)) == 6
    path.write_text(path.read_text() + '{"id": "valid_s')  # a kill in the middle of a write
    second = Scripted(data)
    code, summary = evaluated(second, data, tmp_path, monkeypatch, capsys)
    assert code == 0 and len(second.asked) == 2 and summary["score"] == 100.0
    rows = read_jsonl(path)
    assert [r["id"] for r in rows] == [r["id"] for r in harness.MODULES["alfworld"].load(data)]


def test_whole_games_are_scored_by_who_won_them(data, tmp_path, capsys, monkeypatch):
    def episodes(data, respond, games):
        for game, won in zip(games, (True, False)):
            yield {"id": game["id"], "won": won, "reason": "lost", "commands": ["look"]}
    monkeypatch.setattr(harness.alfworld, "episodes", episodes)
    code, summary = evaluated(
        Scripted(data), data, tmp_path, monkeypatch, capsys, "--variant", "episodes"
    )
    assert code == 0 and (summary["n"], summary["score"]) == (2, 50.0)


@pytest.mark.slow
def test_a_random_chat_model_runs_all_five_to_the_table_and_so_does_its_adapter(
        model, data, tmp_path, capsys):
    import torch
    from policy import Policy
    policy = Policy.load(model, adapters=("agent",))
    with torch.no_grad():
        for weight in policy.params["agent"]:
            weight.normal_(generator=torch.Generator().manual_seed(0))
    policy.save_adapters(tmp_path)
    said = []
    for more in ((), ("--adapter", tmp_path / "agent")):
        out = tmp_path / f"out{len(more)}"
        argv = ("all", "--data", data, "--model", model, "--limit", 2, "--max-new", 8, "--out", out)
        code, _, _ = command(*argv, *more, capsys=capsys)
        assert code == 0
        assert len(list(out.glob("*.json"))) == 5
        rows = [row for path in sorted(out.glob("*.jsonl")) for row in read_jsonl(path)]
        said.append([row["response"] for row in rows])
    assert said[0] != said[1]
    # the same shapes with other weights: the adapter would load without a word
    shutil.copytree(model, tmp_path / "other")
    weights = tmp_path / "other" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    argv = ("bamboogle", "--data", data, "--model", tmp_path / "other", "--out", tmp_path / "none")
    code, _, err = command(*argv, "--adapter", tmp_path / "agent", capsys=capsys)
    assert code == 2 and "trained on" in err


# ---------------------------------------------------------------------------------------------
# recorded verdicts


# {benchmark: how many recorded verdicts must have been decided at all}
DECIDED = {"alfworld": 1554, "api_bank": 2796, "bamboogle": 703, "bfcl": 2816, "travelplanner": 968}


@needs_data
@pytest.mark.parametrize("bench", harness.BENCHES)
def test_recorded_official_verdicts_are_met(bench):
    kinds = verify.agreement(bench, SHARED / "golden" / f"{bench}.jsonl", SHARED)
    assert verify.print_agreement(kinds) == 0
    assert sum(map(len, kinds.values())) == DECIDED[bench]


@pytest.mark.parametrize("kinds, code", [
    ({"a": [True], "damo_exec": [True] * 99 + [False]}, 0), ({"a": [True], "b": [False]}, 1),
    ({"damo_exec": [True] * 98 + [False] * 2}, 1), ({}, 1)])
def test_a_missed_rate_or_nothing_decided_is_exit_code_1(kinds, code):
    assert verify.print_agreement(kinds) == code


# ---------------------------------------------------------------------------------------------
# base tasks


def test_evaluated_requests_are_refused_as_base_tasks(tmp_path, capsys):
    """Here the training query has the words of the evaluated one."""
    tiny_travelplanner(tmp_path, annotated_plan=[{}, [{"days": 1, "current_city": "Reno"}]])
    argv = ("travelplanner", "--data", tmp_path, "--out", tmp_path / "base.jsonl")
    code, _, err = command(*argv, capsys=capsys, main=make_base.main)
    assert code == 2 and "refusing" in err and not (tmp_path / "base.jsonl").exists()


@needs_data
@pytest.mark.parametrize("bench, count", [("travelplanner", 45), ("bfcl", 1800)])
def test_base_tasks_and_evaluation_are_disjoint(bench, count):
    tasks, _ = make_base.base_tasks(bench, SHARED)
    asked = {
        record.get("query", record.get("user")) for record in harness.MODULES[bench].load(SHARED)
    }
    assert len(tasks) >= count and len(asked) > 170
    assert not asked & {
        text for task in tasks for text in (task["task"], task["task"].split("\n\n")[0])
    }
