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
from bateleur.runner.sampling.rejection_sampler import RejectionSampler
from bateleur.runner.sampling.step_end import Ended
from bateleur.runner.scheduling.scheduler import StepPlan
from bateleur.runner.spec_decode.draft_sync import DraftSync
from bateleur.runner.spec_decode.drafter_checks import checked_drafts, checked_lengths
from bateleur.runner.spec_decode.proposal_graphs import ProposalGraphs
from bateleur.runner.utils.device import DeviceCopies, upload


class Proposal(NamedTuple):
    """Draft lengths after a step, and what the policy needs to know about that step."""

    lengths: NDArray[np.int32]
    """(R,) drafts of each row for its next step."""
    num_requested: int
    """Drafts that the policy had requested for the decoding rows of the step that has ended."""
    greedy: bool
    """All rows take the most likely token."""


class Proposer:
    """Runs a drafter after every step of the target, for all rows of the step.

    An engine calls `propose` after a step, `learn` when the host knows which drafts were accepted, and `observe` when
    it knows how long a step took.

    policy: decides draft lengths.
    graphed: steps run on CUDA graphs, so that the host does not look at drafts.
    may_skip: the head may skip steps without drafts. This requires that no blocks are shared between requests and
        that no step is in flight.
    sync: agrees on the number of drafts with other data-parallel ranks.
    """

    def __init__(
        self,
        drafter: Drafter,
        verifier: RejectionSampler,
        policy: DraftPolicy,
        *,
        graphed: bool = False,
        may_skip: bool = False,
        sync: DraftSync | None = None,
    ) -> None:
        k, table = drafter.num_speculative_tokens, verifier.table
        self.drafter, self._sync = drafter, sync
        self.policy = policy
        self._observer = policy if isinstance(policy, ObservingPolicy) else None
        self.acceptance = AcceptStats(k)
        self._estimates: AcceptanceEstimates | None = None
        if getattr(policy, "reads_acceptance", True):
            self._estimates = AcceptanceEstimates(len(table.num_tokens), k)
        self._longest = table.token_ids.shape[1]
        if isinstance(drafter, BoundedDrafter):
            self._longest = min(self._longest, drafter.max_drafted_len)
        # Drafts without a declared distribution must be a function of the tokens, except under COUPLED.
        self._one_hot = verifier.rule is not Rule.COUPLED and not isinstance(drafter, SamplingDrafter)
        self._foreign = not isinstance(drafter, EagleSpeculator)
        # On another device the host would have to wait, and graphs need rows of equal length.
        self._sees_drafts = verifier.on_host and not graphed
        self._kept = DeviceCopies(verifier.device)
        self._verifier, self._sampling, self._table = verifier, verifier.sampling, table
        skips = may_skip and sync is None and verifier.rule is Rule.COUPLED and self._sees_drafts
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
        plan: StepPlan,
        staged: StagedBatch[StepContext],
        features: tuple[Tensor, ...],
        ended: Ended,
        admitted: Sequence[Request],
    ) -> Proposal:
        """Propose drafts for the next step of every row, after a step has ended.

        If the head can start at any position, a step without drafts does not run it: `DraftContext.start_positions`
        hides the positions that it has missed.

        admitted: requests whose first step this was since they got their row.
        """
        for request in admitted:
            self._admit(request)
        greedy = self._one_hot or self._sampling.all_greedy(plan.rows)
        num_requested = int(self._requested[plan.rows[: plan.num_decodes]].sum())
        lengths, declined = self._next_lengths(plan, greedy)
        proposal = Proposal(lengths, num_requested, greedy)
        num_drafts = int(lengths.max(initial=0))
        if self._sync is not None:
            num_drafts = self._sync.agree(len(plan.rows), num_drafts)
        # A row that could have no drafts is about to end. In the middle of a prompt the head has to run.
        if self._skips and not num_drafts and (declined or plan.samples.all()):
            self._skipped[plan.rows] = True
            return proposal
        self._resume(plan.rows)
        if ended.held and self.graphs is not None:
            key = self.graphs.key_of(staged.key, num_drafts)
            if key is not None:
                self.graphs.run(key, staged, features)
                return proposal
        context = self._context(plan, staged, features, ended, num_drafts, greedy=greedy)
        return proposal._replace(lengths=self._keep(plan, context, self.drafter.propose(context), lengths))

    def _admit(self, request: Request) -> None:
        row = request.row
        if self._estimates is not None:
            self._estimates.admit(row)
        self._skipped[row], self._first[row], self._requested[row] = False, 0, 0
        self.drafter.admit(row, request.token_ids)

    def _resume(self, rows: NDArray[np.int64]) -> None:
        """Start the head at the current position in those of `rows` (R,) whose last step it has not seen."""
        rows = rows[self._skipped[rows]]
        self._first[rows] = self._table.num_computed[rows]
        self._skipped[rows] = False

    def _keep(
        self, plan: StepPlan, context: DraftContext, drafts: Tensor, lengths: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Store drafts (R, K) of which `lengths` (R,) are wanted; returns how many of them the next step verifies."""
        if self._foreign:
            k = self.drafter.num_speculative_tokens
            drafts = checked_drafts(drafts, context.rows, k, self._sampling.vocab_size)
        if drafts is not context.out:
            self._verifier.keep_drafts(plan, context.next_token, drafts)
        if not self._sees_drafts:
            return lengths
        # Positions without a draft need not be computed.
        made = drafts.numpy()[:, : context.num_drafts] >= 0
        if np.count_nonzero(made) < made.size:
            lengths = np.minimum(lengths, np.cumprod(made, 1, np.int32).sum(1, dtype=np.int32))
        return lengths

    def _context(
        self,
        plan: StepPlan,
        staged: StagedBatch[StepContext],
        features: tuple[Tensor, ...],
        ended: Ended,
        num_drafts: int,
        *,
        greedy: bool,
    ) -> DraftContext:
        """Build the context of an eager proposal."""
        assert ended.num_valid is not None, "a drafter proposes at least one token"
        rows = self._verifier.rows_on_device(plan)
        span, verified = self._verifier.span_of(plan), ended.verified
        next_token = self._verifier.next_tokens(plan) if span is None else span.tokens
        shape = (len(plan.rows), 1 + self.drafter.num_speculative_tokens)
        if verified is not None and verified.token_ids.shape == shape:  # all rows drew
            emitted = verified.token_ids
        else:
            emitted = torch.full(shape, -1, dtype=torch.int64, device=rows.device)
            if verified is not None:
                drawing = self._kept("drawing", verified.drawing)
                emitted[:, : verified.token_ids.shape[1]].index_copy_(0, drawing, verified.token_ids)
        all_draw = len(plan.drawing[1]) == len(plan.rows)
        if not all_draw:
            next_token = next_token.where(emitted[:, 0] >= 0, self._next_of_prompts(plan, rows.device))
        if all_draw:
            _, seeds, temperature, _ = self._verifier.draws_of(plan)
        else:
            seeds, temperature = self._sampling.noise_keys(plan.rows)
        if self._one_hot:
            temperature = torch.zeros_like(temperature)
        first = self._first[plan.rows]
        return DraftContext(
            batch=staged.state.batch,
            attention=staged.state.attention,
            features=features,
            next_token=next_token,
            num_valid=ended.num_valid,
            emitted=emitted,
            rows=rows,
            seeds=seeds,
            temperature=temperature,
            num_drafts=num_drafts,
            key=staged.key,
            greedy=greedy,
            start_positions=torch.from_numpy(first) if first.any() else None,
            out=None if span is None else span.drafts,
        )

    def learn(
        self, rows: NDArray[np.int64], num_drafts: NDArray[np.int32], num_accepted: NDArray[np.int64]
    ) -> None:
        """Update acceptance counts and estimates: of `num_drafts` verified drafts of rows (D,), `num_accepted` were
        accepted.
        """
        if not np.count_nonzero(num_drafts):
            self.acceptance.num_plain += len(rows)
            return
        self.acceptance.update(num_drafts, num_accepted)
        if self._estimates is not None:
            self._estimates.update(rows, num_drafts, num_accepted)

    def observe(self, plan: StepPlan, proposal: Proposal, num_tokens: int, seconds: float) -> None:
        """Pass the time of a step to the policy, before the next step is planned. proposal: of the step. num_tokens:
        emitted by its decoding rows.
        """
        if self._observer is not None:
            others = plan.num_tokens - plan.num_decode_tokens
            self._observer.observe(
                StepTime(
                    plan.num_decodes, proposal.num_requested, num_tokens, seconds, others, proposal.greedy
                )
            )

    def _next_lengths(self, plan: StepPlan, greedy: bool) -> tuple[NDArray[np.int32], bool]:
        """Return (R,) drafts for the next step of every row, 0 in the middle of a prompt; and whether the policy gave
        no drafts to rows that could have some.

        A preempted row gets the same number again: under RATIO and BLOCK tokens depend on it.
        """
        table, draws = self._table, plan.samples
        if plan.num_decodes == len(plan.rows):
            return self._given(plan, plan.rows, greedy)
        prefilled = table.num_computed[plan.rows] + plan.query_lens >= table.prefill_len[plan.rows]
        lengths = np.where(prefilled, table.num_drafts[plan.rows], 0)
        lengths[draws], declined = self._given(plan, plan.rows[draws], greedy)
        return lengths, declined

    def _given(self, plan: StepPlan, rows: NDArray[np.int64], greedy: bool) -> tuple[NDArray[np.int32], bool]:
        """The same of rows (S,) that draw in this step."""
        k = self.drafter.num_speculative_tokens
        most = self._table.useful(rows, self._longest, k, least=True)  # each row emits one token or more
        others = plan.num_tokens - plan.num_decode_tokens
        acceptance = np.zeros((len(rows), k)) if self._estimates is None else self._estimates.of(rows)
        given = self.policy.lengths(PolicyRows(rows, most, acceptance, others, greedy))
        lengths = checked_lengths(given, most, k)
        self._requested[rows] = lengths
        return lengths, bool(most.any() and not lengths.any())

    def _next_of_prompts(self, plan: StepPlan, device: torch.device) -> Tensor:
        """(R,) the token after this step's last one in rows in the middle of their prompt; 0 in others."""
        at = self._table.num_computed[plan.rows] + plan.query_lens
        known = at < self._table.num_tokens[plan.rows]
        ids = np.where(known, self._table.token_ids[plan.rows, np.where(known, at, 0)], 0)
        return upload(ids.astype(np.int64), device)
