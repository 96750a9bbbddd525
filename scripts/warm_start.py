"""Warm start: a model that can neither read nor write tasks imitates base tasks in both roles.

Paper: nothing, its 7B instruct model does the format by itself. A small one writes no valid task and
solves none, so every group is without signal and both updates stand still.

Usage:
    python genenv.py warm-start --model M --base-tasks F --out DIR [options of a run]
    python genenv.py --world tool_calls --model DIR --base-tasks F ...

As the agent the model imitates the expected answers, as the simulator the tasks that it could have
written (`warm_start_pairs` of the world): passes of rwr.rwr_step with weights of 1 over one LoRA, by
AdamW with a falling rate. Then, in rounds, the simulator writes, and imitates what passes every check,
until ENOUGH of it is valid. Held-out tasks are never imitated. DIR becomes a model folder; warm_start.json
in it says how it went. The same command goes on after the last complete pass.

Deviations: the adapter is merged into the base, so that "adapters off" is the initial policy of both
players, and the reference, as always. A start that is too sharp is as bad as none: where attempts at a
task are all alike there is no gradient. So stop at the pass from which epoch 0 has most mixed groups.
"""
import json
import shlex
import shutil
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from support import checkpoint
from model.files import UserError, check_hub, write_whole
from support.health import counted
from support.options import Parser, at_least, parse_options
from worlds import held_out_keys, open_world, probe_texts, written_tasks

ADAPTER = "warm"
BATCH = 8           # responses in an optimiser step
RANK = 32           # of the LoRA that is merged
# steps over which the rate rises: AdamW's moments know nothing yet; share of it at the end and in the rounds
WARM_UP, LAST_RATE = 8, 0.2
TEXTS, ENOUGH = 128, 0.6  # what the simulator writes before a round; share of valid ones that ends the rounds
FEWEST = 5          # examples to imitate, in each role
STEPS = 48, 150     # that teach the form; with a list of tools each pass has other values to read


def main(argv) -> int:
    """The command `genenv.py warm-start`. Raises UserError, returns 0."""
    s, o, rest = parse(argv)
    world = open_world(o)
    need_pairs(world, world.warm_start_pairs(0))
    check_hub(o.model)
    with claim(Path(s.out)):
        print("loading torch and the model; if stopped, give it again: it keeps whole passes ...", flush=True)
        make(world, s, o, Path(s.out))
    go_on = "python", "genenv.py", *rest, "--model", s.out, "--out", f"{Path(s.out)}-run"
    print("go on with:", shlex.join(go_on))
    return 0


def parse(argv):
    """argv -> (options of the warm start, Options, the words that are a run's but --model)."""
    p = Parser(prog="genenv.py warm-start",
               epilog="and a run's options (python genenv.py --help): --base-tasks, --tools ...")
    p.add_argument("--out", required=True, help="folder that becomes the model")
    p.add_argument("--model", default="", help="folder or hub name of a chat model")
    p.add_argument("--passes", type=at_least(1), default=0, help="over the examples; else by their number")
    p.add_argument("--rounds", type=at_least(0), default=2, help="of imitating what it wrote, at most")
    p.add_argument("--lr", type=float, default=0, help="peak of a falling rate, else 1e-3, wide models 3e-4")
    s, rest = p.parse_known_args(argv)
    rest = ["--world", "tool_calls"] * (not any(w.startswith(("--world", "--preset")) for w in rest)) + rest
    o = parse_options(rest + ["--model", s.model] * bool(s.model), p)
    fault = "needs --model: the folder or hub name of a chat model" if not o.model else \
        "needs an --lr between 0 and 1" if not 0 <= s.lr < 1 else "takes no --env-model" * bool(o.env_model)
    if fault:
        raise UserError(f"warm-start {fault}")
    return s, o, rest


def claim(out: Path):
    """The lock of a folder that is new, or in which a warm start has not ended. Raises UserError."""
    if out.exists() and not (out / "warm_start").is_dir() and any(out.iterdir()):
        done = (out / "warm_start.json").is_file() and f"holds a warm start (a run can give --model {out}):"
        raise UserError(f"--out {out} {done or 'is not empty:'} choose another --out")
    (out / "warm_start").mkdir(parents=True, exist_ok=True)
    return checkpoint.lock_folder(out / "warm_start")


def make(world, s, o, out: Path):
    """Imitate, merge, write the model and its report into the claimed folder. Raises UserError."""
    import torch  # here and not above: mistakes are answered at once
    from policy import Policy
    from model.loading import policy_options
    torch.set_num_threads(o.threads or torch.get_num_threads())
    path = out / "warm_start" / "state.pt"
    settings = {**asdict(o), **vars(s), "out": "", "threads": 0, "files": checkpoint.hashes(o)}
    state = {"settings": settings, "nats": [], "rounds": [], "own": []}
    if path.is_file():
        state = checkpoint.read(path)
    if state["settings"] != settings:
        raise UserError(f"{out} holds a warm start with other settings or files: give these or another --out")
    policy = Policy.load(o.model, (ADAPTER,), **{**policy_options(o), "rank": RANK})
    probe_texts(world, policy)
    # measured with 576 and 1,536: with 1e-3 the larger model answers 25 of 35 requests instead of 32
    s.lr = s.lr or (3e-4 if policy.lm.config.get_text_config(decoder=True).hidden_size >= 1024 else 1e-3)
    s.passes = s.passes or passes_for(world, pairs_of_pass(world, policy, 0)[0])
    learn(world, policy, s, state, path)
    merge(policy, o, out)
    report = {"settings": settings, "nats_per_token": state["nats"], "rounds": state["rounds"]}
    write_whole(out / "warm_start.json", json.dumps(report, indent=1))
    shutil.rmtree(out / "warm_start")


# ---------------------------------------------------------------------------------------------
# what is imitated


def pairs_of_pass(world, policy, number: int):
    """({role: [Rollout]} of a pass: what is imitated, as far as a run would let the model say it; how many
    more there are). Raises UserError where that leaves a role too little."""
    every = world.warm_start_pairs(number)
    short = {role: [r for pair in pairs if within_limits(world, role, r := as_rollout(policy, *pair))]
             for role, pairs in every.items()}
    need_pairs(world, short, "within --max-{prompt,task,response}-tokens: raise these, or ")
    return short, sum(map(len, every.values())) - sum(map(len, short.values()))


def as_rollout(policy, prompt, response):
    """A prompt and a response as if the policy had drawn it; of an episode, a list of turns and
    observations in turn, the turns alone count as drawn."""
    from policy import Rollout
    texts = [response] if isinstance(response, str) else response
    ids = policy.encode_answer(prompt, texts[0]) + policy.end_of_turn
    drawn = [True] * len(ids)
    for i, text in enumerate(texts[1:], 1):
        is_turn = i % 2 == 0
        part = policy.encode(text) + policy.end_of_turn if is_turn else policy.encode_observation(text)
        ids += part
        drawn += [is_turn] * len(part)
    return Rollout(0, policy.encode(prompt), ids, drawn=drawn)


def within_limits(world, role, r) -> bool:
    """Whether a run would let the simulator, or the agent, say this much."""
    o = world.o
    said = o.max_task_tokens if role == "env" else world.max_episode_tokens or o.max_response_tokens
    return len(r.prompt) <= o.max_prompt_tokens and len(r.response) <= said


def need_pairs(world, pairs, found="there: "):
    """Raises UserError where a role has too little to imitate. found: where they are counted, and advice."""
    if not pairs:
        raise UserError(f"--world {world.o.world} has no warm start: a chat model plays it as it is")
    for role, some in pairs.items():
        if (number := min(len(some), len(world.base_tasks()))) < FEWEST:  # joined ones are no others
            raise UserError(f"{world.o.base_tasks or 'the base tasks'}: {FEWEST} examples to imitate as "
                            f"{role.replace('env', 'simulator')} are needed, {number} {found}give more")


def passes_for(world, pairs) -> int:
    """How many passes teach the form."""
    steps = -(-sum(map(len, pairs.values())) // BATCH)
    return world.warm_start_passes or min(max(2, -(-STEPS[bool(getattr(world, "tools", ()))] // steps)), 10)


# ---------------------------------------------------------------------------------------------
# how


def learn(world, policy, s, state: dict, path: Path):
    """All passes and rounds that `state` does not have yet: "nats" per token of each, "rounds": what was
    written before each, "own": the valid of it. path: where it is kept, with adapter and optimiser."""
    import torch
    from policy import Rollout
    optimizer, params, seed = policy.optimizer(ADAPTER, s.lr), policy.params[ADAPTER], 1000 * world.o.seed
    if "adapter" in state:
        optimizer.load_state_dict(state["optimizer"])
        for p, value in zip(params, state["adapter"], strict=True):
            p.data.copy_(value)
    for n in range(len(state["nats"]), s.passes + s.rounds + 1):
        if n >= s.passes and s.rounds:
            print(f"the simulator writes {TEXTS} texts, for minutes on a CPU ...", flush=True)
            report, valid = write(world, policy, n)
            state["rounds"].append(report)
            state["own"] += valid
            print(f"{report['valid']:.2f} are valid; refused: {counted(report['invalid'])}", flush=True)
        if n == s.passes + s.rounds or state["rounds"] and state["rounds"][-1]["valid"] >= ENOUGH:
            return
        (given, lost), own = pairs_of_pass(world, policy, n), [Rollout(0, *pair) for pair in state["own"]]
        pairs = sum(given.values(), own)  # the examples keep the agent's role as well
        name = f"pass {n + 1} of {s.passes}" if n < s.passes else f"round {n + 1 - s.passes} of {s.rounds}"
        print(f"{name}: imitates {len(given['agent'])} answers, {len(given['env'])} tasks"
              + f", {len(own)} texts of its own" * bool(own) + f" in {-(-len(pairs) // BATCH)} steps"
              + f"; leaves out {lost} longer than --max-...-tokens" * bool(lost), flush=True)
        began = time.time()
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed + n)).tolist()
        state["nats"].append(imitate(policy, optimizer, [pairs[i] for i in order], s, world.o, n))
        took = time.time() - began
        left = f"; the other passes take {took * (s.passes - n - 1) / 60:.1f} min" * (n + 1 < s.passes)
        print(f"  loss {state['nats'][-1]:.3f} nats per token, {took:.0f} s{left}", flush=True)
        state |= {"adapter": [p.detach() for p in params], "optimizer": optimizer.state_dict()}
        checkpoint.write(path, state)


def imitate(policy, optimizer, pairs, s, o, n: int) -> float:
    """Pass n over the pairs; returns the mean negative log-likelihood, in nats per token."""
    import torch
    from tqdm import tqdm
    from rwr import rwr_step
    batches, losses = [pairs[k:k + BATCH] for k in range(0, len(pairs), BATCH)], []
    for step, batch in enumerate(tqdm(batches, f"pass {n + 1}", leave=False, mininterval=10)):
        done = n + step / len(batches)
        rate = max(LAST_RATE, 1 - done / s.passes) * min((n * len(batches) + step + 1) / WARM_UP, 1)
        for group in optimizer.param_groups:
            group["lr"] = s.lr * rate
        with policy.use(ADAPTER):
            losses.append(rwr_step(policy, ADAPTER, optimizer, batch, torch.ones(len(batch)), o)[0])
    return sum(losses) / len(losses)


def write(world, policy, n: int):
    """What the simulator writes now, for base tasks drawn at random: ({"valid": share of TEXTS, "invalid":
    {reason: how many}, "texts": all}, [[prompt, response] of each valid text, as ids])."""
    import torch
    o, base, draw = world.o, world.base_tasks(), torch.Generator().manual_seed(1000 * world.o.seed + n)
    seeds = [world.seed_for(base[i], draw) for i in torch.randint(len(base), (TEXTS,), generator=draw)]
    prompts = [policy.encode(world.env_prompt(task, None)) for task in seeds]
    rollouts = policy.sample(ADAPTER, prompts, 1, o.max_task_tokens, o.temperature,
                             policy.generator(1000 * o.seed + n), max_rows=o.max_rows)
    read = list(written_tasks(world, o, [policy], rollouts, seeds, 0, held_out_keys(world)))
    valid = [[r.prompt, r.response] for r, _, task, _ in read if task]
    return {"valid": len(valid) / TEXTS, "texts": [text for _, text, *_ in read],
            "invalid": dict(Counter(reason for *_, reason in read if reason).most_common())}, valid


def merge(policy, o, out: Path):
    """Add the adapter to the base and save a model folder, in the base's own 16 or 32 bits."""
    import torch
    from peft import PeftModel
    from model.loading import load_model
    policy.save_adapters(out / "warm_start" / "adapters")
    # summed in fp32 and rounded once, with the weights as they were before any quantisation
    lm, tokenizer = load_model(o.model, None, "fp32", "cpu")
    merged = PeftModel.from_pretrained(lm, str(out / "warm_start" / "adapters" / ADAPTER)).merge_and_unload()
    merged.to(torch.bfloat16 if o.quant else policy.lm.dtype).save_pretrained(out)
    tokenizer.save_pretrained(out)
