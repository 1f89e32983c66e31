"""EAGLE-1: the target's final hidden state and the next token's embedding, through one linear map and a Llama layer.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024). The head continues the target's
own features, so its output goes straight into the target's `lm_head` (no norm), and into the next draft pass. Its first
layer has no norm in front of the attention.
"""

import torch
from torch import Tensor

from bateleur.eagle.heads.layers import BaseHead, DecoderLayer, Vocabulary
from bateleur.eagle.heads.spec import Attend, HeadSpec
from bateleur.eagle.heads.weights import Weights


class Eagle1Head(BaseHead):
    """An EAGLE-1 head of one or more layers; EAGLE-2 heads are the same."""

    def __init__(
        self, spec: HeadSpec, weights: Weights, vocabulary: Vocabulary, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(spec, weights, vocabulary, target_ids)
        self.fc = weights.product(["fc"], [spec.hidden_size], 2 * spec.hidden_size, bias="fc" in spec.biases)
        self.layers = [DecoderLayer(spec, weights, i, input_norm=i > 0) for i in range(spec.num_layers)]

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one draft pass; arguments and results as in `Head.forward`."""
        rotary = self.rotary(positions)
        h_TH = self.fc(torch.cat((self.vocabulary.embed(ids), hidden), -1))
        for layer in self.layers[:-1]:
            h_TH = layer(h_TH, rotary, attend)
        h_RH = self.layers[-1](h_TH, rotary, attend, rows)
        return h_RH, h_RH
