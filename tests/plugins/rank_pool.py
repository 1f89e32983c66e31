"""Ranks are forked from one process that has imported everything they need, so that torch is imported once."""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from subprocess import TimeoutExpired
from threading import Event
from typing import Any

import pytest
import torch

from bateleur.runner.distributed.connections import RankConnection, RankProcess
from bateleur.runner.workers import leader

FOLLOWER = "bateleur.runner.workers.follower"
LATER = ["bateleur.metadata.backends.paged", "transformers.models.auto.modeling_auto"]
"""Modules that an engine imports at construction, which would take a second in each rank."""
PRELOADED = [FOLLOWER, "rank_pool", "folder_users", *LATER]
"""Modules that the process imports before it forks."""


class Forked:
    """A process with the interface of `subprocess`."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired("a rank", timeout or 0.0)
        code: int = self._process.exitcode
        return code


own_rank = 0
"""Rank of this process."""


def begin(rank: int, orders: Connection, watch: Connection) -> None:
    """Run `follower.run` in a forked process."""
    global own_rank
    from bateleur.runner.workers.follower import run

    own_rank = rank
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    run(RankConnection(orders, watch))


class FailsLater:
    """A policy without drafts that fails on some ranks after three steps: "raises", "sleeps" or "drafts"."""

    def __init__(self, how: str, *ranks: int) -> None:
        self.how, self.ranks, self.steps, self.wake = how, ranks, 0, Event()

    def __reduce__(self) -> Any:
        return FailsLater, (self.how, *self.ranks)

    def lengths(self, rows: Any) -> Any:
        self.steps += 1
        if self.steps > 3 and own_rank in self.ranks:
            if self.how == "raises":
                raise ZeroDivisionError("nothing left")
            if self.how == "sleeps":
                self.wake.wait(60)
            return rows.max_drafts
        return rows.max_drafts * 0


class Uneven:
    """A policy with 0, 1, 2 and 3 drafts in turn, by the number of rows seen."""

    def __init__(self) -> None:
        self.asked = 0

    def lengths(self, rows: Any) -> Any:
        self.asked += len(rows.max_drafts)
        return rows.max_drafts.clip(max=self.asked % 4)


@contextmanager
def forked() -> Iterator[None]:
    """Engines with several ranks get them from this process while the block runs."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def start(module: str, rank: int) -> RankProcess:
        assert module == FOLLOWER
        (orders, far_orders), (watch, far_watch) = multiprocessing.Pipe(), multiprocessing.Pipe()
        process = context.Process(target=begin, args=(rank, far_orders, far_watch), daemon=True)
        process.start()
        far_orders.close()
        far_watch.close()
        forked: Any = Forked(process)
        return RankProcess(rank, RankConnection(orders, watch), forked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader, "start", start)
        yield
