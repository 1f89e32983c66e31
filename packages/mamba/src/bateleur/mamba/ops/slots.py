"""Helpers of the torch forms: state slots, rows of tokens, and rings. Letters as in `ops`, M tokens of the longest row.

Dropped writes go to state slot 0, which is set to zero before it is read.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32, or float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def load_slots(state: Tensor, read: Tensor, dtype: torch.dtype) -> Tensor:
    """Return copies of the states in slots `read` (R,); zeros for slot 0, which is cleared."""
    state[0].zero_()
    return state.index_select(0, read).to(dtype)


def store_slots(state: Tensor, write: Tensor, values: Tensor) -> None:
    """Write values (R, ...) to the state slots `write` (R,), which are all different except slot 0."""
    state.index_copy_(0, write.long(), values.to(state.dtype))


def by_row(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call a function of inputs (R, ...); on a CPU row by row, so that the tensors of a row stay in the cache."""
    if inputs[0].device.type != "cpu":
        return function(*inputs)
    return torch.cat([function(*row) for row in zip(*(each.split(1) for each in inputs), strict=True)])


def rows_with_slot(dst: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return the entries of all tensors (R,) in rows whose slot `dst` is not 0; on a GPU all rows (no sync)."""
    if dst.device.type != "cpu" or len(rows := dst.nonzero().squeeze(1)) == len(dst):
        return dst, *others
    return tuple(each[rows] for each in (dst, *others))


def pad_rows(query_start_loc: Tensor, max_query_len: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return token indices to read and to write, (R, M) each; padding has any index to read, `num_tokens` to write."""
    starts = query_start_loc.to(torch.int64)
    tokens = starts[:-1, None] + torch.arange(max_query_len, device=starts.device)
    real = tokens < starts[1:, None]
    return tokens.clamp(max=num_tokens - 1), torch.where(real, tokens, num_tokens)


def all_rows_full(targets: Tensor, num_tokens: int) -> bool:
    """Return whether every row has M tokens and none is padding; False on a GPU (no sync). targets: from `pad_rows`."""
    return targets.device.type == "cpu" and targets.numel() == num_tokens > int(targets.max())


def to_rows(x: Tensor, tokens: Tensor, full: bool) -> Tensor:
    """Return x (T, ...) as rows (R, M, ...), by the indices `tokens` (R, M); a view if all rows are full."""
    return x.unflatten(0, tokens.shape) if full else x[tokens]


def unpad(y: Tensor, targets: Tensor, like: Tensor) -> Tensor:
    """Return y (R, M, ...) as tokens (T, ...) with shape and dtype of `like`: y[r, i] becomes token targets[r, i].

    Token T is dropped; tokens of no row are 0.
    """
    if all_rows_full(targets, like.shape[0]):
        return y.flatten(0, 1).to(like.dtype).contiguous()
    out = like.new_zeros((like.shape[0] + 1, *like.shape[1:]))
    return out.index_copy_(0, targets.flatten(), y.flatten(0, 1).to(like.dtype))[:-1]


def ring_entries(
    rings: Sequence[Tensor], row: Tensor, start: Tensor, count: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return `count` (R,) entries of the rings in rows `row`, oldest (`start` % L) first, (R, L, ...); then zeros."""
    capacity = rings[0].shape[1]
    longest = max(0, int(count.max())) if count.device.type == "cpu" else capacity
    entry = torch.arange(longest, device=row.device)
    place, missing = (start[:, None] + entry) % capacity + row[:, None] * capacity, entry >= count[:, None]
    found = (ring.flatten(0, 1).index_select(0, place.flatten()).to(dtype).unflatten(0, place.shape) for ring in rings)
    if count.device.type == "cpu" and not missing.any():
        return tuple(found)
    return tuple(each.masked_fill_(missing.view(*missing.shape, *[1] * (each.dim() - 2)), 0) for each in found)


def append_to_rings(
    rings: Sequence[Tensor], values: Sequence[Tensor], row: Tensor, end: Tensor, is_token: Tensor
) -> None:
    """Write the values (R, M, ...) of new tokens to the rings in rows `row`, from entry `end` % L on; end is (R,).

    is_token: (R, M) bool, False for padding, which is written to entry 0 of the null row.
    """
    capacity = rings[0].shape[1]
    place = (end[:, None] + torch.arange(is_token.shape[1], device=row.device)) % capacity + row[:, None] * capacity
    place = torch.where(is_token, place, 0).flatten()
    for ring, new in zip(rings, values, strict=True):
        store_slots(ring.view(-1, *ring.shape[2:]), place, new.flatten(0, 1))


def decays_after(g: Tensor) -> Tensor:
    """Return for each token the product of the decays of all later tokens; g: log decays (R, L, ...), oldest first."""
    later = torch.cat((g[:, 1:], torch.zeros_like(g[:, :1])), 1)
    return later.flip(1).cumsum_(1).flip(1).exp_()


def scan_tiles(
    state: Tensor, read: Tensor, chunk_start_loc: Tensor, row_chunk_loc: Tensor, chunk_write: Tensor, size: int,
    dtype: torch.dtype,
) -> Iterator[tuple[Tensor, slice]]:  # fmt: skip
    """Yield the state of a row, which the caller updates, and the slice of its next tokens (a tile, at most `size`).

    A tile does not cross chunks. The state after chunk k is written to slot chunk_write[k]. Waits for the device.
    Other arguments as in `ssd_scan_varlen`.
    """
    bounds, ends, writes = chunk_start_loc.tolist(), row_chunk_loc.tolist(), chunk_write.tolist()
    for row, own in enumerate(load_slots(state, read, dtype)):
        for chunk in range(ends[row], ends[row + 1]):
            for first in range(bounds[chunk], bounds[chunk + 1], size):
                yield own, slice(first, min(first + size, bounds[chunk + 1]))
            if writes[chunk]:
                state[writes[chunk]] = own


def pair_decays(total: Tensor) -> Tensor:
    """Return the decay from token j to i, 0 if j is later, (..., i, j, D), from sums of log decays (..., Q, D)."""
    later = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device).triu_(1)
    # Masked before the exponential: the difference is positive there, and could overflow.
    return (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill_(later[:, :, None], float("-inf")).exp_()
