"""The end of a step: the host learns what came of it, and everybody who waits for that."""

# Shape letters: R rows of a step, D decoding rows, S rows that draw.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.engine.output_processor import Emitted, OutputProcessor
from bateleur.runner.engine.request_registry import RequestRegistry
from bateleur.runner.engine.request_times import RequestClock
from bateleur.runner.engine.step_in_flight import StepInFlight
from bateleur.runner.requests.request import Request
from bateleur.runner.scheduling.scheduler import Scheduler, StepPlan
from bateleur.runner.spec_decode.proposer import Proposer
from bateleur.runner.stats import EngineStats


class StepCollector:
    """Takes steps out of flight, in the order in which they were launched.

    Rows that a request has given back since the launch, as it ended or was preempted, are passed over: whoever has them
    now has no part in the step. What a preempted request got is kept, and computed again with the rest.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        emitter: OutputProcessor,
        ledger: RequestRegistry,
        stats: EngineStats,
        clock: RequestClock,
        proposer: Proposer | None,
    ) -> None:
        self._table, self._scheduler, self._emitter, self._ledger = (
            scheduler.table,
            scheduler,
            emitter,
            ledger,
        )
        self._stats, self._clock, self._proposer = stats, clock, proposer

    def collect(self, flight: StepInFlight) -> list[Request]:
        """Wait for the oldest step: append, publish, stop, detokenise; returns whom to report."""
        plan, stats, n = flight.plan, self._stats, flight.plan.num_decodes
        num_prefill_tokens = plan.num_tokens - plan.num_decode_tokens
        num_rows = num_taken = num_verified = flight.num_tokens = 0
        reports: list[Request] = []
        present = flight.present(self._scheduler.num_left)
        if flight.scored is not None:
            self._emitter.add_prompt_logprobs(flight.scored)
        if flight.verified is None or flight.is_over:
            self._scheduler.commit(plan, None, present)
        else:
            here = None if present is None else present[flight.verified.drawing]
            requests, rows = plan.drawing
            self._begin(flight, here)
            emitted = self._emit(flight, here)
            taken, reports = emitted.num_taken, emitted.reports
            self._clock.emitted(requests, rows, taken, here)
            self._keep(plan, emitted, present, here)
            if self._proposer is not None:
                self._learn(flight, emitted, present)
            num_rows = n if present is None else int(np.count_nonzero(taken[:n]))
            num_taken = num_verified = int(np.add.reduce(taken))
            if n < len(plan.rows):
                num_verified = int(taken[:n].sum())
            flight.num_tokens = num_verified
        self._ledger.settle()
        # No call from here on: the tokens stand, and are counted.
        stats.num_steps += 1
        stats.num_prefill_tokens += num_prefill_tokens
        stats.num_emitted_tokens += num_taken
        stats.num_verify_rows += num_rows
        stats.num_verified_tokens += num_verified
        return reports

    def _begin(self, flight: StepInFlight, here: NDArray[np.bool_] | None) -> None:
        """From here on requests get tokens, which can be taken back. `here` (S,): who has a row, None for all."""
        requests, rows = flight.plan.drawing
        if here is None:
            flight.emitting = (requests, self._table.num_known[rows])
        else:
            left = [request for request in requests if request.finish_reason is None]
            flight.emitting = (left, np.array([request.num_tokens for request in left], np.int32))

    def _emit(self, flight: StepInFlight, here: NDArray[np.bool_] | None) -> Emitted:
        """The step's one wait for the device."""
        assert flight.verified is not None
        assert flight.fetched is not None
        return self._emitter.emit(*flight.plan.drawing, flight.verified, flight.fetched, here)

    def _keep(
        self,
        plan: StepPlan,
        emitted: Emitted,
        present: NDArray[np.bool_] | None,
        here: NDArray[np.bool_] | None,
    ) -> None:
        """Write down what is known now, of the rows that are still their requests'."""
        n, (_, rows) = plan.num_decodes, plan.drawing
        if present is None and n == len(plan.rows):
            self._scheduler.settle(plan, emitted.token_ids, emitted.num_taken)
            return
        num_valid = num_taken = emitted.num_taken
        if n < len(plan.rows):
            num_valid = plan.query_lens.astype(np.int64)
            num_valid[:n] = num_taken[:n]
        if here is None:
            self._table.write(rows, emitted.token_ids, num_taken)
        else:
            self._table.write(rows[here], emitted.token_ids[here], num_taken[here])
        self._scheduler.commit(plan, num_valid, present)

    def _learn(self, flight: StepInFlight, emitted: Emitted, present: NDArray[np.bool_] | None) -> None:
        """Tell the proposer how many drafts of the decoding rows were accepted."""
        assert self._proposer is not None
        plan, n = flight.plan, flight.plan.num_decodes
        here = slice(None) if present is None else present[:n]
        num_drafts = np.minimum(emitted.num_drafts[:n], flight.num_drafts[:n])
        self._proposer.learn(plan.rows[:n][here], num_drafts[here], emitted.num_accepted[:n][here])
