"""A whole step on graphs: one replay each for the forward pass, verification with the commit, and the proposal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bateleur.cudagraph import DispatchReason
from bateleur.cudagraph.backends.recorded import RecordedPiece
from bateleur.eagle import PolicyRows, RejectionOutput, SamplingMetadata
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.diagnose.graph_coverage import describe_graphs
from bateleur.runner.sampling import rejection_sampler
from bateleur.runner.sampling.step_end import SampleDispatchReason

GRAPHS = {
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_backend": "recorded",
    "cudagraph_capture_sizes": [3, 9],
    "cudagraph_checks": "PARANOID",
}
SIZES = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 3, "block_size": 4}
PREFIXES = {"enable_prefix_caching": True, "mamba_block_size": 8}
PROMPTS = [[5, 7, 9, 7, 9], [11] * 14, [3]]
DRAWS = [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.0}, {"temperature": 1.2, "top_k": 9, "min_p": 0.02}]


def params(kinds: Sequence[dict[str, Any]], **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(**({"seed": 7 + i, "max_tokens": 18 - 5 * i, "ignore_eos": True} | kind | more))
        for i, kind in enumerate(kinds)
    ]


def tokens(llm: LLM, asked: list[SamplingParams]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [each.outputs[0].token_ids for each in llm.generate(prompts, asked)]


@pytest.fixture(scope="module")
def make(tiny_hybrid: Path, tiny_head: Path, tiny_mtp: Path) -> Callable[..., LLM]:
    def made(draft: str | None = None, **settings: Any) -> LLM:
        model = tiny_mtp if draft == "mtp" else tiny_hybrid
        if draft is not None:
            settings["draft"] = tiny_head if draft == "head" else draft
        return LLM(model, **(SIZES | settings))

    return made


@pytest.fixture(scope="module")
def plain(make: Callable[..., LLM]) -> Callable[[bool, bool], list[list[int]]]:
    """Outputs of eager engines without drafts, for both models, sampled or greedy."""
    known: dict[tuple[bool, bool], list[list[int]]] = {}

    def said(mtp: bool, greedy: bool) -> list[list[int]]:
        if (mtp, greedy) not in known:
            llm = make("mtp", draft_policy={1: 0}, num_speculative_tokens=2) if mtp else make()
            for each in (False, True):
                kinds = [{"temperature": 0.0}] * 3 if each else DRAWS
                known[mtp, each] = tokens(llm, params(kinds))
        return known[mtp, greedy]

    return said


HEAD = {"draft": "head", "num_speculative_tokens": 2}
AHEAD = {"async_scheduling": True}
FOLD, SLOTS = {"mamba_state_policy": "fold"}, {"mamba_state_policy": "slots"}
CASES = {
    "plain-prefixes-async": PREFIXES | AHEAD,
    "head-fold-async": HEAD | FOLD | AHEAD,
    "head-slots-prefixes": HEAD | SLOTS | PREFIXES,
    "mtp-fold-prefixes-async": HEAD | {"draft": "mtp"} | FOLD | PREFIXES | AHEAD,
    "ngram-slots": HEAD | {"draft": "ngram", "prompt_lookup_min": 1} | SLOTS,
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_eager_plain_decoding(
    make: Callable[..., LLM], plain: Callable[[bool, bool], list[list[int]]], case: str
) -> None:
    llm = make(**CASES[case], **GRAPHS)
    for greedy in (False, True):
        kinds = [{"temperature": 0.0}] * 3 if greedy else DRAWS
        assert tokens(llm, params(kinds)) == plain(case.startswith("mtp"), greedy)
    ends = llm.engine.runner.ends.by_reason
    assert set(ends) == {SampleDispatchReason.GRAPH, SampleDispatchReason.FORWARD}
    assert ends[SampleDispatchReason.GRAPH] > 10


def test_what_no_row_asks_for_is_in_no_graph_of_the_step(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with truncation joins last and leaves first, in a batch with a sampled and a greedy row."""
    held, ran = {}, []
    real = rejection_sampler.verify

    def noted(logits: Tensor, *args: Any, metadata: SamplingMetadata | None, **options: Any) -> RejectionOutput:
        held[None if metadata is None else metadata.truncates(logits.shape[1])] = True
        return real(logits, *args, metadata=metadata, **options)

    monkeypatch.setattr(rejection_sampler, "verify", noted)
    llm = make(**GRAPHS)
    assert set(held) == {None, False, True}
    ends = llm.engine.runner.ends
    run = ends.replay
    monkeypatch.setattr(ends, "replay", lambda staged, hidden, kind: ran.append(kind) or run(staged, hidden, kind))
    wanted, eager = {}, make()
    for kind, draws in (
        ("greedy", {"temperature": 0.0}),
        ("untruncated", {"temperature": 0.8}),
        ("truncated", DRAWS[0]),
    ):
        (params_,) = params([draws], max_tokens={"greedy": 16, "untruncated": 11, "truncated": 6}[kind])
        (alone,) = eager.generate([{"prompt_token_ids": [5, 7]}], params_)
        wanted[kind] = alone.outputs[0].token_ids
        name = llm.add_request({"prompt_token_ids": [5, 7]}, params_, request_id=kind)
        assert name == kind
        for _ in range(2):
            assert llm.step() == []
    said = {}
    while llm.has_unfinished_requests:
        said |= {each.request_id: each.outputs[0].token_ids for each in llm.step()}
    assert said == wanted
    assert list(dict.fromkeys(ran)) == ["greedy", "untruncated", "truncated"]
    assert ran[-1] == "greedy"
    assert set(ran[ran.index("truncated") :]) == {"greedy", "truncated", "untruncated"}


def test_what_a_graph_does_not_hold_runs_eagerly_and_is_counted(
    make: Callable[..., LLM], plain: Callable[[bool, bool], list[list[int]]]
) -> None:
    """The proposal after it runs on its graph nevertheless."""
    llm = make(**HEAD, **GRAPHS)
    kinds = [kind | {"logprobs": 1} for kind in DRAWS]
    assert tokens(llm, params(kinds)) == plain(False, False)
    assert set(llm.engine.runner.ends.by_reason) == {SampleDispatchReason.RULES, SampleDispatchReason.FORWARD}
    assert llm.engine.runner.proposer.drafter.decisions.by_reason[DispatchReason.DECODE] > 10


def test_behind_a_step_that_ends_eagerly_nothing_stale_is_read(make: Callable[..., LLM]) -> None:
    """Its proposal runs on a graph with padded rows: whatever a row without a token contains must not matter."""
    proposed, spoiled = [], 0
    for checks in ("CHEAP", "PARANOID"):
        llm = make(**HEAD, **GRAPHS | {"cudagraph_checks": checks})
        for prompt, each in zip(PROMPTS, params(DRAWS, logprobs=1), strict=True):
            llm.add_request({"prompt_token_ids": prompt}, each)
        steps, sampler = [], llm.engine.runner.ends.sampler
        while llm.has_unfinished_requests:
            llm.step()
            live = [request.row for request in llm.engine.scheduler.running]
            steps.append(sampler.rows.next_ids[live].tolist())
            spoiled += int((sampler.rows.num_valid > 1 + HEAD["num_speculative_tokens"]).sum())
        proposed.append(steps)
        assert llm.engine.runner.ends.by_reason[SampleDispatchReason.RULES] > 10
    assert proposed[0] == proposed[1]
    assert spoiled > 5, "rows of requests that have ended"


@pytest.mark.parametrize("case", [HEAD | SLOTS | PREFIXES, HEAD | FOLD | AHEAD | {"speculative_rule": "ratio"}])
def test_replays_of_every_kind_of_graph_equal_eager_runs(
    make: Callable[..., LLM], tiny_hybrid: Path, tiny_head: Path, case: dict[str, Any]
) -> None:
    """A graph that does not write the input of the next step is found, although its outputs are right. `info` lists all
    graphs.
    """
    engine = make(**case, **GRAPHS).engine
    report = engine.verify_graphs(fuzz=2)
    assert report.ok, report.table()
    assert {each.part for each in report.comparisons} == {"forward", "end", "draft chain", "proposal"}
    proposer, ids = engine.runner.proposer, engine.runner.ends.sampler.rows.next_ids
    facts = describe_graphs(tiny_hybrid, **SIZES | GRAPHS | case | {"draft": tiny_head})
    captured = (engine.runner.graphs.manager, engine.runner.ends.manager, proposer.graphs.manager)
    assert [list(each.ready) for each in captured] == [
        list(keys) for keys in (facts.plan.keys, facts.ends, facts.proposals)
    ]
    for part, graphs in (("end", engine.runner.ends), ("proposal", proposer.graphs)):
        key, record = next(iter(graphs.manager._captured.items()))
        run = record.graph.replay

        def forgets(state: Any, run: Callable[[Any], Any] = run) -> Any:
            before = ids.clone()
            output = run(state)
            ids.copy_(before)
            return output

        record.graph.replay = forgets
        report = engine.verify_graphs(fuzz=1)
        (failing,) = report.failing
        assert (failing.part, failing.key) == (part, key)
        assert "next differs" in failing.failure
        assert f"FAILED  {part}: {key}: seed 0" in report.table()
        record.graph.replay = run


@pytest.mark.parametrize(("relative", "ok"), [(1e-7, True), (1e-4, False)])
def test_proposals_may_differ_by_enlarged_rounding(make_llm: Callable[..., LLM], relative: float, ok: bool) -> None:
    """On a GPU, products of a replay and of an eager run may round differently."""
    options = GRAPHS | {"draft": "auto", "max_num_seqs": 2, "cudagraph_capture_sizes": [10]}
    engine = make_llm(**options).engine

    def rounding(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def rounded(state: Any) -> Any:
            for each in state.hidden:
                each.mul_(1 + relative * torch.randn(each.shape))
            return run(state)

        return rounded

    for key, record in engine.runner.proposer.graphs.manager._captured.items():
        if key.variant == (4,):
            record.graph.replay = rounding(record.graph.replay)  # type: ignore[method-assign]
    report = engine.verify_graphs(fuzz=2)
    assert max(each.max_difference for each in report.comparisons) > 1e-5
    assert report.ok is ok, report.table()


def steady(steps: list[Any]) -> list[Any]:
    """The steps in the middle, in which no request joins or is near its end."""
    assert len(steps) > 8
    return steps[3:6]


@pytest.mark.parametrize(("drafts", "count"), [({}, 2), (HEAD | AHEAD, 3)])
def test_a_steady_step_replays_a_graph_for_each_of_its_parts(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, drafts: dict[str, Any], count: int
) -> None:
    llm = make(**drafts, **GRAPHS | {"cudagraph_checks": "CHEAP"})
    pieces, steps, step, replay = [0], [], llm.engine.step, RecordedPiece.replay

    def counted(piece: RecordedPiece) -> None:
        pieces[0] += 1
        replay(piece)

    def noted() -> None:
        before = pieces[0]
        step()
        steps.append(pieces[0] - before)

    monkeypatch.setattr(RecordedPiece, "replay", counted)
    monkeypatch.setattr(llm.engine, "step", noted)
    tokens(llm, params(DRAWS, max_tokens=30))
    assert steady(steps) == [count] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a device that this machine has")
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_from_the_forward_pass_on_the_host_launches_nothing_but_graphs(cuda: Any) -> None:
    """On CUDA with its own attention; before that there is only the staging of the step."""
    drafts = {"draft": "auto", "num_speculative_tokens": 3}
    llm = cuda.make(cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[8], **drafts, **AHEAD)
    kinds = params([{"temperature": 0.8, "top_p": 0.9}] * 2, max_tokens=24)
    cuda.run(llm, [[5, 6], [9]], kinds)
    assert cuda.faults == []
    for launched in steady(cuda.launched):
        first = launched.index("replay")
        assert launched[first:] == ["replay"] * 3


class Uneven:
    """Number of drafts by row: 0, 1, 2, ..."""

    def lengths(self, rows: PolicyRows) -> np.ndarray[Any, np.dtype[np.int32]]:
        """See `DraftPolicy`."""
        return np.minimum(rows.rows % 4, rows.max_drafts).astype(np.int32)


class InTurn:
    """Equal numbers of drafts for all rows, by step: K, K - 1, ..., 0, and again."""

    def __init__(self) -> None:
        self.steps = 0

    def lengths(self, rows: PolicyRows) -> np.ndarray[Any, np.dtype[np.int32]]:
        """See `DraftPolicy`."""
        self.steps += 1
        return np.minimum(3 - self.steps % 4, rows.max_drafts).astype(np.int32)


@pytest.mark.parametrize("policy", [Uneven, InTurn])
def test_35387_rows_of_unequal_draft_lengths_keep_their_graph(
    make: Callable[..., LLM], plain: Callable[[bool, bool], list[list[int]]], policy: type[Uneven] | type[InTurn]
) -> None:
    """Also for steps with other numbers of drafts than a graph was captured for."""
    llm = make("head", num_speculative_tokens=3, draft_policy=policy(), **GRAPHS | {"cudagraph_capture_sizes": [12]})
    assert tokens(llm, params(DRAWS)) == plain(False, False)
    assert set(llm.engine.runner.ends.by_reason) == {SampleDispatchReason.GRAPH, SampleDispatchReason.FORWARD}
    assert llm.engine.runner.ends.by_reason[SampleDispatchReason.FORWARD] <= 2, "prompts"
    assert llm.get_metrics().acceptance.tried[0] > 0


@pytest.mark.parametrize("policy", ["slots", "fold"])
def test_graphs_are_verified_with_the_fewest_state_slots(make: Callable[..., LLM], policy: str) -> None:
    """A request that fits into one state block has no slots for two."""
    sharing = {"enable_prefix_caching": True, "mamba_state_policy": policy, "mamba_retention": "none"}
    llm = make("head", num_speculative_tokens=1, **GRAPHS | sharing, max_model_len=12, block_size=16)
    assert llm.engine.runner.model_state.state_table.shape[1] == (2 if policy == "slots" else 1)
    assert llm.engine.verify_graphs(fuzz=3).ok
