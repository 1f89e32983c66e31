"""What follows the forward pass of a step: on a graph, or eagerly and why."""

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
from bateleur.runner.sampling.captured_sampler import CapturedSampler
from bateleur.runner.sampling.end_graphs import EndGraphs, Forward
from bateleur.runner.sampling.end_rows import EndRows
from bateleur.runner.sampling.rejection_sampler import RejectionSampler
from bateleur.runner.sampling.verified import Verified
from bateleur.runner.scheduling.scheduler import StepPlan
from bateleur.runner.stats import StepClock


class EndWhy(StrEnum):
    """What the end of a step ran on, or the first reason why it had no graph."""

    GRAPH = "graph"
    NO_GRAPHS = "eager: there are no graphs"
    FORWARD = "eager: the forward pass is on no graph of decoding rows"
    PROMPT = "eager: a row is in its prompt"
    GRAMMAR = "eager: a grammar says what may be drawn"
    RULES = "eager: a row has rules of tokens, penalties or log probabilities"
    NOT_READY = "eager: the graph is not captured"


_FORMLESS = (EndWhy.NO_GRAPHS, EndWhy.FORWARD, EndWhy.PROMPT)
"""No graph fits the form of the step."""


class Ended(NamedTuple):
    """What came of a step, on the device."""

    verified: Verified | None
    """None where no row draws."""
    num_valid: Tensor | None
    """(R,) int64 tokens of each row that stay; None where nothing is ever drafted."""
    held: bool = False
    """Whether the `EndRows` hold the step for graphs behind it."""


class StepEnd:
    """Verifies a step, commits the states of its rows, and keeps how far these have come.

    by_reason: how many steps ended on a graph, and how many eagerly for which reason.
    """

    def __init__(
        self, verifier: RejectionSampler, model_state: ModelState, lengths: RowLengths | None
    ) -> None:
        """`lengths`: for an engine that stages steps from what the device knows."""
        self._verifier, self._model_state, self._lengths = verifier, model_state, lengths
        rows = len(verifier.table.num_tokens)
        self.sampler = CapturedSampler(verifier, EndRows(rows, 1 + verifier.num_places, verifier.device))
        """For graphs of the end, and of what comes behind it."""
        self.graphs: EndGraphs | None = None
        self._poison = False
        self.by_reason: Counter[EndWhy] = Counter()

    def capture(self, forward: Forward, options: GraphOptions) -> None:
        """Capture the ends of the steps that `forward` has graphs of."""
        self._poison = options.checks >= ReplayChecks.PARANOID
        self.graphs = EndGraphs(forward, options, self.sampler, self._model_state, self._lengths)
        self.graphs.capture()

    def run(
        self,
        plan: StepPlan,
        staged: StagedBatch[StepContext],
        hidden_TD: Tensor,
        allowed: Tensor | None,
        clock: StepClock,
    ) -> Ended:
        """End a step behind its forward pass. allowed: (L, W) bits of what grammars let be drawn, None without any.

        Raises ReplayFailed if the graph failed; its key runs eagerly from then on.
        """
        why = self._why(plan, staged, allowed)
        self.by_reason[why] += 1
        if self._poison:
            self.sampler.rows.spoil()
        if why is not EndWhy.GRAPH:
            ended = self._eagerly(plan, staged, hidden_TD, allowed, clock)
            if why in _FORMLESS or ended.verified is None or not self._verifier.num_places:
                return ended
            self.sampler.stage(plan)
            self.sampler.rows.leave(ended.verified.token_ids, ended.verified.num_emitted)
            return ended._replace(held=True)
        assert self.graphs is not None
        self.sampler.stage(plan)
        packed = self.graphs.run(staged, hidden_TD, self.sampler.kind_of(plan))
        num_valid = self.sampler.rows.num_valid[: len(plan.rows)] if self._verifier.num_places else None
        clock.lap("sample")
        return Ended(self.sampler.verified(plan, packed), num_valid, held=True)

    def _why(self, plan: StepPlan, staged: StagedBatch[StepContext], allowed: Tensor | None) -> EndWhy:
        key, verifier = staged.key, self._verifier
        if self.graphs is None:
            return EndWhy.NO_GRAPHS
        if key is None or key.uniform_query_len is None:
            return EndWhy.FORWARD
        if plan.num_decodes < len(plan.rows):
            return EndWhy.PROMPT
        if allowed is not None:
            return EndWhy.GRAMMAR
        table, rows = verifier.table, plan.rows
        if not verifier.sampling.only_draws(
            rows, (table.num_tokens[rows] - table.prompt_len[rows]).astype(np.int64)
        ):
            return EndWhy.RULES
        return EndWhy.GRAPH if self.graphs.has(key) else EndWhy.NOT_READY

    def _eagerly(
        self,
        plan: StepPlan,
        staged: StagedBatch[StepContext],
        hidden_TD: Tensor,
        allowed: Tensor | None,
        clock: StepClock,
    ) -> Ended:
        verifier, batch = self._verifier, staged.state.batch
        verified = verifier.verify(plan, batch, hidden_TD, allowed)
        clock.lap("sample")
        num_valid = verifier.num_valid(plan, verified)
        self._model_state.commit(staged.state, num_valid)
        if self._lengths is not None and num_valid is not None:
            self._lengths.advance(verifier.rows_on_device(plan), batch, num_valid)
        clock.lap("commit")
        return Ended(verified, num_valid)
