"""Which models are computed in bfloat16 on a CPU with the same bits for a token whatever is beside it."""

from __future__ import annotations

import torch

from bateleur.metadata.native import missing
from bateleur.runner.models import native
from bateleur.runner.models.spec import AttentionLayer, Layer, MlpLayer, ModelSpec


def why_not_bfloat16(spec: ModelSpec) -> str | None:
    """What keeps a model from that here, or None.

    Its kernels must be in C, which take every token by itself: products of even width, norms, activations, rotation and
    attention. Of other layers, and of norms of heads, no form in C reads bfloat16, and torch's round by how many tokens
    come together, or elsewhere for one token than for a prompt.
    """
    if (reason := missing()) is not None:
        return reason
    if not native.in_bfloat16():
        return "this processor has no products of bfloat16"
    if others := sorted({_name(layer) for layer in spec.layers if not _in_c(layer)}):
        return f"a token of {', '.join(others)} may depend on what is beside it"
    return None if _even(spec) else "it has an odd width"


def kernels_told(
    device: torch.device, stored: torch.dtype, computed: torch.dtype, spec: ModelSpec
) -> str | None:
    """`native.told` of a model, with the reason if what is stored in bfloat16 is not computed in it."""
    narrow = device.type == "cpu" and stored == torch.bfloat16
    return native.told(device, stored, computed, why_not_bfloat16(spec) if narrow else None)


def _in_c(layer: Layer) -> bool:
    if type(layer) is AttentionLayer:
        return layer.qk_norm_eps is None and not layer.gated
    return isinstance(layer, MlpLayer)


def _name(layer: Layer) -> str:
    if type(layer) is AttentionLayer:
        return "gated attention" if layer.gated else "norms of heads"
    return type(layer).__name__.removesuffix("Layer").lower() + " layers"


def _even(spec: ModelSpec) -> bool:
    widths = [spec.hidden_size]
    widths += [each.num_heads * each.head_dim for each in spec.attention]
    widths += [each.intermediate_size for each in spec.layers if isinstance(each, MlpLayer)]
    return not any(width % 2 for width in widths)
