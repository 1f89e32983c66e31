"""C implementations of sampling over a vocabulary (`draw.c`), for CPU tensors if a C compiler is found."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bateleur.metadata.dispatch import UNSUPPORTED, Unsupported
from bateleur.metadata.native import Kernel, kernels, unavailable_reason

_SIGNATURES = (("draw_rows", "plipppppp" + "lli"), ("argmax_rows", "plipp" + "lli"))


def takes(logits: Tensor) -> bool:
    """Return whether C supports these logits: float32 or bfloat16 (R, V) on a CPU, dense in the last dimension."""
    sound = logits.is_cpu and logits.dtype in (torch.float32, torch.bfloat16)
    return sound and logits.stride(1) == 1 and logits.numel() > 0 and unavailable_reason() is None


def draw_rows(logits: Tensor, values: Tensor, hashes: Tensor, seeds: Tensor, names: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token of each of N rows; returns token ids (N,) int64 and bad flags (N,) bool, see `SampledTokens`.

    The id is -2 in a row that C cannot decide without its full processed logits.

    values: (N, 4) float32, see `SamplingMetadata`. hashes: (V,) int32, see `HashedVocab`. seeds, names: (N,) int64, see
        `noise.names`.
    """
    tokens, bad = _empty(logits)
    values, hashes, seeds, names = (each.contiguous() for each in (values, hashes, seeds, names))
    _kernels()["draw_rows"](
        logits.data_ptr(), logits.stride(0), logits.dtype is torch.bfloat16, values.data_ptr(), hashes.data_ptr(),
        seeds.data_ptr(), names.data_ptr(), tokens.data_ptr(), bad.data_ptr(), *logits.shape, torch.get_num_threads(),
    )  # fmt: skip
    return tokens, bad


def argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor] | Unsupported:
    """Return token id (N,) int64 and bad flag (N,) bool of each row's first maximum, as `argmax`; or `Unsupported`."""
    if not takes(logits):
        return UNSUPPORTED
    tokens, bad = _empty(logits)
    _kernels()["argmax_rows"](
        logits.data_ptr(), logits.stride(0), logits.dtype is torch.bfloat16, tokens.data_ptr(), bad.data_ptr(),
        *logits.shape, torch.get_num_threads(),
    )  # fmt: skip
    return tokens, bad


def _empty(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)


@cache
def _kernels() -> dict[str, Kernel]:
    return dict(kernels(Path(__file__).parent / "draw.c", _SIGNATURES))
