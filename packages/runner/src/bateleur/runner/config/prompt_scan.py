"""Which kernels take the prompts of delta rules, as a user asks for it, and why fla-core's do not where they do not."""

from __future__ import annotations

import torch

from bateleur.mamba import PromptScan
from bateleur.mamba.ops.delta_scan import fla
from bateleur.runner.models.spec import DeltaLayer, ModelSpec
from bateleur.runner.utils.arguments import member_of


def choose_scan(
    wanted: PromptScan | str, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> PromptScan:
    """What a user chose. Raises ValueError where the kernels of fla-core were, and do not serve: with the reason."""
    scan = member_of(PromptScan, wanted)
    if scan is PromptScan.FLA:
        if reason := why_not_fla(spec, dtype, device):
            raise ValueError(f"prompt_scan is 'fla'; {reason}")
        for per_channel in {len(layer.state.decay_shape) > 1 for layer in _delta_layers(spec)}:
            try:
                fla.kernel(per_channel)
            except ValueError as error:
                raise ValueError(f"prompt_scan is 'fla'; {error}") from error
    return scan


def why_not_fla(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why fla-core does not serve this model there; None if it does. Imports nothing of it."""
    layers = _delta_layers(spec)
    if not layers:
        return "fla-core scans delta rules, and the model has none"
    reason = fla.why_not(device, dtype, max(layer.state.lanes[0] for layer in layers))
    return reason and f"fla-core does not serve: {reason}"


def told(wanted: PromptScan | str, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """For people: what scans the prompts of delta rules, and why nothing else does; None without delta rules.

    Raises ValueError as `choose_scan`.
    """
    scan = choose_scan(wanted, spec, dtype, device)
    if not _delta_layers(spec):
        return None
    if scan is PromptScan.FLA:
        return f"fla-core {fla.version()}, own kernels in steps that keep a state inside a row"
    return "own kernels; " + (
        why_not_fla(spec, dtype, device) or f"fla-core {fla.version()} would serve: prompt_scan"
    )


def _delta_layers(spec: ModelSpec) -> list[DeltaLayer]:
    return [layer for layer in spec.recurrent if isinstance(layer, DeltaLayer)]
