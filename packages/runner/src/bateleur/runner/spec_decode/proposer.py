"""Speculative decoding in an engine: runs the drafter after each step, and asks the policy for draft lengths."""

# Shape letters: R rows of a step, J = 1 + K.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.cudagraph import StagedBatch
from bateleur.eagle import (
    AcceptanceEstimates,
    AcceptStats,
    BoundedDrafter,
    DraftContext,
    Drafter,
    DraftPolicy,
    EagleSpeculator,
    ObservingPolicy,
    PolicyRows,
    Rule,
    SamplingDrafter,
    StepTime,
)
from bateleur.runner.models import StepContext
from bateleur.runner.requests.request import Request
from bateleur.runner.sampling.rejection_sampler import RejectionSampler, SampledStep
from bateleur.runner.scheduling.step_batch import StepBatch
from bateleur.runner.spec_decode.drafter_checks import checked_drafts, checked_lengths
from bateleur.runner.spec_decode.mtp_head import DraftSync
from bateleur.runner.spec_decode.proposal_graphs import ProposalGraphs
from bateleur.runner.utils.device import DeviceCopies, upload


class Proposal(NamedTuple):
    """Draft lengths after a step, and information about that step for the policy."""

    lengths: NDArray[np.int32]
    """(R,) drafts of each row for its next step."""
    num_requested: int
    """Drafts that the policy had requested for the decoding rows of the step that has ended."""
    greedy: bool
    """All rows take the most likely token."""


class Proposer:
    """Runs a drafter after every step of the target, for all requests of the step.

    An engine calls `propose` after a step, `learn` when the host knows which drafts were accepted, and `observe` when
    it knows how long a step took.

    policy: chooses draft lengths.
    graphed: whether steps run in CUDA graphs; then the host never reads the drafts.
    may_skip: whether the head may skip steps without drafts. This requires that no blocks are shared between requests
    and that no step is in flight.
    sync: agrees on the number of drafts with other data-parallel ranks.
    """

    def __init__(
        self,
        drafter: Drafter,
        sampler: RejectionSampler,
        policy: DraftPolicy,
        *,
        graphed: bool = False,
        may_skip: bool = False,
        sync: DraftSync | None = None,
    ) -> None:
        k, table = drafter.num_speculative_tokens, sampler.table
        self.drafter, self.sync = drafter, sync
        self.policy = policy
        self._observer = policy if isinstance(policy, ObservingPolicy) else None
        self.acceptance = AcceptStats(k)
        self._estimates: AcceptanceEstimates | None = None
        if getattr(policy, "reads_acceptance", True):
            self._estimates = AcceptanceEstimates(len(table.num_tokens), k)
        self._longest = table.max_model_len
        if isinstance(drafter, BoundedDrafter):
            self._longest = min(self._longest, drafter.max_drafted_len)
        # Drafts without a declared distribution must be a function of the tokens, except under COUPLED.
        self._one_hot = sampler.rule is not Rule.COUPLED and not isinstance(drafter, SamplingDrafter)
        self._foreign = not isinstance(drafter, EagleSpeculator)
        # On another device the host would have to wait, and graphs need rows of equal length.
        self._sees_drafts = sampler.device.type == "cpu" and not graphed
        self._copies = DeviceCopies(sampler.device)
        self._sampler, self._parameters, self._table = sampler, sampler.sampler, table
        skips = may_skip and sync is None and sampler.rule is Rule.COUPLED and self._sees_drafts
        self._skips = skips and isinstance(drafter, EagleSpeculator) and drafter.can_start_late
        """Whether a step without drafts runs without the head."""
        num_rows = len(table.num_tokens)
        self._skipped, self._first = np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.int64)
        """(N,) whether the head has not seen the last step of a row, and the first position since the last one that it
        has not seen."""
        self._requested = np.zeros(num_rows, np.int32)
        """(N,) drafts that the policy asked for in the last step of each row."""
        self.graphs: ProposalGraphs | None = None
        """CUDA graphs of whole proposals."""

    def propose(
        self,
        batch: StepBatch,
        staged: StagedBatch[StepContext],
        features: tuple[Tensor, ...],
        ended: SampledStep,
        admitted: Sequence[Request],
    ) -> Proposal:
        """Propose drafts for the next step of every request, after sampling and verification.

        A head that can start at any position does not run in a step without drafts. `DraftContext.start_positions` then
        hides the positions that it has missed.

        features: hidden states that the drafter reads. ended: results of sampling and verification. admitted: requests
        whose first step this was since they got their table row.
        """
        for request in admitted:
            self._admit(request)
        greedy = self._one_hot or self._parameters.all_greedy(batch.rows)
        num_requested = int(self._requested[batch.rows[: batch.num_decodes]].sum())
        lengths, declined = self._next_lengths(batch, greedy)
        proposal = Proposal(lengths, num_requested, greedy)
        num_drafts = int(lengths.max(initial=0))
        if self.sync is not None:
            num_drafts = self.sync.agree(len(batch.rows), num_drafts)
        # A row that could have no drafts is about to end. In the middle of a prompt the head has to run.
        if self._skips and not num_drafts and (declined or batch.all_sample):
            self._skipped[batch.rows] = True
            return proposal
        # The head starts at this step in rows whose last step it has not seen.
        resumed = self._skipped[batch.rows]
        self._first[batch.rows[resumed]] = batch.num_computed[resumed]
        self._skipped[batch.rows] = False
        if self.graphs is not None and batch.all_decode:
            key = self.graphs.key_of(staged.key, num_drafts)
            if key is not None:
                self.graphs.run(key, staged, features)
                return proposal
        context = self._context(batch, staged, features, ended, num_drafts, greedy=greedy)
        return proposal._replace(lengths=self._keep(batch, context, self.drafter.propose(context), lengths))

    def _admit(self, request: Request) -> None:
        row = request.row
        if self._estimates is not None:
            self._estimates.admit(row)
        self._skipped[row], self._first[row], self._requested[row] = False, 0, 0
        self.drafter.admit(row, request.token_ids)

    def _keep(
        self, batch: StepBatch, context: DraftContext, drafts: Tensor, lengths: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Store drafts (R, K) for verification. Returns how many of the wanted `lengths` (R,) will be verified."""
        if self._foreign:
            k = self.drafter.num_speculative_tokens
            drafts = checked_drafts(drafts, context.rows, k, self._parameters.vocab_size)
        self._sampler.rows.keep(batch.index.rows, context.next_token, drafts)
        if not self._sees_drafts:
            return lengths
        # Positions without a draft need not be computed.
        made = drafts.numpy()[:, : context.num_drafts] >= 0
        if np.count_nonzero(made) < made.size:
            lengths = np.minimum(lengths, np.cumprod(made, 1, np.int32).sum(1, dtype=np.int32))
        return lengths

    def _context(
        self,
        batch: StepBatch,
        staged: StagedBatch[StepContext],
        features: tuple[Tensor, ...],
        ended: SampledStep,
        num_drafts: int,
        *,
        greedy: bool,
    ) -> DraftContext:
        assert ended.num_valid is not None, "a drafter proposes at least one token"
        index, buffers, output = batch.index, self._sampler.rows, ended.output
        next_token, count = self._sampler.next_tokens(batch), len(batch.rows)
        if batch.all_sample:
            assert batch.sampling is not None
            emitted, seeds = buffers.emitted[:count], batch.sampling.seeds
            temperature = batch.sampling.temperature
        else:
            emitted = torch.full((count, buffers.emitted.shape[1]), -1, device=self._sampler.device)
            if output is not None:
                emitted.index_copy_(0, self._copies("sampled", output.sampled), output.token_ids)
            next_token = next_token.where(emitted[:, 0] >= 0, self._next_of_prompts(batch))
            seeds, temperature = self._parameters.noise_keys(batch.rows)
        if self._one_hot:
            temperature = torch.zeros_like(temperature)
        first = self._first[batch.rows]
        return DraftContext(
            batch=staged.state.batch,
            attention=staged.state.attention,
            features=features,
            next_token=next_token,
            num_valid=ended.num_valid,
            emitted=emitted,
            rows=index.rows,
            seeds=seeds,
            temperature=temperature,
            num_drafts=num_drafts,
            key=staged.key,
            greedy=greedy,
            start_positions=torch.from_numpy(first) if first.any() else None,
        )

    def learn(self, rows: NDArray[np.int64], num_drafts: NDArray[np.int32], num_accepted: NDArray[np.int64]) -> None:
        """Update acceptance counts and estimates after a step.

        rows: (D,) decoding requests. num_drafts: drafts that were verified. num_accepted: drafts that were accepted.
        """
        if not np.count_nonzero(num_drafts):
            self.acceptance.num_plain += len(rows)
            return
        self.acceptance.update(num_drafts, num_accepted)
        if self._estimates is not None:
            self._estimates.update(rows, num_drafts, num_accepted)

    def observe(self, batch: StepBatch, proposal: Proposal, num_tokens: int, seconds: float) -> None:
        """Pass the time of a step to the policy, before the next step is planned.

        proposal: the proposal of that step. num_tokens: tokens that its decoding requests emitted.
        """
        if self._observer is not None:
            others = batch.num_tokens - batch.num_decode_tokens
            self._observer.observe(
                StepTime(batch.num_decodes, proposal.num_requested, num_tokens, seconds, others, proposal.greedy)
            )

    def _next_lengths(self, batch: StepBatch, greedy: bool) -> tuple[NDArray[np.int32], bool]:
        """Return how many drafts each request gets next (R,), and whether the policy withheld possible drafts.

        Requests in the middle of a prompt get 0. A preempted request gets the same number again, because its tokens
        depend on the number under RATIO and BLOCK.
        """
        table, draws = self._table, batch.samples
        if batch.all_decode:
            return self._given(batch, batch.rows, greedy)
        prefilled = table.num_computed[batch.rows] >= table.prefill_len[batch.rows]
        lengths = np.where(prefilled, table.num_drafts[batch.rows], 0)
        lengths[draws], declined = self._given(batch, batch.rows[draws], greedy)
        return lengths, declined

    def _given(self, batch: StepBatch, rows: NDArray[np.int64], greedy: bool) -> tuple[NDArray[np.int32], bool]:
        """Return the results of `_next_lengths` for the requests `rows` (S,) that sample in this step."""
        k = self.drafter.num_speculative_tokens
        most = self._table.num_useful_drafts(rows, self._longest, k, at_least_one=True)
        others = batch.num_tokens - batch.num_decode_tokens
        acceptance = np.zeros((len(rows), k)) if self._estimates is None else self._estimates.of(rows)
        given = self.policy.lengths(PolicyRows(rows, most, acceptance, others, greedy))
        lengths = checked_lengths(given, most, k)
        self._requested[rows] = lengths
        return lengths, bool(most.any() and not lengths.any())

    def _next_of_prompts(self, batch: StepBatch) -> Tensor:
        """Return the next prompt token of each request in the middle of its prompt, (R,) int64; 0 for others."""
        at = self._table.num_computed[batch.rows]
        known = at < self._table.num_known[batch.rows]
        ids = np.where(known, self._table.token_ids[batch.rows, np.where(known, at, 0)], 0)
        return upload(ids.astype(np.int64), self._sampler.device)
