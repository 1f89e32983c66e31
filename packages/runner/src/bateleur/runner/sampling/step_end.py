"""The end of a step (sampling, commit of states, lengths) after the forward pass, in a CUDA graph or eagerly."""

# Shape letters: R rows of a step, T tokens, L rows of logits, W words of 32 bits, D hidden size.

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from torch import Tensor

from bateleur.cudagraph import ReplayChecks, StagedBatch
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.model_runner.model_state import ModelState
from bateleur.runner.model_runner.row_lengths import RowLengths
from bateleur.runner.models import StepContext
from bateleur.runner.sampling.end_graphs import EndGraphs, Forward
from bateleur.runner.sampling.rejection_sampler import RejectionSampler, SamplerOutput
from bateleur.runner.scheduling.step_batch import SamplingInputs, StepBatch


class EndReason(StrEnum):
    """How the end of a step ran: in a graph, or eagerly with the first reason."""

    GRAPH = "graph"
    NO_GRAPHS = "eager: there are no graphs"
    FORWARD = "eager: the forward pass is on no graph of decoding rows"
    PROMPT = "eager: a row is in its prompt"
    GRAMMAR = "eager: a row follows a grammar"
    RULES = "eager: a row has token rules, penalties or log probabilities"
    NOT_READY = "eager: the graph is not captured"


class EndedStep(NamedTuple):
    """Results of a step, on the device."""

    output: SamplerOutput | None
    """None if no row samples."""
    num_valid: Tensor | None
    """(R,) int64 tokens of each row that stay; None if the engine never drafts."""


class StepEnd:
    """Runs the end of a step: samples tokens, commits recurrent states, and advances sequence lengths.

    by_reason: number of steps by how their end ran.
    """

    def __init__(self, sampler: RejectionSampler, model_state: ModelState, lengths: RowLengths | None) -> None:
        """lengths: sequence lengths on the device, if the engine stages steps from them."""
        self.sampler, self._model_state, self._lengths = sampler, model_state, lengths
        self.graphs: EndGraphs | None = None
        self._poison = False
        self.by_reason: Counter[EndReason] = Counter()

    def capture(self, forward: Forward, options: GraphOptions) -> None:
        """Capture graphs for the end of the steps that `forward` has graphs of."""
        self._poison = options.checks >= ReplayChecks.PARANOID
        self.graphs = EndGraphs(forward, options, self.sampler, self._model_state, self._lengths)
        self.graphs.capture()

    def run(
        self, batch: StepBatch, staged: StagedBatch[StepContext], hidden_TD: Tensor, allowed: Tensor | None
    ) -> EndedStep:
        """Run the end of a step after its forward pass. allowed: (L, W) bits of tokens that grammars allow, or None.

        Raises ReplayFailed if the graph failed; its key runs eagerly from then on.
        """
        sampler = self.sampler
        inputs = sampler.stage(batch)
        reason = self._reason(batch, staged, inputs, allowed)
        self.by_reason[reason] += 1
        if self._poison:
            sampler.rows.poison_emitted()
        if reason is EndReason.GRAPH:
            assert self.graphs is not None
            output = sampler.output_of(batch, self.graphs.run(staged, hidden_TD, inputs.kind))
            return EndedStep(output, sampler.rows.num_valid[: len(batch.rows)] if sampler.num_drafts else None)
        metadata = staged.state.batch
        eager = sampler.verify(batch, metadata, hidden_TD, allowed)
        num_valid = sampler.num_valid(batch, eager)
        self._model_state.commit(staged.state, num_valid)
        if self._lengths is not None and num_valid is not None:
            self._lengths.advance(batch.index.rows, metadata, num_valid)
        return EndedStep(eager, num_valid)

    def _reason(
        self, batch: StepBatch, staged: StagedBatch[StepContext], inputs: SamplingInputs, allowed: Tensor | None
    ) -> EndReason:
        key, sampler = staged.key, self.sampler
        if self.graphs is None:
            return EndReason.NO_GRAPHS
        if key is None or key.uniform_query_len is None:
            return EndReason.FORWARD
        if not batch.all_decode:
            return EndReason.PROMPT
        if allowed is not None:
            return EndReason.GRAMMAR
        if not inputs.plain:
            generated = sampler.table.num_tokens[batch.rows] - sampler.table.prompt_len[batch.rows]
            if not sampler.sampler.is_plain(batch.rows, generated.astype(np.int64)):
                return EndReason.RULES
        return EndReason.GRAPH if self.graphs.has(key) else EndReason.NOT_READY
