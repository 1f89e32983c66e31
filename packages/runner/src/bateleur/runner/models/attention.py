"""Attention over the paged KV cache. Shapes: T tokens of all requests, M hidden size, H heads, D head size."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.runner.models.context import LayerStep, StepContext
from bateleur.runner.models.matrix import empty_projection
from bateleur.runner.models.mlp import ResidualBranch, gate
from bateleur.runner.models.norm import AllHeadsNorm, HeadNorm, RMSNorm
from bateleur.runner.models.operators import operator
from bateleur.runner.models.rope import rotate
from bateleur.runner.models.spec import AttentionLayer, LatentLayer


class CachedAttention(ResidualBranch):
    """A residual branch whose keys and values are written to a paged KV cache.

    norm: norm of queries and keys; None without one. sinks: score of each head's attention sink; None without sinks.
    """

    norm: HeadNorm | None = None
    """Norm of queries and keys before rotation."""
    sinks: Tensor | None = None
    """(H,) float32; see `AttentionLayer.sinks`."""

    def __init__(self, spec: AttentionLayer, index: int, like: Tensor) -> None:
        """index: index of the layer's KV cache in `StepContext.kv`. like: tensor with the layer's dtype and device."""
        self.spec, self._index = spec, index
        self._kv_scales = kv_scales_of(spec, like.device)

    def attend(
        self, context: StepContext, q: Tensor, k: Tensor, v: Tensor, *rotary: Tensor, work: Tensor | None = None
    ) -> Tensor:
        """Write keys and values (T, kv heads, D) to the cache, and return the attention of queries (T, H, D).

        rotary: cosines and sines if the backend applies RoPE, else nothing. work: work list of the layer, see
        `AttentionBackend.build_work_list`.
        """
        assert context.attention is not None
        cache, meta, spec, backend = context.kv[self._index], context.attention, self.spec, context.backend
        turn = (rotary[0], rotary[1]) if rotary else None
        fuses = backend.fuses_norm and spec.of_heads is None
        norm = self.norm.weights if self.norm is not None and fuses else None
        scales = self._kv_scales if cache[0].dtype == torch.float8_e4m3fn else None
        scale, window = spec.scale, spec.sliding_window
        return backend.attend(
            q, k, v, cache, meta, scale, window, turn, norm, work=work, sinks=self.sinks, kv_scales=scales
        )


def kv_scales_of(layer: AttentionLayer, device: torch.device) -> Tensor | None:
    """Return the scales (2, kv heads) float32 of keys and of values in an FP8 cache, or None if all are 1.0."""
    if not (layer.k_scales or layer.v_scales):
        return None
    ones = (1.0,) * layer.num_kv_heads
    return torch.tensor([layer.k_scales or ones, layer.v_scales or ones], dtype=torch.float32, device=device)


class Attention(CachedAttention):
    """Grouped-query attention. One projection computes queries, keys and values.

    If `spec.gated`, the projection also computes a gate for each element of the attention output (T, H, D). The output
    is multiplied by the sigmoid of the gate before the output projection.
    """

    def __init__(self, spec: AttentionLayer, like: Tensor, index: int, rope: int) -> None:
        """index: index of the KV cache. rope: index of the RoPE in `LayerStep.rotary`. like: see `ResidualBranch`."""
        super().__init__(spec, index, like)
        self._rope = rope
        self._heads = [spec.gated * spec.num_heads, spec.num_heads + spec.num_kv_heads, spec.num_kv_heads]
        hidden, rows = like.shape[1], sum(self._heads) * spec.head_dim
        self.qkv_proj = empty_projection(rows, hidden, like, bias=spec.qkv_bias)
        self.o_proj = empty_projection(hidden, spec.num_heads * spec.head_dim, like, bias=spec.o_bias)
        if spec.sinks:
            self.sinks = like.new_empty(spec.num_heads, dtype=torch.float32)
        if spec.qk_norm_eps is not None and spec.qk_norm_whole:
            lanes = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim)
            self.norm = AllHeadsNorm(lanes, spec.qk_norm_eps, like)
        elif spec.qk_norm_eps is not None:
            self.norm = HeadNorm(spec.head_dim, spec.qk_norm_eps, like)

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to load, by weight name. If `spec.gated`, the gates come first in `qkv_proj`."""
        norms = {} if self.norm is None else {"q_norm": self.norm.q, "k_norm": self.norm.k}
        return super().weights() | norms

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Write keys and values of this step, attend, and project to the hidden size: (T, M)."""
        spec = self.spec
        heads_THD = self.qkv_proj(x_TM, step.adapters).view(-1, sum(self._heads), spec.head_dim)
        gate_THD, qk_THD, v = heads_THD.split_with_sizes(self._heads, 1)
        if spec.of_heads is not None:
            assert isinstance(self.norm, AllHeadsNorm)
            qk_THD = self.norm.over_ranks(qk_THD, spec.num_heads, spec.of_heads, step.ranks)
        elif self.norm is not None and not step.fuses_norm:
            qk_THD = self.norm(qk_THD, spec.num_heads)
        rotary: tuple[Tensor, ...] = ()
        if spec.rope is not None:
            rotary = step.rotary[self._rope]
            if not step.fuses_rotary:
                qk_THD, rotary = rotate(qk_THD, *rotary), ()
        q, k = qk_THD[:, : spec.num_heads], qk_THD[:, spec.num_heads :]
        out = step.attend(self.attend, self._index, q, k, v, *rotary).flatten(1)
        return self.o_proj(gate(out, gate_THD.flatten(1), "sigmoid") if spec.gated else out, step.adapters)


class LatentAttention(CachedAttention):
    """Multi-head latent attention (MLA). The KV cache has padded keys and values of every head, not the latent.

    The input projection computes q | latent | shared key. The latent is normalised and projected to keys and values.
    Shapes: N own and S shared key elements of a head, V value elements, R rank of the latent, D = max(N + S, V).
    """

    def __init__(self, spec: LatentLayer, like: Tensor, index: int) -> None:
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


@operator("latent", _fake_heads)
def join_heads(kv_up: Tensor, shared: Tensor, heads: int, key_dim: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return keys and values (T, H, D) for the KV cache.

    kv_up (T, H * (N + V)): projection of the latent; each head has N key elements (`key_dim`), then V of its value.
    shared (T, S): key elements that all heads share. A key has N own elements, S shared ones, and zeros up to D.
    """
    kv_up_TH = kv_up.view(len(kv_up), heads, kv_up.shape[1] // heads)
    shared_TH = shared.unsqueeze(1).expand(-1, heads, -1)
    k = torch.cat((kv_up_TH[..., :key_dim], shared_TH), -1)
    return _padded(k, head_dim), _padded(kv_up_TH[..., key_dim:], head_dim)
