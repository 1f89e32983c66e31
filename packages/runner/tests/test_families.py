"""Every family through the whole engine, compared with transformers' own generation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES

from bateleur.runner import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 2, 33, 71, 8, 60, 4, 19], [7], [11, 3, 50], [(13 * i) % 90 + 1 for i in range(37)]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [64, 8], ids=["whole prompts", "chunks"])
def test_greedy_tokens_equal_transformers(
    family: str, budget: int, tiny_checkpoint: Callable[..., tuple[Path, Any]]
) -> None:
    folder, model = tiny_checkpoint(family)
    llm = LLM(
        folder,
        device="cpu",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        block_size=8,
        skip_tokenizer_init=True,
    )
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
        ours = output.outputs[0]
        # Teacher-forced, in one piece: transformers' cached decode leaves out NemotronH's clamp of the time step.
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ours.token_ids])).logits[0]
        assert ours.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert ours.text == ""


def test_without_a_tokenizer_text_is_refused(tiny_checkpoint: Callable[..., tuple[Path, Any]]) -> None:
    folder, _ = tiny_checkpoint("llama")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        LLM(folder, device="cpu", max_model_len=32)
    llm = LLM(folder, device="cpu", max_model_len=32, max_num_seqs=2, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="it must be token ids"):
        llm.generate("text", GREEDY)
    with pytest.raises(ValueError, match="no text to find it in"):
        llm.generate([[1, 2]], SamplingParams(stop="x"))
    last = list(llm.stream([[1, 2]], GREEDY))[-1]
    assert last.outputs[0].token_ids == llm.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_runs_on_cpu(dtype: str, tiny_checkpoint: Callable[..., tuple[Path, Any]]) -> None:
    folder, _ = tiny_checkpoint("bamba")
    llm = LLM(folder, device="cpu", dtype=dtype, max_model_len=64, max_num_seqs=4, skip_tokenizer_init=True)
    batched = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    assert [len(tokens) for tokens in batched] == [12] * 4
    assert llm.generate(PROMPTS[3:], GREEDY)[0].outputs[0].finish_reason == "length"
