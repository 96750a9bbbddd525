"""Let ALFWorld's own engine run the households that the simulator writes, for a chat model.

Paper: the embodied setting, column ALFWorld of its tables. eval/alfworld.py scores the official
games with the same prompt, and reads commands in the same way.

Usage:

    pip install "textworld[pddl]==1.7.0" alfworld==0.4.2     # needs a C and a C++ compiler
    python genenv.py --world alfworld --model MODEL

A task is written as in worlds/household.py, with one goal. household.py parses it into a spec, and
`problem` makes a PDDL problem of the spec and the template alfworld.pddl. A model's own text never
becomes PDDL or part of ALFWorld's texts, whose expressions the engine evaluates. Rules, texts and
goals come from the package alfworld, and the engine's planner proves that a goal can be reached.
The agent sees ALFWorld's observations and the admissible commands.

There are six kinds of goals, as in ALFWorld. `put two mug in drawer` needs two mugs; `put lit mug
in desk` means to look at the mug under a lamp, which our code puts on the desk. The package's
seventh kind, with a movable receptacle, is left out, because no action of the domain puts an object
into one.

Deviations from ALFWorld: an episode has at most 24 commands instead of 50; each receptacle occurs
only once; every object fits everywhere and can be cleaned, heated and cooled.
"""
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path

import worlds
from data_pool import Task
from worlds import InvalidTask, household as h
from worlds.alfworld_text import SYSTEM, normalise, question, read_boxed
from worlds.tiny_model import chat, in_words

# {the word before the object in a goal: the name of this kind of goal in the package}
GOALS = {
    "": "pick_and_place_simple", "clean": "pick_clean_then_place_in_recep",
    "hot": "pick_heat_then_place_in_recep", "cool": "pick_cool_then_place_in_recep",
    "two": "pick_two_obj_and_place", "lit": "look_at_obj_in_light"}
# FORM matches a goal, in the groups that household.py expects. The two empty groups are for a
# second object, which no goal has here.
HOW = "|".join(filter(None, GOALS))
FORM = rf"put (?:({HOW}) )?({h.THING})()() in ({h.PLACE})"
# {receptacle in household.py: its name in ALFWorld}; all others have the same name in both
NAMES = {"counter": "countertop", "table": "diningtable", "sink": "sinkbasin"}
N_TASKS = 2 * h.PER_RUNG  # tasks per split, from the household's two easiest rungs
PROBLEM = Path(__file__).with_suffix(".pddl").read_text()
RULES = (
    "Write a household: the goal, then every receptacle and the objects in it. The goal is `put "
    "OBJECT in RECEPTACLE`; the object may be clean, hot, cool, two (then it is there twice) or "
    "lit (seen under a lamp, which is added to the receptacle). "
    f"Objects: {' '.join(h.OBJECTS)}. Receptacles, each at most once: {' '.join(h.RECEPTACLES)}. "
    f"These may be closed: {' '.join(h.CLOSABLE)}. Keep to the form of the example.")


# ---------------------------------------------------------------------------------------------
# from a text to a problem


def make_task(text, *rest) -> Task:
    """Return the task that a text describes: a household with a single goal.

    rest: the fields of Task after its spec. Raise InvalidTask if the text describes no such task.
    """
    return h.read_task(text, *rest, goal_pattern=FORM, copies=2)


def facts_of(spec) -> str:
    """Return a household as PDDL facts: its receptacles, which are open, where its objects are."""
    facts, numbers = [], Counter()
    for place, closed, things in spec["house"]:
        name = NAMES.get(place, place)
        facts.append(f"(receptacleAtLocation {name}_1 at_{name})")
        if not closed:
            facts.append(f"(opened {name}_1)")
        for thing in things:
            numbers[thing] += 1
            item = f"{thing}_{numbers[thing]}"
            facts.append(f"(inReceptacle {item} {name}_1) (objectAtLocation {item} at_{name})")
    return "\n".join(facts)


def problem(spec):
    """Return (a household as a PDDL problem, its goal in ALFWorld's words)."""
    from alfworld.gen.goal_library import gdict
    how, thing = spec["goal"][0]
    target = NAMES.get(spec["target"], spec["target"])
    words = {"obj": thing, "recep": target, "toggle": "desklamp"}
    goal = gdict[GOALS[how]]
    end = goal["pddl"].format(**words).replace("#", "-")
    facts = facts_of(spec)
    if how == "lit":
        facts += f"(inReceptacle desklamp_1 {target}_1) (objectAtLocation desklamp_1 at_{target})"
    return PROBLEM.format(facts=facts, goal=end), goal["templates"][0].format(**words)


# ---------------------------------------------------------------------------------------------
# the engine


@lru_cache
def engine():
    """Return ALFWorld's engine. One serves every game, so rules and texts are read only once."""
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
    from textworld import EnvInfos
    from textworld.envs.pddl import PddlEnv
    game = PddlEnv(EnvInfos(policy_commands=True))
    game.load({
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
        "grammar": Path(ALFRED_TWL2_PATH).read_text(),
        "pddl_problem": PROBLEM.format(facts="", goal="(:goal (atLocation agent1 start)))")})
    for info in game._entity_infos.values():
        info.name = info.id.replace("_", " ")
    return game


def first_moment(home):
    """Return what the engine shows at the start of a household, including its planner's commands.

    home: the household as text. Raise InvalidTask if its goal cannot be reached.
    """
    arguments, game = sys.argv, engine()
    game._game_data["pddl_problem"], goal = problem(make_task(home).spec)
    try:
        shown = game.reset()
    # the PDDL translator reports an unreachable goal by one of these
    except (SystemExit, KeyError, RuntimeError):
        raise InvalidTask("unsolvable") from None
    finally:
        sys.argv = arguments  # the translator has replaced them
    shown.feedback = shown.feedback.replace("UNKNOWN GOAL", goal)
    shown["extra.state"] = game._pddl_state
    return shown


@lru_cache(4096)  # for the moments of all games together
def moment(home, *commands):
    """Return what the engine shows after some admissible commands. home: the household as text."""
    if not commands:
        return first_moment(home)
    earlier = [moment(home, *commands[:n]) for n in range(len(commands))]
    # the engine plays one game at a time, so restart the one of this household ...
    game, state = engine(), earlier[0]["extra.state"]
    state._facts.clear()
    state.add_facts(earlier[0]["_facts"])
    state.downward_lib.load_sas(state.sas.encode())
    state.all_applicable_actions()
    # ... and repeat its commands without their texts, which are what takes time
    for shown in earlier[1:]:
        state.apply(shown["_last_action"])
        state.all_applicable_actions()
    game._pddl_state, game.state = state, earlier[-1]
    return game.step(commands[-1])[0]


# ---------------------------------------------------------------------------------------------
# tasks


def with_goals(homes, turn=0) -> list:
    """Return tasks made of the first homes of a split of the household, each kind of goal in turn.

    In these homes the goal only names an object and a place, so any kind of goal can be made of it.
    turn: shifts the kinds, so that each home gets a different one.
    """
    tasks = []
    for number, home in enumerate(homes[:N_TASKS]):
        how = list(GOALS)[(number + turn) % len(GOALS)]
        text = home.text.replace("put", f"put {how}")
        if how == "two":
            text += f" {home.spec['goal'][0][1]} in {home.spec['house'][0][0]} ."
        tasks.append(make_task(text, home.origin))
    return tasks


# ---------------------------------------------------------------------------------------------
# the world


class World(worlds.World):
    """Play households in ALFWorld's engine."""
    PACKAGE = "alfworld"
    INSTALL = "pip install 'textworld[pddl]==1.7.0' alfworld==0.4.2 (needs C and C++ compilers)"
    REASONS = ("malformed", "too large", "inconsistent", "nothing to do", "unsolvable")
    DEFAULTS = {"max_prompt_tokens": 1024, "max_response_tokens": 128, "max_task_tokens": 160}
    # an unlucky agent goes to all 8 receptacles, opens 5 and then needs at most 8 commands
    max_turns, max_episode_tokens = 24, 6144
    category_name = "goal"
    same_task_key = staticmethod(h.key_of)

    def base_tasks(self):
        """Return tasks in homes of five receptacles."""
        return with_goals(h.base())

    def validation_tasks(self, split="validation"):
        """Return tasks in homes of five or six receptacles."""
        return with_goals(h.held_out()[split])

    # ---- the two roles

    def agent_prompt(self, task):
        """Return the chat messages of eval/alfworld.py before the first command."""
        shown = moment(task.text)
        return chat(SYSTEM, f"{shown.feedback}\n\n{question(shown['admissible_commands'])}")

    def env_prompt(self, seed_task, success):
        """Return the simulator's chat messages: the rules, the seed task and its success rate."""
        return chat(RULES, f"Vary, {in_words(success)}: {seed_task.text}")

    def parse_task(self, text, seed_task, epoch):
        """Return the task that the simulator wrote. Raise InvalidTask with one of REASONS."""
        task = make_task(text, "env", seed_task.id, epoch)
        if not moment(task.text)["policy_commands"]:
            raise InvalidTask("nothing to do")
        return task

    # ---- Eq. 1

    def start(self, task):
        """Return the initial state: a list with the household's text, to which `respond` adds each
        admissible command."""
        return [h.household(task.spec)]

    def respond(self, task, state, text):
        """Let the engine execute a turn, add its command to `state`, and return the observation.

        Return None if the goal is reached. A turn that is not admissible does nothing.
        """
        shown = moment(*state)
        options, feedback = shown["admissible_commands"], "Nothing happens."
        command = normalise(read_boxed(text))
        if command in options:
            state.append(command)
            shown = moment(*state)
            options, feedback = shown["admissible_commands"], shown.feedback
        return None if shown["won"] else f"{feedback}\n\n{question(options)}"

    def score(self, task, response):
        """Return (Eq. 1: 1 if the goal is reached, else 0; whether every turn was admissible).

        response: the list of the agent's turns, which are executed again from the start.
        """
        home, *commands = self.replay(task, response)
        return float(moment(home, *commands)["won"]), 0 < len(commands) == len(response)

    def gold(self, task):
        """Return the planner's commands, one turn per line."""
        plan = moment(task.text)["policy_commands"]
        return "\n".join(f"\\boxed{{{command}}}" for command in plan)

    # ---- what the figures need

    def category(self, task):
        """Return ALFWorld's name for the kind of goal."""
        return GOALS[task.spec["goal"][0][0]]

    # ---- warm start

    def warm_start_pairs(self, turn=0):
        """Return the planner's episodes on the base tasks, and variations of them with other goals.

        These goals change from pass to pass.
        """
        pairs = {"agent": [], "env": []}
        variations = with_goals(h.base(), 1 + turn % 5)
        for task, variation in zip(self.base_tasks(), variations):
            pairs["agent"].append(worlds.demonstration(self, task))
            # no task has been tried yet
            pairs["env"].append((self.env_prompt(task, None), variation.text))
        return pairs
