"""`SamplerRows` against the same done row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bateleur.runner.sampling.rejection_sampler import SamplerRows


@pytest.mark.parametrize("width", [1, 4])
def test_emitted_tokens_and_drafts_lie_in_their_rows_of_the_request_table(width: int) -> None:
    rng = np.random.default_rng(width)
    rows = SamplerRows(6, width, torch.device("cpu"))
    for count in (0, 1, 5):
        table_rows, num_drafts = rng.permutation(6)[:count], rng.integers(0, width, count)
        values = rng.random((count, 4), np.float32)
        rows.stage(table_rows, rng.integers(1 << 62, size=count), num_drafts, values)
        assert rows.table_rows.tolist() == [*table_rows, *[6] * (6 - count)]
        assert rows.values[:count].tolist() == values.tolist()
        drafts = torch.from_numpy(rng.integers(0, 99, (count, width - 1)))
        rows.keep(torch.from_numpy(table_rows), torch.full((count,), 7), drafts)
        for row, kept, wanted, line in zip(
            table_rows, rows.drafts(count).tolist(), num_drafts, drafts.tolist(), strict=True
        ):
            assert rows.next_ids[row].tolist() == [7, *line]
            assert kept == [*line[:wanted], *[-1] * (width - 1 - wanted)]
        num_emitted = torch.from_numpy(rng.integers(0, 1 + width, count))
        tokens = torch.from_numpy(rng.integers(0, 99, (count, width)))
        tokens[torch.arange(width) >= num_emitted[:, None]] = -1
        rows.emit(tokens, num_emitted)
        assert rows.emitted[:count].tolist() == tokens.tolist()
        assert rows.num_valid[:count].tolist() == num_emitted.tolist()
        for row, line, many in zip(table_rows, tokens.tolist(), num_emitted.tolist(), strict=True):
            assert rows.next_ids[row, 0] == (line[many - 1] if many else 0)


def test_poison_is_overwritten() -> None:
    rows = SamplerRows(3, 2, torch.device("cpu"))
    step = np.array([2, 0]), np.array([5, 6]), np.array([1, 0]), np.ones((2, 4), np.float32)
    rows.poison()
    rows.stage(*step)
    assert rows.seeds.tolist() == [5, 6, 0]
    assert (rows.num_valid > 2).all()
