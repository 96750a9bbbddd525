"""Define a policy that is only a table of logits, so that all its probabilities are known exactly.

It has what grpo_update and rwr_update need: `params`, `use` and `logprobs`. Its reference policy is
the initial table; that of a Policy is the base model without adapters.
"""
from contextlib import contextmanager

import torch


class TablePolicy:
    """Give token t of a response the probabilities softmax(logits[t]), whatever tokens come before.

    logits (R, V): R places in a response, V words.
    """

    def __init__(self, logits, adapter):
        self.initial = torch.as_tensor(logits, dtype=torch.float64)
        self.logits = self.initial.clone().requires_grad_(True)
        self.params, self.active = {adapter: [self.logits]}, None

    @contextmanager
    def use(self, adapter):
        """Use the trained table inside the block, or the initial one if adapter is None."""
        former, self.active = self.active, adapter
        try:
            yield self
        finally:
            self.active = former

    def logprobs(self, rollouts, temperature=1.0):
        """Return the log-probs (N, R) of N rollouts, padded with zeros, and their mask (N, R)."""
        table = ((self.logits if self.active else self.initial) / temperature).log_softmax(-1)
        rows = [table[range(len(r.response)), r.response] for r in rollouts]
        mask = [torch.ones(len(row), dtype=torch.bool) for row in rows]
        pad = torch.nn.utils.rnn.pad_sequence
        return pad(rows, batch_first=True), pad(mask, batch_first=True)

    def probs(self):
        """Return the trained table's current probabilities (R, V)."""
        return self.logits.detach().softmax(-1)
