"""Each way of going wrong raises its own warning and no other; a healthy run raises none.

    python -m pytest -q tests/test_health.py

The simulators and agents are scripts: what they write and how often they succeed is known, so the
warning they deserve is too. Everything else is the real loop, with its pools and both updates. Runs
of default size that went well, and two that did not, are in tests/golden/health as they were
recorded: metrics.jsonl of `python genenv.py`, with the options named in the first line.
"""
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import genenv
from watch import health, report
from conftest import write_report
from common.files import read_jsonl
from policy import Policy, Rollout
from worlds import ladder

GOLDEN = Path(__file__).with_name("golden") / "health"
ROOT = Path(__file__).parent.parent
SMALL = ["--threads", "1", "--no-gate", "--rank", "4", "--epochs", "6", "--steps", "2", "--seed-tasks", "4",
         "--replay", "1", "--env-kl-sample", "32", "--val-samples", "2", "--env-updates", "3", "--env-lr", "1e-4",
         "--agent-lr", "1e-4", "--k-min", "0.26", "--env-kl-cap", "0.15"]


# ---------------------------------------------------------------------------------------------
# scripts


def vary(seed, rng, t):
    """What a healthy simulator writes: the seed with new tools at some places."""
    tools = [tool if rng.random() < 0.5 else rng.choice(ladder.NAMES)
             for tool in seed.split()[2::2]]
    tools += rng.choices(ladder.NAMES, k=rng.randrange(4))
    return f"{rng.randrange(10)} {ladder._chain(tools[:ladder.MAX_STEPS])}"


def few(seed, rng, t):
    """A handful of tasks, over and over."""
    return f"{rng.randrange(4)} s1 hop s2 tpl s3 mir s4 sqr s5 half"


def easy(seed, rng, t):
    """Ever other chains, but of two tools."""
    return f"{rng.randrange(10)} {ladder._chain(rng.choices(ladder.NAMES[:2], k=5))}"


def later(write, since=3):
    """Healthy until an epoch, then `write`."""
    return lambda seed, rng, t: (write if t >= since else vary)(seed, rng, t)


def mostly(write, share):
    """`write` in a share of the cases, else healthy."""
    return lambda seed, rng, t: (write if rng.random() < share else vary)(seed, rng, t)


def learning(task, t):
    """Tasks of every difficulty, and an agent that gets better at all of them."""
    return min(0.95, 0.1 + 0.6 * int(task.id[:4], 16) / 0xffff + 0.06 * t)


def slowly(task, t):
    """The same for all tasks, and never out of the band: a handful of tasks does not starve."""
    return 0.3 + 0.05 * t


def flat(p):
    """An agent whose success never changes."""
    return lambda task, t: p


def all_or_nothing(task, t):
    """Half of the tasks always, the others never."""
    return float(int(task.id[:4], 16) % 2)


def scripted(monkeypatch, write=vary, p=learning, p_agree=None, cut=0.0, cut_tasks=0.0):
    """Replace sampling and scoring. write(seed text, rng, epoch) -> text of the simulator;
    p(task, epoch) -> success rate of the agent, p_agree of the simulator at its own tasks;
    cut, cut_tasks: shares of responses and of tasks that do not end."""
    rng, now = random.Random(0), SimpleNamespace(epoch=0)

    def sample(self, adapter, prompts, G=1, *args, **kwargs):
        rollouts = []
        for i in range(len(prompts) * G):
            asked = self.decode(prompts[i // G])
            if asked.startswith("vary"):
                text, share = write(asked.removesuffix(" =>").split(" ", 2)[2], rng,
                                    now.epoch), cut_tasks
            else:  # the first tool tells the simulator's own attempts from the agent's
                tool = "dec" if adapter == "env" else "inc"
                text, share = f"s1 {tool} {rng.randrange(10)}", cut
            truncated = rng.random() < share
            ids = self.encode(text) + [self.tokenizer.eos_token_id] * (not truncated)
            rollouts.append(Rollout(i // G, prompts[i // G], ids, (),
                                    "too many tokens" * truncated))
        return rollouts

    def score(task, response):
        own = p_agree is not None and response.startswith("s1 dec")
        rate = p_agree(task, now.epoch) if own else p(task, now.epoch)
        return float(rng.random() < rate), True

    def epoch(run, real=genenv.epoch):
        now.epoch = run.state.epoch
        real(run)

    monkeypatch.setattr(Policy, "sample", sample)
    monkeypatch.setattr(ladder, "score", score)
    monkeypatch.setattr(genenv, "epoch", epoch)
    monkeypatch.setattr(genenv.frame, "finish", lambda run: None)  # figures are tested elsewhere


def kinds(records):
    """The keywords of all warnings of a run."""
    return {w.partition(":")[0] for r in records for w in r["warnings"]}


def run(out, small_ladder, *options):
    """The records of a run with a script."""
    assert genenv.main(["--out", str(out), "--base-model", small_ladder, *SMALL, *options]) == 0
    return read_jsonl(out / "metrics.jsonl")


# so that tasks of small runs are met again, and validation is measured well
MUCH_REPLAY = ["--replay", "2", "--base-share", "0.25", "--val-samples", "8"]
HEALTHY = {
    "default": [], "random": ["--variant", "random"], "static": ["--variant", "static"],
    "agreement": ["--agreement", "1"], "much replay": MUCH_REPLAY, "G = 4": ["--G", "4"],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_script_raises_no_warning(name, tmp_path, small_ladder, monkeypatch):
    """Varied tasks, an agent that learns: silence, whatever the options."""
    scripted(monkeypatch)
    records = run(tmp_path / "r", small_ladder, *HEALTHY[name])
    assert kinds(records) == set(), [r["warnings"] for r in records]


SICK = {  # name: (script, options, the one warning that it deserves)
    "collapses": (dict(write=later(few)), [], "collapse"),
    "is narrow from the start": (dict(write=few, p=slowly), [], "collapse"),
    "starves": (dict(p=flat(0.9)), ["--k-min", "0.1"], "starvation"),
    "copies": (dict(write=mostly(lambda seed, rng, t: seed, 0.6)), [], "copies"),
    "babbles": (dict(write=mostly(lambda seed, rng, t: "s1 s1 inc =", 0.8)), [], "invalid"),
    "is ambiguous": (dict(p_agree=flat(0.05)), ["--agreement", "4"], "ambiguous"),
    "lives on coin flips": (dict(p=flat(0.5)), MUCH_REPLAY, "exploitation"),
    "moves too fast": ({}, ["--env-kl-cap", "1e-9"], "KL cap"),
    "drifts": ({}, ["--env-lr", "0.5", "--env-kl", "0", "--env-kl-cap", "1e9",
                      "--env-updates", "12"], "drift"),
    "is too hard": (dict(p=flat(0.0)), [], "stuck"),
    "is too easy": (dict(p=flat(1.0)), [], "stuck"),
    "is all or nothing": (dict(p=all_or_nothing), ["--variant", "random"], "no signal"),
    "gets cut-off answers": (dict(cut=0.4), [], "truncated"),
}


@pytest.mark.parametrize("name", SICK)
def test_a_simulator_that(name, tmp_path, small_ladder, monkeypatch):
    """... raises its own warning and no other."""
    script, options, keyword = SICK[name]
    scripted(monkeypatch, **script)
    records = run(tmp_path / "r", small_ladder, *options)
    assert kinds(records) == {keyword}, [r["warnings"] for r in records]
    text = next(w for r in records for w in r["warnings"])
    named = re.findall(r"--([A-Za-z][a-z-]*)", text)  # what to change, by names that exist
    assert named or "base tasks" in text
    assert all(hasattr(genenv.Options, n.replace("-", "_")) for n in named), named


def test_all_or_nothing_tasks_also_starve_a_trained_simulator(tmp_path, small_ladder, monkeypatch):
    """No group differs and no task is in the band: two truths, both said."""
    scripted(monkeypatch, p=all_or_nothing)
    assert kinds(run(tmp_path / "r", small_ladder)) == {"no signal", "starvation"}


def test_a_warning_ends_with_its_cause(tmp_path, small_ladder, monkeypatch):
    """A simulator that babbles for two epochs only is not accused afterwards."""
    babble = lambda seed, rng, t: "dbl" if t in (2, 3) and rng.random() < 0.8 else vary(seed, rng, t)
    scripted(monkeypatch, write=babble)
    warned = [r["epoch"] for r in run(tmp_path / "r", small_ladder) if r["warnings"]]
    assert warned == [2, 3]


def test_warnings_are_printed_and_kept(tmp_path, small_ladder, monkeypatch, capsys):
    """Below the epoch's line, in metrics.jsonl and in the report."""
    scripted(monkeypatch, write=few)
    records = run(tmp_path / "r", small_ladder, "--epochs", "2")
    text = records[-1]["warnings"][0]
    assert f"  ! {text}" in capsys.readouterr().out
    write_report(tmp_path / "r")
    page = (tmp_path / "r" / "report.html").read_text()
    assert page.index("the simulator repeats itself") < page.index("<h2>Curves")


# ---------------------------------------------------------------------------------------------
# what a script cannot bring about: records with the fields in question


QUIET = dict(epoch=3, alpha=0.5, success_rate=0.5, validation=0.5, distinct_tasks=40, reward=0.5,
             skill_entropy=2.0, written=48, invalid={}, truncated=0.0, zero_variance=0.2, replays=0,
             replay_gain=0.0, env_kept=20, env_kl=0.1, env_kl_step=0.1, env_steps=16, env_capped=0)
FORGED = {  # name: (fields of the record, the keyword, words of the sentence)
    "a step of the agent": (dict(skipped_steps=1), "not finite", "lower --agent-lr"),
    "steps of the simulator": (dict(env_skipped_steps=3), "not finite", "lower --env-lr"),
    "steps of both": (dict(skipped_steps=2, env_skipped_steps=3), "not finite",
                      "--agent-lr and --env-lr"),
    "mean": (dict(mismatch_mean=0.03, mismatch_max=0.3), "mismatch", "0.030 nats"),
    "one token": (dict(mismatch_mean=0.001, mismatch_max=1.5), "mismatch", "1.50 at most"),
    "leak": (dict(other_adapter_moved=True), "leak", "policy.py"),
}


@pytest.mark.parametrize("name", FORGED)
def test_record_with(name):
    """... raises its own warning and no other."""
    fields, keyword, words = FORGED[name]
    found = health.warnings({**QUIET, **fields}, [QUIET] * 3, genenv.Options())
    assert len(found) == 1 and found[0].startswith(f"{keyword}: ") and words in found[0], found


def test_rounding_and_zeros_are_no_trouble():
    """Differences that bf16 makes, and the counts of a run without trouble; or no such fields."""
    fine = dict(skipped_steps=0, env_skipped_steps=0, mismatch_mean=0.015, mismatch_max=0.1,
                other_adapter_moved=False)
    for record in (QUIET, {**QUIET, **fine}):
        assert health.warnings(record, [QUIET] * 3, genenv.Options()) == []


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
    covered = {k for _, _, k in SICK.values()} | {k for _, k, _ in FORGED.values()}
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
    lines = read_jsonl(GOLDEN / f"{name}.jsonl")
    return lines[1:], SimpleNamespace(**lines[0])


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
    assert kinds(again(records, options)) == set()


@pytest.mark.parametrize("name, keyword", [("noise", "exploitation"), ("collapse", "collapse")])
def test_recorded_sick_run_is_named(name, keyword):
    """Half of the rewards turned, and a simulator whose agent had learned next to nothing."""
    assert kinds(again(*recorded(name))) == {keyword}
