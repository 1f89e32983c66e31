"""The target as the head sees it: frozen, dense, its taps and its law."""

# Shape letters: B batch, L tokens, D hidden, V vocabulary.

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from shipped_model.network import Network, Shape

TAPS = (2, 5, 10)
"""Boundaries between the target's layers: early, middle, and the output of the last layer before the final norm."""


class Target(nn.Module):
    """The shipped model in its dense form, with the boundaries that the head reads."""

    def __init__(self, net: Network, taps: tuple[int, ...] = TAPS) -> None:
        super().__init__()
        self.net, self.taps = net.requires_grad_(False), taps
        self.hidden_size = net.model.embeddings.weight.shape[1]
        if taps[-1] != len(net.model.layers):
            raise ValueError(f"taps={taps} must end with {len(net.model.layers)}, from which the law is read")

    @property
    def embedding(self) -> Tensor:
        """(V, D) float32; also the output matrix."""
        weight: Tensor = self.net.model.embeddings.weight
        return weight

    @torch.no_grad()
    def taps_of(self, ids_BL: Tensor) -> Tensor:
        """(B, L, taps, D) float16; L must be a multiple of 64."""
        h = self.net.model.embeddings(ids_BL)
        seen = {0: h}
        for boundary, layer in enumerate(self.net.model.layers, start=1):
            h = layer(h)
            if boundary in self.taps:
                seen[boundary] = h
        return torch.stack([seen[tap] for tap in self.taps], 2).to(torch.float16)

    @torch.no_grad()
    def law(self, normed: Tensor, temperature: float) -> Tensor:
        """(..., V) float32 probabilities from states after the final norm (..., D)."""
        return (F.linear(normed, self.embedding) / temperature).softmax(-1)


def load_target(folder: Path, taps: tuple[int, ...] = TAPS) -> Target:
    """The shipped model from its folder."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(max_position_embeddings=config["max_position_embeddings"])
    net = Network(shape, seed=0)
    weights = load_file(folder / "model.safetensors")
    output = weights.pop("lm_head.weight")
    if not torch.equal(output, weights["model.embeddings.weight"]):
        raise ValueError(f"{folder}: lm_head.weight differs from the embedding, which this training form shares")
    net.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return Target(net, taps)
