"""C forms of sampling over a vocabulary, for CPU tensors if a C compiler is found: `draw.c`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bateleur.eagle.rules import apply_temperature
from bateleur.metadata.dispatch import UNSUPPORTED, Unsupported
from bateleur.metadata.native import Kernel, kernels, unavailable_reason

DIGIT = 8
"""Bits of the ordered integers that one pass of `shard_truncation` determines."""
_SIGNATURES = (
    ("draw_rows", "plipppppp" + "lli"),
    ("argmax_rows", "plipp" + "lli"),
    ("best_rows", "plipp" + "lli"),
    ("perturbed_max_rows", "plipppppppp" + "lli"),
    ("truncate_rows", "ppppppll"),
    ("histogram_rows", "ppplplll"),
    ("last_tie_rows", "pppppll"),
)


def takes(logits: Tensor) -> bool:
    """Return whether C supports these logits: float32 or bfloat16 (R, V) on a CPU, dense in the last dimension."""
    sound = logits.is_cpu and logits.dtype in (torch.float32, torch.bfloat16)
    return sound and logits.stride(1) == 1 and logits.numel() > 0 and unavailable_reason() is None


def draw_rows(logits: Tensor, values: Tensor, words: Tensor, seeds: Tensor, names: Tensor) -> tuple[Tensor, Tensor]:
    """Sample N rows: token ids (N,) int64, -2 in a row that C cannot decide without its full processed logits; and the
    bad flags, (N,) bool.

    values: (N, 4) float32, see `SamplingMetadata`. words: (V,) int32, see `Lanes`. seeds, names: (N,) int64, see
        `noise.names`.
    """
    tokens, bad = _empty(logits)
    values, words, seeds, names = (each.contiguous() for each in (values, words, seeds, names))
    _kernels()["draw_rows"](
        logits.data_ptr(), logits.stride(0), logits.dtype is torch.bfloat16, values.data_ptr(), words.data_ptr(),
        seeds.data_ptr(), names.data_ptr(), tokens.data_ptr(), bad.data_ptr(), *logits.shape, torch.get_num_threads(),
    )  # fmt: skip
    return tokens, bad


def argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor] | Unsupported:
    """Return token id (N,) int64 and bad flag (N,) bool of each row's first maximum, as `draw.argmax`."""
    if not takes(logits):
        return UNSUPPORTED
    tokens, bad = _empty(logits)
    _kernels()["argmax_rows"](
        logits.data_ptr(), logits.stride(0), logits.dtype is torch.bfloat16, tokens.data_ptr(), bad.data_ptr(),
        *logits.shape, torch.get_num_threads(),
    )  # fmt: skip
    return tokens, bad


def best_rows(logits: Tensor) -> tuple[Tensor, Tensor] | Unsupported:
    """Return the first maximum of each row, (N,) float32, and its index, (N,) int64, as `draw.best_rows`."""
    if not takes(logits):
        return UNSUPPORTED
    values, lanes = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
    _kernels()["best_rows"](
        logits.data_ptr(), logits.stride(0), logits.dtype is torch.bfloat16, values.data_ptr(), lanes.data_ptr(),
        *logits.shape, torch.get_num_threads(),
    )  # fmt: skip
    return values, lanes


def perturbed_max_rows(
    logits: Tensor, values: Tensor, kept: tuple[Tensor, Tensor] | None, words: Tensor, seeds: Tensor, names: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the token with the largest perturbed logit (logit plus noise) in a shard of N rows: its logit over the
    temperature, (N,) float32, NaN in a row that holds one and -inf if no token is left; and its index, (N,) int64, -2
    if the difference is within rounding of float32 noise.

    kept: truncation thresholds of each row, from `shard_thresholds`, or None. Other arguments as for `draw_rows`.
    """
    leads, lanes = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
    values, words, seeds, names = (each.contiguous() for each in (values, words, seeds, names))
    kept = None if kept is None else (kept[0].contiguous(), kept[1].contiguous())
    least, last = (None, None) if kept is None else (each.data_ptr() for each in kept)
    _kernels()["perturbed_max_rows"](
        logits.data_ptr(), logits.stride(0), logits.dtype is torch.bfloat16, values.data_ptr(), least, last,
        words.data_ptr(), seeds.data_ptr(), names.data_ptr(), leads.data_ptr(), lanes.data_ptr(), *logits.shape,
        torch.get_num_threads(),
    )  # fmt: skip
    return leads, lanes


def truncate_rows(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | Unsupported:
    """Return truncation thresholds: each row's smallest kept logit, and the last kept token id equal to it."""
    if not takes(logits):
        return UNSUPPORTED
    scaled = apply_temperature(logits, values[:, 0])
    # torch computes the exponentials, so that they have the bits that the sort uses.
    parts = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    least, last = torch.empty(len(scaled)), torch.empty(len(scaled), dtype=torch.int32)
    scaled, parts, values = (each.contiguous() for each in (scaled, parts, values))
    room = torch.empty(scaled.shape[1], 4, dtype=torch.int64)
    _kernels()["truncate_rows"](
        scaled.data_ptr(), parts.data_ptr(), values.data_ptr(), least.data_ptr(), last.data_ptr(), room.data_ptr(),
        *scaled.shape,
    )  # fmt: skip
    return least, last


def histogram_rows(scaled: Tensor, mass: Tensor | None, start: Tensor, shift: int) -> Tensor | Unsupported:
    """Return the weight of each value of a digit in each row, (N, D) int64, as `shard_truncation.histogram_rows`."""
    if not takes(scaled):
        return UNSUPPORTED
    digits = 1 << DIGIT
    sums, scaled = torch.empty(len(scaled), digits, dtype=torch.int64), scaled.contiguous()
    mass = None if mass is None else mass.contiguous()
    start = start.contiguous()
    _kernels()["histogram_rows"](
        scaled.data_ptr(), None if mass is None else mass.data_ptr(), start.data_ptr(), shift, sums.data_ptr(), digits,
        *scaled.shape,
    )  # fmt: skip
    return sums


def last_tie_rows(scaled: Tensor, least: Tensor, kept: Tensor, own: Tensor) -> Tensor | Unsupported:
    """Return the index of each row's last kept token that equals the threshold, (N,) int32."""
    if not takes(scaled):
        return UNSUPPORTED
    last = torch.empty(len(scaled), dtype=torch.int32)
    scaled, least, kept, own = (each.contiguous() for each in (scaled, least, kept, own))
    _kernels()["last_tie_rows"](
        scaled.data_ptr(), least.data_ptr(), kept.data_ptr(), own.data_ptr(), last.data_ptr(), *scaled.shape
    )
    return last


def _empty(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)


@cache
def _kernels() -> dict[str, Kernel]:
    return dict(kernels(Path(__file__).parent / "draw.c", _SIGNATURES))
