"""Splits the prefills of a step into chunks, and selects the state slots that keep the states after chunks.

Pf is the number of prefill rows (requests) of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bateleur.mamba.spec import CacheLayout, PromptScan, at_least, one_of
from bateleur.metadata import expand_ranges, upload

Ints = npt.NDArray[np.int32]
FLA_TILE = 64
"""Tokens of a tile in the kernels of fla-core, counted from the start of each row."""


@dataclass(frozen=True, slots=True)
class FlaTiles:
    """Tiles (row, index in the row) for fla-core's kernels, and a slot for the last state of each request.

    Used in steps that keep only the last state of each request.
    """

    tiles: Tensor
    """(tiles, 2) int32: row, and index of the tile in the row."""
    write: Tensor
    """(Pf,) int64, slot for the state after each row; 0 if it is not kept."""


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """Chunks of the prefill rows (requests) of a step. Tokens, rows and chunks are counted from the first prefill.

    The tensors are arguments of `ops.ssd_scan_varlen`. `fla_tiles` is set if the kernels of fla-core scan this step.
    """

    query_start_loc: Tensor
    """(Pf + 1,) int32."""
    chunk_start_loc: Tensor
    """(chunks + 1,) int32, first token of each chunk."""
    chunk_row: Tensor
    """(chunks,) int32, row of each chunk."""
    chunk_write: Tensor
    """(chunks,) int64, slot for the state after each chunk; 0 if it is not kept."""
    row_chunk_loc: Tensor
    """(Pf + 1,) int32, first chunk of each row."""
    max_chunks_per_row: int
    fla_tiles: FlaTiles | None = None
    """Set if the kernels of fla-core scan this step; None for the kernels of this package."""

    @property
    def prompt_scan(self) -> PromptScan:
        """Which kernels run recurrences over the prefills of this step, if there are several."""
        return PromptScan.OWN if self.fla_tiles is None else PromptScan.FLA

    @classmethod
    def empty(cls, device: torch.device | str) -> PrefillChunks:
        """Return the chunks of a step without prefills."""
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(zero, zero, zero[:0], torch.zeros(0, dtype=torch.int64, device=device), zero, 0)


class PrefillChunker:
    """Splits prefills into chunks: at the ends of blocks, and inside a block at multiples of `chunk_size` tokens.

    Positions are counted from the start of the request, so a token is in the same chunk however the scheduler splits
    the prompt at these positions. States after n tokens, at the ends of blocks and of a request's last chunk, are kept
    in block-table column (n - 1) // block_size. If the table has no slot there, the state is not kept.

    With `PromptScan.FLA`, steps in which no request passes the end of a block use the kernels of fla-core, which return
    only the last state of a request.

    Args:
        layout: block-table layout.
        chunk_size: maximum number of tokens of a chunk; a chunk never exceeds a block.
        scan: kernels that scan prefills.

    Raises ValueError for a chunk size below 1, and for a `scan` that is not a `PromptScan`.
    """

    def __init__(self, layout: CacheLayout, chunk_size: int, scan: PromptScan = PromptScan.OWN) -> None:
        at_least("chunk_size", chunk_size, 1)
        one_of("scan", scan, PromptScan)
        self.scan = scan
        self.block_size = layout.block_size
        self.chunk_size = min(chunk_size, self.block_size)
        """Maximum number of tokens of a chunk."""
        self._chunks_per_block = -(-self.block_size // self.chunk_size)

    def split(self, starts: Ints, computed: Ints, table: Tensor) -> PrefillChunks:
        """Split the prefills of a step, with one copy from host to device (and two more for `fla_tiles`).

        Args:
            starts: (prefills + 1,) int32, first token of each request, from 0.
            computed: (prefills,) int32, tokens before the step; 0 in rows without tokens, which get no chunk.
            table: (prefills, columns) integer block table of state slots.
        """
        upper = computed + (starts[1:] - starts[:-1])
        first_R = self._num_ends(computed)
        counts_R = self._num_ends(upper - 1) - first_R + 1
        zero = np.zeros(1, np.int32)
        row_chunk_loc = np.append(zero, counts_R.cumsum(dtype=np.int32))
        row = np.arange(len(computed), dtype=np.int32).repeat(counts_R)
        ends = self._end(np.arange(len(row), dtype=np.int32) + (first_R - row_chunk_loc[:-1])[row])
        ends = np.minimum(ends, upper[row])  # the last chunk ends with the row
        chunk_start_loc = np.append(zero, ends + (starts[:-1] - computed)[row])
        keep = ends % self.block_size == 0
        keep[row_chunk_loc[1:] - 1] = True
        cell = (ends - 1) // self.block_size + row * table.shape[1]
        parts = (starts, chunk_start_loc, row, row_chunk_loc, cell, keep)
        packed = np.concatenate(parts, dtype=np.int32)  # a new array: nothing writes to it during the upload
        on_device = upload(packed, table.device)
        loc, chunk_loc, rows, row_loc, cells, kept = torch.split_with_sizes(on_device, [*map(len, parts)])
        chunk_write = table.reshape(-1).index_select(0, cells).mul_(kept).long()
        tiles = None
        if self.scan is PromptScan.FLA and np.count_nonzero(keep) == np.count_nonzero(counts_R):
            tiles = _fla_tiles(starts, row_chunk_loc, chunk_write)
        return PrefillChunks(loc, chunk_loc, rows, chunk_write, row_loc, int(counts_R.max()), tiles)

    def _num_ends(self, tokens: Ints) -> Ints:
        """Return the number of chunks that end within the first `tokens` tokens of a request."""
        blocks, rest = np.divmod(tokens, self.block_size)
        ends: Ints = blocks * self._chunks_per_block + rest // self.chunk_size
        return ends

    def _end(self, index: Ints) -> Ints:
        """Return the number of tokens of a request up to the end of its chunk `index`."""
        blocks, rest = np.divmod(index, self._chunks_per_block)
        tokens: Ints = blocks * self.block_size + np.minimum((rest + 1) * self.chunk_size, self.block_size)
        return tokens


def _fla_tiles(starts: Ints, row_chunk_loc: Ints, chunk_write: Tensor) -> FlaTiles:
    """Return fla-core's tiles for requests that keep only their last state; rows without tokens keep none."""
    counts_R = -(-(starts[1:] - starts[:-1]) // FLA_TILE)
    rows = counts_R.nonzero()[0]
    row, rank = expand_ranges(rows, np.zeros_like(rows), counts_R[rows])
    # A separate upload: its alignment is fixed, so Triton does not compile the kernels again.
    tiles = upload(np.stack([row, rank], 1).astype(np.int32), chunk_write.device)
    write = upload(np.where(counts_R > 0, row_chunk_loc[1:], 0), chunk_write.device)
    return FlaTiles(tiles, torch.cat((chunk_write.new_zeros(1), chunk_write)).index_select(0, write))
