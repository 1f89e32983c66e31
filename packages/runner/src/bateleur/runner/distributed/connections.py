"""Connections between the first rank and another one, and the status messages that they exchange."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from subprocess import Popen


@dataclass(frozen=True, slots=True)
class Started:
    """Status message: the rank runs, and can join the process group."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Status message: the rank has loaded the model, and waits for messages."""


@dataclass(frozen=True, slots=True)
class RankError:
    """Status message: the rank has raised an error, and exits.

    error: type and message, on one line. in_collective: whether a collective failed, usually because another rank has
    failed.
    """

    error: str
    trace: str
    in_collective: bool


@dataclass(frozen=True, slots=True)
class Exited:
    """Status of a process that has exited without a message. how: description, to follow "rank 1"."""

    how: str


@dataclass(frozen=True, slots=True)
class NoReply:
    """Status of a rank that does not answer."""


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Status message: the rank must reply with a `RankStatus`."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Status message: what a rank is doing now.

    num_messages: number of engine messages that it has received. idle: whether it waits for the next one.
    in_collective: whether it is in a collective. frame: innermost frames of its thread.
    """

    num_messages: int
    idle: bool
    in_collective: bool
    frame: str


@dataclass(frozen=True, slots=True)
class RankConnection:
    """The two connections between the first rank and another one. Both break when either process ends.

    messages: for engine messages in order, and their replies. status: for the threads that monitor the ranks.
    """

    messages: Connection
    status: Connection

    def close(self) -> None:
        """Close both connections. The other rank reads an end of file."""
        self.messages.close()
        self.status.close()


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Another rank, from the view of the first rank. process: None if torchrun has started it."""

    rank: int
    connection: RankConnection
    process: Popen[bytes] | None
