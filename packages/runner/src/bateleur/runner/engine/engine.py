"""The engine: schedules steps, runs them on the device, and collects their results."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from time import perf_counter, thread_time

import torch

from bateleur.cudagraph import ReplayFailed, VerifyReport
from bateleur.runner.cache.prefix_cache import PrefixCache
from bateleur.runner.cache.tensors import Caches
from bateleur.runner.engine.messages import RunStep
from bateleur.runner.engine.model_runner import ModelRunner
from bateleur.runner.engine.operations import EngineOperations
from bateleur.runner.engine.output_processor import OutputProcessor
from bateleur.runner.engine.prefix_offload import PrefixOffload
from bateleur.runner.engine.request_registry import RequestRegistry
from bateleur.runner.engine.request_times import RequestClock
from bateleur.runner.engine.setup import EngineSetup
from bateleur.runner.engine.step_collector import StepCollector
from bateleur.runner.engine.step_in_flight import StepInFlight
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.scheduling.scheduler import Scheduler
from bateleur.runner.scheduling.step_batch import StepBatch
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.stats import EngineStats
from bateleur.runner.utils.device import Fetch

Marks = list[tuple[str, float]]
"""Parts of a step and when they ended, in seconds of `perf_counter`; the first entry is the start."""


class Engine:
    """Runs requests in steps: schedule, stage, forward, end (sample, verify, propose), collect.

    Not thread-safe, see `LLM`. If a step is interrupted by an error or a signal, the next call first restores a
    consistent state, see `RequestRegistry`.
    """

    def __init__(self, setup: EngineSetup) -> None:
        """Allocate buffers and caches for `setup.limits` on the device of the model, and capture graphs.

        Raises ValueError for a drafter with another number of tokens, or one that samples for another rule.
        """
        self.setup, self.model, self.limits = setup, setup.model, setup.limits
        self.device = self.model.device
        self.stats = EngineStats(async_scheduling=setup.async_scheduling)
        self.caches = Caches(self.model.spec, setup.cache_plan, self.model.dtype, self.device)
        self.table = RequestTable(self.limits.max_num_seqs, self.limits.max_model_len, setup.cache_plan.max_blocks)
        self.scheduler = self._make_scheduler()
        self.runner = ModelRunner(setup, self.caches, self.table, self.stats)
        draft_kv = () if self.runner.head is None else self.runner.head.kv
        self.offload = PrefixOffload(setup, self.stats, self.scheduler.prefixes, self.caches, draft_kv)
        self._outputs = OutputProcessor(setup.tokenizer, self.table, self.model.spec.vocab_size)
        self._clock = RequestClock(self.stats, self.table)
        self.registry = RequestRegistry(
            self.scheduler, self._outputs, self.stats, self._clock, self.runner.producer.buffers.forget, setup.adapters
        )
        self._collector = StepCollector(
            self.scheduler, self._outputs, self.registry, self.stats, self._clock, self.runner.proposer
        )
        self._reports: list[Request] = []
        self._timed: StepInFlight | None = None
        """Step whose time the draft policy has not observed yet."""
        self._seconds = 0.0
        """Time of that step."""

    def _make_scheduler(self) -> Scheduler:
        plan, pool, pages = self.setup.cache_plan, self.caches.blocks, self.caches.pages
        if self.setup.backend.needs_finite_cache and pool is not None:
            pool.fresh = []
        stores = isinstance(self.setup.drafter, DraftHead)  # keys and values in the blocks of the target
        prefixes = None
        if plan.share_prefixes:
            prefixes = PrefixCache(self.table, pool, plan.block_size, pages, lookahead=stores)
        scheduler = Scheduler(
            self.table,
            pool,
            block_size=plan.block_size,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            lookahead_tokens=self.limits.num_speculative_tokens if stores else 0,
            states=pages,
            prefixes=prefixes,
        )
        scheduler.device = self.device
        return scheduler

    # --- requests -----------------------------------------------------------------------------------------

    @property
    def requests(self) -> dict[str, RequestGroup]:
        """Waiting and running requests by id."""
        return self.registry.requests

    @property
    def operations(self) -> EngineOperations:
        """Long operations that run between steps, such as prefix export or loading of LoRA adapters."""
        return EngineOperations(self.registry, self.offload, self._verify_graphs, self.model, self.setup.adapters)

    def verify_graphs(self, *, fuzz: int = 3) -> VerifyReport:
        """Check on `fuzz` random steps per graph that replays equal eager runs.

        Raises ValueError while there are requests, because caches are overwritten, and if there are no graphs.
        """
        return self.operations.verify_graphs(fuzz)

    def _verify_graphs(self, fuzz: int) -> VerifyReport:
        if self.requests:
            raise ValueError(f"requests: {len(self.requests)} are not finished; verifying overwrites their caches")
        self.registry.consistent = False  # cached prefixes are overwritten
        return self.runner.all_graphs.verify(fuzz, self.runner.producer.written)

    def metrics(self) -> EngineStats:
        """Counters, with the current numbers of running and waiting requests. Can be called from any thread."""
        stats, scheduler = self.stats, self.scheduler
        stats.num_running, stats.num_waiting = len(scheduler.running), scheduler.num_waiting
        if (pool := scheduler.pool) is not None:
            stats.kv_cache_usage = 1 - pool.num_free / pool.capacity
        return stats

    # --- the step -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, seconds: float | None = None) -> None:
        """Run one step. Finished and streaming requests are reported to `registry`.

        seconds: time of the last step on the first rank; None on the first rank itself.

        With `async_scheduling` a step is planned from upper bounds and launched while the device runs the step before,
        which is collected afterwards. So reports come one call later, and an ended request runs one step more, whose
        results are dropped. Its table row and blocks are freed at once, because the device runs steps in order.

        If the model raises, the error goes to the caller, and later steps recompute all requests from their tokens. If
        a graph fails, requests are recomputed, too, but with a warning instead of the error, and its batches run
        eagerly from then on. With several ranks every error is fatal, because the other ranks do not see it.
        """
        if not self.registry.consistent or self.registry.abandoned:
            self.registry.restore()
        seconds = self._seconds if seconds is None else seconds
        send = self.registry.send
        with nullcontext() if send is None else send(RunStep(seconds)):
            self._step(seconds)

    def _step(self, seconds: float) -> None:
        registry, on_cpu = self.registry, self.device.type == "cpu"
        registry.consistent = False
        if (timed := self._timed) is not None and self.runner.proposer is not None:
            assert timed.proposal is not None
            assert timed.num_tokens is not None
            self.runner.proposer.observe(timed.batch, timed.proposal, timed.num_tokens, seconds)
        self._timed, self._reports = None, []
        marks, cpu_start = [("start", perf_counter())], thread_time()
        try:
            launched = self._launch(marks)
        except ReplayFailed as error:
            if not self.model.peers.alone:
                raise
            warnings.warn(f"{error}; its requests are recomputed", RuntimeWarning, stacklevel=2)
            return
        # What took the time: a CPU runs the step just launched, another device the step before.
        timed = launched if on_cpu or not registry.in_flight else registry.in_flight[0]
        if launched is not None:
            registry.in_flight = (*registry.in_flight, launched)
            if launched.proposal is not None:
                batch = launched.batch
                self.table.num_proposed[batch.sampled[1]] = launched.proposal.lengths[batch.samples]
        if len(registry.in_flight) > (launched is not None and self.setup.async_scheduling):
            self._collect(marks)
        for request in self._reports:
            registry.report(request)
        self._reports = []
        if self.runner.proposer is not None and timed is not None and timed.num_tokens is not None:
            self._timed = timed
            self._seconds = thread_time() - cpu_start if on_cpu else marks[-1][1] - marks[0][1]
        if self.offload.disk is not None:
            self.offload.disk.advance(idle=not registry.requests)
        self.stats.add_step(marks, 0 if launched is None else launched.batch.num_tokens)
        registry.consistent = True

    def _launch(self, marks: Marks) -> StepInFlight | None:
        """Launch the next step on the device, which may still run the step before; None if there is nothing to run."""
        batch = self._schedule()
        if batch is None:
            return None
        runner, admitted = self.runner, self._admit()
        marks.append(("schedule", perf_counter()))
        staged = runner.stage(batch)
        marks.append(("stage", perf_counter()))
        hidden, features = runner.forward(staged)
        marks.append(("forward", perf_counter()))
        allowed = None
        if batch.with_grammar:
            if self.setup.async_scheduling:  # what may be sampled depends on the tokens before
                if self.registry.in_flight:
                    self._collect(marks)
                runner.grammars.check_drafts(batch)
            allowed = runner.grammars.allowed(batch)
        ended = runner.ends.run(batch, staged, hidden, allowed)
        output = ended.output
        launched = StepInFlight(
            batch,
            self.table.num_drafts[batch.rows],
            self.scheduler.num_released,
            output,
            None if output is None else Fetch([output.packed, *(output.logprobs or ())]),
            None if batch.all_decode else runner.prompt_logprobs.score(batch, hidden),
        )
        marks.append(("sample", perf_counter()))
        if runner.proposer is not None:
            launched.proposal = runner.proposer.propose(batch, staged, features, ended, admitted)
            if batch.with_grammar:
                runner.grammars.fetch(batch)
            marks.append(("draft", perf_counter()))
        self.table.advance(batch.rows, batch.query_lens, batch.num_decodes)
        return launched

    def _schedule(self) -> StepBatch | None:
        """Return the batch of the next step. Without one, take part in a step of other ranks, or wait for files."""
        runner, scheduler, in_flight = self.runner, self.scheduler, bool(self.registry.in_flight)
        if runner.draft_planner is not None:
            runner.draft_planner.plan()
        if runner.grammars.has_drafts and not self.setup.async_scheduling:
            runner.grammars.cut_drafts()
        batch = scheduler.schedule(ahead=in_flight)
        if batch is None and not runner.idle(self.stats) and scheduler.fetching and not in_flight:
            self.offload.wait()
        self.stats.num_preemptions = scheduler.num_preemptions
        return batch

    def _admit(self) -> Sequence[Request]:
        """Set up the state of the requests that got a table row since the last step; returns them."""
        if not self.scheduler.admitted:
            return ()
        admitted = [request for request in self.scheduler.admitted if request.row >= 0]
        self.scheduler.admitted.clear()
        if admitted:
            self._clock.started(admitted)
            self._outputs.admit(admitted, self.scheduler.running)
            self.runner.admit(admitted)
        if self.scheduler.prefixes is not None:
            for request in admitted:
                if not request.num_preemptions:
                    self.stats.num_prefix_queries += len(request.prompt_token_ids)
                    self.stats.num_prefix_hits += request.num_cached_tokens
        return admitted

    def _collect(self, marks: Marks) -> None:
        """Apply the results of the oldest step in flight. Its requests are reported after the next launch."""
        self._reports = self._collector.collect(self.registry.in_flight[0])
        marks.append(("emit", perf_counter()))
