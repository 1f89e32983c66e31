"""The end of a step (sampling, commit of states, lengths) after the forward pass, in a CUDA graph or eagerly."""

# Shape letters: R rows of a step, N with padding, T tokens, L rows of logits, W words of 32 bits, J = 1 + K tokens of a
# row at most, D hidden size.

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

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
)
from bateleur.cudagraph.backends import get_backend
from bateleur.eagle.passes import ProposalPasses
from bateleur.metadata import CommonAttentionMetadata
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.model_runner.graph_dispatcher import capture_graphs
from bateleur.runner.model_runner.model_state import ModelState, RowLengths, StagedStep
from bateleur.runner.models import StepContext
from bateleur.runner.sampling.rejection_sampler import GREEDY, KINDS, TRUNCATED, RejectionSampler, SampledStep
from bateleur.runner.scheduling.step_batch import StepBatch

Forward = CudaGraphManager[StepContext, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class ForwardState:
    """A step after its forward pass: input of a graph that samples (`SampleStep`) or drafts (`ProposalGraphs`).
    hidden: for sampling only the final hidden states, for drafting `DraftContext.features`. They are in the output
    buffers of the forward pass's graph. passes: metadata of the draft passes; None for sampling.
    """

    context: StepContext
    hidden: tuple[Tensor, ...]
    passes: ProposalPasses | None = None


class SampleStepProducer:
    """Makes dummy and random steps to capture and check graphs of `SampleStep`. It replays the forward pass first."""

    def __init__(self, forward: Forward, sampler: RejectionSampler) -> None:
        self._forward, self._sampler = forward, sampler
        self._forward_states: CapturedStateProducer[StepContext] = CapturedStateProducer(forward.states)

    @property
    def generation(self) -> int:
        """Number of times that the step's buffers have been written."""
        return self._forward_states.generation

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> StagedBatch[ForwardState]:
        """Stage a dummy step for graph `key`, in which no request samples a token. phase: run, warm-up or capture."""
        forward_step = self._forward_states.stage(replace(key, variant=()), phase)
        outputs = self._forward.replay(replace(key, variant=()), forward_step)
        self._sampler.rows.clear()
        return self._after(key, forward_step, outputs, phase)

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> StagedBatch[ForwardState]:
        """Stage a random step for graph `key`. It overwrites the next tokens of requests: the engine must have none."""
        forward_step = self._forward_states.fuzz(replace(key, variant=()), seed)
        outputs = self._forward.replay(replace(key, variant=()), forward_step)
        self._randomize(key, forward_step.state, outputs[0], seed)
        return self._after(key, forward_step, outputs, Phase.RUN)

    def _randomize(self, key: BatchExecutionDescriptor, context: StepContext, hidden: Tensor, seed: int) -> None:
        rng = np.random.default_rng(seed)
        stage_random_rows(self._sampler, context.batch, hidden, rng, str(key.variant[0]))

    def _after(
        self, key: BatchExecutionDescriptor, step: StagedStep, outputs: tuple[Tensor, ...], phase: Phase
    ) -> StagedBatch[ForwardState]:
        """Return the input of graph `key`, which runs after the forward pass of `step`, from that pass's `outputs`."""
        return StagedBatch(key, ForwardState(step.state, outputs[:1]), step.generation, step.signature)

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
    greedy rows sample from the hidden states `hidden_TD`. kind: kind of parameters, see `RejectionSampler.record`.
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


def variant_keys(
    forward: Iterable[BatchExecutionDescriptor], variants: Sequence[str | int]
) -> tuple[BatchExecutionDescriptor, ...]:
    """Return one key per variant for each key of the forward pass with equal query lengths.
    variants: `KINDS` of captured samplers, or numbers of drafts.
    """
    return tuple(replace(key, variant=(each,)) for key in forward if key.uniform_query_len for each in variants)


def graphs_after(
    forward: Forward, variants: Sequence[str | int], options: GraphOptions, device: torch.device
) -> CudaGraphManager[Any, Tensor]:
    """Return a manager, empty at first, for graphs that sample or draft after a forward pass. There is one per variant
    for each captured graph of `forward` whose requests have equal query lengths. variants: see `variant_keys`.
    """
    keys = variant_keys([key for key in forward.dispatcher.keys if key in forward.ready], variants)
    # It makes no decision: what follows a forward pass runs on the key of that pass.
    dispatcher = CudagraphDispatcher(CudaGraphMode.FULL, keys, MappingProxyType({}))
    return CudaGraphManager(dispatcher, get_backend(options.backend, device), checks=options.checks)


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
    by_reason: number of steps by `SampleDispatchReason`. manager: graphs for decode steps in which all requests have
    equally many draft slots; None without graphs.
    """

    def __init__(self, sampler: RejectionSampler, model_state: ModelState, lengths: RowLengths | None) -> None:
        """lengths: sequence lengths on the device; None if the engine stages steps from lengths on the host."""
        self.sampler, self._model_state, self._lengths = sampler, model_state, lengths
        self.manager: CudaGraphManager[ForwardState, Tensor] | None = None
        self._poison = False
        self.by_reason: Counter[SampleDispatchReason] = Counter()

    def capture(self, forward: Forward, options: GraphOptions) -> None:
        """Capture graphs that sample and commit, one of each kind after every decode graph of `forward`."""
        self._poison = options.checks >= ReplayChecks.PARANOID
        kinds = KINDS if self.sampler.can_capture else ()
        self.manager = graphs_after(forward, kinds, options, self.sampler.device)
        steps = SampleStepProducer(forward, self.sampler)
        capture_graphs(self.manager, steps, self._body, self.sampler.model.peers, "no graph of the end")

    def run(self, batch: StepBatch, staged: StagedStep, hidden_TD: Tensor, allowed: Tensor | None) -> SampledStep:
        """End a staged step after its forward pass. allowed: mask from `GrammarMasks.allowed`.
        Raises ReplayFailed if the step's graph failed; later steps with the same key run eagerly.
        """
        sampler = self.sampler
        reason = self._reason(batch, staged, allowed)
        self.by_reason[reason] += 1
        if self._poison:
            sampler.rows.poison_emitted()
        if reason is SampleDispatchReason.GRAPH:
            assert batch.sampling is not None
            return sampler.outcome_of(batch, self.replay(staged, hidden_TD, batch.sampling.kind))
        metadata = staged.state.batch
        ended = sampler.verify(batch, metadata, hidden_TD, allowed)
        self._model_state.commit(staged.state, ended.num_valid)
        if self._lengths is not None and ended.num_valid is not None:
            self._lengths.advance(batch.index.rows, metadata, ended.num_valid)
        return ended

    def replay(self, staged: StagedStep, hidden_TD: Tensor, kind: str) -> Tensor:
        """Sample and commit with a graph; return `SampledStep.packed`. kind: one of `KINDS`. Raises ReplayFailed."""
        assert self.manager is not None
        assert staged.key is not None
        key = replace(staged.key, variant=(kind,))
        state = ForwardState(staged.state, (hidden_TD,))
        return self.manager.replay(key, StagedBatch(key, state, staged.generation, staged.signature))

    def _reason(self, batch: StepBatch, staged: StagedStep, allowed: Tensor | None) -> SampleDispatchReason:
        key, sampler = staged.key, self.sampler
        if self.manager is None:
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
        captured = all(each in self.manager.ready for each in variant_keys((key,), KINDS))
        return SampleDispatchReason.GRAPH if captured else SampleDispatchReason.NOT_READY

    def written(self, context: StepContext) -> dict[str, Tensor]:
        """Return the tensors outside of the caches that the end of a step may change."""
        rows, count = self.sampler.rows, context.batch.num_actual_reqs
        found = {"next": rows.next_ids[:-1], **self._model_state.carried()}
        if self._lengths is not None:
            found["lengths"] = self._lengths.computed
        return found | {"emitted": rows.emitted[:count], "num_valid": rows.num_valid[:count]}

    def _body(self, execution: Execution[ForwardState]) -> Tensor:
        assert execution.key is not None
        context, rows = execution.state.context, self.sampler.rows
        metadata, kind = context.batch, str(execution.key.variant[0])
        packed = self.sampler.record(metadata, execution.state.hidden[0], kind)
        num_valid = rows.num_valid[: metadata.num_reqs]
        self._model_state.commit(context, num_valid if self.sampler.num_drafts else None, captured=True)
        if self._lengths is not None:
            self._lengths.advance(rows.table_rows[: metadata.num_reqs], metadata, num_valid)
        return packed
