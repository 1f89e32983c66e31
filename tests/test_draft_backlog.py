"""A draft head on a CPU is shown the steps that nobody wanted drafts of when somebody does, and drafts the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.eagle import DraftContext, PolicyRows, StepTime
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.spec_decode.backlog import Backlog

PROMPTS = ["def:fibonacci(n):", "import_os;def:walk(path):", "x", "class:Stack:def:__init__(self", "for:i"]
PARAMS = [
    SamplingParams(temperature=t, seed=i, max_tokens=20 + i, ignore_eos=True)
    for i, t in enumerate((0.0, 0.8, 0.0, 1.0, 0.0))
]


class Seldom:
    """Drafts in two steps of seven."""

    def __init__(self) -> None:
        self.steps = 0

    def lengths(self, rows: PolicyRows) -> Any:
        self.steps += 1
        return np.minimum(rows.most, 3 if self.steps % 7 < 2 else 0).astype(np.int32)


def run(llm: LLM) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The tokens of all requests, and all drafts that were asked for."""
    drafter, drafts = llm.engine._proposer.drafter, []  # type: ignore[union-attr]
    propose = drafter.propose

    def recorded(context: DraftContext) -> torch.Tensor:
        made = propose(context)
        if context.num_drafts:
            drafts.append(made.clone())
        return made

    drafter.propose = recorded  # type: ignore[method-assign]
    outputs = llm.generate(PROMPTS, PARAMS)
    return [output.outputs[0].token_ids for output in outputs], drafts


@pytest.fixture
def make(make_llm: Callable[..., LLM], tiny_hybrid: Path, tiny_head: Path) -> Callable[..., LLM]:
    def made(**options: Any) -> LLM:
        settings = {"max_model_len": 128, "max_num_seqs": 3, "num_speculative_tokens": 3}
        settings |= {"draft_policy": Seldom()} | options
        return make_llm(model=tiny_hybrid, draft=tiny_head, **settings)

    return made


@pytest.mark.parametrize("most", [None, 12])
def test_a_head_that_catches_up_drafts_what_one_does_that_saw_every_step(
    make: Callable[..., LLM], check_integrity: Callable[[Any], None], most: int | None
) -> None:
    """In passes of few tokens, too, and while prompts are in parts."""
    options = {} if most is None else {"max_num_batched_tokens": most}
    late, always = make(**options), make(**options)
    assert late.engine._proposer._backlog is not None  # type: ignore[union-attr]
    always.engine._proposer._backlog = None  # type: ignore[union-attr]
    (tokens, drafts), (expected, wanted) = run(late), run(always)
    assert tokens == expected
    assert len(drafts) == len(wanted) > 5
    for mine, theirs in zip(drafts, wanted, strict=True):
        assert torch.equal(mine, theirs)
    check_integrity(late.engine)


@pytest.mark.parametrize("begins_late", [True, False])
def test_a_request_of_which_something_was_forgotten_is_drafted_for_from_there_on_or_not_at_all(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, begins_late: bool
) -> None:
    """Those of its first step are none of these."""
    tokens, wanted = run(make())
    llm = make()
    backlog: Any = llm.engine._proposer._backlog  # type: ignore[union-attr]
    monkeypatch.setattr(backlog, "_max_bytes", 0)
    monkeypatch.setattr(backlog, "_begins_late", begins_late)
    kept, drafts = run(llm)
    assert kept == tokens
    if begins_late:
        assert len(drafts) == len(wanted)
        assert not all(torch.equal(*pair) for pair in zip(drafts, wanted, strict=True)), "it knows less"
    else:
        assert 0 < len(drafts) < len(wanted)


class Sleepy(Seldom):
    """Sleeps through five steps of eleven, and drafts in those behind them."""

    asked = 0

    def settled(self, num_rows: int, *, greedy: bool) -> int | None:
        return 0 if self.asked % 11 < 7 else None

    def sleeps(self, num_rows: int, *, greedy: bool) -> bool:
        self.asked += 1
        return self.asked % 11 < 5

    def lengths(self, rows: PolicyRows) -> Any:
        return np.minimum(rows.most, 3).astype(np.int32)


@pytest.mark.parametrize("most", [None, 12])
def test_behind_sleep_the_head_begins_anew(
    make: Callable[..., LLM], check_integrity: Callable[[Any], None], most: int | None
) -> None:
    """Its drafts are those of a head whose keys before that are hidden, and the tokens are the same."""
    options = {} if most is None else {"max_num_batched_tokens": most}
    awake, llm = make(**options), make(draft_policy=Sleepy(), **options)
    drafter: Any = llm.engine._proposer.drafter  # type: ignore[union-attr]
    shown, seen, catch_up, propose = np.zeros((3, 128), np.bool_), 0, drafter.catch_up, drafter.propose
    table = llm.engine.table

    def caught_up(steps: Any, features: Any) -> None:
        for row in range(3):  # by their blocks
            for at in np.flatnonzero((steps.block_tables[0] == table.block_table[row]).all(1)):
                first = steps.num_computed[at]
                shown[row, first : first + steps.query_lens[at]] = True
        catch_up(steps, features)

    def proposed(context: DraftContext) -> torch.Tensor:
        nonlocal seen
        for at, row in enumerate(context.rows.tolist()):
            first = int(context.batch.num_computed_tokens[at])
            begins = 0 if context.begins is None else int(context.begins[at])
            assert shown[row, begins:first].all(), "what it sees it was shown"
            shown[row, first : first + int(context.num_valid[at])] = True
            seen += begins > 0
        return propose(context)

    admit = drafter.admit

    def admitted(row: int, token_ids: list[int]) -> None:
        shown[row] = False
        admit(row, token_ids)

    drafter.catch_up, drafter.propose, drafter.admit = caught_up, proposed, admitted
    expected, _ = run(awake)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.engine.stats.num_draft_tokens > 30
    assert seen > 10
    check_integrity(llm.engine)


class Dozing(Sleepy):
    """Wants to know what the last two of five steps took through which it sleeps, and all others."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []
        self.wanted: list[bool] = []

    @property
    def dozes(self) -> bool:
        return self.asked % 11 < 3

    def sleeps(self, num_rows: int, *, greedy: bool) -> bool:
        asleep = super().sleeps(num_rows, greedy=greedy)
        if not self.dozes:
            self.wanted.append(asleep)
        return asleep

    def observe(self, step: StepTime) -> None:
        assert step.seconds > 0
        assert not (step.asleep and (step.num_missed or step.num_proposed.any()))
        self.told.append(step.asleep)


def test_a_policy_is_told_of_the_steps_that_it_sleeps_through_unless_it_dozes(
    make: Callable[..., LLM], check_integrity: Callable[[Any], None]
) -> None:
    policy = Dozing()
    llm = make(draft_policy=policy)
    llm.generate(PROMPTS, PARAMS)
    told, wanted = policy.told, policy.wanted
    assert told == wanted[: len(told)]
    assert len(wanted) - len(told) <= 1, "the last step has nobody behind it who tells"
    assert 5 < sum(told) < len(told) - 5
    check_integrity(llm.engine)


@pytest.mark.parametrize("options", [{"enable_prefix_caching": True}, {"async_scheduling": True}])
def test_where_blocks_are_shared_or_tokens_unknown_every_step_is_shown(
    make: Callable[..., LLM], options: dict[str, bool]
) -> None:
    assert make(**options).engine._proposer._backlog is None  # type: ignore[union-attr]


def test_what_was_caught_up_with_is_not_missed_again() -> None:
    class Table:
        num_tokens = np.array([9, 9, 9])
        num_computed = np.array([4, 2, 0], np.int32)
        token_ids = np.arange(27).reshape(3, 9)
        block_table = np.arange(6, dtype=np.int32).reshape(3, 2)

    table: Any = Table()
    backlog, rows = Backlog(table, begins_late=True), np.array([0, 1])
    features = (torch.arange(12.0).view(6, 2),)
    backlog.add(rows, np.array([1, 3], np.int32), np.array([1, 2]), features)
    Table.num_computed = np.array([5, 4, 0], np.int32)
    backlog.add(rows[1:], np.array([1], np.int32), np.array([1]), (torch.full((1, 2), -1.0),))
    backlog.admit(0)
    found = backlog.take(np.array([1, 2]))
    assert found is not None
    missed, (fed,) = found
    assert (missed.query_lens.tolist(), missed.num_computed.tolist()) == ([3], [2])
    assert missed.token_ids.tolist() == [12, 13, 14]
    assert missed.block_tables[0].tolist() == [[2, 3]]
    assert fed.tolist() == [[2, 3], [4, 5], [-1, -1]]
    assert backlog.take(np.array([0, 1, 2])) is None
