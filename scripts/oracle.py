"""Headroom: how far would tasks carry that are drawn where the agent's success is near alpha?

Paper: nothing; what is asked before a simulator is trained. If a batch drawn by code, which knows
every level and every measured success rate, helps no more than an untrained simulator's tasks, then
no simulator can be seen to help.

Usage: python -m scripts.oracle --world gym --model M [options of a run]

Deviations: candidates come from all families and levels, and are drawn with the weight of curated
seed tasks, by the success rate last measured nearest to them in their family; 0.5 while there is
none, so that every family is tried.
"""
import random
import sys

import torch

import genenv
from curriculum import seeds_curated
from worlds import InvalidTask, task_keys
from worlds.gym import RUN

CANDIDATES = 64  # lines of which each task is drawn


def nearest_p_hat(pool, family: str, levels: dict) -> float:
    """The newest success rate, a mean over tasks of one epoch, at the levels nearest to these."""
    measured = {(float("inf"), 0): [0.5]}
    for name, (p_hat, epoch) in pool.p_hat.items():
        spec = pool.tasks[name].spec
        if spec["family"] == family:
            distance = sum(abs(level - spec["levels"][knob]) for knob, level in levels.items())
            measured.setdefault((distance, -epoch), []).append(p_hat)
    nearest = measured[min(measured)]
    return sum(nearest) / len(nearest)


def draw_near_alpha(run) -> list:
    """A batch of tasks near alpha, none of them held out, none twice."""
    draw = random.Random(int(torch.randint(2 ** 31, (), generator=run.rng)))
    batch, seen = [], set(run.held_out)
    while len(batch) < run.o.seed_tasks * run.o.variations:
        candidates, p_hats = [], []
        for _ in range(CANDIDATES):
            family = draw.choice(list(run.world.levels))
            levels = run.world.random_levels(family, draw)
            candidates.append((family, levels))
            p_hats.append(nearest_p_hat(run.train_pool, family, levels))
        [(family, levels)] = draw.choices(candidates, seeds_curated(p_hats, run.o.alpha))
        try:
            task = run.world.make(family, levels, draw.choice(RUN), "oracle", "", run.state.epoch)
        except InvalidTask:
            continue
        if seen.isdisjoint(task_keys(run.world, task)):
            batch.append(task)
            seen |= task_keys(run.world, task)
    return batch


if __name__ == "__main__":
    genenv.draw_ready_made = draw_near_alpha
    sys.exit(genenv.main(["--variant", "base", *sys.argv[1:]]))
