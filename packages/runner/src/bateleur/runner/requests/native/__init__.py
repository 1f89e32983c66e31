"""What steps do to rows of the request table, in C where there is a compiler: `settle.c`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from bateleur.metadata.native import Kernel, kernels, missing

_SIGNATURES = (("settle_rows", "=" + "plppplplpp"), ("read_rows", "=" + "pppl" + "llpl" + "ppp"))


@cache
def kernel(name: str) -> Kernel | None:
    """A function of `settle.c`, if there is a compiler."""
    return None if missing() is not None else kernels(Path(__file__).parent / "settle.c", _SIGNATURES)[name]
