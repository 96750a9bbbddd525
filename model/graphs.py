"""Decoding on a GPU: a series of steps as one CUDA graph. And the cache that both decoders fill.

Paper: not in it. Usage: policy.GraphDecoder is a Decoder with `GraphSteps` before it; every Decoder
has a cache of `GrowingLayer`s.

Deviations: the library's cache copies itself for every token; here it has room to spare.
tests/test_policy.py compares recorded steps with computed ones, and both with the plain forward
pass.

Shapes: B prompts (groups), G rollouts of each, D hidden size, K cached keys, d head dimension.
Finished rollouts leave: `live` groups remain, with `slots` rollouts of each, some of which may
have finished.
"""
import math
import warnings
from functools import partial

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from model.attention import PADDING, group_mask, heads_of
from errors import first_line

CHECK_EVERY = 16  # on a GPU: tokens between two checks for finished rollouts


class GraphSteps:
    """The steps of a policy.Decoder in stages, for a subclass of both: `super()` is the Decoder.

    A stage is a series of steps between two reallocations: all its tensors keep shape and address,
    so one CUDA graph serves all of it. The host then starts one graph a token, not 1,700 kernels
    for which a large card waits.

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
        # call 1 computes, as a warm-up: no kernel may be loaded while capturing. Call 2 captures,
        # which computes nothing, and is replayed below; later calls are only replayed
        if self.calls == 2:
            self.replay = cuda_graph_of(self._next, ids.device)
        hidden = self.replay() if self.replay else self._next()
        self.stage_left -= 1
        self.fed, self.left = self.fed + 1, self.left - 1
        return hidden

    def _begin_stage(self):
        """Give every tensor of the coming steps its place and all the room that it will need."""
        # K counts the keys of the coming step: step() has added their owners
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
    query heads that share keys into rows: group_attention has it do so where slots <= head_dim.
    """
    (live, slots), K = rollout.shape, owner.shape[1]
    heads, key_heads, head_dim = heads_of(config)
    sharing = heads // key_heads if slots <= head_dim else 1
    shape = live, 1, sharing * slots, 8 * math.ceil(K / 8)
    mask = owner.new_full(shape, -math.inf, dtype=dtype)[..., :K]
    return mask.masked_fill_(group_mask(rollout, owner).repeat(1, 1, sharing, 1), 0)


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
    first buffer holds, those of the prompts.
    """

    def __init__(self, capacity):
        super().__init__()
        self.capacity, self.columns = capacity, None

    def freeze(self, capacity, columns):
        """From here on buffers of `capacity` keys stay where they are, and new keys go to `columns`
        (slots,), which the caller moves on."""
        self._hold(capacity)
        (self.keys, self.values), self.columns = self.buffers, columns

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
            self._hold(self.capacity)
        K, slots = self.keys.shape[2], key_states.shape[2]
        end = K + slots
        if end > self.buffers[0].shape[2]:
            self._hold(end + max(32 * slots, K // 2))
        keys, values = self.buffers
        keys[:, :, K:end], values[:, :, K:end] = key_states, value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def _hold(self, capacity):
        """Put all so far at the front of buffers (live, heads, capacity, d). Zeros behind: what a
        mask hides must be finite. After a stage that ended early they may be longer than capacity:
        the negative pad then cuts only room that was never filled."""
        room = (0, 0, 0, capacity - self.keys.shape[2])
        self.buffers = pad(self.keys, room), pad(self.values, room)

    def batch_select_indices(self, indices):
        """Keep only the rows `indices` of the batch."""
        super().batch_select_indices(indices)
        self.buffers = (self.keys, self.values)
