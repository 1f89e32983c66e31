"""Running requests as arrays with one row per request, so that scheduling uses vector operations."""

from __future__ import annotations

from typing import NamedTuple

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
    "adapter_slot",
)


class MissingBlocks(NamedTuple):
    """KV blocks that decoding requests need for their next tokens.

    cells: entries of the flat block table that get a block, request by request. rows: table rows of the requests that
    need blocks. counts: number of blocks that each of them needs.
    """

    cells: NDArray[np.int64]
    rows: NDArray[np.int64]
    counts: Int32s


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
      if requests are padded to one length). `DraftPlanner` writes both before each step is scheduled;
    * `adapter_slot`: slot of the LoRA adapter, 0 for none;
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
    adapter_slot: Int32s

    def __init__(self, max_num_seqs: int, max_model_len: int, max_blocks: int) -> None:
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.drafted = np.zeros((max_num_seqs, max_model_len), dtype=np.bool_)
        self.blocks = BlockTable(np.zeros((max_num_seqs, max_blocks), dtype=np.int32))
        self.last_token_time = np.zeros(max_num_seqs, dtype=np.float64)
        self.must_wait = np.zeros(max_num_seqs, dtype=np.bool_)
        self._counts = np.zeros((len(_COUNTS), max_num_seqs), dtype=np.int32)
        for name, counts in zip(_COUNTS, self._counts, strict=True):
            setattr(self, name, counts)
        self.clear()

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request."""
        return self.token_ids.shape[1]

    @property
    def block_table(self) -> Int32s:
        """KV blocks of each row, (rows, max_blocks), 0 for none."""
        return self.blocks.ids

    def clear(self) -> None:
        """Remove all requests from the table."""
        self.blocks.clear_all()
        self._counts[:] = 0
        self.must_wait[:] = False
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
        self.adapter_slot[row] = request.adapter_slot
        check_all = request.stream or request.detokenizer is not None or request.matcher is not None
        self.check_from[row] = 0 if check_all else request.max_total_tokens
        self.last_token_time[row] = request.times.last_token_time
        request.row, request.table = row, self
        return row

    def release(self, request: Request) -> list[int]:
        """Take the table row from the request; returns its KV blocks."""
        row = request.row
        request.leave()
        request.num_drafts, request.row = int(self.num_proposed[row]), -1
        blocks: list[int] = self.block_table[row, : self.num_blocks[row]].tolist()
        self.blocks.clear(row)
        self._counts[:, row] = 0
        self.must_wait[row] = False
        self.free_rows.append(row)
        return blocks

    def append_tokens(self, rows: NDArray[np.int64], tokens_RK: NDArray[np.int64], counts_R: NDArray[np.int64]) -> None:
        """Append the first `counts` tokens to each of these requests; all but the last of them were drafts.

        rows: (R,) table rows. tokens_RK: (R, K) emitted tokens.
        """
        spots_K = np.arange(tokens_RK.shape[1])
        left_RK = counts_R[:, None] - spots_K
        known_RK = left_RK > 0
        cells_N = ((rows * self.max_model_len + self.num_known[rows])[:, None] + spots_K)[known_RK]
        self.token_ids.reshape(-1)[cells_N] = tokens_RK[known_RK]
        self.drafted.reshape(-1)[cells_N] = left_RK[known_RK] > 1
        self.num_known[rows] += counts_R.astype(np.int32)

    def advance(self, rows: NDArray[np.int64], lens_R: Int32s, num_decodes: int) -> None:
        """Count a launched step that computes `lens` tokens of each request, as if all drafts were accepted.

        The first `num_decodes` requests are past their prompts.
        """
        reach = self.num_computed[rows] + lens_R
        self.num_computed[rows] = reach
        reach += 1  # a row that samples knows the next token, too
        self.num_tokens[rows] = reach if num_decodes == len(rows) else np.maximum(self.num_tokens[rows], reach)
        self.num_uncertain[rows[:num_decodes]] += lens_R[:num_decodes] - 1

    def commit(
        self, rows: NDArray[np.int64], lens_R: Int32s, valid_R: NDArray[np.integer], num_decodes: int
    ) -> tuple[Int32s, Int32s]:
        """Apply the results of a step that computed `lens` tokens of each request. The first `valid` of them stay.

        Returns `num_committed` of the rows before and after, (R,) each.
        """
        before_R = self.num_committed[rows]
        valid_R = valid_R.astype(np.int32)
        self.num_committed[rows] = after_R = before_R + valid_R
        rejected_R = lens_R - valid_R
        self.num_computed[rows] -= rejected_R
        self.num_tokens[rows] -= rejected_R
        self.num_uncertain[rows[:num_decodes]] -= lens_R[:num_decodes] - 1
        return before_R, after_R

    def give_blocks(self, row: int, blocks: list[int]) -> None:
        """Append KV blocks to the block table of a row."""
        if not blocks:
            return
        start = int(self.num_blocks[row])
        self.blocks.write(row, np.arange(start, start + len(blocks)), blocks)
        self.num_blocks[row] = start + len(blocks)

    def missing_blocks(self, rows: NDArray[np.int64], lens_R: Int32s, block_size: int, lookahead: int) -> MissingBlocks:
        """Return the KV blocks that decoding requests need for `lens` tokens, and `lookahead` tokens after them."""
        stored_R = np.minimum(self.num_computed[rows] + lens_R + lookahead, self.max_model_len)
        missing_R = -(-stored_R // block_size) - self.num_blocks[rows]
        short = (missing_R > 0).nonzero()[0]
        rows, counts = rows[short], missing_R[short]
        owners, columns = expand_ranges(rows, self.num_blocks[rows], counts)
        return MissingBlocks(owners * self.block_table.shape[1] + columns, rows, counts)

    def extend_blocks(self, missing: MissingBlocks, blocks: list[int]) -> None:
        """Append KV blocks to the requests that need them. blocks: as many as `missing.cells`."""
        self.blocks.write_cells(missing.cells, blocks)
        self.num_blocks[missing.rows] += missing.counts

    def num_useful_drafts(self, rows: NDArray[np.int64], longest: int, most: int, *, at_least_one: bool) -> Int32s:
        """Return the drafts (R,), at most `most`, that the next step can use.

        A request ends at its limit or at `longest` tokens, and a step emits one token more than it accepts.
        at_least_one: assume that the step in flight emits one token per request; else all that it may emit.
        """
        left = np.minimum(self.limit[rows] - 1, longest) - self.num_tokens[rows]
        if at_least_one:
            left += self.num_uncertain[rows] - 1
        return np.minimum(np.maximum(left, 0), most)
