"""The end of a step on the host: tokens, stop conditions, prefix cache, draft statistics, counters."""

# Shape letters: R rows of a step, D decoding rows, S rows that sample.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.engine.output_processor import EmittedTokens, OutputProcessor
from bateleur.runner.engine.request_registry import RequestRegistry
from bateleur.runner.engine.request_times import RequestClock
from bateleur.runner.engine.step_in_flight import StepInFlight
from bateleur.runner.requests.request import Request
from bateleur.runner.scheduling.scheduler import Scheduler
from bateleur.runner.spec_decode.proposer import Proposer
from bateleur.runner.stats import EngineStats


class StepCollector:
    """Collects steps in flight in the order of their launch.

    Requests that have lost their table row since the launch are skipped, because another request may have the row now.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        registry: RequestRegistry,
        stats: EngineStats,
        clock: RequestClock,
        proposer: Proposer | None,
    ) -> None:
        self._scheduler, self._outputs, self._registry = scheduler, outputs, registry
        self._stats, self._clock, self._proposer = stats, clock, proposer

    def collect(self, flight: StepInFlight) -> list[Request]:
        """Wait for the oldest step, append its tokens, and add its full blocks to the prefix cache.

        Returns the requests to report.
        """
        batch, stats, n, output = flight.batch, self._stats, flight.batch.num_decodes, flight.output
        num_rows = num_taken = num_verified = 0
        reports: list[Request] = []
        present = None
        if flight.num_released != self._scheduler.num_released:
            present = flight.present(self._scheduler.num_released)
        if flight.scored is not None:
            self._outputs.add_prompt_logprobs(flight.scored)
        if output is None or (present is not None and flight.has_ended):
            self._scheduler.commit(batch, None, present)
        else:
            sampled = None if present is None else present[output.sampled]
            self._begin(flight, sampled)
            emitted = self._emit(flight, sampled)
            taken, reports = emitted.num_taken, emitted.reports
            self._clock.emitted(*batch.sampled, taken, sampled)
            num_valid = taken
            if not batch.all_decode:
                num_valid = batch.query_lens.astype(np.int64)
                num_valid[:n] = taken[:n]
            self._scheduler.commit(batch, num_valid, present)
            if self._proposer is not None and n:
                kept = slice(None) if present is None else present[:n]
                num_drafts = np.minimum(emitted.num_drafts[:n], flight.num_drafts[:n])
                self._proposer.learn(batch.rows[:n][kept], num_drafts[kept], emitted.num_accepted[:n][kept])
            num_rows = n if present is None else int(np.count_nonzero(taken[:n]))
            num_taken, num_verified = int(taken.sum()), int(taken[:n].sum())
        flight.num_tokens = num_verified
        self._registry.in_flight = self._registry.in_flight[1:]
        # No call from here on: the tokens are final, and are counted.
        stats.num_steps += 1
        stats.num_prefill_tokens += batch.num_tokens - batch.num_decode_tokens
        stats.num_emitted_tokens += num_taken
        stats.num_verify_rows += num_rows
        stats.num_verified_tokens += num_verified
        return reports

    def _begin(self, flight: StepInFlight, present: NDArray[np.bool_] | None) -> None:
        """Record the number of tokens of the step's S sampling requests, so that new tokens can be taken back.

        present: (S,) whether each request still has its table row; None for all.
        """
        requests, rows = flight.batch.sampled
        if present is None:
            flight.appending = (requests, self._scheduler.table.num_known[rows])
        else:
            left = [request for request in requests if request.finish_reason is None]
            flight.appending = (left, np.array([request.num_tokens for request in left], np.int32))

    def _emit(self, flight: StepInFlight, present: NDArray[np.bool_] | None) -> EmittedTokens:
        """Wait for the device, the only time in a step, and append the tokens."""
        assert flight.output is not None
        assert flight.fetched is not None
        return self._outputs.emit(flight.batch, flight.output, flight.fetched, present)
