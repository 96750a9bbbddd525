"""Experiments: statistics by hand, tables of made-up runs, a tiny real suite that is interrupted.

    python -m pytest -q tests/test_experiments.py
"""
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.files import UserError, append_jsonl, read_jsonl
from scripts import experiments, suites, tables
import genenv
from policy import Policy
from support.options import parse_options
from support import report
from worlds import ladder, tool_calls

ROOT = Path(__file__).parent.parent
FIGURE = r"-?[0-9.]+ ± [0-9.]+|-?[0-9]\.[0-9]{3}|[+-][0-9.]+( \([+-][0-9.]+ to [+-][0-9.]+\))?"
TINY = ["--no-gate", "--epochs", "1", "--steps", "1", "--variations", "2", "--G", "2",
        "--val-samples", "1", "--rank", "4"]


def record(epoch, **given):
    """One epoch of a made-up run."""
    return {**dict.fromkeys(tables.KEPT, 0.5), "epoch": epoch, "kept_by_noise": 0.0,
            "synthetic": 100 * epoch, **given}


class Here:
    """In place of subprocess.Popen: the run takes place in this process."""

    def __init__(self, command, stdout, **rest):
        assert command[:2] == [sys.executable, "genenv.py"] and rest["cwd"] == ROOT
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stdout):
            self.returncode = genenv.main(command[2:])

    def poll(self):
        return self.returncode

    def kill(self):
        """It has ended."""

    wait = kill


@pytest.fixture
def in_process(monkeypatch):
    """Runs of a suite without interpreters of their own; test_any_world starts a real one."""
    monkeypatch.setattr(experiments.subprocess, "Popen", Here)
    monkeypatch.setattr(report, "write", lambda folder: None)


def test_a_suite_that_is_terminated_leaves_no_run_behind(tmp_path, monkeypatch):
    """SIGTERM, as batch systems and `kill` send it; the handler is gone afterwards."""
    job = {"process": subprocess.Popen(["sleep", "60"]), "log": open(tmp_path / "log", "w")}
    monkeypatch.setattr(experiments, "start", lambda *_: job)
    before = signal.getsignal(signal.SIGTERM)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SystemExit) as stop:
        list(experiments.finished({"a": []}, [("a", 0)], [], 1, tmp_path))
    assert stop.value.code == 143 and job["process"].poll() == -signal.SIGKILL
    assert signal.getsignal(signal.SIGTERM) is before
    job["log"].close()


# ---------------------------------------------------------------------------------------------
# statistics


def test_interval_by_hand():
    """Student's t with n - 1 degrees of freedom; a normal quantile would claim too much."""
    mean, half = tables.interval([1, 2, 3])
    assert mean == 2 and half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert math.isnan(tables.interval([1])[1])


# ---------------------------------------------------------------------------------------------
# what is read from a run


def tried(tools, p_hat, epoch=1, written=None, origin="env", texts=()):
    """A record of D_train, with a trace for each text."""
    task = {"text": "", "spec": {"start": 3, "tools": tools}, "origin": origin,
            "epoch": epoch if written is None else written, "id": "-".join(tools)}
    return {"task": task, "p_hat": p_hat, "epoch": epoch,
            "traces": [{"text": t, "reward": 0.0} for t in texts]}


def test_generations_kept_by_noise_alone():
    """All attempts right, yet p_hat = 0.5: flipped rewards put it there."""
    right, wrong, o = "s1 inc 4", "s1 inc 5", {"k_min": 0.26, "G": 2}
    attempts = [(right, right), (wrong, wrong), (right, wrong), (right, wrong)]
    records = [tried(["inc"], 0.5, texts=texts) for texts in attempts] + [
        tried(["inc"], 1.0, texts=attempts[0]),             # outside the band
        tried(["inc"], 0.5, written=0, texts=attempts[0])]  # replayed, not written now
    assert experiments.kept_by_noise(ladder, records, 0.5, o) == 0.5
    assert experiments.kept_by_noise(ladder, [], 0.5, o) == 0


def ended(folder, metrics, train, **options):
    """A job whose run has ended, with these records in its folder."""
    folder.mkdir()
    full = {**dict.fromkeys(tables.KEPT, 0.5), "alpha": 0.5, "validation_by": {}}
    append_jsonl(folder / "metrics.jsonl", [{**full, **m} for m in metrics])
    append_jsonl(folder / "train.jsonl", train)
    o = {**vars(parse_options([])), **options}
    (folder / "config.json").write_text(json.dumps(o))
    return {"name": "a", "seed": 0, "options": [], "folder": folder,
            "process": SimpleNamespace(returncode=0), "log": open(f"{folder}.log", "w"),
            "started": 0.0}


def test_the_map_holds_what_was_generated_in_each_epoch(tmp_path):
    """By hardest tool; replays and base tasks are not of this epoch's making."""
    train = [tried(["inc"], .5, 0), tried(["inc", "inc"], 0, 0), tried(["dec"], .25, 0),
             tried(["tri"], 0, 1), tried(["inc", "inc"], .125, 1, written=0),  # tried again
             tried(["dbl"], 1, 1, origin="base"), tried(["sqr"], None, 1, origin="static")]
    by = {"inc": .9, "dec": .5, "tri": .1}
    job = ended(tmp_path / "r", [{"epoch": t, "validation_by": by} for t in (0, 1)], train,
                steps=3, G=8, variations=4, replay=0.125, seed_tasks=16)
    first, then = experiments.collect(job, ladder, {"inc"}, [])["metrics"]
    assert first["map"] == {"inc": [2, .25], "dec": [1, .25], "tri": [0, 0]}
    assert then["map"] == {"inc": [0, 0], "dec": [0, 0], "tri": [1, 0]}
    assert (first["generated"], then["generated"]) == (3, 4)
    assert (first["rollouts"], then["rollouts"]) == (0, 3 * 72 * 8)


# ---------------------------------------------------------------------------------------------
# the table


@pytest.mark.parametrize("suite", suites.SUITES)
def test_every_variant_is_drawn_in_few_lines_and_one_colour(suite):
    """Six lines a panel with six colours, the first variant in each; the same options look the
    same in every suite, and others otherwise."""
    look, options = tables.looks(), suites.SUITES[suite]
    shown = tables.panels(suite, options)
    assert {name for members in shown.values() for name in members} == set(options)
    for members in [*shown.values(), tables.EVERYWHERE]:
        assert members[0] in (next(iter(options)), "genenv")
        assert len({look[name][0] for name in members}) == len(members) <= tables.MOST
    does = lambda what: [word for word in what if word not in ("--base-model", "@base")]
    for other in suites.SUITES.values():
        assert all((look[a] == look[b]) == (does(options[a]) == does(other[b]))
                   for a in options for b in other)


# ---------------------------------------------------------------------------------------------
# the command line


def test_every_variant_is_a_valid_command_with_the_same_budget(tmp_path):
    """The same agent updates and rollouts for all: else the comparison says nothing."""
    (tmp_path / "tasks").write_text("")
    budgets = set()
    for suite in suites.SUITES.values():
        for options in suite.values():
            o = parse_options([str(tmp_path / "tasks") if x[0] == "@" else x
                                      for x in options if x[1:] not in controls.CONTROLS])
            budgets.add((o.epochs * o.steps, o.seed_tasks, o.variations, o.G, o.inner_epochs))
    assert len(budgets) == 1


def test_a_rival_done_before_genenvs_first_epoch_gives_no_figure_in_equal_time():
    """The table of a whole suite would end in an IndexError for it."""
    run = lambda seconds: [{"seconds": s, "validation": 0.1 * i} for i, s in enumerate(seconds)]
    runs = {"genenv": {0: run([5, 5]), 1: run([5, 5, 5])}, "random": {0: run([1, 1]), 1: run([5, 6])}}
    assert tables.equal_time(runs, "random").endswith("genenv minus random: +0.000")
    only = {name: {0: seeds[0]} for name, seeds in runs.items()}
    assert tables.equal_time(only, "random").endswith("genenv minus random: -")


def test_bases_start_from_the_base_model_of_their_seed(tmp_path, small_ladder, in_process,
                                                       monkeypatch, capsys):
    """All runs of the suite would share one base model, and the intervals would not be over any."""
    monkeypatch.setattr(experiments, "draw", lambda path: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "BASES", tmp_path / "shipped")
    shutil.copytree(small_ladder, tmp_path / "shipped" / "ladder")
    seen, load = [], Policy.load
    monkeypatch.setattr(Policy, "load", lambda folder, **k: (seen.append(
        (Path(folder) / "which").read_text()), load(small_ladder, **k))[1])
    out, command = tmp_path / "out", ["bases", "--seeds", "2", "--jobs", "1", *TINY]
    command += ["--only", "genenv", "random", "--out", str(out)]
    assert experiments.main(command) == 2
    assert "`python -m worlds.ladder train 1 runs/base/ladder-1` trains it" in capsys.readouterr().err
    shutil.copytree(small_ladder, tmp_path / "runs" / "base" / "ladder-1")
    for folder, text in ((tmp_path / "shipped" / "ladder", "0"),
                         (tmp_path / "runs" / "base" / "ladder-1", "1")):
        (folder / "which").write_text(text)
    assert experiments.main(command) == 0
    assert seen == ["0", "0", "1", "1"]  # seed by seed, both variants
    text = (out / "bases.md").read_text()
    starts = [m["metrics"][0]["validation"] for m in read_jsonl(out / "bases.jsonl")]
    assert f"| 1 | {starts[2]:.3f} to " in text


def test_a_suite_goes_on_where_it_stopped(tmp_path, small_ladder, in_process, monkeypatch, capsys):
    """Runs already in the results are not repeated, and other settings are refused."""
    monkeypatch.setattr(experiments, "draw", lambda path: None)  # see test_any_world
    out = tmp_path / "out"
    command = ["paper", "--seeds", "1", "--jobs", "1", "--out", str(out), *TINY,
               "--base-model", small_ladder]
    assert experiments.main([*command, "--only", "genenv"]) == 0
    first = (out / "paper.jsonl").read_bytes()
    assert experiments.main([*command, "--only", "genenv", "static"]) == 0
    assert (out / "paper.jsonl").read_bytes().startswith(first)
    runs = read_jsonl(out / "paper.jsonl")
    assert [(r["name"], r["seed"]) for r in runs] == [("genenv", 0), ("static", 0)]
    assert [m["epoch"] for m in runs[0]["metrics"]] == [0, 1]
    assert "| static |" in (out / "paper.md").read_text()
    capsys.readouterr()
    assert experiments.main([*command, "--only", "genenv", "static", "random", "--time"]) == 0
    said = capsys.readouterr().out
    assert "2 runs are there, 1 are left" in said and " minutes a run" in said
    assert len(read_jsonl(out / "paper.jsonl")) == 2  # nothing was run
    # the constant schedule of the other suite is this very run
    assert experiments.main(["alpha", *command[1:], "--only", "constant 0.5"]) == 0
    assert read_jsonl(out / "alpha.jsonl")[0]["metrics"] == runs[0]["metrics"]
    for changed, word in (["--alpha", "0.4"], "other settings"), (["--seed", "1"], "--seed is set"):
        assert experiments.main([*command, *changed]) == 2
        assert word in capsys.readouterr().err


@pytest.mark.slow
def test_any_world_runs_a_suite(model, tmp_path, capsys):
    """A world with files and a model of its own, and without a teacher: what it needs is handed
    on, what it lacks is left out, and its results lie beside those of the ladder."""
    assert set(suites.variants("paper", tool_calls)) == \
        {name for name in suites.PAPER if not name.startswith("teacher")}
    out, command = tmp_path / "out", ["paper", "--seeds", "1", "--jobs", "1", "--only", "random",
                                      "--world", "tool_calls", "--out", str(tmp_path / "out")]
    assert experiments.main(command) == 2 and "--model" in capsys.readouterr().err
    assert not out.exists()
    assert experiments.main([
        *command, "--model", model, *TINY, "--max-task-tokens", "64", "--max-response-tokens",
        "32", "--max-prompt-tokens", "4096", "--device", "cpu"]) == 0
    assert {p.stem for p in out.glob("*.jsonl")} == {"paper-tool_calls"}
    assert "| random | 1 |" in (out / "paper-tool_calls.md").read_text()
    assert (out / "paper-tool_calls-validation.png").is_file()


def test_results_of_another_meaning_are_not_taken_for_these(tmp_path, capsys):
    """A variant whose options have changed since, and a file of another version."""
    for name, change in ("paper", {"options": ["--beta", "3"]}), ("alpha", {"metrics": [{}]}), \
            ("open", {"metrics": 3}):
        path = tmp_path / f"{name}.jsonl"
        first = next(iter(suites.SUITES[name]))
        path.write_text(json.dumps({"name": first, "seed": 0, "options": [], "settings": [],
                                    "metrics": [record(0)], **change}) + "\n")
        assert experiments.main([name, "--out", str(tmp_path)]) == 2
        err = capsys.readouterr().err
        assert "move it away" in err and err.count("\n") == 1


def test_a_folder_that_holds_a_run_goes_on_only_with_its_own_options(in_process, tmp_path, small_ladder):
    """The runs of one experiment would be collected as those of another."""
    go = lambda *more: experiments.start("a", 0, [], [*TINY, "--base-model", small_ladder, *more], tmp_path)
    experiments.refuse_failed(go())
    (tmp_path / "a-0" / "report.html").touch()
    experiments.refuse_failed(go())  # the same once more: nothing is left to do
    with pytest.raises(UserError, match="--rank was 4 .* cannot become 8"):
        experiments.refuse_failed(go("--rank", "8"))
    for checkpoint in (tmp_path / "a-0" / "checkpoints").iterdir():  # killed in its first epoch
        checkpoint.unlink()
    experiments.refuse_failed(go())


def test_a_run_that_fails_ends_the_suite_with_its_last_line(tmp_path, small_ladder, in_process,
                                                         monkeypatch):
    """The reason must not stay in a temporary file, and what was finished is kept."""
    monkeypatch.setitem(suites.PAPER, "static", ["--variant", "moon"])
    out = tmp_path / "out"
    with pytest.raises(UserError, match="'static' with seed 0 failed: .*moon"):
        experiments.run_suite(experiments.planned(
            "paper", 1, False, out, [*TINY, "--base-model", small_ladder], ["genenv", "static"]), 1)
    assert [json.loads(line)["name"] for line in open(out / "paper.jsonl")] == ["genenv"]


# ---------------------------------------------------------------------------------------------
# the pages


RESULTS = ROOT / "experiments" / "results"
# real.jsonl is a record of the version before: what made its table is gone with its options
TABLES = [path for path in sorted(RESULTS.glob("*.jsonl")) if path.stem != "real"
          and not path.stem.endswith("-tasks")]
PAGES = [ROOT / "EXPERIMENTS.md", ROOT / "README.md",
         *sorted(set(RESULTS.glob("*.md")) - {path.with_suffix(".md") for path in TABLES})]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_table_follows_from_its_records(path):
    """A table that was edited by hand, or made by an earlier version."""
    make = tools.page if path.stem.startswith("tools") else tables.table
    assert make(path) == path.with_suffix(".md").read_text()


def test_figures_on_the_pages_are_those_of_the_results():
    """Every cell with an interval stands in the generated table of a suite, in the row of the same
    variant; pictures on the pages are there, and no picture lies about that no page shows."""
    rows, n, shown = {}, 0, set()
    tables_of = (path.with_suffix(".md").read_text().splitlines()
                 for path in [*TABLES, RESULTS / "real.jsonl"])
    for line in (line for lines in tables_of for line in lines):
        cells = [c.strip() for c in line.strip("|").split("|")]
        rows.setdefault(cells[0], set()).update(cells[1:])
    for page in PAGES:
        text = page.read_text()
        pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
        shown |= {(page.parent / name).resolve() for name in pictures}
        for line in text.splitlines():
            cells = [c.strip() for c in line.strip("|").split("|")]
            for cell in cells[1:] if line.startswith("|") else ():
                if re.fullmatch(FIGURE, cell):
                    assert cell in rows.get(cells[0], rows.get(cells[0].split(":")[0], ())), line
                    n += 1
    assert n > 50
    assert {path for path in shown if RESULTS in path.parents} == set(RESULTS.glob("*.png"))
