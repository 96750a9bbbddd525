"""Score ALFWorld: household tasks in text, cut into single steps as in the paper, or played whole.

Paper: the ALFWorld column, 14.2 (Qwen2.5-7B) -> 54.5 (GenEnv 7B).

Usage:

    python -m eval alfworld --data DIR --model DIR [--variant handcoded] [--limit N]
    python -m eval alfworld --data DIR --model DIR --variant episodes  # needs the alfworld package

Deviations: ALFWorld's official score is won games / 274, in episodes of at most 50 commands; there
is *no* official step score. The paper says only that the tasks are "decomposed into single steps",
so the single-step figures here are our own, and the paper's are shown only for orientation. We
make one record of each step of an expert's trajectory in the 140 valid_seen and 134 valid_unseen
games. Its context is the goal, the first observation, the expert's earlier commands with their
observations, and the admissible commands; its target is the expert's command. The paper does not
name the expert. The data has two experts, and `--variant` chooses:

    (default)     planner walkthroughs, 1,600 steps: short and always won. But the planner knows
                  where things are; for an agent that does not, the first "go to" is often a guess
    handcoded     the rule-based expert of the official DAgger training, only games that it won:
                  it searches, looks around and closes doors, in three times as many steps
    episodes      whole games, without an expert; every prompt holds the whole transcript so far

Scores per step: `exact` (the verdict) is the generic reward of the paper's repository, see
`genenv_reward`. `admissible` asks only that the command is one of those on offer. `acts` is the
simulator's rule, which forgives only white space at the ends. `verl_agent_exact` reads the response
as verl-agent does, see `projection`.
"""
import re

from errors import UserError, require_file
from eval.common import Verdict, read_rows
from worlds.alfworld_text import normalise, prompt, read_boxed

NAME = "alfworld"
PAPER = {"Qwen2.5-7B": 14.2, "GenEnv 7B": 54.5}
MAX_NEW_TOKENS = 512  # response length of the official configuration
VARIANTS = {"handcoded": ({"expert": "handcoded"}, {}), "episodes": ({}, {})}
NOTE = "single steps are GenEnv's own cut; expert: planner walkthroughs (the paper names none)"

PARTS = ("valid_seen", "valid_unseen")
MAX_STEPS = 50  # official length of an episode

# ---------------------------------------------------------------------------------------------
# records


def load(folder, expert: str = "walkthrough") -> list[dict]:
    """Return the single-step records of an expert; the module's docstring defines them.

    Keys: id ("GAME#expert-STEP"), category ("valid_seen/TASK TYPE"), game, goal, observation,
    history (list of (command, observation)), admissible, expert.
    """
    records = []
    for part in PARTS:
        for row in read_rows(folder / f"{part}.trajectories.jsonl"):
            if row["policy"] == expert and row["won"]:
                records += _steps(row)
    return records


def _steps(row: dict) -> list[dict]:
    """Return one record per step of a trajectory, each with all that the expert had seen by
    then."""
    records, history = [], []
    game, category = row["id"], f"{row['split']}/{row['task_type']}"
    for k, step in enumerate(row["steps"]):
        records.append({
            "id": f"{game}#{row['policy']}-{k:02d}", "game": game, "step": k, "category": category,
            "goal": row["goal"], "observation": row["init_obs"], "history": list(history),
            "admissible": step["admissible"], "expert": step["action"]})
        history.append((step["action"], step["obs"]))
    return records


# ---------------------------------------------------------------------------------------------
# readers and rules; each takes time linear in the text


def genenv_reward(response: str, expert: str) -> float:
    """Return 1.0 if the command of the response equals the expert's, both normalised; else 0.0."""
    command = normalise(read_boxed(response))
    return float(bool(command) and command == normalise(expert))


def projection(response: str) -> tuple[str, int]:
    """Read a response as verl-agent (and SkillRL) do; return (command, valid).

    command: the lower-cased text between the first <action> and the first </action>, or the last 30
    characters if a tag is missing. valid: 1 if both action tags are there, <think> and </think> are
    there in lower case, and no character is Chinese; else 0.
    """
    lowered = response.lower()
    start, end = lowered.find("<action>"), lowered.find("</action>")
    if start < 0 or end < 0:
        return lowered[-30:], 0
    # If the closing tag comes first, the slice is empty: an empty command, yet a valid one.
    command = lowered[start + len("<action>"):end].strip()
    valid = "<think>" in response and "</think>" in response \
        and not re.search("[\u4e00-\u9fff]", response)
    return command, int(valid)


def acts(command: str, admissible) -> bool:
    """Apply the simulator's rule: return whether the stripped string *is* an admissible command."""
    return command.strip() in admissible


def score(record: dict, response: str) -> Verdict:
    """Return the verdict of genenv_reward; `extra` holds all scores of the step.

    They are exact, admissible, acts and verl_agent_exact (0 or 1 each).
    """
    expert, admissible = record["expert"], record["admissible"]
    boxed = read_boxed(response)
    command, exact = normalise(boxed), genenv_reward(response, expert)
    offered = command in {normalise(option) for option in admissible}
    projected, _ = projection(response)
    extra = {"exact": exact, "admissible": float(offered), "acts": float(acts(boxed, admissible)),
             "verl_agent_exact": float(projected == expert)}
    return Verdict(
        bool(exact), exact, f"{command[:80]!r}, the expert's command is {expert!r}", extra
    )


# ---------------------------------------------------------------------------------------------
# whole episodes; the simulator is an optional package


def episodes(folder, respond, records: list):
    """Play the games of some records with the official simulator, side by side.

    respond: list of chat prompts -> list of response texts (None: no answer, and the episode is
    lost). Yield one {"id", "commands", "problem": "" if won} per game. The command played is read
    from the response as in genenv_reward. Raise UserError if the package `alfworld` or the game
    files are missing.
    """
    start = _simulator()
    live = [_Episode(r, start(game_file(folder, r["game"]))) for r in records]
    while live:
        replies = respond([prompt(episode.record) for episode in live])
        for episode, reply in zip(live, replies):
            episode.play(reply)
        yield from (e.result() for e in live if e.problem is not None)
        live = [e for e in live if e.problem is None]


class _Episode:
    """Hold one running game; `record` holds its transcript as a single-step record."""

    def __init__(self, record, env):
        self.env, self.problem = env, None
        self.record = {**record, "history": [], "admissible": env.reset()["admissible_commands"]}

    def play(self, reply):
        """Play one command. Set `problem` once the episode is over: "" if it is won."""
        if reply is None:
            self.problem = "lost: prompt too long"
            return
        command = normalise(read_boxed(reply))
        state, _, _ = self.env.step(command)
        self.record["history"].append((command, state["feedback"]))
        self.record["admissible"] = state["admissible_commands"]
        if state["won"]:
            self.problem = ""
        elif len(self.record["history"]) >= MAX_STEPS:
            self.problem = f"lost: not won within {MAX_STEPS} commands"

    def result(self) -> dict:
        """Return the finished episode as a row."""
        self.env.close()
        return {"id": self.record["id"], "problem": self.problem,
                "commands": [command for command, _ in self.record["history"]]}


def _simulator():
    """Return a function: path of a game file -> running environment. Raise UserError if the
    package is missing."""
    try:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    except ImportError as error:
        raise UserError("whole ALFWorld episodes need the optional package: pip install alfworld "
                        f"({error})") from None
    infos = textworld.EnvInfos(won=True, admissible_commands=True, feedback=True)
    return lambda path: textworld.start(path, infos, wrappers=[AlfredDemangler()])


def game_file(folder, game: str) -> str:
    """Return the path of a game's file, where `alfworld-download` unpacks it."""
    path = folder / "json_2.1.1" / game / "game.tw-pddl"
    require_file(path, "; alfworld-download fetches it (eval/README.md)")
    return str(path)
