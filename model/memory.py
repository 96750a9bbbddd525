"""Estimate how much GPU memory a run will need, before it starts.

Paper: does not cover this; it helps to fit the paper's two 7B policies on one card.

Usage: a run calls `check` before it loads the models, and trains inside `enough_memory`.
Policy.sample decodes `prompts_at_once` prompts at once. That number depends on free memory, so the
same seed gives different texts on different cards. policy.py and model/decoding.py keep to
LOGIT_CHUNK, KEPT_LOGITS and PREFILL_TOKENS.

Deviations: this is an upper bound with few terms, not a simulation. Parameters, those of PEFT's
adapters included, are counted on torch's meta device, so any decoder in transformers works. The
rest follows from shapes: every prompt and response is assumed to be as long as the options allow.
At 7B the estimate is within 1 % of what rollouts took, and 5 to 20 % above what updates took.
MARGIN covers fragmentation, kernels' workspaces and the memory pool of a recorded step (0.3 GB at
7B). A mixture of experts is counted with its own weights and adapters, but with the activations of
a dense model, and without the copies that PEFT makes of experts. This case was never measured.

All sizes are in bytes; a GB is 1e9 bytes. Shapes: B prompts, G rollouts of each, N responses in
all, P prompt tokens, R response tokens, D hidden size, I MLP width, V vocabulary, M predicted
tokens, K cached keys, d head dimension; e is the number of bytes per number.
"""
from collections import Counter
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM

from model.attention import heads_of
from errors import UserError
from model.loading import add_adapters, choose_dtype, one_line

LOGIT_CHUNK = 256  # tokens whose (chunk, V) fp32 logits exist at once: 0.16 GB at V = 152k
KEPT_LOGITS = 2 ** 25  # above this many logits (0.13 GB), the backward pass computes them again
PREFILL_TOKENS = 16384  # padded prompt tokens (rows x columns) encoded in one forward pass

MARGIN = 1.08  # factor for what the allocator holds beyond what is in use
FP32, FP64 = 4, 8
# bytes per weight, rounded up: 4 bits, one byte per 64 and one fp32 number per 64 * 256 weights
NF4 = 0.517


def count_parameters(config, rank: int) -> Counter:
    """Count the parameters of a model and of an adapter of this rank, without allocating them.

    The keys are "linear": linear layers, which NF4 packs, and the few parameters of routers and
    positions; "other": embeddings, head, norms, biases and fused experts (three dimensions), which
    NF4 leaves unchanged; "lora": one adapter.
    """
    with one_line(config.name_or_path), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        model = add_adapters(model, ["one"], rank, seed=0)  # PEFT decides which layers get one
    numbers = Counter()
    for name, p in model.named_parameters():  # a tied head appears only once
        kind = "linear"
        if ".one." in name:
            kind = "lora"
        elif p.dim() != 2 or p is head.weight or p is embeddings.weight:
            kind = "other"
        numbers[kind] += p.numel()
    return numbers


def rollout_bytes(config, e, B, G, P, R) -> int:
    """Estimate the bytes of Policy.sample at its peak: in the prefill or at the last token."""
    heads, key_heads, head_dim = heads_of(config)
    key = config.num_hidden_layers * 2 * key_heads * head_dim * e  # keys and values of a token

    # the prefill encodes this many prompt tokens in one forward pass
    chunk = min(B * P, max(PREFILL_TOKENS, B))
    mlp = chunk * 3 * inner(config) * e                      # (chunk, I): gate, up, product
    hidden = chunk * 5 * config.hidden_size * e              # (chunk, D)
    attended = 2 * heads * head_dim * e                      # (B, heads, P, d): keys, values
    prefill = B * P * (key + attended) + mlp + hidden

    # the last token is never fed back; the keys' owners and the mask are too small to count
    keys = B * (P + G * (R - 1))                             # B * K
    # (B*G, V): logits and probabilities, cumulative sums and a copy
    drawing = B * G * config.vocab_size * 2 * (FP32 + FP64)
    last = keys * key + drawing
    return max(prefill, last)


def prompts_at_once(lm, lengths, G, R, available) -> int:
    """Return how many prompts, the shortest first, can be decoded at once; at least one.

    lengths: their token counts, in that order. available: free bytes.
    """
    config, e, B = lm.config.get_text_config(decoder=True), lm.dtype.itemsize, len(lengths)
    while B > 1 and MARGIN * rollout_bytes(config, e, B, G, lengths[B - 1], R) > available:
        B -= 1
    return B


def free_bytes() -> int:
    """Return the free memory of the GPU."""
    torch.cuda.empty_cache()  # free the memory that torch holds but does not use
    return torch.cuda.mem_get_info()[0]


def update_bytes(config, e, budget, G, P, R) -> int:
    """Estimate the bytes of a micro-batch of Policy.logprobs and its backward pass.

    The inputs of all layers are kept; whatever else a layer saves exists for one layer at a time.
    Everything but the logits is counted per token.
    """
    heads, key_heads, head_dim = heads_of(config)
    D, V, I = config.hidden_size, config.vocab_size, inner(config)
    tokens = max(budget, P + R)
    inputs = config.num_hidden_layers * D * e                # (tokens, D) of each layer

    # a layer needs what it saves, plus the larger of two temporary amounts
    norms = 2 * D * (e + FP32)                               # (tokens, D): before and after a norm
    projected = 4 * (heads + key_heads) * head_dim * e       # (tokens, heads, d)
    mlp = 4 * I * e                                          # (tokens, I)
    # each response has its own copy of the prompt's keys and values, repeated for every query head:
    # at most G copies per token
    copies = G * 2 * heads * head_dim * e                    # (N, heads, P + R, d)
    gradients = (2 * I + 3 * D) * e                          # of (tokens, I), (tokens, D)
    layer = norms + projected + mlp + copies + max(gradients, copies)

    # the head needs fp32 logits, and as much again for each of three tensors derived from them
    logits = min(tokens * V, max(LOGIT_CHUNK * V, KEPT_LOGITS)) * 4 * FP32
    states = D * (2 * e + FP32)                              # (M, D)
    return tokens * inputs + max(tokens * layer, logits + tokens * states)


def estimate(config, o) -> tuple:
    """Return the bytes that a run with options `o` needs: for base weights, for adapters with their
    optimisers and, in addition to both, for an update at its peak.

    Rollouts take what is left. Those of a single prompt need less than an update.
    """
    e = choose_dtype(o.dtype, "cuda", config).itemsize
    n = count_parameters(config, o.rank)
    config = config.get_text_config(decoder=True)
    packed = NF4 if o.quant else e
    base = packed * n["linear"] + e * n["other"]
    adapter = FP32 * n["lora"]

    P = o.max_prompt_tokens
    agent = update_bytes(config, e, o.token_budget, o.G, P, o.max_response_tokens)
    # a mini-batch of RWR may hold all texts written for one seed task, and each of them twice
    simulator = update_bytes(config, e, o.token_budget, 2 * o.variations, P, o.max_task_tokens)
    # add a copy of one adapter and its moments, with which rwr.py undoes a step, and two more
    # adapters as a margin
    updates = max(agent, simulator) + 5 * adapter
    # each of the two adapters has weights, gradients and AdamW's two moments
    return base, 2 * 4 * adapter, updates


def check(configs, o, available=None):
    """Print how much GPU memory a run needs. Raise UserError if it does not fit, naming what to
    lower.

    configs: the configuration of --model, and that of --env-model if it differs; the larger update
    then counts. available: free bytes; None asks the GPU, if there is one.
    """
    if available is None:
        if not torch.cuda.is_available():
            return
        available = free_bytes()
    bases, adapters, updates = zip(*[estimate(config, o) for config in configs])
    always = sum(bases) + max(adapters)
    peak = MARGIN * (always + max(updates))
    sentence = (f"this run needs an estimated {peak / 1e9:.1f} GB ({always / 1e9:.1f} for the "
                f"models, {max(updates) / 1e9:.1f} during updates, and a margin), and "
                f"{available / 1e9:.1f} GB are free; rollouts take what is left")
    if peak > available:
        raise UserError(f"{sentence}: use a lower --token-budget, --quant nf4 or another "
                        "--model")
    print(sentence, flush=True)


@contextmanager
def enough_memory():
    """Raise UserError, naming what to lower, if a GPU runs out of memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError("out of GPU memory: lower --max-rows if it ran out during "
                        "rollouts, --token-budget if during an update") from None


def inner(config) -> int:
    """Return the MLP's width; older families leave it out if it is four times the hidden size."""
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size
