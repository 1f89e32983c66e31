"""EAGLE proposer: an EAGLE or MTP head that proposes tokens one after the other.

A proposal is a first pass on the rows of the target's step, rejected tokens included, with the target's attention
metadata. Then one pass follows for each further draft, with one token per row and its own metadata. There is no
host-device sync.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bateleur.cudagraph import (
    BatchExecutionDescriptor,
    CapturedStates,
    DispatchCounter,
    DispatchDecision,
    DispatchReason,
    Execution,
    Phase,
    RankStep,
)
from bateleur.eagle.borrow import TargetState, require_borrow
from bateleur.eagle.buffers import DraftInputs
from bateleur.eagle.cache import DraftCache
from bateleur.eagle.chain_steps import ChainSteps, bound_of_drafts, stage_dummy
from bateleur.eagle.drafter import DraftContext, TargetNeeds
from bateleur.eagle.full_proposal import FullProposal, can_follow
from bateleur.eagle.geometry import draft_max_seq_len, stage_first
from bateleur.eagle.heads.eagle3 import Eagle3Head
from bateleur.eagle.heads.spec import Head, SharedHead
from bateleur.eagle.managers import (
    DecodeEagleCudaGraphManager,
    DraftGraphs,
    DraftStateProducer,
    PrefillEagleCudaGraphManager,
)
from bateleur.eagle.native.chain import NativeChain
from bateleur.eagle.passes import DraftPasses, DraftState, refresh_of
from bateleur.eagle.rules import Coupled, DraftDistribution, Logits, Rule
from bateleur.metadata import AttentionBackend, BatchLimits, BuildPhase, CommonAttentionMetadata, check_reads


class EagleSpeculator:
    """Drafts with a head over paged caches that share the block table of the target's attention group.

    Args:
        head: the draft head, see `bateleur.eagle.heads`.
        cache: KV caches of the head; everything is on their device.
        backend: attention backend of the head, which builds the metadata of later passes, too.
        limits: the target's batch limits.
        num_speculative_tokens: K, most drafts of a request.
        graphs: CUDA graphs that `capture` captures; None for none.
        rule: acceptance rule of the drafts. Under RATIO and BLOCK drafts are sampled with independent noise, and the
            logits of all drafts that wait for verification are kept, max_num_reqs * K * Vd * 4 bytes.

    Raises `ValueError` for inconsistent numbers.

    Attributes:
        draft_max_seq_len: host bound of the lengths of every draft pass: `max_model_len` before the first step, then
            min(largest bound of the step + K, max_model_len).
        max_drafted_len: most tokens of a sequence, drafts included: a pass at position p predicts the token of index p
            + 2.
        draft_prefill_builds: number of times that metadata was built for first passes; 0 if the target always has
            metadata.
        prefill, decode: graphs of the first pass, once captured, and of the passes after it (the chain).
        decisions: which graph each chain ran on, and why it ran eagerly.
    """

    def __init__(
        self,
        head: Head,
        cache: DraftCache,
        backend: AttentionBackend,
        limits: BatchLimits,
        num_speculative_tokens: int,
        *,
        graphs: DraftGraphs | None = None,
        rule: Rule = Rule.COUPLED,
    ) -> None:
        cache.require_room(head.spec, limits, num_speculative_tokens)
        self.head, self.rule = head, rule
        self.num_speculative_tokens = num_speculative_tokens
        self.draft_max_seq_len = limits.max_model_len
        self.draft_prefill_builds = 0
        self._cache = cache
        self._builder = backend.builder()
        check_reads(self._builder)
        held = min(limits.max_model_len, head.spec.max_positions or limits.max_model_len)
        self.max_drafted_len = min(held + 2, limits.max_model_len)
        own = BatchLimits(limits.max_num_reqs, limits.max_num_tokens, held)
        self.inputs = DraftInputs(head, cache, own, num_speculative_tokens, rule)
        refresh = refresh_of(self._builder)
        self._passes = DraftPasses(head, cache, backend, self.inputs, refresh, rule)
        if self.inputs.device.type == "cpu":
            head.reserve_positions(held)
        self._native: NativeChain | None = None
        if isinstance(head, Eagle3Head) and NativeChain.fits(head, cache, rule):
            self._native = NativeChain(head, cache, held, limits.max_model_len, num_speculative_tokens)
        self.steps = ChainSteps(self.inputs, cache, self._builder, limits.max_model_len)
        self.prefill: PrefillEagleCudaGraphManager | None = None
        self.decode: DecodeEagleCudaGraphManager | None = None
        self.decisions = DispatchCounter()
        self._columns = torch.arange(num_speculative_tokens, device=self.inputs.device)
        self._chains: tuple[int, ...] = ()
        self._graphs = graphs
        self.whole: FullProposal | None = None
        """Whole proposals for CUDA graphs; None if metadata cannot be refreshed inside a graph."""
        if graphs is not None:
            self._plan_decode(graphs)

    # --- Drafter --------------------------------------------------------------------------------------------

    @property
    def kv(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """(k_cache, v_cache) of each attention layer of the head."""
        return tuple(self._cache.kv)

    @property
    def needs(self) -> TargetNeeds:
        """Hidden states of the target that the head reads."""
        return self.head.spec.needs

    @property
    def can_start_late(self) -> bool:
        """Whether the head drafts for requests whose first tokens it has not seen, see `DraftContext.start_positions`.
        Only the C implementation (`NativeChain`) can.
        """
        return self._native is not None and self._is_eager

    def admit(self, row: int, token_ids: list[int]) -> None:
        """Does nothing: the head keeps its state in KV cache blocks, which the target's scheduler manages."""

    def propose(self, context: DraftContext) -> Tensor:
        """Update the head's KV caches and propose drafts, (R, K) int64, -1 where there is none. No host sync."""
        drafts = self._native.propose(context) if self._native is not None and self._is_eager else None
        if self._native is not None and drafts is not None:
            longest = context.batch.max_seq_len + self.num_speculative_tokens
            self.draft_max_seq_len = min(longest, self.steps.max_seq_len)
            return drafts
        return self._propose(context)

    @torch.no_grad()
    def _propose(self, context: DraftContext) -> Tensor:
        context.require(self.needs, self.num_speculative_tokens)
        batch, num_drafts, x = context.batch, context.num_drafts, self.inputs
        num_rows = batch.num_actual_reqs
        self.draft_max_seq_len = draft_max_seq_len(
            batch.seq_len_bound, self.num_speculative_tokens, self.steps.max_seq_len
        )
        stage_first(x, batch, self._cache.group, context.next_token, context.num_valid)
        x.set_rows(context.seeds, context.temperature, batch.block_tables[self._cache.group], context.rows)
        x.hidden[: batch.num_tokens] = self.head.fuse(context.features)
        room_R = self._room(context)
        chain = self._decide(num_rows, num_drafts).descriptor if num_drafts > 1 else None
        self._run_first(context)
        if num_drafts > 1:
            self._run_chain(context, chain)
        if context.start_positions is not None:  # paged attention would read keys that other requests left
            x.tokens[:num_rows].masked_fill_((context.start_positions > 0).unsqueeze(1), -1)
        tokens_RK = x.tokens[:num_rows]
        return tokens_RK.clone() if room_R is None else tokens_RK.where(self._columns < room_R.unsqueeze(1), -1)

    def distribution(self, rows: Tensor) -> DraftDistribution:
        """Return the distribution of the last drafts of the request table's rows `rows`: their logits under RATIO and
        BLOCK.
        """
        kept = self.inputs.logits
        if kept is None:
            return Coupled()
        shard = self.head.shard if isinstance(self.head, SharedHead) else None
        return Logits(kept.of(rows), self.head.target_ids, shard)

    @property
    def _is_eager(self) -> bool:
        first, chain = self.prefill, self.decode
        graphed = (first is not None and first.ready) or (chain is not None and chain.ready)
        return not graphed

    def _room(self, context: DraftContext) -> Tensor | None:
        """Return how many drafts of each request have an index below `max_model_len`, (R,) int64, at most `num_drafts`.

        None if the host knows that it is K for all requests.
        """
        batch, k, limit = context.batch, self.num_speculative_tokens, self.steps.max_seq_len
        if context.num_drafts == k and batch.seq_len_bound.max() + 1 + k <= limit:
            return None
        positions_R = self.inputs.token_positions[: batch.num_actual_reqs]
        return (limit - positions_R).clamp_(max=context.num_drafts)

    @torch.no_grad()
    def warm_up(self, target: TargetState) -> None:
        """Run all draft passes after a staged dummy step, eagerly, so that no later step of this size loads a kernel:
        with noise, without, and those that only store keys and values.
        """
        first = self._adopt(target, Phase.WARMUP, None)
        self._passes.store_kv(Execution(None, first))
        for greedy in (True, False):
            self._passes.first(Execution(None, replace(first, greedy=greedy)))
            if self.num_speculative_tokens > 1:
                self._warm_chain(target.batch, greedy)

    def _warm_chain(self, batch: CommonAttentionMetadata, greedy: bool) -> None:
        """Run the second draft pass of the dummy step `batch` eagerly, so that its kernels are loaded."""
        rows, longest = batch.num_actual_reqs, self.steps.max_seq_len
        bound = bound_of_drafts(batch).advanced(1, longest)
        state = self.steps.build(rows, rows, bound, longest, BuildPhase.WARMUP, greedy=greedy)
        if self._passes.refresh is not None:
            self._passes.refresh(state.metadata)
        self._passes.chain(Execution(None, state))

    # --- capture --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def capture(
        self,
        attn_states: CapturedStates[Any],
        *,
        keys: Iterable[BatchExecutionDescriptor] | None = None,
        keep_going: bool = False,
    ) -> None:
        """Capture the first draft pass over the target's captured states, and the later passes over their own states.

        attn_states: captured states that the target's `capture` returned; they are `TargetState`.
        keys: graph keys of the first pass; None means all that the target captured, () no first pass.
        keep_going: as for `CudaGraphManager.capture`.

        Raises `NotCaptured`, with the nearest keys, for a key that the target has not captured, `BorrowError` if the
        target's metadata does not fit, `CaptureError`, and `ValueError` without `graphs`.
        """
        if self._graphs is None or self.decode is None:
            raise ValueError("graphs is None; a speculator that captures needs a DraftGraphs")
        keys = None if keys is None else tuple(keys)
        if keys is None or keys:
            self.prefill = PrefillEagleCudaGraphManager(
                attn_states, self._graphs.backend, keys=keys, checks=self._graphs.checks
            )
            producer = DraftStateProducer(self.prefill.target_states, self._adopt, self.steps)
            self.prefill.capture(producer, self._passes.first, keep_going=keep_going)
        self.decode.capture(self.steps, self._passes.chain, keep_going=keep_going)

    def _plan_decode(self, graphs: DraftGraphs) -> None:
        """Choose the graphs of the draft passes after the first one (the chain); no graphs if K = 1."""
        k = self.num_speculative_tokens
        if graphs.fuse and self._passes.refresh is not None:
            self._chains = tuple(sorted({*graphs.chains, k}))
            if not 2 <= self._chains[0] <= self._chains[-1] <= k and k > 1:
                raise ValueError(f"chains is {graphs.chains}; a chain has 2 to {k} drafts")
        plan = DecodeEagleCudaGraphManager.plan_for(
            graphs.sizes if k > 1 else (), self.inputs.limits.max_num_reqs, self._chains, self._builder.graph_support
        )
        self.decode = DecodeEagleCudaGraphManager(plan, graphs.backend, checks=graphs.checks)
        if graphs.fuse and can_follow(self._builder):
            self.whole = FullProposal(
                self.head, self.inputs, self._passes, self.steps, self._lent, self._adopt, self._cache.group
            )
        self._coordinator = graphs.coordinator(plan)

    # --- the first pass -------------------------------------------------------------------------------------

    def _run_first(self, context: DraftContext) -> None:
        manager, key = self.prefill, context.key
        if manager is not None and key is not None and key in manager.ready:
            manager.replay(key, self._borrow(context, manager.generation).staged(key))
            return
        execution = Execution(None, self._borrow(context, greedy=context.greedy))
        if context.num_drafts:
            self._passes.first(execution)
        else:
            self._passes.store_kv(execution)

    def _borrow(
        self, target: TargetState, now: int | None = None, phase: BuildPhase = BuildPhase.RUN, *, greedy: bool = False
    ) -> DraftState:
        """Return batch and metadata of a first pass: those of the target's step. For a target without attention the
        metadata is built. now: as for `borrow_violations`.

        Rejected tokens are stored, too: attention requires that every position below `seq_lens` has been written. The
        causal mask hides them from kept tokens, and the next token at their position overwrites them.
        """
        batch, metadata = target.batch, target.attention
        if metadata is None:
            self.draft_prefill_builds += 1
            metadata = self._builder.build(batch, self._cache.group, phase)
        else:
            require_borrow(metadata, batch, self._cache.group, now)
        return DraftState(batch, metadata, self._builder.signature, greedy)

    def _lent(self, target: TargetState, phase: BuildPhase) -> DraftState:
        return self._borrow(target, phase=phase)

    def _adopt(self, target: TargetState, phase: Phase, seed: int | None) -> DraftState:
        """Stage a dummy step in the drafter's buffers (random with `seed`); return the state of its first pass."""
        stage_dummy(self.inputs, self._cache, target.batch, self._cache.group, seed=seed)
        return self._borrow(target, phase=BuildPhase(phase.value))

    # --- the chain ------------------------------------------------------------------------------------------

    def _run_chain(self, context: DraftContext, key: BatchExecutionDescriptor | None) -> None:
        num_rows, num_drafts = context.batch.num_actual_reqs, context.num_drafts
        bound = bound_of_drafts(context.batch)
        padded = num_rows if key is None else key.num_tokens
        for step in range(1, num_drafts):
            if step == 1 or self._passes.refresh is None:
                last = (
                    step if self._passes.refresh is None else num_drafts - 1
                )  # the pass for which the host bound must hold
                longest = bound.advanced(last, self.steps.max_seq_len)
                state = self.steps.build(num_rows, padded, longest, self.draft_max_seq_len, greedy=context.greedy)
            if self._passes.refresh is not None and not (key is not None and key.variant):
                self._passes.refresh(state.metadata)
            if key is None:
                self._passes.chain(Execution(None, state))
                continue
            assert self.decode is not None
            self.decode.replay(key, state.staged(key))
            if key.variant:  # one graph of all passes, refreshes included
                return

    def _decide(self, num_rows: int, num_drafts: int) -> DispatchDecision:
        """Choose the graph of the passes after the first, the same on all ranks, or eager execution with the reason."""
        if self.decode is None:
            return DispatchDecision(None, DispatchReason.NO_GRAPHS)
        chain = next((k for k in self._chains if k >= num_drafts), None)
        ask = self.decode.ask(num_rows, chain)
        decision = self._coordinator.coordinate(RankStep(ask, self.decode.ready)).decision_for(ask)
        self.decisions.count(decision)
        return decision
