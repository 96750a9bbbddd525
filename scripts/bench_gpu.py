"""Speed and memory on one GPU: the phases of an epoch, and what a token costs.

Paper: not in it; its two 7B policies had many cards.

Usage:
    python -m scripts.bench_gpu                 # 7B in NF4, bf16 and fp32, and 135M
    python -m scripts.bench_gpu --compile       # and the decoding step compiled: faster? same
    tokens? python -m scripts.bench_gpu --preset 7b-80gb  # an epoch of two steps, of the sizes of a
    preset python -m scripts.bench_gpu --tiny          # the same script, small, on a CPU

Nothing is downloaded: the weights are random, of the scale of trained ones, and speed does not
depend on them. Prints what it measures, at last as one JSON line, which --out keeps in a file.

Deviations: MBU, the share of the card's bandwidth, counts weights, keys and values once a token.
Prompts have P tokens and responses their greatest length, as random weights end none. Every text of
the simulator counts as a task that is imitated.
"""
import json
import sys
import time
from pathlib import Path

import torch

from data_pool import EnvRecord
from genenv import REPLAY
from grpo import grpo_update
from model.files import UserError, exit_code
from policy import Decoder, Policy
from rwr import rwr_update
from support.metrics import peak_memory
from support.options import PRESETS, Options, Parser
from worlds.tiny_model import word_tokenizer

QWEN_7B = dict(hidden=3584, layers=28, vocab=152064, heads=28, kv_heads=4, intermediate=18944)
SMOL_135M = dict(hidden=576, layers=30, vocab=49152, heads=9, kv_heads=3, intermediate=1536)
SMALL = dict(hidden=128, layers=2, vocab=512, heads=2, kv_heads=1, intermediate=512)
SHAPES = {  # {name: (shape, whether in NF4, dtype)}
    "7B NF4": (QWEN_7B, True, torch.bfloat16), "7B bf16": (QWEN_7B, False, torch.bfloat16),
    "7B fp32": (QWEN_7B, False, torch.float32), "135M bf16": (SMOL_135M, False, torch.bfloat16)}
LEARNING_RATE, RANK, G = 1e-5, 16, 8


# ---------------------------------------------------------------------------------------------
# random models


def qwen2_config(hidden, layers, vocab, heads, kv_heads, intermediate):
    """A Qwen2 shape; the tokenizer's end-of-sequence id is one past the vocabulary: never
    sampled."""
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
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count, length), generator=generator).tolist()


def reward_of(ids) -> float:
    """Share of even ids: cheap, and hardly ever the same for all of a group."""
    return sum(i % 2 == 0 for i in ids) / len(ids)


def rewards_of(rollouts, G):
    """(B, G) rewards of B groups of G rollouts, one group after the other."""
    return torch.tensor([reward_of(r.response) for r in rollouts]).view(-1, G)


# ---------------------------------------------------------------------------------------------
# what is measured


class Bench:
    """A model of random weights, and a row of figures that grows. P: tokens of a prompt."""

    def __init__(self, shape, nf4, dtype, device, P):
        config = qwen2_config(**shape)
        lm = random_model(config, device, dtype, nf4)
        self.policy = Policy(lm, tokenizer_for(config.vocab_size), rank=RANK)
        for p in sum(self.policy.params.values(), []):
            torch.nn.init.normal_(p.data, std=0.02)  # adapters that do something
        self.P, self.row = P, {}

    def timed(self, name, tokens, f):
        """f(), its seconds, tokens, tokens/s and peak memory noted in the row."""
        peaks = {}
        self.wait()
        started = time.perf_counter()
        with peak_memory(peaks, name):
            result = f()
            self.wait()
        seconds = time.perf_counter() - started
        self.note(name, {"seconds": round(seconds, 3), "tokens": tokens,
                         "tokens_per_s": round(tokens / seconds),
                         "peak_gb": round(peaks[name] / 1e9, 2)})
        return result

    def wait(self):
        """Until a GPU has done what it was given."""
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize()

    def note(self, name, figures):
        """Keep and print figures."""
        self.row[name] = figures
        print(f"  {name}: {figures}", flush=True)

    def sample(self, B, G, T, adapter="agent", temperature=1.0, max_rows=10 ** 6):
        """G rollouts of T tokens to each of B prompts."""
        prompts = random_prompts(B, self.P, self.policy.lm.config.vocab_size)
        generator = self.policy.generator(0)
        return self.policy.sample(adapter, prompts, G, T, temperature, generator, max_rows=max_rows)

    def epoch(self, o, B):
        """The phases of an epoch, of the sizes that the options say: in each step the simulator
        writes, the agent attempts B tasks and learns; then the simulator learns from all texts."""
        policy, records = self.policy, []
        optimizers = {name: policy.optimizer(name, LEARNING_RATE) for name in policy.params}
        for step in range(o.steps):
            tokens = o.seed_tasks * o.variations * o.max_task_tokens
            texts = self.timed(f"simulator rollouts {step}", tokens, lambda: self.sample(
                o.seed_tasks, o.variations, o.max_task_tokens, "env", max_rows=o.max_rows))
            records += [EnvRecord(r.prompt, r.response, "", "", [], "", r.group) for r in texts]
            tokens = B * o.G * o.max_response_tokens
            rollouts = self.timed(f"agent rollouts {step}", tokens, lambda: self.sample(
                B, o.G, o.max_response_tokens, max_rows=o.max_rows))
            rewards = rewards_of(rollouts, o.G)
            self.row["agent"] = self.timed(f"agent update {step}", tokens, lambda: grpo_update(
                policy, "agent", optimizers["agent"], rollouts, rewards, o))
        tokens = len(records) * o.max_task_tokens * o.env_passes
        self.row["env"] = self.timed("simulator update", tokens, lambda: rwr_update(
            policy, "env", optimizers["env"], records, [], texts[:o.variations], o))

    def mismatch(self, B, T):
        """Nats a token between sampler and scorer, as in a run and without recorded steps."""
        usual = self.policy.decoder
        for decoder in {usual, Decoder}:
            self.policy.decoder = decoder
            gaps = []
            for r in self.sample(B, 1, T):
                with self.policy.use("agent"), torch.no_grad():
                    logp, _ = self.policy.logprobs([r])
                gaps.append((logp[0].cpu() - torch.tensor(r.logps)).abs())
            gap = float(torch.cat(gaps).mean())
            self.note(f"mismatch, {decoder.__name__}", round(gap, 6))
        self.policy.decoder = usual

    def token_cost(self, B, T, name=""):
        """Milliseconds a token of B prompts with G rollouts each, prompts included, and MBU."""
        self.wait()
        started = time.perf_counter()
        self.sample(B, G, T)
        self.wait()
        seconds = (time.perf_counter() - started) / T
        figures = {"ms a token": round(1000 * seconds, 2)}
        if self.policy.device.type == "cuda":
            card = torch.cuda.get_device_properties(self.policy.device)
            # two transfers a clock (kHz), so many bits each
            bandwidth = 2 * card.memory_clock_rate * 1000 * card.memory_bus_width / 8
            figures["MBU"] = round(self.bytes_read(B, T) / seconds / bandwidth, 3)
        self.note(f"{B * G} rows {name}".strip(), figures)

    def bytes_read(self, B, T) -> int:
        """What one token needs of the memory: all weights but the embeddings, and the keys and
        values of the prompts and of responses that are half done."""
        config, table = self.policy.lm.config, self.policy.lm.get_input_embeddings().weight
        weights = sum(p.numel() * p.element_size() for p in self.policy.lm.parameters())
        head_dim = config.hidden_size // config.num_attention_heads
        per_key = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
        numbers = B * (self.P + G * T // 2) * per_key - table.numel()
        return weights + numbers * table.element_size()

    def compiled(self, B, T):
        """The blocks compiled: the same tokens? faster?"""
        plain = [r.response for r in self.sample(B, G, T, temperature=0)]
        for block in self.policy.blocks:
            block.compile(mode="max-autotune-no-cudagraphs")
        alike = [r.response for r in self.sample(B, G, T, temperature=0)] == plain
        self.note("compiled, same tokens", alike)
        self.token_cost(B, T, "compiled")


def main(argv) -> int:
    """Measure all shapes one after the other; what is done is on disk after each."""
    p = Parser(prog="python -m scripts.bench_gpu", description=__doc__)
    p.add_argument("--tiny", action="store_true", help="a small model on the CPU: tests the script")
    p.add_argument("--preset", default="", choices=["7b-24gb", "7b-80gb"],
                   help="an epoch of its sizes")
    p.add_argument("--compile", action="store_true", help="also the decoding step compiled")
    p.add_argument("--out", default="results/gpu.json", help="JSON file")
    args = p.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        raise UserError("no CUDA device: --tiny runs a small model on the CPU, in seconds")

    # sizes: those of a preset, or small ones
    P, T, groups = 1024, 256, (8, 16, 32, 72)
    if args.tiny:
        P, T, groups = 160, 16, (2, 4)
    B = groups[0]
    sizes = {"seed_tasks": B, "variations": G, "env_batch": B * G, "token_budget": 8192, "steps": 1}
    if args.preset:
        known = vars(Options())
        sizes = {name: value for name, value in PRESETS[args.preset].items() if name in known}
        sizes["steps"] = 2
    if args.tiny or not args.preset:
        sizes |= {"max_task_tokens": T, "max_response_tokens": T}
    o = Options(**sizes)
    if args.preset:  # the new tasks of a step, and the replayed ones
        B = round(o.seed_tasks * o.variations * (1 + REPLAY))

    shapes, device, card = SHAPES, "cuda", "CPU"
    if args.preset:
        shapes = {args.preset: (QWEN_7B, o.quant == "nf4", torch.bfloat16)}
    if args.tiny:
        shapes, device = {"tiny": (SMALL, True, torch.float32)}, "cpu"
    else:
        card = torch.cuda.get_device_name()
    result = {"device": card, "options": sizes, "prompt": P, "G": G, "models": {}}
    for name, (shape, nf4, dtype) in shapes.items():
        print(name, flush=True)
        bench = Bench(shape, nf4, dtype, device, P)
        bench.sample(1, G, min(T, 40))  # the first call starts kernels and libraries
        bench.epoch(o, B)
        if not args.preset:
            bench.mismatch(groups[0], T)
            for width in groups:
                bench.token_cost(width, T)
        if args.compile:
            bench.compiled(groups[0], T)
        result["models"][name] = bench.row
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:]), "bench_gpu"))
