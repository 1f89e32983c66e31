"""LoRA adapters of projections. Each token has its own adapter, or none.

Shapes: T tokens, K columns, N rows, A adapter slots, R rank of a slot (summed over the modules of the projection).
"""

from dataclasses import dataclass

from torch import Tensor

from bateleur.runner.models.operators import operator

_GATHERED_ENTRIES = 1 << 23
"""Maximum entries of matrices that the torch form copies at once."""


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """LoRA matrices A (slots, R, K) and B (slots, N, R) of one projection. Slot 0 means no adapter and holds zeros."""

    a_ARK: Tensor
    """(A, R, K) in the model's dtype."""
    b_ANR: Tensor
    """(A, N, R), scaled by `lora_alpha / r`."""


_UNADAPTED = ("router_proj", "shared_gate_proj", "latent_in_proj", "latent_out_proj")


def is_adaptable(weight: str) -> bool:
    """Return whether a LoRA adapter may change the weight of this name.

    It may change projections of layers (`layers.*_proj`), with three exceptions in layers of experts: the router, the
    gate of the shared expert, and the projections between the hidden size and the experts' own width (`latent_in_proj`,
    `latent_out_proj`). Callers must exclude the experts' up and down projections: their names are those of an MLP.
    """
    name = weight.rpartition(".")[2]
    return weight.startswith("layers.") and name.endswith("_proj") and name not in _UNADAPTED


@operator("lora", mutates=("y",))
def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor) -> None:
    """Add `b[slots[t]] @ (a[slots[t]] @ x[t])` to y[t] in place. The bits of a token do not depend on other tokens.

    y (T, N); x (T, K); a (A, R, K); b (A, N, R); slots (T,) int32, the adapter slot of each token.
    """
    step = max(1, _GATHERED_ENTRIES // (a.shape[1] * (a.shape[2] + b.shape[1])))
    for first in range(0, len(x), step):
        tokens = slice(first, first + step)
        index = slots[tokens]
        # Sums of products, not matrix products: those round by the number of tokens.
        lanes_TR = a[index].float().mul_(x[tokens].unsqueeze(1)).sum(2)
        change_TN = b[index].float().mul_(lanes_TR.unsqueeze(1)).sum(2)
        y[tokens] = y[tokens].float().add_(change_TN)
