"""From hidden states to emitted tokens: one draw for every row of logits, and how many drafts they confirm.

A decoding request with d drafts has 1 + d rows of logits. The target draws at each of them with the noise of that
position, as it would without drafts; a draft counts if it is what the target drew, and everything up to the first
difference is emitted. So the tokens are those of plain decoding, whatever is drafted (Daliri, Musco, Suresh, arXiv
2408.07978).
"""

# Shape letters: R rows of a step, S rows that draw, L rows of logits, K drafts at most, J = 1 + K, V vocabulary.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.metadata import CommonAttentionMetadata
from bateleur.runner.models import HybridDecoder
from bateleur.runner.sampler import Logprobs, SamplingState
from bateleur.runner.scheduler import StepPlan
from bateleur.runner.table import RequestTable


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step emits, for the S rows that draw; on the device but for `drawing` and `first_logits`."""

    drawing: NDArray[np.int64]
    """(S,) which rows of the plan draw."""
    first_logits: NDArray[np.int64]
    """(S,) the row of `logprobs` of the first token; those of the next follow."""
    token_ids: Tensor
    """(S, J) int64, -1 behind the last."""
    num_emitted: Tensor
    """(S,) int64 in [1, J]."""
    bad: Tensor
    """(S,) bool: the last token is none, because the logits held a NaN or left no token."""
    logprobs: Logprobs | None
    """(L, ...), if a row of this step asked for them."""


@dataclass(frozen=True, slots=True)
class _Index:
    """Where the logits of a plan come from and go to. It depends on the plan alone, so a steady plan has one."""

    plan: StepPlan
    rows: Tensor
    """(R,) rows of the request table, on the device."""
    query_lens: Tensor
    """(R,) int64."""
    drawing: NDArray[np.int64]
    lens_on_device_S: Tensor
    """(S,) rows of logits of each row that draws."""
    first_S: NDArray[np.int64]
    request_L: NDArray[np.int64]
    """(L,) which of the S rows a row of logits belongs to."""
    spot_L: NDArray[np.int64]
    """(L,) drafts before it."""
    table_rows_S: Tensor
    batch_rows_S: Tensor
    hidden_L: Tensor | None
    """(L,) rows of the hidden states; None for the first L."""
    cells_SJ: Tensor | None
    """(S, J) rows of logits, the last one repeated; None where they lie there in order."""
    spots_L: Tensor
    owner_L: Tensor


class Verifier:
    """Holds what is to be computed next for every row of the request table: a certain token, and drafts after it."""

    def __init__(
        self,
        model: HybridDecoder,
        sampling: SamplingState,
        table: RequestTable,
        num_speculative_tokens: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._table = table
        self._device = device
        self._width = 1 + num_speculative_tokens
        shape = (len(table.num_tokens), self._width)
        self._next_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._spots_J = torch.arange(self._width, device=device)
        self._index: _Index | None = None

    def rows_on_device(self, plan: StepPlan) -> Tensor:
        """(R,) int64: the plan's rows of the request table."""
        return self._index_of(plan).rows

    def input_ids(self, plan: StepPlan) -> Tensor | None:
        """The tokens of the decoding rows, one row after the other; None if there are none."""
        if not plan.num_decodes:
            return None
        index = self._index_of(plan)
        ids_DJ = self._next_ids.index_select(0, index.rows[: plan.num_decodes])
        if self._width == 1:
            return ids_DJ.flatten()
        count = plan.num_decode_tokens
        ids = ids_DJ.flatten()
        if count < len(ids):
            ids = ids_DJ[index.owner_L[:count], index.spots_L[:count]]
        return ids.clamp_min_(0)  # a place without a draft holds -1, and is rejected below

    def next_tokens(self, plan: StepPlan) -> Tensor:
        """(R,) int64: the last token of each row that drew; of others, whatever."""
        return self._next_ids[:, 0].index_select(0, self._index_of(plan).rows)

    def num_valid(self, plan: StepPlan, verified: Verified | None) -> Tensor | None:
        """(R,) int64: of the tokens of each row, those that stay; None where nothing is ever drafted."""
        if self._width == 1:
            return None
        num_valid = self._index_of(plan).query_lens.clone()
        if verified is not None and plan.num_decodes:  # these lead, and all of them draw
            num_valid[: plan.num_decodes] = verified.num_emitted[: plan.num_decodes]
        return num_valid

    def keep_drafts(self, plan: StepPlan, drafts_RK: Tensor) -> None:
        """Drafts for the tokens after the next one of every row of the plan; -1 where there is none."""
        self._next_ids[:, 1:].index_copy_(0, self._index_of(plan).rows, drafts_RK)

    def verify(self, plan: StepPlan, batch: CommonAttentionMetadata, hidden_TD: Tensor) -> Verified | None:
        """Draw for the rows that computed their last known token; None if there are none."""
        index = self._index_of(plan)
        if not len(index.drawing):
            return None
        num_logits = len(index.spot_L)
        hidden_LD = (
            hidden_TD[:num_logits] if index.hidden_L is None else hidden_TD.index_select(0, index.hidden_L)
        )
        rows_S = plan.rows[index.drawing]
        generated_S = (self._table.num_tokens[rows_S] - self._table.prompt_len[rows_S]).astype(np.int64)
        positions_S = batch.seq_lens.index_select(0, index.batch_rows_S) - index.lens_on_device_S + 1
        positions_L, before = positions_S, None
        drafts_SK = self._next_ids.index_select(0, index.table_rows_S)[:, 1:]
        if num_logits > len(rows_S):
            positions_L = positions_S.index_select(0, index.owner_L) + index.spots_L
            before = drafts_SK.index_select(0, index.owner_L)
            before = before.where(self._spots_J[:-1] < index.spots_L[:, None], -1)
        sampled = self._sampling.sample(
            self._model.logits(hidden_LD),
            rows_S[index.request_L],
            positions_L,
            generated_S[index.request_L] + index.spot_L,
            before,
        )
        tokens_SJ, bad_SJ = self._spread(index, sampled.token_ids), self._spread(index, sampled.bad)
        right_SK = (tokens_SJ[:, :-1] == drafts_SK) & (self._spots_J[1:] < index.lens_on_device_S[:, None])
        last_S1 = right_SK.long().cumprod(1).sum(1, keepdim=True)
        emitted_SJ = self._spots_J <= last_S1
        self._next_ids[:, 0].index_copy_(0, index.table_rows_S, tokens_SJ.gather(1, last_S1).squeeze(1))
        tokens_SJ = tokens_SJ.where(emitted_SJ & ~bad_SJ, -1)
        self._sampling.count(rows_S, tokens_SJ)
        bad_S = (bad_SJ & emitted_SJ).any(1)
        num_emitted = last_S1.squeeze(1) + 1
        return Verified(index.drawing, index.first_S, tokens_SJ, num_emitted, bad_S, sampled.logprobs)

    def _spread(self, index: _Index, values_L: Tensor) -> Tensor:
        """(L,) values by request, (S, J); behind the last of a request whatever."""
        if index.cells_SJ is None:
            return values_L.view(-1, self._width)
        return values_L[index.cells_SJ]

    def _index_of(self, plan: StepPlan) -> _Index:
        if self._index is None or self._index.plan is not plan:
            self._index = self._make_index(plan)
        return self._index

    def _make_index(self, plan: StepPlan) -> _Index:
        drawing = np.flatnonzero(plan.samples)
        lens_S = np.where(drawing < plan.num_decodes, plan.query_lens[drawing], 1).astype(np.int64)
        ends_S = np.cumsum(lens_S)
        first_S = ends_S - lens_S
        request_L = np.repeat(np.arange(len(drawing)), lens_S)
        spot_L = np.arange(len(request_L)) - first_S[request_L]
        hidden = cells = None
        if not plan.all_decode:
            token_ends = np.cumsum(plan.query_lens)[drawing]
            hidden = self._upload((token_ends - lens_S)[request_L] + spot_L)
        if len(request_L) != len(drawing) * self._width:
            spots_J = np.arange(self._width)
            cells = self._upload(first_S[:, None] + np.minimum(spots_J, lens_S[:, None] - 1))
        rows = self._upload(plan.rows.copy())
        if len(drawing) == len(plan.rows):
            table_rows, batch_rows = rows, self._upload(drawing)
        else:
            table_rows, batch_rows = self._upload(plan.rows[drawing]), self._upload(drawing)
        return _Index(
            plan,
            rows,
            self._upload(plan.query_lens.astype(np.int64)),
            drawing,
            self._upload(lens_S),
            first_S,
            request_L,
            spot_L,
            table_rows,
            batch_rows,
            hidden,
            cells,
            self._upload(spot_L),
            self._upload(request_L),
        )

    def _upload(self, array: NDArray[np.int64]) -> Tensor:
        """Host to device without waiting; the array is fresh and nothing writes to it again."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
