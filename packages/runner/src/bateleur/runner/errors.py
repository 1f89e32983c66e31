"""Every exception of the house, in one tree.

ValueError                  an argument is wrong: the message names it, its value and the rule
    BatchInvariant          a batch breaks a rule of its field table
    InexactBound            a host bound was asked for more than it knows
    BorrowError             a drafter was lent metadata that is not what it was captured with
    ContextLengthExceeded   a prompt leaves no room for an output token within max_model_len
    MissingExtra            what is asked for needs an extra that is not installed; also an ImportError
    PrefixRefused           a file is no prefix of this engine's; it says why
RuntimeError                an LLM was called by a second caller at once, or in a forked process
    QueueFull               an AsyncLLM has as many requests as may wait
    Unmeasured              an engine or server that is measured did not do what it was asked for
    EngineDead              the engine has died, or was closed; the cause is beside it
        RankFailed          one of several ranks died, hung, raised or disagreed: it has the rank and the cause
    CollectiveBroken        ranks did not come to the end of an exchange; a RankFailed says why
    ReplicaLost             a replica can't answer a request any more; another one may
    NoCompiler              kernels in C can't be compiled here; an engine then has torch's, and does not raise it
    GraphError              something about a CUDA graph; the message names its key
        CaptureError        a capture was refused or failed
            HostSync        the body read a device value on the host
            SharedState     warm-up and capture were given one state object
        ReplayFailed        a graph raised while it ran
        DanglingExternal    memory that a graph reads was freed
        AddressMoved        a buffer that a graph baked has moved
        StaleState          buffers were staged again since
        KeyMismatch         staged for one key, replayed with another
        SignatureMismatch   a host scalar is not the one that was captured
        NotCaptured         there is no graph for this key; also a KeyError
AssertionError              an invariant of ours, or of a conformance kit, does not hold
    ConformanceError        somebody's builder, backend, drafter or recurrence breaks its contract

What reads files also raises OSError. A request is never lost with another's error: `LLM` refuses it before it runs, or
reports it with `finish_reason` "error".
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
    _HOMES = {
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
        """Those of other packages, which import torch, when they are first used."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"bateleur.{_HOMES[name]}"), name)


__all__ = [
    "AddressMoved",
    "BatchInvariant",
    "BorrowError",
    "CaptureError",
    "CollectiveBroken",
    "ConformanceError",
    "ContextLengthExceeded",
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
    """As many requests as may wait are waiting; one that comes later may find room."""


class ContextLengthExceeded(ValueError):
    """A prompt leaves no room for an output token within `max_model_len`.

    The message has the phrases by which clients recognise this error ("maximum context length is N tokens", "reduce the
    length of the messages").
    """

    def __init__(self, length: str, max_model_len: int) -> None:
        """length: of the prompt, such as "3000 tokens"."""
        super().__init__(
            f"prompt has {length}; this model's maximum context length is {max_model_len} tokens (max_model_len), the "
            "output included: reduce the length of the messages or of the prompt"
        )
        self.length, self.max_model_len = length, max_model_len


class EngineDead(RuntimeError):
    """No step will run any more: the engine has failed too often, or was closed."""


class RankFailed(EngineDead):
    """One of the ranks that run an engine together has failed, and so all of it."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} {cause}")
        self.rank, self.cause = rank, cause

    def again(self) -> RankFailed:
        """The same, to be raised once more."""
        copy = RankFailed(self.rank, self.cause)
        for note in getattr(self, "__notes__", ()):
            copy.add_note(note)
        return copy


class CollectiveBroken(RuntimeError):
    """An exchange between ranks did not come to its end; mostly another rank is why."""


class ReplicaLost(RuntimeError):
    """The engine of a replica is dead, so the request is for another one; the message is the replica's name."""


class Unmeasured(RuntimeError):
    """An engine or a server that is measured did not do what it was asked for; the message has its last words."""


class MissingExtra(ImportError, ValueError):
    """What a request asks for takes a package that is not installed: it is refused like any other."""


class PrefixRefused(ValueError):
    """A file holds nothing that this engine may use: what it would say could be wrong."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """"gone", "unreadable", "truncated", "corrupt" (bytes have changed), "foreign" (of another engine), "misnamed"
        (of other tokens)."""
