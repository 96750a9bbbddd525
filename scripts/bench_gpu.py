"""The 7B shape: an epoch of both updates, phase by phase, on one GPU.

    python -m scripts.bench_gpu                # one CUDA device; nothing is downloaded, weights are random
    python -m scripts.bench_gpu --tiny         # the same script, small, on a CPU

What of the paper this is: nothing; it measures the two updates of Algorithm 1.

The rollouts and the training pass are taken once more with the prompt repeated in every row (what TRL
and most peers do), through the same code. Rows that share no prompt are plain causal attention.
"""
import json
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from scripts.bench_models import QWEN_7B, qwen2_config, quiet, random_nf4, random_prompts, rewards_of, \
    small_config, word_tokenizer
from support.files import UserError
from grpo import grpo_update
from policy import Policy, split_groups
from support.options import Options
from rwr import rwr_update
from support.metrics import movement, peak_bytes

LEARNING_RATE, RANK = 1e-5, 16
SHAPES = {  # prompt, response tokens; the last of the 7B is 9,000 in all
    "7b": [(1024, 256), (4096, 512), (8488, 512)], "tiny": [(32, 8), (64, 16), (96, 8)]}
PROMPT_ROWS = {1024: 8, 4096: 2}  # prompts per step at a prompt length, else --prompts


def bench_gpu(o):
    """An epoch of both updates per shape, both layouts side by side. Writes a JSON file."""
    kind = "tiny" if o.tiny else "7b"
    if kind == "7b" and not torch.cuda.is_available():
        raise UserError("no CUDA device: --tiny runs a small model on the CPU, in seconds")
    if (o.prompt == 0) != (o.response == 0) or min(o.prompt, o.response) < 0 or o.prompts < 1:
        raise UserError("give --prompt and --response together, both positive, or neither")
    quiet()
    device, dtype = ("cuda", torch.bfloat16) if kind == "7b" else ("cpu", torch.float32)
    config = small_config(128, 2, 512) if o.tiny else qwen2_config(**QWEN_7B)
    tokenizer = word_tokenizer(config.vocab_size)
    measure = meter(torch.device(device))
    policy = measure("building the model", 0, lambda: Policy(
        random_nf4(config, device, dtype), tokenizer, rank=RANK))
    out = Path(o.out or f"bench/results/gpu-{kind}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {**machine(device), "model": "tiny" if o.tiny else "Qwen2.5-7B shape, random weights",
              "quantisation": "NF4, double", "dtype": str(dtype).removeprefix("torch."), "rank": RANK,
              "G": o.G, "building": measure.phases.popitem()[1], "shapes": []}
    if kind == "7b":
        run_shape(policy, o, 16, 4)  # warm-up: kernels are chosen and buffers made outside the clock
    for P, R in [(o.prompt, o.response)] if o.prompt else SHAPES[kind]:
        result["shapes"].append(run_shape(policy, o, P, R))
        out.write_text(json.dumps(result, indent=1) + "\n")  # after every shape: nothing gets lost
        print(markdown(result).splitlines()[-1], flush=True)
    print("\n" + markdown(result) + f"\n\nwritten to {out}")


def machine(device) -> dict:
    """What a number depends on: device, versions, date."""
    import bitsandbytes
    import peft
    import transformers
    name = torch.cuda.get_device_name() if device == "cuda" else \
        f"CPU, {torch.get_num_threads()} thread(s)"
    modules = (torch, transformers, peft, bitsandbytes)
    return {"device": name, "date": date.today().isoformat(),
            "versions": {m.__name__: m.__version__ for m in modules}}


def run_shape(policy, o, P, R) -> dict:
    """All phases at one prompt and response length -> {phase: seconds, tokens/s, peak}, ratios."""
    B, G, V = PROMPT_ROWS.get(P, o.prompts), o.G, policy.lm.config.vocab_size
    prompts, budget = random_prompts(B, P, V), max(o.token_budget, P + G * R)
    measure = meter(policy.device)
    rollouts, proof = run_epoch(policy, measure, prompts, G, R, budget)
    shape = {"prompt": P, "response": R, "prompts": B, "phases": measure.phases, "proof": proof}
    # the two layouts beside each other
    measure("rollouts, prompt repeated", B * G * R, lambda: policy.sample(
        "agent", [p for p in prompts for _ in range(G)], 1, R, 1.0, policy.generator(0)))
    single = [replace(r, group=i) for i, r in enumerate(rollouts)]
    for name, layout in (("once", rollouts), ("repeated", single)):
        measure(f"training pass, prompt {name}", B * G * R,
                lambda: training_pass(policy, layout, budget))
    seconds = {name: phase["seconds"] for name, phase in measure.phases.items()}
    speed_up = seconds["training pass, prompt repeated"] / seconds["training pass, prompt once"]
    limit = G * (P + R) / (P + G * R)
    return {**shape, "token_count_limit": limit, "training_speed_up": speed_up,
            "rollout_speed_up": seconds["rollouts, prompt repeated"] / seconds["agent rollouts"],
            "efficiency": speed_up / limit}


def run_epoch(policy, measure, prompts, G, R, budget):
    """The simulator writes, the agent tries, both learn: B prompts -> (B*G rollouts of the agent,
    proof of training).

    proof: {adapter: what its update returned, how far it moved, whether the other one did}.
    """
    tokens = len(prompts) * G * R
    optimizers = {name: policy.optimizer(name, LEARNING_RATE) for name in policy.params}
    train = Options(token_budget=budget, grad_checkpoint=True)
    sample = lambda name: policy.sample(name, prompts, G, R, 1.0, policy.generator(0))
    written = measure("simulator rollouts", tokens, lambda: sample("env"))
    rollouts = measure("agent rollouts", tokens, lambda: sample("agent"))
    written = [replace(r, group=i) for i, r in enumerate(written)]
    proof = {}
    with movement(policy.params, "agent") as moved:
        proof["agent"] = measure("agent update (GRPO)", tokens, lambda: grpo_update(
            policy, "agent", optimizers["agent"], rollouts, rewards_of(rollouts, G), train))
    proof["agent"].update(moved)
    with movement(policy.params, "env") as moved:
        proof["env"] = measure("simulator update (RWR)", tokens, lambda: rwr_update(
            policy, "env", optimizers["env"], written, torch.ones(len(written)),
            [list(range(len(written)))], written[:2], train))
    proof["env"].update(moved)
    return rollouts, proof


def meter(device):
    """A function measure(name, tokens, f) that runs f and notes time, tokens/s and peak memory.

    On a GPU the peak is what torch had allocated in the phase; else the most that the process ever
    held, Python and its libraries included.
    """
    def measure(name, tokens, f):
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started, cpu = time.perf_counter(), time.process_time()
        out = f()
        if on_gpu:
            torch.cuda.synchronize()
        seconds, peak = time.perf_counter() - started, peak_bytes(device)
        cpu = time.process_time() - cpu
        measure.phases[name] = {"seconds": seconds, "cpu_seconds": cpu, "peak_gb": peak / 1e9,
                                "response_tokens_per_s": tokens / seconds}
        print(f"{name}: {seconds:.1f} s ({cpu:.1f} s of CPU), peak {peak / 1e9:.2f} GB", flush=True)
        return out

    measure.phases = {}
    return measure


def training_pass(policy, rollouts, token_budget, checkpoint=True):
    """Forward and backward over all rollouts, gradients thrown away: what the layouts differ in."""
    with policy.use("agent"):
        for rows in split_groups(rollouts, token_budget):
            logp, mask = policy.logprobs([rollouts[i] for i in rows], 1.0, checkpoint)
            (logp * mask).sum().backward()
    for p in policy.params["agent"]:
        p.grad = None


def markdown(result) -> str:
    """The table of bench/README.md."""
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    phases = list(result["shapes"][0]["phases"])
    ratios = ["rollouts: once vs repeated", "training: once vs repeated", "token-count limit",
              "share of the limit"]
    lines = [f"{result['model']}, {result['quantisation']}, two adapters r={result['rank']}, "
             f"G = {result['G']}; {result['device']}, {result['dtype']}; {versions}; "
             f"{result['date']}. Each phase: seconds, response tokens/s, peak GB.", "",
             "| prompt / response | prompts | " + " | ".join(phases + ratios) + " |",
             "|" + "---|" * (2 + len(phases + ratios))]
    for s in result["shapes"]:
        cells = [f"{p['seconds']:.1f} s, {p['response_tokens_per_s']:.2g}/s, {p['peak_gb']:.1f} GB"
                 for p in s["phases"].values()]
        cells += [f"{s[name]:.2f}x" for name in ("rollout_speed_up", "training_speed_up",
                                                 "token_count_limit")]
        cells.append(f"{100 * s['efficiency']:.0f} %")
        lines.append(f"| {s['prompt']} / {s['response']} | {s['prompts']} | "
                     + " | ".join(cells) + " |")
    return "\n".join(lines)
