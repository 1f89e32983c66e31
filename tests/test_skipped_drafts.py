"""On a CPU with a compiler, a step without drafts does not run the draft head. Operators are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.eagle import DraftContext, EagleSpeculator, FixedDrafts, PolicyRows
from bateleur.mamba import CopyPlan
from bateleur.metadata import CommonAttentionMetadata
from bateleur.metadata.native import unavailable_reason
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.model_runner.model_state import StagedStep

PROMPTS = ["def:fibonacci(n):", "import_os;def:walk(path):", "x", "class:Stack:def:__init__(self", "for:i"]
PARAMS = [
    SamplingParams(temperature=t, seed=i, max_tokens=20 + i, ignore_eos=True)
    for i, t in enumerate((0.0, 0.8, 0.0, 1.0, 0.0))
]
pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="needs the chain of drafts in C")


class Seldom:
    """Proposes drafts in two steps of seven."""

    def __init__(self) -> None:
        self.steps = 0

    def lengths(self, rows: PolicyRows) -> Any:
        self.steps += 1
        return np.minimum(rows.max_drafts, 3 if self.steps % 7 < 2 else 0).astype(np.int32)


class Counting(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_name[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators_by_step(llm: LLM) -> list[Counter[str]]:
    engine, counted = llm.engine, []
    step = engine.step

    def counting() -> None:
        with Counting() as mode:
            step()
        counted.append(mode.by_name)

    engine.step = counting  # type: ignore[method-assign]
    sampled = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in (0.0, 0.9)]
    llm.generate(["def f(x):", "import"], sampled)
    del engine.step
    return counted


@pytest.fixture
def make(make_llm: Callable[..., LLM], tiny_hybrid: Path, tiny_head: Path) -> Callable[..., LLM]:
    def made(**options: Any) -> LLM:
        settings = {"max_model_len": 128, "max_num_seqs": 3, "num_speculative_tokens": 3}
        settings |= {"draft_policy": Seldom()} | options
        return make_llm(model=tiny_hybrid, draft=tiny_head, **settings)

    return made


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def drafter_of(llm: LLM) -> EagleSpeculator:
    assert llm.engine.runner.proposer is not None
    assert isinstance(llm.engine.runner.proposer.drafter, EagleSpeculator)
    return llm.engine.runner.proposer.drafter


def test_a_step_without_drafts_runs_no_matrix_product_of_the_head(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_llm(mamba_state_policy="slots")
    drafting = make_llm(draft="auto", draft_policy=FixedDrafts(0), mamba_state_policy="slots")

    def never(*_: object) -> None:
        raise AssertionError("the head ran")

    monkeypatch.setattr(EagleSpeculator, "propose", never)
    steps = list(zip(operators_by_step(plain), operators_by_step(drafting), strict=True))
    assert len(steps) > 10
    for without, skipped in steps:
        assert skipped["packed_linear"] == without["packed_linear"] > 10


@pytest.mark.parametrize("most", [None, 12])
def test_after_skipped_steps_the_head_starts_at_the_current_position(
    make: Callable[..., LLM], check_integrity: Callable[[Any], None], most: int | None
) -> None:
    """The head reads no key before that position, and the tokens are the same; with whole and chunked prompts."""
    options = {} if most is None else {"max_num_batched_tokens": most}
    llm = make(**options)
    expected = tokens_of(make(draft_policy=FixedDrafts(3), **options))
    drafter, seen, num_late = drafter_of(llm), np.zeros((3, 128), np.bool_), 0
    propose, admit = drafter.propose, drafter.admit

    def proposed(context: DraftContext) -> torch.Tensor:
        nonlocal num_late
        assert context.num_drafts or (context.emitted[:, 0] < 0).any(), "no prompt goes on"
        for at, row in enumerate(context.rows.tolist()):
            start = int(context.batch.num_computed_tokens[at])
            first = 0 if context.start_positions is None else int(context.start_positions[at])
            assert seen[row, first:start].all(), "it reads keys of tokens that it has not seen"
            seen[row, start : start + int(context.num_valid[at])] = True
            num_late += first > 0
        return propose(context)

    def admitted(row: int, token_ids: list[int]) -> None:
        seen[row] = False
        admit(row, token_ids)

    drafter.propose, drafter.admit = proposed, admitted  # type: ignore[method-assign]
    assert tokens_of(llm) == expected
    assert num_late > 10
    assert llm.engine.stats.num_draft_tokens > 30
    check_integrity(llm.engine)


@pytest.mark.parametrize(
    "options",
    [{"enable_prefix_caching": True}, {"async_scheduling": True}, {"speculative_rule": "ratio"}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.filterwarnings("ignore:draft_policy is")
def test_the_head_runs_in_every_step_if_a_later_step_may_need_its_keys(
    make: Callable[..., LLM], options: dict[str, Any]
) -> None:
    """Blocks of shared prefixes must hold the head's keys; drafts of sampling rules must not depend on the policy."""
    llm, num_steps = make(**options), 0
    drafter = drafter_of(llm)
    propose = drafter.propose

    def counted(context: DraftContext) -> torch.Tensor:
        nonlocal num_steps
        num_steps += 1
        assert context.start_positions is None
        return propose(context)

    drafter.propose = counted  # type: ignore[method-assign]
    tokens_of(llm)
    assert num_steps == llm.engine.stats.num_steps


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"enable_prefix_caching": True, "mamba_block_size": 8, "mamba_cache_mode": "align"},
        {"enable_prefix_caching": True, "mamba_block_size": 8, "mamba_cache_mode": "all"},
        {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_backend": "recorded", "cudagraph_checks": "PARANOID"},
        {"cudagraph_mode": "PIECEWISE", "cudagraph_backend": "recorded", "cudagraph_checks": "PARANOID"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "none",
)
@pytest.mark.filterwarnings("ignore:draft_policy is")
def test_steps_that_repeat_a_plan_need_no_new_one_and_no_commit(
    make: Callable[..., LLM], options: dict[str, Any]
) -> None:
    llm, num_repeated, num_others, num_commits = make(mamba_state_policy="slots", **options), 0, 0, 0
    state = llm.engine.runner.model_state
    prepare, builder, states = state.prepare, state._mamba, state._states
    assert builder is not None
    assert states is not None
    plan_commit = builder.commit

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_commits
        num_commits += 1
        return plan_commit(*args, **options)

    def checked(batch: CommonAttentionMetadata, *args: Any, **options: Any) -> StagedStep:
        nonlocal num_repeated, num_others
        staged = prepare(batch, *args, **options)
        if state._last is None or not state._last.repeats:
            num_others += 1
            return staged
        num_repeated += 1
        meta, before = staged.state.mamba, states.values.clone()
        assert meta is not None
        plan = {name: each.clone() for name, each in meta.plan.tensors().items()}
        again = builder.build(batch, state._mamba_group)
        assert all(torch.equal(plan[name], each) for name, each in again.plan.tensors().items())
        assert (meta.num_decodes, meta.num_decode_tokens) == (again.num_decodes, again.num_decode_tokens)
        assert meta.num_prefills == 0
        accepted = torch.ones(batch.num_reqs, dtype=torch.int64)
        copies = plan_commit(again, batch, state._mamba_group, accepted)
        assert torch.equal(states.values, before)
        assert not isinstance(copies, CopyPlan) or not copies.dst.any()
        return staged

    state.prepare, builder.commit = checked, counted  # type: ignore[method-assign]
    expected = tokens_of(make(draft_policy=FixedDrafts(3), mamba_state_policy="slots", **options))
    assert tokens_of(llm) == expected
    assert num_repeated > 5
    assert num_commits <= num_others  # graphs of the end commit without a call
