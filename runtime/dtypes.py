"""bf16 or fp32: in which numbers the frozen base computes.

What of the paper this is: nothing. How it is run: loading.load_model and memory.bytes_of call
`choose_dtype`, which is the option --dtype.

Adapters, their gradients and AdamW's moments are fp32 either way; so are logits and log-probs. What
bf16 moves: the sampler decodes a token at a time and the scorer reads whole groups, so the same
log-prob is rounded in two ways (logits near 20 are 0.125 apart in bf16). On a 135M Llama with
random adapters, whose text is far from certain, that came to 0.04 nats on average and 0.3 for the
worst of 288 tokens; TOLERANCE is what tests/test_real_model.py holds every release to.
"""
import re
import time
from functools import lru_cache

import torch

from data_pool import UserError

NAMES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# mean and largest |sampler - scorer| of a log-prob, nats, on text that the model wrote at T = 1
TOLERANCE = {torch.bfloat16: (0.08, 1.0), torch.float32: (1e-5, 1e-3)}
REAL = 256  # hidden size from which a model counts as a real one: smaller products gain nothing


def choose_dtype(dtype, device: str, model: str = "", config=None) -> torch.dtype:
    """The compute type: `dtype` itself ("bf16", "fp32", a torch.dtype), or what "auto" stands for.

    auto: bf16 on a GPU, fp32 below compute capability 8.0, where no fused attention takes bf16. On a
    CPU bf16 where its products are faster there and the model is a real
    one, else fp32; so the embedded worlds, whose results must not move, always get fp32.
    device: "cpu" or "cuda..."; model or config: what to look at. Raises UserError.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        if dtype not in NAMES:
            raise UserError(f"--dtype is {dtype!r}: choose from auto, {', '.join(NAMES)}")
        return NAMES[dtype]
    if device.startswith("cuda"):
        old = torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)
        return torch.float32 if old else torch.bfloat16
    if config is None:
        from runtime.memory import model_config
        config = model_config(model)
    hidden = getattr(config.get_text_config(decoder=True), "hidden_size", 0) or 0
    return torch.bfloat16 if hidden >= REAL and bf16_is_faster() else torch.float32


def device_fault(device: str) -> str:
    """Why no model can be put on a device, "" if one can: auto, cpu, cuda or cuda:N."""
    if device in ("auto", "cpu"):
        return ""
    number = re.fullmatch(r"cuda(?::(\d{1,3}))?", device)
    if not number:
        return "choose from auto, cpu, cuda, cuda:N"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "" if int(number[1] or 0) < count else \
        f"there are {count} CUDA devices that this torch can use; choose auto or cpu"


@lru_cache
def bf16_is_faster(size: int = 512, rounds: int = 8) -> bool:
    """Whether a (size, size) product takes clearly less time in bf16 than in fp32 on this CPU.

    Tens of milliseconds; the best of `rounds` counts, as a busy machine only ever adds time. CPUs
    are either several times as fast in bf16 or several times as slow: 1.5 lies between the two.
    """
    def best(dtype):
        a, times = torch.ones(size, size, dtype=dtype), []
        for _ in range(rounds):
            started = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - started)
        return min(times)
    return best(torch.float32) > 1.5 * best(torch.bfloat16)
