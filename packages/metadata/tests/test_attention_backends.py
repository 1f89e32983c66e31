"""Regression tests of bug classes B, E, F and G of batch metadata."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.metadata import (
    FIELDS,
    BatchInvariant,
    BatchLimits,
    BatchShape,
    InputBuffers,
    KVCacheGroup,
    Role,
    RowSplit,
    SeqLenBound,
    Signature,
    StepRows,
    split_decodes_and_prefills,
    validate,
)

ARRAYS = [name for name, field in FIELDS.items() if not field.bound_attr]


def first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def with_first(value: Any, changed: Any) -> Any:
    return (changed, *value[1:]) if isinstance(value, tuple) else changed


# -- B: two sizes in use -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARRAYS)
def test_T_B2_a_field_of_another_size_is_refused(mixed: Any, buffers: InputBuffers, name: str) -> None:
    value = getattr(mixed, name)
    unpadded = FIELDS[name].leading_dim.size(mixed.num_actual_reqs, mixed.num_actual_tokens)
    short = dataclasses.replace(mixed, **{name: with_first(value, first(value)[:unpadded])})
    with pytest.raises(BatchInvariant, match=f"{name}: has shape") as caught:
        validate(short, buffers.limits, buffers.groups)
    assert caught.value.field == name


def test_T_B2_real_rows_with_padded_tokens_are_refused(mixed: Any, buffers: InputBuffers) -> None:
    rows = mixed.num_actual_reqs
    bound = mixed.seq_len_bound.narrow(rows)
    with pytest.raises(BatchInvariant, match=r"query_start_loc: has shape \(7,\), must be \(5,\)"):
        validate(dataclasses.replace(mixed, num_reqs=rows, seq_len_bound=bound), buffers.limits, buffers.groups)


# -- E: bounds and layouts at capture ------------------------------------------------------------------------


def test_T_E1_a_signature_admits_smaller_bounds_and_equal_rest() -> None:
    def sign(bound: int, stride: int, kernel: str) -> Signature:
        return Signature(
            (("keys", Role.BOUND, bound), ("stride", Role.LAYOUT, stride), ("kernel", Role.CONTROL, kernel))
        )

    captured = sign(64, 8, "split")
    assert captured.admits(sign(64, 8, "split")) is None
    assert captured.admits(sign(3, 8, "split")) is None
    for offered, reason in (
        (sign(65, 8, "split"), "keys is 65, above the captured bound 64"),
        (sign(3, 4, "split"), "stride is 4, but layout 8 was captured"),
        (sign(3, 8, "whole"), "kernel is whole, but control split was captured"),
        (Signature(captured.items[:2]), "kernel is in only one of the two signatures"),
        (
            Signature((("keys", Role.LAYOUT, 64), *captured.items[1:])),
            "keys was captured as bound and offered as layout",
        ),
    ):
        assert captured.admits(offered) == reason
    floor = Signature((("decodes", Role.FLOOR, 2),))
    assert floor.admits(Signature((("decodes", Role.FLOOR, 5),))) is None
    fewer = floor.admits(Signature((("decodes", Role.FLOOR, 1),)))
    assert fewer == "decodes is 1, below the captured floor 2"
    joined = Signature.join(attention=captured, states=Signature((("rows", Role.BOUND, 4),)))
    assert [name for name, _, _ in joined.items] == [
        "attention.keys",
        "attention.stride",
        "attention.kernel",
        "states.rows",
    ]
    assert joined.admits(joined) is None


def test_T_E2_a_dummy_of_every_small_shape_is_a_valid_batch() -> None:
    """The remainder of an uneven split must not push a row over the longest request."""
    limits, groups = BatchLimits(5, 12, 7), (KVCacheGroup(2, 4), KVCacheGroup(7, 1, has_slots=False))
    buffers = InputBuffers(limits, groups, "cpu", seq_len_fill=1)
    for reqs in range(6):
        for tokens in range(reqs, min(12, reqs * 6) + 1):
            shape = BatchShape(reqs, tokens, 5, 12, max(1, tokens))
            validate(buffers.dummy(shape, max_seq_len=7), limits, groups, level="device", seq_len_fill=1)


# -- F: dispatch on shape; and report 2 ----------------------------------------------------------------------

COMPUTED = np.array([50, 100, 200, 10, 20], np.int32)
PROMPT = np.array([50, 200, 200, 100, 200], np.int32)


def report_2(query_len: int) -> Any:
    """Three of five rows, staged after a batch of all five and into poisoned buffers."""
    groups = (KVCacheGroup(16, 20),)
    buffers = InputBuffers(BatchLimits(5, 5 * query_len, 320), groups, "cpu")

    def rows(count: int) -> StepRows:
        return StepRows(
            query_lens=np.full(count, query_len, np.int32),
            num_computed_tokens=COMPUTED[:count],
            is_prefilling=(COMPUTED < PROMPT)[:count],
            token_ids=np.zeros(count * query_len, np.int32),
            block_tables=(np.arange(1, 1 + 20 * count, dtype=np.int32).reshape(count, 20),),
        )

    buffers.poison()
    five = buffers.stage(rows(5), BatchShape.of(5, 5 * query_len, query_len))
    assert five.is_prefilling.tolist() == [False, True, False, True, True]
    return buffers.stage(rows(3), BatchShape(3, 3 * query_len, 5, 5 * query_len, query_len))


@pytest.mark.parametrize(
    ("query_len", "short_extends", "expected"),
    [
        # one token over context is a decode under both settings
        (1, False, RowSplit(5, 0, 3, 0)),
        (1, True, RowSplit(5, 0, 3, 0)),
        # two tokens of row 1 are part of its prompt: a decode only where short extends may be
        (2, False, RowSplit(1, 2, 2, 4)),
        (2, True, RowSplit(5, 0, 6, 0)),
    ],
)
def test_T_A1_report_2_split_of_a_padded_batch(query_len: int, short_extends: bool, expected: RowSplit) -> None:
    batch = report_2(query_len)
    assert batch.is_prefilling.tolist() == [False, True, False, False, False]
    query_lens = np.diff(batch.query_start_loc_cpu.numpy())
    state = query_lens, batch.is_prefilling.numpy(), batch.num_computed_tokens.numpy()
    options: dict[str, Any] = {"threshold": query_len, "uniform": True}
    split = split_decodes_and_prefills(*state, **options, treat_short_extends_as_decodes=short_extends)
    assert split == expected


@pytest.mark.parametrize("short_extends", [False, True])
@pytest.mark.parametrize("uniform", [False, True])
def test_T_A1_flags_of_rows_without_tokens_decide_nothing(uniform: bool, short_extends: bool) -> None:
    """Leave stale values, which no split may read."""
    query_lens, computed = np.array([1, 1, 1, 0, 0], np.int32), np.array([50, 100, 200, 0, 0], np.int32)
    splits = {
        split_decodes_and_prefills(
            query_lens,
            np.array([False, True, False, *tail]),
            np.array([*computed[:3], *stale], np.int32),
            uniform=uniform,
            treat_short_extends_as_decodes=short_extends,
        )
        for tail in ((False, False), (True, True), (False, True))
        for stale in ((0, 0), (10, 20))
    }
    assert splits == {RowSplit(5 if uniform else 3, 0, 3, 0)}


def test_T_F1_short_extends_need_context_and_the_threshold() -> None:
    """A row without context and a long chunk are prefills, also with treat_short_extends_as_decodes."""

    def decodes(length: int, prefilling: bool, computed: int, threshold: int) -> list[int]:
        arrays = np.array([length], np.int32), np.array([prefilling]), np.array([computed], np.int32)
        return [
            split_decodes_and_prefills(*arrays, threshold=threshold, treat_short_extends_as_decodes=wide).num_decodes
            for wide in (False, True)
        ]

    assert decodes(3, True, 5, 3) == [0, 1]
    assert decodes(3, True, 5, 2) == [0, 0]
    assert decodes(3, True, 0, 3) == [0, 0]
    assert decodes(1, True, 0, 3) == [0, 0]
    assert decodes(1, True, 5, 3) == [1, 1]
    assert decodes(3, False, 5, 3) == [1, 1]


# -- G: fields dropped on the way; twins ---------------------------------------------------------------------


def test_T_G2_a_missing_or_short_bound_is_named(mixed: Any) -> None:
    with pytest.raises(ValueError, match="seq_len_bound: is None; every batch carries a SeqLenBound"):
        dataclasses.replace(mixed, seq_len_bound=None)
    with pytest.raises(ValueError, match="seq_len_bound: has 4 rows for a batch of 6"):
        dataclasses.replace(mixed, seq_len_bound=mixed.seq_len_bound.narrow(4))
    assert dataclasses.replace(mixed).seq_len_bound is mixed.seq_len_bound


def one_more(mixed: Any, name: str) -> Any:
    """Return a copy of the batch with one used entry of a device field changed by one."""
    value = getattr(mixed, name)
    changed = first(value).clone()
    changed.view(-1)[1 if name in ("query_start_loc", "block_tables") else 0] += 1
    return dataclasses.replace(mixed, **{name: with_first(value, changed)})


@pytest.mark.parametrize("name", [n for n in ARRAYS if not FIELDS[n].on_host and n != "input_ids"])
def test_device_fields_agree_with_the_host_and_each_other(mixed: Any, buffers: InputBuffers, name: str) -> None:
    """All device fields except the ids can be derived, so that one wrong entry is detected."""
    batch = one_more(mixed, name)
    validate(batch, buffers.limits, buffers.groups)  # the host alone can't know
    with pytest.raises(BatchInvariant) as caught:
        validate(batch, buffers.limits, buffers.groups, level="device")
    found_in = {"num_computed_tokens": "seq_lens", "block_tables": "slot_mappings"}
    assert caught.value.field == found_in.get(name, name)


def test_inexact_bounds_may_lie_above_the_device_and_never_below(mixed: Any, buffers: InputBuffers) -> None:
    def bounded(upper: int, exact: bool) -> Any:
        bound = SeqLenBound(mixed.seq_len_bound.upper.copy(), mixed.seq_len_bound.exact.copy())
        bound.upper[0], bound.exact[0] = upper, exact
        return dataclasses.replace(mixed, seq_len_bound=bound)

    limits, groups = buffers.limits, buffers.groups
    true = int(mixed.seq_lens[0])
    validate(bounded(true + 3, False), limits, groups, level="device")
    for upper, exact in ((true + 3, True), (true - 1, False)):
        with pytest.raises(BatchInvariant, match="seq_lens: is above its host bound, or differs from an exact one"):
            validate(bounded(upper, exact), limits, groups, level="device")


def test_a_slot_in_a_block_of_another_row_is_found(mixed: Any, buffers: InputBuffers) -> None:
    slots = mixed.slot_mappings[0].clone()
    slots[0] = slots[1]
    with pytest.raises(BatchInvariant, match="slot_mappings: has a slot outside the block"):
        validate(
            dataclasses.replace(mixed, slot_mappings=(slots, *mixed.slot_mappings[1:])),
            buffers.limits,
            buffers.groups,
            level="device",
        )
    assert torch.equal(mixed.slot_mappings[2], torch.full_like(slots, -1))


def test_a_slot_in_the_null_block_is_found(mixed: Any, buffers: InputBuffers) -> None:
    """Row 0 writes position 9, the last of its second block of 5, but the table has the null block."""
    table, slots = mixed.block_tables[0].clone(), mixed.slot_mappings[0].clone()
    table[0, 1], slots[0] = 0, 4
    batch = dataclasses.replace(
        mixed, block_tables=(table, *mixed.block_tables[1:]), slot_mappings=(slots, *mixed.slot_mappings[1:])
    )
    with pytest.raises(BatchInvariant, match="slot_mappings: has a slot outside the block"):
        validate(batch, buffers.limits, buffers.groups, level="device")
