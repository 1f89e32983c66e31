"""Long operations between steps: prefix export and import, disk flush, graph verification, LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bateleur.cudagraph import VerifyReport
from bateleur.runner.engine.input_processor import checked_adapter
from bateleur.runner.engine.messages import (
    EngineOperation,
    ExportPrefix,
    FlushDisk,
    ImportPrefix,
    LoadAdapter,
    UnloadAdapter,
    VerifyGraphs,
)
from bateleur.runner.engine.prefix_offload import PrefixOffload
from bateleur.runner.engine.request_registry import RequestRegistry
from bateleur.runner.lora.adapter_manager import AdapterManager, LoRARequest
from bateleur.runner.models import HybridDecoder
from bateleur.runner.utils.device import use_device


class EngineOperations:
    """Runs operations on all ranks. An error is the same on all ranks, and is raised after the operation."""

    def __init__(
        self,
        registry: RequestRegistry,
        offload: PrefixOffload,
        verify: Callable[[int], VerifyReport],
        model: HybridDecoder,
        adapters: AdapterManager | None = None,
    ) -> None:
        """verify: compares graph replays with eager runs on n random steps. adapters: None without `enable_lora`."""
        self._adapters = adapters
        self._registry, self._offload, self._verify_here, self._model = registry, offload, verify, model

    def export_prefix(self, token_ids: NDArray[np.int32], path: Path) -> int:
        """Write the cached prefix of these tokens to a file; returns the number of tokens. See `PrefixTransfer.export`.

        Raises ValueError without prefix caching.
        """
        return self._count(ExportPrefix(token_ids, path))

    def import_prefix(self, path: Path) -> int:
        """Read a prefix from a file into the prefix cache; returns the number of tokens.

        See `PrefixTransfer.import_file`.
        Raises ValueError without prefix caching.
        """
        return self._count(ImportPrefix(path))

    def flush_disk(self) -> None:
        """Write everything that waits to be written to disk."""
        if self._offload.disk is not None:
            self._run(FlushDisk())

    def verify_graphs(self, fuzz: int) -> VerifyReport:
        """Check on `fuzz` random steps that replays equal eager runs. A graph that fails on any rank fails."""
        report = self._run(VerifyGraphs(fuzz))
        assert isinstance(report, VerifyReport)
        return report

    def load_adapter(self, adapter: LoRARequest) -> None:
        """Load a LoRA adapter, see `AdapterManager.load`. Also raises ValueError without `enable_lora`."""
        self._run(LoadAdapter(checked_adapter("lora_request", adapter)))

    def unload_adapter(self, lora_name: str) -> None:
        """Unload a LoRA adapter, see `AdapterManager.unload`. Also raises ValueError without `enable_lora`."""
        self._run(UnloadAdapter(lora_name))

    def _count(self, operation: EngineOperation) -> int:
        count = self._run(operation)
        assert isinstance(count, int)
        return count

    def _run(self, operation: EngineOperation) -> int | VerifyReport | None:
        if self._model.exchange is not None:  # data-parallel ranks have different caches and requests
            rule = "prefixes in files and comparisons of graphs are of engines whose ranks have the same requests"
            raise ValueError(f"{self._model.several}; {rule}")
        with use_device(self._model.device):
            self._registry.restore()
            with self._registry.sending(operation):
                result = self.run_here(operation)
        if isinstance(result, Exception):
            raise result
        return result

    def run_here(self, operation: EngineOperation) -> int | VerifyReport | ValueError | OSError | None:
        """Run an operation on this rank. Returns its result, or its error, which is the same on all ranks."""
        try:
            match operation:
                case ExportPrefix(token_ids, path):
                    return self._offload.handover.export(token_ids, path)
                case ImportPrefix(path):
                    return self._offload.handover.import_file(path)
                case FlushDisk():
                    if self._offload.disk is not None:
                        self._offload.disk.drain()
                    return None
                case VerifyGraphs(fuzz):
                    return self._verify(fuzz)
                case LoadAdapter(adapter):
                    self._enabled.load(adapter)
                    return None
                case UnloadAdapter(lora_name):
                    self._enabled.unload(lora_name)
                    return None
        except (ValueError, OSError) as error:
            return error

    @property
    def _enabled(self) -> AdapterManager:
        if self._adapters is None:
            raise ValueError("enable_lora is False; it must be True for LoRA adapters")
        return self._adapters

    def _verify(self, fuzz: int) -> VerifyReport:
        report = self._verify_here(fuzz)
        if self._model.ranks.alone:
            return report
        passed = self._model.ranks.all_have([each.failure is None for each in report.comparisons])
        return VerifyReport(
            tuple(
                each if everywhere else replace(each, failure=each.failure or "another rank's part differs")
                for each, everywhere in zip(report.comparisons, passed, strict=True)
            )
        )
