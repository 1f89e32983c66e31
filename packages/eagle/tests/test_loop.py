"""The loop for one sequence: the text of plain decoding from any head, and the law under the other rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.eagle import loop
from bateleur.eagle.conformance.toy_engine import ToyTarget
from bateleur.eagle.drafter import TargetNeeds
from bateleur.eagle.heads.layers import DenseAttend
from bateleur.eagle.loop import Request, Step, sample, speculate
from bateleur.eagle.rules import Logits, Rule
from eagle_doubles.heads import MarkovHead, ToyHead
from eagle_doubles.markov import chi_square, exact_law

PROMPT = [3, 1, 4]
Heads = Callable[[ToyTarget], Any]
HEADS: dict[str, Heads] = {
    "two-layers": lambda target: ToyHead(target, num_layers=2),
    "own-vocabulary": lambda target: ToyHead(target, target_ids=(17, 2, 3, 5, 7, 11, 13)),
    "one-tap": lambda target: ToyHead(target, TargetNeeds(taps=(0,)), hidden_size=9),
}


def function(model: ToyTarget, head: Any) -> Callable[[Tensor], tuple[Tensor, Sequence[Tensor]]]:
    def target(ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        outputs = model.forward(ids, torch.arange(len(ids)), DenseAttend())
        return model.logits(outputs[-1]), model.features(outputs, head.spec.needs)

    return target


def text(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_coupled_is_plain_decoding_for_any_number_of_drafts(name: str, temperature: float) -> None:
    model = ToyTarget()
    head = HEADS[name](model)
    target = function(model, head)
    plain = sample(target, Request(PROMPT, 16, seed=7, temperature=temperature))
    assert len(set(plain)) > 3
    for num_drafts in (0, 1, 2, 3, 7):
        steps = list(speculate(target, head, Request(PROMPT, 16, seed=7, temperature=temperature), num_drafts))
        assert text(steps) == plain
        assert [step.num_drafts for step in steps] == [0] + [num_drafts] * (len(steps) - 1)


@pytest.mark.parametrize("rule", Rule)
def test_greedy_decoding_is_the_same_under_every_rule(rule: Rule) -> None:
    model = ToyTarget()
    head: Any = ToyHead(model)
    target = function(model, head)
    assert text(list(speculate(target, head, Request(PROMPT, 12), 3, rule=rule))) == sample(target, Request(PROMPT, 12))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_g_the_target_as_its_own_head_gives_k_plus_one_tokens_in_every_step(temperature: float) -> None:
    table = 3 * torch.randn(30, 30, generator=torch.Generator().manual_seed(0))
    head: Any = MarkovHead(table)
    steps = list(speculate(lambda ids: (table[ids], (table[ids],)), head, Request([1], 41, temperature=temperature), 4))
    assert [len(step.tokens) for step in steps] == [1] + [5] * 8
    assert [step.num_accepted for step in steps] == [0] + [4] * 8


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_head_from_scratch(name: str) -> None:
    """F1: a cache that kept a rejected draft, or a feature of one, would draft something else."""
    model = ToyTarget()
    head = HEADS[name](model)
    target = function(model, head)
    model_drafts: list[int] = []
    fed: list[list[int]] = []

    def spy(ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        fed.append(ids.tolist())
        return target(ids)

    steps = list(speculate(spy, head, Request([6], 40), 3))
    assert any(step.num_accepted for step in steps)
    assert any(step.num_accepted < 3 for step in steps[1:])
    known = [6]
    for step, ids in zip(steps, fed, strict=True):
        assert ids == known + model_drafts
        known += step.tokens
        _, features = target(torch.tensor(known[:-1]))
        hidden, tokens = head.fuse(features), torch.tensor(known[1:])
        for _ in range(3):
            h, recycled = head.forward(tokens, hidden, torch.arange(len(tokens)), DenseAttend())
            token = head.logits(h[-1:]).argmax(-1)
            token = token if head.target_ids is None else head.target_ids[token]
            tokens = torch.cat((tokens, token))
            hidden = torch.cat((hidden, recycled[-1:]))
        model_drafts = tokens[-3:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.BLOCK])
@pytest.mark.parametrize("declared", [1.0, 2.0])
def test_the_other_rules_keep_the_law_that_is_declared(
    rule: Rule, declared: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With twice the logits declared it must fail, or this proves nothing."""
    monkeypatch.setattr(loop, "Logits", lambda logits, ids: Logits(declared * logits, ids))
    laws = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(3)).double().softmax(-1)
    table, other = laws.log().float()
    head: Any = MarkovHead(other)

    def target(ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        return table[ids], (table[ids],)

    requests = [Request([0], 3, seed=seed, temperature=1) for seed in range(500)]
    tokens = [text(list(speculate(target, head, request, 2, rule=rule))) for request in requests]
    z = chi_square(torch.tensor(tokens), exact_law(laws[0], 3), 3).z
    assert z < 4 if declared == 1 else z > 5


def test_a_head_without_a_token_drafts_less() -> None:
    table = torch.zeros(4, 4)
    right = torch.tensor([[0.0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9], [9, 0, 0, 0]])
    broken = right.where(torch.arange(4)[:, None] != 3, torch.nan)  # knows nothing after token 3
    head: Any = MarkovHead(broken)
    steps = list(speculate(lambda ids: (right[ids], (table[ids],)), head, Request([0], 12), 2))
    assert text(steps) == [1, 2, 3, 0] * 3
    assert [step.num_drafts for step in steps] == [0, 2, 2, 0, 2, 0]


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("bad", [-torch.inf, torch.nan])
@pytest.mark.parametrize("request_", [Request([0], 9, stop=[3]), Request([0], 3)], ids=["stop", "length"])
def test_logits_after_the_end_may_be_bad(rule: Rule, bad: float, request_: Request) -> None:
    """Plain decoding never computes them, but drafts reach past the end."""
    table = torch.full((6, 6), -torch.inf)
    table[range(5), range(1, 6)] = 0
    table[3] = bad

    def target(ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        return table[ids], ()

    assert sample(target, request_) == [1, 2, 3]
    for num_drafts in range(5):
        steps = list(speculate(target, lambda tokens: range(tokens[-1] + 1, 6), request_, num_drafts, rule=rule))
        assert text(steps) == [1, 2, 3]
    with pytest.raises(ValueError, match="logits for index 2 or later hold NaN, or no value above -inf"):
        list(speculate(target, lambda tokens: range(tokens[-1] + 1, 6), Request([0], 4), 4, rule=rule))


def test_steps_are_made_when_they_are_asked_for() -> None:
    calls: list[int] = []

    def target(ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        calls.append(len(ids))
        return torch.zeros(len(ids), 4), (torch.zeros(len(ids), 2),)

    head: Any = MarkovHead(torch.zeros(4, 4))
    assert len(list(islice(speculate(target, head, Request([0, 1], 100), 2), 2))) == 2
    assert calls == [2, 5]
    assert list(speculate(target, head, Request([0], 0), 2)) == []


def test_bad_arguments() -> None:
    head: Any = MarkovHead(torch.zeros(4, 4))

    def target(ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        return torch.full((len(ids), 4), torch.nan), (torch.zeros(len(ids), 2),)

    with pytest.raises(ValueError, match="prompt of 0 tokens, num_tokens=3"):
        sample(target, Request([], 3))
    with pytest.raises(ValueError, match="num_tokens=-1"):
        next(speculate(target, head, Request([1], -1), 2))
    with pytest.raises(ValueError, match="temperature=nan"):
        sample(target, Request([1], 3, temperature=float("nan")))
    with pytest.raises(ValueError, match="num_drafts=-1 must not be negative"):
        next(speculate(target, head, Request([1], 2), -1))
    for run in (lambda: sample(target, Request([1], 3)), lambda: list(speculate(target, head, Request([1], 3), 2))):
        with pytest.raises(ValueError, match="target: the logits for index 1 or later hold NaN"):
            run()
