"""GenEnv, the loop: an agent and an environment simulator that train each other (Algorithm 1).

    python genenv.py                                  # the embedded world on a laptop
    python genenv.py --variant random                 # the simulator is never trained (ablation)
    python genenv.py --alpha-schedule linear --alpha 0.7 --alpha-end 0.4
    python genenv.py --resume --out runs/000-genenv   # go on where a run stopped
    python genenv.py --help                           # every option with its meaning

What of the paper this is: Algorithm 1. `epoch` below reads like it: generate and interact, update
both policies, aggregate. The pieces are GRPO in grpo.py (Eq. 4), RWR in rwr.py, success rate, R_env
and filter in curriculum.py (Eq. 2, 3), the pools in data_pool.py, the domain in worlds/ (Eq. 1).

Where it differs on purpose: an epoch is several small steps, so that new tasks become seeds at once
and GRPO stays on-policy, for which tasks of D_train are rolled out afresh as well; the simulator is
updated once per epoch, as in the paper. README.md lists what the paper leaves open.

A run folder holds config.json, metrics.jsonl (a record per epoch), samples.jsonl (tasks and traces
to read), train.jsonl (D_train), env.jsonl (D_env), adapters/{agent,env} in PEFT format, figures/,
report.html and checkpoints/.
"""
import argparse
import dataclasses
import inspect
import json
import math
import os
import re
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries, about each other

import torch
from tqdm import tqdm

from runtime import checkpoint
import curriculum
from runtime import export, measure, memory, report
from data_pool import EnvPool, EnvRecord, Task, Trace, TrainPool, UserError, append_jsonl
from grpo import grpo_update
from runtime.presets import PRESETS
from rwr import draw_batches, rwr_update
from worlds import (InvalidTask, check_task, held_out_keys, load_world, read_teacher,
                    refuse_special_tokens, task_keys)

MUTE = 3  # epochs without a single valid task after which a run gives up
CHOICES = {"variant": ("genenv", "random", "static", "teacher"), "kl_estimator": ("k1", "k2", "k3"),
           "scale": ("std", "none"), "aggregation": ("token", "sequence"),
           "p_hat_unit": ("task", "seed"), "quant": ("", "nf4"),
           "alpha_schedule": tuple(curriculum.ALPHA_SCHEDULES),
           "difficulty_reward": tuple(curriculum.DIFFICULTY_REWARDS),
           "seed_selection": tuple(curriculum.SEED_SELECTIONS)}


@dataclass(frozen=True)
class Options:
    """Every option of a run; the comment beside each is its --help text."""
    # the run
    out: str = ""                     # run folder; empty: the next free runs/NNN-VARIANT
    resume: bool = False              # go on with the run in --out from its last checkpoint
    variant: str = "genenv"           # genenv; random: untrained simulator; static, teacher: fixed tasks
    world: str = "ladder"             # domain, a module of worlds/
    seed: int = 0                     # seeds adapters, sampling and every choice of the loop
    threads: int = 0                  # torch threads; 0 = all cores
    cache_dir: str = "runs/cache"     # where the embedded world keeps its base model
    # models
    model: str = ""                   # local folder or hub name of a chat model
    base_tasks: str = ""              # JSONL of base tasks (not for the ladder world)
    validation_tasks: str = ""        # JSONL of held-out tasks; empty: an eighth of the base tasks
    teacher_tasks: str = ""           # JSONL of ready-made tasks for --variant teacher
    quant: str = ""                   # nf4 = 4-bit base model
    device: str = "auto"              # auto, cpu or cuda
    rank: int = 16                    # LoRA rank of both adapters
    # the loop
    epochs: int = 24                  # T of Algorithm 1
    steps: int = 6                    # agent updates per epoch
    seeds: int = 16                   # seed tasks per step that the simulator varies
    variations: int = 4               # tasks written per seed (paper: 4)
    G: int = 8                        # rollouts per task
    replay: float = 0.125             # tasks replayed from D_train, per task asked for (at least)
    base_share: float = 0.75          # share of seeds (and of replayed tasks) from the base set
    seed_selection: str = "uniform"   # recent tasks as seeds; curated prefers p_hat near alpha
    pool_age: int = 2                 # epochs for which a measured success rate counts as recent
    temperature: float = 1.0          # of sampling and of every log-prob
    max_task_tokens: int = 24         # length limit of a generated task
    max_response_tokens: int = 24     # length limit of an agent response
    max_prompt_tokens: int = 4096     # tasks with a longer prompt are refused
    agreement: int = 0                # k > 0: keep a task only if the simulator solves it in k tries
    val_samples: int = 8              # attempts per validation task
    tuning: bool = False              # also report the split by which settings may be chosen
    # agent (GRPO)
    agent_lr: float = 2e-3            # AdamW on the agent's LoRA weights
    clip: float = 0.2                 # epsilon of the clipped surrogate
    agent_kl: float = 0.001           # KL coefficient to the initial policy
    kl_estimator: str = "k3"          # estimator of both KL terms, see grpo.token_kl
    scale: str = "std"                # std: advantages divided by the group's standard deviation
    aggregation: str = "token"        # loss as a mean over tokens or over sequences
    inner_epochs: int = 1             # passes over each rollout batch
    mini_batch: int = 0               # groups per optimiser step; 0 = the whole batch
    # environment (RWR)
    alpha: float = 0.5                # target success rate
    alpha_end: float = 0.5            # where the linear, cosine and step schedules arrive
    alpha_schedule: str = "constant"  # a function alpha_NAME of curriculum.py
    difficulty_reward: str = "bell"   # a function reward_NAME of curriculum.py; bell is Eq. 3
    beta: float = 2.0                 # sharpness of R_env
    k_min: float = 0.26               # band |p_hat - alpha| <= k_min to learn from (paper 0.1)
    lam: float = 1.0                  # weights ~ exp(lam * R_env)
    p_hat_unit: str = "task"          # success rate of one task, or of all variations of a seed
    reward_noise: float = 0.0         # probability that a reward r becomes 1 - r (a study)
    success_at: float = 0.5           # reward from which an attempt counts as a success
    env_lr: float = 3e-3              # AdamW on the simulator's LoRA weights
    env_updates: int = 16             # optimiser steps per epoch
    env_batch: int = 32               # generations per optimiser step
    env_fresh: float = 0.75           # share of fresh generations in a mini-batch, rest D_env
    env_age: int = 4                  # epochs after which a generation of D_env is no longer used
    env_kl: float = 0.02              # KL coefficient to the initial simulator
    env_kl_cap: float = 0.5           # largest KL of one update, nats per token
    env_probe: int = 96               # fresh generations on which both KLs are measured
    # memory
    grad_checkpoint: bool = False     # recompute activations in the backward pass
    token_budget: int = 16384         # padded tokens per micro-batch of a training pass
    max_rows: int = 512               # rollouts decoded at once


@dataclass
class Part:
    """What of an epoch has been done so far: what a checkpoint in mid-epoch must hold."""
    t: int = 0
    step: int = 0
    seconds: float = 0.0
    written: int = 0
    invalid: Counter = field(default_factory=Counter)
    tries: list = field(default_factory=list)    # (Task, p_hat, [Trace])
    replays: list = field(default_factory=list)  # (p_hat before, epochs ago, p_hat now)
    agent: list = field(default_factory=list)    # statistics of each grpo_update
    fresh: list = field(default_factory=list)    # EnvRecords of this epoch
    probe: list = field(default_factory=list)    # [prompt, response] of all generations
    rollout_tokens: int = 0
    rollout_seconds: float = 0.0


# ---------------------------------------------------------------------------------------------
# the algorithm


def train(o: Options) -> Path:
    """Run Algorithm 1 and return the run folder. Raises UserError on what a user can mend."""
    run = prepare_run(o)
    with checkpoint.stop_signals(run):
        if run.part.t == 0:
            dry_epoch(run)
            end_epoch(run, {}, o.alpha)  # the state before training
        for t in range(run.part.t, o.epochs + 1):
            epoch(run, t)
    finish(run)
    return run.folder


def epoch(run, t: int):
    """One epoch of Algorithm 1."""
    o, part, started = run.o, run.part, time.time()
    alpha = curriculum.alpha_now(o.alpha_schedule, curriculum.Context(
        t, o.epochs, run.success, o.alpha, o.alpha_end, run.history[-1]["alpha"]))
    bar = tqdm(range(part.step, o.steps), desc=f"epoch {t}", leave=False, disable=not run.progress)
    for part.step in bar:
        # 1. generate and interact: T_t ~ pi_env, then G attempts of the agent at every task
        generations = generate(run, alpha)
        tasks = [g.task for g in generations]
        tasks += replayed(run, len(tasks))
        groups, rewards = interact(run, tasks)  # Eq. 1, Eq. 2; D_train <- D_train + Valid(E_t)
        # 2a. agent update: GRPO on r
        part.agent.append(update_agent(run, groups, rewards))
        part.fresh += records_of(run, generations)
        bar.set_postfix(measure.postfix(part))
        checkpoint.stop_if_asked(run, started)
    # 2b. environment update: RWR on what fell into the band
    env_stats = update_environment(run, alpha)
    # 3. aggregate: D_env <- D_env + generations with their R_env, from which the weights follow
    run.env_pool.add(part.fresh)
    part.seconds += time.time() - started
    end_epoch(run, env_stats, alpha)


def generate(run, alpha) -> list:
    """A task batch T_t: `seeds` seed tasks, `variations` of each, verified. See write_tasks."""
    o = run.o
    if o.variant in ("static", "teacher"):
        return draw_fixed(run)
    recent = run.train_pool.recent(run.part.t, o.pool_age)
    seeds = curriculum.select_seeds(run.train_pool.base, recent, o.seeds, o.base_share,
                                    curriculum.SEED_SELECTIONS[o.seed_selection], alpha, run.rng)
    return agreed(run, write_tasks(run, seeds, o.variations, alpha))


def write_tasks(run, seeds, variations, alpha) -> list:
    """Ask the simulator for variations of each seed; parse, verify, drop duplicates.

    Returns namespaces (task, prompt, response, text, seed, slot). What is no task is counted under
    the reason that the world gives for it, and never trained on.
    """
    o, world, part = run.o, run.world, run.part
    prompts = [run.policy.encode(world.env_prompt(s, recent_success(run, s), alpha)) for s in seeds]
    with memory.peak_memory(run.peaks, "simulator rollouts", run.policy.device):
        rollouts = run.policy.sample("env", prompts, variations, o.max_task_tokens, o.temperature,
                                     run.sampler, max_rows=o.max_rows)
    part.probe += [[r.prompt, r.response] for r in rollouts]
    out, seen = [], set()  # keys of the tasks kept
    for i, r in enumerate(rollouts):
        seed, text = seeds[i // variations], run.policy.decode(r.response)
        part.written += 1
        try:
            if r.truncated:
                raise InvalidTask("truncated")
            task = world.parse_task(text, seed, part.t)
            check_task(world, task, seed, run.held_out, getattr(run.policy, "tokenizer", None))
            # each task once in a step: RWR would imitate the simulator's mode (a deviation)
            if task_keys(world, task) & seen:
                raise InvalidTask("duplicate in the batch")
            # the task will be read by the agent, and as a seed by the simulator
            readers = world.agent_prompt(task), world.env_prompt(task, 0.5, alpha)
            if max(len(run.policy.encode(prompt)) for prompt in readers) > o.max_prompt_tokens:
                raise InvalidTask("prompt too long")
        except InvalidTask as reason:
            part.invalid[str(reason)] += 1
            continue
        seen |= task_keys(world, task)
        out.append(SimpleNamespace(task=task, prompt=r.prompt, response=r.response, text=text,
                                   seed=seed.id, slot=i // variations))
    return out


def agreed(run, generations) -> list:
    """Optional check of generated answers: the simulator must solve its own task once in k tries.

    A task with a wrong or ambiguous answer also lands near alpha, so R_env alone would reward it.
    """
    o = run.o
    if not (o.agreement and generations):
        return generations
    prompts = [run.policy.encode(run.world.agent_prompt(g.task)) for g in generations]
    rows = memory.rollout_rows(o, o.agreement, max(map(len, prompts)))
    with memory.peak_memory(run.peaks, "agreement check", run.policy.device):
        tries = run.policy.sample("env", prompts, o.agreement, o.max_response_tokens,
                                  o.temperature, run.sampler, max_rows=rows)
    solved = {r.group for r in tries
              if trace_of(run, generations[r.group].task, r).reward >= o.success_at}
    run.part.invalid["no agreement"] += len(generations) - len(solved)
    return [g for b, g in enumerate(generations) if b in solved]


def recent_success(run, seed: Task):
    """The success signal in the simulator's context: the seed's p_hat, None if it is not recent."""
    p_hat, measured = run.train_pool.p_hat.get(seed.id, (None, 0))
    return p_hat if run.part.t - measured <= run.o.pool_age else None


def replayed(run, n_fresh: int) -> list:
    """Tasks of D_train for the agent's batch, so that earlier curricula are kept.

    They also stand in for generations that were no tasks: the batch always has the same size.
    """
    o = run.o
    size = round(o.seeds * o.variations * (1 + o.replay))
    return run.train_pool.sample(size - n_fresh, o.base_share, run.rng)


def interact(run, tasks):
    """G attempts of the agent at every task; fills D_train.

    Returns groups (prompt ids, G response ids) and rewards (B, G), the input of grpo_update.
    """
    o, part = run.o, run.part
    prompts = [run.policy.encode(run.world.agent_prompt(task)) for task in tasks]
    started = time.time()
    with memory.peak_memory(run.peaks, "agent rollouts", run.policy.device):
        rollouts = run.policy.sample("agent", prompts, o.G, o.max_response_tokens, o.temperature,
                                     run.sampler, max_rows=o.max_rows)
    part.rollout_seconds += time.time() - started
    part.rollout_tokens += sum(len(r.response) for r in rollouts)
    groups, rewards = [], torch.zeros(len(tasks), o.G)
    for b, task in enumerate(tasks):
        members = rollouts[b * o.G:(b + 1) * o.G]
        traces = [trace_of(run, task, r) for r in members]
        groups.append((prompts[b], [r.response for r in members]))
        rewards[b] = torch.tensor([e.reward for e in traces])
        p_hat = curriculum.success_rate([e.reward for e in traces], o.success_at)  # Eq. 2
        if task.id in run.train_pool.p_hat:
            before, measured = run.train_pool.p_hat[task.id]
            part.replays.append((before, part.t - measured, p_hat))
        run.train_pool.add(task, traces, p_hat, part.t)
        part.tries.append((task, p_hat, traces))
    return groups, rewards


def trace_of(run, task, rollout) -> Trace:
    """Score one attempt (Eq. 1). A response that never ended earns nothing."""
    text = run.policy.decode(rollout.response)
    reward, valid = run.world.score(task, text)
    if rollout.truncated:
        reward, valid = 0.0, False
    if run.o.reward_noise and torch.rand((), generator=run.rng) < run.o.reward_noise:
        reward = 1 - reward
    return Trace(text, reward, valid, rollout.truncated, len(rollout.response))


def records_of(run, generations) -> list:
    """D_env records of a batch, each with the p_hat of its task, or of all tasks of its seed."""
    measured = {task.id: p_hat for task, p_hat, _ in run.part.tries}
    generations = [g for g in generations if g.prompt]  # static tasks have no context
    values = [measured[g.task.id] for g in generations]
    if run.o.p_hat_unit == "seed":
        by_seed = {}
        for g, p in zip(generations, values):
            by_seed.setdefault(g.slot, []).append(p)
        values = [sum(by_seed[g.slot]) / len(by_seed[g.slot]) for g in generations]
    return [EnvRecord(g.prompt, g.response, g.text, g.task.id, g.seed, p, run.part.t)
            for g, p in zip(generations, values)]


def update_agent(run, groups, rewards) -> dict:
    """One GRPO update on a rollout batch."""
    o = run.o
    with memory.peak_memory(run.peaks, "agent update (GRPO)", run.policy.device):
        return grpo_update(
            run.policy, "agent", run.agent_optimizer, groups, rewards, temperature=o.temperature,
            clip=o.clip, kl_coef=o.agent_kl, kl_kind=o.kl_estimator, scale=o.scale,
            how=o.aggregation, inner_epochs=o.inner_epochs, mini_batch=o.mini_batch,
            token_budget=o.token_budget, grad_checkpoint=o.grad_checkpoint, generator=run.rng)


def update_environment(run, alpha) -> dict:
    """RWR on the records inside the band: fresh ones, and those of D_env not yet too old."""
    o, fresh, t = run.o, run.part.fresh, run.part.t
    aged = run.env_pool.aged(t, o.env_age) if o.variant == "genenv" else []
    for r in fresh + [r for r, _ in aged]:  # alpha may have moved since an aged one was written
        reward = curriculum.DIFFICULTY_REWARDS[o.difficulty_reward]
        r.r_env = reward(r.p_hat, alpha, o.beta)  # Eq. 3
    kept = [r for r in fresh if curriculum.in_band(r.p_hat, alpha, o.k_min)]
    if o.variant != "genenv":
        return {"env_kept": len(kept)}
    aged = [(r, w) for r, w in aged if curriculum.in_band(r.p_hat, alpha, o.k_min)]
    # no step on old records alone: they were imitated before, and nothing new speaks for them
    batches = draw_batches(len(kept), [w for _, w in aged], o.env_updates, o.env_batch,
                           o.env_fresh, run.rng) if kept else []
    # a random part of all that was written, valid or not: drift into bad text must be seen as well
    order = torch.randperm(len(run.part.probe), generator=run.rng)[:o.env_probe].tolist()
    probe = [(run.part.probe[i][0], [run.part.probe[i][1]]) for i in order]
    with memory.peak_memory(run.peaks, "simulator update (RWR)", run.policy.device):
        stats = rwr_update(run.policy, "env", run.env_optimizer, kept + [r for r, _ in aged],
                           batches, probe, lam=o.lam, temperature=o.temperature, kl_coef=o.env_kl,
                           kl_kind=o.kl_estimator, kl_cap=o.env_kl_cap,
                           token_budget=o.token_budget, grad_checkpoint=o.grad_checkpoint)
    return {**stats, "env_kept": len(kept)}


def dry_epoch(run):
    """Epoch 0: one batch is written and tried, nothing is trained."""
    started = time.time()
    if run.o.variant == "static":
        write_static(run)
    if run.o.variant == "teacher":
        for task in run.teacher:
            run.train_pool.add_untried(task)
    interact(run, [g.task for g in generate(run, run.o.alpha)])
    run.part.seconds = time.time() - started


def write_static(run):
    """GenEnv-Static: the untrained simulator writes five variations of every base task, once."""
    for g in write_tasks(run, run.train_pool.base, 5, run.o.alpha):
        run.train_pool.add_untried(dataclasses.replace(g.task, origin="static"))


def draw_fixed(run) -> list:
    """As many tasks as the simulator would write, drawn from the base and the ready-made ones."""
    tasks = list(run.train_pool.tasks.values())
    picks = torch.randperm(len(tasks), generator=run.rng)[:run.o.seeds * run.o.variations]
    return [SimpleNamespace(task=tasks[i], prompt=None, seed="", slot=0) for i in picks.tolist()]


# ---------------------------------------------------------------------------------------------
# the run


def prepare_run(o: Options):
    """Folder, world, policy, pools, optimisers and generators of a run, resumed if asked."""
    torch.set_num_threads(o.threads or os.cpu_count() or 1)
    world = load_world(o.world)
    world.prepare(o)
    if o.model:
        print(memory.check(memory.model_config(o.model), o), flush=True)
    folder = checkpoint.choose_folder(o)  # before the slow part; made only once that has worked
    held_out = held_out_keys(world, o)
    teacher = read_teacher(world, o.teacher_tasks, held_out) if o.variant == "teacher" else []
    base, policy = world.base_tasks(o), world.load_policy(o)
    refuse_special_tokens(base + teacher + world.validation_tasks(o), policy.tokenizer)
    if not o.resume:
        checkpoint.create_folder(folder, o)
    run = SimpleNamespace(
        o=o, world=world, held_out=held_out, policy=policy, folder=folder, part=Part(),
        history=[], success=0.5, progress=sys.stderr.isatty(), stop=None, teacher=teacher,
        peaks={},
        agent_optimizer=policy.optimizer("agent", o.agent_lr),
        env_optimizer=policy.optimizer("env", o.env_lr),
        # three streams per --seed, and none shared with another --seed (measure.py has the third)
        rng=torch.Generator().manual_seed(3 * o.seed),  # choices of the loop
        sampler=policy.generator(3 * o.seed + 1))       # tokens
    if o.resume:
        checkpoint.load(run)
    run.train_pool = TrainPool(folder / "train.jsonl", base)
    run.env_pool = EnvPool(folder / "env.jsonl")
    if o.resume:
        checkpoint.create_folder(folder, o)  # --epochs may have changed
    return run


def end_epoch(run, env_stats, alpha):
    """Measure, print one line, put everything on disk, start the next epoch's account."""
    record = measure.epoch_record(run, env_stats, alpha)
    if record["distinct_tasks"]:
        run.success = record["success_rate"]
    run.history.append(record)
    append_jsonl(run.folder / "metrics.jsonl", [record])
    append_jsonl(run.folder / "samples.jsonl", measure.samples(run))
    print(measure.line(record), flush=True)
    mute = [r for r in run.history[-MUTE:] if r["written"] and not r["distinct_tasks"]]
    run.part = Part(t=run.part.t + 1)
    checkpoint.save(run)
    if len(mute) == MUTE and record["epoch"] < run.o.epochs:  # after the last it is of no use
        finish(run)
        raise UserError(f"the simulator wrote no valid task in {MUTE} epochs running "
                        f"({record['invalid']}): stopped; everything so far is in {run.folder}")


def finish(run):
    """Adapters, figures, report and the closing words."""
    for name in run.policy.params:
        run.policy.save_adapter(name, run.folder / "adapters" / name)
    if run.o.model:  # the embedded world's few MB are of no interest
        print(memory.peaks_line(run.peaks, run.policy.device))
        (run.folder / "memory.json").write_text(json.dumps(run.peaks, indent=1))
    report.write(run.folder)
    print(report.closing_words(run.folder))


# ---------------------------------------------------------------------------------------------
# the command line


def check_options(o: Options) -> Options:
    """Raises UserError for the first option whose value cannot work; returns the options."""
    def need(ok, name, what):
        if not ok:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(o, name)!r}: {what}")
    for f in dataclasses.fields(o):
        need(f.type is not float or math.isfinite(getattr(o, f.name)), f.name, "must be finite")
    for name in ("alpha", "alpha_end"):
        need(0 < getattr(o, name) < 1, name, "must lie strictly between 0 and 1")
    need(o.G >= 2, "G", "a group needs at least 2 rollouts, with one there is no baseline")
    for name in ("seeds", "variations", "steps", "rank", "max_task_tokens", "max_response_tokens",
                 "max_prompt_tokens", "val_samples", "inner_epochs", "env_batch", "env_probe",
                 "token_budget", "max_rows"):
        need(getattr(o, name) >= 1, name, "must be at least 1")
    for name in ("epochs", "threads", "agreement", "mini_batch", "env_updates", "env_age",
                 "pool_age", "k_min", "beta", "lam", "agent_kl", "env_kl", "replay", "seed"):
        need(getattr(o, name) >= 0, name, "must not be negative")
    for name in ("base_share", "env_fresh", "success_at", "reward_noise"):
        need(0 <= getattr(o, name) <= 1, name, "must lie between 0 and 1")
    for name in ("agent_lr", "env_lr", "temperature", "clip", "env_kl_cap"):
        need(getattr(o, name) > 0, name, "must be greater than 0")
    need(o.seed < 2 ** 60, "seed", "must be below 2 ** 60")
    need(o.threads <= 1024, "threads", "more than 1024 threads are of no use")
    for name, choices in CHOICES.items():
        need(getattr(o, name) in choices, name, f"choose from {', '.join(filter(None, choices))}")
    return o


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are UserErrors: one line each, like all others."""

    def error(self, message):
        raise UserError(f"{message}; see python {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """An argument parser made from Options: name, type, default and the comment as help."""
    comments = dict(re.findall(r"^    (\w+): .*?# (.*)$", inspect.getsource(Options), re.MULTILINE))
    p = Parser(prog="genenv.py", description="GenEnv: an agent and a task simulator co-evolve.",
                argument_default=argparse.SUPPRESS, allow_abbrev=False)
    p.add_argument("--preset", help=f"a set of options: {', '.join(PRESETS)}; others override it")
    for f in dataclasses.fields(Options):
        flag = "--" + f.name.replace("_", "-")
        text = f"{comments[f.name]} (default: {f.default!r})".replace("%", "%%")
        if f.type is bool:
            p.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            p.add_argument(flag, type=f.type, help=text)
    return p


def parse_options(argv) -> Options:
    """Command line -> Options: defaults, then the preset or the resumed run's, then what is given.

    Raises UserError for unknown options, values of the wrong kind, and options that a resumed run
    must not change.
    """
    given = vars(parser().parse_args(argv))
    preset = given.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}: choose from {', '.join(PRESETS)}")
    base = dict(PRESETS[preset]) if preset else {}
    if given.get("resume"):
        base = checkpoint.resumed_options(given, base, Options)
    return check_options(Options(**{**base, **given}))


def main(argv=None) -> int:
    """Entry point; returns the exit code: 0, 2 for a user's mistake, 128 + n after a signal n."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["export"]:
            return export.main(argv[1:])
        train(parse_options(argv))
        return 0
    except UserError as error:
        print(f"genenv: {error}", file=sys.stderr)
        return 2
    except checkpoint.Stopped as stopped:
        print(stopped)
        return 128 + stopped.signal
    except OSError as error:  # a full disk, a file that may not be written
        what = f"{error.filename}: " if error.filename else ""
        print(f"genenv: {what}{' '.join(str(error.strerror or error).split())}; a run that had "
              "begun goes on from its last checkpoint with --resume", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # a second signal, or one before the run had begun
        print("stopped at once; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
