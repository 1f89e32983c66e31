"""The engine on a CUDA device: the same tokens as on CPU, and no wait for the device before the emission."""

from collections.abc import Callable

import pytest
import torch

from bateleur.runner import LLM, SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = ["def fibonacci(n):", "import os\n", "x", "class Stack:\n    def __init__(self"]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True),
    ],
    ids=["greedy", "sampled"],
)
def test_same_tokens_as_on_cpu(make_llm: Callable[..., LLM], params: SamplingParams) -> None:
    on_cpu = make_llm().generate(PROMPTS, params)
    on_gpu = make_llm(device="cuda", max_num_batched_tokens=8).generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in on_gpu] == [o.outputs[0].token_ids for o in on_cpu]


def test_a_step_waits_for_the_device_once(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the copy of the drawn ids, nothing synchronises: torch raises where it would."""
    llm = make_llm(device="cuda")
    for prompt in PROMPTS:
        llm.add_request(prompt, SamplingParams(temperature=0.8, seed=1, max_tokens=8, ignore_eos=True))
    llm.step()
    run = llm.engine._run

    def strict(*arguments: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(*arguments)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(llm.engine, "_run", strict)
    while llm.has_unfinished_requests:
        llm.step()
