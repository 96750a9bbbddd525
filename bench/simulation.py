"""The GPU path without a GPU: torch's meta device in the role of "cuda".

    python -m bench memory --preset 7b-24gb             # estimate beside simulated peak, by phase
    python -m bench memory --preset 7b-24gb --card 24   # the same phases on a CUDA device, 24 GB of it

What of the paper this is: nothing; it is what stands in for a card where none is at hand.

Tensors on the meta device have shapes and types but no data, so a 7B model costs nothing. Tensors of
the CPU stay real: an operation that mixes both would fail on a GPU and raises here. What the host
reads of the device is counted by call site and answered with a constant (True, 10**6, 0.01).

Assumed: attention takes the kernel that torch takes on a GPU with cuDNN off. Flash: 16 bits, no mask,
compute capability 8.0 or more. Memory-efficient: a key for each query head, an additive mask whose
rows begin at multiples of 8 numbers (others are converted), 16 bits from 8.0 on, fp32 everywhere.
Math, which stores all scores, otherwise. The allocator hands out blocks of 512 bytes; fragmentation
is not simulated (memory.MARGIN). What kernels take inside and give back is in `inside`.
In rollouts the prompts are encoded, then the cache is filled up to the last tokens, which are drawn:
no response ends early.
"""
import dataclasses
import sys
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.models import QWEN_7B, qwen2_config, quiet, random_nf4
from common.files import UserError
from grpo import grpo_update
from policy import Policy, Rollout
from run import memory
from rwr import rwr_update
from watch.measure import movement
from worlds import rollout_rows

ROOT = str(Path(__file__).parent.parent)
aten = torch.ops.aten
# operations that start no kernel: memory is named or handed out, nothing is computed
FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted",
        "detach", "_unsafe_view", "lift_fresh", "_reshape_alias"}
LAUNCHES = {"gemm_4bit": 4, "cumsum": 2, "isin": 2, "sort": 4}  # that are more than one kernel
QWEN_1_5B = dict(hidden=1536, layers=28, vocab=151936, heads=12, kv_heads=2, intermediate=8960,
                 tied=True)


def on_gpu(x) -> bool:
    """Whether x is a tensor of the simulated GPU."""
    return isinstance(x, torch.Tensor) and x.device.type == "meta"


def constant(dtype):
    """What a host reads of the simulated GPU."""
    return True if dtype == torch.bool else 0.01 if dtype.is_floating_point else 10 ** 6


def site() -> str:
    """file:line function of the innermost frame that is the project's own, this file left out."""
    frame = sys._getframe(1)
    while frame:
        code = frame.f_code
        if code.co_filename.startswith(ROOT) and code.co_filename != __file__:
            return f"{code.co_filename[len(ROOT) + 1:]}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "?"


# ---------------------------------------------------------------------------------------------
# the device


class Simulation(TorchDispatchMode):
    """Bytes, kernels and host reads of all that runs inside `with Simulation():`.

    live, peak (bytes), where it was, kernels, reads {what at file:line: times}, math (calls of
    attention that no fused kernel takes). Raises RuntimeError on an operation that mixes devices, or
    a product of types.
    """

    device = "meta"

    def __init__(self, capability=8):
        super().__init__()
        self.live = self.peak = self.kernels = self.math = 0
        self.sizes, self.reads, self.where = {}, Counter(), ""
        self.calls, self.capability = _Calls(self), capability

    def __enter__(self):
        # by name: in a backward pass, where checkpointed layers run again, no function mode is active
        self.attend = torch.nn.functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = self.attention
        self.calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.calls.__exit__(*error)
        torch.nn.functional.scaled_dot_product_attention = self.attend

    def attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                  scale=None, enable_gqa=False):
        """The kernel that torch would choose, as the module's docstring says."""
        half, modern = query.dtype != torch.float32, self.capability >= 8
        if attn_mask is None and half and modern:
            return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False,
                                                            scale=scale)[0]
        if query.shape[1] != key.shape[1] or half and not modern:
            self.math += 1
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
        if attn_mask is not None:
            attn_mask = fitting(attn_mask, query)
        keep = torch.is_grad_enabled() and query.requires_grad
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, keep, 0.0, is_causal, scale=scale)[0]

    def read(self, what):
        """Count a copy between host and device for which the host waits."""
        self.reads[f"{what} at {site()}"] += 1

    def begin(self):
        """Peak, kernels and reads from here on. Returns the bytes that are there already."""
        self.peak, self.kernels = self.live, 0
        self.reads.clear()
        return self.live

    def hold(self, tensor):
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = -(-storage.nbytes() // 512) * 512
            self.live += self.sizes[key]
            weakref.finalize(storage, self.free, key)

    def free(self, key):
        self.live -= self.sizes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = [x for x in inputs if on_gpu(x)]
        if name == "_local_scalar_dense" and here:
            self.read("number read")
            return constant(here[0].dtype)
        target = kwargs.get("device")
        if name == "_to_copy" and target is not None:
            if here and torch.device(target).type == "cpu":
                self.read("copy to host")
                dtype = kwargs.get("dtype") or here[0].dtype
                return torch.full(here[0].shape, constant(dtype), dtype=dtype)
            if not here and torch.device(target).type == "meta":
                self.read("copy to device")
        elif here and any(x.dim() and not on_gpu(x) for x in inputs):
            if name not in ("copy_", "index", "index_put_", "index_put"):
                raise RuntimeError(f"{name} mixes devices at {site()}")
            self.read("copy to device")
        if name in ("mm", "addmm", "addmm_", "bmm") and len({x.dtype for x in here}) > 1:
            raise RuntimeError(f"{name} of two types at {site()}")  # meta would not see it
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if on_gpu(x)]
        for x in made:
            self.hold(x)
        if made or here:
            most = self.live + inside(name, args)
            if most > self.peak:
                self.peak, self.where = most, f"largest at {name} at {site()}"
            if not func.is_view and name not in FREE:
                self.kernels += LAUNCHES.get(name, 1)
        return out


def inside(name, args) -> int:
    """Bytes that a kernel takes for itself while it runs."""
    if name == "gemm_4bit":  # the weight unpacked, its scales
        numel = args[2][0] * args[2][1]
        return args[0].element_size() * numel + numel // 8
    if name == "cumsum":  # a copy in the type of the sums
        return 8 * args[0].numel() if args[0].dtype != torch.float64 else 0
    if name.endswith("efficient_attention_backward"):  # dQ in fp32, a number per query and head
        return 4 * (args[1].numel() + args[1].numel() // args[1].shape[-1])
    if name.endswith("flash_attention_backward"):  # the same; dK and dV of each query head
        queries, keys = args[1], args[2]
        shared = 4 * keys.numel() * queries.shape[1] // keys.shape[1]
        return 4 * queries.numel() + shared * (keys.shape[1] != queries.shape[1])
    return 0


class _Calls(TorchFunctionMode):
    """What has to be caught before torch takes it apart: lists read, tensors made of numbers."""

    def __init__(self, simulation):
        super().__init__()
        self.simulation = simulation

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.tolist and on_gpu(args[0]):
            self.simulation.read("list read")
            return torch.full(args[0].shape, constant(args[0].dtype), device="cpu").tolist()
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "meta":
            self.simulation.read("list written")
        if func is torch.Tensor.__setitem__ and on_gpu(args[0]) and not isinstance(
                args[2], torch.Tensor) and any(on_gpu(x) for x in tree_leaves(args[1])):
            self.simulation.read("number written")
        return func(*args, **kwargs)


def fitting(mask, query):
    """The mask as the memory-efficient kernel takes it: additive, its rows at multiples of 8."""
    if mask.dtype == torch.bool:
        mask = torch.full_like(mask, float("-inf"), dtype=query.dtype).masked_fill_(mask, 0)
    if any(stride % 8 for stride in mask.stride()[:-1]):
        K = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, 8 - K % 8))[..., :K]
    return mask.expand(*query.shape[:3], -1)


# ---------------------------------------------------------------------------------------------
# the phases of a preset


class Card:
    """A CUDA device in the place of the simulated one; torch may take `gigabytes` of it.

    What is simulated is measured here, so nothing is counted: kernels and reads are 0.
    """
    device, kernels, math, reads = "cuda", 0, 0, Counter()

    def __init__(self, gigabytes: float):
        if not torch.cuda.is_available():
            raise UserError("no CUDA device: leave --card out, and the device is simulated")
        if gigabytes < 1:
            raise UserError(f"--card {gigabytes:g}: give how many GB of the card torch may take")
        self.gigabytes = gigabytes

    def __enter__(self):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.gigabytes * 1e9 / total))
        return self

    def __exit__(self, kind, *error):
        torch.cuda.set_per_process_memory_fraction(1.0)
        if kind and issubclass(kind, torch.OutOfMemoryError):
            raise UserError("out of memory in the phase after the last of these") from None

    def begin(self):
        """Peaks from here on. Returns the bytes that are there already."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    @property
    def peak(self):
        return torch.cuda.max_memory_allocated()

    @property
    def where(self):
        """What the allocator held for it: a card must have this much, and the driver's own."""
        return f"most held by the allocator {torch.cuda.max_memory_reserved() / 1e9:.2f} GB"


def simulated_policy(o, config, device="meta") -> Policy:
    """Two policies on the simulated GPU, or on a real one."""
    dtype = torch.float32 if o.dtype == "fp32" else torch.bfloat16
    lm = random_nf4(config, device, dtype, nf4=o.quant == "nf4")
    with torch.device(device):
        policy = Policy(lm, SimpleNamespace(eos_token_id=config.vocab_size), rank=o.rank)
    policy.generator = lambda seed: None
    return policy


def resident(policy) -> dict:
    """Gradients and moments of both adapters, as after the first epoch -> {adapter: optimiser}."""
    optimizers = {name: policy.optimizer(name, 1e-5) for name in policy.params}
    for name, optimizer in optimizers.items():
        for p in policy.params[name]:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    return optimizers


def rollouts(simulation, policy, adapter, prompts, P, G, R, rows, drawn=4) -> int:
    """The first and the last tokens of rollouts. Returns the kernels of a decoded token."""
    prefill = policy._prefill

    def filled(prompts, _):
        cache, owner, hidden = prefill(prompts, G * (R - 1))
        for layer in cache.layers:
            B, heads, _, d = layer.keys.shape
            block = layer.keys.new_zeros(1).expand(B, heads, G * (R - drawn), d)
            layer.update(block, block)
        filled.kernels = simulation.kernels
        return cache, torch.cat([owner, owner.new_zeros(len(prompts), G * (R - drawn))], 1), hidden

    policy._prefill = filled
    try:
        policy.sample(adapter, [[7] * P] * min(prompts, max(1, rows // G)), G, drawn, 1.0, None, rows)
    finally:
        del policy._prefill
    return (simulation.kernels - filled.kernels) // drawn


def grpo_phase(policy, optimizer, o):
    """One update on the fullest micro-batch at several lengths of the responses."""
    G = o.G
    for R in sorted({o.max_response_tokens, max(2, o.max_response_tokens // 8), 8}):
        n, g, P = memory.fullest(o.mini_batch or 64, G, o.max_prompt_tokens, R, o.token_budget)
        batch = [Rollout(i // g, [7] * P, [7] * R, [-1.0] * R) for i in range(n * g)]
        with movement(policy.params, "agent"):
            grpo_update(policy, "agent", optimizer, batch, torch.tensor([[0.0, *[1.0] * (g - 1)]] * n),
                        dataclasses.replace(o, mini_batch=0))


def rwr_phase(policy, optimizer, o):
    """One update on the fullest micro-batch of records and texts."""
    R = o.max_task_tokens
    n, _, P = memory.fullest(o.env_batch, 1, o.max_prompt_tokens, R, o.token_budget)
    texts = [Rollout(i, [7] * P, [7] * R) for i in range(n)]
    with movement(policy.params, "env"):
        rwr_update(policy, "env", optimizer, texts, torch.ones(n), [list(range(n))] * 2, texts, o)


def simulate(o, config, simulation):
    """Yield (phase, bytes of its peak beside what is always there, kernels per token).

    simulation: a Simulation, or a Card to measure on. Between two phases it holds what it counted.
    """
    tasks = o.seed_tasks * o.variations + round(o.seed_tasks * o.variations * o.replay)
    P, R = o.max_prompt_tokens, o.max_response_tokens
    with simulation:
        policy = simulated_policy(o, config, simulation.device)
        optimizers = resident(policy)
        yield "always", simulation.begin(), 0
        for phase, run in {
                "simulator rollouts": lambda: rollouts(
                    simulation, policy, "env", o.seed_tasks * o.write_rounds, P, o.variations,
                    o.max_task_tokens, rollout_rows(o, o.variations, P)),
                "agent rollouts": lambda: rollouts(
                    simulation, policy, "agent", tasks, P, o.G, R, o.max_rows),
                "agent update (GRPO)": lambda: grpo_phase(policy, optimizers["agent"], o),
                "simulator update (RWR)": lambda: rwr_phase(policy, optimizers["env"], o)}.items():
            before = simulation.begin()
            per_token = run()
            yield phase, simulation.peak - before, per_token


def preset_options(name, dtype="auto"):
    """The options of a run with a preset on a GPU, and the shape of its model."""
    from run.options import parse_options
    o = parse_options(["--preset", name, "--dtype", dtype])
    o = dataclasses.replace(o, device="cuda")  # on the command line it would have to be there
    return o, qwen2_config(**(QWEN_7B if name.startswith("7b") else QWEN_1_5B))


def bench_memory(o):
    """Print the estimate of a preset beside its simulated peaks."""
    quiet()
    options, config = preset_options(o.preset, o.dtype)
    estimate = memory.estimate(config, options, 4 if o.dtype == "fp32" else 2)
    simulation = Card(o.card) if o.card else Simulation(o.capability)
    device, column = (f"{o.card:g} GB of {torch.cuda.get_device_name()}, torch {torch.__version__}",
                      "measured") if o.card else (f"capability {o.capability}.0", "simulated")
    print(f"{o.preset}, {o.dtype}; {device}: see bench/simulation.py for what is assumed\n"
          f"| phase | estimate GB | {column} GB | ratio | kernels | of a token |")
    for phase, peak, per_token in simulate(options, config, simulation):
        said = memory.phase_peak(estimate[phase])
        print(f"| {phase} | {said / 1e9:.2f} | {peak / 1e9:.2f} | {said / peak:.2f} | "
              f"{simulation.kernels or ''} | {per_token or ''} |", flush=True)
        if phase != "always":
            print(f"    {simulation.where}" + "".join(
                f"; {n} x {what}" for what, n in simulation.reads.most_common())
                + (f"; {simulation.math} calls of the math kernel" if simulation.math else ""))
