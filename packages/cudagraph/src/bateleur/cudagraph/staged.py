"""Who stages, and the proof that something was staged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from bateleur.cudagraph.descriptor import BatchExecutionDescriptor

S = TypeVar("S")


class Phase(StrEnum):
    """Why a batch is staged."""

    RUN = "run"
    WARMUP = "warmup"
    CAPTURE = "capture"


class SignatureLike(Protocol):
    """Host scalars that a captured region reads. `bateleur.metadata.Signature` is one."""

    def admits(self, runtime: Any, /) -> str | None:
        """Why a batch with `runtime` may not replay what was captured with this one; None if it may."""
        ...


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
        ...

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> Staged[S]:
        """Stage a dummy batch of exactly `key`: new contents, a new state object, the same addresses.

        In phase CAPTURE its host scalars must be the largest of any batch that may replay `key`, and in phase WARMUP
        the same: a warm-up loads the kernels that the capture launches.
        """
        ...

    def addresses(self) -> Mapping[str, int]:
        """Address book: data pointer of every buffer by name."""
        ...


@runtime_checkable
class Fuzzable(Protocol[S]):
    """A producer that can also stage random contents, for `CudaGraphManager.verify`."""

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> Staged[S]:
        """Stage random valid contents that fill `key`; the same `seed` gives the same, mutable caches included."""
        ...


@runtime_checkable
class Poisonable(Protocol):
    """A producer whose buffers can be spoiled, so that whatever staging forgets shows up."""

    def poison(self) -> None:
        """Fill every buffer with values that no body survives unnoticed."""
        ...
