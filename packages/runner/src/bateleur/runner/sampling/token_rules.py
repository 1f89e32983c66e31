"""Token rules: grammar masks, `allowed_token_ids`, `bad_words`, `min_tokens` and `logit_bias`, for whole batches.

A forbidden token gets the logit -inf whatever the other rules are, so their order does not matter.
"""

# Shape letters: R rows of logits, M rows of the request table, V vocabulary, W words of 32 bits.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.eagle import VocabShard
from bateleur.runner.sampling.biases import Biases
from bateleur.runner.sampling.masks import forbid_, mask_words, words_of
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.utils.device import DeviceCopies, upload


class TokenRules:
    """Token rules of running requests, by row of the request table.

    max_rows: rows of the table (M). vocab_size: V. device: device of the logits. shard: vocabulary shard of the logits.
    The bits of allowed tokens, M x V / 8 bytes, are allocated when the first request needs them.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, shard: VocabShard | None = None) -> None:
        self._device = device
        self._upload = partial(upload, device=device)
        self._copies = DeviceCopies(device)
        self._vocab_size = vocab_size
        self._never = torch.tensor(-torch.inf, device=device)
        self._min_tokens = np.zeros(max_rows, dtype=np.int64)
        self._stop_ids = np.zeros((max_rows, 1), dtype=np.int64)
        self._limited = np.zeros(max_rows, dtype=np.bool_)
        self._biased = np.zeros(max_rows, dtype=np.bool_)
        self._allowed: Tensor | None = None  # (M, W) int32, all bits in rows that are not limited
        self._shard = shard
        self._first, self._end = (0, vocab_size) if shard is None else (shard.first, shard.end)
        self._biases = Biases(max_rows, (self._first, self._end), device)

    def admit(
        self,
        row: int,
        params: SamplingParams,
        output_token_ids: Sequence[int],
        stop_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
    ) -> None:
        """Set the token rules of table row `row` for a request; see `Sampler.admit` for the arguments."""
        self.release(row)
        if params.min_tokens and stop_token_ids:
            self._min_tokens[row] = params.min_tokens
            if (more := len(stop_token_ids) - self._stop_ids.shape[1]) > 0:
                self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, more)), mode="edge")
            self._stop_ids[row] = stop_token_ids[0]  # fills the rest of the row
            self._stop_ids[row, : len(stop_token_ids)] = stop_token_ids
        if params.allowed_token_ids is not None:
            self._limit(row, params.allowed_token_ids)
        self._biased[row] = self._biases.admit(row, params.logit_bias or {}, bad_words, output_token_ids)

    def release(self, row: int) -> None:
        """Clear table row `row`, which may be free."""
        self._min_tokens[row] = 0
        if self._limited[row]:
            assert self._allowed is not None
            self._allowed[row].fill_(-1)
            self._limited[row] = False
        if self._biased[row]:
            self._biases.release(row)
            self._biased[row] = False

    def apply(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        num_output_tokens: NDArray[np.int64],
        before: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits after token rules, and in which rows (R,) no token is allowed.

        Arguments as in `Sampler.process`. Without rules it returns the given logits and None.
        """
        early = np.flatnonzero(num_output_tokens < self._min_tokens[rows])
        if self._limited[rows].any():
            assert self._allowed is not None
            own = self._allowed.index_select(0, self._copies("limited", rows))
            allowed = own if allowed is None else own & allowed
        biased = self._biased[rows].any()
        if not (early.size or biased) and allowed is None:
            return logits, None
        ruled = logits.clone(memory_format=torch.contiguous_format)
        if allowed is not None:
            forbid_(ruled, allowed, self._first)
        if early.size:
            lanes = self._stop_ids[rows[early]] - self._first
            row, column = np.nonzero((lanes >= 0) & (lanes < self._end - self._first))
            places = self._copies("early", early[row]), self._copies("stop_ids", lanes[row, column])
            # With a number instead of a tensor, some versions of torch wait for the device.
            ruled.index_put_(places, self._never)
        if biased:
            self._biases.add_(ruled, rows, before)
        best = ruled.amax(dim=-1)
        if self._shard is not None:
            best = self._shard.best(best)
        return ruled, best == -torch.inf

    def concern(self, rows: NDArray[np.int64], num_output_tokens: NDArray[np.int64]) -> bool:
        """Return whether one of these requests has a rule that acts after so many generated tokens."""
        return bool(
            (num_output_tokens < self._min_tokens[rows]).any() or self._limited[rows].any() or self._biased[rows].any()
        )

    def looks_back(self, rows: NDArray[np.int64]) -> bool:
        """Return whether `apply` reads the drafts `before` for one of these requests."""
        return bool(self._biased[rows].any())

    def depends_on_length(
        self, rows: NDArray[np.int64], least: NDArray[np.int32], most: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Return (R,) bool: whether the rules may differ between `least` and `most` (R,) generated tokens."""
        needed = self._min_tokens[rows]
        return (least < needed) & (needed <= most)

    def count(self, rows: NDArray[np.int64], token_ids: Tensor) -> None:
        """Append emitted tokens for bad words. token_ids: (R, J) int64 on the device, -1 for no token."""
        self._biases.count(rows, token_ids)

    def _limit(self, row: int, token_ids: Sequence[int]) -> None:
        if self._allowed is None:
            shape = (len(self._limited), mask_words(self._vocab_size))
            self._allowed = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        words = self._upload(words_of(token_ids, self._vocab_size))
        self._allowed[row].copy_(words, non_blocking=True)
        self._limited[row] = True
