"""What the first of several ranks and another say to each other, and over what."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from subprocess import Popen


@dataclass(frozen=True, slots=True)
class Here:
    """It runs, and can join the others."""


@dataclass(frozen=True, slots=True)
class Ready:
    """It is loaded, and waits for orders."""


@dataclass(frozen=True, slots=True)
class Failed:
    """It has raised, and leaves."""

    error: str
    """Type and message, on a line."""
    trace: str
    in_collective: bool
    """Because a collective broke off: mostly another rank is why."""


@dataclass(frozen=True, slots=True)
class Gone:
    """It has left without a word."""

    how: str
    """What is known of it, behind "rank 1"."""


@dataclass(frozen=True, slots=True)
class Silent:
    """It does not answer."""


@dataclass(frozen=True, slots=True)
class Where:
    """The question where it is; `At` is the answer."""


@dataclass(frozen=True, slots=True)
class At:
    """Where a rank is."""

    num_orders: int
    """That it has been given."""
    idle: bool
    """Whether it waits for the next."""
    in_collective: bool
    frame: str
    """Where its thread is, and who called that."""


@dataclass(frozen=True, slots=True)
class Link:
    """Two connections: `orders` from the first rank, in their order, and `watch`, between threads that mind the others.

    Both end with either process, however it ends.
    """

    orders: Connection
    watch: Connection

    def close(self) -> None:
        """The other side reads an end."""
        self.orders.close()
        self.watch.close()


@dataclass(frozen=True, slots=True)
class Member:
    """Another rank, as the first sees it."""

    rank: int
    link: Link
    process: Popen[bytes] | None
    """None where somebody else has started it."""
