"""Paged attention by FlashInfer (the extra ``flashinfer``): planned on the host for each step, run for each layer.

FlashInfer wants the pages of all rows as one list, with the number of pages of each row and the tokens in its last
one. Both counts come from exact lengths that the host has; the list is gathered from the block table on the device,
so that planning never waits for it. Batches whose rows all have as many tokens are planned into fixed buffers, and may
be captured; a plan of any other batch holds for that one alone.

Nothing chooses it but a caller: decodes and prompts go through different kernels, which split and add in an order of
their own, so a token that a draft proposed and one that was decoded alone are not the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from bateleur.metadata import ops
from bateleur.metadata.attention_metadata_builder import BuildPhase, GraphSupport
from bateleur.metadata.backends._flashinfer_plans import FlashInferMetadata, GraphShape, PlanCache, PlanConfig
from bateleur.metadata.backends.base import (
    AttentionBackend,
    KVCache,
    PagedAttentionBuilder,
    PagedAttentionMetadata,
)
from bateleur.metadata.common_attention_metadata import CommonAttentionMetadata
from bateleur.metadata.seq_len_bound import I32Array, InexactBound
from bateleur.metadata.signature import Role, Signature

__all__ = ["FlashInferBackend", "FlashInferBuilder", "FlashInferMetadata"]

_HEAD_DIMS = (64, 128, 256)


class FlashInferBuilder(PagedAttentionBuilder):
    """Adds host lengths to what every paged backend reads, and plans what graphs hold. It reads no device value."""

    reads = PagedAttentionBuilder.reads | {"seq_lens_cpu_upper_bound", "seq_lens_cpu_exact"}

    def __init__(self, plans: PlanCache) -> None:
        """``plans`` are the backend's."""
        super().__init__(GraphSupport.UNIFORM)
        self._plans, self._owner = plans, plans.new_owner()

    def build(
        self, common: CommonAttentionMetadata, group: int, phase: BuildPhase = BuildPhase.RUN
    ) -> FlashInferMetadata:
        """Metadata for KV-cache group ``group``.

        Raises:
            InexactBound: the host has only an upper bound of a row's length.
            ValueError: the batch has no such group.
        """
        paged = super().build(common, group, phase)
        rows = common.num_actual_reqs
        try:
            lengths: I32Array = common.seq_len_bound.per_row(slice(0, rows))
        except InexactBound as error:
            raise InexactBound(f"FlashInfer plans on the host, from exact lengths; {error}") from None
        starts: I32Array = common.query_start_loc_cpu.numpy()[: rows + 1]
        for_capture, shape = phase is not BuildPhase.RUN, self._shape(common, group)
        if shape is not None and not for_capture and not self._plans.has_shape(shape):
            shape = None
        shared = {name: getattr(paged, name) for name in PagedAttentionMetadata.__slots__}
        if shape is not None:
            shared["num_decodes"] = shape.rows if shape.query_len == 1 else 0
        meta = FlashInferMetadata(
            **shared,
            group=group,
            key_lens=lengths.copy(),  # a layer may plan after the buffers were staged again
            query_starts=starts.copy(),
            shape=shape,
            for_capture=for_capture,
        )
        if shape is not None:
            self._plans.plan_for_graphs(meta)
        return meta

    def signature(self, meta: PagedAttentionMetadata) -> Signature:
        """What a graph bakes of a batch with a shape: that, and no numbers of its rows, for its plan is made anew."""
        if not isinstance(meta, FlashInferMetadata) or meta.shape is None:
            return super().signature(meta)
        return Signature(
            (
                ("rows", Role.LAYOUT, meta.shape.rows),
                ("tokens a row", Role.CONTROL, meta.shape.query_len),
                ("max_seq_len", Role.BOUND, meta.max_seq_len),
                ("for_capture", Role.BOUND, meta.for_capture),
            )
        )

    def addresses(self) -> Mapping[str, int]:
        """Where plans lie that graphs read."""
        return self._plans.addresses(self._owner)

    def _shape(self, common: CommonAttentionMetadata, group: int) -> GraphShape | None:
        """That of a batch whose rows all have as many tokens as it promises at most; None for others."""
        longest = common.max_query_len
        padded, real = (
            (common.num_tokens, common.num_reqs),
            (common.num_actual_tokens, common.num_actual_reqs),
        )
        if not longest or any(tokens != rows * longest for tokens, rows in (padded, real)):
            return None
        return GraphShape(self._owner, group, common.num_reqs, longest)


class FlashInferBackend(AttentionBackend):
    """Decode rows and the others run by a wrapper each; layers of equal configuration share the plan of a step."""

    name = "flashinfer"
    graph_support = GraphSupport.UNIFORM
    needs_finite_cache = True  # nothing is promised of entries behind a row's last key
    dtypes = (torch.float16, torch.bfloat16)
    min_capability = (8, 0)
    write = staticmethod(ops.write_kv)

    def __init__(self) -> None:
        self._plans = PlanCache()

    def builder(self) -> FlashInferBuilder:
        """A new builder, for one KV-cache group or many."""
        return FlashInferBuilder(self._plans)

    def missing_requirement(self, head_dim: int, device: torch.device) -> str | None:
        """What is missing for heads of this size here, or for any; None if nothing is."""
        if find_spec("flashinfer") is None:
            return "flashinfer is not installed; bateleur-metadata[flashinfer] installs it"
        if head_dim not in _HEAD_DIMS:
            return f"head_dim {head_dim} is not one of {', '.join(map(str, _HEAD_DIMS))}"
        return None

    def check(self, kv: KVCache, meta: PagedAttentionMetadata) -> None:
        """Refuse metadata of another builder."""
        if not isinstance(meta, FlashInferMetadata):
            raise ValueError(f"meta: is {type(meta).__name__}, must be the FlashInferMetadata of its builder")

    def attend_cache(
        self,
        q: Tensor,
        kv: KVCache,
        meta: PagedAttentionMetadata,
        scale: float,
        sliding_window: int | None,
        work: Tensor | None = None,
    ) -> Tensor:
        """Attention (T, Hq, D) over what is stored; 0 for tokens of no row. The first layer of a step plans."""
        assert isinstance(meta, FlashInferMetadata)
        out = torch.zeros_like(q)  # tokens of no row stay 0
        k_cache, n = kv[0], min(meta.num_decodes, len(meta.key_lens))
        sizes = q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1]
        rest = meta.group, sizes, q.dtype, k_cache.dtype, q.device, scale, sliding_window
        if (shape := meta.shape) is not None:
            single = shape.query_len == 1
            wrapper = self._plans.graph_wrapper(PlanConfig(single, *rest, shape), meta)
            if wrapper is not None:
                tokens = slice(0, len(q) if single else int(meta.query_starts[-1]))
                wrapper.plan_for(meta, 0, shape.rows).run(q[tokens], kv, out=out[tokens])
                return out
        for decode, begin, end in ((True, 0, n), (False, n, len(meta.key_lens))):
            if begin < end:
                tokens = slice(int(meta.query_starts[begin]), int(meta.query_starts[end]))
                plan = self._plans.eager_wrapper(PlanConfig(decode, *rest)).plan_for(meta, begin, end)
                plan.run(q[tokens], kv, out=out[tokens])
        return out
