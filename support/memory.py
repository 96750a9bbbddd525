"""How much memory a run will need, before it starts.

Paper: not in it; this is what lets its two 7B policies live on one card.

Usage: a run calls `check` before it loads the models and prints the table; what it took in the end is
measured by support/metrics.py.

Deviations: an upper bound of few terms, not a simulation. Parameters are counted on torch's meta
device, so any dense decoder of transformers will do; the rest follows from shapes, for the longest
prompts and responses that the options allow, none of which ends early. The terms were compared with
torch's allocator at 7B: rollouts are met within 1 %, updates are 5 to 20 % too high, and MARGIN is for
fragmentation, kernels' workspaces and the pool of a recorded step (0.3 GB at 7B).

Bytes everywhere; GB are 1e9 bytes. B prompts, G rollouts, P prompt, R response; e bytes per number.
"""
import math

import psutil  # comes with PEFT
import torch

from support.files import UserError
from support.attention import SHORT, heads_of
from support.loading import choose_dtype, one_line
from policy import LOGIT_CHUNK, PREFILL_TOKENS
from worlds import rollout_rows

MARGIN = 1.08  # what the allocator holds beyond what is in use
FP32, FP64 = 4, 8
NF4 = 0.517    # bytes per weight: 4 bits, one byte per 64 and one fp32 number per 64 * 256 weights


def count_parameters(config, rank: int) -> tuple:
    """(parameters that NF4 quantises, all others, those of one LoRA adapter of `rank`). Nothing is
    allocated."""
    from transformers import AutoModelForCausalLM
    with one_line(config.name_or_path), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    linear = sum(m.weight.numel() for m in linears)
    every = sum(p.numel() for p in model.parameters())  # a tied head is met once only
    return linear, every - linear, sum(rank * (m.in_features + m.out_features) for m in linears)


def rollout_bytes(config, e, B, G, P, R) -> int:
    """Bytes of Policy.sample at its larger instant: the prefill or the last token."""
    heads, key_heads, head_dim = heads_of(config)
    per_key = config.num_hidden_layers * 2 * key_heads * head_dim * e
    wide = min(B * P, max(PREFILL_TOKENS, B))  # prompt tokens encoded at once: gate, up, product
    prefill = e * (wide * (3 * inner(config) + 5 * config.hidden_size) + B * P * 2 * heads * head_dim)
    keys = B * (P + G * (R - 1))  # the last token is never fed back
    # draw() holds logits and probabilities in fp32, their sums in fp64 and a copy; a stage its mask
    last = B * G * config.vocab_size * 2 * (FP32 + FP64) + keys * (16 + G * heads // key_heads * e)
    return max(B * P * per_key + prefill, keys * per_key + last)


def update_bytes(config, e, gpu, rank, budget, G, P, R) -> int:
    """Bytes of a micro-batch of Policy.logprobs and its backward pass.

    On a GPU layers are checkpointed: their inputs are kept, and what one of them saves.
    """
    heads, key_heads, head_dim = heads_of(config)
    D, I, layers, tokens = config.hidden_size, inner(config), config.num_hidden_layers, max(budget, P + R)
    queries, shared = heads * head_dim, key_heads * head_dim
    # each response meets the prompt's keys and values once per query head: G times the tokens at most
    copies = 2 * G * tokens * queries * e if G > 1 else 0
    pairs = tokens * G * R * (P + R) // (P + G * R)  # (query, key) pairs of responses
    layer = tokens * (2 * D * (e + FP32) + (4 * (queries + shared) + 4 * I + 7 * rank) * e) + \
        copies + pairs * e
    if not gpu and e < FP32 and P + R <= SHORT:  # the unfused kernel keeps its softmax
        layer += heads * FP32 * (pairs + tokens * P)
    gradients = max(tokens * (2 * I + 3 * D) * e, copies)
    logits = LOGIT_CHUNK * config.vocab_size * 4 * FP32 + tokens * D * (2 * e + FP32)
    if gpu:
        return tokens * layers * D * e + max(layer + gradients, logits)
    return layers * layer + max(gradients, logits)


def estimate(config, o) -> dict:
    """What a run with options `o` needs, in bytes: {"base weights", "adapters and optimisers", and each
    phase at its largest instant}; phases come one at a time on top of the first two."""
    gpu = torch.cuda.is_available()
    e = choose_dtype(o.dtype, "cuda" if gpu else "cpu", config).itemsize
    linear, other, lora = count_parameters(config, o.rank)
    config, P, state = config.get_text_config(decoder=True), o.max_prompt_tokens, FP32 * lora
    tasks = math.ceil(9 / 8 * o.seed_tasks * o.variations)  # an eighth is replayed

    def rollouts(prompts, G, R):
        B = min(prompts, max(1, rollout_rows(o, G, P) // G))
        return rollout_bytes(config, e, B, G, P, R) + lora * e  # and a cast of the adapter

    def update(G, R, copies):  # copies of an adapter: as it was before, and to undo a step
        return update_bytes(config, e, gpu, o.rank, o.token_budget, G, P, R) + copies * state

    return {
        "base weights": (NF4 if o.quant else e) * linear + e * other,
        "adapters and optimisers": 8 * state,  # of two: weights, gradients and AdamW's two moments
        "simulator rollouts": rollouts(o.max_rows, o.variations, o.max_task_tokens),
        "agreement check": rollouts(tasks, o.agreement, o.max_response_tokens) if o.agreement else 0,
        "agent rollouts": rollouts(tasks, o.G, o.max_response_tokens),
        "agent update (GRPO)": update(o.G, o.max_response_tokens, 2),
        # a text is met as a record and for its KL, with those of its seed task
        "simulator update (RWR)": update(2 * o.variations, o.max_task_tokens, 2 + 3),
        "validation": rollouts(o.max_rows, o.val_samples, o.max_response_tokens)}


def check(configs, o, available=None) -> str:
    """The estimate as a table to print. Raises UserError if it does not fit, naming what to lower, or if
    prompts and responses may be longer than a model can read.

    configs: of --model, and of --env-model if that is another one; a phase is then taken as the larger
    of both models'. available: bytes free; None asks the device.
    """
    for config in configs:
        check_lengths(config, o)
    found = [estimate(config, o) for config in configs]
    needs = {name: max(one[name] for one in found) for name in found[0]}
    needs["base weights"] = sum(one["base weights"] for one in found)
    always = needs["base weights"] + needs["adapters and optimisers"]
    phase = max(list(needs)[2:], key=needs.get)
    peak = MARGIN * (always + needs[phase])
    available = free_memory() if available is None else available
    if peak > available:
        option = "token_budget" if "update" in phase else "max_rows"
        raise UserError(
            f"this run needs an estimated {peak / 1e9:.1f} GB and {available / 1e9:.1f} GB are free: "
            f"{always / 1e9:.1f} for the models, {needs[phase] / 1e9:.1f} during {phase}: use "
            f"{'' if o.quant else '--quant nf4, '}a lower --{option.replace('_', '-')} "
            f"(now {vars(o)[option]}) or a smaller --model")
    needs |= {f"peak, with {MARGIN - 1:.0%}": peak, "free": available}
    return "\n".join(["memory estimate, GB (longest prompts and responses)",
                      *(f"  {name:24s} {size / 1e9:7.2f}" for name, size in needs.items() if size)])


def check_lengths(config, o):
    """Raises UserError if a prompt and its response may be longer than the model can read."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    tokens = o.max_prompt_tokens + max(o.max_response_tokens, o.max_task_tokens)
    if limit and tokens > limit:
        raise UserError(f"the model reads {limit} tokens at most, prompt and response may have {tokens}: "
                        "lower --max-prompt-tokens, --max-response-tokens or --max-task-tokens")


def free_memory() -> float:
    """Free bytes of the GPU if there is one, else what the system calls available."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available


def inner(config) -> int:
    """Width of the MLP; older families leave it out where it is four times the hidden size."""
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size
