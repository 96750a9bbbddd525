"""Define the built-in ladder: twelve tools acting on digits, and a tiny model that half knows them.

Paper: its setting, but none of its data. An instruct model has latent skills (it can sometimes
solve a hard task), the base data is easy, and the target distribution is broader and harder. Here
our code makes all three, so that co-evolution can be watched on a laptop.

Usage: the default world of genenv.py. `python -m worlds.ladder train SEED FOLDER` trains another
base model (worlds/tiny_model.py). With a chat model in --model the ladder is in words
(worlds/ladder_words.py).

A task is a start digit and a chain of tools with step indices. The response repeats each index and
tool and adds the resulting digit: `3 s1 inc s2 dbl =` -> `s1 inc 4 s2 dbl 8`. The indices make
copying learnable in seconds. Each tool is a rung, from 0 (the easiest) to 11. The two-layer base
model is trained on imperfect demonstrations: some steps show a wrong result, a slip, and the slip
rate rises from .05 on rung 0 to .95 on rung 11. The model also learns the simulator's role: given a
seed task and its recent success rate, which may be unknown, it writes a nearby variation. The
direction of the variation does not depend on the success rate: that is for RWR to learn.

Deviations from a real domain: the checker is exact (it computes the chain), and the simulator
cannot write an ambiguous task.
"""
import json
import random
import re
import sys
from functools import lru_cache

from data_pool import Task
from worlds import InvalidTask, ladder_words
from worlds.ladder_words import Words
from worlds.tiny_model import BUCKETS, SEED, SPECIAL, TinyWorld, bucket, main

TOOLS = {  # rung by rung, from easy to hard; the results of neighbours differ for most digits
    "inc": lambda d: d + 1, "dec": lambda d: d - 1, "dbl": lambda d: 2 * d, "neg": lambda d: -d,
    "hop": lambda d: d + 3, "tpl": lambda d: 3 * d, "mir": lambda d: 9 - d, "sqr": lambda d: d * d,
    "half": lambda d: d // 2, "drop": lambda d: d - 4, "cube": lambda d: d ** 3,
    "tri": lambda d: d * (d + 1) // 2}
NAMES = list(TOOLS)
RUNG = {name: rung for rung, name in enumerate(NAMES)}
MAX_STEPS = 5       # steps of the longest chain that a generated task may have
BASE_TOOLS = 4      # three would give 390 distinct chains of 1-3 steps, fewer than 544
N_BASE = 544        # size of the paper's base set
PER_RUNG = 10       # held-out tasks per rung, for each of the two splits

DIGITS = list("0123456789")
INDICES = [f"s{i}" for i in range(1, MAX_STEPS + 1)]
WORDS = [*SPECIAL, "=", "vary", "=>", *DIGITS, *NAMES, *INDICES, *BUCKETS]
WELL_FORMED = rf"(s[1-{MAX_STEPS}] ({'|'.join(NAMES)}) [0-9]( |$))+"


class Symbols:
    """Read and write tasks, answers and prompts for the tiny model; Words has the same methods."""
    lengths, category_name = (2, 3), "hardest tool"  # lengths: steps of held-out tasks

    @staticmethod
    def write(start, tools) -> str:
        """Write `3 s1 inc s2 dbl`."""
        steps = [f"s{i} {name}" for i, name in enumerate(tools, 1)]
        return " ".join([str(start), *steps])

    @staticmethod
    def read(text):
        """Return (start, tools) of a text that `write` wrote, or None for any other text."""
        words = text.split()
        start, tools = words[:1], words[2::2]
        if not tools or start[0] not in DIGITS or not set(tools) <= set(TOOLS):
            return None
        # the indices have to be those that `write` gives
        is_written_so = Symbols.write(start[0], tools).split() == words
        return (int(start[0]), tools) if is_written_so else None

    @staticmethod
    def answer(tools, digits) -> str:
        """Write `s1 inc 4 s2 dbl 8`."""
        steps = enumerate(zip(tools, digits), 1)
        return " ".join(f"s{i} {name} {digit}" for i, (name, digit) in steps)

    @staticmethod
    def read_answer(response: str):
        """Return a response as `answer` writes it, or None if it is not well-formed."""
        text = " ".join(response[:200].split())
        return text if re.fullmatch(WELL_FORMED, text) else None

    @staticmethod
    def agent_prompt(text) -> str:
        """Return what the agent reads."""
        return f"{text} ="

    @staticmethod
    def env_prompt(text, success) -> str:
        """Return what the simulator reads: the success rate in eighths and the seed task."""
        return f"vary {bucket(success)} {text} =>"

    @staticmethod
    def category(tools) -> str:
        """Return the hardest tool of the chain."""
        return max(tools, key=RUNG.get)


# ---------------------------------------------------------------------------------------------
# chains of tools


def run_tools(start, tools) -> list:
    """Return the right digit after each step."""
    digits = [start]
    for name in tools:
        digits.append(TOOLS[name](digits[-1]) % 10)
    return digits[1:]


def wrong_digit(name, digit) -> int:
    """Return what a slip shows: the neighbouring tool's result, or another digit if that result
    happens to be right."""
    neighbour = NAMES[RUNG[name] - 1] if RUNG[name] else NAMES[1]
    right, wrong = TOOLS[name](digit) % 10, TOOLS[neighbour](digit) % 10
    return wrong if wrong != right else (right + 5) % 10


@lru_cache
def held_out(lengths) -> dict:
    """Draw {split: [(start, tools)]}: for each rung, ten chains whose hardest tool is on that rung.

    The splits are disjoint: "validation" is only ever reported; "tuning" is for choosing settings.
    lengths: the numbers of steps that a chain may have, each equally likely.
    """
    rng, splits, seen = random.Random(SEED), {"validation": [], "tuning": []}, set()
    for rung in range(len(NAMES)):
        for split in splits.values():
            while len(split) < PER_RUNG * (rung + 1):
                tools = rng.choices(NAMES[:rung + 1], k=rng.choice(lengths))
                tools[rng.randrange(len(tools))] = NAMES[rung]  # at least one of this rung
                chain = rng.randrange(10), tuple(tools)
                if chain not in seen:
                    seen.add(chain)
                    split.append(chain)
    return splits


def vary(tools, rng) -> list:
    """Draw a nearby variation: each tool may move one rung up or down, and the last step may be
    dropped or a new one added.

    Steps in the middle stay where they are, because an index that shifts is hard to learn.
    """
    top = len(NAMES) - 1
    rungs = [RUNG[name] + rng.choice((-1, 0, 0, 0, 1)) for name in tools]
    tools = [NAMES[min(top, max(0, rung))] for rung in rungs]
    edit = rng.choice(("none", "none", "none", "longer", "shorter"))
    if edit == "longer" and len(tools) < MAX_STEPS:
        return tools + [rng.choice(tools)]
    if edit == "shorter" and len(tools) > 1:
        return tools[:-1]
    return tools


def with_slips(start, tools, rng, share=1.0) -> list:
    """Draw the digit after each step; it is wrong with probability `share` times the slip rate of
    the step's tool.

    The next step continues from this digit even if it is wrong.
    """
    digit, digits = start, []
    for name in tools:
        slip_rate = 0.05 + 0.90 * RUNG[name] / (len(NAMES) - 1)  # .05 to .95
        is_slip = rng.random() < share * slip_rate
        digit = wrong_digit(name, digit) if is_slip else TOOLS[name](digit) % 10
        digits.append(digit)
    return digits


# ---------------------------------------------------------------------------------------------
# the world


class World(TinyWorld):
    """Define the ladder, in symbols for its own tiny model or in words for a chat model."""
    NAME, WORDS = "ladder", WORDS
    REASONS = ("malformed", "too long")
    # the tiny model reads 64 tokens in all; micro-batches of this size need little padding
    DEFAULTS = dict(max_prompt_tokens=40, token_budget=1024)
    CHAT_DEFAULTS = ladder_words.DEFAULTS
    length_unit = "steps"
    warm_start_passes = 1  # a single pass, over many pairs: see worlds/ladder_words.py
    OPTIONS = {"start": ("stale", "warm start of a chat model, see worlds/ladder_words.py",
                         tuple(ladder_words.PAIRS))}

    def __init__(self, o):
        super().__init__(o)
        self.form = "words" if self.chat else ""
        self.category_name = self.text.category_name

    @property
    def text(self):
        """Return the class that reads and writes tasks, answers and prompts."""
        return Words if self.form == "words" else Symbols

    def task(self, start, tools, *rest) -> Task:
        """Make a Task from a start digit and a chain of tools; rest: its other fields."""
        return Task(self.text.write(start, tools), {"start": start, "tools": list(tools)}, *rest)

    def is_held_out(self, start, tools) -> bool:
        """Return whether a chain is in one of the two splits."""
        return any((start, tuple(tools)) in split for split in held_out(self.text.lengths).values())

    def base_tasks(self):
        """Draw 544 distinct chains of 1-3 steps over the four easiest tools, none held out."""
        rng, tasks = random.Random(SEED + 1), {}
        while len(tasks) < N_BASE:
            task = self.task(*self.unseen(rng, NAMES[:BASE_TOOLS], 3), "base")
            tasks[task.id] = task
        return list(tasks.values())

    def validation_tasks(self, split="validation"):
        """Return 120 tasks, ten per rung."""
        return [self.task(*chain, "validation") for chain in held_out(self.text.lengths)[split]]

    def env_prompt(self, seed_task, success):
        """Return a prompt with the recent success rate in eighths, if known, and the seed task."""
        return self.text.env_prompt(seed_task.text, success)

    def agent_prompt(self, task):
        """Return a prompt with the chain."""
        return self.text.agent_prompt(task.text)

    def parse_task(self, text, seed_task, epoch):
        """Read the simulator's text as a task. Raise InvalidTask with one of REASONS."""
        chain = self.text.read(text)
        if chain is None:
            raise InvalidTask("malformed")
        if len(chain[1]) > MAX_STEPS:
            raise InvalidTask("too long")
        return self.task(*chain, "env", seed_task.id, epoch)

    def gold(self, task):
        """Return the response that earns the reward."""
        start, tools = task.spec["start"], task.spec["tools"]
        return self.text.answer(tools, run_tools(start, tools))

    def score(self, task, response):
        """Return (reward, whether the answer is well-formed). The reward is Eq. 1 for a structured
        answer: 1 if the whole trajectory is right, else 0."""
        answer = self.text.read_answer(response)
        return float(answer == self.gold(task)), answer is not None  # Eq. 1: 1[a' = a]

    def skills(self, task):
        """Return the tools of the chain."""
        return task.spec["tools"]

    def task_length(self, task):
        """Return the number of steps."""
        return len(task.spec["tools"])

    def category(self, task):
        """Return the hardest tool of the chain or, for the ladder in words, the number of steps."""
        return self.text.category(task.spec["tools"])

    def write_teacher(self, n: int, path):
        """Write n distinct tasks to a file; they stand in for tasks that a stronger model wrote.

        The paper's two sets of such tasks (offline augmentation) have 957 and 1,777. Ours are base
        tasks whose tools `vary` has edited one to three times, with a new start digit.
        """
        rng, base, tasks = random.Random(SEED + 2), self.base_tasks(), {}
        while len(tasks) < n:
            seed = rng.choice(base)
            tools = seed.spec["tools"]
            for _ in range(rng.randint(1, 3)):
                tools = vary(tools, rng)
            task = self.task(rng.randrange(10), tools, "teacher")
            if task.id != seed.id and not self.is_held_out(**task.spec):
                tasks[task.id] = task
        lines = [json.dumps({"text": task.text}) + "\n" for task in tasks.values()]
        with open(path, "w") as file:
            file.writelines(lines)

    # ---- the stand-in for an instruct model, and a chat model's warm start

    def unseen(self, rng, names, most: int):
        """Draw (start, tools), a chain of at most this many steps that is not held out."""
        while True:
            chain = rng.randrange(10), rng.choices(names, k=rng.randint(1, most))
            if not self.is_held_out(*chain):
                return chain

    def demonstrate(self, rng, easy=False):
        """Draw (prompt, response) for the agent's role: all tools with slips, or easy ones with
        fewer slips."""
        names, most, share = NAMES, MAX_STEPS, 1
        if easy:
            names, most, share = NAMES[:BASE_TOOLS], 3, ladder_words.EASY_SLIPS
        start, tools = self.unseen(rng, names, most)
        digits = with_slips(start, tools, rng, share)
        prompt = self.text.agent_prompt(self.text.write(start, tools))
        return prompt, self.text.answer(tools, digits)

    def imagine(self, rng):
        """Draw (prompt, response) for the simulator's role."""
        seed = self.unseen(rng, NAMES, MAX_STEPS)
        while True:
            chain = rng.randrange(10), vary(seed[1], rng)
            if not self.is_held_out(*chain):
                break
        # three times out of four the success rate is known
        success = rng.random() if rng.random() < 0.75 else None
        return self.text.env_prompt(self.text.write(*seed), success), self.text.write(*chain)

    def pairs(self, rng, size: int):
        """Draw pairs, half of them variations, half demonstrations."""
        return [self.demonstrate(rng) if i % 2 else self.imagine(rng) for i in range(size)]

    def warm_start_pairs(self, turn=0):
        """Draw the pairs that a chat model imitates in pass number `turn`; --start decides how many
        of each kind there are (worlds/ladder_words.py)."""
        rng = random.Random(SEED + 3 + turn + 100 * self.o.seed)
        easy, others, variations = ladder_words.PAIRS[self.option("start")]
        return {"agent": [self.demonstrate(rng, easy=i < easy) for i in range(easy + others)],
                "env": [self.imagine(rng) for _ in range(variations)]}


if __name__ == "__main__":
    sys.exit(main(World))
