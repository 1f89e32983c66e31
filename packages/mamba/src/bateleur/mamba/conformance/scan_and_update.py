"""Checks the operators `scan` (prefills) and `update` (decodes that write the state after each token)."""

from itertools import count

import numpy as np
import torch
from torch import Tensor

from bateleur.mamba.conformance.aliases import check_aliases
from bateleur.mamba.conformance.problem import RecurrenceCase, require_unchanged
from bateleur.mamba.metadata import MambaMetadata
from bateleur.mamba.planners import ReplayPlan, SlotPlan
from bateleur.mamba.prefill_chunks import PrefillChunker, PrefillChunks
from bateleur.mamba.recurrence import Tensors
from bateleur.mamba.spec import CacheLayout, MambaCacheMode

_LENS, _COMPUTED = (5, 1, 9, 2, 0), (0, 3, 7, 4, 0)
"""Tokens of prefill rows, and tokens before them; the last row is padding."""
_CUTS = ((5, 1), (5, 2), (7, 3), (6, 4), (16, 5), (16, 8), (16, 16))
"""Block and chunk sizes: rows start and end inside of both, and some chunks have one token."""


def check_scan(problem: RecurrenceCase) -> None:
    """Check outputs and states of prefills of different lengths, for several block and chunk sizes."""
    params, tokens = problem.params(), problem.tokens(sum(_LENS))
    starts = np.add.accumulate([0, *_LENS]).astype(np.int32)
    read = [0, 3, 2, 4, 0]  # rows 0 and 4 start from zero; row 2 also writes slot 2
    initial = problem.states(60, *{*read} - {0})
    truth = [
        problem.run(params, tokens, range(starts[r], starts[r + 1]), problem.start(initial, slot))
        for r, slot in enumerate(read)
    ]
    for block, chunk in _CUTS:
        layout = CacheLayout(MambaCacheMode.ALL, block, 0, 32)
        chunker = PrefillChunker(layout, chunk, problem.prompt_scan)
        chunks = chunker.split(starts, np.array(_COMPUTED, np.int32), _table(layout, problem.device))
        check_aliases(chunks, torch.tensor(read))
        state = initial.clone()
        given = tokens.of(torch.arange(starts[-1]), placeholder=2)
        reads = torch.tensor(read, device=problem.device)
        layer = (params, given.channels, given.gates)
        y = problem.spec.scan(*layer, problem.given(state), chunks, chunker.chunk_size, reads)
        problem.calls["scan"] += 1
        what = f"a scan in blocks of {block} and chunks of {chunk}"
        problem.outputs(y, [y for outputs, _ in truth for y in outputs], what)
        require_unchanged(initial, state, chunks.chunk_write, f"{what}: slot")
        ends, rows = chunks.chunk_start_loc.tolist()[1:], chunks.chunk_row.tolist()
        for end, row, slot in zip(ends, rows, chunks.chunk_write.tolist(), strict=True):
            if slot:
                done, states = end - starts[row], truth[row][1]
                problem.close(state[slot], states[done], f"{what}: the state of row {row} after {done} tokens")


def _table(layout: CacheLayout, device: str) -> Tensor:
    table = 5 + torch.arange(len(_LENS) * layout.columns(), dtype=torch.int32).view(len(_LENS), -1) % 50
    table[2, layout.column(_COMPUTED[2] + 1)] = 0
    table[2, layout.column(_COMPUTED[2] + _LENS[2])] = 2
    return table.to(device)


def check_update(problem: RecurrenceCase) -> None:
    """Check `update` (writes a state per token) with one token, different and equal numbers of tokens per request."""
    drafts, pages = problem.spec.num_speculative_tokens, count(10)
    width, none = 1 + drafts, [0] * drafts

    def fresh() -> list[int]:
        return [next(pages) for _ in range(width)]

    batches = [
        # Consecutive slots, updated in place, and a padded row.
        ([1, 1, 1, 0], [1, 2, 3, 0], [[1, *none], [2, *none], [3, *none], [0, *none]]),
        # To another slot, from a zero state, and in place.
        ([1, 1, 1], [4, 0, 3], [fresh(), fresh(), [3, *none]]),
    ]
    if drafts:
        last = [[4, *fresh()[1:]], fresh(), [*fresh()[:-1], 0], [0, *none]]
        batches += [([width, 1, drafts, 0], [4, 3, 0, 0], last), ([width, width], [2, 1], [fresh(), fresh()])]
    params, slots = problem.params(), next(pages) + 3
    for lens, read, write in batches:
        _update(problem, params, lens, read, write, slots)


def _update(
    problem: RecurrenceCase, params: Tensors, lens: list[int], read: list[int], write: list[list[int]], slots: int
) -> None:
    tokens, initial = problem.tokens(sum(lens)), problem.states(slots, *{*read} - {0})
    state = initial.clone()
    given = tokens.of(torch.arange(sum(lens)), placeholder=lens.count(0))  # one padding token per padded row
    reads = torch.tensor(read, device=problem.device)
    none = torch.zeros_like(reads)
    plan = SlotPlan(reads, torch.tensor(write, device=problem.device), none, none, none, none)
    rows = decode_rows(lens, max(lens), plan, problem.device)
    check_aliases(rows)
    y = problem.spec.update(params, given.channels, given.gates, problem.given(state), rows)
    problem.calls["update"] += 1
    what, outputs, first = f"an update of {lens} tokens", [], 0
    for row, n in enumerate(lens):
        done, states = problem.run(params, tokens, range(first, first + n), problem.start(initial, read[row]))
        outputs += done
        first += n
        for i, slot in enumerate(write[row][:n]):
            if slot:
                problem.close(state[slot], states[1 + i], f"{what}: the state of row {row} after token {i}")
    problem.outputs(y, outputs, what)
    written = [slot for r, n in enumerate(lens) for slot in write[r][:n]]
    require_unchanged(initial, state, torch.tensor(written), f"{what}: slot")


def decode_rows(
    lens: list[int], longest: int, plan: SlotPlan | ReplayPlan, device: str, request_row: Tensor | None = None
) -> MambaMetadata:
    """Return the metadata of a step of decodes with `lens` tokens each.

    longest, request_row: the fields `max_query_len` and `request_row` of the result.
    """
    loc = torch.tensor(np.add.accumulate([0, *lens]), dtype=torch.int32, device=device)
    split = (len(lens), sum(lens), 0)
    return MambaMetadata(*split, plan, loc, PrefillChunks.empty(device), 1, longest, request_row)
