"""The dtype of keys and values in the cache."""

from __future__ import annotations

import warnings

import torch

from bateleur.runner.models.spec import ModelSpec
from bateleur.runner.utils.arguments import refuse
from bateleur.runner.utils.device import DTYPES

_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


def choose_kv_cache_dtype(wanted: str, spec: ModelSpec) -> torch.dtype | None:
    """Return the dtype of the KV cache, or None for the dtype of the model. `auto` means the checkpoint's choice.

    Raises ValueError if the checkpoint asks for a cache that is not supported.
    """
    if wanted == "auto" and spec.kv_cache_dtype not in ("auto", *_DTYPES):
        refuse(
            "kv_cache_dtype",
            wanted,
            f"bfloat16 or fp8: the checkpoint asks for {spec.kv_cache_dtype}, which is not supported",
        )
    return _DTYPES.get(spec.kv_cache_dtype if wanted == "auto" else wanted)


def warn_of_missing_scales(spec: ModelSpec) -> None:
    """Warn once if the checkpoint lacks scales for an FP8 cache."""
    missing = sum(not (layer.k_scales and layer.v_scales) for layer in spec.attention)
    if missing:
        warnings.warn(
            f"kv_cache_dtype is fp8, and the checkpoint has no k_scale or no v_scale for {missing} of "
            f"{len(spec.attention)} attention layers: their scale is 1.0, and numbers above 448 saturate",
            RuntimeWarning,
            stacklevel=3,
        )
