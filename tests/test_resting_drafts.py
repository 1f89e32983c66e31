"""A step without drafts pays nothing for the head: counted, not timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.eagle import EagleSpeculator, PolicyRows
from bateleur.runner import LLM, SamplingParams

PARTS = {"add": ("add_",), "add_rms_norm": ("add_", "rms_norm")}
"""What the head is to see of the residual stream is kept by adding elsewhere, so not in one call with the next norm."""
VIEWS = {"detach", "resolve_conj", "resolve_neg", "select", "slice", "to"}
"""Operators that move nothing; `to` is that of arrays and tensors that share memory."""
PARAMS = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in (0.0, 0.9)]


class Rests:
    """No drafts, which is said beforehand; or which only a look at the rows tells."""

    def __init__(self, says: bool) -> None:
        self.says = says

    def settled(self, num_rows: int, *, greedy: bool) -> int | None:
        return 0 if self.says else None

    def lengths(self, rows: PolicyRows) -> Any:
        return np.zeros(len(rows), np.int32)


class Counting(TorchDispatchMode):
    """Operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.by_name.update(PARTS.get(name, (name,)))
        return func(*args, **(kwargs or {}))


def steps(llm: LLM) -> list[Counter[str]]:
    """The operators of every step of two requests."""
    engine, counted = llm.engine, []
    step = engine.step

    def counting() -> None:
        with Counting() as mode:
            step()
        counted.append(mode.by_name)

    engine.step = counting  # type: ignore[method-assign]
    llm.generate(["def f(x):", "import"], PARAMS)
    del engine.step
    return counted


@pytest.mark.parametrize("says", [True, False])
def test_a_step_without_drafts_pays_nothing_for_the_head(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, says: bool
) -> None:
    plain = make_llm()  # whose states are kept as SLOTS
    resting = make_llm(draft="auto", draft_policy=Rests(says), mamba_state_policy="slots")

    def never(*_: object) -> None:
        raise AssertionError("the head was asked")

    for name in ("propose", "catch_up"):
        monkeypatch.setattr(EagleSpeculator, name, never)
    for without, rested in list(zip(steps(plain), steps(resting), strict=True))[2:]:
        assert not (rested - without).keys() - VIEWS
