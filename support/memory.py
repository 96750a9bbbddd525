"""How much memory a run will need, before it starts.

Paper: not in it; this is what lets its two 7B policies live on one card.

Usage: a run calls `check` before it loads the model and prints the table; what it took in the end is
measured by support/metrics.py.

Deviations: an upper bound of few terms, not a simulation. Parameters are counted on torch's meta
device, so any dense decoder of transformers will do; the rest follows from shapes, for the longest
prompts and responses that the options allow, none of which ends early. The terms were compared with
torch's allocator at 7B: rollouts are met within 1 %, updates are 5 to 20 % too high, and MARGIN is for
fragmentation, kernels' workspaces and the pool of a recorded step (0.3 GB at 7B).

Bytes everywhere; GB are 1e9 bytes. B prompts, G rollouts, P prompt, R response; e bytes per number.
"""
import math

import torch

from support.files import UserError
from support.attention import SHORT, heads_of
from support.loading import choose_dtype, one_line
from policy import LOGIT_CHUNK, PREFILL_TOKENS
from worlds import rollout_rows

MARGIN = 1.08  # what the allocator holds beyond what is in use
FP32, FP64 = 4, 8


def count_parameters(config, rank: int) -> dict:
    """Parameters by kind, without allocating any: linear (a list: one size per weight that NF4
    quantises), other (embedding, head, norms, biases), lora (of one adapter of `rank`)."""
    from transformers import AutoModelForCausalLM
    with one_line(config.name_or_path), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    sizes = [m.weight.numel() for m in linears]
    total = sum(p.numel() for p in model.parameters())  # a tied head is met once only
    return {"linear": sizes, "other": total - sum(sizes),
            "lora": sum(rank * (m.in_features + m.out_features) for m in linears)}


def nf4_bytes(numel: int) -> int:
    """An NF4 weight with double quantisation, about 4.13 bits a parameter: 4 bits each, one byte of
    scale per 64, one fp32 scale of scales per 256 of those, an offset and two code books."""
    blocks = math.ceil(numel / 64)
    return math.ceil(numel / 2) + blocks + FP32 * (math.ceil(blocks / 256) + 1 + 16 + 256)


def rollout_bytes(config, e, B, G, P, R) -> dict:
    """{part: bytes} of Policy.sample at its larger instant: the prefill or the last token."""
    heads, key_heads, head_dim = heads_of(config)
    per_key = config.num_hidden_layers * 2 * key_heads * head_dim * e
    wide = min(B * P, max(PREFILL_TOKENS, B))  # prompt tokens encoded at once: gate, up, product
    prefill = {"keys and values": B * P * per_key, "prefill": e * (
        wide * (3 * inner(config) + 5 * config.hidden_size) + B * P * 2 * heads * head_dim)}
    keys = B * (P + G * (R - 1))  # the last token is never fed back
    # draw() holds logits and probabilities in fp32, their sums in fp64 and a copy; a stage its mask
    step = B * G * config.vocab_size * 2 * (FP32 + FP64) + keys * (16 + G * heads // key_heads * e)
    last = {"keys and values": keys * per_key, "logits of a step": step}
    return max(prefill, last, key=total)


def update_bytes(config, e, gpu, rank, budget, G, P, R) -> dict:
    """{part: bytes} of a micro-batch of Policy.logprobs and its backward pass.

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
    if not gpu:
        return {"activations": layers * layer + max(gradients, logits)}
    return {"checkpointed layer inputs": tokens * layers * D * e,
            "one layer or the logits": max(layer + gradients, logits)}


def estimate(config, o, e: int = 0, gpu=None) -> dict:
    """What a run with options `o` needs: {phase: {part: bytes}}, each phase at its largest instant.

    Phase "always" is there throughout, the other phases come one at a time on top of it. e: bytes
    per number of the compute type, 0 = of the type that Policy.load will choose.
    """
    gpu = torch.cuda.is_available() if gpu is None else gpu
    e = e or choose_dtype(o.dtype, "cuda" if gpu else "cpu", config).itemsize
    counts, config = count_parameters(config, o.rank), config.get_text_config(decoder=True)
    state, P = FP32 * counts["lora"], o.max_prompt_tokens  # one adapter in fp32
    linear = sum(map(nf4_bytes, counts["linear"])) if o.quant else e * sum(counts["linear"])
    tasks = math.ceil(9 / 8 * o.seed_tasks * o.variations)  # an eighth is replayed

    def rollouts(prompts, G, R):
        B = min(prompts, max(1, rollout_rows(o, G, P) // G))
        return {**rollout_bytes(config, e, B, G, P, R), "cast of the adapter": counts["lora"] * e}

    def update(G, R, copies):  # copies of an adapter: as it was before, and to undo a step
        return {**update_bytes(config, e, gpu, o.rank, o.token_budget, G, P, R),
                "copies of the adapters": copies * state}

    return {
        # two policies: weights, gradients and the two moments of AdamW
        "always": {"base weights": linear + e * counts["other"], "adapters and optimisers": 8 * state},
        "simulator rollouts": rollouts(o.max_rows, o.variations, o.max_task_tokens),
        **({"agreement check": rollouts(tasks, o.agreement, o.max_response_tokens)}
           if o.agreement else {}),
        "agent rollouts": rollouts(tasks, o.G, o.max_response_tokens),
        "agent update (GRPO)": update(o.G, o.max_response_tokens, 2),
        # a text is met as a record and for its KL, with those of its seed task
        "simulator update (RWR)": update(2 * o.variations, o.max_task_tokens, 2 + 3),
        "validation": rollouts(o.max_rows, o.val_samples, o.max_response_tokens)}


def check(config, o, simulator=None, available=None) -> str:
    """The estimate as a table to print. Raises UserError if it does not fit, naming what to lower.

    Also where prompts and responses are longer than a model can read. simulator: configuration of
    --env-model, whose phases are taken as the larger of both models'. available: bytes free; None
    asks the device.
    """
    check_lengths(config, o)
    phases = estimate(config, o)
    if simulator:
        check_lengths(simulator, o)
        theirs = estimate(simulator, o)
        always = {"base weights": phases["always"]["base weights"] + theirs["always"]["base weights"],
                  "adapters and optimisers": max(
                      p["always"]["adapters and optimisers"] for p in (phases, theirs))}
        phases = {name: max(phases[name], theirs[name], key=total) for name in phases}
        phases["always"] = always
    available = free_memory() if available is None else available
    phase = max((name for name in phases if name != "always"), key=lambda name: total(phases[name]))
    peak = MARGIN * (total(phases["always"]) + total(phases[phase]))
    if peak > available:
        option = "token_budget" if "update" in phase else "max_rows"
        raise UserError(
            f"this run needs an estimated {peak / 1e9:.1f} GB and {available / 1e9:.1f} GB are free: "
            f"{total(phases['always']) / 1e9:.1f} for the models, {total(phases[phase]) / 1e9:.1f} "
            f"during {phase}: use {'' if o.quant else '--quant nf4, '}"
            f"a lower --{option.replace('_', '-')} (now {vars(o)[option]}) or a smaller --model")
    lines = ["memory estimate, GB (longest prompts and responses)"]
    for name, parts in phases.items():
        named = ", ".join(f"{k} {v / 1e9:.2f}" for k, v in parts.items() if v >= 5e6)
        lines.append(f"  {name:24s} {total(parts) / 1e9:7.2f}  {named}")
    return "\n".join([*lines, f"  {'peak, with ' + f'{MARGIN - 1:.0%}':24s} {peak / 1e9:7.2f}, "
                      f"free {available / 1e9:.2f}"])


def check_lengths(config, o):
    """Raises UserError if a prompt and its response may be longer than the model can read."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    tokens = o.max_prompt_tokens + max(o.max_response_tokens, o.max_task_tokens)
    if limit and tokens > limit:
        raise UserError(f"the model reads {limit} tokens at most, prompt and response may have {tokens}: "
                        "lower --max-prompt-tokens, --max-response-tokens or --max-task-tokens")


def free_memory() -> float:
    """Free bytes of the GPU if there is one, else what the system calls available (or infinity)."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":") for line in file)
    except OSError:  # not Linux
        return math.inf
    return 1024 * int(sizes["MemAvailable"].split()[0])


def total(parts: dict) -> int:
    """Bytes of a phase, or of one of its instants: its parts together."""
    return sum(parts.values())


def inner(config) -> int:
    """Width of the MLP; older families leave it out where it is four times the hidden size."""
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size
