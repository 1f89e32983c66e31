"""Draws over a vocabulary on a CPU in C, where there is a compiler: see `draw.c`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bateleur.metadata.native import Kernel, kernels, missing

_SIGNATURES = (("draw_rows", "plipppppp" + "lli"), ("argmax_rows", "plipp" + "lli"), ("cut_rows", "ppppppll"))


def takes(logits: Tensor) -> bool:
    """Whether rows of these logits are read here: float32 or bfloat16 (R, V) on a CPU, their last axis dense."""
    sound = logits.is_cpu and logits.dtype in (torch.float32, torch.bfloat16)
    return sound and logits.stride(1) == 1 and logits.numel() > 0 and missing() is None


def draw_rows(
    logits: Tensor, values: Tensor, words: Tensor, seeds: Tensor, names: Tensor
) -> tuple[Tensor, Tensor]:
    """The tokens of N rows, -2 in one that the whole law has to tell, (N,) int64, and which rows are bad, (N,) bool.

    values: (N, 4) float32, see `Law`. words: (V,) int32, see `Lanes`. seeds, names: (N,) int64, see `noise.names`.
    """
    tokens, bad = _empty(logits)
    values, words, seeds, names = (each.contiguous() for each in (values, words, seeds, names))
    _kernels()["draw_rows"](
        logits.data_ptr(), logits.stride(0), logits.dtype is torch.bfloat16, values.data_ptr(), words.data_ptr(),
        seeds.data_ptr(), names.data_ptr(), tokens.data_ptr(), bad.data_ptr(), *logits.shape, torch.get_num_threads(),
    )  # fmt: skip
    return tokens, bad


def argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first maxima of N rows, (N,) int64, and which rows are bad, (N,) bool; see `draw.argmax`."""
    tokens, bad = _empty(logits)
    _kernels()["argmax_rows"](
        logits.data_ptr(), logits.stride(0), logits.dtype is torch.bfloat16, tokens.data_ptr(), bad.data_ptr(),
        *logits.shape, torch.get_num_threads(),
    )  # fmt: skip
    return tokens, bad


def cut_rows(scaled: Tensor, parts: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`law.cut` of N rows of logits over the temperature; parts: (N, V) exp(scaled - their maximum)."""
    least, last = torch.empty(len(scaled)), torch.empty(len(scaled), dtype=torch.int32)
    scaled, parts, values = (each.contiguous() for each in (scaled, parts, values))
    room = torch.empty(scaled.shape[1], 4, dtype=torch.int64)
    _kernels()["cut_rows"](
        scaled.data_ptr(), parts.data_ptr(), values.data_ptr(), least.data_ptr(), last.data_ptr(), room.data_ptr(),
        *scaled.shape,
    )  # fmt: skip
    return least, last


def _empty(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)


@cache
def _kernels() -> dict[str, Kernel]:
    return dict(kernels(Path(__file__).parent / "draw.c", _SIGNATURES))
