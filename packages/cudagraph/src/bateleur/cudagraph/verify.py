"""Verification: compares a replay with an eager run of the same function on the same staged batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias

import torch
from torch import Tensor

from bateleur.cudagraph._trees import named_tensors
from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.execution import S


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    """Result of the verification of one key.

    Attributes:
        max_difference: largest absolute difference over all tensors and seeds. inf if only one of two
            compared elements is NaN, or if the names, shapes or dtypes of the tensors differ.
        failure: names the first tensor out of tolerance, and its seed. None if all are within tolerance.
        part: name of the manager, in a report about several managers of an engine. Empty otherwise.
    """

    key: BatchExecutionDescriptor
    max_difference: float
    failure: str | None = None
    part: str = ""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Results of `CudaGraphManager.verify`, one per key, large keys first."""

    comparisons: tuple[ReplayComparison, ...]

    @property
    def ok(self) -> bool:
        """Whether every replay equals its eager run, within tolerance."""
        return not self.failing

    @property
    def failing(self) -> tuple[ReplayComparison, ...]:
        """The results of keys that are out of tolerance."""
        return tuple(comparison for comparison in self.comparisons if comparison.failure is not None)

    @classmethod
    def join(cls, parts: Mapping[str, VerifyReport]) -> VerifyReport:
        """Join the reports of several managers, by the name of each manager."""
        return cls(tuple(replace(each, part=part) for part, report in parts.items() for each in report.comparisons))

    def table(self) -> str:
        """Return one line of text per key."""
        lines = [f"{'largest difference':>18}  {'':<6}  key"]
        for comparison in self.comparisons:
            mark, tail = ("ok", "") if comparison.failure is None else ("FAILED", f": {comparison.failure}")
            name = f"{comparison.part}: {comparison.key}" if comparison.part else str(comparison.key)
            lines.append(f"{comparison.max_difference:>18.3g}  {mark:<6}  {name}{tail}")
        return "\n".join(lines)


ExtraTensors: TypeAlias = Mapping[str, Tensor] | Callable[[S], Mapping[str, Tensor]]
"""Tensors to compare besides the output, by name, or a function that returns them for a staged state."""

RunSeed = Callable[[int], Mapping[str, Tensor]]
"""Runs the batch of a seed, and returns copies of all tensors to compare, by name."""


def copy_tensors(output: object, extra_tensors: ExtraTensors[S], state: S) -> dict[str, Tensor]:
    """Return copies, by name, of the output tensors of a captured function and of `extra_tensors`. If the latter is a
    function, it is called with `state`.
    """
    extra = extra_tensors(state) if callable(extra_tensors) else extra_tensors
    return {name: tensor.clone() for name, tensor in (*named_tensors(output, "output"), *extra.items())}


def compare_runs(
    key: BatchExecutionDescriptor, eager: RunSeed, replay: RunSeed, num_seeds: int, rtol: float | None, atol: float
) -> ReplayComparison:
    """Run the random batch of each seed 0 .. `num_seeds` - 1 by `eager` and by `replay`, and compare the results.

    eager, replay: run the batch of a seed, and return copies of the tensors to compare, by name.
    rtol, atol: see `CudaGraphManager.verify`.
    """
    largest, failure = 0.0, None
    for seed in range(num_seeds):
        expected, actual = eager(seed), replay(seed)
        if expected.keys() != actual.keys():
            unmatched = min(expected.keys() ^ actual.keys())
            largest, failure = inf, failure or f"seed {seed}: only one of the outputs has {unmatched}"
            continue
        coarsest = max((rounding_tolerance(tensor.dtype) for tensor in expected.values()), default=0.0)
        for name, tensor in expected.items():
            tolerance = coarsest if rtol is None else rtol
            difference, within = compare_tensors(tensor, actual[name], tolerance, atol)
            largest = max(largest, difference)
            if not within and failure is None:
                failure = f"seed {seed}: {name} differs by {difference:.3g}"
    return ReplayComparison(key, largest, failure)


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference that reordering a few sums may cause, close to the default of `torch.testing`."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return (2 if dtype.itemsize <= 2 else 11) * torch.finfo(dtype).eps


def compare_tensors(expected: Tensor, actual: Tensor, rtol: float, atol: float) -> tuple[float, bool]:
    """Return the largest absolute difference, and whether all are within `atol` + `rtol` * the largest element of the
    row (the last dimension) of `expected`: the rounding of a sum depends on its largest terms.

    Integers must be equal. NaN equals NaN, because padding may hold it. (inf, False) if shapes or dtypes differ.
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
    difference = (expected - actual).abs().nan_to_num(nan=inf, posinf=inf).masked_fill(same, 0.0)
    largest = expected.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1 if expected.dim() else (), keepdim=True)
    within = difference.isfinite() & (difference <= atol + rtol * largest)
    return float(difference.max()), bool(within.all())
