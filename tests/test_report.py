"""The pages of runs: hostile text stays text, and figures show only what was measured.

    python -m pytest -q tests/test_report.py
"""
import json
import re
from types import SimpleNamespace

import pytest

import curriculum
import genenv
from data_pool import Task, Trial, task_id
from errors import printable
from scripts import compare
from support import figures, metrics as measure, report
from test_health import QUIET

HOSTILE = ("</pre></script></style><script>alert(1)</script><img src=x onerror=alert(1)>'\""
           "\ud800 \0 \x1b[31m")


def record(epoch, **fields):
    """Return a record of metrics.jsonl with all fields that the pages read."""
    return {**QUIET, "epoch": epoch, "validated": epoch, "validation_by": {"inc": 0.5},
            "validation_rates": {"inc": [0.5] * 3}, "validation_set": "a", "mixed_share": 0.8,
            "mixed_of_possible": 0.9,
            "category_name": "kind", "entropy": 0.3, "task_length": 2.0 + epoch, "cpu_seconds": 9,
            "warnings": [], **fields}


def save(folder, records, samples=(), pool=(), **options):
    """Write the four files from which the pages are made, and return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**vars(genenv.Options()), **options}))
    for name, rows in (("metrics", records), ("samples", samples), ("train", pool)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def pooled(text, seed_task, epoch=0):
    """Return a record of train.jsonl: a task that varies another, or a base task."""
    task = Task(text, text, "env" if seed_task else "base", seed_task, epoch)
    return {"task": vars(task), "p_hat": 0.5, "epoch": epoch}


def page_of(folder, text):
    """Return the page of a run with `text` wherever a model or a user can write."""
    sample = dict(epoch=0, task=text, origin=text, p_hat=0.5, seed_task=text,
                  expected=text, traces=[dict(text=text, reward=1.0)])
    refused = dict(epoch=0, seed_task=text, refused=text, reason=text)
    entry = record(0, warnings=[{"name": text, "text": text}], validation_by={text: 0.5},
                   validation_rates={text: [0.5]}, category_name=text, length_unit=text)
    pool = [pooled(text, ""), pooled(text + ".", task_id(text))]
    save(folder, [entry], [sample, refused], pool, model=text)
    return report.write(folder).read_text()


def tags(page):
    """Return all tags of a page, without the bytes of its images."""
    return re.findall("<[^>]*>", re.sub(r"base64,[\w+/=]+", "", page))


def test_hostile_text_stays_text_in_a_page_of_one_file(tmp_path):
    """Otherwise a model's text would become a tag or an attribute, or the page would allow scripts
    and outside sources."""
    page = page_of(tmp_path, HOSTILE)
    assert tags(page) == tags(page_of(tmp_path, "harmless"))
    assert "default-src 'none'" in page and "data:image/png;base64," in page
    assert "alert(1)" in page


def test_a_task_counts_once_with_its_first_p_hat():
    """Otherwise a task that was written twice in an epoch would count twice, or with its second
    p_hat."""
    trials = [Trial(Task(text, {"text": text}, "env", epoch=3), [], [], p_hat)
              for text, p_hat in (("again", 1.0), ("new", 0.5), ("again", 0.5))]
    counted = measure.new_trials(SimpleNamespace(trials=trials, epoch=3))
    assert [(trial.task.text, trial.p_hat) for trial in counted] == [("again", 1.0), ("new", 0.5)]


def trial_of(*rewards):
    """Return a Trial whose attempts earned these rewards."""
    p_hat = curriculum.success_rate(rewards)
    return SimpleNamespace(p_hat=p_hat, traces=[SimpleNamespace(reward=r) for r in rewards])


def test_mixed_groups_are_compared_with_the_most_that_are_possible():
    """Otherwise tasks that are always or never solved would look like tasks near alpha."""
    never, always, half = trial_of(0, 0, 0, 0), trial_of(1, 1, 1, 1), trial_of(0, 1, 0, 1)
    figures = measure.success_figures([never, always, half, half], 4)
    # if every attempt succeeded at the mean rate of 1/2, 1 - 1/16 - 1/16 = 7/8 of the tasks would
    # be mixed; 1/2 are
    assert figures["mixed_share"] == 0.5
    assert figures["mixed_of_possible"] == pytest.approx(4 / 7)
    for trials in ([never], [always], []):
        assert measure.success_figures(trials, 4)["mixed_of_possible"] is None


def test_a_group_is_mixed_if_its_rewards_differ():
    """Otherwise a group with rewards of 0.6 and 1, which are both successes, would count as one
    without signal, although GRPO learns from it."""
    figures = measure.success_figures([trial_of(0.6, 1.0), trial_of(0.6, 0.6)], 2)
    assert (figures["success_rate"], figures["mixed_share"]) == (1, 0.5)
    assert (figures["solved"], figures["unsolved"]) == (1, 0)


def test_nothing_reaches_the_terminal_but_visible_characters_and_newlines():
    """Otherwise a printed text could set a window's title, clear the screen or run backwards."""
    hostile = "Grüße 你好\n\x1b]0;owned\x07\x9b2J\u202e\u200b\t\r\ud800"
    shown = printable(hostile)
    assert shown.startswith("Grüße 你好\n\\x1b]0;owned\\x07\\x9b2J\\u202e")
    assert all(x.isprintable() or x == "\n" for x in shown)


def test_what_an_epoch_did_not_measure_is_not_drawn():
    """Otherwise a figure would show 0, which looks like a collapse, or the last measurement again.
    """
    nothing = dict.fromkeys(("success_rate", "mixed_share", "mixed_of_possible", "env_kl"))
    silent = record(2, distinct_tasks=0, validated=1, **nothing)
    for key in (*nothing, "validation"):
        [line] = figures.points([[record(1), silent], [silent]], key)
        assert [t for t, _ in line] == [1], key


def test_a_chain_leads_from_a_base_task_to_the_newest_task():
    """Otherwise the report would show tasks that do not stem from each other, or an endless chain:
    a simulator may write a base task again, as a variation of its own variation."""
    base, a, b, c, lost = map(task_id, ("base", "a", "b", "c", "lost"))
    links = [("base", ""), ("a", base, 1), ("b", a, 1), ("old", b, 1), ("base", b, 2),
             ("c", lost, 2), ("d", c, 2), ("e", base, 2), ("new", b, 2), ("new", base, 2)]
    rows = report.ancestry([pooled(*link) for link in links])
    assert [text for _, _, text in rows] == ["base", "a", "b", "new"]
    assert report.ancestry([pooled("base", "")]) == report.ancestry([]) == []


def test_runs_are_compared_on_one_page(tmp_path):
    """Otherwise runs with different held-out tasks or code would be compared as equals, or --out
    would overwrite a file of a run."""
    one = save(tmp_path / "_one $\\frac$", [record(0), record(1)], code={"reward_bell": "a"})
    lower = record(1, validation=1 / 3, validation_rates={"inc": [0.5, 0.5, 0.0]})
    two = save(tmp_path / "two", [record(0), lower], code={"reward_bell": "a, then b"})
    other = save(tmp_path / "other", [record(0), record(1, validation_set="b")])
    command = ["compare", *map(str, (one, two, other))]
    assert genenv.main(command) == 0
    # a page may replace only a page, or a mistyped --out would cost the user a file
    for file, code in (("compare.html", 0), ("config.json", 2)):
        assert genenv.main([*command, "--out", str(other / file)]) == code
    page = (other / "compare.html").read_text()
    assert "-0.167" in page
    assert "edited: reward_bell v2" in page and "other held-out tasks" in page


def test_settings_are_compared_by_the_seeds_that_they_share():
    """Otherwise a difference between settings would include seeds that only one of them has."""
    runs = [compare.RunRecord("", [record(0, validation=rate)], genenv.Options(seed=seed))
            for seed, rate in ((2, 0.4), (1, 0.1), (1, 0.2), (2, 0.7), (3, 0.9))]
    _, row = compare.rows_of_means(runs, [*"aabbb"], 0)
    assert row == ["mean", "b", "0.600", "+0.200 (-1.071 to +1.471)", ""]
