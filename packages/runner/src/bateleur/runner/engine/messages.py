"""Messages that change an engine. With several ranks, the first one sends each of them to the others in order."""

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
    """Queue requests."""

    groups: tuple[RequestGroup, ...]


@dataclass(frozen=True, slots=True)
class AddAdmittedRequests:
    """`AddRequests` as it is sent to other ranks."""

    requests: tuple[AdmittedRequest, ...]


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AbandonRequests:
    """Drop requests whose callers are gone."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run a step. seconds: time of the step before on the first rank, for draft policies."""

    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class ExportPrefix:
    """Write a prefix to a file."""

    token_ids: NDArray[np.int32]
    path: Path


@dataclass(frozen=True, slots=True)
class ImportPrefix:
    """Read a prefix from a file."""

    path: Path


@dataclass(frozen=True, slots=True)
class FlushDisk:
    """Write everything that waits to be written to disk."""


@dataclass(frozen=True, slots=True)
class VerifyGraphs:
    """Compare replays of CUDA graphs with eager runs."""

    fuzz: int


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load a LoRA adapter."""

    adapter: LoRARequest


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Give the slot of a LoRA adapter back."""

    lora_name: str


@dataclass(frozen=True, slots=True)
class ReportStats:
    """Let data-parallel ranks reply with their counters."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of a data-parallel rank to a message. stats: None most of the time."""

    outputs: list[RequestOutput]
    stats: EngineStats | None


EngineOperation = ExportPrefix | ImportPrefix | FlushDisk | VerifyGraphs | LoadAdapter | UnloadAdapter
"""Operations between steps, which may take long."""
Message = AddRequests | AbortRequest | AbandonRequests | RunStep | EngineOperation
WireMessage = AbortRequest | AddAdmittedRequests | EngineOperation | AbandonRequests | RunStep | ReportStats
"""Messages as they are sent to other ranks."""
SendMessage = Callable[[Message], AbstractContextManager[None]]
"""Sends a message to the other ranks. The change is made inside the context, where interrupts are delayed."""
