"""Bug class H: staging while earlier steps still run on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.metadata import (
    FIELDS,
    BatchLimits,
    BatchShape,
    InputBuffers,
    KVCacheGroup,
    _memory,
    field_values,
    validate,
)

LIMITS = BatchLimits(max_num_reqs=6, max_num_tokens=23, max_model_len=19)
GROUPS = (KVCacheGroup(4, 5), KVCacheGroup(5, 7, lookahead_tokens=3), KVCacheGroup(19, 2, has_slots=False))
DEVICE_FIELDS = [name for name, field in FIELDS.items() if not field.on_host]

# query lengths over computed tokens: large before small, steady decodes, a prompt between them
STEPS = [
    ([3] * 6, [16] * 6),
    ([1, 1, 1, 1], [9, 4, 3, 2]),
    ([1, 1, 1, 1], [10, 5, 4, 3]),
    ([1, 1, 9], [11, 6, 0]),
    ([1], [2]),
    ([1, 1, 1], [12, 7, 9]),
]


def _device_memory(batch: Any) -> dict[str, list[Any]]:
    """Return the full device buffers of a batch, as a kernel reads them."""
    values = field_values(batch)
    found = {}
    for name in DEVICE_FIELDS:
        arrays = values[name] if FIELDS[name].per_group else (values[name],)
        extent = FIELDS[name].leading_dim.size(LIMITS.max_num_reqs, LIMITS.max_num_tokens)
        found[name] = [array.as_strided((extent, *array.shape[1:]), array.stride()).tolist() for array in arrays]
    return found


def _stage(make: Any, buffers: InputBuffers, index: int) -> Any:
    query_lens, computed = STEPS[index]
    rows = make.rows(query_lens, computed, GROUPS, seed=index)
    if query_lens[-1] == 1:
        rows = dataclasses.replace(rows, sampled_token_ids=torch.tensor([70 + index]))
    return buffers.stage(rows, BatchShape.of(len(query_lens), sum(query_lens), max(query_lens)))


def _run(make: Any, buffers: InputBuffers, deferred: Any, in_flight: int) -> list[dict[str, list[Any]]]:
    """Return what one kernel per step reads if the host is ``in_flight`` steps ahead."""
    seen: list[dict[str, list[Any]]] = []
    for index in range(len(STEPS)):
        if index == 3:
            buffers.poison()
        batch = _stage(make, buffers, index)
        deferred.launch(lambda batch=batch: seen.append(_device_memory(batch)))
        if (index + 1) % in_flight == 0:
            deferred.sync()
    deferred.sync()
    return seen


@pytest.fixture
def expected(make: Any) -> list[dict[str, list[Any]]]:
    """Return the expected values: staged in place, one step at a time."""
    buffers = InputBuffers(LIMITS, GROUPS, "cpu")
    return [_device_memory(_stage(make, buffers, index)) for index in range(len(STEPS))]


@pytest.mark.parametrize("in_flight", [1, 2, 6])
def test_T_H1_every_step_reads_its_own_batch_however_late_copies_run(
    make: Any, deferred: Any, expected: Any, in_flight: int
) -> None:
    buffers = InputBuffers(LIMITS, GROUPS, "cpu", queue=deferred)
    addresses = buffers.addresses()
    assert _run(make, buffers, deferred, in_flight) == expected
    assert buffers.addresses() == addresses


@pytest.mark.parametrize("in_flight", [1, 2, 6])
def test_T_H1_one_reused_host_buffer_fails_as_soon_as_two_steps_are_in_flight(
    make: Any, deferred: Any, expected: Any, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect of this class, to prove that the test above detects it."""
    reused = torch.zeros(999, dtype=torch.int32)
    monkeypatch.setattr(_memory, "pinned", lambda shape, *_: reused[: shape[0]])
    buffers = InputBuffers(LIMITS, GROUPS, "cpu", queue=deferred)
    if in_flight == 1:
        assert _run(make, buffers, deferred, in_flight) == expected
        return
    try:
        seen = _run(make, buffers, deferred, in_flight)
    except IndexError:  # row starts and counts of two steps give a negative position
        return
    assert seen[0]["seq_lens"] != expected[0]["seq_lens"]


def test_poison_reaches_the_device(make: Any, deferred: Any) -> None:
    buffers = InputBuffers(LIMITS, GROUPS, "cpu", queue=deferred)
    batch = _stage(make, buffers, 0)
    buffers.poison()
    deferred.sync()
    for name, arrays in _device_memory(batch).items():
        assert {value for array in arrays for value in np.ravel(array).tolist()} == {FIELDS[name].poison}, name


def test_T_H1_host_fields_and_device_fields_are_of_one_step_after_a_sync(make: Any, deferred: Any) -> None:
    buffers = InputBuffers(LIMITS, GROUPS, "cpu", queue=deferred)
    for index in range(len(STEPS)):
        batch = _stage(make, buffers, index)
        deferred.sync()
        validate(batch, LIMITS, GROUPS, level="device")
