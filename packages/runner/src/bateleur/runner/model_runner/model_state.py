"""The parts of a step that depend on the layer types: KV cache groups, metadata builders, recurrent states."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode, ReplayChecks, StagedBatch
from bateleur.mamba import (
    CopyPlan,
    MambaCacheMode,
    MambaMetadata,
    MambaMetadataBuilder,
    PromptScan,
    ReplayPlan,
    RequestStates,
    StatePolicy,
)
from bateleur.metadata import (
    AttentionBackend,
    BlockTable,
    BuildPhase,
    CommonAttentionMetadata,
    GraphSupport,
    KVCacheGroup,
    Signature,
    check_reads,
    validate,
)
from bateleur.runner.cache.tensors import Caches
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.lora.adapter_manager import AdapterPool
from bateleur.runner.models import HybridDecoder, StepContext
from bateleur.runner.utils.arrays import Int32s, Int64s
from bateleur.runner.utils.device import upload

StagedStep = StagedBatch[StepContext]


class _Built(NamedTuple):
    """Metadata of the recurrent layers, stored to be reused by the next steps.
    batch_id: identity of the batch, see `StepRows`. padded: numbers of requests and tokens of the batch with padding;
    data-parallel ranks pad to a common size, so the numbers can change while the batch stays the same. written: counts
    of clears and writes of the block table when the metadata was built. longest: the metadata is valid while no request
    is longer than this many tokens. repeats: whether the current step reuses the metadata.
    """

    batch_id: object
    padded: tuple[int, int]
    written: tuple[int, int]
    longest: int
    metadata: MambaMetadata
    repeats: bool = False


class ModelState:
    """The KV cache groups of a model with their metadata builders: attention layers first, then recurrent layers.
    In cache mode `none`, row r of the request table (N rows) always owns the state slots 1 + r, 1 + r + N, ...; in
    other modes `MambaStateManager` allocates them. `RequestStates` and the ring buffers of recent inputs have the
    request's data at index 1 + r.
    """

    def __init__(
        self,
        model: HybridDecoder,
        caches: Caches,
        backend: AttentionBackend,
        limits: EngineLimits,
        prompt_scan: PromptScan = PromptScan.OWN,
        checks: ReplayChecks = ReplayChecks.CHEAP,
        adapters: AdapterPool | None = None,
    ) -> None:
        """prompt_scan: kernel that runs recurrent layers over prompts. checks: from CHEAP on, a step for a FULL graph
        carries the numbers that the host gives to kernels (`Signature`), and a replay compares them with the captured
        ones. At PARANOID every batch is validated, without waiting for the device.
        """
        self._checks, self.adapters, self.limits, self.device = checks, adapters, limits.buffers, model.device
        self.caches = caches
        self.backend = backend
        self.vocab_size = model.spec.vocab_size
        self.groups: tuple[KVCacheGroup, ...] = ()
        """In the order of the block tables of a step."""
        self.seq_len_fill = 0
        """Value of padded rows of `seq_lens`, which the attention builder declares."""
        self._attention = backend.builder() if caches.kv else None
        if self._attention is not None:
            check_reads(self._attention)
            self.seq_len_fill = self._attention.seq_len_fill
            plan = caches.plan
            lookahead = limits.num_speculative_tokens  # a drafter stores keys of the tokens that it proposes
            self.groups = (KVCacheGroup(plan.block_size, plan.max_blocks, lookahead_tokens=lookahead),)
        self._mamba: MambaMetadataBuilder | None = None
        self._states: RequestStates | None = None
        self._last: _Built | None = None
        """Metadata of the last step, if its batch can repeat."""
        if caches.pool is not None:
            self._init_mamba(model, limits.max_num_seqs, prompt_scan)

    def _init_mamba(self, model: HybridDecoder, num_rows: int, scan: PromptScan) -> None:
        pages, layout = self.caches.pages, self.caches.plan.layout
        assert layout is not None
        columns = layout.columns()
        # States of neighbouring rows are neighbours in each column, for steps without drafts.
        own = 1 + np.arange(num_rows * columns, dtype=np.int32).reshape(columns, num_rows).T.copy()
        self._state_blocks = BlockTable(own) if pages is None else pages.blocks
        self.state_table: Int32s = self._state_blocks.ids
        """(rows of the request table, columns) state slots."""
        chunk = min(layer.chunk_size for layer in model.spec.recurrent)
        widths = [columns]
        if layout.policy is StatePolicy.FOLD or layout.num_speculative_tokens > 0:
            self._states = RequestStates(1 + num_rows, model.device)
            widths.append(1)
        self._num_valid = torch.ones(num_rows, dtype=torch.int64, device=model.device)
        self._parameters = model.recurrence_parameters
        self._mamba = MambaMetadataBuilder(layout, chunk, num_rows, model.device, self._states, prompt_scan=scan)
        check_reads(self._mamba)
        self._mamba_group = len(self.groups)
        own_groups = [KVCacheGroup(layout.block_size, width, has_slots=False) for width in widths]
        self.groups = (*self.groups, *own_groups)

    @property
    def graph_support(self) -> GraphSupport:
        """The batches that all metadata builders can capture."""
        builders = (self._attention, self._mamba)
        return min((each.graph_support for each in builders if each), default=GraphSupport.ALWAYS)

    def tables(self, kv_blocks: BlockTable) -> list[BlockTable]:
        """Return the block table of each KV cache group; its rows are those of the request table."""
        tables = [kv_blocks] if self._attention else []
        if self._mamba is not None:
            tables.append(self._state_blocks)
        if self._states is not None:
            tables.append(BlockTable(np.arange(1, 1 + len(self.state_table), dtype=np.int32)[:, None]))
        return tables

    def random_tables(
        self, kv_blocks: Int32s, computed: Int64s, after: Int64s, rng: np.random.Generator
    ) -> tuple[Int32s, ...]:
        """Return a block table (R, columns) per KV cache group, for R random requests that go from `computed` to
        `after` tokens: `kv_blocks` for attention, and random blocks for the states before and after the step.
        """
        tables = (kv_blocks,) if self._attention else ()
        if self._mamba is None:
            return tables
        layout, num_reqs = self._mamba.layout, len(computed)
        rows, base = np.arange(num_reqs), computed
        if layout.policy is StatePolicy.FOLD:  # some tokens are in the ring, and not in the checkpoint
            longest = layout.ring_capacity - 1 - layout.num_speculative_tokens
            base = computed - rng.integers(0, np.minimum(computed, longest) + 1)
        if self._states is not None:
            self._states.admit(torch.from_numpy(1 + rows), torch.from_numpy(base))
        own = () if self._states is None else ((1 + rows).astype(np.int32)[:, None],)
        if layout.mode is MambaCacheMode.NONE:
            return (*tables, self.state_table[rows], *own)
        used = np.zeros((num_reqs, layout.columns()), np.bool_)
        used[rows, np.maximum(base - 1, 0) // layout.block_size] = True
        for behind in range(1 + layout.num_speculative_blocks):
            used[rows, (after - 1) // layout.block_size + behind] = True
        table = np.zeros(used.shape, np.int32)
        table[used] = 1 + rng.permutation(self.caches.plan.num_state_slots - 1)[: np.count_nonzero(used)]
        return (*tables, table, *own)

    def prepare(
        self,
        batch: CommonAttentionMetadata,
        key: BatchExecutionDescriptor | None,
        phase: BuildPhase = BuildPhase.RUN,
        batch_id: object = None,
        adapter_slots: Int32s | None = None,
    ) -> StagedStep:
        """Build the metadata of each KV cache group for the staged `batch`. Replays accept only the latest result.
        key: graph of the batch; None if it runs eagerly. phase: whether the metadata is for a step, a warm-up or a
        capture. batch_id: `StepRows.batch_id`; a later step with the same object may reuse metadata of this one. None:
        no later step does. adapter_slots: LoRA slots of the batch's tokens without padding; None for no adapter.
        """
        if self._checks >= ReplayChecks.PARANOID:
            level: Literal["host", "device"] = "device" if self.device.type == "cpu" else "host"
            validate(batch, self.limits, self.groups, level=level, seq_len_fill=self.seq_len_fill)
        adapters = None if self.adapters is None else self.adapters.stage(batch.num_tokens, adapter_slots)
        attention = None if self._attention is None else self._attention.build(batch, 0, phase)
        mamba = None if self._mamba is None else self._recurrent(self._mamba, batch, phase, batch_id)
        mode = CudaGraphMode.NONE if key is None else key.mode
        if mode is CudaGraphMode.PIECEWISE and self._mamba is not None and mamba is not None:
            mamba = self._mamba.with_piecewise_decodes(mamba, batch)
        kv, states, rings = self.caches.kv, self.caches.states, self.caches.rings
        context = StepContext(batch, self.backend, attention, mamba, kv, states, rings, adapters)
        # Only FULL graphs freeze host scalars; the eager parts of a PIECEWISE graph get this context.
        signed = self._checks >= ReplayChecks.CHEAP and mode is CudaGraphMode.FULL
        return StagedBatch(key, context, batch.generation, self._signature(context) if signed else None)

    def _recurrent(
        self, builder: MambaMetadataBuilder, batch: CommonAttentionMetadata, phase: BuildPhase, batch_id: object
    ) -> MambaMetadata:
        """Return the metadata of the recurrent layers: the last step's if it is still valid, else new metadata."""
        table = self._state_blocks
        padded, written = (batch.num_reqs, batch.num_tokens), (table.num_clears, table.num_writes)
        last, self._last = self._last, None
        if last is not None and last.batch_id is not batch_id:
            last = None  # the last step was of another batch
        fits = last is not None and (last.padded, last.written) == (padded, written)
        if last is not None and fits and batch.max_seq_len <= last.longest:
            self._last = last._replace(repeats=True)
            return last.metadata
        metadata = builder.build(batch, self._mamba_group, phase)
        if batch_id is not None:
            lasts = builder.num_repeatable_steps(metadata, batch, settled=last is not None)
            self._last = _Built(batch_id, padded, written, batch.max_seq_len + lasts, metadata)
        return metadata

    def admit(self, rows: Int64s, computed: Int32s) -> None:
        """Reset the recurrent states of new requests' table rows. computed: tokens of each prefix cache hit, or 0."""
        if self._states is None or self._mamba is None or self.caches.pool is None:
            return
        self._states.admit(1 + rows, computed)
        if computed.any():
            device = self._num_valid.device
            own = upload(1 + rows, device)
            columns = np.maximum(computed - 1, 0) // self._mamba.layout.block_size
            slots = np.where(computed > 0, self.state_table[rows, columns], 0).astype(np.int64)
            self.caches.pool.admit(own, upload(slots, device))

    def commit(self, context: StepContext, num_valid: Tensor | None, *, captured: bool = False) -> None:
        """Commit the recurrent states of a step, without rejected drafts, and store states at block boundaries.
        num_valid: (R,) int64 on the device, number of tokens of each request that stay; None for all. captured: whether
        a CUDA graph captures this call; only allowed for steps in which all requests decode.
        """
        if self._mamba is None or self.caches.pool is None:
            return
        assert context.mamba is not None
        last = self._last
        if not captured and last is not None and last.repeats and last.metadata.plan is context.mamba.plan:
            return  # one token a request, as in the step before: what requests carry stays
        accepted = num_valid
        if accepted is None or accepted.shape[0] < context.batch.num_reqs or captured:
            accepted = self._num_valid[: context.batch.num_reqs]
            if num_valid is not None:
                accepted[: len(num_valid)].copy_(num_valid)
        plan = self._mamba.commit(context.mamba, context.batch, self._mamba_group, accepted, captured=captured)
        if isinstance(plan, CopyPlan):
            self.caches.pool.copy(plan)
        elif plan is not None:
            replay, request_row = context.mamba.plan, context.mamba.request_row
            assert isinstance(replay, ReplayPlan)
            assert request_row is not None
            self.caches.pool.fold(plan, replay, request_row, self._parameters)

    def carried(self) -> dict[str, Tensor]:
        """Return the device tensor of `RequestStates`, by name, so that checks can compare it; {} if there is none."""
        return {} if self._states is None else {"carried": self._states.values}

    def _signature(self, context: StepContext) -> Signature:
        parts = {}
        if self._attention is not None and context.attention is not None:
            parts["attention"] = self._attention.signature(context.attention)
        if self._mamba is not None and context.mamba is not None:
            parts["mamba"] = self._mamba.signature(context.mamba)
        return Signature.join(**parts)

    def addresses(self) -> Mapping[str, int]:
        """Data pointers of the builders' buffers and of the caches, by name."""
        found: dict[str, int] = {}
        for owner, builder in (("attention", self._attention), ("mamba", self._mamba)):
            if builder is not None:
                found |= {f"{owner}.{name}": address for name, address in builder.addresses().items()}
        return found | {name: tensor.data_ptr() for name, tensor in self.caches.named().items()}


class RowLengths:
    """Computed tokens of each running request, by row of the request table. Lengths are found by table row, never by
    position in a batch, because that position changes between steps (vLLM #53919).
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        # The last entry is for padding.
        self._computed_M = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)

    @property
    def computed(self) -> Tensor:
        """Current lengths of all table rows, (M,) int32 on the device."""
        return self._computed_M[:-1]

    def admit(self, rows: Int64s, computed: Int32s) -> None:
        """Set the lengths of table rows (R,) that requests just got."""
        device = self._computed_M.device
        self._computed_M.index_copy_(0, upload(rows, device), upload(computed, device))

    def of(self, rows: Tensor) -> Tensor:
        """Return the lengths (R,) int32 of these table rows (R,) int64 before the next step, on the device."""
        return self._computed_M.index_select(0, rows)

    def advance(self, rows: Tensor, batch: CommonAttentionMetadata, num_valid: Tensor) -> None:
        """Set the lengths of table rows `rows` (R,) int64 after the step of `batch`: tokens computed before it, plus
        its tokens that stay, `num_valid` (R,) int64. Can be captured. In `rows`, padding has the number `max_rows`.
        """
        reach_R = batch.num_computed_tokens[: len(rows)] + num_valid
        self._computed_M.index_copy_(0, rows, reach_R.int())
