"""The embedded household: an agent that acts in small rooms, turn by turn, in the manner of ALFWorld.

Paper: its embodied setting, in which traces are trajectories, and a simulator that writes whole
environments: what stands where, what is closed, and the goal.

Usage: `python genenv.py --world household`; with a chat model in --model that model plays both roles,
and observations are user turns. `python -m worlds.household train SEED FOLDER` trains another base model
(worlds/tiny_model.py).

A household is one line of text: the goal, then each receptacle and what is in it,
`put clean mug in drawer . counter . mug in counter . drawer closed . apple in drawer . sink .` The
agent reads it without the contents of closed receptacles and acts by `go to`, `open`, `take ... from`,
`put ... in` and `clean`, `heat`, `cool ... with`; our code executes the commands and says what is to
be seen. A household is a task if a breadth-first planner solves it, so no task has a wrong answer,
and the plan's length is the task's; the planner sees into closed receptacles, the agent does not. So
the turns of an episode must suffice for an agent that looks into every one of them.

Deviations from ALFWorld: one object of a kind and no numbers, shorter phrases, an episode that ends
once PATIENCE turns did nothing (cleaning once more does something), treatment without opening the
appliance, several treatments of one thing, and facts known from the start except for the contents of
closed receptacles. The base model, a small Qwen2, has learnt from plans with slips, the more the
harder a goal's kind: latent skills, as in the ladder.
"""
import random
import re
import sys
from collections import deque
from contextlib import suppress
from functools import lru_cache

from data_pool import Task
from worlds import InvalidTask
from worlds.tiny_model import BUCKETS, SEED, SPECIAL, TinyWorld, bucket, chat, main

OBJECTS = "mug cup plate bowl apple egg bread potato tomato lettuce".split()
TREATMENTS = {  # what the goal says: (command, where it is done)
    "clean": ("clean", "sink"), "hot": ("heat", "microwave"), "cool": ("cool", "fridge")}
DONE_AT = {verb: (adjective, place) for adjective, (verb, place) in TREATMENTS.items()}
APPLIANCES = [place for _, place in TREATMENTS.values()]
CLOSABLE = "drawer cabinet box microwave fridge".split()
RECEPTACLES = [*"counter table shelf desk drawer cabinet box".split(), *APPLIANCES]
# kind of difficulty: how often the base model's demonstrations slip there
KINDS = {"place": .05, "closed": .25, "clean": .35, "hot": .55, "cool": .75, "two": .65}
RUNGS = [*KINDS, "both"]  # of a goal; both: two objects, one of them treated
BASE_RUNGS = RUNGS[:2]
MAX_RECEPTACLES, MAX_OBJECTS, MAX_CHARS = 8, 6, 600
MAX_PLAN = 12             # turns of the longest plan a task may have
MAX_STATES = 20_000       # that the planner looks at
PATIENCE = 2              # turns in a row that do nothing, after which an episode is over
N_BASE, PER_RUNG = 544, 15
REASONS = ("malformed", "too large", "inconsistent", "nothing to do", "unsolvable", "too long",
           "a matter of luck")
OPTIONS = {"max_turns": (16, "turns of an episode", None),
           "max_episode_tokens": (192, "tokens of an episode, observations included", None)}
DEFAULTS = dict(epochs=24, steps=4, seed_tasks=16, variations=4, max_task_tokens=72,
                max_response_tokens=8, max_prompt_tokens=128, val_every=4,
                base_share=0.5)  # rungs lie up to three edits from a base task: seeds must climb
CHAT_DEFAULTS = dict(DEFAULTS, max_prompt_tokens=512, max_task_tokens=160, max_response_tokens=16,
                     max_episode_tokens=768, agent_lr=1e-4, env_lr=1e-4)
MODEL = dict(hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=320, rope_theta=10000.0)
RECIPE = dict(model_config=MODEL, steps=4800, batch=16, lr=3e-3)  # of the base model
WORDS = [*SPECIAL, *OBJECTS, *RECEPTACLES, *"clean hot cool heat put take go open look to from in with "
         "and closed . > vary => you see nothing happens is".split(), *BUCKETS]


# ---------------------------------------------------------------------------------------------
# the household: facts, and what commands do to them


def first_facts(spec) -> frozenset:
    """What holds at the start: ("in", object, place) and ("closed", place); the agent is nowhere."""
    return frozenset([("closed", place) for place, closed, _ in spec["house"] if closed] +
                     [("in", thing, place) for place, _, things in spec["house"] for thing in things])


def act(facts, verb, thing, place):
    """The facts after a command that does something, else None. place is one of the household's."""
    here, held = ("at", place) in facts, ("hand", thing) in facts
    reach = here and ("closed", place) not in facts
    if verb == "go" and not here:
        return frozenset(f for f in facts if f[0] != "at") | {("at", place)}
    if verb == "open" and here and not reach:
        return facts - {("closed", place)}
    if verb == "take" and reach and ("in", thing, place) in facts and not hand(facts):
        return facts - {("in", thing, place)} | {("hand", thing)}
    if verb == "put" and reach and held:
        return facts - {("hand", thing)} | {("in", thing, place)}
    if verb in DONE_AT and here and held and DONE_AT[verb][1] == place:
        return facts | {(DONE_AT[verb][0], thing)}
    return None


def hand(facts) -> str:
    """The object in the agent's hand, "" for none."""
    return next((f[1] for f in facts if f[0] == "hand"), "")


def reached(spec, facts) -> bool:
    """Whether every object of the goal is where it should be, as it should be."""
    return all(("in", thing, spec["target"]) in facts and (not how or (how, thing) in facts)
               for how, thing in spec["goal"])


def read_command(text: str):
    """A turn's text -> (verb, object, place), "" for what it lacks; None if it is not a command.

    The last line counts, as a chat model may think aloud before it, and of it 200 characters.
    """
    words = [w for w in re.findall(r"[a-z]+|\S", text.strip()[-200:].split("\n")[-1].lower())
             if w not in (".", ">", "`", '"', "the", "a", "an")]  # which chat models write
    pattern = " ".join("T" if w in OBJECTS else "P" if w in RECEPTACLES else w for w in words)
    names = {k: w for k, w in zip(pattern.split(), words) if k in "TP"}
    known = re.fullmatch(r"(go) to P|(open) P|(take) T from P|(put) T (?:in|on|in / on) P|"
                         r"(clean|heat|cool) T with P|(look)", pattern)
    return known and (known[known.lastindex], names.get("T", ""), names.get("P", ""))


def seen(facts, place) -> str:
    """What is to be seen at a place, "" for nowhere."""
    if ("closed", place) in facts:
        return f"{place} is closed ."
    return f"you see {' '.join(sorted(f[1] for f in facts if f[0] == 'in' and f[2] == place)) or 'nothing'} ."


def start(task: Task) -> dict:
    """The state of an episode: the facts, and how many turns in a row did nothing."""
    return {"facts": first_facts(task.spec), "idle": 0}


def respond(task: Task, state: dict, text: str):
    """Execute a turn: state changes, the observation is returned, None when the episode is over.

    It is over when the goal is reached, or after PATIENCE turns in a row that did nothing.
    """
    verb, thing, place = read_command(text) or ("", "", "")
    standing = any(place == name for name, _, _ in task.spec["house"])
    facts = act(state["facts"], verb, thing, place) if standing else None
    state["idle"] = 0 if facts else state["idle"] + 1
    state["facts"] = facts = facts or state["facts"]
    if reached(task.spec, facts) or state["idle"] == PATIENCE:
        return None
    at = next((f[1] for f in facts if f[0] == "at"), "")
    if state["idle"] and verb != "look":
        return "nothing happens ."
    return seen(facts, at) if verb in ("go", "open", "look") else f"you {verb} {thing} ."


# ---------------------------------------------------------------------------------------------
# the planner


def plan(task: Task):
    """The commands of a shortest solution, a tuple, or None if there is none."""
    return _plan(household(task.spec))


@lru_cache(4096)
def _plan(text: str):
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
    """Commands that a shortest plan may contain: it touches the goal's objects and their places."""
    at, held = next((f[1] for f in facts if f[0] == "at"), ""), hand(facts)
    lacking = [(how, t) for how, t in spec["goal"] if how and (how, t) not in facts]
    sources = {f[1]: f[2] for f in facts if f[0] == "in"}
    wanted = [t for how, t in spec["goal"]
              if t != held and (sources[t] != spec["target"] or (how, t) in lacking)]
    here = [sources[t] for t in wanted] if not held else \
        [TREATMENTS[how][1] for how, t in lacking if t == held] or [spec["target"]]
    stands = {place for place, _, _ in spec["house"]}
    yield from (("go", "", place) for place in here if place in stands)
    if at:
        yield "open", "", at
        yield from (("take", t, at) for t in wanted)
        yield from ((TREATMENTS[how][0], held, at) for how, t in lacking if t == held)
        if at == spec["target"]:
            yield "put", held, at


def say(verb, thing, place) -> str:
    """A command as text."""
    joint = {"go": "to", "take": "from", "put": "in", "open": ""}.get(verb, "with")
    return " ".join(filter(None, (verb, thing, joint, place)))


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


GOAL = r"put (?:(clean|hot|cool) )?(\w+)(?: and (?:(clean|hot|cool) )?(\w+))? (?:in|on) (\w+)"
PART = r"(\w+)( closed)?|(\w+) (?:in|on) (\w+)"


def read_household(text: str) -> dict:
    """Text -> spec. Raises InvalidTask unless it is a consistent household."""
    if len(text) > MAX_CHARS:
        raise InvalidTask("too large")
    words = re.findall(r"[a-z]+|[^a-z\s]", text.lower())
    text = " ".join(w for w in words if w not in ("a", "an", "the", ","))
    goal, *places = text.removesuffix(" .").split(" . ")
    goal, parts = re.fullmatch(GOAL, goal), [re.fullmatch(PART, p) for p in places]
    if goal is None or None in parts or not parts:
        raise InvalidTask("malformed")
    things = [(p[3], p[4]) for p in parts if p[3]]
    house = [[p[1], bool(p[2]), [t for t, place in things if place == p[1]]] for p in parts if p[1]]
    if not {place for _, place in things} <= {place for place, _, _ in house}:
        raise InvalidTask("inconsistent")
    pairs = [[goal[1] or "", goal[2]]] + ([[goal[3] or "", goal[4]]] if goal[4] else [])
    spec = {"goal": pairs, "target": goal[5], "house": house}
    _check(spec)
    return spec


def _check(spec):
    names = [name for name, _, _ in spec["house"]]
    things = [thing for _, _, held in spec["house"] for thing in held]
    wanted = [thing for _, thing in spec["goal"]]
    if len(names) > MAX_RECEPTACLES or len(things) > MAX_OBJECTS:
        raise InvalidTask("too large")
    if not {*names} <= {*RECEPTACLES} or not {*things} <= {*OBJECTS, *RECEPTACLES}:
        raise InvalidTask("malformed")
    # each name once; receptacles do not lie in receptacles; the goal speaks of what is there
    apart = all(len(set(xs)) == len(xs) for xs in (names, things, wanted))
    if not apart or set(things) & set(names) or not set(things) <= set(OBJECTS) or \
            spec["target"] not in names or not set(wanted) <= set(things) or \
            not all(name in CLOSABLE for name, closed, _ in spec["house"] if closed):
        raise InvalidTask("inconsistent")


def make_task(spec, origin, seed="", epoch=0) -> Task:
    """A spec as a Task."""
    return Task(household(spec), spec, origin, seed, epoch)


def solved(text: str, origin="env", seed="", epoch=0, max_turns=OPTIONS["max_turns"][0]) -> Task:
    """Text -> a task that the planner has solved. Raises InvalidTask."""
    task = make_task(read_household(text), origin, seed, epoch)
    commands = plan(task)
    if commands is None:
        raise InvalidTask("unsolvable")
    if not 0 < len(commands) <= MAX_PLAN:
        raise InvalidTask("too long" if commands else "nothing to do")
    if longest_search(task.spec, commands) > max_turns:
        raise InvalidTask("a matter of luck")
    return task


def longest_search(spec, commands) -> int:
    """Turns of a shortest plan for one who does not see into closed receptacles and is unlucky.

    commands: the plan. Where it fetches a thing out of a closed receptacle, every other closed one
    may have to be visited and opened before.
    """
    shut = {place for place, closed, _ in spec["house"] if closed}
    steps = [read_command(command) for command in commands]
    hidden = any(verb == "take" and place in shut for verb, _, place in steps)
    return len(commands) + 2 * len(shut - {place for verb, _, place in steps if verb == "open"}) * hidden


def key_of(task: Task) -> str:
    """The household without the order in which it is told, and without what does not matter: empty
    receptacles, except for the goal's."""
    spec = task.spec
    house = sorted([place, closed, sorted(things)] for place, closed, things in spec["house"]
                   if things or place == spec["target"])
    return repr([sorted(spec["goal"]), spec["target"], house])


def kinds_of(task: Task) -> list[str]:
    """The kinds of difficulty in it: "place" if there is no other."""
    hows = [how for how, _ in task.spec["goal"] if how]
    places = {task.spec["target"], *(place for place, _, things in task.spec["house"]
                                     for _, thing in task.spec["goal"] if thing in things)}
    closed = ["closed"] if any(c and p in places for p, c, _ in task.spec["house"]) else []
    return [*closed, *hows, *(["two"] if len(task.spec["goal"]) == 2 else [])] or ["place"]


def rung_of(task: Task) -> str:
    """The rung of the goal."""
    kinds = kinds_of(task)
    return "both" if "two" in kinds and any(k in TREATMENTS for k in kinds) else max(kinds, key=RUNGS.index)


# ---------------------------------------------------------------------------------------------
# task sets


def random_spec(rng, rung, extra) -> dict:
    """A household whose goal is of a rung, with `extra` receptacles besides the three appliances."""
    names = APPLIANCES + rng.sample(RECEPTACLES[:-3], extra)
    rng.shuffle(names)
    things = rng.sample(OBJECTS, rng.randint(2, 4))
    two = rung in ("two", "both")
    source = [rng.choice(names) for _ in things]
    target = rng.choice([name for name in names if name not in source[:1 + two]])
    how = rung if rung in TREATMENTS else rng.choice([*TREATMENTS]) if rung == "both" else ""
    goal = [[how, things[0]]] + ([["", things[1]]] if two else [])
    lid = rung == "closed" or rung not in BASE_RUNGS and rng.random() < 0.25
    able = [name for name in {target, source[0]} if lid and name in CLOSABLE]
    shut = {rng.choice(sorted(able))} if able else set()
    house = [[name, name in shut, [t for t, s in zip(things, source) if s == name]] for name in names]
    rng.shuffle(goal)
    return {"goal": goal, "target": target, "house": house}


def draw(rng, rung, extra, origin, taken=frozenset()):
    """A solvable task of exactly that rung whose key is not taken."""
    while True:
        task = make_task(random_spec(rng, rung, rng.choice(extra)), origin)
        if rung_of(task) == rung and key_of(task) not in taken and 0 < len(plan(task) or ()) <= MAX_PLAN:
            return task


@lru_cache
def held_out() -> dict:
    """{split: tasks}: PER_RUNG of each rung in each of two disjoint splits."""
    rng, splits, taken = random.Random(SEED), {"validation": [], "tuning": []}, set()
    for rung in RUNGS:
        for split in splits.values():
            for _ in range(PER_RUNG):
                split.append(draw(rng, rung, (2, 3), "validation", taken))
                taken.add(key_of(split[-1]))
    return splits


@lru_cache
def held_out_keys() -> frozenset:
    return frozenset(key_of(task) for split in held_out().values() for task in split)


# ---------------------------------------------------------------------------------------------
# the stand-in for an instruct model


def expert(task: Task) -> list[str]:
    """The plan of one who does not see into closed receptacles: they are opened in their order."""
    commands, looked = [], set()
    shut = [place for place, closed, _ in task.spec["house"] if closed]
    for command in plan(task):
        commands.append(command)
        if command.startswith("open"):
            looked.add(command.split()[1])
        verb, thing, place = read_command(command)
        if verb == "take" and place in shut:
            first = commands.index(f"go to {place}")
            search = [w for other in shut[:shut.index(place)] if other not in looked
                      for w in (f"go to {other}", f"open {other}")]
            commands[first:first] = search
            looked |= {w.split()[1] for w in search if w.startswith("open")}
    return commands


def slip(task: Task, rng) -> list[str]:
    """The expert's commands with mistakes, each kind at its rate."""
    err, out, commands = lambda kind: rng.random() < KINDS[kind], [], expert(task)
    for i, command in enumerate(commands):
        verb, thing, place = read_command(command)
        how = DONE_AT[verb][0] if verb in DONE_AT else ""
        if verb == "open" and err("closed"):
            continue
        if how and err(how):  # leaves it out, or does something else
            if out and out[-1] == f"go to {place}":
                out.pop()
            if rng.random() < 0.5:
                verb, other = rng.choice([pair for pair in TREATMENTS.values() if pair[1] != place])
                out += [f"go to {other}", f"{verb} {thing} with {other}"]
            continue
        out.append(command)
        if verb == "put" and i + 1 < len(commands) and err("two"):
            break
    if err("place"):
        places = [place for place, _, _ in task.spec["house"] if place != task.spec["target"]]
        out = [w.replace(task.spec["target"], places[0]) for w in out]
    return out


def vary(task: Task, rng) -> Task:
    """A near variation: one name or place changes, and perhaps the goal by a rung or a lid."""
    while True:
        spec = read_household(task.text)
        goal, house = spec["goal"], spec["house"]
        edit = rng.choice(("rename", "rename", "move", "target"))
        if edit == "rename":
            old, new = rng.choice([t for _, _, things in house for t in things]), rng.choice(OBJECTS)
            swap = lambda t: new if t == old else t
            goal[:] = [[how, swap(t)] for how, t in goal]
            house[:] = [[p, c, [swap(t) for t in things]] for p, c, things in house]
        elif edit == "move":
            source = rng.choice([things for _, _, things in house if things])
            rng.choice(house)[2].append(source.pop())
        else:
            spec["target"] = rng.choice(house)[0]
        edit = rng.choice(("none", "how", "how", "lid", "count"))
        if edit == "how":
            pair, hows = rng.choice(goal), ["", *TREATMENTS]
            pair[0] = hows[min(3, max(0, hows.index(pair[0]) + rng.choice((-1, 1))))]
        elif edit == "lid":
            place = rng.choice(house)
            place[1] = not place[1] and place[0] in CLOSABLE
        elif edit == "count" and len(goal) == 2:
            goal.pop(rng.randrange(2))
        elif edit == "count":
            others = [t for _, _, things in house for t in things if t != goal[0][1]]
            goal += [["", rng.choice(others)]] if others else []
        with suppress(InvalidTask):
            new = solved(household(spec), "demo")
            if key_of(new) != key_of(task) and key_of(new) not in held_out_keys():
                return new


# ---------------------------------------------------------------------------------------------
# the world


FORM = ("You write small households for an agent, each on one line: the goal, then every receptacle with "
        "what is in it, parts divided by ' . '. Goals are 'put [clean|hot|cool] OBJECT in RECEPTACLE', or "
        "two objects joined by 'and'. A receptacle is 'NAME' or 'NAME closed', and each thing in it "
        f"follows as 'OBJECT in NAME'. Objects: {', '.join(OBJECTS)}. Receptacles: "
        f"{', '.join(RECEPTACLES)}; only {', '.join(CLOSABLE)} can be closed. Each thing is in one place. "
        "Cleaning takes a sink, heating a microwave, cooling a fridge.")
RULES = ("You act in a household. Each turn answer with one command and nothing else: go to "
         "RECEPTACLE, open RECEPTACLE, take OBJECT from RECEPTACLE, put OBJECT in RECEPTACLE, "
         "clean OBJECT with sink, heat OBJECT with microwave, cool OBJECT with fridge, look. Go to "
         "a receptacle before you use it; open it first if it is closed.")


class World(TinyWorld):
    """Households, for a tiny model of its own or a chat model."""
    NAME, WORDS, RECIPE = "household", WORDS, RECIPE
    REASONS, OPTIONS, DEFAULTS, CHAT_DEFAULTS = REASONS, OPTIONS, DEFAULTS, CHAT_DEFAULTS
    category_name, length_unit = "hardest part of the goal", "turns"
    start, respond, same_task_key = map(staticmethod, (start, respond, key_of))
    skills, category = staticmethod(kinds_of), staticmethod(rung_of)

    def __init__(self, o):
        super().__init__(o)
        self.max_turns = self.option(o, "max_turns")
        self.max_episode_tokens = self.option(o, "max_episode_tokens")

    def base_tasks(self) -> list[Task]:
        """544 households of the two easiest rungs, five receptacles each, none of them held out."""
        rng, tasks, taken = random.Random(SEED + 1), [], set(held_out_keys())
        while len(tasks) < N_BASE:
            tasks.append(draw(rng, rng.choice(BASE_RUNGS), (2,), "base", taken))
            taken.add(key_of(tasks[-1]))
        return tasks

    def validation_tasks(self, split="validation") -> list[Task]:
        """105 tasks, fifteen per rung."""
        return held_out()[split]

    def env_prompt(self, seed_task: Task, success):
        """The recent success rate, or that it is unknown, and the seed task."""
        if not self.chat:
            return f"vary {bucket(success)} {seed_task.text} =>"
        rate = "not yet known" if success is None else f"{success:.0%}"
        return chat(FORM, f"Household:\n{seed_task.text}\nThe agent's success rate on it is {rate}. "
                    "Write a variation of this household, one line and nothing else.")

    def agent_prompt(self, task: Task):
        """Everything except the contents of closed receptacles."""
        text = household(task.spec, closed_seen=False)
        if not self.chat:
            return f"{text} >"
        goal, room = text.split(" . ", 1)
        return chat(RULES, f"In the room: {room}\nYour task: {goal} .")

    def parse_task(self, text: str, seed_task: Task, epoch: int) -> Task:
        """The simulator's text -> a solvable household. Raises InvalidTask with the reason to count."""
        return solved(text, "env", seed_task.id, epoch, self.max_turns)

    def score(self, task: Task, response) -> tuple[float, bool]:
        """Eq. 1, structured: 1 if the goal is reached, else 0; valid: every turn is a command.

        response: the agent's turns, a list of texts, or one text with a turn on each line. They are
        executed again from the start.
        """
        turns = response.split("\n", 200)[:200] if isinstance(response, str) else response
        state = start(task)
        for turn in turns:
            if respond(task, state, turn) is None:
                break
        valid = bool(turns) and all(read_command(turn) for turn in turns)
        return float(reached(task.spec, state["facts"])), valid  # Eq. 1: 1[a' in A_goal]

    def gold(self, task: Task) -> str:
        """A shortest plan, a command on each line."""
        return "\n".join(plan(task))

    def task_length(self, task: Task) -> int:
        """Turns of a shortest plan, of one who sees into closed receptacles."""
        return len(plan(task))

    # ---- the stand-in for an instruct model

    def demonstrate(self, task: Task, rng) -> tuple[str, str]:
        """(prompt, episode) of the agent's role, with slips; then `look` until the episode is over."""
        commands, state, parts = slip(task, rng), start(task), []
        while True:
            parts.append(commands.pop(0) if commands else "look")
            observation = respond(task, state, parts[-1])
            if observation is None:  # the last turn has none
                return self.agent_prompt(task), " ".join(parts)
            # an observation comes in where a turn has ended
            parts.append(f"{SPECIAL[1]} {observation}")

    def pairs(self, rng, n) -> list[tuple[str, str]]:
        """n examples for the base model, (prompt, response), all of one role and of like length.

        Batches of one kind are padded little: the base model is trained in half the time. Every task
        is a new one, none of them held out: from 3,000 of them a model learnt a part by heart.
        """
        role = rng.choice(("env", "env", "one", "one", "two"))
        rungs = {"env": RUNGS, "one": RUNGS[:-2], "two": RUNGS[-2:]}[role]
        tasks = [draw(rng, rng.choice(rungs), (2, 3), "demo", held_out_keys()) for _ in range(n)]
        if role != "env":
            return [self.demonstrate(task, rng) for task in tasks]
        return [(self.env_prompt(task, rng.choice((None, rng.random()))), vary(task, rng).text)
                for task in tasks]


if __name__ == "__main__":
    sys.exit(main(World))
