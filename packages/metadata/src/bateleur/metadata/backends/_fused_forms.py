"""The torch form of the fused write, so that the operator runs on CPU: in tests, and in recorded graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.metadata.backends import _forms


def rotate_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
) -> None:
    """Rotate ``q`` in place, then store the rotated ``k``, and ``v``, by slot."""
    if cos is not None and sin is not None:
        q[..., : cos.shape[-1]] = turned(q, cos, sin)
        k = torch.cat((turned(k, cos, sin), k[..., cos.shape[-1] :]), -1)
    _forms.write_kv(k, v, k_cache, v_cache, slot_mapping)


def turned(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """The leading R lanes of every head, rotated: lane i turns with lane i + R/2."""
    rotary_dim = cos_T1R.shape[-1]
    part_THR = x_THD[..., :rotary_dim]
    return torch.addcmul(part_THR * cos_T1R, part_THR.roll(rotary_dim // 2, -1), sin_T1R)
