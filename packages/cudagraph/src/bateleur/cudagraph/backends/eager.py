"""No graphs: a replay runs the body. For devices without them, and to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from bateleur.cudagraph.backends.base import External, Recording
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import GraphError
from bateleur.cudagraph.execution import Body, Execution

S = TypeVar("S")
T = TypeVar("T")


class EagerBackend:
    """Keeps the body instead of capturing it. Nothing is frozen, and each replay returns new tensors."""

    name = "eager"

    @contextmanager
    def session(self) -> Iterator[None]:
        """Nothing of the process needs to change."""
        yield

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> Recording[S, T]:
        """Keep `body`; it does not run before the first replay."""
        return EagerRecording(body, key)


class EagerRecording(Generic[S, T]):
    """A body that is run anew by each replay, for the state it is given."""

    externals: tuple[External, ...] = ()
    num_graphs = 0
    nbytes = 0

    def __init__(self, body: Body[S, T], key: BatchExecutionDescriptor) -> None:
        self._body: Body[S, T] | None = body
        self._key = key
        self._outputs: list[T] = []

    @property
    def output(self) -> T:
        """What the latest replay returned; there is none before the first."""
        if not self._outputs:
            raise GraphError(f"{self._key}: an eager recording has no output before its first replay")
        return self._outputs[0]

    def replay(self, state: S) -> T:
        """Run the body."""
        if self._body is None:
            raise GraphError(f"{self._key}: released")
        self._outputs = [self._body(Execution(self._key, state))]
        return self._outputs[0]

    def check_externals(self) -> None:
        """It reads whatever the body names at the time: nothing can dangle."""

    def poison(self) -> None:
        """It shares memory with no sibling."""

    def release(self) -> None:
        """Forget the body and the latest output."""
        self._body = None
        self._outputs = []
