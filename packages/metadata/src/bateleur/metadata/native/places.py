"""Positions and slots of a step's tokens in C, on a CPU with a compiler: `places.c`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from bateleur.metadata.native import Kernel, kernels, missing

_SIGNATURES = (("place_rows", "=" + "pll" + "pppl" + "pp"),)


@cache
def place_rows() -> Kernel | None:
    """The kernel, if there is a compiler."""
    return (
        None
        if missing() is not None
        else kernels(Path(__file__).parent / "places.c", _SIGNATURES)["place_rows"]
    )
