"""Engines on quantised weights: the tokens of plain decoding with whatever an engine can do at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantize

from bateleur.runner import LLM, SamplingParams

PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True),
]
SIZES: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 23}
GRAPHS = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_backend": "recorded", "cudagraph_capture_sizes": [4, 12]}
NGRAM: dict[str, Any] = {"draft": "ngram"}
DRAFTS = {"qwen": {"draft": "mtp", "num_speculative_tokens": 2}, "nemotron": NGRAM, "gpt_oss": NGRAM}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    """`folders(model, format)`: a quantised checkpoint, and its dequantised copy."""
    return quantize.Checkpoints(tmp_path_factory)


def tokens(folder: Path, alone: bool = False, **settings: Any) -> list[list[int]]:
    """Of three prompts that share 16 tokens, greedy and drawn; `alone`: one request at a time."""
    ids: list[int] = np.random.default_rng(1).integers(3, 80, 40).tolist()
    prompts = [{"prompt_token_ids": [*ids[:16], *end]} for end in ([5, 7, 9], ids[16:37], [11] * 3)]
    with LLM(folder, device="cpu", skip_tokenizer_init=True, **(SIZES | settings)) as llm:
        batches: list[list[dict[str, Any]]] = [[each] for each in prompts] if alone else [prompts]
        return [
            output.outputs[0].token_ids
            for params in PARAMS
            for batch in batches
            for output in llm.generate(batch, params)
        ]


FAST = {("gpt_oss", "mxfp4"), ("qwen", "fp8 blocks"), ("qwen", "gptq v2 act order"), ("nemotron", "modelopt mixed")}
CASES = [
    pytest.param(model, kind, marks=() if (model, kind) in FAST else pytest.mark.slow, id=f"{model}, {kind}")
    for model, kind in quantize.CASES
]
CACHED = {"enable_prefix_caching": True, "mamba_block_size": 8}


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_tokens_do_not_depend_on_how_they_are_computed(
    folders: Callable[[str, str], tuple[Path, Path]], model: str, kind: str
) -> None:
    """Alone, beside others, from a cached prefix, behind drafts, out of graphs, and dequantised."""
    folder, plain = folders(model, kind)
    wanted = tokens(folder, alone=True, mamba_state_policy="slots")
    assert tokens(plain, alone=True) == wanted
    assert tokens(folder, quantization="dequantize") == wanted
    assert tokens(folder, **CACHED) == wanted
    assert tokens(folder, **CACHED, **DRAFTS[model], **GRAPHS) == wanted


@pytest.mark.filterwarnings("ignore:kv_cache_dtype is fp8, and the checkpoint has no k_scale:RuntimeWarning")
@pytest.mark.parametrize("kind", ["fp8 blocks", pytest.param("nvfp4-pack-quantized", marks=pytest.mark.slow)])
def test_an_fp8_cache_with_prefixes_and_drafts_in_a_full_pool(
    folders: Callable[[str, str], tuple[Path, Path]], sized: Callable[..., LLM], kind: str
) -> None:
    """What corrupted Qwen3.6-27B-FP8 and Qwen3.5-397B-NVFP4 elsewhere (vLLM 47349, PR 43650): all at once."""
    ids: list[int] = np.random.default_rng(1).integers(3, 80, 40).tolist()
    prompts = [{"prompt_token_ids": [*ids[:24], *end]} for end in ([5, 7], ids[24:], [11] * 3, [5, 7])]
    params = [replace(PARAMS[i % 2], max_tokens=20) for i in range(len(prompts))]
    cache = SIZES | {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_dtype": "fp8"}
    with LLM(folders("qwen", kind)[0], **cache) as llm:
        wanted = [
            llm.generate(prompt, own)[0].outputs[0].token_ids for prompt, own in zip(prompts, params, strict=True)
        ]
    options = CACHED | GRAPHS | {"draft": "mtp", "num_speculative_tokens": 3, "cudagraph_capture_sizes": [4, 16]}
    with sized(partial(LLM, folders("qwen", kind)[0], **cache), 18, 2, **options) as llm:
        for _ in range(3):
            outputs = llm.generate(prompts, params)
            assert [output.outputs[0].token_ids for output in outputs] == wanted
        stats = llm.get_metrics()
        assert stats.num_preemptions
        assert stats.num_draft_tokens
        assert stats.prefix_cache.num_hits


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("model", "kind"), CASES)
def test_two_ranks_say_what_one_says(folders: Callable[[str, str], tuple[Path, Path]], model: str, kind: str) -> None:
    """With cached prefixes and drafts."""
    folder, _ = folders(model, kind)
    ranks = {"tensor_parallel_size": 2, "rank_timeout": 20}
    assert tokens(folder, **ranks, **CACHED, **DRAFTS[model]) == tokens(folder)
