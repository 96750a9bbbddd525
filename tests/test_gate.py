"""The gate before training: what it prints, and when it stops a run.

Run: python -m pytest tests/test_gate.py -q
"""
import pytest

from watch.health import judge


def test_a_batch_with_signal_passes():
    line, stop = judge(written=16, valid=12, p_hats=[0, 0.5, 1, 0.25], G=8)
    assert stop == "" and line == ("before training: 12 of 16 written tasks valid, success on "
                                   "4 tasks 0.44, mixed rewards in 2 groups")


def test_one_mixed_group_is_enough():
    assert judge(8, 1, [0.125], 8)[1] == "" and judge(8, 1, [0.875], 8)[1] == ""


@pytest.mark.parametrize("numbers, said, unsaid", [
    ((24, 0, [], 8), ("no valid task", "warm-start", "--tools", "--no-gate"), ()),
    ((24, 5, [0.0] * 5, 8), ("differ", "warm-start", "easier base tasks"), ("--G", "harder")),
    ((24, 5, [1.0] * 5, 8), ("succeeded", "harder base tasks"), ("--G", "warm-start", "easier")),
    # some always, some never: no group has signal either
    ((24, 3, [0.0, 0.0, 1.0], 8), ("differ", "--no-gate"), ("--G",)),
])
def test_nothing_to_learn_stops_with_one_paragraph(numbers, said, unsaid):
    line, stop = judge(*numbers)
    assert line.startswith("before training: ") and "\n" not in line + stop
    assert all(word in stop for word in said) and not any(word in stop for word in unsaid)


def test_ready_made_tasks_have_no_valid_share():
    line, stop = judge(0, 0, [0.5], 8)
    assert "written" not in line and stop == ""
    assert judge(0, 0, [], 8)[1]  # no task at all


def test_similarities_that_differ_are_signal():
    """Free-form answers: p_hat is 0 below the threshold, and GRPO still learns from the rewards."""
    assert judge(4, 2, [0.0, 0.0], 2, rewards=[[0.1, 0.3], [0.0, 0.0]])[1] == ""
    assert judge(4, 2, [0.0, 0.0], 2, rewards=[[0.3, 0.3], [0.0, 0.0]])[1] != ""


@pytest.mark.parametrize("numbers", [(24, 0, [], 8), (24, 5, [0.0] * 5, 8), (24, 5, [1.0] * 5, 8)])
def test_a_world_with_its_own_model_is_told_what_is_possible_there(numbers):
    """No other model, no other tasks, no warm start."""
    stop = judge(*numbers, own_model=True)[1]
    assert "own options" in stop and "--no-gate" in stop
    assert not any(word in stop for word in ("warm-start", "er model", "bring", "--exemplars"))
