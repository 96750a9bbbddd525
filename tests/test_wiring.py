"""The wiring: was each call of the loop given what the options say, and what came before it?

Usage: python -m pytest -q tests/test_wiring.py

The pure functions and both updates have tests of their own. Here the loop runs on the micro world
of micro_world.py and leaves a tape: every call of the sampler, of the check of what was written
and of both updates, with its arguments. `Told` reads off the tape what was written, tried and
solved in each step. Each test compares one part of Algorithm 1 with that; who changes a part
changes its test.
"""
import json
import math
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import curriculum
from curriculum import in_band
from data_pool import distinct, read_jsonl
import genenv
from helpers import same_run
import micro_world
from micro_world import HELD_OUT, N_BASE, MicroWorld, Scripted, make_task, run_micro
import rwr
from errors import Stopped
from support.metrics import mean
import support.origin
import support.run
from worlds import InvalidTask

BASE = dict(  # no default anywhere: a constant in the place of an option is seen
    seed=5, epochs=6, steps=2, seed_tasks=4, variations=3, G=4, base_share=0.4, temperature=0.7,
    max_task_tokens=7, max_response_tokens=9, max_prompt_tokens=7, val_samples=3, val_every=4,
    agent_lr=0.013, alpha=0.35, alpha_end=0.65, alpha_schedule="linear", beta=5.0, k_min=0.25,
    env_lr=0.017, max_rows=41, threads=3, rank=3, agent_reward="graded",
    difficulty_reward="half", seed_selection="taped")
RUNS = {
    "base": {}, "seed unit": dict(p_hat_unit="seed"),
    "batch unit": dict(p_hat_unit="batch", k_min=0.1),
    "random": dict(variant="random"), "from kept": dict(base_share=0.0)}
UNIT = {"task": "p_hat", "seed": "p_hat_seed", "batch": "p_hat_batch"}
BASE_TEXTS = [make_task(n).text for n in range(N_BASE)]
EPOCHS, VALIDATED = range(7), (0, 4, 6)


class Told:
    """A run as its tape tells it. steps: for each epoch its steps, of each: seeds, the simulator's
    prompts; batch, the tasks that it wrote: (task, rollout, group); tries: (text, p_hat, number of
    valid attempts)."""

    def __init__(self, tape, run):
        o, self.tape, self.run = run.o, tape, run
        self.o = o
        self.steps, self.invalid = [[] for _ in EPOCHS], [Counter() for _ in EPOCHS]
        self.texts = [[] for _ in EPOCHS]  # all that was written: (group, prompt, response)
        seeds, batch = [], []
        for event in tape:
            if event.letter == "W":
                missing, prompts = o.seed_tasks * o.variations - len(batch), event.prompts
                assert len(prompts) == math.ceil(missing / o.variations)
            elif event.letter == "C":
                assert event.kept == [task for task, *_ in batch]
                batch += self.written(event, len(seeds))[:missing]
                seeds += prompts
            elif event.letter == "A":
                self.steps[event.epoch].append(SimpleNamespace(
                    seeds=seeds, batch=batch, tries=self.tries(event)))
                seeds, batch = [], []

    def of(self, letter):
        return [event for event in self.tape if event.letter == letter]

    def written(self, event, before):
        """The tasks among the texts of one call. before: seed tasks of the step so far."""
        t, tasks = event.epoch, []
        before += sum(len(step.seeds) for step in self.steps[t])
        for r, _, task, reason in event.results:
            group = before + r.group
            self.texts[t].append((group, r.prompt, r.response))
            if reason:
                self.invalid[t][reason] += 1
            else:
                tasks.append((task, r, group))
        return tasks

    def score(self, r):
        """(reward, valid) of one response: Eq. 1, and 0 for what never ended."""
        if 0 not in r.response:
            return 0.0, False
        return MicroWorld.score(None, None, self.run.policy.decode(r.response))

    def tries(self, event):
        """(text, p_hat by Eq. 2, number of valid attempts) of every prompt of a call."""
        tries, G = [], event.G
        for i, prompt in enumerate(event.prompts):
            rewards, valid = zip(*map(self.score, event.rollouts[i * G:i * G + G]))
            p_hat = mean(reward >= 0.5 for reward in rewards)
            tries.append((prompt.removesuffix(" ="), p_hat, sum(valid)))
        return tries

    def records(self, t):
        """D_env's records of an epoch: a task with the p_hat of its own, its seed, its step."""
        records = []
        for step in self.steps[t]:
            newest = {text: p_hat for text, p_hat, _ in step.tries}
            new = [SimpleNamespace(prompt=r.prompt, response=r.response, group=group, epoch=t,
                                   keys=[f"n{task.spec['n']}"], p_hat=newest[task.text])
                   for task, r, group in step.batch]
            for r in new:
                r.p_hat_seed = mean(other.p_hat for other in new if other.group == r.group)
                r.p_hat_batch = mean(other.p_hat for other in new)
            records += new
        return records

    def near(self, records, alpha):
        """Those in the band."""
        unit = UNIT[self.o.p_hat_unit]
        return [r for r in records if in_band(getattr(r, unit), alpha, self.o.k_min)]


@pytest.fixture(scope="module", params=RUNS)
def told(request, tmp_path_factory):
    """A whole run, and what its tape tells."""
    folder = tmp_path_factory.mktemp("wiring") / "r"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rwr, "KL_SEEDS", 5)
        told = Told(*run_micro(patch, folder, **{**BASE, **RUNS[request.param]}))
        told.name, told.alphas, told.threads = request.param, Scripted.alphas, Scripted.threads
    return told


# ---------------------------------------------------------------------------------------------
# Algorithm 1, part by part


def test_calls_come_in_order_and_have_the_options(told):
    """Generate, try, train the agent, in every step; then the simulator, and validation."""
    o, run, seed = told.o, told.run, 3 * BASE["seed"]
    update = "R" if o.variant == "genenv" else ""
    for t in EPOCHS:
        letters = "".join(event.letter for event in told.tape if event.epoch == t)
        steps = "((WC){1,4}AG){2}" + update if t else "(WC){1,4}A"
        assert re.fullmatch(steps + ("Vv" if t in VALIDATED else ""), letters), (t, letters)
    assert "WCWC" in "".join(event.letter for event in told.tape)  # written again, to fill a batch
    expected = {
        "W": ("env", o.variations, 7, 0.7, seed + 1), "A": ("agent", 4, 9, 0.7, seed + 1),
        "V": ("agent", 3, 9, 0.7, seed + 2), "v": ("agent", 1, 9, 0.0, seed + 2),
        "G": ("agent", o, seed), "R": ("env", o, seed)}
    for e in told.tape:
        assert e.letter == "C" or e.how == expected[e.letter]
    assert {e.max_rows for e in told.of("A")} == {41} and told.threads == [3]
    assert {e.optimizer for e in told.of("G")} == {run.agent_optimizer}
    assert {e.optimizer for e in told.of("R")} <= {run.env_optimizer}
    assert run.policy.rates == {"agent": o.agent_lr, "env": o.env_lr}


def test_seed_tasks_are_of_the_base_or_recent(told):
    """And the simulator is told their success rate, if it was measured in the last two epochs."""
    measured, seen = {}, set()
    for t in EPOCHS:
        for step in told.steps[t]:
            for prompt in step.seeds:
                said, text = re.fullmatch(r"vary (\S+) (task .*) =>", prompt).groups()
                p_hat, at = measured.get(text, (None, 0))
                recent = p_hat is not None and t - at <= 2
                assert said == repr(p_hat if recent else None)
                assert text in BASE_TEXTS or recent
                if not told.o.base_share and t:
                    assert text not in BASE_TEXTS
                seen.add((recent, text in measured))
            measured |= {text: (p_hat, t) for text, p_hat, _ in step.tries}
    assert len(seen) == 3 or told.name != "base"
    alphas = {round(alpha, 6) for alpha in told.alphas}
    assert alphas == {record["alpha"] for record in told.run.history[1:]}


def test_the_agent_tries_new_tasks_and_some_of_d_train_which_keeps_them(told):
    """A batch of 12 and an eighth more; kept are p_hat by Eq. 1 and the valid attempts."""
    expected, kept, again = [], set(BASE_TEXTS), set()
    for t in EPOCHS:
        for step in told.steps[t]:
            texts = [text for text, *_ in step.tries]
            new = [task.text for task, *_ in step.batch]
            assert texts[:len(new)] == new and kept.issuperset(texts[len(new):])
            assert len(texts) == (14 if t else len(new))
            again.update(texts[len(new):])
            for text, p_hat, valid in step.tries:
                if valid or text in kept:
                    kept.add(text)
                    expected.append((text, p_hat, t, valid))
    assert again.isdisjoint(BASE_TEXTS) == (told.o.base_share == 0)
    for line, mine in zip(read_jsonl(told.run.folder / "train.jsonl"), expected, strict=True):
        text, traces = line["task"]["text"], line["traces"]
        assert (text, line["p_hat"], line["epoch"], len(traces)) == mine


def test_grpo_learns_from_the_reward_of_the_option(told):
    """Here `graded`, 0.4 of Eq. 1 and 0.01; what was cut earns nothing."""
    for tried, update in zip(told.of("A")[1:], told.of("G"), strict=True):
        rollouts, rewards = update.given
        assert rollouts == tried.rollouts
        graded = [0.4 * told.score(r)[0] + 0.01 if 0 in r.response else 0.0 for r in rollouts]
        assert rewards.flatten().tolist() == pytest.approx(graded)


def test_rwr_learns_from_the_band_of_this_epoch_and_of_d_env(told):
    """Each task once, R_env by the reward of the option, Eq. 3; and a KL sample of all texts."""
    o, updates = told.o, told.of("R")
    for t, record in enumerate(told.run.history):
        alpha = 0.35 + 0.3 * max(0, t - 1) / 5
        assert record["alpha"] == pytest.approx(alpha)
        fresh = distinct(told.records(t))
        again = [r.keys for r in fresh]
        aged = distinct([r for at in EPOCHS[1:t] if t - at <= 4 for r in told.records(at)])
        fresh = told.near(fresh, alpha)
        old = told.near([r for r in aged if r.keys not in again], alpha)
        assert record["env_kept"] == len(fresh)
        if t and o.variant == "genenv":
            *given, kl_sample = updates.pop(0).given
            for mine, records in zip((fresh, old), given):
                assert [(r.prompt, r.response) for r in mine] == \
                    [(r.prompt, r.response) for r in records]
                gaps = [getattr(r, UNIT[o.p_hat_unit]) - alpha for r in mine]
                R_env = [0.5 * math.exp(-5 * gap ** 2) for gap in gaps]
                assert [r.r_env for r in records] == pytest.approx(R_env)
            sampled = [(r.group, r.prompt, r.response) for r in kl_sample]
            groups = {group for group, *_ in sampled}
            assert sorted(sampled) == sorted(x for x in told.texts[t] if x[0] in groups)
            assert len(groups) == 5
    assert not updates
    records = [record for t in EPOCHS[1:] for record in told.records(t)]
    lines = read_jsonl(told.run.folder / "env.jsonl")
    for mine, line in zip(records, lines, strict=True):
        assert vars(mine).items() <= line.items()


def test_what_an_epoch_records(told):
    """Success of new tasks, counts, the pools; validation where it was measured, and in between."""
    validated, d_env = told.of("V"), 0
    lines = read_jsonl(told.run.folder / "train.jsonl")
    for t, record in enumerate(told.run.history):
        new = {}
        for step in told.steps[t]:
            for text, p_hat, _ in step.tries[:len(step.batch)]:
                new.setdefault(text, p_hat)
        kept = {line["task"]["text"] for line in lines if line["epoch"] <= t}
        d_env += len(told.records(t)) if t else 0
        assert record["success_rate"] == pytest.approx(mean(new.values()), abs=2e-6)
        assert (record["epoch"], record["distinct_tasks"]) == (t, len(new))
        assert record["invalid"] == dict(told.invalid[t])
        assert record["written"] == len(told.texts[t])
        cut = [0 not in r.response for e in told.of("A") if e.epoch == t for r in e.rollouts]
        assert record["truncated"] == pytest.approx(mean(cut), abs=2e-6)
        assert (record["d_train"], record["d_env"]) == (len(kept.union(BASE_TEXTS)), d_env)
        assert not record["other_adapter_moved"] and record["entropy"] == pytest.approx(0.5)
        if t in VALIDATED:
            texts, p_hats, _ = zip(*told.tries(validated.pop(0)))
            assert texts == tuple(make_task(n).text for n in HELD_OUT["validation"])
            assert record["validation"] == pytest.approx(mean(p_hats), abs=2e-6)
        repeated = {key for key in record if key.startswith("validat")}
        before = told.run.history[t - 1]
        assert t in VALIDATED or all(record[key] == before[key] for key in repeated)
    assert [r["validated"] for r in told.run.history] == [0, 0, 0, 0, 4, 4, 6]
    assert len(sum(told.invalid, Counter())) == 6 or told.name != "base"


# ---------------------------------------------------------------------------------------------
# other runs


@pytest.mark.parametrize("variant", ["teacher", "base", "static"])
def test_variants_without_a_simulator(variant, tmp_path, monkeypatch):
    """Every task comes from the base, the teacher's file or the untrained simulator, which writes
    once; it is never trained."""
    path, taught = tmp_path / "teacher.jsonl", [make_task(n).text for n in range(20, 60)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in taught))
    options = {**BASE, "variant": variant}
    if variant == "teacher":
        options["teacher_tasks"] = str(path)
    tape, run = run_micro(monkeypatch, tmp_path / "r", **options)
    assert sum(e.letter == "W" for e in tape) == (variant == "static")
    tried = {prompt.removesuffix(" =") for e in tape if e.letter == "A" for prompt in e.prompts}
    new = tried.difference(BASE_TEXTS)
    assert len(new) > 20 or variant == "base"  # more than the few that are replayed
    if variant != "static":
        assert new.issubset(taught if variant == "teacher" else ())
    assert run.history[-1]["d_env"] == 0
    assert run.policy.params["env"][0][0] == 0


def test_a_task_is_imitated_in_one_epoch_only_where_its_world_says_so(tmp_path, monkeypatch):
    """Also after a resume: otherwise the simulator imitates its few favourites for ever."""
    monkeypatch.setattr(MicroWorld, "imitate_once", True)
    options = {**BASE, "alpha_schedule": "taped"}
    seen, (alone, _) = [], run_micro(monkeypatch, tmp_path / "a", **options)
    for epochs in (3, 6):
        options |= {"epochs": epochs, "resume": epochs == 6}
        run_micro(monkeypatch, tmp_path / "b", **options)
        seen += [e.given[:2] for e in Scripted.tape if e.letter == "R"]
    assert seen == [e.given[:2] for e in alone if e.letter == "R"]
    imitated = [{key for r in fresh + old for key in r.keys} for fresh, old in seen]
    assert all(imitated) and sum(map(len, imitated)) == len(set.union(*imitated))


def test_an_update_without_a_step_uses_no_task_up(tmp_path, monkeypatch):
    """Where a task is imitated in one epoch only, it may still be imitated later."""
    monkeypatch.setattr(MicroWorld, "imitate_once", True)
    for env_steps in (1, 0):
        monkeypatch.setitem(micro_world.STATS, "env_steps", env_steps)
        _, run = run_micro(monkeypatch, tmp_path / str(env_steps), **BASE)
        assert bool(run.state.imitated) == (env_steps == 1)


def test_a_leak_into_the_other_adapter_is_seen(tmp_path, monkeypatch):
    """An update that moves both adapters is told on."""
    def leaking(letter):
        def both(policy, *given):
            with torch.no_grad():
                policy.params["env"][0][1] += 1e-12
            return dict(micro_world.STATS)
        return both

    monkeypatch.setattr(micro_world, "update", leaking)
    _, run = run_micro(monkeypatch, tmp_path / "r", **{**BASE, "epochs": 1})
    assert run.history[1]["other_adapter_moved"]


def test_a_simulator_with_a_model_of_its_own(tmp_path, monkeypatch):
    """--env-model: it alone writes, and learns what was written."""
    own = Scripted(genenv.Options(), ("env",))
    monkeypatch.setattr(support.run, "open_policy", lambda model, o, names: own)
    monkeypatch.setattr(support.origin, "inputs", lambda o: {})  # there is no such model
    tape, run = run_micro(monkeypatch, tmp_path / "r", **{**BASE, "env_model": "other"})
    assert {e.policy for e in tape if e.letter in "WR"} == {own}
    assert {e.policy for e in tape if e.letter in "AG"} == {run.policy} != {own}
    assert {path.name for path in (run.folder / "adapters").iterdir()} == {"agent", "env"}
    assert run.policy.rates.keys() == {"agent"}
    assert own.params["env"][0][0].item() == BASE["epochs"]


def test_schedules_see_how_the_run_goes(tmp_path, monkeypatch):
    """What an alpha schedule is told; an epoch without tasks leaves the last success as it was."""
    parse = MicroWorld.parse_task

    def parse_task(self, text, seed_task, epoch):
        if epoch == 2:
            raise InvalidTask("malformed")
        return parse(self, text, seed_task, epoch)

    monkeypatch.setattr(MicroWorld, "parse_task", parse_task)
    options = {**BASE, "alpha_schedule": "taped", "epochs": 4}
    records = run_micro(monkeypatch, tmp_path / "r", **options)[1].history
    assert [r["alpha"] for r in records] == pytest.approx([.35, .3, .4, .5, .6])
    assert records[2]["distinct_tasks"] == 0
    for context, before, last in zip(Scripted.contexts, (0, 1, 2, 3), (0, 1, 1, 3), strict=True):
        seen = records[last]
        assert context == curriculum.Context(
            before + 1, 4, 0.35, 0.65, records[before]["alpha"],
            records[before]["distinct_tasks"], seen["success_rate"],
            seen["mixed_share"], seen["p_hat_counts"], seen["mixed_of_possible"])


@pytest.mark.parametrize("variant, at", [
    ("static", 1), ("genenv", 1), ("genenv", 2), ("genenv", 4)])
def test_a_stopped_run_goes_on_to_the_same_end(variant, at, tmp_path, monkeypatch):
    """Stopped inside epoch 0, or between the steps of the first or a later one."""
    options = {**BASE, "variant": variant, "epochs": 3}
    with monkeypatch.context() as patch:
        run_micro(patch, tmp_path / "a", **options)
    interact, calls = genenv.interact, []

    def stop(run, tasks):
        calls.append(run)
        if len(calls) == at:
            run.stop = 15
        return interact(run, tasks)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(genenv, "interact", stop)
        run_micro(patch, tmp_path / "b", **options)
    run_micro(monkeypatch, tmp_path / "b", resume=True, **options)
    same_run(tmp_path / "a", tmp_path / "b")
