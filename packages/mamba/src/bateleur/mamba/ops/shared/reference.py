"""What the naive forms share. Slots: reading slot 0 is reading zeros, writing slot 0 is writing nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def compute(x: Tensor) -> torch.dtype:
    """What is computed in: float32, and float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def load(state: Tensor, read: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """A copy of every row's initial state: all reads come before all writes."""
    return [
        state[slot].to(dtype, copy=True) if slot else torch.zeros_like(state[0], dtype=dtype) for slot in read
    ]


def kept_pages(chunk_start_loc: Tensor, chunk_write: Tensor) -> dict[int, int]:
    """The slot to write after so many tokens of the batch, for chunks that keep their state."""
    return {int(end): int(slot) for end, slot in zip(chunk_start_loc[1:], chunk_write, strict=True) if slot}


def convolve(window: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """(W, C) inputs, newest last, to (C,)."""
    y = (window * weight.T.to(window.dtype)).sum(0)
    if bias is not None:
        y = y + bias
    return F.silu(y) if activation == "silu" else y


def advance(state: Tensor, x: Tensor, step: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """S <- exp(A step) S + step x B^T: (H, P, N) from x (H, P), step (H,), B (G, N)."""
    b = B.to(state.dtype).repeat_interleave(x.shape[0] // B.shape[0], 0)
    added = torch.einsum("h,hp,hn->hpn", step, x.to(state.dtype), b)
    return torch.exp(A * step)[:, None, None] * state + added


def show(state: Tensor, x: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """y = S C + D x: (H, P)."""
    c = C.to(state.dtype).repeat_interleave(x.shape[0] // C.shape[0], 0)
    return torch.einsum("hpn,hn->hp", state, c) + D.to(state.dtype)[:, None] * x.to(state.dtype)


def step_size(dt: Tensor, dt_bias: Tensor, limits: tuple[float, float], dtype: torch.dtype) -> Tensor:
    """Raw (H,) to step sizes."""
    return F.softplus(dt.to(dtype) + dt_bias).clamp(*limits)


def replay(state: Tensor, rings: tuple[Tensor, Tensor, Tensor], start: int, count: int, A: Tensor) -> Tensor:
    """The state after `count` entries of one row's ring."""
    x, step, B = rings
    for at in (entry % x.shape[0] for entry in range(start, start + count)):
        state = advance(state, x[at], step[at].to(state.dtype), A, B[at])
    return state
