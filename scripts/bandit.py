"""A rival of the trained simulator: a bandit chooses the level of each task, and nothing learns to write.

Paper: not in it; choosing among difficulties without learning is the honest rival of a trained
simulator. Usage: row `bandit` of the suite `tools` in experiments.py, or
`python genenv.py --world bandit --variant random --out RUN` with the options of tool_calls.

The simulator of tool_calls begins a task with a line `Level: CALLS of SHOWN`. Here this line is drawn and
put at the beginning of its text, and it goes on from there. A level's weight is the mean of p (1 - p) over
its tasks of the last epochs, p being the success rate of a task when it was new, and EXPLORE more. One
more task of p = 1/2 counts in every level, so that none is given up for a few tasks.

Deviations: weights change once an epoch, as the trained simulator does. They are read from the run's own
D_train, where a task without one well-formed attempt is missing.
"""
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from data_pool import FRESH_FOR
from model.files import UserError, read_jsonl
from worlds import tool_calls

EXPLORE = 0.05  # added to the weight of every level; p (1 - p) is 0.25 at most


class World(tool_calls.World):
    """tool_calls, except that the simulator is told the level."""

    def __init__(self, o):
        super().__init__(o)
        if not o.out or not self.tools:
            raise UserError("--world bandit needs --out, whose tasks it reads, and --tools")

    def seed_for(self, task, generator):
        """The seed task as in tool_calls, with the beginning of what the simulator writes."""
        seed_task = super().seed_for(task, generator)
        most = len(seed_task.spec.get("shown", ()))
        levels = [(n, m) for n in range(1, tool_calls.MOST_CALLED + 1) for m in range(n, most + 1)]
        if not levels:
            return seed_task
        metrics = Path(self.o.out) / "metrics.jsonl"  # a line for each finished epoch
        found = worth(self.o.out, len(read_jsonl(metrics)) if metrics.is_file() else 0)
        weights = torch.tensor([sum(found[level]) / len(found[level]) + EXPLORE for level in levels])
        n, m = levels[int(torch.multinomial(weights, 1, generator=generator))]
        return replace(seed_task, spec={**seed_task.spec, "begun": f"Level: {n} of {m}\n"})

    def env_prompt(self, seed_task, success):
        """Chat messages as in tool_calls, and the beginning of the answer."""
        messages, begun = super().env_prompt(seed_task, success), seed_task.spec.get("begun")
        return [*messages, {"role": "assistant", "content": begun}] if begun else messages

    def parse_task(self, text, seed_task, epoch):
        """As in tool_calls; text: what follows the level."""
        return super().parse_task(seed_task.spec.get("begun", "") + text, seed_task, epoch)


@lru_cache(1)
def worth(folder: str, epochs: int) -> dict:
    """{(calls, tools): [p (1 - p) of each task of this level, and 1/4]}: tasks that were new in the last
    FRESH_FOR of these epochs."""
    found = defaultdict(lambda: [0.25])
    for r in read_jsonl(Path(folder) / "train.jsonl") if epochs else ():
        task, calls = r["task"], r["task"]["spec"].get("calls")
        new = task["origin"] == "env" and task["epoch"] == r["epoch"]  # later its p has been trained away
        if new and calls and epochs - FRESH_FOR <= r["epoch"] < epochs:
            found[len(calls), len(task["spec"]["tools"])].append(r["p_hat"] * (1 - r["p_hat"]))
    return found
