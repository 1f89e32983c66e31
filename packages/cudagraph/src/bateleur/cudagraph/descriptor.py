"""The key of a captured graph: everything about a batch that is frozen into it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering

from bateleur.cudagraph.modes import CudaGraphMode

Variant = tuple[int | str, ...]
"""What else distinguishes graphs (adapters, draft length, ...); () is the plain one."""


@total_ordering
@dataclass(frozen=True, slots=True)
class BatchExecutionDescriptor:
    """The padded shape of a batch that one graph serves.

    mode: PIECEWISE or FULL, how the graph was made.
    num_tokens: tokens of the padded batch.
    num_reqs: requests of the padded batch; None means that requests are not padded (PIECEWISE).
    uniform_query_len: every row has exactly this many tokens; None where rows may differ.
    max_query_len: no row has more tokens than this; None where nothing captured depends on it (PIECEWISE).
    variant: see `Variant`.

    Descriptors are ordered by mode (PIECEWISE first), then by size. Raises `ValueError` for a contradictory shape.
    """

    mode: CudaGraphMode
    num_tokens: int
    num_reqs: int | None = None
    uniform_query_len: int | None = None
    max_query_len: int | None = None
    variant: Variant = ()

    def __post_init__(self) -> None:
        if self.mode not in (CudaGraphMode.PIECEWISE, CudaGraphMode.FULL):
            raise ValueError(f"mode={self.mode.name} of a descriptor must be PIECEWISE or FULL")
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens={self.num_tokens} must be at least 1")
        if self.mode is CudaGraphMode.FULL and (self.num_reqs is None or self.max_query_len is None):
            raise ValueError("num_reqs and max_query_len must be given for a FULL graph: both are baked in")
        if self.num_reqs is not None and not 1 <= self.num_reqs <= self.num_tokens:
            raise ValueError(f"num_reqs={self.num_reqs} must be in [1, num_tokens={self.num_tokens}]")
        length = self.uniform_query_len
        if length is not None and (
            self.num_reqs is None or self.num_reqs * length != self.num_tokens or self.max_query_len != length
        ):
            raise ValueError(
                f"uniform_query_len={length} must equal max_query_len={self.max_query_len}, and times "
                f"num_reqs={self.num_reqs} give num_tokens={self.num_tokens}"
            )

    def _sort_key(self) -> tuple[object, ...]:
        variant = tuple((type(part).__name__, part) for part in self.variant)
        sizes = (self.num_tokens, self.num_reqs or 0, self.uniform_query_len or 0, self.max_query_len or 0)
        return (self.mode is CudaGraphMode.FULL, *sizes, variant)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, BatchExecutionDescriptor):
            return NotImplemented
        return self._sort_key() < other._sort_key()

    def __str__(self) -> str:
        parts = [f"{self.mode.name} {self.num_tokens} tokens"]
        if self.num_reqs is not None:
            parts.append(f"{self.num_reqs} requests")
        if self.uniform_query_len is not None:
            parts.append(f"{self.uniform_query_len} each")
        elif self.max_query_len is not None:
            parts.append(f"at most {self.max_query_len} each")
        return ", ".join(parts + ([f"variant {self.variant}"] if self.variant else []))
