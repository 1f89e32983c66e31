"""Which attention backend serves a model, and why no other."""

from __future__ import annotations

import torch

from bateleur.metadata import AttentionBackend, get_backend
from bateleur.metadata.backends import backend_names, preferred_backends, unsupported_reason
from bateleur.runner.models.spec import ModelSpec
from bateleur.runner.utils.arguments import refuse

_ASKED_FOR = "flashinfer"
"""As fast as it may be, nothing chooses it: its sums depend on what is beside a token."""


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, spec: ModelSpec) -> AttentionBackend:
    """What a user chose, or the first that serves the widest heads of a model, and its sinks if it has any.

    Raises ValueError for a name that is none, and for a backend that can't serve, with the reason.
    """
    if name not in (known := ("auto", *backend_names())):
        refuse("attention_backend", name, f"one of {', '.join(known)}")
    try:
        return get_backend(name, device=device, dtype=dtype, head_dim=spec.widest_head, sinks=spec.has_sinks)
    except ValueError as error:
        reason = str(error).rpartition("; ")[2]
        raise ValueError(f"attention_backend is {name!r}; {reason}") from error


def told(name: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The backend that serves, why none before it does, and what else would, if asked; None without attention layers.

    Raises ValueError as `choose_backend`.
    """
    if not spec.attention:
        return None

    def refusal(candidate: str) -> str | None:
        return unsupported_reason(
            candidate, device=device, dtype=dtype, head_dim=spec.widest_head, sinks=spec.has_sinks
        )

    notes = [choose_backend(name, device, dtype, spec).name]
    if name != "auto":
        return f"{name}, as asked for"
    notes += [
        f"not {before}: {why}"
        for before in preferred_backends(device)
        if (why := refusal(before)) is not None
    ]
    if refusal(_ASKED_FOR) is None:
        notes.append(f"{_ASKED_FOR} only if asked for: close tokens may change with the batch")
    return "; ".join(notes)
