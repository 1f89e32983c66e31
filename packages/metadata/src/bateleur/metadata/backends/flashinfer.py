"""Paged attention by FlashInfer (extra ``flashinfer``): planned on the host for each step, run for each layer.

FlashInfer needs one list of the pages (KV blocks) of all requests, and for each its number of pages and the tokens
of the last one.
Both counts come from exact lengths on the host. The list is gathered from the block table on the device, without
waiting. Batches with equal query lengths are planned into fixed buffers and may be captured.

``auto`` never selects this backend. Decodes and prefills use different kernels with different orders of summation, so
speculative decoding could differ from plain decoding in the last bit.
"""

from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from bateleur.metadata import ops
from bateleur.metadata.attention_metadata_builder import BuildPhase, GraphSupport
from bateleur.metadata.backends._flashinfer_plans import FlashInferMetadata, GraphShape, PlanCache, PlanConfig
from bateleur.metadata.backends.base import (
    AttentionBackend,
    AttentionOptions,
    KVCache,
    LayerConfig,
    PagedAttentionBuilder,
    PagedAttentionMetadata,
)
from bateleur.metadata.common_attention_metadata import CommonAttentionMetadata
from bateleur.metadata.seq_len_bound import I32Array, InexactBound
from bateleur.metadata.signature import Role, Signature

__all__ = ["FlashInferBackend", "FlashInferBuilder", "FlashInferMetadata"]

_HEAD_DIMS = (64, 128, 256)


class FlashInferBuilder(PagedAttentionBuilder):
    """Paged-attention builder that adds host lengths and plans the wrappers of graphs. It reads no device value."""

    reads = PagedAttentionBuilder.reads | {"seq_lens_cpu_upper_bound", "seq_lens_cpu_exact"}

    def __init__(self, plans: PlanCache) -> None:
        """``plans``: FlashInfer wrappers of the backend with their plans."""
        super().__init__(GraphSupport.UNIFORM)
        self._plans, self._owner = plans, plans.new_owner()

    def build(
        self, common: CommonAttentionMetadata, group: int, phase: BuildPhase = BuildPhase.RUN
    ) -> FlashInferMetadata:
        """Return metadata for KV-cache group ``group``, and plan the graphs that may replay the batch.

        Raises:
            InexactBound: the host has only an upper bound of a request's length.
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
            key_lens=lengths.copy(),  # a copy, because a layer may plan after the next staging
            query_starts=starts.copy(),
            shape=shape,
            for_capture=for_capture,
        )
        if shape is not None:
            self._plans.plan_for_graphs(meta)
        return meta

    def signature(self, meta: PagedAttentionMetadata) -> Signature:
        """Return shape and bounds of a batch. Numbers of decodes may differ, because each batch has its own plan."""
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
        """Return the plan buffers that graphs read."""
        return self._plans.addresses(self._owner)

    def _shape(self, common: CommonAttentionMetadata, group: int) -> GraphShape | None:
        """Return the graph shape of a batch if all requests have ``max_query_len`` tokens, else None."""
        longest = common.max_query_len
        padded, real = ((common.num_tokens, common.num_reqs), (common.num_actual_tokens, common.num_actual_reqs))
        if not longest or any(tokens != rows * longest for tokens, rows in (padded, real)):
            return None
        return GraphShape(self._owner, group, common.num_reqs, longest)


class FlashInferBackend(AttentionBackend):
    """Attention by FlashInfer's decode and prefill wrappers. Layers of equal configuration share the plan of a step."""

    name = "flashinfer"
    graph_support = GraphSupport.UNIFORM
    supports_sinks = False
    needs_finite_cache = True  # FlashInfer does not document NaN in entries after a row's last key
    dtypes = (torch.float16, torch.bfloat16)
    min_capability = (8, 0)
    write = staticmethod(ops.write_kv)

    def __init__(self) -> None:
        self._plans = PlanCache()

    def builder(self) -> FlashInferBuilder:
        """Return a new metadata builder, for one or more KV-cache groups."""
        return FlashInferBuilder(self._plans)

    def missing_requirement(self, config: LayerConfig) -> str | None:
        """Return why FlashInfer cannot serve ``config``, or None. It must be installed and support the head size."""
        if find_spec("flashinfer") is None:
            return "flashinfer is not installed; bateleur-metadata[flashinfer] installs it"
        if config.head_dim not in _HEAD_DIMS:
            return f"head_dim {config.head_dim} is not one of {', '.join(map(str, _HEAD_DIMS))}"
        return None

    def check(self, kv: KVCache, meta: PagedAttentionMetadata) -> None:
        """Raise ValueError for metadata of another builder."""
        if not isinstance(meta, FlashInferMetadata):
            raise ValueError(f"meta: is {type(meta).__name__}, must be the FlashInferMetadata of its builder")

    def attend_cache(self, q: Tensor, kv: KVCache, meta: PagedAttentionMetadata, options: AttentionOptions) -> Tensor:
        """Return attention (T, Hq, D) over the cache. The first layer of a step computes FlashInfer's plan."""
        assert isinstance(meta, FlashInferMetadata)
        out = torch.zeros_like(q)  # padded tokens stay 0
        k_cache, n = kv[0], min(meta.num_decodes, len(meta.key_lens))
        sizes = q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1]
        rest = meta.group, sizes, q.dtype, k_cache.dtype, q.device, options.scale, options.sliding_window
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
