"""CUDA graphs of all draft passes of a proposal. They run after the graphs of the forward pass and of sampling."""

# Shape letters: N rows of a padded step, K drafts at most.

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    DispatchDecision,
    DispatchReason,
    Execution,
    Phase,
    StagedBatch,
    VerifyReport,
    rounding_tolerance,
)
from bateleur.cudagraph.backends import get_backend
from bateleur.eagle import DraftContext, Drafter, EagleSpeculator
from bateleur.eagle.passes import ProposalPasses
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.models import StepContext
from bateleur.runner.sampling.rejection_sampler import TRUNCATED, RejectionSampler
from bateleur.runner.sampling.step_end import Forward, stage_random_rows
from bateleur.runner.spec_decode.graph_checks import written_by


@dataclass(frozen=True, slots=True)
class ProposalState:
    """A step after sampling and verification, and the metadata of the draft passes that follow."""

    context: StepContext
    features: tuple[Tensor, ...]
    """As of `DraftContext`, in the output buffers of the forward pass's graph."""
    passes: ProposalPasses

    def staged(self, key: BatchExecutionDescriptor, generation: int) -> StagedBatch[ProposalState]:
        """Return this state as a staged batch for graph `key`. generation: see `ProposalSteps.generation`."""
        return StagedBatch(key, self, generation, self.passes.signature)


class ProposalSteps:
    """Stages proposals after dummy and random steps, for capture and checks."""

    def __init__(self, forward: Forward, sampler: RejectionSampler, drafter: EagleSpeculator) -> None:
        self._forward, self._sampler, self._rows, self._drafter = forward, sampler, sampler.rows, drafter
        self._forward_states: CapturedStateProducer[StepContext] = CapturedStateProducer(forward.states)

    @property
    def generation(self) -> int:
        """How often the step's buffers and the metadata of the draft passes have been staged."""
        return self._forward_states.generation + self._drafter.steps.generation

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> StagedBatch[ProposalState]:
        """Replay the forward pass of a dummy batch, and stage the proposal after it."""
        forward_step = self._forward_states.stage(replace(key, variant=()), phase)
        outputs = self._forward.replay(replace(key, variant=()), forward_step)
        self._rows.clear()
        return self._behind(key, forward_step.state, outputs, phase)

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> StagedBatch[ProposalState]:
        """Replay the forward pass of a random batch, and stage the proposal after it, over random draft caches.

        Use it only in an engine without requests.
        """
        forward_step, rng = self._forward_states.fuzz(replace(key, variant=()), seed), np.random.default_rng(seed)
        outputs, batch = self._forward.replay(replace(key, variant=()), forward_step), forward_step.state.batch
        stage_random_rows(self._sampler, batch, outputs[0], rng, TRUNCATED)
        num_valid = rng.integers(1, 1 + batch.max_query_len, batch.num_actual_reqs)
        width, vocab_size = self._rows.emitted.shape[1], self._sampler.sampler.vocab_size
        emitted = rng.integers(0, vocab_size, (len(num_valid), width))
        emitted[np.arange(width) >= num_valid[:, None]] = -1
        device = self._sampler.device
        self._rows.emit(torch.from_numpy(emitted).to(device), torch.from_numpy(num_valid).to(device))
        self._drafter.fuzz_proposal(forward_step.state, seed)
        return self._behind(key, forward_step.state, outputs, Phase.RUN)

    def _behind(
        self, key: BatchExecutionDescriptor, context: StepContext, outputs: tuple[Tensor, ...], phase: Phase
    ) -> StagedBatch[ProposalState]:
        hidden, *taps = outputs
        passes = self._drafter.stage_proposal(context, int(key.variant[0]), phase)
        features = features_of(self._drafter, hidden, taps)
        return ProposalState(context, features, passes).staged(key, self.generation)

    def addresses(self) -> Mapping[str, int]:
        """Addresses of the buffers of the step, the sampler and the drafter, by name."""
        books = {"end": self._rows.addresses(), "draft": self._drafter.steps.addresses()}
        own = {f"{owner}.{name}": address for owner, book in books.items() for name, address in book.items()}
        return {**self._forward_states.addresses(), **own}

    def poison(self) -> None:
        """Fill the buffers of the step, the sampler and the drafter with invalid values, so that a stale read shows."""
        self._forward_states.poison()
        self._rows.poison()
        self._drafter.steps.poison()


def features_of(drafter: Drafter, hidden: Tensor, taps: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the hidden states that a drafter reads: `taps`, from between the layers, and the final one if needed."""
    return (*taps, hidden) if drafter.needs.hidden else tuple(taps)


def proposal_keys(
    forward: Iterable[BatchExecutionDescriptor], numbers: Sequence[int]
) -> tuple[BatchExecutionDescriptor, ...]:
    """Return the graph keys of proposals: one per number of drafts for each forward graph with equal query lengths."""
    uniform = [key for key in forward if key.uniform_query_len]
    return tuple(replace(key, variant=(k,)) for key in uniform for k in sorted(numbers, reverse=True))


class ProposalGraphs:
    """CUDA graphs of proposals after decode steps whose requests all have the same number of tokens."""

    def __init__(
        self,
        forward: Forward,
        options: GraphOptions,
        drafter: EagleSpeculator,
        sampler: RejectionSampler,
        numbers: Sequence[int],
    ) -> None:
        """Plan a graph for each `forward` graph with equal query lengths and each of these numbers of drafts."""
        self._forward, self._sampler, self._rows = forward, sampler, sampler.rows
        self._drafter, self._numbers = drafter, sorted(numbers)
        keys = proposal_keys([key for key in forward.dispatcher.keys if key in forward.ready], self._numbers)
        # The plan makes no decision: a proposal runs on the key of its forward pass.
        plan = CudagraphDispatcher(CudaGraphMode.FULL, keys, MappingProxyType({}))
        backend = get_backend(options.backend, sampler.device)
        self.manager: CudaGraphManager[ProposalState, Tensor] = CudaGraphManager(plan, backend, checks=options.checks)

    def capture(self) -> None:
        """Capture all graphs. A key whose capture fails runs eagerly from then on, with a warning."""
        if not self.manager.dispatcher.keys:
            return
        steps = ProposalSteps(self._forward, self._sampler, self._drafter)
        with torch.inference_mode():
            self.manager.capture(steps, self._body, keep_going=True)
        for failure in self.manager.report.failures:
            warnings.warn(f"no graph of the draft for {failure.key}: {failure.reason}", RuntimeWarning, stacklevel=2)

    def key_of(self, step: BatchExecutionDescriptor | None, num_drafts: int) -> BatchExecutionDescriptor | None:
        """Return the key of a graph for at least `num_drafts` drafts after a step that ran in graph `step`.

        None if there is no such graph, or the step ran eagerly.
        """
        if step is None or step.uniform_query_len is None:
            return None
        enough = next(k for k in self._numbers if k >= num_drafts)
        key = replace(step, variant=(enough,))
        return key if key in self.manager.ready else None

    def run(
        self, key: BatchExecutionDescriptor, staged: StagedBatch[StepContext], features: tuple[Tensor, ...]
    ) -> None:
        """Propose drafts for the staged step by a graph, and store them. Raises ReplayFailed if the graph failed."""
        batch = staged.state.batch
        passes = self._drafter.stage_proposal(staged.state, int(key.variant[0]))
        generation = staged.generation + self._drafter.steps.generation
        self.manager.replay(key, ProposalState(staged.state, features, passes).staged(key, generation))
        decision = DispatchDecision(
            key,
            DispatchReason.DECODE,
            batch.num_tokens - batch.num_actual_tokens,
            batch.num_reqs - batch.num_actual_reqs,
        )
        self._drafter.decisions.count(decision)

    def verify(self, fuzz: int, written: Callable[[StepContext], Mapping[str, Tensor]]) -> VerifyReport:
        """Check that replays equal eager runs on random steps.

        written: returns the parts of the caches that a step may change.
        The tolerance is 16 times the usual one, because each draft pass enlarges the rounding of earlier passes. With
        the shipped head, a relative difference of 1e-7 in the features becomes one of 1e-5 in keys after 4 passes.
        """

        def also(state: ProposalState) -> dict[str, Tensor]:
            own = {"next": self._rows.next_ids[:-1], **written_by(self._drafter, state.context.batch.block_tables[0])}
            return {**written(state.context), **own}

        with torch.inference_mode():
            rtol = 16 * rounding_tolerance(self._drafter.inputs.hidden.dtype)
            return self.manager.verify(fuzz=fuzz, rtol=rtol, extra_tensors=also)

    def _body(self, execution: Execution[ProposalState]) -> Tensor:
        assert execution.key is not None
        state, rows, count = execution.state, self._rows, execution.state.context.batch.num_reqs
        own_N = rows.table_rows[:count]
        next_token_N = rows.next_ids[:, 0].index_select(0, own_N)
        context = DraftContext(
            batch=state.context.batch,
            attention=state.context.attention,
            features=state.features,
            next_token=next_token_N,
            num_valid=rows.num_valid[:count],
            emitted=rows.emitted[:count],
            rows=own_N,
            seeds=rows.seeds[:count],
            temperature=rows.values[:count, 0],
            num_drafts=int(execution.key.variant[0]),
            key=execution.key,
        )
        drafts_NK = self._drafter.record_proposal(execution.key, state.passes, context)
        rows.keep(own_N, next_token_N, drafts_NK)
        return drafts_NK
