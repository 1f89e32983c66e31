"""C kernels for norms and activations (`norm.c`, `activation.c`), computed in float32 and rounded once."""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from bateleur.metadata.dispatch import UNSUPPORTED, Unsupported
from bateleur.metadata.native import kernels

_HERE = Path(__file__).parent
_rms_norm = cache(partial(kernels, _HERE / "norm.c", (("rms_norm", "pliplfplfipipillfi"),)))
_activate = cache(partial(kernels, _HERE / "activation.c", (("activate", "plplliiii"),)))
_FLOATS = (torch.float32, torch.bfloat16)
_KINDS = {"relu2": 0, "silu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}
"""Of activations, as `activation.c` counts them."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | Unsupported:
    """Compute `models.norm.rms_norm` in C, with the same arguments and result.

    Return `UNSUPPORTED` unless all tensors are float32 or bfloat16 with dense rows.
    """
    return add_rms_norm(x, (), (), weight, eps, x.dtype)


def add_rms_norm(
    h: Tensor, terms: Sequence[Tensor], factors: Sequence[float], weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor | Unsupported:
    """Compute `models.norm.add_rms_norm` in C, with the same arguments and result.

    Return `UNSUPPORTED` unless all tensors are float32 or bfloat16 with dense rows, and all terms have one dtype.
    """
    if dtype not in _FLOATS or h.dim() != 2 or not all(map(_takes, (h, weight, *terms))):
        return UNSUPPORTED
    if len(terms) > 2 or len({each.dtype for each in terms}) > 1:
        return UNSUPPORTED
    (tokens, size), none = h.shape, (None, 0, 0.0)
    y = torch.empty(tokens, size, dtype=dtype)
    added = [(each.data_ptr(), each.stride(0), factor) for each, factor in zip(terms, factors, strict=True)]
    first, second = (*added, none, none)[:2]
    _rms_norm()["rms_norm"](
        h.data_ptr(), h.stride(0), h.dtype is torch.float32, *first, *second,
        bool(terms) and terms[0].dtype is torch.float32, weight.data_ptr(), weight.dtype is torch.float32,
        y.data_ptr(), dtype is torch.float32, tokens, size, eps, torch.get_num_threads(),
    )  # fmt: skip
    return y


def activation(gate_up: Tensor, size: int, name: str, gated: bool) -> Tensor | Unsupported:
    """Compute `models.mlp.activation` in C, with the same arguments and result.

    Return `UNSUPPORTED` unless all tensors are float32 or bfloat16 with dense rows.
    """
    if not _takes(gate_up):
        return UNSUPPORTED
    tokens = gate_up.shape[0]
    y = gate_up.new_empty(tokens, size)
    _activate()["activate"](
        gate_up.data_ptr(), gate_up.stride(0), y.data_ptr(), tokens, size, gated, _KINDS[name],
        gate_up.dtype is torch.float32, torch.get_num_threads(),
    )  # fmt: skip
    return y


def _takes(x: Tensor) -> bool:
    return x.dtype in _FLOATS and x.stride(-1) == 1
