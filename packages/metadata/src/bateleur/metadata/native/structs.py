"""Structs as kernels in C take them."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor


class Struct(ctypes.Structure):
    """Addresses and whole numbers, as C wants them. Tensors that are pointed to have to be held by somebody."""

    def point(self, **values: Tensor | int | None) -> None:
        """Set fields by name, of tensors to where they lie; None is NULL."""
        for name, value in values.items():
            setattr(self, name, value.data_ptr() if isinstance(value, Tensor) else value)


def fields(addresses: str, numbers: str) -> list[tuple[str, Any]]:
    """Of a struct: `addresses`, and int64 `numbers` behind them, both by names with blanks between."""
    pointers = [(name, ctypes.c_void_p) for name in addresses.split()]
    return [*pointers, *((name, ctypes.c_int64) for name in numbers.split())]
