"""The process of every rank but the first: it runs the same engine by the messages of the first rank."""

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
from bateleur.runner.distributed.connections import RankConnection, RankHeartbeat, StartPhase
from bateleur.runner.distributed.launch import TorchrunRendezvous, inherited
from bateleur.runner.distributed.process_group import JOIN_SECONDS, LOCALHOST, ProcessGroup
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.engine import messages
from bateleur.runner.engine.engine import Engine
from bateleur.runner.engine.input_processor import InputProcessor
from bateleur.runner.engine.memory_profile import needed_bytes
from bateleur.runner.engine.setup import EngineSetup, device_of
from bateleur.runner.outputs import RequestOutput, RequestOutputKind
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.utils.device import make_current, use_device

LOAD_SECONDS = 3600.0  # time limit of loading and capturing, and of long operations
STATS_SECONDS = 0.25  # between two replies with counters, if no request ends
GRACE_SECONDS = 5.0  # added to the limits of other ranks, so that the first rank reports a hang first


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The first message to another rank.

    size: number of ranks. port: port of the store in which ranks find each other. num_threads: threads of all ranks
    together, on a CPU. step_seconds: time limit of a step.
    """

    config: EngineConfig
    rank: int
    size: int
    port: int
    num_threads: int
    step_seconds: float


def time_limit(message: messages.Message, step_seconds: float) -> float:
    """Return the maximum seconds that a message may take. step_seconds: the maximum of a step."""
    return max(step_seconds, LOAD_SECONDS) if isinstance(message, messages.RunOperation) else step_seconds


def share_threads(device: torch.device, num_threads: int, size: int) -> None:
    """Set this rank's number of threads on a CPU: `num_threads` divided by the number of ranks, `size`."""
    if device.type == "cpu":
        torch.set_num_threads(max(1, num_threads // size))


class Follower:
    """The engine of a rank other than the first."""

    def __init__(self, config: EngineConfig, group: ProcessGroup) -> None:
        self._data_parallel = config.parallel.data_parallel_size > 1
        self._reported_at = 0.0  # when counters were last sent, in seconds of `time.monotonic`
        setup = EngineSetup.of(config, needed_bytes, group.ranks)
        self.engine = Engine(setup)
        self._inputs = InputProcessor(setup.tokenizer, setup.model.spec, setup.limits, config)

    def follow(self, message: messages.Message) -> messages.Reply | None:
        """Apply a message of the first rank. Returns the reply if this is a data-parallel rank, else None."""
        registry, outputs = self.engine.registry, list[RequestOutput]()
        registry.restore()  # as the first rank did before it sent this, for caches that `verify_graphs` overwrote
        match message:
            case messages.RunStep(seconds):
                self.engine.step(None if self._data_parallel else seconds)
            case messages.AddRequests(groups):
                registry.add_here(*map(self._with_members, groups))
            case messages.AbortRequest(request_id):
                outputs.append(registry.abort(request_id))
            case messages.AbandonRequests(request_ids):
                registry.abandoned.update(request_ids)
                registry.restore()
            case messages.ReportStats():
                self._reported_at = 0.0
            case messages.RunOperation():
                self.engine.operate_here(message)
        outputs += registry.take_all()
        if not self._data_parallel:
            return None
        now, stats = time.monotonic(), None
        if now - self._reported_at > STATS_SECONDS or any(output.finished for output in outputs):
            self._reported_at, stats = now, self.engine.metrics()
        return messages.Reply(outputs, stats)

    def _with_members(self, group: RequestGroup) -> RequestGroup:
        """Create the requests of a group, one per continuation, and return the group.

        A data-parallel rank sends its outputs to the first rank. Otherwise the outputs are not used, so the group is
        a copy with only final outputs. It is detokenized only if it has stop strings, which can end a request.
        """
        if not self._data_parallel:
            params = group.params if group.params.stop else replace(group.params, detokenize=False)
            group = replace(group, params=params, kind=RequestOutputKind.FINAL_ONLY)
        self._inputs.follow(group)
        return group


def follow(
    connection: RankConnection, heartbeat: RankHeartbeat, config: EngineConfig, group: ProcessGroup, step_seconds: float
) -> None:
    """Load the model, and process messages until the first rank disconnects. step_seconds: see `time_limit`."""
    follower = Follower(config, group)
    heartbeat.end()
    heartbeat.send(StartPhase.READY)
    while True:
        try:
            received = connection.messages.recv_bytes()
        except (EOFError, OSError):
            heartbeat.leave()
            return
        heartbeat.begin(step_seconds + GRACE_SECONDS)  # reading a message can hang, too
        message = pickle.loads(received)
        limit = time_limit(message, step_seconds) + GRACE_SECONDS
        group.limit(limit)
        heartbeat.set_limit(limit)
        reply = follower.follow(message)
        if reply is not None:
            connection.messages.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))
        heartbeat.end()


def run(connection: RankConnection) -> None:
    """Run a rank in a process that the first rank has started, and exit the process."""
    heartbeat = RankHeartbeat(connection, LOAD_SECONDS + GRACE_SECONDS)
    with _reporting_errors(heartbeat):
        start: WorkerStart = connection.messages.recv()
        ranks = Ranks(start.rank, start.size, local=(start.rank, start.size))
        device = device_of(start.config, ranks)
        make_current(device)
        share_threads(device, start.num_threads, start.size)
        store = TCPStore(LOCALHOST, start.port, start.size, timeout=timedelta(seconds=JOIN_SECONDS))
        heartbeat.send(StartPhase.STARTED)
        group = ProcessGroup(store, ranks, device, LOAD_SECONDS)
        follow(connection, heartbeat, start.config, group, start.step_seconds)
    os._exit(0)


def run_under_torchrun(config: EngineConfig, rendezvous: TorchrunRendezvous) -> NoReturn:
    """Run a rank in a process that torchrun has started. Raises SystemExit when the first rank has ended."""
    connection = rendezvous.connect()
    heartbeat = RankHeartbeat(connection, LOAD_SECONDS + GRACE_SECONDS)
    with _reporting_errors(heartbeat):
        device = device_of(config, rendezvous.ranks)
        with use_device(device):
            heartbeat.send(StartPhase.STARTED)
            group = ProcessGroup(rendezvous.store, rendezvous.ranks, device, LOAD_SECONDS)
            follow(connection, heartbeat, config, group, config.parallel.rank_timeout)
            group.close()
    raise SystemExit(0)


@contextmanager
def _reporting_errors(heartbeat: RankHeartbeat) -> Iterator[None]:
    """Report an error in the `with` block to the first rank, and exit the process."""
    try:
        yield
    except BaseException as error:
        heartbeat.fail(error)
        os._exit(1)


if __name__ == "__main__":  # in a process that the first rank has started
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # the first rank warns of the same
    run(inherited())
