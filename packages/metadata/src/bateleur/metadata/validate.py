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


def _require(holds: Any, field: str, rule: str) -> None:
    if not holds:
        raise BatchInvariant(field, rule)


def validate(
    batch: CommonAttentionMetadata,
    limits: BatchLimits,
    groups: tuple[KVCacheGroup, ...],
    *,
    level: Literal["host", "device"] = "host",
    seq_len_fill: int = 0,
) -> None:
    """Check every field of a real or dummy batch. ``seq_len_fill``: value that ``seq_lens`` must have in padded rows.

    Level ``host`` reads host memory only: sizes, dtypes, contents of host fields. Level ``device`` also copies device
    fields to the host, which waits for the device. Raises :class:`BatchInvariant`.
    """
    for actual, padded, most in (
        ("num_actual_reqs", "num_reqs", limits.max_num_reqs),
        ("num_actual_tokens", "num_tokens", limits.max_num_tokens),
    ):
        low, high = getattr(batch, actual), getattr(batch, padded)
        _require(0 <= low <= high <= most, padded, f"{high} must be at least {actual} {low} and at most {most}")
    values = field_values(batch)
    for name, field in FIELDS.items():
        arrays = values[name] if field.per_group else (values[name],)
        if field.per_group:
            _require(len(arrays) == len(groups), name, f"has {len(arrays)} entries for {len(groups)} groups")
        for index, array in enumerate(arrays):
            width = (groups[index].max_blocks,) if field.leading_dim is LeadingDim.REQS_BY_BLOCKS else ()
            _check_array(field, array, (field.leading_dim.size(batch.num_reqs, batch.num_tokens), *width))
            if field.on_host or level == "device":
                _check_padding(field, _to_numpy(array), batch, seq_len_fill)
    _check_host(batch, limits)
    if level == "device":
        _check_device(batch, groups)


def _to_numpy(array: Any) -> np.ndarray[Any, Any]:
    return torch.as_tensor(array).cpu().numpy()


def _check_array(field: Field, array: Any, shape: tuple[int, ...]) -> None:
    tensor = torch.as_tensor(array)
    _require(tensor.shape == shape, field.name, f"has shape {tuple(tensor.shape)}, must be {shape}")
    _require(tensor.dtype == field.dtype, field.name, f"has dtype {tensor.dtype}, must be {field.dtype}")
    if field.on_host:
        _require(tensor.device.type == "cpu", field.name, f"is on {tensor.device}, must be on the host")


def _check_padding(
    field: Field, array: np.ndarray[Any, Any], batch: CommonAttentionMetadata, seq_len_fill: int
) -> None:
    tail = array[field.leading_dim.size(batch.num_actual_reqs, batch.num_actual_tokens) :]
    pad = field.padding(batch.num_actual_tokens, seq_len_fill)
    wrong = tail[tail != pad]
    if len(wrong):
        raise BatchInvariant(field.name, f"has {wrong[0]} in its padding, must be {pad}")


def _check_host(batch: CommonAttentionMetadata, limits: BatchLimits) -> None:
    starts, num_tokens = batch.query_start_loc_cpu.numpy(), batch.num_actual_tokens
    lens, bound = np.diff(starts[: batch.num_actual_reqs + 1]), batch.seq_len_bound
    _require(
        starts[0] == 0 and starts[batch.num_actual_reqs] == num_tokens and (lens > 0).all(),
        "query_start_loc_cpu",
        f"must rise by at least 1 a row from 0 to {num_tokens}",
    )
    longest = lens.max(initial=0)
    _require(longest <= batch.max_query_len, "max_query_len", f"{batch.max_query_len} is below a row's {longest}")
    _require(
        bound.max() <= batch.max_seq_len <= limits.max_model_len,
        "max_seq_len",
        f"{batch.max_seq_len} must be at least the bound {bound.max()}, at most {limits.max_model_len}",
    )
    fits = (bound.upper[: batch.num_actual_reqs] >= lens).all()
    _require(fits, "seq_lens_cpu_upper_bound", "is below the query length of a row")


def _check_device(batch: CommonAttentionMetadata, groups: tuple[KVCacheGroup, ...]) -> None:
    """Check device fields against their host counterparts and against each other."""
    starts, num_reqs = batch.query_start_loc_cpu.numpy(), batch.num_actual_reqs
    same = np.array_equal(_to_numpy(batch.query_start_loc), starts)
    _require(same, "query_start_loc", "differs from query_start_loc_cpu")
    query_lens, bound = np.diff(starts[: num_reqs + 1]), batch.seq_len_bound.narrow(num_reqs)
    lengths, computed = (_to_numpy(each)[:num_reqs] for each in (batch.seq_lens, batch.num_computed_tokens))
    bounded = (lengths <= bound.upper).all() and (lengths == bound.upper)[bound.exact].all()
    _require(bounded, "seq_lens", "is above its host bound, or differs from an exact one")
    _require((computed + query_lens == lengths).all(), "seq_lens", "must be num_computed_tokens plus the query length")
    row = np.repeat(np.arange(num_reqs), query_lens)
    expected = computed[row] + np.arange(len(row)) - starts[row]
    positions = _to_numpy(batch.positions)[: len(row)]
    wrong = (positions != expected).nonzero()[0]
    if len(wrong):
        token = wrong[0]
        raise BatchInvariant("positions", f"has {positions[token]} for token {token}, must be {expected[token]}")
    for index, group in enumerate(groups):
        table, slots = _to_numpy(batch.block_tables[index])[:num_reqs], _to_numpy(batch.slot_mappings[index])
        if not group.has_slots:
            _require((slots == PAD_SLOT).all(), "slot_mappings", "has slots for a group without them")
            continue
        used = -(-(lengths + group.lookahead_tokens) // group.block_size)
        unused = np.arange(group.max_blocks) >= used[:, None]
        others = np.setdiff1d(np.intersect1d(table[unused], table[~unused]), NULL_BLOCK)
        if len(others):  # a row may hold blocks that it does not need yet
            rule = f"has block {others[-1]} of another row after the last block that a row needs"
            raise BatchInvariant("block_tables", rule)
        block = table[row, positions // group.block_size].astype(np.int64)
        home = np.where(block == NULL_BLOCK, PAD_SLOT, block * group.block_size + positions % group.block_size)
        stored = slots[: len(row)]  # a token may go unstored
        at_home = ((stored == PAD_SLOT) | (stored == home)).all()
        _require(at_home, "slot_mappings", "has a slot outside the block that the row's table gives")
