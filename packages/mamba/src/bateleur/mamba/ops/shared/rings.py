"""Entries of rings, newest first: where they lie, what decays since, and the matrix products over them.

Shapes: T tokens, R rows, H heads, G groups, J = H / G heads per group, P head channels, N state entries, L entries of a
ring, M queries of a row. Entries are taken by age, 0 being the newest: then every row ends at the same place however
full its ring is, and whatever the ring held before is never read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Ages(NamedTuple):
    """The entries of each row by age, as rows of the flattened ring. On CPU, L is that of the fullest row."""

    at: Tensor
    """(R, L). In place of entries that are not there stands the oldest one: whatever an earlier request left in the
    ring is never read, not even to be multiplied by zero."""
    after: Tensor
    """(R, 1 + L): `at` behind one entry that is not there."""
    gone: Tensor
    """(R, 1 + L, 1) bool: it is not there."""


def by_age(row: Tensor, start: Tensor, oldest: Tensor, capacity: int) -> Ages:
    """oldest (R,) is the age of the oldest entry, one less than there are."""
    held = max(1, 1 + int(oldest.max())) if row.device.type == "cpu" else capacity
    age, oldest = torch.arange(1 + held, device=row.device).roll(1), oldest.unsqueeze(1)
    at = (start.unsqueeze(1) + (oldest - age).clamp_(min=0)) % capacity + row.unsqueeze(1) * capacity
    return Ages(at[:, 1:].contiguous(), at, (age > oldest).unsqueeze(2))


def take(ring: Tensor, at: Tensor) -> Tensor:
    """(R, L, size) entries of a ring."""
    entries: Tensor = torch.embedding(ring.view(-1, ring.shape[2:].numel()), at)
    return entries


def by_group(entries: Tensor, groups: int) -> Tensor:
    """(R, L, G * size) to (R * G, L, size)."""
    if groups == 1:
        return entries
    return entries.view(*entries.shape[:2], groups, -1).transpose(1, 2).flatten(0, 1)


def decays(ring_dt: Tensor, ages: Ages, A: Tensor, queries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """How much is left of the state under the ring at each query, (R, M, H), and of each entry, (R, M, L, H).

    Query m is the token of age m. The latter times the entry's step; 0 where there is no entry, and without meaning
    where it is younger than the query.
    """
    step = take(ring_dt, ages.after).to(dtype).masked_fill_(ages.gone, 0)  # (R, 1 + L, H)
    held = step.shape[1] - 1
    own = step.narrow(1, 1, held)
    if queries == 1:
        decay = (step.cumsum(1) * A).exp_()  # of what is younger than each entry, and than all
        return decay.narrow(1, held, 1), (decay.narrow(1, 0, held) * own).unsqueeze(1)
    # Summed from the oldest on, so that no query depends on a younger token, even if that is not a number.
    total = own.flip(1).cumsum(1).flip(1)
    at_query = total.narrow(1, 0, queries)
    decay = ((at_query.unsqueeze(2) - total.unsqueeze(1)) * A).exp_()
    return (at_query * A).exp_(), decay * own.unsqueeze(1)
