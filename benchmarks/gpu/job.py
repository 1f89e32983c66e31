"""What a step is given, and how it compares and times."""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .record import Record

NO_DEVICE = "this machine has no CUDA device"
NO_TIME = "no time was left"


@dataclass
class Job:
    """A step's case, sizes, device, time and record.

    Attributes:
        step, case: the two parts of the step's name.
        quick: use small sizes; always on a CPU.
        deadline: in seconds of `time.time()`.
    """

    step: str
    case: str
    quick: bool
    device: torch.device
    deadline: float
    record: Record
    _rate: float = field(default=0.0, init=False)

    @property
    def cuda(self) -> bool:
        """Whether the step runs on a GPU."""
        return self.device.type == "cuda"

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.deadline - time.time()

    def needs_cuda(self) -> bool:
        """Return whether there is a GPU; without one record that the step is skipped."""
        if not self.cuda:
            self.record.skip(self.step if not self.case else f"{self.step}:{self.case}", NO_DEVICE)
        return self.cuda

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record an error as a failure and go on after it, unless the device is unusable after the error."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            where = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{type(error).__name__}: {str(error)[:350]} ({Path(where.filename).name}:{where.lineno})"
            self.record.check(name, False, why)
            self.synchronize()

    def has_time(self, name: str, seconds: float) -> bool:
        """Return whether so many seconds are left; if not, record that `name` is skipped."""
        if self.left() < seconds:
            self.record.skip(name, NO_TIME)
        return self.left() >= seconds

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    # --- comparisons ----------------------------------------------------------------------------------------

    def compare(self, name: str, got: Tensor, want: Tensor, bound: float, **facts: Any) -> None:
        """Record whether the relative error |got - want| / |want| over all entries is at most `bound`."""
        found = relative_error(got, want)
        why = f"relative error {found:.3g} is above {bound:.3g}"
        self.record.check(name, found <= bound, why, error=found, bound=bound, **facts)

    def same(self, name: str, got: Tensor, want: Tensor, why: str) -> None:
        """Record whether two tensors are equal bit for bit, NaN equal to NaN; `why` says what a difference means."""
        equal = (got == want) | (got.isnan() & want.isnan()) if got.is_floating_point() else got == want
        wrong = int((~equal).sum())
        self.record.check(name, wrong == 0, f"{wrong} of {equal.numel()} entries differ: {why}")

    # --- times ----------------------------------------------------------------------------------------------

    @property
    def copy_rate(self) -> float:
        """Bytes a second, read and written, of a large copy, measured once in each process: the bound of memory.

        A kernel copies: the driver's copy reaches 0.7 of its rate on an H200. The first of two measurements lets the
        clocks rise: an idle card runs at a sixth of its frequency.
        """
        if not self._rate:
            source = torch.zeros(1 << (22 if self.quick else 29), device=self.device)
            target = torch.empty_like(source)
            copy = partial(torch.neg, source, out=target)
            self._rate = 2e6 * source.nbytes / min(self.microseconds(copy) for _ in range(2))
        return self._rate

    def matrix_rate(self) -> float:
        """Return the floating-point operations a second of a large matrix product, measured as `copy_rate` is."""
        size = 256 if self.quick else 8192
        dtype = torch.bfloat16 if self.cuda else torch.float32
        a, b = (torch.randn(size, size, device=self.device, dtype=dtype) for _ in "ab")
        return 2e6 * size**3 / min(self.microseconds(lambda: a @ b, seconds=0.3) for _ in range(2))

    def moved(self, name: str, us: float, num_bytes: float, **facts: Any) -> None:
        """Record a time in microseconds, and the share of it that its bytes take at the copy rate (`of_bound`)."""
        bound = num_bytes / self.copy_rate * 1e6
        rate = self.copy_rate / 1e9
        self.record.figure(name, key=True, us=us, of_bound=bound / us, **facts, bound_us=bound, copy_GB_per_s=rate)

    def microseconds(self, call: Callable[[], object], *, seconds: float = 0.1, graph: bool = True) -> float:
        """Return the median time of a call: replays of a CUDA graph between events; on a CPU plain calls.

        graph: False times eager launches, one after the other.
        """
        run = graph_of(call).replay if graph and self.cuda else call
        run()
        self.synchronize()
        times: list[float] = []
        end = time.monotonic() + (seconds if self.cuda else seconds / 10)
        while time.monotonic() < end or len(times) < 3:
            times.append(self._once(run))
        return statistics.median(times)

    def _once(self, run: Callable[[], object]) -> float:
        if not self.cuda:
            began = time.perf_counter()
            run()
            return (time.perf_counter() - began) * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a call, after a first one on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return |got - want| / |want| over all entries; infinity if an entry is finite in one of them only."""
    found, wanted = got.detach().double().flatten(), want.detach().to(got.device).double().flatten()
    finite = wanted.isfinite()
    if found.shape != wanted.shape or not torch.equal(found.isfinite(), finite):
        return math.inf
    found, wanted = found[finite], wanted[finite]
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


class CompileWatch:
    """Counts the Triton kernels that this process compiles, or loads from Triton's cache, from its creation on."""

    def __init__(self) -> None:
        from triton import knobs

        self._seen: list[tuple[str, float, bool]] = []
        knobs.compilation.listener = self._listen

    def _listen(self, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        stages = sum(seconds for _, seconds in times.lowering_stages)
        name = getattr(getattr(src, "fn", None), "__name__", None) or str(getattr(src, "name", "?"))
        self._seen.append((name, (stages + times.ir_initialization + times.store_results) / 1e6, cache_hit))

    def record(self, job: Job) -> None:
        """Record what was compiled, on a GPU."""
        if job.cuda:
            job.record.figure("kernels compiled", **self.facts())

    def __len__(self) -> int:
        return len(self._seen)

    def facts(self, begin: int = 0) -> dict[str, Any]:
        """Return what was compiled after the first `begin` kernels: counts, seconds, and the most frequent names."""
        fresh = [(name, seconds) for name, seconds, hit in self._seen[begin:] if not hit]
        names = Counter(name for name, _ in fresh)
        return {
            "compiled": len(fresh),
            "compile_s": round(sum(seconds for _, seconds in fresh), 1),
            "from_cache": len(self._seen) - begin - len(fresh),
            "most": dict(names.most_common(3)),
        }
