"""The Mamba-2 recurrence of decodes under FOLD: from a saved state and a ring of later inputs, without writing a state.

Shapes: as in `shared.mamba2_ring`, and M new tokens of the longest row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.shared import compute_dtype, query_lens, step_sizes, store_slots, unpad
from bateleur.mamba.ops.shared.mamba2_ring import RingIndices, by_group, decays, ring_indices, take


class _TokenIndices(NamedTuple):
    """Index tensors that gather the ring entries and tokens of a step and scatter its results."""

    ring: RingIndices
    """Ring entries, including those of the new tokens."""
    num_queries: int
    """M: the newest entries of each row, for which outputs are computed."""
    entries: Tensor
    """(R * M * H * L,) for each row, query and head: indices of the entries it reads in the gathered ring, viewed as
    (R * L * H, P). An entry that is newer than the query is replaced by the query's own."""
    bags: Tensor
    """(R * M * H,) start of each bag of L indices in `entries`."""
    write: Tensor
    """(R * M,) ring entries to write, newest first; an entry of row 0 if a row has fewer tokens."""
    tokens: Tensor
    """(R * M,) tokens to read; any token if a row has fewer."""
    targets: Tensor
    """(R * M,) tokens to write; T if a row has fewer."""


def _token_indices(
    loc: Tensor, row: Tensor, start: Tensor, length: Tensor, num_tokens: int, most: int, capacity: int, heads: int
) -> _TokenIndices:
    device, lens = row.device, query_lens(loc)
    queries = max(1, int(lens.max())) if device.type == "cpu" else min(most, capacity)
    ring = ring_indices(row, start, length + lens - 1, capacity)
    num_rows, num_entries = ring.at.shape
    entry = torch.arange(num_rows * num_entries, device=device).view(num_rows, num_entries)
    age, query = torch.arange(num_entries, device=device), torch.arange(queries, device=device).unsqueeze(1)
    read = entry[:, torch.maximum(age, query)].unsqueeze(2)  # (R, M, 1, L)
    entries = (read * heads + torch.arange(heads, device=device).unsqueeze(1)).view(-1)
    bags = torch.arange(0, entries.shape[0], num_entries, device=device)
    tokens = loc[1:, None] - 1 - query.T
    real = tokens >= loc[:-1, None]
    write = torch.where(real, ring.at[:, :queries], 0).view(-1)
    targets = torch.where(real, tokens, num_tokens).view(-1)
    return _TokenIndices(ring, queries, entries, bags, write, tokens.clamp(0, num_tokens - 1).view(-1), targets)


@operator(mutates=("ring_x", "ring_dt", "ring_B"), like="x", native="ring")
def replay_update(
    ssm_state: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    slot: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """Mamba-2 over 1 to 1 + K tokens (K drafts) per row (request), from a saved state and a ring of inputs.

    The state before a row's tokens is ssm_state[slot] updated with ring_len entries of ring `ring_row`. Entry j is at
    (ring_start + j) % L. The row's tokens are appended to the ring. The caller counts the accepted ones, and the next
    step overwrites the others, so a rejected token never reaches a state.

    Args:
        ring_x, ring_B: (ring rows, L entries, heads H, head channels P) and (ring rows, L, groups, state entries),
            contiguous, in the dtype of x or a wider one.
        ring_dt: (ring rows, L, H) step sizes, contiguous, float32 (float64 for float64 inputs).
        slot, ring_row, ring_start, ring_len: (R,) int64. ring_len plus the row's tokens is at most L. No two rows share
            a ring row, except row 0, which is null: its rows store nothing, and their outputs are unspecified.
        The others: as in `selective_state_update`.

    Returns y (T, H, P).
    """
    num_tokens, num_rows, dtype = x.shape[0], slot.shape[0], compute_dtype(x)
    if not num_tokens or not num_rows:
        return torch.zeros_like(x)
    (_, capacity, heads, channels), groups = ring_x.shape, B.shape[1]
    rows = (query_start_loc, ring_row, ring_start, ring_len)
    index = _token_indices(*rows, num_tokens, max_query_len, capacity, heads)
    queries, at = index.num_queries, index.ring.at
    new = (x, step_sizes(dt, dt_bias, (dt_min, dt_max), dtype), B)
    for ring, values in zip((ring_x, ring_dt, ring_B), new, strict=True):
        store_slots(ring.view(-1, *ring.shape[2:]), index.write, values[index.tokens])
    Cs = by_group(C[index.tokens].to(dtype).reshape(num_rows, queries, -1), groups)
    scores = torch.bmm(Cs, by_group(take(ring_B, at).to(dtype), groups).mT)  # (R * G, M, L)
    decay, weight = decays(ring_dt, index.ring, A, queries, dtype)
    weights = _weights(weight, scores, D)
    table = take(ring_x, at).to(dtype).view(-1, channels)
    y = torch.embedding_bag(table, index.entries, index.bags, False, 0, False, weights)[0]
    y = y.view(num_rows, queries, heads, channels)
    y.addcmul_(_of_checkpoint(ssm_state, slot, Cs), decay.unsqueeze(3))
    return unpad(y.view(-1, heads, channels), index.targets, x)


def _weights(decay: Tensor, scores: Tensor, D: Tensor) -> Tensor:
    """Return the weight of each of L ring entries for M queries of R requests and H heads, (R * M * H * L,).

    decay (R, M, L, H), overwritten; scores (R * groups, M, L); D (H,).
    """
    num_rows, queries, num_entries, _ = decay.shape
    by_entry = scores.unflatten(0, (num_rows, -1)).permute(0, 2, 3, 1)
    decay.unflatten(3, (by_entry.shape[3], -1)).mul_(by_entry.unsqueeze(4))
    age, query = torch.arange(num_entries, device=D.device), torch.arange(queries, device=D.device)
    newer = (age < query.unsqueeze(1)).unsqueeze(2)
    decay.masked_fill_(newer, 0).diagonal(dim1=1, dim2=2).add_(D.unsqueeze(1))
    return decay.transpose(2, 3).reshape(-1)


def _of_checkpoint(ssm_state: Tensor, slot: Tensor, C: Tensor) -> Tensor:
    """Multiply the states in `slot` with M queries C per request, (requests * groups, M, state entries)."""
    (_, heads, channels, size), num_rows, (batch, queries, _) = ssm_state.shape, slot.shape[0], C.shape
    state = ssm_state.index_select(0, slot).to(C.dtype)
    y = torch.bmm(C, state.view(batch, -1, size).mT)
    y = y.view(num_rows, batch // num_rows, queries, -1).transpose(1, 2).reshape(num_rows, queries, heads, channels)
    return y.masked_fill_((slot == 0)[:, None, None, None], 0)
