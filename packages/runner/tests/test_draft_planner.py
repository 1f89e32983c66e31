"""How many proposed drafts the next step tests, against the same computed row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bateleur.runner.requests.request import RequestTable
from bateleur.runner.spec_decode.proposer import plan_drafts

ROWS, MAX_MODEL_LEN, MAX_DRAFTED_LEN, K = 9, 60, 50, 4


class Sampling:
    """Tokens of rows 2 and 5 depend on how many tokens were generated."""

    def depends_on_length(self, rows: NDArray[np.int64], least: Any, most: Any) -> NDArray[np.bool_]:
        assert (least <= most).all()
        return np.isin(rows, (2, 5))


def table_of(seed: int) -> RequestTable:
    """Row 8 is free, row 7 in the middle of its prompt, the others decode; some have a step in flight."""
    rng, table = np.random.default_rng(seed), RequestTable(ROWS, MAX_MODEL_LEN, 8)
    table.prompt_len[:8] = table.prefill_len[:8] = 5
    table.num_tokens[:7] = rng.integers(6, MAX_MODEL_LEN - 4, 7)
    table.num_computed[:7] = table.num_tokens[:7] - 1
    table.num_tokens[7], table.num_computed[7] = 5, 3
    table.limit[:8] = np.minimum(table.num_tokens[:8] + rng.integers(1, 9, 8), MAX_MODEL_LEN)
    table.num_proposed[:8] = rng.integers(0, 1 + K, 8)
    table.num_uncertain[:7] = rng.integers(0, 2, 7) * rng.integers(0, 1 + K, 7)
    table.num_drafts[7] = table.num_draft_slots[7] = 3
    table.must_wait[:7] = 1
    return table


@pytest.mark.parametrize("waits_for_length", [False, True])
@pytest.mark.parametrize("graphed", [(), (0, 2, 4)])
def test_a_row_tests_the_proposed_drafts_that_are_useful(graphed: tuple[int, ...], waits_for_length: bool) -> None:
    waiting = padded = 0
    for seed in range(60):
        table, sampling = table_of(seed), Sampling()
        plan_drafts(
            table,
            sampling,  # type: ignore[arg-type]
            K,
            MAX_DRAFTED_LEN,
            graphed,
            waits_for_length=waits_for_length,
        )
        useful = np.minimum(table.limit - 1, MAX_DRAFTED_LEN) - table.num_tokens
        wanted = [max(0, min(int(table.num_proposed[row]), int(useful[row]))) for row in range(7)]
        assert table.num_drafts.tolist() == [*wanted, 3, 0]
        longest = next((n for n in graphed if n >= max(wanted)), 0)
        for row, drafts in enumerate(wanted):
            room = MAX_MODEL_LEN - int(table.num_tokens[row])
            assert table.num_draft_slots[row] == max(drafts, min(longest, room))
            padded += int(table.num_draft_slots[row]) > drafts
            uncertain = table.num_uncertain[row] > 0
            late = waits_for_length and table.num_proposed[row] > max(0, useful[row])
            assert table.must_wait[row] == (uncertain and (late or row in (2, 5)))
            waiting += int(table.must_wait[row])
        assert table.num_draft_slots[7:].tolist() == [3, 0]
    assert waiting > 20
    assert bool(padded) == bool(graphed)
