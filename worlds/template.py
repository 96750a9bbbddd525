"""Copy this whole world to write your own: one tool on three digits, `dbl 3 7 1 =` -> `6 4 2`.

    cp worlds/template.py worlds/mine.py && python genenv.py --world mine

worlds/OWN_WORLD.md explains what to change, and worlds/__init__.py what each method is for.
"""
import random

import worlds
from errors import UserError
from data_pool import Task
from worlds.tiny_model import SPECIAL, load_trained

# the kinds of tasks, from easy to hard
TOOLS = {
    "inc": lambda d: d + 1,
    "dbl": lambda d: 2 * d,
    "neg": lambda d: -d,
    "sqr": lambda d: d * d,
}
BASE_TOOLS = ["inc", "dbl"]

# how often the base model is shown a wrong digit: a model without errors always solves a task, and
# one without right answers never does, but GRPO learns only from groups that mix both
SLIPS = {"inc": 0.05, "dbl": 0.2, "neg": 0.4, "sqr": 0.6}

# every word of prompts, tasks and answers; success is in quarters, ?/4 if unknown
DIGITS = list("0123456789")
WORDS = [*SPECIAL, *DIGITS, *TOOLS, "=", "vary", "=>", "?/4", "0/4", "1/4", "2/4", "3/4", "4/4"]
N_BASE, PER_TOOL = 300, 50  # base tasks; held-out tasks of each tool, out of 1,000


# ---------------------------------------------------------------------------------------------
# tasks


def make(tool, digits, *rest) -> Task:
    """Return a task. rest: the last fields of a Task, which are origin, seed task and epoch."""
    text = " ".join([tool, *map(str, digits)])
    return Task(text, {"tool": tool, "digits": digits}, *rest)


def random_task(rng, tools, origin) -> Task:
    """Draw a task of one of these tools."""
    digits = [rng.randrange(10) for _ in range(3)]
    return make(rng.choice(tools), digits, origin)


def draw_of_each(rng, kinds, number, origin, taken=()) -> dict:
    """Draw {id: task}: `number` different tasks of each kind, none of them in `taken`.

    Hold out at most a tenth of a kind's tasks, or too few are left to learn from. Raise UserError
    for a kind that has fewer tasks than `number`.
    """
    tasks = {}
    for kind in kinds:
        new_tasks, tries = {}, 0
        while len(new_tasks) < number:
            tries += 1
            if tries > 100 * number:
                raise UserError(f"there are not {number} different tasks of the kind {kind!r} "
                                "besides those held out")
            task = random_task(rng, [kind], origin)
            if task.id not in taken:
                new_tasks[task.id] = task
        tasks.update(new_tasks)
    return tasks


HELD_OUT = draw_of_each(random.Random("held-out"), TOOLS, PER_TOOL, "validation")


# ---------------------------------------------------------------------------------------------
# the world


class World(worlds.World):
    """Apply a tool to digits."""
    REASONS = ("malformed",)            # why parse_task refuses a text
    DEFAULTS = {"threads": 1}           # more threads slow a tiny model down
    category_name, length_unit = "tool", "words"  # for the report

    def __init__(self, o):
        super().__init__(o)
        if o.model or o.quant:
            raise UserError("this world brings its own model: no --model or --quant")

    # ---- task sets

    def base_tasks(self):
        """Return the easy tasks that everything starts from."""
        number = N_BASE // len(BASE_TOOLS)
        return list(draw_of_each(random.Random(1), BASE_TOOLS, number, "base", HELD_OUT).values())

    def validation_tasks(self, split="validation"):
        """Return every second held-out task, or for "tuning" the ones in between."""
        first = 1 if split == "tuning" else 0
        return list(HELD_OUT.values())[first::2]

    # ---- the simulator: what it is asked, and how its text is read

    def env_prompt(self, seed_task, success):
        """Return a prompt such as `vary 2/4 dbl 3 7 1 =>`."""
        quarters = "?" if success is None else round(4 * success)
        return f"vary {quarters}/4 {seed_task.text} =>"

    def parse_task(self, text, seed_task, epoch):
        """Read a text such as `dbl 3 7 2` as a task."""
        words = text.split() or [""]
        tool, digits = words[0], words[1:]
        if tool not in TOOLS or len(digits) != 3 or not set(digits) <= set(DIGITS):
            raise worlds.InvalidTask("malformed")
        return make(tool, [int(digit) for digit in digits], "env", seed_task.id, epoch)

    # ---- the agent: what it is asked, and how its answer is scored

    def agent_prompt(self, task):
        """Return a prompt such as `dbl 3 7 1 =`."""
        return f"{task.text} ="

    def gold(self, task):
        """Return the right answer, such as `6 4 2`."""
        tool = TOOLS[task.spec["tool"]]
        return " ".join(str(tool(digit) % 10) for digit in task.spec["digits"])

    def score(self, task, response):
        """Return Eq. 1: (1 if every digit is right, else 0; whether there are three digits)."""
        words = response.split() if len(response) < 99 else []
        is_valid = len(words) == 3 and set(words) <= set(DIGITS)
        is_right = words == self.gold(task).split()
        return float(is_right), is_valid

    # ---- for the report

    def category(self, task):
        """Return the task's row in the report."""
        return task.spec["tool"]

    def skills(self, task):
        """Return the skills that a task exercises."""
        return [task.spec["tool"]]

    # ---- the base model

    def pairs(self, rng, n):
        """Draw n pairs (prompt, response) for the base model to imitate, half for each role."""
        pairs = []
        for _ in range(n // 2):
            task = self.demo_task(rng, list(TOOLS))
            pairs.append((self.agent_prompt(task), self.with_slips(task, rng)))
            # no task has been tried yet, so draw its success
            success = rng.choice((None, 0, 0.25, 0.5, 0.75, 1))
            # a variation mostly keeps the tool
            variation = self.demo_task(rng, [task.spec["tool"]] * 6 + list(TOOLS))
            pairs.append((self.env_prompt(task, success), variation.text))
        return pairs

    def demo_task(self, rng, tools):
        """Draw a task of one of these tools that is not held out."""
        task = random_task(rng, tools, "demo")
        while task.id in HELD_OUT:
            task = random_task(rng, tools, "demo")
        return task

    def with_slips(self, task, rng):
        """Draw an answer in which some digits are too large by one."""
        digits = []
        for right in self.gold(task).split():
            slip = 1 if rng.random() < SLIPS[task.spec["tool"]] else 0
            digits.append(str((int(right) + slip) % 10))
        return " ".join(digits)

    def load_policy(self):
        """Load the base model: it is trained once and kept until this file or tiny_model.py
        changes."""
        return load_trained(self, WORDS, steps=300)
