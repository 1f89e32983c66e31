"""Selects the kernels that scan prompts of delta rules."""

from __future__ import annotations

import torch

from bateleur.mamba import PromptScan
from bateleur.mamba.ops.delta_scan import fla
from bateleur.runner.models.spec import DeltaLayer, ModelSpec
from bateleur.runner.utils.arguments import member_of


def choose_scan(wanted: PromptScan | str, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> PromptScan:
    """Return the kernels to use. Raises ValueError, with the reason, if fla-core is requested and can't be used."""
    scan = member_of(PromptScan, wanted)
    if scan is PromptScan.FLA:
        if reason := reason_against_fla(spec, dtype, device):
            raise ValueError(f"prompt_scan is 'fla'; {reason}")
        for per_channel in {len(layer.state.decay_shape) > 1 for layer in _delta_layers(spec)}:
            try:
                fla.kernel(per_channel)
            except ValueError as error:
                raise ValueError(f"prompt_scan is 'fla'; {error}") from error
    return scan


def reason_against_fla(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why fla-core can't be used for this model and device, or None. Does not import fla-core."""
    layers = _delta_layers(spec)
    if not layers:
        return "fla-core scans delta rules, and the model has none"
    reason = fla.why_not(device, dtype, max(layer.state.lanes[0] for layer in layers))
    return reason and f"fla-core does not serve: {reason}"


def describe_scan(wanted: PromptScan | str, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return which kernels scan prompts of delta rules and why, for `bateleur info`; None without delta rules.

    Raises ValueError as `choose_scan`.
    """
    scan = choose_scan(wanted, spec, dtype, device)
    if not _delta_layers(spec):
        return None
    if scan is PromptScan.FLA:
        return f"fla-core {fla.version()}, own kernels in steps that keep a state inside a row"
    reason = reason_against_fla(spec, dtype, device)
    return f"own kernels; {reason or f'fla-core {fla.version()} can be selected: prompt_scan'}"


def _delta_layers(spec: ModelSpec) -> list[DeltaLayer]:
    return [layer for layer in spec.recurrent if isinstance(layer, DeltaLayer)]
