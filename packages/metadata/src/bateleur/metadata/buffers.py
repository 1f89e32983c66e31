"""Persistent buffers and the one way to fill them: real batches and dummy ones alike."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bateleur.metadata._memory import Block, Buffer, Transfer
from bateleur.metadata._values import StepValues, dummy_rows
from bateleur.metadata.batch import BatchShape, CommonAttentionMetadata, batch_arrays
from bateleur.metadata.bounds import I32Array, IntArray
from bateleur.metadata.fields import FIELDS, Axis, Field
from bateleur.metadata.rows import BatchLimits, KVGroup, StepRows

_MAX_CACHED_VIEWS = 1024  # sizes (rows, tokens) whose views are kept; a step that misses pays a few us
_NO_SLOTS: IntArray = np.empty(0, np.int64)


class InputBuffers:
    """Device and host memory of one batch, at fixed addresses for life.

    :meth:`stage` writes the real rows, gives every entry behind them its declared padding value over the
    *whole* buffer, and returns views. On CPU the buffers are written in place. On a GPU they are written on the
    host, and what changed is sent in a few copies, each from memory that no later step writes to: so steps may be in
    flight while the next one is staged. Host fields are not copied, and hold the last step only.

    Attributes:
        generation: number of times the contents changed; metadata of an earlier generation is stale.
    """

    def __init__(
        self,
        limits: BatchLimits,
        groups: Sequence[KVGroup],
        device: torch.device | str,
        seq_len_fill: int = 0,
        *,
        transfer: Transfer | None = None,
    ) -> None:
        """Allocate buffers for ``limits`` and KV-cache ``groups``, padded like an empty batch.

        Args:
            groups: KV-cache groups, in the order of ``block_tables``.
            device: where device fields live.
            seq_len_fill: what padded rows of ``seq_lens`` hold: 0, or 1 where a builder asks for it.
            transfer: does every copy to the device. None copies in the current stream, or, on CPU, not at all;
                with a function of yours CPU counts as a device with memory of its own.

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
        self._values = StepValues(limits, self.groups)
        self._block = Block(self.device, transfer)
        self._allocate()
        self._input_ids: Tensor = self._whole["input_ids"]
        # the views of a size are made once, since addresses never move
        self._views_of = lru_cache(_MAX_CACHED_VIEWS)(partial(batch_arrays, self._whole))
        self.forget()
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
            shape, max_seq_len: as for :meth:`stage`.
            context_len: computed tokens of each row; default 1, or 0 for prefilling rows.
            is_prefilling: whether the rows count as prompts.
        """
        context = (0 if is_prefilling else 1) if context_len is None else context_len
        rows = dummy_rows(shape, self.groups, context, is_prefilling)
        return self._stage(rows, shape, max_seq_len, real=False)

    def poison(self) -> None:
        """Fill every buffer with values no consumer survives unnoticed (for tests and paranoid checks).

        Metadata handed out before is stale. The next :meth:`stage` defines every entry again.
        """
        for buffer in self._buffers.values():
            buffer.host[...] = buffer.field.poison
        self.forget()
        self._block.upload()
        self.generation += 1

    def forget(self) -> None:
        """Treat every entry as unknown, as after a staging that broke off: the next one defines all of them."""
        for buffer in self._buffers.values():
            buffer.dirty = buffer.touched = len(buffer.host)
        self._columns = [group.max_blocks for group in self.groups]
        self._single_starts = -1  # rows of the last step, if each had one token

    def addresses(self) -> dict[str, int]:
        """Data pointer of every buffer by name (``field`` or ``field.group``); constant for life."""
        return {name: buffer.tensor.data_ptr() for name, buffer in self._buffers.items()}

    # -- allocation ------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Host fields apart, device fields in one block: those of rows, then of tokens, then the block tables.

        The short ones lead, so that what a step touches lies close together.
        """
        order = (Axis.REQ_PLUS_1, Axis.REQ, Axis.TOKEN, Axis.REQ_BLOCK)
        fields = sorted(FIELDS.values(), key=lambda field: (order.index(field.axis), field.dtype.itemsize))
        arrays = [(name, field, shape) for field in fields for name, shape in self._arrays(field)]
        made = self._block.allocate([array for array in arrays if not array[1].on_host])
        for name, field, shape in arrays:
            if field.on_host:
                tensor = torch.zeros(shape, dtype=field.dtype)
                made.append(Buffer(name, field, tensor, tensor.numpy()))
        self._buffers = {buffer.name: buffer for buffer in made}
        for buffer in made:
            buffer.pad = buffer.field.padding(0, self.seq_len_fill)
        self._whole: dict[str, Any] = {}
        for name, field in FIELDS.items():
            each = [self._buffers[array] for array, _ in self._arrays(field)]
            carried = tuple(buffer.host if field.part else buffer.tensor for buffer in each)
            self._whole[name] = carried if field.per_group else carried[0]
        self._starts = [b for b in made if b.field.axis is Axis.REQ_PLUS_1]
        self._of_rows = [b for b in made if b.field.axis is Axis.REQ]
        self._of_tokens = [b for b in made if b.field.axis is Axis.TOKEN and not b.field.per_group]
        self._slots = [b for b in made if b.field.axis is Axis.TOKEN and b.field.per_group]
        self._tables = [b for b in made if b.field.axis is Axis.REQ_BLOCK]

    def _arrays(self, field: Field) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of each array of a field."""
        extent = field.axis.extent(self.limits.max_num_reqs, self.limits.max_num_tokens)
        if not field.per_group:
            return [(field.name, (extent,))]
        blocks = field.axis is Axis.REQ_BLOCK
        return [
            (f"{field.name}.{index}", (extent, group.max_blocks) if blocks else (extent,))
            for index, group in enumerate(self.groups)
        ]

    # -- staging ---------------------------------------------------------------------------------------------

    def _stage(
        self, rows: StepRows, shape: BatchShape, max_seq_len: int | None, real: bool
    ) -> CommonAttentionMetadata:
        steps = self._values
        steps.check_sizes(rows, shape)
        single = steps.one_token_each(rows, shape)
        starts = steps.starts(rows, shape, single)
        upper, longest = steps.lengths(rows, single)
        if max_seq_len is None:
            max_seq_len = longest
        elif not longest <= max_seq_len <= self.limits.max_model_len:
            raise ValueError(
                f"max_seq_len: {max_seq_len} must be at least the longest row {longest} "
                f"and at most max_model_len {self.limits.max_model_len}"
            )
        positions = steps.positions(rows, starts, single)
        slots = [
            # a dummy owns no blocks: nothing it computes may be stored
            group.slots(table, positions, rows.query_lens, single) if real else _NO_SLOTS
            for group, table in zip(steps.groups, rows.block_tables, strict=True)
        ]
        # Every check is done: from here on the buffers change.
        self._write_starts(starts, shape, single)
        values = {
            "input_ids": rows.token_ids,
            "positions": positions,
            "seq_lens": upper,
            "num_computed_tokens": rows.num_computed,
            "is_prefilling": rows.is_prefilling,
            "seq_lens_cpu_upper_bound": upper,
            "seq_lens_cpu_exact": True if rows.exact is None else rows.exact,
        }
        for buffer in self._of_rows:
            buffer.put(values[buffer.name], shape.num_reqs)
        for buffer in self._of_tokens:
            buffer.put(values[buffer.name], shape.num_tokens)
        for buffer, slot in zip(self._slots, slots, strict=True):
            buffer.put(slot, len(slot))
        self._write_tables(rows, upper, longest)
        self.generation += 1
        self._block.upload()
        if rows.sampled is not None:
            self._block.transfer(self._input_ids[: rows.sampled.shape[0]], rows.sampled)
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

    def _write_starts(self, starts: I32Array, shape: BatchShape, single: bool) -> None:
        """Write both twins of the row starts; the padding is the token count, so all of it changes with the step."""
        if single and self._single_starts == shape.num_reqs:
            for buffer in self._starts:
                buffer.touched = 0
            return
        for buffer in self._starts:
            buffer.pad, buffer.dirty = shape.num_tokens, len(buffer.host)
            buffer.put(starts, len(starts))
        self._single_starts = shape.num_reqs if single else -1

    def _write_tables(self, rows: StepRows, upper: I32Array, longest: int) -> None:
        columns = self._columns
        for index, (buffer, table) in enumerate(zip(self._tables, rows.block_tables, strict=True)):
            group, host = self._values.groups[index], buffer.host
            num_rows, width = len(table), group.width(longest)
            group.write_table(table, upper, host[:num_rows, :width])
            if columns[index] > width:
                host[:num_rows, width : columns[index]] = buffer.pad
            if buffer.dirty > num_rows:
                host[num_rows : buffer.dirty, : max(columns[index], width)] = buffer.pad
            buffer.touched = max(buffer.dirty, num_rows)
            buffer.dirty, columns[index] = num_rows, width
