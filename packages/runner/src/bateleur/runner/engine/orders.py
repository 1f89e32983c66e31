"""What changes an engine. The first of several ranks tells the others, in order, before it does the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.outputs import RequestOutput
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.requests.ticket import Ticket
from bateleur.runner.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Add:
    """These requests are queued."""

    groups: tuple[RequestGroup, ...]


@dataclass(frozen=True, slots=True)
class Enter:
    """The same, as it is sent."""

    tickets: tuple[Ticket, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """A request ends."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Forsake:
    """Nobody waits for these requests any more."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A step runs."""

    seconds: float
    """What the step before took the first rank: policies that look at the clock look at this."""


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """A prefix is written to a file."""

    token_ids: NDArray[np.int32]
    path: Path


@dataclass(frozen=True, slots=True)
class TakeIn:
    """A prefix is taken in from a file."""

    path: Path


@dataclass(frozen=True, slots=True)
class Drain:
    """What waits to be written to a disk is written."""


@dataclass(frozen=True, slots=True)
class VerifyGraphs:
    """Replays are compared with eager runs."""

    fuzz: int


@dataclass(frozen=True, slots=True)
class Tally:
    """Data-parallel ranks reply with their counters."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a data-parallel rank says of an order that it has carried out."""

    outputs: list[RequestOutput]
    stats: EngineStats | None
    """Now and then."""


Errand = Export | TakeIn | Drain | VerifyGraphs
"""What is done between two steps, and may take long: files are read and written, or much is computed."""
Order = Add | Abort | Forsake | Step | Errand
Wire = Abort | Enter | Errand | Forsake | Step | Tally
"""The same as they are sent."""
Tell = Callable[[Order], AbstractContextManager[None]]
"""Tells an order to whoever else must follow it; inside of the context it is carried out, and nothing breaks off."""

_NOTHING = nullcontext()


def tell_nobody(order: Order) -> AbstractContextManager[None]:
    """For an engine that is alone."""
    return _NOTHING
