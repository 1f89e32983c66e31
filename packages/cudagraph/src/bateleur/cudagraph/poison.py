"""Values that no computation survives unnoticed."""

from __future__ import annotations

import torch
from torch import Tensor


def poison_(tensor: Tensor) -> Tensor:
    """Spoil `tensor` in place: NaN, True, or an integer far out of any range; inference tensors too.

    Signed integers get half of their minimum, so that adding to it or negating it does not come back into range.
    """
    with torch.inference_mode():
        dtype = tensor.dtype
        if dtype.is_complex:
            tensor.fill_(complex("nan+nanj"))
        elif dtype.is_floating_point and dtype.itemsize > 1:
            tensor.fill_(float("nan"))
        elif dtype is torch.bool:
            tensor.fill_(True)
        elif dtype.itemsize == 1 and dtype is not torch.int8:  # uint8, and the float8 family: all bits set
            tensor.view(torch.uint8).fill_(255)
        else:
            info = torch.iinfo(dtype)
            tensor.fill_(info.min // 2 if info.min else info.max)
    return tensor
