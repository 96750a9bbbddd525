"""GenEnv, the loop: an agent and an environment simulator that train each other (Algorithm 1).

    python genenv.py                                  # the embedded world on a laptop
    python genenv.py --variant random                 # the simulator is never trained (ablation)
    python genenv.py --alpha-schedule linear --alpha 0.7 --alpha-end 0.4
    python genenv.py --resume --out runs/000-genenv   # go on where a run stopped
    python genenv.py warm-start --model M --base-tasks F --out DIR    # for a small model, first
    python genenv.py --help                           # every option with its meaning

What of the paper this is: Algorithm 1. `epoch` below reads like it: generate and interact, update
both policies, aggregate. The pieces are GRPO in grpo.py (Eq. 4), RWR in rwr.py, success rate,
R_env, filter and weights in curriculum.py (Eq. 2, 3), the pools in data_pool.py, the domain in
worlds/ (Eq. 1), both policies in policy.py. Prop. 1 and Thm. 1 (Eq. 5, 9) are statements about
these pieces: tests/test_theory.py checks them. run/ has what a run needs beside the algorithm:
`run` holds it all, `run.o` its Options, `run.state` what was done so far in this epoch
(run/frame.py).

Where it differs on purpose: an epoch is several small steps, so that new tasks become seed tasks at
once and GRPO stays on-policy; replayed tasks are also rolled out again. The simulator is updated
once per epoch, as in the paper. README.md lists what the paper leaves open.

A run folder holds config.json, metrics.jsonl (a record per epoch), samples.jsonl (tasks and traces
to read), train.jsonl (D_train), env.jsonl (D_env), adapters/{agent,env} in PEFT format, figures/,
report.html and checkpoints/.
"""
import dataclasses
import importlib
import math
import os
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries, about each other

if __name__ == "__main__":  # as a program: --help and mistakes are answered before torch is loaded
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries would fill a log
    from scripts.dispatch import dispatch
    sys.exit(dispatch(sys.argv[1:], lambda o: importlib.import_module("genenv").train(o)))

import torch

from scripts import dispatch as commands
import curriculum
from data_pool import EnvRecord, Task, Trace, distinct
from grpo import grpo_update
from policy import Rollout
from support import checkpoint
from support import run as frame
from support.run import Run
from support.options import Options
from rwr import draw_kl_sample, rwr_update
from support import metrics as measure
from worlds import NO_SEED, attempt_score, play, rollout_rows, task_keys, transcript, written_tasks

# ---------------------------------------------------------------------------------------------
# Algorithm 1


def train(o: Options) -> Path:
    """Run Algorithm 1 and return the run folder. Raises UserError on what a user can mend."""
    if o.resume and checkpoint.is_complete(o):
        return Path(o.out)
    run = frame.prepare_run(o)
    with run.lock, checkpoint.stop_signals(run):  # no other program writes into this folder
        if run.state.epoch == 0:
            measure_untrained(run)
        frame.hold_at_gate(run)
        while run.state.epoch <= o.epochs:  # t = 1..T, or on from a checkpoint; end_epoch counts
            epoch(run)
        frame.finish(run)
    return run.folder


def epoch(run: Run):
    """One epoch t of Algorithm 1. `steps` times: generate and try tasks (1), train the agent (2a),
    extend D_train (3a); then once: train the simulator (2b), extend D_env (3b)."""
    o, state = run.o, run.state
    alpha = curriculum.next_alpha(o.alpha_schedule, frame.context_of(run))  # paper: 0.5 throughout
    for step in frame.steps(run):
        state.step = step
        # 1. generate and interact; earlier tasks of D_train are tried again beside the new ones
        generations = generate(run, alpha)  # T_t ~ pi_env
        tasks = [g.task for g in generations]
        trials = interact(run, tasks + replayed(run, len(tasks)))  # E_t; Eq. 1: r, Eq. 2: p_hat
        # 2a. agent update
        state.agent.append(update_agent(run, trials))  # GRPO on r (Eq. 4)
        # 3a. aggregate the agent's side; what the simulator wrote waits for 2b
        for trial in trials:  # D_train <- D_train + Valid(E_t)
            run.train_pool.add(trial.task, trial.traces, trial.p_hat, state.epoch)
        state.records += env_records(run, generations, trials)
        checkpoint.stop_if_asked(run)
    # 2b. environment update, on this epoch's generations and on those of D_env, each task once
    records = distinct(state.records) + old_records(run)
    R = curriculum.named("reward_")[o.difficulty_reward]
    for r in records:  # Eq. 3; for old ones anew, as alpha may have moved
        r.r_env = R(r.p_hat_of(o.p_hat_unit), alpha, o.beta)
    kept = [r for r in records  # filter: |p_hat - alpha| <= k_min
            if curriculum.in_band(r.p_hat_of(o.p_hat_unit), alpha, o.k_min)]
    env_stats = update_environment(run, kept)  # RWR: w ~ exp(lam * R_env)
    # 3b. aggregate the simulator's side: all valid generations, in the band or not
    run.env_pool.add(state.records)  # D_env <- D_env + weighted env generations
    frame.end_epoch(run, env_stats, alpha)


# ---- 1. generate


@dataclass
class Generation:
    """What the simulator wrote, and the task that it is."""
    task: Task
    prompt: list[int] | None = None    # ids of its context; None for ready-made tasks
    response: list[int] | None = None  # ids of what it wrote
    text: str = ""                     # the same, decoded
    group: int = 0                     # generations of one group vary one seed task in one step


def generate(run, alpha) -> list[Generation]:
    """A task batch T_t: `variations` of each of `seed_tasks` seed tasks, checked to be tasks.

    If some generations are invalid, the simulator writes again until the batch is full
    (`seed_tasks` x `variations` valid tasks), or until --write-rounds times as many texts were
    asked for.
    """
    o = run.o
    if o.variant in curriculum.WITHOUT_SIMULATOR:  # draw equally many ready-made tasks
        return [Generation(task) for task in frame.fixed_tasks(run)]
    recent = run.train_pool.recent(run.state.epoch)
    batch, wanted = [], o.seed_tasks * o.variations
    asked, most = 0, o.seed_tasks * o.write_rounds  # seed tasks of this step
    while len(batch) < wanted and asked < most:
        # as many as the missing tasks take: one large round takes less time than several small ones
        missing = (wanted - len(batch)) / o.variations
        n = min(math.ceil(missing / max(valid_share(run), 1 / o.write_rounds)), most - asked)
        seed_tasks = curriculum.select_seed_tasks(
            run.train_pool.base or [NO_SEED], recent, n, o.base_share,
            curriculum.named("seeds_")[o.seed_selection], alpha, run.rng)
        first_group = run.state.step * most + asked  # groups are numbered through the epoch
        batch += agreed(run, write_tasks(run, seed_tasks, o.variations, alpha, batch, wanted,
                                         first_group))
        asked += n
    return batch


def valid_share(run) -> float:
    """Share of valid tasks among what the simulator wrote in this epoch, or else in the last."""
    written, refused = run.state.written, sum(run.state.invalid.values())
    if not written and run.history:
        written, refused = run.history[-1]["written"], sum(run.history[-1]["invalid"].values())
    return 1 - refused / written if written else 1.0


def write_tasks(run, seed_tasks, variations, alpha, batch=(), wanted=math.inf,
                first_group=0) -> list[Generation]:
    """Ask the simulator for variations of each seed task; parse, check, drop duplicates.

    Invalid generations are counted by reason and never imitated. batch: what earlier rounds gave;
    once there are `wanted` generations in all, no further text is read. first_group: number of the
    first seed task's group.
    """
    o, state = run.o, run.state
    seed_tasks = assigned(run, seed_tasks, alpha)
    # the simulator is told how often a seed task was solved, if that was measured recently
    prompts = [run.simulator.encode(run.world.env_prompt(
        s, run.train_pool.recent_p_hat(s, state.epoch), alpha)) for s in seed_tasks]
    rows = rollout_rows(o, variations, max(map(len, prompts)))
    with run.phase("simulator rollouts"):
        rollouts = run.simulator.sample("env", prompts, variations, o.max_task_tokens,
                                        o.temperature, run.sampler, max_rows=rows)
    out = []
    for r, text, task, reason in written_tasks(
            run.world, o, run.policies, rollouts, seed_tasks, alpha, state.epoch, run.held_out,
            [g.task for g in batch]):
        state.written += 1
        state.kl_sample.append([first_group + r.group, r.prompt, r.response])  # the KL of 2b is measured on these
        if reason:
            frame.note_refused(run, seed_tasks[r.group], text, reason)
        else:
            out.append(Generation(task, r.prompt, r.response, text, first_group + r.group))
        if len(batch) + len(out) >= wanted:
            break
    return out


def assigned(run, seed_tasks, alpha) -> list[Task]:
    """In a world with a list of functions to practise: the seed tasks, each with some functions to
    write for, drawn by --function-selection. Elsewhere the seed tasks as they are."""
    practice = run.practice()
    if not practice:
        return seed_tasks
    weigh = lambda counts, p_hats, alpha: [1.0] * len(counts)
    drawn = curriculum.select_functions(practice, len(seed_tasks), weigh, alpha, run.rng)
    return [run.world.assign(task, few, run.rng) for task, few in zip(seed_tasks, drawn)]


def agreed(run, generations) -> list[Generation]:
    """--agreement k: the generations that the simulator itself solves at least once in k tries.

    It is a check of generated answers: a task with a wrong or ambiguous answer also lands near
    alpha, so R_env alone would reward it.
    """
    o = run.o
    if not (o.agreement and generations):
        return generations
    with run.phase("agreement check"):
        rollouts, texts = play(run.world, o, run.simulator, "env", [g.task for g in generations],
                               o.agreement, o.temperature, run.sampler)
    solved = {r.group for r, text in zip(rollouts, texts)
              if trace_of(run, generations[r.group].task, r, text).reward >= curriculum.SUCCESS}
    run.state.invalid["no agreement"] += len(generations) - len(solved)
    return [g for b, g in enumerate(generations) if b in solved]


def replayed(run, n_new: int) -> list[Task]:
    """Tasks of D_train for the agent's batch beside its n_new new ones, so that earlier curricula
    are kept. They also replace invalid generations: the batch always has the same size."""
    o = run.o
    size = round(o.seed_tasks * o.variations * (1 + o.replay))
    return run.train_pool.sample(size - n_new, o.base_share, run.rng)


# ---- 1. interact


@dataclass
class Trial:
    """The agent's G attempts at one task."""
    task: Task
    rollouts: list      # G Rollouts
    traces: list[Trace]
    p_hat: float        # Eq. 2


def interact(run, tasks) -> list[Trial]:
    """G attempts of the agent at every task, scored."""
    o, state = run.o, run.state
    started = time.perf_counter()
    with run.phase("agent rollouts"):
        rollouts, texts = play(run.world, o, run.policy, "agent", tasks, o.G, o.temperature,
                               run.sampler, o.max_rows)
    state.rollout_seconds += time.perf_counter() - started
    state.rollout_tokens += sum(len(r.response) for r in rollouts)
    trials = []
    for b, task in enumerate(tasks):
        members = rollouts[b * o.G:(b + 1) * o.G]
        traces = [trace_of(run, task, *attempt) for attempt in
                  zip(members, texts[b * o.G:(b + 1) * o.G])]
        p_hat = curriculum.success_rate([e.reward for e in traces])  # Eq. 2
        if task.id in run.train_pool.p_hat:  # tried again: for a figure, and the schedule `learned`
            before, measured = run.train_pool.p_hat[task.id]
            state.replays.append((before, state.epoch - measured, p_hat))
        state.attempts.append((task, p_hat, traces))
        trials.append(Trial(task, members, traces, p_hat))
    return trials


def trace_of(run, task, rollout, text) -> Trace:
    """Score one attempt. One that ran into a limit of length or of turns earns nothing."""
    reward, valid = attempt_score(run.world, task, rollout, text)  # Eq. 1: r
    return Trace(transcript(rollout, text), reward, valid, bool(rollout.limit), rollout.tokens)


# ---- 2a. the agent


def update_agent(run, trials) -> dict:
    """One GRPO update on a step's trials. --agent-reward may replace Eq. 1 in it; p_hat never uses
    that reward."""
    o = run.o
    rollouts = [r for trial in trials for r in trial.rollouts]  # B*G of them
    reward = curriculum.named("agent_reward_")[o.agent_reward]
    rewards = torch.tensor([
        [reward(e.reward, e.valid, e.truncated, e.tokens)
         for e in trial.traces] for trial in trials])  # (B, G)
    with run.phase("agent update (GRPO)", "agent") as moved:
        stats = grpo_update(run.policy, "agent", run.agent_optimizer, rollouts, rewards, o, run.rng)
    return {**stats, **moved}


# ---- 2b. the environment


def env_records(run, generations, trials) -> list[EnvRecord]:
    """One D_env record for each generation of a step, with the p_hat of its task, of all variations
    of its seed task, and of the whole batch."""
    p_hat_of = {trial.task.id: trial.p_hat for trial in trials}
    written = [g for g in generations if g.prompt]  # ready-made tasks have no context
    p_hats, groups = [p_hat_of[g.task.id] for g in written], [g.group for g in written]
    of_seed = {k: measure.mean(p for p, g in zip(p_hats, groups) if g == k) for k in set(groups)}
    of_batch = measure.mean(p_hats)
    return [EnvRecord(g.prompt, g.response, g.text, g.task.id, sorted(task_keys(run.world, g.task)),
                      g.task.seed_task, g.group, p, of_seed[g.group], of_batch, run.state.epoch)
            for g, p in zip(written, p_hats)]


def old_records(run) -> list[EnvRecord]:
    """Records of D_env from earlier epochs, each task once; none of a task that was written again
    in this epoch."""
    again = {key for r in run.state.records for key in r.keys}
    return [r for r in distinct(run.env_pool.aged(run.state.epoch)) if again.isdisjoint(r.keys)]


def update_environment(run, kept) -> dict:
    """One update of the simulator on the records inside the band: those of this epoch first, then
    of D_env, under the KL penalty to the initial simulator and the cap on the update's own KL.
    """
    o, t = run.o, run.state.epoch
    fresh, old = [r for r in kept if r.epoch == t], [r for r in kept if r.epoch < t]
    n_fresh = len(fresh)
    if o.variant != "genenv":  # the simulator is never trained
        return {"env_kept": n_fresh}
    # all texts that were read, valid or not, so that drift towards malformed text is measured too
    kl_sample = draw_kl_sample([Rollout(*text) for text in run.state.kl_sample], run.rng)
    with run.phase("simulator update (RWR)", "env") as moved:
        stats = rwr_update(run.simulator, "env", run.env_optimizer, fresh, old, kl_sample, o, run.rng)
    return {**stats, "env_kept": n_fresh, "env_moved": moved["moved"],
            "other_moved": moved["other_moved"]}


# ---- before training


def measure_untrained(run):
    """Epoch 0: one batch is written and tried, nothing is trained. Its tasks are kept in D_train,
    but the generations do not enter D_env."""
    if run.o.variant == "static":
        write_static(run)
    for task in run.teacher:
        run.train_pool.add(task, [], None)
    for trial in interact(run, [g.task for g in generate(run, run.o.alpha)]):
        run.train_pool.add(trial.task, trial.traces, trial.p_hat, 0)
    frame.end_epoch(run, {}, run.o.alpha)


def write_static(run):
    """GenEnv-Static: the untrained simulator writes five variations of every base task, once."""
    for g in agreed(run, write_tasks(run, run.train_pool.base, 5, run.o.alpha)):
        run.train_pool.add(dataclasses.replace(g.task, origin="static"), [], None)


def main(argv=None) -> int:
    """Entry point; returns the exit code: 0, 2 for a user's mistake, 128 + n after a signal n."""
    return commands.dispatch(sys.argv[1:] if argv is None else argv, train)
