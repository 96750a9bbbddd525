"""A micro world, its scripted policy, and a tape of what passed between them and the loop.

The loop runs here as it is: genenv.train with real files, in a tenth of a second. The domain, the
model and both updates are doubles. A task is a number that is solved by saying "right"; what is
sampled is scripted, drawn by the generator that the loop hands over. What a simulator writes and an
agent answers has everything that can go wrong in it: truncated texts that would be right, malformed
ones, copies of the seed task, held-out tasks, duplicates in other words, prompts too long.
"""
import copy
import os
import re
from types import SimpleNamespace
from zlib import crc32

import torch

from data_pool import Task
import genenv
from policy import Rollout
import support.run
from worlds import InvalidTask, World

EOS = 0
N_BASE, HELD_OUT = 12, {"validation": range(90, 96), "tuning": range(96, 100)}
STATS = dict.fromkeys(("kl", "clip_fraction", "grad_norm", "zero_variance", "trained_tokens",
                       "mismatch", "mismatch_max", "skipped_steps"), 0.0) | {"env_steps": 1}


def make_task(n, x=0, origin="env", seed_task="", epoch=0) -> Task:
    """Task number n; x says how wordy it is: another id, the same task."""
    return Task(" ".join(["task", *f"{n:02d}", *["x"] * x]), {"n": n, "x": x}, origin, seed_task, epoch)


class MicroWorld(World):
    """Prompts say everything that the loop may tell a simulator."""
    REASONS = ("malformed",)
    OPTIONS = {"flavour": (1, "a number", None)}

    def load_policy(self):
        return Scripted(self.o)

    def base_tasks(self):
        return [make_task(n, 0, "base") for n in range(N_BASE)]

    def validation_tasks(self, split="validation"):
        return [make_task(n, 0, split) for n in HELD_OUT[split]]

    def env_prompt(self, seed_task, success):
        return f"vary {success!r} {seed_task.text} =>"

    def agent_prompt(self, task):
        return f"{task.text} ="

    def parse_task(self, text, seed_task, epoch):
        found = re.fullmatch(r"task (\d) (\d)((?: x)*)", text)
        if not found:
            raise InvalidTask("malformed")
        return make_task(int(found[1] + found[2]), found[3].count("x"), "env", seed_task.id, epoch)

    def score(self, task, response):
        words = response.split()
        reward = 1.0 if words[:1] == ["right"] else {1: 0.4, 2: 0.7}.get(words.count("half"), 0.0)
        valid = bool(words) and "junk" not in words
        return (reward if valid else 0.0), valid

    def same_task_key(self, task):
        return f"n{task.spec['n']}"


def written(n, u) -> str:
    """What the simulator writes when task n is to be varied, from a number u in [0, 1)."""
    near = f"{(n + 1 + int(100 * u)) % 90:02d}"
    task = lambda digits: f"task {digits[0]} {digits[1]}"
    kinds = [(.46, task(near)), (.58, task(near) + " x"), (.64, task(near) + " x x"), (.70, "junk"),
             (.73, task("93")), (.76, task("97")), (.82, task(f"{n:02d}")), (.88, "task 4 2" + 40 * " x"),
             (.94, task("55")), (1., task("55") + " x")]
    return next(text for edge, text in kinds if u < edge)


def answered(n, u) -> str:
    """What the agent answers to task n: how often it is right depends on n."""
    p, u = 0.1 + 0.8 * (n * 37 % 11) / 10, (u - 0.12) / 0.88
    kinds = [(0, "right " * 40), (p / 2, "right"), (p, "right x x"), (p + (1 - p) * .3, "half"),
             (p + (1 - p) * .6, "half half"), (p + (1 - p) * .8, "wrong"), (1., "junk")]
    return next(text for edge, text in kinds if u < edge)


class Scripted:
    """A policy whose texts are scripted. tape: every call of `sample`, and of both updates."""
    tape = []

    def __init__(self, o, names=None):
        self.words, self.active = {}, None
        self.tokenizer, self.eos_ids = SimpleNamespace(all_special_ids=[EOS]), [EOS]
        embeddings, self.device = SimpleNamespace(weight=torch.zeros(1)), torch.device("cpu")
        self.lm = SimpleNamespace(dtype=torch.float32, get_input_embeddings=lambda: embeddings)
        names = names or (("agent",) if o.env_model else ("agent", "env"))
        self.params = {name: [torch.nn.Parameter(torch.zeros(2))] for name in names}
        self.rates, self.saved = {}, []

    def encode(self, text):
        ids = [crc32(word.encode()) for word in text.split()]  # the same in every run
        self.words.update(zip(ids, text.split()))
        return ids

    def decode(self, ids):
        return " ".join(self.words[i] for i in ids if i != EOS)

    def has_control_tokens(self, ids):
        return False

    def generator(self, seed):
        return torch.Generator().manual_seed(seed)

    def optimizer(self, adapter, lr):
        self.rates[adapter] = lr
        return torch.optim.AdamW(self.params[adapter], lr=lr)

    def save_adapters(self, folder):
        self.saved += list(self.params)

    def sample(self, adapter, prompts, G, max_new_tokens, temperature, generator, max_rows):
        rollouts = []
        for b, prompt in enumerate(prompts):
            words = self.decode(prompt).split()
            at = words.index("task")
            n = int(words[at + 1] + words[at + 2])
            for _ in range(G):
                u = float(torch.rand((), generator=generator)) if temperature else n * 29 % 97 / 97
                ids = [*self.encode(written(n, u) if words[0] == "vary" else answered(n, u)), EOS]
                cut = "too many tokens" * (len(ids) > max_new_tokens)
                response = ids[:max_new_tokens]
                rollouts.append(Rollout(b, list(prompt), response, [-0.5] * len(response), cut))
        self.tape.append(SimpleNamespace(
            call="sample", adapter=adapter, prompts=[self.decode(p) for p in prompts], G=G,
            T=max_new_tokens, temperature=temperature, max_rows=max_rows,
            generator=generator.initial_seed(), rollouts=rollouts))
        return rollouts


def update(call):
    """A double of grpo_update or rwr_update: notes what it was given and moves its adapter by 1."""
    def taped(policy, adapter, optimizer, *given):
        given = [x.initial_seed() if isinstance(x, torch.Generator) else x for x in given]
        policy.tape.append(SimpleNamespace(call=call, adapter=adapter, policy=policy,
                                           optimizer=optimizer, given=copy.deepcopy(given)))
        with torch.no_grad():
            policy.params[adapter][0][0] += 1
        return dict(STATS)
    return taped


def run_micro(patch, folder, **options):
    """genenv.train on the micro world -> (Options, the tape, the Run). patch: a MonkeyPatch."""
    runs, prepare = [], genenv.prepare_run
    patch.setattr(Scripted, "tape", [])
    patch.setattr(support.run, "open_world", MicroWorld)
    patch.setattr(support.run, "probe_texts", lambda *given: None)
    patch.setattr(support.run.report, "write", lambda folder: None)
    patch.setattr(os, "fsync", lambda handle: None)
    patch.setattr(genenv, "prepare_run", lambda *given: runs.append(prepare(*given)) or runs[-1])
    for name in ("grpo_update", "rwr_update"):
        patch.setattr(genenv, name, update(name))
    genenv.train(genenv.Options(out=str(folder), world="micro", **options))
    return runs[0].o, Scripted.tape, runs[0]
