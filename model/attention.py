"""Compute attention and LoRA for packed groups: one row holds a prompt and its G responses.

Paper: does not cover this. A group costs P + G*R tokens instead of G*(P + R), in sampling and in
training.

Usage: policy.py lays groups out with `packing.pack`, plans with `attention_layout` how to cut these
rows, and changes a model with `patch`. After that, transformers' models call `group_attention`, and
PEFT's layers call `lora_linear`.

Deviations: none in the numbers. The libraries' own attention and LoRA layers take more memory or
more passes over their tensors; tests/test_policy.py compares each replacement with the plain
version.

Shapes: B prompts (groups), G rollouts of each, N responses in all, P prompt tokens, R inputs of a
response (its tokens but the last, which predicts nothing), L tokens of a packed row, Q queries, K
cached keys, d head dimension. While decoding, there are `live` groups of `slots` rollouts each.
"""
import sys
from dataclasses import dataclass
from functools import partial

import torch
from peft.tuners import lora
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

PROMPT, PADDING = -1, -2  # owners of cached keys that belong to no rollout


def group_mask(query_owner, key_owner):
    """Return which keys each query sees: (B, Q), (B, K) owners -> (B, 1, Q, K) bool.

    A query sees (True) the row's prompt and the tokens of its own rollout.
    """
    visible = query_owner[:, :, None] == key_owner[:, None, :]      # (B, Q, K)
    visible |= (key_owner == PROMPT)[:, None, :]
    return visible[:, None]


@dataclass
class Layout:
    """Describe how `group_attention` cuts packed rows (B, L) into B prompts and N responses, and
    puts their results back."""
    P: int                # tokens of the longest prompt
    R: int                # inputs of the longest response
    row: torch.Tensor     # (N,): the group of each response
    tokens: torch.Tensor  # (N*R,): indices of the responses' inputs in B*L
    back: torch.Tensor    # (B, L): index of each packed token among the B*P + N*R outputs
    mask: torch.Tensor    # (N, 1, R, P + R): what response inputs see of [prompt, response]


# This packed row holds a prompt p of 3 tokens, responses a of 3 and b of 2 tokens, and padding.
# Each response lacks its last token, so P = 3 and R = 2. The row is cut up for two calls:
#
#     packed row (L = 7)       prompts (B, P)        responses: queries (N, R), keys (N, P + R)
#     p p p a a b .            p p p  causal         a a    see   p p p a a
#     0 1 2 3 4 3 .  position                        b .    see   p p p b .
#
# `tokens` locates each response input in the packed rows. `back` locates each packed token in the
# outputs of both calls.


def attention_layout(x) -> Layout:
    """Return the layout of a packing.Pack."""
    B, L = x.ids.shape
    N, P, R = len(x.spans), max(P for _, P, _, _ in x.spans), max(1, x.shape[1] - 1)
    # 1) Find each token's place in the outputs, and each response input's place in the rows. First
    # treat all tokens of a row as its prompt, then insert the responses. Padding and unfilled
    # places may read any place, but they are spread out: if many read the same one, the backward
    # pass would have to add their gradients one after another.
    back = [b * P + column % P for b in range(B) for column in range(L)]
    tokens = [place % (B * L) for place in range(N * R)]
    for n, (b, _, start, inputs) in enumerate(x.spans):
        for i in range(inputs):
            token, place = b * L + start + i, n * R + i
            tokens[place], back[token] = token, B * P + place
    # 2) Let each response input see the prompt, itself and the inputs before it. Padding sees
    # itself, too: the softmax of a row that sees nothing would be NaN. The mask may take 75 MB, so
    # it is made on the device.
    tensor = partial(torch.tensor, device=x.ids.device)
    row, lengths, _, inputs = tensor(x.spans).T                              # (N,)
    owner = torch.where(tensor(range(R)) < inputs[:, None], 0, PADDING)      # (N, R)
    in_prompt = tensor(range(P)) < lengths[:, None]                          # (N, P)
    keys = torch.cat([torch.where(in_prompt, PROMPT, PADDING), owner], dim=1)
    mask = group_mask(owner, keys).tril(P)
    return Layout(P, R, row, tensor(tokens), tensor(back).view(B, L), mask)


def group_attention(module, query, key, value, attention_mask, layout=None, **kwargs):
    """Compute attention for the library's models; with a `layout`, rows are packed groups.

    query (B, heads, L, d), key and value (B, key heads, L, d) -> (B, L, heads, d), None. Prompts
    attend to themselves in one plain causal call. Responses attend to [prompt, response] as N short
    rows: under one mask over (L, L), scores between the responses of a group would be computed only
    to be hidden.
    """
    if layout is None:
        if attention_mask is None:
            key, value = a_head_each(query, key, value)
        elif query.shape[2] <= query.shape[3] and query.shape[1] > key.shape[1]:
            # with so few queries (a decoding step, a narrow chunk), repeating the mask for each
            # head takes less memory than repeating the keys
            return few_queries_attention(module, query, key, value, attention_mask, **kwargs)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    P, R, back = layout.P, layout.R, layout.back

    def gather_responses(x):  # (B, h, L, d) -> (N, h, R, d)
        flat = x.transpose(1, 2).flatten(0, 1).index_select(0, layout.tokens)
        return flat.unflatten(0, (-1, R)).transpose(1, 2)

    def with_prompts(x):  # (B, h, L, d) -> (N, h, P + R, d)
        return torch.cat([x[:, :, :P].index_select(0, layout.row), gather_responses(x)], dim=2)

    shared = a_head_each(query, key[:, :, :P], value[:, :, :P])
    prompts, _ = sdpa_attention_forward(module, query[:, :, :P], *shared, None, **kwargs)
    responses, _ = sdpa_attention_forward(module, gather_responses(query), with_prompts(key),
                                          with_prompts(value), layout.mask, **kwargs)
    both = torch.cat([prompts.flatten(0, 1), responses.flatten(0, 1)])        # (B*P + N*R, ...)
    return both.index_select(0, back.flatten()).unflatten(0, back.shape), None


def a_head_each(query, *shared):
    """Return keys and values; in fp32 on a GPU, repeat them for each query head.

    In that case, only the unfused kernel lets query heads share keys, and it would hold all scores
    (B, heads, P, P) at once.
    """
    if query.dtype == torch.float32 and query.device.type == "cuda":
        sharing = query.shape[1] // shared[0].shape[1]
        return [x.repeat_interleave(sharing, dim=1) for x in shared]
    return shared


def few_queries_attention(module, query, key, value, mask, scaling=None, **_):
    """Compute masked attention of a few queries whose heads share keys.

    The shapes are those of group_attention. mask: (live, 1, slots, K), or from decoding.step_mask
    (live, 1, sharing * slots, K), where `sharing` query heads share a key head. Given a mask, the
    library would copy the keys for each query head, so every token would copy the whole cache
    several times. Here the queries of heads that share keys are joined into one longer query.
    """
    sharing = query.shape[1] // key.shape[1]
    q = query.unflatten(1, (-1, sharing)).flatten(2, 3)  # (live, key heads, sharing * slots, d)
    if mask.shape[2] < q.shape[2]:
        mask = mask.repeat(1, 1, sharing, 1)
    out = scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scaling)
    return out.unflatten(2, (sharing, -1)).flatten(1, 2).transpose(1, 2), None


def heads_of(config):
    """Return (query heads, key heads, head dimension) of a configuration."""
    heads = config.num_attention_heads
    # families of models differ in which of these they define
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def eager_in_fp32(layer, query, key, value, mask, **options):
    """Compute the plain attention of a model's family with scores in fp32, as `group_attention`
    does.

    bf16 would round the scores. Qwen2.5-1.5B's are so large that its log-probs would shift by 0.5
    nats.
    """
    eager = sys.modules[type(layer).__module__].eager_attention_forward
    out, weights = eager(layer, query.float(), key.float(), value.float(), mask.float(), **options)
    return out.to(query.dtype), weights


# calls without a layout use the library's masks
AttentionInterface.register("prompt_once", group_attention)
AttentionMaskInterface.register("prompt_once", sdpa_mask)
AttentionInterface.register("eager_fp32", eager_in_fp32)
AttentionMaskInterface.register("eager_fp32", eager_mask)


def patch(model):
    """Change a PEFT model in place, for correct gradients and fewer passes over large tensors."""
    for module in model.modules():
        keep_gradients_of_nf4(module)
        use_short_lora(module)
        use_fused_rms_norm(module)
        use_checkpointing(module)
    # cuDNN would plan its attention anew at every decoding step, because the sizes change
    torch.backends.cuda.enable_cudnn_sdp(False)


def keep_gradients_of_nf4(module):
    """Keep bitsandbytes from repacking 4-bit weights at the first inference on a CPU.

    The kernel that it repacks them for has no gradient, so training would be wrong.
    """
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.support_avx512bf16_for_cpu = False


def use_short_lora(module):
    """Replace the forward pass of a LoRA layer with `lora_linear`, unless it has DoRA or a bias."""
    is_linear = type(module) in (lora.Linear, getattr(lora, "Linear4bit", None))
    if is_linear and not module.lora_variant:
        if all(matrix.bias is None for matrix in module.lora_B.values()):
            module.forward, module.cast = partial(lora_linear, module), None


def use_fused_rms_norm(module):
    """Make an RMS norm run as one GPU kernel instead of eight."""
    is_rms_norm = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    if is_rms_norm and module.weight.device.type != "cpu":
        weight = module.weight
        module.forward = partial(rms_norm, normalized_shape=weight.shape, weight=weight,
                                 eps=module.variance_epsilon)


def use_checkpointing(module):
    """Prepare a block for gradient checkpointing, which train mode turns on (Policy._hidden)."""
    if isinstance(module, GradientCheckpointingLayer):
        module.gradient_checkpointing = True
        module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False,
                                                      preserve_rng_state=False)


def lora_linear(layer, x):
    """Return y = W x + scaling B A x of the active adapter: x (..., in) -> (..., out).

    This is the forward pass of a PEFT LoRA layer with fewer passes over the outputs: A is scaled,
    and the product with B is added to W x in place.
    """
    rows = x.flatten(0, -2)
    out = layer.base_layer(rows)
    name = layer.active_adapters[0]
    if name in layer.lora_A and not layer.disable_adapters:  # an adapter may leave layers out
        # the fp32 weights in the dtype of the activations; while sampling, `cast` holds them
        A, B = layer.cast or cast_lora(layer, name, x.dtype)
        # `rows` has two dimensions, so `out` is not a view and autograd lets it be changed in place
        out.addmm_(linear(rows, A), B.T)  # (rows, r) times (r, out)
    return out.unflatten(0, x.shape[:-1])


def cast_lora(layer, name, dtype):
    """Return an adapter's scaling * A (r, in) and B (out, r) in `dtype`; gradients flow through."""
    A, B = (matrices[name].weight.to(dtype) for matrices in (layer.lora_A, layer.lora_B))
    return A * layer.scaling[name], B
