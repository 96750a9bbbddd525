"""Three recorded runs: one healthy, one whose simulator collapsed, one whose simulator starved.

What to look at: no single column tells. The collapsed run has a success rate near alpha, the best
of the three by that figure, and learns nothing; the starved one learns well and its simulator
stands still. Read a run in this order: validation, distinct tasks, tools in use, records in band.
Beside it: watch/health.py (the warnings), TROUBLESHOOTING.md (what to change).
"""
# %% The runs: a metrics.jsonl each, the options in the first line (tests/golden/health).
import sys
sys.path[:0] = [".", ".."]  # the project's root, started there or in this folder

from pathlib import Path
from types import SimpleNamespace

from common.files import read_jsonl
import genenv
from walkthroughs import canvas, keep_picture
from watch import health

GOLDEN = Path(genenv.__file__).parent / "tests" / "golden" / "health"
RUNS = {}
for name, file in (("healthy", "genenv"), ("collapsed", "collapse"), ("starved", "starved")):
    lines = read_jsonl(GOLDEN / f"{file}.jsonl")
    RUNS[name] = lines[1:], SimpleNamespace(**lines[0])  # records of epochs, options


def table(name, every):
    """The columns that matter, of every n-th epoch."""
    records, o = RUNS[name]
    print(f"\n{name}: alpha {o.alpha}, k_min {o.k_min}, agent's learning rate {o.agent_lr:g}")
    print("epoch   validation   success   distinct of written   tool entropy   in band   no signal"
          "   simulator's KL")
    for r in records[::every]:
        print(f"{r['epoch']:5d} {r['validation']:12.3f} {r['success_rate']:9.2f} "
              f"{r['distinct_tasks']:12d} of {r['written']:4d} {r['skill_entropy']:14.2f} "
              f"{r['env_kept']:9d} {r['zero_variance']:11.2f} {r['env_kl']:16.2f}")


# %% 1. Healthy. Validation rises to the end and so does the entropy over tools: the simulator moves
# on to tools that the base tasks lack. Success is above alpha (EXPERIMENTS.md says why) and "in
# band" falls: fewer tasks are half solved as the agent masters the world. That is not starvation.
table("healthy", 4)

# %% 2. Collapsed. Success goes from 0.1 to 0.6, into the band; the KL cap was never in the way. But
# the tasks become few and alike, and validation does not move: the simulator found a corner.
table("collapsed", 1)

# %% 3. Starved. The band of the paper, k_min = 0.1, holds only 4/8 with G = 8. Once the agent is good
# few tasks land there, the simulator learns from a handful, and its KL tells how little it moved.
table("starved", 1)

# %% 4. The warnings, as they were printed below the line of an epoch, and the first epoch of each.
for name, (records, o) in RUNS.items():
    found = [(r["epoch"], w) for i, r in enumerate(records)
             for w in health.warnings(r, records[:i], o)]
    print(f"\n{name}: {len(found)} warnings in {len(records)} epochs")
    if found:
        print(f"epoch {found[0][0]}: {found[0][1]}")

# %% 5. How the checks see it: two figures per run, of the last epoch, beside their limits.
print("\n            validation gained   tasks distinct   share in band   limits: 0.2 and 0.05")
for name, (records, o) in RUNS.items():
    last = records[-1]
    usable = last["written"] - sum(n for why, n in last["invalid"].items()
                                   if why != "duplicate in the batch")
    tried = last["written"] - sum(last["invalid"].values())
    gained = last["validation"] - records[0]["validation"]
    print(f"{name:11s} {gained:+17.3f} {last['distinct_tasks'] / usable:16.2f} "
          f"{last['env_kept'] / tried:15.3f}")

# %% The picture: success alone would put the collapsed run first. Validation and variety tell.
figure, axes = canvas(3)
for name, (records, o) in RUNS.items():
    shown = records[1:9]
    figures = ([r["success_rate"] for r in shown], [r["validation"] for r in shown],
               [r["distinct_tasks"] / r["written"] for r in shown])
    for axis, values in zip(axes, figures):
        axis.plot([r["epoch"] for r in shown], values, label=name)
labels = "success on generated tasks", "validation", "distinct tasks / written"
for axis, label in zip(axes, labels):
    axis.set(xlabel="epoch", ylabel=label, ylim=(0, 1))
axes[1].legend(frameon=False)
keep_picture(figure, "5_reading_failures")

# %% Expected: no warning for the healthy run, "collapse" for the second, "starvation" for the third.
# Exercise: tests/golden/health/noise.jsonl is a fourth run. Add it to RUNS, look at its columns first
# and say what is wrong, then look at its warning. Which column gave it away?

# %% Solution: success sits at 0.50 in every epoch, so this run looks best of all, yet validation falls.
# "in band" gives it away: nearly every distinct task lies there, and no group is without signal, from
# the first epoch on. The agent is paid by coins: every reward r was 1 - r in half of the cases.
lines = read_jsonl(GOLDEN / "noise.jsonl")
RUNS["noise"] = lines[1:], SimpleNamespace(**lines[0])
table("noise", 1)
records, o = RUNS["noise"]
found = [(r["epoch"], w) for i, r in enumerate(records)
         for w in health.warnings(r, records[:i], o)]
print(f"epoch {found[0][0]}: {found[0][1]}")
