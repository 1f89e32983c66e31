"""The README examples run, and fail when they are broken."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bateleur.mamba.conformance import ConformanceError

EQUAL = "[0, 18, 7, 15] True\n"


def example(number: int = 0) -> str:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", readme, re.S)
    return (first, second)[number]


def test_example_runs(capsys):
    names: dict[str, Any] = {}
    exec(example(), names)
    assert capsys.readouterr().out == EQUAL
    # The hit is one page in two rows, and holds the state after 8 tokens still: that of either run.
    run, plain = names["run"], names["plain"]
    assert run.table[3, 0] == run.table[1, 0] == 1
    pages = [cache.pages.layer(0) for cache in (run.cache, plain.cache)]
    for conv_or_ssm, of_plain in zip(*pages, strict=True):
        torch.testing.assert_close(conv_or_ssm[1], of_plain[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("run.table[3, 0] = run.table[1, 0]", "run.table[3, 0] = run.table[1, 1]"),  # another page
        ("step.commit(accepted)", "step.commit(lens)"),  # what was rejected is kept
    ],
)
def test_the_example_can_fail(capsys, right, wrong):
    assert right in example()
    exec(example().replace(right, wrong), {})
    assert capsys.readouterr().out.endswith("False\n")


def test_a_hit_that_was_not_admitted_is_refused():
    unsaid = example().replace("run.cache.admit([3], [8])", "run.cache.admit([3])")
    with pytest.raises(ValueError, match="computed is 8 in prefill row 0; its request has 0 tokens"):
        exec(unsaid, {})


def run_as_module(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dataclasses look for the module that they are in."""
    module = ModuleType("own_recurrence")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(source, vars(module))


def test_a_recurrence_of_a_users_own_conforms(capsys, monkeypatch):
    assert len(example(1).splitlines()) <= 60
    run_as_module(example(1), monkeypatch)
    assert capsys.readouterr().out.startswith("RecurrenceReport(calls={'scan': 7, 'update': 6, 'replay': ")


@pytest.mark.parametrize(
    ("part", "right", "wrong"),
    [
        ("scan", "chunk_start_loc[1:] - 1", "chunk_start_loc[:-1]"),
        ("update", "at < len(x), write", "at < 0, write"),
        ("replay", "(start + j) %", "(start + j + 1) %"),
        ("fold", "at.ring_start, at.counts", "at.ring_start, at.counts + 1"),
    ],
)
def test_the_recurrence_of_ones_own_can_fail(part, right, wrong, monkeypatch):
    assert right in example(1)
    with pytest.raises(ConformanceError) as error:
        run_as_module(example(1).replace(right, wrong), monkeypatch)
    assert error.value.violations[0].letter == part
