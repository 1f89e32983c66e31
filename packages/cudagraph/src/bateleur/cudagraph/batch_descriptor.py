"""Shapes of a batch: `UnpaddedBatch` before padding, `BatchExecutionDescriptor` as one captured graph has it."""

from dataclasses import dataclass
from functools import total_ordering

from bateleur.cudagraph.modes import CudaGraphMode

Variant = tuple[int | str, ...]
"""Anything else that needs its own graph, such as a LoRA rank or a draft length. `()` is the default variant."""


@total_ordering
@dataclass(frozen=True, slots=True)
class BatchExecutionDescriptor:
    """The padded batch shape that one graph was captured for, and the key of the graph. Ordered by mode (PIECEWISE
    first), then by size.

    Attributes:
        mode: PIECEWISE or FULL.
        num_reqs: requests of the padded batch. None if requests are not padded (PIECEWISE).
        uniform_query_len: tokens of every request. None if requests may have different numbers of tokens.
        max_query_len: largest number of tokens of a request. None if nothing in the graph depends on it (PIECEWISE).
        variant: anything else that needs its own graph, such as a LoRA rank.
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
            raise ValueError("num_reqs and max_query_len must be given for a FULL graph, which fixes both")
        if self.num_reqs is not None and not 1 <= self.num_reqs <= self.num_tokens:
            raise ValueError(f"num_reqs={self.num_reqs} must be in [1, num_tokens={self.num_tokens}]")
        length = self.uniform_query_len
        if length is not None and (
            self.num_reqs is None or self.num_reqs * length != self.num_tokens or self.max_query_len != length
        ):
            raise ValueError(
                f"uniform_query_len={length} must equal max_query_len={self.max_query_len}, and "
                f"uniform_query_len * num_reqs={self.num_reqs} must equal num_tokens={self.num_tokens}"
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


@dataclass(frozen=True, slots=True)
class UnpaddedBatch:
    """The sizes of a batch before padding: what `CudagraphDispatcher.dispatch` needs to choose a graph.

    Attributes:
        query_len: tokens of every request. None if requests have different numbers of tokens.
        max_query_len: largest number of tokens of a request.
        decode_only: whether every request has finished its prompt. The caller must say this, because
            prefill chunks of equal length have the same sizes as a decode batch.
        variant: as in `BatchExecutionDescriptor`.
    """

    num_reqs: int
    num_tokens: int
    query_len: int | None
    max_query_len: int
    decode_only: bool
    variant: Variant = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_reqs <= self.num_tokens:
            raise ValueError(f"num_reqs={self.num_reqs} must be in [1, num_tokens={self.num_tokens}]")
        if not self.num_tokens <= self.num_reqs * self.max_query_len or self.max_query_len > self.num_tokens:
            raise ValueError(
                f"max_query_len={self.max_query_len} is impossible for num_reqs={self.num_reqs} with "
                f"num_tokens={self.num_tokens}"
            )
        length = self.query_len
        if length is not None and (length != self.max_query_len or length * self.num_reqs != self.num_tokens):
            raise ValueError(
                f"query_len={length} must equal max_query_len={self.max_query_len}, and "
                f"query_len * num_reqs={self.num_reqs} must equal num_tokens={self.num_tokens}"
            )
