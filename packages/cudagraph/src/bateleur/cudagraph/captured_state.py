"""`CapturedState`: the state that a graph was captured with, and `CapturedStateProducer`, which stages into it."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Generic, TypeAlias, TypeVar

from torch import Tensor

from bateleur.cudagraph._memory import ExternalMemory
from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import AddressMoved, NotCaptured
from bateleur.cudagraph.execution import S
from bateleur.cudagraph.staging import Phase, Poisonable, Producer, StagedBatch, check_current, stage_batch


@dataclass(frozen=True, slots=True, eq=False)
class CapturedState(Generic[S]):
    """The state that one graph was captured with. Its addresses are fixed, its contents are not.

    The tensors of the state are views of the producer's buffers, which every staging overwrites. So a state that was
    captured for one key holds the contents of the latest staging (vLLM #47561, #48261).

    Attributes:
        addresses: `Producer.addresses()` at capture.
        externals: memory that the graph uses and does not own. Empty if the backend cannot find it.
        staged: the dummy batch of the capture.
        poison: whether `restage` first fills the buffers with invalid values.
    """

    key: BatchExecutionDescriptor
    addresses: Mapping[str, int]
    externals: tuple[ExternalMemory, ...]
    producer: Producer[S]
    staged: StagedBatch[S]
    poison: bool

    def restage(self, phase: Phase) -> StagedBatch[S]:
        """Stage a dummy batch of this key again at the captured addresses. Raises `AddressMoved` if a buffer moved."""
        check_addresses(self)
        staged = stage_batch(self.producer, self.key, phase, poison=self.poison)
        check_addresses(self)
        return staged

    def current_state(self) -> S:
        """Return the captured state. Raises `StaleState` if another batch was staged after the capture."""
        check_current(self.producer, self.key, self.staged)
        return self.staged.state

    def undeclared(self, declared: Iterable[Tensor]) -> tuple[ExternalMemory, ...]:
        """Return external memory that is neither a buffer of the producer nor in the storage of a `declared` tensor.

        Such memory may be freed, and later steps might not write it. An example is a tensor allocated while staging.
        Declare weights, caches and other tensors that live as long as the graph.
        """
        spans = [(address, address + 1) for address in self.addresses.values()]
        for storage in (tensor.untyped_storage() for tensor in declared):
            spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

        def is_declared(found: ExternalMemory) -> bool:
            return any(first < found.address + found.nbytes and found.address < last for first, last in spans)

        return tuple(found for found in self.externals if found.nbytes and not is_declared(found))


R = TypeVar("R")


class CapturedKeys(dict[BatchExecutionDescriptor, R]):
    """A manager's captured keys. A lookup of another key raises `NotCaptured` with the text `missing_reason(key)`."""

    def __init__(self, missing_reason: Callable[[BatchExecutionDescriptor], str]) -> None:
        super().__init__()
        self._missing_reason = missing_reason

    def __missing__(self, key: BatchExecutionDescriptor) -> R:
        raise NotCaptured(f"no graph for {key}: {self._missing_reason(key)}; {nearest(key, self)}")


CapturedStates: TypeAlias = Mapping[BatchExecutionDescriptor, CapturedState[S]]
"""A live view of a manager's captured keys. A missing key raises `NotCaptured` with the reason and the nearest keys."""


class CapturedStateProducer(Producer[S]):
    """A producer of batches that stages into the captured states of another `CudaGraphManager`.

    Graphs captured with it read the buffers of the other manager's producer. So one staging per step serves both
    managers, and its `StagedBatch` can be replayed by both. A drafter uses it to read the target model's metadata.
    ``keys``: the keys that will be used; they must have the same producer. None: all keys captured so far.
    """

    def __init__(self, states: CapturedStates[S], keys: Iterable[BatchExecutionDescriptor] | None = None) -> None:
        self._states = states
        used = [states[key] for key in (states if keys is None else keys)]
        if not used:
            raise ValueError("states and keys must have at least one captured key; capture the states first")
        self._producer = used[0].producer
        for state in used:
            if state.producer is not self._producer:
                raise ValueError(f"keys: {state.key} and {used[0].key} must have the same producer")

    @property
    def generation(self) -> int:
        """Number of stagings of the other manager's producer."""
        return self._producer.generation

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> StagedBatch[S]:
        """Stage the captured state of `key` again, with the other manager's producer."""
        return self._states[key].restage(phase)

    def addresses(self) -> Mapping[str, int]:
        """Return the buffer addresses of the other manager's producer."""
        return self._producer.addresses()

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> StagedBatch[S]:
        """Stage a random batch by the other manager's producer. `TypeError` if the producer is not `Fuzzable`."""
        return stage_batch(self._producer, key, Phase.RUN, poison=False, seed=seed)

    def poison(self) -> None:
        """Fill the buffers of the other manager's producer with invalid values, if it is `Poisonable`."""
        if isinstance(self._producer, Poisonable):
            self._producer.poison()


def nearest(key: BatchExecutionDescriptor, keys: Iterable[BatchExecutionDescriptor]) -> str:
    """Return a text that names the neighbours of `key` in sort order, and the fields in which each differs."""
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


def check_addresses(captured: CapturedState[S]) -> None:
    """Raise `AddressMoved` if a buffer of the producer moved or no longer exists. New buffers are allowed."""
    now = captured.producer.addresses()
    for name, address in captured.addresses.items():
        found = now.get(name)
        if found != address:
            where = "is gone" if found is None else f"is at {found:#x}"
            raise AddressMoved(
                f"{captured.key}: buffer {name} was captured at {address:#x} and {where} now; "
                "release the key and capture it again"
            )
