"""Paged attention in Triton kernels, with the rotary embedding fused into the write: the default on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from bateleur.metadata import ops
from bateleur.metadata.backends._template import PagedBackend, device_refusal, dtype_refusal
from bateleur.metadata.backends.base import unsupported_arguments

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_HEAD_DIM = 256
_MIN_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies


class TritonBackend(PagedBackend):
    """Paged attention through the fused operators of :mod:`bateleur.metadata.ops`.

    Triton loads with the first call on a CUDA tensor; on a CPU tensor the operators run their torch forms. ``attend``
    rotates ``q`` in place.
    """

    name: ClassVar[str] = "triton"
    fuses_rotary: ClassVar[bool] = True
    kernel: ClassVar[Callable[..., Any]] = staticmethod(ops.triton_paged_attention)

    def unsupported(
        self, head_dim: int, dtype: torch.dtype, device: torch.device, sliding_window: int | None = None
    ) -> str | None:
        """Why a configuration can't run, or None."""
        if head_dim > _MAX_HEAD_DIM:
            return f"head_dim {head_dim} is above {_MAX_HEAD_DIM}"
        if find_spec("triton") is None:
            return "triton is not installed"
        return (
            dtype_refusal(dtype, _DTYPES)
            or device_refusal(device, _MIN_CAPABILITY)
            or unsupported_arguments(head_dim, dtype, sliding_window)
        )

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Rotate ``q`` in place, store ``k``, rotated, and ``v`` by slot."""
        ops.rotate_and_write_kv(q, k, v, *kv, slot_mapping, *(rotary or (None, None)))
