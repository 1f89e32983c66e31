"""The proof that a replay is the eager run: the same contents staged twice, both results compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias

import torch
from torch import Tensor

from bateleur.cudagraph._trees import tensors
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.execution import S


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out for one key.

    max_difference: largest absolute difference of an element over all of them; inf where one is NaN and the other not.
    failure: the first tensor out of tolerance, with its seed; None if all are within.
    part: which graphs of an engine these are, where those of several managers are told together.
    """

    key: BatchExecutionDescriptor
    max_difference: float
    failure: str | None = None
    part: str = ""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Comparisons in the order of the runs: large keys before small."""

    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """Whether every replay equals its eager run."""
        return not self.failing

    @property
    def failing(self) -> tuple[Comparison, ...]:
        """The keys that don't."""
        return tuple(comparison for comparison in self.comparisons if comparison.failure is not None)

    @classmethod
    def join(cls, parts: Mapping[str, VerifyReport]) -> VerifyReport:
        """The comparisons of several managers, by the name of what their graphs are."""
        return cls(
            tuple(replace(each, part=part) for part, report in parts.items() for each in report.comparisons)
        )

    def table(self) -> str:
        """Return a line per key as text."""
        lines = [f"{'largest difference':>18}  {'':<6}  key"]
        for comparison in self.comparisons:
            mark, tail = ("ok", "") if comparison.failure is None else ("FAILED", f": {comparison.failure}")
            name = f"{comparison.part}: {comparison.key}" if comparison.part else str(comparison.key)
            lines.append(f"{comparison.max_difference:>18.3g}  {mark:<6}  {name}{tail}")
        return "\n".join(lines)


Also: TypeAlias = Mapping[str, Tensor] | Callable[[S], Mapping[str, Tensor]]
"""What is compared besides an output: tensors by name, or a function from the staged state to them."""

Run = Callable[[int], Mapping[str, Tensor]]
"""From a seed to copies of everything that is compared, by name."""


def copies(tree: object, also: Also[S], state: S) -> dict[str, Tensor]:
    """Copy the tensors of an output, and the others that are compared with it."""
    others = also(state) if callable(also) else also
    return {name: tensor.clone() for name, tensor in (*tensors(tree, "output"), *others.items())}


def judge(
    key: BatchExecutionDescriptor, eager: Run, replay: Run, num_seeds: int, rtol: float | None, atol: float
) -> Comparison:
    """Compare both runs for seeds 0 .. num_seeds - 1."""
    largest, failure = 0.0, None
    for seed in range(num_seeds):
        expected, actual = eager(seed), replay(seed)
        if expected.keys() != actual.keys():
            odd = sorted(expected.keys() ^ actual.keys())[0]
            largest, failure = inf, failure or f"seed {seed}: only one of the outputs has {odd}"
            continue
        coarsest = max((rounding(tensor.dtype) for tensor in expected.values()), default=0.0)
        for name, tensor in expected.items():
            tolerance = coarsest if rtol is None else rtol
            difference, within = compare(tensor, actual[name], tolerance, atol)
            largest = max(largest, difference)
            if not within and failure is None:
                failure = f"seed {seed}: {name} differs by {difference:.3g}"
    return Comparison(key, largest, failure)


def rounding(dtype: torch.dtype) -> float:
    """Relative difference that the order of a few sums makes; torch's own tests allow for as much."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return (2 if dtype.itemsize <= 2 else 11) * torch.finfo(dtype).eps


def compare(expected: Tensor, actual: Tensor, rtol: float, atol: float) -> tuple[float, bool]:
    """Largest absolute difference, and whether all are within `atol` plus `rtol` times the largest of their row.

    An element is a sum of large and small ones, so what it is rounded to depends on the large ones of its row (the
    last dimension). Integers must be equal. NaN equals NaN: rows of padding may hold it.
    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return inf, False
    inexact = expected.is_floating_point() or expected.is_complex()
    if inexact:
        wide = torch.complex128 if expected.is_complex() else torch.float64
        expected, actual = expected.to(wide), actual.to(wide)
    same = (expected == actual) | (expected.isnan() & actual.isnan())
    if bool(same.all()):
        return 0.0, True
    if not inexact:
        return float((expected.double() - actual.double()).abs().max()), False
    apart = (expected - actual).abs().nan_to_num(nan=inf, posinf=inf).masked_fill(same, 0.0)
    largest = expected.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1 if expected.dim() else (), keepdim=True)
    within = apart.isfinite() & (apart <= atol + rtol * largest)
    return float(apart.max()), bool(within.all())
