"""The time and memory of all graph captures of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bateleur.cudagraph import CaptureReport


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """Totals over all graph captures of an engine; `str` is one line for a log.

    num_graphs: CUDA graphs; a PIECEWISE key has several. num_keys: captured graph keys. num_failed: keys that could not
    be captured. seconds: host time of warm-ups and captures. nbytes: device memory in bytes.
    """

    num_graphs: int
    num_keys: int
    num_failed: int
    seconds: float
    nbytes: int

    @classmethod
    def of(cls, reports: Iterable[CaptureReport]) -> GraphCosts:
        """Add up the capture reports of all graph managers."""
        reports = tuple(reports)
        rows = [row for report in reports for row in report.captured]
        return cls(
            num_graphs=sum(row.num_graphs for row in rows),
            num_keys=len(rows),
            num_failed=sum(len(report.failures) for report in reports),
            seconds=sum(report.seconds for report in reports),
            nbytes=sum(row.nbytes for row in rows),
        )

    def __str__(self) -> str:
        failed = f", {self.num_failed} keys failed" if self.num_failed else ""
        return (
            f"captured {self.num_graphs:,} graphs for {self.num_keys:,} keys in {self.seconds:.1f} s, "
            f"{self.nbytes:,} bytes{failed}"
        )
