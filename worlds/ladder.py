"""The embedded world: a ladder of twelve tools on a digit, and a tiny model that half knows them.

What of the paper this is: nothing of its data, all of its situation. An instruct model has skills
that are latent (it can do the hard thing sometimes), base data that stays easy, and a target
distribution that is broader and harder. Here our code makes all three, so that co-evolution can be
watched on a laptop.

How it is run: it is the default world of genenv.py. `python -m worlds.ladder` prints how well the
base model knows each tool; with `train SEED FOLDER` it trains one (worlds/tiny_model.py).

A task is a start digit and a chain of tools with step indices; the response repeats index and tool
and gives the resulting digit, `3 s1 inc s2 dbl =` -> `s1 inc 4 s2 dbl 8`. The indices make copying
learnable in seconds. The base model, a two-layer Qwen2, is trained on imperfect demonstrations:
tool j is shown with a wrong result at a slip rate rising from .05 (rung 0) to .95 (rung 11). It
also learns the simulator's role: given a seed task and the recent success, which may be unknown,
write a *near* variation, whose direction does not depend on the success: that is left to RWR.

Where it differs on purpose from a real domain: the checker is exact (it computes the chain), and
the simulator cannot write an ambiguous task.
"""
import json
import random
import re
import sys
from functools import lru_cache

from support.files import UserError
from data_pool import Task
from worlds import InvalidTask, open_policy
from worlds.tiny_model import MODEL, SPECIAL, base_folder, program, train

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
KEY = ("`3 s1 inc s2 dbl`: start at 3, then step 1 and step 2, a tool each. The answer repeats them with "
       "the digit after each, `s1 inc 4 s2 dbl 8`; all count modulo 10. inc +1, dec -1, dbl 2d, neg -d, "
       "hop +3, tpl 3d, mir 9-d, sqr d*d, half d//2, drop -4, cube d*d*d, tri 1+...+d.")
REASONS = ("malformed", "too long")
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


def _chain(tools, digits=None) -> str:
    """`s1 inc s2 dbl`, or with digits `s1 inc 4 s2 dbl 8`."""
    steps = zip(range(1, len(tools) + 1), tools, digits or [""] * len(tools))
    return " ".join(f"s{i} {tool} {digit}".strip() for i, tool, digit in steps)


def _task(start, tools, origin, seed="", epoch=0) -> Task:
    spec = {"start": start, "tools": list(tools)}
    return Task(f"{start} {_chain(tools)}", spec, origin, seed, epoch)


@lru_cache
def _held_out() -> dict:
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
                task = _task(rng.randrange(10), tools, "validation")
                if task.id not in seen:
                    seen.add(task.id)
                    split.append(task)
    return splits


@lru_cache
def _held_out_ids() -> frozenset:
    return frozenset(t.id for split in _held_out().values() for t in split)


def prepare(o):
    """This world brings everything with it: whatever else is given is refused."""
    if o.quant:
        raise UserError("--quant is for chat models; the ladder world's model has under 1 MB")
    if o.model or o.base_tasks or o.validation_tasks:
        raise UserError("the ladder world makes its own model and tasks: leave out --model, "
                        "--base-tasks and --validation-tasks, or choose another --world")


def base_tasks(o=None) -> list[Task]:
    """544 distinct chains of 1-3 steps over the four easiest tools, none of them held out."""
    rng, tasks = random.Random(BASE_SEED + 1), {}
    while len(tasks) < N_BASE:
        tools = rng.choices(NAMES[:BASE_TOOLS], k=rng.choice((1, 2, 3)))
        task = _task(rng.randrange(10), tools, "base")
        if task.id not in _held_out_ids():
            tasks[task.id] = task
    return list(tasks.values())


def validation_tasks(o=None, split="validation") -> list[Task]:
    """120 tasks, ten per rung."""
    return _held_out()[split]


# ---------------------------------------------------------------------------------------------
# the two roles


def env_prompt(seed_task: Task, success: float | None, alpha: float) -> str:
    """What the simulator reads: the recent success in eighths, or that it is unknown; the seed.

    alpha is not in this world's context: only RWR tells the simulator what to aim at.
    """
    bucket = UNKNOWN if success is None else BUCKETS[round(8 * success)]
    return f"vary {bucket} {seed_task.text} =>"


def agent_prompt(task: Task) -> str:
    """What the agent reads."""
    return f"{task.text} ="


def parse_task(text: str, seed_task: Task, epoch: int) -> Task:
    """The simulator's text -> a verified task. Raises InvalidTask with the reason to count."""
    words = text.split()
    steps, tools = words[1:], words[2::2]
    well_formed = (len(words) >= 3 and words[0] in DIGITS
                   and steps == _chain(tools).split() and all(t in TOOLS for t in tools))
    if not well_formed:
        raise InvalidTask("malformed")
    if len(tools) > MAX_STEPS:
        raise InvalidTask("too long")
    return _task(int(words[0]), tools, "env", seed_task.id, epoch)


def gold(task: Task) -> str:
    """The response that earns the reward."""
    tools = task.spec["tools"]
    return _chain(tools, run_tools(task.spec["start"], tools))


def score(task: Task, response: str) -> tuple[float, bool]:
    """Eq. 1, structured branch: 1 if the whole trajectory is right, else 0; and well-formedness."""
    valid = re.fullmatch(WELL_FORMED, response.strip()[:200]) is not None
    return float(response.split() == gold(task).split()), valid  # Eq. 1: 1[a' = a]


def skills(task: Task) -> list[str]:
    """The tools of the chain."""
    return task.spec["tools"]


def task_length(task: Task) -> int:
    """Number of steps."""
    return len(task.spec["tools"])


def category(task: Task) -> str:
    """The hardest tool of the chain."""
    return max(task.spec["tools"], key=RUNG.get)


# ---------------------------------------------------------------------------------------------
# the stand-in for an instruct model


def slip_rate(rung: int) -> float:
    """How often the demonstrations show tool `rung` with a wrong result: .05 to .95."""
    return 0.05 + 0.90 * rung / (len(NAMES) - 1)


def _demonstrate(rng) -> tuple[str, str]:
    """(prompt, response) of the agent's role, with slips."""
    task = _unseen_task(rng)
    tools, digit, digits = task.spec["tools"], task.spec["start"], []
    for name in tools:
        truth, rung = TOOLS[name](digit) % 10, RUNG[name]
        # a slip shows the neighbouring tool's effect, or any other digit where the two agree
        wrong = TOOLS[NAMES[rung - 1 if rung else 1]](digit) % 10
        wrong = wrong if wrong != truth else (truth + 5) % 10
        digit = wrong if rng.random() < slip_rate(rung) else truth
        digits.append(digit)
    return agent_prompt(task), _chain(tools, digits)


def _unseen_task(rng) -> Task:
    """A random chain over all tools that is not held out: pretraining sees no validation task."""
    while True:
        task = _task(rng.randrange(10), rng.choices(NAMES, k=rng.randint(1, MAX_STEPS)), "demo")
        if task.id not in _held_out_ids():
            return task


def vary(tools: list, rng) -> list:
    """A near variation: each tool may move one rung up or down, and a step may come or go at the
    end. (Steps in the middle stay where they are: an index that shifts is hard to learn.)"""
    rungs = [RUNG[t] + rng.choice((-1, 0, 0, 0, 1)) for t in tools]
    tools = [NAMES[min(len(NAMES) - 1, max(0, rung))] for rung in rungs]
    edit = rng.choice(("none", "none", "none", "longer", "shorter"))
    if edit == "longer" and len(tools) < MAX_STEPS:
        return tools + [rng.choice(tools)]
    return tools[:-1] if edit == "shorter" and len(tools) > 1 else tools


def _imagine(rng) -> tuple[str, str]:
    """(prompt, response) of the simulator's role."""
    seed = _unseen_task(rng)
    while True:
        task = _task(rng.randrange(10), vary(seed.spec["tools"], rng), "demo")
        if task.id not in _held_out_ids():
            # one draw for both: is the success known (3 of 4), and if so, which one is it
            u = 4 * rng.random()
            return env_prompt(seed, None if u < 1 else (u - 1) / 3, 0.5), task.text


def _pairs(rng, size) -> list[tuple[str, str]]:
    """Half variations, half demonstrations."""
    return [_demonstrate(rng) if i % 2 else _imagine(rng) for i in range(size)]


def train_base(seed=0):
    """(model, tokenizer) of a base model by a seed of the recipe; 0 is the shipped one's."""
    return train(WORDS, _pairs, MODEL, seed=BASE_SEED + 100 * seed, **RECIPE)


def load_policy(o):
    """The base model with two fresh adapters."""
    return open_policy(base_folder(o, "ladder", WORDS), o)


def write_teacher(n: int, path):
    """n distinct tasks of a stronger teacher: base tasks edited up to three times by the rule that
    `vary` demonstrates. The stand-in for the paper's offline augmentation (957 and 1,777 tasks).
    Raises UserError for none."""
    if n < 1:
        raise UserError("a teacher writes at least one task")
    rng, base, tasks = random.Random(BASE_SEED + 2), base_tasks(), {}
    while len(tasks) < n:
        seed = rng.choice(base)
        tools = seed.spec["tools"]
        for _ in range(rng.randint(1, 3)):
            tools = vary(tools, rng)
        task = _task(rng.randrange(10), tools, "teacher")
        if task.id != seed.id and task.id not in _held_out_ids():
            tasks[task.id] = task
    with open(path, "w") as file:
        file.writelines(json.dumps({"text": t.text}) + "\n" for t in tasks.values())


def show(folder):
    """Print a base model's success rate on single steps, rung by rung."""
    policy = open_policy(str(folder))
    for name in NAMES:
        tasks = [_task(d, [name], "demo") for d in range(10)]
        out = policy.sample(None, [policy.encode(agent_prompt(t)) for t in tasks], G=20,
                            generator=policy.generator(0))
        hits = [score(tasks[i // 20], policy.decode(r.response))[0] for i, r in enumerate(out)]
        print(f"{name:5s} p = {sum(hits) / len(hits):.2f}   demonstrated "
              f"{1 - slip_rate(RUNG[name]):.2f}")


def main(argv=None) -> int:
    """Show or train a base model, or write a teacher's tasks; returns the exit code."""
    return program("ladder", sys.argv[1:] if argv is None else argv, train_base, show,
                   teacher=write_teacher)


if __name__ == "__main__":
    sys.exit(main())
