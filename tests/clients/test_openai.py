"""The `openai` package, as its users call it, against what `LLM` gives for the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from bateleur.runner import LLM

openai = pytest.importorskip("openai", reason="needs the package openai")

PROMPT = "class Shape:\n    def area(self):\n"


@pytest.fixture(scope="module")
def expected() -> str:
    """The greedy text of `PROMPT`, plainly decoded."""
    llm = LLM(device="cpu", dtype="float32", max_model_len=512, max_num_seqs=2)
    params = replace(llm.get_default_sampling_params(), temperature=0, max_tokens=40)
    return llm.generate(PROMPT, params)[0].outputs[0].text


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["shipped"]
    assert client.models.retrieve("shipped").id == "shipped"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_completion_is_the_plain_one_and_its_cost_is_told(client: openai.OpenAI, expected: str) -> None:
    reply = client.completions.create(model="shipped", prompt=PROMPT, max_tokens=40, temperature=0)
    assert reply.choices[0].text == expected
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 40
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 40


def test_a_shared_prompt_is_found_in_the_cache(client: openai.OpenAI) -> None:
    prompt = [7 + i % 50 for i in range(130)]
    asked = {"model": "shipped", "prompt": prompt, "max_tokens": 2}
    client.completions.create(**asked)
    usage = client.completions.create(**asked).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 128


def test_a_stream_joins_to_the_same_text(client: openai.OpenAI, expected: str) -> None:
    chunks = list(
        client.completions.create(
            model="shipped",
            prompt=PROMPT,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected
    assert len(chunks) > 5
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40


def test_many_at_once_get_what_each_gets_alone(server: str, expected: str) -> None:
    async def ask(client: openai.AsyncOpenAI) -> str:
        stream: AsyncIterator[openai.types.Completion] = await client.completions.create(
            model="shipped", prompt=PROMPT, max_tokens=40, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client) for _ in range(12)))

    assert asyncio.run(all_of_them()) == [expected] * 12


def test_several_continuations_and_their_log_probabilities(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="shipped",
        prompt=PROMPT,
        max_tokens=6,
        temperature=1,
        seed=5,
        n=3,
        logprobs=2,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.text for choice in reply.choices}) > 1
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.tokens) == 6
        assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs)


def test_what_is_wrong_is_said_as_openai_says_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="shipped", prompt=PROMPT, temperature=-1)
    assert raised.value.param == "temperature"
    assert "temperature is -1" in raised.value.message
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt=PROMPT)


def test_a_model_without_a_chat_template_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template"):
        client.chat.completions.create(model="shipped", messages=[{"role": "user", "content": "Hello"}])
