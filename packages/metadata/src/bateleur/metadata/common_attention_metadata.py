"""What attention kernels are told about a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from bateleur.metadata.fields import FIELDS
from bateleur.metadata.seq_len_bound import SeqLenBound


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Real and padded size of a batch, decided before anything is staged.

    Attributes:
        num_reqs, num_tokens: real rows and tokens.
        padded_reqs, padded_tokens: sizes the kernels see; equal to the real ones where nothing is padded.
        max_query_len: a promise about every row, not an observation: 1 for a decode key, ``1 + drafts`` for a
            verifying one, anything up to ``num_tokens`` for a mixed one.
    """

    num_reqs: int
    num_tokens: int
    padded_reqs: int
    padded_tokens: int
    max_query_len: int

    def __post_init__(self) -> None:
        """Check that the sizes can belong to one batch."""
        if not 0 <= self.num_reqs <= self.padded_reqs:
            raise ValueError(
                f"padded_reqs: {self.padded_reqs} must be at least num_reqs {self.num_reqs} >= 0"
            )
        if not self.num_reqs <= self.num_tokens <= self.padded_tokens:
            raise ValueError(
                f"num_tokens: {self.num_tokens} must be at least num_reqs {self.num_reqs} (one token a row) "
                f"and at most padded_tokens {self.padded_tokens}"
            )
        if self.max_query_len < 1 or self.num_tokens > self.num_reqs * self.max_query_len:
            raise ValueError(
                f"max_query_len: {self.max_query_len} must be at least 1 and let {self.num_reqs} rows hold "
                f"{self.num_tokens} tokens"
            )

    @classmethod
    def of(cls, num_reqs: int, num_tokens: int, max_query_len: int) -> BatchShape:
        """A shape without padding."""
        return cls(num_reqs, num_tokens, num_reqs, num_tokens, max_query_len)


@dataclass(frozen=True, slots=True)
class CommonAttentionMetadata:
    """One staged batch, as every attention-like layer sees it. Nothing is optional; nobody may write to it.

    All arrays are views of persistent buffers: they hold this batch until the next ``stage`` of the buffers
    they came from. Shapes, with ``R = num_reqs``, ``T = num_tokens`` (both padded), ``G`` KV-cache groups;
    dtype, home and padding value of each field are in :data:`bateleur.metadata.FIELDS`.

    Attributes:
        num_reqs, num_tokens: padded sizes, those of the arrays: ``padded_reqs`` and ``padded_tokens`` of the shape.
        num_actual_reqs, num_actual_tokens: real sizes, also in a graph (where vLLM's ``num_actual_tokens`` is padded).
        max_query_len: promised upper bound of the query lengths.
        max_seq_len: upper bound of ``seq_lens``: the batch's own at run time, the model's under capture.
        input_ids, positions: (T,).
        query_start_loc, query_start_loc_cpu: (R + 1,).
        seq_lens, num_computed_tokens, is_prefilling: (R,).
        block_tables: G tensors (R, max_blocks of the group).
        slot_mappings: G tensors (T,).
        seq_len_bound: host bounds of ``seq_lens``.
        generation: of the buffers, when this was staged; at another one they hold another batch.
    """

    num_reqs: int
    num_tokens: int
    num_actual_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_computed_tokens: Tensor
    block_tables: tuple[Tensor, ...]
    slot_mappings: tuple[Tensor, ...]
    is_prefilling: Tensor
    seq_len_bound: SeqLenBound
    generation: int = 0

    def __post_init__(self) -> None:
        """Refuse a missing or short bound here, where it has a name, instead of in the kernel that it sizes."""
        if not isinstance(self.seq_len_bound, SeqLenBound):
            raise ValueError(f"seq_len_bound: is {self.seq_len_bound!r}; every batch carries a SeqLenBound")
        if len(self.seq_len_bound.upper) != self.num_reqs:
            raise ValueError(
                f"seq_len_bound: has {len(self.seq_len_bound.upper)} rows for a batch of {self.num_reqs}"
            )

    def unpadded(self) -> CommonAttentionMetadata:
        """The same batch without padded rows and tokens: every field sliced as the table says, none lost.

        ``max_query_len`` and ``max_seq_len`` stay: they are bounds, and padding does not raise them.
        """
        reqs, tokens = self.num_actual_reqs, self.num_actual_tokens
        if (reqs, tokens) == (self.num_reqs, self.num_tokens):
            return self
        arrays = batch_arrays(partial(leading, field_values(self)), reqs, tokens)
        return dataclasses.replace(self, num_reqs=reqs, num_tokens=tokens, **arrays)


def field_values(batch: CommonAttentionMetadata) -> dict[str, Any]:
    """Every field of the table with its value in ``batch``: a tensor, a tuple of tensors or a numpy array."""
    return {
        name: getattr(batch.seq_len_bound, field.bound_attr) if field.bound_attr else getattr(batch, name)
        for name, field in FIELDS.items()
    }


def batch_arrays(view: Callable[[str, int], Any], num_reqs: int, num_tokens: int) -> dict[str, Any]:
    """What a batch of so many rows and tokens carries, as arguments of :class:`CommonAttentionMetadata`, where ``view``
    gives the leading entries of a field.
    """
    arrays: dict[str, Any] = {}
    halves: dict[str, Any] = {}
    for name, field in FIELDS.items():
        found = view(name, field.leading_dim.size(num_reqs, num_tokens))
        if field.bound_attr:
            halves[field.bound_attr] = found
        else:
            arrays[name] = found
    return arrays | {"seq_len_bound": SeqLenBound(**halves)}


def leading(values: Mapping[str, Any], name: str, extent: int) -> Any:
    """The leading entries of a field, of each group where it has several arrays."""
    value = values[name]
    return tuple(each[:extent] for each in value) if FIELDS[name].per_group else value[:extent]
