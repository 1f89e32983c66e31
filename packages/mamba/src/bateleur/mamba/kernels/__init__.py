"""Triton forms of the operators, one family a file, for CUDA.

Importing a module of it imports Triton; importing this package does not. The kernels work on float32, bfloat16 and
float16; the specification is `bateleur.mamba.ops.reference`. `plan` has the planners, which their torch forms specify.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

_HOMES = {
    "causal_conv1d_update": "conv_update",
    "causal_conv1d_varlen": "conv_varlen",
    "copy_states": "copy",
    "fold_ring": "fold",
    "gated_rms_norm": "gated_norm",
    "replay_update": "replay",
    "selective_state_update": "state_update",
    "ssd_scan_varlen": "ssd_scan",
}
NAMES = tuple(_HOMES)
"""The operators that have a Triton form."""


@cache
def form(name: str) -> Callable[..., Any]:
    """The Triton form of operator `name`; the first call imports its module, and so Triton."""
    found: Callable[..., Any] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found
