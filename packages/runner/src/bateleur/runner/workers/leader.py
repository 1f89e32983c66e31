"""The first of several ranks: it starts the others, and tells them what it does."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from bateleur.runner.assets import shipped_model
from bateleur.runner.checkpoint.open import open_checkpoint
from bateleur.runner.config.engine_config import EngineConfig, SpeculativeConfig
from bateleur.runner.distributed.connections import Member
from bateleur.runner.distributed.heartbeat import named
from bateleur.runner.distributed.interrupts import Interrupts
from bateleur.runner.distributed.launch import start
from bateleur.runner.distributed.monitor import RankMonitor
from bateleur.runner.distributed.process_group import LOCALHOST, Group
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.distributed.torchrun import Meeting
from bateleur.runner.engine.messages import AddAdmittedRequests, AddRequests, Message, Reply, WireMessage
from bateleur.runner.engine.setup import device_of
from bateleur.runner.errors import CollectiveBroken, EngineDead, RankFailed
from bateleur.runner.models.sharding import shard_experts, shard_model
from bateleur.runner.requests.admitted_request import AdmittedRequest
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.utils.arguments import refuse, shown
from bateleur.runner.utils.device import resolve_device
from bateleur.runner.workers.follower import JOINING, LATER, LOADING, Start, patience, run_met, share_threads


def _start(size: int) -> list[Member]:
    return [start("bateleur.runner.workers.follower", rank) for rank in range(1, size)]


class Leader:
    """What an engine tells is told to the other ranks, and then carried out by all.

    Nothing that was told may break off here: interrupts wait, and an error is the end of all ranks.
    """

    def __init__(self, config: EngineConfig, meeting: Meeting | None = None) -> None:
        """Start the others, or meet those that torchrun has started, and join them."""
        size = config.parallel.num_ranks
        self._limit = config.parallel.rank_timeout
        self._process, self._closed = os.getpid(), False
        self._interrupts, self._threads = Interrupts(), torch.get_num_threads()
        self._group: Group | None = None
        self._watch = RankMonitor(partial(_start, size) if meeting is None else meeting.accept, self._free)
        try:
            self._watch.begin(LOADING)
            ranks = Ranks(0, size, local=(0, size)) if meeting is None else meeting.ranks
            self._store = self._tell_start(config, size) if meeting is None else meeting.store
            self._watch.wait_here()
            device = device_of(config, ranks)
            if meeting is None:  # else they are set by whoever has started them
                share_threads(device, self._threads, size)
            self._group = Group(self._store, ranks, device, LOADING)
            self.ranks = self._group.ranks
        except BaseException as error:
            self.give_up(error)

    def _tell_start(self, config: EngineConfig, size: int) -> TCPStore:
        """Tell the others what they are, and where they meet."""
        joining = timedelta(seconds=JOINING)
        store = TCPStore(LOCALHOST, 0, size, is_master=True, wait_for_workers=False, timeout=joining)
        for member in self._watch.members:
            told = Start(config, member.rank, size, store.port, self._threads, self._limit)
            member.link.orders.send(told)
        return store

    @classmethod
    def of(cls, config: EngineConfig) -> Leader | None:
        """The first of several ranks, and the others; None for one alone. In a process that torchrun has
        started as another rank it follows the first to its end, and raises SystemExit.

        Raises ValueError, before any is started, for a model that cannot be split so, for more ranks than GPUs, and for
        options that cannot be sent to another process.
        """
        size, named = config.parallel.num_ranks, config.parallel.size_name
        if size == 1:
            return None
        folder = config.model.model
        share = shard_model if config.parallel.data_parallel_size == 1 else shard_experts
        checkpoint = open_checkpoint(folder or shipped_model(), config.model.hf_overrides)
        share(checkpoint.spec, Ranks(0, size, "none"))
        device = resolve_device(config.model.device)
        meeting = Meeting.here(JOINING)
        here = size if meeting is None else meeting.ranks.local[1]
        if device.type == "cuda" and (device.index is not None or torch.cuda.device_count() < here):
            rule = f"auto or cuda with {named} = {size}, on a machine with {here} GPUs"
            refuse("device", config.model.device, f"{rule}; this one has {torch.cuda.device_count()}")
        _check_drafts(config.speculative, f"{named} = {size}")
        if meeting is None:
            _check_portable(config)
        elif meeting.ranks.size != size:
            rule = f"1 or {meeting.ranks.size}, which torchrun has started"
            refuse(named, size, rule)
        elif meeting.ranks.rank:
            run_met(config, meeting)
        return cls(config, meeting)

    def _free(self) -> None:
        if self._group is not None:
            self._group.abort()

    def begin(self) -> None:
        """This rank is loaded. Waits for the others; raises what has failed on the way."""
        self._watch.wait_ready()
        self._watch.end()
        if self._group is not None:
            self._group.limit(self._limit + 2 * LATER)

    def on_fault(self, told: Callable[[RankFailed], None]) -> None:
        """See `RankMonitor.on_fault`."""
        self._watch.on_fault = told

    def tell(self, order: Message) -> Leader:
        """See `SendMessage`. Raises EngineDead, also for what is raised inside.

        Raises ValueError, before anybody is told, for what cannot be sent to other processes.
        """
        wire = (
            AddAdmittedRequests(tuple(map(AdmittedRequest.of, order.groups)))
            if isinstance(order, AddRequests)
            else order
        )
        return self._tell(patience(order, self._limit), [_written(wire)] * self.ranks.size)

    def tell_each(self, orders: Sequence[WireMessage]) -> Leader:
        """The same, where each rank has an order of its own, by rank; inside of the context they reply."""
        return self._tell(self._limit, [_written(each) for each in orders])

    def _tell(self, limit: float, messages: Sequence[bytes]) -> Leader:
        if self._watch.fault is not None or self._closed:
            raise self._again()
        self._interrupts.hold()
        self._watch.begin(limit)
        try:
            if self._group is not None:
                self._group.limit(limit + 2 * LATER)
            for member in self._watch.members:
                member.link.orders.send_bytes(messages[member.rank])
        except BaseException as error:
            self._fail(error)
        return self

    def replies(self) -> list[Reply]:
        """Of the other ranks, in their order, to what they were told; waits until they have done it."""
        self._watch.rest()
        return [pickle.loads(member.link.orders.recv_bytes()) for member in self._watch.members]

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.end()
        if error is not None:
            self._fail(error)
        self._interrupts.release()

    def _again(self) -> EngineDead:
        """What is told to whoever comes later."""
        fault = self._watch.fault
        return EngineDead("it was closed") if fault is None else fault.copy()

    def _fail(self, error: BaseException) -> NoReturn:
        """End all, and raise why."""
        fault = self._watch.wait_over()
        if isinstance(error, RankFailed):  # all ranks have found it
            fault = error
        self._watch.fault = fault = fault or RankFailed(0, f"raised {named(error)}")
        self.close()
        if fault is error:
            raise fault
        raise fault from error

    def give_up(self, error: BaseException) -> NoReturn:
        """What broke off before there was an engine: end all, and raise it, or what another rank has failed of."""
        fault = self._watch.wait_over() if isinstance(error, CollectiveBroken | OSError) else None
        self.close()
        if fault is not None and fault is not error:
            raise fault from error
        raise error

    def close(self) -> None:
        """End the other ranks. More than once is once."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._watch.close()
        self._interrupts.release()
        if self._group is not None:
            self._group.close()
        torch.set_num_threads(self._threads)


def _admitted(groups: Sequence[RequestGroup]) -> tuple[AdmittedRequest, ...]:
    return tuple(map(AdmittedRequest.of, groups))


def _written(order: WireMessage) -> bytes:
    try:
        return pickle.dumps(order, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        tickets = order.tickets if isinstance(order, AddAdmittedRequests) else ()
        asked = ", ".join(shown(each.request_id) for each in tickets)
        what = f"request_id is {asked}; it and its params" if asked else f"{type(order).__name__}"
        raise ValueError(f"{what} must be what pickle can send to other ranks: {error}") from error


def _check_drafts(config: SpeculativeConfig, size: str) -> None:
    if hasattr(config.drafter, "speculator"):
        rule = f"no head with {size}: say its folder as draft"
        refuse("drafter", config.drafter, rule)


def _check_portable(config: EngineConfig) -> None:
    for name in ("drafter", "draft_policy"):
        value = getattr(config.speculative, name)
        try:
            pickle.dumps(value)
        except Exception as error:
            refuse(name, value, f"something that pickle can send to other ranks: {error}")
