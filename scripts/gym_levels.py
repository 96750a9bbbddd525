"""How high each knob of each family of reasoning-gym may go: worlds/gym_levels.json, made once.

Usage:

    python -m scripts.gym_levels      # an hour of one core; if stopped, give it again: it goes on

A level is let in where ITEMS items can be made at it, each within SECONDS of CPU time, MEGABYTES of
memory and BYTES of question, and where the family's scorer pays each its own answer and no
nonsense. First every level of every knob is tried with the others at their lowest. Then all knobs
rise together, one level of one knob at a time, as long as items pass. Each trial is a process,
which its limits end.
"""
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

from model.files import exit_code, write_whole
from support.options import Parser
from worlds.gym import LEFT_OUT, TABLE, make_item, paid

ITEMS, SECONDS, MEGABYTES, BYTES = 20, 0.5, 500, 2000
# a trial ends with the place of its fault in this list
FAULTS = ["", "items take too much memory", "questions are too long",
          "its own answers are not paid", "nonsense is paid",
          "items cannot be made", "items take too long"]


def trial(family: str, levels: dict) -> str:
    """Why items of a family at these levels may not in, one of FAULTS; "" if they may."""
    child = os.fork()
    if child == 0:
        try:
            limit_memory()
            fault = fault_of(family, levels)
        except MemoryError:
            fault = "items take too much memory"
        except BaseException:  # this process must not go on where its parent does
            fault = "items cannot be made"
        os._exit(FAULTS.index(fault))
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        return FAULTS[os.WEXITSTATUS(status)]
    if os.WTERMSIG(status) == signal.SIGPROF:
        return "items take too long"
    return "items cannot be made"


def limit_memory():
    """From here on this process gets no more than MEGABYTES on top of what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEGABYTES * 2 ** 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def fault_of(family: str, levels: dict) -> str:
    """One of FAULTS. An item that takes SECONDS ends this process."""
    for number in range(ITEMS):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        dataset, item = make_item(family, levels, number)
        if not isinstance(item["answer"], str):
            return "its own answers are not paid"
        answer = item["answer"].strip()
        pays = paid(dataset, item, answer) == 1
        pays_nonsense = paid(dataset, item, "?") == 1
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(item["question"].encode()) > BYTES:
            return "questions are too long"
        # an item without an answer is refused one by one, in the world
        if answer and not pays:
            return "its own answers are not paid"
        if answer and pays_nonsense:
            return "nonsense is paid"
    return ""


def highest_levels(family: str, knobs: dict):
    """({knob: highest level}, why the family may not in, or ""). knobs: {knob: number of
    levels}."""
    tops = dict.fromkeys(knobs, 0)
    fault = trial(family, tops)
    if fault:
        return tops, fault
    # each knob alone
    alone = {}
    for knob, number in knobs.items():
        alone[knob] = 0
        while alone[knob] + 1 < number and not trial(family, {knob: alone[knob] + 1}):
            alone[knob] += 1
    # all together: each rises by a level in turn, until none can
    rising = list(knobs)
    while rising:
        for knob in list(rising):
            higher = tops | {knob: tops[knob] + 1}
            if higher[knob] > alone[knob] or trial(family, higher):
                rising.remove(knob)
            else:
                tops = higher
    return tops, ""


def main(argv=None):
    """Write the table, family by family."""
    parser = Parser(prog="python -m scripts.gym_levels", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=TABLE)
    args = parser.parse_args(argv)
    from reasoning_gym.factory import CURRICULA, create_curriculum
    table = {"levels": {}, "left_out": {}}
    if args.out.is_file():
        table = json.loads(args.out.read_text())
    done = [*table["levels"], *table["left_out"], *LEFT_OUT]
    for family in sorted(set(CURRICULA) - set(done)):
        with suppress(Exception):
            make_item(family, {}, 0)  # the library loads some things once; that does not count
        knobs = create_curriculum(family).attributes
        numbers = {knob: len(definition.levels) for knob, definition in knobs.items()}
        tops, fault = highest_levels(family, numbers)
        if fault:
            table["left_out"][family] = fault
        else:
            table["levels"][family] = tops
        print(f"{family}: {fault or tops}", flush=True)
        write_whole(args.out, json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code(main, "gym_levels"))
