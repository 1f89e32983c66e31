"""The prefix cache of KV blocks and states: finds cached prefixes, and adds blocks of running requests."""

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
    """The longest prefix of a request that is in all caches of the model.

    num_tokens: 0 for a miss. blocks: KV blocks of the prefix. page: state page after it, 0 without Mamba layers. why:
    reason of a miss.
    """

    num_tokens: int
    blocks: list[int]
    page: int
    why: str = ""


class OffloadTiers(Protocol):
    """Interface of the offload tiers (host memory, disk). They store KV blocks and states by prefix-cache key."""

    def has_block(self, name: bytes) -> bool:
        """Return whether the tiers have the KV block of this key."""

    def has_page(self, key: bytes) -> bool:
        """Return whether the tiers have the state after the prefix with this key."""

    def load(self, blocks: list[bytes], page: bytes | None, num_tokens: int) -> None:
        """Copy these blocks and this state to the device and add them to its prefix cache; nothing if there is no room.

        num_tokens: number of additional prefix tokens that the request then finds.
        """

    def forget(self, blocks: list[bytes], pages: list[bytes]) -> None:
        """Remove KV blocks and state pages with these keys from the tiers."""

    def fetch(self, request: Request, keys: PrefixKeys, ids: NDArray[np.int32], max_tokens: int) -> bool:
        """Start to load the uncached part of the prefix of `ids`, at most `max_tokens` tokens, from disk.

        Returns whether the request must wait until `arrived` returns it.
        """

    def arrived(self) -> list[Request]:
        """Return the requests whose loads have finished since the last call."""

    def save(self, keys: PrefixKeys, ids: NDArray[np.int32], num_tokens: int, prompt_len: int) -> None:
        """Offload KV blocks and states of the first `num_tokens` tokens of an ended request.

        keys: computes the cache keys. ids: its token ids. prompt_len: length of its prompt.
        """


class PrefixCache:
    """Finds cached prefixes of requests, and adds KV blocks and states (state pages) of running requests.

    table: the running requests.
    blocks: the pool of KV blocks; None for a model without attention.
    block_size: tokens of a KV block.
    states: the state pages; None for a model without Mamba layers. Their block size is a multiple of `block_size`.
    lookahead: whether the contents of KV blocks depend on the token after them, as a draft head's do.
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
        self.num_lookahead_tokens = int(lookahead)
        """Tokens after a prefix that its last block depends on."""
        self._compute_keys = PrefixKeys.blocks_with_lookahead if lookahead else PrefixKeys.blocks
        self.block_size = block_size
        self.offload_tiers: OffloadTiers | None = None
        """Offload tiers, if there are any."""
        self._row_keys = RowKeys(
            table.token_ids, None if blocks is None else table.block_table, block_size, lookahead=lookahead
        )
        self.granularity = block_size if states is None else states.block_size
        """Hits are multiples of this many tokens."""

    def match(self, request: Request) -> Hit:
        """Return the longest cached prefix of a request that just got its row in the request table.

        At least one token remains to compute. Adds no references to blocks.
        """
        hit = self._match(request)
        self._row_keys.begin(request.row, self._keys(request), hit.num_tokens)
        return hit

    def _match(self, request: Request) -> Hit:
        if request.lacks_prompt_logprobs:
            return Hit(0, [], 0, "prompt_logprobs compute every token of the prompt")
        ids = self._table.token_ids[request.row, : self._table.prefill_len[request.row]].copy()
        keys, max_tokens = self._keys(request), len(ids) - 1
        hit = self.find(keys, ids, max_tokens)
        if (
            self.offload_tiers is not None
            and (longest := self._longest_prefix(keys, ids, max_tokens, self.offload_tiers)) > hit.num_tokens
        ):
            blocks = [] if self._blocks is None else self.block_keys(keys, ids, 0, longest // self.block_size)
            page = None if self._states is None else keys.of(ids, longest)
            self.offload_tiers.load(blocks, page, longest - hit.num_tokens)
            hit = self.find(keys, ids, max_tokens)
        return hit

    def fetch(self, request: Request) -> bool:
        """Start to load a waiting request's prefix from disk, if useful; return whether it must wait for `arrived`."""
        if self.offload_tiers is None or request.prefix.fetched or request.lacks_prompt_logprobs:
            return False
        request.prefix.fetched = True
        ids = np.array(request.token_ids, np.int32)
        return self.offload_tiers.fetch(request, self._keys(request), ids, len(ids) - 1)

    def offload(self, request: Request) -> None:
        """Offer the prefix of an ended request, which still has its table row, to the offload tiers."""
        if self.offload_tiers is None or request.finish_reason == "error":
            return
        known, settled = int(self._table.num_known[request.row]), int(self._table.num_committed[request.row])
        ids = self._table.token_ids[request.row, :known].copy()
        prompt_len = int(self._table.prompt_len[request.row])
        self.offload_tiers.save(self._keys(request), ids, min(settled, known - self.num_lookahead_tokens), prompt_len)

    def _longest_prefix(
        self, keys: PrefixKeys, ids: NDArray[np.int32], max_tokens: int, offload_tiers: OffloadTiers
    ) -> int:
        """Return the length of the longest prefix of `ids` on the device or in the offload tiers, at most
        `max_tokens`.
        """
        longest = max_tokens // self.granularity * self.granularity
        if self._blocks is not None and longest:
            block_keys = self.block_keys(keys, ids, 0, longest // self.block_size)
            count = len(self._blocks.find_all(block_keys))
            while count < len(block_keys) and (
                offload_tiers.has_block(block_keys[count]) or self._blocks.find(block_keys[count])
            ):
                count += 1
            longest = count * self.block_size // self.granularity * self.granularity
        if self._states is not None:
            pool = self._states.pool
            while longest and not (pool.find(key := keys.of(ids, longest)) or offload_tiers.has_page(key)):
                longest -= self.granularity
        return longest

    def find(self, keys: PrefixKeys, ids: NDArray[np.int32], max_tokens: int) -> Hit:
        """Return the longest cached prefix of at most `max_tokens` of the tokens `ids`. Adds no references to blocks.

        keys: computes the cache keys of the request.
        """
        longest = max_tokens // self.granularity * self.granularity
        if not longest:
            return Hit(0, [], 0, f"{len(ids)} tokens; a hit needs at least {self.granularity + 1}")
        blocks: list[int] = []
        if self._blocks is not None:
            blocks = self._blocks.find_all(self.block_keys(keys, ids, 0, longest // self.block_size))
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

    def block_keys(self, keys: PrefixKeys, ids: NDArray[np.int32], first: int, end: int) -> list[bytes]:
        """Return the keys of blocks `first` to `end - 1` of `ids`.

        With `lookahead` (see the class), `ids` must include the token after these blocks.
        """
        return self._compute_keys(keys, ids, first, end)

    def insert(self, rows: NDArray[np.int64], before_R: NDArray[np.int32], after_R: NDArray[np.int32]) -> None:
        """Add the KV blocks and states that a step completed to the prefix cache, and free states no longer needed.

        rows: table rows of the step's requests. before_R, after_R: their computed tokens before and after the step.
        """
        blocks, block_keys = self._row_keys.advance(rows, after_R)
        if block_keys and self._blocks is not None:
            self._blocks.insert_all(blocks, block_keys)
        if self._states is not None:
            prefill_len_R = self._table.prefill_len[rows]
            self._states.commit(rows, before_R, after_R, prefill_len_R, self._row_keys.of)

    def forget(self, request: Request) -> None:
        """Remove all blocks and states of a running request from the prefix cache, because it computed NaN.

        All are removed, because the step that wrote the invalid values is not known.
        """
        row, keys = request.row, self._keys(request)
        settled, ids = int(self._table.num_committed[row]), self._table.token_ids[row]
        blocks: list[bytes] = []
        pages: list[bytes] = []
        if self._blocks is not None:
            for block in self._table.block_table[row, : self._table.num_blocks[row]].tolist():
                self._blocks.forget(block)
            known = min(settled, int(self._table.num_known[row]) - self.num_lookahead_tokens)
            blocks = self.block_keys(keys, ids, 0, max(known, 0) // self.block_size)
        if self._states is not None:
            size, pool = self._states.block_size, self._states.pool
            pages = [keys.of(ids, num_tokens) for num_tokens in range(size, settled + 1, size)]
            for page in filter(None, map(pool.find, pages)):
                pool.forget(page)
        if self.offload_tiers is not None:
            self.offload_tiers.forget(blocks, pages)

    def _keys(self, request: Request) -> PrefixKeys:
        if request.prefix.keys is None:
            request.prefix.keys = PrefixKeys(self.block_size, request.prefix.root)
        return request.prefix.keys
