"""The wiring: does every option do in the loop what it says? Algorithm 1 computed once more, plainly.

    python -m pytest -q tests/test_wiring.py

The pure functions have tests of their own. Here the loop runs on the micro world of micro_world.py
and leaves a tape: every call of the sampler and of both updates, with arguments and results.
`Plain` walks along the tape and says from the Options alone what each call had to be, which tasks
count, what they earn, what the simulator learns from, what the metrics are, and where the adapters
must have moved: one token at a time, in double precision, without a function of the project's.
"""
import dataclasses
import functools
import itertools
import json
import math
import os
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from scripts import dispatch as commands
from support.files import read_jsonl
from data_pool import Trace
import genenv
import micro_world as micro
from policy import Policy
import support.run
import support.options

BASE = dict(  # no default anywhere: a constant in the place of an option is seen
    seed=5, epochs=4, steps=2, seed_tasks=4, variations=3, G=4, replay=0.4, base_share=0.4,
    seed_selection="curated", temperature=0.7, max_task_tokens=7,
    max_response_tokens=9, max_prompt_tokens=8, val_samples=3, val_every=1, tuning=True, gate=False,
    agent_lr=0.013, agent_reward="length", clip=0.13, agent_kl=0.31, kl_estimator="k2",
    scale="none", aggregation="sequence", inner_epochs=2, alpha=0.35, alpha_end=0.65,
    alpha_schedule="linear", difficulty_reward="bell", beta=5.0, k_min=0.3, lam=4.0,
    p_hat_unit="seed", env_lr=0.017, env_updates=4, env_batch=7,
    env_kl=0.23, env_kl_cap=3.0, env_kl_sample=9, token_budget=157, max_rows=41)

RUNS = {  # what differs from BASE
    "base": {},
    "defaults": dict(scale="std", aggregation="token", kl_estimator="k3", agent_reward="plain",
                     p_hat_unit="task", inner_epochs=1, tuning=False, k_min=0.26,
                     seed_selection="uniform", alpha_schedule="constant", seed=6),
    "batch unit": dict(p_hat_unit="batch"),
    "task unit": dict(p_hat_unit="task", k_min=0.2, alpha_schedule="step"),
    "linear": dict(env_weights="linear"),
    "advantage": dict(env_weights="advantage", k_min=0.5, p_hat_unit="task"),
    "random": dict(variant="random"),
    "static": dict(variant="static", max_task_tokens=12),
    "agreement": dict(agreement=2),
    "noise": dict(control="noise", agent_reward="plain"),
    "mini": dict(mini_batch=2, grad_checkpoint=True),
    "capped": dict(env_kl_cap=1e-7),
    "validated rarely": dict(val_every=3),
    "adaptive": dict(alpha_schedule="adaptive"),
    "from base": dict(base_share=1.0, replay=1.0),
    "from kept": dict(base_share=0.0),
    "sharp": dict(difficulty_reward="signal", lam=9.0, beta=0.5),
    "coin-agent": dict(control="coin-agent"),
    "coin-p-hat": dict(control="coin-p-hat"),
    "shuffled": dict(control="shuffled-r-env"),
}


class Noted:
    """Options that remember which of them were read."""

    def __init__(self, o):
        self.o, self.read = o, set()

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self.o, name)


@dataclasses.dataclass
class Try:
    """One task and what came of G attempts at it."""
    task: object
    rewards: list  # the world's r, 0 where the response never ended
    valid: list
    truncated: list
    tokens: list
    p_hat: float


class Plain:
    """Algorithm 1 from its description and a tape. `check` walks along the whole run."""

    def __init__(self, o, policy, folder, control=""):
        self.control = control
        self.o, self.policy, self.tape = Noted(o), policy, list(policy.tape)
        self.metrics = read_jsonl(folder / "metrics.jsonl")
        self.env_file = read_jsonl(folder / "env.jsonl")
        self.base = [micro.make_task(n, 0, "base") for n in range(micro.N_BASE)]
        self.tasks = {t.id: t for t in self.base}  # D_train
        self.p_hat, self.d_env, self.history = {}, [], []
        self.adam, self.seen = {"agent": None, "env": None}, Counter()
        self.success = 0.5

    def check(self):
        """Every epoch, and nothing on the tape beside it."""
        o = self.o
        for t in range(o.epochs + 1):
            self.t, self.alpha = t, self.alpha_of(t)
            self.kl, self.invalid, self.fresh, self.tries = [], Counter(), [], []
            self.replays, self.agent, self.env, self.n_written = [], [], {}, 0
            if t == 0 and o.variant == "static":
                self.write_static()
            for step in range(o.steps if t else 1):
                self.step(step)
            if t:
                self.environment()
            self.measure()
        assert not self.tape and len(self.metrics) == o.epochs + 1
        assert self.policy.rates == {"agent": o.agent_lr, "env": o.env_lr}
        assert self.policy.checkpointed == {False, o.grad_checkpoint}  # False: where nothing trains
        assert self.policy.widest <= o.token_budget
        return self

    def take(self, call, adapter=None):
        event = self.tape.pop(0)
        assert (event.call, event.adapter) == (call, adapter)
        return event

    def alpha_of(self, t):
        o = self.o
        if t == 0 or o.alpha_schedule == "constant":
            return o.alpha
        progress = (t - 1) / (o.epochs - 1)
        return {"linear": o.alpha + (o.alpha_end - o.alpha) * progress,
                "step": o.alpha if progress < 0.5 else o.alpha_end,
                "adaptive": min(.95, max(.05, 2 * o.alpha - self.success))}[o.alpha_schedule]

    # ---- generate

    def step(self, step):
        """One step: tasks, attempts, the agent's update, what is kept."""
        o = self.o
        if o.variant in ("static", "teacher"):
            generated = None
        else:
            self.seeds()
            generated = self.agree(self.write(o.seed_tasks, o.variations, step * o.seed_tasks))
        tries = self.attempt(generated)
        if self.t:
            self.update_agent(tries)
        for x in tries:
            if any(x.valid) or x.task.id in self.tasks:
                self.tasks.setdefault(x.task.id, x.task)
                self.p_hat[x.task.id] = (x.p_hat, self.t)
        if self.t and generated:
            self.record(generated, tries)

    def seeds(self):
        """Where seed tasks may come from: the base, or what was measured recently."""
        o, e = self.o, self.take("select_seed_tasks")
        base, recent, n, share, weigh, alpha, generator = e.args
        mine = [(i, p) for i, (p, at) in self.p_hat.items()
                if self.tasks[i].origin != "base" and self.t - at <= 2]
        assert [(x.id, p) for x, p in recent] == mine and n == o.seed_tasks
        assert share == o.base_share and alpha == self.alpha and len(base) == micro.N_BASE
        assert weigh.__name__ == f"seeds_{o.seed_selection}"
        assert generator.initial_seed() == 3 * o.seed
        ids = [x.id for x in e.result]
        if o.base_share == 1 or not mine:
            assert set(ids) <= {x.id for x in self.base}
        elif o.base_share == 0:
            assert set(ids) <= {i for i, _ in mine}
        self.seed_tasks = e.result

    def write(self, n_seeds, variations, first):
        """What the simulator was asked, and which of its texts are tasks: (task, rollout, group)."""
        o, e = self.o, self.take("sample", "env")
        at_once = max(o.max_rows // o.G, o.max_prompt_tokens // max(map(len, e.prompts)))  # prompts
        assert (e.G, e.T, e.max_rows) == (variations, o.max_task_tokens,
                                          min(o.max_rows, variations * at_once))
        assert (e.temperature, e.generator) == (o.temperature, 3 * o.seed + 1)
        assert len(e.prompts) == n_seeds == len(self.seed_tasks)
        for prompt, seed_task in zip(e.prompts, self.seed_tasks):
            p, at = self.p_hat.get(seed_task.id, (None, 0))
            known = p if self.t - at <= 2 else None
            assert prompt == f"vary {known!r} {self.alpha:.6f} {seed_task.text} =>"
            self.seen["known" if known is not None else "stale" if p is not None else "new"] += 1
        out = []
        for i, r in enumerate(e.rollouts):
            seed_task, text = self.seed_tasks[i // variations], self.policy.decode(r.response)
            self.n_written += 1
            self.kl.append((r.prompt, r.response))
            reason = self.reason(r, text, seed_task, {task.spec["n"] for task, _, _ in out})
            if reason:
                self.invalid[reason] += 1
            else:
                out.append((self.task(text, "env", seed_task.id), r, first + i // variations))
        return out

    def task(self, text, origin, seed_task):
        words = text.split()
        return micro.make_task(int(words[1] + words[2]), len(words) - 3, origin, seed_task, self.t)

    def reason(self, r, text, seed_task, before):
        """Why a text is no task; "" if it is one."""
        words = text.split()
        if 0 not in r.response:
            return "truncated"
        if words[0] != "task":
            return "malformed"
        n = int(words[1] + words[2])
        if n == seed_task.spec["n"]:
            return "copy of the seed"
        if n in micro.VALIDATION or n in micro.TUNING:
            return "held-out task"
        if 4 + len(words) > self.o.max_prompt_tokens:
            return "prompt too long"
        return "duplicate in the batch" if n in before else ""

    def write_static(self):
        """Five variations of every base task before the run, tried by nobody."""
        self.seed_tasks = self.base
        for task, _, _ in self.write(micro.N_BASE, 5, 0):
            self.tasks.setdefault(task.id, dataclasses.replace(task, origin="static"))

    def agree(self, generated):
        """--agreement: tasks that the simulator itself solves in k tries."""
        o = self.o
        if not o.agreement or not generated:
            return generated
        e = self.take("sample", "env")
        assert e.prompts == [f"{task.text} =" for task, _, _ in generated]
        assert (e.G, e.T, e.temperature) == (o.agreement, o.max_response_tokens, o.temperature)
        assert e.max_rows == self.rows(o.agreement, e.prompts) and e.generator == 3 * o.seed + 1
        solved = {r.group for r in e.rollouts if self.score(r)[0] >= 0.5}
        self.invalid["no agreement"] += len(generated) - len(solved)
        return [g for b, g in enumerate(generated) if b in solved]

    def rows(self, G, prompts):
        """Rollouts at once where they are not G of the agent's."""
        o, longest = self.o, max(len(p.split()) for p in prompts)
        return min(o.max_rows, G * max(1, o.max_rows // o.G, o.max_prompt_tokens // longest))

    # ---- interact

    def score(self, r):
        """(reward, valid, truncated, tokens) of one response."""
        words = self.policy.decode(r.response).split()
        truncated = 0 not in r.response
        valid = "junk" not in words and not truncated
        reward = 1.0 if words[0] == "right" else {1: .4, 2: .7}.get(words.count("half"), 0.0)
        reward = reward if valid else 0.0
        if self.control == "noise":
            reward = 1 - reward
        return reward, valid, truncated, len(r.response)

    def rate(self, rewards):
        return sum(r >= 0.5 for r in rewards) / len(rewards)

    def attempt(self, generated):
        """G attempts at every task: the new ones, then those of D_train."""
        o, e = self.o, self.take("sample", "agent")
        asked = o.seed_tasks * o.variations
        assert (e.G, e.T, e.temperature) == (o.G, o.max_response_tokens, o.temperature)
        assert (e.max_rows, e.generator) == (o.max_rows, 3 * o.seed + 1)
        pool = {f"{t.text} =": t for t in self.tasks.values()}
        if generated is None:  # ready-made tasks, each at most once in a batch
            n = min(asked, len(pool))
            assert len(set(e.prompts[:n])) == n
            tasks = [pool[p] for p in e.prompts[:n]]
        else:
            tasks = [task for task, _, _ in generated]
        replayed = e.prompts[len(tasks):]
        assert e.prompts[:len(tasks)] == [f"{t.text} =" for t in tasks]
        asked = round(asked * (1 + o.replay)) if self.t else len(tasks)  # before training: no replay
        assert len(e.prompts) == asked and set(replayed) <= set(pool)
        kept = [t for t in pool.values() if t.origin != "base"]
        origins = {pool[p].origin == "base" for p in replayed}
        assert o.base_share < 1 or origins <= {True}
        assert o.base_share > 0 or not kept or origins <= {False}
        tries = []
        for b, task in enumerate(tasks + [pool[p] for p in replayed]):
            scored = [self.score(r) for r in e.rollouts[b * o.G:(b + 1) * o.G]]
            tries.append(Try(task, *map(list, zip(*scored)), self.rate([s[0] for s in scored])))
            if task.id in self.p_hat:
                p, at = self.p_hat[task.id]
                self.replays.append((p, self.t - at, tries[-1].p_hat))
        self.tries += tries
        self.rollouts = e.rollouts
        return tries

    # ---- the agent

    def update_agent(self, tries):
        """What GRPO was given, and where it took the agent."""
        o, e = self.o, self.take("grpo_update", "agent")
        rollouts, rewards, given = e.args
        members = [self.rollouts[b * o.G:(b + 1) * o.G] for b in range(len(tries))]
        assert rollouts == sum(members, []) and given == o.o
        groups = [(m[0].prompt, [r.response for r in m]) for m in members]
        mine = torch.tensor([[self.agent_reward(*s) for s in
                              zip(x.rewards, x.truncated, x.tokens)] for x in tries])
        if self.control == "coin-agent":
            assert set(rewards.flatten().tolist()) == {0.0, 1.0}
            assert 0.3 < rewards.mean() < 0.7 and not torch.equal(rewards, mine.round())
        else:
            torch.testing.assert_close(rewards, mine)
        assert e.generator.initial_seed() == 3 * o.seed
        assert torch.equal(e.before["env"], e.after["env"])
        if not o.mini_batch:
            self.follow(e, "agent", o.agent_lr, [self.grpo_loss(groups, rewards)] * o.inner_epochs)
        distance = float((e.after["agent"] - e.before["agent"]).norm())
        self.agent.append({**e.stats, "moved": distance})
        assert e.stats["mismatch_max"] < 1e-5 and distance > 0

    def agent_reward(self, reward, truncated, tokens):
        if truncated:
            return 0.0
        return reward if self.o.agent_reward == "plain" else \
            reward * (1 - 0.1 * tokens / (tokens + 100))

    def grpo_loss(self, groups, rewards):
        """The GRPO objective of one pass: a function of (table now, table before the update)."""
        o, tokens = self.o, []  # (last token, token, advantage, its share of the mean)
        trained = [(p, rs, r) for (p, rs), r in zip(groups, rewards.double())
                   if r.max() - r.min() > 1e-6]
        n_tokens = sum(len(x) for _, rs, _ in trained for x in rs)
        n_rows = sum(len(rs) for _, rs, _ in trained)
        for prompt, responses, r in trained:
            a = r - r.mean()
            a = a / (r.std() + 1e-4) if o.scale == "std" else a
            for response, advantage in zip(responses, a.tolist()):
                share = 1 / n_tokens if o.aggregation == "token" else 1 / n_rows / len(response)
                tokens += [(*pair, advantage, share) for pair in bigrams(prompt, response)]

        def loss(now, before):
            logp, old, ref, a, share = self.logps(tokens, now, before)
            return ((self.clipped(logp, old, a) + o.agent_kl * self.kl_term(logp, ref)) * share).sum()
        return loss

    def logps(self, tokens, now, before):
        """Columns over tokens: log-prob now, before the update, in the base; the other columns."""
        last, token, *more = zip(*tokens)
        base, at = self.policy.base, (list(last), list(token))
        tables = [((base + x) / self.o.temperature).log_softmax(-1)[at] for x in (now, before, 0)]
        return (*tables, *(torch.tensor(x, dtype=torch.float64) for x in more))

    def clipped(self, logp, old, advantage):
        ratio = (logp - old).exp()
        low, high = 1 - self.o.clip, 1 + self.o.clip
        return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)

    def kl_term(self, logp, ref):
        d = logp - ref
        return {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[self.o.kl_estimator]

    def follow(self, e, adapter, lr, losses):
        """AdamW by hand along the losses, from where the adapter was: it must have got there."""
        x, start = e.before[adapter].clone(), e.before[adapter]
        m, v, n = self.adam[adapter] or (torch.zeros_like(x), torch.zeros_like(x), 0)
        for loss in losses:
            table = x.clone().requires_grad_(True)
            (g,) = torch.autograd.grad(loss(table, start), table)
            g = g / max(1.0, float(g.norm()))  # gradient clipping at 1
            n += 1
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            x = x - lr * (m / (1 - 0.9 ** n)) / ((v / (1 - 0.999 ** n)).sqrt() + 1e-8)
        self.adam[adapter] = m, v, n
        torch.testing.assert_close(e.after[adapter], x, atol=1e-3 * lr, rtol=0)

    # ---- the environment

    def record(self, generated, tries):
        """The D_env records of a step; p_hat of a control is taken from the file, once it is blind."""
        o, own = self.o, tries[:len(generated)]
        # a task that is replayed in the step that wrote it again: its newest attempts count
        newest = {x.task.id: x.p_hat for x in tries}
        p_hats, n = [newest[x.task.id] for x in own], len(self.d_env) + len(self.fresh)
        filed = [r["p_hat"] for r in self.env_file[n:n + len(own)]]
        if self.control == "coin-p-hat":
            assert all(abs(p * o.G - round(p * o.G)) < 1e-6 for p in filed)
            self.seen["blind"] += filed != p_hats
            p_hats = filed
        elif self.control == "shuffled-r-env":
            assert sorted(filed) == sorted(p_hats)
            self.seen["blind"] += filed != p_hats
            p_hats = filed
        groups = [group for _, _, group in generated]
        for (task, r, group), p in zip(generated, p_hats):
            siblings = [q for q, g in zip(p_hats, groups) if g == group]
            self.fresh.append(dict(
                prompt=r.prompt, response=r.response, text=self.policy.decode(r.response),
                task_id=task.id, keys=[f"n{task.spec['n']}"], seed_id=task.seed_task, group=group,
                p_hat=p, p_hat_seed=sum(siblings) / len(siblings),
                p_hat_batch=sum(p_hats) / len(p_hats), epoch=self.t, r_env=0.0))

    def environment(self):
        """R_env, filter, weights, mini-batches and the simulator's update of an epoch."""
        o, trains = self.o, self.o.variant == "genenv"
        fresh = once(self.fresh)
        aged = [r for r in once([r for r in self.d_env if self.t - r["epoch"] <= 4])
                if r["keys"] not in [f["keys"] for f in self.fresh]]
        aged = aged if trains else []
        for r in fresh + aged:
            r["r_env"] = self.r_env(r[UNIT[o.p_hat_unit]])
        in_band = lambda r: abs(r[UNIT[o.p_hat_unit]] - self.alpha) <= o.k_min + 1e-9
        fresh, aged = [r for r in fresh if in_band(r)], [r for r in aged if in_band(r)]
        self.env = {"env_kept": len(fresh)}
        if trains:
            self.update_environment(fresh, aged)
        n = len(self.d_env)
        self.d_env += self.fresh
        for mine, filed in zip(self.d_env[n:], self.env_file[n:], strict=False):
            assert {**filed, "r_env": 0} == {**mine, "r_env": 0}
            assert abs(filed["r_env"] - mine["r_env"]) < 1e-12

    def r_env(self, p):
        o = self.o
        if o.difficulty_reward == "signal" and p in (0, 1):
            return 0.0
        return math.exp(-o.beta * (p - self.alpha) ** 2)

    def env_weights(self, records):
        o, r = self.o, torch.tensor([r["r_env"] for r in records], dtype=torch.float64)
        if o.env_weights == "advantage":
            out = []
            for record in records:
                group = record["epoch"], record["group"]
                own = torch.tensor([x["r_env"] for x in records if (x["epoch"], x["group"]) == group],
                                   dtype=torch.float64)
                out.append(float((record["r_env"] - own.mean()) / (own.std() + 1e-4))
                           if len(own) > 1 and own.max() - own.min() > 1e-6 else 0.0)
            return torch.tensor(out, dtype=torch.float64)
        w = (o.lam * r).exp() if o.env_weights == "rwr" else r - r.min() if len(r) else r
        return w / w.mean() if len(r) and w.max() > 0 else torch.ones_like(r)

    def update_environment(self, fresh, aged):
        """What the simulator's update was given, and where it took the simulator."""
        o, weights = self.o, self.env_weights(fresh + aged)
        drawn, e = self.take("draw_batches"), self.take("rwr_update", "env")
        records, given, batches, kl_sample, options = e.args
        assert [(r.prompt, r.response) for r in records] == [
            (r["prompt"], r["response"]) for r in fresh + aged] and options == o.o
        torch.testing.assert_close(given.double(), weights, atol=1e-4, rtol=1e-4)
        assert drawn.args[:-1] == (len(fresh), [0.5 ** ((self.t - r["epoch"]) / 2) for r in aged],
                                   o.env_updates, o.env_batch)
        assert drawn.args[-1].initial_seed() == 3 * o.seed and batches == drawn.result
        assert len(batches) == (o.env_updates if fresh else 0)  # test_rwr.py says which
        listed = [(r.prompt, r.response) for r in kl_sample]
        assert len(listed) == min(o.env_kl_sample, len(self.kl))
        assert not Counter(map(repr, listed)) - Counter(map(repr, self.kl))
        self.seen["not the first"] += listed != self.kl[:len(listed)]
        assert torch.equal(e.before["agent"], e.after["agent"])
        if o.env_kl_cap > 1:  # no step was undone
            assert e.stats["env_steps"] == len(batches) and not e.stats["env_capped"]
            losses = [self.env_loss(n, batch, records, weights, kl_sample)
                      for n, batch in enumerate(batches)]
            self.follow(e, "env", o.env_lr, losses)
        else:
            assert e.stats["env_capped"] == bool(batches)
            assert torch.equal(e.before["env"], e.after["env"])
        self.env.update(e.stats, env_moved=float((e.after["env"] - e.before["env"]).norm()))
        if batches:
            self.env.update(env_ess=float(weights.sum() ** 2 / (weights ** 2).sum()),
                            env_weight_ratio=float(weights.max() / weights.min())
                            if weights.min() > 0 else 0.0)
            n = sum(i < len(fresh) for i in batches[0])
            self.env.update(env_batch_fresh=n, env_batch_aged=len(batches[0]) - n)
        self.seen["aged"] += bool(aged)

    def env_loss(self, n, batch, records, weights, kl_sample):
        """One step's objective: weighted imitation, and KL on a part of the sample, in turn."""
        o, tokens, own_tokens = self.o, [], []
        for i in batch:
            tokens += [(*pair, float(weights[i]))
                       for pair in bigrams(records[i].prompt, records[i].response)]
        for i in range(min(len(batch), len(kl_sample))):
            text = kl_sample[(n * len(batch) + i) % len(kl_sample)]
            own_tokens += bigrams(text.prompt, text.response)

        def loss(now, before):
            logp, _, _, w = self.logps(tokens, now, before)
            imitation = -w * logp
            logp, _, ref = self.logps(own_tokens, now, before)
            return imitation.mean() + o.env_kl * self.kl_term(logp, ref).mean()
        return loss

    # ---- measure

    def on(self, tasks, G, temperature):
        """Success rates on held-out tasks."""
        o, e = self.o, self.take("sample", "agent")
        assert e.prompts == [f"{micro.make_task(n).text} =" for n in tasks]
        assert (e.G, e.T, e.temperature) == (G, o.max_response_tokens, temperature)
        assert (e.max_rows, e.generator) == (self.rows(G, e.prompts), 3 * o.seed + 2)
        noise, self.control = self.control, ""  # a control of training
        rewards = [self.score(r)[0] for r in e.rollouts]
        self.control = noise
        self.seen["truncated validation"] += any(0 not in r.response for r in e.rollouts)
        return [self.rate(rewards[b * G:(b + 1) * G]) for b in range(len(tasks))]

    def measure(self):
        """The record of the epoch."""
        if self.t % self.o.val_every == 0 or self.t == self.o.epochs:
            self.validated = self.validate()
        mine = {"epoch": self.t, "alpha": self.alpha, **self.validated, **self.of_tasks(),
                **self.of_training()}
        record = dict(self.metrics[self.t])
        for name in ("warnings", "seconds", "tokens_per_s"):
            record.pop(name)
        assert set(record) == set(mine), set(record) ^ set(mine)
        for name, value in mine.items():
            near = pytest.approx(value, abs=2e-6, rel=1e-4) if isinstance(value, float) else value
            assert record[name] == near, (name, record[name], value)
        if mine["distinct_tasks"]:
            self.success = round(mine["success_rate"], 6)  # as on disk

    def validate(self):
        """Success on held-out tasks, sampled and greedy."""
        o = self.o
        sampled = self.on(micro.VALIDATION, o.val_samples, o.temperature)
        parity = lambda k: [p for n, p in zip(micro.VALIDATION, sampled) if n % 2 == k]
        mine = {"validated": self.t, "validation": mean(sampled),
                "validation_greedy": mean(self.on(micro.VALIDATION, 1, 0.0)),
                "validation_unsolved": mean([p == 0 for p in sampled]),
                "validation_by": {"even": round(mean(parity(0)), 4),
                                  "odd": round(mean(parity(1)), 4)}}
        if o.tuning:
            mine["tuning"] = mean(self.on(micro.TUNING, o.val_samples, o.temperature))
        return mine

    def of_tasks(self):
        """What the record says of tasks and attempts."""
        new = {}
        for x in self.tries:
            if x.task.origin == "static" or x.task.origin == "env" and x.task.epoch == self.t:
                new.setdefault(x.task.id, x)
        new, old = list(new.values()), [(p, now) for p, age, now in self.replays
                                        if age >= 2 and 0 < p < 1]
        every = lambda name: [v for x in self.tries for v in getattr(x, name)]
        tens = Counter(x.task.spec["n"] // 10 for x in new)
        shares = [n / sum(tens.values()) for n in tens.values()]
        signal = {}
        for p, age, now in self.replays:
            if age >= 1:
                signal.setdefault(p, []).append(now * (1 - now))
        return {
            "success_rate": mean([x.p_hat for x in new]), "reward": mean(every("rewards")),
            "task_length": mean([1 + x.task.spec["x"] for x in new]),
            "response_length": mean([n for x in self.tries if x.task.origin != "base"
                                     for n in x.tokens]),
            "solved": mean([x.p_hat == 1 for x in new]),
            "unsolved": mean([x.p_hat == 0 for x in new]), "distinct_tasks": len(new),
            "skill_entropy": float(-sum(s * math.log2(s) for s in shares)),
            "written": self.n_written, "invalid": dict(self.invalid),
            "truncated": mean(every("truncated")), "replays": len(old),
            "replay_gain": mean([now - p for p, now in old]),
            "replay_signal": [[p, pytest.approx(mean(v)), len(v)] for p, v in sorted(signal.items())],
            "d_train": len(self.tasks), "d_env": len(self.d_env)}

    def of_training(self):
        """What it says of both updates."""
        of = lambda name: [float(a[name]) for a in self.agent]
        means = ("kl", "clip_fraction", "grad_norm", "zero_variance", "trained_tokens",
                 "mismatch_mean")
        env = ("env_kept", "env_batch_fresh", "env_batch_aged", "env_weight_ratio", "env_kl",
               "env_kl_step", "env_ess", "env_loss", "env_steps", "env_capped", "env_skipped_steps",
               "env_moved")
        return {**{name: mean(of(name)) for name in means},
                "mismatch_max": max(of("mismatch_max"), default=0.0),
                "skipped_steps": int(sum(of("skipped_steps"))), "agent_moved": sum(of("moved")),
                "other_adapter_moved": False, **{name: self.env.get(name, 0) for name in env}}


UNIT = {"task": "p_hat", "seed": "p_hat_seed", "batch": "p_hat_batch"}


def once(records):
    """Each task once, as it was written last."""
    return [r for i, r in enumerate(records)
            if not any(r["keys"] == later["keys"] for later in records[i + 1:])]


def bigrams(prompt, response):
    """(last token, token) of every token of a response."""
    return [(last % micro.V, token) for last, token in zip([prompt[-1], *response], response)]


def mean(values):
    return float(sum(values) / len(values)) if values else 0.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """runs(options that differ from BASE) -> (Options, policy, world, folder, control), made once
    each."""
    made = {}

    def run(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp("micro") / "run"
            with pytest.MonkeyPatch.context() as patch:
                made[key] = (*micro.run_micro(patch, folder, **{**BASE, **changes}), folder,
                             changes.get("control", ""))
        return made[key]
    return run


def plain(run):
    o, policy, _, folder, control = run
    return Plain(o, policy, folder, control).check()


@pytest.fixture(scope="module")
def checked(runs):
    """checked(name) -> the Plain of one of RUNS that went along all of it, once."""
    return functools.cache(lambda name: plain(runs(**RUNS[name])))


@pytest.mark.parametrize("name", RUNS)
def test_the_loop_does_what_the_options_say(checked, name):
    """A whole run, call by call, number by number."""
    checked(name)


def test_the_runs_meet_what_they_are_there_for(checked, runs):
    """The checks above are not vacuous: each situation came up."""
    seen = {name: checked(name).seen for name in ("base", "coin-p-hat", "shuffled")}
    for what in ("known", "stale", "new", "aged", "truncated validation", "not the first"):
        assert seen["base"][what], what
    assert seen["coin-p-hat"]["blind"] and seen["shuffled"]["blind"]
    reasons = {reason for r in read_jsonl(runs()[3] / "metrics.jsonl") for reason in r["invalid"]}
    assert reasons == {"truncated", "malformed", "copy of the seed", "held-out task",
                       "prompt too long", "duplicate in the batch"}
    records = read_jsonl(runs()[3] / "metrics.jsonl")
    assert records[1]["replays"] == 0 < records[4]["replays"]  # replays of an earlier epoch


# ---------------------------------------------------------------------------------------------
# every option is heard: another value gives another run

OTHER = dict(
    variant="random", seed=8, epochs=3, steps=1, seed_tasks=3, variations=2, G=3, replay=0.8,
    base_share=0.9, seed_selection="uniform", temperature=1.3, max_task_tokens=5,
    max_response_tokens=3, max_prompt_tokens=7, agreement=1, val_samples=2, val_every=2,
    tuning=False, agent_lr=0.02, agent_reward="plain", clip=0.01, agent_kl=0.0, kl_estimator="k3", scale="std",
    aggregation="token", inner_epochs=1, mini_batch=2, alpha=0.5, alpha_end=0.4,
    alpha_schedule="constant", difficulty_reward="tent", beta=1.0, k_min=0.1, lam=1.0,
    p_hat_unit="task", env_weights="linear", env_lr=0.02, env_updates=2, env_batch=3, env_kl=0.0, env_kl_cap=1e-6, env_kl_sample=3, grad_checkpoint=True,
    token_budget=57, max_rows=11)


def account(run):
    """Everything that a run did, without its clock and its folder."""
    policy, folder = run[1], run[3]
    calls = []
    for e in policy.tape:
        fields = {k: v for k, v in vars(e).items() if k not in ("optimizer", "generator")}
        if e.call in ("draw_batches", "select_seed_tasks"):
            fields = {"call": e.call, "result": e.result}
        elif "args" in fields:  # with the Options themselves every account would differ
            fields["args"] = [x for x in e.args if not isinstance(x, genenv.Options)]
        calls.append(repr(fields))
    metrics = [{k: v for k, v in r.items() if k not in ("seconds", "tokens_per_s")}
               for r in read_jsonl(folder / "metrics.jsonl")]
    return (calls, metrics, policy.checkpointed, policy.params["agent"][0].tolist(),
            policy.params["env"][0].tolist())


@pytest.fixture(scope="module")
def usual(runs):
    """The account of BASE."""
    return account(runs())


def test_same_options_give_the_same_account(usual, tmp_path, monkeypatch):
    """Without this the next test would prove nothing."""
    again = (*micro.run_micro(monkeypatch, tmp_path / "again", **BASE), tmp_path / "again")
    assert account(again) == usual


@pytest.mark.parametrize("name", OTHER)
def test_every_option_is_heard(usual, runs, name):
    """An option that nothing reads would leave the run as it was."""
    assert OTHER[name] != BASE.get(name, getattr(genenv.Options, name))
    assert account(runs(**{name: OTHER[name]})) != usual


def test_reward_noise_turns_its_share_of_the_rewards():
    """Noise of .3 turns about three of ten; that validation is spared: the run "noise"."""
    run = SimpleNamespace(rng=torch.Generator().manual_seed(0))
    right = lambda run: Trace("", 1.0, True, False, 1)
    turned = [1 - controls.noise(0.3, right, run).reward for _ in range(2000)]
    assert 0.25 < mean(turned) < 0.35 and set(turned) == {0, 1}


def test_schedules_see_how_the_run_goes(tmp_path, monkeypatch):
    """What an alpha schedule is told, epoch by epoch, and that its alpha is the one used."""
    told = []

    def alpha_spy(c):
        told.append(c)
        return 0.2 + 0.1 * c.epoch

    monkeypatch.setattr(genenv.curriculum, "alpha_spy", alpha_spy, raising=False)
    with pytest.MonkeyPatch.context() as patch:
        micro.run_micro(patch, tmp_path / "spy", **{**BASE, "alpha_schedule": "spy", "epochs": 6})
    records = read_jsonl(tmp_path / "spy" / "metrics.jsonl")
    assert [r["alpha"] for r in records] == pytest.approx([.35, .3, .4, .5, .6, .7, .8])
    for c, before in zip(told, records):
        assert (c.epoch, c.epochs, c.alpha, c.alpha_end) == (before["epoch"] + 1, 6, .35, .65)
        assert (c.success, c.previous) == (before["success_rate"], before["alpha"])
        rows = [tuple(row) for r in records[max(0, c.epoch - 4):c.epoch] for row in r["replay_signal"]]
        assert list(c.signal) == rows
    assert told[-1].signal


@pytest.mark.parametrize("variant", ["teacher", "base"])
def test_teacher_tasks_are_the_pool(tmp_path, variant):
    """--variant teacher: no simulator; every task comes from the base or the teacher's file. base:
    from the base alone; the rival without any simulator would meet what one has written."""
    path, own = tmp_path / "teacher.jsonl", range(20, 60) if variant == "teacher" else range(0)
    path.write_text("".join(json.dumps({"text": f"task {n // 10} {n % 10}"}) + "\n" for n in own))
    given = {"teacher_tasks": str(path)} if own else {}
    with pytest.MonkeyPatch.context() as patch:
        _, policy, _ = micro.run_micro(patch, tmp_path / "r", **{**BASE, "variant": variant, **given})
    assert {e.adapter for e in policy.tape if e.call != "select_seed_tasks"} == {"agent"}
    tried = {p for e in policy.tape if e.call == "sample" and e.T and e.G == 4 for p in e.prompts}
    prompts = lambda numbers: {f"{micro.make_task(n).text} =" for n in numbers}
    assert tried <= prompts([*range(micro.N_BASE), *own])
    assert len(tried) > 9 and len(tried & prompts(own)) > 20 * bool(own) - 1
    last = read_jsonl(tmp_path / "r" / "metrics.jsonl")[-1]
    assert last["d_train"] == micro.N_BASE + len(own) and last["written"] == 0
    assert last["trained_tokens"] > 0 and bool(last["distinct_tasks"]) == bool(own)


def test_a_leak_into_the_other_adapter_is_seen(tmp_path, monkeypatch):
    """An update that moves both adapters is told on: in the record, and in the line that is read."""
    real = genenv.grpo_update

    def leaky(policy, *args, **kwargs):
        with torch.no_grad():
            policy.params["env"][0][0, 0] += 1e-12
        return real(policy, *args, **kwargs)

    monkeypatch.setattr(genenv, "grpo_update", leaky)
    with pytest.MonkeyPatch.context() as patch:
        micro.run_micro(patch, tmp_path / "r", **{**BASE, "epochs": 1})
    record = read_jsonl(tmp_path / "r" / "metrics.jsonl")[1]
    assert record["other_adapter_moved"]
    assert "ANOTHER ADAPTER MOVED TOO" in support.run.screen.line(record, verbose=True)


def test_a_simulator_with_a_model_of_its_own(tmp_path, monkeypatch):
    """--env-model: it alone writes, is asked whether it agrees, and learns what was written."""
    own = micro.Scripted(genenv.Options(seed=8))
    del own.params["agent"]
    start = own.params["env"][0].detach().clone()
    monkeypatch.setattr(run.frame, "open_simulator", lambda world, o, tasks: own)
    with pytest.MonkeyPatch.context() as patch:
        _, agent, _ = micro.run_micro(patch, tmp_path / "r", **{
            **BASE, "epochs": 2, "env_model": "other", "agreement": 2})
    for policy, name, update in ((agent, "agent", "grpo_update"), (own, "env", "rwr_update")):
        calls = Counter((event.call, event.adapter) for event in policy.tape if event.adapter)
        assert set(calls) == {("sample", name), (update, name)} and min(calls.values()) >= 2
        assert policy.saved == [(name, tmp_path / "r" / "adapters" / name)]
    asked = {(event.prompts[0].split()[0], event.G) for event in own.tape if event.call == "sample"}
    assert asked == {("vary", BASE["variations"]), ("task", 2)}
    last = read_jsonl(tmp_path / "r" / "metrics.jsonl")[-1]
    assert last["agent_moved"] > 0 and not last["other_adapter_moved"]
    assert not torch.equal(own.params["env"][0], start)


def test_a_clock_that_is_set_back_is_not_read(tmp_path):
    """Seconds were negative, and tokens per second 10 ** 11."""
    with pytest.MonkeyPatch.context() as patch:
        clock = itertools.count(10 ** 9, -10 ** 6)
        patch.setattr(time, "time", lambda: next(clock))
        micro.run_micro(patch, tmp_path / "r", **{**BASE, "epochs": 1})
    assert all(0 < r["seconds"] < 600 and r["tokens_per_s"] < 1e8
               for r in read_jsonl(tmp_path / "r" / "metrics.jsonl"))


# ---------------------------------------------------------------------------------------------
# options that do not act in the loop


class Loaded(Exception):
    """Raised in the place of a model that would be loaded."""


@pytest.mark.parametrize("name, model", [("ladder", "some-model"), ("tool_calls", "some-model"),
                                         ("template", "some-model"), ("household", "")])
def test_options_of_the_policy_reach_it(monkeypatch, name, model):
    """--model, --rank, --quant, --dtype, --device, --seed, both adapters, --chat-template-kwargs
    and --base-model, in every world."""
    import importlib
    world, found = importlib.import_module(f"worlds.{name}"), {}

    def load(model, adapters, **kwargs):
        found.update(kwargs, model=model, adapters=adapters)
        raise Loaded

    monkeypatch.setattr(Policy, "load", load)
    if name == "template":  # it trains its own
        train = world.train
        monkeypatch.setattr(world, "train", lambda *a, **k: train(*a, **{**k, "steps": 3}))
    else:
        monkeypatch.setattr(world, "base_folder", lambda o, *rest: o.base_model, raising=False)
    o = genenv.Options(model=model, env_model="other" if name == "tool_calls" else "", rank=3, quant="nf4", dtype="bf16", device="cpu", seed=9,
                       agent_adapter="a", env_adapter="b", base_model="some-base",
                       chat_template_kwargs='{"enable_thinking": false}')
    with pytest.raises(Loaded):
        world.load_policy(o)
    where = found.pop("model")
    assert name == "template" or where == {"tool_calls": "some-model"}.get(name, "some-base")
    assert found.pop("adapters") == (("agent",) if o.env_model else ("agent", "env"))
    longest = o.max_prompt_tokens + max(o.max_response_tokens, o.max_task_tokens)
    assert found == dict(rank=3, quant="nf4", dtype="bf16", seed=9, max_tokens=longest,
                         chat_template_kwargs={"enable_thinking": False})


def test_world_and_its_options_reach_the_world(tmp_path, monkeypatch):
    """--world names the module, and an option of its own reaches it through the command line."""
    world, names = micro.micro_world(), []
    for module in (run.frame, run.options, commands):
        monkeypatch.setattr(module, "load_world", lambda name: names.append(name) or world)
    monkeypatch.setattr(support.run.report, "write", lambda folder: "")
    monkeypatch.setattr(support.run.screen, "closing_words", lambda folder: "")
    assert genenv.main(["--world", "micro", "--flavour", "3", "--out", str(tmp_path / "r"),
                        "--threads", "1", "--epochs", "0", "--no-gate"]) == 0
    assert set(names) == {"micro"} and world.prepared[0].world_options == {"flavour": 3}


def test_threads(monkeypatch):
    """--threads, else the user's OMP_NUM_THREADS, else all cores that the process may use."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run.options.threads_of(genenv.Options(threads=2)) == 2
    assert run.options.threads_of(genenv.Options()) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5}, raising=False)  # taskset
    assert run.options.threads_of(genenv.Options()) == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    assert run.options.threads_of(genenv.Options()) == os.cpu_count()


# held against what they say by tests of their own: test_loop.py, test_tool_loop.py, test_tool_calls.py,
# test_functions.py, test_screen.py and above
ELSEWHERE = set(
    "out resume threads world world_options gate base_tasks validation_tasks teacher_tasks model rank "
    "quant dtype device agent_adapter env_adapter base_model env_model chat_template_kwargs write_rounds "
    "env_passes verbose function_selection".split())


def test_every_option_is_held_against_what_it_says(checked):
    """Plain reads it in some run, or it stands above; and another value is heard."""
    read = set().union(*(checked(name).o.read for name in RUNS))
    fields = {f.name for f in dataclasses.fields(genenv.Options)}
    assert fields - read - ELSEWHERE == set()
    assert fields - set(OTHER) - ELSEWHERE == set()
