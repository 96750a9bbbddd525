"""Export for veRL: every task, and a reward function that reproduces Eq. 1.

Run: python -m pytest tests/test_export.py -q
"""
import dataclasses
import json

import pytest

from data_pool import Trace, TrainPool, read_jsonl
import genenv
from helpers import EXAMPLE_LIST, one_line, user_error
from scripts import export
from support.options import parse_options
from worlds import load_world

TOOLS = ["--world", "tool_calls", "--model", "m", *EXAMPLE_LIST]


@pytest.mark.parametrize("argv, source", [(["--world", "ladder"], "genenv/ladder"),
                                          (TOOLS, "genenv/tool_calls")])
def test_every_task_with_a_reward_that_is_eq_1_again(argv, source, tmp_path, capsys):
    """Otherwise another trainer would train on other tasks or rewards, or an export would overwrite
    a file of the run."""
    o = parse_options(argv)
    world = load_world(o.world)(o)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(o)))
    base = world.base_tasks()
    written = dataclasses.replace(base[0], text="Again!", id="new", origin="env", epoch=1)
    pool = TrainPool(tmp_path / "train.jsonl", base)
    pool.add(written, [Trace("text", 1.0, True, False, 3)], 0.5, 1)
    pool.save()
    assert genenv.main(["export", str(tmp_path)]) == 0
    # a second export replaces the first one, but no other file
    assert genenv.main(["export", str(tmp_path)]) == 0
    export_there = ["export", str(tmp_path), "--out", str(tmp_path / "config.json")]
    one_line(capsys, genenv.main(export_there), "would be lost")
    records = read_jsonl(tmp_path / "verl.jsonl")
    assert records[-1]["extra_info"]["p_hat"] == 0.5
    for r, task in zip(records, [*base, written], strict=True):
        prompt = world.agent_prompt(task)
        assert r["prompt"] == prompt or r["prompt"][0]["content"] == prompt
        assert r["data_source"] == source
        truth = r["reward_model"]["ground_truth"]
        for answer in (world.gold(task), "s1", ""):
            score, _ = world.score(task, answer)
            assert export.compute_score(source, answer, truth) == score
    user_error("gsm8k", export.compute_score, "gsm8k", "", "{}")
