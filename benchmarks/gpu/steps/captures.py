"""The CUDA graph backend alone: whole bodies, pieces, refused captures and what works after them, memory of pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bateleur.cudagraph import BatchExecutionDescriptor, CaptureError, CudaGraphMode, GraphBackend, get_backend

from ..job import Job

FULL = BatchExecutionDescriptor(CudaGraphMode.FULL, 4, 4, 1, 1)
PIECES = BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, 4)
MIB = 1 << 20
LAYERS, TOKENS, WIDTH = 8, (1 << 15, 1 << 14, 1 << 13, 1 << 12), 512
"""Of the measurement of memory: 64 MiB go to an eager part in each layer of the largest key."""
Bodies = dict[str, Callable[[Any], object]]


def run(job: Job) -> None:
    """Run all parts; without a GPU on the backend that records operators."""
    backend = get_backend("cuda" if job.cuda else "recorded", job.device)
    x, weight = torch.randn(4, 512, device=job.device), torch.randn(512, 512, device=job.device)

    def eager_scale(scale: float, y: Tensor) -> Tensor:
        return y * scale

    with job.part("full"), backend.session():
        whole = backend.capture(lambda _: (x @ weight).relu(), FULL, None)
        job.compare("full", whole.replay(None), (x @ weight).relu(), 1e-6)
    with job.part("pieces"), backend.session():
        cut = backend.capture(lambda execution: execution.eager(eager_scale, x @ weight) + 1, PIECES, 2.0)
        job.compare("pieces", cut.replay(3.0), (x @ weight) * 3 + 1, 1e-6, graphs=cut.num_graphs)
    for name, body in refused_bodies(x, weight).items():
        if name == "item" or job.cuda:
            with job.part(f"refused: {name}"):
                refused(job, backend, name, body, x)
    with job.part("earlier graph"):
        job.compare("earlier graph after refused captures", whole.replay(None), (x @ weight).relu(), 1e-6)
    if job.needs_cuda():
        with job.part("memory that pieces keep"):
            memory(job)


def refused_bodies(x: Tensor, weight: Tensor) -> Bodies:
    """Bodies that no graph can hold, because they wait for the device."""
    return {
        "item": lambda _: (x @ weight).sum().item(),
        "synchronize": lambda _: synchronized(x @ weight),
        "copy to the host": lambda _: (x @ weight).cpu(),
        "data from the host": lambda _: x + torch.tensor([1.0], device=x.device),
    }


def synchronized(x: Tensor) -> Tensor:
    """Wait for the device."""
    torch.cuda.synchronize()
    return x


def refused(job: Job, backend: GraphBackend, name: str, body: Callable[[Any], object], x: Tensor) -> None:
    """Capture a body that must be refused; then a good one, and memory from both allocators."""
    try:
        with backend.session():
            backend.capture(body, FULL, None)
    except CaptureError as error:
        said = str(error)[:100]
    else:
        job.record.check(f"refused: {name}", False, "the capture succeeded; a replay would not do what the body did")
        return
    with backend.session():
        after = backend.capture(lambda _: (x + 2).sin(), FULL, None)
    job.compare(f"refused: {name}; the next capture", after.replay(None), (x + 2).sin(), 1e-6, said=said)
    if job.cuda:
        del after
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        block = torch.empty(256 * MIB, dtype=torch.uint8, device=x.device)
        pinned = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
        del block, pinned
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_reserved() - before
        why = f"{kept / MIB:.0f} MiB are kept after a refused capture: the allocator still counts it as running"
        job.record.check(f"refused: {name}; freed memory", kept < 256 * MIB, why)


def memory(job: Job) -> None:
    """Capture keys of falling size, and compare their memory with that of all arguments of all eager parts."""
    backend = get_backend("cuda", job.device)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held: list[Any] = []
    inputs = [torch.randn(tokens, WIDTH, device=job.device) for tokens in TOKENS]
    before = torch.cuda.memory_reserved()
    for x in inputs:

        def body(execution: Any, x: Tensor = x) -> Tensor:
            for _ in range(LAYERS):
                x = execution.eager(lambda _, y: y, x + 1) * 1.0
            return x

        with backend.session():
            held.append(backend.capture(body, PIECES, None))
    taken = (torch.cuda.memory_reserved() - before) / MIB
    layer = TOKENS[0] * WIDTH * 4 / MIB
    every = LAYERS * layer * sum(TOKENS) / TOKENS[0]
    job.record.check(
        "memory that pieces keep",
        taken < every / 2,
        f"{taken:.0f} MiB: pieces keep the arguments of eager parts, which are {every:.0f} MiB in all",
        key=True,
        taken_MiB=taken,
        one_layer_MiB=layer,
        arguments_of_all_keys_MiB=every,
    )
