"""What a CPU does to the next tokens in numpy is what torch's operators do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bateleur.runner.sampling.next_tokens import NextTokens


@pytest.mark.parametrize("width", [1, 4])
def test_on_a_cpu_rows_hold_what_they_hold_elsewhere(width: int) -> None:
    rng = np.random.default_rng(width)
    for count in (0, 1, 5):
        rows = rng.permutation(6)[:count]
        tokens = torch.from_numpy(rng.integers(0, 99, (count, width)))
        num_emitted = torch.from_numpy(rng.integers(0, 1 + width, count))
        tokens[torch.arange(width) >= num_emitted[:, None]] = -1  # a row that was bad emits none
        drafts = torch.from_numpy(rng.integers(-1, 99, (count, width - 1)))
        found = []
        for on_host in (False, True):
            held = NextTokens(6, width, torch.device("cpu"))
            held.ids.fill_(-7)
            named = rows if on_host else torch.from_numpy(rows)
            (held.emitted_on_host if on_host else held.emitted)(named, tokens, num_emitted)
            found.append(held.ids.clone())
            (held.keep_on_host if on_host else held.keep)(named, held.ids[rows, 0], drafts)
            found.append(held.ids.clone())
            assert torch.equal((held.of_on_host if on_host else held.of)(named), held.ids[rows, 0])
            held.ids[rows, 1:] = -9
            if on_host:
                held.keep_on_host(named, None, drafts)
            assert torch.equal(held.ids, found[-1]) is (on_host or width == 1 or not count)
        assert torch.equal(found[0], found[2])
        assert torch.equal(found[1], found[3])


def test_rows_side_by_side_are_one_span_of_memory() -> None:
    tokens = NextTokens(6, 3, torch.device("cpu"))
    tokens.keep(torch.arange(7), torch.arange(7), torch.arange(14).view(7, 2))
    span = tokens.span_of(np.array([2, 3, 4]))
    assert span is not None
    assert span.tokens.tolist() == [2, 3, 4]
    span.drafts[1] = torch.tensor([70, 80])
    assert tokens.drafts_of(torch.tensor([2, 3, 4])).tolist() == [[4, 5], [70, 80], [8, 9]]
    for apart in ([2, 4], [3, 2], [2, 3, 5]):
        assert tokens.span_of(np.array(apart)) is None
