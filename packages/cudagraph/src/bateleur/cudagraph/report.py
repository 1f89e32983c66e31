"""What captures cost, which ones failed, and which graphs were given up."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from bateleur.cudagraph.descriptor import BatchExecutionDescriptor

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KeyReport:
    """What one graph cost.

    warmup_s, capture_s: seconds of host time, staging included.
    nbytes: device memory that the capture took. Keys share a pool, so this is large for the first key of a size, and
        little more than what the driver keeps for its graphs for smaller ones.
    num_graphs: captured pieces; 1 for FULL.
    num_externals: tensors that it uses and does not own; 0 where the backend can't tell.
    """

    key: BatchExecutionDescriptor
    warmup_s: float
    capture_s: float
    nbytes: int
    num_graphs: int
    num_externals: int


@dataclass(frozen=True, slots=True)
class KeyNote:
    """Why there is no graph for a key; `times` it was released so far, and the reason is the latest."""

    key: BatchExecutionDescriptor
    reason: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """A manager's captures so far: those in use, those that failed and were not repeated, the releases.

    num_planned: keys of the plan.
    """

    backend: str
    num_planned: int
    captured: tuple[KeyReport, ...] = ()
    failures: tuple[KeyNote, ...] = ()
    releases: tuple[KeyNote, ...] = ()

    @property
    def seconds(self) -> float:
        """Host time of all warm-ups and captures in use."""
        return sum(row.warmup_s + row.capture_s for row in self.captured)

    @property
    def nbytes(self) -> int:
        """Memory of all captures in use."""
        return sum(row.nbytes for row in self.captured)

    def table(self) -> str:
        """Return a line per key, a line per failure and release, and the totals, as text."""
        lines = [f"{'warm-up s':>10}{'capture s':>11}{'MiB':>9}{'graphs':>8}{'externals':>11}  key"]
        lines += [
            f"{row.warmup_s:>10.3f}{row.capture_s:>11.3f}{row.nbytes / MIB:>9.2f}{row.num_graphs:>8}"
            f"{row.num_externals:>11}  {row.key}"
            for row in self.captured
        ]
        lines += [f"failed: {note.key}: {note.reason}" for note in self.failures]
        lines += [f"released {note.times}x: {note.key}: {note.reason}" for note in self.releases]
        lines.append(
            f"{len(self.captured)} of {self.num_planned} keys captured by the {self.backend} backend, "
            f"{self.seconds:.3f} s, {self.nbytes / MIB:.2f} MiB"
        )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the report as JSON, field by field."""
        plain = asdict(self)
        for row in (*plain["captured"], *plain["failures"], *plain["releases"]):
            row["key"]["mode"] = row["key"]["mode"].name
        return json.dumps(plain, indent=2)
