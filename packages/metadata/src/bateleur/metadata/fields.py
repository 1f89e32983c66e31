"""The field table: every array of a batch, declared once.

Allocation, padding, slicing, poisoning, validation, the spies of the conformance kit and the page docs/fields.md all
walk :data:`FIELDS`; only what computes a value names its field again. There is no "keep" rule: every padded entry has
a defined value, whatever an earlier step left behind.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal

import torch

NULL_BLOCK = 0
"""Block id that no request owns; padded block-table entries point at it."""

PAD_SLOT = -1
"""Slot of a token whose keys and values must not be stored."""


class LeadingDim(Enum):
    """What the leading dimension of a field counts."""

    REQS = "reqs"
    REQS_PLUS_1 = "reqs + 1"
    TOKENS = "tokens"
    REQS_BY_BLOCKS = "reqs, blocks"

    def size(self, num_reqs: int, num_tokens: int) -> int:
        """Length of the leading dimension for a batch of ``num_reqs`` rows and ``num_tokens`` tokens."""
        if self is LeadingDim.TOKENS:
            return num_tokens
        return num_reqs + 1 if self is LeadingDim.REQS_PLUS_1 else num_reqs


class Pad(Enum):
    """A padding value that is not the same in every batch."""

    REPEAT_LAST = "repeat_last"
    """The last real entry: the token count."""
    BUILDER = "builder"
    """What the consumer of the batch declares (``seq_len_fill``, 0 or 1), applied by the stager."""


@dataclass(frozen=True, slots=True)
class Field:
    """One declared array.

    ``doc`` says what an entry is, ``used_by`` who needs it. ``pad`` is the value of the entries behind the real ones.
    Fields live where kernels run unless they are ``on_host``. ``per_group`` fields are tuples with one tensor per
    KV-cache group. ``part`` is set for the two halves of the length bound: they are numpy arrays, found at
    ``batch.seq_len_bound.<part>``.
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
        """Padding value in a batch of ``num_tokens`` real tokens."""
        if isinstance(self.pad, Pad):
            return num_tokens if self.pad is Pad.REPEAT_LAST else seq_len_fill
        return self.pad

    @property
    def poison(self) -> int | bool:
        """A value no consumer survives unnoticed: out of any vocabulary or table; a flag's pad negated."""
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
          doc="Host twin of query_start_loc, always exact.", used_by="builders: the split, plans, chunk tables"),
    Field("seq_lens", LeadingDim.REQS, torch.int32, pad=Pad.BUILDER,
          doc="Keys of each row after this step: computed tokens plus query length.", used_by="attention kernels"),
    Field("num_computed_tokens", LeadingDim.REQS, torch.int32,
          doc="Tokens of each row whose keys and states existed before this step.",
          used_by="recurrent kernels: whether and where a state exists"),
    Field("is_prefilling", LeadingDim.REQS, torch.bool, pad=False, on_host=True,
          doc="The row is still consuming its prompt.", used_by="builders: the split"),
    Field("seq_lens_cpu_upper_bound", LeadingDim.REQS, torch.int32, on_host=True, bound_attr="upper",
          doc="Upper bound of seq_lens as the host knows it.", used_by="builders: sizes of grids and workspaces"),
    Field("seq_lens_cpu_exact", LeadingDim.REQS, torch.bool, pad=True, on_host=True, bound_attr="exact",
          doc="The bound of the row is its true length.", used_by="builders that need a length of one row"),
    Field("block_tables", LeadingDim.REQS_BY_BLOCKS, torch.int32, pad=NULL_BLOCK, per_group=True,
          doc="Cache blocks of each row, in order; the tail of a real row is padding too.",
          used_by="attention kernels (blocks of keys and values), recurrent kernels (states)"),
    Field("slot_mappings", LeadingDim.TOKENS, torch.int64, pad=PAD_SLOT, per_group=True,
          doc="Cache slot each token is stored in; padding starts at the actual token count.",
          used_by="the kernel that stores keys and values"),
)  # fmt: skip

FIELDS: Mapping[str, Field] = MappingProxyType({field.name: field for field in _TABLE})
"""All fields of a batch by name, in declaration order."""
