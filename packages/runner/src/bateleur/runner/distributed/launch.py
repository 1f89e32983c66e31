"""Starting the other ranks on this machine, each a process of its own that shares nothing but two sockets."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from subprocess import DEVNULL, Popen

from bateleur.runner.distributed.connections import Link, Member

_PR_SET_PDEATHSIG = 1
_BEGIN = """\
import os, runpy, sys
module, sys.path[:] = sys.argv.pop(), sys.argv.pop().split(os.pathsep)
runpy.run_module(module, run_name="__main__")
"""
"""What this process can import the other can, whatever has changed its path."""


def start(module: str, rank: int) -> Member:
    """Run `module`, which calls `inherited`, as another rank.

    It ends with the thread that calls this, where the system knows how to (Linux), and when its link does.
    """
    (orders, far_orders), (watch, far_watch) = Pipe(), Pipe()
    fds = far_orders.fileno(), far_watch.fileno()
    paths = os.pathsep.join(sys.path)
    command = [sys.executable, "-P", "-c", _BEGIN, *map(str, (*fds, os.getpid())), paths, module]
    try:
        # In a group of its own, a terminal's Ctrl-C is for the first alone. What it writes must not mix with results.
        process = Popen(command, stdin=DEVNULL, stdout=2, pass_fds=fds, process_group=0)
    finally:
        far_orders.close()
        far_watch.close()
    return Member(rank, Link(orders, watch), process)


def inherited() -> Link:
    """In the process that `start` has made: the other end of its link. It dies with its parent from here on."""
    orders, watch, parent = map(int, sys.argv[1:])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    return Link(Connection(orders), Connection(watch))
