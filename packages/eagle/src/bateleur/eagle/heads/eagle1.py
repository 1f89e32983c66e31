"""EAGLE-1: the target's final hidden state and the next token's embedding, through one linear map and a Llama layer.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024). The head continues the target's
own features, so its output goes straight into the target's `lm_head` (no norm), and into the next step. Its first layer
has no norm in front of the attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bateleur.eagle.heads.layers import DecoderLayer, Rotary, Vocabulary
from bateleur.eagle.heads.spec import Attend, HeadSpec
from bateleur.eagle.heads.weights import Weights


class Eagle1Head:
    """An EAGLE-1 head of one or more layers; EAGLE-2 heads are the same."""

    def __init__(
        self, spec: HeadSpec, weights: Weights, vocabulary: Vocabulary, target_ids: Tensor | None = None
    ) -> None:
        self.spec = spec
        self.target_ids = target_ids
        self.vocabulary = vocabulary
        fc = weights.take("fc.weight", spec.hidden_size, 2 * spec.hidden_size)
        self.fc = weights.project(fc, weights.take("fc.bias", spec.hidden_size) if spec.fc_bias else None)
        self.layers = [DecoderLayer(spec, weights, i, input_norm=i > 0) for i in range(spec.num_layers)]
        self._rotary = Rotary(spec.rope, weights.dtype, weights.device) if spec.rope is not None else None
        self._dtype = weights.dtype

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """See `Head.fuse`: the final hidden state as it is."""
        return features[0].to(self._dtype)

    def reserve_positions(self, num_positions: int) -> None:
        """See `Head.reserve_positions`."""
        if self._rotary is not None:
            self._rotary.reserve(num_positions)

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Head.forward`."""
        rotary = self._rotary.at(positions) if self._rotary is not None else None
        h_TH = self.fc(torch.cat((self.vocabulary.embed(ids), hidden), -1))
        for layer in self.layers[:-1]:
            h_TH = layer(h_TH, rotary, attend)
        h_RH = self.layers[-1](h_TH, rotary, attend, rows)
        return h_RH, h_RH

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Head.logits`."""
        return self.vocabulary.logits(hidden)
