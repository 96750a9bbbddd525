"""The embedded household: an agent that acts in small rooms, turn by turn, in the manner of
ALFWorld.

Paper: its embodied setting, in which traces are trajectories, and a simulator that writes whole
environments: what stands where, what is closed, and the goal.

Usage: `python genenv.py --world household`. `python -m worlds.household train SEED FOLDER` trains
another base model (worlds/tiny_model.py).

A household is one line of text: the goal, then each receptacle and what is in it, `put clean mug in
drawer . counter . mug in counter . drawer closed . apple in drawer . sink .` The agent reads it
without the contents of closed receptacles and acts by `go to`, `open`, `take ... from`, `put ...
in` and `clean`, `heat`, `cool ... with`; our code executes the commands and says what is to be
seen. A household is a task if a breadth-first planner solves it, so no task has a wrong answer, and
the plan's length is the task's; the planner sees into closed receptacles, the agent does not. So
the turns of an episode must suffice for an agent that looks into every one of them.

Deviations from ALFWorld: one object of a kind and no numbers, shorter phrases, an episode that ends
once PATIENCE turns did nothing (cleaning once more does something), treatment without opening the
appliance, several treatments of one thing, and facts known from the start except for the contents
of closed receptacles. The base model has learnt from plans with slips, the more the harder a goal's
kind: latent skills, as in the ladder.
"""
import random
import re
import sys
from collections import deque
from contextlib import suppress
from functools import lru_cache

from data_pool import Task
from worlds import InvalidTask
from worlds.tiny_model import BUCKETS, SEED, SPECIAL, TinyWorld, bucket, main

OBJECTS = "mug cup plate bowl apple egg bread potato tomato lettuce".split()
TREATMENTS = {  # what the goal says: (command, where it is done)
    "clean": ("clean", "sink"), "hot": ("heat", "microwave"), "cool": ("cool", "fridge")}
DONE_AT = {verb: (adjective, place) for adjective, (verb, place) in TREATMENTS.items()}
# the word between object and place in a command
JOINTS = {"go": "to", "take": "from", "put": "in", **dict.fromkeys(DONE_AT, "with")}
APPLIANCES = [place for _, place in TREATMENTS.values()]
CLOSABLE = "drawer cabinet box microwave fridge".split()
RECEPTACLES = [*"counter table shelf desk drawer cabinet box".split(), *APPLIANCES]
# kind of difficulty: how often the base model's demonstrations slip there
KINDS = {"place": .05, "closed": .25, "clean": .35, "hot": .55, "cool": .75, "two": .65}
RUNGS = [*KINDS, "both"]  # of a goal; both: two objects, one of them treated
BASE_RUNGS = RUNGS[:2]
MAX_RECEPTACLES, MAX_OBJECTS, MAX_CHARS = 8, 6, 600
MAX_TURNS, MAX_TOKENS = 16, 192  # of an episode, observations included
MAX_PLAN = 12             # turns of the longest plan a task may have
MAX_STATES = 20_000       # that the planner looks at
PATIENCE = 2              # turns in a row that do nothing, after which an episode is over
N_BASE, PER_RUNG = 544, 15
MODEL = dict(hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=320, rope_theta=10000.0)
OTHER_WORDS = ("clean hot cool heat put take go open look to from in with and closed . > vary "
               "=> you see nothing happens is").split()
WORDS = [*SPECIAL, *OBJECTS, *RECEPTACLES, *OTHER_WORDS, *BUCKETS]


def say(verb, thing, place) -> str:
    """A command as text; its object and its place may be ""."""
    words = [verb, thing, JOINTS.get(verb, ""), place]
    return " ".join(word for word in words if word)


def every_command():
    """Each (verb, object, place) that can be said, "" for what it lacks."""
    yield "look", "", ""
    for place in RECEPTACLES:
        yield "go", "", place
        yield "open", "", place
        for verb in ("take", "put", *DONE_AT):
            yield from ((verb, thing, place) for thing in OBJECTS)


COMMANDS = {say(*command): command for command in every_command()}


# ---------------------------------------------------------------------------------------------
# the household: facts, and what commands do to them


def first_facts(spec) -> frozenset:
    """What holds at the start: ("in", object, place) and ("closed", place); the agent is
    nowhere."""
    facts = set()
    for place, closed, things in spec["house"]:
        facts.update(("in", thing, place) for thing in things)
        if closed:
            facts.add(("closed", place))
    return frozenset(facts)


def act(facts, verb, thing, place):
    """The facts after a command that does something, else None. place is one of the household's."""
    is_here, is_held = ("at", place) in facts, ("hand", thing) in facts
    is_open = ("closed", place) not in facts
    if verb == "go":
        if is_here:
            return None
        return frozenset(fact for fact in facts if fact[0] != "at") | {("at", place)}
    # for the others the agent has to be there
    if not is_here:
        return None
    if verb == "open" and not is_open:
        return facts - {("closed", place)}
    is_there = ("in", thing, place) in facts
    if verb == "take" and is_open and is_there and not value_of(facts, "hand"):
        return facts - {("in", thing, place)} | {("hand", thing)}
    if verb == "put" and is_open and is_held:
        return facts - {("hand", thing)} | {("in", thing, place)}
    if verb in DONE_AT and is_held and DONE_AT[verb][1] == place:
        return facts | {(DONE_AT[verb][0], thing)}
    return None


def value_of(facts, kind) -> str:
    """Return the object in the agent's hand ("hand") or the place where it is ("at"); "" for
    none."""
    for fact in facts:
        if fact[0] == kind:
            return fact[1]
    return ""


def reached(spec, facts) -> bool:
    """Whether every object of the goal is where it should be, as it should be."""
    for how, thing in spec["goal"]:
        if ("in", thing, spec["target"]) not in facts:
            return False
        if how and (how, thing) not in facts:
            return False
    return True


def read_command(text):
    """A turn's text -> (verb, object, place), "" for what it lacks; None if it is not a command."""
    words = [word for word in text.split() if word not in (".", ">")]
    return COMMANDS.get(" ".join(words))


def seen(facts, place) -> str:
    """What is to be seen at a place, "" for nowhere."""
    if ("closed", place) in facts:
        return f"{place} is closed ."
    things = sorted(fact[1] for fact in facts if fact[0] == "in" and fact[2] == place)
    return f"you see {' '.join(things or ['nothing'])} ."


def start(task) -> dict:
    """The state of an episode: the facts, and how many turns in a row did nothing."""
    return {"facts": first_facts(task.spec), "idle": 0}


def respond(task, state: dict, text):
    """Execute a turn: state changes, the observation is returned, None when the episode is over.

    It is over when the goal is reached, or after PATIENCE turns in a row that did nothing.
    """
    # `look` has no place and changes nothing: it is idle, as is what is no command
    verb, thing, place = read_command(text) or ("", "", "")
    stands_there = any(place == name for name, _, _ in task.spec["house"])
    new_facts = act(state["facts"], verb, thing, place) if stands_there else None
    if new_facts:
        state["facts"], state["idle"] = new_facts, 0
    else:
        state["idle"] += 1
    facts = state["facts"]
    if reached(task.spec, facts) or state["idle"] == PATIENCE:
        return None
    if state["idle"] and verb != "look":
        return "nothing happens ."
    if verb in ("go", "open", "look"):
        return seen(facts, value_of(facts, "at"))
    return f"you {verb} {thing} ."


# ---------------------------------------------------------------------------------------------
# the planner


def plan(task):
    """The commands of a shortest solution, a tuple, or None if there is none."""
    return _plan(task.text)


@lru_cache(4096)
def _plan(text):
    # breadth first, and bounded
    spec = read_household(text)
    known, queue = {first_facts(spec): ()}, deque([first_facts(spec)])
    while queue and len(known) < MAX_STATES:
        facts = queue.popleft()
        if reached(spec, facts):
            return tuple(say(*command) for command in known[facts])
        for command in useful(spec, facts):
            after = act(facts, *command)
            if after is not None and after not in known:
                known[after] = (*known[facts], command)
                queue.append(after)
    return None


def useful(spec, facts):
    """Yield the commands that a shortest plan may contain: it touches only the goal's objects, and
    visits only the places where these were, where they are treated, and the target."""
    things = [thing for _, thing in spec["goal"]]
    treatments = [TREATMENTS[how] for how, _ in spec["goal"] if how]
    source = {thing: place for place, _, held in spec["house"] for thing in held}
    places = [source[thing] for thing in things]
    places += [place for _, place in treatments]
    places.append(spec["target"])
    names = [name for name, _, _ in spec["house"]]
    for place in places:
        if place in names:
            yield "go", "", place
    at = value_of(facts, "at")
    yield "open", "", at
    for thing in things:
        yield "take", thing, at
        yield from ((verb, thing, at) for verb, _ in treatments)
        # nowhere else: the agent carries one object at a time
        if at == spec["target"]:
            yield "put", thing, at


# ---------------------------------------------------------------------------------------------
# households as text


def household(spec, closed_seen=True) -> str:
    """A spec as text: the goal, then each receptacle and what is in it.

    closed_seen: also what is in closed receptacles. The place follows the thing: so a small model
    looks it up best.
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
    """Return the spec that a text describes. Raises InvalidTask unless it is a consistent
    household.

    copies: how often an object may be there.
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
    lying = [(part[3], part[4]) for part in parts if part[3]]
    house = []
    for part in parts:
        name = part[1] or part[2]
        if name:
            things = [thing for thing, place in lying if place == name]
            house.append([name, bool(part[2]), things])
    if not {place for _, place in lying} <= {name for name, _, _ in house}:
        raise InvalidTask("inconsistent")
    pairs = [[goal[1] or "", goal[2]]]
    if goal[4]:
        pairs.append([goal[3] or "", goal[4]])
    spec = {"goal": pairs, "target": goal[5], "house": house}
    check_household(spec, copies)
    return spec


def check_household(spec, copies=1):
    """Raise InvalidTask for a household that cannot be."""
    names = [name for name, _, _ in spec["house"]]
    things = [thing for _, _, held in spec["house"] for thing in held]
    wanted = [thing for _, thing in spec["goal"]]
    if len(names) > MAX_RECEPTACLES or len(things) > MAX_OBJECTS:
        raise InvalidTask("too large")
    # each place is there once, and the goal names each object once, which has to be there
    is_twice = any(len(set(group)) < len(group) for group in (names, wanted))
    is_too_often = any(things.count(thing) > copies for thing in things)
    if is_twice or is_too_often:
        raise InvalidTask("inconsistent")
    if spec["target"] not in names or not set(wanted) <= set(things):
        raise InvalidTask("inconsistent")


def solved(text, origin="env", seed="", epoch=0) -> Task:
    """Text -> a task that the planner has solved. Raises InvalidTask."""
    spec = read_household(text)
    task = Task(household(spec), spec, origin, seed, epoch)
    commands = plan(task)
    if commands is None:
        raise InvalidTask("unsolvable")
    if not commands:
        raise InvalidTask("nothing to do")
    if len(commands) > MAX_PLAN:
        raise InvalidTask("too long")
    if longest_search(spec, commands) > MAX_TURNS:
        raise InvalidTask("a matter of luck")
    return task


def longest_search(spec, commands) -> int:
    """Turns of a shortest plan for one who does not see into closed receptacles and is unlucky.

    commands: the plan. Where it fetches a thing out of a closed receptacle, every other closed one
    may have to be visited and opened before.
    """
    shut = {place for place, closed, _ in spec["house"] if closed}
    steps = [read_command(command) for command in commands]
    if not any(verb == "take" and place in shut for verb, _, place in steps):
        return len(commands)
    opened = {place for verb, _, place in steps if verb == "open"}
    # a `go to` and an `open` for each other closed one
    return len(commands) + 2 * len(shut - opened)


def key_of(task) -> str:
    """The household without the order in which it is told, and without what does not matter: empty
    receptacles, except for the goal's."""
    spec = task.spec
    house = sorted([place, closed, sorted(things)] for place, closed, things in spec["house"]
                   if things or place == spec["target"])
    return repr([sorted(spec["goal"]), spec["target"], house])


def kinds_of(task):
    """The kinds of difficulty in it: "place" if there is no other."""
    goal, kinds = task.spec["goal"], []
    wanted = {thing for _, thing in goal}
    for place, closed, things in task.spec["house"]:
        is_of_use = place == task.spec["target"] or not wanted.isdisjoint(things)
        if closed and is_of_use:
            kinds = ["closed"]  # once, however many are
    kinds += [how for how, _ in goal if how]
    if len(goal) == 2:
        kinds.append("two")
    return kinds or ["place"]


def rung_of(task) -> str:
    """The rung of the goal."""
    kinds = kinds_of(task)
    if "two" in kinds and not set(TREATMENTS).isdisjoint(kinds):
        return "both"
    return max(kinds, key=RUNGS.index)


# ---------------------------------------------------------------------------------------------
# task sets


def random_spec(rng, rung, extra) -> dict:
    """A household whose goal is of a rung, with `extra` receptacles besides the three
    appliances."""
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
    # a lid on the target or on what holds the first object, if it can be closed: always on that
    # rung, at times on the harder ones
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
    """Return a solvable task of exactly that rung whose key is not taken."""
    while True:
        spec = random_spec(rng, rung, rng.choice(extra))
        with suppress(InvalidTask):
            task = solved(household(spec), origin)
            if rung_of(task) == rung and key_of(task) not in taken:
                return task


@lru_cache
def held_out() -> dict:
    """{split: tasks}: PER_RUNG of each rung in each of two disjoint splits."""
    rng, splits, taken = random.Random(SEED), {"validation": [], "tuning": []}, set()
    for rung in RUNGS:
        for split in splits.values():
            for _ in range(PER_RUNG):
                split.append(random_task(rng, rung, (2, 3), "validation", taken))
                taken.add(key_of(split[-1]))
    return splits


def base() -> list:
    """Return the base tasks, of the two easiest rungs, five receptacles each, none of them held
    out."""
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


def expert(task):
    """Return the plan of one who does not see into closed receptacles: they are opened in their
    order."""
    shut = [place for place, closed, _ in task.spec["house"] if closed]
    steps = [read_command(command) for command in plan(task)]
    sources = [place for verb, _, place in steps if verb == "take"]
    commands, looked = [], set()
    for command, (verb, _, place) in zip(plan(task), steps):
        # before fetching something out of one he looks into those before it
        if verb == "go" and place in shut and place in sources:
            for other in shut[:shut.index(place)]:
                if other not in looked:
                    commands += [f"go to {other}", f"open {other}"]
                    looked.add(other)
        if verb == "open":
            looked.add(place)
        commands.append(command)
    return commands


def slip(task, rng):
    """The expert's commands with mistakes, each kind at its rate."""
    slipped, commands = [], expert(task)
    for i, command in enumerate(commands):
        verb, thing, place = read_command(command)
        if verb == "open" and rng.random() < KINDS["closed"]:
            continue
        if verb in DONE_AT and rng.random() < KINDS[DONE_AT[verb][0]]:
            # leaves it out, or does something else
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
    """A near variation: one name or place changes, and perhaps the goal by a rung or a lid."""
    while True:
        spec = read_household(task.text)
        edit_place(spec, rng)
        edit_goal(spec, rng)
        with suppress(InvalidTask):
            new = solved(household(spec), "demo")
            if key_of(new) != key_of(task) and key_of(new) not in held_out_keys():
                return new


def edit_place(spec, rng):
    """Change in place: another object, another receptacle for one, or another target."""
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
    """Change in place: a treatment, a lid, the number of objects, or nothing."""
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
    """Households, for a tiny model of their own."""
    NAME, WORDS = "household", WORDS
    RECIPE = dict(model_config=MODEL, steps=4800, batch=16, lr=3e-3)  # of the base model
    REASONS = ("malformed", "too large", "inconsistent", "nothing to do", "unsolvable", "too long",
               "a matter of luck")
    # base_share: rungs lie up to three edits from a base task, so seeds must climb
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
        """Return 544 households of the two easiest rungs."""
        return base()

    def validation_tasks(self, split="validation"):
        """105 tasks, fifteen per rung."""
        return held_out()[split]

    def env_prompt(self, seed_task, success):
        """The recent success rate, or that it is unknown, and the seed task."""
        return f"vary {bucket(success)} {seed_task.text} =>"

    def agent_prompt(self, task):
        """Everything except the contents of closed receptacles."""
        return f"{household(task.spec, closed_seen=False)} >"

    def parse_task(self, text, seed_task, epoch):
        """The simulator's text -> a solvable household. Raises InvalidTask with the reason to
        count."""
        return solved(text, "env", seed_task.id, epoch)

    def score(self, task, response):
        """Eq. 1, structured: 1 if the goal is reached, else 0; valid: every turn is a command.

        response: the agent's turns, a list of texts. They are executed again from the start.
        """
        state = start(task)
        for turn in response:
            if respond(task, state, turn) is None:
                break
        valid = bool(response) and all(map(read_command, response))
        return float(reached(task.spec, state["facts"])), valid  # Eq. 1: 1[a' in A_goal]

    def gold(self, task):
        """A shortest plan, a command on each line."""
        return "\n".join(plan(task))

    def task_length(self, task):
        """Turns of a shortest plan, of one who sees into closed receptacles."""
        return len(plan(task))

    # ---- the stand-in for an instruct model

    def demonstrate(self, task, rng):
        """(prompt, episode) of the agent's role, with slips; then `look` until the episode is
        over."""
        commands, state, parts = slip(task, rng), start(task), []
        while True:
            command = commands.pop(0) if commands else "look"
            parts.append(command)
            observation = respond(task, state, command)
            if observation is None:  # the last turn has none
                return self.agent_prompt(task), " ".join(parts)
            # an observation comes in where a turn has ended
            parts.append(f"{SPECIAL[1]} {observation}")

    def pairs(self, rng, n):
        """n examples for the base model, (prompt, response), all of one role and of like length.

        Batches of one kind are padded little: the base model is trained in half the time. Every
        task is a new one, none of them held out: from 3,000 of them a model learnt a part by heart.
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
