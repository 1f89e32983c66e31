"""Mamba-2 layers without an engine: their states under FOLD, and steps of mixed batches over them.

Everything here is a composition of the public planners and operators; an engine that stages batches into fixed
buffers, or captures graphs, calls those itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from bateleur.mamba.ops import (
    causal_conv1d_update,
    causal_conv1d_varlen,
    replay_update,
    ssd_scan_varlen,
)
from bateleur.mamba.plan_fold import FoldPlan, ReplayPlan, plan_fold, plan_replay
from bateleur.mamba.prompts import PromptCutter, Prompts
from bateleur.mamba.spec import CacheLayout, MambaSpec
from bateleur.mamba.state_pool import Rings, StatePool
from bateleur.mamba.states import RequestStates


@dataclass(frozen=True, slots=True)
class Mixer:
    """One Mamba-2 layer between its projections: sizes, and parameters."""

    spec: MambaSpec
    weight: Tensor
    """(conv_dim, W), of the convolution."""
    A: Tensor
    """(H,) float32, negative."""
    D: Tensor
    """(H,)"""
    dt_bias: Tensor
    """(H,)"""
    bias: Tensor | None = None
    """(conv_dim,), of the convolution."""
    dt_min: float = 0.0
    dt_max: float = float("inf")

    def split(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Channels (T, conv_dim) as x (T, H, P), B and C (T, G, N)."""
        spec = self.spec
        lanes = spec.num_groups * spec.state_size
        x, B, C = xbc.split([spec.inner_size, lanes, lanes], -1)
        groups = (-1, spec.num_groups, spec.state_size)
        return x.view(-1, spec.num_heads, spec.head_dim), B.reshape(groups), C.reshape(groups)


class FoldCache:
    """The states of some Mamba layers under FOLD: pages, rings of running requests, and what they carry along.

    Which page holds which state is the caller's: a block table with a row for each request, column c for the state
    after at most (c + 1) * block_size tokens. A page is full, and may stand in another request's row as well, when the
    request whose page it is has passed the end of its block; it is only read from then on.

    Args:
        layout: of all layers.
        mixers: the layers.
        num_slots: pages, of which page 0 is null.
        num_rows: running requests, and one: row 0 is null.
        chunk_size: tokens of a scan chunk at most.

    Raises ValueError for a layout or a spec that is not FOLD's, or a chunk size below 1.
    """

    def __init__(
        self, layout: CacheLayout, mixers: Sequence[Mixer], *, num_slots: int, num_rows: int, chunk_size: int
    ) -> None:
        specs = [mixer.spec for mixer in mixers]
        for spec in specs:
            spec.max_memory_usage_bytes(layout)  # of the same policy and number of drafts
        device = mixers[0].A.device
        self.layout, self.mixers = layout, tuple(mixers)
        self.cutter = PromptCutter(layout, chunk_size, num_rows)
        self.pages = StatePool(
            specs, num_slots, device, num_rows=num_rows, ring_capacity=layout.ring_capacity
        )
        self.states = RequestStates(num_rows, device)

    def rings(self, index: int) -> Rings:
        """What layer `index` keeps of running requests."""
        rings = self.pages.rings(index)
        assert rings is not None
        return rings

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
            ValueError: the counts or the rows do not fit, a decode has more tokens than could be rejected, a prompt
                goes on elsewhere than where its request is, or after decodes and has no page in the column of its next
                token, for what is in its ring.
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
        d = num_decodes
        if d < len(rows):
            self._empty_rings(table[d:], torch.tensor(rows[d:], device=table.device), computed[d:])
        return FoldStep(self, table, rows, computed, query_lens, num_decodes)

    def _empty_rings(self, table: Tensor, rows: Tensor, computed: Tensor) -> None:
        """Fold what decodes left in the rings of these rows, whose prompts go on: a scan reads a checkpoint alone."""
        kept, one = self.states.gather(rows), torch.ones_like(rows)
        plan = plan_replay(self.layout, table, computed, one, kept.base, kept.accepted, eager=True)
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
        self.states.commit(rows, kept.accepted, base=computed)

    def fold(self, plan: FoldPlan, replay: ReplayPlan, rows: Tensor) -> None:
        """What a plan says, in all layers: see `StatePool.fold`."""
        A = [torch.stack([self.mixers[index].A for index in group]) for group in self.pages.groups]
        self.pages.fold(plan, replay, rows, A)

    def _check_rows(self, rows: Sequence[int]) -> None:
        most = self.states.num_rows - 1
        if len(set(rows)) < len(rows) or not all(1 <= row <= most for row in rows):
            raise ValueError(
                f"rows is {list(rows)}; all must be different, and from 1 to {most}, for row 0 is null"
            )


class FoldStep:
    """One step of a `FoldCache`: `mix` for each layer, then `commit` once. Made by `FoldCache.step`."""

    def __init__(
        self,
        cache: FoldCache,
        table: Tensor,
        rows: Sequence[int],
        computed: Tensor,
        query_lens: Sequence[int],
        num_decodes: int,
    ) -> None:
        device = table.device
        self._cache, self._computed, self._decodes = cache, computed, num_decodes
        self._committed = False
        self._rows = torch.tensor(list(rows), device=device)
        self._lens = torch.tensor(list(query_lens), device=device)
        states = cache.states.gather(self._rows)
        kept = (states.base, states.accepted)
        self._plan = plan_replay(cache.layout, table, computed, self._lens, *kept, eager=True)
        self._loc = _starts(query_lens, device)
        self._tokens = sum(query_lens[:num_decodes])
        self._max_query_len = max(query_lens[:num_decodes], default=1)
        self._prompts = self._cut(table[num_decodes:], query_lens) if num_decodes < len(rows) else None

    def mix(self, index: int, xbc: Tensor, dt: Tensor) -> Tensor:
        """Convolution and recurrence of layer `index`: xbc (T, conv_dim), raw dt (T, H) to y (T, H, P).

        The tokens of all rows, one row after the other.
        """
        parts, n = [], self._tokens
        if self._decodes:
            parts.append(self._decode(index, xbc[:n], dt[:n]))
        if self._prompts is not None:
            parts.append(self._prompt(index, xbc[n:], dt[n:], self._prompts))
        return torch.cat(parts)

    def commit(self, accepted: Sequence[int] | Tensor) -> Tensor:
        """Fold what is due, in all layers, and keep what the requests carry along. A second call is a ValueError.

        accepted (R,) tokens that survive, at least 1; ignored for prompts. Returns (R,) int64: the tokens of each
        request from now on. Boundaries among them lie in their pages: those may be published.
        """
        if self._committed:
            raise ValueError("the step was committed before; its tokens would be folded in twice")
        self._committed = True
        cache, plan = self._cache, self._plan
        kept = torch.as_tensor(accepted, device=self._rows.device)
        scanned = torch.arange(len(self._rows), device=kept.device) >= self._decodes
        args = (cache.layout, plan, self._computed, self._lens, kept)
        done = plan_fold(*args, scanned=scanned, eager=True)
        cache.fold(done, plan, self._rows)
        cache.states.commit(self._rows, done.accepted, base=done.base)
        return self._computed + torch.where(scanned, self._lens, done.accepted)

    def _decode(self, index: int, xbc: Tensor, dt: Tensor) -> Tensor:
        mixer, plan, d = self._cache.mixers[index], self._plan, self._decodes
        _, ssm = self._cache.pages.layer(index)
        live, ring_x, ring_dt, ring_B = self._cache.rings(index)
        rows, loc, longest = self._rows[:d], self._loc[: d + 1], self._max_query_len
        taps = (mixer.weight, mixer.bias)
        xbc = causal_conv1d_update(xbc, *taps, live, loc, longest, rows, plan.conv_offset[:d], rows, "silu")
        x, B, C = mixer.split(xbc)
        return replay_update(
            ssm, ring_x, ring_dt, ring_B, x, dt, mixer.A, B, C, mixer.D, mixer.dt_bias, loc, longest,
            plan.slot[:d], rows, plan.ring_start[:d], plan.ring_len[:d], mixer.dt_min, mixer.dt_max,
        )  # fmt: skip

    def _prompt(self, index: int, xbc: Tensor, dt: Tensor, cut: Prompts) -> Tensor:
        mixer, d = self._cache.mixers[index], self._decodes
        conv, ssm = self._cache.pages.layer(index)
        read, live = self._plan.slot[d:], self._cache.rings(index).live
        xbc = causal_conv1d_varlen(
            xbc, mixer.weight, mixer.bias, conv, live, cut.query_start_loc, read, cut.chunk_start_loc, cut.chunk_row,
            cut.chunk_write, self._rows[d:], "silu",
        )  # fmt: skip
        x, B, C = mixer.split(xbc)
        return ssd_scan_varlen(
            x, dt, mixer.A, B, C, mixer.D, mixer.dt_bias, ssm, cut.query_start_loc, cut.chunk_start_loc, cut.chunk_row,
            cut.row_chunk_loc, cut.max_chunks_per_row, self._cache.cutter.chunk_size, read, cut.chunk_write,
            mixer.dt_min, mixer.dt_max,
        )  # fmt: skip

    def _cut(self, table: Tensor, query_lens: Sequence[int]) -> Prompts:
        starts = np.add.accumulate([0, *query_lens[self._decodes :]], dtype=np.int32)
        return self._cache.cutter.cut(starts, self._computed[self._decodes :].int().cpu().numpy(), table)


def _starts(lens: Sequence[int], device: torch.device) -> Tensor:
    """(n + 1,) int32: 0, and the sums of the first lens."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
