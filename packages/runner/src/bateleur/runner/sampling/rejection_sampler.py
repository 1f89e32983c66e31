"""From hidden states to emitted tokens: what is drawn, and how many drafts it confirms.

A decoding request with d drafts has 1 + d rows of logits. Each is processed as it would be after the drafts before it;
then `bateleur.eagle.verify` emits the drafts that stay and one token more. Under the rule COUPLED the target draws at
each row with the noise of that position, as it would without drafts, so the tokens are those of plain decoding.
"""

# Shape letters: R rows of a step, S rows that draw, L rows of logits, K drafts at most, J = 1 + K, V vocabulary.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from bateleur.eagle import (
    DraftDistribution,
    Drafter,
    Drafts,
    EagleSpeculator,
    Law,
    OneHot,
    Rows,
    Rule,
    SamplingDrafter,
    Verdict,
    distribution_of,
    verify,
)
from bateleur.metadata import CommonAttentionMetadata
from bateleur.runner.device import Kept, upload
from bateleur.runner.models import HybridDecoder
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling.end_rows import EndRows
from bateleur.runner.sampling.logprobs import Logprobs
from bateleur.runner.sampling.sampler import Processed, SamplingState
from bateleur.runner.sampling.step_index import StepIndex
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.scheduling.scheduler import StepPlan


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
    """(S,) int64 in [1, J]; less by one where `bad`."""
    bad: Tensor
    """(S,) bool: behind these tokens the logits held a NaN or left no token."""
    empty: Tensor | None
    """(S,) bool, those of them in which every token was forbidden; None where nothing forbids any."""
    drafts: Tensor
    """(S, K) int64 that were tested, -1 where there was none; (S, 0) where nobody had any."""
    logprobs: Logprobs | None
    """(L, ...), if a row of this step asked for them."""
    packed: Tensor | None = None
    """(S, 2 + J + K) int64: counts, what is bad, tokens and drafts, where these are views of it."""

    @classmethod
    def of_packed(cls, packed: Tensor, width: int, index: StepIndex) -> Verified:
        """As `RejectionSampler.end` left it, of rows that all draw; `width` is J."""
        tokens, drafts = packed[:, 2 : 2 + width], packed[:, 2 + width :]
        return cls(
            drawing=index.drawing,
            first_logits=index.first_S,
            token_ids=tokens,
            num_emitted=packed[:, 0],
            bad=packed[:, 1],
            empty=None,
            drafts=drafts,
            logprobs=None,
            packed=packed,
        )


class RejectionSampler:
    """Holds what is to be computed next for every row of the request table: a certain token, and drafts after it."""

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
        self._distribution = distribution_of(drafter, rule)
        self.fits_graphs = not isinstance(drafter, SamplingDrafter) or isinstance(drafter, EagleSpeculator)
        """Whether a graph may hold how drafts were drawn; what other drafters say may be made anew each time."""
        rule.require(self._distribution(torch.zeros(0, dtype=torch.int64, device=device)))
        self._model = model
        self.sampling = sampling
        self.table = table
        self._device = device
        self._width = 1 + num_speculative_tokens
        shape = (1 + len(table.num_tokens), self._width)  # the last row takes what belongs to no request
        self._next_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._spots_J = torch.arange(self._width, device=device)
        self._index: StepIndex | None = None
        self._kept = Kept(device)

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

    def rows_on_device(self, plan: StepPlan) -> Tensor:
        """(R,) int64: the plan's rows of the request table."""
        return self._index_of(plan).rows

    def input_ids(self, plan: StepPlan) -> Tensor | None:
        """The tokens of the decoding rows, one row after the other; None if there are none."""
        num_rows, count = plan.num_decodes, plan.num_decode_tokens
        if not num_rows:
            return None
        index = self._index_of(plan)
        rows = index.rows if num_rows == len(plan.rows) else index.rows[:num_rows]
        if count == num_rows:  # nobody has drafts
            return self._next_ids[:, 0].index_select(0, rows)
        ids_DJ = self._next_ids.index_select(0, rows)
        if count == num_rows * self._width:
            ids = ids_DJ.view(-1)
        else:
            ids = ids_DJ[index.owner_L[:count], index.spots_L[:count]]
        # A place without a draft holds -1, and is rejected below.
        return ids if self._width == 1 else ids.clamp_min_(0)

    def next_tokens(self, plan: StepPlan) -> Tensor:
        """(R,) int64: the last token of each row that drew; of others, whatever."""
        return self.next_of(self._index_of(plan).rows)

    def next_of(self, rows: Tensor) -> Tensor:
        """The same for rows (R,) int64 of the table."""
        return self._next_ids[:, 0].index_select(0, rows)

    def num_valid(self, plan: StepPlan, verified: Verified | None) -> Tensor | None:
        """(R,) int64: of the tokens of each row, those that stay; None where nothing is ever drafted."""
        if self._width == 1:
            return None
        num_valid = self._index_of(plan).query_lens.clone()
        if verified is not None and plan.num_decodes:  # these lead, and all of them draw
            num_valid[: plan.num_decodes] = verified.num_emitted[: plan.num_decodes]
        return num_valid

    def keep_drafts(self, plan: StepPlan, next_token_R: Tensor, drafts_RK: Tensor) -> None:
        """The next token of every row of the plan, and drafts for those after it; -1 where there is none."""
        self.keep(self._index_of(plan).rows, next_token_R, drafts_RK)

    def keep(self, rows: Tensor, next_token_R: Tensor, drafts_RK: Tensor) -> None:
        """The same for rows (R,) int64 of the table."""
        self._next_ids.index_copy_(0, rows, torch.cat((next_token_R.unsqueeze(1), drafts_RK), 1))

    def logit_rows(self, plan: StepPlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which rows of the plan draw, (S,), and the first of the L rows of logits of each, (S,); those of its drafts
        follow, one for each place, whether a draft is in it or not.
        """
        index = self._index_of(plan)
        return index.drawing, index.first_S

    def num_logits(self, plan: StepPlan) -> int:
        """L: rows of logits of a step."""
        return len(self._index_of(plan).spot_L)

    def proposed(self, rows: NDArray[np.int64]) -> Tensor:
        """(R, K) int64 on the device: drafts that were kept for these rows of the table, -1 where there is none."""
        return self._next_ids.index_select(0, self._upload(rows))[:, 1:]

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
        index = self._index_of(plan)
        if not len(index.drawing):
            return None
        num_logits = len(index.spot_L)
        hidden_LD = (
            hidden_TD[:num_logits] if index.hidden_L is None else hidden_TD.index_select(0, index.hidden_L)
        )
        logits_LV = self._model.logits(hidden_LD)
        rows_S = plan.rows[index.drawing]
        generated_S = (self.table.num_tokens[rows_S] - self.table.prompt_len[rows_S]).astype(np.int64)
        positions_S = batch.positions.index_select(0, index.first_token_S) + 1
        if num_logits == len(rows_S):  # nobody has drafts: under every rule that is one draw for each row
            processed = self.sampling.process(logits_LV, rows_S, generated_S, allowed=allowed)
            tokens_L, bad = self.sampling.draw(processed, rows_S, positions_S)
            tokens_SJ = tokens_L.masked_fill(bad, -1)[:, None]
            if self._width > 1:
                tokens_SJ = pad(tokens_SJ, (0, self._width - 1), value=-1)
            emitted, drafts_SK = Verdict(tokens_SJ, (~bad).long(), bad), tokens_SJ[:, :0]
        else:
            drafts_SK, before_LK = self._drafts(index, rows_S)
            rows_L, generated_L = rows_S[index.request_L], generated_S[index.request_L] + index.spot_L
            processed = self.sampling.process(logits_LV, rows_L, generated_L, before_LK, allowed)
            emitted = self._verify(index, processed, drafts_SK, rows_S, positions_S)
            tokens_L = emitted.tokens[index.owner_L, index.spots_L].clamp_min_(0)
        last_S1 = (emitted.num_emitted - 1).clamp_min_(0).unsqueeze(1)
        last_S = emitted.tokens.gather(1, last_S1).squeeze(1).clamp_min_(0)
        self._next_ids[:, 0].index_copy_(0, index.table_rows_S, last_S)
        self.sampling.count(rows_S, emitted.tokens)
        logprobs = self.sampling.logprobs(logits_LV, tokens_L, rows_S)
        empty = None
        if processed.empty is not None:
            behind_S = (index.starts[:-1] + emitted.num_emitted).clamp_max_(num_logits - 1)
            empty = emitted.bad & processed.empty[behind_S]
        return Verified(index.drawing, index.first_S, *emitted, empty, drafts_SK, logprobs)

    def end(
        self, batch: CommonAttentionMetadata, hidden_TD: Tensor, rows: EndRows, *, greedy: bool
    ) -> Tensor:
        """Verify a step whose rows are all past their prompts and have as many places each, as a graph records it.

        What differs from step to step is in `rows`, staged before. greedy: no row draws with noise. Returns (N, 2 + J +
        K) int64 of the padded N rows, see `Verified.packed`; the rest is left in `rows` and with the next tokens.
        """
        num_reqs, width = batch.num_reqs, self._width
        length, own_N = batch.num_tokens // num_reqs, rows.table_rows[:num_reqs]
        logits_TV = self._model.logits(hidden_TD)
        ids_NJ = self._next_ids.index_select(0, own_N)
        drafts_NK = ids_NJ[:, 1:].where(self._spots_J[: width - 1] < rows.num_drafts[:num_reqs, None], -1)
        values_N4, law = rows.law[:num_reqs], None
        distribution: DraftDistribution = OneHot()  # greedy rows are the same under each
        if not greedy:
            law = Law.unknown(values_N4.unsqueeze(1).expand(-1, length, -1).reshape(-1, values_N4.shape[1]))
            distribution = self._distribution(own_N.clamp(max=len(self._next_ids) - 2))
        first_N = batch.num_computed_tokens[:num_reqs].long() + 1
        drawn_with = Rows(batch.query_start_loc, rows.seeds[:num_reqs], first_N, values_N4[:, 0])
        emitted = verify(
            logits_TV,
            Drafts(drafts_NK, distribution),
            drawn_with,
            rule=self.rule,
            lanes=self.sampling.lanes,
            greedy=greedy,
            law=law,
        )
        last_N1 = (emitted.num_emitted - 1).clamp_min_(0).unsqueeze(1)
        last_N = emitted.tokens.gather(1, last_N1).squeeze(1).clamp_min_(0)
        self._next_ids[:, 0].index_copy_(0, own_N, last_N)
        rows.leave(emitted.tokens, emitted.num_emitted)
        counts = (emitted.num_emitted.unsqueeze(1), emitted.bad.long().unsqueeze(1))
        return torch.cat((*counts, emitted.tokens, drafts_NK), 1)

    def ended(self, plan: StepPlan, packed: Tensor) -> Verified:
        """What `end` returned for the rows of `plan`; they keep it, whatever the graph does next."""
        packed_S = packed[: len(plan.rows)]
        return Verified.of_packed(
            packed_S.clone() if self.on_host else packed_S, self._width, self._index_of(plan)
        )

    def stage(self, plan: StepPlan, rows: EndRows) -> None:
        """Say in `rows` whose step comes next, for `end`: rows of `plan` that all decode."""
        seeds, law = self.sampling.draws_of(plan.rows)
        num_drafts = np.minimum(self.table.num_drafts[plan.rows], plan.query_lens - 1)
        rows.stage(plan.rows, seeds, num_drafts, law)

    def rehearse(self, batch: CommonAttentionMetadata, num_reqs: int, query_len: int) -> Tensor | None:
        """Verify rows without requests that draw, `query_len` tokens each, and forget it; returns `num_valid`."""
        rows, samples = np.arange(num_reqs), np.ones(num_reqs, np.bool_)
        plan = StepPlan([], rows, np.full(num_reqs, query_len, np.int32), num_reqs, samples)
        shape = (plan.num_tokens, self._model.spec.hidden_size)
        hidden_TD = torch.zeros(shape, dtype=self._model.dtype, device=self._device)
        for top_p in (0.9, 1.0):  # with truncation kernels differ from those without
            for row in range(num_reqs):
                self.sampling.admit(row, SamplingParams(temperature=1.0, top_p=top_p), 0, ())
            num_valid = self.num_valid(plan, self.verify(plan, batch, hidden_TD))
        for row in range(num_reqs):
            self.sampling.release(row)
        self._index = None
        self._next_ids.zero_()
        return num_valid

    def _drafts(self, index: StepIndex, rows_S: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The drafts under test, (S, K), where columns behind those of a row may hold others; and those before each row
        of logits, (L, K), -1 where there is none.
        """
        drafts_SK = self._next_ids.index_select(0, index.table_rows_S)[:, 1:]
        num_drafts_S = self.table.num_drafts[rows_S]
        if (num_drafts_S < self.table.num_places[rows_S]).any():
            wanted_S1 = self._kept("num_drafts", num_drafts_S.astype(np.int64)).unsqueeze(1)
            drafts_SK = drafts_SK.where(self._spots_J[:-1] < wanted_S1, -1)
        before_LK = drafts_SK.index_select(0, index.owner_L)
        return drafts_SK, before_LK.where(self._spots_J[:-1] < index.spots_L[:, None], -1)

    def _verify(
        self,
        index: StepIndex,
        processed: Processed,
        drafts_SK: Tensor,
        rows_S: NDArray[np.int64],
        positions_S: Tensor,
    ) -> Verdict:
        """What is emitted of S rows with drafts."""
        seeds, temperature = self.sampling.noise_keys(rows_S)
        rows = Rows(index.starts, seeds, positions_S, temperature)
        greedy = processed.law is None
        # Greedy rows are the same under every distribution, so that nobody has to look up what theirs was.
        distribution = OneHot() if greedy else self._distribution(index.table_rows_S)
        drafts = Drafts(drafts_SK.contiguous(), distribution)
        lanes, law = self.sampling.lanes, processed.law
        return verify(processed.logits, drafts, rows, rule=self.rule, lanes=lanes, greedy=greedy, law=law)

    def _index_of(self, plan: StepPlan) -> StepIndex:
        if self._index is None or self._index.plan is not plan:
            self._index = StepIndex.of(plan, self._upload)
        return self._index

    def _upload(self, array: NDArray[np.int64]) -> Tensor:
        """Host to device without waiting; the array is fresh and nothing writes to it again."""
        return upload(array, self._device)
