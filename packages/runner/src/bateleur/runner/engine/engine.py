"""One step of the engine, and the requests that live in it."""

# Shape letters: R rows of a step, T tokens, S rows that draw a token, V vocabulary.

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch

from bateleur.cudagraph import CudaGraphMode, DispatchDecision, ReplayChecks, ReplayFailed, VerifyReport
from bateleur.eagle import BoundedDrafter, Drafter, EagleSpeculator, Rule
from bateleur.metadata import BatchShape
from bateleur.runner.cache.prefix_cache import PrefixCache
from bateleur.runner.cache.tensors import Caches, zero_fresh_blocks
from bateleur.runner.distributed.common_graphs import keep_common
from bateleur.runner.engine.all_graphs import AllGraphs
from bateleur.runner.engine.messages import RunStep
from bateleur.runner.engine.operations import EngineOperations
from bateleur.runner.engine.output_processor import OutputProcessor
from bateleur.runner.engine.prefix_offload import PrefixOffload
from bateleur.runner.engine.request_registry import RequestRegistry
from bateleur.runner.engine.request_times import RequestClock
from bateleur.runner.engine.setup import EngineSetup
from bateleur.runner.engine.step_agreement import compare
from bateleur.runner.engine.step_collector import StepCollector
from bateleur.runner.engine.step_in_flight import StepInFlight
from bateleur.runner.engine.step_rows import StagedRows, ask_for
from bateleur.runner.engine.warm_up import run_largest, warm_up
from bateleur.runner.model_runner.model_state import ModelState
from bateleur.runner.model_runner.row_lengths import RowLengths
from bateleur.runner.model_runner.step_graphs import StepGraphs, query_lens_of
from bateleur.runner.model_runner.step_producer import StepProducer, padded_shape
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling.grammar_masks import GrammarMasks
from bateleur.runner.sampling.prompt_logprobs import PromptLogprobs
from bateleur.runner.sampling.rejection_sampler import RejectionSampler
from bateleur.runner.sampling.sampler import SamplingState
from bateleur.runner.sampling.step_end import StepEnd
from bateleur.runner.scheduling.scheduler import Scheduler
from bateleur.runner.scheduling.step_plan import PerPlan, StepPlan
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.spec_decode.draft_planner import DraftPlanner
from bateleur.runner.spec_decode.drafter_checks import check_drafter
from bateleur.runner.spec_decode.proposal_graphs import ProposalGraphs
from bateleur.runner.spec_decode.proposer import Proposer
from bateleur.runner.stats import EngineStats, StepClock


class Engine:
    """Schedule, decide, stage, build, forward, sample, emit: one step at a time.

    Not thread-safe, see `LLM`. Whatever breaks off in the middle, by an error or an interrupt, is put right before the
    next thing is done, see `RequestRegistry`.
    """

    def __init__(self, setup: EngineSetup) -> None:
        """Allocate everything for `setup.limits`, where the model's weights are and in their dtype; capture graphs.

        Raises ValueError for a drafter of another number of tokens, or one that draws for another rule.
        """
        self.setup = setup
        self.model = model = setup.model
        self.limits = limits = setup.limits
        self.device = device = model.device
        self.stats = EngineStats(async_scheduling=setup.async_scheduling)
        self.caches = Caches(model.spec, setup.cache_plan, model.dtype, device)
        self.model_state = ModelState(model, self.caches, setup.backend, limits, setup.prompt_scan)
        self.table = RequestTable(limits.max_num_seqs, limits.max_model_len, setup.cache_plan.max_blocks)
        self.scheduler = self._make_scheduler()
        self.sampling = SamplingState(limits.max_num_seqs, model.spec.vocab_size, device, model.shard)
        checks, kv_blocks = setup.graphs.checks, self.table.blocks
        self.producer = StepProducer(self.model_state, limits.buffers, device, checks, kv_blocks)
        proposer = self._make_drafter()
        taps = () if proposer is None else proposer.needs.taps
        lens = query_lens_of(setup.policy, limits.num_speculative_tokens)
        self.graphs = StepGraphs(model, self.producer, setup.graphs, lens, taps)
        self.stats.decisions = self.graphs.decisions
        self._head = head = proposer if isinstance(proposer, EagleSpeculator) else None
        self.graphs.warm_up(head)
        self.graphs.capture()
        pairs = self.caches.kv
        if head is not None:
            self.graphs.capture_draft(head)
            pairs = [*pairs, *head.kv]
        self._kv_caches = [cache for pair in pairs for cache in pair]
        draft_kv, prefixes = pairs[len(self.caches.kv) :], self.scheduler.prefixes
        self.outside = PrefixOffload(setup, self.stats, prefixes, self.caches, draft_kv)
        self._emitter = OutputProcessor(setup.tokenizer, self.table, model.spec.vocab_size)
        self._clock = RequestClock(self.stats, self.table)
        self.ledger = RequestRegistry(
            self.scheduler, self._emitter, self.stats, self._clock, self.producer.buffers.forget
        )
        drafts = limits.num_speculative_tokens
        self._verifier = RejectionSampler(model, self.sampling, self.table, drafts, setup.rule, proposer)
        self._prompt_logprobs = PromptLogprobs(model, self.table)
        self._ahead = setup.async_scheduling
        self._lengths = RowLengths(limits.max_num_seqs, device) if self._ahead and drafts else None
        self.ends = StepEnd(self._verifier, self.model_state, self._lengths)
        warm_up(model, self.graphs, self.producer, self._verifier, limits, head)
        self._capture_ends()
        on_graphs = self.graphs.plan.mode.decode_mode is CudaGraphMode.FULL
        graphed = [length - 1 for length in lens] if on_graphs else ()
        self._grammars = GrammarMasks(self._verifier, graphed=bool(graphed))
        self._draft_sync = setup.drafter.sync if isinstance(setup.drafter, DraftHead) else None
        self._proposer = None if proposer is None else self._make_proposer(proposer, graphed)
        self._draft_planner = None if proposer is None else self._make_draft_planner(proposer, graphed)
        self.all_graphs = self._end_captures()
        self._collector = self._make_collector()
        self._reports: list[Request] = []
        self._rows = StagedRows(self.table, self._verifier, self._lengths)
        self._timed: StepInFlight | None = None  # a policy is to be told what it took
        self._took = 0.0
        self._decided = PerPlan(self._decide_anew)

    def _make_proposer(self, drafter: Drafter, graphed: Sequence[int]) -> Proposer:
        setup = self.setup
        may_skip = not (setup.async_scheduling or setup.cache_plan.share_prefixes)
        made = Proposer(
            drafter, self._verifier, setup.policy, graphed=bool(graphed), may_skip=may_skip, sync=self._draft_sync
        )  # fmt: skip
        self.stats.acceptance = made.acceptance
        made.graphs = self._capture_proposals(drafter, graphed)
        return made

    def _make_draft_planner(self, drafter: Drafter, graphed: Sequence[int]) -> DraftPlanner:
        limits = self.limits
        longest = drafter.max_drafted_len if isinstance(drafter, BoundedDrafter) else limits.max_model_len
        return DraftPlanner(
            self.table, self.sampling, limits.num_speculative_tokens, longest, graphed,
            waits_for_length=self.setup.rule is not Rule.COUPLED,
        )  # fmt: skip

    def _make_collector(self) -> StepCollector:
        return StepCollector(
            self.scheduler, self._emitter, self.ledger, self.stats, self._clock, self._proposer
        )

    def _make_scheduler(self) -> Scheduler:
        plan, pool, pages = self.setup.cache_plan, self.caches.blocks, self.caches.pages
        if self.setup.backend.needs_finite_cache and pool is not None:
            pool.fresh = []
        stores = isinstance(self.setup.drafter, DraftHead)  # keys and values in the blocks of the target's
        prefixes = None
        if plan.share_prefixes:
            prefixes = PrefixCache(self.table, pool, plan.block_size, pages, lookahead=stores)
        return Scheduler(
            self.table,
            pool,
            block_size=plan.block_size,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            lookahead_tokens=self.limits.num_speculative_tokens if stores else 0,
            states=pages,
            prefixes=prefixes,
        )

    def _make_drafter(self) -> Drafter | None:
        """The drafter itself; a `DraftHead` gets its caches."""
        setup, drafter, drafts = self.setup, self.setup.drafter, self.limits.num_speculative_tokens
        if isinstance(drafter, DraftHead):
            if drafts < 1:
                raise ValueError("num_speculative_tokens is 0; with a draft it must be at least 1")
            plan, groups, target = setup.cache_plan, self.model_state.groups, setup.model
            return drafter.speculator(
                plan, groups, setup.backend, setup.limits, setup.graphs, target, setup.rule
            )
        if drafter is not None:
            check_drafter(drafter, drafts, setup.model.spec.num_layers)
        return drafter

    def _capture_ends(self) -> None:
        """Behind steps on graphs; nothing where there are none."""
        forward = self.graphs.manager
        if forward is not None and forward.states:
            self.ends.capture(forward, self.setup.graphs)
            assert self.ends.graphs is not None
            keep_common(self.ends.graphs.manager, self.model.peers)

    def _capture_proposals(self, drafter: Drafter, numbers: Sequence[int]) -> ProposalGraphs | None:
        """Behind steps on graphs of decoding rows, with so many drafts; None where there are none."""
        forward = self.graphs.manager
        if not isinstance(drafter, EagleSpeculator) or drafter.whole is None or self.ends.graphs is None:
            return None
        assert forward is not None
        graphs = ProposalGraphs(
            forward, self.setup.graphs, drafter, drafter.whole, self.ends.sampler, numbers
        )
        graphs.capture()
        keep_common(graphs.manager, self.model.peers)
        return graphs

    def run_largest(self) -> None:
        """Run the steps that allocate most, in an engine without requests."""
        run_largest(self.graphs, self.producer, self._verifier, self.limits, self._head)

    def _end_captures(self) -> AllGraphs:
        if self.device.type == "cuda":  # warm-ups ran on side streams, whose cached memory no step can use
            torch.cuda.empty_cache()
        return AllGraphs(self.graphs, self.ends, self._head, self._proposer)

    # --- requests -----------------------------------------------------------------------------------------

    @property
    def requests(self) -> dict[str, RequestGroup]:
        """Those that wait or run, by id."""
        return self.ledger.requests

    @property
    def errands(self) -> EngineOperations:
        """What may be asked of it between two steps."""
        return EngineOperations(self.ledger, self.outside, self._verify_graphs, self.model)

    def verify_graphs(self, *, fuzz: int = 3) -> VerifyReport:
        """Show that every captured graph replays what an eager run computes, on random steps.

        Raises ValueError while requests wait or run, since caches are overwritten, and if there are no graphs.
        """
        return self.errands.verify_graphs(fuzz)

    def _verify_graphs(self, fuzz: int) -> VerifyReport:
        if self.requests:
            raise ValueError(
                f"requests: {len(self.requests)} are not finished; verifying overwrites their caches"
            )
        self.ledger.whole = False  # what the caches hold of prefixes is overwritten
        return self.all_graphs.verify(fuzz, self.producer.written)

    def metrics(self) -> EngineStats:
        """The counters, and where the queues stand at this moment; from any thread."""
        stats, scheduler = self.stats, self.scheduler
        stats.num_running, stats.num_waiting = len(scheduler.running), scheduler.num_waiting
        if (pool := scheduler.pool) is not None:
            stats.kv_cache_usage = 1 - pool.num_free / pool.capacity
        return stats

    # --- the step -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, seconds: float | None = None) -> None:
        """Run one step; the requests that finished in it and those that stream are reported to `ledger`.

        seconds: what the last one took the first of several ranks, on the others.

        With `async_scheduling` a step is launched from bounds while the device is at the one before, and then that one
        is collected: reports come a call later, and a request that has ended meanwhile has run a step too many, whose
        results are dropped. What it held can be given away at once, since the device keeps the order of its steps.

        If the model raises, the error goes to the caller and no request is lost: all are recomputed from their tokens
        by later steps. If a graph fails, the same happens with a warning in place of the error, since its batches run
        eagerly from then on. Of several ranks none goes on after an error, since the others do not see it.
        """
        self.ledger.restore()
        took = self._took if seconds is None else seconds
        with self.ledger.tell(RunStep(took)):
            self._step(took)

    def _step(self, seconds: float) -> None:
        ledger = self.ledger
        ledger.whole = False
        timed = self._timed
        if timed is not None and self._proposer is not None:
            assert timed.proposal is not None
            assert timed.num_tokens is not None
            self._proposer.observe(timed.plan, timed.proposal, timed.num_tokens, seconds)
        self._timed = None
        self._reports = []
        clock = StepClock(self.stats)
        try:
            launched = self._launch(clock)
        except ReplayFailed as error:
            if not self.model.peers.alone:
                raise
            warnings.warn(f"{error}; its requests are recomputed", RuntimeWarning, stacklevel=2)
            return
        # What took the time: a CPU is at the step that is launched, another device at the one before.
        timed = launched if self._verifier.on_host or not ledger.in_flight else ledger.in_flight[0]
        if launched is not None:
            ledger.in_flight = (*ledger.in_flight, launched)
            launched.report_drafts(self.table)
        if len(ledger.in_flight) > (launched is not None and self._ahead):
            self._collect(clock)
        for request in self._reports:
            ledger.report(request)
        self._reports = []
        if self._proposer is not None and timed is not None and timed.num_tokens is not None:
            self._timed, self._took = timed, clock.cpu if self._verifier.on_host else clock.elapsed
        self.outside.advance(idle=not ledger.requests)
        ledger.whole = True

    def _collect(self, clock: StepClock) -> None:
        """Learn what came of the oldest step in flight; who is to be told of it is told behind the next launch."""
        self._reports = self._collector.collect(self.ledger.in_flight[0])
        clock.lap("emit")

    def _launch(self, clock: StepClock) -> StepInFlight | None:
        """Prepare the next step and give it to the device, which may be at the one before; None if there is none."""
        if self._draft_planner is not None:
            self._draft_planner.plan()
        if not self._ahead:
            self._grammars.cut()
        plan = self.scheduler.schedule(ahead=bool(self.ledger.in_flight))
        if plan is None:
            if self.graphs.idle():
                self.stats.num_dummy_steps += 1
                self.stats.num_dummy_drafts += 0 if self._draft_sync is None else self._draft_sync.idle()
            elif self.scheduler.fetching and not self.ledger.in_flight:
                self.outside.wait()
            return None
        self.stats.num_preemptions = self.scheduler.num_preemptions
        admitted = self._follow_rows()
        self.stats.histograms.iteration_tokens.observe(plan.num_tokens)
        if self.scheduler.pool is not None and self.scheduler.pool.fresh:
            zero_fresh_blocks(self.scheduler.pool, self._kv_caches)
        clock.lap("schedule")
        launched = self._run(plan, clock, admitted)
        self.scheduler.advance(plan)
        return launched

    def _run(self, plan: StepPlan, clock: StepClock, admitted: Sequence[Request]) -> StepInFlight:
        """The device's part of a step."""
        decision, shape = self._decide(plan)
        if not self.model.ranks.alone and self.setup.graphs.checks >= ReplayChecks.ADDRESSES:
            compare(self.model.ranks, plan, decision, self.table)
        rows = self._rows.of(plan)
        batch = self.producer.buffers.stage(rows, shape)
        clock.lap("stage")
        staged = self.producer.prepare(batch, decision.descriptor, batch_id=rows.batch_id)
        clock.lap("build")
        hidden_TD, *taps = self.graphs.run(staged)
        clock.lap("forward")
        if self._ahead and self._grammars.follow(plan):  # what may be drawn depends on the tokens before
            if self.ledger.in_flight:
                self._collect(clock)
            self._grammars.look(plan)
        allowed = self._grammars.allowed(plan)
        ended = self.ends.run(plan, staged, hidden_TD, allowed, clock)
        verified = ended.verified
        fetched = None if verified is None else self._emitter.fetch(verified)
        scored = self._prompt_logprobs.score(plan, hidden_TD)
        clock.lap("sample")
        num_drafts, num_left = self.table.num_drafts[plan.rows], self.scheduler.num_left
        launched = StepInFlight(plan, num_drafts, num_left, verified, fetched, scored)
        if self._proposer is not None:
            features = (*taps, hidden_TD) if self._proposer.drafter.needs.hidden else tuple(taps)
            launched.proposal = self._proposer.propose(plan, staged, features, ended, admitted)
            self._grammars.fetch(plan)
            clock.lap("draft")
        return launched

    def _decide(self, plan: StepPlan) -> tuple[DispatchDecision, BatchShape]:
        """Choose the graph for this step, or eager with the reason; padding follows from the choice."""
        if not self.graphs.decides_alone:
            self._decided.forget()
        decision, shape = self._decided(plan)
        self.graphs.decisions.count(decision)
        return decision, shape

    def _decide_anew(self, plan: StepPlan) -> tuple[DispatchDecision, BatchShape]:
        ask = ask_for(plan, self.table)
        decision = self.graphs.decide(ask)
        return decision, padded_shape(decision.descriptor, ask.num_reqs, ask.num_tokens, ask.max_query_len)

    def _follow_rows(self) -> list[Request]:
        """Set up per-row state of the requests that got a row since the last step; returns these requests."""
        if not self.scheduler.admitted:
            return []
        admitted = [request for request in self.scheduler.admitted if request.row >= 0]
        self.scheduler.admitted.clear()
        if not admitted:
            return []
        self._clock.started(admitted)
        self.model.set_prompt_length(admitted[0].rope_length)
        self._emitter.admit(admitted, self.scheduler.running)
        for request in admitted:
            if self.scheduler.prefixes is not None and not request.num_preemptions:
                self.stats.num_prefix_queries += len(request.prompt_token_ids)
                self.stats.num_prefix_hits += request.num_cached_tokens
            self.sampling.admit(
                request.row,
                request.params,
                request.seed,
                request.prompt_token_ids,
                request.output_token_ids,
                tuple(request.stop_token_ids),
                request.bad_words,
            )
        rows = np.array([request.row for request in admitted], dtype=np.int64)
        self.model_state.admit(rows, self.table.num_computed[rows])
        if self._lengths is not None:
            self._lengths.admit(rows, self.table.num_computed[rows])
        return admitted
