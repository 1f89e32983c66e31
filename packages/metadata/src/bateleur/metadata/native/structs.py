"""Argument structs of C kernels."""

import ctypes
from typing import Any

from torch import Tensor


class Struct(ctypes.Structure):
    """Struct of pointers and int64 numbers. The caller must keep the tensors alive."""

    def point(self, **values: Tensor | int | None) -> None:
        """Set fields by name. A tensor sets its data pointer, None sets NULL."""
        for name, value in values.items():
            assert hasattr(type(self), name), f"{type(self).__name__} has no field {name}"
            setattr(self, name, value.data_ptr() if isinstance(value, Tensor) else value)


def fields(addresses: str, numbers: str) -> list[tuple[str, Any]]:
    """Return the ctypes fields of a :class:`Struct`: pointers, then int64; the names are separated by spaces."""
    pointers = [(name, ctypes.c_void_p) for name in addresses.split()]
    return [*pointers, *((name, ctypes.c_int64) for name in numbers.split())]
