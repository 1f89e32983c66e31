"""Recurrent layers without an engine: their states under FOLD, and steps of mixed batches over them.

Everything here is a composition of the public planners and operators; an engine that stages batches into fixed
buffers, or captures graphs, calls those itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bateleur.mamba.mixer import Mixer, MixerRows
from bateleur.mamba.planners import FoldPlan, ReplayPlan, plan_fold, plan_replay
from bateleur.mamba.prompts import PromptCutter, Prompts
from bateleur.mamba.recurrence import Tensors
from bateleur.mamba.request_states import RequestStates
from bateleur.mamba.spec import CacheLayout, PromptScan
from bateleur.mamba.state_pool import StatePool
from bateleur.mamba.step_metadata import MambaMetadata


class FoldCache:
    """The states of some recurrent layers under FOLD: pages, rings of running requests, and what they carry along.

    Which page holds which state is the caller's: a block table with a row for each request, column c for the state
    after at most (c + 1) * block_size tokens. A page is full, and may stand in another request's row as well, when the
    request whose page it is has passed the end of its block; it is only read from then on.

    Args:
        layout: of all layers.
        mixers: the layers. Their `params` are copied; `mixers` of the cache are those that count.
        num_slots: pages, of which page 0 is null.
        num_rows: running requests, and one: row 0 is null.
        chunk_size: tokens of a scan chunk at most.
        prompt_scan: which kernels scan prompts.

    Raises ValueError for a layout or a spec that is not FOLD's, or a chunk size below 1.
    """

    def __init__(
        self,
        layout: CacheLayout,
        mixers: Sequence[Mixer],
        *,
        num_slots: int,
        num_rows: int,
        chunk_size: int,
        prompt_scan: PromptScan = PromptScan.OWN,
    ) -> None:
        specs = [mixer.spec for mixer in mixers]
        for spec in specs:
            spec.max_memory_usage_bytes(layout)  # of the same policy and number of drafts
        device = mixers[0].conv_weight.device
        self.layout = layout
        self.cutter = PromptCutter(layout, chunk_size, num_rows, prompt_scan)
        self.pages = StatePool(
            specs, num_slots, device, num_rows=num_rows, ring_capacity=layout.ring_capacity
        )
        self.states = RequestStates(num_rows, device)
        self._params: list[Tensors] = []
        """(layers, *shape) each, of a group of the pool."""
        own = list(mixers)
        for group in self.pages.groups:
            by_name = zip(*(mixers[index].params for index in group), strict=True)
            stacks = tuple(torch.stack(layers) for layers in by_name)
            self._params.append(stacks)
            for at, index in enumerate(group):
                own[index] = replace(mixers[index], params=tuple(stack[at] for stack in stacks))
        self.mixers = tuple(own)

    def admit(self, rows: Sequence[int], computed: Sequence[int] | int = 0) -> None:
        """Requests begin in `rows`, with `computed` tokens each whose state lies in a page of another request.

        Raises ValueError for row 0, a row that is not there, or one that is named twice.
        """
        self._check_rows(rows)
        self.states.admit(rows, computed)

    def step(
        self,
        table: Tensor,
        rows: Sequence[int],
        computed: Tensor,
        query_lens: Sequence[int],
        num_decodes: int = 0,
    ) -> FoldStep:
        """Plan a step for all layers.

        Args:
            table: (R, columns) integer block table of the batch, 0 where there is no page.
            rows: R request rows, all different.
            computed: (R,) int64 tokens before the step, accepted ones only.
            query_lens: R token counts of the step, at least 1 each.
            num_decodes: leading rows that continue by 1 to 1 + K tokens of which a suffix may be rejected; the others
                are parts of prompts, of any length.

        Raises:
            ValueError: the counts or the rows do not fit, a decode has more tokens than could be rejected, a row would
                be longer than the layout allows (on a CPU), or a prompt goes on elsewhere than where its request is, or
                after decodes without a page in the column of its next token, for what is in its ring.
        """
        if not len(rows) == len(query_lens) == len(table) or not 0 <= num_decodes <= len(rows):
            raise ValueError(
                f"rows, query_lens and table are {len(rows)}, {len(query_lens)} and {len(table)} with num_decodes = "
                f"{num_decodes}; the first three must be equal, and the last at most as large"
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
            self._empty_rings(table[num_decodes:], prompts, computed[num_decodes:])
        return FoldStep(self, self._metadata(table, rows, computed, query_lens, num_decodes), computed)

    def _metadata(
        self, table: Tensor, rows: Sequence[int], computed: Tensor, query_lens: Sequence[int], first: int
    ) -> MambaMetadata:
        """Of a step whose prompts are the rows from `first` on."""
        device, starts = table.device, np.add.accumulate([0, *query_lens], dtype=np.int32)
        request_row, loc = torch.tensor(list(rows), device=device), torch.from_numpy(starts).to(device)
        kept = self.states.gather(request_row)
        plan = plan_replay(self.layout, table, computed, loc.diff(), kept.base, kept.accepted)
        prompts = Prompts.none(device)
        if first < len(rows):
            before = computed[first:].int().cpu().numpy()
            prompts = self.cutter.cut(starts[first:] - starts[first], before, table[first:])
        split = (first, int(starts[first]), len(rows) - first)
        longest = max(query_lens[:first], default=1)
        return MambaMetadata(*split, plan, loc, prompts, self.cutter.chunk_size, longest, request_row)

    def _empty_rings(self, table: Tensor, rows: Tensor, computed: Tensor) -> None:
        """Fold what decodes left in the rings of these rows, whose prompts go on: a scan reads a checkpoint alone."""
        kept, one = self.states.gather(rows), torch.ones_like(rows)
        plan = plan_replay(self.layout, table, computed, one, kept.base, kept.accepted)
        held, size = plan.ring_len > 0, self.layout.block_size
        most = (computed % size).clamp(max=self.layout.ring_capacity - 1 - self.layout.num_speculative_tokens)
        unlike = (plan.ring_len < 0) | (plan.ring_len > most)
        if unlike.any():
            row = int(unlike.int().argmax())
            raise ValueError(
                f"computed is {int(computed[row])} in prompt row {row}; of its request {int(kept.base[row])} tokens "
                f"are in a page, and at most {int(most[row])} can be in its ring: see `admit`"
            )
        homeless = held & (plan.fold_slot == 0)
        if homeless.any():
            row = int(homeless.int().argmax())
            n = int(computed[row])
            raise ValueError(
                f"table has no page in column {n // size} of prompt row {row}, which goes on after {n} tokens, the "
                f"last of them decodes; what is in its ring needs one"
            )
        fold = FoldPlan(plan.fold_slot * held, plan.ring_len, plan.conv_offset, computed, kept.accepted)
        self.fold(fold, plan, rows)
        self.states.scatter(rows, kept.accepted, base=computed)

    def fold(self, plan: FoldPlan, replay: ReplayPlan, rows: Tensor) -> None:
        """What a plan says, in all layers: see `StatePool.fold`."""
        self.pages.fold(plan, replay, rows, self._params)

    def _check_rows(self, rows: Sequence[int]) -> None:
        most = self.states.num_rows - 1
        if len(set(rows)) < len(rows) or not all(1 <= row <= most for row in rows):
            raise ValueError(
                f"rows is {list(rows)}; all must be different, and from 1 to {most}, for row 0 is null"
            )


class FoldStep:
    """One step of a `FoldCache`: `mix` for each layer, then `commit` once. Made by `FoldCache.step`."""

    def __init__(self, cache: FoldCache, meta: MambaMetadata, computed: Tensor) -> None:
        self._cache, self._meta, self._computed = cache, meta, computed
        self._mixer_rows = MixerRows.of(meta)
        self._committed = False

    def mix(self, index: int, channels: Tensor, *gates: Tensor) -> Tensor:
        """Convolution and recurrence of layer `index`: channels (T, conv_dim) and gates to y (T, *output_shape).

        The tokens of all rows, one row after the other.
        """
        pages = self._cache.pages
        layer = (self._mixer_rows, pages.layer(index), pages.rings(index))
        return self._cache.mixers[index].mix(channels, gates, *layer)

    def commit(self, accepted: Sequence[int] | Tensor) -> Tensor:
        """Fold what is due, in all layers, and keep what the requests carry along. A second call is a ValueError.

        accepted (R,) tokens that survive, at least 1; ignored for prompts. Returns (R,) int64: the tokens of each
        request from now on. Boundaries among them lie in their pages: those may be published.
        """
        if self._committed:
            raise ValueError("the step was committed before; its tokens would be folded in twice")
        self._committed = True
        cache, plan, rows = self._cache, self._meta.plan, self._meta.request_row
        assert isinstance(plan, ReplayPlan)
        assert rows is not None
        lens = self._meta.query_start_loc.diff()
        kept = torch.as_tensor(accepted, device=lens.device)
        scanned = torch.arange(len(rows), device=lens.device) >= self._meta.num_decodes
        done = plan_fold(cache.layout, plan, self._computed, lens, kept, scanned=scanned)
        cache.fold(done, plan, rows)
        cache.states.scatter(rows, done.accepted, base=done.base)
        return self._computed + torch.where(scanned, lens, done.accepted)
