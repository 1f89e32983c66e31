"""Which tokens run next: continuous batching, prompts in parts (chunked prefill), preemption by recompute.

Order of service is by priority, and of one priority first come, first served. Rows that decode always run; what is
left of the token budget goes to prompts, in that order. When KV blocks run out, the last in that order of those that
run gives its blocks back and waits at its old place; since every admitted request fits the cache alone, the first
always makes progress. Whoever waits for a row takes none away.

Where prefixes are shared, continuations of one prompt wait for the first of them until its prompt is published.
"""

# Shape letters: R rows of a step, T tokens of a step.

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from bateleur.mamba import MambaStateManager
from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.cache.prefix_cache import PrefixCache
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.scheduling.step_plan import StepPlan as StepPlan
from bateleur.runner.scheduling.waiting_queue import WaitingQueue, urgency

_NO_PROMPTS = np.empty(0, np.int32)


class Scheduler:
    """Owns the queues, the request table and the block pool."""

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
        """`lookahead_tokens`: those behind a step's own whose keys a drafter stores; `states`: where Mamba states
        outlive steps; `prefixes`: where requests share what they computed."""
        self.table = table
        self.pool = pool
        self.states = states
        self.prefixes = prefixes
        self.admitted: list[Request] = []
        """Requests that got a row since the engine last looked."""
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.lookahead_tokens = lookahead_tokens
        self._longest = table.token_ids.shape[1]
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        """In the order of service."""
        self._late: set[Request] = set()
        """Those that were preempted with tokens in flight: they wait until these have come."""
        self._resting: set[int] = set()
        """Rows past their prompts that have no part in the next step, see `_rest`."""
        self.num_left = 0
        """How often a request gave its row back."""
        self._held: dict[Request, list[Request]] = {}
        """Those that wait for the prompt of another, by that."""
        self.fetching: set[Request] = set()
        """Those that wait for what is being read of their prefixes."""
        self._num_arrived = 0
        self.num_preemptions = 0
        self.steady: StepPlan | None = None
        """The plan of the last step if it was all decodes and nothing has changed since: it is returned again."""

    # --- queues -------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request, which fits the cache alone."""
        self._num_arrived += 1
        request.arrival = self._num_arrived
        leader = request.leader
        if leader is not None and self.prefixes is not None and not self._has_prompt(leader):
            self._held.setdefault(leader, []).append(request)
        else:
            self.waiting.add(request)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self.waiting) + len(self.fetching) + sum(map(len, self._held.values()))

    def remove(self, request: Request) -> None:
        """Forget a request, waiting or running, and free what it holds."""
        self._let_go(request)
        if request.row >= 0:
            if self.prefixes is not None:
                self.prefixes.left(request)
            self.running.remove(request)
            self._release(request)
        elif request in self.fetching:
            self.fetching.remove(request)
        elif request.leader in self._held and request in self._held[request.leader]:
            self._held[request.leader].remove(request)
        else:
            self.waiting.remove(request)

    def _has_prompt(self, leader: Request) -> bool:
        """Whether its prompt was computed, or will not be any more."""
        if leader.finish_reason is not None or leader.output_token_ids:
            return True
        return leader.row >= 0 and bool(
            self.table.num_settled[leader.row] >= self.table.prompt_len[leader.row]
        )

    def _let_go(self, leader: Request) -> None:
        """Those that waited for it wait for a row from here on."""
        for request in self._held.pop(leader, ()):
            self.waiting.add(request)

    def blocks_needed(self, num_tokens: int) -> int:
        """KV blocks that hold `num_tokens` tokens; 0 for a model without attention."""
        return 0 if self.pool is None else -(-num_tokens // self.block_size)

    def _release(self, request: Request) -> None:
        if self.states is not None:
            self.states.release(request.row)
        self.num_left += 1
        held = self.table.release(request)
        if self.pool is not None:
            self.pool.free(held[::-1])  # the end of a prefix is the first to be forgotten
        self.steady = None

    def restart(self, requests: Iterable[Request]) -> None:
        """Begin again, whatever state this is in: nothing is cached, and these requests wait to be recomputed."""
        self.waiting = WaitingQueue(requests)
        self.running, self.admitted, self.steady, self._held = [], [], None, {}
        self._late, self.fetching = set(), set()
        for request in self.waiting:
            request.num_scored = len(request.prompt_logprobs)
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
        """Send a running request back to its place in the queue, to be recomputed."""
        if self.table.num_computed[request.row] != self.table.num_settled[request.row]:
            self._late.add(request)
        self.running.remove(request)
        self._release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request)

    # --- one step -----------------------------------------------------------------------------------------

    def schedule(self, *, ahead: bool = False) -> StepPlan | None:
        """The next step, with its KV blocks allocated; None when there is nothing to run.

        `ahead`: a step is in flight, whose outcome is bounded and not known.
        """
        self._resting = set()
        if self.fetching and self.prefixes is not None and self.prefixes.below is not None:
            for request in self.fetching.intersection(self.prefixes.below.arrived()):
                self.fetching.remove(request)
                self.waiting.add(request)
        if ahead:
            self._resting = self._rest()
        budget = self.max_num_batched_tokens - self._cover_decodes()
        if self.steady is None or self._can_admit(budget):
            parts = self._schedule_prefills(budget)
            plan = self._plan(parts)
            self.steady = None if parts or plan is None or self._resting else plan  # who rests comes back
        else:
            plan = self.steady
        if plan is not None and self.states is not None:
            t, rows = self.table, plan.rows
            n, slack = plan.num_decodes, t.slack[rows] if ahead else None
            prompts = t.prefill_len[rows] if n < len(rows) else _NO_PROMPTS
            self.states.allocate_blocks(rows, t.num_computed[rows], plan.query_lens, n, prompts, slack)
        return plan

    def advance(self, plan: StepPlan) -> None:
        """The step was launched: bounds count its tokens, and all of its drafts as accepted."""
        self.table.advance(plan.rows, plan.query_lens, plan.num_decodes)

    def commit(
        self,
        plan: StepPlan,
        num_valid: NDArray[np.int64] | None = None,
        present: NDArray[np.bool_] | None = None,
    ) -> None:
        """The outcome of the oldest step in flight is known: of the tokens of each row, the first `num_valid` (R,)
        stay, or all. Rows that their requests have given back since then, which are not `present` (R,), are passed
        over.
        """
        self._late.clear()
        t, requests, rows, lens, n = self.table, plan.requests, plan.rows, plan.query_lens, plan.num_decodes
        valid = lens if num_valid is None else num_valid
        if present is not None:
            requests = [request for request, stays in zip(requests, present.tolist(), strict=True) if stays]
            rows, lens, valid, n = rows[present], lens[present], valid[present], int(present[:n].sum())
        before = t.num_settled[rows]
        after = before + valid
        t.num_settled[rows] = after
        if plan.num_decode_tokens > plan.num_decodes:
            t.num_computed[rows] -= lens - valid
            t.num_tokens[rows] -= lens - valid
            t.slack[rows[:n]] -= lens[:n] - 1
        self._learned(requests, rows, before, after)

    def settle(self, plan: StepPlan, tokens_RK: NDArray[np.int64], num_valid: NDArray[np.int64]) -> None:
        """As `commit`, of a step whose rows are all past their prompts and still their requests'; of `tokens` (R, K)
        the first `num_valid` (R,) are known from now on.
        """
        self._late.clear()
        before, after = self.table.settle(plan.rows, plan.query_lens, tokens_RK, num_valid)
        self._learned(plan.requests, plan.rows, before, after)

    def _learned(
        self,
        requests: list[Request],
        rows: NDArray[np.int64],
        before: NDArray[np.int32],
        after: NDArray[np.int32],
    ) -> None:
        """What the caches hold of rows (R,) is known up to `after` (R,)."""
        if self.prefixes is not None:
            self.prefixes.publish(rows, before, after)
            if self._held:
                for leader in self._held.keys() & set(requests):
                    if self._has_prompt(leader):
                        self._let_go(leader)

    def _decoding(self, request: Request) -> bool:
        return bool(self.table.num_computed[request.row] >= self.table.prefill_len[request.row])

    def _rest(self) -> set[int]:
        """Rows past their prompts that have no part in a step before what is in flight is known: those that will have
        ended by their length then, and those whose step depends on more than bounds. Bounds count places that hold no
        draft, too, so they may leave no room where there is some.
        """
        t = self.table
        rows = self.steady.rows if self.steady is not None else self._decoding_rows()
        over = t.num_tokens[rows] - t.slack[rows] >= t.limit[rows]
        over |= (t.rests[rows] > 0) | (t.num_computed[rows] >= self._longest)
        if not over.any():
            return set()
        self.steady = None
        return set(rows[over].tolist())

    def _cover_decodes(self) -> int:
        """Every decoding row gets blocks for its next tokens, at the expense of the last; how many tokens that is."""
        t, size = self.table, 0 if self.pool is None else self.block_size
        while True:
            rows = self.steady.rows if self.steady is not None else self._decoding_rows()
            taken = None if self.steady is None else self.steady.query_lens
            lacks = t.lacking(rows, taken, size, self.lookahead_tokens)
            if not lacks.as_taken:
                self.steady = self._with_new_drafts()
            if self.pool is None or not len(lacks.cells):
                break
            if len(lacks.cells) <= self.pool.num_free:
                t.extend_blocks(lacks, self.pool.allocate(len(lacks.cells)))
                break
            self.preempt(self.running[-1])
        return lacks.num_tokens

    def _with_new_drafts(self) -> StepPlan | None:
        """The plan of the same rows with the drafts that they have now, if they are known."""
        last = self.steady
        if last is None:
            return None
        lens = 1 + self.table.num_places[last.rows]
        return StepPlan(last.requests, last.rows, lens, last.num_decodes, last.samples)

    def _decoding_rows(self) -> NDArray[np.int64]:
        listed = [r.row for r in self.running if r.row not in self._resting]
        rows = np.array(listed, dtype=np.int64)
        return rows[self.table.num_computed[rows] >= self.table.prefill_len[rows]]

    def _schedule_prefills(self, budget: int) -> list[tuple[Request, int]]:
        parts: list[tuple[Request, int]] = []
        for request in list(self.running):
            if budget <= 0 or request.row < 0 or self._decoding(request):
                continue
            count = self._grant(request, budget)
            if count:
                parts.append((request, count))
                budget -= count
        while self._can_admit(budget):
            request = self.waiting.pop()
            if self.prefixes is not None and self.prefixes.fetch(request):
                self.fetching.add(request)
                continue
            self._admit(request)
            count = self._grant(request, budget)
            assert count > 0, "an admitted request has blocks for its prompt"
            parts.append((request, count))
            budget -= count
        return parts

    def _admit(self, request: Request) -> None:
        """Give a request a row, and what the caches have of its tokens."""
        row = self.table.admit(request)
        insort(self.running, request, key=urgency)
        self.admitted.append(request)
        self.steady = None
        if self.prefixes is None:
            return
        hit = self.prefixes.match(request)
        if self.pool is not None:
            self.pool.hold(hit.blocks)
            self.table.give_blocks(row, hit.blocks)
        if self.states is not None:
            self.states.admit(row, hit.num_tokens, hit.page)
        self.table.num_computed[row] = self.table.num_settled[row] = hit.num_tokens
        if not request.num_preemptions:
            request.num_cached_tokens, request.cache_miss = hit.num_tokens, hit.why

    def _can_admit(self, budget: int) -> bool:
        if budget <= 0 or not self.waiting or self.table.num_free_rows <= len(self.fetching):
            return False
        if self._late and self.waiting.first in self._late:
            return False
        if self.running and self.running[0].rope_length != self.waiting.first.rope_length:
            return False  # their keys need other rotary tables
        if self.pool is None or not self.running:
            return True
        # One spare block for each running request, so that admission does not at once cause a preemption.
        return self.blocks_needed(self.waiting.first.num_tokens) + len(self.running) <= self.pool.num_free

    def _grant(self, request: Request, budget: int) -> int:
        """Allocate blocks for the next part of a prompt; the number of tokens that may run, 0 if none."""
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
        # What a drafter would store behind the prompt has a block if there is one, else it is not stored.
        stored = min(computed + count + self.lookahead_tokens, self._longest)
        missing = min(self.blocks_needed(stored) - int(t.num_blocks[row]), self.pool.num_free)
        t.give_blocks(row, self.pool.allocate(max(0, missing)))
        return count

    def _plan(self, parts: list[tuple[Request, int]]) -> StepPlan | None:
        """The decodes, and these parts of prompts, whose scheduling may have preempted some of them."""
        # In the order of their rows, neighbours in memory are neighbours here.
        decoding = (r for r in self.running if r.row not in self._resting and self._decoding(r))
        requests = sorted(decoding, key=lambda request: request.row)
        num_decodes = len(requests)
        requests += [request for request, _ in parts]
        if not requests:
            return None
        rows = np.fromiter((r.row for r in requests), dtype=np.int64, count=len(requests))
        query_lens = 1 + self.table.num_places[rows]
        query_lens[num_decodes:] = [count for _, count in parts]
        samples = self.table.num_computed[rows] + query_lens >= self.table.num_tokens[rows]
        return StepPlan(requests, rows, query_lens, num_decodes, samples)
