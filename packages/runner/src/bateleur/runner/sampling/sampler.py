"""The sampler: sampling parameters of all requests, and the processing of logits by them, vectorised over rows.

Arrays on the host decide which processing a step needs. So a step never waits for the device, and a greedy batch runs
only one argmax. The token of a request does not depend on the other requests of the batch.

Legend for shapes: R rows of logits of this step, M rows of the request table, S rows of the step that need a processing
step, V vocabulary.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bateleur.eagle import HashedVocab, Penalties, SamplingMetadata, VocabShard
from bateleur.runner.sampling.logprobs import Logprobs, logprobs_of
from bateleur.runner.sampling.token_rules import TokenRules
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.utils.arrays import Float32s, Int64s
from bateleur.runner.utils.device import DeviceCopies, upload

_FLOAT32 = np.finfo(np.float32)
_TEMPERATURE, _LOG_MIN_P, _TOP_K, _TOP_P, _REPETITION, _FREQUENCY, _PRESENCE = range(7)
_NEUTRAL = np.array([0.0, -np.inf, 0.0, 1.0, 1.0, 0.0, 0.0], dtype=np.float32)


class ProcessedLogits(NamedTuple):
    """Logits after token rules and penalties.
    logits: (R, V) float32, before temperature and truncation, and on CUDA before penalties. metadata: sampling
    parameters of every row; None if all rows are greedy and penalties are applied. empty: (R,) bool, rows in which no
    token is allowed; None if no token is forbidden.
    """

    logits: Tensor
    metadata: SamplingMetadata | None
    empty: Tensor | None = None


class Sampler:
    """Holds the sampling parameters of running requests, by row of the request table, and processes logits by them.
    `RejectionSampler` samples tokens from the result.

    max_rows: rows of the table (M). vocab_size: V of the model. device: device of the logits. shard: vocabulary shard
        of the logits, None for the whole vocabulary. With a shard, V is its size, except in the argument `allowed`.
    Token counts for penalties (5 * M * V bytes) are allocated when the first request needs them.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device | str, shard: VocabShard | None = None
    ) -> None:
        self._device = torch.device(device)
        self._upload = partial(upload, device=self._device)
        self._copies = DeviceCopies(self._device)
        self.vocab_size = vocab_size
        self.shard = shard
        self._tokens = (0, vocab_size) if shard is None else (shard.first, shard.end)
        self.vocab = HashedVocab.of(vocab_size if shard is None else shard, self._device)
        self.rules = TokenRules(max_rows, vocab_size, self._device, shard)
        # Parameters are on the host; a step sends those of its rows if they have changed.
        self._values = np.tile(_NEUTRAL, (max_rows, 1))
        self._seeds = np.zeros(max_rows, dtype=np.int64)
        self._num_logprobs = np.full(max_rows, -1, dtype=np.int64)
        self._named = np.full((max_rows, 0), -1)  # logprob_token_ids of rows, -1 after the last
        self._penalised = np.zeros(max_rows, dtype=np.bool_)
        self._truncated = np.zeros(max_rows, dtype=np.bool_)
        self._output_counts: Tensor | None = None  # (M, V) int32
        self._prompt_mask: Tensor | None = None  # (M, V) bool

    def admit(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """Set the sampling parameters of table row `row` for a new or resumed request.
        seed: int64, chosen by the engine if `params.seed` is None. output_token_ids: tokens that a resumed request has
        generated. stop_token_ids: ids that end the request; forbidden until `params.min_tokens` are generated.
        bad_words: token ids of each way to write the words in `params.bad_words`. Token ids must be in [0, V); the
        caller checks that.
        """
        self.release(row)
        values = self._values[row]
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        values[_REPETITION:] = np.clip(penalties, -2.0, _FLOAT32.max)
        values[_REPETITION] = max(values[_REPETITION], _FLOAT32.tiny)
        if not params.greedy:
            top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
            log_min_p = math.log(params.min_p) if params.min_p else -math.inf
            drawing = (params.temperature, log_min_p, top_k, max(params.top_p, _FLOAT32.tiny))
            values[:_REPETITION] = np.minimum(np.array(drawing), _FLOAT32.max)
            self._truncated[row] = top_k < self.vocab_size or log_min_p > -math.inf or values[_TOP_P] < 1
        self._seeds[row] = seed
        self._num_logprobs[row] = -1 if params.logprobs is None else min(params.logprobs, self.vocab_size)
        named = params.logprob_token_ids or ()
        if (more := len(named) - self._named.shape[1]) > 0:
            self._named = np.pad(self._named, ((0, 0), (0, more)), constant_values=-1)
        self._named[row, : len(named)] = named
        self.rules.admit(row, params, output_token_ids, stop_token_ids, bad_words)
        if penalties != (1.0, 0.0, 0.0):
            self._penalised[row] = True
            self._count(row, prompt_token_ids, output_token_ids)

    def release(self, row: int) -> None:
        """Remove the parameters in table row `row`, if it has any."""
        self._values[row] = _NEUTRAL
        self._num_logprobs[row] = self._named[row] = -1
        self.rules.release(row)
        self._penalised[row] = self._truncated[row] = False

    def forget_counts(self) -> None:
        """Free the memory of penalties. No running request may have penalties."""
        assert not self._penalised.any()
        self._output_counts = self._prompt_mask = None

    def process(
        self,
        logits: Tensor,
        rows: Int64s,
        num_output_tokens: Int64s,
        before: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> ProcessedLogits:
        """Apply token rules (`TokenRules`), then repetition, frequency and presence penalties, in vLLM's order. The
        result contains temperature, min_p, top_k and top_p, which are applied when a token is sampled.

        logits: (R, V) float32 on the device; not written to.
        rows: (R,) row of the request table for each row of logits. A request with drafts has adjacent rows, one per
        token.
        num_output_tokens: (R,) generated tokens of the request, including drafts before the row.
        before: (R, K) int64 on the device, drafts before the row, -1 for no draft; for bad words and penalties.
        allowed: (R, ceil(V / 32)) int32 on the device, bits of the allowed tokens, see `forbid_`.
        """
        processed, empty = self.rules.apply(logits, rows, num_output_tokens, before, allowed)
        penalties, penalised = None, np.flatnonzero(self._penalised[rows])
        if penalised.size and logits.is_cuda:
            penalties = self._penalties(rows, before)
        elif penalised.size:
            processed = logits.clone() if processed is logits else processed
            index = self._copies("penalised", penalised)
            drafts = None if before is None else before.index_select(0, index)
            some = self._penalties(rows[penalised], drafts).apply(processed.index_select(0, index))
            processed.index_copy_(0, index, some)
        values = self._values[rows, :_REPETITION]
        if not values[:, _TEMPERATURE].any() and penalties is None:
            return ProcessedLogits(processed, None, empty)
        return ProcessedLogits(processed, SamplingMetadata(values, self._copies("values", values), penalties), empty)

    def looks_back(self, rows: Int64s) -> bool:
        """Return whether `process` reads the drafts `before` for these requests."""
        return bool(self._penalised[rows].any() or self.rules.biases.rows[rows].any())

    def scores(self, rows: Int64s) -> bool:
        """Return whether one of these requests needs log probabilities."""
        return bool((self._num_logprobs[rows] >= 0).any())

    def logprobs(self, logits: Tensor, token_ids: Tensor, rows: Int64s) -> Logprobs | None:
        """Return log probabilities of (R,) tokens under the raw logits; None if no request in `rows` (R,) needs any."""
        wanted = int(self._num_logprobs[rows].max(initial=-1))
        if wanted < 0:
            return None
        named = self._named[rows]
        named = named[:, : (named >= 0).sum(axis=1).max(initial=0)]
        return logprobs_of(logits, token_ids, wanted, self.shard, self._copies("named", named) if named.size else None)

    def _penalties(self, rows: Int64s, before: Tensor | None) -> Penalties:
        assert self._output_counts is not None
        assert self._prompt_mask is not None
        if before is not None and self.shard is not None:
            lane, here = self.shard.local_indices(before)
            before = lane.masked_fill_(~here, -1)
        values = self._copies("penalties", self._values[rows, _REPETITION:])
        owners = self._copies("penalised rows", rows)
        return Penalties(values, owners, self._output_counts, self._prompt_mask, before)

    def count(self, rows: Int64s, token_ids: Tensor) -> None:
        """Record emitted tokens for penalties and bad words. token_ids: (R, n) int64 on the device, -1 for no token."""
        self.rules.biases.count(rows, token_ids)
        chosen = np.flatnonzero(self._penalised[rows])
        if not chosen.size:
            return
        assert self._output_counts is not None
        drawn_SJ = token_ids.index_select(0, self._copies("counted", chosen))
        if self.shard is None:
            lane_SJ, here_SJ = drawn_SJ.clamp_min(0), drawn_SJ.ge(0)
        else:
            lane_SJ, here_SJ = self.shard.local_indices(drawn_SJ)
        cells_SJ = self._copies("counts", rows[chosen] * self._output_counts.shape[1]).unsqueeze(1) + lane_SJ
        self._output_counts.view(-1).scatter_add_(0, cells_SJ.flatten(), here_SJ.to(torch.int32).flatten())

    def is_plain(self, rows: Int64s, num_output_tokens: Int64s) -> bool:
        """Return whether these requests have no token rules, penalties or log probabilities.
        num_output_tokens: numbers of generated tokens, on which `min_tokens` depends.
        """
        others = self._penalised[rows].any() or self.scores(rows)
        return not (others or self.rules.concern(rows, num_output_tokens))

    def values_of(self, rows: Int64s) -> tuple[Int64s, Float32s]:
        """Return seeds (R,) of these requests, and their temperature, log(min_p), top_k and top_p (R, 4)."""
        return self._seeds[rows], self._values[rows, :_REPETITION]

    def all_greedy(self, rows: Int64s) -> bool:
        """Return whether all these requests are greedy."""
        return not self._values[rows, _TEMPERATURE].any()

    def truncates(self, rows: Int64s) -> bool:
        """Return whether one of these requests uses min_p, top_k or top_p."""
        return bool(self._truncated[rows].any())

    def noise_keys(self, rows: Int64s) -> tuple[Tensor, Tensor]:
        """Return seeds (R,) int64 and temperatures (R,) float32 of requests on the device; do not write to them."""
        seeds = self._copies("seeds", self._seeds[rows])
        return seeds, self._copies("temperatures", self._values[rows, _TEMPERATURE])

    def _count(self, row: int, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        if self._output_counts is None or self._prompt_mask is None:
            first, end = self._tokens
            shape = (len(self._values), end - first)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self._device)
        counts = np.bincount(np.asarray(output_token_ids, dtype=np.int64), minlength=self.vocab_size)
        mask = np.zeros(self.vocab_size, dtype=np.bool_)
        mask[np.asarray(prompt_token_ids, dtype=np.int64)] = True
        own = slice(*self._tokens)
        self._output_counts[row].copy_(self._upload(counts[own].astype(np.int32)))
        self._prompt_mask[row].copy_(self._upload(mask[own]))
