"""Warm start: a model that can neither read nor write tasks imitates base tasks in both roles.

What of the paper this is: nothing; its 7B instruct model does the format by itself. A small one
writes no valid task and solves none, so every group is without signal and both updates stand still.

    python genenv.py warm-start --model M --base-tasks F --out DIR [--passes 8] [options of a run]
    python genenv.py --world tool_calls --model DIR --base-tasks F ...

How it is run: by that command. As the agent the model imitates the expected answers, as the
simulator the tasks that it could have written (worlds: warm_start_pairs). Both are rwr.rwr_step
with weights of 1, on one LoRA, by AdamW with a falling rate; of an episode it imitates the turns,
not the observations between them. Held-out tasks are never imitated.
In a world with a list of functions the simulator then writes for them, in rounds: it imitates what
passes every check, until ENOUGH of what it writes is valid. No attempt is made at these tasks and
the agent does not see them.
DIR becomes a model folder; warm_start.json in it has the rounds. Epoch 0 of a run measures what the
model can do. The same command given again goes on where it was killed, to the bit.

Where it differs on purpose: the adapter is merged into the base, in 16 bits also where training
used 4, so that "adapters off" is the initial policy of both players, and the reference, as always.
"""
import argparse
import json
import shutil
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from support.cli import Parser
from support.files import UserError, write_whole
from support import checkpoint
from support import options as run_options
from worlds import load_world, one_line_for_templates

FEWEST = 6          # pairs to imitate, in each role
STEPS, PASSES = 48, (2, 10)  # steps that teach the form; fewest and most passes made for them
LISTED = 150, 6     # with a list each pass has other values to read: steps, and the most passes


@dataclass(frozen=True)
class Settings:
    """Options of a warm start beside those of a run; the comment beside each is its help text."""
    out: str = ""          # folder that becomes the model
    passes: int = 0        # over what there is to imitate; 0: 2 to 10, by how many steps one has
    rounds: int = 2        # of writing for listed functions and imitating what is valid, at most
    texts: int = 128       # that are written in a round
    batch: int = 8         # responses per optimiser step
    lr: float = 1e-3       # AdamW on the LoRA weights, falling to a fifth in a straight line
    rank: int = 32         # LoRA rank
    save_every: int = 10   # steps between two saved states


# ---------------------------------------------------------------------------------------------
# the command


def main(argv) -> int:
    """Parse, warm-start, print the report. Returns 0; raises UserError."""
    s, o = parse(argv)
    settings = settings_of(s, o)  # with the files' hashes, before they are read
    world = load_world(o.world)(o)
    if not world.warm_start_pairs():
        raise UserError(f"the world {o.world} has no pairs to imitate (warm_start_pairs)")
    out, lock = claim(s.out, settings)
    with lock:
        make(world, s, o, settings, out)
    print(f"the model is in {out}: go on with --model {out} and the same options of the world")
    return 0


def make(world, s, o, settings: dict, out: Path):
    """Imitate, merge and write the model and its report into the claimed folder. Raises UserError."""
    import torch  # here and not above: --help and mistakes are answered at once
    from scripts.imitate import ADAPTER, learn, listed, merge, pairs_of_pass
    from support.loading import policy_options
    from policy import Policy
    torch.set_num_threads(run_options.threads_of(o))
    policy = Policy.load(o.model, (ADAPTER,), **{**policy_options(o), "rank": s.rank})
    with one_line_for_templates(o.model):
        pairs = pairs_of_pass(world, policy, o, 0)
    print(census(world, o, pairs), flush=True)
    s = replace(s, passes=s.passes or passes_for(len(pairs["agent"]) + len(pairs["env"]), s.batch,
                                                 bool(listed(o))))
    state = learn(world, policy, s, o, out / "warm_start" / "state.pt")
    merge(policy, o, out)
    rounds = [{k: v for k, v in report.items() if k != "pairs"} for report in state["rounds"]]
    write_whole(out / "warm_start.json", json.dumps(
        {"settings": settings, "nats_per_token": state["nats"], "rounds": rounds}, indent=1))
    shutil.rmtree(out / "warm_start")


def parse(argv):
    """argv -> (Settings, Options). What is no option of a warm start is one of a run."""
    p = Parser(prog="genenv.py warm-start", allow_abbrev=False, argument_default=argparse.SUPPRESS,
               epilog="besides, every option of a run: python genenv.py --help")
    run_options.add_fields(p, Settings)
    known, rest = p.parse_known_args(argv)
    if "--resume" in rest:
        raise UserError("--resume is for runs: a warm start goes on by the same command without it")
    s = Settings(**vars(known))
    for f in fields(Settings):
        value = getattr(s, f.name)
        if f.type is not str and not (value > 0 or f.name in ("rounds", "passes") and value == 0) \
                or value == float("inf"):
            raise UserError(f"--{f.name.replace('_', '-')} is {value}: must be positive")
    if not s.out:
        raise UserError("warm-start needs --out: the folder that becomes the model")
    if not any(word in argument for argument in rest for word in ("--world", "--preset", "--config")):
        rest = ["--world", "tool_calls", *rest]
    o = run_options.parse_options(rest)
    if not o.model:
        raise UserError("warm-start needs --model: what to start from")
    for name in ("agent_adapter", "env_adapter", "env_model"):
        if getattr(o, name):
            raise UserError(f"--{name.replace('_', '-')} does nothing in a warm start: leave it out")
    return s, o


def passes_for(pairs: int, batch: int, listed: bool) -> int:
    """Passes over so many pairs, of which few examples need more: SmolLM2-135M wrote a tenth of valid
    tasks after 12 steps in all, and half of them after 48 with other values in each pass. Over 64
    examples of BFCL, with a list, it wrote 24 % after three passes and 37 % after six."""
    steps = -(-pairs // batch)
    fewest, most = PASSES
    if listed:
        fewest = max(fewest, min(-(-LISTED[0] // steps), LISTED[1]))
    return min(max(fewest, -(-STEPS // steps)), most)


def settings_of(s, o) -> dict:
    """All options, but for those that may change when it goes on, and the hashes of the files of
    tasks and functions: as JSON."""
    free = ("out", "save_every", "threads")
    named = {k: v for k, v in {**asdict(o), **asdict(s)}.items() if k not in free}
    return {**named, "files": checkpoint.hashes(o)}


def claim(out, settings: dict):
    """(the folder, its lock), with settings.json in it: new, or of this very warm start. Raises
    UserError."""
    out = Path(out)
    path = out / "warm_start" / "settings.json"
    if not path.is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"--out {out} is not empty: choose another folder")
        path.parent.mkdir(parents=True)
        path.touch()
    lock = checkpoint.lock_folder(path.parent)
    if not (path.parent / "state.pt").is_file():  # refused or stopped before its first saved state
        write_whole(path, json.dumps(settings, indent=1))
    elif json.loads(path.read_text()) != settings:
        lock.close()
        raise UserError(f"{out} holds a warm start with other settings or files ({path}): give "
                        "them again to go on, or choose another --out")
    return out, lock


def census(world, o, pairs) -> str:
    """How much there is to imitate in a pass. Raises UserError where a role has too little."""
    for role, name in (("agent", "the agent"), ("env", "the simulator")):
        if len(pairs[role]) < FEWEST:
            raise UserError(
                f"{o.base_tasks or 'the base tasks'}: too few of {len(world.base_tasks())} base "
                f"tasks to imitate as {name} ({len(pairs[role])}; {pairs['long']} prompts or "
                "responses are longer than --max-prompt-tokens, --max-task-tokens, "
                "--max-response-tokens or --max-episode-tokens): give more tasks, or raise these")
    return (f"one pass: {len(pairs['agent'])} answers as the agent, {len(pairs['env'])} tasks as "
            f"the simulator; {pairs['alone']} tasks are imitated as the agent alone")
