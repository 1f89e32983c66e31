"""MTP, multi-token prediction, in NemotronH's form: a module of the target's own kinds of layer, trained with it.

With E the embedding of the token and f the target's final hidden state (or what the module gave a step before):

    h = eh_proj(cat(enorm(E), hnorm(f)))
    h = h + mixer(norm(h))               for each layer of the pattern, attention without rotary embedding, or MLP
    logits = lm_head(final_layernorm(h))

and `final_layernorm(h)` is what the next step is fed. There is no Mamba layer: see `mtp_hybrid_override_pattern`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.eagle.heads.layers import Attention, RMSNorm, Vocabulary, only
from bateleur.eagle.heads.spec import Attend, HeadSpec
from bateleur.eagle.heads.weights import Weights


class PlainMlp:
    """`down(act(up(x)))` with the square of relu, or silu."""

    def __init__(self, spec: HeadSpec, weights: Weights, name: str) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        up = weights.take(f"{name}.up_proj.weight", inner, hidden)
        down = weights.take(f"{name}.down_proj.weight", hidden, inner)
        up_bias = weights.take(f"{name}.up_proj.bias", inner) if spec.mlp_bias else None
        down_bias = weights.take(f"{name}.down_proj.bias", hidden) if spec.mlp_bias else None
        self.up_proj, self.down_proj = weights.project(up, up_bias), weights.project(down, down_bias)
        self._squared = spec.activation == "relu2"

    def __call__(self, x_TH: Tensor) -> Tensor:
        """(T, H)"""
        inner_TF = self.up_proj(x_TH)
        inner_TF = F.relu(inner_TF).square() if self._squared else F.silu(inner_TF)
        return self.down_proj(inner_TF)


class MtpHead:
    """One MTP module; embedding and `lm_head` are the target's."""

    def __init__(
        self, spec: HeadSpec, weights: Weights, vocabulary: Vocabulary, target_ids: Tensor | None = None
    ) -> None:
        self.spec = spec
        self.target_ids = target_ids
        self.vocabulary = vocabulary
        size, eps, last = spec.hidden_size, spec.norm_eps, len(spec.pattern) - 1
        self.token_norm = RMSNorm(weights, "layers.0.enorm", size, eps)
        self.hidden_norm = RMSNorm(weights, "layers.0.hnorm", size, eps)
        self.eh_proj = weights.project(weights.take("layers.0.eh_proj.weight", size, 2 * size))
        self.layers: list[tuple[RMSNorm, Callable[[Tensor, Attend], Tensor]]] = []
        for i in range(len(spec.pattern)):
            norm = RMSNorm(weights, f"layers.{i}.norm", size, eps)
            self.layers.append((norm, self._mixer(i, weights)))
        self.norm = RMSNorm(weights, f"layers.{last}.final_layernorm", size, eps)
        self._dtype = weights.dtype

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """See `Head.fuse`: the final hidden state as it is."""
        return features[0].to(self._dtype)

    def reserve_positions(self, num_positions: int) -> None:
        """See `Head.reserve_positions`: there is no rotary embedding."""

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Head.forward`. Positions are not read: attention has no rotary embedding."""
        token_TH = self.token_norm(self.vocabulary.embed(ids))
        h_TH = self.eh_proj(torch.cat((token_TH, self.hidden_norm(hidden)), -1))
        last = self.spec.pattern.rindex("*")
        for index, (norm, mixer) in enumerate(self.layers):
            h_TH = only(h_TH + mixer(norm(h_TH), attend), rows if index == last else None)
        h_TH = self.norm(h_TH)
        return h_TH, h_TH

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Head.logits`."""
        return self.vocabulary.logits(hidden)

    def _mixer(self, i: int, weights: Weights) -> Callable[[Tensor, Attend], Tensor]:
        spec, name = self.spec, f"layers.{i}.mixer"
        if spec.pattern[i] == "*":
            attention = Attention(spec, weights, name, spec.pattern[:i].count("*"), spec.hidden_size)
            return lambda x, attend: attention(x, None, attend)
        mlp = PlainMlp(spec, weights, name)
        return lambda x, _: mlp(x)
