"""The process group of the ranks of one engine, separate from any other group of the process."""

from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch._C import _distributed_c10d

from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.errors import CollectiveBroken
from bateleur.runner.utils.device import use_device

LOCALHOST = "127.0.0.1"
JOIN_SECONDS = 60.0  # time limit for ranks to find each other
_numbers = count(1)
_c10d: Any = _distributed_c10d  # whose stubs lack half of what is used here


class ProcessGroup:
    """Process group with Gloo between host memories and, if each rank has a GPU, NCCL between GPUs.

    Every rank must get the same bits from an all-reduce, because each rank samples from its own copy. A ring all-reduce
    does that: each part is summed on one rank and then sent to all. For gloo this was measured on 2, 3 and 4 ranks; for
    NCCL it follows from its documentation, and `cudagraph_checks` would detect a difference.
    """

    def __init__(self, store: Any, ranks: Ranks, device: torch.device, timeout: float) -> None:
        """Join the group with all ranks of `store` at the same time. timeout: maximum seconds of a collective.

        Raises CollectiveBroken if another rank does not join. The first rank joins when all others are about to, so it
        waits `JOIN_SECONDS` for a rank that may have exited. The others wait for `timeout`, until all have started.
        """
        name, rank, size = f"bateleur-{next(_numbers)}", ranks.rank, ranks.size
        alone = ranks.local[1] == size  # on this machine
        limit, gloo = timedelta(seconds=timeout), _c10d.ProcessGroupGloo
        self._limit, self._device = timeout if rank else JOIN_SECONDS, device
        options = gloo._Options()
        options._timeout = timedelta(seconds=self._limit)
        options._devices = [gloo.create_device(LOCALHOST) if alone else gloo.create_default_device()]
        self._group = group = _c10d.ProcessGroup(store, rank, size)
        try:
            backend = gloo(_c10d.PrefixStore("gloo", store), rank, size, options)
        except RuntimeError as error:
            raise CollectiveBroken(f"ranks cannot join the process group: {error}") from error
        group._register_backend(torch.device("cpu"), group.BackendType.GLOO, backend)
        group._set_default_backend(group.BackendType.GLOO)
        if device.type == "cuda":
            options = _c10d.ProcessGroupNCCL.Options()
            options._timeout = limit
            with use_device(device):
                backend = _c10d.ProcessGroupNCCL(_c10d.PrefixStore("nccl", store), rank, size, options)
            group._register_backend(device, group.BackendType.NCCL, backend)
            group._set_default_backend(group.BackendType.NCCL)
        group._set_group_name(name)
        _c10d._register_process_group(name, group)
        self.ranks = Ranks(rank, size, name, ranks.local)
        self.limit(timeout)

    def limit(self, timeout: float) -> None:
        """Set the timeout of collectives, in seconds."""
        if timeout != self._limit:
            self._group.set_timeout(timedelta(seconds=timeout))
            self._limit = timeout

    def abort(self) -> None:
        """Abort NCCL collectives, from any thread. Gloo collectives end when the other processes exit."""
        with use_device(self._device):
            self._group.abort()

    def close(self) -> None:
        """Destroy the group and end its threads. No rank may be in a collective."""
        _c10d._unregister_process_group(self.ranks.group)
        with use_device(self._device):
            self._group.shutdown()
            del self._group  # a thread of gloo that frees a tensor while the interpreter ends would abort the process
