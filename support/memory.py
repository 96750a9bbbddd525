"""How much memory a run will need, before it starts.

What of the paper this is: nothing; it is what lets its two 7B policies live on one card.

How it is run: a run calls `check` before it loads the model and prints the table; what it took in
the end is measured by `watch.measure.peak_memory`. Alone:

    from support.loading import model_config
    from support.memory import check
    print(check(model_config("Qwen/Qwen2.5-7B-Instruct"), options, available=24e9))

Where the numbers come from: parameters are counted, on torch's meta device, so any dense decoder of
transformers will do. A phase is looked at instant by instant (prefill, a decoding step, the
backward pass of an MLP ...), as what is needed at one is gone at another; its largest counts. Keys
and values follow from the shapes of a rollout batch. Activations are the tensors that autograd was
seen to save in a Llama-like layer with LoRA on every linear layer, gradients and temporaries what
torch's allocator was seen to hand out; tests/test_memory.py counts both again. What one cannot know
beforehand is left out: the allocator's fragmentation (hence MARGIN) and kernels' workspaces. Left
out too is a 4-bit weight unpacked for a product (0.14 GB at 7B): it exists where there are fewer
activations than at the instants below.
The estimate is for the longest prompts and responses that the options allow, with no response
ending early, so that most steps stay well below it.

Bytes everywhere; GB are 1e9 bytes. Symbols: B prompts, D hidden, I intermediate, V vocabulary,
G rollouts, P prompt, R response, N = B*G responses; e bytes per number of the compute type.
"""
import math
from itertools import product

import torch

from support.files import UserError
from support.attention import SHORT, heads_of
from support.loading import choose_dtype
from policy import LOGIT_CHUNK, PREFILL_TOKENS
from rwr import KL_SEEDS
from worlds import rollout_rows

OF_SIMULATOR = "simulator rollouts", "agreement check", "simulator update (RWR)"  # phases
MARGIN = 1.08  # what the allocator holds beyond what is in use
FP32, FP64 = 4, 8
OPTIONS_OF = {  # what to lower when a part is too large, the most telling first
    "base weights": ("quant", "model"),
    "adapters and optimisers": ("rank",),
    "copies of the simulator's state": ("rank",),
    "copies of the adapters": ("rank",),
    "cast of the adapter": ("rank",),
    "keys and values": ("max_rows", "max_prompt_tokens", "max_response_tokens", "max_task_tokens"),
    "prefill": ("max_rows", "max_prompt_tokens"),
    "attention of a chunk": ("max_prompt_tokens", "max_rows"),
    "logits of a step": ("max_rows",),
    "checkpointed layer inputs": ("token_budget", "max_prompt_tokens", "max_response_tokens"),
    "activations": ("token_budget", "grad_checkpoint", "max_prompt_tokens", "max_response_tokens"),
    "prompt copies per response": ("token_budget", "G"),
    "attention weights": ("token_budget", "G", "max_prompt_tokens"),
    "logit chunk": ("token_budget",),
    "scoring the KL sample": ("token_budget",),
}


# ---------------------------------------------------------------------------------------------
# the model: its parameters


def check_lengths(config, o):
    """Raises UserError if a prompt and its response may be longer than the model can read."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    for name in ("max_response_tokens", "max_task_tokens"):
        tokens = o.max_prompt_tokens + getattr(o, name)
        if limit and tokens > limit:
            raise UserError(
                f"the model reads {limit} tokens at most, prompt and response may have {tokens}: "
                f"use {_advice(o, 'max_prompt_tokens')} or {_advice(o, name)}")


def count_parameters(config, rank: int = 16) -> dict:
    """Parameters by kind, without allocating any.

    Returns linear (a list: one size per weight that NF4 quantises, that is every linear layer but
    the output head), other (embedding, head, norms, biases) and lora (of one adapter of `rank`).
    Raises UserError if the model is no causal language model.
    """
    from transformers import AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError:
        raise UserError(f"a model of type {config.model_type} is no causal language model: "
                        "give --model a chat model") from None
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    sizes = [m.weight.numel() for m in linears]
    total = sum(p.numel() for p in model.parameters())  # a tied head is met once only
    return {"linear": sizes, "other": total - sum(sizes),
            "lora": sum(rank * (m.in_features + m.out_features) for m in linears)}


def nf4_bytes(numel: int) -> int:
    """An NF4 weight with double quantisation: about 4.13 bits a parameter.

    4 bits each, one byte of scale per 64, one fp32 scale of scales per 256 of those, and the
    offset and two code books (16 and 256 fp32 values).
    """
    blocks = math.ceil(numel / 64)
    return math.ceil(numel / 2) + blocks + FP32 * (math.ceil(blocks / 256) + 1 + 16 + 256)


def base_bytes(counts: dict, quant: str, e: int) -> int:
    """The frozen base model; e: bytes per number of the compute type."""
    linear = sum(map(nf4_bytes, counts["linear"])) if quant == "nf4" else e * sum(counts["linear"])
    return linear + e * counts["other"]


# ---------------------------------------------------------------------------------------------
# rollouts


def kv_bytes_per_token(config, e: int) -> int:
    """Keys and values of one token in all layers."""
    heads, head_dim = heads_of(config)[1:]
    return config.num_hidden_layers * 2 * heads * head_dim * e


def cache_keys(P: int, G: int, R: int) -> int:
    """Cached keys of one group when its decoding ends, which is the most room its buffer ever has:
    the prompt once, and G keys for every token but the last, which is never fed back."""
    return P + G * (R - 1)


def rollout_instants(config, e, prompts, G, P, R, max_rows, lora=0) -> list:
    """One call of Policy.sample at its widest chunk of prompts: [{part: bytes}] for its instants.

    lora: parameters of an adapter, of which a copy in the compute type is there throughout.
    """
    D, I, V = config.hidden_size, _inner(config), config.vocab_size
    heads, key_heads, head_dim = heads_of(config)
    B = min(prompts, max(1, max_rows // G))
    columns = min(P, max(1, PREFILL_TOKENS // B))
    cached = lambda keys: {"keys and values": B * keys * kv_bytes_per_token(config, e),
                           "cast of the adapter": lora * e}
    # a first chunk is plainly causal, later ones bring a mask: bool, and additive for the kernel.
    # Query heads that share keys get copies of them, or if queries are few one mask for each
    sharing, few = heads // key_heads, columns <= head_dim
    copied = B * P * 2 * heads * head_dim * e if sharing > 1 and not few else 0
    masks = B * columns * P * (sharing if few else 1) * (1 + e)
    masked = masks + copied if columns < P else 0
    return [
        # gate, its activation and their product with up; the rest has the width of the model
        {**cached(P), "prefill": B * columns * (3 * I + 5 * D + 4 * head_dim) * e},
        {**cached(P), "attention of a chunk": B * columns * 6 * D * e + masked},
        # draw() holds logits and probabilities in fp32, their sums in fp64, and a copy to sum;
        # beside them lies who owns which key, before and after the step
        {**cached(cache_keys(P, G, R)), "logits of a step": B * G * V * (2 * FP32 + 2 * FP64)
         + 2 * 8 * B * cache_keys(P, G, R)}]


# ---------------------------------------------------------------------------------------------
# training


def micro_batches(groups, G, P, R, budget):
    """The fullest micro-batches that split_groups makes, at response lengths from R down.

    Prompts of P and less, as a shorter one may fill the budget better: two rows of 4,096 tokens are
    more than one of 4,864. Short responses leave the budget to prompts, each copied for G of them.
    Yields tokens (B*L), targets (response tokens) and for groups what group_attention lays out: own
    (N*R), keys (N*(P + R)), pairs (N*R*(P + R)).
    """
    halves = lambda n: [n >> i for i in range(n.bit_length())]  # n, n/2 ... 1
    for most, R in product(halves(P), halves(R)):
        longest = (max(1, min(groups, budget // (most + G * R))),  # as many of them as fit
                   max(1, min(G, (budget - most) // R)), most)
        for n, g, p in (fullest(groups, G, most, R, budget), longest):
            if n * (p + g * R) > max(budget, most + R):
                continue
            batch = {"tokens": n * (p + g * R), "targets": n * g * R}
            yield batch if g == 1 else {**batch, "own": n * g * R, "keys": n * g * (p + R),
                                        "pairs": n * g * R * (p + R)}


def fullest(groups, G, P, R, budget) -> tuple:
    """(groups, responses of each, prompt tokens <= P) that come closest to a budget of tokens."""
    if P + R >= budget or G > 1 and P + 2 * R > budget:  # one response alone is never split
        return 1, 1, P
    if P + G * R > budget:  # a part of one group's responses
        g = min(G, math.ceil((budget - P) / R))
        return 1, g, max(1, budget - g * R)
    n = min(groups, math.ceil(budget / (P + G * R)))
    return n, G, max(1, min(P, budget // n - G * R))


def layer_bytes(config, e: int, rank: int, gpu, tokens, own=0, keys=0, pairs=0, **_) -> tuple:
    """What autograd saves in one layer for a micro-batch: (plain, grouped).

    grouped is what group_attention adds: the prompt's keys and values once per response and query
    head, the mask as the additive one that kernels take, the responses' own queries and outputs.
    """
    D, I = config.hidden_size, _inner(config)
    heads, key_heads, head_dim = heads_of(config)
    queries, shared = heads * head_dim, key_heads * head_dim
    # inputs (in fp32, but for the one kernel of a GPU), outputs, 1 / rms
    norms = 2 * D * (e + (e if gpu else FP32)) + 2 * FP32
    attention = 2 * (queries + shared) * e + heads * FP32  # q, k, v, output, log-sum-exp
    mlp, lora = 4 * I * e, 7 * rank * e                    # gate, its activation, up, product; A x
    plain = tokens * (norms + attention + mlp + lora)
    # scaled A, and below fp32 the casts of B
    casts = rank * (6 * D + 3 * I + 2 * (queries + shared)) * e
    grouped = ((tokens + own) * queries + 2 * keys * queries + pairs) * e + own * heads * FP32
    return plain + casts, grouped if keys else 0


def training_instants(config, e, rank, gpu, grad_checkpoint, batch: dict) -> list:
    """Forward and backward of one micro-batch: [{part: bytes}] for its instants.

    batch: tokens, targets ... as micro_batches names them; gpu: whether on one.
    """
    D, I, V, layers = (config.hidden_size, _inner(config), config.vocab_size,
                       config.num_hidden_layers)
    tokens, targets, (heads, _, head_dim) = batch["tokens"], batch["targets"], heads_of(config)
    plain, grouped = layer_bytes(config, e, rank, gpu, **batch)
    inputs = tokens * layers * D * e if grad_checkpoint else 0
    copies = 2 * batch.get("keys", 0) * heads * head_dim * e

    def instant(saved_layers, more, group_gradients=0, chunk=0):
        return {"checkpointed layer inputs": inputs, "activations": saved_layers * plain + more,
                "prompt copies per response": saved_layers * grouped + group_gradients,
                "logit chunk": chunk}

    # logits of a chunk: log-softmax and two gradients in fp32, beside hidden states and slopes of
    # all targets; then the slopes' linear term in fp32
    chunk = max(min(LOGIT_CHUNK, targets) * V * 3 * FP32 + targets * D * 2 * e,
                targets * D * (3 * e + 2 * FP32))
    before, during = (0, 1) if grad_checkpoint else (layers, layers)
    return [instant(before, tokens * D * (FP32 + 2 * e), chunk=chunk),
            # backward of an MLP: two wide gradients, those of its input and of the residual
            instant(during, tokens * (2 * I + 3 * D + 4 * head_dim) * e),
            # of attention: the MLP's tensors are gone
            instant(during, -tokens * 4 * I * e, copies)]


def attention_weights(config, o, e: int, batch: dict, P: int) -> dict:
    """What group_attention keeps besides in bf16 on a CPU, in fp32: softmaxes, queries, keys and
    values, of responses and of prompts."""
    if e == FP32 or _on_gpu() or "pairs" not in batch:
        return {}
    layers = 1 if _on_gpu() else config.num_hidden_layers
    heads, _, head_dim = heads_of(config)
    pairs, vectors = batch["pairs"] + batch["tokens"] * P, 2 * batch["keys"] + 4 * batch["tokens"]
    return {"attention weights": layers * heads * (pairs + vectors * head_dim) * FP32}


# ---------------------------------------------------------------------------------------------
# the estimate


def estimate(config, o, e: int = 0) -> dict:
    """What a run with options `o` needs: {phase: {part: bytes}}, each phase at its largest instant.

    Phase "always" is there throughout, the other phases come one at a time on top of it. e: bytes
    per number of the compute type; 0 = of the type that Policy.load will choose.
    """
    return {phase: max(parts, key=phase_peak) for phase, parts in instants(config, o, e).items()}


def instants(config, o, e: int = 0) -> dict:
    """The estimate before it is narrowed down: {phase: [{part: bytes}, ...]}."""
    e = e or choose_dtype(o.dtype, "cuda" if _on_gpu() else "cpu", config=config).itemsize
    counts, config = count_parameters(config, o.rank), config.get_text_config(decoder=True)
    P, n_tasks = o.max_prompt_tokens, o.seed_tasks * o.variations + round(
        o.seed_tasks * o.variations / 8)
    rollouts = lambda prompts, G, R: rollout_instants(config, e, prompts, G, P, R,
                                                      rollout_rows(o, G, P), counts["lora"])
    # at any number of tasks, with different numbers of attempts in turn
    attempts = lambda *Gs: sum((rollouts(o.max_rows, G, o.max_response_tokens) for G in Gs), [])

    def training(groups, G, R):
        for batch in micro_batches(groups, G, P, R, o.token_budget):
            kept = attention_weights(config, o, e, batch, P) if P + R <= SHORT else {}
            for parts in training_instants(config, e, o.rank, _on_gpu(), _on_gpu(),
                                           batch):
                yield {**parts, **kept}

    # the KL terms score the whole sample, without gradient: prefill's widest tensors, no cache
    sample = max(batch["tokens"] for batch in micro_batches(
        KL_SEEDS * o.variations, 1, P, o.max_task_tokens, o.token_budget))
    scoring = sample * (3 * _inner(config) + 4 * config.hidden_size) * e
    # an RWR step can be undone: weights and moments are copied, before the former copy is let go
    state = FP32 * counts["lora"]  # one adapter in fp32
    copies = lambda n: {"copies of the simulator's state": 3 * n * state}
    # a mini-batch: the records, and as many own texts for the KL term
    n_rows = o.env_batch + min(o.env_batch, KL_SEEDS * o.variations)
    rwr = [{**copies(1), **parts} for parts in training(n_rows, 1, o.max_task_tokens)]
    # both adapters as they were before the update, to tell how far which has moved
    before = {"copies of the adapters": 2 * state}
    return {
        "always": [{"base weights": base_bytes(counts, o.quant, e),
                    # two policies: weights, gradients and the two moments of AdamW
                    "adapters and optimisers": 2 * 4 * state}],
        # the fixed task set of the ablation: five variations of any number of base tasks
        "simulator rollouts": rollouts(o.max_rows, 5, o.max_task_tokens) if o.variant == "static"
        else rollouts(o.seed_tasks, o.variations, o.max_task_tokens),
        **({"agreement check": attempts(o.agreement)} if o.agreement else {}),
        "agent rollouts": rollouts(n_tasks, o.G, o.max_response_tokens),
        "agent update (GRPO)": [{**before, **parts} for parts in
                                training(n_tasks, o.G, o.max_response_tokens)],
        "simulator update (RWR)": [{**before, **parts} for parts in (
            *rwr, copies(2), {**copies(1), "scoring the KL sample": scoring})],
        "validation": attempts(o.val_samples, 1),  # sampled, and greedy
    }


def phase_peak(parts: dict) -> int:
    """Bytes of a phase, or of one of its instants: its parts together."""
    return sum(parts.values())


def total_peak(phases: dict) -> int:
    """Bytes of a whole run: what is always there and the largest phase."""
    return phase_peak(phases["always"]) + max(
        phase_peak(parts) for name, parts in phases.items() if name != "always")


def two_models(agent: dict, simulator: dict) -> dict:
    """The estimate of a run with a model for each player, from those of two runs that have both
    players on the one and on the other: two bases, and of the adapters half of each."""
    base, adapters, copies = "base weights", "adapters and optimisers", "copies of the adapters"
    both = lambda phase, part: agent[phase][part] + simulator[phase][part]
    phases = {**agent, **{name: simulator[name] for name in OF_SIMULATOR if name in simulator}}
    for name in ("agent update (GRPO)", "simulator update (RWR)"):
        phases[name] = {**phases[name], copies: both(name, copies) // 2}
    return {**phases, "always": {base: both("always", base), adapters: both("always", adapters) // 2}}


def check(config, o, simulator=None, available=None) -> str:
    """The estimate as a table to print. Raises UserError if it does not fit, naming what to lower.

    Also where prompts and responses are longer than a model can read. simulator: configuration of
    --env-model. available: bytes free on the device; None asks the device, and where that is not
    known either the table is all there is.
    """
    check_lengths(config, o)
    phases = estimate(config, o)
    if simulator:
        check_lengths(simulator, o)
        phases = two_models(phases, estimate(simulator, o))
    available = free_memory() if available is None else available
    peak = MARGIN * total_peak(phases)
    if available is not None and peak > available:
        raise UserError(_refusal(phases, o, peak, available))
    return _table(phases, available)


def _table(phases, available) -> str:
    lines = [f"memory estimate, GB (longest prompts and responses, {MARGIN - 1:.0%} for the "
             "allocator on the total)"]
    for phase, parts in phases.items():
        named = ", ".join(f"{k} {v / 1e9:.2f}" for k, v in parts.items() if v >= 5e6)
        lines.append(f"  {phase:24s} {phase_peak(parts) / 1e9:7.2f}  {named}")
    free = f", free {available / 1e9:.2f}" if available is not None else ""
    lines.append(f"  {'peak':24s} {MARGIN * total_peak(phases) / 1e9:7.2f}{free}")
    return "\n".join(lines)


def _refusal(phases, o, peak, available) -> str:
    """One line: what does not fit, the largest parts, and the options that make them smaller."""
    phase = max((name for name in phases if name != "always"),
                key=lambda name: phase_peak(phases[name]))
    parts = sorted({**phases["always"], **phases[phase]}.items(), key=lambda kv: -kv[1])[:3]
    advice = [_advice(o, option) for part, _ in parts for option in OPTIONS_OF[part]
              if _can_lower(o, option)]
    sizes = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in parts)
    return (f"this run needs an estimated {peak / 1e9:.1f} GB and {available / 1e9:.1f} GB are "
            f"free: during {phase}, {sizes} GB; use {', '.join(dict.fromkeys(advice))}")


def _can_lower(o, option) -> bool:
    """Not an option that already has its thriftiest value."""
    return not (option == "quant" and o.quant == "nf4") and not (
        option == "grad_checkpoint" and _on_gpu())


def _advice(o, option) -> str:
    flag = "--" + option.replace("_", "-")
    fixed = {"quant": "--quant nf4", "grad_checkpoint": flag, "model": "a smaller --model"}
    return fixed.get(option) or f"a lower {flag} (now {vars(o)[option]})"


def free_memory():
    """Free bytes of the device; on a CPU what the system calls available, or None."""
    if _on_gpu():
        return torch.cuda.mem_get_info()[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":") for line in file)
    except OSError:  # not Linux
        return None
    return 1024 * int(sizes["MemAvailable"].split()[0])


# ---------------------------------------------------------------------------------------------
# helpers


def _on_gpu() -> bool:
    return torch.cuda.is_available()


def _inner(config):
    """Width of the MLP; older families leave it out where it is four times the hidden size."""
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size
