"""The keys and values of a decoder, in a buffer with room to spare.

Paper: not in it. Usage: model/decoding.py gives every layer a `GrowingLayer`.

Deviations: the library's dynamic layer copies the whole cache for every token; this one copies only
when its buffer is full.

Shapes: live groups with `slots` rollouts each, K cached keys, d head dimension.
"""
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer in a buffer that grows until it is frozen.

    A full buffer grows by half, and by at least 32 steps. capacity: the number of keys that the
    first buffer holds, which are those of the prompts.
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
