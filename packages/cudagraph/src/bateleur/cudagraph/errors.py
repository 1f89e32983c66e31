"""Errors of capture and replay. Every message names the key and what differs."""


class GraphError(RuntimeError):
    """Base class of all errors of this package, except `ValueError` and `TypeError` for wrong arguments."""


class CaptureError(GraphError):
    """A capture was refused or failed. Nothing of it remains, and the manager can capture and replay other keys."""


class HostSync(CaptureError):
    """The captured function read a device value on the host. A replay could not repeat that."""


class SharedState(CaptureError):
    """Warm-up and capture got the same state object. The graph would lack what the warm-up cached in the object."""


class ReplayFailed(GraphError):
    """A replay raised. The key was released, and the memory that the graph writes is undefined."""


class DanglingExternal(GraphError):
    """External memory that a graph reads or writes was freed after the capture."""


class AddressMoved(GraphError):
    """A buffer that a graph reads or writes has another address than at capture."""


class StaleState(GraphError):
    """The buffers do not hold the batch any more, because another batch was staged into them."""


class KeyMismatch(GraphError):
    """The batch was staged for another key than the one to replay."""


class SignatureMismatch(GraphError):
    """The host scalars of the batch do not fit those that the graph was captured with."""


class NotCaptured(GraphError, KeyError):
    """There is no graph for a key. The message names the nearest keys and the fields that differ.

    It is a KeyError because captured states are a mapping.
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""
