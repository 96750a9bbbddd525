"""Experiments: statistics by hand, and a tiny real suite that goes on where it stopped.

Run: python -m pytest tests/test_experiments.py -q
"""
import contextlib
import sys

import numpy as np
import pytest

from helpers import user_error
import genenv
from scripts import experiments
from support import report
from support.metrics import half_width, interval
from model.files import read_jsonl

TINY = ["--epochs", "1", "--steps", "1", "--seed-tasks", "2", "--variations", "2", "--G", "2",
        "--val-samples", "1", "--rank", "4"]


class Here:
    """In place of subprocess.Popen: the run takes place in this process."""

    def __init__(self, command, stdout, **rest):
        assert command[:2] == [sys.executable, "genenv.py"] and rest["cwd"] == experiments.ROOT
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stdout):
            self.returncode = genenv.main(command[2:])

    def poll(self):
        return self.returncode

    def kill(self):
        """It has ended."""

    wait = kill


def test_a_suite_goes_on_where_it_stopped(tmp_path, monkeypatch, small_ladder):
    """A finished run would be made again, or one with other settings counted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments.subprocess, "Popen", Here)
    monkeypatch.setattr(report, "write", lambda folder: None)
    monkeypatch.setitem(experiments.BASES, "ladder", ["--model", small_ladder])
    argv = ["ladder", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path), *TINY]
    assert experiments.main([*argv, "--only", "genenv"]) == 0
    first, = read_jsonl(tmp_path / "ladder.jsonl")
    assert experiments.main([*argv, "--only", "genenv", "random"]) == 0
    records = read_jsonl(tmp_path / "ladder.jsonl")
    assert records[0] == first and [r["name"] for r in records] == ["genenv", "random"]
    assert all(m["cpu_seconds"] > 0 for r in records for m in r["metrics"])
    assert "| genenv | 1 |" in (tmp_path / "ladder.md").read_text()
    user_error("other settings", experiments.main, [*argv, "--only", "genenv", "--G", "4"])


def test_seed_0_has_the_shipped_base_model_and_others_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert experiments.filled(["runs/base/ladder-{seed}"], 0) == ["worlds/base/ladder"]
    user_error("worlds.ladder train 3 runs/base/ladder-3", experiments.filled, ["runs/base/ladder-{seed}"], 3)


def test_interval_and_equal_time_by_hand():
    # n = 3: mean 2, s = 1, t = 4.303
    assert half_width([1, 2, 3]) == pytest.approx(4.303 / 3 ** 0.5)
    assert interval([1, 2, 3]) == "+2.000 (-0.484 to +4.484)"
    assert interval([2]) == "+2.000" and np.isnan(half_width([2]))
    epochs = lambda seconds, values: [{"cpu_seconds": seconds, "validation": v} for v in values]
    # the rival has trained for 3 * 2 = 6 s; we have come to our second epoch, at 3 s each
    ours, rival = epochs(3, [0.1, 0.5, 0.9]), epochs(2, [0.1, 0.2, 0.3])
    assert experiments.in_time_of(ours, rival) == pytest.approx(0.5 - 0.3)
