"""Times of requests, and the statistics of them."""

from dataclasses import replace

import pytest

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.stats import PrefixCacheStats

PROMPTS = ["def parse(text):", "class Shape:", "import os", "for x in"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=2, max_model_len=128, draft="auto", enable_prefix_caching=True)


def test_times_of_a_request_are_in_order_and_all_are_counted(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    for output in outputs:
        times = output.metrics
        marks = [times.arrival_time, times.first_scheduled_time, times.first_token_time, times.last_token_time]
        assert marks == sorted(marks)
        assert marks[0] < marks[2] < marks[3]
    assert outputs[-1].metrics.first_scheduled_time > outputs[0].metrics.last_token_time, "two run at once"
    spread = llm.get_metrics().histograms
    assert spread.time_to_first_token_seconds.count == spread.e2e_request_latency_seconds.count == 4
    # One observation per token except the first.
    assert spread.inter_token_latency_seconds.count == 4 * 8
    decoded = sum(output.metrics.last_token_time - output.metrics.first_token_time for output in outputs)
    assert spread.request_decode_time_seconds.total == pytest.approx(decoded)
    assert spread.inter_token_latency_seconds.total == pytest.approx(decoded)
    stats = llm.get_metrics()
    assert stats.finished == {"length": 4}
    assert spread.iteration_tokens.count == stats.num_steps == stats.decisions.by_reason.total()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


def test_queues_are_told_between_steps(llm: LLM) -> None:
    ids = [llm.add_request(prompt, SamplingParams(max_tokens=30, seed=0)) for prompt in PROMPTS]
    assert (llm.get_metrics().num_running, llm.get_metrics().num_waiting) == (0, 4)
    llm.step()
    stats = llm.get_metrics()
    assert (stats.num_running, stats.num_waiting) == (2, 2)
    assert 0 < stats.kv_cache_usage < 1
    before = stats.finished["abort"]
    for name in ids:
        llm.abort(name)
    assert llm.get_metrics().finished["abort"] == before + 4
    assert (llm.get_metrics().num_running, llm.get_metrics().kv_cache_usage) == (0, 0.0)


def test_prompt_tokens_that_were_found_are_counted_when_they_are(llm: LLM) -> None:
    prompt = list(range(100, 180))
    llm.generate([prompt], SamplingParams(max_tokens=1))
    before = replace(llm.get_metrics().prefix_cache)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1))
    assert output.num_cached_tokens > 0
    after = llm.get_metrics().prefix_cache
    assert after == PrefixCacheStats(before.num_queries + 80, before.num_hits + output.num_cached_tokens)
