"""MTP, multi-token prediction, in NemotronH's form: a module of the target's own kinds of layer, trained with it.

With E the embedding of the token and f the target's final hidden state (or what the module gave a step before):

    h = eh_proj(cat(enorm(E), hnorm(f)))
    h = h + mixer(norm(h))               for each layer of the pattern, attention without rotary embedding, or MLP
    logits = lm_head(final_layernorm(h))

and `final_layernorm(h)` is what the next step is fed. There is no Mamba layer: see `mtp_hybrid_override_pattern`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bateleur.eagle.heads.layers import Attention, BaseHead, Mlp, RMSNorm, Vocabulary, only
from bateleur.eagle.heads.spec import Attend, HeadSpec
from bateleur.eagle.heads.weights import Weights


class MtpHead(BaseHead):
    """One MTP module; embedding and `lm_head` are the target's."""

    def __init__(
        self, spec: HeadSpec, weights: Weights, vocabulary: Vocabulary, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(spec, weights, vocabulary, target_ids)
        size, eps, last = spec.hidden_size, spec.norm_eps, len(spec.pattern) - 1
        self.token_norm = RMSNorm(weights, "layers.0.enorm", size, eps)
        self.hidden_norm = RMSNorm(weights, "layers.0.hnorm", size, eps)
        self.eh_proj = weights.product(["layers.0.eh_proj"], [size], 2 * size)
        self.layers: list[tuple[RMSNorm, Callable[[Tensor, Attend], Tensor]]] = []
        for i in range(len(spec.pattern)):
            norm = RMSNorm(weights, f"layers.{i}.norm", size, eps)
            self.layers.append((norm, self._mixer(i, weights)))
        self.norm = RMSNorm(weights, f"layers.{last}.final_layernorm", size, eps)

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

    def _mixer(self, i: int, weights: Weights) -> Callable[[Tensor, Attend], Tensor]:
        spec, name = self.spec, f"layers.{i}.mixer"
        if spec.pattern[i] == "*":
            attention = Attention(spec, weights, name, spec.pattern[:i].count("*"), spec.hidden_size)
            return lambda x, attend: attention(x, None, attend)
        mlp = Mlp(spec, weights, name, gated=False)
        return lambda x, _: mlp(x)
