"""Run GenEnv: an agent and an environment simulator train each other (Algorithm 1).

    python genenv.py                                  # the default world, on a laptop
    python genenv.py --variant random                 # the simulator is never trained (ablation)
    python genenv.py --alpha-schedule linear --alpha 0.7 --alpha-end 0.4
    python genenv.py --resume --out runs/000-genenv   # continue where a run stopped
    python genenv.py warm-start --model M --base-tasks F --out DIR    # for a small model, first
    python genenv.py --help                           # every option with its meaning

Paper: Algorithm 1. `epoch` below reads like it: (1) generate and interact, (2) update both
policies, (3) aggregate. GRPO is in grpo.py (Eq. 4), RWR in rwr.py. Success rate, R_env and the
filter are in curriculum.py (Eq. 2, 3), the pools in data_pool.py, and the details of (1) in
interaction.py. worlds/ defines the domain (Eq. 1). policy.py holds both policies, and model/ loads
and runs them. support/ is the program around the algorithm: options, checkpoints, metrics, reports.

tests/test_theory.py checks two statements that the paper makes about these pieces:
  Prop. 1 (Eq. 5): C_min p (1 - p) <= E||g||^2 <= C_max p (1 - p) for the gradient g of Eq. 4 and
    the success rate p of a task, if ||grad log pi||^2 is between C_min and C_max. Both bounds are
    largest at p = 1/2, which is why the paper aims at tasks that are solved half of the time.
  Thm. 1 (Eq. 9): given two tasks with success rates p_1 and p_2 and n attempts each, the
    probability that R_env, computed from the measured p_hats, does not rank the one nearer to alpha
    first is at most 4 exp(-2/9 gap^2 n), where gap is the difference between the distances
    |p_1 - alpha| and |p_2 - alpha|.

Names: "env" is the environment simulator. `run` is the Run object (support/run.py), and `run.o`, or
`o` for short, holds its Options. `run.state` is the progress of the current epoch. end_epoch
replaces it with a fresh state for the next epoch and carries over only `imitated`, the keys of
tasks already imitated. `run.policy` is the agent's Policy, `run.simulator` the simulator's. Unless
--env-model is given, they are one object with two adapters. `run.policies` lists them without
repetition.

Deviations: an epoch is split into small steps, so that new tasks can serve as seeds immediately and
GRPO stays on-policy. Replayed tasks are attempted again, because GRPO must not learn from old
traces. The simulator is updated once per epoch, as in the paper. README.md lists the other
differences.

A run folder holds config.json, metrics.jsonl (one record per epoch), samples.jsonl (tasks and
traces to read), train.jsonl (D_train), env.jsonl (D_env), checkpoint.pt, and at the end report.html
and adapters/{agent,env} in PEFT format.
"""
import dataclasses
import math
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads slow other programs down
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would break up our own output
warnings.filterwarnings("ignore", category=FutureWarning)  # libraries warn about each other

from errors import exit_code, loading

with loading():  # these imports take seconds; a missing package is reported in one line
    import torch
    from tqdm import tqdm
    from policy import Rollout
    from support import checkpoint, screen

import curriculum
from data_pool import EnvRecord, Task, Trial, distinct
from grpo import grpo_update
from interaction import read_written, try_tasks
from model.memory import enough_memory
from rwr import draw_kl_sample, rwr_update
from support.metrics import mean
from support.options import Options
from support.run import Run, alpha_of, end_epoch, finish, note_refused, prepare_run
from support.start import start
from worlds import task_keys

WRITE_ROUNDS = 4     # the simulator gets at most this many rounds to fill the batch of a step
REPLAY = 1 / 8       # tasks replayed from D_train, as a share of a full batch of new tasks
STATIC_PER_BASE = 5  # GenEnv-Static gets this many variations of each base task

# ---------------------------------------------------------------------------------------------
# Algorithm 1


def train(o: Options, world=None) -> Path:
    """Run Algorithm 1 and return the run folder.

    world: a world that is already open; with None, o.world is opened here. Raise UserError for
    anything that the user can fix.
    """
    run = prepare_run(o, world)
    print(screen.LEGEND)
    with run.lock, checkpoint.stop_signals(run), enough_memory():
        if run.state.epoch == 0:
            measure_untrained(run)
        while run.state.epoch <= o.epochs:  # end_epoch puts the next epoch's state in run.state
            epoch(run)
        finish(run)
    return run.folder


def epoch(run: Run):
    """Run epoch t of Algorithm 1. The numbers (1) to (3) are those of the module's docstring.

    An epoch has --steps steps. Each of them generates and attempts tasks (1), trains the agent (2a)
    and extends D_train (3a). Then the epoch trains the simulator (2b) and extends D_env (3b) once.
    """
    o, state = run.o, run.state
    alpha = alpha_of(run)  # paper: 0.5 throughout
    # disable=None shows the bar only on a terminal: in a log file it would clutter the output.
    for step in tqdm(range(state.step, o.steps), screen.progress(run), leave=False, disable=None):
        state.step = step  # end_step adds 1, so a run stopped after this step resumes with the next
        # 1. generate and interact; a few tasks from D_train are attempted again
        tasks, records = generate(run, alpha)  # T_t ~ pi_env
        trials = interact(run, fill_batch(run, tasks))  # E_t; Eq. 1: r, Eq. 2: p_hat
        # 2a. agent update
        state.agent.append(update_agent(run, trials))  # GRPO on r (Eq. 4)
        # 3a. aggregate the agent's side; what the simulator wrote is collected for 2b and 3b
        add_attempts(run, trials)  # D_train <- D_train + Valid(E_t)
        attach_p_hats(records, trials)
        state.records += records
        checkpoint.end_step(run)
    # 2b. environment update, on what the simulator wrote in this epoch (fresh) and in earlier ones
    # (old, from D_env). If a task has several records, only the newest counts.
    records = distinct(run.env_pool.imitable(state.epoch) + state.records)
    # R_env of old records is computed again because alpha may have changed. Their p_hat is not
    # measured again, although it may be MAX_AGE epochs old (data_pool.py) and the agent has changed
    # since then.
    for record in records:
        p_hat = record.p_hat_of(o.p_hat_unit)
        record.r_env = curriculum.R_env(o.difficulty_reward, p_hat, alpha, o.beta)  # Eq. 3
    records = learnable_records(run, records, alpha)  # |p_hat - alpha| <= k_min
    fresh = [r for r in records if r.epoch == state.epoch]
    old = [r for r in records if r.epoch < state.epoch]
    env_stats = {"env_kept": len(fresh)}  # this metric does not count old records
    if o.variant == "genenv":  # the other variants never train the simulator
        env_stats |= update_environment(run, fresh, old)  # RWR, w ~ exp(lam * R_env)
    # 3b. aggregate the simulator's side: all valid generations, in the band or not. Those that are
    # imitated later get their weights then.
    run.env_pool.add(state.records)  # D_env <- D_env + weighted env generations
    end_epoch(run, env_stats, alpha)


def measure_untrained(run: Run):
    """Run epoch 0: let the agent attempt one batch, and measure both policies before training.

    Nothing is trained. Tasks with a valid trace enter D_train, but no record enters D_env.
    """
    state, alpha = run.state, alpha_of(run)
    # This loop has one step, or none if the run was stopped after that step and is now resumed.
    for _ in tqdm(range(state.step, 1), screen.progress(run), leave=False, disable=None):
        add_ready_made(run)  # the tasks of GenEnv-Static, or those of a teacher
        tasks, records = generate(run, alpha)
        trials = interact(run, tasks)
        add_attempts(run, trials)
        attach_p_hats(records, trials)
        state.records += records
        checkpoint.end_step(run)
    # the records are only counted: epoch 0 adds nothing to D_env
    near_alpha = learnable_records(run, distinct(state.records), alpha)
    end_epoch(run, {"env_kept": len(near_alpha)}, alpha)


# ---- 1. generate


def generate(run, alpha) -> tuple[list[Task], list[EnvRecord]]:
    """Return a batch T_t of tasks, and one D_env record per task, still without a p_hat.

    The simulator writes --variations tasks for each of --seed-tasks seed tasks. The batch is
    smaller if too many texts are invalid. A variant whose loop has no simulator gets ready-made
    tasks, which have no records.
    """
    o = run.o
    if o.variant not in ("genenv", "random"):  # static, teacher or base
        return draw_ready_made(run), []
    tasks, records = [], []
    for _ in range(WRITE_ROUNDS):  # some texts are invalid: later rounds replace them
        missing = o.seed_tasks * o.variations - len(tasks)
        if not missing:
            break
        n_seeds = math.ceil(missing / o.variations)
        recent = run.train_pool.recent(run.state.epoch)
        seed_tasks = curriculum.select_seed_tasks(
            o.seed_selection, run.train_pool.base, recent, n_seeds, o.base_share, alpha, run.rng)
        more_tasks, more_records = write_tasks(run, seed_tasks, o.variations, batch=tasks)
        tasks, records = tasks + more_tasks[:missing], records + more_records[:missing]
    return tasks, records


def write_tasks(run, seed_tasks, variations, batch=()) -> tuple[list[Task], list[EnvRecord]]:
    """Let the simulator vary each seed task; return the valid variations and their records.

    Invalid texts are counted by reason and never imitated. Duplicates are invalid, too. batch: the
    tasks of this step's earlier rounds; a copy of one of them is a duplicate.
    """
    o, state, world = run.o, run.state, run.world
    # a world may add something to a seed task, such as the tools to choose from, but not change its
    # id
    seed_tasks = [world.seed_for(task, run.rng) for task in seed_tasks]
    # As in the paper, the context contains the recent success rate of the seed task. It does not
    # contain alpha: the simulator learns the target only from R_env.
    prompts = []
    for task in seed_tasks:
        p_hat = run.train_pool.recent_p_hat(task, state.epoch)
        prompts.append(run.simulator.encode(world.env_prompt(task, p_hat)))
    rollouts = run.simulator.sample("env", prompts, variations, o.max_task_tokens, o.temperature,
                                    run.sampler, max_rows=o.max_rows)
    # Here a group is all that was written for one seed task (in GRPO: all attempts at one task).
    # Groups are numbered consecutively within an epoch.
    first_group = len(state.env_rollouts) // variations
    tasks, records = [], []
    for w in read_written(world, o, run.policies, rollouts, seed_tasks, epoch=state.epoch,
                          held_out=run.held_out, batch=batch):
        prompt, response = w.rollout.prompt, w.rollout.response
        group = first_group + w.rollout.group
        # invalid texts are kept, too: the KL is measured on both kinds, so it shows a drift to junk
        state.env_rollouts.append(Rollout(group, prompt, response))
        if w.task is None:
            note_refused(run, seed_tasks[w.rollout.group], w.text, w.reason)
            continue
        tasks.append(w.task)
        records.append(EnvRecord(
            prompt=prompt, response=response, text=w.text, task_id=w.task.id,
            keys=sorted(task_keys(world, w.task)), group=group, epoch=state.epoch))
    return tasks, records


def fill_batch(run, tasks) -> list[Task]:
    """Top up the batch of new tasks with tasks replayed from D_train.

    Replay keeps the agent from forgetting earlier curricula. Each replayed task is a base task with
    probability --base-share. Replayed tasks also stand in for missing new ones, so the filled batch
    always has the same size.
    """
    size = round(run.o.seed_tasks * run.o.variations * (1 + REPLAY))
    return tasks + run.train_pool.sample(size - len(tasks), run.o.base_share, run.rng)


def add_ready_made(run):
    """Add to D_train the tasks that are made before training starts.

    These are the teacher's tasks or, for GenEnv-Static, those that the untrained simulator writes
    as variations of every base task.
    """
    for task in run.teacher:
        run.train_pool.add(task, [], None)
    if run.o.variant == "static":
        for task in write_tasks(run, run.train_pool.base, STATIC_PER_BASE)[0]:
            run.train_pool.add(dataclasses.replace(task, origin="static"), [], None)


def draw_ready_made(run) -> list[Task]:
    """Draw a batch from all of D_train, base tasks included, for a variant without a simulator."""
    tasks = list(run.train_pool.tasks.values())
    picks = torch.randperm(len(tasks), generator=run.rng)[:run.o.seed_tasks * run.o.variations]
    return [tasks[i] for i in picks.tolist()]


# ---- 1. interact


def interact(run, tasks) -> list[Trial]:
    """Let the agent attempt every task G times, and score the attempts."""
    o, state = run.o, run.state
    # Eq. 1: r of each attempt, Eq. 2: p_hat of each task
    trials = try_tasks(run.world, o, run.policy, tasks, o.G, o.temperature, run.sampler)
    state.trials += trials
    # for the entropy of the policy; tokens of observations, which it did not draw, count as 0
    state.agent_nats -= sum(logp for trial in trials for r in trial.rollouts for logp in r.logps)
    return trials


def add_attempts(run, trials):
    """Add the valid attempts to D_train: D_train <- D_train + Valid(E_t)."""
    for trial in trials:
        run.train_pool.add(trial.task, trial.traces, trial.p_hat, run.state.epoch)


# ---- 2a. the agent


def update_agent(run, trials) -> dict:
    """Make one GRPO update on a step's trials, and return its statistics.

    The reward is Eq. 1 unless --agent-reward names another one. p_hat always uses Eq. 1.
    """
    o = run.o
    rollouts = [r for trial in trials for r in trial.rollouts]  # B*G, for B tasks
    rewards = [[curriculum.agent_reward(o.agent_reward, e) for e in trial.traces]
               for trial in trials]
    rewards = torch.tensor(rewards, dtype=torch.float32)  # (B, G)
    stats = grpo_update(run.policy, "agent", run.agent_optimizer, rollouts, rewards, o, run.rng)
    for trial in trials:
        trial.rollouts = []  # GRPO is on-policy, so no later update may use them
    stats["reward"] = float(rewards.mean())
    return stats


# ---- 2b. the environment


def attach_p_hats(records, trials):
    """Set the three success rates of each D_env record of a step: that of its task, and the means
    over all variations of its seed task and over all new tasks of the step."""
    # The simulator may write a task that is already in D_train and that fill_batch has also drawn.
    # Such a task has two trials in this step, and the later one counts.
    by_task = {trial.task.id: trial.p_hat for trial in trials}
    for r in records:
        r.p_hat = by_task[r.task_id]
    for r in records:
        r.p_hat_seed = mean(other.p_hat for other in records if other.group == r.group)
        r.p_hat_batch = mean(other.p_hat for other in records)


def learnable_records(run, records, alpha) -> list[EnvRecord]:
    """Return the records that the simulator may learn from: those in the band around alpha.

    If the world sets imitate_once, leave out tasks that were imitated in an earlier epoch.
    """
    o, imitated = run.o, set(run.state.imitated)
    in_band = [r for r in records
               if curriculum.in_band(r.p_hat_of(o.p_hat_unit), alpha, o.k_min)]
    return [r for r in in_band if imitated.isdisjoint(r.keys)]


def update_environment(run, fresh, old) -> dict:
    """Make one RWR update on the records in the band, and return its statistics.

    fresh: the records of this epoch; old: those of D_env. A KL penalty keeps the simulator near
    its initial state, and a cap limits how far this update may move it.
    """
    kl_sample = draw_kl_sample(run.state.env_rollouts, run.rng)
    stats = rwr_update(run.simulator, "env", run.env_optimizer, fresh, old, kl_sample, run.o,
                       run.rng)
    records = [*fresh, *old]
    # note only the records that an optimiser step used: the update may end before the others, which
    # may still be imitated in a later epoch
    if run.world.imitate_once:
        run.state.imitated += [key for i in stats["env_imitated"] for key in records[i].keys]
    return stats


# ---------------------------------------------------------------------------------------------
# the command line


def main(argv) -> int:
    """Run `python genenv.py ARGV` and return its exit code.

    The code is 0 after success, 2 after a user's mistake, and 128 + n after signal n.
    """
    return exit_code(lambda: train(*start(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
