"""How a warm start learns: passes over pairs to imitate, rounds of its own texts, what is saved.

What of the paper this is: nothing, see commands/warm_start.py. How it is run: by that command,
which has parsed and checked what was given before this module loads torch.

Where it differs on purpose: held-out tasks are never imitated, nor what a run would cut off.
"""
import io
import os
import pickle
import sys
import tempfile
from collections import Counter
from itertools import groupby
from pathlib import Path

import torch
from tqdm import tqdm

from support.files import UserError, first_line, write_whole
from support.loading import load_model
from policy import Rollout
from rwr import rwr_step
from worlds import held_out_keys, written_tasks

ADAPTER = "warm"
WARM_UP = 8         # steps over which the learning rate rises: AdamW's moments know nothing yet
ENOUGH = 0.6        # share of valid tasks at which the rounds end
ROUND_RATE = 0.2    # of --lr, in the rounds: the form is there, and is to be kept


# ---------------------------------------------------------------------------------------------
# passes and rounds


def learn(world, policy, s, o, path: Path) -> dict:
    """Train the adapter over all passes and rounds, from the saved state on if there is one.

    Returns the state: "nats" per token of each pass and round, "rounds": what was written in each.
    """
    optimizer = policy.optimizer(ADAPTER, s.lr)
    state = load_state(path, policy, optimizer)
    rounds = s.rounds if listed(o) else 0
    while True:
        n, own = state["stage"], []
        if n >= s.passes:
            if len(state["rounds"]) == n - s.passes:  # else it had been written when it was killed
                state["rounds"].append(write(world, policy, s, o, n))
                save_state(path, policy, optimizer, state)
            print(round_line(n - s.passes, state["rounds"][-1]), flush=True)
            if state["rounds"][-1]["valid"] >= ENOUGH or n == s.passes + rounds:
                return state
            own = [Rollout(0, *pair) for report in state["rounds"] for pair in report["pairs"]]
        given = pairs_of_pass(world, policy, o, n)
        pairs = [*given["agent"], *given["env"], *own]  # the examples hold the agent's role as well
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(
            1000 * o.seed + n)).tolist()
        batches = [[pairs[i] for i in order[k:k + s.batch]] for k in range(0, len(pairs), s.batch)]
        imitate(policy, optimizer, batches, s, o, state, path)


def imitate(policy, optimizer, batches, s, o, state, path: Path):
    """One pass over batches, from state["step"] on; then the next stage is due."""
    n, start = state["stage"], state["step"]
    if start:
        print(f"going on at step {start} of {len(batches)}", flush=True)
    bar = tqdm(range(start, len(batches)), initial=start, total=len(batches), desc=f"pass {n + 1}",
               disable=not sys.stderr.isatty())
    for step in bar:
        rate = max(ROUND_RATE, 1 - (n + step / len(batches)) / s.passes)
        rate *= min((n * len(batches) + step + 1) / WARM_UP, 1)
        state["losses"].append(imitation_step(policy, optimizer, batches[step], s.lr * rate, o))
        state["step"] = step + 1
        if (step + 1) % s.save_every == 0:
            save_state(path, policy, optimizer, state)
            if bar.disable:
                print(f"step {step + 1}/{len(batches)}: {state['losses'][-1]:.3f} nats per token",
                      flush=True)
    state["nats"].append(sum(state["losses"]) / len(state["losses"]))
    print(f"pass {n + 1}: {state['nats'][-1]:.3f} nats per token", flush=True)
    state.update(stage=n + 1, step=0, losses=[])
    save_state(path, policy, optimizer, state)


def listed(o) -> bool:
    """Whether the world has a list of functions."""
    return bool(o.world_options.get("tools"))


def write(world, policy, s, o, n: int) -> dict:
    """What the simulator writes now, for base tasks and functions drawn at random: {"valid": share
    of --texts, "invalid": {reason: how many}, "texts": all, "pairs": (prompt, response) ids}."""
    draw = torch.Generator().manual_seed(1000 * o.seed + n)
    base, held_out = world.base_tasks(), held_out_keys(world)
    seeds = [base[i] for i in torch.randint(len(base), (s.texts,), generator=draw).tolist()]
    seeds = [world.seed_for(task, draw) for task in seeds]
    prompts = [policy.encode(world.env_prompt(seed_task, None, o.alpha)) for seed_task in seeds]
    rollouts = policy.sample(ADAPTER, prompts, 1, o.max_task_tokens, o.temperature,
                             policy.generator(1000 * o.seed + n), max_rows=o.max_rows)
    read = list(written_tasks(world, o, [policy], rollouts, seeds, o.alpha, 0, held_out))
    pairs = [(r.prompt, r.response) for r, _, task, _ in read if task]
    reasons = Counter(reason for *_, reason in read if reason)
    return {"valid": len(pairs) / s.texts, "invalid": dict(reasons.most_common()),
            "texts": [text for _, text, _, _ in read], "pairs": pairs}


def round_line(n: int, report: dict) -> str:
    """What was written before a round, in one line."""
    why = ", ".join(f"{reason} {k}" for reason, k in report["invalid"].items())
    return f"written before round {n + 1}: valid {report['valid']:.2f}" + \
        (f" ({why})" if why else "")


# ---------------------------------------------------------------------------------------------
# imitation


def pairs_of_pass(world, policy, o, number: int) -> dict:
    """{"agent", "env": [Rollout], "alone", "long"} of a pass: what is imitated in each role.

    alone: tasks that are imitated as the agent only; long: pairs left out as over a limit.
    """
    given = world.warm_start_pairs(number)
    every = {role: [spoken(policy, *pair) for pair in given[role]] for role in ("agent", "env")}
    # what a run would cut off, or refuse, is not to be learned
    kept = {role: [r for r in pairs if len(r.prompt) <= o.max_prompt_tokens
                   and within_limits(world, o, role, r.drawn)] for role, pairs in every.items()}
    long = sum(len(every[role]) - len(kept[role]) for role in every)
    return {**kept, "alone": given["alone"], "long": long}


def spoken(policy, prompt, said) -> Rollout:
    """A prompt and a response as a Rollout, as if the policy had drawn it; of an episode the turns
    count as drawn, the observations between them do not."""
    ids, drawn = [], []
    for i, text in enumerate([said] if isinstance(said, str) else said):
        part = policy.encode_observation(text) if i % 2 else \
            policy.encode(text) + policy.end_of_turn
        ids, drawn = ids + part, drawn + [i % 2 == 0] * len(part)
    return Rollout(0, policy.encode(prompt), ids, drawn=drawn)


def within_limits(world, o, role, drawn) -> bool:
    """Whether a run would let the simulator, or the agent, say this much."""
    if role == "env":
        return len(drawn) <= o.max_task_tokens
    turns = [len(list(run)) for mine, run in groupby(drawn) if mine]
    whole = len(drawn) if all(drawn) else world.max_episode_tokens
    return max(turns) <= o.max_response_tokens and len(drawn) <= whole


def imitation_step(policy, optimizer, batch, rate: float, o) -> float:
    """One optimiser step on the mean negative log-likelihood per token. Returns it, in nats."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    with policy.use(ADAPTER):
        return rwr_step(policy, ADAPTER, optimizer, batch, torch.ones(len(batch)), o)[0]


# ---------------------------------------------------------------------------------------------
# on disk


def save_state(path: Path, policy, optimizer, state: dict):
    """Adapter, optimiser and what has been done, whole or not at all."""
    state = {"adapter": [p.detach().cpu() for p in policy.params[ADAPTER]],
             "optimizer": optimizer.state_dict(), "state": state}
    data = io.BytesIO()
    torch.save(state, data)
    write_whole(path, data.getvalue())


def load_state(path: Path, policy, optimizer) -> dict:
    """Put a saved state back; returns what has been done, or the state of a beginning."""
    if not path.is_file():
        return {"stage": 0, "step": 0, "losses": [], "nats": [], "rounds": []}
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for p, value in zip(policy.params[ADAPTER], saved["adapter"], strict=True):
                p.copy_(value)
        return saved["state"]
    except (OSError, RuntimeError, LookupError, ValueError, EOFError, TypeError,
            pickle.UnpicklingError) as error:
        raise UserError(f"{path} is damaged ({first_line(error):.100}): remove it to start from "
                        "the beginning") from None


def merge(policy, o, out: Path):
    """Add the adapter to the base, save it as a model folder, in the base's own 16 or 32 bits."""
    from peft import PeftModel
    policy.save_adapters(out / "warm_start")
    # summed in fp32 and rounded once, with the weights as they were before any quantisation
    lm, tokenizer = load_model(o.model, None, "fp32", "cpu")
    merged = PeftModel.from_pretrained(lm, str(out / "warm_start" / ADAPTER)).merge_and_unload()
    merged.to(torch.bfloat16 if o.quant else policy.lm.dtype)
    with tempfile.TemporaryDirectory(dir=out / "warm_start") as scratch:
        merged.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        # the weights come last: a folder without them is no model
        for file in sorted(Path(scratch).iterdir(), key=lambda f: f.suffix == ".safetensors"):
            os.replace(file, out / file.name)
