"""Counters of an engine: steps, tokens, requests, and host time by part of a step."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from bateleur.cudagraph import CaptureReport, DispatchCounter
from bateleur.eagle import AcceptStats


class Histogram:
    """Counts of observations by bucket, as Prometheus has them. bounds: ascending upper bounds of the buckets,
    inclusive; the last bucket, after them, has none. counts: (len(bounds) + 1,) int64. total: sum of all observations.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = np.array(bounds, dtype=np.float64)
        self._bounds = self.bounds.tolist()
        assert len(bounds), "a histogram has a bound"
        assert (np.diff(self.bounds) > 0).all(), "bounds ascend"
        self.counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value `times` times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def observe_all(self, values: ArrayLike, times: ArrayLike) -> None:
        """Add each of the values (N,) as often as its entry of `times` (N,)."""
        values_N, times_N = np.asarray(values, dtype=np.float64), np.asarray(times, dtype=np.int64)
        buckets_N = self.bounds.searchsorted(values_N)
        found = np.bincount(buckets_N, times_N, minlength=len(self.counts))
        self.counts += found.astype(np.int64)
        self.total += float(values_N @ times_N)

    @property
    def count(self) -> int:
        """Number of observations."""
        return int(self.counts.sum())


_STEPS = (1.0, 2.0, 5.0)
_SECONDS = partial(Histogram, [step * 10.0**power for power in range(-4, 3) for step in _STEPS])
_TOKENS = partial(Histogram, [step * 10.0**power for power in range(6) for step in _STEPS])
_NO_SUMS = frozenset(("bounds", "_bounds", "_pairs"))
"""Fields of histograms and acceptance counts that are no counters."""
StepMarks = list[tuple[str, float]]
"""Parts of a step and when they ended, in seconds of `perf_counter`; the first entry is the start."""


@dataclass(slots=True)
class RequestHistograms:
    """Histograms of request times (seconds) and sizes (tokens), with vLLM's names."""

    time_to_first_token_seconds: Histogram = field(default_factory=_SECONDS)
    """From arrival to the first token."""
    inter_token_latency_seconds: Histogram = field(default_factory=_SECONDS)
    """Time between two steps that gave a request tokens, divided by the tokens of the second; one observation per
    token."""
    e2e_request_latency_seconds: Histogram = field(default_factory=_SECONDS)
    """From arrival to the last token."""
    request_queue_time_seconds: Histogram = field(default_factory=_SECONDS)
    """From arrival to the first step with tokens of the request."""
    request_prefill_time_seconds: Histogram = field(default_factory=_SECONDS)
    """From the first step with tokens of the request to its first output token."""
    request_decode_time_seconds: Histogram = field(default_factory=_SECONDS)
    """From the first token to the last."""
    request_prompt_tokens: Histogram = field(default_factory=_TOKENS)
    request_generation_tokens: Histogram = field(default_factory=_TOKENS)
    iteration_tokens: Histogram = field(default_factory=_TOKENS)
    """Tokens computed by a step."""


@dataclass(slots=True)
class OffloadStats:
    """Sizes of the KV offload tiers, and totals since the engine started: hits, copied bytes, failures.

    stored_bytes, loaded_bytes: copied from the device to host memory, and back. dropped_bytes: not copied to host
    memory, because it had no room. written_bytes, read_bytes: copied from host memory to disk, and back.
    unwritten_files: files that could not be written. refused: files that were unusable when they were read, by reason.
    """

    host_bytes: int = 0
    """Size of the host memory tier."""
    host_hit_tokens: int = 0
    """Tokens that requests found in host memory or on disk, and not on the device."""
    stored_bytes: int = 0
    """Copied from the device to host memory."""
    loaded_bytes: int = 0
    """Copied from host memory to the device."""
    dropped_bytes: int = 0
    """Not copied from the device, because there was no room."""
    disk_bytes: int = 0
    """Maximum size of the files; 0 without a disk tier."""
    disk_hit_tokens: int = 0
    """Tokens read from disk into host memory for a request."""
    written_bytes: int = 0
    read_bytes: int = 0
    unwritten_files: int = 0
    """Files given up because the disk refused them or host memory had no room for their contents."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of files that were unusable when they were read, by reason."""


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens looked up and found in the prefix cache since the engine started."""

    num_queries: int = 0
    num_hits: int = 0


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine started, and its current load.
    num_emitted_tokens: all output tokens. num_verify_rows: decoding requests, summed over steps. num_verified_tokens:
    tokens that these requests emitted. decisions: steps by kind of CUDA graph, or by the reason for an eager step.
    seconds: host seconds by part of a step. num_dummy_steps, num_dummy_drafts: steps and draft passes without requests,
    for other data-parallel ranks.
    """

    async_scheduling: bool = False
    """Whether steps are prepared while the device runs the step before."""
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, by finished requests."""
    num_emitted_tokens: int = 0
    num_dummy_steps: int = 0
    """Dummy steps for other data-parallel ranks while this one had no work; not in `num_steps`."""
    num_dummy_drafts: int = 0
    """Dummy passes of an MTP head after dummy steps, if ranks share its experts."""
    num_verify_rows: int = 0
    """Without speculation, each emits one token."""
    num_verified_tokens: int = 0
    """Tokens emitted by decoding rows; the first token of a request is not one of them."""
    acceptance: AcceptStats | None = None
    """Acceptance of drafts; None without a drafter."""
    num_preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Number of finished requests by `finish_reason`."""
    prefix_cache: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    offload: OffloadStats | None = None
    """Totals of KV offload; None without it."""
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Current share of KV blocks held by running requests, in [0, 1]."""
    histograms: RequestHistograms = field(default_factory=RequestHistograms)
    decisions: DispatchCounter = field(default_factory=DispatchCounter)
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("schedule", "stage", "forward", "sample", "draft", "emit"), 0.0)
    )
    """On CPU, forward and sample include the computation."""

    def add_step(self, marks: StepMarks, num_tokens: int) -> None:
        """Add a step. marks: its parts and their end times. num_tokens: tokens of the step; 0 if none was launched."""
        for (_, start), (part, end) in pairwise(marks):
            self.seconds[part] += end - start
        if num_tokens:
            self.histograms.iteration_tokens.observe(num_tokens)

    @property
    def num_finished(self) -> int:
        """Number of finished requests."""
        return self.finished.total()

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a decoding request in a step; 1.0 without speculation and before the first such step."""
        return self.num_verified_tokens / self.num_verify_rows if self.num_verify_rows else 1.0

    @property
    def num_draft_tokens(self) -> int:
        """Number of verified drafts, including those after a rejected one."""
        return 0 if self.acceptance is None else self.acceptance.num_drafts

    @property
    def acceptance_per_position(self) -> list[float]:
        """Rate at which draft i was accepted if all before it were; NaN for positions never reached, [] without a
        drafter.
        """
        return [] if self.acceptance is None else self.acceptance.acceptance_per_position.tolist()


def combined(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the counters summed over several engines; `kv_cache_usage` is their mean."""
    whole = deepcopy(stats[0])
    for each in stats[1:]:
        _add(whole, each)
    whole.kv_cache_usage = float(np.mean([each.kv_cache_usage for each in stats]))
    return whole


def _add(into: Any, more: Any) -> None:
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
            for key, value in theirs.items():
                ours[key] = ours.get(key, 0) + value
        else:
            _add(ours, theirs)


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """Totals over all graph captures of an engine; `str` is one line for a log.
    num_graphs: CUDA graphs; a PIECEWISE key has several. num_keys: captured graph keys. num_failed: keys that could not
    be captured. seconds: host time of warm-ups and captures. nbytes: device memory in bytes.
    """

    num_graphs: int
    num_keys: int
    num_failed: int
    seconds: float
    nbytes: int

    @classmethod
    def of(cls, reports: Iterable[CaptureReport]) -> Self:
        """Add up the capture reports of all graph managers."""
        reports = tuple(reports)
        rows = [row for report in reports for row in report.captured]
        return cls(
            num_graphs=sum(row.num_graphs for row in rows),
            num_keys=len(rows),
            num_failed=sum(len(report.failures) for report in reports),
            seconds=sum(report.seconds for report in reports),
            nbytes=sum(row.nbytes for row in rows),
        )

    def __str__(self) -> str:
        failed = f", {self.num_failed} keys failed" if self.num_failed else ""
        return (
            f"captured {self.num_graphs:,} graphs for {self.num_keys:,} keys in {self.seconds:.1f} s, "
            f"{self.nbytes:,} bytes{failed}"
        )
