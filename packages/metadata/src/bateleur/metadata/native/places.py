"""Positions and slots of a step's tokens, and what is new in its tables, in C, on a CPU with a compiler: `places.c`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from bateleur.metadata.native import Kernel, kernels, missing

_SIGNATURES = (("place_rows", "=" + "pll" + "pppl" + "pp"), ("follow_cells", "=" + "plpl" + "ppp"))


@cache
def place_rows() -> Kernel | None:
    """The kernel, if there is a compiler."""
    return _kernel("place_rows")


@cache
def follow_cells() -> Kernel | None:
    """The kernel, if there is a compiler."""
    return _kernel("follow_cells")


def _kernel(name: str) -> Kernel | None:
    return None if missing() is not None else kernels(Path(__file__).parent / "places.c", _SIGNATURES)[name]
