"""Number of host function calls in a steady step. Calls are counted, because times depend on the machine.

Python and C functions are counted over one step in which no request fills a block or ends. The number is the same for
few and many requests.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.eagle import DraftContext, TargetNeeds
from bateleur.runner import LLM, SamplingParams

PROMPT, WARM, BLOCK = 9, 12, 16
"""Prompt tokens, steps after it, and tokens per block; the steps end in the middle of a block."""


def counted(llm: LLM) -> Counter[str]:
    """Calls of one step by function."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(what, "__qualname__", str(what))] += 1

    sys.setprofile(note)
    try:
        llm.step()
    finally:
        sys.setprofile(None)
    return calls


def steady(folder: Path, num_requests: int, **settings: Any) -> LLM:
    """An engine whose requests all have at least `WARM` tokens."""
    llm = LLM(
        folder,
        device="cpu",
        max_num_seqs=num_requests,
        max_model_len=96,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=1 << 22,
        **settings,
    )
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for i in range(num_requests):
        llm.add_request([(7 * i + j) % 90 + 1 for j in range(PROMPT)], params)
    for _ in range(WARM):
        llm.step()
    return llm


def drain(llm: LLM) -> None:
    while llm.has_unfinished_requests:
        llm.step()
    llm.engine.registry.restore()


class SameDrafts:
    """Proposes constant drafts, which are hardly ever accepted."""

    num_speculative_tokens = 3
    needs = TargetNeeds()

    def __init__(self, num_rows: int) -> None:
        self._drafts = torch.tensor([87, 88, 89]).repeat(num_rows, 1)

    def admit(self, row: int, token_ids: list[int]) -> None:
        """Do nothing."""

    def propose(self, context: DraftContext) -> Tensor:
        return self._drafts[: len(context.rows)]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("prefixes", [False, True])
def test_the_calls_of_a_steady_step_do_not_grow_with_the_requests(tiny: Any, prefixes: bool, drafts: bool) -> None:
    found = {}
    for num_requests in (2, 12):
        drafting: dict[str, Any] = {}
        if drafts:
            drafting = {"drafter": SameDrafts(num_requests), "num_speculative_tokens": 3}
        llm = steady(tiny("nemotron_h"), num_requests, enable_prefix_caching=prefixes, **drafting)
        found[num_requests] = counted(llm)
        table, running = llm.engine.table, llm.engine.scheduler.running
        assert all(PROMPT + WARM < table.num_known[each.row] < 32 for each in running), "past a boundary"
        drain(llm)
    more = found[12] - found[2]
    assert not more, f"more calls for 12 requests than for 2: {dict(more)}"


PER_BLOCK = 3
"""Most calls of one kind per block that a step fills: for its hash, and for its state page."""


def test_a_block_that_a_step_fills_takes_a_few_calls(tiny: Any) -> None:
    found, filled = {}, {}
    for num_requests in (2, 12):
        llm = steady(tiny("nemotron_h"), num_requests, enable_prefix_caching=True)
        pool, filled[num_requests] = llm.engine.caches.blocks, 0
        for _ in range(BLOCK):
            before = pool.num_cached
            found[num_requests] = counted(llm)
            filled[num_requests] = pool.num_cached - before
            if filled[num_requests]:
                break
        assert filled[num_requests], "so many steps fill a block of every request"
        drain(llm)
    more, blocks = found[12] - found[2], filled[12] - filled[2]
    assert blocks == 10, "all of them at once"
    assert not {name: count for name, count in more.items() if count > blocks * PER_BLOCK}


def test_tokens_are_in_the_table_until_somebody_asks(tiny: Any) -> None:
    """Token lists of a request are built from the table when they are read, and reading them changes nothing."""
    outputs = []
    for asks in (False, True):
        llm = steady(tiny("nemotron_h"), 2)
        table, requests = llm.engine.table, list(llm.engine.scheduler.running)
        assert all(len(each._tokens.ids) < WARM - 1 for each in requests), "no list follows every step"
        while asks and llm.has_unfinished_requests:
            for each in llm.engine.scheduler.running:
                known = int(table.num_known[each.row])
                assert each.token_ids == table.token_ids[each.row, :known].tolist()
                assert each.drafted == [False] * len(each.output_token_ids)
                assert each.times.last_token_time == table.last_token_time[each.row] > each.times.first_token_time
            llm.step()
        drain(llm)
        outputs.append([(each.output_token_ids, each.output.text) for each in requests])
        assert all(len(tokens) == 60 for tokens, _ in outputs[-1])
    assert outputs[0] == outputs[1]
