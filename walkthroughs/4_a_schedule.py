"""An alpha schedule and a difficulty reward of one's own: written, tried on paper, then in runs.

What to look at: a schedule is three lines and sees a small context; a difficulty reward is one. Try
both on numbers that you choose before a model is trained with them. In the runs look at the column
"success": it follows alpha, late and not all the way, as p_hat is measured before the agent learns.
Beside it: curriculum.py, where such functions stand; there nothing else needs to be written.
"""
# %% Two functions. In a copy of your own they are written into curriculum.py, anywhere in the file.
import sys
sys.path[:0] = [".", ".."]  # the project's root, started there or in this folder

import contextlib
import io
import math
import tempfile
from types import SimpleNamespace

from common.files import read_jsonl
import curriculum
import genenv
from run.options import parse_options
from walkthroughs import canvas, fingerprint, keep_picture
from worlds import ladder


def alpha_patient(c):
    """Aim 0.1 lower after every epoch in which the agent beat the target, down to 0.2."""
    return max(0.2, c.previous - 0.1 * (c.success > c.previous)) if c.epoch > 1 else c.alpha


def reward_lean(p_hat, alpha, beta):
    """Eq. 3, four times as sharp on the side of tasks that are too hard."""
    return math.exp(-beta * (4 if p_hat < alpha else 1) * (p_hat - alpha) ** 2)


curriculum.alpha_patient, curriculum.reward_lean = alpha_patient, reward_lean  # as if written there
print("schedules:", " ".join(sorted(curriculum.named("alpha_"))))
print("rewards:", " ".join(sorted(curriculum.named("reward_"))))

# %% 1. The schedule on paper: an agent of a given success rate, epoch by epoch, no model.
def on_paper(success_rates, alpha=0.6):
    """alpha of each epoch, if the epochs before ended with these success rates."""
    aims, previous = [], alpha
    for epoch, success in enumerate(success_rates, 1):
        previous = curriculum.next_alpha("patient", curriculum.Context(
            epoch=epoch, epochs=len(success_rates), success=success, alpha=alpha, alpha_end=alpha,
            previous=previous))
        aims.append(previous)
    return aims


for agent in ([0.6, 0.9, 0.9, 0.9, 0.9, 0.9], [0.6, 0.7, 0.5, 0.5, 0.3, 0.3]):
    print("\nsuccess before " + " ".join(f"{s:.2f}" for s in agent))
    print("alpha          " + " ".join(f"{a:.2f}" for a in on_paper(agent)))

# %% 2. The reward on paper, beside the paper's: alpha = 0.5, beta = 8.
print("\np_hat   " + " ".join(f"{k / 8:5.3f}" for k in range(9)))
for name in ("bell", "lean"):
    reward = curriculum.named("reward_")[name]
    print(f"{name:7s} " + " ".join(f"{reward(k / 8, 0.5, 8):5.3f}" for k in range(9)))

# %% 3. Runs of six short epochs. lam 6 and beta 8 with a wide band: weights select, so R_env counts.
SHORT = ["--epochs", "6", "--steps", "3", "--threads", "1", "--val-samples", "2", "--alpha", "0.6",
         "--lam", "6", "--beta", "8", "--k-min", "0.5"]


def train(*argv):
    """A run's records, one per epoch."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        out = genenv.train(parse_options(["--out", f"{folder}/run", *SHORT, *argv]))
        return read_jsonl(out / "metrics.jsonl")


with contextlib.redirect_stdout(io.StringIO()):
    base = ladder.load_policy(genenv.Options())
print(f"\nbase model {fingerprint(base)}")
runs = {"constant, bell": train(), "patient, bell": train("--alpha-schedule", "patient"),
        "patient, lean": train("--alpha-schedule", "patient", "--difficulty-reward", "lean")}
for name, records in runs.items():
    print(f"\n{name}")
    print("epoch   alpha   success   in band   largest weight / smallest   task length")
    for r in records[1:]:
        print(f"{r['epoch']:5d} {r['alpha']:7.2f} {r['success_rate']:9.2f} {r['env_kept']:9d} "
              f"{r['env_weight_ratio']:27.1f} {r['task_length']:13.2f}")

# %% 4. What to compare: the success rate at the end, and tasks solved never, which teach nothing.
print("\n                  success, last 3 epochs   never solved, last 3 epochs")
last = {}
for name, records in runs.items():
    mean = lambda key: sum(r[key] for r in records[-3:]) / 3
    last[name] = mean("success_rate")
    print(f"{name:17s} {mean('success_rate'):23.2f} {mean('unsolved'):29.2f}")
assert last["patient, bell"] < last["constant, bell"]

# %% The picture: where alpha aims and where success goes.
figure, axes = canvas(2)
for name, records in runs.items():
    for axis, key in zip(axes, ("alpha", "success_rate")):
        axis.plot([r["epoch"] for r in records[1:]], [r[key] for r in records[1:]], label=name,
                  ls="--" if "lean" in name else "-")  # both of `patient` have the same alpha
axes[0].set(xlabel="epoch", ylabel="alpha, the target", ylim=(0, 1))
axes[1].set(xlabel="epoch", ylabel="success on generated tasks", ylim=(0, 1))
axes[0].legend(frameon=False)
keep_picture(figure, "4_a_schedule")

# %% Expected: alpha goes from 0.6 to 0.2, success in the last epochs from 0.83 down to 0.79 only: late
# and not all the way.
# Exercise: write an alpha that rises again when more than a third of the tasks is never solved. The
# context does not say so: which field of curriculum.Context would you add, and where is it filled?

# %% Solution: `unsolved: float = 0.0` in the class, filled where run/frame.py makes the context,
# from the key "unsolved" of the last epoch's record. Here a stand-in has it.
def alpha_gentle(c):
    """As alpha_patient; 0.1 higher where more than a third of the tasks is never solved."""
    return min(0.8, c.previous + 0.1) if c.unsolved > 1 / 3 else alpha_patient(c)


aim = 0.6
print("\nsolution: never solved, alpha")
for epoch, unsolved in enumerate((0.1, 0.2, 0.3, 0.5, 0.4, 0.2), 1):
    aim = alpha_gentle(SimpleNamespace(epoch=epoch, alpha=0.6, previous=aim, success=0.9,
                                       unsolved=unsolved))
    print(f"{unsolved:.2f} {aim:.2f}")
