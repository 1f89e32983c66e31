"""Token rules: grammar masks, `allowed_token_ids`, `bad_words`, `min_tokens` and `logit_bias`, for whole batches.

A forbidden token gets the logit -inf whatever the other rules are, so their order does not matter.

Biases are values added to logits: always (`logit_bias`), or after certain tokens. A bad word adds -inf to its last
token if the tokens before it have just been generated. Both are entries of one table for all requests; a step adds all
of them at once.
"""

# Shape letters: R or L rows of logits, M rows of the request table, V vocabulary, W words of 32 bits, N entries of
# biases, J places of a request, P tokens of a prefix, K drafts at most.

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bateleur.eagle import VocabShard
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.utils.arrays import Bools, Float32s, Int32s, Int64s
from bateleur.runner.utils.device import DeviceCopies, upload

_ANY, _NONE = -2, -1
"""In a prefix: any token. In generated tokens: none yet."""
Words = Sequence[Sequence[int]]
"""Token ids of bad words."""


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
        self._allowed: Tensor | None = None  # (M, W) int32, all bits in rows that are not limited
        self._shard = shard
        self._first, self._end = (0, vocab_size) if shard is None else (shard.first, shard.end)
        self.biases = Biases(max_rows, (self._first, self._end), device)

    def admit(
        self, row: int, params: SamplingParams, output: Sequence[int], stops: Sequence[int], words: Words
    ) -> None:
        """Set the rules of table row `row`. output: generated tokens. stops: stop ids. words: ids of each bad word."""
        self.release(row)
        if params.min_tokens and stops:
            self._min_tokens[row] = params.min_tokens
            if (more := len(stops) - self._stop_ids.shape[1]) > 0:
                self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, more)), mode="edge")
            self._stop_ids[row] = stops[0]  # fills the rest of the row
            self._stop_ids[row, : len(stops)] = stops
        if params.allowed_token_ids is not None:
            if self._allowed is None:
                shape = (len(self._limited), mask_words(self._vocab_size))
                self._allowed = torch.full(shape, -1, dtype=torch.int32, device=self._device)
            words_W = self._upload(words_of(params.allowed_token_ids, self._vocab_size))
            self._allowed[row].copy_(words_W, non_blocking=True)
            self._limited[row] = True
        self.biases.admit(row, params.logit_bias or {}, words, output)

    def release(self, row: int) -> None:
        """Remove the token rules in table row `row`, if it has any."""
        self._min_tokens[row] = 0
        if self._limited[row]:
            assert self._allowed is not None
            self._allowed[row].fill_(-1)
            self._limited[row] = False
        self.biases.release(row)

    def apply(
        self, logits: Tensor, rows: Int64s, num_output_tokens: Int64s, before: Tensor | None, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits after token rules, and in which rows (R,) no token is allowed.
        Arguments as in `Sampler.process`. Without rules it returns the given logits and None.
        """
        early = np.flatnonzero(num_output_tokens < self._min_tokens[rows])
        if self._limited[rows].any():
            assert self._allowed is not None
            own = self._allowed.index_select(0, self._copies("limited", rows))
            allowed = own if allowed is None else own & allowed
        biased = self.biases.rows[rows].any()
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
            self.biases.add_(ruled, rows, before)
        best = ruled.amax(dim=-1)
        if self._shard is not None:
            best = self._shard.best(best)
        return ruled, best == -torch.inf

    def concern(self, rows: Int64s, num_output_tokens: Int64s) -> bool:
        """Return whether a token rule applies to one of these requests at its number of generated tokens."""
        early = (num_output_tokens < self._min_tokens[rows]).any()
        return bool(early or self._limited[rows].any() or self.biases.rows[rows].any())

    def depends_on_length(self, rows: Int64s, min_lengths: Int32s, max_lengths: Int32s) -> Bools:
        """Return (R,) bool: whether rules may change between `min_lengths` and `max_lengths` generated tokens."""
        needed = self._min_tokens[rows]
        return (min_lengths < needed) & (needed <= max_lengths)


class _Entries(NamedTuple):
    """N logit biases of one request, on the host: a value is added to its token after its prefix was generated.
    tokens, values: (N,). prefixes: (N, P) token ids, padded with `_ANY` on the left.
    """

    tokens: Int64s
    values: Float32s
    prefixes: Int64s


class _Table(NamedTuple):
    """Logit biases of all requests whose prefixes (`_Entries.prefixes`) have one padded length, on the device. owners:
    (N,) int64 request-table row of each bias.
    """

    owners: Tensor
    tokens: Tensor
    values: Tensor
    prefixes: Tensor


class Biases:
    """Logit biases and bad words of the running requests, by row of the request table.
    max_rows: rows of the table (M). tokens: first token of the logits, and one after the last. device: device of the
    logits. rows: (M,) bool, rows that have biases, including those for tokens of other shards.
    """

    def __init__(self, max_rows: int, tokens: tuple[int, int], device: torch.device) -> None:
        self.rows = np.zeros(max_rows, np.bool_)
        self._upload = partial(upload, device=device)
        self._copies = DeviceCopies(device)
        self._first, self._end = tokens
        self._entries: dict[int, list[_Entries]] = {}
        self._tables: list[_Table] | None = None
        """Tables of all entries; None after a change."""
        self._follows = np.zeros(max_rows, np.bool_)
        """Rows with prefixes."""
        self._tails = torch.full((max_rows, 0), _NONE, dtype=torch.int64, device=device)
        """(M, P) the last tokens that each of these rows has generated."""

    def admit(self, row: int, bias: Mapping[int, float], words: Words, output: Sequence[int]) -> None:
        """Set the biases of table row `row`.
        bias: value by token. words: token ids of each bad word. output: generated tokens.
        """
        self.release(row)
        by_width: dict[int, list[Sequence[int]]] = defaultdict(list)
        for word in words:
            by_width[_width(len(word) - 1)].append(word)
        entries = [_words(width, each) for width, each in by_width.items()]
        if bias:
            tokens = np.fromiter(bias, np.int64, len(bias))
            values = np.fromiter(bias.values(), np.float32, len(bias))
            entries.append(_Entries(tokens, values, np.empty((len(bias), 0), np.int64)))
        if entries:
            self._entries[row], self._tables = [self._own(each) for each in entries], None
            self.rows[row] = True
        if longest := max(by_width, default=0):
            self._follow(row, longest, output)

    def release(self, row: int) -> None:
        """Remove the biases in table row `row`, if it has any."""
        if self._entries.pop(row, None) is not None:
            self._tables = None
        self.rows[row] = self._follows[row] = False

    def add_(self, logits: Tensor, rows: Int64s, before: Tensor | None) -> None:
        """Add the biases of `rows` to the logits in place; see `Sampler.process` for the arguments.
        logits: contiguous. The rows of a request are adjacent.
        """
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        counts = np.diff(starts, append=len(rows))
        spans_2M = np.zeros((2, len(self._follows)), np.int64)
        spans_2M[:, rows[starts]] = starts, counts
        first_M, count_M = self._copies("spans", spans_2M)
        place_J = torch.arange(int(counts.max()), device=logits.device)
        for table in self._on_device():
            first_N1, count_N1 = (each_M[table.owners].unsqueeze(1) for each_M in (first_M, count_M))
            applies_NJ = place_J < count_N1
            if table.prefixes.shape[1]:
                last_N = (first_N1 + count_N1 - 1).clamp_min_(0).squeeze(1)
                drafts = None if before is None else before[last_N, : len(place_J) - 1]
                applies_NJ &= self._matches(table, drafts)
            # Other entries add 0, in some row.
            cells_NJ = (first_N1 + place_J).clamp_max_(len(logits) - 1) * logits.shape[1]
            cells_NJ += table.tokens.unsqueeze(1)
            values_NJ = table.values.unsqueeze(1).where(applies_NJ, 0.0)
            logits.view(-1).scatter_add_(0, cells_NJ.flatten(), values_NJ.flatten())

    def count(self, rows: Int64s, token_ids: Tensor) -> None:
        """Record emitted tokens for bad words. token_ids: (R, n) int64 on the device, -1 for no token."""
        chosen = np.flatnonzero(self._follows[rows])
        if not chosen.size:
            return
        table_rows = self._copies("followed rows", rows[chosen])
        drawn = token_ids.index_select(0, self._copies("followed", chosen))
        known = torch.cat((self._tails.index_select(0, table_rows), drawn), 1)
        last_P = torch.arange(self._tails.shape[1], device=known.device)
        tails = known.gather(1, drawn.ge(0).sum(1, keepdim=True) + last_P)
        self._tails.index_copy_(0, table_rows, tails)

    def _own(self, entries: _Entries) -> _Entries:
        """Return the biases for tokens of this vocabulary shard, with tokens counted from its first one."""
        here = (entries.tokens >= self._first) & (entries.tokens < self._end)
        return _Entries(entries.tokens[here] - self._first, entries.values[here], entries.prefixes[here])

    def _matches(self, table: _Table, drafts: Tensor | None) -> Tensor:
        """Return (biases, 1 + drafts) bool: whether the tokens before each draft, and before the token after the last
        draft, end with the prefix of the bias.
        """
        width = table.prefixes.shape[1]
        known = self._tails[:, self._tails.shape[1] - width :].index_select(0, table.owners)
        if drafts is not None:
            known = torch.cat((known, drafts), 1)
        prefixes_N1P = table.prefixes.unsqueeze(1)
        return ((known.unfold(1, width, 1) == prefixes_N1P) | (prefixes_N1P == _ANY)).all(2)

    def _follow(self, row: int, width: int, output: Sequence[int]) -> None:
        self._follows[row] = True
        if (more := width - self._tails.shape[1]) > 0:
            self._tails = torch.nn.functional.pad(self._tails, (more, 0), value=_NONE)
        tail = np.full(self._tails.shape[1], _NONE)
        known = output[-len(tail) :]
        tail[len(tail) - len(known) :] = known
        self._tails[row].copy_(self._upload(tail), non_blocking=True)

    def _on_device(self) -> list[_Table]:
        if self._tables is None:
            by_width: dict[int, list[tuple[int, _Entries]]] = defaultdict(list)
            for row, entries in self._entries.items():
                for each in entries:
                    by_width[each.prefixes.shape[1]].append((row, each))
            self._tables = [self._table(owned) for owned in by_width.values()]
        return self._tables

    def _table(self, owned: Sequence[tuple[int, _Entries]]) -> _Table:
        rows, entries = zip(*owned, strict=True)
        owners = np.repeat(rows, [len(each.tokens) for each in entries])
        fields = (np.concatenate(field) for field in zip(*entries, strict=True))
        return _Table(self._upload(owners), *map(self._upload, fields))


def _width(length: int) -> int:
    """Return the padded length of a prefix: the next power of two, because each length needs a `_Table`."""
    return 1 << (length - 1).bit_length() if length else 0


def _words(width: int, words: Words) -> _Entries:
    prefixes = np.full((len(words), width), _ANY)
    for prefix, word in zip(prefixes, words, strict=True):
        prefix[width - len(word) + 1 :] = word[:-1]
    tokens = np.array([word[-1] for word in words])
    return _Entries(tokens, np.full(len(words), -np.inf, np.float32), prefixes)


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in a mask of `vocab_size` tokens."""
    return -(-vocab_size // 32)


def words_of(token_ids: Sequence[int], vocab_size: int) -> Int32s:
    """Return a bit mask of these tokens, each in [0, vocab_size): `mask_words` words, see `forbid_`."""
    bits = np.zeros(32 * mask_words(vocab_size), np.uint8)
    bits[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def forbid_(logits_SV: Tensor, allowed_SW: Tensor, first: int = 0) -> None:
    """Set logits to -inf, in place, for tokens without a bit in `allowed_SW`, even if they are NaN.
    logits_SV: S rows of logits for the tokens from `first` on. allowed_SW: (S, words) int32 on the same device, bits of
    the whole vocabulary: token t is bit t % 32, counted from the lowest, of word t // 32.
    """
    num_tokens = logits_SV.shape[1]
    # Bytes take a quarter of the memory of words below.
    bytes_SB = allowed_SW.contiguous().view(torch.uint8)[:, first // 8 : -(-(first + num_tokens) // 8)]
    bit_8 = 1 << torch.arange(8, dtype=torch.uint8, device=logits_SV.device)
    allowed_SV = bytes_SB.unsqueeze(2).bitwise_and(bit_8).flatten(1)[:, first % 8 :][:, :num_tokens]
    logits_SV.masked_fill_(allowed_SV == 0, -torch.inf)
