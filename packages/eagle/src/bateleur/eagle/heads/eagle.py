"""EAGLE-1 and EAGLE-3 heads.

EAGLE-1 (Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024; EAGLE-2 heads are the
same): the target's final hidden state and the next token's embedding go through one linear map and Llama layers. The
head continues the target's own features, so its output goes straight into the target's `lm_head` (no norm), and into
the next draft pass. Its first layer has no norm in front of the attention.

EAGLE-3 (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025),
with the switches of EAGLE-3.1. E is the embedding of the token. taps are hidden states of several target layers, and g
is the hidden input of a pass. A switch in the head's configuration changes its line as written in the right column:

    g = fc(cat(taps)) in the first pass         fc_norm: fc(cat(norm of each tap)); norm_before_fc: fc(norm(cat(taps)))
    x = cat(input_layernorm(E), hidden_norm(g))
    h = g + attention(x)                        norm_before_residual: h = hidden_norm(g) + attention(x)
    h = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h))
    g = h in the next pass                      norm_output: g = norm(h) in the next pass
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bateleur.eagle.heads.layers import BaseHead, DecoderLayer, RMSNorm, Vocabulary
from bateleur.eagle.heads.spec import Attend, HeadSpec
from bateleur.eagle.heads.weights import Weights


class Eagle1Head(BaseHead):
    """An EAGLE-1 or EAGLE-2 head of one or more layers."""

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
        h_TH = self.fc(torch.cat((self.embed(ids), hidden), -1))
        h_RH = self.run_layers(h_TH, h_TH, positions, attend, rows)
        return h_RH, h_RH


class Eagle3Head(BaseHead):
    """An EAGLE-3 head of one or more layers."""

    def __init__(
        self, spec: HeadSpec, weights: Weights, vocabulary: Vocabulary, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(spec, weights, vocabulary, target_ids)
        taps, size, width, eps = len(spec.needs.taps), spec.hidden_size, spec.target_hidden_size, spec.norm_eps
        self.fc = self.input_norm = None
        self.tap_norms: list[RMSNorm] = []
        if taps:
            self.fc = weights.product(["fc"], [size], taps * width, bias="fc" in spec.biases)
            if spec.tap_norm == "each":
                self.tap_norms = [RMSNorm(weights, f"fc_norm.{i}", width, eps) for i in range(taps)]
            if spec.tap_norm == "all":
                self.input_norm = RMSNorm(weights, "input_norm", taps * width, eps)
        self.token_norm = RMSNorm(weights, "layers.0.input_layernorm", size, eps)
        self.hidden_norm = RMSNorm(weights, "layers.0.hidden_norm", size, eps)
        self.layers = [DecoderLayer(spec, weights, i, input_norm=i > 0, wide=i == 0) for i in range(spec.num_layers)]
        self.norm = RMSNorm(weights, "norm", size, eps)

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Return the hidden input of the first pass, (tokens, hidden size), fused from the target's states at the taps.

        A head without taps takes the target's final hidden state unchanged.
        """
        if self.fc is None:
            return super().fuse(features)
        taps = [tap.to(self.dtype) for tap in features]
        if self.tap_norms:
            taps = [norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True)]
        wide = torch.cat(taps, -1)
        return self.fc(wide if self.input_norm is None else self.input_norm(wide))

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one draft pass; arguments and results as in `Head.forward`."""
        normed_TH = self.hidden_norm(hidden)
        x_TX = torch.cat((self.token_norm(self.embed(ids)), normed_TH), -1)
        residual_TH = normed_TH if self.spec.norm_before_residual else hidden
        h_RH = self.run_layers(residual_TH, x_TX, positions, attend, rows)
        normed_RH = self.norm(h_RH)
        return normed_RH, h_RH if self.spec.recycle == "pre_norm" else normed_RH
