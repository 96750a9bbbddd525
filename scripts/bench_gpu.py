"""Measure speed and memory on one GPU: an epoch's phases, time per token, mixed response lengths.

Paper: does not cover this; its two 7B policies ran on many cards.

Usage:
    python -m scripts.bench_gpu 7b-80gb    # about seven minutes
    python -m scripts.bench_gpu 7b-24gb
    python -m scripts.bench_gpu            # both; without a GPU, on toy models, to test the script

Nothing is downloaded: the weights are random, at the scale of trained ones, and speed does not
depend on their values. After each phase, all figures so far are printed as a JSON line; a phase
that fails has an "error" in place of its results. After seven minutes no new phase begins. In
"rollouts_at_once", "seconds" divided by "response" is the time per decoding step, in which each row
gets a token; this includes its share of encoding the prompts.

Deviations: an epoch has a single step, of a preset's sizes, so RWR takes fewer optimiser steps than
in a run ("env_steps"). Every response has full length, except in "spread_lengths", where each token
may by chance end its response. RWR imitates every text of the simulator.
"""
import gc
import json
import sys
import time
from dataclasses import replace

import torch

from data_pool import EnvRecord
from errors import exit_code, first_line
from genenv import REPLAY
from grpo import grpo_update
from model.decoding import Decoder, GraphDecoder
from policy import Policy
from rwr import draw_kl_sample, rwr_update
from support.options import Parser, parse_options
from worlds.tiny_model import SPECIAL, word_tokenizer

# sizes of Qwen2.5-7B, and of a toy
QWEN_7B = dict(hidden_size=3584, num_hidden_layers=28, vocab_size=152064, num_attention_heads=28,
               num_key_value_heads=4, intermediate_size=18944)
TOY = dict(hidden_size=128, num_hidden_layers=2, vocab_size=512, num_attention_heads=2,
           num_key_value_heads=1, intermediate_size=512)
G = 8  # rollouts of a prompt
DEADLINE = time.monotonic() + 7 * 60
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# ---------------------------------------------------------------------------------------------
# random models


def random_model(sizes, quant):
    """Return a random Qwen2 in bf16. quant: make the linear layers of its blocks NF4."""
    from transformers import AutoModelForCausalLM, Qwen2Config
    config = Qwen2Config(**sizes, tie_word_embeddings=False)
    with torch.device(DEVICE):
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lm.requires_grad_(False)
    if quant:
        layers = lm.model.layers
        for name, module in list(layers.named_modules()):
            if isinstance(module, torch.nn.Linear):
                layers.set_submodule(name, nf4_linear(module))
        lm.is_loaded_in_4bit = True  # the library's loader sets this, and PEFT checks it
    return lm


def nf4_linear(linear):
    """Return a 4-bit copy of a linear layer."""
    import bitsandbytes as bnb
    out = bnb.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None,
                            compute_dtype=torch.bfloat16, device="meta")
    weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4",
                               compress_statistics=True)
    out.weight, out.bias = weight.to(DEVICE), linear.bias
    return out


# ---------------------------------------------------------------------------------------------
# what is measured


class Bench:
    """Measure phases of a run on a random model, and collect the figures in `row`.

    P: tokens of a prompt. T: tokens of a response, except in an epoch's phases.
    """

    def __init__(self, o, sizes, P, T):
        lm = random_model(sizes, o.quant)
        self.policy = Policy(lm, word_tokenizer(SPECIAL))
        self.V = lm.config.vocab_size
        self.policy.eos_ids = [self.V]  # never drawn
        for p in sum(self.policy.params.values(), []):
            torch.nn.init.normal_(p.data, std=0.02)  # adapters that do something
        self.policy.decoder = GraphDecoder  # on a CPU too, where it does without graphs
        self.o, self.P, self.T = o, P, T
        self.row = {"prompt": P, "response": T, "quant": o.quant, "peak bytes": {}}

    def measure(self, phase, *args):
        """Run a phase, one of the methods below, and add its seconds, peak memory and result to the
        row. A failure adds its error: other phases may still work."""
        name = f"{phase.__name__}{args}"
        began = time.monotonic()
        try:
            if began > DEADLINE:
                raise TimeoutError("no time was left")
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            figures = phase(*args) or {}  # its results are on the host, so the GPU has finished
            self.row["peak bytes"][name] = torch.cuda.max_memory_allocated()
        except Exception as error:
            figures = {"error": first_line(error)}
        figures["seconds"] = time.monotonic() - began
        self.row[name] = figures
        print(json.dumps(self.row), flush=True)

    def sample(self, adapter, B, T, G=G, temperature=1.0, max_rows=10 ** 6):
        """Sample G rollouts of T tokens for each of B random prompts."""
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(self.V, (B, self.P), generator=generator).tolist()
        return self.policy.sample(adapter, prompts, G, T, temperature, self.policy.generator(0),
                                  max_rows)

    # ---- phases

    def greedy_without_graphs(self):
        """Draw 64 rollouts with plain steps."""
        self.policy.decoder = Decoder
        self.greedy = self.sample("agent", 8, self.T, temperature=0)
        self.policy.decoder = GraphDecoder

    def greedy_with_graphs(self):
        """Draw the same rollouts with graphs, and count equal tokens."""
        pairs = zip(self.greedy, self.sample("agent", 8, self.T, temperature=0))
        equal = [a == b for one, other in pairs for a, b in zip(one.response, other.response)]
        return {"equal": sum(equal), "of": len(equal)}

    def simulator_rollouts(self):
        """Let the simulator write the tasks of a step."""
        o = self.o
        self.texts = self.sample("env", o.seed_tasks, o.max_task_tokens, o.variations,
                                 max_rows=o.max_rows)

    def agent_rollouts(self):
        """Let the agent attempt the tasks of a step, new and replayed."""
        o = self.o
        B = round(o.seed_tasks * o.variations * (1 + REPLAY))
        self.attempts = self.sample("agent", B, o.max_response_tokens, max_rows=o.max_rows)

    def agent_update(self):
        """Run GRPO on these attempts, with rewards spread evenly over [0, 1]."""
        optimizer = self.policy.optimizer("agent", 1e-5)
        rewards = torch.linspace(0, 1, len(self.attempts)).view(-1, G)
        return grpo_update(self.policy, "agent", optimizer, self.attempts, rewards, self.o)

    def simulator_update(self):
        """Run RWR on the step's texts, with a KL sample drawn from all of them, as in a run."""
        optimizer = self.policy.optimizer("env", 1e-5)
        records = [EnvRecord(r.prompt, r.response, "", "", [], r.group) for r in self.texts]
        kl_sample = draw_kl_sample(self.texts, torch.Generator().manual_seed(0))
        return rwr_update(self.policy, "env", optimizer, records, [], kl_sample, self.o)

    def rollouts_at_once(self, rows):
        """Draw `rows` rollouts of T tokens."""
        self.sample("agent", rows // G, self.T)

    def spread_lengths(self, max_rows):
        """Draw G rollouts for each of 72 prompts, of about T / 4 tokens, and count their tokens."""
        self.policy.eos_ids = list(range(4 * self.V // self.T))
        rollouts = self.sample("agent", 72, self.T, max_rows=max_rows)
        self.policy.eos_ids = [self.V]
        return {"drawn": sum(r.tokens for r in rollouts)}


def measure_all(*sizes) -> bool:
    """Print the figures of a preset, the most important first, and return whether all were
    measured."""
    bench = Bench(*sizes)
    bench.measure(bench.rollouts_at_once, G)  # loads kernels and libraries
    for phase in (bench.greedy_without_graphs, bench.greedy_with_graphs, bench.simulator_rollouts,
                  bench.agent_rollouts, bench.agent_update, bench.simulator_update):
        bench.measure(phase)
    for phase in bench.rollouts_at_once, bench.spread_lengths:
        for rows in (576, 256, 128, 64):
            bench.measure(phase, rows)
    return "error" not in str(bench.row)


def main(argv) -> int:
    """Measure the presets, by default both. Return 1 if a figure is missing, else 0."""
    p = Parser(prog="python -m scripts.bench_gpu", description=__doc__)
    p.add_argument("presets", nargs="*", default=["7b-80gb", "7b-24gb"])
    args = p.parse_args(argv)
    complete = True
    for name in args.presets:
        o, sizes, P, T = parse_options(["--preset", name]), QWEN_7B, 1024, 256
        if DEVICE == "cpu":
            sizes, P, T = TOY, 64, 16
            o = replace(o, seed_tasks=2, env_batch=8, max_response_tokens=T, max_task_tokens=T)
        complete &= measure_all(o, sizes, P, T)
        gc.collect()  # the model's layers refer to each other, so only this frees them
    return int(not complete)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
