"""One epoch of Algorithm 1, line by line, in the embedded world with the project's own functions.

What to look at: what each line hands to the next one. The simulator turns seed tasks into tasks.
The agent attempts each task. The attempts give a success rate, the rate a reward for the
simulator, and the reward a weight. Two adapters move, each alone, and two pools grow.
genenv.py: epoch makes the same calls in the same order.
Beside it: genenv.py, and Algorithm 1 of the paper.
"""
# %% A run: options, world, policy (one frozen base, two adapters), pools, optimisers, generators.
import sys
sys.path[:0] = [".", ".."]  # the project's root, started there or in this folder

import tempfile

import curriculum
from data_pool import distinct, priority
import genenv
from policy import Rollout
from support.options import parse_options
from rwr import draw_batches, rwr_update, weight_ratio
from walkthroughs import canvas, fingerprint, keep_picture, quote
from support import metrics as measure

STEPS = 6  # agent updates in an epoch, as in a run
o = parse_options(["--out", f"{tempfile.mkdtemp()}/run", "--threads", "1"])
run = genenv.frame.prepare_run(o)
policy, world, state = run.policy, run.world, run.state
state.epoch = 1  # t of Algorithm 1
held_out = world.validation_tasks(o, "validation")
start = measure.mean(measure.rates_on(run, held_out, 4, 1.0))
print(f"base model {fingerprint(policy)}")
print(f"held-out success before: {start:.3f}")
print(f"D_train {len(run.train_pool.tasks)} tasks, all of them base; D_env "
      f"{len(run.env_pool.records)} records")

# %% alpha of this epoch: constant. A schedule would look at the context.
alpha = curriculum.next_alpha(o.alpha_schedule, curriculum.Context(
    epoch=1, epochs=1, success=0.5, alpha=o.alpha, alpha_end=o.alpha_end, previous=o.alpha))

# %% 1. T_t ~ pi_env: the simulator writes 4 variations of each of 16 seed tasks. Code checks them.
generations = genenv.generate(run, alpha)
print(f"\nwritten {state.written}, tasks {len(generations)}, "
      f"refused {sum(state.invalid.values())}")
for g in generations[:3]:
    seed_task = run.train_pool.tasks[g.task.seed_task]
    quote(f"seed task {seed_task.text}  ->  {g.task.text}")

# %% 1. Interact: G = 8 attempts at every task, and at a few of D_train. Eq. 1 gives r, Eq. 2 p_hat.
tasks = [g.task for g in generations]
trials = genenv.interact(run, tasks + genenv.replayed(run, len(tasks)))
print(f"\nattempts {sum(len(t.traces) for t in trials)} at {len(trials)} tasks")
for trial in trials[:3]:
    quote(f"p_hat {trial.p_hat:.3f}  {trial.task.text} =  {trial.traces[0].text}"
          f"  r {trial.traces[0].reward:.0f}")

# %% 2a. Agent update: GRPO on r. Groups that are all right or all wrong have no gradient and cost
# nothing.
stats = genenv.update_agent(run, trials)
print(f"\nGRPO: {stats['zero_variance']:.2f} of the groups without signal, gradient norm "
      f"{stats['grad_norm']:.2f}, KL to the start {stats['kl']:.3f}")

# %% 3a. D_train <- D_train + Valid(E_t). For D_env: what the simulator wrote, and its p_hat.
for trial in trials:
    run.train_pool.add(trial.task, trial.traces, trial.p_hat, state.epoch)
state.records += genenv.env_records(run, generations, trials)
print(f"D_train {len(run.train_pool.tasks)} tasks; records of this epoch {len(state.records)}")

# %% Five more steps like this one complete the epoch. New tasks become seed tasks at once.
for step in range(1, STEPS):
    state.step = step
    generations = genenv.generate(run, alpha)
    tasks = [g.task for g in generations]
    trials = genenv.interact(run, tasks + genenv.replayed(run, len(tasks)))
    stats = genenv.update_agent(run, trials)
    for trial in trials:
        run.train_pool.add(trial.task, trial.traces, trial.p_hat, state.epoch)
    state.records += genenv.env_records(run, generations, trials)
print(f"\nafter {STEPS} steps: D_train {len(run.train_pool.tasks)} tasks, records {len(state.records)}")

# %% 2b. Environment update. Count each task once, compute R_env, keep the band, weigh them.
fresh = distinct(state.records)
for record in fresh:
    record.r_env = curriculum.reward_bell(record.p_hat, alpha, o.beta)  # Eq. 3
kept = [r for r in fresh if curriculum.in_band(r.p_hat, alpha, o.k_min)]
weights = curriculum.record_weights("rwr", kept, o.lam)  # RWR: w ~ exp(lam * R_env)
print("\np_hat    records    R_env   in the band   weight")
for k in range(9):
    same = [r for r in fresh if r.p_hat == k / 8]
    if same:
        w = [f"{float(weights[i]):.3f}" for i, r in enumerate(kept) if r.p_hat == k / 8][:1]
        print(f"{k / 8:.3f} {len(same):10d} {same[0].r_env:8.3f} {'yes' if w else 'no':>13s} "
              f"{w[0] if w else '-':>8s}")
print(f"in the band {len(kept)}, largest weight / smallest {weight_ratio(weights):.2f}")

# %% 2b. RWR on mini-batches of these records. KL penalty and cap are measured on unselected text
# that the simulator wrote.
batches = draw_batches(len(kept), [], o.env_updates, o.env_batch, run.rng)
records = [Rollout(i, r.prompt, r.response) for i, r in enumerate(kept)]
kl_sample = [Rollout(i, *text) for i, text in enumerate(state.kl_sample[:o.env_kl_sample])]
with measure.movement(policy.params, "env") as moved:
    stats = rwr_update(policy, "env", run.env_optimizer, records, weights, batches, kl_sample, o)
print(f"\nRWR: {stats['env_steps']} steps of {len(batches[0])} records, KL of the update "
      f"{stats['env_kl_step']:.3f} of at most {o.env_kl_cap}; the agent's adapter moved: "
      f"{'yes' if moved['other_moved'] else 'no'}")

# %% 3b. D_env <- D_env + generations. Some of them return in later epochs, older ones more rarely.
run.env_pool.add(state.records)
print(f"D_env {len(run.env_pool.records)} records, priority after one epoch "
      f"{priority(state.records[0], 2):.2f}")

# %% What the epoch did, for the agent and for the simulator.
length = lambda records: measure.mean(len(r.text.split()) // 2 for r in records)
state.epoch, state.records, state.step = 2, [], 0
after = genenv.generate(run, alpha)
print(f"\nheld-out success {start:.3f} -> {measure.mean(measure.rates_on(run, held_out, 4, 1.0)):.3f}")
tools = lambda gs: measure.entropy(s for g in gs for s in world.skills(g.task))
print(f"tools in use {tools(generations):.2f} -> {tools(after):.2f} bits of entropy")

# %% The picture: the tasks of this epoch by p_hat. Only those in the shaded band are imitated.
figure, axis = canvas()
counts = [sum(r.p_hat == k / 8 for r in fresh) for k in range(9)]
axis.bar([k / 8 for k in range(9)], counts, width=0.09, color="C0")
axis.axvspan(alpha - o.k_min, alpha + o.k_min, color="C2", alpha=0.2, lw=0)
axis.set(title="shaded: the band alpha ± k_min", ylabel="tasks of the epoch (bars)",
         xlabel="p_hat: share of 8 attempts that succeed")
reward_axis = axis.twinx()
reward_axis.plot([p / 100 for p in range(101)],
                 [curriculum.reward_bell(p / 100, alpha, o.beta) for p in range(101)], color="C1")
reward_axis.set(ylabel="R_env, Eq. 3 (line)", ylim=(0, 1.05))
keep_picture(figure, "1_one_epoch_by_hand")

# %% Expected: held-out success from 0.33 to 0.42, one adapter moved at a time, ratio of weights 1.12.
# Exercise: leave the filter out (keep all of `fresh`): what is the ratio of the weights now?
# Then take reward_signal for reward_bell: which records weigh less than before?

# %% Solution: without the filter the ratio is exp(1 - exp(-2 / 4)) = 1.48: still a mild preference.
# reward_signal gives 0 to what was solved never or always: these weigh exp(0) = 1, the best ones e.
bell = curriculum.record_weights("rwr", fresh, o.lam)
for record in fresh:
    record.r_env = curriculum.reward_signal(record.p_hat, alpha, o.beta)
signal = curriculum.record_weights("rwr", fresh, o.lam)
print(f"\nsolution: ratio without the filter {weight_ratio(bell):.2f}, with reward_signal "
      f"{weight_ratio(signal):.2f}")
