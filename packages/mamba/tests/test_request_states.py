"""`RequestStates`: values follow the request, and a new request starts clean."""

from __future__ import annotations

import pytest
import torch

from bateleur.mamba import RequestStates

NEUTRAL = (1, -1, 0)


def seen(states: RequestStates, *rows: int) -> list[tuple[int, ...]]:
    got = states.gather(torch.tensor(rows))
    return list(zip(got.accepted.tolist(), got.prev_col.tolist(), got.base.tolist(), strict=True))


def filled() -> RequestStates:
    """Row r accepted r tokens, ran in column 10 r, and has a checkpoint of 100 r."""
    states = RequestStates(5, "cpu")
    rows = torch.arange(1, 5)
    states.admit(rows)
    states.scatter(rows, rows, prev_col=10 * rows, base=100 * rows)
    return states


def test_new_requests_are_neutral():
    states = RequestStates(3, "cpu")
    assert seen(states, 0, 1, 2) == [NEUTRAL] * 3
    states.admit([2, 1], [8, 0])
    assert seen(states, 0, 1, 2) == [NEUTRAL, NEUTRAL, (1, -1, 8)]


def test_m16_states_follow_the_request_and_not_the_batch():
    # vllm #51571, #51599, #53919: counts by batch row, and a batch that was reordered.
    states = filled()
    assert seen(states, 3, 1, 0, 4) == [(3, 30, 300), (1, 10, 100), NEUTRAL, (4, 40, 400)]
    states.scatter(torch.tensor([4, 0, 3]), torch.tensor([2, 9, 5]), prev_col=torch.tensor([7, 9, 6]))
    assert seen(states, 0, 1, 2, 3, 4) == [NEUTRAL, (1, 10, 100), (2, 20, 200), (5, 6, 300), (2, 7, 400)]


def test_m07_m33_nothing_is_left_behind():
    states = filled()
    states.admit([3])
    assert seen(states, 2, 3, 4) == [(2, 20, 200), NEUTRAL, (4, 40, 400)]


def test_the_null_row_stays_neutral():
    states = RequestStates(2, "cpu")
    padded = torch.zeros(3, dtype=torch.int64)
    states.scatter(padded, padded + 7, prev_col=padded + 7, base=padded + 7)
    assert seen(states, 0, 1) == [NEUTRAL, NEUTRAL]
    states.admit([0], [8])
    assert seen(states, 0) == [NEUTRAL]


def test_one_address_for_life():
    states = filled()
    before = states.values.data_ptr()
    states.admit([1], 4)
    states.scatter(torch.tensor([1]), torch.tensor([2]))
    assert states.values.data_ptr() == before


def test_a_row_besides_null_is_needed():
    with pytest.raises(ValueError, match="num_rows is 1; it must be at least 2"):
        RequestStates(1, "cpu")
    assert RequestStates(2, "cpu").num_rows == 2
