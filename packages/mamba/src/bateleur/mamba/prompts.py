"""Where the scan cuts the prompts of a step, and which pages it keeps."""

# Shape letters: Pf prompt rows of a step.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bateleur.mamba.spec import CacheLayout, MambaCacheMode, PromptScan, at_least, one_of
from bateleur.metadata import upload

Ints = npt.NDArray[np.int32]
FLA_TILE = 64
"""Tokens of a tile in the kernels of fla-core, counted from the begin of each row."""


@dataclass(frozen=True, slots=True)
class WholeRows:
    """What the kernels of fla-core are told beside the rows, where no state is kept but the last of each."""

    tiles: Tensor
    """(tiles, 2) int32: row, and which of the row's tiles."""
    write: Tensor
    """(Pf,) int64, slot for the state after each row; 0 where it is not kept."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The chunks of the prompts of a step; tokens, rows and chunks are counted from the first prompt's."""

    query_start_loc: Tensor
    """(Pf + 1,) int32."""
    chunk_start_loc: Tensor
    """(chunks + 1,) int32, first token of each chunk."""
    chunk_row: Tensor
    """(chunks,) int32, row of each chunk."""
    chunk_write: Tensor
    """(chunks,) int64, slot for the page after each chunk; 0 where it is not kept."""
    row_chunk_loc: Tensor
    """(Pf + 1,) int32, first chunk of each row."""
    max_chunks_per_row: int
    whole: WholeRows | None = None
    """There where a scan of fla-core is to take the step, and None where bateleur's own is."""

    @property
    def form(self) -> PromptScan:
        """What scans the prompts of this step, of recurrences that have a choice."""
        return PromptScan.OWN if self.whole is None else PromptScan.FLA

    @classmethod
    def none(cls, device: torch.device | str) -> Prompts:
        """No prompts."""
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(zero, zero, zero[:0], torch.zeros(0, dtype=torch.int64, device=device), zero, 0)


class PromptCutter:
    """Cuts prompts into chunks: at the ends of blocks, and between two of these at multiples of `chunk_size` tokens.

    Blocks of any size so end with a chunk, and have one more than their tokens fill at most. Counted from the start of
    each request, so that the same tokens share a chunk however a scheduler parts the prompt at such places. The page
    after a chunk is kept at the end of a row and at the ends of blocks, in the column of that many tokens; a boundary
    that nobody wants to publish has no slot in the table, and is dropped with that.

    With `PromptScan.FLA` it also says of each step whether the kernels of fla-core serve: they give the state after a
    row, and none inside of it, so a step in which a row passes the end of a block keeps to bateleur's own.

    Raises ValueError for a chunk size below 1, or a scan that is no `PromptScan`.
    """

    def __init__(
        self,
        layout: CacheLayout,
        chunk_size: int,
        max_num_reqs: int,
        scan: PromptScan = PromptScan.OWN,
    ) -> None:
        at_least("chunk_size", chunk_size, 1)
        one_of("scan", scan, PromptScan)
        self.scan = scan
        self.block_size = layout.block_size
        self.chunk_size = min(chunk_size, self.block_size)
        """Tokens of a chunk at most."""
        self._per_block = -(-self.block_size // self.chunk_size)
        # Then the ends of blocks are among the multiples of the chunk size.
        self._even = layout.mode is MambaCacheMode.NONE or self.block_size % self.chunk_size == 0
        self._iota = np.arange(max_num_reqs, dtype=np.int32)

    def cut(self, starts: Ints, computed: Ints, table: Tensor) -> Prompts:
        """The chunks of the prompts of a step.

        starts (Pf + 1,) int32 from 0, where the tokens of each row begin; computed (Pf,) int32, tokens before the step,
        which decide where in a chunk each row begins; table (Pf, columns), where the slots are found. Rows without
        tokens, whose `computed` is 0, get no chunk. All parts go to the device in one copy, but what `whole` has.
        """
        num_rows, upper = len(computed), computed + (starts[1:] - starts[:-1])
        first_R = self._places(computed)
        counts_R = self._places(upper - 1) - first_R + 1
        row_chunk_loc = np.zeros(num_rows + 1, np.int32)
        np.add.accumulate(counts_R, out=row_chunk_loc[1:])
        total = int(row_chunk_loc[-1])
        if total > len(self._iota):
            self._iota = np.arange(2 * total, dtype=np.int32)
        row = self._iota[:num_rows].repeat(counts_R)
        # Places to cut, but the last one of a row, which ends with the row.
        ends = self._place(self._iota[:total] + (first_R - row_chunk_loc[:-1]).repeat(counts_R))
        ends = np.minimum(ends, upper.repeat(counts_R))
        chunk_start_loc = np.zeros(total + 1, np.int32)
        np.add(ends, (starts[:-1] - computed).repeat(counts_R), out=chunk_start_loc[1:])
        kept = ends % self.block_size == 0
        kept[row_chunk_loc[1:] - 1] = True
        cell = (ends - 1) // self.block_size + row * table.shape[1]
        parts = (starts, chunk_start_loc, row, row_chunk_loc, cell, kept)
        packed = np.concatenate(parts, dtype=np.int32)  # a fresh array: nothing writes to it after the upload
        on_device = upload(packed, table.device)
        loc, chunk_loc, rows, row_loc, at, keep = torch.split_with_sizes(on_device, [*map(len, parts)])
        chunk_write = table.reshape(-1).index_select(0, at).mul_(keep).long()
        whole = None
        if self.scan is PromptScan.FLA and np.count_nonzero(kept) == np.count_nonzero(counts_R):
            whole = _whole(starts, row_chunk_loc, chunk_write)
        return Prompts(loc, chunk_loc, rows, chunk_write, row_loc, int(np.maximum.reduce(counts_R)), whole)

    def _places(self, tokens: Ints) -> Ints:
        """How many places to cut there are among the first `tokens` tokens of a request."""
        if self._even:
            return tokens // self.chunk_size
        blocks, rest = np.divmod(tokens, self.block_size)
        places: Ints = blocks * self._per_block + rest // self.chunk_size
        return places

    def _place(self, index: Ints) -> Ints:
        """Tokens before place `index`, counted from 0."""
        if self._even:
            return (index + 1) * self.chunk_size
        blocks, rest = np.divmod(index, self._per_block)
        tokens: Ints = blocks * self.block_size + np.minimum((rest + 1) * self.chunk_size, self.block_size)
        return tokens


def _whole(starts: Ints, row_chunk_loc: Ints, chunk_write: Tensor) -> WholeRows:
    """The tiles of rows of which none keeps a state but that of its last chunk; a row without tokens keeps none."""
    device = chunk_write.device
    counts_R = -(-(starts[1:] - starts[:-1]) // FLA_TILE)
    row = np.arange(len(counts_R)).repeat(counts_R)
    rank = np.arange(len(row)) - (np.add.accumulate(counts_R) - counts_R).repeat(counts_R)
    # An upload of its own: at an address that kernels need not be compiled for anew.
    tiles = upload(np.stack([row, rank], 1).astype(np.int32), device)
    last = np.where(counts_R > 0, row_chunk_loc[1:], 0).astype(np.int64)
    write = upload(last, device)
    return WholeRows(tiles, torch.cat((chunk_write.new_zeros(1), chunk_write)).index_select(0, write))
