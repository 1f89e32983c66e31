"""An attention branch in one call: see `branches`. Shapes: T tokens, M hidden size."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from bateleur.eagle.heads.spec import CProduct
from bateleur.metadata import PagedAttentionMetadata
from bateleur.metadata.backends import _native
from bateleur.metadata.native.structs import Struct, fields
from bateleur.runner.models.native.branches import REFUSED, Matrix, functions, no_memory

Caches = tuple[Tensor, Tensor]


class _Attention(Struct):
    _fields_: ClassVar = [
        ("qkv", Matrix),
        ("out", Matrix),
        *fields("write attend keys values", "heads kv_heads size blocks block_size window"),
        ("scale", ctypes.c_double),
    ]


class _Rows(Struct):
    _fields_: ClassVar = fields("table lengths starts slots", "table_stride width rows")


class PagedRows:
    """The rows of a pass, as all attention layers of it read them."""

    def __init__(self, meta: PagedAttentionMetadata) -> None:
        """Of rows that `takes` says are read."""
        self.meta, table = meta, meta.block_table
        self.num_slots, self.width = meta.slot_mapping.shape[0], table.shape[1]
        self._struct = _Rows(
            table.data_ptr(),
            meta.seq_lens.data_ptr(),
            meta.query_start_loc.data_ptr(),
            meta.slot_mapping.data_ptr(),
            table.stride(0),
            self.width,
            meta.seq_lens.shape[0],
        )
        self.at = ctypes.addressof(self._struct)

    @staticmethod
    def takes(meta: PagedAttentionMetadata) -> bool:
        """Whether its tensors are of the kinds that are read, and as many as they say."""
        table, lengths, starts, slots = (
            meta.block_table,
            meta.seq_lens,
            meta.query_start_loc,
            meta.slot_mapping,
        )
        kinds = table.dtype, lengths.dtype, starts.dtype, slots.dtype
        dense = lengths.is_contiguous() and starts.is_contiguous() and slots.is_contiguous()
        narrow = torch.int32
        return (
            kinds == (narrow, narrow, narrow, torch.int64)
            and dense
            and table.stride(1) == 1
            and 0 <= meta.num_decodes <= lengths.shape[0]
        )


class AttentionCall:
    """The branch over these caches, which stay where they are."""

    def __init__(
        self,
        qkv: CProduct,
        out: CProduct,
        heads: int,
        scale: float,
        window: int | None,
        caches: Caches,
    ) -> None:
        """Over caches that `takes` says are read."""
        blocks, self._block_size, kv_heads, size = caches[0].shape
        self.caches, self._held = caches, (qkv, out)
        made = self._struct = _Attention(Matrix.of(qkv), Matrix.of(out), scale=scale)
        made.point(
            **_native.addresses(),
            keys=caches[0],
            values=caches[1],
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            blocks=blocks,
            block_size=self._block_size,
            window=window or 0,
        )
        self._at = ctypes.addressof(made)
        self._columns, self._room, self._width = qkv.columns, qkv.rows + heads * size, out.rows

    @staticmethod
    def takes(caches: Caches, kv_heads: int, size: int) -> bool:
        """Whether caches are of the kind that is read, of so many heads of that size."""
        return all(
            each.dtype == torch.float32 and each.is_contiguous() and each.shape[2:] == (kv_heads, size)
            for each in caches
        )

    def __call__(self, x_TM: Tensor, rows: PagedRows, rotary: tuple[Tensor, ...]) -> Tensor | None:
        """(T, M) of x (T, M) float32; None where a row is refused.

        rotary: cosine and signed sine (T, 1, R), or nothing.
        """
        tokens = x_TM.shape[0]
        assert (x_TM.shape[1], x_TM.stride(1), x_TM.dtype) == (self._columns, 1, torch.float32)
        fits = rows.num_slots == tokens and rows.meta.num_decodes <= tokens
        if not fits or rows.meta.max_seq_len > rows.width * self._block_size:
            return None
        cos = sin = None
        if rotary:
            cos, sin = rotary
            if cos.dtype != torch.float32 or cos.stride(2) != 1 or cos.stride() != sin.stride():
                return None
        y_TM, room = x_TM.new_empty(tokens, self._width), x_TM.new_empty(tokens * self._room)
        failed = functions()["attention_rows"](
            self._at, rows.at, x_TM.data_ptr(), x_TM.stride(0), tokens,
            None if cos is None else cos.data_ptr(), None if sin is None else sin.data_ptr(),
            0 if cos is None else cos.stride(0), 0 if cos is None else cos.shape[2],
            room.data_ptr(), y_TM.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if failed == REFUSED:
            return None
        if failed:
            raise no_memory(tokens)
        return y_TM
