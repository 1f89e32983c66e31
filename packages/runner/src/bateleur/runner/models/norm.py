"""The root mean square norm in front of every branch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """`y = x / sqrt(mean(x^2) + eps) * weight` over the last dimension, the mean taken in float32.

    `F.rms_norm` is one kernel on CUDA and eight on CPU; there, for float32, five operators are 1.3 to 1.7 times
    faster, and a decode step has a norm per branch.
    """

    def __init__(self, size: int, eps: float, like: Tensor) -> None:
        self.weight = like.new_empty(size)
        self._eps = eps
        self._shape = (size,)
        short = like.device.type == "cpu" and like.dtype == torch.float32
        self._eps_1 = like.new_full((1,), eps) if short else None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x (T, size) of the layer's dtype."""
        if self._eps_1 is None:
            return F.rms_norm(x, self._shape, self.weight, self._eps)
        length_T1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale_T1 = torch.addcmul(self._eps_1, length_T1, length_T1, value=1.0 / self._shape[0]).rsqrt_()
        return x.mul(scale_T1).mul_(self.weight)
