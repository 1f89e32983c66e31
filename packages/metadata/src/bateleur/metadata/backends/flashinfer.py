"""Paged attention by FlashInfer (the extra ``flashinfer``): planned on the host for each step, run for each layer.

FlashInfer wants the pages of all rows as one list, with the number of pages of each row and the tokens in its last
one. Both counts come from exact lengths that the host has; the list is gathered from the block table on the device,
so that planning never waits for it. A plan holds for one batch, therefore nothing here may be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bateleur.metadata import ops
from bateleur.metadata.backends.base import (
    AttentionBackend,
    KVCache,
    PagedAttentionBuilder,
    PagedAttentionMetadata,
)
from bateleur.metadata.batch import CommonAttentionMetadata
from bateleur.metadata.bounds import I32Array, InexactBound
from bateleur.metadata.builder import BuildPhase, GraphSupport

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation recommends
_TENSOR_CORE_GROUP = 4  # query heads per key head from which decoding on tensor cores pays


@dataclass(frozen=True, slots=True)
class FlashInferMetadata(PagedAttentionMetadata):
    """What planning needs besides, of the real rows only; padded rows are not planned.

    Attributes:
        group: KV-cache group.
        key_lens: (R,) int32 on the host, exact keys of each real row.
        starts: (R + 1,) int32 on the host, first token of each real row, and behind them the token count.
    """

    group: int
    key_lens: I32Array
    starts: I32Array


class FlashInferBuilder(PagedAttentionBuilder):
    """Adds host lengths to what every paged backend reads. It reads no device value."""

    reads = PagedAttentionBuilder.reads | {"seq_lens_cpu_upper_bound", "seq_lens_cpu_exact"}

    def __init__(self) -> None:
        super().__init__(GraphSupport.NEVER)

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
        shared = {name: getattr(paged, name) for name in PagedAttentionMetadata.__slots__}
        shared["num_decodes"] = min(paged.num_decodes, rows)
        return FlashInferMetadata(
            **shared,
            group=group,
            key_lens=lengths.copy(),  # a layer may plan after the buffers were staged again
            starts=starts.copy(),
        )


@dataclass(frozen=True, slots=True)
class _Config:
    """What one plan serves besides its batch: layers that differ in any of it need a plan each."""

    decode: bool
    group: int
    sizes: tuple[int, int, int, int]
    """Query heads, key heads, head size and block size, as plans take them."""
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    scale: float
    sliding_window: int | None


class FlashInferBackend(AttentionBackend):
    """Decode rows and the others run by a wrapper each; layers of equal configuration share the plan of a step."""

    name = "flashinfer"
    needs_finite_cache = True  # nothing is promised of entries behind a row's last key
    dtypes = (torch.float16, torch.bfloat16)
    least_capability = (8, 0)
    write = staticmethod(ops.write_kv)

    def __init__(self) -> None:
        self._wrappers: dict[_Config, _Wrapper] = {}
        self._workspaces: dict[torch.device, Tensor] = {}

    def builder(self) -> FlashInferBuilder:
        """A new builder, for one KV-cache group or many. Its metadata is never captured."""
        return FlashInferBuilder()

    def lacks(self, head_dim: int, device: torch.device) -> str | None:
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

    def attend_stored(
        self, q: Tensor, kv: KVCache, meta: PagedAttentionMetadata, scale: float, sliding_window: int | None
    ) -> Tensor:
        """Attention (T, Hq, D) over what is stored; 0 for tokens of no row. The first layer of a step plans."""
        assert isinstance(meta, FlashInferMetadata)
        out = torch.zeros_like(q)  # tokens of no row stay 0
        k_cache, n = kv[0], meta.num_decodes
        sizes = q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1]
        tensors = sizes, q.dtype, k_cache.dtype, q.device
        for decode, begin, end in ((True, 0, n), (False, n, len(meta.key_lens))):
            if begin < end:
                config = _Config(decode, meta.group, *tensors, scale, sliding_window)
                tokens = slice(int(meta.starts[begin]), int(meta.starts[end]))
                self._wrapper(config).planned(meta, begin, end).run(q[tokens], kv, out=out[tokens])
        return out

    def _wrapper(self, config: _Config) -> _Wrapper:
        wrapper = self._wrappers.get(config)
        if wrapper is None:
            workspace = self._workspaces.get(config.device)
            if workspace is None:  # kernels of one stream may share it: nothing in it outlives a run
                workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=config.device)
                self._workspaces[config.device] = workspace
            wrapper = self._wrappers[config] = _Wrapper(config, workspace)
        return wrapper


class _Wrapper:
    """One FlashInfer wrapper, and the batch it is planned for."""

    def __init__(self, config: _Config, workspace: Tensor) -> None:
        flashinfer: Any = import_module("flashinfer")
        self._config = config
        self._planned_for: FlashInferMetadata | None = None
        if config.decode:
            tensor_cores = config.sizes[0] // config.sizes[1] >= _TENSOR_CORE_GROUP
            self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=tensor_cores
            )
        else:
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def planned(self, meta: FlashInferMetadata, begin: int, end: int) -> Any:
        """FlashInfer's wrapper, planned for rows ``begin`` .. ``end - 1`` of ``meta``."""
        if self._planned_for is not meta:
            self._plan(meta, begin, end)
            self._planned_for = meta
        return self._wrapper

    def _plan(self, meta: FlashInferMetadata, begin: int, end: int) -> None:
        config = self._config
        page_starts, last_page_lens = pages_of(meta.key_lens[begin:end], config.sizes[3])
        starts = torch.from_numpy(page_starts)
        pages = starts, page_list(meta.block_table[begin:end], starts), torch.from_numpy(last_page_lens)
        options = {
            "q_data_type": config.q_dtype,
            "kv_data_type": config.kv_dtype,
            "sm_scale": config.scale,
            "window_left": -1 if config.sliding_window is None else config.sliding_window - 1,
        }
        if config.decode:
            self._wrapper.plan(*pages, *config.sizes, **options)
        else:
            tokens = torch.from_numpy(meta.starts[begin : end + 1] - meta.starts[begin])
            self._wrapper.plan(tokens, *pages, *config.sizes, causal=True, **options)


def pages_of(key_lens: I32Array, block_size: int) -> tuple[I32Array, I32Array]:
    """First page (R + 1,) of each row in a list of all pages, its length last; and keys (R,) in each row's last page.

    ``key_lens`` (R,) are at least 1.
    """
    counts = (key_lens + (block_size - 1)) // block_size
    starts = np.zeros(len(key_lens) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts, (key_lens - (counts - 1) * block_size).astype(np.int32)


def page_list(block_table: Tensor, starts: Tensor) -> Tensor:
    """Pages (P,) int32 of all rows, one row after the other, on the device of ``block_table`` (R, max_blocks).

    ``starts`` (R + 1,) is on the host, so that P is known there, and nothing waits for the device.
    """
    device, total = block_table.device, int(starts[-1])
    counts = starts.diff().to(device, non_blocking=True)
    row = torch.repeat_interleave(torch.arange(len(counts), device=device), counts.long(), output_size=total)
    column = torch.arange(total, device=device) - starts.to(device, non_blocking=True)[row]
    return block_table[row, column]
