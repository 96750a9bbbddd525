"""Export for veRL: the records, the reward function that goes with them, and its complaints.

Run: python -m pytest tests/test_export.py -q
"""
import json
import sys
from types import SimpleNamespace

import pytest

from scripts import export
from helpers import user_error
from data_pool import Trace, TrainPool
from test_tool_calls import SEED, VALID, options, said
from worlds import call_text, load_world


def run_folder(tmp_path, world="tool_calls", tried=(), **given):
    """A run folder with one epoch of D_train: tried is a list of (task, p_hat), given are options."""
    o = {**vars(options()), "world": world, **given}
    (tmp_path / "config.json").write_text(json.dumps(o))
    pool = TrainPool(tmp_path / "train.jsonl", load_world(world).base_tasks(SimpleNamespace(**o)))
    for task, p_hat in tried:
        pool.add(task, [Trace("text", 1.0, True, False, 3)], p_hat, 1)
    pool.save()
    return tmp_path


def written(tmp_path):
    """A task by the simulator, and a run folder that has tried it."""
    task = load_world("tool_calls").parse_task(VALID, SEED, 1)
    return task, run_folder(tmp_path, tried=[(task, 0.5)])


def test_jsonl_round_trip(tmp_path):
    """Every task of D_train, prompts as chat messages, and a reward that is Eq. 1 again."""
    world, (task, run) = load_world("tool_calls"), written(tmp_path)
    n = export.export_verl(run, tmp_path / "out.jsonl")
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    tasks = [*world.base_tasks(options()), task]
    assert n == len(records) == len(tasks)
    for index, (r, t) in enumerate(zip(records, tasks)):
        assert set(r) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert r["prompt"] == world.agent_prompt(t) and r["ability"] == world.category(t)
        assert r["reward_model"]["style"] == "rule"
        assert json.loads(r["reward_model"]["ground_truth"]) == t.spec
        assert r["extra_info"]["index"] == index and r["extra_info"]["id"] == t.id
        right = said(*t.spec["calls"]) if "calls" in t.spec else t.spec["reference"][0]
        for answer, reward in ((right, 1.0), ("", 0.0)):
            assert export.compute_score(r["data_source"], answer, r["reward_model"]["ground_truth"],
                                        r["extra_info"]) == reward
    assert records[-1]["extra_info"] == {"split": "train", "index": n - 1, "id": task.id, "origin":
                                         "env", "seed_task": SEED.id, "epoch": 1, "p_hat": 0.5}
    assert records[0]["extra_info"]["p_hat"] == -1.0


def test_a_world_of_plain_text_becomes_one_user_message(tmp_path):
    """The ladder's prompts are texts; veRL wants messages."""
    ladder = load_world("ladder")
    run = run_folder(tmp_path, world="ladder", model="")
    records = export.verl_records(run)
    task = ladder.base_tasks()[0]
    assert records[0]["prompt"] == [{"role": "user", "content": ladder.agent_prompt(task)}]
    assert records[0]["data_source"] == "genenv/ladder" and len(records) == len(ladder.base_tasks())
    right = ladder._chain(task.spec["tools"], ladder.run_tools(task.spec["start"],
                                                               task.spec["tools"]))
    truth = records[0]["reward_model"]["ground_truth"]
    assert export.compute_score("genenv/ladder", right, truth) == 1.0
    assert export.compute_score("genenv/ladder", "s1", truth) == 0.0


def test_prompts_and_rewards_are_in_the_form_of_the_run(tmp_path, monkeypatch):
    """Calls in Python: the prompt shows signatures, and a process that has prepared nothing reads
    such an answer. In the household a chat model has messages with rules."""
    world = load_world("tool_calls")
    record = export.verl_records(run_folder(tmp_path, world_options={"call_format": "python"}))[0]
    assert record["data_source"] == "genenv/tool_calls/python"
    assert "calls of these functions" in record["prompt"][0]["content"]
    task = world.base_tasks(options())[0]
    answer = call_text.write_calls(task.spec["calls"])
    world._form = world.Form()  # as where nothing was prepared
    reward = record["reward_model"]["ground_truth"]
    assert export.compute_score(record["data_source"], answer, reward) == 1.0
    said_so = said(*task.spec["calls"])  # the next record may be of a run with JSON
    assert export.compute_score("genenv/tool_calls", said_so, reward) == 1.0
    assert export.compute_score("genenv/tool_calls", answer, reward) == 0.0
    for source, word in (("genenv/tool_calls/xml", "form"), ("genenv/ladder/python", "form"),
                         ("gsm8k", "no data source")):
        user_error(word, export.compute_score, source, answer, reward)
    (tmp_path / "h").mkdir()
    monkeypatch.setitem(load_world("household")._mode, "chat", False)  # put back afterwards
    rooms = export.verl_records(run_folder(tmp_path / "h", world="household"))
    assert rooms[0]["prompt"][0]["role"] == "system" and "one command" in rooms[0]["prompt"][0]["content"]


def test_parquet_round_trip(tmp_path):
    """The same records, nested columns and all."""
    parquet = pytest.importorskip("pyarrow.parquet")
    _, run = written(tmp_path)
    export.export_verl(run, tmp_path / "out.parquet")
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == export.verl_records(run)


def test_parquet_without_pyarrow_says_what_to_do(tmp_path, monkeypatch):
    """It is no requirement of ours; nothing half-written may stay behind."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    user_error("pip install pyarrow", export.export_verl, written(tmp_path)[1], tmp_path / "out.parquet")
    assert not list(tmp_path.glob("out*"))
