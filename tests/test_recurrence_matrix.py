"""Prefix caching, speculative decoding and graphs together for every recurrence: the tokens of a plain engine.

A cell is an engine that serves four conversations of three turns in three rows, with chunked prompts and a cache that
is too small for them. Drafts are right in the first turn, wrong in the second, and mixed in the third. Preempted
requests get other rows. The test asserts that each of these happened.

64 of the 192 cells run by default; they contain every combination of three options. `--every-cell` also runs the other
128, which takes half a minute more on one core.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bateleur.cudagraph import DispatchReason
from bateleur.runner import LLM, RequestOutput, SamplingParams
from scripted import RECURRENCES, Patterned, Texts, ids

SIZES: dict[str, Any] = {"max_model_len": 88, "block_size": 4}
BLOCK = 8
"""Tokens between state boundaries."""
CHOICES: dict[str, list[Any]] = {
    "name": list(RECURRENCES),
    "mode": ["none", "align", "all"],
    "policy": ["slots", "fold"],
    "k": [0, 1, 3, 5],
    "graphs": ["eager", "recorded"],
}
PRODUCT = list(product(*CHOICES.values()))
THIRD = [cell for cell in PRODUCT if sum(map(list.index, CHOICES.values(), cell)) % 3 == 0]
Turn = list[tuple[list[int], SamplingParams]]


def conversations(texts: Texts) -> list[Turn]:
    """Three turns of four conversations, two of which share their beginning."""
    random = Random(7)

    def tokens(length: int) -> list[int]:
        return [random.randrange(texts.vocab_size) for _ in range(length)]

    begun = tokens(29)
    talks = [tokens(5), begun, tokens(15), begun[:17] + tokens(4)]
    turns = []
    for turn in range(3):
        params = [
            SamplingParams(temperature=t, seed=turn + i, max_tokens=7 + (i + turn) % 3, ignore_eos=True)
            for i, t in enumerate((0.0, 0.8, 0.0, 1.0))
        ]
        turns.append(list(zip(talks, params, strict=True)))
        talks = [texts.of(*each) + tokens(1 + (2 * i + turn) % 5) for i, each in enumerate(turns[-1])]
    return turns


@pytest.fixture(scope="module")
def turns(recurrent: Callable[[str], tuple[Path, Texts]]) -> Callable[[str], list[Turn]]:
    """The turns by recurrence, cached."""
    return cache(lambda name: conversations(recurrent(name)[1]))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "graphs" in metafunc.fixturenames:
        every = metafunc.config.getoption("every_cell")
        metafunc.parametrize(list(CHOICES), PRODUCT if every else THIRD)


def test_a_third_of_the_cells_has_every_combination_of_three_choices() -> None:
    for three in combinations(range(len(CHOICES)), 3):
        seen = {tuple(cell[i] for i in three) for cell in THIRD}
        assert seen == {tuple(cell[i] for i in three) for cell in PRODUCT}


@pytest.mark.slow
def test_every_cell_says_what_a_plain_engine_says(
    recurrent: Callable[[str], tuple[Path, Texts]],
    turns: Callable[[str], list[Turn]],
    sized: Callable[..., LLM],
    name: str,
    mode: str,
    policy: str,
    k: int,
    graphs: str,
) -> None:
    folder, texts = recurrent(name)
    drafter = Patterned(texts, k, [k]) if k else None
    settings = SIZES | {"max_num_seqs": 3, "max_num_batched_tokens": 24, "mamba_state_policy": policy}
    if mode != "none":
        settings |= {"enable_prefix_caching": True, "mamba_cache_mode": mode, "mamba_block_size": BLOCK}
    if k:
        settings |= {"num_speculative_tokens": k, "drafter": drafter}
    if graphs == "recorded":
        settings |= {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_backend": "recorded"}
        settings |= {"cudagraph_capture_sizes": [1 + k, 24], "cudagraph_checks": "CHEAP"}
    llm = sized(partial(LLM, folder, device="cpu", skip_tokenizer_init=True), 28, 12, **settings)
    for index, (turn, pattern) in enumerate(zip(turns(name), ([k], [0], [k, 0, k // 2]), strict=True)):
        if drafter is not None:
            drafter.pattern = pattern
        outputs = serve(llm, turn, preempt=index == 2)
        assert ids(outputs) == [texts.of(*each) for each in turn]
        if index == 1:
            assert any(output.num_cached_tokens for output in outputs) == (mode != "none")
    expect(llm, k, graphs)


def serve(llm: LLM, turn: Turn, *, preempt: bool) -> list[RequestOutput]:
    """The turn's outputs. Requests are preempted at random and resumed in any row."""
    random, scheduler, table = Random(3), llm.engine.scheduler, llm.engine.table
    names = [llm.add_request({"prompt_token_ids": prompt}, params) for prompt, params in turn]
    done: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests:
        done |= {output.request_id: output for output in llm.step() if output.finished}
        if preempt and scheduler.running and random.random() < 0.25:
            scheduler.preempt(random.choice(scheduler.running))
        random.shuffle(table.free_rows)
    return [done[name] for name in names]


def expect(llm: LLM, k: int, graphs: str) -> None:
    """Assert that the cell's options had an effect: accepted drafts at every position, rejections, preemptions, both
    kinds of graphs.
    """
    stats, decisions = llm.get_metrics(), llm.engine.runner.graphs.decisions.by_reason
    assert stats.num_preemptions > 1
    if k:
        assert stats.acceptance is not None
        assert (stats.acceptance.kept > 1).all()
        assert stats.acceptance.num_drafts > 1.5 * stats.acceptance.num_accepted
    kinds = (DispatchReason.DECODE, DispatchReason.PIECEWISE)
    assert (
        min(decisions[why] for why in kinds) > 3 if graphs == "recorded" else not any(decisions[why] for why in kinds)
    )
