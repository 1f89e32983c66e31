"""Triton kernels of layers. Importing one of the modules imports Triton; importing this package does not.

Kernel arguments `x_token` and `x_row` are the strides of x from token to token and from row to row.
"""

from torch import Tensor


def require_adjacent(**tensors: Tensor) -> None:
    """Raise ValueError unless the last dimension of each tensor is contiguous."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name}: strides {tensor.stride()} must end in 1")
