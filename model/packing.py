"""Lay out the responses to one prompt in one row, and cut a step into micro-batches.

Paper: does not cover this. A group costs P + G*R tokens instead of G*(P + R).

Usage: `pack` lays out the rows of a forward pass, `split_groups` cuts a step into micro-batches,
and `by_prompt` puts texts that share a long prompt into one group.

Deviations: none in the results. tests/test_policy.py compares packed rows with plain ones.

Shapes: B prompts (groups), G rollouts of each, N responses in all, P prompt tokens, R response
tokens, L tokens of a packed row, M predicted tokens.
"""
from dataclasses import dataclass, replace
from itertools import groupby

import torch

LONG = 128  # by_prompt shares prompts of at least this many tokens


def by_group(rollouts) -> list:
    """Divide rollouts into the groups that `pack` expects: lists of adjacent rollouts that share
    a group number and a prompt."""
    return [list(group) for _, group in groupby(rollouts, lambda r: (r.group, r.prompt))]


@dataclass
class Pack:
    """Hold the rows of a forward pass, and where each of the M drawn tokens is predicted."""
    ids: torch.Tensor        # (B, L)
    positions: torch.Tensor  # (B, L)
    source: torch.Tensor     # (M,) index into B*L: the hidden state that predicts the token
    target: torch.Tensor     # (M,) the token's id
    rows: torch.Tensor       # (M,) its response: the row in (N, R) results, such as log-probs
    cols: torch.Tensor       # (M,) its place in the response: the column in these results
    spans: list              # a tuple per response: group, number of prompt tokens, column of the
                             # packed row where the response begins, number of its input tokens
    shape: tuple             # (N, R), the shape of the results


def pack(groups, device=None) -> Pack:
    """Lay out each group as one row: its prompt, then its responses one after another.

    groups: B lists of Rollouts that share a prompt. The last token of a response predicts nothing,
    so it is a target but not an input.
    """
    B, L = len(groups), max(map(packed_length, groups))
    ids, positions, predictions, spans, longest = [], [], [], [], 0
    for b, group in enumerate(groups):
        prompt = group[0].prompt
        P = len(prompt)
        line, places = list(prompt), list(range(P))
        for r in group:
            R, start = len(r.response), b * L + len(line)
            # the prompt's last token predicts the first token of the response, and so on
            sources = [b * L + P - 1, *range(start, start + R - 1)]
            for col, token in enumerate(r.response):
                # an episode's observations are inputs, but the policy did not draw them
                if not r.drawn or r.drawn[col]:
                    predictions.append((sources[col], token, len(spans), col))
            spans.append((b, P, len(line), R - 1))
            line += r.response[:-1]
            places += range(P, P + R - 1)  # every response starts at position P
            longest = max(longest, R)
        padding = [0] * (L - len(line))  # any id will do, because nothing attends to it
        ids += line + padding
        positions += places + padding

    inputs = torch.tensor([ids, positions], device=device).view(2, B, L)
    outputs = torch.tensor(predictions, dtype=torch.long, device=device).view(-1, 4)  # (M, 4)
    source, target, rows, cols = outputs.T.contiguous()
    return Pack(ids=inputs[0], positions=inputs[1], source=source, target=target, rows=rows,
                cols=cols, spans=spans, shape=(len(spans), longest))


def packed_length(group) -> int:
    """Return the number of tokens in a group's packed row."""
    return len(group[0].prompt) + sum(len(r.response) - 1 for r in group)


def by_prompt(texts) -> tuple:
    """Group Rollouts by their prompts. Return (Rollouts, order): the k-th was texts[order[k]].

    Texts that share a prompt of at least LONG tokens form a group, so the prompt is encoded once.
    Every other text is a group of its own. Groups keep the order of their first texts.
    """
    first, group = {}, []  # {long prompt: index of its first text}; the group of each text
    for i, r in enumerate(texts):
        if len(r.prompt) >= LONG:
            group.append(first.setdefault(tuple(r.prompt), i))
        else:
            group.append(i)
    order = sorted(range(len(texts)), key=group.__getitem__)
    return [replace(texts[i], group=group[i]) for i in order], order


def split_groups(rollouts, token_budget: int):
    """Yield micro-batches under a token budget, each as a list of indices of rollouts.

    Groups stay whole if possible, and are sorted by length to reduce padding. A group that exceeds
    the budget by itself is split between responses, and its prompt is encoded again for each piece.
    """
    pieces, i = [], 0  # [length, indices of rollouts]
    for group in by_group(rollouts):
        for k, r in enumerate(group):
            if k == 0 or pieces[-1][0] + len(r.response) > token_budget:
                pieces.append([len(r.prompt), []])
            pieces[-1][0] += len(r.response)
            pieces[-1][1].append(i)
            i += 1

    batch, rows = [], 0
    for length, members in sorted(pieces):
        # every row is padded to the longest one, which is this one so far
        if batch and length * (rows + 1) > token_budget:
            yield batch
            batch, rows = [], 0
        batch, rows = batch + members, rows + 1
    if batch:
        yield batch
