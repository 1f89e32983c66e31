"""The end of a step (sampling, commit of states, lengths) after the forward pass, in a CUDA graph or eagerly."""

# Shape letters: R rows of a step, N with padding, T tokens, L rows of logits, W words of 32 bits, J = 1 + K tokens of a
# row at most, D hidden size.

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
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
    ReplayChecks,
    StagedBatch,
    VerifyReport,
)
from bateleur.cudagraph.backends import get_backend
from bateleur.metadata import CommonAttentionMetadata
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.model_runner.model_state import ModelState
from bateleur.runner.model_runner.row_lengths import RowLengths
from bateleur.runner.models import StepContext
from bateleur.runner.sampling.rejection_sampler import GREEDY, KINDS, TRUNCATED, RejectionSampler, SampledStep
from bateleur.runner.scheduling.step_batch import StepBatch

Forward = CudaGraphManager[StepContext, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class SampleState:
    """A step after its forward pass. hidden: hidden states in the output buffer of the forward pass's graph."""

    context: StepContext
    hidden: Tensor


class SampleStepProducer:
    """Makes dummy and random steps to capture and verify graphs of the end of a step. Replays their forward pass."""

    def __init__(self, forward: Forward, sampler: RejectionSampler) -> None:
        self._forward, self._sampler = forward, sampler
        self._forward_states: CapturedStateProducer[StepContext] = CapturedStateProducer(forward.states)

    @property
    def generation(self) -> int:
        """Number of times that the step's buffers have been written."""
        return self._forward_states.generation

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> StagedBatch[SampleState]:
        """Stage a dummy step without sampling requests."""
        forward_step = self._forward_states.stage(replace(key, variant=()), phase)
        self._sampler.rows.clear()
        return self._after_forward(forward_step, key)

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> StagedBatch[SampleState]:
        """Stage a random step with random sampling parameters and drafts; for an engine without requests."""
        forward_step = self._forward_states.fuzz(replace(key, variant=()), seed)
        staged = self._after_forward(forward_step, key)
        rng = np.random.default_rng(seed)
        stage_random_rows(self._sampler, forward_step.state.batch, staged.state.hidden, rng, str(key.variant[0]))
        return staged

    def _after_forward(
        self, forward_step: StagedBatch[StepContext], key: BatchExecutionDescriptor
    ) -> StagedBatch[SampleState]:
        assert forward_step.key is not None
        hidden, *_ = self._forward.replay(forward_step.key, forward_step)
        return StagedBatch(
            key, SampleState(forward_step.state, hidden), forward_step.generation, forward_step.signature
        )

    def addresses(self) -> Mapping[str, int]:
        """Addresses of the buffers of the step and of the sampler."""
        own = {f"end.{name}": address for name, address in self._sampler.rows.addresses().items()}
        return {**self._forward_states.addresses(), **own}

    def poison(self) -> None:
        """Fill the buffers of the step and of the sampler with invalid values."""
        self._forward_states.poison()
        self._sampler.rows.poison()


def stage_random_rows(
    sampler: RejectionSampler, metadata: CommonAttentionMetadata, hidden_TD: Tensor, rng: np.random.Generator, kind: str
) -> None:
    """Stage random sampling parameters and drafts for a random batch. About half of the drafts are the tokens that
    greedy rows sample.
    """
    count, length = metadata.num_actual_reqs, metadata.num_tokens // metadata.num_reqs
    vocab_size, ids = sampler.sampler.vocab_size, sampler.rows.next_ids
    ids.copy_(torch.from_numpy(rng.integers(0, vocab_size, tuple(ids.shape))))
    likely = sampler.model.logits(hidden_TD).argmax(-1).view(-1, length)[:count, :-1]
    coins = torch.from_numpy(rng.integers(0, 2, tuple(likely.shape), dtype=np.bool_)).to(sampler.device)
    ids[:count, 1:length] = likely.where(coins, ids[:count, 1:length])
    values = np.tile(np.array([0, -np.inf, vocab_size, 1], np.float32), (count, 1))
    if kind != GREEDY:
        choices = ((0, 0.2, 0.8, 1.5), (-np.inf, -3.0), (vocab_size, 7), (1.0, 0.9))
        columns = [
            rng.choice(each if kind == TRUNCATED or not i else each[:1], count) for i, each in enumerate(choices)
        ]
        values = np.stack(columns, 1).astype(np.float32)
    seeds, num_drafts = rng.integers(1 << 62, size=count), rng.integers(0, length, count)
    sampler.rows.stage(np.arange(count), seeds, num_drafts, values)


def sample_graph_keys(forward: Iterable[BatchExecutionDescriptor]) -> tuple[BatchExecutionDescriptor, ...]:
    """Return graph keys of the end of a step: per forward key with equal query lengths, one per kind of sampler."""
    uniform = [key for key in forward if key.uniform_query_len]
    return tuple(replace(key, variant=(kind,)) for key in uniform for kind in KINDS)


class SampleGraphs:
    """CUDA graphs of the end of a step, for decode steps in which all requests have equally many draft slots."""

    def __init__(
        self,
        forward: Forward,
        options: GraphOptions,
        sampler: RejectionSampler,
        model_state: ModelState,
        lengths: RowLengths | None,
    ) -> None:
        """Plan graphs for each graph of `forward` with equal query lengths; `capture` captures them."""
        self._forward, self._sampler = forward, sampler
        self._model_state, self._lengths = model_state, lengths
        ready = [key for key in forward.dispatcher.keys if key in forward.ready]
        keys = sample_graph_keys(ready) if sampler.can_capture else ()
        # The dispatcher makes no decision: an end runs on the key of its forward pass.
        dispatcher = CudagraphDispatcher(CudaGraphMode.FULL, keys, MappingProxyType({}))
        backend = get_backend(options.backend, sampler.device)
        self.manager: CudaGraphManager[SampleState, Tensor] = CudaGraphManager(
            dispatcher, backend, checks=options.checks
        )

    def capture(self) -> None:
        """Capture all graphs. Warns if a capture fails; that step end then always runs eagerly."""
        if not self.manager.dispatcher.keys:
            return
        with torch.inference_mode():
            self.manager.capture(SampleStepProducer(self._forward, self._sampler), self._body, keep_going=True)
        for failure in self.manager.report.failures:
            warnings.warn(f"no graph of the end for {failure.key}: {failure.reason}", RuntimeWarning, stacklevel=2)

    def has(self, key: BatchExecutionDescriptor) -> bool:
        """Whether the end of a step with forward graph `key` has graphs for all kinds of sampler."""
        return all(replace(key, variant=(kind,)) in self.manager.ready for kind in KINDS)

    def run(self, staged: StagedBatch[StepContext], hidden_TD: Tensor, kind: str) -> Tensor:
        """Replay the graph of the end of a step; returns `SamplerOutput.packed`. Raises ReplayFailed."""
        assert staged.key is not None
        key = replace(staged.key, variant=(kind,))
        state = SampleState(staged.state, hidden_TD)
        return self.manager.replay(key, StagedBatch(key, state, staged.generation, staged.signature))

    def verify(self, fuzz: int, written: Callable[[StepContext], Mapping[str, Tensor]]) -> VerifyReport:
        """Check that replays equal eager runs on random steps. written: returns the parts of caches that may change."""

        def also(state: SampleState) -> dict[str, Tensor]:
            rows, count = self._sampler.rows, state.context.batch.num_actual_reqs
            own = {"next": rows.next_ids[:-1], **self._model_state.carried()}
            if self._lengths is not None:
                own["lengths"] = self._lengths.computed
            own |= {"emitted": rows.emitted[:count], "num_valid": rows.num_valid[:count]}
            return {**written(state.context), **own}

        with torch.inference_mode():
            return self.manager.verify(fuzz=fuzz, extra_tensors=also)

    def _body(self, execution: Execution[SampleState]) -> Tensor:
        assert execution.key is not None
        context, rows = execution.state.context, self._sampler.rows
        metadata, kind = context.batch, str(execution.key.variant[0])
        packed = self._sampler.record(metadata, execution.state.hidden, kind)
        num_valid = rows.num_valid[: metadata.num_reqs]
        self._model_state.commit(context, num_valid if self._sampler.num_drafts else None, captured=True)
        if self._lengths is not None:
            self._lengths.advance(rows.table_rows[: metadata.num_reqs], metadata, num_valid)
        return packed


class SampleDispatchReason(StrEnum):
    """Whether the end of a step ran in a graph, or the first reason why it ran eagerly."""

    GRAPH = "graph"
    NO_GRAPHS = "eager: there are no graphs"
    FORWARD = "eager: the forward pass is on no graph of decoding rows"
    PROMPT = "eager: a row is in its prompt"
    GRAMMAR = "eager: a row follows a grammar"
    RULES = "eager: a row has token rules, penalties or log probabilities"
    NOT_READY = "eager: the graph is not captured"


class SampleStep:
    """Runs the end of a step: samples tokens, commits recurrent states, and advances sequence lengths.

    by_reason: number of steps by `SampleDispatchReason`.
    """

    def __init__(self, sampler: RejectionSampler, model_state: ModelState, lengths: RowLengths | None) -> None:
        """lengths: sequence lengths on the device; None if the engine stages steps from lengths on the host."""
        self.sampler, self._model_state, self._lengths = sampler, model_state, lengths
        self.graphs: SampleGraphs | None = None
        self._poison = False
        self.by_reason: Counter[SampleDispatchReason] = Counter()

    def capture(self, forward: Forward, options: GraphOptions) -> None:
        """Capture graphs that sample and commit after the forward passes that `forward` has graphs of."""
        self._poison = options.checks >= ReplayChecks.PARANOID
        self.graphs = SampleGraphs(forward, options, self.sampler, self._model_state, self._lengths)
        self.graphs.capture()

    def run(
        self, batch: StepBatch, staged: StagedBatch[StepContext], hidden_TD: Tensor, allowed: Tensor | None
    ) -> SampledStep:
        """End a staged step after its forward pass. allowed: see `GrammarMasks.allowed`.

        Raises ReplayFailed if the graph failed; its key runs eagerly from then on.
        """
        sampler = self.sampler
        reason = self._reason(batch, staged, allowed)
        self.by_reason[reason] += 1
        if self._poison:
            sampler.rows.poison_emitted()
        if reason is SampleDispatchReason.GRAPH:
            assert self.graphs is not None
            assert batch.sampling is not None
            return sampler.outcome_of(batch, self.graphs.run(staged, hidden_TD, batch.sampling.kind))
        metadata = staged.state.batch
        ended = sampler.verify(batch, metadata, hidden_TD, allowed)
        self._model_state.commit(staged.state, ended.num_valid)
        if self._lengths is not None and ended.num_valid is not None:
            self._lengths.advance(batch.index.rows, metadata, ended.num_valid)
        return ended

    def _reason(
        self, batch: StepBatch, staged: StagedBatch[StepContext], allowed: Tensor | None
    ) -> SampleDispatchReason:
        key, sampler = staged.key, self.sampler
        if self.graphs is None:
            return SampleDispatchReason.NO_GRAPHS
        if key is None or key.uniform_query_len is None:
            return SampleDispatchReason.FORWARD
        if not batch.all_decode:
            return SampleDispatchReason.PROMPT
        if allowed is not None:
            return SampleDispatchReason.GRAMMAR
        assert batch.sampling is not None
        if not batch.sampling.plain and not sampler.sampler.is_plain(batch.rows, sampler.num_generated(batch)):
            return SampleDispatchReason.RULES
        return SampleDispatchReason.GRAPH if self.graphs.has(key) else SampleDispatchReason.NOT_READY
