"""Persistent input buffers of a batch; real and dummy batches are staged the same way."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from bateleur.metadata._device_staging import DeviceStaging
from bateleur.metadata._memory import CurrentStream, DeviceQueue
from bateleur.metadata._step_values import StepLengths, check_arrays, check_blocks, dummy_rows, step_lengths
from bateleur.metadata.block_table import BlockTable
from bateleur.metadata.common_attention_metadata import BatchShape, CommonAttentionMetadata, leading, leading_arrays
from bateleur.metadata.fields import FIELDS, Field, LeadingDim
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup, StepRows

_MAX_CACHED_VIEWS = 1024  # sizes (rows, tokens) with cached views; a miss costs a few microseconds


class InputBuffers:
    """Device and host buffers of the batch of a step, at fixed addresses.

    :meth:`stage` writes the real requests, pads the rest of every buffer, and returns views. It uploads once from new
    (pinned) memory, and the device computes the other fields. Several steps may therefore be in flight, but host fields
    hold the last one only. ``generation``: number of stagings; metadata with an older generation is stale.
    """

    def __init__(
        self,
        limits: BatchLimits,
        groups: Sequence[KVCacheGroup],
        device: torch.device | str,
        seq_len_fill: int = 0,
        *,
        tables: Sequence[BlockTable] = (),
        queue: DeviceQueue | None = None,
    ) -> None:
        """Allocate buffers for ``limits`` and KV-cache ``groups`` and stage an empty batch.

        Args:
            groups: KV-cache groups, in the order of ``block_tables``.
            seq_len_fill: ``seq_lens`` of padding requests: 0, or 1 if a builder needs that.
            tables: the :class:`BlockTable` of each group, if steps name its rows (``StepRows.block_table_rows``).
            queue: runs the device work. Default: the current stream of the device.

        Raises ValueError if a group's block table is too narrow for ``max_model_len``, or if ``tables`` differ in
        length or are not as wide as those of the groups.
        """
        if seq_len_fill not in (0, 1):
            raise ValueError(f"seq_len_fill: {seq_len_fill} must be 0 or 1")
        for index, group in enumerate(groups):
            if group.has_slots and group.max_blocks * group.block_size < limits.max_model_len:
                raise ValueError(
                    f"groups[{index}]: {group.max_blocks} blocks of {group.block_size} tokens hold fewer "
                    f"than max_model_len {limits.max_model_len}"
                )
        _check_tables(tables, groups)
        self.limits = limits
        self.groups = tuple(groups)
        self.device = torch.device(device)
        self.seq_len_fill = seq_len_fill
        self.generation = 0
        self._block_tables = tuple(tables)
        self._tensors = {name: self._allocate(field) for name, field in FIELDS.items()}
        self._whole: dict[str, Any] = {}
        for name, field in FIELDS.items():
            tensors = self._tensors[name]
            single = tensors[0].numpy() if field.bound_attr else tensors[0]
            self._whole[name] = tensors if field.per_group else single
        self._device = DeviceStaging(self._tensors, self.groups, tables, queue or CurrentStream(), seq_len_fill)
        # Addresses are fixed, so views are cached by size.
        view = lru_cache(len(FIELDS) * _MAX_CACHED_VIEWS)(partial(leading, self._whole))
        self._views_of = lru_cache(_MAX_CACHED_VIEWS)(partial(leading_arrays, view))
        self.forget()
        self.dummy(BatchShape.of(0, 0, 1))

    def stage(self, rows: StepRows, shape: BatchShape, *, max_seq_len: int | None = None) -> CommonAttentionMetadata:
        """Stage one step. Returns its metadata, valid until the next call.

        ``max_seq_len`` replaces the batch's upper bound of ``seq_lens``; a graph capture passes ``max_model_len``.
        Raises ValueError, and writes nothing, if sizes, dtypes, lengths or blocks do not fit the buffers or each other.
        """
        return self._stage(rows, shape, max_seq_len, real=True)

    def dummy(
        self,
        shape: BatchShape,
        *,
        context_len: int | None = None,
        is_prefilling: bool = False,
        max_seq_len: int | None = None,
    ) -> CommonAttentionMetadata:
        """Stage a valid batch of ``shape`` without requests. Block tables are null and slots -1, so it stores nothing.

        Query lengths differ by at most 1, shorter rows first. ``context_len``: computed tokens of each row; default 1,
        or 0 for rows that count as prompts (``is_prefilling``). ``max_seq_len``: see `stage`.
        """
        context = (0 if is_prefilling else 1) if context_len is None else context_len
        rows = dummy_rows(shape, self.groups, context, is_prefilling)
        return self._stage(rows, shape, max_seq_len, real=False)

    def poison(self) -> None:
        """Fill every buffer with out-of-range values, to detect reads of stale entries in tests."""
        for name, field in FIELDS.items():
            if field.on_host:
                self._tensors[name][0].fill_(field.poison)
        self._device.poison()
        self.forget()
        self.generation += 1

    def forget(self) -> None:
        """Treat all contents as unknown, as after an interrupted staging. The next staging writes all buffers."""
        self._device.forget()

    def addresses(self) -> dict[str, int]:
        """Return the data pointer of every buffer by name (``field`` or ``field.group``). They never change."""
        return {
            f"{name}.{index}" if FIELDS[name].per_group else name: tensor.data_ptr()
            for name, tensors in self._tensors.items()
            for index, tensor in enumerate(tensors)
        }

    def _allocate(self, field: Field) -> tuple[Tensor, ...]:
        extent = field.leading_dim.size(self.limits.max_num_reqs, self.limits.max_num_tokens)
        shapes: list[tuple[int, ...]] = [(extent,)] * (len(self.groups) if field.per_group else 1)
        if field.leading_dim is LeadingDim.REQS_BY_BLOCKS:
            shapes = [(extent, group.max_blocks) for group in self.groups]
        device = "cpu" if field.on_host else self.device
        return tuple(torch.zeros(shape, dtype=field.dtype, device=device) for shape in shapes)

    def _stage(self, rows: StepRows, shape: BatchShape, max_seq_len: int | None, real: bool) -> CommonAttentionMetadata:
        check_arrays(rows, shape, self.limits, self.groups, self._block_tables)
        lengths = step_lengths(rows, shape, self.limits.max_model_len)
        if max_seq_len is None:
            max_seq_len = lengths.longest
        elif not lengths.longest <= max_seq_len <= self.limits.max_model_len:
            raise ValueError(
                f"max_seq_len: {max_seq_len} must be at least the longest row {lengths.longest} "
                f"and at most max_model_len {self.limits.max_model_len}"
            )
        if real:
            check_blocks(rows, lengths, self.groups, self._block_tables)
        # All checks passed. The buffers change from here on.
        self._write_host(rows, shape, lengths)
        self._device.write(rows, shape, lengths)
        self.generation += 1
        return CommonAttentionMetadata(
            num_reqs=shape.padded_reqs,
            num_tokens=shape.padded_tokens,
            num_actual_reqs=shape.num_reqs,
            num_actual_tokens=shape.num_tokens,
            max_query_len=shape.max_query_len,
            max_seq_len=max_seq_len,
            generation=self.generation,
            **self._views_of(shape.padded_reqs, shape.padded_tokens),
        )

    def _write_host(self, rows: StepRows, shape: BatchShape, lengths: StepLengths) -> None:
        for name, values in (
            ("query_start_loc_cpu", lengths.starts),
            ("is_prefilling", rows.is_prefilling),
            ("seq_lens_cpu_upper_bound", lengths.upper),
            ("seq_lens_cpu_exact", True if rows.num_computed_is_exact is None else rows.num_computed_is_exact),
        ):
            field, host = FIELDS[name], self._tensors[name][0].numpy()
            count = field.leading_dim.size(shape.num_reqs, shape.num_tokens)
            host[:count], host[count:] = values, field.padding(shape.num_tokens, self.seq_len_fill)


def _check_tables(tables: Sequence[BlockTable], groups: Sequence[KVCacheGroup]) -> None:
    if not tables:
        return
    found = [table.ids.shape for table in tables]
    if [width for _, width in found] != [group.max_blocks for group in groups]:
        raise ValueError(
            f"tables: have {[width for _, width in found]} columns, must be as wide as the groups' tables, "
            f"{[group.max_blocks for group in groups]}"
        )
    if len({rows for rows, _ in found}) > 1:
        raise ValueError(f"tables: have {[rows for rows, _ in found]} rows; all must have as many")
