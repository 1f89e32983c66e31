"""All exceptions of the five packages.

ValueError                  an argument is wrong: the message names the argument, its value and the rule
    AdaptersBusy            an adapter is loaded while unfinished requests use all slots of LoRA adapters
    BatchInvariant          a field of a batch violates a rule
    InexactBound            an exact length was read, but the host has only an upper bound
    BorrowError             the target's attention metadata differs from what the drafter was captured with
    ContextLengthExceeded   a prompt leaves no room for an output token within max_model_len
    MissingExtra            an optional dependency is not installed; also an ImportError
    PrefixRefused           a file is not a usable prefix for this engine; `reason` says why
RuntimeError                concurrent calls of an LLM, or a call in a forked process
    ContradictoryTokens     an engine gave its drafter tokens that contradict each other
    QueueFull               an AsyncLLM has its maximum number of queued requests
    Unmeasured              a benchmarked engine or server failed
    EngineDead              the engine has failed or was closed
        RankFailed          a rank died, hung, raised or disagreed; has `rank` and `cause`
    CollectiveBroken        a collective between ranks did not complete; a RankFailed has the cause
    ReplicaLost             the engine of a replica is dead; the request may be sent to another one
    NoCompiler              C kernels can't be compiled; an engine catches it and uses torch
    GraphError              a CUDA graph error; the message names the graph's key
        CaptureError        a capture was refused or failed
            HostSync        the captured function reads a device value on the host
            SharedState     warm-up and capture were given the same state object
        ReplayFailed        a graph raised during replay
        DanglingExternal    memory that a graph reads was freed
        AddressMoved        a captured buffer has a new address
        StaleState          another batch was staged into the same buffers after this one
        KeyMismatch         a batch that was staged for one key was replayed with another
        SignatureMismatch   numbers that the host gives to kernels do not fit the captured ones
        NotCaptured         no graph for this key; also a KeyError
AssertionError              an internal invariant or a rule of a conformance kit is broken
    ConformanceError        a builder, backend, drafter or recurrence breaks its contract

Functions that read files also raise OSError. An error of one request does not affect others: `LLM` refuses it before it
runs, or reports it with `finish_reason` "error".
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bateleur.cudagraph.errors import (
        AddressMoved,
        CaptureError,
        DanglingExternal,
        GraphError,
        HostSync,
        KeyMismatch,
        NotCaptured,
        ReplayFailed,
        SharedState,
        SignatureMismatch,
        StaleState,
    )
    from bateleur.eagle.borrow import BorrowError
    from bateleur.metadata.conformance.errors import ConformanceError
    from bateleur.metadata.native import NoCompiler
    from bateleur.metadata.seq_len_bound import InexactBound
    from bateleur.metadata.validate import BatchInvariant
else:
    _GRAPHS = "cudagraph.errors"
    _MODULES = {
        "AddressMoved": _GRAPHS,
        "BatchInvariant": "metadata.validate",
        "BorrowError": "eagle.borrow",
        "CaptureError": _GRAPHS,
        "ConformanceError": "metadata.conformance.errors",
        "DanglingExternal": _GRAPHS,
        "GraphError": _GRAPHS,
        "HostSync": _GRAPHS,
        "InexactBound": "metadata.seq_len_bound",
        "KeyMismatch": _GRAPHS,
        "NoCompiler": "metadata.native",
        "NotCaptured": _GRAPHS,
        "ReplayFailed": _GRAPHS,
        "SharedState": _GRAPHS,
        "SignatureMismatch": _GRAPHS,
        "StaleState": _GRAPHS,
    }

    def __getattr__(name: str) -> object:
        """Import an exception of another package on first use, because those packages import torch."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"bateleur.{_MODULES[name]}"), name)


__all__ = [
    "AdaptersBusy",
    "AddressMoved",
    "BatchInvariant",
    "BorrowError",
    "CaptureError",
    "CollectiveBroken",
    "ConformanceError",
    "ContextLengthExceeded",
    "ContradictoryTokens",
    "DanglingExternal",
    "EngineDead",
    "GraphError",
    "HostSync",
    "InexactBound",
    "KeyMismatch",
    "MissingExtra",
    "NoCompiler",
    "NotCaptured",
    "PrefixRefused",
    "QueueFull",
    "RankFailed",
    "ReplayFailed",
    "ReplicaLost",
    "SharedState",
    "SignatureMismatch",
    "StaleState",
    "Unmeasured",
]


class QueueFull(RuntimeError):
    """The maximum number of requests is queued; a later request may succeed."""


class AdaptersBusy(ValueError):
    """`add_lora` found all adapter slots in use by unfinished requests. A generation request waits instead."""


class ContextLengthExceeded(ValueError):
    """A prompt leaves no room for an output token within `max_model_len`. length: of the prompt, as "3000 tokens"."""

    def __init__(self, length: str, max_model_len: int) -> None:
        # Clients search for "maximum context length is N tokens" and "reduce the length of the messages".
        super().__init__(
            f"prompt has {length}; this model's maximum context length is {max_model_len} tokens (max_model_len), the "
            "output included: reduce the length of the messages or of the prompt"
        )
        self.length, self.max_model_len = length, max_model_len


class ContradictoryTokens(RuntimeError):
    """The tokens that an engine gave its drafter contradict each other. `explain-acceptance` reports them."""


class EngineDead(RuntimeError):
    """The engine runs no more steps, because it failed too often or was closed."""


class RankFailed(EngineDead):
    """One of the ranks of an engine failed, which ends the engine."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} {cause}")
        self.rank, self.cause = rank, cause

    def copy(self) -> RankFailed:
        """Return a copy with the same exception notes (`add_note`), to be raised again."""
        other = RankFailed(self.rank, self.cause)
        for note in getattr(self, "__notes__", ()):
            other.add_note(note)
        return other


class CollectiveBroken(RuntimeError):
    """A collective between ranks did not complete, usually because another rank failed."""


class ReplicaLost(RuntimeError):
    """The engine of a replica is dead; another replica may serve the request. The message is the replica's name."""


class Unmeasured(RuntimeError):
    """A benchmarked engine or server failed; the message has its last output."""


class MissingExtra(ImportError, ValueError):
    """A request needs a package that is not installed; the message names the extra."""


class PrefixRefused(ValueError):
    """A file is not a usable prefix for this engine. `reason`, a word such as "corrupt", says why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """"gone", "unreadable", "truncated", "corrupt" (wrong checksum), "foreign" (of another engine) or "misnamed"
        (of other tokens)."""
