"""Warm start: a model that can neither read nor write tasks imitates base tasks in both roles.

Paper: nothing, its 7B instruct model does the format by itself. A small one writes no valid task and
solves none, so every group is without signal and both updates stand still.

Usage:
    python genenv.py warm-start --model M --base-tasks F --out DIR [options of a run]
    python genenv.py --world tool_calls --model DIR --base-tasks F ...

As the agent the model imitates the expected answers, as the simulator the tasks that it could have
written (`warm_start_pairs` of the world): passes of rwr.rwr_step with weights of 1 over one LoRA, by
AdamW with a falling rate. Then, in rounds, the simulator writes, and imitates what passes every check,
until ENOUGH of it is valid. Held-out tasks are never imitated. DIR becomes a model folder;
warm_start.json in it says how it went. The same command goes on after the last complete pass.

Deviations: the adapter is merged into the base, so that "adapters off" is the initial policy of both
players, and the reference, as always. A start that is too sharp is as bad as none: where attempts at a
task are all alike there is no gradient. So stop at the pass from which epoch 0 has most mixed groups.
"""
import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

from support import checkpoint
from support import options as run_options
from support.files import UserError, write_whole
from support.options import Parser
from worlds import held_out_keys, load_world, written_tasks

ADAPTER = "warm"
BATCH = 8           # responses in an optimiser step
RANK = 32           # of the LoRA that is merged
WARM_UP = 8         # steps over which the rate rises: AdamW's moments know nothing yet
LAST_RATE = 0.2     # share of --lr at the end of the passes, and in the rounds
TEXTS = 128         # that the simulator writes before a round
ENOUGH = 0.6        # share of valid texts at which the rounds end
FEWEST = 6          # pairs to imitate, in each role
STEPS = 48, 150     # that teach the form; with a list of tools each pass has other values to read


@dataclass(frozen=True)
class Settings:
    """Options of a warm start besides those of a run; the comment beside each is its help text."""
    # warm start
    out: str = ""          # folder that becomes the model
    passes: int = 0        # over what there is to imitate; 0: 2 to 10, as many as teach the form
    rounds: int = 2        # of writing tasks and imitating the valid ones, at most
    lr: float = 1e-3       # AdamW on the LoRA weights, falling in a straight line


def main(argv) -> int:
    """The command `genenv.py warm-start`. Raises UserError, returns 0."""
    s, o = parse(argv)
    world = load_world(o.world)(o)
    out, lock = claim(s, o)
    with lock:
        make(world, s, o, out)
    print(f"the model is in {out}: go on with --model {out} and the same options of the world")
    return 0


def parse(argv):
    """argv -> (Settings, Options): what is not an option of a warm start is one of a run."""
    p = Parser(prog="genenv.py warm-start", allow_abbrev=False, argument_default=argparse.SUPPRESS,
               epilog="and every option of a run: python genenv.py --help")
    run_options.add_fields(p, Settings)
    known, rest = p.parse_known_args(argv)
    s = Settings(**vars(known))
    if not s.out:
        raise UserError("warm-start needs --out: the folder that becomes the model")
    if min(s.passes, s.rounds) < 0 or not 0 < s.lr < 1:
        raise UserError("--passes and --rounds must not be negative, --lr must lie between 0 and 1")
    if not any(word.startswith(("--world", "--preset")) for word in rest):
        rest = ["--world", "tool_calls", *rest]
    o = run_options.parse_options(rest)
    if not o.model or o.env_model:
        raise UserError("warm-start needs --model, what to start from, and takes no --env-model")
    return s, o


def claim(s, o):
    """(the folder, its lock): a new one, or that of this very warm start. Raises UserError."""
    out, kept = Path(s.out), {"threads", "out", "resume"}
    settings = {k: v for k, v in {**asdict(s), **asdict(o)}.items() if k not in kept}
    settings["files"] = checkpoint.hashes(o)
    path = out / "warm_start" / "settings.json"
    if out.exists() and not path.is_file() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty: choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = checkpoint.lock_folder(path.parent)
    if not (path.parent / "state.pt").is_file():
        write_whole(path, json.dumps(settings, indent=1))
    elif json.loads(path.read_text()) != settings:
        lock.close()
        raise UserError(f"{out} holds a warm start with other settings or files ({path}): give "
                        "them again to go on, or choose another --out")
    return out, lock


def make(world, s, o, out: Path):
    """Imitate, merge, write the model and its report into the claimed folder. Raises UserError."""
    import torch  # here and not above: mistakes are answered at once
    from policy import Policy
    from support.loading import policy_options
    torch.set_num_threads(run_options.threads_of(o))
    print("loading torch and the model ...", flush=True)
    policy = Policy.load(o.model, (ADAPTER,), **{**policy_options(o), "rank": RANK})
    pairs = pairs_of_pass(world, policy, 0)
    print(census(world, pairs), flush=True)
    steps = -(-(len(pairs["agent"]) + len(pairs["env"])) // BATCH)
    fewest = -(-STEPS[bool(getattr(world, "tools", ()))] // steps)
    s = replace(s, passes=s.passes or min(max(2, fewest), 10))
    state = learn(world, policy, s, out / "warm_start" / "state.pt")
    merge(policy, o, out)
    write_whole(out / "warm_start.json", json.dumps(
        {"settings": json.loads((out / "warm_start" / "settings.json").read_text()),
         "nats_per_token": state["nats"],
         "rounds": [{k: v for k, v in r.items() if k != "pairs"} for r in state["rounds"]]}, indent=1))
    shutil.rmtree(out / "warm_start")


# ---------------------------------------------------------------------------------------------
# what is imitated


def pairs_of_pass(world, policy, number: int) -> dict:
    """{"agent", "env": [Rollout], "alone", "long"} of a pass: what is imitated in each role.

    alone: tasks imitated as the agent only; long: pairs left out, as a run would cut them off.
    """
    given = world.warm_start_pairs(number)
    every = {role: [as_rollout(policy, *pair) for pair in given[role]] for role in ("agent", "env")}
    kept = {role: [r for r in pairs if within_limits(world, role, r)] for role, pairs in every.items()}
    return {**kept, "alone": given["alone"],
            "long": sum(len(every[role]) - len(kept[role]) for role in every)}


def as_rollout(policy, prompt, response):
    """A prompt and a response as if the policy had drawn it; of an episode, a list of turns and
    observations in turn, the turns alone count as drawn."""
    from policy import Rollout
    ids, drawn = [], []
    for i, text in enumerate([response] if isinstance(response, str) else response):
        part = policy.encode_observation(text) if i % 2 else policy.encode(text) + policy.end_of_turn
        ids, drawn = ids + part, drawn + [i % 2 == 0] * len(part)
    return Rollout(0, policy.encode(prompt), ids, drawn=drawn)


def within_limits(world, role, r) -> bool:
    """Whether a run would let the simulator, or the agent, say this much."""
    o = world.o
    if len(r.prompt) > o.max_prompt_tokens:
        return False
    if role == "env":
        return len(r.response) <= o.max_task_tokens
    turns = [len(list(run)) for mine, run in groupby(r.drawn) if mine]
    whole = len(r.response) if all(r.drawn) else world.max_episode_tokens
    return max(turns) <= o.max_response_tokens and len(r.response) <= whole


def census(world, pairs) -> str:
    """How much there is to imitate. Raises UserError where a role has too little."""
    for role, name in (("agent", "the agent"), ("env", "the simulator")):
        if len(pairs[role]) < FEWEST:
            raise UserError(
                f"{world.o.base_tasks or 'the base tasks'}: {len(pairs[role])} pairs to imitate as {name}, "
                f"{FEWEST} are needed ({pairs['long']} are longer than --max-prompt-tokens, "
                "--max-task-tokens or --max-response-tokens): give more tasks, or raise these")
    return (f"one pass: {len(pairs['agent'])} answers as the agent, {len(pairs['env'])} tasks as "
            f"the simulator; {pairs['alone']} tasks are imitated as the agent alone")


# ---------------------------------------------------------------------------------------------
# how


def learn(world, policy, s, path: Path) -> dict:
    """All passes and rounds, from the saved state on if there is one. Returns the state: "nats" per
    token of each pass and round, "rounds": what was written before each."""
    import torch
    from policy import Rollout
    optimizer, seed = policy.optimizer(ADAPTER, s.lr), 1000 * world.o.seed
    state = load_state(path, policy, optimizer) if path.is_file() else {"nats": [], "rounds": []}
    while True:
        n, own = len(state["nats"]), []
        if n >= s.passes:
            report = write(world, policy, n)
            state["rounds"].append(report)
            print(f"round {n - s.passes + 1}: {report['valid']:.2f} of the texts are valid tasks; refused: "
                  f"{report['invalid'] or 'none'}", flush=True)
            if report["valid"] >= ENOUGH or n == s.passes + s.rounds:
                return state
            own = [Rollout(0, *pair) for r in state["rounds"] for pair in r["pairs"]]
        given = pairs_of_pass(world, policy, n)
        pairs = [*given["agent"], *given["env"], *own]  # the examples keep the agent's role as well
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed + n)).tolist()
        state["nats"].append(imitate(policy, optimizer, [pairs[i] for i in order], s, world.o, n))
        print(f"pass {n + 1}: {state['nats'][-1]:.3f} nats per token", flush=True)
        save_state(path, policy, optimizer, state)


def imitate(policy, optimizer, pairs, s, o, n: int) -> float:
    """Pass n over the pairs; returns the mean negative log-likelihood, in nats per token."""
    import torch
    from tqdm import tqdm
    from rwr import rwr_step
    batches, losses = [pairs[k:k + BATCH] for k in range(0, len(pairs), BATCH)], []
    for step, batch in enumerate(tqdm(batches, desc=f"pass {n + 1}", disable=not sys.stderr.isatty())):
        done = n + step / len(batches)
        rate = max(LAST_RATE, 1 - done / s.passes) * min((n * len(batches) + step + 1) / WARM_UP, 1)
        for group in optimizer.param_groups:
            group["lr"] = s.lr * rate
        with policy.use(ADAPTER):
            losses.append(rwr_step(policy, ADAPTER, optimizer, batch, torch.ones(len(batch)), o)[0])
    return sum(losses) / len(losses)


def write(world, policy, n: int) -> dict:
    """What the simulator writes now, for base tasks drawn at random: {"valid": share of TEXTS,
    "invalid": {reason: how many}, "texts": all, "pairs": (prompt, response) ids of the valid}."""
    import torch
    o, draw = world.o, torch.Generator().manual_seed(1000 * world.o.seed + n)
    base = world.base_tasks()
    seeds = [world.seed_for(base[i], draw)
             for i in torch.randint(len(base), (TEXTS,), generator=draw).tolist()]
    prompts = [policy.encode(world.env_prompt(task, None, o.alpha)) for task in seeds]
    rollouts = policy.sample(ADAPTER, prompts, 1, o.max_task_tokens, o.temperature,
                             policy.generator(1000 * o.seed + n), max_rows=o.max_rows)
    read = list(written_tasks(world, o, [policy], rollouts, seeds, o.alpha, 0, held_out_keys(world)))
    pairs = [(r.prompt, r.response) for r, _, task, _ in read if task]
    reasons = Counter(reason for *_, reason in read if reason)
    return {"valid": len(pairs) / TEXTS, "invalid": dict(reasons.most_common()),
            "texts": [text for _, text, *_ in read], "pairs": pairs}


# ---------------------------------------------------------------------------------------------
# on disk


def save_state(path: Path, policy, optimizer, state: dict):
    """Adapter, optimiser and what has been done: the old file or the new one, never a half."""
    import torch
    scratch = path.with_suffix(".tmp")
    torch.save({"adapter": [p.detach().cpu() for p in policy.params[ADAPTER]],
                "optimizer": optimizer.state_dict(), "state": state}, scratch)
    os.replace(scratch, path)


def load_state(path: Path, policy, optimizer) -> dict:
    """Put a saved state back; returns what has been done."""
    import torch
    saved = torch.load(path, weights_only=True, map_location="cpu")
    optimizer.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        for p, value in zip(policy.params[ADAPTER], saved["adapter"], strict=True):
            p.copy_(value)
    return saved["state"]


def merge(policy, o, out: Path):
    """Add the adapter to the base and save a model folder, in the base's own 16 or 32 bits."""
    import torch
    from peft import PeftModel
    from support.loading import load_model
    policy.save_adapter(ADAPTER, out / "warm_start" / "adapter")
    # summed in fp32 and rounded once, with the weights as they were before any quantisation
    lm, tokenizer = load_model(o.model, None, "fp32", "cpu")
    merged = PeftModel.from_pretrained(lm, str(out / "warm_start" / "adapter")).merge_and_unload()
    merged.to(torch.bfloat16 if o.quant else policy.lm.dtype)
    with tempfile.TemporaryDirectory(dir=out / "warm_start") as scratch:
        merged.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        # the weights come last: a folder without them is not a model
        for file in sorted(Path(scratch).iterdir(), key=lambda f: f.suffix == ".safetensors"):
            os.replace(file, out / file.name)
