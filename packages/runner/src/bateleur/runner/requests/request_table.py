"""The running requests as arrays: one row each, so that scheduling is vector operations."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bateleur.metadata import BlockTable, expand_ranges
from bateleur.runner.requests.request import Request


class Lacking(NamedTuple):
    """What rows past their prompts lack for their next tokens; of many rows with many tokens each numpy says so."""

    num_tokens: int
    """Of all these rows."""
    as_taken: bool
    """Whether each has as many as it was taken to have."""
    cells: NDArray[np.int64]
    """Entries of the flat block table that get a block, row by row."""
    rows: NDArray[np.int64]
    """Whose they are, and `counts` how many."""
    counts: NDArray[np.int32]


class RequestTable:
    """Host state of up to `max_num_seqs` running requests.

    A row belongs to a request from admission to finish, abort or preemption, and never moves in between.
    Arrays, all indexed by row:

    * `token_ids` (rows, max_model_len) int32: every known token, `num_known` (rows,) int32; lists of `Request` follow
      when they are read;
    * `drafted` (rows, max_model_len) bool: of these, those that were drafts;
    * `last_token_time` (rows,) float64: when the last of them came, 0 if none did;
    * `watched_from` (rows,) int32: the length from which on a token has to be looked at alone: `limit`, or 0 where each
      has to, since the request streams, or its text or grammar goes on with it;
    * `num_tokens`, `num_computed` (rows,) int32: tokens known, and tokens whose state is in the caches; both count
      those of a step in flight, and all of its drafts as accepted: bounds, too high by `slack` (rows,) at most;
    * `num_settled` (rows,) int32: of `num_computed`, those of steps whose outcome is known;
    * `rests` (rows,) int32: not 0 where the next step of the row can't be planned from bounds;
    * `prompt_len`, `prefill_len`, `limit` (rows,) int32: tokens of the prompt, tokens computed before it decodes (more
      than the prompt after a preemption), and the length at which the request ends;
    * `num_proposed` (rows,) int32: drafts for the tokens after the last known one, which wait on the device;
    * `num_drafts`, `num_places` (rows,) int32: how many of them the next step tests, and tokens that it computes for
      them: more where rows are padded to one length. Written by `DraftPlanner` before each step is scheduled;
    * `block_table` (rows, max_blocks) int32 and `num_blocks` (rows,) int32: KV blocks, 0 where none; written through
      `blocks`.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, max_blocks: int) -> None:
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.blocks = BlockTable(np.zeros((max_num_seqs, max_blocks), dtype=np.int32))
        self.block_table = self.blocks.ids
        self.drafted = np.zeros((max_num_seqs, max_model_len), dtype=np.bool_)
        self.last_token_time = np.zeros(max_num_seqs, dtype=np.float64)
        self._flat_ids, self._flat_drafted = self.token_ids.reshape(-1), self.drafted.reshape(-1)
        self._spots = np.arange(max_model_len)
        self._numbers = [np.zeros(max_num_seqs, dtype=np.int32) for _ in range(14)]
        self.num_tokens, self.num_computed, self.num_blocks, self.limit = self._numbers[:4]
        self.prompt_len, self.prefill_len, self.num_drafts, self.num_places = self._numbers[4:8]
        self.num_settled, self.slack, self.rests = self._numbers[8:11]
        self.num_known, self.watched_from, self.num_proposed = self._numbers[11:]
        self.clear()

    def clear(self) -> None:
        """No row belongs to a request."""
        self.blocks.clear_all()
        for array in self._numbers:
            array[:] = 0
        self._free_rows = list(range(len(self.num_tokens) - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        """Requests that could be admitted now."""
        return len(self._free_rows)

    def admit(self, request: Request) -> int:
        """Give the request a row that knows its tokens and has computed none of them."""
        row = self._free_rows.pop()
        count = request.num_tokens
        self.token_ids[row, :count] = request.token_ids
        self.num_tokens[row] = self.num_known[row] = count
        # The last token is computed together with the drafts after it, as it would have been without the preemption.
        num_drafts = max(0, min(request.num_drafts, request.max_total_tokens - 1 - count))
        self.prefill_len[row] = count - (num_drafts > 0)
        self.num_proposed[row] = self.num_drafts[row] = self.num_places[row] = num_drafts
        self.prompt_len[row] = len(request.prompt_token_ids)
        self.limit[row] = request.max_total_tokens
        alone = request.stream or request.detokenizer is not None or request.matcher is not None
        self.watched_from[row] = 0 if alone else request.max_total_tokens
        self.last_token_time[row] = request.times.last_token_time
        request.row, request.table = row, self
        return row

    def release(self, request: Request) -> list[int]:
        """Take the row back; returns the KV blocks it held."""
        row = request.row
        request.leave()
        request.num_drafts, request.row = int(self.num_proposed[row]), -1
        held: list[int] = self.block_table[row, : self.num_blocks[row]].tolist()
        self.blocks.clear(row)
        for array in self._numbers:
            array[row] = 0
        self._free_rows.append(row)
        return held

    def write(
        self,
        rows: NDArray[np.int64],
        tokens_RK: NDArray[np.int64],
        counts_R: NDArray[np.int64],
    ) -> None:
        """The first `counts` of each row of `tokens` are known from now on, behind those that were; all but the last of
        them were drafts.
        """
        first_R = self.num_known[rows]
        cells_R = rows * self.token_ids.shape[1] + first_R
        if tokens_RK.shape[1] == 1 and np.count_nonzero(counts_R) == len(counts_R):
            self._flat_ids[cells_R] = tokens_RK[:, 0]
            self._flat_drafted[cells_R] = False
        else:
            spots_K = self._spots[: tokens_RK.shape[1]]
            behind_RK = counts_R[:, None] - spots_K
            known_RK = behind_RK > 0
            cells_N = (cells_R[:, None] + spots_K)[known_RK]
            self._flat_ids[cells_N] = tokens_RK[known_RK]
            self._flat_drafted[cells_N] = behind_RK[known_RK] > 1
        self.num_known[rows] = first_R + counts_R

    def settle(
        self,
        rows: NDArray[np.int64],
        lens_R: NDArray[np.int32],
        tokens_RK: NDArray[np.int64],
        counts_R: NDArray[np.int64],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The outcome of a step of these rows past their prompts, which computed `lens` tokens each, is known: `write`,
        where of what the step computed as many tokens stay.

        Returns what was settled of each before, and what is now, (R,) each.
        """
        self.write(rows, tokens_RK, counts_R)
        before_R = self.num_settled[rows]
        after_R = before_R + counts_R.astype(np.int32)
        self.num_settled[rows] = after_R
        lost_R = lens_R - (after_R - before_R)
        self.num_computed[rows] -= lost_R
        self.num_tokens[rows] -= lost_R
        self.slack[rows] -= lens_R - 1
        return before_R, after_R

    def give_blocks(self, row: int, blocks: list[int]) -> None:
        """Append KV blocks to a row."""
        if not blocks:
            return
        start = int(self.num_blocks[row])
        self.blocks.write(row, np.arange(start, start + len(blocks)), blocks)
        self.num_blocks[row] = start + len(blocks)

    def extend_blocks(self, lacks: Lacking, blocks: list[int]) -> None:
        """Append KV blocks to the rows that lack them."""
        self.blocks.write_cells(lacks.cells, blocks)
        self.num_blocks[lacks.rows] += lacks.counts

    def lacking(
        self,
        rows: NDArray[np.int64],
        lens_R: NDArray[np.int32] | None,
        block_size: int,
        ahead: int,
    ) -> Lacking:
        """What KV blocks rows past their prompts lack for their next tokens, and for `ahead` behind these; `block_size`
        is 0 where there are none. `lens`: how many tokens each is taken to have, if anybody knows.
        """
        columns, longest = self.block_table.shape[1], self.token_ids.shape[1]
        now_R = self.num_places[rows] + np.array(1, np.int32)
        missing_R = np.zeros_like(now_R)
        if block_size:
            stored_R = np.minimum(self.num_computed[rows] + now_R + ahead, longest)
            missing_R = -(-stored_R // block_size) - self.num_blocks[rows]
        few = (missing_R > 0).nonzero()[0]
        rows, counts = rows[few], missing_R[few]
        which, spots = expand_ranges(rows, self.num_blocks[rows], counts)
        as_taken = lens_R is not None and np.array_equal(now_R, lens_R)
        return Lacking(int(now_R.sum()), as_taken, which * columns + spots, rows, counts)

    def advance(self, rows: NDArray[np.int64], lens_R: NDArray[np.int32], num_decodes: int) -> None:
        """A step was launched that computes `lens` tokens of each of these rows, of which the first are past their
        prompts: bounds count these, and all of its drafts as accepted.
        """
        reach = self.num_computed[rows] + lens_R
        self.num_computed[rows] = reach
        reach += 1  # one that draws knows the next token, too
        self.num_tokens[rows] = (
            reach if num_decodes == len(rows) else np.maximum(self.num_tokens[rows], reach)
        )
        self.slack[rows[:num_decodes]] += lens_R[:num_decodes] - 1

    def useful(self, rows: NDArray[np.int64], longest: int, most: int, *, least: bool) -> NDArray[np.int32]:
        """(R,) drafts, at most `most`, that can be of use behind the known tokens of these rows, which end at their
        limit or at `longest`: a step emits one token more than it accepts.

        least: behind the one that the step in flight emits at least; else behind all that it may emit.
        """
        left = np.minimum(self.limit[rows] - 1, longest) - self.num_tokens[rows]
        if least:
            left += self.slack[rows] - 1
        return np.minimum(np.maximum(left, 0), most)  # half the time of `clip`
