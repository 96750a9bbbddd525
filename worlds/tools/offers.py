"""Choose the functions that a trained agent is offered with a person's request.

Paper: nothing; this is for `genenv.py ask`.

An agent that has learned with a few functions in its prompt is lost among hundreds. So all are
offered only if there are at most ALL_OFFERED. Otherwise the agent gets the MOST_OFFERED that share
the most words with the request; a rare word counts more.
"""
import math
from collections import Counter

from worlds import task_texts
from worlds.tools.schemas import tools_of
from worlds.tools.texts import words_of

STEM = 5          # words that begin with the same 5 letters count as one: reminder and remind
MOST_OFFERED = 6  # tools that a prompt holds if there are more than ALL_OFFERED, and in training
ALL_OFFERED = 8   # if there are at most this many functions, all are offered


def candidates(world, task) -> dict:
    """Return {name: function that may be offered with a task}.

    They come from the list of --tools, the base tasks and the task itself. If two have the same
    name, the first one counts; but a function of the task itself comes before all others, because
    the task's right calls fit it.
    """
    by_name = dict(world.tools)
    for other in world.base_tasks():
        for name, tool in tools_of(other).items():
            by_name.setdefault(name, tool)
    return by_name | tools_of(task)


def short_list(request: str, tools: list) -> list[dict]:
    """Return all functions if there are few, else the MOST_OFFERED nearest to a request.

    They keep their order. Nearness is the sum of log(functions / functions with the stem) over the
    stems that the function and the request share.
    """
    if len(tools) <= ALL_OFFERED:
        return tools
    stems_of_tools = [stems_of(" ".join(task_texts(tool))) for tool in tools]
    tools_with = Counter(stem for stems in stems_of_tools for stem in stems)
    asked = stems_of(request)

    def nearness(position):
        shared = stems_of_tools[position] & asked
        # fsum is exact: otherwise a set's order, which varies, could break a tie
        return math.fsum(math.log(len(tools) / tools_with[stem]) for stem in shared)

    # a stable sort: ties keep the order of the list
    best = sorted(range(len(tools)), key=nearness, reverse=True)[:MOST_OFFERED]
    return [tools[i] for i in sorted(best)]


def stems_of(text: str) -> set:
    """Return the words of a text, each cut to its first STEM letters, without single letters."""
    return {word[:STEM] for word in words_of(text) if len(word) > 1}
