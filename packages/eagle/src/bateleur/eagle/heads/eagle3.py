"""EAGLE-3: hidden states of several target layers are fused into one, and one layer reads it with the token.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025), with the
switches of EAGLE-3.1. With E the embedding of the token, taps the target's hidden states, and g the fused one or that
of the last pass:

    g = fc(cat(taps))                                   fc_norm: each tap normed; norm_before_fc: cat(taps) normed
    x = cat(input_layernorm(E), hidden_norm(g))
    h = g + attention(x)                                norm_before_residual: hidden_norm(g) + attention(x)
    h = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h)); the next pass gets h     norm_output: it gets norm(h)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bateleur.eagle.heads.layers import BaseHead, DecoderLayer, RMSNorm, Rotation, Vocabulary
from bateleur.eagle.heads.spec import Attend, HeadSpec
from bateleur.eagle.heads.weights import Weights


class FirstLayer:
    """The layer whose attention reads the token embedding concatenated with the hidden state, each normalised
    separately.
    """

    def __init__(self, spec: HeadSpec, weights: Weights) -> None:
        size, eps = spec.hidden_size, spec.norm_eps
        self.token_norm = RMSNorm(weights, "layers.0.input_layernorm", size, eps)
        self.hidden_norm = RMSNorm(weights, "layers.0.hidden_norm", size, eps)
        self.layer = DecoderLayer(spec, weights, 0, input_norm=False, wide=True)
        self._norm_before_residual = spec.norm_before_residual

    def __call__(
        self, token_TH: Tensor, g_TH: Tensor, rotary: Rotation | None, attend: Attend, rows: Tensor | None
    ) -> Tensor:
        """Return the layer's output for T tokens, (T, H) with hidden size H; (R, H) if `rows` selects R of them.

        token: token embeddings. g: hidden states, see the module. rotary: None without rotary embedding.
        """
        normed_TH = self.hidden_norm(g_TH)
        residual_TH = normed_TH if self._norm_before_residual else g_TH
        x_TX = torch.cat((self.token_norm(token_TH), normed_TH), -1)
        return self.layer.branches(residual_TH, x_TX, rotary, attend, rows)


class Eagle3Head(BaseHead):
    """An EAGLE-3 head of one or more layers."""

    def __init__(
        self, spec: HeadSpec, weights: Weights, vocabulary: Vocabulary, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(spec, weights, vocabulary, target_ids)
        taps, size, width = len(spec.needs.taps), spec.hidden_size, spec.target_hidden_size
        self.fc = self.input_norm = None
        self.tap_norms: list[RMSNorm] = []
        if taps:
            self.fc = weights.product(["fc"], [size], taps * width, bias="fc" in spec.biases)
            if spec.tap_norm == "each":
                self.tap_norms = [RMSNorm(weights, f"fc_norm.{i}", width, spec.norm_eps) for i in range(taps)]
            if spec.tap_norm == "all":
                self.input_norm = RMSNorm(weights, "input_norm", taps * width, spec.norm_eps)
        self.first = FirstLayer(spec, weights)
        self.others = [DecoderLayer(spec, weights, i) for i in range(1, spec.num_layers)]
        self.norm = RMSNorm(weights, "norm", size, spec.norm_eps)

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Return the hidden input of the first pass, (tokens, hidden size), fused from the target's states at the taps.

        A head without taps takes the target's final hidden state unchanged.
        """
        if self.fc is None:
            return super().fuse(features)
        taps = [tap.to(self._dtype) for tap in features]
        if self.tap_norms:
            taps = [norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True)]
        wide = torch.cat(taps, -1)
        return self.fc(wide if self.input_norm is None else self.input_norm(wide))

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one draft pass; arguments and results as in `Head.forward`."""
        rotary, last = self.rotary(positions), len(self.others)
        h_TH = self.first(self.vocabulary.embed(ids), hidden, rotary, attend, None if last else rows)
        for index, layer in enumerate(self.others, 1):
            h_TH = layer(h_TH, rotary, attend, rows if index == last else None)
        normed_TH = self.norm(h_TH)
        return normed_TH, h_TH if self.spec.recycle == "pre_norm" else normed_TH
