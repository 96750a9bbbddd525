"""Many functions, few examples: both targets and their rules, the table, and imitation as a rival.

Run: python -m pytest tests/test_tools_runs.py -q. What needs the benchmark data skips without it.
"""
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from common.files import append_jsonl, read_jsonl
from experiments import controls, tools
import genenv
from helpers import EXAMPLE_LIST, flat, stub_run, tiny_policy
import micro_world
from policy import Rollout
from run.options import parse_options
from worlds import call_text, tool_calls

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "benchmarks"


@pytest.fixture(scope="module")
def goal(tmp_path_factory):
    """The target beside a base-task file as README makes it, and 64 examples."""
    if not DATA.is_dir():
        pytest.skip("no data in ../shared/benchmarks")
    from eval import make_base
    path = tmp_path_factory.mktemp("tools") / "base.jsonl"
    limits = ["--calls", "1", "--tools", "3", "--chars", "385"]
    assert make_base.main(["bfcl", "--data", str(DATA), "--out", str(path), *limits]) == 0
    o = parse_options(["--preset", "135m-cpu", "--model", "m", "--base-tasks", str(path),
                       "--base-limit", "64", "--tools", str(path)])
    tool_calls.prepare(o)
    return o, tools.target(str(DATA), o)


@pytest.mark.slow
def test_the_target_is_all_that_is_neither_example_nor_tuning(goal):
    """Scores would be of tasks that were trained on, or chosen by."""
    o, found = goal
    used = {key for task in [*tool_calls.base_tasks(o), *tool_calls.validation_tasks(o, "tuning")]
            for key in tool_calls.same_task_key(task)}
    aimed = [task for _, task, _ in found]
    assert all(used.isdisjoint(tool_calls.same_task_key(task)) for task in aimed)
    assert len({task.id for task in aimed}) == len(aimed) > 550
    names = {name for task in tool_calls.base_tasks(o) for name in tool_calls.skills(task)}
    assert len(tool_calls.base_tasks(o)) == tools.EXAMPLES
    for task, (_, _, known) in zip(aimed, found):
        assert known == (set(tool_calls.skills(task)) <= names)
    assert 20 < sum(known for *_, known in found) < 150


class Answers:
    """A policy that gives ready responses, in the order of the prompts."""

    def __init__(self, texts):
        self.texts, self.drawn_by = texts, []
        self.generator = self.drawn_by.append
        self.encode, self.decode = lambda prompt: [1], lambda ids: self.texts[ids[0]]

    def sample(self, adapter, prompts, G, *_, max_rows):
        return [Rollout(i, [1], [i], [0.0]) for i in range(len(prompts)) for _ in range(G)]


@pytest.mark.slow
def test_expected_calls_are_right_by_the_official_rule_and_others_are_not(goal):
    """A table of zeros, or of ones, whatever the model says."""
    found = goal[1]
    gold = [call_text.write_calls(task.spec["calls"]) for _, task, _ in found]
    scores = tools.scores(Answers(gold), None, found, 0, 64)
    assert scores == {"T = 1": [tools.SAMPLES] * len(found), "greedy": [1] * len(found)}
    for wrong in (lambda text: text.replace("=", "=1", 1), lambda text: "",
                  lambda text: text + "\n" + text, lambda text: text[:-1]):
        right = tools.scores(Answers(list(map(wrong, gold))), None, found, 0, 64)["greedy"]
        assert np.mean(right) <= 0.02, wrong(gold[0])


def test_held_out_tasks_of_ones_own_are_a_target_too():
    """Benchmark data would be needed to compare runs on one's own list."""
    o = parse_options(["--preset", "135m-cpu", "--model", "m", *EXAMPLE_LIST])
    tool_calls.prepare(o)
    found = tools.target(None, o)
    assert [task for _, task, _ in found] == tool_calls.validation_tasks(o)
    covered = {name for task in tool_calls.base_tasks(o) for name in tool_calls.skills(task)}
    assert [known for *_, known in found] == [set(tool_calls.skills(task)) <= covered
                                              for _, task, _ in found]
    assert 10 < sum(known for *_, known in found) < len(found) - 10
    gold = [call_text.write_calls(task.spec["calls"]) for _, task, _ in found]
    for texts, right in ((gold, 1), ([text[:-1] for text in gold], 0), (gold[1:] + gold[:1], 0)):
        policy = Answers(texts)
        assert tools.scores(policy, None, found, 3, 64) == {
            "T = 1": [tools.SAMPLES * right] * len(found), "greedy": [right] * len(found)}
        assert policy.drawn_by == [3, 3]  # one model, scored for three seeds, is drawn from thrice


def test_the_start_is_scored_once_for_each_seed_that_is_run(monkeypatch, tmp_path):
    """A seed with another start would be compared with the first one's, or a start scored twice."""
    seen = []
    monkeypatch.setattr(tools, "score_model", lambda model, settings, goal, seed: seen.append(
        (model, seed)) or {"T = 1": [0] * len(goal), "greedy": [0] * len(goal)})
    monkeypatch.setattr(tools.suite, "finished", lambda *_: (job for job in ()))
    o = dict(zip(["tools", "base_tasks", "validation_tasks"], EXAMPLE_LIST[1::2]))
    for model, first, seeds in (("first", 0, 1), ("second", 0, 2), ("third", 0, 2), ("first", 7, 1)):
        tools.run(SimpleNamespace(
            model=model, first_seed=first, seeds=seeds, only=["genenv"], jobs=1, data=None, tools=o["tools"],
            base_tasks=o["base_tasks"], work=tmp_path / "work", results=tmp_path / "r.jsonl"),
            ["--validation-tasks", o["validation_tasks"]])
    assert seen == [("first", 0), ("second", 1), ("first", 7)]
    assert [(r["name"], r["seed"], len(r["known"])) for r in read_jsonl(tmp_path / "r.jsonl")] == [
        ("warm start", seed, 58) for seed in (0, 1, 7)]


def test_no_run_is_mixed_with_others_nor_named_after_another(monkeypatch, tmp_path, capsys):
    """A committed table was printed as one's own, and --seed 7 was recorded as seeds 0 and 1."""
    monkeypatch.setattr(tools, "score_model", lambda *_: {"T = 1": [0], "greedy": [0]})
    monkeypatch.setattr(tools.suite, "finished", lambda *_: (job for job in ()))
    given = ["run", "--model", "m", *EXAMPLE_LIST, "--work", str(tmp_path / "work")]
    committed = str(tools.RESULTS / "tools-example.jsonl")
    for more, why in ((["--results", committed, "--epochs", "99"], "other settings"),
                      (["--results", str(tools.RESULTS / "tools.jsonl")], "other settings"),
                      (["--seed", "7"], "--seed is set by the experiment"),
                      (["--variant=random"], "--variant is set by the experiment"),
                      (["--jobs", "0"], "must be at least 1"), (["--seeds", "0"], "must be at least 1")):
        results = [] if "--results" in more else ["--results", str(tmp_path / "r.jsonl")]
        assert tools.main([*given, *results, *more]) == 2
        err = capsys.readouterr().err
        assert why in err and err.count("\n") == 1, err
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize("lines", ["nothing", "start", "base", "examples"])
def test_small_tables(lines, tmp_path, capsys, recwarn):
    """What an interrupted suite leaves, runs that write no tasks, a target without new functions."""
    start = line("warm start", 0, [0, 0, 0, 2], metrics=[])
    base = line("GRPO on the examples", 0, [1, 0, 0, 2])
    for epoch in base["metrics"]:
        epoch["distinct_tasks"] = 0
    runs = {"nothing": [], "start": [start], "base": [start, base], "examples": [
        {**run, "known": [True] * 4} for run in (start, base, line("genenv", 0, [4, 4, 2, 2]))]}[lines]
    path = tmp_path / "tools.jsonl"
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))
    assert tools.main(["table", "--results", str(path)]) == (0 if runs else 2)
    out, err = capsys.readouterr()
    assert "nan" not in out and not recwarn.list
    assert "0.125" in out if runs else "holds no runs" in err
    assert (tmp_path / "tools-success.png").is_file() == (lines == "examples")


def line(name, seed, right, epochs=2, **changes):
    """A line of results: for each of `right` a task with so many quarters of its answers right."""
    epoch = {"success_rate": 0.4, "env_kept": 3, "seconds": 60.0, "written": 10, "zero_variance": 0.25,
             "invalid": {"not in the request": 4}, "distinct_tasks": 5, "env_kl": 0.1,
             "functions_practised": 7}
    return {"name": name, "seed": seed, "known": [True, True, False, False],
            "scores": {"T = 1": [n * tools.SAMPLES // 4 for n in right], "greedy": [n // 2 for n in right]},
            "metrics": [{**epoch, "epoch": t, "seconds": 60.0 * t} for t in range(epochs + 1)],
            "tasks": [{"request": f"{name} {seed} {n}", "p_hat": 0.5, "epoch": 1, "tools": [],
                       "calls": "f(a=1)"} for n in range(3)], **changes}


def test_the_table_by_hand(tmp_path):
    """Means of other runs, halves of other tasks, differences the wrong way round."""
    path = tmp_path / "tools.jsonl"
    append_jsonl(path, [line("random", 0, [2, 2, 1, 1]), line("warm start", 0, [0, 0, 0, 2], metrics=[]),
                        line("genenv", 0, [4, 4, 2, 2]), line("genenv", 1, [2, 2, 2, 2]),
                        line("static", 0, [2, 2, 1, 1]), line("static", 1, [2, 2, 1, 1]),
                        line("imitation", 2, [2, 2, 1, 1])])
    rows = [[cell.strip() for cell in row.strip("| ").split("|")]
            for row in tools.page(path).splitlines() if row.startswith("|")]
    table = {row[0]: dict(zip(rows[0], row)) for row in rows[2:7]}
    assert list(table) == ["warm start", "genenv", "random", "static", "imitation"]
    assert table["random"]["T = 1"] == "0.375" and table["random"]["T = 1, with an example"] == "0.500"
    assert table["genenv"]["T = 1, without"].startswith("0.500")
    assert table["genenv"]["T = 1"].startswith("0.625 ±")
    assert table["random"]["minutes"] == "3.000" and table["random"]["valid"] == "0.600"
    assert table["random"]["groups with signal"] == "0.750" and table["warm start"]["valid"] == "-"
    over = tools.over_tasks(tools.by_name(path))
    cells = [cell.strip() for cell in next(r for r in over if r.startswith("| static")).split("|")]
    # seeds first: (3, 3, 2, 2) - (2, 2, 1, 1) of 4 is .25 at each task, without any spread
    assert cells[2] == "+0.250 (+0.250 to +0.250)" == cells[3] == cells[4]
    # of the seed that both have: (4, 4, 2, 2) - (0, 0, 0, 2) of 4
    cells = [cell.strip() for cell in next(r for r in over if r.startswith("| warm")).split("|")]
    assert cells[2] == "+0.625 (+0.156 to +1.094)" and cells[3] == "+1.000 (+1.000 to +1.000)"
    assert not any(r.startswith("| imitation") for r in over)  # no seed in common
    read = tools.reading(path)
    assert len(read) == 21 and all(task["right"] is None for task in read)
    for task in read:
        task["right"] = task["name"] == "genenv"
    append_jsonl(tmp_path / "tools-tasks.jsonl", read)
    assert "| genenv | 6 of 6 |" in tools.page(path) and "| random | 0 of 3 |" in tools.page(path)


def test_imitation_makes_expected_answers_likelier_and_moves_the_agent_alone():
    """A rival that stands still, or trains the simulator, would be easy to beat."""
    policy = tiny_policy()
    policy.encode = lambda text: [int(word[1:]) + 4 for word in text.split()]
    run = stub_run(o=genenv.Options(token_budget=64), policy=policy,
                   world=SimpleNamespace(gold=lambda task: task),
                   agent_optimizer=policy.optimizer("agent", 1e-2))
    trials = [SimpleNamespace(rollouts=flat([([5, 6, 7], [[4]])]), task="w1 w2 w3"),
              SimpleNamespace(rollouts=flat([([8], [[4]])]), task="w9")]
    with policy.use("agent"):
        answer = flat([([5, 6, 7], [[5, 6, 7, *policy.eos_ids[:1]]])])
        score = lambda: policy.logprobs(answer)[0].sum().item()
        before = score()
        stats = [controls.imitate(None, run, trials) for _ in range(10)]
        assert score() > before + 0.5
    assert all(s["moved"] > 0 and not s["other_moved"] and not s["skipped_steps"] for s in stats)


def test_a_run_of_the_loop_goes_through_imitation(monkeypatch, tmp_path):
    """The statistics have the names that the record reads."""
    plain = micro_world.micro_world

    def with_gold():
        world = plain()
        world.gold = lambda task: "right"
        return world
    monkeypatch.setattr(micro_world, "micro_world", with_gold)
    monkeypatch.setattr(micro_world.Scripted, "eos_ids", [micro_world.EOS], raising=False)
    micro_world.run_micro(monkeypatch, tmp_path / "run", "imitation", epochs=1, steps=2, seed_tasks=4,
                          variations=2, G=4, gate=False, max_prompt_tokens=40)
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["agent_moved"] > 0 and last["trained_tokens"] > 0
    assert not last["other_adapter_moved"] and last["grad_norm"] > 0
