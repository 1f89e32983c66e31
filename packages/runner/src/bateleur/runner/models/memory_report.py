"""What weights take in memory, laid out as products read them: of a model that need not be loaded."""

from __future__ import annotations

import torch

from bateleur.metadata.native import unavailable_reason
from bateleur.runner.models import native
from bateleur.runner.models.decoder import HybridDecoder
from bateleur.runner.models.matrix import Projection


def held_bytes(
    model: HybridDecoder, device: torch.device, stored: torch.dtype, *, recorded: bool = False
) -> int:
    """Bytes of all weights of `model`, once `HybridDecoder.pack` has laid them out for `device`.

    stored: what its checkpoint is in. A matrix whose numbers bfloat16 holds is kept in that on a CPU with our kernels,
    also where it is computed in float32, and an output that is tied to the embedding is kept beside it.
    recorded: graphs are recorded over it.
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
