"""CUDA graphs of all draft passes of a proposal. They run after the graphs of the forward pass and of sampling."""

# Shape letters: N rows of a padded step, K drafts at most.

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bateleur.cudagraph import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    DispatchDecision,
    DispatchReason,
    Execution,
    Phase,
    StagedBatch,
    rounding_tolerance,
)
from bateleur.eagle import DraftContext, Drafter, EagleSpeculator
from bateleur.metadata import movable
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.model_runner.graph_dispatcher import capture_graphs
from bateleur.runner.model_runner.model_state import StagedStep
from bateleur.runner.model_runner.step_producer import bits_of
from bateleur.runner.models import StepContext
from bateleur.runner.sampling.rejection_sampler import TRUNCATED, RejectionSampler
from bateleur.runner.sampling.step_end import Forward, ForwardState, SampleStepProducer, graphs_after, stage_random_rows


class ProposalSteps(SampleStepProducer):
    """Prepares the inputs of proposal graphs, for capture and checks. It runs the target on a dummy or random batch,
    then builds the metadata of the draft passes. For a random batch it also fills the drafter's caches at random.
    """

    def __init__(self, forward: Forward, sampler: RejectionSampler, drafter: EagleSpeculator) -> None:
        super().__init__(forward, sampler)
        self._drafter = drafter

    @property
    def generation(self) -> int:
        """Number of times that the step's buffers or the metadata of the draft passes have been written."""
        return super().generation + self._drafter.steps.generation

    def _randomize(self, key: BatchExecutionDescriptor, context: StepContext, hidden: Tensor, seed: int) -> None:
        sampler, batch, rng = self._sampler, context.batch, np.random.default_rng(seed)
        stage_random_rows(sampler, batch, hidden, rng, TRUNCATED)
        num_valid = rng.integers(1, 1 + batch.max_query_len, batch.num_actual_reqs)
        width = sampler.rows.emitted.shape[1]
        emitted = rng.integers(0, sampler.sampler.vocab_size, (len(num_valid), width))
        emitted[np.arange(width) >= num_valid[:, None]] = -1
        sampler.rows.emit(*(torch.from_numpy(each).to(sampler.device) for each in (emitted, num_valid)))
        self._drafter.fuzz_proposal(context, seed)

    def _after(
        self, key: BatchExecutionDescriptor, step: StagedStep, outputs: tuple[Tensor, ...], phase: Phase
    ) -> StagedBatch[ForwardState]:
        passes = self._drafter.stage_proposal(step.state, int(key.variant[0]), phase)
        state = ForwardState(step.state, features_of(self._drafter, *outputs), passes)
        return StagedBatch(key, state, self.generation, passes.signature)

    def addresses(self) -> Mapping[str, int]:
        """Addresses of the buffers of the step, the sampler and the drafter, by name."""
        return {
            **super().addresses(),
            **{f"draft.{name}": each for name, each in self._drafter.steps.addresses().items()},
        }

    def poison(self) -> None:
        """Fill the buffers of the step, the sampler and the drafter with invalid values, so that a stale read shows."""
        super().poison()
        self._drafter.steps.poison()


def features_of(drafter: Drafter, hidden: Tensor, *taps: Tensor) -> tuple[Tensor, ...]:
    """Return the target's hidden states that a drafter reads: `taps` (between layers), and `hidden` (final) if read."""
    return (*taps, hidden) if drafter.needs.hidden else taps


def written_by(drafter: EagleSpeculator, table: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a proposal may change besides its drafts: keys and values in the blocks of `table`
    (R, columns), a checksum of all other blocks, which must not change, and the logits of drafts. Waits for the device.
    """
    found, blocks = {}, table.unique()
    for layer, caches in enumerate(drafter.kv):
        for name, whole in zip("kv", caches, strict=True):
            found[f"draft.{layer}.{name}"] = shard = movable(whole).index_select(0, blocks)
            found[f"draft.{layer}.{name} elsewhere"] = bits_of(whole) - bits_of(shard)
    if (logits := drafter.inputs.logits) is not None:
        found["draft logits"] = logits.lines[:-1]
    return found


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
        """Capture graphs for each `forward` graph with equal query lengths: one for each of these numbers of drafts."""
        self._sampler, self._rows = sampler, sampler.rows
        self._drafter, self._numbers = drafter, sorted(numbers)
        self.manager: CudaGraphManager[ForwardState, Tensor] = graphs_after(
            forward, self._numbers[::-1], options, sampler.device
        )
        steps = ProposalSteps(forward, sampler, drafter)
        capture_graphs(self.manager, steps, self._body, sampler.model.peers, "no graph of the draft")

    def key_of(self, step: BatchExecutionDescriptor | None, num_drafts: int) -> BatchExecutionDescriptor | None:
        """Return the key of a graph for at least `num_drafts` drafts, after a step that ran in graph `step` (None: ran
        eagerly); None if there is no graph.
        """
        if step is None or step.uniform_query_len is None:
            return None
        enough = next(k for k in self._numbers if k >= num_drafts)
        key = replace(step, variant=(enough,))
        return key if key in self.manager.ready else None

    def run(self, key: BatchExecutionDescriptor, staged: StagedStep, features: tuple[Tensor, ...]) -> None:
        """Propose drafts after the staged step by replaying a graph, and store them. features: see `features_of`.
        Raises ReplayFailed if the graph failed.
        """
        batch = staged.state.batch
        passes = self._drafter.stage_proposal(staged.state, int(key.variant[0]))
        generation = staged.generation + self._drafter.steps.generation
        state = ForwardState(staged.state, features, passes)
        self.manager.replay(key, StagedBatch(key, state, generation, passes.signature))
        self._drafter.inputs.note_rows(batch.num_reqs)
        pad_tokens, pad_reqs = batch.num_tokens - batch.num_actual_tokens, batch.num_reqs - batch.num_actual_reqs
        self._drafter.decisions.count(DispatchDecision(key, DispatchReason.DECODE, pad_tokens, pad_reqs))

    @property
    def rtol(self) -> float:
        """Relative tolerance between replays and eager runs: 16 times the usual one, because each draft pass enlarges
        the rounding of earlier passes. With the shipped head, a relative difference of 1e-7 in the features becomes one
        of 1e-5 in keys after 4 passes.
        """
        return 16 * rounding_tolerance(self._drafter.inputs.hidden.dtype)

    def written(self, context: StepContext) -> dict[str, Tensor]:
        """Return the tensors that a proposal may change besides its drafts. Waits for the device."""
        return {"next": self._rows.next_ids[:-1]} | written_by(self._drafter, context.batch.block_tables[0])

    def _body(self, execution: Execution[ForwardState]) -> Tensor:
        state, rows, count = execution.state, self._rows, execution.state.context.batch.num_reqs
        assert execution.key is not None
        assert state.passes is not None
        own_N = rows.table_rows[:count]
        next_token_N = rows.next_ids[:, 0].index_select(0, own_N)
        context = DraftContext(
            batch=state.context.batch,
            attention=state.context.attention,
            features=state.hidden,
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
