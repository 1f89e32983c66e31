"""Where the scan cuts the prompts of a step, and which pages it keeps."""

# Shape letters: Pf prompt rows of a step.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bateleur.mamba.spec import CacheLayout, MambaCacheMode, at_least

Ints = npt.NDArray[np.int32]


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

    Raises ValueError for a chunk size below 1.
    """

    def __init__(self, layout: CacheLayout, chunk_size: int, max_num_reqs: int) -> None:
        at_least("chunk_size", chunk_size, 1)
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
        tokens, whose `computed` is 0, get no chunk. All parts go to the device in one copy.
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
        on_device = torch.from_numpy(packed)
        if table.device.type != "cpu":
            on_device = on_device.to(table.device, non_blocking=True)
        loc, chunk_loc, rows, row_loc, at, keep = torch.split_with_sizes(on_device, [*map(len, parts)])
        chunk_write = table.reshape(-1).index_select(0, at).mul_(keep).long()
        return Prompts(loc, chunk_loc, rows, chunk_write, row_loc, int(np.maximum.reduce(counts_R)))

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
