"""A whole world, to be copied: one tool on three digits, `dbl 3 7 1 =` -> `6 4 2` (see __init__).

    cp worlds/template.py worlds/mine.py && python genenv.py --world mine
"""
import random

import worlds
from model.files import UserError
from data_pool import Task
from worlds.tiny_model import SPECIAL, load_trained

TOOLS = dict(inc=lambda d: d + 1, dbl=lambda d: 2 * d, neg=lambda d: -d, sqr=lambda d: d * d)
SLIPS = dict(inc=.05, dbl=.2, neg=.4, sqr=.6)  # share of wrong digits in what the base model is shown
# 0/4 to 4/4: p_hat in quarters, ?/4: unknown
WORDS = [*SPECIAL, *"=0123456789", *TOOLS, "vary", "=>", "?/4", "0/4", "1/4", "2/4", "3/4", "4/4"]
DIGITS = set("0123456789")

def make(tool, digits, *rest):  # rest: the last fields of Task: origin, seed task, epoch
    return Task(" ".join([tool, *map(str, digits)]), {"tool": tool, "digits": digits}, *rest)
def draw(rng, tools, n, origin, held_out=()):
    tasks = (make(rng.choice(tools), rng.choices(range(10), k=3), origin) for _ in range(9 * n))
    return list({task.id: task for task in tasks if task.id not in held_out}.values())[:n]
# a small share of each tool's tasks, or draw finds none
HELD_OUT = {task.id: task for task in draw(random.Random("held-out"), list(TOOLS), 200, "validation")}


class World(worlds.World):
    REASONS, DEFAULTS = ("malformed",), {"threads": 1}  # more threads slow a tiny model down
    category_name, length_unit = "tool", "words"  # for the report
    def __init__(self, o):
        super().__init__(o)
        if o.model or o.quant or o.base_tasks or o.validation_tasks:
            raise UserError("this world brings its own: no --model, --quant or --*-tasks")
    def base_tasks(self):
        return draw(random.Random(1), ["inc", "dbl"], 300, "base", HELD_OUT)
    def validation_tasks(self, split="validation"):
        return list(HELD_OUT.values())[split == "tuning"::2]  # from 0 or 1 on, every other one
    def env_prompt(self, seed_task, success):
        return f"vary {'?' if success is None else round(4 * success)}/4 {seed_task.text} =>"
    def agent_prompt(self, task):
        return f"{task.text} ="
    def parse_task(self, text, seed_task, epoch):
        tool, *digits = text.split() or [""]
        if tool not in TOOLS or len(digits) != 3 or not set(digits) <= DIGITS:
            raise worlds.InvalidTask("malformed")
        return make(tool, list(map(int, digits)), "env", seed_task.id, epoch)
    def gold(self, task, slip=lambda: False):  # slip() is 0 or 1, added to a digit: 1 makes it wrong
        return " ".join(str((TOOLS[task.spec["tool"]](d) + slip()) % 10) for d in task.spec["digits"])
    def score(self, task, response):  # Eq. 1; valid: three digits
        words = response.split() if len(response) < 99 else []
        valid = len(words) == 3 and set(words) <= DIGITS
        return float(valid and words == self.gold(task).split()), valid
    def category(self, task):
        return task.spec["tool"]
    def skills(self, task):
        return [task.spec["tool"]]
    def pairs(self, rng, n):  # shown to the base model: answers with slips, and variations, which mostly
        # keep the tool; the success in a prompt is random, as no task has been tried yet
        tasks = draw(rng, list(TOOLS), n // 2 + 1, "demo", HELD_OUT)
        answers = [self.gold(task, lambda: rng.random() < SLIPS[task.spec["tool"]]) for task in tasks]
        return [(self.agent_prompt(a), answer) for a, answer in zip(tasks, answers)] + [
            (self.env_prompt(a, rng.choice((None, 0, .25, .5, .75, 1))),
             draw(rng, [a.spec["tool"]] * 6 + list(TOOLS), 1, "demo", HELD_OUT)[0].text) for a in tasks]
    def load_policy(self):
        # trained once and kept until this file changes
        return load_trained(self, WORDS, steps=300)
