"""The field table: declares every array of a batch once. All code that handles fields, and docs/fields.md, use it."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal

import torch

NULL_BLOCK = 0
"""Block id that no request owns; padded entries of block tables."""

PAD_SLOT = -1
"""Slot of a token whose keys and values are not stored."""


class LeadingDim(Enum):
    """What the first dimension of a field counts: requests, requests + 1, tokens, or requests again for block tables,
    whose second dimension counts blocks.
    """

    REQS = "reqs"
    REQS_PLUS_1 = "reqs + 1"
    TOKENS = "tokens"
    REQS_BY_BLOCKS = "reqs, blocks"

    def size(self, num_reqs: int, num_tokens: int) -> int:
        """Return the length of the dimension in a batch of ``num_reqs`` rows and ``num_tokens`` tokens."""
        if self is LeadingDim.TOKENS:
            return num_tokens
        return num_reqs + (self is LeadingDim.REQS_PLUS_1)


class Pad(Enum):
    """A padding value that is not the same for every batch: the last real entry, or the builders' ``seq_len_fill``."""

    REPEAT_LAST = "repeat_last"
    """The last real entry, which is the token count."""
    BUILDER = "builder"
    """``seq_len_fill`` of the metadata builders, 0 or 1."""


@dataclass(frozen=True, slots=True)
class Field:
    """Declaration of one array.

    Attributes:
        name, leading_dim, dtype: name in the batch, meaning of the leading dimension, dtype.
        doc, used_by: meaning of an entry, and its readers.
        pad: value of padded entries.
        on_host: the array is in host memory; else on the device of the kernels.
        per_group: the field is a tuple with one tensor per KV-cache group.
        bound_attr: attribute of ``batch.seq_len_bound`` that holds the array (numpy), if the field is part of the
            bound.
    """

    name: str
    leading_dim: LeadingDim
    dtype: torch.dtype
    _: KW_ONLY
    doc: str
    used_by: str
    pad: int | bool | Pad = 0
    on_host: bool = False
    per_group: bool = False
    bound_attr: Literal["", "upper", "exact"] = ""

    def padding(self, num_tokens: int, seq_len_fill: int) -> int | bool:
        """Return the padding value after ``num_tokens`` real tokens. ``seq_len_fill``: padding of ``seq_lens``."""
        if isinstance(self.pad, Pad):
            return num_tokens if self.pad is Pad.REPEAT_LAST else seq_len_fill
        return self.pad

    @property
    def poison(self) -> int | bool:
        """An invalid value that shows stale reads: out of range, or the negated padding of a bool field."""
        if self.dtype is torch.bool:
            return not self.pad
        return torch.iinfo(self.dtype).max - 6


_TABLE = (
    Field("input_ids", LeadingDim.TOKENS, torch.int32, doc="Token ids.", used_by="the embedding"),
    Field("positions", LeadingDim.TOKENS, torch.int64,
          doc="Absolute position of each token.", used_by="rotary embeddings"),
    Field("query_start_loc", LeadingDim.REQS_PLUS_1, torch.int32, pad=Pad.REPEAT_LAST,
          doc="Exclusive prefix sum of the query lengths; never decreases.", used_by="kernels over ragged rows"),
    Field("query_start_loc_cpu", LeadingDim.REQS_PLUS_1, torch.int32, pad=Pad.REPEAT_LAST, on_host=True,
          doc="Host copy of query_start_loc, always exact.", used_by="builders: the split, plans, chunk tables"),
    Field("seq_lens", LeadingDim.REQS, torch.int32, pad=Pad.BUILDER,
          doc="Keys of each row after this step: computed tokens plus query length.", used_by="attention kernels"),
    Field("num_computed_tokens", LeadingDim.REQS, torch.int32,
          doc="Tokens of each row computed before this step.",
          used_by="recurrent kernels: position of the state"),
    Field("is_prefilling", LeadingDim.REQS, torch.bool, pad=False, on_host=True,
          doc="The row is still processing its prompt.", used_by="builders: the split"),
    Field("seq_lens_cpu_upper_bound", LeadingDim.REQS, torch.int32, on_host=True, bound_attr="upper",
          doc="Upper bound of seq_lens on the host.", used_by="builders: sizes of grids and workspaces"),
    Field("seq_lens_cpu_exact", LeadingDim.REQS, torch.bool, pad=True, on_host=True, bound_attr="exact",
          doc="The bound of the row is its true length.", used_by="builders that need the length of single rows"),
    Field("block_tables", LeadingDim.REQS_BY_BLOCKS, torch.int32, pad=NULL_BLOCK, per_group=True,
          doc="Cache blocks of each row, in order; columns after the last block are padding.",
          used_by="attention kernels (blocks of keys and values), recurrent kernels (states)"),
    Field("slot_mappings", LeadingDim.TOKENS, torch.int64, pad=PAD_SLOT, per_group=True,
          doc="Cache slot of each token; padding starts at the actual token count.",
          used_by="the kernel that stores keys and values"),
)  # fmt: skip

FIELDS: Mapping[str, Field] = MappingProxyType({field.name: field for field in _TABLE})
"""All fields of a batch by name, in declaration order."""
