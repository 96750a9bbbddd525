"""Speed and memory of an epoch's phases on one GPU, for models of a stated shape.

Usage:
    python -m scripts.bench_gpu                 # 7B in NF4 and in bf16, and 135M; some four minutes
    python -m scripts.bench_gpu --tiny          # the same script, small, on a CPU

Nothing is downloaded: the weights are random, and speed does not depend on them. Prints what it
measures, and writes it to a JSON file.
"""
import json
import sys
import time
from pathlib import Path

import torch

from data_pool import EnvRecord
from grpo import grpo_update
from policy import Policy
from rwr import rwr_update
from model.files import UserError, exit_code
from support.metrics import peak_memory
from support.options import Options, Parser
from worlds.tiny_model import word_tokenizer

QWEN_7B = dict(hidden=3584, layers=28, vocab=152064, heads=28, kv_heads=4, intermediate=18944)
SMOL_135M = dict(hidden=576, layers=30, vocab=49152, heads=9, kv_heads=3, intermediate=1536)
SMALL = dict(hidden=128, layers=2, vocab=512, heads=2, kv_heads=1, intermediate=512)
SHAPES = {"7B NF4": (QWEN_7B, True), "7B bf16": (QWEN_7B, False), "135M bf16": (SMOL_135M, False)}
LEARNING_RATE, RANK, G = 1e-5, 16, 8


# ---------------------------------------------------------------------------------------------
# random models


def qwen2_config(hidden, layers, vocab, heads, kv_heads, intermediate):
    """A Qwen2 shape; the tokenizer's end-of-sequence id is one past the vocabulary: never sampled."""
    from transformers import Qwen2Config
    return Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, vocab_size=vocab, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=intermediate, max_position_embeddings=32768,
        tie_word_embeddings=False, bos_token_id=None, pad_token_id=None, eos_token_id=None)


def random_model(config, device, dtype, nf4):
    """A random Qwen2 in `dtype`, the linear layers of its blocks NF4 if asked."""
    from transformers import AutoModelForCausalLM
    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False)
    for name, module in list(lm.model.layers.named_modules()):
        if nf4 and isinstance(module, torch.nn.Linear):
            lm.model.layers.set_submodule(name, nf4_linear(module, device, dtype))
    lm.is_loaded_in_4bit = nf4  # as the library's loader marks it; PEFT asks
    return lm


def nf4_linear(linear, device, dtype):
    """The 4-bit copy of a linear layer, with double quantisation."""
    import bitsandbytes as bnb
    settings = dict(quant_type="nf4", compress_statistics=True)
    out = bnb.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None,
                            compute_dtype=dtype, device="meta", **settings)
    out.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, **settings).to(device)
    out.bias = linear.bias
    return out


def tokenizer_for(vocab):
    """One word per id, so that prompts of an exact length can be handed over as text."""
    return word_tokenizer(["<pad>", *(f"w{i}" for i in range(1, vocab)), "<eos>"])


def random_prompts(count, length, vocab, seed=0):
    """count lists of `length` ids."""
    return torch.randint(vocab, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def reward_of(ids) -> float:
    """Share of even ids: cheap, and hardly ever the same for all of a group."""
    return sum(i % 2 == 0 for i in ids) / len(ids)


def rewards_of(rollouts, G):
    """(B, G) rewards of B groups of G rollouts, one group after the other."""
    return torch.tensor([reward_of(r.response) for r in rollouts]).view(-1, G)


# ---------------------------------------------------------------------------------------------
# what is measured


def phase(row, device, name, tokens, f):
    """f(), its seconds, tokens/s and peak memory noted in row[name]."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    with peak_memory(peaks := {}, name):
        out = f()
        wait()
    seconds = time.perf_counter() - started
    row[name] = {"seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds),
                 "peak_gb": round(peaks[name] / 1e9, 2)}
    print(f"  {name}: {row[name]}", flush=True)
    return out


def bench_shape(shape, nf4, device, dtype, B, P, R) -> dict:
    """Rollouts, then both updates on the same B prompts of P tokens with G responses of R each ->
    {phase: figures}."""
    config, row = qwen2_config(**shape), {}
    policy = Policy(random_model(config, device, dtype, nf4), tokenizer_for(config.vocab_size), rank=RANK)
    for p in sum(policy.params.values(), []):
        torch.nn.init.normal_(p.data, std=0.02)  # adapters that do something
    prompts, tokens = random_prompts(B, P, config.vocab_size), B * G * R
    sample = lambda T=R: policy.sample("agent", prompts, G, T, 1.0, policy.generator(0))
    sample(40)  # the first call starts kernels and libraries
    rollouts = phase(row, policy.device, "rollouts", tokens, sample)
    optimizers = {name: policy.optimizer(name, LEARNING_RATE) for name in policy.params}
    o = Options(token_budget=max(8192, P + G * R), env_batch=B * G, env_passes=1)
    row["agent"] = phase(row, policy.device, "agent update (GRPO)", tokens, lambda: grpo_update(
        policy, "agent", optimizers["agent"], rollouts, rewards_of(rollouts, G), o))
    records = [EnvRecord(r.prompt, r.response, "", "", [], "", r.group) for r in rollouts]
    # one step of RWR on all the texts, its KL measured on two of them
    row["env"] = phase(row, policy.device, "simulator update (RWR)", tokens, lambda: rwr_update(
        policy, "env", optimizers["env"], records, [], rollouts[:2], o))
    return row


def main(argv) -> int:
    """Measure all shapes one after the other; what is done is on disk after each."""
    p = Parser(prog="python -m scripts.bench_gpu", description=__doc__)
    p.add_argument("--tiny", action="store_true", help="a small model on the CPU: tests the script")
    p.add_argument("--out", default="", help="JSON file; empty: results/gpu.json")
    args = p.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        raise UserError("no CUDA device: --tiny runs a small model on the CPU, in seconds")
    device, dtype = ("cpu", torch.float32) if args.tiny else ("cuda", torch.bfloat16)
    B, P, R = (2, 160, 48) if args.tiny else (8, 1024, 256)
    result = {"device": "CPU" if args.tiny else torch.cuda.get_device_name(),
              "prompts": f"{B} prompts of {P} tokens, G = {G}, responses of {R}", "models": {}}
    for name, (shape, nf4) in ({"tiny": (SMALL, True)} if args.tiny else SHAPES).items():
        print(name, flush=True)
        result["models"][name] = bench_shape(shape, nf4, device, dtype, B, P, R)
        Path(args.out or "results/gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:]), "bench_gpu"))
