"""GenEnv, the loop: an agent and an environment simulator that train each other (Algorithm 1).

    python genenv.py                                  # the embedded world on a laptop
    python genenv.py --variant random                 # the simulator is never trained (ablation)
    python genenv.py --alpha-schedule linear --alpha 0.7 --alpha-end 0.4
    python genenv.py --resume --out runs/000-genenv   # go on where a run stopped
    python genenv.py warm-start --model M --base-tasks F --out DIR    # for a small model, first
    python genenv.py --help                           # every option with its meaning

What of the paper this is: Algorithm 1. `epoch` below reads like it: generate and interact, update
both policies, aggregate. The pieces are GRPO in grpo.py (Eq. 4), RWR in rwr.py, success rate, R_env
and filter in curriculum.py (Eq. 2, 3), the pools in data_pool.py, the domain in worlds/ (Eq. 1),
both policies in policy.py. run/ has what a run needs beside the algorithm: `run` holds it all,
`run.o` its Options, `run.state` what was done so far in this epoch (run/frame.py).

Where it differs on purpose: an epoch is several small steps, so that new tasks become seed tasks at
once and GRPO stays on-policy, for which tasks of D_train are rolled out afresh as well; the
simulator is updated once per epoch, as in the paper. README.md lists what the paper leaves open.

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

if __name__ == "__main__":  # before torch is loaded: --help and mistakes are answered at once
    from commands import dispatch
    sys.exit(dispatch(sys.argv[1:], lambda o: importlib.import_module("genenv").train(o)))

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries, about each other

import torch

import commands
import curriculum
from data_pool import EnvRecord, Task, Trace, distinct, priority
from grpo import grpo_update
from run import checkpoint, controls
from run.frame import Run, context_of, end_epoch, finish, fixed_tasks, note_refused, \
    prepare_run, progress_bar
from run.options import Options, parse_options
from rwr import draw_batches, effective_sample_size, grpo_weights, linear_weights, rwr_update, \
    rwr_weights, weight_ratio, whole_passes
from watch import measure
from worlds import NO_SEED, InvalidTask, attempt_score, play, rollout_rows, task_keys, transcript, \
    written_task

# ---------------------------------------------------------------------------------------------
# Algorithm 1


def train(o: Options) -> Path:
    """Run Algorithm 1 and return the run folder. Raises UserError on what a user can mend."""
    if o.resume and checkpoint.is_complete(o):
        return Path(o.out)
    run = prepare_run(o)
    with run.lock, checkpoint.stop_signals(run):  # no other program writes into this folder
        if run.state.epoch == 0:
            measure_untrained(run)
        for _ in range(run.state.epoch, o.epochs + 1):  # t = 1..T, or on from a checkpoint
            epoch(run)
        finish(run)
    return run.folder


def epoch(run: Run):
    """One epoch t of Algorithm 1: its step 1, 2 for the agent (2a) and 3 for D_train (3a) several
    times over, on a batch each; then 2 for the simulator (2b) and 3 for D_env (3b) on all of it."""
    o, state, started = run.o, run.state, time.perf_counter()
    alpha = curriculum.next_alpha(o.alpha_schedule, context_of(run))  # paper: 0.5 throughout
    for state.step in progress_bar(run):
        # 1. generate and interact; some earlier tasks of D_train are tried again beside the new
        generations = generate(run, alpha)  # T_t ~ pi_env
        tasks = [g.task for g in generations]
        trials = interact(run, tasks + replayed(run, len(tasks)))  # E_t; Eq. 1: r, Eq. 2: p_hat
        # 2a. agent update: GRPO on r
        if trials:  # with functions alone there is nothing to try before the first valid task
            state.agent.append(update_agent(run, trials))
        # 3a. aggregate, at every step: D_train <- D_train + Valid(E_t)
        for trial in trials:
            run.train_pool.add(trial.task, trial.traces, trial.p_hat, state.epoch)
        state.fresh += env_records(run, generations, trials)  # kept for 2b
        checkpoint.stop_if_asked(run, started)
    # 2b. environment update: RWR on what fell into the band, new or from D_env, each task once
    fresh, aged = distinct(state.fresh), usable_records(run)
    for record in fresh + aged:  # alpha may have moved since an aged one was written
        record.r_env = curriculum.difficulty_reward(  # Eq. 3
            o.difficulty_reward, record.rate(o.p_hat_unit), alpha, o.beta)
    fresh, aged = in_band(o, fresh, alpha), in_band(o, aged, alpha)  # |p_hat - alpha| <= k_min
    weights = env_weights(o, fresh + aged)  # RWR: w ~ exp(lam * R_env)
    env_stats = update_environment(run, fresh, aged, weights)
    # 3b. aggregate: D_env <- D_env + all generations that are tasks, in the band or not: with their
    # p_hat, from which a weight follows at the alpha of the day
    run.env_pool.add(state.fresh)
    state.seconds += time.perf_counter() - started
    end_epoch(run, env_stats, alpha)


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

    Where many generations are invalid, the simulator writes again, up to --write-rounds times,
    until the batch has `seed_tasks` x `variations` valid tasks.
    """
    o = run.o
    if o.variant in curriculum.WITHOUT_SIMULATOR:  # no simulator: equally many ready-made tasks
        return [Generation(task) for task in fixed_tasks(run)]
    recent = run.train_pool.recent(run.state.epoch, o.pool_age)
    wanted, n, asked, out = o.seed_tasks * o.variations, o.seed_tasks, 0, []
    for i in range(o.write_rounds):
        seed_tasks = curriculum.select_seed_tasks(
            run.train_pool.base or [NO_SEED], recent, n, o.base_share,
            curriculum.named("seeds_")[o.seed_selection], alpha, run.rng)
        group = (run.state.step * o.write_rounds + i) * o.seed_tasks  # numbered through the epoch
        out += solvable(run, write_tasks(run, seed_tasks, o.variations, alpha, out, wanted, group))
        if len(out) >= wanted:
            break
        asked += n  # seed tasks; valid tasks per seed task so far say how many more it takes
        n = min(o.seed_tasks, math.ceil((wanted - len(out)) * asked / max(1, len(out))))
    return out


def write_tasks(run, seed_tasks, variations, alpha, kept=(), wanted=math.inf,
                first_group=0) -> list[Generation]:
    """Ask the simulator for variations of each seed task; parse, check, drop duplicates.

    Invalid generations are counted by the reason that the world gives, and never imitated. kept:
    generations of the batch so far; with `wanted` of them no further text is read. first_group:
    number of the first seed task's group.
    """
    o, state = run.o, run.state
    seed_tasks = assigned(run, seed_tasks, alpha)
    prompts = [run.policy.encode(run.world.env_prompt(s, recent_success(run, s), alpha))
               for s in seed_tasks]
    with measure.peak_memory(run.peaks, "simulator rollouts", run.policy.device):
        rollouts = run.policy.sample("env", prompts, variations, o.max_task_tokens, o.temperature,
                                     run.sampler, max_rows=o.max_rows)
    out, seen = [], {key for g in kept for key in task_keys(run.world, g.task)}
    for i, r in enumerate(rollouts):
        if len(kept) + len(out) >= wanted:  # the batch is full
            break
        state.written += 1
        state.kl_sample.append([r.prompt, r.response])  # the KL of 2b is measured on these
        seed_task, text = seed_tasks[i // variations], run.policy.decode(r.response)
        try:
            task = parsed(run, r, text, seed_task, alpha)
            # not in the paper: a task counts once in a step, however often it was written, or RWR
            # would make ever likelier what is likely already
            if not seen.isdisjoint(task_keys(run.world, task)):
                raise InvalidTask("duplicate in the batch")
        except InvalidTask as reason:
            state.invalid[str(reason)] += 1
            note_refused(run, seed_task, text, str(reason))
            continue
        seen |= task_keys(run.world, task)
        out.append(Generation(task, r.prompt, r.response, text, first_group + i // variations))
    return out


def assigned(run, seed_tasks, alpha) -> list[Task]:
    """In a world with a list of functions to practise: the seed tasks, each with some functions to
    write for, drawn by --function-selection. Elsewhere the seed tasks as they are."""
    names = run.world.functions(run.o) if hasattr(run.world, "functions") else []
    if not names:
        return seed_tasks
    weigh = curriculum.named("functions_")[run.o.function_selection]
    drawn = curriculum.select_functions(names, run.train_pool.practice(run.world.skills),
                                        len(seed_tasks), weigh, alpha, run.rng)
    return [run.world.assign(task, few, run.rng) for task, few in zip(seed_tasks, drawn)]


def parsed(run, rollout, text, seed_task, alpha) -> Task:
    """The task that a generation describes. Raises InvalidTask with the reason to count."""
    task = written_task(run.world, rollout, text, seed_task, run.state.epoch, run.held_out,
                        run.policy.tokenizer)
    # the task will be read by the agent, and as a seed task, with some p_hat, by the simulator
    readers = run.world.agent_prompt(task), run.world.env_prompt(task, 0.5, alpha)
    if max(len(run.policy.encode(prompt)) for prompt in readers) > run.o.max_prompt_tokens:
        raise InvalidTask("prompt too long")
    return task


def solvable(run, generations) -> list[Generation]:
    """Optional check of generated answers: the simulator must solve its own task once in k tries.

    A task with a wrong or ambiguous answer also lands near alpha, so R_env alone would reward it.
    """
    o = run.o
    if not (o.agreement and generations):
        return generations
    prompts = [run.policy.encode(run.world.agent_prompt(g.task)) for g in generations]
    rows = rollout_rows(o, o.agreement, max(map(len, prompts)))
    with measure.peak_memory(run.peaks, "agreement check", run.policy.device):
        rollouts, texts = play(run.world, o, run.policy, "env", [g.task for g in generations],
                               o.agreement, o.temperature, run.sampler, rows)
    solved = {r.group for r, text in zip(rollouts, texts)
              if trace_of(run, generations[r.group].task, r, text).reward >= o.success_at}
    run.state.invalid["no agreement"] += len(generations) - len(solved)
    return [g for b, g in enumerate(generations) if b in solved]


def recent_success(run, seed_task: Task):
    """The success signal in the simulator's context: the seed task's own p_hat while it is recent,
    else None, which a world says as unknown."""
    p_hat, measured = run.train_pool.p_hat.get(seed_task.id, (None, 0))
    return p_hat if run.state.epoch - measured <= run.o.pool_age else None


def replayed(run, n_fresh: int) -> list[Task]:
    """Tasks of D_train for the agent's batch, so that earlier curricula are kept.

    They also replace invalid generations, so that the batch always has the same size.
    """
    o = run.o
    size = round(o.seed_tasks * o.variations * (1 + o.replay))
    return run.train_pool.sample(size - n_fresh, o.base_share, run.rng)


# ---- 1. interact


@dataclass
class Trial:
    """The agent's G attempts at one task."""
    task: Task
    prompt: list[int]   # (P,) ids
    rollouts: list      # G Rollouts
    traces: list[Trace]
    p_hat: float        # Eq. 2


def interact(run, tasks) -> list[Trial]:
    """G attempts of the agent at every task, scored."""
    o, state = run.o, run.state
    started = time.perf_counter()
    with measure.peak_memory(run.peaks, "agent rollouts", run.policy.device):
        rollouts, texts = play(run.world, o, run.policy, "agent", tasks, o.G, o.temperature,
                               run.sampler, o.max_rows)
    state.rollout_seconds += time.perf_counter() - started
    state.rollout_tokens += sum(len(r.response) for r in rollouts)
    trials = []
    for b, task in enumerate(tasks):
        members = rollouts[b * o.G:(b + 1) * o.G]
        traces = [trace_of(run, task, *attempt) for attempt in
                  zip(members, texts[b * o.G:(b + 1) * o.G])]
        p_hat = curriculum.success_rate([e.reward for e in traces], o.success_at)  # Eq. 2
        if task.id in run.train_pool.p_hat:  # for the curves, and for --alpha-schedule learned
            before, measured = run.train_pool.p_hat[task.id]
            state.replays.append((before, state.epoch - measured, p_hat))
        state.attempts.append((task, p_hat, traces))
        trials.append(Trial(task, members[0].prompt, members, traces, p_hat))
    return trials


def trace_of(run, task, rollout, text) -> Trace:
    """Score one attempt. What ran into a limit of length or of turns earns nothing."""
    reward, valid = attempt_score(run.world, task, rollout, text)  # Eq. 1: r
    reward = controls.noisy_reward(run.o, reward, run.rng)
    tokens = sum(rollout.own) if rollout.own else len(rollout.response)
    return Trace(transcript(rollout, text), reward, valid, bool(rollout.truncated), tokens)


# ---- 2a. the agent


def update_agent(run, trials) -> dict:
    """One GRPO update on a rollout batch. Its r may be another than Eq. 1 (--agent-reward); p_hat
    follows from Eq. 1 in any case."""
    o = run.o
    groups = [(trial.prompt, [r.response for r in trial.rollouts]) for trial in trials]
    rewards = torch.tensor([
        [curriculum.agent_reward(o.agent_reward, e.reward, e.valid, e.truncated, e.tokens)
         for e in trial.traces] for trial in trials])  # (B, G)
    rewards = controls.agent_rewards(o, rewards, run.rng)
    # of an episode's tokens, which ones the agent chose; without episodes it chose all
    own = [[r.own for r in trial.rollouts] for trial in trials]
    own = own if any(flags for of_trial in own for flags in of_trial) else None
    with measure.peak_memory(run.peaks, "agent update (GRPO)", run.policy.device), \
            measure.movement(run.policy, "agent") as moved:
        stats = grpo_update(
            run.policy, "agent", run.agent_optimizer, groups, rewards, temperature=o.temperature,
            clip=o.clip, kl_coef=o.agent_kl, kl_estimator=o.kl_estimator, scale=o.scale,
            aggregation=o.aggregation, inner_epochs=o.inner_epochs, mini_batch=o.mini_batch,
            token_budget=o.token_budget, grad_checkpoint=o.grad_checkpoint, generator=run.rng,
            sampled=[[r.logps for r in trial.rollouts] for trial in trials], own=own)
    return {**stats, **moved}


# ---- 2b. the environment


def env_records(run, generations, trials) -> list[EnvRecord]:
    """D_env records of a step, each with the p_hat of its task, its seed task, and the batch."""
    o, state = run.o, run.state
    measured = {trial.task.id: trial.p_hat for trial in trials}
    written = [g for g in generations if g.prompt]  # ready-made tasks have no context
    p_hats = controls.success_rates(o, [measured[g.task.id] for g in written], run.rng)
    groups = [g.group for g in written]
    of_seed = {k: measure.mean(p for p, g in zip(p_hats, groups) if g == k) for k in set(groups)}
    of_batch = measure.mean(p_hats)
    return [EnvRecord(g.prompt, g.response, g.text, g.task.id, sorted(task_keys(run.world, g.task)),
                      g.task.seed_task, g.group, p, of_seed[g.group], of_batch, state.epoch)
            for g, p in zip(written, p_hats)]


def usable_records(run) -> list[EnvRecord]:
    """Records of D_env that are not yet too old, each task once, and none that came up again."""
    o, t = run.o, run.state.epoch
    # GRPO has no use for what an earlier simulator wrote
    if not trains_environment(o) or o.env_update == "grpo":
        return []
    again = {key for r in run.state.fresh for key in r.keys}
    return [r for r in distinct(run.env_pool.aged(t, o.env_age)) if again.isdisjoint(r.keys)]


def in_band(o, records, alpha) -> list[EnvRecord]:
    """The filter: the records whose p_hat lies near alpha, or that of their seed task or batch."""
    scope = o.filter_scope or o.p_hat_unit
    return [r for r in records if curriculum.in_band(r.rate(scope), alpha, o.k_min)]


def trains_environment(o) -> bool:
    """Whether the simulator of this run is updated at all."""
    return o.variant == "genenv" and o.env_update != "none"


def env_weights(o, records):
    """Weights of the records, (n,): exponential in R_env (the paper's RWR), or one of the other
    two that --env-update compares with it."""
    r_env = torch.tensor([r.r_env for r in records])
    if not records or o.env_update == "none":
        return torch.ones(len(records))
    if o.env_update == "linear":
        return linear_weights(r_env)
    if o.env_update == "grpo":
        return grpo_weights(r_env, torch.tensor([r.group for r in records]))
    return rwr_weights(r_env, o.lam)


def update_environment(run, fresh, aged, weights) -> dict:
    """One update of the simulator on the records inside the band: fresh ones, and some of D_env,
    under the KL penalty to the initial simulator and the cap on the update's own KL."""
    o, t, kept = run.o, run.state.epoch, len(fresh)
    if not trains_environment(o):
        return {"env_kept": kept}
    if o.env_update == "grpo":  # no gradient where the siblings earn the same
        fresh, weights = [r for r, w in zip(fresh, weights) if w != 0], weights[weights != 0]
    if o.env_passes:  # an update no larger than its evidence
        batches = whole_passes(len(fresh), len(aged), o.env_passes, o.env_batch, run.rng)
    else:
        batches = draw_batches(len(fresh), [priority(r, t) for r in aged], o.env_updates,
                               o.env_batch, o.env_fresh, run.rng)
    # a random part of all that was written, valid or not: drift into bad text must be seen as well
    order = torch.randperm(len(run.state.kl_sample), generator=run.rng)[:o.env_kl_sample].tolist()
    kl_sample = [(run.state.kl_sample[i][0], [run.state.kl_sample[i][1]]) for i in order]
    with measure.peak_memory(run.peaks, "simulator update (RWR)", run.policy.device), \
            measure.movement(run.policy, "env") as moved:
        stats = rwr_update(run.policy, "env", run.env_optimizer, fresh + aged, weights, batches,
                           kl_sample, grpo=o.env_update == "grpo", temperature=o.temperature,
                           clip=o.clip, kl_coef=o.env_kl, kl_estimator=o.kl_estimator,
                           kl_cap=o.env_kl_cap, token_budget=o.token_budget,
                           grad_checkpoint=o.grad_checkpoint)
    if batches:
        n_fresh = sum(i < len(fresh) for i in batches[0])
        stats.update(env_ess=effective_sample_size(weights), env_weight_ratio=weight_ratio(weights),
                     env_batch_fresh=n_fresh, env_batch_aged=len(batches[0]) - n_fresh)
    return {**stats, "env_kept": kept, "env_moved": moved["moved"],
            "other_moved": moved["other_moved"]}


def measure_untrained(run):
    """Epoch 0: one batch is written and tried, nothing is trained."""
    started = time.perf_counter()
    if run.o.variant == "static":
        write_static(run)
    for task in run.teacher:
        run.train_pool.add_untried(task)
    for trial in interact(run, [g.task for g in generate(run, run.o.alpha)]):
        run.train_pool.add(trial.task, trial.traces, trial.p_hat, 0)
    run.state.seconds = time.perf_counter() - started
    end_epoch(run, {}, run.o.alpha)


def write_static(run):
    """GenEnv-Static: the untrained simulator writes five variations of every base task, once."""
    for g in solvable(run, write_tasks(run, run.train_pool.base, 5, run.o.alpha)):
        run.train_pool.add_untried(dataclasses.replace(g.task, origin="static"))


def main(argv=None) -> int:
    """Entry point; returns the exit code: 0, 2 for a user's mistake, 128 + n after a signal n."""
    return commands.dispatch(sys.argv[1:] if argv is None else argv, train)
