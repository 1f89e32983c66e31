"""Finding prefixes that were computed before, and keeping those of running requests, for all caches by one chain."""

# Shape letters: R rows of a step.

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bateleur.mamba import MambaStateManager
from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.requests.prefix_keys import PrefixKeys
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.requests.row_keys import RowKeys


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


class Below(Protocol):
    """Where blocks and pages lie for which the device has no room, by what they are published as."""

    def has_block(self, name: bytes) -> bool:
        """Whether it has a KV block."""

    def has_page(self, key: bytes) -> bool:
        """Whether it has the state behind a prefix."""

    def load(self, blocks: list[bytes], page: bytes | None, num_tokens: int) -> None:
        """Publish all of these on the device, each of which is there or below; nothing, if it has no room.

        num_tokens: how many more of a request's are found with them.
        """

    def forget(self, blocks: list[bytes], pages: list[bytes]) -> None:
        """Nobody is to find these."""

    def fetch(self, request: Request, keys: PrefixKeys, ids: NDArray[np.int32], most: int) -> bool:
        """Whether it is being made ready to find more of the first `most` tokens, so that the request had better wait
        until it has `arrived`."""

    def arrived(self) -> list[Request]:
        """Requests that wait no longer, since they were asked for last."""

    def save(self, keys: PrefixKeys, ids: NDArray[np.int32], num_tokens: int, prompt_len: int) -> None:
        """A request has ended of which so many tokens were published, the first of them its prompt."""


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
        states: MambaStateManager | None,
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
        self.ahead = int(lookahead)
        """Tokens behind a prefix that its last block depends on."""
        self._block_keys = PrefixKeys.blocks_ahead if lookahead else PrefixKeys.blocks
        self.block_size = block_size
        self.below: Below | None = None
        """Where else prefixes may be found."""
        self._row_keys = RowKeys(
            table.token_ids, None if blocks is None else table.block_table, block_size, ahead=lookahead
        )
        self.granularity = block_size if states is None else states.block_size
        """Hits are multiples of this many tokens."""

    def match(self, request: Request) -> Hit:
        """The longest prefix of a request that just got its row, with a token left to compute; nothing is held yet."""
        hit = self._match(request)
        self._row_keys.begin(request.row, self._keys(request), hit.num_tokens)
        return hit

    def _match(self, request: Request) -> Hit:
        if request.lacks_prompt_logprobs:
            return Hit(0, [], 0, "prompt_logprobs take every token of the prompt")
        ids = self._table.token_ids[request.row, : self._table.prefill_len[request.row]].copy()
        keys, most = self._keys(request), len(ids) - 1
        hit = self.find(keys, ids, most)
        if self.below is not None and (longest := self._reach(keys, ids, most, self.below)) > hit.num_tokens:
            blocks = [] if self._blocks is None else self.names(keys, ids, 0, longest // self.block_size)
            page = None if self._states is None else keys.of(ids, longest)
            self.below.load(blocks, page, longest - hit.num_tokens)
            hit = self.find(keys, ids, most)
        return hit

    def fetch(self, request: Request) -> bool:
        """Whether a request without a row had better wait until it is among `arrived`; it is asked for once."""
        if self.below is None or request.fetched or request.lacks_prompt_logprobs:
            return False
        request.fetched = True
        ids = np.array(request.token_ids, np.int32)
        return self.below.fetch(request, self._keys(request), ids, len(ids) - 1)

    def left(self, request: Request) -> None:
        """A request ends that still has its row."""
        if self.below is None or request.finish_reason == "error":
            return
        known, settled = int(self._table.num_known[request.row]), int(self._table.num_settled[request.row])
        ids = self._table.token_ids[request.row, :known].copy()
        prompt_len = int(self._table.prompt_len[request.row])
        self.below.save(self._keys(request), ids, min(settled, known - self.ahead), prompt_len)

    def _reach(self, keys: PrefixKeys, ids: NDArray[np.int32], most: int, below: Below) -> int:
        """The longest prefix of which everything is on the device or below."""
        longest = most // self.granularity * self.granularity
        if self._blocks is not None and longest:
            names = self.names(keys, ids, 0, longest // self.block_size)
            count = len(self._blocks.find_all(names))
            while count < len(names) and (below.has_block(names[count]) or self._blocks.find(names[count])):
                count += 1
            longest = count * self.block_size // self.granularity * self.granularity
        if self._states is not None:
            pool = self._states.pool
            while longest and not (pool.find(key := keys.of(ids, longest)) or below.has_page(key)):
                longest -= self.granularity
        return longest

    def find(self, keys: PrefixKeys, ids: NDArray[np.int32], most: int) -> Hit:
        """The longest prefix of tokens `ids` that is no longer than `most`; nothing is held yet."""
        longest = most // self.granularity * self.granularity
        if not longest:
            return Hit(0, [], 0, f"{len(ids)} tokens; a hit takes at least {self.granularity + 1}")
        blocks: list[int] = []
        if self._blocks is not None:
            blocks = self._blocks.find_all(self.names(keys, ids, 0, longest // self.block_size))
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

    def names(self, keys: PrefixKeys, ids: NDArray[np.int32], first: int, end: int) -> list[bytes]:
        """What the blocks `first` to `end - 1` of tokens `ids` are published as; the token behind them must be there
        where they depend on it."""
        return self._block_keys(keys, ids, first, end)

    def publish(
        self,
        rows: NDArray[np.int64],
        before_R: NDArray[np.int32],
        after_R: NDArray[np.int32],
    ) -> None:
        """Make findable what a step filled: KV blocks here, states as their pages are committed."""
        blocks, names = self._row_keys.advance(rows, after_R)
        if names and self._blocks is not None:
            self._blocks.publish_all(blocks, names)
        if self._states is not None:
            prefill_len_R = self._table.prefill_len[rows]
            self._states.commit(rows, before_R, after_R, prefill_len_R, self._row_keys.of)

    def forget(self, request: Request) -> None:
        """Drop every key that leads to what a running request found or computed: its numbers are no numbers.

        All of it, since nobody knows which step spoiled them, nor whether they came with a hit.
        """
        row, keys = request.row, self._keys(request)
        settled, ids = int(self._table.num_settled[row]), self._table.token_ids[row]
        blocks: list[bytes] = []
        pages: list[bytes] = []
        if self._blocks is not None:
            for block in self._table.block_table[row, : self._table.num_blocks[row]].tolist():
                self._blocks.forget(block)
            known = min(settled, int(self._table.num_known[row]) - self.ahead)
            blocks = self.names(keys, ids, 0, max(known, 0) // self.block_size)
        if self._states is not None:
            size, pool = self._states.block_size, self._states.pool
            pages = [keys.of(ids, num_tokens) for num_tokens in range(size, settled + 1, size)]
            for page in filter(None, map(pool.find, pages)):
                pool.forget(page)
        if self.below is not None:
            self.below.forget(blocks, pages)

    def _keys(self, request: Request) -> PrefixKeys:
        if request.keys is None:
            request.keys = PrefixKeys(self.block_size)
        return request.keys
