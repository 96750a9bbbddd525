"""Strings of digits and one operation, which a chat model learns on short ones.

Usage:

    python genenv.py warm-start --world digits --operation sort --model DIR --rounds 0 --out START
    python genenv.py --world digits --operation sort --model START [--held-out near]

A task is a string, `3 8 1 5`, and the answer the string after the operation: `5 1 8 3` (reverse),
`1 3 5 8` (sort), `4 9 2 6` (next: each digit plus one, modulo 10). Base tasks have three or four
digits, held-out tasks six to ten, or *near* ones five to eight. Does a simulator that learns
lead the agent from one to the other? Its warm start keeps the length four times out of five and
changes it by one otherwise, so an untrained simulator drifts.
"""
import random

import worlds
from data_pool import Task
from worlds.tiny_model import chat, in_words

OPERATIONS = {
    "reverse": lambda digits: digits[::-1],
    "sort": sorted,
    "next": lambda digits: [(digit + 1) % 10 for digit in digits]}
WORDS = {
    "reverse": "Write the digits in reverse order.", "sort": "Sort the digits.",
    "next": "Write the digit that follows each digit."}
SHOWN, BASE = (2, 3, 4), (3, 4)  # lengths: of what a warm start shows, of base tasks
SHORTEST = 2
LONGEST = 20
N_BASE = 240
# held-out tasks: how many, and of which lengths; settings are chosen by the near ones
HELD_OUT = {"far": (250, (6, 7, 8, 9, 10)), "near": (100, (5, 6, 7, 8))}
ANSWERS, VARIATIONS, LONGEST_SHOWN = 240, 320, 16  # that a warm start shows
MAX_CHARS = 200


def make(digits, *rest) -> Task:
    """A task; rest: the last fields of a Task, which are origin, seed task and epoch."""
    return Task(" ".join(map(str, digits)), {"digits": list(digits)}, *rest)


def read(text: str):
    """A string of digits as a list, None for any other text."""
    words = text.strip().rstrip(".").split() if len(text) <= MAX_CHARS else []
    if not words or not all(len(word) == 1 and word in "0123456789" for word in words):
        return None
    return [int(word) for word in words]


class World(worlds.World):
    """Digits and an operation, for a chat model."""
    REASONS = ("malformed", "too short", "too long", "nothing to do")
    DEFAULTS = dict(epochs=13, steps=4, seed_tasks=8, variations=1, G=8, val_samples=8,
                    val_every=13, base_share=0.25, alpha_schedule="integral", k_min=0.45, lam=6,
                    beta=8, agent_lr=2e-4, env_lr=5e-4, env_passes=1, env_batch=8,
                    max_task_tokens=44, max_response_tokens=44, max_prompt_tokens=96,
                    token_budget=4096, max_rows=256)
    OPTIONS = {"operation": ("sort", "what is done with the digits", tuple(OPERATIONS)),
               "held_out": ("far", "lengths of held-out tasks", tuple(HELD_OUT))}
    category_name, length_unit = "length", "digits"
    warm_start_passes = 1

    def random_digits(self, rng, length: int) -> list:
        """Digits with which the operation has something to do."""
        while True:
            digits = [rng.randrange(10) for _ in range(length)]
            if self.result(digits) != digits:
                return digits

    def result(self, digits) -> list:
        """The right answer."""
        return OPERATIONS[self.option("operation")](digits)

    def base_tasks(self):
        """Short strings."""
        rng, tasks = random.Random(1), {}
        while len(tasks) < N_BASE:
            task = make(self.random_digits(rng, rng.choice(BASE)), "base")
            tasks[task.id] = task
        return list(tasks.values())

    def validation_tasks(self, split="validation"):
        """As many of each length."""
        chosen = self.option("held_out")
        if split == "tuning":  # those that are not reported
            [chosen] = set(HELD_OUT) - {chosen}
        number, lengths = HELD_OUT[chosen]
        rng, tasks = random.Random(chosen), {}
        while len(tasks) < number:
            task = make(self.random_digits(rng, lengths[len(tasks) % len(lengths)]), "validation")
            tasks[task.id] = task
        return list(tasks.values())

    def env_prompt(self, seed_task, success):
        """How often the seed task was solved, and the seed task."""
        return chat("Write a string of digits.", f"Vary, {in_words(success)}: {seed_task.text}")

    def parse_task(self, text, seed_task, epoch):
        """A string of digits as a task."""
        digits = read(text)
        if digits is None:
            raise worlds.InvalidTask("malformed")
        if len(digits) < SHORTEST:
            raise worlds.InvalidTask("too short")
        if len(digits) > LONGEST:
            raise worlds.InvalidTask("too long")
        if self.result(digits) == digits:
            raise worlds.InvalidTask("nothing to do")
        return make(digits, "env", seed_task.id, epoch)

    def agent_prompt(self, task):
        """The operation and the digits."""
        return chat(WORDS[self.option("operation")], task.text)

    def gold(self, task):
        """The right answer."""
        return " ".join(map(str, self.result(task.spec["digits"])))

    def score(self, task, response):
        """Eq. 1: (1 if every digit is right, else 0; whether it is a string of digits)."""
        digits = read(response)
        return float(digits == self.result(task.spec["digits"])), digits is not None

    def category(self, task):
        """The number of digits."""
        return str(len(task.spec["digits"]))

    def skills(self, task):
        """The number of digits."""
        return [self.category(task)]

    def warm_start_pairs(self, turn=0):
        """Answers at the base's lengths, and variations at all lengths up to sixteen."""
        rng = random.Random(3 + turn + 100 * self.o.seed)
        agent, env = [], []
        for _ in range(ANSWERS):
            task = make(self.random_digits(rng, rng.choice(SHOWN)))
            agent.append((self.agent_prompt(task), self.gold(task)))
        for _ in range(VARIATIONS):
            length = rng.randint(SHORTEST, LONGEST_SHOWN)
            change = rng.choice((-1, 0, 0, 0, 0, 0, 0, 0, 0, 1))
            other = max(SHORTEST, length + change)
            success = rng.random() if rng.random() < 0.75 else None
            prompt = self.env_prompt(make(self.random_digits(rng, length)), success)
            env.append((prompt, make(self.random_digits(rng, other)).text))
        return {"agent": agent, "env": env}
