"""Paged attention in Triton kernels, norms and rotary embedding fused into the write: the default on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from bateleur.metadata import ops
from bateleur.metadata.backends.base import (
    AttentionBackend,
    KVCache,
    PagedAttentionBuilder,
    PagedAttentionMetadata,
    of_rows,
)
from bateleur.metadata.batch import CommonAttentionMetadata
from bateleur.metadata.builder import BuildPhase, GraphSupport

_MAX_HEAD_DIM = 256
_NUM_COUNTERS = 4096


@dataclass(frozen=True, slots=True)
class TritonMetadata(PagedAttentionMetadata):
    """What kernels count on besides.

    Attributes:
        counters: (4096,) int32, 0 between calls. They are the builder's: what it built is attended to in one stream.
    """

    counters: Tensor


class TritonBuilder(PagedAttentionBuilder):
    """Adds counters to what every paged backend reads."""

    def __init__(self, graph_support: GraphSupport, device: torch.device) -> None:
        super().__init__(graph_support)
        self._counters = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)

    def build(
        self, common: CommonAttentionMetadata, group: int, phase: BuildPhase = BuildPhase.RUN
    ) -> TritonMetadata:
        """Metadata for KV-cache group ``group``.

        Raises:
            ValueError: the batch has no such group.
        """
        paged = super().build(common, group, phase)
        shared = {name: getattr(paged, name) for name in PagedAttentionMetadata.__slots__}
        return TritonMetadata(**shared, counters=self._counters)

    def refresh(self, metadata: TritonMetadata) -> None:
        """Nothing: what it built follows its batch, and counters are 0 between calls. So a graph may hold a chain of
        draft passes.
        """

    def addresses(self) -> Mapping[str, int]:
        """That of the counters."""
        return {"counters": self._counters.data_ptr()}


class TritonBackend(AttentionBackend):
    """Paged attention through the fused operators of :mod:`bateleur.metadata.ops`.

    Triton loads with the first call on a CUDA tensor; on a CPU tensor the operators run their torch forms. ``attend``
    rotates ``q`` in place. What is built by one builder is attended to in one stream: its kernels share counters.
    """

    name = "triton"
    fuses_rotary = True
    fuses_norm = True
    ignores_bounds = True
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    least_capability = (8, 0)  # bfloat16 and asynchronous copies
    write = staticmethod(ops.rotate_and_write_kv)
    kernel: ClassVar[Callable[..., Any]] = staticmethod(ops.triton_paged_attention)

    def builder(self) -> TritonBuilder:
        """A new builder, for one KV-cache group or many."""
        return TritonBuilder(self.graph_support, self.device)

    def check(self, kv: KVCache, meta: PagedAttentionMetadata) -> None:
        """Refuse metadata of another builder."""
        if not isinstance(meta, TritonMetadata):
            raise ValueError(f"meta: is {type(meta).__name__}, must be the TritonMetadata of its builder")

    def attend_stored(
        self, q: Tensor, kv: KVCache, meta: PagedAttentionMetadata, scale: float, sliding_window: int | None
    ) -> Tensor:
        """Attention (T, Hq, D) over what is stored; 0 for tokens of no row."""
        assert isinstance(meta, TritonMetadata)
        out: Tensor = self.kernel(q, *kv, *of_rows(meta), scale, sliding_window or 0, meta.counters)
        return out

    def lacks(self, head_dim: int, device: torch.device) -> str | None:
        """What is missing for heads of this size here, or for any; None if nothing is."""
        if head_dim > _MAX_HEAD_DIM:
            return f"head_dim {head_dim} is above {_MAX_HEAD_DIM}"
        return "triton is not installed" if find_spec("triton") is None else None
