"""Experiments: statistics by hand, and a tiny real suite that continues where it stopped.

Run: python -m pytest tests/test_experiments.py -q
"""
import contextlib

from helpers import user_error
import genenv
from scripts import experiments
from support.metrics import interval
from data_pool import read_jsonl

TINY = ["--epochs", "1", "--steps", "1", "--seed-tasks", "2", "--variations", "2", "--G", "2",
        "--val-samples", "1", "--rank", "4"]


class Here:
    """Stand in for subprocess.Popen, and make the run in this process."""

    def __init__(self, command, stdout, **rest):
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stdout):
            self.returncode = genenv.main(command[2:])

    def poll(self):
        return self.returncode


def test_a_suite_goes_on_where_it_stopped(tmp_path, monkeypatch, small_ladder):
    """Otherwise a finished run would be made again, or a run with other settings would count."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments.subprocess, "Popen", Here)
    monkeypatch.setitem(experiments.BASES, "ladder", ["--model", small_ladder])
    argv = ["ladder", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path), *TINY]
    assert experiments.main([*argv, "--only", "genenv"]) == 0
    first, = read_jsonl(tmp_path / "ladder.jsonl")
    assert experiments.main([*argv, "--only", "genenv", "random"]) == 0
    records = read_jsonl(tmp_path / "ladder.jsonl")
    assert records[0] == first and [r["name"] for r in records] == ["genenv", "random"]
    user_error("other settings", experiments.main, [*argv, "--only", "genenv", "--G", "4"])


def curve(values, seconds):
    """Return the records of a run, one per value from epoch 0 on; its tools all do equally well."""
    records = []
    for epoch, value in enumerate(values):
        by_tool = {"tri": value, "drop": value}
        records.append({"epoch": epoch, "validation": value, "validation_by": by_tool,
                        "success_rate": value, "mixed_share": value / 2, "alpha": 0.5,
                        "cpu_seconds": seconds})
    return records


OURS, OTHER = curve([0, .2, .4, .6, .8], 2), curve([0, .1, .2, .3, .4], 1)


def test_interval_by_hand():
    """Otherwise EXPERIMENTS would report wrong intervals."""
    # n = 3: mean 2, s = 1, t = 4.303
    assert interval([1, None, 2, 3]) == "+2.000 (-0.484 to +4.484)"
    assert interval([None]) == "-"


def test_the_tables_of_the_cross_by_hand():
    """Otherwise a table would report wrong means, or compare runs of unequal cost."""
    runs = [("genenv, share 1", 0, OURS), ("random, share 1", 0, OTHER),
            ("random, share 1", 1, OTHER)]
    records = [dict(name=name, seed=seed, metrics=metrics) for name, seed, metrics in runs]
    text = experiments.table_of("cross", records)
    # held out: the mean of the last four validations, for all tools, for tri and for the others
    cell = "0.500 | 0.500 | 0.500"
    # means of epochs 3 and 4: alpha, success, mixed groups, and mixed groups as a share of those
    # possible: .3 of .982549 (1 - .6^8 - .4^8) and .4 of .832226 (1 - .8^8 - .2^8)
    rest = "0.500 | 0.700 | 0.350 | 0.393 | 0.167 |"
    assert f"| genenv, share 1 | 1 | {cell} | {rest}" in text
    difference = "+0.250 | +0.250 | +0.250 |"
    assert f"| genenv, share 1 - random, share 1 | 1 | {difference}" in text
    # at equal CPU time, half-way between its epochs 1 and 2, ours has .15: the means of 0, .2 and
    # of 0, .2, .4 are .1 and .2
    difference = "-0.100 | -0.100 | -0.100 |"
    assert f"| genenv, share 1 - random, share 1 | 2.00 | {difference}" in text
