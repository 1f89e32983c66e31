"""Verification of the same rows of a table step after step, on a CPU."""

# Shape letters: M rows of the table, R rows of a step, L rows of logits, K drafts at most, J = 1 + K, V vocabulary.

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.eagle import native
from bateleur.eagle.law import Law
from bateleur.eagle.noise import Lanes
from bateleur.metadata.native import address


class _Steady(ctypes.Structure):
    """`Steady` of `verify.c`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("laws", "words", "seeds", "starts", "num_drafts")),
        *((name, ctypes.c_void_p) for name in ("places", "tokens", "next")),
        *((name, ctypes.c_int64) for name in ("rows", "most")),
    ]


class DraftTable(NamedTuple):
    """Rows of a table of drafts."""

    places: NDArray[np.int64]
    """(R,) which rows these are."""
    next_ids: NDArray[np.int64]
    """(M, J) of each row its last token, then drafts."""
    num_drafts: NDArray[np.int32]
    """(M,) how many of these are tested, as far as there are logits behind them."""


class SteadyRows:
    """`verify` under COUPLED of rows whose drafts lie in a table, which also gets the token that comes next of each:
    one call in C. From step to step only logits, positions and what the table holds are others.

    For whoever has a compiler: see `native.takes`.
    """

    def __init__(
        self,
        table: DraftTable,
        starts: Tensor,
        first_token: Tensor,
        seeds: Tensor,
        law: Law | None,
        lanes: Lanes,
    ) -> None:
        """starts: (R + 1,) int32, first row of logits of each row. first_token: (R,) int64, the token of the step that
            these are behind. seeds: (R,) int64.
        law: of each of the L rows of logits, without penalties; None where all are greedy. lanes: of the whole
            vocabulary, or more.
        """
        places, next_ids, num_drafts = table
        (count,), (_, width) = places.shape, next_ids.shape
        values = None if law is None else law.values.contiguous()
        tensors = starts.contiguous(), first_token.contiguous(), seeds.contiguous(), lanes.words.contiguous()
        starts, first_token, seeds, words = tensors
        assert next_ids.flags.c_contiguous
        assert places.flags.c_contiguous
        self._kept = (table, values, *tensors)
        """What C reads, where it reads it."""
        self._num_lanes = len(words)
        self._shape = (count, 1 + 2 * width)
        self._call = native.coupled_ends()
        self._book = _Steady(
            laws=None if values is None else values.data_ptr(),
            words=words.data_ptr(),
            seeds=seeds.data_ptr(),
            starts=starts.data_ptr(),
            num_drafts=address(num_drafts),
            places=address(places),
            tokens=first_token.data_ptr(),
            next=address(next_ids),
            rows=count,
            most=width - 1,
        )
        self._book_address = ctypes.addressof(self._book)

    def verify(self, logits: Tensor, positions: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """What is emitted, or None where it takes the whole law to tell: then nothing was written to the table.

        logits: (L, V) that `native.takes`. positions: (T,) int64, dense, of the tokens of the step.

        Returns (R, 2 + J + K) int64, of each row how many tokens it emits and whether the logits behind them are bad,
        the tokens, and the drafts that were tested, -1 behind the last of each; and (R,) int64, the first column again.
        """
        assert logits.shape[1] <= self._num_lanes
        packed, emitted = np.empty(self._shape, np.int64), np.empty(self._shape[0], np.int64)
        left_open = self._call(
            self._book_address, logits.data_ptr(), logits.stride(0), logits.dtype is torch.bfloat16, *logits.shape,
            positions.data_ptr(), address(packed), address(emitted), torch.get_num_threads(),
        )  # fmt: skip
        return None if left_open else (packed, emitted)
