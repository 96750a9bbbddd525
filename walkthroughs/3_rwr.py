"""Run reward-weighted regression (RWR) on a toy simulator that can write only eight tasks.

What to look at: with enough steps and without a filter, RWR turns the initial simulator pi_0 into
pi_0 exp(lam R) / Z, where R is R_env and Z normalises. Since this limit can be computed, tables can
show what the filter, lam, beta and the KL terms do. Above all: with the paper's lam and beta the
weights do little, and the filter does the selecting.
Read along: rwr.py, and curriculum.py for Eq. 3 and the filter.
"""
# %% Eight tasks with known success rates, and a simulator that mostly writes the easy ones.
import sys
sys.path[:0] = [".", ".."]  # find the project's modules when started in its root or in this folder

from types import SimpleNamespace

import torch

from curriculum import in_band, reward_bell
from policy import Rollout
from support.options import Options
from rwr import rwr_update, rwr_weights, weight_ratio
from walkthroughs import canvas, keep_picture
from walkthroughs.toy import TablePolicy

torch.set_num_threads(1)
ALPHA, BETA, LAM, PROMPT = 0.5, 2.0, 1.0, [0]
P_HAT = [0.0, 0.125, 0.25, 0.5, 0.5, 0.75, 0.875, 1.0]  # (8,) Eq. 2, one per task
PI_0 = torch.tensor([.02, .03, .05, .04, .06, .15, .25, .40], dtype=torch.float64)
# a hundred generations, in the exact proportions of PI_0
WRITTEN = [x for x in range(8) for _ in range(round(100 * float(PI_0[x])))]


def r_env(beta=BETA):
    """Return R_env of each task, (8,)."""
    return torch.tensor([reward_bell(p, ALPHA, beta) for p in P_HAT], dtype=torch.float64)


def train(k_min=1.0, steps=60, lr=4.0, cap=1e9, env_kl=0.0):
    """Train a fresh simulator on the written tasks in the band; return (its probabilities (8,),
    statistics)."""
    policy = TablePolicy(PI_0.log()[None], "env")
    optimizer = torch.optim.SGD(policy.params["env"], lr=lr)
    rewards = r_env().tolist()
    records = [SimpleNamespace(prompt=PROMPT, response=[x], r_env=rewards[x])
               for x in WRITTEN if in_band(P_HAT[x], ALPHA, k_min)]
    kl_sample = [Rollout(i, PROMPT, [x]) for i, x in enumerate(WRITTEN)]  # unfiltered
    # One pass is one step here, because all records are in one mini-batch.
    o = Options(env_passes=steps, env_batch=len(records), env_kl=env_kl)
    stats = rwr_update(policy, "env", optimizer, records, [], kl_sample, o, cap=cap)
    return policy.probs()[0], stats


def show(name, probs):
    """Print a name and eight numbers, one per task."""
    print(f"{name:28s}" + "".join(f"{float(p):6.3f}" for p in probs))


# %% 1. Weights. With lam = 1 and beta = 2 the largest is only 1.48 times the smallest.
show("p_hat", P_HAT)
show("R_env (Eq. 3)", r_env())
show("weights exp(lam R), mean 1", rwr_weights(r_env(), LAM))
print(f"largest weight / smallest: {weight_ratio(rwr_weights(r_env(), LAM)):.2f}\n"
      "So: with these lam and beta the weights by themselves select almost nothing.")

# %% 2. Where RWR ends up: the limit is pi_0 exp(lam R) / Z.
closed = PI_0 * (LAM * r_env()).exp()
closed /= closed.sum()
trained, _ = train()
print("\nno filter")
show("pi_0", PI_0)
show("pi_0 exp(lam R) / Z", closed)
show("trained by rwr_update", trained)
assert (trained - closed).abs().max() < 1e-3
print("So: RWR ends at the computed limit, which is close to pi_0: easy tasks stay\n"
      "    most frequent.")

# %% 3. The filter. Tasks outside the band |p_hat - alpha| <= k_min are not imitated, so their
# probability moves into it.
print("\nwith the filter: probability of each task; mass on p_hat = 0.5; ratio of the\n"
      "largest weight to the smallest")
by_filter = {"before": PI_0}
for k_min in (1.0, 0.26, 0.1):
    probs, stats = train(k_min)
    by_filter[f"k_min {k_min}"] = probs
    show(f"k_min {k_min}", probs)
    print(f"{'':28s}  mass {float(probs[3] + probs[4]):.3f}, ratio {stats['env_weight_ratio']:.2f}")
print("""So: the filter does the selecting. With k_min 0.26, the task with p_hat 0.75 is
    in the band, and gets nearly half of the mass because it was written often.
    With 0.1, only the tasks with p_hat 0.5 are left.""")

# %% 4. lam and beta, without a filter. They must be large for the weights to select.
print("\n lam   beta   ratio   mass on p_hat = 0.5   effective sample size of 8")
for lam, beta in ((1, 2), (6, 2), (1, 8), (6, 8), (20, 8)):
    probs, w = PI_0 * (lam * r_env(beta)).exp(), rwr_weights(r_env(beta), lam)
    mass = float((probs[3] + probs[4]) / probs.sum())
    # the effective sample size: how many tasks of equal weight would count as much
    size = float(w.sum() ** 2 / (w ** 2).sum())
    print(f"{lam:4d} {beta:6d} {weight_ratio(w):7.3g} {mass:21.3f} {size:28.2f}")
print("So: if lam and beta are large, the weights select; the price is that few tasks\n"
      "    carry the update.")

# %% 5. KL. The penalty holds the simulator near its start. The cap undoes the first step that goes
# too far, and then ends the update.
print("\npenalty   cap     steps of 60   mass on p_hat = 0.5   KL of the update")
for coef, cap in ((0.0, 1e9), (0.1, 1e9), (1.0, 1e9), (0.0, 0.5), (0.0, 0.1)):
    probs, stats = train(0.26, lr=0.2, env_kl=coef, cap=cap)
    print(f"{coef:7.1f} {cap:7.1g} {stats['env_steps']:11d} {float(probs[3] + probs[4]):21.3f} "
          f"{stats['env_kl_step'] or 0:18.3f}")
print("So: the penalty holds the simulator near its start, and the cap ends an update\n"
      "    that goes too far.")
print("""
Try: ALPHA = 0.75 at the top: which filter is the right one now?
     P_HAT with no 0.5 in it: what is left inside k_min 0.1?
     steps=5 in 2: how far is RWR from its limit?""")

# %% The picture: what is written before RWR, and after it without a filter and with two filters.
figure, axis = canvas()
for shift, (name, probs) in enumerate(by_filter.items()):
    axis.bar([x + 0.2 * shift - 0.3 for x in range(8)], probs.tolist(), width=0.2, label=name)
axis.set(xlabel="the eight tasks, by their p_hat", ylabel="probability of writing it")
axis.set_xticks(range(8), ["0", "1/8", "1/4", "1/2 a", "1/2 b", "3/4", "7/8", "1"])
axis.legend(frameon=False)
keep_picture(figure, "3_rwr")
