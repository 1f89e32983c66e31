"""Steps that end in one call of C emit what the operators emit that specify it, and take these where they must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bateleur.eagle import SteadyRows
from bateleur.metadata.native import missing
from bateleur.runner import LLM, SamplingParams

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no kernels in C: {missing()}")
PROMPTS = ["def:fibonacci(n):", "import_os;def:walk(path):", "x", "class:Stack:def:__init__(self", "return"]
DRAWN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 7, "min_p": 0.02},
    {"temperature": 0.0, "min_tokens": 9},
]


def ended(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, *, in_c: bool, **more: Any
) -> tuple[list[Any], Counter[int]]:
    """What requests got, and how many steps ended in C, by the drafts of the longest row."""
    verifier, steps, verify = llm.engine._verifier, Counter[int](), SteadyRows.verify
    monkeypatch.setattr(verifier, "_one_call", verifier._one_call and in_c)

    def count(rows: SteadyRows, logits: Any, positions: Any) -> Any:
        found = verify(rows, logits, positions)
        steps[len(logits) - rows._shape[0]] += found is not None
        return found

    monkeypatch.setattr(SteadyRows, "verify", count)
    wanted = [
        SamplingParams(**(each | more), seed=i, max_tokens=10 + 7 * i, ignore_eos=True)
        for i, each in enumerate(DRAWN)
    ]
    found = llm.generate(PROMPTS, wanted)
    monkeypatch.undo()
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found], steps


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"max_num_batched_tokens": 16}])
def test_requests_get_what_they_get_by_operators(
    make_llm: Callable[..., LLM],
    tiny_hybrid: Path,
    tiny_head: Path,
    monkeypatch: pytest.MonkeyPatch,
    check_integrity: Callable[[Any], None],
    options: dict[str, Any],
) -> None:
    """With drafts, and in steps without any; prompts in parts, and rows that wait for a place among them."""
    settings = {"model": tiny_hybrid, "max_model_len": 64, "max_num_seqs": 3} | options
    llm = make_llm(draft=tiny_head, num_speculative_tokens=4, draft_least_chance=0, **settings)
    expected, none = ended(llm, monkeypatch, in_c=False)
    tokens, steps = ended(llm, monkeypatch, in_c=True)
    assert tokens == expected
    assert not none
    assert sum(steps.values()) > 5
    assert max(steps) >= 8
    check_integrity(llm.engine)


def test_without_drafter_they_do_too(
    make_llm: Callable[..., LLM], tiny_hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that draw, beside prompts."""
    llm = make_llm(model=tiny_hybrid, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=16)
    expected, none = ended(llm, monkeypatch, in_c=False)
    tokens, steps = ended(llm, monkeypatch, in_c=True)
    assert tokens == expected
    assert not none
    assert steps[0] > 20


def test_rows_with_rules_take_operators(
    make_llm: Callable[..., LLM], tiny_hybrid: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties and log probabilities are no business of that call."""
    llm = make_llm(
        model=tiny_hybrid, draft=tiny_head, num_speculative_tokens=4, max_model_len=64, max_num_seqs=5
    )
    for rules in ({"repetition_penalty": 1.2}, {"logprobs": 2}):
        tokens, steps = ended(llm, monkeypatch, in_c=True, **rules)
        assert not steps
        assert (tokens[0][1] is None) is ("logprobs" not in rules)
