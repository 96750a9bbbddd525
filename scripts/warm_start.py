"""Warm-start a model that can neither read nor write tasks: it imitates base tasks in both roles.

Paper: does not need this, because its 7B instruct model knows the format. A small model writes no
valid task and solves none, so no group gives a signal, and neither agent nor simulator learns.

Usage:
    python genenv.py warm-start --model M --out DIR [options of a run]
    python genenv.py --model DIR [the same options]

In the default world, this trains on the ladder in words; --world tool_calls takes --base-tasks F.

As the agent, the model imitates expected answers; as the simulator, it imitates tasks that it could
have written (`warm_start_pairs` of the world). Passes over these examples train one LoRA with
rwr.rwr_step and weights of 1; AdamW's learning rate rises for WARM_UP steps, then falls. Rounds
follow: the simulator writes, and its valid texts are imitated alongside the examples, until the
share ENOUGH of its texts is valid or all --rounds are done. Held-out tasks are never imitated. DIR
becomes a model folder, in which warm_start.json reports how it went. If a warm start is stopped,
the same command resumes it after the last complete pass.

Deviations: the adapter is merged into the base. So "adapters off" is still the initial policy of
both agent and simulator, and the reference of every KL term. Too sharp a start is as bad as none:
if all attempts at a task are alike, there is no gradient. Choose the --passes that give epoch 0 of
a run the most mixed groups.
"""
import json
import math
import shlex
import shutil
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tqdm import tqdm

from support import checkpoint, origin
from errors import UserError, write_whole
from grpo import plan_steps
from model.loading import check_model
from model.memory import enough_memory
from interaction import read_written
from model.saving import save_merged
from policy import Policy, Rollout, policy_options
from rwr import rwr_step
from support.health import counted
from support.options import Parser, at_least, parse_options
from worlds import held_out_keys
from worlds.probe import check_texts_survive, open_world

ADAPTER = "warm"
BATCH = 8           # responses in an optimiser step
RANK = 32           # of the LoRA that is merged
WARM_UP = 8         # steps over which the rate rises, until AdamW's moments are reliable
LAST_RATE = 0.2     # share of the peak rate at the end of the passes and in the rounds
TEXTS = 128         # texts that the simulator writes before a round's pass
ENOUGH = 0.6        # share of valid texts that ends the rounds
FEWEST = 5          # fewest examples to imitate, in each role
FORM_STEPS = 48     # steps that suffice to teach the form of tasks and answers
FEWEST_PASSES, MOST_PASSES = 2, 10
WIDE = 1024         # hidden size of a wide model, which takes a lower rate
# Measured at hidden sizes of 576 and 1,536: the wide model answers 32 of 35 requests with 3e-4, but
# 25 with 1e-3.
RATE, WIDE_RATE = 1e-3, 3e-4


def main(argv) -> int:
    """Run the command `genenv.py warm-start`. Return 0, or raise UserError."""
    s, o, rest = parse(argv)
    out = Path(s.out)
    world = open_world(o)
    check_model(o.model)
    with claim(out), enough_memory():
        print("loading the model; if this is stopped, run the same command again: completed passes "
              "are kept ...", flush=True)
        WarmStart(world, s, out).make(out, s.rounds)
    command = "python", "genenv.py", *rest, "--model", s.out, "--out", f"{out}-run"
    print("continue with:", shlex.join(command))
    return 0


def parse(argv):
    """Return (the warm start's options, the run's Options, rest).

    rest: the words of argv that are for the run, without --model.
    """
    p = Parser(prog="python genenv.py warm-start",
               epilog="and a run's options (python genenv.py --help): --world, --base-tasks ...")
    p.add_argument("--out", required=True, help="folder that becomes the model")
    p.add_argument("--model", required=True, help="folder or hub name of a chat model")
    p.add_argument("--passes", type=at_least(1), default=0,
                   help="passes over the examples (default: depends on how many there are)")
    p.add_argument("--rounds", type=at_least(0), default=2,
                   help="at most this many rounds of imitating the simulator's texts")
    s, rest = p.parse_known_args(argv)
    o = parse_options([*rest, "--model", s.model])
    if o.env_model:
        raise UserError("warm-start takes no --env-model")
    return s, o, rest


def claim(out: Path):
    """Return the lock of a new or empty folder, or of one with an unfinished warm start. Raise
    UserError for any other folder."""
    unfinished = (out / "warm_start").is_dir()
    if out.exists() and not unfinished and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty: choose another --out; if a warm start made it, "
                        f"a run can use it as --model {out}")
    (out / "warm_start").mkdir(parents=True, exist_ok=True)
    return checkpoint.lock_folder(out / "warm_start")


# ---------------------------------------------------------------------------------------------
# the examples to imitate


def pairs_of_pass(world, policy, number: int) -> dict:
    """Return {role: [Rollout]} of a pass, without examples longer than a run allows. Raise
    UserError if too few remain for a role."""
    usable, o = {}, world.o
    for role, pairs in world.warm_start_pairs(number).items():
        longest = o.max_task_tokens
        if role == "agent":
            longest = world.max_episode_tokens or o.max_response_tokens
        rollouts = [policy.as_drawn(prompt, response) for prompt, response in pairs]
        usable[role] = [r for r in rollouts if len(r.prompt) <= o.max_prompt_tokens
                        and len(r.response) <= longest]
        if len(usable[role]) < FEWEST:
            raise UserError(
                f"{FEWEST} examples to imitate as {role} are needed, but only "
                f"{len(usable[role])} of {len(pairs)} are "
                "within --max-{prompt,task,response}-tokens: give more, or raise these limits")
    if not usable:
        raise UserError(f"--world {o.world} has no warm start: "
                        "a chat model can play it without one")
    return usable


def passes_for(world, pairs) -> int:
    """Return how many passes suffice to teach the form of tasks and answers."""
    if world.warm_start_passes:
        return world.warm_start_passes
    steps_of_a_pass = math.ceil(sum(map(len, pairs.values())) / BATCH)
    passes = math.ceil(FORM_STEPS / steps_of_a_pass)
    return min(max(FEWEST_PASSES, passes), MOST_PASSES)


# ---------------------------------------------------------------------------------------------
# the warm start


class WarmStart:
    """Run passes over the examples, then rounds over the simulator's texts; save each when it ends.

    s: options of the warm start. state: what a resumed start needs. Besides the adapter and the
    optimiser it has "nats_per_token" (the loss of each pass), "rounds" (the texts written before
    each later pass) and "own" (the valid ones).
    """

    def __init__(self, world, s, out: Path):
        """Load the model, and resume an earlier start. Raise UserError if it had other settings."""
        self.world, self.path, o = world, out / "warm_start" / "state.pt", world.o
        self.state = {"settings": None, "date": time.strftime("%Y-%m-%d"), "nats_per_token": [],
                      "rounds": [], "own": []}
        if self.path.is_file():
            self.state = checkpoint.read(self.path)
        # A chat template may show the date: keep the date on which this warm start began.
        world.o = o = replace(o, date=self.state["date"])

        torch.set_num_threads(o.threads or torch.get_num_threads())
        self.policy = Policy.load(o.model, (ADAPTER,), **{**policy_options(o), "rank": RANK})
        # Now that the model is loaded, even one from the hub has files that can be compared.
        files = origin.inputs(o) | origin.file_hashes(origin.world_files(o.world))
        settings = {**asdict(o), **vars(s), "out": "", "threads": 0, "files": files}
        if self.state["settings"] not in (None, settings):
            raise UserError(f"{out} holds a warm start with other settings or files: "
                            "use those or another --out")
        self.state["settings"] = settings
        check_texts_survive(world, self.policy)
        self.passes = s.passes or passes_for(world, pairs_of_pass(world, self.policy, 0))
        self.optimizer = self.policy.optimizer(ADAPTER, RATE)  # `imitate` sets the rate
        if "adapter" in self.state:
            self.optimizer.load_state_dict(self.state["optimizer"])
            for p, value in zip(self.policy.params[ADAPTER], self.state["adapter"], strict=True):
                p.data.copy_(value)

    def make(self, out: Path, rounds: int):
        """Imitate, merge, and write the model and its report to the claimed folder."""
        # Skip the passes that were done before a stop.
        n_done = len(self.state["nats_per_token"])
        for n in range(n_done, self.passes):
            self.imitate_pass(n)
        for n in range(max(n_done, self.passes), self.passes + rounds):
            if self.write_round(n) >= ENOUGH:
                break
            self.imitate_pass(n)
        merge(self.policy, self.world.o, out)
        report = {key: self.state[key] for key in ("settings", "nats_per_token", "rounds")}
        write_whole(out / "warm_start.json", json.dumps(report, indent=1))
        shutil.rmtree(out / "warm_start")

    def imitate_pass(self, n: int):
        """Imitate the examples and the simulator's valid texts in random order, as pass number
        n."""
        examples = pairs_of_pass(self.world, self.policy, n)
        texts = [Rollout(0, *pair) for pair in self.state["own"]]
        # Mix in the examples: with only its own texts the model would forget the agent's role.
        pairs = texts + examples["agent"] + examples["env"]
        print(f"pass {n + 1}: imitating {len(examples['agent'])} answers, {len(examples['env'])} "
              f"tasks, {len(texts)} texts of its own", flush=True)

        generator = torch.Generator().manual_seed(1000 * self.world.o.seed + n)
        steps = plan_steps(len(pairs), 1, BATCH, generator)
        nats = self.imitate([[pairs[i] for i in step] for step in steps], n)
        print(f"  loss {nats:.3f} nats per token", flush=True)

        self.state["nats_per_token"].append(nats)
        self.state["adapter"] = [p.detach() for p in self.policy.params[ADAPTER]]
        self.state["optimizer"] = self.optimizer.state_dict()
        checkpoint.write(self.path, self.state)

    def imitate(self, batches, n: int) -> float:
        """Imitate batches of pairs in pass number n, and return their mean loss in nats per
        token."""
        width = self.policy.lm.config.get_text_config(decoder=True).hidden_size
        peak = WIDE_RATE if width >= WIDE else RATE
        losses = []
        # disable=None: show the bar only on a terminal
        bar = tqdm(batches, f"pass {n + 1}", leave=False, disable=None)
        for k, batch in enumerate(bar):
            falling = max(LAST_RATE, 1 - (n + k / len(batches)) / self.passes)
            rising = min((n * len(batches) + k + 1) / WARM_UP, 1)
            for group in self.optimizer.param_groups:
                group["lr"] = peak * (falling * rising)
            with self.policy.use(ADAPTER):
                loss, _ = rwr_step(self.policy, ADAPTER, self.optimizer, batch,
                                   torch.ones(len(batch)), self.world.o)
            losses.append(loss)
        return sum(losses) / len(losses)

    def write_round(self, n: int) -> float:
        """Let the simulator vary random base tasks, keep its valid texts for all later passes, and
        return their share.

        The state's "rounds" gains {"valid": share, "invalid": {reason: count}, "texts": all}.
        """
        print(f"the simulator writes {TEXTS} texts; on a CPU this takes minutes ...", flush=True)
        world, policy, o = self.world, self.policy, self.world.o
        generator, base = torch.Generator().manual_seed(1000 * o.seed + n), world.base_tasks()
        picks = torch.randint(len(base), (TEXTS,), generator=generator).tolist()
        seeds = [world.seed_for(base[i], generator) for i in picks]
        prompts = [policy.encode(world.env_prompt(task, None)) for task in seeds]
        rollouts = policy.sample(ADAPTER, prompts, 1, o.max_task_tokens, o.temperature,
                                 policy.generator(1000 * o.seed + n), max_rows=o.max_rows)
        texts, reasons, valid = [], Counter(), 0
        for w in read_written(world, o, [policy], rollouts, seeds, epoch=0,
                              held_out=held_out_keys(world)):
            texts.append(w.text)
            if w.task:
                valid += 1
                self.state["own"].append([w.rollout.prompt, w.rollout.response])
            else:
                reasons[w.reason] += 1
        self.state["rounds"].append(
            {"valid": valid / TEXTS, "texts": texts, "invalid": dict(reasons.most_common())})
        print(f"{valid / TEXTS:.2f} of them are valid; refused: {counted(reasons)}", flush=True)
        return valid / TEXTS


def merge(policy, o, out: Path):
    """Merge the adapter into the base, and save a model folder, in bf16 if the base was quantised.
    """
    adapters = out / "warm_start" / "adapters"
    policy.save_adapters(adapters)
    dtype = torch.bfloat16 if o.quant else policy.lm.dtype
    save_merged(o.model, adapters / ADAPTER, out, dtype)
