"""One step of the engine, and the requests that live in it."""

# Shape letters: R rows of a step, T tokens, S rows that draw a token, V vocabulary.

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.cudagraph import Ask, Checks, Decision, ReplayFailed, VerifyReport
from bateleur.metadata import (
    AttentionBackend,
    BatchShape,
    CommonAttentionMetadata,
    InputBuffers,
    StepRows,
    decode_like,
    uniform_query_len,
)
from bateleur.runner.caches import CachePlan, Caches
from bateleur.runner.emit import Emitter
from bateleur.runner.graphs import GraphOptions, StepGraphs
from bateleur.runner.limits import EngineLimits
from bateleur.runner.model_state import model_state_for
from bateleur.runner.models import HybridDecoder
from bateleur.runner.outputs import RequestOutput
from bateleur.runner.prefix_cache import PrefixCache
from bateleur.runner.producer import StepProducer, padded_shape
from bateleur.runner.request import Request
from bateleur.runner.sampler import Sampled, SamplingState
from bateleur.runner.scheduler import Scheduler, StepPlan
from bateleur.runner.stats import EngineStats, StepClock
from bateleur.runner.table import RequestTable
from bateleur.runner.tokenizer import Tokenizer


class Engine:
    """Schedule, decide, stage, build, forward, sample, emit: one step at a time.

    Not thread-safe. `add` takes requests that are already validated (see `LLM`); every request that was added
    is reported finished exactly once, by `step` or by `abort`.
    """

    def __init__(
        self,
        model: HybridDecoder,
        tokenizer: Tokenizer,
        cache_plan: CachePlan,
        backend: AttentionBackend,
        limits: EngineLimits,
        graphs: GraphOptions,
    ) -> None:
        """Allocate everything for `limits`, where the model's weights are and in their dtype, and capture `graphs`."""
        self.model = model
        self.limits = limits
        self.device = device = model.device
        self.stats = EngineStats()
        self.caches = Caches(model.spec, cache_plan, model.dtype, device)
        pages = self.caches.state_pages(limits.max_num_seqs, limits.max_model_len)
        self.model_state = model_state_for(model.spec, self.caches, backend, limits, pages)
        self.table = RequestTable(limits.max_num_seqs, limits.max_model_len, cache_plan.max_blocks)
        pool = self.caches.block_pool()
        prefixes = (
            PrefixCache(self.table, pool, cache_plan.block_size, pages) if cache_plan.share_prefixes else None
        )
        self.scheduler = Scheduler(
            self.table,
            pool,
            block_size=cache_plan.block_size,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            states=pages,
            prefixes=prefixes,
        )
        buffers = InputBuffers(
            limits.buffers,
            self.model_state.groups,
            device,
            seq_len_fill=self.model_state.seq_len_fill,
        )
        self.sampling = SamplingState(limits.max_num_seqs, model.spec.vocab_size, device)
        self.producer = StepProducer(buffers, self.model_state, signed=graphs.checks >= Checks.CHEAP)
        self.graphs = StepGraphs(model, self.producer, graphs, device)
        self.graphs.capture()
        self.requests: dict[str, Request] = {}
        self._emitter = Emitter(tokenizer, self.stats)
        self._last_sampled = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        # A steady plan is one object, so what derives from it is made once.
        self._device_rows: tuple[StepPlan, Tensor] | None = None
        self._decided: tuple[StepPlan, Decision, BatchShape] | None = None

    # --- requests -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now; what it emitted so far is in the result. ValueError for an unknown id."""
        request = self.requests.get(request_id)
        if request is None:
            raise ValueError(f"request_id is {request_id!r}; no such request is waiting or running")
        request.finish_reason = "abort"
        return self._retire(request)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.requests)

    def verify_graphs(self, *, fuzz: int = 3) -> VerifyReport:
        """Show that every captured graph replays what an eager run computes, on random steps.

        Raises ValueError while requests wait or run, since caches are overwritten, or if there are no graphs.
        """
        if self.requests:
            raise ValueError(
                f"requests: {len(self.requests)} are not finished; verifying overwrites their caches"
            )
        return self.graphs.verify(fuzz=fuzz)

    def _retire(self, request: Request) -> RequestOutput:
        self.scheduler.remove(request)
        del self.requests[request.request_id]
        self.stats.num_finished += 1
        self.stats.num_cached_tokens += request.num_cached_tokens
        self._emitter.close(request)
        return request.output()

    # --- the step -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that finished and those that stream.

        If the model raises, the error goes to the caller and no request is lost: the rows of the step, whose caches
        may be half written, are recomputed from their tokens by later steps. If a graph fails, the same happens with a
        warning in place of the error, since its batches run eagerly from then on.
        """
        clock = StepClock(self.stats)
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        self.stats.num_preemptions = self.scheduler.num_preemptions
        self._follow_rows()
        clock.lap("schedule")
        try:
            sampled, drawing = self._run(plan, clock)
        except ReplayFailed as error:
            self.scheduler.requeue(plan.requests)
            warnings.warn(f"{error}; its requests are recomputed", RuntimeWarning, stacklevel=2)
            return []
        except Exception:
            self.scheduler.requeue(plan.requests)
            raise
        self.scheduler.commit(plan)
        done = self._emit(plan, drawing, sampled)
        clock.lap("emit")
        return done

    def _run(self, plan: StepPlan, clock: StepClock) -> tuple[Sampled | None, NDArray[np.bool_]]:
        """The device's part of a step."""
        decision, shape = self._decide(plan)
        batch = self.producer.stage_rows(self._step_rows(plan), shape)
        clock.lap("stage")
        staged = self.producer.prepare(batch, decision.descriptor)
        clock.lap("build")
        hidden_TD = self.graphs.run(staged)
        clock.lap("forward")
        drawn = self._sample(plan, batch, hidden_TD)
        clock.lap("sample")
        return drawn

    def _decide(self, plan: StepPlan) -> tuple[Decision, BatchShape]:
        """Choose the graph for this step, or eager with the reason; padding follows from the choice."""
        if self._decided is None or self._decided[0] is not plan:
            num_reqs, num_tokens = len(plan.rows), plan.num_tokens
            ask = self._ask(plan, num_reqs, num_tokens)
            decision = self.graphs.decide(ask)
            shape = padded_shape(decision.descriptor, num_reqs, num_tokens, ask.max_query_len)
            self._decided = (plan, decision, shape)
        _, decision, shape = self._decided
        self.graphs.decisions.count(decision)
        return decision, shape

    def _ask(self, plan: StepPlan, num_reqs: int, num_tokens: int) -> Ask:
        if num_reqs == plan.num_decodes:
            return Ask(num_reqs, num_tokens, 1, 1, decode_only=True)
        computed = self.table.num_computed[plan.rows]
        state = (plan.query_lens, computed < self.table.prefill_len[plan.rows], computed)
        longest = int(plan.query_lens.max())
        return Ask(num_reqs, num_tokens, uniform_query_len(*state), longest, bool(decode_like(*state).all()))

    def _step_rows(self, plan: StepPlan) -> StepRows:
        table, rows = self.table, plan.rows
        computed = table.num_computed[rows]
        sampled = self._last_sampled.index_select(0, self._rows_on_device(plan)[: plan.num_decodes])
        return StepRows(
            query_lens=plan.query_lens,
            num_computed=computed,
            is_prefilling=computed < table.prefill_len[rows],
            token_ids=self._prompt_tokens(plan, computed),
            block_tables=self.model_state.block_tables(table.block_table[rows], rows),
            exact=None,
            sampled=sampled if plan.num_decodes else None,
        )

    def _prompt_tokens(self, plan: StepPlan, computed_R: NDArray[np.int32]) -> NDArray[np.int32]:
        """(T,) ids of the step; those of decoding rows are filled in on the device and are 0 here."""
        tokens_T = np.zeros(plan.num_tokens, dtype=np.int32)
        n = plan.num_decodes
        if n < len(plan.rows):
            lens = plan.query_lens[n:]
            starts = np.cumsum(lens) - lens
            columns = np.arange(len(tokens_T) - n) + np.repeat(computed_R[n:] - starts, lens)
            tokens_T[n:] = self.table.token_ids[np.repeat(plan.rows[n:], lens), columns]
        return tokens_T

    def _rows_on_device(self, plan: StepPlan) -> Tensor:
        """The rows as a device index."""
        if self._device_rows is None or self._device_rows[0] is not plan:
            self._device_rows = (plan, self._upload(plan.rows))
        return self._device_rows[1]

    def _upload(self, array: NDArray[np.int64]) -> Tensor:
        """Host to device without waiting; the array is fresh and nothing writes to it again."""
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _sample(
        self, plan: StepPlan, batch: CommonAttentionMetadata, hidden_TD: Tensor
    ) -> tuple[Sampled | None, NDArray[np.bool_]]:
        """Draw for the rows that computed their last known token; the ids stay on the device."""
        drawing = plan.samples
        rows = plan.rows
        device_rows = self._rows_on_device(plan)
        seq_lens = batch.seq_lens[: len(rows)]
        if len(rows) == plan.num_decodes:
            hidden_SD = hidden_TD[: len(rows)]
        else:
            if not drawing.any():
                return None, drawing
            chosen = torch.from_numpy(np.flatnonzero(drawing)).to(self.device)
            last = torch.from_numpy((np.cumsum(plan.query_lens) - 1)[drawing].astype(np.int64)).to(
                self.device
            )
            hidden_SD = hidden_TD.index_select(0, last)
            rows, device_rows, seq_lens = rows[drawing], device_rows[chosen], seq_lens.index_select(0, chosen)
        generated = self.table.num_tokens[rows] - self.table.prompt_len[rows]
        sampled = self.sampling.sample(self.model.logits(hidden_SD), rows, seq_lens.long(), generated)
        self._last_sampled.index_copy_(0, device_rows, sampled.token_ids)
        return sampled, drawing

    def _emit(
        self, plan: StepPlan, drawing: NDArray[np.bool_], sampled: Sampled | None
    ) -> list[RequestOutput]:
        """The host learns the tokens: append, stop, detokenise, report."""
        self.stats.num_steps += 1
        self.stats.num_prefill_tokens += plan.num_tokens - plan.num_decodes
        if sampled is None:
            return []
        all_draw = len(plan.requests) == plan.num_decodes
        requests = plan.requests if all_draw else [plan.requests[i] for i in np.flatnonzero(drawing)]
        rows = plan.rows if all_draw else plan.rows[drawing]
        tokens, reports = self._emitter.emit(requests, sampled)
        table = self.table
        table.token_ids[rows, table.num_tokens[rows]] = tokens
        table.num_tokens[rows] += 1
        return [self._retire(r) if r.finish_reason is not None else r.output() for r in reports]

    def _follow_rows(self) -> None:
        """Tell the sampler of requests that got a row since the last step."""
        for request in self.scheduler.admitted:
            if request.row >= 0:
                self.sampling.admit(
                    request.row,
                    request.params,
                    request.seed,
                    request.prompt_token_ids,
                    request.output_token_ids,
                    tuple(request.stop_token_ids),
                )
        self.scheduler.admitted.clear()
