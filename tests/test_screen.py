"""What a user meets first: the command line before torch is loaded, and what a run prints.

Run: python -m pytest tests/test_screen.py -q
"""
import csv
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import dispatch as commands
from scripts import compare
from helpers import user_error
from support import run as frame
from support.options import parse_options
from test_health import recorded
from test_report import Tags, save
from support import report, screen

ROOT = Path(__file__).resolve().parent.parent

LIGHT = """
import sys
sys.path.insert(0, {root!r})
from scripts.dispatch import COMMANDS, dispatch
from worlds import world_names
def answer(*argv):
    try:
        return dispatch(list(argv), lambda o: 7)
    except SystemExit as done:
        return done.code
codes = [answer("--world", name, "--help") for name in (*world_names(), "template")]
codes += [answer(name, "--help") for name in COMMANDS]
codes += [answer("--epochs", "3"), answer("warm-start", "--model", "m")]
print(codes, {{"torch", "transformers", "peft"}} & set(sys.modules), file=sys.stderr)
"""


def test_help_and_parsing_need_no_torch():
    """--help of every world and command, and a run's options, are answered before it is loaded."""
    done = subprocess.run([sys.executable, "-c", LIGHT.format(root=str(ROOT))], text=True,
                          capture_output=True)
    assert done.stderr.splitlines()[-1] == "[0, 0, 0, 0, 0, 0, 0, 0, 0, 2] set()", done.stderr


def test_without_torch_there_is_one_line():
    """A first start in an empty environment."""
    hide = "import sys; sys.modules['torch'] = None; sys.argv = ['genenv.py']; import runpy; " \
           "runpy.run_path('genenv.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", hide], text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "torch is not installed: pip install -r requirements.txt" in done.stderr


def record(**fields):
    """A record of metrics.jsonl of a recorded run, with some fields changed."""
    rest = dict(seconds=5.0, validated=3, warnings=[], other_adapter_moved=False, tokens_per_s=1000.0,
                env_weight_ratio=1.1, env_batch_fresh=24, env_batch_aged=8, agent_moved=1.5, env_moved=0.5)
    return {**recorded("genenv")[0][3], **rest, **fields}


def test_an_epoch_is_one_short_line_below_its_legend():
    """Under 100 characters at the worst; each figure ends where its headline ends."""
    worst = record(epoch=1000, distinct_tasks=99999, env_kept=9999, env_kl=99.999, task_length=999.99,
                   seconds=9e4, validated=1000)
    for r in (record(), worst):
        line = screen.line(r, left=8e5)
        assert "\n" not in line and len(line) < 100
    legend = screen.LEGEND.splitlines()
    assert len(legend) == 2 and max(map(len, legend)) < 100
    held_out = screen.line(record(validation=0.125)).index("0.125")
    assert legend[1][:held_out + 5].endswith("held-out") and "generated" in legend[1]


@pytest.mark.parametrize("fields, gone", [
    ({"distinct_tasks": 0, "success_rate": 0.0, "task_length": 0.0}, 3),
    ({"validated": 2}, 1), ({"validation_by": {}}, 1), ({"env_steps": 0, "env_kl": 0.0}, 1),
    ({"epoch": 0, "validated": 0, "env_kept": 0, "env_steps": 0}, 2)])
def test_what_was_not_measured_is_a_dash(fields, gone):
    """Not 0.00: neither on the screen nor in a curve nor in the CSV."""
    full, line = screen.line(record()), screen.line(record(**fields))
    assert full.split().count("-") == 0 and line.split().count("-") == gone
    drawn = report.panels([record(**fields)])
    assert ("success_rate.png" in drawn) == ("distinct_tasks" not in fields)
    assert ("validation.png" in drawn) == (fields.get("validated", 0) != 2
                                           and "validation_by" not in fields)


def test_proof_of_training_is_for_those_who_ask():
    """--verbose; the warnings come without it."""
    r = record(warnings=["drift: far"])
    short, long = screen.line(r), screen.line(r, verbose=True)
    assert short.splitlines() == [short.splitlines()[0], "  ! drift: far"]
    assert "moved: agent 1.50" in long and "tok/s" in long and "moved" not in short


def test_banner_comes_before_anything_slow(tmp_path):
    """At most four lines, with world, model, device, threads and folder."""
    o = parse_options(["--seed", "7", "--threads", "3"])
    lines = screen.banner(o, tmp_path, 3).splitlines()
    assert [line.split()[0] for line in lines] == ["world", "model", "device", "folder"]
    assert "ladder" in lines[0] and "3 threads" in lines[2] and str(tmp_path) in lines[3]


def test_time_left_follows_the_pace_of_this_program(monkeypatch):
    """None before an epoch is over; a resumed run counts its own epochs alone."""
    now = iter((100.0, 160.0, 200.0))
    monkeypatch.setattr(frame.time, "perf_counter", lambda: next(now))
    run = SimpleNamespace(clock=None, o=SimpleNamespace(epochs=12), state=SimpleNamespace(epoch=4))
    assert frame.time_left(run) is None
    for epoch, left in ((6, 30.0 * 6), (8, 25.0 * 4)):
        run.state.epoch = epoch
        assert frame.time_left(run) == left


# ---------------------------------------------------------------------------------------------
# options of another run; several runs on a page


def test_config_gives_the_options_of_another_run(tmp_path):
    """World and its options included; the command line wins, the folder stays its own."""
    path = tmp_path / "config.json"
    o = parse_options(["--world", "household", "--max-turns", "5", "--alpha", "0.4", "--out", "x"])
    path.write_text(json.dumps(vars(o)))
    again = parse_options(["--config", str(path), "--alpha", "0.6"])
    assert again == dataclasses.replace(o, alpha=0.6, out="")
    path.write_text(json.dumps({**vars(o), "moon": 1, "k_mn": 2}))
    user_error(r"k_mn, moon\): remove it", parse_options, ["--config", str(path)])


@pytest.fixture
def two(tmp_path):
    """Two run folders, recorded runs of two variants."""
    for name in ("genenv", "random"):
        records, options = recorded(name)
        (tmp_path / name).mkdir()
        save(tmp_path / name, records, vars(options), [])
    return [str(tmp_path / name) for name in ("genenv", "random")]


def test_compare_draws_runs_over_each_other(two, tmp_path, capsys):
    """One page, in one file; the options that differ; what one run alone has is a dash."""
    out = tmp_path / "both.html"
    assert commands.dispatch(["compare", *two, "--out", str(out)], None) == 0
    page = out.read_text()
    tags = Tags(page)
    assert tags.open == [] and tags.names.count("img") == tags.names.count("figcaption") == 8
    assert all(v.startswith("data:") for k, v in tags.attributes if k in ("src", "href"))
    rows = [re.findall("<td>(.*?)</td>", row) for row in page.split("<tr>")]
    assert ["variant", "&quot;genenv&quot;", "&quot;random&quot;"] in rows
    kl = next(row for row in rows if row and row[0].startswith("KL of the simulator"))
    assert float(kl[1]) > 0 and kl[2] == "-"


def test_runs_of_unlike_length_are_also_compared_at_the_same_epoch(two):
    """The last value of a longer run beside one of a shorter run said nothing."""
    runs = {name: report.read_run(name) for name in two}
    runs[two[1]] = (runs[two[1]][0][:4], runs[two[1]][1])
    rows = {row[0]: row[1:] for row in compare.last_values(runs)}
    assert rows["epochs"] == [24, 3]
    assert rows["Held-out success by epoch 3"] == [
        f"{recorded(name)[0][3]['validation']:.4g}" for name in ("genenv", "random")]


def test_csv_has_every_epoch_and_leaves_open_what_was_not_measured(two, capsys):
    assert commands.dispatch(["compare", *two, "--csv"], None) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    records = recorded("genenv")[0]
    assert [r["epoch"] for r in rows] == 2 * [str(r["epoch"]) for r in records]
    assert float(rows[5]["success_rate"]) == records[5]["success_rate"]
    assert rows[5]["env_kl"] and not rows[0]["env_kl"] and not rows[-1]["env_kl"]
