"""GenEnv, the loop: an agent and an environment simulator that train each other (Algorithm 1).

    python genenv.py                                  # the embedded world, a laptop, ~2 minutes
    python genenv.py --variant random                 # the simulator is never trained (ablation)
    python genenv.py --alpha-schedule linear --alpha 0.7 --alpha-end 0.4
    python genenv.py --help                           # every option with its meaning

What of the paper this is: Algorithm 1. `epoch` below reads like it: generate and interact, update
both policies, aggregate. The pieces are GRPO in grpo.py (Eq. 4), RWR in rwr.py, success rate,
R_env and filter in curriculum.py (Eq. 2, 3), the pools in data_pool.py, the domain in worlds/ (Eq. 1).

Where it differs on purpose: an epoch is a number of small steps, so that the agent sees tasks of
the present simulator; the simulator itself is updated once per epoch, as in the paper. Tasks of
D_train are rolled out afresh, so GRPO stays on-policy. README.md lists what the paper leaves open.

A run folder holds config.json, metrics.jsonl, samples.jsonl, train.jsonl (D_train), env.jsonl
(D_env), adapters/agent and adapters/env in PEFT format, figures/*.png.
"""
import argparse
import dataclasses
import json
import math
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore", category=FutureWarning)

import torch
from tqdm import tqdm

import curriculum
from data_pool import EnvPool, EnvRecord, Task, Trace, TrainPool, UserError, append_jsonl
from grpo import grpo_update
from rwr import draw_batches, rwr_update
from worlds import InvalidTask, load_world

VARIANTS = ("genenv", "random", "static")


@dataclass(frozen=True)
class Options:
    """Every option of a run; the comment beside each is its --help text."""
    # the run
    out: str = ""                     # run folder; empty: the next free runs/NNN-VARIANT
    variant: str = "genenv"           # genenv | random (simulator never trained) | static (tasks written once)
    world: str = "ladder"             # domain, a module of worlds/
    seed: int = 0                     # seeds adapters, sampling and every choice of the loop
    threads: int = 0                  # torch threads; 0 = all cores
    cache_dir: str = "runs/cache"     # where the embedded world keeps its base model
    # models
    model: str = ""                   # local folder or hub name of a chat model (not for the ladder world)
    base_tasks: str = ""              # JSONL of base tasks (not for the ladder world)
    rank: int = 16                    # LoRA rank of both adapters
    # the loop
    epochs: int = 24                  # T of Algorithm 1
    steps: int = 6                    # agent updates per epoch
    seeds: int = 16                   # seed tasks per step that the simulator varies
    variations: int = 4               # tasks written per seed (paper: 4)
    G: int = 8                        # rollouts per task
    replay: float = 0.125             # share of each agent batch replayed from D_train and base
    base_share: float = 0.5           # share of seeds (and of replayed tasks) from the base set
    seed_selection: str = "uniform"   # which recent tasks become seeds: uniform | curated (near alpha)
    pool_age: int = 2                 # epochs for which a generated task counts as recent
    max_task_tokens: int = 24         # length limit of a generated task
    max_response_tokens: int = 24     # length limit of an agent response
    temperature: float = 1.0          # of sampling and of every log-prob
    # agent (GRPO)
    agent_lr: float = 1e-3            # AdamW on the agent's LoRA weights
    clip: float = 0.2                 # epsilon of the clipped surrogate
    agent_kl: float = 0.001           # KL coefficient to the initial policy
    kl_estimator: str = "k3"          # k1 | k2 | k3, see grpo.token_kl
    scale: str = "std"                # advantages divided by the group's std, or none
    aggregation: str = "token"        # mean over tokens, or over sequences
    inner_epochs: int = 1             # passes over each rollout batch
    mini_batch: int = 0               # groups per optimiser step; 0 = the whole batch
    # environment (RWR)
    alpha: float = 0.5                # target success rate
    alpha_end: float = 0.5            # where the linear, cosine and step schedules arrive
    alpha_schedule: str = "constant"  # a function alpha_NAME of curriculum.py
    difficulty_reward: str = "bell"   # a function reward_NAME of curriculum.py; bell is Eq. 3
    beta: float = 2.0                 # sharpness of R_env
    k_min: float = 0.26               # band |p_hat - alpha| <= k_min that is learned from (paper 0.1)
    lam: float = 1.0                  # weights ~ exp(lam * R_env)
    p_hat_unit: str = "task"          # success rate of one task, or of all variations of a seed
    success_at: float = 0.5           # reward from which an attempt counts as a success
    env_lr: float = 1e-3              # AdamW on the simulator's LoRA weights
    env_updates: int = 12             # optimiser steps per epoch
    env_batch: int = 32               # generations per optimiser step
    env_fresh: float = 0.75           # share of this epoch's generations in a mini-batch, rest D_env
    env_age: int = 4                  # epochs after which a generation of D_env is no longer used
    env_kl: float = 0.05              # KL coefficient to the initial simulator
    env_kl_cap: float = 0.15          # largest KL of one update, nats per token; beyond it is undone
    env_probe: int = 128              # fresh generations on which that KL is measured
    # memory
    token_budget: int = 16384         # padded tokens per micro-batch of a training pass
    max_rows: int = 512               # rollouts decoded at once


# ---------------------------------------------------------------------------------------------
# the algorithm


def train(o: Options) -> Path:
    """Run Algorithm 1 and return the run folder. Raises UserError on what a user can mend."""
    run = prepare_run(o)
    log_epoch(run, 0, dry_epoch(run), time.time())  # the state before training
    for t in range(1, o.epochs + 1):
        started = time.time()
        log_epoch(run, t, epoch(run, t), started)
    finish(run)
    return run.folder


def epoch(run, t: int) -> dict:
    """One epoch of Algorithm 1; returns its statistics."""
    o, stats, fresh, probe = run.o, new_stats(), [], []
    alpha = curriculum.alpha_now(o.alpha_schedule, curriculum.Context(
        t, o.epochs, run.success, o.alpha, o.alpha_end))
    for _ in tqdm(range(o.steps), desc=f"epoch {t}", leave=False, disable=not run.progress):
        # 1. generate and interact: T_t ~ pi_env, then G attempts of the agent at every task
        generations = generate(run, t, alpha, stats)
        tasks = [g.task for g in generations] + replayed(run, len(generations))
        groups, rewards = interact(run, tasks, t, stats)  # Eq. 1, Eq. 2
        # 2a. agent update: GRPO on r
        stats["agent"].append(grpo_update(
            run.policy, "agent", run.agent_optimizer, groups, rewards, temperature=o.temperature,
            clip=o.clip, kl_coef=o.agent_kl, kl_kind=o.kl_estimator, scale=o.scale,
            how=o.aggregation, inner_epochs=o.inner_epochs, mini_batch=o.mini_batch,
            token_budget=o.token_budget, generator=run.rng))
        # 3. aggregate: D_train <- D_train + Valid(E_t) happened in interact; D_env below
        fresh += records_of(run, generations, t)
    # 2b. environment update: RWR on what fell into the band
    stats.update(update_environment(run, fresh, alpha, t))
    run.env_pool.add(fresh)
    return {**stats, "alpha": alpha}


def generate(run, t, alpha, stats) -> list:
    """A task batch from the simulator: `seeds` seed tasks, `variations` of each, verified.

    Returns namespaces (task, prompt ids, response ids, text, seed id); duplicates within the batch
    and everything that is no task are dropped and counted by reason.
    """
    o, world = run.o, run.world
    if o.variant == "static":
        return draw_static(run)
    recent = run.train_pool.recent(t, o.pool_age)
    seeds = curriculum.select_seeds(run.train_pool.base, recent, o.seeds, o.base_share,
                                    curriculum.SEED_SELECTIONS[o.seed_selection], alpha, run.rng)
    return write_tasks(run, seeds, o.variations, t, alpha, stats)


def write_tasks(run, seeds, variations, t, alpha, stats) -> list:
    """Ask the simulator for variations of each seed; parse, verify, drop duplicates."""
    o, world = run.o, run.world
    prompts = [run.policy.encode(world.env_prompt(s, recent_success(run, s), alpha)) for s in seeds]
    rollouts = run.policy.sample("env", prompts, variations, o.max_task_tokens, o.temperature,
                                 run.sampler, max_rows=o.max_rows)
    out, seen = [], set()
    for i, r in enumerate(rollouts):
        seed, text = seeds[i // variations], run.policy.decode(r.response)
        stats["written"] += 1
        try:
            if r.truncated:
                raise InvalidTask("too long")
            task = world.parse_task(text, seed, t)
            if task.id in seen:
                raise InvalidTask("duplicate in the batch")
        except InvalidTask as reason:
            stats["invalid"][str(reason)] += 1
            continue
        seen.add(task.id)
        out.append(SimpleNamespace(task=task, prompt=r.prompt, response=r.response, text=text,
                                   seed=seed.id, slot=i // variations))
    return out


def recent_success(run, seed: Task) -> float:
    """The success signal in the simulator's context: the seed's own p_hat, else the agent's."""
    return run.train_pool.p_hat.get(seed.id, (run.success, 0))[0]


def replayed(run, n_fresh: int) -> list:
    """Tasks of D_train for the agent's batch, so that earlier curricula are kept."""
    o = run.o
    n = round(o.seeds * o.variations * o.replay)
    return run.train_pool.sample(n, o.base_share, run.rng)


def interact(run, tasks, t, stats):
    """G attempts at every task; fills D_train and the statistics.

    Returns groups (prompt ids, G response ids) and rewards (B, G) for grpo_update.
    """
    o, world = run.o, run.world
    prompts = [run.policy.encode(world.agent_prompt(task)) for task in tasks]
    started = time.time()
    rollouts = run.policy.sample("agent", prompts, o.G, o.max_response_tokens, o.temperature,
                                 run.sampler, max_rows=o.max_rows)
    stats["rollout_seconds"] += time.time() - started
    stats["rollout_tokens"] += sum(len(r.response) for r in rollouts)
    groups, rewards = [], torch.zeros(len(tasks), o.G)
    for b, task in enumerate(tasks):
        members = rollouts[b * o.G:(b + 1) * o.G]
        traces = [trace_of(run, task, r) for r in members]
        rewards[b] = torch.tensor([e.reward for e in traces])
        p_hat = curriculum.success_rate([e.reward for e in traces], o.success_at)  # Eq. 2
        groups.append((prompts[b], [r.response for r in members]))
        run.train_pool.add(task, traces, p_hat, t)  # D_train <- D_train + Valid(E_t)
        stats["tries"].append((task, p_hat, traces))
    return groups, rewards


def trace_of(run, task, rollout) -> Trace:
    """Score one attempt (Eq. 1). A response that never ended earns nothing."""
    text = run.policy.decode(rollout.response)
    reward, valid = run.world.score(task, text)
    if rollout.truncated:
        reward, valid = 0.0, False
    return Trace(text, reward, valid, rollout.truncated, len(rollout.response))


def records_of(run, generations, t) -> list:
    """D_env records of a batch, each with the p_hat of its task, or of all tasks of its seed."""
    p_hat = {g.task.id: run.train_pool.p_hat.get(g.task.id) for g in generations}
    generations = [g for g in generations if p_hat[g.task.id] and g.prompt]
    values = [p_hat[g.task.id][0] for g in generations]
    if run.o.p_hat_unit == "seed":
        by_seed = {}
        for g, p in zip(generations, values):
            by_seed.setdefault(g.slot, []).append(p)
        values = [sum(by_seed[g.slot]) / len(by_seed[g.slot]) for g in generations]
    return [EnvRecord(g.prompt, g.response, g.text, g.task.id, g.seed, p, t)
            for g, p in zip(generations, values)]


def update_environment(run, fresh, alpha, t) -> dict:
    """RWR on the records inside the band, fresh ones and those of D_env not yet too old."""
    o = run.o
    if o.variant != "genenv":
        return {"env_kept": 0}
    kept = [r for r in fresh if curriculum.in_band(r.p_hat, alpha, o.k_min)]
    aged = [(r, w) for r, w in run.env_pool.aged(t, o.env_age)
            if curriculum.in_band(r.p_hat, alpha, o.k_min)]
    records = kept + [r for r, _ in aged]
    for r in records:  # alpha may have moved since the record was written
        r.r_env = curriculum.DIFFICULTY_REWARDS[o.difficulty_reward](r.p_hat, alpha, o.beta)
    batches = draw_batches(len(kept), [w for _, w in aged], o.env_updates, o.env_batch,
                           o.env_fresh, run.rng) if kept else []
    probe = [(r.prompt, [r.response]) for r in fresh[:o.env_probe]]
    stats = rwr_update(run.policy, "env", run.env_optimizer, records, batches, probe, lam=o.lam,
                       temperature=o.temperature, kl_coef=o.env_kl, kl_kind=o.kl_estimator,
                       kl_cap=o.env_kl_cap, token_budget=o.token_budget)
    return {**stats, "env_kept": len(kept)}


# ---------------------------------------------------------------------------------------------
# the static ablation: tasks are written once, before training


def write_static(run, stats):
    """GenEnv-Static: five variations of every base task by the untrained simulator."""
    base = run.train_pool.base
    written = write_tasks(run, base, 5, 0, run.o.alpha, stats)
    run.static = base + [dataclasses.replace(g.task, origin="static") for g in written]


def draw_static(run) -> list:
    """As many tasks as the simulator would write, drawn from the static set."""
    n = run.o.seeds * run.o.variations
    picks = torch.randint(len(run.static), (n,), generator=run.rng).tolist()
    return [SimpleNamespace(task=run.static[i], prompt=None, seed="", slot=0) for i in picks]


# ---------------------------------------------------------------------------------------------
# measuring


def new_stats() -> dict:
    """Empty accumulators of one epoch."""
    return {"written": 0, "invalid": Counter(), "tries": [], "agent": [],
            "rollout_tokens": 0, "rollout_seconds": 0.0}


def dry_epoch(run) -> dict:
    """Epoch 0: one batch is written and tried, nothing is trained."""
    stats = new_stats()
    if run.o.variant == "static":
        write_static(run, stats)
    tasks = [g.task for g in generate(run, 0, run.o.alpha, stats)]
    interact(run, tasks, 0, stats)
    return {**stats, "alpha": run.o.alpha, "env_kept": 0}


@torch.no_grad()
def validate(run, split="validation", samples=4) -> dict:
    """Held-out tasks: greedy success, per category, and the mean of `samples` sampled attempts."""
    o, world = run.o, run.world
    tasks = world.validation_tasks(o, split)
    prompts = [run.policy.encode(world.agent_prompt(task)) for task in tasks]
    generator = run.policy.generator(0)  # the same noise every time: epochs are comparable
    rate = {}
    for G, temperature in ((1, 0.0), (samples, o.temperature)):
        out = run.policy.sample("agent", prompts, G, o.max_response_tokens, temperature, generator,
                                max_rows=o.max_rows)
        wins = [curriculum.success_rate(
            [trace_of(run, task, r).reward for r in out[b * G:(b + 1) * G]], o.success_at)
            for b, task in enumerate(tasks)]
        rate[temperature] = wins
    groups = {}
    for task, win in zip(tasks, rate[0.0]):
        groups.setdefault(world.category(task), []).append(win)
    return {"validation": mean(rate[0.0]), "validation_sampled": mean(rate[o.temperature]),
            "validation_unsolved": mean([w == 0 for w in rate[o.temperature]]),
            "validation_by": {name: mean(wins) for name, wins in groups.items()}}


def mean(values) -> float:
    """Arithmetic mean; NaN-free: 0 for an empty list."""
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def entropy(labels) -> float:
    """Entropy of a list of labels in bits."""
    counts = Counter(labels)
    total = sum(counts.values())
    return -sum(n / total * math.log2(n / total) for n in counts.values()) if total else 0.0


def measure(run, t, stats, started) -> dict:
    """The metrics record of an epoch."""
    new = [(task, p, e) for task, p, e in stats["tries"] if task.origin != "base" and
           (task.epoch == t or task.origin == "static")]
    traces = [e for _, _, es in stats["tries"] for e in es]
    agent = stats["agent"]
    record = {
        "epoch": t, "alpha": stats["alpha"],
        "success_rate": mean(p for _, p, _ in new),
        **validate(run),
        "reward": mean(e.reward for e in traces),
        "task_length": mean(run.world.task_length(task) for task, _, _ in new),
        "response_length": mean(e.tokens for e in traces),
        "solved": mean(p == 1 for _, p, _ in new), "unsolved": mean(p == 0 for _, p, _ in new),
        "distinct_tasks": len({task.id for task, _, _ in new}),
        "skill_entropy": entropy(s for task, _, _ in new for s in run.world.skills(task)),
        "written": stats["written"], "invalid": dict(stats["invalid"]),
        "truncated": mean(e.truncated for e in traces),
        **{key: mean(a[key] for a in agent) for key in
           ("kl", "clip_fraction", "grad_norm", "zero_variance")if agent},
        **{key: stats.get(key, 0) for key in ("env_kept", "env_kl", "env_kl_step", "env_ess",
                                              "env_loss", "env_steps", "env_capped")},
        "d_train": len(run.train_pool.tasks), "d_env": len(run.env_pool.records),
        "tokens_per_s": stats["rollout_tokens"] / max(1e-9, stats["rollout_seconds"]),
        "seconds": time.time() - started,
    }
    return {k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()}


def log_epoch(run, t, stats, started):
    """Measure, print one line, and put the epoch on disk."""
    record = measure(run, t, stats, started)
    run.success = record["success_rate"]
    append_jsonl(run.folder / "metrics.jsonl", [record])
    append_jsonl(run.folder / "samples.jsonl", samples(run, t, stats))
    run.train_pool.save()
    run.env_pool.save()
    run.history.append(record)
    print(f"epoch {t:3d}  success {record['success_rate']:.2f}  validation "
          f"{record['validation']:.2f}/{record['validation_sampled']:.2f}  task length {record['task_length']:.2f}  "
          f"response {record['response_length']:.1f}  band {record['env_kept']:3d}  "
          f"env KL {record['env_kl']:.3f}  distinct {record['distinct_tasks']:3d} H {record['skill_entropy']:.2f} steps {record['env_steps']} "
          f"{record['tokens_per_s']:5.0f} tok/s  {record['seconds']:.1f} s", flush=True)
    if record["written"] and not record["distinct_tasks"]:
        raise UserError(f"the simulator wrote no valid task in epoch {t} "
                        f"({dict(stats['invalid'])}); what there is stays in {run.folder}")


def samples(run, t, stats, n=4) -> list:
    """A few tasks with two traces each, for a person to read."""
    return [{"epoch": t, "task": task.text, "origin": task.origin, "p_hat": p_hat,
             "traces": [{"text": e.text, "reward": e.reward} for e in traces[:2]]}
            for task, p_hat, traces in stats["tries"][:n]]


# ---------------------------------------------------------------------------------------------
# the run


def prepare_run(o: Options):
    """Folder, world, policy, pools, optimisers and generators of a run."""
    world = load_world(o.world)
    world.prepare(o)
    torch.set_num_threads(o.threads or os.cpu_count() or 1)
    folder = make_folder(o)
    policy = world.load_policy(o)
    return SimpleNamespace(
        o=o, world=world, policy=policy, folder=folder, history=[], success=0.5,
        progress=sys.stderr.isatty(), static=[],
        train_pool=TrainPool(folder / "train.jsonl", world.base_tasks(o)),
        env_pool=EnvPool(folder / "env.jsonl"),
        agent_optimizer=policy.optimizer("agent", o.agent_lr),
        env_optimizer=policy.optimizer("env", o.env_lr),
        rng=torch.Generator().manual_seed(o.seed),      # choices of the loop
        sampler=policy.generator(o.seed + 1))           # tokens


def make_folder(o: Options) -> Path:
    folder = Path(o.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(asdict(o), indent=1))
    return folder


def finish(run):
    for name in ("agent", "env"):
        run.policy.save_adapter(name, run.folder / "adapters" / name)


def main():
    p = argparse.ArgumentParser()
    for f in dataclasses.fields(Options):
        p.add_argument("--" + f.name.replace("_", "-"), type=type(f.default), default=f.default)
    train(Options(**vars(p.parse_args())))


if __name__ == "__main__":
    main()
