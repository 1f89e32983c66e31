"""All CUDA graphs of an engine: capture reports, and verification against eager runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from bateleur.cudagraph import CaptureReport, CudaGraphManager, VerifyReport
from bateleur.eagle import EagleSpeculator
from bateleur.runner.model_runner.graph_dispatcher import GraphDispatcher
from bateleur.runner.models import StepContext
from bateleur.runner.sampling.step_end import SampleStep
from bateleur.runner.spec_decode.graph_checks import verify_passes
from bateleur.runner.spec_decode.proposer import Proposer


class AllGraphs:
    """All CUDA graphs of an engine: of forward passes, ends of steps, single draft passes and whole proposals.

    The end of a step is sampling, verification and bookkeeping after the forward pass.
    """

    def __init__(
        self, forward: GraphDispatcher, ends: SampleStep, head: EagleSpeculator | None, proposer: Proposer | None
    ) -> None:
        self._forward, self._ends, self._head = forward, ends, head
        self._proposals = None if proposer is None else proposer.graphs

    @property
    def reports(self) -> dict[str, CaptureReport]:
        """Capture report of each graph manager, by the part of a step that its graphs run."""
        managers: dict[str, CudaGraphManager[Any, Any] | None] = {"forward": self._forward.manager}
        if self._ends.graphs is not None:
            managers["end"] = self._ends.graphs.manager
        if self._head is not None:
            managers |= {"first draft pass": self._head.prefill, "draft chain": self._head.decode}
        if self._proposals is not None:
            managers["proposal"] = self._proposals.manager
        return {name: manager.report for name, manager in managers.items() if manager is not None}

    def verify(self, fuzz: int, written: Callable[[StepContext], Mapping[str, Tensor]]) -> VerifyReport:
        """Compare replays with eager runs on `fuzz` random steps for each graph.

        Raises ValueError if there are no graphs.
        written: returns the parts of the caches that a step may change.
        """
        reports = {"forward": self._forward.verify(fuzz)}
        if self._ends.graphs is not None:
            reports["end"] = self._ends.graphs.verify(fuzz, written)
        if self._head is not None:
            reports |= verify_passes(self._head, fuzz)
        if self._proposals is not None:
            reports["proposal"] = self._proposals.verify(fuzz, written)
        return VerifyReport.join(reports)
