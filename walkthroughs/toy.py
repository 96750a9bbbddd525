"""Define a policy that is only a table of logits: every probability can be computed exactly.

It has what grpo_update and rwr_update need: `params`, `use` and `logprobs`. The initial table is
the reference; elsewhere that is the base model without adapters.
"""
from contextlib import contextmanager

import torch


class TablePolicy:
    """Draw token t of a response from softmax(logits[t]), independently of earlier tokens.

    logits: (R, V).
    """

    def __init__(self, logits, adapter):
        self.initial = torch.as_tensor(logits, dtype=torch.float64)
        self.logits = self.initial.clone().requires_grad_(True)
        self.params, self.active = {adapter: [self.logits]}, None

    @contextmanager
    def use(self, adapter):
        """Use the trained table inside the block; with None, the initial one."""
        former, self.active = self.active, adapter
        try:
            yield self
        finally:
            self.active = former

    def logprobs(self, rollouts, temperature=1.0):
        """Return log-probs (N, R) and mask (N, R) of N rollouts, zero-padded."""
        table = ((self.logits if self.active else self.initial) / temperature).log_softmax(-1)
        rows = [table[range(len(r.response)), r.response] for r in rollouts]
        mask = [torch.ones(len(row), dtype=torch.bool) for row in rows]
        pad = torch.nn.utils.rnn.pad_sequence
        return pad(rows, batch_first=True), pad(mask, batch_first=True)

    def probs(self):
        """Return the current probabilities (R, V)."""
        return self.logits.detach().softmax(-1)
