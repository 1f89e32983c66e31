"""Connections between the first rank and another one, and the status messages that they exchange."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from subprocess import Popen


@dataclass(frozen=True, slots=True)
class Started:
    """The rank runs, and can join the process group."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank has loaded the model, and waits for messages."""


@dataclass(frozen=True, slots=True)
class RankError:
    """The rank has raised an error, and exits.

    error: type and message, on one line. in_collective: a collective failed, usually because another rank has failed.
    """

    error: str
    trace: str
    in_collective: bool


@dataclass(frozen=True, slots=True)
class Exited:
    """The process has exited without a message. how: what is known of it, to follow "rank 1"."""

    how: str


@dataclass(frozen=True, slots=True)
class NoReply:
    """The rank does not answer."""


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Request for a `RankStatus`."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank is doing.

    num_messages: engine messages that it has received. idle: it waits for the next one. frame: innermost frames of its
        thread.
    """

    num_messages: int
    idle: bool
    in_collective: bool
    frame: str


@dataclass(frozen=True, slots=True)
class RankConnection:
    """Two connections between the first rank and another one. Both break when either process ends.

    messages: engine messages in order, and their replies. status: between the threads that monitor the ranks.
    """

    messages: Connection
    status: Connection

    def close(self) -> None:
        """Close both. The other rank reads an end of file."""
        self.messages.close()
        self.status.close()


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Another rank, as the first rank sees it. process: None if torchrun has started it."""

    rank: int
    connection: RankConnection
    process: Popen[bytes] | None
