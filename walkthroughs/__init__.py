"""Show the method in three short programs to run and change, each about one part of it.

    1_one_epoch_by_hand.py  one epoch of Algorithm 1 with the project's own functions: begin here
    2_grpo.py               GRPO on one prompt: rollouts, advantages, surrogate, KL, one step
    3_rwr.py                RWR on a toy simulator: what the filter, lam, beta and the KL terms do
    toy.py                  the policy of 2 and 3: a table of logits, so all numbers are exact

Usage: run `python walkthroughs/1_one_epoch_by_hand.py` in the project's root. Or run it cell by
cell in an editor that knows `# %%` and shows such a program as a notebook. Each program draws a
picture. The first program needs about ten seconds of CPU time, the others less.
"""
from pathlib import Path

PICTURES = Path(__file__).parent.parent / "runs" / "walkthroughs"


def canvas():
    """Return a small figure and its axes."""
    import matplotlib.pyplot as plt
    return plt.subplots(figsize=(5.4, 3.4), layout="constrained")


def keep_picture(figure, name: str):
    """Write a figure to runs/walkthroughs as PNG, and print its path."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / f"{name}.png", dpi=80)
    print(f"the picture is {PICTURES / name}.png")
