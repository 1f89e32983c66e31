"""Any of several ranks but the first: the same engine, which does what it is told."""

from __future__ import annotations

import os
import pickle
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.distributed.connections import Link
from bateleur.runner.distributed.heartbeat import RankHeartbeat
from bateleur.runner.distributed.launch import inherited
from bateleur.runner.distributed.process_group import LOCALHOST, Group
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.distributed.torchrun import Meeting
from bateleur.runner.engine.engine import Engine
from bateleur.runner.engine.input_processor import InputProcessor
from bateleur.runner.engine.memory_profile import needed_bytes
from bateleur.runner.engine.messages import (
    AbandonRequests,
    AbortRequest,
    AddAdmittedRequests,
    EngineOperation,
    Message,
    Reply,
    ReportStats,
    RunStep,
    WireMessage,
)
from bateleur.runner.engine.setup import EngineSetup, device_of
from bateleur.runner.outputs import RequestOutput, RequestOutputKind
from bateleur.runner.requests.admitted_request import AdmittedRequest
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.utils.device import make_current, use_device

LOADING = 3600.0
"""Seconds that loading and capturing may take, and what is as long."""
JOINING = 60.0
"""Seconds in which ranks that are there find each other."""
STATS_PACE = 0.25
"""Seconds between two replies with counters, where no request ends."""
LATER = 5.0
"""Seconds in which the first rank says first what hangs."""


@dataclass(frozen=True, slots=True)
class Start:
    """What another rank is told first."""

    config: EngineConfig
    rank: int
    size: int
    port: int
    """Of the store at which ranks find each other."""
    threads: int
    """Of all ranks, on a CPU."""
    limit: float
    """Seconds that a step may take."""


def patience(order: Message, limit: float) -> float:
    """Seconds that an order may take. limit: of a step."""
    return max(limit, LOADING) if isinstance(order, EngineOperation) else limit


def share_threads(device: torch.device, threads: int, size: int) -> None:
    """On a CPU the ranks share the threads of one process."""
    if device.type == "cpu":
        torch.set_num_threads(max(1, threads // size))


class Follower:
    """An engine whose requests are those of the first rank, and nobody reads what it reports; or one of data-parallel
    ranks, whose requests are its own, and which replies."""

    def __init__(self, config: EngineConfig, group: Group) -> None:
        self._apart = config.parallel.data_parallel_size > 1
        self._told = 0.0
        """When counters were last told."""
        setup = EngineSetup.of(config, needed_bytes, group.ranks)
        self.engine = Engine(setup)
        self._admission = InputProcessor(setup.tokenizer, setup.model.spec, setup.limits, config)

    def follow(self, order: WireMessage) -> Reply | None:
        """Do what the first rank does, or has told this one to do."""
        ledger, outputs = self.engine.ledger, list[RequestOutput]()
        match order:
            case RunStep(seconds):
                self.engine.step(None if self._apart else seconds)
            case AddAdmittedRequests(tickets):
                ledger.add(*map(self._group_of, tickets))
            case AbortRequest(request_id):
                outputs.append(ledger.abort(request_id))
            case AbandonRequests(request_ids):
                ledger.forsaken.update(request_ids)
                ledger.restore()
            case ReportStats():
                self._told = 0.0
            case _:
                self.engine.errands.follow(order)
        outputs += ledger.take_unclaimed()
        return self._reply(outputs) if self._apart else None

    def _reply(self, outputs: list[RequestOutput]) -> Reply:
        now, stats = time.monotonic(), None
        if now - self._told > STATS_PACE or any(output.finished for output in outputs):
            self._told, stats = now, self.engine.metrics()
        return Reply(outputs, stats)

    def _group_of(self, ticket: AdmittedRequest) -> RequestGroup:
        """Without the text that nobody reads."""
        if self._apart:
            return self._admission.follow(ticket)
        params = ticket.params
        if not params.stop:
            params = replace(params, detokenize=False)
        return self._admission.follow(replace(ticket, params=params, kind=RequestOutputKind.FINAL_ONLY))


def follow(link: Link, minder: RankHeartbeat, config: EngineConfig, group: Group, limit: float) -> None:
    """Load, and follow orders until the first rank closes the link. limit: seconds that a step may take."""
    follower = Follower(config, group)
    minder.ready()
    while True:
        try:
            message = link.orders.recv_bytes()
        except (EOFError, OSError):
            minder.leave()
            return
        order = pickle.loads(message)
        group.limit(patient := patience(order, limit) + LATER)
        minder.begin(patient)
        reply = follower.follow(order)
        if reply is not None:
            link.orders.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))
        minder.end()


def run(link: Link) -> None:
    """Be another rank to whoever is at the other end, and end the process."""
    minder = RankHeartbeat(link, LOADING)
    with _telling(minder):
        start: Start = link.orders.recv()
        minder.here()
        ranks = Ranks(start.rank, start.size, local=(start.rank, start.size))
        device = device_of(start.config, ranks)
        make_current(device)
        share_threads(device, start.threads, start.size)
        store = TCPStore(LOCALHOST, start.port, start.size, timeout=timedelta(seconds=JOINING))
        follow(link, minder, start.config, Group(store, ranks, device, LOADING), start.limit)
    os._exit(0)


def run_met(config: EngineConfig, meeting: Meeting) -> NoReturn:
    """Be another rank in a process that torchrun has started; raises SystemExit when the first has ended."""
    link = meeting.connect()
    minder = RankHeartbeat(link, LOADING)
    with _telling(minder):
        minder.here()
        device = device_of(config, meeting.ranks)
        with use_device(device):
            group = Group(meeting.store, meeting.ranks, device, LOADING)
            follow(link, minder, config, group, config.parallel.rank_timeout)
            group.close()
    raise SystemExit(0)


@contextmanager
def _telling(minder: RankHeartbeat) -> Iterator[None]:
    """What is raised is told to the first rank, and ends the process."""
    try:
        yield
    except BaseException as error:
        minder.fail(error)
        os._exit(1)


def main() -> None:
    """In a process that the first rank has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # the first rank has the same to say
    run(inherited())


if __name__ == "__main__":
    main()
