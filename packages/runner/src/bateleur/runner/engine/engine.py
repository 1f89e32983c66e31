"""The engine: schedules steps, runs them on the device, and collects their results."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch

from bateleur.cudagraph import ReplayFailed, VerifyReport
from bateleur.metadata import Fetch
from bateleur.runner.cache.prefix_cache import PrefixCache
from bateleur.runner.cache.tensors import Caches
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.engine.messages import OperationName, RunOperation, RunStep
from bateleur.runner.engine.model_runner import ModelRunner
from bateleur.runner.engine.output_processor import OutputProcessor
from bateleur.runner.engine.prefix_offload import PrefixOffload
from bateleur.runner.engine.request_registry import RequestRegistry
from bateleur.runner.engine.setup import EngineSetup
from bateleur.runner.engine.step_in_flight import StepInFlight
from bateleur.runner.requests.request import Request, RequestTable
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.sampling.logprobs import score_prompts
from bateleur.runner.scheduling.scheduler import Scheduler
from bateleur.runner.scheduling.step_batch import StepBatch
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.stats import EngineStats, StepMarks
from bateleur.runner.utils.device import use_device

_WAIT_SECONDS = 0.02
"""To wait for files if there is nothing else to do."""


class Engine:
    """Runs requests in steps: schedule, stage, forward, end (sample, verify, propose), collect.
    Not thread-safe, see `LLM`. If a step is interrupted by an error or a signal, the next call first restores a
    consistent state, see `RequestRegistry`.
    """

    def __init__(self, setup: EngineSetup) -> None:
        """Allocate buffers and caches for `setup.limits` on the device of the model, and capture graphs.
        Raises ValueError if the drafter has another number of draft tokens, or does not support the acceptance rule.
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
        self._outputs = OutputProcessor(setup.tokenizer, self.table, self.model.spec.vocab_size, self.stats)
        forget = self.runner.producer.buffers.forget
        self.registry = RequestRegistry(self.scheduler, self._outputs, forget, setup.adapters)
        self._reports: list[Request] = []
        self._timed: StepInFlight | None = None
        """Step whose time, `_seconds`, the draft policy has not observed yet."""
        self._seconds = 0.0

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

    @property
    def requests(self) -> dict[str, RequestGroup]:
        """Waiting and running requests by id."""
        return self.registry.requests

    def operate(self, name: OperationName, *arguments: Any) -> Any:
        """Run a long operation on all ranks between two steps; returns its result.
        A ValueError or OSError of the operation is the same on all ranks. Raises ValueError with data-parallel ranks.
        """
        if self.model.exchange is not None:  # data-parallel ranks have different caches and requests
            rule = "prefixes in files and comparisons of graphs are of engines whose ranks have the same requests"
            raise ValueError(f"data_parallel_size is {self.model.peers.size}; {rule}")
        operation = RunOperation(name, arguments)
        with use_device(self.device):
            self.registry.restore()
            with self.registry.sending(operation):
                result = self.operate_here(operation)
        if isinstance(result, Exception):
            raise result
        return result

    def operate_here(self, operation: RunOperation) -> Any:
        """Run an operation on this rank. Returns its result, or its error, which is the same on all ranks."""
        adapters, arguments = self.setup.adapters, operation.arguments
        try:
            match operation.name:
                case "export_prefix":
                    return self.offload.handover.export(*arguments)
                case "import_prefix":
                    return self.offload.handover.import_file(*arguments)
                case "flush_disk":
                    return None if self.offload.disk is None else self.offload.disk.drain()
                case "verify_graphs":
                    return self._verify_graphs(*arguments)
            if adapters is None:
                raise ValueError("enable_lora is False; it must be True for LoRA adapters")
            load = operation.name == "load_adapter"
            return (adapters.load if load else adapters.unload)(*arguments)
        except (ValueError, OSError) as error:
            return error

    def verify_graphs(self, *, fuzz: int = 3) -> VerifyReport:
        """Check on `fuzz` random steps per graph that replays equal eager runs. A graph that fails on any rank fails.
        Raises ValueError while there are requests, because caches are overwritten, and if there are no graphs.
        """
        report: VerifyReport = self.operate("verify_graphs", fuzz)
        return report

    def _verify_graphs(self, fuzz: int) -> VerifyReport:
        if self.requests:
            raise ValueError(f"requests: {len(self.requests)} are not finished; verifying overwrites their caches")
        self.registry.consistent = False  # cached prefixes are overwritten
        return joint_report(self.runner.verify_graphs(fuzz), self.model.ranks)

    def metrics(self) -> EngineStats:
        """Counters, with the current numbers of running and waiting requests. Can be called from any thread."""
        stats, scheduler = self.stats, self.scheduler
        stats.num_running, stats.num_waiting = len(scheduler.running), scheduler.num_waiting
        if (pool := scheduler.pool) is not None:
            stats.kv_cache_usage = 1 - pool.num_free / pool.capacity
        return stats

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

    def _launch(self, marks: StepMarks) -> StepInFlight | None:
        """Launch the next step on the device, which may still run the step before. None if there is nothing to run.
        marks: gets the end times of the parts of the step.
        """
        batch = self._schedule()
        if batch is None:
            return None
        runner, admitted = self.runner, self._admit()
        marks.append(("schedule", perf_counter()))
        staged, hidden, features = runner.execute_model(batch, marks)
        allowed = None
        if batch.with_grammar:
            if self.setup.async_scheduling:  # what may be sampled depends on the tokens before
                if self.registry.in_flight:
                    self._collect(marks)
                runner.grammars.check_drafts(batch.with_grammar)
            allowed = runner.grammars.allowed(batch)
        ended = runner.ends.run(batch, staged, hidden, allowed)
        launched = StepInFlight(
            batch,
            self.table.num_drafts[batch.rows],
            self.scheduler.num_released,
            None if ended.packed is None else Fetch([ended.packed, *(ended.logprobs or ())]),
            None if batch.all_decode else score_prompts(self.model, self.table, batch, hidden),
        )
        marks.append(("sample", perf_counter()))
        if runner.proposer is not None:
            launched.proposal = runner.proposer.propose(batch, staged, features, ended, admitted)
            if batch.with_grammar:
                runner.grammars.fetch(batch)
            marks.append(("draft", perf_counter()))
        return launched

    def _schedule(self) -> StepBatch | None:
        """Return the batch of the next step; None if no request can run now.
        Without a batch, a data-parallel rank takes part in a step of the other ranks, if they have one. If nothing runs
        at all and requests need prefixes from the disk tier, this waits up to 20 ms for their files.
        """
        runner, scheduler, in_flight = self.runner, self.scheduler, bool(self.registry.in_flight)
        if runner.proposer is not None:
            runner.proposer.plan()
        if runner.grammars.has_drafts and not self.setup.async_scheduling:
            runner.grammars.cut_drafts()
        batch = scheduler.schedule(in_flight=in_flight)
        if batch is None and not runner.idle(self.stats) and scheduler.fetching and not in_flight:
            assert self.offload.disk is not None, "requests wait for files"
            self.offload.disk.wait(_WAIT_SECONDS)
        self.stats.num_preemptions = scheduler.num_preemptions
        return batch

    def _admit(self) -> Sequence[Request]:
        if not self.scheduler.admitted:
            return ()
        admitted = [request for request in self.scheduler.admitted if request.row >= 0]
        self.scheduler.admitted.clear()
        if admitted:
            self._outputs.admit(admitted, self.scheduler.running)
            self.runner.admit(admitted)
        if self.scheduler.prefixes is not None:
            for request in admitted:
                if not request.num_preemptions:
                    self.stats.prefix_cache.num_queries += len(request.prompt_token_ids)
                    self.stats.prefix_cache.num_hits += request.prefix.num_cached_tokens
        return admitted

    def _collect(self, marks: StepMarks) -> None:
        """Wait for the oldest step in flight, append its tokens, and add its blocks to the prefix cache. Leaves the
        requests to report in `_reports`. marks: see `_launch`.
        Requests that lost their table row since the launch are skipped; another request may have the row now.
        """
        step, scheduler, stats = self.registry.in_flight[0], self.scheduler, self.stats
        batch, n, present = step.batch, step.batch.num_decodes, None
        num_rows = num_taken = num_verified = 0
        if step.num_released != scheduler.num_released:
            present = step.present()
        if step.scored is not None:
            self._outputs.logprobs.append_prompt(step.scored)
        ended = present is not None and all(each.finish_reason is not None for each in batch.requests)
        if step.fetched is None or ended:
            scheduler.commit(batch, None, present)
            self._reports = []
        else:
            sampled = None if present is None else present[batch.samples]
            requests, lengths = batch.sampled[0], self.table.num_known[batch.sampled[1]]
            if present is not None:  # some have no row
                requests = [each for each in requests if each.finish_reason is None]
                lengths = np.array([each.num_tokens for each in requests], np.int32)
            step.appending = requests, lengths
            emitted = self._outputs.emit(step, sampled)
            taken, self._reports = emitted.num_taken, emitted.reports
            num_valid = taken
            if not batch.all_decode:
                num_valid = batch.query_lens.astype(np.int64)
                num_valid[:n] = taken[:n]
            scheduler.commit(batch, num_valid, present)
            if self.runner.proposer is not None and n:
                kept = slice(None) if present is None else present[:n]
                num_drafts = np.minimum(emitted.num_drafts[:n], step.num_drafts[:n])
                self.runner.proposer.learn(batch.rows[:n][kept], num_drafts[kept], emitted.num_accepted[:n][kept])
            num_rows = n if present is None else int(np.count_nonzero(taken[:n]))
            num_taken, num_verified = int(taken.sum()), int(taken[:n].sum())
        step.num_tokens = num_verified
        self.registry.in_flight = self.registry.in_flight[1:]
        # No call from here on: the tokens are final, and are counted.
        stats.num_steps += 1
        stats.num_prefill_tokens += batch.num_tokens - batch.num_decode_tokens
        stats.num_emitted_tokens += num_taken
        stats.num_verify_rows += num_rows
        stats.num_verified_tokens += num_verified
        marks.append(("emit", perf_counter()))


def joint_report(report: VerifyReport, ranks: Ranks) -> VerifyReport:
    """Return the report of this rank with the graphs that fail on another rank as failed."""
    if ranks.alone:
        return report
    passed = ranks.all_have([each.failure is None for each in report.comparisons])
    return VerifyReport(
        tuple(
            each if everywhere else replace(each, failure=each.failure or "another rank's part differs")
            for each, everywhere in zip(report.comparisons, passed, strict=True)
        )
    )
