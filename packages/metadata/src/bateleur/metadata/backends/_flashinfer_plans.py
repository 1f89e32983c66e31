"""FlashInfer wrappers and their plans, computed on the host for each step.

An eager wrapper accepts any batch. A wrapper of a :class:`GraphShape` plans into buffers at fixed addresses, so that
one CUDA graph serves every batch of that shape. Its plan is computed together with the metadata, before the graph is
replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bateleur.metadata._memory import pinned, upload
from bateleur.metadata.backends.base import PagedAttentionMetadata
from bateleur.metadata.seq_len_bound import I32Array

WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation recommends
_TENSOR_CORE_GROUP = 4  # query heads per key head; from here on decoding uses tensor cores


class GraphShape(NamedTuple):
    """Batches that may replay one graph: equal numbers of requests (padding included) and of tokens per request.

    ``owner``: number of the metadata builder, see :meth:`PlanCache.new_owner`. ``group``: KV-cache group.
    """

    owner: int
    group: int
    rows: int
    query_len: int


@dataclass(frozen=True, slots=True)
class FlashInferMetadata(PagedAttentionMetadata):
    """Paged-attention metadata, and exact lengths of the R requests on the host for planning.

    Attributes:
        group: KV-cache group.
        key_lens: (R,) int32 on the host, exact number of keys of each request.
        query_starts: (R + 1,) int32 on the host, first token of each request, and the token count.
        shape: shape of the graphs that may replay the batch; None if it runs eagerly.
        for_capture: the batch was staged for a graph capture or its warm-up, so it has the most tokens of its shape.
    """

    group: int
    key_lens: I32Array
    query_starts: I32Array
    shape: GraphShape | None
    for_capture: bool


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """Properties that attention layers must have in common to share one plan per batch.

    ``sizes``: query heads, key heads, head dimension and block size, in FlashInfer's order.
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
        self._num_owners = 0
        self._wrappers: dict[PlanConfig, PlannedWrapper] = {}
        self._shapes: dict[GraphShape, list[PlannedWrapper]] = {}
        self._workspaces: dict[torch.device, Tensor] = {}

    def new_owner(self) -> int:
        """Return a number that identifies a builder, to tell its graphs from those of other builders."""
        self._num_owners += 1
        return self._num_owners

    def has_shape(self, shape: GraphShape) -> bool:
        """Return whether a graph was warmed up or captured for this shape."""
        return shape in self._shapes

    def plan_for_graphs(self, meta: FlashInferMetadata) -> None:
        """Plan all graph wrappers of the shape of `meta` for this batch. A shape that was not warmed up has none."""
        assert meta.shape is not None
        for wrapper in self._shapes.setdefault(meta.shape, []):
            wrapper.plan_for(meta, 0, meta.shape.rows)

    def graph_wrapper(self, config: PlanConfig, meta: FlashInferMetadata) -> PlannedWrapper | None:
        """Return the wrapper for graphs of `config.shape`. If missing, create it in a capture or warm-up, else return
        None.
        """
        wrapper = self._wrappers.get(config)
        if wrapper is None and meta.for_capture:
            assert config.shape is not None
            max_pages = config.shape.rows * meta.block_table.shape[1]
            wrapper = self._wrappers[config] = PlannedWrapper(config, self._workspace(config.device), max_pages)
            self._shapes[config.shape].append(wrapper)
        return wrapper

    def eager_wrapper(self, config: PlanConfig) -> PlannedWrapper:
        """Return the wrapper for batches that run eagerly."""
        if config not in self._wrappers:
            self._wrappers[config] = PlannedWrapper(config, self._workspace(config.device))
        return self._wrappers[config]

    def addresses(self, owner: int) -> dict[str, int]:
        """Return the addresses of the plan buffers that a builder's graphs read, by name. ``owner``: builder number."""
        return {
            f"{shape.rows} rows of {shape.query_len}, plan {number}, {name}": tensor.data_ptr()
            for shape, wrappers in self._shapes.items()
            if shape.owner == owner
            for number, wrapper in enumerate(wrappers)
            for name, tensor in wrapper.buffers.items()
        }

    def _workspace(self, device: torch.device) -> Tensor:
        if device not in self._workspaces:  # shared by kernels of one stream: its contents are temporary
            self._workspaces[device] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspaces[device]


class PlannedWrapper:
    """One FlashInfer wrapper and the batch that it is planned for.

    `buffers`: plan buffers at fixed addresses, if graphs use the wrapper. `max_pages`: maximum
    number of KV blocks of a batch.
    """

    def __init__(self, config: PlanConfig, workspace: Tensor, max_pages: int = 0) -> None:
        flashinfer: Any = import_module("flashinfer")
        self._config = config
        self._planned_for: FlashInferMetadata | None = None
        self._copied: torch.cuda.Event | None = None
        self.buffers: dict[str, Tensor] = {}
        if config.shape is not None:
            rows, end = config.shape.rows, "buffer" if config.decode else "buf"
            sizes = {"paged_kv_indptr": rows + 1, "paged_kv_indices": max_pages, "paged_kv_last_page_len": rows}
            sizes |= {} if config.decode else {"qo_indptr": rows + 1}
            self.buffers = {
                f"{name}_{end}": torch.zeros(size, dtype=torch.int32, device=config.device)
                for name, size in sizes.items()
            }
        options: dict[str, Any] = {"use_cuda_graph": True, **self.buffers} if self.buffers else {}
        if config.decode:
            options["use_tensor_cores"] = config.sizes[0] // config.sizes[1] >= _TENSOR_CORE_GROUP
            self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **options)
        else:
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **options)

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
        """Return the array as a tensor, in pinned memory if the device is CUDA. FlashInfer reads and copies it."""
        return pinned(array.shape, torch.int32, self._config.device).copy_(torch.from_numpy(array))


def page_indptr_and_last_lens(key_lens: I32Array, block_size: int) -> tuple[I32Array, I32Array]:
    """Return FlashInfer's ``paged_kv_indptr`` (R + 1,) and ``paged_kv_last_page_len`` (R,). ``key_lens`` (R,) must be
    >= 1.
    """
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
