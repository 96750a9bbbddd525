"""A micro world, its scripted policy, and a tape of what passed between them and the loop.

Usage: `tape, run = run_micro(monkeypatch, folder, **options)`, see tests/test_wiring.py.

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

import curriculum
from data_pool import Task
import genenv
from policy import Rollout
import support.run
import interaction
import worlds
from worlds import InvalidTask, World

EOS = 0
N_BASE, HELD_OUT = 12, {"validation": range(90, 96), "tuning": range(96, 100)}
STATS = dict.fromkeys(("kl", "clip_fraction", "grad_norm", "zero_variance", "trained_tokens",
                       "mismatch", "mismatch_max", "skipped_steps"), 0.0) | {
    "env_steps": 1, "env_capped": 0, "env_skipped_steps": 0}


def spaced(n) -> str:
    """Task n with a blank between its two digits, as a simulator writes it."""
    return f"task {n // 10} {n % 10}"


def make_task(n, x=0, origin="env", seed_task="", epoch=0) -> Task:
    """Task number n; x says how wordy it is: another id, the same task."""
    return Task(spaced(n) + " x" * x, {"n": n, "x": x}, origin, seed_task, epoch)


class MicroWorld(World):
    """Prompts say everything that the loop may tell a simulator."""
    REASONS = ("malformed",)

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

    def graded(self, task, response, reward):
        return 0.4 * reward + 0.01  # unlike the reward everywhere

    def same_task_key(self, task):
        return f"n{task.spec['n']}"


# functions of a user's own, unlike those of curriculum.py


def reward_half(p_hat, alpha, beta):
    """Half of the paper's."""
    return 0.5 * curriculum.reward_bell(p_hat, alpha, beta)


def alpha_taped(c):
    """Rising, whatever the number of epochs; notes the context."""
    Scripted.contexts.append(c)
    return 0.2 + 0.1 * c.epoch


def seeds_taped(p_hats, alpha):
    """Tasks that were solved more often are likelier seeds; notes alpha."""
    Scripted.alphas.append(alpha)
    return [0.2 + p_hat for p_hat in p_hats]


# ---------------------------------------------------------------------------------------------
# what is said


def written(n, u) -> str:
    """What the simulator writes when task n is to be varied, from a number u in [0, 1)."""
    far = (n + 1 + int(100 * u)) % 90
    near, same = spaced(far), spaced(n)
    kinds = [*[near] * 8, near + " x", near + " x", near + " x x", "junk", "task 9 3", "task 9 7",
             same, "task 4 2" + 40 * " x", "task 5 5", "task 5 5 x"]
    return kinds[int(len(kinds) * u)]


def answered(n, u) -> str:
    """What the agent answers to task n: how often it is right depends on n."""
    p = 0.1 + 0.8 * (n * 37 % 11) / 10
    if n % 10 == 7:
        return "junk"  # no attempt at such a task is ever valid
    if u < 0.1:
        return "right " * 40  # will be cut
    if u < p:
        return "right" if u < 0.5 else "right x x"
    kinds = ["half", "half half", "wrong", "junk"]
    return kinds[int(1000 * u) % 4]


class Scripted:
    """A policy whose texts are scripted.

    tape: every call of `sample`, of the check of what was written, and of both updates, as
    namespaces with the epoch it was made in and a letter for what it is: W the simulator writes, C
    its texts are checked, A the agent's attempts, V and v its sampled and greedy validation, G
    GRPO, R RWR; `how` is what a call was told. alphas, contexts: what the functions above were
    given; threads: torch's.
    """
    tape, runs, alphas, contexts, threads = [], [], [], [], []
    tokens_drawn = slot_steps = 0

    def __init__(self, o, names=None):
        self.words, self.tokenizer = {}, None
        self.device = torch.device("cpu")
        self.lm = SimpleNamespace(dtype=torch.float32,
                                  named_parameters={"base": torch.zeros(1)}.items)
        names = names or (("agent",) if o.env_model else ("agent", "env"))
        self.params = {name: [torch.nn.Parameter(torch.zeros(2))] for name in names}
        self.rates = {}

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
        for name, [p] in self.params.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "adapter_model.safetensors").write_text(str(p.tolist()))

    def sample(self, adapter, prompts, G, max_new_tokens, temperature, generator, max_rows):
        rollouts = []
        for b, prompt in enumerate(prompts):
            words = self.decode(prompt).split()
            at = words.index("task")
            n = int(words[at + 1] + words[at + 2])
            for _ in range(G):
                u = float(torch.rand((), generator=generator)) if temperature else n * 29 % 97 / 97
                ids = [*self.encode(written(n, u) if words[0] == "vary" else answered(n, u)), EOS]
                limit = "too many tokens" if len(ids) > max_new_tokens else ""
                response = ids[:max_new_tokens]
                logps = [-0.5] * len(response)
                rollouts.append(Rollout(b, list(prompt), response, logps, limit))
        letter = "W" if adapter == "env" else "A"
        if words[0] != "vary" and n >= 90:  # held out
            letter = "V" if temperature else "v"
        note(letter, policy=self, prompts=[self.decode(p) for p in prompts], G=G, max_rows=max_rows,
             how=(adapter, G, max_new_tokens, temperature, generator.initial_seed()),
             rollouts=rollouts)
        return rollouts


def note(letter, **event):
    """Put a call on the tape."""
    epoch = Scripted.runs[-1].state.epoch
    Scripted.tape.append(SimpleNamespace(letter=letter, epoch=epoch, **event))


def update(letter):
    """A double of grpo_update or rwr_update: notes what it was given and moves its adapter by 1."""
    def taped(policy, adapter, optimizer, *given):
        *given, o, generator = given
        note(letter, policy=policy, optimizer=optimizer, how=(adapter, o, generator.initial_seed()),
             given=copy.deepcopy(given))
        with torch.no_grad():
            policy.params[adapter][0][0] += 1
        imitated = []
        if letter == "R" and STATS["env_steps"]:
            imitated = list(range(len(given[0]) + len(given[1])))
        return {**STATS, "env_imitated": imitated}
    return taped


def check(*given, **named):
    """interaction.read_written; notes what it gives."""
    written = interaction.read_written(*given, **named)
    note("C", results=[(w.rollout, w.text, w.task, w.reason) for w in written],
         kept=named["batch"])
    return written


def run_micro(patch, folder, **options):
    """genenv.train on the micro world -> (the tape, the Run). patch: a MonkeyPatch."""
    def prepare_run(*given):
        Scripted.runs.append(support.run.prepare_run(*given))
        return Scripted.runs[-1]

    for name in ("tape", "runs", "alphas", "contexts", "threads"):
        patch.setattr(Scripted, name, [])
    for function in (alpha_taped, reward_half, seeds_taped):
        patch.setattr(curriculum, function.__name__, function, raising=False)
    patch.setattr(torch, "set_num_threads", Scripted.threads.append)
    patch.setattr(support.run, "open_world", MicroWorld)
    patch.setattr(support.run, "check_texts_survive", lambda *given: None)
    patch.setattr(support.run.report, "write", lambda folder: None)
    patch.setattr(os, "fsync", lambda handle: None)
    patch.setattr(genenv, "prepare_run", prepare_run)
    patch.setattr(genenv, "read_written", check)
    patch.setattr(genenv, "grpo_update", update("G"))
    patch.setattr(genenv, "rwr_update", update("R"))
    genenv.train(genenv.Options(out=str(folder), world="micro", **options))
    [run] = Scripted.runs
    return Scripted.tape, run
