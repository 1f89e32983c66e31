"""Memory of packed weights, computed for a model that need not be loaded."""

from __future__ import annotations

import torch

from bateleur.metadata.native import unavailable_reason
from bateleur.runner.models import native
from bateleur.runner.models.decoder import HybridDecoder
from bateleur.runner.models.matrix import Projection


def packed_weight_bytes(
    model: HybridDecoder, device: torch.device, stored: torch.dtype, *, recorded: bool = False
) -> int:
    """Return the bytes of all weights of `model` after `HybridDecoder.pack` for `device`.

    stored: dtype of the checkpoint. On a CPU with our kernels, a matrix whose numbers bfloat16 can represent is stored
    in it even if computed in float32, and a tied output projection is a packed copy of the embedding.
    recorded: graphs are recorded over the model.
    """
    held = sum(weight.nbytes for weight in model.weights().values())
    if device.type != "cpu" or unavailable_reason() is not None:
        return held
    for projection in model.projections:
        weight = projection.weight
        grouped = not isinstance(projection, Projection)
        if grouped and recorded:
            continue
        packed = native.packed_bytes(weight.shape[-2], weight.shape[-1], weight.dtype, stored)
        if packed is None:
            continue
        tied = weight is model.embedding
        held += packed * (len(weight) if grouped else 1) - (0 if tied else weight.nbytes)
    return held
