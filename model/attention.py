"""Packed groups: how G responses share one row with their prompt, and the layers that know of it.

Paper: not in it; this is what makes a group cost P + G*R tokens instead of G*(P + R), in sampling
and in training.

Usage: policy.py lays groups out with `pack` and has `attention_layout` cut such rows; it changes a
model with `patch`. transformers' models then call `group_attention`, PEFT's layers `lora_linear`.

Deviations: the library's own attention and LoRA layer give the same numbers with more memory or
more passes; tests/test_policy.py compares each with the plain one.

Shapes: B prompts (groups), G rollouts, P prompt, R response, D hidden, N responses in all (rows of
a result), L packed length, M predicted tokens of a pack, K cached keys, d head dimension; while
decoding `live` groups of `slots` rollouts each.
"""
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

SHORT = 1024  # tokens up to which a training pass may keep its attention weights
PROMPT, PADDING = -1, -2  # owners of a cached key that are not a rollout


def group_mask(query_owner, key_owner):
    """Who sees whom: (B, Q), (B, K) owners -> (B, 1, Q, K) bool, True = visible: the prompt of its
    row and the tokens of its own rollout."""
    visible = query_owner[:, :, None] == key_owner[:, None, :]      # (B, Q, K)
    visible |= (key_owner == PROMPT)[:, None, :]
    return visible[:, None]


@dataclass
class Layout:
    """How `group_attention` cuts packed rows (B, L) into B prompts and N responses, and back."""
    P: int                # longest prompt
    R: int                # longest response input
    row: torch.Tensor     # (N,): the group of each response
    tokens: torch.Tensor  # (N*R,): where its inputs lie in B*L
    back: torch.Tensor    # (B, L): where a packed token lies among B*P + N*R outputs
    mask: torch.Tensor    # (N, 1, R, P + R): what response inputs see of [prompt, response]


def attention_layout(x) -> Layout:
    """The layout of a policy.Pack."""
    (B, L), device = x.ids.shape, x.ids.device
    N, P = len(x.spans), max(P for _, P, _, _ in x.spans)
    R = max(1, x.shape[1] - 1)
    # all that has more than N entries is made where it is needed: the mask may take 75 MB
    row, lengths, starts, inputs = torch.tensor(x.spans, device=device).T    # (N,)
    place, column = torch.arange(R, device=device), torch.arange(L, device=device)
    inside = place < inputs[:, None]                                         # (N, R)
    tokens = row[:, None] * L + starts[:, None] + place                      # (N, R)
    owner = torch.where(inside, 0, PADDING)                                  # (N, R)
    in_prompt = torch.arange(P, device=device) < lengths[:, None]            # (N, P)
    keys = torch.cat([torch.where(in_prompt, PROMPT, PADDING), owner], dim=1)
    # padding is read from as many places as it has: backward, additions to one row would queue
    back = torch.arange(B, device=device)[:, None] * P + column % P          # (B, L)
    # what is outside goes into one cell more, which is cut off: boolean indexing would force a
    # synchronisation
    back = torch.cat([back.flatten(), back.new_zeros(1)])
    responses = torch.arange(N * R, device=device).view(N, R)
    back[tokens.where(inside, B * L)] = B * P + responses
    tokens = tokens.clamp(max=B * L - 1).flatten()
    # a response input sees nothing after itself; the diagonal stays True for padding too, as a row
    # that sees nothing would be NaN in the softmax
    mask = group_mask(owner, keys).tril(P)
    return Layout(P, R, row, tokens, back[:-1].view(B, L), mask)


def group_attention(module, query, key, value, attention_mask, layout=None, **kwargs):
    """Attention as the library's models call it, of packed groups if there is a `layout`.

    query (B, heads, L, d), key and value (B, key heads, L, d) -> (B, L, heads, d), None. Prompts
    attend to themselves in a plain causal call, responses to [prompt, response] as N short rows: no
    siblings are met, where a mask over (L, L) would compute them all in order to hide them.
    """
    if layout is None:
        # a decoding step, or a narrow chunk: a mask for each head is smaller than keys for each
        few = attention_mask is not None and query.shape[2] <= query.shape[3]
        if few and query.shape[1] > key.shape[1]:
            return few_queries_attention(module, query, key, value, attention_mask, **kwargs)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    P, R, back = layout.P, layout.R, layout.back

    def gather_responses(x):  # (B, h, L, d) -> (N, h, R, d)
        flat = x.transpose(1, 2).flatten(0, 1).index_select(0, layout.tokens)
        return flat.unflatten(0, (-1, R)).transpose(1, 2)

    def with_prompts(x):  # (B, h, L, d) -> (N, h, P + R, d)
        return torch.cat([x[:, :, :P].index_select(0, layout.row), gather_responses(x)], dim=2)

    # the fused kernel for CPUs is slow backward in bf16: the unfused kernel takes its place, in
    # scoring too, so that ratios start at 1
    slow = query.dtype == torch.bfloat16 and query.device.type == "cpu"
    kernel = nullcontext()
    if slow and P + R <= SHORT:
        kernel = sdpa_kernel(SDPBackend.MATH)
    with kernel:
        prompts, _ = sdpa_attention_forward(module, query[:, :, :P], key[:, :, :P],
                                            value[:, :, :P], None, **kwargs)   # (B, P, heads, d)
        responses, _ = sdpa_attention_forward(module, gather_responses(query), with_prompts(key),
                                              with_prompts(value), layout.mask, **kwargs)
    both = torch.cat([prompts.flatten(0, 1), responses.flatten(0, 1)])        # (B*P + N*R, ...)
    return both.index_select(0, back.flatten()).unflatten(0, back.shape), None


def few_queries_attention(module, query, key, value, mask, scaling=None, **_):
    """Masked attention of few queries where query heads share keys; shapes as in group_attention.
    mask (live, 1, slots, K), or (live, 1, sharing * slots, K) of graphs.step_mask.

    Under a mask the library copies the keys for each query head. At every token that would be the
    whole cache, several times over; here the heads that share keys become one longer query.
    """
    sharing = query.shape[1] // key.shape[1]
    q = query.unflatten(1, (-1, sharing)).flatten(2, 3)  # (live, key heads, sharing * slots, d)
    if mask.shape[2] < q.shape[2]:
        mask = mask.repeat(1, 1, sharing, 1)
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(q, key, value, attn_mask=mask, scale=scaling)
    return out.unflatten(2, (sharing, -1)).flatten(1, 2).transpose(1, 2), None


def heads_of(config):
    """(query heads, key heads, head dimension) of a configuration."""
    heads = config.num_attention_heads
    # families differ in which of these they write down
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def eager_in_fp32(layer, query, key, value, mask, **options):
    """The plain attention of a model's own family, with scores in fp32, as those of
    `group_attention` are.

    bf16 would round them, and Qwen2.5's are so large that log-probs move by 0.5 nats (its 1.5B
    model).
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
    """Change the modules of a PEFT model in place: exact scores, fewer passes over large
    tensors."""
    checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
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
            weight, eps = module.weight, module.variance_epsilon
            module.forward = partial(torch.nn.functional.rms_norm, normalized_shape=weight.shape,
                                     weight=weight, eps=eps)
        # gradient checkpointing: in force in train mode only, see Policy._hidden
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = checkpointed
    # cuDNN plans its attention for exact sizes, and in decoding each step has its own
    torch.backends.cuda.enable_cudnn_sdp(False)


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
    if type(module) not in (lora.Linear, getattr(lora, "Linear4bit", None)) or module.lora_variant:
        return False
    return all(matrix.bias is None for matrix in module.lora_B.values())
