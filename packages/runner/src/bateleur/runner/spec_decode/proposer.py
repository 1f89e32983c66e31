"""Where drafts come from: what a drafter is told of a step, and how many drafts a request's next step verifies."""

# Shape letters: R rows of a step, J = 1 + K.

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.cudagraph import Staged
from bateleur.eagle import (
    AcceptanceEstimates,
    AcceptStats,
    BoundedDrafter,
    DozingPolicy,
    DraftContext,
    Drafter,
    DraftPolicy,
    EagleSpeculator,
    ObservingPolicy,
    PolicyRows,
    Rule,
    SamplingDrafter,
    SettledPolicy,
    SleepingPolicy,
    StepTime,
)
from bateleur.runner.device import Kept, upload
from bateleur.runner.models import StepContext
from bateleur.runner.requests.request import Request
from bateleur.runner.sampling.rejection_sampler import RejectionSampler
from bateleur.runner.sampling.step_end import Ended
from bateleur.runner.scheduling.scheduler import StepPlan
from bateleur.runner.spec_decode.answers import checked_drafts, checked_lengths, checked_number
from bateleur.runner.spec_decode.backlog import Backlog
from bateleur.runner.spec_decode.chain_lockstep import ChainLockstep
from bateleur.runner.spec_decode.proposal_graphs import ProposalGraphs


class Proposer:
    """Runs a drafter behind the target: every step is followed by one proposal for all of its rows.

    `policy` says how many drafts each request's next step verifies, from what became of earlier ones. `graphed`:
    numbers of drafts, the same for all rows, with which steps run on graphs. `defers`: a head on a CPU is not shown a
    step that nobody wants drafts of, before somebody does; for an engine that knows all tokens but those of the step
    that runs, and shares no blocks. `chains`: where other ranks take part in the drafter's passes.
    """

    def __init__(
        self,
        drafter: Drafter,
        verifier: RejectionSampler,
        policy: DraftPolicy,
        graphed: Sequence[int],
        *,
        defers: bool = False,
        chains: ChainLockstep | None = None,
    ) -> None:
        k, table = drafter.num_speculative_tokens, verifier.table
        self.drafter, self._chains = drafter, chains
        self.policy = policy
        self._observer = policy if isinstance(policy, ObservingPolicy) else None
        self._cpu_seconds, self._greedy, self._num_missed = 0.0, False, 0
        self._asked: StepPlan | None = None
        """The plan that `_greedy` is of."""
        self.acceptance = AcceptStats(k)
        self._estimates = AcceptanceEstimates(len(table.num_tokens), k)
        self._graphed = sorted(graphed)
        self._max_model_len = self._longest = table.token_ids.shape[1]
        if isinstance(drafter, BoundedDrafter):
            self._longest = min(self._longest, drafter.max_drafted_len)
        # Drafts whose law nobody declares must be a function of the tokens, unless they need none.
        self._counts = verifier.rule is not Rule.COUPLED
        self._one_hot = verifier.rule is not Rule.COUPLED and not isinstance(drafter, SamplingDrafter)
        self._foreign = not isinstance(drafter, EagleSpeculator)
        # Elsewhere the host would have to wait; and on graphs rows of one length are worth more.
        self._sees_drafts = verifier.on_host and not graphed
        self._kept = Kept(verifier.device)
        self._verifier, self._sampling, self._table = verifier, verifier.sampling, table
        deferred = defers and chains is None and not (self._counts or self._foreign) and self._sees_drafts
        self._backlog: Backlog | None = None
        self._settling = policy if isinstance(policy, SettledPolicy) else None
        self._sleeper: SleepingPolicy | None = None
        self._asleep = False
        """Whether nobody remembers the step that runs, or ran last."""
        self._assigned: NDArray[np.int32] | None = None
        """That no row has drafts, as the last plan says it, where that was written down last."""
        self._dozer = policy if isinstance(policy, DozingPolicy) else None
        if deferred and isinstance(drafter, EagleSpeculator):
            self._backlog = Backlog(table, begins_late=drafter.begins_late)
            self._sleeper = policy if drafter.begins_late and isinstance(policy, SleepingPolicy) else None
        self._roomy = not (self._counts or self._graphed)
        """Whether nothing but the end of its request, and what was forgotten of it, keeps a row from any number of
        drafts."""
        self._roomy &= self._longest == self._max_model_len
        self.graphs: ProposalGraphs | None = None
        """Of whole proposals."""

    def admit(self, request: Request) -> None:
        """A request got a row."""
        self._estimates.admit(request.row)
        if self._backlog is not None:
            self._backlog.admit(request.row)
        self.drafter.admit(request.row, request.token_ids)

    def watches(self, plan: StepPlan) -> bool:
        """Whether the drafter will be shown the step that is about to run, at its end or later. If not, it is one of an
        engine without drafts, and features of it are nobody's.
        """
        if self._sleeper is None:
            return True
        asleep = self._sleeper.sleeps(len(plan.rows), greedy=self._is_greedy(plan))
        if self._asleep and not asleep and self._backlog is not None:
            self._backlog.restart()
        self._asleep = asleep
        return not asleep

    def propose(
        self,
        plan: StepPlan,
        staged: Staged[StepContext],
        features: tuple[Tensor, ...],
        ended: Ended,
    ) -> NDArray[np.int32]:
        """Let the drafter see a step that has ended and that it `watches`, and keep what it proposes.

        Returns how many drafts the next step of each row tests (R,), as far as they are of use then.
        """
        settled = self._settled(plan)
        if settled == 0 and self._backlog is not None:
            self._defer(plan, features, ended)
            return plan.no_drafts
        lengths = self._next_lengths(plan, settled)
        num_drafts = int(lengths.max(initial=0))
        if self._chains is not None:
            num_drafts = self._chains.agree(len(plan.rows), num_drafts)
        if ended.held and self.graphs is not None:
            key = self.graphs.key_of(staged.key, num_drafts)
            if key is not None:
                self.graphs.run(key, staged, features)
                return lengths
        if self._backlog is not None:
            assert isinstance(self.drafter, EagleSpeculator)
            if not num_drafts:
                self._defer(plan, features, ended)
                return lengths
            if missing := self._backlog.take(plan.rows):
                self._num_missed = len(missing[0].token_ids)
                self.drafter.catch_up(*missing)
        context = self._context(plan, staged, features, ended, num_drafts)
        return self._keep(plan, context, self.drafter.propose(context), lengths)

    def _keep(
        self, plan: StepPlan, context: DraftContext, drafts: Tensor, lengths: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Keep drafts (R, K) of which `lengths` (R,) are wanted; returns how many of them the next step tests."""
        if self._foreign:
            k = self.drafter.num_speculative_tokens
            drafts = checked_drafts(drafts, context.rows, k, self._sampling.vocab_size)
        if drafts is not context.room:
            self._verifier.keep_drafts(plan, context.next_token, drafts)
        if not self._sees_drafts:
            return lengths
        # Places where it left one out need not be computed.
        made = drafts.numpy()[:, : context.num_drafts] >= 0
        if np.count_nonzero(made) < made.size:
            lengths = np.minimum(lengths, np.cumprod(made, 1, np.int32).sum(1, dtype=np.int32))
        return lengths

    def idle(self) -> int:
        """Behind a step of nobody, take part in the proposals of other ranks; returns how many drafts these make."""
        return 0 if self._chains is None else self._chains.idle()

    def _settled(self, plan: StepPlan) -> int | None:
        """The number of drafts of the next step, where the policy knows it. It is asked first of all."""
        self._num_missed, greedy = 0, self._is_greedy(plan)
        return None if self._settling is None else self._settling.settled(len(plan.drawing[1]), greedy=greedy)

    def _is_greedy(self, plan: StepPlan) -> bool:
        """Whether all rows of the plan are drafted for as greedy ones."""
        if plan is not self._asked:
            self._asked, self._greedy = plan, self._one_hot or self._sampling.all_greedy(plan.rows)
        return self._greedy

    def _defer(self, plan: StepPlan, features: tuple[Tensor, ...], ended: Ended) -> None:
        """The drafter is shown this step when somebody wants drafts."""
        assert self._backlog is not None
        assert ended.num_valid is not None
        self._backlog.add(plan.rows, plan.query_lens, ended.num_valid.numpy(), features)

    def _context(
        self,
        plan: StepPlan,
        staged: Staged[StepContext],
        features: tuple[Tensor, ...],
        ended: Ended,
        num_drafts: int,
    ) -> DraftContext:
        """What a drafter is told of a step that it proposes for eagerly."""
        assert ended.num_valid is not None, "a drafter proposes at least one token"
        rows = self._verifier.rows_on_device(plan)
        span, verified = self._verifier.span_of(plan), ended.verified
        next_token = self._verifier.next_tokens(plan) if span is None else span.tokens
        shape = (len(plan.rows), 1 + self.drafter.num_speculative_tokens)
        if verified is not None and verified.token_ids.shape == shape:  # every row drew
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
        begins = None if self._backlog is None else self._backlog.begins(plan.rows)
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
            greedy=self._greedy,
            begins=None if begins is None else torch.from_numpy(begins),
            room=None if span is None else span.drafts,
        )

    def learn(
        self, rows: NDArray[np.int64], num_drafts: NDArray[np.int32], num_accepted: NDArray[np.int64]
    ) -> None:
        """The host knows what became of the drafts of rows (D,): `num_accepted` of `num_drafts` that were tested."""
        self.acceptance.update(num_drafts, num_accepted)
        self._estimates.update(rows, num_drafts, num_accepted)

    def assign(self, rows: NDArray[np.int64], lengths: NDArray[np.int32]) -> None:
        """Rows (S,) that drew have as many drafts in their next step as was decided before these were made, or as many
        as are of use behind the tokens that they may have by now.

        Where tokens depend on how many it is, a row whose bounds leave that open waits until it is known.
        """
        if lengths is self._assigned:
            return
        table, backlog = self._table, self._backlog
        self._assigned = lengths if self._asleep else None
        roomy = self._roomy and (backlog is None or not backlog.loses)
        if roomy and table.assign(rows, lengths, self.drafter.num_speculative_tokens):
            return  # nobody is near an end
        if backlog is not None and not lengths.any():
            table.num_drafts[rows] = table.num_places[rows] = 0
            return
        most = self._most(rows, self.drafter.num_speculative_tokens, least=False)
        if self._counts:
            table.rests[rows] = (lengths > most) & (table.slack[rows] > 0)
        lengths = np.minimum(lengths, most)
        table.num_drafts[rows] = lengths
        table.num_places[rows] = self._padded(lengths, self._max_model_len - table.num_tokens[rows])

    def assign_late(self, request: Request, length: int) -> None:
        """The same for a request that drew, and had to give its row back meanwhile."""
        useful = min(request.max_total_tokens - 1, self._longest) - request.num_tokens
        request.num_drafts = max(0, min(length, useful))

    def timed(self, seconds: float) -> float:
        """What a step took that took `seconds` on the clock."""
        if self._observer is not None and self._verifier.on_host:
            # What this thread computed: others that run on the machine do not count.
            before, self._cpu_seconds = self._cpu_seconds, time.thread_time()
            return min(seconds, self._cpu_seconds - before)
        return seconds

    @property
    def dozes(self) -> bool:
        """Whether nobody wants to know what the last step took."""
        return self._dozer is not None and self._dozer.dozes

    def observe(self, plan: StepPlan, lengths: NDArray[np.int32], seconds: float) -> None:
        """Tell a policy that listens what a step took, behind which `lengths` (R,) drafts were made. Before the next
        one is planned.
        """
        if self._observer is None:
            return
        n = plan.num_decodes
        verified, proposed = plan.query_lens[:n] - 1, lengths[:n]
        others = plan.num_tokens - plan.num_decode_tokens
        missed, asleep = 0 if self._asleep else self._num_missed, self._asleep
        self._observer.observe(StepTime(verified, proposed, others, seconds, self._greedy, missed, asleep))

    def _next_lengths(self, plan: StepPlan, settled: int | None) -> NDArray[np.int32]:
        """(R,) drafts for the next step of every row; 0 where the prompt goes on, which nobody counts as a row then.

        A row that was preempted gets those that it had: under RATIO and BLOCK tokens depend on what was drafted.
        """
        table, draws = self._table, plan.samples
        if plan.num_decodes == len(plan.rows):
            return self._given(plan, plan.rows, settled)
        prefilled = table.num_computed[plan.rows] + plan.query_lens >= table.prefill_len[plan.rows]
        lengths = np.where(prefilled, table.num_drafts[plan.rows], 0)
        lengths[draws] = self._given(plan, plan.rows[draws], settled)
        return lengths

    def _given(self, plan: StepPlan, rows: NDArray[np.int64], settled: int | None) -> NDArray[np.int32]:
        """(S,) drafts for the next step of rows (S,) that draw in this one."""
        k = self.drafter.num_speculative_tokens
        if settled is not None:
            return self._most(rows, int(checked_number(settled, k)), least=True)
        most = self._most(rows, k, least=True)  # each of them emits one token or more
        others = plan.num_tokens - plan.num_decode_tokens
        missed = 0 if self._backlog is None else self._backlog.num_missed(plan.rows)
        acceptance = self._estimates.of(rows)
        given = self.policy.lengths(PolicyRows(rows, most, acceptance, others, self._greedy, missed))
        return checked_lengths(given, most, k)

    def _most(self, rows: NDArray[np.int64], most: int, *, least: bool) -> NDArray[np.int32]:
        """(R,) drafts, at most `most`, that can be of use to rows; see `RequestTable.useful`."""
        useful = self._table.useful(rows, self._longest, most, least=least)
        if self._backlog is not None and self._backlog.loses:
            useful[self._backlog.is_lost(rows)] = 0
        return useful

    def _padded(self, lengths: NDArray[np.int32], room: NDArray[np.int32]) -> NDArray[np.int32]:
        """(R,) places for `lengths` drafts: for all rows as many as a graph has for the longest, since a length of its
        own would keep the whole step off it (vLLM #35387).
        """
        if not self._graphed:
            return lengths
        longest = lengths.max(initial=0)
        common = next((n for n in self._graphed if n >= longest), 0)
        return np.maximum(lengths, np.minimum(common, room))

    def _next_of_prompts(self, plan: StepPlan, device: torch.device) -> Tensor:
        """(R,) the token after this step's last in rows whose prompt goes on; 0 in others."""
        at = self._table.num_computed[plan.rows] + plan.query_lens
        known = at < self._table.num_tokens[plan.rows]
        ids = np.where(known, self._table.token_ids[plan.rows, np.where(known, at, 0)], 0)
        return upload(ids.astype(np.int64), device)
