"""Persistent buffers and the one way to fill them: real batches and dummy ones alike."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from bateleur.metadata._block_table_mirror import BlockTableMirror
from bateleur.metadata._device_staging import DeviceStaging
from bateleur.metadata._host_staging import HostStaging
from bateleur.metadata._memory import Buffer, CurrentStream, DeviceQueue, allocate
from bateleur.metadata._step_values import StepLengths, StepValues, dummy_rows
from bateleur.metadata.block_table import BlockTable
from bateleur.metadata.common_attention_metadata import (
    BatchShape,
    CommonAttentionMetadata,
    batch_arrays,
    leading,
)
from bateleur.metadata.fields import FIELDS, Field, LeadingDim
from bateleur.metadata.seq_len_bound import I32Array
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup, StepRows

_MAX_CACHED_VIEWS = 1024  # sizes (rows, tokens) whose views are kept; a step that misses pays a few us


class _Staged(NamedTuple):
    """What was staged of rows whose counts are all true."""

    batch_id: object
    shape: BatchShape
    computed: StepLengths


class InputBuffers:
    """Device and host memory of one batch, at fixed addresses for life.

    :meth:`stage` writes the real rows, gives every entry behind them its declared padding value over the
    *whole* buffer, and returns views. On CPU the buffers are written in place. To a GPU goes what only the host knows,
    in one copy from memory that no later step writes to, and kernels make the rest of it: so steps may be in flight
    while the next one is staged. Host fields are not copied, and hold the last step only.

    Attributes:
        generation: number of times the contents changed; metadata of an earlier generation is stale.
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
        """Allocate buffers for ``limits`` and KV-cache ``groups``, padded like an empty batch.

        Args:
            groups: KV-cache groups, in the order of ``block_tables``.
            device: where device fields live.
            seq_len_fill: what padded rows of ``seq_lens`` hold: 0, or 1 where a builder asks for it.
            tables: of each group, where steps name rows of tables that live long, see :class:`BlockTable`.
            queue: does the work of the device. None is the current stream, or, on CPU, nobody; with one of yours CPU
                counts as a device with memory of its own.

        Raises:
            ValueError: ``seq_len_fill`` is not 0 or 1, a group's table is too narrow for ``max_model_len``, or
            ``tables`` are not as wide as the groups' or not equally long.
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
        self._mirror = BlockTableMirror(tables)
        self._in_place = queue is None and self.device.type == "cpu"
        self._allocate()
        on_device = [buffer for buffer in self._buffers.values() if not buffer.field.on_host]
        self._device: HostStaging | DeviceStaging
        if self._in_place:
            self._device = HostStaging(self._values, on_device, self._mirror)
        else:
            stream = CurrentStream() if queue is None else queue
            self._device = DeviceStaging(
                self._values, on_device, self._mirror, self.device, stream, seq_len_fill
            )
        # The views of a size are made once, since addresses never move; those of rows are the same for any tokens.
        view = lru_cache(len(FIELDS) * _MAX_CACHED_VIEWS)(partial(leading, self._whole))
        self._views_of = lru_cache(_MAX_CACHED_VIEWS)(partial(batch_arrays, view))
        self.forget()
        for _ in range(
            2
        ):  # the first defines every entry; in the second starts stay as they are, see `DeviceStaging`
            self.dummy(BatchShape.of(0, 0, 1))

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
        for buffer in self._on_host:
            buffer.host[...] = buffer.field.poison
        self._device.poison()
        self.forget()
        self.generation += 1

    def forget(self) -> None:
        """Treat every entry as unknown, as after a staging that broke off: the next one defines all of them."""
        for buffer in self._on_host:
            buffer.dirty = len(buffer.host)
        self._device.forget()
        self._mirror.forget_all()
        self._known_starts = b""
        self._last: _Staged | None = None

    def addresses(self) -> dict[str, int]:
        """Data pointer of every buffer by name (``field`` or ``field.group``); constant for life."""
        return {name: buffer.tensor.data_ptr() for name, buffer in self._buffers.items()}

    # -- allocation ------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Host fields apart, device fields in one block: those of rows, then of tokens, then the block tables.

        The short ones lead, so that what a step touches lies close together.
        """
        order = (LeadingDim.REQS_PLUS_1, LeadingDim.REQS, LeadingDim.TOKENS, LeadingDim.REQS_BY_BLOCKS)
        fields = sorted(
            FIELDS.values(), key=lambda field: (order.index(field.leading_dim), field.dtype.itemsize)
        )
        arrays = [(name, field, shape) for field in fields for name, shape in self._arrays(field)]
        on_device = [array for array in arrays if not array[1].on_host]
        made = allocate(on_device, self.device, own_memory=not self._in_place)
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
        self._upper = self._buffers["seq_lens_cpu_upper_bound"]

    def _arrays(self, field: Field) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of each array of a field."""
        extent = field.leading_dim.size(self.limits.max_num_reqs, self.limits.max_num_tokens)
        if not field.per_group:
            return [(field.name, (extent,))]
        blocks = field.leading_dim is LeadingDim.REQS_BY_BLOCKS
        return [
            (f"{field.name}.{index}", (extent, group.max_blocks) if blocks else (extent,))
            for index, group in enumerate(self.groups)
        ]

    # -- staging ---------------------------------------------------------------------------------------------

    def _stage(
        self, rows: StepRows, shape: BatchShape, max_seq_len: int | None, real: bool
    ) -> CommonAttentionMetadata:
        steps, last = self._values, self._last
        repeats = real and last is not None and rows.batch_id is last.batch_id and shape is last.shape
        if repeats and last is not None:
            computed = steps.computed_of_repeat(rows, shape, last.computed)
        else:
            steps.check_sizes(rows, shape)
            computed = steps.computed(rows, shape, self._in_place)
        longest = computed.longest
        if max_seq_len is None:
            max_seq_len = longest
        elif not longest <= max_seq_len <= self.limits.max_model_len:
            raise ValueError(
                f"max_seq_len: {max_seq_len} must be at least the longest row {longest} "
                f"and at most max_model_len {self.limits.max_model_len}"
            )
        checked = self._device.check(rows, computed, real, repeats)
        # Every check is done: from here on the buffers change.
        self._last = None
        starts = None
        if repeats:
            self._upper.put(computed.upper, shape.num_reqs)
        else:
            starts = self._write_host(rows, shape, computed)
        self._device.write(rows, shape, computed, checked, starts, repeats)
        if real and rows.num_computed_is_exact is None and rows.num_computed_tokens_device is None:
            self._last = _Staged(rows.batch_id, shape, computed)
        return self._metadata(shape, max_seq_len)

    def _metadata(self, shape: BatchShape, max_seq_len: int) -> CommonAttentionMetadata:
        """Of what was just staged."""
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

    def _write_host(self, rows: StepRows, shape: BatchShape, computed: StepLengths) -> I32Array | None:
        """Write the host fields; the starts of rows, if they are not those of the last step."""
        values = {
            "is_prefilling": rows.is_prefilling,
            "seq_lens_cpu_upper_bound": computed.upper,
            "seq_lens_cpu_exact": True if rows.num_computed_is_exact is None else rows.num_computed_is_exact,
        }
        for buffer in self._on_host:
            if buffer is not self._starts_cpu:
                buffer.put(values[buffer.name], shape.num_reqs)
        return self._write_starts(shape, computed)

    def _write_starts(self, shape: BatchShape, computed: StepLengths) -> I32Array | None:
        """Those of the host, and what they are if they are not those of the last step."""
        known = computed.starts.tobytes()
        if known == self._known_starts:
            return None
        self._known_starts, starts = known, self._starts_cpu
        # The padding is the token count, so all of it changes with the step.
        starts.pad, starts.dirty = shape.num_tokens, len(starts.host)
        starts.put(computed.starts, len(computed.starts))
        return computed.starts


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
