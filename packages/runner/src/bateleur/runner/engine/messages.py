"""What changes an engine. The first of several ranks tells the others, in order, before it does the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.outputs import RequestOutput
from bateleur.runner.requests.admitted_request import AdmittedRequest
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.stats import EngineStats


@dataclass(frozen=True, slots=True)
class AddRequests:
    """These requests are queued."""

    groups: tuple[RequestGroup, ...]


@dataclass(frozen=True, slots=True)
class AddAdmittedRequests:
    """The same, as it is sent."""

    tickets: tuple[AdmittedRequest, ...]


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """A request ends."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AbandonRequests:
    """Nobody waits for these requests any more."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunStep:
    """A step runs."""

    seconds: float
    """What the step before took the first rank: policies that look at the clock look at this."""


@dataclass(frozen=True, slots=True, eq=False)
class ExportPrefix:
    """A prefix is written to a file."""

    token_ids: NDArray[np.int32]
    path: Path


@dataclass(frozen=True, slots=True)
class ImportPrefix:
    """A prefix is taken in from a file."""

    path: Path


@dataclass(frozen=True, slots=True)
class FlushDisk:
    """What waits to be written to a disk is written."""


@dataclass(frozen=True, slots=True)
class VerifyGraphs:
    """Replays are compared with eager runs."""

    fuzz: int


@dataclass(frozen=True, slots=True)
class ReportStats:
    """Data-parallel ranks reply with their counters."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a data-parallel rank says of an order that it has carried out."""

    outputs: list[RequestOutput]
    stats: EngineStats | None
    """Now and then."""


EngineOperation = ExportPrefix | ImportPrefix | FlushDisk | VerifyGraphs
"""What is done between two steps, and may take long: files are read and written, or much is computed."""
Message = AddRequests | AbortRequest | AbandonRequests | RunStep | EngineOperation
WireMessage = AbortRequest | AddAdmittedRequests | EngineOperation | AbandonRequests | RunStep | ReportStats
"""The same as they are sent."""
SendMessage = Callable[[Message], AbstractContextManager[None]]
"""Tells an order to whoever else must follow it; inside of the context it is carried out, and nothing breaks off."""

_NOTHING = nullcontext()


def send_to_nobody(order: Message) -> AbstractContextManager[None]:
    """For an engine that is alone."""
    return _NOTHING
