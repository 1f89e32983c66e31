"""Checks of the invariants of a batch, field by field."""

from typing import Any, Literal

import numpy as np
import torch

from bateleur.metadata.common_attention_metadata import CommonAttentionMetadata, field_values
from bateleur.metadata.fields import FIELDS, NULL_BLOCK, PAD_SLOT, Field, LeadingDim
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup


class BatchInvariant(ValueError):
    """A field of a batch violates a rule. ``field`` has its name."""

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field}: {rule}")
        self.field = field


def validate(
    batch: CommonAttentionMetadata,
    limits: BatchLimits,
    groups: tuple[KVCacheGroup, ...],
    *,
    level: Literal["host", "device"] = "host",
    seq_len_fill: int = 0,
) -> None:
    """Check every field of a real or dummy batch.

    Level ``host`` reads host memory only: sizes, dtypes, contents of host fields. Level ``device`` also copies device
    fields to the host, which waits for the device.

    Raises:
        BatchInvariant: names the field and the rule.
    """
    _check_sizes(batch, limits)
    values = field_values(batch)
    for name, field in FIELDS.items():
        arrays = values[name] if field.per_group else (values[name],)
        if field.per_group and len(arrays) != len(groups):
            raise BatchInvariant(name, f"has {len(arrays)} entries for {len(groups)} groups")
        for index, array in enumerate(arrays):
            extent = field.leading_dim.size(batch.num_reqs, batch.num_tokens)
            width = (groups[index].max_blocks,) if field.leading_dim is LeadingDim.REQS_BY_BLOCKS else ()
            _check_array(field, array, (extent, *width))
            if field.on_host or level == "device":
                _check_padding(field, _to_numpy(array), batch, seq_len_fill)
    _check_host(batch, limits)
    if level == "device":
        _check_device(batch, groups)


def _check_sizes(batch: CommonAttentionMetadata, limits: BatchLimits) -> None:
    for actual, padded, most in (
        ("num_actual_reqs", "num_reqs", limits.max_num_reqs),
        ("num_actual_tokens", "num_tokens", limits.max_num_tokens),
    ):
        low, high = getattr(batch, actual), getattr(batch, padded)
        if not 0 <= low <= high <= most:
            raise BatchInvariant(padded, f"{high} must be at least {actual} {low} and at most {most}")


def _to_numpy(array: Any) -> np.ndarray[Any, Any]:
    result: np.ndarray[Any, Any] = array.cpu().numpy() if isinstance(array, torch.Tensor) else array
    return result


def _check_array(field: Field, array: Any, shape: tuple[int, ...]) -> None:
    if tuple(array.shape) != shape:
        raise BatchInvariant(field.name, f"has shape {tuple(array.shape)}, must be {shape}")
    dtype = array.dtype if isinstance(array, torch.Tensor) else torch.from_numpy(array[:0]).dtype
    if dtype != field.dtype:
        raise BatchInvariant(field.name, f"has dtype {dtype}, must be {field.dtype}")
    if field.on_host and isinstance(array, torch.Tensor) and array.device.type != "cpu":
        raise BatchInvariant(field.name, f"is on {array.device}, must be on the host")


def _check_padding(
    field: Field, array: np.ndarray[Any, Any], batch: CommonAttentionMetadata, seq_len_fill: int
) -> None:
    tail = array[field.leading_dim.size(batch.num_actual_reqs, batch.num_actual_tokens) :]
    pad = field.padding(batch.num_actual_tokens, seq_len_fill)
    wrong = tail != pad
    if wrong.any():
        raise BatchInvariant(field.name, f"has {tail[wrong].flat[0]} in its padding, must be {pad}")


def _check_host(batch: CommonAttentionMetadata, limits: BatchLimits) -> None:
    starts = batch.query_start_loc_cpu.numpy()
    real = np.diff(starts[: batch.num_actual_reqs + 1])
    if starts[0] != 0 or starts[batch.num_actual_reqs] != batch.num_actual_tokens or (real < 1).any():
        raise BatchInvariant(
            "query_start_loc_cpu", f"must rise by at least 1 a row from 0 to {batch.num_actual_tokens}"
        )
    if len(real) and real.max() > batch.max_query_len:
        raise BatchInvariant("max_query_len", f"{batch.max_query_len} is below a row's {int(real.max())}")
    bound = batch.seq_len_bound
    if not bound.max() <= batch.max_seq_len <= limits.max_model_len:
        raise BatchInvariant(
            "max_seq_len",
            f"{batch.max_seq_len} must be at least the bound {bound.max()}, at most {limits.max_model_len}",
        )
    if (bound.upper[: batch.num_actual_reqs] < real).any():
        raise BatchInvariant("seq_lens_cpu_upper_bound", "is below the query length of a row")


def _check_device(batch: CommonAttentionMetadata, groups: tuple[KVCacheGroup, ...]) -> None:
    """Check device fields against their host counterparts and against each other."""
    if not torch.equal(batch.query_start_loc.cpu(), batch.query_start_loc_cpu):
        raise BatchInvariant("query_start_loc", "differs from query_start_loc_cpu")
    num_reqs = batch.num_actual_reqs
    query_lens = np.diff(batch.query_start_loc_cpu.numpy()[: num_reqs + 1])
    lengths = _to_numpy(batch.seq_lens)[:num_reqs]
    bound = batch.seq_len_bound.narrow(num_reqs)
    if (lengths > bound.upper).any() or (lengths != bound.upper)[bound.exact].any():
        raise BatchInvariant("seq_lens", "is above its host bound, or differs from an exact one")
    computed = _to_numpy(batch.num_computed_tokens)[:num_reqs]
    if (computed + query_lens != lengths).any():
        raise BatchInvariant("seq_lens", "must be num_computed_tokens plus the query length")
    row = np.repeat(np.arange(num_reqs), query_lens)
    first = batch.query_start_loc_cpu.numpy()[row]
    expected = computed[row] + np.arange(len(row)) - first
    positions = _to_numpy(batch.positions)[: len(row)]
    if (positions != expected).any():
        token = int((positions != expected).argmax())
        raise BatchInvariant("positions", f"has {positions[token]} for token {token}, must be {expected[token]}")
    for index, group in enumerate(groups):
        table, slots = _to_numpy(batch.block_tables[index])[:num_reqs], _to_numpy(batch.slot_mappings[index])
        if not group.has_slots:
            if (slots != PAD_SLOT).any():
                raise BatchInvariant("slot_mappings", "has slots for a group without them")
            continue
        used = -(-(lengths + group.lookahead_tokens) // group.block_size)
        unused = np.arange(group.max_blocks) >= used[:, None]
        others = np.intersect1d(table[unused], table[~unused])  # a row may hold blocks that it does not need yet
        if (others != NULL_BLOCK).any():
            rule = f"has block {others[-1]} of another row after the last block that a row needs"
            raise BatchInvariant("block_tables", rule)
        block = table[row, positions // group.block_size].astype(np.int64)
        home = np.where(block == NULL_BLOCK, PAD_SLOT, block * group.block_size + positions % group.block_size)
        if ((slots[: len(row)] != PAD_SLOT) & (slots[: len(row)] != home)).any():  # a token may go unstored
            raise BatchInvariant("slot_mappings", "has a slot outside the block that the row's table gives")
