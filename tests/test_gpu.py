"""The engine on a CUDA device: the tokens of the CPU, and no wait for the device before the outputs are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bateleur.runner import LLM, SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = ["def fibonacci(n):", "import os\n", "x", "class Stack:\n    def __init__(self"]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "slots": {"mamba_state_policy": "slots"},
    "eager": {"cudagraph_mode": "NONE"},
    "prefixes": {"enable_prefix_caching": True, "mamba_block_size": 16},
    "drafts": {"draft": "auto"},
    "drafts-slots": {"draft": "auto", "mamba_state_policy": "slots"},
    "drafts-eager": {"draft": "auto", "cudagraph_mode": "NONE"},
    "drafts-piecewise": {"draft": "auto", "cudagraph_mode": "FULL_AND_PIECEWISE"},
    "drafts-prefixes": {"draft": "auto", "enable_prefix_caching": True, "mamba_block_size": 16},
    "lookup": {"draft": "ngram"},
    "drafts-auto": {"draft": "auto", "draft_policy": "auto"},
}
ENGINES = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())


@ENGINES
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True),
    ],
    ids=["greedy", "sampled"],
)
def test_same_tokens_as_on_cpu(make_llm: Callable[..., LLM], params: SamplingParams, settings: dict[str, Any]) -> None:
    on_cpu = make_llm().generate(PROMPTS, params)
    llm = make_llm(device="cuda", max_num_batched_tokens=40, **settings)
    for _ in range(2):  # the second time with prefix hits
        on_gpu = llm.generate(PROMPTS, params)
        assert [o.outputs[0].token_ids for o in on_gpu] == [o.outputs[0].token_ids for o in on_cpu]


@pytest.mark.parametrize("settings", [{}, {"draft": "auto"}], ids=["plain", "drafts"])
def test_what_left_the_device_gives_the_same_tokens(
    make_llm: Callable[..., LLM], sized: Callable[..., LLM], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """From pinned host memory, and from a disk by way of it."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": [seed * 7 + i for i in range(70)]} for seed in range(12)]
    options = {"device": "cuda", "enable_prefix_caching": True, "mamba_block_size": 16} | settings
    expected = [each.outputs[0].token_ids for each in make_llm().generate(prompts, params)]
    below = {"kv_offload_bytes": 1 << 26, "kv_offload_path": tmp_path}
    with sized(make_llm, 40, 4, max_num_seqs=2, **options, **below) as llm:
        for _ in range(3):
            assert [each.outputs[0].token_ids for each in llm.generate(prompts, params)] == expected
        assert llm.get_metrics().offload.host_hit_tokens > 0  # type: ignore[union-attr]
    again = make_llm(**options, **below)
    assert [each.outputs[0].token_ids for each in again.generate(prompts, params)] == expected
    assert again.get_metrics().offload.disk_hit_tokens > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_other_rules_are_greedy_alike(make_llm: Callable[..., LLM], rule: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    on_cpu = make_llm().generate(PROMPTS, params)
    on_gpu = make_llm(device="cuda", draft="auto", speculative_rule=rule).generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in on_gpu] == [o.outputs[0].token_ids for o in on_cpu]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("settings", "count"), [({}, 2), ({"draft": "auto"}, 3)], ids=["plain", "drafts"])
def test_a_steady_step_replays_a_graph_for_each_of_its_parts(
    make_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    count: int,
    temperature: float,
) -> None:
    """The forward pass, the end of the step, and the whole proposal on graphs; see `test_step_graphs`."""
    llm = make_llm(device="cuda", **settings)
    replays, replay, steps = [0], torch.cuda.CUDAGraph.replay, []

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays[0] += 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    for prompt in PROMPTS:
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=60, ignore_eos=True)
        llm.add_request(prompt, params)
    while llm.has_unfinished_requests:
        before = replays[0]
        llm.step()
        steps.append(replays[0] - before)
    assert steps[3:8] == [count] * 5


@ENGINES
def test_a_step_waits_for_the_device_once(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Nothing synchronises before the copy of sampled ids, admissions included: torch raises if something does."""
    llm = make_llm(device="cuda", **settings)

    def admit(seed: int) -> None:
        for prompt in PROMPTS:
            params = SamplingParams(temperature=0.8, seed=seed, max_tokens=8, min_tokens=2, logprobs=2)
            llm.add_request(prompt, params)

    admit(0)
    while llm.has_unfinished_requests:  # warm up: one-time compilation and allocation
        llm.step()
    emit = llm.engine._outputs.emit

    def waits(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return emit(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(llm.engine._outputs, "emit", waits)
    admit(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        llm.step()
        admit(2)
        while llm.has_unfinished_requests:
            llm.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
