"""Verification under COUPLED in C: what every place's own draw gives, to the token, whatever the rows hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from bateleur.eagle import (
    Coupled,
    Drafts,
    DraftTable,
    Keys,
    Lanes,
    Law,
    Rows,
    SteadyRows,
    Verdict,
    native,
    sample,
    verify,
)
from bateleur.metadata.native import missing
from eagle_doubles.laws import LAWS, NAN, law_of, likely, normal

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no kernels in C: {missing()}")
INF = float("inf")


def rows_of(lens: Sequence[int], starts: Sequence[int] = ()) -> Rows:
    bounds = torch.tensor(starts or [0, *itertools.accumulate(lens)], dtype=torch.int32)
    count = len(bounds) - 1
    return Rows(bounds, torch.arange(count) * 31 - 7, torch.arange(count) * 100 + 3, torch.zeros(count))


def drawn(logits: Tensor, law: Law | None, rows: Rows) -> tuple[Tensor, Tensor]:
    """Of every row of logits by itself."""
    lens = rows.query_start_loc.diff()
    owner = torch.arange(len(lens)).repeat_interleave(lens)
    spot = torch.arange(len(owner)) - rows.query_start_loc[:-1].long()[owner]
    keys = Keys(rows.seeds[owner], rows.first_position[owner] + spot)
    law = law or law_of(*[(0.0, 0.0, 0, 1.0)] * len(logits))
    used = Law(law.host[: len(owner)], law.values[: len(owner)])
    return sample(logits[: len(owner)], used, keys)


def by_hand(tokens: Tensor, bad: Tensor, drafts: Tensor, rows: Rows) -> list[tuple[list[int], bool]]:
    found, starts = [], rows.query_start_loc.tolist()
    for r, (first, end) in enumerate(itertools.pairwise(starts)):
        emitted: list[int] = []
        for i in range(end - first):
            if bad[first + i]:
                break
            emitted.append(int(tokens[first + i]))
            if i == drafts.shape[1] or emitted[-1] != int(drafts[r, i]):
                break
        at = first + len(emitted)
        follows = not emitted or (
            len(emitted) <= drafts.shape[1] and emitted[-1] == int(drafts[r, len(emitted) - 1])
        )
        found.append((emitted, at < end and follows and bool(bad[at])))
    return found


def lists(verdict: Verdict) -> list[tuple[list[int], bool]]:
    found = []
    for tokens, count, bad in zip(*(each.tolist() for each in verdict), strict=True):
        assert tokens[count:] == [-1] * (len(tokens) - count)
        found.append((tokens[:count], bad))
    return found


LENS = [3, 0, 1, 5, 2, 5, 4, 5, 1]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("size", [5, 129, 9000])
def test_rows_emit_what_each_place_draws(size: int, greedy: bool, dtype: torch.dtype, threads: int) -> None:
    """Ragged rows of any law, bad ones among them, drafts that are the draw, another token, or none."""
    rows, total, before = rows_of(LENS), sum(LENS) + 2, torch.get_num_threads()
    logits = (normal if size < 9000 else likely)(2 * total, size + 3).to(dtype)[::2, 2:-1]
    logits[4], logits[13, 1], logits[20] = NAN, NAN, -INF
    law = None if greedy else law_of(*(LAWS[i % len(LAWS)] for i in range(total)))
    tokens, bad = drawn(logits, law, rows)
    wide = torch.full((len(LENS), 9), 1)
    drafts = wide[:, :8:2]
    for r, (first, end) in enumerate(itertools.pairwise(rows.query_start_loc.tolist())):
        for i in range(min(4, end - first)):
            drafts[r, i] = (
                tokens[first + i] if (r + i) % 4 else (-1 if r % 2 else (tokens[first + i] + 1) % size)
            )
    torch.set_num_threads(threads)
    try:
        found = verify(logits, Drafts(drafts, Coupled()), rows, greedy=greedy, law=law)
    finally:
        torch.set_num_threads(before)
    want = by_hand(tokens, bad, drafts, rows)
    assert lists(found) == want
    assert any(len(emitted) > 2 for emitted, _ in want)
    assert any(bad for _, bad in want)


def test_what_only_the_whole_law_tells_is_told_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then every row is, by the form in torch's operators; as where rows name logits that are not there."""
    rows, logits = rows_of([3, 2]), likely(5, 400)
    law = law_of(*LAWS[:5])
    tokens, _ = drawn(logits, law, rows)
    drafts = Drafts(torch.stack((tokens[:2], tokens[3:5])), Coupled())
    want = verify(logits, drafts, rows, law=law)
    asked: list[object] = []
    kernel = native.coupled_rows

    def leaves_open(*args: Tensor) -> None:
        asked.append(kernel(*args))

    monkeypatch.setattr(native, "coupled_rows", leaves_open)
    for found, expected in zip(verify(logits, drafts, rows, law=law), want, strict=True):
        assert torch.equal(found, expected)
    assert asked[0] is not None
    monkeypatch.undo()
    for starts in ([0, 3, 6], [-1, 2, 5], [0, 4, 3]):
        bounds = torch.tensor(starts, dtype=torch.int32)
        args = (torch.zeros(400, dtype=torch.int32), rows.seeds, rows.first_position, bounds, drafts.tokens)
        assert native.coupled_rows(logits, law.values, *args) is None


def test_a_draw_behind_the_first_that_differs_is_not_made() -> None:
    """So nothing there can leave a step open: here a row whose maximum is infinite."""
    logits = torch.full((2, 300), -50.0)
    logits[0, 7], logits[1, 9] = 50.0, INF
    law, rows = law_of(*[(1.0, 0.0, 0, 1.0)] * 2), rows_of([2])
    args = (torch.zeros(300, dtype=torch.int32), rows.seeds, rows.first_position, rows.query_start_loc)
    found = native.coupled_rows(logits, law.values, *args, torch.tensor([[8]]))
    assert found is not None
    assert lists(Verdict(*found)) == [([7], False)]
    assert native.coupled_rows(logits, law.values, *args, torch.tensor([[7]])) is None


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("size", [129, 9000])
def test_rows_of_a_table_emit_what_they_would_apart(size: int, greedy: bool, threads: int) -> None:
    """With fewer drafts than places, drafts left out, and bad rows; and each is left its last token."""
    lens, places = [3, 1, 5, 2, 5, 4, 5, 1], np.array([7, 2, 9, 0, 4, 1, 8, 3])
    rows, total, before = rows_of(lens), sum(lens), torch.get_num_threads()
    logits = likely(total, size)
    logits[3], logits[13, 1], logits[20] = NAN, NAN, -INF
    law = None if greedy else law_of(*(LAWS[i % len(LAWS)] for i in range(total)))
    tokens, _ = drawn(logits, law, rows)
    next_ids, num_drafts = np.full((11, 5), 77), np.arange(11, dtype=np.int32) % 2 + 3
    drafts = torch.full((len(lens), 4), -1)
    for r, (first, end) in enumerate(itertools.pairwise(rows.query_start_loc.tolist())):
        own = tokens[first : end - 1]
        next_ids[places[r], 1 : end - first] = own
        next_ids[places[r], 2] = (-1, next_ids[places[r], 2])[r % 3 > 0]
        count = min(num_drafts[places[r]], end - first - 1)
        drafts[r, :count] = torch.from_numpy(next_ids[places[r], 1 : 1 + count])
    want, kept = verify(logits, Drafts(drafts, Coupled()), rows, greedy=greedy, law=law), next_ids.copy()
    lanes, positions = Lanes.of(size + 9, logits.device), torch.zeros(total, dtype=torch.int64)
    first_token = torch.arange(len(lens)) * 2
    positions[first_token] = rows.first_position - 1
    table, starts = DraftTable(places, next_ids, num_drafts), rows.query_start_loc
    steady = SteadyRows(table, starts, first_token, rows.seeds, law, lanes)
    torch.set_num_threads(threads)
    try:
        found = steady.verify(logits, positions)
    finally:
        torch.set_num_threads(before)
    assert found is not None
    packed, emitted = map(torch.from_numpy, found)
    assert torch.equal(
        packed, torch.cat((emitted[:, None], want.bad.long()[:, None], want.tokens, drafts), 1)
    )
    assert torch.equal(emitted, want.num_emitted)
    assert {0, 5} <= set(emitted.tolist())
    kept[places, 0] = [
        own[max(n - 1, 0)] if n else 0 for own, n in zip(want.tokens.tolist(), emitted, strict=True)
    ]
    assert np.array_equal(next_ids, kept)


def test_rows_of_a_table_stay_as_they_are_where_something_is_left_open() -> None:
    """Where logits are not there, or a draw takes the whole law."""
    logits, words = likely(4, 300), Lanes.of(300, torch.device("cpu"))
    next_ids, places, seeds = np.full((2, 4), 5), np.array([1]), torch.zeros(1, dtype=torch.int64)
    positions, num_drafts = torch.zeros(4, dtype=torch.int64), np.full(2, 3, np.int32)
    for starts, law in (([-1, 3], None), ([1, 5], None), ([0, 4], law_of(*[(1.0, 0.0, 0, 1.0)] * 4))):
        some = logits if law is None else torch.zeros_like(logits)
        some = some if law is None else some.masked_fill(torch.arange(300) % 2 == 0, INF)
        table, bounds = DraftTable(places, next_ids, num_drafts), torch.tensor(starts, dtype=torch.int32)
        steady = SteadyRows(table, bounds, torch.zeros(1, dtype=torch.int64), seeds, law, words)
        assert steady.verify(some, positions) is None
        assert (next_ids == 5).all()
