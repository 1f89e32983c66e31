"""What a capture returns: addresses that stay, contents on loan."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from torch import Tensor

from bateleur.cudagraph._memory import External
from bateleur.cudagraph.checks import require_book, stage_checked
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import NotCaptured, StaleState
from bateleur.cudagraph.staged import Fuzzable, Phase, Poisonable, Producer, SignatureLike, Staged

S = TypeVar("S")


@dataclass(frozen=True, slots=True, eq=False)
class CapturedState(Generic[S]):
    """The state that one graph baked: its addresses for as long as this lives, its contents only on loan.

    The tensors of a state are views of buffers that every staging overwrites. What was captured for one key therefore
    holds the contents of whatever was staged last (vLLM #47561, #48261); `lend` stages again, `peek` refuses.

    Attributes:
        key: what it was captured for.
        addresses: the producer's address book at the capture.
        externals: memory that the graph uses and does not own; empty where the backend can't tell.
        producer: who stages; owned, and with it the buffers.
        staged: what was captured; its state is owned, its contents are not to be read from here.
    """

    key: BatchExecutionDescriptor
    addresses: Mapping[str, int]
    externals: tuple[External, ...]
    producer: Producer[S]
    staged: Staged[S]
    poison: bool = False
    """Whether buffers are spoiled before they are staged for a loan."""

    @property
    def signature(self) -> SignatureLike | None:
        """Host scalars that were baked."""
        return self.staged.signature

    @property
    def generation(self) -> int:
        """The producer's, when this was staged for its capture."""
        return self.staged.generation

    def lend(self, phase: Phase) -> Staged[S]:
        """Stage this key again, and hand it out: a new state object with its own contents at the same addresses.

        Raises:
            AddressMoved: a buffer is not where it was captured; nothing was staged, unless that is what moved it.
        """
        require_book(self.key, self.addresses, self.producer.addresses())
        staged = stage_checked(self.producer, self.key, phase, poison=self.poison)
        require_book(self.key, self.addresses, self.producer.addresses())
        return staged

    def peek(self) -> S:
        """Return the state as it was captured, while its contents are still its own.

        Raises:
            StaleState: something was staged since.
        """
        now = self.producer.generation
        if now != self.generation:
            raise StaleState(f"{self.key}: staged at generation {self.generation}, the producer is at {now}")
        return self.staged.state

    def undeclared(self, declared: Iterable[Tensor]) -> tuple[External, ...]:
        """Externals that are neither in the address book nor in the storage of a tensor of `declared`.

        Nothing promises that they stay, or that a later step writes them: a temporary made while staging is one.
        """
        spans = [(address, address + 1) for address in self.addresses.values()]
        for tensor in declared:
            storage = tensor.untyped_storage()
            spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        return tuple(
            external
            for external in self.externals
            if external.nbytes
            and not any(
                first < external.address + external.nbytes and external.address < last
                for first, last in spans
            )
        )


class CapturedStates(Mapping[BatchExecutionDescriptor, CapturedState[S]]):
    """The captured keys of a manager, live. A missing one raises `NotCaptured`, which says what is near and why."""

    def __init__(
        self,
        states: Mapping[BatchExecutionDescriptor, CapturedState[S]],
        why_missing: Callable[[BatchExecutionDescriptor], str],
    ) -> None:
        self._states = states
        self._why_missing = why_missing

    def __getitem__(self, key: BatchExecutionDescriptor) -> CapturedState[S]:
        state = self._states.get(key)
        if state is None:
            raise self.missing(key)
        return state

    def missing(self, key: BatchExecutionDescriptor) -> NotCaptured:
        """Return the error for a key that is not there."""
        return NotCaptured(f"no graph for {key}: {self._why_missing(key)}; {nearest(key, self._states)}")

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
        return require_fuzzable(self._producer).fuzz(key, seed)

    def poison(self) -> None:
        """Spoil the lender's buffers if it can."""
        if isinstance(self._producer, Poisonable):
            self._producer.poison()


def require_fuzzable(producer: Producer[S]) -> Fuzzable[S]:
    """Return `producer` as one that stages random contents, or raise `TypeError`."""
    if not isinstance(producer, Fuzzable):
        raise TypeError(f"producer {type(producer).__name__} has no fuzz(key, seed), which verify needs")
    return producer


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
