"""`CaptureReport`: time and memory of each capture, failed captures, and releases."""

from dataclasses import dataclass

from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """Time and memory of one captured key.

    Attributes:
        warmup_s, capture_s: host time of staging and warm-up, and of staging and capture, in seconds.
        nbytes: device memory that the capture allocated, in bytes. All keys share a memory pool, so the first keys
            allocate most of it; later keys add little more than the driver's memory per graph.
        num_graphs: number of graphs. 1 for a FULL key.
        num_externals: external memory blocks that the graph uses. 0 if the backend cannot find them.
    """

    key: BatchExecutionDescriptor
    warmup_s: float
    capture_s: float
    nbytes: int
    num_graphs: int
    num_externals: int


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """A failed capture of a key, or the releases of its graph.

    Attributes:
        reason: the error of the failed capture, or the reason of the latest release.
        times: number of releases of the key so far. 1 for a failed capture.
    """

    key: BatchExecutionDescriptor
    reason: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """A snapshot of a manager's captures.

    Attributes:
        num_planned: number of keys of the dispatcher.
        captured: cost of each key that is captured now.
        failures: keys whose capture failed, until `CudaGraphManager.capture` is called for them again.
        releases: keys that were ever released, also those that were captured again. The latest release is last.
    """

    backend: str
    num_planned: int
    captured: tuple[CaptureCost, ...] = ()
    failures: tuple[KeyEvent, ...] = ()
    releases: tuple[KeyEvent, ...] = ()

    @property
    def seconds(self) -> float:
        """Host time of all warm-ups and captures in `captured`, in seconds."""
        return sum(row.warmup_s + row.capture_s for row in self.captured)

    @property
    def nbytes(self) -> int:
        """Device memory of all keys in `captured`, in bytes."""
        return sum(row.nbytes for row in self.captured)

    def table(self) -> str:
        """Return one line of text per captured key, failure and release, and a last line with the totals."""
        lines = [f"{'warm-up s':>10}{'capture s':>11}{'MiB':>9}{'graphs':>8}{'externals':>11}  key"]
        lines += [
            f"{row.warmup_s:>10.3f}{row.capture_s:>11.3f}{row.nbytes / MIB:>9.2f}{row.num_graphs:>8}"
            f"{row.num_externals:>11}  {row.key}"
            for row in self.captured
        ]
        lines += [f"failed: {event.key}: {event.reason}" for event in self.failures]
        lines += [f"released {event.times}x: {event.key}: {event.reason}" for event in self.releases]
        lines.append(
            f"{len(self.captured)} of {self.num_planned} keys captured by the {self.backend} backend, "
            f"{self.seconds:.3f} s, {self.nbytes / MIB:.2f} MiB"
        )
        return "\n".join(lines)
