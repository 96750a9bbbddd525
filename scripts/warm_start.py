"""Warm start: a model that can neither read nor write tasks imitates base tasks in both roles.

Paper: nothing, its 7B instruct model does the format by itself. A small one writes no valid task
and solves none, so every group is without signal and both updates stand still.

Usage:
    python genenv.py warm-start --model M --base-tasks F --out DIR [options of a run]
    python genenv.py --world tool_calls --model DIR --base-tasks F ...

As the agent the model imitates the expected answers, as the simulator the tasks that it could have
written (`warm_start_pairs` of the world): passes of rwr.rwr_step with weights of 1 over one LoRA,
by AdamW with a falling rate. Then, in rounds, the simulator writes, and imitates what passes every
check, until ENOUGH of it is valid. Held-out tasks are never imitated. DIR becomes a model folder;
warm_start.json in it says how it went. The same command goes on after the last complete pass.

Deviations: the adapter is merged into the base, so that "adapters off" is the initial policy of
both players, and the reference, as always. A start that is too sharp is as bad as none: where
attempts at a task are all alike there is no gradient. So stop at the pass from which epoch 0 has
most mixed groups.
"""
import json
import math
import shlex
import shutil
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from support import checkpoint
from model.files import UserError, check_model, one_line, write_whole
from support.health import counted
from support.options import Parser, at_least, parse_options
from worlds import check_texts_survive, held_out_keys, open_world, written_tasks

ADAPTER = "warm"
BATCH = 8           # responses in an optimiser step
RANK = 32           # of the LoRA that is merged
WARM_UP = 8         # steps over which the rate rises: AdamW's moments know nothing yet
LAST_RATE = 0.2     # share of the rate at the end of the passes, and in the rounds
TEXTS = 128         # what the simulator writes before a round
ENOUGH = 0.6        # share of valid texts that ends the rounds
FEWEST = 5          # examples to imitate, in each role
FORM_STEPS = 48     # steps that teach the form
LIST_STEPS = 150    # with a list of tools: each pass has other values to read
FEWEST_PASSES, MOST_PASSES = 2, 10
WIDE = 1024         # hidden size of a wide model, which takes a lower rate
# measured with 576 and 1,536: with 1e-3 the larger model answers 25 of 35 requests instead of 32
RATE, WIDE_RATE = 1e-3, 3e-4


def main(argv) -> int:
    """The command `genenv.py warm-start`. Raises UserError, returns 0."""
    s, o, rest = parse(argv)
    world = open_world(o)
    need_pairs(world, world.warm_start_pairs(0))
    check_model(o.model)
    with claim(Path(s.out)):
        print("loading the model; if stopped, give it again: it keeps whole passes ...", flush=True)
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
    p.add_argument("--passes", type=at_least(1), default=0,
                   help="over the examples; else by their number")
    p.add_argument("--rounds", type=at_least(0), default=2,
                   help="of imitating what it wrote, at most")
    p.add_argument("--lr", type=float, default=0,
                   help="peak of a falling rate, else 1e-3, wide models 3e-4")
    s, rest = p.parse_known_args(argv)
    if not any(word.startswith(("--world", "--preset")) for word in rest):
        rest = ["--world", "tool_calls", *rest]
    model = []
    if s.model:
        model = ["--model", s.model]
    o = parse_options(rest + model, p)
    if not o.model:
        raise UserError("warm-start needs --model: the folder or hub name of a chat model")
    if not 0 <= s.lr < 1:
        raise UserError("warm-start needs an --lr between 0 and 1")
    if o.env_model:
        raise UserError("warm-start takes no --env-model")
    return s, o, rest


def claim(out: Path):
    """The lock of a folder that is new, or in which a warm start has not ended. Raises
    UserError."""
    if (out / "warm_start.json").is_file():
        raise UserError(f"--out {out} holds a warm start (a run can give --model {out}): "
                        "choose another --out")
    unfinished = (out / "warm_start").is_dir()
    if out.exists() and not unfinished and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty: choose another --out")
    (out / "warm_start").mkdir(parents=True, exist_ok=True)
    return checkpoint.lock_folder(out / "warm_start")


def make(world, s, o, out: Path):
    """Imitate, merge, write the model and its report into the claimed folder. Raises UserError."""
    import torch  # here and not above: mistakes are answered at once
    from policy import Policy
    from model.loading import policy_options
    torch.set_num_threads(o.threads or torch.get_num_threads())

    # what was done before a stop, if these are the same settings
    path = out / "warm_start" / "state.pt"
    settings = {**asdict(o), **vars(s), "out": "", "threads": 0, "files": checkpoint.hashes(o)}
    state = {"settings": settings, "nats": [], "rounds": [], "own": []}
    if path.is_file():
        state = checkpoint.read(path)
    if state["settings"] != settings:
        raise UserError(f"{out} holds a warm start with other settings or files: "
                        "give these or another --out")

    # the model, and what was left for us to choose
    policy = Policy.load(o.model, (ADAPTER,), **{**policy_options(o), "rank": RANK})
    check_texts_survive(world, policy)
    if not s.lr:
        width = policy.lm.config.get_text_config(decoder=True).hidden_size
        s.lr = WIDE_RATE if width >= WIDE else RATE
    if not s.passes:
        pairs, _ = pairs_of_pass(world, policy, 0)
        s.passes = passes_for(world, pairs)

    Learner(world, policy, s, state, path).learn()
    merge(policy, o, out)
    report = {"settings": settings, "nats_per_token": state["nats"], "rounds": state["rounds"]}
    write_whole(out / "warm_start.json", json.dumps(report, indent=1))
    shutil.rmtree(out / "warm_start")


# ---------------------------------------------------------------------------------------------
# what is imitated


def pairs_of_pass(world, policy, number: int):
    """({role: [Rollout]} of a pass: what is imitated, as far as a run would let the model say it;
    how many more there are). Raises UserError where that leaves a role too little."""
    usable, too_long = {}, 0
    for role, pairs in world.warm_start_pairs(number).items():
        usable[role] = []
        for prompt, response in pairs:
            rollout = as_rollout(policy, prompt, response)
            if within_limits(world, role, rollout):
                usable[role].append(rollout)
            else:
                too_long += 1
    need_pairs(world, usable, "within --max-{prompt,task,response}-tokens: raise these, or ")
    return usable, too_long


def as_rollout(policy, prompt, response):
    """A prompt and a response as if the policy had drawn it; of an episode, a list of turns and
    observations in turn, the turns alone count as drawn."""
    from policy import Rollout
    texts = [response] if isinstance(response, str) else response
    ids = policy.encode_answer(prompt, texts[0]) + policy.end_of_turn
    drawn = [True for _ in ids]
    for i, text in enumerate(texts[1:], 1):
        is_turn = i % 2 == 0
        if is_turn:
            part = policy.encode(text) + policy.end_of_turn
        else:
            part = policy.encode_observation(text)
        ids += part
        drawn += [is_turn for _ in part]
    return Rollout(0, policy.encode(prompt), ids, drawn=drawn)


def within_limits(world, role, rollout) -> bool:
    """Whether a run would let the simulator, or the agent, say this much."""
    o = world.o
    if role == "env":
        longest = o.max_task_tokens
    else:
        longest = world.max_episode_tokens or o.max_response_tokens
    return len(rollout.prompt) <= o.max_prompt_tokens and len(rollout.response) <= longest


def need_pairs(world, pairs, where="there: "):
    """Raises UserError where a role has too little to imitate. where: they are counted, and
    advice."""
    if not pairs:
        raise UserError(f"--world {world.o.world} has no warm start: "
                        "a chat model plays it as it is")
    file = world.o.base_tasks or "the base tasks"
    for role, of_role in pairs.items():
        number = min(len(of_role), len(world.base_tasks()))  # joined ones are no others
        if number < FEWEST:
            name = role.replace("env", "simulator")
            raise UserError(f"{file}: {FEWEST} examples to imitate as {name} are needed, "
                            f"{number} {where}give more")


def passes_for(world, pairs) -> int:
    """How many passes teach the form."""
    if world.warm_start_passes:
        return world.warm_start_passes
    steps = FORM_STEPS
    if getattr(world, "tools", ()):
        steps = LIST_STEPS
    steps_of_a_pass = math.ceil(sum(map(len, pairs.values())) / BATCH)
    return min(max(FEWEST_PASSES, math.ceil(steps / steps_of_a_pass)), MOST_PASSES)


# ---------------------------------------------------------------------------------------------
# how


class Learner:
    """Passes over the examples, then rounds over what the simulator writes; each is kept as it
    ends.

    s: the options of the warm start. state: "nats" per token of each pass and round, "rounds":
    what was written before each round, "own": the valid of it. path: where it is kept, with
    adapter and optimiser.
    """

    def __init__(self, world, policy, s, state: dict, path: Path):
        self.world, self.policy, self.s, self.state, self.path = world, policy, s, state, path
        self.params = policy.params[ADAPTER]
        self.optimizer = policy.optimizer(ADAPTER, s.lr)
        if "adapter" in state:
            self.optimizer.load_state_dict(state["optimizer"])
            for p, value in zip(self.params, state["adapter"], strict=True):
                p.data.copy_(value)

    def learn(self):
        """All passes and rounds that `state` does not have yet."""
        passes, rounds = self.s.passes, self.s.rounds
        for n in range(len(self.state["nats"]), passes):
            self.imitate_pass(n, f"pass {n + 1} of {passes}")
        if not rounds:
            return
        for n in range(len(self.state["nats"]), passes + rounds):
            if self.write_round(n) >= ENOUGH:
                return
            self.imitate_pass(n, f"round {n + 1 - passes} of {rounds}")
        self.write_round(passes + rounds)  # what the last round has made of it

    def imitate_pass(self, n: int, name: str):
        """Pass number n over the examples and what the simulator wrote, in random order."""
        import torch
        from policy import Rollout
        examples, too_long = pairs_of_pass(self.world, self.policy, n)
        own = [Rollout(0, *pair) for pair in self.state["own"]]
        pairs = sum(examples.values(), own)  # the examples keep the agent's role as well
        steps = math.ceil(len(pairs) / BATCH)
        print(f"{name}: imitates {len(examples['agent'])} answers, {len(examples['env'])} tasks, "
              f"{len(own)} texts of its own in {steps} steps", flush=True)
        if too_long:
            print(f"  leaves out {too_long} longer than --max-...-tokens", flush=True)

        began = time.time()
        generator = torch.Generator().manual_seed(1000 * self.world.o.seed + n)
        order = torch.randperm(len(pairs), generator=generator).tolist()
        pairs = [pairs[i] for i in order]
        nats = imitate(self.policy, self.optimizer, pairs, self.s, self.world.o, n)
        took = time.time() - began
        print(f"  loss {nats:.3f} nats per token, {took:.0f} s", flush=True)
        if n + 1 < self.s.passes:
            left = took * (self.s.passes - n - 1)
            print(f"  the other passes take {left / 60:.1f} min", flush=True)

        self.state["nats"].append(nats)
        self.state["adapter"] = [p.detach() for p in self.params]
        self.state["optimizer"] = self.optimizer.state_dict()
        checkpoint.write(self.path, self.state)

    def write_round(self, n: int) -> float:
        """What the simulator writes now is kept for the next pass; returns the share that is
        valid."""
        print(f"the simulator writes {TEXTS} texts, for minutes on a CPU ...", flush=True)
        report, valid = write(self.world, self.policy, n)
        self.state["rounds"].append(report)
        self.state["own"] += valid
        print(f"{report['valid']:.2f} are valid; refused: {counted(report['invalid'])}", flush=True)
        return report["valid"]


def imitate(policy, optimizer, pairs, s, o, n: int) -> float:
    """Pass n over the pairs; returns the mean negative log-likelihood, in nats per token."""
    import torch
    from tqdm import tqdm
    from rwr import rwr_step
    batches = [pairs[k:k + BATCH] for k in range(0, len(pairs), BATCH)]
    losses = []
    # disable=None: no bar where it would end up in a log
    bar = tqdm(batches, f"pass {n + 1}", leave=False, mininterval=10, disable=None)
    for step, batch in enumerate(bar):
        done = n + step / len(batches)
        falling = max(LAST_RATE, 1 - done / s.passes)
        rising = min((n * len(batches) + step + 1) / WARM_UP, 1)
        for group in optimizer.param_groups:
            group["lr"] = s.lr * (falling * rising)
        with policy.use(ADAPTER):
            loss, _ = rwr_step(policy, ADAPTER, optimizer, batch, torch.ones(len(batch)), o)
        losses.append(loss)
    return sum(losses) / len(losses)


def write(world, policy, n: int):
    """What the simulator writes now, for base tasks drawn at random: ({"valid": share of TEXTS,
    "invalid": {reason: how many}, "texts": all}, [[prompt, response] of each valid text, as
    ids])."""
    import torch
    o, base = world.o, world.base_tasks()
    generator = torch.Generator().manual_seed(1000 * o.seed + n)
    picks = torch.randint(len(base), (TEXTS,), generator=generator).tolist()
    seeds = [world.seed_for(base[i], generator) for i in picks]
    prompts = [policy.encode(world.env_prompt(task, None)) for task in seeds]
    rollouts = policy.sample(ADAPTER, prompts, 1, o.max_task_tokens, o.temperature,
                             policy.generator(1000 * o.seed + n), max_rows=o.max_rows)
    texts, valid, reasons = [], [], Counter()
    for rollout, text, task, reason in written_tasks(world, o, [policy], rollouts, seeds, 0,
                                                     held_out_keys(world)):
        texts.append(text)
        if task:
            valid.append([rollout.prompt, rollout.response])
        else:
            reasons[reason] += 1
    report = {"valid": len(valid) / TEXTS, "texts": texts, "invalid": dict(reasons.most_common())}
    return report, valid


def merge(policy, o, out: Path):
    """Add the adapter to the base and save a model folder, in the base's own 16 or 32 bits."""
    import torch
    from peft import PeftModel
    from model.loading import load_model
    adapters = out / "warm_start" / "adapters"
    policy.save_adapters(adapters)
    # summed in fp32 and rounded once, with the weights as they were before any quantisation
    lm, tokenizer = load_model(o.model, None, "fp32", "cpu")
    merged = PeftModel.from_pretrained(lm, str(adapters / ADAPTER)).merge_and_unload()
    dtype = torch.bfloat16 if o.quant else policy.lm.dtype
    # on a full disk safetensors raises an error of its own
    with one_line(out, "cannot be written, the same command goes on with it"):
        merged.to(dtype).save_pretrained(out)
        tokenizer.save_pretrained(out)
