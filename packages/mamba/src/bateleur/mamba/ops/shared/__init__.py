"""Helpers of the torch forms: state slots, padding of requests to equal length, and convolutions.

Dropped writes go to state slot 0, which is set to zero before every read. This costs the memory traffic of one slot;
masking would cost one slot per request.
"""

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")

_FEW_ENTRIES = 4096
"""Up to this number of entries, viewing a write as 16-byte elements on a CPU does not pay."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32, or float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cached_on_cpu(make: Callable[..., T]) -> Callable[..., T]:
    """Cache the last results of `make` by the contents of its tensors, which must be small and on a CPU.

    Index tensors depend only on the lengths and slots of a step, and all layers of the step need the same ones. Tensors
    on other devices are not cached. Callers must not write to the results.
    """

    @functools.lru_cache(maxsize=8)
    def cached(*args: object) -> T:
        return make(*(torch.tensor(arg) if type(arg) is tuple else arg for arg in args))

    @functools.wraps(make)
    def call(*args: object) -> T:
        if any(isinstance(arg, Tensor) and arg.device.type != "cpu" for arg in args):
            return make(*args)
        return cached(*(tuple(arg.tolist()) if isinstance(arg, Tensor) else arg for arg in args))

    return call


def step_sizes(dt: Tensor, dt_bias: Tensor, limits: tuple[float, float], dtype: torch.dtype) -> Tensor:
    """Return step sizes clamp(softplus(dt + dt_bias), *limits), (tokens, heads)."""
    step = F.softplus(dt.to(dtype) + dt_bias)
    return step if limits == (0.0, math.inf) else step.clamp_(*limits)


def load_slots(state: Tensor, read: Tensor, dtype: torch.dtype) -> Tensor:
    """Return copies of the states in slots `read` (R,); zeros for slot 0."""
    state[0].zero_()
    return state.index_select(0, read).to(dtype)


def store_slots(state: Tensor, write: Tensor, values: Tensor) -> None:
    """Write values (R, ...) to the state slots `write` (R,), which are all different except slot 0."""
    if not values.shape[0]:
        return
    values = values.to(state.dtype)
    wide = state.device.type == "cpu" and values.numel() > _FEW_ENTRIES
    if wide and _in_16_bytes(state) and _in_16_bytes(values):
        # index_put_ moves one element at a time on a CPU. 16-byte elements take 30 us instead of 200 us for 8 slots of
        # 128 KiB.
        state, values = state.view(torch.complex128), values.view(torch.complex128)
    state.index_put_((write,), values)


def _in_16_bytes(x: Tensor) -> bool:
    """Return whether `x` can be viewed as 16-byte elements."""
    ratio = 16 // x.element_size()
    outer = x.stride()[:-1]
    return x.stride(-1) == 1 and not (
        x.shape[-1] % ratio or x.storage_offset() % ratio or any(s % ratio for s in outer)
    )


def rows_with_slot(write: Tensor) -> Tensor | None:
    """Return indices of the rows whose slot is not 0; None if all rows have one, and always on a GPU (no sync)."""
    if write.device.type != "cpu":
        return None
    rows = write.numpy().nonzero()[0]
    return None if len(rows) == len(write) else torch.from_numpy(rows)


def query_lens(query_start_loc: Tensor) -> Tensor:
    """Return the number of tokens of each request, (R,)."""
    return query_start_loc[1:] - query_start_loc[:-1]


def pad_rows(query_start_loc: Tensor, max_query_len: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return token indices (R, max_query_len) to read and to write. Padding reads any token, writes `num_tokens`."""
    starts = query_start_loc.to(torch.int64)
    tokens = starts[:-1, None] + torch.arange(max_query_len, device=starts.device)
    real = tokens < starts[1:, None]
    return tokens.clamp(max=num_tokens - 1), torch.where(real, tokens, num_tokens)


def unpad(y: Tensor, tokens: Tensor, like: Tensor) -> Tensor:
    """Scatter `y` (entries, ...) to indices `tokens` (entries,) of zeros like `like` (T, ...); index T is dropped."""
    out = like.new_zeros((like.shape[0] + 1, *like.shape[1:]))
    return out.index_copy_(0, tokens, y.to(like.dtype))[:-1]


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, dim: int, *, out: Tensor | None = None) -> Tensor:
    """Convolve inputs (..., C) with weight (C, W) along `dim`; one output for each window of W inputs."""
    width = weight.shape[1]
    count = inputs.shape[dim] - width + 1
    y = torch.mul(inputs.narrow(dim, 0, count), weight[:, 0].to(inputs.dtype), out=out)
    for tap in range(1, width):
        y.addcmul_(inputs.narrow(dim, tap, count), weight[:, tap].to(inputs.dtype))
    return y if bias is None else y.add_(bias)


def activate(y: Tensor, activation: str) -> Tensor:
    """Apply the activation of a convolution in place. Raises ValueError for an unknown activation."""
    if activation not in ("silu", "none"):
        raise ValueError(f"activation is {activation!r}; it must be 'silu' or 'none'")
    return F.silu(y, inplace=True) if activation == "silu" else y
