"""Host cost of an eager prefill step of published models: number of launches and of Python function calls.

A prompt of more than 512 tokens runs without a graph, so the host launches every kernel. Counts do not depend on the
machine, so no time is measured.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
import triton

from bateleur.runner import SamplingParams

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a device that this machine has"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning"),
]

ROOT = Path(__file__).parents[1]
TOKENS = 600
"""Tokens of the prompt."""
MOST = {
    "Nemotron-3-Nano-30B-A3B": (629, 4000),
    "Qwen3.5-9B": (454, 4100),
    "Qwen3.5-35B-A3B": (956, 6900),
    "Llama-3.1-8B": (390, 2850),
}
"""Launches per step (kernels and other operators), and calls of functions of this project and of Triton up to Triton's
launcher. They were 618, 430, 924 and 350 launches, and 6766, 5718, 10194 and 4460 calls, when every launch computed its
tile sizes by Triton's functions. Each attention layer has a launch that joins KV splits, and a step one launch that
builds the work list: 7, 9, 11 and 33 launches. The scan of a delta rule has a second launch that joins tiles.
It asks how its keys are aligned: 2 calls. The end of an eager step stores tokens in the rows that captured steps use:
12 launches.
"""
COUNTED = tuple(map(str, (ROOT / "packages", Path(triton.__file__).parent)))


def counted(calls: Counter[str]) -> Any:
    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(COUNTED):
            calls[frame.f_code.co_qualname] += 1

    return note


@pytest.mark.parametrize("name", MOST)
def test_an_eager_prompt_step(harness: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    spec = importlib.import_module("performance.published").spec_of(name)
    cuda = harness.FakeCuda(monkeypatch, spec=spec)
    llm = cuda.make(max_model_len=8192, max_num_batched_tokens=2048, kv_cache_memory_bytes=1 << 36)
    step, steps = type(llm).step, list[Counter[str]]()

    def profiled(self: Any) -> Any:
        steps.append(Counter())
        sys.setprofile(counted(steps[-1]))
        try:
            return step(self)
        finally:
            sys.setprofile(None)

    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0)
    cuda.run(llm, [range(1, 1 + TOKENS)], [params])  # one-time work happens here
    monkeypatch.setattr(type(llm), "step", profiled)
    cuda.run(llm, [range(1, 1 + TOKENS)], [params])
    launches, calls = len(cuda.launched[0]), steps[0].total()
    most_launches, most_calls = MOST[name]
    assert launches <= most_launches, Counter(cuda.launched[0])
    assert launches < calls <= most_calls, steps[0].most_common(30)
