"""The end of a step as one graph behind that of its forward pass: verification, commit, how far rows have come."""

# Shape letters: N rows of a padded step, R of them real, T tokens, J = 1 + K tokens of a row at most, D hidden size.

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from bateleur.cudagraph import (
    BatchExecutionDescriptor,
    CapturedStateProducer,
    CudagraphDispatcher,
    CudaGraphManager,
    CudaGraphMode,
    Execution,
    Phase,
    StagedBatch,
    VerifyReport,
)
from bateleur.cudagraph.backends import get_backend
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.model_runner.model_state import ModelState
from bateleur.runner.model_runner.row_lengths import RowLengths
from bateleur.runner.models import StepContext
from bateleur.runner.sampling.captured_sampler import KINDS, CapturedSampler

Forward = CudaGraphManager[StepContext, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class EndState:
    """A step behind its forward pass."""

    context: StepContext
    hidden: Tensor
    """(T, D), where the graph of the forward pass leaves it."""


class EndSteps:
    """Stages the ends of dummy steps: those that the forward pass was captured with, run once more on its graph."""

    def __init__(self, forward: Forward, sampler: CapturedSampler) -> None:
        self._forward, self._sampler, self._rows = forward, sampler, sampler.rows
        self._lender: CapturedStateProducer[StepContext] = CapturedStateProducer(forward.states)

    @property
    def generation(self) -> int:
        """How often the step's buffers have been staged."""
        return self._lender.generation

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> StagedBatch[EndState]:
        """Rows of nobody, with the outputs that the forward pass computes for them."""
        lent = self._lender.stage(replace(key, variant=()), phase)
        self._rows.clear()
        return behind(self._forward, lent, key)

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> StagedBatch[EndState]:
        """Random rows behind a random step; for an engine without requests."""
        lent = self._lender.fuzz(replace(key, variant=()), seed)
        staged = behind(self._forward, lent, key)
        rng = np.random.default_rng(seed)
        self._sampler.fuzz(lent.state.batch, staged.state.hidden, rng, str(key.variant[0]))
        return staged

    def addresses(self) -> Mapping[str, int]:
        """The step's buffers, and those of the end."""
        own = {f"end.{name}": address for name, address in self._rows.addresses().items()}
        return {**self._lender.addresses(), **own}

    def poison(self) -> None:
        """Spoil the step's buffers, and those of the end."""
        self._lender.poison()
        self._rows.poison()


def behind(
    forward: Forward, lent: StagedBatch[StepContext], key: BatchExecutionDescriptor
) -> StagedBatch[EndState]:
    """The end of a step that is staged for its forward pass, after a replay of that."""
    assert lent.key is not None
    hidden, *_ = forward.replay(lent.key, lent)
    return StagedBatch(key, EndState(lent.state, hidden), lent.generation, lent.signature)


def end_keys(forward: Iterable[BatchExecutionDescriptor]) -> tuple[BatchExecutionDescriptor, ...]:
    """The graphs behind those of forward passes: of all kinds of laws, for rows of one length."""
    uniform = [key for key in forward if key.uniform_query_len]
    return tuple(replace(key, variant=(kind,)) for key in uniform for kind in KINDS)


class EndGraphs:
    """Graphs of what follows the forward pass in steps whose rows all decode, with as many places each."""

    def __init__(
        self,
        forward: Forward,
        options: GraphOptions,
        sampler: CapturedSampler,
        model_state: ModelState,
        lengths: RowLengths | None,
    ) -> None:
        """Capture nothing yet; for the graphs of `forward` whose rows have one length."""
        self._forward, self._sampler, self._rows = forward, sampler, sampler.rows
        self._model_state, self._lengths = model_state, lengths
        verifier = sampler.verifier
        self._drafts = verifier.num_places > 0
        ready = [key for key in forward.dispatcher.keys if key in forward.ready]
        keys = end_keys(ready) if verifier.fits_graphs else ()
        # A plan of exactly these, which decides nothing: an end runs on the key of its forward pass.
        plan = CudagraphDispatcher(CudaGraphMode.FULL, keys, MappingProxyType({}))
        backend = get_backend(options.backend, verifier.device)
        self.manager: CudaGraphManager[EndState, Tensor] = CudaGraphManager(
            plan, backend, checks=options.checks
        )

    def capture(self) -> None:
        """Capture all; a key that fails runs eagerly from then on, and is warned about."""
        if not self.manager.dispatcher.keys:
            return
        with torch.inference_mode():
            self.manager.capture(EndSteps(self._forward, self._sampler), self._body, keep_going=True)
        for failure in self.manager.report.failures:
            warnings.warn(
                f"no graph of the end for {failure.key}: {failure.reason}", RuntimeWarning, stacklevel=2
            )

    def has(self, key: BatchExecutionDescriptor) -> bool:
        """Whether the end of a step on `key` of the forward pass, of any kind, can be replayed."""
        return all(replace(key, variant=(kind,)) in self.manager.ready for kind in KINDS)

    def run(self, staged: StagedBatch[StepContext], hidden_TD: Tensor, kind: str) -> Tensor:
        """End the step whose rows were staged, with laws of that kind; see `CapturedSampler.record`.

        Raises ReplayFailed if it failed.
        """
        assert staged.key is not None
        key = replace(staged.key, variant=(kind,))
        state = EndState(staged.state, hidden_TD)
        return self.manager.replay(key, StagedBatch(key, state, staged.generation, staged.signature))

    def verify(self, fuzz: int, written: Callable[[StepContext], Mapping[str, Tensor]]) -> VerifyReport:
        """Show that replays equal eager runs on random steps. written: what a step may have changed in the caches."""

        def also(state: EndState) -> dict[str, Tensor]:
            own = {"next": self._sampler.verifier.next.ids[:-1], **self._model_state.carried()}
            if self._lengths is not None:
                own["lengths"] = self._lengths.computed
            count = state.context.batch.num_actual_reqs
            own |= {"emitted": self._rows.emitted[:count], "num_valid": self._rows.num_valid[:count]}
            return {**written(state.context), **own}

        with torch.inference_mode():
            return self.manager.verify(fuzz=fuzz, extra_tensors=also)

    def _body(self, execution: Execution[EndState]) -> Tensor:
        assert execution.key is not None
        context, rows = execution.state.context, self._rows
        batch, kind = context.batch, str(execution.key.variant[0])
        packed = self._sampler.record(batch, execution.state.hidden, kind)
        num_valid = rows.num_valid[: batch.num_reqs]
        self._model_state.commit(context, num_valid if self._drafts else None, captured=True)
        if self._lengths is not None:
            self._lengths.advance(rows.table_rows[: batch.num_reqs], batch, num_valid)
        return packed
