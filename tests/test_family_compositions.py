"""Every model family with prefix caching, drafts and both state policies at once: the tokens of plain decoding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import FAMILIES
from torch import Tensor
from transformers import AutoConfig

from bateleur.eagle import DraftContext
from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.cache.costs import CacheCosts, CacheOptions
from bateleur.runner.checkpoint.families import FAMILIES as REGISTRY
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.config.engine_config import EngineConfig
from eagle_doubles.drafters import NoDrafts, RandomDrafter, ScriptedDrafter

"""All families with a tiny checkpoint."""
DRAFTS = 3
PARAMS = [
    SamplingParams(temperature=0, max_tokens=11, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=11, ignore_eos=True),
]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def prompts() -> list[dict[str, Any]]:
    """Two prompts that share 64 tokens, and one that continues the first as a conversation."""
    tokens: list[int] = np.random.default_rng(1).integers(3, 80, 100).tolist()
    return [{"prompt_token_ids": [*tokens[:64], *end]} for end in ([5, 7, 9], tokens[64:73], [11] * 3)]


def build(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, device="cpu", skip_tokenizer_init=True, **({"max_num_seqs": 2} | settings))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and the outputs of a plain engine, one request at a time."""
    folder = tiny(request.param)
    plain = build(folder, max_num_seqs=1, mamba_state_policy="slots")
    return folder, [ids(plain.generate([prompt], each))[0] for prompt in prompts() for each in PARAMS]


def test_64_shared_tokens_are_a_hit_by_default(family: tuple[Path, list[list[int]]]) -> None:
    folder, wanted = family
    llm = build(folder, enable_prefix_caching=True)
    outputs = [output for prompt in prompts() for each in PARAMS for output in llm.generate([prompt], each)]
    assert ids(outputs) == wanted
    assert [output.num_cached_tokens for output in outputs] == [0] + [64] * 5


LARGE = ("falcon_h1", "kimi_linear", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


@pytest.mark.parametrize("name", LARGE)
def test_64_tokens_are_kept_where_a_state_costs_as_much_as_hundreds(name: str) -> None:
    """vLLM #51250: at the default sizes of transformers, which are those of released models, a state costs as much as
    hundreds of tokens.
    """
    spec = REGISTRY[name].read_spec(ConfigFields(AutoConfig.for_model(name)))
    options = CacheOptions.of(EngineConfig.of(enable_prefix_caching=True), spec, torch.device("cuda"))
    costs = CacheCosts.of(spec, torch.bfloat16, 8192, options)
    assert costs.page_bytes > 200 * costs.token_bytes
    assert costs.retention is not None
    assert [(1 + column) * 64 for column in costs.retention.columns_to_cache(0, 70, 70)] == [64]
    assert [(1 + column) * 64 for column in costs.retention.columns_to_cache(0, 200, 200)] == [64, 128, 192]


class Either(NoDrafts):
    """Switches between two drafters in an engine that is captured once."""

    def __init__(self, inner: ScriptedDrafter | RandomDrafter) -> None:
        super().__init__(inner.num_speculative_tokens)
        self.inner = inner

    def admit(self, row: int, token_ids: list[int]) -> None:
        self.inner.admit(row, token_ids)

    def propose(self, context: DraftContext) -> Tensor:
        return self.inner.propose(context)


@pytest.mark.parametrize(
    ("policy", "graphs"), [("fold", "FULL_AND_PIECEWISE"), pytest.param("slots", "NONE", marks=pytest.mark.slow)]
)
def test_prefixes_drafts_and_graphs_at_once(family: tuple[Path, list[list[int]]], policy: str, graphs: str) -> None:
    folder, wanted = family
    texts = [
        [*prompt["prompt_token_ids"], *tokens]
        for prompt, tokens in zip([each for each in prompts() for _ in PARAMS], wanted, strict=True)
    ]

    def script(tokens: Any) -> list[int]:
        known = [text[len(tokens) :] for text in texts if text[: len(tokens)] == list(tokens)]
        return known[0] if known else []

    drafter = Either(ScriptedDrafter(script, DRAFTS, 2, 80))
    llm = build(
        folder,
        drafter=drafter,
        num_speculative_tokens=DRAFTS,
        enable_prefix_caching=True,
        block_size=4,
        mamba_block_size=8,
        mamba_state_policy=policy,
        max_num_batched_tokens=23,
        cudagraph_mode=graphs,
        cudagraph_backend="recorded",
        cudagraph_capture_sizes=[2, 8, 23],
    )
    asked = [each for each in prompts() for _ in PARAMS]
    outputs = llm.generate(asked, PARAMS * 3)
    assert ids(outputs) == wanted
    assert sum(output.num_cached_tokens for output in outputs) >= 2 * 64
    assert llm.get_metrics().num_draft_tokens > 0
    drafter.inner = RandomDrafter(DRAFTS, 80)
    assert ids(llm.generate(asked, PARAMS * 3)) == wanted
