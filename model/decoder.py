"""Decoding: each prompt is encoded once, then all rollouts that run still get a token at a time.

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

LOOK = 16  # on a GPU: tokens between two checks for finished rollouts


class Decoder:
    """The rollouts of B prompts, decoded side by side.

    live (live,): the groups that are decoded still. rollout (live, slots): which of the G stands
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
        # contiguous: for a view the head's weights would be copied once per prompt
        self.hidden = last[:, None].expand(B, G, -1).contiguous()              # (B, G, D)

    def _prefill(self, prompts, pad_id, more):
        """Encode each prompt once -> the hidden state of its last token (B, D); sets cache and
        owner.

        Prompts are padded on the right: causality alone then hides the padding from real tokens.
        Long prompts are encoded in chunks of columns: memory, apart from the cache, is bounded by
        tokens, not by rows. more: the most keys that decoding will add to a row.
        """
        longest = max(map(len, prompts))
        padded = [list(p) + (longest - len(p)) * [pad_id] for p in prompts]
        ids = torch.tensor(padded, device=self.live.device)                    # (B, P)
        columns = torch.arange(longest, device=ids.device)                     # (P,)
        self.owner = torch.where(columns < self.lengths[:, None], PROMPT, PADDING)  # (B, P)
        layer = partial(GrowingLayer, room=longest, most=longest + more)
        self.cache = Cache(layer_class_to_replicate=layer)

        width, last = max(1, PREFILL_TOKENS // len(prompts)), []
        for start in range(0, longest, width):
            # given a cache, the library's causal mask lets a chunk see the chunks before it
            hidden = self._forward(ids[:, start:start + width])                # (B, width, D)
            # of the prompts that end here; of the others it is not used
            ends = (self.lengths - 1 - start).clamp(0, hidden.shape[1] - 1)
            last.append(hidden[self.live, ends])
        return torch.stack(last)[(self.lengths - 1) // width, self.live]

    def _forward(self, ids, **where):
        """Hidden states (live, tokens, D) of ids (live, tokens), whose keys go into the cache."""
        output = self.lm.base_model(input_ids=ids, past_key_values=self.cache, use_cache=True,
                                    **where)
        return output.last_hidden_state

    def places(self):
        """(live, slots): the position of the token that is fed next."""
        return (self.lengths[self.live, None] + self.fed).expand_as(self.rollout)

    def step(self, ids):
        """Feed one more token of each rollout: ids (live, slots) -> hidden states (live, slots,
        D)."""
        self.owner = torch.cat([self.owner, self.rollout], dim=1)              # (live, K + slots)
        mask = group_mask(self.rollout, self.owner, causal=False)
        hidden = self._forward(ids, position_ids=self.places(), attention_mask=mask)
        self.fed, self.left = self.fed + 1, self.left - 1
        return hidden

    def keep(self, done, ended=None) -> bool:
        """Let finished rollouts leave. Returns whether another step is needed.

        done (B, G): which have finished; ended: whether that is news, None if nobody knows.
        """
        if self.left == 0:
            return False
        if ended is False:
            return True
        groups, slots = compact(done[self.live], self.rollout)
        if len(groups):
            self._leave(groups, slots)
        return len(groups) > 0

    def _leave(self, groups, slots):
        """Keep these of the live groups, and these rollouts in the slots of every live group."""
        self.rollout = slots
        if len(groups) < len(self.live):
            self.live, self.owner = self.live[groups], self.owner[groups]
            self.rollout = slots[groups]
            self.cache.batch_select_indices(groups)


def compact(done, rollout):
    """Drop finished rollouts: done (live, G) -> groups to keep, rollout in each slot (live, slots).

    Running rollouts move to the front; slots: the most that are running in any one group. Groups
    are only dropped once a quarter of them has finished, because dropping copies the cache.
    """
    running = (~done).sum(1).tolist()
    if max(running) == 0:
        return [], rollout
    order = done.long().argsort(dim=1, stable=True)  # running first
    groups = [b for b, number in enumerate(running) if number > 0]
    if len(groups) > 0.75 * len(running):
        groups = list(range(len(running)))
    return torch.tensor(groups, device=done.device), order[:, :max(running)]


# ---------------------------------------------------------------------------------------------
# on a GPU


class GraphDecoder(Decoder):
    """The same in stages: steps whose tensors keep shape and place, so that a GPU can record one
    and replay it. The host then starts one graph a token, not 1,700 kernels for which a large card
    waits.

    room: the steps that the stage has room for still; 0 before the first stage.
    """
    room = 0

    def keep(self, done, ended=None) -> bool:
        """As above, but rarely: asking a GPU how many are still running makes it wait."""
        if ended is None:
            ended = (self.fed + 1) % LOOK == 0
        return super().keep(done, ended)

    def _leave(self, groups, slots):
        """A new stage costs a GPU the time of several tokens: only if due, or if half have
        ended."""
        due = self.room < min(LOOK, self.left)
        halved = 2 * len(groups) * slots.shape[1] <= self.rollout.numel()
        if due or halved:
            super()._leave(groups, slots)
            self.room = 0

    def step(self, ids):
        """As above; the result lies in memory that the next call may use again."""
        self.owner = torch.cat([self.owner, self.rollout], dim=1)              # (live, K + slots)
        if self.room == 0:
            self._begin_stage()
        self.ids.copy_(ids)
        self.calls += 1
        if self.calls == 2:  # the first call loads kernels and makes plans, as no recording may
            self.replay = recorded(self._next, ids.device)
        hidden = self.replay() if self.replay else self._next()
        self.room, self.fed, self.left = self.room - 1, self.fed + 1, self.left - 1
        return hidden

    def _begin_stage(self):
        """Give every tensor of the coming steps its place and all the room that it will need."""
        slots, K = self.rollout.shape[1], self.owner.shape[1]
        # room as for a growing cache: half as much again
        self.room = min(self.left, max(32, K // (2 * slots)))
        more = (self.room - 1) * slots  # keys that the steps after the first one add
        self.calls, self.replay = 0, None
        self.columns = torch.arange(K - slots, K, device=self.owner.device)  # of a step's own keys
        for layer in self.cache.layers:
            layer.fix(K + more, self.columns)
        config = self.lm.config.get_text_config(decoder=True)
        see = partial(step_mask, config, self.cache.layers[0].keys.dtype, self.rollout)
        self.mask = see(pad(self.owner, (0, more), value=PADDING))
        self.own_mask = see(self.rollout)  # of the keys of one step a rollout sees its own
        self.ids, self.position = torch.empty_like(self.rollout), self.places().clone()

    def _next(self):
        """What is recorded: no number of Python's changes from call to call, only tensors in
        place."""
        # the step's own keys are seen from now on
        self.mask.index_copy_(3, self.columns, self.own_mask)
        hidden = self._forward(self.ids, position_ids=self.position, attention_mask=self.mask)
        self.columns.add_(self.ids.shape[1])
        self.position.add_(1)
        return hidden


def step_mask(config, dtype, rollout, owner):
    """What a decoding step sees, made for a GPU once and not in each layer.

    rollout (live, slots), owner (live, K) -> (live, 1, slots or sharing * slots, K) in `dtype`: 0
    where visible, else -inf, as kernels take it, each row beginning at a multiple of 8 numbers.
    """
    (live, slots), K = rollout.shape, owner.shape[1]
    heads, key_heads, head_dim = heads_of(config)
    sharing = heads // key_heads if slots <= head_dim else 1
    shape = live, 1, sharing * slots, 8 * math.ceil(K / 8)
    mask = owner.new_full(shape, -math.inf, dtype=dtype)[..., :K]
    return mask.masked_fill_(group_mask(rollout, owner, False).repeat(1, 1, sharing, 1), 0)


def recorded(step, device):
    """A CUDA graph of step() to call in its place, whose result always lies in the same memory;
    None on other devices, and where a model does what a graph cannot hold."""
    if device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    try:  # the outer context: back to this stream, however the recording ends
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            out = step()  # its kernels are noted, none is started
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
    """Keys and values of one layer in a buffer with room to spare, which grows until it is fixed.

    The library's dynamic layer copies the whole cache for every token; this one copies only when
    the buffer is full, which then grows by half. room: keys that the first buffer holds at least;
    most: keys that there can ever be, more room would be waste.
    """

    def __init__(self, room=0, most=math.inf):
        super().__init__()
        self.room, self.most, self.columns = room, most, None

    def fix(self, room, columns):
        """From here on buffers of `room` keys stay where they are, and new keys go to `columns`
        (slots,), which the caller moves on."""
        self.keys, self.values = _grown(self.keys, room), _grown(self.values, room)
        self.buffers, self.columns = (self.keys, self.values), columns

    def update(self, key_states, value_states, *args, **kwargs):
        """Append (live, heads, slots, d) keys and values; returns views of all so far, or once
        fixed the whole buffers: a mask has to hide what is not written yet."""
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
        room = max(self.room, min(self.most, K + spare))
        self.buffers = _grown(self.keys, room), _grown(self.values, room)

    def batch_select_indices(self, indices):
        """Keep only the rows `indices` of the batch."""
        super().batch_select_indices(indices)
        self.buffers = (self.keys, self.values)


def _grown(x, room):
    """x (live, heads, K, d) at the front of a buffer (live, heads, room, d). Zeros behind: what a
    mask hides must be finite."""
    return pad(x, (0, 0, 0, room - x.shape[2]))
