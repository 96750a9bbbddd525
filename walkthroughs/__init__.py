"""Five short programs to run and change, each on one part of the method.

    1_grpo.py               GRPO on one prompt: rollouts, advantages, surrogate, KL, one step
    2_rwr.py                RWR on a toy simulator: what filter, lam, beta and the KL terms do
    3_one_epoch_by_hand.py  Algorithm 1, one epoch, with the project's own functions
    4_a_schedule.py         an alpha schedule and a difficulty reward of one's own, and runs with them
    5_reading_failures.py   a healthy, a collapsed and a starved run, read from their records
    toy.py                  the policy of 1 and 2: a table of logits, exact to compute with

Run them in the project's root, `python walkthroughs/1_grpo.py`, or cell by cell: editors that know
`# %%` show them as notebooks. What each prints is committed beside it, 1_grpo.out.txt and so on.
3 and 4 start from the ladder's base model in worlds/base.

    python -m walkthroughs            # run all again, compare with what is committed
    python -m walkthroughs --write    # ... and commit what they print now; after a change that is meant
    python -m walkthroughs 3 4        # only these

The numbers of 1, 2 and 5 are the same on every machine to the digits shown. 3 and 4 train a model
further: on another processor or with another number of threads the last bits of its updates differ,
then what it writes differs, and only the order of magnitude remains.
"""
import hashlib


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
