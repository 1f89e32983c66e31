"""What a capture returns: addresses that stay, contents on loan, and what proves that a batch may replay it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Generic, TypeAlias, TypeVar

from torch import Tensor

from bateleur.cudagraph._memory import External
from bateleur.cudagraph._trees import tensors
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import AddressMoved, NotCaptured, SignatureMismatch
from bateleur.cudagraph.execution import S
from bateleur.cudagraph.modes import CudaGraphMode
from bateleur.cudagraph.staged import Phase, Poisonable, Producer, Staged, check_current, stage_checked

R = TypeVar("R")


class Checks(IntEnum):
    """What is proved before a replay; each level has those below it."""

    OFF = 0
    """Nothing: for measuring what the others cost."""
    CHEAP = 1
    """On the host: the batch was staged for this key, it is the latest, and its host scalars are admitted."""
    ADDRESSES = 2
    """Every declared buffer is where it was, and no memory that the graph uses was freed."""
    PARANOID = 3
    """The tensors of the batch are those that were captured. And spoil whatever must not be read: buffers before they
    are staged, outputs of all graphs before a replay."""


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
        poison: whether buffers are spoiled before they are staged for a loan.
    """

    key: BatchExecutionDescriptor
    addresses: Mapping[str, int]
    externals: tuple[External, ...]
    producer: Producer[S]
    staged: Staged[S]
    poison: bool = False

    def lend(self, phase: Phase) -> Staged[S]:
        """Stage this key again, and hand it out: a new state object with its own contents at the same addresses.

        Raises:
            AddressMoved: a buffer is not where it was captured; nothing was staged, unless that is what moved it.
        """
        self.check_addresses()
        staged = stage_checked(self.producer, self.key, phase, poison=self.poison)
        self.check_addresses()
        return staged

    def peek(self) -> S:
        """Return the state as it was captured, while its contents are still its own.

        Raises:
            StaleState: something was staged since.
        """
        check_current(self.producer, self.key, self.staged)
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

    def check_staged(self, staged: Staged[S]) -> None:
        """Prove that `staged` is of this key and the latest, and that its host scalars are admitted."""
        check_current(self.producer, self.key, staged)
        offence = _offence(self.staged, staged)
        if offence is not None:
            raise SignatureMismatch(f"{self.key}: {offence}")

    def check_addresses(self, staged: Staged[S] | None = None) -> None:
        """Prove that no buffer has moved since the capture; new ones may have come."""
        now = self.producer.addresses()
        if now == self.addresses:
            return
        for name, address in self.addresses.items():
            at = now.get(name)
            if at != address:
                where = "is gone" if at is None else f"is at {at:#x}"
                raise AddressMoved(f"{self.key}: buffer {name} was captured at {address:#x} and {where} now")

    def check_tensors(self, staged: Staged[S]) -> None:
        """Prove that the batch's tensors are those that the graph reads, so that it reads this batch.

        What was made anew for the step, or staged by another producer, lies elsewhere. Looked at are tensors in memory
        that the graph was seen to use, and those of a FULL key on a device, where a kernel may use them unseen. Eager
        parts may view the same memory otherwise in every step, or not at all: for a PIECEWISE key only the memory
        counts.
        """
        full = self.key.mode is CudaGraphMode.FULL
        place = _place if full else _memory
        used = {external.address for external in self.externals}
        now = dict(tensors(staged.state, "state"))
        shared = set() if full else {_memory(tensor) for tensor in now.values()}
        for path, tensor in tensors(self.staged.state, "state"):
            on_device = full and tensor.device.type != "cpu"
            if tensor.numel() and (on_device or _memory(tensor) in used):
                found = now.get(path)
                same = place(tensor) in shared if found is None else place(found) == place(tensor)
                if not same:
                    raise AddressMoved(
                        f"{self.key}: {path} was captured as {_text(tensor)} and the batch's is {_text(found)}"
                    )


class Records(dict[BatchExecutionDescriptor, R]):
    """What a manager has of its captured keys; one that is missing raises `NotCaptured`."""

    def __init__(self, why_missing: Callable[[BatchExecutionDescriptor], str]) -> None:
        super().__init__()
        self._why_missing = why_missing

    def __missing__(self, key: BatchExecutionDescriptor) -> R:
        raise NotCaptured(f"no graph for {key}: {self._why_missing(key)}; {nearest(key, self)}")


CapturedStates: TypeAlias = Mapping[BatchExecutionDescriptor, CapturedState[S]]
"""The captured keys of a manager, live. A missing one raises `NotCaptured`, which says what is near and why."""


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


def check_warm(warm: Staged[S], staged: Staged[S]) -> None:
    """Prove that a warm-up was given the host scalars of its capture, so that it launched the same kernels."""
    offence = _offence(staged, warm) or _offence(warm, staged)
    if offence is not None:
        raise SignatureMismatch(
            f"{staged.key}: warm-up and capture were staged with different host scalars, so that the capture might "
            f"launch kernels that nothing has loaded: {offence}"
        )


def _offence(captured: Staged[S], staged: Staged[S]) -> str | None:
    """Why what was captured with the host scalars of one does not admit those of the other, None if it does."""
    baked, offered = captured.signature, staged.signature
    if baked is offered:
        return None
    if baked is None or offered is None:
        odd = "captured without" if baked is None else "staged without"
        return f"was {odd} a signature, so its host scalars can't be compared"
    return baked.admits(offered)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _text(tensor: Tensor | None) -> str:
    if tensor is None:
        return "not there"
    return f"{tuple(tensor.shape)} with strides {tensor.stride()} at {tensor.data_ptr():#x}"
