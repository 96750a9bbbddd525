"""Runs of a real model: the two targets, BFCL's own rule, the table, and what is read by hand.

Run: python -m pytest tests/test_real_runs.py -q. What needs the benchmark data skips without it.
"""
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_pool import UserError, append_jsonl, read_jsonl
from experiments import real
from policy import Rollout
from worlds import call_text, tool_calls

DATA = Path(__file__).resolve().parents[2] / "shared" / "benchmarks"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """The targets beside a base-task file as README makes it."""
    if not DATA.is_dir():
        pytest.skip("no data in ../shared/benchmarks")
    from eval import make_base
    path = tmp_path_factory.mktemp("real") / "base.jsonl"
    limits = ["--calls", "1", "--tools", "3", "--chars", "385"]
    assert make_base.main(["bfcl", "--data", str(DATA), "--out", str(path), *limits]) == 0
    o = SimpleNamespace(model="m", base_tasks=str(path), validation_tasks="", max_task_tokens=64,
                        max_response_tokens=32, max_prompt_tokens=640,
                        world_options={"call_format": "python", "tools": "base"})
    tool_calls.prepare(o)
    yield o, real.targets(str(DATA), o)
    tool_calls._form = tool_calls.Form()


def test_every_held_out_task_has_its_record_and_no_base_task_is_a_target(kinds):
    """Scores would be of other tasks, or of tasks that were trained on."""
    o, found = kinds
    assert len(found["held-out"]) == len(tool_calls.validation_tasks(o)) == 101
    asked = {key for pairs in found.values() for _, line in pairs
             for key in tool_calls.same_task_key(tool_calls.make_task(line, "base"))}
    used = {key for task in [*tool_calls.base_tasks(o), *tool_calls.validation_tasks(o, "tuning")]
            for key in tool_calls.same_task_key(task)}
    assert asked.isdisjoint(used)
    assert len(found["more calls"]) == len(found["more functions"]) == real.PER_KIND
    assert all(len(line["calls"]) > 1 for _, line in found["more calls"])
    assert all(len(line["calls"]) == 1 < 3 < len(line["tools"])
               for _, line in found["more functions"])


class Scripted:
    """A policy that gives ready responses, in the order of the prompts."""

    def __init__(self, texts):
        self.texts, self.generator = texts, lambda seed: None
        self.encode = lambda prompt: [1]
        self.decode = lambda ids: self.texts[ids[0]]

    def sample(self, adapter, prompts, G, *_, max_rows):
        return [Rollout(i, [1], [i], [0.0], False) for i in range(len(prompts)) for _ in range(G)]


def test_expected_calls_are_right_by_the_official_rule_and_others_are_not(kinds):
    """A table of zeros, or of ones, whatever the model says."""
    for kind, pairs in kinds[1].items():
        gold = [call_text.write_calls(line["calls"]) for _, line in pairs]
        right = real.official(Scripted(gold), None, {kind: pairs})[kind]
        assert all(a == b > 0 for a, b in right.values()) and real.share(right) == 1
        for wrong in (lambda text: text.replace("=", "=1", 1), lambda text: text + "\n" + text,
                      lambda text: "", lambda text: "I would call " + text,
                      lambda text: text[:-1]):
            got = real.official(Scripted(list(map(wrong, gold))), None, {kind: pairs})[kind]
            # a string argument that becomes 1"..." is no call; a number gets another value
            assert real.share(got) <= 0.02, (kind, wrong(gold[0]))


def epoch(n, **changes):
    """A line of metrics.jsonl, as far as the table reads it."""
    return {"epoch": n, "validation": 0.2 + 0.1 * n, "validation_by": {"1 call": 0.2},
            "success_rate": 0.4, "env_kept": n + 1, "seconds": 60.0, "written": 10, "invalid": {"truncated": 4}, "skill_entropy": 3.0,
            **changes}


def result(name, seed, right, **changes):
    """A line of real.jsonl."""
    task = lambda part, n: {"part": part, "request": f"{name} {seed} {part} {n}", "p_hat": 0.5,
                            "tools": ["f(a: int)"], "calls": "f(a=1)"}
    return {"name": name, "seed": seed, "metrics": [epoch(0), epoch(1), epoch(2)],
            "official": {"held-out, T = 1": {"simple": [right, 20]}, "held-out": {"simple": [right, 10]}, "more calls": {"parallel": [1, 4]},
                         "more functions": {"multiple": [2, 4]}},
            "tasks": [task(part, n) for part in ("early", "late") for n in range(20)],
            "shape": [{"epoch": 0, "tasks": 6, "calls": 1.5, "tools": 2.0}], **changes}


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "real.jsonl"
    none = {"metrics": [], "tasks": [], "shape": []}
    append_jsonl(path, [result("random", 0, 4), result("warm start", 0, 3, **none),
                        *(result("genenv", seed, 5 + seed) for seed in (0, 1)),
                        result("GRPO on base tasks", 0, 6, tasks=[], shape=[],
                               metrics=[epoch(n, written=0, invalid={}) for n in range(3)])])
    return path


def test_the_table_by_hand(results):
    """Means of other runs, or of another epoch."""
    rows = {line.split(" | ")[0].strip("| "): [cell.strip(" |") for cell in line.split(" | ")[1:]]
            for line in real.page(results).splitlines()[:6]}
    assert rows["genenv"][:3] == ["2", "0.275 ± 0.318", "0.550 ± 0.635"]
    assert rows["warm start"][2] == "0.300" and rows["warm start"][5] == "-"
    assert rows["genenv"][5:7] == ["0.400 ± 0.000", "3.000 ± 0.000"]  # in the band: epoch 2 alone
    heads = rows["variant"]
    at = lambda name, head: rows[name][heads.index(head)]
    assert at("random", "validation, last") == "0.400" == at("random", "held-out")
    assert at("random", "validation, first") == "0.200"
    assert at("random", "valid") == "0.600" and at("GRPO on base tasks", "valid") == "-"
    assert at("random", "calls a task, last") == "1.500"
    # paired by seed: seed 0 alone is common, so there is a difference and no interval
    text = real.page(results)
    assert "| random | +0.050 | +0.100 | +0.000 |" in text
    assert "| GRPO on base tasks | -0.050 | -0.100 | +0.000 | +0.000 | - | - |" in text


def test_what_is_read_is_drawn_evenly_and_told_apart_by_nothing(results):
    """The reader would know the variant from the order, or read one seed alone."""
    tasks = real.reading(results)
    assert tasks == real.reading(results) and [t["id"] for t in tasks] == list(range(len(tasks)))
    count = lambda name, part: sum((t["name"], t["part"]) == (name, part) for t in tasks)
    assert [count("genenv", part) for part in ("early", "late")] == [real.READ, real.READ]
    assert [count("random", part) for part in ("early", "late")] == [20, 20]
    names = [t["name"] for t in tasks]
    assert 10 < sum(a != b for a, b in zip(names, names[1:]))
    assert {t["request"].split()[1] for t in tasks if t["name"] == "genenv"} == {"0", "1"}
    path = results.with_name("real-tasks.jsonl")
    append_jsonl(path, [{**t, "right": t["part"] == "late"} for t in tasks])
    text = real.readings(path)
    assert f"| genenv | 0 of {real.READ} | {real.READ} of {real.READ} |" in text
    assert f"| right | {sum(t['part'] == 'late' for t in tasks)} | 0 |" in text and "| 0.50 |" in text


def test_the_command_writes_table_and_figures_and_never_over_a_reading(results, capsys):
    """Hours of reading would be gone."""
    folder = ["--results", str(results.parent)]
    assert real.main(["tasks", *folder]) == 0 and real.main(["table", *folder]) == 0
    assert {p.name for p in results.parent.iterdir()} >= {"real.md", "real-validation.png",
                                                          "real-success.png", "real-tasks.jsonl"}
    capsys.readouterr()
    for argv, part in ((["tasks", *folder], "move it away"), (["run"], "--data"),
                       (["table", "--results", "nowhere"], "no such file"),
                       (["table", *folder, "--nonsense"], "--nonsense"),
                       (["run", "--only", "nobody"], "nobody")):
        try:
            code = real.main(argv)
        except SystemExit as end:
            code = end.code
        lines = capsys.readouterr().err.strip().splitlines()
        assert code == 2 and part in lines[-1], (argv, lines)


def test_a_run_that_fails_takes_the_others_along(tmp_path, monkeypatch):
    """They would go on unseen, for an hour, on the cores of the next runs."""
    import subprocess
    import sys
    started = []

    def start(name, seed, options, settings, work):
        code = {"bad": "import sys; sys.exit(3)", "good": "pass"}.get(name, "import time; time.sleep(60)")
        started.append(subprocess.Popen([sys.executable, "-c", code]))
        return {"name": name, "seed": seed, "process": started[-1], "folder": work / name,
                "log": open(work / f"{name}.log", "w")}

    monkeypatch.setattr(real.suite, "start", start)
    monkeypatch.setattr(real, "VARIANTS", {"good": [], "bad": [], "long": []})
    ended = real.finished([("good", 0), ("good", 1)], 1, [], tmp_path)
    assert list(ended) == [("good", 0, tmp_path / "good"), ("good", 1, tmp_path / "good")]
    with pytest.raises(UserError, match="'bad' with seed 0 failed"):
        list(real.finished([("long", 0), ("bad", 0)], 2, [], tmp_path))
    assert all(process.poll() is not None for process in started)


def test_the_shape_of_what_was_written():
    """Growth of tasks would be that of other epochs."""
    record = lambda epoch, calls, tools: {"epoch": epoch, "task": {"spec": {
        "calls": [0] * calls, "tools": [0] * tools}}}
    assert real.shape([record(0, 1, 1), record(1, 2, 3), record(1, 1, 2)]) == [
        {"epoch": 0, "tasks": 1, "calls": 1.0, "tools": 1.0},
        {"epoch": 1, "tasks": 2, "calls": 1.5, "tools": 2.5}]


def test_committed_readings_are_complete():
    """A table of half a reading."""
    path = real.RESULTS / "real-tasks.jsonl"
    if not path.is_file():
        pytest.skip("nothing was read yet")
    tasks = read_jsonl(path)
    assert all(t["right"] in (True, False) for t in tasks)
    assert json.loads(json.dumps(tasks)) == tasks
