"""The embedded world: a ladder of twelve tools on a digit, and a tiny model that half knows them.

Paper: none of its data, but the same setting. An instruct model has latent skills (it can do the
hard thing sometimes), base data stays easy, and the target distribution is broader and harder. Here
our code makes all three, so that co-evolution can be watched on a laptop.

Usage: the default world of genenv.py. `python -m worlds.ladder train SEED FOLDER` trains another base
model (worlds/tiny_model.py). With a chat model in --model the ladder is in words
(worlds/ladder_words.py).

A task is a start digit and a chain of tools with step indices; the response repeats index and tool
and gives the resulting digit, `3 s1 inc s2 dbl =` -> `s1 inc 4 s2 dbl 8`. The indices make copying
learnable in seconds. The base model, a two-layer Qwen2, is trained on imperfect demonstrations:
tool j is shown with a wrong result at a slip rate rising from .05 (rung 0) to .95 (rung 11). It also
learns the simulator's role: given a seed task and its recent success rate, which may be unknown, write
a nearby variation in a direction independent of the success rate; the direction is for RWR to learn.

Deviations from a real domain: the checker is exact (it computes the chain), and the simulator cannot
write an ambiguous task.
"""
import json
import random
import re
import sys
from functools import lru_cache

from data_pool import Task
from worlds import InvalidTask
from worlds.tiny_model import MODEL, SPECIAL, TinyWorld, main, train

TOOLS = {  # rung by rung; neighbours differ on most digits
    "inc": lambda d: d + 1, "dec": lambda d: d - 1, "dbl": lambda d: 2 * d,
    "neg": lambda d: -d, "hop": lambda d: d + 3, "tpl": lambda d: 3 * d,
    "mir": lambda d: 9 - d, "sqr": lambda d: d * d, "half": lambda d: d // 2,
    "drop": lambda d: d - 4, "cube": lambda d: d ** 3, "tri": lambda d: d * (d + 1) // 2,
}
NAMES = list(TOOLS)
RUNG = {name: rung for rung, name in enumerate(NAMES)}
MAX_STEPS = 5       # the longest chain a generated task may have
BASE_TOOLS = 4      # three would give 390 distinct chains of 1-3 steps, fewer than 544
N_BASE = 544        # size of the paper's base set
PER_RUNG = 10       # held-out tasks per rung, for each of the two splits
BASE_SEED = 20251219  # task sets are the same for every --seed of a run

DIGITS = list("0123456789")
BUCKETS = [f"b{i}" for i in range(9)]  # recent success in eighths
UNKNOWN = "b?"                         # the seed has not been tried recently
WORDS = [*SPECIAL, "=", "vary", "=>", *DIGITS, *NAMES,
         *(f"s{i}" for i in range(1, MAX_STEPS + 1)), *BUCKETS, UNKNOWN]
WELL_FORMED = rf"(s[1-{MAX_STEPS}] ({'|'.join(NAMES)}) [0-9]( |$))+"
RECIPE = dict(steps=800, batch=64, lr=4e-3)  # of the base model


# ---------------------------------------------------------------------------------------------
# tasks


def run_tools(start: int, tools) -> list[int]:
    """The digits after each step: the executable checker's truth."""
    digits = [start]
    for name in tools:
        digits.append(TOOLS[name](digits[-1]) % 10)
    return digits[1:]


def chain(tools, digits=None) -> str:
    """`s1 inc s2 dbl`, or with digits `s1 inc 4 s2 dbl 8`."""
    steps = zip(range(1, len(tools) + 1), tools, digits or [""] * len(tools))
    return " ".join(f"s{i} {tool} {digit}".strip() for i, tool, digit in steps)


def make_task(start, tools, origin, seed="", epoch=0) -> Task:
    """A start digit and a chain of tools as a Task."""
    spec = {"start": start, "tools": list(tools)}
    return Task(f"{start} {chain(tools)}", spec, origin, seed, epoch)


@lru_cache
def held_out() -> dict:
    """{split: tasks}: for each rung chains of 2-3 steps whose hardest tool is that rung's.

    Two disjoint splits: "validation" is only ever reported, "tuning" is for choosing settings.
    """
    rng, splits, seen = random.Random(BASE_SEED), {"validation": [], "tuning": []}, set()
    for rung in range(len(NAMES)):
        for split in splits.values():
            wanted = len(split) + PER_RUNG
            while len(split) < wanted:
                tools = rng.choices(NAMES[:rung + 1], k=rng.choice((2, 3)))
                tools[rng.randrange(len(tools))] = NAMES[rung]
                task = make_task(rng.randrange(10), tools, "validation")
                if task.id not in seen:
                    seen.add(task.id)
                    split.append(task)
    return splits


@lru_cache
def held_out_ids() -> frozenset:
    """Ids of both splits."""
    return frozenset(t.id for split in held_out().values() for t in split)


def unseen_task(rng) -> Task:
    """A random chain over all tools that is not held out: pretraining sees no validation task."""
    while True:
        task = make_task(rng.randrange(10), rng.choices(NAMES, k=rng.randint(1, MAX_STEPS)), "demo")
        if task.id not in held_out_ids():
            return task


def vary(tools: list, rng) -> list:
    """A nearby variation: each tool may move one rung up or down, and a step may come or go at the
    end. (Steps in the middle stay where they are: an index that shifts is hard to learn.)"""
    rungs = [RUNG[t] + rng.choice((-1, 0, 0, 0, 1)) for t in tools]
    tools = [NAMES[min(len(NAMES) - 1, max(0, rung))] for rung in rungs]
    edit = rng.choice(("none", "none", "none", "longer", "shorter"))
    if edit == "longer" and len(tools) < MAX_STEPS:
        return tools + [rng.choice(tools)]
    return tools[:-1] if edit == "shorter" and len(tools) > 1 else tools


# ---------------------------------------------------------------------------------------------
# the world


class World(TinyWorld):
    """The ladder, for a tiny model of its own."""
    NAME, WORDS = "ladder", WORDS
    REASONS = ("malformed", "too long")

    def base_tasks(self) -> list[Task]:
        """544 distinct chains of 1-3 steps over the four easiest tools, none of them held out."""
        rng, tasks = random.Random(BASE_SEED + 1), {}
        while len(tasks) < N_BASE:
            tools = rng.choices(NAMES[:BASE_TOOLS], k=rng.choice((1, 2, 3)))
            task = make_task(rng.randrange(10), tools, "base")
            if task.id not in held_out_ids():
                tasks[task.id] = task
        return list(tasks.values())

    def validation_tasks(self, split="validation") -> list[Task]:
        """120 tasks, ten per rung."""
        return held_out()[split]

    def env_prompt(self, seed_task: Task, success: float | None, alpha: float) -> str:
        """The recent success rate in eighths, or that it is unknown, and the seed task.

        alpha is not in this world's context: only RWR tells the simulator what to aim at.
        """
        bucket = UNKNOWN if success is None else BUCKETS[round(8 * success)]
        return f"vary {bucket} {seed_task.text} =>"

    def agent_prompt(self, task: Task) -> str:
        """The chain."""
        return f"{task.text} ="

    def parse_task(self, text: str, seed_task: Task, epoch: int) -> Task:
        """The simulator's text -> a verified task. Raises InvalidTask with the reason to count."""
        words = text.split()
        steps, tools = words[1:], words[2::2]
        well_formed = (len(words) >= 3 and words[0] in DIGITS
                       and steps == chain(tools).split() and all(t in TOOLS for t in tools))
        if not well_formed:
            raise InvalidTask("malformed")
        if len(tools) > MAX_STEPS:
            raise InvalidTask("too long")
        return make_task(int(words[0]), tools, "env", seed_task.id, epoch)

    def gold(self, task: Task) -> str:
        """The response that earns the reward."""
        tools = task.spec["tools"]
        return chain(tools, run_tools(task.spec["start"], tools))

    def score(self, task: Task, response: str) -> tuple[float, bool]:
        """Eq. 1, structured branch: 1 if the whole trajectory is right, else 0; and well-formedness."""
        valid = re.fullmatch(WELL_FORMED, response.strip()[:200]) is not None
        return float(response.split() == self.gold(task).split()), valid  # Eq. 1: 1[a' = a]

    def skills(self, task: Task) -> list[str]:
        """The tools of the chain."""
        return task.spec["tools"]

    def task_length(self, task: Task) -> int:
        """Number of steps."""
        return len(task.spec["tools"])

    def category(self, task: Task) -> str:
        """The hardest tool of the chain."""
        return max(task.spec["tools"], key=RUNG.get)

    def write_teacher(self, n: int, path):
        """n distinct tasks of a stronger teacher: base tasks edited up to three times by the rule that
        `vary` demonstrates. The stand-in for the paper's offline augmentation (957 and 1,777 tasks)."""
        rng, base, tasks = random.Random(BASE_SEED + 2), self.base_tasks(), {}
        while len(tasks) < n:
            seed = rng.choice(base)
            tools = seed.spec["tools"]
            for _ in range(rng.randint(1, 3)):
                tools = vary(tools, rng)
            task = make_task(rng.randrange(10), tools, "teacher")
            if task.id != seed.id and task.id not in held_out_ids():
                tasks[task.id] = task
        with open(path, "w") as file:
            file.writelines(json.dumps({"text": t.text}) + "\n" for t in tasks.values())

    # ---- the stand-in for an instruct model

    def demonstrate(self, rng) -> tuple[str, str]:
        """(prompt, response) of the agent's role, with slips."""
        task = unseen_task(rng)
        return self.agent_prompt(task), chain(task.spec["tools"], with_slips(task, rng))

    def imagine(self, rng) -> tuple[str, str]:
        """(prompt, response) of the simulator's role."""
        seed = unseen_task(rng)
        while True:
            task = make_task(rng.randrange(10), vary(seed.spec["tools"], rng), "demo")
            if task.id not in held_out_ids():
                success = rng.random() if rng.random() < 0.75 else None  # known three times of four
                return self.env_prompt(seed, success, 0.5), task.text

    def pairs(self, rng, size) -> list[tuple[str, str]]:
        """Half variations, half demonstrations."""
        return [self.demonstrate(rng) if i % 2 else self.imagine(rng) for i in range(size)]

    @classmethod
    def train_base(cls, seed=0):
        """(model, tokenizer) of a base model by a seed of the recipe; 0 is the shipped one's."""
        return train(WORDS, cls.scorer("").pairs, MODEL, seed=BASE_SEED + 100 * seed, **RECIPE)


def slip_rate(rung: int) -> float:
    """How often the demonstrations show tool `rung` with a wrong result: .05 to .95."""
    return 0.05 + 0.90 * rung / (len(NAMES) - 1)


def with_slips(task: Task, rng) -> list[int]:
    """The digits after each step, each wrong at its tool's slip rate, and carried on."""
    digit, digits = task.spec["start"], []
    for name in task.spec["tools"]:
        truth, rung = TOOLS[name](digit) % 10, RUNG[name]
        # a slip shows the neighbouring tool's effect, or any other digit where the two agree
        wrong = TOOLS[NAMES[rung - 1 if rung else 1]](digit) % 10
        wrong = wrong if wrong != truth else (truth + 5) % 10
        digit = wrong if rng.random() < slip_rate(rung) else truth
        digits.append(digit)
    return digits


if __name__ == "__main__":
    sys.exit(main(World))
