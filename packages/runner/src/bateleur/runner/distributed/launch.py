"""Starts the other ranks as processes on this machine, each connected by two sockets."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from subprocess import DEVNULL, Popen

from bateleur.runner.distributed.connections import RankConnection, RankProcess

_PR_SET_PDEATHSIG = 1
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
    paths = os.pathsep.join(sys.path)
    command = [sys.executable, "-P", "-c", _BEGIN, *map(str, (*fds, os.getpid())), paths, module]
    try:
        # Its own process group: Ctrl-C in a terminal reaches the first rank only. Its output goes to stderr.
        process = Popen(command, stdin=DEVNULL, stdout=2, pass_fds=fds, process_group=0)
    finally:
        far_messages.close()
        far_status.close()
    return RankProcess(rank, RankConnection(messages, status), process)


def inherited() -> RankConnection:
    """Return the connection to the first rank, in a process that `start` has started.

    From then on the process ends with its parent.
    """
    messages, status, parent = map(int, sys.argv[1:])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    return RankConnection(Connection(messages), Connection(status))
