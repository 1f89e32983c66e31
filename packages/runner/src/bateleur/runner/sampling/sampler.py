"""From logits to token ids: penalties, what is drawn from, and the draw, vectorised over rows, on the device.

Which processing a step needs is decided from host arrays alone, so a step never waits for the device, and an
all-greedy batch costs one argmax. A row is only ever touched by its own parameters: its token has the same
bits whatever runs beside it.

Legend for shapes: R rows of this step, M rows of the request table, S rows of the step that need a treatment,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.eagle import Drawn, Keys, Lanes, Penalties, SamplingMetadata, VocabShard, argmax, sample
from bateleur.runner.sampling.logprobs import Logprobs, logprobs_of
from bateleur.runner.sampling.token_rules import TokenRules
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.utils.device import DeviceCopies, upload

_FLOAT32 = np.finfo(np.float32)
_TEMPERATURE, _LOG_MIN_P, _TOP_K, _TOP_P, _REPETITION, _FREQUENCY, _PRESENCE = range(7)
_NEUTRAL = np.array([0.0, -np.inf, 0.0, 1.0, 1.0, 0.0, 0.0], dtype=np.float32)


class Draws(NamedTuple):
    """How S rows draw: what depends on their requests alone.

    bare: whether nothing but their law concerns it: no rules of tokens, no penalties, and nobody asked for log
        probabilities; then `law` is that of their L rows of logits, None if all are greedy.
    seeds, temperature: (S,) int64 and float32, on the device.
    """

    bare: bool
    seeds: Tensor
    temperature: Tensor
    metadata: SamplingMetadata | None


class Processed(NamedTuple):
    """What tokens are drawn from.

    logits: (R, V) float32; the temperature and truncation are left to the law, and on CUDA penalties, too.
    law: of every row; None if every row is greedy, as the host knows, and penalties are none of the law's.
    empty: (R,) bool, rows in which no token may be drawn; None where nothing forbids tokens.
    """

    logits: Tensor
    metadata: SamplingMetadata | None
    empty: Tensor | None = None


class SamplingState:
    """The sampling parameters of the running requests, by row of the request table.

    max_rows: rows of the table (M). vocab_size: V of the model. device: where logits come from. part: whose tokens they
        are of, if not of all; then V is theirs below, but for `allowed`.
    The penalties' counts, M x V of 5 bytes, are allocated when the first request needs them.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device | str, shard: VocabShard | None = None
    ) -> None:
        self._device = torch.device(device)
        self._upload = partial(upload, device=self._device)
        self._kept = DeviceCopies(self._device)
        self.vocab_size = vocab_size
        self._part = shard
        self._tokens = (0, vocab_size) if shard is None else (shard.first, shard.end)
        self.lanes = Lanes.of(vocab_size if shard is None else shard, self._device)
        self._rules = TokenRules(max_rows, vocab_size, self._device, shard)
        # The host holds the parameters: a step sends those of its rows, if they are not those of the last.
        self._values = np.tile(_NEUTRAL, (max_rows, 1))
        self._seeds = np.zeros(max_rows, dtype=np.int64)
        self._num_logprobs = np.full(max_rows, -1, dtype=np.int64)
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
        """Give `row` to a request, new or resumed.

        seed: int64, the engine's choice where `params.seed` is None.
        output_token_ids: what a resumed request has generated already.
        stop_token_ids: every id that would end the request; masked until `params.min_tokens` are there.
        bad_words: token ids of each way to write the words in `params.bad_words`.
        Token ids must be in [0, V): the caller refuses others when the request arrives.
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
        self._rules.admit(row, params, output_token_ids, stop_token_ids, bad_words)
        if penalties != (1.0, 0.0, 0.0):
            self._penalised[row] = True
            self._count(row, prompt_token_ids, output_token_ids)

    def release(self, row: int) -> None:
        """Forget the request in `row`; harmless if there is none."""
        self._values[row] = _NEUTRAL
        self._num_logprobs[row] = -1
        self._rules.release(row)
        self._penalised[row] = self._truncated[row] = False

    def forget_counts(self) -> None:
        """Give back the memory of penalties, where no row has any; the next request that does takes it anew."""
        assert not self._penalised.any()
        self._output_counts = self._prompt_mask = None

    def process(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        num_output_tokens: NDArray[np.int64],
        before: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> Processed:
        """All but the draw, in vLLM's order: what rules of tokens forbid and add (`TokenRules`), repetition, frequency,
        presence; then temperature, min_p, top_k and top_p, which are said and not done.

        logits: (R, V) float32 on the device; not written to.
        rows: (R,) host, rows of the request table; a request with drafts has one row of logits for each token, which
            are neighbours.
        num_output_tokens: (R,) host, tokens the requests have generated so far, drafts before the row included.
        before: (R, K) int64 on the device, the drafts before the row, -1 where there is none, for bad words and
            penalties.
        allowed: (R, ceil(V / 32)) int32 on the device, bits of the tokens that may be drawn, see `masks.forbid_`.
        """
        processed, empty = self._rules.apply(logits, rows, num_output_tokens, before, allowed)
        penalties, penalised = None, np.flatnonzero(self._penalised[rows])
        if penalised.size and logits.is_cuda:
            penalties = self._penalties(rows, before)
        elif penalised.size:
            processed = logits.clone() if processed is logits else processed
            index = self._kept("penalised", penalised)
            drafts = None if before is None else before.index_select(0, index)
            some = self._penalties(rows[penalised], drafts).apply(processed.index_select(0, index))
            processed.index_copy_(0, index, some)
        values = self._values[rows, :_REPETITION]
        if not values[:, _TEMPERATURE].any() and penalties is None:
            return Processed(processed, None, empty)
        return Processed(processed, SamplingMetadata(values, self._kept("values", values), penalties), empty)

    def draw(self, processed: Processed, rows: NDArray[np.int64], positions: Tensor) -> Drawn:
        """Draw one token for each of R rows, all on the device; in a bad row that request must end with an error.

        positions: (R,) int64 on the device, index in its sequence of the token being drawn.
        What is emitted in the end goes to `count`.
        """
        if processed.metadata is None:
            return argmax(processed.logits, self._part)
        keys = Keys(self._kept("seeds", self._seeds[rows]), positions)
        return sample(processed.logits, processed.metadata, keys, lanes=self.lanes)

    def looks_back(self, rows: NDArray[np.int64]) -> bool:
        """Whether what `process` does in these rows depends on the drafts `before` them."""
        return bool(self._penalised[rows].any()) or self._rules.looks_back(rows)

    def scores(self, rows: NDArray[np.int64]) -> bool:
        """Whether a request in these rows asked for log probabilities."""
        return bool((self._num_logprobs[rows] >= 0).any())

    def logprobs(self, logits: Tensor, token_ids: Tensor, rows: NDArray[np.int64]) -> Logprobs | None:
        """Log probabilities of (R,) tokens under the raw logits, if a request in `rows` asked for any."""
        wanted = int(self._num_logprobs[rows].max(initial=-1))
        if wanted < 0:
            return None
        return logprobs_of(logits, token_ids, wanted, self._part)

    def _penalties(self, rows: NDArray[np.int64], before: Tensor | None) -> Penalties:
        assert self._output_counts is not None
        assert self._prompt_mask is not None
        if before is not None and self._part is not None:
            lane, here = self._part.lanes(before)
            before = lane.masked_fill_(~here, -1)
        values = self._kept("penalties", self._values[rows, _REPETITION:])
        owners = self._kept("penalised rows", rows)
        return Penalties(values, owners, self._output_counts, self._prompt_mask, before)

    def count(self, rows: NDArray[np.int64], token_ids: Tensor) -> None:
        """Tokens that were emitted: (R, J) int64 on the device, -1 where there is none.

        Penalties and bad words care.
        """
        self._rules.count(rows, token_ids)
        chosen = np.flatnonzero(self._penalised[rows])
        if not chosen.size:
            return
        assert self._output_counts is not None
        drawn_SJ = token_ids.index_select(0, self._kept("counted", chosen))
        if self._part is None:
            lane_SJ, here_SJ = drawn_SJ.clamp_min(0), drawn_SJ.ge(0)
        else:
            lane_SJ, here_SJ = self._part.lanes(drawn_SJ)
        cells_SJ = self._kept("counts", rows[chosen] * self._output_counts.shape[1]).unsqueeze(1) + lane_SJ
        self._output_counts.view(-1).scatter_add_(0, cells_SJ.flatten(), here_SJ.to(torch.int32).flatten())

    def plan_draws(self, rows: NDArray[np.int64], repeats: NDArray[np.int64]) -> Draws:
        """How these rows (S,) draw, of which the L rows of logits `repeats` (L,) belong to the one of that number."""
        bare = self.only_draws(rows, np.zeros(len(rows), np.int64))
        values, metadata = self._values[rows, :_REPETITION], None
        if bare and values[:, _TEMPERATURE].any():
            metadata = SamplingMetadata(values[repeats], self._kept("values", values[repeats]))
        return Draws(bare, *self.noise_keys(rows), metadata)

    def hinge_on_length(
        self, rows: NDArray[np.int64], least: NDArray[np.int32], most: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """(R,) whether what is drawn in these rows may depend on which of `least` to `most` (R,) generated tokens
        there are before it.
        """
        return self._rules.hinge_on_length(rows, least, most)

    def only_draws(self, rows: NDArray[np.int64], num_output_tokens: NDArray[np.int64]) -> bool:
        """Whether tokens of these rows are drawn from the logits as they are, and nobody asked what these are."""
        others = self._penalised[rows].any() or self.scores(rows)
        return not (others or self._rules.concern(rows, num_output_tokens))

    def draws_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """What rows draw with: seeds (R,), and the values of their `SamplingMetadata` (R, 4)."""
        return self._seeds[rows], self._values[rows, :_REPETITION]

    def all_greedy(self, rows: NDArray[np.int64]) -> bool:
        """Whether no request in these rows samples, as the host knows."""
        return not self._values[rows, _TEMPERATURE].any()

    def truncates(self, rows: NDArray[np.int64]) -> bool:
        """Whether a request in these rows draws from less than the whole vocabulary, as the host knows."""
        return bool(self._truncated[rows].any())

    def noise_keys(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Seeds (R,) int64 and temperatures (R,) float32 of requests, on the device, where nobody writes to them."""
        seeds = self._kept("seeds", self._seeds[rows])
        return seeds, self._kept("temperatures", self._values[rows, _TEMPERATURE])

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
