"""Run one epoch of Algorithm 1, line by line, with the project's own functions.

What to look at: what each line hands on to the next. The simulator turns seed tasks into new tasks.
The agent attempts each of them. The attempts give a success rate, the rate gives a reward for the
simulator, and the reward gives a weight. Two adapters move independently, and two pools grow.
Read along: Algorithm 1 of the paper, and `epoch` in genenv.py, which does the same in the same
order. The world is the default one, the ladder (README.md). Its tasks are a digit and a chain of
steps: `9 s1 dbl s2 dec` means: start at 9, double it, subtract one.
"""
# %% A run: options, world, policy (one frozen base, two adapters), pools, optimisers, generators.
import sys
sys.path[:0] = [".", ".."]  # find the project's modules when started in its root or in this folder

import tempfile

import torch

import curriculum
from data_pool import distinct
import genenv
from grpo import group_advantages, response_logps
from errors import plain_errors
from policy import Rollout
from rwr import KL_CAP, rwr_weights, weight_ratio
from support.health import counted
from support.metrics import mean, rates_on
from support.options import parse_options
from support.screen import wrapped
from walkthroughs import canvas, keep_picture


def shown(figure) -> str:
    """Return a number with three decimals, or a dash if it was not measured."""
    return "-" if figure is None else f"{figure:.3f}"


# Take options from the command line, except in a notebook, where they belong to the kernel.
options = [] if "ipykernel" in sys.modules else sys.argv[1:]
argv = ["--out", f"{tempfile.mkdtemp()}/run", "--epochs", "1", "--threads", "1", *options]
with plain_errors():  # a bad option prints one line
    o = parse_options(argv)
    run = genenv.prepare_run(o)
state, alpha = run.state, o.alpha
state.epoch = 1  # t of Algorithm 1
held_out = run.world.validation_tasks()
start = mean(rates_on(run, held_out, 4, 1.0))
print(f"held-out success at the start, from 4 attempts per task (a run makes 8): {start:.3f}")
tasks, records = run.train_pool.tasks, run.env_pool.records
print(f"D_train {len(tasks)} tasks, all base; D_env {len(records)} records\n"
      "So: the agent knows the format but slips often; the simulator has written\n"
      "    nothing yet.")

# %% An epoch has `steps` small steps, so that new tasks can serve as seed tasks immediately.
for step in range(o.steps):
    # 1. T_t ~ pi_env: the simulator writes 4 variations of each of 16 seed tasks. Code checks them.
    tasks, records = genenv.generate(run, alpha)
    # 1. Interact: the agent makes G = 8 attempts at each of these tasks, and at a few from D_train.
    # Eq. 1 gives the reward r of an attempt, Eq. 2 the success rate p_hat of a task.
    trials = genenv.interact(run, genenv.fill_batch(run, tasks))
    # 2a. Agent update: GRPO on r. A group that is all right or all wrong has no gradient.
    stats = genenv.update_agent(run, trials)
    # 3a. D_train <- D_train + Valid(E_t). Records of what the simulator wrote get their p_hat.
    genenv.add_attempts(run, trials)
    genenv.attach_p_hats(records, trials)
    state.records += records
    if step == 0:  # look at the first step
        print(f"\nstep 0: written {len(state.env_rollouts)}, valid {len(tasks)}")
        print(wrapped("  refused: ", counted(state.invalid)))
        print("seed task -> its variation\n"
              "    an answer, its reward r (Eq. 1), the task's p_hat (Eq. 2)")
        for trial in trials[:3]:
            seed_task = run.train_pool.tasks[trial.task.seed_task]
            first = trial.traces[0]
            print(f"  {seed_task.text}  ->  {trial.task.text}")
            print(f"    {first.text}, r {first.reward:.0f}, p_hat {trial.p_hat:.3f}")
        print("So: a variation is another task, and code decides whether an answer is right.")
        # Show what GRPO makes of the eight rewards of one group.
        mixed = next((trial for trial in trials if 0 < trial.p_hat < 1), trials[0])
        r = torch.tensor([[e.reward for e in mixed.traces]])  # (1, G)
        advantages = group_advantages(r)[0]
        print(f"a group: {mixed.task.text}")
        print("  rewards   ", *(f"{x:5.0f}" for x in r[0]))
        print("  advantages", *(f"{a:+5.2f}" for a in advantages), " (GRPO, Eq. 4)")
        print("So: the group's mean is the baseline. The rarer outcome weighs more.")
    print(f"step {step}: {1 - stats['zero_variance']:.0%} of the groups mixed, gradient norm "
          f"{shown(stats['grad_norm'])}, KL to the start {shown(stats['kl'])}")
print("So: groups that are all right or all wrong teach nothing; the gradient comes\n"
      "    from the mixed ones.")
n, base = len(run.train_pool.tasks), len(run.train_pool.base)
print(f"D_train {n} tasks: {base} base tasks, {n - base} new ones")

# %% 2b. Environment update. Count each task once, compute R_env, and weight the tasks in the band.
fresh = distinct(state.records)
print(f"the simulator wrote {len(state.records)} valid tasks, {len(fresh)} distinct")
for record in fresh:
    record.r_env = curriculum.reward_bell(record.p_hat, alpha, o.beta)  # Eq. 3
band = [r for r in fresh if curriculum.in_band(r.p_hat, alpha, o.k_min)]
weights = rwr_weights(torch.tensor([r.r_env for r in band]), o.lam)  # RWR: w ~ exp(lam * R_env)
weight_of = {r.p_hat: float(w) for r, w in zip(band, weights)}  # equal p_hat means equal weight
print("\np_hat      tasks    R_env   weight (RWR; mean 1 over the tasks in the band)")
for p_hat in sorted({r.p_hat for r in fresh}):
    same = [r for r in fresh if r.p_hat == p_hat]
    print(f"{p_hat:.3f} {len(same):10d} {same[0].r_env:8.3f} {shown(weight_of.get(p_hat)):>8s}")
print(f"in the band {len(band)}, largest weight / smallest {weight_ratio(weights):.2f}\n"
      "So: the band selects. Inside it the paper's lam and beta give nearly equal\n"
      "    weights.")

# %% 2b. RWR on mini-batches of these records. The KL penalty and the cap are measured on a sample
# of all texts, valid or not.
def nats(records):
    """Return the simulator's current mean of -log pi_env over the tokens of these records."""
    texts = [Rollout(i, r.prompt, r.response) for i, r in enumerate(records)]
    with run.simulator.use("env"):
        return -float(torch.cat(response_logps(run.simulator, texts, o)).mean())


others = [r for r in fresh if r not in band]
band_before, others_before = nats(band), nats(others)
stats = genenv.update_environment(run, band, old=[])  # D_env has no older records yet
print(f"\nRWR: {stats['env_steps']} steps, KL of the update {shown(stats['env_kl_step'])}, at most "
      f"{KL_CAP}")
print(f"nats per token (lower is likelier): imitated tasks {band_before:.3f} -> {nats(band):.3f}"
      f"\n    other tasks {others_before:.3f} -> {nats(others):.3f}")
print("So: the simulator now writes tasks like the imitated ones more often, others\n"
      "    less often.")

# %% 3b. D_env <- D_env + generations. Later epochs may imitate them again, until they are too old.
run.env_pool.add(state.records)
print(f"D_env {len(run.env_pool.records)} records\n"
      f"held-out success {start:.3f} -> {mean(rates_on(run, held_out, 4, 1.0)):.3f}\n"
      "So: one epoch already improves the agent on tasks that neither model trains on.\n"
      "    A run has 24 epochs.")
print("""
Try: --G 4: which groups are mixed now, and how coarse is p_hat?
     --k-min 0.1: how many tasks are in the band, and do their weights differ?
     --alpha 0.8: which tasks does the simulator imitate then?""")

# %% The picture: the number of tasks at each p_hat. Only those in the band are imitated.
figure, axis = canvas()
rates = [k / o.G for k in range(o.G + 1)]
axis.bar(rates, [sum(r.p_hat == p for r in fresh) for p in rates], width=0.09,
         color=["C2" if curriculum.in_band(p, alpha, o.k_min) else "C7" for p in rates])
axis.set(title="green: in the band alpha ± k_min", ylabel="tasks of the epoch (bars)",
         xlabel="p_hat: share of attempts that succeed")
reward_axis = axis.twinx()
reward_axis.plot([p / 100 for p in range(101)],
                 [curriculum.reward_bell(p / 100, alpha, o.beta) for p in range(101)], color="C1")
reward_axis.set(ylabel="R_env, Eq. 3 (line)", ylim=(0, 1.05))
keep_picture(figure, "1_one_epoch_by_hand")
