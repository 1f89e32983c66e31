"""What can go wrong around a graph. Every message names the key, and what differs."""

from __future__ import annotations


class GraphError(RuntimeError):
    """Base of all errors of this package that are not wrong arguments."""


class CaptureError(GraphError):
    """A capture was refused or failed; nothing of it remains, and the manager stays usable."""


class HostSync(CaptureError):
    """The body read a device value on the host while it was captured: a replay could not do that again."""


class SharedState(CaptureError):
    """A warm-up and a capture were given the same state object: what one fills lazily the other would skip."""


class ReplayFailed(GraphError):
    """A graph raised while it ran. What it wrote until then is undefined; the key was released."""


class DanglingExternal(GraphError):
    """Memory that a graph reads or writes, and does not own, has been freed since the capture."""


class AddressMoved(GraphError):
    """A buffer that a graph baked is at another address now."""


class StaleState(GraphError):
    """The buffers were staged again since: the contents belong to another batch."""


class KeyMismatch(GraphError):
    """A batch was staged for one key, and another was to be replayed."""


class SignatureMismatch(GraphError):
    """A host scalar of the batch is not admitted by the one that was captured."""


class NotCaptured(GraphError, KeyError):
    """There is no graph for this key; the message has the nearest keys and the field that differs.

    A KeyError as well, since captured states are a mapping.
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""
