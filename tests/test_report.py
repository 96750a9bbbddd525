"""The pages of runs: hostile text stays text, and each warning and p_hat stands where it belongs.

    python -m pytest -q tests/test_report.py
"""
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import genenv
from data_pool import Trace, Trial
from model.files import printable
from scripts.experiments import interval
from support import metrics as measure, report
from test_health import QUIET

HOSTILE = "</pre></script></style><script>alert(1)</script><img src=x onerror=alert(1)>'\"\ud800 \0 \x1b[31m"


def record(epoch, **fields):
    """A record of metrics.jsonl, as far as the pages read it."""
    return {**QUIET, "epoch": epoch, "validated": epoch, "validation_by": {"inc": 0.5},
            "validation_rates": {"inc": [0.5] * 3}, "validation_set": "a", "mixed_share": 0.8, "entropy": 0.3,
            "task_length": 2.0 + epoch, "solved": 0.1, "unsolved": 0.0, "cpu_seconds": 9, "warnings": [],
            **fields}


def save(folder, records, samples=(), **options):
    """The three files that the pages are made of."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**vars(genenv.Options()), **options}))
    for name, rows in (("metrics", records), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


class Tags(HTMLParser):
    """All tags, attributes and their values of a page."""

    def __init__(self, page):
        super().__init__()
        self.names, self.attributes, self.sources = [], set(), []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        self.attributes |= {name for name, _ in attributes}
        self.sources += [value for name, value in attributes if name in ("src", "href")]


def page_of(folder, text):
    """The page of a run in which `text` stands wherever a model or a user can write."""
    sample = dict(epoch=0, written_in=0, task=text, origin=text, p_hat=0.5, seed_task=text, expected=text,
                  traces=[dict(text=text, reward=1.0)])
    samples = [sample, {**sample, "epoch": 1}, dict(epoch=0, seed_task=text, refused=text, reason=text)]
    records = [record(0, warnings=[f"collapse: {text}"], validation_by={text: 0.5}),
               record(1, validation_rates={text: [0.5]}, alpha=0.9, category_name=text)]
    return report.write(save(folder, records, samples, model=text, world=text)).read_text()


def test_hostile_text_stays_text_in_a_page_of_one_file(tmp_path):
    """No tag, attribute or address comes of it; the page forbids scripts and outside sources. A task that
    was tried twice was in the band once, as alpha had moved."""
    clean, tags = Tags(page_of(tmp_path, "harmless")), Tags(page := page_of(tmp_path, HOSTILE))
    assert tags.names == clean.names and tags.attributes == clean.attributes
    assert {source[:22] for source in tags.sources} == {"data:image/png;base64,"}
    assert "default-src 'none'" in page and page.count(", in the band") == 1


def test_a_task_counts_once_with_its_first_p_hat():
    """Written twice in an epoch it was shown with its second one, or twice."""
    new, again = (SimpleNamespace(id=i, text=i, origin="env", epoch=3, seed_task="")
                  for i in ("new", "again"))
    traces = [Trace("a", 0.0, True, False, 1), Trace("b", 1.0, True, False, 1)]
    trials = [Trial(again, [], traces, 1.0), Trial(new, [], traces, 0.5), Trial(again, [], traces, 0.5)]
    run = SimpleNamespace(state=SimpleNamespace(trials=trials, epoch=3, refused=[]),
                          world=SimpleNamespace(gold=lambda task: ""), train_pool=SimpleNamespace(tasks={}))
    assert [(r["task"], r["p_hat"]) for r in measure.samples(run)] == [("again", 1.0), ("new", 0.5)]


def test_p_hat_is_counted_by_how_often_a_task_was_solved():
    """0.3 * 10 is not 3 in floating point: a count cut off would stand one too low."""
    trials = [SimpleNamespace(p_hat=k / 10) for k in (0, 3, 3, 7, 10)]
    assert measure.p_hat_counts(trials, 10) == [1, 0, 0, 2, 0, 0, 0, 1, 0, 0, 1]


def test_nothing_reaches_the_terminal_but_visible_signs_and_newlines():
    """A window title, a cleared screen, text that runs backwards: each would do so as it was printed."""
    hostile = "Grüße 你好\n\x1b]0;owned\x07\x9b2J\u202e\u200b\t\r\ud800"
    shown = printable(hostile)
    assert shown.startswith("Grüße 你好\n\\x1b]0;owned\\x07\\x9b2J\\u202e")
    assert all(sign.isprintable() or sign == "\n" for sign in shown)


def test_what_an_epoch_did_not_measure_is_not_drawn():
    """It stands in the record as 0, or as the last measurement."""
    silent = record(2, distinct_tasks=0, success_rate=0.0, validated=1, env_steps=0, env_kl=0.0)
    for key in ("success_rate", "mixed_share", "validation", "env_kl"):
        assert [t for t, _ in report.points([[record(1), silent]], key)] == [1], key
        assert report.shown(silent, key, ".2f") == "-"


def test_runs_are_compared_on_one_page(tmp_path):
    """Task by task where these are the same, with the options that differ; nothing outside of a run."""
    one = save(tmp_path / "one", [record(0), record(1)], alpha=0.5)
    lower = dict(validation=1 / 3, validation_rates={"inc": [0.5, 0.5, 0.0]})
    two = save(tmp_path / "two", [record(0), record(1, env_steps=0, **lower)], alpha=0.4)
    other = save(tmp_path / "other", [record(0), record(1, validation_set="b")])
    assert genenv.main(["compare", str(one), str(two), str(other)]) == 0
    page = (other / "compare.html").read_text()
    rows = [re.findall("<td>(.*?)</td>", row) for row in page.split("<tr>")]
    assert [str(two), "0.4"] in rows and "data:image/png" in page and "do not" in page
    assert [str(two), "0.333", "-0.167 (standard error 0.167, paired by task)"] in rows
    seeds = [genenv.Options(seed=seed) for seed in (2, 1, 1, 2, 3)]
    _, [name, mean, told] = report.over_seeds([*"aabbb"], seeds, [0.4, 0.1, 0.2, 0.7, 0.9], interval)
    assert (name, mean, told[:25]) == ("mean b", "0.600", "+0.200 (-1.071 to +1.471,")
