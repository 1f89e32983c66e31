"""What differs between model kinds in a step: their KV groups, their builders, and the context layers see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.mamba import (
    CopyPlan,
    MambaCacheMode,
    MambaMetadata,
    MambaMetadataBuilder,
    ReplayPlan,
    RequestStates,
    StatePages,
    StatePolicy,
)
from bateleur.metadata import (
    AttentionBackend,
    BuildPhase,
    CommonAttentionMetadata,
    GraphSupport,
    KVGroup,
    Signature,
    check_reads,
)
from bateleur.runner.cache.tensors import Caches
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.device import upload
from bateleur.runner.models import HybridDecoder, StepContext
from bateleur.runner.models.spec import MambaLayer, ModelSpec


class DefaultModelState:
    """A model with attention layers only: one KV group."""

    def __init__(
        self, spec: ModelSpec, caches: Caches, backend: AttentionBackend, limits: EngineLimits
    ) -> None:
        max_model_len = limits.max_model_len
        self.caches = caches
        self.backend = backend
        self.vocab_size = spec.vocab_size
        self.max_model_len = max_model_len
        self._attention = backend.builder() if caches.kv else None
        if self._attention:
            check_reads(self._attention)
        plan = caches.plan
        ahead = limits.num_speculative_tokens  # a drafter stores keys of the tokens that it proposes
        kv_group = KVGroup(plan.block_size, plan.max_blocks, lookahead_tokens=ahead) if caches.kv else None
        self.groups: tuple[KVGroup, ...] = () if kv_group is None else (kv_group,)

    @property
    def seq_len_fill(self) -> int:
        """What padded rows of `seq_lens` hold, as the group's builder declares it."""
        return self._attention.seq_len_fill if self._attention else 0

    @property
    def graph_support(self) -> GraphSupport:
        """Which batches can be captured: what all builders support."""
        return self._attention.graph_support if self._attention else GraphSupport.ALWAYS

    def block_tables(
        self, kv_blocks: NDArray[np.int32], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], ...]:
        """The table of each group for rows of the request table, in the order of `groups`.

        kv_blocks: (R, max_blocks) KV blocks of these rows.
        """
        return (kv_blocks,) if self._attention else ()

    def random_tables(
        self,
        kv_blocks: NDArray[np.int32],
        computed: NDArray[np.int64],
        after: NDArray[np.int64],
        rng: np.random.Generator,
    ) -> tuple[NDArray[np.int32], ...]:
        """As `block_tables`, for invented rows that go from `computed` to `after` tokens."""
        return self.block_tables(kv_blocks, np.arange(len(computed)))

    def max_seq_len(self, phase: BuildPhase) -> int | None:
        """None for a real step: the batch's own bound. For a capture, and its warm-up, which loads the kernels that the
        capture launches, that of the longest request, so that any replay is covered.
        """
        return None if phase is BuildPhase.RUN else self.max_model_len

    def prepare(self, batch: CommonAttentionMetadata, phase: BuildPhase = BuildPhase.RUN) -> StepContext:
        """Build each group's metadata; the batch itself is not written to."""
        attention = self._attention.build(batch, 0, phase) if self._attention else None
        mamba = self._build_mamba(batch, phase)
        return StepContext.of(
            batch, self.backend, attention, mamba, self.caches.kv, self.caches.states, self.caches.rings
        )

    def admit(self, rows: NDArray[np.int64], computed: NDArray[np.int32]) -> None:
        """Requests begin in these rows of the request table, with so many tokens found in the caches."""

    def commit(self, context: StepContext, num_valid: Tensor | None) -> None:
        """End a step: of the tokens of its rows, `num_valid` (R,) int64 on the device stay; None means all."""

    def signature(self, context: StepContext) -> Signature:
        """The host scalars of a step that a graph bakes."""
        parts = {}
        if self._attention and context.attention is not None:
            parts["attention"] = self._attention.signature(context.attention)
        return Signature.join(**parts)

    def addresses(self) -> Mapping[str, int]:
        """Data pointers of the builders' buffers and the caches, by name."""
        book = {} if self._attention is None else _prefixed("attention", self._attention.addresses())
        for kind, layers in (("kv", self.caches.kv), ("states", self.caches.states)):
            for i, pair in enumerate(layers):
                book |= {f"{kind}.{i}.{j}": tensor.data_ptr() for j, tensor in enumerate(pair)}
        return book

    def _build_mamba(self, batch: CommonAttentionMetadata, phase: BuildPhase) -> MambaMetadata | None:
        return None


class MambaHybridModelState(DefaultModelState):
    """A model with Mamba layers, and attention layers or none: the Mamba group comes last, with that of its rows.

    In cache mode `none` the state slots of a row are its own for ever, so there is nothing to allocate: row r owns
    slots 1 + r * n .. (r + 1) * n, where n is the number of slots per request. In the others it is `StatePages`. What
    requests carry from step to step lies in row 1 + r of `RequestStates` and rings.
    """

    def __init__(
        self,
        spec: ModelSpec,
        caches: Caches,
        backend: AttentionBackend,
        limits: EngineLimits,
        pages: StatePages | None,
        decays: Sequence[Tensor],
    ) -> None:
        """decays: A (layers, H) float32 of the Mamba layers of each shape, as `StatePool.fold` takes it."""
        super().__init__(spec, caches, backend, limits)
        layout = caches.plan.layout
        assert layout is not None
        assert caches.pool is not None
        columns, num_rows = layout.columns(), limits.max_num_seqs
        own = 1 + np.arange(num_rows * columns, dtype=np.int32).reshape(num_rows, columns)
        self.state_table: NDArray[np.int32] = own if pages is None else pages.table
        """(rows of the request table, columns) state slots."""
        chunk = min(layer.chunk_size for layer in spec.layers if isinstance(layer, MambaLayer))
        device = caches.pool.layer(0)[0].device
        travels = layout.policy is StatePolicy.FOLD or layout.num_speculative_tokens > 0
        self._states = RequestStates(1 + num_rows, device) if travels else None
        self._pool, self._decays = caches.pool, decays
        self._num_valid = torch.ones(num_rows, dtype=torch.int64, device=device)
        self._mamba = MambaMetadataBuilder(layout, chunk, num_rows, device, self._states)
        check_reads(self._mamba)
        self._mamba_group = len(self.groups)
        widths = (columns, 1) if travels else (columns,)
        own_groups = [KVGroup(layout.block_size, width, has_slots=False) for width in widths]
        self.groups = (*self.groups, *own_groups)

    @property
    def graph_support(self) -> GraphSupport:
        """Which batches can be captured: what all builders support."""
        return min(super().graph_support, self._mamba.graph_support)

    def block_tables(
        self, kv_blocks: NDArray[np.int32], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], ...]:
        """The KV blocks of the rows, their state slots, and where they carry something, the rows of that."""
        return (*super().block_tables(kv_blocks, rows), *self._state_tables(self.state_table[rows], rows))

    def _state_tables(
        self, slots: NDArray[np.int32], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], ...]:
        if self._states is None:
            return (slots,)
        return (slots, (1 + rows).astype(np.int32)[:, None])

    def random_tables(
        self,
        kv_blocks: NDArray[np.int32],
        computed: NDArray[np.int64],
        after: NDArray[np.int64],
        rng: np.random.Generator,
    ) -> tuple[NDArray[np.int32], ...]:
        """As `block_tables`, for invented rows: with pages where their states before and after the step would lie."""
        layout, num_reqs = self._mamba.layout, len(computed)
        rows = np.arange(num_reqs)
        base = computed
        if layout.policy is StatePolicy.FOLD:  # some tokens are in the ring, and not in the checkpoint
            longest = layout.ring_capacity - 1 - layout.num_speculative_tokens
            base = computed - rng.integers(0, np.minimum(computed, longest) + 1)
        if self._states is not None:
            self._states.admit(torch.from_numpy(1 + rows), torch.from_numpy(base))
        if layout.mode is MambaCacheMode.NONE:
            return self.block_tables(kv_blocks, rows)
        most = 1 + layout.num_speculative_blocks
        taken = rng.permutation(self.caches.plan.num_state_slots - 1)[: (1 + most) * num_reqs]
        pages = (1 + taken).astype(np.int32).reshape(1 + most, num_reqs)
        table = np.zeros((num_reqs, layout.columns()), np.int32)
        for behind in range(most):
            table[rows, (after - 1) // layout.block_size + behind] = pages[behind]
        table[rows, np.maximum(base - 1, 0) // layout.block_size] = pages[most]
        return (*super().block_tables(kv_blocks, rows), *self._state_tables(table, rows))

    def admit(self, rows: NDArray[np.int64], computed: NDArray[np.int32]) -> None:
        """Requests begin in these rows: whatever the requests before them carried is gone."""
        if self._states is None:
            return
        device = self._num_valid.device
        own = upload(1 + rows, device)
        self._states.admit(own, upload(computed.astype(np.int64), device))
        if computed.any():
            columns = np.maximum(computed - 1, 0) // self._mamba.layout.block_size
            slots = np.where(computed > 0, self.state_table[rows, columns], 0).astype(np.int64)
            self._pool.admit(own, upload(slots, device))

    def commit(self, context: StepContext, num_valid: Tensor | None) -> None:
        """End a step: rejected drafts leave nothing in a state, and boundaries get theirs."""
        assert context.mamba is not None
        if num_valid is not None:
            self._num_valid[: len(num_valid)].copy_(num_valid)
        accepted = self._num_valid[: context.batch.num_reqs]
        plan = self._mamba.commit(context.mamba, context.batch, self._mamba_group, accepted)
        if isinstance(plan, CopyPlan):
            self._pool.copy(plan)
        elif plan is not None:
            replay, request_row = context.mamba.plan, context.mamba.request_row
            assert isinstance(replay, ReplayPlan)
            assert request_row is not None
            self._pool.fold(plan, replay, request_row, self._decays)

    def signature(self, context: StepContext) -> Signature:
        """The host scalars of a step that a graph bakes."""
        assert context.mamba is not None
        return Signature(
            super().signature(context).items
            + Signature.join(mamba=self._mamba.signature(context.mamba)).items
        )

    def addresses(self) -> Mapping[str, int]:
        """Data pointers of the builders' buffers and the caches, by name."""
        book = {**super().addresses(), **_prefixed("mamba", self._mamba.addresses())}
        for i, rings in enumerate(self.caches.rings):
            if rings is not None:
                tensors = {name: tensor.data_ptr() for name, tensor in rings._asdict().items()}
                book |= _prefixed(f"rings.{i}", tensors)
        return book

    def _build_mamba(self, batch: CommonAttentionMetadata, phase: BuildPhase) -> MambaMetadata | None:
        return self._mamba.build(batch, self._mamba_group, phase)


def _prefixed(owner: str, book: Mapping[str, int]) -> dict[str, int]:
    return {f"{owner}.{name}": address for name, address in book.items()}


def model_state_for(
    model: HybridDecoder,
    caches: Caches,
    backend: AttentionBackend,
    limits: EngineLimits,
    pages: StatePages | None,
) -> DefaultModelState:
    """The state that fits the model: hybrid if it has any Mamba layer."""
    if not caches.states:
        return DefaultModelState(model.spec, caches, backend, limits)
    return MambaHybridModelState(model.spec, caches, backend, limits, pages, model.decays)
