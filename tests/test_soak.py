"""Many different requests through one small engine: each ends as it does alone, and nothing leaks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import Tensor

from bateleur.eagle import DraftContext
from bateleur.runner import LLM, CompletionOutput, SamplingParams
from eagle_doubles.drafters import ScriptedDrafter

pytestmark = pytest.mark.slow


def random_request(random: Random) -> tuple[list[int], SamplingParams]:
    """A prompt of 1 to 40 ids, often with the beginning of another, and parameters of every kind."""
    base = random.randrange(2)
    shared = [(7919 * i + base) % 96 + 1 for i in range(random.choice([0, 8, 17, 30]))]
    prompt = [*shared, *(random.randrange(1, 97) for _ in range(random.randint(1, 24)))]
    fields: dict[str, Any] = {
        "temperature": random.choice([0, 0, 0.5, 1.0]),
        "seed": random.randrange(1 << 40),
        "max_tokens": random.randint(1, 24),
        "ignore_eos": random.random() < 0.8,
        "top_k": random.choice([0, 0, 5, 50]),
        "top_p": random.choice([1.0, 1.0, 0.9, 0.5]),
        "min_p": random.choice([0.0, 0.0, 0.1]),
        "repetition_penalty": random.choice([1.0, 1.0, 1.3]),
        "frequency_penalty": random.choice([0.0, 0.0, 0.7]),
        "logprobs": random.choice([None, None, 2]),
        "stop": random.choice([None, None, None, "\n\n", ["e", "("]]),
    }
    return prompt, SamplingParams.from_dict(fields)


def drain(llm: LLM) -> dict[str, Any]:
    return {output.request_id: output.outputs[0] for output in llm.step() if output.finished}


class Guesser(ScriptedDrafter):
    """Knows every text, and proposes right tokens up to a position that changes."""

    def __init__(self, texts: list[list[int]], k: int, random: Random) -> None:
        def script(tokens: list[int]) -> list[int]:
            return next((text[len(tokens) :] for text in texts if text[: len(tokens)] == tokens), [])

        super().__init__(script, k, None, 97)
        self.random = random

    def propose(self, context: DraftContext) -> Tensor:
        self._right = self.random.choice([0, 1, 2, self.num_speculative_tokens])
        return super().propose(context)


POOL = 64
"""Number of different requests. Every case runs 40 of them in its own order."""


@pytest.fixture(scope="module")
def make_llm(make_llm: Callable[..., LLM], tiny_hybrid: Path) -> Callable[..., LLM]:
    return partial(make_llm, model=tiny_hybrid)


@pytest.fixture(scope="module")
def alone(make_llm: Callable[..., LLM]) -> list[tuple[list[int], SamplingParams, CompletionOutput]]:
    """Requests, and the output of each when it runs alone."""
    random, llm = Random(0), make_llm(max_num_seqs=1, max_model_len=72)
    requests = [random_request(random) for _ in range(POOL)]
    return [(prompt, params, llm.generate([prompt], params)[0].outputs[0]) for prompt, params in requests]


@pytest.mark.parametrize(
    ("seed", "mode", "policy", "k"),
    [
        (9, "none", "slots", 0),
        (2, "align", "slots", 0),
        (1, "all", "slots", 0),
        (2, "all", "fold", 0),
        (3, "none", "slots", 3),
        (4, "all", "slots", 4),
        (5, "align", "slots", 2),
        (6, "none", "fold", 7),
        (7, "all", "fold", 3),
        (8, "align", "fold", 2),
    ],
)
def test_random_traffic(
    make_llm: Callable[..., LLM],
    sized: Callable[..., LLM],
    alone: list[tuple[list[int], SamplingParams, CompletionOutput]],
    seed: int,
    mode: str,
    policy: str,
    k: int,
) -> None:
    random = Random(seed)
    chosen = random.sample(alone, 40)
    requests, expected = [(prompt, params) for prompt, params, _ in chosen], [each for *_, each in chosen]

    settings: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 72, "mamba_state_policy": policy}
    settings["max_num_batched_tokens"] = 16 + 6 * k
    if mode != "none":
        settings |= {"enable_prefix_caching": True, "mamba_cache_mode": mode, "mamba_block_size": 8}
    if k:
        texts = [prompt + completion.token_ids for (prompt, _), completion in zip(requests, expected, strict=True)]
        settings |= {"num_speculative_tokens": k, "drafter": Guesser(texts, k, random)}
    # 9 blocks of 8 tokens for six rows of up to 64, and with prefix caching two spare pages.
    llm = sized(make_llm, num_blocks=10, spare_pages=2, **settings)
    names: dict[str, int] = {}
    aborted: set[str] = set()
    finished: dict[str, Any] = {}
    waiting = list(enumerate(requests))
    while waiting or llm.has_unfinished_requests:
        while waiting and random.random() < 0.4:
            index, (prompt, params) = waiting.pop(0)
            names[llm.add_request(prompt, params, stream=random.random() < 0.3)] = index
        running = sorted(llm.engine.requests)
        if running and random.random() < 0.03:
            aborted.add(random.choice(running))
            (victim,) = aborted & set(running)
            assert llm.abort(victim).outputs[0].finish_reason == "abort"
        finished |= drain(llm)

    assert mode != "none" or llm.get_metrics().num_preemptions > 0, "the cache was meant to be too small"
    assert finished.keys() | aborted == names.keys()
    assert not finished.keys() & aborted
    for name, completion in finished.items():
        wanted = expected[names[name]]
        assert completion.token_ids == wanted.token_ids
        assert (completion.text, completion.finish_reason) == (wanted.text, wanted.finish_reason)
        assert (completion.logprobs is None) == (wanted.logprobs is None)
        if wanted.logprobs is not None:
            assert [list(entry) for entry in completion.logprobs] == [list(entry) for entry in wanted.logprobs]
    scheduler = llm.engine.scheduler
    assert (llm.get_metrics().tokens_per_step > 1.2) == (k > 0)
    assert (llm.get_metrics().num_cached_tokens > 0) == (mode != "none")
    assert scheduler.states is None or scheduler.states.pool.num_free == scheduler.states.pool.capacity
    assert scheduler.pool is not None
    assert scheduler.pool.num_free == scheduler.pool.capacity
    assert len(scheduler.table.free_rows) == 6
