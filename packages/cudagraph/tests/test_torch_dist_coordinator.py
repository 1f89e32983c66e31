"""`TorchDistCoordinator` in three processes: every rank gets the joint dispatch, by one collective per step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

# The program of each process. All processes draw the same steps of all ranks, so each can compute the expected result.
RANK = r"""
import random, sys
from datetime import timedelta

import torch
import torch.distributed as dist

from bateleur.cudagraph.data_parallel import RankStep, dispatch_jointly
from bateleur.cudagraph.modes import CudaGraphMode
from bateleur.cudagraph.batch_descriptor import UnpaddedBatch
from bateleur.cudagraph.dispatcher import CudagraphDispatcher
from bateleur.cudagraph.data_parallel import TorchDistCoordinator

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=30)
)
pair = dist.new_group([0, 1])
calls = []
for name in ("all_gather", "all_reduce", "broadcast", "all_gather_into_tensor", "gather", "barrier", "send", "recv"):
    def counted(*args, _name=name, _real=getattr(dist, name), **kwargs):
        calls.append((_name, [t.data_ptr() for t in args[0]] + [args[1].data_ptr()]))
        return _real(*args, **kwargs)
    setattr(dist, name, counted)

dispatcher = CudagraphDispatcher.make(
    CudaGraphMode.FULL_AND_PIECEWISE, range(1, 80), max_num_reqs=40, query_lens=(1, 3), variants=[(), ("lora", 2)]
)
rng = random.Random(7)

def draw():
    kind, num_reqs = rng.random(), rng.randint(1, 45)
    ready = None if rng.random() < 0.7 else frozenset(key for key in dispatcher.keys if rng.random() < 0.9)
    if kind < 0.4:
        return RankStep(None, ready)
    length = rng.choice((1, 1, 1, 3))
    variant = ("lora", 2) if rng.random() < 0.1 else ()
    return RankStep(UnpaddedBatch(num_reqs, num_reqs * length, length, length, kind < 0.9, variant), ready)

def check(group, size, num_steps):
    coordinator = TorchDistCoordinator(group, dispatcher)
    calls.clear()
    agreed = []
    for _ in range(num_steps):
        steps = [draw() for _ in range(size)]
        if rank < size:
            agreed.append(coordinator.coordinate(steps[rank]))
            assert agreed[-1] == dispatch_jointly(steps, dispatcher), (agreed[-1], steps)
    assert [name for name, _ in calls] == ["all_gather"] * num_steps
    assert len({tuple(pointers) for _, pointers in calls}) == 1, "buffers are allocated once"
    return agreed

agreed = check(None, world, 40)
state = rng.getstate()
if rank < 2:
    agreed += check(pair, 2, 20)
rng.setstate(state)
try:
    TorchDistCoordinator(None, CudagraphDispatcher.make(CudaGraphMode.FULL, [1, 2, 4 + (rank == world - 1)]))
except ValueError as error:
    print("refused:", error)
kinds = {(each.reason.name, each.descriptor is None) for each in agreed}
assert {("IDLE", True), ("DECODE", False), ("PIECEWISE", False)} < kinds, kinds
dist.destroy_process_group()
print("done")
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: Any) -> list[str]:
    """Output of three processes. All are in one group, and two of them in a second group."""
    store: Path = tmp_path_factory.mktemp("store") / "store"
    arguments = [[sys.executable, "-c", RANK, str(rank), "3", str(store)] for rank in range(3)]
    running = [subprocess.Popen(a, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for a in arguments]
    try:
        finished = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, finished, strict=True):
        assert process.returncode == 0, errors
    return [output for output, _ in finished]


def test_every_rank_gets_the_joint_dispatch_by_one_collective_per_step(outputs: list[str]) -> None:
    assert [output.splitlines()[-1] for output in outputs] == ["done"] * 3


def test_different_dispatchers_are_refused_on_every_rank(outputs: list[str]) -> None:
    message = (
        "refused: dispatcher must be equal on all ranks, but rank 2 differs from rank 0; "
        "make it from the same arguments on every rank"
    )
    assert [output.splitlines()[0] for output in outputs] == [message] * 3
