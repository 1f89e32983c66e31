"""Requests that share prefixes get the tokens they would get alone, and less is computed for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.runner import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def prompts(*lengths: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts that are prefixes of one sequence."""
    tokens = np.random.default_rng(seed).integers(3, 60, max(lengths)).tolist()
    return [{"prompt_token_ids": tokens[:length]} for length in lengths]


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def make(tiny_llama: Path) -> Callable[..., LLM]:
    def build(**overrides: Any) -> LLM:
        settings: dict[str, Any] = {"max_num_seqs": 4, "block_size": 4, "enable_prefix_caching": True}
        return LLM(tiny_llama, device="cpu", skip_tokenizer_init=True, **(settings | overrides))

    return build


def test_a_prefix_is_computed_once(make: Callable[..., LLM]) -> None:
    llm, plain = make(), make(enable_prefix_caching=False)
    first, second = prompts(21, 30)
    (cold,) = llm.generate([first], GREEDY)
    before = llm.get_metrics().num_prefill_tokens
    (warm,) = llm.generate([second], GREEDY)
    assert cold.num_cached_tokens == 0
    assert cold.cache_miss == "no request computed this prefix, or it was evicted"
    assert (warm.num_cached_tokens, warm.cache_miss) == (20, "")
    assert llm.get_metrics().num_prefill_tokens - before == 10
    assert ids([cold, warm]) == ids(plain.generate([first, second], GREEDY))


def test_m13_at_least_one_token_is_left_to_compute(make: Callable[..., LLM]) -> None:
    """vLLM #50409: a prompt that ends with a block hits up to the block before."""
    llm = make()
    (prompt,) = prompts(16)
    tokens = ids(llm.generate([prompt], GREEDY))
    (again,) = llm.generate([prompt], GREEDY)
    assert again.num_cached_tokens == 12
    assert ids([again]) == tokens


def test_a_prompt_that_could_not_hit_says_why(make: Callable[..., LLM]) -> None:
    (output,) = make().generate(prompts(4), GREEDY)
    assert output.cache_miss == "4 tokens; a hit takes at least 5"


def test_a_conversation_hits_its_own_answers(make: Callable[..., LLM]) -> None:
    """Turn by turn: what was generated is part of the next prompt."""
    llm, plain = make(), make(enable_prefix_caching=False)
    rng = np.random.default_rng(1)
    history: list[int] = rng.integers(3, 60, 7).tolist()
    for turn in range(5):
        prompt = {"prompt_token_ids": list(history)}
        (ours,), (theirs,) = llm.generate([prompt], SAMPLED), plain.generate([prompt], SAMPLED)
        assert ids([ours]) == ids([theirs])
        if turn:
            assert ours.num_cached_tokens >= len(history) - 6 - 4
        history += ours.outputs[0].token_ids + rng.integers(3, 60, 5).tolist()


@pytest.mark.parametrize("graphs", [{}, {"cudagraph_mode": "FULL", "cudagraph_backend": "recorded"}])
def test_any_traffic_gets_the_tokens_of_a_cold_engine(make: Callable[..., LLM], graphs: dict[str, Any]) -> None:
    """Few blocks, so that prefixes are shared, evicted and recomputed, and running requests preempted."""
    plain = make(enable_prefix_caching=False, max_num_seqs=1)
    block_bytes = plain.cache_plan.kv_bytes // plain.cache_plan.num_blocks
    llm = make(
        kv_cache_memory_bytes=22 * block_bytes,
        max_num_batched_tokens=11,
        max_model_len=64,
        cudagraph_capture_sizes=[1, 2, 4, 11] if graphs else None,
        **graphs,
    )
    rng = np.random.default_rng(5)
    hits = 0
    for round_ in range(6):
        chosen = prompts(*rng.integers(1, 40, 6).tolist(), seed=int(rng.integers(2)))
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=int(rng.integers(5, 25)), ignore_eos=True)
        outputs = llm.generate(chosen, params)
        hits += sum(output.num_cached_tokens for output in outputs)
        assert ids(outputs) == ids(plain.generate(chosen, params)), round_
    scheduler = llm.engine.scheduler
    assert hits > 50
    assert scheduler.pool is not None
    assert scheduler.pool.num_free == scheduler.pool.capacity
    assert scheduler.pool.num_published > 0
    assert llm.get_metrics().num_preemptions > 0


def test_hybrid_models_say_that_they_cannot_yet() -> None:
    with pytest.raises(ValueError, match="enable_prefix_caching is True; models with Mamba layers"):
        LLM(device="cpu", max_model_len=64, enable_prefix_caching=True)
