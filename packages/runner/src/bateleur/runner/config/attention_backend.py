"""Selects the attention backend of a model."""

from __future__ import annotations

import torch

from bateleur.metadata import AttentionBackend, get_backend
from bateleur.metadata.backends import backend_names, preferred_backends, unsupported_reason
from bateleur.runner.models.spec import ModelSpec
from bateleur.runner.utils.arguments import refuse

_ON_REQUEST = "flashinfer"
"""Never selected by "auto": its sums depend on other tokens of the batch."""


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, spec: ModelSpec, kv_dtype: torch.dtype | None = None
) -> AttentionBackend:
    """Return the backend with this name, or for "auto" the first one that supports the model's widest heads and sinks.

    kv_dtype: of the KV cache; None: `dtype`.

    Raises ValueError for an unknown name, or with the reason if the backend can't be used.
    """
    if name not in (known := ("auto", *backend_names())):
        refuse("attention_backend", name, f"one of {', '.join(known)}")
    try:
        return get_backend(
            name, device=device, dtype=dtype, head_dim=spec.widest_head, sinks=spec.has_sinks, kv_dtype=kv_dtype
        )
    except ValueError as error:
        reason = str(error).rpartition("; ")[2]
        raise ValueError(f"attention_backend is {name!r}; {reason}") from error


def describe_backend(
    name: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None = None
) -> str | None:
    """Return the selected backend and why others are not selected, for `bateleur info`; None without attention layers.

    Raises ValueError as `choose_backend`.
    """
    if not spec.attention:
        return None

    def refusal(candidate: str) -> str | None:
        return unsupported_reason(
            candidate, device=device, dtype=dtype, head_dim=spec.widest_head, sinks=spec.has_sinks, kv_dtype=kv_dtype
        )

    notes = [choose_backend(name, device, dtype, spec, kv_dtype).name]
    if name != "auto":
        return f"{name}, as requested"
    notes += [f"not {before}: {why}" for before in preferred_backends(device) if (why := refusal(before)) is not None]
    if refusal(_ON_REQUEST) is None:
        notes.append(f"{_ON_REQUEST} only if requested: close tokens may change with the batch")
    return "; ".join(notes)
