"""The limit on the number of live requests, and their ids."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import count
from threading import Lock

from bateleur.runner.errors import QueueFull
from bateleur.runner.utils.arguments import shown


def require_new(names: Iterable[str], used: Container[str]) -> None:
    """Raise ValueError if one of the new request ids is in use, or occurs twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen or name in used:
            raise ValueError(f"request_id is {shown(name)}; a request of that id is already waiting or running")
        seen.add(name)


class AdmissionLimit:
    """Limits the number of live requests, and reserves their ids from before tokenization until they end."""

    def __init__(self, running: int, waiting: int) -> None:
        self._running, self._waiting = running, waiting
        self._taken: dict[str, int] = {}
        self._lock = Lock()
        self._names = (f"request-{i}" for i in count(1))

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, names: Sequence[str | None], size: int) -> list[str]:
        """Admit requests, all or none, and return their ids. Requests without an id get one.

        Each counts as `size` sequences.
        Raises QueueFull if there is no room now, and ValueError if there never will be, or for an id that is in use.
        """
        wanted, room = size * len(names), self._running + self._waiting
        if wanted > room:
            raise ValueError(
                f"{wanted} sequences are asked for at once; max_num_seqs and max_queued_requests leave room for {room}"
            )
        with self._lock:
            if sum(self._taken.values()) + wanted > room:
                raise QueueFull(f"{self._waiting} requests are waiting already, which is max_queued_requests")
            given = [name for name in names if name is not None]
            require_new(given, self._taken)
            free = (name for name in self._names if name not in self._taken and name not in given)
            taken = [next(free) if name is None else name for name in names]
            self._taken |= dict.fromkeys(taken, size)
        return taken

    def release(self, name: str) -> None:
        """Free the id of a request that has ended or was refused."""
        with self._lock:
            self._taken.pop(name, None)
