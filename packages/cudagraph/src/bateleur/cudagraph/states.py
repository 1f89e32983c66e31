"""What a capture returns: the captured states by key, and a producer that borrows them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TypeVar

from bateleur.cudagraph.captured import CapturedState
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import NotCaptured
from bateleur.cudagraph.staged import Phase, Poisonable, Producer, Staged, stage_checked

R = TypeVar("R")
S = TypeVar("S")


class Records(dict[BatchExecutionDescriptor, R]):
    """What a manager has of its captured keys; one that is missing raises `NotCaptured`."""

    def __init__(self, why_missing: Callable[[BatchExecutionDescriptor], str]) -> None:
        super().__init__()
        self._why_missing = why_missing

    def __missing__(self, key: BatchExecutionDescriptor) -> R:
        raise NotCaptured(f"no graph for {key}: {self._why_missing(key)}; {nearest(key, self)}")


class CapturedStates(Mapping[BatchExecutionDescriptor, CapturedState[S]]):
    """The captured keys of a manager, live. A missing one raises `NotCaptured`, which says what is near and why."""

    def __init__(self, states: Mapping[BatchExecutionDescriptor, CapturedState[S]]) -> None:
        self._states = states

    def __getitem__(self, key: BatchExecutionDescriptor) -> CapturedState[S]:
        return self._states[key]

    def __contains__(self, key: object) -> bool:
        return key in self._states

    def __iter__(self) -> Iterator[BatchExecutionDescriptor]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"CapturedStates({'; '.join(map(str, self._states))})"


class Borrowed(Producer[S]):
    """A producer over another manager's captured states: stages through the buffers that their graphs baked.

    What a consumer captures with it reads what the lender stages for every step, so no second metadata build is
    needed before a replay: the lender's `Staged` of the step is the consumer's proof, too.

    Args:
        states: the lender's.
        keys: those that will be asked for; None means all captured so far.

    Raises `NotCaptured` for a key that the lender has not, here and not at the step that first needs it, and
    `ValueError` where there is no key, or not one producer behind all.
    """

    def __init__(
        self, states: CapturedStates[S], keys: Iterable[BatchExecutionDescriptor] | None = None
    ) -> None:
        self._states = states
        lent = [states[key] for key in (states if keys is None else keys)]
        if not lent:
            raise ValueError(
                "states, keys: nothing is captured, or no key is asked for; there must be one to borrow"
            )
        self._producer = lent[0].producer
        for state in lent:
            if state.producer is not self._producer:
                raise ValueError(f"keys: {state.key} and {lent[0].key} must have the same producer")

    @property
    def generation(self) -> int:
        """The lender's."""
        return self._producer.generation

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> Staged[S]:
        """Borrow `key` from its state."""
        return self._states[key].lend(phase)

    def addresses(self) -> Mapping[str, int]:
        """Return the lender's address book."""
        return self._producer.addresses()

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> Staged[S]:
        """Stage random contents through the lender's producer, which must be `Fuzzable` (`TypeError`)."""
        return stage_checked(self._producer, key, Phase.RUN, poison=False, seed=seed)

    def poison(self) -> None:
        """Spoil the lender's buffers if it can."""
        if isinstance(self._producer, Poisonable):
            self._producer.poison()


def nearest(key: BatchExecutionDescriptor, keys: Iterable[BatchExecutionDescriptor]) -> str:
    """Name the neighbours of `key` in sort order, each with the fields in which it differs."""
    if not isinstance(key, BatchExecutionDescriptor):
        return "keys are BatchExecutionDescriptor objects"
    others = sorted(keys)
    at = bisect_left(others, key)
    around = others[max(at - 1, 0) : at + 1]
    if not around:
        return "nothing is captured"
    return "nearest: " + "; ".join(f"{other} ({_difference(key, other)})" for other in around)


def _difference(key: BatchExecutionDescriptor, other: BatchExecutionDescriptor) -> str:
    pairs = ((f.name, getattr(key, f.name), getattr(other, f.name)) for f in fields(key))
    return ", ".join(f"{name} {theirs} instead of {ours}" for name, ours, theirs in pairs if ours != theirs)
