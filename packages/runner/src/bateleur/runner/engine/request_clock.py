"""When things happen to requests, and how long they take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.requests.request import Request
from bateleur.runner.stats import EngineStats


class RequestClock:
    """Writes the times of requests, and counts what they waited for in `EngineStats`."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._spread = stats.histograms

    def started(self, requests: Iterable[Request]) -> None:
        """These have a part in the step that begins; for those that began before nothing happens."""
        now = perf_counter()
        for request in requests:
            if not request.times.first_scheduled_time:
                request.times.first_scheduled_time = now
                self._spread.request_queue_time_seconds.observe(now - request.times.arrival_time)

    def emitted(self, requests: Sequence[Request], num_taken: NDArray[np.int64]) -> None:
        """Each of S requests got so many tokens (S,)."""
        now = perf_counter()
        gaps, tokens = [], []
        for request, count in zip(requests, num_taken.tolist(), strict=True):
            if not count:
                continue
            times = request.times
            if times.first_token_time:
                gaps.append(now - times.last_token_time)
                tokens.append(count)
            else:
                times.first_token_time = now
                self._spread.time_to_first_token_seconds.observe(now - times.arrival_time)
            times.last_token_time = now
        if gaps:
            self._spread.inter_token_latency_seconds.observe(np.array(gaps) / tokens, tokens)

    def ended(self, request: Request) -> None:
        """Nothing more comes of it. One that never got a token counts by its reason and its lengths alone."""
        spread, times = self._spread, request.times
        self._stats.num_finished += 1
        self._stats.finished[request.finish_reason or "abort"] += 1
        spread.request_prompt_tokens.observe(len(request.prompt_token_ids))
        spread.request_generation_tokens.observe(len(request.output_token_ids))
        if times.first_token_time:
            spread.request_prefill_time_seconds.observe(times.first_token_time - times.first_scheduled_time)
            spread.request_decode_time_seconds.observe(times.last_token_time - times.first_token_time)
            spread.e2e_request_latency_seconds.observe(times.last_token_time - times.arrival_time)
