"""Persistent input buffers of a batch; real and dummy batches are staged the same way."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from bateleur.metadata._device_staging import DeviceStaging
from bateleur.metadata._memory import Buffer, CurrentStream, DeviceQueue, allocate
from bateleur.metadata._step_values import StepLengths, StepValues, dummy_rows
from bateleur.metadata.block_table import BlockTable
from bateleur.metadata.common_attention_metadata import BatchShape, CommonAttentionMetadata, batch_arrays, leading
from bateleur.metadata.fields import FIELDS, Field, LeadingDim
from bateleur.metadata.seq_len_bound import I32Array
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup, StepRows

_MAX_CACHED_VIEWS = 1024  # sizes (rows, tokens) with cached views; a miss costs a few microseconds


class InputBuffers:
    """Device and host buffers of the batch of a step, at fixed addresses.

    :meth:`stage` writes the real requests, pads the rest of every buffer, and returns views. It uploads once from new
    (pinned) memory, and the device computes the other fields. Several steps may therefore be in flight. Host fields are
    not copied: they hold the last staged step only.

    Attributes:
        generation: number of stagings so far; metadata with an older generation is stale.
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
            device: device of the device fields.
            seq_len_fill: ``seq_lens`` of padding requests: 0, or 1 if a builder needs that.
            tables: the :class:`BlockTable` of each group, if steps name its rows (``StepRows.block_table_rows``).
            queue: runs the device work. Default: the current stream of the device.

        Raises:
            ValueError: ``seq_len_fill`` is not 0 or 1, a group's block table is too narrow for ``max_model_len``, or
                ``tables`` differ in length or are not as wide as the groups' tables.
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
        self._values = StepValues(limits, self.groups, tuple(tables))
        self._allocate()
        on_device = [buffer for buffer in self._buffers.values() if not buffer.field.on_host]
        self._device = DeviceStaging(
            self._values, on_device, tables, self.device, queue or CurrentStream(), seq_len_fill
        )
        # Addresses are fixed, so views are cached by size.
        view = lru_cache(len(FIELDS) * _MAX_CACHED_VIEWS)(partial(leading, self._whole))
        self._views_of = lru_cache(_MAX_CACHED_VIEWS)(partial(batch_arrays, view))
        self.forget()
        for _ in range(2):  # the second one compiles the variant for unchanged starts
            self.dummy(BatchShape.of(0, 0, 1))

    def stage(self, rows: StepRows, shape: BatchShape, *, max_seq_len: int | None = None) -> CommonAttentionMetadata:
        """Stage one step. Returns its metadata, valid until the next call.

        Args:
            rows: the real requests.
            shape: sizes of the step; its real sizes must match ``rows``.
            max_seq_len: replaces the batch's upper bound of ``seq_lens``; must not be below it. A graph capture passes
                ``max_model_len``.

        Raises:
            ValueError: ``rows`` or ``shape`` break a rule. Nothing is written then.
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

        Query lengths differ by at most 1, shorter rows first.

        Args:
            shape, max_seq_len: sizes and upper bound of ``seq_lens``, as in :meth:`stage`.
            context_len: computed tokens of each row; default 1, or 0 for prefilling rows.
            is_prefilling: whether the rows count as prompts.
        """
        context = (0 if is_prefilling else 1) if context_len is None else context_len
        rows = dummy_rows(shape, self.groups, context, is_prefilling)
        return self._stage(rows, shape, max_seq_len, real=False)

    def poison(self) -> None:
        """Fill every buffer with out-of-range values, to detect reads of stale entries in tests.

        Earlier metadata becomes stale. The next :meth:`stage` defines every entry again.
        """
        for buffer in self._on_host:
            buffer.host[...] = buffer.field.poison
        self._device.poison()
        self.forget()
        self.generation += 1

    def forget(self) -> None:
        """Treat every entry as unknown, for example after an interrupted staging. The next staging writes all."""
        for buffer in self._on_host:
            buffer.dirty = len(buffer.host)
        self._device.forget()
        self._known_starts = b""

    def addresses(self) -> dict[str, int]:
        """Return the data pointer of every buffer by name (``field`` or ``field.group``). They never change."""
        return {name: buffer.tensor.data_ptr() for name, buffer in self._buffers.items()}

    # -- allocation ------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Allocate host fields one by one and device fields in one block of memory: fields by request, then by token,
        then block tables.

        Short fields come first, so that the memory of a small step is contiguous.
        """
        order = (LeadingDim.REQS_PLUS_1, LeadingDim.REQS, LeadingDim.TOKENS, LeadingDim.REQS_BY_BLOCKS)
        fields = sorted(FIELDS.values(), key=lambda field: (order.index(field.leading_dim), field.dtype.itemsize))
        arrays = [(name, field, shape) for field in fields for name, shape in self._arrays(field)]
        on_device = [array for array in arrays if not array[1].on_host]
        made = allocate(on_device, self.device)
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
            carried = tuple(buffer.host if field.bound_attr else buffer.tensor for buffer in each)
            self._whole[name] = carried if field.per_group else carried[0]
        self._on_host = [buffer for buffer in made if buffer.field.on_host]
        self._starts_cpu = self._buffers["query_start_loc_cpu"]

    def _arrays(self, field: Field) -> list[tuple[str, tuple[int, ...]]]:
        """Return name and shape of each array of a field: one, or one per KV-cache group."""
        extent = field.leading_dim.size(self.limits.max_num_reqs, self.limits.max_num_tokens)
        if not field.per_group:
            return [(field.name, (extent,))]
        blocks = field.leading_dim is LeadingDim.REQS_BY_BLOCKS
        return [
            (f"{field.name}.{index}", (extent, group.max_blocks) if blocks else (extent,))
            for index, group in enumerate(self.groups)
        ]

    # -- staging ---------------------------------------------------------------------------------------------

    def _stage(self, rows: StepRows, shape: BatchShape, max_seq_len: int | None, real: bool) -> CommonAttentionMetadata:
        steps = self._values
        steps.check_sizes(rows, shape)
        lengths = steps.lengths(rows, shape)
        longest = lengths.longest
        if max_seq_len is None:
            max_seq_len = longest
        elif not longest <= max_seq_len <= self.limits.max_model_len:
            raise ValueError(
                f"max_seq_len: {max_seq_len} must be at least the longest row {longest} "
                f"and at most max_model_len {self.limits.max_model_len}"
            )
        if real:
            steps.check_blocks(rows, lengths)
        # All checks passed. The buffers change from here on.
        self._device.write(rows, shape, lengths, self._write_host(rows, shape, lengths))
        return self._metadata(shape, max_seq_len)

    def _metadata(self, shape: BatchShape, max_seq_len: int) -> CommonAttentionMetadata:
        """Return the metadata of the batch just staged."""
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

    def _write_host(self, rows: StepRows, shape: BatchShape, lengths: StepLengths) -> I32Array | None:
        """Write the host fields. Returns each request's first token (R + 1,), or None if equal to the last step's."""
        values = {
            "is_prefilling": rows.is_prefilling,
            "seq_lens_cpu_upper_bound": lengths.upper,
            "seq_lens_cpu_exact": True if rows.num_computed_is_exact is None else rows.num_computed_is_exact,
        }
        for buffer in self._on_host:
            if buffer is not self._starts_cpu:
                buffer.put(values[buffer.name], shape.num_reqs)
        return self._write_starts(shape, lengths)

    def _write_starts(self, shape: BatchShape, lengths: StepLengths) -> I32Array | None:
        """Write each request's first token (R + 1,) on the host. Returns it, or None if equal to the last step's."""
        known = lengths.starts.tobytes()
        if known == self._known_starts:
            return None
        self._known_starts, starts = known, self._starts_cpu
        # The padding value is the token count, so the whole buffer changes.
        starts.pad, starts.dirty = shape.num_tokens, len(starts.host)
        starts.put(lengths.starts, len(lengths.starts))
        return lengths.starts


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
