"""Layers, parameters and bytes of a model by kind of layer."""

from collections import Counter
from dataclasses import dataclass

import torch

from bateleur.runner.models import HybridDecoder
from bateleur.runner.models import spec as layers
from bateleur.runner.models.experts import ROUTED
from bateleur.runner.models.memory_report import describe_quantized, quantized_parts, weight_sizes
from bateleur.runner.models.spec import ExpertsLayer, ModelSpec, SingleLayer, parts_of
from bateleur.runner.spec_decode.mtp_head import MtpHead

KINDS = {
    layers.MambaLayer: "mamba",
    layers.DeltaLayer: "delta",
    layers.ShortConvLayer: "short conv",
    layers.AttentionLayer: "attention",
    layers.LatentLayer: "attention",
    layers.MlpLayer: "mlp",
    layers.ExpertsLayer: "experts",
}
EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class PartFacts:
    """Sums over all layers of one kind, or over the embedding, the final norm and the output projection.
    active_bytes: bytes of the weights that one token uses: only the experts that the router selects.
    """

    layers: int
    parameters: int
    weight_bytes: int
    active_bytes: int


def layer_of(spec: ModelSpec, name: str) -> SingleLayer | None:
    """Return the layer (or the part of a parallel layer) that has the weight `name`; None outside of layers.

    The norm in front of a parallel layer belongs to its first part.
    """
    where = name.split(".")
    if where[0] != "layers":
        return None
    return parts_of(spec.layers[int(where[1])])[int(where[2]) if where[2].isdecimal() else 0]


def count_parts(model: HybridDecoder | MtpHead) -> dict[str, PartFacts]:
    """Sum up layers, parameters and weight bytes by kind of layer."""
    spec = model.module if isinstance(model, MtpHead) else model.spec
    counts = Counter(KINDS[type(part)] for layer in spec.layers for part in parts_of(layer))
    found = {kind: [count, 0, 0, 0] for kind, count in counts.items()} | {EMBEDDINGS: [0, 0, 0, 0]}
    for name, weight in weight_sizes(model.weights(), model.matrices).items():
        kind, active = EMBEDDINGS, weight.num_bytes
        if (layer := layer_of(spec, name)) is not None:
            kind = KINDS[type(layer)]
            if isinstance(layer, ExpertsLayer) and name.rpartition(".")[2] in ROUTED:
                active = active // layer.num_experts * layer.top_k
        part = found[kind]
        part[1] += weight.numel
        part[2] += weight.num_bytes
        part[3] += active
    return {kind: PartFacts(*part) for kind, part in found.items()}


def count_schemes(model: HybridDecoder, device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Return bytes of quantised matrices by kind of layer, then by "scheme: kernel" on this device in this dtype."""
    found: dict[str, dict[str, int]] = {}
    for name, projection in model.matrices.items():
        layer = layer_of(model.spec, name)
        kind = EMBEDDINGS if layer is None else KINDS[type(layer)]
        for matrix in quantized_parts(projection):
            label = f"{matrix.scheme}: {describe_quantized(matrix, device, dtype)}"
            schemes = found.setdefault(kind, {})
            schemes[label] = schemes.get(label, 0) + sum(each.nbytes for each in matrix.tensors().values())
    return found
