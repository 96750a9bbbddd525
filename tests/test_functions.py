"""Many functions, few examples: what the loop does for them, in the micro world with a list.

    python -m pytest -q tests/test_functions.py

Full batches (--write-rounds), updates no larger than their records (--env-passes), functions drawn
as part of the curriculum (--function-selection), and what of the list was practised.
"""
import dataclasses
import json
from collections import Counter

import pytest
import torch

from support.files import read_jsonl
import curriculum
import genenv
import micro_world
from rwr import whole_passes

SMALL = dict(epochs=2, steps=2, seed_tasks=4, variations=3, G=4, gate=False, max_task_tokens=24,
             max_response_tokens=24, val_samples=1, max_prompt_tokens=40, env_batch=4)
NAMES = [f"tens-{i}" for i in range(10)]


def calls(policy, adapter, call="sample"):
    return [e for e in policy.tape if e.call == call and e.adapter == adapter]


def batches(monkeypatch, folder, **options):
    """run_micro, and what `generate` returned at each step."""
    taken, generate = [], genenv.generate
    monkeypatch.setattr(genenv, "generate", lambda run, alpha: taken.append(
        generate(run, alpha)) or taken[-1])
    _, policy, _ = micro_world.run_micro(monkeypatch, folder, **{**SMALL, **options})
    return taken, policy


def test_the_simulator_writes_until_the_batch_is_full(monkeypatch, tmp_path):
    once, _ = batches(monkeypatch, tmp_path / "once")
    taken, policy = batches(monkeypatch, tmp_path / "full", write_rounds=6)
    assert min(map(len, once)) < 12, "else there is nothing to fill up"
    assert all(len(batch) == 12 for batch in taken)
    for batch in taken:  # over all rounds: each task once, each group of one seed task
        assert len({g.task.spec["n"] for g in batch}) == 12
        seeds = {}
        for g in batch:
            seeds.setdefault(g.group, set()).add(g.task.seed_task)
        assert all(len(ids) == 1 for ids in seeds.values())
    groups = [{g.group for g in batch} for batch in taken[1:3]]  # the steps of epoch 1
    assert groups[0].isdisjoint(groups[1])
    # a text that no full batch had room for is neither counted nor used
    for record in read_jsonl(tmp_path / "full" / "metrics.jsonl"):
        n = 12 * max(1, 2 * (record["epoch"] > 0))
        assert record["written"] - sum(record["invalid"].values()) == n


def test_rounds_are_bounded_and_ask_for_what_is_missing(monkeypatch, tmp_path):
    _, policy = batches(monkeypatch, tmp_path / "run", write_rounds=2, max_task_tokens=3)
    # with three tokens no text is whole: nothing is ever valid. Once that is known, one round asks
    # for all that may be written
    assert [len(call.prompts) for call in calls(policy, "env")] == [4, 4] + 4 * [8]
    taken, policy = batches(monkeypatch, tmp_path / "two", write_rounds=2)
    sizes = [len(call.prompts) for call in calls(policy, "env")]
    assert sizes[0] == 4 and 4 < max(sizes) <= 8 and min(sizes) < 4
    shares = [1 - sum(r["invalid"].values()) / r["written"]
              for r in read_jsonl(tmp_path / "two" / "metrics.jsonl")]
    assert -(-4 // shares[0]) in sizes[1:4], "the first round of an epoch asks by the one before"


@pytest.mark.parametrize("fresh, aged, passes, sizes", [
    (3, 4, 1, []), (3, 5, 1, [8]), (0, 20, 1, []), (16, 0, 1, [8, 8]), (5, 14, 1, [10, 9]),
    (4, 0, 2, [8]), (5, 1, 3, [9, 9])])
def test_an_update_takes_no_more_steps_than_its_records_carry(fresh, aged, passes, sizes):
    drawn = whole_passes(fresh, aged, passes, 8, torch.Generator().manual_seed(0))
    assert [len(batch) for batch in drawn] == sizes
    met = Counter(i for batch in drawn for i in batch)
    assert not drawn or met == {i: passes for i in range(fresh + aged)}


def test_few_records_wait_in_d_env_until_there_are_enough(monkeypatch, tmp_path):
    options = dict(epochs=4, k_min=0.5, env_passes=1, steps=1, seed_tasks=2)
    waiting, collected = {}, []
    for size in (1, 8):
        _, policy = batches(monkeypatch, tmp_path / str(size), **options, env_batch=size)
        waiting[size] = [len(e.args[2]) for e in calls(policy, "env", "rwr_update")]
        collected.append([len(e.args[0]) for e in calls(policy, "env", "rwr_update")])
    assert waiting[1] == collected[0], "a step for every record"
    assert waiting[8][0] == 0 and any(waiting[8]), (waiting, collected)
    assert [n >= 8 for n in collected[1]] == [bool(n) for n in waiting[8]]


def listed(world):
    """The micro world with a list of functions; `given` collects what was drawn for each seed."""
    given = []

    def assign(task, names, generator):
        given.append(names)
        return dataclasses.replace(task, spec={**task.spec, "for": names})

    world.functions, world.assign, world.given = lambda o: NAMES, assign, given
    return world


@pytest.fixture
def with_list(monkeypatch):
    plain = micro_world.micro_world
    monkeypatch.setattr(micro_world, "micro_world", lambda: listed(plain()))


def test_every_seed_task_gets_functions_and_the_record_says_which_were_met(
        with_list, monkeypatch, tmp_path):
    _, policy, world = micro_world.run_micro(monkeypatch, tmp_path / "run", **SMALL)
    asked = sum(len(call.prompts) for call in calls(policy, "env"))
    assert len(world.given) == asked
    assert all(len(set(names)) == len(names) == 4 for names in world.given)
    assert set(sum(world.given, [])) == set(NAMES)
    tried, base = {}, {task.id for task in world.base_tasks(None)}  # one may be written again
    for record in read_jsonl(tmp_path / "run" / "train.jsonl"):
        if record["task"]["id"] not in base:
            tried[record["task"]["id"]] = record
    by_name = {}
    for record in tried.values():
        by_name.setdefault(f"tens-{record['task']['spec']['n'] // 10}", []).append(record["p_hat"])
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["functions"] == 10 and last["functions_practised"] == len(by_name)
    assert last["functions_solved"] == sum(any(p) for p in by_name.values())
    table = json.loads((tmp_path / "run" / "functions.json").read_text())
    assert {name: n for name, (n, _) in table.items() if n} == {k: len(v) for k, v in by_name.items()}
    assert all(abs(table[k][1] - sum(v) / len(v)) < 1e-3 for k, v in by_name.items())


def test_without_a_list_nothing_is_drawn_or_recorded(monkeypatch, tmp_path):
    micro_world.run_micro(monkeypatch, tmp_path / "run", **SMALL)
    assert "functions" not in read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert not (tmp_path / "run" / "functions.json").exists()


def test_near_alpha_prefers_what_is_solved_near_alpha_and_what_is_new():
    practice = {"always": [1.0, 1.0], "never": [0.0], "near": [0.25, 0.75], "new": []}
    generator = torch.Generator().manual_seed(0)
    rows = curriculum.select_functions(practice, 4000, curriculum.functions_near_alpha, 0.5,
                                       generator, few=1)
    n = Counter(name for row in rows for name in row)
    assert n["near"] > 3 * n["always"] and n["near"] > 3 * n["never"] and n["new"] > 3 * n["never"]
    uniform = curriculum.select_functions(practice, 4000, curriculum.functions_uniform, 0.5,
                                          generator, few=1)
    assert all(900 < k < 1100 for k in Counter(sum(uniform, [])).values())
