"""Measure headroom in the world `digits`: tasks are drawn by code that knows what the agent solves.

Usage: python -m scripts.oracle --world digits --model M [options of a run]

Strings have four neighbouring lengths, equally likely. The window rises by one when the longest is
solved nine times out of ten.
"""
import random
import sys

import torch

import genenv
from worlds import task_keys
from worlds.digits import BASE, LONGEST, make

WIDTH, SOLVED, FEWEST = 4, 0.9, 6  # lengths; success and tasks that let the window rise


def longest_length(run) -> int:
    """Return the upper edge of the window, by the newest success rates of D_train."""
    top = max(BASE) + 1
    while top < LONGEST:
        p_hats = newest_first(run, top)[:FEWEST]
        if len(p_hats) < FEWEST or sum(p_hats) / FEWEST < SOLVED:
            break
        top += 1
    return top


def newest_first(run, length: int) -> list:
    """Return the success rates of strings of this length, the newest first."""
    pool = run.train_pool
    measured = []
    for order, (name, (p_hat, epoch)) in enumerate(pool.p_hat.items()):
        if len(pool.tasks[name].spec["digits"]) == length:
            measured.append((epoch, order, p_hat))
    return [p_hat for _, _, p_hat in sorted(measured, reverse=True)]


def draw_in_window(run) -> list:
    """Return a batch of new strings, none of them held out."""
    rng = random.Random(int(torch.randint(2 ** 31, (), generator=run.rng)))
    top = longest_length(run)
    batch, seen = [], set(run.held_out)
    while len(batch) < run.o.seed_tasks * run.o.variations:
        length = rng.randint(top - WIDTH + 1, top)
        task = make(run.world.random_digits(rng, length), "oracle", "", run.state.epoch)
        if seen.isdisjoint(task_keys(run.world, task)):
            batch.append(task)
            seen |= task_keys(run.world, task)
    return batch


if __name__ == "__main__":
    genenv.draw_ready_made = draw_in_window
    sys.exit(genenv.main(["--variant", "base", *sys.argv[1:]]))
