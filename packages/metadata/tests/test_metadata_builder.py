"""Slicing keeps every field. Builders read only declared fields and write none."""

from __future__ import annotations

import dataclasses
import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.metadata import (
    FIELDS,
    BatchLimits,
    BatchShape,
    BuildPhase,
    CommonAttentionMetadata,
    InputBuffers,
    PagedAttentionBuilder,
    check_reads,
    field_values,
    get_backend,
)


def _arrays(batch: CommonAttentionMetadata) -> dict[str, tuple[Any, ...]]:
    return {name: v if isinstance(v, tuple) else (v,) for name, v in field_values(batch).items()}


def _checksum(batch: CommonAttentionMetadata) -> str:
    digest = hashlib.sha256()
    for arrays in _arrays(batch).values():
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
    scalars = [getattr(batch, f.name) for f in dataclasses.fields(batch) if isinstance(getattr(batch, f.name), int)]
    return digest.hexdigest() + str(scalars)


def test_the_table_and_the_batch_name_the_same_fields() -> None:
    scalars = {
        "num_reqs",
        "num_tokens",
        "num_actual_reqs",
        "num_actual_tokens",
        "max_query_len",
        "max_seq_len",
        "generation",
    }
    arrays = {field.name for field in dataclasses.fields(CommonAttentionMetadata)} - scalars
    assert arrays == {name for name, field in FIELDS.items() if not field.bound_attr} | {"seq_len_bound"}


def test_T_G1_pad_then_unpad_keeps_every_field(mixed: CommonAttentionMetadata, make: Any, groups: Any) -> None:
    rows = make.rows([1, 1, 7, 13], [9, 30, 20, 0], groups)
    fresh = InputBuffers(BatchLimits(4, 22, 80), groups, "cpu").stage(rows, BatchShape.of(4, 22, 22))
    sliced = mixed.unpadded()
    assert sliced.unpadded() is sliced
    for field in dataclasses.fields(CommonAttentionMetadata):
        if isinstance(getattr(fresh, field.name), int):
            assert getattr(sliced, field.name) == getattr(fresh, field.name), field.name
    expected = _arrays(fresh)
    for name, arrays in _arrays(sliced).items():
        assert len(arrays) == len(expected[name])
        for array, other in zip(arrays, expected[name], strict=True):
            assert array.shape == other.shape, name
            assert np.array_equal(array, other), name


def test_T_G1_unpadded_arrays_are_views(mixed: CommonAttentionMetadata) -> None:
    sliced = mixed.unpadded()
    assert sliced.positions.data_ptr() == mixed.positions.data_ptr()
    assert np.shares_memory(sliced.seq_len_bound.upper, mixed.seq_len_bound.upper)


@pytest.mark.parametrize("phase", list(BuildPhase))
@pytest.mark.parametrize("name", ["torch", "reference"])
def test_T_L1_builder_leaves_the_batch_unchanged(mixed: CommonAttentionMetadata, name: str, phase: BuildPhase) -> None:
    builder = get_backend(name, device="cpu", dtype=torch.float32, head_dim=8).builder()
    before = _checksum(mixed)
    meta = builder.build(mixed, 1, phase)
    assert _checksum(mixed) == before
    assert meta.block_table is mixed.block_tables[1]
    decodes = 2 if phase is BuildPhase.RUN else 0
    assert (meta.num_decodes, meta.max_seq_len, meta.max_query_len) == (decodes, 31, 22)


def test_T_L1_a_batch_is_immutable(mixed: CommonAttentionMetadata) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        mixed.max_seq_len = 3  # type: ignore[misc]


def test_builder_counts_leading_rows_of_one_token(buffers: InputBuffers, make: Any) -> None:
    builder = PagedAttentionBuilder()
    for query_lens, padded, promise, expected in (
        ([1, 1, 1], 3, 1, 3),
        ([1, 1, 1], 6, 1, 6),  # a promise of one token a row holds for padded rows too
        ([1, 1, 1], 6, 4, 3),
        ([1, 2, 1], 5, 2, 1),
        ([3, 1, 1], 3, 3, 0),
    ):
        rows = make.rows(query_lens, [4] * 3, buffers.groups)
        batch = buffers.stage(rows, BatchShape(3, sum(query_lens), padded, max(padded, sum(query_lens)), promise))
        assert builder.build(batch, 0).num_decodes == expected
        # What a graph bakes must hold for every batch that may replay it.
        captured = builder.build(batch, 0, BuildPhase.CAPTURE)
        assert captured.num_decodes == (padded if promise == 1 else 0)
        assert builder.signature(captured).admits(builder.signature(builder.build(batch, 0))) is None
    with pytest.raises(ValueError, match="group: 3 is not one of the batch's 3"):
        builder.build(batch, 3)


def test_T_G2_a_builder_that_reads_an_unknown_field_fails_when_wired() -> None:
    check_reads(PagedAttentionBuilder())
    with pytest.raises(ValueError, match="needs block_tables, slot_mappings, which no batch carries"):
        check_reads(PagedAttentionBuilder(), {"query_start_loc", "query_start_loc_cpu", "seq_lens"})
    odd: Any = SimpleNamespace(reads=frozenset[str](), seq_len_fill=7)
    with pytest.raises(ValueError, match=r"seq_len_fill: .* declares 7"):
        check_reads(odd)
