"""Decoding: each prompt is encoded once, then all rollouts still running get a token at a time.

Paper: not in it. Usage: Policy.sample makes a Decoder, draws tokens from `hidden`, tells `keep`
which rollouts have ended, and feeds what it drew with `step`. On a GPU a GraphDecoder takes its
place.

Deviations: the library's cache repeats a prompt for each of its rollouts and copies itself for
every token; here it is stored once, in buffers with room to spare. tests/test_policy.py compares
both decoders with the plain forward pass.

Shapes: B prompts (groups), G rollouts of each, D hidden size, K cached keys, d head dimension.
Finished rollouts leave: `live` groups remain, with `slots` rollouts of each, some of which may
have finished.
"""
import math
import warnings
from functools import partial

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

from model.attention import PADDING, PROMPT, group_mask, heads_of
from model.files import first_line
from model.memory import PREFILL_TOKENS

CHECK_EVERY = 16  # on a GPU: tokens between two checks for finished rollouts


class Decoder:
    """The rollouts of B prompts, decoded side by side.

    live (live,): the groups still decoded. rollout (live, slots): which of the G stands
    in each slot. owner (live, K): whose each cached key is: PROMPT, PADDING or one of the G.
    hidden (B, G, D): the states that predict the first tokens. fed, left: the steps made, and
    those that may follow.
    """

    def __init__(self, lm, prompts, G: int, steps: int, pad_id: int):
        """Encode the prompts, B lists of ids. steps: at most so many will follow."""
        self.lm, self.fed, self.left = lm, 0, steps
        B, device = len(prompts), lm.get_input_embeddings().weight.device
        self.lengths = torch.tensor([len(p) for p in prompts], device=device)  # (B,)
        self.live = torch.arange(B, device=device)
        self.rollout = torch.arange(G, device=device).expand(B, G)
        last = self._prefill(prompts, pad_id, G * steps)                       # (B, D)
        # contiguous: the product of an expanded tensor with lm_head would be a batched one, and
        # copy the weights (V, D) once per prompt
        self.hidden = last[:, None].expand(B, G, -1).contiguous()              # (B, G, D)

    def _prefill(self, prompts, pad_id, more):
        """Encode each prompt once -> the hidden state of its last token (B, D); sets cache and
        owner. more: the most keys that decoding will add to a row.

        Prompts are padded on the right: causality alone then hides the padding from real tokens.
        Long prompts are encoded in chunks of columns, which bounds the tokens of a forward pass.
        """
        longest = max(map(len, prompts))
        padded = [list(p) + (longest - len(p)) * [pad_id] for p in prompts]
        ids = torch.tensor(padded, device=self.live.device)                    # (B, P)
        columns = torch.arange(longest, device=ids.device)                     # (P,)
        self.owner = torch.where(columns < self.lengths[:, None], PROMPT, PADDING)  # (B, P)
        layer = partial(GrowingLayer, capacity=longest, most=longest + more)
        self.cache = Cache(layer_class_to_replicate=layer)

        width, chunk_ends = max(1, PREFILL_TOKENS // len(prompts)), []
        for start in range(0, longest, width):
            # given a cache, the library's causal mask lets a chunk see the chunks before it
            hidden = self._forward(ids[:, start:start + width])                # (B, width, D)
            # a chunk stores one state per prompt; only that which holds its last token counts
            ends = (self.lengths - 1 - start).clamp(0, hidden.shape[1] - 1)    # (B,)
            chunk_ends.append(hidden[self.live, ends])
        last_chunk = (self.lengths - 1) // width                               # (B,)
        return torch.stack(chunk_ends)[last_chunk, self.live]

    def _forward(self, ids, **where):
        """Hidden states (live, tokens, D) of ids (live, tokens), whose keys go into the cache."""
        output = self.lm.base_model(input_ids=ids, past_key_values=self.cache, use_cache=True,
                                    **where)
        return output.last_hidden_state

    def positions(self):
        """(live, slots): the position of the token that is fed next."""
        return (self.lengths[self.live, None] + self.fed).expand_as(self.rollout)

    def step(self, ids):
        """Feed one more token of each rollout: ids (live, slots) -> hidden states (live, slots,
        D)."""
        self.owner = torch.cat([self.owner, self.rollout], dim=1)              # (live, K + slots)
        mask = group_mask(self.rollout, self.owner, causal=False)
        hidden = self._forward(ids, position_ids=self.positions(), attention_mask=mask)
        self.fed, self.left = self.fed + 1, self.left - 1
        return hidden

    def keep(self, done, any_new=None) -> bool:
        """Let finished rollouts leave. Returns whether another step is needed.

        done (B, G): which have finished. any_new: True or False if the caller knows whether any
        has since the last call, else None.
        """
        if self.left == 0:
            return False
        if any_new is False:
            return True
        groups, rollout = compact(done[self.live])
        if len(groups):
            self._leave(groups, rollout)
        return len(groups) > 0

    def _leave(self, groups, rollout):
        """Keep `groups` of the live ones. rollout (live, slots): what then stands in each slot."""
        self.rollout = rollout
        if len(groups) < len(self.live):
            self.live, self.owner = self.live[groups], self.owner[groups]
            self.rollout = rollout[groups]
            self.cache.batch_select_indices(groups)


def compact(done):
    """Drop finished rollouts: done (live, G) -> (groups to keep, rollout in each slot (live,
    slots)).

    Running rollouts move to the front; slots: the most that are running in any one group. Groups
    are only dropped once a quarter of them has finished, because dropping copies the cache.
    """
    running_counts = (~done).sum(1).tolist()
    order = done.long().argsort(dim=1, stable=True)  # running first
    groups = [b for b, count in enumerate(running_counts) if count > 0]
    if len(groups) > 0.75 * len(running_counts):
        groups = list(range(len(running_counts)))
    return torch.tensor(groups, device=done.device), order[:, :max(running_counts)]


# ---------------------------------------------------------------------------------------------
# on a GPU


class GraphDecoder(Decoder):
    """The same in stages. A stage is a series of steps between two reallocations: all its tensors
    keep shape and address, so one CUDA graph serves all of it. The host then starts one graph a
    token, not 1,700 kernels for which a large card waits.

    stage_left: how many more steps the stage has room for; 0 before the first stage.
    """
    stage_left = 0

    def keep(self, done, any_new=None) -> bool:
        """As Decoder.keep, but rarely: asking a GPU how many are still running makes it wait."""
        if any_new is None:
            drawn = self.fed + 1  # the last token drawn is not fed yet
            any_new = drawn % CHECK_EVERY == 0
        return super().keep(done, any_new)

    def _leave(self, groups, rollout):
        """As Decoder._leave, but a new stage costs a GPU the time of several tokens: only if one
        must begin soon, or if half of the slots become free."""
        room_runs_out = self.stage_left < min(CHECK_EVERY, self.left)
        halved = 2 * len(groups) * rollout.shape[1] <= self.rollout.numel()
        if room_runs_out or halved:
            super()._leave(groups, rollout)
            self.stage_left = 0

    def step(self, ids):
        """As Decoder.step; the result lies in memory that the next call may use again."""
        self.owner = torch.cat([self.owner, self.rollout], dim=1)              # (live, K + slots)
        if self.stage_left == 0:
            self._begin_stage()
        self.ids.copy_(ids)
        self.calls += 1
        # call 1 is a warm-up, as no kernel may be loaded while capturing; call 2 captures, which
        # runs nothing: `_next` is not done twice
        if self.calls == 2:
            self.replay = cuda_graph_of(self._next, ids.device)
        hidden = self.replay() if self.replay else self._next()
        self.stage_left -= 1
        self.fed, self.left = self.fed + 1, self.left - 1
        return hidden

    def _begin_stage(self):
        """Give every tensor of the coming steps its place and all the room that it will need."""
        slots, K = self.rollout.shape[1], self.owner.shape[1]
        # steps until the cache is 1.5 times as long, at least 32
        self.stage_left = min(self.left, max(32, K // (2 * slots)))
        more = (self.stage_left - 1) * slots  # keys that the steps after the first one add
        self.calls, self.replay = 0, None
        self.columns = torch.arange(K - slots, K, device=self.owner.device)  # of a step's own keys
        for layer in self.cache.layers:
            layer.freeze(K + more, self.columns)
        config = self.lm.config.get_text_config(decoder=True)
        mask_for = partial(step_mask, config, self.cache.layers[0].keys.dtype, self.rollout)
        self.mask = mask_for(pad(self.owner, (0, more), value=PADDING))
        self.own_mask = mask_for(self.rollout)  # of the keys of one step a rollout sees its own
        self.ids, self.position = torch.empty_like(self.rollout), self.positions().clone()

    def _next(self):
        """The step that is captured. No Python value may change between calls, since the graph
        would keep the old one: tensors are changed in place."""
        # the step's own keys are seen from now on
        self.mask.index_copy_(3, self.columns, self.own_mask)
        hidden = self._forward(self.ids, position_ids=self.position, attention_mask=self.mask)
        self.columns.add_(self.ids.shape[1])
        self.position.add_(1)
        return hidden


def step_mask(config, dtype, rollout, owner):
    """What a decoding step sees, made for a GPU once and not in each layer.

    rollout (live, slots), owner (live, K) -> (live, 1, rows, K) in `dtype`: 0 where visible, else
    -inf. The memory-efficient kernel adds such a mask as it is, if each row begins at a multiple of
    8 numbers. rows: slots, or sharing * slots where attention.few_queries_attention folds the
    query heads that share keys into rows; group_attention calls it for slots <= head_dim.
    """
    (live, slots), K = rollout.shape, owner.shape[1]
    heads, key_heads, head_dim = heads_of(config)
    sharing = heads // key_heads if slots <= head_dim else 1
    shape = live, 1, sharing * slots, 8 * math.ceil(K / 8)
    mask = owner.new_full(shape, -math.inf, dtype=dtype)[..., :K]
    return mask.masked_fill_(group_mask(rollout, owner, False).repeat(1, 1, sharing, 1), 0)


def cuda_graph_of(step, device):
    """A CUDA graph of step() to call in its place, whose result always lies in the same memory;
    None on other devices, and where a model does what a graph cannot hold."""
    if device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        # torch.cuda.graph leaves its side stream current if capture fails; the outer context
        # restores this one
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            out = step()
    except torch.OutOfMemoryError:
        raise  # not the model's fault: fewer rows would do
    except RuntimeError as error:
        warnings.warn(f"rollouts are slow, no CUDA graph holds this model: {first_line(error)}")
        return None

    def replay():
        graph.replay()
        return out

    return replay


# ---------------------------------------------------------------------------------------------
# the cache


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with room to spare, which grows until it is frozen.

    The library's dynamic layer copies the whole cache for every token; this one copies only when
    the buffer is full, which then grows by half, and for 32 steps at least. capacity: keys that the
    first buffer holds at least; most: keys that there can ever be, more room would be waste.
    """

    def __init__(self, capacity=0, most=math.inf):
        super().__init__()
        self.capacity, self.most, self.columns = capacity, most, None

    def freeze(self, capacity, columns):
        """From here on buffers of `capacity` keys stay where they are, and new keys go to `columns`
        (slots,), which the caller moves on."""
        self.keys, self.values = _resized(self.keys, capacity), _resized(self.values, capacity)
        self.buffers, self.columns = (self.keys, self.values), columns

    def update(self, key_states, value_states, *args, **kwargs):
        """Append (live, heads, slots, d) keys and values; returns views of all so far, or once
        frozen the whole buffers: a mask has to hide what is not written yet."""
        if self.columns is not None:
            self.keys.index_copy_(2, self.columns, key_states)
            self.values.index_copy_(2, self.columns, value_states)
            return self.buffers
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self.buffers = (self.keys, self.values)
        K, slots = self.keys.shape[2], key_states.shape[2]
        if K + slots > self.buffers[0].shape[2]:
            self._grow(K, slots)
        end = K + slots
        keys, values = self.buffers
        keys[:, :, K:end], values[:, :, K:end] = key_states, value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def _grow(self, K, slots):
        """Make room for at least `slots` more than K keys."""
        spare = slots  # of the first buffer: what it is given
        if K:
            spare += max(32 * slots, K // 2)
        capacity = max(self.capacity, min(self.most, K + spare))
        self.buffers = _resized(self.keys, capacity), _resized(self.values, capacity)

    def batch_select_indices(self, indices):
        """Keep only the rows `indices` of the batch."""
        super().batch_select_indices(indices)
        self.buffers = (self.keys, self.values)


def _resized(x, capacity):
    """x (live, heads, K, d) at the front of a buffer (live, heads, capacity, d). Zeros behind: what
    a mask hides must be finite. Where a stage ended early K may be larger: pad then cuts room that
    was never filled."""
    return pad(x, (0, 0, 0, capacity - x.shape[2]))
