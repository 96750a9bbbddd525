"""Packed groups: how G responses share one row with their prompt, and the layers that know of it.

Paper: not in it; this is what makes a group cost P + G*R tokens instead of G*(P + R), in sampling and
in training.

Usage: policy.py lays groups out with `pack` and `attention_layout` and changes a model with `patch`;
transformers' models then call `group_attention`, PEFT's layers `lora_linear`, a decoding step
`GrowingLayer`, on a GPU within a `Stage`.

Deviations: the library's own attention, LoRA layer and cache give the same numbers with more memory
or more passes; tests/test_policy.py compares each with the plain one.

Shapes: B prompts (groups), G rollouts, P prompt, R response, D hidden, N responses in all (rows of
a result), L packed length, M predicted tokens of a pack, K cached keys, d head dimension; while
decoding `live` groups of `slots` rollouts each.
"""
import math
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, compress

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from model.files import first_line

SHORT = 1024  # tokens up to which a training pass may keep its attention weights
PROMPT, PADDING = -1, -2  # owners of a cached key that are not a rollout


def pack(groups, pad_id: int, device=None) -> dict:
    """Lay each group out as one row: prompt, then its responses one after another.

    groups: B lists of Rollouts that share a prompt. The last token of a response predicts nothing,
    so it is a target but not an input. Returns ids and positions (B, L); for the M tokens that the
    policy drew the index `source` of the hidden state that predicts each (into B*L), its `target`
    id and its place (rows, cols) in the result, whose `shape` is (N, R).
    """
    B, L = len(groups), max(map(packed_length, groups))
    ids, positions, source, target, rows, cols, drawn, row = [], [], [], [], [], [], [], 0
    for b, group in enumerate(groups):
        line = list(group[0].prompt)
        P, places = len(line), list(range(len(line)))
        for r in group:
            R, start = len(r.response), b * L + len(line)
            line += r.response[:-1]
            places += range(P, P + R - 1)  # every response starts at P again
            # the first response token is predicted by the prompt's last one, the others in turn
            source += [b * L + P - 1, *range(start, start + R - 1)]
            target += r.response
            rows += [row] * R
            cols += range(R)
            drawn += r.drawn or [True] * R
            row += 1
        ids += line + [pad_id] * (L - len(line))
        positions += places + [0] * (L - len(line))
    # lists until here, then one transfer for each shape
    inputs = torch.tensor([ids, positions], device=device).view(2, B, L)
    # observations are inputs of an episode, but nobody's choice
    outputs = [list(compress(values, drawn)) for values in (source, target, rows, cols)]
    outputs = torch.tensor(outputs, device=device)  # (4, M)
    return dict(zip(("ids", "positions", "source", "target", "rows", "cols"), (*inputs, *outputs)),
                shape=(row, max(cols) + 1))


def packed_length(group) -> int:
    """Tokens of a group's row in `pack`."""
    return len(group[0].prompt) + sum(len(r.response) - 1 for r in group)


def group_mask(query_owner, key_owner, causal: bool):
    """Who sees whom: (B, Q), (B, K) owners -> (B, 1, Q, K) bool, True = visible.

    A token sees the prompt of its row and the earlier tokens of its own rollout. With `causal` the
    queries are the last Q of the keys, in order; the diagonal stays True for padding too, as a row
    that sees nothing would be NaN in the softmax.
    """
    visible = (query_owner[:, :, None] == key_owner[:, None, :]) | (key_owner == PROMPT)[:, None, :]
    return (visible.tril(key_owner.shape[1] - query_owner.shape[1]) if causal else visible)[:, None]


def attention_layout(groups, device=None) -> dict:
    """How `group_attention` cuts packed rows (B, L) into B prompts and N responses, and back.

    P, R: longest prompt and longest response input. row (N,): the group of each response; tokens
    (N*R,): where its inputs lie in B*L; mask (N, 1, R, P + R): what they see of [prompt, response];
    back (B, L): where each packed token lies among the B*P prompt and N*R response outputs.
    """
    B, L, prompts = len(groups), max(map(packed_length, groups)), [len(g[0].prompt) for g in groups]
    # of each response: its group, its prompt's length, its first column and how many inputs it has
    table = []
    for b, (group, p) in enumerate(zip(groups, prompts)):
        lengths = [len(r.response) - 1 for r in group]
        table += [(b, p, p + start, n) for start, n in zip(accumulate(lengths, initial=0), lengths)]
    N, P, R = len(table), max(prompts), max(1, *(n for *_, n in table))
    # all that has more than N entries is made where it is needed: the mask may take 75 MB
    row, prompts, starts, lengths = torch.tensor(table, device=device).T     # (N,)
    place, column = torch.arange(R, device=device), torch.arange(L, device=device)
    inside = place < lengths[:, None]                                        # (N, R)
    tokens = row[:, None] * L + starts[:, None] + place                      # (N, R)
    owner = torch.where(inside, 0, PADDING)
    prompt_owner = torch.where(torch.arange(P, device=device) < prompts[:, None], PROMPT, PADDING)
    # padding is read from as many places as it has: backward, additions to one row would queue
    back = torch.arange(B, device=device)[:, None] * P + column % P          # (B, L)
    # what is outside goes into one cell more, which is cut off: boolean indexing would force a
    # synchronisation
    back = torch.cat([back.flatten(), back.new_zeros(1)])
    back[tokens.where(inside, B * L)] = B * P + torch.arange(N * R, device=device).view(N, R)
    mask = group_mask(owner, torch.cat([prompt_owner, owner], dim=1), causal=True)
    return dict(P=P, R=R, row=row, tokens=tokens.clamp(max=B * L - 1).flatten(),
                back=back[:-1].view(B, L), mask=mask)


def group_attention(module, query, key, value, attention_mask, layout=None, **kwargs):
    """Attention as the library's models call it, of packed groups if there is a `layout`.

    query (B, heads, L, d), key and value (B, key heads, L, d) -> (B, L, heads, d), None. Prompts
    attend to themselves in a plain causal call, responses to [prompt, response] as N short rows: no
    siblings are met, where a mask over (L, L) would compute them all in order to hide them.
    """
    if layout is None:
        # a decoding step, or a narrow chunk: a mask for each head is smaller than keys for each
        few = attention_mask is not None and query.shape[2] <= query.shape[3]
        attend = few_queries_attention if few and query.shape[1] > key.shape[1] else sdpa_attention_forward
        return attend(module, query, key, value, attention_mask, **kwargs)
    P, R, row = layout["P"], layout["R"], layout["row"]

    def gather_responses(x):  # (B, h, L, d) -> (N, h, R, d)
        flat = x.transpose(1, 2).flatten(0, 1).index_select(0, layout["tokens"])
        return flat.unflatten(0, (-1, R)).transpose(1, 2)

    def with_prompts(x):  # (B, h, L, d) -> (N, h, P + R, d)
        return torch.cat([x[:, :, :P].index_select(0, row), gather_responses(x)], dim=2)

    # the fused kernel for CPUs is slow backward in bf16: the unfused kernel takes its place, in
    # scoring too, so that ratios start at 1
    slow = query.dtype == torch.bfloat16 and query.device.type == "cpu"
    with sdpa_kernel(SDPBackend.MATH) if slow and P + R <= SHORT else nullcontext():
        prompts, _ = sdpa_attention_forward(module, query[:, :, :P], key[:, :, :P],
                                            value[:, :, :P], None, **kwargs)   # (B, P, heads, d)
        responses, _ = sdpa_attention_forward(module, gather_responses(query), with_prompts(key),
                                              with_prompts(value), layout["mask"], **kwargs)
    both = torch.cat([prompts.flatten(0, 1), responses.flatten(0, 1)])        # (B*P + N*R, ...)
    return both.index_select(0, layout["back"].flatten()).unflatten(0, layout["back"].shape), None


def few_queries_attention(module, query, key, value, mask, scaling=None, **_):
    """Masked attention of few queries where query heads share keys; shapes as in group_attention.
    mask (live, 1, slots, K), or (live, 1, sharing * slots, K) of `step_mask`.

    Under a mask the library copies the keys for each query head. At every token that would be the
    whole cache, several times over; here the heads that share keys become one longer query.
    """
    sharing = query.shape[1] // key.shape[1]
    q = query.unflatten(1, (-1, sharing)).flatten(2, 3)  # (live, key heads, sharing * slots, d)
    mask = mask if mask.shape[2] == q.shape[2] else mask.repeat(1, 1, sharing, 1)
    out = torch.nn.functional.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scaling)
    return out.unflatten(2, (sharing, -1)).flatten(1, 2).transpose(1, 2), None


def step_mask(config, dtype, rollout, owner):
    """What a decoding step sees, made for a GPU once and not in each layer.

    rollout (live, slots), owner (live, K) -> (live, 1, slots or sharing * slots, K) in `dtype`: 0
    where visible, else -inf, as kernels take it, each row beginning at a multiple of 8 numbers.
    """
    (live, slots), K = rollout.shape, owner.shape[1]
    heads, key_heads, head_dim = heads_of(config)
    sharing = heads // key_heads if slots <= head_dim else 1
    mask = owner.new_full((live, 1, sharing * slots, -(-K // 8) * 8), -math.inf, dtype=dtype)[..., :K]
    return mask.masked_fill_(group_mask(rollout, owner, False).repeat(1, 1, sharing, 1), 0)


def heads_of(config):
    """(query heads, key heads, head dimension) of a configuration."""
    heads = config.num_attention_heads
    # families differ in which of these they write down
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def eager_in_fp32(layer, query, key, value, mask, **options):
    """The plain attention of a model's own family, with scores in fp32, as those of `group_attention` are.

    bf16 would round them, and Qwen2.5's are so large that log-probs move by 0.5 nats (its 1.5B model).
    """
    eager = sys.modules[type(layer).__module__].eager_attention_forward
    out, weights = eager(layer, query.float(), key.float(), value.float(), mask.float(), **options)
    return out.to(query.dtype), weights


# ordinary calls keep the library's masks: only calls that bring a layout are treated differently
AttentionInterface.register("prompt_once", group_attention)
AttentionMaskInterface.register("prompt_once", sdpa_mask)
AttentionInterface.register("eager_fp32", eager_in_fp32)
AttentionMaskInterface.register("eager_fp32", eager_mask)


def patch(model):
    """Change the modules of a PEFT model in place: exact scores, fewer passes over large tensors."""
    switch_off_dropout(model)
    for module in model.modules():
        # bitsandbytes on a CPU: at the first inference it would repack 4-bit weights for a kernel
        # that has no gradient, and training would err
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
        # LoRA with fewer passes over its outputs
        if is_plain_lora(module):
            module.forward, module.cast = partial(lora_linear, module), None
        # RMS norm in one kernel of a GPU instead of eight
        rms = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
        if rms and module.weight.device.type != "cpu":
            module.forward = partial(torch.nn.functional.rms_norm, normalized_shape=module.weight.shape,
                                     weight=module.weight, eps=module.variance_epsilon)
        # gradient checkpointing: in force in train mode only, see Policy._hidden
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = partial(
                checkpoint, use_reentrant=False, preserve_rng_state=False)
    # cuDNN plans its attention for exact sizes, and in decoding each step has its own
    torch.backends.cuda.enable_cudnn_sdp(False)


def switch_off_dropout(model):
    """Every dropout of the modules, and of the configurations that they ask, becomes 0.

    A block that is computed again in the backward pass stands in train mode the first time only, and
    some families ask that mode in the block itself: what is computed twice would differ.
    """
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    for owner in modules + [m.config for m in modules if hasattr(m, "config")]:
        for name, value in vars(owner).items():
            if "drop" in name and isinstance(value, float):
                setattr(owner, name, 0.0)


def lora_linear(layer, x):
    """y = W x + scaling B A x of the active adapter: x (..., in) -> (..., out).

    The forward pass of a PEFT LoRA layer with fewer passes over the outputs: scaling is applied to
    A, and the product with B is added where W x already lies.
    """
    rows = x.flatten(0, -2)
    out = layer.base_layer(rows)
    name = layer.active_adapters[0]
    if name in layer.lora_A and not layer.disable_adapters:  # an adapter may leave layers out
        # weights are kept in fp32, products are in the dtype of the activations
        A, B = layer.cast or cast_lora(layer, name, x.dtype)
        # rows have two dimensions, so `out` is not a view and autograd allows it
        out.addmm_(torch.nn.functional.linear(rows, A), B.T)  # (rows, r) times (r, out)
    return out.unflatten(0, x.shape[:-1])


def cast_lora(layer, name, dtype):
    """Scaling times A (r, in), and B (out, r), of one adapter in `dtype`; gradients pass."""
    A, B = (matrices[name].weight.to(dtype) for matrices in (layer.lora_A, layer.lora_B))
    return A * layer.scaling[name], B


def is_plain_lora(module) -> bool:
    """Whether `lora_linear` computes what this PEFT layer would: no DoRA, no bias besides B."""
    from peft.tuners import lora
    return type(module) in (lora.Linear, getattr(lora, "Linear4bit", None)) and not module.lora_variant and \
        all(matrix.bias is None for matrix in module.lora_B.values())


# ---------------------------------------------------------------------------------------------
# the cache


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with room to spare, which grows until it is fixed.

    The library's dynamic layer copies the whole cache for every token; this one copies only when
    the buffer is full, which then grows by half. room: keys that the first buffer holds at least;
    most: keys that there can ever be, more room would be waste.
    """

    def __init__(self, room=0, most=math.inf):
        super().__init__()
        self.room, self.most, self.at = room, most, None

    def fix(self, room, at):
        """From here on buffers of `room` keys stay where they are, and new keys go to their columns
        `at` (slots,), which the caller moves on."""
        self.buffers = self.keys, self.values = [_grown(x, room) for x in (self.keys, self.values)]
        self.at = at

    def update(self, key_states, value_states, *args, **kwargs):
        """Append (live, heads, slots, d) keys and values; returns views of all so far, or once fixed
        the whole buffers: a mask has to hide what is not written yet."""
        if self.at is not None:
            for buffer, new in zip(self.buffers, (key_states, value_states)):
                buffer.index_copy_(2, self.at, new)
            return self.buffers
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = self.keys, self.values = [
                x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (key_states, value_states)]
        K, S = self.keys.shape[2], key_states.shape[2]
        if K + S > self.buffers[0].shape[2]:
            room = max(self.room, min(self.most, K + S + max(32 * S if K else 0, K // 2)))
            self.buffers = tuple(_grown(x, room) for x in (self.keys, self.values))
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, K:K + S] = new
        self.keys, self.values = (buffer[:, :, :K + S] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices):
        """Keep only the rows `indices` of the batch."""
        super().batch_select_indices(indices)
        self.buffers = (self.keys, self.values)


def _grown(x, room):
    """x (live, heads, K, d) at the front of a buffer (live, heads, room, d). Zeros behind: what a mask
    hides must be finite."""
    return torch.nn.functional.pad(x, (0, 0, 0, room - x.shape[2]))


# ---------------------------------------------------------------------------------------------
# decoding on a GPU


class Stage:
    """Decoding steps whose tensors keep shape and place, so that a GPU can record one and replay it:
    the host then starts one graph a token, not 1,700 kernels for which a large card waits.

    left: the steps that there is still room for.
    """

    def __init__(self, decode, config, cache, rollout, owner, places, steps):
        """decode(cache, ids, places, mask) -> hidden states (live, slots, D). rollout, places (live,
        slots) and owner (live, K), with the keys of the first step, are those of the first step."""
        (_, slots), K = rollout.shape, owner.shape[1]
        self.decode, self.cache, self.slots, self.left = decode, cache, slots, steps
        self.at = torch.arange(K - slots, K, device=owner.device)  # columns of a step's own keys
        for layer in cache.layers:
            layer.fix(K + (steps - 1) * slots, self.at)
        see = partial(step_mask, config, cache.layers[0].keys.dtype, rollout)
        self.mask = see(torch.nn.functional.pad(owner, (0, (steps - 1) * slots), value=PADDING))
        self.own, self.ids, self.places = see(rollout), torch.empty_like(rollout), places.clone()
        self.calls, self.replay = 0, None

    def __call__(self, ids):
        """Feed one token more of each rollout: ids (live, slots) -> hidden states (live, slots, D), in
        memory that the next call may use again."""
        self.ids.copy_(ids)
        self.left, self.calls = self.left - 1, self.calls + 1
        if self.calls == 2:  # the first call loads kernels and makes plans, as no recording may
            self.replay = recorded(self._step, ids.device)
        return (self.replay or self._step)()

    def _step(self):
        """What is recorded: no number of Python's changes from call to call, only tensors in place."""
        self.mask.index_copy_(3, self.at, self.own)  # the step's own keys are seen from now on
        hidden = self.decode(self.cache, self.ids, self.places, self.mask)
        self.at.add_(self.slots)
        self.places.add_(1)
        return hidden


def recorded(step, device):
    """A CUDA graph of step() to call in its place, whose result always lies in the same memory; None
    on other devices, and where a model does what a graph cannot hold."""
    if device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    try:  # the outer context: back to this stream, however the recording ends
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            out = step()  # its kernels are noted, none is started
    except RuntimeError as error:
        warnings.warn(f"rollouts are slow, no CUDA graph holds this model: {first_line(error)}")
        return None
    return lambda: graph.replay() or out  # replay returns None
