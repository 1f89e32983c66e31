"""Offload to host memory changes no token, for any family, with drafts, and on graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.runner import LLM, RequestOutput, SamplingParams
from sharing import KINDS as SHARED
from sharing import sharing

GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True)
KINDS = SHARED | {"mtp": SHARED["mtp"] | {"async_scheduling": True}}
GRAPHS = {
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_backend": "recorded",
    "cudagraph_capture_sizes": [1, 2, 4, 12],
    "cudagraph_checks": "PARANOID",
}


@pytest.fixture(scope="module")
def engine(tiny: Callable[..., Path], tiny_head: Path, tiny_mtp: Path) -> Callable[..., LLM]:
    """An engine of one kind, which shares blocks of 4 tokens and states of 8."""
    return sharing(tiny, tiny_head, tiny_mtp, KINDS, max_model_len=64, kv_offload_bytes=1 << 22)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def prompts(*lengths: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts that are prefixes of one sequence."""
    tokens = np.random.default_rng(seed).integers(3, 60, max(lengths)).tolist()
    return [{"prompt_token_ids": tokens[:length]} for length in lengths]


def asked() -> list[tuple[list[dict[str, Any]], SamplingParams]]:
    """Five rounds of requests, some of which repeat after many others."""
    rng, rounds = np.random.default_rng(5), []
    for seed in (0, 1, 2, 0, 1):
        count = int(rng.integers(14, 22))
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=count, ignore_eos=True)
        shared, others = rng.integers(20, 36, 4).reshape(2, 2).tolist()
        rounds.append((prompts(*shared, seed=seed) + prompts(*others, seed=3 + seed), params))
    return rounds


@pytest.fixture(scope="module")
def cold(engine: Callable[..., LLM]) -> Callable[[str], list[list[list[int]]]]:
    """The outputs of an engine without prefix caching for `asked`."""
    known: dict[str, list[list[list[int]]]] = {}

    def say(kind: str) -> list[list[list[int]]]:
        if kind not in known:
            plain = {"enable_prefix_caching": False, "kv_offload_bytes": 0, "mamba_block_size": None}
            plain |= {"mamba_cache_mode": "none", "max_num_seqs": 1}
            llm = engine(kind, **plain)
            known[kind] = [ids(llm.generate(*each)) for each in asked()]
        return known[kind]

    return say


@pytest.mark.parametrize(
    ("kind", "graphs"),
    [
        ("attention", {}),
        ("fold", GRAPHS),
        *(pytest.param(kind, {}, marks=pytest.mark.slow) for kind in KINDS if kind != "attention"),
        *(pytest.param(kind, GRAPHS, marks=pytest.mark.slow) for kind in ("attention", "head-slots")),
    ],
)
def test_tokens_are_those_of_an_engine_that_shares_nothing(
    engine: Callable[..., LLM],
    sized: Callable[..., LLM],
    cold: Callable[[str], list[list[list[int]]]],
    kind: str,
    graphs: dict[str, Any],
) -> None:
    """Few blocks and pages, so that prefixes leave the device, and running requests are preempted."""
    llm = sized(engine, 19, 2, kind=kind, max_num_batched_tokens=12, max_num_seqs=4, **graphs)
    for round_, each in enumerate(asked()):
        assert ids(llm.generate(*each)) == cold(kind)[round_], round_
    stats = llm.get_metrics()
    assert stats.offload is not None
    assert stats.offload.host_hit_tokens > 40
    assert stats.num_preemptions > 0
    assert stats.offload.dropped_bytes == 0


@pytest.mark.parametrize("kind", ["attention", "fold"])
def test_host_memory_may_be_short_as_well(
    engine: Callable[..., LLM], sized: Callable[..., LLM], cold: Callable[[str], list[list[list[int]]]], kind: str
) -> None:
    llm = sized(engine, 24, 2, kind=kind, kv_offload_bytes=60_000)
    tier = llm.engine.scheduler.prefixes.offload_tiers  # type: ignore[union-attr]
    assert 4 < len(tier.blocks.rows) < 40  # type: ignore[union-attr]
    for round_, each in enumerate(asked()):
        assert ids(llm.generate(*each)) == cold(kind)[round_], round_
    assert llm.get_metrics().offload.stored_bytes > 120_000  # type: ignore[union-attr]


def test_requests_end_and_are_aborted_meanwhile(engine: Callable[..., LLM], sized: Callable[..., LLM]) -> None:
    llm, plain = sized(engine, 24, 2, kind="fold"), engine("fold", kv_offload_bytes=0)
    rng, done = np.random.default_rng(1), {}
    texts = [each["prompt_token_ids"] for seed in range(4) for each in prompts(30, 38, seed=seed)]
    for number, choice in enumerate(rng.integers(0, len(texts), 24).tolist()):
        llm.add_request({"prompt_token_ids": texts[choice]}, SAMPLED, request_id=f"{number} {choice}")
        for _ in range(int(rng.integers(1, 4))):
            done |= {each.request_id: each for each in llm.step()}
        if number % 5 == 4 and (here := sorted(llm.engine.requests)):
            llm.abort(here[-1])
    while llm.has_unfinished_requests:
        done |= {each.request_id: each for each in llm.step()}
    expected = ids(plain.generate([{"prompt_token_ids": each} for each in texts], SAMPLED))
    assert len(done) > 10
    for name, output in done.items():
        if output.outputs[0].finish_reason != "abort":
            assert output.outputs[0].token_ids == expected[int(name.split()[1])]
    assert llm.get_metrics().offload.host_hit_tokens > 0  # type: ignore[union-attr]


def test_what_went_wrong_does_not_come_back(engine: Callable[..., LLM], sized: Callable[..., LLM]) -> None:
    """A request that ends in NaN also removes its prefixes from host memory."""
    llm = sized(engine, 24, 2, kind="fold")
    embedding = llm.engine.model.embedding
    (prompt,) = prompts(40)
    spoiled = prompt["prompt_token_ids"][10]
    kept = embedding[spoiled].clone()
    clean = ids(engine("fold", kv_offload_bytes=0).generate([prompt], GREEDY))
    embedding[spoiled] = torch.nan
    pages = llm.engine.scheduler.prefixes.offload_tiers.pages  # type: ignore[union-attr]
    one = SamplingParams(temperature=0, max_tokens=1)
    llm.generate([{"prompt_token_ids": prompt["prompt_token_ids"][:9]}], one)
    for seed in (1, 2, 3):  # blocks shared with the failing request leave the device
        llm.generate(prompts(36, 20, seed=seed), one)
    before = pages._pool.num_cached
    (output,) = llm.generate([prompt], GREEDY)
    assert output.outputs[0].finish_reason == "error"
    assert output.num_cached_tokens == 8
    assert pages._pool.num_cached < before
    embedding[spoiled] = kept
    (output,) = llm.generate([prompt], GREEDY)
    assert (ids([output]), output.num_cached_tokens) == (clean, 0)


def test_an_engine_that_begins_again_finds_what_is_below(
    engine: Callable[..., LLM], sized: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that raises drops what is on the device, and nothing in host memory."""
    llm = sized(engine, 24, 2, kind="all")
    outputs = [llm.generate(*each) for each in asked()[:3]]
    run, failed = type(llm.engine)._launch, []

    def fails(self: Any, *args: Any) -> Any:
        if not failed:
            failed.append(True)
            raise RuntimeError("once")
        return run(self, *args)

    monkeypatch.setattr(type(llm.engine), "_launch", fails)
    again, params = asked()[0]
    for number, prompt in enumerate(again):
        llm.add_request(prompt, params, request_id=str(number))
    done: dict[str, RequestOutput] = {}
    with pytest.raises(RuntimeError, match="once"):
        llm.step()
    while llm.has_unfinished_requests:
        done |= {each.request_id: each for each in llm.step()}
    assert [done[str(number)].outputs[0].token_ids for number in range(len(again))] == ids(outputs[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_caching": False}, "kv_offload_bytes is 4194304; it must be 0 without enable_prefix"),
        ({"kv_offload_bytes": -1}, "kv_offload_bytes is -1; it must be an integer >= 0"),
        ({"kv_offload_bytes": True}, "kv_offload_bytes is True"),
        ({"kv_offload_bytes": 700}, "kv_offload_bytes is 700; it must be at least"),
        ({"kv_offload_bytes": 1 << 60}, "bytes of main memory are free"),
    ],
)
def test_what_cannot_be_is_refused(engine: Callable[..., LLM], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine("all", mamba_cache_mode=None, mamba_block_size=8, **options)
