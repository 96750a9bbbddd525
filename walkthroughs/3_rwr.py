"""Reward-weighted regression on a toy simulator that can write eight tasks, and no other.

What to look at: RWR with enough steps arrives where arithmetic says, at pi_0 exp(lam R) / Z. So
the effect of the filter, of lam, of beta and of the KL terms can be read off tables: above all,
that with the paper's lam and beta the weights do little and the filter does the selecting.
Beside it: rwr.py, curriculum.py (Eq. 3 and the filter).
"""
# %% Eight tasks with known success rates, and a simulator that mostly writes the easy ones.
import sys
sys.path[:0] = [".", ".."]  # the project's root, started there or in this folder

import torch

from curriculum import in_band, reward_bell, weights_rwr
from policy import Rollout
from support.options import Options
from rwr import effective_sample_size, rwr_update, weight_ratio
from walkthroughs import canvas, keep_picture
from walkthroughs.toy import TablePolicy

torch.set_num_threads(1)
ALPHA, BETA, LAM, PROMPT = 0.5, 2.0, 1.0, [0]
P_HAT = [0.0, 0.125, 0.25, 0.5, 0.5, 0.75, 0.875, 1.0]  # (8,) Eq. 2, of each task
PI_0 = torch.tensor([.02, .03, .05, .04, .06, .15, .25, .40], dtype=torch.float64)
RECORDS = [Rollout(x, PROMPT, [x]) for x in range(8)]


def r_env(beta=BETA, alpha=ALPHA):
    """R_env of each task, (8,)."""
    return torch.tensor([reward_bell(p, alpha, beta) for p in P_HAT], dtype=torch.float64)


def train(weights, keep=range(8), steps=600, lr=0.05, **options):
    """Imitate the tasks of `keep` with these weights -> (probabilities (8,), statistics)."""
    policy = TablePolicy(PI_0.log()[None], "env")
    optimizer = torch.optim.Adam(policy.params["env"], lr=lr)
    # own text on which KL is measured: twenty generations in the proportions of the start
    sample = [RECORDS[x] for x in range(8) for _ in range(round(100 * float(PI_0[x])))]
    stats = rwr_update(policy, "env", optimizer, [RECORDS[x] for x in keep], weights,
                       [list(range(len(keep)))] * steps, sample,
                       Options(**{"env_kl": 0.0, "env_kl_cap": 1e9, **options}))
    return policy.probs()[0], stats


def show(name, probs):
    print(f"{name:28s}" + "".join(f"{float(p):6.3f}" for p in probs))


def entropy(probs):
    return -float((probs * probs.clamp(min=1e-12).log2()).sum())


# %% 1. Weights. With lam = 1, beta = 2 the largest is 1.48 times the smallest: hardly a preference.
show("p_hat", P_HAT)
show("R_env (Eq. 3)", r_env())
show("weights exp(lam R), mean 1", weights_rwr(r_env(), None, LAM))
print(f"largest weight / smallest: {weight_ratio(weights_rwr(r_env(), None, LAM)):.2f}")

# %% 2. Where RWR arrives. Every task as often as pi_0 writes it: the limit is pi_0 exp(lam R) / Z.
closed = PI_0 * (LAM * r_env()).exp()
closed /= closed.sum()
weights = PI_0 * weights_rwr(r_env(), None, LAM)  # expected counts times weights
trained, _ = train(8 * weights / weights.sum())
print("\nno filter, tasks as often as written")
show("pi_0", PI_0)
show("pi_0 exp(lam R) / Z", closed)
show("trained by rwr_update", trained)
print(f"largest difference: {float((trained - closed).abs().max()):.4f}")
assert (trained - closed).abs().max() < 1e-3

# %% 3. The filter. Tasks outside |p_hat - alpha| <= k_min are not imitated: their mass moves inside.
print("\nwith the filter: what is written, mass on p_hat = 0.5, ratio of the weights inside the band")
written = {"before": PI_0}
for k_min in (1.0, 0.26, 0.1):
    keep = [x for x in range(8) if in_band(P_HAT[x], ALPHA, k_min)]
    weights = PI_0[keep] * weights_rwr(r_env()[keep], None, LAM)
    probs, _ = train(len(keep) * weights / weights.sum(), keep)
    written[f"k_min {k_min}"] = probs
    show(f"k_min {k_min}", probs)
    print(f"{'':28s}  mass {float(probs[3] + probs[4]):.3f}, ratio "
          f"{weight_ratio(weights_rwr(r_env()[keep], None, LAM)):.2f}")

# %% 4. Each task once. The project counts a task once per epoch, however often it was written: the
# limit forgets how likely pi_0 found it, so what was written often is not imitated often.
keep = [x for x in range(8) if in_band(P_HAT[x], ALPHA, 0.26)]
once, _ = train(weights_rwr(r_env()[keep], None, LAM), keep)
print("\nthe band of k_min 0.26, each task once")
show("trained by rwr_update", once)
print(f"entropy {entropy(once):.2f} bits, as often as written "
      f"{entropy(PI_0[keep] / PI_0[keep].sum()):.2f} bits")

# %% 5. lam and beta, without a filter. They need to be large before the weights select.
print("\n lam   beta   ratio   mass on p_hat = 0.5   entropy   effective sample size of 8")
for lam, beta in ((1, 2), (6, 2), (1, 8), (6, 8), (20, 8)):
    probs = PI_0 * (lam * r_env(beta)).exp()
    probs, w = probs / probs.sum(), weights_rwr(r_env(beta), None, lam)
    print(f"{lam:4d} {beta:6d} {weight_ratio(w):7.3g} {float(probs[3] + probs[4]):21.3f} "
          f"{entropy(probs):9.2f} {effective_sample_size(w):28.2f}")

# %% 6. Epoch after epoch the tilt adds up: after t updates the limit is pi_0 exp(t lam R) / Z. A
# simulator whose agent never learns ends with the tasks at alpha alone; an agent that learns moves p_hat.
print("\nepochs   mass on p_hat = 0.5   entropy")
for t in (0, 1, 4, 16, 64):
    probs = PI_0 * (t * LAM * r_env()).exp()
    probs /= probs.sum()
    print(f"{t:6d} {float(probs[3] + probs[4]):21.3f} {entropy(probs):9.2f}")

# %% 7. KL. The penalty holds the simulator near its start; the cap ends an update that goes too far
# and takes the last step back.
print("\npenalty     mass on p_hat = 0.5   KL of the update")
for coef in (0.0, 0.1, 1.0):
    probs, stats = train(weights_rwr(r_env()[keep], None, LAM), keep, env_kl=coef, steps=60)
    print(f"{coef:7.2f} {float(probs[3] + probs[4]):23.3f} {stats['env_kl_step']:18.3f}")
print("\n    cap   steps taken of 60   KL of the update   stopped")
for cap in (1e9, 0.5, 0.1):
    probs, stats = train(weights_rwr(r_env()[keep], None, LAM), keep, env_kl_cap=cap, steps=60)
    print(f"{cap:7.1g} {stats['env_steps']:19d} {stats['env_kl_step']:18.3f} "
          f"{'yes' if stats['env_capped'] else 'no':>9s}")

# %% The picture: what is written before RWR, and after it without filter and with two filters.
figure, axis = canvas()
for shift, (name, probs) in enumerate(written.items()):
    axis.bar([x + 0.2 * shift - 0.3 for x in range(8)], probs.tolist(), width=0.2, label=name)
axis.set(xlabel="the eight tasks, by their p_hat", ylabel="probability of writing it")
axis.set_xticks(range(8), P_HAT)
axis.legend(frameon=False)
keep_picture(figure, "3_rwr")

# %% Expected: the largest difference of cell 2 is under 0.001, so rwr_update minimises what it says.
# Exercise: alpha = 0.75 and k_min = 0.2. Which tasks are kept, and what is the ratio of their weights?
# Say it first, then call in_band, weights_rwr and weight_ratio. Then: which lam doubles the ratio?

# %% Solution: 0.75 and 0.875 are kept; 0.5 and 1.0 lie 0.25 away. R_env is 1 and 0.969 there, and
# the ratio is exp(lam (1 - 0.969)). It doubles when lam grows by log(2) / (1 - 0.969), to more than 20.
keep = [x for x in range(8) if in_band(P_HAT[x], 0.75, 0.2)]
R = r_env(alpha=0.75)[keep]
lam = LAM + float(torch.tensor(2.0).log() / (R.max() - R.min()))
print(f"\nsolution: kept {[P_HAT[x] for x in keep]}, ratio {weight_ratio(weights_rwr(R, None, LAM)):.3f}, "
      f"with lam {lam:.1f} {weight_ratio(weights_rwr(R, None, lam)):.3f}")
