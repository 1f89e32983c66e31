"""Prometheus metrics: vLLM's names with the prefix `bateleur:`, and counters of CUDA graphs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from bateleur.runner.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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


def render(stats: EngineStats, model_name: str, queued: int = 0) -> bytes:
    """Return the text of `/metrics`. queued: requests that have not reached the engine yet."""
    return generate_latest(_Collector(stats, model_name, queued))


@dataclass(eq=False, slots=True)
class _Collector:
    stats: EngineStats
    model_name: str
    queued: int

    def collect(self) -> Iterator[Metric]:
        waiting, usage = self.stats.num_waiting + self.queued, self.stats.kv_cache_usage
        for name, text, number in (
            ("num_requests_running", "Running requests.", self.stats.num_running),
            ("num_requests_waiting", "Queued requests.", waiting),
            ("kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.", usage),
        ):
            gauge = GaugeMetricFamily(f"bateleur:{name}", text, labels=["model_name"])
            gauge.add_metric([self.model_name], number)
            yield gauge
        yield from self._counters()
        for name, text in HELP.items():
            histogram, total, buckets = getattr(self.stats.histograms, name.removesuffix("_total")), 0, []
            for end, count in zip([*histogram.bounds.tolist(), "+Inf"], histogram.counts.tolist(), strict=True):
                total += count
                buckets.append((str(end), float(total)))
            family = HistogramMetricFamily(f"bateleur:{name}", text, labels=["model_name"])
            family.add_metric([self.model_name], buckets, histogram.total)
            yield family

    def _counters(self) -> Iterator[Metric]:
        stats, cache = self.stats, self.stats.prefix_cache
        yield self._counter("num_preemptions", "Preemptions of requests.", stats.num_preemptions)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", cache.num_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", cache.num_hits)
        yield self._counter("prompt_tokens", "Prompt tokens computed.", stats.num_prefill_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.num_emitted_tokens)
        yield self._counter("dummy_steps", "Steps run only for other ranks.", stats.num_dummy_steps)
        yield self._counter("dummy_drafts", "Draft passes in dummy steps.", stats.num_dummy_drafts)
        yield self._by_label("request_success", "Finished requests.", "finished_reason", stats.finished.copy())
        if (below := stats.offload) is not None:
            found = {"host": below.host_hit_tokens, "disk": below.disk_hit_tokens}
            text = "Prompt tokens found in host memory or on disk."
            yield self._by_label("kv_offload_hit_tokens", text, "tier", found)
            moved = {"store": below.stored_bytes, "load": below.loaded_bytes, "drop": below.dropped_bytes}
            moved |= {"write": below.written_bytes, "read": below.read_bytes}
            text = "Bytes of offloaded KV cache stored, loaded, evicted, and written to and read from disk."
            yield self._by_label("kv_offload_bytes", text, "direction", moved)
            refused, text = below.refused.copy(), "Files on disk that were rejected."
            yield self._by_label("kv_offload_refused_files", text, "reason", refused)
            unwritten = below.unwritten_files
            yield self._counter("kv_offload_unwritten_files", "Files that could not be written.", unwritten)
        if (accepted := stats.acceptance) is not None:
            yield self._counter("spec_decode_num_drafts", "Verified drafts.", accepted.num_steps)
            yield self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.", accepted.num_drafts)
            yield self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", accepted.num_accepted)
            places = {str(place): count for place, count in enumerate(accepted.kept.tolist())}
            text = "Draft tokens accepted, by position."
            yield self._by_label("spec_decode_num_accepted_tokens_per_pos", text, "position", places)
        yield from self._steps()

    def _steps(self) -> Iterator[Metric]:
        steps, graphs, eager = self.stats.decisions, dict[str, int](), dict[str, int]()
        for why, count in list(steps.by_reason.items()):
            kind, _, reason = str(why).partition(": ")
            if reason:
                eager[reason] = count
            else:
                graphs[kind] = count
        yield self._by_label("graph_steps", "Steps that replayed a CUDA graph, by kind.", "graph", graphs)
        yield self._by_label("eager_steps", "Steps without a CUDA graph, by reason.", "reason", eager)
        yield self._counter("graph_tokens", "Tokens in CUDA graphs, including padding.", steps.num_graph_tokens)
        yield self._counter("graph_padding_tokens", "Padding tokens in CUDA graphs.", steps.num_pad_tokens)

    def _counter(self, name: str, text: str, count: int) -> Metric:
        family = CounterMetricFamily(f"bateleur:{name}", text, labels=["model_name"])
        family.add_metric([self.model_name], float(count))
        return family

    def _by_label(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
        """Return a counter with one count for each value of the label. text: its help text."""
        family = CounterMetricFamily(f"bateleur:{name}", text, labels=["model_name", label])
        for value, count in counts.items():
            family.add_metric([self.model_name, value], float(count))
        return family
