"""`max_model_len` is one number: the tokens of one request that the KV cache holds. All interfaces report and enforce
it.
"""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import EVEN

pytest.importorskip("fastapi", reason="needs the package fastapi")
from fastapi.testclient import TestClient

from bateleur.runner import LLM, AsyncLLM, SamplingParams
from bateleur.runner.diagnose.checkpoint_facts import checkpoint_table, describe_checkpoint
from bateleur.runner.serve.app import build_app
from bateleur.runner.serve.config import ServeConfig

LONGEST, BLOCK = 256, 8
GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix caching": {"enable_prefix_caching": True},
    "drafts": {"draft": "ngram", "num_speculative_tokens": 3},
    "drafts and prefix caching": {"draft": "ngram", "num_speculative_tokens": 3, "enable_prefix_caching": True},
}


@pytest.fixture
def options(tiny: Callable[[str], Path]) -> Callable[..., dict[str, Any]]:
    """Options of an engine whose KV cache holds fewer tokens than the model has positions."""

    def make(model: Path | None = None, **more: Any) -> dict[str, Any]:
        common = {"model": model or tiny("nemotron_h"), "device": "cpu", "max_num_seqs": 1, "block_size": BLOCK, **more}
        if "enable_prefix_caching" in more:
            common |= {"mamba_block_size": BLOCK}
        with LLM(**common) as llm:
            costs = llm.cache_plan.costs
        tokens = costs.fixed_bytes(1) + 13 * costs.block_bytes
        return common | {"kv_cache_memory_bytes": tokens + ("enable_prefix_caching" in more) * costs.page_bytes}

    return make


def lowered(options: dict[str, Any]) -> LLM:
    """An engine that warns about the lower length, and about the bytes that would avoid it."""
    with pytest.warns(RuntimeWarning, match=f"max_model_len is lowered from {LONGEST} to ") as said:
        llm = LLM(**options)
    (message,) = (str(each.message) for each in said if "max_model_len" in str(each.message))
    holds = (llm.cache_plan.num_blocks - 1) * BLOCK
    assert BLOCK < llm.limits.max_model_len == holds < LONGEST
    assert f" to {holds}: the KV cache holds {holds} tokens of one request in " in message
    for option in ("kv_cache_memory_bytes", "gpu_memory_utilization", "max_num_seqs=1"):
        assert option in message
    (needed,) = re.findall(rf"and {LONGEST} tokens need (\d+) bytes", message)
    with warnings.catch_warnings(record=True):  # with prefix caching, there may be no memory for states
        enough = LLM(**options | {"kv_cache_memory_bytes": int(needed)})
    with enough:
        assert enough.limits.max_model_len == LONGEST
    return llm


@pytest.mark.parametrize("way", WAYS)
def test_a_request_may_use_what_the_cache_holds_and_no_more(options: Callable[..., dict[str, Any]], way: str) -> None:
    small = options(**WAYS[way])
    llm = lowered(small)
    holds = llm.limits.max_model_len
    assert llm.cache_plan.share_prefixes == ("enable_prefix_caching" in WAYS[way])
    for wanted in (None, 10_000):
        params = SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True)
        (output,) = llm.generate([[5] * 20], params)
        assert len(output.outputs[0].token_ids) == holds - 20
        assert output.outputs[0].finish_reason == "length"
    several = llm.generate([[5] * 20, [7] * 30, [9] * (holds - 1)], GREEDY)
    assert [len(each.outputs[0].token_ids) for each in several] == [holds - 20, holds - 30, 1]
    with pytest.raises(ValueError, match=rf"{holds} tokens; .*maximum context length is {holds} tokens"):
        llm.generate([[5] * holds], GREEDY)
    with pytest.raises(ValueError, match=rf"^max_model_len={LONGEST}: ") as error:
        LLM(**small, max_model_len=LONGEST)
    (told,) = re.findall(r"set max_model_len to at most (\d+), or raise kv_cache_memory_bytes", str(error.value))
    most = int(told)  # an explicit length has priority over prefix caching
    assert most == holds if "enable_prefix_caching" not in small else most >= holds
    with LLM(**small, max_model_len=holds) as chosen:
        assert chosen.limits.max_model_len == holds
        (same,) = chosen.generate([[5] * 20], GREEDY)
    assert same.outputs[0].token_ids == output.outputs[0].token_ids


def test_tokens_are_those_of_an_engine_with_more_memory(options: Callable[..., dict[str, Any]]) -> None:
    llm = lowered(options())
    (output,) = llm.generate([[5] * 20], GREEDY)
    params = SamplingParams(temperature=0, max_tokens=llm.limits.max_model_len - 20, ignore_eos=True)
    (expected,) = LLM(**options() | {"kv_cache_memory_bytes": None}).generate([[5] * 20], params)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_rows_that_nobody_chose_make_room_for_a_chosen_length(options: Callable[..., dict[str, Any]]) -> None:
    small = options() | {"max_num_seqs": None}
    with pytest.warns(RuntimeWarning, match="max_num_seqs is"):
        llm = LLM(**small | {"kv_cache_memory_bytes": 3 * small["kv_cache_memory_bytes"]}, max_model_len=LONGEST)
    assert llm.limits.max_model_len == LONGEST


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_agree(tiny: Callable[..., Path], options: Callable[..., dict[str, Any]]) -> None:
    with lowered(options(tiny("llama", **EVEN["llama"]), tensor_parallel_size=2, rank_timeout=20)) as llm:
        (output,) = llm.generate([[5] * 20], GREEDY)
    assert len(output.outputs[0].token_ids) == llm.limits.max_model_len - 20


@pytest.mark.filterwarnings("ignore:max_model_len is lowered:RuntimeWarning")
def test_the_server_and_info_report_it(options: Callable[..., dict[str, Any]]) -> None:
    small = options()
    engine = AsyncLLM(**small)
    holds = engine.llm.limits.max_model_len
    assert holds < LONGEST
    facts = describe_checkpoint(**{("path" if name == "model" else name): value for name, value in small.items()})
    assert facts["max_model_len"] == holds
    assert re.search(rf"^longest request +{holds} tokens", checkpoint_table(facts), re.MULTILINE)
    client = TestClient(build_app(engine, ServeConfig(served_model_name=["tiny"])))
    (model,) = client.get("/v1/models").json()["data"]
    assert model["max_model_len"] == holds
    prompt = [5] * 20
    for wanted in (100_000, LONGEST):
        asked = {"prompt": prompt, "ignore_eos": True, "temperature": 0, "max_tokens": wanted}
        assert client.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == holds - 20
    error = client.post("/v1/completions", json={"prompt": [5] * holds}).json()["error"]
    assert f"maximum context length is {holds} tokens" in error["message"]
    asyncio.run(engine.close())
