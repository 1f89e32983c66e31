"""Ranks that torchrun has started: each runs the same script, and they find each other at its store."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, cast

from torch._C import _distributed_c10d
from torch.distributed import is_torchelastic_launched
from torch.distributed.rendezvous import rendezvous

from bateleur.runner.distributed.connections import Link, Member
from bateleur.runner.distributed.process_group import LOCALHOST
from bateleur.runner.distributed.ranks import Ranks

_numbers = count(1)
_c10d: Any = _distributed_c10d


def is_follower() -> bool:
    """Whether torchrun has started this process, and another is the first."""
    return is_torchelastic_launched() and bool(next(rendezvous("env://"))[1])


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one engine meet: a part of torchrun's store for each engine, in the order of the script."""

    store: Any
    ranks: Ranks

    @classmethod
    def here(cls, timeout: float) -> Meeting | None:
        """None in a process that torchrun has not started. timeout: seconds that ranks wait for each other."""
        if not is_torchelastic_launched():
            return None
        limit = timedelta(seconds=timeout)
        shared, rank, size = next(rendezvous("env://", timeout=limit))
        shared.set_timeout(limit)
        store = _c10d.PrefixStore(f"bateleur-{next(_numbers)}", shared)
        store.set(f"host-{rank}", socket.gethostname())
        hosts = [store.get(f"host-{other}") for other in range(size)]
        same = [other for other in range(size) if hosts[other] == hosts[rank]]
        return cls(store, Ranks(rank, size, local=(same.index(rank), len(same))))

    def accept(self) -> Sequence[Member]:
        """As the first rank: the links to all others."""
        alone = self.ranks.local[1] == self.ranks.size  # on this machine
        key, count = secrets.token_bytes(32), self.ranks.size - 1
        links: dict[tuple[int, str], Connection] = {}
        with Listener((LOCALHOST if alone else "", 0), backlog=2 * count, authkey=key) as listener:
            port = cast(tuple[str, int], listener.address)[1]
            self.store.set("first", f"{LOCALHOST if alone else socket.gethostname()} {port} {key.hex()}")
            while len(links) < 2 * count:
                connection = listener.accept()
                links[connection.recv()] = connection
        ranks = range(1, count + 1)
        return [Member(rank, Link(links[rank, "orders"], links[rank, "watch"]), None) for rank in ranks]

    def connect(self) -> Link:
        """As another rank: the link to the first."""
        host, port, key = self.store.get("first").decode().split()
        ends = []
        for name in ("orders", "watch"):
            connection = Client((host, int(port)), authkey=bytes.fromhex(key))
            connection.send((self.ranks.rank, name))
            ends.append(connection)
        return Link(*ends)
