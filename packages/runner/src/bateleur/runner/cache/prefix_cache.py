"""Finding prefixes that were computed before, and keeping those of running requests, for all caches by one chain."""

# Shape letters: R rows of a step.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bateleur.mamba import StatePages
from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.requests.prefix_keys import PrefixKeys
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest prefix of a request that every cache of the model has.

    num_tokens: 0 for none. blocks: its KV blocks. page: the state after it, 0 without Mamba layers. why: if there is no
    hit, what stood in its way.
    """

    num_tokens: int
    blocks: list[int]
    page: int
    why: str = ""


class PrefixCache:
    """Matches requests against published blocks and pages, and publishes what running ones have filled.

    Args:
        table: the running requests.
        blocks: the pool of KV blocks, None for a model without attention.
        block_size: tokens of a KV block.
        states: the state pages, None for a model without Mamba layers; their block size is a multiple of `block_size`.
        lookahead: whether what KV blocks hold depends on the token behind them, as a draft head's does.
    """

    def __init__(
        self,
        table: RequestTable,
        blocks: BlockPool | None,
        block_size: int,
        states: StatePages | None,
        *,
        lookahead: bool = False,
    ) -> None:
        assert blocks is not None or states is not None
        if states is not None and blocks is None:
            block_size = states.block_size
        assert states is None or states.block_size % block_size == 0
        self._table = table
        self._blocks = blocks
        self._states = states
        self._block_keys = PrefixKeys.blocks_ahead if lookahead else PrefixKeys.blocks
        self.block_size = block_size
        self._due = np.zeros(len(table.num_tokens), np.int64)
        """By row, how many computed tokens it takes until there is something to publish, or to give up."""
        self.granularity = block_size if states is None else states.block_size
        """Hits are multiples of this many tokens."""

    def match(self, request: Request) -> Hit:
        """The longest prefix of a request that just got its row, with a token left to compute; nothing is held yet."""
        self._due[request.row] = 0
        if request.lacks_prompt_logprobs:
            return Hit(0, [], 0, "prompt_logprobs take every token of the prompt")
        keys = self._keys(request)
        ids = self._table.token_ids[request.row, : self._table.prefill_len[request.row]].copy()
        longest = (len(ids) - 1) // self.granularity * self.granularity
        if not longest:
            return Hit(0, [], 0, f"{len(ids)} tokens; a hit takes at least {self.granularity + 1}")
        blocks: list[int] = []
        if self._blocks is not None:
            blocks = self._blocks.find_all(self._block_keys(keys, ids, 0, longest // self.block_size))
            longest = len(blocks) * self.block_size // self.granularity * self.granularity
        page, stored = 0, 0 if self._blocks is None else longest
        if self._states is not None:
            while longest and not (page := self._states.pool.find(keys.of(ids, longest))):
                longest -= self.granularity
        if not longest and stored:
            why = (
                f"the KV cache has {stored} of its tokens, but no Mamba state at a multiple of {self.granularity} up "
                "to there is left: the cache mode or its retention did not keep it, or it was evicted"
            )
            return Hit(0, [], 0, why)
        if not longest:
            return Hit(0, [], 0, "no request computed this prefix, or it was evicted")
        return Hit(longest, blocks[: longest // self.block_size], page)

    def publish(
        self,
        requests: list[Request],
        rows: NDArray[np.int64],
        before_R: NDArray[np.int32],
        after_R: NDArray[np.int32],
    ) -> None:
        """Make findable what a step filled: KV blocks here, states as their pages are committed."""
        index = (after_R >= self._due[rows]).nonzero()[0]
        if not len(index):
            return
        token_ids = self._table.token_ids
        rows, before_R, after_R = rows[index], before_R[index], after_R[index]
        requests = [requests[i] for i in index.tolist()]
        prefill_len_R = self._table.prefill_len[rows]
        due_R = (after_R.astype(np.int64) // self.block_size + 1) * self.block_size
        if self._blocks is not None:
            size = self.block_size
            first_R, end_R = before_R // size, after_R // size
            filled = (first_R != end_R).nonzero()[0]
            if len(filled):
                spans = np.stack((filled, rows[filled], first_R[filled], end_R[filled]), 1)
                self._publish_blocks(requests, spans.tolist())
        if self._states is not None:

            def key(index: int, num_tokens: int) -> bytes:
                return self._keys(requests[index]).of(token_ids[rows[index]], num_tokens)

            self._states.commit(rows, before_R, after_R, prefill_len_R, key)
            due_R = np.minimum(due_R, self._states.next_commit(after_R, prefill_len_R))
        self._due[rows] = due_R

    def _publish_blocks(self, requests: list[Request], spans: list[list[int]]) -> None:
        """Blocks first to end - 1 of each (request, row, first, end) are full."""
        assert self._blocks is not None
        for i, row, first, end in spans:
            names = self._block_keys(self._keys(requests[i]), self._table.token_ids[row], first, end)
            held = self._table.block_table[row, first:end].tolist()
            for block, name in zip(held, names, strict=True):
                self._blocks.publish(block, name)

    def forget(self, request: Request) -> None:
        """Drop every key that leads to what a running request found or computed: its numbers are no numbers.

        All of it, since nobody knows which step spoiled them, nor whether they came with a hit.
        """
        row = request.row
        if self._blocks is not None:
            for block in self._table.block_table[row, : self._table.num_blocks[row]].tolist():
                self._blocks.forget(block)
        if self._states is not None:
            keys, ids = self._keys(request), self._table.token_ids[row]
            size, pool = self._states.block_size, self._states.pool
            for num_tokens in range(size, int(self._table.num_settled[row]) + 1, size):
                if page := pool.find(keys.of(ids, num_tokens)):
                    pool.forget(page)

    def _keys(self, request: Request) -> PrefixKeys:
        if request.keys is None:
            request.keys = PrefixKeys(self.block_size)
        return request.keys
