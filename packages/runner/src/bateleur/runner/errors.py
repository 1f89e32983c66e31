"""Every exception of the house, in one tree.

ValueError                  an argument is wrong: the message names it, its value and the rule
    BatchInvariant          a batch breaks a rule of its field table
    InexactBound            a host bound was asked for more than it knows
    BorrowError             a drafter was lent metadata that is not what it was captured with
    MissingExtra            what is asked for needs an extra that is not installed; also an ImportError
RuntimeError                an LLM was called by a second caller at once, or in a forked process
    QueueFull               an AsyncLLM has as many requests as may wait
    Unmeasured              an engine or server that is measured did not do what it was asked for
    EngineDead              the engine of an AsyncLLM has died, or was closed; the cause is beside it
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
from bateleur.metadata.bounds import InexactBound
from bateleur.metadata.conformance.errors import ConformanceError
from bateleur.metadata.native import NoCompiler
from bateleur.metadata.validate import BatchInvariant

__all__ = [
    "AddressMoved",
    "BatchInvariant",
    "BorrowError",
    "CaptureError",
    "ConformanceError",
    "DanglingExternal",
    "EngineDead",
    "GraphError",
    "HostSync",
    "InexactBound",
    "KeyMismatch",
    "MissingExtra",
    "NoCompiler",
    "NotCaptured",
    "QueueFull",
    "ReplayFailed",
    "SharedState",
    "SignatureMismatch",
    "StaleState",
    "Unmeasured",
]


class QueueFull(RuntimeError):
    """As many requests as may wait are waiting; one that comes later may find room."""


class EngineDead(RuntimeError):
    """No step will run any more: the engine has failed too often, or was closed."""


class Unmeasured(RuntimeError):
    """An engine or a server that is measured did not do what it was asked for; the message has its last words."""


class MissingExtra(ImportError, ValueError):
    """What a request asks for takes a package that is not installed: it is refused like any other."""
