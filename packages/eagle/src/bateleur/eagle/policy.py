"""Draft policies: decide on the host, before a step, how many drafts of each request it verifies.

Everything is numpy on the host. Legend for shapes: R rows (requests), K draft tokens at most.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, final, runtime_checkable

import numpy as np
import numpy.typing as npt

from bateleur.eagle.stats import FloatArray, IntArray

I32Array: TypeAlias = npt.NDArray[np.int32]
Cost: TypeAlias = Callable[[IntArray], FloatArray]
"""Cost of steps of so many tokens, in any unit: maps (n,) integers to (n,) positive numbers."""


@dataclass(frozen=True, slots=True)
class PolicyRows:
    """Requests of the next step that may get drafts.

    rows: (R,) integer, rows of the engine's request table, all different.
    max_drafts: (R,) integer in 0..K, most drafts of the request: less than K near the end of its request or of the
        drafter's positions.
    acceptance: (R, K) float64 in [0, 1], probability that draft i is accepted if all before it are.
    num_other_tokens: tokens of other requests in the same step, such as chunks of prompts.
    greedy: whether drafts need no noise, because all requests are greedy or the drafter does not sample.
    """

    rows: IntArray
    max_drafts: IntArray
    acceptance: FloatArray
    num_other_tokens: int = 0
    greedy: bool = False

    def __post_init__(self) -> None:
        if self.acceptance.ndim != 2 or not len(self.rows) == len(self.max_drafts) == len(self.acceptance):
            raise ValueError(
                f"rows {self.rows.shape}, max_drafts {self.max_drafts.shape} and acceptance {self.acceptance.shape} "
                "must be (R,), (R,) and (R, K)"
            )
        if not _within(self.max_drafts, self.acceptance.shape[1]):
            raise ValueError(f"max_drafts={self.max_drafts.tolist()} must be in 0..{self.acceptance.shape[1]}")
        if not _within(self.acceptance, 1):
            raise ValueError("acceptance must be in [0, 1] everywhere")

    def __len__(self) -> int:
        return len(self.rows)


class DraftPolicy(Protocol):
    """Decides draft lengths. An engine calls it once for every step; it may keep state.

    A policy with the attribute `reads_acceptance = False` gets zeros as `PolicyRows.acceptance`, which is then not
    computed.
    """

    def lengths(self, rows: PolicyRows) -> I32Array:
        """Return the number of drafts of each request, (R,) int32, at most its `max_drafts`."""


@runtime_checkable
class UniformPolicy(DraftPolicy, Protocol):
    """A policy that often gives all requests the same number of drafts, so that it is worth capturing graphs for it."""

    def draft_counts(self, max_drafts: int) -> Collection[int]:
        """Return each number of drafts that the policy may give to every request of a step, capped at `max_drafts`."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Sizes and time of one step.

    num_rows: requests that decode. num_drafts: drafts that the policy had asked for, summed over these requests.
    num_tokens: tokens that they emitted. num_other_tokens: tokens of other requests, such as chunks of prompts.
    greedy: whether drafts need no noise, because all requests are greedy or the drafter does not sample.
    """

    num_rows: int
    num_drafts: int
    num_tokens: int
    seconds: float
    num_other_tokens: int = 0
    greedy: bool = False


@runtime_checkable
class ObservingPolicy(DraftPolicy, Protocol):
    """A policy that gets the time of every step. Lengths may depend on it, because verification is lossless for any
    length: same tokens under `Rule.COUPLED`, same distribution under `Rule.RATIO` and `Rule.BLOCK`.
    """

    def observe(self, step: StepTime) -> None:
        """Record a step that has ended. With async scheduling the call comes after `lengths` of the next step."""


@final
@dataclass(frozen=True, slots=True)
class FixedDrafts:
    """Draft policy: the same number of drafts for every request."""

    num_drafts: int
    reads_acceptance: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_drafts < 0:
            raise ValueError(f"num_drafts={self.num_drafts} must not be negative")

    def lengths(self, rows: PolicyRows) -> I32Array:
        """Return the number of drafts of each request, (R,) int32: `num_drafts`, at most its `max_drafts`."""
        return _capped(self.num_drafts, rows)

    def draft_counts(self, max_drafts: int) -> Collection[int]:
        """Return the only possible number of drafts a request: `num_drafts`, capped at `max_drafts`."""
        return (min(self.num_drafts, max_drafts),)


@final
@dataclass(frozen=True, slots=True)
class ByBatchSize:
    """Draft policy by the number of requests: `{1: 4, 8: 2, 32: 0}` gives 2 drafts from 8 requests on, 0 from 32."""

    num_drafts: Mapping[int, int]
    reads_acceptance: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if 1 not in self.num_drafts or min(self.num_drafts) < 1 or min(self.num_drafts.values()) < 0:
            raise ValueError(
                f"num_drafts={dict(self.num_drafts)} must give a number of drafts >= 0 for 1 row, and for larger "
                "batches only"
            )

    def lengths(self, rows: PolicyRows) -> I32Array:
        """Return the number of drafts of each request, (R,) int32: the mapping's value for R, at most `max_drafts`."""
        size = max((size for size in self.num_drafts if size <= len(rows)), default=1)
        return _capped(self.num_drafts[size], rows)

    def draft_counts(self, max_drafts: int) -> Collection[int]:
        """Return the possible numbers of drafts a request: those of the mapping, capped at `max_drafts`."""
        return [min(number, max_drafts) for number in self.num_drafts.values()]


class StepCost:
    """Cost of a step from measured times: that of the next larger measured size, because graphs are padded.

    Beyond the last size the cost per token is constant.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """sizes: increasing step sizes in tokens. seconds: time of each, which must not decrease.

        Raises `ValueError` for decreasing times: they are noise, and a policy would prefer the larger size.
        """
        self.sizes, self.seconds = np.array(sizes, np.int64), np.array(seconds, np.float64)
        if self.sizes.ndim != 1 or not len(self.sizes) or self.sizes.shape != self.seconds.shape:
            raise ValueError(f"sizes {list(sizes)} and seconds {list(seconds)} must be as many, and at least one")
        if self.sizes[0] < 1 or np.any(np.diff(self.sizes) < 1):
            raise ValueError(f"sizes={list(sizes)} must increase from 1 or more")
        if not self.seconds[0] > 0 or not np.all(np.diff(self.seconds) >= 0):
            raise ValueError(f"seconds={list(seconds)} must be above 0 and must not decrease")

    def __call__(self, num_tokens: IntArray) -> FloatArray:
        """Return the time in seconds, (n,) float64, of steps of `num_tokens` (n,) tokens."""
        index = np.searchsorted(self.sizes, num_tokens).clip(max=len(self.sizes) - 1)
        beyond = np.maximum(num_tokens / self.sizes[-1], 1.0)
        return np.asarray(self.seconds[index] * beyond)


class BySurvival:
    """Draft policy: the lengths with the most expected emitted tokens per cost of the step.

    Draft i is accepted with probability s_i, the product of the acceptance probabilities up to it, so a request emits
    1 + s_1 + s_2 + ... tokens. One sort of all s gives the best lengths for every number of drafts of the step, and the
    best number is chosen: 0 in a large batch, in which a token costs more than any draft gains.

    Every `probe_every` steps a request gets one draft more than is best, so that a low estimate can be corrected. At
    most an eighth of the requests get it in a step; with `uniform` all of them.
    """

    def __init__(
        self, cost: Cost, *, draft_cost: float = 0.0, uniform: bool = False, probe_every: int | None = 64
    ) -> None:
        """cost: function from a number of tokens to the cost of a target step of that size.
        draft_cost: cost of one draft pass, in the unit of `cost`. A step has as many passes as its longest draft has
            tokens. 0 if the drafter always makes the maximum number of drafts.
        uniform: all requests get the same number (at most their `max_drafts`), and the step is padded to it: for graphs
            with a uniform query length.
        probe_every: number of steps between probes of a request; None for never.
        """
        if draft_cost < 0:
            raise ValueError(f"draft_cost={draft_cost} must not be negative")
        if probe_every is not None and probe_every < 1:
            raise ValueError(f"probe_every={probe_every} must be at least 1, or None")
        self._cost, self._draft_cost = cost, draft_cost
        self._uniform, self._probe_every = uniform, probe_every
        self._idle = np.zeros(0, np.int64)  # steps since the last probe, by row of the request table

    def lengths(self, rows: PolicyRows) -> I32Array:
        """Return the number of drafts a request, (R,) int32, with the most expected tokens per cost of a step."""
        if not len(rows) or not rows.acceptance.shape[1]:
            return _capped(0, rows)
        survival_RK = rows.acceptance.cumprod(1)
        allowed_RK = np.arange(survival_RK.shape[1]) < np.asarray(rows.max_drafts)[:, None]
        choose = self._same if self._uniform else self._each
        lengths = choose(survival_RK, allowed_RK, rows.num_other_tokens).astype(np.int32)
        return lengths if self._probe_every is None else self._probed(lengths, rows, self._probe_every)

    def _each(self, survival_RK: FloatArray, allowed_RK: npt.NDArray[np.bool_], others: int) -> IntArray:
        num_rows, k = survival_RK.shape
        # Position-major: among equals the earlier position comes first, so the chosen drafts of a row are a prefix.
        flat = np.where(allowed_RK, survival_RK, -1.0).T.ravel()
        order = np.argsort(-flat, kind="stable")[: int(allowed_RK.sum())]
        position, gain = order // num_rows, flat[order]
        best, best_rate = order[:0], num_rows / float(self._cost(np.array([num_rows + others]))[0])
        # Without a cost of draft passes the longest row needs no limit.
        for longest in range(1, k + 1) if self._draft_cost else (k,):
            taken = np.flatnonzero(position < longest)
            tokens = num_rows + others + 1 + np.arange(len(taken))
            cost = self._cost(tokens) + self._draft_cost * longest
            rates = (num_rows + gain[taken].cumsum()) / cost
            if len(taken) and rates.max() > best_rate:
                best, best_rate = order[taken[: int(rates.argmax()) + 1]], float(rates.max())
        return np.bincount(best % num_rows, minlength=num_rows)

    def _same(self, survival_RK: FloatArray, allowed_RK: npt.NDArray[np.bool_], others: int) -> IntArray:
        num_rows, k = survival_RK.shape
        drafts = np.arange(k + 1)
        gain = np.concatenate([[0.0], (survival_RK * allowed_RK).sum(0).cumsum()])
        cost = self._cost(num_rows * (1 + drafts) + others) + self._draft_cost * drafts
        shortest_best = int(((num_rows + gain) / cost).argmax())
        return np.asarray(np.minimum(shortest_best, allowed_RK.sum(1)))

    def _probed(self, lengths: I32Array, rows: PolicyRows, probe_every: int) -> I32Array:
        missing = int(rows.rows.max()) + 1 - len(self._idle)
        if missing > 0:
            self._idle = np.concatenate([self._idle, np.zeros(missing, np.int64)])
        more = lengths < rows.max_drafts
        idle = np.where(more, self._idle[rows.rows] + 1, 0)
        due = idle >= probe_every
        if due.any():
            chosen = np.flatnonzero(more)  # a uniform step is padded to it anyway
            if not self._uniform:
                chosen = np.argsort(-idle, kind="stable")[: min(int(due.sum()), -(-len(rows) // 8))]
            lengths[chosen] += 1
            idle[chosen] = 0
        self._idle[rows.rows] = idle
        return lengths


def _capped(num_drafts: int, rows: PolicyRows) -> I32Array:
    return np.minimum(num_drafts, rows.max_drafts).astype(np.int32)


def _within(values: IntArray | FloatArray, upper: int) -> bool:
    return bool(values.min(initial=0) >= 0 and values.max(initial=0) <= upper)
