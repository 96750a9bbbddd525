"""A micro world, its scripted policy, and a tape of what passed between them and the loop.

The loop runs here as it is: genenv.train, real updates, real files, in a tenth of a second. Only
the domain and the model are doubles. A task is a number that is solved by saying "right"; what is
sampled is scripted, drawn by the generator that the loop hands over; log-probs are those of a table
of (last token, next token), so that tests/test_wiring.py can compute every update by itself.

What a simulator writes and an agent answers has everything that can go wrong in it: truncated
texts that would be right, malformed ones, copies of the seed task, held-out tasks, duplicates in
other words, prompts too long, near misses.
"""
import copy
import os
import re
import types
from contextlib import contextmanager
from functools import partial

import torch

from data_pool import Task
import genenv
from policy import Rollout, by_group
import support.run
from worlds import InvalidTask

EOS, WORDS = 0, ["<eos>", "task", "x", "right", "wrong", "half", "junk", *"0123456789", "=", "=>"]
V = 24  # rows and columns of the table; a longer vocabulary wraps around
N_BASE, VALIDATION, TUNING = 12, range(90, 96), range(96, 100)


# ---------------------------------------------------------------------------------------------
# the world


def make_task(n, x=0, origin="env", seed_task="", epoch=0) -> Task:
    """Task number n; x says how wordy it is: another id, the same task."""
    text = " ".join(["task", *f"{n:02d}", *["x"] * x])
    return Task(text, {"n": n, "x": x}, origin, seed_task, epoch)


def env_prompt(seed_task, success, alpha) -> str:
    """Says everything that the loop may tell a simulator."""
    return f"vary {success!r} {alpha:.6f} {seed_task.text} =>"


def parse_task(text, seed_task, epoch) -> Task:
    found = re.fullmatch(r"task (\d) (\d)((?: x)*)", text)
    if not found:
        raise InvalidTask("malformed")
    return make_task(int(found[1] + found[2]), found[3].count("x"), "env", seed_task.id, epoch)


def score(task, response):
    """1 for "right", .4 and .7 for one and two "half"; valid unless there is junk in it."""
    words = response.split()
    reward = 1.0 if words[:1] == ["right"] else {1: 0.4, 2: 0.7}.get(words.count("half"), 0.0)
    valid = bool(words) and "junk" not in words
    return (reward if valid else 0.0), valid


def micro_world() -> types.SimpleNamespace:
    """The module that a world is; `prepared` collects the Options it was given."""
    prepared, policies = [], []

    def load_policy(o):
        policies.append(Scripted(o))
        return policies[-1]

    splits = {"validation": VALIDATION, "tuning": TUNING}
    return types.SimpleNamespace(
        __name__="worlds.micro", REASONS=("malformed",), prepared=prepared, policies=policies,
        prepare=prepared.append, load_policy=load_policy,
        base_tasks=lambda o: [make_task(n, 0, "base") for n in range(N_BASE)],
        validation_tasks=lambda o, split: [make_task(n, 0, split) for n in splits[split]],
        env_prompt=env_prompt, parse_task=parse_task, agent_prompt=lambda t: f"{t.text} =",
        score=score, skills=lambda t: [f"tens-{t.spec['n'] // 10}"],
        task_length=lambda t: 1 + t.spec["x"], category=lambda t: "odd" if t.spec["n"] % 2 else "even",
        same_task_key=lambda t: f"n{t.spec['n']}", OPTIONS={"flavour": (1, "a number", None)})


# ---------------------------------------------------------------------------------------------
# the script: what is sampled after a prompt, from a number u in [0, 1)


def written(n, u) -> str:
    """What the simulator writes when task n is to be varied."""
    near = f"task {(n + 1 + int(100 * u)) % 90:02d}"
    spaced = lambda text: f"task {text[5]} {text[6]}"
    kinds = [(.46, spaced(near)), (.58, spaced(near) + " x"), (.64, spaced(near) + " x x"),
             (.70, "junk"), (.76, "task 9 3"), (.82, spaced(f"task {n:02d}")),
             (.88, "task 4 2" + 40 * " x"), (.94, "task 5 5"), (1., "task 5 5 x")]
    return next(text for edge, text in kinds if u < edge)


def answered(n, u) -> str:
    """What the agent answers to task n: how often it is right depends on n."""
    p = 0.1 + 0.8 * (n * 37 % 11) / 10
    if u < 0.12:
        return "right " * 40  # right, if only it had ended
    u = (u - 0.12) / 0.88
    kinds = [(p / 2, "right"), (p, "right x x"), (p + (1 - p) * .3, "half"),
             (p + (1 - p) * .6, "half half"), (p + (1 - p) * .8, "wrong"), (1., "junk")]
    return next(text for edge, text in kinds if u < edge)


class Scripted:
    """A policy whose texts are scripted and whose log-probs are a table plus an adapter's table.

    It has the methods that the loop and the updates call. tape: every call of `sample`.
    """

    def __init__(self, o):
        self.words, self.ids = list(WORDS), {w: i for i, w in enumerate(WORDS)}
        self.tokenizer, self.device = types.SimpleNamespace(), torch.device("cpu")
        generator = torch.Generator().manual_seed(o.seed)
        draw = lambda scale: scale * torch.randn(V, V, generator=generator, dtype=torch.float64)
        self.base, self.active, self.tape, self.saved = draw(1.0), None, [], []
        names = ("agent",) if o.env_model else ("agent", "env")
        self.params = {name: [torch.nn.Parameter(draw(0.05))] for name in names}
        self.rates = {}  # {adapter: learning rate of its optimiser}
        self.checkpointed, self.widest = set(), 0  # of micro-batches: the flag, padded tokens

    def encode(self, text) -> list[int]:
        for word in text.split():
            self.ids.setdefault(word, len(self.ids))
        self.words = list(self.ids)
        return [self.ids[word] for word in text.split()]

    def decode(self, ids) -> str:
        return " ".join(self.words[i] for i in ids if i != EOS)

    def generator(self, seed):
        return torch.Generator().manual_seed(seed)

    def optimizer(self, adapter, lr):
        self.rates[adapter] = lr
        return torch.optim.AdamW(self.params[adapter], lr=lr, weight_decay=0.0)

    def save_adapters(self, folder):
        self.saved += [(adapter, folder / adapter) for adapter in self.params]

    @contextmanager
    def use(self, adapter):
        former, self.active = self.active, adapter
        try:
            yield self
        finally:
            self.active = former

    def table(self, adapter, temperature):
        """log-probs of the next token after each last one, (V, V)."""
        logits = self.base + self.params[adapter][0] if adapter else self.base
        return (logits / temperature).log_softmax(-1)

    def logprobs(self, rollouts, temperature=1.0, grad_checkpoint=False):
        groups = by_group(rollouts)
        self.checkpointed.add(grad_checkpoint)
        self.widest = max(self.widest, len(groups) * max(
            len(g[0].prompt) + sum(len(r.response) for r in g) for g in groups))
        rows = [(r.prompt[-1] % V, r.response) for r in rollouts]
        width = max(len(response) for _, response in rows)
        pad = lambda ids: [*ids, *[0] * (width - len(ids))]
        last = torch.tensor([pad([first, *response[:-1]]) for first, response in rows])
        mask = torch.tensor([pad([1] * len(response)) for _, response in rows]).bool()
        token = torch.tensor([pad(response) for _, response in rows])
        return self.table(self.active, temperature)[last, token] * mask, mask

    @torch.no_grad()
    def sample(self, adapter, prompts, G=1, max_new_tokens=64, temperature=1.0, generator=None,
               max_rows=256):
        table, rollouts = self.table(adapter, temperature or 1.0).tolist(), []
        for b, prompt in enumerate(prompts):
            words = self.decode(prompt).split()
            at = words.index("task")
            n = int(words[at + 1] + words[at + 2])
            for _ in range(G):
                u = float(torch.rand((), generator=generator)) if temperature else n * 29 % 97 / 97
                text = written(n, u) if words[0] == "vary" else answered(n, u)
                ids = [*self.encode(text), EOS]
                response = ids[:max_new_tokens]
                logps = [table[last % V][i] for last, i in zip([prompt[-1], *response], response)]
                rollouts.append(Rollout(b, list(prompt), response, logps,
                                        "too many tokens" * (len(ids) > max_new_tokens)))
        self.tape.append(types.SimpleNamespace(
            call="sample", adapter=adapter, prompts=[self.decode(p) for p in prompts], G=G,
            T=max_new_tokens, temperature=temperature, max_rows=max_rows,
            generator=generator and generator.initial_seed(), rollouts=rollouts))
        return rollouts


# ---------------------------------------------------------------------------------------------
# a run with its tape


def run_micro(monkeypatch, folder, control="", **options):
    """genenv.train on the micro world -> (Options, the policy with its tape, the world).

    control: a key of experiments.controls.CONTROLS, or "noise": every reward r becomes 1 - r.
    grpo_update and rwr_update are the real ones; the tape has what they were given and returned,
    and both adapters before and after. Report and checkpoints are left out: they have own tests.
    """
    world = micro_world()
    monkeypatch.setattr(run.frame, "load_world", lambda name: world)
    monkeypatch.setattr(support.run.report, "write", lambda folder: None)
    monkeypatch.setattr(genenv.checkpoint, "save",
                        lambda run: (run.train_pool.save(), run.env_pool.save()))
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(support.run.screen, "closing_words", lambda folder: "")
    for name in ("grpo_update", "rwr_update"):
        monkeypatch.setattr(genenv, name, _taped_update(name, getattr(genenv, name), world))
    if control:
        with monkeypatch.context() as patch:
            patch.setitem(controls.CONTROLS, "noise", ("trace_of", partial(controls.noise, 1.0)))
            changed = controls.replacement(control)
        monkeypatch.setattr(genenv, *changed)
    for module, name in ((genenv, "draw_batches"), (genenv.curriculum, "select_seed_tasks")):
        monkeypatch.setattr(module, name, _taped(name, getattr(module, name), world))
    o = genenv.Options(out=str(folder), threads=1, world="micro", **options)
    try:
        genenv.train(o)
    finally:
        monkeypatch.undo()
    return o, world.policies[0], world


def _taped(name, function, world):
    """A function of the loop's that leaves its arguments and its result on the tape."""
    def taped(*args):
        result = function(*args)
        world.policies[-1].tape.append(types.SimpleNamespace(
            call=name, adapter=None, args=args, result=copy.deepcopy(result)))
        return result
    return taped


def _taped_update(name, update, world):
    """An update that leaves arguments, statistics and both adapters, before and after."""
    def taped(policy, adapter, optimizer, *args):
        weights = lambda: {k: p[0].detach().clone() for k, p in policy.params.items()}
        given = [x for x in args if not isinstance(x, torch.Generator)]
        event = types.SimpleNamespace(
            call=name, adapter=adapter, optimizer=optimizer, args=copy.deepcopy(given),
            before=weights(), generator=next((x for x in args if isinstance(x, torch.Generator)), None))
        policy.tape.append(event)
        event.stats = update(policy, adapter, optimizer, *args)
        event.after = weights()
        event.stats = dict(event.stats)
        return event.stats
    return taped
