"""Where the entries of a ring lie, newest first, and what a step or a fold has to look up: integers only.

All layers of a step ask for the same; see `by_content`. Shapes as in `torch_ring`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.mamba.ops._rows import by_content, query_lens


class Ages(NamedTuple):
    """The entries of each row by age, as rows of the flattened ring. On CPU, L is that of the fullest row."""

    at: Tensor
    """(R, L). In place of entries that are not there stands the oldest one: whatever an earlier request left in the
    ring is never read, not even to be multiplied by zero."""
    after: Tensor
    """(R, 1 + L): `at` behind one entry that is not there."""
    gone: Tensor
    """(R, 1 + L, 1) bool: it is not there."""


def _by_age(row: Tensor, start: Tensor, oldest: Tensor, capacity: int) -> Ages:
    """oldest (R,) is the age of the oldest entry, one less than there are."""
    held = max(1, 1 + int(oldest.max())) if row.device.type == "cpu" else capacity
    age, oldest = torch.arange(1 + held, device=row.device).roll(1), oldest.unsqueeze(1)
    at = (start.unsqueeze(1) + (oldest - age).clamp_(min=0)) % capacity + row.unsqueeze(1) * capacity
    return Ages(at[:, 1:].contiguous(), at, (age > oldest).unsqueeze(2))


class Places(NamedTuple):
    """Where a step finds and puts its tokens."""

    ages: Ages
    """The step's tokens included."""
    queries: int
    """M: outputs to make in each row, those of the M newest entries."""
    younger: Tensor | None
    """(M, L, 1) bool: the entry came after the query. None for M = 1, where none did."""
    of_heads: Tensor
    """(R * M * H * L,) entries of each row, query and head in a table of (H, P) entries; a younger one than the query
    is not among them: the query's own stands there."""
    bags: Tensor
    """(R * M * H,) where those of each head begin."""
    to: Tensor
    """(R * M,) entries to write, newest first; some entry of row 0 where a row has fewer tokens."""
    tokens: Tensor | None = None
    """(R * M,) token to read; some token where a row has fewer. None if row r is token r."""
    targets: Tensor | None = None
    """(R * M,) token to write; T where a row has fewer."""


@by_content
def places(
    query_start_loc: Tensor | None,
    row: Tensor,
    start: Tensor,
    length: Tensor,
    num_tokens: int,
    max_query_len: int,
    capacity: int,
    heads: int,
    in_ring: bool,
) -> Places:
    """Of a step of `query_start_loc`, or of one token in each row if that is None.

    `in_ring`: the table of `of_heads` is the whole ring, else what `at` selects of it.
    """
    device, loc, queries, oldest = row.device, query_start_loc, 1, length
    if loc is not None:
        lens = query_lens(loc)
        queries = max(1, int(lens.max())) if device.type == "cpu" else min(max_query_len, capacity)
        oldest = length + lens - 1
    ages = _by_age(row, start, oldest, capacity)
    num_rows, held = ages.at.shape
    entry = ages.at if in_ring else torch.arange(num_rows * held, device=device).view(num_rows, held)
    age, query = torch.arange(held, device=device), torch.arange(queries, device=device).unsqueeze(1)
    seen = entry[:, torch.maximum(age, query)].unsqueeze(2)  # (R, M, 1, L)
    of_heads = (seen * heads + torch.arange(heads, device=device).unsqueeze(1)).view(-1)
    bags = torch.arange(0, of_heads.shape[0], held, device=device)
    younger = (age < query).unsqueeze(2) if queries > 1 else None
    if loc is None:
        return Places(ages, queries, younger, of_heads, bags, ages.at.select(1, 0))
    tokens = loc[1:, None] - 1 - torch.arange(queries, device=device)
    there = tokens >= loc[:-1, None]
    to = torch.where(there, ages.at[:, :queries], 0).view(-1)
    targets = torch.where(there, tokens, num_tokens).view(-1)
    return Places(
        ages, queries, younger, of_heads, bags, to, tokens.clamp(0, num_tokens - 1).view(-1), targets
    )


class Folds(NamedTuple):
    """The rows that fold: on CPU those with a destination, elsewhere all."""

    ages: Ages
    src: Tensor
    dst: Tensor
    window: Tensor
    """(R, W - 1) entries of the page's conv window in the flattened live windows."""


def folds(
    row: Tensor,
    start: Tensor,
    count: Tensor,
    src: Tensor,
    dst: Tensor,
    offset: Tensor,
    capacity: int,
    live_len: int,
    keep: int,
) -> Folds:
    """Of the first `count` entries of each row; windows are `keep` of `live_len` entries."""
    if dst.device.type == "cpu":
        row, start, count, src, dst, offset = torch.stack((row, start, count, src, dst, offset))[:, dst != 0]
    first = row * live_len + offset.clamp(0, live_len - keep)
    window = first.unsqueeze(1) + torch.arange(keep, device=dst.device)
    return Folds(_by_age(row, start, count - 1, capacity), src, dst, window)
