"""Attention whose keys and values are made of a latent, over a cache of plain heads.

Shapes: T tokens of all requests in one row, M hidden size, H heads, N lanes of a key that are the head's own, S those
that all heads share, V lanes of a value, R rank of the latent, D lanes of the cache: the larger of N + S and V.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.runner.models.attention import CachedAttention
from bateleur.runner.models.context import LayerStep
from bateleur.runner.models.matrix import empty_projection
from bateleur.runner.models.norm import RMSNorm
from bateleur.runner.models.spec import LatentLayer


class LatentAttention(CachedAttention):
    """Projection to q | latent | shared key, the latent's norm, its projection to keys and values, attention, and back.

    The cache holds keys and values of every head, padded with zeros to D lanes, and not the latent.
    """

    def __init__(self, spec: LatentLayer, like: Tensor, index: int) -> None:
        """`index` is the attention layer's cache."""
        super().__init__(spec, index)
        self._layer = spec
        heads, hidden = spec.num_heads, like.shape[1]
        self._parts = [heads * (spec.key_dim + spec.shared_dim), spec.rank, spec.shared_dim]
        self.in_proj = empty_projection(sum(self._parts), hidden, like)
        self._norm = RMSNorm(spec.rank, spec.norm_eps, like)
        self.latent_proj = empty_projection(heads * (spec.key_dim + spec.value_dim), spec.rank, like)
        self.o_proj = empty_projection(hidden, heads * spec.value_dim, like)

    def weights(self) -> dict[str, Tensor]:
        """Tensors to be loaded, by name."""
        return super().weights() | {"latent_norm": self._norm.weight}

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Write this step's keys and values, attend, project back: (T, M)."""
        spec = self._layer
        q, latent_TR, shared_TS = self.in_proj(x_TM).split_with_sizes(self._parts, -1)
        made = self.latent_proj(self._norm(latent_TR)).view(len(x_TM), spec.num_heads, -1)
        key_THN, v_THV = made.split_with_sizes([spec.key_dim, spec.value_dim], -1)
        k = torch.cat((key_THN, shared_TS.unsqueeze(1).expand(-1, spec.num_heads, -1)), -1)
        q = q.view(k.shape)
        out_THD = step.attend(self.attend, self._index, self._padded(q), self._padded(k), self._padded(v_THV))
        return self.o_proj(out_THD[..., : spec.value_dim].flatten(1))

    def _padded(self, heads_TH: Tensor) -> Tensor:
        """(T, H, D), with zeros in the lanes that heads do not have."""
        missing = self._layer.head_dim - heads_TH.shape[-1]
        return F.pad(heads_TH, (0, missing)) if missing else heads_TH
