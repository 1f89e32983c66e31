"""Runs recurrent layers without an engine, state policy FOLD (a saved state and a ring of later inputs).

Only the public planners and operators are used. An engine with persistent buffers or graphs calls them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bateleur.mamba.metadata import MambaMetadata
from bateleur.mamba.mixer import Mixer, MixerBatch
from bateleur.mamba.planners import FoldPlan, ReplayPlan, SlotPlan, plan_fold, plan_replay
from bateleur.mamba.prefill_chunks import PrefillChunker, PrefillChunks
from bateleur.mamba.recurrence import Tensors
from bateleur.mamba.request_states import RequestStates
from bateleur.mamba.spec import CacheLayout, PromptScan
from bateleur.mamba.state_pool import StatePool


def step_metadata(
    chunker: PrefillChunker, plan: SlotPlan | ReplayPlan, table: Tensor, request_row: Tensor, computed: Tensor,
    query_lens: Sequence[int], first: int,
) -> MambaMetadata:  # fmt: skip
    """Return the metadata of a step with `first` decode rows and then prefills.

    plan: result of `plan_step` or `plan_replay`. table, request_row: (R, columns) state slots, and (R,) rows of the
    `RequestStates`. computed, query_lens: tokens of each request before the step and in it.
    """
    starts, chunks = np.add.accumulate([0, *query_lens], dtype=np.int32), PrefillChunks.empty(table.device)
    if first < len(query_lens):
        before = computed[first:].int().cpu().numpy()
        chunks = chunker.split(starts[first:] - starts[first], before, table[first:])
    split = (first, int(starts[first]), len(query_lens) - first)
    loc, longest = torch.from_numpy(starts).to(table.device), max(query_lens[:first], default=1)
    return MambaMetadata(*split, plan, loc, chunks, chunker.chunk_size, longest, request_row)


class FoldCache:
    """States of several layers, state policy FOLD: saved states in slots, rings of later inputs, and `RequestStates`.

    The caller owns the block table. It has a row per request, and column c holds the slot of the state after at most
    (c + 1) * block_size tokens. When a request has passed the end of a block, the slot is only read, and other requests
    may have it in their rows, too.

    Args:
        layout: block-table layout of all layers, with the policy FOLD.
        mixers: the layers. Their `params` are copied; use the attribute `mixers` of the cache instead.
        num_slots: state slots, including the null slot 0.
        num_rows: rows for running requests (rings and conv windows), including the null row 0.
        chunk_size: maximum number of tokens of a prefill chunk.
        prompt_scan: kernels that scan prefills.

    Raises ValueError for a layout or a spec without FOLD, or a chunk size below 1.
    """

    def __init__(
        self, layout: CacheLayout, mixers: Sequence[Mixer], *, num_slots: int, num_rows: int, chunk_size: int,
        prompt_scan: PromptScan = PromptScan.OWN,
    ) -> None:  # fmt: skip
        specs = [mixer.spec for mixer in mixers]
        for spec in specs:
            spec.max_memory_usage_bytes(layout)  # checks policy and number of drafts
        device = mixers[0].conv_weight.device
        self.layout = layout
        self.chunker = PrefillChunker(layout, chunk_size, prompt_scan)
        self.pages = StatePool(specs, num_slots, device, num_rows=num_rows, ring_capacity=layout.ring_capacity)
        self.states = RequestStates(num_rows, device)
        self._params: list[Tensors] = []
        """By group of the pool: the parameters of its layers, (layers, *shape) each."""
        own = list(mixers)
        for group in self.pages.groups:
            by_name = zip(*(mixers[index].params for index in group), strict=True)
            stacks = tuple(torch.stack(layers) for layers in by_name)
            self._params.append(stacks)
            for at, index in enumerate(group):
                own[index] = replace(mixers[index], params=tuple(stack[at] for stack in stacks))
        self.mixers = tuple(own)
        self._new_rows: set[int] = set()
        """Rows whose request has run no step yet, so that their conv windows are those of an earlier request."""

    def admit(self, rows: Sequence[int], computed: Sequence[int] | int = 0) -> None:
        """Start requests in `rows`, with `computed` tokens each of a prefix-cache hit (0 for no hit).

        Raises ValueError for row 0, a row out of range, or a duplicate row.
        """
        self._check_rows(rows)
        self.states.admit(rows, computed)
        self._new_rows.update(rows)

    def step(
        self, table: Tensor, rows: Sequence[int], computed: Tensor, query_lens: Sequence[int], num_decodes: int = 0
    ) -> FoldStep:
        """Plan a step for all layers.

        Args:
            table: (R, columns) integer block table of the batch, state slots, 0 in columns without one.
            rows: row of each of the R requests in the cache, all different.
            computed: (R,) int64 tokens before the step, without rejected tokens.
            query_lens: R token counts of the step, at least 1 each.
            num_decodes: number of leading decode rows, with 1 to 1 + K tokens (K drafts, whose last ones may be
                rejected). The other rows are prefills of any length.

        Raises:
            ValueError: sizes differ; a decode has more than 1 + K tokens; a row is invalid; a row would exceed
                `max_model_len` (checked on a CPU only); `computed` of a prefill is not the number of tokens of its
                request; or a request in a prefill row has tokens in its ring from earlier decodes, and the table
                has no slot for the state after them.
        """
        if not len(rows) == len(query_lens) == len(table) or not 0 <= num_decodes <= len(rows):
            raise ValueError(
                f"rows, query_lens and table have {len(rows)}, {len(query_lens)} and {len(table)} rows, with "
                f"num_decodes = {num_decodes}; the first three must be equal, and num_decodes at most as large"
            )
        self._check_rows(rows)
        width = 1 + self.layout.num_speculative_tokens
        if min(query_lens) < 1 or max(query_lens[:num_decodes], default=1) > width:
            raise ValueError(
                f"query_lens is {list(query_lens)}; each must be at least 1, and in the first {num_decodes} rows at "
                f"most 1 + num_speculative_tokens = {width}"
            )
        after = computed + torch.tensor(list(query_lens), device=computed.device)
        if computed.is_cpu and int(after.max()) > self.layout.max_model_len:
            raise ValueError(
                f"computed + query_lens is {int(after.max())} in some row; it must be at most max_model_len = "
                f"{self.layout.max_model_len}"
            )
        if num_decodes < len(rows):
            prompts = torch.tensor(rows[num_decodes:], device=table.device)
            self._flush_rings(table[num_decodes:], prompts, computed[num_decodes:])
        request_row = torch.tensor(list(rows), device=table.device)
        carried, lens = self.states.gather(request_row), torch.tensor(list(query_lens), device=table.device)
        plan = plan_replay(self.layout, table, computed, lens, carried.base, carried.accepted)
        if new := [i for i, row in enumerate(rows[:num_decodes]) if row in self._new_rows]:
            at = torch.tensor(new, device=table.device)
            self.pages.admit(request_row[at], plan.slot[at])
        self._new_rows.difference_update(rows)
        meta = step_metadata(self.chunker, plan, table, request_row, computed, query_lens, num_decodes)
        return FoldStep(self, meta, computed)

    def _flush_rings(self, table: Tensor, rows: Tensor, computed: Tensor) -> None:
        """Add the ring (inputs of earlier decodes) of prefill rows to saved states, because a scan reads no ring."""
        carried, one = self.states.gather(rows), torch.ones_like(rows)
        plan = plan_replay(self.layout, table, computed, one, carried.base, carried.accepted)
        filled, size = plan.ring_len > 0, self.layout.block_size
        most = (computed % size).clamp(max=self.layout.ring_capacity - 1 - self.layout.num_speculative_tokens)
        impossible = (plan.ring_len < 0) | (plan.ring_len > most)
        if impossible.any():
            row = int(impossible.int().argmax())
            raise ValueError(
                f"computed is {int(computed[row])} in prefill row {row}; its request has {int(carried.base[row])} "
                f"tokens in its saved state, and at most {int(most[row])} can be in its ring: see `admit`"
            )
        without_slot = filled & (plan.fold_slot == 0)
        if without_slot.any():
            row = int(without_slot.int().argmax())
            n = int(computed[row])
            raise ValueError(
                f"table has no slot in column {n // size} of prefill row {row}, which continues after {n} tokens; the "
                f"tokens in its ring are folded into the state in that slot"
            )
        fold = FoldPlan(plan.fold_slot * filled, plan.ring_len, plan.conv_offset, computed, carried.accepted)
        self.fold(fold, plan, rows)
        self.states.scatter(rows, carried.accepted, base=computed)

    def fold(self, plan: FoldPlan, replay: ReplayPlan, rows: Tensor) -> None:
        """Add ring entries (later inputs) to saved states in all layers, as planned. rows: (R,) rows of requests."""
        self.pages.fold(plan, replay, rows, self._params)

    def _check_rows(self, rows: Sequence[int]) -> None:
        most = self.states.num_rows - 1
        if len(set(rows)) < len(rows) or not all(1 <= row <= most for row in rows):
            raise ValueError(f"rows is {list(rows)}; all must be different, and in [1, {most}]; row 0 is null")


class FoldStep:
    """One step of a `FoldCache`, made by `FoldCache.step`: call `mix` for each layer, then `commit` once."""

    def __init__(self, cache: FoldCache, meta: MambaMetadata, computed: Tensor) -> None:
        self._cache, self._meta, self._computed = cache, meta, computed
        self._batch = MixerBatch.of(meta)
        self._committed = False

    def mix(self, index: int, channels: Tensor, *gates: Tensor) -> Tensor:
        """Run convolution and recurrence of layer `index` over the tokens of all rows, one row after the other.

        channels (T, conv_dim), gates (T, *shape) each. Returns y (T, *output_shape).
        """
        pages = self._cache.pages
        layer = (self._batch, pages.layer(index), pages.rings(index))
        return self._cache.mixers[index].mix(channels, gates, *layer)

    def commit(self, accepted: Sequence[int] | Tensor) -> Tensor:
        """End the step: add ring entries (later inputs) to saved states if necessary, and update the `RequestStates`.

        accepted: (R,) accepted tokens of each decode, at least 1; ignored for prefills. Returns (R,) int64, the tokens
        of each request after the step. The state at each passed block boundary is in its state slot and may be added to
        the prefix cache.

        Raises ValueError for a second call.
        """
        if self._committed:
            raise ValueError("the step was committed before; a second commit would fold its tokens twice")
        self._committed = True
        cache, plan, rows = self._cache, self._meta.plan, self._meta.request_row
        assert isinstance(plan, ReplayPlan)
        assert rows is not None
        lens = self._meta.query_start_loc.diff()
        count = torch.as_tensor(accepted, device=lens.device)
        scanned = torch.arange(len(rows), device=lens.device) >= self._meta.num_decodes
        done = plan_fold(cache.layout, plan, self._computed, lens, count, scanned=scanned)
        cache.fold(done, plan, rows)
        cache.states.scatter(rows, done.accepted, base=done.base)
        return self._computed + torch.where(scanned, lens, done.accepted)
