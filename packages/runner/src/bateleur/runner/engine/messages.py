"""Messages that change an engine. With several ranks, the first rank sends each of them to the others, in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.lora.adapter_manager import LoRARequest
from bateleur.runner.outputs import RequestOutput
from bateleur.runner.requests.request_group import AdmittedRequest, RequestGroup
from bateleur.runner.stats import EngineStats


@dataclass(frozen=True, slots=True)
class AddRequests:
    """Message: queue requests."""

    groups: tuple[RequestGroup, ...]


@dataclass(frozen=True, slots=True)
class AddAdmittedRequests:
    """Message: queue requests that the first rank has admitted. Other ranks get it in place of `AddRequests`."""

    requests: tuple[AdmittedRequest, ...]


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Message: end a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AbandonRequests:
    """Message: drop requests that their callers have abandoned."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunStep:
    """Message: run a step. seconds: time of the last step on the first rank, for draft policies."""

    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class ExportPrefix:
    """Message: write a prefix of the prefix cache to a file."""

    token_ids: NDArray[np.int32]
    path: Path


@dataclass(frozen=True, slots=True)
class ImportPrefix:
    """Message: read a prefix from a file into the prefix cache."""

    path: Path


@dataclass(frozen=True, slots=True)
class FlushDisk:
    """Message: write everything that waits to be written to disk."""


@dataclass(frozen=True, slots=True)
class VerifyGraphs:
    """Message: compare replays of CUDA graphs with eager runs on `fuzz` random steps."""

    fuzz: int


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Message: load a LoRA adapter."""

    adapter: LoRARequest


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Message: unload a LoRA adapter and free its slot."""

    lora_name: str


@dataclass(frozen=True, slots=True)
class ReportStats:
    """Message: data-parallel ranks must reply with their counters."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of a data-parallel rank to a message. stats: counters; None if they were sent shortly before."""

    outputs: list[RequestOutput]
    stats: EngineStats | None


EngineOperation = ExportPrefix | ImportPrefix | FlushDisk | VerifyGraphs | LoadAdapter | UnloadAdapter
"""Operations between steps, which may take long."""
Message = AddRequests | AbortRequest | AbandonRequests | RunStep | EngineOperation
WireMessage = AbortRequest | AddAdmittedRequests | EngineOperation | AbandonRequests | RunStep | ReportStats
"""Messages as they are sent to other ranks."""
SendMessage = Callable[[Message], AbstractContextManager[None]]
"""Sends a message to the other ranks. The change is made inside the context, where interrupts are delayed."""
