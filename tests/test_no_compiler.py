"""Without gcc, torch and numpy implementations replace all C kernels and give the same results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bateleur.metadata import native

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch

torch.set_num_threads(1)
folder, head, path = {arguments!r}
os.environ["PATH"] = path
from bateleur.metadata import native
from bateleur.runner import LLM, SamplingParams

SIZES = dict(device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=64, max_num_seqs=3,
             max_num_batched_tokens=12, block_size=4)
SHARED = dict(enable_prefix_caching=True, mamba_block_size=8)
ENGINES = [
    dict(SHARED, draft=head, num_speculative_tokens=2, mamba_state_policy="fold"),
    dict(SHARED, draft="ngram", prompt_lookup_min=1, num_speculative_tokens=3, mamba_state_policy="slots",
         async_scheduling=True),
    dict(draft=head, num_speculative_tokens=2, speculative_rule="block"),
]
text = [(7 * i) % 90 + 3 for i in range(20)]
PROMPTS = [{{"prompt_token_ids": each}} for each in (text, text[:5], [*text[:16], 9, 5], [8] * 3)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.1, min_p=0.05, seed=2, max_tokens=9, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, n=2, max_tokens=7, stop_token_ids=[50], logit_bias={{4: 2.0}}),
]
said = []
for options in ENGINES:
    with LLM(folder, **SIZES, **options) as llm:
        for turn in range(2):
            outputs = llm.generate(PROMPTS, PARAMS)
            said += [[each.token_ids for each in output.outputs] for output in outputs]
        stats = llm.get_metrics()
        assert stats.num_draft_tokens > 0, options
        assert (stats.num_cached_tokens > 0) == ("enable_prefix_caching" in options), options
maps = Path("/proc/self/maps").read_text()
loaded = {{Path(line.split()[-1]).name.partition("-")[0] for line in maps.splitlines() if "bateleur" in line}}
print(json.dumps([said, native.unavailable_reason(), sorted(loaded)]))
"""


@pytest.mark.skipif(native.unavailable_reason() is not None, reason="nothing can be compiled here")
def test_an_engine_without_a_compiler_says_what_one_with_it_says(
    fresh: Callable[[str], str], tiny_hybrid: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32: sums in another order are too close for these samples to differ."""

    def told(path: str) -> list[object]:
        arguments = (str(tiny_hybrid), str(tiny_head), path)
        found: list[object] = json.loads(fresh(SCRIPT.format(arguments=arguments)).splitlines()[-1])
        return found

    compiled, why, kernels = told(os.environ["PATH"])
    assert why is None
    assert {"attention", "chain", "draw", "linear", "norm"} <= set(kernels)  # type: ignore[call-overload]
    assert told("") == [compiled, "there is no gcc", []]
