"""Messages that change an engine. With several ranks, the first rank sends each of them to the others, in order."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

from bateleur.runner.outputs import RequestOutput
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.stats import EngineStats

OperationName = Literal[
    "export_prefix", "import_prefix", "flush_disk", "verify_graphs", "load_adapter", "unload_adapter"
]


class AddRequests(NamedTuple):
    """Message: queue requests."""

    groups: tuple[RequestGroup, ...]


class AbortRequest(NamedTuple):
    """Message: end a request."""

    request_id: str


class AbandonRequests(NamedTuple):
    """Message: drop requests that their callers have abandoned."""

    request_ids: tuple[str, ...]


class RunStep(NamedTuple):
    """Message: run a step. seconds: time of the last step on the first rank, for draft policies."""

    seconds: float


class RunOperation(NamedTuple):
    """Message: run an operation between steps, which may take long, see `Engine.operate`."""

    name: OperationName
    arguments: tuple[Any, ...] = ()


class ReportStats(NamedTuple):
    """Message: data-parallel ranks must reply with their counters."""


class Reply(NamedTuple):
    """Reply of a data-parallel rank to a message. stats: counters; None if they were sent shortly before."""

    outputs: list[RequestOutput]
    stats: EngineStats | None


Message = AddRequests | AbortRequest | AbandonRequests | RunStep | RunOperation | ReportStats
SendMessage = Callable[[Message], AbstractContextManager[None]]
"""Sends a message to the other ranks. The change is made inside the context, where interrupts are delayed."""
