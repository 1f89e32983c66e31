"""The rejection sampler: verifies drafts and samples one token more, from the hidden states of a step.

A decoding request with d draft slots has 1 + d rows of logits. Each row is processed as it would be after the drafts
before it. Then `bateleur.eagle.verify` emits the accepted drafts and one more token. Under the rule COUPLED the target
samples at each position with the noise of that position, so the tokens are those of plain decoding.

The sampler has two forms over one layout of buffers (`SamplerRows`). `verify` runs eagerly, for any batch. `record` can
be captured in a CUDA graph, for batches whose requests all sample and have equally many draft slots.
"""

# Shape letters: R rows of a step, S rows that sample, L rows of logits, K drafts at most, J = 1 + K, V vocabulary,
# N rows of a padded step, T tokens, D hidden size.

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

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
    OneHot,
    RejectionOutput,
    Rows,
    Rule,
    SamplingDrafter,
    SamplingMetadata,
    distribution_of,
    verify,
)
from bateleur.metadata import CommonAttentionMetadata
from bateleur.runner.models import HybridDecoder
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling.logprobs import Logprobs
from bateleur.runner.sampling.sampler import Processed, Sampler
from bateleur.runner.sampling.sampler_rows import SamplerRows
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.scheduling.step_batch import LogitsIndex, SamplingInputs, StepBatch
from bateleur.runner.utils.device import upload

GREEDY, UNTRUNCATED, TRUNCATED = "greedy", "untruncated", "truncated"
KINDS = (TRUNCATED, UNTRUNCATED, GREEDY)
"""Kinds of captured samplers: all rows are greedy, no sampled row truncates its distribution, or any parameters."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Tokens that a step emits for its S sampling requests, and their log probabilities."""

    sampled: NDArray[np.int64]
    """(S,) rows of the batch that sample."""
    first_logits: NDArray[np.int64]
    """(S,) row of `logprobs` of the first token; those of the next tokens follow."""
    packed: Tensor
    """(S, 2 + J + K) int64 on the device: number of emitted tokens in [0, J]; 0, or 1 if the logits held a NaN, or 2 if
    no token was left; emitted tokens, -1 after the last; tested drafts, -1 where there was none."""
    width: int
    """J."""
    logprobs: Logprobs | None = None
    """(L, ...), if a row of this step asked for them."""

    @property
    def token_ids(self) -> Tensor:
        """Emitted tokens (S, J) int64, -1 after the last."""
        return self.packed[:, 2 : 2 + self.width]


class RejectionSampler:
    """Verifies the drafts of steps, and keeps the token ids that every request computes next.

    rows: buffers that `verify` (eager) and `record` (captured) read. distribution: distribution from which the drafts
    of requests were sampled.
    can_capture: whether a graph can contain this distribution; other drafters than EAGLE may return a new tensor each
    time.
    """

    def __init__(
        self,
        model: HybridDecoder,
        sampler: Sampler,
        table: RequestTable,
        num_speculative_tokens: int,
        rule: Rule,
        drafter: Drafter | None,
    ) -> None:
        """rule: how drafts are tested. Raises ValueError if the rule can't test the drafter's drafts."""
        self.model, self.sampler, self.table, self.rule = model, sampler, table, rule
        self.device, self.num_drafts = model.device, num_speculative_tokens
        self.distribution = distribution_of(drafter, rule)
        self.can_capture = not isinstance(drafter, SamplingDrafter) or isinstance(drafter, EagleSpeculator)
        rule.require(self.distribution(torch.zeros(0, dtype=torch.int64, device=self.device)))
        self.rows = SamplerRows(len(table.token_ids), 1 + num_speculative_tokens, self.device)

    def input_ids(self, batch: StepBatch) -> Tensor | None:
        """Return the token ids of the decoding requests, concatenated, on the device; None without any."""
        num_rows, count = batch.num_decodes, batch.num_decode_tokens
        if not num_rows:
            return None
        index, next_ids = batch.index, self.rows.next_ids
        if count == num_rows:  # no row has drafts
            return next_ids[:, 0].index_select(0, index.rows[:num_rows])
        ids_DJ = next_ids.index_select(0, index.rows[:num_rows])
        if count == ids_DJ.numel():
            ids = ids_DJ.view(-1)
        else:
            ids = ids_DJ[index.owners[:count], index.num_before[:count]]
        return ids.clamp_min_(0)  # an empty slot holds -1, and is rejected below

    def next_tokens(self, batch: StepBatch) -> Tensor:
        """Return the last sampled token of each request, (R,) int64."""
        return self.rows.next_ids[:, 0].index_select(0, batch.index.rows)

    def drafts_of(self, table_rows: NDArray[np.int64]) -> Tensor:
        """Return the drafts (R, K) int64 of these rows of the request table on the device, -1 for no draft."""
        return self.rows.next_ids[:, 1:].index_select(0, upload(table_rows, self.device))

    def keep_drafts(self, batch: StepBatch, next_token_R: Tensor, drafts_RK: Tensor) -> None:
        """Store the next token of every request of the batch and the drafts after it, -1 for no draft."""
        self.rows.keep(batch.index.rows, next_token_R, drafts_RK)

    def stage(self, batch: StepBatch) -> SamplingInputs:
        """Copy the inputs of the sampling requests to the buffers of both forms; returns their sampling parameters."""
        (_, table_rows), last = batch.sampled, batch.sampling
        num_drafts = np.minimum(self.table.num_drafts[table_rows], batch.index.num_slots_S)
        if last is None or not np.array_equal(num_drafts, last.num_drafts):
            seeds, values = self.sampler.values_of(table_rows)
            self.rows.stage(table_rows, seeds, num_drafts, values)
            if last is None:
                batch.sampling = self._sampling_inputs(table_rows, values, num_drafts, batch.index)
            else:
                batch.sampling = last._replace(num_drafts=num_drafts)
        assert batch.sampling is not None
        return batch.sampling

    def _sampling_inputs(
        self,
        table_rows: NDArray[np.int64],
        values: NDArray[np.float32],
        num_drafts: NDArray[np.int32],
        index: LogitsIndex,
    ) -> SamplingInputs:
        count, sampler, metadata = len(table_rows), self.sampler, None
        greedy = sampler.all_greedy(table_rows)
        plain = sampler.is_plain(table_rows, np.zeros(count, np.int64))
        if plain and not greedy:
            values_L = values[index.owner_L]
            metadata = SamplingMetadata(values_L, upload(values_L, self.device))
        kind = GREEDY if greedy else TRUNCATED if sampler.truncates(table_rows) else UNTRUNCATED
        temperature = self.rows.values[:count, 0].contiguous()
        return SamplingInputs(num_drafts, plain, kind, self.rows.seeds[:count], temperature, metadata)

    def num_valid(self, batch: StepBatch, output: SamplerOutput | None) -> Tensor | None:
        """Return how many tokens of each request stay in its sequence, (R,) int64; None if the engine never drafts."""
        if not self.num_drafts:
            return None
        query_lens, num_decodes = batch.index.query_lens, batch.num_decodes
        if output is None or batch.num_decode_tokens == num_decodes:  # no row has drafts
            return query_lens
        if batch.all_decode:
            return self.rows.num_valid[:num_decodes]
        num_valid = query_lens.clone()
        num_valid[:num_decodes] = self.rows.num_valid[:num_decodes]  # decodes come first, and all of them sample
        return num_valid

    # --- eager ------------------------------------------------------------------------------------------------

    def verify(
        self, batch: StepBatch, metadata: CommonAttentionMetadata, hidden_TD: Tensor, allowed: Tensor | None = None
    ) -> SamplerOutput | None:
        """Verify the drafts of the requests that compute their last known token, and sample a token for each.

        Returns None without such requests. `stage` must have been called. allowed: (L, ceil(V / 32)) int32 on the
        device, bits of the tokens that may be sampled, see `forbid_`.
        """
        index, inputs = batch.index, batch.sampling
        assert inputs is not None
        if not (num_rows := len(index.sampled)):
            return None
        hidden_LD = hidden_TD[: index.num_logits] if index.hidden is None else hidden_TD.index_select(0, index.hidden)
        logits_LV, drafts_SK = self.model.logits(hidden_LD), self.rows.drafts(num_rows)
        processed = self._process(batch, inputs, logits_LV, drafts_SK, allowed)
        positions_S = metadata.positions.index_select(0, index.first_token) + 1
        if index.num_logits == num_rows:  # no row has drafts: under every rule that is one sample for each row
            tokens_S, bad = self.sampler.draw(processed, batch.sampled[1], positions_S)
            tokens_SJ = pad(tokens_S.masked_fill(bad, -1)[:, None], (0, self.num_drafts), value=-1)
            emitted = RejectionOutput(tokens_SJ, (~bad).long(), bad)
        else:
            emitted = self._test(processed, drafts_SK, index.starts, positions_S, inputs.temperature)
        self.rows.emit(emitted.tokens, emitted.num_emitted)
        logprobs = None
        if not inputs.plain:
            self.sampler.count(batch.sampled[1], emitted.tokens)
            if self.sampler.scores(batch.sampled[1]):
                tokens_L = emitted.tokens[index.owners, index.num_before].clamp_min_(0)
                logprobs = self.sampler.logprobs(logits_LV, tokens_L, batch.sampled[1])
        bad = emitted.bad.long()
        if processed.empty is not None:
            after_S = (index.starts[:-1] + emitted.num_emitted).clamp_max_(index.num_logits - 1)
            bad += emitted.bad & processed.empty[after_S]
        packed = _pack(emitted, bad, drafts_SK)
        return SamplerOutput(index.sampled, index.first_S, packed, 1 + self.num_drafts, logprobs)

    def _process(
        self, batch: StepBatch, inputs: SamplingInputs, logits_LV: Tensor, drafts_SK: Tensor, allowed: Tensor | None
    ) -> Processed:
        """Apply token rules, penalties and the sampling parameters to the logits."""
        if inputs.plain and allowed is None:
            return Processed(logits_LV, inputs.metadata, None)
        index, (_, rows_S), before_LK = batch.index, batch.sampled, None
        if index.num_logits > len(rows_S) and self.sampler.looks_back(rows_S):
            before_LK = drafts_SK.index_select(0, index.owners)
            slots_K = torch.arange(self.num_drafts, device=self.device)
            before_LK = before_LK.where(slots_K < index.num_before[:, None], -1)
        generated_S = (self.table.num_tokens[rows_S] - self.table.prompt_len[rows_S]).astype(np.int64)
        generated_L = generated_S[index.owner_L] + index.num_before_L
        return self.sampler.process(logits_LV, rows_S[index.owner_L], generated_L, before_LK, allowed)

    def _test(
        self, processed: Processed, drafts_SK: Tensor, starts: Tensor, positions_S: Tensor, temperature_S: Tensor
    ) -> RejectionOutput:
        """Test the drafts of the first S requests, whose logits begin at row `starts` (S + 1,). Can be captured."""
        count, metadata = len(positions_S), processed.metadata
        distribution: DraftDistribution = OneHot()  # greedy rows are the same under each distribution
        if metadata is not None:
            padding = len(self.rows.next_ids) - 1
            distribution = self.distribution(self.rows.table_rows[:count].clamp(max=padding - 1))
        return verify(
            processed.logits,
            Drafts(drafts_SK.contiguous(), distribution),
            Rows(starts, self.rows.seeds[:count], positions_S, temperature_S),
            rule=self.rule,
            lanes=self.sampler.lanes,
            greedy=metadata is None,
            metadata=metadata,
        )

    # --- captured ---------------------------------------------------------------------------------------------

    def record(self, metadata: CommonAttentionMetadata, hidden_TD: Tensor, kind: str) -> Tensor:
        """Verify the staged requests of a padded batch, and sample. Can be captured. kind: one of `KINDS`.

        Returns (N, 2 + J + K) int64, see `SamplerOutput.packed`. Other results go to the buffers `rows`.
        """
        rows, num_reqs = self.rows, metadata.num_reqs
        drafts_NK, values_N4, sampling = rows.drafts(num_reqs), rows.values[:num_reqs], None
        if kind != GREEDY:
            length = metadata.num_tokens // num_reqs
            values_T4 = values_N4.unsqueeze(1).expand(-1, length, -1).reshape(-1, values_N4.shape[1])
            sampling = SamplingMetadata.unknown(values_T4, truncates=kind == TRUNCATED)
        emitted = self._test(
            Processed(self.model.logits(hidden_TD), sampling),
            drafts_NK,
            metadata.query_start_loc,
            metadata.num_computed_tokens[:num_reqs].long() + 1,
            values_N4[:, 0],
        )
        rows.emit(emitted.tokens, emitted.num_emitted)
        return _pack(emitted, emitted.bad.long(), drafts_NK)

    def output_of(self, batch: StepBatch, packed: Tensor) -> SamplerOutput:
        """Return the result of `record` for the requests of `batch`.

        On a CPU it is copied from the memory of the graph.
        """
        index, packed_S = batch.index, packed[: len(batch.rows)]
        packed_S = packed_S.clone() if self.device.type == "cpu" else packed_S
        return SamplerOutput(index.sampled, index.first_S, packed_S, 1 + self.num_drafts)

    # --- warm-up ----------------------------------------------------------------------------------------------

    def warm_up(self, metadata: CommonAttentionMetadata, num_reqs: int, query_len: int) -> Tensor | None:
        """Verify dummy requests with `query_len` tokens each for every kind of sampling parameters, to load kernels.

        Drops the results, and returns `num_valid`.
        """
        rows, query_lens = np.arange(num_reqs), np.full(num_reqs, query_len, np.int32)
        shape = (num_reqs * query_len, self.model.spec.hidden_size)
        hidden_TD = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        # Kernels of greedy rows differ from those of sampled ones, and so do kernels for truncation and penalties.
        for temperature, top_p, penalty in ((0.0, 1.0, 1.0), *product((1.0,), (0.9, 1.0), (1.1, 1.0))):
            params = SamplingParams(temperature=temperature, top_p=top_p)
            for row in range(num_reqs):
                ruled = params if row else replace(params, repetition_penalty=penalty)
                self.sampler.admit(row, ruled, 0, ())
            batch = StepBatch([], rows, query_lens, num_reqs, np.ones(num_reqs, np.bool_), self.device)
            self.stage(batch)
            num_valid = self.num_valid(batch, self.verify(batch, metadata, hidden_TD))
        for row in range(num_reqs):
            self.sampler.release(row)
        self.sampler.forget_counts()
        self.rows.next_ids.zero_()
        self.rows.clear()
        return num_valid


def _pack(emitted: RejectionOutput, bad: Tensor, drafts: Tensor) -> Tensor:
    """Return the tensor (R, 2 + J + K) int64 of `SamplerOutput.packed`."""
    return torch.cat((emitted.num_emitted.unsqueeze(1), bad.unsqueeze(1), emitted.tokens, drafts), 1)
