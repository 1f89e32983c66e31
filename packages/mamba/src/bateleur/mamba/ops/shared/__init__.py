"""What the vectorised operators share: slots of a state, rows of a flat batch, taps of a convolution.

Slot 0 is scratch: it takes the writes that are dropped, and it is set to zero before every read, which costs one
slot of traffic where masking would cost one per row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")

_FEW_ENTRIES = 4096
"""Writes of up to this many entries are too small for the wide copy on CPU to pay."""


def compute(x: Tensor) -> torch.dtype:
    """What is computed in: float32, and float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def by_content(make: Callable[..., T]) -> Callable[..., T]:
    """Keep the last results of `make` for equal arguments, tensors on CPU being compared by what they hold.

    For what follows from a step's rows alone: all layers of the step ask for the same, and looking at a few integers
    costs as much as one operation on them. Elsewhere than on CPU it is made anew each time. Results must not
    be written to.
    """

    @functools.lru_cache(maxsize=8)
    def kept(*args: object) -> T:
        return make(*(torch.tensor(arg) if type(arg) is tuple else arg for arg in args))

    @functools.wraps(make)
    def call(*args: object) -> T:
        if any(isinstance(arg, Tensor) and arg.device.type != "cpu" for arg in args):
            return make(*args)
        return kept(*(tuple(arg.tolist()) if isinstance(arg, Tensor) else arg for arg in args))

    return call


def steps(dt: Tensor, dt_bias: Tensor, limits: tuple[float, float], dtype: torch.dtype) -> Tensor:
    """Raw (T, H) to step sizes."""
    step = F.softplus(dt.to(dtype) + dt_bias)
    return step if limits == (0.0, math.inf) else step.clamp_(*limits)


def load(state: Tensor, read: Tensor, dtype: torch.dtype) -> Tensor:
    """Copies of whole slots."""
    state[0].zero_()
    return state.index_select(0, read).to(dtype)


def run_of(slots: Tensor) -> slice | None:
    """The slots as a range, if they are neighbours in order and none is null.

    Looking costs about a microsecond on CPU, where a view then saves a copy of every state: at 64 rows of 128 KiB that
    is 16 MiB. On a GPU looking would be a synchronisation, and the gather is not what costs.
    """
    if slots.device.type != "cpu":
        return None
    values = slots.tolist()
    first, end = values[0], values[0] + len(values)
    if first == 0 or values[-1] != end - 1 or values != list(range(first, end)):
        return None
    return slice(first, end)


def spaced(slots: Tensor) -> slice | None:
    """The slots as a range of some step, if they lie as far apart in order as the first two, and none is null."""
    if slots.device.type != "cpu":
        return None
    values = slots.tolist()
    step = values[1] - values[0] if len(values) > 1 else 1
    if values[0] == 0 or step <= 0 or values != list(range(values[0], values[-1] + 1, step)):
        return None
    return slice(values[0], values[-1] + 1, step)


def in_place(state: Tensor, dtype: torch.dtype) -> bool:
    """Whether computing in `dtype` can work on views of `state`."""
    return state.dtype == dtype and state.is_contiguous()


def neighbours(state: Tensor, read: Tensor, write: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A view of the slots if the rows own neighbouring ones, in order, and keep them; else None."""
    run = run_of(read) if in_place(state, dtype) else None
    return state[run] if run is not None and _same(read, write) else None


def _same(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b)


def written(write: Tensor) -> Tensor | None:
    """Which rows write to a slot that is not null; None stands for "any of them may", as on a GPU."""
    if write.device.type != "cpu":
        return None
    rows = write.numpy().nonzero()[0]
    return None if len(rows) == len(write) else torch.from_numpy(rows)


def store(state: Tensor, write: Tensor, values: Tensor) -> None:
    """Scatter whole slots; duplicates are allowed in slot 0 only."""
    if not values.shape[0]:
        return
    values = values.to(state.dtype)
    wide = state.device.type == "cpu" and values.numel() > _FEW_ENTRIES
    if wide and _in_16_bytes(state) and _in_16_bytes(values):
        # The scatter moves one element at a time on CPU: 16-byte elements make it six times as fast (30 us, not 200,
        # for 8 slots of 128 KiB), and copy the same bits.
        state, values = state.view(torch.complex128), values.view(torch.complex128)
    state.index_put_((write,), values)


def _in_16_bytes(x: Tensor) -> bool:
    """Whether `x` can be viewed as 16-byte elements."""
    ratio = 16 // x.element_size()
    outer = x.stride()[:-1]
    return x.stride(-1) == 1 and not (
        x.shape[-1] % ratio or x.storage_offset() % ratio or any(s % ratio for s in outer)
    )


def query_lens(query_start_loc: Tensor) -> Tensor:
    """(R,) tokens of each row."""
    return query_start_loc[1:] - query_start_loc[:-1]


def all_long(query_start_loc: Tensor, max_query_len: int, num_tokens: int) -> bool:
    """Whether the host sees that every row has `max_query_len` tokens, so that nothing has to be padded."""
    if query_start_loc.device.type != "cpu" or num_tokens != max_query_len * (len(query_start_loc) - 1):
        return False
    return int(query_start_loc[-1]) == num_tokens


def pad_rows(query_start_loc: Tensor, max_query_len: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Two (R, M) maps: the token to read (some token where a row has ended), and to write (T where it has)."""
    starts = query_start_loc.to(torch.int64)
    tokens = starts[:-1, None] + torch.arange(max_query_len, device=starts.device)
    live = tokens < starts[1:, None]
    return tokens.clamp(max=num_tokens - 1), torch.where(live, tokens, num_tokens)


def pad_chunks(chunk_start_loc: Tensor, chunk_size: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """(K, Q) tokens of the chunks, and which places hold one.

    Padding reads the chunk's own first token: never another row's data, and never what lies past the last row.
    """
    bounds = chunk_start_loc.to(torch.int64)
    lane = torch.arange(chunk_size, device=bounds.device)
    live = lane < (bounds[1:] - bounds[:-1])[:, None]
    return (bounds[:-1, None] + torch.where(live, lane, 0)).clamp_(max=num_tokens - 1), live


def unpad(y: Tensor, place: Tensor, like: Tensor) -> Tensor:
    """Scatter (entries, ...) to tokens; tokens of no row get zeros."""
    out = like.new_zeros((like.shape[0] + 1, *like.shape[1:]))
    return out.index_copy_(0, place, y.to(like.dtype))[:-1]


def slide(
    full: Tensor, weight: Tensor, bias: Tensor | None, dim: int, *, out: Tensor | None = None
) -> Tensor:
    """Convolve along `dim` of (..., C): one output for each run of W inputs."""
    width = weight.shape[1]
    count = full.shape[dim] - width + 1
    y = torch.mul(full.narrow(dim, 0, count), weight[:, 0].to(full.dtype), out=out)
    for tap in range(1, width):
        y.addcmul_(full.narrow(dim, tap, count), weight[:, tap].to(full.dtype))
    return y if bias is None else y.add_(bias)


def activate(y: Tensor, activation: str) -> Tensor:
    """In place. Raises ValueError for an unknown activation."""
    require_activation(activation)
    return F.silu(y, inplace=True) if activation == "silu" else y


def require_activation(activation: str) -> None:
    """Raise ValueError for an activation that no convolution has."""
    if activation not in ("silu", "none"):
        raise ValueError(f"activation is {activation!r}; it must be 'silu' or 'none'")
