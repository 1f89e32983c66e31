"""`CudagraphDispatcher`: which graphs to capture, and which graph a batch runs on or why it runs eagerly."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from sys import maxsize
from types import MappingProxyType

from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor, UnpaddedBatch, Variant
from bateleur.cudagraph.modes import CudaGraphMode


class DispatchReason(StrEnum):
    """Why a batch runs on a graph or eagerly.

    DECODE, MIXED and PIECEWISE name the kind of graph. IDLE means that no data-parallel rank has a batch. The others
    name the constraint that makes a batch run eagerly, and are listed in the order of the checks. If the batch
    violates different constraints of different graphs, the reason is the constraint that is checked last.
    """

    DECODE = "decode graph"
    MIXED = "full graph"
    PIECEWISE = "piecewise graph"
    NO_GRAPHS = "eager: the dispatcher has no graphs"
    HAS_PREFILL = "eager: no graphs for batches with a prefill row"
    VARIANT = "eager: no graphs for this variant"
    QUERY_LEN = "eager: no graph for this query length"
    NUM_REQS = "eager: more requests than the largest graph"
    NUM_TOKENS = "eager: more tokens than the largest graph"
    NOT_CAPTURED = "eager: the graph is not captured"
    IDLE = "idle: no rank has a batch"


_GRAPH_KINDS = (DispatchReason.DECODE, DispatchReason.MIXED, DispatchReason.PIECEWISE)
"""Kinds of graphs, the preferred one first."""

_CONSTRAINTS = [reason for reason in DispatchReason if reason not in (*_GRAPH_KINDS, DispatchReason.IDLE)]
NUM_CONSTRAINTS_MET: dict[DispatchReason, int] = {reason: index for index, reason in enumerate(_CONSTRAINTS)}
"""Number of constraints that an eager batch met before the violated one. The graph with the most is the nearest."""


@dataclass(frozen=True, slots=True)
class DispatchDecision:
    """The graph that one batch runs on and the padding to add before staging, or why it runs eagerly.

    ``reason``: the kind of graph. For an eager batch, the constraint that the batch violates, see `DispatchReason`.
    """

    descriptor: BatchExecutionDescriptor | None
    reason: DispatchReason
    pad_tokens: int = 0
    pad_reqs: int = 0


class DispatchCounter:
    """Counts dispatch decisions.

    Attributes:
        by_reason: number of decisions by reason.
        num_graph_tokens: tokens of the batches that ran on graphs, padding included.
        num_pad_tokens: padding tokens of the batches that ran on graphs.
    """

    def __init__(self) -> None:
        self.by_reason: Counter[DispatchReason] = Counter()
        self.num_graph_tokens = 0
        self.num_pad_tokens = 0

    def count(self, decision: DispatchDecision) -> None:
        """Add one dispatch decision to the counts."""
        self.by_reason[decision.reason] += 1
        if decision.descriptor is not None:
            self.num_graph_tokens += decision.descriptor.num_tokens
            self.num_pad_tokens += decision.pad_tokens

    @property
    def total(self) -> int:
        """Number of counted dispatch decisions."""
        return self.by_reason.total()


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Consecutive batch sizes (numbers of requests) that run on the same graph, or eagerly for the same reason."""

    first: int
    last: int
    descriptor: BatchExecutionDescriptor | None
    reason: DispatchReason

    @property
    def num_sizes(self) -> int:
        """Number of batch sizes in the range."""
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class Coverage:
    """The graphs that batches of 1, 2, ... requests with `query_len` tokens each run on, by range of sizes.

    ``mean_padding``, ``worst_padding``: padding tokens / tokens of the graph (padding included), in [0, 1): mean and
    maximum over the batch sizes that run on a graph.
    """

    query_len: int
    ranges: tuple[SizeRange, ...]
    mean_padding: float
    worst_padding: float

    @classmethod
    def of(cls, query_len: int, decisions: Sequence[DispatchDecision]) -> Coverage:
        """Summarise the dispatch decisions for batches of 1, 2, ... requests with `query_len` tokens each."""
        ranges: list[SizeRange] = []
        for num_reqs, decision in enumerate(decisions, start=1):
            first = num_reqs
            if ranges and (ranges[-1].descriptor, ranges[-1].reason) == (decision.descriptor, decision.reason):
                first = ranges.pop().first
            ranges.append(SizeRange(first, num_reqs, decision.descriptor, decision.reason))
        padding = [d.pad_tokens / d.descriptor.num_tokens for d in decisions if d.descriptor is not None] or [0.0]
        return cls(query_len, tuple(ranges), sum(padding) / len(padding), max(padding))

    @property
    def gaps(self) -> tuple[SizeRange, ...]:
        """Ranges of batch sizes that run eagerly."""
        return tuple(each for each in self.ranges if each.descriptor is None)

    def table(self) -> str:
        """Return one line of text per range, and a last line with the padding."""
        total = self.ranges[-1].last
        missing = sum(each.num_sizes for each in self.gaps)
        lines = [f"{'requests':>12}  runs on"]
        for each in self.ranges:
            size = str(each.first) if each.first == each.last else f"{each.first}-{each.last}"
            lines.append(f"{size:>12}  {each.reason if each.descriptor is None else each.descriptor}")
        lines.append(
            f"{total - missing} of {total} sizes at {self.query_len} tokens per request on a graph; "
            f"padding {self.mean_padding:.1%} on average, {self.worst_padding:.1%} at worst"
        )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _KeyGroup:
    """Graph keys of one kind (DECODE, MIXED or PIECEWISE), variant and uniform query length, smallest first.

    No size of a key is smaller than in the key before, so a batch that fits any key of the group fits its last key.
    """

    kind: DispatchReason
    keys: tuple[BatchExecutionDescriptor, ...]


@dataclass(frozen=True, slots=True)
class CudagraphDispatcher:
    """The keys of the graphs to capture for one model, and the choice of a graph for each batch. Make it with `make`.

    It corresponds to vLLM's class of this name. ``keys`` are in capture order. FULL keys come before PIECEWISE keys: if
    memory or time runs out during capture, the decode graphs exist, which save the most time per step. Within a mode,
    large keys come first, so that small keys reuse their memory.
    """

    mode: CudaGraphMode
    keys: tuple[BatchExecutionDescriptor, ...]
    _groups: Mapping[Variant, tuple[_KeyGroup, ...]] = field(repr=False, compare=False)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants (such as LoRA ranks) that have graphs of their own."""
        return tuple(self._groups)

    @classmethod
    def make(
        cls,
        mode: CudaGraphMode,
        capture_sizes: Iterable[int],
        *,
        max_num_reqs: int | None = None,
        max_num_tokens: int | None = None,
        query_lens: Sequence[int] = (1,),
        variants: Sequence[Variant] = ((),),
    ) -> CudagraphDispatcher:
        """Make a dispatcher with the graph keys for some capture sizes.

        Args:
            capture_sizes: padded numbers of tokens. For decode graphs, each size is rounded up to a multiple of the
                query length. A size above a limit is lowered to the limit.
            max_num_reqs, max_num_tokens: the engine's limits per step. None: no limit.
            query_lens: tokens per request in decode batches, such as 1 and 1 + the number of draft tokens.
            variants: every variant (such as a LoRA rank) that needs its own graphs.
        """
        sizes, limits = set(capture_sizes), [n for n in (max_num_reqs, max_num_tokens) if n is not None]
        smallest = min((*sizes, *query_lens, *limits), default=1)
        if smallest < 1:
            raise ValueError(f"capture_sizes, limits and query_lens must be at least 1, got {smallest}")
        most_reqs, most_tokens = (maxsize if n is None else n for n in (max_num_reqs, max_num_tokens))
        shapes = {key for size in sizes for key in _keys(mode, size, most_reqs, most_tokens, query_lens)}
        groups = {variant: _groups(replace(key, variant=variant) for key in shapes) for variant in variants}
        keys = [key for of_variant in groups.values() for group in of_variant for key in group.keys]
        return cls(mode, tuple(sorted(keys, reverse=True)), MappingProxyType(groups))

    def dispatch(
        self, batch: UnpaddedBatch, ready: Container[BatchExecutionDescriptor] | None = None
    ) -> DispatchDecision:
        """Choose the graph for a batch, or eager execution with the reason.

        Decode graphs are preferred to the other graphs, then FULL to PIECEWISE, then the smallest graph that fits.

        ready: the captured keys, such as `CudaGraphManager.ready`. None means that all keys are captured.
        """
        reason = DispatchReason.NO_GRAPHS
        # If no graph has the variant, the groups of another variant show which other constraint would fail.
        for group in self._groups.get(batch.variant) or next(iter(self._groups.values()), ()):
            violated = _violated_constraint(group.keys[-1], batch)
            if violated is None:
                for key in group.keys[bisect_left(group.keys, batch.num_tokens, key=attrgetter("num_tokens")) :]:
                    if (ready is None or key in ready) and _violated_constraint(key, batch) is None:
                        pad_reqs = 0 if key.num_reqs is None else key.num_reqs - batch.num_reqs
                        return DispatchDecision(key, group.kind, key.num_tokens - batch.num_tokens, pad_reqs)
                violated = DispatchReason.NOT_CAPTURED
            if NUM_CONSTRAINTS_MET[violated] > NUM_CONSTRAINTS_MET[reason]:
                reason = violated
        return DispatchDecision(None, reason)

    def coverage(
        self, max_num_reqs: int, query_len: int, *, decode_only: bool = True, variant: Variant = ()
    ) -> Coverage:
        """Dispatch batches of 1 .. `max_num_reqs` requests with `query_len` tokens each; summarise the decisions.

        decode_only, variant: of all batches, see `UnpaddedBatch`.
        """
        if max_num_reqs < 1 or query_len < 1:
            raise ValueError(f"max_num_reqs={max_num_reqs} and query_len={query_len} must be at least 1")
        batches = (
            UnpaddedBatch(n, n * query_len, query_len, query_len, decode_only, variant)
            for n in range(1, max_num_reqs + 1)
        )
        return Coverage.of(query_len, [self.dispatch(batch) for batch in batches])


def _keys(
    mode: CudaGraphMode, size: int, most_reqs: int, most_tokens: int, query_lens: Iterable[int]
) -> Iterable[BatchExecutionDescriptor]:
    full, tokens = CudaGraphMode.FULL, min(size, most_tokens)
    for length in query_lens if mode.decode_mode is full else ():
        rows = min(-(-size // length), most_reqs, most_tokens // length)
        if rows:
            yield BatchExecutionDescriptor(full, rows * length, rows, length, length)
    if mode.mixed_mode is full:
        yield BatchExecutionDescriptor(full, tokens, min(tokens, most_reqs), None, tokens)
    elif mode.mixed_mode is CudaGraphMode.PIECEWISE:
        yield BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, tokens)


def _groups(keys: Iterable[BatchExecutionDescriptor]) -> tuple[_KeyGroup, ...]:
    """Group the keys of one variant by kind and query length, the preferred group first."""
    found: dict[tuple[int, int], list[BatchExecutionDescriptor]] = {}
    for key in sorted(keys):
        found.setdefault((_GRAPH_KINDS.index(_kind(key)), key.uniform_query_len or 0), []).append(key)
    return tuple(_KeyGroup(_GRAPH_KINDS[kind], tuple(keys)) for (kind, _), keys in sorted(found.items()))


def _kind(key: BatchExecutionDescriptor) -> DispatchReason:
    if key.mode is CudaGraphMode.PIECEWISE:
        return DispatchReason.PIECEWISE
    return DispatchReason.MIXED if key.uniform_query_len is None else DispatchReason.DECODE


def _violated_constraint(key: BatchExecutionDescriptor, batch: UnpaddedBatch) -> DispatchReason | None:
    """Return the first constraint of `key` that `batch` violates. None if the graph can run the batch."""
    if key.uniform_query_len is not None and not batch.decode_only:
        return DispatchReason.HAS_PREFILL
    if key.variant != batch.variant:
        return DispatchReason.VARIANT
    if key.uniform_query_len not in (None, batch.query_len):
        return DispatchReason.QUERY_LEN
    if key.num_reqs is not None and batch.num_reqs > key.num_reqs:
        return DispatchReason.NUM_REQS
    if batch.num_tokens > key.num_tokens:
        return DispatchReason.NUM_TOKENS
    return None
