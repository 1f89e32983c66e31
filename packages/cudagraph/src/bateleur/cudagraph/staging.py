"""`Producer` stages batches into buffers at fixed addresses. `StagedBatch` shows which batch the buffers hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, runtime_checkable

from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import KeyMismatch, StaleState
from bateleur.cudagraph.execution import S


class Phase(StrEnum):
    """Why a batch is staged: to run a step, to warm up a graph key, or to capture it."""

    RUN = "run"
    WARMUP = "warmup"
    CAPTURE = "capture"


class SignatureLike(Protocol):
    """The host scalars that a captured function reads, such as `bateleur.metadata.Signature`."""

    def admits(self, runtime: Any, /) -> str | None:
        """Return why a graph with these host scalars cannot run a batch with those of `runtime`. None if it can."""


@dataclass(frozen=True, slots=True)
class StagedBatch(Generic[S]):
    """A batch that was written into a producer's buffers. A replay needs it as evidence that they hold this batch.

    Attributes:
        key: the graph that the batch was padded for. None if the step runs eagerly.
        state: the argument that the captured function reads. Its tensors are views of the producer's buffers.
        generation: `Producer.generation` after this staging.
        signature: the host scalars of the state. None if the function reads none.
    """

    key: BatchExecutionDescriptor | None
    state: S
    generation: int
    signature: SignatureLike | None = None


class Producer(Protocol[S]):
    """Stages batches: writes them into buffers at fixed addresses."""

    @property
    def generation(self) -> int:
        """Number of stagings so far. Each staging overwrites the batch of the one before."""

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> StagedBatch[S]:
        """Stage a dummy batch of the full sizes of `key`: a new state object with new contents at the same addresses.

        In phase CAPTURE, the host scalars must be the largest of all batches that may replay `key`. Phase WARMUP must
        use the same host scalars, so that the warm-up loads every kernel that the capture launches.
        """

    def addresses(self) -> Mapping[str, int]:
        """Return the data pointer of every buffer, by name."""


@runtime_checkable
class Fuzzable(Protocol[S]):
    """A `Producer` that can also stage random batches. `CudaGraphManager.verify` needs it."""

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> StagedBatch[S]:
        """Stage a random valid batch of the full sizes of `key`. A `seed` gives the same contents each time, also in
        caches that the captured function writes.
        """


@runtime_checkable
class Poisonable(Protocol):
    """A `Producer` that can fill its buffers with invalid values, to show entries that staging does not write."""

    def poison(self) -> None:
        """Fill every buffer with NaN, or with integers that are out of range."""


def check_current(producer: Producer[S], key: BatchExecutionDescriptor, staged: StagedBatch[S]) -> None:
    """Raise `KeyMismatch` unless `staged` is for `key`, `StaleState` if `producer` staged another batch after it."""
    if staged.key != key:
        other = "no graph (an eager step)" if staged.key is None else str(staged.key)
        raise KeyMismatch(f"{key}: the batch was staged for {other}; stage it for the key to replay")
    if staged.generation != producer.generation:
        raise StaleState(
            f"{key}: staged at generation {staged.generation}, but the producer is at {producer.generation}: "
            "the buffers hold another batch; stage this batch again"
        )


def stage_batch(
    producer: Producer[S], key: BatchExecutionDescriptor, phase: Phase, *, poison: bool, seed: int | None = None
) -> StagedBatch[S]:
    """Stage a dummy batch for `key`, or the random batch of a `seed`, and check the key and generation of the result.

    poison: whether to fill the buffers with invalid values before, if the producer is `Poisonable`.
    """
    if poison and isinstance(producer, Poisonable):
        producer.poison()
    if seed is None:
        staged = producer.stage(key, phase)
    elif isinstance(producer, Fuzzable):
        staged = producer.fuzz(key, seed)
    else:
        raise TypeError(f"producer {type(producer).__name__} has no method fuzz(key, seed); verify needs it")
    check_current(producer, key, staged)
    return staged
