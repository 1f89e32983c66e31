"""The rejection sampler: verifies drafts and samples one token more, from the hidden states of a step.

A decoding request with d draft slots has 1 + d rows of logits. Each row is processed as it would be after the drafts
before it. Then `bateleur.eagle.verify` emits the accepted drafts and one more token. Under the acceptance rule COUPLED
the target samples at each position with the noise of that position, so the tokens are those of plain decoding.

The sampler has two forms over one layout of buffers (`SamplerRows`). `verify` runs eagerly, for any batch. `record` can
be captured in a CUDA graph, for batches whose requests all sample and have equally many draft slots.
"""

# Shape letters: R rows of a step, S rows that sample, L rows of logits, K drafts at most, J = 1 + K, V vocabulary,
# N rows of a padded step, T tokens, D hidden size, M rows of the request table.

from typing import NamedTuple

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
    Keys,
    OneHot,
    RejectionOutput,
    Rows,
    Rule,
    SampledTokens,
    SamplingDrafter,
    SamplingMetadata,
    argmax,
    distribution_of,
    sample,
    verify,
)
from bateleur.metadata import CommonAttentionMetadata
from bateleur.runner.models import HybridDecoder
from bateleur.runner.requests.request import RequestTable
from bateleur.runner.sampling.logprobs import Logprobs
from bateleur.runner.sampling.sampler import ProcessedLogits, Sampler
from bateleur.runner.scheduling.step_batch import LogitsIndex, SamplingInputs, StepBatch
from bateleur.runner.utils.arrays import Float32s, Int32s, Int64s
from bateleur.runner.utils.device import upload

GREEDY, UNTRUNCATED, TRUNCATED = "greedy", "untruncated", "truncated"
KINDS = (TRUNCATED, UNTRUNCATED, GREEDY)
"""Kinds of captured samplers: any parameters, no sampled row has top-k, top-p or min-p, or all rows are greedy."""
_POISON = torch.iinfo(torch.int32).max - 6
"""No token id, and more tokens than a row can have."""


class SampledStep(NamedTuple):
    """The outcome of a step, on the device: the tokens that its S sampling requests emit.
    packed: (S, 2 + J + K) int64 for at most K drafts and J = 1 + K tokens. Columns: number of emitted tokens; error (1:
    the logits held a NaN, 2: no token was allowed, else 0); J emitted tokens, -1 after the last; K tested drafts, -1
    where there was none. None if no request samples.
    num_valid: (R,) int64 number of tokens of each request in this step, without rejected drafts and empty draft slots;
    None if the engine never drafts.
    logprobs: one entry for each row of logits; None if no request of this step asked for them.
    """

    packed: Tensor | None
    num_valid: Tensor | None
    logprobs: Logprobs | None = None


class SamplerRows:
    """Row layout of the eager and the captured rejection sampler. Addresses never change, so that graphs can read them.

    M rows of the request table, N rows that sample in the current step, J tokens that a row emits at most:
        next_ids: (1 + M, J) int64, the last sampled token, then drafts, -1 where there is none. Row M is for padding.
        table_rows: (N,) int64 rows of the request table; M in padding. The padding of other buffers is 0.
        seeds: (N,) int64. num_drafts: (N,) int64 to test. values: (N, 4) float32 temperature, log(min_p), top_k, top_p.
        emitted: (N, J) int64 emitted tokens, -1 after the last.
        num_valid: (N,) int64 emitted tokens of the row. Unused rows keep old values of `emitted` and `num_valid`.
    """

    def __init__(self, max_rows: int, width: int, device: torch.device) -> None:
        """max_rows: rows of the request table (M). width: maximum tokens that a row emits in a step (J)."""
        self._max_rows, self._device = max_rows, device
        self.next_ids = torch.zeros((1 + max_rows, width), dtype=torch.int64, device=device)
        even = max_rows + max_rows % 2  # each part is aligned to 16 bytes, so that Triton compiles a kernel once
        self._staged = torch.zeros(5, even, dtype=torch.int64, device=device)
        self.table_rows, self.seeds, self.num_drafts = self._staged[:3, :max_rows]
        self.values = self._staged[3:].view(-1).view(torch.float32).view(even, 4)[:max_rows]
        self.emitted = torch.empty(max_rows, width, dtype=torch.int64, device=device)
        self.num_valid = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._draft_slots = torch.arange(width - 1, device=device)
        self.clear()

    def clear(self) -> None:
        """Write a step without sampling rows to the buffers, and clear the emitted tokens."""
        self.emitted.fill_(-1)
        self.num_valid.fill_(1)
        nothing = np.zeros(0, np.int64)
        self.stage(nothing, nothing, nothing, np.zeros((0, 4), np.float32))

    def stage(self, table_rows: Int64s, seeds: Int64s, num_drafts: NDArray[np.integer], values: Float32s) -> None:
        """Send the sampling rows of a step to the device, in one copy. See the class for the arguments."""
        staged, count = np.zeros(self._staged.shape, np.int64), len(table_rows)
        staged[0, count:] = self._max_rows
        for line, given in zip(staged, (table_rows, seeds, num_drafts), strict=False):
            line[:count] = given
        staged[3:].reshape(-1).view(np.float32).reshape(-1, 4)[:count] = values
        self._staged.copy_(upload(staged, self._device))

    def drafts(self, num_rows: int) -> Tensor:
        """Return the drafts to test in the first rows, (num_rows, J - 1) int64, -1 for none. Can be captured."""
        drafts_RK = self.next_ids.index_select(0, self.table_rows[:num_rows])[:, 1:]
        return drafts_RK.where(self._draft_slots < self.num_drafts[:num_rows, None], -1)

    def emit(self, tokens: Tensor, num_emitted: Tensor) -> None:
        """Store the emitted tokens (R, J) of the first R rows, and their numbers (R,) int64. The last emitted token of
        a row is its next input token. Can be captured.
        """
        num_rows = len(num_emitted)
        last_R1 = (num_emitted - 1).clamp_min_(0).unsqueeze(1)
        last_R = tokens.gather(1, last_R1).squeeze(1).clamp_min_(0)
        self.next_ids[:, 0].index_copy_(0, self.table_rows[:num_rows], last_R)
        self.emitted[:num_rows].copy_(tokens)
        self.num_valid[:num_rows].copy_(num_emitted)

    def keep(self, table_rows: Tensor, tokens: Tensor, drafts: Tensor) -> None:
        """Store next input tokens (R,) and drafts (R, J - 1) of R rows of the request table. Can be captured."""
        self.next_ids.index_copy_(0, table_rows, torch.cat((tokens.unsqueeze(1), drafts), 1))

    def poison(self) -> None:
        """Fill the rows of the step with invalid values."""
        self._staged.fill_(-1)
        self.poison_emitted()

    def poison_emitted(self) -> None:
        """Fill the outputs of the last step with invalid values."""
        self.emitted.fill_(_POISON)
        self.num_valid.fill_(_POISON)

    def addresses(self) -> dict[str, int]:
        """Data pointers of the buffers of a step, by name."""
        return {name: getattr(self, name).data_ptr() for name in ("_staged", "emitted", "num_valid")}


class RejectionSampler:
    """Verifies the drafts of steps, and keeps the next input tokens of every request on the device.
    rows: buffers that `verify` (eager) and `record` (captured) read. distribution: returns the distribution from which
    the drafts of table rows were sampled. can_capture: whether a graph can contain this distribution; other drafters
    than EAGLE may return a new tensor each time.
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
        """rule: acceptance rule of drafts. Raises ValueError if the rule does not support the drafter's drafts."""
        self.model, self.sampler, self.table, self.rule = model, sampler, table, rule
        self.device, self.num_drafts = model.device, num_speculative_tokens
        self.distribution = distribution_of(drafter, rule)
        self.can_capture = not isinstance(drafter, SamplingDrafter) or isinstance(drafter, EagleSpeculator)
        rule.require(self.distribution(torch.zeros(0, dtype=torch.int64, device=self.device)))
        self.rows = SamplerRows(len(table.token_ids), 1 + num_speculative_tokens, self.device)

    def drafts_of(self, table_rows: Int64s) -> Tensor:
        """Return the drafts of n rows of the request table, (n, num_drafts) int64 on the device, -1 for none."""
        return self.rows.next_ids[:, 1:].index_select(0, upload(table_rows, self.device))

    def stage(self, batch: StepBatch) -> Tensor | None:
        """Write the sampling requests of the batch to buffers `rows`. Returns the input tokens of decoding requests,
        concatenated, on the device; None if no request decodes.
        """
        (_, table_rows), last = batch.sampled, batch.sampling
        num_drafts = np.minimum(self.table.num_drafts[table_rows], batch.index.num_slots_S)
        if last is None or not np.array_equal(num_drafts, last.num_drafts):
            seeds, values = self.sampler.values_of(table_rows)
            self.rows.stage(table_rows, seeds, num_drafts, values)
            if last is None:
                batch.sampling = self._sampling_inputs(table_rows, values, num_drafts, batch.index)
            else:
                batch.sampling = last._replace(num_drafts=num_drafts)
        num_rows, count = batch.num_decodes, batch.num_decode_tokens
        if not num_rows:
            return None
        index, next_ids = batch.index, self.rows.next_ids
        if count == num_rows:  # no row has drafts
            return next_ids[:, 0].index_select(0, index.rows[:num_rows])
        ids_DJ = next_ids.index_select(0, index.rows[:num_rows])
        every = count == ids_DJ.numel()
        ids = ids_DJ.view(-1) if every else ids_DJ[index.owners[:count], index.num_before[:count]]
        return ids.clamp_min_(0)  # an empty slot holds -1, and is rejected below

    def _sampling_inputs(
        self, table_rows: Int64s, values: Float32s, num_drafts: Int32s, index: LogitsIndex
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

    def num_generated(self, batch: StepBatch) -> Int64s:
        """Return upper bounds (S,) of the numbers of tokens that the S sampling requests have generated so far."""
        table, (_, rows_S) = self.table, batch.sampled
        found: Int64s = table.num_tokens[rows_S] - table.prompt_len[rows_S] - 1 - batch.index.num_slots_S
        return found

    def _num_valid(self, batch: StepBatch) -> Tensor | None:
        if not self.num_drafts:
            return None
        query_lens, num_decodes = batch.index.query_lens, batch.num_decodes
        if batch.num_decode_tokens == num_decodes:  # no row has drafts
            return query_lens
        if batch.all_decode:
            return self.rows.num_valid[:num_decodes]
        num_valid = query_lens.clone()
        num_valid[:num_decodes] = self.rows.num_valid[:num_decodes]  # decodes come first, and all of them sample
        return num_valid

    def verify(
        self, batch: StepBatch, metadata: CommonAttentionMetadata, hidden_TD: Tensor, allowed: Tensor | None = None
    ) -> SampledStep:
        """Verify the drafts of the requests that sample in this step, and sample. Call `stage` before.
        allowed: bit mask of the tokens that may be sampled in each row of logits, see `forbid_`; None: all.
        """
        index, inputs = batch.index, batch.sampling
        assert inputs is not None
        if not (num_rows := len(index.sampled)):
            return SampledStep(None, self._num_valid(batch))
        hidden_LD = hidden_TD[: index.num_logits] if index.hidden is None else hidden_TD.index_select(0, index.hidden)
        logits_LV, drafts_SK = self.model.logits(hidden_LD), self.rows.drafts(num_rows)
        processed = self._process(batch, inputs, logits_LV, drafts_SK, allowed)
        positions_S = metadata.positions.index_select(0, index.first_token) + 1
        if index.num_logits == num_rows:  # no row has drafts: under every rule that is one sample for each row
            tokens_S, bad = draw(self.sampler, processed, inputs.seeds, positions_S)
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
                logprobs = self.sampler.logprobs(logits_LV, tokens_L, batch.sampled[1][index.owner_L])
        bad = emitted.bad.long()
        if processed.empty is not None:
            after_S = (index.starts[:-1] + emitted.num_emitted).clamp_max_(index.num_logits - 1)
            bad += emitted.bad & processed.empty[after_S]
        return SampledStep(_pack(emitted, bad, drafts_SK), self._num_valid(batch), logprobs)

    def _process(
        self, batch: StepBatch, inputs: SamplingInputs, logits_LV: Tensor, drafts_SK: Tensor, allowed: Tensor | None
    ) -> ProcessedLogits:
        if inputs.plain and allowed is None:
            return ProcessedLogits(logits_LV, inputs.metadata, None)
        index, (_, rows_S), before_LK = batch.index, batch.sampled, None
        if index.num_logits > len(rows_S) and self.sampler.looks_back(rows_S):
            before_LK = drafts_SK.index_select(0, index.owners)
            slots_K = torch.arange(self.num_drafts, device=self.device)
            before_LK = before_LK.where(slots_K < index.num_before[:, None], -1)
        generated_L = self.num_generated(batch)[index.owner_L] + index.num_before_L
        return self.sampler.process(logits_LV, rows_S[index.owner_L], generated_L, before_LK, allowed)

    def _test(
        self, processed: ProcessedLogits, drafts_SK: Tensor, starts: Tensor, positions_S: Tensor, temperature_S: Tensor
    ) -> RejectionOutput:
        """Test the drafts of S requests, -1 for none. Can be captured. starts: (S + 1,) first row of logits of each
        request, and the number of rows. positions_S: position of the token that each request's first row samples.
        """
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
            vocab=self.sampler.vocab,
            greedy=metadata is None,
            metadata=metadata,
        )

    def record(self, metadata: CommonAttentionMetadata, hidden_TD: Tensor, kind: str) -> Tensor:
        """Verify the staged requests of a padded batch, and sample. Can be captured.
        kind: the parameters to support: GREEDY (all rows are greedy), UNTRUNCATED (no top-k, top-p or min-p) or
        TRUNCATED (any). Returns `SampledStep.packed`. Other results go to the buffers `rows`.
        """
        rows, num_reqs = self.rows, metadata.num_reqs
        drafts_NK, values_N4, sampling = rows.drafts(num_reqs), rows.values[:num_reqs], None
        if kind != GREEDY:
            length = metadata.num_tokens // num_reqs
            values_T4 = values_N4.unsqueeze(1).expand(-1, length, -1).reshape(-1, values_N4.shape[1])
            sampling = SamplingMetadata.unknown(values_T4, truncates=kind == TRUNCATED)
        emitted = self._test(
            ProcessedLogits(self.model.logits(hidden_TD), sampling),
            drafts_NK,
            metadata.query_start_loc,
            metadata.num_computed_tokens[:num_reqs].long() + 1,
            values_N4[:, 0],
        )
        rows.emit(emitted.tokens, emitted.num_emitted)
        return _pack(emitted, emitted.bad.long(), drafts_NK)

    def outcome_of(self, batch: StepBatch, packed: Tensor) -> SampledStep:
        """Return the outcome of `record` for `batch`, from its result `packed`. On a CPU the values are copied."""
        packed_S = packed[: len(batch.rows)]
        packed_S = packed_S.clone() if self.device.type == "cpu" else packed_S
        return SampledStep(packed_S, self.rows.num_valid[: len(batch.rows)] if self.num_drafts else None)


def draw(sampler: Sampler, processed: ProcessedLogits, seeds_S: Tensor, positions_S: Tensor) -> SampledTokens:
    """Sample one token for each of S rows of logits, on the device. seeds_S: ignored by greedy rows. positions_S: int64
    index of the token in its sequence. The request of a row with `SampledTokens.bad` set must end with an error.
    """
    if processed.metadata is None:
        return argmax(processed.logits, sampler.shard)
    return sample(processed.logits, processed.metadata, Keys(seeds_S, positions_S), vocab=sampler.vocab)


def _pack(emitted: RejectionOutput, bad: Tensor, drafts: Tensor) -> Tensor:
    return torch.cat((emitted.num_emitted.unsqueeze(1), bad.unsqueeze(1), emitted.tokens, drafts), 1)
