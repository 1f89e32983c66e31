"""FlashInfer in captured steps: planned into fixed buffers before each replay, with a double of its wrappers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flashinfer_double import install

from bateleur.cudagraph import DispatchReason
from bateleur.metadata.backends.flashinfer import FlashInferBackend
from bateleur.runner import LLM, RequestOutput, SamplingParams

SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 48, "block_size": 4}
GRAPHS: dict[str, Any] = {
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_backend": "recorded",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    "cudagraph_checks": "PARANOID",
}


def say(llm: LLM) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": [(5 * i + n) % 90 + 3 for i in range(n)]} for n in (7, 20, 3)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=9 + i, ignore_eos=True) for i in range(len(prompts))]
    return llm.generate(prompts, params)


@pytest.mark.parametrize("drafts", [{}, {"draft": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 2}])
def test_replays_follow_the_plan_of_their_step(
    make_llm: Callable[..., LLM], tiny_hybrid: Path, monkeypatch: pytest.MonkeyPatch, drafts: dict[str, Any]
) -> None:
    expected = [output.outputs[0].token_ids for output in say(make_llm(**SIZES, model=tiny_hybrid))]
    made = install(monkeypatch)
    monkeypatch.setattr(FlashInferBackend, "unsupported_reason", lambda *_, **__: None)
    llm = make_llm(**SIZES | GRAPHS | drafts, model=tiny_hybrid, attention_backend="flashinfer")
    fixed = [wrapper for wrapper in made if wrapper.fixed]
    plans = sum(wrapper.num_plans for wrapper in fixed)
    for _ in range(2):
        assert [output.outputs[0].token_ids for output in say(llm)] == expected
    decisions = llm.engine.runner.graphs.decisions.by_reason
    assert decisions[DispatchReason.DECODE] > 3
    assert sum(wrapper.num_plans for wrapper in fixed) == plans + decisions[DispatchReason.DECODE]
