"""The walkthroughs print what is committed beside them.

    python -m pytest -q tests/test_walkthroughs.py

2, 3 and 5 are run as they are. 1 and 4 train for minutes: here they run on the small embedded world
of conftest.py, and of what a model wrote only the form is compared, as for any other base model;
what 4 prints before its runs is compared in full. `python -m walkthroughs` runs all as they are.
"""
import json
import runpy

import matplotlib.pyplot as plt
import numpy as np
import pytest

from support import options
import walkthroughs
from walkthroughs import notebook
from walkthroughs.__main__ import HERE, differences
from worlds import ladder

SCRIPTS = sorted(HERE.glob("[1-9]_*.py"))


def committed(script):
    """What it printed when it was committed."""
    return script.with_suffix(".out.txt").read_text()


@pytest.fixture(autouse=True)
def pictures(tmp_path, monkeypatch):
    """Pictures are drawn into a folder of the test, not over the committed ones."""
    monkeypatch.setattr(walkthroughs, "PICTURES", tmp_path)
    yield tmp_path
    plt.close("all")


def printed(source, path, capsys) -> str:
    """What a program, or its first cells, prints in this process."""
    capsys.readouterr()
    exec(compile(source, path, "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out


@pytest.fixture
def small_runs(small_ladder, tmp_path, monkeypatch):
    """Runs of the small embedded world, one step of few tasks in an epoch, below tmp_path."""
    monkeypatch.setattr(ladder, "base_folder", lambda *_: small_ladder)
    monkeypatch.chdir(tmp_path)
    parse = options.parse_options
    monkeypatch.setattr(options, "parse_options", lambda argv: parse(
        [*argv, "--steps", "1", "--seed-tasks", "4", "--rank", "4"]))


def test_there_are_five():
    """Each with its output, its picture and a solution, and none of them long."""
    assert [s.name[0] for s in SCRIPTS] == list("12345")
    for script in SCRIPTS:
        lines = script.read_text().splitlines()
        assert len(lines) < 145 and any(line.startswith("What to look at: ") for line in lines[:4])
        marks = ["# %% Expected: ", "# Exercise: ", "# %% Solution: "]
        found = [mark for line in lines for mark in marks
                 if line.startswith(mark)]
        assert found == marks
        assert committed(script) and script.with_suffix(".png").stat().st_size < 50_000


@pytest.mark.parametrize("number", ["2", pytest.param("3", marks=pytest.mark.slow), "5"])
def test_output_and_picture_are_as_committed(number, capsys, pictures):
    """To a unit of the last digit printed; letters of a picture may be drawn a little otherwise."""
    script, = HERE.glob(f"{number}_*.py")
    runpy.run_path(str(script), run_name="__main__")
    assert differences(committed(script), capsys.readouterr().out) == []
    kept, drawn = (plt.imread(folder / f"{script.stem}.png") for folder in (HERE, pictures))
    assert kept.shape == drawn.shape and np.abs(kept - drawn).mean() < 0.01


def test_one_epoch_by_hand(small_runs, capsys, pictures):
    """1, with another base model: the same lines, other numbers in them."""
    script, = HERE.glob("1_*.py")
    text = printed(script.read_text(), str(script), capsys)
    assert "the agent's adapter moved: no" in text
    assert differences(committed(script), text) == []
    assert (pictures / f"{script.stem}.png").is_file()


def test_the_notebook_is_the_first_walkthrough():
    """It follows from the program: the same code in the same order, no line lost."""
    source = notebook.SCRIPT.read_text()
    kept = notebook.SCRIPT.with_suffix(".ipynb").read_text()
    assert kept == notebook.notebook(source)
    code = ["".join(cell["source"]) for cell in json.loads(kept)["cells"]
            if cell["cell_type"] == "code"]
    lines = lambda text: [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines("\n".join(code)) == lines("#" + source.partition('"""\n# %%')[2])


@pytest.mark.slow
def test_a_schedule_on_paper_and_in_runs(small_runs, capsys):
    """4: on paper to the digit; then its runs with another base model, where alpha falls."""
    script, = HERE.glob("4_*.py")
    text = printed(script.read_text().partition("# %% 4.")[0], str(script), capsys)
    known = committed(script).partition("\n                  success, last 3")[0]
    assert differences(known, text) == []
    on_paper = [t.partition("base model")[0] for t in (known, text)]
    assert on_paper[0] == on_paper[1] and on_paper[0].count("alpha  ") == 2
    alphas = lambda name: [line.split()[1] for line in text.partition(name)[2].splitlines()[2:8]]
    assert alphas("\nconstant, bell") == 6 * ["0.60"]
    assert alphas("\npatient, bell")[0] == "0.60" and "0.50" in alphas("\npatient, bell")


@pytest.mark.parametrize("change, found", [
    (("0.3212", "0.3213"), 0), (("0.3212", "0.3214"), 1), (("right", "wrong"), 3),
    (("k of 8", "k of 9"), 1), (("\nG = 8\n", "\n"), 0)])
def test_a_difference_is_found(change, found):
    """A last digit may round differently; another number, word or line is found."""
    text = committed(HERE / "2_grpo.py")
    assert len(differences(text, text.replace(*change))) == found
    assert differences(text, text + "more\n") and differences(text, text.partition("\n")[2])


def test_of_another_base_model_only_the_form_is_compared():
    """Numbers may differ, rows may come and go, sentences may not."""
    text = committed(HERE / "1_one_epoch_by_hand.py")
    name = text.splitlines()[0]
    assert name.startswith("base model ")
    other = text.replace(name, "base model 00000000").replace("0.500", "0.625")
    assert differences(text, other) == [] and differences(text, other.replace(name, name)) == []
    assert differences(text, text.replace("0.500", "0.625"))
    assert differences(text, other.replace("in the band", "outside"))
