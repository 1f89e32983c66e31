"""Staging: values against a plain-Python oracle, padding of whole buffers, bad input, addresses."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.metadata import (
    FIELDS,
    BatchInvariant,
    BatchLimits,
    BatchShape,
    InputBuffers,
    KVCacheGroup,
    Pad,
    StepRows,
    _device_staging,
    validate,
)
from bateleur.metadata._memory import CurrentStream
from bateleur.metadata._step_values import used_table

LIMITS = BatchLimits(max_num_reqs=6, max_num_tokens=23, max_model_len=19)
GROUPS = (KVCacheGroup(4, 5), KVCacheGroup(5, 7, lookahead_tokens=3), KVCacheGroup(19, 2, has_slots=False))


def oracle(rows: StepRows, fill: int) -> dict[str, list[Any]]:
    """Return the expected contents of all buffers after staging ``rows``."""
    max_reqs, max_tokens = LIMITS.max_num_reqs, LIMITS.max_num_tokens
    starts, positions, owner = [0], [], []
    for row, (q, c) in enumerate(zip(rows.query_lens.tolist(), rows.num_computed_tokens.tolist(), strict=True)):
        starts.append(starts[-1] + q)
        positions += range(c, c + q)
        owner += [row] * q
    real, tokens = len(starts) - 1, starts[-1]
    starts += [tokens] * (max_reqs - real)
    upper = [c + q for c, q in zip(rows.num_computed_tokens.tolist(), rows.query_lens.tolist(), strict=True)]
    reqs, toks = max_reqs - real, max_tokens - tokens
    exact = [True] * real if rows.num_computed_is_exact is None else rows.num_computed_is_exact.tolist()
    tables, slots = [], []
    for group, given_table in zip(GROUPS, rows.block_tables, strict=True):
        table = [[0] * group.max_blocks for _ in range(max_reqs)]
        for row in range(real):
            needed = -(-(upper[row] + group.lookahead_tokens) // group.block_size)
            for column in range(group.max_blocks):
                if not group.has_slots or column < needed:
                    table[row][column] = int(given_table[row, column])
        size = group.block_size
        mapped = [table[r][p // size] * size + p % size for r, p in zip(owner, positions, strict=True)]
        tables.append(table)
        slots.append(mapped + [-1] * toks if group.has_slots else [-1] * max_tokens)
    return {
        "input_ids": [rows.token_ids.tolist() + [0] * toks],
        "positions": [positions + [0] * toks],
        "query_start_loc": [starts],
        "query_start_loc_cpu": [starts],
        "seq_lens": [upper + [fill] * reqs],
        "num_computed_tokens": [rows.num_computed_tokens.tolist() + [0] * reqs],
        "is_prefilling": [rows.is_prefilling.tolist() + [False] * reqs],
        "seq_lens_cpu_upper_bound": [upper + [0] * reqs],
        "seq_lens_cpu_exact": [exact + [True] * reqs],
        "block_tables": tables,
        "slot_mappings": slots,
    }


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[bool], int, int, int]:
    """query lengths, computed, exact, padded rows, padded tokens, seed."""
    query_lens: list[int] = []
    for _ in range(draw(st.integers(0, LIMITS.max_num_reqs))):
        left = LIMITS.max_num_tokens - sum(query_lens)
        query_lens.append(draw(st.integers(1, max(1, min(left - LIMITS.max_num_reqs, 9)))))
    computed = [draw(st.integers(0, LIMITS.max_model_len - q)) for q in query_lens]
    exact = [draw(st.booleans()) for _ in query_lens]
    padded_reqs = draw(st.integers(len(query_lens), LIMITS.max_num_reqs))
    padded_tokens = draw(st.integers(sum(query_lens), LIMITS.max_num_tokens))
    return query_lens, computed, exact, padded_reqs, padded_tokens, draw(st.integers(0, 9))


@settings(max_examples=150, deadline=None)
@given(history=st.lists(st.tuples(steps(), st.booleans()), min_size=1, max_size=4), fill=st.integers(0, 1))
def test_T_A3_stage_matches_the_oracle_over_whole_buffers(make: Any, history: Any, fill: int) -> None:
    buffers = InputBuffers(LIMITS, GROUPS, "cpu", seq_len_fill=fill)
    for (query_lens, computed, exact, padded_reqs, padded_tokens, seed), poison in history:
        if poison:
            buffers.poison()
        rows = make.rows(query_lens, computed, GROUPS, seed=seed)
        rows = dataclasses.replace(rows, num_computed_is_exact=np.array(exact, np.bool_))
        longest = max(query_lens, default=1)
        shape = BatchShape(len(query_lens), sum(query_lens), padded_reqs, padded_tokens, longest)
        batch = buffers.stage(rows, shape)
        validate(batch, LIMITS, GROUPS, level="device", seq_len_fill=fill)
        expected, found = oracle(rows, fill), make.whole(batch, LIMITS)
        assert found.keys() == FIELDS.keys() == expected.keys()
        for name, arrays in found.items():
            for array, value in zip(arrays, expected[name], strict=True):
                assert array.tolist() == value, name
        assert batch.max_seq_len == batch.seq_len_bound.max()


@pytest.mark.parametrize("fill", [0, 1])
def test_T_A1_after_poison_every_padded_entry_has_its_declared_value(make: Any, fill: int) -> None:
    buffers = InputBuffers(LIMITS, GROUPS, "cpu", seq_len_fill=fill)
    buffers.poison()
    rows = make.rows([1, 4], [3, 0], GROUPS)
    batch = buffers.stage(rows, BatchShape(2, 5, 6, 23, 4))
    for name, field in FIELDS.items():
        declared = {Pad.REPEAT_LAST: 5, Pad.BUILDER: fill}.get(field.pad, field.pad)
        real = field.leading_dim.size(2, 5)
        for array in make.whole(batch, LIMITS)[name]:
            assert (array[real:] == declared).all(), name
            assert (array != field.poison).all() or field.dtype is torch.bool, name


def test_T_A1_report_2_is_prefilling_of_a_padded_batch(buffers: InputBuffers, make: Any) -> None:
    computed = np.array([50, 100, 200, 10, 20], np.int32)
    prompt = np.array([50, 200, 200, 100, 200], np.int32)
    groups = (KVCacheGroup(16, 20),)
    buffers = InputBuffers(BatchLimits(5, 16, 320), groups, "cpu")
    prefilling = computed < prompt
    assert prefilling.tolist() == [False, True, False, True, True]
    five = make.rows([1] * 5, computed, groups, is_prefilling=prefilling)
    buffers.stage(five, BatchShape.of(5, 5, 1))
    three = make.rows([1] * 3, computed[:3], groups, is_prefilling=prefilling[:3])
    batch = buffers.stage(three, BatchShape(3, 3, 5, 5, 1))
    assert batch.is_prefilling.tolist() == [False, True, False, False, False]
    assert batch.seq_lens.tolist() == [51, 101, 201, 0, 0]


def test_T_A5_large_batch_before_small(buffers: InputBuffers, make: Any, groups: Any) -> None:
    large = make.rows([7] * 7, [70] * 7, groups)
    buffers.stage(large, BatchShape(7, 49, 7, 50, 7))
    small = make.rows([1], [3], groups, seed=1)
    after_large = make.whole(buffers.stage(small, BatchShape(1, 1, 7, 50, 1)), buffers.limits)
    fresh = InputBuffers(buffers.limits, groups, "cpu")
    expected = make.whole(fresh.stage(small, BatchShape(1, 1, 7, 50, 1)), buffers.limits)
    for name in FIELDS:
        for array, other in zip(after_large[name], expected[name], strict=True):
            assert np.array_equal(array, other), name


@pytest.mark.parametrize("broken", range(5))
def test_a_staging_that_broke_off_is_forgotten(
    make: Any, groups: Any, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt staging before the table of a group is added to the upload, before the copy, or before the launch."""
    left = iter(range(99))

    def interruptible(function: Any) -> Any:
        def call(*args: Any) -> Any:
            if next(left) == broken:
                raise KeyboardInterrupt
            return function(*args)

        return call

    stream = CurrentStream()
    queue = SimpleNamespace(copy=stream.copy, launch=stream.launch)
    buffers = InputBuffers(BatchLimits(7, 50, 80), groups, "cpu", queue=queue)
    small, shape = make.rows([1], [3], groups, seed=1), BatchShape(1, 1, 7, 50, 1)
    buffers.stage(small, shape)
    large = make.rows([7] * 7, [70] * 7, groups)
    with monkeypatch.context() as patch:
        patch.setattr(_device_staging, "used_table", interruptible(used_table))
        patch.setattr(queue, "copy", interruptible(stream.copy))
        patch.setattr(queue, "launch", interruptible(stream.launch))
        with pytest.raises(KeyboardInterrupt):
            buffers.stage(large, BatchShape(7, 49, 7, 50, 7))
    buffers.forget()
    found = make.whole(buffers.stage(small, shape), buffers.limits)
    fresh = InputBuffers(buffers.limits, groups, "cpu")
    expected = make.whole(fresh.stage(small, shape), buffers.limits)
    for name in FIELDS:
        for array, other in zip(found[name], expected[name], strict=True):
            assert np.array_equal(array, other), name


def test_T_A5_single_tokens_after_as_many_longer_rows(buffers: InputBuffers, make: Any, groups: Any) -> None:
    """Unchanged row starts are not sent again; changed ones are."""
    starts = []
    for query_lens in ([1, 1, 1], [1, 1, 1], [2, 1, 3], [1, 1, 1], [1, 1], [1, 1, 1]):
        rows = make.rows(query_lens, [4] * len(query_lens), groups)
        batch = buffers.stage(rows, BatchShape(len(query_lens), sum(query_lens), 5, 9, 3))
        assert torch.equal(batch.query_start_loc, batch.query_start_loc_cpu)
        starts.append(batch.query_start_loc.tolist())
    ones = [0, 1, 2, 3, 3, 3]
    assert starts == [ones, ones, [0, 2, 3, 6, 6, 6], ones, [0, 1, 2, 2, 2, 2], ones]


def test_T_E1_max_seq_len_is_the_bound_unless_a_capture_overrides_it(buffers: InputBuffers, make: Any) -> None:
    rows = make.rows([1, 2], [10, 40], buffers.groups)
    shape = BatchShape.of(2, 3, 2)
    assert buffers.stage(rows, shape).max_seq_len == 42
    assert buffers.stage(rows, shape, max_seq_len=80).max_seq_len == 80
    for wrong in (41, 81):
        with pytest.raises(ValueError, match=rf"max_seq_len: {wrong} .*42 .*80"):
            buffers.stage(rows, shape, max_seq_len=wrong)


@pytest.mark.parametrize("prefilling", [False, True])
@pytest.mark.parametrize("shape", [BatchShape(4, 4, 6, 6, 1), BatchShape(3, 10, 7, 50, 50), BatchShape.of(0, 0, 1)])
def test_T_E2_dummy_satisfies_the_validation_of_real_batches(
    buffers: InputBuffers, make: Any, groups: Any, shape: BatchShape, prefilling: bool
) -> None:
    buffers.stage(make.rows([7] * 7, [70] * 7, groups), BatchShape(7, 49, 7, 50, 7))
    batch = buffers.dummy(shape, is_prefilling=prefilling, max_seq_len=80)
    validate(batch, buffers.limits, groups, level="device")
    assert batch.max_seq_len == 80
    assert batch.is_prefilling[: shape.num_reqs].eq(prefilling).all()
    assert all((slots == -1).all() for slots in batch.slot_mappings)
    assert all((table == 0).all() for table in batch.block_tables)
    query_lens = batch.query_start_loc.diff()[: shape.num_reqs]
    assert query_lens.sum() == shape.num_tokens
    assert torch.equal(query_lens, query_lens.sort().values)


def test_T_E2_dummy_longer_than_the_model_is_refused(buffers: InputBuffers) -> None:
    with pytest.raises(ValueError, match="would hold 81 tokens, above max_model_len 80"):
        buffers.dummy(BatchShape.of(2, 2, 1), context_len=80)


def test_sampled_ids_replace_the_leading_tokens(buffers: InputBuffers, make: Any) -> None:
    rows = dataclasses.replace(
        make.rows([1, 1, 3], [4, 5, 0], buffers.groups), sampled_token_ids=torch.tensor([77, 88])
    )
    batch = buffers.stage(rows, BatchShape.of(3, 5, 3))
    assert batch.input_ids.tolist() == [77, 88, *rows.token_ids[2:].tolist()]


def test_addresses_stay_and_generations_count(buffers: InputBuffers, make: Any) -> None:
    addresses, generation = buffers.addresses(), buffers.generation
    per_group = sum(field.per_group for field in FIELDS.values())
    assert len(addresses) == len(set(addresses.values())) == len(FIELDS) - per_group + 3 * per_group
    batch = buffers.stage(make.rows([2], [3], buffers.groups), BatchShape(1, 2, 3, 9, 2))
    assert batch.block_tables[1].data_ptr() == addresses["block_tables.1"]
    assert batch.seq_lens.data_ptr() == addresses["seq_lens"]
    buffers.poison()
    buffers.dummy(BatchShape.of(7, 50, 50))
    assert buffers.addresses() == addresses
    assert buffers.generation == generation + 3


def broken(rows: StepRows) -> list[tuple[dict[str, Any], str]]:
    """Invalid changes of a valid step (1, 1, 3) over (9, 30, 0), and the expected messages."""
    i32, tables = np.int32, rows.block_tables
    return [
        ({"query_lens": np.array([1, 1], i32)}, r"query_lens: has shape \(2,\), must be \(3,\)"),
        ({"query_lens": np.array([1, 1, 2], i32)}, "query_lens: sum to 4, .* num_tokens 5"),
        ({"query_lens": np.array([1, 1, 1], i32)}, "query_lens: sum to 3, .* num_tokens 5"),
        ({"query_lens": np.array([0, 2, 3], i32)}, "query_lens: 0 in row 0; must be at least 1"),
        ({"query_lens": np.array([1, 0, 4], i32)}, "query_lens: 0 in row 1"),
        ({"query_lens": np.array([1, 1, 3])}, "query_lens: has dtype int64, must be int32"),
        ({"num_computed_tokens": np.array([9, 30], i32)}, r"num_computed_tokens: has shape \(2,\), must be \(3,\)"),
        ({"num_computed_tokens": np.array([9, -1, 0], i32)}, "num_computed_tokens: -1 in row 1; must not be negative"),
        ({"num_computed_tokens": np.array([9, 80, 0], i32)}, "row 1 would hold 81 tokens, above max_model_len 80"),
        (
            {"num_computed_tokens": np.array([9, 2**31 - 1, 0], i32)},
            "row 1 would hold 2147483648 tokens, above max_model_len 80",
        ),
        ({"is_prefilling": np.zeros(4, np.bool_)}, r"is_prefilling: has shape \(4,\), must be \(3,\)"),
        ({"num_computed_is_exact": np.ones(2, np.bool_)}, r"num_computed_is_exact: has shape \(2,\), must be \(3,\)"),
        ({"token_ids": np.ones(6, i32)}, r"token_ids: has shape \(6,\), must be \(5,\)"),
        ({"block_tables": tables[:1]}, "block_tables: has 1 tables for 3 KV-cache groups"),
        ({"block_tables": (tables[0][:, :4], *tables[1:])}, r"block_tables: has shape \(3, 4\)"),
        ({"block_tables": (tables[0] * 0, *tables[1:])}, "group 0 has block 0 for position 9 of row 0"),
        ({"sampled_token_ids": torch.zeros(6)}, r"sampled_token_ids: has shape \(6,\), must be \(n,\) with n <= 5"),
    ]


@pytest.mark.parametrize("case", range(17))
def test_bad_rows_are_refused_before_anything_is_written(buffers: InputBuffers, make: Any, case: int) -> None:
    rows = make.rows([1, 1, 3], [9, 30, 0], buffers.groups)
    shape = BatchShape.of(3, 5, 3)
    batch = buffers.stage(rows, shape)
    before, generation = make.whole(batch, buffers.limits), buffers.generation
    changes, message = broken(rows)[case]
    with pytest.raises(ValueError, match=message):
        buffers.stage(dataclasses.replace(rows, **changes), shape)
    after = make.whole(batch, buffers.limits)
    assert all(np.array_equal(a, b) for name in FIELDS for a, b in zip(before[name], after[name], strict=True))
    assert buffers.generation == generation


def test_shapes_beyond_the_limits_or_the_promise_are_refused(buffers: InputBuffers, make: Any) -> None:
    rows = make.rows([1, 4], [9, 3], buffers.groups)
    for shape, message in (
        (BatchShape(2, 5, 8, 9, 4), "padded_reqs: 8 is above max_num_reqs 7"),
        (BatchShape(2, 5, 2, 51, 4), "padded_tokens: 51 is above max_num_tokens 50"),
        (BatchShape(2, 5, 2, 5, 3), "query_lens: 4 is above the promised max_query_len 3"),
    ):
        with pytest.raises(ValueError, match=message):
            buffers.stage(rows, shape)
    for sizes in ((3, 3, 2, 3, 1), (2, 1, 2, 3, 1), (2, 5, 2, 4, 9), (2, 5, 2, 5, 2), (0, 0, 0, 0, 0)):
        with pytest.raises(ValueError, match=r"padded_reqs|num_tokens|max_query_len"):
            BatchShape(*sizes)


def test_bad_sizes_of_buffers_are_refused() -> None:
    with pytest.raises(ValueError, match="seq_len_fill: 2"):
        InputBuffers(LIMITS, GROUPS, "cpu", seq_len_fill=2)
    with pytest.raises(ValueError, match=r"groups\[0\]: 4 blocks of 4 tokens .* max_model_len 19"):
        InputBuffers(LIMITS, (KVCacheGroup(4, 4),), "cpu")
    with pytest.raises(ValueError, match="max_model_len: 0"):
        BatchLimits(1, 1, 0)
    with pytest.raises(ValueError, match="block_size: 0"):
        KVCacheGroup(0, 4)


def _corrupt(batch: Any, name: str) -> None:
    value = getattr(batch, name)
    value = value[0] if isinstance(value, tuple) else value
    field = FIELDS[name]
    value[field.leading_dim.size(batch.num_actual_reqs, batch.num_actual_tokens) :] = field.poison


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if not field.bound_attr])
def test_validation_finds_a_corrupt_tail_of_any_field(
    mixed: Any, buffers: InputBuffers, groups: Any, name: str
) -> None:
    validate(mixed, buffers.limits, groups, level="device")
    _corrupt(mixed, name)
    with pytest.raises(BatchInvariant, match=name) as caught:
        validate(mixed, buffers.limits, groups, level="device")
    assert caught.value.field == name


def test_validation_finds_wrong_scalars_and_sizes(mixed: Any, buffers: InputBuffers, groups: Any) -> None:
    for changes, name in (
        ({"max_seq_len": 30}, "max_seq_len"),
        ({"max_query_len": 12}, "max_query_len"),
        ({"num_reqs": 5, "seq_len_bound": mixed.seq_len_bound.narrow(5)}, "query_start_loc"),
        ({"positions": mixed.positions.int()}, "positions"),
        ({"seq_lens": mixed.seq_lens + 1}, "seq_lens"),
        ({"block_tables": mixed.block_tables[:2]}, "block_tables"),
        ({"num_actual_tokens": 32}, "num_tokens"),
    ):
        with pytest.raises(BatchInvariant, match=name):
            validate(dataclasses.replace(mixed, **changes), buffers.limits, groups, level="device", seq_len_fill=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_staging_equals_cpu_staging(make: Any, groups: Any) -> None:
    limits = BatchLimits(7, 50, 80)
    both = [InputBuffers(limits, groups, device) for device in ("cpu", "cuda")]
    for poison, query_lens, computed in ((True, [7] * 7, [70] * 7), (False, [1, 4], [3, 0]), (True, [1], [2])):
        rows = make.rows(query_lens, computed, groups)
        batches = []
        for buffers in both:
            if poison:
                buffers.poison()
            sampled = torch.tensor([5], device=buffers.device)
            shape = BatchShape(len(query_lens), sum(query_lens), 7, 50, max(query_lens))
            batches.append(buffers.stage(dataclasses.replace(rows, sampled_token_ids=sampled), shape))
            validate(batches[-1], limits, groups, level="device")
        assert batches[1].input_ids.is_cuda
        assert torch.equal(batches[0].input_ids, batches[1].input_ids.cpu())
        assert torch.equal(batches[0].positions, batches[1].positions.cpu())
        for a, b in zip(batches[0].slot_mappings, batches[1].slot_mappings, strict=True):
            assert torch.equal(a, b.cpu())
