"""Warm start: a model that can neither read nor write tasks imitates base tasks in both roles.

What of the paper this is: nothing; its 7B instruct model does the format by itself. A small one
writes no valid task and solves none, so every group is without signal and both updates stand still.

    python genenv.py warm-start --model M --base-tasks F --out DIR [--passes 2] [options of a run]
    python genenv.py --world tool_calls --model DIR --base-tasks F ...

How it is run: by that command. As the agent it imitates the expected answers, as the simulator
other tasks in answer to a seed task (worlds: warm_start_pairs): rwr.weighted_nll with weights 1,
one LoRA, AdamW with a falling rate; of an episode the turns, not the observations between them.
Tasks held out for validation and tuning are never imitated; on them, and on tasks written for base
seeds, it is measured before and after. DIR becomes a model folder, with warm_start.json; the same
command given again goes on where it was killed, to the bit.

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

import curriculum
from data_pool import UserError
from grpo import finite_step, subset, subset_own
from policy import Policy, split_groups
from runtime import options as run_options
from runtime.jsonl import first_line
from runtime.loading import load_model, policy_options
from rwr import weighted_nll
from worlds import InvalidTask, attempt_score, held_out_keys, load_world, one_line_for_templates, \
    play, task_keys, world_option, written_task

ADAPTER = "warm"
WARM_UP = 8  # steps over which the learning rate rises: AdamW's moments know nothing yet


@dataclass(frozen=True)
class Settings:
    """Options of a warm start beside those of a run; the comment beside each is its help text."""
    out: str = ""          # folder that becomes the model
    passes: int = 2        # over what the world gives to imitate: base tasks, or a draw of them
    batch: int = 16        # responses per optimiser step
    lr: float = 1e-3       # AdamW on the LoRA weights, falling to 0 in a straight line
    rank: int = 32         # LoRA rank
    measured: int = 48     # tasks of each split, and written ones, measured before and after
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
        passes = [pairs_of_pass(world, policy, o, s, n) for n in range(s.passes)]
    print(census(world, o, passes), flush=True)
    before = remembered(out / "warm_start" / "before.json",
                        lambda: measure(world, policy, o, s.measured))
    print(report_line("before", before), flush=True)
    imitate(policy, passes, s, o, out / "warm_start" / "state.pt")
    merge(policy, o, out)
    del policy
    policy = Policy.load(str(out), (), **{**policy_options(o), "adapter_paths": None})
    after = measure(world, policy, o, s.measured)
    print(report_line("after", after), flush=True)
    record = {"settings": settings_of(s, o), "before": before, "after": after,
              "pairs": [{role: sum(len(group[1]) for group in p[role])
                         for role in ("agent", "env")} for p in passes]}
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
        if f.type is not str and not 0 < value < float("inf"):
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


def census(world, o, passes) -> str:
    """How much there is to imitate, in one line. Raises UserError where a role has too little."""
    first = passes[0]
    count = {role: sum(len(group[1]) for group in first[role]) for role in ("agent", "env")}
    for role, name in (("agent", "the agent"), ("env", "the simulator")):
        if count[role] >= 8:
            continue
        if first["long"]:
            raise UserError(
                f"too few base tasks within the limits to imitate as {name} ({count[role]}; "
                f"{first['long']} prompts or responses are longer): raise --max-prompt-tokens, "
                "--max-task-tokens, --max-response-tokens or --max-episode-tokens")
        raise UserError(
            f"{o.base_tasks or 'the example tasks'}: too few base tasks to imitate as {name} "
            f"({count[role]}, of {len(world.base_tasks(o))} that are not held out): give more, "
            "several of them for the same functions")
    return (f"one pass: {count['agent']} answers as the agent, {count['env']} tasks as the "
            f"simulator for {len(first['env'])} seed tasks; {first['alone']} tasks whose functions occur "
            "in no other task are imitated as the agent alone")


# ---------------------------------------------------------------------------------------------
# imitation


def pairs_of_pass(world, policy, o, s, number: int) -> dict:
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


def imitate(policy, passes, s, o, state_file: Path):
    """Train the adapter over all passes, from the saved state on if there is one."""
    generator = torch.Generator().manual_seed(o.seed)
    batches = [batch for p in passes
               for batch in batches_of_pass(p["agent"] + p["env"], s.batch, generator)]
    optimizer = policy.optimizer(ADAPTER, s.lr)
    start = load_state(state_file, policy, optimizer)
    if start:
        print(f"going on at step {start} of {len(batches)}", flush=True)
    bar = tqdm(range(start, len(batches)), initial=start, total=len(batches), desc="imitating",
               disable=not sys.stderr.isatty())
    for step in bar:
        rate = s.lr * min((step + 1) / WARM_UP, 1) * (1 - step / len(batches))
        loss = imitation_step(policy, optimizer, batches[step], rate, o)
        bar.set_postfix(loss=f"{loss:.3f}")
        if (step + 1) % s.save_every == 0 or step + 1 == len(batches):
            save_state(state_file, policy, optimizer, step + 1)
            if bar.disable:
                print(f"step {step + 1}/{len(batches)}: {loss:.3f} nats per token", flush=True)


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


def save_state(path: Path, policy, optimizer, step: int):
    """Adapter, optimiser and the number of steps done, whole or not at all."""
    state = {"adapter": [p.detach().cpu() for p in policy.params[ADAPTER]],
             "optimizer": optimizer.state_dict(), "step": step}
    write_whole(path, lambda scratch: torch.save(state, scratch))


def load_state(path: Path, policy, optimizer) -> int:
    """Put a saved state back; returns the number of steps done, 0 if there is none."""
    if not path.is_file():
        return 0
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for p, value in zip(policy.params[ADAPTER], state["adapter"], strict=True):
                p.copy_(value)
        return int(state["step"])
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


# ---------------------------------------------------------------------------------------------
# before and after


def remembered(path: Path, make) -> dict:
    """What the file holds, or make() and put it there: not measured again after an interruption."""
    if not path.is_file():
        record = make()
        write_whole(path, lambda p: p.write_text(json.dumps(record)))
    return json.loads(path.read_text())


@torch.no_grad()
def measure(world, policy, o, n: int) -> dict:
    """The base in both roles: {"validation", "tuning": attempts(...), "env": written(...)}."""
    out = {}
    for k, split in enumerate(("validation", "tuning")):
        generator = policy.generator(1000 + 3 * o.seed + k)
        tasks = world.validation_tasks(o, split)  # in some worlds sorted
        out[split] = attempts(world, policy, o, evenly(tasks, min(n, len(tasks))), generator)
    return {**out, "env": written(world, policy, o, n, policy.generator(1002 + 3 * o.seed))}


def evenly(tasks, n: int) -> list:
    """n of the tasks, equally spaced."""
    return [tasks[i * len(tasks) // n] for i in range(n)]


def attempts(world, policy, o, tasks, generator) -> dict:
    """G attempts at T = 1 at each task: shares of valid and of successful ones, and of groups that
    have both kinds, and p_hat counted from 0/G to G/G."""
    rollouts, texts = play(world, o, policy, None, tasks, o.G, 1.0, generator, o.max_rows)
    scores = [attempt_score(world, tasks[r.group], r, text) for r, text in zip(rollouts, texts)]
    rates = [curriculum.success_rate([r for r, _ in scores[b * o.G:(b + 1) * o.G]], o.success_at)
             for b in range(len(tasks))]  # Eq. 2
    counts = Counter(round(o.G * rate) for rate in rates)
    return {"tasks": len(tasks), "valid": sum(v for _, v in scores) / len(scores),
            "success": sum(rates) / len(rates), "mixed": sum(0 < p < 1 for p in rates) / len(rates),
            "p_hat": [counts[k] for k in range(o.G + 1)]}


def written(world, policy, o, n: int, generator) -> dict:
    """n tasks written for n base tasks: the share that a run would use, and why not the others."""
    base, held_out, seen = world.base_tasks(o), held_out_keys(world, o), set()
    seeds = evenly(base, n)
    prompts = [policy.encode(world.env_prompt(seed, None, o.alpha)) for seed in seeds]
    rollouts = policy.sample(None, prompts, 1, o.max_task_tokens, 1.0, generator, o.max_rows)
    reasons, texts = Counter(), []
    for seed, r in zip(seeds, rollouts):
        text = policy.decode(r.response)
        texts.append(text)
        try:
            task = written_task(world, r, text, seed, 0, held_out, policy.tokenizer)
            if task_keys(world, task) & seen:
                raise InvalidTask("duplicate in the batch")
            seen |= task_keys(world, task)
        except InvalidTask as reason:
            reasons[str(reason)] += 1
    return {"tasks": n, "valid": 1 - sum(reasons.values()) / n, "invalid": dict(reasons),
            "texts": texts[:16]}


def report_line(when: str, measured: dict) -> str:
    """A measurement as three lines."""
    lines = [f"{when}, {split} ({m['tasks']} tasks): valid {m['valid']:.2f}, success "
             f"{m['success']:.3f}, mixed groups {m['mixed']:.2f}, tasks by successes {m['p_hat']}"
             for split, m in measured.items() if split != "env"]
    env = measured["env"]
    why = ", ".join(f"{reason} {n}" for reason, n in Counter(env["invalid"]).most_common())
    return "\n".join([*lines, f"{when}, written tasks: valid {env['valid']:.2f} of {env['tasks']}"
                      + (f" ({why})" if why else "")])
