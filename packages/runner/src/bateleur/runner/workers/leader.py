"""The first of several ranks. It starts the others, and sends each message of its engine to them."""

import os
import pickle
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import NoReturn, Self

import torch
from torch._C._distributed_c10d import TCPStore

from bateleur.runner.assets import shipped_model
from bateleur.runner.checkpoint.open import open_checkpoint
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.distributed.connections import RankProcess, StartPhase, type_and_message
from bateleur.runner.distributed.launch import TorchrunRendezvous, start
from bateleur.runner.distributed.monitor import RankMonitor
from bateleur.runner.distributed.process_group import JOIN_SECONDS, LOCALHOST, ProcessGroup
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.engine.messages import AddRequests, Message, Reply
from bateleur.runner.engine.setup import device_of
from bateleur.runner.errors import CollectiveBroken, EngineDead, RankFailed
from bateleur.runner.models.sharding import shard_experts, shard_model
from bateleur.runner.utils.arguments import refuse, shown
from bateleur.runner.utils.device import resolve_device
from bateleur.runner.workers import follower
from bateleur.runner.workers.follower import GRACE_SECONDS, LOAD_SECONDS, WorkerStart


def _start(size: int) -> list[RankProcess]:
    return [start("bateleur.runner.workers.follower", rank) for rank in range(1, size)]


class Leader:
    """Sends each message of an engine to the other ranks before this rank applies it.

    A message that was sent must be applied: signals are delayed meanwhile, and an error ends all ranks.
    """

    def __init__(self, config: EngineConfig, rendezvous: TorchrunRendezvous | None = None) -> None:
        """Start the other ranks, or join those that torchrun has started."""
        size = config.parallel.num_ranks
        self._limit = config.parallel.rank_timeout
        self._process, self._closed = os.getpid(), False
        self._interrupts, self._threads = DeferredInterrupts(), torch.get_num_threads()
        self._group: ProcessGroup | None = None
        accept = partial(_start, size) if rendezvous is None else rendezvous.accept
        self._monitor = RankMonitor(accept, self._abort, LOAD_SECONDS)
        try:
            ranks = Ranks(0, size, local=(0, size)) if rendezvous is None else rendezvous.ranks
            self._store = self._send_start(config, size) if rendezvous is None else rendezvous.store
            self._monitor.wait(StartPhase.STARTED)
            device = device_of(config, ranks)
            if rendezvous is None:  # else torchrun has set them
                follower.share_threads(device, self._threads, size)
            self._group = ProcessGroup(self._store, ranks, device, LOAD_SECONDS)
            self.ranks = self._group.ranks
        except BaseException as error:
            self.give_up(error)

    def _abort(self) -> None:
        """Abort collectives that this rank waits in. Called by the monitor's thread."""
        if self._group is not None:
            self._group.abort()

    def _send_start(self, config: EngineConfig, size: int) -> TCPStore:
        """Send each other rank its `WorkerStart`, with the port of the store; returns the store."""
        joining = timedelta(seconds=JOIN_SECONDS)
        store = TCPStore(LOCALHOST, 0, size, is_master=True, wait_for_workers=False, timeout=joining)
        for each in self._monitor.ranks:
            start = WorkerStart(config, each.rank, size, store.port, self._threads, self._limit)
            each.connection.messages.send(start)
        return store

    @classmethod
    def of(cls, config: EngineConfig) -> Self | None:
        """Start the ranks of a configuration; None for one rank.

        In a process that torchrun has started as another rank, this runs that rank to its end and raises SystemExit.
        Raises ValueError, before a rank is started, for models that cannot be divided among the ranks, for more ranks
        than GPUs, and for options that cannot be sent to another process.
        """
        size, model = config.parallel.num_ranks, config.model
        if size == 1:
            return None
        data_parallel = config.parallel.data_parallel_size > 1
        option = f"{'data' if data_parallel else 'tensor'}_parallel_size"
        share = shard_experts if data_parallel else shard_model
        checkpoint = open_checkpoint(model.model or shipped_model(), model.hf_overrides, dequantize=model.dequantizes)
        share(checkpoint.spec, Ranks(0, size, "none"))
        device = resolve_device(model.device)
        rendezvous = TorchrunRendezvous.join(JOIN_SECONDS)
        here = size if rendezvous is None else rendezvous.ranks.local[1]
        if device.type == "cuda" and (device.index is not None or torch.cuda.device_count() < here):
            rule = f"auto or cuda with {option} = {size}, on a machine with {here} GPUs"
            refuse("device", model.device, f"{rule}; this one has {torch.cuda.device_count()}")
        if hasattr(config.speculative.drafter, "speculator"):
            refuse("drafter", config.speculative.drafter, f"no head with {option} = {size}: say its folder as draft")
        if rendezvous is None:
            for name in ("drafter", "draft_policy"):
                try:
                    pickle.dumps(value := getattr(config.speculative, name))
                except Exception as error:
                    refuse(name, value, f"something that pickle can send to other ranks: {error}")
        elif rendezvous.ranks.size != size:
            refuse(option, size, f"1 or {rendezvous.ranks.size}, which torchrun has started")
        elif rendezvous.ranks.rank:
            follower.run_under_torchrun(config, rendezvous)
        return cls(config, rendezvous)

    def begin(self) -> None:
        """Wait until all other ranks have loaded the model; called when this rank has. Raises RankFailed."""
        self._monitor.wait(StartPhase.READY)
        self._monitor.end()
        if self._group is not None:
            self._group.limit(self._limit + 2 * GRACE_SECONDS)

    def on_fault(self, callback: Callable[[RankFailed], None]) -> None:
        """Set the function that the monitor calls when a rank has failed, see `RankMonitor.on_fault`."""
        self._monitor.on_fault = callback

    def send(self, message: Message) -> Self:
        """Send a message to all ranks. Returns a context in which this rank applies it, see `SendMessage`.

        Raises EngineDead, also for an error inside the context, and ValueError for a message that cannot be pickled.
        """
        return self._send(follower.time_limit(message, self._limit), [_pickle(message)] * self.ranks.size)

    def send_each(self, messages: Sequence[Message]) -> Self:
        """Send each rank its own message, by rank. Returns a context in which this rank applies its own."""
        return self._send(self._limit, [_pickle(each) for each in messages])

    def _send(self, limit: float, messages: Sequence[bytes]) -> Self:
        if (fault := self._monitor.fault) is not None or self._closed:
            raise EngineDead("it was closed") if fault is None else fault.copy()
        self._interrupts.hold()
        self._monitor.begin(limit)
        try:
            if self._group is not None:
                self._group.limit(limit + 2 * GRACE_SECONDS)
            for each in self._monitor.ranks:
                each.connection.messages.send_bytes(messages[each.rank])
        except BaseException as error:
            self._fail(error)
        return self

    def replies(self) -> list[Reply]:
        """Wait for the replies of the other ranks to their messages; returns them in the order of ranks."""
        self._monitor.wait_for_others()
        return [pickle.loads(each.connection.messages.recv_bytes()) for each in self._monitor.ranks]

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._monitor.end()
        if error is not None:
            self._fail(error)
        self._interrupts.release()

    def _fail(self, error: BaseException) -> NoReturn:
        """End all ranks. Raise the failure of another rank if there is one, else RankFailed for this rank."""
        fault = self._monitor.wait_over()
        if isinstance(error, RankFailed):  # found by all ranks
            fault = error
        self._monitor.fault = fault = fault or RankFailed(0, f"raised {type_and_message(error)}")
        self.close()
        if fault is error:
            raise fault
        raise fault from error

    def give_up(self, error: BaseException) -> NoReturn:
        """End all ranks after an error during the start, and raise the error, or the failure of another rank."""
        fault = self._monitor.wait_over() if isinstance(error, CollectiveBroken | OSError) else None
        self.close()
        if fault is not None and fault is not error:
            raise fault from error
        raise error

    def close(self) -> None:
        """End the other ranks. Can be called more than once."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._monitor.close()
        self._interrupts.release()
        if self._group is not None:
            self._group.close()
        torch.set_num_threads(self._threads)


def _pickle(message: Message) -> bytes:
    try:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        groups = message.groups if isinstance(message, AddRequests) else ()
        asked = ", ".join(shown(group.request_id) for group in groups)
        what = f"request_id is {asked}; it and its params" if asked else type(message).__name__
        raise ValueError(f"{what} must be what pickle can send to other ranks: {error}") from error


class DeferredInterrupts:
    """Delays SIGINT from `hold` to `release`, in the main thread. A second Ctrl-C is not delayed."""

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], object] | None = None
        self._pending = False

    def hold(self) -> None:
        """Delay signals from here on."""
        if current_thread() is main_thread() and callable(before := signal.getsignal(signal.SIGINT)):
            self._before, self._pending = before, False
            signal.signal(signal.SIGINT, self._note)

    def release(self) -> None:
        """Stop delaying, and raise a signal that has arrived."""
        if (before := self._before) is not None:
            self._before = None
            signal.signal(signal.SIGINT, before)
            if self._pending:
                before(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self.release()
        self._pending = True
