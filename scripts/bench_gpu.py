"""Speed and memory on one GPU: the phases of an epoch, and what a token costs.

Paper: not in it; its two 7B policies had many cards.

Usage:
    python -m scripts.bench_gpu                     # 7B in NF4 and bf16
    python -m scripts.bench_gpu --preset 7b-80gb    # an epoch of two steps, of a preset's sizes

Without a GPU it measures a toy on the CPU, which tests the script. Nothing is downloaded: the
weights are random, of the scale of trained ones, and speed does not depend on them. Prints what it
measures, and for each model all of it as a JSON line.

Deviations: MBU, the share of the card's bandwidth, counts weights, keys and values once a token.
Prompts have P tokens and responses their greatest length, as random weights end none. Every text of
the simulator counts as a task that is imitated.
"""
import json
import sys
import time
from contextlib import contextmanager

import torch

from data_pool import EnvRecord
from genenv import REPLAY
from grpo import grpo_update
from model.attention import heads_of
from errors import exit_code
from policy import Policy
from rwr import rwr_update
from support.metrics import peak_memory
from support.options import Options, Parser, parse_options
from worlds.tiny_model import word_tokenizer

# sizes of Qwen2.5-7B, and of a toy
QWEN_7B = dict(hidden_size=3584, num_hidden_layers=28, vocab_size=152064, num_attention_heads=28,
               num_key_value_heads=4, intermediate_size=18944)
SMALL = dict(hidden_size=128, num_hidden_layers=2, vocab_size=512, num_attention_heads=2,
             num_key_value_heads=1, intermediate_size=512)
LEARNING_RATE, RANK, G = 1e-5, 16, 8


# ---------------------------------------------------------------------------------------------
# random models


def qwen2_config(sizes):
    """A Qwen2; the tokenizer's end-of-sequence id is one past the vocabulary: never sampled."""
    from transformers import Qwen2Config
    return Qwen2Config(**sizes, tie_word_embeddings=False, bos_token_id=None, pad_token_id=None,
                       eos_token_id=None)


def random_model(sizes, device, nf4):
    """A random Qwen2 in bf16, the linear layers of its blocks NF4 if asked."""
    from transformers import AutoModelForCausalLM
    with torch.device(device):
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(qwen2_config(sizes), dtype=torch.bfloat16)
    lm.requires_grad_(False)
    if nf4:
        layers = lm.model.layers
        for name, module in list(layers.named_modules()):
            if isinstance(module, torch.nn.Linear):
                layers.set_submodule(name, nf4_linear(module, device))
    lm.is_loaded_in_4bit = nf4  # as the library's loader marks it; PEFT asks
    return lm


def nf4_linear(linear, device):
    """The 4-bit copy of a linear layer, with double quantisation."""
    import bitsandbytes as bnb
    out = bnb.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None,
                            compute_dtype=torch.bfloat16, device="meta")
    weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    out.weight, out.bias = weight.to(device), linear.bias
    return out


def tokenizer_for(vocab):
    """One word per id, so that prompts of an exact length can be handed over as text."""
    return word_tokenizer(["<pad>", *(f"w{i}" for i in range(1, vocab)), "<eos>"])


def random_prompts(count, length, vocab):
    """count lists of `length` ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (count, length), generator=generator).tolist()


def reward_of(ids) -> float:
    """Share of even ids: cheap, and hardly ever the same for all of a group."""
    return sum(i % 2 == 0 for i in ids) / len(ids)


def rewards_of(rollouts):
    """(B, G) rewards of B groups of G rollouts, one group after the other."""
    return torch.tensor([reward_of(r.response) for r in rollouts]).view(-1, G)


# ---------------------------------------------------------------------------------------------
# what is measured


class Bench:
    """A model of random weights, and a row of figures that grows. P: tokens of a prompt."""

    def __init__(self, sizes, nf4, device, P):
        lm = random_model(sizes, device, nf4)
        self.policy = Policy(lm, tokenizer_for(lm.config.vocab_size), rank=RANK)
        for p in sum(self.policy.params.values(), []):
            torch.nn.init.normal_(p.data, std=0.02)  # adapters that do something
        self.P, self.row = P, {}

    @contextmanager
    def timed(self, name):
        """Within: seconds and peak memory of what is done become figures of the row."""
        figures, peaks = {}, {}
        wait()
        began = time.perf_counter()
        with peak_memory(peaks, name):
            yield figures
            wait()
        figures["seconds"] = round(time.perf_counter() - began, 3)
        figures["peak_gb"] = round(peaks[name] / 1e9, 2)
        self.row[name] = figures
        print(f"  {name}: {figures}", flush=True)

    def sample(self, adapter, B, G, T, max_rows=10 ** 6):
        """G rollouts of T tokens to each of B prompts."""
        prompts = random_prompts(B, self.P, self.policy.lm.config.vocab_size)
        generator = self.policy.generator(0)
        return self.policy.sample(adapter, prompts, G, T, 1.0, generator, max_rows=max_rows)

    def epoch(self, o, B):
        """The phases of an epoch, of the sizes that the options say: in each step the simulator
        writes, the agent attempts B tasks and learns; then the simulator learns from all texts."""
        policy, records = self.policy, []
        agent, env = [policy.optimizer(name, LEARNING_RATE) for name in ("agent", "env")]
        for step in range(o.steps):
            with self.timed(f"simulator rollouts {step}"):
                texts = self.sample("env", o.seed_tasks, o.variations, o.max_task_tokens,
                                    o.max_rows)
            records += [EnvRecord(r.prompt, r.response, "", "", [], "", r.group) for r in texts]
            with self.timed(f"agent rollouts {step}"):
                rollouts = self.sample("agent", B, G, o.max_response_tokens, o.max_rows)
            with self.timed(f"agent update {step}"):
                self.row["agent"] = grpo_update(policy, "agent", agent, rollouts,
                                                rewards_of(rollouts), o)
        with self.timed("simulator update"):
            self.row["env"] = rwr_update(policy, "env", env, records, [], texts[:o.variations], o)

    def token_cost(self, B, T):
        """Milliseconds a token of B prompts with G rollouts each, prompts included, and MBU."""
        with self.timed(f"{B * G} rows") as figures:
            self.sample("agent", B, G, T)
        seconds = figures["seconds"] / T
        figures["ms a token"] = round(1000 * seconds, 2)
        if torch.cuda.is_available():
            card = torch.cuda.get_device_properties(self.policy.device)
            # two transfers a clock (kHz), so many bits each
            bandwidth = 2 * card.memory_clock_rate * 1000 * card.memory_bus_width / 8
            figures["MBU"] = round(self.bytes_read(B, T) / seconds / bandwidth, 3)

    def bytes_read(self, B, T) -> int:
        """What one token needs of the memory: all weights but the embeddings, and the keys and
        values of the prompts and of responses that are half done."""
        lm = self.policy.lm
        weights = sum(p.nbytes for p in lm.parameters()) - lm.get_input_embeddings().weight.nbytes
        _, key_heads, head_dim = heads_of(lm.config)
        key = lm.config.num_hidden_layers * 2 * key_heads * head_dim * 2  # of a token, in bf16
        return weights + B * (self.P + G * T // 2) * key


def wait():
    """Until a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(argv) -> int:
    """Measure all models one after the other, and print a JSON line for each."""
    p = Parser(prog="python -m scripts.bench_gpu", description=__doc__)
    p.add_argument("--preset", choices=["7b-24gb", "7b-80gb"], help="an epoch of its sizes")
    args = p.parse_args(argv)

    # sizes: of a toy, or with a GPU of 7B models
    device, card, P, T, widths = "cpu", "CPU", 160, 16, (2,)
    models = {"toy": (SMALL, True)}  # {name: (sizes, whether in NF4)}
    if torch.cuda.is_available():
        device, card = "cuda", torch.cuda.get_device_name()
        P, T, widths = 1024, 256, (8, 16, 32, 72)
        models = {"7B NF4": (QWEN_7B, True), "7B bf16": (QWEN_7B, False)}
    elif args.preset:
        p.error("--preset needs a GPU")
    B = widths[0]
    o = Options(steps=1, seed_tasks=B, variations=G, env_batch=B * G, token_budget=8192,
                max_task_tokens=T, max_response_tokens=T)
    if args.preset:
        o = parse_options(["--preset", args.preset, "--steps", "2"])
        B = round(o.seed_tasks * o.variations * (1 + REPLAY))  # new tasks of a step, and replayed
        models, widths = {args.preset: (QWEN_7B, o.quant == "nf4")}, ()

    for name, (sizes, nf4) in models.items():
        bench = Bench(sizes, nf4, device, P)
        bench.sample("agent", 1, G, T)  # the first call starts kernels and libraries
        bench.epoch(o, B)
        for width in widths:
            bench.token_cost(width, T)
        result = {"model": name, "device": card, "options": vars(o), "prompt": P, **bench.row}
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
