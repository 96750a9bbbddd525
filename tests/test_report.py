"""The page of a run: what stands where, hostile text, one line on bad input.

    python -m pytest -q tests/test_report.py
"""
import json
import re
from html.parser import HTMLParser

import pytest

from test_health import recorded
from support import report, screen

HOSTILE = ["</script><script>document.title='owned'</script>", "<img src=x onerror=alert(1)>",
           "</pre></div></body></html>", "\"'><svg/onload=alert(1)>", "&lt;b&gt; & <b>",
           "lone \ud800 surrogate", "nul \0 and \x1b[31m", "a" * 5000, "<!--", "]]>",
           "</style><style>*{display:none}", "javascript:alert(1)", "\u202e right to left"]
SAMPLE = {"epoch": 0, "task": "2 s1 inc", "origin": "env", "p_hat": 0.5,
          "traces": [{"text": "s1 inc 3", "reward": 1.0}, {"text": "s1 inc 4", "reward": 0.0}]}


@pytest.fixture
def folder(tmp_path):
    """A run folder with a recorded run of default size, without the run."""
    records, options = recorded("genenv")
    save(tmp_path, records, vars(options), [{**SAMPLE, "epoch": t} for t in range(25)])
    return tmp_path


def save(folder, records, options, samples):
    """The three files that the report reads."""
    (folder / "config.json").write_text(json.dumps(options))
    for name, rows in (("metrics", records), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


class Tags(HTMLParser):
    """All tags and attributes of a page."""

    def __init__(self, page):
        super().__init__()
        self.names, self.attributes, self.open = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag  # every element is closed where it should be


def test_page_is_one_file_with_everything(folder):
    """Figures embedded, nothing fetched, first / middle / last tasks, options folded away."""
    page = report.write(folder).read_text()
    tags = Tags(page)
    assert tags.open == [] and tags.names.count("img") == len(list((folder / "figures").iterdir()))
    sources = [v for k, v in tags.attributes if k in ("src", "href")]
    assert sources and all(v.startswith("data:image/png;base64,") for v in sources)
    assert "http:" not in page and "https:" not in page
    assert "default-src 'none'" in page and "width=device-width" in page
    assert [page.index(f"<h3>epoch {t}</h3>") for t in (0, 12, 24)]
    assert "<details><summary>Options" in page and "env_kl_cap" in page
    assert page.count("s1 inc 3") == 3 and "r = 0<" in page
    order = ("Warnings", "Held-out success by category", "Curves", "Tasks and traces")
    assert sorted(order, key=lambda title: page.index(f"<h2>{title}")) == list(order)
    assert page.count("<figcaption>") == tags.names.count("img")  # a sentence under each curve


@pytest.fixture
def no_figures(monkeypatch):
    """There is no text of models in them, and they take long."""
    monkeypatch.setattr(report, "figures", lambda metrics, options: {})


def test_what_a_reader_would_miss_is_shown(folder):
    """An attempt without text, names in the key of a world, the highest point of a curve."""
    records, options = recorded("genenv")
    empty = {**SAMPLE, "key": "`2 s1 inc`: <start>", "traces": [{"text": "", "reward": 0.0}]}
    save(folder, records, vars(options), [empty])
    page = report.write(folder).read_text()
    assert "<pre class=wrong>(no text) <" in page and "<code>2 s1 inc</code>: &lt;start&gt;" in page
    for figure in report.figures(records, vars(options)).values():
        axis = figure.axes[0]
        assert all(1.02 * max(line.get_ydata()) <= axis.get_ylim()[1] for line in axis.lines)


def test_functions_stand_in_a_table_the_least_solved_first(folder, no_figures):
    """[how many generated tasks call it, success when last tried] of each."""
    assert "<summary>Functions" not in report.write(folder).read_text()
    (folder / "functions.json").write_text('{"easy": [4, 0.75], "hard": [2, 0.0], "new": [0, null]}')
    page = report.write(folder).read_text()
    assert page.index("<td>hard</td>") < page.index("<td>easy</td><td>4</td><td>0.75</td>")
    assert "<td>new</td><td>0</td><td>never tried</td>" in page


@pytest.mark.parametrize("text", HOSTILE, ids=lambda t: ascii(t[:20]))
def test_hostile_text_stays_text(text, folder, no_figures):
    """In a task, a trace, a warning, an option, a category: no tag or attribute comes of it."""
    records, options = recorded("genenv")
    records[-1]["warnings"] = ["collapse: harmless"]
    save(folder, records, vars(options), [SAMPLE])
    clean = Tags(report.write(folder).read_text())
    records[-1]["warnings"] = [f"collapse: {text}"]
    records[-1]["validation_by"] = {"inc": 0.5, text: 0.5}
    sample = {**SAMPLE, "task": text, "origin": text, "traces": [{"text": text, "reward": 1.0}]}
    save(folder, records, {**vars(options), "model": text, "world": text}, [sample])
    tags = Tags(report.write(folder).read_text())
    assert tags.open == [] and set(tags.names) <= set(clean.names)
    assert {k for k, _ in tags.attributes} <= {k for k, _ in clean.attributes}
    assert tags.names.count("style") == 1


def test_warnings_are_gathered_by_kind(folder, no_figures):
    """A warning of twenty epochs is one box with its epochs and its latest words."""
    records, options = recorded("genenv")
    for r in records[3:]:
        r["warnings"] = [f"collapse: in {r['epoch']}"]
    records[5]["warnings"].append("KL cap: once")
    save(folder, records, vars(options), [SAMPLE])
    page = report.write(folder).read_text()
    assert page.count("<div class=warn>") == 2 and "collapse: in 24" in page
    assert "collapse: in 23" not in page and "epochs 3, 4, 5" in page and "epoch 5<" in page
    assert "None." not in page


def test_a_run_of_one_epoch_and_without_samples(folder):
    """What there is after epoch 0."""
    records, options = recorded("genenv")
    save(folder, records[:1], vars(options), [])
    (folder / "samples.jsonl").unlink()
    assert re.search("<h3>epoch 0</h3>", report.write(folder).read_text())
    words = screen.closing_words(folder)
    assert "held-out success" in words and "->" not in words and "of 0 epochs" not in words


def test_what_the_last_epoch_did_not_measure_is_a_dash(folder, no_figures):
    """It was "0.00", or an older figure as that of the end; such epochs are none in the band."""
    records, options = recorded("genenv")
    silent = dict(distinct_tasks=0, written=0, success_rate=0.0, response_length=0.0, validated=3)
    save(folder, [*records[:-1], {**records[-1], **silent}], vars(options), [SAMPLE])
    words, page = screen.closing_words(folder), report.write(folder).read_text()
    for name in ("held-out success", "success on generated tasks", "length of generated tasks"):
        assert re.search(rf"{name} +[\d.]+ -> - ", words), words
    assert re.search(r"responses [\d.]+ -> - tokens", words) and "of 0 written" not in page
    assert page.count("\u2192 -<") == 2 and "<b>- (alpha" in page
    wide = {**vars(options), "alpha": 0.5, "k_min": 0.5}
    assert report.epochs_in_band([records[0], {**records[1], **silent}], wide) == 0


def test_a_run_without_generated_tasks_says_nothing_of_them(folder, no_figures):
    """--variant base ended with "success rate 0.00 -> 0.00 on generated tasks"."""
    records, options = recorded("genenv")
    save(folder, records, vars(options), [SAMPLE])
    assert "success on generated tasks  " in screen.closing_words(folder)
    assert "<span>success on generated tasks" in report.write(folder).read_text()
    none = dict(distinct_tasks=0, written=0, functions=32, functions_practised=0, functions_solved=0)
    save(folder, [{**r, **none} for r in records], {**vars(options), "val_samples": 1}, [])
    words = screen.closing_words(folder)
    assert "held-out success" in words and "report.html" in words and "generated tasks" not in words
    assert "practised" not in words and "1 attempt each" in words
    assert "<span>success on generated tasks" not in report.write(folder).read_text()
