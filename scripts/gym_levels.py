"""How high each knob of each family of reasoning-gym may go: worlds/gym_levels.json, made once.

Usage:

    python -m scripts.gym_levels      # an hour of one core; if stopped, give it again: it goes on

It adds the families that the table does not have: to make it anew, delete the file first.

A level is let in where ITEMS items can be made at it, each within SECONDS of CPU time, MEGABYTES of
memory and BYTES of question, and where the family's scorer pays each its own answer and no
nonsense. All knobs rise together from their lowest levels, one level of one knob at a time, as long
as items pass at the new levels, and at that of the knob with the others at their lowest. Each trial
is a process, which its limits end.
"""
import json
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from errors import exit_code, write_whole
from worlds.gym import LEFT_OUT, TABLE, make_item, paid

ITEMS, SECONDS, MEGABYTES, BYTES = 20, 0.5, 500, 2000


def passes(family: str, levels: dict) -> bool:
    """Whether items of a family at these levels may in; if not, stderr may say why."""
    child = get_context("fork").Process(target=make_items, args=(family, levels))
    child.start()
    child.join()
    return child.exitcode == 0


def make_items(family: str, levels: dict):
    """What the process of a trial does; what may not in ends it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEGABYTES * 2 ** 20  # on top of what it has
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in range(ITEMS):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        dataset, item = make_item(family, levels, number)
        answer = item["answer"].strip()
        assert len(item["question"].encode()) <= BYTES, "questions are too long"
        if answer:  # an item without an answer is refused one by one, in the world
            assert paid(dataset, item, answer) == 1, "its own answers are not paid"
            assert paid(dataset, item, "?") != 1, "nonsense is paid"


def highest_levels(family: str, knobs: dict) -> dict:
    """{knob: highest level}. knobs: {knob: number of levels}."""
    tops = dict.fromkeys(knobs, 0)
    rising = list(knobs)
    while rising:
        for knob in list(rising):
            level = tops[knob] + 1
            higher = tops | {knob: level}
            if level < knobs[knob] and passes(family, {knob: level}) and passes(family, higher):
                tops = higher
            else:
                rising.remove(knob)
    return tops


def main():
    """Write the table, family by family."""
    from reasoning_gym.factory import CURRICULA, create_curriculum
    table = {"levels": {}, "left_out": {}}
    if TABLE.is_file():
        table = json.loads(TABLE.read_text())
    for family in sorted(CURRICULA.keys() - {*table["levels"], *table["left_out"], *LEFT_OUT}):
        with suppress(Exception):
            make_item(family, {}, 0)  # the library loads some things once; that does not count
        if passes(family, {}):
            knobs = create_curriculum(family).attributes
            numbers = {knob: len(definition.levels) for knob, definition in knobs.items()}
            table["levels"][family] = highest_levels(family, numbers)
        else:
            table["left_out"][family] = "its items do not pass scripts/gym_levels.py"
        print(family, table["levels"].get(family, "left out"), flush=True)
        write_whole(TABLE, json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code(main))
