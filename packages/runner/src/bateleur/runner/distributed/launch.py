"""Starts the other ranks as processes of this machine, or joins those that torchrun has started.

Under torchrun each rank runs the same script, and the ranks find each other in the store of torchrun.
"""

import ctypes
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener
from subprocess import DEVNULL, Popen
from typing import Any, Self, cast

from torch._C import _distributed_c10d
from torch.distributed import is_torchelastic_launched
from torch.distributed.rendezvous import rendezvous

from bateleur.runner.distributed.connections import RankConnection, RankProcess
from bateleur.runner.distributed.process_group import LOCALHOST
from bateleur.runner.distributed.ranks import Ranks

_PR_SET_PDEATHSIG = 1
_ENDS = ("messages", "status")  # the fields of `RankConnection`
_numbers = count(1)
_c10d: Any = _distributed_c10d
_BEGIN = """\
import os, runpy, sys
module, sys.path[:] = sys.argv.pop(), sys.argv.pop().split(os.pathsep)
runpy.run_module(module, run_name="__main__")
"""
"""The new process gets the `sys.path` of this one."""


def start(module: str, rank: int) -> RankProcess:
    """Start another rank as a process that runs `module`, which must call `inherited`."""
    (messages, far_messages), (status, far_status) = Pipe(), Pipe()
    fds = far_messages.fileno(), far_status.fileno()
    arguments = [*map(str, (*fds, os.getpid())), os.pathsep.join(sys.path), module]
    command = [sys.executable, "-P", "-c", _BEGIN, *arguments]
    try:
        # Its own process group: Ctrl-C in a terminal reaches the first rank only. Its output goes to stderr.
        process = Popen(command, stdin=DEVNULL, stdout=2, pass_fds=fds, process_group=0)
    finally:
        far_messages.close()
        far_status.close()
    return RankProcess(rank, RankConnection(messages, status), process)


def inherited() -> RankConnection:
    """Return the connection to the first rank, in a process that `start` has started.

    On Linux the process is killed when its parent ends.
    """
    messages, status, parent = map(int, sys.argv[1:])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    return RankConnection(Connection(messages), Connection(status))


def is_follower() -> bool:
    """Whether torchrun has started this process as another rank than the first."""
    return is_torchelastic_launched() and bool(next(rendezvous("env://"))[1])


@dataclass(frozen=True, slots=True)
class TorchrunRendezvous:
    """Lets the ranks of one engine find each other in torchrun's store. Each engine of a script has its own keys."""

    store: Any
    ranks: Ranks

    @classmethod
    def join(cls, timeout: float) -> Self | None:
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
        """As the first rank: accept the connections of all other ranks."""
        alone = self.ranks.local[1] == self.ranks.size  # on this machine
        key, count = secrets.token_bytes(32), len(_ENDS) * (self.ranks.size - 1)
        accepted: dict[tuple[int, str], Connection] = {}
        with Listener((LOCALHOST if alone else "", 0), backlog=count, authkey=key) as listener:
            port = cast(tuple[str, int], listener.address)[1]
            self.store.set("first", f"{LOCALHOST if alone else socket.gethostname()} {port} {key.hex()}")
            while len(accepted) < count:
                connection = listener.accept()
                accepted[connection.recv()] = connection
        ends = {rank: [accepted[rank, name] for name in _ENDS] for rank in range(1, self.ranks.size)}
        return [RankProcess(rank, RankConnection(*each), None) for rank, each in ends.items()]

    def connect(self) -> RankConnection:
        """As another rank: connect to the first rank."""
        host, port, key = self.store.get("first").decode().split()
        ends = []
        for name in _ENDS:
            ends.append(Client((host, int(port)), authkey=bytes.fromhex(key)))
            ends[-1].send((self.ranks.rank, name))
        return RankConnection(*ends)
