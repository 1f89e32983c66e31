"""Attention backend, delta-rule kernels and KV-cache dtype of a model: the user's options, completed for a device."""

import warnings

import torch

from bateleur.mamba import PromptScan
from bateleur.mamba.ops import fla
from bateleur.metadata import AttentionBackend, get_backend
from bateleur.metadata.backends import LayerConfig, backend_names, preferred_backends, unsupported_reason
from bateleur.runner.models.spec import DeltaLayer, ModelSpec
from bateleur.runner.utils.arguments import member_of, refuse
from bateleur.runner.utils.device import DTYPES

_ON_REQUEST = "flashinfer"  # never selected by "auto": its sums depend on other tokens of the batch


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, spec: ModelSpec, kv_dtype: torch.dtype | None = None
) -> AttentionBackend:
    """Return the backend `name`; for "auto" the first one that supports the model's widest heads and attention sinks.

    kv_dtype: dtype of the KV cache; None: `dtype`. Raises ValueError with the reason if the backend can't be used.
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
    """Return the backend and why preferred ones are unusable, for `bateleur info`; None without attention layers."""
    if not spec.attention:
        return None
    notes = [choose_backend(name, device, dtype, spec, kv_dtype).name]
    needs = LayerConfig(spec.widest_head, dtype, device, kv_dtype=kv_dtype, sinks=spec.has_sinks)
    if name != "auto":
        return f"{name}, as requested"
    reasons = {before: unsupported_reason(before, needs) for before in preferred_backends(device)}
    notes += [f"not {before}: {why}" for before, why in reasons.items() if why is not None]
    if unsupported_reason(_ON_REQUEST, needs) is None:
        notes.append(f"{_ON_REQUEST} only if requested: close tokens may change with the batch")
    return "; ".join(notes)


def choose_scan(wanted: PromptScan | str, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> PromptScan:
    """Return the kernels for prompts in delta-rule layers. Raises ValueError if fla-core is requested but unusable."""
    scan = member_of(PromptScan, wanted)
    if scan is PromptScan.FLA:
        try:
            if reason := _reason_against_fla(spec, dtype, device):
                raise ValueError(reason)
            for per_channel in {len(layer.state.decay_shape) > 1 for layer in _delta_layers(spec)}:
                fla.kernel(per_channel)
        except ValueError as error:
            raise ValueError(f"prompt_scan is 'fla'; {error}") from error
    return scan


def _reason_against_fla(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why fla-core can't be used for this model and device, or None. Imports nothing of fla-core."""
    layers = _delta_layers(spec)
    if not layers:
        return "fla-core scans delta rules, and the model has none"
    reason = fla.why_not(device, dtype, max(layer.state.head_dims[0] for layer in layers))
    return reason and f"fla-core does not serve: {reason}"


def describe_scan(wanted: PromptScan | str, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the result of `choose_scan` and the reason, for `bateleur info`; None without delta rules."""
    scan = choose_scan(wanted, spec, dtype, device)
    if not _delta_layers(spec):
        return None
    if scan is PromptScan.FLA:
        return f"fla-core {fla.version()}, own kernels in steps that keep a state inside a row"
    reason = _reason_against_fla(spec, dtype, device)
    return f"own kernels; {reason or f'fla-core {fla.version()} can be selected: prompt_scan'}"


def _delta_layers(spec: ModelSpec) -> list[DeltaLayer]:
    return [layer for layer in spec.recurrent if isinstance(layer, DeltaLayer)]


_KV_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


def choose_kv_cache_dtype(wanted: str, spec: ModelSpec) -> torch.dtype | None:
    """Return the dtype of the KV cache; None for the model's dtype. Raises ValueError if it is not supported."""
    if wanted == "auto" and spec.kv_cache_dtype not in ("auto", *_KV_DTYPES):
        rule = f"bfloat16 or fp8: the checkpoint asks for {spec.kv_cache_dtype}, which is not supported"
        refuse("kv_cache_dtype", wanted, rule)
    return _KV_DTYPES.get(spec.kv_cache_dtype if wanted == "auto" else wanted)


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
