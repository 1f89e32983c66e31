"""The parts of a step that run on the device: stage, forward, sample, propose. Captures CUDA graphs for all of them."""

# Shape letters: T tokens of a step, D hidden size.

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.cudagraph import (
    CaptureReport,
    CudaGraphManager,
    CudaGraphMode,
    DispatchDecision,
    Phase,
    ReplayChecks,
    VerifyReport,
)
from bateleur.eagle import Drafter, EagleSpeculator
from bateleur.runner.cache.tensors import Caches, zero_fresh_blocks
from bateleur.runner.distributed.agreement import check_equal_steps
from bateleur.runner.engine.setup import EngineSetup
from bateleur.runner.model_runner.graph_dispatcher import GraphDispatcher
from bateleur.runner.model_runner.model_state import ModelState, RowLengths, StagedStep
from bateleur.runner.model_runner.step_producer import StepProducer, padded_shape
from bateleur.runner.requests.request import Request, RequestTable
from bateleur.runner.sampling.grammar_masks import GrammarMasks
from bateleur.runner.sampling.rejection_sampler import RejectionSampler
from bateleur.runner.sampling.sampler import Sampler
from bateleur.runner.sampling.step_end import SampleStep
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.scheduling.step_batch import StepBatch
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.spec_decode.proposal_graphs import ProposalGraphs, features_of, written_by
from bateleur.runner.spec_decode.proposer import Proposer, check_drafter
from bateleur.runner.stats import EngineStats, StepMarks


class ModelRunner:
    """Runs batches on the device, from their rows in the request table to sampled tokens and drafts."""

    def __init__(self, setup: EngineSetup, caches: Caches, table: RequestTable, stats: EngineStats) -> None:
        """Allocate buffers, warm up kernels and capture graphs. Raises ValueError for an unsuitable drafter."""
        self.setup, self.caches, self.table = setup, caches, table
        self.model, limits, device = setup.model, setup.limits, setup.model.device
        checks, num_drafts = setup.graphs.checks, limits.num_speculative_tokens
        pool = None if setup.adapters is None else setup.adapters.pool
        self.model_state = ModelState(self.model, caches, setup.backend, limits, setup.prompt_scan, checks, pool)
        self.sampler = Sampler(limits.max_num_seqs, self.model.spec.vocab_size, device, self.model.shard)
        self.producer = StepProducer(self.model_state, table.blocks)
        drafter = self._make_drafter()
        self.head = drafter if isinstance(drafter, EagleSpeculator) else None
        taps = () if drafter is None else drafter.needs.taps
        self.graphs = GraphDispatcher(self.model, self.producer, setup.graphs, setup.query_lens, taps)
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
        self._warm_up()
        if (forward := self.graphs.manager) is not None and forward.states:
            self.ends.capture(forward, setup.graphs)
        on_graphs = self.graphs.dispatcher.mode.decode_mode is CudaGraphMode.FULL
        graphed = [length - 1 for length in setup.query_lens] if on_graphs else []
        self.grammars = GrammarMasks(self.rejection_sampler, graphed=on_graphs)
        self.proposer: Proposer | None = None
        if drafter is not None:
            self.proposer = self._make_proposer(drafter, graphed)
            stats.acceptance = self.proposer.acceptance
        if device.type == "cuda":  # warm-ups ran on side streams, whose cached memory no step can use
            torch.cuda.empty_cache()

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
        setup, forward = self.setup, self.graphs.manager
        proposer = Proposer(
            drafter,
            self.rejection_sampler,
            setup.policy,
            graphed=graphed,
            may_skip=not (setup.async_scheduling or setup.cache_plan.share_prefixes),
            sync=setup.drafter.sync if isinstance(setup.drafter, DraftHead) else None,
        )
        if self.head is not None and self.head.fuses_proposals and self.ends.manager is not None:
            assert forward is not None
            sampler = self.rejection_sampler
            proposer.graphs = ProposalGraphs(forward, setup.graphs, self.head, sampler, graphed)
        return proposer

    def _warm_up(self) -> None:
        """Sample, and commit Mamba states, in a dummy decode step of every graph size and of some without a graph.
        For sizes in graphs, captures have already run the forward pass, metadata builders and the drafter. For sizes
        without a graph these run here, too.
        """
        with torch.inference_mode():
            self.model.warm_up(self.setup.limits.max_num_batched_tokens)
            for num_reqs, query_len, staged in self._dummy_decodes():
                self._end_dummy(staged, num_reqs, query_len)

    def run_largest(self) -> None:
        """Run the steps that allocate most memory: prompts with `max_num_batched_tokens` tokens, then the decode of
        every request with all its drafts, up to verification. No request or cache is changed.
        """
        limits = self.setup.limits
        with torch.inference_mode():
            prompts = self.producer.stage_prompts(limits.max_num_batched_tokens)
            self.graphs.run(prompts)
            self.model_state.commit(prompts.state, None)
            if self.head is not None:
                self.head.warm_up(prompts.state)
            decodes = self.producer.stage_decodes(limits.max_num_seqs, limits.max_query_len)
            self.graphs.run(decodes)
            self._end_dummy(decodes, limits.max_num_seqs, limits.max_query_len)

    def _dummy_decodes(self) -> Iterator[tuple[int, int, StagedStep]]:
        """Yield number of requests, query length and staged step of each size of decode steps. The forward pass of a
        size without a graph has already run when its step is yielded.
        """
        limits = self.setup.limits
        ready = () if self.graphs.manager is None else self.graphs.manager.ready
        sizes = {(key.num_reqs, key.uniform_query_len or 1): key for key in ready if key.num_reqs is not None}
        for (num_reqs, query_len), key in sizes.items():
            yield num_reqs, query_len, self.producer.stage(key, Phase.WARMUP)
        if self.model.device.type == "cpu":  # no kernels to load
            return
        # Rows with fewer drafts, near their end or next to prompts, are in no graph.
        eager = {(1, length) for length in range(1, limits.max_query_len + 1)} - sizes.keys()
        if not sizes:
            powers = [1 << i for i in range(limits.max_num_seqs.bit_length())]
            eager |= {*product(powers, (1, limits.max_query_len))}
        for num_reqs, query_len in sorted(eager):
            staged = self.producer.stage_decodes(num_reqs, query_len)
            self.graphs.run(staged)
            if self.head is not None:
                self.head.warm_up(staged.state)
            yield num_reqs, query_len, staged

    def _end_dummy(self, staged: StagedStep, num_reqs: int, query_len: int) -> None:
        """End a dummy step of requests with `query_len` tokens each, with each kind of sampling parameters."""
        rows, query_lens = np.arange(num_reqs), np.full(num_reqs, query_len, np.int32)
        model, sampler = self.model, self.rejection_sampler
        shape = (num_reqs * query_len, model.spec.hidden_size)
        hidden_TD = torch.zeros(shape, dtype=model.dtype, device=model.device)
        # Kernels of greedy rows differ from those of sampled ones, and so do kernels for truncation and penalties.
        for temperature, top_p, penalty in ((0.0, 1.0, 1.0), *product((1.0,), (0.9, 1.0), (1.1, 1.0))):
            params = SamplingParams(temperature=temperature, top_p=top_p)
            for row in range(num_reqs):
                ruled = params if row else replace(params, repetition_penalty=penalty)
                self.sampler.admit(row, ruled, 0, ())
            batch = StepBatch([], rows, query_lens, num_reqs, np.ones(num_reqs, np.bool_), model.device)
            sampler.stage(batch)
            num_valid = sampler.verify(batch, staged.state.batch, hidden_TD).num_valid
        for row in range(num_reqs):
            self.sampler.release(row)
        self.sampler.forget_counts()
        sampler.rows.next_ids.zero_()
        sampler.rows.clear()
        self.model_state.commit(staged.state, num_valid)

    @property
    def graph_reports(self) -> dict[str, CaptureReport]:
        """Capture report of each graph manager, by the part of a step that its graphs run."""
        return {name: manager.report for name, manager in self._managers.items()}

    @property
    def _managers(self) -> dict[str, CudaGraphManager[Any, Any]]:
        managers: dict[str, CudaGraphManager[Any, Any] | None] = {
            "forward": self.graphs.manager,
            "end": self.ends.manager,
            "first draft pass": None if self.head is None else self.head.prefill,
            "draft chain": None if self.head is None else self.head.decode,
            "proposal": None if self.proposer is None or self.proposer.graphs is None else self.proposer.graphs.manager,
        }
        return {name: manager for name, manager in managers.items() if manager is not None}

    def verify_graphs(self, fuzz: int) -> VerifyReport:
        """Compare replays with eager runs on `fuzz` random steps for each graph. Raises ValueError without graphs."""
        if self.graphs.manager is None:
            raise ValueError("cudagraph_mode: there are no graphs to verify; choose a mode that captures some")
        step, head, rtol = self.producer.written, self.head, dict[str, float]()
        written: dict[str, Callable[[Any], dict[str, Tensor]]] = {
            "forward": step,
            "end": lambda state: step(state.context) | self.ends.written(state.context),
        }
        if head is not None:
            own = partial(written_by, head)
            for name in ("first draft pass", "draft chain"):
                written[name] = lambda state: own(state.batch.block_tables[0])
        if self.proposer is not None and (graphs := self.proposer.graphs) is not None:
            written["proposal"] = lambda state: step(state.context) | graphs.written(state.context)
            rtol["proposal"] = graphs.rtol
        with torch.inference_mode():
            reports = {
                name: manager.verify(fuzz=fuzz, rtol=rtol.get(name), extra_tensors=written[name])
                for name, manager in self._managers.items()
            }
        return VerifyReport.join(reports)

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
        """If other data-parallel ranks run a step, take part, count the step in `stats` and return True; else False."""
        if not self.graphs.idle():
            return False
        stats.num_dummy_steps += 1
        if self.proposer is not None and self.proposer.sync is not None:
            stats.num_dummy_drafts += self.proposer.sync.idle()
        return True

    def execute_model(self, batch: StepBatch, marks: StepMarks) -> tuple[StagedStep, Tensor, tuple[Tensor, ...]]:
        """Stage a step and run its forward pass. Returns the staged step, its hidden states (tokens, hidden size), and
        the features that a draft head reads. marks: gets the end times of the parts of the step.
        """
        staged = self._stage(batch)
        marks.append(("stage", perf_counter()))
        hidden_TD, *taps = self.graphs.run(staged)
        features = () if self.proposer is None else features_of(self.proposer.drafter, hidden_TD, *taps)
        marks.append(("forward", perf_counter()))
        return staged, hidden_TD, features

    def _stage(self, batch: StepBatch) -> StagedStep:
        pool = self.caches.blocks
        if pool is not None and pool.fresh:
            zero_fresh_blocks(pool, self._kv_caches)
        if batch.dispatch is None or self.graphs.sync is not None:
            request = batch.graph_request()
            decision = self.graphs.decide(request)
            num_reqs, num_tokens, longest = request.num_reqs, request.num_tokens, request.max_query_len
            batch.dispatch = decision, padded_shape(decision.descriptor, num_reqs, num_tokens, longest)
        decision, shape = batch.dispatch
        self.graphs.decisions.count(decision)
        if self.setup.graphs.checks >= ReplayChecks.ADDRESSES and not self.model.ranks.alone:
            self._compare_ranks(batch, decision)
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

    def _compare_ranks(self, batch: StepBatch, decision: DispatchDecision) -> None:
        """Raise RankFailed unless all ranks run the same step."""
        table, rows = self.table, batch.rows
        fields: dict[str, NDArray[Any]] = {
            **{name: getattr(batch, name) for name in ("rows", "query_lens", "num_computed")},
            **{name: getattr(table, name)[rows] for name in ("num_drafts", "token_ids", "block_table")},
            "samples": batch.samples,
            "key": np.frombuffer(repr(decision.descriptor).encode(), np.uint8),
        }
        check_equal_steps(self.model.ranks, fields)
