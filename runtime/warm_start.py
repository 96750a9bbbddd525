"""Warm start: a model that can neither read nor write tasks imitates base tasks in both roles.

What of the paper this is: nothing; its 7B instruct model does the format by itself. A small one
writes no valid task and solves none, so every group is without signal and both updates stand still.

    python genenv.py warm-start --model M --base-tasks F --out DIR [--passes 3] [options of a run]
    python genenv.py --world tool_calls --model DIR --base-tasks F ...

How it is run: by that command. As the agent it imitates the expected answers, as the simulator tasks
that it could have written (worlds: warm_start_pairs): rwr.weighted_nll with weights 1, one LoRA, AdamW
with a falling rate; of an episode the turns, not the observations between them. Held-out tasks are
never imitated. In a world with a list of functions the simulator then writes for them, in rounds:
it imitates what passes every check, until ENOUGH of what it writes is valid. No attempt is made at
these tasks and the agent does not see them. DIR becomes a model folder, with warm_start.json, the
rounds in it; what the model can do, epoch 0 of a run measures. The same command given again goes on
where it was killed, to the bit.

Where it differs on purpose: the adapter is merged into the base, in 16 bits also where training
used 4, so that "adapters off" is the initial policy of both players, and the reference, as always.
"""
import argparse
import json
import os
import pickle
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path

import torch
from tqdm import tqdm

from data_pool import UserError
from grpo import finite_step, subset, subset_own
from policy import Policy, split_groups
from runtime import options as run_options
from runtime.jsonl import first_line
from runtime.loading import load_model, policy_options
from rwr import weighted_nll
from worlds import InvalidTask, held_out_keys, load_world, one_line_for_templates, task_keys, \
    world_option, written_task

ADAPTER = "warm"
WARM_UP = 8         # steps over which the learning rate rises: AdamW's moments know nothing yet
ENOUGH = 0.6        # share of valid tasks at which the rounds end
FEWEST = 6          # answers and tasks to imitate
SHOWN = 24          # texts of a round in warm_start.json
ROUND_RATE = 0.2    # of --lr, in the rounds: the form is there, and is to be kept


@dataclass(frozen=True)
class Settings:
    """Options of a warm start beside those of a run; the comment beside each is its help text."""
    out: str = ""          # folder that becomes the model
    passes: int = 3        # over what the world gives to imitate: base tasks, or a draw of them
    rounds: int = 4        # of writing for listed functions and imitating what is valid, at most
    texts: int = 128       # that are written in a round
    batch: int = 16        # responses per optimiser step
    lr: float = 1e-3       # AdamW on the LoRA weights, falling to 0 in a straight line
    rank: int = 32         # LoRA rank
    save_every: int = 10   # steps between two saved states


# ---------------------------------------------------------------------------------------------
# the command


def main(argv, Options) -> int:
    """Parse, warm-start, print the report. Returns 0; raises UserError. Options: genenv.Options."""
    s, o = parse(argv, Options)
    torch.set_num_threads(run_options.threads_of(o))
    world = load_world(o.world)
    if not hasattr(world, "warm_start_pairs"):
        raise UserError(f"the world {o.world} has no pairs to imitate (warm_start_pairs)")
    world.prepare(o)
    out = claim(s, o)
    policy = Policy.load(o.model, (ADAPTER,), **{**policy_options(o), "rank": s.rank,
                                                 "adapter_paths": None})
    with one_line_for_templates(o.model):
        print(census(world, o, pairs_of_pass(world, policy, o, 0)), flush=True)
    state = learn(world, policy, s, o, out / "warm_start" / "state.pt")
    merge(policy, o, out)
    for written in state["rounds"]:
        del written["pairs"]  # token ids
    record = {"settings": settings_of(s, o), "nats_per_token": state["nats"],
              "rounds": state["rounds"]}
    write_whole(out / "warm_start.json", lambda path: path.write_text(json.dumps(record, indent=1)))
    shutil.rmtree(out / "warm_start")
    print(f"the model is in {out}: go on with --model {out} and the same options of the world")
    return 0


def parse(argv, Options):
    """argv -> (Settings, Options). What is no option of a warm start is one of a run."""
    p = run_options.Parser(prog="genenv.py warm-start", allow_abbrev=False,
                           argument_default=argparse.SUPPRESS,
                           epilog="besides, every option of a run: python genenv.py --help")
    run_options.add_fields(p, Settings)
    known, rest = p.parse_known_args(argv)
    s = Settings(**vars(known))
    for f in fields(Settings):
        value = getattr(s, f.name)
        if f.type is not str and not (value > 0 or f.name == "rounds" and value == 0) \
                or value == float("inf"):
            raise UserError(f"--{f.name.replace('_', '-')} is {value}: must be positive")
    if not s.out:
        raise UserError("warm-start needs --out: the folder that becomes the model")
    if not any(word in argument for argument in rest for word in ("--world", "--preset")):
        rest = ["--world", "tool_calls", *rest]
    o = run_options.parse_options(rest, Options)
    if not o.model:
        raise UserError("warm-start needs --model: what to start from")
    return s, o


def settings_of(s, o) -> dict:
    """All that decides the bits of the result, as JSON."""
    names = ("world", "model", "base_tasks", "validation_tasks", "seed", "quant", "dtype", "device",
             "token_budget", "max_prompt_tokens", "max_task_tokens", "max_response_tokens",
             "chat_template_kwargs", "world_options")
    own = [f.name for f in fields(s) if f.name not in ("out", "save_every")]
    return {**{name: getattr(s, name) for name in own},
            "options": {name: getattr(o, name) for name in names}}


def claim(s, o) -> Path:
    """The folder, with settings.json in it: new, or of this very warm start. Raises UserError."""
    out = Path(s.out)
    path, wanted = out / "warm_start" / "settings.json", settings_of(s, o)
    if path.is_file():
        if json.loads(path.read_text()) != wanted:
            raise UserError(f"{out} holds a warm start with other settings ({path}): give them "
                            "again to go on, or choose another --out")
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} is not empty: choose another folder")
    path.parent.mkdir(parents=True)
    write_whole(path, lambda p: p.write_text(json.dumps(wanted, indent=1)))
    return out


def census(world, o, pairs) -> str:
    """How much there is to imitate in a pass. Raises UserError where a role has too little."""
    count = {role: sum(len(group[1]) for group in pairs[role]) for role in ("agent", "env")}
    for role, name in (("agent", "the agent"), ("env", "the simulator")):
        if count[role] >= FEWEST:
            continue
        if pairs["long"]:
            raise UserError(
                f"too few base tasks within the limits to imitate as {name} ({count[role]}; "
                f"{pairs['long']} prompts or responses are longer): raise --max-prompt-tokens, "
                "--max-task-tokens, --max-response-tokens or --max-episode-tokens")
        raise UserError(
            f"{o.base_tasks or 'the example tasks'}: too few base tasks to imitate as {name} "
            f"({count[role]}, of {len(world.base_tasks(o))} that are not held out): give more")
    return (f"one pass: {count['agent']} answers as the agent, {count['env']} tasks as the simulator; "
            f"{pairs['alone']} tasks are imitated as the agent alone")


# ---------------------------------------------------------------------------------------------
# passes and rounds


def learn(world, policy, s, o, path: Path) -> dict:
    """Train the adapter over all passes and rounds, from the saved state on if there is one.

    Returns the state: "nats" per token of each pass and round, "rounds": what was written in each.
    """
    optimizer = policy.optimizer(ADAPTER, s.lr)
    state = load_state(path, policy, optimizer)
    rounds = s.rounds if listed(world, o) else 0
    while True:
        n, pairs = state["stage"], []
        if n >= s.passes:
            if len(state["rounds"]) == n - s.passes:  # else it had been written when it was killed
                state["rounds"].append(write(world, policy, s, o, n))
                save_state(path, policy, optimizer, state)
            print(round_line(n - s.passes, state["rounds"][-1]), flush=True)
            if state["rounds"][-1]["valid"] >= ENOUGH or n == s.passes + rounds:
                return state
            pairs = [(prompt, [ids], [[True] * len(ids)])
                     for written in state["rounds"] for prompt, ids in written["pairs"]]
        given = pairs_of_pass(world, policy, o, n)
        generator = torch.Generator().manual_seed(1000 * o.seed + n)
        batches = batches_of_pass(given["agent"] + given["env"] + pairs, s.batch, generator)
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
        loss = imitation_step(policy, optimizer, batches[step], s.lr * rate, o)
        state["losses"].append(loss)
        state["step"] = step + 1
        bar.set_postfix(loss=f"{loss:.3f}")
        if (step + 1) % s.save_every == 0:
            save_state(path, policy, optimizer, state)
            if bar.disable:
                print(f"step {step + 1}/{len(batches)}: {loss:.3f} nats per token", flush=True)
    state["nats"].append(sum(state["losses"]) / len(state["losses"]))
    print(f"pass {n + 1}: {state['nats'][-1]:.3f} nats per token", flush=True)
    state |= {"stage": n + 1, "step": 0, "losses": []}
    save_state(path, policy, optimizer, state)


def listed(world, o) -> list:
    """The functions that the world has a list of, if it has one."""
    return world.functions(o) if hasattr(world, "functions") else []


def write(world, policy, s, o, n: int) -> dict:
    """What the simulator writes now, for base tasks and functions drawn at random: {"valid": share
    of --texts, "invalid": {reason: how many}, "texts": some of them, "pairs": the valid ones}."""
    draw = torch.Generator().manual_seed(1000 * o.seed + n)
    base, names, held_out = world.base_tasks(o), listed(world, o), held_out_keys(world, o)
    seeds = [base[i] for i in torch.randint(len(base), (s.texts,), generator=draw).tolist()]
    if names:
        few = [torch.randperm(len(names), generator=draw)[:4].tolist() for _ in seeds]
        seeds = [world.assign(seed, [names[i] for i in some], draw) for seed, some in zip(seeds, few)]
    prompts = [policy.encode(world.env_prompt(seed, None, o.alpha)) for seed in seeds]
    rollouts = policy.sample(ADAPTER, prompts, 1, o.max_task_tokens, 1.0,
                             policy.generator(1000 * o.seed + n), max_rows=o.max_rows)
    reasons, pairs, seen, texts = Counter(), [], set(), []
    for seed, r in zip(seeds, rollouts):
        texts.append(policy.decode(r.response))
        try:
            task = written_task(world, r, texts[-1], seed, 0, held_out, policy.tokenizer)
            if task_keys(world, task) & seen:
                raise InvalidTask("duplicate in the batch")
            seen |= task_keys(world, task)
            pairs.append((r.prompt, r.response))
        except InvalidTask as reason:
            reasons[str(reason)] += 1
    return {"valid": len(pairs) / s.texts, "invalid": dict(reasons.most_common()),
            "texts": texts[:SHOWN], "pairs": pairs}


def round_line(n: int, written: dict) -> str:
    """What was written in a round, in one line."""
    why = ", ".join(f"{reason} {k}" for reason, k in written["invalid"].items())
    return f"written before round {n + 1}: valid {written['valid']:.2f}" + (f" ({why})" if why else "")


# ---------------------------------------------------------------------------------------------
# imitation


def pairs_of_pass(world, policy, o, number: int) -> dict:
    """{"agent", "env": [(prompt ids, [response ids, ...], [own, ...])], "alone", "long"} of a pass.

    One prompt is one group; own: which tokens of a response are imitated, bools; alone: tasks that
    are imitated as the agent only; long: pairs left out as over a limit.
    """
    given = world.warm_start_pairs(o, number)
    out = {"alone": given["alone"], "long": 0}
    for role in ("agent", "env"):
        groups = {}
        for prompt, said in given[role]:
            prompt, (response, own) = tuple(policy.encode(prompt)), spoken(policy, said)
            # what a run would cut off, or refuse, is not to be learned
            if len(prompt) > o.max_prompt_tokens or not within_limits(world, o, role, own):
                out["long"] += 1
                continue
            group = groups.setdefault(prompt, ([], []))
            group[0].append(response)
            group[1].append(own)
        out[role] = [(list(prompt), *group) for prompt, group in groups.items()]
    return out


def spoken(policy, said) -> tuple:
    """(ids, own) of a response, or of an episode: a list of turns and observations in turn."""
    ids, own = [], []
    for i, text in enumerate([said] if isinstance(said, str) else said):
        part = policy.encode_observation(text) if i % 2 else \
            policy.encode(text) + policy.eos_ids[:1]
        ids, own = ids + part, own + [i % 2 == 0] * len(part)
    return ids, own


def within_limits(world, o, role, own) -> bool:
    """Whether a run would let the simulator, or the agent, say this much."""
    if role == "env":
        return len(own) <= o.max_task_tokens
    turns = [len(list(run)) for mine, run in groupby(own) if mine]
    whole = len(own) if all(own) else world_option(world, o, "max_episode_tokens")
    return max(turns) <= o.max_response_tokens and len(own) <= whole


def batches_of_pass(groups, size: int, generator) -> list:
    """Both roles' groups, shuffled, as batches of about `size` responses."""
    batches, n = [[]], 0
    for i in torch.randperm(len(groups), generator=generator).tolist():
        if n >= size:
            batches, n = [*batches, []], 0
        batches[-1].append(groups[i])
        n += len(groups[i][1])
    return batches


def imitation_step(policy, optimizer, groups, rate: float, o) -> float:
    """One optimiser step on the mean negative log-likelihood per token. Returns it, in nats."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    owns = [owns for _, _, owns in groups]
    groups = [(prompt, responses) for prompt, responses, _ in groups]
    tokens, losses = sum(sum(own) for of_group in owns for own in of_group), []
    with policy.use(ADAPTER):
        for batch in split_groups(groups, o.token_budget):
            logp, mask = policy.logprobs(subset(groups, batch), 1.0, o.grad_checkpoint,
                                         own=subset_own(owns, batch))
            loss = weighted_nll(logp, mask, torch.ones(len(logp)).to(logp), tokens)
            loss.backward()
            losses.append(loss.detach())
    # read only now: reading one earlier makes the host wait
    total = sum(map(float, losses))
    finite_step(policy.params[ADAPTER], optimizer, 1.0, total)
    return total


def save_state(path: Path, policy, optimizer, state: dict):
    """Adapter, optimiser and what has been done, whole or not at all."""
    state = {"adapter": [p.detach().cpu() for p in policy.params[ADAPTER]],
             "optimizer": optimizer.state_dict(), "state": state}
    write_whole(path, lambda scratch: torch.save(state, scratch))


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
        raise UserError(f"{path} is damaged ({first_line(error):.100}): remove it to start from the "
                        "beginning") from None


def write_whole(path: Path, write):
    """Call write(scratch path), then put the file in its place: there it is whole or absent."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix="tmp-")
    os.close(handle)
    try:
        write(Path(scratch))
        with open(scratch, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise UserError(f"cannot write {path} ({first_line(error):.100}): free some space, then give the same "
                        "command again") from None
    finally:
        Path(scratch).unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------
# merging


def merge(policy, o, out: Path):
    """Add the adapter to the base, save it as a model folder, in the base's own 16 or 32 bits."""
    policy.save_adapter(ADAPTER, out / "warm_start" / "adapter")
    lm, tokenizer = policy.lm, policy.tokenizer
    if o.quant:  # what was trained on is rounded to 4 bits: the sum is made with the weights before
        lm, tokenizer = load_model(o.model, None, "bf16", "cpu")
    plain = {name.replace(".base_layer.", "."): w for name, w in lm.state_dict().items()
             if ".lora_" not in name}
    for name, delta in deltas(policy).items():
        # summed in fp32 and rounded once
        plain[name] = (plain[name].float() + delta.to(plain[name].device)).to(plain[name].dtype)
    from transformers import AutoModelForCausalLM
    merged = AutoModelForCausalLM.from_config(lm.config, dtype=lm.dtype)
    merged.load_state_dict({name: w.cpu() for name, w in plain.items()})
    merged.generation_config = lm.generation_config
    with tempfile.TemporaryDirectory(dir=out / "warm_start") as scratch:
        merged.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        # the weights come last: a folder without them is no model
        for file in sorted(Path(scratch).iterdir(), key=lambda f: f.suffix == ".safetensors"):
            os.replace(file, out / file.name)


def deltas(policy) -> dict:
    """{weight name of the base: (alpha / r) B A}, each (out, in) fp32."""
    out, prefix = {}, "base_model.model."
    for name, module in policy.model.named_modules():
        if ADAPTER in getattr(module, "lora_A", ()):
            a, b = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
            out[name.removeprefix(prefix) + ".weight"] = \
                module.scaling[ADAPTER] * (b.detach().float() @ a.detach().float())
    return out
