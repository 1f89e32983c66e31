"""Continuous batching with chunked prefill and preemption by recomputation.

Requests are served by priority, then first come, first served. Decodes always run; prompts share the rest of the token
budget in that order. If KV blocks run out, the last running request in that order is preempted and returns to its
position in the queue. Every admitted request fits the cache alone, so the first one always makes progress. A waiting
request never preempts a running one.

With prefix caching, the continuations of one prompt (`n` > 1) wait until the first of them has its prompt in the prefix
cache.
"""

# Shape letters: R rows of a step, T tokens of a step.

from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np
import torch

from bateleur.mamba import MambaStateManager
from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.cache.prefix_cache import PrefixCache
from bateleur.runner.requests.request import Request, RequestTable
from bateleur.runner.scheduling.step_batch import StepBatch
from bateleur.runner.utils.arrays import Bools, Int64s

_NO_PROMPTS = np.empty(0, np.int32)


def service_order(request: Request) -> tuple[int, int]:
    """Return the sort key of a request: lower priority numbers first, then first come, first served."""
    return request.priority, request.arrival


class Scheduler:
    """Plans steps. Owns the request queues, the request table and the block pool."""

    def __init__(
        self,
        table: RequestTable,
        pool: BlockPool | None,
        *,
        block_size: int,
        max_num_batched_tokens: int,
        lookahead_tokens: int = 0,
        states: MambaStateManager | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        """pool: KV blocks; None for a model without attention. lookahead_tokens: tokens after those of a step for which
        a request also gets KV slots, because a drafter stores keys there. states: allocator of the recurrent states in
        blocks, if any. prefixes: None without prefix caching.
        """
        self.table, self.pool, self.states, self.prefixes = table, pool, states, prefixes
        self.admitted: list[Request] = []
        """Requests that got a row since the engine last cleared this list."""
        self.block_size, self.lookahead_tokens = block_size, lookahead_tokens
        self.max_num_batched_tokens = max_num_batched_tokens
        self.device = torch.device("cpu")
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        """Both in service order."""
        self._preempted: set[Request] = set()
        """Preempted with tokens in flight: they wait until these tokens are known."""
        self._must_wait: set[int] = set()
        """Rows after their prompt that take no part in the next step, see `_rows_that_wait`."""
        self.num_released = 0
        """How often a request gave its row back."""
        self._followers: dict[Request, list[Request]] = {}
        """Requests that wait for the prompt of another request, by that request."""
        self.waiting_for_slot: set[Request] = set()
        """Requests that wait for a slot for their LoRA adapter, see `give_slot`."""
        self.fetching: set[Request] = set()
        """Requests that wait for prefixes which are being read from disk."""
        self._num_arrived = 0
        self.num_preemptions = 0
        self.batch: StepBatch | None = None
        """Batch of the last step while it repeats: all rows decode, and nothing has changed."""

    def add(self, request: Request) -> None:
        """Queue a request. It must fit the cache if it runs alone."""
        self._num_arrived += 1
        request.arrival = self._num_arrived
        if request.adapter_slot < 0:
            self.waiting_for_slot.add(request)
        else:
            self._queue(request)

    def give_slot(self, request: Request, slot: int) -> None:
        """Set the adapter slot of a request that waits for one, and let it run."""
        request.adapter_slot = slot
        if request in self.waiting_for_slot:
            self.waiting_for_slot.remove(request)
            self._queue(request)

    def _queue(self, request: Request) -> None:
        leader = request.leader
        if leader is not None and self.prefixes is not None and not self._has_prompt(leader):
            self._followers.setdefault(leader, []).append(request)
        else:
            self._wait(request)

    def _wait(self, request: Request) -> None:
        insort(self.waiting, request, key=service_order)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a table row."""
        others = len(self.waiting_for_slot) + sum(map(len, self._followers.values()))
        return len(self.waiting) + len(self.fetching) + others

    def remove(self, request: Request) -> None:
        """Drop a request, waiting or running, and free its table row and blocks."""
        self._queue_followers(request)
        if request.row >= 0:
            if self.prefixes is not None:
                self.prefixes.offload(request)
            self.running.remove(request)
            self._release(request)
        elif request in self.fetching:
            self.fetching.remove(request)
        elif request in self.waiting_for_slot:
            self.waiting_for_slot.remove(request)
        elif request.leader in self._followers and request in self._followers[request.leader]:
            self._followers[request.leader].remove(request)
        else:
            index = bisect_left(self.waiting, service_order(request), key=service_order)
            assert self.waiting[index] is request
            del self.waiting[index]

    def _has_prompt(self, leader: Request) -> bool:
        """Return whether the prompt of a request is computed, or never will be because the request has ended."""
        if leader.finish_reason is not None or leader.output_token_ids:
            return True
        t, row = self.table, leader.row
        return row >= 0 and bool(t.num_committed[row] >= t.prompt_len[row])

    def _queue_followers(self, leader: Request) -> None:
        for request in self._followers.pop(leader, ()):
            self._wait(request)

    def _release(self, request: Request) -> None:
        if self.states is not None:
            self.states.release(request.row)
        self.num_released += 1
        blocks = self.table.release(request)
        if self.pool is not None:
            self.pool.free(blocks[::-1])  # the end of a prefix is evicted first
        self.batch = None

    def restart(self, requests: Iterable[Request]) -> None:
        """Clear all caches and queue these requests for recomputation. Works from any inconsistent state."""
        every = set(requests)
        self.waiting_for_slot = {request for request in every if request.adapter_slot < 0}
        self.waiting = sorted(every - self.waiting_for_slot, key=service_order)
        self.running, self.admitted, self.batch, self._followers = [], [], None, {}
        self._preempted, self.fetching = set(), set()
        for request in self.waiting:
            request.output.num_scored = len(request.output.prompt_logprobs)
            if request.row >= 0:
                request.leave()
                request.num_drafts = int(self.table.num_proposed[request.row])
                request.row = -1
                request.num_preemptions += 1
                self.num_preemptions += 1
        self.table.clear()
        if self.pool is not None:
            self.pool.clear()
        if self.states is not None:
            self.states.clear()

    def preempt(self, request: Request) -> None:
        """Return a running request to its position in the queue. Its tokens will be recomputed."""
        if self.table.num_computed[request.row] != self.table.num_committed[request.row]:
            self._preempted.add(request)
        self.running.remove(request)
        self._release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(request)

    def schedule(self, *, in_flight: bool = False) -> StepBatch | None:
        """Return the batch of the next step, with its KV blocks allocated; None if nothing can run.
        The lengths in the request table then include this step, as upper bounds. in_flight: whether the results of
        another step are still unknown, so that the table has upper bounds for it, too.
        """
        if self.fetching and self.prefixes is not None and self.prefixes.offload_tiers is not None:
            for request in self.fetching.intersection(self.prefixes.offload_tiers.arrived()):
                self.fetching.remove(request)
                self._wait(request)
        self._must_wait = self._rows_that_wait() if in_flight else set()
        budget = self.max_num_batched_tokens - self._allocate_decodes()
        batch = self.batch
        if batch is None or self._can_admit(budget):
            chunks = self._schedule_prefills(budget)
            batch = self._make_batch(chunks)
            self.batch = None if chunks or self._must_wait else batch
        if batch is None:
            return None
        t, rows, lens, n = self.table, batch.rows, batch.query_lens, batch.num_decodes
        uncertain = t.num_uncertain[rows]
        batch.num_computed, batch.is_exact = t.num_computed[rows], uncertain == 0 if uncertain.any() else None
        if self.states is not None:
            prompts = _NO_PROMPTS if batch.all_decode else t.prefill_len[rows]
            self.states.allocate_blocks(rows, batch.num_computed, lens, n, prompts, uncertain if in_flight else None)
        # Until the outcome is known, all drafts count as accepted. A row that samples knows the next token, too.
        t.num_computed[rows] = num_computed = batch.num_computed + lens
        t.num_tokens[rows] = num_computed + 1 if batch.all_decode else np.maximum(t.num_tokens[rows], num_computed + 1)
        t.num_uncertain[rows[:n]] += lens[:n] - 1
        return batch

    def commit(self, batch: StepBatch, num_valid: Int64s | None = None, present: Bools | None = None) -> None:
        """Apply the results of the oldest step in flight to the request table.
        num_valid: (R,) number of leading tokens of each request that stay; None for all. present: (R,) whether each
        request still has its table row; None for all. Other requests are skipped.
        """
        self._preempted.clear()
        requests, rows, lens, n = batch.requests, batch.rows, batch.query_lens, batch.num_decodes
        valid = lens if num_valid is None else num_valid.astype(np.int32)
        if present is not None:
            requests = [request for request, kept in zip(requests, present.tolist(), strict=True) if kept]
            rows, lens, valid, n = rows[present], lens[present], valid[present], int(present[:n].sum())
        t, rejected = self.table, lens - valid
        before = t.num_committed[rows]
        t.num_committed[rows] = after = before + valid
        t.num_computed[rows] -= rejected
        t.num_tokens[rows] -= rejected
        t.num_uncertain[rows[:n]] -= lens[:n] - 1
        if self.prefixes is None:
            return
        self.prefixes.insert(requests, rows, before, after)
        if self._followers:
            for leader in self._followers.keys() & set(requests):
                if self._has_prompt(leader):
                    self._queue_followers(leader)

    def _decodes(self, request: Request) -> bool:
        return bool(self.table.num_computed[request.row] >= self.table.prefill_len[request.row])

    def _rows_that_wait(self) -> set[int]:
        """Return the table rows of decoding requests that must wait for the step in flight, because they end with it,
        or because they cannot be planned from upper bounds of their lengths. These bounds count empty draft slots, too.
        """
        t = self.table
        rows = self.batch.rows if self.batch is not None else self._decoding_rows()
        waits = t.num_tokens[rows] - t.num_uncertain[rows] >= t.limit[rows]
        waits |= t.must_wait[rows] | (t.num_computed[rows] >= t.max_model_len)
        if not waits.any():
            return set()
        self.batch = None
        return set(rows[waits].tolist())

    def _allocate_decodes(self) -> int:
        """Allocate blocks for the next tokens of decoding requests, preempt if needed; return the number of tokens."""
        t = self.table
        while True:
            rows = self.batch.rows if self.batch is not None else self._decoding_rows()
            lens = 1 + t.num_draft_slots[rows]
            if (last := self.batch) is not None and not np.array_equal(lens, last.query_lens):
                self.batch = StepBatch(last.requests, rows, lens, last.num_decodes, last.samples, self.device)
            if self.pool is None:
                break
            stored = np.minimum(t.num_computed[rows] + lens + self.lookahead_tokens, t.max_model_len)
            missing = np.maximum(-(-stored // self.block_size) - t.num_blocks[rows], 0)
            if not (count := int(missing.sum())):
                break
            if count <= self.pool.num_free:
                short = missing > 0
                t.append_blocks(rows[short], missing[short], self.pool.allocate(count))
                break
            self.preempt(self.running[-1])
        return int(lens.sum())

    def _decoding_rows(self) -> Int64s:
        rows = np.array([r.row for r in self.running if r.row not in self._must_wait], dtype=np.int64)
        return rows[self.table.num_computed[rows] >= self.table.prefill_len[rows]]

    def _schedule_prefills(self, budget: int) -> list[tuple[Request, int]]:
        """Choose prompt chunks of at most `budget` tokens for the next step: requests with their numbers of tokens."""
        chunks: list[tuple[Request, int]] = []
        for request in list(self.running):
            if budget <= 0 or request.row < 0 or self._decodes(request):
                continue
            count = self._allocate_prefill(request, budget)
            if count:
                chunks.append((request, count))
                budget -= count
        while self._can_admit(budget):
            request = self.waiting.pop(0)
            if self.prefixes is not None and self.prefixes.fetch(request):
                self.fetching.add(request)
                continue
            self._admit(request)
            count = self._allocate_prefill(request, budget)
            assert count > 0, "an admitted request has blocks for its prompt"
            chunks.append((request, count))
            budget -= count
        return chunks

    def _admit(self, request: Request) -> None:
        """Give a request a table row, and the blocks of its cached prefix."""
        row = self.table.admit(request)
        insort(self.running, request, key=service_order)
        self.admitted.append(request)
        self.batch = None
        if self.prefixes is None:
            return
        hit = self.prefixes.match(request)
        if self.pool is not None:
            self.pool.hold(hit.blocks)
            self.table.give_blocks(row, hit.blocks)
        if self.states is not None:
            self.states.admit(row, hit.num_tokens, hit.page)
        self.table.num_computed[row] = self.table.num_committed[row] = hit.num_tokens
        if not request.num_preemptions:
            request.prefix.num_cached_tokens, request.prefix.cache_miss = hit.num_tokens, hit.why

    def _can_admit(self, budget: int) -> bool:
        if budget <= 0 or not self.waiting or len(self.table.free_rows) <= len(self.fetching):
            return False
        first = self.waiting[0]
        if first in self._preempted:
            return False
        if self.running and self.running[0].rope_length != first.rope_length:
            return False  # their keys need other rotary tables
        if self.pool is None or not self.running:
            return True
        # One spare block for each running request, so that admission does not cause a preemption at once.
        return -(-first.num_tokens // self.block_size) + len(self.running) <= self.pool.num_free

    def _allocate_prefill(self, request: Request, budget: int) -> int:
        """Allocate blocks for the next chunk of a prompt. Returns the number of tokens that may run, 0 if none."""
        t, row = self.table, request.row
        computed = int(t.num_computed[row])
        want = min(int(t.prefill_len[row]) - computed, budget)
        if self.pool is None:
            return want
        while True:
            room = (int(t.num_blocks[row]) + self.pool.num_free) * self.block_size - computed
            if room > 0 or self.running[-1] is request:
                break
            self.preempt(self.running[-1])
        count = max(0, min(want, room))
        # A drafter's keys after the prompt are stored only if there is a free block for them.
        stored = min(computed + count + self.lookahead_tokens, t.max_model_len)
        missing = min(-(-stored // self.block_size) - int(t.num_blocks[row]), self.pool.num_free)
        t.give_blocks(row, self.pool.allocate(max(0, missing)))
        return count

    def _make_batch(self, chunks: list[tuple[Request, int]]) -> StepBatch | None:
        """Build the batch of decoding requests and these prompt chunks.
        Requests that the allocation has preempted are left out.
        """
        # Rows that are neighbours in the table are neighbours in the batch.
        decoding = (r for r in self.running if r.row not in self._must_wait and self._decodes(r))
        requests = sorted(decoding, key=lambda request: request.row)
        num_decodes = len(requests)
        requests += [request for request, _ in chunks]
        if not requests:
            return None
        rows = np.fromiter((r.row for r in requests), dtype=np.int64, count=len(requests))
        query_lens = 1 + self.table.num_draft_slots[rows]
        query_lens[num_decodes:] = [count for _, count in chunks]
        samples = self.table.num_computed[rows] + query_lens >= self.table.num_tokens[rows]
        return StepBatch(requests, rows, query_lens, num_decodes, samples, self.device)
