"""How much memory of a GPU a run will need, before it starts.

Paper: not in it; this is what lets its two 7B policies live on one card.

Usage: a run calls `check` before it loads the models; what it took in the end is measured by
support/metrics.py. On a CPU nothing is estimated.

Deviations: an upper bound of few terms, not a simulation. Parameters are counted on torch's meta
device, so any dense decoder of transformers will do; the rest follows from shapes, for the longest
prompts and responses that the options allow, none of which ends early. At 7B rollouts were met within
1 %, updates are 5 to 20 % too high, and MARGIN is for fragmentation, kernels' workspaces and the pool
of a recorded step (0.3 GB at 7B).

Bytes everywhere; GB are 1e9 bytes. B prompts, G rollouts, P prompt, R response; e bytes per number.
"""
import torch

from model.files import UserError
from model.attention import heads_of
from model.loading import choose_dtype, one_line
from policy import KEPT_LOGITS, LOGIT_CHUNK, PREFILL_TOKENS

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


def update_bytes(config, e, rank, budget, G, P, R) -> int:
    """Bytes of a micro-batch of Policy.logprobs and its backward pass: the inputs of all layers are
    kept, and what one of them saves."""
    heads, key_heads, head_dim = heads_of(config)
    D, I, V, tokens = config.hidden_size, inner(config), config.vocab_size, max(budget, P + R)
    # each response meets the prompt's keys and values once per query head: G times the tokens at most
    copies = 2 * G * tokens * heads * head_dim * e
    pairs = tokens * G * R * (P + R) // (P + G * R)  # (query, key) pairs of responses
    saved = 2 * D * (e + FP32) + (4 * (heads + key_heads) * head_dim + 4 * I + 7 * rank) * e
    layer = tokens * saved + copies + pairs * e + max(tokens * (2 * I + 3 * D) * e, copies)
    logits = min(tokens * V, max(LOGIT_CHUNK * V, KEPT_LOGITS)) * 4 * FP32 + tokens * D * (2 * e + FP32)
    return tokens * config.num_hidden_layers * D * e + max(layer, logits)


def estimate(config, o) -> dict:
    """What a run with options `o` needs, in bytes: {"base weights", "adapters and optimisers", and each
    phase at its largest instant}; phases come one at a time on top of the first two."""
    e = choose_dtype(o.dtype, "cuda", config).itemsize
    linear, other, lora = count_parameters(config, o.rank)
    config, P, state = config.get_text_config(decoder=True), o.max_prompt_tokens, FP32 * lora
    B = max(1, o.max_rows // o.G)  # no phase decodes more long prompts at once, see data_pool.rollout_rows
    rollouts = (o.G, o.max_response_tokens), (o.variations, o.max_task_tokens)
    # a text of the simulator is met as a record and for its KL, with those of its seed task
    updates = (o.G, o.max_response_tokens), (2 * o.variations, o.max_task_tokens)
    return {"base weights": (NF4 if o.quant else e) * linear + e * other,
            "adapters and optimisers": 8 * state,  # of two: weights, gradients and AdamW's two moments
            # and a cast of the adapter
            "rollouts": lora * e + max(rollout_bytes(config, e, B, G, P, R) for G, R in rollouts),
            # and copies of the adapters: as they were before, and to undo a step
            "updates": 5 * state + max(update_bytes(config, e, o.rank, o.token_budget, G, P, R)
                                       for G, R in updates)}


def check(configs, o, available=None):
    """Print what is needed of a GPU. Raises UserError if it does not fit, naming what to lower, or if
    prompts and responses may be longer than a model can read.

    configs: of --model, and of --env-model if that is another one; a phase is then taken as the larger
    of both models'. available: bytes free; None asks the GPU, if there is one.
    """
    tokens = o.max_prompt_tokens + max(o.max_response_tokens, o.max_task_tokens)
    for config in configs:
        limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit and tokens > limit:
            raise UserError(f"the model reads {limit} tokens at most, prompt and response may have {tokens}: "
                            "lower --max-prompt-tokens, --max-response-tokens or --max-task-tokens")
    available = available or (torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None)
    if available is None:
        return
    found = [estimate(config, o) for config in configs]
    always = sum(one.pop("base weights") for one in found) + \
        max(one.pop("adapters and optimisers") for one in found)
    needs, phase = max((size, name) for one in found for name, size in one.items())
    peak = MARGIN * (always + needs)
    said = (f"this run needs an estimated {peak / 1e9:.1f} GB and {available / 1e9:.1f} GB are free: "
            f"{always / 1e9:.1f} for the models, {needs / 1e9:.1f} during {phase}")
    if peak > available:
        option = "--token-budget" if "update" in phase else "--max-rows"
        raise UserError(f"{said}: use {'' if o.quant else '--quant nf4, '}a lower {option}, another --model")
    print(said, flush=True)


def inner(config) -> int:
    """Width of the MLP; older families leave it out where it is four times the hidden size."""
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size
