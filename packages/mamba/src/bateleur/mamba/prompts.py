"""Where the scan cuts the prompts of a step, and which pages it keeps."""

# Shape letters: Pf prompt rows of a step.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


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
    """Cuts prompts at multiples of `chunk_size`, counted from the start of each request.

    So the same tokens share a chunk however a scheduler cuts the prompt at such multiples. The page after a chunk is
    kept at the end of a row and on the boundaries of blocks of `block_size` tokens.
    """

    def __init__(self, chunk_size: int, block_size: int, max_num_reqs: int) -> None:
        self.chunk_size = chunk_size
        self.block_size = block_size
        self._iota = np.arange(max_num_reqs, dtype=np.int32)
        self._multiples = self._iota * chunk_size

    def cut(
        self,
        starts: npt.NDArray[np.int32],
        computed: npt.NDArray[np.int32],
        upper: npt.NDArray[np.int32],
        table: Tensor,
    ) -> Prompts:
        """The chunks of the prompts that a step takes from `computed` to `upper` tokens.

        starts (Pf + 1,) from 0; computed and upper (Pf,), tokens before and after the step, which decide where in a
        chunk each row begins; table (Pf, columns), where the slots are found. Rows without tokens have neither and get
        no chunk. All parts go to the device in one copy.
        """
        size, num_rows = self.chunk_size, len(computed)
        first_R = computed // size
        counts_R = (upper - 1) // size - first_R + 1
        ends_R = np.add.accumulate(counts_R, dtype=np.int32)
        total = int(ends_R[-1])
        if total > len(self._iota):
            self._iota = np.arange(2 * total, dtype=np.int32)
            self._multiples = self._iota * size
        # A fresh array: nothing writes to it after the upload.
        packed = np.empty(2 * num_rows + 3 + 4 * total, np.int32)
        a, b = num_rows + 1, num_rows + 2 + total
        c = b + total
        chunk_start_loc, row_chunk_loc = packed[a:b], packed[c : c + num_rows + 1]
        cells, kept = packed[-2 * total : -total], packed[-total:]
        packed[:a] = starts
        packed[b : b + total] = self._iota[:num_rows].repeat(counts_R)
        row_chunk_loc[0] = 0
        row_chunk_loc[1:] = ends_R
        # Every chunk begins at a multiple of the chunk size, but the first of a row, which begins with the row.
        origin_R = starts[:-1] - computed + (first_R - row_chunk_loc[:-1]) * size
        np.add(origin_R.repeat(counts_R), self._multiples[:total], out=chunk_start_loc[:total])
        chunk_start_loc[row_chunk_loc] = starts
        # The page after a chunk is kept at the end of a row and on block boundaries, in the column of that many tokens.
        ends = chunk_start_loc[1:] + (computed - starts[:-1]).repeat(counts_R)
        np.equal(ends % self.block_size, 0, out=kept)
        kept[row_chunk_loc[1:] - 1] = 1
        np.floor_divide(ends - 1, self.block_size, out=cells)
        cells += packed[b:c] * table.shape[1]
        on_device = torch.from_numpy(packed)
        if table.device.type != "cpu":
            on_device = on_device.to(table.device, non_blocking=True)
        most = int(np.maximum.reduce(counts_R))
        parts = torch.split_with_sizes(on_device, [a, total + 1, total, num_rows + 1, total, total])
        chunk_write = table.reshape(-1).index_select(0, parts[4]).mul_(parts[5]).long()
        return Prompts(parts[0], parts[1], parts[2], chunk_write, parts[3], most)
