"""Drafts with noise of their own: what is kept of them is what they were drawn from, on every kind of graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.cudagraph import CudagraphDispatcher, CudaGraphMode, RecordedBackend, ReplayChecks
from bateleur.eagle import (
    Coupled,
    DraftContext,
    DraftGraphs,
    EagleSpeculator,
    HashedVocab,
    Logits,
    Rule,
    SamplingDrafter,
    draw_draft,
)
from bateleur.eagle.buffers import DraftCache, DraftLogits
from bateleur.eagle.conformance import check_drafter
from bateleur.eagle.conformance.toy_engine import DTYPE, HEAD_DIM, ToyRequest, ToyTarget, paged_caches
from bateleur.eagle.heads.layers import DenseAttend
from bateleur.metadata import BatchLimits, get_backend
from eagle_doubles.engine import GraphEngine
from eagle_doubles.heads import ToyHead

K = 3
LIMITS = BatchLimits(4, 32, 40)
SCHEDULE: tuple[tuple[dict[int, int], int | None], ...] = (
    # (tokens of each row, drafts asked for): rows come late, pause, change places, and get fewer drafts
    ({2: 3}, None),
    ({2: 2, 0: 5}, None),
    ({0: 4, 2: 4, 1: 4}, None),
    ({1: 4, 0: 4}, None),
    ({2: 4}, None),
    ({2: 4, 1: 4, 0: 1}, 2),
    ({0: 3, 1: 3, 2: 3}, 0),
    ({1: 1, 2: 1, 0: 1}, 1),
    ({0: 2}, None),
    ({1: 2, 0: 4, 2: 2}, None),
)


def made(engine: GraphEngine, rule: Rule, graphs: DraftGraphs | None = None, ids: Any = None) -> EagleSpeculator:
    head: Any = ToyHead(engine.target, target_ids=ids)
    kv = paged_caches(1, engine.num_blocks, engine.block_size)
    return EagleSpeculator(
        head, DraftCache(kv, engine.groups), engine.backend, engine.limits, K, graphs=graphs, rule=rule
    )


def engine_of(rule: Rule, mode: str | None = None, *, fuse: bool = True, ids: Any = None) -> GraphEngine:
    backend = get_backend("torch", device="cpu", dtype=DTYPE, head_dim=HEAD_DIM)
    engine = GraphEngine(ToyTarget(), backend, LIMITS, lookahead=K - 1)
    graphs = DraftGraphs(RecordedBackend(), (1, 2, 4), fuse=fuse, checks=ReplayChecks.PARANOID)
    engine.drafter = made(engine, rule, None if mode is None else graphs, ids)
    if mode is not None:
        plan = CudagraphDispatcher.make(
            CudaGraphMode[mode], (4, 8, 16), max_num_reqs=4, max_num_tokens=32, query_lens=(1 + K,)
        )
        engine.drafter.capture(engine.capture(plan, RecordedBackend()))
    engine.add(0, [1, 2, 3, 4, 5], seed=7, temperature=0.8)
    engine.add(1, [3, 1, 18, 0], seed=2)
    engine.add(2, [5, 5, 5, 6, 1], seed=3, temperature=1.5)
    return engine


def laws_from_scratch(engine: GraphEngine, request: ToyRequest, drafts: list[int]) -> Tensor:
    """(len(drafts), Vd) float32 logits that a head without caches draws these drafts from."""
    assert engine.drafter is not None
    head: Any = engine.drafter.head
    n = request.computed
    tokens = torch.tensor(request.tokens[: n + 1])
    outputs = engine.target.forward(tokens[:n], torch.arange(n), DenseAttend())
    hidden, ids, laws = head.fuse(engine.target.features(outputs, head.spec.needs)), tokens[1:], []
    for draft in drafts:
        h, recycled = head.forward(ids, hidden, torch.arange(len(ids)), DenseAttend())
        laws.append(head.logits(h[-1:])[0])
        ids, hidden = torch.cat((ids, torch.tensor([draft]))), torch.cat((hidden, recycled[-1:]))
    return torch.stack(laws)


@pytest.mark.parametrize("ids", [None, [4, 0, 18, 7, 2, 11]], ids=["all", "reduced"])
@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.BLOCK])
@pytest.mark.parametrize(
    ("mode", "fuse"),
    [(None, True), ("FULL_DECODE_ONLY", True), ("FULL_DECODE_ONLY", False), ("FULL_AND_PIECEWISE", True)],
)
def test_what_is_kept_is_what_drafts_were_drawn_from(
    mode: str | None, fuse: bool, rule: Rule, ids: list[int] | None
) -> None:
    engine = engine_of(rule, mode, fuse=fuse, ids=ids)
    drafter, table = engine.drafter, torch.arange(3)
    assert isinstance(drafter, EagleSpeculator)
    vocab = HashedVocab.of(19 if ids is None else torch.tensor(ids), torch.device("cpu"))
    for work, asked in SCHEDULE:
        before = drafter.distribution(table)
        proposal = engine.step(work, asked)
        after = drafter.distribution(table)
        assert isinstance(before, Logits)
        assert isinstance(after, Logits)
        assert (after.ids is None) == (ids is None)
        num = K if asked is None else asked
        for drafts, row in zip(proposal.tolist(), work, strict=True):
            request = engine.requests[row]
            assert drafts[num:] == [-1] * (K - num)
            if not num:
                continue
            kept = after.logits[row, :num]
            if request.temperature:
                torch.testing.assert_close(kept, laws_from_scratch(engine, request, drafts[:num]))
            positions = request.computed + 1 + torch.arange(num)
            heat, seeds = torch.full((num,), request.temperature), torch.full((num,), request.seed)
            lane = draw_draft(
                kept, heat, seeds, positions, rule=rule, draft_index=torch.arange(num), vocab=vocab
            ).token_ids
            if request.temperature:
                assert drafts[:num] == (lane if ids is None else torch.tensor(ids)[lane]).tolist()
        for row in {0, 1, 2} - set(work):
            assert torch.equal(before.logits[row], after.logits[row])
    assert engine.num_graph_steps > 0 or mode is None


def test_coupled_keeps_nothing() -> None:
    drafter = engine_of(Rule.COUPLED).drafter
    assert isinstance(drafter, EagleSpeculator)
    assert isinstance(drafter, SamplingDrafter)
    assert drafter.inputs.logits is None
    assert drafter.distribution(torch.arange(2)) == Coupled()


@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.BLOCK])
def test_drafts_with_noise_of_their_own_are_all_that_engines_rely_on(rule: Rule) -> None:
    def drafter(engine: GraphEngine) -> EagleSpeculator:
        return made(engine, rule)

    report = check_drafter(drafter)
    assert report.num_accepted > 0


def test_padding_and_columns_that_are_none_go_to_the_last_line() -> None:
    kept, logits = DraftLogits(3, 2, 4, "cpu"), torch.arange(12.0).view(3, 4) + 1
    kept.stage(torch.tensor([2, 0]))
    kept.keep(logits, torch.tensor(1))
    want = torch.zeros(3, 2, 4)
    want[2, 1], want[0, 1] = logits[0], logits[1]
    assert torch.equal(kept.of(torch.arange(3)), want)
    kept.stage(torch.tensor([1]))
    kept.keep(logits, torch.tensor(2))
    kept.stage(None)
    kept.keep(logits, torch.tensor(0))
    assert torch.equal(kept.of(torch.tensor([2, 0])), want[[2, 0]])
    assert torch.equal(kept.of(torch.arange(3)), want)


def test_drafts_of_a_step_that_is_all_greedy_have_no_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks for it, so eager passes keep none."""
    engine = engine_of(Rule.RATIO)
    propose = engine.drafter.propose  # type: ignore[union-attr]

    def greedy(context: DraftContext) -> Tensor:
        zeros = torch.zeros_like(context.temperature)
        return propose(replace(context, temperature=zeros, greedy=True))

    monkeypatch.setattr(engine.drafter, "propose", greedy)
    engine.step({0: 5})
    assert isinstance(engine.drafter, EagleSpeculator)
    kept = engine.drafter.distribution(torch.arange(3))
    assert isinstance(kept, Logits)
    assert not kept.logits.any()
