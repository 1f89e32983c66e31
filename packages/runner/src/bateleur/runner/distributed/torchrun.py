"""Ranks that torchrun has started. Each runs the same script, and they find each other in torchrun's store."""

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

from bateleur.runner.distributed.connections import RankConnection, RankProcess
from bateleur.runner.distributed.process_group import LOCALHOST
from bateleur.runner.distributed.ranks import Ranks

_numbers = count(1)
_c10d: Any = _distributed_c10d


def is_follower() -> bool:
    """Return whether torchrun has started this process as another rank than the first."""
    return is_torchelastic_launched() and bool(next(rendezvous("env://"))[1])


@dataclass(frozen=True, slots=True)
class TorchrunRendezvous:
    """The meeting point of the ranks of one engine, with a prefix of its own in torchrun's store.

    Engines get their prefixes in the order of the script, which is the same on all ranks.
    """

    store: Any
    ranks: Ranks

    @classmethod
    def join(cls, timeout: float) -> TorchrunRendezvous | None:
        """Join the other ranks; None in a process that torchrun has not started. timeout: seconds to wait for them."""
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

    def accept(self) -> Sequence[RankProcess]:
        """Accept the connections of all other ranks; called on the first rank."""
        alone = self.ranks.local[1] == self.ranks.size  # on this machine
        key, count = secrets.token_bytes(32), self.ranks.size - 1
        accepted: dict[tuple[int, str], Connection] = {}
        with Listener((LOCALHOST if alone else "", 0), backlog=2 * count, authkey=key) as listener:
            port = cast(tuple[str, int], listener.address)[1]
            self.store.set("first", f"{LOCALHOST if alone else socket.gethostname()} {port} {key.hex()}")
            while len(accepted) < 2 * count:
                connection = listener.accept()
                accepted[connection.recv()] = connection
        ranks = range(1, count + 1)
        return [
            RankProcess(rank, RankConnection(accepted[rank, "messages"], accepted[rank, "status"]), None)
            for rank in ranks
        ]

    def connect(self) -> RankConnection:
        """Connect to the first rank; called on another rank."""
        host, port, key = self.store.get("first").decode().split()
        ends = []
        for name in ("messages", "status"):
            connection = Client((host, int(port)), authkey=bytes.fromhex(key))
            connection.send((self.ranks.rank, name))
            ends.append(connection)
        return RankConnection(*ends)
