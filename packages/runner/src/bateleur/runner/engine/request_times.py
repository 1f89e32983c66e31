"""Times of requests, and histograms of their latencies."""

# Shape letters: S rows that draw.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.stats import EngineStats


class RequestClock:
    """Records the times of requests, and their latencies in `EngineStats`."""

    def __init__(self, stats: EngineStats, table: RequestTable) -> None:
        self._stats = stats
        self._histograms = stats.histograms
        self._table = table
        self._rows: NDArray[np.int64] | None = None
        """Rows whose last tokens came at the same time."""
        self._then = 0.0

    def started(self, requests: Iterable[Request]) -> None:
        """Record the start of requests in their first step."""
        now = perf_counter()
        for request in requests:
            if not request.times.first_scheduled_time:
                request.times.first_scheduled_time = now
                self._histograms.request_queue_time_seconds.observe(now - request.times.arrival_time)

    def emitted(
        self,
        requests: Sequence[Request],
        rows: NDArray[np.int64],
        num_taken: NDArray[np.int64],
        present: NDArray[np.bool_] | None,
    ) -> None:
        """Record that S requests got `num_taken` (S,) tokens in a step. The same `rows` object means the same requests.

        present: (S,) whether each request still has its table row; None for all.
        """
        now = perf_counter()
        if present is None and rows is self._rows:
            often = np.bincount(num_taken).tolist()
            if not often[0]:
                for count, times in enumerate(often):
                    if times:
                        self._waited(now - self._then, count, times)
                self._table.last_token_time[rows] = now
                self._then = now
                return
        took = num_taken > 0
        if present is not None:
            for i in (took & ~present).nonzero()[0].tolist():
                times = requests[i].times
                self._waited(now - times.last_token_time, int(num_taken[i]))
                times.last_token_time = now
            took &= present
        if np.count_nonzero(took) < len(rows):
            chosen = took.nonzero()[0]
            requests, rows = [requests[i] for i in chosen.tolist()], rows[chosen]
            num_taken = num_taken[chosen]
        self._emitted_apart(requests, rows, num_taken, now)
        self._table.last_token_time[rows] = now
        self._rows, self._then = rows, now

    def _emitted_apart(
        self, requests: Sequence[Request], rows: NDArray[np.int64], num_taken: NDArray[np.int64], now: float
    ) -> None:
        """Record tokens of requests whose last tokens came at different times, or that had none yet."""
        then = self._table.last_token_time[rows]
        for i in (then == 0).nonzero()[0].tolist():
            times = requests[i].times
            times.first_token_time = now
            self._histograms.time_to_first_token_seconds.observe(now - times.arrival_time)
        again = then > 0
        gaps, counts = now - then[again], num_taken[again]
        self._histograms.inter_token_latency_seconds.observe_all(gaps / counts, counts)

    def _waited(self, gap: float, num_tokens: int, times: int = 1) -> None:
        """Record `times` times that `num_tokens` tokens came together after `gap` seconds."""
        self._histograms.inter_token_latency_seconds.observe(gap / num_tokens, num_tokens * times)

    def ended(self, request: Request) -> None:
        """Record the end of a request. Without a token, only its reason and lengths are recorded."""
        histograms, times = self._histograms, request.times
        self._stats.num_finished += 1
        self._stats.finished[request.finish_reason or "abort"] += 1
        histograms.request_prompt_tokens.observe(len(request.prompt_token_ids))
        histograms.request_generation_tokens.observe(len(request.output_token_ids))
        if times.first_token_time:
            histograms.request_prefill_time_seconds.observe(times.first_token_time - times.first_scheduled_time)
            histograms.request_decode_time_seconds.observe(times.last_token_time - times.first_token_time)
            histograms.e2e_request_latency_seconds.observe(times.last_token_time - times.arrival_time)
