"""Train on somebody else's tasks: reasoning-gym's puzzles, at levels that the simulator chooses.

Usage:

    pip install reasoning-gym==0.1.25          # one of its packages needs a C compiler
    python genenv.py --world gym --families chain_sum,spell_backward --model MODEL
    # a small model first needs a warm start:
    python genenv.py warm-start --world gym --families ... --model DIR --out START

A task is a line such as `chain_sum num_terms=2 num_digits=0 item 417`: a family of puzzles, a level
for each of its knobs (what can be made harder; 0 if left out), and a number. The library makes the
item from the line and scores the answers, so no reference can be wrong, and a level means what it
says.

Deviations: the simulator never sees a question, only family, levels and number. It learns which of
the library's levels suit the agent, so a bandit over (family, levels) is its natural rival.

The levels that exist for a run do not depend on the machine. gym_levels.json, made once by
scripts/gym_levels.py (commit b946650), lists those whose items are small, are made quickly, and
have an answer that earns 1. It also says why each other family is excluded. For example, some
scorers would run what a model wrote, with `eval` or with sympy's parse_expr, which calls `eval`. As
a last resort, a timer stops an item after LIMIT seconds of CPU time; the item then counts as
"cannot be made". The timer works only on the main thread: a run calls the library there, but
another trainer may score answers on other threads.
"""
import io
import json
import random
import re
import signal
import threading
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache
from pathlib import Path

import worlds
from data_pool import Task
from errors import UserError, choose
from worlds.tiny_model import chat, in_words

TABLE = Path(__file__).with_name("gym_levels.json")
LINE = re.compile(r"([a-z0-9_]+)((?: [a-z0-9_]+=[0-9]{1,2})*) item ([0-9]{1,4})")
# numbers of items: a run draws from RUN; held-out tasks have other numbers
RUN = range(1000)
FIRST = {"base": 0, "validation": 1000, "tuning": 2000}
SIZES = {"base": 12, "validation": 32, "tuning": 8}  # tasks per family
TRIES = 4            # numbers tried for each of these tasks
MENU = 6             # families that a simulator's prompt shows
ANSWERS, LINES = 240, 160  # imitated in a pass of a warm start
MAX_CHARS = 4000     # of a response or a line
MARGIN = 100         # tokens, at most, that the agent's prompt adds to the question
LIMIT = 5            # seconds of CPU time for an item
ONE_AT_A_TIME = threading.RLock()  # held by the thread that calls the library
# every comparison with float("nan") is false, so some scorers accept it
NOT_A_NUMBER = re.compile(r"(?<![a-z])(nan|inf|infinity)[ij]?(?![a-z])", re.IGNORECASE)


# ---------------------------------------------------------------------------------------------
# the library


def too_slow(*_):
    """Stop an item that takes too long; the timer calls this as a last resort."""
    raise TimeoutError


@contextmanager
def library():
    """Make a context in which to call the library.

    It restores Python's global random state, drops what the library prints, and stops anything
    that takes LIMIT seconds. Threads wait for each other, because they share the random state.
    """
    with ONE_AT_A_TIME, redirect_stdout(io.StringIO()), timer():
        state = random.getstate()
        try:
            yield
        finally:
            random.setstate(state)


@contextmanager
def timer():
    """Make a context that raises TimeoutError after LIMIT seconds of CPU time.

    Python allows signals only on its main thread. On others, where only answers are scored, nothing
    is timed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # this signal is only for CPU time: those that stop a run are not touched
    before = signal.signal(signal.SIGPROF, too_slow)
    # repeat it every second, because a bare `except:` of the library may swallow one
    signal.setitimer(signal.ITIMER_PROF, LIMIT, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def make_item(family: str, levels: dict, number: int):
    """Return (the family's dataset at these levels, its item with this number).

    The dataset scores answers; the item is a dict with "question" and "answer". The library may
    raise any error.
    """
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
    from reasoning_gym.factory import DATASETS, create_curriculum
    curriculum = create_curriculum(family)
    for knob in curriculum.attributes:
        curriculum.set_attr_level(knob, levels.get(knob, 0))
    # a level means its own range of values, without those below it
    context = DefaultCurriculumContext(RangeAttributeMode.UPPER_BOUND)
    config = curriculum.generate_configuration({"seed": number, "size": 1}, context)
    dataset = DATASETS[family][0](config)
    return dataset, dataset[0]


def paid(dataset, item: dict, answer: str) -> float:
    """Return what the family's own scorer pays for an answer, in [0, 1]."""
    if NOT_A_NUMBER.search(answer):
        return 0.0
    try:
        value = float(dataset.score_answer(answer, item))
    except Exception:  # the scorer cannot read such an answer
        return 0.0
    # some scorers divide an answer's error by the right answer: if the right answer is negative,
    # they pay more than 1
    return value if 0 <= value <= 1 else 0.0


@lru_cache(maxsize=1024)
def item_of(line: str):
    """Return (dataset, item) of a line, from a cache if it was made recently.

    Raise InvalidTask if the item cannot be made, or if its own answer does not earn 1.
    """
    with library():
        try:
            dataset, item = make_item(*read_line(line))
            answer = item["answer"].strip()
            pays = answer != "" and paid(dataset, item, answer) == 1
        except Exception:  # the library asserts, or runs out of words or of time
            pays = False
    if not pays:
        raise worlds.InvalidTask("cannot be made")
    return dataset, item


# ---------------------------------------------------------------------------------------------
# lines


def write_line(family: str, levels: dict, item: int) -> str:
    """Write `chain_sum num_terms=2 num_digits=0 item 417`."""
    knobs = [f"{knob}={level}" for knob, level in levels.items()]
    return " ".join([family, *knobs, "item", str(item)])


def read_line(text):
    """Read what write_line wrote. Raise InvalidTask for any other text."""
    match = LINE.fullmatch(text.strip()) if len(text) <= MAX_CHARS else None
    if match is None:
        raise worlds.InvalidTask("malformed")
    pairs = [word.split("=") for word in match[2].split()]
    levels = {knob: int(level) for knob, level in pairs}
    if len(levels) < len(pairs):
        raise worlds.InvalidTask("malformed")
    return match[1], levels, int(match[3])


def answer_in(response: str) -> str:
    """Return what is between the last <answer> and its </answer>, or "" if one is missing."""
    if len(response) > MAX_CHARS:
        return ""
    _, start, rest = response.rpartition("<answer>")
    answer, end, _ = rest.partition("</answer>")
    return answer.strip() if start and end else ""


# ---------------------------------------------------------------------------------------------
# the world


def checked_families(text: str, table: dict):
    """Return the families of a text such as "gcd,lcm" or "all", each once.

    Raise UserError for a family that is unknown or excluded.
    """
    known, excluded = list(table["levels"]), table["left_out"]
    if text == "all":
        print("making items of all families takes a minute or two ...", flush=True)
        return known
    names = list(dict.fromkeys(text.replace(" ", "").split(",")))
    for name in names:
        if name in excluded:
            raise UserError(f"--families {name} is excluded: {excluded[name]}")
        if name not in known:
            raise UserError(f"--families {name}: {choose(name, ['all', *known])}")
    return names


class World(worlds.World):
    """Train a chat model on families of reasoning-gym."""
    PACKAGE = "reasoning_gym"
    INSTALL = "pip install reasoning-gym==0.1.25 (it needs a C compiler)"
    REASONS = ("malformed", "unknown family", "no such level", "held-out number",
               "cannot be made", "the answer is too long", "the question is too long")
    DEFAULTS = {"max_prompt_tokens": 2304, "max_response_tokens": 64, "max_task_tokens": 48,
                "agent_lr": 1e-4, "env_lr": 1e-4, "token_budget": 8192, "max_rows": 256}
    OPTIONS = {
        "families": ("chain_sum,spell_backward", "names of reasoning-gym's families, or all", None),
        "warm_levels": (0, "highest level of a knob in the answers that a warm start shows", None),
    }
    category_name, length_unit = "family and sum of levels", "levels, from 1 on"

    def __init__(self, o):
        super().__init__(o)
        table = json.loads(TABLE.read_text())
        # {family: {knob: its highest level}}; knobs that cannot move are not in a line
        self.levels = {}
        for family in checked_families(self.option("families"), table):
            tops = table["levels"][family]
            self.levels[family] = {knob: top for knob, top in tops.items() if top}
        self.splits, self.questions = {split: [] for split in SIZES}, set()
        faults = self.make_splits()
        sizes = [f"{len(tasks)} {split}" for split, tasks in self.splits.items()]
        print(f"{len(self.levels)} families, items: {', '.join(sizes)}", flush=True)
        if faults:
            print(f"left out: {faults}", flush=True)

    # ---- tasks

    def make_splits(self) -> dict:
        """Make the tasks of all splits and return {family: why it has no base tasks}.

        Such a family is removed from `levels`. Raise UserError if none is left.
        """
        faults = {}
        for family in list(self.levels):
            base, fault = self.draw_tasks(family, "base")
            if not base:
                faults[family] = fault
                del self.levels[family]
                continue
            self.splits["base"] += base
            for split in ("validation", "tuning"):
                self.splits[split] += self.draw_tasks(family, split)[0]
        if not self.levels:
            raise UserError(f"--families: {faults}: raise the limit or choose other families")
        return faults

    def draw_tasks(self, family: str, split: str):
        """Draw a family's tasks for a split, and return them with the last failure, "" if none.

        No other split has their questions. There are SIZES[split] tasks, or fewer if TRIES numbers
        per task do not yield that many.
        """
        rng, tasks, fault = random.Random(f"{split} {family}"), [], ""
        highest = 0 if split == "base" else None
        for number in range(FIRST[split], FIRST[split] + TRIES * SIZES[split]):
            levels = self.random_levels(family, rng, highest)
            try:
                task = self.make(family, levels, number, split)
            except worlds.InvalidTask as reason:
                fault = str(reason)
                continue
            # families with few questions repeat them
            if task.text not in self.questions:
                self.questions.add(task.text)
                tasks.append(task)
            if len(tasks) == SIZES[split]:
                break
        return tasks, fault

    def random_levels(self, family: str, rng, highest=None) -> dict:
        """Draw {knob: level}, each uniformly from 0 to its highest level, or to `highest` if lower.

        If `highest` is None, it is drawn first: all levels occur, the lower ones more often.
        """
        tops = self.levels[family]
        if highest is None:
            highest = rng.randint(0, max(tops.values(), default=0))
        return {knob: rng.randint(0, min(top, highest)) for knob, top in tops.items()}

    def make(self, family: str, levels: dict, number: int, *rest):
        """Make the task of a line. rest: the last fields of Task. Raise InvalidTask if it fails."""
        levels = {knob: levels.get(knob, 0) for knob in self.levels[family]}
        spec = {"family": family, "levels": levels, "item": number}
        question = item_of(write_line(**spec))[1]["question"]
        task = Task(question, spec, *rest)
        # a token is at least a byte, so what fits here fits for every tokenizer
        if len(self.gold(task).encode()) >= self.o.max_response_tokens:
            raise worlds.InvalidTask("the answer is too long")
        if len(question.encode()) > self.o.max_prompt_tokens - MARGIN:
            raise worlds.InvalidTask("the question is too long")
        return task

    def base_tasks(self):
        """Return tasks of each family, with every knob at level 0."""
        return self.splits["base"]

    def validation_tasks(self, split="validation"):
        """Return held-out tasks of all levels, with numbers that a run may not draw."""
        return self.splits[split]

    def same_task_key(self, task):
        """Return the question, because other lines may make the same one."""
        return task.text

    # ---- the two roles

    def agent_prompt(self, task):
        """Return chat messages for the agent."""
        return chat("Give the answer between <answer> and </answer>.", task.text)

    def env_prompt(self, seed_task, success):
        """Return chat messages for the simulator.

        They hold some families with their knobs, the seed task's line and its success rate in
        eighths.
        """
        menu = "\n".join(self.menu(seed_task))
        line = write_line(**seed_task.spec)
        return chat(
            "Write the line of a puzzle: a family, a level for each of its knobs, a number.",
            f"Families and levels:\n{menu}\nVary, {in_words(success)}: {line}",
        )

    def menu(self, seed_task):
        """Return lines such as `chain_sum num_terms=0-10 num_digits=0-9`.

        One describes the seed task's family, the others up to MENU - 1 other families.
        """
        family = seed_task.spec["family"]
        others = [name for name in self.levels if name != family]
        # draw the same ones each time, because a seed task's prompt is made more than once
        others = random.Random(seed_task.id).sample(others, min(len(others), MENU - 1))
        lines = []
        for name in sorted([family, *others]):
            knobs = [f"{knob}=0-{top}" for knob, top in self.levels[name].items()]
            lines.append(" ".join([name, *knobs]))
        return lines

    def parse_task(self, text, seed_task, epoch):
        """Read the simulator's line as a task. Raise InvalidTask with one of REASONS."""
        family, levels, number = read_line(text)
        if family not in self.levels:
            raise worlds.InvalidTask("unknown family")
        tops = self.levels[family]
        for knob, level in levels.items():
            if level > tops.get(knob, -1):
                raise worlds.InvalidTask("no such level")
        if number not in RUN:
            raise worlds.InvalidTask("held-out number")
        return self.make(family, levels, number, "env", seed_task.id, epoch)

    # ---- Eq. 1

    def library_score(self, task, response: str) -> float:
        """Return what the family's own scorer pays for a response."""
        answer = answer_in(response)
        if not answer:
            return 0.0
        dataset, item = item_of(write_line(**task.spec))
        with library():
            return paid(dataset, item, answer)

    def score(self, task, response):
        """Return Eq. 1: (1 if the family's scorer pays 1, else 0; whether there is an answer)."""
        return float(self.library_score(task, response) == 1), answer_in(response) != ""

    def graded(self, task, response, reward):
        """Return what the family's own scorer pays; it may pay part for a nearly right answer."""
        return self.library_score(task, response)

    def gold(self, task):
        """Return the library's answer, in its tags."""
        answer = item_of(write_line(**task.spec))[1]["answer"].strip()
        return f"<answer>{answer}</answer>"

    # ---- what the figures need

    def skills(self, task):
        """Return the family."""
        return [task.spec["family"]]

    def task_length(self, task):
        """Return 1 plus the sum of the levels."""
        return 1 + sum(task.spec["levels"].values())

    def category(self, task):
        """Return the family and the sum of its levels, such as `chain_sum 3`."""
        return f"{task.spec['family']} {sum(task.spec['levels'].values())}"

    # ---- warm start

    def warm_start_pairs(self, turn=0):
        """Draw answers at levels up to --warm-levels, and lines at all levels.

        Each pass `turn` draws different ones.
        """
        rng = random.Random(turn)
        base, held_out = self.base_tasks(), worlds.held_out_keys(self)
        answers, lines = [], []
        for _ in range(ANSWERS):
            family = rng.choice(list(self.levels))
            levels = self.random_levels(family, rng, self.option("warm_levels"))
            try:
                task = self.make(family, levels, rng.choice(RUN), "base")
            except worlds.InvalidTask:
                continue
            # a family with few questions may draw one that is held out
            if task.text not in held_out:
                answers.append(worlds.demonstration(self, task))
        for _ in range(LINES):
            seed_task = rng.choice(base)
            family = rng.choice(self.menu(seed_task)).split()[0]
            line = write_line(family, self.random_levels(family, rng), rng.choice(RUN))
            # no task has been tried yet, so draw a success
            success = rng.choice([None, 0, 0.25, 0.5, 0.75, 1])
            lines.append((self.env_prompt(seed_task, success), line))
        return {"agent": answers, "env": lines}
