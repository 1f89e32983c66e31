"""How much a replay proves before it runs, and what holds for whoever stages."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import TypeVar

from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import AddressMoved, KeyMismatch, StaleState
from bateleur.cudagraph.staged import Phase, Poisonable, Producer, Staged

S = TypeVar("S")


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


def require_book(key: BatchExecutionDescriptor, then: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Raise `AddressMoved` for the first buffer of the address book `then` that is elsewhere `now`."""
    if now == then:
        return
    for name, address in then.items():
        at = now.get(name)
        if at != address:
            where = "is gone" if at is None else f"is at {at:#x}"
            raise AddressMoved(f"{key}: buffer {name} was captured at {address:#x} and {where} now")


def stage_checked(
    producer: Producer[S], key: BatchExecutionDescriptor, phase: Phase, *, poison: bool
) -> Staged[S]:
    """Stage, spoiling the buffers before if asked and possible, and hold the producer to its contract."""
    if poison and isinstance(producer, Poisonable):
        producer.poison()
    staged = producer.stage(key, phase)
    check_current(producer, key, staged)
    return staged
