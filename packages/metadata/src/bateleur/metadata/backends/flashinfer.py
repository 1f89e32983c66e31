"""Paged attention by FlashInfer (extra ``flashinfer``): planned on the host for each step, run for each layer.

FlashInfer needs one list of the pages (KV blocks) of all requests, gathered on the device, and for each request its
number of pages and the tokens of the last one, from exact lengths on the host. An eager wrapper accepts any batch. A
wrapper of a :class:`GraphShape` (equal query lengths) plans into buffers at fixed addresses, together with the
metadata, so that one CUDA graph serves every batch of that shape.

``auto`` never selects this backend. Decodes and prefills use different kernels with different orders of summation, so
speculative decoding could differ from plain decoding in the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bateleur.metadata import ops
from bateleur.metadata._memory import pinned, upload
from bateleur.metadata.attention_metadata_builder import BuildPhase, GraphSupport
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

_HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation recommends
_TENSOR_CORE_GROUP = 4  # query heads per key head; from here on decoding uses tensor cores


class GraphShape(NamedTuple):
    """Batches of a KV-cache group and metadata builder (``owner``) that may replay one graph: equal numbers of requests
    (padding included) and of tokens per request.
    """

    owner: object
    group: int
    rows: int
    query_len: int


@dataclass(frozen=True, slots=True)
class FlashInferMetadata(PagedAttentionMetadata):
    """Paged-attention metadata, and exact lengths of the R requests on the host for planning.

    Attributes:
        group: index of the KV-cache group.
        key_lens: (R,) int32 on the host, number of keys of each request.
        query_starts: (R + 1,) int32 on the host, index of the first token of each request, then the token count.
        shape: shape of the graphs that may replay the batch; None if it runs eagerly.
        for_capture: whether the batch was staged for a graph capture or its warm-up. All its rows are then requests;
            batches that replay the graph may have padded rows.
    """

    group: int
    key_lens: I32Array
    query_starts: I32Array
    shape: GraphShape | None
    for_capture: bool


class PlanConfig(NamedTuple):
    """Properties that attention layers must have in common to share one plan per batch. ``decode``: for decodes, not
    prefills. ``group``: index of the KV-cache group. ``sizes``: query heads, key heads, head dimension and block size.
    ``shape``: None for the wrapper of eager batches.
    """

    decode: bool
    group: int
    sizes: tuple[int, int, int, int]
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    scale: float
    sliding_window: int | None
    shape: GraphShape | None = None


class PlanCache:
    """All FlashInfer wrappers of a backend, with their plans. The wrappers of one device share a workspace."""

    def __init__(self) -> None:
        self.shapes: dict[GraphShape, list[PlannedWrapper]] = {}  # of graphs that were warmed up or captured
        self._wrappers: dict[PlanConfig, PlannedWrapper] = {}
        self._workspaces: dict[torch.device, Tensor] = {}

    def wrapper(self, config: PlanConfig, meta: FlashInferMetadata) -> PlannedWrapper | None:
        """Return the wrapper of ``config``. The wrapper of a graph is made when the graph is warmed up or captured;
        before that, returns None.
        """
        if config not in self._wrappers:
            if config.shape is not None and not meta.for_capture:
                return None
            if config.device not in self._workspaces:  # shared by kernels of one stream: its contents are temporary
                memory = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=config.device)
                self._workspaces[config.device] = memory
            wrapper = PlannedWrapper(config, self._workspaces[config.device], meta.block_table.shape[1])
            self._wrappers[config] = wrapper
            if config.shape is not None:
                self.shapes[config.shape].append(wrapper)
        return self._wrappers[config]

    def addresses(self, owner: object) -> dict[str, int]:
        """Return the addresses of the plan buffers that the graphs of the builder ``owner`` read, by name."""
        return {
            f"{shape.rows} rows of {shape.query_len}, plan {number}, {name}": tensor.data_ptr()
            for shape, wrappers in self.shapes.items()
            if shape.owner is owner
            for number, wrapper in enumerate(wrappers)
            for name, tensor in wrapper.buffers.items()
        }


class PlannedWrapper:
    """One FlashInfer wrapper and the batch that it is planned for. `buffers`: plan buffers of graphs by name; empty for
    the wrapper of eager batches.
    """

    def __init__(self, config: PlanConfig, workspace: Tensor, max_blocks: int) -> None:
        flashinfer: Any = import_module("flashinfer")
        self._config = config
        self._planned_for: FlashInferMetadata | None = None
        self._copied: torch.cuda.Event | None = None
        self.buffers: dict[str, Tensor] = {}
        if config.shape is not None:
            rows, end = config.shape.rows, "buffer" if config.decode else "buf"
            sizes = {"paged_kv_indptr": rows + 1, "paged_kv_indices": rows * max_blocks, "paged_kv_last_page_len": rows}
            sizes |= {} if config.decode else {"qo_indptr": rows + 1}
            self.buffers = {
                f"{name}_{end}": torch.zeros(size, dtype=torch.int32, device=config.device)
                for name, size in sizes.items()
            }
        options: dict[str, Any] = {"use_cuda_graph": True, **self.buffers} if self.buffers else {}
        if config.decode:
            options["use_tensor_cores"] = config.sizes[0] // config.sizes[1] >= _TENSOR_CORE_GROUP
        kind = "Decode" if config.decode else "Prefill"
        self._wrapper = getattr(flashinfer, f"Batch{kind}WithPagedKVCacheWrapper")(workspace, "NHD", **options)

    def plan_for(self, meta: FlashInferMetadata, begin: int, end: int) -> Any:
        """Return FlashInfer's wrapper, planned for requests ``begin`` to ``end - 1`` of ``meta``, padding included."""
        if self._planned_for is not meta:
            if self._copied is not None:  # it plans in pinned memory of its own, whose last copy may be on its way
                self._copied.synchronize()
            self._plan(meta, begin, end)
            self._planned_for = meta
            if self._config.device.type == "cuda":
                self._copied = torch.cuda.Event()
                self._copied.record()
        return self._wrapper

    def _plan(self, meta: FlashInferMetadata, begin: int, end: int) -> None:
        config, padding = self._config, max(0, end - len(meta.key_lens))
        # The decode wrapper needs a key in every row. Padded rows get the zeros of the null block.
        key_lens = np.pad(meta.key_lens[begin:end], (0, padding), constant_values=1)
        page_starts, last_page_lens = page_indptr_and_last_lens(key_lens, config.sizes[3])
        pages = page_indices(meta.block_table[begin:end], page_starts)
        arguments = [self._host(page_starts), pages, self._host(last_page_lens), *config.sizes]
        options = {
            "q_data_type": config.q_dtype,
            "kv_data_type": config.kv_dtype,
            "sm_scale": config.scale,
            "window_left": -1 if config.sliding_window is None else config.sliding_window - 1,
        }
        if not config.decode:
            starts = np.pad(meta.query_starts[begin : end + 1], (0, padding), "edge") - meta.query_starts[begin]
            arguments.insert(0, self._host(starts))
            options["causal"] = True
        self._wrapper.plan(*arguments, **options)

    def _host(self, array: I32Array) -> Tensor:
        return pinned(array.shape, torch.int32, self._config.device).copy_(torch.from_numpy(array))


def page_indptr_and_last_lens(key_lens: I32Array, block_size: int) -> tuple[I32Array, I32Array]:
    """Return FlashInfer's ``paged_kv_indptr`` (R + 1,) and ``paged_kv_last_page_len`` (R,). ``key_lens`` are >= 1."""
    counts = (key_lens + (block_size - 1)) // block_size
    starts = np.zeros(len(key_lens) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts, (key_lens - (counts - 1) * block_size).astype(np.int32)


def page_indices(block_table: Tensor, starts: I32Array) -> Tensor:
    """Return FlashInfer's ``paged_kv_indices`` (P,) int32: KV blocks of all requests, on the device of ``block_table``.

    ``starts`` is the ``paged_kv_indptr`` (R + 1,) on the host. P is therefore known without waiting for the device.
    """
    device, total = block_table.device, int(starts[-1])
    first = upload(starts.copy(), device)
    row = torch.repeat_interleave(torch.arange(len(starts) - 1, device=device), first.diff().long(), output_size=total)
    column = torch.arange(total, device=device) - first[row]
    return block_table[row, column]


class FlashInferBuilder(PagedAttentionBuilder):
    """Paged-attention builder that adds host lengths and plans the wrappers of graphs. It reads no device value."""

    reads = PagedAttentionBuilder.reads | {"seq_lens_cpu_upper_bound", "seq_lens_cpu_exact"}

    def __init__(self, plans: PlanCache) -> None:
        super().__init__(GraphSupport.UNIFORM)
        self._plans, self._owner = plans, object()

    def build(
        self, common: CommonAttentionMetadata, group: int, phase: BuildPhase = BuildPhase.RUN
    ) -> FlashInferMetadata:
        """Return metadata for KV-cache group ``group``, and plan the graphs that may replay the batch. Raises
        InexactBound if the host has only an upper bound of a request's length.
        """
        paged = super().build(common, group, phase)
        rows = common.num_actual_reqs
        try:
            lengths: I32Array = common.seq_len_bound.per_row(slice(0, rows))
        except InexactBound as error:
            raise InexactBound(f"FlashInfer plans on the host, from exact lengths; {error}") from None
        starts: I32Array = common.query_start_loc_cpu.numpy()[: rows + 1]
        for_capture, longest, shape = phase is not BuildPhase.RUN, common.max_query_len, None
        if longest and common.num_tokens == common.num_reqs * longest and common.num_actual_tokens == rows * longest:
            shape = GraphShape(self._owner, group, common.num_reqs, longest)
            if for_capture:
                self._plans.shapes.setdefault(shape, [])
            if shape not in self._plans.shapes:
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
            for wrapper in self._plans.shapes[shape]:  # none before the warm-up
                wrapper.plan_for(meta, 0, shape.rows)
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
        """Return the addresses of the plan buffers that graphs read, by name."""
        return self._plans.addresses(self._owner)


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
        """Return a reason if FlashInfer is not installed or has no kernel for the head dimension, else None."""
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
            wrapper = self._plans.wrapper(PlanConfig(single, *rest, shape), meta)
            if wrapper is not None:
                tokens = slice(0, len(q) if single else int(meta.query_starts[-1]))
                wrapper.plan_for(meta, 0, shape.rows).run(q[tokens], kv, out=out[tokens])
                return out
        for decode, begin, end in ((True, 0, n), (False, n, len(meta.key_lens))):
            if begin < end:
                tokens = slice(int(meta.query_starts[begin]), int(meta.query_starts[end]))
                wrapper = self._plans.wrapper(PlanConfig(decode, *rest), meta)
                assert wrapper is not None
                wrapper.plan_for(meta, begin, end).run(q[tokens], kv, out=out[tokens])
        return out
