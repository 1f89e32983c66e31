"""Schedules with shared prefixes and verified drafts that corrupted hybrids in other engines, for every recurrence.

Drafts are scripted. Tokens must equal those of a plain engine, and every published page must hold the state of an
uncached run after as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.mamba import CopyPlan, FoldPlan, ReplayPlan
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.requests.prefix_keys import PrefixKeys
from scripted import RECURRENCES, Patterned, Texts, asked, ids

pytestmark = pytest.mark.slow

BLOCK, KV_BLOCK = 8, 4
"""Tokens between state boundaries, and of a KV block."""
K = 3
SAMPLED = SamplingParams(temperature=0.8, seed=4, max_tokens=4, ignore_eos=True)
POLICIES = pytest.mark.parametrize("policy", ["fold", "slots"])
MODES = pytest.mark.parametrize("mode", ["all", "align"])
NAMES = pytest.mark.parametrize("name", RECURRENCES)
Make = Callable[..., tuple[LLM, Texts, Patterned]]


@pytest.fixture(scope="module")
def make(recurrent: Callable[[str], tuple[Path, Texts]], sized: Callable[..., LLM]) -> Make:
    """An engine whose pages are not evicted, the expected texts, and the drafter with these numbers of right drafts in
    turn.
    """

    def build(name: str, policy: str, mode: str, right: Sequence[int], k: int = K, **more: Any) -> Any:
        folder, texts = recurrent(name)
        drafter = Patterned(texts, k, right)
        settings: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "block_size": KV_BLOCK}
        settings |= {"enable_prefix_caching": True, "mamba_cache_mode": mode, "mamba_block_size": BLOCK}
        settings |= {"num_speculative_tokens": k, "drafter": drafter, "mamba_state_policy": policy}
        llm = partial(LLM, folder, device="cpu", skip_tokenizer_init=True)
        return sized(llm, 200, 80, **(settings | more)), texts, drafter

    return build


def tokens_of(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(80) for _ in range(length)]


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def say(llm: LLM, texts: Texts, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    """Run prompts together; the outputs must be those of a plain engine."""
    wanted = [texts.of(prompt, params) for prompt in prompts]
    assert ids(llm.generate(asked(prompts), params)) == wanted
    return wanted


def published(llm: LLM, texts: Texts, text: list[int]) -> list[int]:
    """The published boundaries of a text; their pages must hold the states of an uncached run."""
    states, keys = llm.engine.scheduler.states, PrefixKeys(KV_BLOCK)
    assert states is not None
    found = []
    for end in range(BLOCK, len(text), BLOCK):
        if page := states.pool.find(keys.of(np.array(text, np.int32), end)):
            found.append(end)
            layers = zip(llm.engine.caches.states, texts.states(text[:end]), strict=True)
            for (conv, state), (window, cold) in layers:
                torch.testing.assert_close(conv[page, : len(window)], window, atol=1e-4, rtol=1e-4)
                if state is not None:
                    torch.testing.assert_close(state[page], cold, atol=1e-4, rtol=1e-4)
    return found


def go_on(llm: LLM, texts: Texts, text: list[int], ends: Sequence[int]) -> list[int]:
    """Cached tokens of requests that continue a text after each of `ends` tokens; their outputs must be right."""
    tails = [[*text[:end], (text[end] + 1) % texts.vocab_size] for end in ends]
    wanted = [texts.of(tail, SAMPLED) for tail in tails]
    outputs = llm.generate(asked(tails), SAMPLED)
    assert ids(outputs) == wanted
    return [output.num_cached_tokens for output in outputs]


def kept(mode: str, *ends: int) -> list[int]:
    """The boundaries of a short prompt's text that a mode keeps."""
    return list(ends if mode == "all" else ends[-1:])


def strides(drafter: Patterned) -> list[tuple[int, int, int]]:
    """Tokens of a row before and after a step, and with rejected drafts."""
    return [(before, after, last) for step in drafter.strides for _, before, after, last in step]


@POLICIES
@MODES
@NAMES
def test_53912_a_boundary_inside_an_accepted_stride(make: Make, name: str, mode: str, policy: str) -> None:
    """vLLM #53912, #47194: its state is that of the token at the boundary, not of the last token of the step."""
    llm, texts, drafter = make(name, policy, mode, [K])
    said = say(llm, texts, [tokens_of(10 + n, n) for n in (4, 5, 6, 7)], greedy(1 + 3 * (1 + K)))
    places = {(16 - before) for before, after, _ in strides(drafter) if before < 16 <= after}
    assert places == {1, 2, 3, 4}
    for text in said:
        assert published(llm, texts, text) == kept(mode, 8, 16)
        assert go_on(llm, texts, text, (8, 16)) == ([8, 16] if mode == "all" else [0, 16])
    assert llm.get_metrics().tokens_per_step > 2.5


@POLICIES
@MODES
@NAMES
def test_51250_a_prompt_just_under_a_block(make: Make, name: str, mode: str, policy: str) -> None:
    """vLLM #51250: the first decode crosses the boundary, and a request that continues after it has a hit."""
    llm, texts, drafter = make(name, policy, mode, [K])
    prompts = [tokens_of(20 + n, n) for n in (7, 15, 8, 16)]
    said = say(llm, texts, prompts, greedy(6))
    assert {(7, 11), (15, 19)} < {(before, after) for before, after, _ in strides(drafter)}
    hits = [go_on(llm, texts, text, (len(text) - 1,))[0] for text in said]
    assert hits == [8, 16, 8, 16]
    again = llm.generate(asked(prompts), greedy(6))
    assert ids(again) == said
    assert [output.num_cached_tokens for output in again] == [0, 8, 0, 8]


@POLICIES
@NAMES
def test_53919_a_row_that_moves_after_acceptance(make: Make, name: str, policy: str) -> None:
    """vLLM #53919: accepted tokens belong to the request, whatever its row in the next step."""
    llm, texts, drafter = make(name, policy, "all", [K, 0, 2, 1], max_num_seqs=3)
    scheduler, random = llm.engine.scheduler, Random(1)
    requests = [(tokens_of(30 + n, 2 + 5 * n % 11), greedy(5 + 7 * n % 13)) for n in range(9)]
    wanted = [texts.of(*each) for each in requests]
    names = [llm.add_request({"prompt_token_ids": prompt}, params) for prompt, params in requests]
    said, moved, order = {}, 0, {}
    while llm.has_unfinished_requests:
        said |= {output.request_id: output for output in llm.step() if output.finished}
        if random.random() < 0.15 and scheduler.running:
            scheduler.preempt(random.choice(scheduler.running))
        random.shuffle(llm.engine.table.free_rows)
        rows = sorted(scheduler.running, key=lambda request: request.row)
        places = {request.request_id: place for place, request in enumerate(rows)}
        uneven = len({after - before for _, before, after, _ in drafter.strides[-1]}) > 1
        moved += uneven and any(order.get(each, place) != place for each, place in places.items())
        order = places
    assert ids([said[each] for each in names]) == wanted
    assert moved > 3
    for output in said.values():
        published(llm, texts, ids([output])[0])


@POLICIES
@MODES
@NAMES
def test_53505_a_copy_that_would_run_backwards(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str, mode: str, policy: str
) -> None:
    """vLLM #53505: steps cross a boundary and are rejected to it or before it. From the next block its state returns to
    its own page, and no other state is written there.
    """
    llm, texts, drafter = make(name, policy, mode, [2, 0, 1, K, 0])
    pool, states = llm.engine.caches.pool, llm.engine.scheduler.states
    assert pool is not None
    assert states is not None
    back = 0

    def column(slot: int) -> int:
        return int(np.argwhere(states.table == slot)[0, 1])

    copy, fold = pool.copy, pool.fold

    def copies(plan: CopyPlan) -> None:
        nonlocal back
        moves = zip(plan.ssm_src.tolist(), plan.dst.tolist(), strict=True)
        back += sum(column(src) > column(dst) for src, dst in moves if dst)
        copy(plan)

    def folds(plan: FoldPlan, replay: ReplayPlan, *more: Any) -> None:
        moves = zip(replay.slot.tolist(), plan.dst.tolist(), strict=True)
        assert all(column(src) <= column(dst) for src, dst in moves if src and dst)
        fold(plan, replay, *more)

    monkeypatch.setattr(pool, "copy", copies)
    monkeypatch.setattr(pool, "fold", folds)
    said = say(llm, texts, [tokens_of(40 + n, n) for n in (4, 5, 6, 7)], greedy(30))
    thrown_back = {last - after for before, after, last in strides(drafter) if (after - 1) // 8 < (last - 1) // 8}
    assert thrown_back >= {1, 2, 3}
    assert (back > 3) == (policy == "slots")
    for text in said:
        ends = kept(mode, *range(8, len(text) - 1, 8))
        assert published(llm, texts, text) == ends
        assert go_on(llm, texts, text, ends) == ends


@POLICIES
@MODES
@NAMES
def test_5004_a_boundary_at_which_no_step_ends(make: Make, name: str, mode: str, policy: str) -> None:
    """LMCache #5004: its state is stored nevertheless."""
    llm, texts, drafter = make(name, policy, mode, [K])
    said = say(llm, texts, [tokens_of(50, 6), tokens_of(51, 5)], greedy(1 + 5 * (1 + K)))
    assert all(after % BLOCK for _, after, _ in strides(drafter))
    for text in said:
        ends = kept(mode, 8, 16, 24)
        assert published(llm, texts, text) == ends
        assert go_on(llm, texts, text, ends) == ends


@POLICIES
@MODES
@NAMES
def test_53912_the_label_of_a_page_under_a_stride_of_two(make: Make, name: str, mode: str, policy: str) -> None:
    """One of the causes in that issue: at even and odd positions, a page is the state after exactly as many tokens as
    it says.
    """
    llm, texts, drafter = make(name, policy, mode, [1], k=1)
    said = say(llm, texts, [tokens_of(60 + n, n) for n in (4, 5, 6, 7)], greedy(13))
    assert {8 - before for before, after, _ in strides(drafter) if before < 8 <= after} == {1, 2}
    for text in said:
        assert published(llm, texts, text) == kept(mode, 8, 16)
        hits = go_on(llm, texts, text, (7, 8, 9, 15, 16))
        assert hits == ([0, 8, 8, 8, 16] if mode == "all" else [0, 0, 0, 0, 16])


@POLICIES
@MODES
@NAMES
def test_a_request_that_ends_inside_an_accepted_run(make: Make, name: str, mode: str, policy: str) -> None:
    """Drafts accepted after a stop are not emitted, not published, and not in the next turn."""
    prompt = tokens_of(70, 5)
    for end in (7, 8, 11, 15, 16):  # in steps from 5 tokens to 9, 13 and 17: most of these ends are before a boundary
        llm, texts, _ = make(name, policy, mode, [K], max_num_seqs=1)
        whole, params = with_a_new_token(texts, prompt, end)
        (output,) = llm.generate(asked([prompt]), replace(params, stop_token_ids=[whole[end - 1]]))
        assert (ids([output])[0], output.outputs[0].finish_reason) == (whole[:end], "stop")
        turn = [*whole[:end], 3, 51]
        (again,) = llm.generate(asked([turn]), SAMPLED)
        assert ids([again]) == [texts.of(turn, SAMPLED)]
        assert all(n <= end for n in published(llm, texts, whole))
        states, said = llm.engine.scheduler.states, (whole[:end], ids([again])[0])
        assert states is not None
        assert set(states.pool._keys.values()) <= {name for text in said for name in names_of(text)}


def with_a_new_token(texts: Texts, prompt: list[int], end: int) -> tuple[list[int], SamplingParams]:
    """The output with a seed that makes the token before `end` the first of its kind after the prompt."""
    for seed in range(50):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=14, ignore_eos=True)
        whole = texts.of(prompt, params)
        if whole[end - 1] not in whole[len(prompt) : end - 1]:
            return whole, params
    raise AssertionError("all texts repeat themselves")


def names_of(text: list[int]) -> set[bytes]:
    """Hashes of the boundaries in a text whose last token was not computed."""
    keys = PrefixKeys(KV_BLOCK)
    return {keys.of(np.array(text, np.int32), end) for end in range(BLOCK, len(text), BLOCK)}


@POLICIES
@MODES
@NAMES
def test_39273_prompt_lookup(
    make: Make, recurrent: Callable[[str], tuple[Path, Texts]], name: str, mode: str, policy: str
) -> None:
    """vLLM #39273: n-gram drafts, accepted and rejected, corrupt no state. Penalties make the texts repeat."""
    llm, texts, _ = make(name, policy, mode, [0], drafter=None, draft="ngram")
    prompts = [tokens_of(80 + n, 3 + n) * 2 for n in range(4)]
    for penalty in (-2.0, -0.7):
        for text in say(llm, texts, prompts, greedy(30, frequency_penalty=penalty)):
            published(llm, texts, text)
    acceptance = llm.get_metrics().acceptance
    assert acceptance is not None
    assert 0 < acceptance.kept[-1] < acceptance.tried[0]
    assert acceptance.num_accepted < acceptance.num_drafts
