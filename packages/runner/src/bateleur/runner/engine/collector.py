"""The end of a step: the host learns what came of it, and everybody who waits for that."""

# Shape letters: R rows of a step, D decoding rows, S rows that draw.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.engine.in_flight import InFlight
from bateleur.runner.engine.ledger import Ledger
from bateleur.runner.engine.output_processor import Emitted, OutputProcessor
from bateleur.runner.engine.request_clock import RequestClock
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling.rejection_sampler import Verified
from bateleur.runner.scheduling.scheduler import Scheduler
from bateleur.runner.spec_decode.proposer import Proposer
from bateleur.runner.stats import EngineStats


class Collector:
    """Takes steps out of flight, in the order in which they were launched.

    Rows that a request has given back since the launch, as it ended or was preempted, are passed over: whoever has them
    now has no part in the step. What a preempted request got is kept, and computed again with the rest.
    """

    def __init__(
        self,
        table: RequestTable,
        scheduler: Scheduler,
        emitter: OutputProcessor,
        ledger: Ledger,
        stats: EngineStats,
        clock: RequestClock,
        proposer: Proposer | None,
    ) -> None:
        self._table, self._scheduler, self._emitter, self._ledger = table, scheduler, emitter, ledger
        self._stats, self._clock, self._proposer = stats, clock, proposer

    def collect(self, flight: InFlight) -> None:
        """Wait for the oldest step: append, publish, stop, detokenise, report."""
        plan, stats = flight.plan, self._stats
        present = flight.present(self._scheduler.num_left)
        stats.num_steps += 1
        stats.num_prefill_tokens += plan.num_tokens - plan.num_decode_tokens
        if flight.scored is not None:
            self._emitter.add_prompt_logprobs(flight.scored)
        if flight.verified is None or flight.is_over:
            self._scheduler.commit(plan, None, present)
            self._ledger.settle()
            return
        requests, first = self._begin(flight, flight.verified, present)
        emitted = self._emit(requests, flight)
        self._clock.emitted(requests, emitted.num_taken)
        self._keep(flight, flight.verified.drawing, first, emitted, present)
        self._ledger.settle()
        n, num_taken = plan.num_decodes, emitted.num_taken
        stats.num_emitted_tokens += int(num_taken.sum())
        stats.num_verify_rows += n if present is None else int(np.count_nonzero(num_taken[:n]))
        stats.num_verified_tokens += int(num_taken[:n].sum())
        for request in emitted.reports:
            self._ledger.report(request)

    def _begin(
        self, flight: InFlight, verified: Verified, present: NDArray[np.bool_] | None
    ) -> tuple[Sequence[Request], NDArray[np.int32]]:
        """The requests that draw, and the positions of the tokens that they get, (S,): they can be taken back."""
        plan, drawing = flight.plan, verified.drawing
        requests = plan.requests
        if len(drawing) < len(requests):
            requests = [requests[i] for i in drawing]
        lens = np.where(drawing < plan.num_decodes, 1, plan.query_lens[drawing])
        first = self._table.num_settled[plan.rows[drawing]] + lens.astype(np.int32)
        if present is None:
            flight.emitting = (requests, first)
        else:
            left = [request for request in requests if request.finish_reason is None]
            flight.emitting = (left, np.array([request.num_tokens for request in left], np.int32))
        return requests, first

    def _emit(self, requests: Sequence[Request], flight: InFlight) -> Emitted:
        """The step's one wait for the device."""
        assert flight.verified is not None
        assert flight.fetched is not None
        return self._emitter.emit(requests, flight.verified, flight.fetched)

    def _keep(
        self,
        flight: InFlight,
        drawing: NDArray[np.int64],
        first: NDArray[np.int32],
        emitted: Emitted,
        present: NDArray[np.bool_] | None,
    ) -> None:
        """Write down what is known now, of the rows that are still their requests'."""
        plan, n = flight.plan, flight.plan.num_decodes
        num_valid = plan.query_lens.copy()
        num_valid[:n] = emitted.num_taken[:n]
        here = slice(None) if present is None else present[drawing]
        rows, num_taken = plan.rows[drawing], emitted.num_taken
        self._table.write(rows[here], first[here], emitted.token_ids[here], num_taken[here])
        self._scheduler.commit(plan, num_valid, present)
        if self._proposer is None or flight.lengths is None:
            return
        decodes = slice(None) if present is None else np.flatnonzero(present[:n])
        num_drafts = np.minimum(emitted.num_drafts[:n], flight.num_drafts[:n])
        num_accepted = np.maximum(emitted.num_emitted[:n] - 1, 0)
        self._proposer.learn(plan.rows[:n][decodes], num_drafts[decodes], num_accepted[decodes])
        self._proposer.assign(rows[here], flight.lengths[drawing][here])


def foresee(flight: InFlight, table: RequestTable, proposer: Proposer, num_left: int) -> None:
    """Say how many drafts the rows of a step in flight have in their next one, by the bounds that are known."""
    if flight.verified is None or flight.lengths is None:
        return
    drawing = flight.verified.drawing
    present = flight.present(num_left)
    here = slice(None) if present is None else present[drawing]
    proposer.assign(flight.plan.rows[drawing][here], flight.lengths[drawing][here])
