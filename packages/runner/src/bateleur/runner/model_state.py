"""What differs between model kinds in a step: their KV groups, their builders, and the context layers see."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bateleur.mamba import MambaMetadataBuilder
from bateleur.metadata import AttentionBackend, CommonAttentionMetadata, KVGroup, Phase
from bateleur.runner.caches import Caches
from bateleur.runner.models import StepContext
from bateleur.runner.spec import MambaLayer, ModelSpec
from bateleur.runner.table import RequestTable


class DefaultModelState:
    """A model with attention layers only: one KV group."""

    def __init__(
        self, spec: ModelSpec, caches: Caches, backend: AttentionBackend, max_model_len: int
    ) -> None:
        self.caches = caches
        self.backend = backend
        self.max_model_len = max_model_len
        self._attention = backend.builder() if caches.kv else None
        plan = caches.plan
        self.groups: tuple[KVGroup, ...] = (KVGroup(plan.block_size, plan.max_blocks),) if caches.kv else ()

    @property
    def seq_len_fill(self) -> int:
        """What padded rows of `seq_lens` hold, as the group's builder declares it."""
        return self._attention.seq_len_fill if self._attention else 0

    def block_tables(self, table: RequestTable, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], ...]:
        """The block table of each group for the given rows, in the order of `groups`."""
        return (table.block_table[rows],) if self._attention else ()

    def max_seq_len(self, phase: Phase) -> int | None:
        """None: the batch's own bound. Under capture the longest request, so that any replay is covered."""
        return self.max_model_len if phase is Phase.CAPTURE else None

    def prepare(self, batch: CommonAttentionMetadata, phase: Phase = Phase.RUN) -> StepContext:
        """Build each group's metadata; the batch itself is not written to."""
        attention = self._attention.build(batch, 0, phase) if self._attention else None
        return StepContext(self.backend, attention, None, self.caches.kv, ())


class MambaHybridModelState(DefaultModelState):
    """A model with Mamba layers, and attention layers or none: the Mamba group comes last.

    In cache mode `none` the state slots of a row are its own for ever, so there is nothing to allocate: row r owns
    slots 1 + r * n .. (r + 1) * n, where n is the number of slots per request.
    """

    def __init__(
        self, spec: ModelSpec, caches: Caches, backend: AttentionBackend, max_model_len: int
    ) -> None:
        super().__init__(spec, caches, backend, max_model_len)
        layout = caches.plan.layout
        assert layout is not None
        assert caches.pool is not None
        columns = layout.slots_per_request()
        num_rows = (caches.plan.num_state_slots - 1) // columns
        self._slots = 1 + np.arange(num_rows * columns, dtype=np.int32).reshape(num_rows, columns)
        chunk = min(layer.chunk_size for layer in spec.layers if isinstance(layer, MambaLayer))
        device = caches.pool.layer(0)[0].device
        self._mamba = MambaMetadataBuilder(layout, chunk, device)
        self._mamba_group = len(self.groups)
        self.groups = (*self.groups, KVGroup(layout.block_size, columns, has_slots=False))

    def block_tables(self, table: RequestTable, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], ...]:
        """The KV blocks of the rows, then their state slots."""
        return (*super().block_tables(table, rows), self._slots[rows])

    def prepare(self, batch: CommonAttentionMetadata, phase: Phase = Phase.RUN) -> StepContext:
        """Build the metadata of both groups."""
        attention = self._attention.build(batch, 0, phase) if self._attention else None
        mamba = self._mamba.build(batch, self._mamba_group, phase)
        return StepContext(self.backend, attention, mamba, self.caches.kv, self.caches.states)


def model_state_for(
    spec: ModelSpec, caches: Caches, backend: AttentionBackend, max_model_len: int
) -> DefaultModelState:
    """The state that fits the model: hybrid if it has any Mamba layer."""
    kind = MambaHybridModelState if caches.states else DefaultModelState
    return kind(spec, caches, backend, max_model_len)
