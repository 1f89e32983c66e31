"""Persistent buffers and the one way to fill them: real batches and dummy ones alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bateleur.metadata._values import (
    IntArray,
    check_step,
    dummy_rows,
    length_bounds,
    masked_table,
    row_values,
    token_slots,
)
from bateleur.metadata.batch import BatchShape, CommonAttentionMetadata, bind_fields, slice_fields
from bateleur.metadata.bounds import I32Array
from bateleur.metadata.fields import FIELDS, Axis, Field, Home
from bateleur.metadata.rows import KVGroup, Limits, StepRows

_MAX_CACHED_VIEWS = (
    1024  # distinct (rows, tokens) sizes whose views are kept; a step that misses pays a few us
)

_NO_SLOTS: IntArray = np.empty(0, np.int64)


@dataclass(slots=True)
class _Buffer:
    """One allocated array. ``host`` is its numpy view, or its host mirror where the tensor is on a GPU."""

    name: str
    field: Field
    tensor: Tensor
    host: npt.NDArray[Any]
    mirrored: bool
    pad: int | bool


@dataclass(slots=True)
class _Extent:
    """How far real values of earlier steps reach; everything behind already holds its padding value."""

    reqs: int
    tokens: int
    columns: list[int]


class InputBuffers:
    """Device and host memory of one batch, at fixed addresses for life.

    :meth:`stage` writes the real rows, gives every entry behind them its declared padding value over the
    *whole* buffer, and returns views. On CPU the buffers are written through numpy views; on a GPU through
    host mirrors, from which each step uploads a fresh, unpinned copy, so that a later step can't overwrite
    one in flight.

    Attributes:
        generation: number of times the contents changed; metadata of an earlier generation is stale.
    """

    def __init__(
        self,
        limits: Limits,
        groups: Sequence[KVGroup],
        device: torch.device | str,
        seq_len_fill: int = 0,
    ) -> None:
        """Allocate buffers for ``limits`` and KV-cache ``groups``, padded like an empty batch.

        Raises:
            ValueError: ``seq_len_fill`` is not 0 or 1, or a group's table is too narrow for
            ``max_model_len``.
        """
        if seq_len_fill not in (0, 1):
            raise ValueError(f"seq_len_fill: {seq_len_fill} must be 0 or 1")
        for index, group in enumerate(groups):
            if group.has_slots and group.max_blocks * group.block_size < limits.max_model_len:
                raise ValueError(
                    f"groups[{index}]: {group.max_blocks} blocks of {group.block_size} tokens hold fewer "
                    f"than max_model_len {limits.max_model_len}"
                )
        self.limits = limits
        self.groups = tuple(groups)
        self.device = torch.device(device)
        self.seq_len_fill = seq_len_fill
        self.generation = 0
        self._plain: list[_Buffer] = []
        self._tables: list[_Buffer] = []
        self._slots: list[_Buffer] = []
        for field in FIELDS.values():
            self._allocate(field)
        self._whole: dict[str, Any] = {buffer.name: _handle(buffer) for buffer in self._plain}
        for name, buffers in (("block_tables", self._tables), ("slot_mappings", self._slots)):
            self._whole[name] = tuple(buffer.tensor for buffer in buffers)
        self._input_ids: Tensor = self._whole["input_ids"]
        widest = max((group.max_blocks for group in groups), default=0)
        self._iota = np.arange(max(limits.max_num_tokens, limits.max_num_reqs, widest) + 1, dtype=np.int32)
        self._views: dict[tuple[int, int], dict[str, Any]] = {}
        self._dirty = self._everything()
        self.dummy(BatchShape.of(0, 0, 1))  # defines every entry

    def stage(
        self, rows: StepRows, shape: BatchShape, *, max_seq_len: int | None = None
    ) -> CommonAttentionMetadata:
        """Write one step and return its metadata, valid until the next call.

        Args:
            rows: the real rows.
            shape: sizes decided for the step; ``rows`` must match its real part.
            max_seq_len: replaces the batch's own bound (a capture passes ``max_model_len``); never below it.

        Raises:
            ValueError: a field of ``rows`` or ``shape`` breaks a rule; nothing was written then.
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
        """Stage a batch of ``shape`` without requests: it satisfies every rule of a real one, and stores
        nothing.

        Query lengths are as equal as they can be, short rows first. Block tables are null and slots -1.

        Args:
            shape: as for :meth:`stage`.
            context_len: computed tokens of each row; default 1, or 0 for prefilling rows.
            is_prefilling: whether the rows count as prompts.
            max_seq_len: as for :meth:`stage`.
        """
        context = (0 if is_prefilling else 1) if context_len is None else context_len
        rows = dummy_rows(shape, self.groups, context, is_prefilling)
        return self._stage(rows, shape, max_seq_len, real=False)

    def poison(self) -> None:
        """Fill every buffer with values no consumer survives unnoticed (for tests and paranoid checks).

        Metadata handed out before is stale. The next :meth:`stage` defines every entry again.
        """
        for buffer in (*self._plain, *self._tables, *self._slots):
            buffer.host[...] = buffer.field.poison
            if buffer.mirrored:
                buffer.tensor.fill_(buffer.field.poison)
        self._dirty = self._everything()
        self.generation += 1

    def addresses(self) -> dict[str, int]:
        """Data pointer of every buffer by name (``field`` or ``field.group``); constant for life."""
        return {
            buffer.name: buffer.tensor.data_ptr() for buffer in (*self._plain, *self._tables, *self._slots)
        }

    # -- allocation ------------------------------------------------------------------------------------------

    def _allocate(self, field: Field) -> None:
        extent = field.axis.extent(self.limits.max_num_reqs, self.limits.max_num_tokens)
        for index in range(len(self.groups)) if field.per_group else (-1,):
            shape = [extent, self.groups[index].max_blocks] if field.axis is Axis.REQ_BLOCK else [extent]
            mirrored = self._is_mirrored(field)
            host = torch.zeros(shape, dtype=field.dtype)
            buffer = _Buffer(
                name=f"{field.name}.{index}" if field.per_group else field.name,
                field=field,
                tensor=torch.zeros(shape, dtype=field.dtype, device=self.device) if mirrored else host,
                host=host.numpy(),
                mirrored=mirrored,
                pad=self.seq_len_fill if field.pad.kind == "builder" else field.pad.value,
            )
            if not field.per_group:
                self._plain.append(buffer)
            else:
                (self._tables if field.axis is Axis.REQ_BLOCK else self._slots).append(buffer)

    def _is_mirrored(self, field: Field) -> bool:
        return field.home is Home.DEVICE and self.device.type != "cpu"

    def _everything(self) -> _Extent:
        columns = [group.max_blocks for group in self.groups]
        return _Extent(self.limits.max_num_reqs, self.limits.max_num_tokens, columns)

    # -- staging ---------------------------------------------------------------------------------------------

    def _stage(
        self, rows: StepRows, shape: BatchShape, max_seq_len: int | None, real: bool
    ) -> CommonAttentionMetadata:
        check_step(rows, shape, self.limits, self.groups)
        upper, longest = length_bounds(rows, self.limits)
        if max_seq_len is None:
            max_seq_len = longest
        elif not longest <= max_seq_len <= self.limits.max_model_len:
            raise ValueError(
                f"max_seq_len: {max_seq_len} must be at least the longest row {longest} "
                f"and at most max_model_len {self.limits.max_model_len}"
            )
        values, token_row, positions = row_values(rows, shape, upper, self._iota)
        tables: list[I32Array] = []
        slots: list[IntArray] = []
        for index, (table, group) in enumerate(zip(rows.block_tables, self.groups, strict=True)):
            table = masked_table(table, upper, longest, group, self._iota)
            tables.append(table)
            stored = real and group.has_slots  # a dummy owns no blocks: nothing it computes may be stored
            slots.append(token_slots(table, positions, token_row, group, index) if stored else _NO_SLOTS)
        self._write(shape, values, tables, slots)
        if rows.sampled is not None:
            self._input_ids[: rows.sampled.shape[0]].copy_(rows.sampled, non_blocking=True)
        return CommonAttentionMetadata(
            num_reqs=shape.padded_reqs,
            num_tokens=shape.padded_tokens,
            num_actual_reqs=shape.num_reqs,
            num_actual_tokens=shape.num_tokens,
            max_query_len=shape.max_query_len,
            max_seq_len=max_seq_len,
            **self._views_of(shape.padded_reqs, shape.padded_tokens),
        )

    def _write(
        self, shape: BatchShape, values: dict[str, Any], tables: list[I32Array], slots: list[IntArray]
    ) -> None:
        """Write real values and padding. Padding behind the last step's extent is in place already."""
        dirty = self._dirty
        for buffer in self._plain:
            field = buffer.field
            real = field.axis.extent(shape.num_reqs, shape.num_tokens)
            buffer.host[:real] = values[field.name]
            if (
                field.pad.kind == "repeat_last"
            ):  # its value changes with every step, so all of it is rewritten
                buffer.host[real:] = shape.num_tokens
                end = len(buffer.host)
            else:
                end = field.axis.extent(dirty.reqs, dirty.tokens)
                if end > real:
                    buffer.host[real:end] = buffer.pad
            if buffer.mirrored:
                _upload(buffer, max(end, real))
        for index, (buffer, table) in enumerate(zip(self._tables, tables, strict=True)):
            num_rows, width = table.shape
            end_rows, end_columns = max(dirty.reqs, num_rows), max(dirty.columns[index], width)
            buffer.host[:num_rows, :width] = table
            if end_columns > width:
                buffer.host[:num_rows, width:end_columns] = buffer.pad
            if end_rows > num_rows:
                buffer.host[num_rows:end_rows, :end_columns] = buffer.pad
            if buffer.mirrored:
                _upload(buffer, end_rows)
            dirty.columns[index] = width
        for buffer, slot in zip(self._slots, slots, strict=True):
            buffer.host[: len(slot)] = slot
            end = max(dirty.tokens, len(slot))
            if end > len(slot):
                buffer.host[len(slot) : end] = buffer.pad
            if buffer.mirrored:
                _upload(buffer, end)
        dirty.reqs, dirty.tokens = shape.num_reqs, shape.num_tokens
        self.generation += 1

    def _views_of(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """Arrays of a batch; the views of a size are made once, since addresses never move."""
        key = (num_reqs, num_tokens)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_CACHED_VIEWS:
                self._views.clear()
            views = self._views[key] = bind_fields(slice_fields(self._whole, num_reqs, num_tokens))
        return views


def _handle(buffer: _Buffer) -> Tensor | npt.NDArray[Any]:
    """What a batch carries of a buffer: the tensor, or the numpy array for a half of the length bound."""
    return buffer.host if buffer.field.part else buffer.tensor


def _upload(buffer: _Buffer, extent: int) -> None:
    """Copy the leading ``extent`` entries of a mirror to the device, from memory no later step writes to."""
    fresh = torch.from_numpy(buffer.host[:extent].copy())
    buffer.tensor[:extent].copy_(fresh, non_blocking=True)
