"""Multi-head latent attention (MLA). The KV cache holds the keys and values of every head, not the latent.

Shapes: T tokens of all requests, M hidden size, H heads, N own and S shared key elements of a head, V
value elements of a head, R rank of the latent, D head size in the cache: max(N + S, V).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.runner.models.attention import CachedAttention
from bateleur.runner.models.context import LayerStep
from bateleur.runner.models.matrix import empty_projection
from bateleur.runner.models.norm import RMSNorm
from bateleur.runner.models.operators import operator
from bateleur.runner.models.spec import LatentLayer


class LatentAttention(CachedAttention):
    """Multi-head latent attention (MLA) between an input and an output projection.

    The input projection computes q | latent | shared key. The latent is normalised and projected to keys and values.
    The cache holds keys and values of every head, padded with zeros to one head size, not the latent.
    """

    def __init__(self, spec: LatentLayer, like: Tensor, index: int) -> None:
        """index: index of the layer's KV cache. like: tensor with the hidden size, dtype and device."""
        super().__init__(spec, index, like)
        self._layer = spec
        heads, hidden = spec.num_heads, like.shape[1]
        self._parts = [heads * (spec.key_dim + spec.shared_dim), spec.rank, spec.shared_dim]
        self.in_proj = empty_projection(sum(self._parts), hidden, like)
        self._norm = RMSNorm(spec.rank, spec.norm_eps, like)
        self.latent_proj = empty_projection(heads * (spec.key_dim + spec.value_dim), spec.rank, like)
        self.o_proj = empty_projection(hidden, heads * spec.value_dim, like)

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to load, by weight name."""
        return super().weights() | {"latent_norm": self._norm.weight}

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Write keys and values of this step, attend, and project to the hidden size: (T, M)."""
        spec = self._layer
        q, latent_TR, shared_TS = self.in_proj(x_TM, step.adapters).split_with_sizes(self._parts, -1)
        kv_up = self.latent_proj(self._norm(latent_TR), step.adapters)
        k, v = join_heads(kv_up, shared_TS, spec.num_heads, spec.key_dim, spec.head_dim)
        q = _padded(q.view(len(x_TM), spec.num_heads, -1), spec.head_dim)
        out_THD = step.attend(self.attend, self._index, q, k, v)
        return self.o_proj(out_THD[..., : spec.value_dim].flatten(1), step.adapters)


def _padded(heads_TH: Tensor, head_dim: int) -> Tensor:
    missing = head_dim - heads_TH.shape[-1]
    return F.pad(heads_TH, (0, missing)) if missing else heads_TH


def _fake_heads(kv_up: Tensor, shared: Tensor, heads: int, key_dim: int, head_dim: int) -> tuple[Tensor, Tensor]:
    k, v = (kv_up.new_empty(kv_up.shape[0], heads, head_dim) for _ in range(2))
    return k, v


@operator("latent", _fake_heads, direct=True)
def join_heads(kv_up: Tensor, shared: Tensor, heads: int, key_dim: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return keys and values (T, H, D) for the KV cache.

    kv_up (T, H * (N + V)): projection of the latent; each head has N key elements (`key_dim`), then V of its value.
    shared (T, S): key elements that all heads share. A key has N own elements, S shared ones, and zeros up to D.
    """
    kv_up_TH = kv_up.view(len(kv_up), heads, kv_up.shape[1] // heads)
    shared_TH = shared.unsqueeze(1).expand(-1, heads, -1)
    k = torch.cat((kv_up_TH[..., :key_dim], shared_TH), -1)
    return _padded(k, head_dim), _padded(kv_up_TH[..., key_dim:], head_dim)
