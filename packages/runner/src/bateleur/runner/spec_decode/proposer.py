"""Speculative decoding in an engine: runs the drafter after each step, and asks the policy for draft lengths."""

# Shape letters: R rows of a step, K draft tokens at most, J = 1 + K.

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

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
    TargetNeeds,
)
from bateleur.runner.model_runner.model_state import StagedStep
from bateleur.runner.requests.request import Request, RequestTable
from bateleur.runner.sampling.rejection_sampler import RejectionSampler, SampledStep
from bateleur.runner.sampling.token_rules import TokenRules
from bateleur.runner.scheduling.step_batch import StepBatch
from bateleur.runner.spec_decode.mtp_head import DraftSync
from bateleur.runner.spec_decode.proposal_graphs import ProposalGraphs
from bateleur.runner.utils.arguments import refuse, shown
from bateleur.runner.utils.arrays import Int32s, Int64s
from bateleur.runner.utils.device import DeviceCopies, upload


class Proposal(NamedTuple):
    """Draft lengths that were chosen after a step, and information about that step for the policy.
    lengths: (R,) drafts of each request for its next step. num_requested: drafts that the policy had requested for the
    ended step, summed over its decoding requests. greedy: whether drafts need no noise, because all requests take the
    most likely token or the drafter does not sample.
    """

    lengths: Int32s
    num_requested: int
    greedy: bool


class Proposer:
    """Runs a drafter after every step of the target, for all requests of the step.

    An engine calls `propose` after a step, `learn` when the host knows which drafts were accepted, and `observe` when
    it knows how long a step took.

    policy: chooses draft lengths.
    graphed: numbers of drafts, equal for all requests, for which steps have CUDA graphs; empty without graphs. With
    graphs the host never reads the drafts.
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
        graphed: Sequence[int] = (),
        may_skip: bool = False,
        sync: DraftSync | None = None,
    ) -> None:
        k, table = drafter.num_speculative_tokens, sampler.table
        self.drafter, self.sync, self.policy, self._graphed = drafter, sync, policy, sorted(graphed)
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

    def plan(self) -> None:
        """Plan how many of the proposed drafts the next step tests, see `plan_drafts`."""
        waits, k = self._sampler.rule is not Rule.COUPLED, self.drafter.num_speculative_tokens
        plan_drafts(self._table, self._parameters.rules, k, self._longest, self._graphed, waits_for_length=waits)

    def propose(
        self,
        batch: StepBatch,
        staged: StagedStep,
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
        if self.graphs is not None and batch.all_decode and (key := self.graphs.key_of(staged.key, num_drafts)):
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

    def _keep(self, batch: StepBatch, context: DraftContext, drafts: Tensor, lengths: Int32s) -> Int32s:
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
        staged: StagedStep,
        features: tuple[Tensor, ...],
        ended: SampledStep,
        num_drafts: int,
        *,
        greedy: bool,
    ) -> DraftContext:
        assert ended.num_valid is not None, "a drafter proposes at least one token"
        index, buffers = batch.index, self._sampler.rows
        next_token, count = buffers.next_ids[:, 0].index_select(0, index.rows), len(batch.rows)
        if batch.all_sample:
            assert batch.sampling is not None
            emitted, seeds = buffers.emitted[:count], batch.sampling.seeds
            temperature = batch.sampling.temperature
        else:
            emitted = torch.full((count, buffers.emitted.shape[1]), -1, device=self._sampler.device)
            if ended.packed is not None:
                tokens = ended.packed[:, 2 : 2 + emitted.shape[1]]
                emitted.index_copy_(0, self._copies("sampled", index.sampled), tokens)
            table, at = self._table, self._table.num_computed[batch.rows]
            known = at < table.num_known[batch.rows]  # the next token of a prompt
            ids = np.where(known, table.token_ids[batch.rows, np.where(known, at, 0)], 0).astype(np.int64)
            next_token = next_token.where(emitted[:, 0] >= 0, upload(ids, self._sampler.device))
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

    def learn(self, rows: Int64s, num_drafts: Int32s, num_accepted: Int64s) -> None:
        """Update acceptance counts and estimates after a step.
        rows: (D,) table rows of decoding requests. num_drafts: drafts that were verified. num_accepted: drafts that
        were accepted.
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

    def _next_lengths(self, batch: StepBatch, greedy: bool) -> tuple[Int32s, bool]:
        """Return how many drafts each request gets next (R,), and whether the policy chose 0 for all when drafts were
        possible. Requests in the middle of a prompt get 0. A preempted request gets the same number again, because its
        tokens depend on the number under the acceptance rules RATIO and BLOCK. greedy: see `Proposal`.
        """
        table, (_, rows_S), k = self._table, batch.sampled, self.drafter.num_speculative_tokens
        most = table.num_useful_drafts(rows_S, self._longest, k, at_least_one=True)
        others = batch.num_tokens - batch.num_decode_tokens
        acceptance = np.zeros((len(rows_S), k)) if self._estimates is None else self._estimates.of(rows_S)
        given = self.policy.lengths(PolicyRows(rows_S, most, acceptance, others, greedy))
        self._requested[rows_S] = lengths = checked_lengths(given, most, k)
        declined = bool(most.any() and not lengths.any())
        if batch.all_decode:
            return lengths, declined
        prefilled = table.num_computed[batch.rows] >= table.prefill_len[batch.rows]
        every = np.where(prefilled, table.num_drafts[batch.rows], 0)
        every[batch.samples] = lengths
        return every, declined


def plan_drafts(
    table: RequestTable,
    rules: TokenRules,
    max_drafts: int,
    max_drafted_len: int,
    graphed: Sequence[int],
    *,
    waits_for_length: bool,
) -> None:
    """Write three columns of the request table for the next step of all decoding requests: `num_drafts`, the drafts to
    verify; `num_draft_slots`, the tokens to compute for drafts, padding included; and `must_wait`.
    A request verifies those proposed drafts that its remaining length allows. While a step is in flight, only bounds of
    the length are known. A request then must wait for the results of that step in two cases: its tokens depend on the
    number of drafts and may not have room for all of them, or its token rules (min_tokens) depend on the length.

    max_drafted_len: maximum sequence length, drafts included, up to which the drafter can propose.
    graphed: numbers of drafts for which steps have graphs, ascending; empty without graphs. The smallest of them that
        is enough for every request gives the slots of all requests, because batches of different lengths would run
        eagerly (vLLM #35387). Near `max_model_len` a request gets fewer slots.
    waits_for_length: whether tokens depend on the number of drafts, as under the acceptance rules RATIO and BLOCK.
    """
    rows = np.flatnonzero(table.num_computed >= np.maximum(table.prefill_len, 1))
    proposed = table.num_proposed[rows]
    useful = table.num_useful_drafts(rows, max_drafted_len, max_drafts, at_least_one=False)
    table.num_drafts[rows] = slots = lengths = np.minimum(proposed, useful)
    if graphed:
        longest = lengths.max(initial=0)
        common = next((n for n in graphed if n >= longest), 0)
        slots = np.maximum(lengths, np.minimum(common, table.max_model_len - table.num_tokens[rows]))
    table.num_draft_slots[rows] = slots
    uncertain = table.num_uncertain[rows] > 0
    table.must_wait[rows] = uncertain & (proposed > useful) & waits_for_length
    if np.count_nonzero(uncertain):
        open_rows = rows[uncertain]
        most = table.num_tokens[open_rows] - table.prompt_len[open_rows]
        least = most - table.num_uncertain[open_rows]
        depends = rules.depends_on_length(open_rows, least, most + table.num_drafts[open_rows])
        table.must_wait[open_rows[depends]] = True


def check_drafter(drafter: Drafter, num_drafts: int, num_layers: int) -> None:
    """Raise ValueError if the drafter has another number of drafts, or needs outputs that the target does not have."""
    k, needs = drafter.num_speculative_tokens, drafter.needs
    if type(k) is not int or k != num_drafts:
        refuse("drafter.num_speculative_tokens", k, f"num_speculative_tokens = {num_drafts}")
    if not isinstance(needs, TargetNeeds):
        refuse("drafter.needs", needs, "a bateleur.eagle.TargetNeeds")
    if max(needs.taps, default=0) > num_layers:
        rule = f"boundaries of a model of {num_layers} layers, 0 to {num_layers}"
        refuse("drafter.needs.taps", needs.taps, rule)


def checked_drafts(drafts: Any, rows: Tensor, num_drafts: int, vocab_size: int) -> Tensor:
    """Return the proposal `drafts` of a drafter for `rows` (R,), with -1 in place of invalid token ids.
    Raises ValueError unless it is a tensor (R, K) int64 on the device of `rows`. Ids are replaced instead of refused,
    because a check would be a host-device sync.
    """
    shape = (len(rows), num_drafts)
    if not isinstance(drafts, Tensor):
        given = f"a {type(drafts).__name__}"
    else:
        given = f"{tuple(drafts.shape)} {drafts.dtype} on {drafts.device}"
        if drafts.shape == shape and drafts.dtype == torch.int64 and drafts.device == rows.device:
            return drafts.where((drafts >= 0) & (drafts < vocab_size), -1)
    raise ValueError(f"drafter proposed {given}; it must be a tensor {shape} torch.int64 on {rows.device}")


def checked_lengths(lengths: Any, most: Int32s, num_drafts: int) -> Int32s:
    """Return the draft lengths of a policy, limited to `most` (R,), the drafts that each request can have.
    Raises ValueError for anything but one integer from 0 to `num_drafts` for each of R requests.
    """
    given = np.asarray(lengths)
    wrong = given.shape != most.shape
    # An empty list becomes an array of floats.
    if wrong or (given.size and not (given.dtype.kind in "iu" and given.min() >= 0 and given.max() <= num_drafts)):
        rule = f"it must be {len(most)} integers in [0, {num_drafts}]"
        raise ValueError(f"draft_policy gave {shown(lengths)}; {rule}")
    kept: Int32s = np.minimum(given, most).astype(np.int32)
    return kept
