"""Prometheus metrics: vLLM's names with the prefix `bateleur:`, and counters of CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from bateleur.cudagraph import DispatchCounter
from bateleur.runner.stats import EngineStats, Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(stats: EngineStats, model_name: str, queued: int = 0) -> bytes:
    """Return the text of `/metrics`. queued: requests that have not reached the engine yet."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(stats, model_name, queued))
    return generate_latest(registry)


class _Collector:
    """Converts the counters of an engine to Prometheus metric families."""

    def __init__(self, stats: EngineStats, model_name: str, queued: int) -> None:
        self._stats = stats
        self._labels = {"model_name": model_name}
        self._queued = queued

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._offload()
        yield from self._drafts()
        yield from self._steps(self._stats.decisions)
        spread = self._stats.histograms
        for each in fields(spread):
            if each.name != "iteration_tokens":
                yield self._histogram(each.name, getattr(spread, each.name))
        yield self._histogram("iteration_tokens_total", spread.iteration_tokens)

    def _gauges(self) -> Iterator[Metric]:
        stats = self._stats
        yield self._gauge("num_requests_running", "Running requests.", stats.num_running)
        waiting = stats.num_waiting + self._queued
        yield self._gauge("num_requests_waiting", "Queued requests.", waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.", stats.kv_cache_usage)

    def _counters(self) -> Iterator[Metric]:
        stats = self._stats
        yield self._counter("num_preemptions", "Preemptions of requests.", stats.num_preemptions)
        cache = stats.prefix_cache
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", cache.num_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", cache.num_hits)
        yield self._counter("prompt_tokens", "Prompt tokens computed.", stats.num_prefill_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.num_emitted_tokens)
        yield self._counter("dummy_steps", "Steps run only for other ranks.", stats.num_dummy_steps)
        yield self._counter("dummy_drafts", "Draft passes in dummy steps.", stats.num_dummy_drafts)
        ended = {reason: float(count) for reason, count in list(stats.finished.items())}
        yield self._by_label("request_success", "Finished requests.", "finished_reason", ended)

    def _offload(self) -> Iterator[Metric]:
        if (below := self._stats.offload) is None:
            return
        found = {"host": float(below.host_hit_tokens), "disk": float(below.disk_hit_tokens)}
        yield self._by_label("kv_offload_hit_tokens", "Prompt tokens found in host memory or on disk.", "tier", found)
        moved = {"store": float(below.stored_bytes), "load": float(below.loaded_bytes)}
        moved |= {"drop": float(below.dropped_bytes), "write": float(below.written_bytes)}
        moved["read"] = float(below.read_bytes)
        help_text = "Bytes of offloaded KV cache stored, loaded, evicted, and written to and read from disk."
        yield self._by_label("kv_offload_bytes", help_text, "direction", moved)
        refused = {reason: float(count) for reason, count in list(below.refused.items())}
        yield self._by_label("kv_offload_refused_files", "Files on disk that were rejected.", "reason", refused)
        yield self._counter("kv_offload_unwritten_files", "Files that could not be written.", below.unwritten_files)

    def _drafts(self) -> Iterator[Metric]:
        if (accepted := self._stats.acceptance) is None:
            return
        yield self._counter("spec_decode_num_drafts", "Verified drafts.", accepted.num_steps)
        yield self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.", accepted.num_drafts)
        yield self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", accepted.num_accepted)
        places = {str(place): float(count) for place, count in enumerate(accepted.kept.tolist())}
        help_text = "Draft tokens accepted, by position."
        yield self._by_label("spec_decode_num_accepted_tokens_per_pos", help_text, "position", places)

    def _steps(self, decisions: DispatchCounter) -> Iterator[Metric]:
        graphs, eager = {}, {}
        for why, count in list(decisions.by_reason.items()):
            kind, _, reason = str(why).partition(": ")
            if reason:
                eager[reason] = float(count)
            else:
                graphs[kind] = float(count)
        yield self._by_label("graph_steps", "Steps that replayed a CUDA graph, by kind.", "graph", graphs)
        yield self._by_label("eager_steps", "Steps without a CUDA graph, by reason.", "reason", eager)
        yield self._counter("graph_tokens", "Tokens in CUDA graphs, including padding.", decisions.num_graph_tokens)
        yield self._counter("graph_padding_tokens", "Padding tokens in CUDA graphs.", decisions.num_pad_tokens)

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(f"bateleur:{name}", help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(f"bateleur:{name}", help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by_label(self, name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(f"bateleur:{name}", help_text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        ends, total = [*map(repr, histogram.bounds.tolist()), "+Inf"], 0
        buckets = []
        for end, count in zip(ends, histogram.counts.tolist(), strict=True):
            total += count
            buckets.append((end, float(total)))
        family = HistogramMetricFamily(f"bateleur:{name}", HELP[name], labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, histogram.total)
        return family


HELP = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Time per token after the first.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "From arrival to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens of an output.",
    "iteration_tokens_total": "Tokens of a step.",
}
