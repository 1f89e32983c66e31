"""The prefix cache of KV blocks and states: finds cached prefixes, and adds blocks of running requests."""

# Shape letters: R rows of a step.

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from bateleur.mamba import MambaStateManager
from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.requests.prefix_keys import PrefixKeys
from bateleur.runner.requests.request import Request, RequestTable
from bateleur.runner.utils.arrays import Int32s, Int64s


class Hit(NamedTuple):
    """The longest prefix of a request that is in all caches of the model. num_tokens: 0 for a miss. blocks: KV blocks
    of the prefix. page: state page after it, 0 without Mamba layers. why: reason of a miss.
    """

    num_tokens: int
    blocks: list[int]
    page: int
    why: str = ""


class _OffloadTiers(Protocol):
    """Host memory and disk, which store KV blocks and states by prefix-cache key; see `offload.tier.HostTier`."""

    def has_block(self, name: bytes) -> bool: ...
    def has_page(self, key: bytes) -> bool: ...
    def load(self, blocks: list[bytes], page: bytes | None, num_tokens: int) -> None: ...
    def forget(self, blocks: list[bytes], pages: list[bytes]) -> None: ...
    def fetch(self, request: Request, keys: PrefixKeys, ids: Int32s, max_tokens: int) -> bool: ...
    def arrived(self) -> list[Request]: ...
    def save(self, keys: PrefixKeys, ids: Int32s, num_tokens: int, prompt_len: int) -> None: ...


class PrefixCache:
    """Finds cached prefixes of requests, and adds KV blocks and states (state pages) of running requests.
    table: the running requests. blocks: the pool of KV blocks; None for a model without attention. block_size: tokens
    of a KV block. states: the state pages; None for a model without Mamba layers. Their block size is a multiple of
    `block_size`. lookahead: whether the contents of KV blocks depend on the token after them, as a draft head's do.
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
        self._table, self._blocks, self._states = table, blocks, states
        self.num_lookahead_tokens = int(lookahead)
        """Tokens after a prefix that its last block depends on."""
        self.block_keys = PrefixKeys.blocks_with_lookahead if lookahead else PrefixKeys.blocks
        """block_keys(keys, ids, first, end) returns the keys of blocks `first` to `end - 1` of the tokens `ids`. With
        `lookahead`, `ids` must include the token after these blocks.
        """
        self.block_size = block_size
        self.offload_tiers: _OffloadTiers | None = None
        self.granularity = block_size if states is None else states.block_size
        """Hits are multiples of this many tokens."""

    def match(self, request: Request) -> Hit:
        """Return the longest cached prefix of a request that just got its row in the request table.
        At least one token remains to compute. Adds no references to blocks.
        """
        if request.lacks_prompt_logprobs:
            return Hit(0, [], 0, "prompt_logprobs compute every token of the prompt")
        ids = self._table.token_ids[request.row, : self._table.prefill_len[request.row]].copy()
        keys, max_tokens, tiers = self._keys(request), len(ids) - 1, self.offload_tiers
        hit = self.find(keys, ids, max_tokens)
        if tiers is not None and (longest := self.find(keys, ids, max_tokens, tiers).num_tokens) > hit.num_tokens:
            blocks = [] if self._blocks is None else self.block_keys(keys, ids, 0, longest // self.block_size)
            page = None if self._states is None else keys.of(ids, longest)
            tiers.load(blocks, page, longest - hit.num_tokens)
            hit = self.find(keys, ids, max_tokens)
        return hit

    def fetch(self, request: Request) -> bool:
        """If disk files have a waiting request's prefix, start to read them, once, and return True: the request must
        wait until `offload_tiers.arrived` returns it. Else return False.
        """
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

    def find(self, keys: PrefixKeys, ids: Int32s, max_tokens: int, tiers: _OffloadTiers | None = None) -> Hit:
        """Return the longest cached prefix of at most `max_tokens` of the tokens `ids`. Adds no references to blocks.
        tiers: blocks and states in these tiers count as cached, too; only the result's `num_tokens` is then valid.
        """
        longest = max_tokens // self.granularity * self.granularity
        if not longest:
            return Hit(0, [], 0, f"{len(ids)} tokens; a hit needs at least {self.granularity + 1}")
        blocks: list[int] = []
        if (pool := self._blocks) is not None:
            names = self.block_keys(keys, ids, 0, longest // self.block_size)
            blocks = pool.find_all(names)
            count = len(blocks)
            while (
                tiers is not None and count < len(names) and (tiers.has_block(names[count]) or pool.find(names[count]))
            ):
                count += 1
            longest = count * self.block_size // self.granularity * self.granularity
        page, stored = 0, 0 if self._blocks is None else longest
        while self._states is not None and longest:
            key = keys.of(ids, longest)
            if (page := self._states.pool.find(key)) or (tiers is not None and tiers.has_page(key)):
                break
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

    def insert(self, requests: Sequence[Request], rows: Int64s, before_R: Int32s, after_R: Int32s) -> None:
        """Add the KV blocks and states that a step completed to the prefix cache, and free states no longer needed.
        rows: table rows of the step's requests. before_R, after_R: their computed tokens before and after the step.
        """
        table = self._table
        if self._blocks is not None:
            first_R, end_R = before_R // self.block_size, after_R // self.block_size
            for i in (end_R > first_R).nonzero()[0].tolist():
                row, first, end = int(rows[i]), int(first_R[i]), int(end_R[i])
                keys = self.block_keys(self._keys(requests[i]), table.token_ids[row], first, end)
                for block, name in zip(table.block_table[row, first:end].tolist(), keys, strict=True):
                    self._blocks.insert(block, name)
        if self._states is not None:

            def key(i: int, num_tokens: int) -> bytes:
                return self._keys(requests[i]).of(table.token_ids[rows[i]], num_tokens)

            self._states.commit(rows, before_R, after_R, table.prefill_len[rows], key)

    def forget(self, request: Request) -> None:
        """Remove all blocks and states of a live request from the prefix cache, because it computed NaN.
        All are removed, because the step that wrote the invalid values is not known. The request may have lost its
        table row.
        """
        row, keys, ids = request.row, self._keys(request), np.array(request.token_ids, np.int32)
        blocks: list[bytes] = []
        pages: list[bytes] = []
        if (pool := self._blocks) is not None:
            blocks = self.block_keys(keys, ids, 0, max(len(ids) - self.num_lookahead_tokens, 0) // self.block_size)
            held = self._table.block_table[row, : self._table.num_blocks[row]].tolist() if row >= 0 else []
            for block in (*held, *filter(None, map(pool.find, blocks))):
                pool.forget(block)
        if self._states is not None:
            size, states = self._states.block_size, self._states.pool
            pages = [keys.of(ids, num_tokens) for num_tokens in range(size, len(ids) + 1, size)]
            for page in filter(None, map(states.find, pages)):
                states.forget(page)
        if self.offload_tiers is not None:
            self.offload_tiers.forget(blocks, pages)

    def _keys(self, request: Request) -> PrefixKeys:
        if request.prefix.keys is None:
            request.prefix.keys = PrefixKeys(self.block_size, request.prefix.root)
        return request.prefix.keys
