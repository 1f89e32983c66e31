"""Message counts, time limits, and the rank that is named. Ranks are threads, and a barrier is their collective."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import timedelta
from multiprocessing import Pipe
from threading import Barrier, Event, Thread
from types import FrameType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.distributed import process_group
from bateleur.runner.distributed import ranks as collectives
from bateleur.runner.distributed.connections import (
    Progress,
    RankConnection,
    RankHeartbeat,
    RankProcess,
    RankStatus,
    StartPhase,
)
from bateleur.runner.distributed.monitor import RankMonitor, find_failure
from bateleur.runner.distributed.process_group import LOCALHOST, ProcessGroup
from bateleur.runner.engine.messages import AddRequests, RunOperation, RunStep
from bateleur.runner.errors import CollectiveBroken, RankFailed
from bateleur.runner.workers import follower, leader
from bateleur.runner.workers.follower import GRACE_SECONDS
from bateleur.runner.workers.leader import Leader

SECONDS = 1.0
"""Time limit of the start or of a step, in tests in which a rank hangs."""
own = threading.local()  # `rank` of a thread


class ThreadRanks:
    """The ranks of a `Leader` other than the first one, as threads without an engine.

    `places`: functions that a rank calls at a place, by rank and place. The places are "device", before it joins the
    group; "load"; "before" and "after" the collective of a message.
    """

    def __init__(self, patch: pytest.MonkeyPatch, size: int) -> None:
        self.barrier, self.over = Barrier(size, timeout=5), Event()
        self.places: dict[tuple[int, str], Callable[[], object]] = {}
        self.heartbeats: dict[int, RankHeartbeat] = {}
        self.threads: list[Thread] = []
        self.config = EngineConfig.of(device="cpu", tensor_parallel_size=size, rank_timeout=SECONDS)
        ranks = self

        class Heartbeat(RankHeartbeat):
            def __init__(self, connection: RankConnection, limit: float) -> None:
                ranks.heartbeats[own.rank] = self
                super().__init__(connection, limit)

            def run(self) -> None:
                with suppress(SystemExit):
                    super().run()

        class Follower:
            def __init__(self, *_: object) -> None:
                ranks.reach("load")

            def follow(self, message: object) -> None:
                ranks.reach("before")
                meet()
                ranks.reach("after")

        c10d, group = MagicMock(), MagicMock()
        c10d.ProcessGroupGloo.side_effect = lambda *_: self.barrier.wait()
        c10d.ProcessGroup.return_value.abort.side_effect = self.abort
        group.allreduce.return_value.wait.side_effect = self.barrier.wait
        patch.setattr(process_group, "_c10d", c10d)
        patch.setattr(collectives, "_group", lambda name: group)
        patch.setattr(os, "_exit", sys.exit)  # ends the thread
        patch.setattr(leader, "start", self.start)
        patch.setattr(follower, "make_current", lambda device: self.reach("device"))
        patch.setattr(follower, "RankHeartbeat", Heartbeat)
        patch.setattr(follower, "Follower", Follower)

    def start(self, module: str, rank: int) -> RankProcess:
        (messages, far_messages), (status, far_status) = Pipe(), Pipe()
        thread = Thread(target=self._run, args=(rank, RankConnection(far_messages, far_status)), daemon=True)
        self.threads.append(thread)
        thread.start()
        return RankProcess(rank, RankConnection(messages, status), None)

    def _run(self, rank: int, connection: RankConnection) -> None:
        own.rank = rank
        with suppress(SystemExit):
            follower.run(connection)
        self.heartbeats[rank].leave()
        connection.close()

    def reach(self, place: str) -> None:
        """Call the function of this place, if there is one."""
        self.places.get((own.rank, place), lambda: None)()

    def hang(self) -> None:
        """Wait until the ranks are aborted."""
        self.over.wait(30)

    def abort(self) -> None:
        """Break the collective, and end the waits."""
        self.over.set()
        self.barrier.abort()

    def end(self) -> None:
        """Wait until all threads have ended, because `os._exit` ends the process again after the test."""
        self.abort()
        for thread in (*self.threads, *self.heartbeats.values()):
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadRanks]:
    """Three ranks: the first one is the test."""
    own.rank = 0
    made = ThreadRanks(monkeypatch, 3)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def begun(ranks: ThreadRanks) -> Iterator[Leader]:
    """The first of three ranks that have loaded."""
    made = Leader(ranks.config)
    made.begin()
    with closing(made):
        yield made


def meet() -> None:
    """Wait in the collective of all ranks."""
    collectives.Ranks(0, 3, "group").sum_(torch.ones(1))


def fault_of(begun: Leader, message: Any = RunStep(0.0)) -> RankFailed:  # noqa: B008
    """Send a message that the first rank applies in a collective; returns its failure."""
    with pytest.raises(RankFailed) as raised, begun.send(message):
        meet()
    return raised.value


def test_all_ranks_count_the_same_messages(ranks: ThreadRanks, begun: Leader) -> None:
    for number in (1, 2):
        with begun.send(RunStep(0.0)):
            meet()
            counts = [each.status().num_messages for each in (begun._monitor, *ranks.heartbeats.values())]
        assert counts == [number] * 3


def test_a_rank_that_hangs_is_named_and_not_one_that_waits_for_it(ranks: ThreadRanks, begun: Leader) -> None:
    ranks.places[2, "before"] = ranks.hang
    fault = fault_of(begun)
    assert fault.rank == 2
    assert "< reach, test_rank_monitor.py" in fault.cause


def test_a_rank_that_hangs_while_loading_is_named(ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank has loaded, and waits for the others."""
    monkeypatch.setattr(leader, "LOAD_SECONDS", SECONDS)
    ranks.places[2, "load"] = ranks.hang
    with pytest.raises(RankFailed) as raised:
        Leader(ranks.config).begin()
    assert raised.value.rank == 2


def test_a_rank_that_hangs_before_it_joins_is_named(ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits for it in the process group."""
    monkeypatch.setattr(leader, "LOAD_SECONDS", SECONDS)
    ranks.places[2, "device"] = ranks.hang
    with pytest.raises(RankFailed) as raised:
        Leader(ranks.config)
    assert raised.value.rank == 2


def fail() -> None:
    raise ZeroDivisionError("no device")


def test_the_start_ends_at_once_if_a_rank_fails_before_it_joins(ranks: ThreadRanks) -> None:
    """The first rank isn't waiting in the process group, where only a timeout would end it."""
    ranks.places[2, "device"] = fail
    with pytest.raises(RankFailed) as raised:
        Leader(ranks.config)
    assert str(raised.value) == "rank 2 raised ZeroDivisionError: no device"


class Slow:
    """A part of a message that hangs when rank 2 unpickles it."""

    def __reduce__(self) -> Any:
        return _unpickled, ()


hang_unpickling: Callable[[], object] = fail


def _unpickled() -> float:
    if own.rank == 2:
        hang_unpickling()
    return 0.0


def test_a_rank_that_hangs_in_reading_a_message_is_named(
    ranks: ThreadRanks, begun: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "hang_unpickling", ranks.hang)
    step: Any = RunStep
    fault = fault_of(begun, step(Slow()))
    assert fault.rank == 2
    assert "< _unpickled, test_rank_monitor.py" in fault.cause


def test_the_first_rank_is_not_named_if_it_cannot_send(ranks: ThreadRanks, begun: Leader) -> None:
    """Rank 2 hangs after a collective and does not read the next message, which is too long for the pipe."""
    ranks.places[2, "after"] = ranks.hang
    with begun.send(RunStep(0.0)):
        meet()
    long: Any = AddRequests((bytes(1 << 24),))  # type: ignore[arg-type]
    fault = fault_of(begun, long)
    assert fault.rank == 2
    assert "< reach, test_rank_monitor.py" in fault.cause


def status(num_messages: int, place: str) -> RankStatus:
    return RankStatus(num_messages, place == "idle", place == "collective", f"in {place}")


@pytest.mark.parametrize(
    ("statuses", "named"),
    [
        (["5 collective", "5 collective", "5 elsewhere"], 2),
        (["5 collective", "4 idle", "4 collective"], 2),
        (["5 elsewhere", "5 collective", "4 elsewhere"], 2),
        (["5 collective", "4 collective", "4 elsewhere"], 2),
        (["5 idle", "5 collective", "5 idle"], 1),
        (["5 collective", "5 collective", "5 collective"], 0),
    ],
)
def test_the_rank_that_others_wait_for_is_named(statuses: list[str], named: int) -> None:
    split = [each.split() for each in statuses]
    rank, fault = find_failure({rank: status(int(count), place) for rank, (count, place) in enumerate(split)}, 2.0)
    assert (rank, fault.cause) == (named, f"has stood still for 2 s in {split[named][1]}")


class SlowExit:
    """A process whose connections are closed some time before it has exited."""

    def wait(self, timeout: float) -> int:
        time.sleep(0.8)
        return 3

    def kill(self) -> None: ...


@pytest.fixture
def exiting() -> Iterator[RankMonitor]:
    """The monitor of rank 1, whose connections are closed while it exits."""
    (messages, far_messages), (status, far_status) = Pipe(), Pipe()
    process: Any = SlowExit()
    far_messages.close()
    far_status.close()
    ranks = [RankProcess(1, RankConnection(messages, status), process)]
    made = RankMonitor(lambda: ranks, lambda: None, 60.0)
    yield made
    made.close()


def test_a_rank_that_exits_slowly_is_named(exiting: RankMonitor) -> None:
    """A collective of the first rank breaks when the other rank closes its sockets."""
    fault = exiting.wait_over()
    assert str(fault) == "rank 1 has left with exit code 3"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_a_callback_does_not_stop_the_first_rank(exiting: RankMonitor) -> None:
    exiting.on_fault = lambda fault: fail()
    with pytest.raises(RankFailed):
        exiting.wait(StartPhase.READY)


def test_the_first_rank_reports_a_hang_first(ranks: ThreadRanks) -> None:
    """The time limit of another rank begins later and is longer: to load, for a step and for a long operation."""
    begun: list[Leader] = []
    grace: list[float] = []

    def compare() -> None:
        monitor, heartbeat = begun[0]._monitor, ranks.heartbeats[1]
        assert heartbeat._since >= monitor._since
        grace.append(heartbeat._limit - monitor._limit)

    ranks.places[1, "before"] = compare
    with closing(Leader(ranks.config)) as made:
        begun.append(made)
        compare()
        made.begin()
        for message in (RunStep(0.0), RunOperation("flush_disk")):
            with made.send(message):
                meet()
    assert grace == [GRACE_SECONDS] * 3


def test_the_first_rank_does_not_wait_for_ever_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has exited after it reported that it joins. Collectives have a longer time limit than joining."""
    monkeypatch.setattr(process_group, "JOIN_SECONDS", 0.2)
    store = TCPStore(LOCALHOST, 0, 2, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    with pytest.raises(CollectiveBroken, match=r"^ranks cannot join the process group: .*timeout"):
        ProcessGroup(store, collectives.Ranks(0, 2, local=(0, 2)), torch.device("cpu"), 60.0)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch.cuda.Event needs torch with CUDA, but no GPU")
def test_a_rank_that_waits_for_its_gpu_is_not_stuck() -> None:
    """Its stream may contain a collective that waits for another rank."""
    progress, event = Progress(0.0, 1.0), torch.cuda.Event()
    found: list[RankStatus] = []

    def profile(frame: FrameType, kind: str, function: Any) -> None:
        if kind == "c_call" and function.__name__ == "synchronize":
            found.append(progress.status())

    sys.setprofile(profile)
    event.synchronize()
    sys.setprofile(None)
    (waiting,) = found
    busy = progress.status()
    assert find_failure({0: waiting, 1: busy}, 2.0)[0] == 1
