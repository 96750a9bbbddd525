"""The pools: nothing written is ever lost or rewritten, nothing wrong is read in silence.

Run: python -m pytest tests/test_data_pool.py -q
"""
import dataclasses

import pytest
import torch

from helpers import user_error
from support.files import append_jsonl, read_jsonl, set_torn_line_aside
from data_pool import EnvPool, EnvRecord, Task, Trace, TrainPool, distinct, priority, task_id


def base(n=5):
    """n base tasks."""
    return [Task(f"base {i}", {"i": i}) for i in range(n)]


def written(i, epoch=1):
    """A generated task."""
    return Task(f"env {i}", {"i": 100 + i}, "env", seed_task="abc", epoch=epoch)


def trace(reward=1.0, valid=True):
    """An attempt."""
    return Trace("s1 inc 4", reward, valid, False, 4)


def record(i=0, epoch=1, p_hat=0.5):
    """A generation of the simulator."""
    return EnvRecord([5, 6], [7, i, 1], f"text {i}", f"task{i}", [f"task{i}"], "seed", 3, p_hat,
                     0.25, 0.75, epoch, 0.9)


def generator(seed=0):
    """A seeded generator."""
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------
# tasks and JSONL


def test_equal_specs_are_the_same_task():
    """De-duplication would miss a task that was merely written in another order."""
    a, b = Task("x", {"start": 1, "tools": ["inc"]}), Task("y", {"tools": ["inc"], "start": 1})
    assert a.id == b.id == task_id(a.spec) and len(a.id) == 16
    assert a.id != Task("x", {"start": 2, "tools": ["inc"]}).id
    assert Task("x", {"tools": ["a", "b"]}).id != Task("x", {"tools": ["b", "a"]}).id


def test_written_records_are_read_back(tmp_path):
    """Unicode, nesting and numbers would change on the way to the disk."""
    records = [{"a": "ü 💥\n\"quoted\"", "b": [1, 2.5, None]}, {}, {"c": {"d": True}}]
    append_jsonl(tmp_path / "x", records[:2])
    append_jsonl(tmp_path / "x", records[2:])
    assert read_jsonl(tmp_path / "x") == records


@pytest.mark.parametrize("line", [b"{", b"[1, 2]", b'\xff\xfe{"a"', b"[" * 100_000])
def test_malformed_line_is_named_by_file_and_number_in_one_line(tmp_path, line):
    """A traceback, or worse: records dropped in silence."""
    path = tmp_path / "pool.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n' + line + b'\n{"a": 3}\n')
    before = path.read_bytes()
    user_error("pool.jsonl, line 3: ", read_jsonl, path)
    assert path.read_bytes() == before


def test_torn_last_line_is_set_aside_and_nothing_else_touched(tmp_path):
    """A run that was killed while writing could not go on, or would lose its last words."""
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": 3, "b": "\xc3')
    message = set_torn_line_aside(path)
    assert "train.jsonl" in message and "torn" in message and "\n" not in message
    assert read_jsonl(path) == [{"a": 1}, {"a": 2}]
    assert (tmp_path / "train.jsonl.torn").read_bytes() == b'{"a": 3, "b": "\xc3\n'
    append_jsonl(path, [{"a": 4}])
    assert read_jsonl(path)[-1] == {"a": 4}


def test_second_torn_line_does_not_overwrite_the_first(tmp_path):
    """What was set aside once would be lost at the next crash."""
    path = tmp_path / "x"
    for torn in (b"first", b"second"):
        with open(path, "ab") as file:
            file.write(b"{}\n" + torn)
        assert set_torn_line_aside(path)
    assert (tmp_path / "x.torn").read_bytes() == b"first\nsecond\n"


@pytest.mark.parametrize("content", [None, b"", b'{"a": 1}\n'])
def test_whole_files_are_left_alone(tmp_path, content):
    """A healthy pool would be reported as torn."""
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    assert set_torn_line_aside(path) == ""
    assert [p.name for p in tmp_path.iterdir()] == (["x"] if content is not None else [])


# ---------------------------------------------------------------------------------------------
# D_train


def test_only_valid_traces_enter_d_train(tmp_path):
    """Valid(E_t): malformed attempts would be exported as training data."""
    pool = TrainPool(tmp_path / "t", base())
    pool.add(written(0), [trace(), trace(0.0, valid=False), trace(0.0)], 1 / 3, 1)
    pool.add(written(1), [trace(0.0, valid=False)], 0.0, 1)
    pool.save()
    [line] = read_jsonl(tmp_path / "t")
    assert len(line["traces"]) == 2 and line["task"]["id"] == written(0).id
    assert written(1).id not in pool.tasks and written(1).id not in pool.p_hat


def test_p_hat_remembers_its_epoch_and_goes_stale(tmp_path):
    """Seeds would be chosen by success rates of an agent long gone."""
    pool = TrainPool(tmp_path / "t", base())
    for i, epoch in enumerate((1, 3, 4)):
        pool.add(written(i, epoch), [trace()], i / 4, epoch)
    names = lambda epoch: [task.text for task, _ in pool.recent(epoch)]
    assert names(3) == ["env 0", "env 1", "env 2"] and names(4) == names(5) == ["env 1", "env 2"]
    assert names(6) == ["env 2"] and names(7) == []
    known = [pool.recent_p_hat(written(i), 5) for i in range(4)]
    assert known == [None, 0.25, 0.5, None]  # too long ago, and never
    pool.add(written(0), [trace()], 1.0, 5)  # measured again: recent again
    assert ("env 0", 1.0) in [(task.text, p) for task, p in pool.recent(5)]


def test_file_only_grows_and_earlier_bytes_stay(tmp_path):
    """Append-only: a crash could then cost at most the last line."""
    path, states = tmp_path / "t", []
    pool = TrainPool(path, base())
    for i in range(4):
        pool.add(written(i), [trace()], 0.5, i)
        pool.save()
        states.append(path.read_bytes())
    assert all(later.startswith(earlier) and len(later) > len(earlier)
               for earlier, later in zip(states, states[1:]))
    pool.save()
    assert path.read_bytes() == states[-1]  # nothing is written twice


def test_reloaded_pool_equals_the_pool(tmp_path):
    """A resumed run would go on from another D_train."""
    pool = TrainPool(tmp_path / "t", base())
    for i in (3, 1, 2, 1):
        pool.add(written(i, i), [trace(), trace(0.0)], i / 8, i + 1)
    pool.add(pool.base[2], [trace()], 0.75, 2)
    pool.save()
    again = TrainPool(tmp_path / "t", base())
    assert again.tasks == pool.tasks and list(again.tasks) == list(pool.tasks)
    assert again.p_hat == pool.p_hat and list(again.p_hat) == list(pool.p_hat)
    assert again.pending == []
    assert again.sample(20, 0.5, generator()) == pool.sample(20, 0.5, generator())
    assert again.recent(4) == pool.recent(4) != []


def test_sample_mixes_base_and_kept_tasks_in_their_share(tmp_path):
    """Earlier curricula would be forgotten, or base tasks never met again."""
    pool = TrainPool(tmp_path / "t", base())
    assert all(t.origin == "base" for t in pool.sample(20, 0.0, generator()))  # nothing kept yet
    for i in range(8):
        pool.add(written(i), [trace()], 0.5, 1)
    picked = pool.sample(4000, 0.3, generator())
    assert sum(t.origin == "base" for t in picked) / 4000 == pytest.approx(0.3, abs=0.03)
    assert len({t.id for t in picked}) == 13
    assert pool.sample(9, 0.3, generator()) == pool.sample(9, 0.3, generator())
    assert {t.origin for t in pool.sample(50, 1.0, generator())} == {"base"}
    assert {t.origin for t in pool.sample(50, 0.0, generator())} == {"env"}


# ---------------------------------------------------------------------------------------------
# D_env


def test_reloaded_d_env_equals_d_env(tmp_path):
    """A resumed run would imitate other generations."""
    pool = EnvPool(tmp_path / "e")
    pool.add([record(0), record(1, 2, 0.25)])
    pool.save()
    pool.add([record(2, 3)])
    pool.save()
    again = EnvPool(tmp_path / "e")
    assert again.records == pool.records and again.pending == []
    assert [r["text"] for r in read_jsonl(tmp_path / "e")] == ["text 0", "text 1", "text 2"]


def test_aged_records_lose_priority_and_leave():
    """The simulator would imitate what was right for an agent long gone."""
    pool = EnvPool("nowhere.jsonl")
    pool.add([record(i, epoch) for i, epoch in enumerate((1, 2, 4, 5, 6))])
    aged = pool.aged(6)
    assert [r.epoch for r in aged] == [2, 4, 5]  # this epoch's are fresh, the first too old
    assert [priority(r, 6) for r in aged] == pytest.approx([0.25, 0.5, 0.5 ** 0.5])


def test_a_task_that_was_written_often_counts_once():
    """RWR would imitate the simulator's mode; the newest measurement stands for the task."""
    first, other, again = record(0, 1, 0.2), record(1, 1), record(0, 2, 0.8)
    assert distinct([first, other, again]) == [other, again]
    reworded = dataclasses.replace(other, keys=["task7", "task1"])
    assert distinct([other, first, reworded]) == [first, reworded]
    assert distinct([]) == []


# ---------------------------------------------------------------------------------------------
# damaged pool files


GOOD = {"task": {"text": "t", "spec": {"i": 1}, "origin": "env", "seed_task": "", "epoch": 1,
                 "id": "a" * 16}, "p_hat": 0.5, "epoch": 1, "traces": []}


@pytest.mark.parametrize("change", [
    {"task": None}, {"task": {"text": "t"}}, {"p_hat": "half"}])
def test_damaged_record_of_d_train_is_one_clear_line(tmp_path, change):
    """A file edited by hand would end in a traceback, epochs later."""
    path = tmp_path / "train.jsonl"
    append_jsonl(path, [GOOD, {**GOOD, **change}])
    before = path.read_bytes()
    user_error("train.jsonl, .*2: ", TrainPool, path, base())
    assert path.read_bytes() == before
