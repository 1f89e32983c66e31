"""What is asked of an engine between two of its steps, and may take long. All ranks do it together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bateleur.cudagraph import VerifyReport
from bateleur.runner.engine.messages import (
    EngineOperation,
    ExportPrefix,
    FlushDisk,
    ImportPrefix,
    VerifyGraphs,
)
from bateleur.runner.engine.prefix_offload import PrefixOffload
from bateleur.runner.engine.request_registry import RequestRegistry
from bateleur.runner.models import HybridDecoder
from bateleur.runner.utils.device import use_device


class EngineOperations:
    """Of one engine. What is wrong with one is raised behind it, so that ranks, which all find it, go on."""

    def __init__(
        self,
        ledger: RequestRegistry,
        outside: PrefixOffload,
        verify: Callable[[int], VerifyReport],
        model: HybridDecoder,
    ) -> None:
        """verify: compares replays with eager runs, with so many seeds."""
        self._ledger, self._outside, self._verify_here, self._model = ledger, outside, verify, model

    def export(self, token_ids: NDArray[np.int32], path: Path) -> int:
        """See `PrefixTransfer.export`; ValueError where no prefixes are shared."""
        return self._count(ExportPrefix(token_ids, path))

    def take_in(self, path: Path) -> int:
        """See `PrefixTransfer.import_file`; ValueError where no prefixes are shared."""
        return self._count(ImportPrefix(path))

    def drain(self) -> None:
        """What waits to be written to a disk is written."""
        if self._outside.disk is not None:
            self._run(FlushDisk())

    def verify_graphs(self, fuzz: int) -> VerifyReport:
        """Show that every captured graph replays what an eager run computes. A key that fails on any rank fails."""
        report = self._run(VerifyGraphs(fuzz))
        assert isinstance(report, VerifyReport)
        return report

    def _count(self, errand: EngineOperation) -> int:
        count = self._run(errand)
        assert isinstance(count, int)
        return count

    def _run(self, errand: EngineOperation) -> int | VerifyReport | None:
        """Raises ValueError of data-parallel ranks, whose caches and requests differ."""
        if self._model.exchange is not None:
            rule = "prefixes in files and comparisons of graphs are of engines whose ranks have the same requests"
            raise ValueError(f"{self._model.several}; {rule}")
        with use_device(self._model.device):
            self._ledger.restore()
            with self._ledger.tell(errand):
                came = self.follow(errand)
        if isinstance(came, Exception):
            raise came
        return came

    def follow(self, errand: EngineOperation) -> int | VerifyReport | ValueError | OSError | None:
        """Do this rank's part; what is wrong with it is the same on all ranks."""
        try:
            match errand:
                case ExportPrefix(token_ids, path):
                    return self._outside.handover.export(token_ids, path)
                case ImportPrefix(path):
                    return self._outside.handover.import_file(path)
                case FlushDisk():
                    self._outside.drain()
                    return None
                case VerifyGraphs(fuzz):
                    return self._verify(fuzz)
        except (ValueError, OSError) as error:
            return error

    def _verify(self, fuzz: int) -> VerifyReport:
        report = self._verify_here(fuzz)
        if self._model.ranks.alone:
            return report
        fine = self._model.ranks.all_have([each.failure is None for each in report.comparisons])
        return VerifyReport(
            tuple(
                each if everywhere else replace(each, failure=each.failure or "another rank's part differs")
                for each, everywhere in zip(report.comparisons, fine, strict=True)
            )
        )
