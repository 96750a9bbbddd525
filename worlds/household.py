"""Define the built-in household: an agent acts in small homes turn by turn, as in ALFWorld.

Paper: the embodied setting, in which traces are trajectories and the simulator writes whole
environments: what is where, what is closed, and the goal.

Usage: `python genenv.py --world household`. `python -m worlds.household train SEED FOLDER` trains
another base model (worlds/tiny_model.py).

A household is one line of text: the goal, then each receptacle and what is in it. An example is
`put clean mug in drawer . counter . mug in counter . drawer closed . apple in drawer . sink .` The
agent reads it without the contents of closed receptacles and acts with `go to`, `open`, `take ...
from`, `put ... in` and `clean`, `heat`, `cool ... with`. Our code executes the commands and reports
what the agent sees. A household is a task if it has what its goal needs. Then `plan` gives a
shortest solution, so no task has a wrong answer, and the length of the plan is the length of the
task. The planner sees into closed receptacles, but the agent does not. So a task is refused if an
episode has too few turns for an agent that looks into all of them.

Deviations from ALFWorld: objects and receptacles have no numbers, because there is at most one of
each kind. Phrases are shorter. An episode ends after PATIENCE turns in a row that did nothing;
cleaning an object again counts as doing something. An appliance treats an object without being
opened, and one object may get several treatments. The agent knows everything from the start except
what is in closed receptacles. The base model has learnt from plans with slips, which are mostly
more frequent for harder kinds of goals. So it has the skills but uses them unreliably, like the
base model of worlds/ladder.py.
"""
import random
import re
import sys
from contextlib import suppress
from functools import lru_cache

from data_pool import Task
from worlds import InvalidTask
from worlds.tiny_model import BUCKETS, SEED, SPECIAL, TinyWorld, bucket, main

OBJECTS = "mug cup plate bowl apple egg bread potato tomato lettuce".split()
TREATMENTS = {  # {what the goal says: (command, where it is done)}
    "clean": ("clean", "sink"), "hot": ("heat", "microwave"), "cool": ("cool", "fridge")}
DONE_AT = {verb: (adjective, place) for adjective, (verb, place) in TREATMENTS.items()}
# the word between object and place in a command
JOINTS = {"go": "to", "take": "from", "put": "in", **dict.fromkeys(DONE_AT, "with")}
APPLIANCES = [place for _, place in TREATMENTS.values()]
CLOSABLE = "drawer cabinet box microwave fridge".split()
RECEPTACLES = [*"counter table shelf desk drawer cabinet box".split(), *APPLIANCES]
# {kind of difficulty: how often the base model's demonstrations slip on it}
KINDS = {"place": .05, "closed": .25, "clean": .35, "hot": .55, "cool": .75, "two": .65}
RUNGS = [*KINDS, "both"]  # levels, easiest first; both: two objects, at least one treated
BASE_RUNGS = RUNGS[:2]
MAX_RECEPTACLES, MAX_OBJECTS, MAX_CHARS = 8, 6, 600
MAX_TURNS, MAX_TOKENS = 16, 192  # of an episode, observations included
MAX_PLAN = 12             # turns of the longest plan that a task may have
HAND = "hand"  # the place of an object that the agent holds
PATIENCE = 2              # an episode ends after this many turns in a row that do nothing
N_BASE, PER_RUNG = 544, 15
MODEL = dict(hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=320, rope_theta=10000.0)
OTHER_WORDS = ("clean hot cool heat put take go open look to from in with and closed . > vary "
               "=> you see nothing happens is").split()
WORDS = [*SPECIAL, *OBJECTS, *RECEPTACLES, *OTHER_WORDS, *BUCKETS]


def say(verb, thing, place) -> str:
    """Return a command as text; its object and its place may be ""."""
    words = verb, thing, JOINTS.get(verb), place
    return " ".join(filter(None, words))


def every_command():
    """Yield every command as (verb, object, place), with "" for a part that it lacks."""
    yield "look", "", ""
    for place in RECEPTACLES:
        yield "go", "", place
        yield "open", "", place
        for verb in ("take", "put", *DONE_AT):
            yield from ((verb, thing, place) for thing in OBJECTS)


COMMANDS = {say(*command): command for command in every_command()}


# ---------------------------------------------------------------------------------------------
# the household: its state, and what commands do to it


def start(task) -> dict:
    """Return the state at the start of an episode.

    at: where the agent is, "" at first. place_of: where each object is, HAND included. closed: the
    closed receptacles. treated: (treatment, object) pairs. idle: turns in a row that did nothing.
    """
    house = task.spec["house"]
    return {
        "at": "",
        "place_of": {thing: place for place, _, things in house for thing in things},
        "closed": [place for place, closed, _ in house if closed],
        "treated": [],
        "idle": 0}


def does_something(spec, state, verb, thing, place) -> bool:
    """Return whether a command changes the state."""
    if verb == "go":
        return place != state["at"] and any(place == name for name, _, _ in spec["house"])
    # for the other commands the agent has to be at the place
    if place != state["at"]:
        return False
    is_open = place not in state["closed"]
    where = state["place_of"].get(thing)
    if verb == "open":
        return not is_open
    if verb == "take":
        return is_open and where == place and HAND not in state["place_of"].values()
    if verb == "put":
        return is_open and where == HAND
    return where == HAND and DONE_AT[verb][1] == place


def execute(state, verb, thing, place):
    """Execute a command, which changes the state; `does_something` has to hold for it."""
    if verb == "go":
        state["at"] = place
    elif verb == "open":
        state["closed"].remove(place)
    elif verb == "take":
        state["place_of"][thing] = HAND
    elif verb == "put":
        state["place_of"][thing] = place
    else:
        state["treated"].append((DONE_AT[verb][0], thing))


def reached(spec, state) -> bool:
    """Return whether every object of the goal is at the target and has had its treatment."""
    for how, thing in spec["goal"]:
        if state["place_of"][thing] != spec["target"]:
            return False
        if how and (how, thing) not in state["treated"]:
            return False
    return True


def read_command(text):
    """Return a turn as (verb, object, place), or None if it is not a command."""
    words = [word for word in text.split() if word not in (".", ">")]
    return COMMANDS.get(" ".join(words))


def seen(state) -> str:
    """Return what the agent sees where it is."""
    at = state["at"]
    if at in state["closed"]:
        return f"{at} is closed ."
    things = sorted(thing for thing, place in state["place_of"].items() if place == at)
    return f"you see {' '.join(things or ['nothing'])} ."


def respond(task, state: dict, text):
    """Execute a turn, which may change `state`; return the observation, or None at the end.

    An episode ends when the goal is reached, or after PATIENCE turns in a row that did nothing.
    """
    # `look` has no place and changes nothing, so it is idle; so is anything that isn't a command
    verb, thing, place = read_command(text) or ("", "", "")
    if does_something(task.spec, state, verb, thing, place):
        execute(state, verb, thing, place)
        state["idle"] = 0
    else:
        state["idle"] += 1
    if reached(task.spec, state) or state["idle"] == PATIENCE:
        return None
    if state["idle"] and verb != "look":
        return "nothing happens ."
    if verb in ("go", "open", "look"):
        return seen(state)
    return f"you {verb} {thing} ."


# ---------------------------------------------------------------------------------------------
# the planner


def plan(task, is_blind=False):
    """Return the commands of a shortest solution.

    It moves the goal's objects to the target one by one, in the order that takes fewer commands.
    is_blind: return the commands of an agent that cannot see into closed receptacles; it opens
    them in the order of the text until it finds the object.
    """
    goal = task.spec["goal"]
    orders = goal, goal[::-1]
    shortest = min(orders, key=lambda order: len(walk(task.spec, order)))
    return walk(task.spec, shortest, is_blind)


def walk(spec, pairs, is_blind=False) -> list:
    """Return the commands that bring these objects of the goal to the target one by one."""
    source = {thing: place for place, _, things in spec["house"] for thing in things}
    shut = [place for place, closed, _ in spec["house"] if closed]
    commands, at = [], ""
    for how, thing in pairs:
        steps = [("take", source[thing]), ("put", spec["target"])]
        if how:
            steps.insert(1, TREATMENTS[how])
        elif source[thing] == spec["target"]:
            continue  # it is there already
        for verb, place in steps:
            if is_blind and verb == "take" and place in shut:
                while shut[0] != place:
                    at = shut.pop(0)
                    commands += [say("go", "", at), say("open", "", at)]
            if place != at:
                commands.append(say("go", "", place))
                at = place
            # an appliance treats an object without being opened
            if place in shut and place in (source[thing], spec["target"]):
                commands.append(say("open", "", place))
                shut.remove(place)
            commands.append(say(verb, thing, place))
    return commands


# ---------------------------------------------------------------------------------------------
# households as text


def household(spec, closed_seen=True) -> str:
    """Return a spec as text: the goal, then each receptacle and what is in it.

    closed_seen: include the contents of closed receptacles. The place follows the object, because
    a small model looks it up best that way.
    """
    goal = " and ".join(" ".join(filter(None, pair)) for pair in spec["goal"])
    parts = [f"put {goal} in {spec['target']}"]
    for place, closed, things in spec["house"]:
        parts.append(f"{place} closed" if closed else place)
        parts += [f"{thing} in {place}" for thing in things if closed_seen or not closed]
    return " . ".join(parts) + " ."


THING, PLACE, CLOSED = map("|".join, (OBJECTS, RECEPTACLES, CLOSABLE))
PART = rf"({PLACE})|({CLOSED}) closed|({THING}) in ({PLACE})"
HOW = rf"(?:({'|'.join(TREATMENTS)}) )?"
GOAL = rf"put {HOW}({THING})(?: and {HOW}({THING}))? in ({PLACE})"


def read_household(text, goal_pattern=GOAL, copies=1) -> dict:
    """Return the spec that a text describes.

    copies: how often one object may occur. Raise InvalidTask unless the text is a consistent
    household.
    """
    if len(text) > MAX_CHARS:
        raise InvalidTask("too large")
    words = re.findall(r"[a-z]+|[^a-z\s]", text.lower())
    goal_text, *part_texts = " ".join(words).removesuffix(" .").split(" . ")
    goal = re.fullmatch(goal_pattern, goal_text)
    parts = [re.fullmatch(PART, part) for part in part_texts]
    if goal is None or None in parts:
        raise InvalidTask("malformed")
    # a part is a receptacle, perhaps closed, or an object and its place
    house = [[part[1] or part[2], bool(part[2]), []] for part in parts if not part[3]]
    things_in = {name: things for name, _, things in house}
    for part in parts:
        if part[3]:
            if part[4] not in things_in:
                raise InvalidTask("inconsistent")
            things_in[part[4]].append(part[3])
    pairs = [[goal[1] or "", goal[2]]]
    if goal[4]:
        pairs.append([goal[3] or "", goal[4]])
    spec = {"goal": pairs, "target": goal[5], "house": house}
    check_household(spec, copies)
    return spec


def check_household(spec, copies=1):
    """Raise InvalidTask for a household that cannot exist."""
    names = [name for name, _, _ in spec["house"]]
    things = [thing for _, _, held in spec["house"] for thing in held]
    wanted = [thing for _, thing in spec["goal"]]
    if len(names) > MAX_RECEPTACLES or len(things) > MAX_OBJECTS:
        raise InvalidTask("too large")
    # each place occurs once; the objects of the goal differ, and all are in the household
    is_twice = any(len(set(group)) < len(group) for group in (names, wanted))
    is_too_often = any(things.count(thing) > copies for thing in things)
    is_missing = spec["target"] not in names or not set(wanted) <= set(things)
    if is_twice or is_too_often or is_missing:
        raise InvalidTask("inconsistent")


def read_task(text, *rest, **form) -> Task:
    """Read a text as a task. Raise InvalidTask if it is not a consistent household.

    rest: the last fields of Task. form: arguments of read_household.
    """
    spec = read_household(text, **form)
    return Task(household(spec), spec, *rest)


def solved(text, *rest) -> Task:
    """Read a text as a task that has a solution. Raise InvalidTask if it is not one.

    rest: the last fields of Task.
    """
    task = read_task(text, *rest)
    spec = task.spec
    appliances = {TREATMENTS[how][1] for how, _ in spec["goal"] if how}
    if not appliances <= {place for place, _, _ in spec["house"]}:
        raise InvalidTask("unsolvable")
    commands = plan(task)
    if not commands:
        raise InvalidTask("nothing to do")
    if len(commands) > MAX_PLAN:
        raise InvalidTask("too long")
    if longest_search(spec, commands) > MAX_TURNS:
        raise InvalidTask("a matter of luck")
    return task


def longest_search(spec, commands) -> int:
    """Return how many turns an unlucky agent needs if it cannot see into closed receptacles.

    commands: the plan. If it takes an object out of a closed receptacle, the agent may have to
    visit and open every other closed one first.
    """
    shut = {place for place, closed, _ in spec["house"] if closed}
    steps = [read_command(command) for command in commands]
    if not any(verb == "take" and place in shut for verb, _, place in steps):
        return len(commands)
    opened = {place for verb, _, place in steps if verb == "open"}
    # a `go to` and an `open` for each of the others
    return len(commands) + 2 * len(shut - opened)


def key_of(task) -> str:
    """Return a household's key, which ignores the order of its parts and its empty receptacles.

    The target counts even if it is empty.
    """
    spec = task.spec
    house = sorted([place, closed, sorted(things)] for place, closed, things in spec["house"]
                   if things or place == spec["target"])
    return repr([sorted(spec["goal"]), spec["target"], house])


def kinds_of(task):
    """Return the kinds of difficulty in a task, or only "place" if it has no other."""
    goal, kinds = task.spec["goal"], []
    wanted = {thing for _, thing in goal}
    for place, closed, things in task.spec["house"]:
        is_of_use = place == task.spec["target"] or not wanted.isdisjoint(things)
        if closed and is_of_use:
            kinds = ["closed"]  # once, however many are closed
    kinds += [how for how, _ in goal if how]
    if len(goal) == 2:
        kinds.append("two")
    return kinds or ["place"]


def rung_of(task) -> str:
    """Return a task's rung: "both", or else the hardest of its kinds of difficulty."""
    kinds = kinds_of(task)
    if "two" in kinds and not set(TREATMENTS).isdisjoint(kinds):
        return "both"
    return max(kinds, key=RUNGS.index)


# ---------------------------------------------------------------------------------------------
# task sets


def random_spec(rng, rung, extra) -> dict:
    """Draw the spec of a household for this rung; it sometimes turns out to be on another one.

    It has `extra` receptacles besides the three appliances.
    """
    names = APPLIANCES + rng.sample(RECEPTACLES[:-3], extra)
    rng.shuffle(names)
    things = rng.sample(OBJECTS, rng.randint(2, 4))
    number = 2 if rung in ("two", "both") else 1  # of objects in the goal
    source = [rng.choice(names) for _ in things]
    target = rng.choice([name for name in names if name not in source[:number]])
    how = rung if rung in TREATMENTS else ""
    if rung == "both":
        how = rng.choice([*TREATMENTS])
    goal = [[how, things[0]], ["", things[1]]][:number]
    # close the target or the receptacle of the first object, if either can be closed: always on
    # the rung "closed", sometimes on the harder ones
    lid = rung == "closed" or (rung not in BASE_RUNGS and rng.random() < 0.25)
    closable = sorted({target, source[0]} & set(CLOSABLE))
    shut = rng.choice(closable) if lid and closable else ""
    house = []
    for name in names:
        held = [thing for thing, place in zip(things, source) if place == name]
        house.append([name, name == shut, held])
    rng.shuffle(goal)
    return {"goal": goal, "target": target, "house": house}


def random_task(rng, rung, extra, origin, taken):
    """Draw a solvable task of exactly this rung whose key is not taken."""
    while True:
        spec = random_spec(rng, rung, rng.choice(extra))
        with suppress(InvalidTask):
            task = solved(household(spec), origin)
            if rung_of(task) == rung and key_of(task) not in taken:
                return task


@lru_cache
def held_out() -> dict:
    """Draw {split: tasks}: PER_RUNG of each rung in each of two disjoint splits."""
    rng, splits, taken = random.Random(SEED), {"validation": [], "tuning": []}, set()
    for rung in RUNGS:
        for split in splits.values():
            for _ in range(PER_RUNG):
                split.append(random_task(rng, rung, (2, 3), "validation", taken))
                taken.add(key_of(split[-1]))
    return splits


def base() -> list:
    """Draw the base tasks, on the two easiest rungs, with five receptacles each, none held out."""
    rng, tasks, taken = random.Random(SEED + 1), [], set(held_out_keys())
    while len(tasks) < N_BASE:
        tasks.append(random_task(rng, rng.choice(BASE_RUNGS), (2,), "base", taken))
        taken.add(key_of(tasks[-1]))
    return tasks


@lru_cache
def held_out_keys() -> frozenset:
    return frozenset(key_of(task) for split in held_out().values() for task in split)


# ---------------------------------------------------------------------------------------------
# the stand-in for an instruct model


def slip(task, rng):
    """Draw the commands of an agent that does not see into closed receptacles and makes mistakes.

    Each kind of mistake has its own rate.
    """
    slipped, commands = [], plan(task, is_blind=True)
    for i, command in enumerate(commands):
        verb, thing, place = read_command(command)
        if verb == "open" and rng.random() < KINDS["closed"]:
            continue
        if verb in DONE_AT and rng.random() < KINDS[DONE_AT[verb][0]]:
            # leave the treatment out, or do another one instead
            if slipped[-1:] == [f"go to {place}"]:
                slipped.pop()
            if rng.random() < 0.5:
                others = [pair for pair in TREATMENTS.values() if pair[1] != place]
                verb, other = rng.choice(others)
                slipped += [f"go to {other}", f"{verb} {thing} with {other}"]
            continue
        slipped.append(command)
        is_last = i + 1 == len(commands)
        if verb == "put" and not is_last and rng.random() < KINDS["two"]:
            break
    if rng.random() < KINDS["place"]:
        target = task.spec["target"]
        others = [place for place, _, _ in task.spec["house"] if place != target]
        slipped = [command.replace(target, others[0]) for command in slipped]
    return slipped


def vary(task, rng) -> Task:
    """Draw a nearby variation: one name or place changes, and perhaps a treatment, a lid, or the
    number of objects."""
    while True:
        spec = read_household(task.text)
        edit_place(spec, rng)
        edit_goal(spec, rng)
        with suppress(InvalidTask):
            variation = solved(household(spec), "demo")
            if key_of(variation) != key_of(task) and key_of(variation) not in held_out_keys():
                return variation


def edit_place(spec, rng):
    """Edit a spec in place: rename an object, move one, or change the target."""
    house = spec["house"]
    edit = rng.choice(("rename", "rename", "move", "target"))
    if edit == "rename":
        old = rng.choice([thing for _, _, things in house for thing in things])
        new = rng.choice(OBJECTS)
        for pair in spec["goal"]:
            pair[1] = new if pair[1] == old else pair[1]
        for receptacle in house:
            receptacle[2] = [new if thing == old else thing for thing in receptacle[2]]
    elif edit == "move":
        source = rng.choice([things for _, _, things in house if things])
        rng.choice(house)[2].append(source.pop())
    else:
        spec["target"] = rng.choice(house)[0]


def edit_goal(spec, rng):
    """Edit a spec in place: change a treatment, a lid, the number of objects, or nothing."""
    goal, house = spec["goal"], spec["house"]
    edit = rng.choice(("none", "how", "how", "lid", "count"))
    if edit == "how":
        pair, hows = rng.choice(goal), ["", *TREATMENTS]
        i = hows.index(pair[0]) + rng.choice((-1, 1))
        pair[0] = hows[min(3, max(0, i))]
    elif edit == "lid":
        receptacle = rng.choice(house)
        receptacle[1] = not receptacle[1] and receptacle[0] in CLOSABLE
    elif edit == "count" and len(goal) == 2:
        goal.pop(rng.randrange(2))
    elif edit == "count":
        others = [thing for _, _, things in house for thing in things if thing != goal[0][1]]
        if others:
            goal.append(["", rng.choice(others)])


# ---------------------------------------------------------------------------------------------
# the world


class World(TinyWorld):
    """Play households with the world's own tiny model."""
    NAME, WORDS = "household", WORDS
    RECIPE = dict(model_config=MODEL, steps=4800, batch=16, lr=3e-3)  # of the base model
    REASONS = ("malformed", "too large", "inconsistent", "nothing to do", "unsolvable", "too long",
               "a matter of luck")
    # base_share: a goal with "cool" is three edits or more from a base task, so fewer seeds are
    # base tasks
    DEFAULTS = dict(epochs=24, steps=4, seed_tasks=16, variations=4, max_task_tokens=72,
                    max_response_tokens=8, max_prompt_tokens=128, val_every=4, base_share=0.5)
    max_turns, max_episode_tokens = MAX_TURNS, MAX_TOKENS
    category_name, length_unit = "hardest part of the goal", "turns"
    start = staticmethod(start)
    respond = staticmethod(respond)
    same_task_key = staticmethod(key_of)
    skills = staticmethod(kinds_of)
    category = staticmethod(rung_of)

    def base_tasks(self):
        """Return 544 households on the two easiest rungs."""
        return base()

    def validation_tasks(self, split="validation"):
        """Return 105 tasks, fifteen per rung."""
        return held_out()[split]

    def env_prompt(self, seed_task, success):
        """Return a prompt with the recent success rate, which may be unknown, and the seed task."""
        return f"vary {bucket(success)} {seed_task.text} =>"

    def agent_prompt(self, task):
        """Return the household without the contents of closed receptacles."""
        return f"{household(task.spec, closed_seen=False)} >"

    def parse_task(self, text, seed_task, epoch):
        """Read the simulator's text as a solvable household.

        Raise InvalidTask with one of REASONS.
        """
        return solved(text, "env", seed_task.id, epoch)

    def score(self, task, response):
        """Return (reward, whether the attempt is valid).

        The reward is Eq. 1: 1 if the goal is reached, else 0. In a valid attempt every turn is a
        command. response: the agent's turns, a list of texts. They are executed again from the
        start.
        """
        state = self.replay(task, response)
        valid = bool(response) and all(map(read_command, response))
        return float(reached(task.spec, state)), valid  # Eq. 1: 1[a' in A_goal]

    def gold(self, task):
        """Return a shortest plan, one command per line."""
        return "\n".join(plan(task))

    def task_length(self, task):
        """Return the number of turns of a shortest plan; `plan` sees into closed receptacles."""
        return len(plan(task))

    # ---- the stand-in for an instruct model

    def demonstrate(self, task, rng):
        """Draw (prompt, episode) for the agent's role, with slips.

        After its last command the agent repeats `look` until the episode is over.
        """
        commands, state, parts = slip(task, rng), start(task), []
        while True:
            command = commands.pop(0) if commands else "look"
            parts.append(command)
            observation = respond(task, state, command)
            if observation is None:  # the last turn has no observation
                return self.agent_prompt(task), " ".join(parts)
            # an observation follows the end of a turn
            parts.append(f"{SPECIAL[1]} {observation}")

    def pairs(self, rng, n):
        """Draw n pairs (prompt, response) for the base model, all of one role and similar length.

        Batches of one kind need little padding, so the base model trains in half the time. None of
        the tasks is held out. Each is newly drawn: with 3,000 fixed ones, a model learnt some by
        heart.
        """
        role = rng.choice(("env", "env", "one", "one", "two"))
        rungs = {"env": RUNGS, "one": RUNGS[:-2], "two": RUNGS[-2:]}[role]
        held_out = held_out_keys()
        tasks = [random_task(rng, rng.choice(rungs), (2, 3), "demo", held_out) for _ in range(n)]
        if role != "env":
            return [self.demonstrate(task, rng) for task in tasks]
        pairs = []
        for task in tasks:
            prompt = self.env_prompt(task, rng.choice((None, rng.random())))
            pairs.append((prompt, vary(task, rng).text))
        return pairs


if __name__ == "__main__":
    sys.exit(main(World))
