"""A broken draft head drafts badly or not at all, and the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bateleur.runner import LLM, SamplingParams

PROMPTS: list[Any] = [{"prompt_token_ids": list(ids)} for ids in (range(5, 12), range(5, 28), [30])]
PARAMS = [
    SamplingParams(max_tokens=9, temperature=temperature, seed=7, ignore_eos=True) for temperature in (0.0, 0.8, 0.0)
]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared, ahead": {"enable_prefix_caching": True, "async_scheduling": True},
    "auto": {"draft_policy": "auto"},
    "ratio": {"speculative_rule": "ratio"},
    "block": {"speculative_rule": "block", "enable_prefix_caching": True},
}


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    common = {"max_model_len": 48, "max_num_seqs": 2, "max_num_batched_tokens": 13, "block_size": 4}
    llm = LLM(folder, device="cpu", dtype="float32", skip_tokenizer_init=True, **common, **settings)
    done = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
    assert {each.finish_reason for each in done} == {"length"}
    return [list(each.token_ids) for each in done]


@pytest.fixture(scope="module")
def target(tiny: Callable[[str], Path]) -> tuple[Path, list[list[int]]]:
    folder = tiny("llama")
    return folder, tokens(folder)


@pytest.mark.parametrize(
    ("weight", "value"), [("fc.weight", torch.nan), ("norm.weight", 3e37), ("lm_head.weight", torch.inf)]
)
def test_what_a_broken_head_drafts_changes_nothing(
    target: tuple[Path, list[list[int]]], make_head: Callable[..., Path], weight: str, value: float
) -> None:
    """NaN in hidden states, in keys and values, or in logits; under rules that need draft distributions, and for greedy
    rows.
    """
    folder, plain = target
    head = make_head(hidden_size=48, vocab_size=101, head_dim=16, taps=(1, 2, 5), max_position_embeddings=64)
    file = head / "model.safetensors"
    tensors = load_file(file)
    tensors[weight].view(-1)[::2] = value
    save_file(tensors, file)
    for settings in SETTINGS.values():
        found = tokens(folder, draft=head, num_speculative_tokens=3, **settings)
        if "speculative_rule" in settings:
            assert found[::2] == plain[::2]
            assert all(0 <= token < 101 for token in found[1])
        else:
            assert found == plain
