"""CUDA graphs of the end of a step: sampling and verification after the forward pass, commit of states, lengths."""

# Shape letters: N rows of a padded step, T tokens, J = 1 + K tokens of a row at most, D hidden size.

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
from bateleur.metadata import CommonAttentionMetadata
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.model_runner.model_state import ModelState
from bateleur.runner.model_runner.row_lengths import RowLengths
from bateleur.runner.models import StepContext
from bateleur.runner.sampling.rejection_sampler import GREEDY, KINDS, TRUNCATED, RejectionSampler

Forward = CudaGraphManager[StepContext, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class EndState:
    """A step after its forward pass. hidden: (T, D), in the output buffer of the forward pass's graph."""

    context: StepContext
    hidden: Tensor


class EndSteps:
    """Stages the end of dummy and random steps for capture and checks. Their forward pass is replayed first."""

    def __init__(self, forward: Forward, sampler: RejectionSampler) -> None:
        self._forward, self._sampler = forward, sampler
        self._lender: CapturedStateProducer[StepContext] = CapturedStateProducer(forward.states)

    @property
    def generation(self) -> int:
        """How often the step's buffers have been staged."""
        return self._lender.generation

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> StagedBatch[EndState]:
        """Stage a dummy batch for capture."""
        lent = self._lender.stage(replace(key, variant=()), phase)
        self._sampler.rows.clear()
        return self._after_forward(lent, key)

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> StagedBatch[EndState]:
        """Stage a random batch with random sampling inputs; for an engine without requests."""
        lent = self._lender.fuzz(replace(key, variant=()), seed)
        staged = self._after_forward(lent, key)
        rng = np.random.default_rng(seed)
        fuzz_rows(self._sampler, lent.state.batch, staged.state.hidden, rng, str(key.variant[0]))
        return staged

    def _after_forward(self, lent: StagedBatch[StepContext], key: BatchExecutionDescriptor) -> StagedBatch[EndState]:
        assert lent.key is not None
        hidden, *_ = self._forward.replay(lent.key, lent)
        return StagedBatch(key, EndState(lent.state, hidden), lent.generation, lent.signature)

    def addresses(self) -> Mapping[str, int]:
        """Addresses of the buffers of the step and of the sampler, by name."""
        own = {f"end.{name}": address for name, address in self._sampler.rows.addresses().items()}
        return {**self._lender.addresses(), **own}

    def poison(self) -> None:
        """Fill the buffers of the step and of the sampler with invalid values, so that a stale read shows."""
        self._lender.poison()
        self._sampler.rows.poison()


def fuzz_rows(
    sampler: RejectionSampler, metadata: CommonAttentionMetadata, hidden_TD: Tensor, rng: np.random.Generator, kind: str
) -> None:
    """Stage random sampling parameters and drafts for a random batch.

    About half of the drafts are the tokens that greedy requests sample.
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


def end_keys(forward: Iterable[BatchExecutionDescriptor]) -> tuple[BatchExecutionDescriptor, ...]:
    """Return the graph keys of step ends: each forward graph key with equal query lengths, per kind of sampler."""
    uniform = [key for key in forward if key.uniform_query_len]
    return tuple(replace(key, variant=(kind,)) for key in uniform for kind in KINDS)


class EndGraphs:
    """CUDA graphs of the end of decode steps, whose requests all have the same number of draft slots."""

    def __init__(
        self,
        forward: Forward,
        options: GraphOptions,
        sampler: RejectionSampler,
        model_state: ModelState,
        lengths: RowLengths | None,
    ) -> None:
        """Plan a graph for each `forward` graph with equal query lengths; `capture` captures them."""
        self._forward, self._sampler = forward, sampler
        self._model_state, self._lengths = model_state, lengths
        ready = [key for key in forward.dispatcher.keys if key in forward.ready]
        keys = end_keys(ready) if sampler.can_capture else ()
        # The dispatcher makes no decision: an end runs on the key of its forward pass.
        dispatcher = CudagraphDispatcher(CudaGraphMode.FULL, keys, MappingProxyType({}))
        backend = get_backend(options.backend, sampler.device)
        self.manager: CudaGraphManager[EndState, Tensor] = CudaGraphManager(dispatcher, backend, checks=options.checks)

    def capture(self) -> None:
        """Capture all graphs. A key whose capture fails runs eagerly from then on, with a warning."""
        if not self.manager.dispatcher.keys:
            return
        with torch.inference_mode():
            self.manager.capture(EndSteps(self._forward, self._sampler), self._body, keep_going=True)
        for failure in self.manager.report.failures:
            warnings.warn(f"no graph of the end for {failure.key}: {failure.reason}", RuntimeWarning, stacklevel=2)

    def has(self, key: BatchExecutionDescriptor) -> bool:
        """Return whether the end of a step can be replayed after the forward graph `key`, for every kind of sampler."""
        return all(replace(key, variant=(kind,)) in self.manager.ready for kind in KINDS)

    def run(self, staged: StagedBatch[StepContext], hidden_TD: Tensor, kind: str) -> Tensor:
        """Replay the end of a staged step; see `RejectionSampler.record` for the arguments and the result.

        Raises ReplayFailed if the graph failed.
        """
        assert staged.key is not None
        key = replace(staged.key, variant=(kind,))
        state = EndState(staged.state, hidden_TD)
        return self.manager.replay(key, StagedBatch(key, state, staged.generation, staged.signature))

    def verify(self, fuzz: int, written: Callable[[StepContext], Mapping[str, Tensor]]) -> VerifyReport:
        """Check that replays equal eager runs on random steps. fuzz: number of steps.

        written: returns the parts of the caches that a step may change.
        """

        def also(state: EndState) -> dict[str, Tensor]:
            rows, count = self._sampler.rows, state.context.batch.num_actual_reqs
            own = {"next": rows.next_ids[:-1], **self._model_state.carried()}
            if self._lengths is not None:
                own["lengths"] = self._lengths.computed
            own |= {"emitted": rows.emitted[:count], "num_valid": rows.num_valid[:count]}
            return {**written(state.context), **own}

        with torch.inference_mode():
            return self.manager.verify(fuzz=fuzz, extra_tensors=also)

    def _body(self, execution: Execution[EndState]) -> Tensor:
        assert execution.key is not None
        context, rows = execution.state.context, self._sampler.rows
        metadata, kind = context.batch, str(execution.key.variant[0])
        packed = self._sampler.record(metadata, execution.state.hidden, kind)
        num_valid = rows.num_valid[: metadata.num_reqs]
        self._model_state.commit(context, num_valid if self._sampler.num_drafts else None, captured=True)
        if self._lengths is not None:
            self._lengths.advance(rows.table_rows[: metadata.num_reqs], metadata, num_valid)
        return packed
