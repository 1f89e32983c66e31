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

from bateleur.cudagraph import BatchExecutionDescriptor, CapturedStates, DispatchCounter, Execution, Phase, RankStep
from bateleur.eagle.borrow import TargetState, require_borrow
from bateleur.eagle.buffers import DraftBuffers, DraftCache, DraftLogits
from bateleur.eagle.chain_steps import ChainSteps
from bateleur.eagle.drafter import DraftContext, TargetNeeds
from bateleur.eagle.geometry import stage_first
from bateleur.eagle.heads.eagle import Eagle3Head
from bateleur.eagle.heads.spec import Head
from bateleur.eagle.managers import (
    DecodeEagleCudaGraphManager,
    DraftGraphs,
    DraftStateProducer,
    PrefillEagleCudaGraphManager,
)
from bateleur.eagle.native.chain import NativeChain
from bateleur.eagle.passes import DraftPasses, DraftState, ProposalPasses, refresh_of, refreshes_in_graph
from bateleur.eagle.rules import Coupled, DraftDistribution, Logits, Rule
from bateleur.metadata import AttentionBackend, BatchLimits, BuildPhase, check_reads


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
            logits of all drafts that wait for verification are kept: max_num_reqs * K * draft vocabulary * 4 bytes.

    Raises `ValueError` if `cache` is too small for `limits` and K or does not fit the head, or if drafts can't use the
    metadata builder of `backend`.

    Attributes:
        draft_max_seq_len: upper bound of the sequence lengths in the draft passes of the last `propose`.
        max_drafted_len: most tokens of a sequence, drafts included: a pass at position p predicts token p + 2.
        draft_prefill_builds: how often metadata was built for first passes; 0 if the target always has metadata.
        prefill, decode: graphs of the first pass, once captured, and of the passes after it (the chain).
        fuses_proposals: whether one graph can hold a whole proposal, see `record_proposal`.
        steps: stages and builds the passes after the first one.
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
        self.decisions = DispatchCounter()
        self._cache = cache
        self._builder = builder = backend.builder()
        check_reads(builder)
        held = min(limits.max_model_len, head.spec.max_positions or limits.max_model_len)
        self.max_drafted_len = min(held + 2, limits.max_model_len)
        own = BatchLimits(limits.max_num_reqs, limits.max_num_tokens, held)
        keys, k = cache.kv[0][0], num_speculative_tokens
        sizes = {"max_blocks": cache.blocks.max_blocks, "hidden_size": head.spec.hidden_size}
        self.inputs = DraftBuffers(own, k, keys.device, **sizes, dtype=cache.dtype or keys.dtype)
        self._passes = DraftPasses(head, cache, backend, self.inputs, refresh_of(builder), rule)
        if rule is not Rule.COUPLED:
            self.inputs.logits = DraftLogits(limits.max_num_reqs, k, len(self._passes.vocab.hashes), keys.device)
        if self.inputs.device.type == "cpu":
            head.reserve_positions(held)
        self._native: NativeChain | None = None
        if isinstance(head, Eagle3Head) and NativeChain.fits(head, cache, rule):
            self._native = NativeChain(head, cache, held, limits.max_model_len, num_speculative_tokens)
        self.steps = ChainSteps(self.inputs, cache, builder, limits.max_model_len)
        self._columns = torch.arange(num_speculative_tokens, device=self.inputs.device)
        self.prefill: PrefillEagleCudaGraphManager | None = None
        self.decode: DecodeEagleCudaGraphManager | None = None
        self.fuses_proposals = False
        self._chain: int | None = None  # drafts of a whole chain in one graph
        self._graphs = graphs
        if graphs is not None:
            self._chain = k if graphs.fuse and self._passes.refresh is not None else None
            self.fuses_proposals = graphs.fuse and refreshes_in_graph(builder)
            plan = DecodeEagleCudaGraphManager.plan_for(
                graphs.sizes if k > 1 else (), limits.max_num_reqs, self._chain, builder.graph_support
            )
            self.decode = DecodeEagleCudaGraphManager(plan, graphs.backend, checks=graphs.checks)
            self._coordinator = graphs.coordinator(plan)

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
        Only the C implementation (`NativeChain`) can, which is not used with graphs.
        """
        graphed = any(manager is not None and manager.ready for manager in (self.prefill, self.decode))
        return self._native is not None and not graphed

    def admit(self, row: int, token_ids: list[int]) -> None:
        """Does nothing: the head keeps its state in KV cache blocks, which the target's scheduler manages."""

    @torch.no_grad()
    def propose(self, context: DraftContext) -> Tensor:
        """Update the head's KV caches and propose drafts, (R, K) int64, -1 where there is none. No host sync."""
        num_rows, num_drafts = context.batch.num_actual_reqs, context.num_drafts
        self.draft_max_seq_len = self.steps.longest(context.batch, Phase.RUN)
        if self._native is not None and self.can_start_late:
            drafts = self._native.propose(context)
            if drafts is not None:
                return drafts
        context.require(self.needs, self.num_speculative_tokens)
        self._stage(context)
        room_R1 = self._room(num_rows, num_drafts)
        self._run_first(context)
        if num_drafts > 1:
            self._run_chain(context)
        tokens_RK = self.inputs.tokens[:num_rows].where(self._columns < room_R1, -1)
        if context.start_positions is not None:  # paged attention would read keys that other requests left
            tokens_RK.masked_fill_((context.start_positions > 0).unsqueeze(1), -1)
        return tokens_RK

    def distribution(self, rows: Tensor) -> DraftDistribution:
        """Return the distribution of the last drafts of these rows of the request table: `Logits` or `Coupled`."""
        if self.inputs.logits is None:
            return Coupled()
        return Logits(self.inputs.logits.of(rows), self.head.target_ids, self._passes.vocab.shard)

    def _stage(self, context: DraftContext, *, clears: bool = True) -> None:
        """Write the inputs of the first pass. clears: zero the rows after the batch; False inside a graph."""
        x, batch = self.inputs, context.batch
        stage_first(x, batch, self._cache.group, context.next_token, context.num_valid)
        table = batch.block_tables[self._cache.group]
        x.set_rows(context.seeds, context.temperature, table, context.rows, clears=clears)
        x.hidden[: batch.num_tokens] = self.head.fuse(context.features)

    def _room(self, num_rows: int, num_drafts: int) -> Tensor:
        """Return how many drafts of each row fit into `max_model_len`: (R, 1) int64, at most `num_drafts`.

        Draft i (from 0) has the position `self.inputs.token_positions` + i. The result is at most 0 if none fits.
        """
        positions_R1 = self.inputs.token_positions[:num_rows].unsqueeze(1)
        return (self.steps.max_seq_len - positions_R1).clamp_(max=num_drafts)

    @torch.no_grad()
    def warm_up(self, target: TargetState) -> None:
        """Run each kind of draft pass once, eagerly, so that no later step loads a kernel: passes that only store
        keys and values, first passes and later passes, with and without noise.

        target: a dummy step that the caller has staged in the target's buffers.
        """
        first, batch = self._adopt(target, Phase.WARMUP), target.batch
        self._passes.store_kv(Execution(None, first))
        for greedy in (True, False):
            self._passes.first(Execution(None, replace(first, greedy=greedy)))
            if self.num_speculative_tokens > 1:
                state = self.steps.build(batch, batch.num_actual_reqs, 1, Phase.WARMUP, greedy=greedy)
                if self._passes.refresh is not None:
                    self._passes.refresh(state.metadata)
                self._passes.chain(Execution(None, state))

    # --- graphs ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def capture(
        self,
        attn_states: CapturedStates[Any],
        *,
        keys: Iterable[BatchExecutionDescriptor] | None = None,
        keep_going: bool = False,
    ) -> None:
        """Capture the first draft pass over the target's captured states, and the later passes over their own states.

        attn_states: captured states that the target's `capture` returned; each state is a `TargetState`.
        keys: graph keys of the first pass; None means all that the target captured, () no first pass.
        keep_going: if a capture fails, continue with the next key instead of raising.

        Raises `NotCaptured` for a key that the target has not captured, `BorrowError` if draft passes cannot use the
        target's metadata, `CaptureError` if a capture fails, and `ValueError` if the speculator has no `graphs`.
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

    def stage_proposal(self, target: TargetState, num_drafts: int, phase: Phase = Phase.RUN) -> ProposalPasses:
        """Build metadata of all passes of a proposal after the step `target`; phase: RUN, or why it is a dummy step."""
        first, batch = self._borrow(target, phase=BuildPhase(phase.value)), target.batch
        if num_drafts < 2:
            return ProposalPasses(first, None)
        return ProposalPasses(first, self.steps.build(batch, batch.num_reqs, num_drafts - 1, phase))

    def fuzz_proposal(self, target: TargetState, seed: int) -> None:
        """Stage random draft inputs and caches after the step `target`; use it only in an engine without requests."""
        self._adopt(target, Phase.RUN, seed)

    def record_proposal(self, key: BatchExecutionDescriptor, passes: ProposalPasses, context: DraftContext) -> Tensor:
        """Propose drafts inside a graph, after a step in which all N rows (padded) decode with equal query lengths.

        Returns (N, K) int64 drafts, -1 where there is none; K is `num_speculative_tokens`. The host reads nothing
        between passes. A replay writes N rows of the buffers `self.inputs`. Call `self.inputs.note_rows(N)` after each
        replay, so that later eager steps clear the rows that they do not use.

        key: graph key of the step, with the number of drafts to propose, at most K, as its variant: `(num_drafts,)`.
        passes: result of `stage_proposal`.
        context: tensors of N rows, at fixed addresses or made by the same graph; `rows` of padding are
            `max_num_reqs`.
        """
        num_rows, num_drafts = context.batch.num_reqs, int(key.variant[0])
        self._stage(context, clears=False)
        room_N1 = self._room(num_rows, num_drafts)
        run = self._passes.first if num_drafts else self._passes.store_kv
        run(Execution(key, passes.first))
        if passes.chain is not None:
            self._passes.chain(Execution(key, passes.chain))
        return self.inputs.tokens[:num_rows].where(self._columns < room_N1, -1)

    # --- the first pass -------------------------------------------------------------------------------------

    def _run_first(self, context: DraftContext) -> None:
        manager, key = self.prefill, context.key
        if manager is not None and key is not None and key in manager.ready:
            manager.replay(key, self._borrow(context, manager.target_states.generation).staged(key))
            return
        run = self._passes.first if context.num_drafts else self._passes.store_kv
        run(Execution(None, self._borrow(context, greedy=context.greedy)))

    def _borrow(
        self, target: TargetState, now: int | None = None, phase: BuildPhase = BuildPhase.RUN, *, greedy: bool = False
    ) -> DraftState:
        """Return batch and metadata of a first pass: those of the target's step. For a target without attention the
        metadata is built.

        now: number of times that the target's buffers have been staged; None without a check that they are current.
        phase: why metadata is built, if it is. greedy: no request needs noise.

        Keys and values of rejected tokens are stored in the head's KV caches, too: attention requires that every
        position below `seq_lens` has been written. The causal mask hides rejected tokens from kept tokens, and the next
        token at their position overwrites them.
        """
        batch, metadata = target.batch, target.attention
        if metadata is None:
            self.draft_prefill_builds += 1
            metadata = self._builder.build(batch, self._cache.group, phase)
        else:
            require_borrow(metadata, batch, self._cache.group, now)
        return DraftState(batch, metadata, self._builder.signature, greedy)

    def _adopt(self, target: TargetState, phase: Phase, seed: int | None = None) -> DraftState:
        """Stage inputs of a first pass after the dummy step `target` (random with `seed`); return the pass's state."""
        self.steps.stage_dummy(target.batch, self._cache.group, seed=seed)
        return self._borrow(target, phase=BuildPhase(phase.value))

    # --- the chain ------------------------------------------------------------------------------------------

    def _run_chain(self, context: DraftContext) -> None:
        """Run the passes after the first one, in graphs or eagerly with the reason counted in `decisions`."""
        batch, num_drafts, refresh, key = context.batch, context.num_drafts, self._passes.refresh, None
        if self.decode is not None:
            ask = self.decode.ask(batch.num_actual_reqs, self._chain)
            decision = self._coordinator.coordinate(RankStep(ask, self.decode.ready)).decision_for(ask)
            self.decisions.count(decision)
            key = decision.descriptor
        padded_rows = batch.num_actual_reqs if key is None else key.num_tokens
        fused = key is not None and key.variant  # one graph of all passes, refreshes included
        for step in range(1, 2 if fused else num_drafts):
            if step == 1 or refresh is None:
                last = step if refresh is None else num_drafts - 1  # the pass for which the host bound must hold
                state = self.steps.build(batch, padded_rows, last, greedy=context.greedy)
            if refresh is not None and not fused:
                refresh(state.metadata)
            if key is None:
                self._passes.chain(Execution(None, state))
            else:
                assert self.decode is not None
                self.decode.replay(key, state.staged(key))
