"""One engine for the tests of what stands in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from bateleur.runner import AsyncLLM


@pytest.fixture(scope="session")
def engine() -> Iterator[AsyncLLM]:
    """The shipped model, small; with drafts and shared prefixes, which change no token."""
    llm = AsyncLLM(
        device="cpu",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_queued_requests=12,
        block_size=8,
        draft="auto",
        num_speculative_tokens=2,
        enable_prefix_caching=True,
    )
    yield llm
    asyncio.run(llm.close())


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test ends when the engine that all share has nothing to do."""
    yield
    if "engine" in request.fixturenames:
        llm: AsyncLLM = request.getfixturevalue("engine")
        left = asyncio.run(llm.inspect(lambda llm: list(llm.engine.requests)))
        assert not left
        assert not llm.num_unfinished
