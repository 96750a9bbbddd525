"""Headroom in the world `digits`: of four times as many tasks as a step needs, keep the mixed ones.

Usage: python -m scripts.oracle_item --world digits --model M [options of a run]

The untrained simulator writes. The agent tries every task G times before the step, and the batch is
filled with those whose attempts differ in success, then with others. The chosen ones are tried again
for the update, as choosing by the same attempts would bias their success rates.
"""
import sys

import curriculum
import genenv
from interaction import play
from worlds import task_keys

TIMES = 4  # tasks written for each one that a step needs
generate = genenv.generate


def success_rates(run, tasks) -> list:
    """Return the p_hat of each task, by G attempts that nothing else uses."""
    o = run.o
    rollouts, texts = play(run.world, o, run.policy, "agent", tasks, o.G, o.temperature, run.sampler)
    rates = []
    for b, task in enumerate(tasks):
        members = range(b * o.G, (b + 1) * o.G)
        traces = [genenv.trace_of(run, task, rollouts[i], texts[i]) for i in members]
        rates.append(curriculum.success_rate([e.reward for e in traces]))
    return rates


def generate_mixed(run, alpha):
    """Return a batch of tasks and their records, mixed ones first."""
    candidates, seen = [], set()
    for _ in range(TIMES):
        for task, record in zip(*generate(run, alpha)):
            if seen.isdisjoint(task_keys(run.world, task)):
                candidates.append((task, record))
                seen |= task_keys(run.world, task)
    rates = success_rates(run, [task for task, _ in candidates])
    mixed = [pair for pair, rate in zip(candidates, rates) if 0 < rate < 1]
    others = [pair for pair, rate in zip(candidates, rates) if rate in (0, 1)]
    chosen = [*mixed, *others][:run.o.seed_tasks * run.o.variations]
    return [task for task, _ in chosen], [record for _, record in chosen]


if __name__ == "__main__":
    genenv.generate = generate_mixed
    sys.exit(genenv.main(["--variant", "random", *sys.argv[1:]]))
