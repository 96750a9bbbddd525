"""Five short programs to run and change, each on one part of the method.

    1_one_epoch_by_hand.py  Algorithm 1, one epoch, with the project's own functions: begin here
    2_grpo.py               GRPO on one prompt: rollouts, advantages, surrogate, KL, one step
    3_rwr.py                RWR on a toy simulator: what filter, lam, beta and the KL terms do
    4_a_schedule.py         an alpha schedule and a difficulty reward of one's own, and runs with them
    5_reading_failures.py   a healthy, a collapsed and a starved run, read from their records
    toy.py                  the policy of 2 and 3: a table of logits, exact to compute with
    notebook.py             makes 1_one_epoch_by_hand.ipynb of the program of that name

Run them in the project's root, `python walkthroughs/1_one_epoch_by_hand.py`, or cell by cell:
editors that know `# %%` show them as notebooks; the first one is there as .ipynb too. Beside each
stand what it prints (1_one_epoch_by_hand.out.txt) and the picture that it draws (.png). Each ends
with an exercise and its solution. 1 and 4 start from the ladder's base model in worlds/base.

    python -m walkthroughs            # run all again, compare with what is committed
    python -m walkthroughs --write    # ... and commit what they print now; after a change that is meant
    python -m walkthroughs 1 4        # only these

The numbers of 2, 3 and 5 are the same on every machine to the digits shown. 1 and 4 train a model.
Another processor or number of threads rounds differently there, then the models write other tasks,
and only the order of magnitude remains.
"""
import hashlib
from pathlib import Path

PICTURES = Path(__file__).parent  # beside the programs


def canvas(panels=1):
    """A figure and its axes (a list of them where there are several panels), small."""
    import matplotlib.pyplot as plt
    return plt.subplots(1, panels, figsize=(5.4 if panels == 1 else 3.6 * panels, 3.4),
                        layout="constrained")


def keep_picture(figure, name: str):
    """Write a figure as PNG; the same figure gives the same bytes (no date and version in it)."""
    figure.savefig(PICTURES / f"{name}.png", dpi=80, metadata={"Software": None})


def fingerprint(policy) -> str:
    """Eight hex digits of the base model's weights: where they differ, so do sampled numbers."""
    digest = hashlib.sha256()
    for name, p in sorted(policy.model.named_parameters()):
        if "lora_" not in name:
            digest.update(p.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:8]


def quote(text: str):
    """Print what a model wrote, marked as such: of another base model it will read otherwise."""
    print(f"  > {text}")
