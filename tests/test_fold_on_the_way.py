"""States under FOLD that a replay in C keeps on its way are those that folds behind steps would have written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.eagle import FixedDrafts, PolicyRows
from bateleur.mamba import StatePolicy, StatePool
from bateleur.mamba.step_buffers import StepBuffers
from bateleur.metadata.native import missing
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.models.native.mamba_branch import MambaCall, RingRows, Slots
from bateleur.runner.models.native.passes import InC

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no kernels in C: {missing()}")
PROMPTS = [[1 + (7 * i + 11 * j) % 200 for j in range(n)] for i, n in enumerate((17, 28, 9, 33))]
"""Of which the first ends with a part of one token."""


class Turns:
    """Numbers of drafts that follow each other, also none for a while."""

    def __init__(self) -> None:
        self._asked = 0

    def lengths(self, rows: PolicyRows) -> Any:
        self._asked += 1
        number = (4, 4, 1, 0, 0, 0, 3, 0, 2)[self._asked % 9]
        return np.minimum(number - np.arange(len(rows)) % 2, rows.most).clip(min=0).astype(np.int32)


POLICIES: dict[str, Callable[[], Any]] = {
    "fixed": lambda: "fixed",
    "none": lambda: FixedDrafts(0),
    "turns": Turns,
}


def made(make_llm: Callable[..., LLM], policy: str, **settings: Any) -> LLM:
    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    return make_llm(model=None, draft="auto", draft_policy=POLICIES[policy](), **options | settings)


def told(llm: LLM) -> list[Any]:
    """Tokens and log probabilities, exactly."""
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=40, ignore_eos=True, logprobs=1)
        for i, t in enumerate((0.0, 0.8, 0.0, 1.2))
    ]
    answers = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    return [
        (answer.token_ids, [p[t].logprob for p, t in zip(answer.logprobs, answer.token_ids, strict=True)])
        for answer in answers
    ]


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each fold behind a step."""
    seen: list[int] = []
    fold = StatePool.fold

    def counted(self: StatePool, plan: Any, *args: Any) -> None:
        seen.append(int((plan.dst > 0).sum()))
        fold(self, plan, *args)

    monkeypatch.setattr(StatePool, "fold", counted)
    return seen


def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made from here on fold behind steps."""
    allocate = StepBuffers.allocate

    def without(*args: Any) -> StepBuffers:
        found = allocate(*args)
        return StepBuffers(found.plan, found.after, found.request_row, found.resumes, None)

    monkeypatch.setattr(StepBuffers, "allocate", without)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_what_is_folded_on_the_way_is_what_is_folded_behind_steps(
    make_llm: Callable[..., LLM], policy: str, folds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with prompts in parts of which some have one token, and rows that come and go."""
    llm = made(make_llm, policy)
    assert llm.engine.setup.cache_plan.layout is not None
    assert llm.engine.setup.cache_plan.layout.policy is StatePolicy.FOLD
    on_the_way = told(llm)
    few, folds[:] = len(folds), []
    behind(monkeypatch)
    expected = told(made(make_llm, policy))
    assert on_the_way == expected
    assert 0 < few < len(folds) / 3, "behind a part of a prompt of one token"
    slots = told(made(make_llm, policy, mamba_state_policy="slots"))
    assert [tokens for tokens, _ in on_the_way] == [tokens for tokens, _ in slots]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_passes_of_operators_may_lie_between(
    make_llm: Callable[..., LLM], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which fold nothing on the way."""
    expected, of, passes = told(made(make_llm, policy)), InC.of, [0]

    def sometimes(*args: Any, **kwargs: Any) -> InC | None:
        passes[0] += 1
        return None if passes[0] % 5 in (1, 2) else of(*args, **kwargs)

    monkeypatch.setattr(InC, "of", sometimes)
    found = told(made(make_llm, policy))
    assert passes[0] > 20
    for (tokens, logprobs), (right, exact) in zip(found, expected, strict=True):
        assert tokens == right
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(exact))


def test_rows_without_drafts_leave_what_they_carry_as_it_is(make_llm: Callable[..., LLM]) -> None:
    """All of it is in the checkpoint, and nobody ends such steps."""
    llm = made(make_llm, "none", max_num_batched_tokens=64)
    states, builder = llm.engine.model_state._states, llm.engine.model_state._mamba
    assert states is not None
    assert builder is not None
    assert builder._calls is not None
    ends, fold = [], builder._calls.fold
    builder._calls.fold = lambda *args: ends.append(1) or fold(*args)  # type: ignore[method-assign]
    llm.generate(PROMPTS[:3], SamplingParams(max_tokens=40, ignore_eos=True))
    assert states.values[:, 1:4].tolist() == [[1] * 3, states.values[1, 1:4].tolist(), [-1] * 3]
    assert 0 < len(ends) < 8


def test_decodes_beside_prompts_leave_nothing_in_rings(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens stayed there, and were carried behind the state again in the next step: of 64 rows without drafts
    that was a twentieth of all time.
    """
    held, call = list[int](), MambaCall.__call__

    def seen(self: MambaCall, x_TM: torch.Tensor, rows: Slots | RingRows) -> torch.Tensor | None:
        assert isinstance(rows, RingRows)
        held.append(int(rows._held[1].ring_len.max()))
        return call(self, x_TM, rows)

    monkeypatch.setattr(MambaCall, "__call__", seen)
    llm = made(make_llm, "none")
    requests = [PROMPTS[i % 4] for i in range(9)]
    lengths = [SamplingParams(max_tokens=10 + 7 * (i % 3), ignore_eos=True) for i in range(9)]
    llm.generate(requests, lengths)
    assert llm.engine.stats.num_steps > len(held) / len(llm.engine.model.spec.recurrent), "some had prompts"
    assert len(held) > 40
    assert max(held) == 0


def test_a_pass_that_breaks_off_leaves_no_half_of_it(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers have folded on the way then: requests are computed again."""
    expected, llm = told(made(make_llm, "fixed")), made(make_llm, "fixed")
    model, passes = llm.engine.model, [0]
    third = model._residuals[5]
    add_to = type(third).add_to

    def breaks(self: Any, *args: Any) -> None:
        passes[0] += self is third
        if self is third and passes[0] % 11 == 0:
            raise RuntimeError("not today")
        add_to(self, *args)

    monkeypatch.setattr(type(third), "add_to", breaks)
    engine_step, failed = llm.engine._step, [0]

    def patient(seconds: float) -> None:
        try:
            engine_step(seconds)
        except RuntimeError:
            failed[0] += 1
            llm.engine.ledger.whole = False

    monkeypatch.setattr(llm.engine, "_step", patient)
    assert [tokens for tokens, _ in told(llm)] == [tokens for tokens, _ in expected]
    assert failed[0] > 2
