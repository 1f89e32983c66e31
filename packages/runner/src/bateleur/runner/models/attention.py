"""Attention over the paged KV cache.

Shapes: T tokens of all requests in one row, M hidden size, H heads (queries, keys, values), D head size.
"""

from __future__ import annotations

from torch import Tensor

from bateleur.runner.models.branch import Branch
from bateleur.runner.models.context import LayerStep, StepContext
from bateleur.runner.models.matrix import empty_projection
from bateleur.runner.models.rope import rotate
from bateleur.runner.models.spec import AttentionLayer


class Attention(Branch):
    """Grouped-query attention over the paged KV cache; query, key and value come from one projection."""

    def __init__(self, spec: AttentionLayer, like: Tensor, index: int, rope: int) -> None:
        """`index` is the attention layer's cache, `rope` its entry in `LayerStep.rotary` (ignored without one)."""
        self.spec = spec
        self._index = index
        self._rope = rope
        self._rotated = spec.num_heads + spec.num_kv_heads
        self._heads = spec.num_heads + 2 * spec.num_kv_heads
        hidden, rows = like.shape[1], self._heads * spec.head_dim
        self.qkv_proj = empty_projection(rows, hidden, like, bias=spec.qkv_bias)
        self.o_proj = empty_projection(hidden, spec.num_heads * spec.head_dim, like, bias=spec.o_bias)

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Write this step's keys and values, attend, project back: (T, M)."""
        spec = self.spec
        qkv_THD = self.qkv_proj(x_TM).view(-1, self._heads, spec.head_dim)
        qk_THD = qkv_THD[:, : self._rotated]
        rotary: tuple[Tensor, ...] = ()
        if spec.rope is not None:
            rotary = step.rotary[self._rope]
            if not step.execution.state.backend.fuses_rotary:
                qk_THD, rotary = rotate(qk_THD, *rotary), ()
        q, k, v = qk_THD[:, : spec.num_heads], qk_THD[:, spec.num_heads :], qkv_THD[:, self._rotated :]
        out_THD = step.execution.eager(self._attend, q, k, v, *rotary)
        return self.o_proj(out_THD.flatten(1))

    def _attend(self, context: StepContext, q: Tensor, k: Tensor, v: Tensor, *rotary: Tensor) -> Tensor:
        assert context.attention is not None
        cache, meta, spec = context.kv[self._index], context.attention, self.spec
        turn = (rotary[0], rotary[1]) if rotary else None
        return context.backend.attend(q, k, v, cache, meta, spec.scale, spec.sliding_window, turn)
