"""Each way of going wrong raises its own warning and no other; a healthy run raises none.

    python -m pytest -q tests/test_health.py

The records are made by hand, six epochs of them, and each warning is judged by all of a run: every
check looks at every epoch. What the records of a real run mean is the matter of test_wiring.py. Runs
of default size that went well, and two that did not, are in tests/golden/health as they were
recorded: metrics.jsonl of `python genenv.py`, with the options named in the first line.
"""
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import genenv
from support import health, report
from conftest import MICRO, write_report
from support.files import read_jsonl

GOLDEN = Path(__file__).with_name("golden") / "health"
ROOT = Path(__file__).parent.parent
QUIET = dict(epoch=3, alpha=0.5, success_rate=0.5, validation=0.5, distinct_tasks=40, reward=0.5,
             skill_entropy=2.0, written=48, invalid={}, truncated=0.0, zero_variance=0.2, replays=0,
             replay_gain=0.0, env_kept=20, env_kl=0.1, env_kl_step=0.1, env_steps=16, env_capped=0)


def kinds(records, **options):
    """The keywords of all warnings of a run, and the last one in full."""
    o = genenv.Options(**options)
    texts = [text for t, r in enumerate(records) for text in health.warnings(r, records[:t], o)]
    return {text.partition(":")[0] for text in texts}, texts[-1] if texts else ""


def epochs(n=0, **fields):
    """Six epochs, of which the last n have these fields."""
    return [{**QUIET, **(fields if t >= 6 - n else {}), "epoch": t} for t in range(6)]


# ---------------------------------------------------------------------------------------------
# each cause and its warning


NO_SIMULATOR = dict(written=0, env_kept=0, env_steps=0, env_kl=0.0, skill_entropy=0.0)
FINE = {  # name: (fields of all epochs, options)
    "default": ({}, {}), "random": (dict(env_steps=0, env_kl=0.0), dict(variant="random")),
    "static": (NO_SIMULATOR, dict(variant="static")), "agreement": ({}, dict(agreement=1)),
    "base": ({**NO_SIMULATOR, "distinct_tasks": 0, "success_rate": 0.0}, dict(variant="base")),
    # tasks tried again do get easier, or validation does
    "replays": (dict(replays=30, replay_gain=0.06), {}),
    # differences that bf16 makes, and the counts of a run without trouble
    "rounding": (dict(skipped_steps=0, env_skipped_steps=0, mismatch_mean=0.015, mismatch_max=0.1,
                      other_adapter_moved=False), {}),
    # a cap that is hit late in an update is only at work; some of everything is usual
    "late cap": (dict(env_capped=1, env_steps=8), {}),
    "late cap in a pass": (dict(env_capped=1, env_steps=1), dict(env_passes=1)),
    "a few": (dict(truncated=0.1, invalid={"malformed": 9, "copy of the seed": 5, "truncated": 4,
                                           "duplicate in the batch": 2}, distinct_tasks=25), {}),
}


@pytest.mark.parametrize("name", FINE)
def test_a_healthy_run_raises_no_warning(name):
    """Varied tasks, an agent that learns: silence, whatever the options."""
    fields, options = FINE[name]
    assert kinds(epochs(6, **fields), **options) == (set(), "")


REPEATS = dict(invalid={"duplicate in the batch": 40}, distinct_tasks=8)
SICK = {  # name: (epochs, fields of these last epochs, options, the one warning, words of it)
    "collapses": (3, REPEATS, {}, "collapse", "8 distinct of 48"),
    "is narrow from the start": (6, REPEATS, {}, "collapse", "raise --env-kl"),
    "repeats itself twice as often": (1, dict(distinct_tasks=19), {}, "collapse", "19 distinct"),
    "uses fewer skills": (1, dict(skill_entropy=1.1), {}, "collapse", "2.00 in epoch 1"),
    "is narrow without training": (6, REPEATS, dict(variant="random"), "collapse", "--temperature"),
    "repeats itself with passes": (3, REPEATS, dict(env_passes=1), "collapse", "raise --env-batch"),
    "moves too fast at once": (2, dict(env_capped=1, env_steps=0), dict(env_passes=1), "KL cap",
                               "after 0 steps, two"),
    "starves": (1, dict(env_kept=1), {}, "starvation", "raise --k-min"),
    "starves far from alpha": (1, dict(env_kept=0, success_rate=0.9), {}, "starvation",
                               "move --alpha towards the success rate 0.90"),
    "waits": (5, dict(env_steps=0), dict(env_passes=1), "starvation", "in 5 epochs: lower --env-batch"),
    "copies": (1, dict(invalid={"copy of the seed": 30}, distinct_tasks=15), {}, "copies", "30 of"),
    "babbles": (1, dict(invalid={"malformed": 20, "inconsistent": 10}, distinct_tasks=15), {},
                "invalid", "30 of 48 generations are no task, most often 'malformed' (20)"),
    "is ambiguous": (1, dict(invalid={"no agreement": 30}, distinct_tasks=15), dict(agreement=4),
                     "ambiguous", "30 of 48"),
    "lives on coin flips": (5, dict(replays=30), {}, "exploitation", "120 tasks tried again"),
    "moves too fast": (2, dict(env_capped=1, env_steps=3), {}, "KL cap", "3 of 16 steps"),
    "drifts": (2, dict(env_kl=3.0), {}, "drift", "3.0 nats"),
    "is too hard": (3, dict(success_rate=0.0, zero_variance=1.0, reward=0.0, env_kept=0), {},
                    "stuck", "no task: start from easier"),
    "is too easy": (3, dict(success_rate=1.0, zero_variance=1.0, reward=1.0, env_kept=0), {},
                    "stuck", "every task: raise --env-updates"),
    "is too easy while it waits": (5, dict(success_rate=1.0, zero_variance=1.0, reward=1.0,
                                           env_kept=0, env_steps=0), dict(env_passes=1),
                                   "stuck", "every task: lower --env-batch"),
    "gets cut-off answers": (1, dict(truncated=0.4), {}, "truncated", "40% of the responses"),
    "writes without an end": (1, dict(invalid={"truncated": 12}, distinct_tasks=30), {},
                              "truncated", "12 of 48 generated tasks hit --max-task-tokens"),
    "spoils a step of the agent": (1, dict(skipped_steps=1), {}, "not finite", "lower --agent-lr"),
    "spoils its own steps": (1, dict(env_skipped_steps=3), {}, "not finite", "lower --env-lr"),
    "spoils both": (1, dict(skipped_steps=2, env_skipped_steps=3), {}, "not finite",
                    "--agent-lr and --env-lr"),
    "is scored otherwise": (1, dict(mismatch_mean=0.03, mismatch_max=0.3), {}, "mismatch",
                            "0.030 nats"),
    "is scored otherwise once": (1, dict(mismatch_mean=0.001, mismatch_max=2.5), {}, "mismatch",
                                 "2.50 at most"),
    "moves the agent": (1, dict(other_adapter_moved=True), {}, "leak", "policy.py"),
}


@pytest.mark.parametrize("name", SICK)
def test_a_simulator_that(name):
    """... raises its own warning and no other."""
    n, fields, options, keyword, words = SICK[name]
    found, text = kinds(epochs(n, **fields), **options)
    assert found == {keyword} and words in text, (found, text)
    named = re.findall(r"--([A-Za-z][a-z-]*)", text)  # what to change, by names that exist
    assert named or keyword in ("stuck", "leak")
    assert all(hasattr(genenv.Options, n.replace("-", "_")) for n in named), named


def test_before_any_update_the_advice_is_about_the_model():
    """At epoch 0, or with an untrained simulator, --env-kl changes nothing."""
    found, text = kinds(epochs(1, invalid={"malformed": 30}, distinct_tasks=15, env_kl=0.0))
    assert found == {"invalid"} and "warm start" in text and "--env-kl" not in text


@pytest.mark.parametrize("n, fields", [
    (1, dict(env_kl=3.0)), (1, dict(env_capped=1, env_steps=3)),  # two epochs running
    (2, dict(success_rate=0.0, zero_variance=1.0, reward=0.0, env_kept=0)),
    (5, dict(replays=4))])
def test_what_may_be_chance_is_waited_for(n, fields):
    """One estimate, or few attempts, say nothing yet."""
    assert kinds(epochs(n, **fields)) == (set(), "")


def test_all_or_nothing_tasks_also_starve_a_trained_simulator():
    """No group differs and no task is in the band: two truths, both said."""
    assert kinds(epochs(1, zero_variance=1.0, env_kept=0))[0] == {"no signal", "starvation"}


def test_warnings_are_printed_and_kept(tmp_path, small_ladder, monkeypatch, capsys):
    """Below the epoch's line, in metrics.jsonl and in the report; each is asked with all that was
    before."""
    monkeypatch.setattr(health, "CHECKS", [
        lambda r, history, o: f"collapse: {r['epoch']} of {o.epochs} after {len(history)}"])
    assert genenv.main(["--out", str(tmp_path / "r"), "--base-model", small_ladder, *MICRO,
                        "--epochs", "1"]) == 0
    texts = [r["warnings"] for r in read_jsonl(tmp_path / "r" / "metrics.jsonl")]
    assert texts == [["collapse: 0 of 1 after 0"], ["collapse: 1 of 1 after 1"]]
    assert "  ! collapse: 1 of 1 after 1" in capsys.readouterr().out
    write_report(tmp_path / "r")
    page = (tmp_path / "r" / "report.html").read_text()
    assert page.index("1 of 1 after 1") < page.index("<h2>Curves")


@pytest.mark.parametrize("fields, advised, word", [
    (dict(zero_variance=1.0, reward=0.0, success_rate=0.0, distinct_tasks=0,
          written=0), False, "easier base"),
    (dict(zero_variance=0.99, reward=0.01, success_rate=0.03), False, "easier base tasks"),
    (dict(zero_variance=1.0, reward=1.0, success_rate=0.97), False, "harder base tasks"),
    (dict(zero_variance=1.0, reward=0.5), False, "in between"),
    (dict(zero_variance=0.95, reward=0.1, success_rate=0.1), True, "--G")])
def test_more_rollouts_are_advised_only_where_they_help(fields, advised, word):
    """Sixteen attempts at a task that is never solved end like eight."""
    o = genenv.Options(variant="random")
    text, = health.warnings({**QUIET, **fields}, [QUIET] * 3, o)
    assert text.startswith("no signal") and ("--G" in text) == advised and word in text


# ---------------------------------------------------------------------------------------------
# every check is covered, documented, and has its figure


def keyword_of(check):
    """The word that a check's sentences begin with, from its source."""
    import inspect
    return re.search(r'return \(?f?"([A-Za-z ]+): ', inspect.getsource(check)).group(1)


def test_every_check_has_a_script_and_a_paragraph_with_a_figure():
    """A new warn_ function without its test or its paragraph fails here. What no figure shows is
    named by its key in metrics.jsonl."""
    words = {keyword_of(check) for check in health.CHECKS}
    covered = {keyword for *_, keyword, _ in SICK.values()} | {"no signal"}
    assert len(words) == len(health.CHECKS) and words == covered
    text = (ROOT / "TROUBLESHOOTING.md").read_text()
    paragraphs = dict(re.findall(r"^\*\*([A-Za-z ]+)\*\*(.*?)\n\n", text, re.M | re.S))
    assert set(paragraphs) == words
    figures = set(report.figures(recorded("genenv")[0], {"k_min": 0.2}))
    for word, paragraph in paragraphs.items():
        shown = re.findall(r"figures/(\w+\.png)", paragraph)
        assert (shown or "key" in paragraph) and set(shown) <= figures, word


# ---------------------------------------------------------------------------------------------
# recorded runs of default size


def recorded(name):
    """(records, options) of a recorded run."""
    options, *records = read_jsonl(GOLDEN / f"{name}.jsonl")
    return records, SimpleNamespace(**options)


def test_improvement_is_of_measured_values_alone():
    """Every epoch: later half minus earlier half; with --val-every the last two measurements."""
    each = [{"epoch": t, "validation": v} for t, v in enumerate([.9, .1, .2, .3, .6])]
    assert health.improvement(each, since=1) == pytest.approx(0.3)
    rare = [{**r, "validated": r["epoch"] - r["epoch"] % 4} for r in each]
    assert health.improvement(rare, since=1) == pytest.approx(-0.3)
    assert health.improvement(rare[:3], since=0) == 0


def again(records, options):
    """The records with their warnings computed anew."""
    return [{**r, "warnings": health.warnings(r, records[:i], options)}
            for i, r in enumerate(records)]


@pytest.mark.parametrize("name", ["genenv", "random"])
def test_recorded_default_run_is_healthy(name):
    """The main command as recorded: 24 epochs, both policies learning, no warning."""
    records, options = recorded(name)
    assert len(records) == 25 and options.variant == name
    assert records[-1]["validation"] > records[0]["validation"] + 0.2
    assert not any(r["warnings"] for r in again(records, options))


@pytest.mark.parametrize("name, keyword", [("noise", "exploitation"), ("collapse", "collapse")])
def test_recorded_sick_run_is_named(name, keyword):
    """Half of the rewards turned, and a simulator whose agent had learned next to nothing."""
    warned = [text for r in again(*recorded(name)) for text in r["warnings"]]
    assert {text.partition(":")[0] for text in warned} == {keyword}
