"""Bad input gets a ValueError that names argument, value and rule, and the engine goes on."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bateleur.runner import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def busy(llm: LLM) -> Iterator[LLM]:
    """The engine with one request running; afterwards that request ends as if nothing had happened."""
    expected = llm.generate("def f(", GREEDY)[0].outputs[0].token_ids
    name = llm.add_request("def f(", GREEDY)
    llm.step()
    yield llm
    outputs = []
    while llm.has_unfinished_requests:
        outputs += llm.step()
    assert [(o.request_id, o.outputs[0].token_ids) for o in outputs] == [(name, expected)]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        pytest.param("", "prompt is empty", id="empty text"),
        pytest.param([], "prompt is empty", id="empty ids"),
        pytest.param([5] * 256, "prompt has 256 tokens; max_model_len is 256", id="at max_model_len"),
        pytest.param([5] * 300, "prompt has 300 tokens; max_model_len is 256", id="over max_model_len"),
        pytest.param([1, 4096], "holds 4096; ids must be in", id="id too large"),
        pytest.param([1, -1], "holds -1; ids must be in", id="negative id"),
        pytest.param([1, 2.5], "sequence of integer token ids", id="float id"),
        pytest.param({"prompt": 5}, "prompt is 5; it must be text or a sequence", id="number"),
        pytest.param([True, False], "sequence of integer token ids", id="bool ids"),
        pytest.param({"text": "x"}, "exactly one of prompt, prompt_token_ids", id="unknown key"),
        pytest.param({"prompt": "x", "prompt_token_ids": [1]}, "exactly one of", id="both keys"),
    ],
)
def test_bad_prompt(busy: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        busy.add_request(prompt, GREEDY)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_bad_prompt_in_a_batch_is_named_and_starts_nothing(busy: LLM, position: int) -> None:
    prompts: list[Any] = [[1], [2], [3]]
    prompts[position] = [9999]
    before = set(busy.engine.requests)
    with pytest.raises(ValueError, match=rf"prompts\[{position}\]: .*9999"):
        busy.generate(prompts, GREEDY)
    assert set(busy.engine.requests) == before


def test_longest_possible_prompt_still_draws_one_token(llm: LLM) -> None:
    output = llm.generate([[5] * 255], SamplingParams(max_tokens=10, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_a_request_that_can_never_fit_is_refused_with_both_numbers(make_llm: Callable[..., LLM]) -> None:
    """A request within max_model_len but over the cache would wait for ever (vLLM #39734)."""
    plan = make_llm().cache_plan
    llm = make_llm(kv_cache_memory_bytes=plan.state_bytes + 11 * plan.kv_bytes // plan.num_blocks)
    with pytest.raises(ValueError, match="needs 11 KV blocks; the cache has 10"):
        llm.add_request([1] * 41, SamplingParams(max_tokens=41))
    llm.generate([[1] * 40], SamplingParams(max_tokens=41, ignore_eos=True))


def test_duplicate_and_unknown_ids(busy: LLM) -> None:
    (running,) = busy.engine.requests
    with pytest.raises(ValueError, match=f"request_id is '{running}'; a request of that id"):
        busy.add_request("x", GREEDY, request_id=running)
    with pytest.raises(ValueError, match="request_id is 'nobody'; no such request"):
        busy.abort("nobody")


def test_params_must_match_prompts(busy: LLM) -> None:
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        busy.generate(["x", "y"], [GREEDY])
    with pytest.raises(ValueError, match="stop_token_ids holds 5000"):
        busy.generate("x", SamplingParams(stop_token_ids=[5000]))
    with pytest.raises(ValueError, match="logprobs is 5000; the vocabulary has 4096"):
        busy.generate("x", SamplingParams(logprobs=5000))


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("dtype", "float8", "dtype is 'float8'"),
        ("dtype", "int32", "dtype is 'int32'"),
        ("device", "tpu", "device is 'tpu'"),
        ("device", "cuda:99", "device is 'cuda:99'; this machine has"),
        ("device", "meta", "device is 'meta'; supported"),
        ("max_model_len", 0, "max_model_len is 0"),
        ("max_model_len", 10**6, "max_model_len is 1000000"),
        ("max_num_seqs", 0, "max_num_seqs is 0"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens is 0"),
        ("max_num_batched_tokens", 7, "max_num_batched_tokens is 7; it must be at least max_num_seqs = 8"),
        ("block_size", 0, "block_size is 0"),
        ("gpu_memory_utilization", 1.5, "gpu_memory_utilization is 1.5"),
        ("kv_cache_memory_bytes", 1000, "kv_cache_memory_bytes is 1000"),
        ("attention_backend", "magic", "magic"),
    ],
)
def test_bad_engine_argument(make_llm: Callable[..., LLM], argument: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_llm(**{argument: value})
