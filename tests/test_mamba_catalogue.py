"""Known bugs of Mamba state caching that need a whole engine, by their ids in the catalogue: requests and pages.

Those of graphs and buffers are in `test_mamba_graph_catalogue.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bateleur.eagle import Drafter
from bateleur.mamba import MambaStateManager
from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.requests.prefix_keys import PrefixKeys
from eagle_doubles.drafters import ScriptedDrafter

VOCAB = 97
POLICIES = pytest.mark.parametrize("policy", ["fold", "slots"])
MODES = pytest.mark.parametrize("mode", ["all", "align"])


class Texts:
    """The texts of requests from plain runs: uncached, unchunked, alone, without drafts."""

    def __init__(self, plain: LLM) -> None:
        self.plain = plain
        self._texts: dict[str, list[int]] = {}

    def of(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Prompt and output tokens."""
        name = f"{prompt} {params}"
        if name not in self._texts:
            (output,) = self.plain.generate([{"prompt_token_ids": prompt}], params)
            self._texts[name] = prompt + output.outputs[0].token_ids
        return self._texts[name]

    def __call__(self, tokens: list[int]) -> list[int]:
        known = self._texts.values()
        return next((text[len(tokens) :] for text in known if text[: len(tokens)] == tokens), [])


class Patterned(ScriptedDrafter):
    """The number of right drafts follows a pattern; -1 is a proposal without drafts."""

    def __init__(self, script: Texts, k: int, pattern: Sequence[int]) -> None:
        super().__init__(script, k, None, VOCAB)
        self._pattern = list(pattern)
        self._turns: dict[int, Iterator[int]] = {}

    def admit(self, row: int, token_ids: list[int]) -> None:
        super().admit(row, token_ids)
        self._turns[row] = cycle(self._pattern)

    def _row(self, row: int, emitted: list[int], next_token: int) -> list[int]:
        self._right = next(self._turns[row]) if emitted else 0
        drafts = super()._row(row, emitted, next_token)
        return [-1] * len(drafts) if self._right < 0 else drafts


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def tokens_of(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randint(3, VOCAB - 1) for _ in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def ask(llm: LLM, *prompts: list[int], params: SamplingParams) -> list[str]:
    return [llm.add_request({"prompt_token_ids": prompt}, params) for prompt in prompts]


def drain(llm: LLM, *, each_step: Callable[[], object] = lambda: None) -> list[RequestOutput]:
    """Run until all requests have ended; returns outputs in the order in which they ended."""
    done = []
    while llm.has_unfinished_requests:
        done += [output for output in llm.step() if output.finished]
        each_step()
    return done


def pages_of(llm: LLM) -> MambaStateManager:
    assert llm.engine.scheduler.states is not None
    return llm.engine.scheduler.states


@pytest.fixture(scope="module")
def make_llm(make_llm: Callable[..., LLM], tiny_hybrid: Path) -> Callable[..., LLM]:
    return partial(make_llm, model=tiny_hybrid)


@pytest.fixture(scope="module")
def random_head(tiny_head: Path) -> Path:
    return tiny_head


@pytest.fixture(scope="module")
def texts(make_llm: Callable[..., LLM]) -> Texts:
    return Texts(make_llm(max_model_len=240, max_num_seqs=1, mamba_state_policy="slots"))


@pytest.fixture(scope="module")
def make(make_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    def build(policy: str, mode: str = "all", drafter: Drafter | None = None, **overrides: Any) -> LLM:
        settings: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "block_size": 4}
        settings |= {"mamba_state_policy": policy, "mamba_cache_mode": mode}
        if mode != "none":
            settings |= {"enable_prefix_caching": True, "mamba_block_size": 8}
        if drafter is not None:
            settings |= {"drafter": drafter, "num_speculative_tokens": drafter.num_speculative_tokens}
        return make_llm(**(settings | overrides))

    return build


@POLICIES
@MODES
def test_m07_a_preempted_request_resumes_from_a_shorter_hit(
    make: Callable[..., LLM], texts: Texts, monkeypatch: pytest.MonkeyPatch, policy: str, mode: str
) -> None:
    """vLLM #35157: with drafts in flight, in another row, and with the newest of its states evicted meanwhile."""
    llm = make(policy, mode, Patterned(texts, 3, [3, 1, 0]))
    scheduler, table, states = llm.engine.scheduler, llm.engine.table, pages_of(llm)
    prefixes = scheduler.prefixes
    assert prefixes is not None
    match, lost, hits, random = prefixes.match, {}, [], Random(1)

    def matched(request: Any) -> Any:
        hit = match(request)
        if request.num_preemptions:
            hits.append((hit.num_tokens, lost[request.request_id]))
        return hit

    monkeypatch.setattr(prefixes, "match", matched)
    prompts, params = [tokens_of(1, 19), tokens_of(2, 5), tokens_of(3, 26)], greedy(40)
    wanted = [texts.of(prompt, params) for prompt in prompts]
    ask(llm, *prompts, params=params)

    def preempt() -> None:
        victims = [each for each in scheduler.running if table.num_proposed[each.row] and random.random() < 0.2]
        for request in victims:
            lost[request.request_id] = computed = int(table.num_computed[request.row])
            keys = request.prefix.keys
            key = keys.of(table.token_ids[request.row], computed // 8 * 8) if keys and computed >= 8 else None
            if key and (page := states.pool.find(key)):
                states.pool.forget(page)
        for request in reversed(victims):
            scheduler.preempt(request)
        random.shuffle(table.free_rows)

    assert sorted(ids(drain(llm, each_step=preempt))) == sorted(wanted)
    assert len(hits) > 5
    assert any(0 < hit < computed // 8 * 8 for hit, computed in hits) or mode == "align"
    assert any(hit < computed // 8 * 8 for hit, computed in hits)


@POLICIES
def test_m11_boundaries_are_right_for_any_chunking(make: Callable[..., LLM], texts: Texts, policy: str) -> None:
    """A prompt may be split anywhere: a scan keeps every boundary in a chunk; rows with few tokens fold up to it."""
    llm = make(policy, drafter=Patterned(texts, 2, [2, 0]), max_num_seqs=1)
    params = greedy(3)
    for chunk in (3, 5, 7, 8, 9, 33):
        llm.engine.scheduler.max_num_batched_tokens = chunk
        prompt = tokens_of(100 + chunk, 34)
        drained = [prompt, *([*prompt[:end], 7, 8] for end in (8, 16, 24, 32))]
        wanted = [texts.of(each, params) for each in drained]
        for boundary, each, text in zip((0, 8, 16, 24, 32), drained, wanted, strict=True):
            (output,) = llm.generate([{"prompt_token_ids": each}], params)
            assert output.num_cached_tokens == boundary, chunk
            assert ids([output]) == [text], (chunk, boundary)


@pytest.mark.parametrize("drafts", ["none", "script", "head"])
def test_m13_a_prompt_of_k_blocks_hits_k_minus_1(
    make: Callable[..., LLM], texts: Texts, random_head: Path, drafts: str
) -> None:
    """vLLM #50409: one token is left to compute, and a draft head needs no additional block."""
    drafter = Patterned(texts, 3, [3]) if drafts == "script" else None
    llm = make("fold", drafter=drafter, **({"draft": random_head} if drafts == "head" else {}))
    for blocks in (1, 2, 4):
        prompt, params = tokens_of(200 + blocks, 8 * blocks), greedy(6)
        for hit in (0, 8 * blocks - 8):
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
            assert output.num_cached_tokens == hit
            assert ids([output]) == [texts.of(prompt, params)]


@POLICIES
def test_a_conversation_leaves_the_end_of_a_prompt_to_those_who_ask_it_again(
    make: Callable[..., LLM], texts: Texts, policy: str
) -> None:
    """The page is that of the first request. A request that continues from it passes newer boundaries, and drops its
    own page.
    """
    llm, params = make(policy, "align"), greedy(9)
    first, longer = tokens_of(250, 20), [*tokens_of(250, 20), *tokens_of(251, 10)]
    for prompt, hit in ((first, 0), (first, 16), (longer, 16), (first, 16), (longer, 24), (first, 16)):
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
        assert output.num_cached_tokens == hit
        assert ids([output]) == [texts.of(prompt, params)]


@POLICIES
@pytest.mark.parametrize("size", [16, 8])
def test_m14_kv_blocks_and_states_of_two_sizes_in_long_requests(
    make: Callable[..., LLM], texts: Texts, policy: str, size: int
) -> None:
    """vLLM #53142: each cache counts blocks of its own size."""
    llm = make(policy, drafter=Patterned(texts, 3, [3, 2, 1]), mamba_block_size=size, max_model_len=236, max_num_seqs=2)
    params = greedy(60)
    prompts = [tokens_of(301, 170), tokens_of(302, 99), [*tokens_of(301, 165), 5, 6]]
    wanted = [texts.of(prompt, params) for prompt in prompts]
    outputs = [llm.generate([{"prompt_token_ids": prompt}], params)[0] for prompt in prompts]
    assert ids(outputs) == wanted
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 160]
    again = llm.generate([{"prompt_token_ids": wanted[0][:-1]}], greedy(1))
    assert again[0].num_cached_tokens == (len(wanted[0]) - 2) // size * size
    assert ids(again) == wanted[:1]
    assert pages_of(llm).table.shape[1] == -(-236 // size) + (3 if policy == "slots" else 0)


@POLICIES
@pytest.mark.parametrize("mode", ["none", "all"])
def test_m16_what_a_request_carries_follows_it_when_others_come_and_go(
    make: Callable[..., LLM], texts: Texts, policy: str, mode: str
) -> None:
    """vLLM #51571: accepted counts and ring cursors belong to the request, not to its index in the batch."""
    llm = make(policy, mode, Patterned(texts, 3, [0, 3, 1, 2]))
    asked = [(tokens_of(400 + i, 3 + 5 * i % 17), greedy(3 + 7 * i % 19)) for i in range(14)]
    wanted = [texts.of(*each) for each in asked]
    table, running = llm.engine.table, llm.engine.scheduler.running
    states, random = llm.engine.runner.model_state._states, Random(4)  # type: ignore[attr-defined]
    waiting, done, orders, aborted = list(asked), [], set(), 0
    while waiting or llm.has_unfinished_requests:
        while waiting and random.random() < 0.6:
            prompt, params = waiting.pop(0)
            ask(llm, prompt, params=params)
        before = {each.request_id: int(table.num_computed[each.row]) for each in running}
        done += [output for output in llm.step() if output.finished]
        orders.add(tuple(each.request_id for each in running))
        for request in running:
            computed = int(table.num_computed[request.row])
            kept = states.gather(torch.tensor([1 + request.row]))
            if policy == "fold":
                assert int(kept.base) == -1 or 0 <= computed - int(kept.base) < 16
            if request.request_id in before and before[request.request_id] >= table.prefill_len[request.row]:
                stayed = computed - before[request.request_id]
                at_boundary = policy == "slots" and mode == "all" and computed // 8 != (computed - stayed) // 8
                assert int(kept.accepted) in ((1, stayed) if at_boundary else (stayed,))
        if len(running) == 4 and aborted < 2:
            llm.abort(running[1].request_id)
            aborted += 1
    assert len(done) == len(asked) - 2
    assert all(text in wanted for text in ids(done))
    assert len(orders) > 8


@POLICIES
@pytest.mark.parametrize("how", ["minus one", "no drafts"])
def test_m17_a_step_without_drafts_right_after_accepting_three(
    make: Callable[..., LLM], texts: Texts, policy: str, how: str
) -> None:
    """vLLM #56531: it continues from the state of the third draft, not from that of the first token."""
    llm = make(policy, drafter=Patterned(texts, 3, [3, -1] if how == "minus one" else [3]))
    table, params = llm.engine.table, greedy(40)
    prompts = [tokens_of(501, 6), tokens_of(502, 11)]
    wanted = [texts.of(prompt, params) for prompt in prompts]
    ask(llm, *prompts, params=params)
    advanced: list[int] = []
    last = 0

    def skip() -> None:
        nonlocal last
        for request in llm.engine.scheduler.running[:1]:
            computed = int(table.num_computed[request.row])
            advanced.append(computed - last)
            last = computed
            if how == "no drafts" and advanced[-1] == 4:
                table.num_proposed[request.row] = 0

    assert sorted(ids(drain(llm, each_step=skip))) == sorted(wanted)
    assert advanced[1:9] == [4, 1, 4, 1, 4, 1, 4, 1]


@POLICIES
@pytest.mark.parametrize("mode", ["none", "all", "align"])
def test_m29_m33_nothing_of_what_was_there_before_reaches_a_request(
    make: Callable[..., LLM], texts: Texts, policy: str, mode: str
) -> None:
    """NaN in every page, ring, window and KV block before the first request, and again in everything that is free."""
    llm = make(policy, mode, Patterned(texts, 3, [3, 0, 1]), max_num_seqs=2)
    caches, scheduler = llm.engine.caches, llm.engine.scheduler
    params = greedy(15)
    for turn in range(3):  # from the second turn on, requests get used rows
        for pairs, pool in ((caches.kv, scheduler.pool), (caches.states, getattr(scheduler.states, "pool", None))):
            for tensor in (each for pair in pairs for each in pair):
                free = range(1, len(tensor)) if pool is None else pool._free
                tensor[torch.tensor(list(free), dtype=torch.int64)] = torch.nan
        for rings in caches.rings:
            for tensor in () if rings is None else rings.tensors():
                tensor[1:] = torch.nan
        prompts = [tokens_of(600, 17), tokens_of(601 + turn, 4), tokens_of(611 + turn, 1)]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        assert ids(outputs) == [texts.of(prompt, params) for prompt in prompts]
        assert (outputs[0].num_cached_tokens > 0) == (turn > 0 and mode != "none")


@POLICIES
def test_m34_m36_a_boundary_is_published_once_and_after_its_state(
    make: Callable[..., LLM], texts: Texts, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """When a page becomes visible to other requests, it holds the state of an uncached run, and the next step may use
    it.
    """
    llm = make(policy, drafter=Patterned(texts, 3, [3, 1, 0, 2]), max_num_batched_tokens=16)
    pool, params = pages_of(llm).pool, greedy(30)
    prompt = tokens_of(701, 21)
    text = texts.of(prompt, params)
    boundaries = range(8, len(text), 8)
    cold = {}
    for end in boundaries:
        texts.plain.generate([{"prompt_token_ids": text[:end]}], greedy(1))
        cold[end] = [(conv[1].clone(), ssm[1].clone()) for conv, ssm in texts.plain.engine.caches.states]
    names = PrefixKeys(4)
    keys = [names.of(np.array(text, np.int32), end) for end in boundaries]
    insert, said = pool.insert, []

    def check(page: int, key: Any) -> bool:
        first = insert(page, key)
        if key in keys:
            end = 8 + 8 * keys.index(key)
            said.append((end, first))
            for (conv, ssm), (window, state) in zip(llm.engine.caches.states, cold[end], strict=True):
                torch.testing.assert_close(conv[page, : len(window)], window, atol=1e-4, rtol=0)
                torch.testing.assert_close(ssm[page], state, atol=1e-4, rtol=0)
        return first

    monkeypatch.setattr(pool, "insert", check)
    ask(llm, prompt, params=params)
    followed, wanted = 0, [text]

    def follow() -> None:
        nonlocal followed
        if said and said[-1][0] > followed:
            followed = said[-1][0]
            tail = [*text[:followed], 9]
            wanted.append(texts.of(tail, greedy(4)))
            ask(llm, tail, params=greedy(4))

    outputs = drain(llm, each_step=follow)
    assert sorted(ids(outputs)) == sorted(wanted)
    assert [end for end, first in said if first] == list(boundaries)
    hits = {len(output.prompt_token_ids) - 1: output.num_cached_tokens for output in outputs}
    assert all(hits[len(each) - 5] == len(each) - 5 for each in wanted[1:])
    assert len(wanted) > 4


@POLICIES
@MODES
@pytest.mark.parametrize("k", [0, 3])
def test_m38_no_row_holds_more_pages_than_the_layout_says(
    make: Callable[..., LLM],
    sized: Callable[..., LLM],
    texts: Texts,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    mode: str,
    k: int,
) -> None:
    """Random requests over the smallest possible pool. Pages are counted when they are allocated, when their number is
    largest.
    """
    drafter = Patterned(texts, k, [k, 0, 1]) if k else None
    settings = {"max_num_batched_tokens": 20, "max_num_seqs": 4}
    llm = sized(partial(make, policy, mode, drafter), num_blocks=30, **settings)
    states, random = pages_of(llm), Random(9)
    most = llm.cache_plan.costs.pages_per_request
    assert states.pool.capacity == 4 * most
    allocate, held = states.allocate_blocks, []

    def counted(
        rows: NDArray[np.int64],
        computed: NDArray[np.int32],
        lens: NDArray[np.int32],
        num_decodes: int,
        prompts: NDArray[np.int32],
        *slack: NDArray[np.int32],
    ) -> None:
        allocate(rows, computed, lens, num_decodes, prompts, *slack)
        for i, row in enumerate(rows.tolist()):
            inside = 0 if i < num_decodes else (computed[i] + lens[i] - 1) // 8 - computed[i] // 8
            held.append(int(np.count_nonzero(states.table[row])) - int(inside))

    monkeypatch.setattr(states, "allocate_blocks", counted)
    asked = []
    for i in range(12):
        prompt = tokens_of(800, random.choice([0, 8, 20])) + tokens_of(801 + i, random.randint(1, 25))
        asked.append((prompt, greedy(random.randint(4, 25))))
    wanted = [texts.of(*each) for each in asked]
    for prompt, params in asked:
        ask(llm, prompt, params=params)
    assert sorted(ids(drain(llm))) == sorted(wanted)
    assert max(held) <= most
    assert max(held) == most or k == 0
    assert states.pool.num_free == states.pool.capacity
