"""ALFWorld: household tasks in text, cut into single steps (as GenEnv does) or played whole.

What of the paper this is: the ALFWorld column, 14.2 (Qwen2.5-7B) -> 54.5 (GenEnv 7B).

    python -m eval alfworld --data DIR --model DIR [--variant SPLIT] [--limit N]
    python -m eval alfworld --data DIR --model DIR --variant episodes  # needs the alfworld package
    python -m eval alfworld --data DIR --model DIR --adapter LORA --variant dialogue  # this too

What is unclear, and our choice. ALFWorld's official score is won games / 274, in episodes of at
most 50 commands; there is *no* official step score. The paper says that the tasks are "decomposed
into single steps" and no more, so the single-step figures here are ours and the paper's stand
beside them only for orientation. Our definition: one record per step of an expert
trajectory of the 140 valid_seen and 134 valid_unseen games; context = goal, first observation, the
expert's earlier commands with their observations, the commands that are admissible now; target =
the expert's command. The paper does not say which expert. Two are in the data (`--variant`):

    test          planner walkthrough, 1,600 steps: short and always won, but the planner knows
                  where things are, so from the observations its first "go to" is often a guess
    valid_seen, valid_unseen   the two halves of it
    handcoded     the rule-based expert of the official DAgger training, games that it won only:
                  it searches, looks around and closes doors, 9 steps for every 3 of the planner
    episodes      whole games, a prompt with all that was said for every command
    dialogue      whole valid_seen games as one chat, as an agent of the household world acts
    train         no evaluation: the training games as base tasks (`python -m eval.make_base`)

Scores per step: `exact` (the verdict) is GenEnv's published generic reward, see `genenv_reward`;
`admissible` only asks that the command read is one of those on offer; `acts` is the simulator's own
rule, which forgives nothing but white space at the ends; `verl_agent_exact` reads the response by
the other published reader, `projection`.

Data files: valid_{seen,unseen}.trajectories.jsonl.gz, train.goals_walkthroughs.jsonl.gz and, for
episodes, the game files in json_2.1.1.valid_seen+valid_unseen.tar.xz. Model text is compared as a
string and never evaluated.
"""
import re
import tarfile
import tempfile
from pathlib import Path
from types import SimpleNamespace

from support.files import UserError, first_line
from eval.common import Verdict, between, check_record, data_dir, mean_by, mean_score, read_rows
from worlds import play

NAME = "alfworld"
PAPER = {"Qwen2.5-7B": 14.2, "ReSearch": 18.7, "Search-R1": 16.1, "ToRL": 8.0, "GenEnv 7B": 54.5}
MAX_NEW_TOKENS = 512  # response length of the official configuration
REQUIRED = {"step-string": 1.0, "step-admissible": 1.0, "raw-text": 1.0, "episode": 1.0}
VARIANTS = {"handcoded": ({"split": "handcoded"}, {}), "valid_seen": ({"split": "valid_seen"}, {}),
            "valid_unseen": ({"split": "valid_unseen"}, {}), "episodes": ({}, {}),
            "dialogue": ({"split": "valid_seen"}, {})}
NOTE = "single steps are GenEnv's own cut; expert: planner walkthroughs (the paper names none)"

SPLITS = {"test": ("walkthrough", ("valid_seen", "valid_unseen")),
          "valid_seen": ("walkthrough", ("valid_seen",)),
          "valid_unseen": ("walkthrough", ("valid_unseen",)),
          "handcoded": ("handcoded", ("valid_seen", "valid_unseen"))}
MAX_STEPS = 50  # official length of an episode
TURN_TOKENS, DIALOGUE_TOKENS = 24, 3072  # of a command, and of a game that is one chat
NOTHING = "Nothing happens."
LOOKING = ("look", "inventory", "help", "examine")
# recorded "state_changed" is a change of the admissible commands, which these four leave alone
SILENT = LOOKING + ("clean", "heat", "cool", "use")
UNSURE = "?"  # stands in a replay before a command that may or may not have acted

SYSTEM = ("You act in a household through text commands, one command per turn. Names carry "
          "numbers, as in countertop 1. You can hold one object at a time.")
ASK = ("Give the next command, copied exactly from the list. Think briefly if you need to, then "
       "end with the command in \\boxed{}, for example \\boxed{go to desk 1}.")


# ---------------------------------------------------------------------------------------------
# records


def load(data, split: str = "test") -> list[dict]:
    """Single-step records of a split, see the module's docstring. Raises UserError on bad data.

    Keys: id ("GAME#expert-STEP"), category ("valid_seen/TASK TYPE"), game, goal, observation,
    history (list of (command, observation)), admissible, expert. Split "train" gives the steps of
    the training games that `base_task` can turn into a task, see `_train_steps`.
    """
    if split == "train":
        return _train_steps(data)
    if split not in SPLITS:
        raise UserError(f"alfworld has no split {split!r}: use one of {', '.join(SPLITS)}, train")
    expert, parts = SPLITS[split]
    return [record for part in parts for row in _trajectories(data, part)
            if row["policy"] == expert and row["won"] for record in _steps(row)]


def _trajectories(data, part: str) -> list[dict]:
    """Rows of one trajectory file, every step checked for what the records need."""
    path = data_dir(data, NAME) / f"{part}.trajectories.jsonl.gz"
    rows = read_rows(path, {"id": str, "split": str, "task_type": str, "goal": str, "policy": str,
                            "init_obs": str, "steps": list, "won": bool}, nonempty=True)
    for number, row in enumerate(rows, 1):
        where = f"{path}, record {number}"
        if not row["steps"]:
            raise UserError(f"{where}: 'steps' is empty")
        for k, step in enumerate(row["steps"]):
            check_record(step, f"{where}, step {k}", {"action": str, "obs": str})
            if not _strings(step.get("admissible")):
                raise UserError(f"{where}, step {k}: 'admissible' is not a list of texts")
    return rows


def _strings(value) -> bool:
    """Whether value is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _steps(row: dict) -> list[dict]:
    """One trajectory -> one record per step, each with everything the expert had seen by then."""
    records, history = [], []
    for k, step in enumerate(row["steps"]):
        records.append({
            "id": f"{row['id']}#{row['policy']}-{k:02d}", "game": row["id"], "step": k,
            "category": f"{row['split']}/{row['task_type']}", "goal": row["goal"],
            "observation": row["init_obs"], "history": list(history),
            "admissible": step["admissible"], "expert": step["action"]})
        history.append((step["action"], step["obs"]))
    return records


def prompt(record: dict) -> list[dict]:
    """Chat messages: the game so far as a transcript, the admissible commands, the question."""
    lines = [record["observation"]]
    for command, observation in record["history"]:
        lines += [f"\n> {command}", observation]
    options = "\n".join(record["admissible"])
    text = "\n".join(lines) + f"\n\nCommands you can give now:\n{options}\n\n{ASK}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def gold(record: dict) -> str:
    """The expert's command in the form the prompt asks for."""
    return f"\\boxed{{{record['expert']}}}"


# ---------------------------------------------------------------------------------------------
# readers and rules; every one of them takes time linear in the text


def read_boxed(text: str) -> str:
    r"""GenEnv's reader: the content of the last \boxed{...}, else the whole text less one $...$.

    The box ends at the first closing brace (so \boxed{\text{x}} breaks, as it does there). Written
    as a scan: the usual lazy pattern takes quadratic time on a megabyte of unclosed boxes.
    """
    boxes = list(between(text, "\\boxed{", "}"))
    if boxes:
        return boxes[-1].strip()
    text = text.strip()
    if len(text) >= 2 and text[0] == "$" == text[-1]:
        return text[1:-1].strip()
    return text


def normalise(text: str) -> str:
    """GenEnv's normalisation: space, backticks, quotes off the ends; single spaces; lower case."""
    text = text.strip().strip("`").strip('"').strip("'")
    return re.sub(r"\s+", " ", text).lower()


def genenv_reward(response: str, expert: str) -> float:
    """1.0 if the command read from the response equals the expert's, both normalised; else 0.0."""
    command = normalise(read_boxed(response))
    return float(bool(command) and command == normalise(expert))


def projection(response: str) -> tuple[str, int]:
    """verl-agent's reader (SkillRL's too): response -> (command, valid).

    The lower-cased text between the first <action> and the first </action>, or its last 30
    characters when a tag is missing. valid: both action tags there, <think> and </think> there in
    lower case, and no Chinese character.
    """
    lowered = response.lower()
    start, end = lowered.find("<action>"), lowered.find("</action>")
    if start < 0 or end < 0:
        return lowered[-30:], 0
    # a closing tag in front of the opening one leaves an empty slice: an empty, yet valid, command
    command = lowered[start + len("<action>"):end].strip()
    valid = "<think>" in response and "</think>" in response \
        and not re.search("[\u4e00-\u9fff]", response)
    return command, int(valid)


def acts(command: str, admissible) -> bool:
    """The simulator's rule: after stripping the ends the string *is* an admissible command."""
    return command.strip() in admissible


def score(record: dict, response: str) -> Verdict:
    """Exact match with the expert's command by GenEnv's rule; the softer scores are in extra.

    extra: exact, admissible, acts, verl_agent_exact (0 or 1 each) and the command read.
    """
    command = normalise(read_boxed(response))
    exact = genenv_reward(response, record["expert"])
    offered = command in {normalise(option) for option in record["admissible"]}
    action, _ = projection(response)
    extra = {"exact": exact, "admissible": float(offered),
             "acts": float(acts(read_boxed(response), record["admissible"])),
             "verl_agent_exact": float(action == record["expert"]), "command": command[:200]}
    if exact:
        reason = "the expert's command"
    elif not command:
        reason = "no command in the response"
    else:
        reason = (f"{command[:80]!r} is " + ("admissible" if offered else "no admissible command")
                  + f", the expert's command is {record['expert']!r}")
    return Verdict(bool(exact), exact, reason, extra)


def aggregate(records: list, verdicts: list) -> dict:
    """Exact score in percent; by split and task type; the softer scores as means under "extra"."""
    categories = mean_by(records, verdicts, lambda r: r["category"].split("/")[0])
    categories |= mean_by(records, verdicts, lambda r: r["category"].split("/")[-1])
    soft = {key: 100 * sum(v.extra[key] for v in verdicts) / max(1, len(verdicts))
            for key in ("admissible", "acts", "verl_agent_exact")}
    return {**mean_score(records, verdicts), "categories": categories, "extra": soft}


# ---------------------------------------------------------------------------------------------
# base tasks from the training games


def _train_steps(data) -> list[dict]:
    """Training steps whose answer is decided by what the task says.

    The training file has goals and walkthroughs but no observations, so "what comes next?" alone
    would be a guess. The task therefore lists the commands that are still to come, sorted, and a
    step is kept only if every order of them that can be executed starts with the same command.
    Games whose whole walkthrough is that of an evaluation game are left out (valid_seen holds new
    trials of training tasks, so 141 of the 3,553 are).
    """
    path = data_dir(data, NAME) / "train.goals_walkthroughs.jsonl.gz"
    rows = read_rows(path, {"id": str, "task_type": str, "goal": str, "walkthrough": list},
                     nonempty=True)
    evaluated = {tuple(step["action"] for step in row["steps"])
                 for part in ("valid_seen", "valid_unseen") for row in _trajectories(data, part)
                 if row["policy"] == "walkthrough"}
    records = []
    for number, row in enumerate(rows, 1):
        plan = row["walkthrough"]
        if not _strings(plan):
            raise UserError(f"{path}, record {number}: 'walkthrough' is not a list of texts")
        if tuple(plan) in evaluated:
            continue
        records += [{"id": f"{row['id']}#plan-{k:02d}", "category": f"train/{row['task_type']}",
                     "game": row["id"], "goal": row["goal"], "done": plan[:k], "left": plan[k:],
                     "expert": plan[k]}
                    for k in range(len(plan) - 1)
                    if _first_commands(plan[:k], plan[k:]) == {plan[k]}]
    return records


def _first_commands(done: list, left: list) -> set:
    """First commands of all orders of `left` that can be executed after `done`.

    >>> sorted(_first_commands([], ["go to desk 1", "take pen 1 from desk 1"]))
    ['go to desk 1']
    """
    state = (None, None)  # where the agent is, what it holds
    for command in done:
        state = _after(state, command, ()) or state
    return {command for i, command in enumerate(left)
            if _completes(_after(state, command, left), left[:i] + left[i + 1:])}


def _completes(state, left: list) -> bool:
    """Whether the commands left can be executed in some order from a state; None is no state."""
    return state is not None and (not left or any(
        _completes(_after(state, command, left), left[:i] + left[i + 1:])
        for i, command in enumerate(left)))


def _after(state, command: str, left):
    """(place, held object) after a command, or None if it cannot be given. left: open orders."""
    place, held = state
    verb, _, rest = command.partition(" ")
    if verb == "go":
        target = rest.removeprefix("to ")
        return None if target == place else (target, held)
    if verb in ("open", "close", "use"):
        # a lamp may be used wherever it stands: its place is not in the plan
        return state if verb == "use" or rest == place else None
    thing, _, where = rest.partition({"take": " from ", "move": " to "}.get(verb, " with "))
    if where != place or (f"open {where}" in left and verb in ("take", "move")):
        return None  # not there, or still closed
    if verb == "take":
        return (place, thing) if held is None else None
    if held != thing:
        return None
    return (place, None) if verb == "move" else state


def base_task(record: dict) -> dict:
    """A training record as a base task: the goal, the commands so far, those still to come."""
    done = "\n".join(record["done"]) or "(none)"
    left = "\n".join(sorted(record["left"]))
    task = (f"You act in a household through text commands. Goal: {record['goal']}.\n"
            f"Commands given so far:\n{done}\n"
            f"These commands, in some order, finish the task:\n{left}\n"
            "Which of them comes next? Answer with the command alone.")
    return {"task": task, "reference": record["expert"]}


# ---------------------------------------------------------------------------------------------
# whole episodes; the simulator is optional


def episodes(data, respond, records: list, max_steps: int = MAX_STEPS):
    """Play the games of some records with the official simulator, side by side.

    respond: list of chat prompts -> list of response texts (None = cannot be answered, the episode
    ends lost). Yields one {"id", "category", "won", "steps", "commands", "reason"} per game. The
    command given is GenEnv's reading of the response, normalised. Raises UserError when the package
    `alfworld` or the game files are absent.
    """
    start = _simulator()
    with tempfile.TemporaryDirectory() as folder:
        paths = unpack_games(data, [r["game"] for r in records], folder)
        live = [_Episode(r, start(paths[r["game"]])) for r in records]
        while live:
            replies = respond([prompt(e.record()) for e in live])
            for episode, reply in zip(live, replies):
                episode.play(reply, max_steps)
            yield from (e.result() for e in live if e.reason)
            live = [e for e in live if not e.reason]


def dialogues(data, policy, adapter, records: list, tokens: int = DIALOGUE_TOKENS,
              max_steps: int = MAX_STEPS) -> list[dict]:
    """Play the games of some records, each as one chat, greedily: how an agent that was trained in
    the household world (worlds/household.py) acts in ALFWorld's own games.

    Its rules are the household's, with `use` for a lamp; a command is a turn and what the game says
    is the next one; which commands are admissible is not told, nor that a sink is a sinkbasin.
    policy: a chat model. Returns rows as `episodes` yields them, lost ones also where a turn comes
    to TURN_TOKENS tokens without its end, or a game to `tokens`. Raises UserError when the package
    `alfworld` or the game files are absent.
    """
    start, running = _simulator(), {}
    with tempfile.TemporaryDirectory() as folder:
        paths = unpack_games(data, [r["game"] for r in records], folder)

        def begin(record):
            running[record["id"]] = _Episode(record, start(paths[record["game"]]))
            return running[record["id"]]

        def respond(record, episode, text):
            episode.play(as_alfworld(text), max_steps)
            return None if episode.reason else episode.state["feedback"].strip()
        world = SimpleNamespace(
            start=begin, respond=respond, agent_prompt=dialogue_prompt,
            OPTIONS={"max_turns": (max_steps + 1,), "max_episode_tokens": (tokens,)})
        rollouts, _ = play(world, SimpleNamespace(max_response_tokens=TURN_TOKENS), policy, adapter,
                           records, 1, 0.0, None, max_rows=len(records))
    for record, rollout in zip(records, rollouts):
        episode = running[record["id"]]
        episode.reason = episode.reason or f"lost: {rollout.limit}"
    return [running[record["id"]].result() for record in records]


def dialogue_prompt(record: dict) -> list[dict]:
    """Chat messages at the start of a game: the household's rules, the room, the goal."""
    from worlds.household import RULES
    return [{"role": "system", "content": f"{RULES} A lamp is turned on by use "
             "LAMP. Names carry numbers, as in countertop 1."},
            {"role": "user", "content": record["observation"].replace("\n\n", " ")}]


def as_alfworld(command: str) -> str:
    """A household command as these games spell it: `put O in R` is their `move O to R`; what the
    household does not mind in a command, articles and marks around it, these games do."""
    from worlds.household import ARTICLES
    words = normalise(command.strip().split("\n")[-1].strip("> .")).split()
    bare = " ".join(word for word in words if word not in ARTICLES)
    return re.sub(r"^put (.+?) (?:in/on|in|on) (.+)$", r"move \1 to \2", bare)


class _Episode:
    """One running game: the simulator, its last state and what was said so far."""

    def __init__(self, record, env):
        self.env, self.first, self.history, self.reason = env, record, [], ""
        self.state = env.reset()

    def record(self) -> dict:
        """The running game in the form of a single-step record."""
        return {**self.first, "history": self.history,
                "admissible": list(self.state["admissible_commands"])}

    def play(self, reply, max_steps: int):
        """Give one command; sets `reason` once the episode is over."""
        if reply is None:
            self.reason = "lost: prompt too long"
            return
        command = normalise(read_boxed(reply))
        self.state, _, _ = self.env.step(command)
        self.history = self.history + [(command, self.state["feedback"])]
        if self.state["won"]:
            self.reason = "won"
        elif len(self.history) >= max_steps:
            self.reason = f"lost: not won within {max_steps} commands"

    def result(self) -> dict:
        """The finished episode as one row."""
        self.env.close()
        return {"id": self.first["game"], "category": self.first["category"],
                "won": self.reason == "won", "steps": len(self.history), "reason": self.reason,
                "commands": [command for command, _ in self.history]}


def _simulator():
    """path of a game file -> a running environment. UserError when the package is absent."""
    try:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    except ImportError as error:
        raise UserError("whole ALFWorld episodes need the optional package: pip install alfworld "
                        f"({error})") from None
    infos = textworld.EnvInfos(won=True, admissible_commands=True, feedback=True)
    return lambda path: textworld.start(str(path), infos, wrappers=[AlfredDemangler()])


def unpack_games(data, games: list, folder) -> dict:
    """Write the game files of the named games below `folder`; returns {game: path}.

    Members are read by name and written to numbered files, so no path of the archive is trusted.
    """
    archive = data_dir(data, NAME) / "json_2.1.1.valid_seen+valid_unseen.tar.xz"
    if not archive.is_file():
        raise UserError(f"{archive}: no such file (the game files; see eval/README.md)")
    wanted = {f"json_2.1.1/{game}/game.tw-pddl": game for game in games}
    paths = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                game = wanted.get(member.name.removeprefix("./"))
                if game is not None:
                    paths[game] = Path(folder) / f"{len(paths)}.tw-pddl"
                    paths[game].write_bytes(tar.extractfile(member).read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{archive}: cannot be read ({first_line(error)})") from None
    missing = [game for game in games if game not in paths]
    if missing:
        raise UserError(f"{archive}: no game file for {missing[0]} ({len(missing)} missing)")
    return paths


# ---------------------------------------------------------------------------------------------
# recorded verdicts


def verify(data, rows):
    """Re-score recorded verdicts; yields (kind, agrees, detail), agrees None = undecidable here.

    Steps are looked up in the trajectories by game and prefix; episodes are replayed on them.
    """
    worlds = {}
    for part in ("valid_seen", "valid_unseen"):
        for row in _trajectories(data, part):
            worlds.setdefault(row["id"], _World(row["task_type"])).add(row)
    for number, row in enumerate(rows, 1):
        where, kind = f"verdict {number} ({row.get('id')})", row.get("kind")
        check_record(row, where, {"game": str, "official_verdict": dict,
                                  "response": list if kind == "episode" else str})
        verdict, world = row["official_verdict"], worlds.get(row["game"])
        if kind not in REQUIRED or world is None:
            raise UserError(f"{where}: unknown kind {kind!r} or game {row['game']!r}")
        ours = _replay(world, row["response"]) if kind == "episode" \
            else _step_verdict(world, row)
        if ours is None:
            yield kind, None, f"{row.get('id')}: not decidable from the trajectories"
            continue
        wrong = {k: (verdict[k], v) for k, v in ours.items() if k in verdict and verdict[k] != v}
        yield kind, not wrong, f"{row.get('id')}: " + "; ".join(
            f"{k} is {theirs!r}, ours {mine!r}" for k, (theirs, mine) in wrong.items())


class _World:
    """The part of one game that its recorded trajectories show.

    states: {canonical commands: step}; wins: canonical commands after which the game is won;
    places: where one can go.
    """

    def __init__(self, task_type):
        self.task_type, self.places, self.states, self.wins = task_type, [], {}, set()

    def add(self, row):
        """Enter every state of a trajectory."""
        self.places = [c[len("go to "):] for c in row["steps"][0]["admissible"]
                       if c.startswith("go to ")]
        key = ()
        for step in row["steps"]:
            self.states.setdefault(key, step)
            key = _canonical(key, step["action"])
        if row["won"]:
            self.wins.add(key)


def _canonical(key: tuple, command: str) -> tuple:
    """The command appended, less what leaves no trace: looking, and a walk followed by a walk."""
    if command.split(" ")[0] in LOOKING:
        return key
    if command.startswith("go to ") and key and key[-1].startswith("go to "):
        key = key[:-1]
    return key + (command,)


def _step_verdict(world: _World, row: dict):
    """What the rules say of a command or a raw text at a recorded state; None: unknown state."""
    key = ()
    for command in row.get("prefix") or []:
        key = _canonical(key, command)
    step, response = world.states.get(key), row["response"]
    if step is None:
        return None
    expert = (row.get("detail") or {}).get("expert_action", step["action"])
    if row["kind"] == "raw-text":
        action, valid = projection(response)
        reward = genenv_reward(response, expert)
        return {"genenv_reward_vs_expert": reward, "genenv_reward_vs_dict": reward,
                "projection_action": action, "projection_valid": valid,
                "projected_in_admissible": action in step["admissible"]} | {
                    f"projected_{k}": v for k, v in _outcome(world, key, step, action).items()
                    if k in ("feedback", "won")}
    command = response.strip()
    changed = acts(response, step["admissible"]) and command.split(" ")[0] not in SILENT
    return {"in_admissible": response in step["admissible"], "state_changed": changed,
            "nothing_happens": not acts(response, step["admissible"])
            } | _outcome(world, key, step, response)


def _outcome(world: _World, key: tuple, step: dict, response: str) -> dict:
    """Feedback, reward, done, won where the trajectories tell; fewer keys where they do not."""
    command = response.strip()
    if not acts(response, step["admissible"]):
        return {"feedback": NOTHING, "reward": 0.0, "done": False, "won": False}
    after, result = _canonical(key, command), {}
    won = after in world.wins
    if won or after in world.states or after == key:
        result = {"reward": float(won), "done": won, "won": won}
    if command == step["action"]:
        result["feedback"] = step["obs"]
    return result


def _replay(world: _World, commands: list):
    """An episode on the recorded states: its verdicts, or None where these states do not suffice.

    Off the recorded states a command that cannot be ruled out is taken to act: what is not won
    even then is not won.
    """
    key, won_at, sure = (), None, True
    for number, command in enumerate(map(str.strip, commands), 1):
        effect = command in LOOKING[:3] or won_at is None and _effective(world, key, command)
        if effect is None:
            key += (UNSURE,)
        sure = sure and (won_at is None or command in LOOKING[:3])
        key = key if effect is False else _canonical(key, command)
        if won_at is None and key in world.wins:
            won_at = number
        elif won_at is None and key not in world.states and _may_have_won(world.task_type, key):
            return None
    verdicts = {"won_at_step": won_at,
                "success_within_50": won_at is not None and won_at <= MAX_STEPS}
    # what happens to a won game afterwards is only known while nobody touches anything
    return verdicts | ({"won_at_end": won_at is not None} if sure else {})


def _effective(world: _World, key: tuple, command: str):
    """Whether a command acts after `key`: True, False, or None when the data do not tell."""
    if key in world.states:
        return command in world.states[key]["admissible"]
    # off the recorded states: only what the place and the hands rule out for certain
    place = next((c[len("go to "):] for c in reversed(key) if c.startswith("go to ")), None)
    if command.startswith("go to "):
        target = command[len("go to "):]
        return target in world.places and target != place
    match = re.fullmatch(r"(take|move|heat|cool|clean|slice) (\w+ \d+) (?:from|to|with) (\w+ \d+)"
                         r"|(?:open|close|use|examine) (\w+ \d+)", command)
    if not match:
        return False
    verb, thing, where, _ = match.groups()
    if verb is None or verb == "slice":
        return None
    taken = [c.split(" from ")[0][len("take "):] for c in key if c.startswith("take ")]
    moved = sum(c.startswith("move ") for c in key)
    if where != place or (verb != "take" and thing not in taken):
        return False
    full = verb == "take" and UNSURE not in key and len(taken) > moved
    return False if full else None


def _may_have_won(task_type: str, key: tuple) -> bool:
    """Whether commands that acted can have met the goal; False is certain, True is not."""
    count = {verb: sum(c.split(" ")[0] == verb for c in key)
             for verb in ("take", "move", "use", "clean", "heat", "cool")}
    if task_type == "look_at_obj_in_light":
        return bool(count["take"] and count["use"])
    treatment = re.search("clean|heat|cool", task_type)
    enough = count["move"] >= (2 if task_type.startswith("pick_two") else 1)
    return enough and (treatment is None or count[treatment.group()] > 0)
