"""Who stages, and the proof that something was staged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, runtime_checkable

from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import KeyMismatch, StaleState
from bateleur.cudagraph.execution import S


class Phase(StrEnum):
    """Why a batch is staged."""

    RUN = "run"
    WARMUP = "warmup"
    CAPTURE = "capture"


class SignatureLike(Protocol):
    """Host scalars that a captured region reads. `bateleur.metadata.Signature` is one."""

    def admits(self, runtime: Any, /) -> str | None:
        """Why a batch with `runtime` may not replay what was captured with this one; None if it may."""


@dataclass(frozen=True, slots=True)
class Staged(Generic[S]):
    """Proof that `state` was staged for `key`, and when.

    Attributes:
        key: what the buffers were padded for; None for a step that runs eagerly.
        state: what the body reads; its tensors are views of the producer's buffers.
        generation: the producer's, right after staging.
        signature: host scalars of the state, None where a captured region reads none.
    """

    key: BatchExecutionDescriptor | None
    state: S
    generation: int
    signature: SignatureLike | None = None


class Producer(Protocol[S]):
    """Stages batches into buffers at fixed addresses."""

    @property
    def generation(self) -> int:
        """Number of stagings so far: what was staged at an earlier one has been overwritten."""

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> Staged[S]:
        """Stage a dummy batch of exactly `key`: new contents, a new state object, the same addresses.

        In phase CAPTURE its host scalars must be the largest of any batch that may replay `key`, and in phase WARMUP
        the same: a warm-up loads the kernels that the capture launches.
        """

    def addresses(self) -> Mapping[str, int]:
        """Address book: data pointer of every buffer by name."""


@runtime_checkable
class Fuzzable(Protocol[S]):
    """A producer that can also stage random contents, for `CudaGraphManager.verify`."""

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> Staged[S]:
        """Stage random valid contents that fill `key`; the same `seed` gives the same, mutable caches included."""


@runtime_checkable
class Poisonable(Protocol):
    """A producer whose buffers can be spoiled, so that whatever staging forgets shows up."""

    def poison(self) -> None:
        """Fill every buffer with values that no body survives unnoticed."""


def check_current(producer: Producer[S], key: BatchExecutionDescriptor, staged: Staged[S]) -> None:
    """Prove that `staged` is for `key`, and that `producer` has staged nothing since."""
    if staged.key is not key and staged.key != key:
        offered = "no graph (an eager step)" if staged.key is None else str(staged.key)
        raise KeyMismatch(f"{key}: the batch was staged for {offered}")
    generation = producer.generation
    if staged.generation != generation:
        raise StaleState(
            f"{key}: staged at generation {staged.generation}, but the producer is at {generation}: "
            "the buffers hold another batch"
        )


def stage_checked(
    producer: Producer[S],
    key: BatchExecutionDescriptor,
    phase: Phase,
    *,
    poison: bool,
    seed: int | None = None,
) -> Staged[S]:
    """Stage a dummy batch, with `seed` a random one, and hold the producer to its contract.

    poison: spoil the buffers before, if that is possible. Raises `TypeError` for a seed and no `fuzz`.
    """
    if poison and isinstance(producer, Poisonable):
        producer.poison()
    if seed is None:
        staged = producer.stage(key, phase)
    elif isinstance(producer, Fuzzable):
        staged = producer.fuzz(key, seed)
    else:
        raise TypeError(f"producer {type(producer).__name__} has no fuzz(key, seed), which verify needs")
    check_current(producer, key, staged)
    return staged
