"""Running requests as arrays with one row per request, so that scheduling uses vector operations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bateleur.metadata import BlockTable, expand_ranges
from bateleur.runner.requests.request import Request

Int32s = NDArray[np.int32]

_COUNTS = (
    "num_tokens",
    "num_computed",
    "num_blocks",
    "limit",
    "prompt_len",
    "prefill_len",
    "num_drafts",
    "num_draft_slots",
    "num_committed",
    "num_uncertain",
    "num_known",
    "check_from",
    "num_proposed",
)


class RequestTable:
    """Host state of up to `max_num_seqs` running requests.

    A row belongs to a request from admission to finish, abort or preemption, and never moves in between. Arrays, all
    indexed by row, (rows,) int32 unless noted:

    * `token_ids` (rows, max_model_len): every known token, `num_known` of them. `Request` copies them when it is read;
    * `drafted` (rows, max_model_len) bool: whether a known token was a draft;
    * `last_token_time` (rows,) float64: time of the last token, 0 before the first;
    * `check_from`: length from which each token must be checked for the end of the request: `limit`, or 0 if each
      token must be checked because the request streams, or its text or grammar needs it;
    * `num_tokens`, `num_computed`: known tokens, and tokens whose state is in the caches. Both count the step in
      flight with all its drafts as accepted, so they are too high by at most `num_uncertain`;
    * `num_committed`: computed tokens of steps whose results are known;
    * `must_wait` (rows,) bool: whether the next step of the request can't be planned from upper bounds;
    * `prompt_len`, `prefill_len`, `limit`: tokens of the prompt, tokens computed before the row decodes (more than the
      prompt after a preemption), and the length at which the request ends;
    * `num_proposed`: drafts after the last known token, which are on the device;
    * `num_drafts`, `num_draft_slots`: how many of them the next step tests, and tokens that it computes for them (more
      if rows are padded to one length). `DraftPlanner` writes both before each step is scheduled;
    * `num_blocks`: KV blocks in `block_table`, which is written through `blocks`.
    """

    num_tokens: Int32s
    num_computed: Int32s
    num_blocks: Int32s
    limit: Int32s
    prompt_len: Int32s
    prefill_len: Int32s
    num_drafts: Int32s
    num_draft_slots: Int32s
    num_committed: Int32s
    num_uncertain: Int32s
    num_known: Int32s
    check_from: Int32s
    num_proposed: Int32s

    def __init__(self, max_num_seqs: int, max_model_len: int, max_blocks: int) -> None:
        self.max_model_len = max_model_len
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.drafted = np.zeros((max_num_seqs, max_model_len), dtype=np.bool_)
        self.blocks = BlockTable(np.zeros((max_num_seqs, max_blocks), dtype=np.int32))
        self.last_token_time = np.zeros(max_num_seqs, dtype=np.float64)
        self.must_wait = np.zeros(max_num_seqs, dtype=np.bool_)
        for name in _COUNTS:
            setattr(self, name, np.zeros(max_num_seqs, dtype=np.int32))
        self.clear()

    @property
    def block_table(self) -> Int32s:
        """KV blocks of each row, (rows, max_blocks), 0 for none."""
        return self.blocks.ids

    def clear(self) -> None:
        """Remove all requests from the table."""
        self.blocks.clear_all()
        self._reset(slice(None))
        self.free_rows = list(range(len(self.token_ids) - 1, -1, -1))

    def admit(self, request: Request) -> int:
        """Give the request a table row with its known tokens, none of them computed; returns the row."""
        row = self.free_rows.pop()
        count = request.num_tokens
        self.token_ids[row, :count] = request.token_ids
        self.num_tokens[row] = self.num_known[row] = count
        # The last token is computed together with the drafts after it, as it would have been without the preemption.
        num_drafts = max(0, min(request.num_drafts, request.max_total_tokens - 1 - count))
        self.prefill_len[row] = count - (num_drafts > 0)
        self.num_proposed[row] = self.num_drafts[row] = self.num_draft_slots[row] = num_drafts
        self.prompt_len[row] = len(request.prompt_token_ids)
        self.limit[row] = request.max_total_tokens
        check_all = request.output.stream or request.output.detokenizer is not None or request.matcher is not None
        self.check_from[row] = 0 if check_all else request.max_total_tokens
        self.last_token_time[row] = request.times.last_token_time
        request.enter(self, row)
        return row

    def release(self, request: Request) -> list[int]:
        """Take the table row from the request; returns its KV blocks."""
        row = request.row
        request.leave()
        request.num_drafts, request.row = int(self.num_proposed[row]), -1
        blocks: list[int] = self.block_table[row, : self.num_blocks[row]].tolist()
        self.blocks.clear(row)
        self._reset(row)
        self.free_rows.append(row)
        return blocks

    def _reset(self, rows: int | slice) -> None:
        for name in _COUNTS:
            getattr(self, name)[rows] = 0
        self.must_wait[rows] = False

    def give_blocks(self, row: int, blocks: list[int]) -> None:
        """Append KV blocks to the block table of a row."""
        if not blocks:
            return
        start = int(self.num_blocks[row])
        self.blocks.write(row, np.arange(start, start + len(blocks)), blocks)
        self.num_blocks[row] = start + len(blocks)

    def append_blocks(self, rows: NDArray[np.int64], counts: Int32s, blocks: list[int]) -> None:
        """Append KV blocks to several requests: `counts[i]` of `blocks`, in order, to the distinct row `rows[i]`."""
        owners, columns = expand_ranges(rows, self.num_blocks[rows], counts)
        self.blocks.write_cells(owners * self.block_table.shape[1] + columns, blocks)
        self.num_blocks[rows] += counts

    def num_useful_drafts(self, rows: NDArray[np.int64], longest: int, most: int, *, at_least_one: bool) -> Int32s:
        """Return the number of drafts (R,), at most `most`, that each request's next step can use.

        longest: maximum sequence length, drafts included, for which drafts can be proposed.
        at_least_one: assume that a step in flight emits one token per request; otherwise, that all drafts are accepted.
        """
        left = np.minimum(self.limit[rows] - 1, longest) - self.num_tokens[rows]
        if at_least_one:
            left += self.num_uncertain[rows]
        return np.minimum(np.maximum(left, 0), most)
