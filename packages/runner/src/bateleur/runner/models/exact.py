"""Which models are computed in bfloat16 on a CPU by default: where a token is the same beside any, and it is faster."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bateleur.mamba.ops.native import MOST_TOKENS, fits
from bateleur.mamba.ops.native.conv import MOST_TAPS
from bateleur.metadata.backends import why_not
from bateleur.metadata.native import missing
from bateleur.runner.models import native
from bateleur.runner.models.spec import AttentionLayer, Layer, MambaLayer, MlpLayer, ModelSpec


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a user chose of what decides which kernels compute."""

    attention_backend: str = "auto"
    ssm_dtype: torch.dtype | None = None
    """Of recurrent states; None is the checkpoint's own."""
    num_speculative_tokens: int = 0
    ranks: int = 1
    """Who share each layer."""


DEFAULTS = Chosen()
_NO_GAIN = "one stream of a hybrid is no faster, and drafts by a head are not made in C"
"""Why hybrids keep float32, though their tokens would be the same: the 27 M NemotronH of `benchmarks/rival.py` is 1.0,
1.2 and 1.5 times as fast at batch 1, 8 and 32, but the shipped one with its head 0.6 times at batch 1.
"""


def why_not_bfloat16(spec: ModelSpec, chosen: Chosen = DEFAULTS) -> str | None:
    """What keeps a model from that here, or None.

    Its kernels must be in C, which take every token by itself: products of even width, norms, activations, rotation,
    attention, and what Mamba-2 does over float32 states. Of other layers, and of norms of heads, no form in C reads
    bfloat16, and torch's round by how many tokens come together, or elsewhere for one token than for a prompt.
    """
    if (reason := missing()) is not None:
        return reason
    if not native.in_bfloat16():
        return "this processor has no products of bfloat16"
    others = {_other(layer, chosen) for layer in spec.layers}
    if spec.attention:
        others.add(_other_attention(spec.widest_head, chosen.attention_backend))
    if named := sorted(each for each in others if each is not None):
        return f"a token of {', '.join(named)} may depend on what is beside it"
    if not _even(spec):
        return "it has an odd width"
    return _NO_GAIN if any(isinstance(each, MambaLayer) for each in spec.layers) else None


def kernels_told(
    device: torch.device,
    stored: torch.dtype,
    computed: torch.dtype,
    spec: ModelSpec,
    chosen: Chosen = DEFAULTS,
) -> str | None:
    """`native.told` of a model, with the reason if what is stored in bfloat16 is not computed in it."""
    narrow = device.type == "cpu" and stored == torch.bfloat16
    return native.told(device, stored, computed, why_not_bfloat16(spec, chosen) if narrow else None)


def _other(layer: Layer, chosen: Chosen) -> str | None:
    """What of a layer is not computed so, or None."""
    if type(layer) is AttentionLayer:
        return "gated attention" if layer.gated else None if layer.qk_norm_eps is None else "norms of heads"
    if isinstance(layer, MambaLayer):
        return _other_mamba(layer, chosen)
    return (
        None
        if isinstance(layer, MlpLayer)
        else type(layer).__name__.removesuffix("Layer").lower() + " layers"
    )


def _other_mamba(layer: MambaLayer, chosen: Chosen) -> str | None:
    state = layer.state
    if layer.norm == "gate only":
        return "gates without a norm"
    if chosen.ranks > state.num_groups:
        return "norms that several ranks share"
    if (chosen.ssm_dtype or state.ssm_dtype) != torch.float32:
        return "states that are not float32"
    if chosen.num_speculative_tokens >= MOST_TOKENS:
        return f"mamba layers with {MOST_TOKENS} drafts or more"
    small = fits(state.head_dim, state.state_size) and state.conv_width <= MOST_TAPS
    return None if small else "mamba layers of that size"


def _other_attention(head_dim: int, backend: str) -> str | None:
    if backend not in ("auto", "native"):
        return f"attention by {backend!r}"
    cpu = torch.device("cpu")
    reason = why_not("native", device=cpu, dtype=torch.bfloat16, head_dim=head_dim)
    return None if reason is None else "attention by 'torch'"


def _even(spec: ModelSpec) -> bool:
    widths = [spec.hidden_size]
    widths += [each.num_heads * each.head_dim for each in spec.attention]
    widths += [each.intermediate_size for each in spec.layers if isinstance(each, MlpLayer)]
    widths += [each.state.inner_size for each in spec.layers if isinstance(each, MambaLayer)]
    return not any(width % 2 for width in widths)
