"""The parts of a step that run on the device: stage, forward, sample, propose. Captures CUDA graphs for all of them."""

# Shape letters: T tokens of a step, D hidden size.

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.cudagraph import CudaGraphMode, DispatchDecision, ReplayChecks, StagedBatch
from bateleur.eagle import BoundedDrafter, Drafter, EagleSpeculator, Rule
from bateleur.metadata import BatchShape
from bateleur.runner.cache.tensors import Caches, zero_fresh_blocks
from bateleur.runner.distributed.agreement import check_equal_steps, keep_common_graphs
from bateleur.runner.engine.all_graphs import AllGraphs
from bateleur.runner.engine.setup import EngineSetup
from bateleur.runner.engine.warm_up import run_largest, warm_up
from bateleur.runner.model_runner.graph_dispatcher import GraphDispatcher, query_lens_of
from bateleur.runner.model_runner.model_state import ModelState
from bateleur.runner.model_runner.row_lengths import RowLengths
from bateleur.runner.model_runner.step_producer import StepProducer, padded_shape
from bateleur.runner.models import StepContext
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling.grammar_masks import GrammarMasks
from bateleur.runner.sampling.prompt_logprobs import PromptLogprobs
from bateleur.runner.sampling.rejection_sampler import RejectionSampler
from bateleur.runner.sampling.sampler import Sampler
from bateleur.runner.sampling.step_end import SampleStep
from bateleur.runner.scheduling.step_batch import StepBatch
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.spec_decode.draft_planner import DraftPlanner
from bateleur.runner.spec_decode.drafter_checks import check_drafter
from bateleur.runner.spec_decode.proposal_graphs import ProposalGraphs, features_of
from bateleur.runner.spec_decode.proposer import Proposer
from bateleur.runner.stats import EngineStats, StepMarks


class ModelRunner:
    """Runs batches on the device, from their rows in the request table to sampled tokens and drafts."""

    def __init__(self, setup: EngineSetup, caches: Caches, table: RequestTable, stats: EngineStats) -> None:
        """Allocate buffers, warm up kernels and capture graphs. Raises ValueError for an unsuitable drafter."""
        self.setup, self.caches, self.table = setup, caches, table
        self.model, limits, device = setup.model, setup.limits, setup.model.device
        checks, num_drafts = setup.graphs.checks, limits.num_speculative_tokens
        pool = None if setup.adapters is None else setup.adapters.pool
        scan = setup.prompt_scan
        self.model_state = ModelState(self.model, caches, setup.backend, limits, scan, checks, pool)
        self.sampler = Sampler(limits.max_num_seqs, self.model.spec.vocab_size, device, self.model.shard)
        self.producer = StepProducer(self.model_state, limits.buffers, device, table.blocks)
        drafter = self._make_drafter()
        self.head = drafter if isinstance(drafter, EagleSpeculator) else None
        lens = query_lens_of(setup.policy, num_drafts)
        taps = () if drafter is None else drafter.needs.taps
        self.graphs = GraphDispatcher(self.model, self.producer, setup.graphs, lens, taps)
        stats.decisions = self.graphs.decisions
        self.graphs.warm_up(self.head)
        self.graphs.capture()
        if self.head is not None:
            self.graphs.capture_draft(self.head)
        pairs = [*caches.kv, *(() if self.head is None else self.head.kv)]
        self._kv_caches = [cache for pair in pairs for cache in pair]
        self.lengths = RowLengths(limits.max_num_seqs, device) if setup.async_scheduling and num_drafts else None
        self.rejection_sampler = RejectionSampler(self.model, self.sampler, table, num_drafts, setup.rule, drafter)
        self.ends = SampleStep(self.rejection_sampler, self.model_state, self.lengths)
        warm_up(self.model, self.graphs, self.producer, self.rejection_sampler, limits, self.head)
        self._capture_ends()
        on_graphs = self.graphs.dispatcher.mode.decode_mode is CudaGraphMode.FULL
        graphed = [length - 1 for length in lens] if on_graphs else []
        self.grammars = GrammarMasks(self.rejection_sampler, graphed=bool(graphed))
        self.prompt_logprobs = PromptLogprobs(self.model, table)
        self.proposer: Proposer | None = None
        self.draft_planner: DraftPlanner | None = None
        if drafter is not None:
            self.proposer = self._make_proposer(drafter, graphed)
            stats.acceptance = self.proposer.acceptance
            self.draft_planner = self._make_draft_planner(drafter, graphed)
        if device.type == "cuda":  # warm-ups ran on side streams, whose cached memory no step can use
            torch.cuda.empty_cache()
        self.all_graphs = AllGraphs(self.graphs, self.ends, self.head, self.proposer)

    def _make_drafter(self) -> Drafter | None:
        setup, drafter, num_drafts = self.setup, self.setup.drafter, self.setup.limits.num_speculative_tokens
        if isinstance(drafter, DraftHead):
            if num_drafts < 1:
                raise ValueError("num_speculative_tokens is 0; with a draft it must be at least 1")
            plan, groups = setup.cache_plan, self.model_state.groups
            return drafter.speculator(plan, groups, setup.backend, setup.limits, setup.graphs, setup.model, setup.rule)
        if drafter is not None:
            check_drafter(drafter, num_drafts, setup.model.spec.num_layers)
        return drafter

    def _make_proposer(self, drafter: Drafter, graphed: Sequence[int]) -> Proposer:
        setup = self.setup
        proposer = Proposer(
            drafter,
            self.rejection_sampler,
            setup.policy,
            graphed=bool(graphed),
            may_skip=not (setup.async_scheduling or setup.cache_plan.share_prefixes),
            sync=setup.drafter.sync if isinstance(setup.drafter, DraftHead) else None,
        )
        proposer.graphs = self._capture_proposals(drafter, graphed)
        return proposer

    def _make_draft_planner(self, drafter: Drafter, graphed: Sequence[int]) -> DraftPlanner:
        limits = self.setup.limits
        longest = drafter.max_drafted_len if isinstance(drafter, BoundedDrafter) else limits.max_model_len
        return DraftPlanner(
            self.table,
            self.sampler,
            limits.num_speculative_tokens,
            longest,
            graphed,
            waits_for_length=self.setup.rule is not Rule.COUPLED,
        )

    def _capture_ends(self) -> None:
        """Capture the end (sampling, verification, bookkeeping) of steps whose forward pass runs in a graph."""
        forward = self.graphs.manager
        if forward is not None and forward.states:
            self.ends.capture(forward, self.setup.graphs)
            assert self.ends.graphs is not None
            keep_common_graphs(self.ends.graphs.manager, self.model.peers)

    def _capture_proposals(self, drafter: Drafter, numbers: Sequence[int]) -> ProposalGraphs | None:
        """Capture graphs that propose these numbers of drafts after decode steps in graphs; None if not possible."""
        forward = self.graphs.manager
        if not isinstance(drafter, EagleSpeculator) or not drafter.fuses_proposals or self.ends.graphs is None:
            return None
        assert forward is not None
        graphs = ProposalGraphs(forward, self.setup.graphs, drafter, self.rejection_sampler, numbers)
        graphs.capture()
        keep_common_graphs(graphs.manager, self.model.peers)
        return graphs

    def run_largest(self) -> None:
        """Run the steps that allocate most memory, in an engine without requests."""
        run_largest(self.graphs, self.producer, self.rejection_sampler, self.setup.limits, self.head)

    def admit(self, admitted: Sequence[Request]) -> None:
        """Set up the state of requests that just got a table row."""
        self.model.set_prompt_length(admitted[0].rope_length)
        for request in admitted:
            self.sampler.admit(
                request.row,
                request.params,
                request.seed,
                request.prompt_token_ids,
                request.output_token_ids,
                tuple(request.stop_token_ids),
                request.bad_words,
            )
        rows = np.array([request.row for request in admitted], dtype=np.int64)
        computed = self.table.num_committed[rows]
        self.model_state.admit(rows, computed)
        if self.lengths is not None:
            self.lengths.admit(rows, computed)

    def idle(self, stats: EngineStats) -> bool:
        """Take part in a step of other data-parallel ranks, if there is one; returns whether there was."""
        if not self.graphs.idle():
            return False
        stats.num_dummy_steps += 1
        if self.proposer is not None and self.proposer.sync is not None:
            stats.num_dummy_drafts += self.proposer.sync.idle()
        return True

    # --- the step -----------------------------------------------------------------------------------------

    def execute_model(
        self, batch: StepBatch, marks: StepMarks
    ) -> tuple[StagedBatch[StepContext], Tensor, tuple[Tensor, ...]]:
        """Stage a step and run its forward pass. Returns the staged step, its hidden states (tokens, hidden size), and
        the features that a draft head reads. marks: the end times of both parts are appended to it.
        """
        staged = self._stage(batch)
        marks.append(("stage", perf_counter()))
        hidden_TD, *taps = self.graphs.run(staged)
        features = () if self.proposer is None else features_of(self.proposer.drafter, hidden_TD, taps)
        marks.append(("forward", perf_counter()))
        return staged, hidden_TD, features

    def _stage(self, batch: StepBatch) -> StagedBatch[StepContext]:
        """Choose the graph of the step, stage its rows and build its metadata."""
        pool = self.caches.blocks
        if pool is not None and pool.fresh:
            zero_fresh_blocks(pool, self._kv_caches)
        if batch.dispatch is None or self.graphs.sync is not None:
            batch.dispatch = self._dispatch(batch)
        decision, shape = batch.dispatch
        self.graphs.decisions.count(decision)
        if self.setup.graphs.checks >= ReplayChecks.ADDRESSES and not self.model.ranks.alone:
            check_equal_steps(self.model.ranks, self._fields_of(batch, decision))
        lengths = None
        if batch.is_exact is not None:
            assert self.lengths is not None
            lengths = self.lengths.of(batch.index.rows)
        input_ids, last = self.rejection_sampler.stage(batch), batch.staged_rows
        if last is None or lengths is not None:
            rows = batch.step_rows(self.table, input_ids, lengths)
        else:
            rows = last.next_step(batch.num_computed, input_ids)
        batch.staged_rows = rows if lengths is None else None
        metadata = self.producer.buffers.stage(rows, shape)
        slots = None if self.setup.adapters is None else batch.adapter_slots
        return self.model_state.prepare(metadata, decision.descriptor, batch_id=rows.batch_id, adapter_slots=slots)

    def _fields_of(self, batch: StepBatch, decision: DispatchDecision) -> dict[str, NDArray[Any]]:
        """Return the values of a step that must be equal on all ranks, by name."""
        table, rows = self.table, batch.rows
        return {
            "rows": rows,
            "query_lens": batch.query_lens,
            "num_computed": batch.num_computed,
            "num_drafts": table.num_drafts[rows],
            "token_ids": table.token_ids[rows],
            "block_table": table.block_table[rows],
            "samples": batch.samples,
            "key": np.frombuffer(repr(decision.descriptor).encode(), np.uint8),
        }

    def _dispatch(self, batch: StepBatch) -> tuple[DispatchDecision, BatchShape]:
        request = batch.graph_request()
        decision = self.graphs.decide(request)
        shape = padded_shape(decision.descriptor, request.num_reqs, request.num_tokens, request.max_query_len)
        return decision, shape
