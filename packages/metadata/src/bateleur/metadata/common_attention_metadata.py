"""The staged batch that metadata builders of all layers read."""

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
    """Real and padded sizes of a batch, decided before staging.

    ``max_query_len``: guaranteed upper bound of every query length. 1 for a decode graph, ``1 + drafts`` for a
    verification graph, up to ``num_tokens`` for a mixed batch.
    """

    num_reqs: int
    num_tokens: int
    padded_reqs: int
    padded_tokens: int
    max_query_len: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_reqs <= self.padded_reqs:
            raise ValueError(f"padded_reqs: {self.padded_reqs} must be at least num_reqs {self.num_reqs} >= 0")
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
        """Return a shape without padding."""
        return cls(num_reqs, num_tokens, num_reqs, num_tokens, max_query_len)


@dataclass(frozen=True, slots=True)
class CommonAttentionMetadata:
    """One staged batch. No field is optional. Treat all arrays as read-only.

    The arrays are views of :class:`InputBuffers` and are valid until its next ``stage``. Shapes: R = ``num_reqs`` and
    T = ``num_tokens``, both padded; G KV-cache groups. :data:`bateleur.metadata.FIELDS` has dtype, device and padding
    value of each field.

    Attributes:
        num_reqs, num_tokens: padded sizes. max_query_len: upper bound of all query lengths, see :class:`BatchShape`.
        num_actual_reqs, num_actual_tokens: real sizes, under graphs too (vLLM's ``num_actual_tokens`` is padded there).
        max_seq_len: upper bound of ``seq_lens``; ``max_model_len`` during a graph capture.
        input_ids, positions: (T,). query_start_loc, query_start_loc_cpu: (R + 1,).
        seq_lens, num_computed_tokens, is_prefilling: (R,). seq_len_bound: upper bounds of ``seq_lens`` on the host.
        block_tables, slot_mappings: G tensors, (R, max_blocks of the group) and (T,).
        generation: ``generation`` of the buffers at staging; if the buffers have another one, the views are stale.
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
        if not isinstance(self.seq_len_bound, SeqLenBound):
            raise ValueError(f"seq_len_bound: is {self.seq_len_bound!r}; every batch carries a SeqLenBound")
        if len(self.seq_len_bound.upper) != self.num_reqs:
            raise ValueError(f"seq_len_bound: has {len(self.seq_len_bound.upper)} rows for a batch of {self.num_reqs}")

    def unpadded(self) -> CommonAttentionMetadata:
        """Return the same batch with all fields sliced to the real requests and tokens.

        ``max_query_len`` and ``max_seq_len`` stay the same: padding does not raise them.
        """
        reqs, tokens = self.num_actual_reqs, self.num_actual_tokens
        if (reqs, tokens) == (self.num_reqs, self.num_tokens):
            return self
        arrays = leading_arrays(partial(leading, field_values(self)), reqs, tokens)
        return dataclasses.replace(self, num_reqs=reqs, num_tokens=tokens, **arrays)


def field_values(batch: CommonAttentionMetadata) -> dict[str, Any]:
    """Return every field of a batch by name: a tensor, a tuple of tensors (one per group) or a numpy array."""
    return {
        name: getattr(batch.seq_len_bound, field.bound_attr) if field.bound_attr else getattr(batch, name)
        for name, field in FIELDS.items()
    }


def leading(values: Mapping[str, Any], name: str, size: int) -> Any:
    """Return the first ``size`` entries of field ``name``; a tuple if the field has one tensor per KV-cache group."""
    return tuple(each[:size] for each in values[name]) if FIELDS[name].per_group else values[name][:size]


def leading_arrays(view: Callable[[str, int], Any], num_reqs: int, num_tokens: int) -> dict[str, Any]:
    """Return all arrays of a :class:`CommonAttentionMetadata` by name, cut to a number of requests and tokens.

    The result has a :class:`SeqLenBound` ``seq_len_bound`` in place of its host arrays ``seq_lens_cpu_upper_bound`` and
    ``seq_lens_cpu_exact``. view: ``view(name, size)`` returns the first ``size`` entries of an array.
    """
    arrays = {name: view(name, field.leading_dim.size(num_reqs, num_tokens)) for name, field in FIELDS.items()}
    bound = SeqLenBound(arrays.pop("seq_lens_cpu_upper_bound"), arrays.pop("seq_lens_cpu_exact"))
    return arrays | {"seq_len_bound": bound}
