"""Ring entries of Mamba-2 by age: their indices, decays, and layout for matrix products.

Shapes: T tokens, R rows, H heads, G groups, P head channels, N state entries, L entries of a ring, M queries of a row
(request). Entries are ordered by age, where the newest has age 0. Rows with fewer entries are padded at the end, so
entries that an earlier request left in the ring are never read.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RingIndices(NamedTuple):
    """Indices of the L newest ring entries of each request. L: capacity; on a CPU, length of the longest ring."""

    at: Tensor
    """(R, L). Missing entries have the index of the oldest one."""
    after: Tensor
    """(R, 1 + L): one missing entry, followed by `at`."""
    missing: Tensor
    """(R, 1 + L, 1) bool, the entry of `after` is missing."""


def ring_indices(row: Tensor, start: Tensor, oldest: Tensor, capacity: int) -> RingIndices:
    """Return the indices of all ring entries by age (newest: 0). oldest: (R,) age of the oldest entry of each ring."""
    num_entries = max(1, 1 + int(oldest.max())) if row.device.type == "cpu" else capacity
    age, oldest = torch.arange(1 + num_entries, device=row.device).roll(1), oldest.unsqueeze(1)
    at = (start.unsqueeze(1) + (oldest - age).clamp_(min=0)) % capacity + row.unsqueeze(1) * capacity
    return RingIndices(at[:, 1:].contiguous(), at, (age > oldest).unsqueeze(2))


def take(ring: Tensor, at: Tensor) -> Tensor:
    """Return the ring entries at the indices `at` (requests, L), as (requests, L, size)."""
    entries: Tensor = torch.embedding(ring.view(-1, ring.shape[2:].numel()), at)
    return entries


def by_group(entries: Tensor, groups: int) -> Tensor:
    """Rearrange ring entries (requests, L, groups * size) to (requests * groups, L, size)."""
    grouped: Tensor = entries.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return grouped


def decays(ring_dt: Tensor, index: RingIndices, A: Tensor, queries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the saved state's decay (requests, M, heads) at M queries, and weights (requests, M, L, heads) of entries.

    Query m is the token of age m. A weight is the decay after the entry times the entry's step size. It is 0 for
    missing entries, and undefined for entries that are newer than the query.
    """
    step = take(ring_dt, index.after).to(dtype).masked_fill_(index.missing, 0)  # (R, 1 + L, H)
    num_entries = step.shape[1] - 1
    own = step.narrow(1, 1, num_entries)
    if queries == 1:
        decay = (step.cumsum(1) * A).exp_()
        return decay.narrow(1, num_entries, 1), (decay.narrow(1, 0, num_entries) * own).unsqueeze(1)
    # Summed from the oldest entry on, so that no query depends on a newer token, even if that is NaN.
    total = own.flip(1).cumsum(1).flip(1)
    at_query = total.narrow(1, 0, queries)
    decay = ((at_query.unsqueeze(2) - total.unsqueeze(1)) * A).exp_()
    return (at_query * A).exp_(), decay * own.unsqueeze(1)
