"""The pools: they read back what they wrote, mix base and stored tasks, and count a task once.

    python -m pytest tests/test_data_pool.py -q

What enters a pool and what is taken from it, epoch by epoch, is in test_wiring.py.
"""
import dataclasses

import torch

from data_pool import EnvPool, EnvRecord, Task, Trace, TrainPool, distinct, read_jsonl
from helpers import user_error


def base(n=5):
    """Return n base tasks."""
    return [Task(f"base {i}", {"i": i}) for i in range(n)]


def written(i, epoch=1):
    """Return a generated task."""
    return Task(f"env {i}", {"i": 100 + i}, "env", seed_task="abc", epoch=epoch)


def trace(reward=1.0, valid=True):
    """Return an attempt."""
    return Trace("s1 inc 4 ü 💥", reward, valid, False, 4)


def record(i=0, epoch=1, p_hat=0.5):
    """Return a generation of the simulator."""
    return EnvRecord([5, 6], [7, i, 1], f"text {i}", f"task{i}", [f"task{i}"], 3, p_hat,
                     0.25, 0.75, epoch, 0.9)


def seeded():
    """Return a seeded generator."""
    return torch.Generator().manual_seed(0)


def test_equal_specs_are_the_same_task():
    """Otherwise a task whose keys were merely written in another order would pass as a new one."""
    specs = ({"start": 1, "tools": ["a", "b"]}, {"tools": ["a", "b"], "start": 1},
             {"start": 1, "tools": ["b", "a"]})
    one, again, other = [Task("", spec).id for spec in specs]
    assert one == again != other


def test_reloaded_pools_equal_the_pools(tmp_path):
    """Otherwise a resumed run would continue from another D_train, or imitate other generations."""
    pool, env = TrainPool(tmp_path / "t", base()), EnvPool(tmp_path / "e")
    for i in (3, 1, 2, 1):
        pool.add(written(i, i), [trace(), trace(0.0)], i / 8, i + 1)
        env.add([record(i)])
        env.add([record(i, 2, 0.25)])
        for part in (pool, env):
            part.save()
            part.save()  # nothing is written twice
    again = TrainPool(tmp_path / "t", base())
    assert again.tasks == pool.tasks and list(again.tasks) == list(pool.tasks)
    assert again.p_hat == pool.p_hat and list(again.p_hat) == list(pool.p_hat)
    assert again.sample(20, 0.5, seeded()) == pool.sample(20, 0.5, seeded())
    assert EnvPool(tmp_path / "e").records == env.records


def test_a_new_task_enters_with_its_valid_attempts(tmp_path):
    """Otherwise D_train would hold tasks without a valid attempt, or invalid traces."""
    pool = TrainPool(tmp_path / "t", base())
    pool.add(written(1), [trace(valid=False), trace()], 0.5, 1)
    pool.add(written(2), [trace(valid=False)], 0.0, 1)
    pool.add(written(3), [], None)  # a teacher's task, not attempted yet
    pool.add(pool.base[0], [trace(valid=False)], 0.0, 1)
    pool.save()
    env_tasks = [task for task in pool.tasks.values() if task.origin == "env"]
    assert env_tasks == [written(1), written(3)]
    lines = read_jsonl(tmp_path / "t")
    assert [len(line["traces"]) for line in lines] == [1, 0, 0]


def test_success_rates_are_used_while_they_are_fresh(tmp_path):
    """Otherwise the choice of seed tasks, or of what RWR imitates, would rest on outdated success
    rates."""
    pool, env = TrainPool(tmp_path / "t", base()), EnvPool(tmp_path / "e")
    pool.add(pool.base[0], [trace()], 1.0, 5)
    for epoch in range(1, 8):
        pool.add(written(epoch), [trace()], epoch / 8, epoch)
    env.add([record(i, i) for i in range(1, 8)])
    assert pool.recent(7) == [(written(i), i / 8) for i in (5, 6, 7)]
    assert [pool.recent_p_hat(written(i), 7) for i in (4, 5, 8)] == [None, 5 / 8, None]
    assert pool.recent_p_hat(pool.base[0], 7) == 1.0
    assert [r.epoch for r in env.imitable(7)] == [3, 4, 5, 6]


def test_the_unit_of_p_hat_is_the_one_that_was_asked_for():
    """Otherwise --p-hat-unit would select another set of attempts."""
    p_hats = [record().p_hat_of(unit) for unit in ("task", "seed", "batch")]
    assert p_hats == [0.5, 0.25, 0.75]


def test_a_line_that_is_no_json_object_is_named(tmp_path):
    """Otherwise such a line would end a resumed run, or one that reads a file of tasks, in a
    traceback."""
    path = tmp_path / "f.jsonl"
    for line in (b"[1]", b'"text"', b"1", b"null", b"{", b"\xff", b"[" * 10 ** 5):
        path.write_bytes(b'{"a": 1}\n\n' + line)
        user_error(f"{path}, line 3 must be a JSON object", read_jsonl, path)


def test_sample_mixes_base_and_kept_tasks_in_their_share(tmp_path):
    """Otherwise earlier curricula would be forgotten, or base tasks never attempted again."""
    pool = TrainPool(tmp_path / "t", base())
    assert all(t.origin == "base" for t in pool.sample(20, 0.0, seeded()))  # no task is stored yet
    for i in range(8):
        pool.add(written(i), [trace()], 0.5, 1)
    picked = pool.sample(4000, 0.3, seeded())
    assert abs(sum(t.origin == "base" for t in picked) / 4000 - 0.3) < 0.03
    assert len({t.id for t in picked}) == 13


def test_a_task_that_was_written_often_counts_once():
    """Otherwise RWR would favour what the simulator writes most often, or use an old measurement.
    """
    first, other, again = record(0, 1, 0.2), record(1, 1), record(0, 2, 0.8)
    assert distinct([first, other, again]) == [other, again]
    reworded = dataclasses.replace(other, keys=["task7", "task1"])
    assert distinct([other, first, reworded]) == [first, reworded]
