"""Hold a decoder's keys and values in a buffer with room to spare.

Paper: does not cover this. Usage: model/decoding.py gives every layer a `GrowingLayer`, or on a GPU
a `FreezingLayer`.

Deviations: the library's dynamic layer copies the whole cache for every token; this one copies it
only when its buffer is full.

Shapes: `live` groups of `slots` rollouts each, K cached keys, d head dimension.
"""
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):
    """Hold keys and values of one layer in buffers, which grow by half when they are full.

    room: how many keys fit in the first buffers, which hold the prompts.
    """

    def __init__(self, room):
        super().__init__()
        self.room = room

    def update(self, key_states, value_states, *args, **kwargs):
        """Append keys and values (live, heads, slots, d), and return views of all keys and values
        so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self.buffers = self.keys, self.values
        K, slots = self.keys.shape[2], key_states.shape[2]
        end = K + slots
        if end > self.buffers[0].shape[2]:
            self._hold(max(self.room, end + K // 2))
        keys, values = self.buffers
        keys[:, :, K:end], values[:, :, K:end] = key_states, value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def _hold(self, capacity):
        """Copy the keys and values to the front of buffers (live, heads, capacity, d).

        Zeros fill the rest, because even masked values must be finite. If a stage of decoding
        ended early, the frozen keys may be longer than `capacity`. The padding is then negative,
        and cuts off only room that was never filled.
        """
        room = (0, 0, 0, capacity - self.keys.shape[2])
        self.buffers = pad(self.keys, room), pad(self.values, room)

    def batch_select_indices(self, indices):
        """Keep only the rows `indices` of the batch."""
        super().batch_select_indices(indices)
        self.buffers = (self.keys, self.values)


class FreezingLayer(GrowingLayer):
    """Write into buffers of a fixed size once they are frozen, so that a CUDA graph can replay the
    writes.

    columns (slots,): where the next keys go; None until the buffers are frozen.
    """
    columns = None

    def freeze(self, capacity, columns):
        """Fix the buffers at `capacity` keys. The caller advances `columns` after each update."""
        self._hold(capacity)
        (self.keys, self.values), self.columns = self.buffers, columns

    def update(self, key_states, value_states, *args, **kwargs):
        """Append as a GrowingLayer does; once frozen, write at `columns` and return the whole
        buffers; a mask must hide the part that is not yet written."""
        if self.columns is None:
            return super().update(key_states, value_states)
        self.keys.index_copy_(2, self.columns, key_states)
        self.values.index_copy_(2, self.columns, value_states)
        return self.buffers
