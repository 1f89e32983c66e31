"""Values that requests add to logits: always (`logit_bias`), or after certain tokens (`bad_words`).

A bad word adds -inf to its last token if its other tokens have just been generated. One table for all requests stores
both as entries (prefix, token, value); a step adds all of them at once.
"""

# Shape letters: M rows of the request table, L rows of logits, N entries, J places of a request, P tokens of a prefix,
# K drafts at most, V vocabulary.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.runner.utils.device import DeviceCopies, upload

_ANY, _NONE = -2, -1
"""In a prefix: any token. In generated tokens: none yet."""


class _Entries(NamedTuple):
    """Logit entries of one request whose prefixes have the same padded width, on the host."""

    tokens: NDArray[np.int64]
    values: NDArray[np.float32]
    prefixes: NDArray[np.int64]


class _Table(NamedTuple):
    """Logit entries of all requests whose prefixes have the same width, on the device.

    owners: (N,) int64 rows of the request table.
    """

    owners: Tensor
    tokens: Tensor
    values: Tensor
    prefixes: Tensor


class Biases:
    """Logit biases and bad words of the running requests, by row of the request table.

    max_rows: rows of the table (M). tokens: first token of the logits, and one after the last. device: device of the
    logits.
    """

    def __init__(self, max_rows: int, tokens: tuple[int, int], device: torch.device) -> None:
        self._upload = partial(upload, device=device)
        self._copies = DeviceCopies(device)
        self._first, self._end = tokens
        self._entries: dict[int, list[_Entries]] = {}
        """Entries by row."""
        self._tables: list[_Table] | None = None
        """Tables of all entries; None after a change."""
        self._follows = np.zeros(max_rows, np.bool_)
        """Rows with prefixes."""
        self._tails = torch.full((max_rows, 0), _NONE, dtype=torch.int64, device=device)
        """(M, P) the last tokens that each of these rows has generated."""

    def admit(self, row: int, bias: Mapping[int, float], words: Sequence[Sequence[int]], output: Sequence[int]) -> bool:
        """Set the entries of table row `row`.

        Returns whether the request has any, including those of other vocabulary shards.
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
        if longest := max(by_width, default=0):
            self._follow(row, longest, output)
        return bool(entries)

    def release(self, row: int) -> None:
        """Clear table row `row`, which may be free."""
        if self._entries.pop(row, None) is not None:
            self._tables = None
        self._follows[row] = False

    def add_(self, logits: Tensor, rows: NDArray[np.int64], before: Tensor | None) -> None:
        """Add the entries of the requests in `rows` to the logits in place; see `Sampler.process` for the arguments.

        logits: (L, V), contiguous. The logit rows of one request are adjacent.
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

    def count(self, rows: NDArray[np.int64], token_ids: Tensor) -> None:
        """Append emitted tokens to the requests in `rows`. token_ids: (R, J) int64 on the device, -1 for no token."""
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
        """Return the entries for tokens of this vocabulary shard, counted from the shard's first token."""
        here = (entries.tokens >= self._first) & (entries.tokens < self._end)
        return _Entries(entries.tokens[here] - self._first, entries.values[here], entries.prefixes[here])

    def _matches(self, table: _Table, drafts: Tensor | None) -> Tensor:
        """Return (N, J) bool: whether the prefix of each entry precedes each of J tokens.

        drafts: (N, J - 1) tokens after the generated ones; None without drafts.
        """
        width = table.prefixes.shape[1]
        known = self._tails[:, self._tails.shape[1] - width :].index_select(0, table.owners)
        if drafts is not None:
            known = torch.cat((known, drafts), 1)
        prefixes_N1P = table.prefixes.unsqueeze(1)
        return ((known.unfold(1, width, 1) == prefixes_N1P) | (prefixes_N1P == _ANY)).all(2)

    def _follow(self, row: int, width: int, output: Sequence[int]) -> None:
        """Keep the last `width` generated tokens of a request on the device."""
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
    """Return the padded width of a prefix with `length` tokens: the next power of two, so that there are few tables."""
    return 1 << (length - 1).bit_length() if length else 0


def _words(width: int, words: Sequence[Sequence[int]]) -> _Entries:
    prefixes = np.full((len(words), width), _ANY)
    for prefix, word in zip(prefixes, words, strict=True):
        prefix[width - len(word) + 1 :] = word[:-1]
    tokens = np.array([word[-1] for word in words])
    return _Entries(tokens, np.full(len(words), -np.inf, np.float32), prefixes)
