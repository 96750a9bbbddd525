"""The command line of eval/: responses of every kind, bad input, resuming, base tasks.

Run: python -m pytest tests/test_eval_harness.py -q

A tiny data set of all five benchmarks is written by the tests (one to three records each), so that
nothing here needs the real data, except for the tests marked `needs_data`.
"""
import gzip
import itertools
import json
import shutil
import time
from pathlib import Path

import pytest

from helpers import user_error
from eval import __main__ as harness
from eval import common, make_base
from eval.common import Verdict

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "benchmarks"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/benchmarks")


# ---------------------------------------------------------------------------------------------
# a tiny data set of all five benchmarks


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def tiny_alfworld(folder):
    """Three games of one expert each, and training walkthroughs, one of them an evaluation one."""
    def trajectory(part, number, thing):
        plan = ["go to desk 1", f"take {thing} 1 from desk 1", "go to shelf 1",
                f"move {thing} 1 to shelf 1"]
        go = ["go to desk 1", "go to shelf 1", "help", "inventory", "look"]
        steps = [{"admissible": sorted(go + [action]), "action": action, "obs": f"Did {action}.",
                  "in_admissible": True, "reward": 0.0, "done": False} for action in plan]
        return {"id": f"{part}/put-{number}/trial", "split": part, "goal": f"put {thing} in shelf",
                "task_type": "pick_and_place_simple", "policy": "walkthrough", "won": True,
                "init_obs": f"You are in a room.\n\nYour task is to: put {thing} in shelf.",
                "steps": steps, "n_steps": 4, "human_task_descs": []}
    files = {"valid_seen": [trajectory("valid_seen", 0, "pen"), trajectory("valid_seen", 1, "cup")],
             "valid_unseen": [trajectory("valid_unseen", 2, "mug")]}
    for part, rows in files.items():
        (folder / f"{part}.trajectories.jsonl.gz").write_bytes(gzip.compress(lines(*rows).encode()))
    plans = [[s["action"] for s in files["valid_seen"][0]["steps"]],
             [s["action"].replace("pen", "book") for s in files["valid_seen"][0]["steps"]]]
    rows = [{"id": f"train/{i}/trial", "task_type": "pick_and_place_simple", "solvable": True,
             "goal": "put it in shelf", "walkthrough": plan} for i, plan in enumerate(plans)]
    (folder / "train.goals_walkthroughs.jsonl.gz").write_bytes(gzip.compress(lines(*rows).encode()))


def tiny_api_bank(folder):
    (folder / "toolrl").mkdir()
    for level in (1, 2, 3):
        answer = {"name": "Add", "parameters": {"a": "1"}}
        row = {"system": "You may call tools.", "user": f"add one, level {level}",
               "answer": answer if level == 2 else [answer], "other": {"file": f"d{level}"}}
        (folder / "toolrl" / f"level-{level}-api_processed.json").write_text(json.dumps([row]))


def tiny_bfcl(folder):
    for sub in ("derived", "multi_turn_func_doc", "possible_answer"):
        (folder / sub).mkdir()
    from eval.bfcl import FUNCTION_DOCS
    doc = {"name": "mean", "description": "Mean.", "parameters": {
        "type": "dict", "properties": {"numbers": {"type": "array", "items": {"type": "float"}}},
        "required": ["numbers"]}}
    for name, file in FUNCTION_DOCS.items():
        row = doc if name == "MathAPI" else {**doc, "name": f"{name}_mean"}
        (folder / "multi_turn_func_doc" / f"{file}.json").write_text(lines(row))
    call = "mean(numbers=[1, 2])"
    turns = [{"id": "multi_turn_long_context_0", "turn": t, "involved_classes": ["MathAPI"],
              "user": [f"mean, please ({t})"], "gt_calls": [call], "gt_calls_kw": [call],
              "gt_results": ['{"result": 1.5}'], "gt_changes_state": False} for t in (0, 1)]
    (folder / "derived" / "long_context_turns.jsonl").write_text(lines(*turns))
    entry = {"id": "multi_turn_long_context_0", "question": [], "initial_config": {"MathAPI": {}},
             "path": [], "involved_classes": ["MathAPI"]}
    (folder / "BFCL_v4_multi_turn_long_context.json").write_text(lines(entry))


def tiny_bamboogle(folder):
    rows = [{"Question": "Who followed the president of 1812?", "Answer": "James Monroe"},
            {"Question": "Is it so?", "Answer": "Yes"}]
    (folder / "bamboogle.json").write_text(json.dumps(rows))


TRAVEL = {"org": "Home", "dest": "Reno", "days": 3, "visiting_city_number": 1, "people_number": 3,
          "budget": 1000, "query": "3 days in Reno, please", "level": "easy", "local_constraint":
              {"house rule": None, "cuisine": None, "room type": None, "transportation": None}}


def tiny_travelplanner(folder):
    """The tables that test_eval_travelplanner.py has as DB, in the official layout, and a query."""
    tables = {
        "restaurants/clean_restaurant_2022.csv":
            'Name,City,Cuisines,Average Cost\nBlue Door,Reno,"Pizza, Indian",10\n'
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
    for part in ("validation", "train"):
        (folder / f"{part}_queries.jsonl").write_text(lines(TRAVEL))
        (folder / f"{part}_ref_info.jsonl").write_text(lines(info))


def writable_copy(bench, tmp_path):
    """The folder of a copy of the real data of a benchmark."""
    shutil.copytree(SHARED / bench, tmp_path / bench)
    for path in [tmp_path / bench, *(tmp_path / bench).rglob("*")]:
        path.chmod(0o755)
    return tmp_path / bench


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


def gold_file(data, path, bench, change=lambda rows: rows):
    """Write the gold responses of a benchmark (or empty ones where there is no gold)."""
    module = harness.MODULES[bench]
    rows = [{"id": r["id"], "response": module.gold(r) or ""} for r in module.load(data)]
    path.write_text(lines(*change(rows)))
    return path


# ---------------------------------------------------------------------------------------------
# scoring responses made elsewhere


def test_gold_responses_of_all_five_give_one_table(data, tmp_path, capsys):
    folder = tmp_path / "responses"
    folder.mkdir()
    for bench in harness.BENCHES:
        gold_file(data, folder / f"{bench}.jsonl", bench)
    code, out, err = command("all", "--data", data, "--responses", folder,
                             "--out", tmp_path / "results", capsys=capsys)
    assert code == 0 and err == ""
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert [rows[b][2] for b in harness.BENCHES] == ["100.0"] * 4 + ["0.0"]  # no gold for the last
    assert rows["bfcl"][-2:] == ["7.0", "41.8"]  # the paper's figures beside ours
    assert len(list((tmp_path / "results").glob("*.json"))) == 5


def test_summary_and_rows_hold_what_they_should(data, tmp_path, capsys):
    path = gold_file(data, tmp_path / "r.jsonl", "alfworld",
                     lambda rows: rows[:6] + [{"id": rows[6]["id"], "response": "look"}])
    code, _, err = command("alfworld", "--data", data, "--responses", path,
                           "--out", tmp_path / "out", capsys=capsys)
    assert code == 0 and "no response for 5" in err and err.count("\n") == 1
    summary = json.loads(next((tmp_path / "out").glob("alfworld-r-*.json")).read_text())
    assert summary["n"] == 12 and summary["score"] == 50.0 and summary["passed"] == 6
    assert summary["interval_95"]["method"] == "Wilson" and summary["responses_missing"] == 5
    assert summary["metrics"]["extra"]["admissible"] == pytest.approx(100 * 7 / 12)
    assert len(summary["settings"]["data_sha256"]) == 64 and summary["versions"]["python"]
    rows = common.read_rows(next((tmp_path / "out").glob("*.jsonl")))
    assert [r["verdict"]["ok"] for r in rows] == [True] * 6 + [False] * 6
    assert rows[6]["response"] == "look" and rows[6]["verdict"]["reason"]
    assert rows[11]["verdict"]["reason"] == "no response"
    assert rows[0]["prompt"][-1]["role"] == "user"


DEEP = 10_000
BOTH = "[" * DEEP + "]" * DEEP
HOSTILE = [
    "", " ", "zu: }{ 💥 \\ud800 <tool_call> [f(", "\0" * 100 + "[f(a='\0')]",
    "\ud800 [f(a='\udfff')]",
    "a" * 1_000_000, " " * 1_000_000, "\n" * 1_000_000, "9" * 1_000_000, "w=" * 500_000,
    BOTH, "(" * DEEP + ")" * DEEP, "{" * DEEP + "}" * DEEP, "[" * DEEP, "[{" * DEEP, '{"a":' * DEEP,
    f"[f(a={BOTH})]", "f(" * DEEP + ")" * DEEP, "[" + "f()," * 300_000, "[a(" * 300_000,
    f"<tool_call>\n{BOTH}\n</tool_call>", "<tool_call>\n" * 80_000,
    "<tool_call>\n42\n</tool_call>", "<tool_call>\n{}\n</tool_call>\n" * 30_000,
    "\\boxed{" * 140_000, "$" * 1_000_000,
    "\\boxed{" + "{" * DEEP + "}" * DEEP, "\\boxed{" + " \t" * 500_000 + "}",
    "`" * 500_000 + "'\"" * 250_000, "<action>" * 120_000, "<answer>" * 120_000,
    "<response>" * 100_000, "<think>" * 140_000, "</think>" * 100_000,
    "[Add(" + "w" * 900_000 + ")]",
    "[f(a=9**9**9**9)]", "[f(a='x'*10**12)]", "[f(a='%9999999999d'%1)]", "[f(a=1 << 10**9)]",
    "[f(a=[[['a'] * 9999] * 9999] * 9999)]", "[f(a=" + "9" * 5000 + ")]",
    "[f(a=" + "-" * DEEP + "1)]", "[f(a=" + "1+" * DEEP + "1)]", "[f" + "()" * 20_000 + "]",
    "null", json.dumps([{"days": 1, "current_city": ["a"]}] * 3), "[{}," * 50_000,
    "Day 1:\n" * 100_000, "Day 1:\nCurrent City: from " * 3000, "from " * 100_000 + "to " * 100_000]
TRAPS = [text.replace("CODE", "__import__('os').system('touch MADE')") for text in (
    "CODE", "[CODE]", "[f(a=CODE)]", "[f(a=CODE+1)]", "<tool_call>\nCODE\n</tool_call>",
    '{"name": CODE}', "[{'days': CODE}]", "[open('MADE', 'w')]", "eval(\"open('MADE', 'w')\")")]


def never_passes(score, tmp_path, texts=HOSTILE):
    """Score hostile texts by score(text): none crashes, takes long, passes or is executed."""
    made = tmp_path / "made-by-model-text"
    for text in [*texts, *(trap.replace("MADE", str(made)) for trap in TRAPS)]:
        began = time.process_time()
        verdict = score(text)
        assert time.process_time() - began < 1.0, repr(text)[:40]
        assert isinstance(verdict, Verdict) and not verdict.ok and 0 <= verdict.score < 1
        assert verdict.reason and "\n" not in verdict.reason, repr(text)[:40]
        verdict.reason.encode()
        json.dumps(verdict.extra)  # it goes into the results file
    assert not made.exists()


@pytest.mark.slow
@pytest.mark.parametrize("bench", harness.BENCHES)
def test_hostile_responses_never_crash_take_long_or_execute(bench, data, tmp_path, capsys):
    module = harness.MODULES[bench]
    record = module.load(data)[0]
    module.score(record, "warm up")  # tables of TravelPlanner are read once
    for _, options in [({}, {}), *module.VARIANTS.values()]:
        if "scorer" not in options:
            never_passes(lambda text: module.score(record, text, **options), tmp_path)
    # a lone surrogate must also be written and read
    path = tmp_path / "r.jsonl"
    path.write_text(lines({"id": record["id"], "response": "\ud800 \0"}))
    code, out, err = command(bench, "--data", data, "--responses", path, "--limit", 1,
                             "--out", tmp_path / "out", capsys=capsys)
    assert code == 0 and bench in out and len(err.splitlines()) <= 1


# ---------------------------------------------------------------------------------------------
# bad input: one line, exit code 2, nothing written


OPTIONS = {
    "nothing": [], "bench": ["moon", "--data", "{data}"], "no data": ["bamboogle"],
    "neither": ["bamboogle", "--data", "{data}"],
    "limit": ["bamboogle", "--data", "{data}", "--responses", "{good}", "--limit", "0"],
    "no such data": ["bamboogle", "--data", "none", "--responses", "{good}"],
    "no responses": ["bamboogle", "--data", "{data}", "--responses", "none"],
    "both": ["bamboogle", "--data", "{data}", "--responses", "{good}", "--model", "m"],
    "variant": ["bamboogle", "--data", "{data}", "--responses", "{good}", "--variant", "moon"],
    "verify": ["verify"], "verify none": ["verify", "bamboogle", "none", "--data", "{data}"],
    "out": ["bamboogle", "--data", "{data}", "--responses", "{good}", "--out", "{file}"],
    "variant of all": ["all", "--data", "{data}", "--model", "m", "--variant", "fixed"],
    "variant for responses": ["bamboogle", "--data", "{data}", "--model", "m", "--variant",
                              "searchr1"],
    "adapter alone": ["bfcl", "--data", "{data}", "--responses", "r", "--adapter", "a"],
    **{f"{name} without a model": ["bamboogle", "--data", "{data}", "--responses", "{good}", name, value]
       for name, value in (("--quant", "nf4"), ("--max-prompt", "9"), ("--max-new", "9"))},
    "model empty": ["bamboogle", "--data", "{data}", "--model", "{tmp}"],
    "adapter missing": ["bamboogle", "--data", "{data}", "--model", "{tmp}", "--adapter",
                        "{tmp}/a"],
    "all from one file": ["all", "--data", "{data}", "--responses", "{file}"],
    "verify empty": ["verify", "bfcl", "{empty}", "--data", "{data}"],
    "gold of no data": ["gold", "bfcl", "--data", "{data}/none"],
}


def one_line_error(code, out, err):
    """Exit code 2 and exactly one line, which is no traceback."""
    assert code == 2, (code, out, err)
    assert err.startswith("eval: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert "Traceback" not in err and out == ""


@pytest.mark.parametrize("case", OPTIONS)
def test_wrong_options_end_in_one_line(case, data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = gold_file(data, tmp_path / "good.jsonl", "bamboogle")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "file").write_text("x")
    names = {"data": data, "tmp": tmp_path, "good": good, "empty": tmp_path / "empty",
             "file": tmp_path / "file"}
    before = sorted(tmp_path.rglob("*.json*"))
    one_line_error(*command(*[a.format(**names) for a in OPTIONS[case]], capsys=capsys))
    assert sorted(tmp_path.rglob("*.json*")) == before and (tmp_path / "file").read_text() == "x"


RESPONSES = {
    "binary": "\0\udcff\n", "list": "[1]\n", "empty": "", "no id": '{"response": "x"}\n',
    "no response": '{"id": "{id}"}\n', "unknown id": '{"id": "x", "response": "x"}\n',
    "response number": '{"id": "{id}", "response": 3}\n',
    "null response": '{"id": "{id}", "response": null}\n',
    "id twice": '{"id": "{id}", "response": ""}\n{"id": "{id}", "response": ""}\n',
    "half a line": '{"id": "{id}", "response": "a"}\n{"id": "bambo',
}


@pytest.mark.parametrize("case", RESPONSES)
def test_malformed_responses_end_in_one_line_naming_the_file(case, data, tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    path.write_text(RESPONSES[case].replace("{id}", "bamboogle-000"), errors="surrogateescape")
    code, out, err = command("bamboogle", "--data", data, "--responses", path,
                             "--out", tmp_path / "out", capsys=capsys)
    one_line_error(code, out, err)
    assert str(path) in err and not (tmp_path / "out").exists()


FILES = {"alfworld": ["valid_seen.trajectories.jsonl.gz", "valid_unseen.trajectories.jsonl.gz"],
         "api_bank": [f"toolrl/level-{n}-api_processed.json" for n in (1, 2, 3)],
         "bfcl": ["derived/long_context_turns.jsonl", "multi_turn_func_doc/math_api.json",
                  "BFCL_v4_multi_turn_long_context.json"],
         "bamboogle": ["bamboogle.json"],
         "travelplanner": ["validation_queries.jsonl", "validation_ref_info.jsonl"]}


DAMAGE = [None, b"{", b"{}\n"]


@pytest.mark.parametrize("bench", FILES)
def test_damaged_data_ends_in_one_line(bench, data, tmp_path, capsys):
    """None: the file is missing."""
    good = gold_file(data, tmp_path / "r.jsonl", bench)
    for file, damage in itertools.product(FILES[bench], DAMAGE):
        if damage == b"{}\n" and file.endswith("ref_info.jsonl"):
            continue  # an entry without tables is valid
        path = data / bench / file
        whole = path.read_bytes()
        path.unlink()
        if damage is not None:
            path.write_bytes(gzip.compress(damage) if file.endswith(".gz") else damage)
        one_line_error(*command(bench, "--data", data, "--responses", good, "--limit", 1,
                                "--out", tmp_path / "out", capsys=capsys))
        path.write_bytes(whole)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------
# a scripted model: batches, limits, interruption


class Scripted:
    """Stands for policy.Policy: one token per character, answers by a function of the prompt."""
    class lm:
        class config:
            max_position_embeddings = 6_000

    class device:
        type = "cpu"

    def __init__(self, answer, stop_after=None):
        self.answer, self.stop_after, self.asked = answer, stop_after, []

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
        texts = [self.answer(self.decode(p))[:max_new_tokens] for p in prompts]
        return [Rollout(i, p, [ord(c) for c in t], [0.0] * len(t),
                        "too many tokens" * (len(t) == max_new_tokens))
                for i, (p, t) in enumerate(zip(prompts, texts))]


def answers_from(data, bench):
    """prompt text -> gold response."""
    module = harness.MODULES[bench]
    table = {"".join(m["content"] for m in module.prompt(r)): module.gold(r)
             for r in module.load(data)}
    return table.__getitem__


def with_model(monkeypatch, policy):
    monkeypatch.setattr(harness, "load_policy", lambda args: policy)


def summary_of(folder):
    path, = Path(folder).glob("*.json")
    return json.loads(path.read_text())


def test_scripted_model_is_batched_and_scored(data, tmp_path, capsys, monkeypatch):
    policy = Scripted(answers_from(data, "alfworld"))
    with_model(monkeypatch, policy)
    code, out, _ = command("alfworld", "--data", data, "--model", "m/tiny", "--batch-size", 5,
                           "--out", tmp_path, capsys=capsys)
    assert code == 0 and len(policy.asked) == 12 and "100.0" in out
    assert policy.asked == sorted(policy.asked, key=len, reverse=True)
    rows = common.read_rows(next(tmp_path.glob("alfworld-tiny-*.jsonl")))
    assert [r["id"] for r in rows] == [r["id"] for r in harness.MODULES["alfworld"].load(data)]
    assert all(r["prompt_tokens"] > 0 and r["response_tokens"] > 0 for r in rows)


def test_long_prompts_and_cut_responses_are_counted_not_fatal(data, tmp_path, capsys, monkeypatch):
    policy = Scripted(answers_from(data, "alfworld"))
    with_model(monkeypatch, policy)
    lengths = sorted(len("".join(m["content"] for m in harness.MODULES["alfworld"].prompt(r)))
                     for r in harness.MODULES["alfworld"].load(data))
    code, _, _ = command("alfworld", "--data", data, "--model", "m", "--max-prompt", lengths[5],
                         "--max-new", 4, "--out", tmp_path, capsys=capsys)
    summary = summary_of(tmp_path)
    too_long = sum(n > lengths[5] for n in lengths)
    assert code == 0 and summary["prompts_too_long"] == too_long and summary["n"] == 12
    assert summary["responses_truncated"] == 12 - too_long == len(policy.asked)
    assert summary["score"] == 0.0
    rows = common.read_rows(next(tmp_path.glob("*.jsonl")))
    assert sum("prompt too long" in r["verdict"]["reason"] for r in rows) == too_long


def test_interrupted_run_continues_where_it_stopped(data, tmp_path, capsys, monkeypatch):
    answer = answers_from(data, "alfworld")
    argv = ("alfworld", "--data", data, "--model", "m", "--batch-size", 4, "--out", tmp_path)
    with_model(monkeypatch, Scripted(answer, stop_after=8))
    code, _, err = command(*argv, capsys=capsys)
    assert code == 130 and "continues" in err
    path, = tmp_path.glob("*.jsonl")
    assert len(common.read_rows(path)) == 8 and not list(tmp_path.glob("*.json"))
    # a kill in the middle of a write leaves half a line
    path.write_text(path.read_text() + '{"id": "valid_s')
    second = Scripted(answer)
    with_model(monkeypatch, second)
    assert command(*argv, capsys=capsys)[0] == 0
    assert len(second.asked) == 4 and summary_of(tmp_path)["score"] == 100.0
    third = Scripted(answer)
    with_model(monkeypatch, third)
    assert command(*argv, capsys=capsys)[0] == 0 and third.asked == []


def test_damaged_results_are_reported_and_kept(data, tmp_path, capsys, monkeypatch):
    argv = ("bamboogle", "--data", data, "--model", "m", "--out", tmp_path)
    with_model(monkeypatch, Scripted(answers_from(data, "bamboogle")))
    command(*argv, capsys=capsys)
    path, = tmp_path.glob("*.jsonl")
    path.write_text("{broken}\n" + path.read_text())
    before = path.read_text()
    code, out, err = command(*argv, capsys=capsys)
    one_line_error(code, out, err)
    assert path.name in err and path.read_text() == before


def test_system_role_is_folded_where_the_template_refuses_it():
    import jinja2

    class Refusing(Scripted):
        def encode(self, messages):
            if messages[0]["role"] == "system":
                raise jinja2.exceptions.TemplateError("System role not supported")
            return super().encode(messages)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert Refusing(None).decode(harness.encode(Refusing(None), {"id": "x"}, messages)) == "S\n\nU"


# ---------------------------------------------------------------------------------------------
# sampling of records, intervals


def test_spread_is_even_deterministic_and_ordered():
    records = [{"id": i, "category": "abc"[min(i // 60, 2)]} for i in range(140)]  # 60, 60, 20
    chosen = common.spread(records, 14)
    assert [r["id"] for r in chosen] == sorted(r["id"] for r in chosen) and len(chosen) == 14
    assert [sum(r["category"] == c for r in chosen) for c in "abc"] == [6, 6, 2]
    assert common.spread(records, 14) == chosen
    assert {r["category"] for r in common.spread(records, 3)} == set("abc")
    assert common.spread(records, 1000) == records == common.spread(records, None)
    records = [{"id": i, "category": i % 7 if i < 90 else "rare"} for i in range(100)]
    for limit in (1, 2, 3, 5, 7, 50, 99, 100):
        assert len(common.spread(records, limit)) == limit
    user_error("at least 1", common.spread, records, 0)


@pytest.mark.parametrize("k, n", [(0, 10), (5, 10), (10, 10), (14, 200), (472, 597), (1, 1)])
def test_wilson_solves_the_score_equation(k, n):
    """Independent reference: the ends are the p at which |k/n - p| = z sqrt(p (1-p) / n)."""
    def solve(low, high, sign):
        for _ in range(100):  # bisection
            p = (low + high) / 2
            inside = sign * (k / n - p) <= 1.959964 * (p * (1 - p) / n) ** 0.5
            low, high = (low, p) if inside == (sign > 0) else (p, high)
        return 100 * low
    assert common.wilson(k, n) == pytest.approx(
        (solve(0, k / n, 1) if k else 0.0, solve(k / n, 1, -1) if k < n else 100.0), abs=1e-3)


def test_bootstrap_is_seeded_and_near_the_normal_interval():
    verdicts = [Verdict(False, i / 199, "") for i in range(200)]

    def aggregate(records, verdicts):
        return {"score": 100 * sum(v.score for v in verdicts) / len(verdicts)}
    low, high = common.bootstrap([0] * 200, verdicts, aggregate, seed=3)
    assert (low, high) == common.bootstrap([0] * 200, verdicts, aggregate, seed=3)
    half = 1.96 * 100 * (1 / 12) ** 0.5 / 200 ** 0.5  # uniform scores
    assert low == pytest.approx(50 - half, abs=1) and high == pytest.approx(50 + half, abs=1)
    result = common.interval([0] * 200, verdicts, aggregate, 50.0, seed=3)
    assert "seed 3" in result["method"]


# ---------------------------------------------------------------------------------------------
# recorded verdicts


PLANS = {"gold": (25, 25), "constructed-pass": (106, 106), "perturbed": (239, 239),
         "undelivered": (2, 2), "malformed": (8, 8), "official-example": (104, 104),
         "aggregate": (1, 1)}
AGREE = {  # kind: (verdicts that are decided, those that agree)
    "alfworld": {"step-string": (809, 809), "step-admissible": (332, 332), "raw-text": (413, 413),
                 "episode": (108, 108)},
    "api_bank": {"toolrl_exact": (1636, 1636), "damo_exec": (1160, 1158)},
    "bamboogle": {"metric": (680, 680), "searchr1_extract": (23, 23), "toolrl_dialogue": (27, 27)},
    "bfcl": {"single_turn": (1904, 1904), "relevance": (76, 76), "multi_turn": (836, 833)},
    "travelplanner": PLANS | {f"{kind}/fixed": counts for kind, counts in PLANS.items()}}


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize("bench", harness.BENCHES)
def test_recorded_verdicts_are_met_as_the_page_says(bench, capsys):
    code, out, err = command("verify", bench, SHARED / "golden" / f"{bench}.jsonl",
                             "--data", SHARED, capsys=capsys)
    table = [line.split() for line in out.splitlines() if not line.startswith("disagrees")][2:]
    assert code == 0 and err == ""
    assert {row[0]: (int(row[1]), int(row[2])) for row in table} == AGREE[bench]
    assert set(harness.MODULES[bench].REQUIRED) <= {kind for kind in AGREE[bench]} | {
        "malformed", "malformed/fixed"}


def test_undecidable_verdicts_are_counted_apart(capsys):
    assert harness.print_agreement({"a": [True, None], "b": [None]}, {"a": 1.0, "b": 1.0}) == 0
    assert "none decided" in capsys.readouterr().out
    assert harness.print_agreement({"a": [True, False]}, {"a": 0.5}) == 0
    assert harness.print_agreement({"a": [True, False]}, {"a": 0.51}) == 1
    assert harness.print_agreement({"a": [None]}, {}) == 1


GOLD = {"api_bank": (597, 597), "api_bank (damo)": (620, 604), "alfworld": (1600, 1600),
        "alfworld (handcoded)": (5250, 5250), "alfworld (valid_seen)": (812, 812),
        "alfworld (valid_unseen)": (788, 788), "bfcl": (731, 731),
        "bfcl (single_turn)": (2351, 2347), "bfcl (relevance)": (1140, 1124),
        "bamboogle": (125, 125), "travelplanner": (180, 0), "travelplanner (fixed)": (180, 0),
        "travelplanner (train)": (45, 45), "travelplanner (train_fixed)": (45, 44)}


@pytest.mark.slow
@needs_data
def test_gold_responses_pass_as_the_page_says(capsys):
    code, out, _ = command("gold", "all", "--data", SHARED, capsys=capsys)
    rows = {line[:27].strip(): line[27:].split() for line in out.splitlines()
            if line.split(" ")[0] in harness.BENCHES and "official" not in line
            and ": " not in line}
    assert code == 0 and {name: (int(row[0]), int(row[2])) for name, row in rows.items()} == GOLD
    # every record that fails is named
    for record in ("live_simple_106-63-0", "live_multiple_964-207-0", "train-041"):
        assert f"gold of {record} fails" in out


# ---------------------------------------------------------------------------------------------
# base tasks


def base_file(bench, data, out, capsys, *more):
    return command(bench, "--data", data, "--out", out, *more, capsys=capsys, main=make_base.main)


def test_base_tasks_leave_evaluation_walkthroughs_out(data, tmp_path, capsys):
    out = tmp_path / "base.jsonl"
    code, said, _ = base_file("alfworld", data, out, capsys)
    tasks = common.read_rows(out, ("task", "reference"))
    assert code == 0 and tasks and str(len(tasks)) in said
    assert all("pen 1" not in t["task"] for t in tasks)
    assert any("book 1" in t["task"] for t in tasks)


@pytest.mark.parametrize("key, value", [
    ("id", "valid_seen/put-0/trial"), ("walkthrough", None)])
def test_evaluation_games_in_the_training_file_are_refused(key, value, data, tmp_path, capsys):
    path = data / "alfworld" / "train.goals_walkthroughs.jsonl.gz"
    rows = common.read_rows(path)
    rows[1][key] = value
    path.write_bytes(gzip.compress(lines(*rows).encode()))
    one_line_error(*base_file("alfworld", data, tmp_path / "b", capsys))
    assert not (tmp_path / "b").exists()


def test_evaluation_requests_are_refused_whatever_the_module_says(data, tmp_path, capsys,
                                                                  monkeypatch):
    """A module whose training part is its evaluation part must not get through."""
    module = harness.MODULES["travelplanner"]
    load = module.load
    monkeypatch.setattr(module, "load", lambda data, split="test": load(data, "test"))
    monkeypatch.setattr(module, "base_task", lambda r: {"task": r["query"], "reference": "Elgin"})
    code, out, err = base_file("travelplanner", data, tmp_path / "b", capsys)
    one_line_error(code, out, err)
    assert "refusing" in err and not (tmp_path / "b").exists()


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize("bench, count, more", [
    ("alfworld", 12282, ""), ("api_bank", 10, ""), ("travelplanner", 45, ""),
    ("bfcl", 755, "--calls 1 --tools 3 --chars 385")])
def test_base_tasks_and_evaluation_are_disjoint(bench, count, more, tmp_path, capsys):
    from worlds.tool_calls import read_tasks
    out, module = tmp_path / "base.jsonl", harness.MODULES[bench]
    code, _, err = base_file(bench, SHARED, out, capsys, *more.split())
    tasks = common.read_rows(out, ("task",))
    assert code == 0 and err == "" and len(tasks) == count
    some = tmp_path / "some.jsonl"
    some.write_text(lines(*tasks[::50]))
    assert len(read_tasks(str(some))) == len(tasks[::50])  # the reader of --base-tasks takes them
    assert all(("calls" in t) != ("reference" in t) for t in tasks)
    assert len({json.dumps(t, sort_keys=True) for t in tasks}) == len(tasks)
    asked = {" ".join(module.prompt(r)[-1]["content"].split()) for r in module.load(SHARED)}
    assert not asked & {" ".join(t["task"].split()) for t in tasks}


# ---------------------------------------------------------------------------------------------
# a random chat model from loading to the table


def test_random_chat_model_runs_all_five_to_the_table(model, data, tmp_path, capsys):
    argv = ("all", "--data", data, "--model", model, "--limit", 2, "--max-new", 8)
    code, out, _ = command(*argv, "--out", tmp_path / "a", capsys=capsys)
    assert code == 0
    table = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    for bench in harness.BENCHES:
        assert bench in table and float(table[bench][2]) == 0.0
        summary = json.loads(next((tmp_path / "a").glob(f"{bench}-chat*.json")).read_text())
        assert summary["versions"]["torch"] and summary["n"] == min(2, int(table[bench][1]))
    assert command(*argv, "--out", tmp_path / "b", capsys=capsys)[0] == 0
    for path in (tmp_path / "a").glob("*.jsonl"):  # the same seed and CPU: the same bits
        assert path.read_text() == (tmp_path / "b" / path.name).read_text()
