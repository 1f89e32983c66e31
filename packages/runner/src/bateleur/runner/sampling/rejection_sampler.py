"""From hidden states to emitted tokens: what is drawn, and how many drafts it confirms.

A decoding request with d drafts has 1 + d rows of logits. Each is processed as it would be after the drafts before it;
then `bateleur.eagle.verify` emits the drafts that stay and one token more. Under the rule COUPLED the target draws at
each row with the noise of that position, as it would without drafts, so the tokens are those of plain decoding.
"""

# Shape letters: R rows of a step, S rows that draw, L rows of logits, K drafts at most, J = 1 + K, V vocabulary.

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from bateleur.eagle import (
    Drafter,
    Drafts,
    EagleSpeculator,
    OneHot,
    RejectionOutput,
    Rows,
    Rule,
    SamplingDrafter,
    distribution_of,
    verify,
)
from bateleur.metadata import CommonAttentionMetadata
from bateleur.runner.models import HybridDecoder
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling.next_tokens import NextTokens, Span
from bateleur.runner.sampling.sampler import Draws, Processed, SamplingState
from bateleur.runner.sampling.step_index import StepIndex
from bateleur.runner.sampling.verified import Verified
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.scheduling.step_plan import PerPlan, StepPlan
from bateleur.runner.utils.device import DeviceCopies, upload

_ZERO = np.array(0)


class RejectionSampler:
    """Verifies steps, and holds what is to be computed next for every row of the request table.

    Attributes:
        next: tokens and drafts of all rows.
        distribution: what the drafts of rows (R,) int64 of the table were drawn from.
        fits_graphs: whether a graph may hold that; what drafters of others say may be made anew each time.
        places: (J,) int64 on the device, 0, 1, ...
    """

    def __init__(
        self,
        model: HybridDecoder,
        sampling: SamplingState,
        table: RequestTable,
        num_speculative_tokens: int,
        rule: Rule,
        drafter: Drafter | None,
    ) -> None:
        """`rule`: how drafts are tested. ValueError for a drafter whose drafts the rule can't test."""
        device = model.device
        self.rule = rule
        self.distribution = distribution_of(drafter, rule)
        self.fits_graphs = not isinstance(drafter, SamplingDrafter) or isinstance(drafter, EagleSpeculator)
        rule.require(self.distribution(torch.zeros(0, dtype=torch.int64, device=device)))
        self.model = model
        self.sampling = sampling
        self.table = table
        self._device = device
        self._width = 1 + num_speculative_tokens
        self.next = NextTokens(len(table.num_tokens), self._width, device)
        self.places = torch.arange(self._width, device=device)
        self.index_of = PerPlan(lambda plan: StepIndex(plan, self._upload))
        """Where the logits of a plan come from."""
        self.draws_of = PerPlan(self._draws_of)
        """How the rows of a plan that draw do it, (S,)."""
        self.span_of = PerPlan(self._span_of)
        """What comes next of a plan's rows, where these all draw and lie one behind the other, on a CPU: a drafter may
        read tokens and leave drafts where they are kept."""
        self._spanned: tuple[NDArray[np.int64], Span | None] | None = None
        """That of rows, which plans with other drafts share."""
        self._ids_of = PerPlan(self._cells_of)
        self._kept = DeviceCopies(device)

    @property
    def device(self) -> torch.device:
        """Where logits come from."""
        return self._device

    @property
    def num_places(self) -> int:
        """K: drafts of a row at most."""
        return self._width - 1

    @property
    def on_host(self) -> bool:
        """Whether the host sees tensors without waiting."""
        return self._device.type == "cpu"

    def _draws_of(self, plan: StepPlan) -> Draws:
        index = self.index_of(plan)
        return self.sampling.plan_draws(plan.rows[index.drawing], index.request_L)

    def _span_of(self, plan: StepPlan) -> Span | None:
        if not self.on_host or plan.num_decodes < len(plan.rows) or not len(plan.rows):
            return None
        if self._spanned is None or self._spanned[0] is not plan.rows:
            self._spanned = plan.rows, self.next.span_of(plan.rows)
        return self._spanned[1]

    def rows_on_device(self, plan: StepPlan) -> Tensor:
        """(R,) int64: the plan's rows of the request table."""
        return self.index_of(plan).rows

    def input_ids(self, plan: StepPlan) -> Tensor | None:
        """The tokens of the decoding rows, one after the other, valid until the next call; None if there are none."""
        num_rows, count = plan.num_decodes, plan.num_decode_tokens
        if not num_rows:
            return None
        if self.on_host:
            return self._input_ids_on_host(plan)
        index = self.index_of(plan)
        rows = index.rows if num_rows == len(plan.rows) else index.rows[:num_rows]
        if count == num_rows:  # nobody has drafts
            return self.next.of(rows)
        ids_DJ = self.next.ids.index_select(0, rows)
        if count == num_rows * self._width:
            ids = ids_DJ.view(-1)
        else:
            ids = ids_DJ[index.owner_L[:count], index.spots_L[:count]]
        # A place without a draft holds -1, and is rejected below.
        return ids if self._width == 1 else ids.clamp_min_(0)

    def _input_ids_on_host(self, plan: StepPlan) -> Tensor:
        cells, ids, found = self._ids_of(plan)
        self.next.on_host.take(cells, out=ids, mode="clip")  # else it takes a copy
        np.maximum(ids, _ZERO, out=ids)
        return found

    def _cells_of(self, plan: StepPlan) -> tuple[NDArray[np.int64], NDArray[np.int64], Tensor]:
        """Where the input ids of a plan lie among the next tokens, and these, written anew in each step."""
        lens = plan.query_lens[: plan.num_decodes]
        starts = lens.cumsum(dtype=np.int64) - lens
        first = plan.rows[: plan.num_decodes] * self._width - starts
        cells = first.repeat(lens) + np.arange(plan.num_decode_tokens)
        ids = np.empty(len(cells), np.int64)
        return cells, ids, torch.from_numpy(ids)

    def next_tokens(self, plan: StepPlan) -> Tensor:
        """(R,) int64: the last token of each row that drew; of others, whatever."""
        if self.on_host:
            return self.next.of_on_host(plan.rows)
        return self.next.of(self.index_of(plan).rows)

    def num_valid(self, plan: StepPlan, verified: Verified | None) -> Tensor | None:
        """(R,) int64: of the tokens of each row, those that stay; None where nothing is ever drafted."""
        if self._width == 1:
            return None
        query_lens, num_decodes = self.index_of(plan).query_lens, plan.num_decodes
        if verified is None or plan.num_decode_tokens == num_decodes:  # nobody has drafts
            return query_lens
        if num_decodes == len(plan.rows):
            return verified.num_emitted
        num_valid = query_lens.clone()
        num_valid[:num_decodes] = verified.num_emitted[:num_decodes]  # these lead, and all of them draw
        return num_valid

    def keep_drafts(self, plan: StepPlan, next_token_R: Tensor, drafts_RK: Tensor) -> None:
        """The next token of every row of the plan, and drafts for those after it; -1 where there is none."""
        if self.on_host:
            drew = len(plan.drawing[1]) == len(plan.rows)  # they hold what they drew
            self.next.keep_on_host(plan.rows, None if drew else next_token_R, drafts_RK)
        else:
            self.next.keep(self.index_of(plan).rows, next_token_R, drafts_RK)

    def logit_rows(self, plan: StepPlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which rows of the plan draw, (S,), and the first of the L rows of logits of each, (S,); those of its drafts
        follow, one for each place, whether a draft is in it or not.
        """
        index = self.index_of(plan)
        return index.drawing, index.first_S

    def num_logits(self, plan: StepPlan) -> int:
        """L: rows of logits of a step."""
        return self.index_of(plan).num_logits

    def proposed(self, rows: NDArray[np.int64]) -> Tensor:
        """(R, K) int64 on the device: drafts that were kept for these rows of the table, -1 where there is none."""
        return self.next.drafts_of(self._upload(rows))

    def verify(
        self,
        plan: StepPlan,
        batch: CommonAttentionMetadata,
        hidden_TD: Tensor,
        allowed: Tensor | None = None,
    ) -> Verified | None:
        """Draw for the rows that computed their last known token; None if there are none.

        allowed: (L, ceil(V / 32)) int32 on the device, in the order of `logit_rows`: bits of the tokens that may be
        drawn there, see `masks.forbid_`.
        """
        index = self.index_of(plan)
        if not len(index.drawing):
            return None
        num_logits = index.num_logits
        hidden_LD = (
            hidden_TD[:num_logits] if index.hidden_L is None else hidden_TD.index_select(0, index.hidden_L)
        )
        logits_LV = self.model.logits(hidden_LD)
        rows_S, draws = plan.rows[index.drawing], self.draws_of(plan)
        bare = draws.bare and allowed is None
        processed = Processed(logits_LV, draws.metadata, None) if bare else None
        generated_S = (self.table.num_tokens[rows_S] - self.table.prompt_len[rows_S]).astype(np.int64)
        positions_S = batch.positions.index_select(0, index.first_token_S) + 1
        if num_logits == len(rows_S):  # nobody has drafts: under every rule that is one draw for each row
            if processed is None:
                processed = self.sampling.process(logits_LV, rows_S, generated_S, allowed=allowed)
            tokens_L, bad = self.sampling.draw(processed, rows_S, positions_S)
            tokens_SJ = tokens_L.masked_fill(bad, -1)[:, None]
            if self._width > 1 and not self.on_host:
                tokens_SJ = pad(tokens_SJ, (0, self._width - 1), value=-1)
            emitted, drafts_SK = RejectionOutput(tokens_SJ, (~bad).long(), bad), tokens_SJ[:, :0]
        else:
            drafts_SK = self._drafts(index, rows_S)
            if processed is None:
                before_LK = self._before(index, drafts_SK) if self.sampling.looks_back(rows_S) else None
                rows_L, generated_L = rows_S[index.request_L], generated_S[index.request_L] + index.spot_L
                processed = self.sampling.process(logits_LV, rows_L, generated_L, before_LK, allowed)
            emitted = self._verify(index, processed, drafts_SK, draws, positions_S)
            tokens_L = None
        self._keep_emitted(index, rows_S, emitted, tokens_L)
        logprobs = empty = None
        if not draws.bare:
            self.sampling.count(rows_S, emitted.tokens)
        if not draws.bare and self.sampling.scores(rows_S):
            if tokens_L is None:
                tokens_L = emitted.tokens[index.owner_L, index.spots_L].clamp_min_(0)
            logprobs = self.sampling.logprobs(logits_LV, tokens_L, rows_S)
        if processed.empty is not None:
            behind_S = (index.starts[:-1] + emitted.num_emitted).clamp_max_(num_logits - 1)
            empty = emitted.bad & processed.empty[behind_S]
        return Verified(index.drawing, index.first_S, *emitted, empty, drafts_SK, logprobs)

    def _keep_emitted(
        self, index: StepIndex, rows_S: NDArray[np.int64], emitted: RejectionOutput, drawn_S: Tensor | None
    ) -> None:
        """Keep the last token of each row. drawn_S: what rows without drafts drew, (S,); None for rows with drafts."""
        if self.on_host:
            self.next.emitted_on_host(rows_S, emitted.tokens, emitted.num_emitted)
        elif drawn_S is not None:
            self.next.drew(index.table_rows_S, drawn_S)
        else:
            self.next.emitted(index.table_rows_S, emitted.tokens, emitted.num_emitted)

    def rehearse(self, batch: CommonAttentionMetadata, num_reqs: int, query_len: int) -> Tensor | None:
        """Verify rows without requests that draw, `query_len` tokens each, and forget it; returns `num_valid`."""
        rows, samples = np.arange(num_reqs), np.ones(num_reqs, np.bool_)
        plan = StepPlan([], rows, np.full(num_reqs, query_len, np.int32), num_reqs, samples)
        shape = (plan.num_tokens, self.model.spec.hidden_size)
        hidden_TD = torch.zeros(shape, dtype=self.model.dtype, device=self._device)
        # Kernels of greedy rows differ from those of draws, with truncation from those without, and so with penalties.
        for temperature, top_p, penalty in ((0.0, 1.0, 1.0), *product((1.0,), (0.9, 1.0), (1.1, 1.0))):
            params = SamplingParams(temperature=temperature, top_p=top_p)
            for row in range(num_reqs):
                ruled = params if row else replace(params, repetition_penalty=penalty)
                self.sampling.admit(row, ruled, 0, ())
            self._forget()
            num_valid = self.num_valid(plan, self.verify(plan, batch, hidden_TD))
        for row in range(num_reqs):
            self.sampling.release(row)
        self.sampling.forget_counts()
        self._forget()
        self.next.ids.zero_()
        return num_valid

    def _forget(self) -> None:
        """What was made of plans."""
        for made in (self.index_of, self.draws_of, self.span_of, self._ids_of):
            made.forget()

    def _drafts(self, index: StepIndex, rows_S: NDArray[np.int64]) -> Tensor:
        """The drafts under test, (S, K), where columns behind those of a row may hold others."""
        if self.on_host:
            drafts_SK = torch.from_numpy(self.next.on_host.take(rows_S, axis=0))[:, 1:]
        else:
            drafts_SK = self.next.drafts_of(index.table_rows_S)
        num_drafts_S = self.table.num_drafts[rows_S]
        if np.count_nonzero(num_drafts_S < self.table.num_places[rows_S]):
            wanted_S1 = self._kept("num_drafts", num_drafts_S.astype(np.int64)).unsqueeze(1)
            drafts_SK = drafts_SK.where(self.places[:-1] < wanted_S1, -1)
        return drafts_SK

    def _before(self, index: StepIndex, drafts_SK: Tensor) -> Tensor:
        """The drafts before each row of logits, (L, K), -1 where there is none."""
        before_LK = drafts_SK.index_select(0, index.owner_L)
        return before_LK.where(self.places[:-1] < index.spots_L[:, None], -1)

    def _verify(
        self,
        index: StepIndex,
        processed: Processed,
        drafts_SK: Tensor,
        draws: Draws,
        positions_S: Tensor,
    ) -> RejectionOutput:
        """What is emitted of S rows with drafts."""
        rows = Rows(index.starts, draws.seeds, positions_S, draws.temperature)
        greedy = processed.metadata is None
        # Greedy rows are the same under every distribution, so that nobody has to look up what theirs was.
        distribution = OneHot() if greedy else self.distribution(index.table_rows_S)
        drafts = Drafts(drafts_SK.contiguous(), distribution)
        lanes, metadata = self.sampling.lanes, processed.metadata
        return verify(
            processed.logits, drafts, rows, rule=self.rule, lanes=lanes, greedy=greedy, metadata=metadata
        )

    def _upload(self, array: NDArray[Any]) -> Tensor:
        """Host to device without waiting; the array is fresh and nothing writes to it again."""
        return upload(array, self._device)
