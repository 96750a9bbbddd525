"""The wiring: was each call of the loop given what the options say? Algorithm 1 told once more, plainly.

Usage: python -m pytest -q tests/test_wiring.py

The pure functions and both updates have tests of their own. Here the loop runs on the micro world of
micro_world.py and leaves a tape: every call of the sampler and of both updates, with its arguments.
`Plain` walks along the tape and says from the Options alone what each call had to be.
"""
import json
import math
from collections import Counter

import pytest
import torch

import curriculum
import genenv
import micro_world
from micro_world import HELD_OUT, N_BASE, MicroWorld, Scripted, make_task, run_micro
import rwr
from model.files import Stopped, read_jsonl
import support.run
from worlds import InvalidTask

BASE = dict(  # no default anywhere: a constant in the place of an option is seen
    seed=5, epochs=5, steps=2, seed_tasks=4, variations=3, G=4, base_share=0.4, temperature=0.7,
    max_task_tokens=7, max_response_tokens=9, max_prompt_tokens=7, val_samples=3, agent_lr=0.013,
    alpha=0.35, alpha_end=0.65, alpha_schedule="linear", beta=5.0, k_min=0.25, env_lr=0.017,
    max_rows=41)
RUNS = {
    "base": {}, "seed unit": dict(p_hat_unit="seed"), "batch unit": dict(p_hat_unit="batch", k_min=0.1),
    "random": dict(variant="random"), "from kept": dict(base_share=0.0)}
UNIT = {"task": "p_hat", "seed": "p_hat_seed", "batch": "p_hat_batch"}


def mean(values):
    return sum(values) / len(values) if values else 0.0


class Plain:
    """Algorithm 1 from its description and a tape. `check` walks along the whole run."""

    def __init__(self, o, tape, run):
        self.o, self.tape, self.run = o, list(tape), run
        self.tasks = {t.id: t for t in (make_task(n, 0, "base") for n in range(N_BASE))}  # D_train
        self.p_hat, self.d_env, self.seen = {}, [], Counter()

    def check(self):
        o = self.o
        for t in range(o.epochs + 1):
            self.t, self.alpha = t, o.alpha + (o.alpha_end - o.alpha) * max(0, t - 1) / (o.epochs - 1)
            self.texts, self.invalid, self.fresh, self.new = [], Counter(), [], {}
            for _ in range(o.steps if t else 1):
                self.step()
            self.measure(self.environment())
        assert not self.tape
        assert self.run.policy.rates == {"agent": o.agent_lr, "env": o.env_lr}
        return self

    def take(self, call, adapter):
        event = self.tape.pop(0)
        assert (event.call, event.adapter) == (call, adapter)
        return event

    def sampled(self, adapter, G, T, generator=1):
        o, e = self.o, self.take("sample", adapter)
        assert (e.G, e.T, e.temperature, e.generator) == (G, T, o.temperature, 3 * o.seed + generator)
        return e

    def step(self):
        """One step: tasks, attempts, the agent's update, what is kept."""
        batch = self.generate()
        tries = self.attempt([task for task, _, _ in batch])
        for task, p_hat, valid in tries:
            if valid or task.id in self.tasks:
                self.tasks.setdefault(task.id, task)
                self.p_hat[task.id] = p_hat, self.t
        newest = {task.id: p for task, p, _ in tries}
        records = [dict(task_id=task.id, keys=[f"n{task.spec['n']}"], prompt=r.prompt, group=group,
                        response=r.response, p_hat=newest[task.id], epoch=self.t)
                   for task, r, group in batch]
        for r in records:
            r["p_hat_seed"] = mean([x["p_hat"] for x in records if x["group"] == r["group"]])
            r["p_hat_batch"] = mean([x["p_hat"] for x in records])
        self.fresh += records

    def generate(self):
        """What the simulator was asked, and which of its texts are tasks: (task, rollout, group)."""
        o, batch = self.o, []
        for _ in range(4):
            missing = o.seed_tasks * o.variations - len(batch)
            if not missing:
                break
            e, new, first = self.sampled("env", o.variations, o.max_task_tokens), [], len(self.texts)
            assert len(e.prompts) == math.ceil(missing / o.variations)
            seeds = [self.seed_of(prompt) for prompt in e.prompts]
            self.texts += [(e.rollouts[i * o.variations].prompt, []) for i in range(len(seeds))]
            for r in e.rollouts:
                seed, text = seeds[r.group], self.run.policy.decode(r.response)
                self.texts[first + r.group][1].append(r.response)
                reason = self.reason(r, text, seed, {task.spec["n"] for task, _, _ in batch + new})
                if reason:
                    self.invalid[reason] += 1
                else:
                    task = make_task(int(text[5] + text[7]), text.count("x"), "env", seed.id, self.t)
                    new.append((task, r, first + r.group))
            batch += new[:missing]
        return batch

    def seed_of(self, prompt):
        """The seed task of a prompt: of the base, or one whose success was measured lately."""
        text = prompt[prompt.index("task"):-3]
        task = next(task for task in self.tasks.values() if task.text == text)
        p, at = self.p_hat.get(task.id, (None, 0))
        known = p if self.t - at <= 2 else None
        assert prompt == f"vary {known!r} {text} =>"
        assert task.origin == "base" or known is not None
        recent = any(self.tasks[i].origin == "env" and self.t - at <= 2 for i, (_, at) in self.p_hat.items())
        assert self.o.base_share or not recent or task.origin == "env"
        self.seen["known" if known is not None else "stale" if p is not None else "unknown"] += 1
        return task

    def reason(self, r, text, seed_task, before):
        """Why a text is not a task; "" if it is one."""
        words = text.split()
        if 0 not in r.response:
            return "truncated"
        if words[0] != "task":
            return "malformed"
        n = int(words[1] + words[2])
        if n == seed_task.spec["n"]:
            return "copy of the seed"
        if n >= 90:
            return "held-out task"
        if len(words) + 3 > self.o.max_prompt_tokens:
            return "prompt too long"
        return "duplicate in the batch" if n in before else ""

    def score(self, r):
        """(reward, valid) of one response: Eq. 1, and 0 for what never ended."""
        words = self.run.policy.decode(r.response).split()
        valid = 0 in r.response and "junk" not in words
        reward = 1.0 if words[0] == "right" else {1: .4, 2: .7}.get(words.count("half"), 0.0)
        return (reward if valid else 0.0), valid

    def attempt(self, tasks):
        """G attempts at every task, the new ones and then those of D_train, and GRPO on them."""
        o, e = self.o, self.sampled("agent", self.o.G, self.o.max_response_tokens)
        assert e.max_rows == o.max_rows and e.prompts[:len(tasks)] == [f"{t.text} =" for t in tasks]
        size = round(o.seed_tasks * o.variations * 9 / 8) if self.t else len(tasks)
        pool = {f"{t.text} =": t for t in self.tasks.values()}
        tasks = tasks + [pool[prompt] for prompt in e.prompts[len(tasks):]]
        assert len(tasks) == size
        scores = [self.score(r) for r in e.rollouts]
        if self.t:
            update = self.take("grpo_update", "agent")
            rollouts, rewards, options, generator = update.given
            assert (rollouts, options, generator) == (e.rollouts, o, 3 * o.seed)
            assert update.optimizer is self.run.agent_optimizer
            assert rewards.flatten().tolist() == pytest.approx([reward for reward, _ in scores])
        tries = []
        for b, task in enumerate(tasks):
            own = scores[b * o.G:(b + 1) * o.G]
            tries.append((task, sum(r >= 0.5 for r, _ in own) / o.G, any(valid for _, valid in own)))
            if task.epoch == self.t and task.origin == "env":
                self.new.setdefault(task.id, tries[-1][1])
        return tries

    def environment(self):
        """Eq. 3, the filter and the simulator's update of an epoch; returns the kept fresh records."""
        o, t = self.o, self.t
        fresh, old = once(self.fresh), once([r for r in self.d_env if t - r["epoch"] <= 4])
        written = [r["keys"] for r in self.fresh]
        self.seen["written again"] += any(r["keys"] in written for r in old)
        self.seen["written twice"] += len(fresh) < len(self.fresh)
        inside = lambda r: abs(r[UNIT[o.p_hat_unit]] - self.alpha) <= o.k_min + 1e-9
        fresh, old = list(filter(inside, fresh)), [r for r in old if inside(r) and r["keys"] not in written]
        self.d_env += self.fresh if t else []
        if t and o.variant == "genenv":
            self.update_environment(fresh, old)
        return fresh

    def update_environment(self, mine_fresh, mine_old):
        """What RWR was given: R_env, and a KL sample of all texts of some seed tasks."""
        o, update = self.o, self.take("rwr_update", "env")
        fresh, old, kl_sample, options, generator = update.given
        assert update.optimizer is self.run.env_optimizer and options == o and generator == 3 * o.seed
        for given, mine in ((fresh, mine_fresh), (old, mine_old)):
            assert [(r.prompt, r.response) for r in given] == [(r["prompt"], r["response"]) for r in mine]
            R = [math.exp(-o.beta * (r[UNIT[o.p_hat_unit]] - self.alpha) ** 2) for r in mine]  # Eq. 3
            assert [r.r_env for r in given] == pytest.approx(R)
        chosen = sorted({r.group for r in kl_sample})
        assert len(chosen) == min(rwr.KL_SEEDS, len(self.texts))
        listed = [(r.prompt, r.response) for i in chosen for r in kl_sample if r.group == i]
        assert listed == [(self.texts[i][0], text) for i in chosen for text in self.texts[i][1]]
        self.seen["not the first"] += chosen != list(range(len(chosen)))

    def measure(self, kept):
        """Validation, and the record of the epoch."""
        o = self.o
        sampled, greedy = self.tape.pop(0), self.tape.pop(0)
        for e, G, temperature in ((sampled, o.val_samples, o.temperature), (greedy, 1, 0.0)):
            assert e.prompts == [f"{make_task(n).text} =" for n in HELD_OUT["validation"]]
            assert (e.adapter, e.G, e.temperature, e.generator) == ("agent", G, temperature, 3 * o.seed + 2)
        hits = [self.score(r)[0] >= 0.5 for r in sampled.rollouts]
        mine = dict(epoch=self.t, alpha=self.alpha, validation=mean(hits), env_kept=len(kept),
                    success_rate=mean(list(self.new.values())), distinct_tasks=len(self.new),
                    invalid=dict(self.invalid), written=sum(len(texts) for _, texts in self.texts),
                    d_train=len(self.tasks), d_env=len(self.d_env), other_adapter_moved=False)
        record = {name: self.run.history[self.t][name] for name in mine}
        assert record == {name: pytest.approx(value, abs=2e-6) if isinstance(value, float) else value
                          for name, value in mine.items()}


def once(records):
    """Each task once, as it was written last."""
    return [r for i, r in enumerate(records)
            if not any(r["keys"] == later["keys"] for later in records[i + 1:])]


@pytest.mark.parametrize("name", RUNS)
def test_the_loop_does_what_the_options_say(name, tmp_path, monkeypatch):
    """A whole run, call by call; and what could go wrong came up in it."""
    monkeypatch.setattr(rwr, "KL_SEEDS", 5)
    o, tape, run = run_micro(monkeypatch, tmp_path / "r", **{**BASE, **RUNS[name]})
    plain = Plain(o, tape, run).check()
    if name == "base":
        met = ("known", "stale", "unknown", "written again", "written twice", "not the first")
        assert all(plain.seen[what] for what in met), plain.seen
        reasons = {reason for r in run.history for reason in r["invalid"]}
        assert reasons == {"truncated", "malformed", "copy of the seed", "held-out task",
                           "prompt too long", "duplicate in the batch"}


@pytest.mark.parametrize("variant", ["teacher", "base", "static"])
def test_variants_without_a_simulator(variant, tmp_path, monkeypatch):
    """Every task comes from the base, the teacher's file or the untrained simulator, which writes
    once; it is never trained."""
    path = tmp_path / "teacher.jsonl"
    path.write_text("".join(json.dumps({"text": f"task {n // 10} {n % 10}"}) + "\n" for n in range(20, 60)))
    given = {"teacher_tasks": str(path)} if variant == "teacher" else {}
    _, tape, run = run_micro(monkeypatch, tmp_path / "r", **{**BASE, **given, "variant": variant})
    assert Counter(e.adapter for e in tape)["env"] == (variant == "static")
    own = range(20, 60) if given else range(0)
    pool = {f"{make_task(n).text} =" for n in [*range(N_BASE), *own]}
    tried = {prompt for e in tape if e.call == "sample" and e.G == 4 for prompt in e.prompts}
    assert tried <= pool or variant == "static"
    assert len(tried - {f"{make_task(n).text} =" for n in range(N_BASE)}) > 10 or variant == "base"
    assert run.history[-1]["d_env"] == 0 and run.policy.params["env"][0][0].item() == 0


def test_a_task_is_imitated_in_one_epoch_only_where_its_world_says_so(tmp_path, monkeypatch):
    """Also after a resume: otherwise the simulator imitates its few favourites for ever."""
    monkeypatch.setattr(MicroWorld, "imitate_once", True)
    options = {**BASE, "alpha_schedule": "constant", "k_min": 0.6}
    seen, alone = [], run_micro(monkeypatch, tmp_path / "a", **options)[1]
    for epochs in (3, 5):
        run_micro(monkeypatch, tmp_path / "b", **{**options, "epochs": epochs, "resume": epochs == 5})
        seen += [e.given[:2] for e in micro_world.Scripted.tape if e.call == "rwr_update"]
    assert seen == [e.given[:2] for e in alone if e.call == "rwr_update"]
    imitated = [{key for part in given for r in part for key in r.keys} for given in seen]
    assert len(imitated) == 5 and all(imitated) and sum(map(len, imitated)) == len(set.union(*imitated))


def test_a_leak_into_the_other_adapter_is_seen(tmp_path, monkeypatch):
    """An update that moves both adapters is told on."""
    update = micro_world.update

    def leaking(call):
        def both(policy, adapter, optimizer, *given):
            with torch.no_grad():
                policy.params["env"][0][1] += 1e-12
            return update(call)(policy, adapter, optimizer, *given)
        return both

    monkeypatch.setattr(micro_world, "update", leaking)
    *_, run = run_micro(monkeypatch, tmp_path / "r", **{**BASE, "epochs": 1})
    assert run.history[1]["other_adapter_moved"]


def test_a_simulator_with_a_model_of_its_own(tmp_path, monkeypatch):
    """--env-model: it alone writes, and learns what was written."""
    own = Scripted(genenv.Options(), ("env",))
    monkeypatch.setattr(support.run, "open_policy", lambda model, o, names: own)
    monkeypatch.setattr(support.run.checkpoint, "hashes", lambda o: {})  # there is no such model
    _, tape, run = run_micro(monkeypatch, tmp_path / "r", **{**BASE, "env_model": "other"})
    assert {e.policy for e in tape if e.call == "rwr_update"} == {own}
    assert {e.policy for e in tape if e.call == "grpo_update"} == {run.policy} != {own}
    assert (own.saved, run.policy.saved) == (["env"], ["agent"]) and run.policy.rates.keys() == {"agent"}
    assert own.params["env"][0][0].item() == BASE["epochs"]


def test_schedules_see_how_the_run_goes(tmp_path, monkeypatch):
    """What an alpha schedule is told; an epoch without tasks leaves the last success as it was."""
    told, parse = [], MicroWorld.parse_task

    def parse_task(self, text, seed_task, epoch):
        if epoch == 2:
            raise InvalidTask("malformed")
        return parse(self, text, seed_task, epoch)

    monkeypatch.setattr(curriculum, "alpha_spy", lambda c: told.append(c) or 0.2 + 0.1 * c.epoch,
                        raising=False)
    monkeypatch.setattr(MicroWorld, "parse_task", parse_task)
    *_, run = run_micro(monkeypatch, tmp_path / "r", **{**BASE, "alpha_schedule": "spy", "epochs": 4})
    records = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    assert [r["alpha"] for r in records] == pytest.approx([.35, .3, .4, .5, .6])
    assert [c.previous for c in told] == [r["alpha"] for r in records[:-1]]
    assert [c.epoch for c in told] == [1, 2, 3, 4] and records[2]["distinct_tasks"] == 0
    assert [c.success for c in told] == [records[t]["success_rate"] for t in (0, 1, 1, 3)]


@pytest.mark.parametrize("variant, at", [("static", 1), ("genenv", 1), ("genenv", 4)])
def test_a_stopped_run_goes_on_to_the_same_end(variant, at, tmp_path, monkeypatch):
    """Stopped inside epoch 0, or between the steps of a later one."""
    options = {**BASE, "variant": variant, "epochs": 3}
    with monkeypatch.context() as patch:
        quiet = run_micro(patch, tmp_path / "a", **options)[2]
    interact, calls = genenv.interact, []

    def stop(run, tasks):
        calls.append(run)
        run.stop = 15 if len(calls) == at else run.stop
        return interact(run, tasks)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(genenv, "interact", stop)
        run_micro(patch, tmp_path / "b", **options)
    *_, again = run_micro(monkeypatch, tmp_path / "b", resume=True, **options)
    for name in ("train.jsonl", "env.jsonl", "samples.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    clock = ("seconds", "cpu_seconds", "tokens_per_s")
    assert [{k: v for k, v in r.items() if k not in clock} for r in quiet.history] == \
        [{k: v for k, v in r.items() if k not in clock} for r in again.history]
