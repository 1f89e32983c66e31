"""The text of `/metrics`."""

import json
import re
from dataclasses import fields
from importlib.resources import files

import numpy as np
import pytest

from bateleur.cudagraph import DispatchDecision, DispatchReason
from bateleur.eagle import AcceptStats
from bateleur.runner.serve.metrics import HELP, render
from bateleur.runner.stats import EngineStats, OffloadStats, PrefixCacheStats, RequestHistograms

parser = pytest.importorskip("prometheus_client.parser", reason="the extra serve is not installed")


def busy() -> EngineStats:
    """Engine statistics with every counter set."""
    stats = EngineStats(num_running=3, num_waiting=4, kv_cache_usage=0.25, num_preemptions=7)
    stats.prefix_cache = PrefixCacheStats(100, 64)
    stats.num_prefill_tokens, stats.num_emitted_tokens = 36, 50
    stats.finished.update({"stop": 2, "length": 1})
    stats.acceptance = AcceptStats(2)
    stats.acceptance.update(np.array([2, 2, 0]), np.array([2, 1, 0]))
    stats.offload = OffloadStats(host_bytes=9, host_hit_tokens=16, stored_bytes=40, loaded_bytes=30, dropped_bytes=2)
    stats.offload.disk_hit_tokens, stats.offload.written_bytes, stats.offload.read_bytes = 8, 7, 6
    stats.offload.refused["corrupt"], stats.offload.unwritten_files = 2, 1
    for why in (DispatchReason.DECODE, DispatchReason.DECODE, DispatchReason.HAS_PREFILL):
        stats.decisions.count(DispatchDecision(None, why))
    stats.histograms.time_to_first_token_seconds.observe_all([0.001, 0.3, 1e6], [1, 1, 1])
    return stats


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    """Parse metrics to values by name and labels, without the model's label."""
    return {
        (each.name, *(value for name, value in sorted(each.labels.items()) if name != "model_name")): each.value
        for family in parser.text_string_to_metric_families(text.decode())
        for each in family.samples
    }


def test_a_label_may_be_empty() -> None:
    stats = busy()
    stats.offload.refused[""] = 3  # type: ignore[union-attr]
    name = "bateleur:kv_offload_refused_files_total"
    read = samples(render(stats, "a model"))
    assert (read[name, ""], read[name, "corrupt"]) == (3, 2)


def test_counters_have_the_names_of_vllm() -> None:
    read = samples(render(busy(), "a model", queued=5))
    expected = {
        ("bateleur:num_requests_running",): 3,
        ("bateleur:num_requests_waiting",): 9,
        ("bateleur:kv_cache_usage_perc",): 0.25,
        ("bateleur:num_preemptions_total",): 7,
        ("bateleur:prefix_cache_queries_total",): 100,
        ("bateleur:prefix_cache_hits_total",): 64,
        ("bateleur:prompt_tokens_total",): 36,
        ("bateleur:kv_offload_hit_tokens_total", "host"): 16,
        ("bateleur:kv_offload_bytes_total", "store"): 40,
        ("bateleur:kv_offload_bytes_total", "load"): 30,
        ("bateleur:kv_offload_bytes_total", "drop"): 2,
        ("bateleur:kv_offload_hit_tokens_total", "disk"): 8,
        ("bateleur:kv_offload_bytes_total", "write"): 7,
        ("bateleur:kv_offload_bytes_total", "read"): 6,
        ("bateleur:kv_offload_refused_files_total", "corrupt"): 2,
        ("bateleur:kv_offload_unwritten_files_total",): 1,
        ("bateleur:generation_tokens_total",): 50,
        ("bateleur:request_success_total", "stop"): 2,
        ("bateleur:request_success_total", "length"): 1,
        ("bateleur:spec_decode_num_drafts_total",): 2,
        ("bateleur:spec_decode_num_draft_tokens_total",): 4,
        ("bateleur:spec_decode_num_accepted_tokens_total",): 3,
        ("bateleur:spec_decode_num_accepted_tokens_per_pos_total", "0"): 2,
        ("bateleur:spec_decode_num_accepted_tokens_per_pos_total", "1"): 1,
        ("bateleur:graph_steps_total", "decode graph"): 2,
        ("bateleur:eager_steps_total", "no graphs for batches with a prefill row"): 1,
        ("bateleur:time_to_first_token_seconds_bucket", "0.001"): 1,
        ("bateleur:time_to_first_token_seconds_bucket", "0.5"): 2,
        ("bateleur:time_to_first_token_seconds_bucket", "200.0"): 2,
        ("bateleur:time_to_first_token_seconds_bucket", "+Inf"): 3,
        ("bateleur:time_to_first_token_seconds_count",): 3,
        ("bateleur:time_to_first_token_seconds_sum",): 1000000.301,
    }
    assert expected.items() <= read.items()


def test_a_fresh_engine_without_drafts_tells_no_drafts() -> None:
    names = {name for name, *_ in samples(render(EngineStats(), "a model"))}
    assert "bateleur:generation_tokens_total" in names
    assert not any("spec_decode" in name for name in names)


def test_a_model_name_may_hold_anything() -> None:
    name = 'a "model"\\ of\nmine'
    families = parser.text_string_to_metric_families(render(EngineStats(), name).decode())
    assert {sample.labels["model_name"] for family in families for sample in family.samples} == {name}


def test_every_histogram_is_rendered() -> None:
    assert {each.name for each in fields(RequestHistograms)} == {
        name.replace("iteration_tokens_total", "iteration_tokens") for name in HELP
    }


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    told = {name for name, *_ in samples(render(busy(), "a model"))}
    dashboard = json.loads(files("bateleur.runner.serve").joinpath("grafana.json").read_text())
    asked = set(re.findall(r"bateleur:\w+", json.dumps(dashboard["panels"])))
    assert len(asked) > 15
    assert asked <= told, asked - told
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
