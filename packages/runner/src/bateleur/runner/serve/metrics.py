"""Prometheus metrics: vLLM's names with the prefix `bateleur:`, and counters of CUDA graphs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
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
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(stats, model_name, queued))
    return generate_latest(registry)


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
        for name, text, label, values in _counters(self.stats):
            counter = CounterMetricFamily(f"bateleur:{name}", text, labels=["model_name", *filter(None, [label])])
            for key, count in values.items():
                counter.add_metric([self.model_name, *filter(None, [key])], float(count))
            yield counter
        for name, text in HELP.items():
            histogram, total, buckets = getattr(self.stats.histograms, name.removesuffix("_total")), 0, []
            for end, count in zip([*histogram.bounds.tolist(), "+Inf"], histogram.counts.tolist(), strict=True):
                total += count
                buckets.append((str(end), float(total)))
            family = HistogramMetricFamily(f"bateleur:{name}", text, labels=["model_name"])
            family.add_metric([self.model_name], buckets, histogram.total)
            yield family


def _counters(stats: EngineStats) -> Iterator[tuple[str, str, str, Mapping[str, int]]]:
    """Yield name, help text, label, and counts by value of the label. A counter without a label has one count."""
    cache = stats.prefix_cache
    yield "num_preemptions", "Preemptions of requests.", "", {"": stats.num_preemptions}
    yield "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "", {"": cache.num_queries}
    yield "prefix_cache_hits", "Prompt tokens found in the prefix cache.", "", {"": cache.num_hits}
    yield "prompt_tokens", "Prompt tokens computed.", "", {"": stats.num_prefill_tokens}
    yield "generation_tokens", "Tokens generated.", "", {"": stats.num_emitted_tokens}
    yield "dummy_steps", "Steps run only for other ranks.", "", {"": stats.num_dummy_steps}
    yield "dummy_drafts", "Draft passes in dummy steps.", "", {"": stats.num_dummy_drafts}
    yield "request_success", "Finished requests.", "finished_reason", stats.finished.copy()
    if (below := stats.offload) is not None:
        found = {"host": below.host_hit_tokens, "disk": below.disk_hit_tokens}
        yield "kv_offload_hit_tokens", "Prompt tokens found in host memory or on disk.", "tier", found
        moved = {"store": below.stored_bytes, "load": below.loaded_bytes, "drop": below.dropped_bytes}
        moved |= {"write": below.written_bytes, "read": below.read_bytes}
        text = "Bytes of offloaded KV cache stored, loaded, evicted, and written to and read from disk."
        yield "kv_offload_bytes", text, "direction", moved
        yield "kv_offload_refused_files", "Files on disk that were rejected.", "reason", below.refused.copy()
        yield "kv_offload_unwritten_files", "Files that could not be written.", "", {"": below.unwritten_files}
    if (accepted := stats.acceptance) is not None:
        yield "spec_decode_num_drafts", "Verified drafts.", "", {"": accepted.num_steps}
        yield "spec_decode_num_draft_tokens", "Draft tokens verified.", "", {"": accepted.num_drafts}
        yield "spec_decode_num_accepted_tokens", "Draft tokens accepted.", "", {"": accepted.num_accepted}
        places = {str(place): count for place, count in enumerate(accepted.kept.tolist())}
        text = "Draft tokens accepted, by position."
        yield "spec_decode_num_accepted_tokens_per_pos", text, "position", places
    steps = stats.decisions
    counts = [(*str(why).partition(": ")[::2], count) for why, count in list(steps.by_reason.items())]
    graphs = {kind: count for kind, reason, count in counts if not reason}
    yield "graph_steps", "Steps that replayed a CUDA graph, by kind.", "graph", graphs
    eager = {reason: count for _, reason, count in counts if reason}
    yield "eager_steps", "Steps without a CUDA graph, by reason.", "reason", eager
    yield "graph_tokens", "Tokens in CUDA graphs, including padding.", "", {"": steps.num_graph_tokens}
    yield "graph_padding_tokens", "Padding tokens in CUDA graphs.", "", {"": steps.num_pad_tokens}
