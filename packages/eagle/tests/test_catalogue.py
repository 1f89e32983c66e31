"""The catalogue of known bugs of speculative decoding: every entry has a test that names it; here are the last ones.

A verification and noise, B bookkeeping of rejections, C geometry and padding, D feeding the head, E graphs, F draft
caches, G acceptance.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.cudagraph import CudagraphDispatcher, CudaGraphMode, RecordedBackend, ReplayChecks
from bateleur.eagle.buffers import DraftCache
from bateleur.eagle.chain_steps import bound_of_drafts
from bateleur.eagle.conformance.toy_engine import DTYPE, HEAD_DIM, ToyRequest, ToyTarget, paged_caches
from bateleur.eagle.loop import Request, sample, speculate
from bateleur.eagle.managers import DraftGraphs
from bateleur.eagle.speculator import EagleSpeculator
from bateleur.metadata import BatchLimits, get_backend
from eagle_doubles.engine import GraphEngine
from eagle_doubles.heads import MarkovHead, ToyHead

ENTRIES = [
    f"{letter}{n}" for letter, count in zip("abcdef", (11, 11, 9, 7, 5, 5), strict=True) for n in range(1, count + 1)
]
ELSEWHERE = {
    "b7": "counts of emitted tokens are the sampler's, so an engine's",
    "b10": "no engine here hands a prefill to another one",
    "d7": "no target here has inputs that are not text",
    "f5": "the states of a hybrid target are an engine's; bateleur.mamba commits them",
}


def test_every_entry_has_a_test_that_names_it() -> None:
    here = Path(__file__).parent
    text = "".join(path.read_text() for path in here.rglob("test_*.py"))
    prefixes = re.findall(r"def test_((?:[a-g]\d*_)+)", text)
    named = {entry for prefix in prefixes for entry in prefix.rstrip("_").split("_")}
    assert {*ENTRIES, "g"} - named == ELSEWHERE.keys()


K = 3


def make(
    k: int = K, *, head: Any = None, target: ToyTarget | None = None, mode: str | None = None, fuse: bool = True
) -> GraphEngine:
    """An engine whose requests come later, and its drafter, both captured if there is a mode."""
    target, limits = target or ToyTarget(), BatchLimits(4, 40, 60)
    head = head or ToyHead(target)
    backend = get_backend("torch", device="cpu", dtype=DTYPE, head_dim=HEAD_DIM)
    engine = GraphEngine(target, backend, limits, lookahead=k)
    kv = paged_caches(head.spec.num_layers, engine.num_blocks, engine.block_size)
    graphs = None
    if mode is not None:
        graphs = DraftGraphs(RecordedBackend(), (1, 2, 4), fuse=fuse, checks=ReplayChecks.PARANOID)
    engine.drafter = EagleSpeculator(head, DraftCache(kv, engine.groups), backend, limits, k, graphs=graphs)
    if mode is not None:
        sizes = (1 + k, 2 * (1 + k), 4 * (1 + k))
        plan = CudagraphDispatcher.make(
            CudaGraphMode[mode], sizes, max_num_reqs=4, max_num_tokens=40, query_lens=(1 + k,)
        )
        engine.drafter.capture(engine.capture(plan, RecordedBackend()))
    return engine


def assert_drafts_and_caches(engine: GraphEngine, request: ToyRequest) -> None:
    """The drafts, and what is kept of all computed tokens, are what the head makes of them from scratch."""
    assert engine.drafter is not None
    drafts, held = engine.from_scratch(request, engine.drafter.num_speculative_tokens)
    assert request.drafts == drafts
    for layer in range(len(engine.drafter.kv)):
        paged = engine.draft_cache(request, layer, request.computed)
        for found, expected in zip(paged, held.kv[layer], strict=True):
            torch.testing.assert_close(found, expected)


# --- A ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False])
def test_a4_a_replay_writes_the_drafts_of_every_pass(fuse: bool) -> None:
    """No draft, and no count that a later pass needs, is left from the capture or from the step before."""
    engine, clean = make(mode="FULL", fuse=fuse), make()
    for each in (engine, clean):
        for row in range(3):
            each.add(row, [3 + row, 1, 18, 0], seed=row, temperature=0.8 * row)
        each.step({0: 4, 1: 4, 2: 4})
    assert engine.drafter is not None
    assert engine.drafter.decode is not None
    before = engine.num_graph_steps
    for step in range(3):
        engine.drafter.inputs.poison()
        found = engine.step(dict.fromkeys(range(3), 1 + K))
        assert torch.equal(found, clean.step(dict.fromkeys(range(3), 1 + K)))
        assert ((found >= 0) & (found < engine.target.vocab_size)).all()
        assert engine.num_graph_steps == before + 1 + step


# --- B ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, K])
def test_b1_b2_b3_b4_every_path_of_accepted_counts(first: int) -> None:
    """Steps that accept 0, 1 or K drafts, in every order of three, in rows that take different paths."""
    for second, third in itertools.product((0, 1, K), repeat=2):
        engine = make()
        for row in range(3):
            engine.add(row, [3 + row, 1, 18, 0, 9][: 3 + row], seed=row, temperature=0.7 * row)
        for row in range(3):
            engine.step({row: 3 + row})
        path = [first, second, third]
        for step in range(3):
            kept = [path[(step + row) % 3] for row in range(3)]
            for request, right in zip(engine.requests.values(), kept, strict=True):
                script(engine, request, right)
            engine.step(dict.fromkeys(range(3), 1 + K))
            assert engine.context is not None
            assert engine.context.num_valid.tolist() == [1 + right for right in kept]
            # B4: what the host takes for granted is never below the truth, and exact only where it is the truth.
            bound = bound_of_drafts(engine.context.batch)
            truth = np.array([request.computed for request in engine.requests.values()])
            assert (bound.upper >= truth).all()
            assert (bound.upper == truth)[bound.exact].all()
            for request in engine.requests.values():
                assert_drafts_and_caches(engine, request)


def script(engine: GraphEngine, request: ToyRequest, right: int) -> None:
    """Give a request K drafts of which the first `right` will be accepted, and the next will not."""
    twin = ToyRequest(request.row, list(request.tokens), request.seed, request.temperature)
    truth = engine.plain(twin, K)[len(request.tokens) :]
    wrong = [(token + 1) % engine.target.vocab_size for token in truth]
    request.drafts = truth[:right] + wrong[right:]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_b8_a_text_may_end_inside_a_run_of_accepted_drafts(temperature: float) -> None:
    table = 3 * torch.randn(30, 30, generator=torch.Generator().manual_seed(0))
    head: Any = MarkovHead(table + torch.randn(30, 30, generator=torch.Generator().manual_seed(1)))
    plain = sample(lambda ids: (table[ids], ()), Request([1], 12, temperature=temperature))
    ends = []
    for length in range(13):
        steps = list(
            speculate(lambda ids: (table[ids], (table[ids],)), head, Request([1], length, temperature=temperature), 4)
        )
        assert [token for step in steps for token in step.tokens] == plain[:length]
        ends += [step.num_accepted + 1 - len(step.tokens) for step in steps[-1:]]
    assert max(ends) > 0  # some run went on behind the end


def test_b9_a_request_that_is_preempted_with_drafts_computes_its_text_again() -> None:
    engine = make()
    other, request = engine.add(0, [3, 1, 4], seed=1), engine.add(1, [5, 9, 2, 6], seed=2, temperature=0.8)
    engine.step({0: 3, 1: 4})
    engine.step({0: 1 + K, 1: 1 + K})
    assert len(request.drafts) == K
    # Its blocks are somebody else's now, its drafts are gone, and it comes back in another row, in chunks.
    del engine.requests[1]
    thief = engine.add(1, [7, 7, 7, 7, 7], seed=3)
    back = engine.add(2, request.tokens, request.seed, request.temperature)
    total = len(back.tokens)
    engine.step({0: 1 + K, 1: 5})
    engine.step({0: 1 + K, 1: 1 + K, 2: total - 2})
    engine.step({2: 2, 0: 1})
    for _ in range(2):
        engine.step(dict.fromkeys(range(3), 1 + K))
        for each in (other, thief, back):
            assert_drafts_and_caches(engine, each)
    assert back.tokens == engine.plain(request, len(back.tokens) - request.prompt_len)


def copy_prefix(engine: GraphEngine, source: int, row: int, num_blocks: int) -> None:
    """A hit, as a copy: the first blocks of another row, in the caches of the target and of the draft."""
    assert engine.drafter is not None
    for cache in (cache for pair in (*engine.kv, *engine.drafter.kv) for cache in pair):
        cache[engine.tables[row, :num_blocks]] = cache[engine.tables[source, :num_blocks]]


def joined(prompt: Sequence[int], num_blocks: int) -> tuple[GraphEngine, ToyRequest]:
    """A request that begins with the blocks of one whose prompt is 3, 1, 4, 1, 5, 9, 2, 6, 5."""
    engine = make()
    engine.add(0, [3, 1, 4, 1, 5, 9, 2, 6, 5])
    engine.step({0: 9})
    request = engine.add(1, prompt, seed=4, temperature=0.8)
    copy_prefix(engine, 0, 1, num_blocks)
    request.computed = 4 * num_blocks
    engine.step({1: len(prompt) - request.computed})
    return engine, request


@pytest.mark.parametrize("num_new", [1, 2, 4])
def test_b11_a_request_may_begin_with_computed_tokens(num_new: int) -> None:
    """The draft's keys of a hit come with it: nobody has the features to make them again."""
    engine, request = joined([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8][: 8 + num_new], 2)
    for _ in range(3):
        assert_drafts_and_caches(engine, request)
        engine.step({1: 1 + K})
    assert request.tokens == engine.plain(request, len(request.tokens) - request.prompt_len)


def test_f3_a_block_of_a_draft_belongs_to_the_token_behind_it_too() -> None:
    """Its last key was made with that token, so a hit on the block alone leaves one wrong key, and no other."""
    for behind, wrong in ((5, []), (6, [3])):
        engine, request = joined([3, 1, 4, 1, behind, 2], 1)
        assert engine.drafter is not None
        _, held = engine.from_scratch(request, 0)
        found, expected = engine.draft_cache(request, 0, request.computed)[0], held.kv[0][0]
        assert [i for i in range(len(expected)) if not torch.allclose(found[i], expected[i])] == wrong


# --- E ------------------------------------------------------------------------------------------------------


def test_e3_what_a_draft_draws_with_lies_apart_from_what_the_target_returned() -> None:
    engine = make(mode="FULL")
    for row in range(2):
        engine.add(row, [3 + row, 1, 18], seed=row, temperature=0.8)
        engine.step({row: 3})
    assert engine.manager is not None
    assert engine.drafter is not None
    replay, returned = engine.manager.replay, []

    def spy(*args: Any) -> Any:
        outputs = replay(*args)
        returned.append((outputs, [output.clone() for output in outputs]))
        return outputs

    engine.manager.replay = spy  # type: ignore[method-assign]
    for _ in range(3):
        engine.step({0: 1 + K, 1: 1 + K})
        outputs, before = returned[-1]
        assert all(torch.equal(*pair) for pair in zip(outputs, before, strict=True))
    assert len(returned) == 3
    drafter = engine.drafter
    assert drafter.prefill is not None
    assert drafter.decode is not None


# --- G ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "num_rows", "mode", "fuse", "chunk"),
    [
        *[(k, num_rows, None, True, 9) for k in (1, 2, 5) for num_rows in (1, 3)],
        (3, 1, "FULL", True, 9),
        (3, 3, "FULL", False, 9),
        (3, 4, "FULL_AND_PIECEWISE", True, 2),
        (1, 2, "FULL_DECODE_ONLY", True, 3),
        (3, 2, None, True, 1),
    ],
)
def test_g_the_target_as_its_own_drafter_gives_k_plus_one_tokens_in_every_step(
    k: int, num_rows: int, mode: str | None, fuse: bool, chunk: int
) -> None:
    target = ToyTarget(num_layers=0)
    target.position_embedding.zero_()
    head = MarkovHead(target.logits(torch.tanh(target.embedding)))
    engine = make(k, head=head, target=target, mode=mode, fuse=fuse)
    for row in range(num_rows):
        request = engine.add(row, [1 + row, 2, 5, 3, 4], seed=row, temperature=0.5 * row)
        while request.computed < request.prompt_len:
            engine.step({row: min(chunk, request.prompt_len - request.computed)})
    for _ in range(4):
        engine.step(dict.fromkeys(range(num_rows), 1 + k))
        assert engine.context is not None
        assert engine.context.num_valid.tolist() == [1 + k] * num_rows
    assert (engine.num_graph_steps > 0) == (mode is not None)
    for request in engine.requests.values():
        assert request.tokens == engine.plain(request, len(request.tokens) - request.prompt_len)
