"""Counters of an engine: what it did and where the host's time went."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np

from bateleur.cudagraph import DispatchCounter
from bateleur.eagle import AcceptStats
from bateleur.runner.utils.histogram import Histogram

_STEPS = (1.0, 2.0, 5.0)
_SECONDS = partial(Histogram, [step * 10.0**power for power in range(-4, 3) for step in _STEPS])
_TOKENS = partial(Histogram, [step * 10.0**power for power in range(6) for step in _STEPS])


@dataclass(slots=True)
class RequestHistograms:
    """How requests are spread, by what vLLM calls it; seconds and tokens."""

    time_to_first_token_seconds: Histogram = field(default_factory=_SECONDS)
    """From arrival to the first token."""
    inter_token_latency_seconds: Histogram = field(default_factory=_SECONDS)
    """Between two steps that gave a request tokens, divided by the tokens of the second: one observation a token."""
    e2e_request_latency_seconds: Histogram = field(default_factory=_SECONDS)
    """From arrival to the last token."""
    request_queue_time_seconds: Histogram = field(default_factory=_SECONDS)
    """From arrival to the first step that has a part of it."""
    request_prefill_time_seconds: Histogram = field(default_factory=_SECONDS)
    """From there to the first token."""
    request_decode_time_seconds: Histogram = field(default_factory=_SECONDS)
    """From the first token to the last."""
    request_prompt_tokens: Histogram = field(default_factory=_TOKENS)
    request_generation_tokens: Histogram = field(default_factory=_TOKENS)
    iteration_tokens: Histogram = field(default_factory=_TOKENS)
    """Tokens that a step computes."""


@dataclass(slots=True)
class OffloadStats:
    """What went between the device's caches and what lies below them, since the engine started."""

    host_bytes: int = 0
    """Host memory that prefixes may take."""
    host_hit_tokens: int = 0
    """Tokens that requests found below the device and nowhere on it."""
    stored_bytes: int = 0
    """Copied from the device."""
    loaded_bytes: int = 0
    """Copied to it."""
    dropped_bytes: int = 0
    """Not copied from the device, since there was no room."""
    disk_bytes: int = 0
    """That files may take; 0 without a disk."""
    disk_hit_tokens: int = 0
    """Tokens that were read into host memory, where requests then found them."""
    written_bytes: int = 0
    read_bytes: int = 0
    unwritten_files: int = 0
    """Given up: the disk refused them, or there was no more room in host memory for what they hold."""
    refused: Counter[str] = field(default_factory=Counter)
    """Files that were passed over, by reason."""


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine started, and where it stands."""

    async_scheduling: bool = False
    """Whether steps are prepared while the device is at the one before."""
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the caches instead, by requests that finished."""
    num_emitted_tokens: int = 0
    num_dummy_steps: int = 0
    """Steps of other data-parallel ranks in which one without work took part: none of `num_steps`."""
    num_dummy_drafts: int = 0
    """Passes of an MTP head behind these, where ranks share its experts."""
    num_verify_rows: int = 0
    """Decoding rows over all steps: without speculation, one emitted token each."""
    num_verified_tokens: int = 0
    """Tokens that these emitted; prompts emit their first one beside them."""
    acceptance: AcceptStats | None = None
    """What became of drafts; None without a drafter."""
    num_preemptions: int = 0
    num_finished: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """The same by `finish_reason`."""
    num_prefix_queries: int = 0
    """Tokens of the requests that got their first row while prefixes are cached."""
    num_prefix_hits: int = 0
    """Of these, those that were found."""
    offload: OffloadStats | None = None
    """What lies below the device's caches; None where nothing does."""
    num_running: int = 0
    """Requests that have a row, now."""
    num_waiting: int = 0
    """Requests that wait for one, now."""
    kv_cache_usage: float = 0.0
    """Share of KV blocks that running requests hold, now; in [0, 1]."""
    histograms: RequestHistograms = field(default_factory=RequestHistograms)
    decisions: DispatchCounter = field(default_factory=DispatchCounter)
    """Steps by the kind of graph that they ran on, or why on none."""
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("schedule", "stage", "build", "forward", "sample", "commit", "draft", "emit"), 0.0
        )
    )
    """Host seconds by part of a step; on CPU, forward and sample are the computation itself."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a decoding row emits in a step; 1.0 without speculation, and before the first such step."""
        return self.num_verified_tokens / self.num_verify_rows if self.num_verify_rows else 1.0

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that were verified, those behind a rejected one as well."""
        return 0 if self.acceptance is None else self.acceptance.num_drafts

    @property
    def acceptance_per_position(self) -> list[float]:
        """How often draft i was accepted when all before it were; NaN where it was never reached, [] if none are."""
        return [] if self.acceptance is None else self.acceptance.acceptance_per_position.tolist()


def joined(stats: Sequence[EngineStats]) -> EngineStats:
    """The counters of several engines as those of one: sums, but the mean of how full their caches are."""
    whole = deepcopy(stats[0])
    for each in stats[1:]:
        _add(whole, each)
    whole.kv_cache_usage = float(np.mean([each.kv_cache_usage for each in stats]))
    return whole


def _add(into: Any, more: Any) -> None:
    """Add what `more` has counted, field by field."""
    names = [each.name for each in fields(into)] if is_dataclass(into) else [*vars(into)]
    for name in names:
        ours, theirs = getattr(into, name), getattr(more, name)
        if isinstance(ours, bool) or name in _NO_SUMS or theirs is None:
            continue
        if ours is None:
            setattr(into, name, deepcopy(theirs))
        elif isinstance(ours, int | float | np.ndarray):
            setattr(into, name, ours + theirs)
        elif isinstance(ours, dict):
            ours.update({key: ours.get(key, 0) + value for key, value in theirs.items()})
        else:
            _add(ours, theirs)


_NO_SUMS = frozenset(("bounds", "_bounds", "_pairs"))
"""What histograms and counts of drafts know before they count."""


class StepClock:
    """Adds the time between laps to `EngineStats.seconds`."""

    def __init__(self, stats: EngineStats) -> None:
        self._seconds = stats.seconds
        self._start = self._last = time.perf_counter()
        self._cpu_start = time.thread_time()

    @property
    def elapsed(self) -> float:
        """Seconds up to the last lap."""
        return self._last - self._start

    @property
    def cpu(self) -> float:
        """Seconds since the start in which this thread computed: other processes of the machine do not count."""
        return time.thread_time() - self._cpu_start

    def lap(self, part: str) -> None:
        """Book the time since the last lap under `part`."""
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now
