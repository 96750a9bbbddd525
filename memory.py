"""How much memory a run will need, before it starts, and how much it took, after.

What of the paper this is: nothing; it is what lets its two 7B policies live on one card.

How it is run: genenv.py calls `check` before it loads the model, prints the table, and wraps the
phases of an epoch in `peak_memory`. Alone:

    from memory import check, model_config
    print(check(model_config("Qwen/Qwen2.5-7B-Instruct"), options, available=24e9))

Where the numbers come from: parameters are counted, on torch's meta device, so any dense decoder of
transformers will do. Keys and values follow from the shapes of a rollout batch. Activations are
the tensors that autograd was seen to save in a Llama-like layer with LoRA on every linear layer
(tests/test_memory.py counts them again), plus the widest gradients of one layer. What one cannot
know beforehand is left out: the allocator's fragmentation (hence MARGIN) and kernels' workspaces.
The estimate is for the longest prompts and responses that the options allow, with no response
ending early, so that most steps stay well below it.

Bytes everywhere; GB are 1e9 bytes. Symbols: D hidden, I intermediate, V vocabulary, G rollouts,
P prompt, R response.
"""
import logging
import math
import resource
from contextlib import contextmanager
from pathlib import Path

import torch

from data_pool import UserError
from loading import check_model_folder
from policy import LOGIT_CHUNK

MARGIN = 1.08   # what the allocator holds beyond what is in use
FP32 = 4
OPTIONS_OF = {  # what to lower when a part is too large, the most telling first
    "base weights": ("quant", "model"),
    "adapters and optimisers": ("rank",),
    "copy of the simulator's state": ("rank",),
    "keys and values": ("max_rows", "max_prompt_tokens", "max_response_tokens", "max_task_tokens"),
    "prefill": ("max_rows", "max_prompt_tokens"),
    "logits of a step": ("max_rows",),
    "checkpointed layer inputs": ("token_budget", "max_prompt_tokens", "max_response_tokens"),
    "activations": ("token_budget", "grad_checkpoint", "max_prompt_tokens", "max_response_tokens"),
    "attention mask": ("token_budget", "G", "max_response_tokens"),
    "logit chunk": ("token_budget",),
}


# ---------------------------------------------------------------------------------------------
# parameters


def model_config(model: str):
    """The transformers configuration of a folder or hub name. Raises UserError if there is none."""
    from transformers import AutoConfig
    check_model_folder(model)
    # without a network the hub's client announces every retry; the error at the end is enough
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        what = "the model" if Path(model).is_dir() else "the hub model (there is no such folder)"
        raise UserError(f"cannot read the configuration of {what} {model}: "
                        f"{str(error).strip().splitlines()[0]}") from None


def count_parameters(config, rank: int = 16) -> dict:
    """Parameters by kind, without allocating any.

    Returns linear (a list: one size per weight that NF4 quantises, that is every linear layer but
    the output head), other (embedding, head, norms, biases) and lora (of one adapter of `rank`).
    Raises UserError if the model is no causal language model.
    """
    from transformers import AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
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
    heads, head_dim = _heads(config)[1:]
    return config.num_hidden_layers * 2 * heads * head_dim * e


def cache_keys(P: int, G: int, R: int) -> int:
    """Cached keys of one group at the end of its decoding, the buffer's spare room included.

    The prompt is stored once and each step appends G keys; a full buffer grows by half (policy.py).
    """
    used = room = P
    for _ in range(R - 1):  # the last token is never fed back
        if used + G > room:
            room = used + G + max(32 * G, used // 2)
        used += G
    return room


def rollout_bytes(config, e, prompts, G, P, R, max_rows) -> dict:
    """The parts of one call of Policy.sample at its widest chunk of prompts."""
    D, I, V = config.hidden_size, _inner(config), config.vocab_size
    width = min(prompts, max(1, max_rows // G))
    return {"keys and values": width * cache_keys(P, G, R) * kv_bytes_per_token(config, e),
            # prefill and decoding do not coincide; both are small beside the cache at short prompts
            "prefill": width * P * (I * (2 * e + 2 * FP32) + 4 * D * e),
            # draw() holds the logits as they come and in fp32, probabilities, and fp64 sums of them
            "logits of a step": width * G * V * (e + 4 * FP32)}


def rollout_rows(o, G: int, longest: int) -> int:
    """max_rows for rollouts that are not G of the agent's, such as the one of greedy validation.

    longest: tokens of the longest prompt. max_rows // G prompts are prefilled at once, which with
    G = 1 would be all of max_rows. Here they are as many as in the agent's own rollouts, or as
    many short ones as hold the tokens of one prompt of the greatest length.
    """
    prompts = max(1, o.max_rows // o.G, o.max_prompt_tokens // longest)
    return min(o.max_rows, G * prompts)


# ---------------------------------------------------------------------------------------------
# training


def layer_bytes_per_token(config, e: int, rank: int) -> int:
    """What autograd saves in one layer for one token, attention mask aside.

    Below fp32 every adapted linear layer keeps an fp32 copy of its own input, because the adapters
    are fp32; in fp32 they share the tensor that is there already.
    """
    D, I = config.hidden_size, _inner(config)
    heads, _, head_dim = _heads(config)
    attention, norms, lora = 4 * heads * head_dim * e, 2 * D * FP32, 7 * rank * FP32
    if e < FP32:
        return attention + norms + lora + FP32 * (6 * D + I) + 3 * I * e
    return attention + norms + lora + FP32 * 2 * D + 4 * I * e


def training_bytes(config, e, rank, tokens, row, targets, grad_checkpoint) -> dict:
    """The parts of one micro-batch of `tokens` padded tokens in rows of at most `row`.

    targets: response tokens in it, whose logits are made a chunk at a time.
    """
    D, I, V, layers = (config.hidden_size, _inner(config), config.vocab_size,
                       config.num_hidden_layers)
    saved = layer_bytes_per_token(config, e, rank)
    gradients = I * (FP32 + 4 * e)  # of one layer's widest tensors, during its backward pass
    # bool, and once more as the additive mask of the compute type that attention kernels take
    mask = tokens * row * (1 + e * (1 if grad_checkpoint else layers))
    chunk = min(LOGIT_CHUNK, targets)
    return {"checkpointed layer inputs": tokens * layers * D * e if grad_checkpoint else 0,
            "activations": tokens * (gradients + saved * (1 if grad_checkpoint else layers)),
            "attention mask": mask,
            # logits as they come and in fp32, their log-softmax and two gradients; then hidden
            # states and slopes of all targets
            "logit chunk": chunk * V * (e + 4 * FP32) + targets * D * (e + 3 * FP32)}


# ---------------------------------------------------------------------------------------------
# the estimate


def estimate(config, o, e: int = 0) -> dict:
    """What a run with options `o` needs: {phase: {part: bytes}}.

    Phase "always" is there throughout, the other phases come one at a time on top of it. e: bytes
    per number of the compute type; 0 = bf16 on a GPU, fp32 on a CPU, as Policy.load chooses.
    """
    e = e or (2 if _on_gpu(o.device) else FP32)
    counts, config = count_parameters(config, o.rank), config.get_text_config(decoder=True)
    P, n_tasks = o.max_prompt_tokens, o.seeds * o.variations + round(
        o.seeds * o.variations * o.replay)
    rollouts = lambda *shape: rollout_bytes(config, e, *shape, o.max_rows)

    def attempts(*Gs):  # at any number of tasks, with different G in turn: the larger of each part
        each = [rollout_bytes(config, e, o.max_rows, G, P, o.max_response_tokens,
                              rollout_rows(o, G, P)) for G in Gs]
        return {part: max(sizes[part] for sizes in each) for part in each[0]}

    def training(groups, G, R):
        # a micro-batch holds token_budget tokens, or one prompt and response if these are longer
        row = min(P + G * R, max(o.token_budget, P + R))
        tokens = min(groups * (P + G * R), max(o.token_budget, row))
        return training_bytes(config, e, o.rank, tokens, row, min(tokens, groups * G * R),
                              o.grad_checkpoint)

    state = FP32 * counts["lora"]  # one adapter in fp32
    return {
        "always": {"base weights": base_bytes(counts, o.quant, e),
                   # two policies: weights, gradients and the two moments of AdamW
                   "adapters and optimisers": 2 * 4 * state},
        "simulator rollouts": rollouts(o.seeds, o.variations, P, o.max_task_tokens),
        **({"agreement check": attempts(o.agreement)} if o.agreement else {}),
        "agent rollouts": rollouts(n_tasks, o.G, P, o.max_response_tokens),
        "agent update (GRPO)": training(n_tasks, o.G, o.max_response_tokens),
        # an RWR step can be undone, for which weights and moments are copied
        "simulator update (RWR)": {"copy of the simulator's state": 3 * state,
                                   **training(o.env_batch, 1, o.max_task_tokens)},
        "validation": attempts(o.val_samples, 1),  # sampled, and greedy
    }


def phase_peak(parts: dict) -> int:
    """Bytes of a phase: its parts together, but prefill and decoding logits never coincide."""
    either = ("prefill", "logits of a step")
    return sum(v for k, v in parts.items() if k not in either) + max(
        [parts.get(k, 0) for k in either])


def total_peak(phases: dict) -> int:
    """Bytes of a whole run: what is always there and the largest phase."""
    return phase_peak(phases["always"]) + max(
        phase_peak(parts) for name, parts in phases.items() if name != "always")


def check(config, o, available=None) -> str:
    """The estimate as a table to print. Raises UserError if it does not fit, naming what to lower.

    available: bytes free on the device; None asks the device, and where that is not known either
    the table is all there is.
    """
    phases = estimate(config, o)
    available = free_memory(o.device) if available is None else available
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
    advice = []
    for part, _ in parts:
        for option in OPTIONS_OF[part]:
            if _can_lower(o, option):
                advice.append(_advice(o, option))
    sizes = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in parts)
    return (f"this run needs an estimated {peak / 1e9:.1f} GB and {available / 1e9:.1f} GB are "
            f"free: during {phase}, {sizes} GB; use {', '.join(dict.fromkeys(advice))}")


def _can_lower(o, option) -> bool:
    """Not an option that already has its thriftiest value."""
    return not (option == "quant" and o.quant == "nf4") and not (
        option == "grad_checkpoint" and o.grad_checkpoint)


def _advice(o, option) -> str:
    flag = "--" + option.replace("_", "-")
    fixed = {"quant": "--quant nf4", "grad_checkpoint": flag, "model": "a smaller --model"}
    return fixed.get(option) or f"a lower {flag} (now {vars(o)[option]})"


def free_memory(device: str = "auto"):
    """Free bytes of the device; on a CPU what the system calls available, or None."""
    if _on_gpu(device):
        return torch.cuda.mem_get_info(None if device == "auto" else torch.device(device))[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":") for line in file)
    except OSError:  # not Linux
        return None
    return 1024 * int(sizes["MemAvailable"].split()[0])


# ---------------------------------------------------------------------------------------------
# the measurement


@contextmanager
def peak_memory(peaks: dict, phase: str, device):
    """`with peak_memory(peaks, "agent rollouts", policy.device)`: record the phase's peak in bytes.

    peaks[phase] becomes the largest seen so far. On a GPU it is what torch had allocated; on a CPU
    the process's resident high-water mark, which cannot be reset and so never falls. Raises
    UserError, naming the phase and what to lower, where the GPU runs out of memory.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield peaks
    except torch.OutOfMemoryError:
        # rows at once decide which random numbers a rollout gets: a resumed run must keep them
        advice = "go on from the last checkpoint with --resume and a lower --token-budget" \
            if "update" in phase else "start a run in another --out with a lower --max-rows"
        raise UserError(f"out of GPU memory during {phase}: {advice}") from None
    finally:
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
        else:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peaks[phase] = max(peak, peaks.get(phase, 0))


def peaks_line(peaks: dict, device) -> str:
    """The measured peaks as a line to print, and what was measured."""
    what = "peak memory" if torch.device(device).type == "cuda" else \
        "peak memory of the process, Python and its libraries included, at the end of each phase"
    return f"{what}: " + ", ".join(f"{k} {v / 1e9:.2f} GB" for k, v in peaks.items())


# ---------------------------------------------------------------------------------------------
# helpers


def _on_gpu(device: str) -> bool:
    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")


def _inner(config):
    """Width of the MLP; older families leave it out where it is four times the hidden size."""
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size


def _heads(config):
    """(query heads, key heads, head dimension) of a configuration."""
    heads = config.num_attention_heads
    # families differ in which of these they write down
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, key_heads, head_dim
