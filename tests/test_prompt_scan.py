"""Engines that scan the prompts of delta rules by fla-core, with a double of it: when, and never inside a graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bateleur.cudagraph import CudaGraphMode, DispatchReason
from bateleur.mamba import PromptScan
from bateleur.mamba.ops import fla
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.diagnose.checkpoint_facts import checkpoint_table, describe_checkpoint
from fla_double import Double

MODELS = ["gated_delta", "kimi_delta"]
PROMPTS = [range(1, 21), [5, 6], range(1, 18), range(3, 14)]
CACHED = {"enable_prefix_caching": True, "mamba_block_size": 8}
PARTS = {"max_num_batched_tokens": 9}
GRAPHS = {
    "cudagraph_backend": "recorded",
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_capture_sizes": [2, 4, 8, 16],
}


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    """Installs the double, which also works on a CPU and in float32."""
    made = Double.installed(monkeypatch)
    monkeypatch.setattr(fla, "why_not", lambda *_: None)
    monkeypatch.setattr(fla, "version", lambda: "0.6.0")
    yield made
    fla.kernel.cache_clear()


def engine(folder: Path, **settings: Any) -> LLM:
    common = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 3, "block_size": 8}
    return LLM(folder, skip_tokenizer_init=True, **(common | settings))


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": list(ids)} for ids in PROMPTS], params)
    return [list(each.outputs[0].token_ids) for each in done]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", [{}, PARTS, PARTS | CACHED], ids=["plain", "parts", "cached"])
def test_tokens_are_those_of_our_own_scan(
    name: str, settings: dict[str, Any], double: Double, recurrent: Callable[[str], Any]
) -> None:
    folder, _ = recurrent(name)
    own = tokens(engine(folder, **settings))
    assert double.calls == 0
    llm = engine(folder, prompt_scan="fla", **settings)
    assert tokens(llm) == own
    assert double.calls > 0
    assert llm.engine.setup.prompt_scan is PromptScan.FLA


def test_steps_that_keep_a_state_inside_a_prompt_are_ours(double: Double, recurrent: Callable[[str], Any]) -> None:
    folder, _ = recurrent("gated_delta")
    params = SamplingParams(max_tokens=1, temperature=0.0)
    for ids, whole in ((range(1, 9), True), (range(1, 10), False), (range(1, 4), True)):
        llm = LLM(folder, device="cpu", max_model_len=64, max_num_seqs=1, block_size=8, prompt_scan="fla", **CACHED)
        double.calls = 0
        llm.generate([{"prompt_token_ids": list(ids)}], params)
        assert (double.calls > 0) == whole


@pytest.mark.parametrize("name", MODELS)
def test_no_graph_has_it(name: str, double: Double, recurrent: Callable[[str], Any]) -> None:
    """The double reads lengths on the host, which a capture refuses."""
    folder, _ = recurrent(name)
    own = tokens(engine(folder))
    llm = engine(folder, prompt_scan=PromptScan.FLA, **GRAPHS)
    manager = llm.engine.runner.graphs.manager
    assert manager is not None
    assert {key.mode for key in manager.ready} == {CudaGraphMode.PIECEWISE, CudaGraphMode.FULL}
    double.calls = 0  # counts the eager parts between captured pieces
    assert tokens(llm) == own
    assert double.calls > 0
    assert llm.engine.runner.graphs.decisions.by_reason[DispatchReason.PIECEWISE] > 0


def test_a_device_or_dtype_that_it_does_not_serve_is_refused(recurrent: Callable[[str], Any]) -> None:
    folder, _ = recurrent("kimi_delta")
    rule = "prompt_scan is 'fla'; fla-core does not serve: it runs on CUDA, and the device is cpu"
    for make in (LLM, describe_checkpoint):
        with pytest.raises(ValueError, match=f"^{rule}$"):
            make(folder, device="cpu", prompt_scan="fla")


def test_a_version_that_it_does_not_know_is_refused(
    double: Double, recurrent: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["fla.ops.kda"], "chunk_kda", lambda q, **rest: None)
    fla.kernel.cache_clear()
    with pytest.raises(ValueError, match=r"^prompt_scan is 'fla'; fla\.ops\.kda\.chunk_kda .* has no argument k, "):
        LLM(recurrent("kimi_delta")[0], device="cpu", prompt_scan="fla")


def test_info_tells_what_scans_and_why_nothing_else(
    recurrent: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = recurrent("gated_delta")
    facts = describe_checkpoint(folder, device="cpu")
    assert facts["prompt_scan"] == "own kernels; fla-core does not serve: it runs on CUDA, and the device is cpu"
    assert f"delta-rule prompt scan     {facts['prompt_scan']}" in checkpoint_table(facts)
    assert describe_checkpoint(recurrent("mamba2")[0], device="cpu")["prompt_scan"] is None
    monkeypatch.setattr(fla, "why_not", lambda *_: None)
    monkeypatch.setattr(fla, "version", lambda: "0.6.0")
    assert (
        describe_checkpoint(folder, device="cpu")["prompt_scan"]
        == "own kernels; fla-core 0.6.0 can be selected: prompt_scan"
    )
    monkeypatch.setattr(fla, "kernel", lambda per_channel: None)
    told = describe_checkpoint(folder, device="cpu", prompt_scan="fla")["prompt_scan"]
    assert told == "fla-core 0.6.0, own kernels in steps that keep a state inside a row"
